"""Tensors that are not one block of numbers: sparse, nested, quantized, or spread over processes. They are taken apart into plain ones."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hookstore.structure import PARTS, TENSOR, Node

_COMPRESSED = {getattr(torch, name): name for name in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")}
_STORED_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32)


class Apart(NamedTuple):
    """A tensor that was taken apart.

    Attributes
    ----------
    tensor : Node
        What it is, for the structure text.
    parts : list of (str, torch.Tensor)
        Plain tensors, each with its name; "" for one that stands for the whole.
    """

    tensor: Node
    parts: list[tuple[str, torch.Tensor]]


def take_apart(tensor: torch.Tensor) -> Apart | None:
    """Take a tensor apart, without computing anything that its owner has not computed.

    Returns
    -------
    Apart or None
        ``None`` for a plain tensor, and for one of a kind that is not stored.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor):
        return None
    if torch._C._len_torch_dispatch_stack() > 0:
        with _disable_current_modes():  # the user's dispatch modes must not see what we do
            return _take_apart(tensor)
    return _take_apart(tensor)


def _take_apart(tensor: torch.Tensor) -> Apart | None:
    with torch.no_grad():
        if type(tensor) is not torch.Tensor:
            local = _local(tensor)
            if local is not None:
                return local
        if tensor.is_nested:
            return _nested(tensor)
        if tensor.is_meta:
            return None
        if tensor.layout == torch.sparse_coo:
            bare = tensor.detach()
            return _as("sparse_coo", [bare._indices(), bare._values(), _shape(bare)], coalesced=bare.is_coalesced())
        if tensor.layout in _COMPRESSED:
            return _compressed(tensor.detach(), _COMPRESSED[tensor.layout])
        if tensor.is_quantized and tensor.dtype in _STORED_QUANTIZED:
            return _quantized(tensor.detach())
        return None


def _as(kind: str, parts: list[torch.Tensor], **facts: Any) -> Apart:
    return Apart((kind, facts), list(zip(PARTS[kind], parts, strict=True)))


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor(tuple(tensor.shape), dtype=torch.int64, device="cpu")


def _compressed(tensor: torch.Tensor, kind: str) -> Apart:
    by_row = kind in ("sparse_csr", "sparse_bsr")
    pointers = tensor.crow_indices() if by_row else tensor.ccol_indices()
    indices = tensor.col_indices() if by_row else tensor.row_indices()
    return _as(kind, [pointers, indices, tensor.values(), _shape(tensor)])


def _nested(tensor: torch.Tensor) -> Apart | None:
    if tensor.layout == torch.strided:
        bare: Any = tensor.detach()
        if not bare.is_contiguous():
            bare = bare.contiguous()
        return _as("nested", [bare.values(), bare._nested_tensor_size()])
    jagged: Any = tensor
    if tensor.layout != torch.jagged or not all(hasattr(jagged, name) for name in ("_values", "_offsets", "_lengths", "_ragged_idx")):
        return None
    parts = [jagged._values.detach(), jagged._offsets]
    if jagged._lengths is None:
        return _as("jagged", parts, dim=int(jagged._ragged_idx))
    return _as("jagged_with_lengths", [*parts, jagged._lengths], dim=int(jagged._ragged_idx))


def _quantized(tensor: torch.Tensor) -> Apart:
    scheme = tensor.qscheme()
    if scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        scale, zero_point = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return _as("quantized", [tensor.int_repr(), scale, zero_point], dtype=str(tensor.dtype)[6:], axis=tensor.q_per_channel_axis())
    scale = torch.tensor(tensor.q_scale(), dtype=torch.float64, device="cpu")
    zero_point = torch.tensor(tensor.q_zero_point(), dtype=torch.int64, device="cpu")
    return _as("quantized", [tensor.int_repr(), scale, zero_point], dtype=str(tensor.dtype)[6:], axis=None)


def _local(tensor: Any) -> Apart | None:
    """Take what this process holds of a tensor that is spread over several, and wait for one that is still on its way."""
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        mesh = tensor.device_mesh
        facts = {"placements": list(map(str, tensor.placements)), "mesh": list(mesh.shape), "names": list(mesh.mesh_dim_names or ())}
        local = tensor.to_local().detach()
        inner = _take_apart(local) or Apart(TENSOR, [("", local)])
        if inner.tensor != TENSOR and inner.tensor[0] == "dtensor":
            return None
        return Apart(("dtensor", facts, inner.tensor), inner.parts)
    if collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor):
        arrived = tensor.trigger_wait().detach()
        return _take_apart(arrived) or Apart(TENSOR, [("", arrived)])
    return None
