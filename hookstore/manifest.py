"""The manifest: one row per captured tensor, first in the journal, then in Parquet parts.

A journal segment is a file of checksummed frames that only grows; what is in it survives a kill. When it is long enough it becomes a Parquet part of the
same rows and is deleted. The journal is read first and the parts after it, so that a reader misses nothing that moves meanwhile; a part takes the
place of its segment.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from hookstore.errors import CaptureWarning, CorruptRunError
from hookstore.files import (
    check_linked,
    check_no_link,
    read_small,
    sync_directory,
    system,
    write_all,
    write_atomically,
)
from hookstore.format import (
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
    parse_part_name,
    parse_segment_name,
    part_name,
    segment_name,
)
from hookstore.schema import (
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
)
from hookstore.untrusted import MOST_PIECE_BYTES, NONSENSE, check_sizes, check_texts, check_times, checked, read_batch

# Neighbouring rows differ by little in these, and dictionaries would not pay.
_DELTA_COLUMNS = ("wall_time", "offset")
_PLAIN_COLUMNS = ("crc32c",)
_BATCHES_TOGETHER = 64
_FRAME_KINDS = (FRAME_SCHEMA, FRAME_ROWS, FRAME_SYNC)
_MOST_PIECES = 1 << 20
_MOST_MISSING = 100  # that are listed
Key = tuple[int, int, int]  # of a segment or part: rank, attempt, index


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
    return [read_batch(message, schema) for message in messages]


def stream_to_table(stream: bytes, path: str) -> pa.Table:
    """Read the rows that a shard carries, checked.

    Raises
    ------
    CorruptRunError
        If they make no sense.
    """
    try:
        return checked(table_of(stream_to_rows(stream))) if stream else SCHEMA.empty_table()
    except NONSENSE as error:
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
            batches.append(read_batch(pa.ipc.read_message(pa.py_buffer(payload)), schema))
        elif kind == FRAME_SYNC:
            num_durable = struct.unpack(SYNC_FORMAT, payload)[0]
        position = end
    check_times(table_of(batches))
    return Segment(batches, num_durable, damaged[0] if damaged else position, tuple(damaged))


def _has_frame_at(contents: bytes, start: int) -> bool:
    """Say whether a whole frame stands there; then what is before it was not torn but damaged later."""
    if start + FRAME_BYTES > len(contents):
        return False
    length, _kind, crc = struct.unpack_from(FRAME_FORMAT, contents, start)
    payload = contents[start + FRAME_BYTES : start + FRAME_BYTES + length]
    return len(payload) == length and bool(crc32c(payload, crc32c(contents[start : start + 8])) == crc)


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
        contents = read_small(path, MOST_PIECE_BYTES)
        return contents, read_segment(contents)
    except (FileNotFoundError, CorruptRunError):
        raise
    except NONSENSE as error:
        raise CorruptRunError(f"journal segment {path} holds what no writer of this format wrote: {error}", path=path) from error


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
        contents = read_small(path, MOST_PIECE_BYTES)
        found = crc32c(contents)
        if found != crc:
            raise CorruptRunError(
                f"manifest part {path} has crc32c {found:#010x}, its name says {crc:#010x}; it was damaged after it was written", path=path
            )
        check_sizes(contents)
        # (pyarrow's read_table would first import its data sets, which takes twice as long as a million rows)
        texts = [name for name in TEXT_COLUMNS if name in pq.read_schema(pa.BufferReader(contents)).names]
        part = pq.ParquetFile(pa.BufferReader(contents), read_dictionary=texts, page_checksum_verification=True)
        rows = checked(part.read(), is_coded=True)
        check_times(rows)
        check_texts(rows)
    except (FileNotFoundError, CorruptRunError):
        raise
    except NONSENSE as error:
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
