"""Models under `torch.compile`: the same captures as in eager, no graph break, and nothing lost in silence."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle
import shutil
import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
import torch._dynamo.utils
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstore
from hookstore import compiled

COLUMNS = ("layer", "kind", "leaf", "phase", "epoch", "batch", "call", "backward", "step", "status", "reason")
KINDS = ("activation", "gradient", "input", "parameter")
BACKENDS = ["eager", "aot_eager"]


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
        flat = self.flatten(hidden)
        after = hidden.sum() * 3
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
