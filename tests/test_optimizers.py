"""`parameter_gradient` as the optimizer's step uses it, and the count of steps."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from small import values
from torch import nn
from torch.optim import optimizer as torch_optimizer

import hookstore


def recording(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, "kinds": "parameter_gradient", **options})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def linear(value):
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(value)
    return layer


def rows(captures):
    names = ("epoch", "batch", "call", "step", "leaf", "status")
    return sorted(tuple(row[name] for name in names) for row in captures.rows.to_pylist())


def step(model, optimizer, scale=1.0):
    optimizer.zero_grad()
    (scale * model(torch.ones(2, model.in_features if isinstance(model, nn.Linear) else 1))).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
def test_gradients_of_each_step(path, make, how):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1, **how)
    seen = []
    with recording(model, path, layers="") as recorder:
        for _ in recorder.batches(range(3), epoch=2):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).pow(2).sum().backward()
            seen.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
            optimizer.step()
    with hookstore.open(path) as run:
        assert run[""].kinds == ["parameter_gradient"]
        for batch, gradients in enumerate(seen):
            for leaf, gradient in gradients.items():
                assert torch.equal(run[""].parameter_gradient.tensor(2, batch, leaf=leaf), gradient)
        assert rows(run[""].parameter_gradient) == [(2, batch, 0, batch, leaf, "ok") for batch in range(3) for leaf in ("bias", "weight")]


def test_accumulation_clipping_and_batches_without_a_step(path):
    model = linear(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, path, layers="", kinds=("gradient", "parameter_gradient")) as recorder:
        for batch in recorder.batches(range(6), epoch=0):
            ((batch + 1) * model(torch.ones(1, 1))).backward()
            if batch % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 8.0)
                optimizer.step()
                optimizer.zero_grad()
    with hookstore.open(path) as run:
        assert rows(run[""].parameter_gradient) == [(0, 2, 0, 0, "weight", "ok"), (0, 5, 0, 1, "weight", "ok")]
        assert values(run[""].parameter_gradient, 0, 2) == [[6.0]]
        assert run[""].parameter_gradient[0, 5].item() == pytest.approx(8.0)
        assert run[""].gradient.rows["step"].to_pylist() == [0, 0, 0, 1, 1, 1]


def test_several_steps_in_a_batch_are_calls(path):
    model = linear(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, path, layers="") as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            for scale in (1.0, 10.0, 100.0):
                step(model, optimizer, scale)
    with hookstore.open(path) as run:
        assert rows(run[""].parameter_gradient) == [(0, index // 3, index % 3, index, "weight", "ok") for index in range(6)]
        assert [values(run[""].parameter_gradient, 0, 1, call) for call in range(3)] == [[[2.0]], [[20.0]], [[200.0]]]


def test_only_the_selected_layers_own_parameters(path):
    model = nn.Sequential(linear(2.0), nn.Sequential(linear(3.0), nn.ReLU()), linear(5.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, path, layers=["", "1", "1.0", "2"]):
        step(model, optimizer)
    with hookstore.open(path) as run:
        assert sorted(run.manifest["layer"].to_pylist()) == ["1.0", "2"]
        assert values(run["1.0"].parameter_gradient, 0, 0) == [[20.0]]


def test_several_optimizers_frozen_parameters_and_optimizers_of_others(path):
    model, other = nn.Sequential(linear(2.0), linear(3.0), linear(5.0)), linear(7.0)
    model[2].weight.requires_grad_(False)
    optimizers = [torch.optim.SGD([model[0].weight, model[2].weight], lr=0.0), torch.optim.Adam([{"params": model[1].parameters()}])]
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with recording(model, path, kinds=("activation", "parameter_gradient")) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            step(other, foreign)
            model(torch.ones(1, 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with hookstore.open(path) as run:
        assert rows(run["0"].parameter_gradient) == [(0, 0, 0, 0, "weight", "ok"), (0, 1, 0, 2, "weight", "ok")]
        assert rows(run["1"].parameter_gradient) == [(0, 0, 0, 1, "weight", "ok"), (0, 1, 0, 3, "weight", "ok")]
        assert len(run["2"].parameter_gradient) == 0
        assert run["0"].activation.rows["step"].to_pylist() == [0, 2]


def test_tied_and_replaced_parameters_and_groups_that_are_added(path):
    model = nn.Sequential(linear(2.0), linear(3.0), linear(5.0))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD([model[0].weight], lr=0.0)
    with recording(model, path) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            if batch == 1:
                model[2].weight = nn.Parameter(torch.full((1, 1), 7.0))
                optimizer.add_param_group({"params": [model[2].weight]})
            step(model, optimizer)
    with hookstore.open(path) as run:
        assert values(run["0"].parameter_gradient, 0, 0) == values(run["1"].parameter_gradient, 0, 0) == [[40.0]]
        assert rows(run["2"].parameter_gradient) == [(0, 1, 0, 1, "weight", "ok")]
        assert values(run["2"].parameter_gradient, 0, 1) == [[8.0]]


def test_closures(path):
    """With a closure the gradient is made inside the step: before it there is none, or the last step's."""
    model = linear(2.0)
    sgd, lbfgs = torch.optim.SGD(model.parameters(), lr=0.0), torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    last = []
    with recording(model, path, layers="") as recorder:
        for batch in recorder.batches(range(3), epoch=0):

            def closure(batch=batch):
                model.zero_grad()
                loss = ((batch + 1) * model(torch.ones(1, 1)).pow(2)).sum()
                loss.backward()
                last.append(model.weight.grad.clone())
                return loss

            if batch == 2:
                lbfgs.step(closure)
            elif batch == 1:
                sgd.step(closure=closure)
            else:
                sgd.step(closure)
    with hookstore.open(path) as run:
        assert [values(run[""].parameter_gradient, 0, batch) for batch in range(2)] == [[[4.0]], [[8.0]]]
        assert torch.equal(run[""].parameter_gradient.tensor(0, 2), last[-1])
        assert rows(run[""].parameter_gradient) == [(0, batch, 0, batch, "weight", "ok") for batch in range(3)]


def test_optimizers_in_the_backward_count_one_step_each_backward(path):
    model = nn.Sequential(linear(2.0), linear(3.0))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()}

    def step_and_free(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_and_free)
    with recording(model, path, kinds=("activation", "parameter_gradient")) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            ((batch + 1) * model(torch.ones(1, 1))).backward()
    with hookstore.open(path) as run:
        for layer, gradient in (("0", 3.0), ("1", 2.0)):
            assert rows(run[layer].parameter_gradient) == [(0, batch, 0, batch, "weight", "ok") for batch in range(3)]
            assert [values(run[layer].parameter_gradient, 0, batch) for batch in range(3)] == [
                [[gradient * (batch + 1)]] for batch in range(3)
            ]
            assert run[layer].activation.rows["step"].to_pylist() == [0, 1, 2]


def test_batches_and_phases_that_are_not_recorded(path):
    model = linear(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, path, layers="", every=2):
        for batch in range(5):
            step(model, optimizer, batch + 1.0)
        model.eval()
        step(model, optimizer)
    with hookstore.open(path) as run:
        assert rows(run[""].parameter_gradient) == [(0, batch, 0, batch, "weight", "ok") for batch in (0, 2, 4)]
        assert values(run[""].parameter_gradient, 0, 4) == [[10.0]]


def test_layers_that_are_only_asked_for_their_parameters_get_no_forward_hooks(path):
    model = nn.Sequential(linear(2.0), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with recording(model, path) as recorder, recorder.at(epoch=0, batch=0):
        assert not model[0]._forward_hooks
        step(model, optimizer)
    with hookstore.open(path) as run:
        assert run["0"].kinds == ["parameter_gradient"]


def test_weights_that_are_used_without_a_call_have_gradients_too(path):
    model = nn.MultiheadAttention(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, path, layers="out_proj"):
        inputs = torch.randn(3, 1, 4)
        model(inputs, inputs, inputs)[0].sum().backward()
        expected = model.out_proj.weight.grad.clone()
        optimizer.step()
    with hookstore.open(path) as run:
        assert torch.equal(run["out_proj"].parameter_gradient.tensor(0, 0, leaf="weight"), expected)


def test_no_optimizer_at_all_is_warned_about(path):
    model = linear(2.0)
    with pytest.warns(hookstore.CaptureWarning, match="no parameter_gradient was captured"), recording(model, path, layers=""):
        model(torch.ones(1, 1)).backward()


def test_training_is_the_same_with_and_without(path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)

    def train(module):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            module(torch.randn(4, 3)).pow(2).sum().backward()
            optimizer.step()
        return [*module.parameters(), *(state["exp_avg_sq"] for state in optimizer.state.values()), torch.rand(2)]

    with recording(model, path, kinds=("activation", "gradient", "input_gradient", "parameter", "parameter_gradient")):
        ours = train(model)
    for one, other in zip(ours, train(twin), strict=True):
        assert torch.equal(one, other)


def test_hooks_on_optimizers_are_gone_at_the_end_and_keep_nothing(path):
    model = linear(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = {*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks}
    with recording(model, path, layers=""):
        step(model, optimizer)
        gone = [weakref.ref(model), weakref.ref(optimizer)]
        gc.disable()
        try:
            del model
            optimizer = None
            gc.collect()
            assert [reference() for reference in gone] == [None, None]
        finally:
            gc.enable()
    assert {*torch_optimizer._global_optimizer_pre_hooks, *torch_optimizer._global_optimizer_post_hooks} <= before


# Under a GradScaler --------------------------------------------------------------------------------------------------


def train_scaled(model, optimizer, scaler, factors):
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale((factor * model(torch.ones(1, 1))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("bad", [{0}, {1}, {3}, {0, 1}, {1, 2, 3}])
def test_steps_that_the_scaler_skips_are_rows(path, how, bad):
    model = nn.Sequential(linear(1.0), linear(1.0), nn.Identity())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, **how)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    factors = [float("inf") if batch in bad else 3.0 for batch in range(4)]
    with pytest.warns(hookstore.CaptureWarning, match="GradScaler skipped") as warned, recording(model, path, scaler=scaler) as recorder:
        train_scaled(model, optimizer, scaler, recorder.batches(factors, epoch=0))
    assert len([one for one in warned if one.category is hookstore.CaptureWarning]) == 1
    with hookstore.open(path) as run:
        for layer in "01":
            steps = 0
            for batch in range(4):
                status = "skipped" if batch in bad else "ok"
                assert [row for row in rows(run[layer].parameter_gradient) if row[1] == batch] == [(0, batch, 0, steps, "weight", status)]
                steps += batch not in bad
                if batch in bad:
                    with pytest.raises(hookstore.MissingCaptureError, match="skipped: the GradScaler skipped the optimizer's step"):
                        run[layer].parameter_gradient[0, batch]
                else:
                    assert values(run[layer].parameter_gradient, 0, batch) == [[3.0]]


@pytest.mark.parametrize("every", [1, 2])
def test_skipped_steps_with_the_automatic_clock(path, every):
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.warns(hookstore.CaptureWarning, match="GradScaler skipped"), recording(model, path, layers="", scaler=scaler, every=every):
        for factor in (1.0, 1.0, float("nan"), float("inf"), 5.0):
            optimizer.zero_grad()
            scaler.scale((factor * model(torch.ones(1, 1))).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    with hookstore.open(path) as run:
        found = [(row["batch"], row["status"]) for row in sorted(run.manifest.to_pylist(), key=lambda row: row["batch"])]
        assert found == [(0, "ok"), (1, "ok"), (2, "skipped"), (3, "skipped"), (4, "ok")][::every]


def test_two_optimizers_of_which_one_is_skipped(path):
    model = nn.Sequential(linear(1.0), linear(1.0))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pytest.warns(hookstore.CaptureWarning, match="GradScaler skipped"), recording(model, path, scaler=scaler) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            loss = model(torch.ones(1, 1)).sum()
            scaler.scale(loss).backward()
            if batch == 1:
                model[1].weight.grad.fill_(float("inf"))
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    with hookstore.open(path) as run:
        assert [row[-1] for row in rows(run["0"].parameter_gradient)] == ["ok"] * 3
        assert [row[-1] for row in rows(run["1"].parameter_gradient)] == ["ok", "skipped", "ok"]
        assert [row[3] for row in rows(run["0"].parameter_gradient)] == [0, 2, 3]


def test_scaler_that_is_off(path):
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with recording(model, path, layers="", scaler=scaler) as recorder:
        train_scaled(model, optimizer, scaler, recorder.batches([3.0, float("inf")], epoch=0))
    with hookstore.open(path) as run:
        assert [values(run[""].parameter_gradient, 0, batch) for batch in range(2)] == [[[3.0]], [[float("inf")]]]


def test_unscaled_and_clipped_gradients_are_what_the_step_uses(path):
    model = linear(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with (
        recording(model, path, layers="", kinds=("gradient", "input_gradient", "parameter_gradient"), scaler=scaler) as recorder,
        recorder.at(epoch=0, batch=0),
    ):
        scaler.scale((3 * model(torch.ones(1, 1, requires_grad=True))).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
    with hookstore.open(path) as run:
        assert values(run[""].parameter_gradient, 0, 0) == [[2.0]]
        assert values(run[""].gradient, 0, 0) == values(run[""].input_gradient, 0, 0) == [[3.0]]
        assert values(run[""].input_gradient.raw, 0, 0) == [[3072.0]]
        assert run[""].parameter_gradient.row(0, 0)["loss_scale"] is None


def test_sparse_gradients_come_as_their_parts(path):
    """The embedding of the public report wandb#305: the gradient, dense, is [[0, 0], [2, 20], [0, 0], [1, 10]]."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    with recording(model, path, layers="") as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            optimizer.zero_grad()
            (model(torch.tensor([1, 3, 1])) * torch.tensor([1.0, 10.0])).sum().backward()
            optimizer.step()
    with hookstore.open(path) as run:
        for batch in range(2):
            gradient = run[""].parameter_gradient[0, batch]
            assert gradient.dense().tolist() == [[0.0, 0.0], [2.0, 20.0], [0.0, 0.0], [1.0, 10.0]]
        assert set(run.manifest["step"].to_pylist()) == {0, 1}
