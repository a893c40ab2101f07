"""`open`: read a run, whether it is live, killed or finished.

Reading goes by the manifest, never by what lies in the directories. A run is untrusted input: paths, offsets and shapes are checked before they are used.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hookstore.errors import (
    CaptureWarning,
    CorruptRunError,
    FormatVersionError,
    MissingCaptureError,
    NotARunError,
    OptionError,
    UnknownLayerError,
)
from hookstore.format import CRC_BYTES, DTYPES, FORMAT_VERSION, JOURNAL_DIR, KINDS, LAYERS_DIR, RUN_FILE, is_shard_key
from hookstore.manifest import read_manifest
from hookstore.shards import ShardReader

if TYPE_CHECKING:
    import torch


def open(path: str | os.PathLike[str]) -> Run:  # noqa: A001  # hookstore.open, as zarr.open and gzip.open
    """Open a run for reading.

    What is read is what had been acknowledged when the run was opened; open it again to see what a live run has captured since.

    Parameters
    ----------
    path : path-like
        Directory of the run.

    Returns
    -------
    Run
        Usable as a context manager.

    Raises
    ------
    NotARunError
        If there is no run in that directory.
    FormatVersionError
        If a newer hookstore wrote it.
    CorruptRunError
        If its ``run.json`` or its manifest is damaged.
    """
    run_path = os.path.abspath(os.fspath(path))
    return Run(run_path, _read_description(run_path))


def _read_description(run_path: str) -> dict[str, Any]:
    file_path = os.path.join(run_path, RUN_FILE)
    try:
        with builtins.open(file_path, "rb") as file:
            description = json.loads(file.read())
    except (FileNotFoundError, NotADirectoryError):
        raise NotARunError(f"{run_path} is no hookstore run: {_what_is_there(run_path)}", path=run_path) from None
    except ValueError as error:
        raise CorruptRunError(f"{file_path} is no valid JSON: {error}", path=file_path) from error
    if not isinstance(description, dict) or description.get("format") != "hookstore":
        raise NotARunError(f"{run_path} is no hookstore run: its {RUN_FILE} was written by something else", path=run_path)
    version = description.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptRunError(f"{file_path} has format_version {version!r}, expected a whole number from 1 on", path=file_path)
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{run_path} has format version {version}, this hookstore reads up to {FORMAT_VERSION}; update hookstore to open it",
            found=version,
            supported=FORMAT_VERSION,
        )
    layers = description.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and isinstance(layer.get("name"), str) for layer in layers):
        raise CorruptRunError(f"{file_path} lists no layers", path=file_path)
    return description


def _what_is_there(run_path: str) -> str:
    if not os.path.exists(run_path):
        return "it does not exist"
    if not os.path.isdir(run_path):
        return "it is a file"
    entries = sorted(os.listdir(run_path))
    inside = [entry for entry in entries if os.path.exists(os.path.join(run_path, entry, RUN_FILE))]
    if inside:
        return f"it has no {RUN_FILE}, but holds runs: {', '.join(inside[:5])}"
    return f"it has no {RUN_FILE}; it holds {', '.join(entries[:5]) + (' …' if len(entries) > 5 else '') if entries else 'nothing'}"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run holds, in short.

    Attributes
    ----------
    path : str
        Directory of the run.
    state : str
        ``"finished"``, or ``"unfinished"`` while it is recorded or after a kill.
    description : dict
        Contents of ``run.json``.
    num_captures, nbytes : int
        Captured tensors and their bytes.
    statuses : dict
        Manifest rows by status.
    groups : list of dict
        For each layer and kind: ``layer``, ``kind``, ``captures``, ``gaps``, ``shapes``, ``dtypes``, ``nbytes``, ``epochs``, ``phases``.
    """

    path: str
    state: str
    description: dict[str, Any]
    num_captures: int
    nbytes: int
    statuses: dict[str, int]
    groups: list[dict[str, Any]]


class Run:
    """A run, open for reading; made by `open`.

    Attributes
    ----------
    path : str
        Its directory.
    description : dict
        Contents of its ``run.json``.
    """

    def __init__(self, path: str, description: dict[str, Any]) -> None:
        self.path = path
        self.description = description
        self._reader = ShardReader(os.path.join(path, LAYERS_DIR))
        self._table = read_manifest(path)
        self._layouts: dict[str, tuple[tuple[int, ...], str | None]] = {}
        self._indexes: dict[tuple[str, str], _Index] = {}

    @property
    def layers(self) -> list[str]:
        """Names of the recorded layers, in the model's order."""
        return [layer["name"] for layer in self.description["layers"]]

    @property
    def kinds(self) -> list[str]:
        """Kinds that were captured at least once."""
        found = set(pc.unique(self._captured["kind"]).to_pylist())
        return [kind for kind in KINDS if kind in found]

    @property
    def epochs(self) -> list[int]:
        """Epochs in which something was captured."""
        return sorted(pc.unique(self._captured["epoch"]).to_pylist())

    def batches(self, epoch: SupportsIndex, *, phase: str | None = None) -> list[int]:
        """Return the batches of an epoch in which something was captured.

        Parameters
        ----------
        epoch : int
            An epoch.
        phase : str, optional
            Only those of ``"train"`` or of ``"eval"``.

        Raises
        ------
        MissingCaptureError
            If nothing was captured in that epoch.
        """
        rows = self._captured
        wanted = pc.equal(rows["epoch"], int(epoch))
        if phase is not None:
            wanted = pc.and_(wanted, pc.equal(rows["phase"], phase))
        found = sorted(pc.unique(rows["batch"].filter(wanted)).to_pylist())
        if not found:
            raise MissingCaptureError(
                f"{self.path}: nothing was captured in epoch {int(epoch)}{f' in phase {phase!r}' if phase else ''}; there are epochs {_ranges(self.epochs)}",
                epoch=int(epoch),
            )
        return found

    @property
    def manifest(self) -> pa.Table:
        """One row per captured tensor, and one per gap with its reason; columns as in the README's disk format."""
        return self._table

    @cached_property
    def _captured(self) -> pa.Table:
        return self._table.filter(pc.equal(self._table["status"], "ok"))

    def __getitem__(self, layer: str) -> LayerRun:
        """Return one layer, by its name or an alias.

        Raises
        ------
        UnknownLayerError
            If the run has no such layer.
        """
        for known in self.description["layers"]:
            if layer == known["name"] or layer in known.get("aliases", ()):
                return LayerRun(self, known["name"])
        import difflib

        nearest = difflib.get_close_matches(str(layer), self.layers, n=3, cutoff=0.5)
        shown = nearest or self.layers[:10]
        more = f" and {len(self.layers) - len(shown)} more" if not nearest and len(self.layers) > len(shown) else ""
        raise UnknownLayerError(
            f"{self.path} has no layer {layer!r}; {'nearest are' if nearest else 'it has'} {', '.join(map(repr, shown))}{more}",
            layer=str(layer),
        )

    def __contains__(self, layer: object) -> bool:
        return any(layer == known["name"] or layer in known.get("aliases", ()) for known in self.description["layers"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def info(self) -> RunInfo:
        """Say in short what the run holds."""
        captured = self._captured
        statuses = {entry["values"]: entry["counts"] for entry in pc.value_counts(self._table["status"]).to_pylist()}
        groups = []
        for layer in self.layers:
            for kind in KINDS:
                rows = self._rows(layer, kind)
                if rows.num_rows:
                    groups.append(_summary(layer, kind, rows))
        return RunInfo(
            path=self.path,
            state="unfinished" if os.path.isdir(os.path.join(self.path, JOURNAL_DIR)) else "finished",
            description=self.description,
            num_captures=captured.num_rows,
            nbytes=pc.sum(captured["nbytes"]).as_py() or 0,
            statuses=statuses,
            groups=groups,
        )

    def _rows(self, layer: str, kind: str) -> pa.Table:
        return self._table.filter(pc.and_(pc.equal(self._table["layer"], layer), pc.equal(self._table["kind"], kind)))

    def read(self, row: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Read the tensor of one manifest row.

        Parameters
        ----------
        row : dict
            As ``run.manifest.slice(i, 1).to_pylist()[0]`` gives it.

        Returns
        -------
        numpy.ndarray
            Read-only; see `Captures.get`.

        Raises
        ------
        MissingCaptureError
            If the row has no tensor.
        CorruptRunError
            If the row makes no sense or the bytes do not match their checksum.
        """
        array, dtype = self._read_bits(row)
        if dtype.numpy is None:
            raise OptionError(f"{_place(row)} has dtype {dtype.name}, which NumPy does not have; read it with .tensor()", option="dtype")
        return array.view(_numpy_dtype(dtype.numpy))

    def _read_bits(self, row: dict[str, Any]) -> tuple[np.ndarray[Any, Any], Any]:
        """Return the tensor as unsigned integers of its width (complex128 as pairs), and its dtype."""
        if row["status"] != "ok":
            raise MissingCaptureError(
                f"{self.path}: {_place(row)} was {row['status']}: {row['reason']}",
                layer=row["layer"],
                kind=row["kind"],
                status=row["status"],
            )
        dtype = DTYPES.get(row["dtype"])
        shape = tuple(row["shape"])
        if dtype is None or any(size < 0 for size in shape):
            raise CorruptRunError(
                f"{self.path}: the manifest has dtype {row['dtype']!r} and shape {shape} for {_place(row)}", path=self.path
            )
        bits = np.dtype(f"V{dtype.itemsize}") if dtype.itemsize == 16 else np.dtype(f"<u{dtype.itemsize}")
        if math.prod(shape) == 0:
            return np.empty(shape, dtype=bits), dtype
        chunk_shape, codec = self._chunk_layout(row)
        array, shard, offset, length = row["array"], row["shard"], row["offset"], row["length"]
        if not is_shard_key(shard) or offset < 0 or length <= CRC_BYTES:
            raise CorruptRunError(
                f"{self.path}: the manifest has shard {shard!r}, offset {offset}, length {length} for {_place(row)}", path=self.path
            )
        if len(chunk_shape) != len(shape) or any(size > limit for size, limit in zip(shape, chunk_shape, strict=True)):
            raise CorruptRunError(
                f"{self.path}: {_place(row)} has shape {shape} in the manifest, but its array has chunks of {chunk_shape}", path=self.path
            )
        contents = self._reader.read(array, shard, offset, length, row["crc32c"], codec, math.prod(chunk_shape) * dtype.itemsize)
        chunk = np.frombuffer(contents, dtype=bits).reshape(chunk_shape)
        if shape != chunk_shape:
            chunk = chunk[tuple(slice(size) for size in shape)]
            if not chunk.flags.c_contiguous:
                chunk = chunk.copy()
        chunk.flags.writeable = False
        return chunk, dtype

    def _chunk_layout(self, row: dict[str, Any]) -> tuple[tuple[int, ...], str | None]:
        """Return the chunk shape and the compressor of the row's array, from its metadata."""
        array = row["array"]
        if array not in self._layouts:
            parts = array.split("/")
            if len(parts) != 2 or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
                raise CorruptRunError(f"{self.path}: the manifest has array {array!r} for {_place(row)}", path=self.path)
            self._layouts[array] = _read_layout(os.path.join(self.path, LAYERS_DIR, array, "zarr.json"))
        return self._layouts[array]

    def close(self) -> None:
        """Let go of the files; arrays that were read stay valid."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path: who gets it (a spawned data-loading worker, say) opens the run for itself."""
        return open, (self.path,)

    def __repr__(self) -> str:
        return f"<hookstore.Run {self.path!r}: {len(self.layers)} layers, {self._captured.num_rows:,} captures>"


class LayerRun:
    """One layer of a run. Its captures are under ``activation``, ``gradient``, ``input`` and ``parameter``."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name

    @property
    def activation(self) -> Captures:
        """What the module returned."""
        return Captures(self.run, self.name, "activation")

    @property
    def gradient(self) -> Captures:
        """Gradient of the loss with respect to what the module returned."""
        return Captures(self.run, self.name, "gradient")

    @property
    def input(self) -> Captures:
        """What the module was called with."""
        return Captures(self.run, self.name, "input")

    @property
    def parameter(self) -> Captures:
        """The module's own parameters, as the forward saw them."""
        return Captures(self.run, self.name, "parameter")

    @property
    def kinds(self) -> list[str]:
        """Kinds that were captured of this layer."""
        rows = self.run._captured
        found = set(pc.unique(rows["kind"].filter(pc.equal(rows["layer"], self.name))).to_pylist())
        return [kind for kind in KINDS if kind in found]

    def __getitem__(self, kind: str) -> Captures:
        if kind not in KINDS:
            raise MissingCaptureError(f"there is no kind {kind!r}; the kinds are {', '.join(map(repr, KINDS))}", layer=self.name, kind=kind)
        return Captures(self.run, self.name, kind)

    def __repr__(self) -> str:
        return f"<hookstore.LayerRun {self.name!r}: {', '.join(self.kinds) or 'no captures'}>"


class Captures:
    """The captures of one layer and kind: ``captures[epoch, batch]``."""

    def __init__(self, run: Run, layer: str, kind: str) -> None:
        self.run = run
        self.layer = layer
        self.kind = kind

    def __getitem__(self, where: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return ``captures[epoch, batch]`` or ``captures[epoch, batch, call]``; see `get`."""
        if not isinstance(where, tuple) or len(where) not in (2, 3):
            raise OptionError(f"expected [epoch, batch] or [epoch, batch, call], got [{where!r}]", option="epoch")
        return self.get(*where)

    def get(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> np.ndarray[Any, Any]:
        """Read one tensor.

        Parameters
        ----------
        epoch, batch, call : int
            Coordinates of the forward.
        phase : str, optional
            ``"train"`` or ``"eval"``; by default ``"train"`` if anything was captured there.
        leaf : str, optional
            Path inside a nested value, or the parameter's name; may be left out where there is one only.
        backward : int, optional
            Which backward over that forward; by default the last.

        Returns
        -------
        numpy.ndarray
            Exactly what the model computed, in true shape and dtype (bfloat16 and float8 as ml_dtypes types). Read-only, and where the run is not compressed
            it lies in the file's own pages: copy it to change it.

        Raises
        ------
        MissingCaptureError
            If there is no such capture; it says what there is.
        CorruptRunError
            If the bytes on disk do not match their checksum.
        """
        return self.run.read(self.row(epoch, batch, call, phase=phase, leaf=leaf, backward=backward))

    def tensor(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> torch.Tensor:
        """Read one tensor as a torch tensor of its own memory; every dtype is possible. See `get`."""
        import torch

        bits, dtype = self.run._read_bits(self.row(epoch, batch, call, phase=phase, leaf=leaf, backward=backward))
        kind = getattr(torch, dtype.name, None)
        if kind is None:
            raise OptionError(f"dtype {dtype.name} needs a newer torch than {torch.__version__}", option="dtype")
        if bits.size == 0:
            return torch.empty(bits.shape, dtype=kind)
        return torch.frombuffer(bytearray(bits.tobytes()), dtype=kind).reshape(bits.shape)

    def row(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> dict[str, Any]:
        """Return the manifest row of one tensor; parameters and errors as in `get`."""
        where: dict[str, Any] = {"epoch": int(epoch), "batch": int(batch), "call": int(call)}
        index = self._index
        phases = index.phases
        phase = phase if phase is not None else "train" if "train" in phases or not phases else phases[0]
        positions = index.find(phase, **where)
        if positions.size:
            leaves = index.leaves(positions)
            if leaf is None and len(leaves) > 1:
                raise MissingCaptureError(
                    f"{self._describe(**where, phase=phase)} has several leaves: {', '.join(map(repr, leaves))}; name one, as in "
                    f".get({where['epoch']}, {where['batch']}, leaf={leaves[0]!r})",
                    layer=self.layer,
                    kind=self.kind,
                    **where,
                )
            positions = index.only_leaf(positions, leaves[0] if leaf is None else leaf)
            if backward is not None:
                positions = index.only_backward(positions, backward)
        if positions.size:
            captured = index.only_captured(positions)
            if captured.size > 1 and backward is None:
                warnings.warn(
                    f"{self._describe(**where, phase=phase)} was captured {captured.size} times, by several backwards over one forward or because the clock "
                    "stood there twice; this is the last. The others are in .rows, and .get(…, backward=0) names one",
                    CaptureWarning,
                    stacklevel=3,
                )
            found = int((captured if captured.size else positions)[-1])
            row: dict[str, Any] = index.rows.slice(found, 1).to_pylist()[0]
            if row["status"] == "ok":
                return row
            raise MissingCaptureError(
                f"{self._describe(**where, phase=phase)} was {row['status']}: {row['reason']}",
                layer=self.layer,
                kind=self.kind,
                status=row["status"],
                **where,
            )
        raise MissingCaptureError(
            f"{self._describe(**where, phase=phase, leaf=leaf, backward=backward)} was not captured; {self._what_there_is(phase, where['epoch'])}",
            layer=self.layer,
            kind=self.kind,
            **where,
        )

    @property
    def rows(self) -> pa.Table:
        """The manifest rows of this layer and kind, in the order in which they were acknowledged."""
        return self._index.rows

    @property
    def leaves(self) -> list[str]:
        """Leaf paths that were captured."""
        return sorted(pc.unique(self._index.rows["leaf"]).to_pylist())

    @cached_property
    def _index(self) -> _Index:
        indexes = self.run._indexes
        key = (self.layer, self.kind)
        if key not in indexes:
            indexes[key] = _Index(self.run._rows(self.layer, self.kind))
        return indexes[key]

    def _describe(self, *, epoch: int, batch: int, call: int, phase: str, leaf: str | None = None, backward: int | None = None) -> str:
        extra = (
            f"{f', call {call}' if call else ''}{f', phase {phase}' if phase != 'train' else ''}{f', leaf {leaf!r}' if leaf else ''}"
            f"{f', backward {backward}' if backward is not None else ''}"
        )
        return f"{self.run.path}: {self.kind} of layer {self.layer!r} in epoch {epoch}, batch {batch}{extra}"

    def _what_there_is(self, phase: str, epoch: int) -> str:
        rows = self._index.rows
        captured = rows.filter(pc.equal(rows["status"], "ok"))
        if not captured.num_rows:
            kinds = self.run[self.layer].kinds
            return f"this layer has {', '.join(kinds)}" if kinds else "nothing was captured of this layer"
        of_phase = captured.filter(pc.equal(captured["phase"], phase))
        if not of_phase.num_rows:
            return f"there is only phase {captured['phase'][0].as_py()!r}"
        batches = sorted(pc.unique(of_phase["batch"].filter(pc.equal(of_phase["epoch"], epoch))).to_pylist())
        if batches:
            return f"epoch {epoch} has batches {_ranges(batches)}"
        return f"there are epochs {_ranges(sorted(pc.unique(of_phase['epoch']).to_pylist()))}"

    def __len__(self) -> int:
        rows = self._index.rows
        return int(pc.sum(pc.equal(rows["status"], "ok")).as_py() or 0)

    def __repr__(self) -> str:
        return f"<hookstore.Captures: {len(self)} of {self.kind} of layer {self.layer!r}>"


class _Index:
    """Finds manifest rows of one layer and kind by their coordinates."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows.combine_chunks()
        self._values: dict[str, list[str]] = {}
        self._columns = {name: self._column(name) for name in ("phase", "epoch", "batch", "call", "backward", "leaf", "status")}
        # Stable, so that of rows with equal coordinates the one acknowledged last comes last.
        self._order = np.lexsort([self._columns[name] for name in ("backward", "call", "batch", "epoch", "phase")])
        self._sorted = {name: self._columns[name][self._order] for name in ("phase", "epoch", "batch", "call")}

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column as integers; those of text count through the values kept aside."""
        column = self.rows[name]
        if column.type != pa.string():
            return np.asarray(column.to_numpy())
        values = self._values[name] = sorted(pc.unique(column).to_pylist())
        return np.asarray(pc.index_in(column, pa.array(values, type=pa.string())).to_numpy())

    def _code(self, name: str, value: str) -> int:
        return self._values[name].index(value) if value in self._values[name] else -1

    @property
    def phases(self) -> list[str]:
        return self._values["phase"]

    def find(self, phase: str, *, epoch: int, batch: int, call: int) -> np.ndarray[Any, Any]:
        """Return the positions of the rows at those coordinates, in order of backward and acknowledgement."""
        low, high = 0, len(self._order)
        for name, value in (("phase", self._code("phase", phase)), ("epoch", epoch), ("batch", batch), ("call", call)):
            column = self._sorted[name][low:high]
            low, high = low + int(np.searchsorted(column, value, "left")), low + int(np.searchsorted(column, value, "right"))
        return self._order[low:high]

    def leaves(self, positions: np.ndarray[Any, Any]) -> list[str]:
        return [self._values["leaf"][code] for code in sorted(set(self._columns["leaf"][positions].tolist()))]

    def only_leaf(self, positions: np.ndarray[Any, Any], leaf: str) -> np.ndarray[Any, Any]:
        return np.asarray(positions[self._columns["leaf"][positions] == self._code("leaf", leaf)])

    def only_backward(self, positions: np.ndarray[Any, Any], backward: int) -> np.ndarray[Any, Any]:
        return np.asarray(positions[self._columns["backward"][positions] == backward])

    def only_captured(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.asarray(positions[self._columns["status"][positions] == self._code("status", "ok")])


def _read_layout(path: str) -> tuple[tuple[int, ...], str | None]:
    """Return the shape of one capture and the compressor from an array's ``zarr.json``."""
    try:
        with builtins.open(path, "rb") as file:
            metadata = json.loads(file.read())
        sharding = next(codec for codec in metadata["codecs"] if codec["name"] == "sharding_indexed")["configuration"]
        leading = 3 if metadata["dimension_names"][2:3] == ["call"] else 2
        chunk_shape = tuple(int(size) for size in sharding["chunk_shape"])[leading:]
        codecs = [codec for codec in sharding["codecs"] if codec["name"] not in ("bytes", "crc32c")]
    except FileNotFoundError:
        raise CorruptRunError(f"{path} is missing, but the manifest has captures in that array", path=path) from None
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise CorruptRunError(f"{path} is no array metadata of this format: {error!r}", path=path) from error
    return chunk_shape, json.dumps(codecs[0], sort_keys=True) if codecs else None


def _summary(layer: str, kind: str, rows: pa.Table) -> dict[str, Any]:
    captured = rows.filter(pc.equal(rows["status"], "ok"))
    return {
        "layer": layer,
        "kind": kind,
        "captures": captured.num_rows,
        "gaps": rows.num_rows - captured.num_rows,
        "shapes": sorted(set(map(tuple, captured["shape"].to_pylist()))),
        "dtypes": sorted(pc.unique(captured["dtype"]).to_pylist()),
        "nbytes": pc.sum(captured["nbytes"]).as_py() or 0,
        "epochs": sorted(pc.unique(captured["epoch"]).to_pylist()),
        "phases": sorted(pc.unique(captured["phase"]).to_pylist()),
    }


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def _place(row: dict[str, Any]) -> str:
    call = f", call {row['call']}" if row["call"] else ""
    leaf = f", leaf {row['leaf']!r}" if row["leaf"] else ""
    return f"{row['kind']} of layer {row['layer']!r} in {row['phase']} epoch {row['epoch']}, batch {row['batch']}{call}{leaf}"


def _ranges(numbers: list[int]) -> str:
    """Write sorted numbers shortly: ``0, 5 – 25 in steps of 5, 28``."""
    if not numbers:
        return "none"
    pieces = []
    start = 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - start >= 3:
            pieces.append(f"{numbers[start]} – {numbers[end - 1]}{f' in steps of {step}' if step > 1 else ''}")
        else:
            end = start + 1
            pieces.append(str(numbers[start]))
        start = end
    return ", ".join(pieces[:8]) + (f" and {len(pieces) - 8} more" if len(pieces) > 8 else "")
