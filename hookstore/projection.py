"""What a training of another length would take, recorded as a run was: `hookstore plan RUN`.

Sizes, and how many captures a batch gives, are those in the run's manifest; how often they come follows from what ``run.json`` says of the last recording.
Where that is not all (a callable decided, layers were not called in every batch, a condition held now and then), as large a share of the batches is taken as
in the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hookstore.errors import OptionError
from hookstore.footprint import Circumstances, Stream, make_plan
from hookstore.format import CALLS_PER_SHARD, PHASES, ArraySpec, shard_shape
from hookstore.metadata import read_array
from hookstore.occasions import Training, count
from hookstore.planned import Plan
from hookstore.recorded import Recorded, read_captures
from hookstore.run import Run, open  # noqa: A004
from hookstore.schedule import Schedule, whole

_KEY = ("phase", "layer", "kind", "leaf", "portion", "dtype", "array", "status")
_PLACE = ("epoch", "batch")
_AGGREGATES = (("call", "min"), ("call", "max"), ("length", "sum"), ("structure", "max"), ("call", "count"), ("row", "min"))


class _Key(NamedTuple):
    """What all captures have in common that go into one array, or leave statistics alone; columns of the manifest."""

    phase: str
    layer: str
    kind: str
    leaf: str
    portion: str
    dtype: str
    array: str
    status: str


class _Held:
    """What the manifest has of one key.

    Attributes
    ----------
    places : set of tuple of int
        Epochs and batches.
    num_rows, stored_bytes : int
        Rows, and the bytes of their chunks.
    first_call, last_call : int
        Calls in a batch.
    num_characters : int
        Of the structure text.
    row : int
        One of the rows.
    """

    __slots__ = ("first_call", "last_call", "num_characters", "num_rows", "places", "row", "stored_bytes")

    def __init__(self) -> None:
        self.places: set[tuple[int, int]] = set()
        self.num_rows = self.stored_bytes = self.num_characters = self.last_call = 0
        self.first_call = 2**62
        self.row = 0

    def add(self, place: tuple[int, int], first: int, last: int, stored_bytes: int, structure: str, num_rows: int, row: int) -> None:
        """Add the rows of one batch."""
        self.places.add(place)
        self.first_call, self.last_call = min(self.first_call, first), max(self.last_call, last)
        self.stored_bytes += stored_bytes
        self.num_rows += num_rows
        self.num_characters = max(self.num_characters, len(structure))
        self.row = row


def project(
    path: str | os.PathLike[str],
    *,
    epochs: int | None = None,
    batches: int | Mapping[str, int] | None = None,
    disk: str | os.PathLike[str] | None = None,
    buffer_bytes: int = 1 << 30,
    bandwidth_bytes_per_s: float | None = None,
) -> Plan:
    """Say what a training would take that is recorded as a run was.

    Parameters
    ----------
    path : path-like
        The run, finished or not. What counts is its last recording in which something was captured.
    epochs, batches : int, optional
        How long the training is; ``batches`` of an epoch, also as a mapping from phases. By default as long as the run, as far as that shows in it.
    disk : path-like, optional
        Where the new run is to be; by default beside this one.
    buffer_bytes, bandwidth_bytes_per_s
        As for `hookstore.plan`.

    Returns
    -------
    Plan
        With a codec, of the bytes that it came to in the run.

    Raises
    ------
    OptionError
        For a length that cannot be, and for a run in which nothing was captured.
    NotARunError, CorruptRunError
        As `hookstore.open`.
    """
    with open(path) as run:
        attempt, has_statistics, held = _read_manifest(run)
        specs = {name: read_array(run.path, name) for name in {key.array for key in held if key.array and key.status == "ok"}}
        recorded = read_captures(run.description, attempt)
        is_finished = run._state == "finished"
        shapes = {
            key: tuple(run.manifest["shape"][one.row].as_py()) for key, one in held.items() if key.status == "summarized" or not key.array
        }
    extents = [stored.extents for stored in specs.values() if is_finished]  # until then they are published ahead
    seen = _length_of(held, extents)
    training = Training(
        seen.num_epochs if epochs is None else whole("epochs", epochs, least=1, error=OptionError), _batches(batches, seen.num_batches)
    )
    projector = _Projector(held, {name: stored.spec for name, stored in specs.items()}, recorded, seen, training, shapes)
    where = os.path.dirname(run.path) if disk is None else os.path.abspath(os.fspath(disk))
    has_portions = any(key.portion for key in held)
    circumstances = Circumstances(training, buffer_bytes, has_portions, has_statistics, where, bandwidth_bytes_per_s)
    streams = [projector.stream(key) for key in held if key.status in ("ok", "summarized")]
    return make_plan(streams, circumstances, projector.notes())


def _read_manifest(run: Run) -> tuple[int, bool, dict[_Key, _Held]]:
    """Return the last attempt in which something was captured, whether there are statistics, and what was captured in that attempt."""
    table = run.manifest
    if "portion" not in table.column_names:
        table = table.append_column("portion", [[""] * len(table)])
    table = table.append_column("row", [np.arange(len(table))])
    table = table.group_by(["attempt", *_KEY, *_PLACE]).aggregate(list(_AGGREGATES))
    names = ["attempt", *_KEY, *_PLACE, *(f"{name}_{how}" for name, how in _AGGREGATES)]
    by_attempt: dict[int, dict[_Key, _Held]] = {}
    for attempt, *rest in zip(*(table.column(name).to_pylist() for name in names), strict=True):
        key = _Key(*rest[: len(_KEY)])
        if key.status in ("ok", "summarized", "dropped"):
            epoch, batch, *amounts = rest[len(_KEY) :]
            by_attempt.setdefault(attempt, {}).setdefault(key, _Held()).add((epoch, batch), *amounts)
    attempts = [attempt for attempt, held in by_attempt.items() if any(key.status != "dropped" for key in held)]
    if not attempts:
        raise OptionError(f"{run.path} holds no captures, so that nothing can be told from it", option="run")
    return max(attempts), "mean" in run.manifest.column_names, by_attempt[max(attempts)]


def _length_of(held: Mapping[_Key, _Held], extents: Sequence[tuple[int, ...]]) -> Training:
    """Return how long the run was, as far as that shows."""
    num_batches: dict[str, int] = {}
    for key, one in held.items():
        num_batches[key.phase] = max(num_batches.get(key.phase, 0), *(batch + 1 for _, batch in one.places))
    if "train" in num_batches:
        num_batches["train"] = max([num_batches["train"], *(extent[1] for extent in extents)])
    return Training(1 + max(epoch for one in held.values() for epoch, _ in one.places), num_batches)


def _batches(given: int | Mapping[str, int] | None, seen: Mapping[str, int]) -> dict[str, int]:
    """Return the batches of each phase."""
    wanted = given if isinstance(given, Mapping) else {} if given is None else {"train": given}
    unknown = [phase for phase in wanted if phase not in PHASES]
    if unknown:
        raise OptionError(
            f"batches: expected a number, or one for each of {' and '.join(map(repr, PHASES))}, got {given!r}", option="batches"
        )
    both = {**seen, **{phase: whole("batches", number, least=1, error=OptionError) for phase, number in wanted.items()}}
    return {phase: both[phase] for phase in PHASES if phase in both}


class _Projector:
    """Turns what a run holds into what a training would give.

    Parameters
    ----------
    held : mapping
        What the manifest has.
    specs : mapping
        Its arrays by path.
    recorded : sequence of Recorded
        What was asked for.
    seen, training : Training
        How long the run was, and the training is.
    shapes : mapping
        Shapes of tensors that have no array.
    """

    def __init__(
        self,
        held: Mapping[_Key, _Held],
        specs: Mapping[str, ArraySpec],
        recorded: Sequence[Recorded],
        seen: Training,
        training: Training,
        shapes: Mapping[_Key, tuple[int, ...]],
    ) -> None:
        self._held = held
        self._specs = specs
        self._recorded = recorded
        self._seen = seen
        self._training = training
        self._shapes = shapes
        self._places: dict[object, set[tuple[int, int]]] = {}
        for key, one in held.items():
            for is_tensor in {False, key.status != "summarized"}:
                self._places.setdefault((key.phase, self._asking(key), is_tensor), set()).update(one.places)
        extents = [each.schedule.num_epochs for each in recorded]
        self._num_epochs = None if None in extents else max((extent for extent in extents if extent is not None), default=None)

    def stream(self, key: _Key) -> Stream:
        """Return what comes of a key in a batch."""
        held, asking = self._held[key], self._asking(key)
        of_tensors = tuple(number for number in asking if self._recorded[number].has_tensors) if key.status == "ok" else ()
        chosen = of_tensors or asking
        schedules = tuple(self._recorded[number].schedule for number in chosen)
        places = self._places[key.phase, asking, bool(of_tensors)]
        share = len(held.places) / len(places)
        if not all(self._recorded[number].is_exact for number in chosen):
            share *= min(1.0, len(places) / max(1, count(schedules, key.phase, self._seen).num_due))
        spec = self._lay_out(key, schedules)
        return Stream(
            *key[:6],
            self._shapes[key] if spec is None else spec.chunk_shape,
            spec,
            held.num_rows / len(held.places) * (1 + self._num_dropped(key) / held.num_rows),
            tensors=schedules if key.status == "ok" else (),
            rows=schedules,
            num_call_shards=held.last_call // CALLS_PER_SHARD - held.first_call // CALLS_PER_SHARD + 1
            if spec is not None and spec.calls
            else 1,
            stored_bytes=None if spec is None or spec.codec is None else held.stored_bytes / held.num_rows,
            num_characters=held.num_characters,
            share=share,
        )

    def _asking(self, key: _Key) -> tuple[int, ...]:
        """Return the numbers of the captures that ask for a key; of what no capture does, such as a loss, any may be the one that brought it."""
        found = tuple(
            number
            for number, one in enumerate(self._recorded)
            if key.kind in one.kinds and key.portion == one.portion and (one.layers is None or key.layer in one.layers)
        )
        return found or tuple(range(len(self._recorded)))

    def _lay_out(self, key: _Key, schedules: Sequence[Schedule]) -> ArraySpec | None:
        """Return the array that a new run would have."""
        spec = self._specs.get(key.array) if key.status == "ok" else None
        if spec is None:
            return None
        every = min(schedule.every for schedule in schedules)
        epoch_batches = self._training.num_batches[key.phase]
        shape = shard_shape(spec.stride_bytes, every=every, epoch_batches=epoch_batches, num_epochs=self._num_epochs, calls=spec.calls)
        return replace(spec, shard_shape=shape)

    def _num_dropped(self, key: _Key) -> float:
        """Return how many captures were dropped that would have been of this key: those of its layer and leaf, shared among its arrays."""
        dropped = sum(one.num_rows for other, one in self._held.items() if other.status == "dropped" and other[:5] == key[:5])
        taken = sum(one.num_rows for other, one in self._held.items() if other.status == key.status and other[:5] == key[:5])
        return dropped * self._held[key].num_rows / taken if dropped else 0.0

    def notes(self) -> list[str]:
        """Say what was estimated, and what the run does not show."""
        notes = []
        if not all(one.is_exact for one in self._recorded):
            notes.append(
                "when something was due is not all in the run (a callable decided): as large a share of the batches is taken as there"
            )
        num_dropped = sum(one.num_rows for key, one in self._held.items() if key.status == "dropped")
        if num_dropped:
            notes.append(f"{num_dropped:,} captures of the run were dropped for want of room in its buffer; here they are counted")
        seen = {(key.layer, key.kind) for key in self._held}
        # (a layer of which there is anything else just has no parameters)
        without_parameters = {layer: frozenset(("parameter", "parameter_gradient")) for layer, _ in seen}
        silent = {
            layer: missing
            for one in self._recorded
            for layer in sorted(one.layers or ())
            if (missing := sorted(kind for kind in one.kinds - without_parameters.get(layer, frozenset()) if (layer, kind) not in seen))
        }
        notes += [f"the run has no {', '.join(missing)} of layer {layer!r}, which is not counted" for layer, missing in silent.items()][:20]
        return notes
