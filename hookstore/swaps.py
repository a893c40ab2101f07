"""Which modules the names of layers stand for while recording goes on: people replace modules of a model that is being recorded."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hookstore.optimizers import weakly
from hookstore.wrappers import name_modules


class ModuleNames:
    """The names of some models' modules, now.

    Attributes
    ----------
    is_stale : bool
        Whether a module has been put into one of the models since this was last set to false. What changes a model's ``_modules`` behind torch's back
        (as ``Sequential.insert`` does) is noticed by `look` alone.

    Parameters
    ----------
    models : mapping
        The models by name, as for `hookstore.wrappers.name_modules`; referred to weakly.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.is_stale = False
        self._children: list[tuple[weakref.ref[nn.Module], tuple[str, ...], tuple[int, ...]]] = []
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._inside = weakref.WeakSet(module for model in models.values() for module in model.modules())
        self._handle = register_module_module_registration_hook(weakly(self._on_registration))
        self._note_children()

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:  # noqa: ARG002
        if parent in self._inside:
            self.is_stale = True

    def now(self) -> dict[str, nn.Module]:
        """Return the module that each name stands for."""
        models = {name: model for name, reference in self._models.items() if (model := reference()) is not None}
        self._inside.update(module for model in models.values() for module in model.modules())
        self._note_children()
        return {name: named.module for named in name_modules(models) for name in named.names}

    def _note_children(self) -> None:
        models = (model for reference in self._models.values() if (model := reference()) is not None)
        modules = dict.fromkeys(module for model in models for module in model.modules() if module._modules)
        self._children = [(weakref.ref(module), tuple(module._modules), tuple(map(id, module._modules.values()))) for module in modules]

    def look(self) -> bool:
        """Say whether any module has another in it than when the names were last asked for; a microsecond for each that has modules in it."""
        for reference, names, identities in self._children:
            module = reference()
            if module is None or tuple(map(id, module._modules.values())) != identities or tuple(module._modules) != names:
                return True
        return self.is_stale

    def remove(self) -> None:
        """Watch no longer."""
        self._handle.remove()
