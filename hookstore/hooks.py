"""The hooks on a model: they turn what a forward and a backward pass show into captures.

Activations, inputs and parameters are copied by module hooks. Gradients are copied by tensor hooks that the forward hook sets on the module's output:
full backward hooks would make in-place operations fail and change the identity of what modules return.

A hook that the user registers later than ours may replace an output after we saw it, and sees a gradient after we did.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.jit._trace import is_tracing
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from hookstore.errors import CaptureWarning
from hookstore.format import DTYPES
from hookstore.layout import Capture
from hookstore.nested import argument_leaves, tensor_leaves
from hookstore.schedule import Clock, Coordinates
from hookstore.selection import Layer
from hookstore.staging import Stager

TORCH_DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.parameter.Buffer)


class Call(NamedTuple):
    """One call of a layer that is recorded.

    Attributes
    ----------
    coordinates : Coordinates
        Where it is filed.
    number : int
        Which call of the layer there.
    step : int
        Optimizer steps done before.
    sequence_nr : int
        Autograd's counter when the call began: what was made later was made inside.
    """

    coordinates: Coordinates
    number: int
    step: int
    sequence_nr: int


class Sink:
    """Takes tensors from the hooks and stages them, until it is turned off.

    Parameters
    ----------
    stager : Stager
        Where they go.
    clock : Clock
        Where training stands.
    dtype : str or None
        What floating-point tensors are cast to.
    disable_on_failure : bool
        Whether a failure of the writer ends capturing with a warning instead of reaching the training loop.
    """

    def __init__(self, stager: Stager, clock: Clock, *, dtype: str | None, disable_on_failure: bool) -> None:
        self.is_active = True
        self.clock = clock
        self.num_calls: dict[str, int] = {}
        self._stager = stager
        self._dtype = dtype
        self._disable_on_failure = disable_on_failure
        self._warned: set[tuple[str, str]] = set()

    def put(self, layer: str, kind: str, leaf: str, tensor: torch.Tensor, call: Call, backward: int = 0) -> None:
        """Stage one tensor, or note why it cannot be."""
        if not self.is_active:
            return
        reason = _why_not(tensor)
        dtype = TORCH_DTYPES.get(tensor.dtype, "")
        if self._dtype is not None and tensor.is_floating_point():
            dtype = self._dtype
        shape = () if reason else tuple(tensor.shape)
        capture = Capture(layer, kind, leaf, dtype, call.coordinates, call.number, backward, call.step, shape, time.time_ns() // 1000)
        try:
            if reason is not None:
                self.skip(capture, reason)
            elif type(tensor) in _PLAIN_TYPES:
                self._stager.stage(capture, tensor.detach(), epoch_batches=self.clock.epoch_batches)
            else:
                with torch._C.DisableTorchFunctionSubclass():
                    self._stager.stage(capture, tensor.detach(), epoch_batches=self.clock.epoch_batches)
        except BaseException as error:
            if error is not self._stager.failure or not self._disable_on_failure:
                raise
            self.is_active = False
            warnings.warn(
                f"hookstore stopped capturing at {kind} of layer {layer!r}, epoch {call.coordinates.epoch}, batch {call.coordinates.batch}: "
                f"the writer failed with {type(error).__name__}: {error}",
                CaptureWarning,
                stacklevel=2,
            )

    def skip(self, capture: Capture, reason: str) -> None:
        """Note a gap, and warn about the first of its layer and kind."""
        capture.status, capture.reason = "skipped", reason
        self._stager.note(capture)
        if (capture.layer, capture.kind) not in self._warned:
            self._warned.add((capture.layer, capture.kind))
            where = capture.coordinates
            warnings.warn(
                f"{capture.kind} of layer {capture.layer!r} was not captured, first in epoch {where.epoch}, batch {where.batch}: {reason}",
                CaptureWarning,
                stacklevel=2,
            )

    def skip_value(self, layer: str, kind: str, call: Call, reason: str) -> None:
        """Note that a whole value could not be captured."""
        if self.is_active:
            self.skip(Capture(layer, kind, "", "", call.coordinates, call.number, 0, call.step, (), time.time_ns() // 1000), reason)


def _why_not(tensor: torch.Tensor) -> str | None:
    """Say why a tensor has no bytes that could be stored, or return ``None``."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "it is a functorch tensor (vmap, grad or jvp), which stands for many values"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, not strided"
    if tensor.is_meta:
        return "it is on the meta device and has no values"
    if tensor.dtype not in TORCH_DTYPES:
        return f"its dtype {tensor.dtype} is not stored"
    if type(tensor) not in _PLAIN_TYPES:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return f"it is a {type(tensor).__name__}, a tensor subclass whose values only its own code knows"
        if tensor.is_nested:
            return "it is a nested tensor"
    return None


class _InertCopy:
    """Base of hooks: a copied or pickled model gets, in the hook's place, a method of the standard library that does nothing."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Calls(threading.local):
    """The calls of one layer that are under way on this thread, innermost last; ``None`` for one that is not recorded."""

    def __init__(self) -> None:
        self.stack: list[Call | None] = []


class LayerHooks:
    """The hooks of one layer.

    Parameters
    ----------
    layer : Layer
        The layer; its module is referred to weakly.
    kinds : iterable of str
        What to capture.
    sink : Sink
        Where it goes.
    """

    def __init__(self, layer: Layer, kinds: Iterable[str], sink: Sink) -> None:
        self.name = layer.name
        self.sink = sink
        self.kinds = frozenset(kinds)
        self.calls = _Calls()
        self.watches: dict[str, _Watch] = {}
        self._module = weakref.ref(layer.module)
        self._pre = _PreHook(self)
        self._post = _PostHook(self)
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Register the hooks; does nothing if they are."""
        module = self._module()
        if not self._handles and module is not None:
            self._handles = [
                module.register_forward_pre_hook(self._pre, with_kwargs="input" in self.kinds),
                module.register_forward_hook(self._post),
            ]

    def remove(self) -> None:
        """Remove the hooks; does nothing if they are not there."""
        while self._handles:
            self._handles.pop().remove()

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are on the module."""
        return bool(self._handles)

    def begin(self) -> Call | None:
        """Note that a call begins, and return it if it is recorded."""
        stack = self.calls.stack
        coordinates = self.sink.clock.here() if self.sink.is_active and not _is_traced() else None
        if coordinates is None or torch._C._current_graph_task_id() != -1:  # the latter: activation checkpointing computes it again
            stack.append(None)
            return None
        if stack and (stack[-1] is None or stack[-1].coordinates is not coordinates):
            stack.clear()  # left behind by a forward that raised
        number = coordinates.calls.get(self.name, 0)
        coordinates.calls[self.name] = number + 1
        self.sink.num_calls[self.name] = self.sink.num_calls.get(self.name, 0) + 1
        call = Call(coordinates, number, self.sink.clock.step, torch._C._autograd._get_sequence_nr())
        stack.append(call)
        return call

    def watch(self, leaf: str, output: torch.Tensor, call: Call) -> None:
        """Have the gradient of an output captured when it arrives."""
        before = self.watches.get(leaf)
        if before is not None and before.coordinates is not call.coordinates:
            before.forget(output)
        self.watches[leaf] = _Watch(self, leaf, output, call)


def _is_traced() -> bool:
    """Say whether the model is being compiled, exported or traced instead of run."""
    return torch.compiler.is_compiling() or is_tracing()


class _PreHook(_InertCopy):
    __slots__ = ("_hooks",)

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        hooks = self._hooks
        call = hooks.begin()
        if call is None:
            return
        if "input" in hooks.kinds:
            for leaf, tensor in argument_leaves(args, kwargs or {}):
                hooks.sink.put(hooks.name, "input", leaf, tensor, call)
        if "parameter" in hooks.kinds:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    hooks.sink.put(hooks.name, "parameter", name, parameter, call)


class _PostHook(_InertCopy):
    __slots__ = ("_hooks",)

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        hooks = self._hooks
        stack = hooks.calls.stack
        call = stack.pop() if stack else None
        if call is None:
            return
        leaves = [("", output)] if isinstance(output, torch.Tensor) else list(tensor_leaves(output))
        if "activation" in hooks.kinds:
            for leaf, tensor in leaves:
                hooks.sink.put(hooks.name, "activation", leaf, tensor, call)
            if not leaves:
                hooks.sink.skip_value(hooks.name, "activation", call, f"the module returned a {type(output).__name__} without tensors")
        if "gradient" in hooks.kinds and torch.is_grad_enabled():
            for leaf, tensor in leaves:
                if tensor.requires_grad:
                    hooks.watch(leaf, tensor, call)


class _Watch:
    """Tensor hooks that capture the gradient of one output of one call.

    An output that is a view needs care: once it is edited in place, a hook on it is lost, or sees a part of the gradient. If its base was made inside the
    call, the base has a hook too, and the gradient of the base, looked at as the view, is taken when the view has been edited (and only then: the
    base may have other uses). If its base comes from outside, an edit is a gap with its reason.
    """

    __slots__ = ("_backward", "_base_view", "_call", "_handles", "_hooks", "_leaf", "_target", "_version", "coordinates")

    __torch_unserializable__ = True  # a tensor with this hook can be saved; the hook is left out without a warning

    def __init__(self, hooks: LayerHooks, leaf: str, output: torch.Tensor, call: Call) -> None:
        self.coordinates = call.coordinates
        self._hooks = hooks
        self._leaf = leaf
        self._call = call
        self._backward = 0
        self._target = weakref.ref(output)
        self._version: _Version | None = None
        self._base_view: tuple[Any, ...] | None = None
        self._handles = [output.register_hook(self)]
        base = output._base
        if base is not None:
            self._version = _Version(output)
            if base.grad_fn is not None and base.grad_fn._sequence_nr() >= call.sequence_nr and base.dtype == output.dtype:
                offset = int(output.storage_offset()) - int(base.storage_offset())
                self._base_view = (base.size(), base.stride(), output.size(), output.stride(), offset)
                self._handles.append(base.register_hook(self._of_base))

    def forget(self, output: torch.Tensor) -> None:
        """Remove the hooks if they sit on that very output, which then returns from call to call and would collect hooks."""
        if self._target() is output:
            for handle in self._handles:
                handle.remove()

    def __call__(self, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # so it is called under another tool's full backward hook when no gradient arrives
            return
        if self._version is None or self._version.is_unchanged:
            self._put(gradient.detach())
        elif self._base_view is None:
            reason = "the output is a view of a tensor made outside the layer, and was edited in place"
            self._hooks.sink.skip_value(self._hooks.name, "gradient", self._call, reason)

    def _of_base(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self._version is not None and self._base_view is not None and not self._version.is_unchanged:
            self._put(_as_view(gradient.detach(), *self._base_view))

    def _put(self, gradient: torch.Tensor) -> None:
        backward = self._backward
        self._backward += 1
        self._hooks.sink.put(self._hooks.name, "gradient", self._leaf, gradient, self._call, backward)


class _Version:
    """Tells whether a tensor has been edited in place, without keeping its memory."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counter = tensor.detach()  # shares the version counter, …
        self._counter.data = _nothing(tensor.device)  # … and from now on nothing else
        self._version = tensor._version

    @property
    def is_unchanged(self) -> bool:
        """Whether no in-place operation has touched the tensor, its base or another view of it."""
        return self._counter._version == self._version


@functools.cache
def _nothing(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False), _disable_current_modes():
        return torch.empty(0, device=device)


def _as_view(
    gradient: torch.Tensor, base_size: torch.Size, base_stride: tuple[int, ...], size: torch.Size, stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Look at the gradient of a base as at the gradient of its view."""
    if gradient.stride() != base_stride:
        laid_out = torch.empty_strided(base_size, base_stride, dtype=gradient.dtype, device=gradient.device)
        gradient = laid_out.copy_(gradient)
    return gradient.as_strided(size, stride, int(gradient.storage_offset()) + offset)


class _TickHook(_InertCopy):
    """Moves the automatic clock when the root module is called."""

    __slots__ = ("_hooks",)

    def __init__(self, hooks: ModelHooks) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        if torch._C._current_graph_task_id() == -1 and not _is_traced():
            self._hooks.tick()


class ModelHooks:
    """All hooks of a recording. On batches that the schedule leaves out there are none on the layers.

    Parameters
    ----------
    model : torch.nn.Module
        The root, referred to weakly.
    layers : iterable of Layer
        What is recorded.
    kinds : iterable of str
        What to capture of each.
    sink : Sink
        Where it goes.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], kinds: Iterable[str], sink: Sink) -> None:
        self._model = weakref.ref(model)
        self._sink = sink
        self._layers = [LayerHooks(layer, kinds, sink) for layer in layers]
        self._tick_hook = _TickHook(self)
        self._tick_handle: RemovableHandle | None = None
        self._step_handle = _count_steps(model, sink.clock)

    def update(self) -> None:
        """Register and remove hooks as the clock's position asks."""
        clock = self._sink.clock
        self._install(wanted=clock.may_record)
        if not clock.is_automatic and self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        elif clock.is_automatic and self._tick_handle is None:
            model = self._model()
            if model is not None:
                self._tick_handle = model.register_forward_pre_hook(self._tick_hook, prepend=True)

    def tick(self) -> None:
        """Go on to the next batch: the root module is being called."""
        clock = self._sink.clock
        clock.tick()
        self._install(wanted=clock.here() is not None)

    def _install(self, *, wanted: bool) -> None:
        for layer in self._layers:
            if wanted or (layer.name == "" and self._sink.clock.is_automatic):  # torch has listed the root's hooks before the clock ticks
                layer.install()
            else:
                layer.remove()

    @property
    def is_installed(self) -> bool:
        """Whether any layer has hooks."""
        return any(layer.is_installed for layer in self._layers)

    def remove(self) -> None:
        """Remove every hook, for good."""
        self._sink.is_active = False
        for layer in self._layers:
            layer.remove()
        if self._tick_handle is not None:
            self._tick_handle.remove()
            self._tick_handle = None
        self._step_handle.remove()


def _count_steps(model: nn.Module, clock: Clock) -> RemovableHandle:
    """Count the steps of optimizers that hold a parameter of the model."""
    parameters = {id(parameter) for parameter in model.parameters()}
    concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def count(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        if optimizer not in concerned:
            concerned[optimizer] = any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
        clock.step += concerned[optimizer]

    return register_optimizer_step_post_hook(count)
