"""The captures of a run by layer, kind, epoch and batch."""

from __future__ import annotations

import functools
import math
import warnings
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hookstore.assembly import Assembly
from hookstore.errors import CaptureWarning, MissingCaptureError, OptionError
from hookstore.format import KINDS, OF_BATCH
from hookstore.portion import Portion, Select
from hookstore.rows import RowIndex
from hookstore.samples import Samples
from hookstore.statistics import Statistics
from hookstore.summaries import record_of, table_of

if TYPE_CHECKING:
    import torch

    from hookstore.run import Run

_OF_PARAMETERS = ("parameter", "parameter_gradient")
_NAMED = (*_OF_PARAMETERS, "annotation")  # kinds whose leaves are values of their own, each with a name
_OF_BACKWARD = ("gradient", "input_gradient")  # kinds of which a tensor may have none


class LayerRun:
    """One layer of a run. Its captures are under ``activation``, ``gradient``, ``input``, ``parameter`` and the gradients of these two."""

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
    def input_gradient(self) -> Captures:
        """The module's own share of the gradient of what it was called with."""
        return Captures(self.run, self.name, "input_gradient")

    @property
    def parameter(self) -> Captures:
        """The module's own parameters, as the forward saw them."""
        return Captures(self.run, self.name, "parameter")

    @property
    def parameter_gradient(self) -> Captures:
        """Gradients of the module's own parameters, as the optimizer saw them; ``step`` in their rows counts the steps before."""
        return Captures(self.run, self.name, "parameter_gradient")

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

    def __init__(
        self, run: Run, layer: str, kind: str, *, is_raw: bool = False, leaf: str | None = None, portion: str | None = None
    ) -> None:
        self.run = run
        self.layer = layer
        self.kind = kind
        self._is_raw = is_raw
        self._leaf = leaf
        self._portion = portion

    @property
    def raw(self) -> Captures:
        """The same as it is stored: gradients stay multiplied by the loss scale that they came with."""
        return Captures(self.run, self.layer, self.kind, is_raw=True, leaf=self._leaf, portion=self._portion)

    def leaf(self, path: str) -> Captures:
        """Look at one tensor of nested values alone, or at all that lies below a path.

        Parameters
        ----------
        path : str
            As in the column ``leaf``: ``captures.leaf("1.0")[epoch, batch]`` is what ``captures[epoch, batch][1][0]`` is.
        """
        return Captures(self.run, self.layer, self.kind, is_raw=self._is_raw, leaf=path, portion=self._portion)

    @property
    def portions(self) -> list[str]:
        """Parts of tensors that are stored, as in the column ``portion``; the whole tensor is ``""``, and comes first."""
        return self._all.portions

    def portion(self, select: str | Select | None) -> Captures:
        """Look at one part of the tensors alone.

        Without this it is the whole tensor where the run has any whole one (or its statistics), and otherwise the only part that there is.

        Parameters
        ----------
        select : str, mapping, callable or None
            As in the column ``portion``, or as it was given to `record`: ``"sample[:8]"`` or ``{"sample": 8}``. ``None`` or ``""`` is the whole tensor.

        Raises
        ------
        OptionError
            If that names no part of a tensor.
        """
        text = "" if select is None else select if isinstance(select, str) else self._text_of(select)
        return Captures(self.run, self.layer, self.kind, is_raw=self._is_raw, leaf=self._leaf, portion=text)

    def _text_of(self, select: Select) -> str:
        """Return the text of a part, whose axes have the names that they were given when they were recorded."""
        portion = Portion.build(select, self.run._dims(self.layer, self.kind) or None)
        assert portion is not None
        if portion.function is not None:
            alike = [text for text in self.portions if text == portion.text or text.startswith(f"{portion.text[:-2]}~")]
            if len(alike) > 1:
                raise OptionError(
                    f"select: of {self._name} there are parts by several functions of that name, which nobody can tell apart now; name one, as in "
                    f".portion({alike[0]!r}): there are {', '.join(map(repr, alike))}",
                    option="select",
                )
        return portion.text

    def __getitem__(self, where: tuple[int, ...]) -> Any:
        """Return ``captures[epoch, batch]`` or ``captures[epoch, batch, call]``; see `value`."""
        if not isinstance(where, tuple) or len(where) not in (2, 3):
            raise OptionError(f"expected [epoch, batch] or [epoch, batch, call], got [{where!r}]", option="epoch")
        return self.value(*where)

    def value(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
        torch: bool = False,
    ) -> Any:
        """Read a whole value, in the structure that the module returned (or was called with).

        Parameters
        ----------
        epoch, batch, call, phase, backward, attempt
            As in `get`.
        torch : bool
            Give torch tensors instead of arrays.

        Returns
        -------
        object
            A `numpy.ndarray` for a plain tensor, as `get` gives it. Otherwise tuples, lists, dicts and named tuples as they were, a `Record` for a dataclass, a
            `PackedSequence`, an `Arguments` for several inputs, a `SparseArray`, `NestedArray` or `QuantizedArray`, ``None`` where there was ``None`` or
            (in a gradient) where no gradient arrived in that backward, and a `NotStored` where something was not stored. All tensors are of one attempt and
            one backward.
            Several parameters (or annotations) are a dict by name.

        Raises
        ------
        MissingCaptureError
            If there is no such capture, or a tensor in it was dropped or lost; it says what there is.
        CorruptRunError
            If the bytes on disk do not match their checksum, or the structure makes no sense.
        """
        where: dict[str, Any] = {"epoch": int(epoch), "batch": int(batch), "call": int(call)}
        options: dict[str, Any] = {"phase": phase, "backward": backward, "attempt": attempt}
        index = self._index
        if not index.has_structures and not (self.kind in _NAMED and self._leaf is None):
            return self.tensor(*where.values(), **options) if torch else self.get(*where.values(), **options)
        phase = self._phase(phase)
        positions = index.find(phase, **where)
        if attempt is not None:
            positions = index.only_attempt(positions, attempt)
        captured = index.only_captured(positions)
        if backward is not None:
            captured = index.only_backward(captured, backward)
        if not captured.size:
            self._position(*where.values(), leaf=None, **options)  # says what is missing
        captured = index.only_last_attempt(captured)
        positions = index.only_attempt(positions, index.attempt_of(captured[-1]))
        name = self._describe(**where, phase=phase)
        read = self._tensor if torch else functools.partial(self.run.read, raw=self._is_raw)
        assembly = Assembly(
            map(index.place, index.of_last_backward(positions, captured).tolist()),
            name,
            {"layer": self.layer, "kind": self.kind, **where},
            read,
            as_torch=torch,
            may_be_absent=self._why_absent(phase, where) if self.kind in _OF_BACKWARD else None,
        )
        count = max(assembly.most_often, index.num_backwards(captured))
        if count > 1 and backward is None:
            self._warn_of_several(name, count)
        branch = None if assembly.whole is None else assembly.whole.find(self._leaf or "")
        if branch is not None and (self._leaf is None or not branch.is_leaf):
            return assembly.value(branch)
        tensors = assembly.tensors
        if self._leaf is not None:
            if assembly.has(self._leaf):
                return assembly.tensor(self._leaf)
            return read(index.place(self._position(*where.values(), leaf=None, **options)))
        if len(tensors) == 1 and self.kind != "annotation":
            return assembly.tensor(tensors[0])
        if self.kind in _NAMED:
            return {tensor: assembly.tensor(tensor) for tensor in tensors}
        raise self._several(name, tensors, where)

    def _why_absent(self, phase: str, where: dict[str, Any]) -> str:
        """Return "" where a gradient without a row is one that did not arrive, else why that is not certain."""
        status, why = self.run._why_left_out(phase, where["epoch"], where["batch"])
        return f"its batch was {status}: {why}" if status else ""

    def _several(self, name: str, leaves: list[str], where: dict[str, Any]) -> MissingCaptureError:
        return MissingCaptureError(
            f"{name} has several leaves: {', '.join(map(repr, leaves))}; name one, as in "
            f".get({where['epoch']}, {where['batch']}, leaf={leaves[0]!r})",
            layer=self.layer,
            kind=self.kind,
            **where,
        )

    def _warn_of_several(self, name: str, count: int) -> None:
        warnings.warn(
            f"{name} was captured {count} times, by several backwards over one forward or because the clock "
            "stood there twice; this is the last. The others are in .rows, and .get(…, backward=0) names one",
            CaptureWarning,
            stacklevel=4,
        )

    def get(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
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
        attempt : int, optional
            Which recording of the run (0, and one more each time that it was taken up again); by default the latest that has this capture.

        Returns
        -------
        numpy.ndarray
            Exactly what the model computed, in true shape and dtype (bfloat16 and float8 as ml_dtypes types). Read-only, and where the run is not compressed
            it lies in the file's own pages: copy it to change it. A gradient with a loss scale is divided by it in float32; see `raw`.

        Raises
        ------
        MissingCaptureError
            If there is no such capture; it says what there is.
        CorruptRunError
            If the bytes on disk do not match their checksum.
        """
        position = self._position(epoch, batch, call, phase=phase, leaf=leaf, backward=backward, attempt=attempt)
        return self.run.read(self._index.place(position), raw=self._is_raw)

    def tensor(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
    ) -> torch.Tensor:
        """Read one tensor as a torch tensor of its own memory; every dtype is possible. See `get`."""
        position = self._position(epoch, batch, call, phase=phase, leaf=leaf, backward=backward, attempt=attempt)
        return self._tensor(self._index.place(position))

    def _tensor(self, place: dict[str, Any]) -> torch.Tensor:
        import torch

        bits, dtype = self.run._read_bits(place)
        kind = getattr(torch, dtype.name, None)
        if kind is None:
            raise OptionError(f"dtype {dtype.name} needs a newer torch than {torch.__version__}", option="dtype")
        if bits.size == 0:
            return torch.empty(bits.shape, dtype=kind)
        tensor = torch.frombuffer(bytearray(bits.tobytes()), dtype=kind).reshape(bits.shape)
        scale = place["loss_scale"]
        if self._is_raw or math.isnan(scale) or not (kind.is_floating_point or kind.is_complex):
            return tensor
        return tensor.to(torch.promote_types(kind, torch.float32)) / torch.tensor(scale, dtype=torch.float32)

    def row(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
    ) -> dict[str, Any]:
        """Return the manifest row of one tensor, or of its statistics; parameters and errors as in `stats`."""
        where = {"phase": phase, "leaf": leaf, "backward": backward, "attempt": attempt}
        position = self._position(epoch, batch, call, **where, may_be_summarized=True)  # type: ignore[arg-type]  # each of its own type
        row: dict[str, Any] = self._index.coded.slice(position, 1).to_pylist()[0]
        return row

    def samples(self, *, phase: str | None = None, leaf: str | None = None, dims: int = 1, attempt: int | None = None) -> Samples:
        """Look at all captures as one long array, to gather rows from anywhere in it.

        Parameters
        ----------
        phase : str, optional
            ``"train"`` or ``"eval"``; by default ``"train"`` if anything was captured there.
        leaf : str, optional
            Path inside a nested value, or the parameter's name; may be left out where there is one only.
        dims : int
            How many dimensions of each capture the long axis runs over: 1 for samples, 2 for samples × tokens, say.
        attempt : int, optional
            Only what this recording of the run has; by default what `get` gives.

        Returns
        -------
        Samples
            The captures that ``captures[epoch, batch, call]`` gives, in that order, one after another.

        Raises
        ------
        MissingCaptureError
            If there is none, or if there are several leaves and none is named.
        OptionError
            If the captures have fewer dimensions than ``dims``, or rows of different shapes or dtypes.
        CorruptRunError
            If the manifest makes no sense.
        """
        if isinstance(dims, bool) or not isinstance(dims, int) or dims < 1:
            raise OptionError(f"dims: expected a whole number from 1 on, got {dims!r}", option="dims")
        index = self._index
        phase = self._phase(phase)
        leaf = self._leaf if leaf is None else leaf
        leaves = index.leaves(index.captured(phase, attempt))
        if leaf is None and len(leaves) > 1:
            raise MissingCaptureError(
                f"{self._name} has several leaves: {', '.join(map(repr, leaves))}; name one, as in .samples(leaf={leaves[0]!r})",
                layer=self.layer,
                kind=self.kind,
            )
        if not leaves or (leaf is not None and leaf not in leaves):
            there_is = f"there are leaves {', '.join(map(repr, leaves))}" if leaves else self._what_there_is(phase)
            of_leaf = f", leaf {leaf!r}," if leaf else ""
            raise MissingCaptureError(
                f"{self._name}{of_leaf} was not captured in phase {phase!r}; {there_is}{self.run._what_is_damaged()}",
                layer=self.layer,
                kind=self.kind,
            )
        return Samples(self, index.last_captured(phase, leaves[0] if leaf is None else leaf, attempt), dims)

    def _phase(self, phase: str | None) -> str:
        phases = self._index.phases
        return phase if phase is not None else "train" if "train" in phases or not phases else phases[0]

    def _position(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex,
        *,
        phase: str | None,
        leaf: str | None,
        backward: int | None,
        attempt: int | None,
        may_be_summarized: bool = False,
    ) -> int:
        """Return where the row of one tensor stands in the index, or, where that will do, one of its statistics alone."""
        where: dict[str, Any] = {"epoch": int(epoch), "batch": int(batch), "call": int(call)}
        index = self._index
        only_captured = index.only_stored if may_be_summarized else index.only_captured
        phase = self._phase(phase)
        positions = index.find(phase, **where)
        if attempt is not None:
            positions = index.only_attempt(positions, attempt)
        if backward is not None:
            positions = index.only_backward(positions, backward)
        if positions.size:
            latest = index.only_last_attempt(only_captured(positions))
            leaves = self._shown(index.leaves(latest if latest.size else positions))
            if self.kind == "loss" and leaf is None and self._leaf is None and "" in leaves:
                leaf = ""  # the others have names
            if leaf is None and len(leaves) > 1 and latest.size:
                raise self._several(self._describe(**where, phase=phase), leaves, where)
            # (where there are several and none was captured, the reason of any will do)
            chosen = leaf if leaf is not None else leaves[0] if len(leaves) == 1 else self._leaf
            if chosen is not None:
                positions = index.only_leaf(positions, chosen)
        if positions.size:
            captured = index.only_last_attempt(only_captured(positions))
            if captured.size > 1 and backward is None:
                self._warn_of_several(self._describe(**where, phase=phase), captured.size)
            if captured.size:
                return int(captured[-1])
            summarized = index.only_stored(positions)
            row = index.place(int((summarized if summarized.size else positions)[-1]))
            parts = [text for text in self.portions if text] if self._portion is None else []
            named = f", phase={phase!r}" if phase != self._phase(None) else ""
            hint = f"; .stats({', '.join(map(str, where.values()))}{named}) reads them" + (
                f", and .portion({parts[0]!r}) a part" if parts else ""
            )
            raise MissingCaptureError(
                f"{self._describe(**where, phase=phase)} was {row['status']}: {row['reason']}{hint if summarized.size else ''}",
                layer=self.layer,
                kind=self.kind,
                status=row["status"],
                **where,
            )
        status, why = self.run._why_left_out(phase, where["epoch"], where["batch"])
        leaf = self._leaf if leaf is None else leaf
        why = why or index.why_never(leaf)
        there_is = "" if why else f"; {self._what_there_is(phase, where['epoch'])}{self.run._what_is_damaged()}"
        why = why or ("" if status else self._why_no_gradient(phase, where))
        missing = f"was {status}: {why}" if status == "skipped" else "was not captured" + (f": {why}" if why else "")
        raise MissingCaptureError(
            f"{self._describe(**where, phase=phase, leaf=leaf, backward=backward, attempt=attempt)} {missing}{there_is}",
            layer=self.layer,
            kind=self.kind,
            status=status,
            **where,
        )

    def _why_no_gradient(self, phase: str, where: dict[str, Any]) -> str:
        """Return why a layer that was called has no gradient there, or "" where that is not what is missing."""
        if self.kind not in (*_OF_BACKWARD, "parameter_gradient") or not self.run._records(self.kind):
            return ""
        of_forward = (Captures(self.run, self.layer, kind)._all for kind in ("activation", "input", "parameter"))
        if not any(index.only_stored(index.find(phase, **where)).size for index in of_forward):
            return ""
        if self.kind == "parameter_gradient":
            return "no optimizer's step had a gradient of it there"
        return "no gradient arrived: the layer is frozen, the loss does not depend on it, or no backward ran"

    def stats(
        self,
        epoch: SupportsIndex,
        batch: SupportsIndex,
        call: SupportsIndex = 0,
        *,
        phase: str | None = None,
        leaf: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
    ) -> Statistics:
        """Return statistics of one tensor: those that were stored, or else computed of the tensor.

        Parameters and errors are as in `get`; here a tensor of which only statistics are stored is none that is missing. Like what `get` returns, those of a
        gradient are without its loss scale, and `raw` gives them with it.
        """
        where = {"phase": phase, "leaf": leaf, "backward": backward, "attempt": attempt}
        position = self._position(epoch, batch, call, **where, may_be_summarized=True)  # type: ignore[arg-type]  # each of its own type
        return Statistics.of_record(record_of(self.run, self._index, position, raw=self._is_raw))

    def statistics(self, *, phase: str | None = None, leaf: str | None = None, attempt: int | None = None) -> pa.Table:
        """Return the statistics of all captures as a table, one row for each, in order of phase, epoch, batch and call.

        Tensors of which none were stored are read to compute them.

        Parameters
        ----------
        phase : str, optional
            Only ``"train"`` or only ``"eval"``.
        leaf : str, optional
            Only this path inside nested values, or this parameter.
        attempt : int, optional
            Only this recording of the run.

        Returns
        -------
        pyarrow.Table
            ``phase``, ``epoch``, ``batch``, ``call``, ``backward``, ``step``, ``leaf`` and ``attempt``; the columns of statistics as in the manifest.

        Raises
        ------
        MissingCaptureError
            If several parts of the tensors are stored and none is named.
        CorruptRunError
            If the bytes on disk do not match their checksum.
        """
        index = self._index
        positions = index.stored(phase, attempt)
        if leaf is not None:
            positions = index.only_leaf(positions, leaf)
        elif self._leaf:
            shown = [index.only_leaf(positions, path) for path in self._shown(index.leaves(positions))]
            positions = positions[np.isin(positions, np.concatenate([positions[:0], *shown]))]
        return table_of(self.run, index, positions, raw=self._is_raw)

    @property
    def rows(self) -> pa.Table:
        """The manifest rows of this layer and kind, in the order in which they were acknowledged."""
        rows = self._shown_index.rows
        if self._leaf is None:
            return rows
        return rows.filter(pc.is_in(rows["leaf"], pa.array(self._shown(pc.unique(rows["leaf"]).to_pylist()), pa.string())))

    @property
    def leaves(self) -> list[str]:
        """Leaf paths of the tensors that were captured."""
        index = self._shown_index
        return self._shown(index.leaves(index.stored(None)))

    def _shown(self, leaves: list[str]) -> list[str]:
        """Keep the leaf paths that this view shows."""
        leaf = self._leaf
        return leaves if not leaf else [path for path in leaves if path == leaf or path.startswith(f"{leaf}.")]

    @property
    def _all(self) -> RowIndex:
        """The rows of this layer and kind."""
        return self.run._index(self.layer, self.kind)

    @property
    def _index(self) -> RowIndex:
        """The rows that tensors are looked for in: those of one portion."""
        portions = self._all.portions
        if self._portion is None and len(portions) > 1 and "" not in portions:
            raise MissingCaptureError(
                f"{self._name} is stored in {len(portions)} parts, {' and '.join(map(repr, portions))}, and whole nowhere; name one, as in "
                f".portion({portions[0]!r})",
                layer=self.layer,
                kind=self.kind,
            )
        return self._shown_index

    @property
    def _shown_index(self) -> RowIndex:
        """The rows of the portion that is named, or stands out; else all."""
        index = self._all
        portions = index.portions
        if self._portion is not None:
            return self.run._index(self.layer, self.kind, self._portion)
        if portions in ([], [""]):
            return index
        stands_out = "" in portions or len(portions) == 1
        return self.run._index(self.layer, self.kind, portions[0]) if stands_out else index

    @property
    def _name(self) -> str:
        return f"{self.run.path}: {self._what}{f', {self._portion},' if self._portion else ''}"

    @property
    def _what(self) -> str:
        """What is looked at, in words."""
        if self.kind not in OF_BATCH:
            return f"{self.kind} of layer {self.layer!r}"
        return f"{self.kind} {self._leaf!r}" if self._leaf else self.kind

    def _describe(
        self,
        *,
        epoch: int,
        batch: int,
        call: int,
        phase: str,
        leaf: str | None = None,
        backward: int | None = None,
        attempt: int | None = None,
    ) -> str:
        extra = [
            f", call {call}" if call else "",
            f", phase {phase}" if phase != "train" else "",
            f", leaf {leaf!r}" if leaf and self.kind not in OF_BATCH else "",
            f", backward {backward}" if backward is not None else "",
            f", attempt {attempt}" if attempt is not None else "",
        ]
        return f"{self._name} in epoch {epoch}, batch {batch}{''.join(extra)}"

    def _what_there_is(self, phase: str, epoch: int | None = None) -> str:
        index = self._shown_index
        rows = index.coded
        captured = rows.filter(pc.or_(pc.equal(rows["status"], "ok"), pc.equal(rows["status"], "summarized")))
        if not captured.num_rows:
            if self._portion is not None and self.portions:
                return f"there is {' and '.join(repr(text) if text else 'the whole tensor' for text in self.portions)}"
            if self.kind in OF_BATCH:
                return f"the run has no {self.kind}"
            kinds = self.run[self.layer].kinds if self.layer in self.run else []
            if kinds:
                return f"this layer has {', '.join(kinds)}"
            reason = rows["reason"][0].as_py() if rows.num_rows else ""
            return "nothing was captured of this layer" + (f": {reason}" if reason else "")
        of_phase = captured.filter(pc.equal(captured["phase"], phase))
        if not of_phase.num_rows:
            return f"there is only phase {captured['phase'][0].as_py()!r}"
        epochs = sorted(pc.unique(of_phase["epoch"]).to_pylist())
        if epoch not in epochs:
            has_tensors = pc.any(pc.equal(of_phase["status"], "ok")).as_py()
            return f"{'' if has_tensors else 'only statistics are stored, and '}there are epochs {ranges(epochs)}"
        batches = sorted(pc.unique(of_phase["batch"].filter(pc.equal(of_phase["epoch"], epoch))).to_pylist())
        return f"epoch {epoch} has batches {ranges(batches)}"

    def __len__(self) -> int:
        """Return how many tensors there are, those counted of which only statistics are stored."""
        index = self._shown_index
        positions = index.stored(None)
        if self._leaf is None:
            return int(positions.size)
        leaves = self._shown(index.leaves(positions))
        if self.kind == "annotation":  # texts are stored in two parts
            leaves = [leaf for leaf in leaves if not leaf.endswith(".utf8")]
        return sum(index.only_leaf(positions, leaf).size for leaf in leaves)

    def __repr__(self) -> str:
        leaf = f", leaf {self._leaf!r}" if self._leaf is not None and self.kind not in OF_BATCH else ""
        portion = f", {self._portion}" if self._portion else ""
        return f"<hookstore.Captures: {len(self)} of {self._what}{leaf}{portion}>"


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
