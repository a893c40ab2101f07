"""The threads that bring staged captures to disk, and the order in which they do it.

Order, for each region (design: bytes, then row, then mark):

1. Wait for the region's transfers, encode (in encoder threads), write the chunks into the hidden shard.
2. Append the rows to the journal: now the captures are *acknowledged*, they survive SIGKILL.
3. Every few seconds and at `flush`: sync the shards, then mark in the journal what is *durable*, it survives a power failure.
4. A journal segment that is long enough becomes a Parquet part, right after a sync.
5. A shard that will get no more captures is sealed.

The threads are not daemons, and watch the main thread: when the script ends without ``close()``, they finish the run by themselves.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from crc32c import crc32c

from hookstore.arrays import ArrayStore
from hookstore.codecs import compressor
from hookstore.errors import RecorderClosedError
from hookstore.files import sync_directory, sync_paths
from hookstore.format import CRC_BYTES, DTYPES, JOURNAL_DIR, LAYERS_DIR, Row
from hookstore.layout import Array, Capture
from hookstore.manifest import ManifestWriter, RowLog, make_batch, rows_to_stream
from hookstore.shards import ShardFiles, ShardWriter
from hookstore.staging import Oversize, Piece, Region, Stager

_POLL_S = 0.1
_ITEMS_PER_TURN = 64
_REGION_AGE_S = 0.5  # with a poll and a write this keeps captures acknowledged within a second
_SYNC_AGE_S = 5.0  # and durable within ten
_PLACES_UNSEALED = (
    4  # stretches of epochs and batches of an array whose shards stay open: gradients may come late, and loops may take turns
)


class SyncRequest:
    """Asks the writer to make durable all that it has been given, and says when that is so."""

    def __init__(self) -> None:
        self.done = threading.Event()


class _Stop:
    """Asks the writer to finish the run."""


class _Encoded:
    """A region whose chunks an encoder has encoded."""

    def __init__(self, region: Region, chunks: list[bytes]) -> None:
        self.region = region
        self.chunks = chunks


class _Failed:
    """What stopped an encoder."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure


class Encoder:
    """Plain threads that encode chunks, one region at a time each.

    Parameters
    ----------
    memory : memoryview
        The arena.
    post : callable
        Takes what comes out, for the writer.
    num_threads : int
        Threads, started when the first region comes.
    """

    def __init__(self, memory: memoryview, post: Callable[[Any], None], num_threads: int) -> None:
        self._memory = memory
        self._post = post
        self.num_threads = num_threads
        self._queue: queue.SimpleQueue[Region | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._compressors = threading.local()

    def submit(self, region: Region) -> None:
        """Encode a region and post it as encoded."""
        if not self._threads:
            for number in range(self.num_threads):
                thread = threading.Thread(target=self._run, name=f"hookstore-encoder-{number}", daemon=False)
                thread.start()
                self._threads.append(thread)
        self._queue.put(region)

    def encode(self, array: Array, chunk: memoryview) -> bytes:
        """Encode one chunk in the calling thread."""
        codec = array.spec.codec
        assert codec is not None
        made = self._compressors.__dict__.get(codec)
        if made is None:
            made = self._compressors.__dict__[codec] = compressor(codec)
        return bytes(made.encode(chunk))

    def stop(self) -> None:
        """End the threads when they have done what they were given."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (region := self._queue.get()) is not None:
            try:
                array = region.array
                starts = [region.offset + capture.slot * array.stride_bytes for capture in region.captures]
                chunks = [self.encode(array, self._memory[start : start + array.chunk_bytes]) for start in starts]
            except BaseException as failure:  # it is raised in the training loop
                self._post(_Failed(failure))
            else:
                self._post(_Encoded(region, chunks))


class Writer:
    """Owns the shards, the journal and the arrays of a run, on one thread.

    Parameters
    ----------
    run_path : str
        The run, with its directories.
    stager : Stager
        Where captures come from.
    num_epochs : int or None
        Epochs of the run, where known.
    epoch_batches : callable
        Gives the number of batches of the epoch under way, where known.
    rank : int
        Rank of this process.
    num_encoders : int
        Encoder threads.
    """

    def __init__(
        self,
        run_path: str,
        stager: Stager,
        *,
        num_epochs: int | None,
        epoch_batches: Callable[[], int | None],
        rank: int = 0,
        attempt: int = 0,
        num_encoders: int = 2,
    ) -> None:
        self.acknowledged_bytes = 0
        self.num_acknowledged = 0
        self.encoder = Encoder(stager.memory, stager.queue.put, num_encoders)
        self._run_path = run_path
        self._stager = stager
        self._epoch_batches = epoch_batches
        self._rank = rank
        self._attempt = attempt
        self._arrays = ArrayStore(os.path.join(run_path, LAYERS_DIR), num_epochs)
        self._manifest = ManifestWriter(run_path, rank, attempt)
        self._files = ShardFiles()
        self._shards: dict[str, dict[tuple[int, ...], ShardWriter]] = {}
        self._dirty: dict[str, ShardWriter] = {}
        self._new_directories: set[str] = set()
        self._requests: list[SyncRequest] = []
        self._to_encode: collections.deque[Region] = collections.deque()
        self._num_encoding = 0
        self._rows: list[Row] = []
        self._row_owners: list[tuple[ShardWriter | None, int]] = []
        self._synced_at = time.monotonic()
        self._needs_mark = False
        self._stopping = False
        self._is_finished = False
        self._main = threading.main_thread()
        self._rows_of: dict[ShardWriter, RowLog] = {}
        self._thread = threading.Thread(target=self._run, name="hookstore-writer", daemon=False)  # else it inherits that from who starts it

    # What the recorder calls --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def flush(self) -> None:
        """Return when everything staged before the call is durable.

        Raises
        ------
        BaseException
            What stopped the writer.
        """
        self._stager.drain()
        request = SyncRequest()
        self._stager.queue.put(request)
        while not request.done.wait(_POLL_S):
            self._raise_failure()
        self._raise_failure()

    def stop(self) -> None:
        """Finish the run and end the thread; idempotent.

        Raises
        ------
        BaseException
            What stopped the writer.
        """
        self._stager.queue.put(_Stop())
        self._thread.join()
        if not self._is_finished:
            self._raise_failure()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _raise_failure(self) -> None:
        if self._stager.failure is not None:
            raise self._stager.failure

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping and self._stager.is_empty and self._stager.queue.empty()):
                self._turn()
            self._finish()
            self._is_finished = True
            self._stager.fail(RecorderClosedError(f"{self._run_path} is finished, because it was closed or the main thread has ended"))
        except BaseException as failure:  # it is raised in the training loop
            self._stager.fail(failure)
            with contextlib.suppress(OSError):
                self._manifest.close()
        finally:
            self._files.close()
            for request in self._requests:
                request.done.set()
            self.encoder.stop()

    def _turn(self) -> None:
        """Do what has come, or what time asks for."""
        with contextlib.suppress(queue.Empty):
            self._take(self._stager.queue.get(timeout=_POLL_S))
            for _ in range(_ITEMS_PER_TURN):
                self._take(self._stager.queue.get_nowait())
        self._acknowledge()
        if not self._stopping and not self._main.is_alive():
            self._stopping = True  # the script has ended without close()
        self._stager.close_regions(older_than_s=0.0 if self._stopping else _REGION_AGE_S)
        if self._requests or (self._needs_mark and time.monotonic() - self._synced_at > _SYNC_AGE_S) or self._manifest.is_segment_full:
            self._sync()

    def _take(self, item: Any) -> None:
        if isinstance(item, Region):
            self._write_region(item)
        elif isinstance(item, _Encoded):
            self._write_encoded(item)
        elif isinstance(item, Piece):
            self._write_piece(item)
        elif isinstance(item, Capture):
            self._note([self._row(item)])
        elif isinstance(item, SyncRequest):
            self._requests.append(item)
        elif isinstance(item, _Failed):
            raise item.failure
        else:
            self._stopping = True

    def _write_region(self, region: Region) -> None:
        for transfer in region.transfers:
            transfer.wait()
        if not region.captures:
            self._stager.release(region)
            return
        if region.array.spec.codec is not None:
            self._to_encode.append(region)
            self._encode_next()
            return
        shard = self._shard(region.array, region.shard, region.captures)
        memory = self._stager.memory[region.offset : region.offset + region.num_bytes]
        captures = region.captures
        offsets, crcs = shard.append_region(memory, [capture.slot for capture in captures], [capture.entry for capture in captures])
        length = region.array.chunk_bytes + CRC_BYTES
        rows = [self._row(capture, shard, offset, length, crc) for capture, offset, crc in zip(captures, offsets, crcs, strict=True)]
        self._stager.release(region)
        self._note(rows, shard)

    def _encode_next(self) -> None:
        """Give encoders work, but no more than they can do next: what they have done lies beside the arena until it is written."""
        while self._to_encode and self._num_encoding < self.encoder.num_threads + 1:
            self._num_encoding += 1
            self.encoder.submit(self._to_encode.popleft())

    def _write_encoded(self, encoded: _Encoded) -> None:
        self._num_encoding -= 1
        self._encode_next()
        region = encoded.region
        captures = region.captures
        shard = self._shard(region.array, region.shard, captures)
        offsets, lengths, crcs = shard.append_encoded(encoded.chunks, [capture.entry for capture in captures])
        placed = zip(captures, offsets, lengths, crcs, strict=True)
        rows = [self._row(capture, shard, offset, length, crc) for capture, offset, length, crc in placed]
        self._stager.release(region)
        self._note(rows, shard)

    def _write_piece(self, piece: Piece) -> None:
        if piece.transfer is not None:
            piece.transfer.wait()
        oversize: Oversize = piece.oversize
        capture = oversize.capture
        assert capture.array is not None
        shard = self._shard(capture.array, oversize.shard, [capture])
        if piece.start == 0:
            oversize.file_offset = shard.reserve(oversize.num_bytes)
        memory = self._stager.memory[piece.offset : piece.offset + piece.num_bytes]
        oversize.crc = crc32c(memory[: piece.length], oversize.crc)
        end = piece.length
        if piece.is_last:
            memory[end : end + CRC_BYTES] = oversize.crc.to_bytes(CRC_BYTES, "little")
            end += CRC_BYTES
        memory[end:] = bytes(piece.num_bytes - end)
        shard.write_piece(memory, oversize.file_offset + piece.start)
        self._stager.release(piece)
        if piece.is_last:
            shard.finish_pieces(capture.entry, oversize.file_offset, oversize.num_bytes)
            self._note([self._row(capture, shard, oversize.file_offset, oversize.num_bytes + CRC_BYTES, oversize.crc)], shard)

    # Shards and rows ----------------------------------------------------------------------------------------------

    def _shard(self, array: Array, where: tuple[int, ...], captures: list[Capture]) -> ShardWriter:
        """Return the shard to write to, publishing the array first; shards that have been left behind are sealed."""
        spec = array.spec
        places = [capture.coordinates for capture in captures]
        last = (max(place.epoch for place in places), max(place.batch for place in places), max(capture.call for capture in captures))
        self._arrays.publish(spec, last, self._epoch_batches())
        shards = self._shards.setdefault(spec.path, {})
        shard = shards.pop(where, None)
        if shard is None:
            self._seal_left_behind(shards, where)
            directory = self._arrays.directory(spec)
            shard = ShardWriter(directory, spec, where, self._files)
            self._new_directories.add(directory)
            self._rows_of[shard] = RowLog()
        shards[where] = shard  # last in the dictionary: used last
        self._dirty[shard.path] = shard
        return shard

    def _seal_left_behind(self, shards: dict[tuple[int, ...], ShardWriter], where: tuple[int, ...]) -> None:
        """Seal shards of an array before one is opened: those that are full, and those of all but the places used last.

        A place is a stretch of epochs and batches; all its shards of calls belong together.
        """
        recent = list(dict.fromkeys([where[:2], *(place[:2] for place in reversed(shards))]))[:_PLACES_UNSEALED]
        self._acknowledge()  # a shard carries its rows
        for place, shard in list(shards.items()):
            if place[:2] not in recent or (place[:2] != where[:2] and shard.is_full):
                self._seal(shard)

    def _row(self, capture: Capture, shard: ShardWriter | None = None, offset: int = 0, length: int = 0, crc: int = 0) -> Row:
        where = capture.coordinates
        nbytes = DTYPES[capture.dtype].itemsize if capture.dtype else 0
        for size in capture.shape:
            nbytes *= size
        return Row(
            phase=where.phase,
            epoch=where.epoch,
            batch=where.batch,
            call=capture.call,
            backward=capture.backward,
            step=capture.step,
            layer=capture.layer,
            kind=capture.kind,
            leaf=capture.leaf,
            rank=self._rank,
            attempt=self._attempt,
            array="" if shard is None else shard.spec.path,
            shape=capture.shape,
            dtype=capture.dtype,
            nbytes=nbytes if capture.status == "ok" else 0,
            wall_time=capture.wall_time_us,
            loss_scale=None,
            shard="" if shard is None else shard.key,
            offset=offset,
            length=length,
            crc32c=crc,
            status=capture.status,
            reason=capture.reason,
        )

    def _note(self, rows: list[Row], shard: ShardWriter | None = None) -> None:
        """Keep the rows of captures whose bytes are written, until the turn ends."""
        self._rows += rows
        self._row_owners.append((shard, len(rows)))

    def _acknowledge(self) -> None:
        """Bring the turn's rows into the journal, in one frame."""
        if not self._rows:
            return
        batch = make_batch(self._rows)
        self._manifest.append(batch)
        self._needs_mark = True
        self.num_acknowledged += len(self._rows)
        start = 0
        for shard, count in self._row_owners:
            if shard is not None:
                self._rows_of[shard].append(batch.slice(start, count))
                self.acknowledged_bytes += shard.spec.chunk_bytes * count
            start += count
        self._rows, self._row_owners = [], []

    def _sync(self) -> None:
        """Make durable what is acknowledged, and answer who waits for that."""
        unsynced = self._arrays.unsynced | self._new_directories | {shard.path for shard in self._dirty.values()}
        sync_paths(unsynced, self._run_path)
        self._arrays.unsynced.clear()
        self._new_directories.clear()
        self._dirty.clear()
        self._manifest.mark_durable()
        self._needs_mark = False
        self._synced_at = time.monotonic()
        if self._manifest.is_segment_full:
            self._manifest.finish_segment()
        for request in self._requests:
            request.done.set()
        self._requests.clear()

    def _seal(self, shard: ShardWriter) -> None:
        del self._shards[shard.spec.path][shard.shard]
        self._dirty.pop(shard.path, None)
        shard.seal(rows_to_stream(self._rows_of.pop(shard).batches, shard.earlier_rows))

    def _finish(self) -> None:
        """Seal every shard, publish exact extents, turn the journal into a part."""
        self._sync()
        for shards in self._shards.values():
            for shard in list(shards.values()):
                self._seal(shard)
        self._arrays.finish(self._epoch_batches())
        self._manifest.finish_segment()
        with contextlib.suppress(OSError):  # a network file system's own hidden file may lie there; all of ours are gone
            os.rmdir(os.path.join(self._run_path, JOURNAL_DIR))
        sync_directory(self._run_path)
