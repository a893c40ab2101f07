"""Live taps: what they keep is what the model computes, with its graph; it serves as a loss, and it is gone with the next forward."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import zoo
from small import linear, recording
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hookstore
from hookstore.clock import Coordinates
from hookstore.format import KINDS
from hookstore.tapping import tap
from hookstore.watch import GradientWatch

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def mlp(*widths, activation=nn.Tanh):
    layers = [layer for before, after in itertools.pairwise(widths) for layer in (nn.Linear(before, after), activation())]
    return nn.Sequential(*layers[:-1])


def hooks_of(model):
    return [hook for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks) for hook in hooks.values()]


# What it is for ------------------------------------------------------------------------------------------------------


def distill(*, weight):
    """Train a student on the features of a frozen teacher, and return how far they are from those, relative to the teacher's, before and after."""
    teacher, student = mlp(4, 8, 8, 3).requires_grad_(requires_grad=False).eval(), mlp(4, 8, 8, 3)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.02)
    inputs = torch.randn(64, 4)
    distances = []
    with tap(teacher, ["0", "2"]) as of_teacher, tap(student, ["0", "2"]) as of_student:
        for _ in range(200):
            with torch.no_grad():
                teacher(inputs)
            output = student(inputs)
            pairs = zip(of_student.values().values(), of_teacher.values().values(), strict=True)
            losses = [mse_loss(ours, theirs) / theirs.var() for ours, theirs in pairs]
            distances.append(max(loss.item() for loss in losses))
            optimizer.zero_grad()
            (weight * sum(losses) + 0 * output.sum()).backward()
            optimizer.step()
    return distances[0], distances[-1]


def test_a_student_comes_to_have_its_teachers_features():
    before, after = distill(weight=1.0)
    assert before > 0.5
    assert after < 0.02


def test_without_the_loss_on_features_it_does_not():
    before, after = distill(weight=0.0)
    assert after == before > 0.5


def test_gradients_of_inputs_make_adversarial_examples():
    torch.manual_seed(1)
    labels = torch.arange(200) % 2
    inputs = torch.randn(200, 8) + (2 * labels[:, None] - 1)
    model = mlp(8, 16, 2, activation=nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    attacked = inputs.clone().requires_grad_()
    with tap(model, "", "input_gradient") as taps:
        cross_entropy(model(attacked), labels).backward()
        direction = taps[""].input_gradient.sign()
    (closed_form,) = torch.autograd.grad(cross_entropy(model(attacked), labels), attacked)
    assert torch.equal(direction, closed_form.sign())
    accuracy = {step: (model(inputs + step * direction).argmax(1) == labels).float().mean().item() for step in (0, 1.5, -1.5)}
    assert accuracy[0] > 0.95
    assert accuracy[1.5] < accuracy[0] - 0.3
    assert accuracy[-1.5] >= accuracy[0]


def test_activation_and_gradient_of_one_step_weigh_maps_as_autograd_does():
    """As Grad-CAM wants them, of a layer whose output is edited in place afterwards."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
    )
    images = torch.randn(2, 1, 8, 8)
    with tap(model, "2", ["activation", "gradient"], clone=True) as taps:
        model(images)[:, 1].sum().backward()
        maps, gradient = taps["2"].activation, taps["2"].gradient
    features = model[:3](images)
    (expected,) = torch.autograd.grad(model[3:](features.clone())[:, 1].sum(), features)
    assert torch.equal(maps, features)
    assert torch.equal(gradient, expected)
    cam = (gradient.mean((2, 3), keepdim=True) * maps).sum(1).relu()
    assert torch.equal(cam, (expected.mean((2, 3), keepdim=True) * features).sum(1).relu())


def test_a_penalty_on_live_gradients_has_gradients_of_its_own():
    """For one node that hands a gradient to an input, for several whose gradients are added up, and for a view that is edited in place."""

    class Twice(nn.Module):
        def forward(self, value):
            return value.sin() * value

    model = nn.Sequential(nn.Linear(3, 3), Twice(), nn.Linear(3, 2), nn.ReLU(inplace=True))
    inputs = torch.randn(4, 5, 3, requires_grad=True)
    with tap(model, ["0", "1", "2"], ["gradient", "input_gradient"]) as taps:
        torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        of_output, share = taps["2"].gradient, taps["1"].input_gradient
        found = torch.autograd.grad(of_output.square().sum() + share.square().sum(), model[0].weight)
    hidden = model[0](inputs)
    last = model[2](model[1](hidden))
    outer, inner = torch.autograd.grad(last.relu().square().sum(), (last, hidden), create_graph=True)
    expected = torch.autograd.grad(outer.square().sum() + inner.square().sum(), model[0].weight)
    assert torch.allclose(found[0], expected[0])
    assert torch.equal(share, inner)


def test_so_has_a_share_of_an_input_that_is_a_view_and_is_edited():
    class Edit(nn.Module):
        def forward(self, value):
            return value.mul_(3).square()

    model = nn.Sequential(nn.Linear(3, 3), Edit())
    inputs = torch.randn(4, 5, 3)
    with tap(model, "1", "input_gradient") as taps:
        torch.autograd.grad(model(inputs).sum(), model[0].weight, create_graph=True)
        share = taps["1"].input_gradient
    hidden = model[0](inputs)
    assert torch.allclose(share, 18 * hidden)
    (found,) = torch.autograd.grad(share.square().sum(), model[0].weight)
    (expected,) = torch.autograd.grad((18 * hidden).square().sum(), model[0].weight)
    assert torch.allclose(found, expected)


# What it keeps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["language_model", "cells", "transformer", "odd_layers"])
def test_every_layer_is_what_a_reference_without_hooks_saw(name):
    truth = zoo.truth(name, {*KINDS})
    model = zoo.fresh(name)
    optimizer = zoo.optimizer_of(model)
    losses, wrong, gaps, compared = [], [], {}, set()

    def backward(loss):
        losses.append(loss.detach().clone())
        if loss.requires_grad:
            loss.backward()

    with warnings.catch_warnings(), tap(model, lambda layer, _: layer in truth.layers, KINDS, clone=True) as taps:
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        for phase, batch in zoo.PLAN:
            zoo.take_step(name, model, phase, batch, backward)
            if phase == "train":
                optimizer.step()
            for kind, of_phase, of_batch, layer, call, leaf in truth.values:
                if (of_phase, of_batch) == (phase, batch):
                    key = (kind, phase, batch, layer, call, leaf)
                    try:
                        tensor = taps[layer].get(kind, call=call, leaf=leaf)
                    except hookstore.MissingCaptureError as missing:
                        gaps[kind, layer] = str(missing)
                        continue
                    compared.add(kind)
                    if not is_right(tensor.detach(), truth, key):
                        wrong.append(key)
    assert not wrong
    assert all("edited in place" in reason for reason in gaps.values()), gaps
    assert gaps.keys() <= {(kind, layer) for layer in truth.edited for kind in ("gradient", "input_gradient")}
    assert compared == {key[0] for key in truth.values} == {*KINDS}
    assert [zoo.bits(loss) for loss in losses] == [zoo.bits(loss) for loss in truth.losses]


def is_right(tensor, truth, key):
    value = truth.values[key]
    if key[0] == "input_gradient" and not truth.has_exact_shares:
        return tensor.dtype == value.dtype and torch.allclose(tensor, value, rtol=1e-3, atol=1e-5 * float(value.abs().max()))
    return zoo.bits(tensor) == zoo.bits(value)


@pytest.mark.parametrize("name", ["language_model", "odd_layers", "bert", "decoder"])
def test_values_have_the_form_that_a_recording_gives(tmp_path, name):
    """One model is tapped and recorded at the same time."""
    model = zoo.fresh(name)
    kinds = ("activation", "gradient", "input", "parameter")
    with (
        warnings.catch_warnings(),
        tap(model, lambda *_: True, kinds, clone=True) as taps,
        recording(model, tmp_path / "run", layers=lambda *_: True, kinds=kinds, buffer_bytes=16 << 20),
    ):
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        zoo.take_step(name, model, "train", 0, lambda loss: loss.backward())
        values = {(layer, kind): taps[layer][kind] for layer in taps.layers for kind in taps[layer].kinds}
    assert any(not isinstance(value, torch.Tensor) for (_, kind), value in values.items() if kind == "activation")
    with hookstore.open(tmp_path / "run") as run:
        assert {(layer, kind) for layer in run.layers for kind in run[layer].kinds} == set(values)
        for (layer, kind), value in values.items():
            assert is_alike(value, run[layer][kind].value(0, 0, torch=True)), (layer, kind)


def is_alike(live, read):
    if isinstance(live, torch.Tensor):
        return type(read) is torch.Tensor and zoo.bits(live.detach()) == zoo.bits(read)
    if type(live) is not type(read):
        return False
    if isinstance(live, dict | hookstore.Record):
        return list(live) == list(read) and all(is_alike(live[key], read[key]) for key in live)
    if isinstance(live, tuple | list):
        return len(live) == len(read) and all(map(is_alike, live, read))
    return live == read


def test_tensors_are_the_models_own_objects():
    class Pair(nn.Module):
        def forward(self, value, *, scale):
            return {"a": value * scale, "rest": [value, None, "text"]}

    model = Pair()
    value, scale = torch.ones(2, requires_grad=True), torch.tensor(3.0)
    with tap(model, "", ["activation", "input", "gradient"]) as taps:
        output = model(value, scale=scale)
        kept = taps[""].activation
        assert kept["a"] is output["a"]
        assert kept["rest"][0] is value
        assert kept["rest"][1:] == [None, hookstore.NotStored("str", "it is a non-tensor of type str")]
        assert taps[""].input == hookstore.Arguments((value,), {"scale": scale})
        assert taps[""].get("activation", leaf="rest.0") is value
        assert taps[""].get("activation", leaf="rest")[0] is value
        output["a"].sum().backward()
        assert taps[""].gradient["a"].tolist() == [1.0, 1.0]
        with pytest.raises(
            hookstore.MissingCaptureError, match=r"no leaf 'b' in the activation of layer '': there are leaves 'a', 'rest.0'"
        ):
            taps[""].get("activation", leaf="b")


def test_edits_in_place_show_and_do_not_in_a_clone():
    model = nn.Sequential(linear([1.0], [-1.0]), nn.ReLU(inplace=True))
    inputs = torch.tensor([[2.0]])
    with tap(model, "0", detach=True) as live, tap(model, "0", clone=True) as cloned, tap(model, "0", clone=True, detach=True) as bare:
        output = model(inputs)
        assert live["0"].activation.tolist() == [[2.0, 0.0]]
        assert not live["0"].activation.requires_grad
        assert live["0"].activation.data_ptr() == output.data_ptr()
        assert cloned["0"].activation.tolist() == bare["0"].activation.tolist() == [[2.0, -2.0]]
        assert not bare["0"].activation.requires_grad
        cloned["0"].activation.sum().backward()
    assert model[0].weight.grad.tolist() == [[2.0], [2.0]]


def test_calls_are_counted_as_in_a_recording():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = linear([2.0])

        def forward(self, value):
            return self.twice(self.twice(self.twice(value)))

    model = Thrice()
    with tap(model, kinds=["activation", "gradient", "parameter_gradient"]) as taps:
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
            assert taps["twice"].calls == [0, 1, 2]
            assert [taps["twice"].get("activation", call=call).item() for call in range(3)] == [2.0, 4.0, 8.0]
            assert [taps["twice"].get("gradient", call=call).item() for call in range(3)] == [4.0, 2.0, 1.0]
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        assert taps["twice"].parameter_gradient is model.twice.weight.grad
        assert taps.values("gradient", call=2)["twice"].item() == 1.0
        with pytest.raises(hookstore.MissingCaptureError, match=r"no activation of layer 'twice', call 3,: there are calls 0, 1, 2"):
            taps["twice"].get("activation", call=3)


def test_of_several_backwards_the_last_is_there_and_the_others_by_number():
    model = nn.Sequential(linear([1.0]))
    with tap(model, kinds="gradient") as taps:
        output = model(torch.ones(1, 1))
        for factor in (1, 2, 3):
            (factor * output).sum().backward(retain_graph=True)
        assert taps["0"].gradient.item() == 3.0
        assert taps["0"].get("gradient", backward=1).item() == 2.0
        with pytest.raises(hookstore.MissingCaptureError, match="no backward 3 in the gradient of layer '0': there are backwards 0, 1, 2"):
            taps["0"].get("gradient", backward=3)


def test_a_part_is_kept_with_its_graph():
    model = nn.Sequential(nn.Linear(3, 4))
    inputs = torch.randn(5, 3)
    with (
        tap(model, select={"sample": 2, 1: [0, 3]}) as taps,
        tap(model, select={"token": [-1]}, dims=("sample", "token")) as last,
        tap(model, select=lambda tensor: tensor.mean(0)) as means,
        tap(model, select={2: 1}) as none,
        tap(model, select=lambda tensor: tensor @ model[0].weight, detach=True) as computed,
    ):
        output = model(inputs)
        assert torch.equal(taps["0"].activation, output[:2, [0, 3]])
        assert torch.equal(last["0"].activation, output[:, -1:])
        assert torch.equal(means["0"].activation, output.mean(0))
        assert torch.equal(computed["0"].activation, output @ model[0].weight)
        assert not computed["0"].activation.requires_grad
        means["0"].activation.sum().backward()
        assert torch.allclose(model[0].bias.grad, torch.ones(4))
        with pytest.raises(hookstore.MissingCaptureError, match="select names axis '2', and the tensor has 2 dimensions"):
            none["0"].activation  # noqa: B018
    with pytest.raises(hookstore.OptionError, match="select: expected an axis by its number or by one of the names"):
        tap(model, select={"token": 1})


# When it is gone -----------------------------------------------------------------------------------------------------


def test_nothing_outlives_the_next_forward():
    model = mlp(3, 4, 2)
    gc.disable()  # what is dropped is gone at once, and not when the collector comes
    try:
        with tap(model, kinds=KINDS) as taps:
            for mode in (True, False):
                model.train(mode)
                inputs = torch.randn(2, 3, requires_grad=True)
                output = model(inputs)
                kept = {kind: weakref.ref(taps["0"][kind]) for kind in ("activation", "input")}
                output.sum().backward()
                kept["gradient"] = weakref.ref(taps["0"].gradient)
                kept["share"] = weakref.ref(taps["2"].input_gradient)
                del output, inputs
                assert all(reference() is not None for reference in kept.values())
                seen = []
                with model.register_forward_pre_hook(lambda *_, kept=kept, seen=seen: seen.extend(one() for one in kept.values())):
                    model(torch.randn(2, 3))
                assert seen == [None] * 4, "it is emptied before the forward begins"
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["remove", "clear", "drop"])
def test_nothing_is_kept_after(how):
    model = mlp(3, 4, 2)
    gc.disable()
    try:
        taps = tap(model, "", ["activation", "gradient"])
        output = model(torch.randn(2, 3))
        output.sum().backward()
        kept = [weakref.ref(output), weakref.ref(taps[""].gradient)]
        del output
        if how == "drop":
            del taps
        else:
            getattr(taps, how)()
        assert [reference() for reference in kept] == [None, None]
        assert bool(hooks_of(model)) == (how == "clear")
        if how == "remove":
            taps.remove()
            taps.clear()
            model(torch.randn(2, 3))
            with pytest.raises(hookstore.MissingCaptureError, match="no activation of layer '': the tap was removed"):
                taps[""].activation  # noqa: B018
        elif how == "clear":
            with pytest.raises(hookstore.MissingCaptureError, match="no tapped layer has been called since the model was last called"):
                taps[""].activation  # noqa: B018
            taps.remove()
    finally:
        gc.enable()


def test_what_a_part_left_is_gone_with_the_first_forward_of_the_whole():
    model = nn.Sequential(linear([1.0]))
    with tap(model) as taps:
        for _ in range(2):
            model[0](torch.ones(1, 1))
            model[0](torch.ones(1, 1))
            output = model(torch.ones(1, 1))
            assert taps["0"].calls == [0]
            assert taps["0"].activation is output


def test_a_hundred_forwards_leave_everything_flat():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "left": nn.Linear(2, 2)})
    model.forward = lambda value: model["used"](value).sum()

    def num_alive():
        gc.collect()
        return [sum(type(thing) is kind for thing in gc.get_objects()) for kind in (Coordinates, GradientWatch)]

    before = num_alive()
    with tap(model, ["used", "left"], KINDS):
        for _ in range(100):
            model(torch.ones(1, 2)).backward()
        assert all(after - others < 10 for after, others in zip(num_alive(), before, strict=True))


def test_gradients_of_an_earlier_forward_are_not_taken_for_those_of_the_last():
    model = nn.Sequential(linear([1.0]))
    with tap(model, kinds=["activation", "gradient"]) as taps:
        first, second = model(torch.ones(1, 1)), model(torch.full((1, 1), 2.0))
        (5 * first).sum().backward()
        assert taps["0"].activation is second
        with pytest.raises(hookstore.MissingCaptureError, match="no gradient has arrived"):
            taps["0"].gradient  # noqa: B018
        (7 * second).sum().backward()
        assert taps["0"].gradient.item() == 7.0


# What is missing says why --------------------------------------------------------------------------------------------


def test_what_is_not_there_says_why():
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "left": nn.Linear(2, 2), "odd": nn.Identity()})
    model.forward = lambda value: (model["used"](value), model["odd"]("text"))[0]
    with tap(model, ["used", "left", "odd"], ["activation", "gradient", "parameter", "parameter_gradient"]) as taps:

        def why(layer, kind):
            with pytest.raises(hookstore.MissingCaptureError) as caught:
                taps[layer][kind]
            assert (caught.value.layer, caught.value.kind) == (layer, kind)
            return str(caught.value)

        assert "no tapped layer has been called since the model was last called, or the tap was made or cleared" in why(
            "used", "activation"
        )
        model(torch.ones(1, 2))
        assert "'left': the layer was not called in this forward: its forward was called directly" in why("left", "activation")
        assert "it is not tapped; what is tapped is activation, gradient, parameter" in why("used", "input")
        assert "there is no such kind; the kinds are 'activation'" in why("used", "weights")
        assert "no gradient has arrived: no backward has run yet" in why("used", "gradient")
        assert "no optimizer has taken a step" in why("used", "parameter_gradient")
        assert "the layer has no parameters of its own" in why("odd", "parameter")
        assert "the layer has no parameters of its own" in why("odd", "parameter_gradient")
        model(torch.ones(1, 2))
        assert "str without tensors" in why("odd", "activation") or "had no tensors there" in why("odd", "activation")
        with pytest.raises(hookstore.MissingCaptureError, match="no activation of layer 'left'"):
            taps.values()
        with pytest.raises(hookstore.UnknownLayerError, match="layer 'use' is not tapped; nearest are 'used'"):
            taps["use"]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 3))
        assert "has not ended; the forward of the model raised RuntimeError" in why("used", "activation")
        assert "the layer was not called in this forward: the forward of the model raised RuntimeError" in why("left", "activation")
        assert repr(taps) == "<hookstore.Tap of activation, parameter, gradient, parameter_gradient of 3 layers>" or "3 layers" in repr(
            taps
        )
        assert "parameter" in repr(taps["used"])


def test_options_that_cannot_be_used_are_refused():
    model = mlp(2, 2)
    for options, message in (
        ({"detach": 1}, "detach: expected True or False, got 1"),
        ({"clone": None}, "clone: expected True or False, got None"),
        ({"kinds": "weights"}, "kinds: expected some of"),
        ({"layers": "none"}, "matches no module"),
    ):
        with pytest.raises(hookstore.OptionError, match=message):
            tap(model, **options)
    with pytest.raises(hookstore.UnsupportedModelError, match=r"expected a torch.nn.Module, got a list"):
        tap([model])
    assert not hooks_of(model)


# Ways to run a model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_grad_values_are_there_and_have_no_graph(around):
    model = mlp(3, 4, 2).eval()
    with tap(model, kinds=["activation", "gradient"], clone=True) as taps, around():
        output = model(torch.randn(2, 3))
        assert torch.equal(taps["2"].activation, output)
        assert not taps["2"].activation.requires_grad


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
        self.options = options

    def forward(self, inputs):
        hidden = self.first(inputs)
        return checkpoint(self.block, hidden, **self.options) if self.options else self.block(hidden)


def feature_loss(model, **options):
    """Train with a loss on the features inside a block, and return the gradients."""
    with tap(model, ["block.0", "block.2"], ["activation", "gradient"], **options) as taps:
        output = model(torch.ones(5, 3))
        features = taps["block.0"].activation
        (output.square().sum() + features.square().sum()).backward()
        assert taps["block.2"].calls == [0]
        return [*(parameter.grad for parameter in model.parameters()), taps["block.0"].gradient, taps["block.2"].gradient]


def saves_clones(context, operator, *args, **kwargs):
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if operator == torch.ops.aten.clone.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [None, saves_clones])
@pytest.mark.parametrize("options", [{}, {"clone": True}, {"select": {1: [0, 2]}}])
def test_features_inside_a_checkpointed_block_train_as_without_checkpointing(policy, options):
    plain = Checkpointed()
    model = copy.deepcopy(plain)
    model.options = {"use_reentrant": False}
    if policy is not None:
        model.options["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    for ours, theirs in zip(feature_loss(model, **options), feature_loss(plain, **options), strict=True):
        assert torch.allclose(ours, theirs)


def test_features_without_a_graph_are_refused_inside_a_reentrant_checkpoint():
    model = Checkpointed(use_reentrant=True)
    plain = copy.deepcopy(model)
    plain.options = {}
    with tap(model, kinds=["activation", "gradient"]) as taps, tap(model, detach=True) as detached, tap(plain, kinds="gradient") as truth:
        for one in (model, plain):
            one(torch.ones(5, 3)).square().sum().backward()
        with pytest.raises(hookstore.MissingCaptureError, match=r"without a graph.*use_reentrant=False, or tap with detach=True"):
            taps["block.0"].activation  # noqa: B018
        assert taps["first"].activation.requires_grad
        assert torch.equal(detached["block.0"].activation, plain.block[0](plain.first(torch.ones(5, 3))))
        for layer in truth.layers:
            assert torch.equal(taps[layer].gradient, truth[layer].gradient)
        with torch.no_grad(), pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
            output = model(torch.ones(5, 3))
            assert taps["block.2"].activation is output, "where there is no graph anyway nothing is refused"


def test_under_function_transforms_there_are_no_live_tensors():
    model = nn.Sequential(linear([2.0]))
    with tap(model) as taps:
        torch.func.vmap(model)(torch.ones(3, 1))
        with pytest.raises(hookstore.MissingCaptureError, match="functorch tensor"):
            taps["0"].activation  # noqa: B018
        torch.func.functional_call(model, {"0.weight": torch.tensor([[5.0]])}, torch.ones(1, 1))
        assert taps["0"].activation.item() == 5.0


def test_names_leave_out_wrappers_and_aliases_work():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = self.other = linear([2.0])

        def forward(self, value):
            return self.body(value)

    model = nn.DataParallel(AveragedModel(Net()))
    with tap(model) as taps:
        model(torch.ones(1, 1))
        assert taps.layers == ["body"]
        assert taps["other"].activation is taps["module.module.body"].activation is taps.values()["body"]


def test_the_first_of_several_models_empties_the_tap():
    models = {"teacher": nn.Sequential(linear([1.0])), "student": nn.Sequential(linear([2.0]))}
    with tap(models) as taps:
        for _ in range(2):
            outputs = {name: model(torch.ones(1, 1)) for name, model in models.items()}
            assert list(taps.values()) == ["teacher.0", "student.0"]
            assert all(value is outputs[name.split(".")[0]] for name, value in taps.values().items())
        taps.clear()
        with pytest.raises(hookstore.MissingCaptureError, match="since 'teacher' was last called"):
            taps["student.0"].activation  # noqa: B018


def test_a_module_that_takes_anothers_place_is_tapped():
    model = nn.Sequential(linear([1.0]))
    with tap(model) as taps:
        model(torch.ones(1, 1))
        model[0] = linear([3.0])
        with pytest.warns(hookstore.CaptureWarning, match="'0' is another module now"):
            model(torch.ones(1, 1))
        assert taps["0"].activation.item() == 3.0


@pytest.mark.usefixtures("new_compiler")
def test_compiled_models_are_refused_by_name():
    model = nn.Sequential(nn.Sequential(linear([1.0])))
    with pytest.raises(hookstore.UnsupportedModelError, match="module '0' is compiled: a compiled graph has no live tensors"):
        tap(nn.Sequential(torch.compile(model[0], backend="eager")))
    compiled = torch.compile(model, backend="eager")
    assert compiled(torch.ones(1, 1)).item() == 1.0
    with tap(model, "0.0") as taps:
        compiled(torch.ones(1, 1))  # the graph from before
        with pytest.raises(hookstore.MissingCaptureError, match="compiled before the tap was made, its graph knows nothing of the tap"):
            taps["0.0"].activation  # noqa: B018
        model(torch.ones(1, 1))
        assert taps["0.0"].activation.item() == 1.0
        with pytest.raises(Exception, match="UnsupportedModelError: layer '0.0' is being compiled while it is tapped"):
            torch.compile(model, backend="aot_eager")(torch.ones(1, 1))
    torch._dynamo.reset()
    assert torch.compile(model, backend="aot_eager")(torch.ones(1, 1)).item() == 1.0


def test_copies_of_a_tapped_model_are_inert():
    model = nn.Sequential(linear([1.0]))
    with tap(model, kinds=KINDS) as taps:
        output = model(torch.ones(1, 1))
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)):
            twin(torch.full((1, 1), 5.0)).sum().backward()
        assert taps["0"].activation is output
        assert taps["0"].kinds == ["activation", "input", "parameter"]


@pytest.mark.parametrize("options", [{}, {"clone": True}, {"select": {0: 1}, "kinds": ["activation", "gradient"]}])
def test_training_computes_the_same_bits_with_a_tap(options):
    """With momentum, gradients summed over two backwards, clipping in place, and the optimizer's decay of weights."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.convolution = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, value):
            return value + self.convolution(self.norm(value)) + value.sin()

    layers = nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), Residual(), nn.Dropout(0.3), nn.Flatten(2), nn.Linear(36, 5)
    plain = nn.Sequential(*layers)
    model = copy.deepcopy(plain)

    def train(trained):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                cross_entropy(trained(torch.randn(2, 1, 8, 8)).sum(1), torch.tensor([0, 3])).backward()
            nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    train(plain)
    with tap(model, lambda *_: True, **{"kinds": KINDS, **options}):
        train(model)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(zoo.bits(ours[name]) == zoo.bits(theirs[name]) for name in theirs)
    assert not hooks_of(model)


def test_other_kinds_of_tensors_are_kept_as_they_are():
    class Odd(nn.Module):
        def forward(self, values):
            nested = torch.nested.nested_tensor([values, values[:1]], layout=torch.jagged)
            return {"sparse": values.to_sparse(), "nested": nested, "empty": values[:0]}

    model = Odd()
    with tap(model, "", clone=True) as taps:
        values = torch.tensor([0.0, 2.0])
        model(values)
        kept = taps[""].activation
    assert kept["sparse"].is_sparse
    assert np.array_equal(kept["sparse"].to_dense(), values)
    assert [one.tolist() for one in kept["nested"].unbind()] == [[0.0, 2.0], [0.0]]
    assert kept["empty"].shape == (0,)
