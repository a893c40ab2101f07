"""Where the tensors of a tap are: those of the last forward, as they are, until the next one begins.

What is kept belongs to the tap alone. The hooks know it weakly, so that a tap nobody has any more keeps nothing alive.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from hookstore.agenda import WHOLE, Take
from hookstore.clock import Clock, Coordinates
from hookstore.device import unseen
from hookstore.layout import Call
from hookstore.nested import Other
from hookstore.recomputation import is_without_graph

_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_functorch, _is_legacy = torch._C._functorch.is_functorch_wrapped_tensor, torch._C._functorch.is_legacy_batchedtensor
_WITHOUT_GRAPH = (
    "a custom autograd function, such as reentrant activation checkpointing, runs it without a graph, so that no loss on it would train what is before; "
    "checkpoint with use_reentrant=False, or tap with detach=True"
)


class Value:
    """What there is of one kind of one call of a layer.

    Attributes
    ----------
    structure : str
        Text of how the value is built.
    backwards : dict
        For each backward, or 0, the tensors by their leaf paths.
    gaps : dict
        For leaf paths the reason why there is none.
    """

    __slots__ = ("backwards", "gaps", "structure")

    def __init__(self) -> None:
        self.structure = ""
        self.backwards: dict[int, dict[str, torch.Tensor]] = {}
        self.gaps: dict[str, str] = {}


class Kept:
    """The tensors of one forward, and of the backwards over it.

    Attributes
    ----------
    values : dict
        By layer, kind and number of the call.
    broken : str
        Why a call was broken off; empty for none.

    Parameters
    ----------
    clock : Clock
        Says which forward is the last.
    """

    def __init__(self, clock: Clock) -> None:
        self.values: dict[tuple[str, str, int], Value] = {}
        self.broken = ""
        self._structures: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._clock = clock
        self._lock = threading.Lock()  # gradients come on threads of their own, one for each device

    def empty(self) -> None:
        """Let go of everything."""
        with self._lock:
            before, self.values = self.values, {}  # (what dies with the tensors may run code of others, outside the lock)
            self.broken = ""
            self._structures, self._numbers = [""], {"": 0}
        before.clear()

    def number(self, text: str) -> int:
        """Return the number of a structure, in this forward."""
        with self._lock:
            number = self._numbers.setdefault(text, len(self._structures))
            if number == len(self._structures):
                self._structures.append(text)
            return number

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int) -> None:
        """Keep a tensor, if its call is of the last forward."""
        with self._lock:
            value = self._value(layer, kind, call)
            if value is not None:
                value.backwards.setdefault(backward, {})[leaf] = tensor

    def skip(self, layer: str, kind: str, leaf: str, reason: str, call: Call) -> None:
        """Keep the reason why there is no tensor, if its call is of the last forward."""
        with self._lock:
            value = self._value(layer, kind, call)
            if value is not None:
                value.gaps.setdefault(leaf, reason)

    def _value(self, layer: str, kind: str, call: Call) -> Value | None:
        if call.coordinates is not self._clock.here():  # (asked inside the lock: another thread may have begun the next forward)
            return None
        value = self.values.setdefault((layer, kind, call.number), Value())
        value.structure = self._structures[call.structure]
        return value


class LiveSink:
    """Takes tensors from the hooks and keeps them as they are.

    Parameters
    ----------
    kept : Kept
        Where they go; referred to weakly.
    clock : Clock
        Counts forwards.
    detach, clone : bool
        Whether they are kept without the graph, and as copies.
    """

    def __init__(self, kept: Kept, clock: Clock, *, detach: bool, clone: bool) -> None:
        self.is_active = True
        self.is_live = True
        self.scaler: torch.amp.GradScaler | None = None
        self.clock = clock
        self._kept = weakref.ref(kept)
        self._detach = detach
        self._clone = clone

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int = 0) -> None:
        """Keep one tensor, or the part that is wanted, or note why it cannot be."""
        kept = self._kept() if self.is_active else None
        if kept is None or call.due is None or kind not in call.due.takes:
            return
        take = call.due.takes[kind][0]
        reason = self._why_not(kind, tensor)
        if not reason and (self._detach or self._clone or take.portion is not None):
            try:
                tensor = self._in_form(tensor, take)
            except Exception as error:  # the user's own function, or a tensor without that axis, is no reason to stop training
                reason = (
                    str(error)
                    if isinstance(error, IndexError) and take.portion is not None and take.portion.function is None
                    else f"{'copying it' if take.portion is None else 'select'} raised {type(error).__name__}: {error}"
                )
        if reason:
            kept.skip(layer, kind, leaf, reason, call)
        else:
            kept.put(layer, kind, leaf, tensor, call, backward)

    def _why_not(self, kind: str, tensor: torch.Tensor) -> str:
        """Say why a tensor is of no use, or return the empty text."""
        if _is_functorch(tensor) or _is_legacy(tensor):
            return "it is a functorch tensor (vmap, grad or jvp), which stands for many values and dies with the transform"
        if (
            not self._detach
            and kind in ("activation", "input")
            and not torch.is_grad_enabled()
            and not tensor.requires_grad
            and (tensor.is_floating_point() or tensor.is_complex())
            and is_without_graph()
        ):
            return _WITHOUT_GRAPH
        return ""

    def _in_form(self, tensor: torch.Tensor, take: Take) -> torch.Tensor:
        """Return what is kept of a tensor; neither the user's modes nor a checkpoint that counts what is saved for backward see how that comes about."""
        with unseen(), _saved_apart():
            if self._detach:
                tensor = tensor.detach()
            if take.portion is not None:
                part = take.portion.of(tensor) if take.portion.function is None else take.portion.call(tensor)
                tensor = part.detach() if self._detach else part
            return tensor.clone() if self._clone else tensor

    def structure(self, text: str) -> int:
        """Return the number that a call carries for the structure of its value."""
        kept = self._kept()
        return 0 if kept is None else kept.number(text)

    def skip_value(
        self,
        layer: str,
        kind: str,
        call: Call,
        reason: str,
        *,
        leaf: str = "",
        backward: int = 0,  # noqa: ARG002
        topic: str | None = None,  # noqa: ARG002
        take: Take = WHOLE,  # noqa: ARG002
    ) -> None:
        """Note why there is no value, or no tensor at one leaf of it."""
        kept = self._kept() if self.is_active else None
        if kept is not None:
            kept.skip(layer, kind, leaf, reason, call)

    def skip_other(self, layer: str, kind: str, call: Call, other: Other) -> None:
        """Do nothing: the structure of the value says what there was."""

    def skip_layers(self, reasons: dict[str, str], kinds: Mapping[str, Sequence[str]], here: Coordinates, step: int) -> None:
        """Do nothing: who asks for such a layer is told."""

    def skip_unforeseen(self, coordinates: Coordinates) -> None:
        """Do nothing: layers in compiled graphs are refused."""

    def tell(self) -> None:
        """No other thread finds anything."""

    def cut_short(self, here: Coordinates, reason: str) -> None:
        """Note that a forward was broken off."""
        kept = self._kept()
        if kept is not None and here is self.clock.here():
            kept.broken = reason

    def empty(self) -> None:
        """Let go of the last forward."""
        kept = self._kept()
        if kept is not None:
            kept.empty()


def _saved_apart() -> contextlib.AbstractContextManager[None]:
    """Keep what our own operations save for backward from hooks that are around the user's: a checkpoint expects to see the same when it computes again."""
    if _saved_hooks(False) is None:  # noqa: FBT003  # as torch has it
        return contextlib.nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        torch.Tensor.detach, lambda saved: saved
    )  # (itself would be a cycle with its own graph)
    return cast("contextlib.AbstractContextManager[None]", hooks)
