"""Which models hooks can follow, and what several of them are called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hookstore.device import check_device
from hookstore.errors import OptionError, UnsupportedModelError
from hookstore.operators import why_none


def check_models(given: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models by name, one alone under the empty name, if hooks can follow them.

    Raises
    ------
    OptionError
        For a mapping that is empty, or has names that cannot precede those of layers.
    UnsupportedModelError
        If something is no module, runs on copies of the model, or runs no Python.
    """
    if not isinstance(given, Mapping):
        _check_model(given)
        return {"": given}
    if not given:
        raise OptionError(
            "model: expected a module, or at least one in a mapping from names to modules, got an empty mapping", option="model"
        )
    for name, model in given.items():
        if not isinstance(name, str) or not name or "." in name:
            raise OptionError(
                f"model: expected names without dots in the mapping of modules, such as 'generator', got {name!r}", option="model"
            )
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"model {name!r}: expected a torch.nn.Module, got a {type(model).__name__}")
        _check_model(model)
    return dict(given)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a torch.nn.Module, got a {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedModelError(
                f"module {name!r} is a DataParallel over {len(module.device_ids)} devices: each batch runs on copies of the model that are thrown away, in "
                "threads, and which copy had which samples is not known; use DistributedDataParallel, or record the model inside on one device"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"module {name!r} is a {type(module).__name__}: traced and scripted modules run no Python hooks; record the original"
            )


def check_recordable(given: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models by name, one alone under the empty name, if they can be recorded, and not only watched.

    Raises
    ------
    OptionError, UnsupportedModelError
        As `check_models`; also for compiled models where torch is too old for them, and for devices that nothing is copied from.
    """
    models = check_models(given)
    for model in models.values():
        for name, module in model.named_modules():
            obstacle = why_none() if is_compiled(module) else None
            if obstacle is not None:
                raise UnsupportedModelError(f"module {name!r} is compiled: {obstacle}")
        for parameter in model.parameters():
            check_device(parameter.device)
    return models


def is_compiled(module: nn.Module) -> bool:
    """Say whether a module is what ``torch.compile`` returned, or was compiled in place."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
