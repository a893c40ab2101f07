"""Captures of a layer that has been seen before take shorter ways; what they store must be the same."""

from __future__ import annotations

import contextlib
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

import hookstore
from hookstore import staging as staging_module
from hookstore.clock import Coordinates
from hookstore.device import Devices, allocate_host
from hookstore.layout import ArrayCatalog, Draft
from hookstore.staging import Stager


class Pass(nn.Module):
    def forward(self, value):
        return value


class Subclass(torch.Tensor):
    pass


def complex_values(*shape):
    return torch.randn(*shape, dtype=torch.complex64)


MAKERS = {
    "contiguous": torch.randn,
    "requires grad": lambda *shape: torch.randn(*shape, requires_grad=True) * 1,
    "leaf that requires grad": lambda *shape: torch.randn(*shape, requires_grad=True),
    "parameter": lambda *shape: nn.Parameter(torch.randn(*shape)),
    "subclass": lambda *shape: torch.randn(*shape).as_subclass(Subclass),
    "transposed": lambda *shape: torch.randn(*shape[::-1]).movedim(tuple(range(len(shape))), tuple(range(len(shape)))[::-1]),
    "expanded": lambda *shape: torch.randn(*shape[:-1], 1).expand(*shape),
    "every second": lambda *shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "with an offset": lambda *shape: torch.randn(shape[0] + 3, *shape[1:])[3:],
    "conjugated lazily": lambda *shape: complex_values(*shape).conj(),
    "negated lazily": lambda *shape: complex_values(*shape).conj().imag,
    "complex": complex_values,
    "zeros that are not stored": lambda *shape: torch._efficientzerotensor(shape, dtype=torch.float32),
    "ones": lambda *shape: torch.ones(*shape, dtype=torch.bool),
    "bfloat16": lambda *shape: torch.randn(*shape).bfloat16(),
    "int8": lambda *shape: torch.randint(-128, 127, shape, dtype=torch.int8),
}


def bits(tensor):
    whole = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(whole.view(torch.uint8).numpy()) if whole.dim() else bytes(whole.reshape(1).view(torch.uint8).numpy())


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
@pytest.mark.parametrize("shape", [(3, 5), (40, 300), (64, 20, 60)], ids=["small", "above 32 KiB", "above 256 KiB"])
def test_every_capture_of_a_layer_is_right_whatever_came_before(tmp_path, shape, mode):
    """One dtype and shape after another, in every layout, each several times and mixed: whatever one teaches must not be used for the next."""
    context = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]
    model = Pass()
    expected = []
    torch.manual_seed(0)
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=8 << 20) as recorder:
        for round_number in range(3):
            names = list(MAKERS) if round_number % 2 == 0 else list(MAKERS)[::-1]
            for name in names:
                with context():
                    value = MAKERS[name](*shape)
                    recorder.at(epoch=0, batch=len(expected))
                    model(value)
                    expected.append((name, bits(value)))
                    if not value.is_leaf or not value.requires_grad:
                        with torch.no_grad(), contextlib.suppress(RuntimeError):  # expanded, or zeros that are not stored
                            value.fill_(1)  # too late to be seen
    with hookstore.open(tmp_path / "run") as run:
        for batch, (name, wanted) in enumerate(expected):
            assert bits(run[""].activation.tensor(0, batch)) == wanted, (name, batch)


def test_functorch_tensors_after_plain_ones_of_their_shape(tmp_path):
    model = Pass()
    with hookstore.record(model, tmp_path / "run", layers="") as recorder:
        for batch in range(2):
            recorder.at(epoch=0, batch=batch)
            model(torch.ones(4))
        with pytest.warns(hookstore.CaptureWarning, match="functorch"):
            recorder.at(epoch=0, batch=2)
            vmap(model)(torch.ones(3, 4))
            recorder.at(epoch=0, batch=3)
            grad(lambda value: model(value).sum())(torch.ones(4))
        recorder.at(epoch=0, batch=4)
        model(torch.ones(4) * 2)
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == [0, 1, 4]
        assert {row["batch"] for row in run.manifest.to_pylist() if row["status"] == "skipped"} == {2, 3}
        assert run[""].activation[0, 4].tolist() == [2.0] * 4


def test_nested_and_sparse_tensors_after_plain_ones(tmp_path):
    model = Pass()
    with hookstore.record(model, tmp_path / "run", layers="") as recorder:
        recorder.at(epoch=0, batch=0)
        model(torch.ones(2, 3))
        recorder.at(epoch=0, batch=1)
        model(torch.ones(2, 3).to_sparse())
        recorder.at(epoch=0, batch=2)
        model(torch.ones(2, 3) * 3)
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == [0, 1, 2]
        assert run[""].activation[0, 1].dense().tolist() == [[1.0] * 3] * 2
        assert run[""].activation[0, 2].tolist() == [[3.0] * 3] * 2


def test_a_cast_is_made_every_time(tmp_path):
    model = Pass()
    with hookstore.record(model, tmp_path / "run", layers="", dtype=torch.float16) as recorder:
        for batch in range(4):
            recorder.at(epoch=0, batch=batch)
            model(torch.full((5,), batch + 0.1))
            model(torch.full((5,), batch, dtype=torch.int64))
    with hookstore.open(tmp_path / "run") as run:
        for batch in range(4):
            assert run[""].activation[0, batch, 0].tolist() == [np.float16(batch + 0.1)] * 5
            assert run[""].activation[0, batch, 1].tolist() == [batch] * 5


def test_many_threads_on_one_small_layer(tmp_path):
    layers = nn.ModuleList(Pass() for _ in range(2))
    with hookstore.record(layers, tmp_path / "run", layers="*", buffer_bytes=256 << 10) as recorder:
        recorder.at(epoch=0, batch=0)

        def work(index):
            for number in range(300):
                layers[index % 2](torch.full((16,), float(1000 * index + number)))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with hookstore.open(tmp_path / "run") as run:
        for layer in ("0", "1"):
            values = [run[layer].activation[0, 0, call] for call in range(600)]
            assert all((value == value[0]).all() for value in values)
            wanted = {float(1000 * index + number) for index in (int(layer), int(layer) + 2) for number in range(300)}
            assert {float(value[0]) for value in values} == wanted


def test_an_interrupted_padded_capture_leaves_its_shape_to_nobody(tmp_path):
    """The slot goes to the next capture, which is whole."""
    model = Pass()

    def interrupt(frame, event, argument):
        if frame.f_code.co_name != "_stage_slot":
            return None

        def at_line(frame, event, argument):
            if event == "line" and "region" in frame.f_locals and frame.f_locals["region"] is not None and frame.f_locals["region"].pending:
                sys.settrace(None)
                raise KeyboardInterrupt
            return at_line

        return at_line

    with hookstore.record(model, tmp_path / "run", layers="") as recorder:
        recorder.at(epoch=0, batch=0)
        model(torch.full((8, 10), 1.0))
        recorder.at(epoch=0, batch=1)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                model(torch.full((5, 10), 2.0))
        finally:
            sys.settrace(before)
        recorder.at(epoch=0, batch=2)
        model(torch.full((8, 10), 3.0))
    with hookstore.open(tmp_path / "run") as run:
        assert run[""].activation[0, 2].tolist() == [[3.0] * 10] * 8


@pytest.mark.parametrize("shape", [(8, 10), (100, 1000)])
def test_a_slot_that_an_interrupt_kept_from_being_handed_over_is_given_up(tmp_path, monkeypatch, shape):
    model = Pass()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with hookstore.record(model, tmp_path / "run", layers="") as recorder:
        recorder.at(epoch=0, batch=0)
        with monkeypatch.context() as patch:
            patch.setattr(Stager, "_hand_over_for_sure", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(shape))
        recorder.at(epoch=0, batch=1)
        model(torch.ones(shape) * 2)
        recorder.flush()
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == [1]
        assert (run[""].activation[0, 1] == 2).all()


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_of_two_captures_at_one_place_the_later_wins_whatever_array_it_is_in(tmp_path, codec):
    model = Pass()
    with hookstore.record(model, tmp_path / "run", layers="", codec=codec) as recorder:
        recorder.at(epoch=0, batch=0)
        model(torch.full((10, 300), 1.0))
        recorder.at(epoch=0, batch=1)
        model(torch.full((10, 300), 1.5))
        recorder.at(epoch=0, batch=0)
        model(torch.full((2, 30), 2.0))
        for batch in range(2, 400):
            recorder.at(epoch=0, batch=batch)
            model(torch.full((2, 30), 3.0))
    with hookstore.open(tmp_path / "run") as run, pytest.warns(hookstore.CaptureWarning, match="captured 2 times"):
        assert run[""].activation[0, 0].tolist() == [[2.0] * 30] * 2


def test_no_hooks_come_back_after_the_recorder_is_closed(tmp_path):
    model = nn.Sequential(Pass())
    recorder = hookstore.record(model, tmp_path / "run", every=2)
    for batch in recorder.batches(range(6), epoch=0):
        model(torch.ones(3))
        if batch == 1:
            recorder.close()
        if batch >= 1:
            assert not model._forward_pre_hooks
            assert not model[0]._forward_hooks
    assert not model._forward_pre_hooks
    assert not model[0]._forward_hooks


# The arena grows ----------------------------------------------------------------------------------------------------


def make_stager(num_bytes, *, drop=False):
    catalog = ArrayCatalog(num_epochs=None, rank=0)
    return Stager(allocate_host(num_bytes, pinned=False), Devices(0), catalog, drop_when_full=drop, is_untouched=True)


def stage(stager, batch, tensor, layer="layer"):
    capture = Draft(layer, "activation", "", "float32", Coordinates("train", 0, batch), 0, 0, 0, tuple(tensor.shape), 0)
    stager.stage(capture, tensor)
    return capture


@pytest.fixture
def short_start(monkeypatch):
    """Let the arena begin with 1 MiB in use."""
    monkeypatch.setattr(staging_module, "_FIRST_BYTES", 1 << 20)
    monkeypatch.setattr(staging_module, "_STEP_BYTES", 4096)


@pytest.mark.usefixtures("short_start")
@pytest.mark.parametrize("drop", [False, True])
def test_memory_that_lies_fallow_is_used_before_anything_is_dropped_or_waits_for_ever(drop):
    stager = make_stager(4 << 20, drop=drop)
    captures = [stage(stager, batch, torch.full((256 << 8,), float(batch))) for batch in range(11)]  # 256 KiB each
    assert [capture.status for capture in captures] == ["ok"] * 11
    assert stager.used_bytes > 2 << 20
    if drop:
        with pytest.warns(hookstore.CaptureWarning, match="dropped"):
            assert [stage(stager, batch, torch.ones(256 << 8)).status for batch in range(11, 20)][-1] == "dropped"
        assert stager._free.num_bytes == 4 << 20


@pytest.mark.usefixtures("short_start")
def test_a_writer_that_makes_room_soon_is_waited_for(monkeypatch):
    stager = make_stager(4 << 20)
    stager._touch_s_per_byte = 1.0  # new memory costs days
    monkeypatch.setattr(stager, "_learn_touch", lambda *_: None)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            region = stager.queue.get()
            if region is None:
                return
            time.sleep(0.001)
            stager.release(region)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for batch in range(40):
            stage(stager, batch, torch.ones(256 << 8))
    finally:
        stager.queue.put(None)
        thread.join()
    assert stager._free.num_bytes == 1 << 20, "nothing new was touched"


@pytest.mark.usefixtures("short_start")
def test_a_writer_that_takes_longer_than_new_memory_is_not_waited_for():
    stager = make_stager(4 << 20)
    stager._touch_s_per_byte = 0.0
    for batch in range(12):
        stage(stager, batch, torch.ones(256 << 8))  # a region each, which the writer has and does not release
    assert stager._free.num_bytes > 3 << 20


def test_what_a_copy_to_new_memory_costs_is_learned_within_bounds():
    stager = make_stager(1 << 20)
    before = stager._touch_s_per_byte
    stager._learn_touch(1000.0, 1)
    assert stager._touch_s_per_byte == staging_module._MOST_TOUCH_S_PER_BYTE
    for _ in range(100):
        stager._learn_touch(0.0, 1)
    assert stager._touch_s_per_byte < before


@pytest.mark.usefixtures("short_start")
def test_a_capture_larger_than_what_is_in_use_gets_its_room():
    stager = make_stager(8 << 20)
    assert stage(stager, 0, torch.ones(1 << 20)).status == "ok"  # 4 MiB
    assert stager.used_bytes >= 4 << 20


def test_many_arrays_share_what_is_in_use():
    stager = make_stager(64 << 20)
    for layer in range(200):
        capture = stage(stager, 0, torch.ones(640), layer=f"layer{layer}")
        capture.array.region_bytes = 4 << 20
    for batch in range(1, 60):
        for layer in range(200):
            stage(stager, batch, torch.ones(640), layer=f"layer{layer}")
        while not stager.queue.empty():
            stager.release(stager.queue.get())
    assert stager.num_staged == 200 * 60
    assert stager._free.num_bytes <= 48 << 20
