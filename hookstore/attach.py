"""When the hooks of a recording are on its model, and what else follows the training: the automatic clock, and the count of optimizer steps."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hookstore.compiled import Taps, discard, follow, has_compiled, meet_compiler, trace_tick
from hookstore.hooks import InertCopy, LayerHooks, is_traced
from hookstore.schedule import Clock
from hookstore.selection import Layer
from hookstore.sink import Sink

_graph_task = torch._C._current_graph_task_id
_is_compiling, _is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting


class _TickHook(InertCopy):
    """Moves the automatic clock when the root module is called."""

    __slots__ = ("_hooks", "_number", "_switch")

    def __init__(self, hooks: ModelHooks, taps: Taps) -> None:
        self._hooks = hooks
        self._number, self._switch = taps.number, taps.switch

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if _is_compiling():
            if not _is_exporting():
                trace_tick(self._number, self._switch)
        elif _graph_task() == -1 and not is_traced():
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
        self._taps = Taps(_weakly(self))
        self._layers = [LayerHooks(layer, kinds, sink, self._taps) for layer in layers]
        self._state: tuple[bool, bool] | None = None  # whether this batch is recorded, and whether the clock is automatic
        self._is_pinned = False
        self._tick_hook = _TickHook(self, self._taps)
        self._tick_handle: RemovableHandle | None = None
        self._is_removed = False
        self._step_handle = _count_steps(model, sink.clock)
        discard()
        follow(self)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        if self._is_removed:
            return
        clock = self._sink.clock
        self._meet_compiler()
        self._install(wanted=clock.may_record)
        self._taps.turn(on=clock.is_due_next if clock.is_automatic else clock.may_record)
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
        self._meet_compiler()
        clock.tick()
        wanted = clock.here() is not None
        self._install(wanted=wanted)
        self._taps.turn(on=wanted)

    def tick_inside(self, *, is_watched: bool) -> None:
        """Go on to the next batch: a compiled graph is calling the root module. Which graph that is was decided before it ran, and so is now for the next."""
        clock = self._sink.clock
        clock.tick()
        here = clock.here()
        if here is not None and not is_watched:
            self._sink.skip_unforeseen(here)
        self._taps.turn(on=clock.is_due_next)

    def pin(self) -> None:
        """Keep the hooks on from now on: something is being compiled, and what is compiled without hooks stays so."""
        if not self._is_pinned and not self._is_removed:
            self._is_pinned = True
            for layer in self._layers:
                layer.install()

    def _meet_compiler(self) -> None:
        """Make good what was compiled before we heard of it."""
        if not self._is_pinned and meet_compiler() and has_compiled():
            if not all(layer.is_installed for layer in self._layers):
                discard()
            self.pin()

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
                if not self._is_pinned:
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
        self._taps.close()
        for layer in self._layers:
            layer.remove()
            layer.forget()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._step_handle.remove()


def _weakly(hooks: ModelHooks) -> Callable[[bool], None]:
    """Return what ticks the hooks' clock from inside a compiled graph, as long as they live."""
    reference = weakref.ref(hooks)

    def tick(is_watched: bool) -> None:  # noqa: FBT001
        alive = reference()
        if alive is not None:
            alive.tick_inside(is_watched=is_watched)

    return tick


def _count_steps(model: nn.Module, clock: Clock) -> RemovableHandle:
    """Count the steps of optimizers that hold a parameter of the model."""
    parameters = {id(parameter) for parameter in model.parameters()}
    concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def count(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if optimizer not in concerned:
            concerned[optimizer] = any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
        clock.step += concerned[optimizer]

    return register_optimizer_step_post_hook(count)
