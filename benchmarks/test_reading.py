"""Reading one captured batch from a warm page cache, every byte of it touched."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import zarr
from conftest import Scale, Scratch
from interleave import interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from workloads import Workload, read_all

import hookstore
from hookstore.format import LAYERS_DIR

TORCH_THREADS = 1
SHAPE = (64, 32, 28, 28)  # 6.4 MB

Read = Callable[[Any], np.ndarray[Any, Any]]


def checksum(array: np.ndarray[Any, Any]) -> int:
    """Add up the bits of an array: that reads every byte, costs little beside it, and tells arrays apart."""
    return int(array.reshape(-1).view(np.int64).sum())


class Library:
    """The same tensors as a run and as ``.npy`` files."""

    def __init__(self, scratch: Scratch, num_batches: int) -> None:
        scratch.renew()
        workload = Workload(1, num_batches, SHAPE, num_distinct=num_batches)
        self.arrays = [tensor.numpy() for _, _, tensor in workload]
        self.checksums = [checksum(array) for array in self.arrays]
        self.run_path = scratch.path / "run"
        self.npy_paths = [scratch.path / f"{batch}.npy" for batch in range(num_batches)]
        model = workload.model()
        with hookstore.record(model, self.run_path) as recorder:
            for batch in recorder.batches(range(num_batches), epoch=0):
                model[0](workload.batch(batch)[0])
        for path, array in zip(self.npy_paths, self.arrays, strict=True):
            np.save(path, array)
        os.sync()
        read_all(scratch.path)


class Reading:
    """Reads every batch of a library once, each timed by itself."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._checksums: list[int] = []

    def time_each(self, read: Read, keys: Iterable[Any]) -> dict[str, float]:
        """Return the median time of reading and adding up; what comes out is kept for `verify`."""
        self._checksums = []
        durations = []
        for key in keys:
            started = time.perf_counter()
            self._checksums.append(checksum(read(key)))
            durations.append(time.perf_counter() - started)
        return {"seconds": statistics.median(durations), "first_s": durations[0]}

    def assert_same(self, read: Read, keys: Iterable[Any]) -> None:
        """Assert that the last turn read the right bytes, and that reading gives the very arrays."""
        assert self._checksums == self.library.checksums
        for key, expected in zip(keys, self.library.arrays, strict=True):
            found = read(key)
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


class FromHookstore(Reading):
    """Through a run that is opened anew, so that the checksum of each batch is checked again."""

    def turn(self) -> dict[str, float]:
        """Read."""
        started = time.perf_counter()
        with hookstore.open(self.library.run_path) as run:
            captures = run["0"].activation
            opened = time.perf_counter()
            return {**self.time_each(lambda batch: captures[0, batch], range(len(self.library.arrays))), "open_s": opened - started}

    def verify(self) -> None:
        """Compare."""
        with hookstore.open(self.library.run_path) as run:
            self.assert_same(lambda batch: run["0"].activation[0, batch], range(len(self.library.arrays)))


class FromNpy(Reading):
    """By ``numpy.load``."""

    def turn(self) -> dict[str, float]:
        """Read."""
        return self.time_each(np.load, self.library.npy_paths)

    def verify(self) -> None:
        """Compare."""
        self.assert_same(np.load, self.library.npy_paths)


class FromZarr(Reading):
    """By zarr-python, the same chunks of the same shards."""

    def turn(self) -> dict[str, float]:
        """Read."""
        array = self._open()
        return self.time_each(lambda batch: np.asarray(array[0, batch]), range(len(self.library.arrays)))

    def verify(self) -> None:
        """Compare."""
        array = self._open()
        self.assert_same(lambda batch: np.asarray(array[0, batch]), range(len(self.library.arrays)))

    def _open(self) -> zarr.Array[Any]:
        return zarr.open_array(self.library.run_path / LAYERS_DIR / "0" / "activation", mode="r")


def test_reading(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    library = Library(scratch, scale.reads)
    contenders = {"zarr-python": FromZarr(library), "numpy.load": FromNpy(library), "hookstore": FromHookstore(library)}
    measured = interleave(benchmark, contenders, rounds=2 * scale.rounds)
    report(benchmark, measured, num_bytes=library.arrays[0].nbytes, num_reads=scale.reads)
