"""Which samples were part of which batches, as the annotations say."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookstore.errors import CaptureWarning, CorruptRunError, MissingCaptureError, OptionError

if TYPE_CHECKING:
    from hookstore.captures import Captures
    from hookstore.run import Run

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Where a sample was part of a batch.

    Attributes
    ----------
    phase : str
        Phase of the batch.
    epoch, batch : int
        Its coordinates.
    index : int
        Position of the sample in the batch.
    attempt : int
        Recording of the run.
    """

    phase: str
    epoch: int
    batch: int
    index: int
    attempt: int


class _Batch(NamedTuple):
    """An annotated batch."""

    phase: str
    epoch: int
    batch: int
    attempt: int
    num_samples: int


class SampleIndex:
    """Finds samples by the values of one annotation.

    Parameters
    ----------
    run : Run
        The run.
    by : str
        Name of the annotation.
    attempt : int or None
        Only what this recording has; by default, for each batch, the latest that has the annotation.

    Raises
    ------
    MissingCaptureError
        If the run has no annotation of that name.
    OptionError
        If it has not one value for each sample.
    """

    def __init__(self, run: Run, by: str, attempt: int | None) -> None:
        known = run.annotations
        if by not in known:
            there_is = f"there are {', '.join(map(repr, known))}" if known else "recorder.annotate() stores them"
            raise MissingCaptureError(f"{run.path}: the batches have no annotation {by!r}; {there_is}", kind="annotation")
        found = dict(sorted(self._read(run, known[by], by, attempt)))
        self.batches = [_Batch(*place, len(values)) for place, values in found.items()]
        self._starts = np.cumsum([0, *(batch.num_samples for batch in self.batches)])
        self.by = by
        self._sorted: Array | None = None
        self._by_value: dict[Any, list[int]] = {}
        values = list(found.values())
        numbers = _numbers(values)
        if numbers is not None:
            self._order = np.argsort(numbers, kind="stable")
            self._sorted = numbers[self._order]
        else:
            for position, value in enumerate(one for array in values for one in array.tolist()):
                self._by_value.setdefault(value, []).append(position)

    @staticmethod
    def _read(run: Run, captures: Captures, by: str, attempt: int | None) -> Iterator[tuple[tuple[str, int, int, int], Array]]:
        """Yield the values of each batch, with phase, epoch, batch and attempt."""
        index = captures._all
        for phase in index.phases:
            for leaf in (by, f"{by}.offsets"):
                for position in index.last_captured(phase, leaf, attempt).tolist():
                    place = index.place(position)
                    where = place["epoch"], place["batch"]
                    try:
                        values = run.read(place) if leaf == by else captures.value(*where, phase=phase, attempt=place["attempt"])
                    except (MissingCaptureError, CorruptRunError) as error:
                        warnings.warn(
                            f"the samples of {phase} epoch {where[0]}, batch {where[1]} are not found: {error}",
                            CaptureWarning,
                            stacklevel=4,
                        )
                        continue
                    if values.ndim != 1:
                        raise OptionError(
                            f"by: expected an annotation with one value for each sample, and {by!r} has shape {values.shape} in {phase} epoch {where[0]}, "
                            f"batch {where[1]}",
                            option="by",
                        )
                    yield (phase, *where, place["attempt"]), values

    def find(self, value: Any) -> list[tuple[Occurrence, int]]:
        """Return where a sample occurs, and how many samples each of these batches has, in order of phase, epoch, batch and index."""
        if self._sorted is None:
            try:
                positions = self._by_value.get(value, [])
            except TypeError:  # what cannot be hashed is no sample's
                positions = []
        else:
            wanted = np.asarray(value)
            if wanted.ndim or wanted.dtype.kind not in "biuf":
                return []
            low, high = self._sorted.searchsorted(wanted, "left"), self._sorted.searchsorted(wanted, "right")
            positions = self._order[low:high].tolist()
        found = []
        for position in positions:
            number = int(self._starts.searchsorted(position, "right")) - 1
            of = self.batches[number]
            found.append((Occurrence(of.phase, of.epoch, of.batch, position - int(self._starts[number]), of.attempt), of.num_samples))
        return found

    @property
    def examples(self) -> list[Any]:
        """Some values that there are."""
        return list(self._by_value)[:5] if self._sorted is None else np.unique(self._sorted[:1000])[:5].tolist()


def _numbers(values: list[Array]) -> Array | None:
    """Return all values one after another, as int64 or float64 if that loses nothing."""
    kinds = {array.dtype.kind for array in values}
    if kinds <= set("biu") and not any(array.dtype == np.uint64 for array in values):
        return np.concatenate([np.empty(0, dtype=np.int64), *values]).astype(np.int64)
    if kinds == {"f"}:
        return np.concatenate([array.astype(np.float64) for array in values])
    return None
