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


class _Handler:
    """A handler of a signal in front of the one that was there before.

    Recordings may end in any order, and others may set handlers meanwhile: one that cannot be taken away passes the signal on, and does nothing else.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._is_removed = False
        self._pid = os.getpid()
        self._before: Any = signal.getsignal(number)
        signal.signal(number, self._handle)

    def remove(self) -> None:
        """Put the handler back that was there before, unless somebody has set another since, or this is not the main thread."""
        self._is_removed = True
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._handle:
            before = self._before_all_removed()
            signal.signal(self._number, signal.SIG_DFL if before is None else before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError

    @property
    def _has_no_part(self) -> bool:
        """Whether the signal is none of ours: the recording has ended, or this is a forked child, where there is none."""
        return self._is_removed or os.getpid() != self._pid

    def _before_all_removed(self) -> Any:
        """Return the handler before this one and before those that have been removed."""
        before = self._before
        while isinstance(of := getattr(before, "__self__", None), _Handler) and of._is_removed:
            before = of._before
        return before

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal would have done without us."""
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class FlushOnSigterm(_Handler):
    """A handler of SIGTERM that flushes, and then lets happen what would have happened without it.

    The handler itself only starts a thread: the main thread may be in the middle of a capture, or hold any lock. When all is durable, that thread sends the
    signal again, and then the handler that was there before has its turn, on the main thread, as Python does it.

    Parameters
    ----------
    flush : callable
        Makes everything durable; is told whether the process will end by the signal.
    """

    def __init__(self, flush: Callable[[bool], None]) -> None:
        self._flush: Callable[[bool], None] | None = flush
        self._main = threading.main_thread().ident
        self._thread: threading.Thread | None = None
        self._is_flushed = False
        super().__init__(signal.SIGTERM)

    def remove(self) -> None:
        """See `_Handler`; waits for a flush under way."""
        super().remove()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._flush = None  # a handler that stays keeps no recording alive

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._has_no_part or self._is_flushed:
            try:
                self._pass_on(number, frame)
            finally:  # if the process goes on: another signal, which may come at any instant, begins anew
                self._is_flushed, self._thread = False, None
        elif self._thread is None:
            thread = threading.Thread(target=self._run, name="hookstore-sigterm", daemon=False)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and the writer finishes the run by itself
                self._pass_on(number, frame)
            else:
                self._thread = thread

    def _run(self) -> None:
        flush = self._flush
        with contextlib.suppress(BaseException):  # where the writer has failed, what was acknowledged is kept, and no more can be done
            if flush is not None:
                flush(self._before_all_removed() == signal.SIG_DFL)
        self._is_flushed = True
        if self._main is not None:
            signal.pthread_kill(self._main, signal.SIGTERM)


class OnSignal(_Handler):
    """A handler of a signal that tells of it, and then calls the handler that was there before.

    Parameters
    ----------
    number : int
        The signal.
    tell : callable
        Takes the name of the signal; on the main thread, between any two lines of what it does.
    """

    def __init__(self, number: int, tell: Callable[[str], None]) -> None:
        self._tell: Callable[[str], None] | None = tell
        super().__init__(number)

    def remove(self) -> None:
        """See `_Handler`."""
        super().remove()
        self._tell = None  # a handler that stays keeps no recording alive

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._tell is not None and not self._has_no_part:
            self._tell(signal.Signals(number).name)
        if self._is_removed or callable(
            self._before
        ):  # until then it does nothing more where nobody else handles it, in forked workers neither
            self._pass_on(number, frame)
