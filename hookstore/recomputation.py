"""Which call of the first pass a call during recomputation repeats (reentrant activation checkpointing).

Such checkpointing is a custom autograd function: its forward runs the layers without grad, its backward runs them again with grad and goes backward through
what it gets. So what the layers return is taken from the first pass, and their gradients from the second. Both passes have the function's context as an
argument, and there the calls of a layer are kept in order: the third call in the second pass repeats the third of the first.

The other kind of checkpointing (``use_reentrant=False``) keeps the graph of the first pass, and needs nothing of this.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import torch
from torch.autograd.function import FunctionCtx
from torch.utils import checkpoint

from hookstore.layout import Call

_graph_task = torch._C._current_graph_task_id
_CONTEXT_NAMES = frozenset(("ctx", "context", "_ctx"))


class Repeated(NamedTuple):
    """A call of the first pass.

    Attributes
    ----------
    call : Call
        The call.
    backward : int
        How many backwards over it have been.
    """

    call: Call
    backward: int


class _Passes:
    """What is known of the passes over the layers under one context of a custom autograd function."""

    __slots__ = ("calls", "made_in", "num_repeats", "positions", "repeated_in")

    def __init__(self, task: int) -> None:
        self.made_in = task  # the backward in which the first pass runs; -1 for none
        self.calls: dict[object, list[Repeated | None]] = {}  # for each layer the calls of the first pass, in order
        self.repeated_in = -1
        self.num_repeats = 0
        self.positions: dict[object, int] = {}  # how many of them the present repeat has come by

    def next(self, layer: object, task: int) -> Repeated | None:
        """Return the call that the next one in this backward repeats."""
        if task != self.repeated_in:
            self.num_repeats += self.repeated_in != -1
            self.repeated_in = task
            self.positions = {}
        position = self.positions.get(layer, 0)
        self.positions[layer] = position + 1
        calls = self.calls.get(layer, [])
        found = calls[position] if position < len(calls) else None
        return None if found is None else Repeated(found.call, found.backward + self.num_repeats)


_passes: weakref.WeakKeyDictionary[FunctionCtx, _Passes] = weakref.WeakKeyDictionary()


def remember(layer: object, call: Call) -> None:
    """Note a call that ran without grad with every custom autograd function around it.

    Parameters
    ----------
    layer : object
        Whose call it is, compared by identity.
    call : Call
        The call.
    """
    for context in _contexts(sys._getframe(1)):
        _note(context, layer, Repeated(call, 0), -1)


def recall(layer: object) -> Repeated | None:
    """Return the call that one which has just ended during a backward repeats, or ``None`` if it repeats none."""
    task = _graph_task()
    first_passes = []
    found = None
    for context in _contexts(sys._getframe(1)):
        passes = _passes.get(context)
        if passes is not None and passes.made_in != task:
            found = passes.next(layer, task)
            break
        first_passes.append(context)  # of a function that is itself inside one that is being repeated
    for context in first_passes:
        _note(context, layer, found, task)
    return found


def is_without_graph() -> bool:
    """Say whether a custom autograd function runs what calls this, without grad for inputs that require it: a backward will run it again."""
    return any(any(getattr(context, "needs_input_grad", ())) for context in _contexts(sys._getframe(1)))


def _note(context: FunctionCtx, layer: object, repeated: Repeated | None, task: int) -> None:
    passes = _passes.get(context)
    if passes is None:
        passes = _passes.setdefault(context, _Passes(task))
    passes.calls.setdefault(layer, []).append(repeated)


def _contexts(frame: FrameType | None) -> Iterator[FunctionCtx]:
    """Yield the contexts of the custom autograd functions that this thread is in, innermost first, as far as one pass goes."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "unpack_hook" and code.co_filename == checkpoint.__file__:
            return  # the other kind of checkpointing computes something again
        names = code.co_varnames
        if names and names[0] in _CONTEXT_NAMES:
            context = frame.f_locals.get(names[0])
            if isinstance(context, FunctionCtx):
                yield context
        frame = frame.f_back
