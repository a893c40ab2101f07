"""Zarr groups and arrays of a run: their metadata, which zarr-python's own classes make and check.

Chunks are written by `hookstore.shards`, not through zarr-python.

References
----------
Zarr v3: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
``bfloat16`` and ``float8_e5m2``: https://github.com/zarr-developers/zarr-extensions/tree/main/data-types
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

import ml_dtypes
import numpy as np
from zarr.core.buffer.core import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
from zarr.core.dtype.npy.common import float_from_json_v3, float_to_json_v3
from zarr.core.dtype.wrapper import ZDType
from zarr.core.group import GroupMetadata
from zarr.core.metadata.v3 import ArrayV3Metadata

from hookstore.files import write_atomically
from hookstore.format import DTYPES, ArraySpec, escape

if TYPE_CHECKING:
    from zarr.core.common import ZarrFormat

__all__ = ["ArrayStore", "BFloat16", "Buffer", "Float8E5M2", "array_metadata"]


class _MlFloat(ZDType[Any, Any], HasItemSize):
    """A floating-point type of ml_dtypes as a Zarr v3 data type."""

    _scalar: ClassVar[Any]

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return int(np.dtype(self._scalar).itemsize)

    @classmethod
    def _check_native_dtype(cls, dtype: Any) -> TypeGuard[Any]:
        return bool(dtype == np.dtype(cls._scalar))

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Make one from the ml_dtypes type."""
        if not cls._check_native_dtype(dtype):
            raise DataTypeValidationError(f"expected dtype {cls._scalar.__name__}, got {dtype}")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return the ml_dtypes type."""
        return np.dtype(self._scalar)

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError(f"{cls._zarr_v3_name} exists in Zarr format 3 alone, got {data!r}")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data != cls._zarr_v3_name:
            raise DataTypeValidationError(f"expected {cls._zarr_v3_name!r}, got {data!r}")
        return cls()

    def to_json(self, zarr_format: ZarrFormat) -> Any:
        """Return the data type's name."""
        if zarr_format != 3:
            raise ValueError(f"{self._zarr_v3_name} exists in Zarr format 3 alone")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> Any:
        return isinstance(data, int | float | np.floating | np.integer | self._scalar)

    def cast_scalar(self, data: object) -> Any:
        """Round a number to this type."""
        if not self._check_scalar(data):
            raise TypeError(f"cannot turn {data!r} into a scalar of {self._zarr_v3_name}")
        return self._scalar(data)

    def default_scalar(self) -> Any:
        """Return zero."""
        return self._scalar(0)

    def from_json_scalar(self, data: Any, *, zarr_format: ZarrFormat) -> Any:  # noqa: ARG002
        """Read a fill value: a number, "NaN", "Infinity", "-Infinity" or the bits as "0x…"."""
        if isinstance(data, str) and data.startswith("0x"):
            return np.array(int(data, 16), dtype=f"<u{self.item_size}").view(self._scalar)[()]
        return self._scalar(float_from_json_v3(data))

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> Any:  # noqa: ARG002
        """Write a fill value."""
        return float_to_json_v3(np.float64(self.cast_scalar(data)))


@dataclass(frozen=True, kw_only=True)
class BFloat16(_MlFloat, HasEndianness):
    """Zarr data type ``bfloat16``, registered through the entry point ``zarr.data_type``."""

    dtype_cls = type(np.dtype(ml_dtypes.bfloat16))
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _scalar = ml_dtypes.bfloat16


@dataclass(frozen=True, kw_only=True)
class Float8E5M2(_MlFloat):
    """Zarr data type ``float8_e5m2``, registered through the entry point ``zarr.data_type``."""

    dtype_cls = type(np.dtype(ml_dtypes.float8_e5m2))
    _zarr_v3_name: ClassVar[str] = "float8_e5m2"
    _scalar = ml_dtypes.float8_e5m2

    def to_json_scalar(self, data: object, *, zarr_format: ZarrFormat) -> Any:
        """Write a fill value; NaN as its bits, which is the form that zarrs reads too."""
        return "0x7e" if np.isnan(self.cast_scalar(data)) else super().to_json_scalar(data, zarr_format=zarr_format)


for _type in (BFloat16, Float8E5M2):
    # zarr-python 3.1 gathers the entry points of "zarr.data_type" but never loads them. It does load those of "zarr.buffer", before it looks at any metadata,
    # so pyproject.toml names Buffer of this module there: zarr-python's own class, whose loading brings these lines about.
    data_type_registry.register(_type._zarr_v3_name, _type)


@dataclass(slots=True)
class _LayerState:
    """Extents that all arrays of a layer share, and its arrays."""

    directory: str
    extents: list[int]
    num_samples: int | None = None
    seen: list[int] = field(default_factory=lambda: [0, 0, 0])
    arrays: list[ArraySpec] = field(default_factory=list)


class ArrayStore:
    """Writes the ``zarr.json`` files below ``layers/``; used by one thread.

    All arrays of a layer have one extent in epochs, batches and calls. It is published ahead where it is known and grows by doubling where not, so that
    metadata is seldom rewritten.

    Parameters
    ----------
    layers_path : str
        The ``layers`` directory, which exists.
    num_epochs : int or None
        Epochs of the run, where known.

    Attributes
    ----------
    unsynced : set of str
        Files and directories that are new since the caller last synced and cleared it.
    """

    def __init__(self, layers_path: str, num_epochs: int | None = None) -> None:
        self._layers_path = layers_path
        self._num_epochs = num_epochs
        self._layers: dict[str, _LayerState] = {}
        self.unsynced: set[str] = set()
        self._num_made = 0
        self._write_group(layers_path, {})

    def directory(self, spec: ArraySpec) -> str:
        """Return the directory of an array."""
        return os.path.join(self._layers_path, *spec.path.split("/"))

    def publish(self, spec: ArraySpec, last: tuple[int, int, int], epoch_batches: int | None) -> None:
        """Make sure that the array exists and that its shape covers (epoch, batch, call).

        Parameters
        ----------
        spec : ArraySpec
            The array.
        last : tuple of int
            Highest epoch, batch and call to cover.
        epoch_batches : int or None
            Batches of this epoch, where known.
        """
        layer = self._layers.get(spec.layer)
        if layer is None:
            directory = os.path.join(self._layers_path, escape(spec.layer))
            self._write_group(directory, {"layer": spec.layer})
            layer = self._layers[spec.layer] = _LayerState(directory, [self._num_epochs or 1, epoch_batches or 1, 1])
        is_new = spec not in layer.arrays
        if is_new:
            layer.arrays.append(spec)
        wanted = [last[0] + 1, last[1] + 1, last[2] + 1]
        layer.seen = [max(pair) for pair in zip(layer.seen, wanted, strict=True)]
        if any(need > extent for need, extent in zip(wanted, layer.extents, strict=True)):
            grown = [wanted[0], max(epoch_batches or 0, _doubled(wanted[1], layer.extents[1])), _doubled(wanted[2], layer.extents[2])]
            layer.extents = [max(pair) for pair in zip(grown, layer.extents, strict=True)]
            for known in layer.arrays:
                self._write_array(layer, known, is_new=known is spec and is_new)
        elif is_new:
            self._write_array(layer, spec, is_new=True)

    def finish(self, epoch_batches: int | None) -> None:
        """Take back what was published ahead and never came."""
        for layer in self._layers.values():
            exact = [layer.seen[0], max(layer.seen[1], min(epoch_batches or 0, layer.extents[1])), layer.seen[2]]
            if exact != layer.extents:
                layer.extents = exact
                for spec in layer.arrays:
                    self._write_array(layer, spec, is_new=False)

    def _write_array(self, layer: _LayerState, spec: ArraySpec, *, is_new: bool) -> None:
        names = self._dimension_names(layer, spec)
        self._write(self.directory(spec), array_metadata(spec, tuple(layer.extents), names), is_new=is_new)

    def _write_group(self, directory: str, attributes: dict[str, Any]) -> None:
        contents = GroupMetadata(attributes=attributes).to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()
        self._write(directory, contents, is_new=True)

    def _write(self, directory: str, contents: bytes, *, is_new: bool) -> None:
        """Write a ``zarr.json``. One that takes the place of another is synced first, a new one together with the first captures.

        A new group or array appears whole: readers would warn about a directory without metadata.
        """
        if not is_new:
            write_atomically(os.path.join(directory, "zarr.json"), contents)
            return
        if os.path.isdir(directory):  # the root, which stands before anything reads it
            write_atomically(os.path.join(directory, "zarr.json"), contents, sync=False)
        else:
            self._num_made += 1
            making = os.path.join(os.path.dirname(self._layers_path), f".making-{os.getpid()}-{self._num_made}")
            os.mkdir(making)
            write_atomically(os.path.join(making, "zarr.json"), contents, sync=False)
            os.rename(making, directory)
        self.unsynced.update((os.path.join(directory, "zarr.json"), directory, os.path.dirname(directory)))

    def _dimension_names(self, layer: _LayerState, spec: ArraySpec) -> list[str]:
        """Name the dimensions so that no name has two sizes within the layer's group, which xarray would refuse."""
        names = ["epoch", "batch", *(["call"] if spec.calls else [])]
        for position, size in enumerate(spec.chunk_shape):
            is_sample = position == 0 and spec.kind != "parameter"
            if is_sample and layer.num_samples is None:
                layer.num_samples = size
            # "activation_1", "parameter_0.weight": the position comes before the first dot, where no array has one in its name
            rest = spec.name.removeprefix(spec.kind)
            names.append("sample" if is_sample and layer.num_samples == size else f"{spec.kind}_{position}{rest}")
        return names


def _doubled(need: int, extent: int) -> int:
    return extent if need <= extent else 1 << (need - 1).bit_length()


def array_metadata(spec: ArraySpec, extents: tuple[int, ...], dimension_names: list[str]) -> bytes:
    """Return the ``zarr.json`` of an array, checked and written by zarr-python's own class.

    Parameters
    ----------
    spec : ArraySpec
        The array.
    extents : tuple of int
        Epochs, batches and calls.
    dimension_names : list of str
        One for each dimension.
    """
    dtype = DTYPES[spec.dtype]
    leading = extents[: len(spec.shard_shape)]
    bytes_codec: dict[str, Any] = {"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    compressors = [] if spec.codec is None else [json.loads(spec.codec)]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [*(1 for _ in leading), *spec.chunk_shape],
            "codecs": [bytes_codec, *compressors, {"name": "crc32c"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    attributes = {
        "layer": spec.layer,
        "kind": spec.kind,
        "phase": spec.phase,
        "leaf": spec.leaf,
        "torch_dtype": spec.dtype,
        "rank": spec.rank,
    }
    contents: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": (*leading, *spec.chunk_shape),
        "data_type": dtype.zarr,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (*spec.shard_shape, *spec.chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": list(dtype.fill_value) if isinstance(dtype.fill_value, tuple) else dtype.fill_value,
        "codecs": [sharding],
        "attributes": attributes,
        "dimension_names": dimension_names,
    }
    metadata = ArrayV3Metadata.from_dict(contents)
    return metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes()
