"""`record`: the only place where the parts are wired together."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import shutil
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, SupportsIndex, TypeVar

import torch
from torch import nn

from hookstore import __version__
from hookstore.agenda import Agenda
from hookstore.annotations import Annotator
from hookstore.attach import ModelHooks
from hookstore.capture import Capture, check_captures
from hookstore.clock import Batches, Clock, Coordinates, Placed
from hookstore.device import Devices, allocate_host
from hookstore.errors import (
    CaptureWarning,
    NotARunError,
    OptionError,
    RecorderClosedError,
    RunExistsError,
    RunLockedError,
    name_error,
)
from hookstore.files import DiskBudget, list_names, sync_directory, system, write_atomically
from hookstore.flight import Event
from hookstore.format import (
    FORMAT_VERSION,
    JOURNAL_DIR,
    LAYERS_DIR,
    LOCK_FILE,
    MANIFEST_DIR,
    PAGE_BYTES,
    RUN_FILE,
    WRITING_SUFFIX,
    ArraySpec,
    align,
    escape,
)
from hookstore.layout import Array, ArrayCatalog
from hookstore.lock import RunLock, holder
from hookstore.metadata import read_description
from hookstore.models import check_recordable
from hookstore.portion import SAMPLE, Select
from hookstore.recovery import Leftover, RecoveryReport, close_lock, open_lock, take_up
from hookstore.schedule import Budget, When
from hookstore.schema import schema_with
from hookstore.selection import Layer, LayerPattern
from hookstore.signals import FlushOnSigterm, OnSignal, check_can_be_handled, check_main_thread
from hookstore.sink import StagingSink
from hookstore.staging import Stager
from hookstore.triggers import NonFinite, Raised, Signalled, Trigger, check_can_hold, check_when, describe
from hookstore.wrappers import type_name, unwrap
from hookstore.writer import Writer

Item = TypeVar("Item")

_LEAST_BUFFER_BYTES = 64 << 10
_DEVICE_RING_BYTES = 256 << 20
_MOST_BATCHES = 100_000

_ACTIVE: weakref.WeakSet[Recorder] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a recorder has come.

    Attributes
    ----------
    num_captured, captured_bytes : int
        Tensors staged so far, and their bytes with padding; with a flight recorder also those that it keeps or has let go.
    num_acknowledged, acknowledged_bytes : int
        Those that would survive a kill.
    num_dropped : int
        Captures dropped because the staging buffer was full.
    num_skipped_batches : int
        Batches left out to stay within ``max_slowdown``.
    lag_bytes, buffer_bytes : int
        Staging memory in use, that of a flight recorder's ring included, and its size.
    """

    num_captured: int
    captured_bytes: int
    num_acknowledged: int
    acknowledged_bytes: int
    num_dropped: int
    num_skipped_batches: int
    lag_bytes: int
    buffer_bytes: int


def record(
    model: nn.Module | Mapping[str, nn.Module],
    path: str | os.PathLike[str],
    *,
    captures: Capture | Iterable[Capture] | None = None,
    layers: LayerPattern | Iterable[LayerPattern] | None = None,
    kinds: str | Iterable[str] = ("activation",),
    every: SupportsIndex = 1,
    epochs: When | None = None,
    batches: When | None = None,
    steps: When | None = None,
    phases: str | Iterable[str] = ("train",),
    dtype: torch.dtype | None = None,
    codec: str | Mapping[str, Any] | None = None,
    select: Select | None = None,
    dims: Sequence[str] | None = None,
    stats: bool | str = False,
    last: int | None = None,
    when: Trigger | Iterable[Trigger] | None = None,
    mode: str = "x",
    buffer_bytes: int = 1 << 30,
    on_full: str = "block",
    on_error: str = "raise",
    max_slowdown: float | None = None,
    max_bytes: int | None = None,
    on_sigterm: str | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Recorder:
    """Record a model's activations and gradients into a new run while it trains.

    In eager mode the model computes the very same values with and without recording; compiled models, and encoder layers whose fused path must give way,
    within the bounds that the README states. Use the recorder as a context manager; on exit every capture is durable and the model has no hooks left.

    Parameters
    ----------
    model : torch.nn.Module, or mapping of str to torch.nn.Module
        The root module, on the CPU or on CUDA devices. It may be compiled, before or after. Several models are recorded into one run under the names that a
        mapping gives them: with ``{"generator": g, "discriminator": d}`` the layers are ``generator.0``, ``discriminator.0``, … and the roots
        ``generator`` and ``discriminator``. Without a clock set, each call of the first is the next batch; the phase is ``"train"`` while any of them is
        in training mode.
    path : path-like
        Directory of the run; it must not exist, or be empty, unless ``mode`` is ``"a"``. Under ``torch.distributed`` each rank needs its own.
    captures : Capture or iterable of Capture, optional
        What to record, in as many choices as there are, each with layers, kinds and a cadence of its own. The options from ``layers`` to ``stats`` are the
        short form of one, and cannot be given beside this.
    layers : str, re.Pattern, type, callable, or iterable of these, optional
        Which layers: globs over ``named_modules()`` names, compiled regular expressions (searched), module types, predicates ``(name, module) -> bool``.
        The root is ``""``. By default every module without children. Names are those that the model has without the wrappers that training puts around it or
        its parts (DDP, DataParallel, FSDP, ``torch.compile``, checkpoint wrappers, averaged models).
    kinds : str or iterable of str
        ``"activation"`` (what the module returns), ``"gradient"`` (of the loss with respect to that), ``"input"`` (what it is called with),
        ``"input_gradient"`` (the module's own share of the gradient of that), ``"parameter"`` (its own parameters as the forward sees them; of a parametrized
        tensor the originals, under their names in the ``state_dict()``) and ``"parameter_gradient"`` (their gradients as an optimizer's step uses them:
        summed over micro-batches, reduced over ranks, unscaled and clipped).
    every : int
        Record one batch in so many, from batch 0 of each epoch on.
    epochs, batches, steps : int, iterable of int, callable, optional
        Record only these; ``steps`` are optimizer steps done before the batch began.
    phases : str or iterable of str
        ``"train"`` and ``"eval"``: modes of the root module that are recorded.
    dtype : torch.dtype, optional
        Cast floating-point captures to this dtype, which must be floating-point too.
    codec : None, "zstd", "lz4" or dict
        Compressor; a dict is Zarr v3 codec metadata. Encoding runs in threads of its own.
    select, dims
        Which part of each tensor is kept, and what its axes are called; see `Capture`.
    stats : bool or "only"
        Store statistics of each tensor in the manifest, too, or instead of the tensor; see `Capture`.
    last : int, optional
        Make a flight recorder of it: what is recorded of the last so many batches is kept in the staging buffer, and written, with what follows of as many
        more, only when a trigger fires. The manifest has a row with status ``fired`` and the reason each time, and there is a `CaptureWarning`. A trigger
        fires when its condition begins to hold for some tensor (of some call): one that goes on to hold from batch to batch has fired once, and what begins
        in the batch after one that fired does not fire again. Everything has statistics then. Batches that the buffer has no room for
        are given up, the oldest first; a warning says what ``buffer_bytes`` they need.
    when : NonFinite, GradientNorm, Raised, Signalled, callable, or iterable of these, optional
        What fires: any of these triggers, or a function of `Statistics` and `Where` that returns whether it does, called on the writer's thread. By default
        ``(NonFinite(), Raised())``. `Recorder.fire` does it by hand.
    mode : "x" or "a"
        ``"x"`` creates a run and refuses a directory that holds anything. ``"a"`` goes on with the run that is there, whether it was closed or killed, or
        creates it: what a dead writer left is recovered first, and captures at an epoch and batch that the run has already are kept beside the
        earlier ones as another *attempt*. Arrays that are there keep their codec.
    buffer_bytes : int
        Size of the staging buffer, the bound on host memory (default 1 GiB).
    on_full : "block" or "drop"
        When the buffer is full: wait for the writer, or drop the capture and say so in the manifest.
    on_error : "raise" or "disable"
        When the writer fails: raise its exception at the next capture, flush or close, or warn and stop capturing.
    max_slowdown : float, optional
        Leave out whole batches where recording them would make training slower by more than this share: 0.05 is 5 %. What counts is the time of the hooks
        on the threads that train, waiting for the disk included, over the time of the training without it; each batch left out is a manifest row.
    max_bytes : int, optional
        Stop recording, with a warning and a manifest row, before the run's directory holds more than so many bytes, or the file system is full.
    on_sigterm : None or "flush"
        What SIGTERM does. By default nothing of ours: what was acknowledged survives. ``"flush"`` makes durable everything captured before the signal, while
        training goes on, and then calls the handler that was there before, or ends the process as the signal would have. A flight recorder fires.
    scaler : torch.amp.GradScaler, optional
        What scales the loss. Gradients are stored as they come, with the scale of that moment beside them; reading divides by it in float32 (`Captures.raw`
        does not). Give it only if every backward is of a scaled loss.

    Returns
    -------
    Recorder
        Already recording.

    Raises
    ------
    OptionError
        For an argument that cannot be used (a ``ValueError``); `SelectionError` for layers that match nothing.
    RunExistsError
        If the directory holds something, or, with ``mode="a"``, something that is no run.
    RunLockedError
        If another process, or another recorder, writes to the run.
    UnsupportedModelError
        If hooks cannot follow the model.
    """
    models = check_recordable(model)
    short = {
        "layers": layers,
        "kinds": kinds,
        "every": every,
        "epochs": epochs,
        "batches": batches,
        "steps": steps,
        "phases": phases,
        "dtype": dtype,
        "codec": codec,
        "select": select,
        "dims": dims,
        "stats": stats,
    }
    chosen = check_captures(captures, short)
    _check_choice("mode", mode, ("x", "a"))
    _check_choice("on_full", on_full, ("block", "drop"))
    _check_choice("on_error", on_error, ("raise", "disable"))
    if isinstance(buffer_bytes, bool) or not isinstance(buffer_bytes, int) or buffer_bytes < _LEAST_BUFFER_BYTES:
        raise OptionError(f"buffer_bytes: expected at least {_LEAST_BUFFER_BYTES:,} bytes, got {buffer_bytes!r}", option="buffer_bytes")
    if max_slowdown is not None:
        _check_share("max_slowdown", max_slowdown)
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
        raise OptionError(f"max_bytes: expected a whole number of bytes above 0, got {max_bytes!r}", option="max_bytes")
    if on_sigterm is not None:
        _check_choice("on_sigterm", on_sigterm, ("flush",))
        check_main_thread()
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise OptionError(f"scaler: expected a torch.amp.GradScaler, got {scaler!r} of type {type(scaler).__name__}", option="scaler")
    triggers = _check_flight(last, when, on_full)
    agenda = Agenda(chosen, models, always_stats=last is not None)
    check_can_hold(triggers, [("", "loss"), *((layer, kind) for layer in agenda.names for kind in agenda.kinds_of(layer))])
    description = {
        "kinds": list(agenda.kinds),
        "phases": sorted(agenda.phases),
        "max_slowdown": max_slowdown,
        "captures": [choice.describe() for choice in agenda.choices],
        "last": last,
        "when": None if last is None else describe(triggers),
    }
    run_path = os.path.abspath(os.fspath(path))
    begin = _resume_run if mode == "a" and _holds_something(run_path) else _create_run
    try:
        lock, leftover = begin(run_path, models, agenda.layers, description)
    except (RunExistsError, RunLockedError) as error:
        rank, num_ranks = _rank_of_process()
        if num_ranks > 1:
            own = os.path.join(run_path, f"rank{rank}")
            error.args = (f"{error}; this is rank {rank} of {num_ranks}: each records into a directory of its own, such as {own}",)
        raise
    try:
        return Recorder(
            models,
            run_path,
            agenda=agenda,
            buffer_bytes=align(buffer_bytes, PAGE_BYTES),
            drop_when_full=on_full == "drop",
            disable_on_failure=on_error == "disable",
            budget=None if max_slowdown is None else Budget(float(max_slowdown)),
            disk=None if max_bytes is None else DiskBudget(run_path, max_bytes),
            flush_on_sigterm=on_sigterm == "flush",
            scaler=scaler,
            last=last,
            triggers=triggers,
            lock=lock,
            leftover=leftover,
        )
    except BaseException:
        if begin is _create_run:
            shutil.rmtree(run_path, ignore_errors=True)  # what could not begin must not stand in the way of the next try; all of it is ours
        close_lock(run_path, lock)
        raise


class Recorder:
    """A recording under way; made by `record`.

    Attributes
    ----------
    path : str
        Directory of the run.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        path: str,
        *,
        agenda: Agenda,
        buffer_bytes: int,
        drop_when_full: bool,
        disable_on_failure: bool,
        budget: Budget | None,
        disk: DiskBudget | None,
        flush_on_sigterm: bool,
        scaler: torch.amp.GradScaler | None,
        last: int | None,
        triggers: tuple[Trigger, ...],
        lock: RunLock,
        leftover: Leftover,
    ) -> None:
        self.path = path
        self._pid = os.getpid()
        self._disable_on_failure = disable_on_failure
        self._is_closed = False
        self._clock = Clock(agenda, _phase_of(models), budget)
        rank = _rank_of_process()[0]
        self._is_ring = last is not None
        self._fires_when_raised = any(isinstance(trigger, Raised) for trigger in triggers)
        stored = [array.spec for array in leftover.arrays]
        catalog = ArrayCatalog(num_epochs=agenda.num_epochs, rank=rank, stored=stored, are_prompt=self._is_ring)
        pinned = any(parameter.is_cuda for model in models.values() for parameter in model.parameters())
        self._stager = Stager(
            allocate_host(buffer_bytes, pinned=pinned),
            Devices(_DEVICE_RING_BYTES),
            catalog,
            drop_when_full=drop_when_full,
            encode=self._encode,
            is_untouched=not pinned,
            disk=disk,
            is_ring=self._is_ring,
        )
        self._writer = Writer(
            path,
            self._stager,
            num_epochs=agenda.num_epochs,
            epoch_batches=lambda: self._clock.epoch_batches,
            rank=rank,
            lock=lock,
            leftover=leftover,
            under_way=lambda: (self._clock.under_way, self._clock.step),
            schema=schema_with(portion=agenda.has_portions, statistics=agenda.has_statistics),
            last=last,
            triggers=triggers,
        )
        self._sink = StagingSink(self._stager, self._clock, disable_on_failure=disable_on_failure, scaler=scaler)
        self._annotator = Annotator(self._sink)
        self._hooks = ModelHooks(models, self._sink)
        self._modules = weakref.WeakSet(module for model in models.values() for module in model.modules())
        self._clock.on_tick = self._hooks.update
        self._clock.on_skip = self._sink.skip_batch
        self._clock.on_end = self._hooks.uncalled.end
        self._handled = sys.exc_info()[1]  # what is being handled around the whole recording does not end it
        if self._fires_when_raised:
            self._sink.on_raised = lambda where, reason: self._fire(reason, where, is_exception=True)
        self._sigterm: FlushOnSigterm | None = None
        self._signals: list[OnSignal] = []
        try:
            self._writer.start()
            self._hooks.update()
            _ACTIVE.add(self)
            if flush_on_sigterm:
                self._sigterm = FlushOnSigterm(self._flush_before_death)
            for trigger in triggers:
                if isinstance(trigger, Signalled):
                    self._signals.append(OnSignal(trigger.signum, lambda name: self._fire(f"signal {name}")))
        except BaseException:  # an interrupt, say: the model must not keep hooks that nobody can remove
            for handler in reversed(self._signals):
                handler.remove()
            self._hooks.remove()
            self._writer.stop()
            raise

    def _encode(self, array: Array, chunk: memoryview) -> bytes:
        return self._writer.encoder.encode(array, chunk)

    # The clock ----------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Item], *, epoch: SupportsIndex) -> Batches[Item]:
        """Iterate over a loader and file what each of its batches computes under that epoch and the batch's number.

        Parameters
        ----------
        loader : iterable
            Any; where it has a length, arrays are laid out for it.
        epoch : int
            0, 1, …

        Returns
        -------
        Batches
            Iterable over the loader's items, with its length.

        Raises
        ------
        ClockError
            If the epoch is negative or no whole number.
        """
        self._check_open()
        return self._clock.batches(loader, epoch)

    def at(self, *, epoch: SupportsIndex, batch: SupportsIndex) -> Placed:
        """Set by hand where the next forwards are filed, until the next ``at`` or ``batches``.

        Used in a ``with`` statement, it puts the clock back at the end.

        Raises
        ------
        ClockError
            If a coordinate is negative or no whole number.
        """
        self._check_open()
        return self._clock.at(epoch, batch)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Record nothing inside a ``with`` statement: there are no hooks on the layers, and calls of the root module are no batches of the automatic clock.

        A clock that was set goes on where it stood. Pauses may be nested. Gradients of a forward before the pause are recorded all the same.
        """
        self._check_open()
        return self._clock.pause()

    def phase(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """File what runs inside a ``with`` statement under a phase, whatever mode the model is in.

        Parameters
        ----------
        phase : "train" or "eval"
            The phase. Only phases that a capture chooses are recorded.

        Raises
        ------
        ClockError
            If there is no such phase.
        """
        self._check_open()
        return self._clock.in_phase(phase)

    def annotate(self, /, **values: Any) -> None:
        """Store values of the samples of this batch, once; `Run.sample` joins them with what was captured of the layers.

        They are filed where the clock stands, in the phase that the model is in: with `batches` or `at` before or after the forward. Without these a batch
        begins with the call of the model, and is annotated after it. Nothing is stored in a batch of which nothing else is recorded. They are taken to
        hold for every call in the batch that returns as many rows: other samples (what a generator makes, say) belong in a batch of their own.

        Parameters
        ----------
        **values : torch.Tensor, array-like of numbers or bools, or list of str
            By name, such as ``sample_id=ids, label=labels``. The first dimension runs over the samples, of which all values of a batch have as many.

        Raises
        ------
        OptionError
            For a value of another kind or length, or a name that this batch has been given already.
        """
        self._check_open()
        self._annotator.annotate(values)

    def loss(self, value: torch.Tensor | float, *, name: str = "") -> None:
        """Store a loss of this batch, as it is: a loss that a GradScaler has scaled is stored scaled.

        It is filed like an annotation, under call 0, and 1, 2, … where one batch has several of the same name.

        Parameters
        ----------
        value : torch.Tensor or float
            One number, or one for each sample. A tensor on a device is not waited for.
        name : str, optional
            Tells it from other losses of the batch.

        Raises
        ------
        OptionError
            For anything else.
        """
        self._check_open()
        self._annotator.loss(value, name)

    @property
    def captures(self) -> dict[str, bool]:
        """The captures by their names, and whether each is switched on."""
        return {choice.name: choice.is_on for choice in self._clock.agenda.choices}

    def switch(self, name: str, *, on: bool) -> None:
        """Switch a capture on or off, from the next batch on.

        Parameters
        ----------
        name : str
            Its name: as given, or its number.
        on : bool
            Whether it is on.

        Raises
        ------
        OptionError
            If there is no such capture.
        """
        self._check_open()
        found = [choice for choice in self._clock.agenda.choices if choice.name == str(name)]
        if not found:
            raise OptionError(f"name: there is no capture {name!r}; there are {', '.join(map(repr, self.captures))}", option="name")
        if not isinstance(on, bool):
            raise OptionError(f"on: expected True or False, got {on!r}", option="on")
        found[0].is_on = on
        self._hooks.update()

    def fire(self, reason: str) -> None:
        """Have the flight recorder write out what it keeps, and what follows, as if a trigger had fired in the batch that began last.

        Parameters
        ----------
        reason : str
            What the manifest's row says.

        Raises
        ------
        OptionError
            If nothing is kept, because ``record`` was called without ``last``.
        """
        self._check_open()
        if not self._is_ring:
            raise OptionError("last: there is no flight recorder that could fire; record(…, last=5) makes one", option="last")
        self._fire(str(reason))

    def _fire(self, reason: str, where: Coordinates | None = None, *, is_exception: bool = False) -> None:
        """Tell the writer to fire in a batch, which may be without captures so far; in the newest by default, as signal handlers do: that takes no lock."""
        number, newest = self._stager.newest
        if where is not None:
            number = self._stager.number_of(where, begins=True)
        self._stager.queue.put(Event(reason, number, where or newest, self._clock.step, is_exception=is_exception))

    # Life cycle ---------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far recording has come; cheap enough for every step."""
        stager, writer = self._stager, self._writer
        return Progress(
            num_captured=stager.num_staged,
            captured_bytes=stager.staged_bytes,
            num_acknowledged=writer.num_acknowledged,
            acknowledged_bytes=writer.acknowledged_bytes,
            num_dropped=stager.num_dropped,
            num_skipped_batches=0 if self._clock.budget is None else self._clock.budget.num_skipped,
            lag_bytes=stager.used_bytes,
            buffer_bytes=stager.arena_bytes,
        )

    def flush(self) -> None:
        """Return when everything captured so far is durable, and readable through `hookstore.open`; what a flight recorder keeps stays in memory.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        RecorderClosedError
            After ``close()``.
        RecorderBusyError
            From a signal handler in the middle of a capture, or from a trigger's function.
        """
        self._check_open()
        self._check_can_wait("flush()")
        if self._sink.is_active:
            try:
                self._writer.flush()
            except BaseException as error:
                if error is not self._stager.failure or not self._disable_on_failure:
                    raise
                self._turn_off(error)
            self._sink.tell()

    def close(self) -> None:
        """Remove the hooks, finish the run and end the threads; does nothing the second time.

        Raises
        ------
        BaseException
            What stopped the writer, as it was raised there.
        """
        self._close(sys.exc_info()[1])

    def _close(self, error: BaseException | None) -> None:
        """Close; ``error`` is what ends the recording before its time."""
        self._writer.check_elsewhere("close()")
        if self._is_closed:
            if os.getpid() == self._pid and not self._writer.has_ended:  # an interrupt broke off the first
                self._writer.stop()
            return
        self._stager.check_not_staging("close()")
        self._is_closed = True
        if os.getpid() != self._pid:  # a forked child: the run is its parent's
            self._hooks.remove()
            return
        if self._sigterm is not None:
            self._sigterm.remove()
        for handler in reversed(self._signals):
            handler.remove()
        if error is not None and error is not self._handled:
            if self._fires_when_raised and not _is_regular_exit(error):
                self._fire(f"{name_error(error)} ended the recording", is_exception=True)
            self._sink.mark_partial(f"{type(error).__name__} ended the recording in this batch; captures of it may be missing")
        try:
            self._tell_uncalled_layers(is_cut_short=error is not None and error is not self._handled)
        finally:  # where warnings are errors too
            self._end()

    def _end(self) -> None:
        """Remove the hooks and finish the run."""
        was_active = self._sink.is_active
        told_last: list[str] = []
        self._hooks.remove()
        _ACTIVE.discard(self)
        try:
            self._writer.stop()
        except BaseException as failure:
            if not self._disable_on_failure:
                raise
            if was_active:
                self._turn_off(failure)
            return
        finally:
            if self._writer.has_ended:
                told_last = self._sink.let_go()
        for message in told_last:
            warnings.warn(message, CaptureWarning, stacklevel=4)
        self._warn_without_steps()

    def _turn_off(self, error: BaseException) -> None:
        """Capture no more, because the writer has failed and ``on_error`` is ``"disable"``."""
        self._sink.is_active = False
        warnings.warn(f"hookstore stopped capturing: the writer failed with {type(error).__name__}: {error}", CaptureWarning, stacklevel=3)

    def _flush_before_death(self, dies: bool) -> None:  # noqa: FBT001
        """Make everything durable because of SIGTERM."""
        if dies:
            self._sink.mark_partial("SIGTERM ended the process in this batch; captures of it may be missing")
        if self._is_ring:
            self._fire("signal SIGTERM")
        self._writer.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._close(error)
        except BaseException as failure:
            if error is None:
                raise
            if error is not failure:  # the user's own exception goes first
                error.add_note(f"hookstore: the run at {self.path} was not finished: {type(failure).__name__}: {failure}")

    def _tell_uncalled_layers(self, *, is_cut_short: bool) -> None:
        """Tell of the layers that batches did not call, as far as no batch has told of them; a failure of the writer is told by its end."""
        uncalled = self._hooks.uncalled
        cut_short = self._clock.under_way if is_cut_short else []
        self._clock.end_all()
        uncalled.finish(cut_short)
        if self._clock.due is not None and not is_cut_short:
            ever_due = {layer for due in self._clock.agenda.dues for layer in due.of_calls}
            uncalled.finish_unused([layer for layer in self._hooks.silent_layers if layer in ever_due], self._clock.due)

    def _warn_without_steps(self) -> None:
        if self._hooks.lacks_steps and self._clock.due is not None:
            warnings.warn(
                "no parameter_gradient was captured: no optimizer that holds a parameter of the selected layers has taken a step in a batch that is "
                "recorded, or none of them had a gradient",
                CaptureWarning,
                stacklevel=4,
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise RecorderClosedError(f"the recorder of {self.path} is closed; open the run with hookstore.open")

    def _check_can_wait(self, call: str) -> None:
        """Raise `RecorderBusyError` where ``call`` would wait for ever."""
        self._writer.check_elsewhere(call)
        self._stager.check_not_staging(call)

    def _disown(self) -> None:
        """Capture nothing in a forked child: the writer lives in the parent."""
        self._sink.is_active = False


def recorder_of(modules: Iterable[nn.Module]) -> Recorder | None:
    """Return a recorder that is open on one of these modules, if there is one."""
    wanted = set(modules)
    return next((one for one in list(_ACTIVE) if not one._is_closed and not wanted.isdisjoint(one._modules)), None)


def _forget_recorders_in_child() -> None:
    for recorder in _ACTIVE:
        recorder._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_recorders_in_child)


def _phase_of(models: Mapping[str, nn.Module]) -> Callable[[], str]:
    """Return what says which phase the models are in: ``"train"`` while any of them is in training mode. It keeps none of them alive."""
    roots = [weakref.ref(unwrap(model)) for model in models.values()]

    def phase_of_one() -> str:
        module = roots[0]()
        return "train" if module is None or module.training else "eval"

    def phase_of_several() -> str:
        alive = [module for root in roots if (module := root()) is not None]
        return "train" if not alive or any(module.training for module in alive) else "eval"

    return phase_of_one if len(roots) == 1 else phase_of_several


# Checks -----------------------------------------------------------------------------------------------------------


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{option}: expected {' or '.join(map(repr, choices))}, got {value!r}", option=option)


def _check_share(option: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{option}: expected a share above 0 such as 0.05, got {value!r}", option=option)


def _check_flight(last: int | None, when: Any, on_full: str) -> tuple[Trigger, ...]:
    """Return the triggers of the flight recorder, none where there is no such recorder."""
    if last is None:
        if when is not None:
            raise OptionError(
                "when: is for a flight recorder; give last= too, or choose full tensors by hookstore.Capture(when=…)", option="when"
            )
        return ()
    if isinstance(last, bool) or not isinstance(last, int) or not 1 <= last <= _MOST_BATCHES:
        raise OptionError(f"last: expected a number of batches from 1 to {_MOST_BATCHES:,}, got {last!r}", option="last")
    if on_full == "drop":
        raise OptionError(
            "on_full: with last= the oldest batches give way where the buffer is full, and what fired is waited for; leave on_full='drop' out",
            option="on_full",
        )
    triggers: tuple[Trigger, ...] = (NonFinite(), Raised()) if when is None else check_when(when, of_capture=False)
    for trigger in triggers:
        if isinstance(trigger, Signalled):
            check_can_be_handled(trigger.signum)
    return triggers


def _is_regular_exit(error: BaseException) -> bool:
    """Say whether an exception is how a script ends on purpose."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def _rank_of_process() -> tuple[int, int]:
    """Return which of how many processes this is, in the process group that training has set up; the only one where there is none."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


# The run's directory ----------------------------------------------------------------------------------------------


def _holds_something(run_path: str) -> bool:
    """Say whether a directory holds more than what a process leaves that dies while it makes a run."""
    try:
        names = set(os.listdir(run_path))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return True
    if not names <= {JOURNAL_DIR, LAYERS_DIR, MANIFEST_DIR, f".{RUN_FILE}{WRITING_SUFFIX}"}:
        return True
    inside = [name for directory in (LAYERS_DIR, MANIFEST_DIR) for name in list_names(os.path.join(run_path, directory))]
    return bool(inside) or any(not name.startswith(LOCK_FILE) for name in list_names(os.path.join(run_path, JOURNAL_DIR)))


def _create_run(
    run_path: str, models: Mapping[str, nn.Module], layers: list[Layer], description: dict[str, Any]
) -> tuple[RunLock, Leftover]:
    """Make the run's directories and ``run.json``."""
    os.makedirs(os.path.dirname(run_path), exist_ok=True)
    with contextlib.suppress(FileExistsError):
        system.mkdir(run_path)
    if not os.path.isdir(run_path) or _holds_something(run_path):
        owner = holder(run_path)
        writes = "" if owner is None else f"; process {owner.pid} on host {owner.host} is writing to it"
        raise RunExistsError(
            f"{run_path} exists already{'' if os.path.isdir(run_path) else ' and is no directory'}{writes}; record into a new directory, delete it first, "
            "or go on with it by mode='a'",
            path=run_path,
        )
    lock = open_lock(run_path)
    try:
        if _holds_something(run_path):
            raise RunExistsError(f"another process has begun to record into {run_path}", path=run_path)
        for name in (LAYERS_DIR, MANIFEST_DIR):
            with contextlib.suppress(FileExistsError):
                system.mkdir(os.path.join(run_path, name))
        attempt = _attempt(0, models, description)
        contents = {
            "format": "hookstore",
            "format_version": FORMAT_VERSION,
            "created": attempt["created"],
            "model": attempt["model"],
            "layers": [_describe_layer(layer) for layer in layers],
            "recorded": description,
            "environment": attempt["environment"],
        }
        write_atomically(os.path.join(run_path, RUN_FILE), json.dumps(contents, indent=2).encode())
        sync_directory(os.path.dirname(run_path))
    except BaseException:
        close_lock(run_path, lock)
        raise
    return lock, Leftover(0, [], {}, [])


def _resume_run(
    run_path: str, models: Mapping[str, nn.Module], layers: list[Layer], description: dict[str, Any]
) -> tuple[RunLock, Leftover]:
    """Take a run up again: recover what a dead writer left, and add this attempt to ``run.json``."""
    try:
        read_description(run_path)
    except NotARunError as error:
        raise RunExistsError(f"{error}; mode='a' goes on with a run, or creates one in an empty directory", path=run_path) from None
    lock = open_lock(run_path)
    try:
        contents = read_description(run_path)
        report = RecoveryReport(run_path)
        leftover = take_up(run_path, report, thorough=False)
        for problem in report.problems:
            warnings.warn(f"taking up {run_path}: {problem}", CaptureWarning, stacklevel=4)
        _check_dims(description["captures"], [array.spec for array in leftover.arrays])
        known = {layer["name"] for layer in contents["layers"]}
        contents["layers"] += [_describe_layer(layer) for layer in layers if layer.name not in known]
        _tell_apart(contents["layers"])
        attempts = [attempt for attempt in contents.get("attempts", []) if isinstance(attempt, dict)]
        # (one that could not begin has left its number there, and nothing else)
        numbers = [number for attempt in attempts if isinstance(number := attempt.get("attempt"), int)]
        leftover = replace(leftover, attempt=max([leftover.attempt, *(number + 1 for number in numbers)]))
        contents["attempts"] = [*attempts, _attempt(leftover.attempt, models, description)]
        write_atomically(os.path.join(run_path, RUN_FILE), json.dumps(contents, indent=2).encode())
    except BaseException:
        close_lock(run_path, lock)
        raise
    return lock, leftover


def _check_dims(captures: Iterable[Mapping[str, Any]], stored: Iterable[ArraySpec]) -> None:
    """Refuse other names of axes than those of arrays that are gone on with: readers would take one axis for another."""
    given: dict[tuple[str, str], tuple[str, ...]] = {}
    for capture in captures:
        for key in itertools.product(capture["layers"], capture["kinds"]):
            given[key] = given.get(key) or tuple(capture["dims"] or ())
    for spec in stored:
        dims = given.get((spec.layer, spec.kind))
        if dims is not None and any(one != other for one, other in zip(spec.dims or (SAMPLE,), dims or (SAMPLE,), strict=False)):
            before, now = (f"dims={list(names)}" if names else f"{SAMPLE!r} as the first axis" for names in (spec.dims, dims))
            raise OptionError(
                f"dims: the run has {spec.kind} of layer {spec.layer!r} with {before}, and would go on with {now}; give the same, or record into another run",
                option="dims",
            )


def _tell_apart(layers: list[dict[str, Any]]) -> None:
    """Drop aliases that are another layer's name or alias: modules that were one when recording began may be two by now, or the other way round."""
    taken = {layer["name"] for layer in layers}
    for layer in layers:
        layer["aliases"] = [alias for alias in layer.get("aliases", []) if alias not in taken]
        taken.update(layer["aliases"])


def _attempt(number: int, models: Mapping[str, nn.Module], description: dict[str, Any]) -> dict[str, Any]:
    """Describe one recording of the run."""
    types = {name: type_name(unwrap(model)) for name, model in models.items()}
    return {
        "attempt": number,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model": types.get("", types),
        "recorded": description,
        "environment": {
            "hookstore": __version__,
            "python": sys.version.split()[0],
            "torch": str(torch.__version__),
            "platform": platform.platform(),
        },
    }


def _describe_layer(layer: Layer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "path": f"{LAYERS_DIR}/{escape(layer.name)}",
        "module": type_name(layer.module),
        "aliases": list(layer.aliases),
    }
