"""Counting the batches of a training that are due: against going through them one by one, and where there are too many for that."""

from __future__ import annotations

import random

import pytest

from hookstore.occasions import Occasions, Training, count, intersect
from hookstore.schedule import Schedule


def any_restriction(chooser):
    """Return None, a range either way, a list or a callable."""
    multiple = chooser.randrange(1, 5)
    return chooser.choice(
        [
            None,
            range(chooser.randrange(-5, 20), chooser.randrange(60), chooser.randrange(1, 7)),
            range(chooser.randrange(10, 60), chooser.randrange(-3, 10), -chooser.randrange(1, 5)),
            [chooser.randrange(40) for _ in range(5)],
            lambda value: value % multiple == 0,
        ]
    )


def any_schedule(chooser):
    return Schedule.build(
        every=chooser.choice([1, 2, 3, 6, 10]),
        epochs=any_restriction(chooser),
        batches=any_restriction(chooser),
        steps=any_restriction(chooser) if chooser.random() < 0.4 else None,
        phases=chooser.choice([("train",), ("eval",), ("train", "eval")]),
    )


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_going_through_all_batches(seed):
    chooser = random.Random(seed)
    for _ in range(100):
        schedules = [any_schedule(chooser) for _ in range(chooser.randrange(1, 4))]
        num_epochs, num_batches = chooser.randrange(7), {"train": chooser.randrange(45), "eval": chooser.randrange(9)}
        shard = chooser.randrange(1, 4), chooser.randrange(1, 12)
        for phase in ("train", "eval"):
            due = {
                (epoch, batch)
                for epoch in range(num_epochs)
                for batch in range(num_batches[phase])
                for schedule in schedules
                if phase in schedule.phases
                and schedule.wants(
                    epoch, batch, epoch * num_batches["train"] + batch if phase == "train" else (epoch + 1) * num_batches["train"]
                )
            }
            shards = {(epoch // shard[0], batch // shard[1]) for epoch, batch in due}
            counted = count(schedules, phase, Training(num_epochs, num_batches), shard)
            assert counted == Occasions(len(due), len(shards), is_estimated=False), (schedules, num_epochs, num_batches, shard)


@pytest.mark.parametrize(
    ("options", "num_due", "num_shards"),
    [
        ([{"every": 7}], 1000 * (10**9 // 7 + 1), 10**9),
        ([{"every": 1000}, {"every": 10, "batches": range(100)}], 1000 * (10**6 + 9), 10**9),
        ([{"steps": range(0, 10**12, 10**6)}], 10**6, 10**6),
        ([{"every": 20}, {"every": 10}], 1000 * 10**8, 10**9),
    ],
)
def test_ranges_of_a_trillion_batches_are_counted_and_not_gone_through(options, num_due, num_shards):
    schedules = [Schedule.build(**one) for one in options]
    assert count(schedules, "train", Training(1000, {"train": 10**9}), (1, 1000)) == Occasions(num_due, num_shards, is_estimated=False)


@pytest.mark.parametrize(
    "options", [[{"batches": lambda batch: batch % 6 == 0}], [{"every": 12}, {"every": 8}], [{"steps": lambda step: step % 6 == 0}]]
)
def test_what_is_too_much_to_go_through_is_estimated_and_said_to_be(options):
    schedules = [Schedule.build(**one) for one in options]
    counted = count(schedules, "train", Training(1000, {"train": 3 * 10**8}), (1, 1000))
    assert counted.is_estimated
    assert counted.num_due == pytest.approx(5 * 10**10, rel=1e-2)
    assert counted.num_shards == pytest.approx(3 * 10**8, rel=1e-2)


def test_ranges_have_in_common_what_their_sets_have():
    chooser = random.Random(0)
    for _ in range(500):
        one = range(chooser.randrange(20), chooser.randrange(90), chooser.randrange(1, 12))
        other = range(chooser.randrange(-30, 60), chooser.randrange(-30, 90), chooser.choice([-7, -4, -1, 1, 2, 3, 6, 9]))
        assert list(intersect(one, other)) == sorted({*one} & {*other}), (one, other)
