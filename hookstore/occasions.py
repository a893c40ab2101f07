"""How many batches of a training are due, and over how many shards these are spread.

Ranges are counted as ranges. Batches are listed only where a callable decides, or where cadences are put together of which none contains the others, and only
so many of them: beyond that the count is an estimate, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hookstore.schedule import Restriction, Schedule, allows

_MOST_LISTED = 1 << 23
_MOST_ASKED = 1 << 18  # calls of a user's function

Positions = range | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Training:
    """How long a training is.

    Attributes
    ----------
    num_epochs : int
        Epochs.
    num_batches : dict
        Batches of an epoch, for each phase that there is.
    """

    num_epochs: int
    num_batches: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Occasions:
    """How often something is due in a training.

    Attributes
    ----------
    num_due : int
        Batches.
    num_shards : int
        Stretches of so many epochs and batches that hold one of them.
    is_estimated : bool
        Whether the two are scaled up from the first part of the training.
    """

    num_due: int
    num_shards: int
    is_estimated: bool


def count(schedules: Sequence[Schedule], phase: str, training: Training, shard: tuple[int, int] = (1, 1)) -> Occasions:
    """Count the batches in which any of some schedules is due, with one optimizer step to each batch of the phase ``train``.

    Parameters
    ----------
    schedules : sequence of Schedule
        When something is due.
    phase : str
        Which batches are counted.
    training : Training
        How many there are. Evaluation follows the training of its epoch.
    shard : tuple of int
        Epochs and batches of one shard.
    """
    num_batches = training.num_batches.get(phase, 0)
    different = {(one.every, one.epochs, one.batches, one.steps): one for one in schedules if phase in one.phases}
    if not different or not num_batches or not training.num_epochs:
        return Occasions(0, 0, is_estimated=False)
    return _Counting(list(different.values()), phase, training, num_batches, shard).count()


@dataclass(slots=True)
class _Counting:
    """One count.

    Attributes
    ----------
    factor : float
        By how much what was counted is to be multiplied.
    num_listed : int
        Batches gone through one by one so far.
    """

    schedules: list[Schedule]
    phase: str
    training: Training
    num_batches: int
    shard: tuple[int, int]
    factor: float = 1.0
    num_listed: int = 0
    _batches: dict[int, Positions] = field(default_factory=dict)
    _unions: dict[tuple[int, ...], Positions] = field(default_factory=dict)

    def count(self) -> Occasions:
        num_epochs = min(self.training.num_epochs, _MOST_ASKED)
        epochs_factor = self.training.num_epochs / num_epochs
        allowed = np.stack([_mask(one.epochs, num_epochs) for one in self.schedules])
        due, shards = self._count_each(allowed) if any(one.steps is not None for one in self.schedules) else self._count_alike(allowed)
        factor = self.factor * epochs_factor
        return Occasions(round(due * factor), round(shards * factor), is_estimated=factor != 1)

    def _count_alike(self, allowed: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Count where the batches of a schedule are the same in each of its epochs."""
        num_due = num_shards = 0
        for pattern, times in _patterns(allowed):
            num_due += times * len(self._of_all(tuple(pattern)))
        starts = np.arange(0, allowed.shape[1], self.shard[0])
        for pattern, times in _patterns(np.logical_or.reduceat(allowed, starts, axis=1)):
            num_shards += times * _num_stretches(self._of_all(tuple(pattern)), self.shard[1])
        return num_due, num_shards

    def _count_each(self, allowed: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """Count epoch by epoch, since steps go on through all of them."""
        num_epochs, length = allowed.shape[1], self.shard[0]
        num_due = num_shards = 0
        for start in range(0, num_epochs, length):
            found = []
            for epoch in range(start, min(start + length, num_epochs)):
                active = np.flatnonzero(allowed[:, epoch]).tolist()
                found.append(self._together([self._of_epoch(number, epoch) for number in active]))
                num_due += len(found[-1])
            num_shards += _num_stretches(self._together(found), self.shard[1])
            if self.num_listed > _MOST_ASKED and start + length < num_epochs:
                self.factor *= num_epochs / (start + length)
                break
        return num_due, num_shards

    def _of_all(self, numbers: tuple[int, ...]) -> Positions:
        """Return the batches in which any of some schedules is due, whatever the steps."""
        if numbers not in self._unions:
            self._unions[numbers] = self._together([self._batches_of(number) for number in numbers])
        return self._unions[numbers]

    def _batches_of(self, number: int) -> Positions:
        """Return the batches of one schedule in each of its epochs, whatever the steps."""
        if number not in self._batches:
            schedule = self.schedules[number]
            self._batches[number] = self._restrict(range(0, self.num_batches, schedule.every), schedule.batches)
        return self._batches[number]

    def _of_epoch(self, number: int, epoch: int) -> Positions:
        """Return the batches of one schedule in an epoch."""
        batches, steps = self._batches_of(number), self.schedules[number].steps
        per_epoch = self.training.num_batches.get("train", 0)
        if steps is None:
            return batches
        if self.phase != "train":
            return batches if allows(steps, (epoch + 1) * per_epoch) else range(0)
        first = epoch * per_epoch
        if isinstance(steps, range):
            return self._restrict(batches, range(steps.start - first, steps.stop - first, steps.step))
        if isinstance(steps, frozenset):
            return self._restrict(batches, frozenset(step - first for step in steps))
        return self._restrict(batches, lambda batch: allows(steps, first + batch))

    def _restrict(self, positions: Positions, restriction: Restriction) -> Positions:
        """Return the positions that a restriction allows."""
        if restriction is None:
            return positions
        if isinstance(restriction, range):
            if isinstance(positions, range):
                return intersect(positions, restriction)
            ascending = restriction if restriction.step > 0 else restriction[::-1]
            is_inside = (positions >= ascending.start) & (positions < ascending.stop)
            found: Positions = positions[is_inside & ((positions - ascending.start) % ascending.step == 0)]
            return found
        if isinstance(restriction, frozenset):
            return np.array(sorted(each for each in restriction if each in positions), dtype=np.int64)
        asked = positions[:_MOST_ASKED]
        self.num_listed += len(asked)
        self.factor = max(self.factor, len(positions) / max(1, len(asked)))
        return np.array([each for each in map(int, asked) if allows(restriction, each)], dtype=np.int64)

    def _together(self, several: Sequence[Positions]) -> Positions:
        """Return the positions that are among any of these."""
        kept = _largest(several)
        if len(kept) < 2:
            return kept[0] if kept else range(0)
        num_listed = sum(map(len, kept))
        self.num_listed += min(num_listed, _MOST_LISTED) // 4  # NumPy's share of the time that asking takes
        if num_listed > _MOST_LISTED:
            end = max(1, self.num_batches * _MOST_LISTED // num_listed)
            self.factor = max(self.factor, self.num_batches / end)
            kept = [intersect(each, range(end)) if isinstance(each, range) else each[each < end] for each in kept]
        listed = np.sort(
            np.concatenate([_listed(each) for each in kept]), kind="stable"
        )  # in runs already; np.unique takes tens of times as long
        different: Positions = listed[np.concatenate([[True], listed[1:] != listed[:-1]])]
        return different


def intersect(positions: range, other: range) -> range:
    """Return what two ranges have in common; the first one ascends from 0 or above."""
    if other.step < 0:
        other = other[::-1]
    if not positions or not other:
        return range(0)
    divisor = math.gcd(positions.step, other.step)
    apart = positions.start - other.start
    if apart % divisor:
        return range(0)
    modulus = positions.step // divisor
    turns = apart // divisor * pow(other.step // divisor, -1, modulus) % modulus
    step = other.step * modulus
    start = other.start + turns * other.step
    first = max(positions.start, other.start)
    start += -((start - first) // step) * step if start < first else 0
    return range(start, max(start, min(positions.stop, other.stop)), step)


def _largest(several: Sequence[Positions]) -> list[Positions]:
    """Leave out what is empty, and ranges that others contain."""
    ranges = sorted(dict.fromkeys(each for each in several if isinstance(each, range) and each), key=len, reverse=True)
    kept: list[Any] = []
    for each in ranges:
        if not any(each[0] in other and each[-1] in other and each.step % other.step == 0 for other in kept):
            kept.append(each)
    return [*kept, *(each for each in several if not isinstance(each, range) and len(each))]


def _listed(positions: Positions) -> npt.NDArray[np.int64]:
    """Return positions as an array (NumPy would go through a range one by one)."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return positions


def _num_stretches(positions: Positions, length: int) -> int:
    """Return how many stretches of so many batches hold one of the positions."""
    if not len(positions):
        return 0
    if isinstance(positions, range):
        return len(positions) if positions.step > length else positions[-1] // length - positions[0] // length + 1
    stretches = positions // length
    return 1 + int(np.count_nonzero(stretches[1:] != stretches[:-1]))


def _mask(restriction: Restriction, size: int) -> npt.NDArray[np.bool_]:
    """Say of each of the first epochs whether a restriction allows it."""
    if restriction is None:
        return np.ones(size, dtype=bool)
    return np.fromiter((allows(restriction, epoch) for epoch in range(size)), dtype=bool, count=size)


def _patterns(allowed: npt.NDArray[np.bool_]) -> list[tuple[list[int], int]]:
    """Return each set of schedules that meet in an epoch, and in how many they do."""
    found, times = np.unique(allowed, axis=1, return_counts=True)
    return [(np.flatnonzero(column).tolist(), int(number)) for column, number in zip(found.T, times, strict=True)]
