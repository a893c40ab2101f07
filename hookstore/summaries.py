"""Statistics of what a run holds: read from the manifest where they were stored, and computed of the tensors where not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from hookstore.samples import divide
from hookstore.schema import FULL_SCHEMA, STATISTICS
from hookstore.statistics import as_numbers, divided, of_tensor

if TYPE_CHECKING:
    from hookstore.rows import RowIndex
    from hookstore.run import Run

_COORDINATES = ("phase", "epoch", "batch", "call", "backward", "step", "leaf", "attempt")

Positions = np.ndarray[Any, Any]


def record_of(run: Run, index: RowIndex, position: int, *, raw: bool) -> np.void:
    """Return the statistics of one tensor as a record of ``STATISTICS_DTYPE``.

    Parameters
    ----------
    run : Run
        The run.
    index : RowIndex
        Rows of it.
    position : int
        Where in the index the tensor's row stands.
    raw : bool
        Whether they are of the tensor as it is stored, multiplied by its loss scale.
    """
    stored: np.void = _stored(index, np.array([position]), raw=raw)[0]
    return stored if stored["nan"] >= 0 else _computed(run, index, position, raw=raw)


def table_of(run: Run, index: RowIndex, positions: Positions, *, raw: bool) -> pa.Table:
    """Return the statistics of many tensors as a table, with their coordinates; see `record_of`."""
    records = _stored(index, positions, raw=raw)
    for number in np.flatnonzero(records["nan"] < 0).tolist():
        records[number] = _computed(run, index, int(positions[number]), raw=raw)
    taken = index.coded.select(_COORDINATES).take(pa.array(positions))
    columns = [taken[name].cast(FULL_SCHEMA.field(name).type) for name in _COORDINATES]
    for name in STATISTICS:
        values = np.ascontiguousarray(records[name])
        columns.append(pa.array(values, mask=np.isnan(values), type=FULL_SCHEMA.field(name).type))
    return pa.table(dict(zip((*_COORDINATES, *STATISTICS), columns, strict=True)))


def _stored(index: RowIndex, positions: Positions, *, raw: bool) -> Positions:
    """Return the statistics that rows hold; of others there is nothing in them."""
    records: Positions = index.statistics[positions]
    return divided(records, 1 / index.scales(positions).astype(np.float64)) if raw else records


def _computed(run: Run, index: RowIndex, position: int, *, raw: bool) -> np.void:
    place = index.place(position)
    bits, dtype = run._read_bits(place)
    numbers = as_numbers(bits, dtype.name)
    scale = place["loss_scale"]
    if not raw and not math.isnan(scale) and numbers.dtype.kind not in "biu":
        numbers = divide(numbers, np.float32(scale))
    return of_tensor(numbers)
