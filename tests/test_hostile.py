"""Runs that somebody has made to do harm, or that broke.

Each is an error of ours that names the file, in bounded memory and time, and the rest stays readable.
"""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import fuzz
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookstore
from hookstore import shards as shards_module
from hookstore.blocks import RowBlock, make_batch
from hookstore.codecs import codec_metadata, compressor, decode
from hookstore.format import FRAME_ROWS, FRAME_SCHEMA, Row, part_name, segment_name
from hookstore.manifest import SCHEMA, code_rows, encode_part, load_part, read_manifest, read_segment, stream_to_rows
from hookstore.rows import RowIndex
from hookstore.shards import ShardReader, crc32c, read_sealed

LAYERS = ["first", "second"]
GIGABYTES = 1 << 40  # of nothing: the file has no blocks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run as a kill leaves it: parts, a journal, sealed and unsealed shards, and two layers of the same shapes."""
    directory = tmp_path_factory.mktemp("hostile")
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 4))
    model.add_module("second", nn.Linear(4, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hookstore.format.SHARD_TARGET_BYTES", 512)
        patch.setattr("hookstore.manifest.SEGMENT_ROWS", 8)
        with hookstore.record(model, directory / "live", layers=LAYERS, buffer_bytes=1 << 20) as recorder:
            for epoch in range(2):
                for _ in recorder.batches(range(5), epoch=epoch):
                    model(torch.randn(5, 4))
                    recorder.flush()
            shutil.copytree(directory / "live", directory / "killed")
    (directory / "killed" / "journal" / "lock.json").unlink(missing_ok=True)
    run = fuzz.Pristine.of(directory / "killed")
    kinds = {(name.partition("/")[0], os.path.splitext(name)[1]) for name in run.files}
    assert {("manifest", ".parquet"), ("journal", ".journal"), ("layers", ".unsealed")} <= kinds
    assert any(os.path.basename(name).startswith("c.") for name in run.files)
    assert len(run.values) == 20
    return run


@pytest.fixture
def copied(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "run")
    return tmp_path / "run"


def some_file(path: Path, what: str) -> Path:
    """One of the run's files, of which there are several."""
    pattern = {
        "run.json": "run.json",
        "part": "manifest/*.parquet",
        "segment": "journal/*.journal",
        "array": "layers/second/activation/zarr.json",
        "shard": "layers/second/activation/c.0.*",
        "unsealed shard": "layers/second/activation/.c.*",
    }[what]
    return sorted(path.glob(pattern))[0]


FILES = ["run.json", "part", "segment", "array", "shard", "unsealed shard"]


def what_is_readable(recorded: fuzz.Pristine, path: Path) -> set[fuzz.Place]:
    """Read everything in every way; whatever is read is right, and what is not is an error of ours."""
    spoiled = fuzz.Mutant(recorded, changes=dict.fromkeys(("run.json", "layers", "manifest", "journal")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fuzz.examine(path, spoiled, "hostile")
        found = set()
        try:
            run = hookstore.open(path)
        except hookstore.HookstoreError:
            return found
        with run:
            for row in run.manifest.to_pylist():
                try:
                    assert fuzz.value_of(run.read(row)) == recorded.values[fuzz.place_of(row)]
                except hookstore.HookstoreError:
                    continue
                found.add(fuzz.place_of(row))
    assert all(issubclass(warning.category, hookstore.CaptureWarning) for warning in caught)
    return found


def needed_by(recorded: fuzz.Pristine, path: Path, file: Path) -> set[fuzz.Place]:
    name = str(file.relative_to(path))
    return {place for place, needs in recorded.needs.items() if name in needs or fuzz.piece_of(name) in needs}


def open_quietly(path: Path) -> hookstore.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        return hookstore.open(path)


# Links, pipes, devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["outside", "inside"])
@pytest.mark.parametrize(
    "name", [*FILES, "layers", "manifest", "journal", "layers/second", "layers/second/activation"], ids=lambda name: name.replace("/", ".")
)
def test_no_link_in_a_run_is_followed(recorded, copied, name, to):
    """What it leads to is even the right thing, which nobody should rely on."""
    target = some_file(copied, name) if name in FILES else copied / name
    elsewhere = copied.parent / "elsewhere" if to == "outside" else copied / "elsewhere"
    target.rename(elsewhere)
    target.symlink_to(elsewhere)
    found = what_is_readable(recorded, copied)
    whole = recorded.values.keys() - needed_by(recorded, copied, target)
    if target.is_dir():
        prefix = f"{target.relative_to(copied)}/"
        whole = {place for place, needs in recorded.needs.items() if not any(need.startswith(prefix) for need in needs)}
        if name in ("manifest", "journal"):
            pieces = {fuzz.piece_of(f"{prefix}{file.name}") for file in elsewhere.iterdir()}
            whole = {place for place, needs in recorded.needs.items() if not needs & pieces}
    assert found == whole
    assert len(found) < len(recorded.values)


def test_the_run_itself_may_be_a_link(recorded, copied):
    (copied.parent / "link").symlink_to(copied)
    assert what_is_readable(recorded, copied.parent / "link") == recorded.values.keys()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["pipe", "directory", "device", "nothing"])
def test_what_is_no_file(recorded, copied, name, what):
    """A pipe that nobody writes to must not be waited for."""
    target = some_file(copied, name)
    whole = recorded.values.keys() - needed_by(recorded, copied, target)
    target.unlink()
    if what == "pipe":
        os.mkfifo(target)
    elif what == "directory":
        target.mkdir()
    elif what == "device":
        target.symlink_to("/dev/zero")
    assert what_is_readable(recorded, copied) == whole
    if name == "run.json" and what != "nothing":
        with pytest.raises(hookstore.CorruptRunError, match="run.json"):
            hookstore.open(copied)


@pytest.mark.parametrize("name", ["journal", "manifest", "layers"])
def test_a_file_in_place_of_a_directory(recorded, copied, name):
    shutil.rmtree(copied / name)
    (copied / name).write_bytes(b"no directory")
    found = what_is_readable(recorded, copied)
    assert found == {place for place, needs in recorded.needs.items() if name not in places_of(recorded, place) and name != "layers"}
    if name != "layers":
        with pytest.warns(hookstore.CaptureWarning, match=f"{name} is no directory"):
            hookstore.open(copied).close()


def places_of(recorded: fuzz.Pristine, place: fuzz.Place) -> set[str]:
    """The directories of the manifest that a capture's row is in."""
    pieces = {fuzz.piece_of(name): name.partition("/")[0] for name in recorded.files if name.startswith(("manifest/", "journal/"))}
    return {pieces[need] for need in recorded.needs[place] if need in pieces}


@pytest.mark.parametrize("name", ["layers", "manifest", "journal", "layers/second", "layers/second/activation"])
def test_recovering_and_verifying_touch_nothing_outside(copied, name):
    outside = copied.parent / "outside"
    (copied / name).rename(outside)
    (copied / name).symlink_to(outside)
    before = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    for ask in (hookstore.recover, hookstore.verify):
        try:
            ask(copied)
        except hookstore.HookstoreError:
            continue
    assert {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()} == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", ["pipe", "directory", "link to nothing", "link to itself", "link to /dev/zero"])
@pytest.mark.parametrize("name", FILES)
def test_recovering_and_verifying_what_is_no_file(recorded, copied, name, what):
    target = some_file(copied, name)
    target.unlink()
    if what == "pipe":
        os.mkfifo(target)
    elif what == "directory":
        target.mkdir()
    else:
        target.symlink_to({"link to nothing": "/nothing/is/there", "link to itself": target, "link to /dev/zero": "/dev/zero"}[what])
    for ask in (hookstore.verify, hookstore.recover, hookstore.recover):
        try:
            ask(copied)
        except hookstore.HookstoreError:
            assert name == "run.json"
    assert what_is_readable(recorded, copied) >= recorded.needs.keys() - needed_by(recorded, copied, target) if name != "run.json" else True


@pytest.mark.parametrize("name", ["manifest", "journal", "layers"])
@pytest.mark.parametrize("what", ["gone", "file"])
def test_recovering_without_a_directory(recorded, copied, name, what):
    shutil.rmtree(copied / name)
    if what == "file":
        (copied / name).write_bytes(b"no directory")
        with pytest.raises(hookstore.CorruptRunError, match=f"{name} is no directory"):
            hookstore.recover(copied)
        return
    hookstore.recover(copied)
    if name == "manifest":
        in_sealed = [place for place, needs in recorded.needs.items() if any("/c." in need and need in recorded.files for need in needs)]
        assert in_sealed
        assert what_is_readable(recorded, copied) >= set(in_sealed), "sealed shards carry their rows"


def test_recovering_a_shard_of_a_terabyte_copies_what_rows_tell_of(recorded, copied):
    shard = some_file(copied, "shard")
    os.truncate(shard, GIGABYTES)
    hookstore.recover(copied)
    assert shard.stat().st_size < 1 << 20
    assert what_is_readable(recorded, copied) == recorded.values.keys()


def test_recovering_does_not_make_a_shard_as_long_as_a_row_says(recorded, copied):
    hidden = some_file(copied, "unsealed shard")

    def edit(rows):
        for row in captures_of(rows, "second"):
            if f".{row['shard']}.unsealed" == hidden.name:
                row["offset"] = 2**39

    rewrite(copied, edit)
    hookstore.recover(copied)
    assert all(file.stat().st_size < 1 << 20 for file in copied.rglob("*"))


def test_looking_at_a_run_writes_nothing_outside(copied):
    """The lock of another machine is asked for its age by a new file beside it."""
    outside = copied.parent / "outside"
    (copied / "journal").rename(outside)
    (copied / "journal").symlink_to(outside)
    holder = dict.fromkeys(("token", "host", "machine", "boot", "namespace", "started", "since"), "elsewhere")
    (outside / "lock.json").write_text(json.dumps({**holder, "pid": 1}))
    before = outside.stat().st_mtime_ns
    with open_quietly(copied) as run:
        assert run.info().state == "unfinished"
    assert outside.stat().st_mtime_ns == before


def test_the_command_line_prints_no_markup_and_no_escapes_of_a_run(copied):
    from typer.testing import CliRunner

    from hookstore.cli import app

    description = json.loads((copied / "run.json").read_text())
    nasty = "[/red]\x1b[2J\u202e[bold"
    description.update(created=nasty, model=nasty, environment={nasty: nasty})
    description["recorded"]["every"] = nasty
    description["layers"].append({"name": nasty})
    (copied / "run.json").write_text(json.dumps(description))
    row = Row(*("train", 9, 9, 0, 0, 0, nasty, "activation", "", 0, 0, "", (0,), nasty, 0, 0, None, "", 0, 0, 0, nasty, nasty))
    put_part(copied, encode_part([make_batch([RowBlock.of(row)])]), attempt=77)
    for command in ("info", "verify"):
        done = CliRunner().invoke(app, [command, str(copied)])
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert "[/red]" in done.output
        assert "\x1b[2J" not in done.output
        assert "\u202e" not in done.output


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "part", "segment", "array"])
def test_a_file_of_a_terabyte_is_not_read(recorded, copied, name):
    target = some_file(copied, name)
    whole = recorded.values.keys() - needed_by(recorded, copied, target)
    os.truncate(target, GIGABYTES)
    tracemalloc.start()
    try:
        assert what_is_readable(recorded, copied) == whole
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_chunk_of_a_length_that_its_shape_cannot_have_is_not_read(recorded, copied, monkeypatch):
    shard = some_file(copied, "shard")
    os.truncate(shard, GIGABYTES)
    reader = ShardReader(str(copied / "layers"))
    monkeypatch.setattr(shards_module, "crc32c", lambda *_: pytest.fail("a terabyte is summed up"))
    for codec in (None, codec_metadata("zstd", "float32")):
        with pytest.raises(hookstore.CorruptRunError, match="its shape needs 80"):
            reader.read("second/activation", shard.name, 0, GIGABYTES - 64, 0, codec, 80)
    reader.close()


def test_where_no_map_can_be_made_chunks_are_read(recorded, copied, monkeypatch):
    """A sparse file may be longer than what a process may address."""

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(shards_module.mmap, "mmap", refuse)
    assert what_is_readable(recorded, copied) == recorded.values.keys()


def test_a_shard_that_says_its_rows_are_long(copied):
    """Of many sizes that its trailer may tell, none makes it be read whole."""
    shard = some_file(copied, "shard")
    num_entries = 65_536
    for offset, length in ((0, GIGABYTES), (2**64 - 1, 2), (2**63, 2**63), (0, 1 << 30), (GIGABYTES - 10, 5)):
        with open(shard, "wb") as file:
            os.truncate(shard, GIGABYTES - 32 - 16 * num_entries - 4)
            file.seek(0, os.SEEK_END)
            index = b"\xff" * (16 * num_entries)
            file.write(struct.pack("<8sQQI4x", b"HKSTROWS", offset, length, 0) + index + crc32c(index).to_bytes(4, "little"))
        with pytest.raises(hookstore.CorruptRunError, match="no trailer that leads to its manifest rows|checksum of its manifest rows"):
            read_sealed(str(shard), num_entries)
        shard.unlink()
        shard.touch()


# JSON -----------------------------------------------------------------------------------------------------------------

BOMBS = {
    "brackets": b"[" * 1_000_000,
    "objects": b'{"a":' * 500_000,
    "closed brackets": b"[" * 100_000 + b"]" * 100_000,
    "digits": b'{"format": "hookstore", "format_version": ' + b"9" * 100_000 + b"}",
    "4,000 digits": b'{"format": "hookstore", "format_version": ' + b"9" * 4_000 + b', "layers": []}',
    "many": b'{"format": "hookstore", "format_version": 1, "layers": [' + b"[]," * 1_000_000 + b"[]]}",
    "half a character": b'{"format": "\xff\xff"',
    "nothing": b"",
    "nulls": bytes(1000),
    "a number": b"1",
    "not a number": b"NaN",
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["run.json", "array"])
def test_json_bombs(recorded, copied, name, bomb):
    target = some_file(copied, name)
    target.write_bytes(BOMBS[bomb])
    started = time.process_time()
    assert what_is_readable(recorded, copied) == recorded.values.keys() - needed_by(recorded, copied, target)
    assert time.process_time() - started < 20
    if name == "run.json":
        with pytest.raises((hookstore.CorruptRunError, hookstore.NotARunError, hookstore.FormatVersionError)):
            hookstore.open(copied)


@pytest.mark.parametrize(
    "layers",
    [
        None,
        {},
        "first",
        [None],
        ["first"],
        [[]],
        [{}],
        [{"name": None}],
        [{"name": 1}],
        [{"name": ["first"]}],
        [{"name": "first"}, {"name": "first"}],
        [{"name": "first", "aliases": ["first"]}],
        [{"name": "first", "aliases": ["second"]}, {"name": "second"}],
        [{"name": "first", "aliases": ["x"]}, {"name": "second", "aliases": ["x"]}],
        [{"name": "first", "aliases": "second"}],
        [{"name": "first", "aliases": {"second": 1}}],
        [{"name": "first", "aliases": None}],
        [{"name": "first", "aliases": [1]}],
        [{"name": "first", "aliases": [["second"]]}],
        [{"name": "\ud800"}],
        [{"name": "first", "aliases": ["\udfff"]}],
    ],
    ids=repr,
)
def test_layers_that_are_none(copied, layers):
    description = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**description, "layers": layers}))
    with pytest.raises(hookstore.CorruptRunError, match="run.json lists no layers") as caught:
        hookstore.open(copied)
    assert caught.value.path == str(copied / "run.json")


@pytest.mark.parametrize("said", [{"recorded": []}, {"recorded": None}, {"environment": "x"}, {"recorded": {"codec": "zstd"}}], ids=str)
def test_what_was_recorded_is_looked_at(copied, said):
    description = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**description, **said}))
    with pytest.raises(hookstore.CorruptRunError, match="does not say what was recorded"):
        hookstore.open(copied)


def change(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


INNER = ("codecs", 0, "configuration")


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("shape",), None),
        (("shape",), [2**63, 8, 5, 4]),
        (("shape", 2), 4),
        (("shape", 0), -1),
        (("shape", 0), 1.5),
        (("shape", 0), True),
        (("chunk_grid", "configuration", "chunk_shape"), [1, 65_537, 5, 4]),
        (("chunk_grid", "configuration", "chunk_shape"), [0, 1, 5, 4]),
        (("chunk_grid", "configuration", "chunk_shape"), [2**40, 2**40, 5, 4]),
        (("chunk_grid", "configuration", "chunk_shape", 2), 6),
        ((*INNER, "chunk_shape"), [1, 1, 4, 5]),
        ((*INNER, "chunk_shape"), [1, 1, 2**60, 2**60]),
        ((*INNER, "chunk_shape"), [2, 1, 5, 4]),
        ((*INNER, "chunk_shape"), [1] * 1000),
        ((*INNER, "chunk_shape"), "1154"),
        ((*INNER, "codecs"), []),
        ((*INNER, "codecs", 0, "configuration", "endian"), "big"),
        ((*INNER, "codecs", 0, "name"), "transpose"),
        ((*INNER, "codecs", 1, "name"), "adler32"),
        ((*INNER, "codecs"), [{"name": "bytes"}, {"name": "zstd"}, {"name": "gzip"}, {"name": "crc32c"}]),
        ((*INNER, "codecs"), [{"name": "bytes"}, {"name": "numcodecs.pickle"}, {"name": "crc32c"}]),
        ((*INNER, "codecs"), [{"name": "bytes"}, None, {"name": "crc32c"}]),
        ((*INNER, "codecs"), [{"name": "bytes"}, "zstd", {"name": "crc32c"}]),
        ((*INNER, "codecs"), [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 10**400}}, {"name": "crc32c"}]),
        (("codecs",), [{"name": "bytes"}]),
        (("dimension_names",), None),
        (("dimension_names", 2), "call"),
        (("attributes", "torch_dtype"), "float64"),
        (("attributes", "torch_dtype"), ["float32"]),
        (("attributes", "layer"), "first"),
        (("attributes", "layer"), "\ud800"),
        (("attributes", "kind"), "gradient"),
        (("attributes", "kind"), "activ"),
        (("attributes", "phase"), "eval"),
        (("attributes", "leaf"), "hidden"),
        (("attributes", "rank"), "zero"),
    ],
    ids=str,
)
def test_metadata_of_an_array_that_makes_no_sense(recorded, copied, path, new):
    target = some_file(copied, "array")
    metadata = json.loads(target.read_text())
    change(metadata, path, new)
    target.write_text(json.dumps(metadata))
    assert what_is_readable(recorded, copied) == recorded.values.keys() - needed_by(recorded, copied, target)
    with open_quietly(copied) as run:
        for ask in (lambda: run["second"].activation[0, 0], lambda: run["second"].activation.samples()[0]):
            with pytest.raises(hookstore.CorruptRunError, match="second/activation"):
                ask()


# The manifest ---------------------------------------------------------------------------------------------------------


def rewrite(path: Path, edit: Any) -> list[dict[str, Any]]:
    """Put one part with changed rows, and right checksums, in place of the manifest."""
    with open_quietly(path) as run:
        rows = run.manifest.to_pylist()
    edit(rows)
    shutil.rmtree(path / "journal")
    for part in (path / "manifest").iterdir():
        part.unlink()
    put_part(path, encode_part([pa.RecordBatch.from_pylist(rows, schema=SCHEMA)]))
    return rows


def put_part(path: Path, contents: bytes, attempt: int = 0) -> Path:
    part = path / "manifest" / part_name(0, attempt, 0, crc32c(contents))
    part.write_bytes(contents)
    return part


def captures_of(rows: list[dict[str, Any]], layer: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["layer"] == layer and row["status"] == "ok"]


@pytest.mark.parametrize("column", ["array", "layer", "kind", "phase", "leaf"])
def test_a_row_that_points_into_an_array_of_something_else(recorded, copied, column):
    """Two layers of equal shapes: all else about the row is right, the checksum too."""
    other = {"array": "first/activation", "layer": "first", "kind": "gradient", "phase": "eval", "leaf": "hidden"}[column]

    def edit(rows):
        for row in captures_of(rows, "second"):
            row[column] = other
            if column == "array":
                row.update({name: captures_of(rows, "first")[0][name] for name in ("shard", "offset", "length", "crc32c")})

    rewrite(copied, edit)
    with hookstore.open(copied) as run:
        wrong = [row for row in run.manifest.to_pylist() if row["array"] == "second/activation" or row["layer"] == "second"]
        assert len(wrong) == 10
        for row in wrong:
            with pytest.raises(hookstore.CorruptRunError, match="the manifest has"):
                run.read(row)


@pytest.mark.parametrize("shift", [(64, 0), (0, 4), (4, 0), (-40, 0), (0, -4)], ids=str)
def test_chunks_that_overlap_are_refused(recorded, copied, shift):
    def edit(rows):
        first, second = captures_of(rows, "second")[:2]
        assert first["shard"] == second["shard"]
        second["offset"], second["length"] = first["offset"] + abs(shift[0]), first["length"] + shift[1]
        if shift[0] < 0:
            first["offset"], second["offset"] = second["offset"], first["offset"]

    rows = rewrite(copied, edit)
    first, second, *others = captures_of(rows, "second")
    with hookstore.open(copied) as run:
        captures = run["second"].activation
        for row in (first, second):
            for ask in (lambda row=row: run.read(row), lambda row=row: captures[row["epoch"], row["batch"]]):
                with pytest.raises(hookstore.CorruptRunError, match="some of which belong to another capture"):
                    ask()
        for row in others:
            assert fuzz.value_of(run.read(row)) == recorded.values[fuzz.place_of(row)]
        samples = captures.samples()
        with pytest.raises(hookstore.CorruptRunError, match="belong to another capture"):
            samples[0]
        assert fuzz.value_of(samples[45:50]) == recorded.values[fuzz.place_of(others[-1])]


def test_rows_that_are_there_twice_are_no_overlap(recorded, copied):
    rewrite(copied, lambda rows: rows.extend([dict(row) for row in rows]))
    with hookstore.open(copied) as run, pytest.warns(hookstore.CaptureWarning, match="2 times"):
        for (layer, kind, _, _, epoch, batch, _), value in recorded.values.items():
            assert fuzz.value_of(run[layer][kind][epoch, batch]) == value


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(-64, 1000), st.integers(-4, 200) | st.sampled_from([2**41, 2**62, 2**63 - 1])),
        max_size=30,
    )
)
def test_overlaps_are_those_that_comparing_each_with_each_finds(chunks):
    rows = [
        RowBlock.of(
            Row(
                *("train", 0, number, 0, 0, 0, "first", "activation", "", 0, 0, "first/activation", (5, 4), "float32", 80, 0, None),
                *(f"c.0.{ord(shard)}.0.0", offset, length, 0, "ok", ""),
            )
        )
        for number, (shard, offset, length) in enumerate(chunks)
    ]
    table = pa.Table.from_batches([make_batch(rows)] if rows else [], schema=SCHEMA)
    known = {(shard, offset, length) for shard, offset, length in chunks if offset >= 0 and length > 0}
    expected = {
        ("first/activation", f"c.0.{ord(one[0])}.0.0", *one[1:])
        for one in known
        if any(one != other and one[0] == other[0] and one[1] < other[1] + other[2] and other[1] < one[1] + one[2] for other in known)
    }
    assert RowIndex(code_rows(table).combine_chunks()).overlapping == expected


def test_looking_for_overlaps_in_a_million_rows_is_quick():
    count = 1_000_000
    batch = make_batch(
        [
            RowBlock.of(
                Row(
                    *("train", 0, 0, 0, 0, 0, "first", "activation", "", 0, 0, "first/activation", (5, 4), "float32", 80, 0, None),
                    *(f"c.0.{number}.0.0", 0, 84, 0, "ok", ""),
                )
            )
            for number in range(100)
        ]
    )
    table = pa.concat_tables([pa.Table.from_batches([batch])] * (count // 100))
    offsets = np.arange(count) // 100 * 128
    table = table.set_column(SCHEMA.get_field_index("offset"), SCHEMA.field("offset"), pa.array(offsets))
    index = RowIndex(code_rows(table.combine_chunks()))
    started = time.process_time()
    assert index.overlapping == frozenset()
    assert time.process_time() - started < 2  # an eighth of a second where nothing else runs


def test_the_same_place_with_another_checksum_is_looked_at_again(copied):
    """What was right once says nothing about a second row that tells another checksum."""
    with open_quietly(copied) as run:
        row = captures_of(run.manifest.to_pylist(), "first")[0]
        run.read(row)
        with pytest.raises(hookstore.CorruptRunError, match="the manifest says"):
            run.read({**row, "crc32c": row["crc32c"] ^ 1})


@pytest.mark.parametrize(
    "changes",
    [
        {"shard": "c." + "1" * 300},
        {"shard": "c.0.0.0.0\0"},
        {"array": "second/" + "a" * 300},
        {"array": "second/\ue000é"},
        {"array": "SECOND/activation"},
        {"offset": 2**40},
        {"offset": 2**63 - 1},
        {"shape": [1, 4]},
        {"shape": [2, 4]},
        {"shape": [5, 2]},
        {"shape": [2**46, 2**46, 2**46]},
        {"shape": [1] * 100},
        {"shape": [0, 2**60]},
        {"shape": [0, 2**46, 2**46, 2**46]},
        {"length": 2**63 - 1, "offset": 2**39},
        {"dtype": "complex128"},
    ],
    ids=str,
)
def test_rows_of_nonsense(copied, changes):
    rewrite(copied, lambda rows: [row.update(changes) for row in captures_of(rows, "second")])
    with hookstore.open(copied) as run:
        assert run.info().num_captures == 20
        for ask in (lambda: run["second"].activation[0, 0], lambda: run["second"].activation.samples()[0]):
            with pytest.raises(hookstore.CorruptRunError):
                ask()
        assert run["first"].activation[0, 0].shape == (5, 4)


@pytest.mark.parametrize("where", ["part", "journal"])
@pytest.mark.parametrize("time_us", [2**63 - 1, -(2**63) + 1, 253_402_300_800_000_000])
def test_times_that_python_does_not_have(recorded, copied, time_us, where):
    """Nobody could list the rows."""
    row = Row(*("train", 9, 9, 0, 0, 0, "first", "activation", "", 0, 0, "", (0,), "float32", 0, time_us, None, "", 0, 0, 0, "ok", ""))
    batch = make_batch([RowBlock.of(row)])
    if where == "part":
        put_part(copied, encode_part([batch]), attempt=77)
    else:
        (copied / "journal" / segment_name(0, 77, 0)).write_bytes(frames(batch))
    with pytest.warns(hookstore.CaptureWarning, match="r0-a77-.*outside the years 1 to 9999"):
        hookstore.open(copied).close()
    assert what_is_readable(recorded, copied) == recorded.values.keys()


def frames(*batches: pa.RecordBatch, schema: pa.Schema = SCHEMA, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    """A journal segment."""
    payloads = [(FRAME_SCHEMA, bytes(schema.serialize()))]
    for batch in batches:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, batch.schema, options=options) as stream:
            stream.write_batch(batch)
        message = list(pa.ipc.MessageReader.open_stream(sink.getvalue()))[1]
        payloads.append((FRAME_ROWS, bytes(message.serialize())))
    return fuzz._of_frames(payloads)


def some_rows(recorded: fuzz.Pristine) -> pa.RecordBatch:
    return read_manifest(str(recorded.path)).combine_chunks().to_batches()[0]


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_rows_are_not_unpacked(recorded, copied, codec):
    """No writer of this format compresses them, and a megabyte may become many gigabytes."""
    batch = some_rows(recorded)
    assert read_segment(frames(batch)).batches[0].equals(batch), "the frames as such are right"
    segment = copied / "journal" / segment_name(0, 77, 0)
    segment.write_bytes(frames(batch, options=pa.ipc.IpcWriteOptions(compression=codec)))
    with pytest.warns(hookstore.CaptureWarning, match="r0-a77-.*the rows are compressed"):
        hookstore.open(copied).close()
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
        stream.write_batch(batch)
    with pytest.raises(ValueError, match="the rows are compressed"):
        stream_to_rows(sink.getvalue())


@pytest.mark.parametrize(
    "schema", [SCHEMA.remove(0), SCHEMA.append(pa.field("more", pa.int8())), pa.schema([]), SCHEMA.with_metadata(None)], ids=len
)
def test_journals_of_another_schema(recorded, copied, schema):
    batch = some_rows(recorded)
    (copied / "journal" / segment_name(0, 77, 0)).write_bytes(frames(batch, schema=schema))
    is_same = len(schema) == len(SCHEMA)
    if is_same:
        with open_quietly(copied) as run:
            assert len(run.manifest) == 2 * len(batch)
    else:
        with pytest.warns(hookstore.CaptureWarning, match="r0-a77-.*another schema"):
            hookstore.open(copied).close()


@pytest.mark.parametrize("stream", [b"", b"\0" * 64, b"\xff" * 64, b"ARROW1\0\0"], ids=repr)
def test_streams_of_rows_that_are_none(stream):
    with pytest.raises((pa.ArrowException, ValueError, OSError)):
        stream_to_rows(stream)


def write_parquet(table: pa.Table, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def test_parts_that_unpack_to_far_too_much(recorded, copied):
    rows = read_manifest(str(recorded.path))
    one = rows.slice(0, 1)

    def of(**columns: Any) -> pa.Table:
        table = one
        for name, column in columns.items():
            table = table.set_column(SCHEMA.get_field_index(name), SCHEMA.field(name), column)
        return table

    bombs = {
        "rows in": write_parquet(
            pa.concat_tables([one] * (1 << 11)).combine_chunks().take(pa.array(np.zeros(3 << 20, dtype="i4"))), compression="zstd"
        ),
        "its texts have": write_parquet(
            of(reason=pa.array(["x" * (1 << 20)])).take(pa.array(np.zeros(1000, dtype="i4"))), compression="zstd"
        ),
        "groups of": write_parquet(pa.concat_tables([one] * 40), row_group_size=1),
        "values in": write_parquet(of(shape=pa.array([[1] * 20_000]).cast(SCHEMA.field("shape").type)), compression="zstd"),
        "bytes is too long": write_parquet(rows.replace_schema_metadata({"more": "x" * (1 << 20)})),
    }
    for what, contents in bombs.items():
        assert len(contents) < 8 << 20
        part = put_part(copied, contents, attempt=77)
        before = pa.total_allocated_bytes()
        with pytest.raises(hookstore.CorruptRunError, match=what) as caught:
            load_part(str(part), crc32c(contents))
        assert caught.value.path == str(part)
        del caught
        assert pa.total_allocated_bytes() - before < 64 << 20
        part.unlink()
    contents = write_parquet(rows)
    assert load_part(str(put_part(copied, contents, attempt=77)), crc32c(contents)).num_rows == len(rows), "nothing else is refused"


def test_a_footer_at_which_arrow_would_end_the_process(recorded, tmp_path):
    """Columns of texts that have become numbers: asking Arrow for their sizes aborts, so nobody asks."""
    contents = write_parquet(read_manifest(str(recorded.path)))
    start = len(contents) - 8 - int.from_bytes(contents[-8:-4], "little")
    places = [place for place in range(start, len(contents) - 8) if contents[place] == 12]  # BYTE_ARRAY
    assert len(places) > 10
    script = """
import sys
from hookstore.errors import CorruptRunError
from hookstore.manifest import load_part
for path in sys.argv[1:]:
    try:
        load_part(path, int(path[-16:-8], 16))
    except CorruptRunError:
        pass
print("lives")
"""
    paths = []
    for place in places:
        spoiled = contents[:place] + b"\x08" + contents[place + 1 :]  # FLOAT
        paths.append(tmp_path / part_name(0, 0, place, crc32c(spoiled)))
        paths[-1].write_bytes(spoiled)
    done = subprocess.run([sys.executable, "-c", script, *map(str, paths)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "lives\n", done.stderr


@pytest.mark.parametrize("name", ["part", "segment"])
def test_a_lookup_names_the_piece_of_the_manifest_that_cannot_be_read(recorded, copied, name):
    target = some_file(copied, name)
    lost = next(iter(needed_by(recorded, copied, target)))
    contents = bytearray(target.read_bytes())
    if name == "part":
        contents[len(contents) // 2] ^= 1
    else:
        contents[20] ^= 1  # in the first frame, which whole ones follow
    target.write_bytes(contents)
    with pytest.warns(hookstore.CaptureWarning, match=target.name):
        run = hookstore.open(copied)
    with run:
        with pytest.raises(hookstore.MissingCaptureError, match=f"{target.name} cannot be read, and the captures listed there are missing"):
            run[lost[0]][lost[1]][lost[4], lost[5]]
        with pytest.raises(hookstore.MissingCaptureError, match=target.name):
            run.batches(77)
        for place, needs in recorded.needs.items():
            if fuzz.piece_of(str(target.relative_to(copied))) not in needs:
                assert fuzz.value_of(run[place[0]][place[1]][place[4], place[5]]) == recorded.values[place]


# Codecs ---------------------------------------------------------------------------------------------------------------


def test_chunks_that_would_be_unpacked_to_any_size():
    """A megabyte may become gigabytes: what a chunk claims is held against its shape before any of it is unpacked."""
    zeros = bytes(64 << 20)
    zstd, blosc, gzip = (compressor(codec_metadata(codec, "uint8")) for codec in ("zstd", "lz4", {"name": "gzip"}))
    frame = bytes(zstd.encode(zeros))
    content_bytes = (1 if frame[4] & 0x20 else 0, 2, 4, 8)[frame[4] >> 6]
    assert content_bytes == 4
    small = bytes(numcodecs.Zstd().encode(b"a" * 100))
    hostile = {
        "claims nothing": (zstd, bytes([*frame[:4], frame[4] & 0x3F, *frame[5 : 5 + (0 if frame[4] & 0x20 else 1)]]) + frame[-20:]),
        "claims less": (zstd, frame[:5] + (100).to_bytes(4, "little") + frame[9:] if frame[4] & 0x20 else frame),
        "a frame to skip before it": (zstd, struct.pack("<II", 0x184D2A50, 100) + bytes(100) + frame),
        "two frames": (zstd, small + frame),
        "blosc claims less": (blosc, bytes(blosc.encode(zeros))[:4] + (100).to_bytes(4, "little") + bytes(blosc.encode(zeros))[8:]),
        "gzip": (gzip, bytes(gzip.encode(zeros))),
    }
    for what, (made, encoded) in hostile.items():
        tracemalloc.start()
        try:
            with pytest.raises((ValueError, RuntimeError, OSError, EOFError, zlib.error)):
                decode(made, memoryview(encoded), 100)
                pytest.fail(what)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20, what
        finally:
            tracemalloc.stop()


def test_blosc_is_not_believed_where_its_bytes_end():
    """It reads as far as its header says."""
    made = compressor(codec_metadata("lz4", "uint8"))
    encoded = bytes(made.encode(bytes(range(250)) * 40))
    assert decode(made, memoryview(encoded), 10_000) == bytes(range(250)) * 40
    for size in (0, 1, 15, 16, len(encoded) // 2, len(encoded) - 1):
        with pytest.raises(ValueError, match="claims to be stored in"):
            decode(made, memoryview(encoded[:size]), 10_000)
    with pytest.raises(ValueError, match="claims to be stored in"):
        decode(made, memoryview(encoded + b"\0"), 10_000)


# The fuzzer -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzzed")
    fuzz.record_runs(directory)
    return directory


def test_nothing_that_becomes_of_a_run_does_harm(runs):
    """Ten seconds of what ``python tests/fuzz.py`` does for longer."""
    findings = fuzz.fuzz(runs, seed=random.randrange(2**32), num_mutants=10_000, seconds=10)
    assert not findings.problems, "\n".join(findings.problems)
    assert findings.num_mutants > 10
    assert findings.outcomes["partly"] > 0, findings


@pytest.mark.slow
def test_nothing_that_becomes_of_a_run_does_harm_for_ten_minutes(runs):
    findings = fuzz.fuzz(runs, seed=1, num_mutants=100_000, seconds=600)
    assert not findings.problems, "\n".join(findings.problems)


def test_the_fuzzer_knows_a_run_that_is_whole(runs, tmp_path):
    for run in fuzz.load_runs(runs):
        shutil.copytree(run.path, tmp_path / run.name)
        assert fuzz.examine(tmp_path / run.name, fuzz.Mutant(run), "pristine") == "whole"
        assert set(run.needs) == set(run.values)
        assert any(name.endswith(".journal") for name in run.files) == ("killed" in run.name)


def test_the_fuzzer_tells_a_wrong_value_and_one_that_is_missing(runs, tmp_path):
    run = next(run for run in fuzz.load_runs(runs) if run.name == "plain-killed")
    chance = random.Random(0)
    mutant = fuzz.Mutant(run)
    assert "chunk" in fuzz.spoil_chunk(mutant, chance)
    assert not mutant.is_exact
    shutil.copytree(run.path, tmp_path / "wrong")
    mutant.write(tmp_path / "wrong")
    mutant.is_exact = True  # as if nobody had mended the checksums
    with pytest.raises(fuzz.Wrong, match="the value at"):
        fuzz.examine(tmp_path / "wrong", mutant, "wrong")
    shutil.copytree(run.path, tmp_path / "missing")
    gone = next(name for name in run.files if name.endswith("activation/zarr.json"))
    (tmp_path / "missing" / gone).unlink()
    with pytest.raises(fuzz.Wrong, match="cannot be read that lie in whole files"):
        fuzz.examine(tmp_path / "missing", fuzz.Mutant(run), "missing")
    fuzz.examine(tmp_path / "missing", fuzz.Mutant(run, changes={gone: None}), "known to be gone")


def test_the_fuzzer_tells_crashes_and_hangs(runs, monkeypatch):
    worker = fuzz.Worker(runs, 0)
    assert worker.look_at(1)["problem"] == ""
    worker._process.kill()
    assert "a crash: exit code -9" in worker.look_at(1)["problem"]
    monkeypatch.setattr(fuzz, "MUTANT_TIMEOUT_S", 0.0)
    assert "a hang" in worker.look_at(1)["problem"]
    monkeypatch.undo()
    assert worker.look_at(1)["problem"] == ""
    worker.close()
    worker._errors.close()


def test_mutants_are_made_of_their_numbers_alone(runs):
    known = fuzz.load_runs(runs)
    stories = [fuzz.make_mutant(known, 3, number).story for number in range(50)]
    assert stories == [fuzz.make_mutant(known, 3, number).story for number in range(50)]
    assert len(set(stories)) > 45
