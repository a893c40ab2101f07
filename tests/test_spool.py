"""`hookstore.files.Spool`: what a recording keeps of unsealed shards without keeping it in memory."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hookstore.files import Spool, SpooledRecords

DTYPE = np.dtype([("number", "<i8"), ("half", "<i4")])


def records(start, stop):
    made = np.zeros(stop - start, dtype=DTYPE)
    made["number"] = np.arange(start, stop)
    made["half"] = made["number"] // 2
    return made


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 700)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_records_come_back_in_their_order(steps):
    spool = Spool()
    logs = [SpooledRecords(spool, DTYPE) for _ in range(3)]
    expected = [[], [], []]
    number = 0
    for index, count in steps:
        logs[index].append(records(number, number + count))
        expected[index] += range(number, number + count)
        number += count
        if count == 0:
            logs[index].clear()
            expected[index].clear()
    for log, numbers in zip(logs, expected, strict=True):
        assert len(log) == len(numbers)
        found = log.read()
        assert found["number"].tolist() == numbers
        assert found["half"].tolist() == [one // 2 for one in numbers]
    spool.close()


def test_room_is_used_again(tmp_path):
    spool = Spool(str(tmp_path))
    for start in range(0, 100_000, 1000):
        log = SpooledRecords(spool, DTYPE)
        log.append(records(start, start + 1000))
        assert log.read()["number"].tolist() == list(range(start, start + 1000))
        log.clear()
    assert os.fstat(spool._file.fileno()).st_size <= 1000 * DTYPE.itemsize
    spool.close()


def test_few_records_make_no_file(tmp_path):
    spool = Spool(str(tmp_path))
    log = SpooledRecords(spool, DTYPE)
    for number in range(255):
        log.append(records(number, number + 1))
    assert spool._file is None
    assert log.read()["number"].tolist() == list(range(255))
    log.append(records(255, 256))
    assert os.fstat(spool._file.fileno()).st_size == 256 * DTYPE.itemsize
    assert os.listdir(tmp_path) == [], "nobody else sees it"
    spool.close()


def test_a_spool_that_lost_bytes_says_so():
    spool = Spool(tempfile.gettempdir())
    start = spool.write(b"x" * 100)
    os.ftruncate(spool._file.fileno(), 50)
    with pytest.raises(OSError, match="a spooled piece of 100 bytes has only 50"):
        spool.read(start, 100)
    spool.close()
