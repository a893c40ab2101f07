"""Activation checkpointing of every kind: one record for each layer and call, of the first pass, gradients included."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from small import linear, values
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import hookstore

KINDS = ("activation", "gradient", "input", "input_gradient")


def recording(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, "kinds": KINDS, **options})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class LookAlike(torch.autograd.Function):
    """Checkpointing as other libraries write it: another name, other arguments."""

    @staticmethod
    def forward(ctx, count, run, *inputs):
        ctx.run = run
        ctx.random_state = torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return run(*inputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.random_state)
            outputs = ctx.run(*inputs)
        torch.autograd.backward(outputs, gradients)
        return None, None, *(tensor.grad for tensor in inputs)


def selective(run, *inputs):
    def policy(_context, operation, *_arguments, **_options):
        saves = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(run, *inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))


HOW = {
    "none": lambda run, *inputs: run(*inputs),
    "reentrant": lambda run, *inputs: checkpoint(run, *inputs, use_reentrant=True),
    "not_reentrant": lambda run, *inputs: checkpoint(run, *inputs, use_reentrant=False),
    "selective": selective,
    "sequential": lambda run, inputs: checkpoint_sequential(run, 2, inputs, use_reentrant=True),
    "sequential_not_reentrant": lambda run, inputs: checkpoint_sequential(run, 2, inputs, use_reentrant=False),
    "look_alike": lambda run, *inputs: LookAlike.apply(3, run, *inputs),
}


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.first = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.last(HOW[self.how](self.block, self.first(inputs)))


def captures(path):
    with hookstore.open(path) as run:
        found = {}
        for row in run.manifest.to_pylist():
            assert row["status"] == "ok"
            key = tuple(row[name] for name in ("layer", "kind", "leaf", "batch", "call", "backward"))
            assert key not in found
            found[key] = run[row["layer"]][row["kind"]].tensor(
                0, row["batch"], row["call"], leaf=row["leaf"], backward=row["backward"] if "gradient" in row["kind"] else None
            )
        return found


def train(model, path, name):
    torch.manual_seed(3)
    batches = [torch.randn(5, 3) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    with recording(model, path, layers=["first", "last", "block.*" if "sequential" in name else "block*"]) as recorder:
        for inputs in recorder.batches(batches, epoch=0):
            optimizer.zero_grad()
            model(inputs).pow(2).sum().backward()
            optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("how", [how for how in HOW if how != "none"])
def test_same_records_as_without_checkpointing(tmp_path, how):
    plain = Model("none")
    model = copy.deepcopy(plain)
    model.how = how
    for ours, theirs in zip(train(model, tmp_path / "ours", how), train(plain, tmp_path / "theirs", how), strict=True):
        assert torch.equal(ours, theirs)
    ours, theirs = captures(tmp_path / "ours"), captures(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def test_several_calls_of_one_layer_and_one_without_grad_between(path):
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear([2.0])

        def run(self, inputs):
            first = self.layer(inputs)
            with torch.no_grad():
                factor = self.layer(torch.ones(1, 1))
            return self.layer(first) * factor

        def forward(self, inputs):
            return checkpoint(self.run, inputs, use_reentrant=True)

    model = Thrice()
    with recording(model, path, layers="layer", kinds=("activation", "gradient", "input_gradient")):
        model(torch.ones(1, 1, requires_grad=True)).backward()
    with hookstore.open(path) as run:
        layer = run["layer"]
        assert [values(layer.activation, 0, 0, call) for call in range(3)] == [[[2.0]], [[2.0]], [[4.0]]]
        assert layer.gradient.rows["call"].to_pylist() == [2, 0]
        assert [values(layer.gradient, 0, 0, call) for call in (0, 2)] == [[[4.0]], [[2.0]]]
        assert [values(layer.input_gradient, 0, 0, call) for call in (0, 2)] == [[[8.0]], [[4.0]]]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # as the first pass of the outer one runs without grad
@pytest.mark.parametrize("outer", ["reentrant", "not_reentrant", "look_alike"])
@pytest.mark.parametrize("inner", ["reentrant", "not_reentrant", "look_alike"])
def test_checkpoints_within_checkpoints(path, outer, inner):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = linear([2.0]), linear([3.0]), linear([5.0])

        def inside(self, x):
            return self.b(self.c(self.b(x)))

        def outside(self, x):
            return self.a(HOW[inner](self.inside, self.a(x)))

        def forward(self, x):
            return self.c(HOW[outer](self.outside, x))

    model = Nested()
    with recording(model, path, layers=["a", "b", "c"], kinds=("activation", "gradient", "input_gradient")):
        for _ in range(2):
            model(torch.ones(1, 1, requires_grad=True)).backward()
    with hookstore.open(path) as run:
        for batch in range(2):
            for layer, outputs, gradients in (
                ("a", (2.0, 180.0), (45 * 10.0, 5.0)),
                ("b", (6.0, 90.0), (150.0, 10.0)),
                ("c", (30.0, 900.0), (30.0, 1.0)),
            ):
                weight = run[layer]
                assert sorted(weight.activation.rows["call"].to_pylist()) == [0, 0, 1, 1]
                assert sorted(weight.gradient.rows["call"].to_pylist()) == [0, 0, 1, 1]
                for call in range(2):
                    assert values(weight.activation, 0, batch, call) == [[outputs[call]]]
                    assert values(weight.gradient, 0, batch, call) == [[gradients[call]]]
                    assert values(weight.input_gradient, 0, batch, call) == [[gradients[call] * getattr(model, layer).weight.item()]]


@pytest.mark.parametrize("how", ["reentrant", "look_alike"])
def test_backwards_in_another_order_and_more_than_one(path, how):
    layer = linear([2.0])
    with recording(layer, path, layers="", kinds=("activation", "gradient", "input_gradient")) as recorder:
        losses = []
        for batch in recorder.batches(range(3), epoch=0):
            inputs = torch.ones(1, 1, requires_grad=True)
            losses.append((batch + 1) * (HOW[how](layer, inputs) + 10 * HOW[how](layer, inputs * 2)))
        for batch in (1, 0, 2):
            losses[batch].backward(retain_graph=batch == 1)
        losses[1].backward()
    with hookstore.open(path) as run:
        for batch in range(3):
            for call in range(2):
                for backward in range(2 if batch == 1 else 1):
                    expected = (batch + 1) * (1.0, 10.0)[call]
                    assert values(run[""].gradient, 0, batch, call, backward=backward) == [[expected]]
                    assert values(run[""].input_gradient, 0, batch, call, backward=backward) == [[2 * expected]]
        assert run.manifest.num_rows == 6 + 2 * 8


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_nested_checkpoints_with_two_backwards(path):
    layer = linear([2.0])

    def inside(x):
        return layer(x) * 3

    with recording(layer, path, layers="", kinds=("gradient", "activation")):
        output = checkpoint(
            lambda x: checkpoint(inside, x * 1, use_reentrant=True), torch.ones(1, 1, requires_grad=True), use_reentrant=True
        )
        output.backward(retain_graph=True)
        (2 * output).backward()
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 0, 0, backward=backward) for backward in range(2)] == [[[3.0]], [[6.0]]]
        assert len(run[""].activation) == 1


def test_a_function_that_runs_layers_in_its_backward_alone_records_nothing_there(path):
    layer = linear([2.0])

    class Synthetic(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return layer(gradient)

    with recording(layer, path, layers="", kinds=("activation", "gradient")):
        Synthetic.apply(layer(torch.ones(1, 1, requires_grad=True))).backward()
    with hookstore.open(path) as run:
        assert values(run[""].gradient, 0, 0) == [[2.0]]
        assert run.manifest.num_rows == 2


def test_recomputation_in_a_later_batch_leaves_that_batch_alone(path):
    layer = linear([2.0])
    with recording(layer, path, layers="", kinds=("activation", "gradient")) as recorder:
        delayed = None
        for batch in recorder.batches(range(3), epoch=0):
            output = checkpoint(layer, torch.full((1, 1), batch + 1.0, requires_grad=True), use_reentrant=True)
            if delayed is not None:
                (delayed * 10**batch).backward()
            delayed = output
        delayed.backward()
    with hookstore.open(path) as run:
        assert [values(run[""].gradient, 0, batch) for batch in range(3)] == [[[10.0]], [[100.0]], [[1.0]]]
        assert [values(run[""].activation, 0, batch) for batch in range(3)] == [[[2.0]], [[4.0]], [[6.0]]]
        assert set(run.manifest["call"].to_pylist()) == {0}


def test_view_and_in_place_layers_under_reentrant_checkpointing(path):
    block = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    inputs, weights = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    hidden = block[0](inputs).detach().requires_grad_()
    (expected,) = torch.autograd.grad((block[2](hidden.relu()) * weights).sum(), hidden)
    with recording(block, path):
        (checkpoint(block, inputs.requires_grad_(), use_reentrant=True) * weights).sum().backward()
    with hookstore.open(path) as run:
        assert torch.equal(run["0"].gradient.tensor(0, 0), expected)
        assert torch.equal(run["1"].input_gradient.tensor(0, 0), expected)


def test_nothing_is_kept_alive(path):
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    alive = []
    with recording(block, path, layers="*") as recorder:
        gc.disable()
        try:
            for backwards in (True, False, True, True, True):
                output = checkpoint(block, torch.ones(1, 2, requires_grad=True) * 1, use_reentrant=True)
                alive.append(weakref.ref(output.grad_fn))
                if backwards:
                    output.sum().backward()
                del output
                assert not any(reference() is not None for reference in alive)
                assert all(len(hooks.watches) <= 2 for hooks in recorder._hooks._layers)
        finally:
            gc.enable()
    from hookstore import recomputation

    gc.collect()
    assert len(recomputation._passes) == 0


def test_forward_that_raises_inside_a_checkpoint(path):
    layer = linear([2.0])
    fails = [False, True, False]

    def run(x):
        output = layer(x)
        if fails[0]:
            raise ArithmeticError
        return layer(output)

    with recording(layer, path, layers="", kinds=("activation", "gradient")) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            fails[0] = batch == 1
            with contextlib.suppress(ArithmeticError):
                checkpoint(run, torch.ones(1, 1, requires_grad=True), use_reentrant=True).backward()
    with hookstore.open(path) as stored:
        for batch in (0, 2):
            assert [values(stored[""].gradient, 0, batch, call) for call in range(2)] == [[[2.0]], [[1.0]]]
