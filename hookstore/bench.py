"""What a disk and this host sustain: a short measurement, and what follows from it for training.

Disks and hosts that are shared drift by factors within seconds. So everything is measured in several short rounds, one thing after the other in each, and
the medians count.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hookstore.device import allocate_host
from hookstore.errors import CorruptRunError, OptionError
from hookstore.files import DirectWriter, sync_directory
from hookstore.recorder import Recorder, record
from hookstore.run import open as open_run

_TENSOR_SHAPE = (64, 32, 28, 28)  # what a first convolution gives for a batch of 64; whole pages, so that it can be written as it lies
_TENSOR_BYTES = 4 * 64 * 32 * 28 * 28
_NUM_TENSORS = 8  # together more than most caches hold
_NUM_LARGE_LAYERS = 2
_SMALL_SHAPE = (64, 10)
_NUM_SMALL_LAYERS = 100
_BUFFER_BYTES = 256 << 20

_TURNS = 50  # of `seconds`, each measured thing takes one such part in each round; a round is about seven, with what comes before and after
_MOST_ROUNDS = 11
_MOST_TURN_BYTES = 1 << 30
_MOST_TURN_BATCHES = 200  # of small captures: 52 MB, which stay until the last round
_ROOM_BYTES = 2_000_000_000
_UNSYNCED_BYTES = 64 << 20  # through the page cache; more of them would make the sync at the end as long as they please
_JOIN_S = 10.0

_STEP_S = 0.1
_SLOWDOWN = 0.05


class Rates(NamedTuple):
    """What is sustained.

    Attributes
    ----------
    raw_bytes_per_s : float
        Sequential writes of whole tensors by one thread into one file, until the device has them.
    durable_bytes_per_s : float
        As many bytes recorded by hookstore, from `hookstore.record` until the recorder is closed; fewer where that takes long.
    copy_bytes_per_s : float
        Copies of tensors into a buffer in host memory that lies ready.
    captures_per_s : float
        Captures of 64×10 float32, back to back over 100 layers, until they are durable.
    capture_s, capture_p99_s : float
        Seconds that one of those takes on the training thread, over a hook that does nothing: the median, and what one in a hundred exceeds.
    """

    raw_bytes_per_s: float
    durable_bytes_per_s: float
    copy_bytes_per_s: float
    captures_per_s: float
    capture_s: float
    capture_p99_s: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """What `measure` found.

    Attributes
    ----------
    directory : str
        Where it was measured.
    is_direct : bool
        Whether the file system takes O_DIRECT. Where it does not, writes went through the page cache and were synced.
    num_rounds : int
        Rounds that counted.
    num_cpus, num_torch_threads : int
        CPUs that the process may use, and threads that torch copies with.
    median, lowest, highest : Rates
        Of the rounds, each number for itself.
    """

    directory: str
    is_direct: bool
    num_rounds: int
    num_cpus: int
    num_torch_threads: int
    median: Rates
    lowest: Rates
    highest: Rates


def advice(measured: Throughput) -> list[str]:
    """Say in sentences how much can be captured before training is slowed, by the example of a step of 100 ms.

    Parameters
    ----------
    measured : Throughput
        From `measure`; nothing but its medians goes into the numbers.
    """
    rates = measured.median
    slowed_s = _STEP_S * (1 + _SLOWDOWN)
    copied_bytes = rates.copy_bytes_per_s * _STEP_S * _SLOWDOWN
    copied_captures = _STEP_S * _SLOWDOWN / rates.capture_s
    step = f"a step of {_STEP_S * 1e3:.0f} ms"
    slowed = f"slowed by {_SLOWDOWN * 100:.0f} %"
    sentences = [
        f"Up to {_mega(rates.durable_bytes_per_s)} MB/s of captures (for example {_mega(rates.durable_bytes_per_s * _STEP_S)} MB {step}) the disk "
        f"keeps up, and up to {rates.captures_per_s:,.0f} small captures/s ({rates.captures_per_s * _STEP_S:,.0f} {step}) the writer; above that "
        "training waits (on_full='block') or captures are dropped (on_full='drop').",
        f"Copies cost {1e8 / rates.copy_bytes_per_s * 1e3:.1f} ms per 100 MB, each small capture {rates.capture_s * 1e6:.1f} µs: "
        f"{step} is {slowed} at {_mega(copied_bytes)} MB or {copied_captures:,.0f} small captures a step.",
    ]
    if copied_bytes / slowed_s < rates.durable_bytes_per_s:
        sentences.append(f"With large tensors the copies are the first to be felt: {slowed} at {_mega(copied_bytes / slowed_s)} MB/s.")
    else:
        sentences.append(f"With large tensors the disk is the first to be felt, at {_mega(rates.durable_bytes_per_s)} MB/s.")
    if copied_captures / slowed_s < rates.captures_per_s:
        sentences.append(f"With small ones it is the hooks: {slowed} at {copied_captures / slowed_s:,.0f} captures/s.")
    else:
        sentences.append(f"With small ones it is the writer, at {rates.captures_per_s:,.0f} captures/s.")
    sentences.append(
        "This is for tensors in host memory, and nothing was trained meanwhile: a model that computes on the CPU shares its cores with the writer."
    )
    return sentences


def _mega(num_bytes: float) -> str:
    """Return the megabytes, with a decimal where there are few."""
    return f"{num_bytes / 1e6:,.{0 if num_bytes >= 1e8 else 1}f}"


def measure(directory: str | os.PathLike[str], *, seconds: float = 10.0) -> Throughput:
    """Measure what the disk of a directory and this host sustain, of random data.

    Nothing is left behind: what is written lies in one temporary subdirectory, which is removed at the end and when an exception or an interrupt comes.

    Parameters
    ----------
    directory : path-like
        On the disk to measure; exists, is writable and has 2 GB to spare.
    seconds : float
        About how long it takes. Slow disks, where the least that can be measured takes longer, overrun it.

    Raises
    ------
    OptionError
        If the directory does not exist, cannot be written to or has too little room, or the time is not positive.
    CorruptRunError
        If what was recorded is not what is read back.
    """
    started = time.perf_counter()
    if not 0 < seconds < math.inf:
        raise OptionError(f"seconds: expected a positive number, got {seconds!r}", option="seconds")
    path = os.path.abspath(os.fspath(directory))
    with _temporary_directory(path) as scratch:
        workload = _Workload(scratch, turn_s=seconds / _TURNS)
        rounds: list[Rates] = []
        with record(
            workload.small_model, workload.small_path, batches=range(_MOST_ROUNDS * _MOST_TURN_BATCHES), buffer_bytes=_BUFFER_BYTES
        ) as recorder:
            round_s = 0.0  # what comes after the last takes about half of one
            while len(rounds) < 2 or (len(rounds) < _MOST_ROUNDS and time.perf_counter() - started + 1.5 * round_s < seconds):
                round_started = time.perf_counter()
                rounds.append(workload.take_round(recorder))
                round_s = time.perf_counter() - round_started
        _verify(workload.small_path, workload.num_batches, [tensor.numpy() for tensor in workload.small_tensors])
    counted = rounds[1:]  # the first warms up: threads start, arrays are made
    numbers = list(zip(*counted, strict=True))
    return Throughput(
        directory=path,
        is_direct=workload.is_direct,
        num_rounds=len(counted),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_torch_threads=torch.get_num_threads(),
        median=Rates(*map(statistics.median, numbers)),
        lowest=Rates(*map(min, numbers)),
        highest=Rates(*map(max, numbers)),
    )


@contextlib.contextmanager
def _temporary_directory(parent: str) -> Iterator[str]:
    """Make a directory that is gone at the end, after a check that there is room for what comes into it."""
    if not os.path.isdir(parent):
        what = "is no directory" if os.path.exists(parent) else "does not exist"
        raise OptionError(f"{parent} {what}: expected a directory on the disk to measure", option="directory")
    threads = set(threading.enumerate())
    try:
        made = tempfile.TemporaryDirectory(prefix=".hookstore-bench-", dir=parent)
    except OSError as error:
        raise OptionError(
            f"{parent} cannot be written to ({error.strerror}): expected a writable directory on the disk to measure", option="directory"
        ) from error
    with made as path:
        free_bytes = shutil.disk_usage(path).free
        if free_bytes < _ROOM_BYTES:
            raise OptionError(
                f"{parent} has {free_bytes:,} bytes free: the measurement needs {_ROOM_BYTES:,} for a while; make room or name another disk",
                option="directory",
            )
        try:
            yield path
        finally:
            for thread in set(threading.enumerate()) - threads:  # an interrupt of close() leaves a writer that still makes files
                if thread.name.startswith("hookstore-"):
                    thread.join(_JOIN_S)


class _Passing(nn.Module):
    """Layers that return the tensors that they are given."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(num_layers))

    def forward(self, tensors: list[torch.Tensor]) -> list[float]:
        """Pass a tensor through each; return the seconds that each call took."""
        times = []
        for layer, tensor in zip(self.layers, tensors, strict=True):
            started = time.perf_counter()
            layer(tensor)
            times.append(time.perf_counter() - started)
        return times


class _Workload:
    """What is measured, and with which tensors.

    Parameters
    ----------
    path : str
        Directory to write into.
    turn_s : float
        Seconds that each thing may take in each round.

    Attributes
    ----------
    is_direct : bool
        Whether the last raw write went past the page cache.
    num_batches : int
        Batches of small captures so far.
    """

    def __init__(self, path: str, *, turn_s: float) -> None:
        self.small_path = os.path.join(path, "small")
        self.small_model = _Passing(_NUM_SMALL_LAYERS)
        generator = torch.Generator().manual_seed(0)
        self.small_tensors = [torch.randn(_SMALL_SHAPE, generator=generator) for _ in range(_NUM_SMALL_LAYERS)]
        self.is_direct = False
        self.num_batches = 0
        self._path = path
        self._turn_s = turn_s
        self._tensors = [torch.randn(_TENSOR_SHAPE, generator=generator) for _ in range(_NUM_TENSORS)]
        self._buffer = allocate_host(_NUM_TENSORS * _TENSOR_BYTES, pinned=False)
        self._slots = self._buffer.view(torch.float32).view(_NUM_TENSORS, *_TENSOR_SHAPE).unbind()
        self._copy()  # faults the buffer in
        self._hooked_model = _Passing(_NUM_SMALL_LAYERS)
        for layer in self._hooked_model.layers:
            layer.register_forward_hook(lambda _module, _arguments, _output: None)

    def take_round(self, recorder: Recorder) -> Rates:
        """Measure everything once, side by side."""
        num_bytes, raw_s = self._write_raw()
        return Rates(num_bytes / raw_s, self._record(num_bytes), self._copy_for_a_turn(), *self._capture_small(recorder))

    def _write_raw(self) -> tuple[int, float]:
        """Write whole batches of tensors until the turn is over; return their bytes, and the seconds until the device has them."""
        path = os.path.join(self._path, "raw")
        memory = memoryview(self._buffer.numpy())  # type: ignore[arg-type]  # ndarray is a buffer; typeshed says so from 3.12 on
        writer = DirectWriter()
        try:
            written = synced = 0
            started = time.perf_counter()
            while written < _MOST_TURN_BYTES and (
                not written or written % (_NUM_LARGE_LAYERS * _TENSOR_BYTES) or time.perf_counter() - started < self._turn_s
            ):
                start = written % len(memory)
                writer.write(path, memory[start : start + _TENSOR_BYTES], written)
                written += _TENSOR_BYTES
                if not writer.is_direct and written - synced >= _UNSYNCED_BYTES:
                    writer.sync(path)
                    synced = written
            writer.sync(path)
            elapsed_s = time.perf_counter() - started
        finally:
            writer.close()
        self.is_direct = writer.is_direct
        os.unlink(path)
        sync_directory(self._path)  # so that nobody pays for what was there before
        return written, elapsed_s

    def _record(self, num_bytes: int) -> float:
        """Record so many bytes of tensors, or fewer if that takes long; return the bytes a second until they are durable."""
        path = os.path.join(self._path, "large")
        model = _Passing(_NUM_LARGE_LAYERS)
        per_cycle = _NUM_TENSORS // _NUM_LARGE_LAYERS
        batches = [self._tensors[start : start + _NUM_LARGE_LAYERS] for start in range(0, _NUM_TENSORS, _NUM_LARGE_LAYERS)]
        batch_bytes = _NUM_LARGE_LAYERS * _TENSOR_BYTES
        num_batches = 0
        started = time.perf_counter()
        with record(model, path, buffer_bytes=_BUFFER_BYTES) as recorder:
            for batch in recorder.batches(range(1 + max(1, num_bytes // batch_bytes)), epoch=0):
                model(batches[batch % per_cycle])
                num_batches += 1
                if num_batches == 1:  # a long run makes its arrays once: that does not count
                    recorder.flush()
                    started = time.perf_counter()
                elif time.perf_counter() - started > 2 * self._turn_s:
                    break
            recorder.flush()
            elapsed_s = time.perf_counter() - started
        _verify(path, num_batches, [tensor.numpy() for tensor in batches[(num_batches - 1) % per_cycle]])
        shutil.rmtree(path)
        sync_directory(self._path)
        return (num_batches - 1) * batch_bytes / elapsed_s

    def _copy(self) -> None:
        for slot, tensor in zip(self._slots, self._tensors, strict=True):
            slot.copy_(tensor)

    def _copy_for_a_turn(self) -> float:
        """Return the bytes a second of copies; half a turn tells them."""
        times: list[float] = []
        while not times or sum(times) < self._turn_s / 2:
            started = time.perf_counter()
            self._copy()
            times.append(time.perf_counter() - started)
        return len(self._buffer) / statistics.median(times)

    def _capture_small(self, recorder: Recorder) -> tuple[float, float, float]:
        """Return captures a second until durable, and the median and 99th percentile of what one costs on this thread, in seconds."""
        hooked = [seconds for _ in range(10) for seconds in self._hooked_model(self.small_tensors)]
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < _MOST_TURN_BATCHES * _NUM_SMALL_LAYERS and (not times or time.perf_counter() - started < self._turn_s):
            with recorder.at(epoch=0, batch=self.num_batches):
                times += self.small_model(self.small_tensors)
            self.num_batches += 1
        recorder.flush()
        elapsed_s = time.perf_counter() - started
        median_s, p99_s = np.percentile(times, [50, 99]) - np.median(hooked)
        return len(times) / elapsed_s, float(median_s), float(p99_s)


def _verify(path: str, num_batches: int, last: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]]) -> None:
    """Read back the last batch of a run.

    Raises
    ------
    CorruptRunError
        If a capture is missing or is not what was recorded.
    """
    with open_run(path) as run:
        for number, expected in enumerate(last):
            captures = run[f"layers.{number}"].activation
            if len(captures) != num_batches or not np.array_equal(captures[0, num_batches - 1], expected):
                raise CorruptRunError(
                    f"{path}: the run does not give back what was recorded of layer {number}; either the disk is broken or hookstore is",
                    path=path,
                )
