"""Gradients of what a module returned: tensor hooks, set when it returns."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.layout import Call
from hookstore.sink import Sink, why_not

_graph_task = torch._C._current_graph_task_id
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Backwards:
    """Counts the backwards over one call of a layer, so that all gradients of one backward have the same number, whichever of them arrive.

    Parameters
    ----------
    first : int
        Number of the first one.
    """

    __slots__ = ("_first", "_numbers")

    def __init__(self, first: int) -> None:
        self._first = first
        self._numbers: dict[int, int] = {}  # by autograd's own number for a backward

    def number(self, task: int) -> int:
        """Return the number of a backward."""
        return self._numbers.setdefault(task, self._first + len(self._numbers))


class Arrivals:
    """Takes the gradients of one leaf of one call as they arrive, one backward after another.

    Parameters
    ----------
    sink : Sink
        Where gradients go.
    layer, kind, leaf : str
        What they are.
    call : Call
        The call that they are filed under.
    backward : int or Backwards
        Number of the first one: above 0 where backwards over the same forward have been before, over another recomputation of it. Or what counts them, where
        other gradients belong to the same call.
    """

    __slots__ = ("_backward", "_call", "_kind", "_layer", "_leaf", "_sink")

    def __init__(self, sink: Sink, layer: str, kind: str, leaf: str, call: Call, backward: int | Backwards = 0) -> None:
        self._sink = sink
        self._layer = layer
        self._kind = kind
        self._leaf = leaf
        self._call = call
        self._backward = backward

    def put(self, gradient: torch.Tensor, task: int | None = None) -> None:
        """Capture one, of the present backward if no other is named."""
        backward = self._backward
        if isinstance(backward, int):
            self._backward = backward + 1
        else:
            backward = backward.number(_graph_task() if task is None else task)
        budget = self._sink.clock.budget
        if budget is None:
            self._sink.put(self._layer, self._kind, self._leaf, gradient, self._call, backward)
        else:
            with budget.measured():
                self._sink.put(self._layer, self._kind, self._leaf, gradient, self._call, backward)

    def skip(self, reason: str) -> None:
        """Note that one arrived and cannot be captured."""
        backward = self._backward
        if isinstance(backward, Backwards):
            backward = backward.number(_graph_task())
        else:
            self._backward = backward + 1
        self._sink.skip_value(self._layer, self._kind, self._call, reason, leaf=self._leaf, backward=backward)


class GradientWatch(Arrivals):
    """Tensor hooks that capture the gradient of one output of one call.

    An output that is a view needs care: once it is edited in place, a hook on it is lost, or sees a part of the gradient. If its base was made inside the
    call, the base has a hook too, and the gradient of the base, looked at as the view, is taken when the view has been edited (and only then: the
    base may have other uses). Where the base's gradient is not the output's own, since the base comes from outside the call, is shared with another output
    or has its elements in the view more than once, an edit is a gap with its reason.

    Parameters
    ----------
    sink, layer, kind, leaf, call, backward
        As in `Arrivals`.
    output : torch.Tensor
        Requires grad; referred to weakly.
    """

    __slots__ = ("_base_view", "_handles", "_target", "_version", "coordinates")

    __torch_unserializable__ = True  # a tensor with this hook can be saved; the hook is left out without a warning

    def __init__(
        self, sink: Sink, layer: str, kind: str, leaf: str, output: torch.Tensor, call: Call, backward: int | Backwards = 0
    ) -> None:
        self._sink = sink  # (what super().__init__ would do, which costs a twentieth of the whole)
        self._layer = layer
        self._kind = kind
        self._leaf = leaf
        self._call = call
        self._backward = backward
        self.coordinates = call.coordinates
        self._target = weakref.ref(output)
        self._version: Version | None = None
        self._base_view: View | None = None
        base = output._base
        if base is not None:
            output.grad_fn  # noqa: B018  # of a view that was edited through another one it is made only now, without which torch crashes (pytorch#196459)
        self._handles = [output.register_hook(self)]
        if base is not None and not base.is_leaf:  # autograd allows no edits of a view of a leaf; that the optimizer edits the leaf is none
            self._version = Version(output)
            if base.grad_fn is not None and base.grad_fn._sequence_nr() >= call.sequence_nr:
                self._base_view = View.of(output, base)
            self._handles.append(base.register_hook(self._of_base))

    @property
    def trusts_base(self) -> bool:
        """Whether the gradient of the base would be taken for the output's."""
        return self._base_view is not None

    def distrust_base(self) -> None:
        """Take nothing from the base: another output of the call comes from it too, so that its gradient is not this output's alone."""
        self._base_view = None

    def forget_any(self, outputs: dict[int, torch.Tensor]) -> None:
        """Remove the hooks if they sit on a tensor that outlives its batch, and so would collect them: a leaf, or one of those outputs (by identity)."""
        target = self._target()
        if target is not None and (target.is_leaf or outputs.get(id(target)) is target):
            for handle in self._handles:
                handle.remove()

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output."""
        if gradient is None:  # so it is called under another tool's full backward hook when no gradient arrives
            return
        with torch._C.DisableTorchFunction():
            if self._version is None or self._version.is_unchanged:
                self.put(gradient)

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        """Take the gradient of the output from its base's, which comes after the output's own where there is one."""
        if gradient is None or self._version is None or self._version.is_unchanged:
            return
        with torch._C.DisableTorchFunction():
            if self._base_view is None:
                self.skip("the output is a view that was edited in place, and the gradient of its base is not its own alone")
            elif not _is_plain(gradient):
                self.skip(
                    "the output is a view that was edited in place, and the gradient of its base cannot be looked at as that of a view"
                )
            else:
                self.put(self._base_view.look_at(gradient if self._sink.is_live else gradient.detach()))


def distrust_shared_bases(watched: Sequence[tuple[torch.Tensor, GradientWatch]]) -> None:
    """Have nothing taken from a base that several outputs of a call are views of, or that another one was computed from."""
    bases = Counter(id(output if output._base is None else output._base) for output, _ in watched)
    for output, watch in watched:
        base = output._base
        if base is not None and watch.trusts_base:
            roots = [other.grad_fn for other, _ in watched if other is not output]
            if bases[id(base)] > 1 or _is_reached(base.grad_fn, roots, around=output.grad_fn):
                watch.distrust_base()


def _is_reached(target: Any, roots: Iterable[Any], *, around: Any) -> bool:
    """Say whether a node of the graph is reached from others without going through a certain one."""
    first_nr = target._sequence_nr()
    todo = list(roots)
    seen = {around, None}
    while todo:
        node = todo.pop()
        if node is target:
            return True
        if node not in seen:
            seen.add(node)
            if node._sequence_nr() > first_nr:  # what was made before the target does not lead to it
                todo.extend(following for following, _ in node.next_functions)
    return False


class Version:
    """Tells whether a tensor has been edited in place, without keeping its memory."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = tensor.detach()  # shares the version counter, …
        self._counter.data = _nothing(tensor.device, tensor.layout, tensor.is_nested)  # … and from now on nothing else
        self._version = tensor._version

    @property
    def is_unchanged(self) -> bool:
        """Whether no in-place operation has touched the tensor, its base or another view of it."""
        return self._counter._version == self._version


@functools.cache
def _nothing(device: torch.device, layout: torch.layout, is_nested: bool) -> torch.Tensor:  # noqa: FBT001
    with torch.inference_mode(mode=False), _disable_current_modes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says of some of these kinds that they are new
        if is_nested and layout == torch.strided:
            return torch.nested.nested_tensor([], device=device)
        if layout in _COMPRESSED:  # of one class, whichever of them it is
            return torch.empty((0, 0), layout=torch.sparse_csr, device=device)
        return torch.empty(0, layout=torch.sparse_coo if layout == torch.sparse_coo else torch.strided, device=device)


class View(NamedTuple):
    """How a view lies in its base: enough to look at the gradient of the base as at that of the view."""

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, view: torch.Tensor, base: torch.Tensor) -> View | None:
        """Describe a view, or return ``None`` where the base's gradient does not tell the view's."""
        if not _is_plain(base) or base.dtype != view.dtype or not _is_injective(view):
            return None
        offset = int(view.storage_offset()) - int(base.storage_offset())
        lazy = (base.is_conj() != view.is_conj(), base.is_neg() != view.is_neg())
        return cls(base.size(), base.stride(), view.size(), view.stride(), offset, *lazy)

    def look_at(self, gradient: torch.Tensor) -> torch.Tensor:
        """Look at the gradient of the base as at the gradient of the view."""
        if gradient.stride() != self.base_stride:
            laid_out = torch.empty_strided(self.base_size, self.base_stride, dtype=gradient.dtype, device=gradient.device)
            gradient = laid_out.copy_(gradient)
        view = gradient.as_strided(self.size, self.stride, int(gradient.storage_offset()) + self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is one block of numbers, of which views can be told from strides; what the compiler traces stands for such."""
    if type(tensor).__module__.startswith("torch._subclasses."):
        return tensor.layout == torch.strided and not tensor.is_nested
    return why_not(tensor) is None


def _is_injective(view: torch.Tensor) -> bool:
    """Say whether no two elements of a view are the same element of its base."""
    end = 0
    for stride, size in sorted((stride, size) for stride, size in zip(view.stride(), view.shape, strict=True) if size > 1):
        if stride <= end:
            return False
        end += stride * (size - 1)
    return True
