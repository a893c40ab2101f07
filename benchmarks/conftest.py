"""Options and fixtures of the benchmarks; ``run.py`` runs them and prints the table."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes
    ----------
    rounds : int
        Rounds of every contender.
    batches : int
        Batches that the capture benchmark writes of each of its two layers.
    steps : int
        Training steps of each block that are timed.
    reads : int
        Batches that a round reads.
    """

    rounds: int
    batches: int
    steps: int
    reads: int


class Scratch:
    """The directory that each turn writes into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def renew(self) -> None:
        """Remove what the last turn wrote, and let the device settle."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        os.sync()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hookstore benchmarks")
    group.addoption("--quick", action="store_true", help="few and small rounds, to see that the benchmarks work")
    group.addoption("--hookstore-dir", metavar="DIR", help="directory on the disk to measure (default: the system's temporary directory)")


@pytest.fixture
def scale(request: pytest.FixtureRequest) -> Scale:
    if request.config.getoption("--quick"):
        return Scale(rounds=3, batches=8, steps=5, reads=4)
    return Scale(rounds=5, batches=40, steps=12, reads=16)


@pytest.fixture
def scratch(request: pytest.FixtureRequest) -> Iterator[Scratch]:
    parent = request.config.getoption("--hookstore-dir")
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hookstore-benchmark-", dir=parent) as directory:
        yield Scratch(Path(directory) / "turn")


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give torch as many threads as the module says, however many CPUs there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.module.TORCH_THREADS)
    yield
    torch.set_num_threads(before)
