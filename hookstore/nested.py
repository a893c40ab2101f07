"""Nested values, as modules return them and are called with: the tensors inside, each with its leaf path, and the text that says how the value is built.

A value is described by a node (see `hookstore.structure`), which is a tuple that can be looked up: what follows from a structure, such as the leaf paths, is
worked out once for each. The walk itself is all that a call costs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hookstore.structure import DEEPEST, MOST_TEXT, TENSOR, Key, Node, branches, encode, pairs, why_other

_MOST_PLANS = 4096
_MOST_OTHERS = 16  # things that are not stored, in a container without tensors, that have rows of their own
_HOLDS_ITSELF, _WITHOUT_TENSORS = "it holds itself", "it has no tensors, and more than 16 other things"
_PRIMITIVES = frozenset((str, int, float, bool, bytes, complex))


class Other(NamedTuple):
    """Something inside a value that is not stored.

    Attributes
    ----------
    leaf : str
        Its path.
    type : str
        Name of its type.
    reason : str
        Why it is not stored.
    is_trifle : bool
        Whether it is a text, a number or the like, or several of these, or told already: nothing that one expects to be recorded.
    """

    leaf: str
    type: str
    reason: str
    is_trifle: bool


class Plan(NamedTuple):
    """What follows from how a value is built.

    Attributes
    ----------
    text : str
        Structure text, "" for a plain tensor.
    leaves : tuple of str
        Leaf paths of the tensors, in order.
    others : tuple of Other
        What is not stored.
    """

    text: str
    leaves: tuple[str, ...]
    others: tuple[Other, ...]


_PLAIN = Plan("", ("",), ())
_plans: dict[Node, Plan] = {}


def flatten(value: Any) -> tuple[list[torch.Tensor], Plan]:
    """Take the tensors out of a value.

    Goes into mappings (by key), named tuples, return types and dataclasses (by field), tuples and lists (by position). Everything else holds no tensors for
    us. Nothing in what is returned changes when a container does.

    Returns
    -------
    tensors : list of torch.Tensor
        In order.
    plan : Plan
        Their leaf paths, and the rest.
    """
    if isinstance(value, torch.Tensor):
        return [value], _PLAIN
    tensors: list[torch.Tensor] = []
    return tensors, _plan(_describe(value, tensors, ()))


def flatten_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Plan]:
    """Take the tensors out of what a module was called with.

    With one positional argument and no tensors among the keywords its leaves stand for themselves; otherwise each is found under its argument's position
    or keyword. Returns as `flatten`.
    """
    if len(args) == 1 and not kwargs:
        return flatten(args[0])
    tensors: list[torch.Tensor] = []
    positional = tuple([_describe(value, tensors, ()) for value in args])
    keywords = tuple([(str(name), _describe(value, tensors, ())) for name, value in kwargs.items()])
    return tensors, _plan(("call", positional, keywords))


def _plan(node: Node) -> Plan:
    plan = _plans.get(node)
    if plan is None:
        leaves = list(branches(node).leaves())
        text = encode(node)
        plan = Plan(
            text if len(text) <= MOST_TEXT else "",
            tuple(leaf.path for leaf in leaves if leaf.node == TENSOR),
            tuple(
                Other(leaf.path, leaf.node[1], why_other(leaf.node), _is_trifle(leaf.node))
                for leaf in leaves
                if isinstance(leaf.node, tuple)
            ),
        )
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[node] = plan
    return plan


def _is_trifle(node: Node) -> bool:
    _, name, reason = node
    return name in _PRIMITIVE_NAMES or reason in (_HOLDS_ITSELF, _WITHOUT_TENSORS)


# The walk -----------------------------------------------------------------------------------------------------------


def _describe(value: Any, tensors: list[torch.Tensor], inside: tuple[int, ...]) -> Node:
    """Return the node of a value, and append its tensors."""
    kind = type(value)
    if kind is torch.Tensor:
        tensors.append(value)
        return TENSOR
    if value is None:
        return None
    if kind in _PRIMITIVES:
        return _OF_PRIMITIVES[kind]
    if kind is not tuple and kind is not list and kind is not dict:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return TENSOR
        if isinstance(value, nn.Module | type | torch.Size) or not _is_container(value):
            return _other(kind)
    if id(value) in inside:
        return _other(kind, _HOLDS_ITSELF)
    if len(inside) == DEEPEST:
        return _other(kind, f"it lies more than {DEEPEST} levels deep")
    before = len(tensors)
    try:
        node = _container(value, tensors, (*inside, id(value)))
    except Exception as error:  # code of the user's own container, which is no reason to stop training
        del tensors[before:]
        return _other(kind, f"reading it raises {type(error).__name__}")
    if len(tensors) == before and _num_others(node) > _MOST_OTHERS:
        return _other(kind, _WITHOUT_TENSORS)
    return node


def _is_container(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping) or dataclasses.is_dataclass(value)


def _container(value: Any, tensors: list[torch.Tensor], inside: tuple[int, ...]) -> Node:
    """Return the node of a container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind.__name__, _describe_each(value, tensors, inside)
    if kind is dict:
        return "dict", _items(value, tensors, inside)
    if isinstance(value, tuple | list):
        children, fields = _describe_each(value, tensors, inside), _fields_of(value)
        if isinstance(value, PackedSequence):
            return "packed", tuple(zip(fields, children, strict=True))
        if fields:
            return "namedtuple", type_name(kind), tuple(zip(fields, children, strict=True))
        return "tuple" if isinstance(value, tuple) else "list", children
    is_dataclass = dataclasses.is_dataclass(value)
    if isinstance(value, Mapping):
        items = _items(value, tensors, inside)
        if not is_dataclass or not all(isinstance(key, str) for key, _ in items):
            return "dict", items
    else:
        items = tuple([(field.name, _field(value, field.name, tensors, inside)) for field in dataclasses.fields(value)])
    names = {name for name, _ in items}
    absent = tuple([field.name for field in dataclasses.fields(value) if field.name not in names])
    return "record", type_name(kind), items, absent


def _describe_each(values: Collection[Any], tensors: list[torch.Tensor], inside: tuple[int, ...]) -> tuple[Node, ...]:
    if len(values) > _MOST_OTHERS and _PRIMITIVES.issuperset(map(type, values)):
        return (_OF_PRIMITIVES[int],) * (_MOST_OTHERS + 1)  # a text in tokens, say, which nobody waits for to be described one by one
    nodes = []
    for value in values:
        if type(value) is torch.Tensor:  # (as in _describe, without the call)
            tensors.append(value)
            nodes.append(TENSOR)
        else:
            nodes.append(_describe(value, tensors, inside))
    return tuple(nodes)


def _items(mapping: Mapping[Any, Any], tensors: list[torch.Tensor], inside: tuple[int, ...]) -> tuple[tuple[Key, Node], ...]:
    return tuple([(key if type(key) is str else _key(key), _describe(item, tensors, inside)) for key, item in mapping.items()])


def _num_others(node: Node) -> int:
    """Count what is not stored in a node, at any depth: lists of lists of tokens would have another structure in every batch."""
    if not isinstance(node, tuple):
        return 0
    if node[0] == "other":
        return 1
    return sum(map(_num_others, node[1] if node[0] in ("tuple", "list") else [child for _, child in pairs(node)]))


def _field(value: Any, name: str, tensors: list[torch.Tensor], inside: tuple[int, ...]) -> Node:
    try:
        item = getattr(value, name)
    except Exception as error:  # a field that cannot be read holds nothing for us
        return ("other", "unknown", f"reading it raises {type(error).__name__}")
    return _describe(item, tensors, inside)


def _fields_of(value: tuple[Any, ...] | list[Any]) -> tuple[str, ...]:
    """Return the names that a tuple's items have, or nothing where they have none."""
    kind = type(value)
    names: Any = getattr(kind, "_fields", ())
    if hasattr(kind, "n_sequence_fields"):  # what torch.max and its like return
        names = getattr(kind, "__match_args__", ())
    is_named = (
        isinstance(names, tuple) and len(names) == len(value) and all(isinstance(name, str) and name.isidentifier() for name in names)
    )
    return names if is_named else ()


def _key(key: Any) -> Key:
    """Return a mapping's key as what can be written: its text or number, or the name of its type and a text that stands for it."""
    if isinstance(key, enum.Enum):
        return type_name(type(key)), str(key)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool) or not isinstance(key, int):
        can_be_written = isinstance(key, bool | float | bytes | complex | torch.device | torch.dtype) or key is None or _is_plain_tuple(key)
        return type_name(type(key)), repr(key) if can_be_written else type_name(type(key))
    return int(key)


def _is_plain_tuple(key: Any) -> bool:
    return type(key) is tuple and all(type(item) in _PRIMITIVES or item is None for item in key)


def _other(kind: type, reason: str = "") -> Node:
    return ("other", type_name(kind), reason)


def type_name(kind: type) -> str:
    """Return the name of a type with its module, without it for one of Python's own."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_OF_PRIMITIVES: dict[type, Node] = {kind: _other(kind) for kind in _PRIMITIVES}
_PRIMITIVE_NAMES = frozenset(map(type_name, (*_PRIMITIVES, bytearray, slice, range, torch.Size, torch.device, torch.dtype)))
