"""The threads that bring staged captures to disk, and the order in which they do it.

Order, for each region (design: bytes, then row, then mark):

1. Wait for the region's transfers, take checksums or encode (in threads beside this one), write the chunks into the hidden shard.
2. Append the rows to the journal, those of a tenth of a second together: now the captures are *acknowledged*, they survive SIGKILL.
3. Every few seconds and at `flush`: sync the shards, then mark in the journal what is *durable*, it survives a power failure.
4. A journal segment that is long enough becomes a Parquet part, right after a sync.
5. A shard that will get no more captures is sealed.

The threads are not daemons, and watch the main thread: when the script ends without ``close()``, they finish the run by themselves.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from hookstore.agenda import ONLY
from hookstore.arrays import ArrayStore
from hookstore.blocks import NUMBERS_DTYPE, Origin, RowBlock, ShardRows, make_batch
from hookstore.clock import Coordinates
from hookstore.codecs import compressor
from hookstore.errors import RecorderBusyError, RecorderClosedError, name_error
from hookstore.files import FRAME_ROW_BYTES, portion_bytes, sync_directory, sync_paths, system, tail_bytes_of
from hookstore.flight import Event, Flight, row_of_batch
from hookstore.format import CRC_BYTES, JOURNAL_DIR, LAYERS_DIR, PAGE_BYTES, SUMMARIZED, Row, align
from hookstore.layout import Array, Draft
from hookstore.lock import RunLock
from hookstore.manifest import ManifestWriter, rows_to_stream
from hookstore.recovery import Leftover, Unsealed
from hookstore.regions import NOTE, NOTE_DTYPE, Oversize, Piece, Region, region_statistics
from hookstore.schema import SCHEMA
from hookstore.shards import ShardFiles, ShardWriter, chunk_checksums, publish
from hookstore.staging import Stager
from hookstore.statistics import divided
from hookstore.triggers import Raised, Trigger

_POLL_S = 0.1
_ITEMS_PER_TURN = 64
_REGION_AGE_S = 0.5  # with two polls and a write this keeps captures acknowledged within a second
_ROWS_AGE_S = 0.1  # a journal frame costs the same for one row and for many
_SYNC_AGE_S = 5.0  # and durable within ten
_PLACES_UNSEALED = (
    4  # stretches of epochs and batches of an array whose shards stay open: gradients may come late, and loops may take turns
)


class SyncRequest:
    """Asks the writer to make durable all that it has been given, and says when that is so.

    Attributes
    ----------
    done : threading.Event
        Set when it is so.
    num_before : int
        Regions that the writer has to have written first, counted from its start: those that the flight recorder had given back by then.
    """

    def __init__(self) -> None:
        self.done = threading.Event()
        self.num_before = 0


class _Stop:
    """Asks the writer to finish the run."""


@dataclass(slots=True, eq=False)
class Prepared:
    """A region on its way through the threads beside the writer.

    Attributes
    ----------
    region : Region
        The region.
    slots, notes : numpy.ndarray
        The slots that hold a capture, and the stager's notes about these.
    crcs : numpy.ndarray or None
        Checksums of the chunks as they are, uint32.
    chunks : list of bytes or None
        The chunks, encoded.
    statistics : numpy.ndarray or None
        Statistics of the captures, where they are wanted.
    was_submitted : bool
        Whether an encoder has it or has had it.
    """

    region: Region
    slots: np.ndarray[Any, Any]
    notes: np.ndarray[Any, Any]
    crcs: np.ndarray[Any, Any] | None = None
    chunks: list[bytes] | None = None
    statistics: np.ndarray[Any, Any] | None = None
    was_submitted: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether it can be written."""
        if self.region.array.stats == ONLY:
            return self.statistics is not None
        return self.crcs is not None or self.chunks is not None


class _Failed:
    """What stopped an encoder."""

    def __init__(self, failure: BaseException) -> None:
        self.failure = failure


class Encoder:
    """Plain threads that encode chunks, or take their checksums where there is nothing to encode, one region at a time each.

    Parameters
    ----------
    memory : memoryview
        The arena.
    post : callable
        Takes what comes out, for the writer.
    num_threads : int
        Threads that encode, started when the first region comes. One is enough for checksums.
    """

    def __init__(self, memory: memoryview, post: Callable[[Any], None], num_threads: int) -> None:
        self._memory = memory
        self._post = post
        self.num_threads = num_threads
        self._queue: queue.SimpleQueue[Prepared | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._compressors = threading.local()

    def submit(self, prepared: Prepared) -> None:
        """Prepare a region and post it."""
        if not self._threads:
            for number in range(1 if prepared.region.array.spec.codec is None else self.num_threads):
                thread = threading.Thread(target=self._run, name=f"hookstore-encoder-{number}", daemon=False)
                thread.start()
                self._threads.append(thread)
        self._queue.put(prepared)

    def prepare(self, prepared: Prepared) -> None:
        """Take statistics of a region's captures, where they are wanted, and encode its chunks or take their checksums, in the calling thread."""
        region, notes = prepared.region, prepared.notes
        array = region.array
        if array.stats and prepared.statistics is None:
            prepared.statistics = region_statistics(region, prepared.slots, notes, self._memory)
        if array.stats == ONLY:
            return
        if array.spec.codec is not None:
            starts = (region.offset + prepared.slots * array.stride_bytes).tolist()
            prepared.chunks = [self.encode(array, self._memory[start : start + array.chunk_bytes]) for start in starts]
            return
        crcs = notes["crc32c"]
        missing = notes["has_crc32c"] == 0
        if missing.any():
            crcs[missing] = chunk_checksums(
                self._memory[region.offset : region.offset + region.num_bytes], array.spec, prepared.slots[missing]
            )
        prepared.crcs = crcs

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
        while (prepared := self._queue.get()) is not None:
            try:
                self.prepare(prepared)
            except BaseException as failure:  # it is raised in the training loop
                self._post(_Failed(failure))
            else:
                self._post(prepared)


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
    lock : RunLock or None
        The lock on the run; the writer keeps it fresh, and lets it go when it ends.
    leftover : Leftover or None
        What the run holds from before.
    under_way : callable
        Gives the batches that are being recorded and not complete, and the optimizer steps done.
    schema : pyarrow.Schema
        Of the manifest's rows.
    last : int or None
        How many batches the flight recorder keeps, where there is one.
    triggers : sequence of Trigger
        When it fires.
    """

    def __init__(
        self,
        run_path: str,
        stager: Stager,
        *,
        num_epochs: int | None,
        epoch_batches: Callable[[], int | None],
        rank: int = 0,
        num_encoders: int = 2,
        lock: RunLock | None = None,
        leftover: Leftover | None = None,
        under_way: Callable[[], tuple[Sequence[Coordinates], int]] = lambda: ((), 0),
        schema: Any = SCHEMA,
        last: int | None = None,
        triggers: Sequence[Trigger] = (),
    ) -> None:
        self.acknowledged_bytes = 0
        self.num_acknowledged = 0
        self.encoder = Encoder(stager.memory, stager.queue.put, num_encoders)
        self._run_path = run_path
        self._stager = stager
        self._fires_when_raised = any(isinstance(trigger, Raised) for trigger in triggers)
        self._flight = Flight(stager, last=last, triggers=triggers, write=self._line_up, note=self._note_draft)
        self._epoch_batches = epoch_batches
        self._rank = rank
        self._lock = lock
        self._under_way = under_way
        before = leftover or Leftover(0, [], {}, [])
        self._attempt = before.attempt
        self._arrays = ArrayStore(os.path.join(run_path, LAYERS_DIR), num_epochs, stored=before.arrays, seen=before.seen)
        self._schema = schema
        self._manifest = ManifestWriter(run_path, rank, before.attempt, schema)
        self._files = ShardFiles(os.path.join(run_path, JOURNAL_DIR))
        self._shards: dict[str, dict[tuple[int, ...], ShardWriter]] = {}
        self._dirty: dict[str, ShardWriter] = {}
        self._new_directories: set[str] = set()
        self._requests: list[SyncRequest] = []
        self._preparing: collections.deque[Prepared] = collections.deque()  # in the order of their captures, which is that of their rows
        self._to_encode: collections.deque[Prepared] = collections.deque()
        self._num_written = 0  # regions
        self._num_encoded = 0  # regions that encoders have or have had, and that are not written yet
        self._blocks: list[tuple[RowBlock, ShardWriter | None]] = []
        self._noted_at = self._swept_at = self._synced_at = time.monotonic()
        self._journal_bytes = 0  # that are counted
        self._needs_mark = False
        self._stopping = False
        self._is_finished = False
        self._ended = threading.Event()
        self._main = threading.main_thread()
        self._rows_of: dict[ShardWriter, ShardRows] = {}
        for unsealed in before.unsealed:
            self._adopt(unsealed)
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
        # (Python 3.11 takes a thread for ended when Ctrl-C breaks off join(), and does not wait for it at the end of the process)
        while not self._ended.wait(_POLL_S):
            pass
        self._thread.join()
        if not self._is_finished:
            self._raise_failure()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has done its work."""
        return self._ended.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def check_elsewhere(self, call: str) -> None:
        """Raise `RecorderBusyError` on the writer's own thread, where the functions of triggers are called: ``call`` would wait there for itself."""
        if threading.current_thread() is self._thread:
            raise RecorderBusyError(
                f"{call} was called by the function of a trigger, on the writer's thread: set a flag there and call it between steps"
            )

    def _raise_failure(self) -> None:
        if self._stager.failure is not None:
            raise self._stager.failure

    def _adopt(self, unsealed: Unsealed) -> None:
        """Make a shard that a dead writer left one of this writer's own, the one used longest ago."""
        shard = unsealed.adopt(os.path.join(self._run_path, LAYERS_DIR), self._files)
        self._shards.setdefault(unsealed.spec.path, {})[unsealed.shard] = shard
        self._stager.count_written(tail_bytes_of(unsealed.spec.num_entries))
        self._rows_of[shard] = ShardRows(self._files.spool, self._schema)

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self._stopping and self._stager.is_empty and self._stager.queue.empty()):
                self._turn()
            self._finish()
            self._is_finished = True
            self._stager.fail(RecorderClosedError(f"{self._run_path} is finished, because it was closed or the main thread has ended"))
        except BaseException as failure:  # it is raised in the training loop
            failure.add_note(
                f"hookstore: recording into {self._run_path} ended here. What was acknowledged can be read; once the cause is mended, "
                "record(…, mode='a') goes on with the run"
            )
            self._stager.fail(failure)
            with contextlib.suppress(OSError):
                self._manifest.close()
        finally:
            self._files.close()
            for request in self._requests:
                request.done.set()
            self.encoder.stop()
            if self._lock is not None:
                self._lock.release()
            self._ended.set()

    def _turn(self) -> None:
        """Do what has come, or what time asks for."""
        with contextlib.suppress(queue.Empty):
            self._take(self._stager.queue.get_nowait() if self._has_ready else self._stager.queue.get(timeout=_POLL_S))
            for _ in range(_ITEMS_PER_TURN):
                self._take(self._stager.queue.get_nowait())
        if self._has_ready:  # one, and then a look at what has come: the encoders must not run dry while the disk writes
            prepared = self._preparing.popleft()
            self._write_region(prepared)
            self._num_written += 1
            self._num_encoded -= prepared.was_submitted
            self._encode_next()
        if not self._preparing:
            self._flight.make_room()
        now = time.monotonic()
        if self._blocks and now - self._noted_at >= _ROWS_AGE_S:
            self._acknowledge()
        if now - self._swept_at >= _POLL_S or self._stopping:
            self._swept_at = now
            if self._lock is not None:
                self._lock.renew()
            if not self._stopping and not self._main.is_alive():
                self._stopping = True  # the script has ended without close()
                self._end_with_process()
            self._stager.close_regions(older_than_s=0.0 if self._stopping else _REGION_AGE_S)
        if (
            any(map(self._can_answer, self._requests))
            or (self._needs_mark and now - self._synced_at > _SYNC_AGE_S)
            or self._manifest.is_segment_full
        ):
            self._sync()

    def _take(self, item: Any) -> None:
        if isinstance(item, Region):
            self._take_region(item)
        elif isinstance(item, Prepared):
            pass  # it stands in line already
        elif isinstance(item, Piece):
            self._write_piece(item)
        elif isinstance(item, Draft):
            self._flight.take_draft(item)
        elif isinstance(item, Event):
            self._flight.take_event(item)
        elif isinstance(item, SyncRequest):
            if self._stager.is_ring:  # (otherwise who asks has waited until what counts was written)
                item.num_before = self._num_written + len(self._preparing)
            self._requests.append(item)
        elif isinstance(item, _Failed):
            raise item.failure
        elif isinstance(item, _Stop):
            self._stopping = True

    def _take_region(self, region: Region) -> None:
        if region.is_taken:
            return
        region.is_taken = True
        for transfer in region.transfers:
            transfer.wait()
        region.transfers.clear()  # a flight recorder may keep the region for long
        slots = region.slots
        if not slots.size:
            self._stager.release(region)
            return
        notes = np.frombuffer(self._stager.memory, NOTE_DTYPE, count=region.reserved, offset=region.notes_offset)[slots]
        prepared = Prepared(region, slots, notes)
        if self._flight.sees(region):
            self._flight.take(prepared)
        else:
            self._line_up(prepared)

    def _line_up(self, prepared: Prepared) -> None:
        """Have a region encoded, and written in its turn."""
        region = prepared.region
        if prepared.is_ready:
            pass
        elif region.array.spec.codec is None and (region.array.is_small or self._is_waiting):
            self.encoder.prepare(prepared)
        else:  # the disk must not wait for it
            self._to_encode.append(prepared)
            self._encode_next()
        self._preparing.append(prepared)

    def _encode_next(self) -> None:
        """Give encoders work; to encode, no more than they can do next: what they have done lies beside the arena until it is written."""
        while self._to_encode and (
            self._to_encode[0].region.array.spec.codec is None or self._num_encoded < 2 * self.encoder.num_threads + 1
        ):
            self._num_encoded += 1
            prepared = self._to_encode.popleft()
            prepared.was_submitted = True
            self.encoder.submit(prepared)

    def _can_answer(self, request: SyncRequest) -> bool:
        return request.num_before <= self._num_written

    @property
    def _is_waiting(self) -> bool:
        """Whether there is nothing else to do: then handing work to another thread costs more than it gains."""
        return not self._preparing and self._stager.queue.empty()

    @property
    def _has_ready(self) -> bool:
        """Whether the region that is to be written next is prepared."""
        return bool(self._preparing) and self._preparing[0].is_ready

    def _write_region(self, prepared: Prepared) -> None:
        region = prepared.region
        spec = region.array.spec
        shard: ShardWriter | None = None
        if region.array.stats == ONLY:
            numbers = _coordinates_of(prepared.notes)
        elif len(prepared.notes) == 1 and prepared.chunks is None and not region.holes:
            shard, numbers = self._write_one(prepared)
        else:
            shard, numbers = self._write_many(prepared)
        shapes = {spec.chunk_shape: 0}
        for slot, shape in region.shapes.items():
            if slot in region.holes:
                continue
            numbers["shape"][np.searchsorted(prepared.slots, slot)] = shapes.setdefault(shape, len(shapes))
        origins = self._origins(prepared.notes, numbers)
        if shard is not None:
            region.written_bytes = shard.num_bytes - int(numbers["offset"].min()) // PAGE_BYTES * PAGE_BYTES
        self._stager.release(region)
        block = RowBlock(
            phase=spec.phase,
            layer=spec.layer,
            kind=spec.kind,
            leaf=spec.leaf,
            rank=self._rank,
            attempt=self._attempt,
            array="" if shard is None else region.array.path,
            dtype=spec.dtype,
            shard="" if shard is None else shard.key,
            status="summarized" if shard is None else "ok",
            reason=SUMMARIZED if shard is None else "",
            shapes=list(shapes),
            origins=origins,
            numbers=numbers,
            portion=spec.portion,
            statistics=None if prepared.statistics is None else divided(prepared.statistics, prepared.notes["scale"]),
        )
        self._note(block, shard)

    def _origins(self, notes: np.ndarray[Any, Any], numbers: np.ndarray[Any, Any]) -> list[Origin]:
        """Return the structures and loss scales of a region's captures, and let the numbers count through them."""
        structures, scales = notes["structure"], notes["scale"]
        first = self._origin(structures[0], scales[0])
        if len(notes) == 1 or ((structures == structures[0]).all() and (scales.view("<u4") == scales[:1].view("<u4")).all()):
            return [first]
        origins = {first: 0}
        for position, pair in enumerate(zip(structures.tolist(), scales.tolist(), strict=True)):
            numbers["origin"][position] = origins.setdefault(self._origin(*pair), len(origins))
        return list(origins)

    def _origin(self, structure: int, scale: Any) -> Origin:
        """Return what a note says of a capture's structure, loss scale and whole shape."""
        return Origin(self._stager.structures[structure], _scale_of(scale), self._stager.whole_shapes[structure])

    def _write_one(self, prepared: Prepared) -> tuple[ShardWriter, np.ndarray[Any, Any]]:
        """Write a region of one capture, as large ones are: without NumPy, whose calls cost more than they do here."""
        region, array = prepared.region, prepared.region.array
        assert prepared.crcs is not None
        epoch, batch, call, step, wall_time, backward, _, _, _, _, _ = NOTE.unpack_from(self._stager.memory, region.notes_offset)
        crc = int(prepared.crcs[0])
        shard = self._shard(array, region.shard, (epoch, batch, call))
        memory = self._stager.memory[region.offset : region.offset + region.num_bytes]
        offset = shard.append_chunk(memory, array.spec.entries(epoch, batch, call), crc)
        place = (epoch, batch, call, step, wall_time, offset, array.chunk_bytes + CRC_BYTES, backward, crc, 0, 0)
        return shard, np.array([place], dtype=NUMBERS_DTYPE)

    def _write_many(self, prepared: Prepared) -> tuple[ShardWriter, np.ndarray[Any, Any]]:
        region, notes = prepared.region, prepared.notes
        spec = region.array.spec
        shard = self._shard(region.array, region.shard, (int(notes["epoch"].max()), int(notes["batch"].max()), int(notes["call"].max())))
        entries = spec.entries(notes["epoch"], notes["batch"], notes["call"])
        numbers = _coordinates_of(notes)
        if prepared.chunks is not None:
            numbers["offset"], numbers["length"], numbers["crc32c"] = shard.append_encoded(prepared.chunks, entries)
        else:
            assert prepared.crcs is not None
            memory = self._stager.memory[region.offset : region.offset + region.num_bytes]
            numbers["offset"] = shard.append_region(memory, prepared.slots, entries, prepared.crcs)
            numbers["length"], numbers["crc32c"] = region.array.chunk_bytes + CRC_BYTES, prepared.crcs
        return shard, numbers

    def _write_piece(self, piece: Piece) -> None:
        if piece.is_taken:
            return
        piece.is_taken = True
        if piece.transfer is not None:
            piece.transfer.wait()
        oversize: Oversize = piece.oversize
        capture = oversize.capture
        assert capture.array is not None
        where = capture.coordinates
        shard = self._shard(capture.array, oversize.shard, (where.epoch, where.batch, capture.call))
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
            self._flight.judge_draft(capture)
            self._stager.count_written(align(oversize.num_bytes + CRC_BYTES, PAGE_BYTES), oversize=oversize)
            shard.finish_pieces(
                capture.array.spec.entries(where.epoch, where.batch, capture.call), oversize.file_offset, oversize.num_bytes
            )
            self._note(RowBlock.of(self._row(capture, shard, oversize.file_offset, oversize.num_bytes + CRC_BYTES, oversize.crc)), shard)

    # Shards and rows ----------------------------------------------------------------------------------------------

    def _shard(self, array: Array, where: tuple[int, ...], last: tuple[int, int, int]) -> ShardWriter:
        """Return the shard to write to, publishing the array up to (epoch, batch, call) first; shards that have been left behind are sealed."""
        self._arrays.publish(array.spec, last, self._epoch_batches())
        shards = self._shards.setdefault(array.path, {})
        shard = shards.pop(where, None)
        if shard is None:
            self._seal_left_behind(shards, where)
            directory = self._arrays.directory(array.spec)
            shard = ShardWriter(directory, array.spec, where, self._files)
            self._new_directories.add(directory)
            self._rows_of[shard] = ShardRows(self._files.spool, self._schema)
        shards[where] = shard  # last in the dictionary: used last
        self._dirty[shard.path] = shard
        return shard

    def _seal_left_behind(self, shards: dict[tuple[int, ...], ShardWriter], where: tuple[int, ...]) -> None:
        """Seal shards of an array before one is opened: those that are full, and those of all but the places used last.

        A place is a stretch of epochs and batches; all its shards of calls belong together.
        """
        recent = list(dict.fromkeys([where[:2], *(place[:2] for place in reversed(shards))]))[:_PLACES_UNSEALED]
        left_behind = [shard for place, shard in shards.items() if place[:2] not in recent or (place[:2] != where[:2] and shard.is_full)]
        for shard in left_behind:
            del shards[shard.shard]
        self._seal(left_behind)

    def _row(self, capture: Draft, shard: ShardWriter | None = None, offset: int = 0, length: int = 0, crc: int = 0) -> Row:
        where = capture.coordinates
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
            nbytes=0,  # follows from shape, dtype and status
            wall_time=capture.wall_time_us,
            loss_scale=None if shard is None and capture.statistics is None else _scale_of(capture.scale),
            shard="" if shard is None else shard.key,
            offset=offset,
            length=length,
            crc32c=crc,
            status=capture.status,
            reason=capture.reason,
            structure=self._stager.structures[capture.structure],
            whole_shape=self._stager.whole_shapes[capture.structure],
            portion=capture.take.text,
            statistics=None if capture.statistics is None else divided(capture.statistics, np.float64(capture.scale)),
        )

    def _note_draft(self, draft: Draft) -> None:
        self._note(RowBlock.of(self._row(draft)))

    def _note(self, block: RowBlock, shard: ShardWriter | None = None) -> None:
        """Keep the rows of captures whose bytes are written, until they are acknowledged."""
        if not self._blocks:
            self._noted_at = time.monotonic()
        self._blocks.append((block, shard))

    def _acknowledge(self) -> None:
        """Bring the rows into the journal, in one frame."""
        if not self._blocks:
            return
        batch = make_batch([block for block, _ in self._blocks], self._schema)
        self._manifest.append(batch)
        text_bytes = sum(portion_bytes(block.portion) * len(block.numbers) for block, _ in self._blocks)
        self._count_journal(batch.num_rows * FRAME_ROW_BYTES + text_bytes)
        self._needs_mark = True
        self.num_acknowledged += batch.num_rows
        for block, shard in self._blocks:
            if shard is not None:
                self._rows_of[shard].append(block)
                self.acknowledged_bytes += shard.spec.chunk_bytes * len(block.numbers)
        self._blocks = []

    def _end_with_process(self) -> None:
        """Do what can be done for a recording that the script has not closed: mark the batches that are under way as cut short."""
        batches, step = self._under_way()
        error = getattr(sys, "last_value", None)  # by which the main thread has ended
        if self._fires_when_raised and error is not None:
            number, newest = self._stager.newest
            where = batches[-1] if batches else newest
            reason = f"{name_error(error)} ended the process"
            self._flight.take_event(Event(reason, number, where, step, is_exception=True))
        reason = "the process ended without closing the recorder; captures of this batch may be missing"
        for where in batches:
            self._flight.take_draft(row_of_batch(where, step, time.time_ns() // 1000, "partial", reason))

    def _sync(self) -> None:
        """Make durable what is written, mark it, and answer who waits for that."""
        self._flight.report()
        self._acknowledge()
        self._sync_files()
        self._manifest.mark_durable()
        self._needs_mark = False
        self._synced_at = time.monotonic()
        if self._manifest.is_segment_full:
            self._manifest.finish_segment()
        self._count_journal(0)
        self._answer()

    def _count_journal(self, row_bytes: int) -> None:
        """Count what the journal takes on the disk, without what was set aside for rows with their captures."""
        self._stager.count_written(self._manifest.num_bytes - self._journal_bytes - row_bytes)
        self._journal_bytes = self._manifest.num_bytes

    def _sync_files(self) -> None:
        sync_paths(self._arrays.unsynced | self._new_directories | {shard.path for shard in self._dirty.values()}, self._run_path)
        self._arrays.unsynced.clear()
        self._new_directories.clear()
        self._dirty.clear()

    def _answer(self) -> None:
        for request in [request for request in self._requests if self._can_answer(request)]:
            request.done.set()
            self._requests.remove(request)

    def _seal(self, shards: Sequence[ShardWriter]) -> None:
        """Seal shards, with the syncs of all together: the first brings most of the others about."""
        if not shards:
            return
        self._acknowledge()  # a shard carries its rows
        self._arrays.grow()  # before the shards appear
        for shard in shards:
            rows = self._rows_of.pop(shard)
            shard.finish(rows_to_stream(rows.batches, shard.take_earlier_rows()))
            rows.clear()
            self._dirty.pop(shard.path, None)
        publish(shards, self._run_path)
        self._stager.count_written(-sum(shard.cloned_bytes for shard in shards))

    def _finish(self) -> None:
        """Seal every shard, publish exact extents, turn the journal into a part."""
        self._flight.close()
        self._arrays.finish(self._epoch_batches())
        self._seal([shard for shards in self._shards.values() for shard in shards.values()])
        self._shards.clear()
        self._acknowledge()
        self._sync_files()
        self._manifest.finish_segment()
        self._answer()
        if self._lock is not None:
            self._lock.release()
        with contextlib.suppress(OSError):  # a network file system's own hidden file may lie there; all of ours are gone
            system.rmdir(os.path.join(self._run_path, JOURNAL_DIR))
        sync_directory(self._run_path)


def _coordinates_of(notes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the numbers of rows as far as the notes have them."""
    numbers = np.zeros(len(notes), dtype=NUMBERS_DTYPE)
    for name in ("epoch", "batch", "call", "step", "wall_time", "backward"):
        numbers[name] = notes[name]
    return numbers


def _scale_of(scale: Any) -> float | None:
    value = float(scale)
    return None if math.isnan(value) else value
