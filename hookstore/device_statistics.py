"""Statistics of tensors on the device that they are on, without waiting for it.

The same sums as in `hookstore.statistics`; what remains to be done with a few numbers of each tensor is done on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from hookstore.statistics import LARGEST, SMALLEST, Records, Sums, of_sums

_PIECE = 2**22  # elements: 32 MiB of float64


def compute(tensor: torch.Tensor) -> torch.Tensor:
    """Compute what statistics are made of; returns before the device has, and never waits for it.

    Parameters
    ----------
    tensor : torch.Tensor
        On a device that has float64; of any dtype that is stored, any shape and strides, conjugated or negated lazily or not.

    Returns
    -------
    torch.Tensor
        [9] of float64 on the same device, for `to_records`. Two float64 pieces of at most 2**22 elements are in memory besides at a time.

    References
    ----------
    Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return torch.zeros(len(Sums._fields), dtype=torch.float64, device=tensor.device)
    scale = _scale(tensor) if tensor.dtype in (torch.float64, torch.complex128) else None
    parts = [_parts_of(_numbers(piece), scale) for piece in _pieces(tensor)]
    *counts_and_ends, shift, residual, variance = parts[0] if len(parts) == 1 else _joined(parts)
    return torch.stack([*counts_and_ends, shift + residual, variance, torch.ones_like(variance) if scale is None else scale])


def to_records(vectors: npt.NDArray[np.float64]) -> Records:
    """Turn what `compute` has given, once it is on the host, into statistics.

    Parameters
    ----------
    vectors : numpy.ndarray
        [num_tensors, 9] of float64.

    Returns
    -------
    numpy.ndarray
        [num_tensors] of ``STATISTICS_DTYPE``.
    """
    return of_sums(Sums._make(vectors.T))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Go through all elements in pieces of one dimension; what is copied for that is one piece at a time."""
    tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))  # as it lies in memory, mostly
    if tensor.numel() <= _PIECE or tensor.is_contiguous():
        yield from tensor.reshape(-1).split(_PIECE)
        return
    num_inner = tensor.numel() // len(tensor)
    for part in tensor.split(max(_PIECE // num_inner, 1)):
        yield from _pieces(part if len(part) > 1 else part[0])


def _numbers(piece: torch.Tensor) -> torch.Tensor:
    """Return a float64 copy, of complex numbers their moduli."""
    if not piece.is_complex():
        return piece.to(torch.float64, copy=True)
    real, imaginary = piece.real.to(torch.float64), piece.imag.to(torch.float64)
    return torch.hypot(real, imaginary).masked_fill_((real != real) | (imaginary != imaginary), math.nan)  # noqa: PLR0124 (that of (inf, NaN) is infinite)


def _scale(tensor: torch.Tensor) -> torch.Tensor:
    """Return a power of 2 that brings numbers near 1 whose squares could leave float64; otherwise 1."""
    moduli = (_numbers(piece).abs_() for piece in _pieces(tensor))
    absmax = torch.stack([found.masked_fill_(~(found < math.inf), 0.0).amax() for found in moduli]).amax()
    is_extreme = (absmax > LARGEST) | ((absmax < SMALLEST) & (absmax > 0))
    exponents = torch.frexp(absmax).exponent.clamp(-1000, 1000).to(torch.float64)
    return torch.exp2(-exponents).masked_fill_(~is_extreme, 1.0)


def _parts_of(values: torch.Tensor, scale: torch.Tensor | None) -> list[torch.Tensor]:
    """Compute the parts of a piece, as `hookstore.statistics` does, and leave nothing sensible in ``values``.

    Every operation is a launch that the training thread makes: there are no more than needed.
    """
    is_finite = values.abs() < math.inf
    gaps = ~is_finite
    num = is_finite.sum(dtype=torch.float64)
    num_nan = (values != values).sum(dtype=torch.float64)  # noqa: PLR0124 (NaN alone differs from itself)
    num_zeros = (values == 0).sum(dtype=torch.float64)
    lowest, highest = values.masked_fill_(gaps, math.inf).amin(), values.masked_fill_(gaps, -math.inf).amax()
    values.masked_fill_(gaps, 0.0)
    if scale is not None:
        values *= scale
    divisor = num.clamp(min=1)
    shift = values.sum() / divisor
    values.sub_(shift).masked_fill_(gaps, 0.0)
    residual = values.sum() / divisor
    variance = (values.square_().sum() / divisor - residual * residual).clamp(min=0)
    return [num, num_nan, values.numel() - num - num_nan, num_zeros, lowest, highest, shift, residual, variance]


def _joined(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Make one of the parts of a tensor's pieces."""
    num, num_nan, num_inf, num_zeros, lowest, highest, shifts, residuals, variances = map(torch.stack, zip(*parts, strict=True))
    total = num.sum()
    divisor = total.clamp(min=1)
    shift = (num * shifts).sum() / divisor
    distances = (shifts - shift) + residuals
    residual = (num * distances).sum() / divisor
    variance = (num * (variances + (distances - residual).square())).sum() / divisor
    return [total, num_nan.sum(), num_inf.sum(), num_zeros.sum(), lowest.amin(), highest.amax(), shift, residual, variance]
