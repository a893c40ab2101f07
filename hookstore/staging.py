"""The staging arena: hooks copy tensors into it, the writer takes them out, and its size is the bound on memory.

One lock guards the arena and the open regions. It is held to reserve a slot and to hand one over, and while a small tensor is copied, which takes less than
giving the lock away and getting it back.
"""

from __future__ import annotations

import math
import struct
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from crc32c import crc32c

from hookstore.agenda import ONLY
from hookstore.clock import Coordinates
from hookstore.device import CpuDevice, Devices, FreeList, Transfer, copy_small, unseen
from hookstore.device_statistics import compute as compute_statistics
from hookstore.device_statistics import to_records
from hookstore.errors import CaptureWarning, RecorderBusyError
from hookstore.files import DiskBudget, DiskBudgetSpent, portion_bytes
from hookstore.format import CRC_BYTES, DTYPES, PAGE_BYTES, SUMMARIZED, align
from hookstore.layout import Array, ArrayCatalog, Call, Draft
from hookstore.regions import NOTE, STATISTICS_BYTES, Oversize, Piece, Region, slot_bytes, smallest_region

MOST_STRUCTURE_CHARS = 64 << 20
_SCALE_OFFSET = NOTE.size - 8
_HAS_STATISTICS = struct.Struct("<I")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_PIECE_BYTES = 8 << 20
_FIRST_BYTES = 32 << 20  # of the arena: enough to keep the disk busy
_USUAL_TOUCH_S_PER_BYTE = 0.25e-9
_MOST_TOUCH_S_PER_BYTE = 4e-9
_LONGEST_GRACE_S = 0.003
_MOST_INTERRUPTS = 64
_STEP_BYTES = 2 << 20  # by which more is used at least: a huge page


class _Room:
    """A condition of the lock that an interrupt (Ctrl-C) cannot leave in disorder: whoever has waited holds the lock again, whatever is raised.

    `threading.Condition` takes an ordinary lock back in a way that an interrupt can break off, and gives it away before it is ready to.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._waiters: deque[Any] = deque()

    def wait(self, timeout_s: float = -1) -> bool:
        """Give the lock, which is held once, away until `notify_all`, or for so long; say whether that came."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        held = (1, threading.get_ident())
        interrupt: BaseException | None = None
        try:
            self._lock._release_save()
            return waiter.acquire(timeout=timeout_s)
        finally:
            while True:
                try:
                    if not self._lock._is_owned():
                        self._lock._acquire_restore(held)
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    break
                except BaseException as error:  # from a signal handler: nothing else raises here
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def notify_all(self) -> None:
        """Wake everyone who waits."""
        while self._waiters:
            self._waiters.popleft().release()


class _Ticket:
    """The place of a thread in the line of those that wait for room."""

    __slots__ = ("thread",)

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Wake:
    """Wakes the writer."""


WAKE = _Wake()


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
    is_untouched : bool
        Whether the system still has to back the arena with memory. That takes a tenth of a nanosecond a byte on some hosts and two on others, such as virtual
        machines whose own memory is given to them on first use: longer than writing it to a disk. So part of the arena lies fallow until waiting for
        the writer has taken a few times longer than a copy to new memory would have.
    disk : DiskBudget or None
        What may still be written.
    is_ring : bool
        Whether the writer keeps regions in the arena, for the flight recorder, and writes few of them. Then it is asked to give some up where there is no
        room, and what may still be written is asked when something is.

    Attributes
    ----------
    messages : deque of str
        What the writer wants the user to be warned of; told on a thread that trains.
    wants_room : bool
        Whether someone waits for the ring to give something up.
    is_spent : bool
        Whether there is no more room on the disk for what the ring gives back.
    newest : tuple
        Number and coordinates of the batch that began last; -1 and ``None`` before the first.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        devices: Devices,
        catalog: ArrayCatalog,
        *,
        drop_when_full: bool = False,
        encode: Callable[[Array, memoryview], bytes] | None = None,
        is_untouched: bool = False,
        disk: DiskBudget | None = None,
        is_ring: bool = False,
    ) -> None:
        self.disk = disk
        self.is_ring = is_ring
        self.messages: deque[str] = deque()
        self.wants_room = False
        self.is_spent = False
        self.newest: tuple[int, Coordinates | None] = (-1, None)
        self._numbers: weakref.WeakKeyDictionary[Coordinates, int] = weakref.WeakKeyDictionary()  # of batches that may yet have captures
        self._held: set[Region | Piece] = set()  # outstanding, and nobody works on it
        self.arena_bytes = arena.numel()
        self.memory = memoryview(arena.numpy())  # type: ignore[arg-type]  # ndarray is a buffer; typeshed says so from 3.12 on
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.structures = [""]
        self.whole_shapes = [""]  # of the tensor of which a part is taken, by the same numbers
        self._structure_numbers = {("", ""): 0}
        self._structure_chars = 0
        self.failure: BaseException | None = None
        self.num_dropped = 0
        self._num_handed_over = 0  # captures, and their bytes, in regions that are closed
        self._handed_over_bytes = 0
        self._arena = arena
        self._elements: dict[str, torch.Tensor] = {}  # the arena as elements of each dtype
        self._address = arena.data_ptr()
        self._devices = devices
        self._catalog = catalog
        self._drop = drop_when_full
        self._encode = encode
        self._touched_bytes = 0 if is_untouched else self.arena_bytes
        self._touch_s_per_byte = _USUAL_TOUCH_S_PER_BYTE
        self._free = FreeList(min(self.arena_bytes, _FIRST_BYTES) if is_untouched else self.arena_bytes, PAGE_BYTES)
        self._lock = threading.RLock()  # so that a signal handler may ask for the progress
        self._room = _Room(self._lock)
        self._waiting: deque[_Ticket] = deque()
        self._num_arrays = 0  # that have had a region
        self._open: dict[
            Region, None
        ] = {}  # a set that keeps the order, so that what is handed over together is so in the order of the captures
        self._closing: dict[Region, None] = {}  # closed, but not with the writer yet
        self._outstanding: dict[Region | Piece, None] = {}
        self._staging_threads: set[int] = set()

    # What hooks call ----------------------------------------------------------------------------------------------

    def stage(self, capture: Draft, tensor: torch.Tensor, *, epoch_batches: int | None = None) -> None:
        """Copy one tensor into the arena.

        Returns when ``tensor`` may change. Waits while the arena is full unless captures are to be dropped then.

        Parameters
        ----------
        capture : Draft
            What it is; ``array``, ``status`` and ``reason`` are filled in here.
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
        try:
            self._staging_threads.add(thread)
            self._stage(capture, tensor, epoch_batches)
        finally:
            self._staging_threads.discard(thread)

    def takes_whole(self, array: Array, tensor: torch.Tensor) -> bool:
        """Say whether `stage_whole` and `stage_small` may be used: the tensor lives in host memory, and the arena has room for one."""
        return isinstance(self._devices.of(tensor), CpuDevice) and smallest_region(array) <= self.arena_bytes

    def stage_whole(self, array: Array, call: Call, backward: int, tensor: torch.Tensor) -> bool:
        """Copy one tensor of its array's own dtype and shape; like `stage` otherwise.

        Returns
        -------
        bool
            False if nothing was done, because captures are to be dropped when there is no room: that is for `stage`.
        """
        if self.failure is not None:
            raise self.failure
        thread = threading.get_ident()
        try:
            self._staging_threads.add(thread)
            return not self._stage_slot(array, call, backward, array.spec.chunk_shape, time.time_ns() // 1000, tensor)
        finally:
            self._staging_threads.discard(thread)

    def stage_small(self, array: Array, call: Call, backward: int, tensor: torch.Tensor) -> bool:
        """Copy one small tensor into the open region of its array, with its checksum, under one hold of the lock and of the GIL.

        Waits as `stage` does while the arena is full.

        Parameters
        ----------
        array : Array
            Where it goes; ``is_small``, and of the tensor's own dtype and shape.
        call : Call
            The call of the layer.
        backward : int
            Which backward over that forward.
        tensor : torch.Tensor
            In host memory, strided, contiguous, not lazily conjugated or negated.

        Returns
        -------
        bool
            False if nothing was done: the tensor has no memory, or there is no room and captures are to be dropped then. Both are for `stage`.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        if self.failure is not None:
            raise self.failure
        source = tensor.data_ptr()
        if not source:
            return False
        thread = threading.get_ident()
        try:
            self._staging_threads.add(thread)
            with self._lock:
                region = self._region_for(array, call)
                if region is None:
                    return False
                slot = region.reserved
                start = region.offset + slot * array.stride_bytes
                copy_small(self._address + start, source, array.chunk_bytes)
                crc = crc32c(self.memory[start : start + array.chunk_bytes])
                self._note(region, slot, call, backward, time.time_ns() // 1000, crc)
                region.reserved = slot + 1  # from here on it is captured; an interrupt before leaves the slot free
                if slot + 1 == region.num_slots:
                    array.grow_region()
                    self._close_region(region)
        finally:
            self._staging_threads.discard(thread)
        return True

    def _stage(self, capture: Draft, tensor: torch.Tensor, epoch_batches: int | None) -> None:
        if self.failure is not None:
            raise self.failure
        if tensor.numel() == 0:
            capture.scale = math.nan  # it scales nothing, and may live on a device that the writer must not wait for
            if capture.take.stats:
                with unseen():
                    _summarize(capture, tensor)
            self.note(capture)
            return
        where = capture.coordinates
        array = self._catalog.find(capture, epoch_batches=epoch_batches)
        capture.array = array
        if smallest_region(array) > self.arena_bytes:
            with unseen():
                capture.scale = float(capture.scale)  # waits for the device, as the pieces do
                if array.stats:
                    _summarize(capture, tensor)
                if array.stats == ONLY:
                    capture.array = None
                    self.note(capture)
                elif self.is_ring:
                    self._give_up_capture(capture)
                else:
                    self._stage_oversize(capture, array.spec.shard_of(where.epoch, where.batch, capture.call), tensor)
            return
        call = Call(where, capture.call, capture.step, 0, capture.structure, capture.scale)
        reason = self._stage_slot(array, call, capture.backward, capture.shape, capture.wall_time_us, tensor)
        if reason:
            self._drop_capture(capture, reason)

    def _stage_slot(self, array: Array, call: Call, backward: int, shape: tuple[int, ...], wall_time_us: int, tensor: torch.Tensor) -> str:
        """Copy a tensor into a slot; return "", or why there is none."""
        region: Region | None = None
        slot = -1
        copied = False
        reason = ""
        try:
            with self._lock:
                found = self._region_for(array, call)
                if found is not None:
                    slot = found.reserved
                    self._note(found, slot, call, backward, wall_time_us, None)
                    region = found
                    found.pending[slot] = threading.get_ident()
                    found.reserved = slot + 1  # an interrupt before leaves the slot free, and must leave nothing behind about it
                    if shape != array.spec.chunk_shape:
                        found.shapes[slot] = shape
                    if found.reserved == found.num_slots:
                        array.grow_region()
                        self._close_region(found)
                else:
                    reason = f"the staging buffer of {self.arena_bytes:,} bytes was full"
            if region is not None:
                started = time.perf_counter() if region.is_untouched else 0.0
                self._fill_slot(region, slot, shape, tensor, call.scale)
                copied = True
                if started:
                    self._learn_touch(time.perf_counter() - started, array.chunk_bytes)
        except torch.OutOfMemoryError:  # training is never killed by a capture
            reason = f"{tensor.device} has no memory for a copy"
        finally:
            if region is not None:
                self._hand_over_for_sure(region, slot, copied=copied)
        return reason

    def _fill_slot(self, region: Region, slot: int, shape: tuple[int, ...], tensor: torch.Tensor, scale: Any) -> None:
        """Copy a tensor into a slot, and what is to be known of it that lives on its device."""
        array = region.array
        has_statistics = bool(array.stats) and not isinstance(self._devices.of(tensor), CpuDevice)
        if has_statistics:
            self._copy_statistics(region, slot, tensor)
        if not has_statistics or array.stats != ONLY:
            transfer = self._copy(array, region.offset + slot * array.stride_bytes, shape, tensor)
            if transfer is not None:
                region.transfers.append(transfer)
        if type(scale) is not float:
            self._copy_scale(region, slot, scale)

    def _learn_touch(self, took_s: float, num_bytes: int) -> None:
        """Note how long a copy to memory took that had not been used before."""
        self._touch_s_per_byte = min((self._touch_s_per_byte + took_s / num_bytes) / 2, _MOST_TOUCH_S_PER_BYTE)

    def _note(self, region: Region, slot: int, call: Call, backward: int, wall_time_us: int, crc: int | None) -> None:
        """Write what the manifest needs of a capture behind the slots of its region."""
        where, number, step, _, structure, scale, _ = call
        NOTE.pack_into(
            self.memory,
            region.notes_offset + slot * NOTE.size,
            where.epoch,
            where.batch,
            number,
            step,
            wall_time_us,
            backward,
            crc or 0,
            crc is not None,
            structure,
            scale if type(scale) is float else math.nan,
            0,
        )

    def _copy_scale(self, region: Region, slot: int, scale: Any) -> None:
        """Have a loss scale that lives on a device arrive in the note of a slot: asking for its value would wait for all that the device has to do."""
        start = region.notes_offset + slot * NOTE.size + _SCALE_OFFSET
        destination = self._arena[start : start + 4].view(torch.float32)
        with unseen():
            transfer = self._devices.of(scale).copy(destination, scale.detach().reshape(1))
        if transfer is not None:
            region.transfers.append(transfer)

    def _copy_statistics(self, region: Region, slot: int, tensor: torch.Tensor) -> None:
        """Have the statistics of a tensor that lives on a device computed there, and arrive behind the notes."""
        start = region.statistics_offset + slot * STATISTICS_BYTES
        destination = self._arena[start : start + STATISTICS_BYTES].view(torch.float64)
        with torch.no_grad(), unseen():
            stored = tensor.to(getattr(torch, region.array.spec.dtype))
            vector = compute_statistics(stored)
            transfer = self._devices.of(vector).copy(destination, vector)
        if transfer is not None:
            region.transfers.append(transfer)
        _HAS_STATISTICS.pack_into(self.memory, region.notes_offset + slot * NOTE.size + NOTE.size - _HAS_STATISTICS.size, 1)

    def structure(self, text: str, whole_shape: str = "") -> int | None:
        """Return the number that stands for a structure, or ``None`` if so many different ones have been that their texts would fill the memory.

        Where a part of a tensor is taken, it stands for the shape of the whole one, too.
        """
        number = self._structure_numbers.get((text, whole_shape))
        if number is None:
            with self._lock:
                number = self._structure_numbers.get((text, whole_shape))
                if number is None:
                    num_chars = len(text) + len(whole_shape)
                    if self._structure_chars + num_chars > MOST_STRUCTURE_CHARS:
                        return None
                    self._structure_chars += num_chars
                    self.whole_shapes.append(whole_shape)
                    self.structures.append(text)
                    number = self._structure_numbers[text, whole_shape] = len(self.structures) - 1
        return number

    def note(self, capture: Draft) -> None:
        """Hand over a capture that has no bytes: an empty tensor, or a gap with its reason.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        if self.failure is not None:
            raise self.failure
        if self.is_ring:
            if capture.layer or capture.kind:
                with self._lock:
                    self._number_of(capture.coordinates)
        elif self.disk is not None and capture.status not in ("partial", "stopped"):
            self.set_aside(None, capture.take.text)
        self.queue.put(capture)

    def _copy(self, array: Array, start: int, shape: tuple[int, ...], tensor: torch.Tensor) -> Transfer | None:
        if torch._C._len_torch_dispatch_stack() > 0:  # (most often not, and a context manager costs)
            with unseen():
                return self._copy_into(array, start, shape, tensor)
        return self._copy_into(array, start, shape, tensor)

    def _copy_into(self, array: Array, start: int, shape: tuple[int, ...], tensor: torch.Tensor) -> Transfer | None:
        spec = array.spec
        elements = self._elements.get(spec.dtype)
        if elements is None:
            with torch.inference_mode(mode=False):
                elements = self._elements[spec.dtype] = self._arena.view(getattr(torch, spec.dtype))
        chunk = elements.as_strided(spec.chunk_shape, array.element_strides, start // array.itemsize)
        if shape != spec.chunk_shape:
            _fill(chunk, spec.dtype)
        return self._devices.of(tensor).copy(chunk, tensor)

    def _hand_over_for_sure(self, region: Region, slot: int, *, copied: bool) -> None:
        """Hand a slot over even if a signal handler raises just then; the writer would wait for it for ever."""
        interrupt: BaseException | None = None
        for _ in range(_MOST_INTERRUPTS):
            try:
                self._hand_over(region, slot, copied=copied)
                break
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _hand_over(self, region: Region, slot: int, *, copied: bool) -> None:
        with self._lock:
            if slot not in region.pending:
                return  # it was, before an interrupt came
            if not copied and slot < region.reserved:  # (else an interrupt came so early that the slot is free)
                region.holes.add(slot)
            del region.pending[slot]
            self._queue_if_done(region)

    def _queue_if_done(self, region: Region) -> None:
        """Give a region that is complete to the writer. An interrupt may come between any two lines: it may be given twice then, and is taken once."""
        if region.closed and not region.pending:
            if not region.queued:
                self.queue.put(region)
                region.queued = True
                self._num_handed_over += region.num_captures
                self._handed_over_bytes += region.num_captures * region.array.chunk_bytes
            self._closing.pop(region, None)

    def _drop_capture(self, capture: Draft, reason: str) -> None:
        self.num_dropped += 1
        capture.array, capture.status, capture.reason = None, "dropped", reason
        self.note(capture)
        if self.num_dropped == 1:
            warnings.warn(
                f"captures are being dropped, first {capture.kind} of layer {capture.layer!r}: {reason} (the manifest lists every dropped capture; "
                "on_full='block' waits for the disk instead)",
                CaptureWarning,
                stacklevel=2,
            )

    def _give_up_capture(self, capture: Draft) -> None:
        """Note a capture that the ring cannot hold."""
        capture.array, capture.status = None, "dropped"
        capture.reason = f"the flight recorder keeps captures in the staging buffer, whose {self.arena_bytes:,} bytes are fewer than it has"
        self.num_dropped += 1
        if self.num_dropped == 1:
            self.messages.append(f"{capture.kind} of layer {capture.layer!r} is not captured: {capture.reason}")
        self.note(capture)

    # Regions (all under the lock) ---------------------------------------------------------------------------------

    def _region_for(self, array: Array, call: Call) -> Region | None:
        """Return the region that takes a capture, with a free slot, or ``None`` if the capture is to be dropped."""
        region = array.region
        where = call.coordinates
        if (
            region is None
            or where.batch not in region.batches
            or where.epoch not in region.epochs
            or call.number not in region.calls
            or region.reserved == region.num_slots  # an interrupt kept it from being closed
            or (region.coordinates is not where and region.coordinates is not None)
        ):
            return self._open_region(array, array.spec.shard_of(where.epoch, where.batch, call.number), where)
        return region

    def _open_region(self, array: Array, shard: tuple[int, ...], where: Coordinates) -> Region | None:
        """Return an open region with a free slot, waiting for room if need be, or ``None`` if the capture is to be dropped."""
        if array.is_prompt:
            self._number_of(where)
        ticket: _Ticket | None = None
        grow_at = time.monotonic() + self._patience_s(smallest_region(array))
        try:
            while True:
                region = array.region
                if region is not None:
                    if region.shard == shard and region.reserved < region.num_slots and region.coordinates in (None, where):
                        return region
                    self._close_region(region)
                if not self._waiting or self._waiting[0] is ticket:
                    num_bytes = self._next_region_bytes(array)
                    offset = self._free.take(num_bytes)
                    if offset is not None:
                        return self._make_region(array, shard, where, offset, num_bytes)
                if self._free.num_bytes == self.arena_bytes:
                    self._close_if_writer_is_idle()
                    if self._drop:
                        return None
                if ticket is None:  # wait in the order of arrival, so that a large capture is not starved
                    ticket = _Ticket()
                    self._waiting.append(ticket)
                self._wait_for_room(smallest_region(array), grow_at)
        finally:
            if ticket is not None:
                self._leave_line(ticket)

    def _number_of(self, where: Coordinates) -> int:
        """Return which batch this is, in the order in which they began. When one begins, the writer gets what prompt arrays have of those before."""
        number = self._numbers.get(where)
        if number is None:
            number = self._numbers[where] = self.newest[0] + 1
            self.newest = (number, where)
            for region in list(self._open):
                if region.coordinates is not None:
                    self._close_region(region)
        return number

    def _leave_line(self, ticket: _Ticket) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self.wants_room = self.wants_room and bool(self._waiting)
        self._room.notify_all()

    def _next_region_bytes(self, array: Array) -> int:
        """Return the size for a new region: what the array asks for, as far as there is room, but for one capture at least."""
        smallest = smallest_region(array)
        most_open_bytes = self.arena_bytes // 16
        if array.is_prompt:
            wanted = align(array.num_expected * slot_bytes(array), PAGE_BYTES)
            return max(smallest, min(wanted, most_open_bytes // PAGE_BYTES * PAGE_BYTES, self._free.largest_hole_bytes))
        # Many arrays must not fill the arena with room for more.
        share = most_open_bytes // max(1, self._num_arrays) // PAGE_BYTES * PAGE_BYTES
        wanted = max(smallest, min(array.region_bytes, share))
        largest = self._free.largest_hole_bytes
        is_for_many = wanted >= 2 * slot_bytes(array)
        if is_for_many and largest < wanted and self._free.num_bytes + wanted <= min(self.arena_bytes, _FIRST_BYTES + most_open_bytes):
            self._free.extend(wanted)  # what waits for more captures does not come out of what keeps the disk busy
            return wanted
        return max(smallest, min(wanted, largest))

    def _patience_s(self, num_bytes: int) -> float:
        """Return how long to wait for the writer before new memory is used: longer than that costs, since it also takes memory, and its time, from others."""
        touch_s = self._touch_s_per_byte * num_bytes
        return touch_s + min(3 * touch_s, _LONGEST_GRACE_S)

    @property
    def _writer_is_idle(self) -> bool:
        return len(self._outstanding) == len(self._open) + len(self._closing) + len(self._held)

    def _close_if_writer_is_idle(self) -> None:
        """Let the writer have what is partly filled, unless it has something that will make room: small pieces cost it as much as large ones."""
        if self._writer_is_idle:
            for region in list(self._open):
                self._close_region(region)

    def _wait_for_room(self, num_bytes: int = 0, grow_at: float = 0.0) -> None:
        """Wait until the writer has made some room; or, where memory lies fallow, at most until ``grow_at``, and use more then.

        Parameters
        ----------
        num_bytes : int
            What is needed in one piece.
        grow_at : float
            A time of ``time.monotonic``.
        """
        if self.failure is not None:
            raise self.failure
        fallow_bytes = self.arena_bytes - self._free.num_bytes
        if not num_bytes or not fallow_bytes:
            if num_bytes and self.is_ring:
                self.wants_room = True
                self.queue.put(WAKE)
            self._room.wait()
        else:
            patience_s = grow_at - time.monotonic()
            if self._drop or self._writer_is_idle or patience_s <= 0 or not self._room.wait(patience_s):
                self._free.extend(min(fallow_bytes, align(max(num_bytes, _STEP_BYTES), PAGE_BYTES)))
                self._room.notify_all()
        if self.failure is not None:
            raise self.failure

    def _make_region(self, array: Array, shard: tuple[int, ...], where: Coordinates, offset: int, num_bytes: int) -> Region:
        region = Region(array, shard, offset, num_bytes, is_untouched=offset + num_bytes > self._touched_bytes)
        if array.is_prompt:
            array.begin_batch(where)
            region.coordinates, region.number = where, self._number_of(where)
        if self.disk is not None and not self.is_ring:
            try:
                self.set_aside(region)
            except DiskBudgetSpent:
                self._free.give_back(offset, num_bytes)
                raise
        self._touched_bytes = max(self._touched_bytes, offset + num_bytes)
        self._outstanding[region] = None
        self._open[region] = None
        self._num_arrays += not array.has_been_open
        array.has_been_open = True
        array.region = region
        return region

    def _take_disk(self, array: Array, shard: tuple[int, ...], num_bytes: int, num_captures: int) -> int:
        """Set room on the disk aside for captures with so many bytes, or with rows alone, and return what to settle for it."""
        assert self.disk is not None
        num_bytes += num_captures * _text_bytes(array.spec.portion)
        if array.stats == ONLY:
            return self.disk.take(num_bytes, num_captures)
        key, num_entries = array.spec.shard_key(shard), array.spec.num_entries
        return self.disk.take(num_bytes, num_captures, array=array.path, shard=key, num_entries=num_entries)

    def _close_region(self, region: Region) -> None:
        region.closed = True
        self._closing[region] = None
        if region.coordinates is not None and region.coordinates is region.array.batch:
            region.array.num_in_batch += region.reserved
        if region.array.region is region:
            region.array.region = None
        self._open.pop(region, None)
        self._queue_if_done(region)

    # Captures larger than the arena -------------------------------------------------------------------------------

    def _stage_oversize(self, capture: Draft, shard: tuple[int, ...], tensor: torch.Tensor) -> None:
        """Send a capture through the arena in pieces, waiting for room for each."""
        array = capture.array
        assert array is not None
        if self._drop:
            self._drop_capture(capture, f"the staging buffer of {self.arena_bytes:,} bytes is smaller than it")
            return
        chunk = _whole_chunk(array, capture, tensor)
        if array.spec.codec is not None:
            assert self._encode is not None
            encoded = self._encode(array, memoryview(chunk.cpu().view(torch.uint8).numpy()))  # type: ignore[arg-type]
            chunk = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        num_bytes = chunk.numel() * chunk.element_size()
        flat = chunk.view(torch.uint8)
        oversize = Oversize(capture, shard, num_bytes)
        if self.disk is not None:
            with self._lock:
                oversize.disk_bytes = self._take_disk(array, shard, align(num_bytes + CRC_BYTES, PAGE_BYTES), 1)
        longest = min(_PIECE_BYTES, max(PAGE_BYTES, self.arena_bytes // 2 // PAGE_BYTES * PAGE_BYTES))
        for start in range(0, num_bytes, longest):
            length = min(longest, num_bytes - start)
            piece = self._take_piece(oversize, start, length)  # if what follows raises, the writer finds it
            with torch.inference_mode(mode=False):
                target = self._arena[piece.offset : piece.offset + length]
            piece.transfer = self._devices.of(flat).copy(target, flat[start : start + length])
            self.queue.put(piece)
            piece.queued = True
        with self._lock:
            self._num_handed_over += 1
            self._handed_over_bytes += array.chunk_bytes

    def _take_piece(self, oversize: Oversize, start: int, length: int) -> Piece:
        num_bytes = align(length + CRC_BYTES if start + length == oversize.num_bytes else length, PAGE_BYTES)
        ticket = _Ticket()
        with self._lock:
            grow_at = time.monotonic() + self._patience_s(num_bytes)
            try:
                self._waiting.append(ticket)
                while self._waiting[0] is not ticket or (offset := self._free.take(num_bytes)) is None:
                    if self._free.num_bytes == self.arena_bytes:
                        self._close_if_writer_is_idle()
                    self._wait_for_room(num_bytes, grow_at)
            finally:
                self._leave_line(ticket)
            piece = Piece(oversize, start, length, offset, num_bytes)
            self._outstanding[piece] = None
        return piece

    # What the writer and the recorder call ------------------------------------------------------------------------

    def release(self, staged: Region | Piece) -> None:
        """Give a region's memory back once its bytes are written."""
        with self._lock:
            self._free.give_back(staged.offset, staged.num_bytes)
            self._outstanding.pop(staged, None)
            self._held.discard(staged)
            self.wants_room = False  # who finds that this is not enough says so again: nothing is to be given up for room that there is
            if self.disk is not None and isinstance(staged, Region) and staged.disk_bytes:
                text_bytes = staged.num_captures * _text_bytes(staged.array.spec.portion)
                self.disk.settle(staged.disk_bytes, staged.written_bytes + text_bytes, staged.num_captures)
            self._room.notify_all()

    def hold(self, region: Region) -> None:
        """Take a region for one that the writer keeps, and that nobody needs to wait for."""
        with self._lock:
            self._held.add(region)
            self._room.notify_all()

    def unhold(self, region: Region) -> None:
        """Take a region that was kept for one that is being written."""
        with self._lock:
            self._held.discard(region)

    def number_of(self, where: Coordinates, *, begins: bool = False) -> int:
        """Return which batch this is, in the order in which they began; for one of which nothing was captured -1, unless it begins by this."""
        with self._lock:
            return self._number_of(where) if begins else self._numbers.get(where, -1)

    def set_aside(self, region: Region | None, portion: str = "") -> None:
        """Set room on the disk aside for what is to be written: a region, or a row with the text of a portion.

        Raises
        ------
        DiskBudgetSpent
            If there is none.
        """
        if self.disk is None:
            return
        with self._lock:
            if region is None:
                num_bytes = _text_bytes(portion)
                self.disk.settle(self.disk.take(num_bytes), num_bytes, 1)
            else:
                num_bytes = 0 if region.array.stats == ONLY else region.num_bytes
                region.disk_bytes = self._take_disk(region.array, region.shard, num_bytes, region.num_slots)

    def count_written(self, num_bytes: int, *, oversize: Oversize | None = None) -> None:
        """Count what the writer has written beside regions: a capture in pieces, or, of any number of bytes, what is no capture."""
        if self.disk is not None:
            with self._lock:
                if oversize is not None:
                    self.disk.settle(oversize.disk_bytes, num_bytes + _text_bytes(oversize.capture.take.text), 1)
                else:
                    self.disk.add(num_bytes)

    def close_regions(self, *, older_than_s: float = 0.0) -> None:
        """Hand over the open regions that hold something and were opened at least that long ago."""
        if not self._outstanding and not self._waiting:
            return
        with self._lock:
            self._mend()
            latest = time.monotonic() - older_than_s
            for region in list(self._open):  # in the order in which they were opened
                if region.opened_at > latest:
                    break
                if region.reserved or not older_than_s:
                    self._close_region(region)
            for region in list(self._closing):
                for slot, thread in list(region.pending.items()):
                    if thread not in self._staging_threads:
                        region.holes.add(slot)
                        del region.pending[slot]
                self._queue_if_done(region)

    def _mend(self) -> None:
        """Put right what an interrupt (Ctrl-C) can leave behind at any instant of a capture: places in line, regions and pieces that nobody knows of."""
        for ticket in list(self._waiting):
            if ticket.thread not in self._staging_threads:
                self._waiting.remove(ticket)
        for staged in list(self._outstanding):
            if staged.queued:
                continue
            if isinstance(staged, Piece):
                if staged.thread not in self._staging_threads and not staged.is_taken:
                    staged.is_taken = True  # it may stand in the queue all the same
                    self._free.give_back(staged.offset, staged.num_bytes)
                    del self._outstanding[staged]
            elif staged not in self._open and staged not in self._closing:
                self._close_region(staged)
        known_bytes = sum(align(staged.num_bytes, PAGE_BYTES) for staged in self._outstanding)
        if known_bytes != self.used_bytes:
            self._free.rebuild((staged.offset, staged.num_bytes) for staged in self._outstanding)
        self._room.notify_all()  # one may have been missed

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
            while (self._outstanding.keys() - self._held) & before:
                self._wait_for_room()

    def check_not_staging(self, call: str) -> None:
        """Raise `RecorderBusyError` if this thread is in the middle of a capture, for which ``call`` would wait for ever."""
        if threading.get_ident() in self._staging_threads:
            raise RecorderBusyError(
                f"{call} was called in the middle of a capture, as from a signal handler: set a flag there and call it between steps"
            )

    @property
    def num_staged(self) -> int:
        """Captures staged so far."""
        with self._lock:
            return self._num_handed_over + sum(region.num_captures for region in (*self._open, *self._closing))

    @property
    def staged_bytes(self) -> int:
        """Bytes of the captures staged so far, with their padding."""
        with self._lock:
            waiting = (*self._open, *self._closing)
            return self._handed_over_bytes + sum(region.num_captures * region.array.chunk_bytes for region in waiting)

    @property
    def is_empty(self) -> bool:
        """Whether the arena holds nothing but what the writer keeps."""
        return len(self._outstanding) == len(self._held)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that wait for the writer or are being filled."""
        return self._free.num_bytes - self._free.free_bytes

    def fail(self, failure: BaseException) -> None:
        """Let every waiting and every further call raise the failure."""
        with self._lock:
            self.failure = failure
            self._room.notify_all()


def _text_bytes(portion: str) -> int:
    """Return what the text of a portion takes on the disk: in a row of the shard and in one of the journal."""
    return 2 * portion_bytes(portion)


def _summarize(capture: Draft, tensor: torch.Tensor) -> None:
    """Compute statistics at once, of a tensor that does not go through a region; one on a device is waited for."""
    stored = tensor.detach().to(getattr(torch, capture.dtype))
    capture.statistics = to_records(compute_statistics(stored).cpu().numpy()[None])
    if capture.take.stats == ONLY:
        capture.status, capture.reason = "summarized", SUMMARIZED


def _fill(slot: torch.Tensor, dtype: str) -> None:
    """Fill a slot with its array's fill value, bit by bit, which works for dtypes that ``fill_`` does not know."""
    kind = DTYPES[dtype]
    bits = _BITS[kind.itemsize]
    value = kind.fill_bits
    if kind.itemsize == 16:
        slot.zero_()
    else:
        slot.view(bits).fill_(value - (1 << 8 * kind.itemsize) if bits != torch.uint8 and value >> (8 * kind.itemsize - 1) else value)


def _whole_chunk(array: Array, capture: Draft, tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous chunk of a capture, flat; a copy only where the tensor is not that already."""
    dtype = getattr(torch, capture.dtype)
    if capture.shape == array.spec.chunk_shape:
        return tensor.to(dtype).resolve_conj().resolve_neg().contiguous().reshape(-1)
    chunk = torch.empty(array.spec.chunk_shape, dtype=dtype, device=tensor.device)
    _fill(chunk, capture.dtype)
    chunk[tuple(slice(size) for size in capture.shape)].copy_(tensor)
    return chunk.reshape(-1)
