"""The command line: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import hookstore
from hookstore.errors import HookstoreError

app = typer.Typer(help="Look into runs that hookstore recorded.", no_args_is_help=True, add_completion=False)


@app.callback()
def _main() -> None:
    """Look into runs that hookstore recorded."""


@app.command()
def info(run: Annotated[Path, typer.Argument(help="directory of a run", show_default=False)]) -> None:
    """Print what a run holds."""
    try:
        with hookstore.open(run) as opened:
            _print_info(opened.info(), Console())
    except HookstoreError as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/]: {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error


def _print_info(held: hookstore.RunInfo, console: Console) -> None:
    recorded = held.description.get("recorded", {})
    environment = held.description.get("environment", {})
    console.print(f"[bold]{escape(held.path)}[/] · {held.state} · recorded {held.description.get('created', '?')}", soft_wrap=True)
    console.print(
        f"model {held.description.get('model', '?')}, every {recorded.get('every', '?')}, codec {(recorded.get('codec') or {}).get('name', 'none')}"
    )
    console.print(", ".join(f"{name} {version}" for name, version in environment.items()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("layer", "kind", "captures", "gaps", "shape", "dtype", "MB", "epochs", "phases"):
        table.add_column(heading, justify="right" if heading in ("captures", "gaps", "MB") else "left")
    for group in held.groups:
        shapes = ["×".join(map(str, shape)) or "()" for shape in group["shapes"]]
        table.add_row(
            escape(repr(group["layer"]) if group["layer"] == "" else group["layer"]),
            group["kind"],
            f"{group['captures']:,}",
            f"{group['gaps']:,}" if group["gaps"] else "",
            ", ".join(shapes[-3:]) + (" …" if len(shapes) > 3 else ""),
            ", ".join(group["dtypes"]),
            f"{group['nbytes'] / 1e6:.1f}",
            f"{group['epochs'][0]} – {group['epochs'][-1]}" if len(group["epochs"]) > 1 else ", ".join(map(str, group["epochs"])),
            ", ".join(group["phases"]),
        )
    console.print(table)
    gaps = {status: count for status, count in held.statuses.items() if status != "ok"}
    noted = f"; {', '.join(f'{count:,} {status}' for status, count in gaps.items())}" if gaps else ""
    console.print(f"{held.num_captures:,} captures, {held.nbytes:,} bytes{noted}")
