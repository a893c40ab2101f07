#!/usr/bin/env python3
"""Run the benchmarks and print their table: ``python3 tools/dev.py bench [--quick] [--hookstore-dir DIR] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent

Info = dict[str, Any]
"""The ``extra_info`` of one benchmark."""

Spread = dict[str, float]
"""``median``, ``low`` and ``high`` over the rounds."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to reach.

    Attributes
    ----------
    sense : str
        ``"≥"`` or ``"≤"``.
    limit : float
        In the unit in which the figure is shown.
    unit : str
        That unit.
    """

    sense: str
    limit: float
    unit: str = "×"

    def __str__(self) -> str:
        return f"{self.sense} {self.limit:,g}{self.unit}"

    def mark(self, value: float) -> str:
        """Say whether a figure reaches it."""
        return "[green]✓" if (value >= self.limit if self.sense == "≥" else value <= self.limit) else "[red]✗"


def main() -> int:
    """Parse the command line, run pytest, print the table; return pytest's exit code."""
    parser = argparse.ArgumentParser(prog="tools/dev.py bench", description="Run the benchmarks and print their table.")
    parser.add_argument("--quick", action="store_true", help="a small run, to see that the benchmarks work")
    parser.add_argument(
        "--hookstore-dir", metavar="DIR", help="directory on the disk to measure (default: the system's temporary directory)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="where to write every number (default: in a new temporary directory)")
    parser.add_argument("-k", dest="only", metavar="EXPRESSION", help="run only the benchmarks whose names match, as pytest's -k")
    arguments = parser.parse_args()
    json_path = (arguments.json or Path(tempfile.mkdtemp(prefix="hookstore-benchmark-")) / "benchmark.json").absolute()
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.unlink(missing_ok=True)  # pytest-benchmark leaves it alone when nothing ran, and the table would be an old one
    code = run_pytest(json_path, quick=arguments.quick, directory=arguments.hookstore_dir, only=arguments.only)
    if json_path.exists() and json_path.stat().st_size:
        console = Console(width=None if sys.stdout.isatty() else 180)
        results = json.loads(json_path.read_text(encoding="utf-8"))
        console.print(make_table(results))
        console.print(describe_machine(results["machine_info"]), soft_wrap=True)
        console.print(f"every number: {json_path}", soft_wrap=True)
    return code


def run_pytest(json_path: Path, *, quick: bool, directory: str | None, only: str | None) -> int:
    """Run the benchmarks, with every number going to a file; return pytest's exit code."""
    # Without the project's configuration, which skips benchmarks and counts on plugins that only the tests need.
    command = [sys.executable, "-m", "pytest", str(HERE), "-c", os.devnull, f"--rootdir={HERE.parent}", "-p", "no:cacheprovider", "-q"]
    command += ["--benchmark-only", "--benchmark-quiet", f"--benchmark-json={json_path}"]
    command += ["--quick"] if quick else []
    command += [f"--hookstore-dir={Path(directory).absolute()}"] if directory is not None else []
    command += ["-k", only] if only is not None else []
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode


class Figures:
    """The table, as it grows.

    Attributes
    ----------
    table : Table
        The table.
    """

    def __init__(self) -> None:
        self.table = Table(
            title="hookstore benchmarks",
            caption="Medians over the rounds; in parentheses the range. Ratios are those within each round. ✓ and ✗ go by the median.",
        )
        for heading in ("what", "goal", "measured", "ratio or figure", ""):
            self.table.add_column(heading)

    def section(self, info: Info, text: str) -> None:
        """Begin a section."""
        self.table.add_section()
        threads, rounds = info["torch_threads"], info["num_rounds"]
        self.table.add_row(f"[bold]{text}", "", f"[dim]{number(threads, 'torch thread')}, {number(rounds, 'round')}")

    def row(
        self,
        what: str,
        measured: str,
        figure: Spread | float | None = None,
        *,
        goal: Goal | None = None,
        scale: float = 1,
        unit: str = "×",
        digits: int = 2,
        of: str = "",
    ) -> None:
        """Add a row.

        Parameters
        ----------
        what, measured : str
            The first and the third column.
        figure : dict or float, optional
            What the goal is about; multiplied by ``scale`` it is shown in its ``unit`` with so many ``digits``.
        goal : Goal, optional
            The goal.
        of : str
            What the figure is a ratio of.
        """
        if figure is None:
            self.table.add_row(what, "", measured)
            return
        spread = figure if isinstance(figure, dict) else {"median": figure, "low": figure, "high": figure}
        median, low, high = (f"{scale * spread[key]:,.{digits}f}" for key in ("median", "low", "high"))
        shown = f"{median}{unit}{f' ({low} – {high})' if low != high else ''} {of}"
        self.table.add_row(what, str(goal or ""), measured, shown.rstrip(), goal.mark(scale * spread["median"]) if goal else "")


def make_table(results: Info) -> Table:
    """Make the table of what a run of pytest-benchmark wrote."""
    infos: dict[str, Info] = {benchmark["name"]: benchmark["extra_info"] for benchmark in results["benchmarks"]}
    figures = Figures()
    for name, add in SECTIONS.items():
        if name in infos:
            add(figures, infos[name])
    return figures.table


def describe_machine(machine: Info) -> str:
    """Write what the figures depend on."""
    packages = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    return (
        f"{machine.get('cpu', {}).get('brand_raw', machine['machine'])}, {number(machine['num_cpus'], 'CPU')}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"load {machine['load_average'][0]:.1f} at the start; {machine['directory']} is {machine['file_system']}; "
        f"{machine['system']} {machine['release']}, Python {machine['python_version']}, {packages}"
    )


# The sections -----------------------------------------------------------------------------------------------------


def add_capture(figures: Figures, info: Info) -> None:
    """Add durable bulk capture."""
    num_tensors = info["num_tensors"]
    size = f"{num_tensors['hookstore']} × {info['tensor_bytes'] / 1e6:.1f} MB, {info['num_files']} files"
    figures.section(info, f"durable bulk capture, {size}")
    figures.row(f"raw pwrite, {'O_DIRECT' if info['raw_is_direct'] else 'buffered: no O_DIRECT here'}", throughput(info, "raw"))
    figures.row("hookstore", throughput(info, "hookstore"), speed(info, "hookstore", "raw"), goal=Goal("≥", 0.95), of="raw's speed")
    for name, how in (
        ("safetensors", "a file per tensor"),
        ("tensorstore", "a chunk per batch"),
        ("h5py", "a chunk per batch"),
        ("torch.save", "a file per tensor"),
        ("zarr-python", "a chunk per batch"),
    ):
        what = f"{name}, {how}, {num_tensors[name]} tensors"
        figures.row(what, throughput(info, name), speed(info, name, "raw"), of="raw's speed")
    cpu = info["cpu_ratios"]["hookstore"]
    figures.row("hookstore's CPU seconds per byte", "", cpu["zarr-python"], goal=Goal("≤", 0.1), digits=3, of="zarr-python's")
    figures.row("", "", cpu["raw"], digits=1, of="raw's")


def add_codecs(figures: Figures, info: Info) -> None:
    """Add capture with compressors."""
    figures.section(
        info, f"durable capture after ReLU, {info['num_tensors']} tensors, {info['contenders']['none']['num_bytes'] / 1e6:.0f} MB"
    )
    for codec in ("none", "lz4, 1", "lz4, 2", "zstd, 1", "zstd, 2"):
        name, _, encoders = codec.partition(", ")
        size = f"{info['stored_bytes'][codec] / info['contenders'][codec]['num_bytes']:.0%} of the bytes on disk"
        what = f"codec {name}" + (f", {number(int(encoders), 'encoder thread')}" if encoders else "")
        measured = f"{throughput(info, codec)}, {size}"
        if encoders == "2":
            figures.row(what, measured, speed(info, codec, f"{name}, 1"), goal=Goal("≥", 1.1), of="the speed with 1")
        else:
            figures.row(what, measured, None if codec == "none" else speed(info, codec, "none"), of="the speed without")


def add_step(figures: Figures, info: Info) -> None:
    """Add a training step."""
    contenders = info["contenders"]
    is_demo = info["task"].startswith("demo")
    control = contenders["no capture"]
    figures.section(info, f"training step, {info['task']}")
    needed, disk = control["bytes_per_s"]["median"], contenders["raw"]["bytes_per_s"]["median"]
    figures.row(
        f"{info['num_captures']} captures, {control['num_bytes'] / 1e6:.1f} MB a step",
        f"{needed / 1e9:.2f} GB/s at full speed, raw disk {disk / 1e9:.2f}",
        info["figures"]["disk share"],
        scale=100,
        unit=" %",
        digits=0,
        of="of the raw disk's speed",
    )
    figures.row("no capture", step(info, "no capture"))
    figures.row("copies into fixed buffers", step(info, "copies alone"), info["time_ratios"]["copies alone"]["no capture"], of="no capture")
    ratios = info["time_ratios"]["hookstore"]
    limit = Goal("≤", 1.15 if is_demo else 1.2)
    figures.row("hookstore", step(info, "hookstore"), ratios["no capture"], goal=limit, of="no capture")
    figures.row("", "", ratios["copies alone"], goal=Goal("≤", 1.06) if is_demo else None, of="copies")
    for name in ("clones in memory", "torch.save"):
        if name not in contenders:
            continue
        figures.row(name, step(info, name), info["time_ratios"][name]["no capture"], of="no capture")


def add_idle(figures: Figures, info: Info) -> None:
    """Add a step on which nothing is recorded."""
    figures.section(info, f"step on which the schedule records nothing, {info['task']}; no module has a hook (asserted)")
    noise = info["time_ratios"]["no recorder again"]["no recorder"]
    figures.row("no recorder, twice: the noise", f"{step(info, 'no recorder')}, {step(info, 'no recorder again')}", noise)
    idle = info["time_ratios"]["idle recorder"]["no recorder"]
    figures.row(
        "idle recorder",
        step(info, "idle recorder"),
        idle,
        goal=Goal("≤", round(noise["high"], 2), "×, the noise"),
        digits=3,
        of="no recorder",
    )
    figures.row("idle tick of the clock", "", info["figures"]["tick"], scale=1e6, unit=" µs", digits=1)


def add_options(figures: Figures, info: Info) -> None:
    """Add what keeping less costs."""
    figures.section(info, f"training step by what is kept, {info['task']}")
    figures.row("no capture", step(info, "no capture"))
    for name, ratios in info["time_ratios"].items():
        if name != "no capture":
            moved = info["figures"][f"{name}, bytes"]["median"]
            figures.row(f"{name}", f"{step(info, name)}, {moved / 1e6:.2f} MB a step on disk", ratios["no capture"], of="no capture")


def add_call(figures: Figures, info: Info) -> None:
    """Add single small captures."""
    found = info["figures"]
    figures.section(
        info, f"one small capture (64×10 f32) over a no-op hook, {info['num_calls']:,} calls of {info['num_layers']} layers, back to back"
    )
    figures.row("no-op hook", microseconds(info, "no-op hook"))
    for key, goal in (("seconds", Goal("≤", 8, " µs")), ("p99_s", Goal("≤", 50, " µs"))):
        what = "median" if key == "seconds" else "p99 over its median"
        figures.row(
            f"hookstore, writer running, {what}",
            microseconds(info, "hookstore") if key == "seconds" else "",
            found[f"hookstore, {key}"],
            goal=goal,
            scale=1e6,
            unit=" µs",
            digits=1,
        )
    figures.row("a recorded batch's tick, for each layer", "", found["tick"], scale=1e6, unit=" µs")
    for name in ("torch.save", "zarr-python"):
        figures.row(f"{name}, median", microseconds(info, name), found[f"{name}, seconds"], scale=1e6, unit=" µs", digits=0)


def add_many(figures: Figures, info: Info) -> None:
    """Add very many small captures."""
    found, is_long = info["figures"], info["num_rounds"] == 1
    figures.section(info, f"{info['num_captures']:,} small captures (64×10 f32) over {info['num_layers']} layers, from record() to closed")
    recorded, hooked = (info["contenders"][name]["median"]["seconds"] for name in ("hookstore", "no-op hooks"))
    figures.row(
        "captures per CPU second of the process",
        f"{recorded:.2f} CPU s, no-op hooks {hooked:.2f}",
        found["captures per CPU s"],
        goal=Goal("≥", 60_000, "/s") if is_long else None,
        unit="/s",
        digits=0,
    )
    figures.row("those without the CPU seconds of no-op hooks", "", found["captures per CPU s over no-op hooks"], unit="/s", digits=0)
    num_compared = info["num_compared"]
    figures.row(f"those of the last {num_compared:,}", "", found["last stretch per CPU s"], unit="/s", digits=0)
    limit = Goal("≤", 1.1) if is_long else None
    figures.row(f"CPU time of the last {num_compared:,}", "", found["last over first"], goal=limit, of="the first's")
    figures.row("", "", found["last over second"], goal=limit, of="the second's")


def add_memory(figures: Figures, info: Info) -> None:
    """Add host memory."""
    few, quarter, many = info["memory"]
    figures.section(info, f"peak memory over the same loop without recording, {many['num_arrays']} arrays, each in a process of its own")
    for found in (few, quarter, many):
        figures.row(
            f"{found['num_captures']:,} captures",
            f"touched of the buffer {found['touched_bytes'] / 1e6:.0f} MB (left out)",
            found["over_buffer_bytes"],
            goal=Goal("≤", 150, " MB"),
            scale=1e-6,
            unit=" MB",
            digits=0,
        )
    grown = (many["over_buffer_bytes"] - quarter["over_buffer_bytes"]) / 1e6
    figures.row("more at all than at a quarter of them", "", grown, goal=Goal("≤", 15, " MB"), unit=" MB", digits=0)
    figures.row("libraries that recording loads, once (left out)", "", many["libraries_bytes"], scale=1e-6, unit=" MB", digits=0)


def add_reading(figures: Figures, info: Info) -> None:
    """Add reading of whole batches."""
    figures.section(
        info, f"one batch read, {info['contenders']['hookstore']['num_bytes'] / 1e6:.1f} MB, page cache warm, every byte touched"
    )
    for name, what, goal in (
        ("numpy.load", "numpy.load", None),
        ("hookstore", "hookstore, crc32c checked", Goal("≥", 1)),
        ("zarr-python", "zarr-python, the same shard", None),
    ):
        found = info["contenders"][name]
        measured = f"{1e3 * found['median']['seconds']:.2f} ms, {found['bytes_per_s']['median'] / 1e9:.1f} GB/s"
        figures.row(what, measured, None if name == "numpy.load" else speed(info, name, "numpy.load"), goal=goal, of="numpy.load's speed")


def add_gather(figures: Figures, info: Info, *, where: str, limit: float) -> None:
    """Add gathering of rows."""
    steps = f"{info['num_steps']} of {info['num_captures']} captures stand at another distance"
    figures.section(info, f"{info['num_rows']:,} random rows of {info['row_bytes'] / 1024:.0f} KiB, {where} ({steps}), page cache warm")
    for name, goal in (("numpy.memmap", None), ("hookstore", Goal("≥", limit)), ("Python loop", None)):
        measured = f"{1e3 * info['contenders'][name]['median']['seconds']:.2f} ms"
        figures.row(
            name, measured, None if name == "numpy.memmap" else speed(info, name, "numpy.memmap"), goal=goal, of="numpy.memmap's speed"
        )


def add_open(figures: Figures, info: Info) -> None:
    """Add opening a run of very many captures."""
    figures.section(info, f"open() plus the first tensor, {info['num_rows']:,} captures in the manifest")
    rounds = [taken["seconds"] for taken in info["contenders"]["hookstore"]["rounds"]]
    median = info["contenders"]["hookstore"]["median"]
    found = {"median": median["seconds"], "low": min(rounds), "high": max(rounds)}
    parts = f"open {median['open_s']:.3f} s, first tensor {median['first_s']:.3f} s"
    figures.row("hookstore", parts, found, goal=Goal("≤", 0.3, " s"), unit=" s", digits=3)
    figures.row("pyarrow, the manifest alone, all columns", f"{info['contenders']['pyarrow']['median']['seconds']:.3f} s")
    figures.row("manifest, bytes a row", "", info["bytes_a_row"], goal=Goal("≤", 16, " B"), unit=" B", digits=1)


SECTIONS: dict[str, Callable[[Figures, Info], None]] = {
    "test_durable_capture": add_capture,
    "test_demo_step": add_step,
    "test_demo_step_with_a_core_to_spare": add_step,
    "test_larger_step[resnet18]": add_step,
    "test_larger_step[transformer]": add_step,
    "test_idle_step": add_idle,
    "test_options": add_options,
    "test_options_with_a_core_to_spare": add_options,
    "test_call": add_call,
    "test_small_captures": add_many,
    "test_many_captures": add_many,
    "test_memory": add_memory,
    "test_reading": add_reading,
    "test_gather[constant]": partial(add_gather, where="constant stride", limit=0.8),
    "test_gather[irregular]": partial(add_gather, where="irregular offsets", limit=0.5),
    "test_open": add_open,
    "test_codecs": add_codecs,
}


# How things are written -------------------------------------------------------------------------------------------


def speed(info: Info, name: str, other: str) -> Spread:
    """Return how many times as fast a contender is as another."""
    found: Spread = info["time_ratios"][other][name]
    return found


def throughput(info: Info, name: str) -> str:
    """Write a contender's speed, and what CPU time it takes."""
    found = info["contenders"][name]
    return f"{found['bytes_per_s']['median'] / 1e9:.2f} GB/s, {found['median']['cpu_s'] / found['num_bytes'] * 1e9:.2f} CPU s/GB"


def step(info: Info, name: str) -> str:
    """Write how long a step takes."""
    median = info["contenders"][name]["median"]
    durable = f", {1e3 * median['durable_s']:.1f} until durable" if name in ("hookstore", "torch.save") else ""
    return f"{1e3 * median['seconds']:.1f} ms{durable}"


def microseconds(info: Info, name: str) -> str:
    """Write how long a call takes."""
    median = info["contenders"][name]["median"]
    return f"{1e6 * median['seconds']:.1f} µs, p99 {1e6 * median['p99_s']:.1f}"


def number(count: int, of: str) -> str:
    """Write a number of things."""
    return f"{count} {of}{'s' if count != 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
