"""How the gradients of a module's inputs are edited: the numbers, the autograd functions, and the hooks that put them in place.

The module is called with stand-ins for its inputs (see `hookstore.standins`) that come out of one autograd function, so that the joint norm of all their
gradients is known before any of them goes on.
"""

from __future__ import annotations

import math
import sys
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from hookstore.containers import Inputs
from hookstore.errors import CaptureWarning, OptionError, UnsupportedModelError
from hookstore.hooks import InertCopy, has_raised, is_traced
from hookstore.standins import StandIns, alias
from hookstore.wrappers import type_name

Number = float | Callable[[], float]

_is_compiling, _is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting
_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor


class _Calls(threading.local):
    """The calls of one module that are under way on this thread, innermost last.

    Of each there is which it is of those of the module, from the outermost on, and its stand-ins, ``None`` where nothing is edited.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[int, StandIns | None]] = []


class Edit:
    """What is done to the gradients of a module's inputs."""

    def __init__(
        self, option: str, number: Number, *, is_clip: bool = False, is_reversed: bool = False, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.option, self.given = option, number
        self.is_clip, self.is_reversed, self.scaler = is_clip, is_reversed, scaler
        self.calls = _Calls()
        self.under_way: list[None] = []  # as many as there are calls under way on all threads (append and pop are atomic, a count is not)
        self.has_edited = self.has_ended = False
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
        elif callable(given) and isinstance(number, int | float):  # (of a tensor it would be a branch in the graph)
            is_finite = number == number and abs(number) != math.inf  # noqa: PLR0124 (as the compiler traces it)
            if isinstance(number, bool) or not is_finite or (self.is_clip and number < 0):
                _refuse_number(self.option)
        if self.scaler is not None and self.scaler._enabled:  # (as is_enabled() says, which the compiler does not trace)
            scale = self.scaler._scale
            number = number * (self.scaler._init_scale if scale is None else scale)
        wanted: float | torch.Tensor = -number if self.is_reversed else number
        return wanted

    def _checked(self, number: Any, source: str) -> float:
        is_number = isinstance(number, int | float) or (hasattr(number, "__float__") and getattr(number, "ndim", None) == 0)
        try:
            is_fit = is_number and not isinstance(number, bool) and math.isfinite(number) and not (self.is_clip and number < 0)
        except (OverflowError, RuntimeError, TypeError, ValueError):  # a whole number beyond float64, a complex or meta tensor
            is_fit = False
        if not is_fit:
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
        """Have no more calls edited; one that is under way on any thread still is put right."""
        handles[0].remove()
        self._ending = handles[1:]
        self.has_ended = True
        if self.calls.stack and not _num_calls(None):
            self.forget_calls()
        self.remove_last()

    def forget_calls(self) -> None:
        """Forget calls of this thread that were broken off by what runs no hooks, such as a KeyboardInterrupt."""
        while self.calls.stack:
            self.calls.stack.pop()
            self.under_way.pop()

    def remove_last(self) -> None:
        """Remove the last hook if the edit has ended and no call needs it any more."""
        if self.has_ended and not self.under_way:
            for handle in self._ending:
                handle.remove()


def _refuse_number(option: str) -> None:
    """Raise; the compiler runs it, and traces nothing of it."""
    raise OptionError(
        f"{option}: the callable returned no finite number, or one below 0 for a norm, when the module was compiled", option=option
    )


_refuse_number._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does, which imports the compiler


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
    if gradient.is_complex() and gradient.layout == torch.strided:  # a complex 1 changes zeros and what is not finite
        return torch.view_as_complex(_times(torch.view_as_real(gradient.resolve_conj()), coefficient))
    if gradient.dtype in (torch.float16, torch.bfloat16):
        return (gradient.to(torch.float32) * coefficient.to(torch.float32)).to(gradient.dtype)
    return gradient * coefficient.to(gradient.dtype)


# The hooks --------------------------------------------------------------------------------------------------------


class PreHook(InertCopy):
    """Has a module called with stand-ins for its inputs.

    Parameters
    ----------
    edit : Edit
        What is done to their gradients.
    """

    __slots__ = ("_edit",)

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a call."""
        edit = self._edit
        if _is_compiling():
            return None if _is_exporting() else edit.trace(args, kwargs)
        stack = edit.calls.stack
        depth = _num_calls(module) if stack else 1  # (counting takes six microseconds)
        if stack and depth == 1:
            edit.forget_calls()
        stack.append((depth, None))
        edit.under_way.append(None)  # before it is asked whether the edit has ended, so that the last hook stays or nothing is edited
        if edit.has_ended or not torch.is_grad_enabled() or is_traced():
            return None
        with torch._C.DisableTorchFunction():
            inputs = Inputs(args, kwargs)
            _refuse_transforms(module, inputs)
            if not inputs.tensors:
                _warn_of_no_input(edit, module)
                return None
            _refuse(edit, module, inputs)
            stand_ins = StandIns(inputs, edit.edit(inputs.tensors))
            stack[-1] = depth, stand_ins
            edit.has_edited = True
        return stand_ins.args, stand_ins.kwargs


class PostHook(InertCopy):
    """Hands on to the caller what a call has done to its stand-ins.

    Parameters
    ----------
    edit : Edit
        The one whose calls end.
    """

    __slots__ = ("_edit",)

    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ARG002
        """End a call."""
        if _is_compiling():
            return None if _is_exporting() else self._edit.end_trace(output)
        stack = self._edit.calls.stack
        is_broken_off = output is None and has_raised()
        stand_ins = None
        # (a call that a hook before ours has broken off has nothing here: what is there is of the call around it)
        if stack and not (is_broken_off and stack[-1][0] != _num_calls(module)):
            stand_ins = stack.pop()[1]
            self._edit.under_way.pop()
        self._edit.remove_last()
        if stand_ins is None:
            return None
        if is_broken_off:
            stand_ins.put_right(None)  # whoever handles the exception may go on with the inputs
            return None
        with torch._C.DisableTorchFunction():
            return stand_ins.put_right(output)


def _is_dual(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _num_calls(module: nn.Module | None) -> int:
    """Count the calls of a module, or of all, that this thread is in."""
    code, found = nn.Module._call_impl.__code__, 0
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and (module is None or frame.f_locals.get("self") is module):
            found += 1
        frame = frame.f_back
    return found


def _warn_of_no_input(edit: Edit, module: nn.Module) -> None:
    if module.training and not edit.has_edited:
        edit.has_edited = True  # said once
        warnings.warn(
            f"a {type_name(module)} whose gradient is to be edited was called with no tensor that requires grad, so that no gradient leaves it; "
            "is it the first module of the model?",
            CaptureWarning,
            stacklevel=2,
        )


def _needs_gradient(tensor: torch.Tensor) -> bool:
    """Say whether a tensor, or what a function transform has wrapped in it, requires grad."""
    while not tensor.requires_grad and _is_functorch(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


def _refuse_transforms(module: nn.Module, inputs: Inputs) -> None:
    """Refuse function transforms and forward-mode differentiation, under which a tensor does not say that what it wraps requires grad."""
    wrapped = [tensor for tensor in (*inputs.tensors, *inputs.others) if _is_functorch(tensor) or _is_dual(tensor)]
    if any(map(_needs_gradient, wrapped)):
        raise UnsupportedModelError(
            f"a {type_name(module)} whose gradient is edited was called inside a function transform (vmap, grad or jvp of torch.func, or forward-mode "
            "differentiation), which the edit cannot follow; remove() it before"
        )


def _refuse(edit: Edit, module: nn.Module, inputs: Inputs) -> None:
    if any(tensor.layout != torch.strided and not tensor.is_nested and tensor.is_leaf for tensor in inputs.tensors):
        raise UnsupportedModelError(
            f"a {type_name(module)} whose gradient is edited was called with a sparse leaf, of which torch makes no view; pass a clone"
        )
    if any(tensor.is_nested and tensor.layout == torch.strided for tensor in inputs.tensors):
        raise UnsupportedModelError(
            f"a {type_name(module)} whose gradient is edited was called with a nested tensor of strided layout, which no autograd function of one's own "
            "takes; use layout=torch.jagged"
        )
    if edit.is_clip and "_is_replica" in vars(module):
        raise UnsupportedModelError(
            f"a {type_name(module)} is called in replicas by DataParallel, each with a part of the batch, so that the joint norm is not known; "
            "use DistributedDataParallel, or one device"
        )
