"""Which array, chunk and shard a capture goes to."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hookstore.agenda import WHOLE, Choice, LayerDue, Take
from hookstore.clock import Coordinates
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
from hookstore.portion import token_of

if TYPE_CHECKING:
    from hookstore.regions import Region

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
    stats : str
        Whether statistics of its captures are wanted; as in `hookstore.agenda.Take`. There may be several of these for one array on disk.
    is_small : bool
        Whether its captures are copied at once, where that is possible; see `hookstore.staging.Stager.stage_small`.
    region : Region or None
        The region that takes the next captures; guarded by the stager's lock.
    has_been_open : bool
        Whether it has had a region.
    region_bytes : int
        Bytes of slots that the next region asks for. It is four times as large each time one is filled, so that arrays with few captures keep little memory.
    watchers : tuple of Choice
        Captures whose condition is asked about its captures; see `hookstore.agenda.Take`.
    is_prompt : bool
        Whether a region of it takes captures of one batch alone, and goes to the writer when the next batch begins: someone waits to judge them.
    batch : Coordinates or None
        The batch of its last region, where it is prompt.
    num_in_batch : int
        Captures in the closed regions of that batch.
    """

    __slots__ = (
        "batch",
        "chunk_bytes",
        "element_strides",
        "has_been_open",
        "is_prompt",
        "is_small",
        "itemsize",
        "num_in_batch",
        "path",
        "region",
        "region_bytes",
        "spec",
        "stats",
        "stride_bytes",
        "watchers",
    )

    def __init__(self, spec: ArraySpec, stats: str = "", watchers: tuple[Choice, ...] = (), *, is_prompt: bool = False) -> None:
        self.spec = spec
        self.stats = stats
        self.watchers = watchers
        self.is_prompt = is_prompt or bool(watchers)
        self.batch: Coordinates | None = None
        self.num_in_batch = 0
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

    @property
    def num_expected(self) -> int:
        """For how many captures the next region of a batch is to have room: as many as the batch before had, or as this one has had so far."""
        return max(min(self.num_in_batch, _REGION_BYTES // self.stride_bytes), 1)

    def begin_batch(self, where: Coordinates) -> None:
        """Count the captures of a batch from here on."""
        if self.batch is not where:
            self.batch, self.num_in_batch = where, 0


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
    due : LayerDue or None
        What is recorded of the layer there.
    """

    coordinates: Coordinates
    number: int
    step: int
    sequence_nr: int
    structure: int = 0
    scale: float | torch.Tensor = math.nan
    due: LayerDue | None = None


@dataclass(slots=True)
class Draft:
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
    take : Take
        In which form it is taken.
    statistics : numpy.ndarray or None
        Its statistics, where they are known before it is handed over; `hookstore.statistics.STATISTICS_DTYPE`.
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
    take: Take = WHOLE
    statistics: np.ndarray[Any, Any] | None = None


class ArrayCatalog:
    """Finds the array for a capture, and makes one where none fits.

    Parameters
    ----------
    num_epochs : int or None
        Epochs of the run, where known.
    rank : int
        Rank of this process.
    stored : iterable of ArraySpec
        Arrays that the run has already; captures that fit go on there, with the codec that such an array has.
    are_prompt : bool
        Whether every array is prompt; see `Array`.
    """

    def __init__(self, *, num_epochs: int | None, rank: int, stored: Iterable[ArraySpec] = (), are_prompt: bool = False) -> None:
        self._are_prompt = are_prompt
        self._num_epochs = num_epochs
        self._rank = rank
        self._lock = threading.Lock()
        self._by_shape: dict[tuple[object, ...], Array] = {}
        self._by_group: dict[tuple[str, str, str, str, str, bool], list[ArraySpec]] = {}
        self._arrays: dict[tuple[object, ...], Array] = {}
        for spec in stored:
            if spec.rank == rank:
                siblings = self._by_group.setdefault((spec.layer, spec.kind, spec.leaf, spec.phase, spec.portion, spec.calls), [])
                # The first capture's array has the plain name; the names of the others say in what they differ from it.
                plain = array_name(spec.kind, leaf=spec.leaf, phase=spec.phase, portion=token_of(spec.portion), calls=spec.calls, rank=rank)
                siblings.insert(0 if spec.name == plain else len(siblings), spec)

    def find(self, draft: Draft, *, epoch_batches: int | None) -> Array:
        """Return the array for a capture (which has at least one element)."""
        phase, take = draft.coordinates.phase, draft.take
        key = (draft.layer, draft.kind, draft.leaf, draft.dtype, phase, draft.shape, draft.call > 0, take.text, take.stats, take.watchers)
        array = self._by_shape.get(key)
        if array is None:
            with self._lock:
                array = self._by_shape.get(key)
                if array is None:
                    spec = self._place(draft, epoch_batches)
                    made = Array(spec, take.stats, take.watchers, is_prompt=self._are_prompt)
                    array = self._arrays.setdefault((spec.path, take.stats, take.watchers), made)
                    self._by_shape[key] = array
        return array

    def _place(self, draft: Draft, epoch_batches: int | None) -> ArraySpec:
        layer, kind, leaf, dtype, shape = draft.layer, draft.kind, draft.leaf, draft.dtype, draft.shape
        phase, calls, take = draft.coordinates.phase, draft.call > 0, draft.take
        siblings = self._by_group.setdefault((layer, kind, leaf, phase, take.text, calls), [])
        for known in siblings:
            if known.dtype == dtype and fits_chunk(shape, known.chunk_shape):
                return known
        reference = siblings[0] if siblings else None
        chunk = size_class(shape, reference.chunk_shape) if reference else shape
        name = array_name(
            kind,
            leaf=leaf,
            phase=phase,
            portion=token_of(take.text),
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
            shard_shape=shard_shape(stored_bytes, every=take.every, epoch_batches=epoch_batches, num_epochs=self._num_epochs, calls=calls),
            rank=self._rank,
            codec=take.codec[dtype],
            portion=take.text,
            dims=take.dims,
        )
        siblings.append(spec)
        return spec
