"""The JSON files of a run, as anyone may find them: what was recorded, and what each array is.

They are read here without zarr-python, since opening a run must be quick, and checked before they are believed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from hookstore.codecs import codec_metadata
from hookstore.errors import CorruptRunError, FormatVersionError, NotARunError
from hookstore.files import read_small
from hookstore.format import DTYPES, FORMAT_VERSION, LAYERS_DIR, MAX_SHARD_ENTRIES, PHASES, RUN_FILE, ArraySpec, is_array_path
from hookstore.portion import Portion

_MOST_RUN_BYTES = 16 << 20  # JSON takes up to thirty times as much memory; a hundred thousand layers are less
_MOST_ARRAY_BYTES = 1 << 20
_MOST_CHUNK_BYTES = 2**47
_MOST_DIMS = 64
# What reading JSON, and looking into it, raises for text of any other kind.
NONSENSE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError, StopIteration)


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
    try:
        _check_layers(description["layers"])
    except NONSENSE as error:
        raise CorruptRunError(f"{file_path} lists no layers as this format has them: {error!r}", path=file_path) from error
    recorded = description.get("recorded", {})
    if not all(isinstance(said, dict) for said in (recorded, description.get("environment", {}))) or not isinstance(
        recorded.get("codec"), dict | None
    ):
        raise CorruptRunError(f"{file_path} does not say what was recorded, as this format does", path=file_path)
    return description


def _check_layers(layers: Any) -> None:
    """Make sure that the layers are known by texts of which no two are alike."""
    if not isinstance(layers, list):
        raise TypeError(f"expected a list, got {type(layers).__name__}")
    seen: set[str] = set()
    for layer in layers:
        aliases = layer.get("aliases", [])
        if not isinstance(aliases, list):
            raise TypeError(f"expected a list of aliases, got {type(aliases).__name__}")
        for name in (layer["name"], *aliases):
            _text(name).encode()  # not half of a surrogate pair, which JSON can have and nothing else
            if name in seen:
                raise ValueError(f"{name!r} is there twice")
            seen.add(name)


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
    names : tuple of str
        Names of the dimensions of a chunk.
    """

    spec: ArraySpec
    extents: tuple[int, ...]
    names: tuple[str, ...]


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
        stored = _parse_array(array, json.loads(read_small(path, _MOST_ARRAY_BYTES, run_path)))
    except FileNotFoundError:
        raise CorruptRunError(f"{path} is missing, but the manifest has captures in that array", path=path) from None
    except (*NONSENSE, OSError) as error:
        raise CorruptRunError(f"{path} is no array metadata of this format: {error!r}", path=path) from error
    return stored


def _parse_array(array: str, metadata: Any) -> StoredArray:
    attributes, names = metadata["attributes"], metadata["dimension_names"]
    (sharding,) = (codec["configuration"] for codec in metadata["codecs"] if codec["name"] == "sharding_indexed")
    leading = 3 if names[2:3] == ["call"] else 2
    to_bytes, *compressors, checksum = sharding["codecs"]
    if to_bytes["name"] != "bytes" or to_bytes.get("configuration", {}).get("endian") == "big" or checksum["name"] != "crc32c":
        raise ValueError(f"codecs {sharding['codecs']!r}")
    shape, grid = _sizes(metadata["shape"]), _sizes(metadata["chunk_grid"]["configuration"]["chunk_shape"])
    chunk_shape = _sizes(sharding["chunk_shape"])
    if len(compressors) > 1 or not shape[leading:] == grid[leading:] == chunk_shape[leading:] or set(chunk_shape[:leading]) != {1}:
        raise ValueError(f"shape {shape}, shards of {grid} and chunks of {chunk_shape} with {len(compressors)} compressors")
    for compressor in compressors:
        _text(compressor["name"])  # other ways to name a codec are the user's
    spec = ArraySpec(
        layer=_text(attributes["layer"]),
        kind=_text(attributes["kind"]),
        phase=_text(attributes["phase"]),
        leaf=_text(attributes["leaf"]),
        dtype=_text(attributes["torch_dtype"]),
        name=array.split("/")[1],
        chunk_shape=chunk_shape[leading:],
        shard_shape=grid[:leading],
        rank=int(attributes["rank"]),
        codec=codec_metadata(compressors[0], attributes["torch_dtype"]) if compressors else None,
        portion=_text(attributes.get("select", "")),
        dims=tuple(map(_text, attributes.get("dims", ()))),
    )
    Portion.parse(spec.portion, spec.dims)
    if spec.dtype not in DTYPES or spec.phase not in PHASES:
        raise ValueError(f"dtype {spec.dtype!r} in phase {spec.phase!r}")
    if spec.path != array or not f"{spec.name}.".startswith(f"{spec.kind}."):
        raise ValueError(f"it is of {spec.kind} of layer {spec.layer!r}")
    if 0 in spec.chunk_shape or not 0 < spec.num_entries <= MAX_SHARD_ENTRIES or spec.chunk_bytes >= _MOST_CHUNK_BYTES:
        raise ValueError(f"shards of {spec.shard_shape} chunks of {spec.chunk_shape}, which cannot be")
    if len(names) != len(shape):
        raise ValueError(f"{len(names)} names for {len(shape)} dimensions")
    return StoredArray(spec, shape[:leading], tuple(map(_text, names[leading:])))


def _sizes(values: Any) -> tuple[int, ...]:
    """Return the sizes of dimensions."""
    if not isinstance(values, list) or len(values) > _MOST_DIMS or any(type(size) is not int or not 0 <= size < 2**63 for size in values):
        raise ValueError("there are sizes that no array has")
    return tuple(values)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
