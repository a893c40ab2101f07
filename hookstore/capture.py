"""`Capture`: one choice of what to keep, of which layers, when, and in which form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex

import torch

from hookstore.codecs import codec_metadata
from hookstore.errors import OptionError
from hookstore.format import DTYPES, KINDS
from hookstore.portion import Portion, Select, check_dims
from hookstore.schedule import Schedule, When
from hookstore.selection import LayerPattern
from hookstore.triggers import check_when

_OF_PARAMETERS = ("parameter", "parameter_gradient")
TORCH_DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES if hasattr(torch, name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What to keep of some layers: a run has one or several, each with a cadence of its own.

    What several of them ask for of the same layer, kind and part is stored once. On batches in which none is due the layers have no hooks.

    Parameters
    ----------
    layers : str, re.Pattern, type, callable, or iterable of these, optional
        Which layers; as in `record`.
    kinds : str or iterable of str
        ``"activation"``, ``"gradient"``, ``"input"``, ``"input_gradient"``, ``"parameter"``, ``"parameter_gradient"``; as in `record`.
    every : int
        One batch in so many, from batch 0 of each epoch on.
    epochs, batches, steps : int, iterable of int, callable, optional
        Only these. ``steps`` are optimizer steps done before the batch began.
    phases : str or iterable of str
        ``"train"`` and ``"eval"``.
    dtype : torch.dtype, optional
        Cast floating-point tensors to this dtype, which must be floating-point too.
    codec : None, "zstd", "lz4" or dict
        Compressor.
    select : mapping or callable, optional
        Which part of each tensor: for axes, by number or name, the first so many (``{"sample": 8}``), a slice (``{1: slice(0, 16)}``) or positions
        (``{"token": [-1]}``); or a function that takes the detached tensor and returns the part. It is applied before the copy, so that only these bytes
        move. A tensor that has not got that axis or position is a gap with the reason, and so is one for which the function raises. A function is known
        by its name afterwards, must not call the model, and may draw torch's random numbers: the training's stay as they are.
    dims : sequence of str, optional
        Names of the axes in order, such as ``("sample", "token", "feature")``: for ``select``, and as dimensions of the arrays. Without it the first axis is
        ``"sample"`` (of parameters no axis is).
    stats : bool or "only"
        Store statistics of each tensor in the manifest, too, or instead of the tensor; see `hookstore.Statistics`.
    when : NonFinite, GradientNorm, callable, or iterable of these, optional
        Store statistics, and full tensors too once the condition holds for one of these tensors, or any of the conditions: in the next ``hold`` batches of
        this capture, counted again each time that it holds. It is asked when the batch is complete, while training goes on, so that the first of these
        batches may come one or a few after. A callable takes `Statistics` and `Where`, on the writer's thread.
    hold : int
        For how many batches full tensors are stored each time that ``when`` holds.
    name : str, optional
        What the capture is called where it is switched on and off; its number, ``"0"``, ``"1"``, …, by default.

    Raises
    ------
    OptionError
        For an argument that cannot be used (a ``ValueError``).
    """

    layers: LayerPattern | Iterable[LayerPattern] | None = None
    kinds: str | Iterable[str] = ("activation",)
    every: SupportsIndex = 1
    epochs: When | None = None
    batches: When | None = None
    steps: When | None = None
    phases: str | Iterable[str] = ("train",)
    dtype: torch.dtype | None = None
    codec: str | Mapping[str, Any] | None = None
    select: Select | None = None
    dims: Sequence[str] | None = None
    stats: bool | str = False
    when: Any = None
    hold: int = 1
    name: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layers, Iterable) and not isinstance(self.layers, str | type):
            object.__setattr__(self, "layers", tuple(self.layers))  # what can be gone through once only
        object.__setattr__(self, "kinds", check_kinds(self.kinds))
        if isinstance(self.phases, Iterable) and not isinstance(self.phases, str):
            object.__setattr__(self, "phases", tuple(self.phases))
        if self.dims is not None:
            object.__setattr__(self, "dims", check_dims(self.dims))
        for name in ("epochs", "batches", "steps"):
            value = getattr(self, name)
            if isinstance(value, Iterable) and not isinstance(value, str | range):
                object.__setattr__(self, name, tuple(value))
        check_dtype(self.dtype)
        self.make_schedule()
        self.make_portion()
        self.make_codecs()
        if not isinstance(self.stats, bool) and not (isinstance(self.stats, str) and self.stats == "only"):
            raise OptionError(f"stats: expected False, True or 'only', got {self.stats!r}", option="stats")
        if self.when is not None:
            object.__setattr__(self, "when", check_when(self.when, of_capture=True))
        if self.when is not None and self.stats == "only":
            raise OptionError("stats: with when= full tensors are stored while the condition holds; leave stats='only' out", option="stats")
        if isinstance(self.hold, bool) or not isinstance(self.hold, int) or self.hold < 1:
            raise OptionError(f"hold: expected a whole number of batches from 1 on, got {self.hold!r}", option="hold")
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            raise OptionError(f"name: expected a text, got {self.name!r}", option="name")

    def make_schedule(self) -> Schedule:
        """Return when it is due."""
        return Schedule.build(every=self.every, epochs=self.epochs, batches=self.batches, steps=self.steps, phases=self.phases)

    def make_portion(self) -> Portion | None:
        """Return which part of each tensor is kept, ``None`` for all of it."""
        portion = Portion.build(self.select, self.dims)
        of_parameters = [kind for kind in self.kinds if kind in _OF_PARAMETERS]
        named = [pick.name for pick in portion.picks if not pick.name.lstrip("-").isdigit()] if portion is not None else []
        if of_parameters and (named or self.dims is not None):
            raise OptionError(
                f"{'select' if named else 'dims'}: the axes of {of_parameters[0]} have no names such as {(named or check_dims(self.dims))[0]!r}; choose "
                "parameters in a Capture of their own",
                option="select" if named else "dims",
            )
        return portion

    def make_codecs(self) -> dict[str, str | None]:
        """Return the codec of each dtype's arrays as canonical JSON."""
        codec = dict(self.codec) if isinstance(self.codec, Mapping) else self.codec
        return {name: codec_metadata(codec, name) for name in DTYPES}


def check_kinds(kinds: str | Iterable[str]) -> tuple[str, ...]:
    """Return the option ``kinds`` in the usual order.

    Raises
    ------
    OptionError
        If there is none, or one that is not known.
    """
    given = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else (kinds,)
    for kind in given:
        if kind not in KINDS:
            raise OptionError(f"kinds: expected some of {', '.join(map(repr, KINDS))}, got {kind!r}", option="kinds")
    if not given:
        raise OptionError(f"kinds is empty: expected some of {', '.join(map(repr, KINDS))}", option="kinds")
    return tuple(kind for kind in KINDS if kind in given)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Refuse what floating-point tensors cannot be cast to.

    Raises
    ------
    OptionError
        If it is no floating-point dtype.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype not in TORCH_DTYPES):
        raise OptionError(f"dtype: expected a floating-point torch.dtype such as torch.float16, got {dtype!r}", option="dtype")


def check_captures(captures: Capture | Iterable[Capture] | None, short: dict[str, Any]) -> list[Capture]:
    """Return what to record: the captures, or the one that the short form stands for.

    Raises
    ------
    OptionError
        If there is no capture, or an option of the short form beside some.
    """
    if captures is None:
        return [Capture(**short)]
    chosen = [captures] if isinstance(captures, Capture) else list(captures) if isinstance(captures, Iterable) else []
    if not chosen or not all(isinstance(capture, Capture) for capture in chosen):
        raise OptionError(f"captures: expected at least one hookstore.Capture, got {captures!r}", option="captures")
    defaults = {field.name: field.default for field in fields(Capture)}
    beside = [name for name, value in short.items() if value is not defaults[name] and value != defaults[name]]
    if beside:
        raise OptionError(
            f"{beside[0]}: cannot be given beside captures=, each of which has its own; put it into a Capture", option=beside[0]
        )
    return chosen
