"""Record a million captures over half an hour, and see that the recorder keeps no more of anything at the end than it had at the beginning.

    .venv/bin/python tools/soak.py                                # 1,000,000 captures in 30 minutes, in the temporary directory
    .venv/bin/python tools/soak.py --minutes 1 --captures 50000   # to see that it works

A few small layers and a gradient are recorded, spread evenly over the time. Every so often the run is closed and taken up again some batches earlier. Each
line says what the process holds: descriptors, threads, resident memory, and what of that is held beside the staging buffer once the allocators have given
back what is free (a run that is taken up is read for that, and what this leaves free grows with the run). At the end a random sample of the captures is read
back and compared with what was computed, and the run is deleted.

Exit status 1 means that a value was wrong, that rows are missing, or that something is not flat. Flat means, of the lines after the first fifth: descriptors
and threads of the last fifth are at most two more than those of the first (median), and what is held beside the staging buffer is at most 24 MiB more.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import astuple, dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import hookstore

EPOCH_BATCHES = 2_000
LAYERS = {"narrow": (8,), "wide": (16, 24), "counted": (32,), "scaled": (4, 6)}
PER_BATCH = len(LAYERS) + 1  # and the gradient of the last
MOST_MORE_COUNTED = 2
MOST_MORE_BYTES = 24 << 20
NUM_SAMPLED = 20_000
SLACK_S = 0.05
_LIBC = ctypes.CDLL(None)


class Returns(nn.Module):
    """Returns what it is given."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return it."""
        return given


class Scaled(nn.Module):
    """Doubles what it is given."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Return twice of it."""
        return 2 * given


class Model(nn.Module):
    """One layer of each."""

    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            self.add_module(name, Scaled() if name == "scaled" else Returns())


def computed(layer: str, kind: str, attempt: int, epoch: int, batch: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return what a layer gives there: whole numbers, so that doubling and summing are exact."""
    shape = LAYERS[layer]
    first = 7 * list(LAYERS).index(layer) + 3 * (kind == "gradient") + 11 * attempt + 13 * epoch + 17 * batch
    values = (np.arange(int(np.prod(shape)), dtype=np.int64) * 31 + first) % 65_521
    return values.astype(np.float32).reshape(shape)


def train(model: Model, attempt: int, epoch: int, batch: int) -> None:
    """Compute one batch."""
    for name in LAYERS:
        module = model.get_submodule(name)
        values = torch.from_numpy(computed(name, "activation", attempt, epoch, batch))
        if name == "scaled":
            doubled = module((values / 2).requires_grad_())
            (doubled * torch.from_numpy(computed(name, "gradient", attempt, epoch, batch))).sum().backward()
        else:
            module(values)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds at an instant."""

    num_descriptors: int
    num_threads: int
    resident_bytes: int
    held_bytes: int  # of that, without the staging buffer and what the allocators keep for later

    @classmethod
    def now(cls, recorder: hookstore.Recorder) -> Held:
        """Look."""
        resident, num_threads = _resident_bytes_and_threads()
        gc.collect()
        pa.default_memory_pool().release_unused()
        if hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)
        held = _resident_bytes_and_threads()[0] - _arena_bytes(recorder)
        return cls(len(os.listdir("/proc/self/fd")), num_threads, resident, held)


def _resident_bytes_and_threads() -> tuple[int, int]:
    status = {}
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, rest = line.partition(":")
            status[name] = rest.split()
    return int(status["VmRSS"][0]) << 10, int(status["Threads"][0])


def _arena_bytes(recorder: hookstore.Recorder) -> int:
    """Return how much of the staging buffer is resident."""
    memory = np.frombuffer(recorder._stager.memory, dtype=np.uint8)
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    resident, is_inside = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            words = line.split()
            if not words[0].endswith(":"):
                low, high = (int(text, 16) for text in words[0].split("-"))
                is_inside = low < end and high > start
            elif is_inside and words[0] == "Rss:":
                resident += int(words[1]) << 10
    return min(resident, memory.nbytes)


def disk_bytes(path: str) -> int:
    """Return what a directory takes on disk."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue  # it has been renamed since the listing
    return total


class Soak:
    """Records, and reports on it.

    Parameters
    ----------
    path : str
        The run.
    num_batches : int
        How many to record, all attempts together.
    seconds : float
        Over which time.
    num_resumes : int
        How often the run is taken up again.
    num_reports : int
        How many lines to print.
    buffer_bytes : int
        Size of the staging buffer.
    """

    def __init__(self, path: str, *, num_batches: int, seconds: float, num_resumes: int, num_reports: int, buffer_bytes: int) -> None:
        self.path = path
        self.num_batches = num_batches
        self.seconds = seconds
        self.buffer_bytes = buffer_bytes
        self.held: list[Held] = []
        self._ends = [num_batches * (number + 1) // (num_resumes + 1) for number in range(num_resumes + 1)]
        self._reports = [num_batches * (number + 1) // num_reports for number in range(num_reports)]
        self._started = time.monotonic()
        self._reported = (self._started, 0)
        self._num_done = 0

    def record(self) -> None:
        """Record all of it."""
        model = Model()
        position = 0
        print(f"{'captures':>10} {'a second':>9} {'descriptors':>11} {'threads':>7} {'resident MiB':>12} {'held MiB':>14} {'disk MiB':>9}")
        for attempt, end in enumerate(self._ends):
            position = self._record_once(model, attempt, position, end)
            position = max(0, position - 10)  # as a checkpoint is some batches older than the end

    def _record_once(self, model: Model, attempt: int, position: int, end: int) -> int:
        """Record until so many batches are done, from a position in the training on; return where that has come."""
        mode = "a" if attempt else "x"
        options = {"kinds": ["activation", "gradient"], "buffer_bytes": self.buffer_bytes}
        with hookstore.record(model, self.path, layers=list(LAYERS), mode=mode, **options) as recorder:  # type: ignore[arg-type]
            while self._num_done < end:
                epoch = position // EPOCH_BATCHES
                for batch in recorder.batches(range(EPOCH_BATCHES), epoch=epoch):
                    if batch < position % EPOCH_BATCHES:
                        continue
                    train(model, attempt, epoch, batch)
                    position += 1
                    self._num_done += 1
                    self._pace(recorder)
                    if self._num_done == end or position % EPOCH_BATCHES == 0:
                        break
        return position

    def _pace(self, recorder: hookstore.Recorder) -> None:
        """Sleep until the next batch is due, and report when that is due."""
        now = time.monotonic()
        early = self._started + self.seconds * self._num_done / self.num_batches - now
        if early > SLACK_S:
            time.sleep(early)
        if self._reports and self._num_done >= self._reports[0]:
            del self._reports[0]
            held = Held.now(recorder)
            self.held.append(held)
            (before, num_before), self._reported = self._reported, (now, self._num_done)
            rate = (self._num_done - num_before) * PER_BATCH / max(now - before, 1e-9)
            print(
                f"{self._num_done * PER_BATCH:>10,} {rate:>9,.0f} {held.num_descriptors:>11} {held.num_threads:>7} "
                f"{held.resident_bytes / 2**20:>12.1f} {held.held_bytes / 2**20:>14.1f} {disk_bytes(self.path) / 2**20:>9.1f}",
                flush=True,
            )


def what_is_not_flat(held: list[Held]) -> list[str]:
    """Compare the last fifth of what was held with the second; see the top."""
    fifth = max(1, len(held) // 5)
    early, late = held[fifth : 2 * fifth], held[-fifth:]
    found = []
    for name, limit, first, last in zip(
        ("descriptors", "threads", "", "bytes held beside the staging buffer"),
        (MOST_MORE_COUNTED, MOST_MORE_COUNTED, sys.maxsize, MOST_MORE_BYTES),
        zip(*map(astuple, early), strict=True),
        zip(*map(astuple, late), strict=True),
        strict=True,
    ):
        more = statistics.median(last) - statistics.median(first)
        if more > limit:
            found.append(f"{name}: {more:,.0f} more at the end than after the first fifth, {limit:,} are allowed")
    return found


def what_is_wrong(path: str, num_batches: int, seed: int) -> list[str]:
    """Compare a random sample of the run with what was computed, and its rows with what was recorded."""
    found = []
    with hookstore.open(path) as run:
        rows = run.manifest
        if rows.num_rows != num_batches * PER_BATCH:
            found.append(f"{rows.num_rows:,} rows, expected {num_batches * PER_BATCH:,}")
        statuses = Counter(rows["status"].to_pylist())
        if set(statuses) != {"ok"}:
            found.append(f"statuses: {dict(statuses)}")
        for position in random.Random(seed).sample(range(rows.num_rows), min(rows.num_rows, NUM_SAMPLED)):  # noqa: S311  # no secret
            row = rows.slice(position, 1).to_pylist()[0]
            expected = computed(row["layer"], row["kind"], row["attempt"], row["epoch"], row["batch"])
            array = run[row["layer"]][row["kind"]].get(row["epoch"], row["batch"], attempt=row["attempt"])
            if array.dtype != expected.dtype or array.shape != expected.shape or (array != expected).any():
                found.append(
                    f"{row['kind']} of {row['layer']} in attempt {row['attempt']}, epoch {row['epoch']}, batch {row['batch']} is wrong"
                )
    return found


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--captures", type=int, default=1_000_000)
    parser.add_argument("--resumes", type=int, default=10)
    parser.add_argument("--reports", type=int, default=60)
    parser.add_argument("--buffer-mib", type=int, default=64)
    parser.add_argument("--dir", default=None, help="where the run lies while it is there; the temporary directory by default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    directory = tempfile.mkdtemp(prefix="hookstore-soak-", dir=arguments.dir)
    try:
        path = os.path.join(directory, "run")
        num_batches = -(-arguments.captures // PER_BATCH)
        soak = Soak(
            path,
            num_batches=num_batches,
            seconds=60 * arguments.minutes,
            num_resumes=arguments.resumes,
            num_reports=min(arguments.reports, num_batches),
            buffer_bytes=arguments.buffer_mib << 20,
        )
        soak.record()
        found = what_is_not_flat(soak.held) + what_is_wrong(path, num_batches, arguments.seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for problem in found[:20]:
        print(problem)
    print("not as it should be" if found else "flat, and every sampled value as it was computed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
