"""Models under `torch.compile`: the same captures as in eager, no graph break, and nothing lost in silence."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import pickle
import shutil
import warnings
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._dynamo.utils
from small import Adapter
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstore
from hookstore import operators

COLUMNS = ("layer", "kind", "leaf", "phase", "epoch", "batch", "call", "backward", "step", "status", "reason", "structure")
KINDS = ("activation", "gradient", "input", "parameter")
BACKENDS = ["eager", "aot_eager"]

# The compiler looks at this attribute of whatever it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _compiler_as_new(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def recording(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, "kinds": KINDS, **options})


def settings():
    """What recordings change of the compiler's settings."""
    return [getattr(torch._dynamo.config, name) for name in ("skip_nnmodule_hook_guards", "recompile_limit", "accumulated_recompile_limit")]


def rows(path):
    """What a run holds: for each row its coordinates and its value."""
    found = {}
    with hookstore.open(path) as run:
        for row in run.manifest.select(COLUMNS).to_pylist():
            captures = getattr(run[row["layer"]], row["kind"]) if row["kind"] else None
            where = {key: row[key] for key in ("leaf", "phase", "call", "backward")}
            value = captures.get(row["epoch"], row["batch"], **where) if row["status"] == "ok" else None
            key = tuple(row[name] for name in COLUMNS)
            assert key not in found, "captured twice"
            found[key] = value
    return found


def assert_same(found, expected, *, rtol=0.0, atol=0.0):
    assert sorted(found) == sorted(expected)
    assert found, "nothing was captured, so nothing was compared"
    for key, value in expected.items():
        if value is not None:
            assert found[key].dtype == value.dtype
            np.testing.assert_allclose(found[key], value, rtol=rtol, atol=atol, err_msg=str(key))


def in_both(tmp_path, make, use, *, backend="aot_eager", rtol=0.0, atol=0.0, compiler=None, **options):
    """Record a model eagerly and compiled, and compare all that was captured; returns the captures."""
    model = make()
    twin = copy.deepcopy(model)
    with recording(model, tmp_path / "eager", **options) as recorder:
        use(model, recorder)
    with recording(twin, tmp_path / "compiled", **options) as recorder:
        use(torch.compile(twin, backend=backend, fullgraph=True, **(compiler or {})), recorder)
    found = rows(tmp_path / "compiled")
    assert_same(found, rows(tmp_path / "eager"), rtol=rtol, atol=atol)
    return found


def batches(*, num=2, size=(3, 4)):
    """Train for some batches on inputs that are the same each time this is called."""

    def use(model, recorder):
        generator = torch.Generator().manual_seed(1)
        for _ in recorder.batches(range(num), epoch=0):
            model(torch.randn(size, generator=generator)).pow(2).sum().backward()

    return use


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))


# The same as in eager ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(3, 4), (3, 5, 4)], ids=["plain", "views"])
def test_all_kinds(tmp_path, backend, size):
    found = in_both(tmp_path, small, batches(size=size), backend=backend, layers="*")
    assert len(found) == 2 * (4 * 3 + 4), "of four layers all, and two parameters of two"


class Unusual(nn.Module):
    """Nested inputs and outputs, keywords, a module that is called three times."""

    Named = namedtuple("Named", ["first", "rest"])

    @dataclasses.dataclass
    class Output:
        hidden: torch.Tensor
        others: tuple

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs, *, scale, extra=None):
            hidden = self.linear(self.linear(inputs)) * scale["by"]
            return {"a": hidden, "b": [hidden * 2, Unusual.Named(hidden.sum(), (hidden + 1,))], "none": None, "text": "text"}

    class Wrap(nn.Module):
        def forward(self, value):
            return Unusual.Output(value["a"], (value["b"][0], value["b"][1].rest[0]))

    def __init__(self):
        super().__init__()
        self.inner, self.wrap = self.Inner(), self.Wrap()

    def forward(self, inputs):
        output = self.wrap(self.inner(inputs, scale={"by": torch.tensor(2.0)}))
        return output.hidden + output.others[0] + self.inner.linear(output.others[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_values_and_repeated_calls(tmp_path, backend):
    found = in_both(tmp_path, Unusual, batches(num=1), backend=backend, layers="*")
    assert {key[2] for key in found if key[:2] == ("inner", "activation") and key[9] == "ok"} == {"a", "b.0", "b.1.first", "b.1.rest.0"}
    assert {key[6] for key in found if key[:2] == ("inner.linear", "gradient")} == {0, 1, 2}


class Views(nn.Module):
    """Views and edits: a residual sum on a view made inside, an edited view of what has other uses."""

    def __init__(self, *, edits):
        super().__init__()
        self.linear, self.flatten, self.relu, self.edits = nn.Linear(4, 4), nn.Flatten(1), nn.ReLU(inplace=True), edits

    def forward(self, inputs):
        hidden = self.linear(inputs)
        before = hidden.sum(dim=0) * 2
        hidden += inputs
        hidden = self.relu(hidden)
        shared = hidden * 1
        flat = self.flatten(shared)
        after = shared.sum() * 3
        if self.edits:
            flat.mul_(2)
        return before.sum() + after + flat.sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edits", [False, True])
def test_views_and_edits_in_place(tmp_path, backend, edits):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*edited in place")
        found = in_both(tmp_path, lambda: Views(edits=edits), batches(num=1, size=(2, 3, 4)), backend=backend, rtol=1e-6)
    statuses = {key[0]: key[9] for key in found if key[1] == "gradient"}
    assert statuses["flatten"] == ("skipped" if edits else "ok")
    assert statuses["linear"] == "ok"


class Discriminating(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.inner(self.inner(inputs)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 1, 2, 0)])
def test_backwards_in_any_order_are_paired_with_their_calls(tmp_path, backend, order):
    """Three calls of one compiled graph in a batch, two of the layer in each, and a retained graph."""

    def use(model, recorder):
        with recorder.at(epoch=3, batch=7):
            losses = [model(torch.full((2, 4), float(scale))).pow(2).sum() for scale in (1, 2, 3)]
        with recorder.at(epoch=4, batch=0):
            for position, which in enumerate(order):
                losses[which].backward(retain_graph=which in order[position + 1 :])

    found = in_both(tmp_path, Discriminating, use, backend=backend, layers="*", kinds=("activation", "gradient"))
    assert {key[6] for key in found if key[:2] == ("inner.0", "gradient")} == set(range(6))
    assert {key[4:6] for key in found} == {(3, 7)}


def test_two_forwards_and_then_two_backwards_of_two_batches(tmp_path):
    def use(model, recorder):
        losses = [model(torch.full((2, 4), float(batch + 1))).sum() for batch in recorder.batches(range(2), epoch=1)]
        for loss in losses:
            loss.backward()

    found = in_both(tmp_path, small, use)
    assert {key[5] for key in found if key[1] == "gradient"} == {0, 1}


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        hidden = checkpoint(self.block, inputs, use_reentrant=False)
        return self.head(checkpoint(self.block, hidden, use_reentrant=False))


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_inside_records_each_call_once(tmp_path, backend):
    found = in_both(tmp_path, Checkpointed, batches(), backend=backend, layers="*", kinds=("activation", "gradient", "input"))
    assert len([key for key in found if key[0] == "block.1"]) == 2 * 2 * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_inside(tmp_path, backend):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = small()

        def forward(self, inputs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layers(inputs).float()

    in_both(tmp_path, Cast, batches(), backend=backend, layers="*", rtol=2e-2)


def test_dynamic_shapes(tmp_path):
    def use(model, recorder):
        for size in recorder.batches((3, 5, 9), epoch=0):
            model(torch.ones(size, 2, 4)).sum().backward()

    found = in_both(tmp_path, small, use, compiler={"dynamic": True})
    assert {value.shape[0] for value in found.values() if value.ndim == 3} == {3, 5, 9}


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval"])
def test_without_gradients(tmp_path, how):
    def use(model, recorder):
        model.train(how != "eval")
        with getattr(torch, how if how != "eval" else "no_grad")():
            for _ in recorder.batches(range(2), epoch=0):
                model(torch.ones(2, 4))

    found = in_both(tmp_path, small, use, phases=("train", "eval"))
    assert {key[3] for key in found} == {"eval" if how == "eval" else "train"}
    assert not [key for key in found if key[1] == "gradient"]


# How things are compiled ------------------------------------------------------------------------------------------


def in_place(model, **options):
    model.compile(**options)
    return model


def submodules(model, **options):
    for layer in list(model):
        layer.compile(**options)
    return model


def replaced(model, **options):
    model[0], model[2] = torch.compile(model[0], **options), torch.compile(model[2], **options)
    return model


def function(model, **options):
    return torch.compile(lambda inputs: model(inputs) * 1, **options)


@pytest.mark.parametrize("how", [in_place, submodules, function])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("clock", ["batches", "automatic"])
def test_ways_to_compile(tmp_path, how, when, clock):
    def train(call, recorder):
        for batch in recorder.batches(range(2), epoch=0) if clock == "batches" else range(2):
            call(torch.full((3, 4), float(batch))).pow(2).sum().backward()

    model = small()
    twin = copy.deepcopy(model)
    with recording(model, tmp_path / "eager", layers="*") as recorder:
        train(model, recorder)
    if when == "before":
        call = how(twin, backend="aot_eager", fullgraph=True)
    with recording(twin, tmp_path / "compiled", layers="*") as recorder:
        if when == "after":
            call = how(twin, backend="aot_eager", fullgraph=True)
        train(call, recorder)
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


def test_compiled_parts_of_a_model(tmp_path):
    model = small()
    with recording(model, tmp_path / "eager", layers="1") as recorder:
        batches()(model, recorder)
    model = replaced(model, backend="aot_eager", fullgraph=True)
    with recording(model, tmp_path / "compiled", layers="1") as recorder:
        batches()(model, recorder)
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


def test_recording_what_torch_compile_returns(tmp_path):
    model = small()
    twin = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    with recording(model, tmp_path / "eager", layers="*") as recorder:
        batches()(model, recorder)
    with recording(twin, tmp_path / "compiled", layers="*") as recorder:
        batches()(twin, recorder)
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


def test_graph_breaks_lose_nothing(tmp_path):
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Discriminating()

        def forward(self, inputs):
            hidden = self.inner(inputs)
            torch._dynamo.graph_break()
            return self.inner(inputs * 2) + hidden

    model = Breaks()
    twin = copy.deepcopy(model)
    with recording(model, tmp_path / "eager", layers="*") as recorder:
        batches()(model, recorder)
    with recording(twin, tmp_path / "compiled", layers="*") as recorder:
        batches()(torch.compile(twin, backend="aot_eager"), recorder)
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


# Idle batches, guards and clocks ----------------------------------------------------------------------------------


class Counted:
    """A backend that counts what it compiles."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.num_graphs += 1
        return aot_eager(graph, inputs)


@pytest.mark.parametrize("clock", ["batches", "at", "automatic"])
@pytest.mark.parametrize("first", [0, 1], ids=["first_is_due", "first_is_idle"])
def test_idle_batches_have_a_graph_of_their_own(path, clock, first):
    """Two graphs, whatever the schedule does, and the idle one has no operators."""
    model, backend = small(), Counted()
    compiled_model = torch.compile(model, backend=backend, fullgraph=True)
    inputs = torch.ones(3, 4)
    with recording(model, path, batches=lambda batch: batch % 3 == first, kinds=("activation", "gradient")) as recorder:
        for batch in recorder.batches(range(9), epoch=0) if clock == "batches" else range(9):
            with recorder.at(epoch=0, batch=batch) if clock == "at" else contextlib.nullcontext():
                compiled_model(inputs).sum().backward()
    assert backend.num_graphs == 2
    found = rows(path)
    assert {key[5] for key in found} == {first, first + 3, first + 6}
    assert len(found) == 3 * 3 * 2
    assert {key[9] for key in found} == {"ok"}


def test_going_from_idle_to_due_compiles_nothing(path):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with recording(model, path, every=2) as recorder:
        for batch in recorder.batches(range(8), epoch=0):
            with torch._dynamo.config.patch(error_on_recompile=batch > 1):
                compiled_model(torch.ones(3, 4)).sum().backward()
    assert {key[5] for key in rows(path)} == {0, 2, 4, 6}


def test_train_and_eval_count_for_themselves(path):
    model = small()
    model.compile(backend="aot_eager", fullgraph=True)
    with recording(model, path, every=2, phases=("train", "eval"), kinds="activation", layers="0"):
        for is_training in (True, False, True, True, False, False):
            model.train(is_training)
            model(torch.ones(3, 4))
    assert sorted(key[3:6] for key in rows(path)) == [("eval", 0, 0), ("eval", 0, 2), ("train", 0, 0), ("train", 0, 2)]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_calls_of_a_batch_after_the_one_that_moves_the_clock(tmp_path, every):
    def train(generator, discriminator):
        for batch in range(5):
            fake = generator(torch.full((2, 4), float(batch)))
            (discriminator(torch.ones(2, 4)).sum() - discriminator(fake.detach()).sum()).backward()
            discriminator(fake).sum().backward()

    def compile_it(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    models = {"generator": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "discriminator": nn.Sequential(nn.Linear(4, 1))}
    with recording(models, tmp_path / "eager", every=every):
        train(*models.values())
    with recording(models, tmp_path / "compiled", every=every):
        train(*map(compile_it, models.values()))
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


def wrap(model):
    model[0] = Adapter(model[0])


@pytest.mark.parametrize("change", [wrap, lambda model: model.insert(0, nn.Tanh())], ids=["wrap", "insert"])
def test_names_follow_modules_that_change_place_in_a_compiled_model(path, change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = []
    with pytest.warns(hookstore.CaptureWarning, match="'0' is another module now"), recording(model, path, kinds="activation") as recorder:
        for batch in recorder.batches(range(4), epoch=0):
            if batch == 2:
                change(model)
            compiled_model(torch.ones(2, 4))
            expected.append(copy.deepcopy(model[0]))
    found = {key[5]: value for key, value in rows(path).items() if key[0] == "0"}
    assert sorted(found) == [0, 1, 2, 3]
    for batch, module in enumerate(expected):
        assert np.array_equal(found[batch], module(torch.ones(2, 4)).detach().numpy())


def test_a_batch_that_could_not_be_foreseen_is_a_row(path):
    """With the automatic clock a compiled function that calls the root module twice begins two batches."""
    model = small()
    twice = torch.compile(lambda inputs: model(inputs) + model(inputs), backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(hookstore.CaptureWarning, match="could not be foreseen"),
        recording(model, path, batches=[0, 3], kinds="activation", layers="0"),
    ):
        twice(torch.ones(3, 4))
        twice(torch.ones(3, 4))
    assert sorted((key[5], key[9]) for key in rows(path)) == [(0, "ok"), (3, "skipped")]


def test_compiled_while_the_hooks_are_off(path):
    """Eager first, so that idle batches have no hooks; then the model is compiled in an idle batch."""
    model = small()
    with recording(model, path, every=3, layers="0", kinds="activation") as recorder:
        for batch in recorder.batches(range(7), epoch=0):
            if batch == 2:
                assert not model[0]._forward_hooks
                model.compile(backend="aot_eager", fullgraph=True)
            model(torch.ones(3, 4))
    assert {key[5] for key in rows(path)} == {0, 3, 6}
    assert not model[0]._forward_hooks


def test_slowdown_leaves_batches_out_of_compiled_models_too(path):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="batches are being left out")
        with recording(model, path, max_slowdown=1e-6, kinds="activation") as recorder:
            for _ in recorder.batches(range(6), epoch=0):
                compiled_model(torch.ones(3, 4))
            assert recorder.progress.num_skipped_batches
    statuses = {key[5]: key[9] for key in rows(path)}
    assert set(statuses) == set(range(6))
    assert set(statuses.values()) == {"ok", "skipped"}


# Before, after and beside -----------------------------------------------------------------------------------------


def test_compiled_and_called_before_recording(path, caplog):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled_model(torch.ones(3, 4)).sum().backward()
    with recording(model, path) as recorder:
        assert "compiled again" in caplog.text
        batches()(compiled_model, recorder)
    assert len(rows(path)) == 2 * (3 * 3 + 4)


def test_one_recording_after_another(tmp_path):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("a", "b"):
        with recording(model, tmp_path / name) as recorder:
            batches()(compiled_model, recorder)
        compiled_model(torch.ones(3, 4)).sum().backward()
    with recording(model, tmp_path / "a", mode="a") as recorder, recorder.at(epoch=1, batch=0):
        compiled_model(torch.ones(3, 4)).sum().backward()
    first = rows(tmp_path / "b")
    assert len(first) == 2 * (3 * 3 + 4)
    assert {key[4:6] for key in rows(tmp_path / "a")} == {(0, 0), (0, 1), (1, 0)}


def test_two_recordings_at_once(tmp_path):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with recording(model, tmp_path / "a") as a, a.at(epoch=0, batch=0):
        compiled_model(torch.ones(3, 4)).sum().backward()
        with recording(model, tmp_path / "b", layers="2") as b, b.at(epoch=5, batch=5):
            compiled_model(torch.ones(3, 4)).sum().backward()
        compiled_model(torch.ones(3, 4)).sum().backward()
    assert len(rows(tmp_path / "a")) == 3 * (3 * 3 + 4)
    assert {(key[0], *key[4:6]) for key in rows(tmp_path / "b")} == {("2", 5, 5)}


def test_graphs_go_on_after_the_end_and_keep_nothing(path):
    model = small()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with recording(model, path) as recorder:
        loss = compiled_model(torch.ones(3, 4)).sum()
    num = len(rows(path))
    loss.backward()
    compiled_model(torch.ones(3, 4)).sum().backward()
    assert len(rows(path)) == num
    assert not [layer for layer in model.modules() if layer._forward_hooks or layer._forward_pre_hooks]
    assert not operators.LAYERS
    assert not operators.TICKS
    hooks = weakref.ref(recorder._hooks)
    del recorder
    gc.collect()
    assert hooks() is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_a_compiled_model_are_inert(path, how):
    model = small()
    model.compile(backend="aot_eager", fullgraph=True)
    with recording(model, path, kinds=("activation", "gradient")) as recorder:
        with recorder.at(epoch=0, batch=0):
            expected = model(torch.ones(3, 4))
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        twin.compile(backend="aot_eager", fullgraph=True)
        with recorder.at(epoch=0, batch=1):
            assert torch.equal(twin(torch.ones(3, 4)), expected)
    assert {key[5] for key in rows(path)} == {0}


@pytest.mark.parametrize("first", ["recorded", "twin"])
@pytest.mark.parametrize("kind", ["another", "copy"])
def test_a_twin_of_the_same_class_is_neither_recorded_nor_in_the_way(path, first, kind):
    """A teacher, or an average of the weights: graphs belong to the code, which twins share."""
    model, twin = Discriminating(), Discriminating()
    with recording(model, path, kinds=("activation", "gradient")) as recorder:
        if kind == "copy":
            twin = copy.deepcopy(model)
        calls = {"recorded": torch.compile(model, backend="aot_eager"), "twin": torch.compile(twin, backend="aot_eager")}
        for batch in recorder.batches(range(2), epoch=0):
            for name in (first, *(set(calls) - {first})):
                calls[name](torch.full((2, 4), float(batch if name == "recorded" else 9))).sum().backward()
    found = rows(path)
    assert len(found) == 2 * (2 + 2 + 1) * 2
    assert {key[6] for key in found if key[0] == "head"} == {0}


# Activation checkpointing around compiled blocks ------------------------------------------------------------------


class AroundBlocks(nn.Module):
    def __init__(self, *, use_reentrant=False):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.use_reentrant = use_reentrant

    def forward(self, inputs):
        for _ in range(2):
            inputs = checkpoint(self.block, inputs, use_reentrant=self.use_reentrant)
        return inputs


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_many_blocks_of_one_class_that_are_compiled_one_by_one(tmp_path, fullgraph):
    def make():
        return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12)])

    before = settings()
    assert before[1] < 12, "the compiler would give up after fewer graphs"
    model = make()
    twin = copy.deepcopy(model)
    for block in twin:
        block.compile(backend="aot_eager", fullgraph=fullgraph)
    with recording(model, tmp_path / "eager") as recorder:
        batches()(model, recorder)
    torch._dynamo.utils.counters.clear()
    with recording(twin, tmp_path / "compiled") as recorder:
        batches()(twin, recorder)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12, "none has fallen back to eager"
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))
    assert settings() == before


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["recorded first", "twin first"])
def test_graphs_of_a_twin_do_not_serve_a_recorded_model_on_another_thread(tmp_path, order):
    """Torch has settings of the compiler for each thread."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    models = (model, copy.deepcopy(model))
    inputs = torch.ones(2, 4)
    with ThreadPoolExecutor(1) as other:
        before = other.submit(settings).result()
        with recording(model, tmp_path / "run", kinds="activation") as recorder:
            compiled = [torch.compile(one, backend="eager") for one in models]
            for batch in range(2):
                recorder.at(epoch=0, batch=batch)
                for which in order:
                    other.submit(compiled[which], inputs).result()
        assert other.submit(settings).result() != before
        other.submit(torch.compile(nn.Tanh(), backend="eager"), inputs).result()
        assert other.submit(settings).result() == before, "as soon as that thread compiles again"
    found = rows(tmp_path / "run")
    assert sorted((key[0], key[5], key[9]) for key in found) == [("0", 0, "ok"), ("0", 1, "ok"), ("1", 0, "ok"), ("1", 1, "ok")]
    assert all(np.array_equal(value, model[: int(key[0]) + 1](inputs).detach()) for key, value in found.items())


def test_a_recording_that_is_closed_on_another_thread_leaves_the_compiler_as_it_was(path):
    before = settings()
    model = nn.Sequential(nn.Linear(4, 4))
    recorder = recording(model, path)
    assert settings() != before
    with ThreadPoolExecutor(1) as other:
        other.submit(recorder.close).result()
    torch.compile(model, backend="eager")(torch.ones(2, 4))
    assert settings() == before


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_checkpointing_around_compiled_blocks(tmp_path, backend, order):
    def train(model, recorder):
        for _ in recorder.batches(range(2), epoch=0):
            losses = [model(torch.full((2, 4), scale, requires_grad=True)).pow(2).sum() for scale in (1.0, 2.0)]
            for which in order:
                losses[which].backward()

    model = AroundBlocks()
    twin = copy.deepcopy(model)
    options = {"layers": "block*", "kinds": ("activation", "gradient", "input")}
    with recording(model, tmp_path / "eager", **options) as recorder:
        train(model, recorder)
    twin.block.compile(backend=backend, fullgraph=True)
    with recording(twin, tmp_path / "compiled", **options) as recorder:
        train(twin, recorder)
    assert_same(rows(tmp_path / "compiled"), rows(tmp_path / "eager"))


def test_reentrant_checkpointing_around_compiled_blocks_is_a_gap_with_its_reason(path):
    model = AroundBlocks(use_reentrant=True)
    model.block.compile(backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(hookstore.CaptureWarning, match="use_reentrant=False"),
        recording(model, path, layers="block.0", kinds=("activation", "gradient")) as recorder,
        recorder.at(epoch=0, batch=0),
    ):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    with hookstore.open(path) as run:
        statuses = [tuple(row.values()) for row in run.manifest.select(["kind", "status"]).to_pylist()]
    assert sorted(statuses) == [("activation", "ok")] * 2 + [("gradient", "skipped")] * 2


# What is refused, or a gap ----------------------------------------------------------------------------------------


class Passes(nn.Module):
    """A layer that returns what it is given, one that returns its parameter, and several views of one tensor."""

    class Parameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self):
            return self.weight

    def __init__(self):
        super().__init__()
        self.same, self.parameter, self.linear = nn.Identity(), self.Parameter(), nn.Linear(4, 4)

    def forward(self, inputs):
        hidden = self.linear(self.same(inputs) * self.parameter())
        return hidden, hidden.transpose(0, 1)


def test_gradients_that_come_about_outside_the_graph_are_gaps(path):
    model = Passes()
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    inputs = torch.ones(2, 3, 4, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", hookstore.CaptureWarning)
        with recording(model, path, kinds=("activation", "gradient")):
            outputs = compiled_model(inputs)
            (outputs[0].sum() + outputs[1].sum() + inputs.sum()).backward()
    reasons = {key[0]: key[10] for key in rows(path) if key[1] == "gradient"}
    assert "comes about outside" in reasons["same"]
    assert "comes about outside" in reasons["parameter"]
    assert "several views" in reasons["linear"]
    assert len([entry for entry in caught if entry.category is hookstore.CaptureWarning]) == 3


def test_an_output_that_is_not_used_has_the_zeros_that_the_compiled_backward_computes(path):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, inputs):
            return self.used(inputs), self.unused(inputs)

    model = Unused()
    with recording(model, path, kinds="gradient"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))[0].sum().backward()
    assert not model.unused.weight.grad.any()
    assert {key[0]: value.any() for key, value in rows(path).items()} == {"used": True, "unused": False}


@pytest.mark.parametrize("kinds", [("activation",), ("gradient",), ("input",), ("activation", "gradient", "input")], ids="-".join)
def test_a_model_under_vmap_is_a_gap_of_each_kind(path, kinds):
    model = nn.Linear(2, 1)
    batched = torch.compile(torch.vmap(model), backend="aot_eager", fullgraph=True)
    with pytest.warns(hookstore.CaptureWarning, match="functorch"), recording(model, path, kinds=kinds):
        outputs = batched(torch.ones(3, 2))
    assert torch.equal(outputs, model(torch.ones(3, 2)))
    assert sorted((key[1], key[9]) for key in rows(path)) == [(kind, "skipped") for kind in sorted(kinds)]


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.yes, self.no, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.last(torch.cond(inputs.sum() > 0, self.yes, self.no, (inputs,)))


def test_layers_inside_a_conditional_are_gaps_and_the_training_goes_on(path):
    model = Branches()
    expected = model(torch.ones(2, 4))
    compiled_model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with (
        pytest.warns(hookstore.CaptureWarning, match="called inside cond") as caught,
        recording(model, path, kinds="activation") as recorder,
    ):
        for _ in recorder.batches(range(2), epoch=0):
            outputs = compiled_model(torch.ones(2, 4))
            outputs.sum().backward()
    assert torch.equal(outputs, expected)
    assert len([entry for entry in caught if entry.category is hookstore.CaptureWarning]) == 1
    assert sorted((key[0], key[5], key[9]) for key in rows(path)) == [
        ("last", 0, "ok"),
        ("last", 1, "ok"),
        ("no", 0, "skipped"),
        ("yes", 0, "skipped"),
    ]


@pytest.mark.filterwarnings("ignore:selected layers with 0 calls")
def test_the_branch_that_an_eager_model_takes_is_recorded(path):
    model = Branches()
    inputs = torch.ones(2, 4)
    with recording(model, path, kinds="activation"):
        model(inputs)
    found = {key[0]: value for key, value in rows(path).items() if key[9] == "ok"}
    assert sorted(found) == ["last", "yes"]
    assert np.array_equal(found["yes"], model.yes(inputs).detach().numpy())


def test_cuda_graphs_are_refused(path):
    model = small()
    with (
        pytest.raises(Exception, match="UnsupportedModelError: hookstore cannot record what runs as CUDA graphs"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with recording(model, path):
            torch.compile(model, mode="reduce-overhead")(torch.ones(3, 4))


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_gradients_of_a_compiled_model_are_refused_by_rows(path, backend):
    """The other kinds are there, and what an optimizer steps with, which is read outside of the graph, too."""
    model = small()
    compiled_model = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = ("gradient", "input_gradient", "parameter_gradient")
    with (
        pytest.warns(hookstore.CaptureWarning, match="input_gradient of layer .* cannot be told from others'"),
        recording(model, path, kinds=kinds) as recorder,
    ):
        for _ in recorder.batches(range(2), epoch=0):
            compiled_model(torch.ones(3, 4, requires_grad=True)).sum().backward()
            optimizer.step()
            parameter_gradient = model[0].weight.grad.clone()
            optimizer.zero_grad()
    with hookstore.open(path) as run:
        for layer in run.layers:
            for batch in range(2):
                assert run[layer].gradient[0, batch].shape[0] == 3
                with pytest.raises(
                    hookstore.MissingCaptureError, match="was skipped: the module is compiled, and in a compiled graph its own share"
                ):
                    run[layer].input_gradient[0, batch]
        assert torch.equal(run[run.layers[0]].parameter_gradient.tensor(0, 1, leaf="weight"), parameter_gradient)


@pytest.mark.parametrize("around", ["backward", "all"])
def test_compiled_autograd_is_refused(path, around):
    from torch._dynamo import compiled_autograd

    model = small()
    compiled_model = torch.compile(model, backend="aot_eager")
    with (
        pytest.raises(Exception, match="UnsupportedModelError: hookstore cannot record a compiled model under compiled_autograd"),
        warnings.catch_warnings(),
        contextlib.ExitStack() as stack,
    ):
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        stack.enter_context(recording(model, path))
        if around == "all":
            stack.enter_context(compiled_autograd._enable(torch.compile(backend="aot_eager")))
        loss = compiled_model(torch.ones(3, 4)).sum()
        if around == "backward":
            stack.enter_context(compiled_autograd._enable(torch.compile(backend="aot_eager")))
        loss.backward()


def test_compiled_autograd_of_an_eager_model(path):
    from torch._dynamo import compiled_autograd

    model = small()
    with recording(model, path, kinds=("activation", "gradient")) as recorder, recorder.at(epoch=0, batch=0):
        loss = model(torch.ones(3, 4)).sum()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            loss.backward()
    assert len(rows(path)) == 6


def test_export_bakes_nothing_in(path):
    model = small()
    with recording(model, path) as recorder, recorder.at(epoch=0, batch=0):
        for strict in (True, False):
            program = torch.export.export(model, (torch.ones(3, 4),), strict=strict)
            assert not [node for node in program.graph.nodes if "hookstore" in str(node.target)]
        recorder.flush()
        with hookstore.open(path) as run:
            assert not run.manifest.num_rows
        model(torch.ones(3, 4)).sum().backward()
    assert {key[6] for key in rows(path)} == {0}


def test_a_torch_without_effects_refuses_compiled_models_and_records_others(tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "_LEAST_TORCH", (99, 1))
    model = small()
    with recording(model, tmp_path / "eager") as recorder:
        batches()(model, recorder)
    assert rows(tmp_path / "eager")
    message = f"needs torch 99.1 or newer, and this is {torch.__version__}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        with pytest.raises(Exception, match=message.replace("+", ".")), recording(model, tmp_path / "later"):
            torch.compile(model, backend="aot_eager")(torch.ones(3, 4))
    torch._dynamo.reset()
    model[0].compile(backend="aot_eager")
    with pytest.raises(hookstore.UnsupportedModelError, match="module '0' is compiled: recording compiled models"):
        recording(model, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_the_check_of_a_jit_trace_leaves_no_phantom_records(path):
    model = nn.Sequential(nn.Linear(2, 1))
    with recording(model, path) as recorder, recorder.at(epoch=0, batch=0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(model, torch.ones(3, 2))
        recorder.flush()
        with hookstore.open(path) as run:
            assert not run.manifest.num_rows
        model(torch.ones(3, 2)).sum().backward()
    assert {key[6] for key in rows(path)} == {0}


# Inductor ---------------------------------------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")


@needs_compiler
def test_inductor(tmp_path):
    found = in_both(tmp_path, Discriminating, batches(num=3), backend="inductor", rtol=1e-5, atol=1e-6, layers="*", every=2)
    assert {key[5] for key in found} == {0, 2}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("make", [Checkpointed, Unusual, lambda: Views(edits=True)], ids=["checkpointed", "unusual", "views"])
def test_inductor_with_whatever_there_is(tmp_path, make):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*edited in place")
        in_both(tmp_path, make, batches(size=(2, 3, 4)), backend="inductor", rtol=1e-5, atol=1e-6, layers="*")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_trains_the_same_with_and_without_recording(tmp_path, dtype):
    """Taps can change what is fused: float32 weights come out within 1e-5, bfloat16 ones within 2 %."""

    def train(model):
        call = torch.compile(model, fullgraph=True)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            call(torch.randn(3, 5, 4, generator=generator).to(dtype)).pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    model = small().to(dtype)
    expected = train(copy.deepcopy(model))
    torch._dynamo.reset()
    with recording(model, tmp_path / "run", kinds=("activation", "gradient")):
        found = train(model)
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            gradient, other, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-5 if dtype is torch.float32 else 2e-2
        )
