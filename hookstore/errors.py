"""Every exception and warning that hookstore raises of its own.

::

    HookstoreError
    ├── OptionError           (ValueError)          an argument that cannot be used
    │   ├── SelectionError                          layers that match nothing, or only what is never called
    │   └── ClockError                              coordinates that are negative, not whole, or out of turn
    ├── UnsupportedModelError (TypeError)           a model or device that cannot be hooked
    ├── RecorderClosedError   (RuntimeError)        a call on a recorder that is closed
    ├── RecorderBusyError     (RuntimeError)        a call that would wait for itself: in a signal handler, or a trigger's function
    ├── RunLockedError        (RuntimeError)        writing to a run that another process writes to
    ├── RunExistsError        (FileExistsError)     recording into a directory that holds something
    ├── NotARunError          (FileNotFoundError)   opening what is no run
    ├── FormatVersionError    (ValueError)          a run that a newer hookstore wrote
    ├── UnknownLayerError     (KeyError)            a layer that the run does not have
    ├── MissingCaptureError   (KeyError)            a capture that the run does not have
    └── CorruptRunError       (OSError)             bytes that do not match their checksum, or nonsense in a manifest

    CaptureWarning            (UserWarning)         something was not captured (the manifest has a row that says why), or more than once, or has no effect

A failure of the writer (a full disk, say) is none of these: it reaches the training loop as the original exception.
"""

from __future__ import annotations

__all__ = [
    "CaptureWarning",
    "ClockError",
    "CorruptRunError",
    "FormatVersionError",
    "HookstoreError",
    "MissingCaptureError",
    "NotARunError",
    "OptionError",
    "RecorderBusyError",
    "RecorderClosedError",
    "RunExistsError",
    "RunLockedError",
    "SelectionError",
    "UnknownLayerError",
    "UnsupportedModelError",
]


class HookstoreError(Exception):
    """Root of every error that hookstore raises."""


class OptionError(HookstoreError, ValueError):
    """An argument that cannot be used.

    Attributes
    ----------
    option : str
        Name of the argument.
    """

    def __init__(self, message: str, *, option: str = "") -> None:
        super().__init__(message)
        self.option = option


class SelectionError(OptionError):
    """A layer selection that matches nothing that is ever called."""

    def __init__(self, message: str) -> None:
        super().__init__(message, option="layers")


class ClockError(OptionError):
    """An epoch or a batch that is negative or no whole number."""


class UnsupportedModelError(HookstoreError, TypeError):
    """A model, or a device, that hooks cannot follow."""


class RecorderClosedError(HookstoreError, RuntimeError):
    """A call on a recorder after ``close()``."""


class RecorderBusyError(HookstoreError, RuntimeError):
    """A call that would wait for itself: for the capture that it interrupts, as from a signal handler, or, in a trigger's function, for the writer."""


class RunExistsError(HookstoreError, FileExistsError):
    """The directory to record into holds something already.

    Attributes
    ----------
    path : str
        The directory.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class RunLockedError(HookstoreError, RuntimeError):
    """Another process writes to the run, or another recorder of this one.

    Attributes
    ----------
    path : str
        Directory of the run.
    host : str
        Name of the machine that process runs on.
    pid : int
        Its number there; 0 where it is not known.
    """

    def __init__(self, message: str, *, path: str = "", host: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.path = path
        self.host = host
        self.pid = pid


class NotARunError(HookstoreError, FileNotFoundError):
    """The path to open holds no run.

    Attributes
    ----------
    path : str
        The path that was opened.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class FormatVersionError(HookstoreError, ValueError):
    """The run has a format version that this hookstore does not read.

    Attributes
    ----------
    found, supported : int
        Format version of the run, and the newest that this hookstore reads.
    """

    def __init__(self, message: str, *, found: int = 0, supported: int = 0) -> None:
        super().__init__(message)
        self.found = found
        self.supported = supported


class _ReadableKeyError(HookstoreError, KeyError):
    """A ``KeyError`` whose text is printed as it stands instead of as a quoted ``repr``."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnknownLayerError(_ReadableKeyError):
    """The run has no layer of that name.

    Attributes
    ----------
    layer : str
        The name asked for.
    """

    def __init__(self, message: str, *, layer: str = "") -> None:
        super().__init__(message)
        self.layer = layer


class MissingCaptureError(_ReadableKeyError):
    """The run holds no capture at those coordinates.

    Attributes
    ----------
    layer, kind : str
        What was asked for.
    epoch, batch, call : int or None
        Coordinates that were asked for; ``None`` where the question had not come that far.
    status : str or None
        Status of the manifest row when there is one (``dropped``, ``skipped``, ``lost``), else ``None``.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: str = "",
        kind: str = "",
        epoch: int | None = None,
        batch: int | None = None,
        call: int | None = None,
        status: str | None = None,
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.kind = kind
        self.epoch = epoch
        self.batch = batch
        self.call = call
        self.status = status


class CorruptRunError(HookstoreError, OSError):
    """Bytes of a run that do not match their checksum, or that no writer of this format wrote.

    Attributes
    ----------
    path : str
        The file.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class CaptureWarning(UserWarning):
    """A capture was dropped or skipped, and its manifest row says why; or there are several where one was asked for."""


_MOST_TEXT = 200


def name_error(error: BaseException) -> str:
    """Return the type of an exception and the beginning of what it says, if it says anything."""
    text = str(error)[:_MOST_TEXT]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
