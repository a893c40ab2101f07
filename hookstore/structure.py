"""How a value is built of which tensors are captured: the text in the manifest's column ``structure``.

A plain tensor has the empty text. For everything else it is compact JSON, one node for each part of the value; `NODES` lists them.

A tensor that is not one block of numbers is stored as several tensors, its *parts*, each under the tensor's leaf path and the part's name (see `PARTS`).
The rows of these have ``["at", node, leaf, tensor]``: the node of the whole value (``null`` for a plain tensor, or for one of many parameters), the
tensor's leaf path, and ``[kind, facts]`` or, for a tensor that is spread over processes, ``["dtensor", facts, tensor]`` around what the local one is.

Everything here is pure. What comes from a run is untrusted: `decode` bounds size and depth, and refuses what no writer wrote.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hookstore.format import leaf_path

Node = Any  # a str, None or a tuple that begins with the kind, as in `NODES`
Key = str | int | tuple[str, str]

TENSOR: Node = "tensor"
MOST_TEXT = 1 << 18  # characters; a value with a longer structure is recorded without
DEEPEST = 16  # levels of containers that are looked into

_CACHED_TEXT = 1 << 14
_DEEPEST_TEXT = 4 * DEEPEST

# Every kind of node, and what it stands for.
NODES: tuple[tuple[str, str], ...] = (
    ('"tensor"', "a tensor; it is found under its leaf path"),
    ("null", "`None`"),
    ('["tuple", [node, …]]`, `["list", [node, …]]', "by position"),
    ('["dict", [[key, node], …]]', "any mapping; a key is text, a whole number, or `[type, text]`"),
    ('["namedtuple", type, [[field, node], …]]', "also what `torch.max` and its like return"),
    ('["record", type, [[field, node], …], [field, …]]', "a dataclass, or a mapping that is one; the last are fields that hold nothing"),
    ('["packed", [[field, node], …]]', "a PackedSequence"),
    ('["call", [node, …], [[keyword, node], …]]', "what a module was called with"),
    ('["other", type, reason]', "what was not stored; the reason is empty where it is that it is no tensor"),
)

# The parts of tensors that are several, in order; and of texts, which only annotations have: all letters, and where each text begins and the last one ends.
PARTS: dict[str, tuple[str, ...]] = {
    "sparse_coo": ("indices", "values", "shape"),
    "sparse_csr": ("crow_indices", "col_indices", "values", "shape"),
    "sparse_csc": ("ccol_indices", "row_indices", "values", "shape"),
    "sparse_bsr": ("crow_indices", "col_indices", "values", "shape"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values", "shape"),
    "nested": ("values", "sizes"),
    "jagged": ("values", "offsets"),
    "jagged_with_lengths": ("values", "offsets", "lengths"),
    "quantized": ("int_repr", "scale", "zero_point"),
    "texts": ("utf8", "offsets"),
}


class Branch(NamedTuple):
    """A node with its place in the value.

    Attributes
    ----------
    path : str
        Leaf path of what it stands for.
    node : Node
        The node.
    children : tuple of Branch
        What it is made of.
    """

    path: str
    node: Node
    children: tuple[Branch, ...]

    @property
    def is_leaf(self) -> bool:
        """Whether it is no container: a tensor, ``None``, or what is not stored."""
        return _is_leaf(self.node)

    def leaves(self) -> Iterator[Branch]:
        """Yield what is no container, in order."""
        if self.is_leaf:
            yield self
        for child in self.children:
            yield from child.leaves()

    def find(self, path: str) -> Branch | None:
        """Return what has that leaf path, the outermost."""
        if self.path == path:
            return self
        return next((found for child in self.children if (found := child.find(path)) is not None), None)


class Structure(NamedTuple):
    """What the structure text of one row says.

    Attributes
    ----------
    whole : Branch or None
        The whole value, ``None`` where the row's tensor is all of it (or one of many parameters).
    leaf : str or None
        Leaf path of the tensor that the row's is a part of, ``None`` where it is one of its own.
    tensor : Node
        What that tensor is.
    """

    whole: Branch | None
    leaf: str | None
    tensor: Node


def encode(node: Node) -> str:
    """Return the text of a node."""
    return json.dumps(node, separators=(",", ":"))


def encode_at(whole: str, leaf: str, tensor: Node) -> str:
    """Return the text for the parts of a tensor inside a value whose own text is ``whole``."""
    return f'["at",{whole or "null"},{json.dumps(leaf)},{encode(tensor)}]'


def branches(node: Node) -> Branch:
    """Name everything in a value by its leaf path; where two ways to a leaf come out alike (keys 1.5 and "1.5", say) the later ones get a number."""
    return _branch(node, (), {})


def _branch(node: Node, path: tuple[str | int, ...], seen: dict[str, int]) -> Branch:
    name = leaf_path(path)
    if _is_leaf(node):
        return Branch(_once(name, seen), node, ())
    return Branch(name, node, tuple(_branch(child, (*path, *steps), seen) for steps, child in _children(node)))


def _once(name: str, seen: dict[str, int]) -> str:
    """Return a name, with a number where it has been there."""
    unique, repeats = name, seen.get(name, 0)
    while unique in seen:
        unique, repeats = f"{name}~{repeats}", repeats + 1
    seen[name] = max(repeats, 1)
    seen.setdefault(unique, 1)
    return unique


def _is_leaf(node: Node) -> bool:
    return not isinstance(node, tuple) or node[0] == "other"


def _children(node: Node) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Yield what a container holds, each with its part of the path."""
    kind = node[0]
    if kind in ("tuple", "list"):
        for position, child in enumerate(node[1]):
            yield (position,), child
    elif kind == "call":
        _, positional, keywords = node
        # One positional argument stands for itself, unless there are tensors among the keywords.
        is_alone = len(positional) == 1 and not any(_has_tensor(child) for _, child in keywords)
        for position, child in enumerate(positional):
            yield (() if is_alone else (position,)), child
        for keyword, child in keywords:
            yield (keyword,), child
    else:
        for key, child in pairs(node):
            yield (key[1] if isinstance(key, tuple) else key,), child


def pairs(node: Node) -> tuple[tuple[Key, Node], ...]:
    """Return keys and nodes of what a node of that kind holds."""
    found: tuple[tuple[Key, Node], ...] = node[1] if node[0] in ("dict", "packed") else node[2]
    return found


def why_other(node: Node) -> str:
    """Return why what a node of kind "other" stands for is not stored."""
    return str(node[2] or f"it is a non-tensor of type {node[1]}")


def _has_tensor(node: Node) -> bool:
    return node == TENSOR or (not _is_leaf(node) and any(_has_tensor(child) for _, child in _children(node)))


# Reading ------------------------------------------------------------------------------------------------------------


def decode(text: str) -> Structure:
    """Read a structure text.

    Raises
    ------
    ValueError
        If it is none that `encode` or `encode_at` makes.
    """
    if len(text) > 2 * MOST_TEXT:
        raise ValueError(f"{len(text):,} characters are more than any structure has")
    return _decode_again(text) if len(text) < _CACHED_TEXT else _decode(text)


def _decode(text: str) -> Structure:
    if not text:
        return Structure(None, None, TENSOR)
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=_refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if isinstance(found, list) and found[:1] == ["at"]:
        _, whole, leaf, tensor = _exactly(found, 4)
        return Structure(None if whole is None else branches(_node(whole, 0)), _text(leaf), _tensor(tensor, 0))
    return Structure(branches(_node(found, 0)), None, TENSOR)


_decode_again = functools.lru_cache(maxsize=256)(_decode)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} has no place in a structure")


def _node(found: Any, depth: int) -> Node:
    if found is None or found == TENSOR:
        return found
    if depth > _DEEPEST_TEXT:
        raise ValueError("it is nested too deeply")
    kind = _text(_list(found)[0] if found else None)
    if kind in ("tuple", "list"):
        _, children = _exactly(found, 2)
        return kind, tuple(_node(child, depth + 1) for child in _list(children))
    if kind == "other":
        return tuple(map(_text, _exactly(found, 3)))
    if kind == "call" and not depth:  # the paths in one inside another would take twice as long to work out for each level
        _, positional, keywords = _exactly(found, 3)
        return kind, tuple(_node(child, depth + 1) for child in _list(positional)), _fields(keywords, depth)
    if kind == "dict":
        _, items = _exactly(found, 2)
        return kind, tuple((_key(key), _node(child, depth + 1)) for key, child in (_exactly(item, 2) for item in _list(items)))
    if kind == "packed":
        return kind, _fields(_exactly(found, 2)[1], depth)
    if kind == "namedtuple":
        _, name, fields = _exactly(found, 3)
        return kind, _text(name), _fields(fields, depth)
    if kind == "record":
        _, name, fields, absent = _exactly(found, 4)
        return kind, _text(name), _fields(fields, depth), tuple(map(_text, _list(absent)))
    raise ValueError(f"{kind!r} is no kind of node")


def _fields(found: Any, depth: int) -> tuple[tuple[str, Node], ...]:
    fields = tuple((_text(name), _node(child, depth + 1)) for name, child in (_exactly(item, 2) for item in _list(found)))
    if len({name for name, _ in fields}) != len(fields):
        raise ValueError("a field is there twice")
    return fields


def _tensor(found: Any, depth: int) -> Node:
    if found == TENSOR:
        return TENSOR
    kind = _text(_list(found)[0] if found else None)
    if kind == "dtensor" and not depth:
        _, facts, inner = _exactly(found, 3)
        return kind, _facts(facts), _tensor(inner, depth + 1)
    if kind not in PARTS:
        raise ValueError(f"{kind!r} is no kind of tensor")
    return kind, _facts(_exactly(found, 2)[1])


def _facts(found: Any) -> tuple[tuple[str, Any], ...]:
    """Return facts as pairs, so that a node can be hashed; a list of them becomes a tuple."""
    if not isinstance(found, dict) or not all(isinstance(fact, str | int | list | None) for fact in found.values()):
        raise ValueError(f"expected facts about a tensor, found {type(found).__name__}")
    return tuple((name, tuple(map(_plain, fact)) if isinstance(fact, list) else fact) for name, fact in found.items())


def _plain(found: Any) -> str | int:
    return found if isinstance(found, str | int) else _wrong("text or a number", found)


def _key(found: Any) -> Key:
    if isinstance(found, list):
        kind, text = _exactly(found, 2)
        return _text(kind), _text(text)
    return _wrong("a truth value beside its type", found) if isinstance(found, bool) else _plain(found)


def _text(found: Any) -> str:
    return found if isinstance(found, str) else _wrong("text", found)


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else _wrong("a list", found)


def _wrong(expected: str, found: Any) -> Any:
    raise ValueError(f"expected {expected}, found {type(found).__name__}")


def _exactly(found: Any, length: int) -> list[Any]:
    if len(_list(found)) != length:
        raise ValueError(f"expected {length} items, found {len(found)}")
    return found  # type: ignore[no-any-return]
