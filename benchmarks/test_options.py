"""What each way of keeping less costs a training step, and how many bytes it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import Scale, Scratch
from interleave import Contender, interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from test_training_step import DEMO, KINDS, WARMUP_STEPS, Block, Uncaptured, timings

import hookstore

TORCH_THREADS = 2
_RING = 3


@dataclass
class Chosen:
    """Recorded with some options.

    Attributes
    ----------
    options : dict
        Beside layers and kinds.
    check : callable
        Gets the run, opened, and the number of steps and of captures in a step, and asserts what must be in it.
    """

    scratch: Scratch
    num_steps: int
    options: dict[str, Any]
    check: Callable[[hookstore.Run, int, int], None]
    num_captures: int = field(default=0, init=False)

    def turn(self) -> dict[str, float]:
        """Train and record."""
        block = Block(DEMO, self.num_steps)
        self.num_captures = len(block.layers) * len(KINDS)
        with hookstore.record(block.model, self.scratch.path / "run", layers=DEMO.chooses, kinds=KINDS, **self.options) as recorder:
            moments = block.train(recorder.batches(block.batches, epoch=0))
        with hookstore.open(self.scratch.path / "run") as run:
            moved_bytes = run.info().nbytes / len(block.batches)
        return {**timings(moments), "moved_bytes": moved_bytes}

    def verify(self) -> None:
        """Assert that the run holds what was asked for."""
        with hookstore.open(self.scratch.path / "run") as run:
            self.check(run, WARMUP_STEPS + self.num_steps, self.num_captures)


def _is_whole(run: hookstore.Run, num_steps: int, num_captures: int) -> None:
    assert run.info().statuses == {"ok": num_steps * num_captures}


def _is_part(run: hookstore.Run, num_steps: int, num_captures: int) -> None:
    _is_whole(run, num_steps, num_captures)
    assert set(run.manifest["portion"].to_pylist()) == {"sample[:8]"}
    assert {shape[0] for shape in run.manifest["shape"].to_pylist()} == {8}


def _has_statistics(run: hookstore.Run, num_steps: int, num_captures: int) -> None:
    _is_whole(run, num_steps, num_captures)
    row = run["fc1"].activation.row(0, num_steps - 1)
    assert abs(row["l2"] / float(torch.from_numpy(run["fc1"].activation[0, num_steps - 1].copy()).double().norm()) - 1) < 1e-12


def _has_statistics_alone(run: hookstore.Run, num_steps: int, num_captures: int) -> None:
    assert run.info().statuses == {"summarized": num_steps * num_captures}
    assert all(value > 0 for value in run.manifest["l2"].to_pylist())


def _is_empty(run: hookstore.Run, _num_steps: int, _num_captures: int) -> None:
    assert run.manifest.num_rows == 0


OPTIONS: dict[str, tuple[dict[str, Any], Callable[[hookstore.Run, int, int], None]]] = {
    "everything": ({}, _is_whole),
    "select 8 of 64 samples": ({"select": {"sample": 8}}, _is_part),
    "stats too": ({"stats": True}, _has_statistics),
    "stats alone": ({"stats": "only"}, _has_statistics_alone),
    "ring, nothing fires": ({"last": _RING}, _is_empty),
    "idle": ({"batches": lambda batch: batch == 10**9}, _is_empty),
}


def compare_options(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    """Train with each of the options in turn."""
    contenders: dict[str, Contender] = {
        "no capture": Uncaptured(DEMO, scale.steps),
        **{name: Chosen(scratch, scale.steps, options, check) for name, (options, check) in OPTIONS.items()},
    }
    measured = interleave(benchmark, contenders, rounds=scale.rounds, prepare=scratch.renew)
    figures = {f"{name}, bytes": [taken["moved_bytes"] for taken in measured[name]] for name in OPTIONS}
    report(benchmark, measured, num_bytes=1, figures=figures, task=DEMO.name)


def test_options(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    compare_options(benchmark, scale, scratch)


def test_options_with_a_core_to_spare(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    torch.set_num_threads(1)
    compare_options(benchmark, scale, scratch)
