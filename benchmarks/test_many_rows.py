"""A run of very many captures: the memory that recording it takes, and how fast it opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory
import numpy as np
import pyarrow.dataset
import pytest
from conftest import Scale, Scratch
from interleave import interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from workloads import Workload, assert_same_bits, size_of

import hookstore
from hookstore.format import MANIFEST_DIR

TORCH_THREADS = 1
FEW = 1_200  # about a thousand, in whole batches


def record_in_a_process(path: Path, num_captures: int) -> dict[str, Any]:
    """Record in a process of its own; return what it says of its memory."""
    command = [sys.executable, memory.__file__, str(path), str(num_captures)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # the hookstore that is imported here, and no other
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    return found


@dataclass(frozen=True, slots=True)
class ManyRows:
    """The run of very many captures.

    Attributes
    ----------
    path : Path
        Where it is.
    workload : Workload
        What is in it.
    memory : dict
        What recording it took.
    """

    path: Path
    workload: Workload
    memory: dict[str, Any]


@pytest.fixture(scope="module")
def many(directory: Path, scale: Scale) -> ManyRows:
    path = directory / "many"
    workload = memory.tiny_workload(scale.many_captures)
    return ManyRows(path, workload, record_in_a_process(path, scale.many_captures))


def test_memory(benchmark: BenchmarkFixture, scratch: Scratch, many: ManyRows) -> None:
    scratch.renew()
    few = benchmark.pedantic(record_in_a_process, args=(scratch.path / "run", FEW), rounds=1)
    # By then what is kept of unsealed shards and of the journal's segment is as much as it will ever be.
    quarter = record_in_a_process(scratch.path / "quarter", many.workload.num_tensors // 4)
    benchmark.extra_info.update(torch_threads=1, num_rounds=1, memory=[few, quarter, many.memory])
    runs = ((scratch.path / "run", few), (scratch.path / "quarter", quarter), (many.path, many.memory))
    for path, num_captures in ((path, found["num_captures"]) for path, found in runs):
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": num_captures}


class Opened:
    """`hookstore.open` and the first tensor."""

    def __init__(self, many: ManyRows) -> None:
        self._many = many
        self._generator = np.random.default_rng(0)
        self._found: tuple[np.ndarray[Any, Any], int, int]

    def turn(self) -> dict[str, float]:
        """Open and read."""
        layer = int(self._generator.integers(memory.NUM_LAYERS))
        batch = int(self._generator.integers(self._many.workload.num_batches))
        started = time.perf_counter()
        with hookstore.open(self._many.path) as run:
            opened = time.perf_counter()
            found = run[str(layer)].activation[0, batch]
            read = time.perf_counter()
        self._found = found, layer, batch
        return {"seconds": read - started, "open_s": opened - started, "first_s": read - opened}

    def verify(self) -> None:
        """Compare the tensor."""
        found, layer, batch = self._found
        assert_same_bits(found, self._many.workload[layer, batch])


class Scanned:
    """The manifest's Parquet parts as pyarrow reads them, all columns."""

    def __init__(self, many: ManyRows) -> None:
        self._many = many
        self._num_rows = 0

    def turn(self) -> None:
        """Read."""
        self._num_rows = pyarrow.dataset.dataset(self._many.path / MANIFEST_DIR, format="parquet").to_table().num_rows

    def verify(self) -> None:
        """Assert that it was everything."""
        assert self._num_rows == self._many.workload.num_tensors


def test_open(benchmark: BenchmarkFixture, scale: Scale, many: ManyRows) -> None:
    manifest_bytes = size_of(many.path / MANIFEST_DIR)
    measured = interleave(benchmark, {"pyarrow": Scanned(many), "hookstore": Opened(many)}, rounds=2 * scale.rounds)
    num_rows = many.workload.num_tensors
    report(benchmark, measured, num_bytes=manifest_bytes, num_rows=num_rows, bytes_a_row=manifest_bytes / num_rows)
