"""What the dimensions of an array are called, and where in the whole tensor the positions lie that a part of one keeps.

xarray wants a name to have one size within a group, so a name that is taken with another size gives way to one that belongs to the array alone. A dimension
of which a part is kept has a name of its own, ``sample@~8`` for ``sample[:8]``, and, where it is known which positions these are, a one-dimensional array of
that name beside the captures': a coordinate. Everything here is pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hookstore.format import KINDS, OF_BATCH, ArraySpec, escape
from hookstore.portion import SAMPLE, Pick, Portion, token_of

_MOST_POSITIONS = 1 << 20
_WITHOUT_SAMPLES = ("parameter", "loss")


class Dimension(NamedTuple):
    """One dimension of a chunk.

    Attributes
    ----------
    wished : str
        The name that it has if nothing else is called so; empty for none.
    own : str
        The name that no other array uses.
    size : int
        Its size.
    positions : bytes or None
        Which positions of the whole tensor these are, as little-endian int64; negative ones count from the end. ``None`` where all are there, or it is not
        known which, or not the same in every capture.
    """

    wished: str
    own: str
    size: int
    positions: bytes | None


def dimensions_of(spec: ArraySpec) -> list[Dimension]:
    """Return the dimensions of an array behind those of epoch, batch and call."""
    portion = Portion.parse(spec.portion, spec.dims)
    picks = portion.picks if portion is not None else ()
    is_unknown = portion is not None and not portion.is_known  # a function may return anything
    num_dims = len(spec.chunk_shape)
    found = []
    for axis, size in enumerate(spec.chunk_shape):
        name = "" if is_unknown else _name_of(spec, axis)
        pick = next((pick for pick in picks if pick.axis % num_dims == axis), None)
        found.append(_whole(spec, axis, size, name) if pick is None else _part(spec, axis, size, name, pick))
    return found


def _name_of(spec: ArraySpec, axis: int) -> str:
    if axis < len(spec.dims):
        return spec.dims[axis]
    is_part = spec.kind == "annotation" and "." in spec.leaf  # the letters of texts, say
    return SAMPLE if axis == 0 and not spec.dims and spec.kind not in _WITHOUT_SAMPLES and not is_part else ""


def _whole(spec: ArraySpec, axis: int, size: int, name: str) -> Dimension:
    # "activation_1", "parameter_0.weight": the position comes before the first dot, where no array has one in its name
    rest = spec.name.removeprefix(spec.kind)
    named = f"{spec.kind}_{name if name and spec.dims else axis}{rest}"
    return Dimension("" if name in KINDS or name in OF_BATCH else name, named, size, None)  # arrays have these names


def _part(spec: ArraySpec, axis: int, size: int, name: str, pick: Pick) -> Dimension:
    token = token_of(pick.text)
    kept = f"@{token.partition('=')[2]}" if "=" in token else token
    rest = spec.name.removeprefix(spec.kind)
    own = f"{spec.kind}_{name or axis}{kept}"
    return Dimension(escape(f"{name}{kept}" if name else own), escape(f"{own}{rest}"), size, _positions(pick, size))


def _positions(pick: Pick, size: int) -> bytes | None:
    """Return the positions that are kept, where they do not depend on how many there were."""
    if size > _MOST_POSITIONS:
        return None
    kept: Sequence[int]
    if isinstance(pick.kept, tuple):
        kept = pick.kept if len(pick.kept) == size else ()
    else:
        start, step = pick.kept.start or 0, pick.kept.step or 1
        kept = range(start, start + step * size, step) if start >= 0 else ()
    ends = (*kept[:1], *kept[-1:]) if isinstance(kept, range) else kept  # a damaged run may have a million numbers of thousands of digits
    if not ends or max(map(abs, ends)) >= 2**63:
        return None
    return np.array(kept, dtype="<i8").tobytes()


def is_coordinate(name: str) -> bool:
    """Say whether a directory of that name in a layer's group is a coordinate, and not an array of captures: those begin with their kind and a dot."""
    return "@" in name.partition(".")[0] and not any(character in name for character in "/\\\0")


def coordinate_files(name: str, positions: bytes) -> dict[str, bytes]:
    """Return the files of the coordinate of a dimension of that name: a Zarr v3 array of int64 in one chunk."""
    size = len(positions) // 8
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [size],
        "data_type": "int64",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {"long_name": "positions in the whole tensor"},
        "dimension_names": [name],
    }
    return {"zarr.json": json.dumps(metadata).encode(), "c.0": positions}
