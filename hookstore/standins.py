"""Stand-ins for the tensors that a module is called with: other tensors of the same memory, with a history of their own.

What a call does to its stand-ins must look to the caller as if it had been done to the tensors themselves. A stand-in is no view, so that it may be edited in
place; it shares memory and version counter with what it stands for. After the call an edited stand-in hands its history on to the tensor, and what the call
returns of a stand-in becomes a part of the tensor again. Where that cannot be done right there is an error that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hookstore.containers import DEEPEST, Inputs, are_same, children_of, fill, keys_of, rebuild, refuse_container
from hookstore.errors import UnsupportedModelError

_is_compiling = torch.compiler.is_compiling
_is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
_preserve_version: Callable[[torch.Tensor], AbstractContextManager[None]] = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]


class HookstoreSameTensor(torch.autograd.Function):
    """Hands the history of an edited stand-in on to the tensor; torch's own errors name this class."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return the tensor as it is, which counts as an edit in place."""
        ctx.mark_dirty(tensor)
        ctx.is_view = tensor._base is not None
        ctx.set_materialize_grads(False)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Hand the gradient to the stand-in; where the tensor is a view, autograd needs zeros to go on to the rest of its base."""
        gradient = gradients[0]
        return (torch.zeros_like(gradient) if ctx.is_view and gradient is not None else None), gradient


class HookstoreOutput(torch.autograd.Function):
    """Makes what a call returned of a stand-in a view of the tensor, which torch lets nobody edit in place; its errors name this class."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        """Return the view."""
        ctx.set_materialize_grads(False)
        return _same_view(returned, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        """Hand the gradient to what was returned."""
        return None, gradients[0]


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return, inside the forward of an autograd function, what may be a stand-in.

    A leaf, or a view of one, may not be edited in place anyway, and the compiler traces no repair after the call: a view has torch refuse edits in both cases.
    """
    if _is_compiling():
        return tensor.view_as(tensor)
    if (
        _base_of(tensor).is_leaf and not tensor.is_nested
    ):  # (which torch makes no view of; it refuses an edit when the history is handed on)
        return _like(tensor, tensor.view_as(tensor))
    made = tensor.detach()
    return made if not _loses_kind(tensor, made) else torch.Tensor._make_subclass(type(tensor), made)  # (no view, as detach makes none)


def _loses_kind(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    """Say whether a tensor made of another, with its `__torch_function__` left out, is of no such class any more; a parameter's is not for others."""
    return type(made) is not type(tensor) and not isinstance(tensor, nn.Parameter)


def _like(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a view with the class of another tensor."""
    return view.as_subclass(type(tensor)) if _loses_kind(tensor, view) else view


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


class StandIns:
    """What stands in for the tensors of one call that is under way.

    Parameters
    ----------
    inputs : Inputs
        What the module is called with.
    stand_ins : sequence of torch.Tensor
        One for each tensor, made by `alias` in one autograd function.
    """

    __slots__ = ("_copies", "_entries", "_inputs", "_returned", "args", "kwargs")

    def __init__(self, inputs: Inputs, stand_ins: Sequence[torch.Tensor]) -> None:
        self._inputs = inputs
        self._entries: list[_Entry] = []
        if not _is_compiling():
            pairs = list(zip(inputs.tensors, stand_ins, strict=True))
            for tensor, stand_in in pairs:
                stand_in.__dict__ = tensor.__dict__  # what users have written on a tensor, or their module writes
            self._entries = [
                _Entry(tensor, stand_in) for tensor, stand_in in pairs if stand_in._base is None
            ]  # (torch takes care of a view)
        self._returned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.args, self.kwargs, self._copies = inputs.replaced(stand_ins)

    def put_right(self, output: Any) -> Any:
        """Hand histories on to the caller's tensors, and return the output in terms of these; itself where nothing in it has to change.

        Raises
        ------
        UnsupportedModelError
            If the module has done something to its inputs that cannot be told of them.
        """
        if not self._entries and not self._copies:
            return output
        for entry in self._entries:
            entry.check()
            if entry.is_edited:
                self._refuse_overlaps(entry.tensor)
        for entry in self._entries:
            if entry.is_edited:
                entry.hand_on()
        for made in self._copies:
            made.follow(self._translate)
        return self._translate(output)

    def _refuse_overlaps(self, edited: torch.Tensor) -> None:
        for other in (*self._inputs.tensors, *self._inputs.others):
            if other is not edited and _is_alias_of(other, edited):
                raise UnsupportedModelError(
                    f"the module edits an input of shape {tuple(edited.shape)} in place while another input, of shape {tuple(other.shape)}, lies in the same "
                    "memory: its gradient would be wrong; pass a clone, or do without in-place operations in the module"
                )

    def _translate(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return self._translate_tensor(value)
        for made in self._copies:
            if value is made.copied:
                return made.original
        children = children_of(value) if depth < DEEPEST else []
        if children is None:
            self._translate_attributes(value)
        if not children:
            return value
        translated = [self._translate(child, depth + 1) for child in children]
        if are_same(translated, children):
            return value
        if isinstance(value, tuple):
            return rebuild(value, translated)
        try:
            fill(value, keys_of(value), translated)
        except Exception as error:
            refuse_container(type(value), error)
        return value

    def _translate_attributes(self, value: Any) -> None:
        """Translate the tensors that an object of some other kind holds."""
        if self._entries and not isinstance(value, type | nn.Module):
            attributes = getattr(value, "__dict__", {})
            for name, tensor in list(attributes.items()):
                if isinstance(tensor, torch.Tensor):
                    attributes[name] = self._translate_tensor(tensor)

    def _translate_tensor(self, returned: torch.Tensor) -> torch.Tensor:
        base = _base_of(returned)
        entry = next((entry for entry in self._entries if entry.stand_in is base), None)
        if entry is None or not returned.requires_grad:
            return returned
        for before, after in self._returned:
            if before is returned:
                return after
        if entry.was_handed_on:
            translated = entry.tensor if returned is base else _same_view(returned, entry.tensor)
        elif returned.is_nested or returned.layout != torch.strided:
            kind = "nested" if returned.is_nested else f"{returned.layout}".removeprefix("torch.")
            raise UnsupportedModelError(
                f"the module returns a {kind} tensor as it came in, of which torch makes no view, so that its gradient cannot be edited; have it return a clone"
            )
        else:
            translated = HookstoreOutput.apply(entry.tensor, returned)
        if translated is not entry.tensor:
            translated.__dict__ = returned.__dict__
        self._returned.append((returned, translated))
        return translated


class _Entry:
    """One tensor and its stand-in."""

    __slots__ = ("_history", "_made_by", "stand_in", "tensor", "was_handed_on")

    def __init__(self, tensor: torch.Tensor, stand_in: torch.Tensor) -> None:
        self.tensor, self.stand_in = tensor, stand_in
        self._history, self._made_by = _base_of(tensor).grad_fn, stand_in.grad_fn  # (autograd makes that of a view anew after any edit)
        self.was_handed_on = False

    @property
    def is_edited(self) -> bool:
        """Whether an in-place operation that autograd knows of has edited the stand-in."""
        return self.stand_in.grad_fn is not self._made_by

    def check(self) -> None:
        """Refuse what can be done to a stand-in and not be told of the tensor."""
        tensor, stand_in = self.tensor, self.stand_in
        what = ""
        if _base_of(tensor).grad_fn is not self._history:
            what = "edits an input in place by way of another tensor in the same memory"
        elif stand_in.grad_fn is None:
            what = "detaches an input in place"
        elif not _lies_alike(tensor, stand_in):
            what = "changes the shape or the memory of an input in place"
        if what:
            raise UnsupportedModelError(
                f"the module {what} (shape {tuple(tensor.shape)}), which cannot be followed where its gradient is edited; have it work on a new tensor"
            )

    def hand_on(self) -> None:
        """Give the tensor the history of its stand-in; what autograd has saved of it stays valid, since nothing is written."""
        with _preserve_version(self.tensor):
            HookstoreSameTensor.apply(self.tensor, self.stand_in)
        if self.tensor._base is not None:
            # A view notes of which version its history is: now, of that which stays, or the next edit would leave it as it is.
            _ = self.tensor.grad_fn
        self.was_handed_on = True


def _lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided or one.is_nested:
        return True
    return bool(
        one.size() == other.size()
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
        and _is_alias_of(one, other)
    )


def _same_view(view: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor that lies in memory as another view does, and is of its class."""
    if view._base is None:
        return _like(view, tensor.view_as(tensor))
    if view.dtype == tensor.dtype and view.is_conj() == tensor.is_conj() and view.is_neg() == tensor.is_neg():
        return _like(view, tensor.as_strided(view.size(), view.stride(), view.storage_offset()))
    made: torch.Tensor = view._view_func(tensor)  # type: ignore[attr-defined]
    return _like(view, made)
