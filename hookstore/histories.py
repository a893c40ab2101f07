"""One sample through all batches and layers: `Run.sample`.

Which sample stood where is known from the annotations of each batch. A tensor is joined with these only where it is certain which of its rows is the sample's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hookstore.errors import CaptureWarning, CorruptRunError, MissingCaptureError, OptionError
from hookstore.format import KINDS, WHOLE_SHAPE_COLUMN
from hookstore.occurrences import AnnotatedBatch, Occurrence, SampleIndex
from hookstore.portion import SAMPLE, Portion
from hookstore.structure import Branch, decode

if TYPE_CHECKING:
    from hookstore.captures import Captures
    from hookstore.run import Run

Array = np.ndarray[Any, Any]

_WITH_SAMPLES = tuple(kind for kind in KINDS if not kind.startswith("parameter"))


class SampleHistory:
    """One sample through all epochs and layers; made by `Run.sample`.

    Attributes
    ----------
    by : str
        Annotation that it was found by.
    value : object
        Its value there.
    where : list of Occurrence
        Every place where the sample was part of a batch, in order of phase, epoch and batch.
    """

    def __init__(self, run: Run, by: str, value: Any, found: list[tuple[Occurrence, AnnotatedBatch]], phase: str) -> None:
        self.run = run
        self.by = by
        self.value = value
        self.where = [occurrence for occurrence, _ in found]
        self.phase = phase
        self._found = found

    @cached_property
    def annotations(self) -> dict[str, list[Any]]:
        """The other annotations of the sample: for each name a value for each item of ``where``, ``None`` where that batch was not given it."""
        others = {name: captures for name, captures in self.run.annotations.items() if name != self.by}
        return {name: [self._annotation(captures, occurrence) for occurrence in self.where] for name, captures in others.items()}

    @staticmethod
    def _annotation(captures: Captures, where: Occurrence) -> Any:
        try:
            values = captures.value(where.epoch, where.batch, phase=where.phase, attempt=where.attempt)
        except MissingCaptureError:
            return None
        if len(values) <= where.index:
            raise CorruptRunError(f"{captures._name} has {len(values)} samples in {where}", path=captures.run.path)
        return values[where.index]

    def __getitem__(self, layer: str) -> SampleLayer:
        """Return the sample in one layer.

        Raises
        ------
        UnknownLayerError
            If the run has no such layer.
        """
        return SampleLayer(self, self.run[layer].name)

    def __len__(self) -> int:
        return len(self.where)

    def __repr__(self) -> str:
        return f"<hookstore.SampleHistory: {self.by} {self.value!r}, in {len(self)} batches>"


class SampleLayer:
    """One sample in one layer: its captures are under ``activation``, ``gradient``, ``input`` and ``input_gradient``."""

    def __init__(self, history: SampleHistory, name: str) -> None:
        self.history = history
        self.name = name

    @property
    def activation(self) -> SampleCaptures:
        """What the module returned for the sample."""
        return self["activation"]

    @property
    def gradient(self) -> SampleCaptures:
        """Gradient of the batch's loss with respect to that."""
        return self["gradient"]

    @property
    def input(self) -> SampleCaptures:
        """What the module was called with for the sample."""
        return self["input"]

    @property
    def input_gradient(self) -> SampleCaptures:
        """The module's own share of the gradient of that."""
        return self["input_gradient"]

    def __getitem__(self, kind: str) -> SampleCaptures:
        if kind not in _WITH_SAMPLES:
            raise OptionError(
                f"kind: expected {', '.join(map(repr, _WITH_SAMPLES))}, got {kind!r}: nothing else has a part for each sample",
                option="kind",
            )
        return SampleCaptures(self.history, self.history.run[self.name][kind])

    def __repr__(self) -> str:
        return f"<hookstore.SampleLayer {self.name!r} of {self.history!r}>"


class _Place(NamedTuple):
    """Where one sample's part of a tensor is."""

    row: dict[str, Any]
    axis: int
    position: int


class SampleCaptures(Mapping[tuple[int, ...], Array]):
    """What one layer computed for one sample: a mapping from (epoch, batch) to the sample's part of the tensor, in order.

    Keys of calls from 1 on are (epoch, batch, call). Where a sample is in one batch several times, keys of all but the first are (epoch, batch, call, index).
    """

    def __init__(self, history: SampleHistory, captures: Captures) -> None:
        self._history = history
        self._captures = captures

    @property
    def raw(self) -> SampleCaptures:
        """The same as it is stored; see `Captures.raw`."""
        return SampleCaptures(self._history, self._captures.raw)

    def leaf(self, path: str) -> SampleCaptures:
        """Look at one tensor of nested values; see `Captures.leaf`."""
        return SampleCaptures(self._history, self._captures.leaf(path))

    def portion(self, select: Any) -> SampleCaptures:
        """Look at one part of the tensors; see `Captures.portion`."""
        return SampleCaptures(self._history, self._captures.portion(select))

    @property
    def missing(self) -> dict[tuple[int, ...], str]:
        """Why there is nothing under a key where there might be."""
        return dict(self._located[1])

    def stack(self) -> Array:
        """Return all as one array with a first dimension that runs over the keys.

        Raises
        ------
        OptionError
            If there is nothing, or shapes differ.
        """
        arrays = list(self.values())
        shapes = {array.shape for array in arrays}
        if len(shapes) != 1:
            shown = f"shapes {', '.join(map(str, sorted(shapes)[:5]))}" if shapes else f"nothing{self._why}"
            raise OptionError(f"{self._captures._name}: expected arrays of one shape for {self._history!r}, found {shown}", option="shape")
        return np.stack(arrays)

    @property
    def _why(self) -> str:
        return next((f": {reason}" for reason in self.missing.values()), "")

    def __getitem__(self, key: tuple[int, ...]) -> Array:
        """Return the sample's part of one tensor, read-only.

        Raises
        ------
        MissingCaptureError
            If there is none; it says why.
        CorruptRunError
            If the bytes on disk do not match their checksum.
        """
        found, missing = self._located
        if key not in found:
            why = missing.get(key, f"there are {', '.join(map(str, list(found)[:5])) or 'none'}{' …' if len(found) > 5 else ''}")
            raise MissingCaptureError(
                f"{self._captures._name}: nothing of {self._history!r} under {key}: {why}",
                layer=self._captures.layer,
                kind=self._captures.kind,
            )
        place = found[key]
        whole = self._captures.run.read(place.row, raw=self._captures._is_raw)
        return np.asarray(whole[(slice(None),) * place.axis + (place.position,)])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._located[0])

    def __len__(self) -> int:
        return len(self._located[0])

    def __repr__(self) -> str:
        missing = f", {len(self.missing)} missing" if self.missing else ""
        return f"<hookstore.SampleCaptures: {len(self)} of {self._captures._what} for {self._history!r}{missing}>"

    @cached_property
    def _located(self) -> tuple[dict[tuple[int, ...], _Place], dict[tuple[int, ...], str]]:
        """Where everything is, and why the rest is not there."""
        captures, phase = self._captures, self._history.phase
        index = captures._index
        leaves = captures._shown(index.leaves(index.captured(phase)))
        if len(leaves) > 1:
            raise MissingCaptureError(
                f"{captures._name} has several leaves: {', '.join(map(repr, leaves))}; name one, as in .leaf({leaves[0]!r})",
                layer=captures.layer,
                kind=captures.kind,
            )
        found: dict[tuple[int, ...], _Place] = {}
        missing: dict[tuple[int, ...], str] = {}
        before: tuple[int, ...] = ()
        for where, batch in self._history._found:
            if where.phase != phase:
                continue
            is_again = before == (where.epoch, where.batch)
            before = where.epoch, where.batch
            calls = index.calls(phase, epoch=where.epoch, batch=where.batch, attempt=where.attempt)
            for call in calls or [0]:
                key = (*before, call, where.index) if is_again else (*before, call) if call else before
                place = self._locate(where, call, batch)
                if isinstance(place, str):
                    missing[key] = place
                else:
                    found[key] = place
        return found, missing

    def _locate(self, where: Occurrence, call: int, batch: AnnotatedBatch) -> _Place | str:
        """Return where a sample's part of one tensor is, or why that is not known."""
        captures, index = self._captures, self._captures._index
        try:
            with warnings.catch_warnings():  # of several captures the last; below it is seen to that they are of the same samples
                warnings.simplefilter("ignore", CaptureWarning)
                position = captures._position(
                    where.epoch, where.batch, call, phase=where.phase, leaf=None, backward=None, attempt=where.attempt
                )
        except MissingCaptureError as error:
            return str(error)
        num_times = index.again(position).size
        if num_times > batch.num_times:
            return f"it was captured {num_times} times there, and the batch was annotated {batch.num_times} times"
        row = index.place(position)
        dims = captures.run._spec(row).dims if row["array"] else captures.run._dims(captures.layer, captures.kind)
        try:
            axis = _axis_of_samples(row, dims)
            return axis if isinstance(axis, str) else self._place(row, axis, Portion.parse(row.get("portion", ""), dims), where, batch)
        except ValueError as error:
            raise CorruptRunError(f"{captures._name}: the manifest makes no sense in {where} ({error})", path=captures.run.path) from error

    @staticmethod
    def _place(row: dict[str, Any], axis: int, portion: Portion | None, where: Occurrence, batch: AnnotatedBatch) -> _Place | str:
        """Find a sample along the axis of samples, of which a part may have been kept."""
        num_dims, num_samples = len(row["shape"]), batch.num_samples
        if portion is None:
            whole = row["shape"]
        elif not portion.is_known:
            return f"which samples {portion.text} has kept is not known"
        else:
            whole = _whole_shape(row)
            if len(whole) != num_dims:
                return f"of what shape the whole tensor was, of which {portion.text} was kept, is not known"
        if whole[axis] != num_samples:
            return f"its size along the axis of samples is {whole[axis]}, and the batch was annotated with {num_samples}"
        kept = None if portion is None else portion.positions(axis, num_samples, num_dims)
        if row["shape"][axis] != (num_samples if kept is None else len(kept)):
            raise ValueError(f"{row['portion']} of {num_samples} does not have {row['shape'][axis]}")
        if kept is None:
            return _Place(row, axis, where.index)
        if where.index not in kept:
            return f"{row['portion']} has not kept sample {where.index} of {num_samples} in the batch"
        return _Place(row, axis, kept.index(where.index))


def _axis_of_samples(row: dict[str, Any], dims: Sequence[str]) -> int | str:
    """Return which axis of a tensor runs over samples, or why none does."""
    structure = decode(row["structure"])
    if structure.leaf is not None:
        return "it is stored as several tensors that have no row for each sample; read the whole value"
    if structure.whole is not None and _is_packed(structure.whole, row["leaf"]):
        return "it is part of a PackedSequence, whose rows are no samples; read the whole value"
    if dims and SAMPLE not in dims:
        return f"none of its dimensions {', '.join(map(repr, dims))} is {SAMPLE!r}"
    axis = dims.index(SAMPLE) if dims else 0
    return axis if axis < len(row["shape"]) else f"it has shape {tuple(row['shape'])}, and so no axis of samples"


def _whole_shape(row: dict[str, Any]) -> list[int]:
    """Return the shape of the tensor of which a part was kept; empty where nobody has noted it."""
    text = row.get(WHOLE_SHAPE_COLUMN[0], "")
    return [int(size) for size in text.split(",")] if text else []


def _is_packed(branch: Branch, leaf: str) -> bool:
    """Say whether a leaf lies in a PackedSequence."""
    if not branch.is_leaf and branch.node[0] == "packed":
        return any(child.path == leaf for child in branch.leaves())
    return any(_is_packed(child, leaf) for child in branch.children)


def history_of(run: Run, index: SampleIndex, value: Any, phase: str | None) -> SampleHistory:
    """Make the history of a sample.

    Raises
    ------
    MissingCaptureError
        If there is no such sample.
    """
    everywhere = index.find(value)
    found = [one for one in everywhere if phase is None or one[0].phase == phase]
    if not found:
        if everywhere:
            there_is = f"it is in phase {everywhere[0][0].phase!r} alone"
        else:
            there_is = f"there are, for example, {', '.join(map(repr, index.examples))}" if index.examples else "there are no samples"
        raise MissingCaptureError(
            f"{run.path}: no batch{f' of phase {phase!r}' if phase else ''} has a sample of {index.by} {value!r}; {there_is}",
            kind="annotation",
        )
    phases = [where.phase for where, _ in found]
    return SampleHistory(run, index.by, value, found, "train" if "train" in phases else phases[0])
