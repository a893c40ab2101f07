#!/usr/bin/env python3
"""Run the benchmarks and print their table: ``python3 tools/dev.py bench [--quick] [--hookstore-dir DIR] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent

Info = dict[str, Any]
"""The ``extra_info`` of one benchmark."""

# What a bare prototype of the shard writer reached; the library around it should not lose that.
CAPTURE_GOAL = "≥ 0.86×, ≤ 0.14 CPU s/GB"
STEP_GOAL = "≤ 1.19×"
READ_GOAL = "< 1×"


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
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(make_table(json.loads(json_path.read_text(encoding="utf-8"))))
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


def make_table(results: Info) -> Table:
    """Make the table of what a run of pytest-benchmark wrote."""
    infos: dict[str, Info] = {benchmark["name"]: benchmark["extra_info"] for benchmark in results["benchmarks"]}
    machine = results["machine_info"]
    num_cpus = next((info["num_cpus"] for info in infos.values()), "?")
    table = Table(
        title="hookstore benchmarks",
        caption=f"{machine.get('cpu', {}).get('brand_raw', machine['machine'])}, {num_cpus} CPUs, Python {machine['python_version']}. Medians; of the ratios "
        "within each round also the range.",
    )
    for heading in ("what", "measured", "ratio", "goal"):
        table.add_column(heading)
    sections = {
        "test_durable_capture": add_capture,
        "test_codecs": add_codecs,
        "test_training_step": add_training,
        "test_reading": add_reading,
    }
    for name, add in sections.items():
        if name in infos:
            add(table, infos[name])
            table.add_section()
    return table


def add_capture(table: Table, info: Info) -> None:
    """Add durable capture."""
    num_tensors = info["num_tensors"]
    add_heading(table, info, f"durable capture, {num_tensors} × {info['num_bytes'] / num_tensors / 1e6:.1f} MB, {info['num_files']} files")
    table.add_row(f"raw pwrite, {'O_DIRECT' if info['raw_is_direct'] else 'buffered: no O_DIRECT here'}", throughput(info, "raw"), "1")
    table.add_row("hookstore", throughput(info, "hookstore"), f"{times(info, 'raw', 'hookstore')} raw", CAPTURE_GOAL)
    for name, how in (("torch.save", "a file per tensor"), ("zarr-python", "a chunk per batch")):
        table.add_row(f"{name}, {how}", throughput(info, name), f"hookstore {times(info, name, 'hookstore')} that")


def add_codecs(table: Table, info: Info) -> None:
    """Add capture with compressors."""
    num_tensors = info["num_tensors"]
    add_heading(table, info, f"durable capture after ReLU, {num_tensors} × {info['num_bytes'] / num_tensors / 1e6:.1f} MB")
    for name in ("none", "lz4", "zstd"):
        stored_bytes = info["stored_bytes"][name]
        ratio = "1" if name == "none" else times(info, "none", name)
        size = f"{stored_bytes / 1e6:,.0f} MB on disk ({stored_bytes / info['num_bytes']:.0%})"
        table.add_row(f"hookstore, codec {name}", f"{throughput(info, name)}, {size}", ratio)


def add_training(table: Table, info: Info) -> None:
    """Add the training step."""
    add_heading(table, info, f"training step, {info['num_captures']} captures, {info['num_bytes'] / 1e6:.1f} MB")
    for name in ("no capture", "copies alone", "hookstore", "clones in memory", "torch.save"):
        median = info["contenders"][name]["median"]
        ratio = "1" if name == "no capture" else times(info, name, "no capture")
        durable = f", {1e3 * median['durable_s']:.1f} until durable" if name in ("hookstore", "torch.save") else ""
        table.add_row(name, f"{1e3 * median['seconds']:.1f} ms{durable}", ratio, STEP_GOAL if name == "hookstore" else "")


def add_reading(table: Table, info: Info) -> None:
    """Add reading."""
    add_heading(table, info, f"reading {info['num_bytes'] / 1e6:.1f} MB, page cache warm, every byte touched")
    for name, how in (("numpy.load", ""), ("hookstore", ", crc32c checked"), ("zarr-python", ", the same shard")):
        found = info["contenders"][name]
        measured = f"{1e3 * found['median']['seconds']:.2f} ms, {found['bytes_per_s'] / 1e9:.1f} GB/s"
        ratio = "1" if name == "numpy.load" else f"{times(info, name, 'numpy.load')} the time"
        table.add_row(f"{name}{how}", measured, ratio, READ_GOAL if name == "hookstore" else "")


def add_heading(table: Table, info: Info, text: str) -> None:
    """Add the heading of a section."""
    threads = info["torch_threads"]
    table.add_row(f"[bold]{text}", f"[dim]{threads} torch thread{'s' if threads != 1 else ''}")


def throughput(info: Info, name: str) -> str:
    """Write a contender's speed, and what CPU time it takes."""
    found = info["contenders"][name]
    return f"{found['bytes_per_s'] / 1e9:.2f} GB/s, {found['median']['cpu_s'] / info['num_bytes'] * 1e9:.2f} CPU s/GB"


def times(info: Info, name: str, other: str) -> str:
    """Write how many times as long a contender took as another, which is how many times as fast the other is."""
    ratio = info["time_ratios"][name][other]
    return f"{ratio['median']:.2f}× ({ratio['low']:.2f} – {ratio['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
