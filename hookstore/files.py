"""Files: aligned writes past the page cache, syncs, atomic replacement, and reading what nobody vouches for.

Everything that changes a run on disk goes through `system`, one object that tests replace: to record what is done in which order, to replay any part of
it, or to let a call fail as a full or broken disk would.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import IO, Any

import numpy as np

from hookstore.errors import CorruptRunError
from hookstore.format import LAYERS_DIR, PAGE_BYTES, WRITING_SUFFIX

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_LONGEST_WRITE = 0x7FFF_F000
_MAX_OPEN_FILES = 512
_EMPTY_WRITES = 8
_SINK_BYTES = 4 << 20
_RECORDS_PER_PIECE = 256  # what a shard keeps in memory of each kind of record before it goes to the spool
_ROW_BYTES = 512  # that a capture takes beside its chunk: a row in its shard, one in a part, and what of it waits in the spool
FRAME_ROW_BYTES = 320  # and one in the journal, until that becomes a part
_WHOLE_SHAPE_BYTES = 16  # with its offset
_SHARD_BYTES = 16 << 10  # that a shard takes beside its chunks, rows and index: rounding up to pages, and its array's metadata
_FIXED_BYTES = 256 << 10  # run.json, groups, and a journal that is just being begun
_LEAST_FREE_BYTES = 64 << 20  # of the file system, which others use too
_LOOK_S = 0.5
_SYNC_WHOLE_ABOVE = 64  # files: from there on one call for the whole file system is faster than one for each


class System:
    """The system calls by which a run changes on disk."""

    def open(self, path: str, flags: int) -> int:
        """Open a file or a directory, never for a program that is started later, and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def write(self, descriptor: int, contents: memoryview) -> int:
        """Append bytes; returns how many."""
        return os.write(descriptor, contents)

    def pwrite(self, descriptor: int, contents: memoryview, offset: int) -> int:
        """Write bytes at an offset; returns how many."""
        return os.pwrite(descriptor, contents, offset)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy the first bytes of a file into an empty one; file systems that can let both share them."""
        copied = 0
        while copied < num_bytes:
            try:
                count = os.copy_file_range(source, target, num_bytes - copied, copied, copied)
            except (OSError, AttributeError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_COPY:
                    raise
                contents = os.pread(source, min(_SINK_BYTES, num_bytes - copied), copied)
                count = os.pwrite(target, contents, copied) if contents else 0
            if count == 0:
                raise OSError(errno.EIO, f"a file to copy has only {copied:,} of {num_bytes:,} bytes")
            copied += count

    def data_sync(self, descriptor: int) -> None:
        """Return when a file's bytes are on the device."""
        getattr(os, "fdatasync", os.fsync)(descriptor)

    def sync(self, descriptor: int) -> None:
        """Return when a file's bytes, or the names in a directory, are on the device."""
        os.fsync(descriptor)

    def sync_file_system(self, descriptor: int) -> None:
        """Return when all of the file system that a descriptor lies in is on the device; only where `has_sync_file_system`."""
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def replace(self, source: str, target: str) -> None:
        """Rename a file or a directory, in place of one that is there."""
        os.replace(source, target)

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        os.mkdir(path)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)


# (a pipe that nobody writes to is opened at once; on Windows the flags that it does not have are left out)
_READ_FLAGS = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
_NO_FILE = (errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EISDIR, errno.EINVAL)  # what open says to anything but a file
_NO_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)
has_sync_file_system = os.name == "posix" and hasattr(ctypes.CDLL(None), "syncfs")
system = System()


class DirectWriter:
    """Writes page-aligned memory at page-aligned offsets, past the page cache where the file system allows that.

    Keeps few descriptors open, however many shards there are.
    """

    def __init__(self) -> None:
        self.is_direct = bool(_O_DIRECT)
        self._open: OrderedDict[str, int] = OrderedDict()
        self._max_open = _max_open_files()

    def write(self, path: str, buffer: memoryview, offset: int) -> None:
        """Write all of ``buffer``; address, length and offset are multiples of 4,096.

        Raises
        ------
        OSError
            From the operating system, with the path.
        """
        written = num_empty = 0
        while written < len(buffer):
            try:
                descriptor = self.descriptor(path)
                count = system.pwrite(descriptor, buffer[written : written + _LONGEST_WRITE], offset + written)
            except OSError as error:
                if error.errno == errno.EINVAL and self.is_direct:
                    # This file system does not take O_DIRECT: go on through the page cache, for good.
                    self.is_direct = False
                    self.close()
                    continue
                error.filename = path
                raise
            num_empty = num_empty + 1 if count == 0 else 0
            if num_empty == _EMPTY_WRITES:
                raise OSError(errno.EIO, f"the system wrote nothing, {num_empty} times", path)
            written += count
            if self.is_direct and written < len(buffer):
                written = (
                    written // PAGE_BYTES * PAGE_BYTES
                )  # direct writes go on from a whole page; that page is one that nobody has acknowledged
                if 0 < count < PAGE_BYTES:
                    # Not one page: there may be no room for one, and it would be tried for ever. The page cache takes the rest, or says why not.
                    self.is_direct = False
                    self.close()
        check_linked(self.descriptor(path), path)

    def descriptor(self, path: str) -> int:
        """Return an open descriptor of a shard."""
        descriptor = self._open.get(path)
        if descriptor is not None:
            self._open.move_to_end(path)
            return descriptor
        while len(self._open) >= self._max_open:
            system.close(self._open.popitem(last=False)[1])
        try:
            descriptor = self._open_file(path)
        except OSError as error:
            if error.errno != errno.EMFILE or not self._open:
                raise
            self._max_open = max(1, len(self._open) // 2)  # others in this process want descriptors too
            self.close()
            descriptor = self._open_file(path)
        self._open[path] = descriptor
        return descriptor

    def _open_file(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT
        try:
            return system.open(path, flags | (_O_DIRECT if self.is_direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
        self.is_direct = False
        return system.open(path, flags)

    def sync(self, path: str) -> None:
        """Return when the file's bytes are on the device."""
        try:
            system.data_sync(self.descriptor(path))
        except OSError as error:
            error.filename = path
            raise

    def forget(self, path: str) -> None:
        """Close a shard's descriptor."""
        descriptor = self._open.pop(path, None)
        if descriptor is not None:
            system.close(descriptor)

    def close(self) -> None:
        """Close every descriptor."""
        while self._open:
            system.close(self._open.popitem()[1])


def _max_open_files() -> int:
    """Return how many shards to keep open: a third of what the process may, the rest is for others in it."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return _MAX_OPEN_FILES
    return max(1, min(_MAX_OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3))


def sync_directory(path: str) -> None:
    """Return when the names in a directory are on the device."""
    sync_paths([path], path)


def sync_paths(paths: Iterable[str], file_system: str) -> None:
    """Return when files, and names in directories, are on the device.

    Parameters
    ----------
    paths : iterable of str
        Files and directories, all in one file system.
    file_system : str
        A directory of that file system: where there are many paths and the system can do it, the whole file system is synced in one call.
    """
    wanted = list(paths)
    whole = len(wanted) > _SYNC_WHOLE_ABOVE and has_sync_file_system
    if whole:
        wanted = [file_system]
    for path in wanted:
        descriptor = system.open(path, os.O_RDONLY)
        try:
            if whole:
                system.sync_file_system(descriptor)
            else:
                system.sync(descriptor)
        except OSError as error:
            error.filename = path
            raise
        finally:
            system.close(descriptor)


def write_atomically(path: str, contents: bytes, *, sync: bool = True) -> None:
    """Write a file by temporary file, sync and rename, so that a reader sees the old contents or the new ones, whole.

    Parameters
    ----------
    path : str
        The file, which may exist.
    contents : bytes
        All of it.
    sync : bool
        Whether it is durable on return. Without that the caller has to sync the file and its directory before anything relies on it.
    """
    temporary = _write_temporary(path, contents)
    if sync:
        sync_paths([temporary], temporary)
    system.replace(temporary, path)
    if sync:
        sync_directory(os.path.dirname(path))


def _write_temporary(path: str, contents: bytes) -> str:
    """Write what is to replace a file beside it, and return the path of that."""
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f".{name}{WRITING_SUFFIX}")
    write_new(temporary, contents)
    return temporary


def write_new(path: str, contents: bytes, *, sync: bool = False) -> None:
    """Write a file that nobody reads yet, in place of one that a dead process may have left there.

    Parameters
    ----------
    path : str
        The file.
    contents : bytes
        All of it.
    sync : bool
        Whether its bytes are durable on return; its name is not.
    """
    descriptor = system.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(descriptor, contents, path)
        if sync:
            system.sync(descriptor)
    except OSError as error:
        error.filename = path
        raise
    finally:
        system.close(descriptor)


def write_all(descriptor: int, contents: bytes, path: str) -> None:
    """Append all of some bytes to a file.

    Raises
    ------
    OSError
        From the operating system, with the path; also where it takes nothing again and again.
    """
    view = memoryview(contents)
    num_empty = 0
    while view:
        count = system.write(descriptor, view)
        num_empty = num_empty + 1 if count == 0 else 0
        if num_empty == _EMPTY_WRITES:
            raise OSError(errno.EIO, f"the system wrote nothing, {num_empty} times", path)
        view = view[count:]


def check_linked(descriptor: int, path: str) -> None:
    """Raise ``FileNotFoundError`` if the file of a descriptor has been deleted: what is written to it goes nowhere.

    Parameters
    ----------
    descriptor : int
        Of the file.
    path : str
        For the error.
    """
    if os.fstat(descriptor).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "it was deleted while it was being written", path)


def replace_all(contents: dict[str, bytes], file_system: str) -> None:
    """Write files by temporary files and renames as `write_atomically` does, durable on return, with the syncs of all together.

    Parameters
    ----------
    contents : dict
        What each file is to hold, by path.
    file_system : str
        A directory of the file system that they are in; see `sync_paths`.
    """
    temporaries = {}
    for path, content in contents.items():
        temporaries[path] = _write_temporary(path, content)
    sync_paths(temporaries.values(), file_system)
    for path, temporary in temporaries.items():
        system.replace(temporary, path)
    sync_paths({os.path.dirname(path) for path in contents}, file_system)


def list_names(directory: str) -> list[str]:
    """Return the names in a directory, sorted; none where there is no directory.

    Raises
    ------
    OSError
        From the operating system, if there is one that cannot be read.
    """
    try:
        return sorted(os.listdir(directory))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return []


def leads_outside(directory: str, path: str) -> bool:
    """Say whether a path below a directory leads out of it, over a symbolic link."""
    inside = os.path.realpath(directory)
    return os.path.commonpath([inside, os.path.realpath(path)]) != inside


def open_regular(path: str, root: str | None = None) -> int:
    """Open a file of a run, which may be anything, for reading: a regular file, and none that a link below the run leads to.

    Parameters
    ----------
    path : str
        The file.
    root : str, optional
        A directory above it. On the way to that there may be links, from there on none. By default the directory that the file is in.

    Returns
    -------
    int
        Its descriptor.

    Raises
    ------
    CorruptRunError
        If it is a link, or behind one, or a pipe, a device, a socket or a directory, or has a name that no file has.
    OSError
        From the operating system, also if there is no such file.
    """
    check_no_link(path, root)
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            raise
        raise CorruptRunError(f"{path!r} is no file of a run: {error}", path=path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptRunError(f"{path} is no regular file", path=path)
    return descriptor


def check_no_link(path: str, root: str | None = None) -> None:
    """Refuse a path of a run where it, or a directory between it and ``root``, is a link; see `open_regular`."""
    below = os.path.dirname(path) if root is None else root
    for name in path.removeprefix(below).replace(os.sep, "/").strip("/").split("/"):
        below = os.path.join(below, name)
        if os.path.islink(below):
            raise CorruptRunError(f"{below} is a link, and nothing in a run is one", path=below)


def read_small(path: str, most_bytes: int, root: str | None = None) -> bytes:
    """Read a whole file of a run, which may be anything, as far as it goes when it is opened.

    Parameters
    ----------
    path : str
        The file.
    most_bytes : int
        A larger one is refused before any of it is read.
    root : str, optional
        As for `open_regular`.

    Raises
    ------
    CorruptRunError
        If it is too large, or as `open_regular` says.
    OSError
        From the operating system, also if there is no such file.
    """
    with os.fdopen(open_regular(path, root), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise CorruptRunError(f"{path} has {size:,} bytes, more than the {most_bytes:,} that such a file can have", path=path)
        return file.read(size)


class DiskBudgetSpent(Exception):  # noqa: N818  # caught by the sink, which stops recording
    """There is no more room on the disk that a recording may take; the text says why."""


def portion_bytes(portion: str) -> int:
    """Return about what the text of a portion takes in a row, with that of the whole tensor's shape."""
    return len(portion) + _WHOLE_SHAPE_BYTES if portion else 0


class DiskBudget:
    """What a recording may still write; used under the stager's lock.

    What is staged is counted at once, by what it can take on the disk at most, and put right when it has been written.

    Parameters
    ----------
    run_path : str
        The run, of which what is there counts.
    max_bytes : int
        What its directory may hold.
    """

    def __init__(self, run_path: str, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._run_path = run_path
        self._used_bytes = _FIXED_BYTES + _size_of(run_path)
        self._pending_bytes = 0  # of those that are used: what is not written yet
        self._free_bytes: int | None = None
        self._looked_at = 0.0
        self._shards: set[tuple[str, str]] = set()

    def take(self, num_bytes: int, num_captures: int = 1, *, array: str = "", shard: str = "", num_entries: int = 0) -> int:
        """Set room aside for captures, and return how many bytes to `settle` for it.

        Parameters
        ----------
        num_bytes : int
            Bytes of their chunks, with padding.
        num_captures : int
            How many.
        array, shard : str
            Where they go: a shard that is new takes its index, and one that is sealed has to be cloned.
        num_entries : int
            Entries of that index.

        Raises
        ------
        DiskBudgetSpent
            If there is no room for them.
        """
        wanted: int = num_bytes + num_captures * (_ROW_BYTES + FRAME_ROW_BYTES)
        tail_bytes = 0
        if array and (array, shard) not in self._shards:
            tail_bytes = tail_bytes_of(num_entries) + _size_of_file(os.path.join(self._run_path, LAYERS_DIR, array, shard))
        if self._used_bytes + wanted + tail_bytes > self.max_bytes:
            raise DiskBudgetSpent(f"the run would take more than max_bytes={self.max_bytes:,}")
        self._look()
        if self._free_bytes is not None and self._pending_bytes + wanted + tail_bytes > self._free_bytes:
            raise DiskBudgetSpent(f"the file system of {self._run_path} is almost full")
        if array:
            self._shards.add((array, shard))
        self._used_bytes += wanted + tail_bytes
        self._pending_bytes += wanted
        return wanted

    def settle(self, taken: int, num_bytes: int, num_captures: int) -> None:
        """Put right what was taken: the captures have been written, and took so many bytes. What their rows take in the journal is put right by `add`."""
        self._used_bytes += num_bytes + num_captures * (_ROW_BYTES + FRAME_ROW_BYTES) - taken
        self._pending_bytes -= taken

    def add(self, num_bytes: int) -> None:
        """Count bytes that were written beside captures, or, if there are fewer than none, that are gone again."""
        self._used_bytes += num_bytes

    def _look(self) -> None:
        """Ask the file system now and then."""
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S and hasattr(os, "statvfs"):
            self._looked_at = now
            try:
                status = os.statvfs(self._run_path)
            except OSError:
                return
            self._free_bytes = status.f_bavail * status.f_frsize - _LEAST_FREE_BYTES


def tail_bytes_of(num_entries: int) -> int:
    """Return what a shard takes on the disk beside its chunks and rows."""
    return 16 * num_entries + _SHARD_BYTES


def _size_of_file(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _size_of(directory: str) -> int:
    """Return the bytes of all files below a directory."""
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(directory) for name in names)


class Sink:
    """Gathers bytes that come in any size in aligned memory, and writes them in whole pages."""

    def __init__(self, writer: DirectWriter) -> None:
        self._writer = writer
        self._memory = memoryview(mmap.mmap(-1, _SINK_BYTES))
        self._filled = 0
        self._path = ""
        self.offset = 0

    def begin(self, path: str, offset: int) -> None:
        """Start at an offset, a multiple of 4,096, of a file."""
        self._path, self.offset, self._filled = path, offset, 0

    def add(self, contents: memoryview | bytes) -> None:
        """Append bytes."""
        view = memoryview(contents).cast("B")
        while view:
            count = min(len(view), _SINK_BYTES - self._filled)
            self._memory[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == _SINK_BYTES:
                self._write(_SINK_BYTES)

    def pad(self, multiple: int) -> None:
        """Append zeros up to a multiple."""
        self.add(bytes(-(self.offset + self._filled) % multiple))

    @property
    def position(self) -> int:
        """Offset in the file of what is appended next."""
        return self.offset + self._filled

    def finish(self) -> int:
        """Write what is left, padded to a whole page, and return the offset where it ends."""
        self.pad(PAGE_BYTES)
        self._write(self._filled)
        return self.offset

    def _write(self, count: int) -> None:
        if count:
            self._writer.write(self._path, self._memory[:count], self.offset)
        self.offset += count
        self._filled = 0


class Spool:
    """An anonymous file for what is too much to keep in memory; it is gone when it is closed, or with the process.

    Parameters
    ----------
    directory : str or None
        A directory of the file system to use; the system's temporary one by default.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}  # by size: pieces come in few sizes

    def write(self, contents: bytes) -> int:
        """Write a piece, and return where it begins."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  # open for as long as the recording
        free = self._free.get(len(contents))
        start = free.pop() if free else self._end
        self._end = max(self._end, start + len(contents))
        written = 0
        while written < len(contents):
            written += os.pwrite(self._file.fileno(), memoryview(contents)[written:], start + written)
        return start

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return a piece."""
        assert self._file is not None
        contents = os.pread(self._file.fileno(), num_bytes, start)
        if len(contents) != num_bytes:
            raise OSError(errno.EIO, f"a spooled piece of {num_bytes:,} bytes has only {len(contents):,}", self._directory)
        return contents

    def release(self, start: int, num_bytes: int) -> None:
        """Let another piece of that size take the place of one."""
        self._free.setdefault(num_bytes, []).append(start)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class SpooledRecords:
    """Records of one NumPy dtype that are kept until they are asked for; a spool holds all but the newest.

    Parameters
    ----------
    spool : Spool
        The file, which others use too.
    dtype : numpy.dtype
        Of the records.
    """

    def __init__(self, spool: Spool, dtype: np.dtype[Any]) -> None:
        self._spool = spool
        self._dtype = dtype
        self._piece_bytes = _RECORDS_PER_PIECE * dtype.itemsize
        self._newest: list[bytes] = []
        self._num_newest_bytes = 0
        self._pieces: list[int] = []  # where they begin in the spool

    def __len__(self) -> int:
        return (len(self._pieces) * self._piece_bytes + self._num_newest_bytes) // self._dtype.itemsize

    def append(self, records: np.ndarray[Any, Any]) -> None:
        """Keep a copy of records."""
        self.append_bytes(records.tobytes())

    def append_bytes(self, records: bytes) -> None:
        """Keep records that are given as their bytes."""
        self._newest.append(records)
        self._num_newest_bytes += len(records)
        if self._num_newest_bytes >= self._piece_bytes:
            contents = b"".join(self._newest)
            num_whole = len(contents) // self._piece_bytes * self._piece_bytes
            for start in range(0, num_whole, self._piece_bytes):
                self._pieces.append(self._spool.write(contents[start : start + self._piece_bytes]))
            self._newest = [contents[num_whole:]]
            self._num_newest_bytes = len(contents) - num_whole

    def read(self) -> np.ndarray[Any, Any]:
        """Return all of them, in their order."""
        spooled = [self._spool.read(start, self._piece_bytes) for start in self._pieces]
        return np.frombuffer(b"".join([*spooled, *self._newest]), dtype=self._dtype)

    def clear(self) -> None:
        """Forget all of them."""
        for start in self._pieces:
            self._spool.release(start, self._piece_bytes)
        self._pieces, self._newest, self._num_newest_bytes = [], [], 0
