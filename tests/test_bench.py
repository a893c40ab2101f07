"""What ``hookstore bench`` measures, says and leaves behind. How fast anything is, is asserted nowhere."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

import hookstore
from hookstore import bench, cli, files, writer

SHORT_S = 0.4  # two rounds at the least: the first warms up

MEDIAN = bench.Rates(
    raw_bytes_per_s=2.0e9,
    durable_bytes_per_s=1.5e9,
    copy_bytes_per_s=8.4e9,
    captures_per_s=60_000,
    capture_s=8e-6,
    capture_p99_s=50e-6,
)


def throughput(**changed):
    median = MEDIAN._replace(**changed)
    return bench.Throughput(
        directory="/disk",
        is_direct=True,
        num_rounds=5,
        num_cpus=2,
        num_torch_threads=2,
        median=median,
        lowest=bench.Rates(*(number / 2 for number in median)),
        highest=bench.Rates(*(number * 2 for number in median)),
    )


def assert_only(directory, *names):
    assert sorted(os.listdir(directory)) == sorted(names)


# What is measured -------------------------------------------------------------------------------------------------


def test_measures_everything_and_leaves_nothing(tmp_path):
    (tmp_path / "mine").write_text("stays")
    measured = bench.measure(tmp_path, seconds=SHORT_S)
    assert_only(tmp_path, "mine")
    assert measured.directory == str(tmp_path)
    assert measured.num_rounds >= 1
    assert measured.num_torch_threads == torch.get_num_threads()
    for name, lowest, median, highest in zip(bench.Rates._fields, measured.lowest, measured.median, measured.highest, strict=True):
        assert 0 < lowest <= median <= highest < float("inf"), name
    assert measured.median.capture_s <= measured.median.capture_p99_s


def test_the_first_round_does_not_count(tmp_path, monkeypatch):
    left = iter([bench.Rates(*[float(number)] * 6) for number in (1, 20, 40, 30, 1, 50)])
    monkeypatch.setattr(bench, "_MOST_ROUNDS", 4)
    monkeypatch.setattr(bench, "_verify", lambda *_: None)
    monkeypatch.setattr(bench._Workload, "take_round", lambda *_: next(left))
    measured = bench.measure(tmp_path, seconds=1e6)
    assert measured.num_rounds == 3
    assert [measured.lowest, measured.median, measured.highest] == [(20,) * 6, (30,) * 6, (40,) * 6]
    measured = bench.measure(tmp_path, seconds=1e-6)
    assert (measured.num_rounds, measured.median) == (1, (50,) * 6), "the first warms up, however little time there is"


def test_everything_goes_into_one_subdirectory(tmp_path, monkeypatch):
    take_round, seen = bench._Workload.take_round, []

    def look_and_take(workload, recorder):
        seen.append(os.listdir(tmp_path))
        return take_round(workload, recorder)

    monkeypatch.setattr(bench._Workload, "take_round", look_and_take)
    bench.measure(tmp_path, seconds=1e-6)
    assert [len(names) for names in seen] == [1, 1]


def test_without_o_direct_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_O_DIRECT", 0)
    monkeypatch.setattr(bench, "_UNSYNCED_BYTES", 1)
    synced = []
    sync = files.DirectWriter.sync
    monkeypatch.setattr(files.DirectWriter, "sync", lambda files, path: (synced.append(path), sync(files, path)))
    found = CliRunner().invoke(cli.app, ["bench", str(tmp_path), "--seconds", "1"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert "through the page cache and synced: O_DIRECT is refused here" in found.output
    assert sum(path.endswith("/raw") for path in synced) > 2  # in between too


def test_what_was_recorded_is_compared_with_what_is_read(tmp_path):
    model = bench._Passing(2)
    tensors = [torch.randn(3, 4), torch.randn(3, 4)]
    with hookstore.record(model, tmp_path / "run") as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            model(tensors)
    arrays = [tensor.numpy() for tensor in tensors]
    bench._verify(str(tmp_path / "run"), 2, arrays)
    with pytest.raises(hookstore.CorruptRunError, match="layer 1"):
        bench._verify(str(tmp_path / "run"), 2, [arrays[0], arrays[1] + 1])
    with pytest.raises(hookstore.CorruptRunError, match="layer 0"):
        bench._verify(str(tmp_path / "run"), 3, arrays)


# What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch, failure):
    def fail(workload):
        assert_only(workload._path, "small")
        raise failure

    monkeypatch.setattr(bench._Workload, "_copy_for_a_turn", fail)
    with pytest.raises(failure):
        bench.measure(tmp_path, seconds=SHORT_S)
    assert_only(tmp_path)


def test_nothing_is_left_after_control_c(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", "from hookstore.cli import app; app()", "bench", str(tmp_path), "--seconds", "60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not list(tmp_path.glob("*/large/layers/*")):  # it is recording
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert "Traceback" not in printed
    assert_only(tmp_path)


def test_an_interrupted_close_does_not_leave_files(tmp_path, monkeypatch):
    """The writer that goes on by itself is waited for before the directory is removed."""
    join, finish = bench.threading.Thread.join, writer.Writer._finish
    interrupted = []

    def finish_late(writing):
        if writing._run_path.endswith("large"):
            time.sleep(0.5)
        finish(writing)

    def interrupt_once(thread, timeout=None):
        if thread.name == "hookstore-writer" and not interrupted:
            interrupted.append(thread)
            raise KeyboardInterrupt
        join(thread, timeout)

    monkeypatch.setattr(writer.Writer, "_finish", finish_late)
    monkeypatch.setattr(bench.threading.Thread, "join", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        bench.measure(tmp_path, seconds=SHORT_S)
    assert not interrupted[0].is_alive()
    assert_only(tmp_path)


def test_directories_that_cannot_be_measured(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name, reason in (("nowhere", "does not exist"), ("file", "is no directory")):
        with pytest.raises(hookstore.OptionError, match=f"{name} {reason}") as caught:
            bench.measure(tmp_path / name)
        assert caught.value.option == "directory"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 1_999_999_999))
    with pytest.raises(hookstore.OptionError, match="has 1,999,999,999 bytes free: the measurement needs 2,000,000,000"):
        bench.measure(tmp_path)
    assert_only(tmp_path, "file")


def test_a_directory_that_cannot_be_written_to(tmp_path):
    if os.geteuid():
        tmp_path.chmod(0o500)
        directory = str(tmp_path)
    else:
        directory = "/proc"  # root may write everywhere else
    with pytest.raises(hookstore.OptionError, match=f"{directory} cannot be written to"):
        bench.measure(directory)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_seconds_are_checked(tmp_path, seconds):
    with pytest.raises(hookstore.OptionError, match="seconds: expected a positive number") as caught:
        bench.measure(tmp_path, seconds=seconds)
    assert caught.value.option == "seconds"


# What is said -----------------------------------------------------------------------------------------------------


def test_the_advice_follows_from_the_numbers():
    disk, cost, large, small, scope = bench.advice(throughput())
    assert disk.startswith("Up to 1,500 MB/s of captures (for example 150 MB a step of 100 ms) the disk keeps up")
    assert "60,000 small captures/s (6,000 a step of 100 ms)" in disk
    assert "training waits (on_full='block') or captures are dropped (on_full='drop')" in disk
    # 5 ms of a step of 100 ms: 8.4 GB/s copy 42 MB in them, and 8 µs are in them 625 times. The slowed step takes 105 ms.
    assert cost.startswith("Copies cost 11.9 ms per 100 MB, each small capture 8.0 µs")
    assert cost.endswith("a step of 100 ms is slowed by 5 % at 42.0 MB or 625 small captures a step.")
    assert large.endswith("the copies are the first to be felt: slowed by 5 % at 400 MB/s.")
    assert small.endswith("it is the hooks: slowed by 5 % at 5,952 captures/s.")
    assert "shares its cores" in scope


@pytest.mark.parametrize(("durable", "first"), [(400.1e6, "the copies are"), (399.9e6, "the disk is")])
def test_the_advice_names_what_is_felt_first_with_large_tensors(durable, first):
    assert first in bench.advice(throughput(durable_bytes_per_s=durable))[2]


@pytest.mark.parametrize(("rate", "first"), [(5_953, "it is the hooks"), (5_952, "it is the writer, at 5,952 captures/s")])
def test_the_advice_names_what_is_felt_first_with_small_ones(rate, first):
    assert first in bench.advice(throughput(captures_per_s=rate))[3]


def test_slow_disks_get_a_decimal():
    assert "Up to 9.5 MB/s of captures (for example 0.9 MB a step" in bench.advice(throughput(durable_bytes_per_s=9.49e6))[0]


# The command ------------------------------------------------------------------------------------------------------


def test_bench_command(tmp_path, monkeypatch):
    asked = {}

    def measure(directory, *, seconds):
        asked.update(directory=directory, seconds=seconds)
        return throughput()

    monkeypatch.setattr(bench, "measure", measure)
    found = CliRunner().invoke(cli.app, ["bench", str(tmp_path)], env={"COLUMNS": "300"})
    assert found.exit_code == 0, found.output
    assert asked["directory"] == tmp_path
    assert 0 < asked["seconds"] <= 10
    for pattern in (
        r"raw sequential writes \(O_DIRECT\) +2,000 +MB/s +1,000 – 4,000",
        r"large tensors recorded, until durable +1,500 +MB/s +750 – 3,000",
        r"copies in host memory +8,400 +MB/s",
        r"small captures, until durable +60,000 +/s +30,000 – 120,000",
        r"one small capture: median +8\.0 +µs +4\.0 – 16\.0",
        r"one small capture: 99th percentile +50\.0 +µs",
        r"5 rounds on 2 CPUs, torch with 2 threads",
    ):
        assert re.search(pattern, found.output), pattern
    for sentence in bench.advice(throughput()):
        assert sentence in found.output


def test_errors_of_the_command_are_one_line(tmp_path, monkeypatch):
    found = CliRunner().invoke(cli.app, ["bench", str(tmp_path / "nowhere")], env={"COLUMNS": "200"})
    assert found.exit_code == 1
    assert found.stderr.startswith("OptionError: ")
    assert found.stderr.count("\n") == 1

    def fill(directory, *, seconds):
        raise OSError(28, "No space left on device", "shard")

    monkeypatch.setattr(bench, "measure", fill)
    found = CliRunner().invoke(cli.app, ["bench", str(tmp_path)])
    assert found.exit_code == 1
    assert found.stderr.startswith("OSError: [Errno 28] No space left on device")
    assert CliRunner().invoke(cli.app, ["bench", str(tmp_path), "--seconds", "0.5"]).exit_code == 2


def test_the_command_line_loads_torch_only_to_measure():
    done = subprocess.run(
        [sys.executable, "-c", "import sys, hookstore.cli; sys.exit('torch' in sys.modules)"], check=False, timeout=60, capture_output=True
    )
    assert done.returncode == 0
