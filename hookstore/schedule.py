"""When a capture is due: its schedule, and the budget that leaves out batches."""

from __future__ import annotations

import contextlib
import operator
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from hookstore.errors import OptionError
from hookstore.format import LARGEST_COORDINATE, PHASES

When = int | Iterable[int] | Callable[[int], bool]
Restriction = Container[int] | Callable[[int], bool] | None
_LONGEST_CREDIT_S = 10.0
_MOST_LISTED = 1000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which batches are recorded.

    Attributes
    ----------
    every : int
        One batch in so many, counted from batch 0 of each epoch.
    epochs, batches, steps : container of int, callable or None
        Restrictions; ``None`` restricts nothing. Steps are those of optimizers done before the batch.
    phases : frozenset of str
        Modes of the root module that are recorded.
    """

    every: int
    epochs: Restriction
    batches: Restriction
    steps: Restriction
    phases: frozenset[str]

    @classmethod
    def build(
        cls,
        *,
        every: SupportsIndex = 1,
        epochs: When | None = None,
        batches: When | None = None,
        steps: When | None = None,
        phases: str | Iterable[str] = ("train",),
    ) -> Schedule:
        """Check the options of `hookstore.Capture` and make a schedule of them.

        Raises
        ------
        OptionError
            Naming the option, what was expected and what came.
        """
        wanted = tuple(phases) if isinstance(phases, Iterable) and not isinstance(phases, str) else (phases,)
        unknown = [phase for phase in wanted if phase not in PHASES]
        if unknown or not wanted:
            raise OptionError(f"phases: expected some of {', '.join(map(repr, PHASES))}, got {phases!r}", option="phases")
        return cls(
            every=whole("every", every, least=1, error=OptionError),
            epochs=_restriction("epochs", epochs),
            batches=_restriction("batches", batches),
            steps=_restriction("steps", steps),
            phases=frozenset(wanted),
        )

    @property
    def num_epochs(self) -> int | None:
        """Epochs until the last one that is recorded, where the restriction tells."""
        return _extent(self.epochs)

    @property
    def num_batches(self) -> int | None:
        """Batches until the last one that is recorded, where the restriction tells."""
        return _extent(self.batches)

    def wants(self, epoch: int, batch: int, step: int | None = None) -> bool:
        """Say whether a batch is recorded, whatever its phase; without a step, whether it may be."""
        return (
            batch % self.every == 0
            and (self.batches is None or allows(self.batches, batch))
            and (self.epochs is None or allows(self.epochs, epoch))
            and (step is None or self.steps is None or allows(self.steps, step))
        )

    def describe(self) -> dict[str, Any]:
        """Describe it for ``run.json``: a restriction as a list, ``[start, stop, step]`` of a range, or ``"function"``."""
        restrictions = {"epochs": self.epochs, "batches": self.batches, "steps": self.steps}
        return {
            "every": self.every,
            **{name: describe_restriction(restriction) for name, restriction in restrictions.items()},
            "phases": sorted(self.phases),
        }


class Budget:
    """Keeps what recording takes from training within a share of its time, by leaving out whole batches.

    Time that passes while nothing is recorded earns credit, the hooks' own time on the training threads (waiting for room in the staging buffer
    included) spends it. A batch is recorded when there is credit for what the batches before it cost. What the writer's threads take from the host is
    not seen here.

    Parameters
    ----------
    max_slowdown : float
        The share: 0.05 lets a training of 100 s take 105 s.
    now : callable
        Gives the time in seconds.
    """

    def __init__(self, max_slowdown: float, now: Callable[[], float] = time.perf_counter) -> None:
        self.max_slowdown = max_slowdown
        self.num_skipped = 0
        self._now = now
        self._lock = threading.Lock()
        self._spent_s = 0.0  # since the batch began
        self._began_at = now()
        self._credit_s = 0.0
        self._cost_s: float | None = None  # of a batch that is recorded
        self._is_recorded = False
        self._has_begun = False

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Count what is done in here as the recorder's own time; on any thread, not nested."""
        started = self._now()
        try:
            yield
        finally:
            took_s = self._now() - started
            with self._lock:
                self._spent_s += took_s

    def begin_batch(self, *, wanted: bool) -> bool:
        """Account for the batch that ends, and say whether the one that begins is to be recorded.

        Parameters
        ----------
        wanted : bool
            Whether the schedule asks for it.
        """
        now = self._now()
        with self._lock:
            spent_s, self._spent_s = self._spent_s, 0.0
        if not self._has_begun:  # what was done before the first batch, such as registering hooks, is not training's time
            self._has_begun, spent_s = True, 0.0
        if self._is_recorded:
            self._cost_s = spent_s if self._cost_s is None else (self._cost_s + spent_s) / 2
        cost_s = self._cost_s or 0.0
        earned_s = self.max_slowdown * max(0.0, now - self._began_at - spent_s)
        # A pause of an hour must not pay for an hour of slow steps.
        most_s = max(cost_s, self.max_slowdown * _LONGEST_CREDIT_S)
        self._credit_s = min(self._credit_s + earned_s, most_s) - spent_s
        self._began_at = now
        self._is_recorded = wanted and self._credit_s >= cost_s
        self.num_skipped += wanted and not self._is_recorded
        return self._is_recorded


def whole(name: str, value: SupportsIndex, *, least: int = 0, error: type[OptionError]) -> int:
    """Return ``value`` as an int, or raise ``error`` if it is no whole number, or out of bounds."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = least - 1
    if isinstance(value, bool) or not least <= whole <= LARGEST_COORDINATE:
        raise error(f"{name}: expected a whole number of at least {least}, got {value!r} of type {type(value).__name__}", option=name)
    return whole


def _restriction(name: str, value: When | None) -> Restriction:
    if value is None or callable(value):
        return value
    if isinstance(value, range):
        return value
    if isinstance(value, str):  # type: ignore[unreachable]  # users pass anything
        raise OptionError(f"{name}: expected a whole number, an iterable of them, a range or a callable, got {value!r}", option=name)
    if isinstance(value, SupportsIndex):
        return frozenset([whole(name, value, error=OptionError)])
    if not isinstance(value, Iterable):
        raise OptionError(f"{name}: expected a whole number, an iterable of them, a range or a callable, got {value!r}", option=name)
    return frozenset(whole(name, item, error=OptionError) for item in value)


def describe_restriction(restriction: Restriction) -> Any:
    """Return what ``run.json`` says of a restriction."""
    if isinstance(restriction, range):
        return {"start": restriction.start, "stop": restriction.stop, "step": restriction.step}
    if isinstance(restriction, frozenset):
        listed = sorted(restriction)
        return listed if len(listed) <= _MOST_LISTED else {"first": listed[0], "last": listed[-1], "number": len(listed)}
    return None if restriction is None else "function"


def _extent(restriction: Restriction) -> int | None:
    if isinstance(restriction, range | frozenset) and len(restriction):
        return max(restriction) + 1
    return None


def allows(restriction: Restriction, value: int) -> bool:
    """Say whether a restriction allows an epoch, a batch or a step."""
    if restriction is None:
        return True
    if callable(restriction):
        return bool(restriction(value))
    return value in restriction
