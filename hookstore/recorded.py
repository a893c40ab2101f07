"""What a run's ``run.json`` says of the captures that it was recorded with. What makes no sense there is taken as not known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hookstore.errors import OptionError
from hookstore.format import PHASES
from hookstore.schedule import Schedule


class Recorded(NamedTuple):
    """What ``run.json`` says of one capture.

    Attributes
    ----------
    layers : frozenset of str or None
        Layers; ``None`` for all.
    kinds : frozenset of str
        Kinds.
    portion : str
        Which part of a tensor.
    schedule : Schedule
        When it was due, as far as that is known.
    is_exact : bool
        Whether all of that is known.
    has_tensors : bool
        Whether it stores tensors, and not statistics alone.
    """

    layers: frozenset[str] | None
    kinds: frozenset[str]
    portion: str
    schedule: Schedule
    is_exact: bool
    has_tensors: bool


def read_captures(description: Mapping[str, Any], attempt: int) -> list[Recorded]:
    """Return what one recording of a run was asked for."""
    attempts = description.get("attempts")
    described = [one for one in attempts if isinstance(one, dict) and one.get("attempt") == attempt] if isinstance(attempts, list) else []
    recorded = described[0].get("recorded") if described else description.get("recorded")
    recorded = recorded if isinstance(recorded, dict) else {}
    listed = recorded.get("captures")
    if isinstance(listed, list) and listed and all(isinstance(one, dict) for one in listed):
        return [_read_capture(one) for one in listed]
    return [_read_capture({**recorded, "epochs": "unknown", "batches": "unknown"})]  # runs made before there were several captures


def _read_capture(said: Mapping[str, Any]) -> Recorded:
    """Read one capture; what makes no sense is not known."""
    restrictions = {name: _read_restriction(said.get(name)) for name in ("epochs", "batches", "steps")}
    is_exact = all(is_known for _, is_known in restrictions.values())
    try:
        schedule = Schedule.build(
            every=said["every"],
            phases=said["phases"],
            epochs=restrictions["epochs"][0],
            batches=restrictions["batches"][0],
            steps=restrictions["steps"][0],
        )
    except (OptionError, KeyError, TypeError, ValueError):
        schedule, is_exact = Schedule.build(phases=PHASES), False
    layers, kinds, portion = said.get("layers"), said.get("kinds"), said.get("select")
    return Recorded(
        layers=frozenset(map(str, layers)) if isinstance(layers, list) else None,
        kinds=frozenset(map(str, kinds)) if isinstance(kinds, list) else frozenset(),
        portion=portion if isinstance(portion, str) else "",
        schedule=schedule,
        is_exact=is_exact,
        has_tensors=said.get("stats") != "only" and said.get("when") is None,
    )


def _read_restriction(said: Any) -> tuple[range | frozenset[int] | None, bool]:
    """Return a restriction and whether it is known; see `hookstore.schedule.describe_restriction`."""
    if said is None:
        return None, True
    if isinstance(said, list) and all(type(one) is int for one in said):
        return frozenset(said), True
    if isinstance(said, dict) and [*said] == ["start", "stop", "step"] and all(type(one) is int for one in said.values()) and said["step"]:
        return range(said["start"], said["stop"], said["step"]), True
    return None, False
