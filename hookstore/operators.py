"""The operators that recording leaves in the graphs of compiled models, and what they do when such a graph runs."""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.agenda import Due
from hookstore.clock import Coordinates
from hookstore.format import PHASES
from hookstore.layout import Call
from hookstore.nested import Plan
from hookstore.sink import Sink

_graph_task = torch._C._current_graph_task_id
_LEAST_TORCH = (2, 11)  # the first with effects in the backward of a compiled model
Numbers = np.ndarray[Any, np.dtype[np.int64]]


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


# What the numbers that operators carry stand for
LAYERS: dict[int, Tapped] = {}
TICKS: dict[int, Callable[[bool], None]] = {}
PLANS: list[tuple[Plan, Any]] = []  # and the type of the value, or whether there is any argument


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


# When the graph runs ----------------------------------------------------------------------------------------------

_NUM_CALL = 9  # numbers that a call is: phase, epoch, batch, number, step, sequence_nr, structure, due, coordinates

# The coordinates that calls were filed under: what tells batches apart by them must find a gradient in that of its forward.
_coordinates: weakref.WeakValueDictionary[int, Coordinates] = weakref.WeakValueDictionary()
_numbers_of: weakref.WeakKeyDictionary[Coordinates, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


class _CallNumbers(np.ndarray[Any, np.dtype[np.int64]]):
    """The numbers that a call is, which keep its coordinates: as long as a tensor lives in this memory, a gradient may come for the call."""

    coordinates: Coordinates


def _number_of(here: Coordinates) -> int:
    number = _numbers_of.get(here)
    if number is None:
        number = _numbers_of[here] = next(_next_number)
        _coordinates[number] = here
    return number


def _coordinates_of(number: int, phase: str, epoch: int, batch: int, due: Due | None) -> Coordinates:
    """Return the coordinates of a number; those of a copy of a call's tensor may be gone, and are made anew, once for all layers."""
    here = _coordinates.get(number)
    if here is None:
        here = _coordinates[number] = Coordinates(phase, epoch, batch, due)
        _numbers_of[here] = number
    return here


def _run_tick(_after: object, number: int, is_watched: bool) -> torch.Tensor:  # noqa: FBT001
    on_tick = TICKS.get(number)
    if on_tick is not None and _graph_task() == -1:
        on_tick(is_watched)
    return torch.empty(0, device="cpu")


def _run_begin(_after: object, number: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    if layer is not None and _graph_task() == -1:
        with _measured(layer):
            layer.begin()
    return torch.empty(0, device="cpu")


def _run_skip(_after: object, number: int, kind: str, reason: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    call = None if layer is None or _graph_task() != -1 else layer.current()
    if layer is not None and call is not None and call.due is not None and kind in call.due.takes:
        layer.sink.skip_value(layer.name, kind, call, _NOT_IN_GRAPHS[reason])
    return torch.empty(0, device="cpu")


def _run_show(_after: object, values: Sequence[torch.Tensor], number: int, kind: str, plan: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    call = None if layer is None or _graph_task() != -1 else layer.current()
    if layer is not None and call is not None:
        plan_of_values, are_there_any = PLANS[plan]
        with _measured(layer), _undisturbed():
            if kind == "input":
                layer.take_arguments(values, plan_of_values, call, are_there_any=are_there_any)
            else:
                for name, parameter in zip(plan_of_values.leaves, values, strict=True):
                    layer.sink.put(layer.name, "parameter", name, parameter, call)
    return torch.empty(0, device="cpu")


def _run_end(_after: object, values: Sequence[torch.Tensor], number: int, plan: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    if layer is not None and _graph_task() == -1:
        _end(layer, values, plan)
    return torch.empty(0, device="cpu")


def _run_end_watched(_after: object, values: Sequence[torch.Tensor], number: int, plan: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    with _undisturbed():
        if _graph_task() != -1:
            return torch.from_numpy(_numbers_again(layer, number, plan))
        numbers = _no_call(plan).view(_CallNumbers)
        call = None if layer is None else _end(layer, values, plan)
        if call is not None:
            here = numbers.coordinates = call.coordinates
            where = (PHASES.index(here.phase), here.epoch, here.batch)
            due = -1 if here.due is None else here.due.number
            numbers[:_NUM_CALL] = (*where, call.number, call.step, call.sequence_nr, call.structure, due, _number_of(here))
        frame = _checkpoint_frame()
        if frame is not None:
            _checkpointed.setdefault(frame, _Checkpointed()).calls.setdefault(number, []).append(numbers)
        return torch.from_numpy(numbers)


def _run_end_without(_after: object, number: int) -> torch.Tensor:
    layer = LAYERS.get(number)
    if layer is not None and _graph_task() == -1:
        layer.end()
    return torch.empty(0, device="cpu")


def _no_call(plan: int) -> Numbers:
    numbers = np.zeros(_NUM_CALL + len(PLANS[plan][0].leaves), dtype=np.int64)
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
        plan_of_values, kind = PLANS[plan]
        return layer.take_output(values, plan_of_values, call, kind)


def _run_gradient(gradient: torch.Tensor, call: torch.Tensor, number: int, plan: int, position: int) -> None:
    layer = LAYERS.get(number)
    if layer is None:
        return
    with _measured(layer), _undisturbed():
        numbers = call.numpy()
        if numbers[0] >= 0:
            backward = int(numbers[_NUM_CALL + position])
            numbers[_NUM_CALL + position] += 1
            layer.sink.put(layer.name, "gradient", PLANS[plan][0].leaves[position], gradient, _call_of(numbers, layer), backward)


def _run_no_gradient(call: torch.Tensor, number: int, plan: int, position: int, reason: int) -> None:
    layer = LAYERS.get(number)
    numbers = call.numpy()
    if layer is None or numbers[0] < 0:
        return
    of_call = _call_of(numbers, layer)
    if of_call.due is not None and of_call.due.output_gradient:
        layer.sink.skip_value(layer.name, "gradient", of_call, _NO_GRADIENT[reason], leaf=PLANS[plan][0].leaves[position])


def _call_of(numbers: Numbers, layer: Tapped) -> Call:
    phase, epoch, batch, call, step, sequence_nr, structure, number, of_coordinates = numbers[:_NUM_CALL].tolist()
    dues = layer.sink.clock.agenda.dues
    due = dues[number] if 0 <= number < len(dues) else None
    of_layer = None if due is None else due.layers.get(layer.name)
    here = _coordinates_of(of_coordinates, PHASES[phase], epoch, batch, due)
    return Call(here, call, step, sequence_nr, structure, due=of_layer)


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
    return torch.empty(_NUM_CALL + len(PLANS[plan][0].leaves), dtype=torch.int64, device="cpu")


_library, HAS_EFFECTS = _make_operators()


def why_none() -> str | None:
    """Say why this torch cannot record compiled models, or return ``None``."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _LEAST_TORCH or not HAS_EFFECTS:
        least = ".".join(map(str, _LEAST_TORCH))
        return f"recording compiled models needs torch {least} or newer, and this is {torch.__version__}; record the model without torch.compile"
    return None
