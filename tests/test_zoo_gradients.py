"""Over the zoo: what each call adds to the gradients of its inputs, what the optimizer sees of each parameter, and values in the form they had."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import test_zoo
import torch
import zoo
from torch import nn

import hookstore

pytestmark = test_zoo.pytestmark


@zoo.over_the_zoo
def test_shares_and_parameter_gradients_are_what_autograd_says(tmp_path, name):
    truth = test_zoo.compare(name, tmp_path / "run", ("input_gradient", "parameter_gradient"))
    assert {key[0] for key in truth.values} == {"input_gradient", "parameter_gradient"}


def alike(stored, returned):
    """Say whether a value that was read has the form, and holds the bits, of one that a module returned."""
    if returned is None:
        return stored is None
    if isinstance(returned, torch.Tensor):
        return isinstance(stored, np.ndarray) and zoo.bits(torch.from_numpy(stored.copy())) == zoo.bits(returned)
    if isinstance(returned, dict):
        return list(stored) == list(returned) and all(alike(stored[key], returned[key]) for key in returned)
    if isinstance(returned, tuple | list):
        names = getattr(returned, "_fields", None)
        return (
            len(stored) == len(returned)
            and isinstance(stored, list) == isinstance(returned, list)
            and (names is None or tuple(stored._fields) == tuple(names))
            and all(map(alike, stored, returned))
        )
    return isinstance(stored, np.ndarray) is False


@pytest.mark.parametrize("name", ["googlenet", "language_model", "cells", "decoder", "odd_layers", "faster_rcnn", "bert", "gpt2", "t5"])
def test_what_is_read_has_the_form_that_the_module_returned(tmp_path, name):
    """Root and children that return more than one tensor: tuples, dicts, named results, packed sequences, outputs of transformers."""
    model, twin = zoo.fresh(name), zoo.fresh(name)
    returned = {}
    for layer, module in twin.named_modules():
        if type(module).forward is nn.Module.forward:  # a container
            continue

        def forward(*args, original=module.forward, layer=layer, **kwargs):
            output = original(*args, **kwargs)
            returned.setdefault(layer, copied(output))
            return output

        module.forward = forward
    zoo.take_step(name, twin, "train", 0, lambda _loss: None)
    nested = {layer for layer, value in returned.items() if not isinstance(value, torch.Tensor)}
    assert nested
    with (
        warnings.catch_warnings(),
        hookstore.record(model, tmp_path / "run", layers=lambda layer, _module: layer in nested, buffer_bytes=16 << 20) as recorder,
        recorder.at(epoch=0, batch=0),
    ):
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        zoo.take_step(name, model, "train", 0, lambda _loss: None)
    with hookstore.open(tmp_path / "run") as run:
        for layer in nested:
            stored = run[layer].activation[0, 0]
            assert alike(stored, returned[layer]), (layer, stored, returned[layer])


def copied(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(copied, value))
    if isinstance(value, tuple) and hasattr(value, "n_sequence_fields"):
        return type(value)(map(copied, value))
    return type(value)(map(copied, value)) if isinstance(value, tuple | list) else value
