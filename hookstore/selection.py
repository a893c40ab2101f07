"""Which layers of a model are recorded."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from hookstore.errors import SelectionError
from hookstore.wrappers import NamedModule, has_no_layers, is_container, name_modules, parametrizations

LayerPattern = str | re.Pattern[str] | type[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True, slots=True)
class Layer:
    """One selected layer.

    Attributes
    ----------
    name : str
        Its first name in ``named_modules()``, without those of wrappers around the model or parts of it.
    module : torch.nn.Module
        The module itself, inside its wrappers.
    aliases : tuple of str
        Further names of the same module: those under which it is registered too, then those that count the wrappers.
    num_names : int
        How many of its names, the first included, are places where it is registered.
    """

    name: str
    module: nn.Module = field(repr=False)
    aliases: tuple[str, ...] = ()
    num_names: int = 1


def select_layers(models: nn.Module | Mapping[str, nn.Module], layers: LayerPattern | Iterable[LayerPattern] | None = None) -> list[Layer]:
    """Find the layers that a selection names, in the model's order.

    Parameters
    ----------
    models : torch.nn.Module or mapping
        The root, whose own name is ``""``; or several, each under a name that precedes those of its modules.
    layers : str, re.Pattern, type, callable, iterable of these, or None
        A string is a glob over qualified names (``"encoder.*.linear1"``; ``*`` also matches dots), a compiled regular expression is searched in them, a
        type selects its instances, and a callable gets ``(name, module)``. What matches no name as the user wrote it may match one that counts the
        wrappers, such as ``module.conv1``. ``None`` selects every module that has no children.

    Returns
    -------
    list of Layer
        Each module once, however many names it has.

    Raises
    ------
    SelectionError
        If a pattern matches nothing, or only containers that are never called.
    """
    modules = name_modules({"": models} if isinstance(models, nn.Module) else models)
    if layers is None:
        chosen = _without_children(modules)
    else:
        is_one = isinstance(layers, str | re.Pattern | type) or callable(layers) or not isinstance(layers, Iterable)
        patterns: list[LayerPattern] = [layers] if is_one else list(layers)  # type: ignore[list-item, arg-type]
        if not patterns:
            raise SelectionError("layers is empty: name at least one layer, or leave it out to record every module without children")
        chosen = {id(found.module) for pattern in patterns for found in _find(pattern, modules)}
    selected = [found for found in modules if id(found.module) in chosen]
    for found in selected:
        for name in (*found.names, *found.full_names):
            if any("\ud800" <= character <= "\udfff" for character in name):
                raise SelectionError(
                    f"layers: the name {name!r} holds half of a surrogate pair, which UTF-8 and so the manifest cannot hold; rename that module"
                )
    return [Layer(found.names[0], found.module, (*found.names[1:], *found.full_names), len(found.names)) for found in selected]


def _without_children(modules: list[NamedModule]) -> set[int]:
    """Choose the modules that have no children; what computes the weight of a layer is no layer of its own."""
    inside = {id(part) for found in modules for part in parametrizations(found.module)}
    chosen = {
        id(found.module)
        for found in modules
        if id(found.module) not in inside and has_no_layers(found.module) and not is_container(found.module)
    }
    if not chosen:
        raise SelectionError(
            "layers: the model has no module without children that has a forward of its own; name the layers, such as layers=''"
        )
    return chosen


def _find(pattern: LayerPattern, modules: list[NamedModule]) -> list[NamedModule]:
    """Return the modules that a pattern matches, and that are called."""
    matches = _matcher(pattern)
    found = [one for one in modules if any(matches(name, one.module) for name in one.names)]
    if not found:
        found = [one for one in modules for name in one.full_names for module in (one.module, *one.wrappers) if matches(name, module)]
    if not found:
        raise SelectionError(_nothing_matches(pattern, [name for one in modules for name in one.names]))
    called = [one for one in found if not is_container(one.module)]
    if not called:
        containers = ", ".join(repr(one.names[0]) for one in found)
        raise SelectionError(
            f"layers: {_describe(pattern)} matches only {containers}, a {type(found[0].module).__name__}, which is never called and so has no "
            f"activation; select its children instead, such as {found[0].names[0] + '.*'!r}"
        )
    return called


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
