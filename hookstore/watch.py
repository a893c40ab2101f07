"""Gradients of what a module returned: tensor hooks, set when it returns."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.layout import Call
from hookstore.sink import Sink, why_not


class GradientWatch:
    """Tensor hooks that capture the gradient of one output of one call.

    An output that is a view needs care: once it is edited in place, a hook on it is lost, or sees a part of the gradient. If its base was made inside the
    call, the base has a hook too, and the gradient of the base, looked at as the view, is taken when the view has been edited (and only then: the
    base may have other uses). Where the base's gradient is not the output's own, since the base comes from outside the call, is shared with another output
    or has its elements in the view more than once, an edit is a gap with its reason.

    Parameters
    ----------
    sink : Sink
        Where gradients go.
    layer, leaf : str
        Whose output it is.
    output : torch.Tensor
        Requires grad; referred to weakly.
    call : Call
        The call that returned it.
    """

    __slots__ = ("_backward", "_base_view", "_call", "_handles", "_layer", "_leaf", "_sink", "_target", "_version", "coordinates")

    __torch_unserializable__ = True  # a tensor with this hook can be saved; the hook is left out without a warning

    def __init__(self, sink: Sink, layer: str, leaf: str, output: torch.Tensor, call: Call) -> None:
        self.coordinates = call.coordinates
        self._sink = sink
        self._layer = layer
        self._leaf = leaf
        self._call = call
        self._backward = 0
        self._target = weakref.ref(output)
        self._version: _Version | None = None
        self._base_view: tuple[Any, ...] | None = None
        self._handles = [output.register_hook(self)]
        base = output._base
        if base is not None and not base.is_leaf:  # autograd allows no edits of a view of a leaf; that the optimizer edits the leaf is none
            self._version = _Version(output)
            if (
                base.grad_fn is not None
                and base.grad_fn._sequence_nr() >= call.sequence_nr
                and base.dtype == output.dtype
                and _is_injective(output)
            ):
                offset = int(output.storage_offset()) - int(base.storage_offset())
                lazy = (base.is_conj() != output.is_conj(), base.is_neg() != output.is_neg())
                self._base_view = (base.size(), base.stride(), output.size(), output.stride(), offset, *lazy)
            self._handles.append(base.register_hook(self._of_base))

    def distrust_base(self) -> None:
        """Take nothing from the base: another output of the call shares it, so that its gradient is not this output's alone."""
        self._base_view = None

    def forget_any(self, outputs: dict[int, torch.Tensor]) -> None:
        """Remove the hooks if they sit on a tensor that outlives its batch, and so would collect them: a leaf, or one of those outputs (by identity)."""
        target = self._target()
        if target is not None and (target.is_leaf or outputs.get(id(target)) is target):
            for handle in self._handles:
                handle.remove()

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output."""
        if gradient is None:  # so it is called under another tool's full backward hook when no gradient arrives
            return
        with torch._C.DisableTorchFunction():
            if self._version is None or self._version.is_unchanged:
                self._put(gradient)

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output from its base's, which comes after the output's own where there is one."""
        if gradient is None or self._version is None or self._version.is_unchanged:
            return
        with torch._C.DisableTorchFunction():
            if self._base_view is None:
                reason = "the output is a view that was edited in place, and the gradient of its base is not its own alone"
                self._sink.skip_value(self._layer, "gradient", self._call, reason, leaf=self._leaf)
            elif why_not(gradient) is not None:
                self._put(gradient)
            else:
                self._put(_as_view(gradient.detach(), *self._base_view))

    def _put(self, gradient: torch.Tensor) -> None:
        backward = self._backward
        self._backward += 1
        budget = self._sink.clock.budget
        if budget is None:
            self._sink.put(self._layer, "gradient", self._leaf, gradient, self._call, backward)
        else:
            with budget.measured():
                self._sink.put(self._layer, "gradient", self._leaf, gradient, self._call, backward)


class _Version:
    """Tells whether a tensor has been edited in place, without keeping its memory."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = tensor.detach()  # shares the version counter, …
        self._counter.data = _nothing(tensor.device)  # … and from now on nothing else
        self._version = tensor._version

    @property
    def is_unchanged(self) -> bool:
        """Whether no in-place operation has touched the tensor, its base or another view of it."""
        return self._counter._version == self._version


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False), _disable_current_modes():
        return torch.empty(0, device=device)


def _is_injective(view: torch.Tensor) -> bool:
    """Say whether no two elements of a view are the same element of its base."""
    end = 0
    for stride, size in sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1):
        if stride <= end:
            return False
        end += stride * (size - 1)
    return True


def _as_view(
    gradient: torch.Tensor,
    base_size: torch.Size,
    base_stride: tuple[int, ...],
    size: torch.Size,
    stride: tuple[int, ...],
    offset: int,
    is_conj: bool,  # noqa: FBT001
    is_neg: bool,  # noqa: FBT001
) -> torch.Tensor:
    """Look at the gradient of a base as at the gradient of its view."""
    if gradient.stride() != base_stride:
        laid_out = torch.empty_strided(base_size, base_stride, dtype=gradient.dtype, device=gradient.device)
        gradient = laid_out.copy_(gradient)
    view = gradient.as_strided(size, stride, int(gradient.storage_offset()) + offset)
    view = view.conj() if is_conj else view
    return torch._neg_view(view) if is_neg else view
