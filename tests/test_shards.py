"""`hookstore.shards`: the bytes of shard files, and what happens when the operating system does not do as asked."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import pickle
import re
import stat
import struct
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from hookstore import files as files_module
from hookstore.codecs import codec_metadata, compressor
from hookstore.errors import CorruptRunError, HookstoreError, OptionError
from hookstore.files import DirectWriter, sync_paths, write_atomically
from hookstore.format import DTYPES, MISSING, PAGE_BYTES, TRAILER_BYTES, TRAILER_FORMAT, TRAILER_MAGIC, ArraySpec, unsealed_name
from hookstore.shards import ShardFiles, ShardReader, ShardWriter, chunk_checksums, publish, read_sealed

O_DIRECT = 0o40000  # of the simulated file system, on every platform


def make_spec(shape: tuple[int, ...] = (1, 5), chunk: tuple[int, ...] = (4, 3), codec: str | None = None) -> ArraySpec:
    return ArraySpec("layer", "activation", "train", "", "float32", "activation", chunk, shape, codec=codec)


def page_memory(num_bytes: int, fill: int = 0xEE) -> memoryview:
    """Page-aligned memory that holds something."""
    memory = memoryview(mmap.mmap(-1, num_bytes))
    memory[:] = bytes([fill]) * num_bytes
    return memory


def chunk(number: int, spec: ArraySpec) -> bytes:
    """A chunk unlike every other."""
    return np.random.default_rng(number).integers(0, 256, spec.chunk_bytes, dtype=np.uint8).tobytes()


def region(spec: ArraySpec, numbers: list[int]) -> memoryview:
    """Memory in which those chunks lie as the stager leaves them."""
    memory = page_memory(-(-len(numbers) * spec.stride_bytes // PAGE_BYTES) * PAGE_BYTES)
    for slot, number in enumerate(numbers):
        memory[slot * spec.stride_bytes : slot * spec.stride_bytes + spec.chunk_bytes] = chunk(number, spec)
    return memory


def append(shard: ShardWriter, numbers: list[int], entries: list[int] | None = None) -> tuple[list[int], list[int]]:
    return append_slots(shard, region(shard.spec, numbers), list(range(len(numbers))), entries or numbers)


def append_slots(shard: ShardWriter, memory: memoryview, slots: list[int], entries: list[int]) -> tuple[list[int], list[int]]:
    crcs = chunk_checksums(memory, shard.spec, np.array(slots))
    offsets = shard.append_region(memory, np.array(slots), np.array(entries), crcs)
    return offsets.tolist(), crcs.tolist()


def seal(shard: ShardWriter, rows: bytes) -> None:
    shard.finish(rows)
    publish([shard], os.path.dirname(shard.path))


def with_crc(contents: bytes) -> bytes:
    return contents + crc32c(contents).to_bytes(4, "little")


def index_bytes(num_entries: int, entries: dict[int, tuple[int, int]]) -> bytes:
    pairs = [entries.get(entry, (MISSING, MISSING)) for entry in range(num_entries)]
    return with_crc(b"".join(struct.pack("<QQ", *pair) for pair in pairs))


@pytest.fixture
def files() -> Iterator[ShardFiles]:
    made = ShardFiles()
    yield made
    made.close()


@pytest.fixture
def array(tmp_path: Path) -> Path:
    path = tmp_path / "layers" / "layer" / "activation"
    path.mkdir(parents=True)
    return path


class StrictDirectIO:
    """A file system that takes O_DIRECT as Linux documents it: address, offset and length in multiples of 4,096, else EINVAL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuse_open: bool = False, refuse_write: bool = False) -> None:
        self.direct: set[int] = set()
        self.num_writes = 0
        self.num_refused = 0
        self.counts: Iterator[int] = iter(())
        self.error: tuple[int, OSError] | None = None  # raised by the write of that number
        self._refuse_open, self._refuse_write = refuse_open, refuse_write
        self._open, self._pwrite, self._close = os.open, os.pwrite, os.close
        monkeypatch.setattr(files_module, "_O_DIRECT", O_DIRECT)
        for name in ("open", "pwrite", "close"):
            monkeypatch.setattr(os, name, getattr(self, name))

    def open(self, path: Any, flags: int, mode: int = 0o777, **keywords: Any) -> int:
        if flags & O_DIRECT and flags & os.O_WRONLY:
            if self._refuse_open:
                self.num_refused += 1
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            descriptor = self._open(path, flags & ~O_DIRECT, mode, **keywords)
            self.direct.add(descriptor)
            return descriptor
        return self._open(path, flags, mode, **keywords)

    def close(self, descriptor: int) -> None:
        self.direct.discard(descriptor)
        self._close(descriptor)

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        number, self.num_writes = self.num_writes, self.num_writes + 1
        if self.error is not None and self.error[0] == number:
            raise self.error[1]
        if descriptor in self.direct:
            address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data
            if self._refuse_write or address % PAGE_BYTES or offset % PAGE_BYTES or len(buffer) % PAGE_BYTES:
                self.num_refused += 1
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        count = min(len(buffer), next(self.counts, len(buffer)))
        return self._pwrite(descriptor, buffer[:count], offset)


# Bytes --------------------------------------------------------------------------------------------------------------


def test_exact_bytes_of_a_sealed_shard(array: Path, files: ShardFiles) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 2), files)
    offsets, crcs = append(shard, [0, 2, 4])
    seal(shard, b"the rows")

    assert os.listdir(array) == ["c.0.2.0.0"]
    contents = (array / "c.0.2.0.0").read_bytes()
    chunks = [with_crc(chunk(number, spec)).ljust(64, b"\0") for number in (0, 2, 4)]
    index = index_bytes(5, {0: (0, 52), 2: (64, 52), 4: (128, 52)})
    trailer = struct.pack("<8sQQI4x", b"HKSTROWS", PAGE_BYTES, len(b"the rows"), crc32c(b"the rows"))
    assert contents == b"".join(
        [
            b"".join(chunks).ljust(PAGE_BYTES, b"\0"),
            b"the rows".ljust(PAGE_BYTES - len(trailer) - len(index), b"\0"),
            trailer,
            index,
        ]
    )
    assert len(contents) == 2 * PAGE_BYTES
    assert offsets == [0, 64, 128]
    assert crcs == [crc32c(chunk(number, spec)) for number in (0, 2, 4)]
    assert (len(trailer), struct.calcsize(TRAILER_FORMAT), TRAILER_MAGIC) == (TRAILER_BYTES, TRAILER_BYTES, b"HKSTROWS")


@pytest.mark.parametrize("num_rows_bytes", [0, 1, 8, 3900, PAGE_BYTES - 32 - 84, PAGE_BYTES - 32 - 83, 10_000, 5 << 20])
def test_a_sealed_shard_ends_with_its_index_on_a_page_boundary(array: Path, files: ShardFiles, num_rows_bytes: int) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 0), files)
    offsets, _ = append(shard, [1, 3])
    rows = np.random.default_rng(0).bytes(num_rows_bytes)
    seal(shard, rows)
    contents = (array / "c.0.0.0.0").read_bytes()
    assert len(contents) % PAGE_BYTES == 0
    assert contents.endswith(index_bytes(5, {1: (offsets[0], 52), 3: (offsets[1], 52)}))
    index, found = read_sealed(str(array / "c.0.0.0.0"), 5)
    assert found == rows
    assert index.tolist() == [[MISSING] * 2, [0, 52], [MISSING] * 2, [64, 52], [MISSING] * 2]


def test_appending_never_rewrites_earlier_blocks(array: Path, files: ShardFiles) -> None:
    spec = make_spec((1, 600), (7, 9))
    shard = ShardWriter(str(array), spec, (0, 0), files)
    hidden = array / unsealed_name(shard.key)
    written = b""
    places: dict[int, tuple[int, int]] = {}
    rng = np.random.default_rng(7)
    entry = 0
    while entry < 560:
        numbers = list(range(entry, entry + int(rng.integers(1, 40))))
        entry = numbers[-1] + 1
        offsets, crcs = append(shard, numbers)
        contents = hidden.read_bytes()
        assert contents[: len(written)] == written
        assert offsets[0] == len(written), "a region starts at the next page boundary"
        assert offsets[0] % PAGE_BYTES == 0
        assert len(contents) % PAGE_BYTES == 0
        written = contents
        places |= {number: (offset, crc) for number, offset, crc in zip(numbers, offsets, crcs, strict=True)}
    seal(shard, b"")
    contents = (array / shard.key).read_bytes()
    assert contents[: len(written)] == written
    index, _ = read_sealed(str(array / shard.key), 600)
    for number, (offset, crc) in places.items():
        assert offset % 64 == 0
        assert index[number].tolist() == [offset, spec.chunk_bytes + 4]
        assert contents[offset : offset + spec.chunk_bytes] == chunk(number, spec)
        assert contents[offset + spec.chunk_bytes : offset + spec.chunk_bytes + 4] == crc.to_bytes(4, "little")
    assert (index[max(places) + 1 :] == MISSING).all()


def test_only_the_kept_slots_enter_the_index(array: Path, files: ShardFiles) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 0), files)
    offsets, crcs = append_slots(shard, region(spec, [0, 1, 2]), [2, 0], [4, 3])
    assert offsets == [128, 0]
    assert crcs == [crc32c(chunk(2, spec)), crc32c(chunk(0, spec))]
    seal(shard, b"")
    index, _ = read_sealed(str(array / shard.key), 5)
    assert index.tolist() == [[MISSING] * 2] * 3 + [[0, 52], [128, 52]]


def test_encoded_chunks(array: Path, files: ShardFiles) -> None:
    spec = make_spec((1, 8))
    shard = ShardWriter(str(array), spec, (0, 0), files)
    first = [b"a" * 100, b"b", b"c" * 60, b"d" * 5000]
    second = [b"e" * 3, b"f" * 4092]
    offsets, lengths, crcs = shard.append_encoded(iter(first), [0, 1, 2, 3])
    before = (array / unsealed_name(shard.key)).read_bytes()
    more = shard.append_encoded(second, [6, 5])
    seal(shard, b"rows")
    assert offsets == [0, 128, 192, 256]
    assert lengths == [104, 5, 64, 5004]
    assert crcs == [crc32c(contents) for contents in first]
    assert more[0] == [2 * PAGE_BYTES, 2 * PAGE_BYTES + 64], "another append starts at the next page"
    contents = (array / shard.key).read_bytes()
    assert contents[: len(before)] == before
    assert len(before) == 2 * PAGE_BYTES
    index, rows = read_sealed(str(array / shard.key), 8)
    assert rows == b"rows"
    for entry, encoded in zip([0, 1, 2, 3, 6, 5], first + second, strict=True):
        offset, length = index[entry].tolist()
        assert contents[offset : offset + length] == with_crc(encoded)
    assert index[[4, 7]].tolist() == [[MISSING] * 2] * 2


def test_encoded_chunks_larger_than_the_buffer(array: Path, files: ShardFiles) -> None:
    chunks = [np.random.default_rng(number).bytes(3 << 20) for number in range(3)]
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    offsets, lengths, _ = shard.append_encoded(chunks, [0, 1, 2])
    contents = (array / unsealed_name(shard.key)).read_bytes()
    assert len(contents) % PAGE_BYTES == 0
    assert [contents[offset : offset + length] for offset, length in zip(offsets, lengths, strict=True)] == [
        with_crc(encoded) for encoded in chunks
    ]
    assert all(offset % 64 == 0 for offset in offsets)


@pytest.mark.parametrize("num_bytes", [1, 4092, 4093, 3 * PAGE_BYTES - 4, 3 * PAGE_BYTES - 3, 3 * PAGE_BYTES])
def test_a_chunk_in_pieces(array: Path, files: ShardFiles, num_bytes: int) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 0), files)
    append(shard, [0])
    contents = with_crc(np.random.default_rng(1).bytes(num_bytes))
    offset = shard.reserve(num_bytes)
    assert offset == PAGE_BYTES
    between, _ = append(shard, [1])  # another thread's capture
    assert between[0] >= offset + len(contents)
    assert between[0] % PAGE_BYTES == 0
    for start in range(0, len(contents), PAGE_BYTES):
        memory = page_memory(PAGE_BYTES, fill=0)
        piece = contents[start : start + PAGE_BYTES]
        memory[: len(piece)] = piece
        shard.write_piece(memory, offset + start)
    shard.finish_pieces(4, offset, num_bytes)
    seal(shard, b"")
    written = (array / shard.key).read_bytes()
    index, _ = read_sealed(str(array / shard.key), 5)
    assert index[4].tolist() == [offset, num_bytes + 4]
    assert written[offset : offset + num_bytes + 4] == contents
    assert written[between[0] : between[0] + spec.chunk_bytes] == chunk(1, spec)


def test_a_shard_is_full_when_every_entry_is_taken(array: Path, files: ShardFiles) -> None:
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0, 1, 2, 3])
    append(shard, [3])
    assert not shard.is_full
    append(shard, [4])
    assert shard.is_full


def test_the_last_chunk_of_an_entry_counts(array: Path, files: ShardFiles) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 0), files)
    append(shard, [7], [2])
    offsets, _ = append(shard, [8], [2])
    seal(shard, b"")
    index, _ = read_sealed(str(array / shard.key), 5)
    assert index[2].tolist() == [offsets[0], 52]


def test_a_sealed_shard_that_is_taken_up_again(array: Path, files: ShardFiles) -> None:
    spec = make_spec()
    first = ShardWriter(str(array), spec, (0, 0), files)
    append(first, [0, 3])
    seal(first, b"rows of the first")
    sealed = array / first.key
    before = sealed.read_bytes()

    again = ShardWriter(str(array), spec, (0, 0), files)
    assert again.take_earlier_rows() == b"rows of the first"
    assert not again.is_full
    offsets, _ = append(again, [1])
    append(again, [2])
    assert sealed.read_bytes() == before, "the published file is left alone until the new one is complete"
    assert sorted(os.listdir(array)) == [f".{first.key}.unsealed", first.key]
    append(again, [4])
    assert again.is_full
    seal(again, b"all rows")

    assert os.listdir(array) == [first.key]
    contents = sealed.read_bytes()
    assert contents[: len(before)] == before, "who holds the old index finds its chunks where they were"
    index, rows = read_sealed(str(sealed), 5)
    assert rows == b"all rows"
    assert index[0].tolist() == [0, 52]
    assert index[3].tolist() == [64, 52]
    assert index[1].tolist() == [offsets[0], 52]
    assert offsets[0] == len(before)
    for number in range(5):
        offset = int(index[number][0])
        assert contents[offset : offset + 48] == chunk(number, spec)
    assert len(contents) % PAGE_BYTES == 0


def test_many_shards_keep_few_descriptors_open(array: Path, files: ShardFiles) -> None:
    if not os.path.isdir("/dev/fd"):
        pytest.skip("counts the descriptors in /dev/fd")
    spec = make_spec()
    before = len(os.listdir("/dev/fd"))
    files.writer._max_open = 128
    writers = [ShardWriter(str(array), spec, (0, number), files) for number in range(300)]
    for first in (0, 2):
        for number, shard in enumerate(writers):
            append(shard, [first, first + 1], [first, first + 1])
            if number % 50 == 49:
                assert len(os.listdir("/dev/fd")) - before <= 128
    for number, shard in enumerate(writers):
        contents = (array / unsealed_name(shard.key)).read_bytes()
        assert len(contents) == 2 * PAGE_BYTES, number
        assert contents[PAGE_BYTES + 64 : PAGE_BYTES + 112] == chunk(3, spec), number
    for shard in writers[::30]:
        seal(shard, b"")
        assert read_sealed(str(array / shard.key), 5)[0][3].tolist() == [PAGE_BYTES + 64, 52]
    assert len(os.listdir("/dev/fd")) - before <= 128
    files.close()
    assert len(os.listdir("/dev/fd")) == before


def test_a_sealed_shards_descriptor_is_let_go(array: Path, files: ShardFiles) -> None:
    """Its path will name another file when the shard is taken up again."""
    spec = make_spec()
    for numbers in ([0], [1], [2]):
        shard = ShardWriter(str(array), spec, (0, 0), files)
        append(shard, numbers)
        seal(shard, b"")
    index, _ = read_sealed(str(array / "c.0.0.0.0"), 5)
    contents = (array / "c.0.0.0.0").read_bytes()
    for number in range(3):
        offset = int(index[number][0])
        assert contents[offset : offset + 48] == chunk(number, spec)


# What the operating system does -------------------------------------------------------------------------------------


def write_a_shard(array: Path, files: ShardFiles) -> None:
    """Write regions, encoded chunks and a chunk in pieces into one shard, and check it."""
    spec = make_spec((1, 200), (16, 13))
    shard = ShardWriter(str(array), spec, (0, 0), files)
    append(shard, list(range(100)))
    encoded = {150: b"x" * 9000, 151: b"y"}
    shard.append_encoded(encoded.values(), list(encoded))
    memory = page_memory(2 * PAGE_BYTES, fill=0)
    piece = with_crc(np.random.default_rng(3).bytes(8000))
    memory[: len(piece)] = piece
    shard.write_piece(memory, offset := shard.reserve(8000))
    shard.finish_pieces(160, offset, 8000)
    append(shard, list(range(100, 150)))
    seal(shard, b"rows" * 2000)
    contents = (array / shard.key).read_bytes()
    index, rows = read_sealed(str(array / shard.key), 200)
    found = {entry: contents[offset : offset + length] for entry, (offset, length) in enumerate(index.tolist()) if offset != MISSING}
    assert found == {
        **{number: with_crc(chunk(number, spec)) for number in range(150)},
        **{entry: with_crc(contents) for entry, contents in encoded.items()},
        160: piece,
    }
    assert rows == b"rows" * 2000
    assert len(contents) % PAGE_BYTES == 0


def test_every_write_is_aligned_as_o_direct_wants_it(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = StrictDirectIO(monkeypatch)
    files = ShardFiles()
    assert files.writer.is_direct
    write_a_shard(array, files)
    assert files.writer.is_direct
    assert system.num_refused == 0
    assert system.num_writes >= 5
    files.close()
    assert not system.direct, "descriptors left open"


@pytest.mark.parametrize("refuse", ["open", "write"])
def test_without_o_direct_it_writes_through_the_page_cache(array: Path, monkeypatch: pytest.MonkeyPatch, refuse: str) -> None:
    system = StrictDirectIO(monkeypatch, refuse_open=refuse == "open", refuse_write=refuse == "write")
    files = ShardFiles()
    write_a_shard(array, files)
    assert not files.writer.is_direct
    assert system.num_refused == 1, "it asks once"
    files.close()
    assert not system.direct, "descriptors left open"


def test_o_direct_may_be_refused_late(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = StrictDirectIO(monkeypatch)
    files = ShardFiles()
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0, 1])
    system.error = (system.num_writes, OSError(errno.EINVAL, "not any more"))
    append(shard, [2, 3])
    append(shard, [4])
    seal(shard, b"")
    assert not files.writer.is_direct
    index, _ = read_sealed(str(array / shard.key), 5)
    contents = (array / shard.key).read_bytes()
    assert [contents[offset : offset + 48] for offset in index[:, 0].tolist()] == [chunk(number, shard.spec) for number in range(5)]
    files.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "counts",
    [
        [PAGE_BYTES],
        [PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES],
        [1],
        [PAGE_BYTES - 1, PAGE_BYTES + 1, 5000, 12_289],
        [100, 100, 0, 100, PAGE_BYTES + 100] * 4,
    ],
)
def test_short_writes_are_continued(array: Path, monkeypatch: pytest.MonkeyPatch, counts: list[int], direct: bool) -> None:
    system = StrictDirectIO(monkeypatch, refuse_open=not direct)
    files = ShardFiles()
    system.counts = iter(counts)
    write_a_shard(array, files)
    # After less than a page there is nothing that a direct write could go on from: it may be that there is no room for one.
    assert files.writer.is_direct == (direct and all(count == 0 or count >= PAGE_BYTES for count in counts))
    assert next(system.counts, None) is None, "the short writes have happened"
    assert system.num_refused == (0 if direct else 1)
    files.close()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_other_errors_name_the_file(array: Path, monkeypatch: pytest.MonkeyPatch, code: int, direct: bool) -> None:
    system = StrictDirectIO(monkeypatch, refuse_open=not direct)
    files = ShardFiles()
    shard = ShardWriter(str(array), make_spec((1, 300)), (0, 0), files)
    system.error = (1, OSError(code, os.strerror(code)))
    system.counts = iter([PAGE_BYTES])
    with pytest.raises(OSError, match=r"\.c\.0\.0\.0\.0\.unsealed") as caught:
        append(shard, list(range(300)))
    assert caught.value.errno == code
    assert caught.value.filename == str(array / ".c.0.0.0.0.unsealed")
    assert files.writer.is_direct == direct
    files.close()


def test_einval_without_o_direct_is_an_error(array: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = StrictDirectIO(monkeypatch, refuse_open=True)
    files = ShardFiles()
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0])
    system.error = (1, OSError(errno.EINVAL, "Invalid argument"))
    with pytest.raises(OSError, match="Invalid argument"):
        append(shard, [1])
    files.close()


def test_a_directory_that_is_gone_is_an_error(array: Path, files: ShardFiles) -> None:
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    array.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        append(shard, [0])
    assert caught.value.filename == str(array / ".c.0.0.0.0.unsealed")


def test_a_shard_is_not_published_when_its_sync_fails(array: Path, files: ShardFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0])

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        seal(shard, b"")
    assert os.listdir(array) == [".c.0.0.0.0.unsealed"]


def test_a_sync_that_fails_names_the_file(array: Path, files: ShardFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0])

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        seal(shard, b"")
    assert caught.value.filename == str(array / ".c.0.0.0.0.unsealed")


def test_bytes_are_on_the_device_before_the_shard_has_its_key(array: Path, files: ShardFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    append(shard, [0])
    order: list[str] = []
    pwrite, replace, fsync = os.pwrite, os.replace, os.fsync
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (order.append("write"), pwrite(*arguments))[1])
    monkeypatch.setattr(os, "replace", lambda *arguments: (order.append("rename"), replace(*arguments))[1])

    def look_and_sync(descriptor: int) -> None:
        order.append("sync the directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look_and_sync)
    seal(shard, b"")
    assert order == ["write", "sync", "rename", "sync the directory"]


def test_few_paths_are_synced_one_by_one_and_many_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To sync the whole file system is to wait for what every other process has written, too."""
    names = [tmp_path / f"{number}" for number in range(200)]
    for path in names:
        path.write_bytes(b"x")
    whole: list[int] = []
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(files_module.system, "sync_file_system", whole.append)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(descriptor), fsync(descriptor))[1])
    sync_paths([*map(str, names[:3]), str(tmp_path)], str(tmp_path))
    assert (len(synced), len(whole)) == (4, 0)
    sync_paths(map(str, names), str(tmp_path))
    assert (len(synced), len(whole)) == (4, 1)
    monkeypatch.setattr(files_module, "has_sync_file_system", False)
    sync_paths(map(str, names), str(tmp_path))
    assert len(synced) == 204


def test_a_sync_of_paths_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zarr.json"
    path.write_bytes(b"x")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        sync_paths([str(path)], str(tmp_path))
    assert caught.value.filename == str(path)


def test_write_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "zarr.json"
    write_atomically(str(path), b"old")
    order: list[str] = []
    write, replace, fsync = os.write, os.replace, os.fsync

    def checked_replace(source: str, destination: str) -> None:
        assert path.read_bytes() == b"old"
        assert os.path.basename(source).startswith("."), "plain readers ignore hidden files"
        assert Path(source).read_bytes() == b"new contents"
        order.append("rename")
        replace(source, destination)

    monkeypatch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:5]))
    monkeypatch.setattr(os, "replace", checked_replace)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("sync"), fsync(descriptor))[1])
    write_atomically(str(path), b"new contents")
    monkeypatch.undo()
    assert order == ["sync", "rename", "sync"]
    assert path.read_bytes() == b"new contents"
    assert os.listdir(tmp_path) == ["zarr.json"]


# Reading ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(array: Path, files: ShardFiles) -> tuple[Path, list[int], list[int]]:
    """A sealed shard of five chunks: its path, offsets and checksums."""
    shard = ShardWriter(str(array), make_spec(), (0, 0), files)
    offsets, crcs = append(shard, [0, 1, 2, 3, 4])
    seal(shard, b"some rows")
    return array / shard.key, offsets, crcs


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[ShardReader]:
    made = ShardReader(str(tmp_path / "layers"))
    yield made
    made.close()


def read(reader: ShardReader, offset: int, crc: int, shard: str = "c.0.0.0.0", length: int = 52, size: int = 48) -> bytes:
    return bytes(reader.read("layer/activation", shard, offset, length, crc, None, size))


def test_reading_chunks(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    for number, (offset, crc) in enumerate(zip(*sealed[1:], strict=True)):
        for _ in range(2):
            assert read(reader, offset, crc) == chunk(number, make_spec())
    contents = reader.read("layer/activation", "c.0.0.0.0", 0, 52, sealed[2][0], None, 48)
    assert contents.readonly


@pytest.mark.parametrize("position", [0, 1, 47])
def test_a_damaged_chunk_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader, position: int) -> None:
    path, offsets, crcs = sealed
    with path.open("r+b") as file:
        file.seek(offsets[2] + position)
        byte = file.read(1)[0]
        file.seek(offsets[2] + position)
        file.write(bytes([byte ^ 1]))
    for _ in range(2):
        with pytest.raises(CorruptRunError, match="crc32c") as caught:
            read(reader, offsets[2], crcs[2])
        assert caught.value.path == str(path)
        assert str(path) in str(caught.value)
    assert read(reader, offsets[1], crcs[1]) == chunk(1, make_spec())


def test_a_checksum_in_the_manifest_that_does_not_match_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    with pytest.raises(CorruptRunError, match=f"{sealed[2][0] ^ 1:#010x}"):
        read(reader, 0, sealed[2][0] ^ 1)


@pytest.mark.parametrize("size", [0, 1, 64 + 51])
def test_a_truncated_shard_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader, size: int) -> None:
    path, offsets, crcs = sealed
    os.truncate(path, size)
    with pytest.raises(CorruptRunError, match="ends before byte 116") as caught:
        read(reader, offsets[1], crcs[1])
    assert caught.value.path == str(path)


def test_a_shard_that_just_holds_the_chunk_is_read(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    path, offsets, crcs = sealed
    os.truncate(path, 64 + 52)
    assert read(reader, offsets[1], crcs[1]) == chunk(1, make_spec())


def test_a_missing_shard_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    with pytest.raises(CorruptRunError, match=r"c\.9\.9\.0\.0 is missing"):
        read(reader, 0, 0, shard="c.9.9.0.0")


def test_an_offset_far_beyond_the_end_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    with pytest.raises(CorruptRunError, match="ends before"):
        read(reader, 1 << 62, 0)


def test_a_chunk_of_another_size_than_its_shape_is_told(sealed: tuple[Path, list[int], list[int]], reader: ShardReader) -> None:
    with pytest.raises(CorruptRunError, match="has 48 bytes, its shape needs 96"):
        read(reader, 0, sealed[2][0], size=96)


def test_shards_are_read_under_both_names(array: Path, files: ShardFiles, reader: ShardReader) -> None:
    spec = make_spec()
    shard = ShardWriter(str(array), spec, (0, 0), files)
    offsets, crcs = append(shard, [0])
    assert read(reader, offsets[0], crcs[0]) == chunk(0, spec)
    more, more_crcs = append(shard, [1])
    assert read(reader, more[0], more_crcs[0]) == chunk(1, spec), "a map of the shorter file must not be kept"
    seal(shard, b"")
    assert read(reader, offsets[0], crcs[0]) == chunk(0, spec)
    again = ShardWriter(str(array), spec, (0, 0), files)
    late, late_crcs = append(again, [2])
    assert read(reader, late[0], late_crcs[0]) == chunk(2, spec), "the sealed shard lacks it, its hidden clone has it"
    seal(again, b"")
    fresh = ShardReader(str(array.parent.parent))
    for number, (offset, crc) in enumerate([(offsets[0], crcs[0]), (more[0], more_crcs[0]), (late[0], late_crcs[0])]):
        assert read(reader, offset, crc) == read(fresh, offset, crc) == chunk(number, spec)
    fresh.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="counts maps in /proc/self/maps")
def test_few_maps_and_no_descriptors_are_kept(array: Path, files: ShardFiles) -> None:
    spec = make_spec()
    places = []
    for number in range(20):
        shard = ShardWriter(str(array), spec, (0, number), files)
        places.append(append(shard, [number], [0]))
        seal(shard, b"")
    files.close()

    def maps() -> int:
        return Path("/proc/self/maps").read_text().count(str(array))

    descriptors = len(os.listdir("/proc/self/fd"))
    reader = ShardReader(str(array.parent.parent), max_maps=4)
    for _ in range(2):
        for number, (offsets, crcs) in enumerate(places):
            assert read(reader, offsets[0], crcs[0], shard=f"c.0.{number}.0.0") == chunk(number, spec)
            assert maps() <= 4
    assert maps() == 4
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4, "Python's mmap keeps one descriptor a map"
    kept = reader.read("layer/activation", "c.0.7.0.0", places[7][0][0], 52, places[7][1][0], None, 48)
    reader.close()
    assert maps() == 1
    assert bytes(kept) == chunk(7, spec), "what was read stays valid"
    kept.release()
    assert maps() == 0


@pytest.mark.parametrize("size", [0, 50, 100, 4000])
def test_read_sealed_of_a_truncated_file(sealed: tuple[Path, list[int], list[int]], size: int) -> None:
    os.truncate(sealed[0], size)
    with pytest.raises(CorruptRunError) as caught:
        read_sealed(str(sealed[0]), 5)
    assert caught.value.path == str(sealed[0])


def test_read_sealed_tells_every_flipped_byte_of_rows_trailer_and_index(sealed: tuple[Path, list[int], list[int]]) -> None:
    path = sealed[0]
    contents = path.read_bytes()
    used = [*range(PAGE_BYTES, PAGE_BYTES + 9), *range(len(contents) - 84 - 32, len(contents))]
    padding = range(len(contents) - 84 - 4, len(contents) - 84)
    for position in used:
        path.write_bytes(contents[:position] + bytes([contents[position] ^ 0x10]) + contents[position + 1 :])
        if position in padding:
            assert read_sealed(str(path), 5)[1] == b"some rows"
        else:
            with pytest.raises(CorruptRunError):
                read_sealed(str(path), 5)


# Codecs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "dtype", "text"),
    [
        ("zstd", "float32", '{"configuration": {"checksum": false, "level": 3}, "name": "zstd"}'),
        (
            "lz4",
            "float32",
            '{"configuration": {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": 4}, "name": "blosc"}',
        ),
        (
            "lz4",
            "complex128",
            '{"configuration": {"blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": 16}, "name": "blosc"}',
        ),
        ({"name": "zstd"}, "bool", '{"configuration": {"checksum": false, "level": 3}, "name": "zstd"}'),
        (
            {"configuration": {"level": 7}, "name": "zstd"},
            "float32",
            '{"configuration": {"checksum": false, "level": 7}, "name": "zstd"}',
        ),
        ({"name": "gzip", "configuration": {"level": 1}}, "float32", '{"configuration": {"level": 1}, "name": "gzip"}'),
        ({"name": "gzip", "configuration": {}}, "float32", '{"configuration": {"level": 5}, "name": "gzip"}'),
        (
            {"name": "blosc", "configuration": {"cname": "zlib", "shuffle": "bitshuffle", "typesize": 1}},
            "float64",
            '{"configuration": {"blocksize": 0, "clevel": 5, "cname": "zlib", "shuffle": "bitshuffle", "typesize": 1}, "name": "blosc"}',
        ),
    ],
)
def test_codec_metadata_is_canonical(codec: str | dict[str, Any], dtype: str, text: str) -> None:
    assert codec_metadata(codec, dtype) == text
    assert codec_metadata(json.loads(text), dtype) == text
    contents = np.random.default_rng(0).integers(0, 4, 10_000, dtype=np.uint8).tobytes()
    made = compressor(text)
    encoded = bytes(made.encode(memoryview(contents)))
    assert len(encoded) < len(contents)
    assert bytes(made.decode(memoryview(encoded))) == contents


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_codec_has_no_metadata(dtype: str) -> None:
    assert codec_metadata(None, dtype) is None


@pytest.mark.parametrize(
    "codec",
    [
        "gzip2",
        "blosc",
        "",
        5,
        ["zstd"],
        {},
        {"name": 3},
        {"name": "nothing"},
        {"name": "bytes"},
        {"name": "crc32c"},
        {"name": "zstd", "level": 3},
        {"name": "zstd", "configuration": {"level": "high"}},
        {"name": "zstd", "configuration": {"nothing": 1}},
        {"name": "zstd", "configuration": {"id": "gzip"}},
        {"name": "zstd", "configuration": 5},
        {"name": "zstd", "configuration": {"level": object()}},
        {"name": "gzip", "configuration": {"level": 10}},
        {"name": "blosc", "configuration": {"cname": "nothing"}},
        {"name": "blosc", "configuration": {"shuffle": 1}},
        {"name": "blosc", "configuration": {"shuffle": "nothing"}},
        {"name": "blosc", "configuration": {"clevel": 10}},
        {"name": "numcodecs.nothing"},
        {"name": "numcodecs.delta"},
    ],
    ids=lambda codec: re.sub(r" at 0x\w+", "", repr(codec)),
)
def test_codecs_that_are_refused(codec: Any) -> None:
    with pytest.raises(OptionError, match="codec") as caught:
        codec_metadata(codec, "float32")
    assert caught.value.option == "codec"
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "numcodecs.packbits"},
        {"name": "numcodecs.fixedscaleoffset", "configuration": {"scale": 0.1, "offset": 0, "dtype": "u1", "astype": "u1"}},
        {"name": "numcodecs.vlen-bytes"},
    ],
    ids=lambda codec: codec["name"],
)
def test_codecs_that_lose_something_are_refused(codec: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        codec_metadata(codec, "float32")


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "zstd", "configuration": {"level": 1000}},
        {"name": "zstd", "configuration": {"level": 3.5}},
        {"name": "zstd", "configuration": {"checksum": 1}},
        {"name": "gzip", "configuration": {"level": -1}},
        {"name": "blosc", "configuration": {"nothing": 1}},
        {"name": "numcodecs.base64"},
    ],
    ids=repr,
)
def test_codecs_that_zarr_refuses_are_refused_at_once(codec: dict[str, Any], tmp_path: Path) -> None:
    """Else the writer finds out, at the first capture, and training stops."""
    from torch import nn

    import hookstore

    with pytest.raises(OptionError):
        hookstore.record(nn.ReLU(), tmp_path / "run", layers="", codec=codec, buffer_bytes=1 << 20).close()


class Exploit:
    """Unpickling it leaves a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("import sys; sys.modules['hookstore_was_exploited'] = sys",)


@pytest.mark.parametrize("codec", ['{"name": "numcodecs.pickle"}', '{"name": "zstd", "configuration": {"id": "pickle"}}'])
def test_nothing_in_a_run_is_unpickled(array: Path, reader: ShardReader, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array's metadata comes with the run, which is not trusted. Some versions of numcodecs unpickle without asking."""
    import numcodecs.pickles

    monkeypatch.setattr(numcodecs.pickles, "ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    payload = pickle.dumps(Exploit())
    (array / "c.0.0.0.0").write_bytes(with_crc(payload))
    try:
        with contextlib.suppress(Exception):
            reader.read("layer/activation", "c.0.0.0.0", 0, len(payload) + 4, crc32c(payload), codec, 48)
        assert "hookstore_was_exploited" not in sys.modules
        with pytest.raises(HookstoreError):
            reader.read("layer/activation", "c.0.0.0.0", 0, len(payload) + 4, crc32c(payload), codec, 48)
    finally:
        sys.modules.pop("hookstore_was_exploited", None)


@pytest.mark.parametrize("codec", ["zstd", "lz4", {"name": "gzip"}], ids=str)
def test_a_chunk_that_does_not_decode_is_told(array: Path, reader: ShardReader, codec: str | dict[str, Any]) -> None:
    """Its checksum is right, so it was the array's metadata that was damaged."""
    encoded = b"this is no compressed chunk at all, whatever the metadata says"
    (array / "c.0.0.0.0").write_bytes(with_crc(encoded))
    with pytest.raises(CorruptRunError):
        reader.read("layer/activation", "c.0.0.0.0", 0, len(encoded) + 4, crc32c(encoded), codec_metadata(codec, "float32"), 48)


@pytest.mark.parametrize("codec", ["zstd", "lz4", {"name": "gzip"}], ids=str)
def test_compressed_chunks_are_decoded(array: Path, files: ShardFiles, reader: ShardReader, codec: str | dict[str, Any]) -> None:
    text = codec_metadata(codec, "float32")
    assert text is not None
    spec = make_spec(codec=text)
    shard = ShardWriter(str(array), spec, (0, 0), files)
    offsets, lengths, crcs = shard.append_encoded(
        [bytes(compressor(text).encode(chunk(number, spec))) for number in range(5)], list(range(5))
    )
    for number, place in enumerate(zip(offsets, lengths, crcs, strict=True)):
        assert bytes(reader.read("layer/activation", shard.key, *place, text, 48)) == chunk(number, spec)
    for size in (47, 49, 480, 1):
        with pytest.raises(CorruptRunError):
            reader.read("layer/activation", shard.key, offsets[0], lengths[0], crcs[0], text, size)


@pytest.mark.parametrize("codec", ["zstd", "lz4", {"name": "gzip"}], ids=str)
def test_a_chunk_of_far_too_many_bytes_is_not_unpacked(array: Path, reader: ShardReader, codec: str | dict[str, Any]) -> None:
    """A few thousand bytes that claim to be a gigabyte must not take a gigabyte of memory."""
    text = codec_metadata(codec, "uint8")
    assert text is not None
    encoded = bytes(compressor(text).encode(bytes(256 << 20)))
    assert len(encoded) < 4 << 20
    (array / "c.0.0.0.0").write_bytes(with_crc(encoded))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRunError):
            reader.read("layer/activation", "c.0.0.0.0", 0, len(encoded) + 4, crc32c(encoded), text, 48)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_writer_without_o_direct_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "_O_DIRECT", 0)
    assert not DirectWriter().is_direct
