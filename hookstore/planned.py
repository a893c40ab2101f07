"""`Plan`: what a recording will take, as numbers and as a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_MOST_SHOWN = 40
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of a layer, as it will be recorded: a row of a `Plan`.

    Attributes
    ----------
    phase, layer, kind, leaf, portion : str
        As in the manifest.
    shape : tuple of int
        Of one capture, before it is padded; where it varies, that of its array's chunks.
    dtype : str
        As which it is stored.
    captures_per_step : float
        How many of it are captured in a step in which it is due.
    bytes_per_step : int
        What they take in shards, checksums and padding included, compression not; 0 where statistics alone are stored.
    num_captures : int
        Tensors stored in the whole training.
    num_summaries : int
        Tensors of which statistics alone are stored.
    total_bytes : int
        What its shards take on disk.
    """

    phase: str
    layer: str
    kind: str
    leaf: str
    portion: str
    shape: tuple[int, ...]
    dtype: str
    captures_per_step: float
    bytes_per_step: int
    num_captures: int
    num_summaries: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a recording will take, see `hookstore.plan`. As text it is a table.

    Attributes
    ----------
    tensors : tuple of PlannedTensor
        What is captured, most bytes first.
    num_epochs : int
        Epochs of the training.
    num_batches : dict
        Batches of an epoch, for each phase.
    bytes_per_step : int
        What a training step takes in shards in which everything is due.
    mean_bytes_per_step : float
        The same, of an average step.
    total_bytes : int
        What the run takes on disk, in blocks of 4,096 bytes.
    most_bytes : int
        The same where captures come so slowly (less than one of an array in half a second) that each begins a page of its own.
    num_captures, num_summaries : int
        Tensors that are stored, and those of which statistics alone are.
    num_arrays, num_shards, num_files : int
        Zarr arrays, their shard files, and all files.
    buffer_bytes : int
        Size of the staging buffer.
    path : str or None
        Where the run is to be.
    free_bytes : int or None
        What is free on the disk there.
    bandwidth_bytes_per_s : float or None
        What the disk sustains, as given.
    is_compressed : bool
        Whether a codec is used, so that the bytes are the most that it can come to.
    is_estimated : bool
        Whether captures could not be counted exactly.
    notes : tuple of str
        What is not known or not counted, in sentences.
    """

    tensors: tuple[PlannedTensor, ...]
    num_epochs: int
    num_batches: Mapping[str, int]
    bytes_per_step: int
    mean_bytes_per_step: float
    total_bytes: int
    most_bytes: int
    num_captures: int
    num_summaries: int
    num_arrays: int
    num_shards: int
    num_files: int
    buffer_bytes: int
    path: str | None
    free_bytes: int | None
    bandwidth_bytes_per_s: float | None
    is_compressed: bool
    is_estimated: bool
    notes: tuple[str, ...]

    @property
    def bytes_by_layer(self) -> dict[str, int]:
        """What each layer's shards take in the whole training, most first."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            found[tensor.layer] = found.get(tensor.layer, 0) + tensor.total_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def fits(self) -> bool | None:
        """Whether there is room for it on the disk; ``None`` where no path was given."""
        return None if self.free_bytes is None else self.total_bytes <= self.free_bytes

    @property
    def holds_step(self) -> bool:
        """Whether the staging buffer holds a step in which everything is due, so that the writer has until the next one."""
        return self.bytes_per_step <= self.buffer_bytes

    @property
    def write_s(self) -> float | None:
        """Seconds that writing takes, where the bandwidth was given."""
        return None if self.bandwidth_bytes_per_s is None else self.total_bytes / self.bandwidth_bytes_per_s

    def __str__(self) -> str:
        return "\n".join([*table(self.headings, self.lines, self.num_texts), "", *self.summary])

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the table."""
        return ("layer", "kind", "part", "shape", "dtype", "a step", "bytes a step", "captures", "in all")

    @property
    def num_texts(self) -> int:
        """How many of its columns hold texts; numbers come after them."""
        return 5

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """Lines of the table, with the rest in one where they are many."""
        lines = [_line(tensor) for tensor in self.tensors[:_MOST_SHOWN]]
        rest = self.tensors[_MOST_SHOWN:]
        if rest:
            per_step, captures, total = (
                sum(getattr(tensor, name) for tensor in rest) for name in ("bytes_per_step", "num_captures", "total_bytes")
            )
            lines.append((f"and {len(rest):,} more", "", "", "", "", "", in_bytes(per_step), f"{captures:,}", in_bytes(total)))
        return lines

    @property
    def summary(self) -> list[str]:
        """The rest of the text, line by line."""
        return [*self._amounts(), *self._limits(), *self.notes]

    def _amounts(self) -> list[str]:
        length = " and ".join(_many(number, f"{phase} batch", "es") for phase, number in self.num_batches.items())
        about = "about " if self.is_estimated else ""
        rows = f", {self.num_summaries:,} with statistics alone" if self.num_summaries else ""
        most = "at most " if self.is_compressed else ""
        return [
            f"{_many(self.num_epochs, 'epoch')} of {length}: {about}{_many(self.num_captures, 'capture')}{rows}; {_many(self.num_arrays, 'array')}, "
            f"{_many(self.num_shards, 'shard')}, "
            f"about {self.num_files:,} files",
            f"a training step with everything due takes {most}{in_bytes(self.bytes_per_step)}, an average one {in_bytes(self.mean_bytes_per_step)}",
            f"in all {most}{in_bytes(self.total_bytes)}"
            + (f" ({in_bytes(self.most_bytes)} if steps take half a second and more)" if self.most_bytes > 1.05 * self.total_bytes else ""),
        ]

    def _limits(self) -> list[str]:
        lines = []
        if self.free_bytes is not None:
            room = f"{in_bytes(self.free_bytes)} are free at {self.path}"
            lines.append(room if self.fits else f"WARNING: it does not fit: {room}")
        if self.write_s is not None and self.bandwidth_bytes_per_s is not None:
            least_s = self.mean_bytes_per_step / self.bandwidth_bytes_per_s
            lines.append(
                f"at {in_bytes(self.bandwidth_bytes_per_s)}/s writing takes {in_seconds(self.write_s)}; the disk keeps up with steps of "
                f"{in_seconds(least_s)} and more on average"
            )
        if not self.holds_step:
            lines.append(
                f"WARNING: buffer_bytes={self.buffer_bytes:,} does not hold such a step: training waits for the disk within it, or captures are dropped "
                "(on_full)"
            )
        return lines


def _many(number: int, what: str, ending: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else ending}"


def _line(tensor: PlannedTensor) -> tuple[str, ...]:
    place = "" if tensor.phase == "train" else f" ({tensor.phase})"
    return (
        (tensor.layer or "''") + place,
        f"{tensor.kind}.{tensor.leaf}" if tensor.leaf else tensor.kind,
        tensor.portion,
        "×".join(map(str, tensor.shape)) or "()",
        tensor.dtype,
        f"{tensor.captures_per_step:,.4g}",
        in_bytes(tensor.bytes_per_step) if tensor.num_captures or not tensor.num_summaries else "statistics",
        f"{tensor.num_captures:,}" if tensor.num_captures or not tensor.num_summaries else f"{tensor.num_summaries:,}",
        in_bytes(tensor.total_bytes),
    )


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], num_texts: int) -> list[str]:
    """Align cells in columns, texts to the left; columns with nothing in them are left out. What terminals obey is replaced."""
    cells = [[_printable(cell) for cell in line] for line in (headings, *lines)]
    used = [column for column in range(len(headings)) if any(line[column] for line in cells[1:])]
    widths = {column: max(len(line[column]) for line in cells) for column in used}
    return [
        "  ".join(
            line[column].ljust(widths[column]) if column < num_texts else line[column].rjust(widths[column]) for column in used
        ).rstrip()
        for line in cells
    ]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def in_bytes(number: float) -> str:
    """Write a number of bytes with three digits."""
    size, unit = float(number), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} bytes" if unit == 0 else f"{size:.3g} {_UNITS[unit]}"


def in_seconds(seconds: float) -> str:
    """Write a time in a unit that suits it."""
    for unit, length_s in (("days", 86_400), ("h", 3_600), ("min", 60), ("s", 1), ("ms", 1e-3)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:,.{0 if seconds >= 100 * length_s else 1}f} {unit}"
    return f"{seconds * 1e6:,.0f} µs"
