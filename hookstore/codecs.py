"""Compressors: Zarr v3 codec metadata on one side, numcodecs on the other.

Only codecs that are Zarr's own and lose nothing are taken, each with its own options: an array's metadata comes with the run, which is untrusted input, and
numcodecs has codecs that unpickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numcodecs
import numpy as np

from hookstore.errors import OptionError
from hookstore.format import DTYPES

_SHORTHANDS: dict[str, dict[str, Any]] = {
    "zstd": {"name": "zstd"},
    "lz4": {"name": "blosc", "configuration": {"cname": "lz4"}},
}
_BLOSC_SHUFFLE = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOSC_COMPRESSORS = ("blosclz", "lz4", "lz4hc", "zlib", "zstd")


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


# For each codec its options: the default and what is allowed.
_CODECS: dict[str, dict[str, tuple[Any, Callable[[Any], bool]]]] = {
    "zstd": {"level": (3, _whole(-131_072, 22)), "checksum": (False, lambda value: isinstance(value, bool))},
    "gzip": {"level": (5, _whole(0, 9))},
    "blosc": {
        "typesize": (None, _whole(1, 255)),  # by default the element's size
        "cname": ("zstd", lambda value: value in _BLOSC_COMPRESSORS),
        "clevel": (5, _whole(0, 9)),
        "shuffle": ("shuffle", lambda value: isinstance(value, str) and value in _BLOSC_SHUFFLE),
        "blocksize": (0, _whole(0, 2**31 - 1)),
    },
}


def codec_metadata(codec: str | dict[str, Any] | None, dtype: str) -> str | None:
    """Return the compressor of an array as canonical JSON: Zarr v3 codec metadata with every option written out.

    Parameters
    ----------
    codec : str, dict or None
        As given to `hookstore.record`.
    dtype : str
        Key of `hookstore.format.DTYPES`; decides blosc's element size.

    Raises
    ------
    OptionError
        If the codec is not known, or an option is refused.
    """
    if codec is None:
        return None
    metadata = _SHORTHANDS.get(codec) if isinstance(codec, str) else codec
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str) or not set(metadata) <= {"name", "configuration"}:
        raise OptionError(
            f"codec: expected None, 'zstd', 'lz4' or Zarr codec metadata such as {{'name': 'zstd', 'configuration': {{'level': 3}}}}, got {codec!r}",
            option="codec",
        )
    name, given = metadata["name"], metadata.get("configuration")
    options = _CODECS.get(name)
    if options is None:
        raise OptionError(f"codec: {name!r} is not known; there are {', '.join(map(repr, _CODECS))}", option="codec")
    given = {} if given is None else given
    if not isinstance(given, dict) or not set(given) <= set(options):
        raise OptionError(f"codec: {name!r} takes a configuration of {', '.join(map(repr, options))}, got {given!r}", option="codec")
    configuration = {}
    for option, (default, is_allowed) in options.items():
        value = given.get(option, DTYPES[dtype].itemsize if option == "typesize" else default)
        if not is_allowed(value):
            raise OptionError(f"codec: {name!r} does not take {option} {value!r}", option="codec")
        configuration[option] = value
    return json.dumps({"name": name, "configuration": configuration}, sort_keys=True)


def decode(made: Any, encoded: memoryview, num_bytes: int) -> memoryview:
    """Decode one chunk.

    Parameters
    ----------
    made : object
        From `compressor`.
    encoded : memoryview
        The chunk.
    num_bytes : int
        What it must give; a chunk that claims more is not unpacked.

    Raises
    ------
    ValueError, RuntimeError, OSError, EOFError, MemoryError, zlib.error
        If it does not decode, or claims another size.
    """
    if isinstance(made, numcodecs.GZip):
        unpacker = zlib.decompressobj(wbits=31)
        contents = unpacker.decompress(encoded, num_bytes + 1)
        if len(contents) != num_bytes or not unpacker.eof:
            raise ValueError(f"the chunk does not have {num_bytes:,} bytes")
        return memoryview(contents)
    if isinstance(made, numcodecs.Blosc):
        claimed, stored = int.from_bytes(encoded[4:8], "little"), int.from_bytes(encoded[12:16], "little")
        if len(encoded) < 16 or stored != len(encoded):  # blosc believes its header and would read on
            raise ValueError(f"the chunk claims to be stored in {stored:,} bytes and has {len(encoded):,}")
    else:
        claimed = _zstd_content_bytes(encoded)
    if claimed != num_bytes:
        raise ValueError(f"the chunk claims {claimed:,} bytes, its shape needs {num_bytes:,}")
    room = np.empty(num_bytes, dtype=np.uint8)  # given to the codec, which would else make some for all frames that follow the first
    made.decode(encoded, room)
    return memoryview(room)  # type: ignore[arg-type]  # an ndarray is a buffer


def _zstd_content_bytes(frame: memoryview) -> int:
    """Return the content size in the header of a Zstandard frame (RFC 8878, 3.1.1.1), which numcodecs always writes; -1 for anything else."""
    if frame[:4] != _ZSTD_MAGIC:
        return -1  # among what else the library takes are frames that say nothing of their size
    descriptor = frame[4] if len(frame) > 4 else 0
    num_bytes = (1 if descriptor & 0x20 else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (0 if descriptor & 0x20 else 1) + (0, 1, 2, 4)[descriptor & 3]
    field = bytes(frame[start : start + num_bytes])
    return int.from_bytes(field, "little") + (256 if num_bytes == 2 else 0) if len(field) == num_bytes > 0 else -1


def compressor(metadata: str) -> Any:
    """Return the numcodecs compressor for canonical codec metadata; it has ``encode``. Decoding goes through `decode`.

    Raises
    ------
    OptionError
        If there is none, or it refuses its options.
    """
    text = codec_metadata(json.loads(metadata), "uint8")  # metadata that comes with a run is checked like a user's
    assert text is not None
    codec = json.loads(text)
    name, configuration = codec["name"], codec["configuration"]
    if name == "blosc":
        configuration["shuffle"] = _BLOSC_SHUFFLE[configuration["shuffle"]]
        return numcodecs.Blosc(**configuration)
    return {"zstd": numcodecs.Zstd, "gzip": numcodecs.GZip}[name](**configuration)
