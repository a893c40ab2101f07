#!/usr/bin/env python3
"""The commands of a checkout: ``python3 tools/dev.py setup | demo | test | check | bench``.

Needs Python 3.11+ with pip and venv, nothing else. Makes ``.venv``, installs there what the command needs, once, and runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
# The pair that is tested. pyproject.toml declares ranges, so that a user's own environment may keep another one.
TESTED_PAIR = ("torch==2.14.1", "torchvision==0.29.1")


def install(extra: str) -> None:
    """Make ``.venv`` and install the project with an extra, unless that has been done for this pyproject.toml."""
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + repr((TESTED_PAIR, sys.version_info[:2])).encode()).hexdigest()
    stamp = VENV / f"installed-{extra}"
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == state:
        return
    if not PYTHON.exists():
        print(f"making {VENV.name} …", flush=True)
        run([sys.executable, "-m", "venv", str(VENV)])
    print(f"installing hookstore[{extra}]; the first time this takes some minutes …", flush=True)
    run([str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TESTED_PAIR, "-e", f"{ROOT}[{extra}]"])
    stamp.write_text(state)


def run(command: list[str]) -> None:
    """Run a command in the checkout; end with its exit code if it fails."""
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def setup(arguments: list[str]) -> None:
    """Install everything that the other commands need."""
    del arguments
    for extra in ("demo", "bench", "check"):
        install(extra)
    print(f"ready: {PYTHON}")


def demo(arguments: list[str]) -> None:
    """Train a small network on handwritten digits, record it, open the run and show it."""
    install("demo")
    run([str(PYTHON), "-m", "hookstore.demo", *arguments])


def test(arguments: list[str]) -> None:
    """Run the tests, those that take long left out; with arguments, which go to pytest, in one process."""
    install("test")
    default = [] if any(argument.startswith("-m") for argument in arguments) else ["-m", "not slow"]
    # One process for each of a few cores. A file's tests stay together: they share what they have recorded.
    together = [] if arguments else ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile"]
    run([str(PYTHON), "-m", "pytest", *default, *together, *arguments])


def check(arguments: list[str]) -> None:
    """Lint, check the format, the types and the generated part of the README."""
    del arguments
    install("check")
    run([str(PYTHON), "-m", "ruff", "check", "."])
    run([str(PYTHON), "-m", "ruff", "format", "--check", "."])
    run([str(PYTHON), "-m", "mypy"])
    run([str(PYTHON), "tools/readme.py", "--check"])


def bench(arguments: list[str]) -> None:
    """Run the benchmarks and print their table; further arguments go to ``benchmarks/run.py``."""
    install("bench")
    run([str(PYTHON), "benchmarks/run.py", *arguments])


COMMANDS = {"setup": setup, "demo": demo, "test": test, "check": check, "bench": bench}


def main() -> None:
    """Parse the command line and run one command."""
    if sys.version_info < (3, 11):  # noqa: UP036  # it is this check that says so to older ones
        sys.exit(f"hookstore needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0], add_help=False)
    chosen, rest = parser.parse_known_args()
    COMMANDS[chosen.command](rest)


if __name__ == "__main__":
    main()
