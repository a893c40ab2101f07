"""Parts of tensors: what is read of them, what the manifest says, and how they lie on disk for other readers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from small import recording
from torch import nn

import hookstore
from hookstore import Capture, MissingCaptureError, OptionError
from hookstore.arrays import ArrayStore
from hookstore.dimensions import dimensions_of
from hookstore.format import ArraySpec
from hookstore.metadata import read_array


class Given(nn.Module):
    """Returns what it is called with, as another tensor."""

    def forward(self, inputs):
        return inputs + 0


def record_all(path, tensors, captures, **options):
    model = nn.Sequential(Given(), Given())
    with recording(model, path, captures=captures, **options):
        for tensor in tensors:
            model(tensor)
    return hookstore.open(path)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


# Reading --------------------------------------------------------------------------------------------------------------


@st.composite
def choices(draw):
    """A shape, what is kept of it, and that as NumPy has it."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=3, unique=True))
    select, kept = {}, {}
    for axis in axes:
        size = shape[axis]
        one = draw(
            st.one_of(
                st.integers(1, 6),
                st.builds(slice, st.none() | st.integers(-size, size), st.none() | st.integers(-size, size), st.none() | st.integers(1, 3)),
                st.lists(st.integers(-size, size - 1), min_size=1, max_size=4),
            )
        )
        select[draw(st.sampled_from([axis, axis - len(shape)])) if axis else draw(st.sampled_from([0, "sample"]))] = one
        kept[axis] = slice(one) if isinstance(one, int) else one
    return tuple(shape), select, kept


@given(choices())
@settings(max_examples=12, deadline=None)
def test_a_part_is_what_numpy_indexes(chosen):
    shape, select, kept = chosen
    whole = expected = np.random.default_rng(0).random(shape, dtype=np.float32)
    for axis, one in kept.items():
        expected = expected[(slice(None),) * axis + (one,)]
    with tempfile.TemporaryDirectory() as directory:
        run = record_all(f"{directory}/run", [torch.from_numpy(whole)], [Capture(layers="1", select=select)])
        with run:
            captures = run["1"].activation
            assert np.array_equal(captures[0, 0], expected)
            assert captures.row(0, 0)["portion"] == captures.portions[0] == run.info().groups[0]["portions"][0]
            assert np.array_equal(captures.portion(select)[0, 0], expected)
            assert hookstore.verify(run.path).is_sound
            if expected.size:
                found = zarr.open(f"{run.path}/layers")[captures.row(0, 0)["array"]]
                assert np.array_equal(found[0, 0], expected)
                for axis, name in enumerate(found.metadata.dimension_names[2:]):
                    if Path(run.path, "layers/1", name).exists():
                        positions = zarr.open(f"{run.path}/layers/1/{name}")[:]
                        assert np.array_equal(np.take(whole, positions, axis).shape[axis], expected.shape[axis])
                        assert np.array_equal(np.arange(shape[axis])[positions], np.arange(shape[axis])[kept[axis]])


def test_the_whole_tensor_stands_for_all_and_else_the_only_part(tmp_path):
    data = numbers(4, 3)
    first, last = Capture(layers="0", select={"sample": 2}), Capture(layers="*", select={1: [-1]})
    with record_all(tmp_path / "run", [data, data + 100], [first, last, Capture(layers="1", every=2)]) as run:
        layer = run["1"].activation
        assert layer.portions == ["", "1[[-1]]"]
        assert layer[0, 0].shape == (4, 3)
        assert layer.portion("1[[-1]]")[0, 1].tolist() == [[102], [105], [108], [111]]
        assert layer.portion(None)[0, 0].shape == (4, 3)
        with pytest.raises(MissingCaptureError, match=r"batch 1 was not captured; epoch 0 has batches 0"):
            layer[0, 1]  # never a part where the whole is expected
        assert [len(layer), len(layer.portion({1: [-1]})), layer.rows.num_rows] == [1, 2, 1]
        assert layer.samples().shape == (4, 3)
        assert layer.portion({1: [-1]}).samples().shape == (8, 1)
        assert layer.portion({1: [-1]}).raw.leaf("").row(0, 1)["portion"] == "1[[-1]]"
        parts = run["0"].activation
        assert parts.portions == ["1[[-1]]", "sample[:2]"]
        with pytest.raises(MissingCaptureError, match=r"is stored in 2 parts, '1\[\[-1\]\]' and 'sample\[:2\]', and whole nowhere"):
            parts[0, 0]
        assert len(parts) == parts.rows.num_rows == 4
        assert parts.portion({"sample": 2})[0, 1].tolist() == (data[:2] + 100).tolist()
        with pytest.raises(MissingCaptureError, match=r"there is '1\[\[-1\]\]' and 'sample\[:2\]'"):
            parts.portion({"sample": 3})[0, 0]
        with pytest.raises(MissingCaptureError, match="not captured"):
            parts.portion(None)[0, 0]
        with pytest.raises(OptionError, match="select: expected"):
            parts.portion({"sample": 0})
        assert "sample[:2]" in repr(parts.portion("sample[:2]"))
        assert next(group for group in run.info().groups if group["layer"] == "0")["portions"] == ["1[[-1]]", "sample[:2]"]


def test_a_run_without_parts_has_one_portion_and_none_other(tmp_path):
    with record_all(tmp_path / "run", [numbers(4, 3)], [Capture(layers="0")]) as run:
        assert "portion" not in run.manifest.schema.names
        assert run["0"].activation.portions == [""]
        assert run["0"].activation.portion("")[0, 0].shape == (4, 3)
        with pytest.raises(MissingCaptureError, match="there is the whole tensor"):
            run["0"].activation.portion("sample[:2]")[0, 0]
        assert len(run["0"].activation.portion("sample[:2]")) == run["0"].activation.portion("sample[:2]").rows.num_rows == 0


def test_a_gap_of_a_layer_concerns_every_part(tmp_path):
    class Lazy(nn.Module):
        """Calls its layer in all batches but one."""

        def __init__(self):
            super().__init__()
            self.layer = Given()

        def forward(self, inputs, is_on):
            return self.layer(inputs) if is_on else inputs

    model = Lazy()
    captures = [Capture(layers="layer", select={"sample": 2}), Capture(layers="layer", select={1: 1})]
    with recording(model, tmp_path / "run", captures=captures) as recorder, pytest.warns(hookstore.CaptureWarning, match="0 calls"):
        for batch, is_on in enumerate([True, False, True]):
            with recorder.at(epoch=0, batch=batch):
                model(numbers(4, 3), is_on)
    with hookstore.open(tmp_path / "run") as run:
        for select in ({"sample": 2}, {1: 1}):
            with pytest.raises(MissingCaptureError, match="batch 1 was skipped: the layer was not called"):
                run["layer"].activation.portion(select)[0, 1]


def test_a_part_that_cannot_be_taken_is_a_gap_of_that_part_alone(tmp_path):
    with pytest.warns(hookstore.CaptureWarning, match="select wants position 3"):
        run = record_all(
            tmp_path / "run", [numbers(4, 3), numbers(2, 3)], [Capture(layers="1", select={0: [3]}), Capture(layers="1", select={1: [0]})]
        )
    with run:
        assert run["1"].activation.portion({1: [0]})[0, 1].shape == (2, 1)
        with pytest.raises(MissingCaptureError, match="select wants position 3 of axis 'sample', which has 2"):
            run["1"].activation.portion({0: [3]})[0, 1]


def test_a_row_that_claims_another_part_is_not_read(tmp_path):
    with record_all(tmp_path / "run", [numbers(4, 3)], [Capture(layers="1", select={1: 1}), Capture(layers="1", select={1: [0]})]) as run:
        row = run["1"].activation.portion({1: 1}).row(0, 0)
        assert run.read(row).shape == (4, 1)
        for claim in ("", "1[[0]]"):
            with pytest.raises(hookstore.CorruptRunError, match=r"its array 1/activation.@1=~1 has .*, 1\[:1\]"):
                run.read({**row, "portion": claim})


# On disk --------------------------------------------------------------------------------------------------------------


def test_other_readers_see_which_positions_were_kept(tmp_path):
    select = {"sample": 2, "token": [0, -1], "feature": slice(1, None, 2)}
    captures = [Capture(layers="1", kinds=["activation", "input"], select=select, dims=("sample", "token", "feature"))]
    record_all(tmp_path / "run", [numbers(4, 3, 5)], captures).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xarray.open_datatree(tmp_path / "run" / "layers", engine="zarr", consolidated=False)
        assert len(list(zarr.open(tmp_path / "run" / "layers")["1"].arrays())) == 5
    found = tree["1"]["activation.@sample=~2@token=0,-1@feature=1~~2"]
    assert found.dims == ("epoch", "batch", "sample@~2", "token@0,-1", "feature@1~~2")
    assert found.coords["sample@~2"].to_numpy().tolist() == [0, 1]
    assert found.sel({"token@0,-1": -1, "feature@1~~2": 3})[0, 0].to_numpy().tolist() == numbers(4, 3, 5)[:2, -1, 3].tolist()
    assert dict(found.attrs)["dims"] == ["sample", "token", "feature"]
    tree.close()


def test_where_nobody_knows_the_positions_there_are_none(tmp_path):
    captures = [Capture(layers="1", select={"sample": slice(-2, None)}), Capture(layers="0", select=lambda tensor: tensor[:3])]
    record_all(tmp_path / "run", [numbers(4, 3)], captures).close()
    arrays = [name for layer in "01" for name, _ in zarr.open(tmp_path / "run" / "layers")[layer].arrays()]
    assert all(name.startswith("activation.@") for name in arrays), arrays
    names = [zarr.open(tmp_path / "run/layers" / str(path)).metadata.dimension_names for path in ("1/activation.@sample=-2~",)]
    assert names == [("epoch", "batch", "sample@-2~", "activation_1.@sample=-2~")]


def spec(kind, chunk, *, dims=(), portion="", name=""):
    return ArraySpec("fc", kind, "train", "", "float32", name or kind, chunk, (1, 8), portion=portion, dims=dims)


def publish(layers, *specs, stored=()):
    store = ArrayStore(str(layers), stored=stored)
    for one in specs:
        store.publish(one, (0, 0, 0), None)
    store.finish(None)
    return {one.name: json.loads((layers / one.path / "zarr.json").read_bytes())["dimension_names"][2:] for one in specs}


@pytest.fixture(name="layers")
def _layers(tmp_path):
    layers = tmp_path / "run" / "layers"
    layers.mkdir(parents=True)
    return layers


def test_no_name_means_two_things(layers):
    dims = ("sample", "token", "activation")
    names = publish(
        layers,
        spec("activation", (4, 7, 3), dims=dims),
        spec("input", (4, 9, 3), dims=dims),
        spec("gradient", (2, 7, 3), dims=dims, portion="sample[:2]", name="gradient.@sample=~2"),
        spec("input_gradient", (1, 7, 3), dims=dims, portion="sample[:2]", name="input_gradient.@sample=~2"),
        spec("activation", (4, 5), dims=("sample", "activation_1"), name="activation.hidden"),
        spec("activation", (4, 6), name="activation"),
    )
    assert names["input"] == ["sample", "input_token", "input_activation"]
    assert names["gradient.@sample=~2"] == ["sample@~2", "token", "gradient_activation.@sample=~2"]
    assert names["input_gradient.@sample=~2"][0] == "input_gradient_sample@~2.@sample=~2"
    assert names["activation.hidden"] == ["sample", "activation_1"]
    assert names["activation"][1] == "token", "an array is named once"


def test_a_users_name_gives_way_to_none_and_none_to_it(layers):
    names = publish(layers, spec("activation", (4, 5), dims=("sample", "input_1")), spec("input", (4, 6)))
    assert names == {"activation": ["sample", "input_1"], "input": ["sample", "input_1_"]}


def test_names_and_coordinates_stay_when_a_run_is_taken_up(layers):
    first = spec("activation", (2, 3), portion="sample[:2]", name="activation.@sample=~2")
    publish(layers, first)
    coordinate = layers / "fc" / "sample@~2"
    before = {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in coordinate.iterdir()}
    stored = [read_array(str(layers.parent), first.path)]
    smaller = spec("input", (1, 3), portion="sample[:2]", name="input.@sample=~2")
    names = publish(layers, first, smaller, spec("gradient", (2, 4), portion="sample[:2]", name="gradient.@sample=~2"), stored=stored)
    assert names[first.name][0] == names["gradient.@sample=~2"][0] == "sample@~2"
    assert names[smaller.name][0] == "input_sample@~2.@sample=~2"
    assert before == {file.name: (file.stat().st_mtime_ns, file.stat().st_ino) for file in coordinate.iterdir()}


def test_a_coordinate_that_the_power_took_is_written_again(layers):
    first = spec("activation", (2, 3), portion="sample[:2]", name="activation.@sample=~2")
    publish(layers, first)
    shutil.rmtree(layers / "fc" / "sample@~2")
    publish(layers, stored=[read_array(str(layers.parent), first.path)])
    assert zarr.open(layers / "fc" / "sample@~2")[:].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["../../there@~2", "..@~2", "activation"])
def test_no_name_of_a_dimension_leads_to_another_place(layers, name):
    """A run is untrusted, its names too."""
    first = spec("activation", (2, 3), portion="sample[:2]", name="activation.@sample=~2")
    publish(layers, first)
    path = layers / first.path / "zarr.json"
    path.write_text(path.read_text().replace('"sample@~2"', json.dumps(name)))
    before = sorted(layers.parent.parent.rglob("*"))
    publish(layers, stored=[read_array(str(layers.parent), first.path)])
    assert sorted(layers.parent.parent.rglob("*")) == before


def test_positions_that_no_array_can_hold_have_no_coordinate(layers):
    portion = f"sample[[{2**70},0]], 1[{2**63}:]"
    names = publish(layers, spec("activation", (2, 3), portion=portion, name="activation.@x"))
    assert [(layers / "fc" / name).exists() for name in names["activation.@x"]] == [False, False]


def test_what_is_in_the_way_of_a_coordinate_is_left_alone(layers):
    (layers / "fc" / "sample@~2").mkdir(parents=True)
    (layers / "fc" / "sample@~2" / "mine").write_text("mine")
    names = publish(layers, spec("activation", (2, 3), portion="sample[:2]", name="activation.@sample=~2"))
    assert names["activation.@sample=~2"][0] == "activation_sample@~2.@sample=~2"
    assert (layers / "fc" / "sample@~2" / "mine").read_text() == "mine"


def test_positions_that_no_tensor_has_take_no_memory():
    tracemalloc.start()
    try:
        (far,) = dimensions_of(spec("activation", (1 << 15,), portion=f"sample[{'9' * 3000}:]"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert far.positions is None
    assert peak < 8 << 20
    (near,) = dimensions_of(spec("activation", (2,), portion=f"sample[{2**63 - 4}::3]"))
    assert np.frombuffer(near.positions, dtype="<i8").tolist() == [2**63 - 4, 2**63 - 1]


def test_verify_tells_of_a_coordinate_that_is_wrong_or_gone(tmp_path):
    run = record_all(tmp_path / "run", [numbers(4, 3)], [Capture(layers="1", select={"sample": 2})])
    run.close()
    assert hookstore.verify(run.path).is_sound
    chunk = tmp_path / "run" / "layers" / "1" / "sample@~2" / "c.0"
    chunk.write_bytes(np.array([0, 2], dtype="<i8").tobytes())
    assert ["does not say where the part lies" in str(fault) for fault in hookstore.verify(run.path).faults] == [True]
    shutil.rmtree(chunk.parent)
    assert hookstore.verify(run.path).num_faults == 2


# After a kill ---------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch, hookstore
from torch import nn
model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
with torch.no_grad():
    model[0].weight.fill_(1), model[0].bias.zero_()
captures = [hookstore.Capture(layers="0", select={"sample": 2}, stats=True), hookstore.Capture(layers="1", stats="only")]
recorder = hookstore.record(model, sys.argv[1], captures=captures, buffer_bytes=1 << 20)
for batch in range(6):
    with recorder.at(epoch=0, batch=batch):
        recorder.annotate(sample_id=[10 * batch + one for one in range(4)], name=[f"b{batch}s{one}" for one in range(4)])
        recorder.loss(float(batch))
        model(torch.arange(12.0).reshape(4, 3) + batch)
    if batch == 4:
        recorder.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def check(run, num_batches):
    part, whole = run["0"].activation, run["1"].activation
    for batch in range(num_batches):
        expected = (numbers(4, 3) + batch).sum(1)[:, None].expand(4, 2).numpy()
        assert np.array_equal(part[0, batch], expected[:2])
        assert (part.stats(0, batch).max, whole.stats(0, batch).max) == (expected[:2].max(), expected.max())
        assert run.annotations["name"][0, batch].tolist() == [f"b{batch}s{one}" for one in range(4)]
        assert run.loss[0, batch] == batch
        assert run.sample(10 * batch + 1)["0"].activation[0, batch].tolist() == expected[1].tolist()


def columns(run):
    """The manifest in an order that does not depend on how it was put together."""
    return run.manifest.sort_by([(name, "ascending") for name in ("kind", "layer", "leaf", "batch", "status")])


def test_what_was_acknowledged_survives_a_kill_and_the_loss_of_the_manifest(tmp_path):
    path = tmp_path / "run"
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == -signal.SIGKILL
    with hookstore.open(path) as run:
        check(run, 5)
    assert hookstore.verify(path).is_sound
    unused = path / "layers" / "0" / "sample@~7"  # as if it had died between a coordinate and the array
    shutil.copytree(path / "layers" / "0" / "sample@~2", unused)
    report = hookstore.recover(path)
    assert (report.problems, unused.exists()) == ([], False)
    with hookstore.open(path) as run:
        check(run, 5)
        before = columns(run)
    assert hookstore.verify(path).is_sound
    (part,) = (path / "manifest").iterdir()
    part.unlink()
    assert hookstore.recover(path).num_from_shards > 0
    with hookstore.open(path) as run:
        after = columns(run)
        in_shards = before.filter(pa.array([row != "" for row in before["shard"].to_pylist()]))
        assert after.select(before.schema.names).equals(in_shards), "portions and statistics are in the shards; rows without bytes are not"


@pytest.mark.parametrize("is_wider_first", [True, False])
def test_attempts_may_have_other_columns(tmp_path, is_wider_first):
    path, data = tmp_path / "run", numbers(4, 3)
    wider, plain = [Capture(layers="1", select={"sample": 2}, stats=True)], [Capture(layers="1")]
    attempts = [wider, plain] if is_wider_first else [plain, wider]
    for captures in attempts:
        record_all(path, [data], captures, mode="a").close()
    with hookstore.open(path) as run:
        captures = run["1"].activation
        assert captures.portions == ["", "sample[:2]"]
        assert captures[0, 0].shape == (4, 3)
        assert captures.portion("sample[:2]")[0, 0].shape == (2, 3)
        assert captures.stats(0, 0).max == 11
        assert captures.portion("sample[:2]").row(0, 0)["attempt"] == (0 if is_wider_first else 1)
    assert hookstore.verify(path).is_sound
    assert hookstore.recover(path).problems == []


def test_a_run_is_not_gone_on_with_under_other_names_of_axes(tmp_path):
    path, data, model = tmp_path / "run", numbers(3, 3), nn.Sequential(Given(), Given())
    record_all(path, [data], [Capture(layers="0"), Capture(layers="1", dims=("sample", "token"))]).close()
    before = (path / "run.json").read_text()
    for layer, dims in (("0", ("token", "sample")), ("1", ("sample", "feature"))):
        with pytest.raises(
            OptionError, match=f"activation of layer '{layer}' with .*, and would go on with dims={list(dims)!r}".replace("[", r"\[")
        ):
            hookstore.record(model, path, captures=[Capture(layers=layer, dims=dims)], mode="a")
    assert (path / "run.json").read_text() == before
    with recording(model, path, captures=[Capture(layers="0", dims=("sample", "token")), Capture(layers="1")], mode="a") as recorder:
        for _ in recorder.batches([0], epoch=1):  # these mean the same
            recorder.annotate(sample_id=[0, 1, 2])
            model(data)
    with hookstore.open(path) as run:
        assert all(run.sample(1)[layer].activation[1, 0].tolist() == [3, 4, 5] for layer in "01")
