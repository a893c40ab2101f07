"""What optimizers do: the count of their steps, and the gradients that they step with.

Hooks on every optimizer of the process tell of each step. A gradient is read before the step, when it is summed over micro-batches, reduced over ranks,
unscaled and clipped; where the step itself computes it (from a closure) or unscales it (a fused optimizer under a ``GradScaler``), after the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hookstore.layout import Call
from hookstore.schedule import Coordinates
from hookstore.selection import Layer
from hookstore.sink import Sink

_graph_task = torch._C._current_graph_task_id


class OptimizerHooks:
    """Counts the steps of optimizers that hold a parameter of the model, and captures the gradients of the layers' own parameters.

    Steps during one backward (an optimizer for each parameter, called when its gradient is there) count as one.

    Parameters
    ----------
    model : torch.nn.Module
        The root, referred to weakly.
    layers : iterable of Layer
        Whose parameters' gradients are captured; none where that kind is not wanted.
    sink : Sink
        Where they go.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], sink: Sink) -> None:
        self.has_captured = False
        self._model = weakref.ref(model)
        self._layers = [(layer.name, weakref.ref(layer.module)) for layer in layers]
        self._sink = sink
        self._concerned: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._task = -1  # the backward that the last step was taken in
        self._step = 0  # steps before the one that is being taken
        self._handles = [register_optimizer_step_post_hook(_weakly(self._after))]
        if self._layers:
            self._handles.append(register_optimizer_step_pre_hook(_weakly(self._before)))

    @property
    def has_layers(self) -> bool:
        """Whether gradients are captured at all."""
        return bool(self._layers)

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _before(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not _reads_after(optimizer, arguments, options):
            self._capture(optimizer)

    def _after(self, optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
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
            model = self._model()
            ours = set() if model is None else {id(parameter) for parameter in model.parameters()}
            known = size, any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
            self._concerned[optimizer] = known
        return known[1]

    def _capture(self, optimizer: Optimizer) -> None:
        sink = self._sink
        here = sink.clock.here() if sink.is_active else None
        if here is None or not self._is_concerned(optimizer):
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._begin_step()
        with torch._C.DisableTorchFunction():
            for name, module in self._layers:
                for leaf, parameter in _own_parameters(module()):
                    if id(parameter) in held and parameter.grad is not None:
                        self._put(name, leaf, parameter.grad, here)

    def _put(self, layer: str, leaf: str, gradient: torch.Tensor, here: Coordinates) -> None:
        self.has_captured = True
        number = here.steps.get((layer, leaf), 0)
        here.steps[layer, leaf] = number + 1
        self._sink.put(layer, "parameter_gradient", leaf, gradient, Call(here, number, self._step, 0))


def _own_parameters(module: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    return [] if module is None else [(leaf, parameter) for leaf, parameter in module._parameters.items() if parameter is not None]


def _reads_after(optimizer: Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Say whether the gradients are what the step uses only after it."""
    closure = arguments[1] if len(arguments) > 1 else options.get("closure")
    return closure is not None or getattr(optimizer, "grad_scale", None) is not None


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Call a method as long as its object is there: torch keeps these hooks for the whole process."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return hook
