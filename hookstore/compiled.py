"""Compiled models: hooks that `torch.compile` traces into its graph.

What a hook does in an eager model it cannot do in a trace, where there are no values. There it leaves operators in the graph that call back here when the
graph runs, in the order of the model's calls: they return nothing to the model, have an effect, and so are neither left out nor moved nor run twice. Each has
a whole number that says of which layer it is. The call that a gradient belongs to is a small tensor, which the forward makes and the compiler keeps for the
backward with everything else that it keeps: it comes back with its own forward, whatever the order of backwards.

Whether anything is recorded is an attribute of a module global, upon which the compiler sets a guard: one graph with operators and one without, and no
compiling when a schedule goes from one to the other.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hookstore.compiler import Settings, Traced, compiling_begins, meet_compiler
from hookstore.errors import UnsupportedModelError
from hookstore.nested import Plan, flatten, flatten_arguments
from hookstore.operators import LAYERS, PLANS, TICKS, Tapped, why_none
from hookstore.watch import View
from hookstore.wrappers import own_parameters

_graph_task, _sequence_nr = torch._C._current_graph_task_id, torch._C._autograd._get_sequence_nr


# What the traced hooks look at ------------------------------------------------------------------------------------


class _Switches:
    """An attribute for each recording: whether what is called now is recorded."""


SWITCHES = _Switches()
_numbers = itertools.count()


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
        TICKS[self._number] = on_tick

    def turn(self, *, on: bool) -> None:
        """Say whether what is called from now on is recorded."""
        if getattr(SWITCHES, self.switch, None) is not on:
            setattr(SWITCHES, self.switch, on)

    def add(self, layer: Tapped) -> str:
        """Return the number under which the operators know a layer, as text: of numbers that differ the compiler may make variables (under FSDP2)."""
        number = next(_numbers)
        LAYERS[number] = layer
        self._layers.append(number)
        return str(number)

    def close(self) -> None:
        """Let go of everything; graphs that are compiled go on without recording."""
        self.turn(on=False)
        TICKS.pop(self._number, None)
        for number in self._layers:
            LAYERS.pop(number, None)
        Traced.is_any = Traced.is_any and bool(LAYERS)
        Settings.turn()


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
    Traced.is_any = True
    meet_compiler()
    _tracing.graph_task = _graph_task()
    for function in (tick, begin, skip, show, end):
        torch.compiler.allow_in_graph(function)
        torch.fx.node.has_side_effect(function)
    compiling_begins()


def may_have_operators(number: int) -> bool:
    """Say whether a layer is called where operators with effects may stand, and note it where not; the compiler runs it, and has a constant."""
    layer = LAYERS.get(number)
    if layer is not None and layer.sink.is_live:
        raise UnsupportedModelError(
            f"layer {layer.name!r} is being compiled while it is tapped: a compiled graph has no live tensors; tap the model that is not compiled, or remove "
            "the tap first"
        )
    graph = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx().output
    if _runs_as_it_is(graph.compiler_fn):
        return True
    tracer = graph.current_tracer
    while getattr(tracer, "parent", None) is not None:
        inside = str(tracer.source_target)
        if inside not in _TRANSPARENT:
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
    if (plan, about) not in PLANS:
        PLANS.append((plan, about))
    return PLANS.index((plan, about))


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


def _is_given(tensor: torch.Tensor) -> bool:
    """Say whether a tensor that requires grad comes from outside the graph."""
    return tensor.grad_fn is None or not tensor.grad_fn.next_functions
