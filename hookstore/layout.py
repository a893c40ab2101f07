"""Which array, chunk and shard a capture goes to."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from hookstore.format import (
    CHUNK_ALIGNMENT_BYTES,
    CRC_BYTES,
    DTYPES,
    PAGE_BYTES,
    ArraySpec,
    align,
    array_name,
    fits_chunk,
    shard_shape,
    size_class,
)
from hookstore.schedule import Coordinates

if TYPE_CHECKING:
    from hookstore.staging import Region

_REGION_BYTES = 4 << 20  # large enough that a write costs its bytes and not its call
_FIRST_REGION_BYTES = 128 << 10
SMALL_BYTES = 32 << 10  # up to here a copy and a checksum take less than giving the GIL away and getting it back


class Array:
    """One array of the run while it is recorded: what is fixed, and its open staging region.

    Attributes
    ----------
    spec : ArraySpec
        What is fixed.
    path : str
        Taken from ``spec`` once, as are ``itemsize``, ``chunk_bytes`` and ``stride_bytes``.
    element_strides : tuple of int
        Strides of a chunk in elements.
    is_small : bool
        Whether its captures are copied at once, where that is possible; see `hookstore.staging.Stager.stage_small`.
    region : Region or None
        The region that takes the next captures; guarded by the stager's lock.
    has_been_open : bool
        Whether it has had a region.
    region_bytes : int
        Bytes of slots that the next region asks for. It is four times as large each time one is filled, so that arrays with few captures keep little memory.
    """

    __slots__ = (
        "chunk_bytes",
        "element_strides",
        "has_been_open",
        "is_small",
        "itemsize",
        "path",
        "region",
        "region_bytes",
        "spec",
        "stride_bytes",
    )

    def __init__(self, spec: ArraySpec) -> None:
        self.spec = spec
        self.path = spec.path
        self.itemsize = DTYPES[spec.dtype].itemsize
        self.element_strides = tuple(math.prod(spec.chunk_shape[axis + 1 :]) for axis in range(len(spec.chunk_shape)))
        self.chunk_bytes = spec.chunk_bytes
        self.stride_bytes = spec.stride_bytes
        self.is_small = self.chunk_bytes <= SMALL_BYTES
        self.region: Region | None = None
        self.has_been_open = False
        self.region_bytes = align(max(self.stride_bytes, _FIRST_REGION_BYTES), PAGE_BYTES)

    def grow_region(self) -> None:
        """Ask for a larger region next time."""
        if self.region_bytes < _REGION_BYTES:
            self.region_bytes = min(4 * self.region_bytes, _REGION_BYTES)


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
    structure : int
        Which structure the value has whose leaves are captured; see `hookstore.staging.Stager.structures`.
    scale : float or torch.Tensor
        Loss scale that a gradient carries, as a tensor of one float32 where it is on a device; NaN for none.
    """

    coordinates: Coordinates
    number: int
    step: int
    sequence_nr: int
    structure: int = 0
    scale: float | torch.Tensor = math.nan


@dataclass(slots=True)
class Capture:
    """One tensor on its way to disk: everything that its manifest row needs and that only the hook knows.

    Not frozen: the stager fills in array, status and reason, once, before it hands the capture over.

    Attributes
    ----------
    layer, kind, leaf, dtype : str
        What it is.
    coordinates : Coordinates
        Phase, epoch and batch of the forward.
    call, backward, step : int
        Which call of the layer in that batch, which backward over that forward, optimizer steps done before the forward.
    shape : tuple of int
        True shape.
    wall_time_us : int
        Microseconds since the epoch of Unix time.
    array : Array or None
        Where its bytes go; ``None`` where it has none (an empty tensor, a gap).
    status, reason : str
        As in the manifest.
    structure : int
        As in `Call`.
    scale : float or torch.Tensor
        As in `Call`.
    """

    layer: str
    kind: str
    leaf: str
    dtype: str
    coordinates: Coordinates
    call: int
    backward: int
    step: int
    shape: tuple[int, ...]
    wall_time_us: int
    array: Array | None = None
    status: str = "ok"
    reason: str = ""
    structure: int = 0
    scale: float | torch.Tensor = math.nan


class ArrayCatalog:
    """Finds the array for a capture, and makes one where none fits.

    Parameters
    ----------
    every : int
        One batch in so many is recorded.
    num_epochs : int or None
        Epochs of the run, where known.
    rank : int
        Rank of this process.
    codec : dict
        For each dtype the codec of its arrays as canonical JSON, or ``None``.
    stored : iterable of ArraySpec
        Arrays that the run has already; captures that fit go on there, with the codec that such an array has.
    """

    def __init__(
        self, *, every: int, num_epochs: int | None, rank: int, codec: dict[str, str | None], stored: Iterable[ArraySpec] = ()
    ) -> None:
        self._every = every
        self._num_epochs = num_epochs
        self._rank = rank
        self._codec = codec
        self._lock = threading.Lock()
        self._by_shape: dict[tuple[object, ...], Array] = {}
        self._by_group: dict[tuple[str, str, str, str, bool], list[Array]] = {}
        for spec in stored:
            if spec.rank == rank:
                siblings = self._by_group.setdefault((spec.layer, spec.kind, spec.leaf, spec.phase, spec.calls), [])
                # The first capture's array has the plain name; the names of the others say in what they differ from it.
                plain = array_name(spec.kind, leaf=spec.leaf, phase=spec.phase, calls=spec.calls, rank=rank)
                siblings.insert(0 if spec.name == plain else len(siblings), Array(spec))

    def find(
        self, layer: str, kind: str, leaf: str, dtype: str, phase: str, shape: tuple[int, ...], *, calls: bool, epoch_batches: int | None
    ) -> Array:
        """Return the array for a capture of that shape (which has at least one element)."""
        key = (layer, kind, leaf, dtype, phase, shape, calls)
        array = self._by_shape.get(key)
        if array is None:
            with self._lock:
                array = self._by_shape.get(key) or self._place(layer, kind, leaf, dtype, phase, shape, calls, epoch_batches)
                self._by_shape[key] = array
        return array

    def _place(
        self,
        layer: str,
        kind: str,
        leaf: str,
        dtype: str,
        phase: str,
        shape: tuple[int, ...],
        calls: bool,  # noqa: FBT001
        epoch_batches: int | None,
    ) -> Array:
        siblings = self._by_group.setdefault((layer, kind, leaf, phase, calls), [])
        for array in siblings:
            if array.spec.dtype == dtype and fits_chunk(shape, array.spec.chunk_shape):
                return array
        reference = siblings[0].spec if siblings else None
        chunk = size_class(shape, reference.chunk_shape) if reference else shape
        name = array_name(
            kind,
            leaf=leaf,
            phase=phase,
            dtype=dtype if reference and reference.dtype != dtype else "",
            chunk=chunk if reference and reference.chunk_shape != chunk else None,
            calls=calls,
            rank=self._rank,
        )
        stored_bytes = align(DTYPES[dtype].itemsize * math.prod(chunk) + CRC_BYTES, CHUNK_ALIGNMENT_BYTES)
        spec = ArraySpec(
            layer=layer,
            kind=kind,
            phase=phase,
            leaf=leaf,
            dtype=dtype,
            name=name,
            chunk_shape=chunk,
            shard_shape=shard_shape(stored_bytes, every=self._every, epoch_batches=epoch_batches, num_epochs=self._num_epochs, calls=calls),
            rank=self._rank,
            codec=self._codec[dtype],
        )
        array = Array(spec)
        siblings.append(array)
        return array
