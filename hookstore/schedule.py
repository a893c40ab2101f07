"""When a run records: the schedule, and the clock that says where training stands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, SupportsIndex, TypeVar

from hookstore.errors import ClockError, OptionError
from hookstore.format import PHASES

Item = TypeVar("Item")
When = int | Iterable[int] | Callable[[int], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Where a forward stands in training: one object for each tick of the clock and phase.

    Attributes
    ----------
    phase : str
        Mode of the root module.
    epoch, batch : int
        Position.
    calls : dict
        For each layer, how often it has been called there.
    """

    phase: str
    epoch: int
    batch: int
    calls: dict[str, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which batches are recorded.

    Attributes
    ----------
    every : int
        One batch in so many, counted from batch 0 of each epoch.
    epochs, batches : container of int, callable or None
        Restrictions; ``None`` restricts nothing.
    phases : frozenset of str
        Modes of the root module that are recorded.
    """

    every: int
    epochs: Container[int] | Callable[[int], bool] | None
    batches: Container[int] | Callable[[int], bool] | None
    phases: frozenset[str]

    @classmethod
    def build(cls, *, every: SupportsIndex, epochs: When | None, batches: When | None, phases: str | Iterable[str]) -> Schedule:
        """Check the options of `hookstore.record` and make a schedule of them.

        Raises
        ------
        OptionError
            Naming the option, what was expected and what came.
        """
        wanted = (phases,) if isinstance(phases, str) else tuple(phases)
        unknown = [phase for phase in wanted if phase not in PHASES]
        if unknown or not wanted:
            raise OptionError(f"phases: expected some of {', '.join(map(repr, PHASES))}, got {phases!r}", option="phases")
        return cls(
            every=_whole("every", every, least=1, error=OptionError),
            epochs=_restriction("epochs", epochs),
            batches=_restriction("batches", batches),
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

    def wants(self, epoch: int, batch: int) -> bool:
        """Say whether a batch is recorded, whatever its phase."""
        return batch % self.every == 0 and _allows(self.batches, batch) and _allows(self.epochs, epoch)


class Clock:
    """Says under which phase, epoch and batch a forward is filed.

    While `batches` or `at` sets a position, that position holds for every phase. Without one each phase counts for itself: each call of the root module
    in that phase is its next batch, in the epoch that was set last (0 at first).

    Parameters
    ----------
    schedule : Schedule
        What is recorded.
    phase : callable
        Gives the phase of the root module now.
    """

    def __init__(self, schedule: Schedule, phase: Callable[[], str]) -> None:
        self.step = 0
        self.epoch_batches: int | None = schedule.num_batches
        self.on_tick: Callable[[], None] = lambda: None
        self._schedule = schedule
        self._phase = phase
        self._epoch = 0
        self._counted: dict[str, int] = dict.fromkeys(PHASES, -1)
        self._position = _Position(None)

    @property
    def is_automatic(self) -> bool:
        """Whether the root module's calls move the clock."""
        return self._position.where is None

    @property
    def may_record(self) -> bool:
        """Whether this batch can be recorded; exact while a position is set, true while the clock is automatic."""
        where = self._position.where
        return where is None or self._schedule.wants(*where)

    def here(self) -> Coordinates | None:
        """Return where a forward that begins now is filed, or ``None`` if it is not recorded."""
        phase = self._phase()
        resolved = self._position.resolved
        try:
            return resolved[phase]
        except KeyError:
            resolved[phase] = coordinates = self._resolve(phase)
            return coordinates

    def _resolve(self, phase: str) -> Coordinates | None:
        where = self._position.where
        if where is None:
            epoch, batch = self._epoch, max(0, self._counted[phase])
        else:
            epoch, batch = where
            self._counted[phase] = max(self._counted[phase], batch)
        recorded = phase in self._schedule.phases and self._schedule.wants(epoch, batch)
        return Coordinates(phase, epoch, batch) if recorded else None

    def tick(self) -> None:
        """Go on to the next batch of the root module's phase; does nothing while a position is set."""
        if self._position.where is None:
            phase = self._phase()
            self._counted[phase] += 1
            self._position.resolved.pop(phase, None)

    def set(self, epoch: int, batch: int) -> None:
        """Set a position; setting the one that holds already is no new tick."""
        if self._position.where == (epoch, batch):
            return
        if epoch != self._epoch:
            self._epoch = epoch
            self._counted = dict.fromkeys(PHASES, -1)
        self._move(_Position((epoch, batch)))

    def _move(self, position: _Position) -> None:
        self._position = position
        self.on_tick()

    def at(self, epoch: SupportsIndex, batch: SupportsIndex) -> Placed:
        """Set the position by hand; see `Recorder.at`."""
        before = self._position
        self.set(_whole("epoch", epoch, error=ClockError), _whole("batch", batch, error=ClockError))
        return Placed(self, before)

    def batches(self, loader: Iterable[Item], epoch: SupportsIndex) -> Batches[Item]:
        """Return an iterable that moves the clock; see `Recorder.batches`."""
        return Batches(self, loader, _whole("epoch", epoch, error=ClockError))

    def iterate(self, loader: Iterable[Item], epoch: int) -> Iterator[Item]:
        """Yield the loader's items, each at its own batch, and put the clock back at the end."""
        before = self._position
        self.epoch_batches = _length(loader) or self._schedule.num_batches
        try:
            for batch, item in enumerate(loader):
                self.set(epoch, batch)
                yield item
        finally:
            self._move(before)


class _Position:
    """A place in training, with the coordinates it gave to each phase: who comes back to it goes on counting calls where they stood."""

    __slots__ = ("resolved", "where")

    def __init__(self, where: tuple[int, int] | None) -> None:
        self.where = where
        self.resolved: dict[str, Coordinates | None] = {}


class Placed:
    """What `Recorder.at` returns: as a context manager it puts the clock back on exit."""

    def __init__(self, clock: Clock, before: _Position) -> None:
        self._clock = clock
        self._before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exception: object) -> None:
        self._clock._move(self._before)


class Batches(Generic[Item]):
    """What `Recorder.batches` returns: the loader, moving the clock as it goes. It has a length when the loader has one."""

    def __init__(self, clock: Clock, loader: Iterable[Item], epoch: int) -> None:
        self._clock = clock
        self._loader = loader
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own TypeError

    def __iter__(self) -> Iterator[Item]:
        return self._clock.iterate(self._loader, self._epoch)


def _length(loader: object) -> int | None:
    """Return the loader's length, or ``None`` where it has none."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _whole(name: str, value: SupportsIndex, *, least: int = 0, error: type[OptionError]) -> int:
    """Return ``value`` as an int, or raise ``error`` if it is no whole number or less than ``least``."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = least - 1
    if isinstance(value, bool) or whole < least:
        raise error(f"{name}: expected a whole number of at least {least}, got {value!r} of type {type(value).__name__}", option=name)
    return whole


def _restriction(name: str, value: When | None) -> Container[int] | Callable[[int], bool] | None:
    if value is None or callable(value):
        return value
    if isinstance(value, range):
        return value
    if isinstance(value, str):  # type: ignore[unreachable]  # users pass anything
        raise OptionError(f"{name}: expected a whole number, an iterable of them, a range or a callable, got {value!r}", option=name)
    if isinstance(value, SupportsIndex):
        return frozenset([_whole(name, value, error=OptionError)])
    if not isinstance(value, Iterable):
        raise OptionError(f"{name}: expected a whole number, an iterable of them, a range or a callable, got {value!r}", option=name)
    return frozenset(_whole(name, item, error=OptionError) for item in value)


def _extent(restriction: Container[int] | Callable[[int], bool] | None) -> int | None:
    if isinstance(restriction, range | frozenset) and len(restriction):
        return max(restriction) + 1
    return None


def _allows(restriction: Container[int] | Callable[[int], bool] | None, value: int) -> bool:
    if restriction is None:
        return True
    if callable(restriction):
        return bool(restriction(value))
    return value in restriction
