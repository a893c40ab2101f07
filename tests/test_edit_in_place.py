"""Edited gradients of modules that edit their inputs in place, keep them, or return them or views of them."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from small import Does, tensors_of
from torch import nn
from torch.nn import functional

from hookstore.errors import UnsupportedModelError
from hookstore.gradients import scale_gradient


class Explicit(torch.autograd.Function):
    """Triples and reverses the gradient, of a tensor with memory of its own."""

    @staticmethod
    def forward(_ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * -3


def relu_twice(tensor):
    return functional.relu_(tensor), tensor


def add_one(tensor):
    tensor += 1
    return tensor


def edit_part(tensor):
    tensor.view(-1)[0:2].mul_(5)
    return tensor * 2


def edit_after_view(tensor):
    view = tensor.t()
    tensor.mul_(3)
    return view


def use_and_edit(tensor):
    doubled = tensor * 2
    return doubled + tensor.add_(1)


def edit_into_dict(tensor):
    return {"a": tensor.mul_(2), "b": [tensor.view(-1)], "c": "text"}


PLACES = {"whole": lambda weight: weight * 2, "row": lambda weight: (weight * 2)[1:3], "transposed": lambda weight: (weight * 2)[:2].t()}


@pytest.mark.parametrize("afterwards", ["nothing", "output", "input"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "function",
    [functional.relu_, relu_twice, add_one, edit_part, edit_after_view, use_and_edit, edit_into_dict],
    ids=lambda function: function.__name__,
)
def test_a_module_may_edit_its_input_in_place(function, place, afterwards):
    """The caller's tensor, its views and what is returned of it have the values and gradients that they would have."""
    start = torch.randn(3, 2)

    def run(before_call, module):
        weight = start.clone().requires_grad_()
        tensor = PLACES[place](weight)
        loss = (tensor * 7).sum()  # a use before the edit is none of the module's
        tensor = before_call(tensor)
        view = tensor[0]
        output = module(tensor)
        returned = tensors_of(output)
        if afterwards == "output":
            returned[0].add_(2)
        if afterwards == "input":
            tensor.add_(2)
        loss = (
            loss
            + sum((position + 2) * (one * one).sum() for position, one in enumerate(returned))
            + (tensor * tensor).sum() * 11
            + view.sum() * 13
        )
        loss.backward()
        return loss.detach(), weight.grad, [one is tensor for one in returned]

    edited = Does(function)
    scale_gradient(edited, -3.0)
    try:
        plain = run(lambda tensor: tensor, Does(function))
        expected = run(Explicit.apply, Does(function))
    except RuntimeError as error:  # what cannot be done without the edit cannot be done with it
        with pytest.raises(RuntimeError, match=str(error)[:20].replace("(", r"\(")):
            run(lambda tensor: tensor, edited)
        return
    loss, gradient, identities = run(lambda tensor: tensor, edited)
    assert torch.equal(loss, plain[0])
    assert identities == plain[2]
    assert torch.allclose(gradient, expected[1])


def test_an_edit_in_place_of_a_part_reaches_the_base_of_the_input():
    """Gradients of what lies beside the input in its base pass by the module."""
    start = torch.randn(4)

    def run(module, *, is_explicit):
        weight = start.clone().requires_grad_()
        base = weight * 1
        view, tensor = base.view(2, 2), base[:2]
        if is_explicit:
            base = torch.cat([Explicit.apply(base[:2]), base[2:]])
            view, tensor = base.view(2, 2), base[:2]
        module(tensor)
        (base.square().sum() + tensor.sum() * 3 + view[1].sum() * 5).backward()
        return weight.grad

    edited = Does(lambda tensor: tensor.mul_(4))
    scale_gradient(edited, -3.0)
    assert torch.allclose(run(edited, is_explicit=False), run(Does(lambda tensor: tensor.mul_(4)), is_explicit=True))


PASS = [nn.Identity(), nn.Flatten(), nn.Dropout().eval(), nn.Sequential(nn.Identity()), Does(lambda tensor: (tensor, tensor.t(), [tensor]))]


@pytest.mark.parametrize("module", PASS, ids=lambda module: type(module).__name__)
def test_what_is_passed_on_has_the_edit_and_the_input_does_not(module):
    weight = torch.randn(2, 3, requires_grad=True)
    tensor = weight * 1
    with scale_gradient(module, -3.0):
        returned = tensors_of(module(tensor))
    assert all(one.data_ptr() == tensor.data_ptr() for one in returned)
    (sum(one.sum() for one in returned) + tensor.sum() * 100).backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 100.0 - 3 * len(returned)))
    if len(returned) > 1:
        assert returned[0] is returned[2]


@pytest.mark.parametrize("module", PASS, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("edits_input", [False, True])
def test_edits_in_place_of_what_was_passed_on_are_refused(module, edits_input):
    tensor = torch.randn(2, 3, requires_grad=True) * 1
    with scale_gradient(module, -3.0):
        output = tensors_of(module(tensor))[0]
    with pytest.raises(RuntimeError, match="HookstoreOutput is a view and"):
        (tensor if edits_input else output).add_(1)
        output.sum().backward()


def test_a_leaf_is_not_edited_in_place():
    module = Does(functional.relu_)
    scale_gradient(module, 2)
    for leaf in (torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True).view(2, 1)):
        with pytest.raises(RuntimeError, match="HookstoreScaledGradient is a view and is being modified inplace"):
            module(leaf)


@pytest.mark.parametrize("num_edits", [0, 1, 2, 3])
def test_the_base_of_a_view_that_the_module_edits_may_be_edited_any_number_of_times(num_edits):
    module = Does(lambda tensor: tensor.mul_(3))
    scale_gradient(module, 0.5)
    leaf = torch.ones(3, requires_grad=True)
    base = leaf * 1
    output = module(base[1:])
    for _ in range(num_edits):
        base.mul_(2)
    output.sum().backward()
    assert leaf.grad.tolist() == [0, *[1.5 * 2**num_edits] * 2]


def random_step(chance, tensors):
    """Edit one of some tensors in place, or add a view of it or a new tensor."""
    tensor = chance.choice(tensors)
    kind = chance.choice((0, 0, 1, 2, 2, 2, 3, 4))
    if kind == 0:
        tensor.mul_(chance.choice([2.0, 0.5]))
    elif kind == 1:
        tensor.sin_()
    elif kind == 2:
        tensors.append(tensor[1:] if len(tensor) > 2 else tensor.view_as(tensor))
    elif kind == 3:
        tensors.append(tensor * chance.choice([3.0, -1.0]))
    else:
        tensor[:1].add_(1.0)


def random_gradients(seed, *, is_edited):
    """Run a random program around a module that is one itself; return the gradients of its leaves."""
    chance = random.Random(seed)
    leaves = [torch.linspace(0.1, 1.0, 5).requires_grad_() for _ in range(2)]

    def body(*inputs):
        inside = [*inputs]
        for _ in range(chance.randrange(4)):
            random_step(chance, inside)
        return tuple(chance.choice(inside) for _ in range(chance.randrange(1, 3)))

    inner = Does(body)
    module = (
        inner
        if chance.random() < 0.6
        else Does(lambda *inputs: inner(*(tensor * 1 if chance.random() < 0.3 else tensor for tensor in inputs)))
    )
    if is_edited:
        for _ in range(chance.randrange(1, 3)):
            scale_gradient(inner, 1.0)
        if module is not inner:
            scale_gradient(module, 1.0)
    else:
        chance.randrange(1, 3)
    outside = [leaf * 1 for leaf in leaves]
    for _ in range(chance.randrange(3)):
        random_step(chance, outside)
    given = [chance.choice(outside), chance.choice(outside)][: chance.randrange(1, 3)]
    outside += module(*given)
    for _ in range(chance.randrange(4)):
        random_step(chance, outside)
    sum((number + 1) * tensor.sin().sum() for number, tensor in enumerate(outside)).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_random_programs_have_the_gradients_that_they_have_without_an_edit(first):
    """Or torch, or the edit, refuses them: in-place edits of views and of what was passed on."""
    num_equal = num_refused = 0
    for seed in range(first, first + 500):
        try:
            expected = random_gradients(seed, is_edited=False)
        except RuntimeError:  # torch refuses the program
            continue
        try:
            found = random_gradients(seed, is_edited=True)
        except (RuntimeError, UnsupportedModelError):
            num_refused += 1
            continue
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None), seed
            assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-5), seed
        num_equal += 1
    assert num_equal > 200, (num_equal, num_refused)


def test_values_that_change_without_grad_are_seen_by_all():
    def double(tensor):
        with torch.no_grad():
            tensor.mul_(2)
        return tensor * tensor

    weight = torch.ones(2, requires_grad=True)
    tensor, module = weight * 3, Does(double)
    scale_gradient(module, -1)
    (module(tensor).sum() + tensor.sum() * 100).backward()
    assert tensor.tolist() == [6, 6]
    assert weight.grad.tolist() == [3 * (100 - 12)] * 2


def test_overlapping_inputs_of_which_one_is_edited_are_refused():
    base = torch.ones(4, requires_grad=True) * 1
    module = Does(lambda one, two: one.mul_(2) + two)
    scale_gradient(module, 2)
    with pytest.raises(UnsupportedModelError, match="edits an input of shape .* in place while another input"):
        module(base[:2], base[2:])
    assert module(base[:2] * 1, base[2:] * 1).tolist() == [5, 5]  # (what was refused has been computed)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor: tensor.unsqueeze_(0) * 2, "changes the shape or the memory"),
        (lambda tensor: tensor.detach_() * 2, "detaches an input"),
        (lambda tensor: setattr(tensor, "data", torch.zeros(2)) or tensor * 2, "changes the shape or the memory"),
    ],
)
def test_what_cannot_be_told_of_an_input_is_refused(function, message):
    module = Does(function)
    scale_gradient(module, 2)
    with pytest.raises(UnsupportedModelError, match=message):
        module(torch.ones(2, requires_grad=True) * 1)


def test_an_input_that_is_edited_by_way_of_another_tensor_is_refused():
    tensor = torch.ones(2, requires_grad=True) * 1
    module = Does(lambda one: tensor.mul_(3) + one)
    scale_gradient(module, 2)
    with pytest.raises(UnsupportedModelError, match="by way of another tensor in the same memory"):
        module(tensor)


def test_an_input_that_was_edited_before_the_module_raised_has_its_history():
    def edit_and_raise(tensor):
        tensor.mul_(5)
        raise KeyError

    weight = torch.ones(2, requires_grad=True)
    tensor, module = weight * 1, Does(edit_and_raise)
    scale_gradient(module, -3)
    with pytest.raises(KeyError):
        module(tensor)
    tensor.sum().backward()
    assert weight.grad.tolist() == [-15, -15]


def test_an_edit_removed_during_a_call_is_kept_for_that_call():
    weight = torch.ones(2, requires_grad=True)

    def edit_and_end(tensor):
        edit.remove()
        return tensor.mul_(5)

    tensor, module = weight * 1, Does(edit_and_end)
    edit = scale_gradient(module, -3)
    (module(tensor).sum() + tensor.sum()).backward()
    assert weight.grad.tolist() == [-30, -30]
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_an_edit_removed_by_another_thread_during_a_call_is_kept_for_that_call():
    weight, is_inside, may_go_on = torch.ones(2, requires_grad=True), threading.Event(), threading.Event()

    def edit_late(tensor):
        is_inside.set()
        may_go_on.wait(60)
        return tensor.mul_(5)

    def run():
        tensor = weight * 1
        (module(tensor).sum() + tensor.sum()).backward()

    module = Does(edit_late)
    edit = scale_gradient(module, -3)
    thread = threading.Thread(target=run)
    thread.start()
    is_inside.wait(60)
    edit.remove()
    may_go_on.set()
    thread.join()
    assert weight.grad.tolist() == [-30, -30]
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_call_broken_off_by_an_interrupt_is_forgotten():
    """Such an exception has torch run no hooks, and a notebook goes on after it."""

    def interrupt(tensor):
        if is_broken_off:
            raise KeyboardInterrupt
        return tensor * 2

    module = Does(interrupt)
    edit = scale_gradient(module, -1)

    def break_off():
        tensor = torch.ones(2, requires_grad=True) * 1
        with pytest.raises(KeyboardInterrupt):
            module(tensor)
        return weakref.ref(tensor)

    is_broken_off = True
    kept = break_off()
    is_broken_off = False
    module(torch.ones(2, requires_grad=True))
    gc.collect()
    assert kept() is None
    is_broken_off = True
    kept = break_off()
    edit.remove()
    gc.collect()
    assert kept() is None
    assert not module._forward_hooks


class Doubling(torch.Tensor):
    """Has another sine."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + result if func is torch.sin else result


OF_CLASS = {"sine": torch.sin, "passed on": lambda tensor: tensor, "view": lambda tensor: tensor.view(1, 2), "in place": functional.relu_}


@pytest.mark.parametrize(
    ("what", "share", "is_leaf"),
    [
        *(("sine", 2.0, is_leaf) for is_leaf in (False, True)),
        *((what, 1.0, is_leaf) for what in ("passed on", "view") for is_leaf in (False, True)),
        ("in place", 1.0, False),
    ],
)
def test_a_tensor_of_a_class_of_its_own_stays_one(what, share, is_leaf):
    start = torch.zeros(2)

    def run(module):
        leaf = start.clone().as_subclass(Doubling).requires_grad_() if is_leaf else start.clone().requires_grad_()
        tensor = leaf if is_leaf else (leaf + 1e-9).as_subclass(Doubling)
        seen = []
        handle = module.register_forward_pre_hook(lambda _module, args: seen.append(type(args[0])))
        output = module(tensor)
        handle.remove()
        output.sum().backward()
        return output, leaf.grad, seen

    module = Does(OF_CLASS[what])
    plain, gradient, _ = run(module)
    scale_gradient(module, -3.0)
    output, edited, seen = run(module)
    assert seen == [Doubling]
    assert type(output) is type(plain) is Doubling
    assert torch.equal(output.as_subclass(torch.Tensor), plain.as_subclass(torch.Tensor))
    assert torch.allclose(gradient.as_subclass(torch.Tensor), torch.full((2,), share))
    assert torch.allclose(edited.as_subclass(torch.Tensor), torch.full((2,), -3 * share))


def test_what_is_written_on_a_tensor_is_on_its_stand_in_and_what_the_module_writes_is_on_the_tensor():
    def use(tensor):
        tensor.written = tensor.mask * 2
        return tensor, tensor.view(-1)

    tensor, module = torch.ones(2, requires_grad=True) * 1, Does(use)
    scale_gradient(module, -1)
    tensor.mask = 3
    output, view = module(tensor)
    assert tensor.written == output.written == 6
    assert not hasattr(view, "written")
