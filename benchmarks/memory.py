#!/usr/bin/env python3
"""Records very small captures of 400 layers in a process of its own, and prints as JSON how much memory that took."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workloads import Workload

NUM_LAYERS = 400
SHAPE = (8, 4)
BUFFER_BYTES = (64 << 20) + (68 << 10)  # an odd size, by which its mapping is found


def tiny_workload(num_captures: int) -> Workload:
    """Return the workload."""
    return Workload(NUM_LAYERS, num_captures // NUM_LAYERS, SHAPE, num_distinct=17)


def measure(path: str, num_captures: int) -> dict[str, Any]:
    """Run the loop without recording and with it; return what the process held at most."""
    torch.set_num_threads(1)
    unloaded = peak_bytes(lambda: None)
    import hookstore

    record_little(hookstore.record, path)
    workload = tiny_workload(num_captures)
    model = workload.model()
    unrecorded = peak_bytes(lambda: train(model, workload, range(workload.num_batches)))
    touched = 0

    def train_recorded() -> None:
        nonlocal touched
        with hookstore.record(model, path, buffer_bytes=BUFFER_BYTES) as recorder:
            train(model, workload, recorder.batches(range(workload.num_batches), epoch=0))
            touched = touched_bytes(BUFFER_BYTES)

    recorded = peak_bytes(train_recorded)
    return {
        "num_captures": workload.num_tensors,
        "num_arrays": NUM_LAYERS,
        "buffer_bytes": BUFFER_BYTES,
        "touched_bytes": touched,
        "libraries_bytes": unrecorded - unloaded,
        "unrecorded_bytes": unrecorded,
        "recorded_bytes": recorded,
        "over_buffer_bytes": recorded - unrecorded - touched,
    }


def record_little(record: Callable[..., Any], path: str) -> None:
    """Record one tensor, so that the libraries that recording needs are loaded."""
    workload = Workload(1, 1, SHAPE)
    model = workload.model()
    with record(model, path, buffer_bytes=1 << 20) as recorder:
        train(model, workload, recorder.batches(range(1), epoch=0))
    shutil.rmtree(path)


def train(model: torch.nn.Sequential, workload: Workload, batches: Any) -> None:
    """Call every layer in every batch."""
    layers = list(model)
    for batch in batches:
        for layer, tensor in zip(layers, workload.batch(batch), strict=True):
            layer(tensor)


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the most memory that was resident while some work was done, or as far as the system tells ever before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # from here on a new peak
    work()
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def touched_bytes(num_bytes: int) -> int:
    """Return how much of the mapping of that size is resident; 0 where the system does not tell, so that the buffer counts in full."""
    if not os.path.exists("/proc/self/smaps"):
        return 0
    resident, is_it = 0, False
    with open("/proc/self/smaps", encoding="ascii") as mappings:
        for line in mappings:
            first, *rest = line.split()
            if not first.endswith(":"):
                start, end = (int(address, 16) for address in first.split("-"))
                is_it = end - start == num_bytes
            elif is_it and first == "Rss:":
                resident += 1024 * int(rest[0])
    assert resident, "the staging buffer was not found among the mappings"
    return resident


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="directory of the run")
    parser.add_argument("num_captures", type=int)
    arguments = parser.parse_args()
    json.dump(measure(arguments.path, arguments.num_captures), sys.stdout)
