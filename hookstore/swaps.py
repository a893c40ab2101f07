"""Which modules the names of layers stand for while recording goes on: people replace modules of a model that is being recorded."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hookstore.wrappers import name_modules


class ModuleNames:
    """The names of some models' modules, now.

    Attributes
    ----------
    is_stale : bool
        Whether a module has been put into one of the models since this was last set to false. What changes a model's ``_modules`` behind torch's back
        is not noticed here.

    Parameters
    ----------
    models : mapping
        The models by name, as for `hookstore.wrappers.name_modules`; referred to weakly.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self.is_stale = False
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._inside = weakref.WeakSet(module for model in models.values() for module in model.modules())
        self._handle = register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:  # noqa: ARG002
        if parent in self._inside:
            self.is_stale = True

    def now(self) -> dict[str, nn.Module]:
        """Return the module that each name stands for."""
        models = {name: model for name, reference in self._models.items() if (model := reference()) is not None}
        self._inside.update(module for model in models.values() for module in model.modules())
        return {name: named.module for named in name_modules(models) for name in named.names}

    def remove(self) -> None:
        """Watch no longer."""
        self._handle.remove()
