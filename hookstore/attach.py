"""When the hooks of a recording are on its model, and what else follows the training: the automatic clock, and the count of optimizer steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hookstore.hooks import InertCopy, LayerHooks, is_traced
from hookstore.schedule import Clock
from hookstore.selection import Layer
from hookstore.sink import Sink

_graph_task = torch._C._current_graph_task_id


class _TickHook(InertCopy):
    """Moves the automatic clock when the root module is called."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: ModelHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if _graph_task() == -1 and not is_traced():
            self._hooks.tick()


class ModelHooks:
    """All hooks of a recording. On batches that the schedule leaves out there are none on the layers.

    Parameters
    ----------
    model : torch.nn.Module
        The root, referred to weakly.
    layers : iterable of Layer
        What is recorded.
    kinds : iterable of str
        What to capture of each.
    sink : Sink
        Where it goes.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], kinds: Iterable[str], sink: Sink) -> None:
        self._model = weakref.ref(model)
        self._sink = sink
        self._layers = [LayerHooks(layer, kinds, sink) for layer in layers]
        self._state: tuple[bool, bool] | None = None  # whether this batch is recorded, and whether the clock is automatic
        self._tick_hook = _TickHook(self)
        self._tick_handle: RemovableHandle | None = None
        self._is_removed = False
        self._step_handle = _count_steps(model, sink.clock)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        if self._is_removed:
            return
        clock = self._sink.clock
        self._install(wanted=clock.may_record)
        if not clock.is_automatic and self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        elif clock.is_automatic and self._tick_handle is None:
            model = self._model()
            if model is not None:
                self._tick_handle = model.register_forward_pre_hook(self._tick_hook, prepend=True)

    def tick(self) -> None:
        """Go on to the next batch: the root module is being called."""
        clock = self._sink.clock
        clock.tick()
        self._install(wanted=clock.here() is not None)

    def _install(self, *, wanted: bool) -> None:
        state = (wanted, self._sink.clock.is_automatic)
        if state == self._state:
            return
        self._state = state
        budget = self._sink.clock.budget
        with contextlib.nullcontext() if budget is None else budget.measured():
            self._install_each(wanted=wanted)

    def _install_each(self, *, wanted: bool) -> None:
        for layer in self._layers:
            if wanted or (layer.name == "" and self._sink.clock.is_automatic):  # torch has listed the root's hooks before the clock ticks
                layer.install()
            elif layer.is_installed:
                layer.remove()
                layer.forget()

    @property
    def is_installed(self) -> bool:
        """Whether any layer has hooks."""
        return any(layer.is_installed for layer in self._layers)

    @property
    def silent_layers(self) -> list[str]:
        """Names of the layers of which no call was recorded."""
        return [layer.name for layer in self._layers if not layer.was_called]

    def remove(self) -> None:
        """Remove every hook, for good."""
        self._is_removed = True  # whatever the clock does from now on
        self._sink.is_active = False
        for layer in self._layers:
            layer.remove()
            layer.forget()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._step_handle.remove()


def _count_steps(model: nn.Module, clock: Clock) -> RemovableHandle:
    """Count the steps of optimizers that hold a parameter of the model."""
    parameters = {id(parameter) for parameter in model.parameters()}
    concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def count(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if optimizer not in concerned:
            concerned[optimizer] = any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
        clock.step += concerned[optimizer]

    return register_optimizer_step_post_hook(count)
