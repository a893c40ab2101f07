"""The flight recorder: the last batches in memory, on disk when a trigger fires, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from flights import Poisoned, batch_of, batches_on_disk, fired, model_of, rows, take_step, train
from small import recording
from torch import nn

import hookstore
from hookstore.ring import Gap, Ring

pytestmark = pytest.mark.filterwarnings("ignore:the flight recorder fired")


def reference_of(model, batches, rate):
    """Train without a recorder, and return what the layers returned, and its gradients, by layer, kind and batch."""
    seen = {}
    current = [0]

    def keep(name):
        def hook(_module, _inputs, output):
            number = current[0]
            seen[name, "activation", number] = output.detach().clone()
            output.register_hook(lambda gradient: seen.__setitem__((name, "gradient", number), gradient.detach().clone()))

        return hook

    handles = [model[index].register_forward_hook(keep(str(index))) for index in (0, 2, 3)]
    for number in batches:
        current[0] = number
        take_step(model, number, rate)
    for handle in handles:
        handle.remove()
    return seen


def test_a_model_that_turns_nan_is_on_disk_from_four_batches_before_to_five_after_and_nothing_else(tmp_path):
    model, plain = model_of([20]), model_of([20])
    reference = reference_of(plain, range(60), 0.01)
    with pytest.warns(hookstore.CaptureWarning, match=r"fired in train epoch 0, batch 20: non-finite activation of layer '2': 1 NaN"):  # noqa: SIM117
        with recording(model, tmp_path / "run", layers=["0", "2", "3"], kinds=["activation", "gradient"], last=5) as recorder:
            train(model, range(60), recorder, rate=0.01)
    assert fired(tmp_path / "run") == [(20, "non-finite activation of layer '2': 1 NaN, 0 Inf, first at index (3, 2)")]
    assert {row["status"] for row in rows(tmp_path / "run")} == {"ok", "fired"}
    assert hookstore.verify(tmp_path / "run").faults == []
    run = hookstore.open(tmp_path / "run")
    reason = "non-finite activation of layer '2': 1 NaN, 0 Inf, first at index (3, 2)"
    assert run.fired == [hookstore.Fired("train", 0, 20, 0, reason)]
    assert run.partial_batches == []
    with pytest.raises(hookstore.MissingCaptureError, match=r"^(?!.*fired).*was not captured"):
        run["0"].activation.get(0, 20, call=1)
    found = {(row["layer"], row["kind"], row["batch"]) for row in rows(tmp_path / "run", status="ok")}
    assert found == {key for key in reference if 16 <= key[2] <= 25}
    for layer, kind, batch in found:
        stored = getattr(run[layer], kind).get(0, batch)
        expected = reference[layer, kind, batch]
        assert stored.tobytes() == expected.numpy().tobytes(), (layer, kind, batch)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.detach().numpy().tobytes() == theirs.detach().numpy().tobytes(), "the model computes the same"


def test_a_run_in_which_nothing_fires_holds_no_captures_and_bounded_memory(tmp_path):
    model = nn.Linear(4, 2)
    inputs = torch.ones(3, 4)
    most = 0
    with recording(model, tmp_path / "run", layers=[""], kinds=["activation", "gradient"], last=5, buffer_bytes=1 << 20) as recorder:
        for number in range(2000):
            recorder.at(epoch=0, batch=number)
            model(inputs).sum().backward()
            if number % 100 == 99:
                recorder.flush()
                most = max(most, recorder.progress.lag_bytes)
    assert most == 6 * 2 * 4096, "six batches of two captures, a page each"
    files = [name for place, _, names in os.walk(tmp_path / "run") for name in names]
    assert sorted(files) == ["run.json", "zarr.json"]
    assert rows(tmp_path / "run") == []


def test_two_firings_that_overlap_are_one_stretch(tmp_path):
    model = model_of([10, 13])
    with recording(model, tmp_path / "run", layers="2", last=3) as recorder:
        train(model, range(30), recorder)
    assert batches_on_disk(tmp_path / "run") == [*range(8, 17)]
    assert [batch for batch, _ in fired(tmp_path / "run")] == [10, 13]


def test_two_firings_far_apart_are_two_stretches(tmp_path):
    model = model_of([10, 25])
    with recording(model, tmp_path / "run", layers="2", last=2) as recorder:
        train(model, range(40), recorder)
    assert batches_on_disk(tmp_path / "run") == [9, 10, 11, 12, 24, 25, 26, 27]


def test_what_goes_on_to_hold_has_fired_once_until_it_has_not_held(tmp_path):
    model = model_of([5, 6, 7, 8, 9, 10, 11, 15])
    with recording(model, tmp_path / "run", layers="2", last=1) as recorder:
        train(model, range(20), recorder)
    assert [batch for batch, _ in fired(tmp_path / "run")] == [5, 15]
    assert batches_on_disk(tmp_path / "run") == [5, 6, 15, 16]


def test_what_always_holds_for_one_tensor_hides_no_other(tmp_path):
    """A mask that is infinite in every batch, and a layer behind it that becomes NaN, and then all layers that come after an optimizer's step."""

    class Masked(nn.Module):
        def forward(self, inputs):
            return inputs.masked_fill(torch.eye(5, 4, dtype=torch.bool), float("-inf"))

    model = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1), Poisoned([20, 21, 22, 30], size=4))
    with recording(model, tmp_path / "run", layers="[0-3]", last=2) as recorder:
        for number in range(40):
            recorder.at(epoch=0, batch=number)
            if number in (21, 22):
                with torch.no_grad():
                    model[0].bias.fill_(float("nan"))
            model(batch_of(number))
            with torch.no_grad():
                model[0].bias.fill_(0.0)
    assert fired(tmp_path / "run") == [
        (0, "non-finite activation of layer '1': 0 NaN, 4 Inf, first at index (0, 0)"),
        (20, "non-finite activation of layer '3': 1 NaN, 0 Inf, first at index (3, 2)"),
        (30, "non-finite activation of layer '3': 1 NaN, 0 Inf, first at index (3, 2)"),
    ]
    assert batches_on_disk(tmp_path / "run") == [0, 1, 2, 19, 20, 21, 22, 29, 30, 31, 32]


def test_one_call_does_not_hide_what_begins_in_another(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, inputs):
            self.inner(torch.tensor([0.0, float("-inf")]))  # a mask, in every batch
            return self.inner(inputs)

    model = Masked()
    with recording(model, tmp_path / "run", layers="inner", last=2) as recorder:
        for number in range(30):
            recorder.at(epoch=0, batch=number)
            model(torch.full((2,), float("nan") if number >= 20 else 1.0))
    assert [(batch, "call 1" in reason) for batch, reason in fired(tmp_path / "run")] == [(0, False), (20, True)]
    assert batches_on_disk(tmp_path / "run") == [0, 1, 2, 19, 20, 21, 22]


def test_each_of_a_row_of_layers_that_break_one_after_the_other_is_on_disk(tmp_path):
    model = nn.ModuleList(Poisoned([3 + position], index=(0,)) for position in range(8))
    with recording(model, tmp_path / "run", layers="*", last=2) as recorder:
        for number in range(20):
            recorder.at(epoch=0, batch=number)
            for layer in model:
                layer(torch.ones(6))
    assert [batch for batch, _ in fired(tmp_path / "run")] == [3, 5, 7, 9]
    assert batches_on_disk(tmp_path / "run") == list(range(2, 12))


def test_the_first_capture_in_time_is_named_whatever_order_the_writer_has_them_in(tmp_path):
    """The first layer's captures wait for more in their region, those of the second are large and come at once."""
    model = nn.Sequential(Poisoned([3], index=(1, 2), size=4), nn.Linear(4, 40_000))
    with recording(model, tmp_path / "run", last=2, layers=["0", "1"], buffer_bytes=64 << 20) as recorder:
        for number in range(6):
            recorder.at(epoch=0, batch=number)
            model(batch_of(number))
    ((batch, reason),) = fired(tmp_path / "run")
    assert (batch, reason) == (3, "non-finite activation of layer '0': 1 NaN, 0 Inf, first at index (1, 2)")


def test_the_index_is_that_in_the_true_shape(tmp_path):
    """Captures of other shapes stand in larger chunks."""
    layer = nn.Identity()
    with recording(layer, tmp_path / "run", layers=[""], last=1) as recorder:
        for number, size in enumerate((9, 7, 8, 7)):
            tensor = torch.zeros(size, 5)
            if number == 3:
                tensor[6, 4] = float("-inf")
            recorder.at(epoch=0, batch=number)
            layer(tensor)
    ((batch, reason),) = fired(tmp_path / "run")
    assert (batch, reason) == (3, "non-finite activation of layer '': 0 NaN, 1 Inf, first at index (6, 4)")


def test_gradients_that_come_after_the_next_forward_are_in_their_own_batch(tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    with recording(model, tmp_path / "run", kinds=["activation", "gradient"], last=3) as recorder:
        waiting = None
        for number in range(12):
            recorder.at(epoch=0, batch=number)
            loss = model(batch_of(number)).sum()
            if waiting is not None:
                waiting.backward()
            waiting = loss * (float("nan") if number == 6 else 1.0)
    ((batch, reason),) = fired(tmp_path / "run")
    assert batch == 6
    assert reason.startswith("non-finite gradient of layer '1': 10 NaN")
    assert batches_on_disk(tmp_path / "run", kind="activation") == [4, 5, 6, 7, 8, 9]
    assert batches_on_disk(tmp_path / "run", kind="gradient") == [4, 5, 6, 7, 8, 9]
    assert rows(tmp_path / "run", status="dropped") == []


def test_a_verdict_that_comes_too_late_says_which_batches_had_left(tmp_path):
    model = nn.Linear(4, 2)
    losses = {}
    with recording(model, tmp_path / "run", kinds=["activation", "gradient"], layers=[""], last=2) as recorder:
        for number in range(10):
            recorder.at(epoch=0, batch=number)
            losses[number] = model(batch_of(number)).sum()
            if number >= 3:
                (losses.pop(number - 3) * (float("nan") if number == 8 else 1.0)).backward()
    assert [batch for batch, _ in fired(tmp_path / "run")] == [5]
    assert batches_on_disk(tmp_path / "run", kind="activation") == [6, 7], "4 and 5 had left"
    dropped = rows(tmp_path / "run", status="dropped")
    assert [row["batch"] for row in dropped] == [4, 5]
    assert {row["reason"] for row in dropped} == {"the trigger fired after the batch had left the flight recorder's ring"}


def test_a_backward_that_comes_long_after_says_what_had_left_before_and_after_its_batch(tmp_path):
    model = nn.Linear(2, 2)
    late = []
    with recording(model, tmp_path / "run", layers=[""], kinds=["activation", "gradient"], last=1) as recorder:
        for number in range(20):
            recorder.at(epoch=0, batch=number)
            late.append(model(torch.ones(2)))
            if number >= 5:
                late.pop(0).backward(torch.full((2,), float("inf") if number == 15 else 1.0))
    assert [batch for batch, _ in fired(tmp_path / "run")] == [10]
    assert batches_on_disk(tmp_path / "run", kind="activation") == []
    assert batches_on_disk(tmp_path / "run", kind="gradient") == [10, 11]
    assert [row["batch"] for row in rows(tmp_path / "run", status="dropped")] == [10, 11]


def test_phases_and_epochs_count_by_time(tmp_path):
    model = model_of([8])
    with recording(model, tmp_path / "run", layers="2", phases=["train", "eval"], last=3) as recorder:
        for epoch in range(3):
            model.train()
            for number, _ in enumerate(recorder.batches(range(3), epoch=epoch)):
                model(batch_of(number))
            model.eval()
            for number, _ in enumerate(recorder.batches(range(2), epoch=epoch)):
                model(batch_of(number))
    found = [(row["phase"], row["epoch"], row["batch"]) for row in rows(tmp_path / "run", status="ok")]
    assert sorted(found) == sorted([("train", 1, 1), ("train", 1, 2), ("eval", 1, 0), ("eval", 1, 1), ("train", 2, 0), ("train", 2, 1)])
    (row,) = rows(tmp_path / "run", status="fired")
    assert (row["phase"], row["epoch"], row["batch"]) == ("eval", 1, 0)


def test_the_automatic_clock_moves_the_ring(tmp_path):
    model = model_of([6])
    with recording(model, tmp_path / "run", layers="2", last=2):
        for number in range(12):
            model(batch_of(number))
    assert batches_on_disk(tmp_path / "run") == [5, 6, 7, 8]


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("kinds", [("activation", "gradient"), ("gradient",)], ids=len)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_compiled_model_are_in_the_batch_of_their_forward(tmp_path, backend, kinds, delay):
    """All that the graph keeps for the backward are numbers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend=backend)
    late, expected = [], {}
    with recording(compiled, tmp_path / "run", layers="*", kinds=kinds, last=3) as recorder:
        for number in recorder.batches(range(16), epoch=0):
            factor = float("nan") if number == 8 else float(number)
            late.append((compiled(batch_of(number)) * factor).sum())
            expected[number] = torch.full((5, 2), factor)
            if number >= delay:
                late.pop(0).backward()
            recorder.flush()  # nothing of the batch is on its way any more
    assert [batch for batch, _ in fired(tmp_path / "run")] == [8]
    first = 6 if delay == 1 or kinds == ("gradient",) else 7  # its activations had left the ring when the gradient of 8 came
    assert [row["batch"] for row in rows(tmp_path / "run", status="dropped")] == [*range(6, first)]
    for kind in kinds:
        assert [row["batch"] for row in rows(tmp_path / "run", status="ok", kind=kind, layer="1")] == [*range(first, 12)]
    with hookstore.open(tmp_path / "run") as run:
        for number in range(first, 12):
            np.testing.assert_array_equal(run["2"].gradient[0, number], expected[number])


def test_layers_with_many_calls_are_whole(tmp_path):
    model = Poisoned([37], size=4)
    with recording(model, tmp_path / "run", layers=["inner"], last=2) as recorder:
        for number in range(8):
            recorder.at(epoch=0, batch=number)
            for call in range(10):
                model(batch_of(10 * number + call)).sum()
        recorder.fire("by hand")
    assert fired(tmp_path / "run") == [(7, "by hand")]
    found = sorted((row["batch"], row["call"]) for row in rows(tmp_path / "run", status="ok"))
    assert found == [(batch, call) for batch in (6, 7) for call in range(10)]


def test_firing_by_hand_needs_a_flight_recorder(tmp_path):
    with recording(model_of(), tmp_path / "run") as recorder, pytest.raises(hookstore.OptionError, match=r"record\(…, last=5\) makes one"):
        recorder.fire("now")


def test_firing_before_the_first_batch_writes_those_that_follow(tmp_path):
    model = model_of()
    with recording(model, tmp_path / "run", layers="2", last=2) as recorder:
        recorder.fire("at once")
        train(model, range(6), recorder)
    assert batches_on_disk(tmp_path / "run") == [0, 1]


# Room --------------------------------------------------------------------------------------------------------------


def test_batches_that_find_no_room_are_given_up_from_the_oldest_on_and_training_goes_on(tmp_path):
    model = nn.Linear(4, 2000)  # 40 kB a batch; 64 kB hold one of them
    inputs = torch.ones(5, 4)
    with (
        pytest.warns(
            hookstore.CaptureWarning,
            match=r"holds [0-2] whole batches of the 6 that last= asks for.*all need a buffer_bytes of 327,680 or more",
        ),
        recording(model, tmp_path / "run", layers=[""], last=6, buffer_bytes=128 << 10) as recorder,
    ):
        for number in range(30):
            recorder.at(epoch=0, batch=number)
            model(inputs * (float("nan") if number == 15 else 1.0))
    assert [batch for batch, _ in fired(tmp_path / "run")] == [15]
    on_disk, dropped = batches_on_disk(tmp_path / "run"), rows(tmp_path / "run", status="dropped")
    assert on_disk[-7:] == [*range(15, 22)]
    assert [row["batch"] for row in dropped] == sorted({*range(10, 16)} - {*on_disk})
    assert dropped
    assert all("given up: the staging buffer was full" in row["reason"] for row in dropped)


def test_nothing_is_given_up_where_there_is_room_for_all_as_soon_as_the_writer_comes_to_it(tmp_path):
    """Five batches of three pages are 60 kB: four in the ring, and the one that comes, which waits for the oldest to leave."""
    model = nn.Identity()
    with recording(model, tmp_path / "run", layers=[""], last=3, buffer_bytes=64 << 10) as recorder:
        for number in range(200):
            recorder.at(epoch=0, batch=number)
            model(torch.full((3000,), float(number)))
        recorder.fire("now")
    assert batches_on_disk(tmp_path / "run") == [197, 198, 199]


def test_a_batch_larger_than_the_buffer_does_not_stop_training(tmp_path):
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(30)))  # 8 kB each, 240 kB
    with pytest.warns(hookstore.CaptureWarning, match="holds 0 whole batches"):  # noqa: SIM117
        with recording(model, tmp_path / "run", last=2, buffer_bytes=64 << 10) as recorder:
            for number in range(6):
                recorder.at(epoch=0, batch=number)
                model(torch.ones(50, 40))
            recorder.fire("now")
    assert [row["batch"] for row in rows(tmp_path / "run", status="dropped")] == [4, 5]
    assert set(batches_on_disk(tmp_path / "run")) <= {5}


def test_a_capture_larger_than_the_buffer_is_a_gap_and_judged(tmp_path):
    model = nn.Linear(4, 10_000)
    with pytest.warns(hookstore.CaptureWarning, match="keeps captures in the staging buffer, whose 65,536 bytes are fewer"):  # noqa: SIM117
        with recording(model, tmp_path / "run", layers=[""], last=1, buffer_bytes=64 << 10) as recorder:
            for number in range(6):
                recorder.at(epoch=0, batch=number)
                model(torch.ones(5, 4) * (float("nan") if number == 3 else 1.0))
    assert fired(tmp_path / "run") == [(3, "non-finite activation of layer '': 50000 NaN, 0 Inf")]
    assert [(row["batch"], row["nan"]) for row in rows(tmp_path / "run", status="dropped")] == [(3, 50_000), (4, 0)]


def test_gaps_are_in_the_ring_too(tmp_path):
    class Elsewhere(nn.Module):
        def forward(self, inputs):
            return inputs.to("meta")

    model = Elsewhere()
    with (
        pytest.warns(hookstore.CaptureWarning, match="it is on the meta device"),
        recording(model, tmp_path / "run", layers=[""], last=1) as recorder,
    ):
        for number in range(100):
            recorder.at(epoch=0, batch=number)
            model(torch.ones(2))
            if number == 50:
                recorder.flush()
                recorder.fire("now")
    assert [row["batch"] for row in rows(tmp_path / "run", status="skipped")] == [50, 51]


def test_what_fires_stops_at_max_bytes_and_what_is_kept_does_not_count(tmp_path):
    model = nn.Linear(4, 2000)
    with pytest.warns(hookstore.CaptureWarning, match=r"recording stopped in epoch 0, batch \d+: the run would take more than max_bytes"):  # noqa: SIM117
        with recording(model, tmp_path / "run", layers=[""], last=4, max_bytes=1_200_000, buffer_bytes=1 << 20) as recorder:
            for number in range(20):
                recorder.at(epoch=0, batch=number)
                model(torch.ones(5, 4))
            recorder.flush()
            recorder.fire("first")
            for number in range(20, 60):
                recorder.at(epoch=0, batch=number)
                model(torch.ones(5, 4))
                recorder.flush()
                recorder.fire("more")
    assert batches_on_disk(tmp_path / "run")[0] == 16
    assert len(rows(tmp_path / "run", status="stopped")) == 1
    assert sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(tmp_path / "run") for name in names) <= 1_200_000


# Processes that end ------------------------------------------------------------------------------------------------

JOBS = """
import os, signal, sys, torch, hookstore
from torch import nn

def step(recorder, model, number):
    recorder.at(epoch=0, batch=number)
    model(torch.full((3, 4), float(number)))

def raises(path):
    model = nn.Linear(4, 2)
    recorder = hookstore.record(model, path, layers=[""], last=3, buffer_bytes=1 << 20)
    for number in range(8):
        step(recorder, model, number)
    raise ValueError("the end")

def is_terminated(path):
    model = nn.Linear(4, 2)
    with hookstore.record(model, path, layers=[""], last=3, on_sigterm="flush", buffer_bytes=1 << 20) as recorder:
        for number in range(10**9):
            step(recorder, model, number)
            if number == 50:
                os.kill(os.getpid(), signal.SIGTERM)

def is_killed(path):
    model = nn.Linear(4, 5000)
    recorder = hookstore.record(model, path, layers=[""], last=20, buffer_bytes=8 << 20)
    writer, written = recorder._writer, []
    write_region = writer._write_region
    def write(prepared):
        write_region(prepared)
        written.append(prepared)
        if len(written) == 10:
            writer._acknowledge()
            os.kill(os.getpid(), signal.SIGKILL)
    writer._write_region = write
    for number in range(60):
        step(recorder, model, number)
    recorder.fire("now")
    recorder.flush()

torch.set_num_threads(1)
for job in (raises, is_terminated, is_killed):
    if os.fork() == 0:
        job(os.path.join(sys.argv[1], job.__name__))
        sys.exit(0)
    print(job.__name__, os.wait()[1])
"""


@pytest.fixture(scope="module", name="ended")
def _ended(tmp_path_factory):
    """Processes that have come to their ends, each with a run: the directory, and how they ended."""
    directory = tmp_path_factory.mktemp("ended")
    made = subprocess.run([sys.executable, "-c", JOBS, str(directory)], capture_output=True, text=True, timeout=60, check=True)
    return directory, {name: int(status) for name, status in map(str.split, made.stdout.splitlines())}


def test_an_exception_that_ends_the_process_fires_without_a_with_statement(ended):
    directory, how = ended
    assert os.waitstatus_to_exitcode(how["raises"]) == 1
    assert fired(directory / "raises") == [(7, "ValueError: the end ended the process")]
    assert batches_on_disk(directory / "raises") == [5, 6, 7]
    assert [row["batch"] for row in rows(directory / "raises", status="partial")] == [7]


def test_sigterm_with_flush_writes_the_ring_before_the_process_ends(ended):
    directory, how = ended
    assert os.waitstatus_to_exitcode(how["is_terminated"]) == -signal.SIGTERM
    ((batch, reason),) = fired(directory / "is_terminated")
    assert reason == "signal SIGTERM"
    assert batches_on_disk(directory / "is_terminated")[:3] == [batch - 2, batch - 1, batch]


def test_a_kill_while_it_writes_out_leaves_a_run_that_can_be_read_and_gone_on_with(ended):
    directory, how = ended
    assert os.waitstatus_to_exitcode(how["is_killed"]) == -signal.SIGKILL
    path = directory / "is_killed"
    assert batches_on_disk(path) == [*range(40, 50)]
    with recording(nn.Linear(4, 5000), path, layers=[""], last=2, mode="a"):
        pass
    assert batches_on_disk(path) == [*range(40, 50)]
    run = hookstore.open(path)
    assert run[""].activation.get(0, 45).shape == (3, 5000)
    run.close()


# Life --------------------------------------------------------------------------------------------------------------


def test_flush_waits_for_what_fired_and_not_for_the_ring(tmp_path):
    model = model_of([9])
    with recording(model, tmp_path / "run", layers="2", last=3) as recorder:
        train(model, range(9), recorder)
        recorder.flush()
        assert hookstore.open(tmp_path / "run").manifest.num_rows == 0
        train(model, range(9, 11), recorder)
        recorder.flush()
        assert batches_on_disk(tmp_path / "run") == [7, 8, 9, 10]
        assert [batch for batch, _ in fired(tmp_path / "run")] == [9]
        recorder.fire("again")
        recorder.flush()
        assert [batch for batch, _ in fired(tmp_path / "run")] == [9, 10]


def test_flush_waits_for_what_was_kept_until_something_fired(tmp_path):
    model = nn.Linear(4, 20_000)
    with recording(model, tmp_path / "run", layers=[""], last=8, codec="zstd", buffer_bytes=16 << 20) as recorder:
        for number in range(8):
            recorder.at(epoch=0, batch=number)
            model(batch_of(number))
        recorder.flush()
        recorder.fire("now")
        recorder.flush()
        assert batches_on_disk(tmp_path / "run") == [*range(8)]


def test_a_batch_goes_to_the_writer_when_the_next_begins_whatever_layers_that_calls(tmp_path):
    model = nn.ModuleList([nn.Identity(), nn.Identity()])
    with recording(model, tmp_path / "run", last=2) as recorder:
        for number in (0, 1):
            recorder.at(epoch=0, batch=number)
            model[number](torch.ones(2))
        assert 0 not in [region.coordinates.batch for region in recorder._stager._open]


def test_statistics_are_in_the_manifest_and_run_json_says_what_fires(tmp_path):
    model = model_of([4])
    with recording(model, tmp_path / "run", layers="2", last=1) as recorder:
        train(model, range(8), recorder)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["recorded"]
    assert (recorded["last"], recorded["when"]) == (1, "NonFinite(), Raised()")
    assert [row["nan"] for row in rows(tmp_path / "run", status="ok")] == [1, 0]


def test_encoded_captures_are_encoded_when_they_are_written(tmp_path):
    model = model_of([20])
    plain = reference_of(model_of([20]), range(30), 0.0)
    with recording(model, tmp_path / "run", layers="2", codec="zstd", last=2) as recorder:
        train(model, range(30), recorder)
    run = hookstore.open(tmp_path / "run")
    assert batches_on_disk(tmp_path / "run") == [19, 20, 21, 22]
    for batch in range(19, 23):
        assert run["2"].activation.get(0, batch).tobytes() == plain["2", "activation", batch].numpy().tobytes()


# The ring alone ----------------------------------------------------------------------------------------------------


def ring_of(last):
    written, released = [], []
    return Ring(last, written.append, released.append), written, released


def test_a_ring_keeps_one_batch_more_than_it_writes():
    ring, written, released = ring_of(2)
    for number in range(6):
        ring.add(number, f"batch {number}", number, 10)
    assert (written, released) == ([], [0, 1, 2])
    assert ring.batch_bytes == [10, 10, 10]
    assert ring.fire(5) == []
    assert written == [4, 5]
    for number in range(6, 10):
        ring.add(number, f"batch {number}", number, 10)
    assert written == [4, 5, 6, 7]
    ring.close()
    assert sorted(written + released) == [*range(10)], "each once"


def test_a_ring_that_gave_up_says_so():
    ring, written, released = ring_of(3)
    for number in range(3):
        for item in "ab":
            ring.add(number, f"batch {number}", f"{item}{number}", 10)
        ring.add(number, f"batch {number}", f"gap{number}")
    assert ring.give_up()
    assert released == ["a0", "b0"]
    assert ring.fire(2) == [Gap("batch 0", "2 of its pieces were given up: the staging buffer was full")]
    assert written == ["gap0", "a1", "b1", "gap1", "a2", "b2", "gap2"]
    assert not ring.give_up(), "nothing is left that has bytes"


def test_a_late_item_of_a_batch_that_was_written_is_written():
    ring, written, released = ring_of(1)
    ring.add(0, "batch 0", "early", 1)
    ring.fire(0)
    ring.add(5, "batch 5", "new", 1)
    ring.add(0, "batch 0", "late", 1)
    ring.add(2, "batch 2", "too late", 1)
    assert (written, released) == (["early", "late"], ["too late"])
