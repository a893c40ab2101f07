"""Signals: SIGTERM, which schedulers send before they kill, and those that the flight recorder fires at."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hookstore.errors import OptionError

_OF_USERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def check_main_thread(option: str = "on_sigterm") -> None:
    """Raise `OptionError` outside the main thread, where Python sets no handlers of signals."""
    if threading.current_thread() is not threading.main_thread():
        raise OptionError(
            f"{option}: a handler can only be set in the main thread; call record() there, or leave {option} out", option=option
        )


class FlushOnSigterm:
    """A handler of SIGTERM that flushes, and then lets happen what would have happened without it.

    The handler itself only starts a thread: the main thread may be in the middle of a capture, or hold any lock. When all is durable, that thread sends the
    signal again, and then the handler that was there before has its turn, on the main thread, as Python does it.

    Parameters
    ----------
    flush : callable
        Makes everything durable; is told whether the process will end by the signal.
    """

    def __init__(self, flush: Callable[[bool], None]) -> None:
        self._flush = flush
        self._pid = os.getpid()
        self._main = threading.main_thread().ident
        self._thread: threading.Thread | None = None
        self._is_flushed = False
        self._before: Any = signal.getsignal(signal.SIGTERM)
        try:
            signal.signal(signal.SIGTERM, self._handle)
        except ValueError:
            raise OptionError(
                "on_sigterm: a handler can only be set in the main thread; call record() there, or leave on_sigterm out",
                option="on_sigterm",
            ) from None

    def remove(self) -> None:
        """Put the handler back that was there before, unless somebody has set another since; waits for a flush under way."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._before is None else self._before)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or self._is_flushed:  # a forked child has nothing to flush
            self._is_flushed, self._thread = False, None
            self._chain(number, frame)
        elif self._thread is None:
            thread = threading.Thread(target=self._run, name="hookstore-sigterm", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and the writer finishes the run by itself
                self._chain(number, frame)
            else:
                self._thread = thread

    def _run(self) -> None:
        with contextlib.suppress(BaseException):  # where the writer has failed, what was acknowledged is kept, and no more can be done
            self._flush(self._before == signal.SIG_DFL)
        self._is_flushed = True
        if self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _chain(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal would have done without us."""
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def check_can_be_handled(number: int) -> None:
    """Raise `OptionError` for a signal that ends the process where nobody handles it, as nobody does: we cannot let it do both."""
    check_main_thread("when")
    if number not in _OF_USERS and signal.getsignal(number) == signal.SIG_DFL:
        name = signal.Signals(number).name
        raise OptionError(
            f"when: {name} has no handler, and without one it does what the system does with it; set one before, choose SIGUSR1 or SIGUSR2"
            + (", or use on_sigterm='flush'" if number == signal.SIGTERM else ""),
            option="when",
        )


class OnSignal:
    """A handler of a signal that tells of it, and then calls the handler that was there before.

    Parameters
    ----------
    number : int
        The signal.
    tell : callable
        Takes the name of the signal; on the main thread, between any two lines of what it does.
    """

    def __init__(self, number: int, tell: Callable[[str], None]) -> None:
        self._number = number
        self._tell: Callable[[str], None] | None = tell
        self._pid = os.getpid()
        self._before: Any = signal.getsignal(number)
        signal.signal(number, self._handle)

    def remove(self) -> None:
        """Put the handler back that was there before, unless somebody has set another since; then, and outside the main thread, this one does nothing more."""
        self._tell = None  # nor does it keep the recording alive
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._handle:
            before = self._before_all_removed()
            signal.signal(self._number, signal.SIG_DFL if before is None else before)

    def _before_all_removed(self) -> Any:
        """Return the handler before this one and those that have been removed: recordings may end in any order."""
        before = self._before
        while isinstance(of := getattr(before, "__self__", None), OnSignal) and of._tell is None:
            before = of._before
        return before

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._tell is not None and os.getpid() == self._pid:
            self._tell(signal.Signals(number).name)
        if callable(self._before):
            self._before(number, frame)
        elif self._tell is None and self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
