"""The way from the hooks to the stager: what is a capture, what is a gap, and what becomes of a failure."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from hookstore.agenda import WHOLE, Take
from hookstore.capture import TORCH_DTYPES
from hookstore.clock import Clock, Coordinates
from hookstore.device import unseen
from hookstore.errors import CaptureWarning, RecorderClosedError
from hookstore.files import DiskBudgetSpent
from hookstore.format import SCALED_KINDS
from hookstore.layout import Call, Draft
from hookstore.nested import Other
from hookstore.parts import Apart, take_apart
from hookstore.staging import Stager
from hookstore.structure import TENSOR, encode_at

# What a tensor is besides its dtype and shape: where it lives, dense or not, wrapped, nested, lazily conjugated or negated. It is read without giving the
# GIL away, which would cost many times what a small copy does while the writer is waiting for it.
_dispatch_keys = torch._C._dispatch_keys
_transform = torch._C._functorch.peek_interpreter_stack
_MOST_DIMS = 61  # NumPy and Zarr have 64, and an array has up to three before those of the tensor
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.parameter.Buffer)


class Sink(Protocol):
    """Where the hooks hand over what they see.

    Attributes
    ----------
    is_active : bool
        Whether it takes anything.
    is_live : bool
        Whether it keeps tensors as they are, with the graph behind them: of such nothing is detached on the way.
    scaler : torch.amp.GradScaler or None
        What the loss is scaled by.
    clock : Clock
        Where training stands.
    """

    is_active: bool
    is_live: bool
    scaler: torch.amp.GradScaler | None
    clock: Clock

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int = 0) -> None:
        """Take one tensor, or note why it cannot be taken."""

    def structure(self, text: str) -> int:
        """Return the number that a call carries for the structure of its value."""

    def skip_value(
        self,
        layer: str,
        kind: str,
        call: Call,
        reason: str,
        *,
        leaf: str = "",
        backward: int = 0,
        topic: str | None = None,
        take: Take = WHOLE,
    ) -> None:
        """Note that a value, or one leaf of it, cannot be taken."""

    def skip_other(self, layer: str, kind: str, call: Call, other: Other) -> None:
        """Note that something inside a value is no tensor."""

    def skip_layers(self, reasons: dict[str, str], kinds: Mapping[str, Sequence[str]], here: Coordinates, step: int) -> None:
        """Note gaps of whole layers in a batch."""

    def skip_unforeseen(self, coordinates: Coordinates) -> None:
        """Note that a batch began inside a compiled graph that was not to be watched."""

    def cut_short(self, here: Coordinates, reason: str) -> None:
        """Note that a forward was broken off."""

    def tell(self) -> None:
        """Warn, on a thread that trains, of what other threads have found; called at each tick."""


class StagingSink:
    """Takes tensors from the hooks and stages them, until it is turned off.

    Parameters
    ----------
    stager : Stager
        Where they go.
    clock : Clock
        Where training stands.
    disable_on_failure : bool
        Whether a failure of the writer ends capturing with a warning instead of reaching the training loop.
    scaler : torch.amp.GradScaler or None
        What the loss is scaled by.
    """

    def __init__(self, stager: Stager, clock: Clock, *, disable_on_failure: bool, scaler: torch.amp.GradScaler | None = None) -> None:
        self.is_active = True
        self.is_live = False
        self.scaler = scaler
        self.clock = clock
        self._stager = stager
        self._disable_on_failure = disable_on_failure
        self._warned: set[tuple[str, str]] = set()
        self._cut_short: Coordinates | None = None
        self.on_raised: Callable[[Coordinates, str], None] = lambda _where, _reason: None

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int = 0) -> None:  # noqa: C901, PLR0912  # calls cost
        """Stage one tensor in the forms that are due, or note why it cannot be."""
        due = call.due
        if not self.is_active or due is None:
            return
        takes = due.takes.get(kind)
        if takes is None:
            return
        if self.scaler is not None and kind in SCALED_KINDS and not _counts(tensor.dtype):
            call = call._replace(scale=_scale_of(self.scaler))
        whole, of_whole = tensor, call
        for take in takes:
            if take.portion is None:
                tensor, call = whole, of_whole
            else:
                part = self._part_of(whole, take, layer, kind, leaf, of_whole, backward)
                if part is None:
                    continue
                tensor, call = part, self._of_part(of_whole, whole.shape)
            key: tuple[object, ...] | None = None
            array = None
            try:
                key = (
                    layer,
                    kind,
                    leaf,
                    call.coordinates.phase,
                    call.number > 0,
                    tensor.dtype,
                    tensor.shape,
                    _dispatch_keys(tensor).raw_repr(),
                )
                array = take.known.get(key)
            except (RuntimeError, TypeError):  # a nested tensor has no shape, and a symbolic one is no key
                pass
            if array is not None and type(tensor) in _PLAIN_TYPES:
                try:
                    if array.is_small and tensor.is_contiguous():
                        if self._stager.stage_small(array, call, backward, tensor):
                            continue
                    elif _transform() is None and self._stager.stage_whole(array, call, backward, tensor.detach()):
                        continue
                except BaseException as error:
                    where = (*call[:2], backward, call.step)
                    self._failed(error, Draft(layer, kind, leaf, array.spec.dtype, *where, array.spec.chunk_shape, 0))
                    continue
            self.put_as(take, layer, kind, leaf, tensor, call, backward, key)

    def tell(self) -> None:
        """Warn of what the writer has found, on a thread that trains."""
        if self._stager.is_spent:
            self.is_active = False
        messages = self._stager.messages
        while messages:
            with contextlib.suppress(IndexError):  # another thread tells it
                warnings.warn(messages.popleft(), CaptureWarning, stacklevel=3)

    def _part_of(
        self, tensor: torch.Tensor, take: Take, layer: str, kind: str, leaf: str, call: Call, backward: int
    ) -> torch.Tensor | None:
        """Return the part of a tensor that is kept, or note why there is none."""
        assert take.portion is not None
        reason = why_not(tensor)
        if reason is not None:
            reason = f"{reason}; select works on tensors that are one block of numbers"
        else:
            try:
                with _outside_transforms(), _undisturbed():
                    return cast("torch.Tensor", take.portion.of(tensor.detach()))
            except Exception as error:  # the user's own function, or a tensor without that axis, is no reason to stop training
                reason = (
                    str(error)
                    if isinstance(error, IndexError) and take.portion.function is None
                    else f"select raised {type(error).__name__}: {error}"
                )
        self.skip_value(layer, kind, call, reason, leaf=leaf, backward=backward, take=take)
        return None

    def _of_part(self, call: Call, shape: torch.Size) -> Call:
        """Return a call of which a part of a tensor is taken, with the shape of the whole one; without, where there have been too many."""
        number = self._stager.structure(self._stager.structures[call.structure], ",".join(map(str, shape)))
        return call if number is None else call._replace(structure=number)

    def put_as(
        self,
        take: Take,
        layer: str,
        kind: str,
        leaf: str,
        tensor: torch.Tensor,
        call: Call,
        backward: int = 0,
        key: tuple[object, ...] | None = None,
    ) -> None:
        """Stage one tensor, or a part of one, in a certain form, or note why it cannot be; under a key it may be known from then on."""
        if not self.is_active:
            return
        reason = why_not(tensor)
        apart, reason = (None, None) if reason is None else _apart_or_why(tensor, reason)
        if apart is not None:
            self._put_parts(take, layer, kind, leaf, apart, call, backward)
            return
        capture = self._put_slowly(take, layer, kind, leaf, tensor, call, backward, reason, take.stored.get(tensor.dtype, ""))
        if key is not None and self._is_whole(capture, tensor):
            assert capture.array is not None
            take.known[key] = capture.array

    def _put_parts(self, take: Take, layer: str, kind: str, leaf: str, apart: Apart, call: Call, backward: int) -> None:
        """Stage the parts of a tensor, each under its name behind the tensor's leaf path."""
        if apart.tensor != TENSOR:
            whole = self._stager.structures[call.structure]
            call = call._replace(structure=self.structure(encode_at(whole, leaf, apart.tensor)))
        for name, part in apart.parts:
            is_cast = name in ("", "values")  # the others say where values are or what they mean, and stay what they are
            dtype = (take.stored if is_cast else TORCH_DTYPES).get(part.dtype, "")
            path = f"{leaf}.{name}" if leaf and name else leaf or name
            of_part = call._replace(scale=math.nan) if _counts(part.dtype) else call  # where values are has no scale
            self._put_slowly(take, layer, kind, path, part, of_part, backward, why_not(part), dtype)

    def _put_slowly(
        self, take: Take, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int, reason: str | None, dtype: str
    ) -> Draft:
        """Stage a tensor of any shape from anywhere, or note the reason why it cannot be."""
        shape = () if reason else tuple(tensor.shape)
        capture = Draft(layer, kind, leaf, dtype, call.coordinates, call.number, backward, call.step, shape, time.time_ns() // 1000)
        capture.structure, capture.scale, capture.take = call.structure, call.scale, take
        try:
            if reason is not None:
                self.skip(capture, reason)
            else:
                with _outside_transforms():
                    self._stager.stage(capture, tensor.detach(), epoch_batches=self.clock.epoch_batches)
        except BaseException as error:
            self._failed(error, capture)
        return capture

    def let_go(self) -> list[str]:
        """Keep nothing of the recording alive, which is closed: hooks stay on tensors that the user keeps, and refer to this.

        Returns
        -------
        list of str
            What there is left to warn of.
        """
        self.is_active = False
        messages = [*self._stager.messages]
        self.on_raised = lambda _where, _reason: None
        self._stager = cast("Stager", _ClosedStager())
        self.clock.agenda.forget()
        self._scaler = None
        return messages

    def structure(self, text: str) -> int:
        """Return the number that a call carries for the structure of its value; 0, and a warning once, where there have been too many different ones."""
        number = self._stager.structure(text)
        if number is None:
            if ("structure", "") not in self._warned:
                self._warned.add(("structure", ""))
                warnings.warn(
                    f"values have been built in so many different ways that what more there are, from {text[:80]} on, are stored without their structure: "
                    "every tensor under its leaf path, to be read by .leaf()",
                    CaptureWarning,
                    stacklevel=2,
                )
            return 0
        return number

    def _is_whole(self, capture: Draft, tensor: torch.Tensor) -> bool:
        """Say whether what comes like this one is copied byte by byte within the host, as a whole chunk."""
        array = capture.array
        return (
            array is not None
            and array.spec.chunk_shape == capture.shape
            and type(tensor) in _PLAIN_TYPES
            and capture.dtype == TORCH_DTYPES[tensor.dtype]
            and not tensor.is_conj()
            and not tensor.is_neg()
            and self._stager.takes_whole(array, tensor)
        )

    def _failed(self, error: BaseException, capture: Draft) -> None:
        """Raise what went wrong in the training loop, or end capturing with a warning if that is what was asked for."""
        if not self.is_active and isinstance(error, RecorderClosedError):
            return  # close() has overtaken this capture
        where = capture.coordinates
        if isinstance(error, DiskBudgetSpent):
            self._stop(where, str(error))
            return
        if error is not self._stager.failure or not self._disable_on_failure:
            raise error
        self.is_active = False
        warnings.warn(
            f"hookstore stopped capturing at {capture.kind} of layer {capture.layer!r}, epoch {where.epoch}, batch {where.batch}: "
            f"the writer failed with {type(error).__name__}: {error}",
            CaptureWarning,
            stacklevel=2,
        )

    def _stop(self, where: Coordinates, reason: str) -> None:
        """End capturing because there is no more room on the disk that it may take."""
        if not self.is_active:
            return  # another thread did
        self.is_active = False
        with contextlib.suppress(BaseException):  # where the writer has failed meanwhile, there is no manifest to say it in
            self._stager.note(self._of_batch(where, "stopped", reason))
        warnings.warn(
            f"recording stopped in epoch {where.epoch}, batch {where.batch}: {reason}; training goes on without",
            CaptureWarning,
            stacklevel=2,
        )

    def skip(self, capture: Draft, reason: str, topic: str | None = None) -> None:
        """Note a gap, and warn about the first of its layer and kind, or of its topic, where it has one."""
        capture.status, capture.reason = "skipped", reason
        self._stager.note(capture)
        key = (capture.layer, capture.kind) if topic is None else (topic, "")
        if key not in self._warned:
            self._warned.add(key)
            where = capture.coordinates
            warnings.warn(
                f"{capture.kind} of layer {capture.layer!r} was not captured, first in epoch {where.epoch}, batch {where.batch}: {reason}",
                CaptureWarning,
                stacklevel=2,
            )

    def skip_layers(self, reasons: dict[str, str], kinds: Mapping[str, Sequence[str]], here: Coordinates, step: int) -> None:
        """Note gaps of whole layers in a batch, a row for each kind, and warn of all of them at once.

        Parameters
        ----------
        reasons : dict
            For each layer why it was not called.
        kinds : mapping
            What would have been captured of each layer.
        here : Coordinates
            The batch.
        step : int
            Optimizer steps done by then.
        """
        if not self.is_active:
            return
        now = time.time_ns() // 1000
        by_reason: dict[str, list[str]] = {}
        for layer, reason in reasons.items():
            by_reason.setdefault(reason, []).append(layer)
            for kind in kinds[layer]:
                capture = Draft(
                    layer, kind, "", "", here, 0, 0, step, (), now, status="skipped", reason=f"the layer was not called: {reason}"
                )
                try:
                    self._stager.note(capture)
                except BaseException as error:
                    self._failed(error, capture)
        told = [
            f"{', '.join(map(repr, layers[:5]))}{f' and {len(layers) - 5} more' if len(layers) > 5 else ''} ({reason})"
            for reason, layers in by_reason.items()
        ]
        warnings.warn(
            f"selected layers with 0 calls in {here.phase} epoch {here.epoch}, batch {here.batch}: {'; '.join(told)}",
            CaptureWarning,
            stacklevel=2,
        )

    def skip_batch(self, coordinates: Coordinates) -> None:
        """Note that a batch was left out to stay within the budget."""
        budget = self.clock.budget
        if not self.is_active or budget is None:
            return
        reason = f"recording it would have gone over max_slowdown={budget.max_slowdown}"
        capture = self._of_batch(coordinates, "skipped", reason)
        try:
            self._stager.note(capture)
        except BaseException as error:
            self._failed(error, capture)
        if budget.num_skipped == 1:
            warnings.warn(
                f"batches are being left out, first batch {coordinates.batch} of epoch {coordinates.epoch}: {reason} (the manifest lists every one)",
                CaptureWarning,
                stacklevel=2,
            )

    def skip_unforeseen(self, coordinates: Coordinates) -> None:
        """Note that a batch began inside a compiled graph that does not record, since nothing was due when it was called."""
        if not self.is_active:
            return
        reason = (
            "a compiled function called the root module for a batch that could not be foreseen when the function was called; "
            "say where training stands with recorder.batches() or recorder.at()"
        )
        capture = self._of_batch(coordinates, "skipped", reason)
        try:
            self.skip(capture, reason)
        except BaseException as error:
            self._failed(error, capture)

    def mark_partial(self, reason: str) -> None:
        """Mark the batches that are under way as cut short; says nothing where the writer has failed."""
        if self.is_active:
            with contextlib.suppress(BaseException):
                for here in self.clock.under_way:
                    self._stager.note(self._of_batch(here, "partial", reason))

    def cut_short(self, here: Coordinates, reason: str) -> None:
        """Mark a batch of which a forward was broken off while training goes on."""
        if self.is_active and here is not self._cut_short:
            self._cut_short = here
            try:
                self.on_raised(here, reason)
                self._stager.note(self._of_batch(here, "partial", f"{reason}; captures of this batch may be missing"))
            except BaseException as error:
                if error is not self._stager.failure:  # that is on its way already, or comes with the next capture
                    raise

    def _of_batch(self, coordinates: Coordinates, status: str, reason: str) -> Draft:
        """Make what stands for a whole batch in the manifest."""
        now = time.time_ns() // 1000
        return Draft("", "", "", "", coordinates, 0, 0, self.clock.step, (), now, status=status, reason=reason)

    def skip_other(self, layer: str, kind: str, call: Call, other: Other) -> None:
        """Note that something inside a value is not stored, and warn about the first of its type, unless that is a text, a number or the like."""
        if not self.is_active:
            return
        now = time.time_ns() // 1000
        capture = Draft(
            layer, kind, other.leaf, "", call.coordinates, call.number, 0, call.step, (), now, status="skipped", reason=other.reason
        )
        capture.structure = call.structure
        try:
            self._stager.note(capture)
        except BaseException as error:
            self._failed(error, capture)
            return
        if not other.is_trifle and (kind, other.type) not in self._warned:
            self._warned.add((kind, other.type))
            where = f"leaf {other.leaf!r} of the {kind}" if other.leaf else f"the {kind}"
            warnings.warn(
                f"{where} of layer {layer!r} is not stored: {other.reason} (said once; the manifest has a row for each layer)",
                CaptureWarning,
                stacklevel=2,
            )

    def skip_value(
        self,
        layer: str,
        kind: str,
        call: Call,
        reason: str,
        *,
        leaf: str = "",
        backward: int = 0,
        topic: str | None = None,
        take: Take = WHOLE,
    ) -> None:
        """Note that a value, or one leaf of it, could not be captured; of all gaps with one topic only the first is warned about."""
        if not self.is_active:
            return
        capture = Draft(layer, kind, leaf, "", call.coordinates, call.number, backward, call.step, (), time.time_ns() // 1000)
        capture.structure, capture.take = call.structure, take
        try:
            self.skip(capture, reason, topic)
        except BaseException as error:
            self._failed(error, capture)


class _ClosedStager:
    """Stands in for a stager that is no more, for a thread that was about to capture something."""

    failure: BaseException | None = None
    messages = ()
    is_spent = False
    structures: ClassVar[defaultdict[int, str]] = defaultdict(str)

    def structure(self, text: str, whole_shape: str = "") -> int:  # noqa: ARG002
        """Return a number for anything."""
        return 0

    def __getattr__(self, name: str) -> Any:
        raise RecorderClosedError("the recorder is closed")


def _counts(dtype: torch.dtype) -> bool:
    """Say whether a dtype is of whole numbers, which no scale multiplies: indices of a sparse gradient, say."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _scale_of(scaler: torch.amp.GradScaler) -> float | torch.Tensor:
    """Return the scale of the loss now: as a number where that costs nothing, as a tensor of its own device otherwise."""
    scale = scaler._scale if scaler.is_enabled() else None
    if scale is None:  # no loss has been scaled yet
        return math.nan
    return float(scale) if scale.is_cpu else scale


def _outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """Leave a function transform (vmap, grad, …) that is under way: it would wrap what we make of a plain tensor, which has nothing to do with it."""
    if _transform() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep modes that are set around the user's forward from seeing what we do, and autograd from following it."""
    with torch.no_grad(), unseen():
        yield


def why_not(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no bytes that could be stored, or return ``None``."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor):
        return "it is a functorch tensor (vmap, grad or jvp), which stands for many values"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, not strided"
    if tensor.is_nested:
        return "it is a nested tensor"
    if tensor.dtype not in TORCH_DTYPES:
        return f"its dtype {tensor.dtype} is not stored"
    if tensor.dim() > _MOST_DIMS:
        return f"it has {tensor.dim()} dimensions; with those of epoch, batch and call an array has at most 64"
    if type(tensor) not in _PLAIN_TYPES and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"it is a {type(tensor).__name__}, a tensor subclass whose values only its own code knows"
    return None


def _apart_or_why(tensor: torch.Tensor, reason: str) -> tuple[Apart | None, str]:
    """Return a tensor taken apart, or why it can be stored neither whole nor so."""
    try:
        return take_apart(tensor), reason
    except Exception as error:  # a kind of tensor that we do not know well is no reason to stop training
        return None, f"{reason}, and taking it apart raises {type(error).__name__}: {error}"
