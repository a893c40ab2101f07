"""When a run records: the schedule, and the clock that says where training stands."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, SupportsIndex, TypeVar

from hookstore.errors import ClockError, OptionError
from hookstore.format import LARGEST_COORDINATE, PHASES

Item = TypeVar("Item")
When = int | Iterable[int] | Callable[[int], bool]
_LONGEST_CREDIT_S = 10.0


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
        For each layer, the number that its next call there gets.
    steps : dict
        For each layer and parameter, the number of optimizer steps taken there.
    """

    phase: str
    epoch: int
    batch: int
    calls: dict[str, itertools.count[int]] = field(default_factory=dict, repr=False)
    steps: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)


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
    budget : Budget or None
        Leaves out batches that the schedule asks for.
    """

    def __init__(self, schedule: Schedule, phase: Callable[[], str], budget: Budget | None = None) -> None:
        self.step = 0
        self.epoch_batches: int | None = schedule.num_batches
        self.budget = budget
        self.on_tick: Callable[[], None] = lambda: None
        self.on_skip: Callable[[Coordinates], None] = lambda _: None
        self.on_end: Callable[[Coordinates], None] = lambda _: None
        self._schedule = schedule
        self._phase = phase
        self._lock = threading.Lock()
        self._epoch = 0
        self._counted: dict[str, int] = dict.fromkeys(PHASES, -1)
        self._automatic = _Position(None)
        self._position = self._automatic
        self._frames: list[_Frame] = []
        self._abandoned: list[Coordinates] = []
        self.due: Coordinates | None = None  # the first batch that was to be recorded

    @property
    def is_automatic(self) -> bool:
        """Whether the root module's calls move the clock."""
        return self._position.where is None

    @property
    def may_record(self) -> bool:
        """Whether this batch can be recorded; exact while a position is set, true while the clock is automatic."""
        where = self._position.where
        return where is None or (not self._position.is_skipped and self._schedule.wants(*where))

    @property
    def is_due_next(self) -> bool:
        """Whether the next call of the root module may be recorded, in whatever phase it comes, while the clock is automatic."""
        schedule = self._schedule
        return any(schedule.wants(self._epoch, self._counted[phase] + 1) for phase in schedule.phases)

    @property
    def under_way(self) -> list[Coordinates]:
        """Batches of which a layer has been called, and that stand where the clock does, or where a loop was left early."""
        return list(dict.fromkeys([*self._abandoned, *_called(self._position)]))

    def here(self) -> Coordinates | None:
        """Return where a forward that begins now is filed, or ``None`` if it is not recorded."""
        phase = self._phase()
        resolved = self._position.resolved
        try:
            return resolved[phase]
        except KeyError:
            return resolved.setdefault(phase, self._resolve(phase))  # one object, whichever thread comes first

    def _resolve(self, phase: str) -> Coordinates | None:
        where = self._position.where
        if where is None:
            epoch, batch = self._epoch, max(0, self._counted[phase])
        else:
            epoch, batch = where
            self._counted[phase] = max(self._counted[phase], batch)
        if phase not in self._schedule.phases or not self._schedule.wants(epoch, batch):
            return None
        here = Coordinates(phase, epoch, batch)
        return here if where is None or self._is_allowed(here) else None

    def _is_allowed(self, here: Coordinates) -> bool:
        """Say whether the budget lets a forward at the position that is set be recorded; it is asked once for a position."""
        position = self._position
        with self._lock:
            if position.decided_for is None:  # it began in a phase that is not recorded
                position.decided_for = here.phase
                position.is_skipped = not self._allows(here)
            elif position.is_skipped and position.decided_for != here.phase:
                self.on_skip(here)
        return not position.is_skipped

    def tick(self) -> None:
        """Go on to the next batch of the root module's phase; does nothing while a position is set."""
        if self._position.where is None:
            phase = self._phase()
            self._counted[phase] += 1
            self._abandoned = []
            if self._counted[phase] > 0:  # what is called before the first call of the root module is of batch 0 as well
                self._end(self._position, phase)
            here = self.here()
            self.due = self.due or here
            if not self._allows(here):
                self._position.resolved[phase] = None

    def at(self, epoch: SupportsIndex, batch: SupportsIndex) -> Placed:
        """Set the position by hand; see `Recorder.at`."""
        where = _whole("epoch", epoch, error=ClockError), _whole("batch", batch, error=ClockError)
        before = None
        if self._frames and self._frames[-1].is_bare:  # set by hand before, and not by a with statement: this takes its place
            before = self._frames.pop()
            before.before = None
        frame = _Frame(before)
        self._move(frame, *where)
        return Placed(self, frame)

    def batches(self, loader: Iterable[Item], epoch: SupportsIndex) -> Batches[Item]:
        """Return an iterable that moves the clock; see `Recorder.batches`."""
        return Batches(self, loader, _whole("epoch", epoch, error=ClockError))

    def iterate(self, loader: Iterable[Item], epoch: int) -> Iterator[Item]:
        """Yield the loader's items, each at its own batch, and put the clock back at the end."""
        frame = _Frame(None)
        frame.is_bare = False
        frame.num_batches = _length(loader) or self._schedule.num_batches
        try:
            for batch, item in enumerate(loader):
                self._move(frame, epoch, batch)
                yield item
        except GeneratorExit:  # an exception in the loop's body ends the loop before anyone else hears of it
            self._abandoned = _called(frame.position)
            raise
        finally:
            self._leave(frame)

    def _move(self, frame: _Frame, epoch: int, batch: int) -> None:
        """Put a frame on top, at a position; the position that holds already is no new tick."""
        if frame in self._frames:
            self._frames.remove(frame)
        self._frames.append(frame)
        self._abandoned = []
        if self._position.where == (epoch, batch):
            frame.position = self._position
        else:
            self._end(frame.position)
            if frame.before is not None:
                self._end(frame.before.position)
            frame.position = _Position((epoch, batch))
            if epoch != self._epoch:
                self._epoch = epoch
                self._counted = dict.fromkeys(PHASES, -1)
            phase = self._phase()
            is_due = phase in self._schedule.phases and self._schedule.wants(epoch, batch)
            frame.position.decided_for = phase if is_due else None
            frame.position.is_skipped = not self._allows(Coordinates(phase, epoch, batch) if is_due else None)
        self._show_top()

    def _allows(self, coordinates: Coordinates | None) -> bool:
        """Let the budget decide about a batch that begins and, where there are coordinates, is to be recorded; note one that is left out."""
        if self.budget is None or self.budget.begin_batch(wanted=coordinates is not None) or coordinates is None:
            return True
        self.on_skip(coordinates)
        return False

    def end_all(self) -> None:
        """End every batch that is open, because recording ends."""
        for position in [*(frame.position for frame in self._frames), self._automatic]:
            self._end(position)

    def _end(self, position: _Position, phase: str | None = None) -> None:
        """Tell that a batch ends: that of one phase there, which is forgotten then, or of all."""
        ended = list(position.resolved.values()) if phase is None else [position.resolved.pop(phase, None)]
        for here in ended:
            if here is not None:
                self.on_end(here)

    def _leave(self, frame: _Frame, *, is_whole: bool = True) -> None:
        """Take a frame away, wherever it stands: loops may end in any order; an exception may have cut its batch short."""
        if frame in self._frames:
            if is_whole:
                self._end(frame.position)
            self._frames.remove(frame)
            # Layers that are called before the root module is are still of the last batch, and go on counting there.
            self._automatic.resolved.update((phase, here) for phase, here in frame.position.resolved.items() if here is not None)
            if frame.before is not None:
                self._frames.append(frame.before)
            self._show_top()

    def _show_top(self) -> None:
        self._position = self._automatic
        if self._frames:
            top = self._frames[-1]
            self._position = top.position
            if top.num_batches is not None or not top.is_bare:
                self.epoch_batches = top.num_batches
            phase = self._phase()
            if self.due is None and self.may_record and phase in self._schedule.phases and self._position.where is not None:
                self.due = Coordinates(phase, *self._position.where)
        self.on_tick()


class _Position:
    """A place in training, with the coordinates it gave to each phase: who comes back to it goes on counting calls where they stood."""

    __slots__ = ("decided_for", "is_skipped", "resolved", "where")

    def __init__(self, where: tuple[int, int] | None) -> None:
        self.where = where
        self.is_skipped = False  # by the budget
        self.decided_for: str | None = None  # the phase in which the budget was asked
        self.resolved: dict[str, Coordinates | None] = {}


def _called(position: _Position) -> list[Coordinates]:
    """Return the coordinates at a position under which a layer has been called."""
    return [here for here in list(position.resolved.values()) if here is not None and (here.calls or here.steps)]


class _Frame:
    """One loop, or one position set by hand, that sets the clock.

    Attributes
    ----------
    position : _Position
        Where it has the clock.
    before : _Frame or None
        What comes back when it ends.
    is_bare : bool
        Whether it was set by hand and belongs to no ``with`` statement.
    num_batches : int or None
        Length of the loop, where known.
    """

    __slots__ = ("before", "is_bare", "num_batches", "position")

    def __init__(self, before: _Frame | None) -> None:
        self.position = _Position(None)
        self.before = before
        self.is_bare = True
        self.num_batches: int | None = None


class Placed:
    """What `Recorder.at` returns: as a context manager it puts the clock back on exit."""

    def __init__(self, clock: Clock, frame: _Frame) -> None:
        self._clock = clock
        self._frame = frame

    def __enter__(self) -> None:
        self._frame.is_bare = False

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is not None:
            self._clock._abandoned = _called(self._frame.position)
        self._clock._leave(self._frame, is_whole=kind is None)


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
    """Return the loader's length, or ``None`` where it has none; what a plain loop over it would not meet must not be met here."""
    counts_for_warnings = getattr(loader, "_IterableDataset_len_called", None)  # torch's DataLoader warns later where it has been asked
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:
        return None
    finally:
        if hasattr(loader, "_IterableDataset_len_called"):
            loader._IterableDataset_len_called = counts_for_warnings


def _whole(name: str, value: SupportsIndex, *, least: int = 0, error: type[OptionError]) -> int:
    """Return ``value`` as an int, or raise ``error`` if it is no whole number, or out of bounds."""
    try:
        whole = operator.index(value)
    except TypeError:
        whole = least - 1
    if isinstance(value, bool) or not least <= whole <= LARGEST_COORDINATE:
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
