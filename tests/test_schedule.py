from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

import hookstore
from hookstore.agenda import Agenda
from hookstore.clock import Clock
from hookstore.schedule import Schedule


def schedule(**options):
    return Schedule.build(**{"every": 1, "epochs": None, "batches": None, "phases": "train", **options})


def agenda(**options):
    return Agenda([hookstore.Capture(layers="", **options)], {"": nn.Linear(1, 1)})


def recorded(chosen, epochs=3, batches=8):
    return [(epoch, batch) for epoch in range(epochs) for batch in range(batches) if chosen.wants(epoch, batch)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 3, "epochs": 1}, [(1, 0), (1, 3), (1, 6)]),
        ({"epochs": [0, 2], "batches": range(1, 3)}, [(0, 1), (0, 2), (2, 1), (2, 2)]),
        ({"epochs": range(1), "batches": lambda batch: batch % 5 == 2}, [(0, 2), (0, 7)]),
        ({"every": np.int64(4), "epochs": {2}, "batches": np.int32(4)}, [(2, 4)]),
    ],
)
def test_which_batches_are_wanted(options, expected):
    assert recorded(schedule(**options)) == expected


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"every": 0}, "every"),
        ({"every": -1}, "every"),
        ({"every": 1.5}, "every"),
        ({"every": True}, "every"),
        ({"epochs": -1}, "epochs"),
        ({"epochs": "all"}, "epochs"),
        ({"epochs": 1.0}, "epochs"),
        ({"batches": [0, 1.5]}, "batches"),
        ({"phases": "test"}, "phases"),
        ({"phases": []}, "phases"),
    ],
)
def test_bad_options_name_themselves(options, option):
    with pytest.raises(hookstore.OptionError, match=option) as caught:
        schedule(**options)
    assert caught.value.option == option
    assert isinstance(caught.value, ValueError)


def make_clock(**options):
    phase = ["train"]
    return Clock(agenda(**options), lambda: phase[0]), phase


def place(clock):
    here = clock.here()
    return None if here is None else (here.phase, here.epoch, here.batch)


def test_batches_moves_the_clock_and_has_the_loaders_length():
    clock, _ = make_clock(every=2)
    wrapped = clock.batches(["a", "b", "c"], epoch=4)
    assert len(wrapped) == 3
    seen = [(item, place(clock), clock.may_record) for item in wrapped]
    assert seen == [("a", ("train", 4, 0), True), ("b", None, False), ("c", ("train", 4, 2), True)]
    assert clock.is_automatic
    assert clock.epoch_batches == 3


def test_loader_without_length():
    clock, _ = make_clock()
    wrapped = clock.batches(itertools.islice(itertools.count(), 2), epoch=0)
    assert [place(clock) for _ in wrapped] == [("train", 0, 0), ("train", 0, 1)]
    assert clock.epoch_batches is None
    with pytest.raises(TypeError):
        len(wrapped)


def test_breaking_out_of_a_loop_puts_the_clock_back():
    clock, _ = make_clock()
    for _ in clock.batches(range(5), epoch=1):
        break
    assert clock.is_automatic


def test_at_holds_until_it_is_set_again_or_the_block_ends():
    clock, _ = make_clock()
    clock.at(2, 5)
    assert place(clock) == ("train", 2, 5)
    with clock.at(2, 6):
        assert place(clock) == ("train", 2, 6)
    assert place(clock) == ("train", 2, 5)


def test_setting_the_same_position_is_no_new_tick():
    clock, _ = make_clock()
    clock.at(0, 0)
    here = clock.here()
    clock.at(0, 0)
    assert clock.here() is here


def test_a_nested_loop_returns_to_the_same_place_so_that_calls_go_on_counting():
    clock, _ = make_clock()
    for _ in clock.batches(range(1), epoch=0):
        here = clock.here()
        assert [place(clock) for _ in clock.batches(range(2), epoch=7)] == [("train", 7, 0), ("train", 7, 1)]
        assert clock.here() is here


def test_loops_that_end_in_any_order_leave_the_clock_automatic():
    clock, _ = make_clock()
    for _ in zip(clock.batches(range(2), epoch=0), clock.batches(range(3), epoch=0), strict=False):
        pass
    assert clock.is_automatic
    kept = iter(clock.batches(range(2), epoch=1))
    next(kept)
    with clock.at(4, 4):
        del kept
        assert place(clock) == ("train", 4, 4)
    assert clock.is_automatic


def test_an_inner_loop_gives_back_the_outer_loops_length():
    clock, _ = make_clock()
    for _ in clock.batches(range(7), epoch=0):
        for _ in clock.batches(range(3), epoch=0):
            assert clock.epoch_batches == 3
        assert clock.epoch_batches == 7


def test_a_loader_whose_length_misbehaves_is_a_loader_without_length():
    class Loader:
        def __len__(self):
            raise RuntimeError("unknown")

        def __iter__(self):
            return iter("ab")

    clock, _ = make_clock()
    assert [item for item in clock.batches(Loader(), epoch=0)] == ["a", "b"]  # noqa: C416  # list() would ask for the length


@pytest.mark.parametrize("bad", [-1, 1.0, "1", None, True, 2**63])
def test_bad_coordinates(bad):
    clock, _ = make_clock()
    with pytest.raises(hookstore.ClockError, match="batch: expected a whole number of at least 0"):
        clock.at(0, bad)
    with pytest.raises(hookstore.ClockError, match="epoch"):
        clock.at(bad, 0)
    with pytest.raises(ValueError, match="epoch"):
        clock.batches([], bad)


def test_automatic_clock_counts_each_phase_for_itself():
    clock, phase = make_clock(phases=("train", "eval"))
    seen = []
    for mode in ("train", "train", "eval", "train", "eval"):
        phase[0] = mode
        clock.tick()
        seen.append(place(clock))
    assert seen == [("train", 0, 0), ("train", 0, 1), ("eval", 0, 0), ("train", 0, 2), ("eval", 0, 1)]


def test_automatic_calls_after_a_loop_stay_in_its_epoch_and_collide_with_nothing():
    clock, phase = make_clock(phases=("train", "eval"))
    for _ in clock.batches(range(3), epoch=2):
        clock.here()
    clock.tick()
    assert place(clock) == ("train", 2, 3)
    phase[0] = "eval"
    clock.tick()
    assert place(clock) == ("eval", 2, 0)


def test_phase_that_is_not_recorded():
    clock, phase = make_clock()
    phase[0] = "eval"
    clock.at(0, 0)
    assert clock.here() is None


def test_three_clocks_in_one_run(tmp_path):
    """The issue's three ways: batches, at, automatic."""
    model = nn.Linear(2, 2)
    inputs = torch.randn(3, 4, 2)
    with hookstore.record(model, tmp_path / "run", layers="", phases=("train", "eval"), buffer_bytes=1 << 20) as recorder:
        outputs = {}
        model(inputs[0])
        outputs["train", 0, 1] = model(inputs[0])  # automatic: the second call is batch 1
        for batch, item in enumerate(recorder.batches(list(inputs), epoch=1)):
            outputs["train", 1, batch] = model(item)
        with recorder.at(epoch=5, batch=7):
            outputs["train", 5, 7] = model(inputs[2])
        model.eval()
        outputs["eval", 5, 0] = model(inputs[1])
    with hookstore.open(tmp_path / "run") as run:
        assert run.epochs == [0, 1, 5]
        assert run.batches(0) == [0, 1]
        assert run.batches(1) == [0, 1, 2]
        assert run.batches(5, phase="train") == [7]
        for (phase, epoch, batch), output in outputs.items():
            found = run[""].activation.get(epoch, batch, phase=phase)
            assert np.array_equal(found, output.detach().numpy())
