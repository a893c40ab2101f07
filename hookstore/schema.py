"""The columns of the manifest as Arrow schemas.

Most runs have the columns of `SCHEMA`. Where parts of tensors or statistics were asked for there are more, behind these; a run that was taken up again with
other options has pieces of both kinds, and a piece without a column has nothing there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from hookstore.format import MANIFEST_COLUMNS, PORTION_COLUMN, STATISTICS_COLUMNS, WHOLE_SHAPE_COLUMN

_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint32": pa.uint32(),
    "float64": pa.float64(),
    "list<int64>": pa.list_(pa.int64()),
    "timestamp[us, UTC]": pa.timestamp("us", tz="UTC"),
}
_CODED_TEXT = pa.dictionary(pa.int32(), pa.string())
STATISTICS = tuple(name for name, _, _ in STATISTICS_COLUMNS)
_NULLABLE = ("loss_scale", *STATISTICS)


def _field(column: tuple[str, str, str]) -> pa.Field:
    return pa.field(column[0], _TYPES[column[1]], nullable=column[0] in _NULLABLE)


SCHEMA = pa.schema(map(_field, MANIFEST_COLUMNS))
_EARLIER = SCHEMA.remove(SCHEMA.get_field_index("structure"))  # of runs made before that column was there


def schema_with(*, portion: bool, statistics: bool) -> pa.Schema:
    """Return the schema of a recording that keeps parts of tensors, or statistics, or both."""
    more = ([PORTION_COLUMN, WHOLE_SHAPE_COLUMN] if portion else []) + (list(STATISTICS_COLUMNS) if statistics else [])
    return pa.schema([*SCHEMA, *map(_field, more)])


FULL_SCHEMA = schema_with(portion=True, statistics=True)
_KNOWN = (_EARLIER, *(schema_with(portion=portion, statistics=statistics) for portion in (False, True) for statistics in (False, True)))
_KNOWN += tuple(
    known.remove(known.get_field_index(WHOLE_SHAPE_COLUMN[0])) for known in _KNOWN if WHOLE_SHAPE_COLUMN[0] in known.names
)  # likewise
TEXT_COLUMNS = tuple(field.name for field in FULL_SCHEMA if field.type == pa.string())
NUMS_COLUMNS = frozenset(map(len, _KNOWN))


def coded(schema: pa.Schema) -> pa.Schema:
    """Return a schema with each text as a number that counts into the few texts of its column: read in half the time, and searched in a fifth."""
    return pa.schema([field.with_type(_CODED_TEXT) if field.name in TEXT_COLUMNS else field for field in schema])


CODED_SCHEMA = coded(SCHEMA)


def plain(schema: pa.Schema) -> pa.Schema:
    """Return a schema with its texts as they are."""
    return pa.schema([FULL_SCHEMA.field(name) for name in schema.names])


def is_known(schema: pa.Schema) -> bool:
    """Say whether a writer of this format writes rows in a schema."""
    return any(schema.equals(known) for known in _KNOWN)


def whole(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return the smallest schema that has the columns of all of these."""
    names = {name for schema in schemas for name in schema.names}
    return schema_with(portion=PORTION_COLUMN[0] in names, statistics=STATISTICS[0] in names)


def conform(rows: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.RecordBatch | pa.Table:
    """Return rows in a schema that has all their columns, with nothing where they lack one."""
    if rows.schema.names == schema.names:
        return rows
    columns = []
    for field in schema:
        if field.name in rows.schema.names:
            columns.append(rows.column(field.name))
        elif field.name in TEXT_COLUMNS:
            empty = pa.array([""] * rows.num_rows, type=pa.string())
            columns.append(empty.dictionary_encode() if field.type == _CODED_TEXT else empty)
        else:
            columns.append(pa.nulls(rows.num_rows, type=field.type))
    return type(rows).from_arrays(columns, schema=schema)


def widened(rows: pa.RecordBatch | pa.Table, *, is_coded: bool = False) -> pa.RecordBatch | pa.Table:
    """Return rows, of an earlier run too, with the columns and the types that such runs have by now.

    Raises
    ------
    pyarrow.ArrowException, ValueError
        If no writer ever wrote these columns in this order, or with such types.
    """
    then = next((known for known in _KNOWN if known.names == rows.schema.names), None)
    if then is None:
        raise ValueError(f"there are other columns, or in another order: {', '.join(rows.schema.names)}")
    now = whole([then])
    return conform(rows.cast(coded(then) if is_coded else then), coded(now) if is_coded else now)


def table_of(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Put batches together, in the smallest schema that holds them all."""
    schema = whole([batch.schema for batch in batches])
    return pa.Table.from_batches([conform(batch, schema) for batch in batches], schema=schema)


def join(tables: Sequence[pa.Table]) -> pa.Table:
    """Put tables together that are all coded or all plain, in the smallest schema that holds them all."""
    if not tables:
        return CODED_SCHEMA.empty_table()
    schema = whole([table.schema for table in tables])
    if tables[0].schema.field("layer").type == _CODED_TEXT:
        schema = coded(schema)
    return pa.concat_tables([conform(table, schema) for table in tables])
