"""`Captures.samples`: rows gathered from all captures at once are those that `Captures.get` gives one by one."""

from __future__ import annotations

import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hookstore
from hookstore import samples as samples_module
from hookstore.errors import CaptureWarning, CorruptRunError, MissingCaptureError, OptionError
from hookstore.manifest import encode_part, read_manifest
from hookstore.shards import ShardReader

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Place = tuple[int, int]


class Same(nn.Module):
    """Returns what it is called with."""

    def forward(self, value: Any) -> Any:
        return value


def record(path: Path, calls: list[tuple[Place, Any]], **options: Any) -> Path:
    """Record values in their order, each at its epoch and batch; those that follow each other at one place are calls of one batch."""
    model = Same()
    with hookstore.record(model, path, layers="", buffer_bytes=1 << 20, **options) as recorder:
        previous = None
        for place, value in calls:
            if place != previous:
                recorder.at(epoch=place[0], batch=place[1])
            previous = place
            model(value)
    return path


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def flattened(array: np.ndarray[Any, Any], dims: int) -> np.ndarray[Any, Any]:
    return array.reshape(math.prod(array.shape[:dims]), *array.shape[dims:])


def reference(captures: hookstore.Captures, dims: int, **options: Any) -> tuple[np.ndarray[Any, Any], list[tuple[int, ...]]]:
    """All rows and where they come from, by `Captures.get`."""
    rows = [
        row for row in captures.rows.to_pylist() if row["status"] == "ok" and all(row[name] == value for name, value in options.items())
    ]
    pieces, places = [], []
    for where in sorted({(row["epoch"], row["batch"], row["call"]) for row in rows}):
        array = captures.get(*where, **options)
        pieces.append(flattened(array, dims))
        places += [(*where, *inside) for inside in np.ndindex(*array.shape[:dims])]
    return np.concatenate(pieces), places


def assert_bits(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert found.tobytes() == expected.tobytes()


# Against one capture at a time ----------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex128)
CODECS = (None, None, "zstd", "lz4", {"name": "gzip", "configuration": {"level": 1}})


@st.composite
def recordings(draw: st.DrawFn) -> tuple[list[tuple[Place, tuple[int, ...]]], int]:
    """Where each capture is made and its shape: rows of one shape behind the first dimensions, which vary; and how many these are."""
    dims = draw(st.integers(1, 3))
    rest = draw(st.lists(st.integers(0, 5), max_size=2).map(tuple))
    places = st.tuples(st.integers(0, 2), st.integers(0, 6))
    leading = st.lists(st.integers(0, 9), min_size=dims, max_size=dims).map(tuple)
    made = draw(st.lists(st.tuples(places, leading), min_size=1, max_size=12))
    return [(place, (*sizes, *rest)) for place, sizes in made], dims


@given(recordings(), st.sampled_from(DTYPES), st.sampled_from(CODECS), st.integers(1, 5000), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@pytest.mark.filterwarnings("ignore::hookstore.CaptureWarning")
def test_rows_are_those_of_the_captures(
    recording: tuple[list[tuple[Place, tuple[int, ...]]], int], dtype: torch.dtype, codec: Any, together: int, data: st.DataObject
) -> None:
    made, dims = recording
    generator = torch.Generator().manual_seed(0)
    calls = [(place, (torch.randn(shape, generator=generator) * 100).to(dtype)) for place, shape in made]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples_module, "_TOGETHER_BYTES", together)
        with hookstore.open(record(Path(directory) / "run", calls, codec=codec)) as run:
            captures = run[""].activation
            expected, places = reference(captures, dims)
            samples = captures.samples(dims=dims)
            assert (samples.shape, samples.dtype, len(samples)) == (expected.shape, expected.dtype, len(expected))
            assert [samples.where(row) for row in range(len(samples))] == places
            if len(expected):
                indices = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=40))
                assert_bits(samples[indices], expected[np.array(indices, dtype=int)])
            assert_bits(samples[:], expected)
            assert_bits(samples[::-2], expected[::-2])


PLACES: list[Place] = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize(
    ("shapes", "dims"),
    [
        ([(4, 3), (4, 3), (3, 3), (4, 3), (2, 3)], 1),  # smaller batches, padded
        ([(4, 3), (9, 3), (1, 3), (4, 3), (9, 3)], 1),  # a sibling for each size class, in turns
        ([(4, 7, 2), (4, 5, 2), (3, 8, 2), (4, 7, 2), (4, 1, 2)], 2),  # tokens, padded
        ([(5,), (5,), (4,), (3,), (5,)], 1),
        ([(0, 3), (4, 3), (0, 3), (2, 3), (0, 3)], 1),
        ([(4, 0, 2), (5, 0, 2), (4, 0, 2), (4, 0, 2), (0, 0, 2)], 1),
        ([(0, 3)] * 5, 1),
    ],
)
def test_padding_siblings_and_empty_captures(tmp_path: Path, shapes: list[tuple[int, ...]], dims: int, codec: str | None) -> None:
    calls = [(place, numbered(*shape, start=100 * number)) for number, (place, shape) in enumerate(zip(PLACES, shapes, strict=True))]
    with hookstore.open(record(tmp_path / "run", calls, codec=codec)) as run:
        samples = run[""].activation.samples(dims=dims)
        expected = np.concatenate([flattened(value.numpy(), dims) for _, value in calls])
        assert_bits(samples[:], expected)
        order = np.random.default_rng(0).permutation(len(expected))
        assert_bits(samples[order], expected[order])


@pytest.mark.parametrize("codec", [None, "lz4"])
def test_rows_that_are_padded_themselves(tmp_path: Path, codec: str | None) -> None:
    """The array is as wide as its first capture, which the last one at that place hides."""
    calls = [((0, 0), numbered(4, 8, 3)), ((0, 1), numbered(4, 7, 3, start=1000)), ((0, 0), numbered(3, 7, 3, start=2000))]
    with hookstore.open(record(tmp_path / "run", calls, codec=codec)) as run, pytest.warns(CaptureWarning, match="captured 2 times"):
        captures = run[""].activation
        assert len(set(captures.rows["array"].to_pylist())) == 1
        expected, _ = reference(captures, 1)
        assert expected.shape == (7, 7, 3)
        assert_bits(captures.samples()[[6, 0, 3]], expected[[6, 0, 3]])
        assert_bits(captures.samples(dims=2)[:], expected.reshape(-1, 3))


def test_the_last_backward_and_every_call_count(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with hookstore.record(model, tmp_path / "run", layers="", kinds=["gradient"], buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            for call in range(3):
                output = model(torch.ones(4, 3))
                output.backward(torch.full((4, 3), 10.0 * batch + call), retain_graph=True)
                output.backward(torch.full((4, 3), 10.0 * batch + call + 0.5))
    with hookstore.open(tmp_path / "run") as run:
        assert len(run.manifest) == 12
        samples = run[""].gradient.samples()
        assert samples.shape == (24, 3)
        assert samples[::4].tolist() == [[value] * 3 for value in (0.5, 1.5, 2.5, 10.5, 11.5, 12.5)]
        assert [samples.where(row) for row in (0, 5, -1)] == [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 2, 3)]


def test_phases_and_leaves(tmp_path: Path) -> None:
    model = Same()
    with hookstore.record(model, tmp_path / "run", layers="", phases=["train", "eval"], buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            for training in (True, False):
                model.train(training)
                recorder.at(epoch=0, batch=batch)
                model({"a": torch.full((2, 3), batch + 0.5 * training), "b": torch.full((2, 5), float(batch))})
    with hookstore.open(tmp_path / "run") as run:
        captures = run[""].activation
        with pytest.raises(MissingCaptureError, match=r"several leaves: 'a', 'b'; name one, as in .samples\(leaf='a'\)"):
            captures.samples()
        assert captures.samples(leaf="a")[:][:, 0].tolist() == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]
        assert captures.samples(leaf="a", phase="eval")[::2][:, 0].tolist() == [0, 1, 2]
        assert captures.samples(leaf="b", phase="eval").shape == (6, 5)
        with pytest.raises(MissingCaptureError, match=r"leaf 'c', was not captured in phase 'train'; there are leaves 'a', 'b'"):
            captures.samples(leaf="c")
        with pytest.raises(MissingCaptureError, match="was not captured in phase 'train'; this layer has activation"):
            run[""].gradient.samples()


def test_a_phase_without_captures(tmp_path: Path) -> None:
    with (
        hookstore.open(record(tmp_path / "run", [((0, 0), torch.ones(2, 3))])) as run,
        pytest.raises(MissingCaptureError, match="only phase 'train'"),
    ):
        run[""].activation.samples(phase="eval")


def test_gaps_are_no_rows(tmp_path: Path) -> None:
    calls = [((0, 0), torch.ones(2, 3)), ((0, 1), torch.ones(2, 3).to_mkldnn()), ((0, 2), torch.full((2, 3), 2.0))]
    with pytest.warns(CaptureWarning):
        record(tmp_path / "run", calls)
    with hookstore.open(tmp_path / "run") as run:
        assert run.info().statuses == {"ok": 2, "skipped": 1}
        assert run[""].activation.samples()[:][:, 0].tolist() == [1, 1, 2, 2]


def test_a_run_that_is_still_recorded(tmp_path: Path) -> None:
    model = Same()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(4), epoch=0):
            model(torch.full((2, 3), float(batch)))
        recorder.flush()
        with hookstore.open(tmp_path / "run") as run:
            live = run[""].activation.samples()
            assert live[[7, 0]].tolist() == [[3] * 3, [0] * 3]
            recorder.close()
            assert live[[6, 2]].tolist() == [[3] * 3, [1] * 3], "its shard was sealed meanwhile"


# What is asked for ----------------------------------------------------------------------------------------------------


@pytest.fixture
def samples(tmp_path: Path) -> Any:
    calls = [((0, batch), numbered(4, 3, start=12 * batch)) for batch in range(5)]
    with hookstore.open(record(tmp_path / "run", calls)) as run:
        yield run[""].activation.samples()


ALL = np.arange(60, dtype=np.float32).reshape(20, 3)


@pytest.mark.parametrize(
    "indices",
    [
        3,
        -1,
        np.int8(-20),
        np.uint64(19),
        slice(None),
        slice(17, 3, -4),
        slice(30, 40),
        [],
        [5],
        [5, 5, -5, 0],
        range(7),
        np.array([[1, 2, 3], [19, 0, 1]], dtype=np.uint8),
        np.empty((0, 4), dtype=np.int64),
        torch.tensor([4, 2]),
        np.array(7),
    ],
    ids=repr,
)
def test_indices(samples: hookstore.Captures, indices: Any) -> None:
    expected = ALL[np.asarray(indices, dtype=np.int64) if isinstance(indices, list | range | torch.Tensor) else indices]
    assert_bits(samples[indices], expected)


@pytest.mark.parametrize("indices", [20, -21, 2**70, -(2**70), [0, 20], [3, -21], np.array([2**63], dtype=np.uint64), [0, 2**70]], ids=repr)
def test_rows_that_are_not_there(samples: Any, indices: Any) -> None:
    with pytest.raises(IndexError, match="has no row -?[0-9]+; there are 20"):
        samples[indices]


@pytest.mark.parametrize("indices", [1.0, [1.5], True, [True] * 20, "1", None, (1, 2), (slice(None), 0), np.ones(20, dtype=bool)], ids=repr)
def test_indices_that_are_none(samples: Any, indices: Any) -> None:
    with pytest.raises(OptionError, match="expected an int, a slice or an array of whole numbers"):
        samples[indices]


def test_where_rows_come_from(samples: Any) -> None:
    assert samples.where(0) == (0, 0, 0, 0)
    assert samples.where(np.int32(-1)) == (0, 4, 0, 3)
    assert all(type(number) is int for number in samples.where(7))
    for index in (20, -21):
        with pytest.raises(IndexError, match="there are 20"):
            samples.where(index)
    with pytest.raises(TypeError):
        samples.where(1.0)


def test_rows_are_the_callers_own(samples: Any) -> None:
    for indices in (3, [3, 4], slice(2, 5)):
        rows = samples[indices]
        rows[:] = -1
        assert_bits(samples[indices], ALL[indices])


def test_it_is_a_sequence(samples: Any) -> None:
    assert_bits(np.stack(list(samples)), ALL)
    assert repr(samples) == "<hookstore.Samples: (20, 3) float32 of activation of layer ''>"


def test_in_threads_and_other_processes(samples: Any) -> None:
    again = pickle.loads(pickle.dumps(samples))
    assert_bits(again[[19, 0]], ALL[[19, 0]])
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: samples[::-1], range(40)):
            assert_bits(found, ALL[::-1])
    again._captures.run.close()


@pytest.mark.parametrize("dims", [0, -1, 1.0, True, None, "1"])
def test_dims_that_are_none(samples: Any, dims: Any) -> None:
    with pytest.raises(OptionError, match="dims: expected a whole number from 1 on"):
        samples._captures.samples(dims=dims)


@pytest.mark.parametrize(
    ("values", "dims", "message"),
    [
        ([torch.tensor(1.0)], 1, r"shape \(\), too few dimensions for dims=1; read them with .get\(\)"),
        ([torch.ones(2, 3)], 3, r"shape \(2, 3\), too few dimensions for dims=3"),
        (
            [torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 4)],
            1,
            r"1 of 3 have other rows behind dims=1: epoch 0, batch 2 has \(2, 4\) float32\. Name",
        ),
        ([torch.ones(2, 3), torch.ones(2, 3, 1)], 1, r"batch 1 has \(2, 3, 1\) float32"),
        ([torch.ones(2, 3), torch.ones(2, 3).half()], 1, r"batch 1 has \(2, 3\) float16"),
        (
            [torch.ones(2, 3), *[torch.ones(2, 4)] * 9],
            1,
            r"9 of 10 have .* batch 5 has \(2, 4\) float32; …\. Name a phase or a leaf, or let dims",
        ),
    ],
)
def test_captures_that_have_no_rows_of_one_kind(tmp_path: Path, values: list[torch.Tensor], dims: int, message: str) -> None:
    record(tmp_path / "run", [((0, batch), value) for batch, value in enumerate(values)])
    with hookstore.open(tmp_path / "run") as run, pytest.raises(OptionError, match=message):
        run[""].activation.samples(dims=dims)


def test_a_dtype_that_numpy_lacks(tmp_path: Path) -> None:
    bits = torch.ones(2, 3, 2, dtype=torch.float16)
    record(tmp_path / "run", [((0, 0), torch.view_as_complex(bits))])
    with hookstore.open(tmp_path / "run") as run, pytest.raises(OptionError, match="has dtype complex32, which NumPy does not have"):
        run[""].activation.samples()


def test_dims_that_take_in_what_varies(tmp_path: Path) -> None:
    record(tmp_path / "run", [((0, 0), numbered(2, 3, 4)), ((0, 1), numbered(2, 5, 4))])
    with hookstore.open(tmp_path / "run") as run:
        assert run[""].activation.samples(dims=2).shape == (16, 4)
        assert run[""].activation.samples(dims=3).shape == (64,)


# Damage ---------------------------------------------------------------------------------------------------------------


def only_shard(path: Path) -> Path:
    (shard,) = (path / "layers" / "%root" / "activation").glob("c.*")
    return shard


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_damaged_chunk_is_told_when_it_is_touched(tmp_path: Path, codec: str | None) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)], codec=codec)
    with hookstore.open(path) as run:
        row = run[""].activation.row(0, 2)
        expected, _ = reference(run[""].activation, 1)
    with only_shard(path).open("r+b") as file:
        file.seek(row["offset"] + 5)
        byte = file.read(1)[0]
        file.seek(row["offset"] + 5)
        file.write(bytes([byte ^ 1]))
    with hookstore.open(path) as run:
        samples = run[""].activation.samples()
        others = [19, 0, 12, 7]
        for _ in range(2):
            assert_bits(samples[others], expected[others])
            for touching in ([8], [0, 11], slice(None)):
                with pytest.raises(CorruptRunError, match="crc32c"):
                    samples[touching]


def test_each_checksum_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)])
    reads: list[int] = []
    read = ShardReader.read

    def noting(reader: ShardReader, array: str, shard: str, offset: int, *others: Any) -> memoryview:
        reads.append(offset)
        return read(reader, array, shard, offset, *others)

    monkeypatch.setattr(ShardReader, "read", noting)
    with hookstore.open(path) as run:
        offsets = run[""].activation.rows["offset"].to_pylist()
        samples = run[""].activation.samples()
        assert reads == [], "nothing is touched before it is asked for"
        samples[[0, 3, 17, 1]]
        assert reads == [offsets[0], offsets[4]]
        samples[:]
        samples[:]
        assert reads == [offsets[0], offsets[4], *offsets[1:4]]


def test_a_shard_that_was_cut_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)])
    with hookstore.open(path) as run:
        samples = run[""].activation.samples()
        samples[:]
        run.close()  # so that it is mapped anew
        os.truncate(only_shard(path), 100)
        with pytest.raises(CorruptRunError, match="ends before byte"):
            samples[19]


@pytest.mark.parametrize("max_maps", [0, 1, 2])
def test_maps_stay_few(tmp_path: Path, max_maps: int) -> None:
    """Where arrays that are kept hold all maps, rows are read instead."""
    model = Same()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20) as recorder:
        for epoch in range(5):
            for batch in recorder.batches(range(40), epoch=epoch):
                model(torch.full((2 + 8 * (batch % 5), 3), float(epoch)))
    with hookstore.open(tmp_path / "run") as run:
        run._reader._max_maps = max_maps
        captures = run[""].activation
        assert len(set(zip(*(captures.rows[name].to_pylist() for name in ("array", "shard")), strict=True))) > 2
        kept = [captures[epoch, batch] for epoch in range(5) for batch in range(5)]
        expected, _ = reference(captures, 1)
        samples = captures.samples()
        order = np.random.default_rng(0).permutation(len(expected))
        assert_bits(samples[order], expected[order])
        assert len(run._reader._alive) <= max_maps
        assert all(len(array) for array in kept)


def rewrite_manifest(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    table = read_manifest(os.fspath(path))
    rows = table.to_pylist()
    change(rows)
    for part in (path / "manifest").iterdir():
        part.unlink()
    contents = encode_part(pa.Table.from_pylist(rows, schema=table.schema).to_batches())
    (path / "manifest" / f"r0-a0-000000-{crc32c(contents):08x}.parquet").write_bytes(contents)


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {"array": "../../secret"},
        {"array": ""},
        {"shard": "../activation/c.0.0.0.0"},
        {"shard": "c"},
        {"offset": -64},
        {"offset": 2**62},
        {"offset": 2**63 - 1},
        {"offset": 4},
        {"length": 0},
        {"length": 2**62},
        {"length": 8},
        {"crc32c": 1},
        {"shape": [-4, 3]},
        {"shape": [2**40, 3]},
        {"shape": [2**46, 3]},
        {"shape": [2**62, 3]},
        {"shape": [5, 3]},
    ],
    ids=repr,
)
def test_hostile_manifest_rows_are_refused(tmp_path: Path, changes: dict[str, Any], place: int) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)])
    rewrite_manifest(path, lambda rows: rows[place].update(changes))
    with hookstore.open(path) as run, pytest.raises(CorruptRunError):
        run[""].activation.samples()[[0, 14]]


@pytest.mark.parametrize("shape", [[2**40, 2**40], [2**46, 0], [0, 2**46], [4], [2, 6], [2, 2, 3]], ids=repr)
def test_hostile_shapes_of_all_rows(tmp_path: Path, shape: list[int]) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)])
    rewrite_manifest(path, lambda rows: [row.update(shape=shape) for row in rows] and None)
    with hookstore.open(path) as run:
        samples = run[""].activation.samples()
        if 0 in shape:
            assert samples[:3].size == 0
        else:
            with pytest.raises(CorruptRunError):
                samples[0]


def test_more_rows_than_can_be_counted(tmp_path: Path) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3, 2)) for batch in range(5)])
    rewrite_manifest(path, lambda rows: [row.update(shape=[2**46, 2**46, 2]) for row in rows] and None)
    with hookstore.open(path) as run, pytest.raises(CorruptRunError, match="shapes that cannot be"):
        run[""].activation.samples(dims=2)
    rewrite_manifest(path, lambda rows: [row.update(shape=[0, 2**46, 2**46]) for row in rows] and None)
    with hookstore.open(path) as run, pytest.raises(CorruptRunError, match="shapes that cannot be"):
        run[""].activation.samples()


def test_hostile_array_metadata(tmp_path: Path) -> None:
    path = record(tmp_path / "run", [((0, batch), torch.randn(4, 3)) for batch in range(5)])
    metadata_path = path / "layers" / "%root" / "activation" / "zarr.json"
    metadata = json.loads(metadata_path.read_text())
    for chunk_shape in ([1, 1, 4, 2], [1, 1, 2, 6], [1, 1, 12], [1, 1, 2**40, 2**40], [1, 1, 4, 2**62]):
        metadata["codecs"][0]["configuration"]["chunk_shape"] = chunk_shape
        metadata_path.write_text(json.dumps(metadata))
        with hookstore.open(path) as run, pytest.raises(CorruptRunError):
            run[""].activation.samples()[0]
