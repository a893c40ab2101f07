"""Rows on their way to the manifest: blocks of captures that have most in common, made into Arrow batches, and kept until their shard is sealed."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hookstore.files import Spool, SpooledRecords
from hookstore.format import DTYPES, Row
from hookstore.schema import SCHEMA, STATISTICS
from hookstore.statistics import NO_STATISTICS, STATISTICS_DTYPE

Value = TypeVar("Value")

NUMBERS_DTYPE = np.dtype(
    [
        ("epoch", "<i8"),
        ("batch", "<i8"),
        ("call", "<i8"),
        ("step", "<i8"),
        ("wall_time", "<i8"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("backward", "<i4"),
        ("crc32c", "<u4"),
        ("shape", "<u4"),
        ("origin", "<u4"),
    ]
)
"""What differs between the rows of a block; ``shape`` counts through the block's shapes, and ``origin`` through its origins."""
_NUMBERS = frozenset(NUMBERS_DTYPE.names or ())
_WITH_STATISTICS_DTYPE = np.dtype([("numbers", NUMBERS_DTYPE), ("statistics", STATISTICS_DTYPE)])


class Origin(NamedTuple):
    """What a tensor was part of, and what it was multiplied by: structure, loss scale and whole shape as in `hookstore.format.Row`."""

    structure: str = ""
    loss_scale: float | None = None
    whole_shape: str = ""


@dataclass(slots=True)
class RowBlock:
    """Manifest rows that differ in numbers alone, such as those of one staging region.

    Attributes
    ----------
    phase, layer, kind, leaf, rank, attempt, array, dtype, shard, status, reason
        As in `hookstore.format.Row`.
    shapes : list of tuple of int
        True shapes that occur.
    origins : list of Origin
        Structures, loss scales and whole shapes that occur.
    numbers : numpy.ndarray
        The rows, `NUMBERS_DTYPE`.
    portion : str
        As in `hookstore.format.Row`.
    statistics : numpy.ndarray or None
        Statistics of each row's tensor, `hookstore.statistics.STATISTICS_DTYPE`, where there are any.
    """

    phase: str
    layer: str
    kind: str
    leaf: str
    rank: int
    attempt: int
    array: str
    dtype: str
    shard: str
    status: str
    reason: str
    shapes: list[tuple[int, ...]]
    origins: list[Origin]
    numbers: np.ndarray[Any, Any]
    portion: str = ""
    statistics: np.ndarray[Any, Any] | None = None

    @classmethod
    def of(cls, row: Row) -> RowBlock:
        """Make a block of one row; its ``nbytes`` follows from shape, dtype and status."""
        numbers = np.array(
            [
                (
                    row.epoch,
                    row.batch,
                    row.call,
                    row.step,
                    row.wall_time,
                    row.offset,
                    row.length,
                    row.backward,
                    row.crc32c,
                    0,
                    0,
                )
            ],
            dtype=NUMBERS_DTYPE,
        )
        return cls(
            phase=row.phase,
            layer=row.layer,
            kind=row.kind,
            leaf=row.leaf,
            rank=row.rank,
            attempt=row.attempt,
            array=row.array,
            dtype=row.dtype,
            shard=row.shard,
            status=row.status,
            reason=row.reason,
            shapes=[row.shape],
            origins=[Origin(row.structure, row.loss_scale, row.whole_shape)],
            numbers=numbers,
            portion=row.portion,
            statistics=row.statistics,
        )


def make_batch(blocks: Sequence[RowBlock], schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Turn blocks of rows into one record batch; the time it takes hangs on the blocks more than on the rows.

    Parameters
    ----------
    blocks : sequence of RowBlock
        The rows.
    schema : pyarrow.Schema
        Of the recording; see `hookstore.schema.schema_with`.

    Columns are made of buffers, as the Arrow format lays them out: ``pyarrow.array`` would import pandas, where there is one, in the middle of a training.
    """
    counts = [len(block.numbers) for block in blocks]
    num_rows = sum(counts)
    # (not by np.concatenate, which looks for a common dtype again for every block)
    numbers = np.frombuffer(b"".join([block.numbers.tobytes() for block in blocks]), dtype=NUMBERS_DTYPE)
    origins, origin_counts = zip(*(run for block in blocks for run in _runs(block.origins, block.numbers["origin"])), strict=True)
    columns = []
    statistics = _joined_statistics(blocks) if STATISTICS[0] in schema.names else None
    for field in schema:
        if statistics is not None and field.name in STATISTICS:
            columns.append(_statistics_column(field.type, statistics[field.name], num_rows))
        elif field.name == "shape":
            columns.append(_shape_column(blocks))
        elif field.name == "nbytes":
            columns.append(_plain_column(field.type, b"".join(map(_nbytes, blocks)), num_rows))
        elif field.name == "loss_scale":
            scales = np.repeat([np.nan if origin.loss_scale is None else origin.loss_scale for origin in origins], origin_counts)
            known = np.packbits(np.repeat([origin.loss_scale is not None for origin in origins], origin_counts), bitorder="little")
            columns.append(_plain_column(field.type, scales, num_rows, known))
        elif field.name in ("structure", "whole_shape"):
            columns.append(_text_column([getattr(origin, field.name).encode() for origin in origins], origin_counts))
        elif field.name in _NUMBERS:
            columns.append(_plain_column(field.type, np.ascontiguousarray(numbers[field.name]), num_rows))
        elif field.type == pa.string():
            columns.append(_text_column([getattr(block, field.name).encode() for block in blocks], counts))
        else:  # rank and attempt
            values = np.repeat(np.array([getattr(block, field.name) for block in blocks], dtype="<i4"), counts)
            columns.append(_plain_column(field.type, values, num_rows))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _joined_statistics(blocks: Sequence[RowBlock]) -> npt.NDArray[Any]:
    """Return the statistics of all rows."""
    missing = NO_STATISTICS.tobytes()
    contents = [missing * len(block.numbers) if block.statistics is None else block.statistics.tobytes() for block in blocks]
    return np.frombuffer(b"".join(contents), dtype=STATISTICS_DTYPE)


def _statistics_column(kind: pa.DataType, values: npt.NDArray[Any], num_rows: int) -> pa.Array:
    """Make a column of one statistic, with a null where it is undefined or there is none."""
    is_known = values >= 0 if pa.types.is_integer(kind) else ~np.isnan(values)
    return _plain_column(kind, np.ascontiguousarray(values), num_rows, np.packbits(is_known, bitorder="little"))


def _plain_column(kind: pa.DataType, values: npt.NDArray[Any] | bytes, num_rows: int, known: npt.NDArray[Any] | None = None) -> pa.Array:
    return pa.Array.from_buffers(kind, num_rows, [None if known is None else pa.py_buffer(known), pa.py_buffer(values)])


def _text_column(texts: Sequence[bytes], counts: Sequence[int]) -> pa.Array:
    """Make a column of each text as often as it counts."""
    offsets = _offsets(np.repeat([len(text) for text in texts], counts))
    contents = b"".join([text * count for text, count in zip(texts, counts, strict=True)])
    return pa.Array.from_buffers(pa.string(), sum(counts), [None, pa.py_buffer(offsets), pa.py_buffer(contents)])


def _shape_column(blocks: Sequence[RowBlock]) -> pa.Array:
    lengths, counts, contents = [], [], []
    for block in blocks:
        for shape, count in _runs(block.shapes, block.numbers["shape"]):
            lengths.append(len(shape))
            counts.append(count)
            contents.append(struct.pack(f"<{len(shape)}q", *shape) * count)
    offsets = _offsets(np.repeat(lengths, counts))
    values = _plain_column(pa.int64(), b"".join(contents), int(offsets[-1]))
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(offsets) - 1, [None, pa.py_buffer(offsets)], children=[values])


def _runs(values: Sequence[Value], positions: npt.NDArray[Any]) -> Iterable[tuple[Value, int]]:
    """Return what the positions count through, in their order, and how many in a row are the same."""
    if len(values) == 1:
        return [(values[0], len(positions))]
    return [(values[position], len(list(run))) for position, run in itertools.groupby(positions.tolist())]


def _offsets(lengths: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, dtype="<i4")
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _nbytes(block: RowBlock) -> bytes:
    """Return the bytes of each row's tensor as int64, little-endian."""
    itemsize = DTYPES[block.dtype].itemsize if block.status == "ok" and block.dtype else 0
    return b"".join(
        [struct.pack("<q", math.prod(shape) * itemsize) * count for shape, count in _runs(block.shapes, block.numbers["shape"])]
    )


class ShardRows:
    """The rows of one shard, kept until it is sealed.

    Parameters
    ----------
    spool : Spool
        Holds all but the newest.
    schema : pyarrow.Schema
        Of the recording.
    """

    def __init__(self, spool: Spool, schema: pa.Schema = SCHEMA) -> None:
        self._schema = schema
        self._has_statistics = STATISTICS[0] in schema.names
        self._numbers = SpooledRecords(spool, _WITH_STATISTICS_DTYPE if self._has_statistics else NUMBERS_DTYPE)
        self._shapes: dict[tuple[int, ...], int] = {}
        self._origins: dict[Origin, int] = {}
        self._first: RowBlock | None = None

    def append(self, block: RowBlock) -> None:
        """Add rows of the shard."""
        if self._first is None:
            self._first = replace(block, numbers=block.numbers[:0], statistics=None)
        positions = [self._shapes.setdefault(shape, len(self._shapes)) for shape in block.shapes]
        numbers = block.numbers.copy()
        numbers["shape"] = np.array(positions, dtype="<u4")[numbers["shape"]]
        origins = [self._origins.setdefault(origin, len(self._origins)) for origin in block.origins]
        numbers["origin"] = np.array(origins, dtype="<u4")[numbers["origin"]]
        if self._has_statistics:
            records = np.empty(len(numbers), dtype=_WITH_STATISTICS_DTYPE)
            records["numbers"] = numbers
            records["statistics"] = NO_STATISTICS if block.statistics is None else block.statistics
            numbers = records
        self._numbers.append(numbers)

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """The rows in their order."""
        if self._first is None:
            return []
        records = self._numbers.read()
        numbers, statistics = records, None
        if self._has_statistics:
            numbers, statistics = np.ascontiguousarray(records["numbers"]), np.ascontiguousarray(records["statistics"])
        block = replace(self._first, shapes=list(self._shapes), origins=list(self._origins), numbers=numbers, statistics=statistics)
        return [make_batch([block], self._schema)]

    def clear(self) -> None:
        """Forget the rows."""
        self._numbers.clear()
