"""Compressors: Zarr v3 codec metadata on one side, numcodecs on the other.

Only codecs that are Zarr's own and lose nothing are taken, each with its own options: an array's metadata comes with the run, which is untrusted input, and
numcodecs has codecs that unpickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numcodecs

from hookstore.errors import OptionError
from hookstore.format import DTYPES

_SHORTHANDS: dict[str, dict[str, Any]] = {
    "zstd": {"name": "zstd"},
    "lz4": {"name": "blosc", "configuration": {"cname": "lz4"}},
}
_BLOSC_SHUFFLE = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
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


def compressor(metadata: str) -> Any:
    """Return the numcodecs compressor for canonical codec metadata; it has ``encode`` and ``decode``.

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
