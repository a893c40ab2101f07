"""Options and fixtures of the benchmarks; ``run.py`` runs them and prints the table."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGES = ("torch", "torchvision", "numpy", "zarr", "tensorstore", "safetensors", "h5py", "pyarrow", "crc32c", "numcodecs")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes
    ----------
    rounds : int
        Rounds of every contender.
    batches, peer_batches : int
        Batches that bulk capture writes of each of its six layers, and that its slower contenders do.
    steps : int
        Training steps of each block that are timed.
    reads : int
        Batches that a round reads.
    gathered_batches : int
        Captures of the layer that rows are gathered from.
    call_batches : int
        Batches of 200 small captures that are timed one by one.
    small_captures, many_captures : int
        Small captures of each of several rounds, and of the one long one.
    """

    rounds: int
    batches: int
    peer_batches: int
    steps: int
    reads: int
    gathered_batches: int
    call_batches: int
    small_captures: int
    many_captures: int


FULL = Scale(
    rounds=5,
    batches=40,
    peer_batches=8,
    steps=12,
    reads=16,
    gathered_batches=512,
    call_batches=250,
    small_captures=50_000,
    many_captures=1_000_000,
)
QUICK = Scale(
    rounds=2,
    batches=4,
    peer_batches=1,
    steps=3,
    reads=4,
    gathered_batches=64,
    call_batches=10,
    small_captures=4_000,
    many_captures=20_000,
)


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


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add what the figures depend on."""
    directory = os.path.realpath(config.getoption("--hookstore-dir") or tempfile.gettempdir())
    machine_info["num_cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine_info["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine_info["load_average"] = os.getloadavg()
    machine_info["directory"] = directory
    machine_info["file_system"] = _file_system(directory)
    machine_info["packages"] = {package: importlib.metadata.version(package) for package in PACKAGES}


def _file_system(directory: str) -> str:
    """Return device and type of the file system that a directory is on, where the system lists them."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    fields = [line.split()[:3] for line in mounts.read_text().splitlines()]
    above = [(point, device, kind) for device, point, kind in fields if os.path.commonpath([point, directory]) == point]
    _, device, kind = max(above, key=lambda mount: len(mount[0]))
    return f"{kind} on {device}"


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Scale:
    return QUICK if request.config.getoption("--quick") else FULL


@pytest.fixture(scope="session")
def directory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Make a directory on the disk to measure, gone at the end."""
    parent = request.config.getoption("--hookstore-dir")
    if parent is not None:
        os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hookstore-benchmark-", dir=parent) as made:
        yield Path(made)


@pytest.fixture
def scratch(directory: Path) -> Iterator[Scratch]:
    made = Scratch(directory / "turn")
    yield made
    shutil.rmtree(made.path, ignore_errors=True)


@pytest.fixture(autouse=True)
def torch_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give torch as many threads as the module says, however many CPUs there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.module.TORCH_THREADS)
    yield
    torch.set_num_threads(before)
