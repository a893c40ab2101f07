"""The fused kernel of ``torch.nn.TransformerEncoderLayer``, which torch does not use while the layer or anything in it has a hook."""

from __future__ import annotations

import warnings
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from hookstore.clock import Clock
from hookstore.errors import CaptureWarning
from hookstore.hooks import InertCopy, is_traced
from hookstore.wrappers import NamedModule


class FastPathHook(InertCopy):
    """Warns once when hooks have made an encoder layer take another way than it would have taken without.

    It is a forward pre-hook for the layers that `disturbed_layers` returns.

    Attributes
    ----------
    has_warned : bool
        Whether it has: it need not be registered again.

    Parameters
    ----------
    names : list of str
        What those layers are called.
    clock : Clock
        Where training stands.
    """

    __slots__ = ("_clock", "_names", "has_warned")

    def __init__(self, names: list[str], clock: Clock) -> None:
        self._names = names
        self._clock = clock
        self.has_warned = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Warn if this call would have taken the fast path."""
        if torch.compiler.is_compiling() or self.has_warned or is_traced() or not _would_be_taken(module, args) or not _has_hooks(module):
            return
        self.has_warned = True
        here = self._clock.here()
        where = "a batch that is not recorded" if here is None else f"{here.phase} epoch {here.epoch}, batch {here.batch}"
        shown = ", ".join(map(repr, self._names[:3])) + (f" and {len(self._names) - 3} more" if len(self._names) > 3 else "")
        warnings.warn(
            f"while layers in it are recorded, TransformerEncoderLayer {shown} cannot take its fused fast path in evaluation, first in {where}: "
            "its outputs differ in rounding from those of the model without hooks (by 1e-6 of the largest value in float32, 2e-2 in bfloat16). Record layers "
            "outside of it, or call torch.backends.mha.set_fastpath_enabled(False) to compute the same with and without",
            CaptureWarning,
            stacklevel=2,
        )


def disturbed_layers(modules: list[NamedModule], hooked: Container[int]) -> list[NamedModule]:
    """Return the encoder layers that have a fast path, and hooks.

    Parameters
    ----------
    modules : list of NamedModule
        All modules.
    hooked : container of int
        Identities of the modules that get hooks.
    """
    return [
        found
        for found in modules
        if isinstance(found.module, nn.TransformerEncoderLayer)
        and _has_fast_path(found.module)
        and any(id(part) in hooked for part in found.module.modules())
    ]


def _has_fast_path(layer: nn.TransformerEncoderLayer) -> bool:
    """Say whether torch has a kernel for a layer that is made like this (as ``TransformerEncoderLayer.forward`` asks, in torch 2.6 – 2.14)."""
    attention = layer.self_attn
    return bool(
        isinstance(attention, nn.MultiheadAttention)
        and attention.batch_first
        and attention.in_proj_bias is not None
        and attention._qkv_same_embed_dim
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu
        and layer.norm1.eps == layer.norm2.eps
    )


def _would_be_taken(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Say whether this call would use the kernel if there were no hooks."""
    if layer.training or torch.is_autocast_enabled() or not torch.backends.mha.get_fastpath_enabled():
        return False
    inputs = args[0] if args else None
    if isinstance(inputs, torch.Tensor) and inputs.dim() != 3:
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(parameter.requires_grad for parameter in layer.parameters()) and not getattr(inputs, "requires_grad", False)


def _has_hooks(layer: nn.Module) -> bool:
    """Say whether there are hooks by now: those on the layer itself are still called when the clock has just removed them."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
