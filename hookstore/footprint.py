"""What captures take on disk: shards, manifest, metadata; from what one batch gives and how often it is due."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hookstore.dimensions import dimensions_of
from hookstore.files import portion_bytes
from hookstore.format import CHUNK_ALIGNMENT_BYTES, CRC_BYTES, PAGE_BYTES, SEGMENT_ROWS, TRAILER_BYTES, ArraySpec, align
from hookstore.occasions import Occasions, Training, count
from hookstore.planned import Plan, PlannedTensor
from hookstore.schedule import Schedule

# Sizes of what Arrow, Parquet and JSON make of our rows and metadata; test_plan.py compares them with runs.
_ROW_BYTES = 132  # of a row in a shard, without its texts and its shape
_TEXT_BYTES = 38  # of its texts that are much the same in all runs: phase, kind, dtype, status, shard
_STATISTICS_BYTES = 73
_STREAM_BYTES = 3_200  # of the rows of one shard, whatever their number
_PART_BYTES = 8_000  # of a Parquet part
_PARQUET_ROW_BYTES, _PARQUET_STATISTICS_BYTES = 5, 28
_NOTE_BYTES = 64  # of a capture in the staging buffer, beside its slot
_FIRST_REGION_BYTES, _REGION_BYTES = 128 << 10, 4 << 20  # as in hookstore.layout, which would bring torch with it
_LAYER_BYTES = 160  # of a layer in run.json


@dataclass(frozen=True, slots=True)
class Stream:
    """What goes into one array batch by batch, or, where there are statistics alone or empty tensors, into the manifest.

    Attributes
    ----------
    phase, layer, kind, leaf, portion, dtype : str
        As in the manifest.
    shape : tuple of int
        Of a capture.
    spec : ArraySpec or None
        The array.
    num_per_batch : float
        Captures in a batch in which it is due.
    tensors, rows : tuple of Schedule
        When tensors are stored, and when there is a row in the manifest; a batch counts if any asks for it.
    num_call_shards : int
        Over how many shards the calls of one batch are spread.
    stored_bytes : float or None
        Mean length of an encoded chunk with its checksum, where it is known.
    num_characters : int
        Of the structure text in its rows.
    share : float
        Of the batches in which it is due, those in which it comes.
    """

    phase: str
    layer: str
    kind: str
    leaf: str
    portion: str
    dtype: str
    shape: tuple[int, ...]
    spec: ArraySpec | None
    num_per_batch: float
    tensors: tuple[Schedule, ...]
    rows: tuple[Schedule, ...]
    num_call_shards: int = 1
    stored_bytes: float | None = None
    num_characters: int = 0
    share: float = 1.0

    @property
    def stride_bytes(self) -> int:
        """What one capture takes in a shard."""
        if self.spec is None or not self.tensors:
            return 0
        if self.stored_bytes is None:
            return self.spec.stride_bytes
        return align(math.ceil(self.stored_bytes), CHUNK_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What holds for a whole recording.

    Attributes
    ----------
    training : Training
        How long it is.
    buffer_bytes : int
        Size of the staging buffer.
    has_portions, has_statistics : bool
        Whether the manifest has these columns.
    path : str or None
        Where the run is to be.
    bandwidth_bytes_per_s : float or None
        What the disk there sustains.
    """

    training: Training
    buffer_bytes: int
    has_portions: bool
    has_statistics: bool
    path: str | None
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class _Amount:
    """What comes of one stream."""

    num_captures: int
    num_rows: int
    num_shards: int
    total_bytes: int
    most_bytes: int
    is_estimated: bool


def make_plan(streams: Sequence[Stream], circumstances: Circumstances, notes: Sequence[str] = ()) -> Plan:
    """Add up what comes of all streams.

    Parameters
    ----------
    streams : sequence of Stream
        What one batch gives; those never due are left out.
    circumstances : Circumstances
        The rest.
    notes : sequence of str
        What is not known.
    """
    training = circumstances.training
    num_arrays = len({stream.spec.path for stream in streams if stream.spec is not None and stream.tensors})
    counted: dict[object, Occasions] = {}
    amounts = [_amount(stream, circumstances, num_arrays, counted) for stream in streams]
    met = [(stream, amount) for stream, amount in zip(streams, amounts, strict=True) if amount.num_rows]
    arrays = {stream.spec.path: stream.layer for stream, amount in met if amount.num_shards and stream.spec is not None}
    num_coordinates = _num_coordinates({stream.spec for stream, amount in met if amount.num_shards and stream.spec is not None})
    num_layers, num_rows = len({*arrays.values()}), sum(amount.num_rows for _, amount in met)
    num_parts = -(-num_rows // SEGMENT_ROWS)
    per_row = _PARQUET_ROW_BYTES + (_PARQUET_STATISTICS_BYTES if circumstances.has_statistics else 0)
    small_files = (len(arrays) + num_layers + 1 + 2 * num_coordinates) * PAGE_BYTES
    described_bytes = align(2_000 + _LAYER_BYTES * len({stream.layer for stream in streams}), PAGE_BYTES)
    other_bytes = small_files + described_bytes + num_parts * align(_PART_BYTES, PAGE_BYTES) + num_rows * per_row
    num_shards = sum(amount.num_shards for _, amount in met)
    num_steps = training.num_epochs * training.num_batches.get("train", 0)
    of_training = [(stream, amount) for stream, amount in met if stream.phase == "train"]
    written = sum(stream.stride_bytes * amount.num_captures for stream, amount in of_training)
    return Plan(
        tensors=_join(met),
        num_epochs=training.num_epochs,
        num_batches=training.num_batches,
        bytes_per_step=sum(round(stream.stride_bytes * stream.num_per_batch) for stream, _ in of_training),
        mean_bytes_per_step=written / num_steps if num_steps else 0.0,
        total_bytes=sum(amount.total_bytes for _, amount in met) + other_bytes,
        most_bytes=sum(amount.most_bytes for _, amount in met) + other_bytes,
        num_captures=sum(amount.num_captures for _, amount in met),
        num_summaries=sum(amount.num_rows - amount.num_captures for _, amount in met),
        num_arrays=len(arrays),
        num_shards=num_shards,
        # (with run.json, and zarr.json of the root group, of each layer and of each array; coordinates have that and a chunk)
        num_files=num_shards + len(arrays) + num_layers + num_parts + 2 + 2 * num_coordinates,
        buffer_bytes=circumstances.buffer_bytes,
        path=circumstances.path,
        free_bytes=None if circumstances.path is None else free_bytes(circumstances.path),
        bandwidth_bytes_per_s=circumstances.bandwidth_bytes_per_s,
        is_compressed=any(stream.spec is not None and stream.spec.codec is not None and stream.stored_bytes is None for stream, _ in met),
        is_estimated=any(amount.is_estimated for _, amount in met),
        notes=tuple(notes),
    )


def _num_coordinates(specs: Iterable[ArraySpec]) -> int:
    """Count the coordinates beside arrays: one for each layer, name of a dimension and positions."""
    return len(
        {
            (spec.layer, dimension.wished or dimension.own, dimension.positions)
            for spec in specs
            for dimension in dimensions_of(spec)
            if dimension.positions is not None
        }
    )


def _amount(stream: Stream, circumstances: Circumstances, num_arrays: int, counted: dict[object, Occasions]) -> _Amount:
    """Count what comes of a stream; streams that are alike share a count."""
    training, spec = circumstances.training, stream.spec
    shard = (1, 1) if spec is None else spec.shard_shape[:2]
    of_rows, of_tensors = (_count(schedules, stream.phase, training, shard, counted) for schedules in (stream.rows, stream.tensors))
    per_batch = stream.num_per_batch * stream.share
    num_rows, num_captures = round(of_rows.num_due * per_batch), round(of_tensors.num_due * per_batch)
    is_estimated = of_rows.is_estimated or of_tensors.is_estimated
    if spec is None or not num_captures:
        return _Amount(num_captures, num_rows, 0, 0, 0, is_estimated)
    num_shards = min(of_tensors.num_shards * stream.num_call_shards, num_captures)
    tail_bytes = num_captures * _row_bytes(stream, circumstances) + num_shards * (
        _STREAM_BYTES + TRAILER_BYTES + 16 * spec.num_entries + CRC_BYTES
    )
    rest_bytes = tail_bytes + num_shards * PAGE_BYTES // 2  # (a file ends with a page)
    packed_bytes = _packed_bytes(stream, num_captures, circumstances, num_arrays)
    most_bytes = num_captures * align(stream.stride_bytes, PAGE_BYTES)
    return _Amount(num_captures, num_rows, num_shards, packed_bytes + rest_bytes, most_bytes + rest_bytes, is_estimated)


def _count(
    schedules: tuple[Schedule, ...], phase: str, training: Training, shard: tuple[int, ...], counted: dict[object, Occasions]
) -> Occasions:
    key = (schedules, phase, shard)
    if key not in counted:
        counted[key] = count(schedules, phase, training, (shard[0], shard[1]))
    return counted[key]


def _row_bytes(stream: Stream, circumstances: Circumstances) -> int:
    """Return what a row takes in a shard."""
    assert stream.spec is not None
    texts = len(stream.layer) + len(stream.leaf) + len(stream.spec.path) + stream.num_characters + _TEXT_BYTES
    optional = (8 + portion_bytes(stream.portion) if circumstances.has_portions else 0) + (
        _STATISTICS_BYTES if circumstances.has_statistics else 0
    )
    return _ROW_BYTES + texts + optional + 10 * len(stream.shape)  # eight bytes for each size, and two in the shard's name


def _packed_bytes(stream: Stream, num_captures: int, circumstances: Circumstances, num_arrays: int) -> int:
    """Return what chunks take where regions of the staging buffer are filled before they are written: each begins a page.

    Regions of an array grow from one to the next, as far as many arrays leave them room.
    """
    stride = stream.stride_bytes
    if stream.num_call_shards > 1:  # a region is of one shard, so that each batch ends some
        num_regions = round(num_captures / stream.num_per_batch) * stream.num_call_shards
        return round(num_regions * align(math.ceil(stride * num_captures / num_regions), PAGE_BYTES)) if num_regions else 0
    share = circumstances.buffer_bytes // 16 // max(1, num_arrays)
    slot_bytes = stride if stream.spec is None else stream.spec.stride_bytes  # where they are not encoded yet
    left, total, size = num_captures, 0, _FIRST_REGION_BYTES
    while left > 0:
        slots = max(1, min(size, share) // (slot_bytes + _NOTE_BYTES))
        times = 1 if size < _REGION_BYTES else left // slots
        if times == 0 or slots > left:
            return total + align(left * stride, PAGE_BYTES)
        total += times * align(slots * stride, PAGE_BYTES)
        left -= times * slots
        size = min(4 * size, _REGION_BYTES)
    return total


def _join(met: Sequence[tuple[Stream, _Amount]]) -> tuple[PlannedTensor, ...]:
    """Make a row of a plan for each tensor: calls that went into several arrays are together in one."""
    rows: dict[object, PlannedTensor] = {}
    for stream, amount in sorted(met, key=lambda one: not one[0].tensors):
        key = (stream.phase, stream.layer, stream.kind, stream.leaf, stream.portion, stream.shape, stream.dtype)
        before = rows.get(key)
        more = (
            stream.num_per_batch,
            round(stream.stride_bytes * stream.num_per_batch),
            amount.num_captures,
            amount.num_rows - amount.num_captures,
            amount.total_bytes,
        )
        if before is None:
            rows[key] = PlannedTensor(*key, *more)
        else:
            rows[key] = replace(
                before,
                # (where only now and then there are more than statistics, these are of the same captures)
                captures_per_step=before.captures_per_step + more[0] if stream.tensors else max(before.captures_per_step, more[0]),
                bytes_per_step=before.bytes_per_step + more[1],
                num_captures=before.num_captures + more[2],
                num_summaries=before.num_summaries + more[3],
                total_bytes=before.total_bytes + more[4],
            )
    return tuple(sorted(rows.values(), key=lambda row: (-row.total_bytes, -row.bytes_per_step)))


def free_bytes(path: str) -> int:
    """Return what is free on the disk where a path is or would be."""
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    return shutil.disk_usage(place).free
