"""What a module is called with, and returns: containers with tensors inside, made again with other tensors.

Where a tensor that requires grad lies in what cannot be made again, there is an error that says so, as far as containers and the attributes of one object go:
objects inside objects are not searched. A cache of keys and values is such a one, which most transformers hand to every layer with what earlier ones put in.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from hookstore.errors import UnsupportedModelError
from hookstore.nested import type_name

DEEPEST = 32
_BUILT_IN = frozenset((tuple, list, dict, OrderedDict))  # whose attributes nobody uses
_PLAIN = frozenset((type(None), str, int, float, bool, bytes, complex, slice, range, torch.Size, torch.device, torch.dtype))


class Inputs:
    """The tensors that a call begins with.

    Parameters
    ----------
    args, kwargs : tuple, dict
        What the module is called with.

    Attributes
    ----------
    tensors : list of torch.Tensor
        Those that require grad, each once, in order.

    Raises
    ------
    UnsupportedModelError
        If an argument of a kind that cannot be looked through has a tensor that requires grad.
    """

    __slots__ = ("_args", "_kwargs", "others", "tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self.tensors: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        for value in (*args, *kwargs.values()):
            self._find(value, 0)

    def _find(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            found = self.tensors if value.requires_grad else self.others
            if not any(value is one for one in found):
                found.append(value)
        else:
            children = children_of(value)
            if children is None:
                _refuse_hidden(value, [])
            elif depth == DEEPEST:
                raise UnsupportedModelError(
                    f"an argument of the module is nested more than {DEEPEST} levels deep, or holds itself; pass its tensors flat"
                )
            else:
                for child in children:
                    self._find(child, depth + 1)
                if type(value) not in _BUILT_IN:
                    _refuse_hidden(value, self.tensors)

    def replaced(self, stand_ins: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any], list[Copied]]:
        """Return the arguments with stand-ins for the tensors, and the containers that were copied for it."""
        copies: list[Copied] = []
        args = tuple([self._swapped(value, stand_ins, copies) for value in self._args])
        kwargs = {name: self._swapped(value, stand_ins, copies) for name, value in self._kwargs.items()}
        return args, kwargs, copies

    def _swapped(self, value: Any, stand_ins: Sequence[torch.Tensor], copies: list[Copied]) -> Any:
        """Return a value with stand-ins; a method, since a function inside that calls itself would hold all tensors until garbage is collected."""
        if isinstance(value, torch.Tensor):
            for tensor, stand_in in zip(self.tensors, stand_ins, strict=True):
                if tensor is value:
                    return stand_in
            return value
        children = children_of(value)
        if children is None:
            return value
        for made in copies:
            if made.original is value:
                return made.copied
        swapped = [self._swapped(child, stand_ins, copies) for child in children]
        if are_same(swapped, children):
            return value
        copied = rebuild(value, swapped)
        if not isinstance(value, tuple):
            copies.append(Copied(value, copied, children))
        return copied


def children_of(value: Any) -> list[Any] | None:
    """Return what a container holds, or ``None`` for what is no container that can be made again."""
    if type(value) in _PLAIN:
        return None
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Say whether two sequences hold the same objects; of tuples the compiler does not trace whether they are one, but whether what they hold is."""
    return all(
        len(one) == len(other) and are_same(one, other) if isinstance(one, tuple) and isinstance(other, tuple) else one is other
        for one, other in zip(ones, others, strict=True)
    )


def rebuild(value: Any, children: list[Any]) -> Any:
    """Return a container of the same kind with other children."""
    kind = type(value)
    if kind is tuple:
        return tuple(children)
    if kind is list:
        return children
    if kind is dict or kind is OrderedDict:
        made: dict[Any, Any] = {} if kind is dict else OrderedDict()
        made.update(zip(value, children, strict=True))
        return made
    try:
        if isinstance(value, tuple):
            rebuilt = value._make(children) if hasattr(kind, "_make") else kind(children)  # type: ignore[attr-defined]
        else:
            rebuilt = copy.copy(value)
            fill(rebuilt, list(value) if isinstance(value, Mapping) else [], children)
        kept = children_of(rebuilt) or []
        if len(kept) == len(children) and all(one is other for one, other in zip(kept, children, strict=True)):
            return rebuilt
    except Exception as error:
        refuse_container(kind, error)
    return refuse_container(kind)


def fill(container: Any, keys: Sequence[Any], children: Sequence[Any]) -> None:
    """Put children into a container that can be changed."""
    if isinstance(container, list):
        container[:] = children
    elif isinstance(container, Mapping):
        for key in [key for key in container if key not in keys]:
            del container[key]  # type: ignore[attr-defined]
        for key, child in zip(keys, children, strict=True):
            container[key] = child  # type: ignore[index]
    else:
        for field, child in zip(dataclasses.fields(container), children, strict=True):
            object.__setattr__(container, field.name, child)


def refuse_container(kind: type, error: Exception | None = None) -> NoReturn:
    """Raise the error that says why a container cannot be made again, or changed."""
    why = "it does not hold what is put into it" if error is None else f"that raises {type(error).__name__}: {error}"
    raise UnsupportedModelError(
        f"an argument or output of the module is a {type_name(kind)} with tensors that require grad, and cannot be made again with other tensors: {why}; "
        "pass the tensors themselves, or in tuples, lists, dicts or dataclasses"
    ) from error


def _refuse_hidden(value: Any, found: Sequence[torch.Tensor]) -> None:
    """Refuse an object if it has, in its attributes, tensors that require grad and are not among those found, whose gradients would go unedited."""
    if type(value) in _PLAIN or isinstance(value, type | nn.Module) or callable(value):
        return
    held = list(value) if isinstance(value, set | frozenset | deque) else list(getattr(value, "__dict__", {}).values())
    if any(_requires_grad(one, found, 0) for one in held):
        raise UnsupportedModelError(
            f"an argument of the module is a {type_name(type(value))} that holds tensors which require grad, and whose gradients cannot be edited there; "
            "pass the tensors themselves, or in tuples, lists, dicts or dataclasses"
        )


def _requires_grad(value: Any, found: Sequence[torch.Tensor], depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad and not any(value is one for one in found)
    children = None if depth == DEEPEST else children_of(value)
    return children is not None and any(_requires_grad(child, found, depth + 1) for child in children)


class Copied:
    """A container that can be changed, and the copy that the module got; the caller's own has to follow what the module does to it.

    Parameters
    ----------
    original, copied : object
        The two.
    children : list
        What the original holds.
    """

    def __init__(self, original: Any, copied: Any, children: list[Any]) -> None:
        self.original, self.copied = original, copied
        self._children = children
        self._keys, self._given = keys_of(copied), children_of(copied) or []

    def follow(self, translate: Callable[[Any], Any]) -> None:
        """Do to the caller's container what the module has done to the copy."""
        keys, items = keys_of(self.copied), children_of(self.copied) or []
        is_same = len(items) == len(self._given) and all(one is other for one, other in zip(items, self._given, strict=True))
        if is_same and keys == self._keys:
            return
        try:
            fill(self.original, keys, [self._followed(item, translate) for item in items])
        except UnsupportedModelError:
            raise
        except Exception as error:
            refuse_container(type(self.original), error)

    def _followed(self, item: Any, translate: Callable[[Any], Any]) -> Any:
        for given, child in zip(self._given, self._children, strict=True):
            if item is given:
                return child  # the caller's own, which did not come out of the module
        return translate(item)


def keys_of(container: Any) -> list[Any]:
    """Return the keys of a mapping, and none of anything else."""
    return list(container) if isinstance(container, Mapping) else []
