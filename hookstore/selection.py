"""Which layers of a model are recorded."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from hookstore.errors import SelectionError

LayerPattern = str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool]

# Containers that have no forward of their own: nothing ever calls them.
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True)
class Layer:
    """One selected layer.

    Attributes
    ----------
    name : str
        Its first name in ``named_modules()``.
    module : torch.nn.Module
        The module itself.
    aliases : tuple of str
        Further names under which the same module is registered.
    """

    name: str
    module: nn.Module = field(repr=False)
    aliases: tuple[str, ...] = ()


def select_layers(model: nn.Module, layers: LayerPattern | Iterable[LayerPattern] | None = None) -> list[Layer]:
    """Find the layers that a selection names, in the model's order.

    Parameters
    ----------
    model : torch.nn.Module
        The root; its own name is ``""``.
    layers : str, re.Pattern, type, callable, iterable of these, or None
        A string is a glob over qualified names (``"encoder.*.linear1"``; ``*`` also matches dots), a compiled regular expression is searched in them, a
        type selects its instances, and a callable gets ``(name, module)``. ``None`` selects every module that has no children.

    Returns
    -------
    list of Layer
        Each module once, however many names it has.

    Raises
    ------
    SelectionError
        If a pattern matches nothing, or only containers that are never called.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    if layers is None:
        patterns: list[LayerPattern] = [lambda _name, module: next(module.children(), None) is None]
    elif isinstance(layers, str | re.Pattern | type) or callable(layers) or not isinstance(layers, Iterable):
        patterns = [layers]
    else:
        patterns = list(layers)
    if not patterns:
        raise SelectionError("layers is empty: name at least one layer, or leave it out to record every module without children")
    chosen: set[int] = set()
    for pattern in patterns:
        matches = _matcher(pattern)
        found = [key for key, module in modules.items() if any(matches(name, module) for name in names[key])]
        if not found:
            raise SelectionError(_nothing_matches(pattern, [name for group in names.values() for name in group]))
        called = [key for key in found if not isinstance(modules[key], _NEVER_CALLED)]
        if not called:
            containers = ", ".join(repr(names[key][0]) for key in found)
            raise SelectionError(
                f"layers: {_describe(pattern)} matches only {containers}, a {type(modules[found[0]]).__name__}, which is never called and so has no "
                f"activation; select its children instead, such as {names[found[0]][0] + '.*'!r}"
            )
        chosen.update(called)
    for key in chosen:
        for name in names[key]:
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise SelectionError(
                    f"layers: the name {name!r} holds half of a surrogate pair, which UTF-8 and so the manifest cannot hold; rename that module"
                )
    return [Layer(names[key][0], module, tuple(names[key][1:])) for key, module in modules.items() if key in chosen]


def _matcher(pattern: LayerPattern) -> Callable[[str, nn.Module], bool]:
    if isinstance(pattern, str):
        return lambda name, _module: fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return lambda name, _module: pattern.search(name) is not None
    if isinstance(pattern, type):
        return lambda _name, module: isinstance(module, pattern)
    if callable(pattern):
        return lambda name, module: bool(pattern(name, module))
    raise SelectionError(
        f"layers: expected a glob, a compiled regular expression, a module type or a callable, got {pattern!r} of type {type(pattern).__name__}"
    )


def _describe(pattern: LayerPattern) -> str:
    if isinstance(pattern, re.Pattern):
        return f"the regular expression {pattern.pattern!r}"
    if isinstance(pattern, type):
        return f"the type {pattern.__name__}"
    return f"the pattern {pattern!r}" if isinstance(pattern, str) else "the predicate"


def _nothing_matches(pattern: LayerPattern, names: list[str]) -> str:
    listed = [name for name in names if name]
    wanted = pattern if isinstance(pattern, str) else pattern.pattern if isinstance(pattern, re.Pattern) else ""
    nearest = difflib.get_close_matches(wanted, listed, n=5, cutoff=0.4) if wanted else []
    hint = "nearest names: " if nearest else "the model has: "
    shown = nearest or listed[:8]
    return (
        f"layers: {_describe(pattern)} matches no module; {hint}{', '.join(map(repr, shown)) or 'no submodules'}"
        f"{f' and {len(listed) - len(shown)} more' if not nearest and len(listed) > len(shown) else ''}"
    )
