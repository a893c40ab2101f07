"""A model that breaks where it is told to, its training, and what a flight recorder leaves of it."""

from __future__ import annotations

import torch
from torch import nn

import hookstore


class Poisoned(nn.Module):
    """A linear layer whose output has NaN at one index, in the calls asked for."""

    def __init__(self, calls=(), index=(3, 2), value=float("nan"), size=6):
        super().__init__()
        self.inner = nn.Linear(size, size)
        self.calls = {*calls}
        self.index = index
        self.value = value
        self.num_calls = 0

    def forward(self, inputs):
        output = self.inner(inputs)
        if self.num_calls in self.calls:
            output = output.clone()
            output[self.index] = self.value
        self.num_calls += 1
        return output


def model_of(calls=(), **options):
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Poisoned(calls, **options), nn.Linear(6, 2))


def batch_of(number):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(number))


def train(model, batches, recorder, *, rate=0.0):
    """Train; with a rate what is once NaN stays so, without there are no steps."""
    for number in batches:
        recorder.at(epoch=0, batch=number)
        take_step(model, number, rate)


def take_step(model, number, rate):
    model.zero_grad()
    model(batch_of(number)).square().sum().backward()
    if rate:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)


def rows(path, **wanted):
    """Return the rows of the manifest that have these values."""
    run = hookstore.open(path)
    found = run.manifest.to_pylist()
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


def batches_on_disk(path, **wanted):
    return sorted({row["batch"] for row in rows(path, status="ok", **wanted)})


def fired(path):
    """Return batch and reason of each firing."""
    return [(row["batch"], row["reason"]) for row in rows(path, status="fired")]
