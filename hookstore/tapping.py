"""`tap`: the live tensors of the last forward, for a loss on features or for a look at gradients."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from hookstore.agenda import Agenda
from hookstore.attach import ModelHooks
from hookstore.capture import Capture
from hookstore.clock import Clock, Coordinates
from hookstore.compiler import has_compiled
from hookstore.errors import MissingCaptureError, OptionError, UnknownLayerError, UnsupportedModelError
from hookstore.format import KINDS
from hookstore.live import Kept, LiveSink, Value
from hookstore.models import check_models, is_compiled
from hookstore.portion import Select
from hookstore.selection import LayerPattern
from hookstore.structure import Branch, decode
from hookstore.values import NotStored, PackedSequence, build
from hookstore.wrappers import own_parameters

_OF_BACKWARD = ("gradient", "input_gradient", "parameter_gradient")
_OF_PARAMETERS = ("parameter", "parameter_gradient")


def tap(
    model: nn.Module | Mapping[str, nn.Module],
    layers: LayerPattern | Iterable[LayerPattern] | None = None,
    kinds: str | Iterable[str] = ("activation",),
    *,
    detach: bool = False,
    clone: bool = False,
    select: Select | None = None,
    dims: Sequence[str] | None = None,
) -> Tap:
    """Keep the tensors of each forward at hand until the next one begins, with the graph behind them.

    Layers, kinds, names, structures and numbers of calls are those of `record`. A loss on ``taps["encoder"].activation`` trains what is before that layer. The
    model computes the very same values with and without a tap.

    Tensors are the very objects that the model works with: what it edits in place later shows the edit, parameters and their gradients show what the
    optimizer does to them, and everything that is kept keeps its graph, and so its memory, until the model is called again, in whatever mode. Of two forwards
    in one step the second empties what the first left, gradients that come later included: take the values between them. Who calls only parts of a model
    empties the tap by `Tap.clear`. The ``"input"`` of a module whose gradient is edited is what stands in for it there: a loss on it is edited, too.

    Parameters
    ----------
    model : torch.nn.Module, or mapping of str to torch.nn.Module
        The root module, on any device; or several, whose names precede those of their layers. Then each call of the first empties the tap.
    layers : str, re.Pattern, type, callable, or iterable of these, optional
        Which layers; as in `record`.
    kinds : str or iterable of str
        As in `record`. Gradients are there when they have come: those of outputs and inputs in the backward (with a graph of their own under
        ``create_graph=True``), ``"parameter_gradient"`` in the optimizer's step. A loss scale is not taken out of them.
    detach : bool
        Keep tensors without the graph; they still share memory with the model's.
    clone : bool
        Keep a copy, made at once: attached to the graph unless ``detach`` is set, and safe from edits.
    select : mapping or callable, optional
        Which part of each tensor, as in `Capture`; a function gets the tensor with its graph.
    dims : sequence of str, optional
        Names of the axes in order, for ``select``.

    Returns
    -------
    Tap
        Already at work. As a context manager it removes itself; one that is dropped takes its hooks with it.

    Raises
    ------
    OptionError
        For an argument that cannot be used (a ``ValueError``); `SelectionError` for layers that match nothing.
    UnsupportedModelError
        If hooks cannot follow the model, or a part of it is compiled: a compiled graph has no live tensors. Where a layer is compiled later, the compiler
        raises an error of its own that names this one and the layer.

    See Also
    --------
    record : Archives the same on disk.
    """
    for option, value in (("detach", detach), ("clone", clone)):
        if not isinstance(value, bool):
            raise OptionError(f"{option}: expected True or False, got {value!r}", option=option)
    models = check_models(model)
    for name, module in ((name, module) for one in models.values() for name, module in one.named_modules()):
        if is_compiled(module):
            raise UnsupportedModelError(
                f"module {name!r} is compiled: a compiled graph has no live tensors; tap the model that is not compiled, or record it to disk"
            )
    agenda = Agenda([Capture(layers=layers, kinds=kinds, select=select, dims=dims)], models)
    return Tap(models, agenda, detach=detach, clone=clone)


class Tap:
    """The live tensors of a model's last forward; made by `tap`.

    ``taps["fc1"].activation`` is what that layer returned; `values` gives that of all layers.
    """

    def __init__(self, models: Mapping[str, nn.Module], agenda: Agenda, *, detach: bool, clone: bool) -> None:
        self._clock = Clock(agenda, lambda: "train")  # (whatever the mode: every call is the next forward)
        self._kept = Kept(self._clock)
        sink = LiveSink(self._kept, self._clock, detach=detach, clone=clone)
        self._hooks = ModelHooks(models, sink)
        self._clock.on_tick = self._hooks.update
        self._clock.on_end = _at_end(sink, self._hooks)
        self._first = next(iter(models))
        self._names = {alias: layer.name for layer in agenda.layers for alias in (layer.name, *layer.aliases)}
        self._remove = weakref.finalize(self, self._hooks.remove)
        self._remove.atexit = False
        try:
            self._hooks.update()
        except BaseException:  # an interrupt, say: the model must not keep hooks that nobody can remove
            self._remove()
            raise
        self._clock.tick()  # the first call of the model is a new forward too

    @property
    def layers(self) -> list[str]:
        """Names of the tapped layers, in the model's order."""
        return list(self._clock.agenda.names)

    @property
    def kinds(self) -> list[str]:
        """What is tapped of each."""
        return list(self._clock.agenda.kinds)

    def __getitem__(self, layer: str) -> LayerTap:
        """Return one layer, by its name or an alias.

        Raises
        ------
        UnknownLayerError
            If that layer is not tapped.
        """
        if layer in self._names:
            return LayerTap(self, self._names[layer])
        nearest = difflib.get_close_matches(str(layer), self.layers, n=3, cutoff=0.5)
        shown = nearest or self.layers[:10]
        more = f" and {len(self.layers) - len(shown)} more" if not nearest and len(self.layers) > len(shown) else ""
        raise UnknownLayerError(
            f"layer {layer!r} is not tapped; {'nearest are' if nearest else 'tapped are'} {', '.join(map(repr, shown))}{more}",
            layer=str(layer),
        )

    def values(self, kind: str = "activation", *, call: int = 0) -> dict[str, Any]:
        """Return a kind of all layers, by their names in the model's order: what a loss between a teacher's and a student's features goes through.

        Raises
        ------
        MissingCaptureError
            If any layer has none; it says which and why. For those that have: ``{name: taps[name][kind] for name in taps.layers if kind in taps[name].kinds}``.
        """
        return {layer: LayerTap(self, layer).get(kind, call=call) for layer in self.layers}

    def clear(self) -> None:
        """Let go of all tensors, as the next forward does."""
        if self._remove.alive:
            self._clock.tick()

    def remove(self) -> None:
        """Remove the hooks and let go of all tensors; does nothing the second time."""
        self._remove()
        self._kept.empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "" if self._remove.alive else ", removed"
        return f"<hookstore.Tap of {', '.join(self.kinds)} of {len(self.layers)} layers{state}>"

    def _find(self, layer: str, kind: str, call: int) -> Value:
        """Return what there is of a call.

        Raises
        ------
        MissingCaptureError
            If there is no tensor of it.
        """
        value = self._kept.values.get((layer, kind, call))
        if value is None or not value.backwards:
            reason = next(iter(value.gaps.values())) if value is not None and value.gaps else self._why_missing(layer, kind, call)
            raise MissingCaptureError(
                f"there is no {kind} of layer {layer!r}{f', call {call},' if call else ''}: {reason}", layer=layer, kind=kind, call=call
            )
        return value

    def _why_missing(self, layer: str, kind: str, call: int) -> str:
        """Say why there is nothing of a call."""
        if kind not in KINDS:
            return f"there is no such kind; the kinds are {', '.join(map(repr, KINDS))}"
        if kind not in self._clock.agenda.kinds:
            return f"it is not tapped; what is tapped is {', '.join(self.kinds)}"
        if not self._remove.alive:
            return "the tap was removed"
        here = self._clock.here()
        if here is None or not here.calls:
            last = f"{self._first!r} was last called" if self._first else "the model was last called"
            return f"no tapped layer has been called since {last}, or the tap was made or cleared{_of_compiled()}"
        calls = LayerTap(self, layer).calls
        if layer not in here.calls:
            cause = self._kept.broken or self._hooks.likely_causes([layer]).get(layer, "what was called is traced")
            return f"the layer was not called in this forward: {cause}{_of_compiled()}"
        if call and calls and call not in calls:
            return f"there are calls {', '.join(map(str, calls))}"
        if kind in _OF_PARAMETERS and not self._has_parameters(layer):
            return "the layer has no parameters of its own"
        if kind == "parameter_gradient":
            return "no optimizer has taken a step with a gradient of it since the last forward"
        if kind in _OF_BACKWARD:
            return "no gradient has arrived: no backward has run yet, the forward ran without grad, or the loss does not depend on it"
        broken = self._kept.broken
        return f"the call had no tensors there, or has not ended{f'; {broken}' if broken else ''}"

    def _has_parameters(self, layer: str) -> bool:
        """Say whether a layer that was called has parameters of its own."""
        return any(True for one in self._clock.agenda.layers if one.name == layer for _ in own_parameters(one.module))


class LayerTap:
    """The live tensors of one layer: under ``activation``, ``gradient``, ``input``, ``parameter`` and the gradients of these two, those of its first call.

    What is not there raises `MissingCaptureError`, which says why.
    """

    def __init__(self, taps: Tap, name: str) -> None:
        self.name = name
        self._tap = taps

    @property
    def activation(self) -> Any:
        """What the module returned."""
        return self.get("activation")

    @property
    def gradient(self) -> Any:
        """Gradient of the loss with respect to what the module returned, of the last backward."""
        return self.get("gradient")

    @property
    def input(self) -> Any:
        """What the module was called with."""
        return self.get("input")

    @property
    def input_gradient(self) -> Any:
        """The module's own share of the gradient of what it was called with, of the last backward."""
        return self.get("input_gradient")

    @property
    def parameter(self) -> Any:
        """The module's own parameters."""
        return self.get("parameter")

    @property
    def parameter_gradient(self) -> Any:
        """Gradients of the module's own parameters, as the first optimizer's step after the forward saw them."""
        return self.get("parameter_gradient")

    def __getitem__(self, kind: str) -> Any:
        return self.get(kind)

    @property
    def kinds(self) -> list[str]:
        """Kinds of which there is something now."""
        found = {kind for (layer, kind, _), value in list(self._tap._kept.values.items()) if layer == self.name and value.backwards}
        return [kind for kind in KINDS if kind in found]

    @property
    def calls(self) -> list[int]:
        """Numbers of the calls in this forward of which there is something now."""
        values = list(self._tap._kept.values)
        return sorted({call for layer, kind, call in values if layer == self.name and kind != "parameter_gradient"})

    def get(self, kind: str, *, call: int = 0, leaf: str | None = None, backward: int | None = None) -> Any:
        """Return a value in the structure that the module returned, or was called with.

        Parameters
        ----------
        kind : str
            What.
        call : int
            Which call of the layer in this forward; of ``"parameter_gradient"``, which step since.
        leaf : str, optional
            One tensor of a nested value, or all that lies below a path.
        backward : int, optional
            Which backward over this forward; by default the last.

        Returns
        -------
        object
            A `torch.Tensor`, the model's own, or what `Captures.value` gives with such tensors in it: tuples, lists, dicts and named tuples as they were, a
            `Record` for a dataclass, ``None`` where no gradient arrived, a `NotStored` for what is no tensor. Several parameters are a dict by
            name.

        Raises
        ------
        MissingCaptureError
            If there is none; it says why.
        """
        value = self._tap._find(self.name, kind, call)
        number = max(value.backwards) if backward is None else backward
        if number not in value.backwards:
            raise self._missing(kind, call, f"backward {backward}", f"there are backwards {', '.join(map(str, sorted(value.backwards)))}")
        tensors = dict(value.backwards[number])
        if leaf in tensors:
            return tensors[leaf]
        whole = decode(value.structure).whole
        branch = None if whole is None else whole.find(leaf or "")
        if branch is not None and (leaf is None or not branch.is_leaf):
            return _build(branch, tensors, value.gaps, kind)
        if leaf is not None:
            reason = value.gaps.get(leaf, f"there are leaves {', '.join(map(repr, sorted(tensors)))}")
            raise self._missing(kind, call, f"leaf {leaf!r}", reason)
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        if kind in _OF_PARAMETERS:
            return tensors
        raise self._missing(kind, call, "one value", f"there are several leaves: {', '.join(map(repr, tensors))}; name one by leaf=")

    def _missing(self, kind: str, call: int, what: str, reason: str) -> MissingCaptureError:
        of_call = f", call {call}" if call else ""
        return MissingCaptureError(
            f"there is no {what} in the {kind} of layer {self.name!r}{of_call}: {reason}", layer=self.name, kind=kind, call=call
        )

    def __repr__(self) -> str:
        return f"<hookstore.LayerTap {self.name!r}: {', '.join(self.kinds) or 'nothing yet'}>"


def _at_end(sink: LiveSink, hooks: ModelHooks) -> Callable[[Coordinates], None]:
    """Return what the clock calls when a forward gives way to the next. It does not know the tap, which so can be dropped."""

    def at_end(here: Coordinates) -> None:
        sink.empty()
        hooks.uncalled.end(here)

    return at_end


def _of_compiled() -> str:
    return "; if it was compiled before the tap was made, its graph knows nothing of the tap" if has_compiled() else ""


def _build(branch: Branch, tensors: Mapping[str, torch.Tensor], gaps: Mapping[str, str], kind: str) -> Any:
    """Put tensors into the structure that they had."""

    def tensor(path: str) -> Any:
        if path in tensors:
            return tensors[path]
        if path in gaps:
            return NotStored("torch.Tensor", gaps[path])
        return None if kind in _OF_BACKWARD else NotStored("torch.Tensor", "it has not come")

    return build(branch, tensor, packed=_packed)


def _packed(**fields: Any) -> Any:
    if all(isinstance(fields.get(name), torch.Tensor) for name in ("data", "batch_sizes")):
        return torch.nn.utils.rnn.PackedSequence(**fields)
    return PackedSequence(**fields)
