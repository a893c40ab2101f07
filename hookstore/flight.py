"""What the writer does with a region before it is written: judge it, switch captures over, and, for the flight recorder, keep it in the ring.

Verdicts are made where the bytes are: nothing waits for them but the ring. A trigger *fires* in a batch in which its condition begins to hold for some tensor:
a model that has become NaN stays so, and must not fill the disk.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hookstore.agenda import Choice
from hookstore.clock import Coordinates
from hookstore.files import DiskBudgetSpent
from hookstore.format import SCALED_KINDS, ArraySpec
from hookstore.judges import Evidence, Judge, Onset, Panel, Verdict, judges_of, keys_of
from hookstore.layout import Draft
from hookstore.regions import NOTE_DTYPE, is_surely_finite, numbers_of_slot, region_statistics
from hookstore.ring import Ring
from hookstore.staging import Stager
from hookstore.statistics import divided
from hookstore.triggers import Trigger

if TYPE_CHECKING:
    from hookstore.writer import Prepared

_NOWHERE = Coordinates("train", 0, 0)  # before the first batch


@dataclass(frozen=True, slots=True)
class Event:
    """Something that fires without asking about tensors.

    Attributes
    ----------
    reason : str
        What happened.
    number : int
        Number of the newest batch then, -1 before the first.
    coordinates : Coordinates or None
        That batch.
    step : int
        Optimizer steps done by then.
    is_exception : bool
        Whether it is one, of which a batch has one firing.
    """

    reason: str
    number: int
    coordinates: Coordinates | None
    step: int
    is_exception: bool = False


@dataclass(slots=True)
class _Firing:
    """A firing whose row is not written yet: an earlier capture of the batch may still come, and is named then."""

    number: int
    coordinates: Coordinates
    step: int
    wall_time: int
    reason: str


class Flight:
    """Judges what comes to the writer, on its thread.

    Parameters
    ----------
    stager : Stager
        Where it comes from.
    last : int or None
        How many batches the ring keeps; ``None`` for no flight recorder.
    triggers : sequence of Trigger
        When it fires.
    write : callable
        Takes a region that is to be written.
    note : callable
        Takes a draft whose row is to be written.
    """

    def __init__(
        self,
        stager: Stager,
        *,
        last: int | None,
        triggers: Sequence[Trigger],
        write: Callable[[Prepared], None],
        note: Callable[[Draft], None],
    ) -> None:
        self._stager = stager
        self._last = last or 0
        self._write = write
        self._note = note
        self._tell = stager.messages.append
        self._judges = judges_of(tuple(triggers), self._tell)
        self._judges_of: dict[Choice, list[Judge]] = {}
        self._panels: dict[tuple[object, ...], Panel] = {}
        self._ring = None if last is None else Ring(last, self._pass_on, self._release)
        self._onsets = [Onset() for _ in self._judges]
        self._firings: dict[tuple[int, int], _Firing] = {}
        self._event_numbers = itertools.count(len(self._judges))
        self._raised_in = -2
        self._has_given_up = False
        self._is_spent = False

    def sees(self, region: Any) -> bool:
        """Say whether a region is to go through here."""
        return self._ring is not None or bool(region.array.watchers)

    def take(self, prepared: Prepared) -> None:
        """Judge the captures of a region; then write it, keep it or release it."""
        region, array = prepared.region, prepared.region.array
        assert region.coordinates is not None
        panel = self._panel_for(array.spec.layer, array.spec.kind, array.watchers)
        if self._may_hold(panel, prepared):
            self._judge(panel, self._evidence_of(prepared), region.number, region.coordinates)
        else:
            self._note_that_none_holds(panel, prepared)
        if self._ring is None:
            self._write(prepared)
            return
        self._stager.hold(region)
        self._ring.add(region.number, region.coordinates, prepared, region.num_bytes)
        self.report(before=self._ring.newest)

    def take_draft(self, draft: Draft) -> None:
        """Do the same with what has no bytes."""
        where = draft.coordinates
        number = -1 if self._ring is None else self._stager.number_of(where)
        self.judge_draft(draft, number)
        if self._ring is None or draft.status == "stopped":
            self._note(draft)
            return
        self._ring.add(self._ring.newest if number < 0 else number, where, draft)
        self.report(before=self._ring.newest)

    def judge_draft(self, draft: Draft, number: int = -1) -> None:
        """Judge a capture whose statistics come with it, if they do; without a ring its batch needs no number."""
        if draft.statistics is not None:
            panel = self._panel_for(draft.layer, draft.kind, draft.take.watchers)
            self._judge(panel, _evidence_of_draft(draft), number, draft.coordinates)

    def take_event(self, event: Event) -> None:
        """Fire."""
        if event.is_exception and event.number == self._raised_in:
            return
        if event.is_exception:
            self._raised_in = event.number
        now = time.time_ns() // 1000
        firing = _Firing(event.number, event.coordinates or _NOWHERE, event.step, now, event.reason)
        self._fire(next(self._event_numbers), firing)

    def make_room(self) -> None:
        """Give up the oldest batch of the ring if someone waits for room; to be called when nothing else is about to make some."""
        if self._ring is None or not self._stager.wants_room or not self._stager.queue.empty():
            return
        sizes = [num_bytes for num_bytes in self._ring.batch_bytes if num_bytes]
        if self._ring.give_up():
            self._stager.wants_room = False
            if not self._has_given_up and len(sizes) <= self._last:  # the ring keeps one more than is written
                self._has_given_up = True
                arena_bytes = self._stager.arena_bytes
                self._tell(
                    f"the staging buffer of {arena_bytes:,} bytes holds {len(sizes) - 1} whole batches of the {self._last} that last= asks for: the oldest "
                    f"are given up; all need a buffer_bytes of {max(max(sizes) * (self._last + 2), arena_bytes + max(sizes)):,} or more"
                )

    def report(self, *, before: int | None = None) -> None:
        """Write the rows of what has fired, in batches before one, or in all."""
        if not self._firings:
            return
        for key in [key for key in self._firings if before is None or key[1] < before]:
            firing = self._firings.pop(key)
            where = firing.coordinates
            self._note(row_of_batch(where, firing.step, firing.wall_time, "fired", firing.reason))
            self._tell(f"the flight recorder fired in {where.phase} epoch {where.epoch}, batch {where.batch}: {firing.reason}")

    def close(self) -> None:
        """Release the ring."""
        self.report()
        if self._ring is not None:
            self._ring.close()

    # Judging --------------------------------------------------------------------------------------------------------

    def _panel_for(self, layer: str, kind: str, watchers: tuple[Choice, ...]) -> Panel:
        """Return who judges captures of a kind of a layer."""
        key = (layer, kind, watchers)
        panel = self._panels.get(key)
        if panel is None:
            for choice in watchers:
                if choice not in self._judges_of:
                    self._judges_of[choice] = judges_of(choice.capture.when, self._tell)
            panel = self._panels[key] = Panel.of(self._judges, {choice: self._judges_of[choice] for choice in watchers}, layer, kind)
        return panel

    def _may_hold(self, panel: Panel, prepared: Prepared) -> bool:
        """Say whether a region must be judged; then it has statistics. Most regions of a run have nothing in them but finite numbers."""
        if panel.is_empty:
            return False
        region, slots, notes, memory = prepared.region, prepared.slots, prepared.notes, self._stager.memory
        if panel.asks_only_non_finite and is_surely_finite(region, slots, notes, memory):
            return False
        prepared.statistics = region_statistics(region, slots, notes, memory)
        return True

    def _evidence_of(self, prepared: Prepared) -> Evidence:
        region, notes = prepared.region, prepared.notes
        spec = region.array.spec
        assert prepared.statistics is not None
        statistics = divided(prepared.statistics, notes["scale"]) if spec.kind in SCALED_KINDS else prepared.statistics

        def numbers_of(position: int) -> np.ndarray[Any, Any] | None:
            return numbers_of_slot(region, int(prepared.slots[position]), notes[position], self._stager.memory)

        return Evidence(*_key_of(spec), statistics, notes, numbers_of)

    def _judge(self, panel: Panel, evidence: Evidence, number: int, where: Coordinates) -> None:
        for choice, judges in panel.conditions:
            verdicts = [judge.judge(evidence) for judge in judges]  # each: a running median must see everything
            if any(verdicts):
                choice.is_called_for = True
        keys = keys_of(evidence.key, evidence.notes) if panel.triggers else []
        for trigger, judge in panel.triggers:
            onset = self._onsets[trigger]
            found = {verdict.position: verdict for verdict in judge.judge(evidence)}
            if not found and onset.is_idle:
                continue
            for position, key in enumerate(keys):
                verdict = found.get(position)
                if onset.is_news(key, number, holds=verdict is not None) and verdict is not None:
                    self._begin(trigger, verdict, evidence, number, where)

    def _note_that_none_holds(self, panel: Panel, prepared: Prepared) -> None:
        region = prepared.region
        for onset in [self._onsets[trigger] for trigger, _ in panel.triggers if not self._onsets[trigger].is_idle]:
            for key in keys_of(_key_of(region.array.spec), prepared.notes):
                onset.is_news(key, region.number, holds=False)

    def _begin(self, trigger: int, verdict: Verdict, evidence: Evidence, number: int, where: Coordinates) -> None:
        """Fire where a condition begins to hold. Of what begins in the same batch, the row of the manifest tells of the first in time."""
        note = evidence.notes[verdict.position]
        wall_time = int(note["wall_time"])
        earlier = self._firings.get((trigger, number))
        fires = self._onsets[trigger].fires(number)
        if not fires and (earlier is None or wall_time >= earlier.wall_time):
            return
        firing = _Firing(number, where, int(note["step"]), wall_time, verdict.reason())
        if fires:
            self._fire(trigger, firing)
        else:
            self._firings[trigger, number] = firing

    def _fire(self, trigger: int, firing: _Firing) -> None:
        if self._ring is None or self._is_spent:
            return
        self._firings[trigger, firing.number] = firing
        now = time.time_ns() // 1000
        for gap in self._ring.fire(firing.number):
            self._note(row_of_batch(gap.coordinates, firing.step, now, "dropped", gap.reason))

    # What the ring gives back -----------------------------------------------------------------------------------------

    def _pass_on(self, item: Prepared | Draft) -> None:
        """Write an item that belongs to what fired."""
        try:
            if self._is_spent:
                raise DiskBudgetSpent
            if isinstance(item, Draft):
                self._stager.set_aside(None, item.take.text)
            else:
                self._stager.set_aside(item.region)
        except DiskBudgetSpent as error:
            if not self._is_spent:
                self._is_spent = True
                self._stop(item.coordinates if isinstance(item, Draft) else item.region.coordinates or _NOWHERE, str(error))
            self._release(item)
            return
        if isinstance(item, Draft):
            self._note(item)
        else:
            if not item.region.array.stats:
                item.statistics = None  # judged by, and not asked for
            self._stager.unhold(item.region)
            self._write(item)

    def _stop(self, where: Coordinates, reason: str) -> None:
        """Say that no more is written, because there is no more room on the disk."""
        self._note(row_of_batch(where, 0, time.time_ns() // 1000, "stopped", reason))
        self._stager.is_spent = True
        self._tell(f"recording stopped in epoch {where.epoch}, batch {where.batch}: {reason}; training goes on without")

    def _release(self, item: Prepared | Draft) -> None:
        if not isinstance(item, Draft):
            self._stager.release(item.region)


def _evidence_of_draft(draft: Draft) -> Evidence:
    where = draft.coordinates
    notes = np.zeros(1, NOTE_DTYPE)
    notes["epoch"], notes["batch"], notes["call"], notes["step"] = where.epoch, where.batch, draft.call, draft.step
    notes["wall_time"], notes["backward"], notes["scale"] = draft.wall_time_us, draft.backward, float(draft.scale)
    assert draft.statistics is not None
    statistics = divided(draft.statistics, np.float64(draft.scale))
    return Evidence(where.phase, draft.layer, draft.kind, draft.leaf, draft.take.text, statistics, notes, lambda _: None)


def _key_of(spec: ArraySpec) -> tuple[str, str, str, str, str]:
    return spec.phase, spec.layer, spec.kind, spec.leaf, spec.portion


def row_of_batch(where: Coordinates, step: int, wall_time: int, status: str, reason: str) -> Draft:
    """Make what stands for a whole batch in the manifest."""
    return Draft("", "", "", "", where, 0, 0, step, (), wall_time, status=status, reason=reason)
