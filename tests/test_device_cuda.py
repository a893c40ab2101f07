"""The real path on a CUDA device: what `test_device.py` and `test_device_scenarios.py` show on a simulated one. Skipped where there is none."""

from __future__ import annotations

import threading

import pytest
import torch
from simulated import check_bytes, run_threads, to_bytes
from test_device import LAYERS, Reference, small_net, train

import hookstore
from hookstore.device import CudaRuntime, StreamDevice, allocate_host
from hookstore.format import PAGE_BYTES

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture
def cuda():
    return torch.device("cuda", torch.cuda.current_device())


def be_late(num_cycles=50_000_000):
    """Keep the current stream busy, by default for some tens of milliseconds, so that what follows on it is late."""
    torch.cuda._sleep(num_cycles)


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_run_from_end_to_end(dtype, codec, cuda, tmp_path):
    model = small_net(cuda, dtype)
    reference = Reference(model, LAYERS)
    path = tmp_path / "run"
    with hookstore.record(model, path, layers=LAYERS, kinds=("activation", "gradient"), codec=codec, buffer_bytes=8 << 20) as recorder:
        assert recorder._stager._arena.is_pinned()
        assert recorder._stager._arena.data_ptr() % PAGE_BYTES == 0
        train(model, reference, recorder, device=cuda, dtype=dtype)
    reference.check(path)


@pytest.mark.parametrize("ring_bytes", [0, PAGE_BYTES, 64 << 10])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_cuda_run_with_little_memory(ring_bytes, dtype, cuda, tmp_path, monkeypatch):
    """Ring and arena are used over and over; some captures are larger than either."""
    monkeypatch.setattr("hookstore.recorder._DEVICE_RING_BYTES", ring_bytes)
    model = small_net(cuda)
    reference = Reference(model, LAYERS)
    path = tmp_path / "run"
    with hookstore.record(model, path, layers=LAYERS, kinds=("activation", "gradient"), dtype=dtype, buffer_bytes=64 << 10) as recorder:
        train(model, reference, recorder, device=cuda, num_batches=12, batch_size=32)
    reference.check(path, dtype)


@pytest.mark.parametrize("ring_bytes", [0, 4 << 20])
def test_cuda_snapshot_waits_for_the_stream_that_computes(ring_bytes, cuda):
    device = StreamDevice(CudaRuntime(cuda), ring_bytes)
    arena = allocate_host(8 << 20, pinned=True)
    assert arena.is_pinned()
    values = torch.randn(500, 500)
    on_device = values.to(cuda)
    torch.cuda.synchronize(cuda)
    transfers, slots = [], [arena[index << 20 : (index << 20) + 1_000_000].view(torch.float32).view(500, 500) for index in range(8)]
    with torch.cuda.stream(torch.cuda.Stream(cuda)):
        source = torch.zeros(500, 500, device=cuda)
        be_late()
        for index, slot in enumerate(slots):
            source.copy_(on_device).add_(index)
            transfers.append(device.copy(slot, source))
            source.fill_(float("nan"))
    for index, (slot, transfer) in enumerate(zip(slots, transfers, strict=True)):
        if transfer is not None:
            transfer.wait()
        assert torch.equal(slot, values + index)
    torch.cuda.synchronize(cuda)


def test_cuda_copy_does_not_wait_while_the_ring_has_room(cuda):
    runtime = CudaRuntime(cuda)
    device = StreamDevice(runtime, 1 << 20)
    arena = allocate_host(1 << 20, pinned=True)
    source = torch.ones(1000, device=cuda)
    device.copy(arena[:4000].view(torch.float32), source).wait()  # the first one allocates
    be_late(2_000_000_000)
    busy = runtime.record(runtime.current_stream())
    transfer = device.copy(arena[4096:8096].view(torch.float32), source)
    assert not runtime.is_done(busy)
    assert not runtime.is_done(transfer.event)
    transfer.wait()
    assert runtime.is_done(busy)
    assert torch.equal(arena[4096:8096].view(torch.float32), torch.ones(1000))


def test_cuda_source_memory_is_used_again_right_after_the_hook(cuda):
    device = StreamDevice(CudaRuntime(cuda), 1 << 20)
    arena = allocate_host(1 << 20, pinned=True)
    be_late()
    expected, transfers, slots = [], [], []
    for index in range(16):
        slot = arena[index << 16 : (index << 16) + 40_000].view(torch.float32)
        source = torch.full((10_000,), float(index), device=cuda)
        transfers.append(device.copy(slot, source))
        slots.append(slot)
        expected.append(float(index))
        del source  # the allocator gives its memory to the next one
    for slot, transfer, value in zip(slots, transfers, expected, strict=True):
        transfer.wait()
        assert slot.eq(value).all()


def test_cuda_layouts_and_dtypes(cuda):
    device = StreamDevice(CudaRuntime(cuda), 1 << 20)
    arena = allocate_host(1 << 20, pinned=True)
    base = torch.randn(24, 18)
    bits = torch.randint(0, 255, (24, 18), dtype=torch.uint8)
    number = torch.randn(24, 18, dtype=torch.complex64)
    cases = [
        (base.to(cuda).T, base.T),
        (base.to(cuda)[1::2, 2:7], base[1::2, 2:7]),
        (base.to(cuda)[3, :1].expand(9, 1), base[3, :1].expand(9, 1)),
        (base.to(cuda)[2, 5], base[2, 5]),
        (base.to(cuda), base.half()),
        (base.to(cuda).T, base.T.bfloat16()),
        (base.to(cuda), base.double()),
        (bits.to(cuda), bits),
        (bits.to(cuda).view(torch.float8_e5m2), bits.view(torch.float8_e5m2)),
        ((bits > 100).to(cuda), bits > 100),
        (number.to(cuda), number),
        (number.to(cuda).conj(), number.conj().resolve_conj()),
    ]
    be_late()
    slots, transfers = [], []
    for index, (source, expected) in enumerate(cases):
        num_bytes = expected.numel() * expected.itemsize
        slot = arena[index << 13 : (index << 13) + num_bytes].view(expected.dtype).view(expected.shape)
        slots.append(slot)
        transfers.append(device.copy(slot, source))
    for slot, transfer, (_, expected) in zip(slots, transfers, cases, strict=True):
        transfer.wait()
        check_bytes(f"{expected.dtype} {tuple(expected.shape)}", to_bytes(slot), to_bytes(expected))


def test_cuda_conjugated_tensor_larger_than_the_ring(cuda):
    device = StreamDevice(CudaRuntime(cuda), 0)
    slot = allocate_host(8 << 20, pinned=True).view(torch.complex64)
    values = torch.randn(1 << 20, dtype=torch.complex64)
    source = values.to(cuda).conj()
    be_late()
    assert device.copy(slot, source) is None
    assert torch.equal(slot, values.conj().resolve_conj())


def test_cuda_padding_stays_as_it_is(cuda):
    """A slot that a capture fills in part is not contiguous."""
    device = StreamDevice(CudaRuntime(cuda), 1 << 20)
    slot = allocate_host(PAGE_BYTES, pinned=True)[:512].view(torch.float32).view(8, 16)
    slot.fill_(7.0)
    source = torch.ones(8, 16, device=cuda)
    be_late()
    source.mul_(2.0)
    transfer = device.copy(slot[:, :11], source[:, :11])
    source.zero_()
    transfer.wait()
    assert slot[:, :11].eq(2.0).all()
    assert slot[:, 11:].eq(7.0).all()


def test_cuda_threads_with_streams_of_their_own(cuda):
    device = StreamDevice(CudaRuntime(cuda), 256 << 10)
    arena = allocate_host(4 << 20, pinned=True)
    torch.zeros(1, device=cuda).add_(1)  # the context, before the threads

    def stage(index):
        slot = arena[index << 20 :][:40_000].view(torch.float32)
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            for step in range(20):
                be_late(1_000_000)
                source = torch.full((10_000,), 0.0, device=cuda).add_(index * 100 + step)
                transfer = device.copy(slot, source)
                source.fill_(-1.0)
                transfer.wait()
                assert slot.eq(index * 100 + step).all()

    run_threads(stage, 3)
    torch.cuda.synchronize(cuda)


def test_cuda_hooks_on_the_threads_of_autograd(cuda, tmp_path):
    """Backward hooks run on autograd's thread for the device, and on the stream that its forward ran on."""
    threads = set()
    model = small_net(cuda)
    reference = Reference(model, LAYERS)

    def watch(module, args, output):
        output.register_hook(lambda gradient: threads.add(threading.get_ident()))

    model[2].register_forward_hook(watch)
    path = tmp_path / "run"
    stream = torch.cuda.Stream(cuda)
    with hookstore.record(model, path, layers=LAYERS, kinds=("activation", "gradient"), buffer_bytes=1 << 20) as recorder:
        stream.wait_stream(torch.cuda.current_stream(cuda))
        with torch.cuda.stream(stream):
            be_late()
            train(model, reference, recorder, device=cuda)
        torch.cuda.current_stream(cuda).wait_stream(stream)
    assert threads
    assert threading.get_ident() not in threads
    reference.check(path)


@pytest.mark.parametrize("largest_bytes", [(1 << 20) - 1, 0])
def test_cuda_out_of_memory_shrinks_the_ring(largest_bytes, cuda):
    class ShortOfMemory(CudaRuntime):
        def allocate(self, num_bytes):
            if num_bytes > largest_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().allocate(num_bytes)

    device = StreamDevice(ShortOfMemory(cuda), 1 << 20)
    slot = allocate_host(PAGE_BYTES, pinned=True)[:4000].view(torch.float32)
    source = torch.arange(1000, device=cuda, dtype=torch.float32)
    transfer = device.copy(slot, source)
    source.zero_()
    if transfer is not None:
        transfer.wait()
    assert (transfer is None) == (largest_bytes == 0)
    assert torch.equal(slot, torch.arange(1000, dtype=torch.float32))


def test_cuda_first_capture_under_inference_mode(cuda):
    device = StreamDevice(CudaRuntime(cuda), 1 << 20)
    slot = allocate_host(PAGE_BYTES, pinned=True)[:400].view(torch.float32)
    for value, mode in ((1.0, True), (2.0, False)):
        with torch.inference_mode(mode=mode):
            transfer = device.copy(slot, torch.full((100,), value, device=cuda))
        transfer.wait()
        assert slot.eq(value).all()


@pytest.mark.parametrize("stats", [True, "only"])
def test_cuda_statistics_and_parts_without_waiting_for_the_device(stats, cuda, tmp_path):
    """After the first batch, in which memory is allocated and positions are brought to the device, nothing in a forward or backward waits for it."""
    model = small_net(cuda)
    inputs = [torch.randn(8, 1, 16, 16, device=cuda) for _ in range(4)]
    captures = [
        hookstore.Capture(layers=LAYERS, kinds=["activation", "gradient"], stats=stats),
        hookstore.Capture(layers=LAYERS[0], select={"sample": [3, 0]}),
    ]
    seen = []
    model.get_submodule(LAYERS[0]).register_forward_hook(lambda _module, _args, output: seen.append(output.detach().clone()))
    with hookstore.record(model, tmp_path / "run", captures=captures, buffer_bytes=8 << 20) as recorder:
        for batch, given in enumerate(recorder.batches(inputs, epoch=0)):
            torch.cuda.set_sync_debug_mode("error" if batch else "default")
            try:
                model(given).square().sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    with hookstore.open(tmp_path / "run") as run:
        for batch, output in enumerate(seen):
            found = run[LAYERS[0]].activation.stats(0, batch)
            reference = output.double()
            assert found.l2 == pytest.approx(float(reference.norm()), rel=1e-12)
            assert found.max == float(reference.max())
            assert run[LAYERS[0]].activation.portion({"sample": [3, 0]}).tensor(0, batch).equal(output[[3, 0]].cpu())


def test_cuda_flight_recorder(cuda, tmp_path):
    model = small_net(cuda)
    inputs = [torch.randn(8, 1, 16, 16, device=cuda) for _ in range(12)]
    inputs[6][2] = torch.nan
    with (
        pytest.warns(hookstore.CaptureWarning, match="flight recorder"),
        hookstore.record(model, tmp_path / "run", layers=LAYERS, last=2, buffer_bytes=8 << 20) as recorder,
    ):
        for given in recorder.batches(inputs, epoch=0):
            model(given)
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == [5, 6, 7, 8]
        assert (run.fired[0].epoch, run.fired[0].batch) == (0, 6)
