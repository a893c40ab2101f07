"""Pieces of the staging arena: the regions that take captures with what stands about each, and what lies in one, as numbers and statistics."""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

import numpy as np

from hookstore.agenda import ONLY
from hookstore.clock import Coordinates
from hookstore.device import Transfer
from hookstore.device_statistics import to_records
from hookstore.format import PAGE_BYTES, align
from hookstore.layout import Array, Draft
from hookstore.statistics import STATISTICS_DTYPE, Sums, as_numbers, of_rows

NOTE = struct.Struct("<5qiIIIfI")
NOTE_DTYPE = np.dtype(
    {
        "names": [
            "epoch",
            "batch",
            "call",
            "step",
            "wall_time",
            "backward",
            "crc32c",
            "has_crc32c",
            "structure",
            "scale",
            "has_statistics",
        ],
        "formats": ["<i8", "<i8", "<i8", "<i8", "<i8", "<i4", "<u4", "<u4", "<u4", "<f4", "<u4"],
        "itemsize": NOTE.size,
    }
)
"""What stands about each capture behind the slots of its region: coordinates, the checksum where it was taken with the copy, which structure its value has,
the loss scale (NaN for none), and whether its statistics were computed where the tensor lived and stand behind the notes."""

_NUM_STATISTICS = len(STATISTICS_DTYPE.names or ())
STATISTICS_BYTES = 8 * _NUM_STATISTICS
_NOT_FINITE = [Sums._fields.index("nan"), Sums._fields.index("inf")]


def slot_bytes(array: Array) -> int:
    """Return what one capture takes of a region, with all that stands about it."""
    return array.stride_bytes + NOTE.size + (STATISTICS_BYTES if array.stats else 0)


def smallest_region(array: Array) -> int:
    """Return the bytes of a region for one capture."""
    return align(slot_bytes(array), PAGE_BYTES)


class Region:
    """A page-aligned piece of the arena that takes captures of one shard: slots ``stride_bytes`` apart, and behind them a note about each.

    Attributes
    ----------
    array : Array
        The array.
    shard : tuple of int
        Coordinates of the shard.
    epochs, batches, calls : range
        What belongs to that shard.
    offset, num_bytes : int
        Where it lies in the arena.
    num_slots : int
        Captures that it can take.
    notes_offset, statistics_offset : int
        Where the notes begin in the arena, as `NOTE_DTYPE`, and behind them statistics as rows of float64, where the array wants any.
    is_untouched : bool
        Whether the system still has to back some of it with memory.
    reserved : int
        Slots given out. This and what follows is guarded by the stager's lock.
    pending : dict
        Slots whose copy has not been handed over yet, and the thread that makes it.
    holes : set of int
        Slots that were given up.
    shapes : dict
        True shapes of the slots whose capture is smaller than the chunk.
    transfers : list of Transfer
        Copies to wait for.
    disk_bytes, written_bytes : int
        What was set aside for it on the disk, and what the writer has written of it.
    closed, queued, is_taken : bool
        Whether it takes no more captures, whether it is on its way to the writer, and whether the writer has it.
    coordinates : Coordinates or None
        The one batch whose captures it takes, where its array is prompt.
    number : int
        Which batch that is, in the order in which they began.
    """

    __slots__ = (
        "array",
        "batches",
        "calls",
        "closed",
        "coordinates",
        "disk_bytes",
        "epochs",
        "holes",
        "is_taken",
        "is_untouched",
        "notes_offset",
        "num_bytes",
        "num_slots",
        "number",
        "offset",
        "opened_at",
        "pending",
        "queued",
        "reserved",
        "shapes",
        "shard",
        "statistics_offset",
        "transfers",
        "written_bytes",
    )

    def __init__(self, array: Array, shard: tuple[int, ...], offset: int, num_bytes: int, *, is_untouched: bool) -> None:
        self.array = array
        self.shard = shard
        self.epochs, self.batches, self.calls = array.spec.shard_ranges(shard)
        self.offset = offset
        self.num_bytes = num_bytes
        self.num_slots = num_bytes // slot_bytes(array)
        self.notes_offset = offset + self.num_slots * array.stride_bytes
        self.statistics_offset = self.notes_offset + self.num_slots * NOTE.size
        self.is_untouched = is_untouched
        self.disk_bytes = 0
        self.written_bytes = 0
        self.reserved = 0
        self.pending: dict[int, int] = {}
        self.holes: set[int] = set()
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.transfers: list[Transfer] = []
        self.closed = False
        self.queued = False
        self.is_taken = False
        self.opened_at = time.monotonic()
        self.coordinates: Coordinates | None = None
        self.number = -1

    @property
    def num_captures(self) -> int:
        """Captures that are in it."""
        return self.reserved - len(self.pending) - len(self.holes)

    @property
    def slots(self) -> np.ndarray[Any, Any]:
        """The slots that hold a capture, int64, in their order; for a region that takes no more."""
        slots = np.arange(self.reserved)
        return np.delete(slots, sorted(self.holes)) if self.holes else slots


class Oversize:
    """A capture that is larger than the arena, on its way in pieces.

    Attributes
    ----------
    capture : Draft
        The capture.
    shard : tuple of int
        Coordinates of its shard.
    num_bytes : int
        Bytes of its encoded chunk, without the checksum.
    disk_bytes : int
        What was set aside for it on the disk.
    file_offset, crc : int
        Where it goes, and the checksum of the pieces so far; kept by the writer.
    """

    __slots__ = ("capture", "crc", "disk_bytes", "file_offset", "num_bytes", "shard")

    def __init__(self, capture: Draft, shard: tuple[int, ...], num_bytes: int) -> None:
        self.capture = capture
        self.shard = shard
        self.num_bytes = num_bytes
        self.disk_bytes = 0
        self.file_offset = -1
        self.crc = 0


class Piece:
    """Some bytes of an `Oversize` capture in the arena. All but the last are whole pages."""

    __slots__ = ("is_taken", "length", "num_bytes", "offset", "oversize", "queued", "start", "thread", "transfer")

    def __init__(self, oversize: Oversize, start: int, length: int, offset: int, num_bytes: int) -> None:
        self.thread = threading.get_ident()
        self.oversize = oversize
        self.start = start
        self.length = length
        self.offset = offset
        self.num_bytes = num_bytes
        self.transfer: Transfer | None = None
        self.queued = False
        self.is_taken = False  # by the writer, or given up

    @property
    def is_last(self) -> bool:
        """Whether the capture ends with it."""
        return self.start + self.length == self.oversize.num_bytes


def region_statistics(region: Region, slots: np.ndarray[Any, Any], notes: np.ndarray[Any, Any], memory: memoryview) -> np.ndarray[Any, Any]:
    """Return statistics of the captures in a region, `hookstore.statistics.STATISTICS_DTYPE`: those that came with them, or of their bytes.

    Parameters
    ----------
    region : Region
        The region, complete.
    slots, notes : numpy.ndarray
        The slots that hold a capture, and the notes about these.
    memory : memoryview
        The arena.
    """
    came = notes["has_statistics"] != 0
    found = np.empty(len(slots), dtype=STATISTICS_DTYPE)
    if came.any():
        found[came] = to_records(_vectors_of(region, memory)[slots[came]])
    if not came.all():
        found[~came] = _statistics_of_bytes(region, slots[~came], memory)
    return found


def _vectors_of(region: Region, memory: memoryview) -> np.ndarray[Any, Any]:
    """Return what came from devices, as `hookstore.device_statistics.compute` gives it, a row for each slot."""
    count = region.reserved * _NUM_STATISTICS
    return np.frombuffer(memory, dtype="<f8", count=count, offset=region.statistics_offset).reshape(-1, _NUM_STATISTICS)


def _statistics_of_bytes(region: Region, slots: np.ndarray[Any, Any], memory: memoryview) -> np.ndarray[Any, Any]:
    """Return statistics of the tensors in some slots; of all at once where none is padded."""
    array = region.array
    chunks = _chunks_of(region, memory)
    dtype, chunk_shape = array.spec.dtype, array.spec.chunk_shape
    if len(slots) == region.reserved and not region.shapes:
        return of_rows(as_numbers(chunks, dtype))
    parts = [_true_part(chunks[slot], chunk_shape, region.shapes.get(slot, chunk_shape)) for slot in slots.tolist()]
    return np.concatenate([of_rows(as_numbers(part, dtype)) for part in parts])


def _chunks_of(region: Region, memory: memoryview) -> np.ndarray[Any, Any]:
    """Return the chunks in a region as bits, a row for each slot."""
    array = region.array
    itemsize = array.itemsize
    bits = np.dtype(f"V{itemsize}") if itemsize == 16 else np.dtype(f"<u{itemsize}")
    shape, strides = (region.reserved, array.chunk_bytes // itemsize), (array.stride_bytes, itemsize)
    return np.ndarray(shape, dtype=bits, buffer=memory, offset=region.offset, strides=strides)


def is_surely_finite(region: Region, slots: np.ndarray[Any, Any], notes: np.ndarray[Any, Any], memory: memoryview) -> bool:
    """Say whether no capture of a region has an element that is NaN or infinite, at a fraction of what statistics cost; ``False`` where that is not clear.

    A sum has such elements in it, whatever else it adds up.
    """
    array = region.array
    came = notes["has_statistics"] != 0
    if came.all():
        return not _vectors_of(region, memory)[slots][:, _NOT_FINITE].any()
    if came.any() or len(slots) < region.reserved or region.shapes:
        return False
    numbers = as_numbers(_chunks_of(region, memory), array.spec.dtype)
    if numbers.dtype.kind in "biu":
        return True
    summed_as = numbers.dtype if numbers.dtype.kind == "c" or numbers.dtype == np.float64 else np.dtype(np.float32)
    with np.errstate(all="ignore"):
        return bool(np.isfinite(np.add.reduce(numbers, axis=None, dtype=summed_as)))


def numbers_of_slot(region: Region, slot: int, note: Any, memory: memoryview) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a capture in its true shape, as they lie in the arena; ``None`` where only its statistics came from a device."""
    array, shape = region.array, region.shapes.get(slot, region.array.spec.chunk_shape)
    if array.stats == ONLY and note["has_statistics"]:
        return None
    part = _true_part(_chunks_of(region, memory)[slot], array.spec.chunk_shape, shape)
    return as_numbers(part, array.spec.dtype).reshape(shape)


def _true_part(chunk: np.ndarray[Any, Any], chunk_shape: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return a chunk without its padding, as one row."""
    if shape == chunk_shape:
        return chunk[None]
    return chunk.reshape(chunk_shape)[tuple(slice(size) for size in shape)].reshape(1, -1)
