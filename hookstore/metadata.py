"""The JSON files of a run, as anyone may find them: what was recorded, and what each array is.

They are read here without zarr-python, since opening a run must be quick, and checked before they are believed.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from hookstore.errors import CorruptRunError, FormatVersionError, NotARunError
from hookstore.files import read_small
from hookstore.format import DTYPES, FORMAT_VERSION, LAYERS_DIR, MAX_SHARD_ENTRIES, PHASES, RUN_FILE, ArraySpec, is_array_path

_MOST_RUN_BYTES = 64 << 20
_MOST_ARRAY_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 2**47
# What reading JSON, and looking into it, raises for text of any other kind.
_NONSENSE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, StopIteration)


def read_description(run_path: str) -> dict[str, Any]:
    """Read a run's ``run.json``.

    Raises
    ------
    NotARunError
        If there is no run in that directory.
    FormatVersionError
        If a newer hookstore wrote it.
    CorruptRunError
        If the file is damaged.
    """
    file_path = os.path.join(run_path, RUN_FILE)
    try:
        description = json.loads(read_small(file_path, _MOST_RUN_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise NotARunError(f"{run_path} is no hookstore run: {_what_is_there(run_path)}", path=run_path) from None
    except (ValueError, RecursionError, OSError) as error:
        raise CorruptRunError(f"{file_path} is no valid JSON: {error}", path=file_path) from error
    if not isinstance(description, dict) or description.get("format") != "hookstore":
        raise NotARunError(f"{run_path} is no hookstore run: its {RUN_FILE} was written by something else", path=run_path)
    version = description.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptRunError(f"{file_path} has format_version {version!r}, expected a whole number from 1 on", path=file_path)
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{run_path} has format version {version}, this hookstore reads up to {FORMAT_VERSION}; update hookstore to open it",
            found=version,
            supported=FORMAT_VERSION,
        )
    layers = description.get("layers")
    if not isinstance(layers, list) or not all(
        isinstance(layer, dict) and isinstance(layer.get("name"), str) and isinstance(layer.get("aliases", []), list) for layer in layers
    ):
        raise CorruptRunError(f"{file_path} lists no layers", path=file_path)
    return description


def _what_is_there(run_path: str) -> str:
    if not os.path.exists(run_path):
        return "it does not exist"
    if not os.path.isdir(run_path):
        return "it is a file"
    entries = sorted(os.listdir(run_path))
    inside = [entry for entry in entries if os.path.exists(os.path.join(run_path, entry, RUN_FILE))]
    if inside:
        return f"it has no {RUN_FILE}, but holds runs: {', '.join(inside[:5])}"
    return f"it has no {RUN_FILE}; it holds {', '.join(entries[:5]) + (' …' if len(entries) > 5 else '') if entries else 'nothing'}"


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array as its ``zarr.json`` describes it.

    Attributes
    ----------
    spec : ArraySpec
        What is fixed.
    extents : tuple of int
        Epochs and batches (and calls) that are published.
    num_samples : int or None
        Samples in a chunk, where the array has a dimension of that name.
    """

    spec: ArraySpec
    extents: tuple[int, ...]
    num_samples: int | None


def read_array(run_path: str, array: str) -> StoredArray:
    """Read the ``zarr.json`` of an array.

    Parameters
    ----------
    run_path : str
        The run.
    array : str
        Path of the array below ``layers``.

    Raises
    ------
    CorruptRunError
        If there is none, or it is not one of this format.
    """
    if not is_array_path(array):
        raise CorruptRunError(f"{run_path}: the manifest has array {array!r}, which cannot be the path of one", path=run_path)
    path = os.path.join(run_path, LAYERS_DIR, array, "zarr.json")
    try:
        stored = _parse_array(array, json.loads(read_small(path, _MOST_ARRAY_BYTES)))
    except FileNotFoundError:
        raise CorruptRunError(f"{path} is missing, but the manifest has captures in that array", path=path) from None
    except (*_NONSENSE, OSError) as error:
        raise CorruptRunError(f"{path} is no array metadata of this format: {error!r}", path=path) from error
    spec = stored.spec
    sizes = (*spec.chunk_shape, *spec.shard_shape, *stored.extents)
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes) or not 0 < spec.num_entries <= MAX_SHARD_ENTRIES:
        raise CorruptRunError(
            f"{path} has shape {stored.extents}, shards of {spec.shard_shape} and chunks of {spec.chunk_shape}, which cannot be", path=path
        )
    if math.prod(spec.chunk_shape) * DTYPES[spec.dtype].itemsize >= _MOST_CHUNK_BYTES:
        raise CorruptRunError(f"{path} has chunks of shape {spec.chunk_shape}, which cannot be", path=path)
    return stored


def _parse_array(array: str, metadata: Any) -> StoredArray:
    attributes = metadata["attributes"]
    names = metadata["dimension_names"]
    sharding = next(codec for codec in metadata["codecs"] if codec["name"] == "sharding_indexed")["configuration"]
    leading = 3 if names[2:3] == ["call"] else 2
    compressors = [codec for codec in sharding["codecs"] if codec["name"] not in ("bytes", "crc32c")]
    spec = ArraySpec(
        layer=_text(attributes["layer"]),
        kind=_text(attributes["kind"]),
        phase=_text(attributes["phase"]),
        leaf=_text(attributes["leaf"]),
        dtype=_text(attributes["torch_dtype"]),
        name=array.split("/")[1],
        chunk_shape=tuple(sharding["chunk_shape"])[leading:],
        shard_shape=tuple(metadata["chunk_grid"]["configuration"]["chunk_shape"])[:leading],
        rank=int(attributes["rank"]),
        codec=json.dumps(compressors[0], sort_keys=True) if compressors else None,
    )
    if spec.dtype not in DTYPES or spec.phase not in PHASES:
        raise ValueError(f"dtype {spec.dtype!r} in phase {spec.phase!r}")
    extents = tuple(metadata["shape"])[:leading]
    return StoredArray(spec, extents, spec.chunk_shape[0] if names[leading:] and names[leading] == "sample" else None)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
