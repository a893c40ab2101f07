"""Tensors put together again from the parts that they were stored as: sparse, nested and quantized ones."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class SparseArray:
    """A sparse tensor.

    Attributes
    ----------
    layout : str
        ``"sparse_coo"``, ``"sparse_csr"``, ``"sparse_csc"``, ``"sparse_bsr"`` or ``"sparse_bsc"``.
    shape : tuple of int
        Shape of the dense tensor.
    parts : dict
        ``values``, and ``indices`` or the two of the compressed layouts, under the names that torch has for them.
    is_coalesced : bool
        Whether no index is there twice, as torch knows it.
    """

    layout: str
    shape: tuple[int, ...]
    parts: dict[str, Array]
    is_coalesced: bool = True

    @property
    def values(self) -> Array:
        """The elements that are stored."""
        return self.parts["values"]

    def dense(self) -> Array:
        """Return all of it; elements that are stored several times add up.

        Raises
        ------
        ValueError
            If the parts do not fit each other.
        """
        found = np.zeros(self.shape, dtype=self.values.dtype)
        try:
            if self.layout == "sparse_coo":
                self._fill(found)
            else:
                self._fill_compressed(found)
        except IndexError as error:
            raise ValueError(f"a sparse tensor of shape {self.shape} has an index outside of it") from error
        return found

    def _fill(self, found: Array) -> None:
        indices = self.parts["indices"]
        _check(bool((indices >= 0).all()), "an index is negative")
        if self.is_coalesced:
            found[tuple(indices)] = self.values
        else:
            np.add.at(found, tuple(indices), self.values)

    def _fill_compressed(self, found: Array) -> None:
        """Write blocks into a dense array: those of the layouts without blocks have one element."""
        by_row = self.layout in ("sparse_csr", "sparse_bsr")
        pointers, others = (self.parts[name] for name in (("crow_indices", "col_indices") if by_row else ("ccol_indices", "row_indices")))
        num_batch = pointers.ndim - 1
        has_blocks = self.layout in ("sparse_bsr", "sparse_bsc")
        height, width = self.values.shape[num_batch + 1 : num_batch + 3] if has_blocks else (1, 1)
        batch, (num_rows, num_columns), rest = self.shape[:num_batch], self.shape[num_batch : num_batch + 2], self.shape[num_batch + 2 :]
        grid = found.reshape(*batch, num_rows // height, height, num_columns // width, width, *rest)
        for position in np.ndindex(*batch):
            along = np.repeat(np.arange(pointers.shape[-1] - 1), np.diff(pointers[position]))
            across = others[position]
            _check(len(along) == len(across) and bool((across >= 0).all()), "an index is negative, or there are too few")
            rows, columns = (along, across) if by_row else (across, along)
            grid[position][rows, :, columns, :] = self.values[position].reshape(len(across), height, width, *rest)


class NestedArray(Sequence[Array]):
    """A nested tensor: arrays of different shapes, by position.

    Attributes
    ----------
    layout : str
        ``"strided"`` or ``"jagged"``.
    parts : dict
        ``values``, and ``sizes`` or ``offsets`` (and ``lengths``).
    """

    def __init__(self, layout: str, parts: dict[str, Array], arrays: list[Array]) -> None:
        self.layout = layout
        self.parts = parts
        self._arrays = arrays

    def __getitem__(self, position: Any) -> Any:
        """Return one array, or a list for a slice."""
        return self._arrays[position]

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Array]:
        return iter(self._arrays)

    def __repr__(self) -> str:
        return f"<hookstore.NestedArray: {len(self)} arrays, {self.parts['values'].dtype}>"


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedArray:
    """A quantized tensor.

    Attributes
    ----------
    dtype : str
        ``"quint8"``, ``"qint8"`` or ``"qint32"``.
    int_repr : numpy.ndarray
        The whole numbers that are stored.
    scale, zero_point : numpy.ndarray
        Of all, or one for each position along ``axis``.
    axis : int or None
        The dimension that has scales of its own.
    """

    dtype: str
    int_repr: Array
    scale: Array
    zero_point: Array
    axis: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return tuple(self.int_repr.shape)

    def dequantized(self) -> Array:
        """Return the numbers that it stands for, as float32."""
        shape = [1] * self.int_repr.ndim
        if self.axis is not None:
            shape[self.axis] = -1
        scale, zero_point = self.scale.astype(np.float32).reshape(shape), self.zero_point.reshape(shape)
        return np.asarray((self.int_repr - zero_point).astype(np.float32) * scale, dtype=np.float32)


def join(kind: str, facts: dict[str, Any], parts: dict[str, Array]) -> SparseArray | NestedArray | QuantizedArray | Array:
    """Put a tensor together.

    Parameters
    ----------
    kind : str
        A key of `hookstore.structure.PARTS`.
    facts : dict
        What its structure says besides.
    parts : dict of numpy.ndarray
        Its parts by name.

    Raises
    ------
    ValueError
        If the parts do not fit each other.
    """
    if kind == "texts":
        return _texts(parts["utf8"], parts["offsets"])
    if kind == "quantized":
        axis = _axis(facts, parts["int_repr"].ndim)
        return QuantizedArray(str(facts.get("dtype")), parts["int_repr"], parts["scale"], parts["zero_point"], axis)
    if kind.startswith("sparse"):
        rest = {name: part for name, part in parts.items() if name != "shape"}
        return SparseArray(kind, _shape(parts["shape"]), rest, facts.get("coalesced", True) is True)
    values = parts["values"]
    if kind == "nested":
        sizes = [tuple(line) for line in _numbers(parts["sizes"], 2)]
        ends = np.cumsum([0, *(math.prod(size) for size in sizes)])
        _check(bool(values.ndim == 1 and ends[-1] == len(values)), "the sizes do not cover the values")
        arrays = [values[start:end].reshape(size) for start, end, size in zip(ends[:-1], ends[1:], sizes, strict=True)]
        return NestedArray("strided", parts, arrays)
    offsets = _numbers(parts["offsets"], 1)
    lengths = _numbers(parts["lengths"], 1) if "lengths" in parts else [end - start for start, end in pairwise(offsets)]
    dim = facts.get("dim")
    _check(isinstance(dim, int) and 1 <= dim <= values.ndim, f"dimension {dim} cannot be the ragged one")
    assert isinstance(dim, int)
    pieces = []
    for start, length in zip(offsets[:-1], lengths, strict=True):
        _check(0 <= start <= start + length <= values.shape[dim - 1], "an offset lies outside of the values")
        pieces.append(values[(slice(None),) * (dim - 1) + (slice(start, start + length),)])
    return NestedArray("jagged", parts, pieces)


def _texts(letters: Array, offsets: Array) -> Array:
    """Return texts as an array of ``str`` objects: NumPy's own texts lose what ends in zeros."""
    ends = _numbers(offsets, 1)
    _check(letters.dtype == np.uint8 and letters.ndim == 1 and len(ends) > 0, "texts are bytes, and have an end")
    _check(ends[0] == 0 and ends[-1] == len(letters) and ends == sorted(ends), "the offsets do not cover the letters")
    contents = letters.tobytes()
    texts = np.empty(len(ends) - 1, dtype=object)
    texts[:] = [contents[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(ends)]
    texts.flags.writeable = False
    return texts


def join_torch(kind: str, facts: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor | Array:
    """Put a tensor together as torch has it; see `join`. Texts are an array, as there."""
    with warnings.catch_warnings():  # torch says of some of these kinds that they are new or old
        warnings.simplefilter("ignore")
        return _join_torch(kind, facts, parts)


def _join_torch(kind: str, facts: dict[str, Any], parts: dict[str, torch.Tensor]) -> torch.Tensor | Array:
    import torch

    if kind == "texts":
        return _texts(parts["utf8"].numpy(), parts["offsets"].numpy())
    if kind == "quantized":
        axis = _axis(facts, parts["int_repr"].ndim)
        if axis is None:
            return torch._make_per_tensor_quantized_tensor(parts["int_repr"], float(parts["scale"]), int(parts["zero_point"]))
        return torch._make_per_channel_quantized_tensor(parts["int_repr"], parts["scale"], parts["zero_point"], axis)
    if kind == "sparse_coo":
        size = _shape(parts["shape"].numpy())
        is_coalesced = facts.get("coalesced", True) is True
        return torch.sparse_coo_tensor(parts["indices"], parts["values"], size, is_coalesced=is_coalesced, check_invariants=True)
    if kind.startswith("sparse"):
        by_row = "crow_indices" in parts
        pointers, indices = (parts[name] for name in (("crow_indices", "col_indices") if by_row else ("ccol_indices", "row_indices")))
        size, layout = _shape(parts["shape"].numpy()), getattr(torch, kind)
        return torch.sparse_compressed_tensor(pointers, indices, parts["values"], size, layout=layout, check_invariants=True)
    if kind == "nested":
        sizes = [tuple(line) for line in _numbers(parts["sizes"].numpy(), 2)]
        pieces = parts["values"].split([math.prod(size) for size in sizes])
        return torch.nested.nested_tensor([piece.reshape(size) for piece, size in zip(pieces, sizes, strict=True)])
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=facts.get("dim"))


def _axis(facts: dict[str, Any], num_dims: int) -> int | None:
    axis = facts.get("axis")
    if axis is None:
        return None
    _check(isinstance(axis, int) and 0 <= axis < num_dims, f"there is no dimension {axis}")
    assert isinstance(axis, int)
    return axis


def _shape(part: Array) -> tuple[int, ...]:
    shape = tuple(_numbers(part, 1))
    _check(len(shape) <= 64 and math.prod(shape) < 2**47, f"{shape[:64]} is no shape")
    return shape


def _numbers(part: Array, num_dims: int) -> Any:
    _check(
        part.ndim == num_dims and part.dtype.kind in "iu",
        f"expected whole numbers in {num_dims} dimensions, found {part.dtype} in {part.ndim}",
    )
    _check(bool((part >= 0).all()), "a size or an offset is negative")
    return part.tolist()


def _check(is_right: bool, message: str) -> None:  # noqa: FBT001
    if not is_right:
        raise ValueError(message)
