"""The flight recorder's ring: the last batches, kept until a trigger fires or they are too old.

The writer's thread alone uses it. Batches have numbers in the order in time in which they were first recorded, whatever epoch and batch they are filed under.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hookstore.clock import Coordinates

_MOST_WINDOWS = 64
_MOST_LATE = 100  # batches by which a verdict may come too late, and still say what has left: a backward that comes long after its forward


class Gap(NamedTuple):
    """A batch that is not whole although it belongs to what is written, and why."""

    coordinates: Coordinates
    reason: str


class _Batch:
    """What is kept of one batch."""

    __slots__ = ("coordinates", "items", "num_bytes", "num_given_up")

    def __init__(self, coordinates: Coordinates) -> None:
        self.coordinates = coordinates
        self.items: list[tuple[Any, int]] = []
        self.num_bytes = 0
        self.num_given_up = 0


class Ring:
    """Keeps what comes until it is known whether it is to be written.

    When a trigger fires in batch ``t``, batches ``t - last + 1`` to ``t + last`` are written: what is there of them at once, what comes as it comes. One
    batch more is kept than that needs, since a backward may come after the next forward.

    Parameters
    ----------
    last : int
        How many batches.
    write, release : callable
        Take an item that is to be written, and one that is not.
    """

    def __init__(self, last: int, write: Callable[[Any], None], release: Callable[[Any], None]) -> None:
        self.newest = -1
        self._last = last
        self._write = write
        self._release = release
        self._batches: dict[int, _Batch] = {}
        self._left: dict[int, Coordinates] = {}  # batches that were too old, and may yet be missed
        self._windows: list[tuple[int, int]] = []  # first and last batch of what is written, apart from each other, in their order

    def add(self, number: int, coordinates: Coordinates, item: Any, num_bytes: int = 0) -> None:
        """Take an item of a batch: write it, keep it, or release it."""
        if number > self.newest:
            self.newest = number
            self._let_old_ones_go()
        if any(first <= number <= end for first, end in self._windows):
            self._write(item)
        elif number < self.newest - self._last:
            self._release(item)
        else:
            batch = self._batches.get(number)
            if batch is None:
                batch = self._batches[number] = _Batch(coordinates)
            batch.items.append((item, num_bytes))
            batch.num_bytes += num_bytes

    def fire(self, number: int) -> list[Gap]:
        """Write what belongs to a trigger that fired in a batch, and return what is missing of it."""
        first, end = number - self._last + 1, number + self._last
        self._open_window(first, end)
        too_late = [missing for missing in sorted(self._left) if first <= missing <= end]
        gaps = [
            Gap(self._left.pop(missing), "the trigger fired after the batch had left the flight recorder's ring") for missing in too_late
        ]
        for held in sorted(self._batches):
            if first <= held <= end:
                batch = self._batches.pop(held)
                if batch.num_given_up:
                    gaps.append(Gap(batch.coordinates, f"{batch.num_given_up} of its pieces were given up: the staging buffer was full"))
                for item, _ in batch.items:
                    self._write(item)
        return gaps

    def give_up(self) -> bool:
        """Release what the oldest batch has of bytes, for new ones to have room; say whether any batch had."""
        for number in sorted(self._batches):
            batch = self._batches[number]
            given_up = [item for item, num_bytes in batch.items if num_bytes]
            if given_up:
                batch.items = [(item, num_bytes) for item, num_bytes in batch.items if not num_bytes]
                batch.num_given_up += len(given_up)
                batch.num_bytes = 0
                for item in given_up:
                    self._release(item)
                return True
        return False

    @property
    def batch_bytes(self) -> list[int]:
        """Bytes of the batches that are kept, the oldest first."""
        return [self._batches[number].num_bytes for number in sorted(self._batches)]

    def close(self) -> None:
        """Release everything."""
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            for item, _ in batch.items:
                self._release(item)

    def _let_old_ones_go(self) -> None:
        for number in [number for number in self._batches if number < self.newest - self._last]:
            batch = self._batches.pop(number)
            self._left[number] = batch.coordinates
            for item, _ in batch.items:
                self._release(item)
        for number in [number for number in self._left if number < self.newest - 3 * self._last - _MOST_LATE]:
            del self._left[number]

    def _open_window(self, first: int, end: int) -> None:
        """Add a window; those that touch become one, and the oldest of very many are forgotten."""
        apart = []
        for window in self._windows:
            if window[1] < first - 1 or window[0] > end + 1:
                apart.append(window)
            else:
                first, end = min(first, window[0]), max(end, window[1])
        self._windows = sorted([*apart, (first, end)])[-_MOST_WINDOWS:]
