"""What is captured of a forward and a backward pass, against values worked out by hand or cloned beside."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import sys
import warnings
import weakref
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from small import linear, recording, values
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import hookstore

BOTH = ("activation", "gradient")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


# Values that change after the hook ---------------------------------------------------------------------------------


def test_in_place_layer_after_a_captured_one(path):
    """Activation and gradient belong to the value before the edit (pytorch#61519, captum#156)."""
    model = nn.Sequential(linear([1.0, 0.0], [0.0, 1.0]), nn.ReLU(inplace=True))
    with recording(model, path, kinds=(*BOTH, "input")):
        (model(torch.tensor([[2.0, -3.0]])) * torch.tensor([10.0, 20.0])).sum().backward()
    with hookstore.open(path) as run:
        assert values(run["0"].activation, 0, 0) == [[2.0, -3.0]]
        assert values(run["1"].input, 0, 0) == [[2.0, -3.0]]
        assert values(run["1"].activation, 0, 0) == [[2.0, 0.0]]
        assert values(run["0"].gradient, 0, 0) == [[10.0, 0.0]]
        assert values(run["1"].gradient, 0, 0) == [[10.0, 20.0]]


def test_gradient_belongs_to_the_value_that_was_stored_when_the_output_is_edited_later(path):
    model = linear([1.0])
    with recording(model, path, layers="", kinds=BOTH):
        output = model(torch.ones(1, 1))
        output.mul_(2)
        (5 * output).sum().backward()
    with hookstore.open(path) as run:
        assert values(run[""].activation, 0, 0) == [[1.0]]
        assert values(run[""].gradient, 0, 0) == [[10.0]]


def test_parameter_and_returned_parameter_do_not_follow_the_optimizer(path):
    class ReturnsParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self):
            return self.weight

    model = ReturnsParameter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with recording(model, path, layers="", kinds=("activation", "gradient", "parameter")) as recorder:
        for _ in recorder.batches(range(3), epoch=0):
            optimizer.zero_grad()
            model().sum().backward()
            optimizer.step()
            assert len(model.weight._backward_hooks or ()) <= 1, "a tensor that comes back each batch collects no hooks"
    assert not model.weight._backward_hooks
    with hookstore.open(path) as run:
        for batch, value in enumerate((1.0, 0.75, 0.5)):
            assert values(run[""].activation, 0, batch) == [value]
            assert values(run[""].parameter, 0, batch) == [value]
            assert values(run[""].gradient, 0, batch) == [1.0]
        assert run[""].activation.rows["step"].to_pylist() == [0, 1, 2]


# Gradients ---------------------------------------------------------------------------------------------------------


def test_gradient_of_a_view_made_inside_the_call_with_a_later_edit(path):
    """A 3-D linear with bias returns a view; a hook on the view is lost, or sees a part."""
    model = nn.Linear(3, 4)
    plain = copy.deepcopy(model)
    inputs = torch.randn(2, 5, 3)
    expected = plain(inputs)
    assert expected._base is not None, "this test is about views"
    used_before = expected.sum(dim=0) * 2
    edited = expected * torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected.retain_grad()
    (used_before.sum() + edited.pow(2).sum()).backward()
    with recording(model, path, layers="", kinds=BOTH):
        output = model(inputs)
        used_before = output.sum(dim=0) * 2
        output *= torch.tensor([1.0, 2.0, 3.0, 4.0])
        (used_before.sum() + output.pow(2).sum()).backward()
    with hookstore.open(path) as run:
        assert np.array_equal(run[""].activation[0, 0], plain(inputs).detach().numpy())
        np.testing.assert_allclose(run[""].gradient[0, 0], expected.grad.numpy(), rtol=1e-6)
    assert torch.allclose(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("view", ["transpose", "slice", "expand_base", "narrow_then_view"])
def test_gradient_of_odd_views_equals_that_of_a_retained_copy(path, view):
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 6)

        def forward(self, inputs):
            made = self.inner(inputs) * 2
            if view == "transpose":
                return made.view(2, 2, 6).transpose(0, 1)
            if view == "slice":
                return made[1:, ::2]
            if view == "expand_base":
                return made.sum(dim=0, keepdim=True).expand(3, 6)
            return made.narrow(0, 1, 2).reshape(3, 4)

    model = Views()
    inputs = torch.randn(4, 4)
    weights = torch.randn_like(model(inputs))
    reference = model(inputs)
    reference.retain_grad()
    (reference.pow(2) * weights).sum().backward()
    with recording(model, path, layers="", kinds=BOTH):
        (model(inputs).pow(2) * weights).sum().backward()
    with hookstore.open(path) as run:
        assert np.array_equal(run[""].activation[0, 0], reference.detach().numpy())
        np.testing.assert_allclose(run[""].gradient[0, 0], reference.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("is_used_before", [True, False])
def test_view_of_a_tensor_from_outside_that_is_edited_is_a_row_and_not_a_wrong_value(path, is_used_before):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.flatten = nn.Flatten()

        def forward(self, inputs):
            shared = inputs * 1
            flat = self.flatten(shared)
            before = flat.sum() * 3 if is_used_before else 0
            flat.mul_(2)
            return before + flat.sum()

    model = Model()
    with pytest.warns(hookstore.CaptureWarning, match="edited in place"), recording(model, path, layers="flatten", kinds=BOTH):
        model(torch.ones(2, 2, 2, requires_grad=True)).backward()
    with hookstore.open(path) as run:
        assert values(run["flatten"].activation, 0, 0) == [[1.0] * 4] * 2
        with pytest.raises(hookstore.MissingCaptureError, match="skipped: .*edited in place"):
            run["flatten"].gradient[0, 0]
        assert run["flatten"].gradient.rows.num_rows == 1


def test_delayed_backwards_over_edited_views_are_all_told(path):
    model = nn.Flatten()
    with pytest.warns(hookstore.CaptureWarning, match="edited in place"), recording(model, path, layers="", kinds="gradient"):
        losses = [model(torch.ones(2, 2, 2, requires_grad=True) * 1).mul_(2).sum() for _ in range(3)]
        for loss in losses:
            loss.backward()
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"] * 3


@pytest.mark.parametrize("every", [1, 2])
def test_parameter_that_a_module_returns_has_each_batchs_own_gradient(path, every):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = Positions()

        def forward(self, scale):
            return (self.embedding() * scale).sum()

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self):
            return self.weight if every == 1 else self.weight[:2]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, path, layers="embedding", kinds="gradient", every=every) as recorder:
        for scale in recorder.batches([1.0, 10.0, 100.0], epoch=0):
            model(scale).backward()
            optimizer.step()
    assert not model.embedding.weight._backward_hooks
    with hookstore.open(path) as run:
        assert run.batches(0) == list(range(0, 3, every))
        for batch in run.batches(0):
            assert set(values(run["embedding"].gradient, 0, batch)) == {10.0**batch}


def test_edited_views_with_lazy_bits_and_repeated_elements(path):
    class Conjugate(nn.Module):
        def forward(self, inputs):
            return (inputs * 1).conj()

    class Expand(nn.Module):
        def forward(self, inputs):
            return (inputs * 1).expand(3, 2)

    inputs = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    weights = torch.tensor([2 - 1j, 5 + 3j])

    def loss(output):
        return (output.mul_(2) * weights).real.sum()

    reference = (inputs * 1).conj().resolve_conj()
    reference.retain_grad()
    (2 * reference * weights).real.sum().backward()
    model = nn.ModuleDict({"conjugate": Conjugate(), "expand": Expand()})
    with (
        pytest.warns(hookstore.CaptureWarning, match="not its own alone"),
        recording(model, path, layers=["conjugate", "expand"], kinds="gradient"),
    ):
        loss(model["conjugate"](inputs)).backward()
        leaf = torch.ones(2, requires_grad=True)
        output = model["expand"](leaf * 1)
        output._base.add_(1)
        (output * torch.arange(6.0).view(3, 2)).sum().backward()
    with hookstore.open(path) as run:
        assert torch.equal(run["conjugate"].gradient.tensor(0, 0), reference.grad)
        assert run["expand"].gradient.rows["status"].to_pylist() == ["skipped"]


def test_two_outputs_of_one_base_of_which_one_is_edited(path):
    class Halves(nn.Module):
        def forward(self, inputs):
            made = inputs * 1
            return made[:, :2], made[:, 1:]

    model = Halves()
    with pytest.warns(hookstore.CaptureWarning, match="not its own alone"), recording(model, path, layers="", kinds="gradient"):
        first, second = model(torch.ones(1, 3, requires_grad=True))
        first.mul_(2)
        (first.sum() + 5 * second.sum()).backward()
    with hookstore.open(path) as run:
        assert set(run[""].gradient.rows["status"].to_pylist()) == {"skipped"}
        with pytest.raises(hookstore.MissingCaptureError, match="skipped"):
            run[""].gradient.get(0, 0, leaf="0")


def test_views_of_one_leaf_collect_no_hooks(path):
    model = nn.Flatten(0)
    leaf = torch.ones(2, 2, requires_grad=True)
    with recording(model, path, layers="", kinds="gradient"):
        for _ in range(5):
            model(leaf).sum().backward()
            assert len(leaf._backward_hooks or ()) <= 1
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 0, batch) for batch in range(5)] == [[1.0] * 4] * 5


def test_base_of_a_returned_view_that_has_other_uses_adds_nothing(path):
    """Only what flows through the output counts: a hook on the base alone would give 5 and not 2."""

    class Keeps(nn.Module):
        def forward(self, inputs):
            self.made = inputs * 1
            return self.made.view(-1)

    model = Keeps()
    with recording(model, path, layers="", kinds="gradient"):
        output = model(torch.ones(2, 2, requires_grad=True))
        (2 * output.sum() + 3 * model.made.sum()).backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == [2.0] * 4


def test_watching_a_view_does_not_keep_its_memory(path):
    model = nn.Linear(3, 4)
    with recording(model, path, layers="", kinds="gradient"):
        output = model(torch.randn(2, 5, 3))
        storage = StorageWeakRef(output.untyped_storage())
        assert not storage.expired()
        loss = output.sum()
        del output
        assert storage.expired()
        loss.backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == np.ones((2, 5, 4)).tolist()


def test_view_of_a_tensor_from_outside_without_edits(path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    inputs = torch.randn(2, 4)
    with recording(model, path, kinds="gradient"):
        (model(inputs) * torch.arange(8.0)).sum().backward()
    with hookstore.open(path) as run:
        assert values(run["1"].gradient, 0, 0) == list(range(8))
        assert values(run["0"].gradient, 0, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_expanded_gradient_is_stored_whole(path):
    model = linear([1.0, 0.0, 0.0])
    with recording(model, path, layers="", kinds="gradient"):
        model(torch.ones(4, 3)).sum().backward()
    with hookstore.open(path) as run:
        row = run[""].gradient.row(0, 0)
        assert (row["nbytes"], row["shape"]) == (16, [4, 1])
        assert values(run[""].gradient, 0, 0) == [[1.0]] * 4


def test_frozen_layer_has_no_gradient_and_that_is_said(path):
    model = nn.Sequential(linear([2.0]), linear([2.0]))
    model[0].weight.requires_grad_(False)
    with recording(model, path, kinds=BOTH):
        model(torch.tensor([[3.0]])).sum().backward()
    with hookstore.open(path) as run:
        assert (values(run["0"].activation, 0, 0), values(run["1"].activation, 0, 0)) == ([[6.0]], [[12.0]])
        assert values(run["1"].gradient, 0, 0) == [[1.0]]
        with pytest.raises(hookstore.MissingCaptureError, match="no gradient arrived: the layer is frozen"):
            run["0"].gradient[0, 0]


def test_delayed_backwards_are_filed_under_their_forwards(path):
    model = linear([3.0])
    with recording(model, path, layers="", kinds="gradient") as recorder:
        losses = [(batch + 1) * model(torch.ones(1, 1)) for batch in recorder.batches(range(3), epoch=1)]
        for loss in reversed(losses):
            loss.backward()
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 1, batch) for batch in range(3)] == [[[1.0]], [[2.0]], [[3.0]]]


def test_repeated_calls_and_backwards_in_reverse_order(path):
    layer = linear([2.0])

    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, inputs):
            return self.layer(self.layer(self.layer(inputs)))

    model = Thrice()
    with recording(model, path, layers="layer", kinds=BOTH):
        model(torch.ones(1, 1)).backward()
    with hookstore.open(path) as run:
        assert [values(run["layer"].activation, 0, 0, call) for call in range(3)] == [[[2.0]], [[4.0]], [[8.0]]]
        assert [values(run["layer"].gradient, 0, 0, call) for call in range(3)] == [[[4.0]], [[2.0]], [[1.0]]]
        assert run["layer"].activation[0, 0, 2].tolist() == [[8.0]]


def test_gan_calls_and_gradients(path):
    discriminator = linear([1.0])

    with recording(discriminator, path, layers="", kinds=BOTH) as recorder, recorder.at(epoch=0, batch=0):
        generated = torch.tensor([[6.0]], requires_grad=True)
        real = discriminator(torch.tensor([[30.0]]))
        fake = discriminator(generated.detach())
        (real - fake).backward()
        (7 * discriminator(generated)).backward()
    with hookstore.open(path) as run:
        assert [values(run[""].activation, 0, 0, call) for call in range(3)] == [[[30.0]], [[6.0]], [[6.0]]]
        assert [values(run[""].gradient, 0, 0, call) for call in range(3)] == [[[1.0]], [[-1.0]], [[7.0]]]


def test_several_backwards_over_one_forward(path):
    model = linear([2.0])
    with recording(model, path, layers="", kinds="gradient"):
        output = model(torch.ones(1, 1))
        output.backward(retain_graph=True)
        (3 * output).backward()
    with hookstore.open(path) as run:
        with pytest.warns(hookstore.CaptureWarning, match="captured 2 times"):
            assert values(run[""].gradient, 0, 0) == [[3.0]]
        assert values(run[""].gradient, 0, 0, backward=0) == [[1.0]]
        assert run[""].gradient.rows["backward"].to_pylist() == [0, 1]


def test_gradient_under_create_graph_is_detached(path):
    model = linear([3.0])
    with recording(model, path, layers="", kinds="gradient"):
        inputs = torch.ones(1, 1, requires_grad=True)
        loss = model(inputs).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        gradient.sum().backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0, backward=0) == [[6.0]]


def test_hook_called_with_none_by_another_tools_full_hook(path):
    class Two(nn.Module):
        def forward(self, inputs):
            return 2 * inputs, 3 * inputs

    model = Two()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = model.register_full_backward_hook(lambda *_: None)
        with recording(model, path, layers="", kinds=BOTH):
            model(torch.ones(1, requires_grad=True))[1].backward()
        handle.remove()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0, leaf="1") == [1.0]
        with pytest.raises(hookstore.MissingCaptureError):
            run[""].gradient.get(0, 0, leaf="0")


def test_sequential_and_its_last_child_return_one_object_and_both_have_rows(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    with recording(model, path, layers="*", kinds=BOTH):
        (model(torch.randn(1, 2)) * 3).sum().backward()
    with hookstore.open(path) as run:
        for layer in ("", "0", "1"):
            assert values(run[layer].gradient, 0, 0) == [[3.0, 3.0]]


def test_no_grad(path):
    model = linear([2.0])
    with recording(model, path, layers="", kinds=BOTH), torch.no_grad():
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert values(run[""].activation, 0, 0) == [[2.0]]
        assert len(run[""].gradient) == 0


def test_inference_mode_and_recording_begun_inside_it(path):
    model = linear([2.0])
    with torch.inference_mode(), recording(model, path, layers="", buffer_bytes=64 << 10):
        model(torch.ones(1, 1))
    model.zero_grad()
    with hookstore.open(path) as run:
        assert values(run[""].activation, 0, 0) == [[2.0]]


# Calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recompute_is_no_second_call(path, reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(linear([2.0]), nn.Tanh())

        def forward(self, inputs):
            return checkpoint(self.block, inputs, use_reentrant=reentrant)

    model = Model()
    with recording(model, path, layers="block.*"):
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    with hookstore.open(path) as run:
        assert run.manifest["call"].to_pylist() == [0, 0]
        assert values(run["block.0"].activation, 0, 0) == [[2.0]]
        assert run["block.1"].activation[0, 0].item() == pytest.approx(np.tanh(2.0))


def test_forward_that_raises_leaves_the_other_batches_whole(path):
    class Breaks(nn.Module):
        def forward(self, inputs):
            if inputs.sum() < 0:
                raise ArithmeticError("negative")
            return inputs

    model = nn.Sequential(nn.Identity(), Breaks(), nn.Identity())
    with recording(model, path, kinds=("activation", "input")) as recorder:
        for item in recorder.batches([torch.ones(1), -torch.ones(1), torch.ones(1)], epoch=0):
            try:
                model(item)
            except ArithmeticError:
                assert item < 0
    with hookstore.open(path) as run:
        assert run["2"].activation.rows["batch"].to_pylist() == [0, 2]
        assert run["1"].input.rows["batch"].to_pylist() == [0, 1, 2]
        assert set(run.manifest["call"].to_pylist()) == {0}


def test_layer_that_is_never_called_is_warned_about(path):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Identity(), nn.Identity()

        def forward(self, inputs):
            return self.b(self.a.forward(inputs))

    model = Direct()
    with pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 0, batch 0: 'a' "), recording(model, path):
        model(torch.ones(1))
    with hookstore.open(path) as run:
        assert run.layers == ["a", "b"]
        with pytest.raises(hookstore.MissingCaptureError, match="was skipped: the layer was not called: its forward was called directly"):
            run["a"].activation[0, 0]
        with pytest.raises(hookstore.MissingCaptureError, match="was not captured: the layer was not called"):
            run["a"].activation[0, 1]


def test_selection_of_nothing_that_is_called_is_warned_about(path):
    model = nn.MultiheadAttention(4, 2)
    with (
        pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 0, batch 0: 'out_proj' .MultiheadAttention"),
        recording(model, path, layers="out_proj"),
    ):
        model(torch.ones(1, 3, 4), torch.ones(1, 3, 4), torch.ones(1, 3, 4))


def test_shared_module_has_one_row_a_call_and_both_names(path):
    shared = nn.ReLU()
    model = nn.Sequential()
    model.a = nn.Sequential(nn.Identity(), shared)
    model.b = nn.Sequential(linear([-1.0]), shared)
    with recording(model, path, layers=nn.ReLU):
        model.a(torch.tensor([[7.0]]))
        model.b(torch.tensor([[-2.0]]))
    with hookstore.open(path) as run:
        assert run.layers == ["a.1"]
        for name in ("a.1", "b.1"):
            assert [values(run[name].activation, 0, 0, call) for call in range(2)] == [[[7.0]], [[2.0]]]


# Values that are not one plain tensor ------------------------------------------------------------------------------


def test_nested_outputs_and_arguments(path):
    point = namedtuple("point", ["x", "y"])

    @dataclass
    class Output:
        logits: torch.Tensor
        hidden: tuple

    class Nested(nn.Module):
        def forward(self, first, *, scale):
            return {
                "a": first * scale,
                "b.c": [first, None, "text", point(first + 1, {1: first + 2})],
                "d": Output(first * 0, (first + 3,)),
            }

    model = Nested()
    first, scale = torch.ones(1), torch.tensor(2.0)
    with recording(model, path, layers="", kinds=("activation", "input")):
        model(first, scale=scale)
    expected = {"a": [2.0], "b%2ec.0": [1.0], "b%2ec.3.x": [2.0], "b%2ec.3.y.1": [3.0], "d.logits": [0.0], "d.hidden.0": [4.0]}
    with hookstore.open(path) as run:
        assert {leaf: values(run[""].activation, 0, 0, leaf=leaf) for leaf in run[""].activation.leaves} == expected
        assert values(run[""].input, 0, 0, leaf="0") == [1.0]
        assert values(run[""].input, 0, 0, leaf="scale") == 2.0
        with pytest.raises(hookstore.MissingCaptureError, match="several leaves: 'a', 'b%2ec.0'"):
            run[""].activation.get(0, 0)


def test_containers_that_hold_themselves_or_grow_later(path):
    class Cache(nn.Module):
        def forward(self, cache):
            cache.append(torch.tensor(float(len(cache))))
            return cache

    model = nn.Sequential(Cache(), Cache())
    cache: list = []
    cache.append(cache)
    with recording(model, path):
        model(cache)
    with hookstore.open(path) as run:
        assert run["0"].activation.leaves == ["1"]
        assert run["1"].activation.leaves == ["1", "2"]


def test_output_without_tensors_is_a_row_and_a_warning(path):
    class Text(nn.Module):
        def forward(self, inputs):
            return "text"

    model = Text()
    with pytest.warns(hookstore.CaptureWarning, match="returned a str without tensors"), recording(model, path, layers=""):
        model(torch.ones(1))
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"]
        assert run.info().statuses == {"skipped": 1}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_mkldnn(), "layout is torch._mkldnn"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint4x2), "dtype torch.quint4x2"),
    ],
)
def test_tensors_without_bytes_to_store_are_rows_with_a_reason(path, make, reason):
    class Makes(nn.Module):
        def forward(self):
            return make()

    model = Makes()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(quantize|sparse).*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with pytest.warns(hookstore.CaptureWarning, match=reason), recording(model, path, layers=""):
            model()
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"]
        with pytest.raises(hookstore.MissingCaptureError, match=reason):
            run[""].activation[0, 0]


def test_vmap_is_refused_by_a_row(path):
    model = nn.Linear(2, 1)
    with pytest.warns(hookstore.CaptureWarning, match="functorch"), recording(model, path, layers=""):
        torch.vmap(model)(torch.ones(3, 2))
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"]


def test_nested_tensors_and_function_transforms_leave_the_users_call_alone(path):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    mask = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]).bool()
    linear_model = nn.Sequential(nn.Linear(3, 3), nn.Flatten())
    inputs = torch.ones(2, 2, 3)
    parameters = dict(linear_model.named_parameters())

    def loss(given):
        return torch.func.functional_call(linear_model, given, inputs).sum()

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        plain = encoder(torch.ones(2, 4, 8), src_key_padding_mask=mask)
        with recording(encoder, path, layers="*", phases="eval", kinds=("activation", "input")):
            assert torch.equal(encoder(torch.ones(2, 4, 8), src_key_padding_mask=mask), plain)
    expected = torch.func.grad(loss)(parameters)
    with (
        pytest.warns(hookstore.CaptureWarning, match="functorch tensor"),
        recording(linear_model, path.with_name("other"), kinds=BOTH),
    ):
        found = torch.func.grad(loss)(parameters)
        torch.autograd.functional.jacobian(linear_model, inputs, vectorize=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with hookstore.open(path.with_name("other")) as run:
        assert "skipped" in run.info().statuses


def test_function_modes_and_subclasses_do_not_see_our_work(path):
    from torch.overrides import TorchFunctionMode

    class Counts(TorchFunctionMode):
        def __init__(self):
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    class Strict(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function not in (torch.nn.functional.linear, torch.Tensor.sum):
                raise TypeError(f"{function} is not allowed")
            return super().__torch_function__(function, types, args, kwargs or {})

    model = nn.Linear(2, 2)
    seen = []
    for options in (None, {"layers": "", "kinds": ("activation", "gradient", "input", "parameter")}):
        with contextlib.ExitStack() as stack:
            if options:
                stack.enter_context(recording(model, path, **options))
            with Counts() as counts:
                model(torch.ones(1, 2)).sum().backward()
            model(torch.ones(1, 2).as_subclass(Strict)).sum()
        seen.append(counts.names)
    assert seen[0] == seen[1]
    with hookstore.open(path) as run:
        assert np.array_equal(run[""].activation[0, 0], model(torch.ones(1, 2)).detach().numpy())


def test_odd_containers(path):
    class Wrong(tuple):
        _fields = ("only", "two")

    @dataclass
    class Raises:
        value: torch.Tensor

        def __getattribute__(self, name):
            if name == "value":
                raise RuntimeError("no")
            return super().__getattribute__(name)

    class Odd(nn.Module):
        def forward(self, inputs):
            return {1: inputs, "1": inputs * 2, 1.5: inputs * 3, "1.5": inputs * 4}, Wrong((inputs, inputs, inputs)), Raises(inputs)

    model = Odd()
    with pytest.warns(hookstore.CaptureWarning, match="reading it raises RuntimeError"), recording(model, path, layers=""):
        model(torch.ones(1))
    with hookstore.open(path) as run:
        found = {leaf: values(run[""].activation, 0, 0, leaf=leaf)[0] for leaf in run[""].activation.leaves}
    assert found == {"0.1": 1, "0.~1": 2, "0.1%2e5": 3, "0.1%2e5~1": 4, "1.0": 1, "1.1": 1, "1.2": 1}


def test_tracing_and_export_leave_no_phantom_records(path):
    model = nn.Sequential(nn.Linear(2, 1))
    with recording(model, path) as recorder, recorder.at(epoch=0, batch=0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(model, torch.ones(3, 2), check_trace=False)  # its check calls the model for real, outside tracing
        torch.export.export(model, (torch.ones(3, 2),))
        recorder.flush()
        with hookstore.open(path) as run:
            assert run.manifest.num_rows == 0
        model(torch.ones(3, 2))


def test_conjugate_and_negative_bits_are_resolved(path):
    class Conjugate(nn.Module):
        def forward(self, inputs):
            return inputs.conj(), inputs.conj().imag

    model = Conjugate()
    with recording(model, path, layers=""):
        model(torch.tensor([1 + 2j, 3 - 4j]))
    with hookstore.open(path) as run:
        assert values(run[""].activation, 0, 0, leaf="0") == [1 - 2j, 3 + 4j]
        assert values(run[""].activation, 0, 0, leaf="1") == [-2.0, 4.0]


def test_dtype_that_changes_between_batches(path):
    model = nn.Linear(2, 2)
    inputs = torch.randn(3, 2)
    outputs = []
    with recording(model, path, layers="", kinds=BOTH) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=batch == 0):
                outputs.append(model(inputs))
            outputs[-1].float().sum().backward()
    with hookstore.open(path) as run:
        for batch, output in enumerate(outputs):
            assert torch.equal(run[""].activation.tensor(0, batch), output.detach())
            assert run[""].activation.tensor(0, batch).dtype == output.dtype
            assert run[""].gradient.tensor(0, batch).dtype == output.dtype


def test_cast_on_the_way_leaves_integers_alone(path):
    class Both(nn.Module):
        def forward(self, inputs):
            return inputs, inputs.long()

    model = Both()
    inputs = torch.tensor([1.0, 2.5, 65504.0, 3.1415926])
    with recording(model, path, layers="", dtype=torch.float16):
        model(inputs)
    with hookstore.open(path) as run:
        assert torch.equal(run[""].activation.tensor(0, 0, leaf="0"), inputs.half())
        assert torch.equal(run[""].activation.tensor(0, 0, leaf="1"), inputs.long())


def test_embedding_with_sparse_weight_gradient(path):
    model = nn.Embedding(4, 2, sparse=True)
    with recording(model, path, layers="", kinds=BOTH):
        (model(torch.tensor([1, 3, 1])) * torch.tensor([1.0, 10.0])).sum().backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == [[1.0, 10.0]] * 3


def test_default_device_and_dispatch_modes_do_not_reach_our_copies(path):
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Linear(2, 2)
    inputs = torch.randn(3, 2)
    with recording(model, path, layers="", kinds=BOTH), FlopCounterMode(display=False) as flops, torch.device("cpu"):
        output = model(inputs)
        output.sum().backward()
    counted = {name for counts in flops.get_flop_counts().values() for name in counts}
    assert not any("copy" in str(name) for name in counted)
    with hookstore.open(path) as run:
        assert torch.equal(run[""].activation.tensor(0, 0), output.detach())


def test_selective_checkpointing_that_saves_copies_gets_right_gradients(path):
    """A hook that cloned under this policy made training gradients wrong."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_context, operation, *_arguments, **_options):
        saves = operation in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.GELU())

        def forward(self, inputs):
            return checkpoint(
                self.block, inputs.clone(), use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
            )

    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    inputs = torch.randn(5, 3)
    plain(inputs).pow(2).sum().backward()
    with recording(model, path, layers="block.*", kinds=BOTH):
        model(inputs).pow(2).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with hookstore.open(path) as run:
        assert run.manifest.num_rows == 8


# Traces on the model -----------------------------------------------------------------------------------------------


def hook_counts(model):
    return [
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks_always_called,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ]


@pytest.mark.parametrize("how", ["normal", "exception", "without_with"])
def test_no_trace_on_the_model(path, how):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    before_counts = hook_counts(model)
    before_steps = set(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    if how == "without_with":
        recorder = recording(model, path, layers="*", kinds=("activation", "gradient", "input", "parameter"))
        model(torch.ones(1, 2)).sum().backward()
        assert sum(hook_counts(model)) > sum(before_counts)
        recorder.close()
        recorder.close()
    else:
        with (
            pytest.raises(ZeroDivisionError) if how == "exception" else warnings.catch_warnings(),
            recording(model, path, layers="*", kinds=("activation", "gradient", "input", "parameter")),
        ):
            model(torch.ones(1, 2)).sum().backward()
            if how == "exception":
                raise ZeroDivisionError
    assert hook_counts(model) == before_counts
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
    assert set(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) <= before_steps
    with hookstore.open(path) as run:
        assert run.kinds == ["activation", "gradient", "input", "parameter"]


def test_idle_steps_have_no_hooks_at_all(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    counts = {}
    with recording(model, path, layers="*", every=3) as recorder:
        for batch in recorder.batches(range(7), epoch=0):
            counts[batch] = sum(hook_counts(model))
            model(torch.ones(1, 2))
    assert {batch for batch, count in counts.items() if count} == {0, 3, 6}
    with hookstore.open(path) as run:
        assert run.batches(0) == [0, 3, 6]


def test_idle_steps_of_the_automatic_clock(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with recording(model, path, layers=["", "0"], kinds=("activation", "input"), every=2):
        for _ in range(5):
            model(torch.ones(1, 2))
    with hookstore.open(path) as run:
        for layer in run.layers:
            for kind in ("activation", "input"):
                assert run[layer][kind].rows["batch"].to_pylist() == [0, 2, 4]


def test_copies_of_a_hooked_model_are_inert_and_load_without_hookstore(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    inputs = torch.ones(1, 2)
    with recording(model, path, layers="*", kinds=("activation", "gradient", "input")) as recorder, recorder.at(epoch=0, batch=0):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
        assert b"hookstore" not in buffer.getvalue()
        for copied in copies:
            assert torch.equal(copied(inputs), copied(inputs))
            copied(inputs).sum().backward()
        recorder.flush()
        with hookstore.open(path) as run:
            assert run.manifest.num_rows == 0, "a copy recorded into the original's run"
        model(inputs)
    state = model.state_dict()
    assert set(state) == {"0.weight", "0.bias"}


def test_model_is_freed_while_it_is_recorded(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with recording(model, path, layers="*", kinds=("activation", "gradient", "input", "parameter")):
        model(torch.ones(1, 2)).sum().backward()
        gone = weakref.ref(model)
        gc.disable()
        try:
            del model
            assert gone() is None, "hooks and model hold each other in a cycle"
        finally:
            gc.enable()


def test_graphs_do_not_pile_up(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Flatten(0), nn.ReLU())

    class Marker:
        pass

    markers = []
    with recording(model, path, kinds=BOTH):
        for backwards in (True, True, False, False, True):
            output = model(torch.ones(3, 2))
            output.grad_fn.metadata["marker"] = marker = Marker()
            markers.append(weakref.ref(marker))
            if backwards:
                output.sum().backward()
            del output, marker
        assert sum(marker() is not None for marker in markers) == 0


def test_steps_count_the_optimizers_of_this_model(path):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, foreign = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other))
    with recording(model, path, layers=""):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            foreign.step()
    with hookstore.open(path) as run:
        assert run.manifest["step"].to_pylist() == [0, 1, 2]


def test_two_models_record_into_two_runs_at_once(tmp_path):
    models = [linear([2.0]), linear([20.0])]
    with recording(models[0], tmp_path / "g", layers=""), recording(models[1], tmp_path / "d", layers=""):
        for model in models:
            model(torch.ones(1, 1))
    for name, value in (("g", 2.0), ("d", 20.0)):
        with hookstore.open(tmp_path / name) as run:
            assert values(run[""].activation, 0, 0) == [[value]]


def test_symbolic_tracing_leaves_no_phantom_records_and_recording_logs_nothing(path, caplog, capfd):
    model = nn.Sequential(nn.Linear(2, 1))
    with recording(model, path, kinds=("activation", "gradient", "input")) as recorder, recorder.at(epoch=0, batch=0):
        torch.fx.symbolic_trace(model)
        model(torch.ones(3, 2)).sum().backward()
    assert capfd.readouterr() == ("", "")
    assert not [entry for entry in caplog.records if entry.levelname in ("WARNING", "ERROR")]
    with hookstore.open(path) as run:
        assert run.manifest["call"].to_pylist() == [0, 0, 0]
