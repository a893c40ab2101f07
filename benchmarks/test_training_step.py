"""What a training step costs while activations and gradients are captured, and while nothing is."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torchvision
from conftest import Scale, Scratch
from interleave import Contender, interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from workloads import Workload, assert_same_bits
from writers import RawWrites

import hookstore
from hookstore.demo import DigitNet

TORCH_THREADS = 2
KINDS = ("activation", "gradient")
WARMUP_STEPS = 4
_KEPT_STEPS = 3  # the first of those that warm up; what was captured in them and in the last step is compared
_IDLE_TICKS = 20_000

Batch = tuple[torch.Tensor, torch.Tensor]
Take = Callable[[str, str, torch.Tensor], None]


# What is trained --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train.

    Attributes
    ----------
    name : str
        How the table calls it.
    make_model : callable
        Makes the model.
    make_batch : callable
        Makes inputs and targets.
    loss_fn : callable
        The loss of outputs and targets.
    chooses : callable
        Says whether a layer, by name and module, is captured.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    chooses: Callable[[str, nn.Module], bool]


def images(num_images: int, *shape: int) -> Batch:
    """Return random images and labels of ten classes."""
    return torch.randn(num_images, *shape), torch.randint(0, 10, (num_images,))


def make_transformer() -> nn.Module:
    """Return an encoder of four blocks."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, nhead=8, dim_feedforward=1024, batch_first=True), num_layers=4)


DEMO = Task(
    "demo CNN, batch 64",
    DigitNet,
    lambda: images(64, 1, 28, 28),
    nn.functional.cross_entropy,
    lambda name, module: name in {"conv1", "conv2", "fc1"},
)
LARGER = {
    "resnet18": Task(
        "ResNet-18, 3×64×64, batch 16, all convolutions",
        lambda: torchvision.models.resnet18(num_classes=10),
        lambda: images(16, 3, 64, 64),
        nn.functional.cross_entropy,
        lambda name, module: isinstance(module, nn.Conv2d),
    ),
    "transformer": Task(
        "TransformerEncoder, 4 blocks of width 256, 8×128 tokens",
        make_transformer,
        lambda: (torch.randn(8, 128, 256), torch.randn(8, 128, 256)),
        nn.functional.mse_loss,
        lambda name, module: isinstance(module, nn.TransformerEncoderLayer),
    ),
}


class Block:
    """A new model and some batches, the same each time, for a number of steps after those that warm up."""

    def __init__(self, task: Task, num_steps: int) -> None:
        torch.manual_seed(0)
        self.model = task.make_model()
        self.layers = [name for name, module in self.model.named_modules() if task.chooses(name, module)]
        self._loss_fn = task.loss_fn
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        distinct = [task.make_batch() for _ in range(4)]
        self.batches = [distinct[number % len(distinct)] for number in range(WARMUP_STEPS + num_steps)]

    def train(self, batches: Iterable[Batch], after_step: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train over the batches; return the moments at which the steps that count began and ended."""
        moments = []
        for step, (inputs, targets) in enumerate(batches):
            self._optimizer.zero_grad()
            self._loss_fn(self.model(inputs), targets).backward()
            self._optimizer.step()
            after_step(step)
            if step >= WARMUP_STEPS - 1:
                moments.append(time.perf_counter())
        return moments

    def hook(self, take: Take) -> None:
        """Let ``take(layer, kind, tensor)`` see each activation and gradient, through the kinds of hooks that hookstore uses."""

        def watch(layer: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
            def see_gradient(gradient: torch.Tensor) -> None:
                take(layer, "gradient", gradient.detach())

            def see_output(module: nn.Module, arguments: object, output: torch.Tensor) -> None:
                take(layer, "activation", output.detach())
                output.register_hook(see_gradient)

            return see_output

        for layer in self.layers:
            self.model.get_submodule(layer).register_forward_hook(watch(layer))


def timings(moments: Sequence[float]) -> dict[str, float]:
    """Return the median and the slowest step, and what a step takes on average until everything is on the device."""
    steps = [end - start for start, end in itertools.pairwise(moments)]
    os.sync()
    durable_s = (time.perf_counter() - moments[0]) / len(steps)
    return {"seconds": statistics.median(steps), "slowest_s": max(steps), "durable_s": durable_s}


# Ways to train ----------------------------------------------------------------------------------------------------


class Uncaptured:
    """Training alone."""

    def __init__(self, task: Task, num_steps: int) -> None:
        self._task = task
        self._num_steps = num_steps

    def turn(self) -> dict[str, float]:
        """Train."""
        block = Block(self._task, self._num_steps)
        return timings(block.train(block.batches))

    def verify(self) -> None:
        """There is nothing to verify."""


class Copied:
    """The least that capturing needs: each tensor is copied into one buffer that lies ready.

    Attributes
    ----------
    kept : dict
        By batch, layer and kind, what was in the buffers after some steps.
    """

    def __init__(self, task: Task, num_steps: int) -> None:
        self.kept: dict[tuple[int, str, str], torch.Tensor] = {}
        self._task = task
        self._num_steps = num_steps
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}
        self._num_kept = 0

    def turn(self) -> dict[str, float]:
        """Train and copy."""
        block = Block(self._task, self._num_steps)
        block.hook(self._take)
        self._num_kept = (_KEPT_STEPS + 1) * len(block.layers) * len(KINDS)
        moments = block.train(block.batches, self._keep_first)
        measured = timings(moments)
        self._keep(len(block.batches) - 1)
        return measured

    def _take(self, layer: str, kind: str, tensor: torch.Tensor) -> None:
        buffer = self._buffers.get((layer, kind))
        if buffer is None:
            self._buffers[layer, kind] = tensor.clone()
        else:
            buffer.copy_(tensor)

    def _keep_first(self, step: int) -> None:
        if step < _KEPT_STEPS:
            self._keep(step)

    def _keep(self, batch: int) -> None:
        for (layer, kind), buffer in self._buffers.items():
            self.kept[batch, layer, kind] = buffer.clone()

    def verify(self) -> None:
        """Assert that everything was seen, and is something."""
        assert len(self.kept) == self._num_kept
        assert all(tensor.any() for tensor in self.kept.values())

    @property
    def num_captures(self) -> int:
        """Tensors that a step captures."""
        return len(self._buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes that a step captures."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Recorded:
    """Recorded by hookstore."""

    def __init__(self, task: Task, num_steps: int, scratch: Scratch, control: Copied) -> None:
        self._task = task
        self._num_steps = num_steps
        self._path = scratch.path / "run"
        self._control = control

    def turn(self) -> dict[str, float]:
        """Train and record; until everything is on the device means until the recorder is closed."""
        block = Block(self._task, self._num_steps)
        with hookstore.record(block.model, self._path, layers=self._task.chooses, kinds=KINDS) as recorder:
            moments = block.train(recorder.batches(block.batches, epoch=0))
        return timings(moments)

    def verify(self) -> None:
        """Assert that the run holds every step, and bit by bit what the control copied out of the same training."""
        num_captures = self._control.num_captures * (WARMUP_STEPS + self._num_steps)
        with hookstore.open(self._path) as run:
            assert run.info().statuses == {"ok": num_captures}
            for (batch, layer, kind), expected in self._control.kept.items():
                assert_same_bits(run[layer][kind][0, batch], expected)


class Cloned:
    """Clones kept in memory."""

    def __init__(self, task: Task, num_steps: int, control: Copied) -> None:
        self._task = task
        self._num_steps = num_steps
        self._control = control
        self._clones: list[torch.Tensor] = []

    def turn(self) -> dict[str, float]:
        """Train and clone."""
        block = Block(self._task, self._num_steps)
        block.hook(lambda layer, kind, tensor: self._clones.append(tensor.clone()))
        return timings(block.train(block.batches))

    def verify(self) -> None:
        """Assert that they are there, and let them go."""
        assert len(self._clones) == (WARMUP_STEPS + self._num_steps) * self._control.num_captures
        self._clones.clear()


class TorchSaved:
    """``torch.save`` in the hooks, a file for each tensor."""

    def __init__(self, task: Task, num_steps: int, scratch: Scratch, control: Copied) -> None:
        self._task = task
        self._num_steps = num_steps
        self._scratch = scratch
        self._control = control

    def turn(self) -> dict[str, float]:
        """Train and save."""
        block = Block(self._task, self._num_steps)
        num_saved = dict.fromkeys(itertools.product(block.layers, KINDS), 0)

        def take(layer: str, kind: str, tensor: torch.Tensor) -> None:
            torch.save(tensor, self._path(num_saved[layer, kind], layer, kind))
            num_saved[layer, kind] += 1

        block.hook(take)
        return timings(block.train(block.batches))

    def verify(self) -> None:
        """Compare the files with what the control copied."""
        for (batch, layer, kind), expected in self._control.kept.items():
            assert torch.equal(torch.load(self._path(batch, layer, kind), weights_only=True), expected)

    def _path(self, batch: int, layer: str, kind: str) -> Path:
        return self._scratch.path / f"{layer}-{kind}-{batch}.pt"


def compare_steps(
    benchmark: BenchmarkFixture, contenders: dict[str, Contender], control: Copied, task: Task, scratch: Scratch, *, rounds: int
) -> None:
    """Compare, and beside them see what the disk takes."""
    raw = Workload(1, 32, (1 << 20,))  # 134 MB
    measured = interleave(benchmark, {"raw": RawWrites(raw, scratch), **contenders}, rounds=rounds, prepare=scratch.renew)
    num_bytes = {name: raw.num_bytes if name == "raw" else control.num_bytes for name in measured}
    raw_speeds = [raw.num_bytes / taken["seconds"] for taken in measured["raw"]]
    step_speeds = [control.num_bytes / taken["seconds"] for taken in measured["no capture"]]
    figures = {"disk share": [needed / there for needed, there in zip(step_speeds, raw_speeds, strict=True)]}
    report(benchmark, measured, num_bytes=num_bytes, figures=figures, task=task.name, num_captures=control.num_captures)


def test_demo_step(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    control = Copied(DEMO, scale.steps)
    contenders: dict[str, Contender] = {
        "copies alone": control,
        "torch.save": TorchSaved(DEMO, scale.steps, scratch, control),
        "clones in memory": Cloned(DEMO, scale.steps, control),
        "no capture": Uncaptured(DEMO, scale.steps),
        "hookstore": Recorded(DEMO, scale.steps, scratch, control),
    }
    # The control takes its turn beside hookstore, in the next round: what it kept is what the turn of hookstore before is compared with.
    compare_steps(benchmark, contenders, control, DEMO, scratch, rounds=2 * scale.rounds)


def test_demo_step_with_a_core_to_spare(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    """As on a host where training does not take every core: then the writer's time is not training's."""
    torch.set_num_threads(1)
    control = Copied(DEMO, scale.steps)
    contenders: dict[str, Contender] = {
        "copies alone": control,
        "no capture": Uncaptured(DEMO, scale.steps),
        "hookstore": Recorded(DEMO, scale.steps, scratch, control),
    }
    compare_steps(benchmark, contenders, control, DEMO, scratch, rounds=2 * scale.rounds)


@pytest.mark.parametrize("model", list(LARGER))
def test_larger_step(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch, model: str) -> None:
    task = LARGER[model]
    control = Copied(task, scale.steps)
    contenders: dict[str, Contender] = {
        "copies alone": control,
        "no capture": Uncaptured(task, scale.steps),
        "hookstore": Recorded(task, scale.steps, scratch, control),
    }
    compare_steps(benchmark, contenders, control, task, scratch, rounds=scale.rounds)


# A step on which nothing is recorded ------------------------------------------------------------------------------


class Idle:
    """A recorder whose schedule leaves out every batch of the block."""

    def __init__(self, task: Task, num_steps: int, scratch: Scratch) -> None:
        self._task = task
        self._num_steps = num_steps
        self._path = scratch.path / "run"
        self._num_hooks: list[int] = []

    def turn(self) -> dict[str, float]:
        """Train, and time by itself what an idle tick of the clock costs a loop that does nothing."""
        block = Block(self._task, self._num_steps)
        self._num_hooks = []

        def count_hooks(step: int) -> None:
            if step < WARMUP_STEPS - 1:  # outside the time
                self._num_hooks.append(sum(num_hooks(module) for module in block.model.modules()))

        with hookstore.record(
            block.model, self._path, layers=self._task.chooses, kinds=KINDS, batches=lambda batch: batch == _IDLE_TICKS
        ) as recorder:
            moments = block.train(recorder.batches(block.batches, epoch=0), count_hooks)
            measured = timings(moments)
            started = time.perf_counter()
            for _ in range(_IDLE_TICKS):
                pass
            bare = time.perf_counter()
            for _ in recorder.batches(range(_IDLE_TICKS), epoch=1):
                pass
            ticked = time.perf_counter()
        return {**measured, "tick_s": ((ticked - bare) - (bare - started)) / _IDLE_TICKS}

    def verify(self) -> None:
        """Assert that no module had a hook, and that nothing was recorded."""
        assert self._num_hooks == [0] * (WARMUP_STEPS - 1)
        with hookstore.open(self._path) as run:
            assert run.manifest.num_rows == 0


def num_hooks(module: nn.Module) -> int:
    """Count the forward hooks of a module."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def test_idle_step(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    contenders: dict[str, Contender] = {
        "no recorder again": Uncaptured(DEMO, scale.steps),  # what the noise is
        "no recorder": Uncaptured(DEMO, scale.steps),
        "idle recorder": Idle(DEMO, scale.steps, scratch),
    }
    measured = interleave(benchmark, contenders, rounds=2 * scale.rounds, prepare=scratch.renew)
    figures = {"tick": [taken["tick_s"] for taken in measured["idle recorder"]]}
    report(benchmark, measured, num_bytes=1, figures=figures, task=DEMO.name)
