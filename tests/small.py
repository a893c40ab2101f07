"""Small models and recordings, and what is read of them."""

from __future__ import annotations

import collections
import dataclasses

import torch
from torch import nn

import hookstore


class Adapter(nn.Module):
    """Adds to what another module returns."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, inputs):
        return self.base(inputs) + 100


class Does(nn.Module):
    """Does what a function does."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@dataclasses.dataclass
class Open:
    """Holds two values."""

    one: torch.Tensor
    two: object = None


def linear(*rows):
    """Return a layer with these weights and no bias."""
    weight = torch.tensor(rows)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def recording(model, path, **options):
    """Record with a small buffer."""
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, **options})


def values(captures, *where, **options):
    """Return a capture as lists."""
    return captures.get(*where, **options).tolist()


def loss_of(output):
    """Return a loss whose gradient is not the same everywhere."""
    return output.square().sum()


def tensors_of(value):
    """Return the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict | collections.UserDict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in tensors_of(item)]
