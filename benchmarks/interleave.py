"""Times several ways of doing the same work side by side: one round of each in turn, over and over, in one process.

Speeds of shared machines and disks drift by factors within minutes. What is compared is therefore not two medians but the two times of one round, and the
median of those ratios.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from pytest_benchmark.fixture import BenchmarkFixture

Round = dict[str, float]
"""What one round of one contender measured: ``seconds``, which is compared, ``wall_s``, ``cpu_s``, and what the contender adds."""

Spread = dict[str, float]
"""Median and range over the rounds: ``median``, ``low``, ``high``."""


class Contender(Protocol):
    """One way of doing the work."""

    def turn(self) -> Mapping[str, float] | None:
        """Do the work once; may return measurements of its own, of which ``seconds`` takes the place of the wall time."""

    def verify(self) -> None:
        """Assert, outside the time, that the last turn did it rightly."""


def interleave(
    benchmark: BenchmarkFixture,
    contenders: Mapping[str, Contender],
    *,
    rounds: int,
    warmup_rounds: int = 1,
    prepare: Callable[[], None] = lambda: None,
    finish: Callable[[], None] = lambda: None,
) -> dict[str, list[Round]]:
    """Time every contender in turn, after rounds that warm up.

    The last contender is the one that pytest-benchmark times as the benchmark; the others take their turns in its setup.

    Parameters
    ----------
    benchmark : BenchmarkFixture
        The fixture.
    contenders : mapping
        By name, in the order of their turns. Put beside each other what is to be compared most closely.
    rounds, warmup_rounds : int
        Rounds that count, and rounds before them that do not.
    prepare : callable
        Called before each turn, outside the time.
    finish : callable
        Called at the end of each turn, within the time.

    Returns
    -------
    dict
        For each contender its rounds.
    """
    measured: dict[str, list[Round]] = {name: [] for name in contenders}
    *others, subject = contenders

    def get_ready() -> None:
        prepare()
        gc.collect()  # so that nobody pays for the garbage of who came before

    def take_turn(name: str) -> None:
        started, cpu_started = time.perf_counter(), time.process_time()
        own = contenders[name].turn()
        finish()
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        measured[name].append({"seconds": wall_s, "wall_s": wall_s, "cpu_s": cpu_s, **(own or {})})

    def verify(name: str) -> None:
        contenders[name].verify()

    def let_others() -> None:
        for name in others:
            get_ready()
            take_turn(name)
            verify(name)
        get_ready()

    benchmark.pedantic(take_turn, args=(subject,), setup=let_others, teardown=verify, rounds=rounds, warmup_rounds=warmup_rounds)
    return {name: taken[-rounds:] for name, taken in measured.items()}


def report(
    benchmark: BenchmarkFixture,
    measured: Mapping[str, list[Round]],
    *,
    num_bytes: int | Mapping[str, int],
    figures: Mapping[str, Iterable[float]] | None = None,
    **facts: Any,
) -> None:
    """Put what was measured into the benchmark's ``extra_info``.

    Parameters
    ----------
    benchmark : BenchmarkFixture
        The fixture.
    measured : mapping
        From `interleave`.
    num_bytes : int or mapping
        Bytes that ``seconds`` stands for, of each contender if they differ. Times are compared per byte.
    figures : mapping, optional
        Figures made of several contenders: of each its value in every round.
    **facts : Any
        What else a reader of the numbers should know; JSON.
    """
    bytes_of = {name: num_bytes if isinstance(num_bytes, int) else num_bytes[name] for name in measured}
    contenders = {}
    for name, rounds in measured.items():
        medians = {key: statistics.median(taken[key] for taken in rounds) for key in rounds[0]}
        speeds = spread(bytes_of[name] / taken["seconds"] for taken in rounds)
        contenders[name] = {"num_bytes": bytes_of[name], "bytes_per_s": speeds, "median": medians, "rounds": rounds}

    def ratios(key: str) -> dict[str, dict[str, Spread]]:
        per_byte = {name: [taken[key] / bytes_of[name] for taken in rounds] for name, rounds in measured.items()}
        return {
            name: {other: spread(ours / theirs for ours, theirs in zip(per_byte[name], per_byte[other], strict=True)) for other in measured}
            for name in measured
        }

    benchmark.extra_info.update(
        torch_threads=torch.get_num_threads(),
        num_rounds=len(next(iter(measured.values()))),
        contenders=contenders,
        time_ratios=ratios("seconds"),
        cpu_ratios=ratios("cpu_s"),
        figures={name: spread(values) for name, values in (figures or {}).items()},
        **facts,
    )


def spread(values: Iterable[float]) -> Spread:
    """Return median and range."""
    found = list(values)
    return {"median": statistics.median(found), "low": min(found), "high": max(found)}
