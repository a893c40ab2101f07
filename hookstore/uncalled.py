"""Layers that a batch did not call: each is told once, with the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from hookstore.clock import Coordinates
from hookstore.hooks import LayerHooks
from hookstore.sink import Sink
from hookstore.wrappers import has_forward, type_name

_OF_A_CALL = ("activation", "gradient", "input", "input_gradient", "parameter")


@dataclass(slots=True)
class _Ended:
    """A batch that has ended, and the layers that it did not call."""

    coordinates: Coordinates
    step: int
    causes: dict[str, str]


class UncalledLayers:
    """Tells which layers a recorded batch did not call: by a manifest row for each selected kind, and one warning for all layers of a batch.

    What is told is told when the next batch ends, since a loop may come back to a batch (as one does that sets the clock by hand for each part of a
    model), or when recording does. Of a batch in which a model's forward raised nothing is told, nor of layers whose model was not called as a whole; those
    that have no call at all are told in the end.

    Parameters
    ----------
    kinds : mapping
        What is captured of each layer, by its name.
    sink : Sink
        Where rows go.
    likely_causes : callable
        Gets names of layers, and returns why each was not called.
    """

    def __init__(self, kinds: Mapping[str, Iterable[str]], sink: Sink, likely_causes: Callable[[Iterable[str]], dict[str, str]]) -> None:
        self._untold = dict.fromkeys(kinds)
        self._kinds = {layer: [kind for kind in of_layer if kind in _OF_A_CALL] for layer, of_layer in kinds.items()}
        self._sink = sink
        self._likely_causes = likely_causes
        self._ended: dict[str, _Ended] = {}  # by phase
        self._have_raised: dict[Coordinates, dict[str, bool]] = {}  # of the models that were called in a batch, whether one call raised

    def note_call(self, model: str, here: Coordinates, *, raised: bool) -> None:
        """Note that a call of a model, by its name, has ended."""
        models = self._have_raised.setdefault(here, {})
        models[model] = models.get(model, False) or raised

    def watch_again(self, layer: str) -> None:
        """Tell once more when a layer is not called, since it is no longer the module that it was."""
        self._untold[layer] = None

    def end(self, here: Coordinates) -> None:
        """Take note that a batch ends, or is left for a while."""
        models = self._have_raised.pop(here, {})
        if not models and not here.calls:
            return  # nothing was called at all
        before = self._ended.get(here.phase)
        is_same = before is not None and (before.coordinates.epoch, before.coordinates.batch) == (here.epoch, here.batch)
        if before is not None and not is_same:
            del self._ended[here.phase]
            self._tell(before)
        due = frozenset() if here.due is None else here.due.of_calls
        if any(models.values()) or here.calls.keys() >= self._untold.keys() & due:
            self._ended.pop(here.phase, None)
            return
        # Who calls parts of a model by hand need not call all of them, nor in every batch all of several models.
        missing = [
            layer
            for layer in self._untold
            if layer in due and layer not in here.calls and ("" in models or layer.partition(".")[0] in models)
        ]
        if before is not None and is_same:
            before.causes = {layer: cause for layer, cause in before.causes.items() if layer in missing}
        else:
            self._ended[here.phase] = _Ended(here, self._sink.clock.step, self._likely_causes(missing))

    def finish(self, cut_short: Iterable[Coordinates]) -> None:
        """Tell what is left when recording ends, except of batches that were cut short."""
        is_cut_short = {(here.phase, here.epoch, here.batch) for here in cut_short}
        for phase, ended in list(self._ended.items()):
            del self._ended[phase]
            if (phase, ended.coordinates.epoch, ended.coordinates.batch) not in is_cut_short:
                self._tell(ended)

    def finish_unused(self, layers: Iterable[str], due: Coordinates) -> None:
        """Tell of layers that had no call in the whole recording, in which a batch was due, where no batch has told of them."""
        untold = [layer for layer in layers if layer in self._untold]
        if untold:
            self._tell(_Ended(due, self._sink.clock.step, self._likely_causes(untold)))

    def _tell(self, ended: _Ended) -> None:
        causes = {layer: cause for layer, cause in ended.causes.items() if layer in self._untold}
        for layer in causes:
            del self._untold[layer]
        if causes:
            kinds = {layer: self._kinds_due(layer, ended.coordinates) for layer in causes}
            self._sink.skip_layers(causes, kinds, ended.coordinates, ended.step)

    def _kinds_due(self, layer: str, here: Coordinates) -> list[str]:
        """Return what is missing of a layer: what was due of it there, or all of it where nothing was, since it had no call anywhere."""
        due = None if here.due is None else here.due.calls.get(layer)
        return [kind for kind in self._kinds[layer] if due is None or kind in due.takes]


def likely_cause(layer: LayerHooks, now: Mapping[str, nn.Module]) -> str:
    """Say why a layer was probably not called in a batch.

    Parameters
    ----------
    layer : LayerHooks
        The layer.
    now : mapping
        The module that each name stands for now.
    """
    module = now.get(layer.name)
    if module is None:
        return "it was taken out of the model after recording began"
    if module is not layer.module:
        return f"it was replaced by another module, a {type(module).__name__}, after recording began"
    parent = now.get(layer.name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "MultiheadAttention uses its weights and never calls it; the attention's own output is there under the name of the attention"
    if not has_forward(module):
        return f"{type_name(module)} has no forward: nothing can call it"
    if layer.was_called:
        return "the batch took a branch that does not call it"
    return "its forward was called directly, a functional operation used its weights, or the batch took a branch that does not call it"
