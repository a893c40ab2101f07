"""One forward on trial: which tensors it shows to hooks, of which shape, and in which form they would be stored. Nothing is copied."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.agenda import Due, LayerDue, Take
from hookstore.capture import TORCH_DTYPES
from hookstore.nested import flatten, flatten_arguments
from hookstore.parts import take_apart
from hookstore.recomputation import is_without_graph
from hookstore.restored import restored
from hookstore.selection import Layer
from hookstore.sink import why_not
from hookstore.wrappers import own_parameters

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
_OF_VALUES = ("activation", "input", "parameter")


class Sighting(NamedTuple):
    """One tensor that would be captured.

    Attributes
    ----------
    layer, kind, leaf : str
        What it is.
    take : Take
        In which form it is taken.
    dtype : str
        As which it is stored.
    shape : tuple of int
        Of what is kept of it.
    call : int
        In which call of the layer.
    num_characters : int
        Length of the structure text in its row.
    """

    layer: str
    kind: str
    leaf: str
    take: Take
    dtype: str
    shape: tuple[int, ...]
    call: int
    num_characters: int


@dataclass(slots=True)
class Rehearsal:
    """What one forward has shown.

    Attributes
    ----------
    sightings : list of Sighting
        In the order in which they came.
    obstacles : dict
        For each layer, kind and leaf of which something would be a gap: why.
    called : dict
        How often each layer was called.
    nodes : list
        For each sighting the nodes of the graph by which a gradient would come to it: none of them for one that needs no gradient.
    ends : dict
        For calls of layers, the nodes by which a gradient would come to what they returned, where there is no other way for it.
    repeated : set of str
        Layers that ran without a graph where a backward will run them again, see `hookstore.recomputation`.
    """

    sightings: list[Sighting] = field(default_factory=list)
    obstacles: dict[tuple[str, str, str], str] = field(default_factory=dict)
    called: dict[str, int] = field(default_factory=dict)
    nodes: list[frozenset[Any]] = field(default_factory=list)
    ends: dict[tuple[str, int], frozenset[Any]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)

    def see(self, layer: str, due: LayerDue, kind: str, leaf: str, tensor: torch.Tensor, call: int, num_characters: int = 0) -> None:
        """Note what would be captured of a tensor."""
        nodes = _nodes_of(tensor) if kind in ("gradient", "input_gradient") else frozenset()
        for take in due.takes[kind]:
            try:
                for path, part, dtype in _stored(take, leaf, tensor):
                    self.sightings.append(Sighting(layer, kind, path, take, dtype, tuple(part.shape), call, num_characters))
                    self.nodes.append(nodes)
            except _Gap as gap:
                self.obstacles[layer, kind, leaf] = str(gap)

    def leave_out_unreached(self, reached: set[Any]) -> None:
        """Leave out gradients to which no backward from what the models returned would come."""
        both = [
            (sighting, nodes)
            for sighting, nodes in zip(self.sightings, self.nodes, strict=True)
            if not nodes or (not reached.isdisjoint(nodes) and not self._ends_in_vain(sighting, reached))
        ]
        self.sightings = [sighting for sighting, _ in both]

    def _ends_in_vain(self, sighting: Sighting, reached: set[Any]) -> bool:
        """Say whether it is the gradient of an input, and none comes to what the call returned."""
        ends = self.ends.get((sighting.layer, sighting.call)) if sighting.kind == "input_gradient" else None
        return ends is not None and reached.isdisjoint(ends)


class _Gap(Exception):  # noqa: N818  # what is raised and caught here
    """A tensor would not be captured."""


def rehearse(models: Mapping[str, nn.Module], calls: Mapping[str, Arguments], layers: list[Layer], due: Due) -> Rehearsal:
    """Run models once and note what would be captured. They are left as they were, see `hookstore.restored.restored`.

    Parameters
    ----------
    models : mapping
        The models by name.
    calls : mapping
        What each is called with, in this order; one that is not there is not called.
    layers : list of Layer
        Of which something is due.
    due : Due
        What that is.
    """
    found = Rehearsal()
    tensors = [tensor for args, kwargs in calls.values() for tensor in flatten_arguments(args, kwargs)[0]]
    handles = []
    reached: set[Any] = set()
    try:
        with restored(models.values(), tensors), _eager():
            for layer in layers:
                hooks = _Observer(layer.name, due.layers[layer.name], found)
                handles.append(layer.module.register_forward_pre_hook(hooks.before, with_kwargs=True))
                handles.append(layer.module.register_forward_hook(hooks.after))
            for name, (args, kwargs) in calls.items():
                reached |= _reached(models[name](*args, **kwargs))
    finally:
        for handle in handles:
            handle.remove()
    if reached:
        found.leave_out_unreached(reached)
    found.nodes, found.ends = [], {}  # they hold the graph
    for layer in layers:
        of_layer = due.layers[layer.name]
        for leaf, parameter in own_parameters(layer.module) if "parameter_gradient" in of_layer.takes else ():
            is_unknown = not reached and torch.is_grad_enabled() and layer.name in found.called  # what the model returned has no tensors
            is_reached = is_unknown or _Leaf(parameter) in reached or layer.name in found.repeated
            if parameter.requires_grad and is_reached:
                found.see(layer.name, of_layer, "parameter_gradient", leaf, parameter, 0)
    return found


class _Observer:
    """The hooks of one layer during a rehearsal."""

    def __init__(self, name: str, due: LayerDue, found: Rehearsal) -> None:
        self._name = name
        self._due = due
        self._found = found
        self._under_way: list[int] = []

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what the layer is called with."""
        call = self._found.called.get(self._name, 0)
        self._found.called[self._name] = call + 1
        self._under_way.append(call)
        with torch._C.DisableTorchFunction():
            self._see(flatten_arguments(args, kwargs), call, "input", "input_gradient")
            for leaf, parameter in own_parameters(module) if self._due.parameter else ():
                self._found.see(self._name, self._due, "parameter", leaf, parameter, call)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """See what the layer returns."""
        call = self._under_way.pop()
        with torch._C.DisableTorchFunction():
            tensors, plan = flatten(output)
            self._see((tensors, plan), call, "activation", "gradient")
            if "input_gradient" in self._due.takes and not plan.others and torch.is_grad_enabled():
                self._found.ends[self._name, call] = frozenset().union(*map(_nodes_of, tensors))

    def _see(self, value: tuple[list[torch.Tensor], Any], call: int, kind: str, of_gradient: str) -> None:
        tensors, plan = value
        is_repeated = not torch.is_grad_enabled() and is_without_graph()
        if is_repeated:
            self._found.repeated.add(self._name)
        for leaf, tensor in zip(plan.leaves, tensors, strict=True):
            has_gradient = tensor.requires_grad if torch.is_grad_enabled() else is_repeated and _is_differentiable(tensor)
            for each in (kind, of_gradient):
                if each in self._due.takes and (each in _OF_VALUES or has_gradient):
                    self._found.see(self._name, self._due, each, leaf, tensor, call, len(plan.text))


def _stored(take: Take, leaf: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield what would be stored of a tensor, as the sink does it: leaf path, tensor and dtype."""
    reason = why_not(tensor)
    if take.portion is not None:
        if reason is not None:
            raise _Gap(reason)
        try:
            with torch.no_grad(), _disable_current_modes():
                tensor = take.portion.of(tensor.detach())
        except Exception as error:
            raise _Gap(f"select raises {type(error).__name__}: {error}") from error
        reason = why_not(tensor)
    if reason is None:
        yield leaf, tensor, take.stored[tensor.dtype]
        return
    try:
        apart = take_apart(tensor)
    except Exception as error:
        raise _Gap(f"{reason}, and taking it apart raises {type(error).__name__}: {error}") from error
    if apart is None:
        raise _Gap(reason)
    for name, part in apart.parts:
        why = why_not(part)
        if why is not None:
            raise _Gap(why)
        dtype = (take.stored if name in ("", "values") else TORCH_DTYPES)[part.dtype]
        yield f"{leaf}.{name}" if leaf and name else leaf or name, part, dtype


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _nodes_of(tensor: torch.Tensor) -> frozenset[Any]:
    """Return the nodes by which a gradient comes to a tensor: of a view that is edited later, to its base; of a leaf, what stands for it in `_reached`."""
    base = tensor._base
    return frozenset(_Leaf(one) if one.grad_fn is None else one.grad_fn for one in (tensor, base) if one is not None and one.requires_grad)


class _Leaf:
    """Stands for a leaf of the graph; one of the same tensor is equal."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and other._tensor is self._tensor

    def __hash__(self) -> int:
        return id(self._tensor)


def _reached(output: Any) -> set[Any]:
    """Return the nodes that a backward from a value passes, and the leaves that it ends at."""
    tensors = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
    left: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: set[Any] = {*left, *(_Leaf(tensor) for tensor in tensors if tensor.grad_fn is None)}
    while left:
        node = left.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(_Leaf(variable))
        for follower, _ in node.next_functions:
            if follower is not None and follower not in found:
                found.add(follower)
                left.append(follower)
    return found


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Have what is compiled run as it was written: to compile it with these hooks would be in vain."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
