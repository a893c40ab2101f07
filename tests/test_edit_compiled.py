"""Edited gradients in compiled models."""

from __future__ import annotations

import collections
import math
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from small import Does, Open, linear, loss_of, recording, values
from torch import nn
from torch.nn import functional

import hookstore
from hookstore.gradients import clip_gradient, reverse_gradient, scale_gradient


class Middle(nn.Module):
    """Calls a module in its middle."""

    def __init__(self, function, call):
        super().__init__()
        self.first, self.inside, self.call = nn.Linear(3, 3), Does(function), call

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.call(self.inside, hidden, hidden * 2) + hidden.sum()


def use_dict(module, one, two):
    given = {"a": one, "b": [two], "c": 1, "left": two}
    output = module(given)
    return output["a"] * 3 + given["new"] + given["left"] * 7 + (0 if output is given else float("nan"))


def change_dict(given):
    given["new"] = given["a"] * 2 + given["b"][0]
    return given


CALLS = {
    "keywords": (lambda one, *, two: one * two, lambda module, one, two: module(one, two=two)),
    "one twice": (lambda one, two: one * two, lambda module, one, _two: module(one, one)),
    "containers": (
        lambda pair, rest: pair[0] * pair[1] * rest["a"],
        lambda module, one, two: module((one, two), collections.OrderedDict(a=one)),
    ),
    "changed": (change_dict, use_dict),
    "dataclass": (lambda given: given.one * given.two, lambda module, one, two: module(Open(one, two))),
    "passed on": (lambda one, two: (two, one.flatten(0)), lambda module, one, two: sum(part.sum() for part in module(one, two))),
    "three calls": (lambda one: one.tanh(), lambda module, one, two: module(one) + module(module(two))),
    "unused": (lambda one, _two, _scalar: one * 2, lambda module, one, two: module(one, two, 3)),
}
EDITS = {
    "scale": lambda module: [scale_gradient(module, -2.0)],
    "clip": lambda module: [clip_gradient(module, 0.5, scaler=torch.amp.GradScaler("cpu", init_scale=2.0))],
    "both": lambda module: [clip_gradient(module, 0.5), reverse_gradient(module, 3)],
}


@pytest.mark.parametrize(
    ("call", "edit", "backend"),
    [
        *(("keywords", "scale", backend) for backend in ("eager", "aot_eager")),
        *(("one twice", "clip", backend) for backend in ("eager", "aot_eager")),
        *(("containers", "both", "aot_eager"), ("changed", "scale", "aot_eager"), ("dataclass", "clip", "aot_eager")),
        *(("passed on", "both", "aot_eager"), ("three calls", "clip", "aot_eager"), ("unused", "clip", "aot_eager")),
        *[
            pytest.param(call, edit, backend, marks=pytest.mark.slow)
            for call in CALLS
            for edit in EDITS
            for backend in ("eager", "aot_eager")
        ],
    ],
)
@pytest.mark.usefixtures("new_compiler")
def test_a_compiled_model_has_the_gradients_of_the_eager_one(call, edit, backend):
    whole, inputs = Middle(*CALLS[call]), torch.randn(2, 3)
    edits = EDITS[edit](whole.inside)
    compiled = torch.compile(whole, backend=backend, fullgraph=True)
    expected = grads_of(whole.first, whole, inputs)
    found = grads_of(whole.first, compiled, inputs)
    for one in edits:
        one.remove()
    plain = grads_of(whole.first, whole, inputs)
    assert all(torch.allclose(one, other, rtol=1e-4) for one, other in zip(found, expected, strict=True))
    assert not any(torch.allclose(one, other, rtol=0.01) for one, other in zip(found, plain, strict=True))


def grads_of(part, module, inputs):
    part.zero_grad()
    loss_of(module(inputs)).backward()
    return [parameter.grad.clone() for parameter in part.parameters()]


@pytest.mark.usefixtures("new_compiler")
def test_edits_made_and_ended_after_compiling_take_effect():
    module = linear([2.0])
    compiled = torch.compile(nn.Sequential(module), backend="eager", fullgraph=True)

    def gradient():
        tensor = torch.ones(1, 1, requires_grad=True)
        compiled(tensor).backward()
        return tensor.grad.item()

    assert gradient() == 2
    edit = reverse_gradient(module)
    assert gradient() == -2
    with scale_gradient(module, 3):
        assert gradient() == -6
    assert gradient() == -2
    edit.remove()
    assert gradient() == 2


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.usefixtures("new_compiler")
def test_graphs_of_a_twin_do_not_serve_an_edited_module(which):
    blocks = [nn.Sequential(linear([2.0])) for _ in range(2)]
    edit = scale_gradient(blocks[which][0], -3.0)
    found = []
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
        tensor = torch.ones(1, 1, requires_grad=True)
        block(tensor).backward()
        found.append(tensor.grad.item())
    edit.remove()
    assert found == ([-6, 2] if which == 0 else [2, -6])


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1, 0)], ids=["edited first", "twin first"])
@pytest.mark.usefixtures("new_compiler")
def test_graphs_of_a_twin_do_not_serve_an_edited_module_on_another_thread(order):
    """Torch has settings of the compiler for each thread."""
    blocks = [nn.Sequential(linear([2.0])) for _ in range(2)]

    def gradient(which):
        tensor = torch.ones(1, 1, requires_grad=True)
        blocks[which](tensor).backward()
        return tensor.grad.item()

    with ThreadPoolExecutor(1) as other, scale_gradient(blocks[0][0], -3.0):
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
        assert [other.submit(gradient, which).result() for which in order] == [-6 if which == 0 else 2 for which in order]


@pytest.mark.parametrize("is_edited_first", [False, True])
@pytest.mark.usefixtures("new_compiler")
def test_the_setting_of_the_compiler_is_shared_with_a_recording(tmp_path, is_edited_first):
    module = linear([2.0])
    for ends_edit_first in (False, True):
        edit = scale_gradient(module, 2.0) if is_edited_first else None
        recorder = recording(nn.Sequential(module), tmp_path / str(ends_edit_first))
        edit = edit or scale_gradient(module, 2.0)
        assert not torch._dynamo.config.skip_nnmodule_hook_guards
        (edit.remove if ends_edit_first else recorder.close)()
        assert not torch._dynamo.config.skip_nnmodule_hook_guards
        (recorder.close if ends_edit_first else edit.remove)()
        assert torch._dynamo.config.skip_nnmodule_hook_guards


@pytest.mark.usefixtures("new_compiler")
def test_a_number_that_changes_is_compiled_twice_at_most():
    schedule = {"alpha": 0.0}
    module = linear([2.0])
    edit = reverse_gradient(module, lambda: schedule["alpha"])
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for step in range(1, 6):
        schedule["alpha"] = step / 8
        tensor = torch.ones(1, 1, requires_grad=True)
        compiled(tensor).backward()
        assert tensor.grad.item() == -2 * step / 8
    edit.remove()
    assert counter.frame_count == 2


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf, True])
@pytest.mark.usefixtures("new_compiler")
def test_a_number_that_cannot_be_used_is_refused_in_a_compiled_model(number):
    module = linear([2.0])
    with clip_gradient(module, lambda: number), pytest.raises(Exception, match="max_norm: the callable returned no finite number"):
        torch.compile(nn.Sequential(module), backend="eager", fullgraph=True)(torch.ones(1, 1, requires_grad=True))


@pytest.mark.usefixtures("new_compiler")
def test_tuples_in_tuples_are_traced():
    module = Does(lambda tensor, cache: tensor * cache[0][0] + cache[1][1])
    edit = scale_gradient(module, 0.5)

    def step(leaf):
        return module(leaf * 1, ((leaf * 2, leaf * 3), (leaf * 4, torch.ones(3)))).sum()

    found = []
    for function in (step, torch.compile(step, backend="eager", fullgraph=True)):
        leaf = torch.ones(3, requires_grad=True)
        function(leaf).backward()
        found.append(leaf.grad.tolist())
    edit.remove()
    assert found == [[2.0] * 3] * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("new_compiler")
def test_edits_in_place_are_refused_in_compiled_models(backend):
    for function, call in (
        (functional.relu_, lambda module, one, _two: module(one)),
        (lambda one: one, lambda module, one, _two: module(one).add_(1)),
        (lambda one: one, lambda module, one, _two: (module(one), one.add_(1))[0]),
    ):
        whole = Middle(function, call)
        with scale_gradient(whole.inside, 2.0), pytest.raises(Exception, match="is a view and (is|its base)"):
            torch.compile(whole, backend=backend, fullgraph=True)(torch.randn(2, 3))


@pytest.mark.usefixtures("new_compiler")
def test_a_module_with_a_graph_break_is_edited():
    def broken(one):
        torch._dynamo.graph_break()
        return functional.relu_(one) * 3

    whole, inputs = Middle(broken, lambda module, one, _two: module(one * 1) + one), torch.randn(2, 3)
    edit = scale_gradient(whole.inside, -2.0)
    expected = grads_of(whole.first, whole, inputs)
    found = grads_of(whole.first, torch.compile(whole, backend="eager"), inputs)
    edit.remove()
    assert all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_edited_first", [False, True])
@pytest.mark.usefixtures("new_compiler")
def test_a_recording_of_a_compiled_model_shows_gradients_after_the_edit_where_they_were_edited(tmp_path, is_edited_first):
    module = linear([2.0])
    whole = nn.Sequential(linear([1.0]), module, linear([3.0]))
    edit = scale_gradient(module, -10.0) if is_edited_first else None
    with recording(whole, tmp_path / "run", layers=["0", "1"], kinds=["activation", "gradient", "input"]):
        edit = edit or scale_gradient(module, -10.0)
        torch.compile(whole, backend="aot_eager", fullgraph=True)(torch.ones(1, 1)).sum().backward()
    edit.remove()
    assert whole[0].weight.grad.item() == -60
    with hookstore.open(tmp_path / "run") as run:
        assert values(run["1"].gradient, 0, 0) == [[3.0]]
        assert values(run["0"].gradient, 0, 0) == [[-60.0]]
        assert values(run["1"].input, 0, 0) == values(run["0"].activation, 0, 0) == [[1.0]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
@pytest.mark.usefixtures("new_compiler")
def test_inductor(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    whole, inputs = Middle(*CALLS["three calls"]), torch.randn(2, 3)
    edits = EDITS["both"](whole.inside)
    expected = grads_of(whole.first, whole, inputs)
    found = grads_of(whole.first, torch.compile(whole, fullgraph=True), inputs)
    for one in edits:
        one.remove()
    assert all(torch.allclose(one, other, rtol=1e-4) for one, other in zip(found, expected, strict=True))
