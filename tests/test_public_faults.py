"""Faults that people have reported of hooks, loggers and archives, each as a recording that must read back the right value.

A to G group them by kind; the numbers are those of our list of reports, and where the report is public the test names it. Every test goes through a whole
recording, and most vary the case beyond what was reported: faults come in kinds.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import pickle
import threading
import time
import warnings
import weakref

import pytest
import torch
from small import linear
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader

import hookstore

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")

BOTH = ("activation", "gradient")
ALL = (*BOTH, "input", "parameter")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def record(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, **options})


class Call(nn.Module):
    """A module that calls a function."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def got(run, layer, kind, *where, **options):
    return run[layer][kind].tensor(*(where or (0, 0)), **options).tolist()


# A. The stored value changes after the hook, or the hook changes the model ----------------------------------------------

IN_PLACE = {
    "relu": (nn.ReLU(inplace=True), [[3.0, 0.0]]),
    "leaky": (nn.LeakyReLU(0.5, inplace=True), [[3.0, -2.5]]),
    "hardtanh": (nn.Hardtanh(inplace=True), [[1.0, -1.0]]),
    "add": (Call(lambda _, value: value.add_(1)), [[4.0, -4.0]]),
    "zero": (Call(lambda _, value: value.zero_()), [[0.0, 0.0]]),
    "index": (Call(lambda _, value: value.index_fill_(1, torch.tensor([0]), 7.0)), [[7.0, -5.0]]),
    "out": (Call(lambda _, value: torch.neg(value, out=value)), [[-3.0, 5.0]]),
}


@pytest.mark.parametrize("mode", ["train", "no_grad", "inference"])
@pytest.mark.parametrize("edit", IN_PLACE)
def test_a01_an_edit_by_a_later_layer_does_not_reach_what_was_captured(path, edit, mode):
    """thingsvision#44, captum#156."""
    layer, after = IN_PLACE[edit]
    model = nn.Sequential(linear([1.0, 0.0], [0.0, -1.0]), layer, nn.Identity())
    context = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    if mode == "train" and edit == "out":
        context = torch.no_grad  # autograd allows no out=
    with context(), record(model, path, layers="*", kinds=("activation", "input")):
        model(torch.tensor([[3.0, 5.0]]))
    with hookstore.open(path) as run:
        assert got(run, "0", "activation") == [[3.0, -5.0]]
        assert got(run, "1", "input") == [[3.0, -5.0]]
        assert got(run, "1", "activation") == got(run, "2", "input") == got(run, "", "activation") == after
        assert got(run, "", "input") == [[3.0, 5.0]]


def test_a01_a_residual_sum_and_a_static_workspace_do_not_reach_what_was_captured(path):
    workspace = torch.zeros(2)

    def reuse(_, value):
        return torch.mul(value, 2, out=workspace)

    model = Call(
        lambda self, value: self.second(self.first(value)).add_(self.skip(value)), first=Call(reuse), second=Call(reuse), skip=nn.Identity()
    )
    with torch.no_grad(), record(model, path, layers="*") as recorder:
        for batch, value in enumerate(recorder.batches([torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])], epoch=0)):
            assert model(value) is workspace, batch
    with hookstore.open(path) as run:
        assert [got(run, "first", "activation", 0, batch) for batch in range(2)] == [[2.0, 4.0], [10.0, 12.0]]
        assert [got(run, "second", "activation", 0, batch) for batch in range(2)] == [[4.0, 8.0], [20.0, 24.0]]
        assert [got(run, "", "activation", 0, batch) for batch in range(2)] == [[5.0, 10.0], [25.0, 30.0]]


@pytest.mark.parametrize("through", ["argument", "keyword", "list"])
def test_a02_inputs_are_those_before_the_module_edits_them(path, through):
    """pytorch#95617."""

    def edit(_, first=None, *, given=None):
        value = first if first is not None else given
        return torch.relu_(value[0] if isinstance(value, list) else value)

    model = Call(edit)
    value = torch.tensor([1.5, -4.5])
    with record(model, path, layers="", kinds=("activation", "input")):
        returned = model(value) if through == "argument" else model(given=value) if through == "keyword" else model([value])
    assert returned is value
    with hookstore.open(path) as run:
        (leaf,) = run[""].input.leaves
        assert leaf == {"argument": "", "keyword": "given", "list": "0"}[through]
        assert got(run, "", "input", leaf=leaf) == [1.5, -4.5]
        assert got(run, "", "activation") == [1.5, 0.0]


def test_a05_a_parameter_that_is_returned_is_stored_as_it_was(path):
    """pytorch#144657."""
    model = Call(lambda self: self.weight)
    model.weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with record(model, path, layers="", kinds=ALL):
        for _ in range(3):
            optimizer.zero_grad()
            model().sum().backward()
            optimizer.step()
    with hookstore.open(path) as run:
        for kind in ("activation", "parameter"):
            assert [got(run, "", kind, 0, batch) for batch in range(3)] == [[1.0], [0.75], [0.5]]


def test_a05_a_buffer_is_stored_as_it_was_when_the_layer_ran(path):
    def count(self, value):
        self.total += value
        return self.total

    model = Call(count)
    model.register_buffer("total", torch.zeros(1))
    with record(model, path, layers=""):
        for value in (1.0, 2.0, 3.0):
            assert model(torch.tensor([value])) is model.total
    with hookstore.open(path) as run:
        assert [got(run, "", "activation", 0, batch) for batch in range(3)] == [[1.0], [3.0], [6.0]]


@pytest.mark.parametrize("layers", ["*", "2", ""])
def test_a07_the_model_is_left_alone(path, layers):
    """pytorch#61446: identity, loss, gradients and the stream of random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Identity(), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    inputs = torch.arange(8.0).view(2, 4) / 8

    def train(trained):
        torch.manual_seed(1)
        loss = trained(inputs).sum()
        loss.backward()
        return [loss, *(parameter.grad for parameter in trained.parameters()), torch.rand(1)]

    plain = train(twin)
    with record(model, path, layers=layers, kinds=ALL) as recorder, recorder.at(epoch=0, batch=0):
        watched = train(model)
        value = torch.ones(1, requires_grad=True) * 1
        assert model[2](value) is value
        assert type(value.grad_fn).__name__ == "MulBackward0"
    for ours, theirs in zip(watched, plain, strict=True):
        assert torch.equal(ours, theirs)


def test_a08_hooks_replace_nothing(path):
    """Any value that a forward hook returns would take the output's place; so would one of a tensor hook."""
    model = nn.Sequential(linear([3.0]), linear([3.0]))
    with record(model, path, layers="*", kinds=ALL):
        model(torch.ones(1, 1)).sum().backward()
        for module in model.modules():
            hooks = [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]
            assert len(hooks) >= 2
        assert model[0].weight.grad.item() == 3.0
        assert model[1].weight.grad.item() == 3.0
    with hookstore.open(path) as run:
        assert got(run, "0", "gradient") == [[3.0]]
        assert got(run, "", "activation") == [[9.0]]


# B. Gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relu", [nn.ReLU(inplace=True), nn.ReLU(), nn.Threshold(0, 0, inplace=True), nn.ReLU6(inplace=True)])
def test_b01_gradients_around_a_layer_in_place(path, relu):
    """pytorch#61519, vision#4164 and many more."""
    model = nn.Sequential(linear([1.0, 0.0], [0.0, 1.0]), relu.eval())
    with record(model, path, layers="*", kinds=BOTH):
        (model(torch.tensor([[2.0, -3.0]])) * torch.tensor([10.0, 20.0])).sum().backward()
    with hookstore.open(path) as run:
        assert got(run, "0", "gradient") == [[10.0, 0.0]]
        assert got(run, "1", "gradient") == [[10.0, 20.0]]
        assert got(run, "0", "activation") == [[2.0, -3.0]]


def test_b02_a_first_layer_without_gradient_of_its_input(path):
    """pytorch#56380, #117925: nothing of ours may warn at each step."""
    model = nn.Sequential(linear([1.0, 1.0]))
    with record(model, path, layers="*", kinds=ALL):
        for _ in range(3):
            model.zero_grad()
            (3 * model(torch.tensor([[5.0, 7.0]]))).sum().backward()
    assert model[0].weight.grad.tolist() == [[15.0, 21.0]]
    with hookstore.open(path) as run:
        assert [got(run, "0", "gradient", 0, batch) for batch in range(3)] == [[[3.0]]] * 3


@pytest.mark.parametrize("how", ["requires_grad", "no_grad_around", "detached"])
def test_b03_a_frozen_trunk_has_activations_and_no_gradients(path, how):
    """pytorch PR#151785."""
    trunk, head = linear([2.0]), linear([2.0])
    if how == "requires_grad":
        trunk.weight.requires_grad_(False)

    def forward(self, value):
        if how == "no_grad_around":
            with torch.no_grad():
                value = self.trunk(value)
        else:
            value = self.trunk(value)
        return self.head(value.detach() if how == "detached" else value)

    model = Call(forward, trunk=trunk, head=head)
    with record(model, path, layers=["trunk", "head"], kinds=BOTH):
        model(torch.tensor([[3.0]])).backward()
    with hookstore.open(path) as run:
        assert (got(run, "trunk", "activation"), got(run, "head", "activation")) == ([[6.0]], [[12.0]])
        assert got(run, "head", "gradient") == [[1.0]]
        with pytest.raises(hookstore.MissingCaptureError):
            run["trunk"].gradient[0, 0]


def test_b04_gradients_of_values_inside_dicts_and_lists(path):
    """pytorch#87540."""

    def forward(self, value):
        doubled = self.layer(value)
        return {"a": doubled, "b": [doubled * 10, None]}

    model = Call(forward, layer=linear([2.0]))
    with record(model, path, layers="", kinds=BOTH):
        output = model(torch.ones(1, 1, requires_grad=True))
        (output["a"] + 3 * output["b"][0]).sum().backward()
    with hookstore.open(path) as run:
        assert got(run, "", "activation", leaf="a") == [[2.0]]
        assert got(run, "", "activation", leaf="b.0") == [[20.0]]
        assert got(run, "", "gradient", leaf="a") == [[31.0]]
        assert got(run, "", "gradient", leaf="b.0") == [[3.0]]
        assert run[""].activation.leaves[:2] == ["a", "b.0"]


@pytest.mark.parametrize("how", ["keywords", "mixed", "default"])
def test_b05_keyword_inputs(path, how):
    """pytorch#35643, #156695."""
    model = Call(lambda _, x=None, scale=None: x * (scale if scale is not None else 5.0))
    x, scale = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    with record(model, path, layers="", kinds=("activation", "input")):
        output = model(x=x, scale=scale) if how == "keywords" else model(x, scale=scale) if how == "mixed" else model(x=x)
        output.backward()
    assert x.grad.item() == 5.0
    with hookstore.open(path) as run:
        expected = {"keywords": {"x": [3.0], "scale": [5.0]}, "mixed": {"0": [3.0], "scale": [5.0]}, "default": {"x": [3.0]}}[how]
        assert {leaf: got(run, "", "input", leaf=leaf) for leaf in run[""].input.leaves} == expected
        assert got(run, "", "activation") == [15.0]


def test_b07_a_loss_of_an_inner_tensor_bypasses_the_output(path):
    """shap#3966, pytorch#57157."""

    def forward(self, value):
        self.hidden = self.layer(value)
        return self.hidden * 100

    model = Call(forward, layer=linear([2.0]))
    inputs = torch.ones(1, 1, requires_grad=True)
    with record(model, path, layers="*", kinds=BOTH):
        model(inputs)
        model.hidden.sum().backward()
    assert inputs.grad.item() == 2.0
    with hookstore.open(path) as run:
        assert got(run, "", "activation") == [[200.0]]
        assert got(run, "layer", "gradient") == [[1.0]]
        with pytest.raises(hookstore.MissingCaptureError):
            run[""].gradient[0, 0]


@pytest.mark.parametrize("edit", ["mul", "index", "copy", "view", "detached"])
def test_b08_activation_and_gradient_are_of_the_same_version(path, edit):
    """pytorch PR#79767: what was stored is the value before the edit, and so is its gradient."""
    model = linear([1.0], [1.0])
    with record(model, path, layers="", kinds=BOTH):
        output = model(torch.ones(1, 1))
        if edit == "mul":
            output.mul_(2)
        elif edit == "index":
            output[:, 0] = 9
        elif edit == "copy":
            output.copy_(torch.ones(1, 2))
        elif edit == "view":
            output.view(2)[1:].mul_(3)
        else:
            output.detach().mul_(1)  # shares memory, changes no value
        (output * torch.tensor([5.0, 7.0])).sum().backward()
    expected = {"mul": [[10.0, 14.0]], "index": [[0.0, 7.0]], "copy": [[0.0, 0.0]], "view": [[5.0, 21.0]], "detached": [[5.0, 7.0]]}[edit]
    with hookstore.open(path) as run:
        assert got(run, "", "activation") == [[1.0, 1.0]]
        assert got(run, "", "gradient") == expected


def test_b10_micro_batches_have_their_own_gradients_and_one_step(path):
    """wandb#10100, pytorch#81296."""
    model = linear([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record(model, path, layers="", kinds=BOTH) as recorder:
        for batch, factor in enumerate(recorder.batches([1.0, 2.0, 3.0, 4.0], epoch=0)):
            (model(torch.ones(1, 1)) * factor).sum().backward()
            if batch == 1:
                assert model.weight.grad.item() == 3.0
            if batch % 2:
                optimizer.step()
                optimizer.zero_grad()
    with hookstore.open(path) as run:
        assert [got(run, "", "gradient", 0, batch) for batch in range(4)] == [[[1.0]], [[2.0]], [[3.0]], [[4.0]]]
        assert [run[""].gradient.row(0, batch)["step"] for batch in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_b11_a_gan_with_three_backwards(path, order):
    """wandb#1639: each gradient with the call that it belongs to, whatever the order of backwards."""
    model = nn.ModuleDict({"generator": linear([2.0]), "discriminator": linear([3.0])})
    noise, real = torch.ones(1, 1), torch.full((1, 1), 10.0)
    with record(model, path, kinds=BOTH) as recorder, recorder.at(epoch=0, batch=0):
        fake = model["generator"](noise)
        outputs = [model["discriminator"](real), model["discriminator"](fake.detach()), model["discriminator"](fake)]
        losses = [outputs[0].sum(), -outputs[1].sum(), 7 * outputs[2].sum()]
        for loss in losses if order == "forward" else losses[::-1]:
            loss.backward()
    with hookstore.open(path) as run:
        assert [got(run, "discriminator", "activation", 0, 0, call) for call in range(3)] == [[[30.0]], [[6.0]], [[6.0]]]
        assert [got(run, "discriminator", "gradient", 0, 0, call) for call in range(3)] == [[[1.0]], [[-1.0]], [[7.0]]]
        assert got(run, "generator", "activation") == [[2.0]]
        assert got(run, "generator", "gradient") == [[21.0]]
        assert len(run["generator"].gradient) == 1


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_b13_gradients_that_carry_a_graph_are_detached(path, how):
    """pytorch#82528, pytorch-grad-cam#88."""
    model = linear([3.0])
    inputs = torch.ones(1, 1, requires_grad=True)
    markers = []
    with record(model, path, layers="", kinds=BOTH) as recorder:
        for _ in recorder.batches(range(3), epoch=0):
            loss = model(inputs).pow(2).sum()
            if how == "backward":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of the cycle that this makes for itself
                    loss.backward(create_graph=True)
                assert inputs.grad.item() == 18.0
                inputs.grad = model.weight.grad = None
            else:
                (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
                assert gradient.requires_grad
                gradient.grad_fn.metadata["marker"] = marker = Marker()
                markers.append(weakref.ref(marker))
                del gradient, marker
            del loss
        gc.collect()
        assert not any(marker() for marker in markers)
    with hookstore.open(path) as run:
        assert [got(run, "", "gradient", 0, batch) for batch in range(3)] == [[[6.0]]] * 3


class Marker:
    """Something to see a graph freed by."""


def test_b14_a_sparse_gradient_of_a_weight_does_not_stop_training(path):
    """wandb#305."""
    model = nn.Embedding(4, 2, sparse=True)
    with record(model, path, layers="", kinds=ALL):
        (model(torch.tensor([1, 3, 1])) * torch.tensor([1.0, 10.0])).sum().backward()
    assert model.weight.grad.to_dense().tolist() == [[0.0, 0.0], [2.0, 20.0], [0.0, 0.0], [1.0, 10.0]]
    with hookstore.open(path) as run:
        assert got(run, "", "gradient") == [[1.0, 10.0]] * 3
        assert got(run, "", "input") == [1, 3, 1]


@pytest.mark.parametrize("reduce", ["sum", "mean", "row", "broadcast"])
def test_b17_a_gradient_with_strides_of_zero_is_stored_whole(path, reduce):
    """pytorch#143847."""
    model = Call(lambda _, value: value * 1)
    with record(model, path, layers="", kinds="gradient"):
        output = model(torch.zeros(2, 3, requires_grad=True))
        loss = {
            "sum": output.sum,
            "mean": output.mean,
            "row": lambda: output.sum(1)[0],
            "broadcast": (output + torch.zeros(5, 2, 3)).sum,
        }
        loss[reduce]().backward()
    expected = {"sum": [[1.0] * 3] * 2, "mean": [[1 / 6] * 3] * 2, "row": [[1.0] * 3, [0.0] * 3], "broadcast": [[5.0] * 3] * 2}[reduce]
    with hookstore.open(path) as run:
        assert got(run, "", "gradient") == torch.tensor(expected).tolist()
        assert run[""].gradient.row(0, 0)["nbytes"] == 24


@pytest.mark.parametrize("used", [0, 1])
def test_b19_another_tools_full_hook_and_an_unused_output(path, used):
    """A tensor hook is then called with None; that is no gradient, and no error."""
    model = Call(lambda _, value: (value * 2, value * 3))
    handle = model.register_full_backward_hook(lambda *_: None)
    inputs = torch.ones(1, requires_grad=True)
    with record(model, path, layers="", kinds=BOTH):
        (5 * model(inputs)[used]).backward()
    handle.remove()
    assert inputs.grad.item() == (10.0, 15.0)[used]
    with hookstore.open(path) as run:
        assert got(run, "", "gradient", leaf=str(used)) == [5.0]
        with pytest.raises(hookstore.MissingCaptureError):
            run[""].gradient.get(0, 0, leaf=str(1 - used))


# C. Hooks that do not fire, fire twice, or survive where they should not ---------------------------------------------------


def test_c02_what_no_module_computes_is_in_the_output_of_the_one_around_it(path):
    """transformers PR#16874: F.relu has no module."""
    model = Call(lambda self, value: F.relu(self.fc(value)), fc=linear([1.0], [-1.0]))
    with record(model, path, layers="*"):
        model(torch.tensor([[4.0]]))
    with hookstore.open(path) as run:
        assert run.layers == ["", "fc"]
        assert got(run, "fc", "activation") == [[4.0, -4.0]]
        assert got(run, "", "activation") == [[4.0, 0.0]]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict])
def test_c03_a_selection_of_containers_only_is_refused(path, container):
    """slimmable_networks#59, torchdistill#139."""
    blocks = {
        nn.ModuleList: lambda: nn.ModuleList([nn.Identity(), nn.Identity()]),
        nn.ModuleDict: lambda: nn.ModuleDict({"0": nn.Identity(), "1": nn.Identity()}),
        nn.ParameterList: lambda: nn.ParameterList([torch.ones(1)]),
        nn.ParameterDict: lambda: nn.ParameterDict({"0": torch.ones(1)}),
    }[container]()
    model = Call(lambda self, value: self.rest(value), blocks=blocks, rest=nn.Identity())
    with pytest.raises(hookstore.SelectionError, match="'blocks'.*never called"):
        record(model, path, layers="blocks")
    assert not path.exists()
    if container in (nn.ModuleList, nn.ModuleDict):
        model = Call(lambda self, value: self.blocks["1" if container is nn.ModuleDict else 1](value), blocks=blocks)
        with pytest.warns(hookstore.CaptureWarning, match=r"blocks\.0"), record(model, path, layers="blocks*"):
            model(torch.ones(1))
        with hookstore.open(path) as run:
            assert got(run, "blocks.1", "activation") == [1.0]
            assert "blocks" not in run.layers


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("how", ["reentrant", "not", "sequential", "sequential_reentrant"])
def test_c08_a_recomputed_layer_is_recorded_once(path, how, layers):
    """pytorch#143573, #81296."""
    block = nn.Sequential(linear([2.0]), nn.Tanh(), *(nn.Identity() for _ in range(layers - 2)))
    is_reentrant = "reentrant" in how

    def forward(self, value):
        if how.startswith("sequential"):
            return checkpoint_sequential(self.block, 2, value, use_reentrant=is_reentrant)
        return checkpoint(self.block, value, use_reentrant=is_reentrant)

    model = Call(forward, block=block)
    with record(model, path, layers="block.*", kinds=("activation", "input")):
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert round(block[0].weight.grad.item(), 6) == round(1 - torch.tanh(torch.tensor(2.0)).item() ** 2, 6)
    with hookstore.open(path) as run:
        assert got(run, "block.0", "activation") == [[2.0]]
        assert got(run, "block.1", "activation") == [[torch.tanh(torch.tensor(2.0)).item()]]
        assert got(run, "block.1", "input") == [[2.0]]
        assert run.manifest.num_rows == 2 * layers
        assert set(run.manifest["call"].to_pylist()) == {0}


@pytest.mark.parametrize("kind", ["linear", "inplace", "sequential"])
def test_c10_a_module_called_again_and_again(path, kind):
    """tangermeme#54, torch-scan#24, CLIP#239."""
    layer = {"linear": linear([2.0]), "inplace": Call(lambda _, value: value.mul_(2)), "sequential": nn.Sequential(linear([2.0]))}[kind]
    model = Call(lambda self, value: self.layer(self.layer(self.layer(value))), layer=layer)
    with record(model, path, layers="layer", kinds=(*BOTH, "input")):
        model(torch.ones(1, 1, requires_grad=True) * 1).sum().backward()
    with hookstore.open(path) as run:
        assert [got(run, "layer", "activation", 0, 0, call) for call in range(3)] == [[[2.0]], [[4.0]], [[8.0]]]
        assert [got(run, "layer", "input", 0, 0, call) for call in range(3)] == [[[1.0]], [[2.0]], [[4.0]]]
        assert [got(run, "layer", "gradient", 0, 0, call) for call in range(3)] == [[[4.0]], [[2.0]], [[1.0]]]
    if kind == "linear":
        assert layer.weight.grad.item() == 12.0


def test_c11_one_module_under_two_names_is_recorded_once_a_call(path):
    """pytorch-OpCounter#142."""
    shared = nn.ReLU()
    model = Call(
        lambda self, value: self.b(self.a(value) - 5), a=nn.Sequential(nn.Identity(), shared), b=nn.Sequential(nn.Identity(), shared)
    )
    with record(model, path):
        model(torch.tensor([7.0]))
    with hookstore.open(path) as run:
        assert run.layers == ["a.0", "a.1", "b.0"]
        for name in ("a.1", "b.1"):
            assert [got(run, name, "activation", 0, 0, call) for call in range(2)] == [[7.0], [2.0]]
            assert len(run[name].activation) == 2


@pytest.mark.parametrize("where", ["middle", "root", "first"])
def test_c13_a_forward_that_raises_leaves_no_trace_in_the_other_batches(path, where):
    """cybertronai/autograd-lib#5, peft PR#2761."""

    def check(_, value):
        if value.item() < 0:
            raise ArithmeticError("negative")
        return value

    steps = {"first": [Call(check), nn.Identity()], "middle": [nn.Identity(), Call(check), nn.Identity()], "root": [nn.Identity()]}[where]
    model = Call(lambda self, value: check(self, self.steps(value)), steps=nn.Sequential(*steps))
    with warnings.catch_warnings(), record(model, path, layers="steps.*", kinds=("activation", "input")) as recorder:
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        for value in recorder.batches([1.0, -1.0, 2.0], epoch=0):
            try:
                model(torch.tensor([value]))
            except ArithmeticError:
                assert value < 0
            for module in model.steps:
                assert len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
    with hookstore.open(path) as run:
        last = f"steps.{len(steps) - 1}"
        captured = [row["batch"] for row in run[last].activation.rows.to_pylist() if row["status"] == "ok"]
        assert captured == ([0, 1, 2] if where == "root" else [0, 2])
        assert got(run, last, "activation", 0, 0) == [1.0]
        assert got(run, last, "activation", 0, 2) == [2.0]
        assert {row["call"] for row in run.manifest.to_pylist()} == {0}


@pytest.mark.parametrize("how", ["save", "pickle", "deepcopy", "state"])
@pytest.mark.parametrize("kinds", [("activation",), ALL])
def test_c15_a_model_that_is_recorded_can_be_saved_and_copied(path, how, kinds):
    """neptune-client#1415, sagemaker-debugger PR#266, pytorch#1148 and more."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    inputs = torch.ones(1, 2)
    with record(model, path, layers="*", kinds=kinds) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            model(inputs).sum().backward()
            file = io.BytesIO()
            if how == "save":
                torch.save(model, file)
                copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            elif how == "pickle":
                copied = pickle.loads(pickle.dumps(model))
            elif how == "deepcopy":
                copied = copy.deepcopy(model)
            else:
                torch.save(model.state_dict(), file)
                copied = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
                copied.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            assert b"hookstore" not in file.getvalue()
            assert torch.equal(copied(inputs), model.eval()(inputs))
            model.train()
            copied(inputs).sum().backward()
    with hookstore.open(path) as run:
        rows = run.manifest.to_pylist()
        assert len(rows) == len({tuple(row[name] for name in ("layer", "kind", "batch", "leaf", "call", "backward")) for row in rows})
        assert {row["call"] for row in rows} == {0}
        assert {row["batch"] for row in rows} == {0, 1}


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functional_call"])
def test_c17_function_transforms_are_refused_by_a_row_or_right(path, transform):
    """functorch#488, #638, #1124: never one sample's value taken for the batch."""
    model = nn.Sequential(linear([1.0, 10.0]))
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with warnings.catch_warnings(record=True) as caught, record(model, path, kinds=("activation", "input")):
        warnings.simplefilter("always", hookstore.CaptureWarning)
        if transform == "vmap":
            assert torch.vmap(model)(batch).tolist() == [[21.0], [43.0], [65.0]]
        elif transform == "grad":
            assert torch.func.grad(lambda value: model(value).sum())(batch).tolist() == [[1.0, 10.0]] * 3
        elif transform == "jvp":
            value, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
            assert (value.tolist(), tangent.tolist()) == ([[21.0], [43.0], [65.0]], [[11.0]] * 3)
        else:
            torch.func.functional_call(model, {"0.weight": torch.tensor([[2.0, 0.0]])}, (batch,))
    with hookstore.open(path) as run:
        if transform == "functional_call":
            assert got(run, "0", "activation") == [[2.0], [6.0], [10.0]]
        else:
            with pytest.raises(hookstore.MissingCaptureError, match="functorch"):
                run["0"].activation[0, 0]
            assert any("functorch" in str(one.message) for one in caught)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_c20_no_gradients_are_asked_for_where_there_are_none(path, context):
    """pytorch#59901."""
    model = linear([2.0])
    with record(model, path, layers="", kinds=BOTH), context():
        output = model(torch.ones(1, 1, requires_grad=True))
        assert not output.requires_grad
        assert output._backward_hooks is None
    with hookstore.open(path) as run:
        assert got(run, "", "activation") == [[2.0]]
        assert len(run[""].gradient) == 0


@pytest.mark.parametrize("how", ["script", "trace", "child"])
def test_c21_models_that_hooks_cannot_follow_are_refused_by_name(path, how):
    """pytorch#34329, #86818, #53421, #56935."""
    plain = nn.Linear(1, 1)
    compiled = torch.jit.trace(plain, torch.ones(1, 1)) if how == "trace" else torch.jit.script(plain)
    model = nn.Sequential(compiled) if how == "child" else compiled
    with pytest.raises(hookstore.UnsupportedModelError, match="traced and scripted modules run no Python hooks"):
        record(model, path, layers="*")
    assert not path.exists()


@pytest.mark.parametrize("when", ["open", "closed"])
def test_c23_recording_does_not_keep_the_model(path, when):
    """pytorch#46386, zennit#13."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Flatten(), nn.ReLU(inplace=True))
    gone = [weakref.ref(module) for module in model.modules()]
    recorder = record(model, path, layers="*", kinds=ALL)
    model(torch.ones(1, 1)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        if when == "closed":
            recorder.close()
        del model
        assert not [module() for module in gone if module() is not None]
    finally:
        gc.enable()
        recorder.close()


@pytest.mark.parametrize("with_backward", [True, False])
def test_c24_no_graph_and_no_tensor_stays(path, with_backward):
    """gromo#135, pytorch-grad-cam#88, opacus#176."""

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            context.marker = Marker()
            graphs.append(weakref.ref(context.marker))
            return value * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 2

    graphs, tensors = [], []
    model = nn.Sequential(Call(lambda _, value: Doubles.apply(value)), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)))
    with record(model, path, layers="*", kinds=ALL) as recorder:
        for _ in recorder.batches(range(5), epoch=0):
            output = model(torch.ones(1, 4, requires_grad=True))
            tensors.append(weakref.ref(output))
            if with_backward:
                output.sum().backward()
            del output
        gc.collect()
        assert sum(graph() is not None for graph in graphs) == 0
        assert sum(tensor() is not None for tensor in tensors) == 0


# D. Dtypes, layouts, shapes ---------------------------------------------------------------------------------------------------


ODD_BITS = {
    torch.bfloat16: (torch.int16, [0x3F80, 0xC020 - 65536, 0x4049, 0x7F80, 0x7FC0, 0x0001, -32768, 0x7FC1]),
    torch.float16: (torch.int16, [0x3C00, 0x7C00, 0x7E01, 0x0001, -32768, 0xFE00 - 65536]),
    torch.float32: (torch.int32, [0x7FC00001, 0x7F800001, -(2**31), 1, 0x7F800000]),
    torch.float64: (torch.int64, [0x7FF8000000000001, -(2**63), 1, 0x7FF0000000000001]),
    torch.float8_e4m3fn: (torch.uint8, [56, 192, 126, 127, 128, 1]),
    torch.float8_e5m2: (torch.uint8, [60, 192, 0x7C, 0x7D, 0x7F, 128]),
    torch.float8_e4m3fnuz: (torch.uint8, [64, 128, 1]),
    torch.float8_e5m2fnuz: (torch.uint8, [64, 128, 1]),
    torch.complex64: (torch.int64, [0x7FC00001_80000000 - 0, 1]),
    torch.bool: (torch.uint8, [0, 1, 1]),
    torch.uint16: (torch.int16, [-1, 1]),
    torch.uint64: (torch.int64, [-1, 1]),
}


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", ODD_BITS, ids=str)
def test_d01_every_bit_comes_back(path, dtype, contiguous):
    """pytorch#110285, torchshow#23, zarr-python#2656, #711: dtypes without a NumPy type, payloads of NaN, -0.0 and denormal numbers."""
    carrier, patterns = ODD_BITS[dtype]
    value = torch.tensor(patterns, dtype=carrier).view(dtype)
    if not contiguous:
        value = torch.stack((value, value), 1)[:, 0]
    model = Call(lambda _, given: given)
    with record(model, path, layers="", kinds=("activation", "input")):
        model(value)
    with hookstore.open(path) as run:
        for kind in ("activation", "input"):
            found = run[""][kind].tensor(0, 0)
            assert found.dtype == dtype
            assert found.view(carrier).tolist() == patterns


def test_d02_a_layer_that_changes_its_dtype(path):
    """torchlens#26: autocast in one batch and not in the next."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2))
    with record(model, path, kinds=BOTH) as recorder:
        for dtype in recorder.batches([torch.bfloat16, None, torch.float16, None], epoch=0):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                output = model(torch.ones(1, 2))
            output.float().sum().backward()
            assert model[0].weight.grad.dtype == torch.float32
    with hookstore.open(path) as run:
        for kind in BOTH:
            dtypes = [run["0"][kind].tensor(0, batch).dtype for batch in range(4)]
            assert dtypes == [torch.bfloat16, torch.float32, torch.float16, torch.float32]
        assert [run["0"].activation.row(0, batch)["dtype"] for batch in range(4)] == ["bfloat16", "float32", "float16", "float32"]


def test_d03_lazy_conjugates_and_negatives(path):
    """pytorch#59945."""
    model = Call(lambda _, value: [value.conj(), value.conj().imag, value.mT.conj(), value.real])
    value = torch.tensor([[1 + 2j, 3 - 4j]])
    with record(model, path, layers="", kinds=("activation", "input")):
        model(value)
        model(value.conj())
    with hookstore.open(path) as run:
        assert got(run, "", "activation", leaf="0") == [[1 - 2j, 3 + 4j]]
        assert got(run, "", "activation", leaf="1") == [[-2.0, 4.0]]
        assert got(run, "", "activation", leaf="2") == [[1 - 2j], [3 + 4j]]
        assert got(run, "", "activation", leaf="3") == [[1.0, 3.0]]
        assert got(run, "", "input", 0, 1) == [[1 - 2j, 3 + 4j]]
        assert got(run, "", "activation", 0, 1, leaf="0") == [[1 + 2j, 3 - 4j]]


def test_d05_scalars_and_nothing_at_all_keep_their_shape(path):
    """zarr-python#1976, #1977, #3751, bio2zarr#9."""
    values = [
        torch.zeros(0, 2),
        torch.tensor(1.0),
        torch.zeros(4, 0, dtype=torch.int8),
        torch.zeros(0),
        torch.tensor(True),
        torch.ones(1, 1),
    ]
    model = Call(lambda _, number: values[number])
    with record(model, path, layers="") as recorder:
        for number in recorder.batches(range(len(values)), epoch=0):
            model(number)
    with hookstore.open(path) as run:
        for number, value in enumerate(values):
            array = run[""].activation[0, number]
            assert array.shape == tuple(value.shape)
            found = run[""].activation.tensor(0, number)
            assert (found.dtype, found.tolist()) == (value.dtype, value.tolist())


def test_d05_a_loss_and_a_layer_without_rows(path):
    model = nn.ModuleDict({"layer": nn.Linear(3, 2), "loss": nn.MSELoss()})
    with record(model, path, kinds=BOTH) as recorder, recorder.at(epoch=0, batch=0):
        empty = model["layer"](torch.zeros(0, 3))
        (model["loss"](torch.ones(2, requires_grad=True), torch.zeros(2)) + empty.sum()).backward()
    with hookstore.open(path) as run:
        assert run["layer"].activation[0, 0].shape == (0, 2)
        assert run["layer"].gradient[0, 0].shape == (0, 2)
        assert got(run, "loss", "activation") == 1.0
        assert got(run, "loss", "gradient") == 1.0


def test_d08_shapes_that_change_are_neither_padded_nor_cut(path):
    """VERA#1, Llamascopium#120."""
    model = linear([1.0], [2.0])
    with record(model, path, layers="", kinds=ALL) as recorder:
        batches = [*DataLoader(torch.arange(10.0).view(10, 1), batch_size=4), *(torch.full((3, length, 1), 1.0) for length in (5, 2, 7))]
        for batch in recorder.batches(batches, epoch=0):
            model(batch).sum().backward()
    with hookstore.open(path) as run:
        shapes = [run[""].activation[0, batch].shape for batch in range(6)]
        assert shapes == [(4, 2), (4, 2), (2, 2), (3, 5, 2), (3, 2, 2), (3, 7, 2)]
        assert [run[""].gradient[0, batch].shape for batch in range(6)] == shapes
        assert got(run, "", "activation", 0, 2) == [[8.0, 16.0], [9.0, 18.0]]
        assert got(run, "", "activation", 0, 5) == [[[1.0, 2.0]] * 7] * 3
        assert got(run, "", "input", 0, 1) == [[4.0], [5.0], [6.0], [7.0]]


LAYOUTS = {
    "channels_last": lambda value: value.contiguous(memory_format=torch.channels_last),
    "transposed": lambda value: value.transpose(1, 3),
    "expanded": lambda value: value[:, :1].expand(-1, 5, -1, -1),
    "strided": lambda value: value[:, ::2, 1:, ::3],
    "flipped": lambda value: value.flip(0)[1:],
    "unfolded": lambda value: value.unfold(3, 3, 1),
    "diagonal": lambda value: value.diagonal(0, 2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_d08_layouts_are_stored_by_value(path, layout):
    value = torch.randn(2, 4, 6, 6)
    model = Call(lambda _, given: LAYOUTS[layout](given * 1))
    expected = LAYOUTS[layout](value)
    weights = torch.randn_like(expected)
    reference = value.clone().requires_grad_()
    gradient = weights.clone()
    with record(model, path, layers="", kinds=BOTH):
        for scale in (1.0, 2.0):
            (model(scale * value.requires_grad_()) * weights).sum().backward()
    del reference
    with hookstore.open(path) as run:
        for batch, scale in enumerate((1.0, 2.0)):
            assert torch.equal(run[""].activation.tensor(0, batch), scale * expected)
            assert torch.equal(run[""].gradient.tensor(0, batch), gradient)


@pytest.mark.parametrize("num_dims", [61, 62, 64])
def test_d12_more_dimensions_than_an_array_can_have_are_a_gap(path, num_dims):
    """What was stored with 63 could not be read."""
    model = Call(lambda _, value: value.reshape([1] * (num_dims - 1) + [2]))
    with warnings.catch_warnings(record=True) as caught, record(model, path, layers=""):
        warnings.simplefilter("always", hookstore.CaptureWarning)
        model(torch.ones(2))
    with hookstore.open(path) as run:
        if num_dims <= 61:
            assert run[""].activation[0, 0].shape == (1,) * (num_dims - 1) + (2,)
        else:
            with pytest.raises(hookstore.MissingCaptureError, match=f"it has {num_dims} dimensions"):
                run[""].activation[0, 0]
        assert len(caught) == (num_dims > 61)


@pytest.mark.parametrize("size", [2, 20_000])
@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of grad", "jacrev", "hessian"])
def test_c17_plain_tensors_inside_a_function_transform(path, transform, size):
    """They are what they are: parameters, and inputs that the transform does not follow. The user's call is never broken."""
    model = nn.ModuleDict({"scale": Call(lambda _, value, by: value * by), "weigh": Weighs(size)})
    constant = torch.arange(float(size))

    def function(value):
        return (model["weigh"](model["scale"](constant, value)) ** 2).sum()

    transforms = {
        "grad": torch.func.grad(function),
        "vmap": lambda value: torch.func.vmap(function)(value.repeat(3)),
        "vmap of grad": lambda value: torch.func.vmap(torch.func.grad(function))(value.repeat(3)),
        "jacrev": torch.func.jacrev(function),
        "hessian": torch.func.hessian(function),
    }
    expected = transforms[transform](torch.tensor(2.0))
    with warnings.catch_warnings(), record(model, path, kinds=ALL, buffer_bytes=8 << 20) as recorder:
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        for batch in recorder.batches(range(3), epoch=0):
            if batch == 0:  # so that the arrays are known when the transform comes
                function(torch.tensor(2.0))
            else:
                assert torch.equal(transforms[transform](torch.tensor(2.0)), expected)
    with hookstore.open(path) as run:
        for batch in range(3):
            assert torch.equal(run["scale"].input.tensor(0, batch, leaf="0"), constant)
            assert torch.equal(run["weigh"].parameter.tensor(0, batch), model["weigh"].weight.detach())
        assert {row["status"] for row in run["weigh"].activation.rows.to_pylist() if row["batch"]} == {"skipped"}


class Weighs(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, size))

    def forward(self, value):
        return value * self.weight


def test_d11_a_model_on_the_meta_device_is_refused_by_name(path):
    with pytest.raises(hookstore.UnsupportedModelError, match="'meta'"):
        record(nn.Sequential(nn.Linear(1, 1, device="meta"), nn.ReLU()), path)
    assert not path.exists()


def test_d11_tensors_without_values_are_skipped_with_a_reason(path):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    with pytest.warns(hookstore.CaptureWarning, match="meta"), record(model, path, kinds=(*BOTH, "input")) as recorder:
        with recorder.at(epoch=0, batch=0):
            model(torch.ones(1, 1, device="meta", requires_grad=True)).sum().backward()
        with recorder.at(epoch=0, batch=1):
            model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        for layer in ("0", "1"):
            for kind in (*BOTH, "input"):
                with pytest.raises(hookstore.MissingCaptureError, match="skipped: .*meta"):
                    run[layer][kind][0, 0]
            assert got(run, layer, "activation", 0, 1) == [[1.0]]


def test_d11_a_model_under_fake_tensors_is_skipped_and_runs(path):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Sequential(linear([2.0]))
    with warnings.catch_warnings(record=True) as caught, record(model, path) as recorder:
        warnings.simplefilter("always", hookstore.CaptureWarning)
        with recorder.at(epoch=0, batch=0), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            output = model(mode.from_tensor(torch.ones(1, 1)))
            assert output.shape == (1, 1)
        with recorder.at(epoch=0, batch=1):
            model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert got(run, "0", "activation", 0, 1) == [[2.0]]
        with pytest.raises(hookstore.MissingCaptureError):
            run["0"].activation[0, 0]
        assert run.info().statuses.get("skipped") == 1
    assert len(caught) == 1


def test_d11_an_export_is_not_recorded_and_succeeds(path):
    model = nn.Sequential(nn.Linear(1, 1))
    with record(model, path, layers="*", kinds=ALL) as recorder, recorder.at(epoch=0, batch=0):
        program = torch.export.export(model, (torch.ones(1, 1),))
        assert "hookstore" not in program.graph_module.code
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert {row["call"] for row in run.manifest.to_pylist()} == {0}
    assert torch.equal(program.module()(torch.ones(1, 1)), model(torch.ones(1, 1)))


# E. The pipeline ---------------------------------------------------------------------------------------------------------------


def test_e01_staging_memory_is_not_used_again_before_it_is_written(path):
    """Megatron-LM#2288, nvidia-resiliency-ext#376: the smallest buffer, many captures, and one tensor that is refilled."""
    model = Call(lambda _, value: value)
    value = torch.zeros(4000)
    with record(model, path, layers="", buffer_bytes=64 << 10) as recorder:
        for number in recorder.batches(range(100), epoch=0):
            model(value.fill_(number))
    with hookstore.open(path) as run:
        for number in range(100):
            assert set(got(run, "", "activation", 0, number)) == {float(number)}


@pytest.mark.parametrize("thread", ["same", "other"])
def test_e09_an_error_of_the_writer_reaches_the_backward_as_itself(path, monkeypatch, thread):
    """pytorch#112438: from the hook in loss.backward() comes the writer's own exception, with its type and message."""

    def pwrite(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    recorder = record(model, path, kinds="gradient")
    monkeypatch.setattr(os, "pwrite", pwrite)
    seen = []

    def backward(loss):
        try:
            loss.backward()
        except OSError as error:
            seen.append(error)

    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        loss = model(torch.ones(1, 1)).sum()
        if thread == "same":
            backward(loss)
        else:
            worker = threading.Thread(target=backward, args=(loss,))
            worker.start()
            worker.join()
    assert seen[0].errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    recorder.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
