"""Every test fails that leaves a thread of ours, or an open file of a run, behind."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch

from hookstore.compiler import Settings


def _our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("hookstore")}


def _open_run_files() -> set[str]:
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        return set()
    found = set()
    for entry in os.listdir(descriptors):
        try:
            target = os.readlink(descriptors / entry)
        except OSError:
            continue
        if any(part in target for part in ("/layers/", "/journal/", "/manifest/")):
            found.add(target)
    return found


@pytest.fixture(autouse=True)
def _nothing_leaks():
    threads, files = _our_threads(), _open_run_files()
    yield
    if _our_threads() - threads or _open_run_files() - files:
        gc.collect()  # maps close with the last array that was read from them
    assert not _our_threads() - threads, "the test left threads behind"
    assert not _open_run_files() - files, "the test left files open"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(name="one_thread")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(name="no_syncs")
def _no_syncs(monkeypatch):
    """These runs have thousands of arrays and are about values: waiting for the disk would take longer than all the rest."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture(name="new_compiler")
def _new_compiler():
    """Nothing is compiled before or left after; the compiler looks at the gradient of whatever it is given."""
    gc.collect()  # edits and recordings that tests have left
    torch._dynamo.reset()
    Settings.turn()  # torch has settings for each thread: of a recording that was closed on another this one hears here
    assert torch._dynamo.config.skip_nnmodule_hook_guards
    with torch._dynamo.config.patch(error_on_recompile=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
    torch._dynamo.reset()
    assert torch._dynamo.config.skip_nnmodule_hook_guards


if "PYTEST_XDIST_WORKER" in os.environ:  # each of a few processes has a core
    torch.set_num_threads(1)
