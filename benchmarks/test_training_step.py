"""What a training step costs while the activations and gradients of three layers are captured: six tensors, 19.3 MB."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from conftest import Scale, Scratch
from interleave import Contender, interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import hookstore
from hookstore.demo import DigitNet

TORCH_THREADS = 2
LAYERS = ("conv1", "conv2", "fc1")
KINDS = ("activation", "gradient")
BATCH_SIZE = 64
WARMUP_STEPS = 4
_KEPT_STEPS = 3  # the first of those that warm up; what was captured in them and in the last step is compared

Batch = tuple[torch.Tensor, torch.Tensor]
Take = Callable[[str, str, torch.Tensor], None]


class Block:
    """A new model and some batches, the same each time, for a number of steps after those that warm up."""

    def __init__(self, num_steps: int) -> None:
        torch.manual_seed(0)
        self.model = DigitNet()
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self._loss_fn = nn.CrossEntropyLoss()
        distinct = [(torch.randn(BATCH_SIZE, 1, 28, 28), torch.randint(0, 10, (BATCH_SIZE,))) for _ in range(4)]
        self.batches = [distinct[number % len(distinct)] for number in range(WARMUP_STEPS + num_steps)]

    def train(self, batches: Iterable[Batch], after_step: Callable[[int], None] = lambda step: None) -> list[float]:
        """Train over the batches; return the moments at which the steps that count began and ended."""
        moments = []
        for step, (images, labels) in enumerate(batches):
            self._optimizer.zero_grad()
            self._loss_fn(self.model(images), labels).backward()
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

        for layer in LAYERS:
            self.model.get_submodule(layer).register_forward_hook(watch(layer))


def timings(moments: list[float]) -> dict[str, float]:
    """Return the median and the slowest step, and what a step takes on average until everything is on the device."""
    steps = [end - start for start, end in itertools.pairwise(moments)]
    os.sync()
    durable_s = (time.perf_counter() - moments[0]) / len(steps)
    return {"seconds": statistics.median(steps), "slowest_s": max(steps), "durable_s": durable_s}


class Uncaptured:
    """Training alone."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def turn(self) -> dict[str, float]:
        """Train."""
        block = Block(self._num_steps)
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

    def __init__(self, num_steps: int) -> None:
        self.kept: dict[tuple[int, str, str], torch.Tensor] = {}
        self._num_steps = num_steps
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def turn(self) -> dict[str, float]:
        """Train and copy."""
        block = Block(self._num_steps)
        block.hook(self._take)
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
        assert len(self.kept) == (_KEPT_STEPS + 1) * len(LAYERS) * len(KINDS)
        assert all(tensor.any() for tensor in self.kept.values())

    @property
    def num_bytes(self) -> int:
        """Bytes that a step captures."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


class Recorded:
    """Recorded by hookstore."""

    def __init__(self, num_steps: int, scratch: Scratch, control: Copied) -> None:
        self._num_steps = num_steps
        self._path = scratch.path / "run"
        self._control = control

    def turn(self) -> dict[str, float]:
        """Train and record; until everything is on the device means until the recorder is closed."""
        block = Block(self._num_steps)
        with hookstore.record(block.model, self._path, layers=LAYERS, kinds=KINDS) as recorder:
            moments = block.train(recorder.batches(block.batches, epoch=0))
        return timings(moments)

    def verify(self) -> None:
        """Assert that the run holds every step, and bit by bit what the control copied out of the same training."""
        with hookstore.open(self._path) as run:
            for layer, kind in itertools.product(LAYERS, KINDS):
                assert len(run[layer][kind]) == WARMUP_STEPS + self._num_steps
            for (batch, layer, kind), expected in self._control.kept.items():
                assert np.array_equal(run[layer][kind][0, batch].view(np.uint32), expected.numpy().view(np.uint32)), (batch, layer, kind)


class Cloned:
    """Clones kept in memory."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._clones: list[torch.Tensor] = []

    def turn(self) -> dict[str, float]:
        """Train and clone."""
        block = Block(self._num_steps)
        block.hook(lambda layer, kind, tensor: self._clones.append(tensor.clone()))
        return timings(block.train(block.batches))

    def verify(self) -> None:
        """Assert that they are there, and let them go."""
        assert len(self._clones) == (WARMUP_STEPS + self._num_steps) * len(LAYERS) * len(KINDS)
        self._clones.clear()


class TorchSaved:
    """``torch.save`` in the hooks, a file for each tensor."""

    def __init__(self, num_steps: int, scratch: Scratch, control: Copied) -> None:
        self._num_steps = num_steps
        self._scratch = scratch
        self._control = control

    def turn(self) -> dict[str, float]:
        """Train and save."""
        block = Block(self._num_steps)
        num_saved = dict.fromkeys(itertools.product(LAYERS, KINDS), 0)

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


def test_training_step(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    control = Copied(scale.steps)
    contenders: dict[str, Contender] = {
        "copies alone": control,
        "torch.save": TorchSaved(scale.steps, scratch, control),
        "clones in memory": Cloned(scale.steps),
        "no capture": Uncaptured(scale.steps),
        "hookstore": Recorded(scale.steps, scratch, control),
    }
    measured = interleave(benchmark, contenders, rounds=2 * scale.rounds, prepare=scratch.renew)
    report(benchmark, measured, num_bytes=control.num_bytes, num_captures=len(LAYERS) * len(KINDS), num_steps=scale.steps)
