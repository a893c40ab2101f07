"""The lock on a run: one process at a time writes to it.

The lock is a file that says who holds it. Who finds one asks whether that process still lives: on the same machine the system knows; of another machine
the age of the file tells, which its holder renews every few seconds. `flock` is asked as well, where it works: it knows holders in other containers. It is
never the only witness, since it means nothing on many network file systems.

References
----------
Process start times: proc(5), ``/proc/PID/stat``, field 22. Boot: ``/proc/sys/kernel/random/boot_id``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from hookstore.errors import RunLockedError
from hookstore.files import read_small, system, write_new
from hookstore.format import JOURNAL_DIR, LOCK_FILE

fcntl: Any = None  # Windows has none: whether the process lives has to do
with contextlib.suppress(ImportError):
    fcntl = importlib.import_module("fcntl")

RENEW_S = 5.0
STALE_S = 60.0  # a holder on another machine that has not renewed its lock for that long is taken for dead
_MOST_BYTES = 64 << 10

_HELD: weakref.WeakSet[RunLock] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock, as the file has it.

    Attributes
    ----------
    token : str
        Made anew for every lock.
    host, machine, boot : str
        Name of the machine, what identifies it, and its boot.
    namespace : str
        Of process numbers: containers on one machine have their own.
    pid : int
        The process.
    started : str
        When it started, in the system's own terms, since numbers of processes come back.
    since : str
        When it took the lock, UTC.
    """

    token: str
    host: str
    machine: str
    boot: str
    namespace: str
    pid: int
    started: str
    since: str

    @classmethod
    def here(cls) -> Owner:
        """Describe this process."""
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            machine=_first_line("/etc/machine-id") or f"{uuid.getnode():012x}",
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            namespace=_namespace(),
            pid=os.getpid(),
            started=_start_of(os.getpid()),
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    @classmethod
    def read(cls, path: str) -> Owner | None:
        """Read who holds a lock; ``None`` where there is none, or what there is makes no sense."""
        try:
            held: Any = json.loads(read_small(path, _MOST_BYTES, os.path.dirname(os.path.dirname(path))))
            owner = cls(**{field.name: held[field.name] for field in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        texts = (owner.token, owner.host, owner.machine, owner.boot, owner.namespace, owner.started, owner.since)
        is_sound = all(isinstance(text, str) for text in texts) and type(owner.pid) is int and 0 < owner.pid < 2**31
        return owner if is_sound else None

    def lives(self) -> bool | None:
        """Say whether the process lives; ``None`` where that cannot be seen from here."""
        here = Owner.here()
        if (self.host, self.machine) != (here.host, here.machine):
            return None
        if self.boot != here.boot:
            return False
        if self.namespace != here.namespace:
            return None
        return _start_of(self.pid) == self.started != ""


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """Return when a process started, or "" if there is none (a zombie is none)."""
    if os.path.exists("/proc/self/stat"):
        stat = _first_line(f"/proc/{pid}/stat")
        fields_after_name = stat.rpartition(")")[2].split()
        return "" if len(fields_after_name) < 20 or fields_after_name[0] in "ZX" else fields_after_name[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass  # it belongs to another user
    return "unknown"


def lock_path(run_path: str) -> str:
    """Return where the lock of a run lies."""
    return os.path.join(run_path, JOURNAL_DIR, LOCK_FILE)


def holder(run_path: str, *, may_write: bool = False) -> Owner | None:
    """Return who writes to a run now, as far as can be seen from here, or ``None``.

    Parameters
    ----------
    run_path : str
        The run.
    may_write : bool
        Whether a file may be made for a moment, to see the clock of the machine that has the disk.
    """
    path = lock_path(run_path)
    owner = Owner.read(path)
    return owner if owner is not None and _lives(owner, path, may_write=may_write) else None


def _lives(owner: Owner, path: str, *, may_write: bool) -> bool:
    """Say whether a lock counts."""
    lives = owner.lives()
    if lives and owner.pid == os.getpid():
        return owner.token in {lock.token for lock in _HELD if lock.is_held}  # it may be that it could not be removed
    if lives is None:
        age_s = _age_s(path, may_write=may_write)
        return _is_flocked(path) or (age_s is not None and age_s < STALE_S)
    return lives


@contextlib.contextmanager
def _in_turn(directory: str) -> Iterator[None]:
    """Let those that want the lock at once, on one machine, try it one after another; whoever dies in between lets the next one in."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC) if fcntl is not None else -1
    try:
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # a file system without it
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class RunLock:
    """The lock on a run, held by this process until `release`.

    Parameters
    ----------
    run_path : str
        The run; its ``journal`` directory exists.

    Raises
    ------
    RunLockedError
        If another process, or another recorder of this one, holds it.
    """

    def __init__(self, run_path: str) -> None:
        self._run_path = run_path
        self._path = lock_path(run_path)
        self._owner = Owner.here()
        self._descriptor = -1
        self._renewed_at = time.monotonic()
        self._contents = json.dumps(asdict(self._owner)).encode()
        self._acquire()
        _HELD.add(self)

    @property
    def token(self) -> str:
        """What tells this lock from any other."""
        return self._owner.token

    @property
    def is_held(self) -> bool:
        """Whether it has not been let go."""
        return self._descriptor >= 0

    def _acquire(self) -> None:
        own = f"{self._path}.{self.token}"
        with _in_turn(os.path.dirname(self._path)):
            try:
                write_new(own, self._contents)  # the lock appears with its contents, all at once
                for _ in range(3):
                    if self._link(own):
                        break
                    found = Owner.read(self._path)
                    if found is not None and _lives(found, self._path, may_write=True):
                        raise self._refusal(found)
                    self._take_over(own, found)
                else:
                    raise self._refusal(Owner.read(self._path))
            finally:
                with contextlib.suppress(FileNotFoundError):
                    system.unlink(own)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system without it
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = Owner.read(self._path)
        if found is None or found.token != self.token:  # taken over at the same time, where turns cannot be taken
            os.close(descriptor)
            raise self._refusal(found)
        self._descriptor = descriptor

    def _link(self, own: str) -> bool:
        """Make the lock if there is none; say whether that was so."""
        try:
            os.link(own, self._path)
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            try:
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                return False
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._contents)
        return True

    def _take_over(self, own: str, stale: Owner | None) -> None:
        """Remove the lock of a dead process, and no other; of several that try it at once, one does so."""
        aside = f"{self._path}.stale"
        try:
            os.link(own, aside)
        except FileExistsError:
            other = Owner.read(aside)
            if other is not None and other.lives() is not False and (_age_s(aside, may_write=True) or 0.0) < STALE_S:
                raise self._refusal(other) from None
            with contextlib.suppress(FileNotFoundError):
                system.unlink(aside)  # who was about to take the lock over has died as well
            return
        except OSError:
            pass  # a file system without links: the checks around this one have to do
        try:
            if Owner.read(self._path) == stale:
                with contextlib.suppress(FileNotFoundError):
                    system.unlink(self._path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                system.unlink(aside)

    def _refusal(self, owner: Owner | None) -> RunLockedError:
        if owner is None:
            return RunLockedError(f"{self._run_path} is being taken up by another process just now", path=self._run_path)
        if owner.pid == os.getpid() and owner.lives():
            who = "a recorder of this very process, which has not been closed"
        else:
            who = f"process {owner.pid} on host {owner.host}, since {owner.since}"
        hint = "" if owner.lives() else f"; if it has died, its lock counts for nothing {STALE_S:.0f} s after that"
        return RunLockedError(
            f"{self._run_path} is being written by {who}: only one process at a time can write to a run{hint}",
            path=self._run_path,
            host=owner.host,
            pid=owner.pid,
        )

    def renew(self) -> None:
        """Show that this process lives, if it is time to; cheap enough for every turn of a loop.

        Raises
        ------
        RunLockedError
            If another process has taken the lock over, because this one had not shown itself for too long.
        FileNotFoundError
            If the lock is gone: the run was deleted.
        """
        now = time.monotonic()
        if now - self._renewed_at < RENEW_S:
            return
        self._renewed_at = now
        owner = Owner.read(self._path)
        if owner is not None and owner.token != self._owner.token:
            raise RunLockedError(
                f"{self._run_path} was taken over by process {owner.pid} on host {owner.host}, since this one had not shown itself for {STALE_S:.0f} s",
                path=self._run_path,
                host=owner.host,
                pid=owner.pid,
            )
        os.utime(self._path)

    def release(self) -> None:
        """Let the lock go; does nothing the second time."""
        if self._descriptor < 0:
            return
        self.forget()
        owner = Owner.read(self._path)
        if owner is not None and owner.token == self._owner.token:
            with contextlib.suppress(OSError):
                system.unlink(self._path)

    def forget(self) -> None:
        """Close the file and leave the lock as it is, as a forked child has to."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_flocked(path: str) -> bool:
    """Say whether some process holds a lock of the system on a file."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _age_s(path: str, *, may_write: bool) -> float | None:
    """Return how long ago a file was renewed, or ``None`` if it is gone.

    By the clock of the machine that has the disk where a file may be written there to look at it, since clocks of machines differ.
    """
    try:
        renewed = os.stat(path).st_mtime
        if not may_write:
            return time.time() - renewed
        probe = f"{path}.{uuid.uuid4().hex}"
        write_new(probe, b"")
        try:
            return os.stat(probe).st_mtime - renewed
        finally:
            system.unlink(probe)
    except OSError:
        return None


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
