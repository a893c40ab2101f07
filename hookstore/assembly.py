"""A whole value put together from the manifest rows of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hookstore.errors import CorruptRunError, HookstoreError, MissingCaptureError
from hookstore.joined import join, join_torch
from hookstore.structure import PARTS, TENSOR, Branch, Structure, decode
from hookstore.values import NotStored, PackedSequence, build


class Part(NamedTuple):
    """One row of a value.

    Attributes
    ----------
    row : dict
        The manifest row, or what reading it needs.
    structure : Structure
        What its structure text says.
    """

    row: dict[str, Any]
    structure: Structure

    @property
    def tensor(self) -> str:
        """Leaf path of the tensor that the row holds or is a part of."""
        path: str = self.row["leaf"]
        return path if self.structure.leaf is None else self.structure.leaf

    @property
    def is_captured(self) -> bool:
        """Whether there are bytes."""
        return bool(self.row["status"] == "ok")


class Assembly:
    """The rows of one value.

    Parameters
    ----------
    rows : iterable of dict
        Rows at one place in training, of one attempt, in order of backward and time; one at least is captured.
    place : str
        What the value is, for messages.
    where : dict
        Layer, kind and coordinates, for exceptions.
    read : callable
        Reads the tensor of a row.
    as_torch : bool
        Whether that gives torch tensors.
    may_be_absent : str or None
        Where a tensor without a row is one that no gradient arrived for, "" or why that is not certain; ``None`` where every tensor has a row.

    Attributes
    ----------
    whole : Branch or None
        Structure of the value, ``None`` where the rows have none.
    most_often : int
        How often the same leaf was captured.

    Raises
    ------
    CorruptRunError
        If a structure text makes no sense.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        place: str,
        where: dict[str, Any],
        read: Callable[[dict[str, Any]], Any],
        *,
        as_torch: bool,
        may_be_absent: str | None,
    ) -> None:
        self._place = place
        self._where = where
        self._read = read
        self._as_torch = as_torch
        self._may_be_absent = may_be_absent
        parts = []
        decoded: dict[str, Structure] = {}  # rows of one value have one text, as a rule, which may be long
        for row in rows:
            text = row["structure"]
            try:
                if text not in decoded:
                    decoded[text] = decode(text)
                parts.append(Part(row, decoded[text]))
            except ValueError as error:
                raise CorruptRunError(f"{place}: the manifest has a structure that makes no sense ({error})") from error
        # Where the clock stood at one place twice, the value may have had another structure: the last one counts.
        self.whole: Branch | None = [part for part in parts if part.is_captured][-1].structure.whole
        self.most_often = max(Counter(part.row["leaf"] for part in parts if part.is_captured).values())
        self._of_tensor: dict[str, list[Part]] = {}
        for part in parts:
            if part.structure.whole == self.whole:
                self._of_tensor.setdefault(part.tensor, []).append(part)
        if self.whole is not None:
            tensors = {leaf.path for leaf in self.whole.leaves() if leaf.node == TENSOR}
            strange = [path for path, found in self._of_tensor.items() if path not in tensors and any(part.is_captured for part in found)]
            if strange:
                raise self._makes_no_sense(f"it has no tensor at {strange[0]!r}")

    @property
    def tensors(self) -> list[str]:
        """Leaf paths of the tensors that have rows, parts of one counted together."""
        return list(self._of_tensor)

    def has(self, path: str) -> bool:
        """Say whether there is a tensor with that leaf path, and it was captured."""
        return any(part.is_captured for part in self._of_tensor.get(path, ()))

    def value(self, branch: Branch) -> Any:
        """Return the whole value, or a branch of it.

        Raises
        ------
        MissingCaptureError
            If a tensor in it was dropped or lost, or its row is missing.
        CorruptRunError
            If the rows do not fit the structure.
        """
        try:
            return build(branch, self.tensor, packed=self._packed if self._as_torch else PackedSequence)
        except HookstoreError:
            raise
        except (ValueError, TypeError) as error:
            raise self._makes_no_sense(error) from error

    def tensor(self, path: str) -> Any:
        """Return one tensor, put together from its parts where it has some."""
        parts = self._of_tensor.get(path, [])
        captured = [part for part in parts if part.is_captured]
        if captured and parts[-1].row["status"] not in (
            "dropped",
            "lost",
        ):  # where the clock stood there twice, an earlier value's tensor is not this one's
            return self._join(captured[-1], path, parts)
        if parts and parts[-1].row["status"] == "skipped":
            return NotStored("torch.Tensor", parts[-1].row["reason"])
        if not parts and self._may_be_absent is not None:
            return NotStored("torch.Tensor", self._may_be_absent) if self._may_be_absent else None
        raise self._missing(path, parts)

    def _join(self, last: Part, path: str, parts: list[Part]) -> Any:
        tensor = last.structure.tensor
        if isinstance(tensor, tuple) and tensor[0] == "dtensor":
            tensor = tensor[2]
        if not isinstance(tensor, tuple):
            return self._read(last.row)
        kind, facts = tensor
        found = {}
        for name in PARTS[kind]:
            leaf = f"{path}.{name}" if path else name
            rows = [part for part in parts if part.row["leaf"] == leaf and part.row["backward"] == last.row["backward"]]
            if not rows or not rows[-1].is_captured:
                raise self._missing(leaf, rows)
            found[name] = self._read(rows[-1].row)
        try:
            return (join_torch if self._as_torch else join)(kind, dict(facts), found)
        except (ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
            raise self._makes_no_sense(error) from error

    def _missing(self, path: str, parts: list[Part]) -> MissingCaptureError:
        row = parts[-1].row if parts else None
        what = f"leaf {path!r} of {self._place}"
        why = f"was {row['status']}: {row['reason']}" if row else "has no row in the manifest; its batch may have been cut short"
        return MissingCaptureError(
            f"{what} {why}. The other leaves can be read by .leaf()", status=row["status"] if row else None, **self._where
        )

    def _makes_no_sense(self, error: Exception | str) -> CorruptRunError:
        return CorruptRunError(
            f"{self._place}: the manifest has a structure that makes no sense, or one that the tensors do not fit ({error})"
        )

    def _packed(self, **fields: Any) -> Any:
        import torch

        if all(isinstance(fields.get(name), torch.Tensor) for name in ("data", "batch_sizes")):
            return torch.nn.utils.rnn.PackedSequence(**fields)
        return PackedSequence(**fields)
