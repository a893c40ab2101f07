"""Each wait and each keep-alive of the staging code is left out, one at a time, and the tests of `test_device_scenarios.py` must notice.

A mutant is production code with a few words of its source replaced. Where the words are not there any more, the test fails and says so: say what the mutant is
in the new code.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from simulated import IN_ORDER, SCHEDULES, CorruptionError, Schedule, Simulation
from test_device_scenarios import RECORDER_SCHEDULES, RECORDINGS, SCENARIOS, record_and_read, run_scenario

from hookstore.device import StreamDevice, StreamTransfer
from hookstore.staging import Stager
from hookstore.writer import Writer


class Replacement(NamedTuple):
    """Words of one method, and what stands there in the mutant."""

    owner: type
    method: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """Production code that is wrong in one point.

    Attributes
    ----------
    name : str
        What is left out.
    scenarios : tuple of str
        What notices: names in `SCENARIOS` or `RECORDINGS`.
    replacements : tuple of Replacement
        The change.
    is_forgiven : bool
        Whether a device that is never behind hides it: then it is the order of operations that the scenarios notice, and nothing else.
    """

    name: str
    scenarios: tuple[str, ...]
    replacements: tuple[Replacement, ...]
    is_forgiven: bool = True

    def __str__(self) -> str:
        return self.name


def of_device(method: str, before: str, after: str) -> Replacement:
    return Replacement(StreamDevice, method, before, after)


def of_stager(method: str, before: str, after: str) -> Replacement:
    return Replacement(Stager, method, before, after)


def of_writer(method: str, before: str, after: str) -> Replacement:
    return Replacement(Writer, method, before, after)


MUTANTS = [
    # The snapshot
    Mutant(
        "nobody waits for a loss scale",
        ("loss scales, small ring",),
        (of_stager("_copy_scale", "if transfer is not None:", "if False:"),),
    ),
    Mutant(
        "there is no snapshot",
        ("in-place edit",),
        (of_device("copy", "runtime.copy(self._side, destination, block)", "runtime.copy(self._side, destination, source)"),),
    ),
    Mutant(
        "there is no snapshot, and the source is freed",
        ("freed sources",),
        (of_device("copy", "runtime.copy(self._side, destination, block)", "runtime.copy(self._side, destination, source)"),),
    ),
    Mutant(
        "the snapshot is made on the stream of the first capture",
        ("streams",),
        (of_device("copy", "current = runtime.current_stream()", "current = vars(self).setdefault('first', runtime.current_stream())"),),
    ),
    Mutant(
        "the snapshot is made on the side stream",
        ("in-place edit",),
        (
            of_device(
                "copy", "runtime.copy(current, _corner(block, source), source)", "runtime.copy(self._side, _corner(block, source), source)"
            ),
        ),
    ),
    Mutant(
        "the side stream does not wait for the snapshot",
        ("in-place edit",),
        (of_device("_follow", "self._runtime.wait(self._side, self._runtime.record(current))", "pass"),),
    ),
    Mutant(
        "the event of the snapshot is recorded before it",
        ("in-place edit",),
        (
            of_device(
                "copy",
                "runtime.copy(current, _corner(block, source), source)",
                "early = runtime.record(current); runtime.copy(current, _corner(block, source), source)",
            ),
            of_device("copy", "self._follow(current)", "runtime.wait(self._side, early)"),
        ),
    ),
    # The transfer and its event
    Mutant(
        "the event of the transfer is recorded before it",
        ("in-place edit",),
        (
            of_device(
                "copy",
                "runtime.copy(self._side, destination, block)",
                "early = runtime.record(self._side); runtime.copy(self._side, destination, block)",
            ),
            of_device("copy", "StreamTransfer(runtime, runtime.record(self._side), ", "StreamTransfer(runtime, early, "),
        ),
    ),
    Mutant(
        "the event of the transfer is recorded on the current stream",
        ("in-place edit",),
        (of_device("copy", "StreamTransfer(runtime, runtime.record(self._side), ", "StreamTransfer(runtime, runtime.record(current), "),),
    ),
    Mutant(
        "waiting for a transfer does not wait",
        ("in-place edit",),
        (Replacement(StreamTransfer, "wait", "self._runtime.synchronize(self.event)", "pass"),),
    ),
    # The blocks of the ring
    Mutant(
        "a block is free as soon as the hook returns",
        ("in-place edit",),
        (of_device("copy", "self._under_way.append(transfer)", "self._blocks.give_back(offset, num_bytes)"),),
    ),
    Mutant(
        "a block is free at the next capture, done or not",
        ("in-place edit",),
        (of_device("_take_block", "self._runtime.is_done(self._under_way[0].event)", "True"),),
    ),
    Mutant(
        "a full ring frees its oldest block without waiting",
        ("in-place edit, small ring", "freed sources, small ring"),
        (of_device("_take_block", "self._under_way[0].wait()", "pass"),),
    ),
    Mutant(
        "the memory of a snapshot is let go of when the hook returns",
        ("mixed sizes",),
        (of_device("copy", "self._ring[offset : offset + num_bytes]", "runtime.allocate(num_bytes)"),),
    ),
    # A capture that is larger than the ring
    Mutant(
        "a copy without snapshot does not wait",
        ("in-place edit, no ring",),
        (of_device("_copy_without_snapshot", "self._runtime.synchronize(self._runtime.record(current))", "pass"),),
    ),
    Mutant(
        "the event of a copy without snapshot is recorded before it",
        ("in-place edit, no ring",),
        (
            of_device(
                "_copy_without_snapshot",
                "self._runtime.copy(current, destination, ",
                "early = self._runtime.record(current); self._runtime.copy(current, destination, ",
            ),
            of_device(
                "_copy_without_snapshot",
                "self._runtime.synchronize(self._runtime.record(current))",
                "self._runtime.synchronize(early)",
            ),
        ),
    ),
    Mutant(
        "a copy without snapshot is made on the side stream",
        ("in-place edit, no ring",),
        (of_device("_copy_without_snapshot", "current = self._runtime.current_stream()", "current = self._side"),),
    ),
    # Regions on their way to the writer
    Mutant(
        "a region does not know its transfers",
        ("in-place edit", "recorded, large ring"),
        (of_stager("_fill_slot", "region.transfers.append(transfer)", "pass"),),
    ),
    Mutant(
        "a full region is handed over while its last copy is being made",
        ("mixed sizes, small arena",),
        (of_stager("_queue_if_done", "if region.closed and not region.pending:", "if region.closed:"),),
        is_forgiven=False,
    ),
    Mutant(
        "a full region is handed over while another thread copies into it",
        ("interleaved hooks",),
        (of_stager("_queue_if_done", "if region.closed and not region.pending:", "if region.closed:"),),
        is_forgiven=False,
    ),
    Mutant(
        "a piece does not know its transfer",
        ("oversize", "recorded oversize"),
        (of_stager("_stage_oversize", "piece.transfer = ", "_ = "),),
    ),
    Mutant(
        "draining does not wait",
        ("drains",),
        (of_stager("drain", "while (self._outstanding.keys() - self._held) & before:", "while False:"),),
        is_forgiven=False,
    ),
    # The writer
    Mutant(
        "the writer does not wait for the transfers of a region",
        ("recorded, large ring", "recorded, encoded"),
        (of_writer("_take_region", "transfer.wait()", "pass"),),
    ),
    Mutant(
        "the writer does not wait for the transfer of a piece",
        ("recorded oversize",),
        (of_writer("_write_piece", "piece.transfer.wait()", "pass"),),
    ),
    Mutant(
        "the writer gives a region back before it waits",
        ("recorded",),
        (
            of_writer(
                "_take_region",
                "for transfer in region.transfers:",
                "self._stager.release(region)\n    for transfer in region.transfers:",
            ),
            of_writer("_write_region", "    self._stager.release(region)\n    block = ", "    block = "),
        ),
        is_forgiven=False,
    ),
    Mutant(
        "the writer gives a region back before it has written it",
        ("recorded",),
        (
            of_writer(
                "_write_region", "shard: ShardWriter | None = None", "self._stager.release(region)\n    shard: ShardWriter | None = None"
            ),
            of_writer("_write_region", "    self._stager.release(region)\n    block = ", "    block = "),
        ),
        is_forgiven=False,
    ),
    Mutant(
        "the writer gives a region back before it is encoded",
        ("recorded, encoded",),
        (
            of_writer("_line_up", "self._to_encode.append(prepared)", "self._stager.release(region); self._to_encode.append(prepared)"),
            of_writer("_write_region", "    self._stager.release(region)\n    block = ", "    block = "),
        ),
        is_forgiven=False,
    ),
    Mutant(
        "the writer gives a piece back before it has written it",
        ("recorded oversize",),
        (
            of_writer("_write_piece", "memory = self._stager.memory[", "self._stager.release(piece); memory = self._stager.memory["),
            of_writer("_write_piece", "    self._stager.release(piece)\n    if piece.is_last:", "    if piece.is_last:"),
        ),
        is_forgiven=False,
    ),
]


def replace(patch: pytest.MonkeyPatch, replacements: tuple[Replacement, ...]) -> None:
    """Put the mutant in the place of production code."""
    changed: dict[tuple[type, str], str] = {}
    for owner, method, before, after in replacements:
        original = textwrap.dedent(inspect.getsource(getattr(owner, method)))
        assert original.count(before) == 1, f"{owner.__name__}.{method} has no {before!r} to replace, or several"
        changed[owner, method] = changed.get((owner, method), original).replace(before, after)
    for (owner, method), source in changed.items():
        namespace = dict(vars(sys.modules[owner.__module__]))
        exec(compile(source, f"<mutant of {owner.__name__}.{method}>", "exec"), namespace)
        patch.setattr(owner, method, namespace[method])


@pytest.fixture
def check(tmp_path, monkeypatch) -> Callable[[str, Schedule], None]:
    """Run a scenario or a recording by its name."""

    def run(name: str, schedule: Schedule) -> None:
        if name in SCENARIOS:
            run_scenario(name, schedule)
        else:
            path = tmp_path / f"{name}, {schedule}"
            record_and_read(monkeypatch, path, schedule, **RECORDINGS[name])

    return run


def schedules_of(name: str) -> Any:
    return SCHEDULES if name in SCENARIOS else RECORDER_SCHEDULES


CASES = [pytest.param(mutant, name, id=f"{mutant}: {name}") for mutant in MUTANTS for name in mutant.scenarios]


@pytest.mark.parametrize(("mutant", "name"), CASES)
def test_mutant_is_caught(mutant, name, check):
    """Only `CorruptionError` counts: a mutant that fails in another way is a bad mutant."""
    survived = []
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, mutant.replacements)
        for schedule in schedules_of(name):
            try:
                check(name, schedule)
            except CorruptionError:
                return
            survived.append(schedule.name)
    pytest.fail(f"nothing noticed that {mutant}, under {', '.join(survived)}")


@pytest.mark.parametrize(("mutant", "name"), [case for case in CASES if case.values[0].is_forgiven and case.values[1] in SCENARIOS])
def test_mutant_is_forgiven_by_a_device_that_is_never_behind(mutant, name, check):
    """So it differs from production code by the order of operations alone, and it is an adversarial schedule that catches it."""
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, mutant.replacements)
        check(name, IN_ORDER)


METHODS = sorted({(change.owner.__name__, change.method, change.owner) for mutant in MUTANTS for change in mutant.replacements}, key=str)


def test_replacing_code_by_itself_changes_nothing(check):
    """The schedules catch what a mutant leaves out, and not the way in which it was made."""
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, tuple(Replacement(owner, method, f"def {method}(", f"def {method}(") for _, method, owner in METHODS))
        for name in ("mixed sizes, small ring and arena", "in-place edit, no ring", "drains", "recorded, encoded", "recorded oversize"):
            check(name, SCHEDULES[0])


def hold_the_lock_in_every_call_of_the_device() -> None:
    """Raise `CorruptionError` if a capture calls the device while another thread could be at the ring."""
    simulation = Simulation(SCHEDULES[0], ring_bytes=8 << 10, is_threaded=True)

    def check_lock() -> None:
        if not simulation.device._lock.locked():
            raise CorruptionError("the ring is used without its lock")

    for _ in range(4):
        values = simulation.values(40, 25)
        tensor = simulation.runtime.compute(values)
        simulation.runtime.on_call = check_lock
        simulation.capture(tensor, values)
        simulation.runtime.on_call = lambda: None
    simulation.finish()


def test_ring_is_used_by_one_thread_at_a_time():
    hold_the_lock_in_every_call_of_the_device()


def test_missing_lock_is_caught(monkeypatch):
    replace(monkeypatch, (of_device("copy", "with self._lock:", "if True:"),))
    with pytest.raises(CorruptionError, match="without its lock"):
        hold_the_lock_in_every_call_of_the_device()
