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
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.utils.hooks import RemovableHandle

from hookstore.compiled import Taps, trace_begin, trace_end
from hookstore.errors import name_error
from hookstore.layout import Call
from hookstore.nested import Plan, flatten, flatten_arguments, type_name
from hookstore.recomputation import recall, remember
from hookstore.schedule import Budget
from hookstore.selection import Layer
from hookstore.shares import Input, ShareWatch, note_inputs, watch_inputs
from hookstore.sink import Sink
from hookstore.watch import Backwards, GradientWatch, distrust_shared_bases
from hookstore.wrappers import own_parameters

_graph_task, _sequence_nr = torch._C._current_graph_task_id, torch._C._autograd._get_sequence_nr
_is_compiling, _is_exporting, _is_tracing = torch.compiler.is_compiling, torch.compiler.is_exporting, torch._C._is_tracing
_fx_thread = getattr(_symbolic_trace, "_is_fx_tracing_tls", None)
# The plain flag of this thread where torch has it: asking torch's own function takes half a microsecond on threads that have never traced.
_is_symbolically_traced: Callable[[], bool] = (
    (lambda: _fx_thread.__dict__.get("flag", False))
    if _fx_thread is not None
    else getattr(_symbolic_trace, "is_fx_symbolic_tracing", None) or _symbolic_trace.is_fx_tracing
)


class InertCopy:
    """Base of hooks: a copied or pickled model gets, in the hook's place, a method of the standard library that does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Noted(NamedTuple):
    """What was noted when a call began whose input gradients are wanted, or that runs during a backward."""

    depth: int  # of the stack, with this call
    sequence_nr: int
    inputs: list[Input]
    structure: int  # of the arguments


class _Calls(threading.local):
    """The calls of one layer that are under way on this thread, innermost last; ``None`` for one that is not recorded."""

    def __init__(self) -> None:
        self.stack: list[Call | None] = []
        self.noted: list[_Noted] = []


class LayerHooks:
    """The hooks of one layer.

    Parameters
    ----------
    layer : Layer
        The layer; its module is referred to weakly.
    kinds : iterable of str
        What is ever captured of it.
    sink : Sink
        Where it goes.
    taps : Taps
        What the recording has in compiled models.
    """

    def __init__(self, layer: Layer, kinds: Iterable[str], sink: Sink, taps: Taps) -> None:
        self.name = layer.name
        self.names = (layer.name, *layer.aliases[: layer.num_names - 1])
        self.sink = sink
        self.kinds = frozenset(kinds)
        self.takes_output_gradient = "gradient" in self.kinds
        self.takes_input_gradient = "input_gradient" in self.kinds
        self.takes_gradient = self.takes_output_gradient or self.takes_input_gradient
        self.calls = _Calls()
        self.was_called = False
        self.is_left_out = False
        self.number, self.switch = taps.add(self), taps.switch
        self.watches: list[GradientWatch | ShareWatch] = []
        self._told: set[tuple[str, ...]] = set()  # what of its values is not stored, and has a row that says so
        self._module: Callable[[], nn.Module | None] = weakref.ref(layer.module)
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
                module.register_forward_pre_hook(self._pre, with_kwargs=not self.kinds.isdisjoint(("input", "input_gradient"))),
                module.register_forward_hook(self._post, always_call=True),
            ]

    def remove(self) -> None:
        """Remove the hooks; does nothing if they are not there."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are on the module."""
        return bool(self._handles)

    @property
    def module(self) -> nn.Module | None:
        """The module, while it is alive."""
        return self._module()

    def replace(self, module: nn.Module | None) -> None:
        """Go on with the module that has taken this one's place, or with none."""
        was_installed = self.is_installed
        self.remove()
        self.forget()
        self._module = weakref.ref(module) if module is not None else lambda: None
        if was_installed:
            self.install()

    def leave_out(self, reason: str) -> None:
        """Note, once, that calls of the layer which are traced cannot be recorded."""
        clock = self.sink.clock
        here = clock.here()
        if not self.is_left_out and here is not None:
            self.is_left_out = True
            due = here.due.layers.get(self.name) if here.due is not None else None
            for kind in sorted(self.kinds & due.takes.keys()) if due is not None else ():
                self.sink.skip_value(self.name, kind, Call(here, 0, clock.step, 0), reason, topic=reason)

    def begin(self) -> Call | None:
        """Note that a call begins, and return it if it is recorded."""
        stack = self.calls.stack
        sink = self.sink
        clock = sink.clock
        coordinates = clock.here() if sink.is_active and not is_traced() else None
        due = coordinates.due.calls.get(self.name) if coordinates is not None and coordinates.due is not None else None
        if coordinates is None or due is None or _graph_task() != -1:
            stack.append(None)  # (in a backward activation checkpointing computes it again)
            return None
        if stack and (stack[-1] is None or stack[-1].coordinates is not coordinates):
            self._clear(stack)
        counter = coordinates.calls.get(self.name)
        if counter is None:
            counter = coordinates.calls.setdefault(self.name, itertools.count())
        self.was_called = True
        # (next is atomic: replicas of a module run on several threads)
        call = tuple.__new__(  # half the time of Call(…)
            Call, (coordinates, next(counter), clock.step, _sequence_nr(), 0, math.nan, due)
        )
        stack.append(call)
        return call

    def _clear(self, stack: list[Call | None]) -> None:
        """Forget calls that began and never ended, and mark their batches."""
        for call in stack:
            if call is not None:
                self.sink.cut_short(call.coordinates, f"a call of layer {self.name!r} was broken off")
        stack.clear()

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
        if call.due is not None and call.due.gradient:
            if torch.is_grad_enabled():
                self.watch(tuple(zip(plan.leaves, tensors, strict=True)), call)
            else:
                self.look_for_graph(tuple(zip(plan.leaves, tensors, strict=True)), call)

    def take_output(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, kind: type) -> Call:
        """Take the tensors that a call returned, and return the call with the value's structure."""
        call = self.of_value(plan, call)
        if call.due is not None and call.due.activation:
            for leaf, tensor in zip(plan.leaves, tensors, strict=True):
                self.sink.put(self.name, "activation", leaf, tensor, call)
            if plan.others or not tensors:
                self.tell("activation", plan, call, "" if tensors else f"the module returned a {type_name(kind)} without tensors")
        return call

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None) -> None:
        """Note what a call begins with; there is no call yet where it may repeat another one."""
        calls = self.calls
        depth = len(calls.stack)
        while calls.noted and calls.noted[-1].depth >= depth:
            calls.noted.pop()  # left behind by a call that was broken off
        inputs: list[Input] = []
        structure = 0
        is_wanted = self.takes_input_gradient if call is None or call.due is None else call.due.input_gradient
        if is_wanted and torch.is_grad_enabled():
            tensors, plan = flatten_arguments(args, kwargs)
            leaves = [(leaf, tensor) for leaf, tensor in zip(plan.leaves, tensors, strict=True) if tensor.requires_grad]
            inputs = note_inputs(leaves)
            structure = self.sink.structure(plan.text)
            if call is not None and len(inputs) < len(leaves):
                noted = {entry.leaf for entry in inputs}
                for leaf in (leaf for leaf, _ in leaves if leaf not in noted):
                    self.sink.skip_value(self.name, "input_gradient", call, "it is a functorch tensor (vmap, grad or jvp)", leaf=leaf)
        calls.noted.append(_Noted(depth, _sequence_nr(), inputs, structure))

    def _noted(self) -> _Noted | None:
        """Return what was noted of the call that has just been taken off the stack."""
        calls = self.calls
        while calls.noted:
            noted = calls.noted.pop()
            if noted.depth == len(calls.stack) + 1:
                return noted
        return None

    def break_off(self, call: Call) -> None:
        """Note that a call raised, so that its batch is not whole."""
        self._noted()
        self.sink.cut_short(call.coordinates, f"the forward of layer {self.name!r} raised {describe_error()}")

    def see_again(self, output: object) -> None:
        """Take the gradients of a call that ran during a backward, and repeats one that ran without grad."""
        noted = self._noted()
        repeated = recall(self)
        if noted is None or repeated is None or not torch.is_grad_enabled():
            return
        with torch._C.DisableTorchFunction():
            call = repeated.call._replace(sequence_nr=noted.sequence_nr)
            tensors, plan = flatten(output)
            outputs = list(zip(plan.leaves, tensors, strict=True))
            backward = Backwards(repeated.backward)
            self._forget_others(outputs, call)
            due = call.due
            if due is None or due.output_gradient:
                self._watch_outputs(outputs, call, backward)
            if due is None or due.input_gradient:
                self._watch_inputs(noted, outputs, call, backward)

    def see_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call) -> None:
        """Take what the module is called with."""
        tensors, plan = flatten_arguments(args, kwargs)
        self.take_arguments(tensors, plan, call, are_there_any=bool(args or kwargs))

    def take_arguments(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, *, are_there_any: bool) -> None:
        """Take the tensors that the module is called with."""
        call = self.of_value(plan, call)
        if call.due is None or not call.due.input:
            return
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            self.sink.put(self.name, "input", leaf, tensor, call)
        if plan.others or (not tensors and are_there_any):
            self.tell("input", plan, call, "" if tensors else "the module was called without tensors")

    def of_value(self, plan: Plan, call: Call) -> Call:
        """Return the call as the leaves of a value carry it, with the value's structure."""
        if not plan.text:
            return call
        return tuple.__new__(Call, (*call[:4], self.sink.structure(plan.text), *call[5:]))  # a third of the time of _replace

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

    def look_for_graph(self, outputs: Sequence[tuple[str, torch.Tensor]], call: Call) -> None:
        """Take what a call returned while gradients were off: its forward may have turned them on for itself, or a backward may run it again."""
        made_here = [
            (leaf, output)
            for leaf, output in outputs
            if output.requires_grad and output.grad_fn is not None and output.grad_fn._sequence_nr() >= call.sequence_nr
        ]
        if made_here:
            self.watch(made_here, call)
        else:
            remember(self, call)

    def watch(self, outputs: Sequence[tuple[str, torch.Tensor]], call: Call) -> None:
        """Have the gradients of a call's outputs and inputs captured when they arrive."""
        if self.watches and self.watches[0].coordinates is not call.coordinates:
            self._forget_others(outputs, call)
        due = call.due
        if due is None or not due.input_gradient:
            self._watch_outputs(outputs, call, Backwards(0) if len(outputs) > 1 else 0)
        else:
            backward = Backwards(0)
            if due.output_gradient:
                self._watch_outputs(outputs, call, backward)
            noted = self._noted()
            if noted is not None and noted.inputs:
                with torch._C.DisableTorchFunction():
                    self._watch_inputs(noted, outputs, call, backward)

    def _watch_inputs(self, noted: _Noted, outputs: Sequence[tuple[str, torch.Tensor]], call: Call, backward: Backwards) -> None:
        call = call._replace(structure=noted.structure)
        self.watches.extend(watch_inputs(self.sink, self.name, noted.inputs, outputs, call, backward))

    def _forget_others(self, outputs: Sequence[tuple[str, torch.Tensor]], call: Call) -> None:
        """Take the hooks of another batch off tensors that outlive it."""
        if self.watches and self.watches[0].coordinates is not call.coordinates:
            current = {id(output): output for _, output in outputs}
            for watch in self.watches:
                watch.forget_any(current)
            self.watches.clear()

    def _watch_outputs(self, outputs: Sequence[tuple[str, torch.Tensor]], call: Call, backward: int | Backwards) -> None:
        watched = []
        for leaf, output in outputs:
            if not output.requires_grad:
                continue
            if torch._C._functorch.is_functorch_wrapped_tensor(output):
                self.sink.skip_value(self.name, "gradient", call, "it is a functorch tensor (vmap, grad or jvp)", leaf=leaf)
                continue
            watch = GradientWatch(self.sink, self.name, "gradient", leaf, output, call, backward)
            self.watches.append(watch)
            watched.append((output, watch))
        if len(watched) > 1:
            distrust_shared_bases(watched)

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


def has_raised() -> bool:
    """Say whether the forward hook that asks, one that is always called, is called because the forward raised."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename != nn.modules.module.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name == "_call_impl"  # otherwise it is called from a function inside that


def describe_error() -> str:
    """Name the exception that is being handled."""
    error = sys.exc_info()[1]
    return "an exception" if error is None else name_error(error)


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
        if call is None:
            if hooks.takes_gradient and _graph_task() != -1:
                with torch._C.DisableTorchFunction():
                    hooks.note(args, kwargs or {}, None)
            return
        due = call.due
        if due is None or not due.arguments:
            return
        with torch._C.DisableTorchFunction():  # a user's mode or tensor subclass must not see what we do
            if due.input_gradient:
                hooks.note(args, kwargs or {}, call)
            if due.input:
                hooks.see_arguments(args, kwargs or {}, call)
            if due.parameter:
                for name, parameter in own_parameters(module):
                    hooks.sink.put(hooks.name, "parameter", name, parameter, call)


class _PostHook(InertCopy):
    __slots__ = ("_hooks",)

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        hooks = self._hooks
        if _is_compiling():
            if not _is_exporting():
                trace_end(hooks.number, hooks.switch, hooks.takes_output_gradient, output)
            return
        stack = hooks.calls.stack
        call = stack.pop() if stack else None
        if call is None:
            if hooks.takes_gradient and _graph_task() != -1:
                hooks.see_again(output)
            return
        if type(output) is torch.Tensor and not torch._C._len_torch_function_stack():  # the usual case, as short as can be
            due = call.due
            if due is None:
                return
            if due.activation:
                hooks.sink.put(hooks.name, "activation", "", output, call)
            if due.gradient:
                if torch.is_grad_enabled():
                    hooks.watch((("", output),), call)
                else:
                    hooks.look_for_graph((("", output),), call)
        elif output is None and has_raised():
            hooks.break_off(call)
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
