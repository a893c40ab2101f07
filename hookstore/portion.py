"""Which part of a tensor is kept: the option ``select``, the text that stands for it in the manifest, and the token that stands for it in names of arrays.

The text names each axis with what is kept of it, as one would index it: ``sample[:8]``, ``1[0:16:2], token[[-1]]``; a function is ``module.name()``. The
whole tensor has the empty text. Everything here but `Portion.of` is pure, and needs no torch.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hookstore.errors import OptionError

Axis = int | str
Kept = int | slice | Sequence[int]
Select = Mapping[Axis, Kept] | Callable[[Any], Any]

SAMPLE = "sample"
MOST_TEXT = 1 << 12  # characters, which stand in every row
_MOST_TOKEN = 64
_MOST_NAME = 100  # characters of a dimension's name, or of a function's with its module
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PICK = re.compile(
    r"(?P<axis>-?\d+|[A-Za-z_]\w*)\[(?:\[(?P<indices>-?\d+(?:,-?\d+)*)\]|(?P<start>-?\d*):(?P<stop>-?\d*)(?::(?P<step>\d+))?)\]", re.ASCII
)


class Pick(NamedTuple):
    """What is kept along one axis.

    Attributes
    ----------
    axis : int
        Number of the axis; below 0 it counts from the last one.
    name : str
        What it is called in the text: a dimension's name, or its number.
    kept : slice or tuple of int
        Positions; below 0 they count from the end.
    """

    axis: int
    name: str
    kept: slice | tuple[int, ...]

    def positions(self, size: int) -> list[int]:
        """Return which positions are kept of an axis of that size.

        Raises
        ------
        IndexError
            If it has not got one of them.
        """
        if isinstance(self.kept, slice):
            return list(range(*self.kept.indices(size)))
        for position in self.kept:
            if not -size <= position < size:
                raise IndexError(f"select wants position {position} of axis {self.name!r}, which has {size}")
        return [position % size for position in self.kept]

    @property
    def text(self) -> str:
        """As in the text of a portion."""
        return f"{self.name}[{_text_of(self.kept)}]"


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a tensor.

    Attributes
    ----------
    text : str
        What stands for it in the manifest.
    picks : tuple of Pick
        What is kept of each axis that is not kept whole.
    function : callable or None
        What is called with the tensor instead.
    """

    text: str
    picks: tuple[Pick, ...] = ()
    function: Callable[[Any], Any] | None = field(default=None, compare=False)
    _indices: dict[tuple[Any, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(cls, select: Select | None, dims: Sequence[str] | None = None) -> Portion | None:
        """Check the options ``select`` and ``dims`` and make a portion of them; ``None`` stands for the whole tensor.

        Parameters
        ----------
        select : mapping, callable or None
            For each axis, by number or name, what is kept: the first so many, a slice, or positions; or a function from the tensor to the part.
        dims : sequence of str or None
            Names of the axes in order. Without it the first is ``"sample"``.

        Raises
        ------
        OptionError
            Naming the option, what was expected and what came.
        """
        names = check_dims(dims) or (SAMPLE,)
        if select is None:
            return None
        if callable(select) and not isinstance(select, Mapping):
            return cls(f"{_name_of(select)}()", function=select)
        if not isinstance(select, Mapping) or not select:
            raise OptionError(
                f"select: expected a mapping from axes to what is kept of them, such as {{'sample': 8}}, or a function of the tensor, got {select!r}",
                option="select",
            )
        try:
            picks = [_pick(axis, kept, names) for axis, kept in select.items()]
            text = ", ".join(pick.text for pick in picks)
        except OptionError:
            raise
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # of what looks like a whole number, such as a tensor, and is none or is enormous
            raise OptionError(f"select: expected axes, sizes, bounds and positions as whole numbers: {error}", option="select") from error
        for position, pick in enumerate(picks):
            if any(pick.axis == other.axis for other in picks[:position]):
                raise OptionError(f"select: axis {pick.name!r} is there twice in {select!r}", option="select")
        if len(text) > MOST_TEXT:
            raise OptionError(
                f"select: it names {len(text):,} characters of positions, and at most {MOST_TEXT:,} are kept; use slices, or a function",
                option="select",
            )
        return cls(text, tuple(picks))

    @classmethod
    def parse(cls, text: str, dims: Sequence[str] = ()) -> Portion | None:
        """Read a text; what a function keeps is not known, and a portion with one has neither picks nor function.

        Raises
        ------
        ValueError
            If no writer made it.
        """
        if not text:
            return None
        if len(text) > MOST_TEXT:
            raise ValueError(f"{len(text):,} characters are more than any portion has")
        if text.endswith("()") and "[" not in text:
            return cls(text)
        names = tuple(dims) or (SAMPLE,)
        picks = []
        for one in text.split(", "):
            match = _PICK.fullmatch(one)
            if match is None:
                raise ValueError(f"{one!r} names no part of an axis")
            name = match["axis"]
            if _NAME.fullmatch(name) and name not in names:
                raise ValueError(f"there is no axis {name!r} among {names}")
            axis = names.index(name) if name in names else int(name)
            kept: slice | tuple[int, ...]
            if match["indices"] is not None:
                kept = tuple(int(position) for position in match["indices"].split(","))
            else:
                kept = slice(*(int(bound) if bound else None for bound in (match["start"], match["stop"], match["step"])))
            picks.append(Pick(axis, name, kept))
        return cls(text, tuple(picks))

    @property
    def is_known(self) -> bool:
        """Whether it can be told which positions are kept."""
        return bool(self.picks)

    def positions(self, axis: int, size: int, num_dims: int) -> list[int] | None:
        """Return which positions are kept of an axis of a tensor, or ``None`` where all are or nobody knows.

        Parameters
        ----------
        axis : int
            The axis, from 0 on.
        size : int
            Its size in the whole tensor.
        num_dims : int
            Axes of the tensor.

        Raises
        ------
        IndexError
            If the axis has not got one of them.
        """
        for pick in self.picks:
            if pick.axis % num_dims == axis:
                return pick.positions(size)
        return None

    def of(self, tensor: Any) -> Any:
        """Take the part of a torch tensor that is kept: a view where that is possible.

        Raises
        ------
        IndexError
            If the tensor has not got the axis or the positions.
        TypeError
            If the function returns no tensor.
        """
        if self.function is not None:
            return self.call(tensor).detach()
        num_dims = tensor.dim()
        if len(self.picks) > 1 and num_dims and len({pick.axis % num_dims for pick in self.picks}) < len(self.picks):
            names = " and ".join(repr(pick.name) for pick in self.picks)
            raise IndexError(f"select names one axis twice: of a tensor with {num_dims} dimensions there are {names}")
        for pick in self.picks:
            if not -num_dims <= pick.axis < num_dims:
                raise IndexError(f"select names axis {pick.name!r}, and the tensor has {num_dims} dimensions")
            size = tensor.shape[pick.axis]
            if isinstance(pick.kept, slice):
                start, stop, step = pick.kept.indices(size)
                axis = pick.axis % num_dims
                tensor = tensor[(*(slice(None),) * axis, slice(start, max(start, stop), step))]
            elif len(pick.kept) == 1:
                tensor = tensor.narrow(pick.axis, pick.positions(size)[0], 1)
            else:
                tensor = tensor.index_select(pick.axis, self._index(pick, size, tensor.device))
        return tensor

    def call(self, tensor: Any) -> Any:
        """Call the function; one that draws random numbers takes none from the training.

        Raises
        ------
        TypeError
            If it returns no tensor.
        """
        import torch

        assert self.function is not None
        with torch.random.fork_rng(devices=[tensor.device] if tensor.is_cuda else []):
            part = self.function(tensor)
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"it returned a {type(part).__name__} instead of a tensor")
        return part

    def _index(self, pick: Pick, size: int, device: Any) -> Any:
        """Return positions as a tensor on a device, which is brought there once: that waits for the device."""
        key = (pick.axis, size, device)
        index = self._indices.get(key)
        if index is None:
            import torch

            with torch.inference_mode(mode=False):
                index = self._indices[key] = torch.tensor(pick.positions(size), dtype=torch.int64, device=device)
        return index


def token_of(text: str) -> str:
    """Return what stands for a portion in names of arrays: begins with ``@`` and has no dot; nothing for the whole tensor."""
    token = "@" + text.replace("[[", "=").replace("[", "=").replace("]", "").replace(", ", "@").replace(":", "~").replace(".", "#")
    return f"@~{hashlib.sha256(text.encode()).hexdigest()[:24]}" if len(token) > _MOST_TOKEN else token if text else ""


def check_dims(dims: Sequence[str] | None) -> tuple[str, ...]:
    """Return the option ``dims`` as a tuple, empty where it is not given.

    Raises
    ------
    OptionError
        If it does not hold names, each once.
    """
    if dims is None:
        return ()
    names = (dims,) if isinstance(dims, str) else tuple(dims) if isinstance(dims, Iterable) else ()
    reserved = {"epoch", "batch", "call"}
    if (
        not names
        or not all(isinstance(name, str) and _NAME.fullmatch(name) and name not in reserved for name in names)
        or len({*names}) != len(names)
        or max(map(len, names)) > _MOST_NAME
    ):
        raise OptionError(
            f"dims: expected names of a tensor's axes, each once, of at most {_MOST_NAME} characters and none of 'epoch', 'batch', 'call', such as "
            f"('sample', 'token', 'feature'), got {dims!r}",
            option="dims",
        )
    return names


def _pick(axis: Axis, kept: Kept, names: tuple[str, ...]) -> Pick:
    if isinstance(axis, str) and axis in names:
        return Pick(names.index(axis), axis, _kept(axis, kept))
    if isinstance(axis, bool | str) or not hasattr(axis, "__index__"):
        raise OptionError(
            f"select: expected an axis by its number or by one of the names {', '.join(map(repr, names))}, got {axis!r}; dims= gives other names",
            option="select",
        )
    number = operator.index(axis)
    return Pick(number, names[number] if 0 <= number < len(names) else str(number), _kept(axis, kept))


def _kept(axis: Axis, kept: Kept) -> slice | tuple[int, ...]:
    """Return what is kept of an axis in one form for each meaning."""
    if isinstance(kept, slice):
        bounds = (kept.start, kept.stop, kept.step)
        if all(bound is None or (hasattr(bound, "__index__") and not isinstance(bound, bool)) for bound in bounds):
            start, stop, step = (None if bound is None else operator.index(bound) for bound in bounds)
            if step is None or step > 0:
                return slice(start or None, stop, None if step == 1 else step)
        raise OptionError(f"select: expected a slice of whole numbers with a step above 0 for axis {axis!r}, got {kept!r}", option="select")
    if not isinstance(kept, bool) and hasattr(kept, "__index__") and not getattr(kept, "shape", ()):
        number = operator.index(kept)
        if number > 0:
            return slice(None, number, None)
        raise OptionError(
            f"select: expected to keep the first 1, 2, … of axis {axis!r}, got {kept!r}; positions are a list: [{kept!r}]", option="select"
        )
    positions = kept.tolist() if hasattr(kept, "tolist") else kept
    if isinstance(positions, str) or not isinstance(positions, Iterable):
        raise OptionError(f"select: expected a number, a slice or positions for axis {axis!r}, got {kept!r}", option="select")
    listed = list(positions)
    if not listed or not all(hasattr(position, "__index__") and not isinstance(position, bool) for position in listed):
        raise OptionError(f"select: expected positions as whole numbers, at least one, for axis {axis!r}, got {kept!r}", option="select")
    return tuple(map(operator.index, listed))


def _text_of(kept: slice | tuple[int, ...]) -> str:
    if isinstance(kept, tuple):
        return f"[{','.join(map(str, kept))}]"
    start, stop, step = ("" if bound is None else str(bound) for bound in (kept.start, kept.stop, kept.step))
    return f"{start}:{stop}" + (f":{step}" if step else "")


def _name_of(function: Callable[[Any], Any]) -> str:
    """Return the name of a function with its module."""
    kind = type(function)
    name = getattr(function, "__qualname__", "") or kind.__qualname__
    module = getattr(function, "__module__", None) or kind.__module__
    return re.sub(r"[^\w.<>]", "_", f"{module}.{name}"[-_MOST_NAME:])
