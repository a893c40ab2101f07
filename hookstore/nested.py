"""Tensors inside nested values: what a module returned, or what it was called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hookstore.format import leaf_path

Path = tuple[str | int, ...]
_DEEPEST = 16  # levels of containers


def tensor_leaves(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in a value with its leaf path, in order; ``""`` for a value that is a tensor itself.

    Goes into mappings (by key), named tuples and dataclasses (by field), tuples and lists (by position). Everything else holds no tensors for us.
    """
    if isinstance(value, torch.Tensor):
        yield "", value
    else:
        yield from _named(_walk(value, (), ()))


def argument_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor that a module was called with.

    With one positional argument and no tensors among the keywords its leaves stand for themselves; otherwise each is found under its argument's position
    or keyword.
    """
    named = list(_walk(kwargs, (), ())) if kwargs else []
    if len(args) == 1 and not named:
        yield from tensor_leaves(args[0])
    else:
        yield from _named((*_walk(args, (), ()), *named))


def _named(found: Iterable[tuple[Path, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Turn paths into leaf paths; where two come out alike (keys 1.5 and "1.5", say) the later ones get a number."""
    seen: dict[str, int] = {}
    for path, tensor in found:
        leaf = leaf_path(path)
        repeats = seen.get(leaf, 0)
        seen[leaf] = repeats + 1
        yield f"{leaf}~{repeats}" if repeats else leaf, tensor


def _walk(value: Any, path: Path, inside: tuple[int, ...]) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in inside or len(inside) == _DEEPEST:
        return  # a container that holds itself, or one that nobody made by hand
    for key, item in _children(value):
        yield from _walk(item, (*path, key), (*inside, id(value)))


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key if isinstance(key, str | int) else repr(key), item
    elif isinstance(value, tuple) and value and len(getattr(value, "_fields", ())) == len(value):
        yield from zip(getattr(value, "_fields"), value, strict=True)  # noqa: B009
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            try:
                item = getattr(value, field.name)
            except Exception:  # noqa: S112  # a field that cannot be read holds nothing for us, and is no reason to stop training
                continue
            yield field.name, item
