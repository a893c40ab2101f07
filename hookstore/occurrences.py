"""Which samples were part of which batches, as the annotations say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookstore.errors import CaptureWarning, CorruptRunError, MissingCaptureError, OptionError
from hookstore.joined import join

if TYPE_CHECKING:
    from hookstore.rows import RowIndex
    from hookstore.run import Run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Where a sample was part of a batch.

    Attributes
    ----------
    phase : str
        Phase of the batch.
    epoch, batch : int
        Its coordinates.
    index : int
        Position of the sample in the batch.
    attempt : int
        Recording of the run.
    """

    phase: str
    epoch: int
    batch: int
    index: int
    attempt: int


class AnnotatedBatch(NamedTuple):
    """An annotated batch.

    Attributes
    ----------
    phase : str
        Its phase.
    epoch, batch : int
        Its coordinates.
    attempt : int
        Recording of the run.
    num_times : int
        How often the clock stood there to annotate it, each time with the same values.
    num_samples : int
        Samples in it.
    """

    phase: str
    epoch: int
    batch: int
    attempt: int
    num_times: int
    num_samples: int


class SampleIndex:
    """Finds samples by the values of one annotation.

    Parameters
    ----------
    run : Run
        The run.
    by : str
        Name of the annotation.
    attempt : int or None
        Only what this recording has; by default, for each batch, the latest that has the annotation.

    Raises
    ------
    MissingCaptureError
        If the run has no annotation of that name.
    OptionError
        If it has not one value for each sample.
    """

    def __init__(self, run: Run, by: str, attempt: int | None) -> None:
        known = run.annotations
        if by not in known:
            there_is = f"there are {', '.join(map(repr, known))}" if known else "recorder.annotate() stores them"
            raise MissingCaptureError(f"{run.path}: the batches have no annotation {by!r}; {there_is}", kind="annotation")
        read = sorted(self._read(run, known[by]._all, by, attempt), key=lambda one: one[0])
        values = [array for _, array in read]
        self.batches = [AnnotatedBatch(*place, len(array)) for place, array in read]
        self._starts = np.cumsum([0, *(batch.num_samples for batch in self.batches)])
        self.by = by
        self._sorted: Array | None = None
        self._by_value: dict[Any, list[int]] = {}
        numbers = _numbers(values)
        if numbers is not None:
            self._order = np.argsort(numbers, kind="stable")
            self._sorted = numbers[self._order]
        else:
            for position, value in enumerate(one for array in values for one in array.tolist()):
                self._by_value.setdefault(value, []).append(position)

    @staticmethod
    def _read(run: Run, index: RowIndex, by: str, attempt: int | None) -> Iterator[tuple[tuple[str, int, int, int, int], Array]]:
        """Yield the values of each batch, behind its phase, epoch, batch and attempt, and how often it was annotated."""
        for phase in index.phases:
            for leaf in (by, f"{by}.offsets"):
                last = index.last_captured(phase, leaf, attempt)
                is_once = len(last) == len(index.only_leaf(index.captured(phase, attempt), leaf))
                for position in last.tolist():
                    place = index.place(position)
                    where = {"epoch": place["epoch"], "batch": place["batch"]}
                    try:
                        read = _values(run, index, [position] if is_once else index.again(position).tolist(), by)
                    except (MissingCaptureError, CorruptRunError) as error:
                        _warn_of(phase, where, str(error))
                        continue
                    if not all(_is_same(one, read[-1]) for one in read[:-1]):
                        _warn_of(phase, where, f"it was annotated {len(read)} times, with other samples")
                        continue
                    if read[-1].ndim != 1:
                        raise OptionError(
                            f"by: expected an annotation with one value for each sample, and {by!r} has shape {read[-1].shape} in {phase} "
                            f"epoch {where['epoch']}, batch {where['batch']}",
                            option="by",
                        )
                    yield (phase, *where.values(), place["attempt"], len(read)), read[-1]

    def find(self, value: Any) -> list[tuple[Occurrence, AnnotatedBatch]]:
        """Return where a sample occurs, each with its batch, in order of phase, epoch, batch and index."""
        if self._sorted is None:
            try:
                positions = self._by_value.get(value.item() if getattr(value, "shape", None) == () else value, [])
            except TypeError:  # what cannot be hashed is no sample's
                positions = []
        else:
            wanted = np.asarray(value)
            if wanted.ndim or wanted.dtype.kind not in "biuf":
                return []
            exact = wanted.item()
            with np.errstate(all="ignore"):
                wanted = np.asarray(wanted).astype(self._sorted.dtype)
            if wanted.item() != exact and exact == exact:  # noqa: PLR0124 (NaN alone differs from itself)  # no number of their type equals it; NumPy would compare it rounded
                return []
            low, high = self._sorted.searchsorted(wanted, "left"), self._sorted.searchsorted(wanted, "right")
            positions = self._order[low:high].tolist()
        found = []
        for position in positions:
            number = int(self._starts.searchsorted(position, "right")) - 1
            of = self.batches[number]
            found.append((Occurrence(of.phase, of.epoch, of.batch, position - int(self._starts[number]), of.attempt), of))
        return found

    @property
    def examples(self) -> list[Any]:
        """Some values that there are."""
        return list(self._by_value)[:5] if self._sorted is None else np.unique(self._sorted[:1000])[:5].tolist()


def _values(run: Run, index: RowIndex, positions: list[int], by: str) -> list[Array]:
    """Read an annotation of one batch, as often as it was given."""
    places = [index.place(position) for position in positions]
    read = [run.read(place) for place in places]
    if places[0]["leaf"] == by:
        return read
    here = places[0]
    same = index.only_leaf(index.find(here["phase"], epoch=here["epoch"], batch=here["batch"], call=0), f"{by}.utf8")
    letters = index.only_attempt(index.only_captured(same), here["attempt"]).tolist()
    if len(letters) != len(read):
        raise MissingCaptureError(f"of its {len(read)} texts {len(letters)} have letters", kind="annotation")
    try:
        return [
            np.asarray(join("texts", {}, {"utf8": run.read(index.place(position)), "offsets": offsets}))
            for position, offsets in zip(letters, read, strict=True)
        ]
    except ValueError as error:
        raise CorruptRunError(f"its texts make no sense ({error})", path=run.path) from error


def _is_same(one: Array, other: Array) -> bool:
    """Say whether an annotation has been given twice with the same values; NaN is the same as itself."""
    return np.array_equal(one, other) or (one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def _warn_of(phase: str, where: dict[str, int], why: str) -> None:
    warnings.warn(
        f"the samples of {phase} epoch {where['epoch']}, batch {where['batch']} are not found: {why}", CaptureWarning, stacklevel=6
    )


def _numbers(values: list[Array]) -> Array | None:
    """Return all values one after another, as int64 or float64 if that loses nothing."""
    kinds = {array.dtype.kind for array in values}
    if kinds <= set("biu") and not any(array.dtype == np.uint64 for array in values):
        return np.concatenate([np.empty(0, dtype=np.int64), *values]).astype(np.int64)
    if kinds == {"f"}:
        return np.concatenate([array.astype(np.float64) for array in values])
    return None
