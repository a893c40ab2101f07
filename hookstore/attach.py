"""When the hooks of a recording are on its model, and what else follows the training: the automatic clock, and the optimizers."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from hookstore.around import AroundLayers
from hookstore.compiled import Taps, trace_tick
from hookstore.compiler import discard, follow, has_compiled, meet_compiler
from hookstore.errors import CaptureWarning
from hookstore.hooks import InertCopy, LayerHooks, is_traced
from hookstore.optimizers import OptimizerHooks, weakly
from hookstore.sink import Sink
from hookstore.swaps import ModuleNames
from hookstore.uncalled import UncalledLayers, likely_cause
from hookstore.wrappers import unwrap

_graph_task = torch._C._current_graph_task_id
_NONE: frozenset[str] = frozenset()
_is_compiling, _is_exporting = torch.compiler.is_compiling, torch.compiler.is_exporting


class _TickHook(InertCopy):
    """Moves the automatic clock when the first model is called."""

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
    models : mapping
        The models by name, one alone under ``""``; referred to weakly. Calls of the first move the automatic clock.
    sink : Sink
        Where it goes; what is captured of which layers its clock's agenda says.
    """

    def __init__(self, models: Mapping[str, nn.Module], sink: Sink) -> None:
        agenda = sink.clock.agenda
        selected = agenda.layers
        kinds = {layer.name: agenda.kinds_of(layer.name) for layer in selected}
        of_calls = {name: [kind for kind in of_layer if kind != "parameter_gradient"] for name, of_layer in kinds.items()}
        parts = {id(part) for model in models.values() for part in model.modules() if part is not model}
        self._first_name, first = next((item for item in models.items() if id(item[1]) not in parts), next(iter(models.items())))
        self._model = weakref.ref(unwrap(first))
        self._sink = sink
        self._taps = Taps(weakly(self.tick_inside))
        self._layers = [LayerHooks(layer, of_calls[layer.name], sink, self._taps) for layer in selected if of_calls[layer.name]]
        self._names = ModuleNames(models)
        self.uncalled = UncalledLayers({layer.name: kinds[layer.name] for layer in self._layers}, sink, self.likely_causes)
        self._around = AroundLayers(models, selected, self.uncalled, sink, self._on_call)
        # which layers are recorded in this batch (None for all), and whether calls of the first model have a hook
        self._state: tuple[frozenset[str] | None, bool] | None = None
        self._tick_hook = _TickHook(self, self._taps)
        self._tick_handle: RemovableHandle | None = None
        self._is_removed = False
        self._is_pinned = False
        stepped = [layer for layer in selected if "parameter_gradient" in kinds[layer.name]]
        self._optimizers = OptimizerHooks(models, stepped, sink, sink.scaler)
        if not sink.is_live:
            discard()  # (what is compiled already shows no live tensors anyway)
        follow(self)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        if self._is_removed:
            return
        self._optimizers.turn()
        clock = self._sink.clock
        self._meet_compiler()
        if self._names.is_stale:
            self._follow_swaps()
        is_listening = self._listens
        self._install(wanted=_NONE if clock.is_automatic and self._is_encoder_layer else clock.layers_wanted)
        self._taps.turn(on=clock.is_due_next if clock.is_automatic else clock.may_record)
        if is_listening and self._tick_handle is None:
            self._tick_handle = self._register_tick()
        elif not is_listening and self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None

    @property
    def _listens(self) -> bool:
        """Whether the calls of the first model have a hook.

        They move the automatic clock, and where hooks turn off a fast path they tell whether this call is of a phase that is recorded.
        """
        clock = self._sink.clock
        return clock.is_automatic or (clock.may_record and self._around.disturbs)

    @property
    def _is_encoder_layer(self) -> bool:
        """Whether the first model is such that a hook on it, even one that only counts calls, changes what it computes; see `hookstore.fastpath`."""
        return isinstance(self._model(), nn.TransformerEncoderLayer)

    def _register_tick(self) -> RemovableHandle | None:
        first = self._model()
        if first is None:
            return None
        if not self._is_encoder_layer:
            return first.register_forward_pre_hook(self._tick_hook, prepend=True)

        def tick_everywhere(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module is self._model():
                self._tick_hook(module, args)

        return register_module_forward_pre_hook(tick_everywhere)

    def tick(self) -> None:
        """Go on to the next batch: the first model is being called."""
        clock = self._sink.clock
        self._meet_compiler()
        clock.tick()
        here = clock.here()
        is_wanted = here is not None
        self._optimizers.turn()
        if self._names.is_stale or (is_wanted and self._names.look()):
            self._follow_swaps()
        self._install(wanted=_NONE if here is None or here.due is None else here.due.of_calls)
        self._taps.turn(on=is_wanted)

    def tick_inside(self, is_watched: bool) -> None:  # noqa: FBT001  # as operators call it
        """Go on to the next batch: a compiled graph is calling the root module.

        Which graph that is was decided before it ran, and so is now for the next: that of the root module's next call, or of another call in this batch.
        """
        clock = self._sink.clock
        clock.tick()
        self._optimizers.turn()
        here = clock.here()
        if here is not None and not is_watched:
            self._sink.skip_unforeseen(here)
        self._taps.turn(on=here is not None or clock.is_due_next)

    def pin(self) -> None:
        """Keep the hooks on from now on: something is being compiled, and what is compiled without hooks stays so."""
        if not self._is_removed and self._names.look():
            self._follow_swaps()
        if not self._is_pinned and not self._is_removed:
            self._is_pinned = True
            for layer in self._layers:
                layer.install()
            self._around.install()

    def _meet_compiler(self) -> None:
        """Make good what was compiled before we heard of it."""
        if not self._is_pinned and meet_compiler() and has_compiled():
            discard()
            self.pin()

    def _install(self, *, wanted: frozenset[str] | None) -> None:
        """Have hooks on the layers of these names (``None`` for all)."""
        state = (wanted, self._listens)
        if state == self._state:
            return
        self._state = state
        budget = self._sink.clock.budget
        with contextlib.nullcontext() if budget is None else budget.measured():
            self._install_each(wanted=wanted)

    def _install_each(self, *, wanted: frozenset[str] | None) -> None:
        for layer in self._layers:
            # (torch lists the root's hooks before the clock ticks)
            is_ticking_root = layer.name == self._first_name and self._sink.clock.is_automatic
            if wanted is None or layer.name in wanted or is_ticking_root:
                layer.install()
            elif layer.is_installed:
                if not self._is_pinned:
                    layer.remove()
                layer.forget()
        if wanted is None or wanted or self._is_pinned:
            self._around.install()
        else:
            self._around.remove()

    def likely_causes(self, layers: Iterable[str]) -> dict[str, str]:
        """Say of each layer, one that a batch did not call, why that probably was."""
        now = self._names.now()
        by_name = {layer.name: layer for layer in self._layers}
        if any(now.get(name) is not by_name[name].module for name in layers):
            self._names.is_stale = True
        return {name: likely_cause(by_name[name], now) for name in layers if not by_name[name].is_left_out}

    def _on_call(self) -> None:
        """Look, before a model of a recorded batch runs, whether layers are still what they are called."""
        if self._sink.clock.here() is not None and self._names.look():
            self._follow_swaps()

    def _follow_swaps(self) -> None:
        """Go on with the modules that have taken the place of others since the last look."""
        self._names.is_stale = False
        now = self._names.now()
        self._optimizers.follow(now)
        swapped = [told for layer in self._layers if (told := self._follow(layer, now))]
        if swapped:
            shown = "; ".join(swapped[:5]) + (f"; and {len(swapped) - 5} more" if len(swapped) > 5 else "")
            warnings.warn(f"modules of the model were replaced while it was recorded: {shown}", CaptureWarning, stacklevel=2)

    def _follow(self, layer: LayerHooks, now: Mapping[str, nn.Module]) -> str | None:
        """Have a layer's hooks go on with the module that has its name now; say what has changed, if anything has."""
        module = layer.module
        there = [now[name] for name in layer.names if name in now]
        if not there or all(one is module for one in there):
            return None
        self.uncalled.watch_again(layer.name)
        successor = there[0]
        if any(one is not successor for one in there):
            layer.replace(None)
            return f"{layer.name!r} and its aliases are no longer one module, and are recorded no more"
        layer.replace(successor)
        return f"{layer.name!r} is another module now, a {type(successor).__name__}, which is recorded from now on"

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
        self._around.remove()
        for layer in self._layers:
            layer.remove()
            layer.forget()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._names.remove()
        self._optimizers.remove()
