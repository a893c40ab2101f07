"""Zarr groups and arrays of a run: their metadata, which zarr-python's own classes make and check.

Chunks are written by `hookstore.shards`, not through zarr-python.

References
----------
Zarr v3: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
``bfloat16`` and ``float8_e5m2``: https://github.com/zarr-developers/zarr-extensions/tree/main/data-types
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
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

from hookstore.dimensions import Dimension, coordinate_files, dimensions_of, is_coordinate
from hookstore.errors import CorruptRunError
from hookstore.files import read_small, replace_all, sync_directory, system, write_atomically, write_new
from hookstore.format import DTYPES, MAKING_PREFIX, ArraySpec, escape
from hookstore.metadata import StoredArray

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
    """What the arrays of a layer share: extents, as published and as needed, and names of dimensions, each with what it stands for."""

    directory: str
    extents: list[int]
    wanted: list[int]
    seen: list[int] = field(default_factory=lambda: [0, 0, 0])
    arrays: dict[str, ArraySpec] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)  # of the dimensions of each array
    dimensions: dict[str, tuple[int, bytes | None]] = field(default_factory=dict)


class ArrayStore:
    """Writes the ``zarr.json`` files below ``layers/``; used by one thread.

    All arrays of a layer have one extent in epochs, batches and calls. It is published ahead where it is known and grows by doubling where not, so that
    metadata is seldom rewritten; and it grows in the files only when `grow` is called, which has to be before a shard appears beyond it.

    Parameters
    ----------
    layers_path : str
        The ``layers`` directory, which exists.
    num_epochs : int or None
        Epochs of the run, where known.
    stored : iterable of StoredArray
        Arrays that are there already.
    seen : dict
        For each of these, by path, how many epochs, batches and calls its captures need.

    Attributes
    ----------
    unsynced : set of str
        Files and directories that are new since the caller last synced and cleared it.
    """

    def __init__(
        self,
        layers_path: str,
        num_epochs: int | None = None,
        *,
        stored: Iterable[StoredArray] = (),
        seen: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> None:
        self._layers_path = layers_path
        self._num_epochs = num_epochs
        self._layers: dict[str, _LayerState] = {}
        self.unsynced: set[str] = set()
        self._num_made = 0
        self._write_group(layers_path, {})
        by_layer: dict[str, list[StoredArray]] = {}
        for array in stored:
            by_layer.setdefault(array.spec.layer, []).append(array)
        for name, arrays in by_layer.items():
            self._take_up(name, arrays, seen or {})
        self.grow()

    def _take_up(self, name: str, arrays: Sequence[StoredArray], seen: Mapping[str, tuple[int, int, int]]) -> None:
        """Go on with a layer's arrays that are there."""
        directory = os.path.join(self._layers_path, escape(name))
        self._write_group(directory, {"layer": name})
        extents = [max((array.extents[axis] for array in arrays if axis < len(array.extents)), default=0) for axis in range(3)]
        layer = self._layers[name] = _LayerState(directory, extents, list(extents))
        for array in arrays:
            layer.arrays[array.spec.name] = array.spec
            layer.seen = [max(sizes) for sizes in zip(layer.seen, seen.get(array.spec.path, (0, 0, 0)), strict=True)]
            layer.names[array.spec.name] = list(array.names)
            for called, dimension in zip(array.names, dimensions_of(array.spec), strict=True):
                if dimension.positions is not None and is_coordinate(called):  # the power may have taken it, and left the array
                    self._has_coordinate(layer, called, dimension.positions)
                layer.dimensions.setdefault(called, (dimension.size, dimension.positions))
        layer.wanted = [max(sizes) for sizes in zip(layer.wanted, layer.seen, strict=True)]
        if any(list(array.extents) != extents[: len(array.extents)] for array in arrays):  # a writer died while it published them
            layer.extents = []

    def _write_group(self, directory: str, attributes: dict[str, Any]) -> None:
        """Make sure that a group is there as it should be: consolidated metadata that a user had written would hide what comes."""
        wanted = _group_metadata(attributes)
        path = os.path.join(directory, "zarr.json")
        if os.path.isdir(path):
            raise CorruptRunError(f"{path} is a directory", path=path)
        try:
            if read_small(path, len(wanted)) == wanted:
                return
        except OSError:
            pass
        self._write_new(directory, {"zarr.json": wanted})

    def directory(self, spec: ArraySpec) -> str:
        """Return the directory of an array."""
        return os.path.join(self._layers_path, *spec.path.split("/"))

    def publish(self, spec: ArraySpec, last: tuple[int, int, int], epoch_batches: int | None) -> None:
        """Make sure that the array exists, and that the shape that `grow` gives it covers (epoch, batch, call).

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
            extents = [max(self._num_epochs or 0, last[0] + 1), _ahead(last[1] + 1, epoch_batches or 0), _ahead(last[2] + 1, 0)]
            layer = self._layers[spec.layer] = _LayerState(directory, extents, list(extents))
        seen, wanted = layer.seen, layer.wanted
        for axis, position in enumerate(last):
            if position >= seen[axis]:
                seen[axis] = position + 1
                if position >= wanted[axis]:
                    wanted[axis] = (position + 1, _ahead(position + 1, epoch_batches or 0), _ahead(position + 1, 0))[axis]
        if spec.name not in layer.arrays:
            layer.arrays[spec.name] = spec
            layer.names[spec.name] = self._name_dimensions(layer, spec)
            self._write_new(self.directory(spec), {"zarr.json": self._array_metadata(layer, spec)})

    def grow(self) -> None:
        """Bring every layer's arrays to the extents that are needed, all in one go: each file that is replaced has to be synced first."""
        grown = [layer for layer in self._layers.values() if layer.wanted != layer.extents]
        for layer in grown:
            layer.extents = list(layer.wanted)
        self._rewrite(grown)

    def finish(self, epoch_batches: int | None) -> None:
        """Take back what was published ahead and never came."""
        shrunk = []
        for layer in self._layers.values():
            exact = [layer.seen[0], max(layer.seen[1], min(epoch_batches or 0, layer.wanted[1])), layer.seen[2]]
            if exact != layer.extents:
                layer.extents, layer.wanted = exact, list(exact)
                shrunk.append(layer)
        self._rewrite(shrunk)

    def _rewrite(self, layers: list[_LayerState]) -> None:
        contents = {
            os.path.join(self.directory(spec), "zarr.json"): self._array_metadata(layer, spec)
            for layer in layers
            for spec in layer.arrays.values()
        }
        replace_all(contents, self._layers_path)

    def _array_metadata(self, layer: _LayerState, spec: ArraySpec) -> bytes:
        leading = ["epoch", "batch", *(["call"] if spec.calls else [])]
        return array_metadata(spec, tuple(layer.extents), leading + layer.names[spec.name])

    def _write_new(self, directory: str, files: Mapping[str, bytes]) -> None:
        """Write the ``zarr.json`` of a new group or array, and what else there is from the beginning.

        It appears whole, also where the power fails right after: readers would warn about a directory without metadata, and raise at half of it. That it
        stays is synced together with the first captures.
        """
        if os.path.isdir(directory):  # the root, which stands before anything reads it
            write_atomically(os.path.join(directory, "zarr.json"), files["zarr.json"])
        else:
            self._num_made += 1
            making = os.path.join(os.path.dirname(self._layers_path), f"{MAKING_PREFIX}{os.getpid()}-{self._num_made}")
            system.mkdir(making)
            for name, contents in files.items():
                write_new(os.path.join(making, name), contents, sync=True)
            sync_directory(making)
            system.replace(making, directory)
        self.unsynced.add(os.path.dirname(directory))

    def _name_dimensions(self, layer: _LayerState, spec: ArraySpec) -> list[str]:
        """Name the dimensions so that no name has two meanings within the layer's group, and see to it that their coordinates are there."""
        names: list[str] = []
        for dimension in dimensions_of(spec):
            name = dimension.wished
            if not name or not self._takes(layer, name, dimension):
                name = dimension.own
                while name in names or not self._takes(layer, name, dimension):  # a user's name is the same, or a file is in the way
                    name = f"{name}_" if dimension.positions is None else escape(f"{name}_")
            names.append(name)
        return names

    def _takes(self, layer: _LayerState, name: str, dimension: Dimension) -> bool:
        """Say whether a name stands for such a dimension, or can from now on."""
        meaning = (dimension.size, dimension.positions)
        if layer.dimensions.get(name, meaning) != meaning:
            return False
        if dimension.positions is not None and not self._has_coordinate(layer, name, dimension.positions):
            return False
        layer.dimensions[name] = meaning
        return True

    def _has_coordinate(self, layer: _LayerState, name: str, positions: bytes) -> bool:
        """Write the coordinate of a dimension, before the first array that needs it; say whether what is there is this one."""
        if name in layer.dimensions:
            return True
        directory, files = os.path.join(layer.directory, name), coordinate_files(name, positions)
        if not os.path.lexists(directory):
            self._write_new(directory, files)
            return True
        with contextlib.suppress(OSError):  # a writer has died between the two
            return all(read_small(os.path.join(directory, file), len(contents)) == contents for file, contents in files.items())
        return False


def _ahead(need: int, known: int) -> int:
    """Return the extent to publish: the known one if it is enough, else a power of two."""
    return known if need <= known else 1 << (need - 1).bit_length()


def _group_metadata(attributes: dict[str, Any]) -> bytes:
    """Return the ``zarr.json`` of a group."""
    return json.dumps({**_checked_group(), "attributes": attributes}).encode()


@functools.cache
def _checked_group() -> dict[str, Any]:
    checked: dict[str, Any] = json.loads(GroupMetadata().to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes())
    return checked


def array_metadata(spec: ArraySpec, extents: tuple[int, ...], dimension_names: list[str]) -> bytes:
    """Return the ``zarr.json`` of an array, checked and written by zarr-python's own class.

    That takes a millisecond of the GIL, which the training would notice in a model of many layers, so arrays that are laid out alike share what it gives.

    Parameters
    ----------
    spec : ArraySpec
        The array.
    extents : tuple of int
        Epochs, batches and calls.
    dimension_names : list of str
        One for each dimension.
    """
    leading = extents[: len(spec.shard_shape)]
    attributes = {
        "layer": spec.layer,
        "kind": spec.kind,
        "phase": spec.phase,
        "leaf": spec.leaf,
        "torch_dtype": spec.dtype,
        "rank": spec.rank,
        **({"select": spec.portion} if spec.portion else {}),
        **({"dims": list(spec.dims)} if spec.dims else {}),
    }
    checked = _checked_array(spec.dtype, spec.shard_shape, spec.chunk_shape, spec.codec)
    shape = [*leading, *spec.chunk_shape]
    return json.dumps({**checked, "shape": shape, "attributes": attributes, "dimension_names": dimension_names}).encode()


@functools.lru_cache(maxsize=1024)
def _checked_array(dtype_name: str, shard_shape: tuple[int, ...], chunk_shape: tuple[int, ...], codec: str | None) -> dict[str, Any]:
    """Return the metadata of an array, with a shape of one shard and without attributes and dimension names, as zarr-python writes it."""
    dtype = DTYPES[dtype_name]
    bytes_codec: dict[str, Any] = {"name": "bytes"} if dtype.itemsize == 1 else {"name": "bytes", "configuration": {"endian": "little"}}
    compressors = [] if codec is None else [json.loads(codec)]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [*(1 for _ in shard_shape), *chunk_shape],
            "codecs": [bytes_codec, *compressors, {"name": "crc32c"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    contents: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": (*shard_shape, *chunk_shape),
        "data_type": dtype.zarr,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": (*shard_shape, *chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": list(dtype.fill_value) if isinstance(dtype.fill_value, tuple) else dtype.fill_value,
        "codecs": [sharding],
        "attributes": {},
    }
    metadata = ArrayV3Metadata.from_dict(contents)
    checked: dict[str, Any] = json.loads(metadata.to_buffer_dict(default_buffer_prototype())["zarr.json"].to_bytes())
    return checked
