"""Where training stands: the clock, and the coordinates that it files forwards under."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, SupportsIndex, TypeVar

from hookstore.agenda import Agenda, Due
from hookstore.errors import ClockError
from hookstore.format import PHASES
from hookstore.schedule import Budget, whole

Item = TypeVar("Item")
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
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
    due : Due or None
        What is recorded there.
    steps : dict
        For each layer and parameter, the number of optimizer steps taken there.
    """

    phase: str
    epoch: int
    batch: int
    due: Due | None = field(default=None, repr=False)
    calls: dict[str, itertools.count[int]] = field(default_factory=dict, repr=False)
    steps: dict[tuple[str, str], int] = field(default_factory=dict, repr=False)


class Clock:
    """Says under which phase, epoch and batch a forward is filed.

    While `batches` or `at` sets a position, that position holds for every phase. Without one each phase counts for itself: each call of the root module
    in that phase is its next batch, in the epoch that was set last (0 at first).

    Parameters
    ----------
    agenda : Agenda
        What is recorded.
    phase : callable
        Gives the phase of the root module now.
    budget : Budget or None
        Leaves out batches that the schedule asks for.
    """

    def __init__(self, agenda: Agenda, phase: Callable[[], str], budget: Budget | None = None) -> None:
        self.step = 0
        self.agenda = agenda
        self.epoch_batches: int | None = agenda.num_batches
        self.budget = budget
        self.on_tick: Callable[[], None] = lambda: None
        self.on_skip: Callable[[Coordinates], None] = lambda _: None
        self.on_end: Callable[[Coordinates], None] = lambda _: None
        self._phase = phase
        self._lock = threading.Lock()
        self._epoch = 0
        self._counted: dict[str, int] = dict.fromkeys(PHASES, -1)
        self._automatic = _Position(None, 0)
        self._paused = _Position((-1, -1), 0)
        self._paused.is_skipped = True
        self._paused.resolved = dict.fromkeys(PHASES)
        self._num_pauses = 0
        self._actual = self._automatic  # where training stands, …
        self._position = self._automatic  # … and that or, in a pause, nowhere
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
        position = self._position
        return position.where is None or (not position.is_skipped and self._wanted(position)[0])

    @property
    def layers_wanted(self) -> frozenset[str] | None:
        """Layers of which calls in this batch can be recorded; ``None`` for all, while the clock is automatic."""
        position = self._position
        if position.where is None:
            return None
        return _NONE if position.is_skipped else self._wanted(position)[1]

    def _wanted(self, position: _Position) -> tuple[bool, frozenset[str]]:
        """Say what can be recorded at a position that is set; it is worked out once, so that what is switched there holds from the next one on."""
        if position.wanted is None:
            assert position.where is not None
            position.wanted = self.agenda.wanted(*position.where, position.step)
        return position.wanted

    @property
    def is_due_next(self) -> bool:
        """Whether the next call of the root module may be recorded, in whatever phase it comes, while the clock is automatic."""
        agenda = self.agenda
        return any(agenda.wants(phase, self._epoch, self._counted[phase] + 1, None) for phase in agenda.phases)

    @property
    def under_way(self) -> list[Coordinates]:
        """Batches of which a layer has been called, and that stand where the clock does, or where a loop was left early."""
        return list(dict.fromkeys([*self._abandoned, *_called(self._actual)]))

    @property
    def automatic_batch(self) -> tuple[str, int] | None:
        """Phase and number of the batch under way, recorded or not, while the clock is automatic; ``None`` where a position is set, or in a pause."""
        if self._position.where is not None:
            return None
        phase = self._phase()
        return phase, max(0, self._counted[phase])

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
            epoch, batch, step = self._epoch, max(0, self._counted[phase]), self.step
        else:
            epoch, batch = where
            step = self._position.step
            self._counted[phase] = max(self._counted[phase], batch)
        if not self.agenda.wants(phase, epoch, batch, step):
            return None
        here = Coordinates(phase, epoch, batch, self.agenda.due(phase, epoch, batch, step))
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
        where = whole("epoch", epoch, error=ClockError), whole("batch", batch, error=ClockError)
        before = None
        if self._frames and self._frames[-1].is_bare:  # set by hand before, and not by a with statement: this takes its place
            before = self._frames.pop()
            before.before = None
        frame = _Frame(before)
        self._move(frame, *where)
        return Placed(self, frame)

    def batches(self, loader: Iterable[Item], epoch: SupportsIndex) -> Batches[Item]:
        """Return an iterable that moves the clock; see `Recorder.batches`."""
        return Batches(self, loader, whole("epoch", epoch, error=ClockError))

    def iterate(self, loader: Iterable[Item], epoch: int) -> Iterator[Item]:
        """Yield the loader's items, each at its own batch, and put the clock back at the end."""
        frame = _Frame(None)
        frame.is_bare = False
        frame.num_batches = _length(loader) or self.agenda.num_batches
        try:
            for batch, item in enumerate(loader):
                self._move(frame, epoch, batch)
                yield item
        except GeneratorExit:  # an exception in the loop's body ends the loop before anyone else hears of it
            self._abandoned = _called(frame.position)
            raise
        finally:
            self._leave(frame)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing meanwhile, and let calls of the root module not count; see `Recorder.paused`."""
        self._num_pauses += 1
        self._show_top()
        try:
            yield
        finally:
            self._num_pauses -= 1
            self._show_top()

    @contextlib.contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Take all that runs meanwhile for that phase; see `Recorder.phase`."""
        if phase not in PHASES:
            raise ClockError(f"phase: expected {' or '.join(map(repr, PHASES))}, got {phase!r}", option="phase")
        before, self._phase = self._phase, lambda: phase
        try:
            yield
        finally:
            self._phase = before

    def _move(self, frame: _Frame, epoch: int, batch: int) -> None:
        """Put a frame on top, at a position; the position that holds already is no new tick."""
        if frame in self._frames:
            self._frames.remove(frame)
        self._frames.append(frame)
        self._abandoned = []
        if self._actual.where == (epoch, batch):
            frame.position = self._actual
        else:
            self._end(frame.position)
            if frame.before is not None:
                self._end(frame.before.position)
            frame.position = _Position((epoch, batch), self.step)
            if epoch != self._epoch:
                self._epoch = epoch
                self._counted = dict.fromkeys(PHASES, -1)
            phase = self._phase()
            is_due = self._wanted(frame.position)[0] and self.agenda.wants(phase, epoch, batch, self.step)
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
        self._actual = self._automatic
        if self._frames:
            top = self._frames[-1]
            self._actual = top.position
            if top.num_batches is not None or not top.is_bare:
                self.epoch_batches = top.num_batches
        self._position = self._paused if self._num_pauses else self._actual
        if self.due is None and self._frames and not self._num_pauses and self.may_record and self._position.where is not None:
            phase = self._phase()
            if self.agenda.wants(phase, *self._position.where, self._position.step):
                where, step = self._position.where, self._position.step
                self.due = Coordinates(phase, *where, self.agenda.due(phase, *where, step))
        self.on_tick()


class _Position:
    """A place in training, with the coordinates it gave to each phase: who comes back to it goes on counting calls where they stood."""

    __slots__ = ("decided_for", "is_skipped", "resolved", "step", "wanted", "where")

    def __init__(self, where: tuple[int, int] | None, step: int) -> None:
        self.where = where
        self.step = step  # optimizer steps done when it was set
        self.is_skipped = False  # by the budget
        self.wanted: tuple[bool, frozenset[str]] | None = None  # whether anything is due there, and of which layers
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
        self.position = _Position(None, 0)
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
