"""A disk that is full, broken, read-only or gone: the training loop hears of it, what was acknowledged stays, and the run can be gone on with."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import hookstore
import hookstore.recorder  # before anything is patched: modules keep the constants of the format
import hookstore.verification
from hookstore.files import system

CALLS = ("open", "write", "pwrite", "copy", "data_sync", "sync", "sync_file_system", "replace", "mkdir", "unlink", "rmdir")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS)


class Passes(nn.Module):
    def forward(self, inputs):
        return inputs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = Passes(), Passes()

    def forward(self, value):
        self.large(torch.full((3000,), value + 0.5))
        return self.small(torch.full((4,), value))


class Failing:
    """Lets one call to the system fail, counted from the time that it is armed, and every one after it if asked to."""

    def __init__(self, monkeypatch, *, at=-1, number=errno.ENOSPC, stays=False):
        self.names = []
        self.fired = None
        self.at, self.number, self.stays = at, number, stays
        self.is_armed = False
        self._thread = None
        for name in CALLS:
            monkeypatch.setattr(system, name, self._wrap(name, getattr(system, name)))

    def _wrap(self, name, real):
        def call(*arguments):
            if self.is_armed and threading.current_thread().name == "hookstore-writer":
                position = len(self.names)
                self.names.append(name)
                if position == self.at or (self.stays and 0 <= self.at < position and name in ("open", "write", "pwrite", "copy")):
                    self.fired = self.fired or name
                    raise OSError(self.number, os.strerror(self.number))
            return real(*arguments)

        return call


def train(path, failing, *, batches=9, flush_every=2, start=0, **options):
    """Record; return what had been made durable, and the error that reached the training loop."""
    model = Model()
    durable = []
    recorder = hookstore.record(model, path, buffer_bytes=1 << 18, **options)
    failing.is_armed = True
    try:
        with recorder:
            for batch in range(start, start + batches):
                recorder.at(epoch=0, batch=batch)
                model(float(batch))
                if batch % flush_every == 1:
                    recorder.flush()
                    durable += [batch - 1, batch]
            recorder.flush()
            durable = list(range(start, start + batches))
    except OSError as error:
        return durable, error
    finally:
        failing.is_armed = False
    return durable, None


def check(path, durable):
    """Everything durable is there and right, nothing that is there is wrong, and plain Zarr never raises."""
    with hookstore.open(path) as run:
        captured = [row for row in run.manifest.to_pylist() if row["status"] == "ok"]
        for row in captured:
            assert np.all(run.read(row) == row["batch"] + (0.5 if row["layer"] == "large" else 0.0)), row
        for layer in ("small", "large"):
            assert {row["batch"] for row in captured if row["layer"] == layer} >= set(durable)
    group = zarr.open_group(path / "layers", mode="r")
    for layer, nodes in group.groups():
        for _, array in nodes.arrays():
            values = array[:]
            expected = np.arange(values.shape[1]).reshape(1, -1, 1) + (0.5 if layer == "large" else 0.0)
            assert np.all((values == expected) | np.isnan(values))


@pytest.fixture
def tiny_shards(monkeypatch):
    """Shards of two captures and parts of six rows, so that all that a writer does happens in a few batches."""
    monkeypatch.setattr("hookstore.format.MAX_SHARD_ENTRIES", 2)
    monkeypatch.setattr("hookstore.manifest.SEGMENT_ROWS", 6)
    monkeypatch.setattr("hookstore.writer._PLACES_UNSEALED", 1)


def num_calls(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing = Failing(patch)
        assert train(tmp_path / "whole", failing)[1] is None
        assert {"write", "pwrite", "sync", "replace", "unlink", "mkdir", "open"} <= set(failing.names)
        return len(failing.names)


@pytest.mark.parametrize("stays", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_any_call_of_the_writer_that_fails(tmp_path, monkeypatch, tiny_shards, stays, step):
    """One after another, calls to the system fail. The training loop is told of that very error and of nothing else."""
    total = num_calls(tmp_path, monkeypatch)
    for at in range(stays, total, step):
        path = tmp_path / "run"
        number = ERRORS[at % len(ERRORS)]
        with monkeypatch.context() as patch:
            failing = Failing(patch, at=at, number=number, stays=stays)
            durable, error = train(path, failing)
        if failing.fired is None:
            assert at >= total - 20, "the runs differ by a few calls at most"
            assert error is None
        elif error is None:
            assert failing.fired in ("unlink", "rmdir"), "only what removes the lock, or an empty directory, may fail without a word"
        else:
            assert error.errno == number
            assert not any(thread.name.startswith("hookstore") for thread in threading.enumerate())
        check(path, durable)
        with monkeypatch.context() as patch, warnings.catch_warnings():
            durable_again, error = train(path, Failing(patch), start=9, batches=3, mode="a")
        assert error is None
        check(path, durable + durable_again)
        found = hookstore.verify(path)
        assert found.is_sound, (at, failing.fired, found.faults)
        shutil.rmtree(path)


def test_capture_turns_itself_off(tmp_path, monkeypatch, tiny_shards):
    path = tmp_path / "run"
    failing = Failing(monkeypatch, at=30, stays=True)
    with pytest.warns(hookstore.CaptureWarning, match="the writer failed with OSError: .*No space left"):
        _durable, error = train(path, failing, batches=40, flush_every=1000, on_error="disable")
    assert error is None, "training goes on"
    assert failing.fired
    check(path, [])


@pytest.mark.parametrize("what", ["all of it", "the layers", "the journal"])
def test_a_directory_that_is_deleted(tmp_path, what):
    model, path = Model(), tmp_path / "run"
    recorder = hookstore.record(model, path, buffer_bytes=1 << 18)
    model(1.0)
    recorder.flush()
    shutil.rmtree({"all of it": path, "the layers": path / "layers", "the journal": path / "journal"}[what])
    with pytest.raises(OSError, match="deleted while it was being written|No such file or directory"):
        for number in range(1000):
            model(float(number))
        recorder.flush()
    with pytest.raises(OSError, match="deleted while|No such file"):
        recorder.close()


def test_the_error_says_what_to_do(tmp_path, monkeypatch):
    failing = Failing(monkeypatch, at=12, stays=True)
    _, error = train(tmp_path / "run", failing)
    assert any("mode='a'" in note and str(tmp_path / "run") in note for note in error.__notes__)


def test_a_real_limit_on_the_size_of_files(tmp_path):
    """The kernel's own refusal in the middle of a write, as a full disk gives it."""
    script = """
        import resource, signal, sys, warnings
        import torch, hookstore
        from torch import nn
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
        model = nn.Identity()
        try:
            with hookstore.record(model, sys.argv[1], layers="", buffer_bytes=1 << 20) as recorder:
                for batch in recorder.batches(range(40), epoch=0):
                    model(torch.full((30_000,), float(batch)))
                    recorder.flush()
                    print(batch, flush=True)
        except OSError as error:
            print(type(error).__name__, error.errno)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run"], capture_output=True, text=True, timeout=100, check=False
    )
    *flushed, error = done.stdout.split("\n")[:-1]
    assert error == f"OSError {errno.EFBIG}", done.stderr
    with hookstore.open(tmp_path / "run") as run:
        assert run.batches(0)[: len(flushed)] == list(range(len(flushed)))
        assert all(run[""].activation[0, batch][0] == batch for batch in run.batches(0))
    model = nn.Identity()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20, mode="a") as recorder:
        for batch in recorder.batches(range(40), epoch=0):
            model(torch.full((30_000,), float(batch)))
    assert hookstore.verify(tmp_path / "run").is_sound
    assert np.array_equal(zarr.open_group(tmp_path / "run/layers", mode="r")["%root/activation"][0, :, 0], np.arange(40))


# max_bytes ---------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    return sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(path) for name in names)


@pytest.mark.parametrize("size", [3, 700, 60_000, 400_000])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_recording_stops_by_itself_before_the_limit(tmp_path, size, codec):
    path, limit = tmp_path / "run", 6_000_000
    model = nn.Identity()
    largest = 0
    with pytest.warns(hookstore.CaptureWarning, match=r"recording stopped in epoch 0, batch \d+: .*max_bytes=6,000,000"):
        with hookstore.record(model, path, layers="", buffer_bytes=1 << 20, max_bytes=limit, codec=codec) as recorder:
            for batch in recorder.batches(range(max(40, 60_000_000 // (4 * size + 8000))), epoch=0):
                model(torch.full((size,), float(batch)) if codec is None else torch.randn(size))
                if batch % 200 == 0:
                    largest = max(largest, size_of(path))
        assert max(largest, size_of(path)) <= limit
    with hookstore.open(path) as run:
        (stopped,) = run.partial_batches
        rows = run.manifest.to_pylist()
        assert [row["status"] for row in rows].count("stopped") == 1
        assert run.batches(0) == list(range(stopped.batch)), "all before it is there"
        with pytest.raises(
            hookstore.MissingCaptureError, match=f"recording had stopped in epoch 0, batch {stopped.batch}, since .*max_bytes"
        ):
            run[""].activation[0, stopped.batch + 5]
        with pytest.raises(hookstore.MissingCaptureError, match="max_bytes"):
            run[""].activation[0, stopped.batch]
    assert size_of(path) > limit / 3, "and the room was used"
    assert hookstore.verify(path).is_sound


def test_what_is_there_counts_and_a_larger_limit_lets_it_go_on(tmp_path):
    model, path = nn.Identity(), tmp_path / "run"
    with hookstore.record(model, path, layers="", buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(20), epoch=0):
            model(torch.full((50_000,), float(batch)))
    recorder = hookstore.record(model, path, layers="", buffer_bytes=1 << 20, max_bytes=4_000_000, mode="a")
    with pytest.warns(hookstore.CaptureWarning, match="recording stopped in epoch 1, batch 0"), recorder:
        for batch in recorder.batches(range(20), epoch=1):
            model(torch.full((50_000,), float(batch)))
    with hookstore.record(model, path, layers="", buffer_bytes=1 << 20, max_bytes=40_000_000, mode="a") as recorder:
        for batch in recorder.batches(range(20), epoch=1):
            model(torch.full((50_000,), float(batch)))
    with hookstore.open(path) as run:
        assert run.batches(0) == run.batches(1) == list(range(20))
        assert run.partial_batches == [], "it was recorded again"


def test_a_file_system_that_is_almost_full(tmp_path, monkeypatch):
    free = 200 << 20

    class Status:
        f_bavail, f_frsize = free, 1

    monkeypatch.setattr(os, "statvfs", lambda _: Status)
    model, path = nn.Identity(), tmp_path / "run"
    monkeypatch.setattr("hookstore.files._LOOK_S", 0)
    with hookstore.record(model, path, layers="", buffer_bytes=1 << 20, max_bytes=1 << 40) as recorder:
        model(torch.ones(1000))
        recorder.flush()
        Status.f_bavail = 60 << 20
        with pytest.warns(hookstore.CaptureWarning, match="the file system of .* is almost full"):
            for _ in range(600):
                model(torch.ones(1000))
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist()[-1] == "stopped"


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1"])
def test_limits_that_are_none(tmp_path, value):
    with pytest.raises(hookstore.OptionError, match="max_bytes: expected a whole number"):
        hookstore.record(nn.Identity(), tmp_path / "run", layers="", max_bytes=value)
    assert not (tmp_path / "run").exists()
