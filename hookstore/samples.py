"""All captures of a layer and kind as one long array, of which any rows can be gathered."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import numpy as np

from hookstore.errors import CorruptRunError, OptionError
from hookstore.shards import gather_pieces

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hookstore.captures import Captures

_TOGETHER_BYTES = 512 << 10  # rows that are gathered at once, so that they go on to their places while they are in the cache


class _Source(NamedTuple):
    """A shard that rows are gathered from."""

    array: str
    shard: str
    codec: str | None
    chunk_shape: tuple[int, ...]


class Samples:
    """All captures of one layer and kind as one long array, of which any rows can be gathered; made by `Captures.samples`.

    The checksum of a chunk is checked the first time that a row of it is gathered; from then on rows are copied straight out of the memory-mapped shard.
    Where the run is compressed, a chunk is decoded once in each call that asks for rows of it.

    Attributes
    ----------
    shape : tuple of int
        Number of rows, and the shape of a row.
    dtype : numpy.dtype
        As `Captures.get` gives it.
    """

    def __init__(self, captures: Captures, positions: np.ndarray[Any, Any], dims: int) -> None:
        self._captures = captures
        self._index = captures._index  # positions count into this one, also after the run was refreshed
        self._positions = positions
        first = self._index.place(int(positions[0]))
        self._stored_dtype, shape = captures.run._type_of(first)
        self.dtype = self._stored_dtype
        self._leading, rest = self._split(shape, dims)
        # Where each capture begins, and where the last one ends.
        self._starts = np.concatenate([[0], np.cumsum(np.prod(self._leading, axis=1))])
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *rest)
        sizes = np.diff(self._starts)
        self._rows_each = int(sizes[0]) if (sizes == sizes[0]).all() else 0  # where all captures have as many rows
        self._row_bytes = math.prod(rest) * self._stored_dtype.itemsize
        scales = self._index.scales(positions)
        self._scales = (
            None
            if captures._is_raw or np.isnan(scales).all() or self.dtype.kind in "biu"
            else np.where(np.isnan(scales), np.float32(1), scales)
        )
        if self._scales is not None:
            self.dtype = _unscaled_dtype(self.dtype)
        # Which shard each capture is in. Of those whose chunk was checked, its first byte there (0 where it has to be decoded).
        self._source_of = self._index.sources(positions)
        self._is_checked = np.zeros(len(positions), dtype=bool)
        self._offsets = np.zeros(len(positions), dtype=np.int64)
        self._sources: dict[int, _Source] = {}

    def _split(self, shape: tuple[int, ...], dims: int) -> tuple[np.ndarray[Any, Any], tuple[int, ...]]:
        """Return the sizes of the dimensions that the long axis runs over, a line for each capture, and the shape of a row."""
        captures = self._captures
        if len(shape) < dims:
            raise OptionError(
                f"{captures._name} has captures of shape {shape}, too few dimensions for dims={dims}; read them with .get()",
                option="dims",
            )
        is_other = self._index.are_other(self._positions, len(shape))
        sizes = self._index.sizes(self._positions[~is_other], len(shape))
        is_other[~is_other] = (sizes[:, dims:] != shape[dims:]).any(axis=1)
        if is_other.any():
            raise self._differ(np.flatnonzero(is_other), shape, dims)
        leading, rest = sizes[:, :dims], shape[dims:]
        try:
            np.empty((0, *rest), dtype=self._stored_dtype)
            is_possible = (leading >= 0).all() and np.prod(leading, axis=1, dtype=np.float64).sum() < 2**62
        except ValueError:
            is_possible = False
        if not is_possible:
            raise CorruptRunError(f"{captures._name}: the manifest has captures of shapes that cannot be", path=captures.run.path)
        return leading, rest

    def _differ(self, others: np.ndarray[Any, Any], shape: tuple[int, ...], dims: int) -> OptionError:
        index = self._index
        shown = []
        for other in others[:5]:
            row = index.place(int(self._positions[other]))
            call = f", call {row['call']}" if row["call"] else ""
            shown.append(f"epoch {row['epoch']}, batch {row['batch']}{call} has {tuple(row['shape'])} {row['dtype']}")
        return OptionError(
            f"{self._captures._name}: the first capture has shape {shape} and dtype {self.dtype}, and {len(others):,} of {len(self._positions):,} have other "
            f"rows behind dims={dims}: {'; '.join(shown)}{'; …' if len(others) > 5 else ''}. Name a phase or a leaf, or let dims run over every "
            "dimension that varies",
            option="dims",
        )

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: SupportsIndex | slice | ArrayLike) -> np.ndarray[Any, Any]:
        """Gather rows.

        Parameters
        ----------
        indices : int, slice or array-like of int
            Which rows, in any order and as often as you like; negative ones count from the end.

        Returns
        -------
        numpy.ndarray
            Shape ``(*indices.shape, *self.shape[1:])``; your own.

        Raises
        ------
        IndexError
            If there is no such row.
        OptionError
            If the indices are no whole numbers.
        CorruptRunError
            If the bytes on disk do not match their checksum, or the manifest makes no sense.
        """
        wanted = np.arange(*indices.indices(len(self))) if isinstance(indices, slice) else self._resolve(indices)
        rows = self._gather(wanted.reshape(-1)).view(self._stored_dtype).reshape((*wanted.shape, *self.shape[1:]))
        if self._scales is None:
            return rows
        scales = self._scales[self._captures_of(wanted.reshape(-1))].reshape(wanted.shape + (1,) * (len(self.shape) - 1))
        return divide(rows, scales)

    def where(self, index: SupportsIndex) -> tuple[int, ...]:
        """Say where a row comes from.

        Parameters
        ----------
        index : int
            A row.

        Returns
        -------
        tuple of int
            Epoch, batch and call of the capture, and the row's position inside it: as many indices as ``dims``.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        row = int(self._resolve(operator.index(index)))
        capture = int(self._captures_of(np.array([row]))[0])
        found = self._index.place(int(self._positions[capture]))
        inside = np.unravel_index(row - int(self._starts[capture]), tuple(self._leading[capture].tolist()))
        return found["epoch"], found["batch"], found["call"], *map(int, inside)

    def _resolve(self, indices: SupportsIndex | ArrayLike) -> np.ndarray[Any, Any]:
        """Return indices as int64, counted from the start."""
        try:
            found = np.asarray(indices)
            if not found.size:
                found = found.astype(np.int64)
        except ValueError:  # lists of different lengths, or of nothing that could be a number
            found = np.asarray(None)
        if isinstance(indices, tuple) or not (found.dtype.kind in "iu" or found.size == 0 or all(type(one) is int for one in found.flat)):
            raise OptionError(f"samples: expected an int, a slice or an array of whole numbers, got {indices!r}", option="indices")
        num_rows = len(self)
        is_outside = np.asarray((found < -num_rows) | (found >= num_rows))
        if is_outside.any():
            raise IndexError(f"{self!r} has no row {found[is_outside][0]}; there are {num_rows:,}")
        whole = found.astype(np.int64)
        return np.asarray(np.where(whole < 0, whole + num_rows, whole))

    def _gather(self, wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the bytes of rows, shape (number of rows, bytes of a row)."""
        if not self._row_bytes or not wanted.size:
            return np.empty((wanted.size, self._row_bytes), dtype=np.uint8)
        captures = self._captures_of(wanted)
        self._check(captures)
        sources = self._source_of[captures]
        source = self._sources[int(sources[0])]
        if source.codec is None and (sources == sources[0]).all():
            return self._read(source, self._locate(source, wanted, captures))
        order = np.argsort(wanted)  # as they lie in the shards
        by_source = order[np.argsort(sources[order], kind="stable")]
        order, rows, captures, sources = by_source, wanted[by_source], captures[by_source], sources[by_source]
        stretches = list(_stretches(sources))
        out = np.empty((wanted.size, self._row_bytes), dtype=np.uint8)
        for low, high in stretches:
            self._gather_from(self._sources[int(sources[low])], rows[low:high], captures[low:high], out, order[low:high])
        return out

    def _captures_of(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which capture each row is of."""
        if self._rows_each:
            return np.asarray(rows // self._rows_each)
        return np.asarray(self._starts.searchsorted(rows, "right") - 1)

    def _check(self, captures: np.ndarray[Any, Any]) -> None:
        """Look at the chunks of captures that nobody has looked at yet."""
        run, index = self._captures.run, self._index
        new = ~self._is_checked[captures]
        for capture in np.unique(captures[new]).tolist() if new.any() else ():
            chunk, chunk_shape = run._locate(index.place(int(self._positions[capture])))
            if chunk.codec is None:
                run._reader.read(*chunk)
                self._offsets[capture] = chunk.offset
            self._sources[int(self._source_of[capture])] = _Source(chunk.array, chunk.shard, chunk.codec, chunk_shape)
            self._is_checked[capture] = True

    def _gather_from(
        self,
        source: _Source,
        rows: np.ndarray[Any, Any],
        captures: np.ndarray[Any, Any],
        out: np.ndarray[Any, Any],
        places: np.ndarray[Any, Any],
    ) -> None:
        """Copy the bytes of rows of one source to their places in ``out``; rows of one capture follow each other."""
        offsets = self._locate(source, rows, captures)
        if source.codec is None:
            together = max(1, _TOGETHER_BYTES // self._row_bytes)
            for low in range(0, len(rows), together):
                out[places[low : low + together]] = self._read(source, offsets[low : low + together])
            return
        run, index = self._captures.run, self._index
        for low, high in _stretches(captures):
            chunk, _ = run._locate(index.place(int(self._positions[captures[low]])))
            out[places[low:high]] = self._read(source, offsets[low:high], run._reader.read(*chunk))

    def _locate(self, source: _Source, rows: np.ndarray[Any, Any], captures: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return where rows of one source begin there, or inside their decoded chunks, in bytes."""
        dims = self._leading.shape[1]
        stride = math.prod(source.chunk_shape[dims:]) * self._stored_dtype.itemsize
        offsets, positions = self._offsets[captures], rows - self._starts[captures]
        for axis in range(dims - 1, 0, -1):  # counted in the captures' true shapes, they lie in the chunks' shape
            positions, along = np.divmod(positions, self._leading[captures, axis])
            offsets += along * stride
            stride *= source.chunk_shape[axis]
        return np.asarray(offsets + positions * stride)

    def _read(self, source: _Source, offsets: np.ndarray[Any, Any], decoded: memoryview | None = None) -> np.ndarray[Any, Any]:
        """Return the bytes of the rows at those offsets, without padding."""
        padded_shape = source.chunk_shape[self._leading.shape[1] :]
        num_bytes = math.prod(padded_shape) * self._stored_dtype.itemsize
        if decoded is None:
            pieces = self._captures.run._reader.gather(source.array, source.shard, offsets, num_bytes)
        else:
            pieces = gather_pieces(decoded, offsets, num_bytes)
        if padded_shape == self.shape[1:]:
            return pieces
        elements = pieces.view(f"V{self._stored_dtype.itemsize}").reshape(len(offsets), *padded_shape)
        kept = np.ascontiguousarray(elements[(slice(None), *map(slice, self.shape[1:]))])
        return kept.reshape(len(offsets), -1).view(np.uint8)

    def __repr__(self) -> str:
        return f"<hookstore.Samples: {self.shape} {self.dtype} of {self._captures.kind} of layer {self._captures.layer!r}>"


def divide(gradients: np.ndarray[Any, Any], scales: Any) -> np.ndarray[Any, Any]:
    """Divide gradients by the loss scale that they carry, in float32, or in their own dtype where that is wider."""
    with np.errstate(all="ignore"):  # what has overflowed is infinite, and a run may hold any scale
        return np.asarray(gradients.astype(_unscaled_dtype(gradients.dtype)) / scales)


def _unscaled_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.kind == "c" or dtype == np.float64 else np.dtype(np.float32)


def _stretches(values: np.ndarray[Any, Any]) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each stretch of equal values."""
    return pairwise([0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)])
