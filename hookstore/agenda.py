"""What is due when: the captures of a run put together, and, for a batch, what to take of which layer.

A capture that is switched off is never due. One with a condition (``when``) is due for statistics alone, and for tensors too while its condition holds.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from hookstore.capture import TORCH_DTYPES, Capture
from hookstore.errors import OptionError
from hookstore.format import DTYPES, KINDS
from hookstore.portion import Portion
from hookstore.schedule import Schedule
from hookstore.selection import Layer, select_layers
from hookstore.triggers import check_can_hold, describe
from hookstore.wrappers import name_modules

_OF_A_CALL = tuple(kind for kind in KINDS if kind != "parameter_gradient")
NO_STATS, ALSO, ONLY = "", "also", "only"


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """In which form tensors of one kind of some layer are taken.

    Attributes
    ----------
    number : int
        Different for each.
    portion : Portion or None
        Which part of each tensor.
    dims : tuple of str
        Names of the tensor's axes, where the user gave them.
    stored : dict
        For each torch dtype the dtype that it is stored as.
    codec : dict
        For each stored dtype the codec as canonical JSON, or ``None``.
    stats : str
        Whether statistics are taken: ``""`` for no, ``"also"``, or ``"only"`` for them alone.
    every : int
        One batch in so many is recorded.
    watchers : tuple of Choice
        The captures whose condition (``when``) is asked about what is taken so.
    known : dict
        Kept by the sink: where tensors go that are copied as whole chunks within the host.
    """

    number: int
    portion: Portion | None
    dims: tuple[str, ...]
    stored: Mapping[torch.dtype, str]
    codec: Mapping[str, str | None]
    stats: str
    every: int
    watchers: tuple[Choice, ...] = ()
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        """Text of the portion."""
        return "" if self.portion is None else self.portion.text


# Of what belongs to no capture: whole, and as it is.
WHOLE = Take(-1, None, (), TORCH_DTYPES, dict.fromkeys(DTYPES), NO_STATS, 1)


class LayerDue:
    """What is due of one layer.

    Attributes
    ----------
    takes : dict
        For each kind how it is taken: once for each portion.
    activation, output_gradient, input_gradient, gradient, arguments, input, parameter : bool
        What the hooks have to do.
    """

    __slots__ = ("activation", "arguments", "gradient", "input", "input_gradient", "output_gradient", "parameter", "takes")

    def __init__(self, takes: Mapping[str, tuple[Take, ...]]) -> None:
        self.takes = takes
        self.activation = "activation" in takes
        self.output_gradient = "gradient" in takes
        self.input_gradient = "input_gradient" in takes
        self.gradient = self.output_gradient or self.input_gradient
        self.input = "input" in takes
        self.parameter = "parameter" in takes
        self.arguments = self.input or self.input_gradient or self.parameter


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """What is due in a batch.

    Attributes
    ----------
    number : int
        Its position among `Agenda.dues`.
    layers : dict
        What is due of each layer; those of which nothing is are not there.
    calls : dict
        Those of them of which something is due that a call shows, and not an optimizer's step.
    of_calls : frozenset of str
        Their names.
    """

    number: int
    layers: Mapping[str, LayerDue]
    calls: Mapping[str, LayerDue]
    of_calls: frozenset[str]


class Choice:
    """A capture and what it chooses of the models.

    Attributes
    ----------
    capture : Capture
        As the user wrote it.
    name : str
        Its name.
    layers : list of str
        Names of the layers that it chooses.
    is_on : bool
        Whether it is switched on.
    is_called_for : bool
        Whether its condition was found to hold since the last of its batches began; set by the writer.
    num_raised : int
        For how many of its batches to come it takes full tensors.
    """

    __slots__ = ("_codecs", "_portion", "_schedule", "capture", "dtype", "is_called_for", "is_on", "layers", "name", "num_raised")

    def __init__(self, capture: Capture, name: str, layers: list[str], portion: Portion | None) -> None:
        self.capture = capture
        self.name = name
        self.layers = layers
        self.is_on = True
        self.is_called_for = False
        self.num_raised = 0
        self.dtype = None if capture.dtype is None else TORCH_DTYPES[capture.dtype]
        self._portion = portion
        self._schedule = capture.make_schedule()
        self._codecs = capture.make_codecs()

    @property
    def schedule(self) -> Schedule:
        """When it is due."""
        return self._schedule

    @property
    def portion(self) -> Portion | None:
        """Which part of each tensor it keeps."""
        return self._portion

    @property
    def codecs(self) -> dict[str, str | None]:
        """The codec of each dtype's arrays."""
        return self._codecs

    def begin_batch(self) -> bool:
        """Say whether it takes full tensors in one of its batches, which begins."""
        if self.is_called_for:
            self.is_called_for = False  # first: what the writer finds meanwhile counts from the next batch on at the latest
            self.num_raised = max(self.num_raised, self.capture.hold)
        is_raised = self.num_raised > 0
        self.num_raised -= is_raised
        return is_raised

    @property
    def has_statistics(self) -> bool:
        """Whether it ever stores statistics."""
        return bool(self.capture.stats) or self.capture.when is not None

    def stats(self, *, is_raised: bool) -> str:
        """Return whether statistics are taken."""
        if self.capture.when is not None:
            return ALSO if is_raised else ONLY
        return ONLY if self.capture.stats == "only" else ALSO if self.capture.stats else NO_STATS

    def describe(self) -> dict[str, Any]:
        """Describe it for ``run.json``."""
        capture = self.capture
        codec = self._codecs["float32"]
        return {
            "name": self.name,
            "layers": list(self.layers),
            "kinds": list(capture.kinds),
            **self._schedule.describe(),
            "dtype": self.dtype,
            "codec": None if codec is None else json.loads(codec),
            "select": "" if self._portion is None else self._portion.text,
            "dims": None if capture.dims is None else list(capture.dims),
            "stats": capture.stats,
            "when": None if capture.when is None else describe(capture.when),
            "hold": capture.hold,
        }


class Agenda:
    """The captures of a run.

    Parameters
    ----------
    captures : sequence of Capture
        At least one.
    models : mapping
        The models by name; see `hookstore.selection.select_layers`.
    always_stats : bool
        Whether statistics are taken of everything, asked for or not.

    Attributes
    ----------
    choices : list of Choice
        The captures with what they choose.
    names : list of str
        Names of all layers, in the model's order.
    kinds : tuple of str
        All kinds.
    phases : frozenset of str
        All phases.
    has_portions, has_statistics : bool
        Whether parts of tensors are kept, and statistics.
    dues : list of Due
        What has been found to be due so far, each once.

    Raises
    ------
    OptionError
        If two captures want the same in different forms; `SelectionError` for layers that match nothing.
    """

    def __init__(self, captures: Sequence[Capture], models: Mapping[str, nn.Module], *, always_stats: bool = False) -> None:
        self.choices, layers = _choose(captures, models)
        order = {found.names[0]: position for position, found in enumerate(name_modules(models))}
        ordered = sorted(layers, key=lambda layer: order[layer.name])
        self.names = [layer.name for layer in ordered]
        self._layers = [(weakref.ref(layer.module), layer.name, layer.aliases, layer.num_names) for layer in ordered]  # a model may go away
        self.kinds = tuple(kind for kind in KINDS if any(kind in choice.capture.kinds for choice in self.choices))
        self.phases = frozenset().union(*(choice.schedule.phases for choice in self.choices))
        self.has_portions = any(choice.portion is not None for choice in self.choices)
        self.has_statistics = always_stats or any(choice.has_statistics for choice in self.choices)
        self.dues: list[Due] = []
        self._always_stats = always_stats
        self._every = _check_together(self.choices)
        self._dims = _dims_together(self.choices)
        self._takes: dict[tuple[object, ...], Take] = {}
        self._by_states: dict[tuple[int, ...], Due | None] = {}
        self._layers_of: dict[tuple[bool, ...], frozenset[str]] = {}

    @property
    def layers(self) -> list[Layer]:
        """All layers whose modules are alive, in the model's order."""
        return [
            Layer(name, module, aliases, num_names)
            for reference, name, aliases, num_names in self._layers
            if (module := reference()) is not None
        ]

    @property
    def num_epochs(self) -> int | None:
        """Epochs until the last one in which anything is due, where that is known."""
        return _last([choice.schedule.num_epochs for choice in self.choices])

    @property
    def num_batches(self) -> int | None:
        """Batches until the last one in which anything is due, where that is known."""
        return _last([choice.schedule.num_batches for choice in self.choices])

    def forget(self) -> None:
        """Keep nothing of a recording alive that has ended."""
        for take in self._takes.values():
            take.known.clear()

    def kinds_of(self, layer: str) -> tuple[str, ...]:
        """Return all kinds that are ever due of a layer."""
        kinds = {kind for choice in self.choices if layer in choice.layers for kind in choice.capture.kinds}
        return tuple(kind for kind in KINDS if kind in kinds)

    def wants(self, phase: str | None, epoch: int, batch: int, step: int | None) -> bool:
        """Say whether anything is due in a batch; with ``None`` in any phase, or whatever the steps."""
        return any(self._wants(choice, phase, epoch, batch, step) for choice in self.choices)

    def wanted(self, epoch: int, batch: int, step: int) -> tuple[bool, frozenset[str]]:
        """Say whether anything is due in a batch, in whatever phase, and of which layers calls show it."""
        states = tuple([self._wants(choice, None, epoch, batch, step) for choice in self.choices])
        found = self._layers_of.get(states)
        if found is None:
            found = frozenset(
                layer
                for choice, state in zip(self.choices, states, strict=True)
                if state and not {*choice.capture.kinds}.isdisjoint(_OF_A_CALL)
                for layer in choice.layers
            )
            self._layers_of[states] = found
        return True in states, found

    def due(self, phase: str, epoch: int, batch: int, step: int) -> Due | None:
        """Return what is due in a batch that begins, ``None`` where nothing is. A condition that holds does so for one batch less afterwards."""
        states = []
        for choice in self.choices:
            state = int(self._wants(choice, phase, epoch, batch, step))
            if state and choice.begin_batch():
                state = 2
            states.append(state)
        key = tuple(states)
        if key not in self._by_states:
            self._by_states[key] = self._make(key) if any(key) else None
        return self._by_states[key]

    def all_due(self) -> Due:
        """Return what would be due in a batch of every capture, with conditions that do not hold."""
        return self._make((1,) * len(self.choices))

    @staticmethod
    def _wants(choice: Choice, phase: str | None, epoch: int, batch: int, step: int | None) -> bool:
        return choice.is_on and (phase is None or phase in choice.schedule.phases) and choice.schedule.wants(epoch, batch, step)

    def _make(self, states: tuple[int, ...]) -> Due:
        """Put together what is due of each layer."""
        wanted: dict[str, dict[str, dict[str, list[tuple[Choice, str]]]]] = {}
        for choice, state in zip(self.choices, states, strict=True):
            stats = choice.stats(is_raised=state == 2)
            text = "" if choice.portion is None else choice.portion.text
            for layer in choice.layers if state else ():
                for kind in choice.capture.kinds:
                    wanted.setdefault(layer, {}).setdefault(kind, {}).setdefault(text, []).append((choice, stats))
        layers = {}
        for layer in self.names:
            kinds = wanted.get(layer)
            if kinds is not None:
                takes = {kind: tuple(self._take(layer, kind, same) for same in kinds[kind].values()) for kind in KINDS if kind in kinds}
                layers[layer] = LayerDue(takes)
        calls = {name: due for name, due in layers.items() if not due.takes.keys().isdisjoint(_OF_A_CALL)}
        made = Due(len(self.dues), layers, calls, frozenset(calls))
        self.dues.append(made)
        return made

    def _take(self, layer: str, kind: str, same: list[tuple[Choice, str]]) -> Take:
        """Return in which form what some captures want alike is taken."""
        has_tensor = any(stats != ONLY for _, stats in same)
        has_stats = self._always_stats or any(stats for _, stats in same)
        stats = (ALSO if has_stats else NO_STATS) if has_tensor else ONLY
        choice = next((choice for choice, stats in same if stats != ONLY), same[0][0])
        dims = self._dims.get((layer, kind), ())
        text = "" if choice.portion is None else choice.portion.text
        every = self._every[layer, kind, text]
        watchers = tuple(choice for choice, _ in same if choice.capture.when is not None)
        key = (text, dims, choice.dtype, choice.codecs["float32"], stats, every, watchers)
        take = self._takes.get(key)
        if take is None:
            stored = {
                torch_dtype: choice.dtype if choice.dtype is not None and torch_dtype.is_floating_point else name
                for torch_dtype, name in TORCH_DTYPES.items()
            }
            take = self._takes[key] = Take(len(self._takes), choice.portion, dims, stored, choice.codecs, stats, every, watchers)
        return take


def _choose(captures: Sequence[Capture], models: Mapping[str, nn.Module]) -> tuple[list[Choice], list[Layer]]:
    """Find what captures choose, and all layers among that; of two functions with one name the later gets a number."""
    layers: dict[str, Layer] = {}
    names: set[str] = set()
    functions: dict[str, list[Any]] = {}
    choices = []
    for position, capture in enumerate(captures):
        name = capture.name or str(position)
        if name in names:
            raise OptionError(f"captures: two have the name {name!r}", option="captures")
        names.add(name)
        portion = capture.make_portion()
        if portion is not None and portion.function is not None:
            alike = functions.setdefault(portion.text, [])
            number = next((at for at, one in enumerate(alike) if _is_same(one, portion.function)), len(alike))
            if number == len(alike):
                alike.append(portion.function)
            portion = Portion(f"{portion.text[:-2]}~{number}()", function=portion.function) if number else portion
        chosen = select_layers(models, capture.layers)
        if capture.when is not None:
            check_can_hold(capture.when, ((layer.name, kind) for layer in chosen for kind in capture.kinds))
        layers.update((layer.name, layer) for layer in chosen)
        choices.append(Choice(capture, name, [layer.name for layer in chosen], portion))
    return choices, list(layers.values())


def _is_same(one: Any, other: Any) -> bool:
    """Say whether two functions are one: a method is made anew each time that it is asked for, and what else is equal may mean something else."""
    return one is other or (isinstance(one, MethodType) and isinstance(other, MethodType) and one == other)


def _check_together(choices: Sequence[Choice]) -> dict[tuple[str, str, str], int]:
    """Make sure that what several captures want of one layer, kind and portion is one array's, and return how often each is due at most."""
    every: dict[tuple[str, str, str], int] = {}
    first: dict[tuple[object, ...], tuple[Choice, Any]] = {}
    for choice in choices:
        text = "" if choice.portion is None else choice.portion.text
        codec = choice.codecs["float32"]
        for layer, kind in ((layer, kind) for layer in choice.layers for kind in choice.capture.kinds):
            key = (layer, kind, text)
            every[key] = min(every.get(key, choice.schedule.every), choice.schedule.every)
            options = {"dtype": choice.dtype, **({} if choice.capture.stats == ONLY else {"codec": codec})}
            for option, value in options.items():
                other, theirs = first.setdefault((option, *key), (choice, value))
                if value != theirs:
                    raise OptionError(
                        f"captures: {other.name!r} and {choice.name!r} both choose {kind} of layer {layer!r}{f', {text},' if text else ''} with {option} "
                        f"{theirs} and {value}; what is stored once has one {option}",
                        option=option,
                    )
    return every


def _dims_together(choices: Sequence[Choice]) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return what the axes of each layer's and kind's tensors are called, where any capture says so; all that do must agree."""
    named: dict[tuple[str, str], Choice] = {}
    for choice in choices:
        for key in ((layer, kind) for layer in choice.layers for kind in choice.capture.kinds if choice.capture.dims is not None):
            other = named.setdefault(key, choice)
            if tuple(other.capture.dims or ()) != tuple(choice.capture.dims or ()):
                raise _unlike_dims(other, choice, key)
    for choice in choices:
        for key in ((layer, kind) for layer in choice.layers for kind in choice.capture.kinds if (layer, kind) in named):
            dims = named[key].capture.dims or ()
            for pick in choice.portion.picks if choice.portion is not None else ():
                if not pick.name.lstrip("-").isdigit() and dims[pick.axis : pick.axis + 1] != (pick.name,):
                    raise _unlike_dims(named[key], choice, key)
    return {key: tuple(choice.capture.dims or ()) for key, choice in named.items()}


def _unlike_dims(one: Choice, other: Choice, key: tuple[str, str]) -> OptionError:
    layer, kind = key
    return OptionError(
        f"captures: {one.name!r} and {other.name!r} both choose {kind} of layer {layer!r}, with dims {one.capture.dims} and {other.capture.dims}; give both "
        "the same",
        option="dims",
    )


def _last(extents: Sequence[int | None]) -> int | None:
    known = [extent for extent in extents if extent is not None]
    return max(known) if len(known) == len(extents) else None
