"""`verify`: hold every manifest row against every shard, and every shard against the manifest."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hookstore.dimensions import coordinate_files, dimensions_of, is_coordinate
from hookstore.errors import CorruptRunError
from hookstore.files import leads_outside, list_names, read_small
from hookstore.format import (
    CRC_BYTES,
    DTYPES,
    LAYERS_DIR,
    MISSING,
    PORTION_COLUMN,
    STATUSES,
    STORED,
    ArraySpec,
    is_array_path,
    is_shard_key,
    parse_shard_key,
    unsealed_name,
)
from hookstore.manifest import ManifestReader, RowGroups, stream_to_table
from hookstore.metadata import StoredArray, read_array, read_description
from hookstore.shards import check_chunks, read_sealed

_MOST_FAULTS = 10_000
_OF_ARRAY = ("layer", "kind", "phase", "leaf", "dtype", PORTION_COLUMN[0])  # what all rows of an array have in common
_TRIES = 3  # shards of a live run are renamed while one looks

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is not as it should be.

    Attributes
    ----------
    problem : str
        What is wrong.
    path : str
        The file.
    layer, kind, phase : str
        Of the capture concerned; empty where it is none.
    epoch, batch, call, attempt : int
        Of the capture concerned; -1 where it is none.
    """

    problem: str
    path: str
    layer: str = ""
    kind: str = ""
    phase: str = ""
    epoch: int = -1
    batch: int = -1
    call: int = -1
    attempt: int = -1

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call > 0 else ""
        attempt = f", attempt {self.attempt}" if self.attempt > 0 else ""
        where = f"{self.kind} of layer {self.layer!r} in {self.phase} epoch {self.epoch}, batch {self.batch}{call}{attempt}: "
        return f"{where if self.epoch >= 0 else ''}{self.problem} ({self.path})"


@dataclass(slots=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    path : str
        Directory of the run.
    num_captures, num_bytes, num_shards : int
        Captures that were checked, their bytes on disk, and the shards that they are in.
    num_gaps, num_lost : int
        Manifest rows with neither a tensor nor statistics, and those of them that a power failure took.
    num_faults : int
        Everything that is wrong.
    faults : list of Fault
        The first 10,000 of these.
    """

    path: str
    num_captures: int = 0
    num_bytes: int = 0
    num_shards: int = 0
    num_gaps: int = 0
    num_lost: int = 0
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return self.num_faults == 0

    def _add(self, fault: Fault) -> None:
        self.num_faults += 1
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(fault)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None, num_threads: int | None = None) -> Verification:
    """Check a run: every checksum, every manifest row against its shard, every shard against its rows and its index.

    Reads all of it, in parallel. A live run can be checked too: what was acknowledged when it began.

    Parameters
    ----------
    path : path-like
        Directory of the run.
    progress : callable, optional
        Called with the bytes that are done, all of them, and what is being done.
    num_threads : int, optional
        How many shards to read at once; by default as many as there are CPUs, 8 at most.

    Returns
    -------
    Verification
        What was found.

    Raises
    ------
    NotARunError
        If there is no run in that directory.
    CorruptRunError
        If its ``run.json``, or all of its manifest, is damaged.
    """
    run_path = os.path.abspath(os.fspath(path))
    read_description(run_path)
    found = Verification(run_path)
    reader = ManifestReader(run_path, warns=False)
    check = _Check(run_path, reader.read(), found)
    for damaged, problem in reader.damaged.items():
        found._add(Fault(problem, damaged))
    jobs = check.jobs()
    total = sum(job.num_bytes for job in jobs)
    done = 0
    faulty: dict[tuple[str, str], list[Fault]] = {}
    with ThreadPoolExecutor(num_threads or min(8, os.cpu_count() or 1)) as pool:
        for job, faults in zip(jobs, pool.map(check.shard, jobs), strict=True):
            if faults:
                faulty[job.array, job.key] = faults
            done += job.num_bytes
            if progress is not None:
                progress(done, total, "reading shards")
    for _ in range(_TRIES):
        # A live run goes on meanwhile: a shard that was sealed after the manifest was read has rows that came later.
        rows = reader.read() if faulty else check.rows
        if rows.num_rows == check.rows.num_rows:
            break
        check = _Check(run_path, rows, Verification(run_path))
        again = [job for job in check.jobs() if (job.array, job.key) in faulty]
        faulty = {(job.array, job.key): faults for job in again if (faults := check.shard(job))}
    for fault in itertools.chain.from_iterable(faulty.values()):
        found._add(fault)
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    """One shard, and the positions of the rows that have captures in it."""

    array: str
    key: str
    stored: StoredArray
    positions: np.ndarray[Any, Any]
    num_bytes: int


class _Check:
    """The rows of a run, and what is held against them."""

    def __init__(self, run_path: str, rows: pa.Table, found: Verification) -> None:
        self.run_path = run_path
        self.layers_path = os.path.join(run_path, LAYERS_DIR)
        self.rows = rows
        self.found = found
        self.groups = RowGroups(rows)
        self.numbers = {
            name: np.asarray(rows[name].combine_chunks())
            for name in ("epoch", "batch", "call", "attempt", "offset", "length", "crc32c", "nbytes")
        }
        self.coded = {name: self._codes(name) for name in (*_OF_ARRAY, "status")}
        shapes = rows["shape"].combine_chunks()
        self.shape_ends, self.sizes = np.asarray(shapes.offsets), np.asarray(shapes.values)
        codes, texts = self.coded["status"]
        self.statuses = np.asarray(np.array([*texts, ""], dtype=object)[codes])
        found.num_captures = int((self.statuses == "ok").sum())
        found.num_lost = int((self.statuses == "lost").sum())
        found.num_gaps = len(self.statuses) - int(np.isin(self.statuses, (*STORED, "fired")).sum())
        for position in np.flatnonzero(~np.isin(self.statuses, STATUSES)).tolist():
            found._add(self._fault(position, f"the manifest has status {self.statuses[position]!r}, which there is not", run_path))

    def _codes(self, name: str) -> tuple[np.ndarray[Any, Any], list[str]]:
        """Return a column of text as numbers that count into its texts; one that the run does not have is empty."""
        if name not in self.rows.schema.names:
            return np.zeros(self.rows.num_rows, dtype=np.int32), [""]
        column = self.rows[name].combine_chunks()
        return (np.asarray(column.indices), column.dictionary.to_pylist()) if len(column) else (np.empty(0, dtype=np.int32), [])

    def _fault(self, position: int, problem: str, path: str) -> Fault:
        row = self.rows.slice(position, 1).select(["layer", "kind", "phase"]).to_pylist()[0]
        place = (int(self.numbers[name][position]) for name in ("epoch", "batch", "call", "attempt"))
        return Fault(problem, path, row["layer"], row["kind"], row["phase"], *place)

    def jobs(self) -> list[_Job]:
        """List the shards, with what is wrong already noted."""
        jobs: list[_Job] = []
        stored: dict[str, StoredArray | None] = {}
        known = dict(self.groups.items())
        for array, key in [*known, *self._without_rows(known)]:
            positions = self.groups.of(array, key)
            positions = positions[self.statuses[positions] == "ok"]
            if not positions.size and not os.path.isdir(os.path.join(self.layers_path, array)):
                continue  # a power failure took all of it, and its rows say so
            if array not in stored:
                stored[array] = self._read_array(array)
            of_array = stored[array]
            if of_array is None or not is_shard_key(key):
                for position in positions.tolist():
                    if self.numbers["nbytes"][position] or array:  # an empty tensor is in no shard
                        problem = f"its array {array!r} cannot be read" if of_array is None else f"its shard is called {key!r}"
                        self.found._add(self._fault(position, problem, os.path.join(self.layers_path, array)))
                continue
            num_bytes = int(np.clip(self.numbers["length"][positions], 0, 2**48).sum())
            self.found.num_bytes += num_bytes
            self.found.num_shards += 1
            jobs.append(_Job(array, key, of_array, positions, num_bytes))
        return jobs

    def _read_array(self, array: str) -> StoredArray | None:
        if not array:
            return None
        path = os.path.join(self.layers_path, array)
        try:
            stored = read_array(self.run_path, array)
        except CorruptRunError as error:
            self.found._add(Fault(str(error), error.path))
            return None
        if leads_outside(self.run_path, path):
            self.found._add(Fault("the array leads out of the run", path))
            return None
        self._check_coordinates(stored)
        return stored

    def _check_coordinates(self, stored: StoredArray) -> None:
        """See that the positions beside an array are those of the part that it keeps."""
        for name, dimension in zip(stored.names, dimensions_of(stored.spec), strict=True):
            if dimension.positions is None or not is_coordinate(name):
                continue
            directory = os.path.join(self.layers_path, os.path.dirname(stored.spec.path), name)
            for file, contents in coordinate_files(name, dimension.positions).items():
                path = os.path.join(directory, file)
                try:
                    is_right = read_small(path, len(contents), self.run_path) == contents
                except OSError:
                    is_right = False
                if not is_right:
                    self.found._add(Fault(f"it does not say where the part lies that {stored.spec.path} keeps", path))

    def _without_rows(self, known: dict[tuple[str, str], Any]) -> Iterator[tuple[str, str]]:
        """Find sealed shards that no row tells of."""
        for layer in list_names(self.layers_path):
            for name in list_names(os.path.join(self.layers_path, layer)):
                array = f"{layer}/{name}"
                directory = os.path.join(self.layers_path, layer, name)
                if is_coordinate(name) or not is_array_path(array) or leads_outside(self.run_path, directory):
                    continue
                for file in list_names(directory):
                    if is_shard_key(file) and (array, file) not in known:
                        yield array, file

    # One shard, on any thread -------------------------------------------------------------------------------------

    def shard(self, job: _Job) -> list[Fault]:
        """Check one shard and its rows."""
        for attempt in range(_TRIES):
            try:
                return list(self._shard(job))
            except FileNotFoundError as error:
                if attempt == _TRIES - 1:
                    return [self._fault(position, "its shard is missing", error.filename) for position in job.positions.tolist()]
            except OSError as error:
                path = error.filename or os.path.join(self.layers_path, job.array, job.key)
                return [Fault(f"it cannot be read: {error}", path)]
        return []

    def _shard(self, job: _Job) -> Iterator[Fault]:
        directory = os.path.join(self.layers_path, job.array)
        sealed, hidden = os.path.join(directory, job.key), os.path.join(directory, unsealed_name(job.key))
        is_sealed = os.path.isfile(sealed) and not os.path.islink(sealed)
        path = sealed if is_sealed else hidden
        positions = job.positions
        offsets, lengths, crcs = (self.numbers[name][positions] for name in ("offset", "length", "crc32c"))
        is_right = np.zeros(len(positions), dtype=bool)
        sealed_bytes = -1
        if is_sealed:
            sealed_bytes = os.path.getsize(sealed)
            is_right = check_chunks(sealed, offsets, lengths, crcs)
        in_clone = ~is_right & (offsets + lengths > sealed_bytes)
        if in_clone.any() and (not is_sealed or os.path.isfile(hidden)):
            is_right[in_clone] = check_chunks(hidden, offsets[in_clone], lengths[in_clone], crcs[in_clone])
        for position in positions[~is_right].tolist():
            yield self._fault(position, "its bytes are not there, or do not match their checksum", path)
        yield from self._check_rows(job, path)
        yield from self._check_overlaps(job, path)
        if is_sealed:
            in_sealed = offsets + lengths <= sealed_bytes
            yield from self._check_index(job, sealed, positions[in_sealed])

    def _check_rows(self, job: _Job, path: str) -> Iterator[Fault]:
        """Hold what the rows say of their captures against the array's metadata; all of a shard's rows at once, since there may be very many."""
        spec, positions = job.stored.spec, job.positions
        place = np.stack([self.numbers[name][positions] for name in ("epoch", "batch", "call")])
        ranges = spec.shard_ranges(parse_shard_key(job.key, len(spec.shard_shape)))
        lowest, ends = (np.array([[getattr(allowed, end)] for allowed in ranges]) for end in ("start", "stop"))
        num_dims = len(spec.chunk_shape)
        starts = self.shape_ends[positions]
        has_dims = self.shape_ends[positions + 1] - starts == num_dims
        sizes = np.zeros((len(positions), num_dims), dtype=np.int64)
        sizes[has_dims] = self.sizes[starts[has_dims][:, None] + np.arange(num_dims)]
        fits = has_dims & ((sizes >= 0) & (sizes <= np.array(spec.chunk_shape, dtype=np.int64))).all(axis=1)
        nbytes = np.where(fits[:, None], sizes, 0).prod(axis=1) * DTYPES[spec.dtype].itemsize
        expected = {name: getattr(spec, name) for name in _OF_ARRAY}
        is_other = np.zeros(len(positions), dtype=bool)
        for name, text in expected.items():
            codes, texts = self.coded[name]
            is_other |= codes[positions] != (texts.index(text) if text in texts else -1)
        checks = (
            (is_other, f"the manifest says it is something else than its array, which is {expected}"),
            (((place < lowest) | (place >= ends)).any(axis=0), f"it is in shard {job.key}, where it does not belong"),
            (~fits, f"it has a shape that does not fit into chunks of {spec.chunk_shape}"),
            (fits & (nbytes != self.numbers["nbytes"][positions]), "the manifest gives it other bytes than its shape has"),
            (
                (self.numbers["length"][positions] != spec.chunk_bytes + CRC_BYTES) & (spec.codec is None),
                f"the manifest gives its chunk other bytes than {spec.chunk_bytes + CRC_BYTES:,}",
            ),
        )
        is_told = np.zeros(len(positions), dtype=bool)
        for is_wrong, problem in checks:
            for position in positions[is_wrong & ~is_told].tolist():
                yield self._fault(position, problem, path)
            is_told |= is_wrong

    def _check_overlaps(self, job: _Job, path: str) -> Iterator[Fault]:
        """No two captures share bytes."""
        offsets, lengths = self.numbers["offset"][job.positions], self.numbers["length"][job.positions]
        order = np.argsort(offsets, kind="stable")
        ends = offsets[order] + lengths[order]
        for at in np.flatnonzero(ends[:-1] > offsets[order][1:]).tolist():
            yield self._fault(int(job.positions[order[at + 1]]), "its bytes overlap those of another capture", path)

    def _check_index(self, job: _Job, path: str, positions: np.ndarray[Any, Any]) -> Iterator[Fault]:
        """Hold a sealed shard's index, and the rows that it carries, against the manifest."""
        spec = job.stored.spec
        try:
            index, carried = read_sealed(path, spec.num_entries)
            stream = stream_to_table(carried, path)
        except CorruptRunError as error:
            yield Fault(str(error), path)
            return
        entries = _entries(spec, *(self.numbers[name][positions] for name in ("epoch", "batch", "call")))
        offsets, lengths = self.numbers["offset"][positions], self.numbers["length"][positions]
        held = index[:, 1] != np.uint64(MISSING)
        shown = index.astype(np.int64)
        is_shown = held[entries] & (shown[entries, 0] == offsets) & (shown[entries, 1] == lengths)
        has_row = np.zeros(len(index), dtype=bool)
        has_row[entries[is_shown]] = True
        for entry in np.flatnonzero(held & ~has_row).tolist():
            yield Fault(f"bytes without a row: the index has a chunk at entry {entry}, of which the manifest does not know", path)
        for position in positions[~held[entries]].tolist():
            yield self._fault(position, "the index of its shard does not have it", path)
        known = set(self.numbers["offset"][self.groups.of(job.array, job.key)].tolist())
        missing = [offset for offset in stream["offset"].to_pylist() if offset not in known]
        if missing:
            yield Fault(f"the shard carries {len(missing):,} rows that the manifest does not have", path)
        extents = job.stored.extents
        highest = (
            [int(self.numbers[name][positions].max()) for name in ("epoch", "batch", "call")[: len(extents)]] if len(positions) else []
        )
        if any(number >= extent for number, extent in zip(highest, extents, strict=False)):
            yield Fault(f"the array's shape covers {extents}, and there are captures up to {highest}", path)


def _entries(
    spec: ArraySpec, epochs: np.ndarray[Any, Any], batches: np.ndarray[Any, Any], calls: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    return np.asarray(spec.entries(epochs, batches, calls), dtype=np.int64)
