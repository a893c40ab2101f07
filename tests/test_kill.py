"""Killed at any instant, a run gives back every capture that was acknowledged, and can be taken up again."""

from __future__ import annotations

import queue
import random
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from killing import READERS, WORKLOADS, Child, Found, Job, Server, Where, check_run, list_plainly, read_plainly, serving
from torch import nn

import hookstore
from hookstore import staging

CODECS = (None, "zstd", "lz4")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


# Kills --------------------------------------------------------------------------------------------------------------


def kill_at(child: Child, instant: str, chance: random.Random) -> None:
    """Wait for an instant and kill the child: anywhere in what the writer's thread does, and right when it says that something is safe."""
    if instant == "creating":  # from the first system call to the first captures; where a run is taken up, in the middle of its recovery
        child.listen(lambda child: child.said["s"])
        child.listen(lambda _: False, chance.uniform(0, 0.08 if child.job.generation else 0.03))
    elif instant == "closing":
        child.listen(lambda child: child.said["c"])
        child.listen(lambda _: False, chance.uniform(0, 0.03))
    elif instant == "flushing":
        count = chance.randint(1, 4)
        child.listen(lambda child: child.said["f"] >= count)
        child.listen(lambda _: False, chance.choice([0, chance.uniform(0, 0.03)]))
    else:
        count = chance.randint(1, 12)
        child.listen(lambda child: child.said["a"] >= count)
        child.listen(lambda _: False, chance.choice([0, chance.uniform(0, 0.3)]))
    assert not child.errors
    child.kill()
    status = child.wait()
    assert not child.errors
    assert status == -signal.SIGKILL or (child.said["d"] and status == 0), "killed, unless it was done before"


def check_killed(path: Path, child: Child, known: dict[Found, int], readers: list[str]) -> dict[Found, int]:
    """Check what a dead child left behind, and return all captures that are there."""
    layers = WORKLOADS[child.job.workload].layers
    try:
        run = hookstore.open(path)
    except hookstore.NotARunError:
        assert not known
        assert not child.said["r"], "the recorder was there, its run is not"
        return {}
    with run:
        found = check_run(run, layers)
    lost = known.items() - found.items()
    assert not lost, f"{len(lost)} captures that were there before are not there any more: {sorted(lost)[:3]}"
    mine = {place.where for place, generation in found.items() if generation == child.job.generation}
    assert len(mine) >= child.num_acknowledged, f"{child.num_acknowledged} captures were acknowledged, {len(mine)} are there"
    promised = (captured_until(child, child.flushed) if child.flushed else set()) | (
        captured_until(child, child.done) if child.said["d"] else set()
    )
    assert promised <= mine, f"flushed, and not there: {sorted(promised - mine)[:3]}"
    list_plainly(path)
    for reader in readers:
        for where, generation in read_plainly(path, layers, reader).items():
            assert generation in {made for place, made in found.items() if place.where == where}, (
                f"{where} is in an array but not in the manifest"
            )
    return found


def captured_until(child: Child, last: tuple[int, int] | None) -> set[Where]:
    """All that a child captures up to a batch."""
    if last is None:
        return set()
    workload = WORKLOADS[child.job.workload]
    return {
        Where(layer.name, epoch, batch, call)
        for epoch in range(child.job.first[0], last[0] + 1)
        for batch in range(workload.epoch_batches)
        if child.job.first <= (epoch, batch) <= last
        for layer in workload.layers
        for call in range(layer.num_calls)
    }


def kill_again_and_again(server: Server, path: Path, workload: str, codec: str | None, seed: int, num_kills: int) -> int:
    """Record, kill and resume a run, then recover it; return how many captures outlived that."""
    chance = random.Random(seed)
    found: dict[Found, int] = {}
    for generation in range(num_kills):
        instant = chance.choice(["creating", "closing", "flushing", "recording", "recording"])
        if found and chance.random() < 0.25:
            child = server.start(Job(str(path), workload, generation, action="recover"))
            kill_at(child, "creating", chance)
            found = check_killed(path, child, found, ["zarr"])
            continue
        latest = max((place.attempt for place in found), default=0)
        known = sorted({(place.where.epoch, place.where.batch) for place in found if place.attempt == latest})
        epoch, batch = chance.choice(known) if known else (0, -1)
        is_last = batch + 1 == WORKLOADS[workload].epoch_batches
        child = server.start(
            Job(
                path=str(path),
                workload=workload,
                generation=generation,
                first=(epoch + is_last, 0 if is_last else batch + 1),
                mode="a" if generation else "x",
                codec=codec,
                is_quick=chance.random() < 0.8,
                flush_every=chance.choice([1, 3, 17]) if instant == "flushing" else 0,
                num_batches=chance.randint(1, 60 if workload in ("small", "mixed") else 12) if instant == "closing" else 1_000_000,
            )
        )
        kill_at(child, instant, chance)
        readers = ["zarr"] if chance.random() < 0.7 else list(READERS)
        found = check_killed(path, child, found, readers)
    check_recovered(path, WORKLOADS[workload].layers, found)
    return len(found)


def check_recovered(path, layers, found):
    """Recover the run: nothing is gone, all is sealed, and plain readers see the latest of each."""
    hookstore.recover(path)
    verified = hookstore.verify(path)
    assert verified.is_sound, verified.faults
    latest = {}
    for place, generation in found.items():
        latest[place.where] = max(latest.get(place.where, (-1, -1)), (place.attempt, generation))
    with hookstore.open(path) as run:
        assert check_run(run, layers) == found
        assert verified.num_captures == len(found)
        assert run.info().state == "finished"
        for (attempt, where), generation in random.Random(0).sample(sorted(found.items()), min(len(found), 200)):
            captures = run[where.layer].activation
            assert captures.get(where.epoch, where.batch, where.call, attempt=attempt).flat[0] == generation
            assert captures.get(where.epoch, where.batch, where.call).flat[0] == latest[where][1]
    for reader in READERS:
        assert read_plainly(path, layers, reader) == {where: generation for where, (_, generation) in latest.items()}


@pytest.mark.parametrize(
    ("workload", "codec", "seed"),
    [("small", None, 1), ("small", "zstd", 2), ("large", None, 3), ("mixed", "lz4", 4), ("mixed", None, 5), ("oversize", None, 6)],
)
def test_a_run_that_is_killed_again_and_again_keeps_what_was_acknowledged(server, path, workload, codec, seed):
    assert kill_again_and_again(server, path, workload, codec, seed, num_kills=5) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(60))
def test_hundreds_of_kills(server, path, seed):
    workloads = list(WORKLOADS)
    kill_again_and_again(
        server, path, workloads[seed % len(workloads)], CODECS[seed // len(workloads) % len(CODECS)], 1000 + seed, num_kills=5 + seed % 4
    )


def test_a_second_writer_is_refused_until_the_first_is_dead(server, path):
    """Dead is also who was killed and has not been waited for."""
    child = server.start(Job(str(path), "small"))
    assert child.listen(lambda child: child.said["a"] > 2)
    for write in (lambda: hookstore.record(nn.ReLU(), path, mode="a"), lambda: hookstore.recover(path)):
        with pytest.raises(hookstore.RunLockedError, match=str(child.pid)) as caught:
            write()
        assert (caught.value.host, caught.value.pid) == (socket.gethostname(), child.pid)
    child.kill()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.001)
    hookstore.recover(path)
    child.wait()
    check_recovered(path, WORKLOADS["small"].layers, check_killed(path, child, {}, ["zarr"]))


@pytest.mark.parametrize("left", ["lock.json.0123456789abcdef0123456789abcdef", "lock.json.stale"])
def test_who_died_while_taking_the_lock_stands_in_nobodys_way(server, path, left):
    """That process left its own lock under the name that it had before it counted, or while it removed a stale one."""
    child = server.start(Job(str(path), "small"))
    assert child.listen(lambda child: child.said["a"] > 2)
    child.kill()
    child.wait()
    (path / "journal" / left).write_bytes((path / "journal" / "lock.json").read_bytes())
    check_recovered(path, WORKLOADS["small"].layers, check_killed(path, child, {}, ["zarr"]))
    assert not (path / "journal").exists()


# Endings that are no kills ------------------------------------------------------------------------------------------


def captured_by(child: Child) -> set[Where]:
    """All that a child captured which has been through the hooks before its script ended."""
    workload = WORKLOADS[child.job.workload]
    captured = captured_until(child, child.done)
    if child.partial:
        layer = workload.layers[0]
        captured |= {Where(layer.name, *child.partial, call) for call in range(layer.num_calls)}
    return captured


def check_ended(path, child):
    """Everything that was captured is there, exact and finished, and the batch under way is named."""
    layers = WORKLOADS[child.job.workload].layers
    with hookstore.open(path) as run:
        assert {place.where for place in check_run(run, layers)} == captured_by(child)
        assert run.info().state == "finished"
        assert [(batch.epoch, batch.batch) for batch in run.partial_batches] == [child.partial]
    verified = hookstore.verify(path)
    assert verified.is_sound, verified.faults
    assert set(read_plainly(path, layers)) == captured_by(child)


@pytest.mark.parametrize(
    ("ending", "status", "with_block"),
    [
        *((ending, status, block) for ending, status in (("exception", 1), ("exit", 3), ("interrupt", 1)) for block in (True, False)),
        ("none", 0, False),
    ],
)
@pytest.mark.parametrize("workload", ["small", "oversize"])
def test_what_was_captured_is_kept_and_the_batch_under_way_is_named(server, path, workload, ending, status, with_block):
    is_interrupt = ending == "interrupt"
    job = Job(str(path), workload, ending="wait" if is_interrupt else ending, num_batches=13, is_quick=False, with_block=with_block)
    child = server.start(job)
    if is_interrupt:
        assert child.listen(lambda child: child.said["p"])
        child.kill(signal.SIGINT)
    found = child.wait()
    assert found == (-signal.SIGINT if is_interrupt else status), child.errors
    assert child.partial is not None
    assert ("KeyboardInterrupt" in child.errors, "the loss is NaN" in child.errors) == (is_interrupt, ending == "exception")
    check_ended(path, child)


def test_a_run_that_ends_between_batches_has_no_partial_batch(server, path):
    child = server.start(Job(str(path), "small", num_batches=10))
    assert child.wait() == 0, child.errors
    with hookstore.open(path) as run:
        assert len(check_run(run, WORKLOADS["small"].layers)) == len(captured_by(child)) == 40
        assert run.partial_batches == []


# SIGTERM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", ["small", "large"])
def test_sigterm_keeps_what_was_acknowledged_by_default(server, path, workload):
    child = server.start(Job(str(path), workload))
    child.listen(lambda child: child.said["a"] >= 3)
    child.kill(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert not child.errors
    found = check_killed(path, child, {}, ["zarr"])
    check_recovered(path, WORKLOADS[workload].layers, found)


@pytest.mark.parametrize(
    ("handler", "status", "num_calls"), [("default", -signal.SIGTERM, 0), ("exit", 7, 1), ("return", 0, 1), ("ignore", 0, 0)]
)
@pytest.mark.parametrize("instant", ["anywhere", "in a copy"])
@pytest.mark.parametrize("workload", ["small", "mixed"])
def test_sigterm_flushes_and_goes_to_the_handler_that_was_there(server, path, workload, instant, handler, status, num_calls):
    """Also in the middle of a capture, which holds what a flush waits for."""
    child = server.start(
        Job(
            str(path),
            workload,
            on_sigterm="flush",
            handler=handler,
            interrupted_copy=41 if instant == "in a copy" else -1,
            is_quick=False,
            num_batches=30,
        )
    )
    if instant == "anywhere":
        child.listen(lambda child: child.said["b"] >= 11)
        child.kill(signal.SIGTERM)
    assert child.wait() == status, child.errors
    assert child.said["h"] == num_calls
    layers = WORKLOADS[workload].layers
    with hookstore.open(path) as run:
        mine = {place.where for place in check_run(run, layers)}
    assert child.signalled is not None
    assert captured_until(child, child.signalled) <= mine
    if status >= 0:  # else training may have gone on until the process died
        assert captured_until(child, child.done) <= mine
    assert child.said["d"] == (status == 0), "a handler that returns lets training go on"
    if instant == "in a copy":
        assert len(mine) >= 41
    read_plainly(path, layers)


# Interrupts that are raised where they come --------------------------------------------------------------------------


class Interrupting(queue.SimpleQueue):
    """Raises once in the main thread, as the handler of a signal may that comes right before or right after something is put."""

    def __init__(self, when):
        self.when = when

    def put(self, item):
        is_now = self.when and threading.current_thread() is threading.main_thread() and isinstance(item, staging.Region | staging.Piece)
        when, self.when = (self.when, "") if is_now else ("", self.when)
        if when != "before":
            super().put(item)
        if when:
            raise SystemExit(7)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("size", [3, 500_000], ids=["small", "larger than the buffer"])
def test_an_exit_while_the_writer_is_given_something_loses_nothing_and_hangs_nothing(path, size, when):
    model = nn.Identity()
    with hookstore.record(model, path, layers="", buffer_bytes=1 << 20) as recorder:
        model(torch.zeros(3))
        recorder.flush()
        recorder._stager.queue = Interrupting(when)
        with pytest.raises(SystemExit):  # a small capture is handed over by the flush, a large one by its forward
            model(torch.ones(size))
            recorder.flush()
        assert not recorder._stager.queue.when
        model(torch.full((3,), 2.0))
        recorder.flush()
    with hookstore.open(path) as run:
        assert run[""].activation[0, 0].tolist() == [0.0] * 3
        assert run[""].activation[0, 2].tolist() == [2.0] * 3
        if size == 3:
            assert run[""].activation[0, 1].tolist() == [1.0] * 3
    verified = hookstore.verify(path)
    assert verified.is_sound, verified.faults
