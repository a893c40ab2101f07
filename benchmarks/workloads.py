"""What is captured: layers that return what they are given, and tensors that lie ready."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class Workload:
    """A float32 tensor for each batch and layer. Iterating gives them as (layer, batch, tensor), batch by batch; layers are numbered.

    Parameters
    ----------
    num_layers, num_batches : int
        Layers and batches.
    shape : tuple of int
        Shape of each tensor.
    num_distinct : int
        Tensors that lie ready and take turns; a prime, so that no layer always gets the same one.
    relu : bool
        Whether half of the values are zero, as after a ReLU; normally distributed otherwise.
    requires_grad : bool
        Whether the tensors are results of a graph, as in training.
    """

    def __init__(
        self,
        num_layers: int,
        num_batches: int,
        shape: tuple[int, ...],
        *,
        num_distinct: int = 7,
        relu: bool = False,
        requires_grad: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(shape, generator=generator) for _ in range(num_distinct)]
        self.distinct = [tensor.relu() for tensor in drawn] if relu else drawn
        self.num_layers = num_layers
        self.num_batches = num_batches
        self.shape = shape
        self.num_tensors = num_layers * num_batches
        self.tensor_bytes = 4 * math.prod(shape)
        self.num_bytes = self.num_tensors * self.tensor_bytes
        given = [tensor.requires_grad_().clone() for tensor in self.distinct] if requires_grad else self.distinct
        self._batches = [[given[self.index(layer, batch)] for layer in range(num_layers)] for batch in range(num_distinct)]

    def index(self, layer: int, batch: int) -> int:
        """Return which of the distinct tensors it is."""
        return (self.num_layers * batch + layer) % len(self.distinct)

    def batch(self, batch: int) -> list[torch.Tensor]:
        """Return the tensors of one batch, one for each layer."""
        return self._batches[batch % len(self._batches)]

    def __getitem__(self, where: tuple[int, int]) -> torch.Tensor:
        return self.distinct[self.index(*where)].detach()

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        for batch in range(self.num_batches):
            for layer in range(self.num_layers):
                yield layer, batch, self[layer, batch]

    def model(self) -> nn.Sequential:
        """Return layers that return the tensors that they are given; call each by itself."""
        return nn.Sequential(*(nn.Identity() for _ in range(self.num_layers)))


def see_nothing(module: nn.Module, arguments: object, output: object) -> None:
    """Do nothing: the least that a forward hook can cost."""


def assert_same_bits(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    """Assert that an array has the shape, the dtype and every bit of a float32 tensor."""
    assert (found.shape, found.dtype) == (tuple(expected.shape), np.float32)
    assert np.array_equal(found.view(np.uint32), expected.numpy().view(np.uint32))


def size_of(path: Path) -> int:
    """Return the bytes of a directory's files."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def read_all(path: Path) -> None:
    """Read every file of a directory: whoever reads one first decides in how large pieces it is cached; let that be no contender."""
    for file in path.rglob("*"):
        if file.is_file():
            file.read_bytes()
