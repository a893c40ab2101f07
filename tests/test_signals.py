"""Handlers of signals: of SIGTERM, and of those that the flight recorder fires at."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import pytest
from flights import batches_on_disk, fired, model_of, train
from small import recording

import hookstore
from hookstore.triggers import Signalled

pytestmark = pytest.mark.filterwarnings("ignore:the flight recorder fired")


def test_a_signal_fires_and_the_handler_before_has_its_turn(tmp_path):
    got = []

    def handler(number, frame):
        got.append((number, frame is not None))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        model = model_of()
        with recording(model, tmp_path / "run", layers="2", last=2, when=[Signalled(), Signalled()]) as recorder:
            train(model, range(6), recorder)
            signal.raise_signal(signal.SIGUSR1)
            train(model, range(6, 12), recorder)
        assert got == [(signal.SIGUSR1, True)]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert fired(tmp_path / "run") == [(5, "signal SIGUSR1")]
    assert batches_on_disk(tmp_path / "run") == [4, 5, 6, 7]


def test_a_handler_that_somebody_has_set_since_stays(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    try:
        with recording(model_of(), tmp_path / "run", last=2, when=Signalled(signal.SIGUSR2)):
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("options", [{"last": 1, "when": Signalled()}, {"on_sigterm": "flush"}], ids=["a trigger", "on_sigterm"])
def test_recorders_that_handle_one_signal_may_be_closed_in_any_order(tmp_path, options):
    number = signal.SIGTERM if "on_sigterm" in options else signal.SIGUSR1
    before = signal.getsignal(number)
    recorders = [recording(model_of(), tmp_path / str(position), **options) for position in range(3)]
    for position in (1, 0, 2):
        recorders[position].close()
    assert signal.getsignal(number) == before


def test_a_handler_that_another_thread_could_not_take_away_keeps_nothing_alive(tmp_path):
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("before"))
    try:
        recorder = recording(model_of(), tmp_path / "run", last=1, when=Signalled())
        closes = threading.Thread(target=recorder.close)
        closes.start()
        closes.join()
        alive = weakref.ref(recorder)
        del recorder, closes
        gc.collect()
        assert alive() is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == ["before"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_refused_outside_the_main_thread(tmp_path):
    caught = []

    def run():
        try:
            recording(model_of(), tmp_path / "run", last=2, when=Signalled())
        except hookstore.OptionError as error:
            caught.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "only be set in the main thread" in caught[0]


def test_on_sigterm_is_for_the_main_thread(tmp_path):
    caught = []

    def begin():
        try:
            recording(model_of(), tmp_path / "run", on_sigterm="flush")
        except hookstore.OptionError as error:
            caught.append(str(error))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert caught
    assert "only be set in the main thread" in caught[0]
    assert not (tmp_path / "run").exists()
    with pytest.raises(hookstore.OptionError, match="on_sigterm: expected 'flush', got 'close'"):
        recording(model_of(), tmp_path / "run", on_sigterm="close")


def test_the_handler_of_sigterm_is_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with recording(model_of(), tmp_path / "run", on_sigterm="flush"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with recording(model_of(), tmp_path / "run", on_sigterm="flush", mode="a"):
            signal.signal(signal.SIGTERM, later := lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) == later, "who came after us keeps it"
    finally:
        signal.signal(signal.SIGTERM, own)


IN_TURN = """
import os, signal, sys, torch, hookstore
from torch import nn

torch.set_num_threads(1)
model = nn.Linear(4, 2)
first, second = (hookstore.record(model, path, layers=[""], buffer_bytes=1 << 20, on_sigterm="flush") for path in sys.argv[1:])
first.at(epoch=0, batch=0)
first.close()
second.at(epoch=0, batch=7)
model(torch.ones(3, 4))
while True:
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_recorder_that_was_closed_before_does_not_hide_that_sigterm_ends_the_process(tmp_path):
    """The handler of the first stays behind that of the second, which must know what will become of the process all the same."""
    ended = subprocess.run(
        [sys.executable, "-c", IN_TURN, tmp_path / "first", tmp_path / "second"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGTERM, ended.stderr
    with hookstore.open(tmp_path / "second") as run:
        assert [(batch.batch, batch.reason.split(" in ")[0]) for batch in run.partial_batches] == [(7, "SIGTERM ended the process")]
        assert run[""].activation.get(0, 7).shape == (3, 2)
