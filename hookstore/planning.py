"""`plan`: what a recording will take, told before it is made by one forward in which nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import nn

from hookstore.agenda import ONLY, Agenda, Choice
from hookstore.capture import Capture, check_captures
from hookstore.clock import Coordinates
from hookstore.errors import OptionError, RecorderBusyError, UnsupportedModelError
from hookstore.footprint import Circumstances, Stream, make_plan
from hookstore.format import PHASES, ArraySpec
from hookstore.layout import ArrayCatalog, Draft
from hookstore.models import check_recordable
from hookstore.occasions import Training
from hookstore.planned import Plan, in_bytes
from hookstore.portion import Select
from hookstore.recorder import recorder_of
from hookstore.rehearsal import Arguments, Rehearsal, Sighting, rehearse
from hookstore.schedule import When, whole
from hookstore.selection import LayerPattern
from hookstore.wrappers import own_parameters

_MOST_NOTES = 20
_GRADIENTS = ("gradient", "input_gradient", "parameter_gradient")
_WHY_NO_GRADIENT = {
    "gradient": "none comes to what it returned",
    "input_gradient": "none comes to what it was called with",
    "parameter_gradient": "none comes to its own parameters",
}


def plan(
    model: nn.Module | Mapping[str, nn.Module],
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    captures: Capture | Iterable[Capture] | None = None,
    epochs: SupportsIndex = 1,
    batches: SupportsIndex | Mapping[str, SupportsIndex] = 1,
    path: str | os.PathLike[str] | None = None,
    buffer_bytes: int = 1 << 30,
    bandwidth_bytes_per_s: float | None = None,
    show: bool = True,
    layers: LayerPattern | Iterable[LayerPattern] | None = None,
    kinds: str | Iterable[str] = ("activation",),
    every: SupportsIndex = 1,
    steps: When | None = None,
    phases: str | Iterable[str] = ("train",),
    dtype: torch.dtype | None = None,
    codec: str | Mapping[str, Any] | None = None,
    select: Select | None = None,
    dims: Sequence[str] | None = None,
    stats: bool | str = False,
) -> Plan:
    """Say what recording a training will take, by one forward of the model in which nothing is written.

    Afterwards the model has no hooks and its buffers their values, and the random number generators stand where they stood, also when the forward raises.
    It runs in the mode, and with or without gradients, as it is called here. What modules keep in attributes that are no buffers, and parameters that a
    forward edits, stay as the forward leaves them; hooks of the user's run. Models that are compiled run as they were written. Where a forward communicates,
    as under FSDP, every rank has to plan. Gradients are taken to come to what leads to tensors that the model returned, dense, once in a batch; under reentrant
    checkpointing, whose graph a backward makes, to all that can have one.

    Parameters
    ----------
    model : torch.nn.Module, or mapping of str to torch.nn.Module
        As for `record`.
    args : tuple, or mapping of str to tuple
        What the model is called with: a tuple, or one tensor alone. For several models a mapping by their names; one that is not there is not called.
    kwargs : mapping, optional
        Keyword arguments; for several models a mapping from names to such.
    captures : Capture or iterable of Capture, optional
        As for `record`; the options from ``layers`` on are the short form of one.
    epochs : int
        Epochs of the training.
    batches : int, or mapping of str to int
        Training batches of an epoch, or batches for each of ``"train"`` and ``"eval"``. Arrays are laid out as for a loop over
        ``recorder.batches(loader, epoch=epoch)`` with a loader of this length. There is one optimizer step to a training batch, before which ``steps`` are
        counted, and each call that this forward makes is made in every batch. In evaluation there are no gradients.
    path : path-like, optional
        Where the run is to be: the plan says what is free there.
    buffer_bytes : int
        Size of the staging buffer.
    bandwidth_bytes_per_s : float, optional
        What the disk sustains, such as `hookstore bench` measures it.
    show : bool
        Print the plan.
    layers, kinds, every, steps, phases, dtype, codec, select, dims, stats
        As for `record`. Its ``epochs`` and ``batches`` are those of a `Capture`.

    Returns
    -------
    Plan
        Arrays and shards are exact where every batch is like this one. Bytes are those on disk, of uncompressed captures; with a codec they are the most it
        can come to.

    Raises
    ------
    OptionError
        For an argument that cannot be used (a ``ValueError``); `SelectionError` for layers that match nothing.
    UnsupportedModelError
        If hooks cannot follow the model, or it has parameters that are not initialized yet.
    RecorderBusyError
        If the model is being recorded, since the forward would be recorded too.
    """
    models = check_recordable(model)
    _check_ready(models)
    short = {"layers": layers, "kinds": kinds, "every": every, "steps": steps, "phases": phases, "dtype": dtype}
    chosen = check_captures(captures, {**short, "codec": codec, "select": select, "dims": dims, "stats": stats})
    training = Training(whole("epochs", epochs, least=1, error=OptionError), _check_batches(batches))
    _check_numbers(buffer_bytes, bandwidth_bytes_per_s)
    agenda = Agenda(chosen, models)
    circumstances = Circumstances(
        training,
        buffer_bytes,
        agenda.has_portions,
        agenda.has_statistics,
        None if path is None else _absolute(path),
        bandwidth_bytes_per_s,
    )
    found = rehearse(models, _arguments(models, args, kwargs), agenda.layers, agenda.all_due())
    streams = _streams(agenda, found, training)
    made = make_plan(streams, circumstances, _notes(agenda, found, training, streams))
    if show:
        print(made)  # noqa: T201  # what the option asks for
    return made


def _streams(agenda: Agenda, found: Rehearsal, training: Training) -> list[Stream]:
    """Return what each array gets in a batch, for each phase."""
    by_array: dict[object, tuple[Sighting, ArraySpec | None, str, list[int]]] = {}
    catalog = ArrayCatalog(num_epochs=agenda.num_epochs, rank=0)
    for phase in (phase for phase in training.num_batches if phase in agenda.phases):
        here = Coordinates(phase, 0, 0)
        for sighting in _as_they_come(found.sightings):
            if phase == "eval" and sighting.kind in _GRADIENTS:
                continue
            spec = None
            if 0 not in sighting.shape and _choices(agenda, sighting, phase):
                draft = Draft(*sighting[:3], sighting.dtype, here, sighting.call, 0, 0, sighting.shape, 0, take=sighting.take)
                spec = catalog.find(draft, epoch_batches=training.num_batches[phase]).spec
            key = (phase, *sighting[:3], sighting.take.text, sighting.dtype, sighting.shape if spec is None else spec.path)
            first, _, _, calls = by_array.setdefault(key, (sighting, spec, phase, []))
            calls.append(sighting.call)
            if spec is not None and first.shape != sighting.shape:
                by_array[key] = (first._replace(shape=spec.chunk_shape), spec, phase, calls)
    return [_stream(agenda, *one) for one in by_array.values()]


def _as_they_come(sightings: Sequence[Sighting]) -> Iterator[Sighting]:
    """Yield what comes in a forward, then the gradients, of which those of the last call come first: arrays are laid out by what comes first."""
    yield from (sighting for sighting in sightings if sighting.kind not in _GRADIENTS)
    yield from (sighting for sighting in reversed(sightings) if sighting.kind in _GRADIENTS)


def _stream(agenda: Agenda, sighting: Sighting, spec: ArraySpec | None, phase: str, calls: list[int]) -> Stream:
    choices = _choices(agenda, sighting, phase)
    return Stream(
        phase,
        *sighting[:3],
        sighting.take.text,
        sighting.dtype,
        sighting.shape,
        spec,
        len(calls),
        tensors=tuple(choice.schedule for choice in choices if choice.stats(is_raised=False) != ONLY),
        rows=tuple(choice.schedule for choice in choices),
        num_call_shards=len({call // spec.shard_shape[2] for call in calls}) if spec is not None and spec.calls else 1,
        num_characters=sighting.num_characters,
    )


def _choices(agenda: Agenda, sighting: Sighting, phase: str) -> list[Choice]:
    """Return the captures that ask for a tensor in a phase."""
    return [
        choice
        for choice in agenda.choices
        if sighting.kind in choice.capture.kinds
        and phase in choice.schedule.phases
        and ("" if choice.portion is None else choice.portion.text) == sighting.take.text
        and sighting.layer in choice.layers
    ]


def _notes(agenda: Agenda, found: Rehearsal, training: Training, streams: Sequence[Stream]) -> list[str]:
    """Say what is not known and not counted."""
    notes = [
        f"{kind}{f' {leaf!r}' if leaf else ''} of layer {layer!r} is not stored: {why}"
        for (layer, kind, leaf), why in found.obstacles.items()
    ]
    seen = {(sighting.layer, sighting.kind) for sighting in found.sightings} | {key[:2] for key in found.obstacles}
    silent = [layer.name for layer in agenda.layers if layer.name not in found.called]
    for layer in agenda.layers:
        has_parameters = any(True for _ in own_parameters(layer.module))
        missing = [
            kind
            for kind in agenda.kinds_of(layer.name)
            if (layer.name, kind) not in seen and (has_parameters or not kind.startswith("parameter"))
        ]
        if layer.name in silent and missing:
            notes.append(
                f"layer {layer.name!r} was not called in this forward: its {', '.join(missing)} cannot be known and is not counted"
            )
        elif missing:
            why = [f"{kind} ({_WHY_NO_GRADIENT.get(kind, 'no tensors')})" for kind in missing]
            notes.append(f"layer {layer.name!r} gave nothing for {', '.join(why)}")
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES:,} more layers and kinds of which something is not known"]
    notes += [
        f"phase {phase!r} is recorded and not counted: give batches={{{phase!r}: …}}"
        for phase in sorted(agenda.phases - {*training.num_batches})
    ]
    if any(phase == "eval" for phase in training.num_batches) and any(
        "eval" in choice.schedule.phases and not {*choice.capture.kinds}.isdisjoint(_GRADIENTS) for choice in agenda.choices
    ):
        notes.append("gradients in evaluation are not counted")
    for choice in agenda.choices:
        if choice.capture.when is not None:
            notes.append(
                f"capture {choice.name!r} stores whole tensors while its condition holds: {_of_condition(agenda, choice, streams)} more a batch"
            )
    return notes


def _of_condition(agenda: Agenda, choice: Choice, streams: Sequence[Stream]) -> str:
    """Return what a capture stores in a batch in which its condition holds."""
    names = set(choice.layers)
    text = "" if choice.portion is None else choice.portion.text
    phase = min(choice.schedule.phases & agenda.phases, key=PHASES.index)
    return in_bytes(
        sum(
            stream.spec.stride_bytes * stream.num_per_batch
            for stream in streams
            if stream.spec is not None
            and (stream.phase, stream.portion) == (phase, text)
            and stream.layer in names
            and stream.kind in choice.capture.kinds
        )
    )


def _arguments(models: Mapping[str, nn.Module], args: Any, kwargs: Mapping[str, Any] | None) -> dict[str, Arguments]:
    """Return what each model is called with."""
    keywords = {} if kwargs is None else kwargs
    if not isinstance(keywords, Mapping) or ("" not in models and not all(isinstance(of_model, Mapping) for of_model in keywords.values())):
        raise OptionError(
            f"kwargs: expected a mapping from keywords to arguments (of several models one for each name), got {kwargs!r:.200}",
            option="kwargs",
        )
    if "" in models:
        return {"": (_positional(args), keywords)}
    if not isinstance(args, Mapping) or not {*args, *keywords} <= {*models} or not {*args, *keywords}:
        raise OptionError(
            f"args: expected a mapping from some of the models' names {', '.join(map(repr, models))} to what each is called with, got {args!r:.200}",
            option="args",
        )
    return {name: (_positional(args.get(name, ())), keywords.get(name, {})) for name in models if name in args or name in keywords}


def _absolute(path: Any) -> str:
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path: expected where the run is to be, got {path!r}", option="path")
    return os.path.abspath(os.fspath(path))


def _positional(args: Any) -> tuple[Any, ...]:
    if isinstance(args, torch.Tensor):
        return (args,)
    if not isinstance(args, tuple | list):
        raise OptionError(
            f"args: expected a tuple of what the model is called with, such as (images,), got a {type(args).__name__}", option="args"
        )
    return tuple(args)


def _check_ready(models: Mapping[str, nn.Module]) -> None:
    """Refuse models whose forward would change more than can be put back, or would be recorded."""
    for model in models.values():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if nn.parameter.is_lazy(tensor):
                raise UnsupportedModelError(f"{name!r} of the model is not initialized yet: run the model once before planning")
    recorder = recorder_of(module for model in models.values() for module in model.modules())
    if recorder is not None:
        raise RecorderBusyError(
            f"the model is being recorded into {recorder.path}, and the forward would be too: plan before recording, or close the recorder"
        )


def _check_batches(batches: SupportsIndex | Mapping[str, SupportsIndex]) -> dict[str, int]:
    given = batches if isinstance(batches, Mapping) else {"train": batches}
    unknown = [phase for phase in given if phase not in PHASES]
    if unknown or not given:
        raise OptionError(
            f"batches: expected a number, or one for each of {' and '.join(map(repr, PHASES))}, got {batches!r}", option="batches"
        )
    return {phase: whole("batches", given[phase], least=1, error=OptionError) for phase in PHASES if phase in given}


def _check_numbers(buffer_bytes: Any, bandwidth_bytes_per_s: Any) -> None:
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int) or buffer_bytes < 1:
        raise OptionError(f"buffer_bytes: expected a whole number of bytes above 0, got {buffer_bytes!r}", option="buffer_bytes")
    if bandwidth_bytes_per_s is not None and not (isinstance(bandwidth_bytes_per_s, int | float) and bandwidth_bytes_per_s > 0):
        raise OptionError(
            f"bandwidth_bytes_per_s: expected bytes per second above 0, got {bandwidth_bytes_per_s!r}", option="bandwidth_bytes_per_s"
        )
