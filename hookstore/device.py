"""How a tensor's bytes get from where the model computed them into host memory.

`CpuDevice` copies at once. `StreamDevice` holds the order of operations for a device with streams, written against the small `StreamRuntime`
so that tests can drive it with a simulated one; `CudaRuntime` is the real one.

Order on a device with streams, for each capture:

1. In the thread of the hook, on the current stream: copy the tensor into a block of the device's ring (the *snapshot*). What the model does to the tensor
   later comes after it on that stream.
2. The side stream waits for the snapshot, copies the block into host memory and records an event.
3. Whoever reads the host memory waits for the event first. The block goes back to the ring when the event is done, never earlier.

References
----------
The same pattern, with its reasons against ``record_stream``: ``torch/_functorch/_activation_offloading`` in PyTorch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.errors import UnsupportedModelError
from hookstore.format import PAGE_BYTES, align

_BLOCK_ALIGNMENT_BYTES = 512  # what the CUDA allocator gives, enough for every dtype


class FreeList:
    """Hands out pieces of a fixed span of bytes, lowest address first, and takes them back. Not thread-safe.

    Parameters
    ----------
    num_bytes : int
        Size of the span.
    alignment_bytes : int
        Pieces begin and end at multiples of this.
    """

    def __init__(self, num_bytes: int, alignment_bytes: int) -> None:
        self.num_bytes = num_bytes // alignment_bytes * alignment_bytes
        self.free_bytes = self.num_bytes
        self._alignment = alignment_bytes
        self._holes: list[list[int]] = [[0, self.num_bytes]] if self.num_bytes else []

    def extend(self, num_bytes: int) -> None:
        """Make the span longer."""
        start, end = self.num_bytes, self.num_bytes + num_bytes // self._alignment * self._alignment
        self.num_bytes = end
        self.free_bytes += end - start
        if self._holes and self._holes[-1][1] == start:
            self._holes[-1][1] = end
        else:
            self._holes.append([start, end])

    @property
    def largest_hole_bytes(self) -> int:
        """Size of the largest piece that can be taken."""
        return max([end - start for start, end in self._holes], default=0)

    def take(self, num_bytes: int) -> int | None:
        """Return the offset of a free piece, or ``None`` if no hole is large enough."""
        wanted = align(num_bytes, self._alignment)
        for index, hole in enumerate(self._holes):
            if hole[1] - hole[0] >= wanted:
                offset = hole[0]
                hole[0] += wanted
                if hole[0] == hole[1]:
                    del self._holes[index]
                self.free_bytes -= wanted
                return offset
        return None

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Take a piece back and join it with the holes beside it."""
        end = offset + align(num_bytes, self._alignment)
        self.free_bytes += end - offset
        index = 0
        while index < len(self._holes) and self._holes[index][0] < offset:
            index += 1
        self._holes.insert(index, [offset, end])
        if index + 1 < len(self._holes) and self._holes[index + 1][0] == end:
            self._holes[index][1] = self._holes.pop(index + 1)[1]
        if index and self._holes[index - 1][1] == offset:
            self._holes[index - 1][1] = self._holes.pop(index)[1]

    def rebuild(self, taken: Iterable[tuple[int, int]]) -> None:
        """Make the holes anew from what is taken: offset and size of each piece."""
        self._holes, start = [], 0
        for offset, num_bytes in [*sorted(taken), (self.num_bytes, 0)]:
            if offset > start:
                self._holes.append([start, offset])
            start = offset + align(num_bytes, self._alignment)
        self.free_bytes = sum(end - start for start, end in self._holes)


class Transfer(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> None:
        """Return when the bytes are in host memory; gives the GIL back while it waits."""


class Device(Protocol):
    """Copies tensors of one device into host memory."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer | None:
        """Copy ``source`` (any layout; cast to the dtype of ``destination``) into host memory.

        Parameters
        ----------
        destination : torch.Tensor
            Contiguous. Where it is larger than ``source``, that goes into its corner; the rest holds its padding already.
        source : torch.Tensor
            On the device, with as many dimensions.

        Returns
        -------
        Transfer or None
            ``None`` when the copy is done, else what to wait for before the destination is read. Either way nothing that happens to ``source``
            afterwards reaches the destination.
        """


_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_ARGUMENTS = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
# (destination, source, number of bytes). The first keeps the GIL: whoever gives it away while the writer wants it waits to get it back.
copy_small = ctypes.PYFUNCTYPE(*_ARGUMENTS)(_MEMMOVE)
_copy_large = ctypes.CFUNCTYPE(*_ARGUMENTS)(_MEMMOVE)
_ALONE_BYTES = 256 << 10  # from here on several threads of torch copy faster than one memmove, which is faster than one thread of torch


class CpuDevice:
    """Copies within host memory, at once."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once; see `Device.copy`."""
        target = _corner(destination, source)
        num_bytes = target.nbytes
        if (
            (num_bytes < _ALONE_BYTES or torch.get_num_threads() == 1)
            and source.dtype == target.dtype
            and source.is_cpu
            and source.is_contiguous()
            and target.is_contiguous()
            and not source.is_conj()
            and not source.is_neg()
            and (address := source.data_ptr())
        ):
            _copy_large(target.data_ptr(), address, num_bytes)
        else:
            target.copy_(source)


def _corner(chunk: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a chunk that a tensor fills."""
    return chunk if chunk.shape == tensor.shape else chunk[tuple(slice(size) for size in tensor.shape)]


class StreamRuntime(Protocol):
    """The operations of a device with streams that `StreamDevice` needs.

    Streams run in the background and in any relation to each other that waits do not forbid.
    """

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor in device memory; raises ``torch.OutOfMemoryError`` when there is no room."""

    def side_stream(self) -> Any:
        """Return a new stream."""

    def current_stream(self) -> Any:
        """Return the stream on which this thread's operations run."""

    def record(self, stream: Any) -> Any:
        """Return an event that is done when all that was put on the stream so far is."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what comes on the stream from now on begin after the event."""

    def copy(self, stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on the stream and return."""

    def is_done(self, event: Any) -> bool:
        """Say whether the event is done."""

    def synchronize(self, event: Any) -> None:
        """Return when the event is done, without holding the GIL."""


class StreamDevice:
    """Copies from a device with streams: snapshot on the current stream, transfer on a side stream.

    Thread-safe: backward hooks run on autograd's own threads.

    Parameters
    ----------
    runtime : StreamRuntime
        The device.
    ring_bytes : int
        Device memory for snapshots, allocated at the first capture. Halved until it fits if the device is short of memory; a capture that is larger than
        what could be had is copied without a snapshot while the calling thread waits.
    """

    def __init__(self, runtime: StreamRuntime, ring_bytes: int) -> None:
        self._runtime = runtime
        self._ring_bytes = ring_bytes
        self._lock = threading.Lock()
        self._ring: torch.Tensor | None = None
        self._blocks = FreeList(0, _BLOCK_ALIGNMENT_BYTES)
        self._side: Any = None
        self._under_way: deque[StreamTransfer] = deque()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer | None:
        """Put snapshot and transfer on their streams; see `Device.copy`. Waits only when the ring is full."""
        runtime = self._runtime
        corner = _corner(destination, source)
        # A transfer must find contiguous memory: torch would send another one through pageable memory and wait for it.
        is_padded = not corner.is_contiguous()
        if not is_padded:
            destination = corner
        num_bytes = destination.numel() * destination.element_size()
        with self._lock:
            offset = self._take_block(num_bytes)
            if offset is None:
                self._copy_without_snapshot(corner, source)
                return None
            assert self._ring is not None
            block = self._ring[offset : offset + num_bytes].view(destination.dtype).view(destination.shape)
            current = runtime.current_stream()
            try:
                if is_padded:
                    runtime.copy(current, block, destination)
                runtime.copy(current, _corner(block, source), source)
            except BaseException:
                self._blocks.give_back(offset, num_bytes)
                raise
            self._follow(current)
            runtime.copy(self._side, destination, block)
            transfer = StreamTransfer(runtime, runtime.record(self._side), offset, num_bytes)
            self._under_way.append(transfer)
            return transfer

    def _follow(self, current: Any) -> None:
        """Let the side stream begin after what the current stream holds now: the snapshot."""
        self._runtime.wait(self._side, self._runtime.record(current))

    def _copy_without_snapshot(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # Lazy conjugation and negation are resolved here after the copy: torch would do it in host memory before a copy that does not block has arrived.
        is_conjugate, is_negative = source.is_conj(), source.is_neg()
        bits = source.conj() if is_conjugate else source
        bits = torch._neg_view(bits) if is_negative else bits
        current = self._runtime.current_stream()
        self._runtime.copy(current, destination, bits)
        self._runtime.synchronize(self._runtime.record(current))
        if is_conjugate:
            destination.conj_physical_()
        if is_negative:
            destination.neg_()

    def _take_block(self, num_bytes: int) -> int | None:
        """Return the offset of a free block, waiting for earlier transfers if need be, or ``None`` if the ring is smaller than that."""
        if self._side is None:
            self._allocate_ring()
        if num_bytes > self._blocks.num_bytes:
            return None
        while self._under_way and self._runtime.is_done(self._under_way[0].event):
            self._free_oldest()
        while (offset := self._blocks.take(num_bytes)) is None:
            if not self._under_way:
                return None  # an interrupt has cost the ring a block
            self._under_way[0].wait()
            self._free_oldest()
        return offset

    def _free_oldest(self) -> None:
        done = self._under_way.popleft()
        self._blocks.give_back(done.offset, done.num_bytes)

    def _allocate_ring(self) -> None:
        self._side = self._runtime.side_stream()
        num_bytes = self._ring_bytes
        while num_bytes >= PAGE_BYTES:
            try:
                self._ring = self._runtime.allocate(num_bytes)
            except torch.OutOfMemoryError:
                num_bytes //= 2
            else:
                # Earlier work of this stream may still use that memory, for all the allocator knows; snapshots on other streams must not meet it.
                self._runtime.synchronize(self._runtime.record(self._runtime.current_stream()))
                self._blocks = FreeList(num_bytes, _BLOCK_ALIGNMENT_BYTES)
                return


class StreamTransfer:
    """A copy on the side stream, and the block of the ring that it reads."""

    __slots__ = ("_runtime", "event", "num_bytes", "offset")

    def __init__(self, runtime: StreamRuntime, event: Any, offset: int, num_bytes: int) -> None:
        self._runtime = runtime
        self.event = event
        self.offset = offset
        self.num_bytes = num_bytes

    def wait(self) -> None:
        """Return when the bytes are in host memory."""
        self._runtime.synchronize(self.event)


class CudaRuntime:
    """`StreamRuntime` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor on the device."""
        with torch.inference_mode(mode=False):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def side_stream(self) -> torch.cuda.Stream:
        """Return a new stream of the device."""
        return torch.cuda.Stream(device=self._device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return this thread's current stream on the device."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record a blocking event: who waits for it sleeps instead of spinning."""
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let the stream wait for the event, on the device."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Put a copy on the stream."""
        with torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)

    def is_done(self, event: torch.cuda.Event) -> bool:
        """Query the event."""
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Wait for the event; torch gives the GIL back meanwhile."""
        event.synchronize()


class Devices:
    """The devices of a run, made as their first tensor comes.

    Parameters
    ----------
    ring_bytes : int
        Device memory for snapshots on each device with streams.
    """

    def __init__(self, ring_bytes: int) -> None:
        self._ring_bytes = ring_bytes
        self._lock = threading.Lock()
        self._devices: dict[torch.device, Device] = {torch.device("cpu"): CpuDevice()}

    def of(self, tensor: torch.Tensor) -> Device:
        """Return the device of a tensor.

        Raises
        ------
        UnsupportedModelError
            If it is neither a CPU nor a CUDA device.
        """
        device = self._devices.get(tensor.device)
        if device is None:
            check_device(tensor.device)
            with self._lock:
                device = self._devices.setdefault(tensor.device, StreamDevice(CudaRuntime(tensor.device), self._ring_bytes))
        return device


def unseen() -> contextlib.AbstractContextManager[Any]:
    """Keep dispatch modes around the user's forward (selective checkpointing, FLOP counters) from seeing what we copy and compute."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def check_device(device: torch.device) -> None:
    """Raise `UnsupportedModelError` unless tensors of that device can be captured."""
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"cannot capture tensors on device {str(device)!r}: expected 'cpu' or 'cuda'; move the model there")


def allocate_host(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate the host memory for staging, once: page-aligned, and pinned for transfers from a device.

    Parameters
    ----------
    num_bytes : int
        A multiple of 4,096.
    pinned : bool
        Whether to pin it. CUDA's allocator rounds pinned memory up to a power of two.

    Returns
    -------
    torch.Tensor
        uint8, shape (num_bytes,).
    """
    with torch.inference_mode(mode=False):
        if pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        # Private, so that a forked child does not write into it.
        memory = mmap.mmap(-1, num_bytes, **({"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(
                    mmap.MADV_HUGEPAGE
                )  # a fault for each 2 MiB instead of each 4 KiB, while the arena is touched for the first time
        return torch.frombuffer(memory, dtype=torch.uint8)
