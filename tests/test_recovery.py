"""Runs whose writer died: taken up, finished, checked."""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import zarr
from crc32c import crc32c
from torch import nn
from typer.testing import CliRunner

import hookstore
import hookstore.recorder  # before anything is patched: modules keep the constants of the format
import hookstore.verification
from hookstore import cli
from hookstore.format import FRAME_FORMAT, parse_part_name
from hookstore.manifest import encode_part, read_manifest


class Passes(nn.Module):
    def forward(self, inputs):
        return inputs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = Passes(), Passes()

    def forward(self, value):
        self.large(torch.full((2, 1500), value + 0.5))
        return self.small(torch.full((2, 2), value))


def record(path, batches, *, value=0.0, dead=False, model=None, **options):
    """Record batches; with ``dead`` leave the run as a kill would that comes right after a flush."""
    model = model or Model()
    path = Path(path)
    options = {"buffer_bytes": 1 << 20, "mode": "a", **options}
    recorder = hookstore.record(model, path, **options)
    try:
        for batch in batches:
            recorder.at(epoch=0, batch=batch)
            model(batch + value)
        recorder.flush()
    except BaseException as failure:  # which the writer's thread has raised, and still has the lock for a moment
        with contextlib.suppress(type(failure)):
            recorder.close()
        raise
    if dead:
        killed = path.with_name(path.name + ".killed")
        shutil.copytree(path, killed)
        os.unlink(killed / "journal/lock.json")
        recorder.close()
        shutil.rmtree(path)
        killed.rename(path)
    else:
        recorder.close()


def tree(path):
    return {os.path.relpath(os.path.join(place, name), path) for place, _, names in os.walk(path) for name in names}


def check(path, expected):
    """``expected``: by attempt, the batches and the value that was added."""
    with hookstore.open(path) as run:
        for attempt, (batches, value) in enumerate(expected):
            for batch in batches:
                assert np.all(run["small"].activation.get(0, batch, attempt=attempt) == batch + value)
                assert np.all(run["large"].activation.get(0, batch, attempt=attempt) == batch + value + 0.5)
        latest = {batch: batch + value for batches, value in expected for batch in batches}
        for batch, value in latest.items():
            assert run["small"].activation[0, batch][0, 0] == value
        samples = run["small"].activation.samples()
        assert samples[:][::2, 0].tolist() == [latest[batch] for batch in sorted(latest)]
    return latest


def check_zarr(path, latest):
    group = zarr.open_group(path / "layers", mode="r")
    for layer, more in (("small", 0.0), ("large", 0.5)):
        values = group[f"{layer}/activation"][0, :, 0, 0]
        assert {batch: value for batch, value in enumerate(values.tolist()) if not np.isnan(value)} == {
            batch: value + more for batch, value in latest.items()
        }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def tiny_shards(monkeypatch):
    monkeypatch.setattr("hookstore.format.MAX_SHARD_ENTRIES", 3)
    monkeypatch.setattr("hookstore.manifest.SEGMENT_ROWS", 6)


# Recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_killed_run_is_finished(path, codec, tiny_shards):
    record(path, range(10), dead=True, codec=codec)
    with hookstore.open(path) as run:
        assert run.info().state == "unfinished"
    before = read_manifest(os.fspath(path))
    said = []
    report = hookstore.recover(path, progress=lambda done, total, what: said.append((done, total, what)))
    assert not report.was_finished
    assert report.num_sealed >= 2
    assert report.problems == []
    assert {what for _, _, what in said} == {"reading the journal", "looking into the shards", "sealing shards"}
    assert all(done <= total for done, total, _ in said)
    latest = check(path, [(range(10), 0.0)])
    check_zarr(path, latest)
    after = read_manifest(os.fspath(path))
    assert after.slice(0, before.num_rows).equals(before)
    assert after["status"].to_pylist()[before.num_rows :] == ["partial"]
    with hookstore.open(path) as run:
        assert run.info().state == "finished"
        (partial,) = run.partial_batches
        assert (partial.phase, partial.epoch, partial.batch, partial.attempt) == ("train", 0, 9, 0)
    assert sorted(os.listdir(path)) == ["layers", "manifest", "run.json"]
    assert not [name for name in tree(path) if "unsealed" in name]
    assert hookstore.verify(path).is_sound


def test_twice_is_once(path, tmp_path, tiny_shards):
    record(path, range(7), dead=True)
    hookstore.recover(path)
    shutil.copytree(path, tmp_path / "once")
    report = hookstore.recover(path)
    assert report.was_finished
    assert (report.num_from_journal, report.num_from_shards, report.num_sealed, report.num_removed, report.problems) == (0, 0, 0, 0, [])
    assert tree(path) == tree(tmp_path / "once")
    for name in tree(path):
        assert filecmp.cmp(path / name, tmp_path / "once" / name, shallow=False), name


def test_a_run_that_was_closed_is_left_as_it_is(path, tmp_path):
    record(path, range(5))
    shutil.copytree(path, tmp_path / "before")
    assert hookstore.recover(path).was_finished
    assert tree(path) == tree(tmp_path / "before")
    for name in tree(path):
        assert filecmp.cmp(path / name, tmp_path / "before" / name, shallow=False), name


def test_lost_parts_are_rebuilt_from_the_shards(path):
    record(path, range(6))
    before = read_manifest(os.fspath(path))
    for name in os.listdir(path / "manifest"):
        os.unlink(path / "manifest" / name)
    report = hookstore.recover(path)
    assert report.num_from_shards == before.num_rows
    order = [("layer", "ascending"), ("batch", "ascending")]
    assert read_manifest(os.fspath(path)).sort_by(order).equals(before.sort_by(order))
    assert hookstore.verify(path).is_sound
    check(path, [(range(6), 0.0)])


def test_a_damaged_part_is_put_aside_and_its_rows_come_from_the_shards(path, tiny_shards):
    record(path, range(10))
    before = read_manifest(os.fspath(path)).num_rows
    damaged = sorted(os.listdir(path / "manifest"))[0]
    contents = bytearray((path / "manifest" / damaged).read_bytes())
    contents[100] ^= 1
    (path / "manifest" / damaged).write_bytes(contents)
    with pytest.warns(hookstore.CaptureWarning, match="`hookstore recover` looks for them in the shards"):
        run = hookstore.open(path)
    assert 0 < run.manifest.num_rows < before
    with pytest.raises(hookstore.MissingCaptureError, match=f"{damaged} cannot be read, and the captures listed there are missing"):
        run["small"].activation[0, 0]
    run.close()
    report = hookstore.recover(path)
    assert report.num_from_shards > 0
    assert len(report.problems) == 1
    assert "damaged" in os.listdir(path)
    assert (path / "damaged" / f"manifest%2f{damaged}").read_bytes() == contents
    check(path, [(range(10), 0.0)])
    assert hookstore.verify(path).is_sound
    assert hookstore.recover(path).was_finished


def test_a_damaged_frame_of_the_journal(path, monkeypatch):
    """What else is in the segment is kept; of the frame's rows those come back whose shards are sealed."""
    monkeypatch.setattr("hookstore.format.MAX_SHARD_ENTRIES", 3)
    record(path, range(4), dead=True)
    (segment,) = (name for name in os.listdir(path / "journal") if name.endswith(".journal"))
    contents = bytearray((path / "journal" / segment).read_bytes())
    schema_bytes = struct.unpack_from(FRAME_FORMAT, contents)[0]
    contents[12 + schema_bytes + 60] ^= 1  # in the first frame of rows
    (path / "journal" / segment).write_bytes(contents)
    report = hookstore.recover(path)
    assert any("is damaged at byte" in problem for problem in report.problems)
    assert report.num_from_shards > 0
    with hookstore.open(path) as run:
        for row in run.manifest.to_pylist():
            if row["status"] == "ok":
                assert run.read(row)[0, 0] == row["batch"] + (0.5 if row["layer"] == "large" else 0)
        assert set(run.batches(0)) >= {0, 1, 2}, "the first shard was sealed"
    assert (path / "damaged" / f"journal%2f{segment}").exists()


def test_a_shard_without_its_index_gets_one(path):
    record(path, range(5))
    shard = next(iter((path / "layers/small/activation").glob("c.*")))
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-2000])
    with pytest.raises(ValueError, match=r"."):
        check_zarr(path, {batch: float(batch) for batch in range(5)})
    faults = hookstore.verify(path).faults
    assert [fault.path for fault in faults] == [os.fspath(shard)]
    report = hookstore.recover(path)
    assert any("gets a new one" in problem for problem in report.problems)
    check_zarr(path, check(path, [(range(5), 0.0)]))
    assert hookstore.verify(path).is_sound


def test_what_had_not_reached_the_device_is_lost_and_said_to_be(path):
    """As after a power failure: the rows are there, beyond the last sync mark, and some of their bytes are not."""
    record(path, range(6), dead=True)
    (segment,) = (path / "journal").glob("*.journal")
    contents = segment.read_bytes()
    position, kept = 0, b""
    while position < len(contents):  # without the sync marks
        length, kind, _ = struct.unpack_from(FRAME_FORMAT, contents, position)
        kept += contents[position : position + 12 + length] if kind != 3 else b""
        position += 12 + length
    segment.write_bytes(kept)
    row = next(row for row in read_manifest(os.fspath(path)).to_pylist() if row["layer"] == "large" and row["batch"] == 3)
    hidden = path / "layers" / row["array"] / f".{row['shard']}.unsealed"
    with open(hidden, "r+b") as file:
        file.seek(row["offset"] + 4096)
        file.write(bytes(4096))
    with hookstore.open(path) as run, pytest.raises(hookstore.CorruptRunError, match="the manifest says"):
        run["large"].activation[0, 3]
    report = hookstore.recover(path)
    assert report.num_lost == 1
    with hookstore.open(path) as run:
        with pytest.raises(hookstore.MissingCaptureError, match="was lost: its bytes had not reached the device") as caught:
            run["large"].activation[0, 3]
        assert caught.value.status == "lost"
        assert run["large"].activation[0, 2][0, 0] == 2.5
    found = hookstore.verify(path)
    assert found.is_sound
    assert found.num_lost == 1
    values = zarr.open_group(path / "layers", mode="r")["large/activation"][0, :, 0, 0]
    assert np.isnan(values[3])


def test_leftovers_of_a_writer_are_cleared_away(path):
    record(path, range(3), dead=True)
    (path / ".making-7-1").mkdir()
    (path / ".making-7-1/zarr.json").write_text("{}")
    (path / "manifest/.r0-a0-000000-12345678.parquet.writing").write_bytes(b"PAR1")
    (path / "layers/small/activation/.c.5.0.0.0.cloning").write_bytes(b"half")
    (path / "layers/small/activation/.c.7.0.0.0.unsealed").write_bytes(bytes(8192))  # bytes that were never acknowledged
    report = hookstore.recover(path)
    assert report.num_removed == 4
    assert not [name for name in tree(path) if "/." in f"/{name}"]
    check_zarr(path, check(path, [(range(3), 0.0)]))


def test_bytes_that_no_row_tells_of_are_kept_where_rows_are_missing(path):
    record(path, range(3), dead=True)
    (segment,) = (path / "journal").glob("*.journal")
    segment.write_bytes(b"garbage " * 50)
    report = hookstore.recover(path)
    assert sum("no row tells of" in problem for problem in report.problems) == 2
    assert len(list((path / "damaged").glob("*.unsealed"))) == 2


@pytest.mark.parametrize("name", ["layers", "journal", "manifest"])
def test_nothing_is_written_where_a_link_leads(path, tmp_path, name):
    record(path, range(3), dead=True)
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    before = tree(tmp_path / "elsewhere")
    for call in (hookstore.recover, lambda path: record(path, range(3))):
        with pytest.raises(hookstore.CorruptRunError, match=f"{name} leads out of the run"):
            call(path)
    assert tree(tmp_path / "elsewhere") == before


def test_what_is_no_run(tmp_path):
    for call in (hookstore.recover, hookstore.verify):
        with pytest.raises(hookstore.NotARunError):
            call(tmp_path)
    assert os.listdir(tmp_path) == []


# Resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [True, False], ids=["killed", "closed"])
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_run_is_taken_up_again_and_again(path, dead, codec, tiny_shards):
    parts = [(range(8), 0.0), (range(5, 12), 100.0), (range(11, 13), 200.0), ([2], 300.0)]
    for number, (batches, value) in enumerate(parts):
        record(path, batches, value=value, dead=dead, codec=codec)
        with hookstore.open(path) as run:
            assert run.attempts == list(range(number + 1))
        check(path, parts[: number + 1])
    hookstore.recover(path)
    check_zarr(path, check(path, parts))
    found = hookstore.verify(path)
    assert found.is_sound, found.faults
    assert found.num_captures == 2 * sum(len(batches) for batches, _ in parts)
    description = json.loads((path / "run.json").read_text())
    assert [attempt["attempt"] for attempt in description["attempts"]] == [1, 2, 3]


def test_unsealed_shards_are_gone_on_with_as_they_are(path):
    record(path, range(3), dead=True)
    (hidden,) = (path / "layers/large/activation").glob(".c.*")
    before = hidden.read_bytes()
    record(path, range(3, 6), dead=True)
    assert list((path / "layers/large/activation").glob(".c.*")) == [hidden]
    assert hidden.read_bytes()[: len(before)] == before
    record(path, range(6, 8))
    (sealed,) = (path / "layers/large/activation").glob("c.*")
    assert sealed.read_bytes()[: len(before)] == before
    check_zarr(path, check(path, [(range(3), 0.0), (range(3, 6), 0.0), (range(6, 8), 0.0)]))


def test_a_sealed_shard_keeps_its_offsets(path):
    record(path, range(3))
    (sealed,) = (path / "layers/large/activation").glob("c.*")
    before = sealed.read_bytes()
    record(path, range(1, 5), value=7.0)
    assert sealed.read_bytes()[: len(before)] == before
    check_zarr(path, check(path, [(range(3), 0.0), (range(1, 5), 7.0)]))


def test_shards_that_nobody_goes_on_with_are_sealed_at_the_end(path):
    record(path, range(3), dead=True)
    model = nn.Identity()
    with hookstore.record(model, path, layers="", mode="a", buffer_bytes=1 << 20):
        model(torch.ones(2))
    assert not [name for name in tree(path) if "unsealed" in name]
    with hookstore.open(path) as run:
        assert run.layers == ["small", "large", ""]
        assert run[""].activation[0, 0].tolist() == [1.0, 1.0]
    assert hookstore.verify(path).is_sound


def test_a_clone_that_was_not_all_on_the_device_is_made_anew(path):
    """The power failed while a sealed shard was gone on with: of its clone a page is missing, and the new captures are there."""
    record(path, range(3))
    record(path, range(3, 5), dead=True)
    (hidden,) = (path / "layers/large/activation").glob(".c.*.unsealed")
    with open(hidden, "r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    hookstore.recover(path)
    check_zarr(path, check(path, [(range(3), 0.0), (range(3, 5), 0.0)]))
    assert hookstore.verify(path).is_sound


def test_a_changed_model_goes_to_other_arrays(path):
    record(path, range(3))

    class Wider(Model):
        def forward(self, value):
            self.large(torch.full((9, 4, 4), value))
            return self.small(torch.full((2, 2), value, dtype=torch.float64))

    record(path, range(3, 5), model=Wider(), codec="zstd")
    with hookstore.open(path) as run:
        assert {row["array"] for row in run.manifest.to_pylist()} == {
            "small/activation",
            "large/activation",
            "small/activation.float64",
            "large/activation.s9x4x4",
        }
        assert run["small"].activation[0, 4].dtype == np.float64
        assert run["large"].activation[0, 4].shape == (9, 4, 4)
    assert hookstore.verify(path).is_sound


def test_metadata_that_a_user_consolidated_does_not_hide_what_comes(path):
    record(path, range(3))
    with pytest.warns(UserWarning, match="Consolidated metadata"):
        zarr.consolidate_metadata(path / "layers")
    record(path, range(3, 40))
    assert "consolidated" not in (path / "layers/zarr.json").read_text()
    check_zarr(path, check(path, [(range(3), 0.0), (range(3, 40), 0.0)]))


def test_extents_that_a_writer_died_over(path):
    record(path, range(3), dead=True)
    file = path / "layers/small/activation/zarr.json"
    file.write_text(file.read_text().replace('"shape": [1, 4,', '"shape": [1, 2,'))
    assert '"shape": [1, 2,' in file.read_text()
    model = Model()
    with hookstore.record(model, path, mode="a", buffer_bytes=1 << 20) as recorder:
        recorder.at(epoch=0, batch=3)
        model(3.0)
    check_zarr(path, check(path, [(range(3), 0.0), ([3], 0.0)]))


def test_append_creates_what_is_not_there(path):
    record(path, range(2), mode="a")
    check(path, [(range(2), 0.0)])


@pytest.mark.parametrize("left", [[], ["journal"], ["journal", "layers"], ["journal", "layers", "manifest"]])
def test_a_run_that_its_maker_died_over_is_made_anew(path, left):
    path.mkdir()
    for name in left:
        (path / name).mkdir()
    record(path, range(2), mode="a" if len(left) % 2 else "x")
    check(path, [(range(2), 0.0)])


def test_append_to_something_else_is_refused(path):
    path.mkdir()
    (path / "thesis.tex").write_text("")
    for mode in ("a", "x"):
        with pytest.raises(hookstore.RunExistsError):
            record(path, range(2), mode=mode)
    assert os.listdir(path) == ["thesis.tex"]


def test_a_recording_that_cannot_go_on_leaves_the_run_alone(path, monkeypatch):
    record(path, range(3), dead=True)

    def refuse(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("hookstore.recorder.allocate_host", refuse)
    with pytest.raises(MemoryError):
        record(path, range(3, 5))
    monkeypatch.undo()
    record(path, range(3, 5))
    check_zarr(path, check(path, [(range(3), 0.0), (range(0), 0.0), (range(3, 5), 0.0)]))


def test_attempts_by_name(path):
    record(path, range(3))
    record(path, [1], value=10.0)
    with hookstore.open(path) as run:
        captures = run["small"].activation
        assert captures[0, 1][0, 0] == captures.tensor(0, 1, attempt=1)[0, 0] == 11.0
        assert captures.get(0, 1, attempt=0)[0, 0] == 1.0
        assert captures.row(0, 1)["attempt"] == 1
        assert captures.samples(attempt=0)[:][::2, 0].tolist() == [0.0, 1.0, 2.0]
        assert captures.samples(attempt=1)[:][::2, 0].tolist() == [11.0]
        with pytest.raises(hookstore.MissingCaptureError, match="batch 2, attempt 1 was not captured"):
            captures.get(0, 2, attempt=1)


def test_batches_of_another_attempt_that_was_cut_short(path):
    model = Model()
    with pytest.raises(ZeroDivisionError), hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(5), epoch=0):
            model(float(batch))
            1 / (batch - 3)
    with hookstore.open(path) as run:
        (partial,) = run.partial_batches
        assert (partial.epoch, partial.batch) == (0, 3)
        assert partial.reason.startswith("ZeroDivisionError ended the recording")
    record(path, range(3, 6))
    with hookstore.open(path) as run:
        assert run.partial_batches == []


# Verification ------------------------------------------------------------------------------------------------------


def test_every_single_capture_that_is_damaged_is_named(path, tiny_shards):
    record(path, range(5), codec="zstd")
    for row in read_manifest(os.fspath(path)).to_pylist():
        shard = path / "layers" / row["array"] / row["shard"]
        contents = shard.read_bytes()
        at = row["offset"] + row["length"] // 2
        shard.write_bytes(contents[:at] + bytes([contents[at] ^ 0x40]) + contents[at + 1 :])
        (fault,) = hookstore.verify(path).faults
        assert (fault.layer, fault.kind, fault.phase, fault.epoch, fault.batch, fault.path) == (
            *(row["layer"], "activation", "train", 0, row["batch"]),
            os.fspath(shard),
        )
        assert f"layer {row['layer']!r} in train epoch 0, batch {row['batch']}: its bytes" in str(fault)
        shard.write_bytes(contents)
    assert hookstore.verify(path).is_sound


def rewrite_manifest(path, change):
    """Replace the manifest by one that was changed, with right checksums."""
    table = change(read_manifest(os.fspath(path)).to_pylist())
    for name in os.listdir(path / "manifest"):
        os.unlink(path / "manifest" / name)
    contents = encode_part([pa.RecordBatch.from_pylist(table, schema=read_manifest(os.fspath(path)).schema)])
    (path / "manifest" / f"r0-a0-000000-{crc32c(contents):08x}.parquet").write_bytes(contents)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda rows: rows[:-1], "bytes without a row"),
        (lambda rows: [*rows, {**rows[0], "batch": rows[0]["batch"] + 1}], "are not there|bytes without|overlap|belong|index"),
        (lambda rows: [{**rows[0], "offset": 1 << 40}, *rows[1:]], "its bytes are not there"),
        (lambda rows: [{**rows[0], "offset": -4096}, *rows[1:]], "its bytes are not there"),
        (lambda rows: [{**rows[0], "crc32c": 7}, *rows[1:]], "do not match their checksum"),
        (lambda rows: [{**rows[0], "shape": [2, 1 << 60]}, *rows[1:]], "does not fit into chunks"),
        (lambda rows: [{**rows[0], "dtype": "int32"}, *rows[1:]], "the manifest says"),
        (lambda rows: [{**rows[0], "layer": "large" if rows[0]["layer"] == "small" else "small"}, *rows[1:]], "the manifest says"),
        (lambda rows: [{**rows[0], "status": "fine"}, *rows[1:]], "which there is not"),
        (lambda rows: [{**rows[0], "array": "../../etc"}, *rows[1:]], "cannot be read|cannot be the path"),
        (lambda rows: [{**rows[0], "shard": "c.9.9.9.9"}, *rows[1:]], "its shard is missing"),
        (lambda rows: [{**rows[0], "shard": "../c.0.0.0.0"}, *rows[1:]], "its shard is called"),
        (lambda rows: [{**rows[0], "batch": 1 << 39}, *rows[1:]], "does not belong"),
        (lambda rows: [{**rows[0], "offset": rows[0]["offset"] + 8}, *rows[1:]], "do not match|overlap"),
    ],
)
def test_rows_and_shards_that_do_not_fit_together(path, change, problem):
    record(path, range(5))
    rewrite_manifest(path, change)
    found = hookstore.verify(path)
    assert not found.is_sound
    assert any(re.search(problem, str(fault)) for fault in found.faults), found.faults


def test_a_shard_that_no_row_tells_of(path):
    record(path, range(5))
    rewrite_manifest(path, lambda rows: [row for row in rows if row["layer"] == "small"])
    found = hookstore.verify(path)
    assert {fault.path for fault in found.faults} == {os.fspath(next((path / "layers/large/activation").glob("c.*")))}
    assert any("bytes without a row" in fault.problem for fault in found.faults)
    assert hookstore.recover(path).num_from_shards == 5
    assert hookstore.verify(path).is_sound


@pytest.mark.parametrize("what", ["missing", "empty", "a directory", "a pipe", "a link", "without index"])
def test_shards_that_are_none(path, tmp_path, what):
    record(path, range(5))
    shard = next((path / "layers/large/activation").glob("c.*"))
    contents = shard.read_bytes()
    shard.unlink()
    if what == "empty":
        shard.write_bytes(b"")
    elif what == "a directory":
        shard.mkdir()
    elif what == "a pipe":
        os.mkfifo(shard)
    elif what == "a link":
        (tmp_path / "elsewhere").write_bytes(contents)
        shard.symlink_to(tmp_path / "elsewhere")
    elif what == "without index":
        shard.write_bytes(contents[:-100])
    found = hookstore.verify(path)
    assert not found.is_sound
    assert all(os.fspath(shard.parent) in fault.path and "large" in (fault.layer or fault.path) for fault in found.faults), found.faults
    with hookstore.open(path) as run:
        assert run["small"].activation[0, 3][0, 0] == 3.0


def test_more_faults_than_are_listed(path, monkeypatch):
    monkeypatch.setattr("hookstore.verification._MOST_FAULTS", 3)
    record(path, range(5))
    next((path / "layers/large/activation").glob("c.*")).unlink()
    found = hookstore.verify(path)
    assert (found.num_faults, len(found.faults)) == (5, 3)


def test_verification_of_a_live_run(path, tiny_shards):
    model = Model()
    with hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(30), epoch=0):
            model(float(batch))
            if batch % 5 == 0:
                recorder.flush()
                found = hookstore.verify(path)
                assert found.is_sound, found.faults
                assert found.num_captures == 2 * (batch + 1)


# The command line --------------------------------------------------------------------------------------------------


def test_verify_on_the_command_line(path):
    record(path, range(5))
    runner = CliRunner()
    done = runner.invoke(cli.app, ["verify", os.fspath(path)])
    assert done.exit_code == 0, done.output
    assert "10 captures in 2 shards" in done.output
    assert "sound" in done.output
    shard = next((path / "layers/large/activation").glob("c.*"))
    with open(shard, "r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    done = runner.invoke(cli.app, ["verify", os.fspath(path), "--threads", "1"])
    assert done.exit_code == 1
    assert "activation of layer 'large' in train epoch 0, batch 0: its bytes" in done.output
    assert "1 faults" in done.output
    assert runner.invoke(cli.app, ["verify", os.fspath(path.parent)]).exit_code == 1


def test_recover_on_the_command_line(path):
    record(path, range(5), dead=True)
    runner = CliRunner()
    shown = runner.invoke(cli.app, ["info", os.fspath(path)])
    assert "unfinished" in shown.output
    assert "hookstore recover" in shown.output
    done = runner.invoke(cli.app, ["recover", os.fspath(path)])
    assert done.exit_code == 0, done.output
    assert "10 manifest rows from the journal" in done.output.replace("11 manifest", "10 manifest")
    assert "2 shards sealed" in done.output
    assert "is finished" in done.output
    assert "was finished already" in runner.invoke(cli.app, ["recover", os.fspath(path)]).output
    shown = runner.invoke(cli.app, ["info", os.fspath(path)])
    assert "cut short: train epoch 0, batch 4" in shown.output
    model = Model()
    with hookstore.record(model, path, mode="a", buffer_bytes=1 << 20):
        done = runner.invoke(cli.app, ["recover", os.fspath(path)])
        assert done.exit_code == 1
        assert "RunLockedError" in done.output


# Endings -----------------------------------------------------------------------------------------------------------


def test_an_error_that_is_handled_around_a_whole_recording_cuts_nothing_short(path):
    model = Model()
    try:
        raise KeyError("out of memory, say, in an earlier try")
    except KeyError:
        with hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
            for batch in recorder.batches(range(3), epoch=0):
                model(float(batch))
            recorder.at(epoch=0, batch=3)
            model(3.0)
    with hookstore.open(path) as run:
        assert run.partial_batches == []
        assert run.batches(0) == [0, 1, 2, 3]


def test_close_in_a_handler_of_what_ended_the_training(path):
    model = Model()
    recorder = hookstore.record(model, path, buffer_bytes=1 << 20)
    try:
        for batch in recorder.batches(range(5), epoch=0):
            model(float(batch))
            if batch == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        recorder.close()
    with hookstore.open(path) as run:
        (partial,) = run.partial_batches
        assert (partial.batch, partial.reason.split()[0]) == (2, "KeyboardInterrupt")
        assert run["small"].activation[0, 2][0, 0] == 2.0


@pytest.mark.parametrize("left", ["break", "at the end"])
def test_a_loop_that_is_left_in_order_cuts_nothing_short(path, left):
    model = Model()
    with hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(5), epoch=0):
            model(float(batch))
            if left == "break" and batch == 3:
                break
    with hookstore.open(path) as run:
        assert run.partial_batches == []


# Other processes ---------------------------------------------------------------------------------------------------


def test_spawned_and_forked_workers_while_recording(tmp_path):
    """A DataLoader's workers and a pool's neither block nor write, however they are started; what they compute is not recorded."""
    script = """
        import multiprocessing, os, sys
        import torch, hookstore
        from torch import nn

        class Data(torch.utils.data.Dataset):
            def __init__(self, model):
                self.model = model
            def __len__(self):
                return 8
            def __getitem__(self, index):
                with torch.no_grad():
                    return self.model(torch.full((3,), 100.0 + index))  # in a worker: not recorded

        def main():
            torch.set_num_threads(1)
            model = nn.Sequential(nn.Identity())
            for method in ("fork", "spawn"):
                path = os.path.join(sys.argv[1], method)
                with hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
                    loader = torch.utils.data.DataLoader(Data(model), batch_size=2, num_workers=2, multiprocessing_context=method)
                    for batch, inputs in enumerate(recorder.batches(loader, epoch=0)):
                        assert inputs[0, 0] == 100.0 + 2 * batch
                        model(torch.full((3,), float(batch)))
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        assert pool.apply(model, (torch.full((3,), -1.0),)).tolist() == [-1.0] * 3
                with hookstore.open(path) as run:
                    assert [run.read(row)[0] for row in run.manifest.to_pylist()] == [0.0, 1.0, 2.0, 3.0], method
                    assert run.info().state == "finished"

        if __name__ == "__main__":
            main()
            print("done")
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    done = subprocess.run([sys.executable, tmp_path / "script.py", tmp_path], capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "done\n", done.stderr


def test_a_forked_child_that_leaves_the_with_statement(tmp_path):
    """It unwinds as its parent would, and the run stays the parent's."""
    script = """
        import os, sys
        import torch, hookstore
        from torch import nn
        torch.set_num_threads(1)
        model = nn.Identity()
        parent = os.getpid()
        try:
            with hookstore.record(model, sys.argv[1], layers="", buffer_bytes=1 << 20, on_sigterm="flush") as recorder:
                model(torch.ones(3))
                child = os.fork()
                if not child:
                    model(torch.ones(3) * 2)
                    recorder.flush()
                    raise SystemExit(5)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
                model(torch.ones(3) * 3)
        finally:
            if os.getpid() != parent:
                assert not model._forward_hooks
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "run"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    with hookstore.open(tmp_path / "run") as run:
        assert run.info().state == "finished"
        assert [run.read(row)[0] for row in run.manifest.to_pylist()] == [1.0, 3.0]


def test_parts_have_the_names_of_their_segments(path, tiny_shards):
    record(path, range(10), dead=True)
    segments = {name for name in os.listdir(path / "journal") if name.endswith(".journal")}
    hookstore.recover(path)
    keys = sorted(parse_part_name(name)[0] for name in os.listdir(path / "manifest"))
    assert keys == [(0, 0, index) for index in range(len(keys))]
    assert len(segments) == 1


def test_a_part_that_is_missing_is_told(path, tiny_shards):
    """Parts are numbered without gaps; bytes that only its rows told of are not taken for nothing."""
    record(path, range(10), dead=True)
    first = path / "manifest" / sorted(os.listdir(path / "manifest"))[0]
    first.unlink()
    with (
        pytest.warns(hookstore.CaptureWarning, match=r"r0-a0-000000-\*.parquet is missing, and with it the rows"),
        hookstore.open(path) as run,
    ):
        assert run["small"].activation[0, 9][0, 0] == 9.0
        with pytest.raises(hookstore.MissingCaptureError, match=r"000000-\*.parquet cannot be read"):
            run["small"].activation[0, 0]
    report = hookstore.recover(path)
    assert any("000000-*.parquet is missing" in problem for problem in report.problems)
    assert report.num_from_shards > 0
    assert report.num_removed == 0
    check(path, [(range(10), 0.0)])
    assert hookstore.recover(path).problems == []


# What a review found -----------------------------------------------------------------------------------------------


def test_an_interrupt_that_breaks_off_close_loses_nothing(tmp_path):
    """Python 3.11 takes a thread for ended whose join() was interrupted; the writer goes on all the same, and is waited for."""
    script = """
        import os, signal, sys, threading, time
        import torch, hookstore
        from torch import nn
        from hookstore.files import system
        write = system.pwrite
        system.pwrite = lambda *arguments: (time.sleep(0.02), write(*arguments))[1]
        model = nn.Identity()
        recorder = hookstore.record(model, sys.argv[1], layers="", buffer_bytes=8 << 20)
        for batch in recorder.batches(range(30), epoch=0):
            model(torch.full((20_000,), float(batch)))
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            recorder.close()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        if sys.argv[2] == "again":
            recorder.close()
            print(hookstore.open(sys.argv[1]).info().state)
    """
    for again in ("again", "not again"):
        path = tmp_path / again.replace(" ", "_")
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), path, again], capture_output=True, text=True, timeout=100, check=False
        )
        assert done.stdout.split() == (["interrupted", "finished"] if again == "again" else ["interrupted"]), done.stderr
        with hookstore.open(path) as run:
            assert run.info().state == "finished"
            assert [run[""].activation[0, batch][-1] for batch in run.batches(0)] == list(range(30))


def test_an_interrupt_that_breaks_off_record_leaves_no_hooks(path, monkeypatch):
    model = Model()

    def interrupt(_hooks):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hookstore.attach.ModelHooks.update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            record(path, range(2), model=model)
    assert not model.small._forward_hooks
    model(1.0)
    assert not path.exists()
    record(path, range(2), model=model)


@pytest.mark.parametrize("mode", ["x", "a"])
@pytest.mark.parametrize("where", ["layers", "manifest", "journal"])
def test_a_directory_that_only_looks_like_one_of_ours_is_left_alone(path, mode, where):
    (path / where).mkdir(parents=True)
    (path / where / "thesis.tex").write_text("of a year")
    with pytest.raises(hookstore.RunExistsError):
        record(path, range(2), mode=mode)
    assert (path / where / "thesis.tex").read_text() == "of a year"


def test_samples_stay_what_they_were_when_the_run_is_refreshed(path):
    record(path, range(3, 6))
    for name in os.listdir(path / "manifest"):  # so that what comes later comes before
        shutil.copy(path / "manifest" / name, path.parent)
        os.unlink(path / "manifest" / name)
    record(path, range(8, 10), value=10.0)
    run = hookstore.open(path)
    samples = run["small"].activation.samples()
    before = [samples.where(row) for row in range(len(samples))]
    hookstore.recover(path)
    assert run.refresh() > 0
    assert [samples.where(row) for row in range(len(samples))] == before
    assert samples[:][:, 0].tolist() == [where[1] + 10.0 for where in before]
    assert len(run["small"].activation.samples()) == 10
    run.close()


def test_modules_that_were_tied_and_are_no_more(path):
    tied = nn.ModuleDict({"a": Passes()})
    tied["b"] = tied["a"]
    tied.forward = lambda value: tied["b"](torch.full((2,), value))
    record(path, [0], model=tied)
    untied = nn.ModuleDict({"a": Passes(), "b": Passes()})
    untied.forward = lambda value: untied["b"](untied["a"](torch.full((2,), value)))
    record(path, [1], model=untied)
    record(path, [2], model=tied)
    with hookstore.open(path) as run:
        assert run.layers == ["a", "b"]
        assert run["b"].activation[0, 1][0] == 1.0
        assert run["a"].activation[0, 2][0] == 2.0
    assert hookstore.verify(path).is_sound


def test_an_array_that_cannot_be_read_is_neither_lost_nor_written_over(path):
    record(path, range(3), dead=True)
    file = path / "layers/small/activation/zarr.json"
    contents = file.read_text()
    file.write_text(contents[:40])
    with pytest.raises(hookstore.CorruptRunError, match="bring it back from a copy, or record into a new run"):
        record(path, range(3, 5))
    report = hookstore.recover(path)
    assert report.num_lost == 0
    assert any("its shards are left as they are" in problem for problem in report.problems)
    file.write_text(contents)
    hookstore.recover(path)
    check_zarr(path, check(path, [(range(3), 0.0)]))


def test_a_sealed_shard_that_is_damaged_is_gone_on_with_after_recovery(path):
    record(path, range(3))
    shard = next(iter((path / "layers/small/activation").glob("c.*")))
    shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(hookstore.CorruptRunError) as caught:
        record(path, range(3, 5))
    assert any("hookstore recover" in note for note in caught.value.__notes__)
    hookstore.recover(path)
    record(path, range(3, 5))
    assert hookstore.verify(path).is_sound
    with hookstore.open(path) as run:
        assert [run["small"].activation[0, batch][0, 0] for batch in range(5)] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_verification_while_shards_are_sealed(path, tiny_shards):
    """What was sealed after the manifest was read has rows that the manifest did not have then."""
    model = Model()
    stop = threading.Event()

    def train():
        with hookstore.record(model, path, buffer_bytes=1 << 20) as recorder:
            for batch in recorder.batches(itertools.count(), epoch=0):
                model(float(batch))
                if batch % 10 == 0:
                    recorder.flush()
                if stop.is_set():
                    return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while not (path / "run.json").exists() or not list(path.glob("manifest/*.parquet")):
            time.sleep(0.01)
        found = [hookstore.verify(path) for _ in range(6)]
    finally:
        stop.set()
        thread.join()
    assert [faults for one in found for faults in one.faults] == []
    assert found[-1].num_captures > found[0].num_captures > 0


def test_what_an_earlier_attempt_had_does_not_confuse(path):
    """Leaves, and a stop, of an attempt that has been recorded again since."""

    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.inner = name, Passes()

        def forward(self, value):
            return self.inner({self.name: torch.full((2,), value)})

    with pytest.warns(hookstore.CaptureWarning, match="recording stopped"):
        record(path, range(2), model=Named("a"), layers="inner", max_bytes=1000)
    record(path, [0, 2], model=Named("a"), layers="inner")
    record(path, [0, 2], model=Named("b"), layers="inner", value=5.0)
    with hookstore.open(path) as run:
        assert run["inner"].activation.get(0, 0).tolist() == [5.0, 5.0]
        assert run["inner"].activation.get(0, 0, leaf="a").tolist() == [0.0, 0.0]
        with pytest.raises(hookstore.MissingCaptureError, match=r"was not captured; epoch 0 has batches 0, 2"):
            run["inner"].activation[0, 1]


def test_strange_files_in_the_journal_do_not_make_a_run_unfinished(path):
    record(path, range(3), dead=True)
    (path / "journal/.DS_Store").write_bytes(b"")
    hookstore.recover(path)
    with hookstore.open(path) as run:
        assert run.info().state == "finished"


def test_shards_of_another_shape_than_their_array_are_left_alone(path):
    """The zarr.json of two arrays were exchanged: the keys of the shards have another number of dimensions than the array."""

    class Other(Model):
        def forward(self, value):
            self.large(torch.full((2, 3, 4), value))
            return self.small(torch.full((2, 2), value))

    record(path, range(3), dead=True, model=Other())
    small, large = (path / "layers" / name / "activation/zarr.json" for name in ("small", "large"))
    swapped = (
        large.read_text().replace('"layer": "large"', '"layer": "small"'),
        small.read_text().replace('"layer": "small"', '"layer": "large"'),
    )
    small.write_text(swapped[0])
    large.write_text(swapped[1])
    report = hookstore.recover(path)
    assert sum("is no shard of an array like this one" in problem for problem in report.problems) == 2
    assert len(list((path / "layers").glob("*/activation/.c.*.unsealed"))) == 2
    assert not hookstore.verify(path).is_sound
