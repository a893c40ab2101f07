"""The command line: parse, call, print."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import hookstore
from hookstore.errors import HookstoreError

if TYPE_CHECKING:
    from hookstore.bench import Throughput

_MOST_SHOWN = 50
_MOST_CAPTURES = 8

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _main() -> None:
    """Look into runs that hookstore recorded, and measure what recording can do here."""


def _plain(value: object) -> str:
    """Return what comes with a run as it can be printed: neither markup nor what terminals obey."""
    return escape("".join(character if character.isprintable() else "\ufffd" for character in str(value)))


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Print what the user can mend as a line, and exit with 1."""
    try:
        yield
    except (HookstoreError, OSError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/]: {_plain(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def info(run: Annotated[Path, typer.Argument(help="directory of a run", show_default=False)]) -> None:
    """Print what a run holds."""
    with _errors_in_one_line(), hookstore.open(run) as opened:
        _print_info(opened.info(), Console())


def _describe_capture(capture: dict[str, Any]) -> str:
    """Describe a capture, of any run, in a line."""
    codec = capture.get("codec")
    said = {
        "every": capture.get("every", "?"),
        "codec": codec.get("name", "?") if isinstance(codec, dict) else "none",
        **{name: capture[name] for name in ("epochs", "batches", "steps", "dtype", "select", "stats", "when") if capture.get(name)},
    }
    options = ", ".join(f"{name} {_plain(str(value))}" for name, value in said.items())
    return f"capture {_plain(str(capture['name']))}: {options}" if "name" in capture else options


def _print_info(held: hookstore.RunInfo, console: Console) -> None:
    recorded = held.description.get("recorded", {})
    environment = held.description.get("environment", {})
    console.print(f"[bold]{_plain(held.path)}[/] · {held.state} · recorded {_plain(held.description.get('created', '?'))}", soft_wrap=True)
    captures = recorded.get("captures")
    listed = [capture for capture in captures if isinstance(capture, dict)] if isinstance(captures, list) else [recorded]
    console.print(f"model {_plain(held.description.get('model', '?'))}")
    for capture in listed[:_MOST_CAPTURES]:
        console.print(_describe_capture(capture), soft_wrap=True)
    if len(listed) > _MOST_CAPTURES:
        console.print(f"and {len(listed) - _MOST_CAPTURES} more captures")
    console.print(", ".join(f"{_plain(name)} {_plain(version)}" for name, version in environment.items()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("layer", "kind", "captures", "gaps", "shape", "dtype", "MB", "epochs", "phases"):
        table.add_column(heading, justify="right" if heading in ("captures", "gaps", "MB") else "left")
    for group in held.groups:
        shapes = ["×".join(map(str, shape)) or "()" for shape in group["shapes"]]
        table.add_row(
            _plain(repr(group["layer"]) if group["layer"] == "" else group["layer"]),
            _plain(group["kind"]) + "".join(f"\n  {_plain(portion)}" for portion in group["portions"] if portion),
            f"{group['captures']:,}" + (f" + {group['summarized']:,} of statistics" if group["summarized"] else ""),
            f"{group['gaps']:,}" if group["gaps"] else "",
            ", ".join(shapes[-3:]) + (" …" if len(shapes) > 3 else ""),
            _plain(", ".join(group["dtypes"])),
            f"{group['nbytes'] / 1e6:.1f}",
            f"{group['epochs'][0]} – {group['epochs'][-1]}" if len(group["epochs"]) > 1 else ", ".join(map(str, group["epochs"])),
            _plain(", ".join(group["phases"])),
        )
    console.print(table)
    gaps = {status: count for status, count in held.statuses.items() if status != "ok"}
    noted = f"; {', '.join(f'{count:,} {_plain(status)}' for status, count in gaps.items())}" if gaps else ""
    console.print(f"{held.num_captures:,} captures, {held.nbytes:,} bytes{noted}")
    if held.annotations:
        console.print(f"of batches: {_plain(', '.join(held.annotations))}")
    if held.state == "unfinished":
        console.print(
            "the recording was killed: all that was acknowledged is here; `hookstore recover` makes it whole for plain Zarr readers"
        )
    for partial in held.partial_batches[:_MOST_SHOWN]:
        console.print(f"cut short: {partial.phase} epoch {partial.epoch}, batch {partial.batch}: {_plain(partial.reason)}", soft_wrap=True)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="directory of a run", show_default=False)],
    threads: Annotated[int, typer.Option(min=0, help="shards to read at once; 0: as many as there are CPUs, 8 at most")] = 0,
) -> None:
    """Check every checksum of a run, and every manifest row against its shard; exits with 1 if anything is wrong."""
    started = time.perf_counter()
    with _errors_in_one_line(), _progress(in_bytes=True) as show:
        found = hookstore.verify(run, progress=show, num_threads=threads or None)
    took_s = time.perf_counter() - started
    console = Console()
    for fault in found.faults[:_MOST_SHOWN]:
        console.print(f"[red]fault[/] {_plain(str(fault))}", soft_wrap=True)
    if found.num_faults > _MOST_SHOWN:
        console.print(f"and {found.num_faults - _MOST_SHOWN:,} more")
    rate = f"{found.num_bytes / 1e6 / took_s:,.0f} MB/s"
    gaps = f", {found.num_gaps:,} gaps ({found.num_lost:,} lost)" if found.num_gaps else ""
    console.print(
        f"{found.num_captures:,} captures in {found.num_shards:,} shards{gaps}, {found.num_bytes:,} bytes read in {took_s:.1f} s ({rate})"
    )
    console.print("[green]sound[/]" if found.is_sound else f"[red]{found.num_faults:,} faults[/]")
    if not found.is_sound:
        raise typer.Exit(1)


@app.command()
def recover(run: Annotated[Path, typer.Argument(help="directory of a run that was killed", show_default=False)]) -> None:
    """Finish a run whose recording was killed: seal its shards, complete its manifest. Nothing acknowledged is dropped."""
    with _errors_in_one_line(), _progress(in_bytes=False) as show:
        report = hookstore.recover(run, progress=show)
    console = Console()
    for problem in report.problems:
        console.print(f"[yellow]found[/] {_plain(problem)}", soft_wrap=True)
    counts = (
        (report.num_from_journal, "manifest rows from the journal"),
        (report.num_from_shards, "manifest rows from shards that carried them"),
        (report.num_sealed, "shards sealed"),
        (report.num_lost, "captures marked as lost: they were acknowledged, and not yet durable when the machine stopped"),
        (report.num_removed, "files removed that held nothing acknowledged"),
    )
    for count, what in counts:
        if count:
            console.print(f"{count:,} {what}")
    console.print(f"{_plain(report.path)} {'was finished already' if report.was_finished else 'is finished'}", soft_wrap=True)


@contextlib.contextmanager
def _progress(*, in_bytes: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn() if in_bytes else MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@app.command()
def plan(
    run: Annotated[Path, typer.Argument(help="directory of a run", show_default=False)],
    epochs: Annotated[int | None, typer.Option(min=1, help="epochs of the training; those of the run if not given")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="training batches of an epoch; those of the run if not given")] = None,
    path: Annotated[Path | None, typer.Option(help="where the new run is to be; beside the run if not given")] = None,
    bandwidth: Annotated[float | None, typer.Option(min=0.001, help="MB/s that the disk sustains; see `hookstore bench`")] = None,
) -> None:
    """Print what a training of some length takes on disk that is recorded as a run was."""
    from hookstore.projection import project

    with _errors_in_one_line():
        planned = project(
            run, epochs=epochs, batches=batches, disk=path, bandwidth_bytes_per_s=None if bandwidth is None else bandwidth * 1e6
        )
    console = Console(highlight=False)
    for line in str(planned).splitlines():
        shown = _plain(line)
        console.print(f"[red]{shown}[/]" if line.startswith("WARNING") else shown, soft_wrap=True)


@app.command()
def bench(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="directory on the disk to measure", show_default=False)],
    seconds: Annotated[float, typer.Option(min=1.0, help="about how long it takes")] = 10.0,
) -> None:
    """Print what a disk and this host sustain, and how much capturing training would feel."""
    started = time.perf_counter()
    from hookstore.bench import advice, measure

    console = Console()
    console.print(f"measuring {_plain(str(directory))} for about {seconds:.0f} s", soft_wrap=True)
    import_s = time.perf_counter() - started  # torch's is most of it
    with _errors_in_one_line():
        measured = measure(directory, seconds=max(seconds - import_s, 1.0))
    _print_throughput(measured, console)
    for sentence in advice(measured):
        console.print(sentence)


def _print_throughput(measured: Throughput, console: Console) -> None:
    way = "O_DIRECT" if measured.is_direct else "through the page cache and synced: O_DIRECT is refused here"
    rows = (
        (f"raw sequential writes ({way})", "MB/s", 1e-6, ".0f"),
        ("large tensors recorded, until durable", "MB/s", 1e-6, ".0f"),
        ("copies in host memory", "MB/s", 1e-6, ".0f"),
        ("small captures, until durable", "/s", 1, ".0f"),
        ("one small capture: median", "µs", 1e6, ".1f"),
        ("one small capture: 99th percentile", "µs", 1e6, ".1f"),
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("what", "median", "", "of rounds between"):
        table.add_column(heading, justify="right" if heading == "median" else "left", no_wrap=heading != "what")
    for (what, unit, scale, digits), median, lowest, highest in zip(rows, measured.median, measured.lowest, measured.highest, strict=True):
        table.add_row(what, f"{median * scale:,{digits}}", unit, f"{lowest * scale:,{digits}} – {highest * scale:,{digits}}")
    console.print(table)
    console.print("small captures are 64×10 float32 of 100 layers; one takes so long on the training thread, over a hook that does nothing")
    console.print(
        f"{measured.num_rounds} rounds on {measured.num_cpus} CPUs, torch with {measured.num_torch_threads} threads; what was written is removed\n"
    )
