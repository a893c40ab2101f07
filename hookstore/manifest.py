"""The manifest: one row per captured tensor, first in the journal, then in Parquet parts.

A journal segment is a file of checksummed frames that only grows; what is in it survives a kill. When it is long enough it becomes a Parquet part of the
same rows and is deleted. The journal is read first and the parts after it, so that a reader misses nothing that moves meanwhile; a part takes the
place of its segment.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from hookstore.errors import CaptureWarning, CorruptRunError
from hookstore.files import (
    Spool,
    SpooledRecords,
    check_linked,
    check_no_link,
    read_small,
    sync_directory,
    system,
    write_all,
    write_atomically,
)
from hookstore.format import (
    DTYPES,
    FRAME_BYTES,
    FRAME_FORMAT,
    FRAME_ROWS,
    FRAME_SCHEMA,
    FRAME_SYNC,
    JOURNAL_DIR,
    MANIFEST_DIR,
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    SYNC_FORMAT,
    Row,
    parse_part_name,
    parse_segment_name,
    part_name,
    segment_name,
)
from hookstore.schema import (
    NUMS_COLUMNS,
    SCHEMA,
    STATISTICS,
    TEXT_COLUMNS,
    coded,
    conform,
    is_known,
    join,
    plain,
    table_of,
    whole,
    widened,
)
from hookstore.statistics import NO_STATISTICS, STATISTICS_DTYPE

# Neighbouring rows differ by little in these, and dictionaries would not pay.
_DELTA_COLUMNS = ("wall_time", "offset")
_PLAIN_COLUMNS = ("crc32c",)
_BATCHES_TOGETHER = 64
_FRAME_KINDS = (FRAME_SCHEMA, FRAME_ROWS, FRAME_SYNC)
# More than a part or a segment has, however it was written (65,536 rows that came one by one are 200 MB of journal); what claims more is not read.
_MOST_PIECE_BYTES = 512 << 20
_MOST_PIECE_ROWS = 1 << 21
_MOST_ROW_GROUPS = 16
_MOST_FOOTER_BYTES = 1 << 20
_MOST_DIMS = 64
_MOST_PIECES = 1 << 20
_MOST_MISSING = 100  # that are listed
_LEAST_TIME, _MOST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999  # years 1 to 9999, all that Python has
Value = TypeVar("Value")
Key = tuple[int, int, int]  # of a segment or part: rank, attempt, index
# What pyarrow and struct raise for bytes of any other kind.
_NONSENSE = (pa.ArrowException, ValueError, TypeError, KeyError, EOFError, OverflowError, OSError, struct.error)


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


_PLAIN = Origin()


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


def rows_to_stream(batches: Iterable[pa.RecordBatch], earlier: bytes = b"") -> bytes:
    """Serialise the rows that a shard carries as an Arrow IPC stream, after those that it carried before."""
    sink = io.BytesIO()
    together = [*(stream_to_rows(earlier) if earlier else ()), *batches]
    schema = whole([batch.schema for batch in together])
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in together:
            stream.write_batch(conform(batch, schema))
    return sink.getvalue()


def stream_to_rows(stream: bytes) -> list[pa.RecordBatch]:
    """Read what `rows_to_stream` wrote.

    Raises
    ------
    pyarrow.ArrowException, ValueError, struct.error
        If no writer of this format wrote it.
    """
    messages = iter(pa.ipc.MessageReader.open_stream(stream))
    first = next(messages, None)
    schema = None if first is None else pa.ipc.read_schema(first)
    if schema is None or not is_known(schema):
        raise ValueError("the rows have another schema")
    return [_read_batch(message, schema) for message in messages]


def stream_to_table(stream: bytes, path: str) -> pa.Table:
    """Read the rows that a shard carries, checked.

    Raises
    ------
    CorruptRunError
        If they make no sense.
    """
    try:
        return _checked(table_of(stream_to_rows(stream))) if stream else SCHEMA.empty_table()
    except _NONSENSE as error:
        raise CorruptRunError(f"shard {path} carries rows that no writer of this format wrote: {error}", path=path) from error


class RowGroups:
    """Finds manifest rows by array and shard.

    Parameters
    ----------
    rows : pyarrow.Table
        Plain or coded.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._groups: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        if not rows.num_rows:
            return
        codes, texts = zip(*(self._codes(rows[name]) for name in ("array", "shard")), strict=True)
        together = codes[0].astype(np.int64) << 32 | codes[1]
        order = np.argsort(together, kind="stable")
        bounds = np.flatnonzero(np.diff(together[order])) + 1
        for positions in np.split(order, bounds):
            where = int(together[positions[0]])
            self._groups[texts[0][where >> 32], texts[1][where & 0xFFFF_FFFF]] = positions

    @staticmethod
    def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray[Any, Any], list[str]]:
        coded = column.combine_chunks()
        if not pa.types.is_dictionary(coded.type):
            coded = coded.dictionary_encode()
        return np.asarray(coded.indices), coded.dictionary.to_pylist()

    def of(self, array: str, shard: str) -> np.ndarray[Any, Any]:
        """Return the positions of a shard's rows, in their order."""
        return self._groups.get((array, shard), np.empty(0, dtype=np.int64))

    def items(self) -> Iterable[tuple[tuple[str, str], np.ndarray[Any, Any]]]:
        """Return array, shard and positions; rows without bytes are under two empty texts."""
        return self._groups.items()


class RowLog:
    """Rows that are kept until their segment becomes a part. Small batches cost many times what is in them, so they are made one as they gather."""

    def __init__(self) -> None:
        self._levels: list[list[pa.RecordBatch]] = [[]]

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self._levels[0].append(batch)
        level = 0
        while len(self._levels[level]) == _BATCHES_TOGETHER:
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1] += _combined(self._levels[level])
            self._levels[level] = []
            level += 1

    @property
    def batches(self) -> list[pa.RecordBatch]:
        """The rows in their order."""
        return [batch for level in reversed(self._levels) for batch in level]


def _combined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return list(table_of(batches).combine_chunks().to_batches())


class ManifestWriter:
    """Writes the journal and the parts of one process; used by one thread.

    Parameters
    ----------
    run_path : str
        The run; its ``manifest`` and ``journal`` directories exist.
    rank, attempt : int
        Part of every file name, so that no two processes write one file.
    schema : pyarrow.Schema
        Of the recording.
    """

    def __init__(self, run_path: str, rank: int = 0, attempt: int = 0, schema: pa.Schema = SCHEMA) -> None:
        self._schema = schema
        self._run_path = run_path
        self._journal_path = os.path.join(run_path, JOURNAL_DIR)
        self._rank = rank
        self._attempt = attempt
        self._index = -1
        self._descriptor = -1
        self._log = RowLog()
        self._num_rows = 0
        self.num_bytes = 0  # of the segment

    @property
    def is_segment_full(self) -> bool:
        """Whether the segment has enough rows, or bytes, to become a part."""
        return self._num_rows >= SEGMENT_ROWS or self.num_bytes >= SEGMENT_BYTES

    def append(self, batch: pa.RecordBatch) -> None:
        """Acknowledge rows: when this returns they survive a kill of the process. Their bytes must have been written before."""
        if self._descriptor < 0:
            self._begin_segment()
        self._write_frame(FRAME_ROWS, batch.serialize())
        self._log.append(batch)
        self._num_rows += batch.num_rows

    def mark_durable(self) -> None:
        """Note in the journal that the bytes of all rows so far are on the device, and bring the journal there too."""
        if self._descriptor >= 0:
            self._write_frame(FRAME_SYNC, struct.pack(SYNC_FORMAT, self._num_rows))
            system.sync(self._descriptor)

    def finish_segment(self) -> None:
        """Turn the segment into a Parquet part. The bytes of its rows must be durable."""
        if self._descriptor < 0:
            return
        write_part(self._run_path, (self._rank, self._attempt, self._index), self._log.batches)
        self.close()
        system.unlink(self._segment_path())
        self._log = RowLog()
        self._num_rows = 0
        self.num_bytes = 0

    def close(self) -> None:
        """Close the segment as it is."""
        if self._descriptor >= 0:
            system.close(self._descriptor)
            self._descriptor = -1

    def _segment_path(self) -> str:
        return os.path.join(self._journal_path, segment_name(self._rank, self._attempt, self._index))

    def _begin_segment(self) -> None:
        self._index += 1
        self._descriptor = system.open(self._segment_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        self._write_frame(FRAME_SCHEMA, self._schema.serialize())
        sync_directory(self._journal_path)

    def _write_frame(self, kind: int, payload: pa.Buffer | bytes) -> None:
        contents = bytes(payload)
        path = self._segment_path()
        try:
            write_all(self._descriptor, _frame_header(kind, contents) + contents, path)
            self.num_bytes += FRAME_BYTES + len(contents)
            check_linked(self._descriptor, path)
        except OSError as error:
            error.filename = path
            raise


def _frame_header(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<II", len(payload), kind)
    return head + crc32c(payload, crc32c(head)).to_bytes(4, "little")


def write_part(run_path: str, key: Key, batches: Sequence[pa.RecordBatch]) -> None:
    """Write rows as a part, which is durable on return. Their bytes must be durable.

    Parameters
    ----------
    run_path : str
        The run.
    key : tuple of int
        Rank, attempt and index.
    batches : sequence of pyarrow.RecordBatch
        The rows.
    """
    contents = encode_part(batches)
    write_atomically(os.path.join(run_path, MANIFEST_DIR, part_name(*key, crc32c(contents))), contents)


def encode_part(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Encode rows as one Parquet file, with page checksums."""
    table = table_of(batches)
    without = {*_DELTA_COLUMNS, *_PLAIN_COLUMNS, *STATISTICS}
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=[
            "shape.list.element" if field.name == "shape" else field.name for field in table.schema if field.name not in without
        ],
        column_encoding=dict.fromkeys(_DELTA_COLUMNS, "DELTA_BINARY_PACKED"),
        write_page_checksum=True,
        coerce_timestamps="us",
    )
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Segment:
    """What could be read of a journal segment.

    Attributes
    ----------
    batches : list of pyarrow.RecordBatch
        Its acknowledged rows.
    num_durable : int
        How many of them are known to be durable.
    num_bytes : int
        Bytes up to the first frame that is torn or damaged.
    damaged : tuple of int
        Offsets of damaged frames, whose rows are lost. After a power failure the last may be so; nothing durable was in it then.
    """

    batches: list[pa.RecordBatch]
    num_durable: int
    num_bytes: int
    damaged: tuple[int, ...]


def read_segment(contents: bytes) -> Segment:
    """Read a journal segment up to the first frame that is torn, leaving out frames that are damaged.

    Raises
    ------
    pyarrow.ArrowException, ValueError, struct.error
        If a frame with a right checksum holds what no writer of this format wrote.
    """
    batches: list[pa.RecordBatch] = []
    damaged: list[int] = []
    num_durable = position = 0
    schema: pa.Schema | None = None
    while len(contents) - position >= FRAME_BYTES:
        length, kind, crc = struct.unpack_from(FRAME_FORMAT, contents, position)
        end = position + FRAME_BYTES + length
        payload = contents[position + FRAME_BYTES : end]
        if len(payload) < length or crc32c(payload, crc32c(contents[position : position + 8])) != crc:
            if not _has_frame_at(contents, end):
                # A kill leaves the beginning of a frame, and neither a whole one that is wrong nor something else.
                if end <= len(contents) or kind not in _FRAME_KINDS or (kind == FRAME_SCHEMA) != (position == 0):
                    damaged.append(position)
                break
            damaged.append(position)
        elif kind == FRAME_SCHEMA:
            schema = pa.ipc.read_schema(pa.py_buffer(payload))
            if not is_known(schema):
                raise ValueError("it has another schema")
        elif kind == FRAME_ROWS and schema is not None:
            batches.append(_read_batch(pa.ipc.read_message(pa.py_buffer(payload)), schema))
        elif kind == FRAME_SYNC:
            num_durable = struct.unpack(SYNC_FORMAT, payload)[0]
        position = end
    _check_times(table_of(batches))
    return Segment(batches, num_durable, damaged[0] if damaged else position, tuple(damaged))


def _has_frame_at(contents: bytes, start: int) -> bool:
    """Say whether a whole frame stands there; then what is before it was not torn but damaged later."""
    if start + FRAME_BYTES > len(contents):
        return False
    length, _kind, crc = struct.unpack_from(FRAME_FORMAT, contents, start)
    payload = contents[start + FRAME_BYTES : start + FRAME_BYTES + length]
    return len(payload) == length and bool(crc32c(payload, crc32c(contents[start : start + 8])) == crc)


def _read_batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """Read rows from an Arrow message, unless they are compressed: nothing here ever is, and unpacking takes any amount of memory."""
    if message.type != "record batch":
        raise ValueError(f"there is a {message.type} where rows are expected")
    if _is_compressed(message.metadata.to_pybytes()):
        raise ValueError("the rows are compressed")
    return _checked(pa.ipc.read_record_batch(message, schema))


def _is_compressed(metadata: bytes) -> bool:
    """Say whether the record batch that a Flatbuffer describes (Message.fbs of Arrow, checked by Arrow) has the field ``compression``."""
    header = _flatbuffer_field(metadata, struct.unpack_from("<I", metadata)[0], 2)
    header += struct.unpack_from("<I", metadata, header)[0]
    return _flatbuffer_field(metadata, header, 3) != 0


def _flatbuffer_field(contents: bytes, table: int, number: int) -> int:
    """Return where a field of a table begins, or 0 if it has none."""
    fields = table - struct.unpack_from("<i", contents, table)[0]
    num_bytes = struct.unpack_from("<H", contents, fields)[0]
    place = 4 + 2 * number
    start = struct.unpack_from("<H", contents, fields + place)[0] if place < num_bytes else 0
    return int(table + start) if start else 0


def _checked(rows: pa.RecordBatch | pa.Table, *, is_coded: bool = False) -> pa.RecordBatch | pa.Table:
    """Return rows in a schema of the manifest; Arrow trusts what it reads unless it is asked to look."""
    rows.validate(full=True)
    cast = widened(rows, is_coded=is_coded)
    if (
        any(cast.column(field.name).null_count for field in cast.schema if not field.nullable)
        or pc.list_flatten(cast.column("shape")).null_count
    ):
        raise ValueError("there are nulls where the schema has none")
    return cast


def read_manifest(run_path: str) -> pa.Table:
    """Read every acknowledged row of a run, live, killed or finished, in the order in which they were acknowledged.

    Returns
    -------
    pyarrow.Table
        Schema `hookstore.schema.SCHEMA`, with further columns where parts of tensors or statistics were asked for.

    Raises
    ------
    CorruptRunError
        If none of the parts and segments can be read. One that is damaged beside others that are not is left out with a warning.
    """
    rows = ManifestReader(run_path).read()
    return rows.cast(plain(rows.schema))


def missing_keys(keys: Iterable[Key]) -> list[Key]:
    """Return the parts that are missing between others, which are numbered without gaps; the first of them, if there are very many."""
    indexes: dict[tuple[int, int], set[int]] = {}
    for rank, attempt, index in keys:
        indexes.setdefault((rank, attempt), set()).add(index)
    return [
        (*where, index)
        for where, known in sorted(indexes.items())
        for index in sorted(set(range(min(max(known), _MOST_PIECES))) - known)[:_MOST_MISSING]
    ]


def unknown_part(run_path: str, key: Key) -> str:
    """Return the path of a part whose checksum is not known, as one would search for it."""
    return os.path.join(run_path, MANIFEST_DIR, part_name(*key, 0).replace("-00000000.", "-*."))


def join_pieces(pieces: Mapping[Key, pa.Table]) -> pa.Table:
    """Put parts and segments, which are coded, together in the order in which their rows were acknowledged."""
    ordered = [pieces[key] for key in sorted(pieces, key=lambda key: (key[1], key[0], key[2]))]
    return join(ordered).unify_dictionaries()


class ManifestReader:
    """Reads the manifest of a run, and again what has come since.

    Parameters
    ----------
    run_path : str
        The run.
    warns : bool
        Whether to warn about what is left out.

    Attributes
    ----------
    damaged : dict of str to str
        Parts and segments that are left out, wholly or in part, by path: what is wrong with each.
    """

    def __init__(self, run_path: str, *, warns: bool = True) -> None:
        self.damaged: dict[str, str] = {}
        self._warns = warns
        self._run_path = run_path
        self._parts: dict[str, pa.Table] = {}  # by file name: their contents never change
        self._segments: dict[str, tuple[int, pa.Table]] = {}  # with the bytes that were read
        self._unwarned: list[str] = []
        self._damaged_keys: set[Key] = set()
        self._is_listed = True  # whether the directories could be

    def read(self) -> pa.Table:
        """Read every row that is acknowledged by now; see `read_manifest`.

        Returns
        -------
        pyarrow.Table
            Coded (see `hookstore.schema`); all chunks of a text column have the same dictionary.
        """
        # The journal first: what moves to a part meanwhile is found there.
        segments = self._read_segments()
        parts = self._read_parts()
        pieces = {**segments, **parts}
        missing = missing_keys([*pieces, *self._damaged_keys]) if self._is_listed else []
        for path in [unknown_part(self._run_path, key) for key in missing]:
            self._leave_out(path, f"manifest part {path} is missing, and with it the rows that were in it")
        if self.damaged and not pieces:
            path, problem = next(iter(self.damaged.items()))
            raise CorruptRunError(problem, path=path)
        self._warn()
        return join_pieces(pieces)

    def _read_segments(self) -> dict[Key, pa.Table]:
        found: dict[Key, pa.Table] = {}
        known, self._segments = self._segments, {}
        directory = os.path.join(self._run_path, JOURNAL_DIR)
        for name in self._names(directory):
            key = parse_segment_name(name)
            if key is None:
                continue
            path = os.path.join(directory, name)
            try:
                if name not in known or os.stat(path).st_size != known[name][0]:
                    known[name] = self._read_segment(path)
            except FileNotFoundError:
                continue  # it has become a part since the listing
            except CorruptRunError as error:
                self._leave_out(path, str(error), key)
                continue
            self._segments[name] = known[name]
            found[key] = known[name][1]
        return found

    def _read_segment(self, path: str) -> tuple[int, pa.Table]:
        contents, segment = load_segment(path)
        if segment.damaged:
            self._leave_out(
                path,
                f"journal segment {path} is damaged at byte {', '.join(map(str, segment.damaged))}: the captures acknowledged there are missing",
            )
        return len(contents), code_rows(table_of(segment.batches).combine_chunks())

    def _read_parts(self) -> dict[Key, pa.Table]:
        found: dict[Key, pa.Table] = {}
        directory = os.path.join(self._run_path, MANIFEST_DIR)
        for name in self._names(directory):
            parsed = parse_part_name(name)
            if parsed is None:
                continue
            path = os.path.join(directory, name)
            try:
                if name not in self._parts:
                    self._parts[name] = load_part(path, parsed[1])
            except FileNotFoundError:
                continue  # a repair has put it aside since the listing
            except CorruptRunError as error:
                self._leave_out(path, str(error), parsed[0])
                continue
            found[parsed[0]] = self._parts[name]
        return found

    def _names(self, directory: str) -> list[str]:
        try:
            return _listdir(directory)
        except CorruptRunError as error:
            self._leave_out(directory, str(error))
            self._is_listed = False
            return []

    def _leave_out(self, path: str, problem: str, key: Key | None = None) -> None:
        if key is not None:
            self._damaged_keys.add(key)
        if path not in self.damaged:
            self.damaged[path] = problem
            self._unwarned.append(problem)

    def _warn(self) -> None:
        while self._unwarned and self._warns:
            warnings.warn(f"{self._unwarned.pop(0)}; `hookstore recover` looks for them in the shards", CaptureWarning, stacklevel=5)


def load_segment(path: str) -> tuple[bytes, Segment]:
    """Read a journal segment.

    Raises
    ------
    CorruptRunError
        If it holds what no writer of this format wrote.
    """
    try:
        contents = read_small(path, _MOST_PIECE_BYTES)
        return contents, read_segment(contents)
    except (FileNotFoundError, CorruptRunError):
        raise
    except _NONSENSE as error:
        raise CorruptRunError(f"journal segment {path} holds what no writer of this format wrote: {error}", path=path) from error


def _check_sizes(contents: bytes) -> None:
    """Look at what a Parquet file says it unpacks to before any of it is unpacked.

    Arrow's own access to this would end the process at some of what a footer may hold, so that it is read here.
    """
    num_bytes = int.from_bytes(contents[-8:-4], "little")
    if not 0 < num_bytes <= min(_MOST_FOOTER_BYTES, len(contents) - 8):
        raise ValueError(f"its footer of {num_bytes:,} bytes is too long")
    try:
        footer = _read_thrift(contents[-8 - num_bytes : -8], 0, _STRUCT)[0]
        num_rows, groups = footer[3], footer[4]
        nums_columns = {len(group[1]) for group in groups}
        if not 0 <= num_rows <= _MOST_PIECE_ROWS or len(groups) > _MOST_ROW_GROUPS or nums_columns - NUMS_COLUMNS:
            raise ValueError(f"it has {num_rows:,} rows in {len(groups):,} groups of other columns")
        for column in (column[3] for group in groups for column in group[1]):
            if not 0 <= column[5] <= (num_rows + 1) * _MOST_DIMS or not 0 <= column[6] <= _MOST_PIECE_BYTES:
                raise ValueError(f"a column has {column[5]:,} values in {column[6]:,} bytes")
    except (IndexError, AttributeError) as error:
        raise ValueError("its footer is torn") from error


_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_WHOLE = (4, 5, 6)
_DEEPEST = 16


def _read_thrift(contents: bytes, at: int, kind: int, depth: int = 0) -> tuple[Any, int]:  # noqa: C901, PLR0912  # a branch for each kind
    """Read a value in Thrift's compact protocol: structures as dictionaries by field; returns it, and where the next one begins."""
    if depth > _DEEPEST:
        raise ValueError("its footer is too deep")
    if kind in _WHOLE:
        number, at = _read_varint(contents, at)
        return number >> 1 ^ -(number & 1), at
    if kind == _BINARY:
        length, at = _read_varint(contents, at)
        return length, at + length
    if kind in (_TRUE, _FALSE, _BYTE):
        return contents[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    if kind in (_LIST, _SET):
        count, inner = contents[at] >> 4, contents[at] & 15
        at += 1
        if count == 15:
            count, at = _read_varint(contents, at)
        values = []
        for _ in range(count):
            value, at = _read_thrift(contents, at, inner, depth + 1)
            values.append(value)
        return values, at
    if kind != _STRUCT:
        raise ValueError(f"its footer has something of kind {kind}")
    fields: dict[int, Any] = {}
    number = 0
    while head := contents[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _read_thrift(contents, at, 4)
        inner = head & 15
        if inner in (_TRUE, _FALSE):
            fields[number] = inner == _TRUE
        else:
            fields[number], at = _read_thrift(contents, at, inner, depth + 1)
    return fields, at + 1


def _read_varint(contents: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = contents[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("its footer has a number that is too long")


def _check_times(rows: pa.Table) -> None:
    """Refuse times that Python does not have; nobody could list the rows."""
    times = pc.min_max(rows.column("wall_time").cast(pa.int64())).as_py()
    if rows.num_rows and not _LEAST_TIME <= times["min"] <= times["max"] <= _MOST_TIME:
        raise ValueError("there are times outside the years 1 to 9999")


def _check_texts(rows: pa.Table) -> None:
    """Make sure that rows whose texts are coded do not become far too many bytes where the texts are written out."""
    num_bytes = 0
    for name in TEXT_COLUMNS:
        for chunk in rows.column(name).chunks if name in rows.schema.names else ():
            lengths = np.diff(
                np.from_dlpack(pa.Array.from_buffers(pa.int32(), len(chunk.dictionary) + 1, [None, chunk.dictionary.buffers()[1]]))
            )
            num_bytes += int(lengths[np.from_dlpack(chunk.indices)].sum()) if len(chunk) else 0
    if num_bytes > _MOST_PIECE_BYTES:
        raise ValueError(f"its texts have {num_bytes:,} bytes")


def code_rows(rows: pa.Table) -> pa.Table:
    """Turn the text columns into dictionaries."""
    columns = [column.dictionary_encode() if pa.types.is_string(column.type) else column for column in rows.columns]
    return pa.Table.from_arrays(columns, names=rows.schema.names).cast(coded(rows.schema))


def load_part(path: str, crc: int) -> pa.Table:
    """Read a part, whose name has that crc32c, coded.

    Raises
    ------
    CorruptRunError
        If it does not match the checksum, or makes no sense.
    """
    try:
        contents = read_small(path, _MOST_PIECE_BYTES)
        found = crc32c(contents)
        if found != crc:
            raise CorruptRunError(
                f"manifest part {path} has crc32c {found:#010x}, its name says {crc:#010x}; it was damaged after it was written", path=path
            )
        _check_sizes(contents)
        # (pyarrow's read_table would first import its data sets, which takes twice as long as a million rows)
        texts = [name for name in TEXT_COLUMNS if name in pq.read_schema(pa.BufferReader(contents)).names]
        part = pq.ParquetFile(pa.BufferReader(contents), read_dictionary=texts, page_checksum_verification=True)
        rows = _checked(part.read(), is_coded=True)
        _check_times(rows)
        _check_texts(rows)
    except (FileNotFoundError, CorruptRunError):
        raise
    except _NONSENSE as error:
        raise CorruptRunError(f"manifest part {path} holds what no writer of this format wrote: {error}", path=path) from error
    return rows


def _listdir(path: str) -> list[str]:
    check_no_link(path)
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise CorruptRunError(f"{path} is no directory", path=path) from error
