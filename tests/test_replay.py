"""Proof by replay: what is promised about acknowledged and durable captures holds after a kill, or a power failure, at any point."""

from __future__ import annotations

import itertools
import os
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from replay import (
    RESUMED_STEPS,
    RUN,
    STEPS,
    Acknowledged,
    Checker,
    Directory,
    Draft,
    Durable,
    FileSystem,
    Flush,
    Key,
    LoopingReader,
    Make,
    Names,
    Recorder,
    Recording,
    Size,
    State,
    Sync,
    Truncate,
    Write,
    choices,
    follow,
    killed_states,
    path_of,
    power_losses,
    read_tree,
    record_recovery,
    record_steps,
)

import hookstore
from hookstore.files import has_sync_file_system, system, write_atomically, write_new
from hookstore.format import FRAME_BYTES, FRAME_FORMAT, FRAME_ROWS, PAGE_BYTES
from hookstore.manifest import SCHEMA

# The model ---------------------------------------------------------------------------------------------------------


def name(inode: int | None, path: str = "a", directory: int = 0) -> Names:
    return Names(((directory, path, inode),))


def after(*operations: Any) -> FileSystem:
    made = FileSystem()
    for operation in operations:
        made.apply(operation)
    return made


def all_power_losses(made: FileSystem) -> set[frozenset[Any]]:
    unsynced = made.unsynced()
    subsets = itertools.product((False, True), repeat=len(unsynced))
    return {frozenset(made.tree_with(itertools.compress(unsynced, kept)).items()) for kept in subsets}


def states(*trees: dict[str, bytes | None]) -> set[frozenset[Any]]:
    return {frozenset(tree.items()) for tree in trees}


def test_a_file_that_was_never_synced_may_be_missing_empty_of_zeros_or_there() -> None:
    made = after(Make(1, False), name(1), Write(1, 0, b"xy"))
    assert made.tree() == {"a": b"xy"}
    assert all_power_losses(made) == states({}, {"a": b""}, {"a": b"\0\0"}, {"a": b"xy"})


def test_syncing_a_file_does_not_sync_its_name_and_the_other_way_round() -> None:
    written = (Make(1, False), name(1), Write(1, 0, b"xy"))
    assert all_power_losses(after(*written, Sync(1))) == states({}, {"a": b"xy"})
    assert all_power_losses(after(*written, Sync(0))) == states({"a": b""}, {"a": b"\0\0"}, {"a": b"xy"})
    assert all_power_losses(after(*written, Sync(0), Sync(1))) == all_power_losses(after(*written, Sync(None))) == states({"a": b"xy"})


def test_pages_are_written_one_by_one_in_any_order() -> None:
    contents = b"x" * PAGE_BYTES + b"y"
    made = after(Make(1, False), name(1), Sync(0), Write(1, 0, contents))
    zeros = bytes(PAGE_BYTES)
    assert all_power_losses(made) == states(
        {"a": b""}, {"a": contents[:-1]}, {"a": zeros + b"y"}, {"a": zeros + b"\0"}, {"a": contents[:-1] + b"\0"}, {"a": contents}
    )


def test_a_rename_is_there_as_a_whole_or_not_at_all() -> None:
    old = (Make(1, False), name(1), Write(1, 0, b"old"), Make(2, False), name(2, "b"), Write(2, 0, b"new"), Sync(None))
    renamed = Names(((0, "b", None), (0, "a", 2)))
    assert all_power_losses(after(*old, renamed)) == states({"a": b"old", "b": b"new"}, {"a": b"new"})
    assert all_power_losses(after(*old, renamed, Sync(0))) == states({"a": b"new"})


def test_a_directory_is_renamed_into_another_when_either_is_synced() -> None:
    made = (Make(1, True), name(1, "layers"), Make(2, True), name(2, "making"), Make(3, False), name(3, "file", 2), Sync(None))
    moved = Names(((0, "making", None), (1, "conv", 2)))
    there = {"layers": None, "layers/conv": None, "layers/conv/file": b""}
    assert all_power_losses(after(*made, moved)) == states({"layers": None, "making": None, "making/file": b""}, there)
    assert all_power_losses(after(*made, moved, Sync(1))) == all_power_losses(after(*made, moved, Sync(0))) == states(there)


def test_names_in_a_directory_whose_own_name_is_lost_are_lost() -> None:
    made = after(Make(1, True), name(1), Make(2, False), name(2, "file", 1), Sync(1))
    assert all_power_losses(made) == states({}, {"a": None, "a/file": b""})


def test_a_deleted_file_may_come_back() -> None:
    made = after(Make(1, False), name(1), Write(1, 0, b"x"), Sync(None), name(None))
    assert all_power_losses(made) == states({}, {"a": b"x"})


def test_a_file_that_is_emptied_and_written_again() -> None:
    made = after(Make(1, False), name(1), Write(1, 0, b"old"), Sync(None), Truncate(1), Write(1, 0, b"n"))
    assert made.tree() == {"a": b"n"}
    assert states({"a": b"old"}, {"a": b""}, {"a": b"n"}) <= all_power_losses(made)


def test_choices_are_every_combination_up_to_a_bound_and_the_most_telling_beyond() -> None:
    changes = [Write(1, offset, b"x") for offset in range(3)] + [name(1), Size(1, 3)]
    chance = random.Random(0)
    assert sorted(choices(changes, 32, chance)) == list(itertools.product((False, True), repeat=5))
    some = choices(changes, 31, chance)
    assert 20 < len(set(some)) == len(some) <= 31
    assert {(False,) * 5, (True,) * 5} == set(choices(changes, 2, chance))
    for position in range(5):
        alone = tuple(other == position for other in range(5))
        assert {alone, tuple(not kept for kept in alone)} <= set(some)


def test_a_tree_becomes_a_file_system_and_a_directory(tmp_path: Path) -> None:
    trees: list[dict[str, bytes | None]] = [
        {"a": None, "a/b": None, "a/b/c": b"xyz", "d": b""},
        {"a": None, "a/b": b"now a file", "e": None},
        {"a": None, "a/b": None, "a/b/c": b"xyz"},
        {},
    ]
    directory = Directory(tmp_path / "there")
    for tree in trees:
        made = FileSystem.of(tree)
        assert made.tree() == tree
        assert all_power_losses(made) == states(tree)
        directory.become(tree)
        assert read_tree(directory.path) == tree


# The recorder ------------------------------------------------------------------------------------------------------


def test_the_recorder_sees_files_names_and_syncs(tmp_path: Path) -> None:
    with Recorder(tmp_path) as log:
        system.mkdir(str(tmp_path / "made"))
        write_atomically(str(tmp_path / "made" / "file"), b"contents")
        write_new(str(tmp_path / "made" / "file"), b"new")
    kinds = [type(operation).__name__ for operation in log.recording.operations]
    assert kinds == ["Make", "Names", "Make", "Names", "Write", "Sync", "Names", "Sync", "Truncate", "Write"]
    assert read_tree(tmp_path) == {"made": None, "made/file": b"new"}
    killed = [dict(state.tree) for state in killed_states(log.recording)]
    assert {"made": None, "made/.file.writing": b"contents"} in killed
    assert {"made": None, "made/file": b"contents"} in killed


def test_the_recorder_finds_changes_that_go_another_way(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="changed by another way than hookstore.files.system: .'behind'"), Recorder(tmp_path):
        (tmp_path / "behind").touch()


# A recording -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Recording]:
    """Runs from their beginning to their end, by codec."""
    made: dict[str | None, Recording] = {}

    def recording_of(codec: str | None) -> Recording:
        if codec not in made:
            made[codec] = record_steps(tmp_path_factory.mktemp("recorded"), codec=codec)
        return made[codec]

    return recording_of


@pytest.fixture(params=[None, "zstd"], ids=["uncompressed", "zstd"])
def recorded(request: pytest.FixtureRequest, recordings: Callable[[str | None], Recording]) -> Recording:
    return recordings(request.param)


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    return Checker(tmp_path / "replayed")


@dataclass(frozen=True)
class Amount:
    """How much is looked at: some states by chance, or all."""

    is_all: bool

    def of(self, states: Iterable[State], count: int, seed: int = 0) -> list[State]:
        """Take about so many of the states, in their order."""
        there = list(states)
        count = len(there) if self.is_all else min(len(there), count)
        return [there[position] for position in sorted(random.Random(seed).sample(range(len(there)), count))]

    @property
    def cuts(self) -> int | None:
        return 60 if self.is_all else 2

    def limit(self, usual: int) -> int:
        return 5 * usual if self.is_all else usual


@pytest.fixture(params=[pytest.param(False, id="some"), pytest.param(True, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def amount(request: pytest.FixtureRequest) -> Amount:
    return Amount(request.param)


def events(recording: Recording) -> Iterator[tuple[int, str, str]]:
    """Give the number of operations done, what was done, and to which path."""
    now = recording.initial.copy()
    for count, operation in enumerate(recording.operations, 1):
        now.apply(operation)
        if isinstance(operation, Names):
            for directory, entry, inode in operation.changes:
                yield count, "gone" if inode is None else "there", os.path.join(path_of(now, directory), entry)
        elif isinstance(operation, Write):
            yield count, "written", path_of(now, operation.inode)


def test_the_recording_has_all_that_can_go_wrong(recorded: Recording) -> None:
    done = [(what, path) for _, what, path in events(recorded)]
    late = f"{RUN}/layers/late/activation"
    assert done.count(("there", f"{late}/c.0.0.0.0")) == 2  # a sealed shard is taken up again
    assert done.index(("there", f"{late}/.c.0.0.0.0.unsealed")) < done.index(("there", f"{late}/c.0.0.0.0"))
    assert sum(what == "gone" and path.endswith(".journal") for what, path in done) >= 3
    assert sum(what == "there" and path.endswith(".parquet") for what, path in done) >= 3
    assert done.count(("there", f"{RUN}/layers/small/activation/zarr.json")) >= 3  # new, and grown
    assert sum(what == "there" and os.path.basename(path).startswith("c.") for what, path in done) >= 10
    assert sum(what == "written" and path.endswith(".journal") for what, path in done) >= 15
    keys = [key for operation in recorded.operations if isinstance(operation, Acknowledged) for key in operation.keys]
    assert set(keys) == {Key(0, step.epoch, step.batch, layer) for step in STEPS if isinstance(step, Draft) for layer in step.layers}
    assert any(isinstance(operation, Durable) and 0 < len(operation.keys) < len(keys) for operation in recorded.operations)


def test_a_kill_at_any_point_loses_nothing_acknowledged(recorded: Recording, checker: Checker, amount: Amount) -> None:
    for state in amount.of(killed_states(recorded, cuts=amount.cuts), 60):
        checker.check(state, recover=False)
    assert checker.num_states >= 60


def test_recovery_after_a_kill_at_any_point(recorded: Recording, checker: Checker, amount: Amount) -> None:
    for state in amount.of(killed_states(recorded, cuts=1, seed=1), 20):
        checker.check(state)
    assert checker.num_recovered >= 20


def test_every_plain_reader_after_a_kill(recorded: Recording, checker: Checker, amount: Amount) -> None:
    for state in amount.of(killed_states(recorded, cuts=0), 6):
        checker.check(state, everywhere=True)
    assert checker.num_recovered >= 5


def test_a_plain_reader_finds_its_chunks_where_they_were(recorded: Recording) -> None:
    looping = LoopingReader()
    for state in killed_states(recorded, cuts=0):
        looping.look(state)
    assert looping.num_replaced >= 1


def test_a_reader_that_follows_a_run_sees_all_that_is_acknowledged_at_any_point(recorded: Recording, tmp_path: Path) -> None:
    live = Directory(tmp_path / "live")
    states = (state for state in killed_states(recorded, cuts=0) if f"{RUN}/run.json" in state.tree)
    live.become(next(states).tree)
    seen: frozenset[Key] = frozenset()
    with hookstore.open(live.path / RUN) as run:
        for state in states:
            live.become(state.tree)
            now = follow(run, state)
            assert seen <= now
            seen = now
    assert len(seen) == sum(len(step.layers) for step in STEPS if isinstance(step, Draft))


def test_a_power_failure_at_any_point_loses_nothing_durable(recorded: Recording, checker: Checker, amount: Amount) -> None:
    for state in amount.of(power_losses(recorded, limit=amount.limit(8)), 120):
        checker.check(state, recover=False)
    assert checker.num_states >= 120


def test_recovery_after_a_power_failure_at_any_point(recorded: Recording, checker: Checker, amount: Amount) -> None:
    for state in amount.of(power_losses(recorded, limit=amount.limit(3), seed=1), 25):
        checker.check(state)
    assert checker.num_recovered >= 25


@pytest.mark.skipif(not has_sync_file_system, reason="this system has no call that syncs one file system")
def test_a_power_failure_where_whole_file_systems_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checker: Checker) -> None:
    """As where there are many files to sync."""
    monkeypatch.setattr("hookstore.files._SYNC_WHOLE_ABOVE", 0)
    recorded = record_steps(tmp_path / "recorded", STEPS[:5])
    assert Sync(None) in recorded.operations
    for number, state in enumerate(power_losses(recorded, limit=2)):
        checker.check(state, recover=number % 10 == 0)
    assert checker.num_states > 50


# Recovery and taking up again --------------------------------------------------------------------------------------


def points(recording: Recording) -> dict[str, int]:
    """Return after how many operations a kill is most telling."""
    found: dict[str, int] = {}
    were_there: set[str] = set()
    for count, what, path in events(recording):
        directory, entry = os.path.split(path)
        if what == "there" and entry.startswith("c."):
            found.setdefault("sealed", count)
        if what == "there" and entry.endswith(".unsealed") and os.path.join(directory, entry[1:-9]) in were_there:
            found.setdefault("cloned", count)
        if what == "there" and entry.endswith(".parquet"):
            found["part"] = count
        if what == "written" and entry == ".c.1.0.0.0.unsealed":
            found["late"] = count
        if what == "there":
            were_there.add(path)
    # the clone of a shard gets a chunk, and that is acknowledged
    acknowledged = [count for count, operation in enumerate(recording.operations, 1) if isinstance(operation, Acknowledged)]
    found["reopened"] = next(count for count in acknowledged if count > found["cloned"])
    assert set(found) == {"sealed", "cloned", "part", "late", "reopened"}
    return found


POINTS = [("sealed", None), ("cloned", "zstd"), ("reopened", None), ("part", "zstd"), ("late", None)]
RESUMED = [("reopened", "zstd"), ("late", None)]


@pytest.mark.parametrize(("point", "codec"), POINTS)
def test_recovery_that_is_killed(recordings: Any, checker: Checker, tmp_path: Path, amount: Amount, point: str, codec: str | None) -> None:
    recorded = recordings(codec)
    recovery = record_recovery(tmp_path / "recovered", recorded.after(points(recorded)[point]))
    looping = LoopingReader()
    for state in killed_states(recovery, cuts=0):
        looping.look(state)
    for state in amount.of(killed_states(recovery, cuts=amount.cuts), 8):
        checker.check(state)
    assert checker.num_recovered >= 5


@pytest.mark.parametrize(("point", "codec"), POINTS)
def test_recovery_that_loses_power(
    recordings: Any, checker: Checker, tmp_path: Path, amount: Amount, point: str, codec: str | None
) -> None:
    recorded = recordings(codec)
    recovery = record_recovery(tmp_path / "recovered", recorded.after(points(recorded)[point]))
    for number, state in enumerate(amount.of(power_losses(recovery, limit=amount.limit(4)), 36)):
        checker.check(state, recover=amount.is_all or number % 6 == 0)
    assert checker.num_recovered >= 5


@pytest.mark.parametrize(("point", "codec"), RESUMED)
def test_taking_up_again_that_is_killed(
    recordings: Any, checker: Checker, tmp_path: Path, amount: Amount, point: str, codec: str | None
) -> None:
    recorded = recordings(codec)
    resumed = record_steps(tmp_path / "resumed", RESUMED_STEPS, recorded.after(points(recorded)[point]))
    looping = LoopingReader()
    for state in killed_states(resumed, cuts=0):
        looping.look(state)
    for number, state in enumerate(amount.of(killed_states(resumed, cuts=amount.cuts), 32)):
        checker.check(state, recover=amount.is_all or number % 4 == 0)
    assert checker.num_recovered >= 5


@pytest.mark.parametrize(("point", "codec"), RESUMED)
def test_taking_up_again_that_loses_power(
    recordings: Any, checker: Checker, tmp_path: Path, amount: Amount, point: str, codec: str | None
) -> None:
    recorded = recordings(codec)
    resumed = record_steps(tmp_path / "resumed", RESUMED_STEPS, recorded.after(points(recorded)[point]))
    for number, state in enumerate(amount.of(power_losses(resumed, limit=amount.limit(4)), 48)):
        checker.check(state, recover=amount.is_all or number % 6 == 0)
    assert checker.num_recovered >= 5


def test_recovery_after_a_power_failure_that_fails_itself(recorded: Recording, tmp_path: Path, amount: Amount) -> None:
    """What such a recovery finds is durable when it is done, and until then what had been durable is."""
    counts = itertools.count()
    for state in amount.of(power_losses(recorded, limit=2, seed=3), 2, seed=5)[:100]:
        path = tmp_path / str(next(counts))
        checker = Checker(path / "replayed")
        there = checker.check(state, recover=False)
        if not there:
            continue
        recovery = record_recovery(path / "recovered", Recording(FileSystem.of(state.tree), there, state.required), lost_power=True)
        for again in amount.of(killed_states(recovery, cuts=1), 5):
            checker.check(replace(again, lost_power=True))
        for again in amount.of(power_losses(recovery, limit=amount.limit(2)), 5):
            checker.check(again)
        assert checker.num_recovered > 4


def test_taking_up_again_after_a_kill_at_any_point(recorded: Recording, checker: Checker, amount: Amount) -> None:
    steps = (Draft(0, 1), Flush(), Draft(1, 1))
    for state in amount.of(killed_states(recorded, cuts=1, seed=3), 5):
        checker.check_resume(state, steps)
    assert checker.num_resumed >= 5


def test_taking_up_again_after_a_power_failure_at_any_point(recorded: Recording, checker: Checker, amount: Amount) -> None:
    steps = (Draft(0, 1), Flush(), Draft(1, 1))
    for state in amount.of(power_losses(recorded, limit=amount.limit(3), seed=2), 5):
        checker.check_resume(state, steps)
    assert checker.num_resumed >= 5


# What chance seldom finds ------------------------------------------------------------------------------------------


def test_recovery_deletes_no_segment_whose_part_may_not_have_its_name(recordings: Any, checker: Checker, tmp_path: Path) -> None:
    """The writer was killed between the rename of a part and the sync of its directory; then the power fails after recovery has deleted the segment."""
    recorded = recordings(None)
    recovery = record_recovery(tmp_path / "recovered", recorded.after(points(recorded)["part"]))
    now = recovery.initial.copy()
    for count, operation in enumerate(recovery.operations, 1):
        now.apply(operation)
        for change in now.unsynced():
            if isinstance(change, Names) and change.changes[-1][2] is None and change.changes[-1][1].endswith(".journal"):
                checker.check(State(now.tree_with([change]), recovery.durable, True, count, "the segment alone is gone"), recover=False)
    assert checker.num_states >= 1


def test_a_run_that_lost_its_directories_to_a_power_failure(recordings: Any, checker: Checker) -> None:
    """All of these names are synced together, once ``run.json`` has its own."""
    tree = recordings(None).after(None).initial.tree()
    kept = (RUN, f"{RUN}/run.json", f"{RUN}/journal", f"{RUN}/layers", f"{RUN}/manifest")
    for missing in range(2, 5):
        there: dict[str, bytes | None] = {path: tree.get(path) for path in kept if path != kept[missing]}
        state = State(there, frozenset(), True, 0, f"without {kept[missing]}")
        checker.check(state)
        checker.check_resume(state, (Draft(0, 0),))
    assert checker.num_recovered == checker.num_resumed == 3


def test_an_array_that_was_lost_to_a_power_failure_with_all_its_captures(recordings: Any, checker: Checker) -> None:
    recorded = recordings(None)
    count = next(count for count, operation in enumerate(recorded.operations, 1) if isinstance(operation, Acknowledged))
    tree = recorded.after(count).initial.tree()
    array = f"{RUN}/layers/small/activation"
    assert f"{array}/zarr.json" in tree
    lost = {path: contents for path, contents in tree.items() if not path.startswith(array)}
    checker.check(State(lost, frozenset(), True, count, "without an array"))
    assert checker.num_recovered == 1


# Files that were cut short -----------------------------------------------------------------------------------------


def frames(journal: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Give the end, the kind and the payload of the frames of a journal segment."""
    position = 0
    while position < len(journal):
        length, kind, _ = struct.unpack_from(FRAME_FORMAT, journal, position)
        start, position = position + FRAME_BYTES, position + FRAME_BYTES + length
        yield position, kind, journal[start:position]


def lengths_around_pages(num_bytes: int) -> list[int]:
    return [length for page in range(0, num_bytes + 1, PAGE_BYTES) for length in (page - 1, page, page + 1) if 0 <= length < num_bytes]


@pytest.mark.parametrize(("point", "codec"), POINTS[1:4])
def test_unsealed_shards_that_are_cut_short(recordings: Any, checker: Checker, point: str, codec: str | None) -> None:
    """Each capture whose bytes are whole is right, the others raise; after recovery they are lost, or raise still where they had been durable."""
    recorded = recordings(codec)
    killed = recorded.after(points(recorded)[point])
    tree = killed.initial.tree()
    cuts = [(path, length) for path in tree if path.endswith(".unsealed") for length in lengths_around_pages(len(tree[path] or b""))]
    assert len(cuts) >= 6
    for path, length in cuts:
        checker.check_cut({**tree, path: (tree[path] or b"")[:length]}, path, length, killed)
    assert checker.num_cut_off >= 1


@pytest.mark.parametrize(("point", "codec"), POINTS[1:3])  # later there is a part beside the segment, or nothing in it
def test_journals_that_are_cut_short(recordings: Any, checker: Checker, amount: Amount, point: str, codec: str | None) -> None:
    """Each capture whose row is whole is right; recovery takes what is there."""
    recorded = recordings(codec)
    killed = recorded.after(points(recorded)[point])
    tree = killed.initial.tree()
    path = next(path for path in sorted(tree, reverse=True) if path.endswith(".journal"))
    journal = tree[path] or b""
    ends = [end for end, _, _ in frames(journal)]
    assert ends[-1] == len(journal)
    around = {end + shift for end in ends for shift in (-1, 0, 1)} | set(lengths_around_pages(len(journal)))
    lengths = range(len(journal)) if amount.is_all else around
    num_others = len(killed.acknowledged) - sum(count_rows(payload) for _, kind, payload in frames(journal) if kind == FRAME_ROWS)
    for length in sorted(length for length in lengths if 0 <= length < len(journal)):
        num_rows = num_others + sum(count_rows(payload) for end, kind, payload in frames(journal) if kind == FRAME_ROWS and end <= length)
        checker.check_journal(State({**tree, path: journal[:length]}, frozenset(), False, 0, f"journal cut at {length:,}"), num_rows)
    assert checker.num_recovered >= 8


def count_rows(payload: bytes) -> int:
    return int(pa.ipc.read_record_batch(pa.py_buffer(payload), SCHEMA).num_rows)
