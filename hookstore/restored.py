"""What a forward changes beside its result, put back afterwards: buffers and random number generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


@contextlib.contextmanager
def restored(models: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back what a forward inside a ``with`` statement changes, also when it raises.

    Put back are buffers, those that are registered or replaced meanwhile included, and the random number generators of torch (of the CPU, and of the CUDA
    devices that models and tensors are on), Python and NumPy. What modules keep in other attributes, and parameters that a forward edits, stay as it leaves
    them.

    Parameters
    ----------
    models : iterable of torch.nn.Module
        What is called.
    tensors : iterable of torch.Tensor
        What it is called with.
    """
    modules = list({id(module): module for model in models for module in model.modules()}.values())
    held = [*tensors, *(tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values()))]
    devices = sorted({tensor.device.index or 0 for tensor in held if tensor is not None and tensor.is_cuda})
    python_state, numpy_state = random.getstate(), np.random.get_state()  # whatever the forward uses
    buffers = [(module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module in modules]
    copies = [
        (tensor, tensor.detach(), _copy(tensor))
        for tensor in {id(one): one for _, own, _ in buffers for one in own.values()}.values()
        if tensor is not None
    ]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, own, transient in buffers:
            module._buffers.clear()
            module._buffers.update(own)
            module._non_persistent_buffers_set = transient
        for tensor, alias, copy in copies:
            _put_back(tensor, alias, copy)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _put_back(tensor: torch.Tensor, alias: torch.Tensor, copy: torch.Tensor) -> None:
    """Give a tensor its memory, shape and values again; one that has them is not touched. The alias still has the first two."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if copy.layout == torch.sparse_coo:  # copying gives the alias parts of its own, which the tensor does not have
            tensor.data = copy
            return
        if not _is_in_place(tensor, alias):
            tensor.data = alias
        if not _is_same(alias, copy):
            _without_repeats(alias).copy_(_without_repeats(copy, alias))


def _is_in_place(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    """Say whether a tensor still is the same part of the same memory, and seen in the same way."""
    if tensor.dtype != alias.dtype or tensor.shape != alias.shape:
        return False
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta  # others cannot be asked
    return not is_plain or tensor.is_set_to(alias)


def _without_repeats(tensor: torch.Tensor, alike: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor with each place of its memory, or of another's, once: copying into what was expanded is refused."""
    alike = tensor if alike is None else alike
    if alike.layout != torch.strided:
        return tensor
    return tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in alike.stride())]


def _is_same(tensor: Any, copy: torch.Tensor) -> bool:
    """Say whether two tensors have the same values; NaN counts as another one."""
    if tensor.is_meta:
        return True
    try:
        return torch.equal(tensor, copy)
    except (RuntimeError, NotImplementedError):  # of a dtype or a layout that cannot be compared
        return False
