"""The life of a recording: options, pressure on the staging buffer, failures, endings."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
import zarr
from torch import nn

import hookstore
from hookstore import recorder as recorder_module
from hookstore import shards, writer
from hookstore import staging as staging_module


class Returns(nn.Module):
    """Returns what it is given."""

    def forward(self, value):
        return value


def record(path, model=None, **options):
    return hookstore.record(Returns() if model is None else model, path, **{"layers": "", "buffer_bytes": 1 << 20, **options})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def run_script(body, *arguments, **options):
    script = "import sys, torch, hookstore\nfrom torch import nn\nclass Returns(nn.Module):\n    def forward(self, value):\n        return value\n"
    return subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(body), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


# Options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": "weights"}, "'input', 'input_gradient', 'parameter', 'parameter_gradient', got 'weights'"),
        ({"kinds": ["activation", "gradients"]}, "kinds: expected some of 'activation', 'gradient', "),
        ({"kinds": []}, "kinds is empty"),
        ({"every": 0}, "every: expected a whole number of at least 1, got 0"),
        ({"phases": "validation"}, "phases: expected some of 'train', 'eval', got 'validation'"),
        ({"mode": "w"}, "mode: expected 'x' or 'a', got 'w'"),
        ({"on_full": "grow"}, "on_full: expected 'block' or 'drop', got 'grow'"),
        ({"on_error": "ignore"}, "on_error: expected 'raise' or 'disable'"),
        ({"buffer_bytes": 100}, "buffer_bytes: expected at least 65,536 bytes, got 100"),
        ({"buffer_bytes": 1e9}, "buffer_bytes"),
        ({"dtype": torch.int8}, "dtype: expected a floating-point torch.dtype"),
        ({"dtype": "float16"}, "dtype: expected a floating-point torch.dtype"),
        ({"codec": "snappy"}, "codec: expected None, 'zstd', 'lz4' or Zarr codec metadata"),
        ({"codec": {"name": "jpeg"}}, "codec: 'jpeg' is not known"),
        ({"codec": {"name": "zstd", "configuration": {"speed": 3}}}, "codec: 'zstd' takes a configuration of 'level', 'checksum'"),
        ({"codec": {"name": "zstd", "configuration": {"level": 99}}}, "codec: 'zstd' does not take level 99"),
        ({"layers": "conv"}, "matches no module"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(path, options, message):
    with pytest.raises(hookstore.OptionError) as caught:
        record(path, **options)
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert not path.exists()


@pytest.mark.parametrize("model", [None, lambda inputs: inputs])
def test_not_a_module(path, model):
    with pytest.raises(hookstore.UnsupportedModelError, match=r"expected a torch\.nn\.Module"):
        hookstore.record(model, path)


def test_scripted_and_meta_models_are_refused(path):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(1, 1))
    for model, message in (
        (scripted, "traced and scripted modules run no Python hooks"),
        (nn.Sequential(scripted), "module '0' is a RecursiveScriptModule"),
        (nn.Linear(1, 1, device="meta"), "cannot capture tensors on device 'meta'"),
    ):
        with pytest.raises(hookstore.UnsupportedModelError, match=message):
            hookstore.record(model, path)
    assert not path.exists()


def test_a_directory_that_holds_something_is_left_alone(path):
    path.mkdir()
    with record(path):
        pass  # empty: taken
    before = sorted(os.listdir(path))
    with pytest.raises(hookstore.RunExistsError, match="exists already; record into a new directory") as caught:
        record(path)
    assert isinstance(caught.value, FileExistsError)
    assert sorted(os.listdir(path)) == before
    file = path.with_name("file")
    file.touch()
    with pytest.raises(hookstore.RunExistsError, match="is no directory"):
        record(file)


def test_run_json_says_what_was_recorded(path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with record(path, model, layers=None, kinds=["gradient", "activation"], every=5, codec="zstd", dtype=torch.float16):
        pass
    description = json.loads((path / "run.json").read_text())
    assert description["format_version"] == 1
    assert description["model"] == "torch.nn.modules.container.Sequential"
    assert [layer["name"] for layer in description["layers"]] == ["0", "1"]
    assert description["recorded"] == {
        "kinds": ["activation", "gradient"],
        "phases": ["train"],
        "max_slowdown": None,
        "last": None,
        "when": None,
        "captures": [
            {
                "name": "0",
                "layers": ["0", "1"],
                "kinds": ["activation", "gradient"],
                "every": 5,
                "epochs": None,
                "batches": None,
                "steps": None,
                "phases": ["train"],
                "dtype": "float16",
                "codec": {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
                "select": "",
                "dims": None,
                "stats": False,
                "when": None,
                "hold": 1,
            }
        ],
    }
    assert description["environment"]["torch"] == torch.__version__


# Pressure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_400_arrays_in_a_small_buffer_do_not_deadlock(path, codec):
    """Each array's first region wants 64 KiB; the buffer holds two of them."""
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(200)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)
    inputs = torch.ones(2, 3)
    with record(path, model, layers=None, kinds=("activation", "gradient"), buffer_bytes=128 << 10, codec=codec) as recorder:
        for _ in recorder.batches(range(3), epoch=0):
            model(inputs).sum().backward()
    with hookstore.open(path) as run:
        assert run.manifest.num_rows == 200 * 2 * 3
        assert len(set(run.manifest["array"].to_pylist())) == 400
        value = inputs
        for layer in run.layers:
            value = model.get_submodule(layer)(value)
            for batch in range(3):
                assert torch.equal(run[layer].activation.tensor(0, batch), value.detach())


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "smaller_batch"])
def test_tensor_larger_than_the_buffer(path, codec, layout):
    values = torch.randn(64, 5000)  # 1.28 MB through 256 KiB
    if layout == "transposed":
        values = values.T
    with record(path, buffer_bytes=256 << 10, codec=codec) as recorder:
        model = recorder_model(recorder, path)
        for batch in recorder.batches(range(2), epoch=0):
            tensor = values[: len(values) - 7] if layout == "smaller_batch" and batch else values
            model(tensor)
            model(tensor[:1, :5])
    with hookstore.open(path) as run:
        for batch in range(2):
            expected = values[: len(values) - 7] if layout == "smaller_batch" and batch else values
            assert torch.equal(run[""].activation.tensor(0, batch), expected)
            assert torch.equal(run[""].activation.tensor(0, batch, 1), expected[:1, :5])
    plain = zarr.open_group(str(path / "layers"), mode="r")["%root/activation"]
    assert np.array_equal(plain[0, 0], values.numpy())


def recorder_model(recorder, path):
    """The model that `record` was given by default: hooks sit on it, so it must be the same object."""
    return recorder._hooks._model()


@pytest.fixture(autouse=True)
def _keep_default_models(monkeypatch):
    """`record(path)` makes its own model, to which the recorder refers weakly."""
    kept = []
    create = Returns.__init__
    monkeypatch.setattr(Returns, "__init__", lambda self: (create(self), kept.append(self))[0])


def slow_writes(monkeypatch, gate):
    """Let no write to a shard happen before the gate is open."""
    write = os.pwrite

    def pwrite(descriptor, buffer, offset):
        assert gate.wait(60)
        return write(descriptor, buffer, offset)

    monkeypatch.setattr(shards.os, "pwrite", pwrite)


def test_drop_keeps_training_going_and_says_so(path, monkeypatch):
    gate = threading.Event()
    slow_writes(monkeypatch, gate)
    tensors = torch.randn(20, 64 << 10).float()  # 256 KiB each, a buffer of 1 MiB
    with pytest.warns(hookstore.CaptureWarning, match="captures are being dropped") as warned, record(path, on_full="drop") as recorder:
        model = recorder_model(recorder, path)
        for batch in recorder.batches(range(20), epoch=0):
            model(tensors[batch])
        dropped = recorder.progress.num_dropped
        gate.set()
    assert len(warned) == 1
    with hookstore.open(path) as run:
        statuses = run[""].activation.rows["status"].to_pylist()
        assert statuses.count("dropped") == dropped
        assert 20 - 4 <= dropped < 20
        assert run.info().statuses == {"ok": 20 - dropped, "dropped": dropped}
        for batch in run.batches(0):
            assert torch.equal(run[""].activation.tensor(0, batch), tensors[batch])
        missing = next(batch for batch in range(20) if batch not in run.batches(0))
        with pytest.raises(hookstore.MissingCaptureError, match=r"was dropped: the staging buffer of 1,048,576 bytes was full") as caught:
            run[""].activation[0, missing]
        assert caught.value.status == "dropped"


def test_drop_of_a_tensor_larger_than_the_buffer(path):
    with pytest.warns(hookstore.CaptureWarning, match="dropped"), record(path, on_full="drop", buffer_bytes=64 << 10) as recorder:
        recorder_model(recorder, path)(torch.zeros(100_000))
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["dropped"]


def test_block_waits_and_loses_nothing(path, monkeypatch):
    gate = threading.Event()
    slow_writes(monkeypatch, gate)
    tensors = torch.randn(20, 64 << 10)
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        reached = []

        def train():
            for batch in recorder.batches(range(20), epoch=0):
                model(tensors[batch])
                reached.append(batch)

        thread = threading.Thread(target=train)
        thread.start()
        thread.join(1)
        waiting, lag_bytes = thread.is_alive(), recorder.progress.lag_bytes
        gate.set()
        thread.join(60)
        assert waiting, "twenty captures of 256 KiB do not fit into 1 MiB"
        assert 512 << 10 < lag_bytes <= recorder.progress.buffer_bytes
        assert not thread.is_alive()
    with hookstore.open(path) as run:
        for batch in range(20):
            assert torch.equal(run[""].activation.tensor(0, batch), tensors[batch])


def test_threads_stage_at_once(path):
    """Hooks run on several threads (autograd's, DataParallel's): every capture arrives whole."""
    model = nn.Sequential(*(Returns() for _ in range(4)))
    tensors = torch.arange(4 * 50 * 1000, dtype=torch.float32).reshape(4, 50, 1000)
    with record(path, model, layers=None, buffer_bytes=128 << 10) as recorder, recorder.at(epoch=0, batch=0):

        def work(index):
            for tensor in tensors[index]:
                model[index](tensor)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    with hookstore.open(path) as run:
        for index in range(4):
            for call in range(50):
                assert torch.equal(run[str(index)].activation.tensor(0, 0, call), tensors[index, call])


# Acknowledged, durable, live ---------------------------------------------------------------------------------------


def test_flush_makes_everything_readable_and_durable(path, monkeypatch):
    synced = []
    sync_paths = writer.sync_paths
    monkeypatch.setattr(writer, "sync_paths", lambda paths, where: (synced.append(set(paths)), sync_paths(paths, where)))
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        for batch in recorder.batches(range(5), epoch=0):
            model(torch.full((3,), float(batch)))
            recorder.flush()
            assert any(".unsealed" in name for name in synced[-1])
            with hookstore.open(path) as run:
                assert run.info().state == "recording"
                assert run.batches(0) == list(range(batch + 1))
                for earlier in range(batch + 1):
                    assert run[""].activation[0, earlier].tolist() == [float(earlier)] * 3
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        assert not (path / "journal").exists()


def test_captures_are_acknowledged_without_being_asked(path):
    """Within a second by default; the bound here is loose because machines stall."""
    with record(path) as recorder:
        recorder_model(recorder, path)(torch.ones(3))
        deadline = time.monotonic() + 30
        while recorder.progress.num_acknowledged < 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with hookstore.open(path) as run:
            assert run[""].activation[0, 0].tolist() == [1.0] * 3


def test_plain_readers_see_only_sealed_shards(path):
    with record(path) as recorder:
        recorder_model(recorder, path)(torch.ones(3))
        recorder.flush()
        array = zarr.open_group(str(path / "layers"), mode="r")["%root/activation"]
        assert np.isnan(array[0, 0]).all(), "the shard is not sealed, so its chunk is missing, which reads as fill"
        names = os.listdir(path / "layers" / "%root" / "activation")
        assert sorted(names) == [".c.0.0.0.unsealed", "zarr.json"]
    assert array[0, 0].tolist() == [1.0] * 3


def test_capture_for_a_shard_that_is_sealed(path, monkeypatch):
    """A gradient may come when its shard has long been sealed: the shard is taken up again as a hidden clone."""
    monkeypatch.setattr("hookstore.format.SHARD_TARGET_BYTES", 1000)
    model = nn.Linear(4, 8, bias=False)
    with record(path, model, kinds=("activation", "gradient")) as recorder:
        losses = []
        for batch in recorder.batches(iter(range(120)), epoch=0):
            losses.append(model(torch.full((8, 4), float(batch))).sum() * batch)
            if batch > 0:
                losses[batch].backward()
        recorder.flush()
        assert len([name for name in os.listdir(path / "layers" / "%root" / "gradient") if name.startswith("c.")]) > 10
        with hookstore.open(path) as before:
            kept = before[""].gradient[0, 1]
            losses[0].backward()
            recorder.flush()
            assert kept.tolist() == [[1.0] * 8] * 8
            assert before[""].gradient[0, 2].tolist() == [[2.0] * 8] * 8
        with hookstore.open(path) as run:
            assert run[""].gradient[0, 0].tolist() == [[0.0] * 8] * 8
    plain = zarr.open_group(str(path / "layers"), mode="r")["%root/gradient"]
    with hookstore.open(path) as run:
        for batch in range(120):
            assert run[""].gradient[0, batch].tolist() == [[float(batch)] * 8] * 8
            assert np.array_equal(plain[0, batch], run[""].gradient[0, batch])


def test_same_place_twice_keeps_both_and_gives_the_last(path):
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        for value in (1.0, 2.0):
            with recorder.at(epoch=0, batch=0):
                model(torch.tensor([value]))
    with hookstore.open(path) as run:
        with pytest.warns(hookstore.CaptureWarning, match="captured 2 times"):
            assert run[""].activation[0, 0].tolist() == [2.0]
        assert [run.read(row).tolist() for row in run[""].activation.rows.to_pylist()] == [[1.0], [2.0]]


# Failures ----------------------------------------------------------------------------------------------------------


def full_disk(monkeypatch, after):
    """Let the disk be full after that many writes."""
    write = os.pwrite
    count = [0]

    def pwrite(descriptor, buffer, offset):
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, buffer, offset)

    monkeypatch.setattr(shards.os, "pwrite", pwrite)


@pytest.mark.parametrize("how", ["next_capture", "flush", "close", "blocked", "oversize"])
def test_a_full_disk_reaches_the_training_loop_as_the_original_error(path, monkeypatch, how):
    full_disk(monkeypatch, after=1)
    recorder = record(path)
    model = recorder_model(recorder, path)
    model(torch.zeros(64 << 10))
    recorder.flush()
    with pytest.raises(OSError, match="No space left") as caught:
        model(torch.ones(64 << 10))
        if how == "flush":
            recorder.flush()
        elif how == "close":
            recorder.close()
        elif how == "oversize":
            model(torch.ones(1 << 20))
        else:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                model(torch.ones(1000 if how == "next_capture" else 200_000))
    assert caught.value.errno == errno.ENOSPC
    assert ".unsealed" in caught.value.filename
    if how != "close":
        with pytest.raises(OSError, match="No space left"):
            recorder.flush()
        with pytest.raises(OSError, match="No space left"):
            recorder.close()
    recorder.close()
    assert not any(module._forward_hooks for module in model.modules())
    with hookstore.open(path) as run:
        assert run.batches(0) == [0]
        assert run[""].activation[0, 0].tolist() == [0.0] * (64 << 10)


def test_disable_stops_capturing_with_a_warning(path, monkeypatch):
    full_disk(monkeypatch, after=0)
    with (
        pytest.warns(hookstore.CaptureWarning, match="stopped capturing.*No space left") as warned,
        record(path, on_error="disable") as recorder,
    ):
        model = recorder_model(recorder, path)
        for _ in recorder.batches(range(200), epoch=0):
            model(torch.ones(32 << 10))
        recorder.flush()
    assert len(warned) == 1


def test_failing_encoder_reaches_the_training_loop(path, monkeypatch):
    monkeypatch.setattr(writer.Encoder, "encode", lambda *_: 1 / 0)
    recorder = record(path, codec="zstd")
    recorder_model(recorder, path)(torch.ones(10))
    with pytest.raises(ZeroDivisionError):
        recorder.flush()
    with pytest.raises(ZeroDivisionError):
        recorder.close()


def test_the_users_own_exception_goes_first(path, monkeypatch):
    full_disk(monkeypatch, after=0)
    with pytest.raises(KeyError) as caught, record(path) as recorder:
        recorder_model(recorder, path)(torch.ones(10))
        raise KeyError("mine")
    assert any("was not finished: OSError" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("size", [3, 10_000])
def test_a_failed_copy_leaves_the_rest_whole(path, monkeypatch, size):
    class Breaks:
        def copy(self, destination, source):
            raise MemoryError("no copy today")

    def break_small(*_):
        raise MemoryError("no copy today")

    with record(path) as recorder:
        model = recorder_model(recorder, path)
        model(torch.ones(size))
        with monkeypatch.context() as patch:
            patch.setattr(recorder_module.Devices, "of", lambda *_: Breaks())
            patch.setattr(staging_module, "copy_small", break_small)
            with pytest.raises(MemoryError, match="no copy today"):
                model(torch.ones(size) * 2)
        model(torch.ones(size) * 3)
    with hookstore.open(path) as run:
        assert [run[""].activation[0, batch].tolist() for batch in run.batches(0)] == [[1.0] * size, [3.0] * size]


@pytest.mark.parametrize("size", [3, 10_000])
def test_a_padded_capture_whose_copy_fails_leaves_the_shapes_of_others_right(path, monkeypatch, size):
    class Breaks:
        def copy(self, destination, source):
            raise MemoryError("no copy today")

    with record(path, buffer_bytes=4 << 20) as recorder:
        model = recorder_model(recorder, path)
        model(torch.ones(4, size))
        for last in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(recorder_module.Devices, "of", lambda *_: Breaks())
                with pytest.raises(MemoryError, match="no copy today"):
                    model(torch.ones(3, size))
            if not last:
                model(torch.ones(4, size) * 2)
                model(torch.ones(2, size) * 3)
    with hookstore.open(path) as run:
        assert [row["shape"] for row in run.manifest.to_pylist()] == [[4, size], [4, size], [2, size]]
        assert [run[""].activation[0, batch][-1, -1] for batch in run.batches(0)] == [1.0, 2.0, 3.0]


def test_calls_after_close(path):
    recorder = record(path)
    recorder.close()
    for call in (recorder.flush, lambda: recorder.at(epoch=0, batch=0), lambda: recorder.batches([], epoch=0)):
        with pytest.raises(hookstore.RecorderClosedError, match="is closed"):
            call()


# Endings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('nan')", "sys.exit(3)"])
def test_script_that_ends_without_close_is_finished_by_the_writer(path, ending):
    done = run_script(
        f"""
        recorder = hookstore.record((model := Returns()), sys.argv[1], layers="", buffer_bytes=1 << 20, codec="zstd")
        for batch in recorder.batches(range(30), epoch=0):
            model(torch.full((10_000,), float(batch)))
        {ending}
        """,
        path,
    )
    assert (done.returncode, done.stdout) == ({"": 0}.get(ending, 3 if "exit" in ending else 1), ""), done.stderr
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        assert [run[""].activation[0, batch][0] for batch in range(30)] == list(range(30))


def test_thread_that_outlives_the_main_thread_gets_an_error_and_no_hang(path):
    done = run_script(
        """
        import threading, time
        recorder = hookstore.record((model := Returns()), sys.argv[1], layers="", buffer_bytes=1 << 20)
        def train():
            threading.main_thread().join()
            try:
                while True:
                    model(torch.ones(10_000))
            except hookstore.RecorderClosedError as error:
                print(error)
        model(torch.zeros(3))
        threading.Thread(target=train).start()
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    assert "the main thread has ended" in done.stdout
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        assert run[""].activation[0, 0].tolist() == [0.0] * 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_acknowledged_captures_survive_a_kill(path, number):
    done = run_script(
        f"""
        import os, time
        recorder = hookstore.record((model := Returns()), sys.argv[1], layers="", buffer_bytes=1 << 20)
        for batch in recorder.batches(range(1000), epoch=0):
            model(torch.full((10_000,), float(batch)))
            if batch == 500:
                while not recorder.progress.num_acknowledged:
                    time.sleep(0.01)
                print(recorder.progress.num_acknowledged, flush=True)
                os.kill(os.getpid(), {int(number)})
        """,
        path,
    )
    assert done.returncode == -number
    acknowledged = int(done.stdout)
    with hookstore.open(path) as run:
        assert run.info().state == "unfinished"
        assert run.manifest.num_rows >= acknowledged > 0
        for row in run.manifest.to_pylist():
            assert run.read(row)[0] == row["batch"]


def test_forked_child_captures_nothing_and_ends(path):
    done = run_script(
        """
        import os
        model = Returns()
        with hookstore.record(model, sys.argv[1], layers="", buffer_bytes=1 << 20) as recorder:
            model(torch.ones(3))
            if not (child := os.fork()):
                model(torch.ones(3) * 2)
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            model(torch.ones(3) * 3)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    with hookstore.open(path) as run:
        assert [run.read(row)[0] for row in run.manifest.to_pylist()] == [1.0, 3.0]


def test_recorders_leave_no_threads_or_files(tmp_path):
    threads = threading.active_count()
    files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for number in range(20):
        with record(tmp_path / str(number), codec="lz4" if number % 2 else None) as recorder:
            recorder_model(recorder, tmp_path)(torch.ones(3))
    assert threading.active_count() == threads
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files


def test_segments_become_parts(path, monkeypatch):
    monkeypatch.setattr("hookstore.manifest.SEGMENT_ROWS", 50)
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        for batch in recorder.batches(range(400), epoch=0):
            model(torch.tensor([float(batch)]))
            if batch % 40 == 0:
                recorder.flush()
                with hookstore.open(path) as run:
                    assert run[""].activation.rows["batch"].to_pylist() == list(range(batch + 1))
    assert len(os.listdir(path / "manifest")) >= 3
    with hookstore.open(path) as run:
        assert run.manifest["batch"].to_pylist() == list(range(400))
        assert [run[""].activation[0, batch][0] for batch in range(400)] == list(range(400))


# What reviews found ------------------------------------------------------------------------------------------------


def test_many_calls_of_a_layer_rewrite_no_shards(path):
    """Each shard of calls stays open: sealing one for every region would copy it again and again."""
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        for batch in recorder.batches(range(12), epoch=0):
            for call in range(100):
                model(torch.full((16, 64), float(batch * 100 + call)))
    stored = sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(path) for name in names)
    captured = 12 * 100 * 16 * 64 * 4
    assert stored < 2 * captured + (8 << 20), "what is not captures are indexes of shards and page padding"
    with hookstore.open(path) as run:
        for batch in (0, 5, 11):
            for call in (0, 1, 16, 17, 99):
                assert run[""].activation[0, batch, call][0, 0] == batch * 100 + call


def test_run_begun_in_a_daemon_thread_is_finished(path):
    done = run_script(
        """
        import threading
        done = threading.Event()
        def train():
            model = Returns()
            with_hooks = hookstore.record(model, sys.argv[1], layers="", buffer_bytes=1 << 20, codec="zstd")
            for batch in with_hooks.batches(range(20), epoch=0):
                model(torch.full((1000,), float(batch)))
            done.set()
            threading.Event().wait()
        threading.Thread(target=train, daemon=True).start()
        done.wait()
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        assert run.batches(0) == list(range(20))


@pytest.mark.slow  # a soak: instants are drawn at random
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_interrupts_at_any_instant_leave_nothing_to_wait_for(path, size):
    """Ctrl-C in the middle of captures, small and larger than the buffer, again and again; then close() must come back."""
    done = run_script(
        f"""
        import random, signal
        model = Returns()
        recorder = hookstore.record(model, sys.argv[1], layers="", buffer_bytes=128 << 10)
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        value = torch.zeros({size})
        number = 0
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.02))
                while True:
                    recorder.at(epoch=0, batch=number)
                    model(value.fill_(number))
                    number += 1
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                number += 1
        recorder.close()
        print(number)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    with hookstore.open(path) as run:
        assert run.manifest.num_rows >= int(done.stdout) - 2 * 60
        for row in run.manifest.to_pylist():
            array = run.read(row)
            assert array[0] == array[-1] == row["batch"]


@pytest.mark.parametrize("size", [3, 10_000])
def test_flush_from_a_signal_handler_in_a_capture_is_refused_instead_of_hanging(path, monkeypatch, size):
    with record(path) as recorder:
        model = recorder_model(recorder, path)
        model(torch.ones(size))
        device_copy, small_copy = recorder_module.Devices.of, staging_module.copy_small
        caught = []

        class Interrupted:
            def copy(self, destination, source):
                signal.raise_signal(signal.SIGUSR1)
                return device_copy(recorder._stager._devices, source).copy(destination, source)

        def interrupted(*arguments):
            signal.raise_signal(signal.SIGUSR1)
            small_copy(*arguments)

        def handler(*_):
            for call in (recorder.flush, recorder.close):
                with pytest.raises(hookstore.RecorderBusyError, match="in the middle of a capture") as refused:
                    call()
                caught.append(refused.value)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(recorder_module.Devices, "of", lambda *_: Interrupted())
                patch.setattr(staging_module, "copy_small", interrupted)
                model(torch.ones(size) * 2)
        finally:
            signal.signal(signal.SIGUSR1, before)
        recorder.flush()
    assert len(caught) == 2
    with hookstore.open(path) as run:
        assert [run[""].activation[0, batch].tolist() for batch in (0, 1)] == [[1.0] * size, [2.0] * size]


def test_disable_holds_for_gaps_too(path, monkeypatch):
    class Text(nn.Module):
        def forward(self, value):
            return "text"

    model = Text()
    full_disk(monkeypatch, after=0)
    with pytest.warns(hookstore.CaptureWarning, match="stopped capturing"), record(path, model, on_error="disable") as recorder:
        recorder._stager.fail(OSError(errno.ENOSPC, "No space left on device"))
        model(torch.ones(3))
        recorder._stager.failure = None


def test_writes_that_never_make_a_page_end_in_the_systems_error(path, monkeypatch):
    """A file-size limit or a quota may leave room for less than a page, which direct writes can never use."""
    write = os.pwrite
    room = [5 * 4096 + 512]

    def pwrite(descriptor, buffer, offset):
        if offset >= room[0]:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return write(descriptor, bytes(buffer[: max(1, room[0] - offset)]) if offset + len(buffer) > room[0] else buffer, offset)

    monkeypatch.setattr(shards.os, "pwrite", pwrite)
    recorder = record(path)
    recorder_model(recorder, path)(torch.ones(20_000))
    with pytest.raises(OSError, match="File too large"):
        recorder.flush()
    with pytest.raises(OSError, match="File too large"):
        recorder.close()


@pytest.mark.parametrize("what", ["record", "read"])
def test_few_descriptors_are_enough(path, what):
    """Hundreds of arrays under a limit of 64 descriptors, also when the reader keeps every array that it gets."""
    done = run_script(
        """
        import resource, numpy
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        if sys.argv[2] == "record":
            limit()
        model = nn.Sequential(*(Returns() for _ in range(200)))
        with hookstore.record(model, sys.argv[1], buffer_bytes=1 << 20) as recorder:
            for batch in recorder.batches(range(2), epoch=0):
                model(torch.full((10,), float(batch)))
        if sys.argv[2] == "read":
            limit()
        run = hookstore.open(sys.argv[1])
        kept = [run[str(layer)].activation[0, batch] for layer in range(200) for batch in range(2)]
        assert all((array == number % 2).all() for number, array in enumerate(kept))
        print(len(kept))
        """,
        path,
        what,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "400"), done.stderr


def test_a_recording_that_cannot_begin_leaves_nothing_behind(path, monkeypatch):
    def fail(*_arguments, **_options):
        raise MemoryError("no staging buffer today")

    monkeypatch.setattr(recorder_module, "allocate_host", fail)
    with pytest.raises(MemoryError, match="no staging buffer today"):
        record(path)
    assert not path.exists()
    monkeypatch.undo()
    with record(path):
        pass
