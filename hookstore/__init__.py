"""Archive what happens inside a PyTorch model while it trains, and ask about it later.

Recording (``record``) and reading (``open``) load apart: opening a run imports neither torch nor any of the recording code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hookstore.errors import (
    CaptureWarning,
    ClockError,
    CorruptRunError,
    FormatVersionError,
    HookstoreError,
    MissingCaptureError,
    NotARunError,
    OptionError,
    RecorderBusyError,
    RecorderClosedError,
    RunExistsError,
    RunLockedError,
    SelectionError,
    UnknownLayerError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from hookstore.capture import Capture
    from hookstore.captures import Captures, LayerRun
    from hookstore.gradients import GradientEdit, clip_gradient, reverse_gradient, scale_gradient
    from hookstore.histories import SampleCaptures, SampleHistory, SampleLayer
    from hookstore.joined import NestedArray, QuantizedArray, SparseArray
    from hookstore.occurrences import Occurrence
    from hookstore.planned import Plan, PlannedTensor
    from hookstore.planning import plan
    from hookstore.recorder import Progress, Recorder, record
    from hookstore.recovery import RecoveryReport, recover
    from hookstore.run import PartialBatch, Run, RunInfo, open  # noqa: A004
    from hookstore.samples import Samples
    from hookstore.statistics import Statistics
    from hookstore.tapping import LayerTap, Tap, tap
    from hookstore.values import Arguments, NotStored, PackedSequence, Record
    from hookstore.verification import Fault, Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Arguments",
    "Capture",
    "CaptureWarning",
    "Captures",
    "ClockError",
    "CorruptRunError",
    "Fault",
    "FormatVersionError",
    "GradientEdit",
    "HookstoreError",
    "LayerRun",
    "LayerTap",
    "MissingCaptureError",
    "NestedArray",
    "NotARunError",
    "NotStored",
    "Occurrence",
    "OptionError",
    "PackedSequence",
    "PartialBatch",
    "Plan",
    "PlannedTensor",
    "Progress",
    "QuantizedArray",
    "Record",
    "Recorder",
    "RecorderBusyError",
    "RecorderClosedError",
    "RecoveryReport",
    "Run",
    "RunExistsError",
    "RunInfo",
    "RunLockedError",
    "SampleCaptures",
    "SampleHistory",
    "SampleLayer",
    "Samples",
    "SelectionError",
    "SparseArray",
    "Statistics",
    "Tap",
    "UnknownLayerError",
    "UnsupportedModelError",
    "Verification",
    "__version__",
    "clip_gradient",
    "open",
    "plan",
    "record",
    "recover",
    "reverse_gradient",
    "scale_gradient",
    "tap",
    "verify",
]

_HOME = {
    "Capture": "hookstore.capture",
    **dict.fromkeys(("GradientEdit", "clip_gradient", "reverse_gradient", "scale_gradient"), "hookstore.gradients"),
    **dict.fromkeys(("Progress", "Recorder", "record"), "hookstore.recorder"),
    **dict.fromkeys(("RecoveryReport", "recover"), "hookstore.recovery"),
    "Samples": "hookstore.samples",
    **dict.fromkeys(("SampleCaptures", "SampleHistory", "SampleLayer"), "hookstore.histories"),
    "Occurrence": "hookstore.occurrences",
    **dict.fromkeys(("Plan", "PlannedTensor"), "hookstore.planned"),
    "plan": "hookstore.planning",
    **dict.fromkeys(("LayerTap", "Tap", "tap"), "hookstore.tapping"),
    "Statistics": "hookstore.statistics",
    **dict.fromkeys(("Arguments", "NotStored", "PackedSequence", "Record"), "hookstore.values"),
    **dict.fromkeys(("NestedArray", "QuantizedArray", "SparseArray"), "hookstore.joined"),
    **dict.fromkeys(("Fault", "Verification", "verify"), "hookstore.verification"),
    **dict.fromkeys(("Captures", "LayerRun"), "hookstore.captures"),
    **dict.fromkeys(("PartialBatch", "Run", "RunInfo", "open"), "hookstore.run"),
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hookstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
