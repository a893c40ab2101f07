"""Every model of the zoo computes the very same bits with and without recording, and returns the very same objects."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
import zoo
from torch import nn

import hookstore
from hookstore.format import KINDS

PLAN = (("train", 0), ("train", 1), ("eval", 2), ("train", 3), ("train", 4), ("train", 5), ("no_grad", 6))
FAST_PATH = "transformer"  # whose encoder layers compute in another way where gradients are off and nothing is hooked

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_syncs"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings("ignore::hookstore.CaptureWarning"),
]


def looks(value, arguments):
    """Say everything about what a module returned that a recorder could have changed without changing its elements."""
    described = []
    for path, item in zoo.flatten(value):
        same = [other_path for other_path, other in zoo.flatten(arguments) if other is item]
        described.append((path, type(item).__name__, same))
        if isinstance(item, torch.Tensor):
            base = None if item._base is None else [other_path for other_path, other in zoo.flatten(arguments) if other is item._base]
            described.append(
                (
                    item.shape,
                    item.stride(),
                    item.storage_offset(),
                    item._version,
                    item.requires_grad,
                    item.is_leaf,
                    type(item.grad_fn).__name__,
                    base,
                )
            )
    return type(value).__name__, described


@contextlib.contextmanager
def watched_calls():
    """Describe what every module returns to whoever calls it; not by a hook but around the call."""
    original, seen = nn.Module.__call__, []

    def call(module, *args, **kwargs):
        output = original(module, *args, **kwargs)
        seen.append((type(module).__name__, looks(output, (args, kwargs))))
        return output

    nn.Module.__call__ = call
    try:
        yield seen
    finally:
        nn.Module.__call__ = original


def train(name, model, recorder=None):
    """Train five steps, with one of evaluation and one without gradients; return everything that recording could have changed."""
    optimizer = zoo.optimizer_of(model)
    results = []

    def backward(loss):
        results.append(loss)
        if loss.requires_grad:
            loss.backward()

    with watched_calls() as calls:
        for phase, batch in PLAN[: 6 if name == FAST_PATH else 7]:
            with recorder.at(epoch=0, batch=batch) if recorder else contextlib.nullcontext(), torch.set_grad_enabled(phase != "no_grad"):
                zoo.take_step(name, model, phase, batch, backward)
                results += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
                if phase == "train":
                    results = [tensor.detach().clone() for tensor in results]
                    optimizer.step()
                results.append(torch.get_rng_state())
    results += [*model.state_dict().values(), *(value for state in optimizer.state.values() for value in state.values())]
    return [zoo.bits(tensor) for tensor in results if isinstance(tensor, torch.Tensor)], calls


def hooks_of(model):
    return {
        (name, attribute): len(hooks)
        for name, module in model.named_modules()
        for attribute, hooks in vars(module).items()
        if "hook" in attribute and isinstance(hooks, dict) and hooks
    }


def hooks_of_optimizers():
    optimizers = sys.modules["torch.optim.optimizer"]
    return {*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks}


@zoo.over_the_zoo()
def test_bits_objects_and_random_numbers_are_the_same(tmp_path, name):
    plain, recorded = zoo.fresh(name), zoo.fresh(name)
    values, calls = train(name, plain)
    before, optimizer_hooks = hooks_of(recorded), hooks_of_optimizers()
    with hookstore.record(
        recorded,
        tmp_path / "run",
        layers=lambda layer, module: layer == "" or next(module.children(), None) is None,
        kinds=KINDS,
        phases="train" if name in zoo.MANY_LAYERS else ("train", "eval"),
        epochs=range(1),
        batches=range(7),
        buffer_bytes=64 << 20,
    ) as recorder:
        watched_values, watched = train(name, recorded, recorder)
        assert hooks_of(recorded) != before
    assert hooks_of(recorded) == before, "hooks were left on the model"
    assert hooks_of_optimizers() <= optimizer_hooks
    assert len(watched) == len(calls)
    different = [(ours, theirs) for ours, theirs in zip(watched, calls, strict=True) if ours != theirs]
    assert not different, f"{len(different)} of {len(calls)} calls returned something else, first {different[0]}"
    assert len(watched_values) == len(values)
    different = [place for place, (ours, theirs) in enumerate(zip(watched_values, values, strict=True)) if ours != theirs]
    assert not different, f"tensors {different} of {len(values)} differ"
    with hookstore.open(tmp_path / "run") as run:
        assert len(run.kinds) == len(KINDS)
        assert run.batches(0, phase="train") == [0, 1, 3, 4, 5] if name != "gan" else True


@pytest.mark.parametrize("layers", ["*", "", "decoder.*"])
def test_where_the_fast_path_gives_way_values_move_by_rounding_only(tmp_path, layers):
    model = zoo.fresh(FAST_PATH).eval()
    source, target = torch.randn(2, 5, 8), torch.randn(2, 4, 8)
    with torch.no_grad():
        plain = model(source, target)
        with hookstore.record(model, tmp_path / "run", layers=layers, phases="eval") as recorder, recorder.at(epoch=0, batch=0):
            watched = model(source, target)
        if layers == "*":
            torch.testing.assert_close(watched, plain, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(watched, plain)  # no hook on what computes fast
        assert torch.equal(model(source, target), plain)  # and it is fast again
