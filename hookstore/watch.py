"""Gradients of what a module returned: tensor hooks, set when it returns."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.sink import Call, Sink


class GradientWatch:
    """Tensor hooks that capture the gradient of one output of one call.

    An output that is a view needs care: once it is edited in place, a hook on it is lost, or sees a part of the gradient. If its base was made inside the
    call, the base has a hook too, and the gradient of the base, looked at as the view, is taken when the view has been edited (and only then: the
    base may have other uses). If its base comes from outside, an edit is a gap with its reason.

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
        if base is not None:
            self._version = _Version(output)
            if base.grad_fn is not None and base.grad_fn._sequence_nr() >= call.sequence_nr and base.dtype == output.dtype:
                offset = int(output.storage_offset()) - int(base.storage_offset())
                self._base_view = (base.size(), base.stride(), output.size(), output.stride(), offset)
            if base.requires_grad:
                self._handles.append(base.register_hook(self._of_base))

    def forget(self, output: torch.Tensor) -> None:
        """Remove hooks that could collect from batch to batch: on an output that comes back as the same object, and on a base from outside the call."""
        if self._base_view is None:
            for handle in self._handles[1:]:
                handle.remove()
        if self._target() is output:
            for handle in self._handles:
                handle.remove()

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output."""
        if gradient is None:  # so it is called under another tool's full backward hook when no gradient arrives
            return
        if self._version is None or self._version.is_unchanged:
            self._put(gradient.detach())

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output from its base's, which comes after the output's own where there is one."""
        if gradient is None or self._version is None or self._version.is_unchanged:
            return
        if self._base_view is not None:
            self._put(_as_view(gradient.detach(), *self._base_view))
        else:
            reason = "the output is a view of a tensor made outside the layer, and was edited in place"
            self._sink.skip_value(self._layer, "gradient", self._call, reason)

    def _put(self, gradient: torch.Tensor) -> None:
        backward = self._backward
        self._backward += 1
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


def _as_view(
    gradient: torch.Tensor, base_size: torch.Size, base_stride: tuple[int, ...], size: torch.Size, stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Look at the gradient of a base as at the gradient of its view."""
    if gradient.stride() != base_stride:
        laid_out = torch.empty_strided(base_size, base_stride, dtype=gradient.dtype, device=gradient.device)
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided(size, stride, int(gradient.storage_offset()) + offset)
