"""Edits of the gradient that leaves a module towards its inputs: clipped, reversed or scaled.

The forward computes the very same values, and the gradients of the module's own parameters are not touched.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookstore.compiler import Settings, discard
from hookstore.edits import Edit, Number, PostHook, PreHook
from hookstore.errors import OptionError, UnsupportedModelError
from hookstore.wrappers import is_container, unwrap


def clip_gradient(module: nn.Module, max_norm: Number, *, scaler: torch.amp.GradScaler | None = None) -> GradientEdit:
    """Scale the gradient that leaves a module towards its inputs to at most a norm, in every backward from now on.

    The norm is the L2 norm over the gradients of all inputs of one call together (on each rank, and for each replica, of its own), summed in float64 where
    the device has it. If it is above ``max_norm`` all of them are multiplied by ``max_norm / norm``; if not, or if it is not finite, they pass unchanged to
    the bit, so that a `GradScaler` still finds an overflow. Gradients of complex inputs count with their moduli, sparse ones with their summed values.
    The gradients of the module's own parameters are not touched.

    Parameters
    ----------
    module : torch.nn.Module
        The module. Of a wrapper (DDP, ``torch.compile`` and the like) the module inside.
    max_norm : float or callable
        The largest norm, finite and not negative. A callable without arguments is asked at each call of the module.
    scaler : torch.amp.GradScaler, optional
        What scales the loss; then ``max_norm`` is meant for gradients without that scale, as it is when the module is called.

    Returns
    -------
    GradientEdit
        What ends it.

    Raises
    ------
    OptionError
        For a norm or a scaler that cannot be used.
    UnsupportedModelError
        If the module cannot be hooked.

    See Also
    --------
    GradientEdit : the order of several edits, and what holds for all of them.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise OptionError(f"scaler: expected a torch.amp.GradScaler, got {scaler!r} of type {type(scaler).__name__}", option="scaler")
    return GradientEdit(module, Edit("max_norm", max_norm, is_clip=True, scaler=scaler))


def reverse_gradient(module: nn.Module, alpha: Number = 1.0) -> GradientEdit:
    """Multiply the gradient that leaves a module towards its inputs by ``-alpha``, in every backward from now on.

    With this on a domain classifier, what comes before it learns features from which domains cannot be told, while the classifier itself learns to tell
    them. The gradients of the module's own parameters are not touched.

    Parameters
    ----------
    module : torch.nn.Module
        The module. Of a wrapper (DDP, ``torch.compile`` and the like) the module inside.
    alpha : float or callable
        Finite. A callable without arguments is asked at each call of the module, which is what a schedule needs. 0 gives gradients of zeros.

    Returns
    -------
    GradientEdit
        What ends it.

    Raises
    ------
    OptionError
        For a number that cannot be used.
    UnsupportedModelError
        If the module cannot be hooked.

    See Also
    --------
    GradientEdit : the order of several edits, and what holds for all of them.

    References
    ----------
    Ganin and Lempitsky, "Unsupervised domain adaptation by backpropagation", ICML 2015, https://arxiv.org/abs/1409.7495
    """
    return GradientEdit(module, Edit("alpha", alpha, is_reversed=True))


def scale_gradient(module: nn.Module, factor: Number) -> GradientEdit:
    """Multiply the gradient that leaves a module towards its inputs by a factor, in every backward from now on.

    The gradients of the module's own parameters are not touched.

    Parameters
    ----------
    module : torch.nn.Module
        The module. Of a wrapper (DDP, ``torch.compile`` and the like) the module inside.
    factor : float or callable
        Finite. A callable without arguments is asked at each call of the module. 0 gives gradients of zeros.

    Returns
    -------
    GradientEdit
        What ends it.

    Raises
    ------
    OptionError
        For a number that cannot be used.
    UnsupportedModelError
        If the module cannot be hooked.

    See Also
    --------
    GradientEdit : the order of several edits, and what holds for all of them.
    """
    return GradientEdit(module, Edit("factor", factor))


class GradientEdit:
    """An edit of the gradient that leaves a module; made by `clip_gradient`, `reverse_gradient` and `scale_gradient`.

    Use it as a context manager, or call `remove`; otherwise it lasts as long as the module. Several edits of one module act in the order in which they were
    made: the first one gets what comes out of the module.

    Edited is the gradient of every tensor that requires grad among the arguments of a call, positional or by keyword, also inside tuples, lists, mappings and
    dataclasses; an absent gradient stays absent. What is reached otherwise goes unedited: through an iterator, a closure, or an object inside an object, such
    as a cache of keys and values. Each call is edited by itself, once, under activation checkpointing too; if that is reentrant, what counts is the call that
    is repeated in the backward, with the edits and numbers of then. With ``create_graph=True`` an edited gradient has its derivative, and what leaves the
    module in the backward of that is edited in turn. Calls without grad, and what is traced or exported (`torch.jit.trace`, `torch.export`, `torch.fx`), have
    no edit. A copied, pickled or saved module has none either.

    The module may edit its inputs in place. What it returns as it came in, or as a view of that, must not be edited in place by others, nor its input while
    the output is still used: torch raises an error then that names ``HookstoreOutput``. A module that keeps its input for later keeps a stand-in in the same
    memory, which must not be edited in place after the call: torch cannot tell. A list, mapping or dataclass that the module returns as it came in is the
    caller's own, and what the module left in it has no edit. Function transforms (`torch.func`), forward-mode differentiation and what cannot be followed are
    refused with an `UnsupportedModelError` when the module is called. In eval mode a ``TransformerEncoderLayer`` leaves its fused path because of any hook on
    it or in it, so that values may differ in the last digits.

    While the module is recorded, ``input_gradient`` is the gradient before all edits of the module, and ``gradient`` of whatever made the input is the one
    after them, whichever was begun first.

    Under ``torch.compile`` the edit is a part of the graph: in-place edits of the module's inputs, and those named above, are refused by torch there, absent
    gradients may be zeros, and a callable is traced, so that a number that it takes from Python costs one more compilation, after which it is an input of the
    graph; a tensor that it returns is not looked at. Inside `torch.utils.checkpoint` the compiler leaves the module out of the graph, and with ``fullgraph``
    refuses it. Making or ending an edit discards what has been compiled.
    """

    __slots__ = ("__weakref__", "_edit", "_handles")

    def __init__(self, module: nn.Module, edit: Edit) -> None:
        module = _check_module(module)
        self._edit = edit
        Settings.begin_edit(edit)
        discard()
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(PreHook(edit), prepend=True, with_kwargs=True),
            module.register_forward_hook(PostHook(edit), always_call=True),
        ]

    def remove(self) -> None:
        """End the edit; does nothing if it has ended. A call that is under way, and graphs of earlier ones, keep it (except under reentrant checkpointing)."""
        if self._handles:
            self._edit.end(self._handles)
            self._handles = []
            Settings.end_edit(self._edit)
            discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()


def _check_module(module: nn.Module) -> nn.Module:
    """Return the module inside its wrappers if its calls can have hooks."""
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(f"module: expected a torch.nn.Module, got {module!r} of type {type(module).__name__}")
    inner = unwrap(module)
    if isinstance(inner, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"module is a {type(inner).__name__}: traced and scripted modules run no Python hooks; edit the gradient of the original"
        )
    if is_container(inner):
        raise UnsupportedModelError(
            f"module is a {type(inner).__name__}, which is never called and so hands no gradient to any input; edit that of its children instead"
        )
    return inner
