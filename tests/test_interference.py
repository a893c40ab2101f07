"""The model computes the very same bits with and without recording (eager)."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn

import hookstore
from hookstore.demo import DigitNet

# In one model a layer in place edits what another returned, of which a gradient is then skipped with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*edited in place:hookstore.CaptureWarning")

KINDS = ("activation", "gradient", "input", "input_gradient", "parameter", "parameter_gradient")


class InPlaceNet(nn.Module):
    """In-place layers, views, dropout, a residual sum and a batch norm: what hooks are known to disturb."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.flatten = nn.Flatten(2)
        self.project = nn.Linear(64, 16)
        self.drop = nn.Dropout(0.3, inplace=True)
        self.identity = nn.Identity()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        features = self.relu(self.norm(self.conv(images)))
        features = self.project(self.flatten(features))
        features += features.mean(dim=1, keepdim=True)
        same = self.identity(features)
        assert same is features
        return self.head(self.drop(same).flatten(1))


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    return nn.Sequential(nn.Linear(64, 16), nn.Unflatten(0, (2, 4)), nn.TransformerEncoder(layer, 2), nn.Flatten(0, 1), nn.Linear(16, 10))


MODELS = {
    "digits": (DigitNet, (8, 1, 28, 28)),
    "in_place": (InPlaceNet, (8, 1, 8, 8)),
    "transformer": (transformer, (8, 64)),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), (2, 3, 32, 32)),
    "lstm": (lambda: nn.Sequential(nn.Unflatten(1, (8, 8)), nn.LSTM(8, 10, batch_first=True), TakeLast()), (8, 64)),
}


class TakeLast(nn.Module):
    def forward(self, outputs):
        return outputs[0][:, -1]


def train(model, shape, recorder=None, steps=4):
    """Train some steps; return everything that recording could have changed."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(shape), torch.randint(0, 10, shape[:1])) for _ in range(steps)]
    losses, gradients = [], []
    for images, labels in batches if recorder is None else recorder.batches(batches, epoch=0):
        optimizer.zero_grad()
        images.requires_grad_()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        gradients += [parameter.grad.clone() for parameter in model.parameters()] + [images.grad.clone()]
    return [*losses, *gradients, *(value.clone() for value in model.state_dict().values()), torch.rand(3), torch.get_rng_state()]


def called(name, _module):
    """Select every layer that is called; MultiheadAttention uses the weights of its out_proj without calling it."""
    return not name.endswith("out_proj")


@pytest.mark.parametrize(
    ("name", "every"), [("digits", 1), ("in_place", 1), ("in_place", 2), ("transformer", 1), ("resnet18", 2), ("lstm", 1)]
)
def test_loss_gradients_weights_and_random_numbers_are_bit_equal(tmp_path, name, every):
    make, shape = MODELS[name]
    model = make()
    recorded = copy.deepcopy(model)
    plain = train(model, shape)
    with hookstore.record(recorded, tmp_path / "run", layers=called, kinds=KINDS, every=every, buffer_bytes=16 << 20) as recorder:
        watched = train(recorded, shape, recorder)
    again = train(recorded, shape)  # and nothing lingers: the same weights train on alike
    for ours, theirs in zip(watched, plain, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(again, train(model, shape), strict=True):
        assert torch.equal(ours, theirs)
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == list(range(0, 4, every))
        assert run.kinds == list(KINDS)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_stored_is_what_the_model_computed(tmp_path, name):
    """Activations, inputs and gradients of every layer against clones and retained gradients of an unrecorded twin."""
    make, shape = MODELS[name]
    model = make()
    twin = copy.deepcopy(model)
    outputs, inputs = {}, {}

    def keep(layer):
        def hook(_module, arguments, output):
            for leaf, tensor in leaves(output):
                outputs.setdefault((layer, leaf), []).append(tensor.detach().clone())
            for leaf, tensor in leaves(arguments[0] if len(arguments) == 1 else arguments):
                inputs.setdefault((layer, leaf), []).append(tensor.detach().clone())

        return hook

    for layer, module in twin.named_modules():
        if not isinstance(module, nn.ReLU | nn.Dropout) or not module.inplace:
            module.register_forward_hook(keep(layer))
    train(twin, shape, steps=2)
    with hookstore.record(model, tmp_path / "run", layers=called, kinds=KINDS, buffer_bytes=16 << 20) as recorder:
        train(model, shape, recorder, steps=2)
    with hookstore.open(tmp_path / "run") as run:
        assert outputs
        for kept, kind in ((outputs, "activation"), (inputs, "input")):
            for (layer, leaf), tensors in kept.items():
                captures = run[layer][kind]
                calls = len(tensors) // 2
                assert captures.rows["leaf"].to_pylist().count(leaf) == len(tensors)
                for index, tensor in enumerate(tensors):
                    batch, call = divmod(index, calls)
                    assert torch.equal(captures.tensor(0, batch, call, leaf=leaf), tensor), (layer, kind, leaf, batch, call)


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [("", value)]
    return [
        (f"{position}.{leaf}" if leaf else str(position), tensor)
        for position, item in enumerate(value)
        if item is not None
        for leaf, tensor in leaves(item)
    ]


@pytest.mark.parametrize("name", ["digits", "transformer"])
def test_gradients_equal_those_of_full_backward_hooks(tmp_path, name):
    """Where full backward hooks work at all (no in-place edits), ours see the same bits."""
    make, shape = MODELS[name]
    model = make()
    twin = copy.deepcopy(model)
    kept = {}
    wanted = [
        layer
        for layer, module in twin.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d | nn.LayerNorm) and called(layer, module)
    ]
    for layer in wanted:
        twin.get_submodule(layer).register_full_backward_hook(
            lambda _module, _inputs, gradients, layer=layer: kept.setdefault(layer, []).append(gradients[0].clone())
        )
    train(twin, shape, steps=2)
    with hookstore.record(model, tmp_path / "run", layers=wanted, kinds="gradient", buffer_bytes=16 << 20) as recorder:
        train(model, shape, recorder, steps=2)
    with hookstore.open(tmp_path / "run") as run:
        assert len(kept) == len(wanted)
        for layer, gradients in kept.items():
            for batch, gradient in enumerate(gradients):
                assert torch.equal(run[layer].gradient.tensor(0, batch), gradient), (layer, batch)
