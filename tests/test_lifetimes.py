"""Copies of a model that is being recorded are inert; recording keeps no graph, model or tensor alive, and a thousand steps leave everything flat."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import tracemalloc
import weakref

import pytest
import torch
from small import recording
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.swa_utils import AveragedModel

import hookstore

KINDS = ("activation", "gradient", "input", "parameter")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def small():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0))


def num_hooks(model):
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
            module._backward_hooks,
        )
    )


def num_global_hooks():
    optimizer = sys.modules["torch.optim.optimizer"]
    return sum(
        len(hooks)
        for hooks in (
            torch_module._global_forward_hooks,
            torch_module._global_forward_pre_hooks,
            torch_module._global_module_registration_hooks,
            optimizer._global_optimizer_post_hooks,
            optimizer._global_optimizer_pre_hooks,
        )
    )


# Copies --------------------------------------------------------------------------------------------------------------


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def with_loaded_weights(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = small()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved_and_loaded,
    "state_dict": with_loaded_weights,
    "averaged": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("when", ["before", "between", "in_the_middle"])
@pytest.mark.parametrize("how", COPIES)
def test_copies_compute_the_same_and_record_nothing(path, how, when):
    model, inputs = small(), torch.randn(3, 2)
    made = []
    layers = ["", "0", "1", "2", "2.linear1", "2.norm2"]
    with recording(model, path, layers=layers, kinds=KINDS) as recorder:
        if when == "in_the_middle":
            handle = model[1].register_forward_hook(lambda *_: made.append(COPIES[how](model)) if not made else None)
            # (a copy carries the user's own hook too, which does nothing the second time; a lambda cannot be pickled)
            if how in ("pickle", "save"):
                handle.remove()
                handle = model[1].register_forward_hook(_Copies(made, how, model))
        if when == "before":
            made.append(COPIES[how](model))
        for batch in recorder.batches(range(2), epoch=0):
            model(inputs).sum().backward()
            if when == "between" and batch == 0:
                made.append(COPIES[how](model))
        num_rows = recorder.progress.num_captured
        (copied,) = made
        for module in (copied, copied.train(), copied.eval()):
            module(inputs).sum().backward()
    assert torch.equal(copied.train()(inputs), model(inputs))
    with hookstore.open(path) as run:
        assert {row["batch"] for row in run.manifest.to_pylist()} == {0, 1}
        ours = [row for row in run.manifest.to_pylist() if row["status"] == "ok"]
        assert len(ours) == num_rows > 0, "a copy recorded into the original's run"


class _Copies:
    """A hook of the user's that can be pickled, and then copies nothing."""

    def __init__(self, made, how, model):
        self.made, self.how, self.model = made, how, model

    def __call__(self, *_):
        if self.made is not None and not self.made:
            self.made.append(None)
            self.made[0] = COPIES[self.how](self.model)

    def __getstate__(self):
        return {"made": None, "how": "", "model": None}


def test_a_saved_model_loads_where_there_is_no_hookstore(path):
    model = small()
    with recording(model, path, layers=["", "0", "2.linear1"], kinds=KINDS) as recorder, recorder.at(epoch=0, batch=0):
        model(torch.ones(3, 2)).sum().backward()
        file_path = path.with_name("model.pt")
        torch.save(model, file_path)
        pickled = pickle.dumps(model)
    assert b"hookstore" not in pickled
    code = (
        "import sys; sys.modules['hookstore'] = None\n"
        "import torch\n"
        f"model = torch.load({str(file_path)!r}, weights_only=False)\n"
        "model(torch.ones(3, 2)).sum().backward(); model.eval()(torch.ones(3, 2))\n"
        "print('loaded', 'hookstore' in str(sys.modules.get('hookstore')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["loaded", "False"], done.stderr


def test_tensors_with_our_hooks_can_be_copied_and_saved(path):
    model = nn.Linear(2, 2)
    with recording(model, path, layers="", kinds="gradient"):
        output = model(torch.ones(1, 2))
        file = io.BytesIO()
        torch.save(output, file)
        assert b"hookstore" not in file.getvalue()
        output.sum().backward()


def test_an_averaged_copy_that_follows_the_training_records_nothing(path):
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, path) as recorder:
        averaged = AveragedModel(model)
        for _ in recorder.batches(range(3), epoch=0):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
            averaged(torch.ones(1, 2))
    with hookstore.open(path) as run:
        assert sorted((row["batch"], row["call"]) for row in run.manifest.to_pylist()) == [(0, 0), (1, 0), (2, 0)]


# What is kept alive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["batches", "automatic"])
def test_the_model_is_freed_while_it_is_recorded(path, clock):
    model = small()
    gone = [weakref.ref(module) for module in model.modules()] + [weakref.ref(parameter) for parameter in model.parameters()]
    with recording(model, path, layers=["", "0", "2", "2.linear1"], kinds=KINDS) as recorder:
        for _ in recorder.batches(range(2), epoch=0) if clock == "batches" else range(2):
            model(torch.ones(3, 2)).sum().backward()
        gc.collect()
        gc.disable()
        try:
            del model, _
            assert [reference() for reference in gone if reference() is not None] == []
        finally:
            gc.enable()


def test_models_of_a_mapping_are_freed_and_swapped_modules_are(path):
    models = {"g": nn.Sequential(nn.Linear(2, 2)), "d": nn.Sequential(nn.Linear(2, 2))}
    with pytest.warns(hookstore.CaptureWarning, match="another module now"), recording(models, path):
        for model in models.values():
            model(torch.ones(1, 2))
        old = weakref.ref(models["g"][0])
        models["g"][0] = nn.Linear(2, 2)
        assert old() is None
        for model in models.values():
            model(torch.ones(1, 2))
        gone = [weakref.ref(module) for module in models.values()]
        models.clear()
        del model
        gc.collect()
        assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("has_backward", [True, False])
def test_outputs_and_graphs_are_freed_at_once(path, has_backward):
    class Marker:
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), nn.ReLU())
    gc.collect()
    gc.disable()
    try:
        with recording(model, path, layers="*", kinds=KINDS):
            for _ in range(3):
                output = model(torch.ones(3, 2))
                marker = Marker()
                output.grad_fn.metadata["marker"] = marker
                gone = [weakref.ref(output), weakref.ref(marker)]
                if has_backward:
                    output.sum().backward()
                del output, marker
                assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_an_output_that_the_user_keeps_collects_no_hooks(path):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.cached = None

        def forward(self):
            if self.cached is None:
                self.cached = self.weight * 2
            return self.cached

    model = Cached()
    with recording(model, path, layers="", kinds=("activation", "gradient")):
        for _ in range(20):
            model().sum().backward(retain_graph=True)
            assert len(model.cached._backward_hooks or ()) <= 1


# A thousand steps ----------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer, a leaf that is returned, an output that is cached, and a branch that is taken now and then."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.positions = Returns(nn.Parameter(torch.ones(2)))
        self.branch = nn.Identity()
        self.num_calls = 0

    def forward(self, inputs):
        self.num_calls += 1
        hidden = self.layer(inputs) + self.positions()
        return self.branch(hidden) if self.num_calls % 5 else hidden


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


@pytest.mark.parametrize(("clock", "every"), [("batches", 1), ("batches", 3), ("automatic", 1), ("automatic", 3), ("at", 2)])
def test_a_thousand_steps_leave_memory_and_hooks_flat(path, clock, every):
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(4, 2)
    sizes, hooks, objects = [], set(), []
    is_told = pytest.warns(hookstore.CaptureWarning, match="0 calls in train .*'branch'")
    with is_told, recording(model, path, layers="*", kinds=KINDS, every=every) as recorder:
        tracemalloc.start()
        try:
            for batch in recorder.batches(range(1000), epoch=0) if clock == "batches" else range(1000):
                if clock == "at":
                    recorder.at(epoch=0, batch=batch)
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
                if batch % 6 == 0:
                    hooks.add((num_hooks(model), len(model.positions.value._backward_hooks or ())))
                if batch in (400, 990):
                    recorder.flush()
                    gc.collect()
                    objects.append(len(gc.get_objects()))
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert len(hooks) == 1, hooks
    assert sizes[1] - sizes[0] < 2 << 20, sizes  # rows wait in memory until there are enough of them to write
    assert objects[1] - objects[0] < 590 // every, objects
    assert num_hooks(model) == 0
    assert not model.positions.value._backward_hooks


def test_many_recordings_leave_nothing_behind(tmp_path):
    model = small()
    before = (num_hooks(model), num_global_hooks())
    counts = []
    for index in range(12):
        with recording(model, tmp_path / str(index), layers=["0", "2.linear1"], kinds=KINDS, buffer_bytes=64 << 10):
            model(torch.ones(3, 2)).sum().backward()
        gc.collect()
        counts.append(sum(str(type(thing).__module__).startswith("hookstore") for thing in gc.get_objects()))
        assert (num_hooks(model), num_global_hooks()) == before
    assert counts[-1] <= counts[2], counts


# Processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_runs_the_model_writes_nothing(path):
    model = nn.Sequential(nn.Linear(2, 2))
    with recording(model, path, kinds=KINDS) as recorder, recorder.at(epoch=0, batch=0):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                model(torch.ones(1, 2)).sum().backward()
                model.add_module("new", nn.ReLU())
                recorder.close()
                os._exit(0)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        model(torch.ones(1, 2)).sum().backward()
    with hookstore.open(path) as run:
        assert sorted(run.manifest["kind"].to_pylist()) == ["activation", "gradient", "input", "parameter", "parameter"]


class UsesModel(torch.utils.data.Dataset):
    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.model(torch.full((2,), float(index))).detach()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_that_run_the_model_write_nothing(path):
    model = nn.Linear(2, 2)
    with recording(model, path, layers="") as recorder:
        loader = torch.utils.data.DataLoader(UsesModel(model), batch_size=2, num_workers=1, multiprocessing_context="fork")
        for features in recorder.batches(loader, epoch=0):
            model(features)
    with hookstore.open(path) as run:
        assert sorted((row["batch"], row["call"]) for row in run.manifest.to_pylist()) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("kinds", [["activation", "gradient"], ["input_gradient"]])
def test_an_output_that_is_kept_after_close_keeps_no_staging_buffer(path, kinds):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inputs = torch.ones(1, 2, requires_grad=True)
    recorder = hookstore.record(model, path, kinds=kinds)
    with recorder.at(epoch=0, batch=0):
        output = model(inputs)
    recorder.close()
    stager = weakref.ref(recorder._stager)
    del recorder
    gc.collect()
    assert stager() is None
    output.sum().backward()  # whose hooks are still there, and do nothing
    assert inputs.grad is not None
    with hookstore.open(path) as run:
        assert run.info().num_captures == (2 if "activation" in kinds else 0)
