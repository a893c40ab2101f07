"""Captures with a condition: statistics alone, and full tensors while the condition holds."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from simulated import SCHEDULES, SimulatedLayer, SimulatedRuntime, check_memory
from simulated import recording as recording_on_device
from small import recording
from torch import nn

import hookstore
from hookstore import Capture
from hookstore.device_statistics import compute
from hookstore.triggers import GradientNorm, NonFinite, Raised, Signalled


def statuses(path, **wanted):
    """Return for each batch the statuses of its rows."""
    found = {}
    for row in hookstore.open(path).manifest.to_pylist():
        if all(row[name] == value for name, value in wanted.items()):
            found.setdefault(row["batch"], set()).add(row["status"])
    return {batch: "+".join(sorted(found[batch])) for batch in sorted(found)}


def full(path, **wanted):
    return [batch for batch, status in statuses(path, **wanted).items() if status == "ok"]


def run(path, capture, values, *, model=None, **options):
    """Record one batch for each value, in which all elements of the input have it; each is judged before the next begins."""
    model = nn.Identity() if model is None else model
    with recording(model, path, captures=capture, **options) as recorder:
        for number, value in enumerate(values):
            recorder.at(epoch=0, batch=number)
            model(torch.full((3, 2), float(value)))
            recorder.flush()


def is_large(statistics, _where):
    return (statistics.max or 0) > 10


def test_full_tensors_are_stored_for_so_many_batches_after_the_condition_held_and_then_no_more(tmp_path):
    values = [1, 2, 30, 4, 5, 6, 7, 80, 90, 1, 2, 3, 4]
    run(tmp_path / "run", Capture(layers=[""], when=is_large, hold=2), values)
    assert full(tmp_path / "run") == [3, 4, 8, 9, 10]
    assert {status for batch, status in statuses(tmp_path / "run").items() if batch not in (3, 4, 8, 9, 10)} == {"summarized"}
    opened = hookstore.open(tmp_path / "run")
    assert opened[""].activation.get(0, 9).tolist() == [[1.0, 1.0]] * 3
    means = {row["batch"]: row["mean"] for row in opened.manifest.to_pylist()}
    assert [means[batch] for batch in range(len(values))] == values, "statistics are there of every batch"
    opened.close()


def test_a_tensor_larger_than_the_buffer_goes_on_to_be_judged_when_it_is_stored(tmp_path):
    capture = Capture(layers=[""], when=lambda statistics, _where: statistics.max > 10)
    model = nn.Identity()
    with recording(model, tmp_path / "run", captures=capture, buffer_bytes=64 << 10) as recorder:
        for number, value in enumerate([1, 20, 30, 40, 1, 1]):
            recorder.at(epoch=0, batch=number)
            model(torch.full((20_000,), float(value)))
            recorder.flush()
    assert full(tmp_path / "run") == [2, 3, 4]


def test_batches_count_that_the_capture_is_due_in(tmp_path):
    run(tmp_path / "run", Capture(layers=[""], when=is_large, hold=2, every=3), [20, *[1] * 12])
    assert statuses(tmp_path / "run") == {0: "summarized", 3: "ok", 6: "ok", 9: "summarized", 12: "summarized"}


def test_another_capture_of_the_same_layer_does_not_raise_it(tmp_path):
    """The other is due in every batch; batch 3 is none of the first's."""
    captures = [Capture(layers=[""], when=is_large, every=2), Capture(layers=[""], stats="only")]
    run(tmp_path / "run", captures, [1, 1, 1, 20, 1, 1, 30, 1, 1])
    assert full(tmp_path / "run") == [8]
    assert len(statuses(tmp_path / "run")) == 9


def test_a_layer_raises_the_captures_that_choose_it_and_no_others(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    captures = [
        Capture(layers="0", when=lambda statistics, where: where.layer == "0" and is_large(statistics, where), name="first"),
        Capture(layers="1", when=NonFinite(), name="second"),
        Capture(layers=["0", "1"], kinds="input", when=is_large, name="both"),
    ]
    run(tmp_path / "run", captures, [1, 20, 1, float("nan"), 1, 1], model=model)
    assert full(tmp_path / "run", layer="0", kind="activation") == [2]
    assert full(tmp_path / "run", layer="1", kind="activation") == [4]
    assert full(tmp_path / "run", layer="1", kind="input") == [2]
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["recorded"]["captures"]
    assert [capture["when"] for capture in recorded[1:]] == ["NonFinite()", "test_escalation.is_large()"]


def test_one_of_several_conditions_is_enough(tmp_path):
    run(tmp_path / "run", Capture(layers=[""], when=(NonFinite(), is_large)), [1, 20, 1, float("inf"), 1, 1])
    assert full(tmp_path / "run") == [2, 4]


def test_a_gradient_norm_raises_it(tmp_path):
    model = nn.Linear(2, 2)
    capture = Capture(layers=[""], kinds=["activation", "gradient"], when=GradientNorm(times=5, num_first=3))
    with recording(model, tmp_path / "run", captures=capture) as recorder:
        for number in range(10):
            recorder.at(epoch=0, batch=number)
            (model(torch.ones(3, 2)).sum() * (50 if number == 6 else 1)).backward()
            recorder.flush()
    assert full(tmp_path / "run", kind="gradient") == full(tmp_path / "run", kind="activation") == [7]


def test_the_verdict_comes_by_itself_when_the_next_batch_begins(tmp_path):
    """Nobody flushes: a batch goes to the writer when the next one begins, which comes too early for the verdict, and those after it do not."""
    model = nn.Identity()
    with recording(model, tmp_path / "run", captures=Capture(layers=[""], when=is_large, hold=100)) as recorder:
        choice = recorder._clock.agenda.choices[0]
        recorder.at(epoch=0, batch=0)
        model(torch.full((3, 2), 20.0))
        recorder.at(epoch=0, batch=1)
        model(torch.ones(3, 2))
        while not choice.is_called_for:
            pass
        for number in range(2, 5):
            recorder.at(epoch=0, batch=number)
            model(torch.ones(3, 2))
    assert full(tmp_path / "run") == [2, 3, 4]


def test_it_works_beside_a_flight_recorder(tmp_path):
    with pytest.warns(hookstore.CaptureWarning, match="the flight recorder fired"):
        run(tmp_path / "run", Capture(layers=[""], when=is_large), [1, 20, 1, 1, 1, float("nan"), 1, 1, 1], last=4)
    assert statuses(tmp_path / "run", layer="", kind="activation") == {
        2: "ok",
        3: "summarized",
        4: "summarized",
        5: "summarized",
        6: "summarized",
        7: "summarized",
        8: "summarized",
    }


@pytest.mark.parametrize(
    ("when", "message"),
    [
        (Raised(), "says nothing about a layer"),
        (Signalled(signal.SIGUSR1), "says nothing about a layer"),
        ("loss", "got 'l'"),
        ((), "got none"),
    ],
)
def test_a_capture_refuses_what_is_no_condition(when, message):
    with pytest.raises(hookstore.OptionError, match=message):
        Capture(when=when)


# On a device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
@pytest.mark.filterwarnings("ignore:the flight recorder fired")
def test_a_flight_recorder_on_a_device_whose_operations_come_late(tmp_path, monkeypatch, schedule):
    """Nothing in the training thread waits for the statistics, and the bytes that are written are those of their batch."""
    runtime = SimulatedRuntime(schedule)
    model = SimulatedLayer(runtime)
    expected = {}

    def compute_on_device(tensor):
        vector = runtime.allocate(72).view(torch.float64)
        runtime.launch(lambda into, numbers: into.copy_(compute(numbers)), vector, tensor)
        return vector

    monkeypatch.setattr(hookstore.staging, "compute_statistics", compute_on_device)
    with recording_on_device(monkeypatch, model, tmp_path / "run", runtime, layers=[""], last=3, buffer_bytes=256 << 10) as recorder:
        for number in range(30):
            values = torch.randn(8, 12, generator=torch.Generator().manual_seed(number))
            if number == 20:
                values[5, 7] = float("nan")
            expected[number] = values.clone()
            recorder.at(epoch=0, batch=number)
            model(values)
    check_memory(recorder, runtime)
    found = hookstore.open(tmp_path / "run")
    rows = found.manifest.to_pylist()
    assert [(row["batch"], row["reason"]) for row in rows if row["status"] == "fired"] == [
        (20, "non-finite activation of layer '': 1 NaN, 0 Inf, first at index (5, 7)")
    ]
    assert sorted(row["batch"] for row in rows if row["status"] == "ok") == [*range(18, 24)]
    for number in range(18, 24):
        assert found[""].activation.get(0, number).tobytes() == expected[number].numpy().tobytes()
    found.close()
