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
        (tensor, _copy(tensor)) for tensor in {id(one): one for _, own, _ in buffers for one in own.values()}.values() if tensor is not None
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
        for tensor, copy in copies:
            _put_back(tensor, copy)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Give a tensor its values again; one that has them is not touched."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.shape != copy.shape:
            tensor.detach().resize_(copy.shape)
        if not _is_same(tensor.detach(), copy):
            tensor.detach().copy_(copy)


def _is_same(tensor: Any, copy: torch.Tensor) -> bool:
    """Say whether two tensors have the same values; NaN counts as another one."""
    if tensor.is_meta:
        return True
    try:
        return torch.equal(tensor, copy)
    except (RuntimeError, NotImplementedError):  # of a dtype or a layout that cannot be compared
        return False
