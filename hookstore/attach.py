"""When the hooks of a recording are on its model, and what else follows the training: the automatic clock, and the optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookstore.hooks import InertCopy, LayerHooks, describe_error, has_raised, is_traced
from hookstore.optimizers import OptimizerHooks
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


class _RaisedHook(InertCopy):
    """Marks the batch in which the root module raises, whichever of its layers are recorded."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        if output is None and has_raised() and _graph_task() == -1 and not is_traced():
            here = self._sink.clock.here()
            if here is not None:
                self._sink.cut_short(here, f"the forward of the model raised {describe_error()}")


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
        selected, wanted = list(layers), frozenset(kinds)
        of_calls = wanted - {"parameter_gradient"}
        self._layers = [LayerHooks(layer, of_calls, sink) for layer in selected] if of_calls else []
        self._state: tuple[bool, bool] | None = None  # whether this batch is recorded, and whether the clock is automatic
        self._tick_hook = _TickHook(self)
        self._tick_handle: RemovableHandle | None = None
        self._is_removed = False
        self._raised_hook = None if any(layer.name == "" for layer in selected) else _RaisedHook(sink)
        self._raised_handle: RemovableHandle | None = None
        self._optimizers = OptimizerHooks(model, selected if "parameter_gradient" in wanted else (), sink, sink.scaler)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        if self._is_removed:
            return
        self._optimizers.turn()
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
        self._optimizers.turn()
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
        self._watch_root(wanted=wanted)

    def _watch_root(self, *, wanted: bool) -> None:
        """Have the root tell when it raises."""
        model = self._model()
        if not wanted and self._raised_handle is not None:
            self._raised_handle.remove()
            self._raised_handle = None
        elif wanted and self._raised_handle is None and self._raised_hook is not None and model is not None:
            self._raised_handle = model.register_forward_hook(self._raised_hook, always_call=True)

    @property
    def is_installed(self) -> bool:
        """Whether any layer has hooks."""
        return any(layer.is_installed for layer in self._layers)

    @property
    def silent_layers(self) -> list[str]:
        """Names of the layers of which no call was recorded."""
        return [layer.name for layer in self._layers if not layer.was_called]

    @property
    def lacks_steps(self) -> bool:
        """Whether gradients of parameters are wanted, and no optimizer has shown any."""
        return self._optimizers.has_layers and not self._optimizers.has_captured

    def remove(self) -> None:
        """Remove every hook, for good."""
        with contextlib.suppress(BaseException):  # where the writer has failed, there is no manifest to say it in
            self._optimizers.turn()
        self._is_removed = True  # whatever the clock does from now on
        self._sink.is_active = False
        for layer in self._layers:
            layer.remove()
            layer.forget()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._watch_root(wanted=False)
        self._optimizers.remove()
