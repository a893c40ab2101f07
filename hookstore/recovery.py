"""What becomes of a run whose writer died: its journal is turned into manifest parts, and its shards are adopted or sealed.

Nothing here is needed to read such a run: `hookstore.open` sees every acknowledged capture as it is. Recovery makes it whole for plain Zarr readers, and ready
to be recorded further. Each step leaves the run readable, and can be done again after a kill in the middle of it: a file is removed only when what was in it is
durable elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hookstore.arrays import ArrayStore
from hookstore.blocks import RowBlock, make_batch
from hookstore.dimensions import is_coordinate
from hookstore.errors import CorruptRunError
from hookstore.files import leads_outside, list_names, sync_directory, sync_paths, system, write_new
from hookstore.format import (
    CRC_BYTES,
    DAMAGED_DIR,
    JOURNAL_DIR,
    LARGEST_COORDINATE,
    LAYERS_DIR,
    LOCK_FILE,
    MAKING_PREFIX,
    MANIFEST_DIR,
    SEGMENT_BYTES,
    SEGMENT_ROWS,
    WRITING_SUFFIX,
    ArraySpec,
    Row,
    cloning_name,
    is_array_path,
    is_shard_key,
    parse_part_name,
    parse_segment_name,
    parse_shard_key,
    parse_unsealed_name,
    unsealed_name,
)
from hookstore.lock import STALE_S, Owner, RunLock
from hookstore.manifest import (
    Key,
    RowGroups,
    code_rows,
    join_pieces,
    load_part,
    load_segment,
    missing_keys,
    rows_to_stream,
    stream_to_table,
    unknown_part,
    write_part,
)
from hookstore.metadata import StoredArray, read_array, read_description
from hookstore.schema import SCHEMA, join, plain, table_of
from hookstore.shards import Adopted, ShardFiles, ShardWriter, check_chunks, clone_file, publish, read_sealed

_SEALED_TOGETHER = 64
_COPY_BYTES = 8 << 20

Progress = Callable[[int, int, str], None]
"""Takes how much is done, of how much, and what is being done."""


@dataclass(slots=True)
class RecoveryReport:
    """What `recover` found and did.

    Attributes
    ----------
    path : str
        Directory of the run.
    was_finished : bool
        Whether there was nothing to do but to look.
    num_from_journal : int
        Manifest rows that were in the journal alone.
    num_from_shards : int
        Manifest rows that were in the shards alone.
    num_lost : int
        Captures that were acknowledged but not durable, and did not survive a power failure.
    num_sealed : int
        Shards that were sealed.
    num_removed : int
        Files that held nothing acknowledged.
    problems : list of str
        What was found damaged, and what became of it.
    """

    path: str
    was_finished: bool = False
    num_from_journal: int = 0
    num_from_shards: int = 0
    num_lost: int = 0
    num_sealed: int = 0
    num_removed: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Unsealed:
    """A shard under its hidden name, with the rows of the captures in it, in `hookstore.manifest.CODED_SCHEMA`."""

    spec: ArraySpec
    shard: tuple[int, ...]
    rows: pa.Table

    def adopt(self, layers_path: str, files: ShardFiles) -> ShardWriter:
        """Return what goes on writing it."""
        rows = self.rows
        epochs, batches, calls, offsets, lengths = (
            np.asarray(rows[name].combine_chunks()) for name in ("epoch", "batch", "call", "offset", "length")
        )
        adopted = Adopted(
            self.spec.entries(epochs, batches, calls), offsets, lengths, rows_to_stream(rows.cast(plain(rows.schema)).to_batches())
        )
        return ShardWriter(os.path.join(layers_path, *self.spec.path.split("/")), self.spec, self.shard, files, adopted)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A run that has been made ready to be written to again.

    Attributes
    ----------
    attempt : int
        Number of the next attempt.
    arrays : list of StoredArray
        Its arrays.
    seen : dict
        Epochs, batches and calls that the captures of each array need, by the array's path.
    unsealed : list of Unsealed
        Its shards that are not sealed.
    """

    attempt: int
    arrays: list[StoredArray]
    seen: dict[str, tuple[int, int, int]]
    unsealed: list[Unsealed]


def recover(path: str | os.PathLike[str], *, progress: Progress | None = None) -> RecoveryReport:
    """Finish a run whose writer died: seal its shards, bring its journal into the manifest, find rows that the manifest lacks in the shards.

    Nothing acknowledged is dropped, and doing it again changes nothing. A run can be read without; what is gained is that plain Zarr readers see all of it.

    Parameters
    ----------
    path : path-like
        Directory of the run.
    progress : callable, optional
        Called with how much is done, of how much, and what is being done.

    Returns
    -------
    RecoveryReport
        What was found and done.

    Raises
    ------
    NotARunError
        If there is no run in that directory.
    RunLockedError
        If a living process writes to it.
    CorruptRunError
        If ``run.json`` is damaged, or one of its directories leads out of it.
    """
    run_path = os.path.abspath(os.fspath(path))
    read_description(run_path)
    report = RecoveryReport(run_path)
    with locked(run_path):
        leftover = take_up(run_path, report, thorough=True, progress=progress)
        if not report.was_finished:
            _seal(run_path, leftover, report, progress)
    return report


@contextlib.contextmanager
def locked(run_path: str) -> Iterator[None]:
    """Hold the lock of a run; its journal directory, which the lock lies in, goes with the lock if nothing else is in it."""
    lock = open_lock(run_path)
    try:
        yield
    finally:
        close_lock(run_path, lock)


def open_lock(run_path: str) -> RunLock:
    """Take the lock of a run, and return it; see `hookstore.lock.RunLock`."""
    check_directories(run_path)
    for _ in range(10):
        try:
            with contextlib.suppress(FileExistsError):
                system.mkdir(os.path.join(run_path, JOURNAL_DIR))
            return RunLock(run_path)
        except FileNotFoundError:  # who had it has just removed the directory
            time.sleep(0.01)
    return RunLock(run_path)


def close_lock(run_path: str, lock: RunLock) -> None:
    """Let the lock of a run go, and its journal directory if nothing else is in it."""
    lock.release()
    with contextlib.suppress(OSError):
        system.rmdir(os.path.join(run_path, JOURNAL_DIR))


def check_directories(run_path: str) -> None:
    """Raise `CorruptRunError` if a directory of the run leads out of it: who writes there would write elsewhere."""
    for name in (LAYERS_DIR, MANIFEST_DIR, JOURNAL_DIR, DAMAGED_DIR):
        directory = os.path.join(run_path, name)
        if leads_outside(run_path, directory):
            raise CorruptRunError(f"{directory} leads out of the run, to {os.path.realpath(directory)}", path=directory)
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise CorruptRunError(f"{directory} is no directory", path=directory)


def take_up(run_path: str, report: RecoveryReport, *, thorough: bool, progress: Progress | None = None) -> Leftover:
    """Make a run ready to be written to again. The caller holds its lock.

    Parameters
    ----------
    run_path : str
        The run.
    report : RecoveryReport
        Filled in.
    thorough : bool
        Whether to look for rows in the sealed shards of a run that was finished, too.
    progress : callable, optional
        See `recover`.
    """
    return _TakeUp(run_path, report, progress or (lambda *_: None)).run(thorough=thorough)


class _TakeUp:
    """The steps of `take_up`."""

    def __init__(self, run_path: str, report: RecoveryReport, progress: Progress) -> None:
        self.run_path = run_path
        self.layers_path = os.path.join(run_path, LAYERS_DIR)
        self.report = report
        self.progress = progress
        self.arrays: dict[str, StoredArray] = {}
        self.sealed: dict[str, set[str]] = {}  # keys of shards by array
        self.hidden: dict[str, set[str]] = {}
        self.broken: dict[str, set[str]] = {}  # sealed, but without an index that can be read
        self.pieces: dict[Key, pa.Table] = {}  # of the manifest
        self.used: set[Key] = set()  # names that must not be used again
        self.damaged: set[Key] = set()  # parts that were
        self.unreadable: list[str] = []  # what is wrong with arrays that nobody can go on with
        self.is_manifest_whole = True

    def run(self, *, thorough: bool) -> Leftover:
        for directory in (self.layers_path, os.path.join(self.run_path, MANIFEST_DIR)):
            if not os.path.isdir(directory):
                system.mkdir(directory)
        self._find_files()
        if self.unreadable and not thorough:
            raise CorruptRunError(f"{self.unreadable[0]}; bring it back from a copy, or record into a new run", path=self.layers_path)
        segments, damaged_parts = self._find_manifest()
        self.report.was_finished = not segments and not any(self.hidden.values())
        self._make_durable()
        for path in damaged_parts:
            self._put_aside(path)
        self._finish_segments(segments)
        if thorough or not self.report.was_finished or not self.is_manifest_whole:
            self._find_rows_in_shards()
        rows = self._rows()
        groups = RowGroups(rows)
        unsealed = self._unsealed(rows, groups)
        self.report.was_finished &= not unsealed
        attempts = [attempt for _, attempt, _ in self.used]
        return Leftover(max(attempts, default=-1) + 1, list(self.arrays.values()), self._seen(rows), unsealed)

    # What is there ------------------------------------------------------------------------------------------------

    def _find_files(self) -> None:
        """List arrays and shards, and remove what a writer was about to make."""
        for name in list_names(self.run_path):
            path = os.path.join(self.run_path, name)
            if name.startswith(MAKING_PREFIX) and os.path.isdir(path) and not os.path.islink(path):
                for inner in list_names(path):
                    self._remove(os.path.join(path, inner))
                with contextlib.suppress(OSError):
                    system.rmdir(path)
        self._remove_unfinished(self.run_path)
        self._remove_unfinished(os.path.join(self.run_path, MANIFEST_DIR))
        self._remove_unfinished(self.layers_path)
        for layer in list_names(self.layers_path):
            layer_path = os.path.join(self.layers_path, layer)
            if os.path.isdir(layer_path) and not leads_outside(self.run_path, layer_path):
                self._remove_unfinished(layer_path)
                coordinates = []
                for name in list_names(layer_path):
                    if is_coordinate(name):
                        coordinates.append(name)
                    else:
                        self._find_shards(f"{layer}/{name}", os.path.join(layer_path, name))
                if coordinates and not self.unreadable:
                    self._remove_unused(layer, coordinates)

    def _remove_unused(self, layer: str, coordinates: list[str]) -> None:
        """Remove coordinates of a layer that no array has: a writer died before it made the array."""
        used = {name for array, stored in self.arrays.items() if array.startswith(f"{layer}/") for name in stored.names}
        for name in coordinates:
            directory = os.path.join(self.layers_path, layer, name)
            if name not in used and os.path.isdir(directory) and not leads_outside(self.run_path, directory):
                for file in list_names(directory):
                    self._remove(os.path.join(directory, file))
                with contextlib.suppress(OSError):
                    system.rmdir(directory)

    def _find_shards(self, array: str, directory: str) -> None:
        if not os.path.isdir(directory):
            return
        if leads_outside(self.run_path, directory):
            self._problem(f"{directory} leads out of the run; it is left alone")
            return
        self._remove_unfinished(directory)
        try:
            self.arrays[array] = read_array(self.run_path, array)
        except CorruptRunError as error:
            self._problem(f"{error}; its shards are left as they are")
            self.unreadable.append(str(error))
            return
        names = [name for name in list_names(directory) if _is_regular(os.path.join(directory, name))]
        self.sealed[array] = {name for name in names if is_shard_key(name)}
        self.broken[array] = set()
        self.hidden[array] = {key for name in names if (key := parse_unsealed_name(name)) is not None}
        for name in names:
            key = name.removeprefix(".").removesuffix(".cloning")
            if name == cloning_name(key) and is_shard_key(key):
                self._remove(os.path.join(directory, name))

    def _find_manifest(self) -> tuple[dict[Key, str], list[str]]:
        """Load the parts; return the journal's segments, and the parts that are damaged."""
        damaged = []
        directory = os.path.join(self.run_path, MANIFEST_DIR)
        for name in list_names(directory):
            parsed = parse_part_name(name)
            if parsed is None:
                continue
            path = os.path.join(directory, name)
            self.used.add(parsed[0])
            try:
                self.pieces[parsed[0]] = load_part(path, parsed[1])
            except CorruptRunError as error:
                self._problem(f"{error}; it is moved to {DAMAGED_DIR}/")
                self.is_manifest_whole = False
                self.damaged.add(parsed[0])
                damaged.append(path)
        segments = {}
        directory = os.path.join(self.run_path, JOURNAL_DIR)
        for name in list_names(directory):
            key = parse_segment_name(name)
            if key is not None:
                segments[key] = os.path.join(directory, name)
            elif name.startswith(f"{LOCK_FILE}.") and _is_left(os.path.join(directory, name)):
                self._remove(os.path.join(directory, name))
        self.used.update(segments)
        for key in missing_keys(self.used):
            self._problem(f"manifest part {unknown_part(self.run_path, key)} is missing; its rows are looked for in the shards")
            self.is_manifest_whole = False
        return segments, damaged

    def _make_durable(self) -> None:
        """Bring all that the journal tells of to the device, before a part says that it is there."""
        # (parts too: a segment goes when its part is there, and the part's name must not be what the power takes then)
        paths = {self.run_path, self.layers_path, os.path.join(self.run_path, MANIFEST_DIR)}
        for array, keys in self.hidden.items():
            if keys:
                directory = os.path.join(self.layers_path, array)
                paths |= {directory, os.path.dirname(directory), *(os.path.join(directory, unsealed_name(key)) for key in keys)}
        sync_paths(paths, self.run_path)

    # The manifest -------------------------------------------------------------------------------------------------

    def _finish_segments(self, segments: dict[Key, str]) -> None:
        """Turn segments into parts."""
        last = {key[:2]: key for key in sorted(segments)}
        for number, (key, path) in enumerate(sorted(segments.items())):
            self.progress(number, len(segments), "reading the journal")
            is_whole = True
            if key not in self.pieces:
                try:
                    _, segment = load_segment(path)
                except CorruptRunError as error:
                    self._problem(f"{error}; it is moved to {DAMAGED_DIR}/")
                    self.is_manifest_whole = False
                    self._put_aside(path)
                    continue
                is_whole = not segment.damaged
                if not is_whole:
                    self.is_manifest_whole = False
                    self._problem(
                        f"journal segment {path} is damaged at byte {', '.join(map(str, segment.damaged))}; what else is in it is kept, and the file is "
                        f"moved to {DAMAGED_DIR}/"
                    )
                rows = table_of(segment.batches)
                if rows.num_rows:
                    rows = self._checked(rows, segment.num_durable if is_whole else 0)
                    self.report.num_from_journal += rows.num_rows
                    if last[key[:2]] == key:
                        rows = join([rows, _mark_of_death(rows)])
                    self._write_part(key, rows)
            if is_whole:
                self._unlink(path)
            else:
                self._put_aside(path)

    def _checked(self, rows: pa.Table, num_durable: int) -> pa.Table:
        """Mark those of a segment's rows as lost whose bytes are not there: only what is not durable can be so."""
        groups = RowGroups(rows)
        statuses = rows["status"].to_pylist()
        reasons = rows["reason"].to_pylist()
        offsets, lengths, crcs = (np.asarray(rows[name].combine_chunks()) for name in ("offset", "length", "crc32c"))
        for (array, key), positions in groups.items():
            unsure = positions[positions >= num_durable]
            is_gone = is_array_path(array) and not os.path.isdir(os.path.join(self.layers_path, array))
            if unsure.size and (array in self.arrays or is_gone):  # what is in an array that cannot be read is not known, and so not lost
                is_right = np.zeros(unsure.size, dtype=bool)
                for path in self._files_of(array, key):
                    is_right |= check_chunks(path, offsets[unsure], lengths[unsure], crcs[unsure])
                for position in unsure[~is_right].tolist():
                    statuses[position], reasons[position] = "lost", "its bytes had not reached the device when the machine stopped"
                    self.report.num_lost += 1
        if not self.report.num_lost:
            return rows
        columns = {"status": statuses, "reason": reasons}
        for name, texts in columns.items():
            rows = rows.set_column(rows.schema.get_field_index(name), SCHEMA.field(name), pa.array(texts, type=pa.string()))
        return rows

    def _files_of(self, array: str, key: str) -> list[str]:
        """Return the files that a shard has, sealed and hidden."""
        if array not in self.arrays:
            return []
        directory = os.path.join(self.layers_path, array)
        sealed = [os.path.join(directory, key)] if key in self.sealed[array] else []
        return sealed + ([os.path.join(directory, unsealed_name(key))] if key in self.hidden[array] else [])

    def _write_part(self, key: Key, rows: pa.Table) -> None:
        write_part(self.run_path, key, rows.to_batches())
        self.used.add(key)
        self.pieces[key] = code_rows(rows)

    def _rows(self) -> pa.Table:
        """Return all rows, in the order in which they were acknowledged."""
        return join_pieces(self.pieces).combine_chunks()  # rows are taken from it again and again

    def _find_rows_in_shards(self) -> None:
        """Find the rows that sealed shards carry and the manifest lacks."""
        rows = self._rows()
        groups = RowGroups(rows)
        offsets = np.asarray(rows["offset"].combine_chunks())
        total = sum(map(len, self.sealed.values()))
        done = 0
        found: list[pa.Table] = []
        for array, keys in self.sealed.items():
            for key in sorted(keys):
                self.progress(done, total, "looking into the shards")
                done += 1
                path = os.path.join(self.layers_path, array, key)
                try:
                    carried = stream_to_table(read_sealed(path, self.arrays[array].spec.num_entries)[1], path)
                except CorruptRunError as error:
                    self._problem(str(error))
                    self.broken[array].add(key)
                    continue
                is_new = ~np.isin(np.asarray(carried["offset"].combine_chunks()), offsets[groups.of(array, key)])
                is_new &= np.array(
                    [(row["array"], row["shard"]) == (array, key) for row in carried.select(["array", "shard"]).to_pylist()], dtype=bool
                )
                if is_new.any():
                    found.append(carried.filter(pa.array(is_new)))
        if found:
            self._add_found(join(found))
        for missing in missing_keys([*self.pieces, *self.damaged]):
            self._write_part(missing, SCHEMA.empty_table())  # all that can be found of it has been, and has been told

    def _add_found(self, rows: pa.Table) -> None:
        """Write the rows as parts, in place of those that are missing."""
        self.report.num_from_shards += rows.num_rows
        ranks, attempts = (np.asarray(rows[name].combine_chunks()) for name in ("rank", "attempt"))
        for rank, attempt in sorted(set(zip(ranks.tolist(), attempts.tolist(), strict=True))):
            of_attempt = rows.filter(pa.array((ranks == rank) & (attempts == attempt)))
            free = (index for index in itertools.count() if (rank, attempt, index) not in self.pieces)
            num_rows = max(1, min(SEGMENT_ROWS, of_attempt.num_rows * SEGMENT_BYTES // max(1, of_attempt.nbytes)))
            for start in range(0, of_attempt.num_rows, num_rows):
                self._write_part((rank, attempt, next(free)), of_attempt.slice(start, num_rows))

    # Shards -------------------------------------------------------------------------------------------------------

    def _unsealed(self, rows: pa.Table, groups: RowGroups) -> list[Unsealed]:
        """Return the hidden shards that are to be gone on with, and put aside or remove the others."""
        unsealed = []
        statuses = rows["status"].combine_chunks()
        is_captured = np.asarray(statuses.cast(pa.string()).to_numpy(zero_copy_only=False) == "ok", dtype=bool)
        for array, stored in self.arrays.items():
            spec = stored.spec
            for key in sorted(self.hidden[array] | self.broken[array]):
                shard = parse_shard_key(key, len(spec.shard_shape))
                if spec.shard_key(shard) != key:
                    self._problem(
                        f"{os.path.join(self.layers_path, array, key)} is no shard of an array like this one; it is left as it is"
                    )
                    continue
                positions = groups.of(array, key)
                mine = rows.take(pa.array(positions[is_captured[positions]]))
                mine = mine.filter(pa.array(self._are_inside(array, key, mine)))
                keep = key in self.hidden[array] and self._make_whole(array, key, mine)
                keep = keep or (key in self.broken[array] and self._give_index(array, key, mine))
                if keep:
                    unsealed.append(Unsealed(spec, shard, mine))
        return unsealed

    def _are_inside(self, array: str, key: str, rows: pa.Table) -> np.ndarray[Any, Any]:
        """Say which rows have their captures in what is there of a shard; others would make it as long as they please."""
        offsets, lengths = (np.asarray(rows[name].combine_chunks(), dtype=np.int64) for name in ("offset", "length"))
        size = max(os.path.getsize(path) for path in self._files_of(array, key))
        return np.asarray((offsets >= 0) & (lengths > CRC_BYTES) & (lengths <= size) & (offsets <= size - lengths))

    def _make_whole(self, array: str, key: str, rows: pa.Table) -> bool:
        """See to the clone of a sealed shard, or a hidden shard; say whether it is to be gone on with."""
        directory = os.path.join(self.layers_path, array)
        hidden, sealed = os.path.join(directory, unsealed_name(key)), os.path.join(directory, key)
        offsets, lengths = (np.asarray(rows[name].combine_chunks(), dtype=np.int64) for name in ("offset", "length"))
        sealed_bytes = os.path.getsize(sealed) if key in self.sealed[array] else 0
        if not (offsets + lengths > sealed_bytes).any():
            if self.is_manifest_whole:
                self._remove(hidden)
            else:
                self._problem(f"{hidden} holds bytes that no row tells of; it is moved to {DAMAGED_DIR}/")
                self._put_aside(hidden)
            return False
        if sealed_bytes and not _begins_as(hidden, sealed):
            # The power failed before all of the clone was on the device. What came behind it may have got there.
            cloning = os.path.join(directory, cloning_name(key))
            extra = [
                (offset, length)
                for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
                if offset + length > sealed_bytes
            ]
            clone_file(sealed, cloning, cloning)
            _copy_pieces(hidden, cloning, extra)
            sync_paths([cloning], self.run_path)
            system.replace(cloning, hidden)
            sync_directory(directory)
        return True

    def _give_index(self, array: str, key: str, rows: pa.Table) -> bool:
        """Let a sealed shard whose end is damaged be sealed again, if its rows are known."""
        path = os.path.join(self.layers_path, array, key)
        offsets, lengths, crcs = (np.asarray(rows[name].combine_chunks()) for name in ("offset", "length", "crc32c"))
        if not rows.num_rows or not check_chunks(path, offsets, lengths, crcs).all():
            return False
        self._problem(f"shard {path} has no index that can be read; it gets a new one, since the manifest has its rows")
        directory = os.path.dirname(path)
        cloning = os.path.join(directory, cloning_name(key))
        write_new(cloning, b"")  # what is in the file beside its captures is not known, and may be any amount
        _copy_pieces(path, cloning, list(zip(offsets.tolist(), lengths.tolist(), strict=True)))
        sync_paths([cloning], self.run_path)
        system.replace(cloning, os.path.join(directory, unsealed_name(key)))
        return True

    def _seen(self, rows: pa.Table) -> dict[str, tuple[int, int, int]]:
        """Return the extents that the captures of each array need."""
        columns = [np.asarray(rows[name].combine_chunks()) for name in ("epoch", "batch", "call")]
        arrays = rows["array"].combine_chunks()
        codes, texts = (np.asarray(arrays.indices), arrays.dictionary.to_pylist()) if rows.num_rows else (np.empty(0, int), [])
        seen = {}
        for code, text in enumerate(texts):
            of_array = codes == code
            if text and of_array.any():
                seen[text] = tuple(min(max(int(column[of_array].max()), 0) + 1, LARGEST_COORDINATE) for column in columns)
        return seen  # type: ignore[return-value]  # three each

    # Files --------------------------------------------------------------------------------------------------------

    def _problem(self, text: str) -> None:
        self.report.problems.append(text)

    def _put_aside(self, path: str) -> None:
        directory = os.path.join(self.run_path, DAMAGED_DIR)
        if not os.path.isdir(directory):
            system.mkdir(directory)
            sync_directory(self.run_path)
        relative = os.path.relpath(path, self.run_path)
        name = relative.removeprefix(f"{LAYERS_DIR}/").replace("/", "%2f")[-250:]
        taken = set(list_names(directory))
        target = next(one for one in itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1))) if one not in taken)
        system.replace(path, os.path.join(directory, target))
        sync_directory(directory)
        sync_directory(os.path.dirname(path))

    def _remove(self, path: str) -> None:
        with contextlib.suppress(OSError):
            system.unlink(path)
            self.report.num_removed += 1

    def _unlink(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            system.unlink(path)

    def _remove_unfinished(self, directory: str) -> None:
        for name in list_names(directory):
            if name.startswith(".") and name.endswith(WRITING_SUFFIX):
                self._remove(os.path.join(directory, name))


def _is_left(path: str) -> bool:
    """Say whether a file is what is left of a dead process's try to take the lock."""
    owner = Owner.read(path)
    if owner is not None and owner.lives() is False:
        return True
    try:
        return time.time() - os.path.getmtime(path) > STALE_S
    except OSError:  # it is gone
        return False


def _is_regular(path: str) -> bool:
    """Say whether there is a file of bytes, not a link to one or a pipe."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _mark_of_death(rows: pa.Table) -> pa.Table:
    """Return a row that marks the batch that was under way when the writer died, as far as the rows tell."""
    if rows["status"][rows.num_rows - 1].as_py() == "partial":
        return SCHEMA.empty_table()
    newest = rows["wall_time"].chunks[-1]  # acknowledged together; clocks are set back in between, and in that order layers take turns
    position = rows.num_rows - len(newest) + int(np.asarray(newest.view(pa.int64())).argmax())
    last = rows.slice(position, 1).to_pylist()[0]
    block = partial_block(
        (last["phase"], last["epoch"], last["batch"]),
        step=last["step"],
        rank=last["rank"],
        attempt=last["attempt"],
        wall_time=rows["wall_time"].chunks[-1].view(pa.int64())[position - rows.num_rows].as_py(),
        reason="the recording process ended without closing the run; captures of this batch, and of those within a second before it, may be missing",
    )
    return pa.Table.from_batches([make_batch([block])], schema=SCHEMA)


def partial_block(where: tuple[str, int, int], *, step: int, rank: int, attempt: int, wall_time: int, reason: str) -> RowBlock:
    """Make the row that marks a batch as cut short."""
    phase, epoch, batch = where
    row = Row(phase, epoch, batch, 0, 0, step, "", "", "", rank, attempt, "", (), "", 0, wall_time, None, "", 0, 0, 0, "partial", reason)
    return RowBlock.of(row)


def _begins_as(path: str, other: str) -> bool:
    """Say whether a file begins with all of another."""
    with open(path, "rb") as longer, open(other, "rb") as shorter:
        while expected := shorter.read(_COPY_BYTES):
            if longer.read(len(expected)) != expected:
                return False
    return True


def _copy_pieces(source: str, target: str, pieces: Sequence[tuple[int, int]]) -> None:
    """Copy pieces of a file, (offset, length) each, to the same places in another."""
    reading, writing = os.open(source, os.O_RDONLY), system.open(target, os.O_WRONLY)
    try:
        for offset, length in pieces:
            at, end = offset, offset + length
            while at < end:
                contents = memoryview(os.pread(reading, min(_COPY_BYTES, end - at), at))
                if not contents:
                    break  # it ends there; what is missing has been marked
                while contents:
                    count = system.pwrite(writing, contents, at)
                    contents, at = contents[count:], at + count
    finally:
        os.close(reading)
        system.close(writing)


def _seal(run_path: str, leftover: Leftover, report: RecoveryReport, progress: Progress | None) -> None:
    """Seal every shard, and publish exact extents."""
    layers_path = os.path.join(run_path, LAYERS_DIR)
    store = ArrayStore(layers_path, stored=leftover.arrays, seen=leftover.seen)
    store.finish(None)
    files = ShardFiles(os.path.join(run_path, JOURNAL_DIR))
    try:
        for start in range(0, len(leftover.unsealed), _SEALED_TOGETHER):
            if progress is not None:
                progress(start, len(leftover.unsealed), "sealing shards")
            shards = [unsealed.adopt(layers_path, files) for unsealed in leftover.unsealed[start : start + _SEALED_TOGETHER]]
            for shard in shards:
                shard.finish(shard.take_earlier_rows())
            publish(shards, run_path)
            report.num_sealed += len(shards)
    finally:
        files.close()
    sync_paths(store.unsynced | {run_path, layers_path}, run_path)
