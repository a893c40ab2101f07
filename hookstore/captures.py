"""The captures of a run by layer, kind, epoch and batch."""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hookstore.errors import CaptureWarning, MissingCaptureError, OptionError
from hookstore.format import KINDS

if TYPE_CHECKING:
    import torch

    from hookstore.run import Run


class LayerRun:
    """One layer of a run. Its captures are under ``activation``, ``gradient``, ``input`` and ``parameter``."""

    def __init__(self, run: Run, name: str) -> None:
        self.run = run
        self.name = name

    @property
    def activation(self) -> Captures:
        """What the module returned."""
        return Captures(self.run, self.name, "activation")

    @property
    def gradient(self) -> Captures:
        """Gradient of the loss with respect to what the module returned."""
        return Captures(self.run, self.name, "gradient")

    @property
    def input(self) -> Captures:
        """What the module was called with."""
        return Captures(self.run, self.name, "input")

    @property
    def parameter(self) -> Captures:
        """The module's own parameters, as the forward saw them."""
        return Captures(self.run, self.name, "parameter")

    @property
    def kinds(self) -> list[str]:
        """Kinds that were captured of this layer."""
        rows = self.run._captured
        found = set(pc.unique(rows["kind"].filter(pc.equal(rows["layer"], self.name))).to_pylist())
        return [kind for kind in KINDS if kind in found]

    def __getitem__(self, kind: str) -> Captures:
        if kind not in KINDS:
            raise MissingCaptureError(f"there is no kind {kind!r}; the kinds are {', '.join(map(repr, KINDS))}", layer=self.name, kind=kind)
        return Captures(self.run, self.name, kind)

    def __repr__(self) -> str:
        return f"<hookstore.LayerRun {self.name!r}: {', '.join(self.kinds) or 'no captures'}>"


class Captures:
    """The captures of one layer and kind: ``captures[epoch, batch]``."""

    def __init__(self, run: Run, layer: str, kind: str) -> None:
        self.run = run
        self.layer = layer
        self.kind = kind

    def __getitem__(self, where: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """Return ``captures[epoch, batch]`` or ``captures[epoch, batch, call]``; see `get`."""
        if not isinstance(where, tuple) or len(where) not in (2, 3):
            raise OptionError(f"expected [epoch, batch] or [epoch, batch, call], got [{where!r}]", option="epoch")
        return self.get(*where)

    def get(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> np.ndarray[Any, Any]:
        """Read one tensor.

        Parameters
        ----------
        epoch, batch, call : int
            Coordinates of the forward.
        phase : str, optional
            ``"train"`` or ``"eval"``; by default ``"train"`` if anything was captured there.
        leaf : str, optional
            Path inside a nested value, or the parameter's name; may be left out where there is one only.
        backward : int, optional
            Which backward over that forward; by default the last.

        Returns
        -------
        numpy.ndarray
            Exactly what the model computed, in true shape and dtype (bfloat16 and float8 as ml_dtypes types). Read-only, and where the run is not compressed
            it lies in the file's own pages: copy it to change it.

        Raises
        ------
        MissingCaptureError
            If there is no such capture; it says what there is.
        CorruptRunError
            If the bytes on disk do not match their checksum.
        """
        return self.run.read(self.row(epoch, batch, call, phase=phase, leaf=leaf, backward=backward))

    def tensor(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> torch.Tensor:
        """Read one tensor as a torch tensor of its own memory; every dtype is possible. See `get`."""
        import torch

        bits, dtype = self.run._read_bits(self.row(epoch, batch, call, phase=phase, leaf=leaf, backward=backward))
        kind = getattr(torch, dtype.name, None)
        if kind is None:
            raise OptionError(f"dtype {dtype.name} needs a newer torch than {torch.__version__}", option="dtype")
        if bits.size == 0:
            return torch.empty(bits.shape, dtype=kind)
        return torch.frombuffer(bytearray(bits.tobytes()), dtype=kind).reshape(bits.shape)

    def row(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
    ) -> dict[str, Any]:
        """Return the manifest row of one tensor; parameters and errors as in `get`."""
        where: dict[str, Any] = {"epoch": int(epoch), "batch": int(batch), "call": int(call)}
        index = self._index
        phases = index.phases
        phase = phase if phase is not None else "train" if "train" in phases or not phases else phases[0]
        positions = index.find(phase, **where)
        if positions.size:
            leaves = index.leaves(positions)
            if leaf is None and len(leaves) > 1:
                raise MissingCaptureError(
                    f"{self._describe(**where, phase=phase)} has several leaves: {', '.join(map(repr, leaves))}; name one, as in "
                    f".get({where['epoch']}, {where['batch']}, leaf={leaves[0]!r})",
                    layer=self.layer,
                    kind=self.kind,
                    **where,
                )
            positions = index.only_leaf(positions, leaves[0] if leaf is None else leaf)
            if backward is not None:
                positions = index.only_backward(positions, backward)
        if positions.size:
            captured = index.only_captured(positions)
            if captured.size > 1 and backward is None:
                warnings.warn(
                    f"{self._describe(**where, phase=phase)} was captured {captured.size} times, by several backwards over one forward or because the clock "
                    "stood there twice; this is the last. The others are in .rows, and .get(…, backward=0) names one",
                    CaptureWarning,
                    stacklevel=3,
                )
            found = int((captured if captured.size else positions)[-1])
            row: dict[str, Any] = index.rows.slice(found, 1).to_pylist()[0]
            if row["status"] == "ok":
                return row
            raise MissingCaptureError(
                f"{self._describe(**where, phase=phase)} was {row['status']}: {row['reason']}",
                layer=self.layer,
                kind=self.kind,
                status=row["status"],
                **where,
            )
        raise MissingCaptureError(
            f"{self._describe(**where, phase=phase, leaf=leaf, backward=backward)} was not captured; {self._what_there_is(phase, where['epoch'])}",
            layer=self.layer,
            kind=self.kind,
            **where,
        )

    @property
    def rows(self) -> pa.Table:
        """The manifest rows of this layer and kind, in the order in which they were acknowledged."""
        return self._index.rows

    @property
    def leaves(self) -> list[str]:
        """Leaf paths that were captured."""
        return sorted(pc.unique(self._index.rows["leaf"]).to_pylist())

    @cached_property
    def _index(self) -> RowIndex:
        indexes = self.run._indexes
        key = (self.layer, self.kind)
        if key not in indexes:
            indexes[key] = RowIndex(self.run._rows(self.layer, self.kind))
        return indexes[key]

    def _describe(self, *, epoch: int, batch: int, call: int, phase: str, leaf: str | None = None, backward: int | None = None) -> str:
        extra = (
            f"{f', call {call}' if call else ''}{f', phase {phase}' if phase != 'train' else ''}{f', leaf {leaf!r}' if leaf else ''}"
            f"{f', backward {backward}' if backward is not None else ''}"
        )
        return f"{self.run.path}: {self.kind} of layer {self.layer!r} in epoch {epoch}, batch {batch}{extra}"

    def _what_there_is(self, phase: str, epoch: int) -> str:
        rows = self._index.rows
        captured = rows.filter(pc.equal(rows["status"], "ok"))
        if not captured.num_rows:
            kinds = self.run[self.layer].kinds
            return f"this layer has {', '.join(kinds)}" if kinds else "nothing was captured of this layer"
        of_phase = captured.filter(pc.equal(captured["phase"], phase))
        if not of_phase.num_rows:
            return f"there is only phase {captured['phase'][0].as_py()!r}"
        batches = sorted(pc.unique(of_phase["batch"].filter(pc.equal(of_phase["epoch"], epoch))).to_pylist())
        if batches:
            return f"epoch {epoch} has batches {ranges(batches)}"
        return f"there are epochs {ranges(sorted(pc.unique(of_phase['epoch']).to_pylist()))}"

    def __len__(self) -> int:
        rows = self._index.rows
        return int(pc.sum(pc.equal(rows["status"], "ok")).as_py() or 0)

    def __repr__(self) -> str:
        return f"<hookstore.Captures: {len(self)} of {self.kind} of layer {self.layer!r}>"


class RowIndex:
    """Finds manifest rows of one layer and kind by their coordinates."""

    def __init__(self, rows: pa.Table) -> None:
        self.rows = rows.combine_chunks()
        self._values: dict[str, list[str]] = {}
        self._columns = {name: self._column(name) for name in ("phase", "epoch", "batch", "call", "backward", "leaf", "status")}
        # Stable, so that of rows with equal coordinates the one acknowledged last comes last.
        self._order = np.lexsort([self._columns[name] for name in ("backward", "call", "batch", "epoch", "phase")])
        self._sorted = {name: self._columns[name][self._order] for name in ("phase", "epoch", "batch", "call")}

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column as integers; those of text count through the values kept aside."""
        column = self.rows[name]
        if column.type != pa.string():
            return np.asarray(column.to_numpy())
        values = self._values[name] = sorted(pc.unique(column).to_pylist())
        return np.asarray(pc.index_in(column, pa.array(values, type=pa.string())).to_numpy())

    def _code(self, name: str, value: str) -> int:
        return self._values[name].index(value) if value in self._values[name] else -1

    @property
    def phases(self) -> list[str]:
        """Phases of the rows."""
        return self._values["phase"]

    def find(self, phase: str, *, epoch: int, batch: int, call: int) -> np.ndarray[Any, Any]:
        """Return the positions of the rows at those coordinates, in order of backward and acknowledgement."""
        low, high = 0, len(self._order)
        for name, value in (("phase", self._code("phase", phase)), ("epoch", epoch), ("batch", batch), ("call", call)):
            column = self._sorted[name][low:high]
            low, high = low + int(np.searchsorted(column, value, "left")), low + int(np.searchsorted(column, value, "right"))
        return self._order[low:high]

    def leaves(self, positions: np.ndarray[Any, Any]) -> list[str]:
        """Leaf paths at those positions."""
        return [self._values["leaf"][code] for code in sorted(set(self._columns["leaf"][positions].tolist()))]

    def only_leaf(self, positions: np.ndarray[Any, Any], leaf: str) -> np.ndarray[Any, Any]:
        """Keep the positions of one leaf."""
        return np.asarray(positions[self._columns["leaf"][positions] == self._code("leaf", leaf)])

    def only_backward(self, positions: np.ndarray[Any, Any], backward: int) -> np.ndarray[Any, Any]:
        """Keep the positions of one backward."""
        return np.asarray(positions[self._columns["backward"][positions] == backward])

    def only_captured(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Keep the positions of rows that have a tensor."""
        return np.asarray(positions[self._columns["status"][positions] == self._code("status", "ok")])


def ranges(numbers: list[int]) -> str:
    """Write sorted numbers shortly: ``0, 5 – 25 in steps of 5, 28``."""
    if not numbers:
        return "none"
    pieces = []
    start = 0
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - start >= 3:
            pieces.append(f"{numbers[start]} – {numbers[end - 1]}{f' in steps of {step}' if step > 1 else ''}")
        else:
            end = start + 1
            pieces.append(str(numbers[start]))
        start = end
    return ", ".join(pieces[:8]) + (f" and {len(pieces) - 8} more" if len(pieces) > 8 else "")
