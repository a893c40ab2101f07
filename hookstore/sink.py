"""The way from the hooks to the stager: what is a capture, what is a gap, and what becomes of a failure."""

from __future__ import annotations

import time
import warnings
from typing import NamedTuple

import torch
from torch import nn

from hookstore.errors import CaptureWarning, RecorderClosedError
from hookstore.format import DTYPES
from hookstore.layout import Capture
from hookstore.schedule import Clock, Coordinates
from hookstore.staging import Stager

TORCH_DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.parameter.Buffer)


class Call(NamedTuple):
    """One call of a layer that is recorded.

    Attributes
    ----------
    coordinates : Coordinates
        Where it is filed.
    number : int
        Which call of the layer there.
    step : int
        Optimizer steps done before.
    sequence_nr : int
        Autograd's counter when the call began: what was made later was made inside.
    """

    coordinates: Coordinates
    number: int
    step: int
    sequence_nr: int


class Sink:
    """Takes tensors from the hooks and stages them, until it is turned off.

    Parameters
    ----------
    stager : Stager
        Where they go.
    clock : Clock
        Where training stands.
    dtype : str or None
        What floating-point tensors are cast to.
    disable_on_failure : bool
        Whether a failure of the writer ends capturing with a warning instead of reaching the training loop.
    """

    def __init__(self, stager: Stager, clock: Clock, *, dtype: str | None, disable_on_failure: bool) -> None:
        self.is_active = True
        self.clock = clock
        self.num_calls: dict[str, int] = {}
        self._stager = stager
        self._dtype = dtype
        self._disable_on_failure = disable_on_failure
        self._warned: set[tuple[str, str]] = set()

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int = 0) -> None:
        """Stage one tensor, or note why it cannot be."""
        if not self.is_active:
            return
        reason = why_not(tensor)
        dtype = TORCH_DTYPES.get(tensor.dtype, "")
        if self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        shape = () if reason else tuple(tensor.shape)
        capture = Capture(layer, kind, leaf, dtype, call.coordinates, call.number, backward, call.step, shape, time.time_ns() // 1000)
        try:
            if reason is not None:
                self.skip(capture, reason)
            else:
                self._stager.stage(capture, tensor.detach(), epoch_batches=self.clock.epoch_batches)
        except BaseException as error:
            self._failed(error, capture)

    def _failed(self, error: BaseException, capture: Capture) -> None:
        """Raise what went wrong in the training loop, or end capturing with a warning if that is what was asked for."""
        if not self.is_active and isinstance(error, RecorderClosedError):
            return  # close() has overtaken this capture
        if error is not self._stager.failure or not self._disable_on_failure:
            raise error
        where = capture.coordinates
        self.is_active = False
        warnings.warn(
            f"hookstore stopped capturing at {capture.kind} of layer {capture.layer!r}, epoch {where.epoch}, batch {where.batch}: "
            f"the writer failed with {type(error).__name__}: {error}",
            CaptureWarning,
            stacklevel=2,
        )

    def skip(self, capture: Capture, reason: str) -> None:
        """Note a gap, and warn about the first of its layer and kind."""
        capture.status, capture.reason = "skipped", reason
        self._stager.note(capture)
        if (capture.layer, capture.kind) not in self._warned:
            self._warned.add((capture.layer, capture.kind))
            where = capture.coordinates
            warnings.warn(
                f"{capture.kind} of layer {capture.layer!r} was not captured, first in epoch {where.epoch}, batch {where.batch}: {reason}",
                CaptureWarning,
                stacklevel=2,
            )

    def skip_value(self, layer: str, kind: str, call: Call, reason: str, *, leaf: str = "") -> None:
        """Note that a value, or one leaf of it, could not be captured."""
        if not self.is_active:
            return
        capture = Capture(layer, kind, leaf, "", call.coordinates, call.number, 0, call.step, (), time.time_ns() // 1000)
        try:
            self.skip(capture, reason)
        except BaseException as error:
            self._failed(error, capture)


def why_not(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no bytes that could be stored, or return ``None``."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor):
        return "it is a functorch tensor (vmap, grad or jvp), which stands for many values"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, not strided"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.dtype not in TORCH_DTYPES:
        return f"its dtype {tensor.dtype} is not stored"
    if type(tensor) not in _PLAIN_TYPES and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(tensor).__name__}, a tensor subclass whose values only its own code knows"
    return None
