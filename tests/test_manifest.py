"""`hookstore.manifest`: the journal's frames, the Parquet parts, and how a reader puts them together."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c

from hookstore import blocks, manifest
from hookstore.errors import CorruptRunError
from hookstore.format import DTYPES, FRAME_BYTES, FRAME_ROWS, FRAME_SCHEMA, FRAME_SYNC, MANIFEST_COLUMNS, Row, part_name, segment_name
from hookstore.manifest import (
    SCHEMA,
    ManifestWriter,
    encode_part,
    read_manifest,
    read_segment,
    rows_to_stream,
    stream_to_rows,
)


def make_row(number: int, **changes: object) -> Row:
    row = Row(
        phase="train",
        epoch=number // 100,
        batch=number % 100,
        call=0,
        backward=0,
        step=number,
        layer="conv1",
        kind="activation",
        leaf="",
        rank=0,
        attempt=0,
        array="conv1/activation",
        shape=(64, 3),
        dtype="float32",
        nbytes=768,
        wall_time=1_700_000_000_000_000 + number * 1000,
        loss_scale=None,
        shard="c.0.0.0.0",
        offset=number * 832,
        length=772,
        crc32c=number * 2_654_435_761 % 2**32,
        status="ok",
        reason="",
    )
    row = row._replace(**changes)
    return row._replace(nbytes=math.prod(row.shape) * DTYPES[row.dtype].itemsize if row.status == "ok" else 0)


def make_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    return blocks.make_batch([blocks.RowBlock.of(row) for row in rows])


def make_rows(start: int, stop: int) -> pa.RecordBatch:
    return make_batch([make_row(number) for number in range(start, stop)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("journal", "manifest"):
        (tmp_path / name).mkdir()
    return tmp_path


def steps(table: pa.Table) -> list[int]:
    """The rows, which `make_row` numbers by their step."""
    return table["step"].to_pylist()


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


# The schema ---------------------------------------------------------------------------------------------------------


def test_the_schema_is_pinned() -> None:
    fields = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in SCHEMA]
    assert fields == [
        "phase: string not null",
        "epoch: int64 not null",
        "batch: int64 not null",
        "call: int64 not null",
        "backward: int32 not null",
        "step: int64 not null",
        "layer: string not null",
        "kind: string not null",
        "leaf: string not null",
        "rank: int32 not null",
        "attempt: int32 not null",
        "array: string not null",
        "shape: list<item: int64> not null",
        "dtype: string not null",
        "nbytes: int64 not null",
        "wall_time: timestamp[us, tz=UTC] not null",
        "loss_scale: double",
        "shard: string not null",
        "offset: int64 not null",
        "length: int64 not null",
        "crc32c: uint32 not null",
        "status: string not null",
        "reason: string not null",
        "structure: string not null",
    ]
    assert SCHEMA.names == [name for name, _, _ in MANIFEST_COLUMNS]


AWKWARD_ROWS = [
    make_row(0),
    make_row(1, layer="", leaf="hidden.0", shape=(), loss_scale=65536.0),
    make_row(2, layer="層/\n🙂\0", shape=(2**62, 0, 1), offset=2**62, crc32c=2**32 - 1, epoch=2**62, batch=2**62, step=2**62),
    make_row(3, status="dropped", reason="the staging buffer of 65,536 bytes was full", array="", shard="", offset=0, length=0, crc32c=0),
    make_row(4, backward=2**31 - 1, rank=2**31 - 1, attempt=7, loss_scale=float("inf"), wall_time=0),
]


@pytest.mark.parametrize(
    "convert", [lambda batch: batch, lambda batch: stream_to_rows(rows_to_stream([batch]))[0]], ids=["batch", "stream"]
)
def test_rows_come_back(convert: Callable[[pa.RecordBatch], pa.RecordBatch]) -> None:
    batch = convert(make_batch(AWKWARD_ROWS))
    assert batch.schema == SCHEMA
    for row, found in zip(AWKWARD_ROWS, batch.to_pylist(), strict=True):
        found["wall_time"] = round(found["wall_time"].timestamp() * 1e6)
        assert found == {**dict(list(row._asdict().items())[: len(SCHEMA)]), "shape": list(row.shape)}


def test_rows_come_back_through_journal_and_part(run: Path) -> None:
    writer = ManifestWriter(str(run))
    writer.append(make_batch(AWKWARD_ROWS))
    from_journal = read_manifest(str(run))
    writer.mark_durable()
    writer.finish_segment()
    from_part = read_manifest(str(run))
    expected = pa.Table.from_batches([make_batch(AWKWARD_ROWS)])
    assert from_journal.equals(expected)
    assert from_part.equals(expected)
    assert from_part.schema == SCHEMA


def test_rows_of_a_shard_follow_those_it_carried_before() -> None:
    earlier = rows_to_stream([make_rows(0, 3), make_rows(3, 4)])
    both = rows_to_stream([make_rows(4, 9)], earlier)
    assert steps(pa.Table.from_batches(stream_to_rows(both))) == list(range(9))
    assert stream_to_rows(rows_to_stream([])) == []


# Frames -------------------------------------------------------------------------------------------------------------


def frame(kind: int, payload: bytes) -> bytes:
    head = struct.pack("<II", len(payload), kind)
    return head + struct.pack("<I", crc32c(head + payload)) + payload


def test_exact_bytes_of_a_segment(run: Path) -> None:
    writer = ManifestWriter(str(run), rank=2, attempt=1)
    assert os.listdir(run / "journal") == [], "no segment before there is a row"
    writer.mark_durable()
    assert os.listdir(run / "journal") == []
    first, second = make_rows(0, 3), make_rows(3, 5)
    writer.append(first)
    writer.append(second)
    writer.mark_durable()
    writer.close()
    assert os.listdir(run / "journal") == ["r2-a1-000000.journal"]
    assert (run / "journal" / "r2-a1-000000.journal").read_bytes() == b"".join(
        [
            frame(1, bytes(SCHEMA.serialize())),
            frame(2, bytes(first.serialize())),
            frame(2, bytes(second.serialize())),
            frame(3, struct.pack("<Q", 5)),
        ]
    )
    assert (FRAME_SCHEMA, FRAME_ROWS, FRAME_SYNC, FRAME_BYTES) == (1, 2, 3, 12)


@pytest.fixture
def segment(run: Path) -> tuple[bytes, list[int]]:
    """A segment's bytes, and where its frames end: schema, rows 0 – 2, sync, rows 3 – 4."""
    writer = ManifestWriter(str(run))
    ends = []
    writer.append(make_rows(0, 3))
    path = only_file(run / "journal")
    ends.append(path.stat().st_size)
    writer.mark_durable()
    ends.append(path.stat().st_size)
    writer.append(make_rows(3, 5))
    ends.append(path.stat().st_size)
    writer.close()
    contents = path.read_bytes()
    return contents, [FRAME_BYTES + struct.unpack_from("<I", contents)[0], *ends]


def found_steps(contents: bytes) -> list[int]:
    return [step for batch in read_segment(contents).batches for step in batch["step"].to_pylist()]


def test_a_whole_segment(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    read = read_segment(contents)
    assert [batch.num_rows for batch in read.batches] == [3, 2]
    assert pa.Table.from_batches(read.batches).equals(pa.Table.from_batches([make_rows(0, 5)]).combine_chunks())
    assert read.num_durable == 3
    assert read.num_bytes == len(contents) == ends[-1]


def test_a_frame_that_is_torn_at_any_byte_is_left_out(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    for size in range(ends[2], len(contents)):
        read = read_segment(contents[:size])
        assert [batch.num_rows for batch in read.batches] == [3], size
        assert (read.num_durable, read.num_bytes) == (3, ends[2]), size
    assert found_steps(contents[: ends[2]]) == [0, 1, 2]


def test_a_segment_that_is_cut_anywhere_reads_as_far_as_it_is_whole(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    for size in range(0, len(contents) + 1, 7):
        read = read_segment(contents[:size])
        assert read.num_bytes == max([0, *(end for end in ends if end <= size)])
        assert found_steps(contents[:size]) == [*(range(3) if size >= ends[1] else ()), *(range(3, 5) if size >= ends[3] else ())]
        assert read.num_durable == (3 if size >= ends[2] else 0)


def test_a_flipped_bit_never_gives_a_wrong_row(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    for position in range(len(contents)):
        damaged = bytearray(contents)
        damaged[position] ^= 1 << position % 8
        before = max([0, *(end for end in ends if end <= position)])
        read = read_segment(bytes(damaged))
        assert read.num_bytes == before, position
        assert set(found_steps(bytes(damaged))) <= {*found_steps(contents)}, position
        assert found_steps(bytes(damaged))[:3] == ([0, 1, 2] if position >= ends[1] else found_steps(bytes(damaged))[:3]), position


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("position", range(FRAME_BYTES))
def test_every_bit_of_a_header_counts(segment: tuple[bytes, list[int]], position: int, bit: int) -> None:
    contents, ends = segment
    damaged = bytearray(contents)
    damaged[ends[2] + position] ^= 1 << bit
    assert read_segment(bytes(damaged)).num_bytes == ends[2]


@pytest.mark.parametrize("zeros", [1, 11, 12, 13, 4096, 100_000])
def test_a_tail_of_zeros_is_no_frame(segment: tuple[bytes, list[int]], zeros: int) -> None:
    """File systems extend a file before its bytes arrive."""
    contents, ends = segment
    for size in (0, ends[0], ends[2], ends[2] + 5, ends[2] + 500, len(contents)):
        read = read_segment(contents[:size] + bytes(zeros))
        assert read.num_bytes == max([0, *(end for end in ends if end <= size)])
    assert found_steps(contents + bytes(zeros)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("contents", [b"", b"\0", b"\xff" * 12, b"\xff" * 5000, b"PAR1" * 100])
def test_what_is_no_segment_has_no_rows(contents: bytes) -> None:
    read = read_segment(contents)
    assert (read.batches, read.num_durable, read.num_bytes) == ([], 0, 0)


def test_rows_before_a_schema_are_left_out(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    assert found_steps(contents[ends[0] :]) == []


def test_frames_of_a_kind_to_come_are_skipped(segment: tuple[bytes, list[int]]) -> None:
    contents, ends = segment
    assert found_steps(contents[: ends[1]] + frame(9, b"something") + contents[ends[1] :]) == [0, 1, 2, 3, 4]


def test_sync_marks_count_the_rows_of_their_segment(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/dev/fd/{descriptor}")) if os.path.islink(f"/dev/fd/{descriptor}") else "?")
        fsync(descriptor)

    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 3))
    monkeypatch.setattr(os, "fsync", note)
    writer.append(make_rows(3, 4))
    assert synced == [], "to acknowledge is not to sync"
    writer.mark_durable()
    assert synced in ([segment_name(0, 0, 0)], ["?"])
    monkeypatch.undo()
    writer.append(make_rows(4, 9))
    assert read_segment(only_file(run / "journal").read_bytes()).num_durable == 4
    writer.mark_durable()
    assert read_segment(only_file(run / "journal").read_bytes()).num_durable == 9
    writer.finish_segment()
    writer.append(make_rows(9, 11))
    writer.mark_durable()
    assert read_segment(only_file(run / "journal").read_bytes()).num_durable == 2
    writer.close()


def test_appending_writes_the_whole_frame_even_in_short_writes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:97]))
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 50))
    writer.append(make_rows(50, 60))
    writer.close()
    assert steps(read_manifest(str(run))) == list(range(60))


def test_two_processes_never_write_one_segment(run: Path) -> None:
    writer, other = ManifestWriter(str(run)), ManifestWriter(str(run))
    writer.append(make_rows(0, 3))
    with pytest.raises(FileExistsError):
        other.append(make_rows(3, 4))
    writer.append(make_rows(3, 5))
    writer.close()
    assert steps(read_manifest(str(run))) == list(range(5))


# Segments become parts ----------------------------------------------------------------------------------------------


def test_a_segment_becomes_a_part_by_its_number_of_rows(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SEGMENT_ROWS", 10)
    writer = ManifestWriter(str(run))
    number = 0
    seen = []
    for _ in range(12):
        writer.append(make_rows(number, number + 3))
        number += 3
        assert steps(read_manifest(str(run))) == list(range(number))
        if writer.is_segment_full:
            seen.append(number)
            writer.mark_durable()
            writer.finish_segment()
            assert os.listdir(run / "journal") == []
            assert not writer.is_segment_full
            assert steps(read_manifest(str(run))) == list(range(number))
    assert seen == [12, 24, 36]
    parts = sorted(os.listdir(run / "manifest"))
    assert [name[:13] for name in parts] == ["r0-a0-000000-", "r0-a0-000001-", "r0-a0-000002-"]
    assert [pq.read_metadata(run / "manifest" / name).num_rows for name in parts] == [12, 12, 12]
    writer.close()


def test_a_recording_cuts_its_manifest_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn, ones

    import hookstore

    monkeypatch.setattr(manifest, "SEGMENT_ROWS", 10)
    model = nn.ReLU()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20) as recorder:
        for _ in recorder.batches(range(35), epoch=0):
            model(ones(4))
            recorder.flush()
        assert len(list((tmp_path / "run" / "journal").glob("*.journal"))) == 1
        assert len(list((tmp_path / "run" / "manifest").iterdir())) == 3
    assert len(list((tmp_path / "run" / "manifest").iterdir())) == 4
    assert read_manifest(str(tmp_path / "run"))["batch"].to_pylist() == list(range(35))


def test_the_part_is_complete_before_its_segment_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 5))
    seen: list[list[int]] = []
    unlink, replace = os.unlink, os.replace

    def look_and(call: Callable[..., None]) -> Callable[..., None]:
        def looking(*arguments: str) -> None:
            seen.append(steps(read_manifest(str(run))))
            call(*arguments)
            seen.append(steps(read_manifest(str(run))))

        return looking

    monkeypatch.setattr(os, "unlink", look_and(unlink))
    monkeypatch.setattr(os, "replace", look_and(replace))
    writer.finish_segment()
    assert seen == [list(range(5))] * 4


def test_nothing_to_finish(run: Path) -> None:
    writer = ManifestWriter(str(run))
    writer.finish_segment()
    writer.close()
    assert os.listdir(run / "manifest") == []
    assert read_manifest(str(run)).equals(SCHEMA.empty_table())


# Reading ------------------------------------------------------------------------------------------------------------


def test_a_segment_and_its_part_count_once(run: Path) -> None:
    """A kill can come between the part's rename and the segment's unlink."""
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 3))
    writer.append(make_rows(3, 5))
    segment_path = only_file(run / "journal")
    contents = segment_path.read_bytes()
    writer.finish_segment()
    writer.append(make_rows(5, 8))
    writer.close()
    for left_behind in (contents, contents[:-1], b""):
        segment_path.write_bytes(left_behind)
        assert steps(read_manifest(str(run))) == list(range(8))
    segment_path.unlink()
    assert steps(read_manifest(str(run))) == list(range(8))


def test_a_segment_that_becomes_a_part_meanwhile_is_not_missed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 5))
    listdir = os.listdir

    def listdir_and_finish(path: str) -> list[str]:
        names = listdir(path)
        if os.path.basename(path) == "journal":
            writer.finish_segment()
        return names

    monkeypatch.setattr(os, "listdir", listdir_and_finish)
    assert steps(read_manifest(str(run))) == list(range(5))
    assert listdir(run / "journal") == []


def test_rows_are_in_the_order_of_attempts_ranks_and_segments(run: Path) -> None:
    number = 0
    expected = []
    for attempt in (0, 1):
        for rank in (0, 1, 10):
            writer = ManifestWriter(str(run), rank, attempt)
            for index in range(3):
                writer.append(make_batch([make_row(number, rank=rank, attempt=attempt)]))
                number += 1
                expected.append((attempt, rank, index))
                if index < 2:
                    writer.finish_segment()
            writer.close()
    found = read_manifest(str(run))
    assert steps(found) == list(range(number))
    assert list(zip(found["attempt"].to_pylist(), found["rank"].to_pylist(), strict=True)) == [place[:2] for place in expected]


def test_other_files_are_left_alone(run: Path) -> None:
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 5))
    writer.close()
    (run / "manifest" / ".r0-a0-000000-00000000.parquet.writing").write_bytes(b"half a part")
    (run / "manifest" / "notes.parquet").write_bytes(b"")
    (run / "journal" / "notes.txt").write_bytes(b"mine")
    assert steps(read_manifest(str(run))) == list(range(5))


def test_a_run_without_manifest_directories_has_no_rows(tmp_path: Path) -> None:
    assert read_manifest(str(tmp_path)).num_rows == 0


@pytest.fixture
def part(run: Path) -> Path:
    writer = ManifestWriter(str(run))
    writer.append(make_rows(0, 1000))
    writer.finish_segment()
    return only_file(run / "manifest")


def test_the_name_of_a_part_carries_its_checksum(part: Path) -> None:
    contents = part.read_bytes()
    assert part.name == f"r0-a0-000000-{crc32c(contents):08x}.parquet"
    assert re.fullmatch(r"r0-a0-000000-[0-9a-f]{8}\.parquet", part.name)


def test_a_damaged_part_is_told(run: Path, part: Path) -> None:
    contents = part.read_bytes()
    for position in range(0, len(contents), 97):
        part.write_bytes(contents[:position] + bytes([contents[position] ^ 0x04]) + contents[position + 1 :])
        with pytest.raises(CorruptRunError, match="crc32c") as caught:
            read_manifest(str(run))
        assert caught.value.path == str(part)
        assert isinstance(caught.value, OSError)


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_truncated_part_is_told(run: Path, part: Path, size: int) -> None:
    os.truncate(part, size)
    with pytest.raises(CorruptRunError, match=re.escape(part.name)):
        read_manifest(str(run))


@pytest.mark.parametrize("contents", [b"", b"PAR1", b"no parquet at all"])
def test_a_part_that_is_none_is_told(run: Path, contents: bytes) -> None:
    """Its checksum is right, so nobody damaged it: it never was a part."""
    (run / "manifest" / part_name(0, 0, 0, crc32c(contents))).write_bytes(contents)
    with pytest.raises(CorruptRunError):
        read_manifest(str(run))


def test_a_part_of_another_schema_is_told(run: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"epoch": [1]}), sink)
    contents = sink.getvalue().to_pybytes()
    (run / "manifest" / part_name(0, 0, 0, crc32c(contents))).write_bytes(contents)
    with pytest.raises(CorruptRunError):
        read_manifest(str(run))


@pytest.mark.parametrize(
    "payload",
    [
        frame(FRAME_SCHEMA, b"no schema"),
        frame(FRAME_SCHEMA, bytes(pa.schema([("epoch", pa.int64())]).serialize()))
        + frame(FRAME_ROWS, bytes(pa.record_batch({"epoch": pa.array([1])}).serialize())),
        frame(FRAME_SCHEMA, bytes(SCHEMA.serialize())) + frame(FRAME_ROWS, b"no rows"),
        frame(FRAME_SCHEMA, bytes(SCHEMA.serialize())) + frame(FRAME_SYNC, b"1234"),
    ],
    ids=["schema", "another schema", "rows", "sync"],
)
def test_a_segment_of_right_checksums_and_nonsense_is_told(run: Path, payload: bytes) -> None:
    (run / "journal" / segment_name(0, 0, 0)).write_bytes(payload)
    with pytest.raises(CorruptRunError):
        read_manifest(str(run))


@pytest.mark.parametrize("damage", ["offsets", "null"])
def test_rows_that_arrow_would_read_out_of_bounds_are_told(run: Path, damage: str) -> None:
    """Whoever wrote the checksums can write anything else, too: Arrow checks little unless it is asked to, and crashes later."""
    payload = bytearray(make_batch([make_row(number, layer=f"L{number:03d}") for number in range(4)]).serialize())
    if damage == "offsets":
        offsets = struct.pack("<5i", 0, 4, 8, 12, 16)
        assert payload.count(offsets) == 1
        start = payload.find(offsets)
        payload[start : start + len(offsets)] = struct.pack("<5i", 0, 1 << 30, 8, 12, 16)
    else:
        nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
        columns = make_rows(0, 4).columns
        columns[SCHEMA.names.index("epoch")] = pa.array([0, 1, None, 3], type=pa.int64())
        payload = bytearray(pa.RecordBatch.from_arrays(columns, schema=nullable).serialize())
    contents = frame(FRAME_SCHEMA, bytes(SCHEMA.serialize())) + frame(FRAME_ROWS, bytes(payload))
    (run / "journal" / segment_name(0, 0, 0)).write_bytes(contents)
    with pytest.raises(CorruptRunError):
        read_manifest(str(run))


# Parquet ------------------------------------------------------------------------------------------------------------


def realistic_rows(num_rows: int) -> list[Row]:
    """What a run of a small network writes: eight layers, two kinds, staged one after another and acknowledged region by region."""
    rng = np.random.default_rng(0)
    layers = [*(f"features.{number}" for number in range(6)), "classifier.0", "classifier.3"]
    shapes = [(64, 32, 28, 28), (64, 32, 28, 28), (64, 64, 14, 14), (64, 64, 14, 14), (64, 128, 7, 7), (64, 128, 7, 7), (64, 256), (64, 10)]
    strides = [math.prod(shape) * 4 + 64 for shape in shapes]
    pauses = rng.integers(50, 3000, num_rows + 16).tolist()
    checksums = rng.integers(0, 2**32, num_rows + 16).tolist()
    open_regions: dict[tuple[int, str], list[Row]] = {}
    acknowledged: list[Row] = []
    num_staged, time_us, step = 0, 1_700_000_000_000_000, 0
    while num_staged < num_rows:
        epoch, batch = divmod(step, 938)
        time_us += int(rng.integers(20_000, 60_000))
        for kind, order in (("activation", range(8)), ("gradient", range(7, -1, -1))):
            for place in order:
                time_us += pauses[num_staged]
                shard, within = divmod(batch, max(1, (256 << 20) // strides[place]))
                shape = shapes[place] if batch < 937 else (32, *shapes[place][1:])
                region = open_regions.setdefault((place, kind), [])
                region.append(
                    make_row(
                        num_staged,
                        epoch=epoch,
                        batch=batch,
                        step=step,
                        layer=layers[place],
                        kind=kind,
                        array=f"{layers[place]}/{kind}",
                        shape=shape,
                        nbytes=math.prod(shape) * 4,
                        wall_time=time_us,
                        shard=f"c.{epoch}.{shard}" + ".0" * len(shape),
                        offset=within * strides[place],
                        length=strides[place] - 60,
                        crc32c=checksums[num_staged],
                    )
                )
                num_staged += 1
                if len(region) * strides[place] >= 4 << 20:
                    acknowledged += region
                    region.clear()
        step += 1
    return acknowledged + [row for region in open_regions.values() for row in region]


def test_a_row_takes_at_most_sixteen_bytes() -> None:
    rows = realistic_rows(100_000)
    num_rows = len(rows)
    batches = [make_batch(rows[start : start + 1000]) for start in range(0, num_rows, 1000)]
    contents = encode_part(batches)
    per_row = len(contents) / num_rows
    assert num_rows >= 100_000
    assert per_row <= 16, f"a part of {num_rows:,} rows has {len(contents):,} bytes, {per_row:.2f} a row"
    table = pq.read_table(pa.BufferReader(contents), page_checksum_verification=True).cast(SCHEMA)
    assert table.equals(pa.Table.from_batches(batches))


def test_pages_have_checksums() -> None:
    """One flipped bit gave wrong values in most trials without them."""
    contents = encode_part([make_rows(0, 5000)])
    column = pq.read_metadata(pa.BufferReader(contents)).row_group(0).column(SCHEMA.names.index("step"))
    start = column.dictionary_page_offset or column.data_page_offset
    damaged = bytearray(contents)
    damaged[start + column.total_compressed_size - 100] ^= 0x01
    with pytest.raises(OSError, match=r"(?i)crc|checksum"):
        pq.read_table(pa.BufferReader(bytes(damaged)), page_checksum_verification=True)


def test_a_part_is_one_row_group_and_plain_parquet(part: Path) -> None:
    metadata = pq.read_metadata(part)
    assert (metadata.num_rows, metadata.num_row_groups) == (1000, 1)
    assert {metadata.row_group(0).column(number).compression for number in range(metadata.num_columns)} == {"ZSTD"}
    assert pq.read_schema(part).equals(SCHEMA)
    assert pq.read_table(part)["wall_time"].type == pa.timestamp("us", tz="UTC")


def test_rows_kept_for_a_shard_stay_few_batches_in_their_order() -> None:
    from hookstore.manifest import RowLog

    log = RowLog()
    for step in range(5000):
        log.append(make_rows(step, step + 1))
    assert sum(map(len, log._levels)) < 3 * 64
    assert [step for batch in log.batches for step in batch["step"].to_pylist()] == list(range(5000))
