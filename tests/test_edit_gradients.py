"""Clipped, reversed and scaled gradients: closed forms, and whatever a forward may do to its inputs."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import io
import math
import pickle
import threading
import types
import weakref

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from small import Does, Open, linear, loss_of, recording, tensors_of, values
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookstore
from hookstore.errors import CaptureWarning, OptionError, UnsupportedModelError
from hookstore.gradients import clip_gradient, reverse_gradient, scale_gradient


def model(inside=None):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh() if inside is None else inside, nn.Linear(4, 2))


def gradients(module, inputs):
    module.zero_grad()
    loss_of(module(inputs)).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def norm_of(tensors):
    return torch.stack([tensor.detach().abs().to(torch.float64).square().sum() for tensor in tensors]).sum().sqrt()


# Closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (2, 3, 4)])
def test_scale_and_reverse_multiply(shape, dtype):
    given = torch.randn(shape, dtype=dtype)
    for edit, factor in (
        (lambda module: scale_gradient(module, 0.25), 0.25),
        (lambda module: reverse_gradient(module, 2), -2.0),
        (reverse_gradient, -1.0),
    ):
        module = Does(lambda tensor: tensor * 3)
        with edit(module):
            tensor = torch.randn(shape, dtype=dtype, requires_grad=True)
            output = module(tensor)
            assert torch.equal(output, tensor * 3)
            output.backward(given)
        assert tensor.grad.dtype == dtype
        assert torch.equal(tensor.grad, given * 3 * factor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e9])
def test_clip_scales_to_the_joint_norm_of_all_inputs(dtype, max_norm):
    module = Does(lambda one, *, other: (one * 2).sum() * 0.5 + (other * one.sum()).sum())
    one, other = torch.randn(3, dtype=dtype), torch.randn(2, 2, dtype=dtype)
    plain = [one.clone().requires_grad_(), other.clone().requires_grad_()]
    module(plain[0], other=plain[1]).abs().backward()
    norm = norm_of([tensor.grad for tensor in plain])
    clipped = [one.clone().requires_grad_(), other.clone().requires_grad_()]
    clip_gradient(module, max_norm)
    module(clipped[0], other=clipped[1]).abs().backward()
    for before, after in zip(plain, clipped, strict=True):
        assert after.grad.dtype == dtype
        if max_norm >= norm:
            assert torch.equal(after.grad, before.grad)
        else:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            expected = before.grad.to(wide) * (max_norm / norm)
            assert torch.allclose(after.grad.to(wide), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    if max_norm < norm:
        assert norm_of([tensor.grad for tensor in clipped]).item() == pytest.approx(max_norm, rel=4 * torch.finfo(dtype).eps)


def test_the_parameters_of_the_module_keep_their_gradients_and_the_ones_before_it_do_not():
    whole, inputs = model(), torch.randn(5, 3)
    plain = gradients(whole, inputs)
    with scale_gradient(whole[2], -4.0):
        edited = gradients(whole, inputs)
    assert all(torch.equal(after, before) for before, after in zip(plain[2:], edited[2:], strict=True))
    assert all(torch.equal(after, before * -4) for before, after in zip(plain[:2], edited[:2], strict=True))
    assert all(torch.equal(after, before) for before, after in zip(plain, gradients(whole, inputs), strict=True))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_passes_unchanged(bad):
    tensor = torch.ones(3, requires_grad=True)
    module = Does(lambda one: one * 1)
    clip_gradient(module, 0.5)
    given = torch.tensor([1.0, bad, 2.0])
    module(tensor).backward(given)
    assert torch.equal(tensor.grad.nan_to_num(7), given.nan_to_num(7))


def test_squares_that_overflow_float32_are_clipped_all_the_same():
    tensor = torch.ones(2, requires_grad=True)
    module = Does(lambda one: one * 1)
    clip_gradient(module, 5.0)
    module(tensor).backward(torch.tensor([3e30, 4e30]))
    assert torch.allclose(tensor.grad, torch.tensor([3.0, 4.0]))


def test_a_sparse_gradient_counts_with_its_summed_values():
    weight = torch.ones(4, 1, requires_grad=True)
    module = Does(lambda table: functional.embedding(torch.tensor([1, 1, 2]), table, sparse=True))
    clip_gradient(module, 1.0)
    module(weight).backward(torch.tensor([[1.0], [2.0], [4.0]]))
    assert weight.grad.is_sparse
    assert torch.allclose(weight.grad.to_dense(), torch.tensor([[0.0], [0.6], [0.8], [0.0]]))


def test_an_absent_gradient_stays_absent_and_zero_times_one_is_zero():
    used, unused, fixed = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2)
    module = Does(lambda one, _two, three: one * three)
    for edit in (reverse_gradient(module, 0.0), clip_gradient(module, 1.0)):
        used.grad = None
        module(used, unused, fixed).sum().backward()
        assert unused.grad is None
        edit.remove()
    reverse_gradient(module, 0)
    used.grad = None
    module(used, unused, fixed).sum().backward()
    assert used.grad.tolist() == [0, 0]


def test_an_input_given_twice_counts_once_with_its_whole_gradient():
    tensor = torch.ones(1, requires_grad=True)
    module = Does(lambda one, two: one * 3 + two * 4 + (100 if one is two else 0))
    clip_gradient(module, 2.0)
    output = module(tensor, tensor)
    assert output.item() == 107
    output.backward()
    assert tensor.grad.item() == 2.0


def test_each_call_is_clipped_by_itself():
    tensor = torch.ones(1, requires_grad=True)
    module = Does(lambda one: one * 10)
    clip_gradient(module, 1.0)
    (module(tensor) + module(tensor) * 0.01).backward()
    assert tensor.grad.item() == pytest.approx(1.1)


def test_the_first_edit_gets_what_comes_out_of_the_module():
    def gradient(*edits):
        tensor, module = torch.ones(1, requires_grad=True), Does(lambda one: one * 10)
        for edit in edits:
            edit(module)
        module(tensor).backward()
        return tensor.grad.item()

    def clip(module):
        return clip_gradient(module, 3.0)

    def scale(module):
        return scale_gradient(module, 0.5)

    assert gradient(clip, scale) == 1.5
    assert gradient(scale, clip) == 3.0
    assert gradient(reverse_gradient, clip, scale) == -1.5
    assert gradient(scale, scale) == 2.5


def test_edits_end_one_by_one_in_any_order():
    tensor, module = torch.ones(1, requires_grad=True), Does(lambda one: one * 10)

    def gradient():
        tensor.grad = None
        module(tensor).backward()
        return tensor.grad.item()

    first, second = scale_gradient(module, 2), scale_gradient(module, 3)
    assert gradient() == 60
    first.remove()
    first.remove()
    assert gradient() == 30
    with first:
        pass
    second.remove()
    assert gradient() == 10
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not module._forward_hooks_always_called
    with pytest.raises(KeyError), scale_gradient(module, 5):
        assert gradient() == 50
        raise KeyError
    assert gradient() == 10


def test_a_callable_is_asked_at_each_call():
    numbers = iter([1.0, 2.0, torch.tensor(3.0)])
    tensor, module = torch.ones(1, requires_grad=True), Does(lambda one: one * 1)
    reverse_gradient(module, lambda: next(numbers))
    outputs = [module(tensor), module(tensor), module(tensor)]
    outputs[1].backward()
    assert tensor.grad.item() == -2
    outputs[0].backward()
    outputs[2].backward()
    assert tensor.grad.item() == -6


def test_an_edit_of_a_wrapper_is_one_of_what_it_holds():
    inner = nn.Linear(1, 1)
    reverse_gradient(nn.DataParallel(inner))
    assert inner._forward_pre_hooks


# What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), 10**400, True, "1", None, 1j, torch.tensor(1j), torch.ones(2), torch.ones(1)]
)
def test_numbers_that_cannot_be_used_are_refused(number):
    module = nn.Linear(1, 1)
    for make, option in ((clip_gradient, "max_norm"), (reverse_gradient, "alpha"), (scale_gradient, "factor")):
        with pytest.raises(OptionError, match=f"{option}: expected a finite number.*got") as caught:
            make(module, number)
        assert caught.value.option == option
        with make(module, lambda: number), pytest.raises(OptionError, match=f"{option}: .* from the callable"):
            module(torch.ones(1, 1, requires_grad=True))
    assert not module._forward_pre_hooks


def test_a_negative_norm_and_what_is_no_scaler_are_refused():
    with pytest.raises(OptionError, match=r"max_norm: expected a finite number, not below 0, got -1"):
        clip_gradient(nn.Linear(1, 1), -1)
    with pytest.raises(OptionError, match=r"scaler: expected a torch\.amp\.GradScaler, got 2"):
        clip_gradient(nn.Linear(1, 1), 1, scaler=2)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (print, "expected a torch.nn.Module"),
        (nn.ModuleList([nn.Linear(1, 1)]), "ModuleList, which is never called"),
        (nn.ModuleDict(), "ModuleDict, which is never called"),
    ],
)
def test_modules_that_cannot_be_hooked_are_refused(module, message):
    with pytest.raises(UnsupportedModelError, match=message):
        reverse_gradient(module)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:FutureWarning", "ignore:.*jit.*deprecated")
def test_a_traced_module_is_refused_and_a_trace_has_no_edit():
    module = nn.Linear(2, 2)
    reverse_gradient(module)
    traced = torch.jit.trace(module, torch.ones(1, 2, requires_grad=True))
    with pytest.raises(UnsupportedModelError, match="run no Python hooks"):
        reverse_gradient(traced)
    tensor = torch.ones(1, 2, requires_grad=True)
    traced(tensor).sum().backward()
    assert torch.equal(tensor.grad[0], module.weight.detach().sum(0))
    exported = torch.export.export(module, (torch.ones(1, 2),))
    assert "Hookstore" not in str(exported)
    assert "autograd" not in str(torch.fx.symbolic_trace(nn.Sequential(module)).graph)


def test_function_transforms_are_refused():
    module = nn.Linear(2, 2)
    reverse_gradient(module)
    with pytest.raises(UnsupportedModelError, match="Linear whose gradient is edited was called inside a function transform"):
        torch.func.grad(lambda tensor: module(tensor).sum())(torch.ones(2))


@pytest.mark.filterwarnings("ignore:.*jit.script:FutureWarning")
@pytest.mark.parametrize("is_training", [True, False])
def test_function_transforms_that_hide_a_gradient_are_refused(is_training):
    """What they wrap requires grad, and the wrapper does not say so."""
    module = nn.Linear(3, 3).train(is_training)
    reverse_gradient(module)
    inputs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(UnsupportedModelError, match="inside a function transform"):
        torch.vmap(module)(inputs * 1)
    with pytest.raises(UnsupportedModelError, match="inside a function transform"):
        torch.func.jvp(module, (inputs * 1,), (torch.ones(2, 3),))
    module.eval()
    assert torch.vmap(module)(inputs.detach()).shape == (2, 3)  # no gradient leaves it


@pytest.mark.filterwarnings("ignore:.*jit.script:FutureWarning")
def test_forward_mode_is_refused_where_there_are_tangents():
    module, tensor = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    reverse_gradient(module)
    with torch.autograd.forward_ad.dual_level():
        module(tensor)
        with pytest.raises(UnsupportedModelError, match="forward-mode differentiation"):
            module(torch.autograd.forward_ad.make_dual(tensor, torch.ones(2)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_strided_layout_are_refused():
    module = Does(lambda tensor: tensor * 3)
    reverse_gradient(module)
    with pytest.raises(UnsupportedModelError, match="Does whose gradient is edited was called with a nested tensor of strided layout"):
        module(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True))
    tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True, layout=torch.jagged)
    module(tensor).values().sum().backward()
    assert tensor.grad.values().tolist() == [-3] * 5
    module.function = lambda tensor: tensor
    for given in (tensor, tensor * 1):
        with pytest.raises(UnsupportedModelError, match="returns a nested tensor as it came in"):
            module(given)
    module.function = lambda tensor: tensor.mul_(2)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        module(tensor)


def test_a_module_without_an_input_that_requires_grad_is_told_of_once():
    whole = model()
    edit = reverse_gradient(whole)
    with torch.no_grad():
        whole(torch.ones(1, 3))
    with pytest.warns(CaptureWarning, match="Sequential whose gradient is to be edited was called with no tensor that requires grad"):
        whole(torch.ones(1, 3))
    whole(torch.ones(1, 3)).sum().backward()
    edit.remove()
    reverse_gradient(whole)
    whole(torch.ones(1, 3, requires_grad=True))
    whole(torch.ones(1, 3))


# Nested values ----------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "one two")


@dataclasses.dataclass(frozen=True)
class Frozen:
    one: torch.Tensor
    two: object = None


NESTED = {
    "tuple": lambda one, two: (one, two),
    "list": lambda one, two: [one, [two]],
    "dict": lambda one, two: {"one": one, 2: (two, None)},
    "ordered": lambda one, two: collections.OrderedDict(one=one, two=two),
    "default": lambda one, two: collections.defaultdict(list, one=one, two=[two]),
    "namedtuple": Pair,
    "dataclass": Open,
    "frozen": Frozen,
    "returned": lambda one, two: torch.return_types.max((one, two)),
    "userdict": lambda one, two: collections.UserDict(one=one, two=two),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("is_keyword", [False, True])
def test_tensors_inside_containers_are_edited(kind, is_keyword):
    one, two, fixed = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True), torch.ones(1)
    value = NESTED[kind](one, two)
    fields = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else None

    def use(given, fixed):
        assert type(given) is type(value)
        assert given is not value
        parts = tensors_of(vars(given) if dataclasses.is_dataclass(given) else given)
        return sum(part.sum() * 3 for part in parts) * fixed

    module = Does(use)
    clip_gradient(module, 1.0)
    (module(given=value, fixed=fixed) if is_keyword else module(value, fixed)).sum().backward()
    assert torch.allclose(one.grad, torch.full((2,), 5**-0.5))
    assert torch.allclose(two.grad, torch.full((3,), 5**-0.5))
    left = tensors_of(vars(value) if fields else value)
    assert left[0] is one
    assert left[1] is two


def test_a_packed_sequence_is_edited():
    tensor = torch.randn(2, 3, 1, requires_grad=True)
    recurrent = nn.GRU(1, 2, batch_first=True)
    plain = gradient_of_packed(recurrent, tensor)
    with reverse_gradient(recurrent, 2.0):
        assert torch.equal(gradient_of_packed(recurrent, tensor), plain * -2)


def gradient_of_packed(recurrent, tensor):
    tensor.grad = None
    recurrent(pack_padded_sequence(tensor * 1, [3, 2], batch_first=True))[1].sum().backward()
    return tensor.grad


def test_a_container_that_the_module_changes_is_changed():
    """What the module put in has the edit, and what the caller put in has none."""

    def use(given, items):
        given["x"] = given["x"] * 2
        given["y"] = given.pop("gone") * 3
        items.append(items[0].mul_(5))
        return given

    weight = torch.ones(1, requires_grad=True)
    tensors = [weight * 1, weight * 1, weight * 1, weight * 1]
    given, items = {"x": tensors[0], "gone": tensors[1], "left": tensors[3]}, [tensors[2]]
    module = Does(use)
    scale_gradient(module, -1.0)
    output = module(given, items)
    assert output is given
    assert list(given) == ["x", "left", "y"]
    assert items[0] is items[1] is tensors[2]
    assert given["left"] is tensors[3]
    (given["x"] + given["y"] + items[1] + given["left"] * 100).backward()
    assert weight.grad.item() == 100 - (2 + 3 + 5)


@pytest.mark.parametrize("value", [lambda tensor: [tensor], lambda tensor: {"a": tensor}, Open])
def test_what_a_module_leaves_in_a_container_that_it_returns_has_no_edit(value):
    weight, module = torch.ones(1, requires_grad=True), nn.Identity()
    scale_gradient(module, -1.0)
    tensor = weight * 1
    given = value(tensor)
    assert module(given) is given
    left = tensors_of(vars(given) if dataclasses.is_dataclass(given) else given)[0]
    assert left is tensor
    left.sum().backward()
    assert weight.grad.item() == 1


class Holder:
    def __init__(self, tensor):
        self.inside = {"deep": tensor}


class Tight(tuple):
    def __new__(cls, one):
        return super().__new__(cls, (one,))


@dataclasses.dataclass
class WithMore:
    number: int

    @classmethod
    def of(cls, tensor):
        made = cls(1)
        made.more = [tensor]
        return made


class Named(dict):
    @classmethod
    def of(cls, tensor):
        made = cls(number=1)
        made.more = tensor
        return made


HIDING = {
    "object": Holder,
    "set": lambda tensor: {tensor},
    "deque": lambda tensor: collections.deque([tensor]),
    "tuple": Tight,
    "attribute of a dataclass": WithMore.of,
    "attribute of a dict": Named.of,
}


@pytest.mark.parametrize("value", HIDING.values(), ids=HIDING)
def test_tensors_where_they_cannot_be_edited_are_refused(value):
    module = Does(lambda *_args, other: other)
    scale_gradient(module, 2)
    with pytest.raises(UnsupportedModelError, match="argument .*of the module is a .*, in tuples|pass the tensors themselves"):
        module(value(torch.ones(1, requires_grad=True)), other=torch.ones(1))
    module(value(torch.ones(1)), other=torch.ones(1, requires_grad=True))


def test_what_an_output_of_another_kind_holds_is_translated():
    weight = torch.ones(2, requires_grad=True)
    tensor, module = weight * 1, Does(lambda one: types.SimpleNamespace(value=one, same=[1]))
    scale_gradient(module, -1)
    output = module(tensor)
    with pytest.raises(RuntimeError, match="HookstoreOutput is a view"):
        output.value.add_(1)
    (output.value + tensor * 100).sum().backward()
    assert weight.grad.tolist() == [99, 99]


def test_parts_of_a_chunked_tensor_are_edited_and_stay_without_edits_in_place():
    weight = torch.ones(4, requires_grad=True)
    tensor, module = (weight * 1).chunk(2)[0], Does(lambda one: one)
    scale_gradient(module, -1)
    (module(tensor) * 2 + tensor).sum().backward()
    assert weight.grad.tolist() == [-1, -1, 0, 0]
    module = Does(lambda one: one.mul_(2))
    scale_gradient(module, -1)
    with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
        module((weight * 1).chunk(2)[0])


def test_a_clipped_replica_of_data_parallel_is_refused():
    module = nn.Linear(1, 1)
    module._is_replica = True
    tensor = torch.ones(1, 1, requires_grad=True)
    with scale_gradient(module, 2):
        module(tensor)
    with clip_gradient(module, 2), pytest.raises(UnsupportedModelError, match="called in replicas by DataParallel"):
        module(tensor)


def test_a_list_that_holds_itself_is_refused():
    items = [torch.ones(1, requires_grad=True)]
    items.append(items)
    module = Does(lambda given: given[0])
    scale_gradient(module, 2)
    with pytest.raises(UnsupportedModelError, match="or holds itself"):
        module(items)


# Other ways to run a model ----------------------------------------------------------------------------------------


def parts(factor):
    """A model in two halves, and the gradients that it has with an edit of the second one, from those without."""
    whole = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    plain = gradients(whole, inputs)
    return whole, inputs, [gradient * factor for gradient in plain[:2]] + plain[2:]


class Checkpointed(nn.Module):
    def __init__(self, inside, **options):
        super().__init__()
        self.inside, self.options = inside, options

    def forward(self, inputs):
        return checkpoint(self.inside, inputs, **self.options)


def save_views(_context, operator, *_args, **_kwargs):
    saved = (torch.ops.aten.detach.default, torch.ops.aten.view.default, torch.ops.aten.clone.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_forward_that_checkpointing_repeats_has_the_edits_of_then_if_it_is_reentrant(is_reentrant):
    module, leaf = Does(lambda tensor: tensor * 2), torch.ones(1, requires_grad=True)
    with scale_gradient(module, -3.0):
        output = checkpoint(module, leaf, use_reentrant=is_reentrant)
    output.backward()
    assert leaf.grad.item() == (2 if is_reentrant else -6)


@pytest.mark.parametrize("where", ["inside", "around", "a part"])
@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(save_views)},
    ],
    ids=["plain", "reentrant", "selective"],
)
def test_a_checkpointed_module_is_edited_once(options, where):
    whole, inputs, expected = parts(-4.0)
    inside = whole[1]
    whole[1] = Checkpointed(inside, **options)
    with scale_gradient({"inside": inside, "around": whole[1], "a part": inside[0]}[where], -4.0):
        assert all(torch.equal(found, wanted) for found, wanted in zip(gradients(whole, inputs), expected, strict=True))


def test_in_place_operations_under_checkpointing():
    def run(module):
        weight = torch.full((3,), 2.0, requires_grad=True)
        tensor = weight * 1
        output = checkpoint(lambda given: module(given * 1).square(), tensor, use_reentrant=False)
        output.sum().backward()
        return weight.grad

    module = Does(lambda tensor: functional.relu_(tensor) * 3)
    plain = run(module)
    scale_gradient(module, -0.5)
    assert torch.equal(run(module), plain * -0.5)


def test_the_bits_of_the_forward_are_those_without_an_edit():
    for inside in (nn.Tanh(), nn.Identity(), nn.ReLU(inplace=True), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)):
        whole, inputs = nn.Linear(3, 4), torch.randn(5, 3)
        hidden = whole(inputs)
        given = (hidden,) * 3 if isinstance(inside, nn.MultiheadAttention) else (hidden,)
        expected = tensors_of(inside(*given))
        hidden = whole(inputs)
        given = (hidden,) * 3 if isinstance(inside, nn.MultiheadAttention) else (hidden,)
        with clip_gradient(inside, 1.0):
            assert all(torch.equal(one, other) for one, other in zip(tensors_of(inside(*given)), expected, strict=True))


@pytest.mark.parametrize(
    "edit", [lambda module: scale_gradient(module, -3.0), lambda module: clip_gradient(module, 1e-3)], ids=["scale", "clip"]
)
def test_several_backwards_over_one_forward(edit):
    tensor, module = torch.randn(3, requires_grad=True), Does(lambda one: one.square())
    edit(module)
    output = module(tensor).sum()
    output.backward(retain_graph=True)
    first = tensor.grad.clone()
    output.backward()
    assert torch.equal(tensor.grad, first * 2)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_the_edit_has_a_derivative(max_norm):
    """Gradients of an edited gradient, against the formula as torch differentiates it; what leaves the module in this backward is edited as well."""
    start = torch.randn(4, dtype=torch.float64)

    def of(edit):
        tensor = start.clone().requires_grad_()
        module = Does(lambda one: one**3)
        edit(module)
        (gradient,) = torch.autograd.grad(module(tensor).sum(), tensor, create_graph=True)
        return torch.autograd.grad((gradient * torch.arange(4.0)).sum(), tensor)[0]

    def clipped(gradient):
        return gradient * max_norm / gradient.norm() if gradient.norm() > max_norm else gradient

    tensor = start.clone().requires_grad_()
    expected = torch.autograd.grad((clipped(3 * tensor**2) * torch.arange(4.0)).sum(), tensor)[0]
    assert torch.allclose(of(lambda module: clip_gradient(module, max_norm)), clipped(expected))
    assert torch.allclose(of(lambda module: reverse_gradient(module, 0.5)), 0.25 * 6 * start * torch.arange(4.0))


def test_a_complex_gradient_that_is_not_clipped_passes_to_the_bit():
    module = Does(lambda tensor: tensor + 0)
    clip_gradient(module, 1e9)
    given = torch.tensor([complex(-0.0, -1.0), complex(0.0, -0.0), complex(2.0, 1.0)])
    for gradient in (given, torch.tensor([complex(1.0, math.inf), complex(-0.0, 1.0), complex(0.0, 0.0)])):
        tensor = torch.zeros(3, dtype=torch.complex64, requires_grad=True)
        module(tensor).backward(gradient)
        assert torch.equal(torch.view_as_real(tensor.grad).view(torch.int32), torch.view_as_real(gradient).view(torch.int32))


def test_sparse_tensors_without_views_are_refused():
    module = Does(lambda tensor: tensor)
    scale_gradient(module, 2.0)
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(UnsupportedModelError, match="a sparse leaf"):
        module(sparse.clone().requires_grad_())
    with pytest.raises(UnsupportedModelError, match="returns a sparse_coo tensor as it came in"):
        module(sparse.clone().requires_grad_() * 2)


def test_the_derivative_of_a_clipped_gradient_of_zeros_is_none_of_nan():
    tensor, module = torch.zeros(2, requires_grad=True), Does(lambda one: one**3)
    clip_gradient(module, 0.5)
    (gradient,) = torch.autograd.grad(module(tensor).sum(), tensor, create_graph=True)
    assert torch.autograd.grad(gradient.sum(), tensor)[0].tolist() == [0, 0]


def test_autocast_keeps_every_dtype():
    whole, inputs, expected = parts(-2.0)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(whole, inputs)
        with scale_gradient(whole[1], -2.0):
            seen = []
            handle = whole[1].register_forward_hook(lambda _module, args, output: seen.append((args[0].dtype, output.dtype)))
            edited = gradients(whole, inputs)
            handle.remove()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert all(
        torch.equal(found, before * (-2 if position < 2 else 1)) for position, (found, before) in enumerate(zip(edited, plain, strict=True))
    )
    assert all(found.dtype == wanted.dtype for found, wanted in zip(edited, expected, strict=True))


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_has_the_norm_meant_for_gradients_without_the_scale(is_enabled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_enabled)
    tensor, module = torch.ones(4, requires_grad=True), Does(lambda one: one * 3)
    clip_gradient(module, 2.0, scaler=scaler)
    for scale in (1024.0, 1024.0, 64.0):
        tensor.grad = None
        if scale == 64 and is_enabled:
            scaler.update(64.0)
        scaler.scale(module(tensor).sum()).backward()
        assert tensor.grad.tolist() == [scale if is_enabled else 1.0] * 4


def test_an_overflow_still_reaches_the_scaler():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    module = Does(lambda one: one * torch.tensor([float("inf"), 1.0]))
    clip_gradient(module, 1.0, scaler=scaler)
    scaler.scale(module(weight * 1).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1]
    assert scaler.get_scale() == 1.0


def test_hooks_of_others_see_the_gradient_before_the_edit_inside_the_module_and_after_it_outside():
    seen = {}
    module = Does(lambda one: one * 10)
    module.register_full_backward_hook(lambda _module, inputs, _outputs: seen.update(inside=inputs[0].item()))
    scale_gradient(module, 0.5)
    leaf = torch.ones(1, requires_grad=True)
    tensor = leaf * 1
    tensor.register_hook(lambda gradient: seen.update(outside=gradient.item()))
    tensor.retain_grad()
    module(tensor).backward()
    assert seen == {"inside": 10, "outside": 5}
    assert tensor.grad.item() == 5


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "copy", "pickle"]
)
def test_a_copy_has_no_edit_of_its_own(duplicate):
    module = linear([2.0])
    edit = reverse_gradient(module)
    copied = duplicate(module)
    tensor = torch.ones(1, 1, requires_grad=True)
    copied(tensor).backward()
    is_same_hooks = copied._forward_hooks is module._forward_hooks
    assert tensor.grad.item() == (-2 if is_same_hooks else 2)
    edit.remove()
    stored = io.BytesIO()
    torch.save(copied, stored)


def test_threads_have_calls_of_their_own():
    module, failed = Does(lambda one: one * 2), []
    scale_gradient(module, -1.0)

    def run(number):
        for _ in range(50):
            leaf = torch.ones(number, requires_grad=True)
            module(leaf * 1).sum().backward()
            if leaf.grad.tolist() != [-2.0] * number:
                failed.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_module_that_calls_itself():
    module = Does(lambda one, depth: one * 2 if depth == 0 else module(one, depth - 1))
    scale_gradient(module, -3.0)
    leaf = torch.ones(1, requires_grad=True)
    module(leaf * 1, 2).backward()
    assert leaf.grad.item() == -54


@pytest.mark.parametrize("by", ["hook", "edit"])
def test_an_inner_call_that_a_hook_breaks_off_leaves_the_outer_one_its_edit(by):
    class Inner(nn.Module):
        def forward(self, tensor, depth=0):
            if depth:
                return tensor
            with contextlib.suppress(KeyError, OptionError):
                self(tensor, 1)
            return tensor.mul_(3)

    module = Inner()
    scale_gradient(module, 0.5)
    if by == "hook":

        def refuse(_module, args):
            if len(args) > 1:
                raise KeyError("not twice")

        module.register_forward_pre_hook(refuse, prepend=True)
        factor = 0.5
    else:
        factors = iter([2.0, math.nan])
        scale_gradient(module, lambda: next(factors))
        factor = 1.0
    leaf = torch.ones(2, requires_grad=True)
    tensor = leaf * 1
    module(tensor)
    tensor.sum().backward()
    assert leaf.grad.tolist() == [3 * factor] * 2


def test_nothing_is_kept_of_a_call():
    module = nn.ReLU(inplace=True)
    edit = clip_gradient(module, 1.0)
    leaf = torch.ones(3, requires_grad=True)
    tensor = leaf * 1
    kept = weakref.ref(tensor)
    output = module(tensor)
    del tensor, output
    gc.collect()
    assert kept() is None
    kept = weakref.ref(module)
    del module, edit
    gc.collect()
    assert kept() is None


def test_a_call_leaves_no_garbage():
    """Cycles would keep the inputs of each call, which on a device is memory, until Python collects garbage."""
    module = nn.ReLU(inplace=True)
    edit = clip_gradient(module, 1.0)
    leaf = torch.ones(3, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        tensor = leaf * 1
        kept = [weakref.ref(tensor)]
        output = module(tensor)
        kept.append(weakref.ref(output))
        output.sum().backward()
        del tensor, output
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()
    edit.remove()


def test_edits_of_nested_modules_act_from_the_inside_out():
    inner = nn.Identity()
    outer = nn.Sequential(inner)
    scale_gradient(outer, 0.5)
    clip_gradient(inner, 3.0)
    leaf = torch.ones(1, requires_grad=True)
    tensor = leaf * 1
    output = outer(tensor)
    (output * 10 + tensor * 100).backward()
    assert leaf.grad.item() == 101.5


# Recording --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_edited_first", [False, True])
@pytest.mark.parametrize(("inside", "share"), [("linear", 6.0), ("identity", 3.0), ("inplace", 6.0), ("flatten", 3.0)])
def test_a_recording_shows_the_gradient_before_the_edit_and_after_it(tmp_path, inside, share, is_edited_first):
    module = {"linear": linear([2.0]), "identity": nn.Identity(), "inplace": Does(lambda one: one.mul_(2)), "flatten": nn.Flatten()}[inside]
    whole = nn.Sequential(linear([1.0]), module, linear([3.0]))
    inputs = torch.ones(1, 1)
    options = {"layers": ["0", "1", "2"], "kinds": ["activation", "gradient", "input", "input_gradient"]}
    edit = scale_gradient(module, -10.0) if is_edited_first else None
    with recording(whole, tmp_path / "run", **options):
        edit = edit or scale_gradient(module, -10.0)
        whole(inputs).sum().backward()
    edit.remove()
    assert whole[0].weight.grad.item() == -10 * share
    with hookstore.open(tmp_path / "run") as run:
        assert run.manifest.filter(run.manifest["status"].is_valid()).num_rows
        assert values(run["2"].input_gradient, 0, 0) == [[3.0]]
        assert values(run["1"].gradient, 0, 0) == [[3.0]]
        assert values(run["1"].input_gradient, 0, 0) == [[share]]
        assert values(run["0"].gradient, 0, 0) == [[-10 * share]]
        assert values(run["1"].input, 0, 0) == values(run["0"].activation, 0, 0) == [[1.0]]
        assert values(run["1"].activation, 0, 0) == [[share / 3]]


# Domain-adversarial training --------------------------------------------------------------------------------------


def domain(mean, *, is_labelled):
    """Of two numbers the first tells the label in both domains, the second in the labelled one alone, and it tells the domains apart."""
    label = torch.randint(0, 2, (200,)).float()
    side = label * 2 - 1
    return torch.stack([side, side * is_labelled + mean], 1) + 0.5 * torch.randn(200, 2), label


def accuracy(output, wanted):
    return ((output[:, 0] > 0) == (wanted > 0.5)).float().mean().item()


def train_on_two_domains(seed, *, is_reversed):
    """Return how well labels are told in the domain that has none in training, and how well the domains are told apart."""
    torch.manual_seed(seed)
    features, labels, domains = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)
    (source, label), (target, target_label) = domain(2.0, is_labelled=True), domain(-2.0, is_labelled=False)
    both, is_source = torch.cat([source, target]), torch.cat([torch.ones(200), torch.zeros(200)])
    of_features = [*features.parameters(), *labels.parameters()]
    optimizer = torch.optim.SGD([{"params": of_features, "lr": 0.1}, {"params": domains.parameters(), "lr": 0.3, "weight_decay": 0.1}])
    loss_fn, progress = functional.binary_cross_entropy_with_logits, 0.0
    edit = reverse_gradient(domains, lambda: 2 / (1 + math.exp(-10 * progress)) - 1) if is_reversed else None
    for step in range(300):
        progress = step / 300
        hidden = features(both)
        optimizer.zero_grad()
        (loss_fn(labels(hidden[:200])[:, 0], label) + loss_fn(domains(hidden)[:, 0], is_source)).backward()
        optimizer.step()
    if edit is not None:
        edit.remove()
    with torch.no_grad():
        return accuracy(labels(features(target)), target_label), accuracy(domains(features(both)), is_source)


@pytest.mark.usefixtures("one_thread")
def test_a_domain_adversarial_training_needs_the_reversal():
    with_it, without_it = train_on_two_domains(0, is_reversed=True), train_on_two_domains(0, is_reversed=False)
    assert with_it[0] > 0.85
    assert without_it[0] < 0.75
    assert with_it[1] < 0.65
    assert without_it[1] > 0.9
