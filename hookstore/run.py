"""`open`: read a run, whether it is live, killed or finished.

Reading goes by the manifest, never by what lies in the directories. A run is untrusted input: paths, offsets and shapes are checked before they are used.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple, Self, SupportsIndex

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hookstore.captures import Captures, LayerRun, ranges
from hookstore.errors import CorruptRunError, MissingCaptureError, OptionError, UnknownLayerError
from hookstore.files import list_names
from hookstore.format import (
    CRC_BYTES,
    DTYPES,
    JOURNAL_DIR,
    KINDS,
    LAYERS_DIR,
    LOCK_FILE,
    PORTION_COLUMN,
    STORED,
    ArraySpec,
    DType,
    fits_chunk,
    is_shard_key,
    parse_segment_name,
)
from hookstore.histories import SampleHistory, history_of
from hookstore.lock import holder
from hookstore.manifest import ManifestReader
from hookstore.metadata import NONSENSE, read_array, read_description
from hookstore.occurrences import SampleIndex
from hookstore.portion import check_dims
from hookstore.rows import MOST_SHARD_BYTES, RowIndex, keep
from hookstore.samples import divide
from hookstore.schema import plain
from hookstore.shards import Chunk, ShardReader

_OF_ARRAY = ("dtype", "layer", "kind", "phase", "leaf")  # what all rows of an array have in common


def open(path: str | os.PathLike[str]) -> Run:  # noqa: A001  # hookstore.open, as zarr.open and gzip.open
    """Open a run for reading.

    What is read is what had been acknowledged when the run was opened; `Run.refresh` shows what a live run has captured since.

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
    return Run(run_path, read_description(run_path))


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run holds, in short.

    Attributes
    ----------
    path : str
        Directory of the run.
    state : str
        ``"finished"``; ``"recording"`` while a process writes to it; ``"unfinished"`` when that has died.
    description : dict
        Contents of ``run.json``.
    num_captures, nbytes : int
        Captured tensors and their bytes.
    statuses : dict
        Manifest rows by status.
    groups : list of dict
        For each layer and kind: ``layer``, ``kind``, ``captures``, ``summarized`` (those of which only statistics are stored), ``gaps``, ``shapes``,
        ``dtypes``, ``nbytes``, ``epochs``, ``phases``, ``portions``.
    attempts : list of int
        Recordings that the run was made in.
    partial_batches : list of PartialBatch
        Batches that were cut short.
    annotations : list of str
        Names of what is stored of batches.
    """

    path: str
    state: str
    description: dict[str, Any]
    num_captures: int
    nbytes: int
    statuses: dict[str, int]
    groups: list[dict[str, Any]]
    attempts: list[int]
    partial_batches: list[PartialBatch]
    annotations: list[str] = field(default_factory=list)


class PartialBatch(NamedTuple):
    """A batch that was cut short; see `Run.partial_batches`."""

    phase: str
    epoch: int
    batch: int
    attempt: int
    reason: str


class Fired(NamedTuple):
    """A batch in which a trigger of the flight recorder fired; see `Run.fired`."""

    phase: str
    epoch: int
    batch: int
    attempt: int
    reason: str


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
        self._manifest_reader = ManifestReader(path)
        self._rows = self._manifest_reader.read()
        self._specs: dict[str, ArraySpec] = {}
        self._indexes: dict[tuple[str, ...], RowIndex] = {}
        self._sample_indexes: dict[tuple[str, int | None], SampleIndex] = {}

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
                f"{self.path}: nothing was captured in epoch {int(epoch)}{f' in phase {phase!r}' if phase else ''}; there are epochs {ranges(self.epochs)}"
                f"{self._what_is_damaged()}",
                epoch=int(epoch),
            )
        return found

    @property
    def manifest(self) -> pa.Table:
        """One row per captured tensor, and one per gap with its reason; columns as in the README's disk format."""
        return self._manifest

    @cached_property
    def _manifest(self) -> pa.Table:
        return self._rows.cast(plain(self._rows.schema))

    @cached_property
    def _captured(self) -> pa.Table:
        """Rows of layers that have a tensor, or statistics without one."""
        return self._rows_with(status=STORED, kind=KINDS)

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

    @property
    def annotations(self) -> dict[str, Captures]:
        """What is stored of the samples of batches, by name: ``run.annotations["label"][epoch, batch]``. Texts are arrays of ``str`` objects."""
        return dict(self._annotations)

    @cached_property
    def _annotations(self) -> dict[str, Captures]:
        captures = Captures(self, "", "annotation")
        return {name: captures.leaf(name) for name in dict.fromkeys(leaf.partition(".")[0] for leaf in captures.leaves)}

    @property
    def loss(self) -> Captures:
        """Losses of batches: ``run.loss[epoch, batch]``; those with a name are leaves."""
        return Captures(self, "", "loss")

    def sample(self, value: Any, by: str = "sample_id", *, phase: str | None = None, attempt: int | None = None) -> SampleHistory:
        """Look at one sample through all epochs and layers, as far as batches were annotated.

        ``run.sample(17)["fc1"].activation`` maps (epoch, batch) to what ``fc1`` returned for the sample whose ``sample_id`` is 17; see `SampleHistory`.

        Parameters
        ----------
        value : int, float or str
            Which sample.
        by : str
            Annotation that tells samples apart, one value for each.
        phase : str, optional
            ``"train"`` or ``"eval"``. By default ``where`` lists both, and layers are looked at in ``"train"`` if the sample was there.
        attempt : int, optional
            Only what this recording of the run has; by default, for each batch, the latest with that annotation. Tensors are always of the same.

        Raises
        ------
        MissingCaptureError
            If there is no such sample, or no such annotation; it says what there is.
        OptionError
            If the annotation has not one value for each sample.
        """
        key = (by, attempt)
        if key not in self._sample_indexes:
            self._sample_indexes[key] = SampleIndex(self, by, attempt)
        return history_of(self, self._sample_indexes[key], value, phase)

    def __contains__(self, layer: object) -> bool:
        return any(layer == known["name"] or layer in known.get("aliases", ()) for known in self.description["layers"])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def info(self) -> RunInfo:
        """Say in short what the run holds."""
        captured = self._rows_with(status="ok", kind=KINDS)
        statuses = {entry["values"]: entry["counts"] for entry in pc.value_counts(self._rows["status"]).to_pylist()}
        groups = []
        for layer in self.layers:
            for kind in KINDS:
                rows = self._rows_with(layer=layer, kind=kind)
                if rows.num_rows:
                    groups.append(_summary(layer, kind, rows))
        return RunInfo(
            path=self.path,
            state=self._state,
            description=self.description,
            num_captures=captured.num_rows,
            nbytes=pc.sum(captured["nbytes"]).as_py() or 0,
            statuses=statuses,
            groups=groups,
            attempts=self.attempts,
            partial_batches=self.partial_batches,
            annotations=list(self.annotations),
        )

    def _records(self, kind: str) -> bool:
        """Say whether a kind was asked for in any recording of the run."""
        recorded = [self.description.get("recorded"), *(attempt.get("recorded") for attempt in self._described_attempts)]
        return any(isinstance(each, dict) and isinstance(kinds := each.get("kinds"), list) and kind in kinds for each in recorded)

    def _index(self, layer: str, kind: str, *portion: str) -> RowIndex:
        """Return the rows of a layer and kind, or those of one portion."""
        key = (layer, kind, *portion)
        if key not in self._indexes:
            self._indexes[key] = (
                self._index(layer, kind).of_portion(*portion) if portion else RowIndex(self._rows_with(layer=layer, kind=kind))
            )
        return self._indexes[key]

    def _dims(self, layer: str, kind: str) -> tuple[str, ...]:
        """Return the names that a layer's tensors of a kind were given for their axes."""
        recorded = [attempt.get("recorded") for attempt in reversed(self._described_attempts)] + [self.description.get("recorded")]
        for said in recorded:
            captures = said.get("captures") if isinstance(said, dict) else None
            for capture in captures if isinstance(captures, list) else ():
                with contextlib.suppress(*NONSENSE):
                    if capture["dims"] and layer in capture["layers"] and kind in capture["kinds"]:
                        return check_dims(capture["dims"])
        return ()

    @property
    def _described_attempts(self) -> list[dict[str, Any]]:
        attempts = self.description.get("attempts")
        return [attempt for attempt in attempts if isinstance(attempt, dict)] if isinstance(attempts, list) else []

    def _what_is_damaged(self) -> str:
        """Return what to add where something is not found: it may have been in a piece of the manifest that cannot be read."""
        damaged = sorted(self._manifest_reader.damaged)
        more = f" and {len(damaged) - 3} more" if len(damaged) > 3 else ""
        return f"; but {', '.join(damaged[:3])}{more} cannot be read, and the captures listed there are missing" if damaged else ""

    @property
    def _state(self) -> str:
        if not any(name == LOCK_FILE or parse_segment_name(name) for name in list_names(os.path.join(self.path, JOURNAL_DIR))):
            return "finished"
        return "unfinished" if holder(self.path) is None else "recording"

    def _why_left_out(self, phase: str, epoch: int, batch: int) -> tuple[str | None, str]:
        """Return status and reason where a whole batch was left out or cut short, or recording had stopped before it; else ``None`` and ""."""
        here = sorted(self._left_out.get((epoch, batch), ()), key=lambda row: row["phase"] != phase)
        if here:
            return here[0]["status"], here[0]["reason"]
        for row in self._stops:
            if row["attempt"] == self.attempts[-1] and (row["epoch"], row["batch"]) < (epoch, batch):
                return "stopped", f"recording had stopped in epoch {row['epoch']}, batch {row['batch']}, since {row['reason']}"
        return None, ""

    @cached_property
    def _batch_rows(self) -> list[dict[str, Any]]:
        """Rows that stand for whole batches of which something is missing."""
        rows = self._rows_with(kind="").select(["phase", "epoch", "batch", "attempt", "status", "reason"]).to_pylist()
        return [row for row in rows if row["status"] != "fired"]

    @cached_property
    def _left_out(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        """These rows by epoch and batch, of which there may be as many as there are captures."""
        found: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in self._batch_rows:
            found.setdefault((row["epoch"], row["batch"]), []).append(row)
        return found

    @cached_property
    def _stops(self) -> list[dict[str, Any]]:
        return [row for row in self._batch_rows if row["status"] == "stopped"]

    @property
    def partial_batches(self) -> list[PartialBatch]:
        """Batches of which captures may be missing, since an exception, a signal, a kill or the end of the process cut them short.

        Those are left out that a later attempt has recorded again.
        """
        rows = [row for row in self._batch_rows if row["status"] in ("partial", "stopped")]
        later = self._captured.filter(pc.greater(self._captured["attempt"], min((row["attempt"] for row in rows), default=0)))
        again: dict[tuple[Any, ...], int] = {}
        if later.num_rows:
            latest = (
                later.select(["phase", "epoch", "batch", "attempt"]).group_by(["phase", "epoch", "batch"]).aggregate([("attempt", "max")])
            )
            again = {tuple(row[name] for name in ("phase", "epoch", "batch")): row["attempt_max"] for row in latest.to_pylist()}
        return [
            PartialBatch(row["phase"], row["epoch"], row["batch"], row["attempt"], row["reason"])
            for row in rows
            if again.get((row["phase"], row["epoch"], row["batch"]), -1) <= row["attempt"]
        ]

    @property
    def fired(self) -> list[Fired]:
        """When triggers of the flight recorder fired, in that order, and why: the layer, what was wrong, and where in the tensor."""
        rows = self._rows_with(kind="", status="fired").select(Fired._fields).to_pylist()
        return [Fired(**row) for row in rows]

    @property
    def attempts(self) -> list[int]:
        """Numbers of the recordings that the run was made in: 0, and one more each time that it was taken up again."""
        return sorted(pc.unique(self._rows["attempt"]).to_pylist())

    def refresh(self) -> int:
        """See what has been captured since the run was opened or refreshed last; returns how many manifest rows came.

        Arrays that were read stay valid, and `Samples` stay what they were.

        Raises
        ------
        CorruptRunError
            As `open`.
        """
        before = self._rows.num_rows
        self._rows = self._manifest_reader.read()
        self.description = read_description(self.path)
        self._indexes.clear()
        self._sample_indexes.clear()
        for name in ("_manifest", "_captured", "_batch_rows", "_left_out", "_stops", "_annotations"):
            self.__dict__.pop(name, None)
        return int(self._rows.num_rows - before)

    def _rows_with(self, **texts: str | tuple[str, ...]) -> pa.Table:
        """Return the rows that have these texts (or one of several) in these columns, still coded."""
        is_wanted = np.ones(self._rows.num_rows, dtype=bool)
        for name, wanted in texts.items():
            column = self._rows[name]
            known = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
            found = [known.index(text) for text in ([wanted] if isinstance(wanted, str) else wanted) if text in known]
            codes = np.concatenate([np.empty(0, dtype=np.int32), *(np.from_dlpack(chunk.indices) for chunk in column.chunks)])
            is_wanted &= np.isin(codes, found) if len(found) != 1 else codes == found[0]
        return keep(self._rows, is_wanted)

    def read(self, row: dict[str, Any], *, raw: bool = False) -> np.ndarray[Any, Any]:
        """Read the tensor of one manifest row.

        Parameters
        ----------
        row : dict
            As ``run.manifest.slice(i, 1).to_pylist()[0]`` gives it.
        raw : bool
            Leave a gradient multiplied by its loss scale, as it is stored, instead of dividing in float32.

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
        values = array.view(_numpy_dtype(row, dtype))
        scale = row.get("loss_scale")
        if raw or scale is None or math.isnan(scale) or values.dtype.kind in "biu":
            return values
        divided = divide(values, np.float32(scale))
        divided.flags.writeable = False
        return divided

    def _type_of(self, row: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return the NumPy dtype and the shape of a row's tensor."""
        dtype, shape = self._dtype_and_shape(row)
        return _numpy_dtype(row, dtype), shape

    def _read_bits(self, row: dict[str, Any]) -> tuple[np.ndarray[Any, Any], DType]:
        """Return the tensor as unsigned integers of its width (complex128 as pairs), and its dtype."""
        if row["status"] != "ok":
            raise MissingCaptureError(
                f"{self.path}: {_place(row)} was {row['status']}: {row['reason']}",
                layer=row["layer"],
                kind=row["kind"],
                status=row["status"],
            )
        dtype, shape = self._dtype_and_shape(row)
        bits = np.dtype(f"V{dtype.itemsize}") if dtype.itemsize == 16 else np.dtype(f"<u{dtype.itemsize}")
        if 0 in shape:
            try:
                empty = np.empty(shape, dtype=bits)
            except ValueError as error:
                raise CorruptRunError(f"{self.path}: the manifest has shape {shape} for {_place(row)}", path=self.path) from error
            empty.flags.writeable = False
            return empty, dtype
        chunk, chunk_shape = self._locate(row)
        array = np.frombuffer(self._reader.read(*chunk), dtype=bits).reshape(chunk_shape)
        if shape != chunk_shape:
            array = array[tuple(slice(size) for size in shape)]
            if not array.flags.c_contiguous:
                array = array.copy()
        array.flags.writeable = False
        return array, dtype

    def _dtype_and_shape(self, row: dict[str, Any]) -> tuple[DType, tuple[int, ...]]:
        """Return what a row's tensor is."""
        dtype = DTYPES.get(row["dtype"])
        shape = tuple(row["shape"])
        if dtype is None or len(shape) > 64 or any(not 0 <= size < 2**47 for size in shape):
            raise CorruptRunError(
                f"{self.path}: the manifest has dtype {row['dtype']!r} and shape {shape} for {_place(row)}", path=self.path
            )
        return dtype, shape

    def _locate(self, row: dict[str, Any]) -> tuple[Chunk, tuple[int, ...]]:
        """Return the chunk of a row whose tensor has bytes, and the chunk's shape."""
        dtype, shape = self._dtype_and_shape(row)
        spec = self._spec(row)
        expected = (spec.dtype, spec.layer, spec.kind, spec.phase, spec.leaf, spec.portion)
        if expected != (*map(row.get, _OF_ARRAY), row.get(PORTION_COLUMN[0], "")):
            raise CorruptRunError(
                f"{self.path}: the manifest has dtype {dtype.name} for {_place(row)}, its array {row['array']} has {spec.dtype} of {spec.kind} of layer "
                f"{spec.layer!r} in {spec.phase}{f', leaf {spec.leaf!r}' if spec.leaf else ''}{f', {spec.portion}' if spec.portion else ''}",
                path=self.path,
            )
        array, shard, offset, length = row["array"], row["shard"], row["offset"], row["length"]
        if not is_shard_key(shard) or not 0 <= offset < MOST_SHARD_BYTES or length <= CRC_BYTES:
            raise CorruptRunError(
                f"{self.path}: the manifest has shard {shard!r}, offset {offset}, length {length} for {_place(row)}", path=self.path
            )
        if not fits_chunk(shape, spec.chunk_shape):
            raise CorruptRunError(
                f"{self.path}: {_place(row)} has shape {shape} in the manifest, but its array has chunks of {spec.chunk_shape}",
                path=self.path,
            )
        # (all rows that can name this array are in this index)
        if (array, shard, offset, length) in Captures(self, spec.layer, spec.kind)._all.overlapping:
            raise CorruptRunError(
                f"{self.path}: the manifest has {_place(row)} in {length:,} bytes of shard {array}/{shard} at byte {offset:,}, some of which belong to another "
                "capture",
                path=self.path,
            )
        return Chunk(array, shard, offset, length, row["crc32c"], spec.codec, spec.chunk_bytes), spec.chunk_shape

    def _spec(self, row: dict[str, Any]) -> ArraySpec:
        """Return what the row's array is, from its metadata."""
        array = row["array"]
        if array not in self._specs:
            self._specs[array] = read_array(self.path, array).spec
        return self._specs[array]

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


def _summary(layer: str, kind: str, rows: pa.Table) -> dict[str, Any]:
    is_captured = pc.equal(rows["status"], "ok")
    stored = rows.filter(pc.or_(is_captured, pc.equal(rows["status"], "summarized")))
    num_captured = pc.sum(is_captured).as_py() or 0
    portion = PORTION_COLUMN[0]
    return {
        "layer": layer,
        "kind": kind,
        "captures": num_captured,
        "summarized": stored.num_rows - num_captured,
        "gaps": rows.num_rows - stored.num_rows,
        "shapes": sorted(set(map(tuple, stored["shape"].to_pylist()))),
        "dtypes": sorted(pc.unique(stored["dtype"]).to_pylist()),
        "nbytes": pc.sum(rows.filter(is_captured)["nbytes"]).as_py() or 0,
        "epochs": sorted(pc.unique(stored["epoch"]).to_pylist()),
        "phases": sorted(pc.unique(stored["phase"]).to_pylist()),
        "portions": sorted(pc.unique(stored[portion]).to_pylist()) if portion in stored.schema.names else [""][: stored.num_rows],
    }


def _numpy_dtype(row: dict[str, Any], dtype: DType) -> np.dtype[Any]:
    if dtype.numpy is None:
        raise OptionError(f"{_place(row)} has dtype {dtype.name}, which NumPy does not have; read it with .tensor()", option="dtype")
    return np.dtype(getattr(ml_dtypes, dtype.numpy, None) or dtype.numpy)


def _place(row: dict[str, Any]) -> str:
    if not row["kind"]:
        return f"the whole of {row['phase']} epoch {row['epoch']}, batch {row['batch']}"
    call = f", call {row['call']}" if row["call"] else ""
    leaf = f", leaf {row['leaf']!r}" if row["leaf"] else ""
    portion = f", {row[PORTION_COLUMN[0]]}" if row.get(PORTION_COLUMN[0]) else ""
    return f"{row['kind']} of layer {row['layer']!r} in {row['phase']} epoch {row['epoch']}, batch {row['batch']}{call}{leaf}{portion}"
