"""The manifest rows of one layer and kind, found by their coordinates."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from hookstore.format import PORTION_COLUMN, WHOLE_SHAPE_COLUMN
from hookstore.schema import STATISTICS, TEXT_COLUMNS, plain
from hookstore.statistics import NO_STATISTICS, STATISTICS_DTYPE

_PLACE_IN_TRAINING = ("phase", "epoch", "batch", "call")
_COORDINATES = (*_PLACE_IN_TRAINING, "attempt", "backward")
MOST_SHARD_BYTES = 2**40  # a shard of 256 MiB may hold more in the end, but not this much
_MOST_SOURCES = 2**22
_PORTION = PORTION_COLUMN[0]
_PLACE = ("layer", "kind", "array", "dtype", "shard", "offset", "length", "crc32c", "reason", "loss_scale", "structure")


class RowIndex:
    """Finds manifest rows of one layer and kind by their coordinates.

    Parameters
    ----------
    coded : pyarrow.Table
        The rows, coded (see `hookstore.schema`).
    """

    def __init__(self, coded: pa.Table) -> None:
        self.coded = coded
        self._texts: dict[str, list[str]] = {}
        has_portions = _PORTION in coded.schema.names
        names = (*_COORDINATES, "leaf", "status", *_PLACE, *([_PORTION, WHOLE_SHAPE_COLUMN[0]] if has_portions else []))
        self._columns = {name: self._column(name) for name in names}
        shapes = self.coded["shape"].combine_chunks()
        self._shape_ends, self._sizes = np.from_dlpack(shapes.offsets), np.from_dlpack(shapes.values)
        # Of rows with equal coordinates the one captured last comes last: regions of different arrays reach the disk in another order.
        times = np.from_dlpack(self.coded["wall_time"].combine_chunks().view(pa.int64()))
        self._order = np.lexsort([times, *(self._columns[name] for name in reversed(_COORDINATES))])
        # (all of one width: NumPy would convert a whole column each time that a number of another is looked for in it)
        self._sorted = {name: self._columns[name][self._order].astype(np.int64) for name in _PLACE_IN_TRAINING}

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column as numbers; those of text count into the texts kept aside."""
        column = self.coded[name].combine_chunks()
        if name == "loss_scale":
            return filled(column, math.nan)
        if name in TEXT_COLUMNS:
            self._texts[name] = column.dictionary.to_pylist()
            column = column.indices
        return np.asarray(np.from_dlpack(column))  # (Arrow's own to_numpy first imports pandas where there is one)

    @cached_property
    def rows(self) -> pa.Table:
        """The rows with their texts as they are."""
        return self.coded.cast(plain(self.coded.schema))

    @cached_property
    def statistics(self) -> np.ndarray[Any, Any]:
        """Statistics in the rows, of ``STATISTICS_DTYPE``; a count of NaN of -1 says that a row has none."""
        records = np.full(len(self._order), NO_STATISTICS, dtype=STATISTICS_DTYPE)
        for name in STATISTICS if STATISTICS[0] in self.coded.schema.names else ():
            values = self.coded[name].combine_chunks()
            records[name] = filled(values, math.nan if pa.types.is_floating(values.type) else -1)
        return records

    @cached_property
    def portions(self) -> list[str]:
        """Portions of which tensors or statistics are stored, the whole tensor ("") first; none where nothing is stored."""
        stored = self.only_stored(np.arange(len(self._order)))
        if _PORTION not in self._columns:
            return [""] if stored.size else []
        return sorted(self._texts[_PORTION][code] for code in set(self._columns[_PORTION][stored].tolist()))

    def of_portion(self, text: str) -> RowIndex:
        """Return an index of the rows of one portion, and of the gaps that concern every portion."""
        if _PORTION not in self._columns:
            return self if not text else RowIndex(self.coded.slice(0, 0))
        portions, everything = self._columns[_PORTION], np.arange(len(self._order))
        is_stored = np.zeros(len(portions), dtype=bool)
        is_stored[self.only_stored(everything)] = True
        is_wanted = (portions == self._code(_PORTION, text)) | ((portions == self._code(_PORTION, "")) & ~is_stored)
        return self if is_wanted.all() else RowIndex(keep(self.coded, is_wanted))

    @cached_property
    def phases(self) -> list[str]:
        """Phases of the rows."""
        return sorted(self._texts["phase"][code] for code in set(self._columns["phase"].tolist()))

    @cached_property
    def has_structures(self) -> bool:
        """Whether any row is part of something else than a plain tensor."""
        return bool((self._columns["structure"] != self._code("structure", "")).any())

    def why_never(self, leaf: str | None) -> str:
        """Return the reason where a leaf (or ``None`` for anything) was never captured, but was once said to be skipped; else ""."""
        positions = self._order if leaf is None else self.only_leaf(self._order, leaf)
        if not positions.size or self.only_stored(positions).size:
            return ""
        row = self.place(int(positions[0]))
        return f"{row['reason']} (so in epoch {row['epoch']}, batch {row['batch']})" if row["status"] == "skipped" else ""

    def attempt_of(self, position: int) -> int:
        """Return the attempt of the row at a position."""
        return int(self._columns["attempt"][position])

    def place(self, position: int) -> dict[str, Any]:
        """Return what reading the tensor of one row needs to know; the whole row costs twenty times as much."""
        place = {name: column.item(position) for name, column in self._columns.items()}
        for name, texts in self._texts.items():
            place[name] = texts[place[name]]
        place["shape"] = self._sizes[self._shape_ends[position] : self._shape_ends[position + 1]].tolist()
        return place

    def sources(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return for each of those positions a number that stands for its array and shard."""
        arrays, shards = self._columns["array"][positions], self._columns["shard"][positions]
        return np.unique(arrays.astype(np.int64) << 32 | shards, return_inverse=True)[1]

    @cached_property
    def overlapping(self) -> frozenset[tuple[str, str, int, int]]:
        """Array, shard, offset and length of chunks that share bytes with another one, which is not the same one: none where all is well."""
        captured = np.flatnonzero(self._columns["status"] == self._code("status", "ok"))
        starts, lengths = self._columns["offset"][captured], self._columns["length"][captured]
        is_possible = (starts >= 0) & (starts < MOST_SHARD_BYTES) & (lengths > 0)  # no other row is read
        if not is_possible.all():
            captured, starts, lengths = captured[is_possible], starts[is_possible], lengths[is_possible]
        sources = self._columns["array"][captured].astype(np.int64) * len(self._texts["shard"]) + self._columns["shard"][captured]
        if len(self._texts["shard"]) * len(self._texts["array"]) >= _MOST_SOURCES:
            sources = np.unique(sources, return_inverse=True)[1]
        keys = sources * MOST_SHARD_BYTES + starts
        if (keys[1:] < keys[:-1]).any():
            order = np.argsort(keys)
            captured, keys, lengths = captured[order], keys[order], lengths[order]
        gaps = keys[1:] - keys[:-1]
        # (where two overlap, two neighbours do; a neighbour in another shard, which a length without bounds reaches, is sorted out below)
        is_shared = (gaps < lengths[:-1]) & ((gaps > 0) | (lengths[1:] != lengths[:-1]))
        found: set[tuple[str, str, int, int]] = set()
        for source in np.unique(keys[1:][is_shared] // MOST_SHARD_BYTES).tolist():
            positions = captured[keys // MOST_SHARD_BYTES == source].tolist()
            found |= _overlapping([self.place(position) for position in positions])
        return frozenset(found)

    def are_other(self, positions: np.ndarray[Any, Any], num_dims: int) -> np.ndarray[Any, Any]:
        """Say which positions have another dtype than the first, or not that number of dimensions."""
        dtypes = self._columns["dtype"][positions]
        return np.asarray((dtypes != dtypes[0]) | (self._shape_ends[positions + 1] - self._shape_ends[positions] != num_dims))

    def sizes(self, positions: np.ndarray[Any, Any], num_dims: int) -> np.ndarray[Any, Any]:
        """Return the shapes at those positions, which all have that number of dimensions, a line for each."""
        return np.asarray(self._sizes[self._shape_ends[positions][:, None] + np.arange(num_dims)])

    def _code(self, name: str, value: str) -> int:
        return self._texts[name].index(value) if value in self._texts[name] else -1

    def scales(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the loss scales at those positions as float32, NaN where there is none."""
        return np.asarray(self._columns["loss_scale"][positions], dtype=np.float32)

    def find(self, phase: str, *, epoch: int, batch: int, call: int) -> np.ndarray[Any, Any]:
        """Return the positions of the rows at those coordinates, in order of attempt, backward and time."""
        low, high = 0, len(self._order)
        for name, value in (("phase", self._code("phase", phase)), ("epoch", epoch), ("batch", batch), ("call", call)):
            column = self._sorted[name][low:high]
            low, high = low + int(column.searchsorted(value, "left")), low + int(column.searchsorted(value, "right"))
        return self._order[low:high]

    def captured(self, phase: str, attempt: int | None = None) -> np.ndarray[Any, Any]:
        """Return the positions of the rows of a phase (and attempt) that have a tensor, in order of their coordinates."""
        positions = self.only_captured(self._order[self._sorted["phase"] == self._code("phase", phase)])
        return positions if attempt is None else self.only_attempt(positions, attempt)

    def last_captured(self, phase: str, leaf: str, attempt: int | None = None) -> np.ndarray[Any, Any]:
        """Of the captures of a phase and leaf return the last of each forward: its position, in order of epoch, batch and call."""
        positions = self.only_leaf(self.captured(phase, attempt), leaf)
        forwards = np.stack([self._columns[name][positions] for name in ("epoch", "batch", "call")])
        is_last = np.ones(len(positions), dtype=bool)
        is_last[:-1] = (forwards[:, 1:] != forwards[:, :-1]).any(axis=0)
        return np.asarray(positions[is_last])

    def stored(self, phase: str | None, attempt: int | None = None) -> np.ndarray[Any, Any]:
        """Return the positions of the rows of a phase (or all) that have a tensor or statistics, in order of their coordinates."""
        positions = self._order if phase is None else self._order[self._sorted["phase"] == self._code("phase", phase)]
        positions = self.only_stored(positions)
        return positions if attempt is None else self.only_attempt(positions, attempt)

    def calls(self, phase: str, *, epoch: int, batch: int, attempt: int) -> list[int]:
        """Return the calls of which there are rows in a batch of an attempt."""
        low, high = 0, len(self._order)
        for name, value in (("phase", self._code("phase", phase)), ("epoch", epoch), ("batch", batch)):
            column = self._sorted[name][low:high]
            low, high = low + int(column.searchsorted(value, "left")), low + int(column.searchsorted(value, "right"))
        return sorted(set(self._columns["call"][self.only_attempt(self._order[low:high], attempt)].tolist()))

    def again(self, position: int) -> np.ndarray[Any, Any]:
        """Return the positions of all captures of what one row is a capture of: several where the clock stood there more than once."""
        row = self.place(position)
        positions = self.find(row["phase"], epoch=row["epoch"], batch=row["batch"], call=row["call"])
        positions = self.only_attempt(self.only_backward(self.only_captured(positions), row["backward"]), row["attempt"])
        return self.only_leaf(positions, self._texts["leaf"][int(self._columns["leaf"][position])])

    def leaves(self, positions: np.ndarray[Any, Any]) -> list[str]:
        """Leaf paths at those positions."""
        return sorted(self._texts["leaf"][code] for code in set(self._columns["leaf"][positions].tolist()))

    def only_leaf(self, positions: np.ndarray[Any, Any], leaf: str) -> np.ndarray[Any, Any]:
        """Keep the positions of one leaf."""
        return np.asarray(positions[self._columns["leaf"][positions] == self._code("leaf", leaf)])

    def only_backward(self, positions: np.ndarray[Any, Any], backward: int) -> np.ndarray[Any, Any]:
        """Keep the positions of one backward."""
        return np.asarray(positions[self._columns["backward"][positions] == backward])

    def num_backwards(self, positions: np.ndarray[Any, Any]) -> int:
        """Return how many backwards the rows at those positions are of."""
        return len(set(self._columns["backward"][positions].tolist()))

    def of_last_backward(self, positions: np.ndarray[Any, Any], captured: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep the positions of the backward that the last of ``captured`` is of, and of rows that say why something is never there."""
        is_of_it = self._columns["backward"][positions] == self._columns["backward"][captured[-1]]
        return np.asarray(positions[is_of_it | (self._columns["status"][positions] == self._code("status", "skipped"))])

    def only_attempt(self, positions: np.ndarray[Any, Any], attempt: int) -> np.ndarray[Any, Any]:
        """Keep the positions of one attempt."""
        return np.asarray(positions[self._columns["attempt"][positions] == attempt])

    def only_last_attempt(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep the positions, which are in the order of `find`, of the latest attempt among them."""
        return self.only_attempt(positions, self._columns["attempt"][positions[-1]]) if positions.size else positions

    def only_captured(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep the positions of rows that have a tensor."""
        return np.asarray(positions[self._columns["status"][positions] == self._code("status", "ok")])

    def only_stored(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep the positions of rows that have a tensor, or statistics without one."""
        statuses = self._columns["status"][positions]
        return np.asarray(positions[(statuses == self._code("status", "ok")) | (statuses == self._code("status", "summarized"))])


def keep(rows: pa.Table, is_wanted: np.ndarray[Any, Any]) -> pa.Table:
    """Keep rows; Arrow's own comparisons take five times as long, and first import pandas where there is one."""
    bits = pa.py_buffer(np.packbits(is_wanted, bitorder="little"))
    return rows.filter(pa.Array.from_buffers(pa.bool_(), len(is_wanted), [None, bits]))


def filled(column: pa.Array, missing: float) -> np.ndarray[Any, Any]:
    """Return numbers of eight bytes with something for null (Arrow's own ``fill_null`` first imports pandas where there is one)."""
    validity, contents = column.buffers()
    dtype = "<f8" if pa.types.is_floating(column.type) else "<i8"
    values = np.frombuffer(contents, dtype=dtype, count=len(column), offset=8 * column.offset).copy()
    if column.null_count:
        bits = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
        values[bits[column.offset : column.offset + len(column)] == 0] = missing
    return values


def _overlapping(places: list[dict[str, Any]]) -> set[tuple[str, str, int, int]]:
    """Of the chunks of one shard return those that share bytes with another."""
    chunks = sorted({(place["array"], place["shard"], place["offset"], place["length"]) for place in places})
    found, furthest = set(), chunks[0]
    for chunk in chunks[1:]:
        if chunk[2] < furthest[2] + furthest[3]:
            found |= {chunk, furthest}
        furthest = max(furthest, chunk, key=lambda one: one[2] + one[3])
    return found
