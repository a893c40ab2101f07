"""A simulated device with streams, and what drives the production staging code with it where there is no GPU.

`SimulatedRuntime` is a `hookstore.device.StreamRuntime`. Its streams are queues of operations that run when its `Schedule` says so: as late as they may, one
stream ahead of the other, or at random. It is honest where CUDA would show a mistake only now and then:

- Operations do not keep the memory alive that they work on. Memory whose last tensor is gone goes back to the stream that it was allocated on, as with CUDA's
  caching allocator: it is poisoned in that stream's order, and the next allocation of that size on that stream gets it.
- Device memory is apart from host memory: a tensor of the device has its values only once the operation that computes them has run.
- What torch's copy to the host does at once, it does at once here too: conjugating what comes from a lazily conjugated source, and the last step into a
  destination that is not contiguous (``aten/src/ATen/native/cuda/Copy.cu``).

`PoisonedFreeList` poisons blocks of the ring and regions of the arena when they go back, and finds out who wrote to them afterwards.

`Simulation` stages tensors of the simulated device, with a consumer that does what the writer does and comes in the middle of hooks too. `recording` puts the
device under the whole of `hookstore.record`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import hookstore
import hookstore.recorder
from hookstore.clock import Coordinates
from hookstore.device import CpuDevice, Devices, FreeList, StreamDevice, allocate_host
from hookstore.format import DTYPES, PAGE_BYTES
from hookstore.layout import ArrayCatalog, Draft
from hookstore.regions import NOTE_DTYPE, Oversize, Piece, Region
from hookstore.staging import Stager
from hookstore.writer import Writer

POISON = 0xA5
JOIN_S = 60.0  # a bound, so that a deadlock is a failure


class CorruptionError(AssertionError):
    """A wrong value was captured, or memory was touched by someone who had given it back."""


@dataclass(frozen=True)
class Schedule:
    """When operations run, beyond what someone waits for, and when the consumer takes what is staged.

    Attributes
    ----------
    current_is_eager, side_is_eager : bool
        Whether the streams of the model, and those of the device, run each operation as soon as no wait keeps it; else as late as they may: when someone
        waits for an event, and then no further than that needs.
    seed : int or None
        Beside that, run operations of any stream, and the consumer, by chance whenever the device is called.
    consumer_is_eager : bool
        Whether the consumer takes all it can at every call of the device; else when the arena is full.
    """

    name: str
    current_is_eager: bool = False
    side_is_eager: bool = False
    seed: int | None = None
    consumer_is_eager: bool = False

    def __str__(self) -> str:
        return self.name


SCHEDULES = (
    Schedule("late"),
    Schedule("late,consumer-eager", consumer_is_eager=True),
    Schedule("current-eager", current_is_eager=True),
    Schedule("current-eager,consumer-eager", current_is_eager=True, consumer_is_eager=True),
    Schedule("side-eager", side_is_eager=True),
    Schedule("side-eager,consumer-eager", side_is_eager=True, consumer_is_eager=True),
    *(Schedule(f"random-{seed}", seed=seed) for seed in range(4)),
)
IN_ORDER = Schedule("in-order", current_is_eager=True, side_is_eager=True)
"""Every operation runs when it is put on its stream, as on a device that is never behind: it forgives all but the grossest mistakes."""


# The device -------------------------------------------------------------------------------------------------------


class SimulatedStream:
    """A queue of operations."""

    def __init__(self, name: str, *, is_side: bool) -> None:
        self.name = name
        self.is_side = is_side
        self.operations: deque[_Operation] = deque()


class SimulatedEvent:
    """Done when its stream has come to it."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.is_done = False


@dataclass(frozen=True, slots=True)
class _Operation:
    """Something to run, an event to wait for, or an event to set."""

    function: Callable[[], object] | None = None
    awaited: SimulatedEvent | None = None
    recorded: SimulatedEvent | None = None


class SimulatedRuntime:
    """`StreamRuntime` of a simulated device.

    Parameters
    ----------
    schedule : Schedule
        When operations run.
    largest_allocation_bytes : int or None
        Larger allocations fail as they do on a device that is short of memory.
    """

    def __init__(self, schedule: Schedule, *, largest_allocation_bytes: int | None = None) -> None:
        self.main = SimulatedStream("main", is_side=False)
        self.on_call: Callable[[], None] = lambda: None
        self.num_failed_allocations = 0
        self._schedule = schedule
        self._chance = random.Random(schedule.seed)
        self._largest_allocation_bytes = largest_allocation_bytes
        self._lock = threading.RLock()
        self._local = threading.local()
        self._streams = [self.main]
        self._live: dict[int, torch.Tensor] = {}  # device memory by address
        self._freed: deque[tuple[SimulatedStream, torch.Tensor]] = deque()
        self._pool: dict[tuple[SimulatedStream, int], list[torch.Tensor]] = {}

    # StreamRuntime ------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> torch.Tensor:
        with self._call():
            if self._largest_allocation_bytes is not None and num_bytes > self._largest_allocation_bytes:
                self.num_failed_allocations += 1
                raise torch.OutOfMemoryError(f"simulated device out of memory: tried to allocate {num_bytes:,} bytes")
            stream = self.current_stream()
            pooled = self._pool.get((stream, num_bytes))
            with torch.inference_mode(mode=False):
                memory = pooled.pop() if pooled else torch.full((num_bytes,), POISON, dtype=torch.uint8)
                self._live[memory.data_ptr()] = memory
                # The tensor holds the owner and not the memory, so that the owner's end says when the last tensor on it is gone.
                owner = (ctypes.c_ubyte * num_bytes).from_address(memory.data_ptr())
                weakref.finalize(owner, self._freed.append, (stream, memory)).atexit = False
                return torch.frombuffer(owner, dtype=torch.uint8)

    def side_stream(self) -> SimulatedStream:
        return self._add_stream(f"side {len(self._streams)}", is_side=True)

    def current_stream(self) -> SimulatedStream:
        return getattr(self._local, "stream", self.main)

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        with self._call():
            event = SimulatedEvent(stream)
            stream.operations.append(_Operation(recorded=event))
            return event

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        with self._call():
            stream.operations.append(_Operation(awaited=event))

    def copy(self, stream: SimulatedStream, destination: torch.Tensor, source: torch.Tensor) -> None:
        if self.is_on_device(destination):
            self.launch(torch.Tensor.copy_, destination, source, stream=stream)
            return
        is_conj, is_neg = source.is_conj(), source.is_neg()
        bits = source.conj() if is_conj else torch._neg_view(source) if is_neg else source
        target = destination if destination.is_contiguous() else torch.empty(destination.shape, dtype=destination.dtype)
        self.launch(torch.Tensor.copy_, target, bits, stream=stream)
        if target is not destination:
            # That is pageable memory, and the driver returns only once it has been filled.
            self.synchronize(self.record(stream))
        if is_conj:
            target.conj_physical_()
        if is_neg:
            target.neg_()
        if target is not destination:
            destination.copy_(target)

    def is_done(self, event: SimulatedEvent) -> bool:
        with self._call():
            return event.is_done

    def synchronize(self, event: SimulatedEvent) -> None:
        with self._call():
            self._run_until(event)

    # What tests call ----------------------------------------------------------------------------------------------

    def launch(self, function: Callable[..., object], *arguments: Any, stream: SimulatedStream | None = None) -> None:
        """Put ``function(*arguments)`` on a stream, the current one by default; it does not keep device memory alive."""
        with self._call():
            aliases = [self.alias(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
            operation = _Operation(lambda: function(*aliases))
            (stream or self.current_stream()).operations.append(operation)

    def compute(self, values: torch.Tensor) -> torch.Tensor:
        """Return a new tensor of the device into which the current stream puts values."""
        memory = self.allocate(max(1, values.numel() * values.itemsize))
        tensor = memory.view(values.dtype).view(values.shape)
        self.launch(torch.Tensor.copy_, tensor, values)
        return tensor

    def new_stream(self, name: str) -> SimulatedStream:
        """Return a new stream of the model's own."""
        return self._add_stream(name, is_side=False)

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Make a stream this thread's current one."""
        before = self.current_stream()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def run(self, stream: SimulatedStream) -> None:
        """Run everything on a stream, and what that waits for."""
        self.synchronize(self.record(stream))

    def run_everything(self) -> None:
        """Run everything on every stream."""
        for stream in self._streams:
            self.run(stream)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies in the device's memory."""
        return self._memory_of(tensor) is not None

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same elements that does not keep device memory alive; a tensor of the host itself."""
        memory = self._memory_of(tensor)
        if memory is None:
            return tensor
        with torch.inference_mode(mode=False):
            offset = (tensor.data_ptr() - memory.data_ptr()) // tensor.itemsize
            alias = torch.empty(0, dtype=tensor.dtype).set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
            return alias.conj() if tensor.is_conj() else torch._neg_view(alias) if tensor.is_neg() else alias

    # Time ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """What happens around each call of the device: others get on meanwhile."""
        self.on_call()
        with self._lock:
            self._take_back_freed()
            self._get_on()
            yield
            self._get_on()

    def _take_back_freed(self) -> None:
        """Give memory back to its stream. Not done in the finalizer, which may run at any point, in any thread."""
        while self._freed:
            stream, memory = self._freed.popleft()
            del self._live[memory.data_ptr()]
            stream.operations.append(_Operation(lambda memory=memory: memory.numpy().fill(POISON)))
            self._pool.setdefault((stream, memory.numel()), []).append(memory)

    def _get_on(self) -> None:
        schedule = self._schedule
        eager = [stream for stream in self._streams if (schedule.side_is_eager if stream.is_side else schedule.current_is_eager)]
        while any([self._step(stream) for stream in eager]):  # noqa: C419  # every stream steps
            pass
        if schedule.seed is not None:
            for _ in range(self._chance.randrange(4)):
                self._step(self._chance.choice(self._streams))

    def _step(self, stream: SimulatedStream) -> bool:
        """Run the next operation of a stream; return whether there was one that nothing keeps waiting."""
        if not stream.operations:
            return False
        operation = stream.operations[0]
        if operation.awaited is not None and not operation.awaited.is_done:
            return False
        stream.operations.popleft()
        if operation.function is not None:
            with torch.no_grad():
                operation.function()
        if operation.recorded is not None:
            operation.recorded.is_done = True
        return True

    def _run_until(self, event: SimulatedEvent) -> None:
        """Run what an event needs, and no more."""
        while not event.is_done:
            awaited = event.stream.operations[0].awaited
            if awaited is not None:
                self._run_until(awaited)
            self._step(event.stream)

    def _add_stream(self, name: str, *, is_side: bool) -> SimulatedStream:
        with self._lock:
            stream = SimulatedStream(name, is_side=is_side)
            self._streams.append(stream)
            return stream

    def _memory_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        address = tensor.data_ptr()
        with self._lock:
            return next((memory for start, memory in self._live.items() if start <= address < start + memory.numel()), None)


# Production code, watched -----------------------------------------------------------------------------------------


class PoisonedFreeList(FreeList):
    """Poisons what it is given back, and raises `CorruptionError` when that was written to afterwards, or was not out."""

    def __init__(self, memory: torch.Tensor, alignment_bytes: int) -> None:
        super().__init__(memory.numel(), alignment_bytes)
        self._bits = memory.numpy()
        self._bits[:] = POISON

    def take(self, num_bytes: int) -> int | None:
        offset = super().take(num_bytes)
        if offset is not None:
            self._check(offset, offset + num_bytes)
        return offset

    def give_back(self, offset: int, num_bytes: int) -> None:
        super().give_back(offset, num_bytes)
        if any(before[1] > after[0] for before, after in itertools.pairwise(self._holes)):
            raise CorruptionError(f"bytes {offset:,} – {offset + num_bytes:,} were given back twice")
        self._bits[offset : offset + num_bytes] = POISON

    def check(self) -> None:
        """Raise unless everything that is free is as it was given back."""
        for start, end in self._holes:
            self._check(start, end)

    def _check(self, start: int, end: int) -> None:
        if not (self._bits[start:end] == POISON).all():
            raise CorruptionError(f"bytes {start:,} – {end:,} were written after they had been given back")


class PoisonedDevice(StreamDevice):
    """`StreamDevice` with a poisoned ring."""

    def _allocate_ring(self) -> None:
        super()._allocate_ring()
        if self._ring is not None:
            # Not the ring itself: it is for the device to keep that.
            self._blocks = PoisonedFreeList(self._runtime.alias(self._ring)[: self._blocks.num_bytes], self._blocks._alignment)

    def check(self) -> None:
        """Raise if a block was written after it had been given back."""
        if isinstance(self._blocks, PoisonedFreeList):
            self._blocks.check()


class PoisonedStructures(list[str]):
    """Structures by their numbers; raises `CorruptionError` for a number that is none: it was read where the poison is."""

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise CorruptionError(f"a note says structure {number:#x}, of {len(self)}")
        return super().__getitem__(number)


class PoisonedStager(Stager):
    """`Stager` with a poisoned arena."""

    def __init__(self, arena: torch.Tensor, *arguments: Any, **options: Any) -> None:
        super().__init__(arena, *arguments, **options)
        self._free = PoisonedFreeList(arena, PAGE_BYTES)
        self.structures = PoisonedStructures(self.structures)

    def check(self) -> None:
        """Raise unless the arena is empty, and as it was given back."""
        if not self.is_empty or self.used_bytes:
            raise CorruptionError(f"{self.used_bytes:,} bytes of the arena were not given back")
        self._free.check()


class SimulatedDevices(Devices):
    """Sends tensors of the simulated device there, and those of the host to the CPU.

    Parameters
    ----------
    takes_everything : bool
        Whether tensors of the host count as the device's: for a model that computes there, in step with an eager current stream.
    """

    def __init__(self, runtime: SimulatedRuntime, device: StreamDevice, *, takes_everything: bool = False) -> None:
        super().__init__(0)
        self._runtime = runtime
        self.device = device
        self._takes_everything = takes_everything

    def of(self, tensor: torch.Tensor) -> StreamDevice | CpuDevice:
        return self.device if self._takes_everything or self._runtime.is_on_device(tensor) else CpuDevice()


# Staging by hand --------------------------------------------------------------------------------------------------


class Consumer:
    """Does with what is staged what the writer does, and keeps the bytes."""

    def __init__(self, stager: Stager) -> None:
        self.contents: dict[int, bytes] = {}  # by batch: each capture has its own
        self.scales: dict[int, float] = {}
        self.gaps: list[Draft] = []
        self._stager = stager
        self._pieces: dict[Oversize, bytearray] = {}

    def take(self, item: Region | Piece | Draft) -> None:
        """Take one item of the queue."""
        if isinstance(item, Region):
            self._take_region(item)
        elif isinstance(item, Piece):
            self._take_piece(item)
        else:
            self.gaps.append(item)

    def _take_region(self, region: Region) -> None:
        for transfer in region.transfers:
            transfer.wait()
        array = region.array
        notes = np.frombuffer(self._stager.memory, NOTE_DTYPE, count=region.reserved, offset=region.notes_offset)
        for slot in region.slots.tolist():
            start = region.offset + slot * array.stride_bytes
            self.scales[int(notes["batch"][slot])] = float(notes["scale"][slot])
            self._keep(int(notes["batch"][slot]), bytes(self._stager.memory[start : start + array.chunk_bytes]))
        self._stager.release(region)

    def _take_piece(self, piece: Piece) -> None:
        if piece.transfer is not None:
            piece.transfer.wait()
        contents = self._pieces.setdefault(piece.oversize, bytearray())
        contents += self._stager.memory[piece.offset : piece.offset + piece.length]
        self._stager.release(piece)
        if piece.is_last:
            self.scales[piece.oversize.capture.coordinates.batch] = float(piece.oversize.capture.scale)
            self._keep(piece.oversize.capture.coordinates.batch, bytes(self._pieces.pop(piece.oversize)))

    def _keep(self, batch: int, contents: bytes) -> None:
        if batch in self.contents:
            raise CorruptionError(f"the capture of batch {batch} came twice")
        self.contents[batch] = contents


class _InlineRoom:
    """Stands for the stager's condition where nobody else is there to make room: who waits lets the consumer take one thing."""

    def __init__(self, lock: threading.Lock, consume: Callable[[], bool]) -> None:
        self._lock = lock
        self._consume = consume

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.release()
        try:
            if not self._consume():
                raise CorruptionError("deadlock: the arena is full and nothing is on its way out of it")
        finally:
            self._lock.acquire()
        return True

    def notify_all(self) -> None:
        pass


class Simulation:
    """A stager on a simulated device, and its consumer.

    Parameters
    ----------
    schedule : Schedule
        When things happen.
    ring_bytes, arena_bytes : int
        Sizes.
    largest_allocation_bytes : int or None
        See `SimulatedRuntime`.
    drop_when_full : bool
        See `Stager`.
    device_type, stager_type : type
        `PoisonedDevice` and `PoisonedStager`, or mutants of them.
    is_threaded : bool
        Whether the consumer runs in a thread of its own, in `consuming`, and as it likes; else within the calls of this thread, as the schedule says.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        ring_bytes: int = 64 << 10,
        arena_bytes: int = 64 << 10,
        largest_allocation_bytes: int | None = None,
        drop_when_full: bool = False,
        device_type: type[PoisonedDevice] = PoisonedDevice,
        stager_type: type[PoisonedStager] = PoisonedStager,
        is_threaded: bool = False,
    ) -> None:
        self.runtime = SimulatedRuntime(schedule, largest_allocation_bytes=largest_allocation_bytes)
        self.device = device_type(self.runtime, ring_bytes)
        catalog = ArrayCatalog(num_epochs=None, rank=0)
        arena = allocate_host(arena_bytes, pinned=False)
        self.stager = stager_type(arena, SimulatedDevices(self.runtime, self.device), catalog, drop_when_full=drop_when_full)
        self.consumer = Consumer(self.stager)
        self.captured: list[tuple[Draft, torch.Tensor]] = []
        self.scales: dict[int, float] = {}
        self._schedule = schedule
        self._batches = itertools.count()
        self._generator = torch.Generator().manual_seed(schedule.seed or 0)
        self._chance = random.Random(schedule.seed)
        self.is_consuming = False
        if not is_threaded:
            self.stager._room = _InlineRoom(self.stager._lock, self.consume)
            self.runtime.on_call = self._let_consumer_in

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return random values in host memory."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.complex64 if dtype.is_complex else torch.float32)
        return values.to(dtype) if dtype.is_floating_point or dtype.is_complex else (100 * values).to(dtype)

    def capture(
        self,
        tensor: torch.Tensor,
        values: torch.Tensor,
        *,
        layer: str = "layer",
        scale: torch.Tensor | None = None,
        expected_scale: float = math.nan,
    ) -> Draft:
        """Stage a tensor of the device, as a hook would, and note what it is expected to be, in the dtype to capture it in."""
        where = Coordinates("train", 0, next(self._batches))
        dtype = str(values.dtype).removeprefix("torch.")
        capture = Draft(layer, "activation", "", dtype, where, 0, 0, 0, tuple(tensor.shape), 0)
        if scale is not None:
            capture.scale = scale
            self.scales[where.batch] = expected_scale
        self.stager.stage(capture, tensor)
        if capture.status == "ok":
            self.captured.append((capture, values.clone()))
        return capture

    def finish(self) -> None:
        """Let the consumer take everything, run what is left on the streams, and raise `CorruptionError` if anything is wrong."""
        self.stager.close_regions()
        while self.consume():
            pass
        self.check()

    def check(self) -> None:
        """Raise `CorruptionError` if anything is wrong once all has been taken."""
        self.runtime.run_everything()
        for capture, values in self.captured:
            contents = self.consumer.contents.get(capture.coordinates.batch)
            if contents is None:
                raise CorruptionError(f"{_name(capture)} never came")
            scale, expected = self.consumer.scales[capture.coordinates.batch], self.scales.get(capture.coordinates.batch, math.nan)
            if scale != expected and not (math.isnan(scale) and math.isnan(expected)):
                raise CorruptionError(f"{_name(capture)} has the loss scale {scale} instead of {expected}")
            check_bytes(_name(capture), contents, _chunk(capture, values))
        self.stager.check()
        self.device.check()

    @contextlib.contextmanager
    def consuming(self) -> Iterator[None]:
        """Run the consumer in a thread, and have it take everything in the end."""

        def consume() -> None:
            try:
                while (item := self.stager.queue.get()) is not None:
                    self.consumer.take(item)
            except BaseException as failure:
                self.stager.fail(failure)

        thread = threading.Thread(target=consume, name="consumer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.stager.close_regions()
            self.stager.queue.put(None)
            _join(thread)
        if self.stager.failure is not None:
            raise self.stager.failure

    def _let_consumer_in(self) -> None:
        if self._schedule.seed is not None:
            if self._chance.random() < 0.3:
                self.consume()
        elif self._schedule.consumer_is_eager:
            while self.consume():
                pass

    def consume(self) -> bool:
        """Let the consumer take one item; return whether there was one. It calls the device itself, which does not let it in again."""
        if self.is_consuming or self.stager.queue.empty():
            return False
        self.is_consuming = True
        try:
            self.consumer.take(self.stager.queue.get_nowait())
        finally:
            self.is_consuming = False
        return True


def run_threads(function: Callable[[int], None], num_threads: int) -> None:
    """Call a function with 0, 1, … in as many threads at once, and raise what one of them raises."""
    failures: list[BaseException] = []
    start = threading.Barrier(num_threads)

    def run(index: int) -> None:
        try:
            start.wait(JOIN_S)
            function(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=[index], daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        _join(thread)
    if failures:
        raise failures[0]


def _join(thread: threading.Thread) -> None:
    """Return when a thread has ended, or raise when that takes too long to be anything but a deadlock."""
    thread.join(JOIN_S)
    if thread.is_alive():
        raise CorruptionError(f"deadlock: thread {thread.name} does not end")


def check_bytes(name: str, found: bytes, expected: bytes) -> None:
    """Raise `CorruptionError` unless they are equal."""
    if found != expected:
        wrong = [index for index, (one, other) in enumerate(zip(found, expected, strict=False)) if one != other]
        poison = sum(found[index] == POISON for index in wrong)
        raise CorruptionError(f"{name}: {len(wrong):,} of {len(expected):,} bytes are wrong, {poison:,} of them poison")


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _chunk(capture: Draft, values: torch.Tensor) -> bytes:
    """Return the bytes of the chunk that a capture fills, with its padding."""
    assert capture.array is not None
    shape = capture.array.spec.chunk_shape
    dtype = DTYPES[capture.dtype]
    filled = bytearray(dtype.fill_bits.to_bytes(dtype.itemsize, "little") * math.prod(shape))
    torch.frombuffer(filled, dtype=values.dtype).reshape(shape)[tuple(slice(size) for size in values.shape)] = values
    return bytes(filled)


def _name(capture: Draft) -> str:
    return f"layer {capture.layer!r}, batch {capture.coordinates.batch}"


# The whole recorder --------------------------------------------------------------------------------------------------


class _Produce(torch.autograd.Function):
    """Returns a tensor of the device, and takes a gradient that lies there too."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, runtime: SimulatedRuntime, values: torch.Tensor) -> torch.Tensor:
        return runtime.compute(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None]:
        return torch.zeros(()), None, None


class SimulatedLayer(nn.Module):
    """A layer on the simulated device: its stream computes the values that it is called with, when its time comes."""

    def __init__(self, runtime: SimulatedRuntime) -> None:
        super().__init__()
        self._runtime = runtime
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Produce.apply(self._anchor, self._runtime, values)


@contextlib.contextmanager
def recording(
    monkeypatch: Any,
    model: nn.Module,
    path: Any,
    runtime: SimulatedRuntime,
    *,
    ring_bytes: int = 32 << 10,
    device_type: type[PoisonedDevice] = PoisonedDevice,
    stager_type: type[PoisonedStager] = PoisonedStager,
    writer_type: type[Writer] = Writer,
    takes_everything: bool = False,
    **options: Any,
) -> Iterator[hookstore.Recorder]:
    """Record a model on a simulated device with the production recorder."""
    device = device_type(runtime, ring_bytes)
    with monkeypatch.context() as patch:
        patch.setattr(hookstore.recorder, "Devices", lambda _: SimulatedDevices(runtime, device, takes_everything=takes_everything))
        patch.setattr(hookstore.recorder, "Stager", stager_type)
        patch.setattr(hookstore.recorder, "Writer", writer_type)
        recorder = hookstore.record(model, path, **{"buffer_bytes": 64 << 10, **options})
    with recorder:
        yield recorder


def check_memory(recorder: hookstore.Recorder, runtime: SimulatedRuntime) -> None:
    """Raise `CorruptionError` if a closed recorder's memory was not given back, or was touched afterwards."""
    runtime.run_everything()
    stager: Any = recorder._stager
    stager.check()
    stager._devices.device.check()
