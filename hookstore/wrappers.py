"""What users call their modules: names without the wrappers that training puts around a model, and which modules are ever called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.modules.module import _forward_unimplemented
from torch.nn.utils import parametrize

# Classes that stand around one module and call it: where they come from (some are slow to import, and need not be), and the name of what they hold.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(slots=True)
class NamedModule:
    """A module with all of its names.

    Attributes
    ----------
    module : torch.nn.Module
        The module itself, never a wrapper.
    names : list of str
        Its names as the user wrote them, first the one that comes first in the model.
    full_names : list of str
        The names that ``named_modules()`` has for it and for the wrappers around it, where they are none of `names`.
    wrappers : list of torch.nn.Module
        The wrappers around it, outermost first.
    """

    module: nn.Module
    names: list[str] = field(default_factory=list)
    full_names: list[str] = field(default_factory=list)
    wrappers: list[nn.Module] = field(default_factory=list)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any wrappers; itself where there are none."""
    wrapped = _wrapped(module)
    while wrapped is not None:
        module = wrapped[1]
        wrapped = _wrapped(module)
    return module


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    """Return what a wrapper holds, and its attribute there. One that holds more than that is taken as the user made it."""
    if sum(child is not None for child in module._modules.values()) != 1:
        return None
    for kind in type(module).__mro__:
        attribute = _WRAPPERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if attribute is not None:
            inner = module._modules.get(attribute)
            return None if inner is None else (attribute, inner)
    return None


def name_modules(models: Mapping[str, nn.Module]) -> list[NamedModule]:
    """Name the modules of some models, in their order, each module once.

    Parameters
    ----------
    models : mapping
        Each model under its name, which precedes those of its modules; one model alone is under ``""``.
    """
    found: dict[int, NamedModule] = {}
    for prefix, model in models.items():
        for name, full_name, module in _walk(model, prefix, prefix, ()):
            inner = unwrap(module)
            named = found.setdefault(id(inner), NamedModule(inner))
            if name not in named.names:
                named.names.append(name)
            if full_name != name and full_name not in named.full_names:
                named.full_names.append(full_name)
            if module is not inner and not any(module is wrapper for wrapper in named.wrappers):
                named.wrappers.append(module)
    taken = {name for named in found.values() for name in named.names}
    for named in found.values():
        named.full_names = [name for name in named.full_names if name not in taken]
    return list(found.values())


def _walk(module: nn.Module, name: str, full_name: str, inside: tuple[int, ...]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield every name of every module below one, with the name that it has for the user, as ``named_modules(remove_duplicate=False)`` goes."""
    if id(module) in inside:
        return  # it holds itself
    yield name, full_name, module
    wrapped = _wrapped(module)
    for attribute, child in module._modules.items():
        if child is None:
            continue
        is_wrapped = wrapped is not None and attribute == wrapped[0]
        child_name = name if is_wrapped else _join(name, attribute)
        yield from _walk(child, child_name, _join(full_name, attribute), (*inside, id(module)))


def _join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def has_forward(module: nn.Module) -> bool:
    """Say whether a module has a forward of its own."""
    return getattr(type(module), "forward", None) is not _forward_unimplemented or "forward" in vars(module)


def is_container(module: nn.Module) -> bool:
    """Say whether a module only holds others: nothing ever calls it."""
    return (isinstance(module, _CONTAINERS) or type(module) is nn.Module) and not has_forward(module)


def has_no_layers(module: nn.Module) -> bool:
    """Say whether a module has no children; what computes its parametrized tensors are none."""
    return not any(
        child is not None for name, child in module._modules.items() if name != "parametrizations" or not is_parametrized(module)
    )


def is_parametrized(module: nn.Module) -> bool:
    """Say whether some of a module's tensors are computed from others, by ``torch.nn.utils.parametrize``."""
    return isinstance(module._modules.get("parametrizations"), nn.ModuleDict)


def parametrizations(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute a module's parametrized tensors, and those inside them."""
    if is_parametrized(module):
        holder = module._modules["parametrizations"]
        assert holder is not None
        yield from holder.modules()


def own_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters under their names in its ``state_dict()``, not those of its children.

    Where a tensor is parametrized these are the originals, such as ``parametrizations.weight.original``: the tensor itself is computed whenever someone
    looks at it, and that is not for us to bring about.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    if "parametrizations" in module._modules and is_parametrized(module):
        holder = module._modules["parametrizations"]
        assert holder is not None
        for attribute, originals in holder._modules.items():
            if originals is not None:
                for name, parameter in originals._parameters.items():
                    if parameter is not None:
                        yield f"parametrizations.{attribute}.{name}", parameter


def type_name(module: nn.Module) -> str:
    """Return the qualified name of a module's class, as it was before the class was changed in place by ``parametrize`` or FSDP2."""
    kind = type(module)
    if is_parametrized(module) and kind.__module__ == parametrize.__name__:
        kind = kind.__bases__[0]
    if (
        len(kind.__bases__) == 2
        and kind.__bases__[0].__name__ == "FSDPModule"
        and kind.__bases__[0].__module__.startswith("torch.distributed")
    ):
        kind = kind.__bases__[1]
    return f"{kind.__module__}.{kind.__qualname__}"
