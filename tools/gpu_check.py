#!/usr/bin/env python3
"""Check hookstore on a GPU, in three minutes at most: ``python tools/gpu_check.py [--seconds N] [--hookstore-dir DIR]``.

Runs the tests that need a CUDA device, measures copies to the host and two models that train with and without capture, compares what was recorded with plain
copies, and prints a table. Without a CUDA device the simulated one of the tests takes its place, and no figure is given that needs a GPU.

Ends with 0 when everything ran and passed, else with 1 and a list of what did not. A missed goal is in the table and no failure.
"""

# ruff: noqa: E402  # what is missing is said before it is imported

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # what is checked is this checkout, whether it is installed or not

NEEDED_BY = {
    **dict.fromkeys(("torch", "numpy", "zarr", "numcodecs", "pyarrow", "crc32c", "ml_dtypes"), "hookstore itself"),
    "torchvision": "ResNet-50",
    "pytest": "the tests and the simulated device",
    "hypothesis": "the tests",
    "pytest_timeout": "a limit on the time of each test",
}
MISSING = {name: use for name, use in NEEDED_BY.items() if importlib.util.find_spec(name) is None}
if "hookstore itself" in MISSING.values():
    sys.exit(f"nothing was checked, packages are missing: {MISSING}")

import torch
from torch import nn

import hookstore
from hookstore.device import CudaRuntime, StreamDevice, allocate_host
from hookstore.files import DirectWriter
from hookstore.recorder import _DEVICE_RING_BYTES

KINDS = ("activation", "gradient")
SHARE = 0.8  # of the bandwidths, for captures
LONGEST_PERIOD = 20  # batches from one that is recorded to the next, if with fewer layers that can be had
MOST_PERIODS = 8  # in a turn: a bound on what it writes
CHECKED_BATCHES = 2
NUM_PIECES = 16
DISK_BYTES = 512 << 20
NO_GPU = "no CUDA device: the simulated device was used"
SIMULATED_TESTS = ("tests/test_device_scenarios.py",)

Result = TypeVar("Result")
Turn = dict[str, float]
"""What a turn of training found: ``step_s``, the mean time of a step; bytes of memory; how many captures were compared."""
Rounds = list[tuple[Turn, Turn]]  # without capture and with it
Rates = tuple[float, float]  # bytes per second of D2H and of the disk


class Cuda:
    """The current CUDA device."""

    is_gpu = True
    resnet, images = "resnet50", (64, 3, 224, 224)
    num_blocks, tokens = 12, (8, 1024, 768)
    piece_bytes, matrix_size = 16 << 20, 4096
    buffer_bytes, ring_bytes = 1 << 30, _DEVICE_RING_BYTES
    turn_s, rounds = 1.5, 7

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name(self.torch_device)

    def synchronize(self) -> None:
        """Return when the device has done everything."""
        torch.cuda.synchronize(self.torch_device)

    def stream_device(self) -> StreamDevice:
        """Return what captures are copied with."""
        return StreamDevice(CudaRuntime(self.torch_device), self.ring_bytes)

    def record(self, model: nn.Module, path: Path, **options: Any) -> contextlib.AbstractContextManager[hookstore.Recorder]:
        """Record a model on the device."""
        return hookstore.record(model, path, buffer_bytes=self.buffer_bytes, **options)

    def settle(self) -> None:
        """Give free memory back and forget the peaks so far."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def memory(self) -> dict[str, int]:
        """Return the peaks of device memory, and the pinned memory in use where torch counts it."""
        peaks = {"allocated": torch.cuda.max_memory_allocated, "reserved": torch.cuda.max_memory_reserved}
        counts: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()  # not in every torch that hookstore takes
        pinned = {"pinned": counts["active_bytes.current"]} if "active_bytes.current" in counts else {}
        return {name: peak(self.torch_device) for name, peak in peaks.items()} | pinned


class Simulated:
    """The simulated device of the tests, whose copies finish as late as they may. The models compute on the host, which counts as the device."""

    is_gpu = False
    name = "simulated device"
    torch_device = torch.device("cpu")
    resnet, images = "resnet18", (2, 3, 32, 32)
    num_blocks, tokens = 2, (2, 16, 64)
    piece_bytes, matrix_size = 64 << 10, 64
    buffer_bytes, ring_bytes = 4 << 20, 256 << 10
    turn_s, rounds = 0.3, 2

    def __init__(self) -> None:
        self._simulated = importlib.import_module("simulated")
        self.settle()

    def synchronize(self) -> None:
        """Return when the device has done everything."""
        self._runtime.run_everything()

    def stream_device(self) -> StreamDevice:
        """Return what captures are copied with."""
        device: StreamDevice = self._simulated.PoisonedDevice(self._runtime, self.ring_bytes)
        return device

    @contextlib.contextmanager
    def record(self, model: nn.Module, path: Path, **options: Any) -> Iterator[hookstore.Recorder]:
        """Record a model by way of the device; raises if memory was touched by someone who had given it back."""
        sizes = {"ring_bytes": self.ring_bytes, "buffer_bytes": self.buffer_bytes}
        patch = importlib.import_module("pytest").MonkeyPatch()
        with self._simulated.recording(patch, model, path, self._runtime, takes_everything=True, **sizes, **options) as recorder:
            yield recorder
        self._simulated.check_memory(recorder, self._runtime)

    def settle(self) -> None:
        """Begin with a fresh device."""
        self._runtime = self._simulated.SimulatedRuntime(self._simulated.Schedule("side-late", current_is_eager=True))

    def memory(self) -> dict[str, int]:
        """Return what is allocated on the device."""
        return {"allocated": sum(memory.numel() for memory in self._runtime._live.values())}


Device = Cuda | Simulated


class Report:
    """Prints the table row by row, so that one that is cut short is not lost, and keeps what failed."""

    def __init__(self, device: Device) -> None:
        self.failures: list[str] = []
        self._device = device

    def row(self, what: str, measured: str, goal: str = "", *, needs_gpu: bool = False) -> None:
        """Print a row; a figure that needs a GPU only where there is one."""
        print(f"{what:<42} | {measured if self._device.is_gpu or not needs_gpu else 'not measured':<75} | {goal}".rstrip(" |"), flush=True)

    def attempt(self, name: str, function: Callable[[], Result]) -> Result | None:
        """Call a function, and go on without its result if it raises."""
        try:
            return function()
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            self.row(name, f"FAILED, {type(error).__name__}")
            return None


def run_tests(report: Report, seconds: float, *arguments: str) -> None:
    """Run pytest, for so many seconds at most; raises unless tests ran and all passed."""
    # Without the project's configuration, which counts on plugins that may be missing here.
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider", *arguments]
    command += [] if "pytest_timeout" in MISSING else ["--timeout=30"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=seconds)
    print(ended.stdout)
    summary = (ended.stdout.splitlines() or ["nothing"])[-1]
    if ended.returncode or "passed" not in summary or "skipped" in summary:
        raise RuntimeError(f"pytest ended with {ended.returncode} and {summary!r}")
    report.row("tests", summary, "all pass")


def write_to_disk(report: Report, directory: Path, seconds: float = 3.0) -> float:
    """Return the bytes per second that one thread writes durably, past the page cache where the file system allows that."""
    piece = allocate_host(8 << 20, pinned=False).random_(0, 256)
    path, writer, offset = str(directory / "raw"), DirectWriter(), 0
    start = time.perf_counter()
    try:
        while offset < DISK_BYTES and time.perf_counter() - start < seconds:
            writer.write(path, memoryview(piece.numpy()), offset)  # type: ignore[arg-type]  # ndarray is a buffer; typeshed says so from 3.12 on
            offset += piece.numel()
        writer.sync(path)
        rate = offset / (time.perf_counter() - start)
    finally:
        writer.close()
    Path(path).unlink()
    report.row("disk: raw durable write, one thread", f"{rate / 1e9:.2f} GB/s, {'O_DIRECT' if writer.is_direct else 'buffered'}")
    return rate


def interleave(device: Device, contenders: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median seconds of each contender, all timed in turn in every round, after a round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(device.rounds + 1):
        for name, contender in contenders.items():
            device.synchronize()
            start = time.perf_counter()
            contender()
            device.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def copy_to_host(report: Report, device: Device) -> float:
    """Compare hookstore's copies with plain pinned ones, and see how far computing hides them; return the bytes per second of the plain ones."""
    piece_bytes, size = device.piece_bytes, device.matrix_size
    sources = [torch.randn(piece_bytes // 4, device=device.torch_device) for _ in range(NUM_PIECES)]
    hosts = [allocate_host(NUM_PIECES * piece_bytes, pinned=device.is_gpu).view(torch.float32).view(NUM_PIECES, -1) for _ in range(2)]
    plain, staged = (host.unbind() for host in hosts)
    left, right, product = torch.randn(3, size, size, device=device.torch_device).to(torch.float16 if device.is_gpu else torch.float32)
    stream_device = device.stream_device()

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=product)

    def copy_plainly() -> None:
        for slot, source in zip(plain, sources, strict=True):
            slot.copy_(source, non_blocking=True)

    def copy(times: int = 0) -> None:
        transfers = []
        for slot, source in zip(staged, sources, strict=True):
            transfers.append(stream_device.copy(slot, source))
            compute(times)
        for transfer in transfers:
            if transfer is not None:
                transfer.wait()

    found = interleave(device, {"plain": copy_plainly, "staged": copy, "compute": lambda: compute(8)})
    times = min(1000, max(1, round(found["staged"] / NUM_PIECES / (found["compute"] / 8))))  # computing takes about as long as copying
    found |= interleave(device, {"compute": lambda: compute(times * NUM_PIECES), "copies": copy, "both": lambda: copy(times)})
    if not all(torch.equal(slot, source.cpu()) for slots in (plain, staged) for slot, source in zip(slots, sources, strict=True)):
        raise ValueError("what was copied to the host differs from what is on the device")
    rate, staged_rate = (NUM_PIECES * piece_bytes / found[name] for name in ("plain", "staged"))
    report.row("D2H: plain pinned copies", f"{rate / 1e9:.2f} GB/s", needs_gpu=True)
    report.row("D2H: hookstore's", f"{staged_rate / 1e9:.2f} GB/s, {staged_rate / rate:.2f}× plain", needs_gpu=True)
    hidden = (found["compute"] + found["copies"] - found["both"]) / min(found["compute"], found["copies"])
    shown = ", ".join(f"{name} {1e3 * found[name]:.2f} ms" for name in ("compute", "copies", "both"))
    report.row("D2H: hookstore's beside computing", f"{shown}: {hidden:.0%} hidden", needs_gpu=True)
    report.row("D2H: values", f"{2 * NUM_PIECES} pieces of {mebibytes(piece_bytes)} bit-equal", "all")
    return rate


def mebibytes(num_bytes: float) -> str:
    """Write a number of bytes."""
    return f"{num_bytes / 2**20:,.2f} MiB"


class Workload:
    """A model that trains on one batch over and over, and the layers that may be captured."""

    def __init__(self, name: str, model: nn.Module, inputs: torch.Tensor, layers: list[str]) -> None:
        self.name = f"{name}, {'×'.join(map(str, inputs.shape))}, {inputs.dtype}"
        self.model = model
        self.layers = layers
        self._inputs = inputs
        with torch.no_grad():
            self._targets = torch.randn_like(model(inputs), dtype=torch.float32)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(self) -> None:
        """Train one step."""
        self._optimizer.zero_grad()
        nn.functional.mse_loss(self.model(self._inputs).float(), self._targets).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    @contextlib.contextmanager
    def watching(self, layers: Iterable[str], see: Callable[[str, str, torch.Tensor], None]) -> Iterator[None]:
        """Let ``see(layer, kind, tensor)`` have what `KINDS` are, by hooks of our own."""

        def see_output(layer: str, _module: nn.Module, _arguments: object, output: torch.Tensor) -> None:
            see(layer, "activation", output.detach())
            output.register_hook(lambda gradient: see(layer, "gradient", gradient.detach()))  # type: ignore[no-untyped-call]

        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(self.model.get_submodule(layer).register_forward_hook(functools.partial(see_output, layer)))
            yield


def resnet(device: Device) -> Workload:
    """Make a ResNet, to be captured at its convolutions."""
    make = getattr(importlib.import_module("torchvision.models"), device.resnet)
    model: nn.Module = make().to(device.torch_device)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    return Workload(device.resnet, model, torch.randn(device.images, device=device.torch_device), layers)


def transformer(device: Device) -> Workload:
    """Make an encoder of the size of GPT-2 small, in bfloat16, to be captured at its blocks."""
    width = device.tokens[-1]
    options: dict[str, Any] = {"device": device.torch_device, "dtype": torch.bfloat16}
    block = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, **options)
    model = nn.TransformerEncoder(block, device.num_blocks, enable_nested_tensor=False)
    layers = [f"layers.{number}" for number in range(device.num_blocks)]
    return Workload(f"{device.num_blocks}-layer encoder", model, torch.randn(device.tokens, **options), layers)


class CaptureSet(NamedTuple):
    """What is captured: `KINDS` of some layers, in one batch of so many; bytes of such a batch; and why."""

    layers: tuple[str, ...]
    every: int
    num_bytes: int
    reason: str


def choose(layer_bytes: dict[str, int], step_s: float, d2h_rate: float, disk_rate: float, buffer_bytes: int) -> CaptureSet:
    """Choose layers and period so that captures take no more than `SHARE` of either bandwidth, in bytes per second.

    Takes every layer, or every second, third, … until what a recorded batch captures is no more than three bounds, then the period that its bytes need.
    """
    step_bytes = SHARE * min(d2h_rate, disk_rate) * step_s
    bounds = {
        "half of the staging buffer": buffer_bytes / 2,
        f"{SHARE:.0%} of D2H in a step": SHARE * d2h_rate * step_s,
        f"the share of {LONGEST_PERIOD} steps": LONGEST_PERIOD * step_bytes,
    }
    bound = min(bounds, key=bounds.__getitem__)
    names = list(layer_bytes)
    spread = [names[first::stride] for stride in range(1, len(names) + 1) for first in range(stride)]
    for layers in (*spread, [min(names, key=layer_bytes.__getitem__)]):
        num_bytes = sum(layer_bytes[layer] for layer in layers)
        if num_bytes <= bounds[bound]:
            break
    reason = f"≤ {mebibytes(bounds[bound])} a batch ({bound}), {mebibytes(step_bytes)} a step ({SHARE:.0%} of bandwidth)"
    return CaptureSet(tuple(layers), max(1, math.ceil(num_bytes / step_bytes)), num_bytes, reason)


def train(device: Device, workload: Workload, batches: Iterable[int]) -> float:
    """Train a step for each batch and return the mean seconds of one."""
    device.synchronize()
    start, count = time.perf_counter(), 0
    for _ in batches:
        workload.step()
        count += 1
    device.synchronize()
    return (time.perf_counter() - start) / count


def train_plainly(device: Device, workload: Workload, num_steps: int) -> Turn:
    """Take a turn without capture."""
    device.settle()
    train(device, workload, range(2))
    return {"step_s": train(device, workload, range(num_steps)), **device.memory()}


def train_captured(device: Device, workload: Workload, num_steps: int, chosen: CaptureSet, path: Path) -> Turn:
    """Take a turn with capture; then record a few batches more beside plain copies, and compare those with what is read back."""
    every, staged_bytes = chosen.every, 0
    copies: dict[tuple[str, str, int], torch.Tensor] = {}
    device.settle()
    warm_up, timed = range(min(2, every)), range(every, every + num_steps)
    checked = range(timed.stop, timed.stop + CHECKED_BATCHES * every, every)
    options: dict[str, Any] = {"layers": chosen.layers, "kinds": KINDS, "every": every, "batches": range(checked.stop)}
    batch = -1

    def placed(recorder: hookstore.Recorder, batches: Iterable[int]) -> Iterator[int]:
        nonlocal batch, staged_bytes
        for batch in batches:
            recorder.at(epoch=0, batch=batch)
            yield batch
            staged_bytes = max(staged_bytes, recorder.progress.lag_bytes)

    def keep(layer: str, kind: str, tensor: torch.Tensor) -> None:
        copies[layer, kind, batch] = tensor.clone()

    with device.record(workload.model, path, **options) as recorder:
        train(device, workload, placed(recorder, warm_up))
        recorder.flush()
        step_s = train(device, workload, placed(recorder, timed))
        memory = device.memory()
        with workload.watching(chosen.layers[:: math.ceil(len(chosen.layers) / 3)], keep):
            train(device, workload, placed(recorder, checked))
    num_recorded = sum(batch % every == 0 for batch in (*warm_up, *timed, *checked))
    compare(path, copies, num_recorded * len(chosen.layers) * len(KINDS))
    return {"step_s": step_s, "staged": staged_bytes, "equal": len(copies), **memory}


def compare(path: Path, copies: dict[tuple[str, str, int], torch.Tensor], num_captures: int) -> None:
    """Raise unless a run has so many captures and nothing else, and among them the bits of the copies."""
    with hookstore.open(path) as run:
        if (statuses := run.info().statuses) != {"ok": num_captures}:
            raise ValueError(f"expected {num_captures} captures, the run has {statuses}")
        for (layer, kind, batch), copy in copies.items():
            found, expected = run[layer][kind].tensor(0, batch), copy.cpu().contiguous()
            if found.dtype != expected.dtype or not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
                raise ValueError(f"{kind} of layer {layer!r}, batch {batch}, is not what a plain copy holds")
            if not expected.any():
                raise ValueError(f"{kind} of layer {layer!r}, batch {batch}, is all zeros, which shows nothing")


def check_model(report: Report, device: Device, make: Callable[[Device], Workload], rates: Rates, path: Path, end: float) -> None:
    """Train a model with and without capture, in turn until a moment of ``time.monotonic``, and add its rows to the report."""
    workload = make(device)
    layer_bytes = dict.fromkeys(workload.layers, 0)

    def count(layer: str, _kind: str, tensor: torch.Tensor) -> None:
        layer_bytes[layer] += tensor.nbytes

    with workload.watching(workload.layers, count):
        train(device, workload, range(1))
    step_s = min(train(device, workload, range(2)) for _ in range(3))
    chosen = choose(layer_bytes, step_s, *rates, device.buffer_bytes)
    num_steps = chosen.every * min(MOST_PERIODS, max(1, round(device.turn_s / (chosen.every * step_s))))
    rounds: Rounds = []
    start = time.monotonic()
    while len(rounds) < device.rounds and (not rounds or time.monotonic() + 1.2 * (time.monotonic() - start) / len(rounds) < end):
        turns: dict[bool, Turn] = {}
        for is_captured in (len(rounds) % 2 == 0, len(rounds) % 2 == 1):
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            turns[is_captured] = (
                train_captured(device, workload, num_steps, chosen, path) if is_captured else train_plainly(device, workload, num_steps)
            )
        rounds.append((turns[False], turns[True]))
    report_model(report, device, workload, chosen, rounds, rates)


def report_model(report: Report, device: Device, workload: Workload, chosen: CaptureSet, rounds: Rounds, rates: Rates) -> None:
    """Add the rows of a model."""
    captured = [turn for _, turn in rounds]
    plain_s, captured_s = (statistics.median(turn["step_s"] for turn in turns) for turns in zip(*rounds, strict=True))
    ratios = [turn["step_s"] / other["step_s"] for other, turn in rounds]
    more = {
        key: statistics.median(turn[key] - other[key] for other, turn in rounds)
        for key in ("allocated", "reserved", "pinned")
        if key in captured[0]
    }
    layers = f"{len(chosen.layers)} of {len(workload.layers)} layers, {' and '.join(KINDS)}"
    report.row(workload.name, f"{layers}, 1 batch in {chosen.every}, {mebibytes(chosen.num_bytes)} each")
    report.row("  chosen so by", chosen.reason, needs_gpu=True)
    rate = chosen.num_bytes / chosen.every / captured_s
    shares = (f"{rate / limit:.0%} of {name}" for limit, name in zip(rates, ("D2H", "the disk"), strict=True))
    report.row("  captured on average", f"{rate / 1e9:.2f} GB/s, {', '.join(shares)}", f"≤ {SHARE:.0%}", needs_gpu=True)
    report.row("  step without capture", f"{1e3 * plain_s:.2f} ms", needs_gpu=True)
    spread = f"{statistics.median(ratios):.3f}× ({min(ratios):.3f} – {max(ratios):.3f}, {len(ratios)} rounds)"
    report.row("  step with capture", f"{1e3 * captured_s:.2f} ms, {spread}", "≤ 1.03×", needs_gpu=True)
    device_memory = ", ".join(f"{mebibytes(more[key])} {key}" for key in ("allocated", "reserved") if key in more)
    report.row("  device memory for capture, peak", device_memory, f"ring {mebibytes(device.ring_bytes)}")
    pinned = mebibytes(more["pinned"]) if "pinned" in more else "not measured"
    report.row("  pinned memory for capture", pinned, f"buffer {mebibytes(device.buffer_bytes)}")
    report.row("  staged at most", mebibytes(max(turn["staged"] for turn in captured)), f"≤ {mebibytes(device.buffer_bytes)}")
    num_equal = sum(turn["equal"] for turn in captured)
    report.row("  values", f"nothing is missing, {num_equal} captures are bit-equal to plain copies", "all")


def check(report: Report, device: Device, parent: str | None, seconds: float) -> None:
    """Run everything in about so many seconds."""
    end = time.monotonic() + seconds
    marked = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.cuda" in path.read_text(encoding="utf-8")]
    tests = ["-m", "cuda", *marked] if device.is_gpu else SIMULATED_TESTS
    report.attempt("tests", lambda: run_tests(report, 0.4 * seconds, *tests))
    with tempfile.TemporaryDirectory(prefix="hookstore-gpu-check-", dir=parent) as directory:
        disk = report.attempt("disk", lambda: write_to_disk(report, Path(directory)))
        d2h = report.attempt("D2H", lambda: copy_to_host(report, device))
        if disk is None or d2h is None:
            report.failures.append("models: left out, there are no bandwidths to choose captures by")
            return
        for share, make in ((0.5, resnet), (1.0, transformer)):
            model_end = time.monotonic() + share * (end - time.monotonic())
            report.attempt(
                make.__name__, functools.partial(check_model, report, device, make, (d2h, disk), Path(directory) / "run", model_end)
            )


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, check, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0, help="time to take (default: %(default)s); 20 s later the process is ended")
    parser.add_argument(
        "--hookstore-dir", metavar="DIR", help="directory on the disk to record to (default: the system's temporary directory)"
    )
    parser.add_argument("--simulated", action="store_true", help="use the simulated device even where there is a GPU")
    options = parser.parse_args(arguments)
    # Whatever hangs, in a driver or in a lock: this prints where, and ends the process.
    faulthandler.dump_traceback_later(options.seconds + 20.0, exit=True, file=sys.__stderr__ or 2)
    try:
        print("missing packages:", ", ".join(f"{name} (for {use})" for name, use in MISSING.items()) or "none")
        device = Simulated() if options.simulated or not torch.cuda.is_available() else Cuda()
        report = Report(device)
        print(f"{device.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.cuda.device_count()} CUDA devices")
        print("" if device.is_gpu else f"{NO_GPU}; the figures below are no GPU figures", flush=True)
        check(report, device, options.hookstore_dir, options.seconds)
        print("" if device.is_gpu else f"{NO_GPU}; the figures above are no GPU figures")
    finally:
        faulthandler.cancel_dump_traceback_later()
    print("\n".join(f"FAILED: {failure}" for failure in report.failures) or "everything ran and passed")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
