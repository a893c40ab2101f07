"""Captures, flushes, kills, recoveries and resumptions in any order, held against a model of what must be there."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from killing import Found, Layer, Where, check_run, check_value, list_plainly, read_plainly, value
from torch import nn

import hookstore
from hookstore.files import System, system

LAYERS = (
    Layer("a", "float32", (8,)),
    Layer("b", "int32", (4, 4), pads=True),
    Layer("c", "float32", (30, 100)),
    Layer("d", "float64", (5,), num_calls=2),
)
NUM_EPOCHS, NUM_BATCHES = 3, 14
PLACES = [(epoch, batch) for epoch in range(NUM_EPOCHS) for batch in range(NUM_BATCHES)]


class Returns(nn.Module):
    result = None

    def forward(self):
        return self.result


class Gate:
    """Every system call that changes a run passes it one by one, so that there is an instant at which nothing changes."""

    def __init__(self, patch):
        self.lock = threading.RLock()
        self.num_calls = 0
        for name in [name for name in vars(System) if not name.startswith("_")]:
            patch.setattr(system, name, self._gated(getattr(system, name)))

    def _gated(self, call):
        def gated(*arguments):
            with self.lock:
                self.num_calls += 1
                return call(*arguments)

        return gated


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr("hookstore.format.SHARD_TARGET_BYTES", 1 << 10)
    monkeypatch.setattr("hookstore.manifest.SEGMENT_ROWS", 40)
    for name, seconds in (("_POLL_S", 0.005), ("_REGION_AGE_S", 0.01), ("_ROWS_AGE_S", 0.005), ("_SYNC_AGE_S", 0.03)):
        monkeypatch.setattr(f"hookstore.writer.{name}", seconds)
    return Gate(monkeypatch)


def digest(path):
    """What a directory holds."""
    contents = {
        os.path.relpath(os.path.join(root, name), path): hashlib.sha256(Path(root, name).read_bytes()).hexdigest()
        for root, _, names in os.walk(path)
        for name in names
    }
    return contents | {os.path.relpath(os.path.join(root, name), path): "directory" for root, names, _ in os.walk(path) for name in names}


class Runs(RuleBasedStateMachine):
    """One run and the processes that record into it one after another.

    ``there`` are the captures that must be there, each with the generation that made it; ``pending`` those of the recorder that is open, which may be there.
    """

    gate: Gate

    def __init__(self):
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.path = os.path.join(self.directory, "run-0")
        self.num_kills = 0
        self.generation = -1
        self.there: dict[Found, int] = {}
        self.pending: set[Where] = set()
        self.flushed: set[Where] = set()
        self.recorder = None
        self.follower = None
        self.is_sealed = True  # every shard; so it is after a close and after a recovery
        self.model = nn.ModuleDict({layer.name: Returns() for layer in LAYERS})

    @initialize(codec=st.sampled_from([None, "zstd"]), buffer_bytes=st.sampled_from([64 << 10, 1 << 20]))
    def begin(self, codec, buffer_bytes):
        self.options = {"codec": codec, "buffer_bytes": buffer_bytes}
        self._record("x")

    def _record(self, mode):
        self.generation += 1
        self.pending, self.flushed = set(), set()
        self.recorder = hookstore.record(self.model, self.path, layers=[layer.name for layer in LAYERS], mode=mode, **self.options)
        self.is_sealed = False

    # What a recorder does -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.recorder is not None)
    @rule(places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=12, unique=True), is_known=st.booleans())
    def capture(self, places, is_known):
        """Capture batches in any order, none of them twice; the length of an epoch is known where a loader has one."""
        if is_known:
            self.recorder.batches(range(NUM_BATCHES), epoch=0)
        for epoch, batch in places:
            if Where("a", epoch, batch, 0) in self.pending:
                continue
            self.recorder.at(epoch=epoch, batch=batch)
            for layer in LAYERS:
                for call in range(layer.num_calls):
                    where = Where(layer.name, epoch, batch, call)
                    self.model[layer.name].result = torch.from_numpy(value(LAYERS, self.generation, where))
                    self.model[layer.name]()
                    self.pending.add(where)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def flush(self):
        self.recorder.flush()
        self.flushed = set(self.pending)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def wait(self):
        """Let time acknowledge what has been captured."""
        deadline = time.monotonic() + 20
        while self.recorder.progress.num_acknowledged < len(self.pending):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def close(self):
        self.recorder.close()
        self.recorder = None
        self.flushed = set(self.pending)
        self._take_over(len(self.pending))
        self.is_sealed = True

    @precondition(lambda self: self.recorder is not None)
    @rule(num_calls=st.integers(0, 60))
    def kill(self, num_calls):
        """What a kill leaves is the directory as it is between two system calls; the recorder itself ends out of sight."""
        deadline, until = time.monotonic() + 0.05, self.gate.num_calls + num_calls
        while self.gate.num_calls < until and time.monotonic() < deadline:
            time.sleep(0.0001)
        killed, self.num_kills = self.path, self.num_kills + 1
        self.path = os.path.join(self.directory, f"run-{self.num_kills}")
        with self.gate.lock:
            num_acknowledged = self.recorder.progress.num_acknowledged
            shutil.copytree(killed, self.path, ignore=lambda _, names: {"lock.json"} & set(names))
        self.recorder.close()
        self.recorder = None
        self._unfollow()
        shutil.rmtree(killed)
        self._take_over(num_acknowledged)

    def _take_over(self, num_acknowledged):
        """What is there now that no recorder is has to stay."""
        self.there = self._look(num_acknowledged)
        self.pending, self.flushed = set(), set()

    # What others do -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.recorder is None)
    @rule()
    def resume(self):
        self._record("a")

    @precondition(lambda self: self.recorder is None)
    @rule()
    def recover(self):
        hookstore.recover(self.path)
        before = digest(self.path)
        hookstore.recover(self.path)
        assert digest(self.path) == before, "recovering twice equals recovering once"
        self.is_sealed = True

    @precondition(lambda self: self.recorder is None and self.is_sealed)
    @rule()
    def verify(self):
        verified = hookstore.verify(self.path)
        assert verified.is_sound, verified.faults
        assert verified.num_captures == len(self.there)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def a_second_writer_is_refused(self):
        for write in (lambda: hookstore.record(nn.Module(), self.path, layers="", mode="a"), lambda: hookstore.recover(self.path)):
            with pytest.raises(hookstore.RunLockedError) as caught:
                write()
            assert caught.value.pid == os.getpid()

    @rule()
    def follow(self):
        """A run that was opened before sees what one that is opened now sees."""
        if self.follower is None:
            self.follower = hookstore.open(self.path)
        num_acknowledged = self.recorder.progress.num_acknowledged if self.recorder else 0
        before = self.follower.manifest.num_rows
        num_new = self.follower.refresh()
        found = check_run(self.follower, LAYERS)
        assert self.follower.manifest.num_rows == before + num_new  # rows that mark a batch as cut short included
        self._check(found, num_acknowledged)

    @rule(layer=st.sampled_from(LAYERS), place=st.sampled_from(PLACES), call=st.integers(0, 1))
    def read(self, layer, place, call):
        """The latest attempt is what a place has, and the others are there when they are named."""
        where = Where(layer.name, *place, call)
        with hookstore.open(self.path) as run:
            captures = run[layer.name].activation
            attempts = {found.attempt: generation for found, generation in check_run(run, LAYERS).items() if found.where == where}
            if not attempts:
                with pytest.raises(hookstore.MissingCaptureError):
                    captures.get(*place, call)
            else:
                assert check_value(LAYERS, where, captures.get(*place, call)) == attempts[max(attempts)]
            for attempt, generation in attempts.items():
                assert check_value(LAYERS, where, captures.get(*place, call, attempt=attempt)) == generation
            with pytest.raises(hookstore.MissingCaptureError):
                captures.get(*place, call, attempt=max(attempts, default=0) + 1000)

    @rule(reader=st.sampled_from(["zarr", "tensorstore"]))
    def read_with_others(self, reader):
        """Others see nothing that is not there, and all of it once every shard is sealed."""
        list_plainly(self.path)
        seen = read_plainly(self.path, LAYERS, reader)
        found = self._look(0)
        latest = {}
        for place, generation in sorted(found.items()):
            latest[place.where] = generation
        assert all(generation in {made for place, made in found.items() if place.where == where} for where, generation in seen.items())
        if self.is_sealed:
            assert seen == latest

    # The model ------------------------------------------------------------------------------------------------------

    def _look(self, num_acknowledged):
        with hookstore.open(self.path) as run:
            found = check_run(run, LAYERS)
        self._check(found, num_acknowledged)
        return found

    def _check(self, found, num_acknowledged):
        """Hold what was found against the model; what was acknowledged before the look has to be there."""
        assert not self.there.items() - found.items(), "a capture that was there is there no more"
        new = {place: generation for place, generation in found.items() if place not in self.there}
        assert all(generation == self.generation and place.where in self.pending for place, generation in new.items()), (
            "a capture that was never made"
        )
        mine = {place.where for place in new}
        assert self.flushed <= mine
        assert len(mine) >= num_acknowledged

    @invariant()
    def all_that_must_be_there_is_there(self):
        num_acknowledged = self.recorder.progress.num_acknowledged if self.recorder else 0
        self._look(num_acknowledged)

    def _unfollow(self):
        if self.follower is not None:
            self.follower.close()
            self.follower = None

    def teardown(self):
        self._unfollow()
        if self.recorder is not None:
            self.recorder.close()
        shutil.rmtree(self.directory)


def run_machine(gate, max_examples, steps):
    machine = type("Machine", (Runs,), {"gate": gate})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=[Phase.generate],  # a thread writes meanwhile: what failed once may not fail again, and cannot be made smaller
            print_blob=True,
        ),
    )


def test_whatever_happens_to_a_run_what_was_acknowledged_is_there(gate):
    run_machine(gate, max_examples=50, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens_to_a_run_at_length(gate):
    run_machine(gate, max_examples=300, steps=60)
