"""Values, orders of calls and optimizers that a review thought of, each of which once gave something wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
from small import recording
from torch import nn

import hookstore
from hookstore.structure import branches, decode
from hookstore.values import _keys


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# Structures --------------------------------------------------------------------------------------------------------


def test_a_key_that_looks_like_the_number_of_another_one_has_a_leaf_path_of_its_own(path):
    keys = [1.5, "1.5", "1.5~1", "1.5~2"]
    model = Applies(lambda x: {key: x * number for number, key in enumerate(keys)})
    with recording(model, path, layers="", kinds="activation"):
        model(torch.ones(1))
    with hookstore.open(path) as run:
        assert {key: value.item() for key, value in run[""].activation[0, 0].items()} == {1.5: 0, "1.5": 1, "1.5~1": 2, "1.5~2": 3}


def test_arguments_inside_arguments_which_no_writer_writes_are_refused_before_they_cost_time():
    """Each level would double the time that naming the leaves takes."""
    text = '["call",[null],[["k",' * 60 + "null" + "]]]" * 60
    with pytest.raises(ValueError, match="no kind of node"):
        decode(text)


def test_many_keys_that_come_out_alike_cost_no_more_than_others():
    """Half an hour, if each were compared with all before."""
    assert len(list(_keys([("T", "x")] * 100_000))) == 100_000
    assert len({branch.path for branch in branches(("list", (("dict", ((("T", "x"), "tensor"),) * 100_000),))).leaves()}) == 100_000


# Views that are no blocks of numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["gradient", "input_gradient"])
def test_views_of_nested_and_sparse_tensors_do_not_break_training(path, kinds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are new
        weights = {
            "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], requires_grad=True),
            "coo": torch.eye(3).to_sparse().requires_grad_(),
            "csr": torch.eye(3).to_sparse_csr().requires_grad_(),
        }
    models = {name: Applies(lambda x: x.transpose(-1, -2)) for name in weights}
    model = nn.ModuleDict(models)
    with recording(model, path, layers=list(models), kinds=kinds) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            for name, weight in weights.items():
                output = models[name](weight * 2)
                assert output._base is not None
                gradient = torch.autograd.grad(output, weight, grad_outputs=output.detach())[0]
                assert gradient.layout == weight.layout
    with hookstore.open(path) as run:
        for name in models:
            assert len(run[name][kinds].leaves) > 1
            assert run[name][kinds][0, 1] is not None


def test_an_edited_view_of_a_jagged_tensor_is_a_gap(path):
    """The gradient of its base, which is not laid out like it, was given for it."""
    model = Applies(lambda x: (x * 2).transpose(1, 2))
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True)
    with recording(model, path, layers="", kinds="gradient"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(x)
        with torch.no_grad():
            output.mul_(2)  # (with grad, torch itself does not let a nested view be edited)
        output.transpose(1, 2).values().sum().backward()
    with hookstore.open(path) as run:
        assert {row["status"] for row in run[""].gradient.rows.to_pylist()} == {"skipped"}


# Optimizers ----------------------------------------------------------------------------------------------------------


class OfMine(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("how", ["subclass", "wrapped", "both"])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_inside_a_step_is_one_step(path, how, with_closure):
    model = nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on the base class's own step has torch's hooks
    optimizer = (torch.optim.SGD if how == "wrapped" else OfMine)(model.parameters(), lr=0.1)
    optimizer = optimizer if how == "subclass" else Around(optimizer)

    def compute():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    with recording(model, path, kinds=("activation", "parameter_gradient"), layers="") as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            if with_closure:
                optimizer.step(compute)
            else:
                compute()
                optimizer.step()
    with hookstore.open(path) as run:
        of_weight = [row for row in run[""].parameter_gradient.rows.to_pylist() if row["leaf"] == "weight"]
        assert [(row["batch"], row["call"], row["step"]) for row in of_weight] == [(0, 0, 0), (1, 0, 1)]


def test_a_scaler_that_is_disabled_is_none(path):
    model = nn.Linear(2, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, path, kinds=("gradient", "parameter_gradient"), scaler=scaler):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    with hookstore.open(path) as run:
        assert run[""].gradient[0, 0].tolist() == [[1.0]]
        assert run[""].parameter_gradient.get(0, 0, leaf="weight").tolist() == [[1.0, 1.0]]
        assert run[""].gradient.row(0, 0)["loss_scale"] is None


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "is_own"),
    [
        (lambda h, y: h.sum(), False),
        (lambda h, y: (h * 1)[0], False),
        (lambda h, y: y.sum(), True),
        (lambda h, y: torch.ones(1, requires_grad=True), True),
    ],
)
def test_the_gradient_of_a_base_that_another_output_was_computed_from_is_not_taken_for_that_of_an_edited_view(path, other, is_own):
    """11 was given for 10."""

    def compute(x):
        hidden = x * 1
        view = hidden.view(-1)
        return view, other(hidden, view)

    model = Applies(compute)
    with recording(model, path, layers="", kinds="gradient"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view, number = model(torch.ones(2, 3, requires_grad=True))
        before = view * 1  # (what follows from the view before the edit counts too)
        view.mul_(10)
        (view.sum() + number.sum() + 100 * before.sum()).backward()
    with hookstore.open(path) as run:
        if is_own:
            expected = 110.0 if other(torch.ones(1), torch.ones(1, requires_grad=True)).is_leaf else 111.0
            assert set(run[""].gradient.get(0, 0, leaf="0").tolist()) == {expected}
        else:
            assert run[""].gradient.leaf("0").rows["status"].to_pylist() == ["skipped"]
            with pytest.raises(hookstore.MissingCaptureError, match="edited in place"):
                run[""].gradient.get(0, 0, leaf="0")


@pytest.mark.parametrize("kinds", ["gradient", ("gradient", "input_gradient")])
def test_gradients_of_one_backward_have_its_number_whichever_of_them_arrive(path, kinds):
    """Each output counted for itself, so that what came in two backwards was read as if it had come in one."""
    model = Applies(lambda x, y: (x * 2, y * 3))
    with recording(model, path, layers="", kinds=kinds):
        x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        first, second = model(x * 1, y * 1)
        first.backward(retain_graph=True)
        (5 * second).backward(retain_graph=True)
        (first + second).backward()
    with hookstore.open(path) as run:
        captures = run[""].gradient
        numbers = [(row["leaf"], row["backward"]) for row in captures.rows.to_pylist()]
        assert sorted(numbers) == [("0", 0), ("0", 2), ("1", 1), ("1", 2)]
        assert captures.value(0, 0, backward=0) == (1, None)
        assert captures.value(0, 0, backward=1) == (None, 5)
        with pytest.warns(hookstore.CaptureWarning, match="3 times"):
            assert captures[0, 0] == (1, 1)
        assert captures.get(0, 0, leaf="0", backward=0) == 1
        if "input_gradient" in kinds:
            assert run[""].input_gradient.value(0, 0, backward=0).args == (2, None)
            assert run[""].input_gradient.value(0, 0, backward=1).args == (None, 15)


def test_a_leaf_that_is_never_stored_says_so_in_later_backwards_too(path):
    def compute(x):
        hidden = x * 1
        return hidden.view(-1), hidden.sum(), hidden * 2

    model = Applies(compute)
    with recording(model, path, layers="", kinds="gradient"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        view, number, last = model(torch.ones(2, requires_grad=True))
        view.mul_(10)
        (view.sum() + number).backward(retain_graph=True)
        last.sum().backward(retain_graph=True)
    with hookstore.open(path) as run:
        with pytest.warns(hookstore.CaptureWarning, match="2 times"):
            found = run[""].gradient[0, 0]
        assert "edited in place" in found[0].reason
        assert found[1] is None
        assert found[2].tolist() == [1, 1]


def test_lists_of_lists_of_tokens_are_one_thing_that_is_not_stored(path):
    """Each batch had a structure of its own, kept in memory to the end, and hundreds of rows that said that a number is not stored."""
    lengths = iter(range(1, 9))
    model = Applies(lambda x: (x, [[0] * next(lengths) for _ in range(8)]))
    with recording(model, path, layers="", kinds="activation"):
        model(torch.ones(1))
    with hookstore.open(path) as run:
        assert len(run.manifest) == 2
        assert run[""].activation[0, 0][1] == hookstore.NotStored("list", "it has no tensors, and more than 16 other things")


def test_structures_that_never_repeat_do_not_fill_the_memory(path, monkeypatch):
    monkeypatch.setattr(hookstore.staging, "MOST_STRUCTURE_CHARS", 1000)
    model = Applies(lambda x: [x] * int(x))
    with (
        recording(model, path, layers="", kinds="activation"),
        pytest.warns(hookstore.CaptureWarning, match="without their structure") as told,
    ):
        for size in range(2, 30):
            model(torch.tensor(size))
    assert len(told) == 1
    with hookstore.open(path) as run:
        assert run[""].activation[0, 0] == [2, 2]
        with pytest.raises(hookstore.MissingCaptureError, match="several leaves"):
            run[""].activation[0, 27]
        assert run[""].activation.leaf("28")[0, 27] == 29


def test_steps_skipped_together_of_optimizers_that_have_never_stepped_are_one_row_for_each_parameter(path):
    model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other)]
    with recording(model, path, layers="", kinds="parameter_gradient", scaler=scaler), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for factor in (float("inf"), 1.0):
            scaler.scale(factor * other(model(torch.ones(1, 1))).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    with hookstore.open(path) as run:
        found = [(row["batch"], row["call"], row["status"]) for row in run[""].parameter_gradient.rows.to_pylist()]
        assert sorted(found) == [(0, 0, "skipped"), (1, 0, "ok")]


def test_a_tensor_of_an_earlier_value_at_the_same_place_does_not_stand_in_for_one_that_was_dropped(path, monkeypatch):
    model = Applies(lambda x: (x, x * 2))
    stage = hookstore.staging.Stager._stage_slot

    def drops(self, array, *rest):
        return "no room" if array.spec.leaf == "1" else stage(self, array, *rest)

    with recording(model, path, layers="", kinds="activation", on_full="drop") as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recorder.at(epoch=0, batch=0):
            model(torch.ones(1))
        monkeypatch.setattr(hookstore.staging.Stager, "_stage_slot", drops)
        recorder._clock.agenda.forget()
        with recorder.at(epoch=0, batch=0):
            model(torch.full((1,), 2.0))
    with hookstore.open(path) as run, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(hookstore.MissingCaptureError, match="leaf '1'.*was dropped"):
            run[""].activation[0, 0]


def test_a_long_structure_is_worked_out_once_for_all_rows_of_a_value(path, monkeypatch):
    """Reading one leaf of two thousand took fourteen seconds."""
    model = Applies(lambda x: [x] * 40)
    with recording(model, path, layers="", kinds="activation"):
        model(torch.ones(1))
    texts = []
    monkeypatch.setattr(hookstore.assembly, "decode", lambda text: texts.append(text) or decode(text))
    with hookstore.open(path) as run:
        assert run[""].activation[0, 0] == [1] * 40
    assert len(texts) == 1
