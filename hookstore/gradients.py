"""Edits of the gradient that leaves a module towards its inputs: clipped, reversed or scaled.

The module is called with stand-ins for its inputs (see `hookstore.standins`) that come out of one autograd function, so that the joint norm of all their
gradients is known before any of them goes on. The forward computes the very same values, and the gradients of the module's own parameters are not touched.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookstore.compiler import Settings, discard, follow
from hookstore.errors import CaptureWarning, OptionError, UnsupportedModelError
from hookstore.hooks import InertCopy, has_raised, is_traced
from hookstore.standins import Inputs, StandIns, alias
from hookstore.wrappers import is_container, type_name, unwrap

Number = float | Callable[[], float]

_is_compiling, _is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor


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
    return GradientEdit(module, _Edit("max_norm", max_norm, is_clip=True, scaler=scaler))


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
    return GradientEdit(module, _Edit("alpha", alpha, is_reversed=True))


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
    return GradientEdit(module, _Edit("factor", factor))


class GradientEdit:
    """An edit of the gradient that leaves a module; made by `clip_gradient`, `reverse_gradient` and `scale_gradient`.

    Use it as a context manager, or call `remove`; otherwise it lasts as long as the module. Several edits of one module act in the order in which they were
    made: the first one gets what comes out of the module.

    Edited is the gradient of every tensor that requires grad among the arguments of a call, positional or by keyword, also inside tuples, lists, mappings and
    dataclasses; an absent gradient stays absent. Each call is edited by itself, once, under activation checkpointing too. With ``create_graph=True`` an edited
    gradient has its derivative, and what leaves the module in the backward of that is edited in turn. Calls without grad, and what is traced or exported
    (`torch.jit.trace`, `torch.export`, `torch.fx`), have no edit. A copied, pickled or saved module has none either.

    The module may edit its inputs in place. What it returns as it came in, or as a view of that, must not be edited in place by others, nor its input while
    the output is still used: torch raises an error then that names ``HookstoreOutput``. A module that keeps its input for later keeps the stand-in. Function
    transforms (`torch.func`) and what cannot be followed are refused with an `UnsupportedModelError` when the module is called. In eval mode a
    ``TransformerEncoderLayer`` leaves its fused path because of any hook on it or in it, so that values may differ in the last digits.

    While the module is recorded, ``input_gradient`` is the gradient before all edits of the module, and ``gradient`` of whatever made the input is the one
    after them, whichever was begun first.

    Under ``torch.compile`` the edit is a part of the graph: in-place edits of the module's inputs, and those named above, are refused by torch there, absent
    gradients may be zeros, and a callable is traced, so that a number that it takes from Python costs one more compilation, after which it is an input of the
    graph. Making or ending an edit discards what has been compiled.
    """

    __slots__ = ("__weakref__", "_edit", "_handles")

    def __init__(self, module: nn.Module, edit: _Edit) -> None:
        module = _check_module(module)
        self._edit = edit
        _Guards.begin(edit)
        discard()
        follow(edit)
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(_PreHook(edit), prepend=True, with_kwargs=True),
            module.register_forward_hook(_PostHook(edit), always_call=True),
        ]

    def remove(self) -> None:
        """End the edit; does nothing if it has ended. A call that is under way, and graphs of earlier ones, keep it."""
        if self._handles:
            self._edit.end(self._handles)
            self._handles = []
            _Guards.end(self._edit)
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


# The numbers ------------------------------------------------------------------------------------------------------


class _Calls(threading.local):
    """The calls of one module that are under way on this thread, innermost last; ``None`` for one without an edit."""

    def __init__(self) -> None:
        self.stack: list[StandIns | None] = []


class _Edit:
    """What is done to the gradients of a module's inputs."""

    def __init__(
        self, option: str, number: Number, *, is_clip: bool = False, is_reversed: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.option, self.given = option, number
        self.is_clip, self.is_reversed, self.scaler = is_clip, is_reversed, scaler
        self.calls = _Calls()
        self.has_edited = False
        self._traced: list[StandIns | None] = []  # calls under way in a trace, where locals of a thread have no place
        self._ending: list[RemovableHandle] = []
        if not callable(number):
            self.given = self._checked(number, "")

    def number(self) -> float | torch.Tensor:
        """Return what gradients are multiplied by, or the largest norm, for a call that begins."""
        given = self.given
        number: Any = given() if callable(given) else given
        if callable(given) and not _is_compiling():
            number = self._checked(number, " from the callable")
        if self.scaler is not None and self.scaler._enabled:  # (as is_enabled() says, which the compiler does not trace)
            scale = self.scaler._scale
            number = number * (self.scaler._init_scale if scale is None else scale)
        wanted: float | torch.Tensor = -number if self.is_reversed else number
        return wanted

    def _checked(self, number: Any, source: str) -> float:
        is_number = isinstance(number, int | float) or (hasattr(number, "__float__") and getattr(number, "ndim", None) == 0)
        if isinstance(number, bool) or not is_number or not math.isfinite(number) or (self.is_clip and number < 0):
            bounds = "a finite number, not below 0" if self.is_clip else "a finite number"
            raise OptionError(
                f"{self.option}: expected {bounds}, got {number!r} of type {type(number).__name__}{source}", option=self.option
            )
        return float(number)

    def edit(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the stand-ins for these tensors."""
        function = HookstoreClippedGradient if self.is_clip else HookstoreScaledGradient
        made: tuple[torch.Tensor, ...] = function.apply(self.number(), *tensors)
        return made

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a call that the compiler traces."""
        inputs = Inputs(args, kwargs)
        if not inputs.tensors or not torch.is_grad_enabled():
            self._traced.append(None)
            return None
        stand_ins = StandIns(inputs, self.edit(inputs.tensors))
        self._traced.append(stand_ins)
        return stand_ins.args, stand_ins.kwargs

    def end_trace(self, output: Any) -> Any:
        """End a call that the compiler traces."""
        stand_ins = self._traced.pop()
        return None if stand_ins is None else stand_ins.put_right(output)

    def end(self, handles: list[RemovableHandle]) -> None:
        """Have no more calls edited; one that is under way still is put right."""
        handles[0].remove()
        if self.calls.stack:
            self._ending = handles[1:]
        else:
            handles[1].remove()

    def ended_call(self) -> None:
        """Remove the last hook if the edit has ended during the call."""
        if self._ending and not self.calls.stack:
            self._ending.pop().remove()

    def pin(self) -> None:
        """Have guards on hooks in what is being compiled."""
        _Guards.turn()


class _Guards:
    """Guards on hooks, which the compiler leaves out by default: graphs belong to code, and that of one module would serve its twin with an edit."""

    _edits: weakref.WeakSet[_Edit] = weakref.WeakSet()  # noqa: RUF012  # there is only one
    _before: bool | None = None  # the compiler's setting, where it was changed

    @classmethod
    def begin(cls, edit: _Edit) -> None:
        importlib.import_module(
            "torch._dynamo.config"
        )  # which takes a second, once: nothing may be compiled before we have asked for guards
        weakref.finalize(edit, cls.turn).atexit = False  # (before the set hears of it: the last one told is called first)
        cls._edits.add(edit)
        cls.turn()

    @classmethod
    def end(cls, edit: _Edit) -> None:
        cls._edits.discard(edit)
        cls.turn()

    @classmethod
    def turn(cls) -> None:
        """Set what the compiler is asked for; a recording that asks for the same notes what was before, and is told."""
        settings: Any = sys.modules.get("torch._dynamo.config")
        name = "skip_nnmodule_hook_guards"
        if settings is None or not hasattr(settings, name) or bool(cls._edits) == (cls._before is not None):
            return
        is_recorded = name in Settings.set_by_us
        if cls._edits:
            cls._before = Settings.before[name] if is_recorded else getattr(settings, name)
            wanted = False
        else:
            wanted, cls._before = bool(cls._before), None
        if is_recorded:
            Settings.before[name] = wanted
        else:
            setattr(settings, name, wanted)


# In the graph -----------------------------------------------------------------------------------------------------


class HookstoreScaledGradient(torch.autograd.Function):
    """Multiplies gradients by a number; torch's own errors name this class."""

    @staticmethod
    def forward(ctx: Any, factor: float, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return stand-ins."""
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return tuple([alias(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the edited gradients."""
        return None, *[None if gradient is None else gradient * ctx.factor for gradient in gradients]


class HookstoreClippedGradient(torch.autograd.Function):
    """Scales gradients to at most a joint norm; torch's own errors name this class."""

    @staticmethod
    def forward(ctx: Any, max_norm: float | torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return stand-ins."""
        ctx.max_norm = max_norm
        ctx.set_materialize_grads(False)
        return tuple([alias(tensor) for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the edited gradients."""
        norms = [_norm(gradient) for gradient in gradients if gradient is not None]
        coefficient = _coefficient(norms, ctx.max_norm)
        return None, *[None if gradient is None else _times(gradient, coefficient) for gradient in gradients]


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm in float64, whose squares do not overflow where those of float32 would, or float32 where the device has no more."""
    if _is_compiling():  # which has dense gradients alone, and traces no question after their layout
        pass
    elif gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce().values()
    elif gradient.layout != torch.strided or gradient.is_nested:
        raise UnsupportedModelError(
            f"the norm of a gradient of layout {gradient.layout} is not defined here; clip_gradient takes dense and sparse_coo gradients"
        )
    magnitudes = gradient.abs() if gradient.is_complex() else gradient
    norm: torch.Tensor = torch.linalg.vector_norm(magnitudes, dtype=torch.float32 if gradient.device.type == "mps" else torch.float64)
    return norm


def _coefficient(norms: Sequence[torch.Tensor], max_norm: float | torch.Tensor) -> torch.Tensor:
    """Return what gradients with these norms are multiplied by; nothing waits for the device."""
    norm = norms[0]
    if len(norms) > 1:
        norm = torch.linalg.vector_norm(torch.stack([one.to(norm.device, norm.dtype) for one in norms]))
    if isinstance(max_norm, torch.Tensor):
        max_norm = max_norm.to(norm.device, norm.dtype)
    is_over = (norm > max_norm) & norm.isfinite()
    divisor = torch.where(is_over, norm, 1.0)  # without a zero, whose derivative would be NaN even where it is not taken
    return torch.where(is_over, max_norm / divisor, 1.0)


def _times(gradient: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """Multiply in at least float32: in half precision the coefficient itself would be off by a thousandth."""
    coefficient = coefficient.to(gradient.device)
    if gradient.dtype in (torch.float16, torch.bfloat16):
        return (gradient.to(torch.float32) * coefficient.to(torch.float32)).to(gradient.dtype)
    return gradient * coefficient.to(gradient.dtype)


# The hooks --------------------------------------------------------------------------------------------------------


class _PreHook(InertCopy):
    __slots__ = ("_edit",)

    def __init__(self, edit: _Edit) -> None:
        self._edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        edit = self._edit
        if _is_compiling():
            return None if _is_exporting() else edit.trace(args, kwargs)
        stack = edit.calls.stack
        stack.append(None)
        if not torch.is_grad_enabled() or is_traced():
            return None
        with torch._C.DisableTorchFunction():
            inputs = Inputs(args, kwargs)
            if not inputs.tensors:
                _warn_of_no_input(edit, module)
                return None
            _refuse(edit, module, inputs)
            stack[-1] = stand_ins = StandIns(inputs, edit.edit(inputs.tensors))
            edit.has_edited = True
        return stand_ins.args, stand_ins.kwargs


class _PostHook(InertCopy):
    __slots__ = ("_edit",)

    def __init__(self, edit: _Edit) -> None:
        self._edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        if _is_compiling():
            return None if _is_exporting() else self._edit.end_trace(output)
        stack = self._edit.calls.stack
        stand_ins = stack.pop() if stack else None
        self._edit.ended_call()
        if stand_ins is None:
            return None
        if output is None and has_raised():
            stand_ins.put_right(None)  # whoever handles the exception may go on with the inputs
            return None
        with torch._C.DisableTorchFunction():
            return stand_ins.put_right(output)


def _warn_of_no_input(edit: _Edit, module: nn.Module) -> None:
    if module.training and not edit.has_edited:
        edit.has_edited = True  # said once
        warnings.warn(
            f"a {type_name(module)} whose gradient is to be edited was called with no tensor that requires grad, so that no gradient leaves it; "
            "is it the first module of the model?",
            CaptureWarning,
            stacklevel=2,
        )


def _refuse(edit: _Edit, module: nn.Module, inputs: Inputs) -> None:
    if any(map(_is_functorch, inputs.tensors)):
        raise UnsupportedModelError(
            f"a {type_name(module)} whose gradient is edited was called inside a function transform (vmap, grad or jvp of torch.func), which the edit cannot "
            "follow; remove() it before"
        )
    if edit.is_clip and "_is_replica" in vars(module):
        raise UnsupportedModelError(
            f"a {type_name(module)} is called in replicas by DataParallel, each with a part of the batch, so that the joint norm is not known; "
            "use DistributedDataParallel, or one device"
        )
