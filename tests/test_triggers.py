"""Triggers: what fires, what it is asked about, and what is refused."""

from __future__ import annotations

import signal

import pytest
import torch
from flights import batch_of, batches_on_disk, fired, model_of, rows, train
from small import recording
from torch import nn

import hookstore
from hookstore.judges import Onset
from hookstore.triggers import GradientNorm, NonFinite, Raised, Signalled, Where

pytestmark = pytest.mark.filterwarnings("ignore:the flight recorder fired")


def test_an_onset_is_one_for_each_tensor_whatever_stands_between_its_batches():
    def story(*steps):
        onset, found = Onset(), []
        for key, number, holds in steps:
            if onset.is_news((key,), number, holds=holds):
                found.append((key, number, onset.fires(number)))
        return found

    assert story(("a", 0, True), ("a", 1, True), ("b", 5, True), ("a", 6, True)) == [("a", 0, True), ("b", 5, True)]
    assert story(("a", 0, True), ("a", 1, False), ("a", 1, True), ("a", 2, False), ("a", 2, True)) == [("a", 0, True)]
    assert story(("a", 0, True), ("a", 1, False), ("a", 2, True), ("a", 3, True)) == [("a", 0, True), ("a", 2, True)]
    assert story(("a", 0, True), ("a", 1, False), ("a", 2, False), ("a", 3, True)) == [("a", 0, True), ("a", 3, True)]
    assert story(("a", 0, True), ("b", 0, True), ("b", 1, True), ("c", 1, True)) == [("a", 0, True), ("b", 0, False), ("c", 1, False)]
    assert story(("a", 4, True), ("a", 3, True), ("a", 5, True)) == [("a", 4, True)]
    # a gradient that comes late takes nothing back of what is known of later batches
    assert story(("a", 4, True), ("a", 6, False), ("a", 5, True), ("a", 7, True)) == [("a", 4, True), ("a", 7, True)]
    assert story(("a", 4, True), ("a", 5, False), ("a", 4, True), ("a", 6, True)) == [("a", 4, True), ("a", 6, True)]
    # what is taken for the spread of something else does not hide what begins after it
    assert story(("a", 0, True), ("b", 1, True), ("c", 2, True), ("d", 3, True)) == [
        ("a", 0, True),
        ("b", 1, False),
        ("c", 2, True),
        ("d", 3, False),
    ]


def test_a_loss_that_is_not_finite_fires(tmp_path):
    model = nn.Linear(4, 2)
    with recording(model, tmp_path / "run", layers=[""], last=2, when=NonFinite(kinds="loss")) as recorder:
        for number in range(8):
            recorder.at(epoch=0, batch=number)
            loss = model(batch_of(number)).sum() / (number != 4)
            recorder.loss(loss)
            recorder.annotate(number=[number] * 5)
    assert fired(tmp_path / "run") == [(4, "non-finite loss: 0 NaN, 1 Inf, first at index ()")]
    assert batches_on_disk(tmp_path / "run", kind="loss") == [3, 4, 5, 6]
    assert batches_on_disk(tmp_path / "run", kind="annotation") == [3, 4, 5, 6]
    assert batches_on_disk(tmp_path / "run", kind="activation") == [3, 4, 5, 6]


def test_non_finite_looks_at_the_kinds_and_layers_that_it_was_given(tmp_path):
    for number, (trigger, fires) in enumerate(
        (
            (NonFinite(kinds="parameter"), False),
            (NonFinite(layers="3"), True),
            (NonFinite(layers=["0", "1"]), False),
            (NonFinite(kinds=["activation"], layers="[23]*"), True),
        )
    ):
        model = model_of([4])
        path = tmp_path / f"run{number}"
        with recording(model, path, kinds=["activation", "parameter"], last=1, when=trigger) as recorder:
            train(model, range(8), recorder)
        assert bool(fired(path)) == fires, trigger


def test_gradients_that_overflow_under_a_scaler_count_only_where_asked_for(tmp_path):
    for counts in (False, True):
        model = nn.Linear(4, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        path = tmp_path / str(counts)
        when = NonFinite(scaled_gradients=counts)
        with recording(model, path, layers=[""], kinds=["activation", "gradient"], last=1, when=when, scaler=scaler) as recorder:
            for number in range(4):
                recorder.at(epoch=0, batch=number)
                scaler.scale(model(batch_of(number)).sum() * (1e10 if number == 2 else 1.0)).backward()
        assert [batch for batch, _ in fired(path)] == ([2] if counts else [])


def test_a_gradient_norm_far_above_its_median_fires(tmp_path):
    model = nn.Linear(4, 2)
    when = GradientNorm(times=5, num_first=4)
    with recording(model, tmp_path / "run", layers=[""], kinds="gradient", last=2, when=when) as recorder:
        for number in range(20):
            recorder.at(epoch=0, batch=number)
            factor = 100.0 if number == 2 else 6.0 if number == 12 else 4.0 if number == 8 else 1.0
            (model(batch_of(number)).sum() * factor).backward()
    ((batch, reason),) = fired(tmp_path / "run")
    assert batch == 12, "2 is too early, and 8 is not above"
    assert reason == "gradient of layer '': its norm 18.97 is above 5 × 3.162, the median of its last 12"
    assert batches_on_disk(tmp_path / "run") == [11, 12, 13, 14]


def test_gradient_norms_are_unscaled(tmp_path):
    """A loss scale that grows is no growing gradient."""
    model = nn.Linear(4, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    when = GradientNorm(times=5, num_first=2)
    with recording(model, tmp_path / "run", layers=[""], kinds="gradient", last=2, when=when, scaler=scaler) as recorder:
        for number in range(10):
            recorder.at(epoch=0, batch=number)
            scaler.scale(model(batch_of(number)).sum()).backward()
            if number == 4:
                scaler.update(new_scale=2.0**16)
    assert fired(tmp_path / "run") == []


def test_the_function_of_a_user_fires_and_is_told_what_it_is_about(tmp_path):
    seen = []

    def is_large(statistics, where):
        seen.append((where, statistics.max))
        return where.layer == "2.inner" and where.batch == 5

    model = model_of()
    with recording(model, tmp_path / "run", last=2, when=is_large) as recorder:
        train(model, range(9), recorder)
    ((batch, reason),) = fired(tmp_path / "run")
    assert batch == 5
    assert reason.endswith("is_large() holds for activation of layer '2.inner'")
    where, largest = seen[0]
    assert where == Where("train", 0, 0, 0, 0, "0", "activation", "")
    assert isinstance(largest, float)
    assert batches_on_disk(tmp_path / "run") == [4, 5, 6, 7]


def test_a_function_that_raises_is_told_of_once_and_taken_for_false(tmp_path):
    def broken(_statistics, where):
        if where.batch >= 2:
            raise ZeroDivisionError("oh")
        return False

    model = model_of()
    with pytest.warns(hookstore.CaptureWarning, match=r"broken\(\) raised ZeroDivisionError: oh, which is taken for False") as caught:  # noqa: SIM117
        with recording(model, tmp_path / "run", last=2, when=[broken, NonFinite()]) as recorder:
            train(model, range(9), recorder)
            recorder.flush()
    assert len(caught) == 1
    assert rows(tmp_path / "run") == []


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_function_that_waits_for_the_writer_is_told_that_it_is_on_its_thread(tmp_path, call):
    model = nn.Identity()

    def waits(_statistics, _where):
        getattr(recorder, call)()
        return True

    with pytest.warns(hookstore.CaptureWarning, match=rf"raised RecorderBusyError: {call}\(\) was called by the function of a trigger"):  # noqa: SIM117
        with recording(model, tmp_path / "run", layers=[""], last=1, when=waits) as recorder:
            model(torch.ones(2))
            recorder.flush()


def test_an_exception_that_ends_the_recording_fires(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="late"), recording(model, tmp_path / "run", layers="2", last=3) as recorder:
        train(model, range(10), recorder)
        raise ValueError("too late")
    assert fired(tmp_path / "run") == [(9, "ValueError: too late ended the recording")]
    assert batches_on_disk(tmp_path / "run") == [7, 8, 9]
    assert [row["batch"] for row in rows(tmp_path / "run", status="partial")] == [9]


def test_an_interrupt_that_says_nothing_is_named(tmp_path):
    model = model_of()
    with pytest.raises(KeyboardInterrupt), recording(model, tmp_path / "run", layers="2", last=2) as recorder:
        train(model, range(4), recorder)
        raise KeyboardInterrupt
    assert fired(tmp_path / "run") == [(3, "KeyboardInterrupt ended the recording")]


@pytest.mark.parametrize(("error", "fires"), [(KeyboardInterrupt(), True), (SystemExit(1), True), (SystemExit(0), False)])
def test_ctrl_c_and_a_bad_exit_fire_and_a_good_exit_does_not(tmp_path, error, fires):
    model = model_of()
    with pytest.raises(type(error)), recording(model, tmp_path / "run", layers="2", last=3) as recorder:
        train(model, range(10), recorder)
        raise error
    assert batches_on_disk(tmp_path / "run") == ([7, 8, 9] if fires else [])


def test_a_forward_that_raises_fires_though_training_goes_on(tmp_path):
    model = model_of()
    with recording(model, tmp_path / "run", layers=["0", "2"], last=2) as recorder:
        for number in range(9):
            recorder.at(epoch=0, batch=number)
            try:
                model(batch_of(number) if number != 4 else batch_of(number)[:, :3])
            except RuntimeError:
                continue
    ((batch, reason),) = fired(tmp_path / "run")
    assert batch == 4
    assert reason.startswith("the forward of layer '0' raised RuntimeError")
    assert batches_on_disk(tmp_path / "run") == [3, 5, 6]
    assert [row["batch"] for row in rows(tmp_path / "run", status="partial")] == [4]


def test_exceptions_are_nothing_where_they_were_not_asked_for(tmp_path):
    model = model_of()
    with pytest.raises(ValueError, match="late"), recording(model, tmp_path / "run", layers="2", last=3, when=NonFinite()) as recorder:
        train(model, range(10), recorder)
        raise ValueError("too late")
    assert rows(tmp_path / "run") == []


def test_it_refuses_what_makes_no_sense(tmp_path):
    model = model_of()
    for options, message in (
        ({"last": True}, "last: expected a number of batches"),
        ({"last": 0}, "last: expected a number of batches"),
        ({"last": 2.5}, "last: expected a number of batches"),
        ({"when": NonFinite()}, "give last= too"),
        ({"last": 2, "on_full": "drop"}, "leave on_full='drop' out"),
        ({"last": 2, "when": []}, "at least one trigger"),
        ({"last": 2, "when": 3}, "or several of these, got 3"),
        ({"last": 2, "when": NonFinite}, r"write NonFinite\(\)"),
        (
            {"last": 2, "when": GradientNorm()},
            r"GradientNorm\(\) can never hold.*there are 'loss', 'activation', of layers '0', '1', '2.inner', '3'",
        ),
        ({"last": 2, "when": NonFinite(layers="fc*")}, r"NonFinite\(layers=\('fc\*',\)\) can never hold"),
        ({"captures": hookstore.Capture(when=NonFinite(kinds="loss"))}, "can never hold.*there are 'activation'"),
        ({"last": 2, "when": Signalled(signal.SIGTERM)}, "SIGTERM has no handler.*on_sigterm='flush'"),
        ({"last": 2, "when": Signalled(signal.SIGHUP)}, "SIGHUP has no handler"),
    ):
        with pytest.raises(hookstore.OptionError, match=message):
            recording(model, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()
    for make, message in (
        (lambda: NonFinite(kinds="gradients"), "kinds: expected some of 'activation'"),
        (lambda: NonFinite(layers=3), "layers: expected globs"),
        (lambda: GradientNorm(times=1), "times: expected a number above 1"),
        (lambda: GradientNorm(kinds="activation"), "kinds: expected some of 'gradient'"),
        (lambda: GradientNorm(window=5), "num_first: expected a whole number from 1 to 5"),
        (lambda: Signalled(signal.SIGKILL), "SIGKILL cannot be handled"),
        (lambda: Signalled(99999), "signum: expected a signal"),
    ):
        with pytest.raises(hookstore.OptionError, match=message):
            make()


def test_triggers_say_what_they_are():
    assert str(NonFinite(kinds="loss")) == "NonFinite(kinds=('loss',))"
    assert str(GradientNorm(times=3)) == "GradientNorm(times=3)"
    assert (str(Raised()), str(Signalled())) == ("Raised()", "Signalled(SIGUSR1)")
