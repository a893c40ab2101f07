"""Layers that are selected and not called: each is told once, with the likely cause, and no other layer is."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from small import recording
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class Parts(nn.Module):
    """Calls those of its children that it is told to."""

    def __init__(self, names="abc"):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(2, 2))

    def forward(self, inputs, names="abc"):
        for name in names:
            inputs = getattr(self, name)(inputs)
        return inputs


def gaps(run):
    return [
        (row["layer"], row["kind"], row["phase"], row["epoch"], row["batch"])
        for row in sorted(run.manifest.to_pylist(), key=lambda row: (row["layer"], row["kind"]))
        if row["status"] == "skipped" and row["layer"]
    ]


X = torch.ones(1, 2)


# Causes --------------------------------------------------------------------------------------------------------------


class Direct(Parts):
    def forward(self, inputs):
        return self.b(self.a.forward(inputs))


class Functional(Parts):
    def forward(self, inputs):
        return self.b(nn.functional.linear(inputs, self.a.weight))


class NoForward(nn.Module):
    pass


class Abstract(Parts):
    def __init__(self):
        super().__init__("ab")
        self.a = NoForward()

    def forward(self, inputs):
        return self.b(inputs)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: Direct("ab"), "its forward was called directly, a functional operation used its weights, or the batch took a branch"),
        (lambda: Functional("ab"), "a functional operation used its weights"),
        (Abstract, "test_silent.NoForward has no forward: nothing can call it"),
    ],
)
@pytest.mark.parametrize("clock", ["batches", "at", "automatic"])
def test_a_layer_that_is_never_called_is_told_once_with_the_cause(path, make, cause, clock):
    model = make()
    with pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 0, batch 0: 'a' .*" + cause) as caught:  # noqa: SIM117
        with recording(model, path, kinds=("activation", "gradient")) as recorder:
            for batch in recorder.batches(range(4), epoch=0) if clock == "batches" else range(4):
                if clock == "at":
                    recorder.at(epoch=0, batch=batch)
                model(X).sum().backward()
    assert len(caught) == 1
    with hookstore.open(path) as run:
        assert gaps(run) == [("a", "activation", "train", 0, 0), ("a", "gradient", "train", 0, 0)]
        assert run["b"].activation.rows.num_rows == 4
        with pytest.raises(hookstore.MissingCaptureError, match=cause):
            run["a"].activation[0, 0]
        with pytest.raises(hookstore.MissingCaptureError, match=cause):
            run["a"].gradient[0, 0]


@pytest.mark.parametrize("layers", [["self_attn", "self_attn.out_proj"], "self_attn.out_proj"])
def test_out_proj_of_attention(path, layers):
    model = nn.TransformerEncoderLayer(4, 2, 8)
    with (
        pytest.warns(hookstore.CaptureWarning, match="'self_attn.out_proj' .MultiheadAttention uses its weights and never calls it"),
        recording(model, path, layers=layers),
    ):
        for _ in range(2):
            model(torch.ones(3, 1, 4))
    with hookstore.open(path) as run:
        assert gaps(run) == [("self_attn.out_proj", "activation", "train", 0, 0)]


def test_a_branch_that_is_not_taken_is_told_once_where_that_happens(path):
    model = Parts()
    with pytest.warns(hookstore.CaptureWarning, match="batch 2: 'c' .the batch took a branch that does not call it") as caught:  # noqa: SIM117
        with recording(model, path) as recorder:
            for batch in recorder.batches(range(6), epoch=3):
                model(X, "abc" if batch in (0, 1, 4) else "ab")
    assert len(caught) == 1
    with hookstore.open(path) as run:
        assert gaps(run) == [("c", "activation", "train", 3, 2)]
        assert sorted(run["c"].activation.rows["batch"].to_pylist()) == [0, 1, 2, 4]


def test_all_layers_of_a_batch_share_one_warning(path):
    model = Parts("abcdefgh")
    with pytest.warns(hookstore.CaptureWarning, match=r"'b', 'c', 'd', 'e', 'f' and 2 more") as caught, recording(model, path):
        model(X, "a")
        model(X, "a")
    assert len(caught) == 1
    with hookstore.open(path) as run:
        assert {layer for layer, *_ in gaps(run)} == set("bcdefgh")


def test_a_layer_that_was_taken_out(path):
    model = Parts()
    with pytest.warns(hookstore.CaptureWarning, match="batch 1: 'c' .it was taken out of the model"), recording(model, path):
        model(X)
        del model.c
        model(X, "ab")
        model(X, "ab")


def test_evaluation_has_a_report_of_its_own_phase(path):
    model = Parts()
    with (
        pytest.warns(hookstore.CaptureWarning, match="0 calls in eval epoch 0, batch 0: 'c'"),
        recording(model, path, phases=("train", "eval")),
    ):
        for _ in range(2):
            model.train()
            model(X)
            model.eval()
            model(X, "ab")
    with hookstore.open(path) as run:
        assert gaps(run) == [("c", "activation", "eval", 0, 0)]


def test_nothing_at_all_is_called(path):
    model = Direct("ab")
    with (
        pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 0, batch 0: 'a'"),
        recording(model, path, layers="a") as recorder,
    ):
        for _ in recorder.batches(range(3), epoch=0):
            model(X)
    with hookstore.open(path) as run:
        assert gaps(run) == [("a", "activation", "train", 0, 0)]
    with (
        pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 1, batch 0: 'a', 'b'"),
        recording(model, path.with_name("other")) as recorder,
    ):
        for _ in recorder.batches(range(3), epoch=1):
            pass
    with hookstore.open(path.with_name("other")) as run:
        assert run.manifest.num_rows == 2


def test_warnings_that_are_errors_leave_a_finished_run(path):
    model = Direct("ab")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(hookstore.CaptureWarning, match="0 calls"), recording(model, path):
            model(X)
    assert not any(module._forward_hooks for module in model.modules())
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        assert gaps(run) == [("a", "activation", "train", 0, 0)]


# No false reports ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.usefixtures("no_warnings")
class TestNothingToTell:
    def test_parts_of_a_batch_at_different_times(self, path):
        model = Parts()
        with recording(model, path) as recorder:
            for batch in range(3):
                for name in "abc":
                    with recorder.at(epoch=0, batch=batch):
                        getattr(model, name)(X)
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 9}

    def test_a_loop_within_a_loop(self, path):
        model = Parts()
        with recording(model, path, phases=("train", "eval")) as recorder:
            for batch in recorder.batches(range(3), epoch=0):
                hidden = model.a(X)
                if batch == 1:
                    model.eval()
                    for _ in recorder.batches(range(2), epoch=0):
                        model(X)
                    model.train()
                model.c(model.b(hidden))
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 15}

    @pytest.mark.parametrize("clock", ["batches", "automatic"])
    def test_a_forward_that_raises_and_is_caught(self, path, clock):
        class Breaks(Parts):
            def forward(self, inputs, fails):
                inputs = self.a(inputs)
                if fails:
                    raise ArithmeticError
                return self.c(self.b(inputs))

        model = Breaks()
        with warnings.catch_warnings(), recording(model, path) as recorder:
            for batch in recorder.batches(range(4), epoch=0) if clock == "batches" else range(4):
                try:
                    model(X, batch in (1, 3))
                except ArithmeticError:
                    assert batch in (1, 3)
        with hookstore.open(path) as run:
            assert gaps(run) == []

    def test_the_first_batch_after_idle_ones_raises(self, path):
        model = Parts()
        model.c = nn.Linear(3, 3)  # cannot take what b gives
        with recording(model, path, every=2) as recorder:
            for _ in range(4):
                with contextlib.suppress(RuntimeError):
                    model(X)
            assert recorder.progress.num_captured
        with hookstore.open(path) as run:
            assert gaps(run) == []

    def test_an_exception_that_ends_the_recording(self, path):
        model = Parts()
        with pytest.raises(KeyboardInterrupt), recording(model, path) as recorder:
            for batch in recorder.batches(range(4), epoch=0):
                model.a(X)
                if batch == 1:
                    raise KeyboardInterrupt
                model.c(model.b(X))
        with hookstore.open(path) as run:
            assert gaps(run) == []
            assert [(cut.epoch, cut.batch) for cut in run.partial_batches] == [(0, 1)]

    def test_batches_that_are_left_out_or_idle(self, path):
        model = Parts()
        with recording(model, path, every=3) as recorder:
            for batch in recorder.batches(range(7), epoch=0):
                model(X, "abc" if batch % 3 == 0 else "a")
            model.eval()
            for _ in recorder.batches(range(2), epoch=0):
                model(X, "a")
        with hookstore.open(path) as run:
            assert gaps(run) == []

    def test_a_loop_that_is_left_by_break(self, path):
        model = Parts()
        with recording(model, path) as recorder:
            for epoch in range(2):
                for batch in recorder.batches(range(9), epoch=epoch):
                    model(X)
                    if batch == 2:
                        break
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 18}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_activation_checkpointing(self, path, reentrant):
        class Checkpointed(Parts):
            def forward(self, inputs):
                return self.c(checkpoint(lambda given: self.b(self.a(given)), inputs, use_reentrant=reentrant))

        model = Checkpointed()
        with recording(model, path):
            for _ in range(3):
                model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 9}

    def test_two_models_in_turn(self, path):
        models = {"g": Parts("a"), "d": Parts("a")}
        with recording(models, path):
            for _ in range(3):
                fake = models["g"](X, "a")
                models["d"](X, "a")
                models["d"](fake.detach(), "a")
                models["d"](fake, "a").sum().backward()
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 12}

    def test_a_generator_that_is_called_every_other_batch(self, path):
        models = {"g": Parts("a"), "d": Parts("a")}
        with recording(models, path) as recorder:
            for batch in recorder.batches(range(6), epoch=0):
                models["d"](models["g"](X, "a") if batch % 3 == 2 else X, "a")
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 8}

    def test_parts_that_are_called_by_hand_now_and_then(self, path):
        model = Parts()
        with recording(model, path) as recorder:
            for batch, names in enumerate(["abc", "a", "b", "ca"]):
                with recorder.at(epoch=0, batch=batch):
                    for name in names:
                        getattr(model, name)(X)
        with hookstore.open(path) as run:
            assert run.info().statuses == {"ok": 7}

    def test_recording_that_begins_and_ends_with_nothing(self, path):
        with recording(Parts(), path):
            pass
        with hookstore.open(path) as run:
            assert run.manifest.num_rows == 0
