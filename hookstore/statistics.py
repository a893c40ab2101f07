"""Statistics of tensors, in NumPy alone: the writer computes them of what it stores, reading computes them where they were not stored.

Everything is computed in float64. Tensors are taken in blocks that stay in the cache, each with few NumPy calls that let other threads run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from hookstore.errors import OptionError
from hookstore.format import DTYPES

_SCALED = ("mean", "std", "min", "max", "absmax", "l2")
STATISTICS_DTYPE = np.dtype([(name, "<f8") for name in (*_SCALED, "zeros")] + [("nan", "<i8"), ("inf", "<i8")])
NO_STATISTICS = np.array((*(np.nan,) * 7, -1, -1), STATISTICS_DTYPE)[()]

_BLOCK = 65_536  # elements: half a megabyte of float64, which a core's own cache holds beside the masks
_SHORT_ROW = 128  # elements: up to here going over a row costs more than its elements, so that rows are laid side by side
LARGEST, SMALLEST = 2.0**480, 2.0**-400  # of what lies between, squares can be summed without scaling

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]
Records = np.ndarray  # of STATISTICS_DTYPE


class Sums(NamedTuple):
    """What statistics of tensors are made of: float64, a number for each tensor. All are 0 of an empty one."""

    num: Floats  # finite elements
    nan: Floats
    inf: Floats
    zeros: Floats
    min: Floats
    max: Floats
    mean: Floats  # times the scale, as is the variance
    variance: Floats
    scale: Floats  # a power of 2, where squares would leave float64 without


class _Parts(NamedTuple):
    """What is known of parts of tensors. The mean is shift + residual: two numbers hold more digits than one."""

    num: Floats
    nan: Floats
    inf: Floats
    zeros: Floats
    min: Floats
    max: Floats
    shift: Floats
    residual: Floats
    variance: Floats


class Statistics(NamedTuple):
    """Statistics of one tensor.

    All but ``zeros``, ``nan`` and ``inf`` are over the finite elements x alone. Booleans count as 0 and 1, complex numbers as their moduli; integers
    are rounded to float64. A complex element is NaN where either part is, otherwise infinite where either part is or its modulus exceeds float64.

    Attributes
    ----------
    mean : float or None
        Σx / N. Error at most 1e-13 of the mean of |x|.
    std : float or None
        √(Σ(x - mean)² / N), of the population. Error at most 1e-12 of it, and exactly 0 where all are equal.
    min, max : float or None
        Least and greatest x, exact (complex: within 1e-15 of it).
    absmax : float or None
        Greatest |x|, exact likewise.
    l2 : float
        √(Σx²); 0 where there is no x. Error at most 1e-12 of it; infinite where it exceeds float64, give or take that.
    zeros : float or None
        Share of elements that equal 0 among all, those that are not finite included; ``None`` for an empty tensor.
    nan, inf : int
        How many elements are NaN, and how many are infinite.

    Notes
    -----
    The others are ``None`` where no element is finite. The bounds hold for up to 2**40 elements.

    References
    ----------
    Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979: how blocks are joined.
    """

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    absmax: float | None
    l2: float
    zeros: float | None
    nan: int
    inf: int

    @classmethod
    def of_record(cls, record: np.void) -> Statistics:
        """Make one of a record of ``STATISTICS_DTYPE``.

        Raises
        ------
        ValueError
            If the record says that there are no statistics.
        """
        if record["nan"] < 0:
            raise ValueError("the record holds no statistics (its count of NaN is -1); compute them of the tensor with of_tensor()")
        return cls._make(None if value != value else value for value in record.item())  # noqa: PLR0124 (NaN alone differs from itself)


def of_rows(rows: Array) -> Records:
    """Compute statistics of each row, many rows at once.

    Parameters
    ----------
    rows : numpy.ndarray
        [num_tensors, num_elements] with any strides; bool, integers, floats (those of ml_dtypes too) or complex.

    Returns
    -------
    numpy.ndarray
        [num_tensors] of ``STATISTICS_DTYPE``.

    Raises
    ------
    OptionError
        If ``rows`` has other than two dimensions or elements that are no numbers.
    """
    _check_numbers(rows, "rows")
    if rows.ndim != 2:
        raise OptionError(f"rows: expected an array of two dimensions, a row for each tensor, got shape {rows.shape}", option="rows")
    num_rows, num_elements = rows.shape
    if num_elements == 0:
        return of_sums(Sums._make(np.zeros((len(Sums._fields), num_rows))))
    records = np.empty(num_rows, STATISTICS_DTYPE)
    step = max(_BLOCK // num_elements, 1)
    with np.errstate(all="ignore"):
        for start in range(0, num_rows, step):
            block = rows[start : start + step]
            parts = _of_block if num_elements <= _BLOCK else _of_long
            records[start : start + step] = of_sums(_sums(functools.partial(parts, block)))
    return records


def of_tensor(array: Array) -> np.void:
    """Compute statistics of one tensor.

    Parameters
    ----------
    array : numpy.ndarray
        Of any shape and strides, with elements as in `of_rows`. Nothing larger than a megabyte is made of it.

    Returns
    -------
    numpy.void
        A record of ``STATISTICS_DTYPE``.

    Raises
    ------
    OptionError
        If the elements are no numbers.
    """
    if array.size <= _BLOCK:
        return cast("np.void", of_rows(array.reshape(1, -1))[0])
    _check_numbers(array, "array")
    with np.errstate(all="ignore"):
        return cast("np.void", of_sums(_sums(functools.partial(_of_long, array)))[0])


def of_sums(sums: Sums) -> Records:
    """Make statistics of the sums over whole tensors, [num_tensors] each."""
    records = np.empty(len(sums.num), STATISTICS_DTYPE)
    with np.errstate(all="ignore"):
        num, lowest, highest = (np.where(sums.num > 0, numbers, np.nan) for numbers in (sums.num, sums.min, sums.max))
        records["mean"] = np.minimum(np.maximum(sums.mean / sums.scale, lowest), highest)
        records["std"] = np.where(sums.num > 0, np.sqrt(sums.variance) / sums.scale, np.nan)
        records["min"], records["max"] = lowest, highest
        records["absmax"] = np.maximum(-lowest, highest)
        records["l2"] = np.where(sums.num > 0, np.sqrt(num * (sums.variance + sums.mean * sums.mean)) / sums.scale, 0.0)
        records["zeros"] = sums.zeros / (sums.num + sums.nan + sums.inf)  # NaN of an empty tensor
        records["nan"], records["inf"] = sums.nan, sums.inf
    return records


def divided(records: Records, scale: float | Floats) -> Records:
    """Return the statistics of tensors divided by a scale, made of those of the tensors.

    Parameters
    ----------
    records : numpy.ndarray
        Of ``STATISTICS_DTYPE``; none where there are no statistics.
    scale : float or numpy.ndarray
        Positive, one or one for each record; NaN where there is none, which is as 1.

    Returns
    -------
    numpy.ndarray
        New records.
    """
    quotients: Records = records.copy()
    scale = np.where(np.isnan(scale), 1.0, scale)
    with np.errstate(all="ignore"):
        for name in _SCALED:
            quotients[name] = records[name] / scale
    return quotients


def as_numbers(bits: Array, dtype_name: str) -> Array:
    """Turn stored bits into numbers that can be computed with.

    Parameters
    ----------
    bits : numpy.ndarray
        Unsigned integers of the width of an element, or the numbers themselves.
    dtype_name : str
        Name of the torch dtype, a key of ``DTYPES``.

    Returns
    -------
    numpy.ndarray
        A view in the NumPy or ml_dtypes type; a copy as complex64 of complex32, for which there is none.

    Raises
    ------
    OptionError
        If there is no such dtype, or its elements have another width.
    """
    stored = DTYPES.get(dtype_name)
    if stored is None:
        raise OptionError(f"dtype_name: expected one of {', '.join(DTYPES)}, got {dtype_name!r}", option="dtype_name")
    if bits.dtype.itemsize != stored.itemsize and not (stored.numpy is None and bits.dtype == np.complex64):
        raise OptionError(f"bits: expected elements of {stored.itemsize} bytes for {dtype_name}, got {bits.dtype}", option="bits")
    if stored.numpy is None:
        return bits if bits.dtype == np.complex64 else _of_complex32(bits)
    return bits.view(np.dtype(getattr(ml_dtypes, stored.numpy, None) or stored.numpy))


def _of_complex32(bits: Array) -> Array:
    words = bits.view(np.uint32)
    numbers = np.empty(bits.shape, np.complex64)
    with np.errstate(invalid="ignore"):  # a NaN that signals
        numbers.real = words.astype(np.uint16).view(np.float16)  # the lower half comes first in memory
        numbers.imag = (words >> np.uint32(16)).astype(np.uint16).view(np.float16)
    return numbers


def _check_numbers(array: Array, name: str) -> None:
    if array.dtype.kind not in "biufc" and not hasattr(ml_dtypes, array.dtype.name):
        raise OptionError(f"{name}: expected bool, integers, floats or complex numbers, got dtype {array.dtype}", option=name)


def _sums(parts_at: Callable[[Floats | None], _Parts]) -> Sums:
    """Compute sums over tensors, and once more with a scale where there are numbers so large or small that their squares leave float64."""
    parts = parts_at(None)
    absmax = np.maximum(-parts.min, parts.max)
    is_extreme = (parts.num > 0) & ((absmax > LARGEST) | ((absmax < SMALLEST) & (absmax > 0)))
    if not is_extreme.any():
        return Sums(*parts[:6], parts.shift + parts.residual, parts.variance, np.ones(len(absmax)))
    scales = np.ldexp(1.0, np.where(is_extreme, -np.clip(np.frexp(absmax)[1], -1000, 1000), 0))
    scaled = parts_at(scales)  # its least and its zeros are not those of the tensor where the smallest are lost
    return Sums(*parts[:6], scaled.shift + scaled.residual, scaled.variance, scales)


def _of_block(rows: Array, scales: Floats | None) -> _Parts:
    """Compute the parts of rows that fit in a block together."""
    values = _buffer(*rows.shape)
    _load(rows, values, scales)
    return _parts_of(values)


def _of_long(array: Array, scales: Floats | None) -> _Parts:
    """Compute the parts of a tensor that is longer than a block."""
    values = _buffer(1, _BLOCK)
    found = []
    for piece in _pieces(array):
        block = values[:, : piece.size]
        _load(piece[None], block, scales)
        found.append(_parts_of(block))
    return _joined(_Parts._make(map(np.concatenate, zip(*found, strict=True))))


def _joined(parts: _Parts) -> _Parts:
    """Make one of the parts of one tensor."""
    num = parts.num.sum(keepdims=True)
    divisor = np.maximum(num, 1)
    shift = np.sum(parts.num * parts.shift) / divisor
    distances = (parts.shift - shift) + parts.residual
    residual = np.sum(parts.num * distances) / divisor
    variance = np.sum(parts.num * (parts.variance + (distances - residual) ** 2)) / divisor
    num_nan, num_inf, num_zeros = (count.sum(keepdims=True) for count in (parts.nan, parts.inf, parts.zeros))
    lowest, highest = parts.min.min(keepdims=True), parts.max.max(keepdims=True)
    return _Parts(num, num_nan, num_inf, num_zeros, lowest, highest, shift, residual, variance)


def _buffer(num_rows: int, num_elements: int) -> Floats:
    if num_elements <= _SHORT_ROW:
        return np.empty((num_elements, num_rows)).T
    return np.empty((num_rows, num_elements))


def _pieces(array: Array) -> Iterator[Array]:
    """Go through all elements in the order in which they lie in memory, a block at a time."""
    if array.flags.forc:
        flat = array.reshape(-1, order="A")
        for start in range(0, flat.size, _BLOCK):
            yield flat[start : start + _BLOCK]
        return
    with np.nditer(array, flags=["external_loop", "buffered"], order="K", buffersize=_BLOCK) as blocks:
        yield from blocks


def _load(rows: Array, values: Floats, scales: Floats | None) -> None:
    """Write rows as float64 into ``values``: moduli of complex numbers, everything times the scale of its row."""
    if rows.dtype.kind == "c":
        np.abs(rows.astype(np.complex128), out=values)
        np.copyto(values, np.nan, where=np.isnan(rows))  # the modulus of (inf, NaN) is infinite
    elif rows.dtype.itemsize == 1 and rows.dtype.kind not in "biu":
        np.take(_table(rows.dtype), rows.view(np.uint8), out=values, mode="clip")  # many times as fast as the cast
    else:
        np.copyto(values, rows, casting="unsafe")
    if scales is not None:
        values *= scales[:, None]


@functools.cache
def _table(dtype: np.dtype[np.generic]) -> Floats:
    """Return all numbers of a float8 type by their bits."""
    numbers: Floats = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    return numbers


def _parts_of(values: Floats) -> _Parts:
    """Compute what is known of each row, and leave nothing sensible in ``values``."""
    num = np.full(len(values), float(values.shape[1]))
    num_nan = num_inf = np.zeros(len(values))
    lowest, highest = values.min(axis=-1), values.max(axis=-1)
    gaps = None
    if not (np.isfinite(lowest).all() and np.isfinite(highest).all()):  # NaN reaches both
        gaps = ~np.isfinite(values)
        num_nan, num_gaps = _count(np.isnan(values)), _count(gaps)
        num -= num_gaps
        num_inf = num_gaps - num_nan
        lowest, highest = _close_gaps(values, gaps)
    num_zeros = _count(values == 0) - num_nan - num_inf  # gaps are filled with zeros
    divisor = np.maximum(num, 1)
    shift = values.sum(axis=-1) / divisor
    values -= shift[:, None]
    if gaps is not None:
        np.copyto(values, 0.0, where=gaps)
    residual = values.sum(axis=-1) / divisor
    variance = np.einsum("ij,ij->i", values, values) / divisor - residual * residual
    return _Parts(num, num_nan, num_inf, num_zeros, lowest, highest, shift, residual, np.maximum(variance, 0.0))


def _close_gaps(values: Floats, gaps: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Put zeros where there is no finite number, and return the least and the greatest of those of each row (∞ and -∞ where there are none)."""
    np.copyto(values, np.inf, where=gaps)
    lowest = values.min(axis=-1)
    np.copyto(values, -np.inf, where=gaps)
    highest = values.max(axis=-1)
    np.copyto(values, 0.0, where=gaps)
    return lowest, highest


def _count(mask: npt.NDArray[np.bool_]) -> Floats:
    """Count what is true in each row."""
    if len(mask) == 1:
        return np.array([float(np.count_nonzero(mask))])
    counted = mask.view(np.uint8) if mask.shape[1] <= _SHORT_ROW else np.bitwise_count(np.packbits(mask, axis=-1))
    total: Floats = np.add.reduce(counted, axis=-1, dtype=np.float64)
    return total
