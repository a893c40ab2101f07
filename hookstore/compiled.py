"""Compiled models: hooks that `torch.compile` traces into its graph.

What a hook does in an eager model it cannot do in a trace, where there are no values. There it leaves operators in the graph that call back here when the
graph runs, in the order of the model's calls: they return nothing to the model, have an effect, and so are neither left out nor moved nor run twice. Each has
a whole number that says of which layer it is. The call that a gradient belongs to is a small tensor, which the forward makes and the compiler keeps for the
backward with everything else that it keeps: it comes back with its own forward, whatever the order of backwards.

Whether anything is recorded is an attribute of a module global, upon which the compiler sets a guard: one graph with operators and one without, and no
compiling when a schedule goes from one to the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.errors import UnsupportedModelError
from hookstore.format import PHASES
from hookstore.layout import Call
from hookstore.nested import Plan, flatten, flatten_arguments
from hookstore.schedule import Coordinates
from hookstore.sink import Sink
from hookstore.watch import View
from hookstore.wrappers import own_parameters

_graph_task, _sequence_nr = torch._C._current_graph_task_id, torch._C._autograd._get_sequence_nr
_LEAST_TORCH = (2, 11)  # the first with effects in the backward of a compiled model
Numbers = np.ndarray[Any, np.dtype[np.int64]]
_log = logging.getLogger("hookstore")


class Tapped(Protocol):
    """A layer, as the operators of a compiled model need it."""

    name: str
    sink: Sink
    kinds: frozenset[str]

    def leave_out(self, reason: str) -> None:
        """Note that calls of the layer which are traced cannot be recorded."""

    def begin(self) -> Call | None:
        """Note that a call begins, and return it if it is recorded."""

    def current(self) -> Call | None:
        """Return the innermost call if it is recorded."""

    def end(self) -> Call | None:
        """Note that the innermost call ends, and return it if it is recorded."""

    def take_output(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, kind: type) -> Call:
        """Take the tensors that a call returned, and return the call with the value's structure."""

    def take_arguments(self, tensors: Sequence[torch.Tensor], plan: Plan, call: Call, *, are_there_any: bool) -> None:
        """Take the tensors that the module is called with."""


def why_none() -> str | None:
    """Say why this torch cannot record compiled models, or return ``None``."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _LEAST_TORCH or not _HAS_EFFECTS:
        least = ".".join(map(str, _LEAST_TORCH))
        return f"recording compiled models needs torch {least} or newer, and this is {torch.__version__}; record the model without torch.compile"
    return None


# What the traced hooks look at ------------------------------------------------------------------------------------


class _Switches:
    """An attribute for each recording: whether what is called now is recorded."""


SWITCHES = _Switches()
_numbers = itertools.count()
_layers: dict[int, Tapped] = {}
_ticks: dict[int, Callable[[bool], None]] = {}
_plans: list[tuple[Plan, Any]] = []  # and the type of the value, or whether there is any argument


class Taps:
    """What one recording has in compiled graphs.

    Parameters
    ----------
    on_tick : callable
        Called when a compiled graph calls the root module, with whether that graph records.
    """

    def __init__(self, on_tick: Callable[[bool], None]) -> None:
        self._number = next(_numbers)
        self.number = str(self._number)
        self.switch = f"recording_{self.number}"
        self._layers: list[int] = []
        self.turn(on=False)
        _ticks[self._number] = on_tick

    def turn(self, *, on: bool) -> None:
        """Say whether what is called from now on is recorded."""
        if getattr(SWITCHES, self.switch, None) is not on:
            setattr(SWITCHES, self.switch, on)

    def add(self, layer: Tapped) -> str:
        """Return the number under which the operators know a layer, as text: of numbers that differ the compiler may make variables (under FSDP2)."""
        number = next(_numbers)
        _layers[number] = layer
        self._layers.append(number)
        return str(number)

    def close(self) -> None:
        """Let go of everything; graphs that are compiled go on without recording."""
        self.turn(on=False)
        _ticks.pop(self._number, None)
        for number in self._layers:
            _layers.pop(number, None)
        _Traced.is_any = _Traced.is_any and bool(_layers)
        _Settings.turn(num_layers=len(_layers))


# In the trace -----------------------------------------------------------------------------------------------------


def trace_tick(taps_number: str, switch: str) -> None:
    """Trace the root module's call."""
    prepare()
    tick(int(taps_number), bool(getattr(SWITCHES, switch)))


def trace_begin(
    of_layer: str, switch: str, kinds: frozenset[str], module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Trace the beginning of a layer's call."""
    if not getattr(SWITCHES, switch):
        return
    prepare()
    number = int(of_layer)
    if not may_have_operators(number):
        return
    begin(number)
    if "input_gradient" in kinds:
        skip(number, "input_gradient", 0)
    if "input" in kinds:
        tensors: list[torch.Tensor] = []
        positional = tuple([describe(value, tensors) for value in args])
        keywords = tuple([(name, describe(value, tensors)) for name, value in kwargs.items()])
        show(tensors, number, "input", plan_of_arguments(positional, keywords))
    if "parameter" in kinds:
        named = list(own_parameters(module))
        show([parameter for _, parameter in named], number, "parameter", plan_of_parameters(tuple([name for name, _ in named])))


def trace_end(of_layer: str, switch: str, takes_gradient: bool, output: Any) -> None:  # noqa: FBT001
    """Trace the end of a layer's call."""
    if not getattr(SWITCHES, switch):
        return
    prepare()
    number = int(of_layer)
    if may_have_operators(number):
        tensors: list[torch.Tensor] = []
        described = describe(output, tensors)
        end(tensors, number, takes_gradient, plan_of(described))


def prepare() -> None:
    """Make ready for being traced; the compiler runs it, and traces nothing of it."""
    obstacle = why_none()
    if obstacle is not None:
        raise UnsupportedModelError(obstacle)
    _Traced.is_any = True
    meet_compiler()
    _tracing.graph_task = _graph_task()
    for function in (tick, begin, skip, show, end):
        torch.compiler.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)
    _compiling_begins()


def may_have_operators(number: int) -> bool:
    """Say whether a layer is called where operators with effects may stand, and note it where not; the compiler runs it, and has a constant."""
    graph = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output
    if _runs_as_it_is(graph.compiler_fn):
        return True
    tracer = graph.current_tracer
    while getattr(tracer, "parent", None) is not None:
        inside = str(tracer.source_target)
        if inside not in _TRANSPARENT:
            layer = _layers.get(number)
            if layer is not None:
                layer.leave_out(f"it is called inside {inside} in a compiled graph, where operators that record have no place")
            return False
        tracer = tracer.parent
    return True


def _runs_as_it_is(backend: Any) -> bool:
    """Say whether a backend runs the graph as it is, as the one does that ``torch.cond`` and its like have in an eager model."""
    function = getattr(getattr(backend, "_torchdynamo_orig_backend", backend), "compiler_fn", backend)
    return getattr(function, "__module__", "") == "torch._dynamo.backends.debugging" and getattr(function, "__name__", "") in (
        "eager",
        "fn",
    )


_TRANSPARENT = (
    "tag_activation_checkpoint",
    "autograd.Function",
)  # what dynamo traces as a graph of its own that becomes part of the one around it


def describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Append the tensors of a value, and return what there is of it beside, as far as the compiler can trace it: see `_rebuild`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor", None, ()
    if value is None or kind in (str, int, float, bool):
        return "itself", kind, ()
    if isinstance(value, tuple | list) and kind is not torch.Size:
        return "items", kind, tuple([describe(item, tensors) for item in value])
    if isinstance(value, dict):
        return "dict", kind, tuple([(key, describe(item, tensors)) for key, item in value.items()])
    if hasattr(kind, "__dataclass_fields__"):
        return "fields", kind, tuple([(name, describe(getattr(value, name), tensors)) for name in kind.__dataclass_fields__])
    return "other", kind, ()


def plan_of(described: Any) -> int:
    """Return the number of how a value is built; the compiler runs it, and has a constant."""
    return _number_of(flatten(_rebuild(described))[1], type(_rebuild(described)))


def plan_of_arguments(positional: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]) -> int:
    """Return the number of how a module's arguments are built; the compiler runs it, and has a constant."""
    args = tuple(_rebuild(described) for described in positional)
    return _number_of(flatten_arguments(args, {name: _rebuild(described) for name, described in keywords})[1], bool(args or keywords))


def plan_of_parameters(names: tuple[str, ...]) -> int:
    """Return the number of a module's parameters; the compiler runs it, and has a constant."""
    return _number_of(Plan("", names, ()), None)


def _number_of(plan: Plan, about: Any) -> int:
    if (plan, about) not in _plans:
        _plans.append((plan, about))
    return _plans.index((plan, about))


def _rebuild(described: Any) -> Any:
    """Return a value that is built like the one described, with tensors that are not the ones."""
    how, kind, inner = described
    if how == "tensor":
        return _SOME_TENSOR
    if how == "itself":
        return kind()
    if how == "items":
        items = [_rebuild(item) for item in inner]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if how == "other":
        return type(kind.__name__, (), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})()
    value = kind.__new__(kind)
    for name, item in inner:
        if how == "dict":
            (OrderedDict if issubclass(kind, OrderedDict) else dict).__setitem__(value, name, _rebuild(item))
        if how == "fields" or dataclasses.is_dataclass(kind):
            object.__setattr__(value, name, _rebuild(item))
    return value


_SOME_TENSOR = torch.empty(0)
for _function in (prepare, may_have_operators, plan_of, plan_of_arguments, plan_of_parameters):
    setattr(_function, "_dynamo_marked_constant", True)  # noqa: B010  # as torch.compiler.assume_constant_result does, which would import the compiler


# In the graph -----------------------------------------------------------------------------------------------------
# These are nodes of the graph that the compiler hands on. They run when its operators are traced with autograd, and, where a backend runs that graph as it
# is, each time.


class _Tracing(threading.local):
    """What is known of the trace that this thread makes.

    Attributes
    ----------
    sequence_nr : dict
        For each layer autograd's counter when its last call began.
    graph_task : int
        The backward that is under way around the trace, -1 for none.
    """

    def __init__(self) -> None:
        self.sequence_nr: dict[int, int] = {}
        self.graph_task = -1


_tracing = _Tracing()


def tick(number: int, is_watched: bool) -> None:  # noqa: FBT001
    """Go on to the next batch."""
    if not _is_traced_again():
        _chain(torch.ops.hookstore.tick.default, number, is_watched)


def begin(number: int) -> None:
    """Begin a call of a layer."""
    if not _is_traced_again():
        _refuse_cuda_graphs()
        _tracing.sequence_nr[number] = _sequence_nr()
        _chain(torch.ops.hookstore.begin.default, number)


def skip(number: int, kind: str, reason: int) -> None:
    """Say that something of a layer's call is not captured."""
    if not _is_traced_again():
        _chain(torch.ops.hookstore.skip.default, number, kind, reason)


def show(values: Sequence[torch.Tensor], number: int, kind: str, plan: int) -> None:
    """Show what a layer's call gets."""
    if any(map(_is_wrapped, values)):
        skip(number, kind, 1)
    elif not _is_traced_again():
        _chain(torch.ops.hookstore.show.default, [value.detach() for value in values], number, kind, plan)


def end(values: Sequence[torch.Tensor], number: int, takes_gradient: bool, plan: int) -> None:  # noqa: FBT001
    """End a call of a layer."""
    if _is_traced_again():
        return
    if any(map(_is_wrapped, values)):
        for kind in ("activation", "gradient"):
            skip(number, kind, 1)
        _chain(torch.ops.hookstore.end_without.default, number)
        return
    detached = [value.detach() for value in values]
    watched = (
        [position for position, value in enumerate(values) if value.requires_grad] if takes_gradient and torch.is_grad_enabled() else []
    )
    if not watched:
        _chain(torch.ops.hookstore.end.default, detached, number, plan)
        return
    call = _chain(torch.ops.hookstore.end_watched.default, detached, number, plan)
    bases = [id(values[position] if values[position]._base is None else values[position]._base) for position in watched]
    for position, base in zip(watched, bases, strict=True):
        _Watch(values[position], call, number, plan, position, has_own_base=bases.count(base) == 1)


def _is_traced_again() -> bool:
    """Say whether this is the backward of a trace, in which activation checkpointing computes again what has been traced."""
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return is_fake and _graph_task() != _tracing.graph_task


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _refuse_cuda_graphs() -> None:
    settings = sys.modules.get("torch._inductor.config")
    if settings is not None and settings.triton.cudagraphs:
        raise UnsupportedModelError(
            "hookstore cannot record what runs as CUDA graphs (mode='reduce-overhead', 'triton.cudagraphs'), since replaying them runs no Python; "
            "compile with mode='default' or 'max-autotune-no-cudagraphs'"
        )


def _chain(operator: torch._ops.OpOverload, *arguments: Any) -> torch.Tensor:
    """Call an operator, and have it run after the one before: inductor of torch 2.14 lets operators with effects go out of order where no data binds them."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    if mode is None:  # a backend that runs the graph as it is
        made: torch.Tensor = operator(None, *arguments)
        return made
    made = operator(getattr(mode, _LAST, None), *arguments)
    setattr(mode, _LAST, made)
    _save_for_backward(operator)
    return made


_LAST = "_hookstore_last"  # what the last operator of a trace returned, kept where it goes away with the trace


def _save_for_backward(operator: torch._ops.OpOverload) -> None:
    """Have the compiler keep what an operator returned, where it would compute that again in the backward because of activation checkpointing."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return
    for node in itertools.islice(reversed(mode.tracer.graph.nodes), 8):
        made_by = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else node
        if operator in (node.target, *node.args, made_by.target, *made_by.args):
            node.meta.pop("recompute", None)


class _Watch:
    """Tensor hooks as `hookstore.watch.GradientWatch` has them, which are traced into the backward graph: in-place edits that come later are known then."""

    def __init__(self, output: torch.Tensor, call: torch.Tensor, number: int, plan: int, position: int, *, has_own_base: bool) -> None:
        self._call = call
        self._which = (number, plan, position)
        self._version: torch.Tensor | None = None
        self._unedited = output._version
        base = output._base
        self._base_view: View | None = None
        self._has_arrived = False
        if _is_given(output):
            self._gap(0)
            return
        output.register_hook(self._of_output)
        if base is not None and not base.is_leaf:
            self._version = output.detach()  # shares the version counter
            began = _tracing.sequence_nr.get(number)
            made = None if _is_given(base) or base.grad_fn is None else base.grad_fn._sequence_nr()
            is_inside = made is not None and began is not None and made >= began
            if has_own_base and is_inside:
                self._base_view = View.of(output, base)
            base.register_hook(self._of_base)

    @property
    def _is_edited(self) -> bool:
        return self._version is not None and self._version._version != self._unedited

    def _of_output(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not self._is_edited:
            self._has_arrived = True
            torch.ops.hookstore.gradient(gradient.detach(), self._call, *self._which)

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        has_arrived, self._has_arrived = self._has_arrived, False
        if gradient is None or has_arrived:
            return
        if not self._is_edited:
            self._gap(2)
        elif self._base_view is None:
            self._gap(1)
        else:
            torch.ops.hookstore.gradient(self._base_view.look_at(gradient.detach()), self._call, *self._which)

    def _gap(self, reason: int) -> None:
        torch.ops.hookstore.no_gradient(self._call, *self._which, reason)


_NO_GRADIENT = (
    "the module returned what the compiled region was given, whose gradient comes about outside",
    "the output is a view that was edited in place, and the gradient of its base is not its own alone",
    "the output is a view whose gradient did not arrive, while that of its base did, as when a compiled region returns several views of it",
)
_NOT_IN_GRAPHS = (
    "the module is compiled, and in a compiled graph its own share of an input's gradient cannot be told from others'",
    "it is a functorch tensor (vmap, grad or jvp), which stands for many values",
)
_REENTRANT = (
    "the compiled region is computed again by reentrant checkpointing, where which call that is cannot be known; use use_reentrant=False"
)


def _is_given(tensor: torch.Tensor) -> bool:
    """Say whether a tensor that requires grad comes from outside the graph."""
    return tensor.grad_fn is None or not tensor.grad_fn.next_functions


# When the graph runs ----------------------------------------------------------------------------------------------

_NUM_CALL = 7  # numbers that a call is: phase, epoch, batch, number, step, sequence_nr, structure


def _run_tick(_after: object, number: int, is_watched: bool) -> torch.Tensor:  # noqa: FBT001
    on_tick = _ticks.get(number)
    if on_tick is not None and _graph_task() == -1:
        on_tick(is_watched)
    return torch.empty(0, device="cpu")


def _run_begin(_after: object, number: int) -> torch.Tensor:
    layer = _layers.get(number)
    if layer is not None and _graph_task() == -1:
        with _measured(layer):
            layer.begin()
    return torch.empty(0, device="cpu")


def _run_skip(_after: object, number: int, kind: str, reason: int) -> torch.Tensor:
    layer = _layers.get(number)
    call = None if layer is None or _graph_task() != -1 else layer.current()
    if layer is not None and call is not None and kind in layer.kinds:
        layer.sink.skip_value(layer.name, kind, call, _NOT_IN_GRAPHS[reason])
    return torch.empty(0, device="cpu")


def _run_show(_after: object, values: Sequence[torch.Tensor], number: int, kind: str, plan: int) -> torch.Tensor:
    layer = _layers.get(number)
    call = None if layer is None or _graph_task() != -1 else layer.current()
    if layer is not None and call is not None:
        plan_of_values, are_there_any = _plans[plan]
        with _measured(layer), _undisturbed():
            if kind == "input":
                layer.take_arguments(values, plan_of_values, call, are_there_any=are_there_any)
            else:
                for name, parameter in zip(plan_of_values.leaves, values, strict=True):
                    layer.sink.put(layer.name, "parameter", name, parameter, call)
    return torch.empty(0, device="cpu")


def _run_end(_after: object, values: Sequence[torch.Tensor], number: int, plan: int) -> torch.Tensor:
    layer = _layers.get(number)
    if layer is not None and _graph_task() == -1:
        _end(layer, values, plan)
    return torch.empty(0, device="cpu")


def _run_end_watched(_after: object, values: Sequence[torch.Tensor], number: int, plan: int) -> torch.Tensor:
    layer = _layers.get(number)
    with _undisturbed():
        if _graph_task() != -1:
            return torch.from_numpy(_numbers_again(layer, number, plan))
        numbers = _no_call(plan)
        call = None if layer is None else _end(layer, values, plan)
        if call is not None:
            here = call.coordinates
            where = (PHASES.index(here.phase), here.epoch, here.batch)
            numbers[:_NUM_CALL] = (*where, call.number, call.step, call.sequence_nr, call.structure)
        frame = _checkpoint_frame()
        if frame is not None:
            _checkpointed.setdefault(frame, _Checkpointed()).calls.setdefault(number, []).append(numbers)
        return torch.from_numpy(numbers)


def _run_end_without(_after: object, number: int) -> torch.Tensor:
    layer = _layers.get(number)
    if layer is not None and _graph_task() == -1:
        layer.end()
    return torch.empty(0, device="cpu")


def _no_call(plan: int) -> Numbers:
    numbers = np.zeros(_NUM_CALL + len(_plans[plan][0].leaves), dtype=np.int64)
    numbers[0] = -1
    return numbers


# A compiled block inside an activation checkpoint runs again in the backward, as a whole, and makes the tensors anew that the backward gets. The frame of
# the checkpoint says which forward that is.


class _Checkpointed:
    """What was called inside a checkpoint: for each layer its calls, and how many of them a backward has made again."""

    def __init__(self) -> None:
        self.calls: dict[int, list[Numbers]] = {}
        self.num_again: dict[tuple[int, int], int] = {}


_checkpointed: weakref.WeakKeyDictionary[Any, _Checkpointed] = weakref.WeakKeyDictionary()


def _checkpoint_frame() -> Any:
    """Return what stands for the innermost activation checkpoint that is computed now, for the first time or again."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003
    if hooks is None:
        return None
    pack: Any = getattr(hooks[0], "_torchdynamo_orig_callable", hooks[0])
    kept = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)) if isinstance(pack, types.FunctionType) else {}
    if "target_frame_ref" in kept:
        return kept["target_frame_ref"].cell_contents()
    return kept["frame"].cell_contents if "frame" in kept else None


def _numbers_again(layer: Tapped | None, number: int, plan: int) -> Numbers:
    """Return the numbers of the call that is computed again."""
    frame = _checkpoint_frame()
    first = None if frame is None else _checkpointed.get(frame)
    if first is not None:
        key = (number, _graph_task())
        position = first.num_again.get(key, 0)
        first.num_again[key] = position + 1
        calls = first.calls.get(number, ())
        if position < len(calls):
            return calls[position]
    here = None if layer is None else layer.sink.clock.here()
    if layer is not None and here is not None:
        layer.sink.skip_value(layer.name, "gradient", Call(here, 0, layer.sink.clock.step, 0), _REENTRANT)
    return _no_call(plan)


def _end(layer: Tapped, values: Sequence[torch.Tensor], plan: int) -> Call | None:
    with _measured(layer), _undisturbed():
        call = layer.end()
        if call is None:
            return None
        plan_of_values, kind = _plans[plan]
        return layer.take_output(values, plan_of_values, call, kind)


def _run_gradient(gradient: torch.Tensor, call: torch.Tensor, number: int, plan: int, position: int) -> None:
    layer = _layers.get(number)
    if layer is None:
        return
    with _measured(layer), _undisturbed():
        numbers = call.numpy()
        if numbers[0] >= 0:
            backward = int(numbers[_NUM_CALL + position])
            numbers[_NUM_CALL + position] += 1
            layer.sink.put(layer.name, "gradient", _plans[plan][0].leaves[position], gradient, _call_of(numbers), backward)


def _run_no_gradient(call: torch.Tensor, number: int, plan: int, position: int, reason: int) -> None:
    layer = _layers.get(number)
    numbers = call.numpy()
    if layer is not None and numbers[0] >= 0:
        layer.sink.skip_value(layer.name, "gradient", _call_of(numbers), _NO_GRADIENT[reason], leaf=_plans[plan][0].leaves[position])


def _call_of(numbers: Numbers) -> Call:
    phase, epoch, batch, *others = numbers[:_NUM_CALL].tolist()
    return Call(Coordinates(PHASES[phase], epoch, batch), *others)


def _measured(layer: Tapped) -> contextlib.AbstractContextManager[None]:
    budget = layer.sink.clock.budget
    return contextlib.nullcontext() if budget is None else budget.measured()


def _undisturbed() -> contextlib.AbstractContextManager[Any]:
    """Keep the modes that a user has set from seeing what is done here."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return torch._C.DisableTorchFunction()
    stack = contextlib.ExitStack()
    stack.enter_context(_disable_current_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    return stack


# The operators ----------------------------------------------------------------------------------------------------


def _make_operators() -> tuple[torch.library.Library, bool]:
    """Define the operators and say whether this torch knows effects."""
    library = torch.library.Library("hookstore", "DEF")
    nothing = lambda *_: None  # noqa: E731
    for schema, run, fake in (
        ("tick(Tensor? after, int number, bool is_watched) -> Tensor", _run_tick, _fake_nothing),
        ("begin(Tensor? after, int number) -> Tensor", _run_begin, _fake_nothing),
        ("skip(Tensor? after, int number, str kind, int reason) -> Tensor", _run_skip, _fake_nothing),
        ("show(Tensor? after, Tensor[] values, int number, str kind, int plan) -> Tensor", _run_show, _fake_nothing),
        ("end(Tensor? after, Tensor[] values, int number, int plan) -> Tensor", _run_end, _fake_nothing),
        ("end_watched(Tensor? after, Tensor[] values, int number, int plan) -> Tensor", _run_end_watched, _fake_call),
        ("end_without(Tensor? after, int number) -> Tensor", _run_end_without, _fake_nothing),
        ("gradient(Tensor gradient, Tensor call, int number, int plan, int position) -> ()", _run_gradient, nothing),
        ("no_gradient(Tensor call, int number, int plan, int position, int reason) -> ()", _run_no_gradient, nothing),
    ):
        name = f"hookstore::{library.define(schema)}".replace("hookstore::hookstore::", "hookstore::")
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        try:
            from torch._library.effects import EffectType

            torch._library.simple_registry.singleton.find(name).effect.register(EffectType.ORDERED)
        except (ImportError, AttributeError):
            return library, False
    return library, True


def _fake_nothing(*_arguments: object) -> torch.Tensor:
    return torch.empty(0, device="cpu")


def _fake_call(_after: object, values: Sequence[torch.Tensor], number: int, plan: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty(_NUM_CALL + len(_plans[plan][0].leaves), dtype=torch.int64, device="cpu")


_library, _HAS_EFFECTS = _make_operators()


# When the compiler begins -----------------------------------------------------------------------------------------

_followers: weakref.WeakSet[Any] = weakref.WeakSet()  # what has a method `pin`


def follow(follower: Any) -> None:
    """Have ``follower.pin()`` called when a compilation begins, as long as it lives."""
    _keep_out()
    _followers.add(follower)
    meet_compiler()


class _Settings:
    """What the compiler is asked to do otherwise while something is recorded, and its settings from before.

    It leaves out guards on hooks by default: graphs belong to code, and that of one model would serve its twin. With them blocks of one class that are
    compiled one by one (``for block in blocks: block.compile()``) have each a graph of its own, where without hooks they share one: the compiler must not
    give up as many graphs earlier.
    """

    num_layers = 0
    before: dict[str, Any] = {}  # noqa: RUF012  # there is only one
    set_by_us: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def turn(cls, *, num_layers: int) -> None:
        """Have them set for what is compiled from now on while so many layers are recorded, or as they were before where there are none."""
        settings: Any = sys.modules.get("torch._dynamo.config")
        if settings is None or num_layers == cls.num_layers or not hasattr(settings, "skip_nnmodule_hook_guards"):
            return
        cls.num_layers = num_layers
        for name, value in cls.set_by_us.items():
            if getattr(settings, name) == value:  # otherwise the user has set it meanwhile
                setattr(settings, name, cls.before[name])
        cls.set_by_us = {}
        if num_layers:
            cls.set_by_us["skip_nnmodule_hook_guards"] = False
            for name in ("recompile_limit", "accumulated_recompile_limit"):
                cls.set_by_us[name] = getattr(settings, name) * (1 + num_layers)
        cls.before = {name: getattr(settings, name) for name in cls.set_by_us}
        for name, value in cls.set_by_us.items():
            setattr(settings, name, value)


class _Traced:
    """Whether any hook has been traced."""

    is_any = False


def _compiling_begins(*_arguments: object) -> None:
    autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if autograd is not None and _Traced.is_any and (autograd.compiled_autograd_enabled or autograd.in_compiled_autograd_region):
        raise UnsupportedModelError(
            "hookstore cannot record a compiled model under compiled_autograd, which would lose its gradients; switch it off, or record without torch.compile"
        )
    for follower in list(_followers):
        follower.pin()


def meet_compiler() -> bool:
    """Look whether the compiler has been imported, and be told then what it does; say whether that is new.

    It is never imported here, since that takes seconds and most who record do not compile.
    """
    callbacks = sys.modules.get("torch._dynamo.callback")
    handler = getattr(callbacks, "callback_handler", None)
    if handler is None:
        return False
    _Settings.turn(num_layers=len(_layers))
    if _compiling_begins in handler.start_callbacks:
        return False
    handler.register_start_callback(_compiling_begins)
    return True


@functools.cache
def _keep_out() -> None:
    """Have the compiler leave our code alone where it is no part of a graph: hooks that are called between two graphs run as they are."""
    evaluation = torch._C._dynamo.eval_frame
    if not hasattr(evaluation, "_FrameExecStrategy"):
        return
    as_it_is = evaluation._FrameExecStrategy(evaluation._FrameAction.SKIP, evaluation._FrameAction.SKIP)
    pending = [code for module in _own_modules() for thing in vars(module).values() for code in _codes_of(thing, module)]
    while pending:
        code = pending.pop()
        evaluation.set_code_exec_strategy(code, as_it_is)
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _own_modules() -> list[types.ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]


def _codes_of(thing: Any, module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of a function, or of the methods of a class, of the module's own."""
    if isinstance(thing, type) and thing.__module__ == module.__name__:
        for member in vars(thing).values():
            yield from _codes_of(member, module)
    function = getattr(thing, "fget", None) or getattr(thing, "__func__", thing)
    if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
        yield function.__code__


def has_compiled() -> bool:
    """Say whether there are graphs that have been compiled."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is None:
        return False
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    codes = [reference() for reference in getattr(frames.input_codes, "seen", ())]
    return any(code is not None and entries(code) for code in codes)


def discard() -> None:
    """Have compiled everything again when it is called next, since graphs that are there know nothing of hooks that are new."""
    if has_compiled():
        _log.warning(
            "hookstore: torch._dynamo.reset() is called, since graphs compiled before a recording know nothing of it; they are compiled again"
        )
        torch._dynamo.reset()
        meet_compiler()
