"""Gathering random rows of a layer's captures, as for training on them, from a warm page cache."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Scale, Scratch
from interleave import interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from workloads import Workload, read_all

import hookstore

TORCH_THREADS = 1
SHAPE = (64, 512)  # rows of 2 KiB
NUM_ROWS = 4096
_GATHERS = 8  # in each turn, of other rows each
_LONGEST_STRETCH = 12  # batches between two flushes where offsets are to be irregular

Gather = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


class Library:
    """The same rows as a run and as one file that numpy maps."""

    def __init__(self, scratch: Scratch, num_batches: int, *, irregular: bool) -> None:
        scratch.renew()
        workload = Workload(1, num_batches, SHAPE, num_distinct=num_batches)
        self.rows = np.concatenate([tensor.numpy() for _, _, tensor in workload])
        self.run_path, self.map_path = scratch.path / "run", scratch.path / "rows"
        self._record(workload, irregular=irregular)
        self.rows.tofile(self.map_path)
        read_all(scratch.path)

    def _record(self, workload: Workload, *, irregular: bool) -> None:
        generator = np.random.default_rng(0)
        model = workload.model()
        next_flush = int(generator.integers(1, _LONGEST_STRETCH)) if irregular else -1
        with hookstore.record(model, self.run_path) as recorder:
            for batch in recorder.batches(range(workload.num_batches), epoch=0):
                if batch == next_flush:
                    recorder.flush()
                    next_flush += int(generator.integers(1, _LONGEST_STRETCH))
                model[0](workload.batch(batch)[0])

    def num_steps(self) -> int:
        """Count how often the distance from one capture to the next is not the usual one."""
        with hookstore.open(self.run_path) as run:
            rows = run.manifest.sort_by("batch")
            distances = np.diff(rows["offset"].to_numpy())
        return int((distances != statistics.mode(distances.tolist())).sum())


class Gathering:
    """Gathers rows that no turn before asked for."""

    def __init__(self, library: Library, gather: Gather) -> None:
        self._library = library
        self._gather = gather
        self._generator = np.random.default_rng(0)
        self._gathered: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    def turn(self) -> dict[str, float]:
        """Gather; the last is kept for `verify`, the others go, so that nobody's time is that of new memory."""
        durations = []
        for _ in range(_GATHERS):
            indices = self._generator.integers(len(self._library.rows), size=NUM_ROWS)
            started = time.perf_counter()
            found = self._gather(indices)
            durations.append(time.perf_counter() - started)
            self._gathered = indices, found
        return {"seconds": statistics.median(durations)}

    def verify(self) -> None:
        """Compare."""
        assert self._gathered is not None
        indices, found = self._gathered
        self._gathered = None
        assert found.dtype == np.float32
        assert np.array_equal(found, self._library.rows[indices])


def loop(captures: hookstore.Captures) -> Gather:
    """Return the gathering that people write: capture by capture."""

    def gather(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.empty((len(indices), SHAPE[1]), np.float32)
        batches, samples = np.divmod(indices, SHAPE[0])
        order = np.argsort(batches, kind="stable")
        for batch, positions in itertools.groupby(order, key=batches.__getitem__):
            wanted = list(positions)
            found[wanted] = captures[0, int(batch)][samples[wanted]]
        return found

    return gather


def map_rows(path: Path) -> Gather:
    """Return the gathering from one file."""
    return np.memmap(path, np.float32, "r").reshape(-1, SHAPE[1]).__getitem__


@pytest.mark.parametrize("irregular", [False, True], ids=["constant", "irregular"])
def test_gather(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch, irregular: bool) -> None:  # noqa: FBT001
    library = Library(scratch, scale.gathered_batches, irregular=irregular)
    with hookstore.open(library.run_path) as run:
        captures = run["0"].activation
        contenders = {
            "Python loop": Gathering(library, loop(captures)),
            "numpy.memmap": Gathering(library, map_rows(library.map_path)),
            "hookstore": Gathering(library, captures.samples().__getitem__),
        }
        measured = interleave(benchmark, contenders, rounds=2 * scale.rounds)
    facts = {"num_rows": NUM_ROWS, "row_bytes": 4 * SHAPE[1], "num_captures": scale.gathered_batches, "num_steps": library.num_steps()}
    report(benchmark, measured, num_bytes=NUM_ROWS * 4 * SHAPE[1], **facts)
