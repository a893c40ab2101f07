from __future__ import annotations

import re

import pytest
from torch import nn

import hookstore
from hookstore.selection import select_layers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.conv2 = nn.Conv2d(2, 2, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)


def names(model, layers=None):
    return [layer.name for layer in select_layers(model, layers)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ["conv1", "conv2", "blocks.0.0", "blocks.0.1", "blocks.1", "head"]),
        ("conv1", ["conv1"]),
        ("conv*", ["conv1", "conv2"]),
        ("blocks.*", ["blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1"]),
        ("", [""]),
        (re.compile(r"^blocks\.\d$"), ["blocks.0", "blocks.1"]),
        (re.compile(r"0\.1"), ["blocks.0.1"]),
        (nn.Linear, ["blocks.0.0", "blocks.1", "head"]),
        (lambda name, module: name.endswith("1") and isinstance(module, nn.Conv2d), ["conv1"]),
        (["head", nn.Conv2d, "conv1"], ["conv1", "conv2", "head"]),
    ],
)
def test_selects_in_the_models_order(layers, expected):
    assert names(Net(), layers) == expected


def test_everything_leaves_out_containers_that_are_never_called():
    assert names(Net(), "*") == ["", "conv1", "conv2", "blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "head"]


def test_shared_module_is_one_layer_with_aliases():
    shared = nn.ReLU()
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), shared), "b": nn.Sequential(shared)})
    for pattern in ("a.1", "b.0", nn.ReLU):
        (layer,) = select_layers(model, pattern)
        assert (layer.name, layer.aliases) == ("a.1", ("b.0",))


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ("conv3", ["'conv3' matches no module", "nearest names", "'conv1'"]),
        (re.compile("transformer"), ["regular expression 'transformer'", "matches no module"]),
        (nn.LSTM, ["type LSTM", "the model has", "'conv1'"]),
        (["conv1", "missing"], ["'missing' matches no module"]),
        ("blocks", ["matches only 'blocks'", "ModuleList", "never called", "blocks.*"]),
        ([], ["layers is empty"]),
        (3, ["expected a glob", "got 3 of type int"]),
        ([3], ["expected a glob", "got 3 of type int"]),
    ],
)
def test_selection_that_matches_nothing_says_what_there_is(layers, parts):
    with pytest.raises(hookstore.SelectionError) as caught:
        select_layers(Net(), layers)
    assert isinstance(caught.value, ValueError)
    for part in parts:
        assert part in str(caught.value)
