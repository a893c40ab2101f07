"""`record(max_slowdown=…)`: the budget of what recording may take from training."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookstore
from hookstore import recorder as recorder_module
from hookstore.device import CpuDevice
from hookstore.schedule import Budget


class FakeClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s

    def advance(self, seconds):
        self.now_s += seconds


def simulate(budget, clock, steps, wanted=None):
    """Train for steps of (seconds without recording, seconds that recording takes); return which were recorded."""
    recorded = []
    for (step_s, cost_s), is_wanted in zip(steps, wanted or itertools.repeat(True), strict=False):
        recorded.append(budget.begin_batch(wanted=is_wanted))
        clock.advance(step_s)
        if recorded[-1]:
            with budget.measured():
                clock.advance(cost_s)
    budget.begin_batch(wanted=False)
    return recorded


def test_cheap_batches_are_all_recorded_after_the_first_is_paid_for():
    clock = FakeClock()
    recorded = simulate(Budget(0.05, clock), clock, [(0.1, 0.004)] * 100)
    assert recorded[0]
    assert sum(recorded) >= 98


def test_dear_batches_are_recorded_as_often_as_the_budget_allows():
    clock = FakeClock()
    budget = Budget(0.05, clock)
    recorded = simulate(budget, clock, [(0.1, 0.02)] * 400)
    assert sum(recorded) == pytest.approx(100, abs=2)
    assert budget.num_skipped == 400 - sum(recorded)
    gaps = [later - earlier for earlier, later in itertools.pairwise(place for place, is_recorded in enumerate(recorded) if is_recorded)]
    assert set(gaps[1:]) <= {3, 4, 5}, "evenly"


def test_a_batch_dearer_than_the_longest_credit_is_still_recorded_now_and_then():
    clock = FakeClock()
    recorded = simulate(Budget(0.01, clock), clock, [(1.0, 5.0)] * 2001)
    assert sum(recorded) == 3


def test_a_pause_does_not_pay_for_a_burst():
    clock = FakeClock()
    budget = Budget(0.1, clock)
    simulate(budget, clock, [(0.1, 0.05)] * 10)
    clock.advance(3600.0)
    recorded = simulate(budget, clock, [(0.1, 0.05)] * 1000)
    # ten seconds' worth of credit, and what the steps themselves earn
    assert sum(recorded) <= (1.0 + 1000 * 0.1 * 0.1) / 0.05 + 1


def test_batches_that_are_not_wanted_earn():
    clock = FakeClock()
    budget = Budget(0.05, clock)
    recorded = simulate(budget, clock, [(0.1, 0.02)] * 400, itertools.cycle([True, *[False] * 9]))
    assert sum(recorded) == 40
    assert budget.num_skipped == 0


def test_when_the_store_gets_faster_more_is_recorded():
    clock = FakeClock()
    budget = Budget(0.05, clock)
    slow = simulate(budget, clock, [(0.1, 0.1)] * 200)
    fast = simulate(budget, clock, [(0.1, 0.001)] * 200)
    assert sum(slow) <= 11
    assert sum(fast) >= 150


@given(
    st.floats(0.01, 1.0),
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1.0)), min_size=20, max_size=200),
)
@settings(max_examples=100, deadline=None)
def test_over_the_run_the_budget_is_exceeded_by_one_batch_at_most(share, steps):
    clock = FakeClock()
    recorded = simulate(Budget(share, clock), clock, steps)
    spent_s = base_s = 0.0
    for (step_s, cost_s), is_recorded in zip(steps, recorded, strict=True):
        base_s += step_s
        spent_s += cost_s if is_recorded else 0.0
        assert spent_s <= share * base_s + 1.0 + 1e-6


class SlowDevice(CpuDevice):
    """A store that takes its time, by the fake clock."""

    def __init__(self, clock, cost_s):
        self._clock = clock
        self._cost_s = cost_s

    def copy(self, destination, source):
        self._clock.advance(self._cost_s)
        super().copy(destination, source)


@pytest.fixture
def slow_store(monkeypatch):
    """Give each capture of more than 32 KiB a cost on a fake clock, which the recorder's budget goes by."""
    clock = FakeClock()
    monkeypatch.setattr(recorder_module, "Budget", lambda share: Budget(share, clock))
    device = SlowDevice(clock, 0.01)
    monkeypatch.setattr(recorder_module.Devices, "of", lambda *_: device)
    return clock


def train(recorder, model, clock, num_batches, *, automatic=False):
    batches = range(num_batches) if automatic else recorder.batches(range(num_batches), epoch=0)
    for batch in batches:
        clock.advance(0.1)
        model(torch.full((10_000,), float(batch), requires_grad=True)).sum().backward()


@pytest.mark.parametrize("automatic", [False, True])
def test_recorder_with_a_slow_store(tmp_path, slow_store, automatic):
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    with hookstore.record(model, tmp_path / "run", kinds=("activation", "gradient"), max_slowdown=0.05) as recorder:
        with pytest.warns(hookstore.CaptureWarning, match=r"being left out, first batch 1 of epoch 0.*max_slowdown=0\.05"):
            train(recorder, model, slow_store, 200, automatic=automatic)
        assert recorder.progress.num_skipped_batches > 0
        skipped = recorder.progress.num_skipped_batches
    with hookstore.open(tmp_path / "run") as run:
        batches = run.batches(0)
        # Four captures of 10 ms a batch, 5 ms earned a step: one batch in eight, and the first.
        assert len(batches) == pytest.approx(200 / 8, abs=2)
        assert batches[0] == 0
        for batch in batches:
            for layer, kind in itertools.product(("0", "1"), ("activation", "gradient")):
                assert run[layer][kind][0, batch].size == 10_000, "whole batches"
        rows = [row for row in run.manifest.to_pylist() if row["status"] == "skipped"]
        assert len(rows) == skipped == 200 - len(batches)
        assert sorted({row["batch"] for row in rows} | set(batches)) == list(range(200))
        assert {(row["layer"], row["kind"], row["phase"], row["reason"]) for row in rows} == {
            ("", "", "train", "recording it would have gone over max_slowdown=0.05")
        }
        with pytest.raises(
            hookstore.MissingCaptureError, match=r"was skipped: recording it would have gone over max_slowdown=0\.05"
        ) as missing:
            run["0"].activation[0, rows[0]["batch"]]
        assert missing.value.status == "skipped"
        assert run.description["recorded"]["max_slowdown"] == 0.05


@pytest.mark.parametrize("phases", ["train", ("train", "eval")])
def test_batches_that_begin_in_eval_mode_are_within_the_budget_too(tmp_path, slow_store, phases):
    model = nn.ReLU()
    with (
        pytest.warns(hookstore.CaptureWarning, match="being left out"),
        hookstore.record(model, tmp_path / "run", layers="", phases=phases, max_slowdown=0.05) as recorder,
    ):
        for _ in recorder.batches(range(200), epoch=0):
            model.train()
            slow_store.advance(0.1)
            model(torch.ones(10_000))
            model.eval()
            model(torch.ones(10_000))
    with hookstore.open(tmp_path / "run") as run:
        rows = run.manifest.to_pylist()
        captured = {row["batch"] for row in rows if row["status"] == "ok"}
        assert sorted(captured | {row["batch"] for row in rows if row["status"] == "skipped"}) == list(range(200))
        assert 0 < len(captured) <= 200 * 0.005 / (0.01 if phases == "train" else 0.02) + 2
        left_out = next(row for row in rows if row["status"] == "skipped")
        with pytest.raises(hookstore.MissingCaptureError, match="was skipped: recording it would have gone over"):
            run[""].activation[0, left_out["batch"]]
        with pytest.raises(hookstore.MissingCaptureError, match="the whole of (train|eval) epoch 0, batch"):
            run.read(left_out)


def test_no_hooks_on_a_batch_that_is_left_out(tmp_path, slow_store):
    model = nn.Sequential(nn.ReLU(), nn.Tanh())
    seen = set()
    with (
        hookstore.record(model, tmp_path / "run", max_slowdown=0.05) as recorder,
        pytest.warns(hookstore.CaptureWarning, match="being left out"),
    ):
        for batch in recorder.batches(range(30), epoch=0):
            slow_store.advance(0.1)
            before = recorder.progress.num_captured
            has_hooks = any(module._forward_hooks or module._forward_pre_hooks for module in model)
            model(torch.ones(10_000))
            seen.add((has_hooks, recorder.progress.num_captured - before))
            assert batch >= 0
    assert seen == {(True, 2), (False, 0)}


def test_without_a_budget_everything_is_recorded(tmp_path, slow_store):
    model = nn.ReLU()
    with hookstore.record(model, tmp_path / "run") as recorder:
        train(recorder, model, slow_store, 20)
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0) == list(range(20))


@pytest.mark.parametrize("share", [0, -0.1, math.inf, math.nan, True, "5%"])
def test_bad_shares_are_refused(tmp_path, share):
    with pytest.raises(hookstore.OptionError, match="max_slowdown: expected a share above 0"):
        hookstore.record(nn.ReLU(), tmp_path / "run", max_slowdown=share)
    assert not (tmp_path / "run").exists()
