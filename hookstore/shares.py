"""A module's own share of the gradient of each of its inputs.

A hook on an input would give the sum of what all its users contribute. So the inputs' places in autograd's graph are noted before the call; after it the
graph is walked from the outputs, and each node that was made in the call and hands a gradient to such a place gets a hook. What these hooks see in one
backward is added up in the order in which it comes, which is what autograd itself does: the result is that of a full backward hook, to the bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.layout import Call
from hookstore.sink import Sink, why_not
from hookstore.watch import Arrivals, Backwards, GradientWatch, Version, View

_NOTHING = contextlib.nullcontext()
_is_functorch = torch._C._functorch.is_functorch_wrapped_tensor
_graph_task, _num_modes = torch._C._current_graph_task_id, torch._C._len_torch_dispatch_stack


class Input:
    """One input of a call that is under way, as it was before the call.

    Parameters
    ----------
    leaf : str
        Its leaf path.
    tensor : torch.Tensor
        Requires grad.
    """

    __slots__ = ("base", "base_node", "base_number", "base_view", "leaf", "node", "number", "tensor")

    def __init__(self, leaf: str, tensor: torch.Tensor) -> None:
        self.leaf = leaf
        self.tensor = tensor
        self.node = tensor.grad_fn or _accumulator(tensor)
        self.number = tensor.output_nr
        base = tensor._base
        self.base = tensor if base is None else base
        self.base_node = None if base is None else base.grad_fn
        self.base_number = self.base.output_nr
        self.base_view = None if base is None or self.base_node is None else View.of(tensor, base)

    @property
    def is_passed_on(self) -> bool:
        """Whether the tensor stands where it stood: the call has not edited it."""
        return self.tensor.is_leaf or self.tensor.grad_fn is self.node


def note_inputs(leaves: Iterable[tuple[str, torch.Tensor]]) -> list[Input]:
    """Note the inputs that a call begins with and that require grad; without those of function transforms, which stand for many values."""
    with _disable_current_modes() if _num_modes() else _NOTHING:
        return [Input(leaf, tensor) for leaf, tensor in leaves if not _is_functorch(tensor)]


def _accumulator(leaf: torch.Tensor) -> Any:
    """Return the node that accumulates the gradient of a leaf."""
    view = leaf.view_as(leaf).grad_fn
    assert view is not None
    return view.next_functions[0][0]


class ShareWatch(Arrivals):
    """Adds up what the nodes of one call hand to one of its inputs.

    An output that is a view of the input needs care: if it is edited in place later, autograd goes around the call's own nodes. Then what arrives is a gap.
    """

    __slots__ = ("_handle", "_num_nodes", "_sums", "_target", "_version", "coordinates")

    def __init__(self, sink: Sink, layer: str, leaf: str, call: Call, backward: Backwards) -> None:
        super().__init__(sink, layer, "input_gradient", leaf, call, backward)
        self.coordinates = call.coordinates
        self._num_nodes = 0
        self._sums: dict[int, _Sum] = {}  # of the backwards that are under way
        self._version: Version | None = None
        self._target: weakref.ref[torch.Tensor] | None = None
        self._handle: Any = None

    @property
    def is_live(self) -> bool:
        """Whether the share is wanted with the graph behind it."""
        return self._sink.is_live

    def expect_node(self) -> None:
        """Count one more node."""
        self._num_nodes += 1

    def guard(self, output: torch.Tensor, base: torch.Tensor) -> None:
        """Look out for edits of an output that is a view of the same base as the input."""
        self._version = Version(output)
        self._target = weakref.ref(base)
        self._handle = base.register_hook(self._of_base)

    def forget_any(self, outputs: dict[int, torch.Tensor]) -> None:
        """Take the hook off a tensor that outlives its batch."""
        target = None if self._target is None else self._target()
        if target is not None and any(output is target or output._base is target for output in outputs.values()):
            self._handle.remove()

    def add(self, contributions: Sequence[torch.Tensor]) -> None:
        """Take what one node hands over; the share is captured when all nodes have been there, or the backward ends."""
        if self._version is not None and not self._version.is_unchanged:
            return  # the base's hook tells
        if self._num_nodes == 1 and len(contributions) <= 1:  # as nearly always
            if contributions:
                self.put(contributions[0])
            return
        task = _graph_task()
        if task not in self._sums:
            self._sums[task] = _Sum(is_live=self._sink.is_live)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        current = self._sums[task]
        current.num_nodes += 1
        for contribution in contributions:
            current.add(contribution)
        if current.num_nodes == self._num_nodes:
            self._end(task)

    def _end(self, task: int) -> None:
        current = self._sums.pop(task, None)
        if current is not None and current.total is not None:
            with torch._C.DisableTorchFunction():
                self.put(current.total, task)

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self._version is not None and not self._version.is_unchanged:
            with torch._C.DisableTorchFunction():
                self.skip("an output is a view of the input and was edited in place, so that the module's own share cannot be told apart")


class _Sum:
    """What has come in one backward."""

    __slots__ = ("is_live", "num_nodes", "total")

    def __init__(self, *, is_live: bool) -> None:
        self.is_live = is_live
        self.num_nodes = 0
        self.total: torch.Tensor | None = None

    def add(self, contribution: torch.Tensor) -> None:
        with _disable_current_modes() if _num_modes() else _NOTHING:
            if not self.is_live:
                contribution = contribution.detach()
            if self.total is None:
                self.total = (
                    contribution if self.is_live else contribution.clone()
                )  # autograd may go on to add in place to what nobody else has
            elif self.total.layout != torch.strided:
                self.total = contribution + self.total
            else:
                self.total = self.total + contribution


class _NodeHook:
    """Hook on one node of the graph: hands what the node computes to those who wait for it."""

    __slots__ = ("_takers",)

    def __init__(self, takers: dict[ShareWatch, list[tuple[int, View | None]]]) -> None:
        self._takers = takers

    def __call__(self, gradients: Sequence[torch.Tensor | None], _of_outputs: Sequence[torch.Tensor | None]) -> None:
        with torch._C.DisableTorchFunction():
            for watch, places in self._takers.items():
                is_live = watch.is_live
                watch.add(
                    [_looked_at(gradient, view, is_live) for position, view in places if (gradient := gradients[position]) is not None]
                )


def _looked_at(gradient: torch.Tensor, view: View | None, is_live: bool) -> torch.Tensor:  # noqa: FBT001
    if view is None or why_not(gradient) is not None:
        return gradient
    return view.look_at(gradient if is_live else gradient.detach())


def watch_inputs(
    sink: Sink, layer: str, inputs: Sequence[Input], outputs: Sequence[tuple[str, torch.Tensor]], call: Call, backward: Backwards
) -> Iterator[GradientWatch | ShareWatch]:
    """Have a call's share in the gradients of its inputs captured when it arrives.

    Parameters
    ----------
    sink : Sink
        Where it goes.
    layer : str
        Whose call it is.
    inputs : sequence of Input
        Noted before the call.
    outputs : sequence of (str, torch.Tensor)
        What it returned.
    call : Call
        The call.
    backward : Backwards
        Counts the backwards.

    Yields
    ------
    GradientWatch or ShareWatch
        Those with hooks on tensors, which may outlive their batch.
    """
    returned = [output for _, output in outputs if output.requires_grad and not _is_functorch(output)]
    identities = {id(output) for output in returned}
    watches: dict[int, ShareWatch] = {}
    for position, noted in enumerate(inputs):
        if id(noted.tensor) in identities and noted.is_passed_on:
            yield GradientWatch(sink, layer, "input_gradient", noted.leaf, noted.tensor, call, backward)
            continue
        watches[position] = watch = ShareWatch(sink, layer, noted.leaf, call, backward)
        view = next((output for output in returned if output._base is noted.base), None)
        if view is not None and not noted.base.is_leaf and noted.is_passed_on:
            watch.guard(view, noted.base)
            yield watch
    if watches:
        _hook_nodes(inputs, watches, [output.grad_fn for output in returned], call.sequence_nr)


class _Wanted(NamedTuple):
    """Who waits for what a node hands to one output of another."""

    number: int
    watch: ShareWatch
    view: View | None  # where what comes is the gradient of the input's base


def _wanted(inputs: Sequence[Input], watches: dict[int, ShareWatch]) -> tuple[dict[int, list[_Wanted]], dict[int, Any]]:
    """Return who waits for what comes to each node of an input, and all these nodes by their identities, which they keep."""
    wanted: dict[int, list[_Wanted]] = {}
    nodes: dict[int, Any] = {}
    for position, noted in enumerate(inputs):
        nodes[id(noted.node)] = noted.node
        if position in watches:
            wanted.setdefault(id(noted.node), []).append(_Wanted(noted.number, watches[position], None))
            if noted.base_view is not None:
                nodes[id(noted.base_node)] = noted.base_node
                wanted.setdefault(id(noted.base_node), []).append(_Wanted(noted.base_number, watches[position], noted.base_view))
    return wanted, nodes


def _hook_nodes(inputs: Sequence[Input], watches: dict[int, ShareWatch], roots: Iterable[Any], first_nr: int) -> None:
    """Put hooks on the nodes made since a sequence number, between the roots and the inputs, that hand a gradient to an input."""
    wanted, seen = _wanted(inputs, watches)  # (seen: what is behind the inputs was made before the call)
    begun = {id(root): root for root in roots if root is not None and id(root) not in seen and root._sequence_nr() >= first_nr}
    seen.update(begun)
    todo = list(begun.values())
    while todo:
        node = todo.pop()
        edges = node.next_functions
        for target, _ in edges:
            if target is not None and id(target) not in seen:
                seen[id(target)] = target
                if target._sequence_nr() >= first_nr:
                    todo.append(target)
        takers: dict[ShareWatch, list[tuple[int, View | None]]] = {}
        for position, (target, number) in enumerate(edges):
            for want in wanted.get(id(target), ()):
                if want.number == number and (want.view is None or _edits_view(node, position)):
                    takers.setdefault(want.watch, []).append((position, want.view))
        if takers:
            for watch in takers:
                watch.expect_node()
            node.register_hook(_NodeHook(takers))


def _edits_view(node: Any, position: int) -> bool:
    """Say whether a node stands for an edit of a view, and hands on the gradient of the view's base there."""
    return position == 0 and type(node).__name__ == "CopySlices"
