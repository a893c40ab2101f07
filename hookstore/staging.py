"""The staging arena: hooks copy tensors into it, the writer takes them out, and its size is the bound on memory.

One lock guards the arena and the open regions. It is held to reserve a slot and to hand one over, never while bytes are copied.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.device import Devices, FreeList, Transfer
from hookstore.errors import CaptureWarning, RecorderBusyError
from hookstore.format import CRC_BYTES, DTYPES, PAGE_BYTES, align
from hookstore.layout import Array, ArrayCatalog, Capture

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_PIECE_BYTES = 8 << 20


class Region:
    """A page-aligned piece of the arena that takes captures of one shard.

    Attributes
    ----------
    array : Array
        The array.
    shard : tuple of int
        Coordinates of the shard.
    offset, num_bytes : int
        Where it lies in the arena.
    views : tuple of torch.Tensor
        One per slot, of the array's chunk shape, ``stride_bytes`` apart.
    captures : list of Capture
        What is in it.
    reserved : int
        Slots given out. This and what follows is guarded by the stager's lock.
    pending : set of int
        Slots whose copy has not been handed over yet.
    closed, queued : bool
        Whether it takes no more captures, and whether the writer has it.
    """

    __slots__ = (
        "array",
        "captures",
        "closed",
        "num_bytes",
        "offset",
        "opened_at",
        "pending",
        "queued",
        "reserved",
        "shard",
        "transfers",
        "views",
    )

    def __init__(self, array: Array, shard: tuple[int, ...], offset: int, num_bytes: int, views: tuple[torch.Tensor, ...]) -> None:
        self.array = array
        self.shard = shard
        self.offset = offset
        self.num_bytes = num_bytes
        self.views = views
        self.captures: list[Capture] = []
        self.transfers: list[Transfer] = []
        self.reserved = 0
        self.pending: set[int] = set()
        self.closed = False
        self.queued = False
        self.opened_at = time.monotonic()

    @property
    def used_bytes(self) -> int:
        """Bytes from its start to the end of its last slot."""
        return self.reserved * self.array.stride_bytes


class Oversize:
    """A capture that is larger than the arena, on its way in pieces.

    Attributes
    ----------
    capture : Capture
        The capture.
    shard : tuple of int
        Coordinates of its shard.
    num_bytes : int
        Bytes of its encoded chunk, without the checksum.
    file_offset, crc : int
        Where it goes, and the checksum of the pieces so far; kept by the writer.
    """

    __slots__ = ("capture", "crc", "file_offset", "num_bytes", "shard")

    def __init__(self, capture: Capture, shard: tuple[int, ...], num_bytes: int) -> None:
        self.capture = capture
        self.shard = shard
        self.num_bytes = num_bytes
        self.file_offset = -1
        self.crc = 0


class Piece:
    """Some bytes of an `Oversize` capture in the arena. All but the last are whole pages."""

    __slots__ = ("length", "num_bytes", "offset", "oversize", "queued", "start", "transfer")

    def __init__(self, oversize: Oversize, start: int, length: int, offset: int, num_bytes: int) -> None:
        self.oversize = oversize
        self.start = start
        self.length = length
        self.offset = offset
        self.num_bytes = num_bytes
        self.transfer: Transfer | None = None
        self.queued = False

    @property
    def is_last(self) -> bool:
        """Whether the capture ends with it."""
        return self.start + self.length == self.oversize.num_bytes


class Stager:
    """Takes tensors from hooks, on any thread, and hands filled regions to the writer.

    Parameters
    ----------
    arena : torch.Tensor
        uint8 host memory, page-aligned.
    devices : Devices
        Copies from where tensors live.
    catalog : ArrayCatalog
        Says where captures go.
    drop_when_full : bool
        Whether a capture that finds no room is dropped instead of waiting.
    encode : callable
        Encodes a whole chunk of an array (only used for a capture that is larger than the arena).
    """

    def __init__(
        self,
        arena: torch.Tensor,
        devices: Devices,
        catalog: ArrayCatalog,
        *,
        drop_when_full: bool = False,
        encode: Callable[[Array, memoryview], bytes] | None = None,
    ) -> None:
        self.arena_bytes = arena.numel()
        self.memory = memoryview(arena.numpy())  # type: ignore[arg-type]  # ndarray is a buffer; typeshed says so from 3.12 on
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.failure: BaseException | None = None
        self.num_dropped = 0
        self.num_staged = 0
        self.staged_bytes = 0
        self._arena = arena
        self._devices = devices
        self._catalog = catalog
        self._drop = drop_when_full
        self._encode = encode
        self._free = FreeList(self.arena_bytes, PAGE_BYTES)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._waiting: deque[object] = deque()
        self._open: dict[
            Region, None
        ] = {}  # a set that keeps the order, so that what is handed over together is so in the order of the captures
        self._outstanding: dict[Region | Piece, None] = {}
        self._staging_threads: set[int] = set()

    # What hooks call ----------------------------------------------------------------------------------------------

    def stage(self, capture: Capture, tensor: torch.Tensor, *, epoch_batches: int | None = None) -> None:
        """Copy one tensor into the arena.

        Returns when ``tensor`` may change. Waits while the arena is full unless captures are to be dropped then.

        Parameters
        ----------
        capture : Capture
            What it is; ``array``, ``entry`` and ``slot`` are filled in here.
        tensor : torch.Tensor
            Detached, strided; cast to ``capture.dtype`` on the way.
        epoch_batches : int or None
            Batches of this epoch, where known.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        thread = threading.get_ident()
        self._staging_threads.add(thread)
        try:
            self._stage(capture, tensor, epoch_batches)
        finally:
            self._staging_threads.discard(thread)

    def _stage(self, capture: Capture, tensor: torch.Tensor, epoch_batches: int | None) -> None:
        if self.failure is not None:
            raise self.failure
        if tensor.numel() == 0:
            self.note(capture)
            return
        where = capture.coordinates
        array = self._catalog.find(
            capture.layer,
            capture.kind,
            capture.leaf,
            capture.dtype,
            where.phase,
            capture.shape,
            calls=capture.call > 0,
            epoch_batches=epoch_batches,
        )
        shard, entry = array.spec.locate(where.epoch, where.batch, capture.call)
        if align(array.stride_bytes, PAGE_BYTES) > self.arena_bytes:
            capture.array, capture.entry = array, entry
            self._stage_oversize(capture, shard, tensor)
            return
        region: Region | None = None
        slot = -1
        transfer = None
        copied = False
        reason = ""
        try:
            with self._lock:
                found = array.region
                if (
                    found is None or found.shard != shard or found.reserved == len(found.views)
                ):  # the last: an interrupt kept it from being closed
                    found = self._open_region(array, shard)
                if found is not None:
                    slot = found.reserved
                    region = found
                    found.pending.add(slot)
                    found.reserved = slot + 1
                    if found.reserved == len(found.views):
                        array.grow_region()
                        self._close_region(found)
            if region is not None:
                capture.array, capture.entry, capture.slot = array, entry, slot
                transfer = self._copy(region.views[slot], capture, tensor)
                copied = True
        except torch.OutOfMemoryError:  # training is never killed by a capture
            reason = f"{tensor.device} has no memory for a copy"
        finally:
            if region is not None:
                self._hand_over_for_sure(region, slot, capture if copied else None, transfer)
        if not copied:
            self._drop_capture(capture, reason)

    def note(self, capture: Capture) -> None:
        """Hand over a capture that has no bytes: an empty tensor, or a gap with its reason.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        if self.failure is not None:
            raise self.failure
        self.queue.put(capture)

    def _copy(self, slot: torch.Tensor, capture: Capture, tensor: torch.Tensor) -> Transfer | None:
        if torch._C._len_torch_dispatch_stack() > 0:
            # A dispatch mode around the user's forward (selective checkpointing, FLOP counters) must not see our copy.
            with _disable_current_modes():
                return self._copy_into(slot, capture, tensor)
        return self._copy_into(slot, capture, tensor)

    def _copy_into(self, slot: torch.Tensor, capture: Capture, tensor: torch.Tensor) -> Transfer | None:
        if capture.shape != tuple(slot.shape):
            _fill(slot, capture.dtype)
        return self._devices.of(tensor).copy(slot, tensor)

    def _hand_over_for_sure(self, region: Region, slot: int, capture: Capture | None, transfer: Transfer | None) -> None:
        """Hand a slot over even if the user interrupts just then; the writer would wait for it for ever."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                self._hand_over(region, slot, capture, transfer)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _hand_over(self, region: Region, slot: int, capture: Capture | None, transfer: Transfer | None) -> None:
        with self._lock:
            if slot not in region.pending:
                return  # it was, before an interrupt came
            if capture is not None:
                region.captures.append(capture)
                self.num_staged += 1
                self.staged_bytes += region.array.chunk_bytes
            if transfer is not None:
                region.transfers.append(transfer)
            region.pending.remove(slot)
            self._queue_if_done(region)

    def _queue_if_done(self, region: Region) -> None:
        if region.closed and not region.pending and not region.queued:
            region.queued = True
            self.queue.put(region)

    def _drop_capture(self, capture: Capture, reason: str = "") -> None:
        self.num_dropped += 1
        reason = reason or f"the staging buffer of {self.arena_bytes:,} bytes was full"
        capture.array, capture.status, capture.reason = None, "dropped", reason
        self.note(capture)
        if self.num_dropped == 1:
            warnings.warn(
                f"captures are being dropped, first {capture.kind} of layer {capture.layer!r}: {reason} (the manifest lists every dropped capture; "
                "on_full='block' waits for the disk instead)",
                CaptureWarning,
                stacklevel=2,
            )

    # Regions (all under the lock) ---------------------------------------------------------------------------------

    def _open_region(self, array: Array, shard: tuple[int, ...]) -> Region | None:
        """Return an open region with a free slot, waiting for room if need be, or ``None`` if the capture is to be dropped."""
        ticket: object | None = None
        try:
            while True:
                region = array.region
                if region is not None:
                    if region.shard == shard and region.reserved < len(region.views):
                        return region
                    self._close_region(region)
                if not self._waiting or self._waiting[0] is ticket:
                    smallest = align(array.stride_bytes, PAGE_BYTES)
                    for num_bytes in (array.region_bytes, smallest):
                        offset = self._free.take(num_bytes)
                        if offset is not None:
                            try:
                                return self._make_region(array, shard, offset, num_bytes)
                            except BaseException:
                                self._free.give_back(offset, num_bytes)
                                raise
                # No room: let the writer have what is partly filled, and wait in the order of arrival so that a large capture is not starved.
                for partly_filled in list(self._open):
                    self._close_region(partly_filled)
                if self._drop:
                    return None
                if ticket is None:
                    ticket = object()
                    self._waiting.append(ticket)
                self._wait_for_room()
        finally:
            if ticket is not None:
                self._waiting.remove(ticket)
                self._room.notify_all()

    def _wait_for_room(self) -> None:
        if self.failure is not None:
            raise self.failure
        self._room.wait()
        if self.failure is not None:
            raise self.failure

    def _make_region(self, array: Array, shard: tuple[int, ...], offset: int, num_bytes: int) -> Region:
        num_slots = num_bytes // array.stride_bytes
        spec = array.spec
        with torch.inference_mode(mode=False), _disable_current_modes():
            elements = self._arena[offset : offset + num_bytes].view(getattr(torch, spec.dtype))
            strides = _contiguous_strides(spec.chunk_shape)
            views = elements.as_strided((num_slots, *spec.chunk_shape), (array.stride_bytes // array.itemsize, *strides)).unbind(0)
        region = Region(array, shard, offset, num_bytes, views)
        self._outstanding[region] = None
        self._open[region] = None
        array.region = region
        return region

    def _close_region(self, region: Region) -> None:
        region.closed = True
        if region.array.region is region:
            region.array.region = None
        self._open.pop(region, None)
        self._queue_if_done(region)

    # Captures larger than the arena -------------------------------------------------------------------------------

    def _stage_oversize(self, capture: Capture, shard: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Send a capture through the arena in pieces, waiting for room for each."""
        array = capture.array
        assert array is not None
        if self._drop:
            self._drop_capture(capture)
            return
        chunk = _whole_chunk(array, capture, tensor)
        if array.spec.codec is not None:
            assert self._encode is not None
            encoded = self._encode(array, memoryview(chunk.cpu().view(torch.uint8).numpy()))  # type: ignore[arg-type]
            chunk = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        num_bytes = chunk.numel() * chunk.element_size()
        flat = chunk.view(torch.uint8)
        oversize = Oversize(capture, shard, num_bytes)
        longest = min(_PIECE_BYTES, max(PAGE_BYTES, self.arena_bytes // 2 // PAGE_BYTES * PAGE_BYTES))
        for start in range(0, num_bytes, longest):
            length = min(longest, num_bytes - start)
            piece: Piece | None = None
            try:
                piece = self._take_piece(oversize, start, length)
                with torch.inference_mode(mode=False):
                    target = self._arena[piece.offset : piece.offset + length]
                piece.transfer = self._devices.of(flat).copy(target, flat[start : start + length])
                piece.queued = True
                self.queue.put(piece)
            except BaseException:
                if piece is not None and not piece.queued:
                    self.release(piece)
                raise
        with self._lock:
            self.num_staged += 1
            self.staged_bytes += array.chunk_bytes

    def _take_piece(self, oversize: Oversize, start: int, length: int) -> Piece:
        num_bytes = align(length + CRC_BYTES if start + length == oversize.num_bytes else length, PAGE_BYTES)
        ticket = object()
        with self._lock:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (offset := self._free.take(num_bytes)) is None:
                    for partly_filled in list(self._open):
                        self._close_region(partly_filled)
                    self._wait_for_room()
            finally:
                self._waiting.remove(ticket)
                self._room.notify_all()
            piece = Piece(oversize, start, length, offset, num_bytes)
            self._outstanding[piece] = None
        return piece

    # What the writer and the recorder call ------------------------------------------------------------------------

    def release(self, staged: Region | Piece) -> None:
        """Give a region's memory back once its bytes are written."""
        with self._lock:
            self._free.give_back(staged.offset, staged.num_bytes)
            self._outstanding.pop(staged, None)
            self._room.notify_all()

    def close_regions(self, *, older_than_s: float = 0.0) -> None:
        """Hand over the open regions that hold something and were opened at least that long ago."""
        if not self._outstanding:
            return
        with self._lock:
            latest = time.monotonic() - older_than_s
            for region in [staged for staged in self._outstanding if isinstance(staged, Region)]:
                if not region.closed and region.opened_at <= latest and (region.reserved or not older_than_s):
                    self._close_region(region)
                else:
                    self._queue_if_done(region)  # one that an interrupt left behind

    def drain(self) -> None:
        """Hand over everything staged so far and return when the writer has taken it out of the arena.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        with self._lock:
            for region in list(self._open):
                self._close_region(region)
            before = set(self._outstanding)
            while self._outstanding.keys() & before:
                self._wait_for_room()

    def check_not_staging(self, call: str) -> None:
        """Raise `RecorderBusyError` if this thread is in the middle of a capture, for which ``call`` would wait for ever."""
        if threading.get_ident() in self._staging_threads:
            raise RecorderBusyError(
                f"{call} was called in the middle of a capture, as from a signal handler: set a flag there and call it between steps"
            )

    @property
    def is_empty(self) -> bool:
        """Whether the arena holds nothing."""
        return not self._outstanding

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that wait for the writer or are being filled."""
        return self.arena_bytes - self._free.free_bytes

    def fail(self, failure: BaseException) -> None:
        """Let every waiting and every further call raise the failure."""
        with self._lock:
            self.failure = failure
            self._room.notify_all()


def _contiguous_strides(shape: tuple[int, ...]) -> Iterator[int]:
    return reversed(list(itertools.accumulate(shape[:0:-1], int.__mul__, initial=1))) if shape else iter(())


def _fill(slot: torch.Tensor, dtype: str) -> None:
    """Fill a slot with its array's fill value, bit by bit, which works for dtypes that ``fill_`` does not know."""
    kind = DTYPES[dtype]
    bits = _BITS[kind.itemsize]
    value = kind.fill_bits
    if kind.itemsize == 16:
        slot.zero_()
    else:
        slot.view(bits).fill_(value - (1 << 8 * kind.itemsize) if bits != torch.uint8 and value >> (8 * kind.itemsize - 1) else value)


def _whole_chunk(array: Array, capture: Capture, tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous chunk of a capture, flat; a copy only where the tensor is not that already."""
    dtype = getattr(torch, capture.dtype)
    if capture.shape == array.spec.chunk_shape:
        return tensor.to(dtype).resolve_conj().resolve_neg().contiguous().reshape(-1)
    chunk = torch.empty(array.spec.chunk_shape, dtype=dtype, device=tensor.device)
    _fill(chunk, capture.dtype)
    chunk[tuple(slice(size) for size in capture.shape)].copy_(tensor)
    return chunk.reshape(-1)
