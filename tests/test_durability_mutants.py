"""Each order of bytes, rows, syncs and renames that a run's safety hangs on is broken, one at a time, and replaying what was done must notice.

A mutant is production code with a few words of its source replaced. Where the words are not there any more, the test fails and says so: say what the mutant is
in the new code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from replay import (
    EARLY,
    Acknowledged,
    BrokenPromiseError,
    Checker,
    Draft,
    Flush,
    LoopingReader,
    Recording,
    Step,
    killed_states,
    power_losses,
    record_recovery,
    record_steps,
)

from hookstore import files, manifest, shards
from hookstore.arrays import ArrayStore
from hookstore.manifest import ManifestWriter
from hookstore.recovery import _TakeUp
from hookstore.shards import ShardWriter
from hookstore.writer import Writer

SHORT = (Draft(0, 0), Flush(), Draft(0, 1))
SEALING = (Draft(0, 0), Draft(0, 1, EARLY), Flush(), Draft(0, 2, EARLY))
MANY_ROWS = (Draft(0, 0), Draft(0, 1), Draft(0, 2), Draft(0, 3))  # more than a segment holds
REOPENING = (
    Draft(0, 1),
    Flush(),
    Draft(0, 2),
    Draft(0, 3),
    Flush(),
    Draft(0, 0, ("late",)),
    Flush(),
    Draft(1, 0, ("late",)),
)


UNFINISHED = (Draft(0, 0), Flush(), Draft(0, 1), Draft(0, 2, EARLY))
RESUMED = (Draft(0, 2), Draft(0, 3, EARLY))


class Replacement(NamedTuple):
    """Words of one function or method, and what stands there in the mutant."""

    owner: type | ModuleType
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutant:
    """Production code that is wrong in one point.

    Attributes
    ----------
    name : str
        What is wrong.
    steps : tuple of Step
        A recording that shows it.
    replacements : tuple of Replacement
        The change.
    after : str
        What shows it: "kill", or "power", a power failure.
    does : str
        What the mutant does: "record", or, after a kill in the middle of the steps, "recover" or "resume".
    recovers : bool
        Whether it also recovers what the kill or the power failure leaves.
    """

    name: str
    steps: tuple[Step, ...]
    replacements: tuple[Replacement, ...]
    after: str
    does: str = "record"
    recovers: bool = False

    def __str__(self) -> str:
        return self.name


MUTANTS = [
    # A capture is acknowledged when its bytes are written
    Mutant(
        "rows are published before their bytes",
        SHORT,
        (
            Replacement(
                ShardWriter,
                "append_region",
                "self._files.writer.write(self.path, memory[:padded], offset)",
                "vars(self._files).setdefault('later', []).append((self.path, bytes(memory[:padded]), offset))",
            ),
            Replacement(
                ShardWriter,
                "append_chunk",
                "self._files.writer.write(self.path, memory[:end], offset)",
                "vars(self._files).setdefault('later', []).append((self.path, bytes(memory[:end]), offset))",
            ),
            Replacement(
                Writer,
                "_acknowledge",
                "self._needs_mark = True",
                "self._needs_mark = True\n    for one in vars(self._files).pop('later', []):\n        self._files.writer.write(*one)",
            ),
        ),
        "kill",
    ),
    # It is durable when the device has its bytes, its row, and the names that lead to both
    Mutant("there is no data sync before the mark", SHORT, (Replacement(Writer, "_sync", "self._sync_files()", "pass"),), "power"),
    Mutant(
        "the journal is not synced after the mark",
        SHORT,
        (Replacement(ManifestWriter, "mark_durable", "system.sync(self._descriptor)", "pass"),),
        "power",
    ),
    Mutant(
        "the directory of the journal is not synced",
        SHORT,
        (Replacement(ManifestWriter, "_begin_segment", "sync_directory(self._journal_path)", "pass"),),
        "power",
    ),
    Mutant(
        "the directory of a new shard is not synced",
        SHORT,
        (Replacement(Writer, "_shard", "self._new_directories.add(directory)", "pass"),),
        "power",
    ),
    Mutant(
        "the directories that lead to a new array are not synced",
        SHORT,
        (Replacement(ArrayStore, "_write_new", "self.unsynced.add(os.path.dirname(directory))", "pass"),),
        "power",
    ),
    Mutant(
        "metadata of a new array is not synced before it appears",
        SHORT,
        (Replacement(ArrayStore, "_write_new", "sync=True", "sync=False"),),
        "power",
    ),
    # A segment becomes a part
    Mutant(
        "a segment is deleted before its part is visible",
        MANY_ROWS,
        (
            Replacement(ManifestWriter, "finish_segment", "system.unlink(self._segment_path())", "pass"),
            Replacement(
                ManifestWriter,
                "finish_segment",
                "    write_part(",
                "    system.unlink(self._segment_path())\n    write_part(",
            ),
        ),
        "kill",
    ),
    Mutant(
        "the directory of a new part is not synced before its segment is deleted",
        MANY_ROWS,
        (
            Replacement(
                manifest,
                "write_part",
                "write_atomically(os.path.join(run_path, MANIFEST_DIR, part_name(*key, crc32c(contents))), contents)",
                "path = os.path.join(run_path, MANIFEST_DIR, part_name(*key, crc32c(contents)))\n"
                "    write_atomically(path, contents, sync=False)\n"
                "    sync_directory(path)",
            ),
        ),
        "power",
    ),
    Mutant(
        "a part is not synced before its segment is deleted",
        MANY_ROWS,
        (
            Replacement(
                manifest,
                "write_part",
                "write_atomically(os.path.join(run_path, MANIFEST_DIR, part_name(*key, crc32c(contents))), contents)",
                "path = os.path.join(run_path, MANIFEST_DIR, part_name(*key, crc32c(contents)))\n"
                "    write_atomically(path, contents, sync=False)\n"
                "    sync_directory(os.path.dirname(path))",
            ),
        ),
        "power",
    ),
    Mutant(
        "the directory of a replaced file is not synced",
        SHORT,
        (Replacement(files, "write_atomically", "sync_directory(os.path.dirname(path))", "pass"),),
        "power",
    ),
    Mutant(
        "a file is not synced before it replaces another",
        SHORT,
        (Replacement(files, "write_atomically", "sync_paths([temporary], temporary)", "pass"),),
        "power",
    ),
    # A shard is sealed
    Mutant(
        "a shard is written under its final name",
        SHORT,
        (Replacement(ShardWriter, "__init__", "unsealed_name(self.key)", "self.key"),),
        "kill",
    ),
    Mutant(
        "a shard is not synced before it gets its key",
        SEALING,
        (Replacement(shards, "publish", "sync_paths([shard.path for shard in shards], file_system)", "pass"),),
        "power",
    ),
    Mutant(
        "a shard gets its key before its index",
        SEALING,
        (
            Replacement(
                ShardWriter,
                "finish",
                "    sink = self._files.sink\n",
                "    self.give_key()\n    self.path = self.sealed_path\n    sink = self._files.sink\n",
            ),
        ),
        "kill",
    ),
    # A sealed shard is reopened
    Mutant(
        "a reopened shard has its chunks elsewhere",
        REOPENING,
        (
            Replacement(
                ShardWriter,
                "_take_up_sealed",
                "    self._keep_rows(rows)\n",
                """    self._keep_rows(rows)
    index = index.copy()
    index[index[:, 1] != MISSING, 0] += PAGE_BYTES
    with open(self.path, "rb") as file:
        contents = memoryview(bytes(PAGE_BYTES) + file.read())
    descriptor = system.open(self.path, os.O_WRONLY)
    system.pwrite(descriptor, contents, 0)
    system.close(descriptor)
""",
            ),
        ),
        "kill",
    ),
    Mutant(
        "a sealed shard is taken away while it is extended",
        REOPENING,
        (
            Replacement(
                ShardWriter,
                "_take_up_sealed",
                "clone_file(self.sealed_path, os.path.join(os.path.dirname(self.path), cloning_name(self.key)), self.path)",
                "system.replace(self.sealed_path, self.path)",
            ),
        ),
        "kill",
    ),
    Mutant(
        "a sealed shard is extended in place",
        REOPENING,
        (
            Replacement(
                ShardWriter,
                "_take_up_sealed",
                "clone_file(self.sealed_path, os.path.join(os.path.dirname(self.path), cloning_name(self.key)), self.path)",
                "self.path = self.sealed_path",
            ),
        ),
        "kill",
    ),
    # A dead writer's run is recovered, or taken up again
    Mutant(
        "recovery deletes a segment before its part is visible",
        UNFINISHED,
        (Replacement(_TakeUp, "_finish_segments", "self._write_part(key, rows)", "self._unlink(path); self._write_part(key, rows)"),),
        "kill",
        "recover",
    ),
    Mutant(
        "recovery does not sync what its part tells of",
        UNFINISHED,
        (Replacement(_TakeUp, "_make_durable", "sync_paths(paths, self.run_path)", "pass"),),
        "power",
        "recover",
    ),
    Mutant(
        "recovery trusts rows that are not durable",
        UNFINISHED,
        (Replacement(_TakeUp, "_checked", "is_right = np.zeros(", "is_right = np.ones("),),
        "power",
        recovers=True,
    ),
    Mutant(
        "an adopted shard is gone on with at its beginning",
        UNFINISHED,
        (Replacement(ShardWriter, "_adopt", "align(end, PAGE_BYTES)", "0"),),
        "kill",
        "resume",
    ),
    Mutant(
        "an adopted shard forgets what is in it",
        UNFINISHED,
        (Replacement(ShardWriter, "_adopt", "adopted.entries, adopted.offsets, adopted.lengths", "[], [], []"),),
        "kill",
        "recover",
    ),
    Mutant(
        "the next attempt has the number of the last",
        UNFINISHED,
        (Replacement(_TakeUp, "run", "max(attempts, default=-1) + 1", "max(attempts, default=0)"),),
        "kill",
        "resume",
    ),
    # A frame
    Mutant(
        "nobody checks the checksum of a frame",
        SHORT,
        (
            Replacement(
                manifest,
                "read_segment",
                "len(payload) < length or crc32c(payload, crc32c(contents[position : position + 8])) != crc",
                "len(payload) < length",
            ),
        ),
        "power",
    ),
]


def replace(patch: pytest.MonkeyPatch, replacements: Sequence[Replacement]) -> None:
    """Put the mutant in the place of production code, wherever that was imported to."""
    changed: dict[tuple[type | ModuleType, str], str] = {}
    for owner, name, before, after in replacements:
        original = textwrap.dedent(inspect.getsource(getattr(owner, name)))
        assert original.count(before) == 1, f"{owner.__name__}.{name} has no {before!r} to replace, or several"
        changed[owner, name] = changed.get((owner, name), original).replace(before, after)
    for (owner, name), source in changed.items():
        original = getattr(owner, name)
        namespace: dict[str, Any] = {}  # what the mutant looks up is what the module has by then, which tests may have changed
        exec(compile(source, f"<mutant of {owner.__name__}.{name}>", "exec"), vars(sys.modules[original.__module__]), namespace)
        patch.setattr(owner, name, namespace[name])
        for module in [module for path, module in sys.modules.items() if path.startswith("hookstore.")]:
            if isinstance(owner, ModuleType) and vars(module).get(name) is original:
                patch.setattr(module, name, namespace[name])


def record(path: Path, mutant: Mutant) -> Recording:
    """Record what the mutant does; to recover or to go on with it gets a run whose writer was killed."""
    if mutant.does == "record":
        with replaced(mutant):
            return record_steps(path / "recorded", mutant.steps)
    whole = record_steps(path / "killed", mutant.steps)
    killed = whole.after(max(count for count, operation in enumerate(whole.operations, 1) if isinstance(operation, Acknowledged)))
    with replaced(mutant):
        if mutant.does == "recover":
            return record_recovery(path / "recorded", killed)
        return record_steps(path / "recorded", RESUMED, killed)


def replay(path: Path, mutant: Mutant, step: int = 1) -> None:
    """Look at every state that a kill can leave, or at many that a power failure can; or at one in so many."""
    recording = record(path, mutant)
    checker, looping = Checker(path / "replayed"), LoopingReader()
    states = killed_states(recording, cuts=1) if mutant.after == "kill" else power_losses(recording, limit=4)
    with replaced(mutant):
        for number, state in enumerate(itertools.islice(states, 0, None, step)):
            checker.check(state, recover=number % 4 == 0 and (mutant.recovers or mutant.does != "record"))
            if mutant.after == "kill":
                looping.look(state)
    assert checker.num_states >= 10


@contextlib.contextmanager
def replaced(mutant: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, mutant.replacements)
        yield


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(tmp_path, mutant):
    """Only a broken promise counts: a mutant that fails in another way is a bad mutant."""
    with pytest.raises(BrokenPromiseError):
        replay(tmp_path, mutant)


METHODS = {(change.owner, change.name): change for mutant in MUTANTS for change in mutant.replacements}
SCENARIOS = {(mutant.steps, mutant.after, mutant.does, mutant.recovers): mutant for mutant in MUTANTS}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda mutant: f"{mutant.does}, {mutant.after}, {len(mutant.steps)} steps")
def test_replacing_code_by_itself_changes_nothing(tmp_path, scenario):
    """What catches the mutants is what they do, and not the way in which they are made."""
    same = tuple(Replacement(owner, name, f"def {name}(", f"def {name}(") for owner, name in METHODS)
    replay(tmp_path, dataclasses.replace(scenario, replacements=same), step=3)
