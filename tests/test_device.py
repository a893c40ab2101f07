"""`FreeList`, `Devices`, and `StreamDevice` on a simulated device: where it waits, runs short, fails, and is called by several threads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated import (
    IN_ORDER,
    POISON,
    SCHEDULES,
    CorruptionError,
    PoisonedFreeList,
    Schedule,
    SimulatedLayer,
    SimulatedRuntime,
    Simulation,
    check_bytes,
    check_memory,
    recording,
    run_threads,
    to_bytes,
)
from torch import nn

import hookstore
from hookstore.device import CpuDevice, Devices, FreeList, allocate_host, check_device
from hookstore.format import PAGE_BYTES

LATE = Schedule("late")
CURRENT_EAGER = Schedule("current-eager", current_is_eager=True)
SIDE_EAGER = Schedule("side-eager", side_is_eager=True)

# The free list ----------------------------------------------------------------------------------------------------


def test_free_list_hands_out_the_lowest_piece_that_is_large_enough():
    pieces = FreeList(4096, 512)
    assert [pieces.take(size) for size in (1, 512, 513, 2048)] == [0, 512, 1024, 2048]
    assert pieces.take(1) is None
    pieces.give_back(512, 512)
    pieces.give_back(2048, 2048)
    assert pieces.take(513) == 2048
    assert pieces.take(512) == 512


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_free_list_joins_neighbours(order):
    pieces = FreeList(4 * 512, 512)
    offsets = [pieces.take(500) for _ in range(4)]
    for index in order:
        pieces.give_back(offsets[index], 500)
    assert pieces.free_bytes == 4 * 512
    assert pieces.take(4 * 512) == 0


def test_free_list_ends_at_a_multiple_of_its_alignment():
    assert FreeList(1000, 512).num_bytes == 512
    assert FreeList(511, 512).take(1) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(1, 3000)), max_size=60))
def test_free_list_pieces_never_overlap(steps):
    pieces = FreeList(16_384, 64)
    out: list[tuple[int, int]] = []
    for gives_back, index, size in steps:
        if gives_back and out:
            pieces.give_back(*out.pop(index % len(out)))
            continue
        taken = np.zeros(pieces.num_bytes // 64 + 1, dtype=bool)
        taken[-1] = True
        for offset, length in out:
            taken[offset // 64 : (offset + length + 63) // 64] = True
        wanted = -(-size // 64)
        expected = next((start for start in range(pieces.num_bytes // 64) if not taken[start : start + wanted].any()), None)
        offset = pieces.take(size)
        assert offset == (None if expected is None or expected + wanted > pieces.num_bytes // 64 else expected * 64)
        if offset is not None:
            out.append((offset, size))
    assert pieces.free_bytes == pieces.num_bytes - sum(-(-length // 64) * 64 for _, length in out)


# Devices ----------------------------------------------------------------------------------------------------------


def test_cpu_copy_is_done_at_once_and_casts():
    source = torch.randn(6, 4).T
    destination = torch.empty(4, 6, dtype=torch.float16)
    assert CpuDevice().copy(destination, source) is None
    assert torch.equal(destination, source.half())


def test_devices_know_the_cpu_and_make_one_device_of_each_other_kind():
    devices = Devices(1 << 20)
    assert isinstance(devices.of(torch.zeros(1)), CpuDevice)
    assert devices.of(torch.zeros(1)) is devices.of(torch.zeros(1))


def test_other_devices_are_refused():
    with pytest.raises(hookstore.UnsupportedModelError, match=r"'meta'.*'cpu' or 'cuda'"):
        Devices(1 << 20).of(torch.zeros(1, device="meta"))
    check_device(torch.device("cuda:3"))
    check_device(torch.device("cpu"))


def test_host_memory_is_page_aligned_and_no_inference_tensor():
    with torch.inference_mode():
        memory = allocate_host(3 * PAGE_BYTES, pinned=False)
    assert memory.data_ptr() % PAGE_BYTES == 0
    assert memory.shape == (3 * PAGE_BYTES,)
    assert memory.dtype == torch.uint8
    assert not memory.is_inference()


# The simulated device is a hard one -------------------------------------------------------------------------------


def test_late_streams_run_only_what_someone_waits_for():
    runtime = SimulatedRuntime(LATE)
    order = []
    other = runtime.new_stream("other")
    runtime.launch(order.append, "first", stream=other)
    event = runtime.record(other)
    runtime.launch(order.append, "not needed", stream=other)
    runtime.wait(runtime.main, event)
    runtime.launch(order.append, "second")
    done = runtime.record(runtime.main)
    runtime.launch(order.append, "later")
    assert not order
    assert not runtime.is_done(done)
    runtime.synchronize(done)
    assert order == ["first", "second"]
    assert runtime.is_done(done)
    runtime.run_everything()
    assert sorted(order[2:]) == ["later", "not needed"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_stream_passes_a_wait(schedule):
    runtime = SimulatedRuntime(schedule)
    side = runtime.side_stream()
    order = []
    for index in range(20):
        runtime.launch(order.append, index)
        runtime.wait(side, runtime.record(runtime.main))
        runtime.launch(order.append, -index, stream=side)
    runtime.run_everything()
    assert all(order.index(index) < order.index(-index) for index in range(1, 20))
    assert [index for index in order if index > 0] == list(range(1, 20))


def test_freed_memory_is_poisoned_in_the_order_of_its_stream_and_used_again():
    runtime = SimulatedRuntime(LATE)
    seen = []
    tensor = runtime.compute(torch.tensor([1.0, 2.0]))
    address = tensor.data_ptr()
    view = tensor[1:]
    runtime.launch(lambda values: seen.append(values.tolist()), tensor)
    del tensor
    runtime.launch(lambda values: seen.append(values.tolist()), view)  # a view keeps the memory
    raw = runtime.alias(view).view(torch.uint8)
    del view
    runtime.launch(lambda: seen.append(raw.tolist()))
    again = runtime.compute(torch.tensor([3.0, 4.0]))
    assert again.data_ptr() == address
    assert not seen
    runtime.run_everything()
    assert seen == [[1.0, 2.0], [2.0], [POISON] * 4]
    assert again.tolist() == [3.0, 4.0]


def test_poisoned_free_list_finds_late_writes_and_double_returns():
    memory = torch.empty(4096, dtype=torch.uint8)
    pieces = PoisonedFreeList(memory, 512)
    offset = pieces.take(700)
    memory[offset : offset + 700] = 1
    pieces.give_back(offset, 700)
    assert set(memory.tolist()) == {POISON}
    pieces.check()
    with pytest.raises(CorruptionError, match="twice"):
        pieces.give_back(offset, 700)
    memory[600] = 1
    with pytest.raises(CorruptionError, match="written after"):
        pieces.take(1024)


@pytest.mark.parametrize("schedule", [LATE, CURRENT_EAGER, SIDE_EAGER], ids=str)
def test_reading_before_the_wait_shows_poison(schedule):
    simulation = Simulation(schedule)
    values = simulation.values(10, 10)
    destination = torch.full((400,), POISON, dtype=torch.uint8).view(torch.float32).view(10, 10)
    transfer = simulation.device.copy(destination, simulation.runtime.compute(values))
    assert set(destination.view(torch.uint8).flatten().tolist()) == {POISON}
    transfer.wait()
    assert torch.equal(destination, values)


# The ring ---------------------------------------------------------------------------------------------------------


def count_waits(simulation):
    """Return a list that gets an entry whenever someone waits for an event."""
    waits = []
    synchronize = simulation.runtime.synchronize
    simulation.runtime.synchronize = lambda event: (waits.append(event), synchronize(event))
    return waits


def test_hook_does_not_wait_while_the_ring_has_room():
    simulation = Simulation(LATE, ring_bytes=64 << 10)
    values = simulation.values(1000)
    simulation.capture(simulation.runtime.compute(values), values)  # the first one allocates
    waits = count_waits(simulation)
    for _ in range(15):
        values = simulation.values(1000)
        simulation.capture(simulation.runtime.compute(values), values)
    assert not waits
    simulation.finish()


def test_full_ring_waits_for_the_oldest_transfer_only():
    simulation = Simulation(LATE, ring_bytes=8 << 10)
    values = simulation.values(1000)
    tensor = simulation.runtime.compute(values)
    simulation.capture(tensor, values)
    waits = count_waits(simulation)
    simulation.capture(tensor, values)
    assert not waits
    simulation.capture(tensor, values)
    assert len(waits) == 1
    assert waits[0].is_done
    assert [simulation.runtime.is_done(transfer.event) for transfer in simulation.device._under_way] == [False, False]
    simulation.finish()


def test_ring_is_one_allocation_at_the_first_capture():
    simulation = Simulation(LATE)
    sizes = []
    allocate = simulation.runtime.allocate
    simulation.runtime.allocate = lambda num_bytes: (sizes.append(num_bytes), allocate(num_bytes))[1]
    for _ in range(5):
        values = simulation.values(100)
        simulation.capture(simulation.runtime.compute(values), values)
    assert sizes.count(64 << 10) == 1
    simulation.finish()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("largest_allocation_bytes", "num_failures", "ring_bytes"),
    [((64 << 10) - 1, 1, 32 << 10), ((16 << 10) - 1, 3, 8 << 10), (PAGE_BYTES - 1, 5, 0)],
)
def test_ring_shrinks_until_the_device_has_room(schedule, largest_allocation_bytes, num_failures, ring_bytes):
    simulation = Simulation(schedule, ring_bytes=64 << 10, largest_allocation_bytes=largest_allocation_bytes)
    for wanted in (300, 1000, 2500, 700) * 4:
        size = min(wanted, largest_allocation_bytes // 4)
        values = simulation.values(size)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor, values, layer=str(size))
        simulation.runtime.launch(torch.Tensor.zero_, tensor)
    assert simulation.runtime.num_failed_allocations == num_failures
    assert simulation.device._blocks.num_bytes == ring_bytes
    simulation.finish()


def test_ring_is_no_inference_tensor():
    """A first capture under inference mode must not keep later ones from going through the ring."""
    simulation = Simulation(LATE)
    for mode in (True, False):
        with torch.inference_mode(mode=mode):
            values = simulation.values(10)
            simulation.capture(simulation.runtime.compute(values), values)
    simulation.finish()


def test_ring_may_be_memory_that_its_stream_still_works_on():
    """As the caching allocator gives it: free for the host, and for that stream, but not for another one."""
    simulation = Simulation(LATE, ring_bytes=64 << 10)
    runtime = simulation.runtime
    first, second = runtime.new_stream("first"), runtime.new_stream("second")
    values = simulation.values(100)
    with runtime.use(first):
        earlier = runtime.allocate(64 << 10)
        runtime.launch(torch.Tensor.fill_, earlier, 1)
        del earlier
        simulation.capture(runtime.compute(values), values)
    with runtime.use(second):
        tensor = runtime.compute(values)
        simulation.capture(tensor, values)
        runtime.run(second)  # the second's snapshot is there, and only then does the first stream get on with the earlier tensor
    runtime.run(first)
    simulation.finish()


def test_copy_that_fails_gives_its_block_back():
    simulation = Simulation(LATE, ring_bytes=PAGE_BYTES)
    values = simulation.values(1000)
    tensor = simulation.runtime.compute(values)
    copy, failure = simulation.runtime.copy, RuntimeError("no kernel for this")

    def fail(*_arguments):
        raise failure

    simulation.runtime.copy = fail
    with pytest.raises(RuntimeError, match="no kernel"):
        simulation.capture(tensor, values)
    simulation.runtime.copy = copy
    simulation.capture(tensor, values)
    simulation.finish()


@pytest.mark.parametrize("ring_bytes", [0, PAGE_BYTES])
def test_conjugated_tensor_larger_than_the_ring(ring_bytes):
    simulation = Simulation(LATE, ring_bytes=ring_bytes)
    values = simulation.values(1200, dtype=torch.complex64)
    tensor = simulation.runtime.compute(values)
    simulation.capture(tensor.conj(), values.conj().resolve_conj())
    simulation.capture(tensor.conj().imag, -values.imag, layer="negated")
    simulation.finish()


# Regions and pieces -----------------------------------------------------------------------------------------------


def test_arena_is_used_many_times_over():
    simulation = Simulation(CURRENT_EAGER, arena_bytes=2 * PAGE_BYTES)
    for index in range(60):
        values = simulation.values(700)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor, values, layer=f"layer{index % 3}")
        simulation.runtime.launch(torch.Tensor.zero_, tensor)
    assert simulation.stager.staged_bytes == 60 * 2800
    simulation.finish()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_drop_mode_waits_for_nobody_and_what_it_keeps_is_right(schedule):
    simulation = Simulation(schedule, arena_bytes=4 * PAGE_BYTES, ring_bytes=64 << 10, drop_when_full=True, is_threaded=True)
    captures = []

    def capture(size, layer):
        values = simulation.values(size)
        tensor = simulation.runtime.compute(values)
        captures.append(simulation.capture(tensor, values, layer=layer))
        simulation.runtime.launch(torch.Tensor.zero_, tensor)

    for _ in range(4):
        capture(900, "layer")
    with pytest.warns(hookstore.CaptureWarning, match="captures are being dropped"):
        capture(900, "layer")
    for _ in range(4):
        capture(900, "layer")
    capture(5000, "larger than the arena")
    assert [capture.status for capture in captures] == ["ok"] * 4 + ["dropped"] * 6
    simulation.finish()
    assert simulation.consumer.gaps == captures[4:]
    capture(900, "layer")
    assert captures[-1].status == "ok"
    simulation.finish()


@pytest.mark.parametrize("is_oversize", [False, True])
def test_copy_that_fails_leaves_nothing_in_the_arena(is_oversize):
    simulation = Simulation(LATE, arena_bytes=4 * PAGE_BYTES)
    values = simulation.values(9000 if is_oversize else 100)
    tensor = simulation.runtime.compute(values)

    def fail(*_arguments):
        raise RuntimeError("no kernel for this")

    simulation.device.copy = fail
    with pytest.raises(RuntimeError, match="no kernel"):
        simulation.capture(tensor, values)
    del simulation.device.copy
    simulation.finish()


# Several threads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("ring_bytes", [8 << 10, 256 << 10])
def test_threads_with_streams_of_their_own(schedule, ring_bytes):
    """As autograd's threads: each computes, captures, edits and frees on its own stream; ring and arena are short for all of them."""
    simulation = Simulation(schedule, ring_bytes=ring_bytes, arena_bytes=24 << 10, is_threaded=True)
    runtime = simulation.runtime

    def train(index):
        generator = torch.Generator().manual_seed(index)
        with runtime.use(runtime.new_stream(f"stream {index}")):
            for step in range(12):
                values = torch.randn(20, 30 + index % 2, generator=generator)
                tensor = runtime.compute(values)
                simulation.capture(tensor, values, layer=f"layer{step % 2}.{index % 2}")
                runtime.launch(torch.Tensor.mul_, tensor, -1.0)
                simulation.capture(tensor.T, (values * -1.0).T.half(), layer=f"negated{index % 2}")

    with simulation.consuming():
        run_threads(train, 4)
    assert len(simulation.captured) == 4 * 24
    simulation.check()


@pytest.mark.parametrize("schedule", [LATE, CURRENT_EAGER, Schedule("random", seed=5)], ids=str)
def test_recorder_with_hooks_on_several_threads(schedule, tmp_path, monkeypatch):
    runtime = SimulatedRuntime(schedule)
    model = nn.ModuleList(SimulatedLayer(runtime) for _ in range(3))
    streams = [runtime.new_stream(f"stream {index}") for index in range(3)]
    expected = {}

    def train(index, batch):
        generator = torch.Generator().manual_seed(100 * batch + index)
        with runtime.use(streams[index]):
            for call in range(3):
                values, gradient_values = torch.randn(2, 30, 20, generator=generator)
                output = model[index](values)
                runtime.launch(torch.Tensor.zero_, output.detach())
                gradient = runtime.compute(gradient_values)
                output.backward(gradient)
                runtime.launch(torch.Tensor.zero_, gradient)
                expected[index, batch, call] = values, gradient_values

    path = tmp_path / "run"
    with recording(monkeypatch, model, path, runtime, kinds=("activation", "gradient"), ring_bytes=8 << 10) as recorder:
        for batch in range(2):
            with recorder.at(epoch=0, batch=batch):
                run_threads(lambda index, batch=batch: train(index, batch), 3)
    check_memory(recorder, runtime)
    with hookstore.open(path) as run:
        for (index, batch, call), (values, gradient_values) in expected.items():
            layer = run[str(index)]
            check_bytes("activation", layer.activation[0, batch, call].tobytes(), to_bytes(values))
            check_bytes("gradient", layer.gradient[0, batch, call].tobytes(), to_bytes(gradient_values))


# The whole recorder -----------------------------------------------------------------------------------------------


class Reference:
    """Clones what the hooks of the recorder should see; made before the recorder, so that its hooks come first."""

    def __init__(self, model, layers):
        self.batch = 0
        self.values = {}
        for name in layers:
            model.get_submodule(name).register_forward_hook(self._hook(name))

    def _hook(self, name):
        def keep(module, args, output):
            self.values[name, "activation", self.batch] = output.detach().clone()
            if output.requires_grad:
                output.register_hook(self._gradient_hook(name, self.batch))

        return keep

    def _gradient_hook(self, name, batch):
        def keep(gradient):
            self.values[name, "gradient", batch] = gradient.detach().clone()

        return keep

    def check(self, path, dtype=None):
        with hookstore.open(path) as run:
            assert len(self.values) == run.info().num_captures
            for (name, kind, batch), tensor in self.values.items():
                found = run[name][kind].tensor(0, batch)
                assert found.dtype == (dtype or tensor.dtype)
                check_bytes(f"{kind} of layer {name}, batch {batch}", to_bytes(found), to_bytes(tensor.cpu().to(found.dtype)))


LAYERS = ("0", "2", "5")


def small_net(device="cpu", dtype=torch.float32):
    """A net that edits what its layers return in place."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(inplace=True), nn.Conv2d(6, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 12 * 12, 10)
    ).to(device, dtype)


def train(model, reference, recorder, *, num_batches=4, batch_size=8, device="cpu", dtype=torch.float32):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(batch_size, 1, 16, 16, device=device, dtype=dtype) for _ in range(num_batches)]
    for batch, images in enumerate(recorder.batches(batches, epoch=0)):
        reference.batch = batch
        optimizer.zero_grad()
        output = model(images)
        output.square().sum().backward()
        with torch.no_grad():
            output.zero_()
        optimizer.step()


@pytest.mark.parametrize(
    "schedule",
    [
        CURRENT_EAGER,
        IN_ORDER,
        Schedule("side-random", current_is_eager=True, seed=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16, "ring_bytes": PAGE_BYTES}], ids=str)
def test_network_on_the_host_as_if_it_were_a_device(schedule, options, tmp_path, monkeypatch):
    """The model computes at once, as an eager current stream does; what is left is for the side stream and the writer to get right."""
    runtime = SimulatedRuntime(schedule)
    model = small_net()
    reference = Reference(model, LAYERS)
    path = tmp_path / "run"
    options = {"ring_bytes": 64 << 10, **options}
    with recording(
        monkeypatch, model, path, runtime, layers=LAYERS, kinds=("activation", "gradient"), takes_everything=True, **options
    ) as recorder:
        train(model, reference, recorder)
    check_memory(recorder, runtime)
    reference.check(path, options.get("dtype"))
