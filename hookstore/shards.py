"""Shard files: append chunks, seal, read.

An unsealed shard has a hidden name. Sealing adds its manifest rows, a trailer that says where these are, and the Zarr index, and gives it its Zarr
key; from then on plain Zarr readers see it, complete. Blocks of a shard that are acknowledged are never written again.

References
----------
``sharding_indexed``: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from hookstore.codecs import compressor, decode
from hookstore.errors import CorruptRunError
from hookstore.files import DirectWriter, Sink, Spool, SpooledRecords, open_regular, sync_paths, system
from hookstore.format import (
    CHUNK_ALIGNMENT_BYTES,
    CRC_BYTES,
    MAX_SHARD_ENTRIES,
    MISSING,
    PAGE_BYTES,
    TRAILER_BYTES,
    TRAILER_FORMAT,
    TRAILER_MAGIC,
    ArraySpec,
    align,
    cloning_name,
    unsealed_name,
)

_MOST_ROWS_BYTES = 512 << 20  # of manifest rows that a shard carries
_MOST_CODEC_BYTES = 4096  # that a codec adds to an eighth of a chunk that it cannot make shorter; those here add less
_ENTRY = struct.Struct("<QQQ")
_ENTRY_DTYPE = np.dtype([("entry", "<u8"), ("offset", "<u8"), ("length", "<u8")])

_CHECK_BYTES = 8 << 20

# Writing ----------------------------------------------------------------------------------------------------------


class ShardFiles:
    """What the shards of one writing thread share: the descriptors, the buffers and the spool.

    Parameters
    ----------
    spool_directory : str or None
        Where the spool lies; see `hookstore.files.Spool`.
    """

    def __init__(self, spool_directory: str | None = None) -> None:
        self.writer = DirectWriter()
        self.sink = Sink(self.writer)
        self.spool = Spool(spool_directory)
        self.index = np.empty((MAX_SHARD_ENTRIES, 2), dtype="<u8")  # touched once, not for every shard

    def close(self) -> None:
        """Close every descriptor."""
        self.writer.close()
        self.spool.close()


def chunk_checksums(memory: memoryview, spec: ArraySpec, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the crc32c, uint32, of unencoded chunks that lie ``stride_bytes`` apart in memory.

    Parameters
    ----------
    memory : memoryview
        The region's bytes.
    spec : ArraySpec
        The array.
    slots : numpy.ndarray
        Which chunks.
    """
    length = spec.chunk_bytes
    starts = (slots * spec.stride_bytes).tolist()
    return np.array([crc32c(memory[start : start + length]) for start in starts], dtype="<u4")


class Adopted(NamedTuple):
    """What is known of an unsealed shard that a dead writer left.

    Attributes
    ----------
    entries, offsets, lengths : numpy.ndarray
        Of its chunks, int64; of several with one entry the last counts.
    rows : bytes
        Their manifest rows as an Arrow IPC stream.
    """

    entries: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]
    rows: bytes


class ShardWriter:
    """One shard that is not sealed yet; used by one thread.

    Parameters
    ----------
    directory : str
        Directory of the array.
    spec : ArraySpec
        The array.
    shard : tuple of int
        Coordinates of the shard.
    files : ShardFiles
        What the shards of a run share.
    adopted : Adopted or None
        What is known of a file that a dead writer left under the hidden name. Without it there is no such file; where there is a sealed shard, the writer goes
        on with a clone of it.
    """

    def __init__(self, directory: str, spec: ArraySpec, shard: tuple[int, ...], files: ShardFiles, adopted: Adopted | None = None) -> None:
        self.spec = spec
        self.shard = shard
        self.key = spec.shard_key(shard)
        self.path = os.path.join(directory, unsealed_name(self.key))
        self.sealed_path = os.path.join(directory, self.key)
        self.num_bytes = 0  # of the file so far
        self.cloned_bytes = 0  # of them those that stand in a sealed shard as well
        self._files = files
        self._entries = SpooledRecords(files.spool, _ENTRY_DTYPE)
        self._earlier_rows = (0, 0)  # where they are in the spool
        if adopted is not None:
            self._adopt(adopted)
        elif os.path.exists(self.path):
            raise FileExistsError(errno.EEXIST, "there is an unsealed shard that nobody has taken up", self.path)
        elif os.path.exists(self.sealed_path):
            self._take_up_sealed()

    @property
    def is_full(self) -> bool:
        """Whether every entry of the index is taken."""
        if len(self._entries) < self.spec.num_entries:
            return False
        return len(np.unique(self._entries.read()["entry"])) == self.spec.num_entries

    def _take_up_sealed(self) -> None:
        """Go on with a clone of the sealed shard: a plain reader that holds the old index must go on finding its chunks where they were."""
        try:
            index, rows = read_sealed(self.sealed_path, self.spec.num_entries)
        except CorruptRunError as error:
            error.add_note("`hookstore recover` gives it a new end, if the manifest has its rows")
            raise
        clone_file(self.sealed_path, os.path.join(os.path.dirname(self.path), cloning_name(self.key)), self.path)
        self.cloned_bytes = os.path.getsize(self.path)
        self._keep_rows(rows)
        entries = np.flatnonzero(index[:, 1] != MISSING)
        self._note(entries, index[entries, 0], index[entries, 1], align(os.path.getsize(self.path), PAGE_BYTES))

    def _adopt(self, adopted: Adopted) -> None:
        """Go on where a dead writer stopped, behind all that it wrote."""
        self._keep_rows(adopted.rows)
        end = max([os.path.getsize(self.path), *(adopted.offsets + adopted.lengths).tolist()])
        self._note(adopted.entries, adopted.offsets, adopted.lengths, align(end, PAGE_BYTES))

    def _keep_rows(self, rows: bytes) -> None:
        self._earlier_rows = (self._files.spool.write(rows), len(rows))

    def take_earlier_rows(self) -> bytes:
        """Return the rows, as an Arrow IPC stream, of chunks that were in the shard before this writer, once."""
        start, length = self._earlier_rows
        if not length:
            return b""
        rows = self._files.spool.read(start, length)
        self._files.spool.release(start, length)
        self._earlier_rows = (0, 0)
        return rows

    def append_region(
        self, memory: memoryview, slots: np.ndarray[Any, Any], entries: np.ndarray[Any, Any], crcs: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, Any]:
        """Write unencoded chunks that lie ``stride_bytes`` apart in page-aligned memory, as they lie there.

        Parameters
        ----------
        memory : memoryview
            The region's bytes up to the end of its last slot, followed by room up to a whole page. Checksums and padding are written into it.
        slots, entries, crcs : numpy.ndarray
            The slots to keep, their entries in the index, and the crc32c of each.

        Returns
        -------
        numpy.ndarray
            int64, the offset of each.
        """
        stride, length = self.spec.stride_bytes, self.spec.chunk_bytes
        num_slots = int(slots.max()) + 1
        used = num_slots * stride
        padded = align(used, PAGE_BYTES)
        bytes_of = np.frombuffer(memory, dtype=np.uint8, count=padded)
        tails = bytes_of[:used].reshape(num_slots, stride)[:, length:]
        tails[slots, :CRC_BYTES] = crcs.astype("<u4").view(np.uint8).reshape(-1, CRC_BYTES)
        tails[:, CRC_BYTES:] = 0
        bytes_of[used:] = 0
        offset = self.num_bytes
        self._files.writer.write(self.path, memory[:padded], offset)
        offsets = offset + slots.astype(np.int64) * stride
        self._note(entries, offsets, length + CRC_BYTES, offset + padded)
        return offsets

    def append_chunk(self, memory: memoryview, entry: int, crc: int) -> int:
        """Write one unencoded chunk that lies at the start of page-aligned memory, and return its offset.

        The same as `append_region` for one slot, which is the usual case for large chunks, in a tenth of the time.

        Parameters
        ----------
        memory : memoryview
            As for `append_region`.
        entry, crc : int
            Its entry in the index, and its crc32c.
        """
        length = self.spec.chunk_bytes
        end = align(self.spec.stride_bytes, PAGE_BYTES)
        memory[length:end] = crc.to_bytes(CRC_BYTES, "little") + bytes(end - length - CRC_BYTES)
        offset = self.num_bytes
        self._files.writer.write(self.path, memory[:end], offset)
        self._entries.append_bytes(_ENTRY.pack(entry, offset, length + CRC_BYTES))
        self.num_bytes = offset + end
        return offset

    def append_encoded(self, chunks: Iterable[bytes], entries: npt.ArrayLike) -> tuple[list[int], list[int], list[int]]:
        """Write encoded chunks.

        Returns
        -------
        offsets, lengths, crcs : list of int
            Of each chunk; the length includes the checksum.
        """
        sink = self._files.sink
        sink.begin(self.path, self.num_bytes)
        offsets, lengths, crcs = [], [], []
        for chunk in chunks:
            sink.pad(CHUNK_ALIGNMENT_BYTES)
            crc = crc32c(chunk)
            offsets.append(sink.position)
            lengths.append(len(chunk) + CRC_BYTES)
            crcs.append(crc)
            sink.add(chunk)
            sink.add(crc.to_bytes(CRC_BYTES, "little"))
        self._note(entries, offsets, lengths, sink.finish())
        return offsets, lengths, crcs

    def reserve(self, num_bytes: int) -> int:
        """Set room aside for a chunk that comes in pieces, its checksum included, and return its offset."""
        offset = self.num_bytes
        self.num_bytes = align(offset + num_bytes + CRC_BYTES, PAGE_BYTES)
        return offset

    def write_piece(self, memory: memoryview, offset: int) -> None:
        """Write whole pages of a chunk for which room was reserved."""
        self._files.writer.write(self.path, memory, offset)

    def finish_pieces(self, entry: int, offset: int, num_bytes: int) -> None:
        """Note that a chunk for which room was reserved is all there."""
        self._note([entry], [offset], [num_bytes + CRC_BYTES], self.num_bytes)

    def _note(self, entries: npt.ArrayLike, offsets: npt.ArrayLike, lengths: npt.ArrayLike, end: int) -> None:
        noted = np.empty(np.size(entries), dtype=_ENTRY_DTYPE)
        noted["entry"], noted["offset"], noted["length"] = entries, offsets, lengths
        self._entries.append(noted)
        self.num_bytes = end

    def finish(self, rows: bytes) -> None:
        """Write what comes after the chunks: rows, trailer, index. Nothing can be appended any more, and `publish` is next.

        Parameters
        ----------
        rows : bytes
            Its manifest rows, as an Arrow IPC stream.
        """
        index = self._files.index[: self.spec.num_entries]
        index[:] = MISSING
        noted = self._entries.read()
        index[noted["entry"], 0], index[noted["entry"], 1] = noted["offset"], noted["length"]
        self._entries.clear()
        trailer = struct.pack(TRAILER_FORMAT, TRAILER_MAGIC, self.num_bytes, len(rows), crc32c(rows))
        sink = self._files.sink
        sink.begin(self.path, self.num_bytes)
        sink.add(rows)
        tail_bytes = len(trailer) + index.nbytes + CRC_BYTES
        sink.add(bytes(-(sink.position + tail_bytes) % PAGE_BYTES))  # so that the index ends with a page, and the file with the index
        sink.add(trailer)
        index_bytes = memoryview(index.view(np.uint8).reshape(-1))  # type: ignore[arg-type]  # an ndarray is a buffer
        sink.add(index_bytes)
        sink.add(crc32c(index_bytes).to_bytes(CRC_BYTES, "little"))
        self.num_bytes = sink.finish()

    def give_key(self) -> None:
        """Give the finished shard, whose bytes are on the device, its Zarr key."""
        system.replace(self.path, self.sealed_path)
        self._files.writer.forget(self.path)


def clone_file(source: str, temporary: str, target: str) -> None:
    """Make a copy of a file that appears under its name when all of it is there.

    Parameters
    ----------
    source, temporary, target : str
        Paths in one directory.
    """
    reading = os.open(source, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        writing = system.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            system.copy(reading, writing, os.fstat(reading).st_size)
        except OSError as error:
            error.filename = temporary
            raise
        finally:
            system.close(writing)
    finally:
        os.close(reading)
    system.replace(temporary, target)


def publish(shards: Sequence[ShardWriter], file_system: str) -> None:
    """Seal finished shards: each is durable and complete when it appears under its Zarr key. The first sync brings most of the others about.

    Parameters
    ----------
    shards : sequence of ShardWriter
        The shards.
    file_system : str
        A directory of the file system that they are in; see `hookstore.files.sync_paths`.
    """
    sync_paths([shard.path for shard in shards], file_system)
    for shard in shards:
        shard.give_key()
    sync_paths({os.path.dirname(shard.path) for shard in shards}, file_system)


# Reading ----------------------------------------------------------------------------------------------------------


def read_sealed(path: str, num_entries: int) -> tuple[np.ndarray[Any, Any], bytes]:
    """Read a sealed shard's index and its manifest rows.

    Returns
    -------
    index : numpy.ndarray
        uint64, shape (num_entries, 2): offset and length of each chunk.
    rows : bytes
        An Arrow IPC stream.

    Raises
    ------
    CorruptRunError
        If a checksum does not match, or the file is none that a shard can be.
    """
    index_bytes = 16 * num_entries + CRC_BYTES
    with os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < index_bytes + TRAILER_BYTES:
            raise CorruptRunError(f"shard {path} has {size:,} bytes, too few for its index of {index_bytes:,}", path=path)
        file.seek(size - index_bytes - TRAILER_BYTES)
        magic, offset, length, crc = struct.unpack(TRAILER_FORMAT, file.read(TRAILER_BYTES))
        tail = file.read(index_bytes)
        if crc32c(tail[:-CRC_BYTES]) != int.from_bytes(tail[-CRC_BYTES:], "little"):
            raise CorruptRunError(f"shard {path}: the checksum of its index does not match", path=path)
        if magic != TRAILER_MAGIC or offset + length > size - index_bytes - TRAILER_BYTES or length > _MOST_ROWS_BYTES:
            raise CorruptRunError(f"shard {path} has no trailer that leads to its manifest rows", path=path)
        file.seek(offset)
        rows = file.read(length)
    if crc32c(rows) != crc:
        raise CorruptRunError(f"shard {path}: the checksum of its manifest rows does not match", path=path)
    return np.frombuffer(tail[:-CRC_BYTES], dtype="<u8").reshape(num_entries, 2), rows


def check_chunks(
    path: str, offsets: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], crcs: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Say which chunks of a shard are as their rows say: the bytes are there, and match the checksum of the row and the one behind them.

    Reads the file front to back, in large pieces.

    Parameters
    ----------
    path : str
        The file.
    offsets, lengths, crcs : numpy.ndarray
        Where each chunk is, and the crc32c of its bytes but the last four.

    Raises
    ------
    OSError
        From the operating system.
    """
    is_right = np.zeros(len(offsets), dtype=bool)
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        size = os.fstat(descriptor).st_size
        window = memoryview(mmap.mmap(-1, _CHECK_BYTES))
        start = end = 0  # of what is in the window
        for position in np.argsort(offsets, kind="stable").tolist():
            offset, length = int(offsets[position]), int(lengths[position])
            if offset < 0 or length <= CRC_BYTES or offset > size or length > size - offset:
                continue
            at, left, crc = offset, length - CRC_BYTES, 0
            while left:
                if not start <= at < end or (end - at < left and end - at < _CHECK_BYTES // 2):
                    start, end = at, at + os.preadv(descriptor, [window], at)
                    _read_ahead(descriptor, end)
                    if end == start:
                        break
                count = min(left, end - at)
                crc = crc32c(window[at - start : at - start + count], crc)
                at, left = at + count, left - count
            behind = os.pread(descriptor, CRC_BYTES, at) if end - at < CRC_BYTES else window[at - start : at - start + CRC_BYTES]
            is_right[position] = not left and crc == int(crcs[position]) == int.from_bytes(behind, "little")
    finally:
        os.close(descriptor)
    return is_right


def _read_ahead(descriptor: int, offset: int) -> None:
    """Let the system read on while what it has read is checked; it reads ahead by itself, but too little for a fast disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, offset, 2 * _CHECK_BYTES, os.POSIX_FADV_WILLNEED)


class Chunk(NamedTuple):
    """What `ShardReader.read` is asked for."""

    array: str
    shard: str
    offset: int
    length: int
    crc: int
    codec: str | None
    chunk_bytes: int


class ShardReader:
    """Reads chunks from the shards of a run through a bounded number of memory maps; each chunk's checksum is checked the first time.

    Parameters
    ----------
    layers_path : str
        The run's ``layers`` directory.
    max_maps : int
        Maps to keep, each with a descriptor.
    """

    def __init__(self, layers_path: str, max_maps: int = 256) -> None:
        self._layers_path = layers_path
        self._max_maps = max_maps
        self._lock = threading.Lock()  # of the maps: readers come on several threads
        self._maps: OrderedDict[tuple[str, str], mmap.mmap] = OrderedDict()
        self._alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._checked: set[tuple[str, str, int, int, int]] = set()
        self._compressors: dict[str, Any] = {}

    def read(self, array: str, shard: str, offset: int, length: int, crc: int, codec: str | None, chunk_bytes: int) -> memoryview:
        """Return the decoded bytes of one chunk, read-only.

        Parameters
        ----------
        array, shard : str
            Path of the array below ``layers``, and the shard's key; both already checked to be safe.
        offset, length, crc : int
            From the manifest.
        codec : str or None
            The compressor as canonical JSON.
        chunk_bytes : int
            Bytes that decoding must give.

        Raises
        ------
        CorruptRunError
            If the bytes are not there, or their checksum does not match.
        """
        self._check_length(array, shard, offset, length, codec, chunk_bytes)
        encoded = self._bytes(array, shard, offset, offset + length)[: length - CRC_BYTES]
        where = (array, shard, offset, length, crc)
        if where not in self._checked:
            found = crc32c(encoded)
            if found != crc:
                path = os.path.join(self._layers_path, array, shard)
                raise CorruptRunError(
                    f"shard {path}: the chunk at byte {offset:,} ({length:,} bytes) has crc32c {found:#010x}, the manifest says {crc:#010x}; "
                    "the file was damaged after it was written",
                    path=path,
                )
            self._checked.add(where)
        contents = encoded if codec is None else self._decode(array, shard, codec, encoded, chunk_bytes)
        if len(contents) != chunk_bytes:
            raise self._wrong_size(array, shard, offset, len(contents), chunk_bytes)
        return contents.toreadonly()

    def _check_length(self, array: str, shard: str, offset: int, length: int, codec: str | None, chunk_bytes: int) -> None:
        """Refuse a chunk of a length that its shape cannot have before any of its bytes are looked at, which may be very many."""
        most_bytes = chunk_bytes if codec is None else chunk_bytes + chunk_bytes // 8 + _MOST_CODEC_BYTES
        if length - CRC_BYTES > most_bytes or (codec is None and length - CRC_BYTES != chunk_bytes):
            raise self._wrong_size(array, shard, offset, length - CRC_BYTES, chunk_bytes)

    def _wrong_size(self, array: str, shard: str, offset: int, num_bytes: int, chunk_bytes: int) -> CorruptRunError:
        path = os.path.join(self._layers_path, array, shard)
        return CorruptRunError(
            f"shard {path}: the chunk at byte {offset:,} has {num_bytes:,} bytes, its shape needs {chunk_bytes:,}", path=path
        )

    def _decode(self, array: str, shard: str, codec: str, encoded: memoryview, chunk_bytes: int) -> memoryview:
        made = self._compressors.get(codec)
        if made is None:
            made = self._compressors[codec] = compressor(codec)
        try:
            return decode(made, encoded, chunk_bytes)
        except (RuntimeError, ValueError, OSError, EOFError, MemoryError, zlib.error) as error:
            path = os.path.join(self._layers_path, array, shard)
            raise CorruptRunError(
                f"shard {path}: a chunk does not decode with {codec} to {chunk_bytes:,} bytes: {error}", path=path
            ) from error

    def gather(self, array: str, shard: str, offsets: np.ndarray[Any, Any], num_bytes: int) -> np.ndarray[Any, Any]:
        """Copy pieces of equal length out of a shard, as they stand there.

        Parameters
        ----------
        array, shard : str
            As for `read`, by which the chunks that the pieces lie in were checked.
        offsets : numpy.ndarray
            int64: where each piece begins. There are some, and none is negative.
        num_bytes : int
            Bytes of a piece, not 0.

        Returns
        -------
        numpy.ndarray
            uint8, shape (number of offsets, num_bytes).

        Raises
        ------
        CorruptRunError
            If the shard ends before a piece does.
        """
        end = int(offsets.max()) + num_bytes
        mapped = self._mapped(array, shard, end)
        if mapped is not None:
            return gather_pieces(mapped, offsets, num_bytes)
        with self._opened(array, shard, end) as descriptor:
            pieces = b"".join([os.pread(descriptor, num_bytes, offset) for offset in offsets.tolist()])
            return np.frombuffer(pieces, dtype=np.uint8).reshape(len(offsets), num_bytes).copy()

    def _bytes(self, array: str, shard: str, start: int, end: int) -> memoryview:
        """Return some bytes of a shard: mapped, or read where there can be no map."""
        mapped = self._mapped(array, shard, end)
        if mapped is not None:
            return memoryview(mapped)[start:end]
        with self._opened(array, shard, end) as descriptor:
            return memoryview(os.pread(descriptor, end - start, start))

    def _mapped(self, array: str, shard: str, end: int) -> mmap.mmap | None:
        """Return a map of a shard that reaches at least to ``end``, or ``None`` where arrays that the caller keeps hold too many maps already."""
        key = (array, shard)
        with self._lock:
            mapped = self._maps.get(key)
            if mapped is not None and len(mapped) >= end:
                self._maps.move_to_end(key)
                return mapped
            with self._opened(array, shard, end) as descriptor:
                if len(self._alive) >= self._max_maps:
                    self._maps.clear()  # each map has a descriptor for as long as an array lies in it
                mapped = self._map(descriptor) if len(self._alive) < self._max_maps else None
            if mapped is not None:
                self._maps[key] = mapped
                self._maps.move_to_end(key)
                self._alive.add(mapped)
            return mapped

    @contextmanager
    def _opened(self, array: str, shard: str, end: int) -> Iterator[int]:
        """Give a descriptor of a shard that reaches at least to ``end``."""
        path = os.path.join(self._layers_path, array, shard)
        try:
            descriptor = self._open(array, shard, end)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptRunError(
                f"shard {path} is missing, or ends before byte {end:,} where the manifest has a chunk", path=path
            ) from error
        except (ValueError, OverflowError) as error:
            raise CorruptRunError(f"shard {path} cannot be read up to byte {end:,}: {error}", path=path) from error

    def _map(self, descriptor: int) -> mmap.mmap | None:
        """Map a shard, or return ``None`` if the process has no descriptors, or no addresses, left for that."""
        try:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENOMEM):
                raise
        self._max_maps = max(1, len(self._alive) // 2)  # others in this process want descriptors too
        self._maps.clear()
        return None

    def _open(self, array: str, shard: str, end: int) -> int:
        """Return a descriptor of the shard, which reaches at least to ``end``."""
        directory = os.path.join(self._layers_path, array)
        # A shard is sealed by a rename, and taken up again as a hidden clone: whoever looks meanwhile looks once more.
        for name in (shard, unsealed_name(shard), shard):
            try:
                descriptor = open_regular(os.path.join(directory, name), os.path.dirname(self._layers_path))
            except FileNotFoundError:
                continue
            if os.fstat(descriptor).st_size >= end:
                return descriptor
            os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.path.join(directory, shard))

    def close(self) -> None:
        """Let go of every map; arrays that were read stay valid."""
        with self._lock:
            self._maps.clear()


def gather_pieces(buffer: mmap.mmap | memoryview, offsets: np.ndarray[Any, Any], num_bytes: int) -> np.ndarray[Any, Any]:
    """Copy pieces of equal length out of a buffer; see `ShardReader.gather`."""
    # A piece at any byte is an element of this view, so that one indexing copies many, whatever lies between them; NumPy sees to the bounds.
    pieces = np.ndarray((len(buffer) - num_bytes + 1, num_bytes), dtype=np.uint8, buffer=buffer, strides=(1, 1))
    return np.asarray(pieces[offsets])
