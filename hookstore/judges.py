"""What judges captures by their statistics, on the writer's thread: one judge for each trigger that asks about tensors."""

from __future__ import annotations

import bisect
import functools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from hookstore.agenda import Choice
from hookstore.format import OF_BATCH, SCALED_KINDS
from hookstore.statistics import Statistics
from hookstore.triggers import GradientNorm, NonFinite, Raised, Signalled, Trigger, Where, name_of

_MOST_FIRED = 1024
Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Captures of one layer, kind and leaf in one batch, as far as they are judged.

    Attributes
    ----------
    phase, layer, kind, leaf, portion : str
        What they are.
    statistics : numpy.ndarray
        Their statistics, divided by the loss scale; `hookstore.statistics.STATISTICS_DTYPE`.
    notes : numpy.ndarray
        Their coordinates and scales; `hookstore.regions.NOTE_DTYPE`.
    numbers_of : callable
        Gives the numbers of one of them in its true shape, or ``None`` where they are not at hand.
    """

    phase: str
    layer: str
    kind: str
    leaf: str
    portion: str
    statistics: np.ndarray[Any, Any]
    notes: np.ndarray[Any, Any]
    numbers_of: Callable[[int], np.ndarray[Any, Any] | None]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells them from captures of other tensors."""
        return self.phase, self.layer, self.kind, self.leaf, self.portion

    def describe(self, position: int) -> str:
        """Say which capture it is, without its batch."""
        if self.kind in OF_BATCH:
            return f"{self.kind} {self.leaf!r}" if self.leaf else self.kind
        note = self.notes[position]
        call = f", call {note['call']}" if note["call"] else ""
        backward = f", backward {note['backward']}" if note["backward"] else ""
        leaf = f", leaf {self.leaf!r}" if self.leaf else ""
        portion = f" (of which {self.portion} is kept)" if self.portion else ""
        return f"{self.kind} of layer {self.layer!r}{leaf}{call}{backward}{portion}"


class Verdict(NamedTuple):
    """One of some captures, for which a condition holds, and what gives the words for it: finding them takes time."""

    position: int
    reason: Callable[[], str]


class Judge(Protocol):
    """Says whether a condition holds.

    Attributes
    ----------
    asks_only_non_finite : bool
        Whether it holds for nothing whose elements are all finite, and need not see that.
    """

    asks_only_non_finite: bool

    def chooses(self, layer: str, kind: str) -> bool:
        """Say whether it can hold for tensors of a kind of a layer."""

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """Return for which captures it does, in their order."""


class NonFiniteJudge:
    """Judges for `NonFinite`."""

    def __init__(self, trigger: NonFinite) -> None:
        self.asks_only_non_finite = True
        self.chooses = trigger.chooses
        self._trigger = trigger

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """See `Judge`."""
        statistics = evidence.statistics
        is_bad = (statistics["nan"] > 0) | (statistics["inf"] > 0)
        if not self._trigger.scaled_gradients and evidence.kind in SCALED_KINDS:
            is_bad &= np.isnan(evidence.notes["scale"])
        return [
            Verdict(position, functools.partial(_describe_non_finite, evidence, position)) for position in np.flatnonzero(is_bad).tolist()
        ]


class GradientNormJudge:
    """Judges for `GradientNorm`; keeps the last norms of each layer, kind and leaf."""

    def __init__(self, trigger: GradientNorm) -> None:
        self.asks_only_non_finite = False
        self.chooses = trigger.chooses
        self._trigger = trigger
        self._norms: dict[tuple[str, ...], _Window] = {}

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """See `Judge`."""
        trigger = self._trigger
        window = self._norms.get(evidence.key)
        if window is None:
            window = self._norms[evidence.key] = _Window(trigger.window)
        verdicts = []
        statistics = evidence.statistics
        is_whole = (statistics["nan"] == 0) & (statistics["inf"] == 0)
        for position in np.flatnonzero(is_whole).tolist():
            norm = float(statistics["l2"][position])
            if len(window) >= trigger.num_first and norm > trigger.times * window.median > 0:
                reason = f"{evidence.describe(position)}: its norm {norm:.4g} is above {trigger.times:g} × {window.median:.4g}, the median of its "
                verdicts.append(Verdict(position, f"{reason}last {len(window)}".__str__))
            window.add(norm)
        return verdicts


class FunctionJudge:
    """Judges by a function of the user's; one that raises is told of once and holds for nothing then.

    Parameters
    ----------
    function : callable
        Is given `Statistics` and `Where`.
    tell : callable
        Takes what the user is to be warned of.
    """

    def __init__(self, function: Callable[[Statistics, Where], bool], tell: Callable[[str], None]) -> None:
        self.asks_only_non_finite = False
        self._function = function
        self._name = name_of(function)
        self._tell = tell
        self._has_raised = False

    def chooses(self, _layer: str, kind: str) -> bool:
        """See `Judge`."""
        return kind != "annotation"

    def judge(self, evidence: Evidence) -> list[Verdict]:
        """See `Judge`."""
        verdicts = []
        for position, (record, note) in enumerate(zip(evidence.statistics, evidence.notes, strict=True)):
            epoch, batch, call, backward = (int(note[name]) for name in ("epoch", "batch", "call", "backward"))
            where = Where(evidence.phase, epoch, batch, call, backward, evidence.layer, evidence.kind, evidence.leaf)
            try:
                holds = bool(self._function(Statistics.of_record(record), where))
            except Exception as error:  # no reason to stop recording
                if not self._has_raised:
                    self._has_raised = True
                    self._tell(
                        f"when: {self._name} raised {type(error).__name__}: {error}, which is taken for False (said once), first at {where}"
                    )
                holds = False
            if holds:
                verdicts.append(Verdict(position, f"{self._name} holds for {evidence.describe(position)}".__str__))
        return verdicts


class _Window:
    """The last so many numbers, and their median."""

    __slots__ = ("_in_order", "_in_time", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._in_time: deque[float] = deque()
        self._in_order: list[float] = []

    def __len__(self) -> int:
        return len(self._in_time)

    @property
    def median(self) -> float:
        """The median of at least one number."""
        ordered = self._in_order
        middle = len(ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

    def add(self, value: float) -> None:
        """Take one more, and forget the oldest if there are too many."""
        if math.isnan(value):  # of a tensor without elements
            return
        if len(self._in_time) == self._size:
            del self._in_order[bisect.bisect_left(self._in_order, self._in_time.popleft())]
        self._in_time.append(value)
        bisect.insort(self._in_order, value)


class Onset:
    """Says where a condition begins to hold.

    It is followed for each tensor by itself (of each call), from one of its batches to the next: a mask that is infinite in every batch must not hide the
    activation that becomes NaN. What begins in the batch after one that fired is taken for its spread.
    """

    def __init__(self) -> None:
        self._held_in: dict[Key, int] = {}  # the last batch, for each tensor for which it holds
        self._missed_in: dict[Key, int] = {}  # the first batch after that in which it did not
        self._fired_in: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """Whether it holds for no tensor."""
        return not self._held_in

    def is_news(self, key: Key, number: int, *, holds: bool) -> bool:
        """Note whether it holds for a tensor in a batch, and say whether it has begun to; gradients may come out of the order of batches."""
        held_in, missed_in = self._held_in.get(key), self._missed_in.get(key)
        if holds:
            if held_in is not None and number <= held_in:
                return False
            self._held_in[key] = number
            if missed_in is not None and missed_in <= number:
                del self._missed_in[key]
            return held_in is None or (missed_in is not None and missed_in < number)
        if held_in is not None and number > held_in:
            if missed_in is not None and number > missed_in:
                del self._held_in[key], self._missed_in[key]
            else:
                self._missed_in[key] = number
        return False

    def fires(self, number: int) -> bool:
        """Say whether what begins in a batch fires: not where it has fired there already, or in the batch before."""
        if not self._fired_in.isdisjoint((number, number - 1)):
            return False
        self._fired_in.add(number)
        if len(self._fired_in) > _MOST_FIRED:
            self._fired_in = set(sorted(self._fired_in)[_MOST_FIRED // 2 :])
        return True


def keys_of(key: tuple[str, ...], notes: np.ndarray[Any, Any]) -> list[Key]:
    """Return what tells each of some captures from others of the same batch."""
    return [(*key, call, backward) for call, backward in zip(notes["call"].tolist(), notes["backward"].tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class Panel:
    """Who judges captures of one kind of a layer.

    Attributes
    ----------
    triggers : tuple
        Judges of the flight recorder's triggers, each with its number.
    conditions : tuple
        Captures with the judges of their conditions.
    """

    triggers: tuple[tuple[int, Judge], ...]
    conditions: tuple[tuple[Choice, tuple[Judge, ...]], ...]

    @classmethod
    def of(cls, triggers: Sequence[Judge], conditions: Mapping[Choice, Sequence[Judge]], layer: str, kind: str) -> Panel:
        """Choose those who can find anything in such captures."""
        chosen = tuple((number, judge) for number, judge in enumerate(triggers) if judge.chooses(layer, kind))
        found = ((choice, tuple(judge for judge in judges if judge.chooses(layer, kind))) for choice, judges in conditions.items())
        return cls(chosen, tuple((choice, judges) for choice, judges in found if judges))

    @property
    def is_empty(self) -> bool:
        """Whether there is nobody."""
        return not self.triggers and not self.conditions

    @property
    def asks_only_non_finite(self) -> bool:
        """Whether nobody needs to see captures whose elements are all finite."""
        judges = [judge for _, judge in self.triggers] + [judge for _, judges in self.conditions for judge in judges]
        return all(judge.asks_only_non_finite for judge in judges)


def judges_of(triggers: tuple[Trigger, ...], tell: Callable[[str], None]) -> list[Judge]:
    """Return what judges captures for some triggers; those that wait for an event have none."""
    judges: list[Judge] = []
    for trigger in triggers:
        if isinstance(trigger, NonFinite):
            judges.append(NonFiniteJudge(trigger))
        elif isinstance(trigger, GradientNorm):
            judges.append(GradientNormJudge(trigger))
        elif not isinstance(trigger, Raised | Signalled):
            judges.append(FunctionJudge(trigger, tell))
    return judges


def _describe_non_finite(evidence: Evidence, position: int) -> str:
    num_nan, num_inf = evidence.statistics["nan"][position], evidence.statistics["inf"][position]
    where = _first_non_finite(evidence.numbers_of(position))
    return f"non-finite {evidence.describe(position)}: {num_nan} NaN, {num_inf} Inf{where}"


def _first_non_finite(numbers: np.ndarray[Any, Any] | None) -> str:
    """Say where the first of them is, in the order of indices."""
    if numbers is None:
        return ""
    is_bad = ~np.isfinite(numbers)
    if not is_bad.any():
        return ""
    index = tuple(int(number) for number in np.unravel_index(int(is_bad.reshape(-1).argmax()), numbers.shape))
    return f", first at index {index}"
