"""What reading gives for values that are not one plain tensor: the structure that a module returned, with NumPy arrays (or torch tensors) in it.

The classes here are our own: a run is untrusted, and no code of the training is needed to read it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookstore.structure import TENSOR, Branch, Key, pairs, why_other

_OF_KEYS: dict[str, Callable[[str], Any]] = {"float": float, "bool": lambda text: text == "True", "NoneType": lambda _: None}


@dataclass(frozen=True, slots=True)
class NotStored:
    """Stands in a value for what was not stored.

    Attributes
    ----------
    type_name : str
        Type of what was there.
    reason : str
        Why it was not stored.
    """

    type_name: str
    reason: str


class Arguments(NamedTuple):
    """What a module was called with.

    Attributes
    ----------
    args : tuple
        Positional arguments.
    kwargs : dict
        Keyword arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class PackedSequence(NamedTuple):
    """The fields of a `torch.nn.utils.rnn.PackedSequence`.

    Attributes
    ----------
    data, batch_sizes : numpy.ndarray
        All elements, and how many sequences have one at each step.
    sorted_indices, unsorted_indices : numpy.ndarray or None
        Order of the sequences.
    """

    data: Any
    batch_sizes: Any
    sorted_indices: Any
    unsorted_indices: Any


class Record(Mapping[str, Any]):
    """A dataclass, or a mapping with attributes such as the outputs of transformers: fields by key, by attribute and by position.

    Attributes
    ----------
    type_name : str
        Type of what was captured.
    """

    __slots__ = ("_absent", "_fields", "type_name")

    def __init__(self, type_name: str, fields: Mapping[str, Any], absent: tuple[str, ...] = ()) -> None:
        self.type_name = type_name
        self._fields = dict(fields)
        self._absent = absent

    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a field by its name, or fields by their positions among those that hold something."""
        return self._fields[key] if isinstance(key, str) else tuple(self._fields.values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name in Record.__slots__:  # a copy that is being made has no fields yet
            raise AttributeError(name)
        if name in self._fields:
            return self._fields[name]
        if name in self._absent:
            return None
        raise AttributeError(f"{self.type_name} has no field {name!r}; it has {', '.join(map(repr, (*self._fields, *self._absent)))}")

    def __getstate__(self) -> tuple[str, dict[str, Any], tuple[str, ...]]:
        return self.type_name, self._fields, self._absent

    def __setstate__(self, state: tuple[str, dict[str, Any], tuple[str, ...]]) -> None:
        self.type_name, self._fields, self._absent = state

    def __repr__(self) -> str:
        return f"{self.type_name.rpartition('.')[2]}({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"


def build(branch: Branch, leaf: Callable[[str], Any], *, packed: Callable[..., Any] = PackedSequence) -> Any:
    """Build a value from its structure.

    Parameters
    ----------
    branch : Branch
        The structure.
    leaf : callable
        Gives the tensor at a leaf path.
    packed : callable
        Makes a PackedSequence of its fields.

    Raises
    ------
    ValueError
        If the structure makes no sense.
    """
    node = branch.node
    if node == TENSOR:
        return leaf(branch.path)
    if node is None:
        return None
    kind = node[0]
    if kind == "other":
        return NotStored(node[1], why_other(node))
    held = [build(child, leaf, packed=packed) for child in branch.children]
    if kind in ("tuple", "list"):
        return tuple(held) if kind == "tuple" else held
    if kind == "call":
        num_positional = len(node[1])
        keywords = [keyword for keyword, _ in node[2]]
        return Arguments(tuple(held[:num_positional]), dict(zip(keywords, held[num_positional:], strict=True)))
    if kind == "dict":
        return dict(zip(_keys([key for key, _ in pairs(node)]), held, strict=True))
    fields = [str(field) for field, _ in pairs(node)]
    if kind == "record":
        return Record(node[1], dict(zip(fields, held, strict=True)), node[3])
    if kind == "namedtuple":
        return _namedtuple(node[1], tuple(fields))(*held)
    return packed(**dict(zip(fields, held, strict=True)))


def _keys(keys: list[Key]) -> Iterator[Any]:
    """Turn keys into what the mapping had, or into a text where that cannot be written; of two that come out alike the later gets a number."""
    seen: dict[Any, int] = {}  # each key, and how many like it there were
    for key in keys:
        made = found = _OF_KEYS.get(key[0], str)(key[1]) if isinstance(key, tuple) else key
        while made in seen:
            seen[found] += 1
            made = f"{key[1] if isinstance(key, tuple) else key}~{seen[found]}"
        seen[made] = 0
        yield made


@functools.lru_cache(maxsize=256)
def _namedtuple(type_name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    name = type_name.rpartition(".")[2]
    try:
        return collections.namedtuple(name, fields, rename=True)  # noqa: PYI024
    except ValueError:  # a name that no class statement could give
        return collections.namedtuple("NamedTuple", fields, rename=True)  # noqa: PYI024
