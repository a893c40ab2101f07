"""Replays what a recording did to the file system: every state that a kill or a power failure could leave behind, and what must hold in each.

`Recorder` logs the calls that go through `hookstore.files.system`, beside doing them. `FileSystem` is a model of a file system that knows what is on the device
and what is not yet. `killed_states` and `power_losses` give the states after each part of a log, and `Checker` holds design's invariants against one of them:

- A kill keeps every call that was made; the last write may be there in part.
- A power failure keeps what was synced. Any other write, page by page, and any other change of names is there or not; a file may have its size without
  its bytes. Syncing a file does not sync its name; syncing a directory syncs the names in it. A rename is there as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import random
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from torch import nn

import hookstore
from hookstore import layout, manifest, sink, writer
from hookstore.files import System, system
from hookstore.format import CRC_BYTES, PAGE_BYTES, RUN_FILE
from hookstore.manifest import ManifestWriter

RUN = "run"
_LOCK = "lock.json"  # it says which process lives, which no replay can
_METHODS = ("open", "close", "write", "pwrite", "copy", "data_sync", "sync", "sync_file_system", "replace", "mkdir", "unlink", "rmdir")
_PATIENCE_S = 60.0

Tree = dict[str, bytes | None]
"""A directory: contents by path, ``None`` for a directory."""


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


class Key(NamedTuple):
    """What names a capture of these tests."""

    attempt: int
    epoch: int
    batch: int
    layer: str


# The model of a file system ---------------------------------------------------------------------------------------


class Make(NamedTuple):
    """A new file or directory, which has no name yet."""

    inode: int
    is_directory: bool


class Names(NamedTuple):
    """A change of names that happens as a whole: directory, name, and what has that name from now on."""

    changes: tuple[tuple[int, str, int | None], ...]


class Write(NamedTuple):
    """Bytes in a file."""

    inode: int
    offset: int
    contents: bytes


class Truncate(NamedTuple):
    """A file made empty."""

    inode: int


class Sync(NamedTuple):
    """A file, a directory, or with ``None`` all of them brought to the device."""

    inode: int | None


class Acknowledged(NamedTuple):
    """Captures that survive a kill from now on."""

    keys: tuple[Key, ...]


class Durable(NamedTuple):
    """Captures that survive a power failure from now on."""

    keys: tuple[Key, ...]


class Size(NamedTuple):
    """The size that a file has got, without what is in it."""

    inode: int
    num_bytes: int


Operation = Make | Names | Write | Truncate | Sync | Acknowledged | Durable
Change = Names | Write | Truncate | Size


def _written(contents: bytes, change: Write | Truncate | Size) -> bytes:
    if isinstance(change, Truncate):
        return b""
    if isinstance(change, Size):
        return contents + bytes(max(0, change.num_bytes - len(contents)))
    before = contents[: change.offset] + bytes(max(0, change.offset - len(contents)))
    return before + change.contents + contents[change.offset + len(change.contents) :]


def _pages(write: Write) -> Iterator[Write]:
    """Cut a write where pages of the file begin."""
    start, end = write.offset, write.offset + len(write.contents)
    while start < end:
        stop = min(end, (start // PAGE_BYTES + 1) * PAGE_BYTES)
        yield Write(write.inode, start, write.contents[start - write.offset : stop - write.offset])
        start = stop


class FileSystem:
    """Files and directories by inode, as the system shows them and as the device has them; inode 0 is the root."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.directories: dict[int, dict[str, int]] = {0: {}}
        self._device_files: dict[int, bytes] = {}
        self._device_directories: dict[int, dict[str, int]] = {0: {}}
        self._pending: list[Names | Write | Truncate] = []

    @classmethod
    def of(cls, tree: Tree) -> FileSystem:
        """Make one of which all is on the device."""
        made = cls()
        inodes = itertools.count(1)
        for path in sorted(tree):
            contents, inode = tree[path], next(inodes)
            parent, _, name = path.rpartition("/")
            made.apply(Make(inode, contents is None))
            directory = made.find(parent)
            assert directory is not None
            made.apply(Names(((directory, name, inode),)))
            if contents:
                made.apply(Write(inode, 0, contents))
        made.apply(Sync(None))
        return made

    def copy(self) -> FileSystem:
        made = FileSystem()
        made.files = dict(self.files)
        made.directories = {inode: dict(names) for inode, names in self.directories.items()}
        made._device_files = dict(self._device_files)
        made._device_directories = {inode: dict(names) for inode, names in self._device_directories.items()}
        made._pending = list(self._pending)
        return made

    @property
    def next_inode(self) -> int:
        return max(*self.files, *self.directories, 0, 0) + 1

    def find(self, path: str) -> int | None:
        """Return the inode of a path relative to the root."""
        inode = 0
        for name in path.split("/") if path else ():
            found = self.directories.get(inode, {}).get(name)
            if found is None:
                return None
            inode = found
        return inode

    def apply(self, operation: Operation) -> None:
        if isinstance(operation, Make):
            if operation.is_directory:
                self.directories[operation.inode], self._device_directories[operation.inode] = {}, {}
            else:
                self.files[operation.inode] = self._device_files[operation.inode] = b""
        elif isinstance(operation, Names):
            _rename(self.directories, operation)
            self._pending.append(operation)
        elif isinstance(operation, Write):
            self.files[operation.inode] = _written(self.files[operation.inode], operation)
            self._pending += _pages(operation)
        elif isinstance(operation, Truncate):
            self.files[operation.inode] = b""
            self._pending.append(operation)
        elif isinstance(operation, Sync):
            self._sync(operation.inode)

    def _sync(self, inode: int | None) -> None:
        kept = []
        for change in self._pending:
            if isinstance(change, Names):
                if inode is None or any(directory == inode for directory, _, _ in change.changes):
                    _rename(self._device_directories, change)
                else:
                    kept.append(change)
            elif inode is not None and change.inode != inode:
                kept.append(change)
        self._pending = kept
        if inode is None:
            self._device_files = dict(self.files)
        elif inode in self.files:
            self._device_files[inode] = self.files[inode]

    def tree(self) -> Tree:
        """Return what a process sees, which is what a kill leaves."""
        return _tree(self.files, self.directories)

    def unsynced(self) -> list[Change]:
        """Return what a power failure may keep or lose."""
        growing = {change.inode: None for change in self._pending if isinstance(change, Write)}
        sizes = [Size(inode, len(self.files[inode])) for inode in growing if len(self.files[inode]) > len(self._device_files[inode])]
        return [*self._pending, *sizes]

    def tree_with(self, kept: Iterable[Change]) -> Tree:
        """Return what a power failure leaves that keeps these of the unsynced changes."""
        files = dict(self._device_files)
        directories = {inode: dict(names) for inode, names in self._device_directories.items()}
        for change in kept:
            if isinstance(change, Names):
                _rename(directories, change)
            else:
                files[change.inode] = _written(files[change.inode], change)
        return _tree(files, directories)


def _rename(directories: dict[int, dict[str, int]], names: Names) -> None:
    for directory, name, inode in names.changes:
        if inode is None:
            directories[directory].pop(name, None)
        else:
            directories[directory][name] = inode


def _tree(files: dict[int, bytes], directories: dict[int, dict[str, int]]) -> Tree:
    tree: Tree = {}
    stack = [("", 0)]
    while stack:
        prefix, inode = stack.pop()
        for name, child in directories[inode].items():
            if child in directories:
                tree[prefix + name] = None
                stack.append((f"{prefix}{name}/", child))
            else:
                tree[prefix + name] = files[child]
    return tree


# Recording --------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What was done to a file system, and what it held before.

    Attributes
    ----------
    initial : FileSystem
        What was there before.
    acknowledged, durable : frozenset of Key
        Captures that had to survive a kill, or a power failure, before.
    operations : list
        What was done.
    """

    initial: FileSystem = field(default_factory=FileSystem)
    acknowledged: frozenset[Key] = frozenset()
    durable: frozenset[Key] = frozenset()
    operations: list[Operation] = field(default_factory=list)

    def after(self, count: int | None) -> Recording:
        """Return the recording that goes on after the first operations, or after all of them."""
        reached = self.initial.copy()
        acknowledged, durable = set(self.acknowledged), set(self.durable)
        for operation in self.operations[:count]:
            reached.apply(operation)
            acknowledged.update(operation.keys if isinstance(operation, Acknowledged) else ())
            durable.update(operation.keys if isinstance(operation, Durable) else ())
        return Recording(reached, frozenset(acknowledged), frozenset(durable))


@dataclass(slots=True)
class _Descriptor:
    inode: int
    appends: bool
    position: int = 0


class Recorder(System):
    """Takes the place of `hookstore.files.system`, does what it does, and logs it; used in a ``with`` statement.

    Parameters
    ----------
    root : path-like
        What happens elsewhere is not logged.
    recording : Recording
        What to go on with; ``root`` holds its initial state.
    """

    def __init__(self, root: Path, recording: Recording | None = None) -> None:
        self.recording = recording or Recording()
        self._root = os.path.realpath(root)
        self._now = self.recording.initial.copy()
        self._inodes = itertools.count(self._now.next_inode)
        self._descriptors: dict[int, _Descriptor] = {}
        self._acknowledged: dict[ManifestWriter, list[Key]] = {}
        self._lock = threading.RLock()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        for name in _METHODS:
            self._patch.setattr(system, name, getattr(self, name))
        self._watch("append", lambda owner, batch: self.acknowledge(owner, _keys(batch.to_pylist())))
        self._watch("mark_durable", lambda owner: self.promise(self._acknowledged.get(owner, ())))
        self._watch("finish_segment", lambda owner: self.promise(self._acknowledged.get(owner, ())))
        return self

    def _watch(self, method: str, note: Callable[..., None]) -> None:
        original = getattr(ManifestWriter, method)

        @functools.wraps(original)
        def watched(owner: ManifestWriter, *arguments: Any) -> Any:
            result = original(owner, *arguments)
            note(owner, *arguments)
            return result

        self._patch.setattr(ManifestWriter, method, watched)

    def __exit__(self, *exception: object) -> None:
        self._patch.undo()
        if exception[0] is None:
            there, logged = read_tree(Path(self._root)), self._now.tree()
            wrong = sorted(path for path in {*there, *logged} if there.get(path, 0) != logged.get(path, 0))
            assert not wrong, f"changed by another way than hookstore.files.system: {wrong}"

    def acknowledge(self, owner: ManifestWriter, keys: Iterable[Key]) -> None:
        """Note that captures survive a kill."""
        new = tuple(keys)
        self._acknowledged.setdefault(owner, []).extend(new)
        self._log(Acknowledged(new))

    def promise(self, keys: Iterable[Key]) -> None:
        """Note that captures survive a power failure."""
        self._log(Durable(tuple(keys)))

    def _log(self, operation: Operation) -> None:
        with self._lock:
            self.recording.operations.append(operation)
            self._now.apply(operation)

    def _inside(self, path: str) -> str | None:
        """Return a path relative to the root, or ``None`` if it is not to be logged."""
        relative = os.path.relpath(os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path), self._root)
        if relative == ".":
            return ""
        return None if relative.startswith("..") or _LOCK in os.path.basename(path) else relative

    def _place(self, relative: str) -> tuple[int, str]:
        parent, _, name = relative.rpartition("/")
        directory = self._now.find(parent)
        assert directory is not None, f"{parent} was not made through hookstore.files.system"
        return directory, name

    def _make(self, relative: str, *, is_directory: bool) -> int:
        inode = next(self._inodes)
        self._log(Make(inode, is_directory))
        self._log(Names(((*self._place(relative), inode),)))
        return inode

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            descriptor = super().open(path, flags)
            relative = self._inside(path)
            if relative is not None:
                inode = self._now.find(relative)
                if inode is None:
                    assert flags & os.O_CREAT, f"{relative} was not made through hookstore.files.system"
                    inode = self._make(relative, is_directory=False)
                elif flags & os.O_TRUNC and self._now.files[inode]:
                    self._log(Truncate(inode))
                self._descriptors[descriptor] = _Descriptor(inode, bool(flags & os.O_APPEND))
            return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            self._descriptors.pop(descriptor, None)
            super().close(descriptor)

    def write(self, descriptor: int, contents: memoryview) -> int:
        with self._lock:
            count = super().write(descriptor, contents)
            known = self._descriptors.get(descriptor)
            if known is not None:
                offset = len(self._now.files[known.inode]) if known.appends else known.position
                known.position = offset + count
                self._log(Write(known.inode, offset, bytes(contents[:count])))
            return count

    def pwrite(self, descriptor: int, contents: memoryview, offset: int) -> int:
        with self._lock:
            count = super().pwrite(descriptor, contents, offset)
            known = self._descriptors.get(descriptor)
            if known is not None:
                self._log(Write(known.inode, offset, bytes(contents[:count])))
            return count

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        with self._lock:
            super().copy(source, target, num_bytes)
            known = self._descriptors.get(target)
            if known is not None:
                self._log(Write(known.inode, 0, os.pread(source, num_bytes, 0)))

    def data_sync(self, descriptor: int) -> None:
        with self._lock:
            super().data_sync(descriptor)
            self._log_sync(descriptor)

    def sync(self, descriptor: int) -> None:
        with self._lock:
            super().sync(descriptor)
            self._log_sync(descriptor)

    def _log_sync(self, descriptor: int) -> None:
        known = self._descriptors.get(descriptor)
        if known is not None:
            self._log(Sync(known.inode))

    def sync_file_system(self, descriptor: int) -> None:
        with self._lock:
            super().sync_file_system(descriptor)
            self._log(Sync(None))

    def replace(self, source: str, target: str) -> None:
        with self._lock:
            super().replace(source, target)
            old, new = self._inside(source), self._inside(target)
            if old is not None and new is not None:
                self._log(Names(((*self._place(old), None), (*self._place(new), self._now.find(old)))))

    def mkdir(self, path: str) -> None:
        with self._lock:
            super().mkdir(path)
            relative = self._inside(path)
            if relative is not None:
                self._make(relative, is_directory=True)

    def unlink(self, path: str) -> None:
        with self._lock:
            super().unlink(path)
            self._remove(path)

    def rmdir(self, path: str) -> None:
        with self._lock:
            super().rmdir(path)
            self._remove(path)

    def _remove(self, path: str) -> None:
        relative = self._inside(path)
        if relative is not None:
            self._log(Names(((*self._place(relative), None),)))


def _keys(rows: Iterable[dict[str, Any]]) -> list[Key]:
    return [Key(row["attempt"], row["epoch"], row["batch"], row["layer"]) for row in rows if row["status"] == "ok"]


# The run that is recorded -----------------------------------------------------------------------------------------

SHAPES = {"small": (2, 2), "large": (50, 100), "late": (3, 5)}  # 16 bytes, 20 kB, 60 bytes
BATCHES_PER_SHARD = 2


@functools.cache
def value_of(key: Key) -> np.ndarray[Any, Any]:
    """Return what a layer gives there in that attempt: unlike anywhere else, and so that half of it can be compressed."""
    seed = zlib.crc32(repr(key).encode())
    shape = SHAPES[key.layer]
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    values[: len(values) // 2] = seed % 1000
    values.flags.writeable = False
    return values


class Layers(nn.Module):
    """Hands each of its layers a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in SHAPES:
            setattr(self, name, nn.Identity())

    def forward(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            getattr(self, name)(value)


class Draft(NamedTuple):
    """A batch of some layers, which then waits until it is acknowledged."""

    epoch: int
    batch: int
    layers: tuple[str, ...] = tuple(SHAPES)


class Flush(NamedTuple):
    """A call of ``recorder.flush()``."""


Step = Draft | Flush
EARLY = ("small", "large")

STEPS: tuple[Step, ...] = (
    Draft(0, 0, EARLY),
    Draft(0, 1),
    Flush(),
    Draft(0, 2),  # full shards are sealed, and that of "late" is left behind
    Draft(0, 3),
    Draft(0, 4, EARLY),  # the extents grow
    Flush(),
    Draft(0, 0, ("late",)),  # into a shard that is sealed
    Draft(0, 5, EARLY),
    Draft(1, 0, EARLY),
)
RESUMED_STEPS: tuple[Step, ...] = (
    Draft(0, 4),  # once more, as after a checkpoint
    Draft(0, 5),
    Flush(),
    Draft(1, 0),
    Draft(1, 1, ("late",)),
)


def make_small(patch: pytest.MonkeyPatch, segment_rows: int = 6) -> None:
    """Make shards and segments small, and let nothing but what is asked for come by time."""
    patch.setattr(layout, "shard_shape", lambda *_, calls=False, **__: (1, BATCHES_PER_SHARD, 4) if calls else (1, BATCHES_PER_SHARD))
    patch.setattr(manifest, "SEGMENT_ROWS", segment_rows)
    patch.setattr(writer, "_PLACES_UNSEALED", 1)
    patch.setattr(
        sink.StagingSink, "skip_layers", lambda *_: None
    )  # the model calls what a step asks for; rows about the rest would be in the way
    patch.setattr(writer, "_POLL_S", 0.005)
    patch.setattr(writer, "_REGION_AGE_S", 0.0)
    patch.setattr(writer, "_ROWS_AGE_S", 0.0)
    patch.setattr(writer, "_SYNC_AGE_S", 1e9)


def perform(recorder: hookstore.Recorder, model: Layers, steps: Sequence[Step], attempt: int = 0) -> None:
    """Take some steps."""
    for step in steps:
        if isinstance(step, Flush):
            recorder.flush()
        else:
            recorder.at(epoch=step.epoch, batch=step.batch)
            keys = [Key(attempt, step.epoch, step.batch, layer) for layer in step.layers]
            model({key.layer: torch.from_numpy(value_of(key).copy()) for key in keys})
            wait_until_acknowledged(recorder)


def wait_until_acknowledged(recorder: hookstore.Recorder) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while recorder.progress.num_acknowledged < recorder.progress.num_captured:
        if recorder._stager.failure is not None:
            raise recorder._stager.failure
        assert time.monotonic() < deadline, "the writer does not acknowledge"
        time.sleep(0.001)


def record_steps(root: Path, steps: Sequence[Step] = STEPS, before: Recording | None = None, **options: Any) -> Recording:
    """Record a run from its beginning to its end, or go on with one that was recorded before."""
    with going_on(root, before) as log, pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        model = Layers()
        mode = "x" if before is None else "a"
        with hookstore.record(model, root / RUN, layers=list(SHAPES), buffer_bytes=1 << 20, mode=mode, **options) as recorder:
            if before is not None:
                log.promise(before.acknowledged)  # what a part has is durable
            perform(recorder, model, steps, attempt_of(root / RUN))
        return log.recording


def record_recovery(root: Path, before: Recording, *, lost_power: bool = False) -> Recording:
    """Recover a run that was recorded before, and maybe lost power then."""
    with going_on(root, before) as log, warnings.catch_warnings():
        if lost_power:
            ignore_torn_journals()
        hookstore.recover(root / RUN)
        log.promise(before.acknowledged)
        return log.recording


@contextlib.contextmanager
def going_on(root: Path, before: Recording | None) -> Iterator[Recorder]:
    """Record what is done from here on."""
    directory = Directory(root)
    if before is not None:
        directory.become(before.initial.tree())
        before = Recording(before.initial, before.acknowledged, before.durable)
    with Recorder(root, before) as log:
        yield log


def attempt_of(run: Path) -> int:
    """Return the number of the last attempt of a run."""
    attempts = json.loads((run / RUN_FILE).read_bytes()).get("attempts", [{"attempt": 0}])
    return int(attempts[-1]["attempt"])


# States -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """What a kill or a power failure left.

    Attributes
    ----------
    tree : Tree
        The files.
    required : frozenset of Key
        Captures that must be there.
    lost_power : bool
        Whether it was a power failure.
    count : int
        Operations that had been done.
    where : str
        When it was, for messages.
    """

    tree: Tree
    required: frozenset[Key]
    lost_power: bool
    count: int
    where: str


def killed_states(recording: Recording, *, cuts: int | None = 3, seed: int = 0) -> Iterator[State]:
    """Give every state that a kill can leave.

    Parameters
    ----------
    recording : Recording
        What was done.
    cuts : int or None
        How many places at most to cut each write at, chosen by chance, or all: the ends of pages, and in the journal any byte.
    seed : int
        For the choice.
    """
    chance = random.Random(seed)
    now = recording.initial.copy()
    required = recording.acknowledged
    yield State(now.tree(), required, False, 0, "before all")
    for count, operation in enumerate(recording.operations, 1):
        where = _describe(now, operation, count)
        if isinstance(operation, Write):
            for cut in _cuts(now, operation, cuts, chance):
                torn = now.copy()
                torn.apply(Write(operation.inode, operation.offset, operation.contents[:cut]))
                yield State(torn.tree(), required, False, count, f"{where}, of which {cut:,} bytes were written")
        now.apply(operation)
        if isinstance(operation, Acknowledged):
            required |= frozenset(operation.keys)
        if not isinstance(operation, Make | Sync | Durable):
            yield State(now.tree(), required, False, count, where)


def _cuts(now: FileSystem, write: Write, limit: int | None, chance: random.Random) -> list[int]:
    places = list(itertools.accumulate(len(page.contents) for page in _pages(write)))[:-1]
    if path_of(now, write.inode).endswith(".journal"):
        places = list(range(1, len(write.contents)))
    return places if limit is None or len(places) <= limit else sorted(chance.sample(places, limit))


def power_losses(recording: Recording, *, limit: int = 4, seed: int = 0) -> Iterator[State]:
    """Give states that a power failure can leave, none of them twice.

    Parameters
    ----------
    recording : Recording
        What was done.
    limit : int
        How many states at most after each operation.
    seed : int
        For the choice of what is kept.
    """
    chance = random.Random(seed)
    seen: set[tuple[int, frozenset[Key]]] = set()
    now = recording.initial.copy()
    required = recording.durable
    for count, operation in enumerate((None, *recording.operations)):
        where = "before all"
        if operation is not None:
            where = _describe(now, operation, count)
            now.apply(operation)
            if isinstance(operation, Durable):
                required |= frozenset(operation.keys)
            if isinstance(operation, Make | Acknowledged):
                continue
        unsynced = now.unsynced()
        for kept in choices(unsynced, limit, chance):
            tree = now.tree_with(change for change, is_kept in zip(unsynced, kept, strict=True) if is_kept)
            key = (hash(frozenset(tree.items())), required)
            if key not in seen:
                seen.add(key)
                yield State(tree, required, True, count, f"{where}; kept of what was unsynced: {_describe_kept(now, unsynced, kept)}")


def choices(changes: Sequence[Change], limit: int, chance: random.Random) -> list[tuple[bool, ...]]:
    """Choose which of the changes are kept: every combination if there are no more than the limit, else those that are most telling.

    These are none, all, those of each file or directory alone or left out, each change alone or left out, and any others by chance.
    """
    count = len(changes)
    if 2**count <= limit:
        return list(itertools.product((False, True), repeat=count))
    groups: dict[Any, list[int]] = {}
    for position, change in enumerate(changes):
        group = ("names", change.changes[-1][0]) if isinstance(change, Names) else ("file", change.inode)
        groups.setdefault(group, []).append(position)
        groups.setdefault("names" if isinstance(change, Names) else "files", []).append(position)
    alone = [set(members) for members in groups.values()] + [{position} for position in range(count)]
    telling = [*alone, *(set(range(count)) - members for members in alone)]
    chance.shuffle(telling)
    some = [{position for position in range(count) if chance.random() < 0.5} for _ in range(limit)]
    mixed = [kept for pair in itertools.zip_longest(telling, some[: max(1, limit // 3)]) for kept in pair if kept is not None]
    unique = dict.fromkeys(frozenset(kept) for kept in [set(), set(range(count)), *mixed, *some])
    return [tuple(position in kept for position in range(count)) for kept in itertools.islice(unique, limit)]


def path_of(now: FileSystem, inode: int) -> str:
    """Return a path that leads to an inode, for messages."""
    stack = [("", 0)]
    while stack:
        prefix, directory = stack.pop()
        for name, child in now.directories[directory].items():
            if child == inode:
                return prefix + name
            if child in now.directories:
                stack.append((f"{prefix}{name}/", child))
    return "." if inode == 0 else f"(inode {inode})"


def _describe(now: FileSystem, operation: Operation, count: int) -> str:
    return f"after operation {count}, {_describe_operation(now, operation)}"


def _describe_operation(now: FileSystem, operation: Operation | Change) -> str:
    if isinstance(operation, Names):
        pieces = [f"{path_of(now, directory)}/{name}{' gone' if inode is None else ''}" for directory, name, inode in operation.changes]
        return f"name {' and '.join(pieces)}"
    if isinstance(operation, Write):
        return f"write {path_of(now, operation.inode)} [{operation.offset:,}:{operation.offset + len(operation.contents):,}]"
    if isinstance(operation, Sync):
        return f"sync {'all' if operation.inode is None else path_of(now, operation.inode)}"
    if isinstance(operation, Truncate | Size):
        return f"{type(operation).__name__.lower()} {path_of(now, operation.inode)}"
    return str(operation)


def _describe_kept(now: FileSystem, changes: Sequence[Change], kept: Sequence[bool]) -> str:
    chosen = [change for change, is_kept in zip(changes, kept, strict=True) if is_kept]
    left_out = [change for change, is_kept in zip(changes, kept, strict=True) if not is_kept]
    if not chosen or not left_out:
        return "all" if chosen else "nothing"
    shorter = min(chosen, left_out, key=len)
    return f"{'only' if shorter is chosen else 'all but'} {', '.join(_describe_operation(now, change) for change in shorter)}"


# Directories ------------------------------------------------------------------------------------------------------


def read_tree(root: Path) -> Tree:
    """Return what is in a directory, without the lock of a run."""
    tree: Tree = {}
    for path, directories, files in os.walk(root):
        prefix = os.path.relpath(path, root) + "/"
        prefix = "" if prefix == "./" else prefix
        tree.update(dict.fromkeys((prefix + name for name in directories), None))
        for name in files:
            if _LOCK not in name:
                tree[prefix + name] = (Path(path) / name).read_bytes()
    return tree


class Directory:
    """A directory that becomes one tree after another, by writing only what differs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_changed = False  # by somebody else
        self._there: Tree = {}
        path.mkdir(parents=True, exist_ok=True)

    def become(self, tree: Tree) -> None:
        if self.is_changed:
            self._there, self.is_changed = read_tree(self.path), False
        missing = object()
        for path in sorted(self._there, reverse=True):
            contents, there = tree.get(path, missing), self._there[path]
            if contents is there or contents == there:
                continue
            if there is None:
                (self.path / path).rmdir()
            else:
                (self.path / path).unlink()  # and not cut short: somebody may still have it mapped
            del self._there[path]
        for path in sorted(tree.keys() - self._there.keys()):
            contents = tree[path]
            if contents is None:
                (self.path / path).mkdir()
            else:
                (self.path / path).write_bytes(contents)
        self._there = dict(tree)

    def read(self) -> Tree:
        """Look at what has become of it."""
        locks = [path for path in self.path.rglob("*") if _LOCK in path.name]
        assert not locks, f"a lock was left behind: {locks}"
        return read_tree(self.path)


# Checks -----------------------------------------------------------------------------------------------------------


class Checker:
    """Holds the invariants against states.

    Parameters
    ----------
    path : Path
        A directory to use.
    """

    def __init__(self, path: Path) -> None:
        self._directory = Directory(path)
        self.run = path / RUN
        self.num_states = self.num_recovered = self.num_resumed = self.num_cut_off = 0

    def check(self, state: State, *, recover: bool = True, everywhere: bool = False) -> frozenset[Key]:
        """Open a state as a reader would, recover it, and open it again; returns the captures that are there before.

        Parameters
        ----------
        state : State
            The state.
        recover : bool
            Whether to recover it too.
        everywhere : bool
            Whether to read it with every plain reader.

        Raises
        ------
        BrokenPromiseError
            If an invariant does not hold.
        """
        self.num_states += 1
        self._directory.become(state.tree)
        with promised(state.where):
            there = self.check_open(state.required, lost_power=state.lost_power)
            self.check_plain(everywhere=everywhere)
        if recover:
            with promised(f"recovered {state.where}"):
                self.check_recover(state, there)
        return there

    def check_open(self, required: frozenset[Key], *, lost_power: bool = False, recovered: bool = False) -> frozenset[Key]:
        """Read every row, and return the captures that are there."""
        with warnings.catch_warnings():
            if lost_power:
                ignore_torn_journals()
            try:
                run = hookstore.open(self.run)
            except hookstore.NotARunError:
                if required:
                    raise
                return frozenset()
        there: set[Key] = set()
        rows: set[Key] = set()
        with run:
            for row in run.manifest.to_pylist():
                if not row["kind"]:  # it marks a batch as cut short
                    if row["status"] != "partial":
                        raise BrokenPromiseError(f"a row of no capture is {row['status']}")
                    continue
                key = Key(row["attempt"], row["epoch"], row["batch"], row["layer"])
                if key in rows:
                    raise BrokenPromiseError(f"{key} has two rows")
                rows.add(key)
                if row["status"] != "ok":
                    if row["status"] != "lost" or not recovered:
                        raise BrokenPromiseError(f"{key} is {row['status']}: {row['reason']}")
                    continue
                try:
                    is_right = _is_right(run, row, key)
                except hookstore.CorruptRunError:
                    if recovered or not lost_power or key in required:
                        raise
                    continue
                if not is_right:
                    raise BrokenPromiseError(f"{key} has a wrong value")
                there.add(key)
            missing = required - there
            if missing:
                raise BrokenPromiseError(f"{', '.join(map(str, sorted(missing)))} of {len(required)} captures are not there")
            for key in _latest(there):
                if recovered and not np.array_equal(run[key.layer].activation[key.epoch, key.batch], value_of(key)):
                    raise BrokenPromiseError(f"{key} is not what the run gives there")
        return frozenset(there)

    def check_plain(self, complete: frozenset[Key] | None = None, *, everywhere: bool = False) -> None:
        """Read every array with zarr-python, and maybe with the other readers: each chunk is a value that belongs there or the fill value.

        Parameters
        ----------
        complete : frozenset of Key, optional
            Captures that must be there.
        everywhere : bool
            Whether to use the other readers too.
        """
        layers = self.run / "layers"
        found: set[Key] = set()
        if not (layers / "zarr.json").exists():
            if complete or (layers.exists() and any(not path.name.startswith(".") for path in layers.iterdir())):
                raise BrokenPromiseError("there is no Zarr group")
            return
        for array in sorted(layers.rglob("*")):
            if not array.is_dir() or array.name.startswith("."):
                continue
            metadata = json.loads((array / "zarr.json").read_bytes())
            if metadata["node_type"] == "array":
                for reader in READERS if everywhere else ("zarr",):
                    found |= _compare(READERS[reader](array), metadata["attributes"]["layer"], reader)
        if everywhere:
            for _, member in zarr.open_group(layers, mode="r").members(max_depth=None):
                assert member.metadata is not None
        missing = _latest(complete or frozenset()) - found
        if missing:
            raise BrokenPromiseError(f"plain readers do not find {', '.join(map(str, sorted(missing)))}")

    def check_cut(self, tree: Tree, path: str, num_bytes: int, before: Recording) -> None:
        """Check a run of which an unsealed shard was cut short: what is whole is right, and nothing else is there, before recovery and after it.

        Parameters
        ----------
        tree : Tree
            The files.
        path : str
            The shard, which has so many bytes left.
        num_bytes : int
            See there.
        before : Recording
            What was promised before.
        """
        directory, _, name = path.removeprefix(f"{RUN}/layers/").rpartition("/")
        key = name.removeprefix(".").removesuffix(".unsealed")
        sealed_bytes = len(tree.get(f"{RUN}/layers/{directory}/{key}") or b"")

        def is_cut_off(row: dict[str, Any]) -> bool:
            end = row["offset"] + row["length"]
            return (row["array"], row["shard"]) == (directory, key) and num_bytes < end > sealed_bytes

        self._directory.become(tree)
        self._directory.is_changed = True
        with promised(f"{path} cut at {num_bytes:,}"), quick_syncs():
            cut_off = self._check_cut_rows(is_cut_off, before)
            self.num_cut_off += len(cut_off)
            hookstore.recover(self.run)
            gone = self._check_cut_rows(is_cut_off, before)
            if gone != cut_off:
                raise BrokenPromiseError(f"{gone ^ cut_off} are there only before recovery, or only after it")
            named = {Key(fault.attempt, fault.epoch, fault.batch, fault.layer) for fault in hookstore.verify(self.run).faults}
            if named != cut_off & before.durable:
                raise BrokenPromiseError(f"verify names {named}, but {cut_off & before.durable} were durable and are damaged")

    def _check_cut_rows(self, is_cut_off: Callable[[dict[str, Any]], bool], before: Recording) -> set[Key]:
        """Return the captures that are not there, which must be those that are cut off."""
        cut_off = set()
        with hookstore.open(self.run) as run:
            rows = [row for row in run.manifest.to_pylist() if row["kind"]]
            if sorted(_keys([{**row, "status": "ok"} for row in rows])) != sorted(before.acknowledged):
                raise BrokenPromiseError("there are other rows than were acknowledged")
            for row in rows:
                (key,) = _keys([{**row, "status": "ok"}])
                if is_cut_off(row):
                    cut_off.add(key)
                    if row["status"] == "lost" and key in before.durable:
                        raise BrokenPromiseError(f"{key} was durable and is marked as lost")
                    with pytest.raises(hookstore.MissingCaptureError if row["status"] == "lost" else hookstore.CorruptRunError):
                        run.read(row)
                elif not _is_right(run, row, key):
                    raise BrokenPromiseError(f"{key} has a wrong value")
        return cut_off

    def check_journal(self, state: State, num_rows: int) -> None:
        """Check a run whose journal was cut short: there are so many captures, they are right, and recovery keeps them."""
        self._directory.become(state.tree)
        with promised(state.where):
            there = self.check_open(state.required)
            if len(there) != num_rows:
                raise BrokenPromiseError(f"there are {len(there)} captures, expected {num_rows}")
            self.check_plain()
            self.check_recover(state, there)

    def check_sound(self) -> None:
        """Verify a run."""
        faults = hookstore.verify(self.run).faults
        if faults:
            raise BrokenPromiseError(f"verify found {faults}")

    def check_recover(self, state: State, there: frozenset[Key]) -> None:
        """Recover a run, twice; what was there, and what had to be, stays."""
        self.num_recovered += 1
        self._directory.is_changed = True
        with quick_syncs(), warnings.catch_warnings():
            if state.lost_power:
                ignore_torn_journals()
            try:
                hookstore.recover(self.run)
            except hookstore.NotARunError:
                if state.required or there:
                    raise
                return
        once = self._directory.read()
        kept = self.check_open(state.required | there, recovered=True)
        self.check_plain(kept)
        self.check_sound()
        with quick_syncs():
            hookstore.recover(self.run)
        twice = self._directory.read()
        changed = sorted(path for path in {*once, *twice} if once.get(path, 0) != twice.get(path, 0))
        if changed:
            raise BrokenPromiseError(f"the second recovery changed {', '.join(changed)}")

    def check_resume(self, state: State, steps: Sequence[Step], **options: Any) -> None:
        """Record more into a state: what was there stays, and what is new comes to it."""
        self.num_resumed += 1
        self._directory.become(state.tree)
        self._directory.is_changed = True
        with promised(f"resumed {state.where}"):
            there = self.check_open(state.required, lost_power=state.lost_power)
            with pytest.MonkeyPatch.context() as patch, quick_syncs(), warnings.catch_warnings():
                if state.lost_power:
                    ignore_torn_journals()
                    warnings.filterwarnings("ignore", "taking up .* holds bytes that no row tells of", hookstore.CaptureWarning)
                make_small(patch)
                model = Layers()
                with hookstore.record(model, self.run, layers=list(SHAPES), buffer_bytes=1 << 20, mode="a", **options) as recorder:
                    attempt = attempt_of(self.run)
                    perform(recorder, model, steps, attempt)
            self._directory.read()
            new = frozenset(
                Key(attempt, step.epoch, step.batch, layer) for step in steps if isinstance(step, Draft) for layer in step.layers
            )
            kept = self.check_open(state.required | there | new, recovered=True)
            self.check_plain(kept)
            self.check_sound()


def _is_right(run: hookstore.Run, row: dict[str, Any], key: Key) -> bool:
    """Say whether a row's tensor is what the layer gave; nothing holds on to the file afterwards."""
    return np.array_equal(run.read(row), value_of(key))


def follow(run: hookstore.Run, state: State) -> frozenset[Key]:
    """Look again at a run whose files have become this state, and return the captures that are there."""
    with promised(state.where):
        run.refresh()
        rows = [row for row in run.manifest.to_pylist() if row["kind"]]
        keys = _keys(rows)
        if len(set(keys)) < len(rows) or not state.required <= set(keys):
            raise BrokenPromiseError("captures are missing, or are there twice")
        for row, key in zip(rows, keys, strict=True):
            if not _is_right(run, row, key):
                raise BrokenPromiseError(f"{key} has a wrong value")
        return frozenset(keys)


def ignore_torn_journals() -> None:
    """Expect no silence: frames of the journal that were not durable may be gone before others that are there."""
    warnings.filterwarnings("ignore", ".*journal segment .* is damaged at byte", hookstore.CaptureWarning)


@contextlib.contextmanager
def promised(where: str) -> Iterator[None]:
    """Turn whatever goes wrong into a broken promise, and say where it was."""
    try:
        yield
    except BrokenPromiseError as error:
        raise BrokenPromiseError(f"{where}: {error}") from error
    except Exception as error:
        raise BrokenPromiseError(f"{where}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def quick_syncs() -> Iterator[None]:
    """Sync nothing: what is checked afterwards does not hang on the device."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sync", "data_sync", "sync_file_system"):
            patch.setattr(system, name, lambda descriptor: None)
        yield


def _latest(keys: Iterable[Key]) -> set[Key]:
    latest: dict[tuple[int, int, str], Key] = {}
    for key in sorted(keys):
        latest[key.epoch, key.batch, key.layer] = key
    return set(latest.values())


def _with_zarr(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(zarr.open_array(path, mode="r")[...])


def _with_tensorstore(path: Path) -> np.ndarray[Any, Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return np.asarray(tensorstore.open(spec, read=True).result().read().result())


def _with_zarrs(path: Path) -> np.ndarray[Any, Any]:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        return np.asarray(zarr.open_array(path, mode="r")[...])


READERS = {"zarr": _with_zarr, "tensorstore": _with_tensorstore, "zarrs": _with_zarrs}
_MAX_ATTEMPTS = 4


def _compare(values: np.ndarray[Any, Any], layer: str, reader: str) -> set[Key]:
    """Return the captures that an array of (epoch, batch) holds."""
    found = set()
    for epoch, batch in np.ndindex(values.shape[:2]):
        value = values[epoch, batch]
        if np.isnan(value).all():
            continue
        keys = [Key(attempt, epoch, batch, layer) for attempt in range(_MAX_ATTEMPTS)]
        key = next((key for key in keys if np.array_equal(value, value_of(key))), None)
        if key is None:
            raise BrokenPromiseError(f"{reader} reads a wrong value of layer {layer!r} in epoch {epoch}, batch {batch}")
        found.add(key)
    return found


class LoopingReader:
    """A plain reader that has read the index of a shard and goes for its chunks: they have to stay where they were, whatever becomes of the file."""

    def __init__(self) -> None:
        self.num_replaced = 0
        self._contents: dict[str, bytes] = {}
        self._chunks: dict[str, dict[tuple[int, int], bytes]] = {}

    def look(self, state: State) -> None:
        """Look for the chunks that were in earlier states, and learn those of this one."""
        gone = self._contents.keys() - state.tree.keys()
        if gone:
            raise BrokenPromiseError(f"{state.where}: {', '.join(gone)} was there, and is gone")
        for path, contents in state.tree.items():
            directory, _, name = path.rpartition("/")
            if contents is None or not name.startswith("c.") or self._contents.get(path) is contents:
                continue
            self.num_replaced += path in self._contents
            self._contents[path] = contents
            chunks = self._chunks.setdefault(path, {})
            for (offset, length), chunk in chunks.items():
                if contents[offset : offset + length] != chunk:
                    raise BrokenPromiseError(f"{state.where}: the chunk at byte {offset:,} of {path} is no longer there")
            for offset, length in _index(contents, state.tree[f"{directory}/zarr.json"] or b""):
                chunks[offset, length] = contents[offset : offset + length]


def _index(shard: bytes, metadata: bytes) -> list[tuple[int, int]]:
    """Return offset and length of the chunks in a shard."""
    described = json.loads(metadata)
    outer = described["chunk_grid"]["configuration"]["chunk_shape"]
    inner = described["codecs"][0]["configuration"]["chunk_shape"]
    count = math.prod(size // part for size, part in zip(outer, inner, strict=True))
    pairs = struct.iter_unpack("<QQ", shard[-16 * count - CRC_BYTES : -CRC_BYTES])
    return [pair for pair in pairs if pair[0] != 2**64 - 1]
