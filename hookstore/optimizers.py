"""What optimizers do: the count of their steps, and the gradients that they step with.

Hooks on every optimizer of the process tell of each step. A gradient is read before the step, when it is summed over micro-batches, reduced over ranks,
unscaled and clipped; where the step itself computes it (from a closure) or unscales it (a fused optimizer under a ``GradScaler``), after the step.

A step that a ``GradScaler`` skips runs no hook. The scaler keeps what it knows of each optimizer in a dict, until ``update()`` puts a new one in its place:
an optimizer that stands as stepped in the old one, and of which no hook has told, was skipped. No device is waited for.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookstore.clock import Coordinates
from hookstore.layout import Call
from hookstore.selection import Layer
from hookstore.sink import Sink
from hookstore.wrappers import own_parameters

_graph_task = torch._C._current_graph_task_id
_OPTIMIZER_FILE = Optimizer.profile_hook_step.__code__.co_filename
_SKIPPED = "the GradScaler skipped the optimizer's step, since a gradient was infinite or NaN"


class OptimizerHooks:
    """Counts the steps of optimizers that hold a parameter of the model, and captures the gradients of the layers' own parameters.

    Steps during one backward (an optimizer for each parameter, called when its gradient is there) count as one.

    Parameters
    ----------
    models : mapping
        The models by name, referred to weakly.
    layers : iterable of Layer
        Whose parameters' gradients are captured; none where that kind is not wanted.
    sink : Sink
        Where they go.
    scaler : torch.amp.GradScaler or None
        What may skip steps.
    """

    def __init__(self, models: Mapping[str, nn.Module], layers: Iterable[Layer], sink: Sink, scaler: torch.amp.GradScaler | None) -> None:
        self.has_captured = False
        self._models = [weakref.ref(model) for model in models.values()]
        self._layers = [(layer.name, weakref.ref(layer.module)) for layer in layers]
        self._sink = sink
        self._concerned: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._task = -1  # the backward that the last step was taken in
        self._step = 0  # steps before the one that is being taken
        self._scaler = _ScalerWatch(scaler) if self._layers and scaler is not None and scaler.is_enabled() else None
        self._here: Coordinates | None = None  # where the clock stood when it was last looked at, if there is a scaler
        self._handles = [register_optimizer_step_post_hook(weakly(self._after))]
        if self._layers:
            self._handles.append(register_optimizer_step_pre_hook(weakly(self._before)))

    @property
    def has_layers(self) -> bool:
        """Whether gradients are captured at all."""
        return bool(self._layers)

    def turn(self) -> None:
        """Look for steps that were skipped before the clock moved; to be called after it has."""
        if self._scaler is not None:
            self._note_skipped(self._scaler)
            self._here = self._sink.clock.here()

    def follow(self, now: Mapping[str, nn.Module]) -> None:
        """Go on with the modules that the layers' names stand for now."""
        self._layers = [(name, weakref.ref(now[name]) if name in now else module) for name, module in self._layers]

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all models."""
        for model in self._models:
            module = model()
            if module is not None:
                yield from module.parameters()

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if _is_inside_another_step(optimizer):
            return
        if self._scaler is not None:
            self._note_skipped(self._scaler)
            self._scaler.has_stepped.add(id(optimizer))
        if not _reads_after(optimizer, arguments, options):
            self._capture(optimizer)

    def _after(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if _is_inside_another_step(optimizer):
            return
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor) and found_inf.is_cpu and found_inf.item():  # a fused step that did nothing
            here = self._sink.clock.here() if self._layers and self._sink.is_active else None
            if here is not None:
                self._skip(optimizer, here)
            return
        if self._layers and _reads_after(optimizer, arguments, options):
            self._capture(optimizer)
        if self._is_concerned(optimizer):
            self._begin_step()
            self._sink.clock.step = self._step + 1

    def _begin_step(self) -> None:
        """Give the step that is being taken its number: the same again in the same backward."""
        task = _graph_task()
        if task == -1 or task != self._task:
            self._step = self._sink.clock.step
        self._task = task

    def _is_concerned(self, optimizer: Optimizer) -> bool:
        """Say whether an optimizer holds a parameter of the model."""
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._concerned.get(optimizer)
        if known is None or known[0] != size:
            ours = {id(parameter) for parameter in self._all_parameters()}
            known = size, any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
            self._concerned[optimizer] = known
        return known[1]

    def _capture(self, optimizer: Optimizer) -> None:
        sink = self._sink
        here = sink.clock.here() if sink.is_active else None
        if here is None or here.due is None or not self._is_concerned(optimizer):
            return
        self._begin_step()
        scale = _scale_left(optimizer)
        with torch._C.DisableTorchFunction():
            for layer, leaf, parameter in self._parameters(_held(optimizer)):
                due = here.due.layers.get(layer)
                if parameter.grad is not None and due is not None and "parameter_gradient" in due.takes:
                    self.has_captured = True
                    call = Call(here, _count(here, layer, leaf), self._step, 0, scale=scale, due=due)
                    sink.put(layer, "parameter_gradient", leaf, parameter.grad, call)

    def _parameters(self, held: set[int]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield the layers' own parameters, as they are now, that are among those."""
        for layer, reference in self._layers:
            module = reference()
            for leaf, parameter in () if module is None else own_parameters(module):
                if id(parameter) in held:
                    yield layer, leaf, parameter

    def _note_skipped(self, scaler: _ScalerWatch) -> None:
        skipped = set(scaler.skipped())
        if not skipped or self._here is None or not self._sink.is_active:
            return
        known = [optimizer for optimizer in list(self._concerned) if id(optimizer) in skipped]
        for optimizer in (
            known if len(known) == len(skipped) else [*known, None]
        ):  # those that are not known share what the others do not hold
            self._skip(optimizer, self._here)

    def _skip(self, optimizer: Optimizer | None, here: Coordinates) -> None:
        """Note a step that was not taken; of an optimizer that has never stepped it is not known which parameters it has."""
        if optimizer is not None:
            held = _held(optimizer)
        else:
            held = {id(parameter) for parameter in self._all_parameters() if parameter.requires_grad}
            held.difference_update(*(_held(known) for known in self._concerned))
        for layer, leaf, parameter in self._parameters(held):
            due = None if here.due is None else here.due.layers.get(layer)
            if parameter.requires_grad and due is not None and "parameter_gradient" in due.takes:
                self.has_captured = True
                call = Call(here, _count(here, layer, leaf), self._sink.clock.step, 0)
                self._sink.skip_value(layer, "parameter_gradient", call, _SKIPPED, leaf=leaf, topic="skipped steps")


class _ScalerWatch:
    """Tells which optimizers' steps a scaler has skipped.

    Attributes
    ----------
    has_stepped : set of int
        Identities of the optimizers that have stepped since the scaler's last update.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.has_stepped: set[int] = set()
        self._scaler = scaler
        self._states: dict[int, dict[str, Any]] = scaler._per_optimizer_states

    def skipped(self) -> list[int]:
        """Return the identities of the optimizers that were skipped before the scaler's last update, once."""
        states = self._scaler._per_optimizer_states
        if states is self._states:
            return []
        before, self._states = self._states, states
        skipped = [key for key, state in before.items() if state["stage"] is OptState.STEPPED and key not in self.has_stepped]
        self.has_stepped.clear()
        return skipped


def _is_inside_another_step(optimizer: Optimizer) -> bool:
    """Say whether a step is part of another one: of a subclass's that calls its base class's, or of an optimizer that is wrapped around this one.

    Asked by a hook; torch calls that from a function around each step.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename != _OPTIMIZER_FILE:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    code, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is code:
            around = outer.f_locals.get("self")
            if around is optimizer or (isinstance(around, Optimizer) and _held(optimizer) <= _held(around)):
                return True
        outer = outer.f_back
    return False


def _held(optimizer: Optimizer) -> set[int]:
    """Return the identities of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _count(here: Coordinates, layer: str, leaf: str) -> int:
    """Return how many steps of a parameter there have been at a place in training, and count one more."""
    number = here.steps.get((layer, leaf), 0)
    here.steps[layer, leaf] = number + 1
    return number


def _scale_left(optimizer: Optimizer) -> float | torch.Tensor:
    """Return the scale that a fused step has left on the gradients: it did not unscale them if one was infinite, which on a device nobody waits to know."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if isinstance(scale, torch.Tensor) and isinstance(found_inf, torch.Tensor) and not found_inf.is_cpu:
        return torch.where(found_inf > 0, scale, math.nan).to(torch.float32)
    return math.nan


def _reads_after(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Say whether the gradients are what the step uses only after it."""
    closure = arguments[1] if len(arguments) > 1 else options.get("closure")
    return closure is not None or options.get("grad_scaler") is not None or getattr(optimizer, "grad_scale", None) is not None


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method as long as its object is there: what keeps such hooks, torch or the operators, does so for the whole process."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return hook
