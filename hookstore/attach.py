"""When the hooks of a recording are on its model, and what else follows the training: the automatic clock, and the optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookstore.compiled import Taps, discard, follow, has_compiled, meet_compiler, trace_tick
from hookstore.hooks import InertCopy, LayerHooks, describe_error, has_raised, is_traced
from hookstore.optimizers import OptimizerHooks
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


class _RaisedHook(InertCopy):
    """Marks the batch in which the root module raises, whichever of its layers are recorded."""

    __slots__ = ("_sink",)

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        if output is None and not _is_compiling() and has_raised() and _graph_task() == -1 and not is_traced():
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
        self._taps = Taps(_weakly(self))
        self._layers = [LayerHooks(layer, of_calls, sink, self._taps) for layer in selected] if of_calls else []
        self._state: tuple[bool, bool] | None = None  # whether this batch is recorded, and whether the clock is automatic
        self._is_pinned = False
        self._tick_hook = _TickHook(self, self._taps)
        self._tick_handle: RemovableHandle | None = None
        self._is_removed = False
        self._raised_hook = None if any(layer.name == "" for layer in selected) else _RaisedHook(sink)
        self._raised_handle: RemovableHandle | None = None
        self._optimizers = OptimizerHooks(model, selected if "parameter_gradient" in wanted else (), sink, sink.scaler)
        discard()
        follow(self)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        if self._is_removed:
            return
        self._optimizers.turn()
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
        self._optimizers.turn()
        self._install(wanted=wanted)
        self._taps.turn(on=wanted)

    def tick_inside(self, *, is_watched: bool) -> None:
        """Go on to the next batch: a compiled graph is calling the root module. Which graph that is was decided before it ran, and so is now for the next."""
        clock = self._sink.clock
        clock.tick()
        self._optimizers.turn()
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
            self._watch_root(wanted=True)

    def _meet_compiler(self) -> None:
        """Make good what was compiled before we heard of it."""
        if not self._is_pinned and meet_compiler() and has_compiled():
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
        self._watch_root(wanted=wanted or self._is_pinned)

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
        self._taps.close()
        for layer in self._layers:
            layer.remove()
            layer.forget()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._watch_root(wanted=False)
        self._optimizers.remove()


def _weakly(hooks: ModelHooks) -> Callable[[bool], None]:
    """Return what ticks the hooks' clock from inside a compiled graph, as long as they live."""
    reference = weakref.ref(hooks)

    def tick(is_watched: bool) -> None:  # noqa: FBT001
        alive = reference()
        if alive is not None:
            alive.tick_inside(is_watched=is_watched)

    return tick
