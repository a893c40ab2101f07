"""Hooks of recorded batches on what is around the layers: they capture nothing, but see what became of a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hookstore.fastpath import FastPathHook, disturbed_layers
from hookstore.hooks import InertCopy, describe_error, has_raised, is_traced
from hookstore.selection import Layer
from hookstore.sink import Sink
from hookstore.uncalled import UncalledLayers
from hookstore.wrappers import name_modules, unwrap

_graph_task, _is_compiling = torch._C._current_graph_task_id, torch.compiler.is_compiling


class _RootHook(InertCopy):
    """Tells of each call of a model whether it returned, and marks the batch in which one raised."""

    __slots__ = ("_name", "_sink", "_uncalled")

    def __init__(self, name: str, uncalled: UncalledLayers, sink: Sink) -> None:
        self._name = name
        self._uncalled = uncalled
        self._sink = sink

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        if _is_compiling() or _graph_task() != -1 or is_traced():
            return
        here = self._sink.clock.here()
        if here is None:
            return
        raised = output is None and has_raised()
        if raised:
            self._sink.cut_short(here, f"the forward of the model raised {describe_error()}")
        self._uncalled.note_call(self._name, here, raised=raised)


class _BeforeHook(InertCopy):
    """Tells that a model is being called."""

    __slots__ = ("_on_call",)

    def __init__(self, on_call: Callable[[], None]) -> None:
        self._on_call = on_call

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if not _is_compiling() and _graph_task() == -1 and not is_traced():
            self._on_call()


class AroundLayers:
    """The hooks around the layers of a recording: on the models themselves, and on encoder layers that have a fast path.

    Parameters
    ----------
    models : mapping
        The models by name; referred to weakly.
    layers : iterable of Layer
        What is recorded.
    uncalled : UncalledLayers
        Is told what became of each call of a model.
    sink : Sink
        Where marks of broken batches go.
    on_call : callable
        Called when a model is.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], layers: Iterable[Layer], uncalled: UncalledLayers, sink: Sink, on_call: Callable[[], None]
    ) -> None:
        hooked = {id(layer.module) for layer in layers}
        self._roots = [
            (weakref.ref(root), _RootHook(name, uncalled, sink))
            for name, root in ((name, unwrap(model)) for name, model in models.items())
            if any(id(module) in hooked for module in root.modules())
        ]
        disturbed = disturbed_layers(name_modules(models), hooked)
        self._disturbed = [weakref.ref(found.module) for found in disturbed]
        self._before_hook = _BeforeHook(on_call)
        self._fast_path = FastPathHook([found.names[0] for found in disturbed], sink.clock)
        self._handles: list[RemovableHandle] = []

    @property
    def disturbs(self) -> bool:
        """Whether hooks on the layers turn off a fast path."""
        return bool(self._disturbed)

    def install(self) -> None:
        """Register the hooks; does nothing if they are."""
        if self._handles:
            return
        for reference, hook in self._roots:
            root = reference()
            if root is not None:
                self._handles.append(root.register_forward_pre_hook(self._before_hook, prepend=True))
                self._handles.append(root.register_forward_hook(hook, always_call=True))
        if not self._fast_path.has_warned:
            for layer in (layer for reference in self._disturbed if (layer := reference()) is not None):
                self._handles.append(layer.register_forward_pre_hook(self._fast_path))

    def remove(self) -> None:
        """Remove the hooks; does nothing if they are not there."""
        while self._handles:
            self._handles.pop().remove()
