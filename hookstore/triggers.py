"""Triggers: what makes the flight recorder write out what it keeps, and a capture go over from statistics to full tensors."""

from __future__ import annotations

import fnmatch
import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookstore.errors import OptionError
from hookstore.format import KINDS, SCALED_KINDS
from hookstore.statistics import Statistics

GRADIENTS = (*SCALED_KINDS, "parameter_gradient")
_JUDGED = (*KINDS, "loss")


class Where(NamedTuple):
    """Which tensor it is whose statistics a function is asked about.

    Attributes
    ----------
    phase : str
        ``"train"`` or ``"eval"``.
    epoch, batch, call, backward : int
        Where it stands in training.
    layer, kind, leaf : str
        What it is.
    """

    phase: str
    epoch: int
    batch: int
    call: int
    backward: int
    layer: str
    kind: str
    leaf: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Holds where a tensor has NaN or infinite elements as it is stored: the part that is kept, after the cast, in which large numbers may become infinite.

    Parameters
    ----------
    kinds : str or iterable of str, optional
        Of which kinds, ``"loss"`` among them; by default of all that are recorded.
    layers : str or iterable of str, optional
        Of which layers: globs over their names. A loss has the root's, which is ``""``.
    scaled_gradients : bool
        Whether gradients that carry a loss scale count. A `torch.amp.GradScaler` makes them overflow on purpose now and then, and leaves the step out.

    Raises
    ------
    OptionError
        For an argument that cannot be used.
    """

    kinds: str | Iterable[str] | None = None
    layers: str | Iterable[str] | None = None
    scaled_gradients: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _check_kinds(self.kinds, _JUDGED))
        object.__setattr__(self, "layers", _check_layers(self.layers))

    def __str__(self) -> str:
        return f"NonFinite({_options(self)})"

    def chooses(self, layer: str, kind: str) -> bool:
        """Say whether tensors of a kind of a layer count."""
        return kind in (self.kinds or _JUDGED) and _matches(self.layers, layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """Holds where the L2 norm of a gradient is above so many times the median of its last values.

    Each layer, kind and leaf has a median of its own. Norms are those of the finite elements, divided by the loss scale where there is one; a gradient with
    other elements neither counts nor enters the median. Nothing is above a median of 0.

    Parameters
    ----------
    times : float
        How many times the median.
    window : int
        Of how many values the median is taken.
    num_first : int
        How many values there must have been before it can hold.
    kinds : str or iterable of str, optional
        Some of ``"gradient"``, ``"input_gradient"`` and ``"parameter_gradient"``; by default all that are recorded.
    layers : str or iterable of str, optional
        Of which layers: globs over their names.

    Raises
    ------
    OptionError
        For an argument that cannot be used.
    """

    times: float = 10.0
    window: int = 101
    num_first: int = 10
    kinds: str | Iterable[str] | None = None
    layers: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int | float) or not 1 < self.times < math.inf:
            raise OptionError(f"times: expected a number above 1, got {self.times!r}", option="times")
        for name, least, most in (("window", 1, 100_001), ("num_first", 1, self.window)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise OptionError(f"{name}: expected a whole number from {least} to {most}, got {value!r}", option=name)
        object.__setattr__(self, "kinds", _check_kinds(self.kinds, GRADIENTS))
        object.__setattr__(self, "layers", _check_layers(self.layers))

    def __str__(self) -> str:
        return f"GradientNorm({_options(self)})"

    def chooses(self, layer: str, kind: str) -> bool:
        """Say whether tensors of a kind of a layer count."""
        return kind in (self.kinds or GRADIENTS) and _matches(self.layers, layer)


@dataclass(frozen=True, slots=True)
class Raised:
    """Holds where an exception ends the recording, or breaks off a forward of the model or of a layer, whether or not training goes on.

    Leaving by ``sys.exit()`` with no error is no such exception. Where the recorder is in no ``with`` statement and is not closed either, an exception that
    ends the process counts as soon as the main thread has ended by it.
    """

    def __str__(self) -> str:
        return "Raised()"


@dataclass(frozen=True, slots=True)
class Signalled:
    """Holds where the process gets a signal. The handler that was there before has its turn afterwards, and comes back when the recorder is closed.

    Parameters
    ----------
    signum : int
        The signal. One that would end the process, because nobody handles it, is refused unless it is meant for users: SIGUSR1 or SIGUSR2, which then does
        nothing else. For SIGTERM there is ``record(…, on_sigterm="flush")``.

    Raises
    ------
    OptionError
        If there is no such signal, or none that can be handled.
    """

    signum: int = signal.SIGUSR1

    def __post_init__(self) -> None:
        try:
            number = signal.Signals(self.signum)
        except ValueError:
            raise OptionError(f"signum: expected a signal such as signal.SIGUSR1, got {self.signum!r}", option="signum") from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise OptionError(f"signum: {number.name} cannot be handled", option="signum")
        object.__setattr__(self, "signum", number)

    def __str__(self) -> str:
        return f"Signalled({signal.Signals(self.signum).name})"


Condition = NonFinite | GradientNorm | Callable[[Statistics, Where], bool]
Trigger = Condition | Raised | Signalled


def check_when(when: Any, *, of_capture: bool) -> tuple[Trigger, ...]:
    """Return the option ``when`` as a tuple, each trigger once.

    Parameters
    ----------
    when : trigger, callable, or iterable of these
        As the user wrote it.
    of_capture : bool
        Whether it is that of a `Capture`, which events do not switch.

    Raises
    ------
    OptionError
        If it holds anything else.
    """
    triggers = tuple(when) if isinstance(when, Iterable) else (when,)
    for trigger in triggers:
        is_class = isinstance(trigger, type) and trigger in (NonFinite, GradientNorm, Raised, Signalled)
        if is_class or not (isinstance(trigger, Raised | Signalled) or callable(trigger) or isinstance(trigger, NonFinite | GradientNorm)):
            hint = f"; write {trigger.__name__}()" if is_class else ""
            raise OptionError(
                f"when: expected hookstore.NonFinite(), GradientNorm(), {'' if of_capture else 'Raised(), Signalled(), '}a function of "
                f"(statistics, where), or several of these, got {trigger!r}{hint}",
                option="when",
            )
        if of_capture and isinstance(trigger, Raised | Signalled):
            raise OptionError(f"when: {trigger} says nothing about a layer; it is for record(…, last=, when=)", option="when")
    if not triggers:
        raise OptionError("when: expected at least one trigger, got none", option="when")
    return tuple(trigger for position, trigger in enumerate(triggers) if trigger not in triggers[:position])


def check_can_hold(triggers: Iterable[Trigger], recorded: Iterable[tuple[str, str]]) -> None:
    """Raise `OptionError` for a trigger that would wait for ever.

    Parameters
    ----------
    triggers : iterable of Trigger
        The triggers.
    recorded : iterable of (str, str)
        Layers and kinds that they are asked about.
    """
    recorded = list(recorded)
    for trigger in triggers:
        if isinstance(trigger, NonFinite | GradientNorm) and not any(trigger.chooses(layer, kind) for layer, kind in recorded):
            layers = list(dict.fromkeys(repr(layer) for layer, kind in recorded if kind != "loss"))
            kinds = ", ".join(dict.fromkeys(repr(kind) for _, kind in recorded))
            raise OptionError(
                f"when: {trigger} can never hold, since nothing is captured that it is about: there are {kinds}, of layers {', '.join(layers[:5])}"
                f"{f' and {len(layers) - 5} more' if len(layers) > 5 else ''}; capture that too, or leave the trigger out",
                option="when",
            )


def name_of(trigger: Trigger) -> str:
    """Return what a trigger is called in ``run.json`` and in reasons."""
    if isinstance(trigger, NonFinite | GradientNorm | Raised | Signalled):
        return str(trigger)
    module = getattr(trigger, "__module__", None) or type(trigger).__module__
    return f"{module}.{getattr(trigger, '__qualname__', type(trigger).__qualname__)}()"


def describe(triggers: Iterable[Trigger]) -> str:
    """Return what ``run.json`` says of triggers."""
    return ", ".join(map(name_of, triggers))


def _check_kinds(kinds: str | Iterable[str] | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    if kinds is None:
        return None
    given = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    wrong = [kind for kind in given if kind not in known]
    if wrong or not given:
        raise OptionError(f"kinds: expected some of {', '.join(map(repr, known))}, got {wrong[0] if wrong else given!r}", option="kinds")
    return given


def _check_layers(layers: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if layers is None:
        return None
    given = (layers,) if isinstance(layers, str) else tuple(layers) if isinstance(layers, Iterable) else ()
    if not given or not all(isinstance(pattern, str) for pattern in given):
        raise OptionError(f"layers: expected globs over names of layers, got {layers!r}", option="layers")
    return given


def _matches(patterns: Any, layer: str) -> bool:
    return patterns is None or any(fnmatch.fnmatchcase(layer, pattern) for pattern in patterns)


def _options(trigger: NonFinite | GradientNorm) -> str:
    """Return the options of a trigger that are not the usual ones."""
    fields = type(trigger).__dataclass_fields__
    given = {name: getattr(trigger, name) for name in fields}
    return ", ".join(f"{name}={value!r}" for name, value in given.items() if value != fields[name].default)
