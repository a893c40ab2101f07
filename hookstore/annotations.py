"""What belongs to a batch and to no layer: values of its samples, and losses.

They go the way of every capture, into arrays of the root's group (``layers/%root/annotation.label``), so that whatever holds for captures holds for them.
Texts are stored as two arrays: all letters in UTF-8, and where each text begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hookstore.agenda import WHOLE
from hookstore.clock import Coordinates
from hookstore.errors import OptionError
from hookstore.layout import Call
from hookstore.sink import StagingSink, why_not
from hookstore.structure import PARTS, encode_at

_EXPECTED = "a tensor, an array or a list of numbers, bools or strings, one for each sample"


@dataclass(frozen=True, slots=True)
class _Texts:
    """Texts as they are stored."""

    parts: tuple[torch.Tensor, torch.Tensor]

    def __len__(self) -> int:
        return len(self.parts[1]) - 1


_Value = torch.Tensor | _Texts


@dataclass(slots=True)
class _OfBatch:
    """What has been said of a batch so far."""

    here: Coordinates
    names: set[str] = field(default_factory=set)
    num_samples: int | None = None
    losses: dict[str, int] = field(default_factory=dict)


class Annotator:
    """Files annotations and losses where the clock stands.

    Parameters
    ----------
    sink : StagingSink
        Where they go.
    """

    def __init__(self, sink: StagingSink) -> None:
        self._sink = sink
        self._latest: dict[str, _OfBatch] = {}  # by phase
        self._unrecorded: dict[str, tuple[int, set[str]]] = {}  # by phase: batch of the automatic clock, and names

    def annotate(self, values: Mapping[str, object]) -> None:
        """Store values of the samples of this batch; see `Recorder.annotate`."""
        of_batch = self._of_batch()
        if of_batch is None:
            self._check_unrecorded(values)
            return
        here = of_batch.here
        made: dict[str, _Value] = {}
        num_samples = of_batch.num_samples
        for name, value in values.items():
            if not name.isidentifier():
                raise OptionError(f"{name!r}: expected names of annotations that are Python identifiers, such as sample_id", option=name)
            if name in of_batch.names:
                raise _given_already(name, f"{here.phase} epoch {here.epoch}, batch {here.batch}")
            made[name] = _made(name, value)
            num_samples = len(made[name]) if num_samples is None else num_samples
            if len(made[name]) != num_samples:
                raise OptionError(
                    f"{name}: expected {num_samples} samples, as many as in the other annotations of {here.phase} epoch {here.epoch}, batch {here.batch}, "
                    f"got {len(made[name])}",
                    option=name,
                )
        of_batch.num_samples = num_samples
        of_batch.names.update(made)
        for name, value in made.items():
            self._put("annotation", name, value, Call(here, 0, self._sink.clock.step, 0))

    def loss(self, value: object, name: str) -> None:
        """Store a loss of this batch; see `Recorder.loss`."""
        if not isinstance(name, str) or (name and not name.isidentifier()):
            raise OptionError(f"name: expected a Python identifier, such as 'reconstruction', got {name!r}", option="name")
        if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool):
            tensor = torch.from_numpy(np.array(value, dtype=np.float64))
        elif isinstance(value, torch.Tensor) and value.dim() <= 1 and why_not(value) is None:
            tensor = value.detach()
        else:
            shown = f"a tensor of {value.dim()} dimensions" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise OptionError(
                f"value: expected a loss as a number, or a tensor of one or of one for each sample, got {shown}", option="value"
            )
        of_batch = self._of_batch()
        if of_batch is not None:
            number = of_batch.losses.get(name, 0)
            of_batch.losses[name] = number + 1
            self._put("loss", name, tensor, Call(of_batch.here, number, self._sink.clock.step, 0))

    def _of_batch(self) -> _OfBatch | None:
        """Return what has been said of the batch that the clock stands at, or ``None`` where nothing of it is recorded."""
        here = self._sink.clock.here() if self._sink.is_active else None
        if here is None or here.due is None:
            return None
        latest = self._latest.get(here.phase)
        if latest is None or latest.here is not here:
            latest = self._latest[here.phase] = _OfBatch(here)
        return latest

    def _check_unrecorded(self, names: Iterable[str]) -> None:
        """See that the automatic clock goes on between annotations: who annotates before the call of the model is always one batch behind."""
        where = self._sink.clock.automatic_batch if self._sink.is_active else None
        if where is None:
            return
        phase, batch = where
        before, given = self._unrecorded.get(phase, (batch, set()))
        given = given if before == batch else set()
        for name in names:
            if name in given:
                raise _given_already(name, f"{phase} batch {batch}")
        self._unrecorded[phase] = batch, given.union(names)

    def _put(self, kind: str, name: str, value: _Value, call: Call) -> None:
        if isinstance(value, torch.Tensor):
            self._sink.put_as(WHOLE, "", kind, name, value, call)
            return
        call = call._replace(structure=self._sink.structure(encode_at("", name, ("texts", {}))))
        for part, tensor in zip(PARTS["texts"], value.parts, strict=True):
            self._sink.put_as(WHOLE, "", kind, f"{name}.{part}", tensor, call)


def _given_already(name: str, batch: str) -> OptionError:
    return OptionError(
        f"{name}: {batch} has been given it already. Without recorder.batches() or recorder.at() a batch begins with the call of the model, so that it is to "
        "be annotated after that",
        option=name,
    )


def _made(name: str, value: object) -> _Value:
    """Make what is stored of a value, or raise what is wrong with it."""
    if isinstance(value, torch.Tensor):
        reason = why_not(value)
        if reason is not None or not value.dim():
            raise OptionError(
                f"{name}: expected {_EXPECTED}, got a tensor that cannot be it: {reason or 'it has no dimensions'}", option=name
            )
        return value.detach()
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptionError(
            f"{name}: expected {_EXPECTED}, got a {type(value).__name__} of which no array can be made: {error}", option=name
        ) from error
    if isinstance(value, list | tuple):
        if array.dtype.kind == "U":  # NumPy makes text of numbers that are among texts
            array = np.asarray(value, dtype=object)
        elif array.dtype.kind == "f":  # and rounds whole numbers that are among others
            array = _not_rounded(name, value, array)
    if array.ndim and array.dtype.kind in "biufc":
        # (a copy: in the machine's own byte order, with positive strides, and writable, without which torch warns)
        try:
            return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except TypeError as error:
            raise OptionError(f"{name}: expected {_EXPECTED}, got dtype {array.dtype}, which torch does not have", option=name) from error
    texts = array.tolist() if array.ndim == 1 and array.dtype.kind in "UOT" else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise OptionError(
            f"{name}: expected {_EXPECTED}, got a {type(value).__name__} that makes an array of {array.ndim} dimensions and dtype {array.dtype}",
            option=name,
        )
    return _texts(texts)


def _not_rounded(name: str, value: list[object] | tuple[object, ...], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers of which NumPy has made floats as they are: as uint64 where they are large whole numbers, such as hashes."""
    numbers = np.asarray(value, dtype=object)
    whole = [number for number in numbers.flat if isinstance(number, int | np.integer)]
    if all(int(float(number)) == number for number in whole):
        return array
    if len(whole) == numbers.size and min(whole) >= 0 and max(whole) < 2**64:
        return numbers.astype(np.uint64)
    raise OptionError(
        f"{name}: expected {_EXPECTED}, got whole numbers that no dtype holds together with the others; give an array of one dtype, or strings",
        option=name,
    )


def _texts(texts: list[str]) -> _Texts:
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int64)
    np.cumsum([len(one) for one in encoded], out=offsets[1:])
    letters = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    return _Texts((torch.from_numpy(letters), torch.from_numpy(offsets)))
