"""A run is read while it is recorded, by us and by others: nobody ever sees what was not captured, or half of it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from killing import READERS, WORKLOADS, Found, Job, Where, check_run, check_value, is_mark, serving

import hookstore

LAYERS = WORKLOADS["followed"].layers
CAPTURES_PER_BATCH = sum(layer.num_calls for layer in LAYERS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class Follower:
    """Looks at a run that grows."""

    def __init__(self, path, seed=0):
        self.path = path
        self.run = hookstore.open(path)
        self.found: dict[Found, int] = {}
        self.places: list[Found] = []
        self.num_made: Counter[int] = Counter()  # by each generation
        self.num_looks = self.num_grown = 0
        self._chance = random.Random(seed)
        self._take(self.run.manifest)

    def _take(self, rows):
        for row in rows.to_pylist():
            if is_mark(row):
                continue
            assert row["status"] == "ok"
            where = Where(row["layer"], row["epoch"], row["batch"], row["call"])
            place = Found(row["attempt"], where)
            assert place not in self.found
            self.found[place] = check_value(LAYERS, where, self.run.read(row))
            self.places.append(place)
            self.num_made[self.found[place]] += 1

    def look(self):
        """Refresh: the new rows come after those that were there, and old ones go on to be what they were."""
        before = self.run.manifest.num_rows
        assert before >= len(self.found)
        num_new = self.run.refresh()
        assert num_new >= 0
        assert self.run.manifest.num_rows == before + num_new
        self._take(self.run.manifest.slice(before))
        self.num_looks += 1
        self.num_grown += bool(num_new)
        for attempt, where in self.places[-1:] + self._chance.sample(self.places, min(len(self.places), 5)):
            array = self.run[where.layer].activation.get(where.epoch, where.batch, where.call, attempt=attempt)
            assert check_value(LAYERS, where, array) == self.found[attempt, where]
        if self.num_looks % 10 == 0:
            with hookstore.open(self.path) as opened:
                assert opened.manifest.num_rows >= before + num_new
                self._take_again(opened)

    def _take_again(self, opened):
        """Read some of a run that was opened right now."""
        rows = opened.manifest
        newest = rows.slice(max(0, rows.num_rows - 20)).to_pylist()
        anywhere = [rows.slice(self._chance.randrange(rows.num_rows), 1).to_pylist()[0] for _ in range(min(10, rows.num_rows))]
        for row in (row for row in (*newest, *anywhere) if not is_mark(row)):
            where = Where(row["layer"], row["epoch"], row["batch"], row["call"])
            generation = check_value(LAYERS, where, opened.read(row))
            assert self.found.get(Found(row["attempt"], where), generation) == generation

    def close(self):
        self.run.close()


def follow(child, follower):
    """Look again and again while a child records; what it says is acknowledged is there at the next look."""
    while not child.has_ended:
        child.listen(lambda _: False, 0.005)
        num_acknowledged = child.num_acknowledged
        follower.look()
        assert follower.num_made[child.job.generation] >= num_acknowledged


def check_watchers(watchers, num_seen):
    """Let readers in other processes look once more; they must never have raised, and see all that there is now."""
    for watcher in watchers:
        assert watcher.listen(lambda watcher: watcher.said["n"] > 2), watcher.errors
        watcher.stop()
    for watcher in watchers:
        assert watcher.wait() == 0, watcher.errors
        assert watcher.num_seen == num_seen


def test_a_polling_reader_of_10000_captures_sees_each_as_it_was_and_none_before(server, path):
    num_batches = 10_000 // CAPTURES_PER_BATCH
    reader = server.start(Job(str(path), "followed", action="read"))
    child = server.start(Job(str(path), "followed", num_batches=num_batches))
    assert child.listen(lambda child: child.said["r"])
    follower = Follower(path)
    follow(child, follower)
    assert child.wait() == 0, child.errors
    follower.look()
    assert len(follower.found) == num_batches * CAPTURES_PER_BATCH == 10_000
    assert follower.num_grown > 20
    follower.close()
    check_watchers([reader], num_seen=10_000)
    with hookstore.open(path) as run:
        assert check_run(run, LAYERS) == follower.found
        assert len(list((path / "manifest").iterdir())) >= 10_000 // WORKLOADS["followed"].segment_rows


def test_readers_go_on_while_a_run_is_killed_and_taken_up_again(server, path):
    """Sealed shards are taken up and grow, under readers that hold their old index."""
    chance = random.Random(5)
    watchers = [server.start(Job(str(path), "followed", action="read", reader=reader)) for reader in READERS]
    follower = None
    for generation in range(6):
        first = divmod(chance.randrange(20 * generation + 1), WORKLOADS["followed"].epoch_batches)
        is_closed = generation % 2 == 1
        child = server.start(
            Job(str(path), "followed", generation=generation, first=first, mode="a", num_batches=50 if is_closed else 1_000_000)
        )
        assert child.listen(lambda child: child.said["a"] > 3), child.errors
        follower = follower or Follower(path)
        if is_closed:
            follow(child, follower)
            assert child.wait() == 0, child.errors
        else:
            child.listen(lambda child: child.said["b"] >= 40)
            follower.look()
            child.kill()
            child.wait()
        follower.look()
        for watcher in watchers:
            num_before = watcher.said["n"]
            assert watcher.listen(lambda watcher, enough=num_before + 2: watcher.said["n"] >= enough), watcher.errors
    assert follower is not None
    follower.close()
    check_watchers(watchers, num_seen=len({place.where for place in follower.found}))


def test_captures_that_are_held_see_what_has_come(server, path):
    """Also where a place was asked for before anything was there."""
    child = server.start(Job(str(path), "small", num_batches=400))
    assert child.listen(lambda child: child.said["r"])
    with hookstore.open(path) as run:
        captures = run["a"].activation
        with pytest.raises(hookstore.MissingCaptureError):
            captures[6, 39]
        assert child.wait() == 0, child.errors
        with pytest.raises(hookstore.MissingCaptureError):
            captures[6, 39]
        assert run.refresh() > 0
        check_value(WORKLOADS["small"].layers, Where("a", 6, 39, 0), captures[6, 39])
        assert run.refresh() == 0
