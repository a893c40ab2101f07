"""One process at a time writes to a run, and nobody has to remove a lock by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hookstore
from hookstore import lock as lock_module
from hookstore.lock import STALE_S, Owner, RunLock, holder, lock_path


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    with hookstore.record(nn.Identity(), path, layers="", buffer_bytes=1 << 20):
        pass
    (path / "journal").mkdir()
    return os.fspath(path)


def leave(run, *, age_s=0.0, **changes):
    """Leave a lock that another process might have."""
    owner = dataclasses.replace(Owner.here(), **changes)
    with open(lock_path(run), "w") as file:
        json.dump(dataclasses.asdict(owner), file)
    os.utime(lock_path(run), (time.time() - age_s,) * 2)
    return owner


@pytest.fixture
def dead_pid():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def living():
    """Another process, as the lock of one would name it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield {"pid": child.pid, "started": lock_module._start_of(child.pid)}
    child.communicate(b"\n")


def test_a_lock_goes_with_its_holder(run):
    assert holder(run) is None
    lock = RunLock(run)
    assert holder(run).pid == os.getpid()
    assert os.listdir(os.path.dirname(lock_path(run))) == ["lock.json"], "nothing but the lock is left behind"
    lock.release()
    lock.release()
    assert holder(run) is None
    assert os.listdir(os.path.dirname(lock_path(run))) == []


def test_a_second_recorder_of_the_same_process_is_refused(tmp_path):
    model = nn.Identity()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20):
        for again in (
            lambda: hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20, mode="a"),
            lambda: hookstore.recover(tmp_path / "run"),
        ):
            with pytest.raises(hookstore.RunLockedError, match="a recorder of this very process, which has not been closed") as caught:
                again()
            assert (caught.value.pid, caught.value.path) == (os.getpid(), os.fspath(tmp_path / "run"))
        with pytest.raises(hookstore.RunExistsError, match="go on with it by mode='a'"):
            hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20)


def test_a_living_process_is_named(run, living):
    owner = leave(run, age_s=10 * STALE_S, **living)
    with pytest.raises(hookstore.RunLockedError, match=f"by process {living['pid']} on host {owner.host}, since ") as caught:
        RunLock(run)
    assert (caught.value.host, caught.value.pid) == (owner.host, living["pid"])


@pytest.mark.parametrize("why", ["dead", "another process has its number", "another boot", "garbage", "empty", "half"])
def test_a_stale_lock_is_taken_over(run, living, dead_pid, why):
    if why == "dead":
        leave(run, pid=dead_pid)
    elif why == "another process has its number":
        leave(run, pid=living["pid"], started="1")
    elif why == "another boot":
        leave(run, boot="another", **living)
    else:
        leave(run, **living)
        contents = {"garbage": b"\x00\xff{", "empty": b"", "half": Path(lock_path(run)).read_bytes()[:50]}[why]
        Path(lock_path(run)).write_bytes(contents)
    assert holder(run) is None
    lock = RunLock(run)
    assert Owner.read(lock_path(run)).token == lock.token
    lock.release()
    assert os.listdir(os.path.dirname(lock_path(run))) == []


@pytest.mark.parametrize("where", [{"host": "elsewhere"}, {"machine": "another"}, {"namespace": "another container"}])
def test_of_a_process_elsewhere_the_age_of_the_lock_tells(run, dead_pid, where):
    leave(run, pid=dead_pid, age_s=STALE_S / 2, **where)
    with pytest.raises(hookstore.RunLockedError, match=f"its lock counts for nothing {STALE_S:.0f} s after that"):
        RunLock(run)
    leave(run, pid=dead_pid, age_s=STALE_S * 2, **where)
    RunLock(run).release()


def test_the_age_is_told_by_the_clock_of_the_disk(run, dead_pid, monkeypatch):
    leave(run, pid=dead_pid, host="elsewhere")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    with pytest.raises(hookstore.RunLockedError):
        RunLock(run)


@pytest.mark.skipif(lock_module.fcntl is None, reason="this system has no flock")
def test_a_process_in_another_container_is_known_by_its_flock(run, dead_pid):
    leave(run, pid=dead_pid, namespace="another container", age_s=2 * STALE_S)
    with open(lock_path(run)) as file:
        lock_module.fcntl.flock(file, lock_module.fcntl.LOCK_EX)
        with pytest.raises(hookstore.RunLockedError):
            RunLock(run)
    RunLock(run).release()


def test_nothing_depends_on_flock_or_links(run, living, monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", None)

    def refuse(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "link", refuse)
    leave(run, **living)
    with pytest.raises(hookstore.RunLockedError):
        RunLock(run)
    leave(run, boot="another", **living)
    lock = RunLock(run)
    with pytest.raises(hookstore.RunLockedError):
        RunLock(run)
    lock.release()


def test_who_has_lost_its_lock_hears_of_it(run, monkeypatch):
    lock = RunLock(run)
    monkeypatch.setattr(lock_module, "RENEW_S", 0.0)
    before = os.stat(lock_path(run)).st_mtime_ns
    time.sleep(0.02)
    lock.renew()
    assert os.stat(lock_path(run)).st_mtime_ns > before
    thief = leave(run, pid=7, host="elsewhere", token="another")
    with pytest.raises(hookstore.RunLockedError, match=f"taken over by process 7 on host {thief.host}"):
        lock.renew()
    lock.release()
    assert Owner.read(lock_path(run)).token == "another", "what is not ours is left alone"
    os.unlink(lock_path(run))
    with pytest.raises(FileNotFoundError):
        lock.renew()


def test_a_recorder_that_has_lost_its_lock_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "RENEW_S", 0.0)
    model, path = nn.Identity(), tmp_path / "run"
    recorder = hookstore.record(model, path, layers="", buffer_bytes=1 << 20)
    leave(os.fspath(path), pid=7, host="elsewhere", token="another")
    with pytest.raises(hookstore.RunLockedError, match="taken over by process 7"):
        for _ in range(2000):
            model(torch.ones(3))
            time.sleep(0.001)
    with pytest.raises(hookstore.RunLockedError):
        recorder.close()


def test_of_many_that_take_a_run_up_at_once_one_gets_it(tmp_path):
    """Each process that gets it holds it for good; they start together, as well as processes can."""
    path = tmp_path / "run"
    with hookstore.record(nn.Identity(), path, layers="", buffer_bytes=1 << 20):
        pass
    (path / "journal").mkdir()
    leave(os.fspath(path), boot="another")
    script = """
        import sys, time
        from hookstore.errors import RunLockedError
        from hookstore.lock import RunLock
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            lock = RunLock(sys.argv[1])
            print("got it", flush=True)
        except RunLockedError:
            print("refused", flush=True)
        sys.stdin.readline()
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), os.fspath(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(8)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.stdout.readline().strip() for child in children]
    for child in children:
        child.communicate("\n")
    assert sorted(answers) == ["got it"] + ["refused"] * 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_holds_nothing(run):
    lock = RunLock(run)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, str(lock._descriptor).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"-1", "the system's lock would outlive its holder in a child"
    os.close(reading)
    os.close(writing)
    assert holder(run).token == lock.token
    lock.release()


def test_a_killed_writer_is_no_holder_while_its_child_lives_on(tmp_path):
    script = """
        import os, sys, time
        import torch, hookstore
        from torch import nn
        recorder = hookstore.record(nn.Identity(), sys.argv[1], layers="", buffer_bytes=1 << 20)
        child = os.fork()
        if not child:
            sys.stdin.readline()
            os._exit(0)
        print(child, flush=True)
        os.kill(os.getpid(), 9)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), os.fspath(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child.stdout.readline()
    child.wait()
    assert holder(os.fspath(tmp_path / "run")) is None
    hookstore.recover(tmp_path / "run")
    child.communicate("\n")
