"""Children that record until they are killed, and what may be said about the run that they leave.

A server process imports torch once and forks a child for each job, before torch has computed anything there; the child's end is the end of a Python
script. Every value that is recorded is a function of where it was recorded: the generation (which of the processes that recorded into the run one after
another), epoch, batch, layer and call. The first five elements name these, the others follow from them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_LONGEST_WAIT_S = 60.0

# What is recorded ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A layer that returns what it is told to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_calls: int = 1
    pads: bool = False  # a smaller batch now and then

    def shape_at(self, batch: int) -> tuple[int, ...]:
        return (self.shape[0] - 1, *self.shape[1:]) if self.pads and batch % 7 == 6 else self.shape


@dataclass(frozen=True)
class Workload:
    layers: tuple[Layer, ...]
    epoch_batches: int
    shard_bytes: int
    segment_rows: int = 300
    buffer_bytes: int = 1 << 20
    pause_s: float = 0.0


_SMALL = (Layer("a", "float32", (8,)), Layer("b", "int32", (4, 4), pads=True), Layer("c.d", "float64", (5, 2), num_calls=2))
_LARGE = (Layer("a", "float32", (256, 1024)), Layer("b", "int32", (64, 3000), pads=True))
WORKLOADS = {
    "small": Workload(_SMALL, epoch_batches=60, shard_bytes=4096, pause_s=0.0005),
    "large": Workload(_LARGE, epoch_batches=8, shard_bytes=4 << 20, segment_rows=12, buffer_bytes=4 << 20),
    "mixed": Workload(
        (*_SMALL, Layer("e", "float32", (100, 700))), epoch_batches=30, shard_bytes=1 << 20, segment_rows=200, buffer_bytes=2 << 20
    ),
    "followed": Workload(
        (*_SMALL, Layer("e", "float32", (20, 200))),
        epoch_batches=50,
        shard_bytes=256 << 10,
        segment_rows=700,
        buffer_bytes=2 << 20,
        pause_s=0.001,
    ),
    "oversize": Workload(
        (Layer("a", "float32", (90, 1000)), Layer("b", "int16", (6,))),
        epoch_batches=12,
        shard_bytes=1 << 20,
        segment_rows=40,
        buffer_bytes=64 << 10,
    ),
}


class Where(NamedTuple):
    """Where a capture is filed, whichever attempt made it."""

    layer: str
    epoch: int
    batch: int
    call: int


@functools.cache
def _steps(count: int, dtype: str) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.int64) * (1 if dtype == "int16" else 40_503)


def value(layers: tuple[Layer, ...], generation: int, where: Where) -> np.ndarray[Any, Any]:
    """What was computed there. Whole numbers that each dtype has, so that nothing is rounded."""
    number = next(number for number, layer in enumerate(layers) if layer.name == where.layer)
    layer = layers[number]
    shape = layer.shape_at(where.batch)
    key = (((generation * 61 + where.epoch) * 1009 + where.batch) * 13 + number) * 7 + where.call
    flat = (_steps(math.prod(shape), layer.dtype) + key) & (0x7FFF if layer.dtype == "int16" else 0xFF_FFFF)
    flat[:5] = (generation, where.epoch, where.batch, number + 1, where.call)
    return flat.astype(layer.dtype).reshape(shape)


# Children -----------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """What a child does."""

    path: str
    workload: str
    generation: int = 0
    first: tuple[int, int] = (0, 0)
    mode: str = "x"
    codec: str | None = None
    is_quick: bool = True  # short intervals, so that many kills fall between two acknowledgements, marks or segments
    flush_every: int = 0
    num_batches: int = 1_000_000
    ending: str = "close"  # close, none, exception, exit, wait: what the script does after the last batch, in the middle of the next
    with_block: bool = True
    on_sigterm: str | None = None
    handler: str = "default"  # of SIGTERM, before recording: default, ignore, exit, return
    interrupted_copy: int = -1  # the capture in whose copy the process sends itself SIGTERM
    action: str = "record"  # record, recover, or read: with a plain reader, again and again until the parent says that it may end
    reader: str = "zarr"
    fifo: str = ""
    stderr: str = ""


def _run(job: Job) -> None:
    """Record or recover, in a child.

    Says on the pipe: s(tarted), r(ecording), b(atch) captured, p(artial batch), a(cknowledged), f(lush has returned), c(losing), d(one),
    h(andler called), t(erminated in the middle of a capture).
    """
    import torch
    from torch import nn

    import hookstore
    from hookstore import format as format_module
    from hookstore import manifest, staging, writer

    pipe = os.open(job.fifo, os.O_WRONLY)

    def say(what: str, *numbers: int) -> None:
        os.write(pipe, f"{' '.join([what, *map(str, numbers)])}\n".encode())

    say("s")
    if job.action == "recover":
        hookstore.recover(job.path)
        say("d")
        return
    workload = WORKLOADS[job.workload]
    format_module.SHARD_TARGET_BYTES = workload.shard_bytes
    manifest.SEGMENT_ROWS = workload.segment_rows
    if job.is_quick:
        for name, seconds in (("_POLL_S", 0.005), ("_REGION_AGE_S", 0.02), ("_ROWS_AGE_S", 0.005), ("_SYNC_AGE_S", 0.05)):
            assert hasattr(writer, name)
            setattr(writer, name, seconds)

    def handle(*_: Any) -> None:
        say("h")
        if job.handler == "exit":
            sys.exit(7)

    if job.handler != "default":
        signal.signal(signal.SIGTERM, signal.SIG_IGN if job.handler == "ignore" else handle)
    if job.interrupted_copy >= 0:
        copy_small, num_copies = staging.copy_small, 0

        def interrupted(*arguments: Any) -> None:
            nonlocal num_copies
            if num_copies == job.interrupted_copy:
                say("t")
                signal.raise_signal(signal.SIGTERM)
            num_copies += 1
            copy_small(*arguments)

        staging.copy_small = interrupted

    class Returns(nn.Module):
        result: Any = None

        def forward(self) -> Any:
            return self.result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called = {layer.name: Returns() for layer in workload.layers}
            for name, module in self.called.items():
                parent = self
                for part in name.split(".")[:-1]:
                    parent.add_module(part, nn.Module())
                    parent = parent.get_submodule(part)
                parent.add_module(name.rsplit(".", 1)[-1], module)

    model = Model()
    names = [layer.name for layer in workload.layers]

    def call(layer: Layer, epoch: int, batch: int) -> None:
        for number in range(layer.num_calls):
            model.called[layer.name].result = torch.from_numpy(
                value(workload.layers, job.generation, Where(layer.name, epoch, batch, number))
            )
            model.called[layer.name]()

    recorder = hookstore.record(
        model,
        job.path,
        layers=names,
        mode=job.mode,
        codec=job.codec,
        buffer_bytes=workload.buffer_bytes,
        **({"on_sigterm": job.on_sigterm} if job.on_sigterm else {}),
    )
    say("r")

    def train() -> None:
        num_done, num_acknowledged, epoch = 0, 0, job.first[0]
        while True:
            for batch in recorder.batches(range(workload.epoch_batches), epoch=epoch):
                if (epoch, batch) < tuple(job.first):
                    continue
                if num_done == job.num_batches:
                    if job.ending == "close":
                        return
                    call(workload.layers[0], epoch, batch)
                    say("p", epoch, batch)
                    if job.ending == "wait":
                        while True:
                            time.sleep(0.01)
                    if job.ending == "exception":
                        raise RuntimeError("the loss is NaN")
                    if job.ending == "exit":
                        sys.exit(3)
                    return
                for layer in workload.layers:
                    call(layer, epoch, batch)
                num_done += 1
                say("b", epoch, batch)
                if job.flush_every and num_done % job.flush_every == 0:
                    recorder.flush()
                    say("f", epoch, batch)
                found = recorder.progress.num_acknowledged
                if found != num_acknowledged:
                    num_acknowledged = found
                    say("a", found)
                if workload.pause_s:
                    time.sleep(workload.pause_s)
            epoch += 1

    if not job.with_block:
        train()  # and the script ends
        return
    with recorder:
        train()
        say("c")
    say("d")


def _watch(job: Job) -> None:
    """Read a run that others write with a plain reader, in a child: what was there once stays, and no later recording gives way to an earlier one."""
    layers = WORKLOADS[job.workload].layers
    pipe = os.open(job.fifo, os.O_WRONLY)
    known: dict[Where, int] = {}
    is_last = False
    while not is_last:
        is_last = os.path.exists(f"{job.fifo}.stop")
        if not os.path.isdir(job.path):
            continue
        list_plainly(Path(job.path))
        found = read_plainly(Path(job.path), layers, job.reader)
        gone = [f"{where} of generation {made}, now {found.get(where)}" for where, made in known.items() if found.get(where, -1) < made]
        assert not gone, f"{len(gone)} are gone: {gone[:3]}"
        known = found
        os.write(pipe, f"n {len(found)}\n".encode())
        time.sleep(0.02)  # there are few cores, and the writer is to go on


def serve() -> None:
    """Fork a child for each job that comes; in the child, run it and return."""
    import torch
    import zarr  # noqa: F401

    import hookstore.recorder  # noqa: F401

    torch.set_num_threads(1)
    sys.stdout.write("\n")
    sys.stdout.flush()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif answer := os.fork():
            pass
        else:
            job = Job(**request)
            null = os.open(os.devnull, os.O_RDWR)
            errors = os.open(job.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number, descriptor in enumerate((null, null, errors)):
                os.dup2(descriptor, number)
            faulthandler.enable()
            (_watch if job.action == "read" else _run)(job)
            return
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


class Server:
    """The process that forks the children."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_jobs = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._children: set[int] = set()
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "\n", "the server did not start"

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, job: Job) -> Child:
        """Fork a child."""
        self._num_jobs += 1
        job.fifo = str(self._directory / f"fifo-{self._num_jobs}")
        job.stderr = str(self._directory / f"stderr-{self._num_jobs}")
        os.mkfifo(job.fifo)
        pipe = os.open(job.fifo, os.O_RDONLY | os.O_NONBLOCK)
        pid = self._ask(vars(job))
        self._children.add(pid)
        return Child(self, pid, job, pipe)

    def wait(self, pid: int) -> int:
        """Return the exit status of a child when it has ended."""
        status = self._ask({"wait": pid})
        self._children.discard(pid)
        return status

    def close(self) -> None:
        """End the children that are left, and the server."""
        for pid in list(self._children):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_LONGEST_WAIT_S)
        self._process.stdout.close()


@dataclass
class Child:
    """A child under way, and what it has said so far."""

    server: Server
    pid: int
    job: Job
    pipe: int
    num_acknowledged: int = 0
    num_seen: int = 0  # by a reader, when it looked last
    flushed: tuple[int, int] | None = None  # the last batch whose flush has returned
    done: tuple[int, int] | None = None  # the last batch that was captured whole
    signalled: tuple[int, int] | None = None  # the last batch that was captured whole before a signal came
    partial: tuple[int, int] | None = None  # the batch in whose middle the script ended
    said: Counter[str] = field(default_factory=Counter)
    status: int | None = None
    has_ended: bool = False
    _rest: bytes = b""
    _has_begun: bool = False

    def listen(self, until: Callable[[Child], bool], timeout_s: float = _LONGEST_WAIT_S) -> bool:
        """Listen until something is so, the child has ended, or time is up; say whether it is so."""
        deadline = time.monotonic() + timeout_s
        while not until(self) and not self.has_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._hear(left)
        return until(self)

    def _hear(self, timeout_s: float) -> None:
        if not self._has_begun:  # before the child has opened the pipe it reads as ended
            timeout_s = min(timeout_s, 0.002)
        ready, _, _ = select.select([self.pipe], [], [], timeout_s)
        if not ready:
            return
        heard = os.read(self.pipe, 1 << 16)
        if not heard and not self._has_begun:
            time.sleep(0.0005)
            return
        self._has_begun = True
        self.has_ended = not heard
        *lines, self._rest = (self._rest + heard).split(b"\n")
        for line in lines:
            what, *numbers = line.decode().split()
            self.said[what] += 1
            if what == "a":
                self.num_acknowledged = int(numbers[0])
            elif what == "t":
                self.signalled = self.done
            elif what == "n":
                self.num_seen = int(numbers[0])
            elif what in "fbp":
                setattr(self, {"f": "flushed", "b": "done", "p": "partial"}[what], (int(numbers[0]), int(numbers[1])))

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; the number is no other process's before `wait` has been called."""
        assert self.status is None
        self.signalled = self.done
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Tell a reader to look once more and end."""
        Path(f"{self.job.fifo}.stop").touch()

    def wait(self) -> int:
        """Return the exit status when it has ended, having heard all that it said. Who does not end says where its threads stand."""
        hangs = not self.has_ended and not self.listen(lambda child: child.has_ended)
        if hangs:
            os.kill(self.pid, signal.SIGABRT)
        self.status = self.server.wait(self.pid)
        while not self.has_ended:
            self._has_begun = True
            self._hear(_LONGEST_WAIT_S)
        os.close(self.pipe)
        assert not hangs, self.errors
        return self.status

    @property
    def errors(self) -> str:
        """What it wrote to stderr."""
        return Path(self.job.stderr).read_text() if os.path.exists(self.job.stderr) else ""


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[Server]:
    """Run a server for a while."""
    server = Server(directory)
    try:
        yield server
    finally:
        server.close()


# What is there ------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A capture that is there."""

    attempt: int
    where: Where


def check_run(run: Any, layers: tuple[Layer, ...]) -> dict[Found, int]:
    """Read every capture of a run, each of which has to be what was computed there, and return the generation that made each."""
    found: dict[Found, int] = {}
    of_attempt: dict[int, int] = {}
    for row in run.manifest.select([name for name in run.manifest.column_names if name != "wall_time"]).to_pylist():
        if is_mark(row):
            continue
        assert row["status"] == "ok", row
        where = Where(row["layer"], row["epoch"], row["batch"], row["call"])
        array = run.read(row)
        generation = check_value(layers, where, array)
        place = Found(row["attempt"], where)
        assert place not in found, f"{place} is there twice"
        found[place] = generation
        assert of_attempt.setdefault(place.attempt, generation) == generation, (
            f"attempt {place.attempt} holds what several processes recorded"
        )
    generations = [of_attempt[attempt] for attempt in sorted(of_attempt)]
    assert generations == sorted(set(generations)), f"attempts are not in the order of time: generations {generations}"
    return found


def is_mark(row: dict[str, Any]) -> bool:
    """Say whether a row marks a batch that was cut short, and stands for no capture."""
    return bool(row["status"] == "partial" and row["kind"] == row["layer"] == row["array"] == "")


def check_value(layers: tuple[Layer, ...], where: Where, array: np.ndarray[Any, Any]) -> int:
    """Compare an array with what was computed there, bit by bit, and return the generation that says it computed it."""
    assert array.size >= 5, f"{where} has shape {array.shape}"
    generation = int(array.reshape(-1)[0])
    expected = value(layers, generation, where)
    same = (array.dtype, array.shape) == (expected.dtype, expected.shape) and array.tobytes() == expected.tobytes()
    assert same, f"{where} is {array!r}, generation {generation} computed {expected!r}"
    return generation


def _open_zarr(path: Path) -> Callable[[Any], Any]:
    import zarr

    return zarr.open_array(path, mode="r").__getitem__


def _open_tensorstore(path: Path) -> Callable[[Any], Any]:
    import tensorstore

    opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}, read=True).result()
    return lambda where: opened[where].read().result()


def _open_zarrs(path: Path) -> Callable[[Any], Any]:
    import zarr

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        opened = zarr.open_array(path, mode="r")
        assert type(opened.async_array.codec_pipeline).__name__ == "ZarrsCodecPipeline"

    def read(where: Any) -> Any:
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            return opened[where]

    return read


READERS = {"zarr": _open_zarr, "tensorstore": _open_tensorstore, "zarrs": _open_zarrs}


def read_plainly(run_path: Path, layers: tuple[Layer, ...], reader: str = "zarr") -> dict[Where, int]:
    """Read all arrays of a run whole with a reader that is not ours; return what is not fill, with the generation that made each."""
    found: dict[Where, int] = {}
    root = Path(run_path) / "layers"
    for layer in layers:
        directory = root / layer.name
        names = sorted(entry for entry in os.listdir(directory)) if directory.is_dir() else []
        for name in names:
            if name.startswith(".") or not (directory / name).is_dir():
                continue
            whole = np.asarray(READERS[reader](directory / name)(slice(None)))
            num_places = whole.ndim - len(layer.shape)
            assert whole.shape[num_places:] in (layer.shape, layer.shape_at(6)), "a run that begins with a smaller batch has smaller chunks"
            places = whole.reshape(*whole.shape[:num_places], math.prod(whole.shape[num_places:]))[..., 3]  # the layer's number, never 0
            is_there = ~np.isnan(places) if whole.dtype.kind == "f" else places != 0
            missing = whole[~is_there]
            assert (np.isnan(missing) if whole.dtype.kind == "f" else missing == 0).all(), f"{name} of {layer.name} holds half a chunk"
            for place in map(tuple, np.argwhere(is_there).tolist()):
                where = Where(layer.name, place[0], place[1], place[2] if num_places == 3 else 0)
                if num_places == 3 and name.endswith(".calls"):
                    assert where.call >= 1
                chunk = whole[place]
                inside = layer.shape_at(where.batch)
                padding = chunk[inside[0] :]
                assert (np.isnan(padding) if whole.dtype.kind == "f" else padding == 0).all()
                found[where] = check_value(layers, where, np.ascontiguousarray(chunk[: inside[0]]))
    return found


def list_plainly(run_path: Path) -> list[str]:
    """List the whole tree of groups and arrays with zarr-python, which warns about what does not belong there."""
    import zarr

    layers = Path(run_path) / "layers"
    if not (layers / "zarr.json").exists():
        return []
    return sorted(name for name, _ in zarr.open_group(layers, mode="r").members(max_depth=None))


if __name__ == "__main__":
    serve()
