"""A fuzzer of run directories: ``python tests/fuzz.py --mutants 20000 --seed 1 [--minutes M]``.

It records small runs (plain and compressed, finished and as a kill leaves them), spoils one in some way, and lets a process of its own, with bounded memory
and time, open it and read everything, and recover and verify it. What comes out has to be right or a `HookstoreError`: no crash, no hang, no other exception,
no wrong value. Where nobody mended the checksums, every capture that does not lie in a file that was changed has to be readable.

A mutant is made of the seed and its number alone: ``--only N`` does one again, here, with its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import math
import os
import random
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

MUTANT_TIMEOUT_S = 60.0
MEMORY_BYTES = 3 << 30  # more address space than a worker has when it begins
_RECOVERED_ONE_IN = 8
_LARGEST_GATHER_BYTES = 64 << 20

Value = tuple[str, tuple[int, ...], bytes]
Place = tuple[str, str, str, str, int, int, int]  # layer, kind, phase, leaf, epoch, batch, call


# The runs -----------------------------------------------------------------------------------------------------------


def record_runs(directory: Path) -> None:
    """Record the runs that are spoiled later: plain, zstd, blosc and gzip, each finished and as a kill leaves it."""
    import torch
    from torch import nn

    import hookstore
    import hookstore.format
    import hookstore.manifest

    class Two(nn.Module):
        def forward(self, value):
            return {"half": value.to(torch.bfloat16), "count": (value * 100).to(torch.int32)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.First = nn.Linear(3, 4)
            self.again = nn.Tanh()
            self.two = Two()

        def forward(self, value):
            return self.two(self.again(self.again(self.First(value))))["half"].float()

    torch.manual_seed(0)
    with mock.patch.object(hookstore.manifest, "SEGMENT_ROWS", 12), mock.patch.object(hookstore.format, "SHARD_TARGET_BYTES", 512):
        for name, codec in {"plain": None, "zstd": "zstd", "lz4": "lz4", "gzip": {"name": "gzip"}}.items():
            model = Model()
            with hookstore.record(
                model, directory / f"{name}-finished", layers=["First", "again", "two"], kinds=["activation", "parameter"], codec=codec
            ) as recorder:
                for epoch in range(2):
                    for batch, size in enumerate(recorder.batches((6, 5, 3), epoch=epoch)):
                        model(torch.randn(size, 3))
                        if batch % 2:
                            recorder.flush()
                shutil.copytree(directory / f"{name}-finished", directory / f"{name}-killed")
            with contextlib.suppress(FileNotFoundError):
                (directory / f"{name}-killed" / "journal" / "lock.json").unlink()


def place_of(row: dict[str, Any]) -> Place:
    return row["layer"], row["kind"], row["phase"], row["leaf"], row["epoch"], row["batch"], row["call"]


def value_of(array: Any) -> Value:
    return str(array.dtype), array.shape, array.tobytes()


@dataclass
class Pristine:
    """A run that is whole: its files, its values, and the files that each capture needs."""

    name: str
    path: Path
    files: dict[str, bytes]
    values: dict[Place, Value] = field(default_factory=dict)
    needs: dict[Place, set[str]] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)

    def is_untouched(self) -> bool:
        """Say whether all is as it was: links in mutants lead here, and nothing must be written behind one."""
        return self.times == {name: (self.path / name).lstat().st_mtime_ns for name in self.times}

    @classmethod
    def of(cls, path: Path) -> Pristine:
        import hookstore
        from hookstore.format import unsealed_name
        from hookstore.manifest import load_part, load_segment

        files = {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
        run = cls(path.name, path, files)
        run.times = {str(one.relative_to(path)): one.lstat().st_mtime_ns for one in (path, *path.rglob("*"))}
        with hookstore.open(path) as opened:
            for row in opened.manifest.to_pylist():
                if row["status"] == "ok":
                    run.values[place_of(row)] = value_of(opened.read(row))
        for name in files:
            if name.endswith(".journal"):
                rows = [row for batch in load_segment(str(path / name))[1].batches for row in batch.to_pylist()]
            elif name.endswith(".parquet"):
                rows = load_part(str(path / name), int(name[-16:-8], 16)).to_pylist()
            else:
                continue
            for row in rows:
                if row["status"] == "ok":
                    array = f"layers/{row['array']}"
                    shards = {f"{array}/{row['shard']}", f"{array}/{unsealed_name(row['shard'])}"}
                    run.needs[place_of(row)] = {"run.json", piece_of(name), f"{array}/zarr.json", *shards}
        return run


def piece_of(name: str) -> str:
    """Return what is the same in the names of a segment and of the part that takes its place."""
    return f"manifest of {os.path.basename(name)[:12]}" if name.startswith(("manifest/", "journal/")) else name


# Mutants ------------------------------------------------------------------------------------------------------------


@dataclass
class Mutant:
    """A spoiled run.

    Attributes
    ----------
    run : Pristine
        What it was made of.
    changes : dict
        By path below the run: new contents, ``None`` for a file that is gone, or what makes something else in its place.
    is_exact : bool
        Whether every value has to be the one of the pristine run: nobody mended a checksum over what was changed.
    story : str
        What was done.
    """

    run: Pristine
    changes: dict[str, bytes | Callable[[Path], None] | None] = field(default_factory=dict)
    is_exact: bool = True
    story: str = ""

    def contents(self, name: str) -> bytes:
        found = self.changes.get(name, self.run.files.get(name))
        return found if isinstance(found, bytes) else b""

    def touches(self, needed: set[str]) -> bool:
        """Say whether one of these files was changed, or a directory that it is in."""
        for name in self.changes:
            for one in (name, piece_of(name)):
                if any(
                    need == one or need.startswith(f"{one}/") or (need.startswith("manifest of") and one in ("journal", "manifest"))
                    for need in needed
                ):
                    return True
        return False

    def write(self, path: Path) -> None:
        """Spoil a copy of the run."""
        for name, change in self.changes.items():
            target = path / name
            if any(parent.is_symlink() for parent in target.parents if parent.is_relative_to(path)):
                raise FileNotFoundError(f"{name} is behind a link by now")
            if target.is_symlink():
                target.unlink()
            if change is None or callable(change):
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                else:
                    target.unlink(missing_ok=True)
            if callable(change):
                target.parent.mkdir(parents=True, exist_ok=True)
                change(target)
            elif change is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(change)


def make_mutant(runs: list[Pristine], seed: int, number: int) -> Mutant:
    """Make the mutant of a number."""
    chance = random.Random(f"{seed}/{number}")
    run = chance.choice(runs)
    mutant = Mutant(run)
    ways = chance.choices(list(_WAYS), weights=list(_WAYS.values()), k=chance.choice((1, 1, 1, 1, 2, 3)))
    told = [f"{way.__name__}: {way(mutant, chance)}" for way in ways]
    mutant.story = f"{run.name}; " + "; ".join(told)
    return mutant


def _any_file(mutant: Mutant, chance: random.Random) -> str:
    kinds: dict[str, list[str]] = {}
    for name in mutant.run.files:
        if isinstance(mutant.changes.get(name, b""), bytes):
            base = os.path.basename(name)
            kind = base if base.endswith(".json") else "shard" if base.startswith(("c.", ".c.")) else name.rpartition(".")[2]
            kinds.setdefault(kind, []).append(name)
    return chance.choice(kinds[chance.choice(sorted(kinds))])


def _spoil(contents: bytes, chance: random.Random, floor: int = 0) -> tuple[bytes, str]:
    """Change some bytes from ``floor`` on."""
    spoiled = bytearray(contents)
    how = chance.choice(("flip", "flip", "bytes", "fill", "number", "insert", "delete", "copy"))
    start = chance.randrange(floor, max(floor + 1, len(spoiled)))
    length = min(int(2 ** chance.uniform(0, 9)), max(0, len(spoiled) - start))
    if how == "flip":
        places = [chance.randrange(floor, max(floor + 1, len(spoiled))) for _ in range(chance.choice((1, 1, 1, 3)))]
        for place in places:
            if place < len(spoiled):
                spoiled[place] ^= 1 << chance.randrange(8)
        return bytes(spoiled), f"bits at {places}"
    if how == "bytes":
        spoiled[start : start + length] = chance.randbytes(length)
    elif how == "fill":
        spoiled[start : start + length] = bytes([chance.choice((0, 0, 255, 0x7F, 0x80))]) * length
    elif how == "number":
        number = chance.choice((0, 1, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**47, 2**60, 2**63 - 1, 2**63, 2**64 - 1, len(contents)))
        width = chance.choice((1, 2, 4, 8))
        spoiled[start : start + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
    elif how == "insert":
        spoiled[start:start] = chance.randbytes(length)
    elif how == "delete":
        del spoiled[start : start + length]
    else:
        origin = chance.randrange(floor, max(floor + 1, len(spoiled)))
        spoiled[start : start + length] = spoiled[origin : origin + length]
    return bytes(spoiled), f"{how} {length} at {start}"


def spoil_bytes(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    mutant.changes[name], how = _spoil(mutant.contents(name), chance)
    return f"{how} of {name}"


def truncate(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    contents = mutant.contents(name)
    size = chance.choice((0, 1, len(contents) - 1, chance.randrange(len(contents) + 1), len(contents) // 4096 * 4096))
    mutant.changes[name] = contents[: max(0, size)]
    return f"{name} to {size}"


def extend(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    contents = mutant.contents(name)
    length = int(2 ** chance.uniform(0, 14))
    mutant.changes[name] = contents + chance.choice((bytes(length), chance.randbytes(length), contents[-length:], contents))
    return f"{name} from {len(contents)} to {len(mutant.contents(name))}"


def make_sparse(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    contents = mutant.contents(name)
    size = chance.choice((1 << 24, 1 << 31, 1 << 33, 1 << 40))

    def write(target: Path) -> None:
        target.write_bytes(contents)
        with contextlib.suppress(OSError):  # more than this file system can have
            os.truncate(target, size)

    mutant.changes[name] = write
    return f"{name} to {size}"


def delete(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    if chance.random() < 0.3:
        name = os.path.dirname(name) or name
    mutant.changes[name] = None
    return name


def swap(mutant: Mutant, chance: random.Random) -> str:
    first, second = _any_file(mutant, chance), _any_file(mutant, chance)
    mutant.changes[first], mutant.changes[second] = mutant.contents(second), mutant.contents(first)
    return f"{first} and {second}"


def copy_over(mutant: Mutant, chance: random.Random) -> str:
    first, second = _any_file(mutant, chance), _any_file(mutant, chance)
    if chance.random() < 0.5:
        directory, base = os.path.split(first)
        second = os.path.join(
            directory,
            chance.choice(
                (
                    f".{base}.unsealed",
                    base.replace("0", "1", 1),
                    base.replace("c.0", "c.7"),
                    base.replace("0-", "3-", 1),
                    f".{base}.cloning",
                )
            ),
        )
        if base.startswith("."):
            second = os.path.join(directory, base[1:].removesuffix(".unsealed"))
    mutant.changes[second] = mutant.contents(first)
    return f"{first} to {second}"


def make_special(mutant: Mutant, chance: random.Random) -> str:
    name = _any_file(mutant, chance)
    if chance.random() < 0.3:
        name = os.path.dirname(name) or name
    source = mutant.run.path / name
    special: dict[str, Callable[[Path], None]] = {
        "link to the same elsewhere": lambda target: target.symlink_to(source),
        "link to /dev/zero": lambda target: target.symlink_to("/dev/zero"),
        "link to itself": lambda target: target.symlink_to(target),
        "link to nothing": lambda target: target.symlink_to("/nothing/is/there"),
        "pipe": os.mkfifo,
        "directory": Path.mkdir,
        "empty file": Path.touch,
    }
    what = chance.choice(sorted(special))
    mutant.changes[name] = special[what]
    return f"{what} for {name}"


_NASTY: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 7, 2**31, 2**32, 2**47, 2**60, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, 1e308, -0.0),
    *(
        "",
        "0",
        "a\0b",
        "../../..",
        "/etc",
        "x" * 70_000,
        "\ud800",
        "é",
        "conv",
        "big",
        "eval",
        "float64",
        "gzip",
        "call",
        "sample",
        "c.0.0.0",
    ),
    *(None, True, False, [], {}, [[]], [None], {"name": None}, {"a": {"b": []}}, [1] * 100, [2**60] * 70),
)


def _deep(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _leaves(inner, (*path, key))


def spoil_json(mutant: Mutant, chance: random.Random) -> str:
    name = chance.choice([name for name in mutant.run.files if name.endswith(".json")] + ["run.json"] * 6)
    try:
        value = json.loads(mutant.contents(name))
        paths = [path for path in _leaves(value) if path]
    except (ValueError, RecursionError):
        return "nothing left"
    if not paths:
        return "nothing left"
    path = chance.choice(paths)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    how = chance.choice(("nasty", "nasty", "nasty", "delete", "twice", "other", "deep"))
    if how == "nasty":
        holder[path[-1]] = chance.choice(_NASTY)
    elif how == "delete":
        del holder[path[-1]]
    elif how == "twice" and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), holder[path[-1]])
    elif how == "deep":
        holder[path[-1]] = _deep(chance.choice((50, 300, 900)))
    else:
        other = value
        for key in chance.choice(paths):
            other = other[key]
        holder[path[-1]] = json.loads(json.dumps(other))
    mutant.changes[name] = json.dumps(value).encode("utf-8", "surrogatepass")
    return f"{how} at {path} of {name}"


def bomb_json(mutant: Mutant, chance: random.Random) -> str:
    name = chance.choice([name for name in mutant.run.files if name.endswith(".json")] + ["run.json", "journal/lock.json"])
    bombs = {
        "brackets": b"[" * 200_000,
        "nested": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "digits": b'{"format": "hookstore", "format_version": ' + b"9" * 5_000 + b"}",
        "many digits": b"9" * 2_000_000,
        "many lists": b'{"layers": [' + b"[]," * 500_000 + b"[]]}",
        "nulls": bytes(100_000),
        "utf-16": json.dumps({"format": "hookstore"}).encode("utf-16"),
        "nan": b'{"format": "hookstore", "format_version": NaN, "layers": [Infinity]}',
    }
    what = chance.choice(sorted(bombs))
    mutant.changes[name] = bombs[what]
    return f"{what} for {name}"


# What follows mends the checksums.


def _crc(contents: bytes) -> int:
    from crc32c import crc32c

    return int(crc32c(contents))


def _frames(contents: bytes) -> list[tuple[int, bytes]]:
    frames, position = [], 0
    while position + 12 <= len(contents):
        length, kind, _ = struct.unpack_from("<III", contents, position)
        frames.append((kind, contents[position + 12 : position + 12 + length]))
        position += 12 + length
    return frames


def _of_frames(frames: list[tuple[int, bytes]]) -> bytes:
    pieces = []
    for kind, payload in frames:
        head = struct.pack("<II", len(payload), kind)
        pieces.append(head + struct.pack("<I", _crc(head + payload)) + payload)
    return b"".join(pieces)


def _pieces(mutant: Mutant, suffix: str) -> list[str]:
    return [name for name in mutant.run.files if name.endswith(suffix) and isinstance(mutant.changes.get(name, b""), bytes)]


def spoil_frames(mutant: Mutant, chance: random.Random) -> str:
    names = _pieces(mutant, ".journal")
    if not names:
        return spoil_bytes(mutant, chance)
    name = chance.choice(names)
    frames = _frames(mutant.contents(name))
    if not frames:
        return "nothing left"
    at = chance.randrange(len(frames))
    kind, payload = frames[at]
    how = chance.choice(("bytes", "bytes", "bytes", "kind", "twice", "delete", "shuffle", "sync"))
    if how == "bytes":
        payload, told = _spoil(payload, chance)
        frames[at] = kind, payload
        how = f"{told} of frame {at}, kind {kind}"
    elif how == "kind":
        frames[at] = chance.choice((0, 1, 2, 3, 4, 2**32 - 1)), payload
    elif how == "twice":
        frames.insert(chance.randrange(len(frames) + 1), frames[at])
    elif how == "delete":
        del frames[at]
    elif how == "shuffle":
        chance.shuffle(frames)
    else:
        frames.insert(at, (3, struct.pack("<Q", chance.choice((0, 1, 2**32, 2**63, 2**64 - 1)))))
    mutant.is_exact = False
    mutant.changes[name] = _of_frames(frames)
    return f"{how} of {name}"


def _replace_part(mutant: Mutant, name: str, contents: bytes) -> None:
    mutant.is_exact = False
    mutant.changes[name] = None
    mutant.changes[f"{name[:-16]}{_crc(contents):08x}.parquet"] = contents


def spoil_parquet(mutant: Mutant, chance: random.Random) -> str:
    names = _pieces(mutant, ".parquet")
    if not names:
        return spoil_bytes(mutant, chance)
    name = chance.choice(names)
    contents = mutant.contents(name)
    if chance.random() < 0.5:  # other pages, which Arrow writes and reads in other ways
        import pyarrow as pa
        import pyarrow.parquet as pq

        with contextlib.suppress(pa.ArrowException, OSError):
            table = pq.ParquetFile(pa.BufferReader(contents)).read()
            sink = io.BytesIO()
            pq.write_table(
                table,
                sink,
                compression=chance.choice(("none", "zstd", "snappy", "gzip")),
                use_dictionary=chance.random() < 0.5,
                data_page_version=chance.choice(("1.0", "2.0")),
                write_page_checksum=False,
                row_group_size=chance.choice((3, 100)),
            )
            contents = sink.getvalue()
    footer = int.from_bytes(contents[-8:-4], "little") + 8
    floor = max(0, len(contents) - footer) if chance.random() < 0.3 else 0
    spoiled, how = _spoil(contents, chance, floor)
    _replace_part(mutant, name, spoiled)
    return f"{how} of {name}"


_NASTY_CELLS: dict[str, tuple[Any, ...]] = {
    "shape": (
        [],
        [0],
        [1],
        [-1],
        [2**60],
        [2**47, 2**47],
        [3, 0, 2**62],
        [1] * 65,
        [5, 4],
        [4, 5],
        [6, 4],
        [2**31, 2**31, 2**31],
        [0, 2**40, 2**40],
    ),
    "dtype": ("", "float64", "int8", "complex32", "complex128", "object", "x" * 5000, "float8_e4m3fn"),
    "array": (
        "",
        "..",
        "../..",
        "/etc/passwd",
        "a/b",
        "%root/activation",
        "two/activation.0",
        "^first/activation",
        "x/" + "y" * 300,
        "a\0/b",
        "é/ü",
    ),
    "shard": ("", "c", "c.0.0.0.0", "c.1.0.0.0", "zarr.json", "../zarr.json", "c." + "9" * 300, "c.٣.0", "c.0.0.0.0.0"),
    "status": ("ok", "lost", "dropped", "", "partial", "stopped", "nonsense"),
    "kind": ("", "activation", "gradient", "input_gradient", "nonsense"),
    "layer": ("", "First", "again", "two", "nobody", "x" * 70_000, "😀"),
    "leaf": ("", "half", "count", "weight", "nothing"),
    "phase": ("train", "eval", ""),
    "reason": ("", "x" * 70_000),
    "loss_scale": (None, 0.0, math.nan, math.inf),
    "structure": (
        *("", "{", "[]", "null", "x" * 70_000, "[" * 70_000, '{"tuple": [' * 9_000, '["list",' * 99 + "[]" + "]" * 99),
        *('["tuple",["tensor",null]]', '["dict",[["half","tensor"],["count","tensor"]]]', '["packed",[["half","tensor"]]]'),
        *('["at",null,"",["sparse_coo",{}]]', '["at",null,"half",["jagged",{"dim":3}]]', '["at",null,"",["dtensor",{},"tensor"]]'),
        *('["record","x",[["half","tensor"]],[]]', '["namedtuple","x y",[["half","tensor"],["count","tensor"]]]'),
    ),
    "wall_time": (0, -(2**63) + 1, 2**63 - 1, -1, 2**60),
}
_NASTY_NUMBERS = (-1, 0, 1, 2, 3, 63, 64, 100, 4096, 2**31 - 1, 2**32, 2**40, 2**47, 2**60, 2**63 - 1, -(2**31), -(2**63))


def spoil_rows(mutant: Mutant, chance: random.Random) -> str:
    import pyarrow as pa

    from hookstore.manifest import SCHEMA, encode_part

    rows, name = _rows_of_piece(mutant, chance)
    if not rows:
        return "nothing left"
    told = []
    for _ in range(chance.choice((1, 1, 2, 4))):
        column = chance.choice(SCHEMA.names)
        some = rows if chance.random() < 0.3 else [chance.choice(rows)]
        how = chance.choice(("nasty", "nasty", "other"))
        kind = SCHEMA.field(column).type
        value = chance.choice(_NASTY_CELLS.get(column, _NASTY_NUMBERS)) if how == "nasty" else chance.choice(rows)[column]
        if pa.types.is_integer(kind):
            bounds = {"int32": (-(2**31), 2**31 - 1), "uint32": (0, 2**32 - 1), "int64": (-(2**63), 2**63 - 1)}[str(kind)]
            value = min(max(value, bounds[0]), bounds[1])
        for row in some:
            row[column] = value
        told.append(f"{column} = {str(value)[:40]!r} in {len(some)} rows")
    if chance.random() < 0.2:
        rows += [dict(row) for row in rows[: chance.randrange(1, 1 + len(rows))]]
    if chance.random() < 0.2:
        chance.shuffle(rows)
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    if name.endswith(".parquet"):
        _replace_part(mutant, name, encode_part([batch]))
    else:
        mutant.is_exact = False
        frames = [(1, bytes(SCHEMA.serialize())), (2, bytes(batch.serialize()))]
        mutant.changes[name] = _of_frames(frames)
    return f"{', '.join(told)} of {name}"


def _rows_of_piece(mutant: Mutant, chance: random.Random) -> tuple[list[dict[str, Any]], str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hookstore.manifest import read_segment

    names = _pieces(mutant, ".parquet") + _pieces(mutant, ".journal")
    if not names:
        return [], ""
    name = chance.choice(names)
    contents = mutant.contents(name)
    try:
        is_part = name.endswith(".parquet")
        table = pq.ParquetFile(pa.BufferReader(contents)).read() if is_part else pa.Table.from_batches(read_segment(contents).batches)
        at = table.schema.get_field_index("wall_time")
        table = table.set_column(at, "wall_time", table["wall_time"].cast(pa.int64()))
        return table.to_pylist(), name
    except Exception:  # an earlier step has spoiled it
        return [], name


def spoil_chunk(mutant: Mutant, chance: random.Random) -> str:
    """Change the encoded bytes of a capture, with the checksum in its row, so that the codec gets to see them."""
    import pyarrow as pa

    from hookstore.format import unsealed_name
    from hookstore.manifest import SCHEMA, encode_part

    rows, name = _rows_of_piece(mutant, chance)
    captured = [row for row in rows if row["status"] == "ok" and row["length"]]
    if not captured:
        return "nothing left"
    row = chance.choice(captured)
    directory = f"layers/{row['array']}"
    for shard in (f"{directory}/{row['shard']}", f"{directory}/{unsealed_name(row['shard'])}"):
        contents = bytearray(mutant.contents(shard))
        start, end = row["offset"], row["offset"] + row["length"] - 4
        if end + 4 <= len(contents):
            spoiled, how = _spoil(bytes(contents[start:end]), chance)
            if chance.random() < 0.5:  # no longer than it was, so that what follows stays where it is
                spoiled = (spoiled + bytes(end - start))[: end - start]
            spoiled = spoiled[: end - start]
            contents[start : start + len(spoiled) + 4] = spoiled + _crc(spoiled).to_bytes(4, "little")
            row["length"], row["crc32c"] = len(spoiled) + 4, _crc(spoiled)
            mutant.changes[shard] = bytes(contents)
            batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
            if name.endswith(".parquet"):
                _replace_part(mutant, name, encode_part([batch]))
            else:
                mutant.is_exact = False
                mutant.changes[name] = _of_frames([(1, bytes(SCHEMA.serialize())), (2, bytes(batch.serialize()))])
            return f"{how} of the chunk at {start} in {shard}"
    return "nothing left"


def spoil_end_of_shard(mutant: Mutant, chance: random.Random) -> str:
    """Change the rows that a sealed shard carries, its trailer or its index, and mend their checksums."""
    names = [
        name for name in mutant.run.files if os.path.basename(name).startswith("c.") and isinstance(mutant.changes.get(name, b""), bytes)
    ]
    if not names:
        return "nothing left"
    name = chance.choice(names)
    contents = bytearray(mutant.contents(name))
    at = contents.rfind(b"HKSTROWS")
    if at < 0 or at + 32 > len(contents) - 20:
        return "nothing left"
    start, length = struct.unpack_from("<QQ", contents, at + 8)
    index = bytearray(contents[at + 32 : -4])
    what = chance.choice(("rows", "rows", "trailer", "index"))
    mutant.is_exact = False
    if what == "rows":
        rows, how = _spoil(bytes(contents[start : start + length]), chance)
        rows = rows[: at - start]
        contents[start : start + len(rows)] = rows
        struct.pack_into("<QI", contents, at + 16, len(rows), _crc(rows))
    elif what == "trailer":
        how = "numbers"
        fields = [start, length]
        fields[chance.randrange(2)] = chance.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(contents), at))
        rows = bytes(contents[fields[0] : fields[0] + fields[1]]) if fields[1] < 2**32 else b""
        struct.pack_into("<QQI", contents, at + 8, *fields, _crc(rows))
    else:
        entry = chance.randrange(max(1, len(index) // 8))
        how = f"entry {entry}"
        struct.pack_into("<Q", index, 8 * entry, chance.choice((0, 1, 64, 2**31, 2**63, 2**64 - 1, 2**64 - 2, len(contents))))
    contents[at + 32 :] = bytes(index) + _crc(bytes(index)).to_bytes(4, "little")
    mutant.changes[name] = bytes(contents)
    return f"{what}, {how} of {name}"


_WAYS: dict[Callable[[Mutant, random.Random], str], int] = {
    spoil_bytes: 30,
    truncate: 8,
    extend: 5,
    make_sparse: 2,
    delete: 4,
    swap: 4,
    copy_over: 6,
    make_special: 5,
    spoil_json: 15,
    bomb_json: 2,
    spoil_frames: 12,
    spoil_parquet: 15,
    spoil_rows: 25,
    spoil_chunk: 12,
    spoil_end_of_shard: 6,
}


# Looking at a mutant ------------------------------------------------------------------------------------------------


class Wrong(Exception):  # noqa: N818  # it is what came out that is wrong
    """Something that must not be."""


def examine(path: Path, mutant: Mutant, what: str) -> str:
    """Read everything that a spoiled run gives, and return how far that went."""
    import hookstore

    values = mutant.run.values
    try:
        run = hookstore.open(path)
    except hookstore.HookstoreError as error:
        _check_needed(mutant, {}, what, error)
        return "refused"
    read: dict[Place, Value] = {}
    num_refused = 0
    with run:
        for ask in (
            run.info,
            lambda: len(run.manifest.to_pylist()),
            lambda: repr(run),
            lambda: run.kinds,
            lambda: [run.batches(epoch) for epoch in run.epochs[:50]],
        ):
            _ask(ask)
        for layer in run.layers[:20]:
            for kind in [*run[layer].kinds, "input"]:  # and one that is not there
                captures = run[layer][kind]
                rows = _ask(captures.rows.to_pylist) or []
                for row in rows:
                    array = _ask(lambda row=row: run.read(row))
                    num_refused += array is None
                    if array is not None and array.nbytes < _LARGEST_GATHER_BYTES:
                        _compare(mutant, values, place_of(row), value_of(array), what)
                        read.setdefault(place_of(row), value_of(array))
                    _ask(
                        lambda row=row, captures=captures: captures.get(
                            row["epoch"], row["batch"], row["call"], phase=row["phase"], leaf=row["leaf"]
                        )
                    )
                    _ask(lambda row=row, captures=captures: captures.value(row["epoch"], row["batch"], row["call"], phase=row["phase"]))
                _ask(lambda captures=captures: (repr(captures), captures.leaves, captures[0, 0]))
                for phase, leaf in {(row["phase"], row["leaf"]) for row in rows}:
                    _examine_samples(mutant, captures, phase, leaf, what)
    _check_needed(mutant, read, what, None)
    return "partly" if num_refused or len(read) < len(values) else "whole"


def _examine_samples(mutant: Mutant, captures: Any, phase: str, leaf: str, what: str) -> None:
    samples = _ask(lambda: captures.samples(phase=phase, leaf=leaf))
    if samples is None or not len(samples):
        return
    rows = _ask(lambda: samples[[0, len(samples) - 1]])
    for position, index in enumerate((0, len(samples) - 1)):
        place = _ask(lambda index=index: samples.where(index))
        if rows is None or place is None or not mutant.is_exact:
            continue
        epoch, batch, call, inside = place
        _, shape, contents = mutant.run.values[captures.layer, captures.kind, phase, leaf, epoch, batch, call]
        num_bytes = len(contents) // shape[0]
        if rows[position].tobytes() != contents[inside * num_bytes : (inside + 1) * num_bytes]:
            raise Wrong(f"{what}: sample {index} of {captures.kind} of {captures.layer} is wrong")
    if math.prod(samples.shape) * samples.dtype.itemsize < _LARGEST_GATHER_BYTES:
        _ask(lambda: samples[:])


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, or ``None`` where hookstore refuses one."""
    import hookstore

    try:
        return question()
    except hookstore.HookstoreError:
        return None


def _compare(mutant: Mutant, values: dict[Place, Value], place: Place, value: Value, what: str) -> None:
    if mutant.is_exact and values.get(place) != value:
        raise Wrong(f"{what}: the value at {place} is {value[:2]} {value[2][:40]!r}, it was {values.get(place, ('', ''))[:2]}")


def _check_needed(mutant: Mutant, read: dict[Place, Value], what: str, error: BaseException | None) -> None:
    """Make sure that what lies in whole files can be read."""
    if mutant.is_exact:
        missing = [place for place, needs in mutant.run.needs.items() if place not in read and not mutant.touches(needs)]
        if missing:
            raise Wrong(f"{what}: {len(missing)} captures cannot be read that lie in whole files, such as {missing[0]}") from error


def repair(path: Path, mutant: Mutant) -> None:
    """Recover and verify a spoiled run; what could be read before can be read after."""
    import hookstore

    _ask(lambda: hookstore.verify(path, num_threads=1))
    if _ask(lambda: hookstore.recover(path)) is not None:
        _ask(lambda: hookstore.recover(path))
        examine(path, mutant, "recovered")


def look_at(number: int, seed: int, runs: list[Pristine], scratch: Path) -> tuple[str, str]:
    """Make a mutant and look at it; return the outcome and what was done."""
    mutant = make_mutant(runs, seed, number)
    path = scratch / "run"
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(mutant.run.path, path)
    try:
        mutant.write(path)
    except OSError as error:  # two changes that exclude each other, such as a file in a directory that has become a pipe
        return "no mutant", f"{mutant.story}: {error}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = examine(path, mutant, "read")
        if number % _RECOVERED_ONE_IN == 0:
            repair(path, mutant)
            outcome += ", recovered"
    if not mutant.run.is_untouched():
        raise Wrong("it wrote behind a link that leads out of the run")
    foreign = [warning for warning in caught if not issubclass(warning.category, UserWarning) or "Capture" not in warning.category.__name__]
    if foreign:
        raise Wrong(f"a foreign warning: {foreign[0].message!r}")
    return outcome, mutant.story


# Processes ----------------------------------------------------------------------------------------------------------


def work(directory: Path, seed: int) -> None:
    """Look at mutants whose numbers come on standard input; a line of JSON for each goes out."""
    import resource

    faulthandler.enable()
    runs = load_runs(directory)
    import hookstore

    _ = hookstore.recover, hookstore.verify  # their modules are large
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not get into the answers
    with tempfile.TemporaryDirectory(dir=directory, prefix="work-") as scratch:
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            number = int(line)
            try:
                outcome, story = look_at(number, seed, runs, Path(scratch))
                answer = {"outcome": outcome, "story": story, "problem": ""}
            except BaseException as error:
                story = make_mutant(runs, seed, number).story
                answer = {
                    "outcome": "wrong",
                    "story": story,
                    "problem": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}",
                }
            print(json.dumps(answer), file=out, flush=True)


def load_runs(directory: Path) -> list[Pristine]:
    return [Pristine.of(path) for path in sorted(directory.iterdir()) if (path / "run.json").exists() and not path.name.startswith("work-")]


class Worker:
    """A process that looks at mutants, started anew when one has brought it down."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._command = [sys.executable, __file__, "--worker", str(directory), "--seed", str(seed)]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as there are processes

    def look_at(self, number: int) -> dict[str, str]:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)
            if not self._answer(120.0):
                raise RuntimeError(f"a worker does not start: {self._last_words()}")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has crashed between two numbers: there is no answer
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        answer = self._answer(MUTANT_TIMEOUT_S)
        if answer is not None:
            return answer
        code = self._process.poll()
        if code is None:
            self._process.send_signal(signal.SIGABRT)  # faulthandler says where it hangs
            problem = f"a hang: nothing after {MUTANT_TIMEOUT_S:.0f} s"
        else:
            problem = f"a crash: exit code {code}"
        self.close()
        return {"outcome": "wrong", "story": "", "problem": f"{problem}\n{self._last_words()}"}

    def _answer(self, timeout_s: float) -> dict[str, str] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if ready and not line:
            self._process.wait(10)
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:].decode(errors="replace")

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
            self._process.stdout.close()
            self._process = None


@dataclass
class Findings:
    """What came out of looking at many mutants."""

    num_mutants: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.num_mutants / max(self.seconds, 1e-9)
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"{self.num_mutants:,} mutants in {self.seconds:,.0f} s ({rate:.0f} a second): {outcomes}; {len(self.problems):,} problems"


def fuzz(
    directory: Path, *, seed: int, num_mutants: int, seconds: float = math.inf, num_workers: int = 2, first: int = 0, show: bool = False
) -> Findings:
    """Look at mutants of the runs in a directory until there were enough, or it took too long."""
    findings = Findings()
    numbers = iter(range(first, first + num_mutants))
    lock = threading.Lock()
    started = time.monotonic()

    def drive() -> None:
        worker = Worker(directory, seed)
        try:
            while time.monotonic() - started < seconds:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    break
                answer = worker.look_at(number)
                with lock:
                    findings.num_mutants += 1
                    findings.outcomes[answer["outcome"]] += 1
                    if answer["problem"]:
                        findings.problems.append(f"mutant {number} of seed {seed}: {answer['story']}\n{answer['problem']}")
                        if show:
                            sys.stdout.write(f"{findings.problems[-1]}\n")
                    if show and findings.num_mutants % 1000 == 0:
                        findings.seconds = time.monotonic() - started
                        sys.stdout.write(f"{findings}\n")
                        sys.stdout.flush()
        finally:
            worker.close()
            worker._errors.close()

    threads = [threading.Thread(target=drive) for _ in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    findings.seconds = time.monotonic() - started
    return findings


def scratch_directory() -> str | None:
    """Return where files are quick to make, if there is such a place."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) and stat.S_ISDIR(shared.stat().st_mode) else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz run directories.")
    parser.add_argument("--mutants", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutant")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, help="do this mutant alone, in this process")
    parser.add_argument("--keep", type=Path, help="with --only: leave the spoiled run here, as it was before anything was done with it")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker, options.seed)
        return 0
    with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="hookstore-fuzz-") as directory:
        record_runs(Path(directory))
        if options.only is not None:
            runs = load_runs(Path(directory))
            mutant = make_mutant(runs, options.seed, options.only)
            sys.stdout.write(f"{mutant.story}\nexact: {mutant.is_exact}\n")
            if options.keep is not None:
                shutil.copytree(mutant.run.path, options.keep)
                mutant.write(options.keep)
            (Path(directory) / "work-only").mkdir()
            sys.stdout.write(f"{look_at(options.only, options.seed, runs, Path(directory) / 'work-only')}\n")
            return 0
        findings = fuzz(
            Path(directory),
            seed=options.seed,
            num_mutants=options.mutants,
            seconds=options.minutes * 60,
            num_workers=options.workers,
            first=options.first,
            show=True,
        )
    sys.stdout.write(f"{findings}\n")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
