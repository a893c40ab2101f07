"""Tensors inside nested values: what a module returned, or what it was called with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hookstore.format import leaf_path

Path = tuple[str | int, ...]


def tensor_leaves(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in a value with its leaf path, in order; ``""`` for a value that is a tensor itself.

    Goes into mappings (by key), named tuples and dataclasses (by field), tuples and lists (by position). Everything else holds no tensors for us.
    """
    if isinstance(value, torch.Tensor):
        yield "", value
    else:
        for path, tensor in _walk(value, (), ()):
            yield leaf_path(path), tensor


def argument_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor that a module was called with.

    With one positional argument and no tensors among the keywords its leaves stand for themselves; otherwise each is found under its argument's position
    or keyword.
    """
    named = list(_walk(kwargs, (), ())) if kwargs else []
    if len(args) == 1 and not named:
        yield from tensor_leaves(args[0])
    else:
        for path, tensor in (*_walk(args, (), ()), *named):
            yield leaf_path(path), tensor


def _walk(value: Any, path: Path, inside: tuple[int, ...]) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in inside:
        return  # a container that holds itself
    for key, item in _children(value):
        yield from _walk(item, (*path, key), (*inside, id(value)))


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key if isinstance(key, str | int) else repr(key), item
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
