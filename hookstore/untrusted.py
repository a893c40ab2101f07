"""What is read of the manifest is looked at before it is believed.

Arrow trusts what it reads, and unpacks whatever it is told to. Files that are damaged, or that somebody has made up, must neither end the process nor fill its
memory.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hookstore.schema import NUMS_COLUMNS, TEXT_COLUMNS, widened

# What pyarrow and struct raise for bytes of any other kind.
NONSENSE = (pa.ArrowException, ValueError, TypeError, KeyError, EOFError, OverflowError, OSError, struct.error)
# More than a part or a segment has, however it was written (65,536 rows that came one by one are 200 MB of journal); what claims more is not read.
MOST_PIECE_BYTES = 512 << 20
_MOST_PIECE_ROWS = 1 << 21
_MOST_ROW_GROUPS = 16
_MOST_FOOTER_BYTES = 1 << 20
_MOST_DIMS = 64
_LEAST_TIME, _MOST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999  # years 1 to 9999, all that Python has
# Kinds of values in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_WHOLE = (4, 5, 6)
_DEEPEST = 16


def read_batch(message: pa.Message, schema: pa.Schema) -> pa.RecordBatch:
    """Read rows from an Arrow message, unless they are compressed: nothing here ever is, and unpacking takes any amount of memory."""
    if message.type != "record batch":
        raise ValueError(f"there is a {message.type} where rows are expected")
    if _is_compressed(message.metadata.to_pybytes()):
        raise ValueError("the rows are compressed")
    return checked(pa.ipc.read_record_batch(message, schema))


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


def checked(rows: pa.RecordBatch | pa.Table, *, is_coded: bool = False) -> pa.RecordBatch | pa.Table:
    """Return rows in a schema of the manifest; Arrow trusts what it reads unless it is asked to look."""
    rows.validate(full=True)
    cast = widened(rows, is_coded=is_coded)
    if (
        any(cast.column(field.name).null_count for field in cast.schema if not field.nullable)
        or pc.list_flatten(cast.column("shape")).null_count
    ):
        raise ValueError("there are nulls where the schema has none")
    return cast


def check_sizes(contents: bytes) -> None:
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
            if not 0 <= column[5] <= (num_rows + 1) * _MOST_DIMS or not 0 <= column[6] <= MOST_PIECE_BYTES:
                raise ValueError(f"a column has {column[5]:,} values in {column[6]:,} bytes")
    except (IndexError, AttributeError) as error:
        raise ValueError("its footer is torn") from error


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


def check_times(rows: pa.Table) -> None:
    """Refuse times that Python does not have; nobody could list the rows."""
    times = pc.min_max(rows.column("wall_time").cast(pa.int64())).as_py()
    if rows.num_rows and not _LEAST_TIME <= times["min"] <= times["max"] <= _MOST_TIME:
        raise ValueError("there are times outside the years 1 to 9999")


def check_texts(rows: pa.Table) -> None:
    """Make sure that rows whose texts are coded do not become far too many bytes where the texts are written out."""
    num_bytes = 0
    for name in TEXT_COLUMNS:
        for chunk in rows.column(name).chunks if name in rows.schema.names else ():
            lengths = np.diff(
                np.from_dlpack(pa.Array.from_buffers(pa.int32(), len(chunk.dictionary) + 1, [None, chunk.dictionary.buffers()[1]]))
            )
            num_bytes += int(lengths[np.from_dlpack(chunk.indices)].sum()) if len(chunk) else 0
    if num_bytes > MOST_PIECE_BYTES:
        raise ValueError(f"its texts have {num_bytes:,} bytes")
