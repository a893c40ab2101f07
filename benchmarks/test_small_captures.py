"""What small captures cost: each by itself on the training thread, and very many of them in CPU time of the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from conftest import Scale, Scratch
from interleave import Contender, Round, interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from workloads import Workload, assert_same_bits, see_nothing

import hookstore

TORCH_THREADS = 1
NUM_LAYERS = 200
SHAPE = (64, 10)  # the logits of a batch
MANY = 100_000  # how many of the first and of the last captures are compared
_PEER_BATCHES = 2
_CHECKED = 500  # of very many captures so many are compared, at random; all are counted


def small_workload(num_captures: int) -> Workload:
    """Return a workload of small tensors out of a graph, as in training."""
    return Workload(NUM_LAYERS, num_captures // NUM_LAYERS, SHAPE, num_distinct=17, requires_grad=True)


def check_run(path: Path, workload: Workload) -> None:
    """Assert that a run holds a capture of every layer and batch, and compare some at random."""
    generator = np.random.default_rng(0)
    with hookstore.open(path) as run:
        assert run.manifest.num_rows == workload.num_tensors
        assert run.info().statuses == {"ok": workload.num_tensors}
        for layer, batch in zip(
            generator.integers(workload.num_layers, size=_CHECKED), generator.integers(workload.num_batches, size=_CHECKED), strict=True
        ):
            assert_same_bits(run[str(layer)].activation[0, batch], workload[int(layer), int(batch)])


# Each call by itself ----------------------------------------------------------------------------------------------


def time_calls(model: nn.Sequential, workload: Workload, tick: Callable[[int], object]) -> dict[str, float]:
    """Time every call of a layer by itself, and by itself the tick of the clock before each batch."""
    layers, now = list(model), time.perf_counter_ns
    calls_ns, ticks_ns = [], []
    for batch in range(workload.num_batches):
        started = now()
        tick(batch)
        ticks_ns.append(now() - started)
        for layer, tensor in zip(layers, workload.batch(batch), strict=True):
            started = now()
            layer(tensor)
            calls_ns.append(now() - started)
    median_s, p99_s = (float(np.quantile(calls_ns, quantile)) / 1e9 for quantile in (0.5, 0.99))
    return {"seconds": median_s, "p99_s": p99_s, "tick_s": float(np.median(ticks_ns)) / 1e9 / len(layers)}


class HookedCalls:
    """Calls of layers with one forward hook.

    Parameters
    ----------
    make_hook : callable
        Makes the hook of a layer, given by its number.
    verify : callable
        Asserts that the hooks did their work.
    """

    def __init__(self, workload: Workload, make_hook: Callable[[int], Callable[..., None]], verify: Callable[[], None]) -> None:
        self._workload = workload
        self._make_hook = make_hook
        self._verify = verify

    def turn(self) -> dict[str, float]:
        """Call."""
        model = self._workload.model()
        for number, layer in enumerate(model):
            layer.register_forward_hook(self._make_hook(number))
        return time_calls(model, self._workload, lambda batch: None)

    def verify(self) -> None:
        """Assert what there is to assert."""
        self._verify()


class RecordedCalls:
    """Calls of layers that hookstore records, its writer running."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._path = scratch.path / "run"

    def turn(self) -> dict[str, float]:
        """Call."""
        model = self._workload.model()
        with hookstore.record(model, self._path) as recorder:
            return time_calls(model, self._workload, lambda batch: recorder.at(epoch=0, batch=batch))

    def verify(self) -> None:
        """Look into the run."""
        check_run(self._path, self._workload)


def torch_saved_calls(workload: Workload, scratch: Scratch) -> HookedCalls:
    """Return calls whose hooks use ``torch.save``, a file for each tensor."""

    def make_hook(number: int) -> Callable[..., None]:
        saved = iter(range(workload.num_batches))
        return lambda module, arguments, output: torch.save(output.detach(), scratch.path / f"{number}-{next(saved)}.pt")

    def verify() -> None:
        for layer, batch, tensor in workload:
            assert torch.equal(torch.load(scratch.path / f"{layer}-{batch}.pt", weights_only=True), tensor)

    return HookedCalls(workload, make_hook, verify)


def zarr_written_calls(workload: Workload, scratch: Scratch) -> HookedCalls:
    """Return calls whose hooks use zarr-python, an array for each layer and a chunk for each batch."""
    arrays: dict[int, zarr.Array[Any]] = {}

    def make_hook(number: int) -> Callable[..., None]:
        shape = (workload.num_batches, *SHAPE)
        array = zarr.create_array(scratch.path / str(number), shape=shape, chunks=(1, *SHAPE), dtype="float32", compressors=None)
        arrays[number] = array
        batches = iter(range(workload.num_batches))

        def write(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
            array[next(batches)] = output.detach().numpy()

        return write

    def verify() -> None:
        for layer, batch, tensor in workload:
            assert_same_bits(np.asarray(arrays[layer][batch]), tensor)

    return HookedCalls(workload, make_hook, verify)


def test_call(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    workload = small_workload(NUM_LAYERS * scale.call_batches)
    part = small_workload(NUM_LAYERS * _PEER_BATCHES)
    contenders: dict[str, Contender] = {
        "zarr-python": zarr_written_calls(part, scratch),
        "torch.save": torch_saved_calls(part, scratch),
        "no-op hook": HookedCalls(workload, lambda number: see_nothing, lambda: None),
        "hookstore": RecordedCalls(workload, scratch),
    }
    measured = interleave(benchmark, contenders, rounds=2 * scale.rounds, prepare=scratch.renew)
    baseline = [taken["seconds"] for taken in measured["no-op hook"]]

    def over_baseline(name: str, key: str) -> list[float]:
        return [taken[key] - nothing for taken, nothing in zip(measured[name], baseline, strict=True)]

    figures = {f"{name}, {key}": over_baseline(name, key) for name in contenders for key in ("seconds", "p99_s")}
    figures["tick"] = [taken["tick_s"] for taken in measured["hookstore"]]
    report(benchmark, measured, num_bytes=workload.tensor_bytes, figures=figures, num_calls=workload.num_tensors, num_layers=NUM_LAYERS)


# Very many --------------------------------------------------------------------------------------------------------


class ManyHooked:
    """All calls with a hook that does nothing."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def turn(self) -> dict[str, float]:
        """Call."""
        model = self._workload.model()
        for layer in model:
            layer.register_forward_hook(see_nothing)
        layers, started = list(model), time.process_time()
        for batch in range(self._workload.num_batches):
            for layer, tensor in zip(layers, self._workload.batch(batch), strict=True):
                layer(tensor)
        return {"seconds": time.process_time() - started}

    def verify(self) -> None:
        """There is nothing to verify."""


class ManyRecorded:
    """All calls recorded, in CPU seconds of the whole process from `hookstore.record` until the recorder is closed.

    Parameters
    ----------
    num_compared : int
        Captures in each of the stretches that are timed by themselves: the first, the second and the last. Each ends with a flush.
    """

    def __init__(self, workload: Workload, scratch: Scratch, num_compared: int) -> None:
        self._workload = workload
        self._path = scratch.path / "run"
        self._num_compared = num_compared

    def turn(self) -> dict[str, float]:
        """Record."""
        workload = self._workload
        model = workload.model()
        layers = list(model)
        compared = self._num_compared // NUM_LAYERS
        borders = {compared, 2 * compared, workload.num_batches - compared}
        started = time.process_time()
        with hookstore.record(model, self._path) as recorder:
            moments = [time.process_time()]
            for batch in recorder.batches(range(workload.num_batches), epoch=0):
                if batch in borders:
                    recorder.flush()
                    moments.append(time.process_time())
                for layer, tensor in zip(layers, workload.batch(batch), strict=True):
                    layer(tensor)
            recorder.flush()
            moments.append(time.process_time())
        seconds = time.process_time() - started
        stretches = [end - start for start, end in pairwise(moments)]
        return {"seconds": seconds, "first_s": stretches[0], "second_s": stretches[1], "last_s": stretches[-1]}

    def verify(self) -> None:
        """Look into the run."""
        check_run(self._path, self._workload)


def measure_many(benchmark: BenchmarkFixture, scratch: Scratch, num_captures: int, *, rounds: int, warmup_rounds: int) -> None:
    workload = small_workload(num_captures)
    num_compared = min(MANY, num_captures // 5)
    contenders = {"no-op hooks": ManyHooked(workload), "hookstore": ManyRecorded(workload, scratch, num_compared)}
    measured = interleave(benchmark, contenders, rounds=rounds, warmup_rounds=warmup_rounds, prepare=scratch.renew)

    def cost_s(recorded: Round, hooked: Round, key: str) -> float:
        return recorded[key] - hooked["seconds"] * num_compared / num_captures

    pairs = list(zip(measured["hookstore"], measured["no-op hooks"], strict=True))
    figures = {
        "captures per CPU s": [num_captures / recorded["seconds"] for recorded, _ in pairs],
        "captures per CPU s over no-op hooks": [num_captures / (recorded["seconds"] - hooked["seconds"]) for recorded, hooked in pairs],
        "last stretch per CPU s": [num_compared / cost_s(*pair, "last_s") for pair in pairs],
        "last over first": [cost_s(*pair, "last_s") / cost_s(*pair, "first_s") for pair in pairs],
        "last over second": [cost_s(*pair, "last_s") / cost_s(*pair, "second_s") for pair in pairs],
    }
    facts = {"num_captures": num_captures, "num_compared": num_compared, "num_layers": NUM_LAYERS}
    report(benchmark, measured, num_bytes=workload.num_bytes, figures=figures, **facts)


def test_small_captures(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    measure_many(benchmark, scratch, scale.small_captures, rounds=scale.rounds, warmup_rounds=1)


def test_many_captures(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    """So many that one round has to do."""
    measure_many(benchmark, scratch, scale.many_captures, rounds=1, warmup_rounds=0)
