"""The hooks on a model: they turn what a forward and a backward pass show into captures.

Activations, inputs and parameters are copied by module hooks. Gradients are copied by tensor hooks that the forward hook sets on the module's output:
full backward hooks would make in-place operations fail and change the identity of what modules return.

A hook that the user registers later than ours may replace an output after we saw it, and sees a gradient after we did.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.utils.hooks import RemovableHandle

from hookstore.compiled import Taps, trace_begin, trace_end
from hookstore.layout import Call
from hookstore.nested import Plan, flatten, flatten_arguments, type_name
from hookstore.schedule import Budget
from hookstore.selection import Layer
from hookstore.sink import Sink
from hookstore.watch import GradientWatch

_graph_task, _sequence_nr = torch._C._current_graph_task_id, torch._C._autograd._get_sequence_nr
_is_compiling, _is_exporting, _is_tracing = torch.compiler.is_compiling, torch.compiler.is_exporting, torch._C._is_tracing
# The plain flag where torch has it. Of the functions around it the older one logs a warning in newer versions.
_is_symbolically_traced: Callable[[], bool] = (
    getattr(_symbolic_trace, "_get_is_fx_tracing", None)
    or getattr(_symbolic_trace, "is_fx_symbolic_tracing", None)
    or _symbolic_trace.is_fx_tracing
)


class InertCopy:
    """Base of hooks: a copied or pickled model gets, in the hook's place, a method of the standard library that does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Calls(threading.local):
    """The calls of one layer that are under way on this thread, innermost last; ``None`` for one that is not recorded."""

    def __init__(self) -> None:
        self.stack: list[Call | None] = []


class LayerHooks:
    """The hooks of one layer.

    Parameters
    ----------
    layer : Layer
        The layer; its module is referred to weakly.
    kinds : iterable of str
        What to capture.
    sink : Sink
        Where it goes.
    taps : Taps
        What the recording has in compiled models.
    """

    def __init__(self, layer: Layer, kinds: Iterable[str], sink: Sink, taps: Taps) -> None:
        self.name = layer.name
        self.sink = sink
        self.kinds = frozenset(kinds)
        self.takes_activation = "activation" in self.kinds
        self.takes_gradient = "gradient" in self.kinds
        self.takes_arguments = not self.kinds.isdisjoint(("input", "parameter"))
        self.calls = _Calls()
        self.was_called = False
        self.number, self.switch = taps.add(self), taps.switch
        self.watches: list[GradientWatch] = []
        self._told: set[tuple[str, ...]] = set()  # what of its values is not stored, and has a row that says so
        self._module = weakref.ref(layer.module)
        self._pre: Callable[..., None] = _PreHook(self)
        self._post: Callable[..., None] = _PostHook(self)
        if sink.clock.budget is not None:
            self._pre, self._post = _TimedHook(self._pre, sink.clock.budget), _TimedHook(self._post, sink.clock.budget)
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Register the hooks; does nothing if they are."""
        module = self._module()
        if not self._handles and module is not None:
            self._handles = [
                module.register_forward_pre_hook(self._pre, with_kwargs="input" in self.kinds),
                module.register_forward_hook(self._post),
            ]

    def remove(self) -> None:
        """Remove the hooks; does nothing if they are not there."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are on the module."""
        return bool(self._handles)

    def begin(self) -> Call | None:
        """Note that a call begins, and return it if it is recorded."""
        stack = self.calls.stack
        sink = self.sink
        clock = sink.clock
        coordinates = clock.here() if sink.is_active and not is_traced() else None
        if coordinates is None or _graph_task() != -1:  # the latter: activation checkpointing computes it again
            stack.append(None)
            return None
        if stack and (stack[-1] is None or stack[-1].coordinates is not coordinates):
            stack.clear()  # left behind by a forward that raised
        counter = coordinates.calls.get(self.name)
        if counter is None:
            counter = coordinates.calls.setdefault(self.name, itertools.count())
        self.was_called = True
        # (next is atomic: replicas of a module run on several threads)
        call = tuple.__new__(Call, (coordinates, next(counter), clock.step, _sequence_nr(), 0, math.nan))  # half the time of Call(…)
        stack.append(call)
        return call

    def current(self) -> Call | None:
        """Return the innermost call if it is recorded."""
        stack = self.calls.stack
        return stack[-1] if stack else None

    def end(self) -> Call | None:
        """Note that the innermost call ends, and return it if it is recorded."""
        stack = self.calls.stack
        return stack.pop() if stack else None

    def see(self, output: object, call: Call) -> None:
        """Take what a call returned, where that is not one plain tensor."""
        tensors, plan = flatten(output)
        call = self.take_output(tensors, plan, call, type(output))
        if self.takes_gradient and torch.is_grad_enabled():
            self.watch(tuple(zip(plan.leaves, tensors, strict=True)), call)

    def take_output(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, kind: type) -> Call:
        """Take the tensors that a call returned, and return the call with the value's structure."""
        call = self.of_value(plan, call)
        if self.takes_activation:
            for leaf, tensor in zip(plan.leaves, tensors, strict=True):
                self.sink.put(self.name, "activation", leaf, tensor, call)
            if plan.others or not tensors:
                self.tell("activation", plan, call, "" if tensors else f"the module returned a {type_name(kind)} without tensors")
        return call

    def see_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        """Take what the module is called with."""
        tensors, plan = flatten_arguments(args, kwargs)
        self.take_arguments(tensors, plan, call, are_there_any=bool(args or kwargs))

    def take_arguments(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, *, are_there_any: bool) -> None:
        """Take the tensors that the module is called with."""
        call = self.of_value(plan, call)
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            self.sink.put(self.name, "input", leaf, tensor, call)
        if plan.others or (not tensors and are_there_any):
            self.tell("input", plan, call, "" if tensors else "the module was called without tensors")

    def of_value(self, plan: Plan, call: Call) -> Call:
        """Return the call as the leaves of a value carry it, with the value's structure."""
        if not plan.text:
            return call
        return tuple.__new__(Call, (*call[:4], self.sink.structure(plan.text), call.scale))  # a third of the time of _replace

    def tell(self, kind: str, plan: Plan, call: Call, why_empty: str) -> None:
        """Note what is not stored of a value, or why there is nothing at all, the first time that it is seen."""
        if (kind, plan.text) in self._told:
            return
        self._told.add((kind, plan.text))
        if why_empty:
            self.sink.skip_value(self.name, kind, call, why_empty)
        for other in plan.others:
            if (kind, other.leaf, other.type) not in self._told and (other.leaf or not why_empty):
                self._told.add((kind, other.leaf, other.type))
                self.sink.skip_other(self.name, kind, call, other)

    def watch(self, outputs: Sequence[tuple[str, torch.Tensor]], call: Call) -> None:
        """Have the gradients of a call's outputs captured when they arrive."""
        if self.watches and self.watches[0].coordinates is not call.coordinates:
            current = {id(output): output for _, output in outputs}
            for watch in self.watches:
                watch.forget_any(current)
            self.watches.clear()
        bases: dict[int, list[GradientWatch]] = {}
        for leaf, output in outputs:
            if not output.requires_grad:
                continue
            if torch._C._functorch.is_functorch_wrapped_tensor(output):
                self.sink.skip_value(self.name, "gradient", call, "it is a functorch tensor (vmap, grad or jvp)", leaf=leaf)
                continue
            watch = GradientWatch(self.sink, self.name, leaf, output, call)
            self.watches.append(watch)
            bases.setdefault(id(output if output._base is None else output._base), []).append(watch)
        for sharing in bases.values():
            if len(sharing) > 1:
                for watch in sharing:
                    watch.distrust_base()

    def forget(self) -> None:
        """Take the hooks off tensors that outlive their batch."""
        for watch in self.watches:
            watch.forget_any({})
        self.watches.clear()


def is_traced() -> bool:
    """Say whether the model is being traced instead of run, by something else than the compiler."""
    if _is_tracing():
        _JitTrace.may_be_checked = True
        return True
    return _is_symbolically_traced() or (_JitTrace.may_be_checked and _JitTrace.is_checked())


class _JitTrace:
    """The check that `torch.jit.trace` makes of its work, which calls the model outside the trace."""

    may_be_checked = False  # since something has been traced

    @classmethod
    def is_checked(cls) -> bool:
        """Say whether this is a call of the check; that costs a walk up the stack, and so is looked at only until the trace is left."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == torch.jit._trace.__file__:
                return True
            frame = frame.f_back
        cls.may_be_checked = False
        return False


class _PreHook(InertCopy):
    __slots__ = ("_hooks",)

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        hooks = self._hooks
        if _is_compiling():
            if not _is_exporting():
                trace_begin(hooks.number, hooks.switch, hooks.kinds, module, args, kwargs or {})
            return
        call = hooks.begin()
        if call is None or not hooks.takes_arguments:
            return
        with torch._C.DisableTorchFunction():  # a user's mode or tensor subclass must not see what we do
            if "input" in hooks.kinds:
                hooks.see_arguments(args, kwargs or {}, call)
            if "parameter" in hooks.kinds:
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        hooks.sink.put(hooks.name, "parameter", name, parameter, call)


class _PostHook(InertCopy):
    __slots__ = ("_hooks",)

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        hooks = self._hooks
        if _is_compiling():
            if not _is_exporting():
                trace_end(hooks.number, hooks.switch, hooks.takes_gradient, output)
            return
        stack = hooks.calls.stack
        call = stack.pop() if stack else None
        if call is None:
            return
        if type(output) is torch.Tensor and not torch._C._len_torch_function_stack():  # the usual case, as short as can be
            if hooks.takes_activation:
                hooks.sink.put(hooks.name, "activation", "", output, call)
            if hooks.takes_gradient and torch.is_grad_enabled():
                hooks.watch((("", output),), call)
        else:
            with torch._C.DisableTorchFunction():
                hooks.see(output, call)


class _TimedHook(InertCopy):
    """A hook whose time the budget counts."""

    __slots__ = ("_budget", "_hook")

    def __init__(self, hook: Callable[..., None], budget: Budget) -> None:
        self._hook = hook
        self._budget = budget

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if _is_compiling():
            self._hook(*args, **kwargs)  # its time is measured where the graph runs
        else:
            with self._budget.measured():
                self._hook(*args, **kwargs)
