"""Reading a run: what is given back, what is refused and how."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import hookstore
from hookstore import manifest
from hookstore.manifest import SCHEMA, encode_part, read_manifest
from hookstore.shards import crc32c


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two epochs of three batches, the last one smaller, in two phases, and what the model returned."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("recorded") / "run"
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    batches = [torch.randn(size, 3) for size in (5, 5, 3)]
    outputs = {}
    with hookstore.record(
        model, path, layers=["0", "2"], kinds=["activation", "gradient", "parameter"], phases=["train", "eval"], buffer_bytes=1 << 20
    ) as recorder:
        for epoch in range(2):
            model.train()
            for batch, images in enumerate(recorder.batches(batches, epoch=epoch)):
                output = model(images)
                output.sum().backward()
                outputs["train", epoch, batch] = output.detach()
            model.eval()
            for batch, images in enumerate(recorder.batches(batches, epoch=epoch)):
                outputs["eval", epoch, batch] = model(images).detach()
    return path, outputs


@pytest.fixture
def run(recorded):
    with hookstore.open(recorded[0]) as opened:
        yield opened


@pytest.fixture
def copied(recorded, tmp_path):
    shutil.copytree(recorded[0], tmp_path / "copied")
    return tmp_path / "copied"


def test_what_there_is(run):
    assert run.layers == ["0", "2"]
    assert run.kinds == ["activation", "gradient", "parameter"]
    assert run.epochs == [0, 1]
    assert run.batches(1) == [0, 1, 2]
    assert run.batches(1, phase="eval") == [0, 1, 2]
    assert run["0"].kinds == ["activation", "gradient", "parameter"]
    assert ("0" in run, "1" in run, list(run), len(run)) == (True, False, ["0", "2"], 2)
    assert "2 layers" in repr(run)
    assert "'0'" in repr(run["0"])
    assert repr(run["0"].activation) == "<hookstore.Captures: 12 of activation of layer '0'>"


def test_exact_values_shapes_and_dtypes(recorded, run):
    for (phase, epoch, batch), output in recorded[1].items():
        found = run["2"].activation.get(epoch, batch, phase=phase)
        assert (found.shape, found.dtype) == (tuple(output.shape), np.float32)
        assert np.array_equal(found, output.numpy())
        tensor = run["2"].activation.tensor(epoch, batch, phase=phase)
        assert torch.equal(tensor, output)
    assert run["2"].activation[1, 2].shape == (3, 2), "the smaller last batch has its own shape"
    assert np.array_equal(run["2"].activation[0, 1], recorded[1]["train", 0, 1].numpy()), "train is what is meant by default"
    assert run["2"]["gradient"][1, 2].tolist() == [[1.0, 1.0]] * 3


def test_arrays_are_read_only_and_tensors_are_the_callers_own(run):
    array = run["2"].activation[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    tensor = run["2"].activation.tensor(0, 0)
    tensor.zero_()
    assert np.array_equal(run["2"].activation[0, 0], array)
    assert array.any()


def test_arrays_outlive_the_run(recorded):
    with hookstore.open(recorded[0]) as opened:
        array = opened["2"].activation[0, 0]
    assert np.array_equal(array, recorded[1]["train", 0, 0].numpy())


def test_manifest_is_a_table_with_one_row_per_tensor(run):
    table = run.manifest
    assert isinstance(table, pa.Table)
    assert table.schema == SCHEMA
    # 2 layers × 2 epochs × 3 batches × (2 phases × (activation + weight + bias) + gradient in train)
    assert table.num_rows == 2 * 2 * 3 * (2 * 3 + 1)
    assert set(table["status"].to_pylist()) == {"ok"}
    assert pc.sum(table["nbytes"]).as_py() == run.info().nbytes


def test_rows_are_those_of_the_manifest(recorded, run):
    assert run.manifest.equals(read_manifest(os.fspath(recorded[0])))
    assert run.manifest is run.manifest
    expected = [row for row in run.manifest.to_pylist() if (row["layer"], row["kind"]) == ("2", "parameter")]
    captures = run["2"].parameter
    assert captures.rows.schema == SCHEMA
    assert captures.rows.to_pylist() == expected
    assert captures.row(1, 2, leaf="bias", phase="eval") == next(
        row for row in expected if (row["phase"], row["epoch"], row["batch"], row["leaf"]) == ("eval", 1, 2, "bias")
    )
    for row in expected:
        assert np.array_equal(run.read(row), captures.get(row["epoch"], row["batch"], phase=row["phase"], leaf=row["leaf"]))


def test_rows_of_parts_and_journal_together(tmp_path, monkeypatch):
    """Each piece of the manifest counts into texts of its own."""
    monkeypatch.setattr(manifest, "SEGMENT_ROWS", 7)
    model = nn.Sequential(nn.Identity(), nn.Flatten(0))
    with hookstore.record(model, tmp_path / "run", layers=["", "0", "1"], buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(20), epoch=0):
            model(torch.full((2, batch % 3 + 1), float(batch)))
            recorder.flush()
            with hookstore.open(tmp_path / "run") as run:
                for layer in run.layers:
                    assert run[layer].activation[0, batch].reshape(-1).tolist() == [batch] * (2 * (batch % 3 + 1))
                assert run.kinds == ["activation"]
                assert len(run.manifest) == 3 * (batch + 1)
                assert run.info().num_captures == 3 * (batch + 1)
        assert os.listdir(tmp_path / "run" / "journal")
        assert len(os.listdir(tmp_path / "run" / "manifest")) > 3


def test_info(run):
    info = run.info()
    assert (info.state, info.num_captures, info.statuses) == ("finished", 84, {"ok": 84})
    group = next(group for group in info.groups if (group["layer"], group["kind"]) == ("2", "activation"))
    assert group == {
        "layer": "2",
        "kind": "activation",
        "captures": 12,
        "summarized": 0,
        "gaps": 0,
        "shapes": [(3, 2), (5, 2)],
        "dtypes": ["float32"],
        "nbytes": 4 * 2 * 4 * (5 + 5 + 3),
        "epochs": [0, 1],
        "phases": ["eval", "train"],
        "portions": [""],
    }


@pytest.mark.parametrize(
    ("question", "error", "message"),
    [
        (lambda run: run["1"], hookstore.UnknownLayerError, "has no layer '1'; it has '0', '2'"),
        (lambda run: run[0], hookstore.UnknownLayerError, "has no layer 0"),
        (
            lambda run: run["0"].activation[0, 9],
            hookstore.MissingCaptureError,
            "layer '0' in epoch 0, batch 9 was not captured; epoch 0 has batches 0 – 2",
        ),
        (lambda run: run["0"].activation[7, 0], hookstore.MissingCaptureError, "there are epochs 0, 1"),
        (lambda run: run["0"].activation[0, 0, 1], hookstore.MissingCaptureError, "batch 0, call 1 was not captured"),
        (lambda run: run["0"].activation[0, -1], hookstore.MissingCaptureError, "batch -1 was not captured"),
        (lambda run: run["0"].activation[2**70, 0], hookstore.MissingCaptureError, "there are epochs 0, 1"),
        (lambda run: run["0"].input[0, 0], hookstore.MissingCaptureError, "this layer has activation, gradient, parameter"),
        (lambda run: run["0"].gradient.get(0, 0, phase="eval"), hookstore.MissingCaptureError, "there is only phase 'train'"),
        (lambda run: run["0"].parameter.get(0, 0), hookstore.MissingCaptureError, "several leaves: 'bias', 'weight'; name one"),
        (lambda run: run["0"].parameter.get(0, 0, leaf="scale"), hookstore.MissingCaptureError, "leaf 'scale' was not captured"),
        (lambda run: run["0"].gradient.get(0, 0, backward=3), hookstore.MissingCaptureError, "backward 3 was not captured"),
        (lambda run: run["0"]["weights"], hookstore.MissingCaptureError, "no kind 'weights'"),
        (lambda run: run.batches(5), hookstore.MissingCaptureError, "nothing was captured in epoch 5; there are epochs 0, 1"),
        (lambda run: run["0"].activation[0], hookstore.OptionError, "expected \\[epoch, batch\\]"),
    ],
)
def test_what_does_not_exist_says_what_does(run, question, error, message):
    with pytest.raises(error, match=message) as caught:
        question(run)
    assert isinstance(caught.value, ValueError if error is hookstore.OptionError else KeyError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value)), "errors cross process borders"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.mkdir(), "it holds nothing"),
        (lambda path: path.touch(), "it is a file"),
        (lambda path: (path / "inner").mkdir(parents=True), "it holds inner"),
        (lambda path: ((path / "a").mkdir(parents=True), (path / "a" / "run.json").touch()), "holds runs: a"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text('{"format": "other"}')), "written by something else"),
    ],
)
def test_what_is_no_run(tmp_path, make, message):
    make(tmp_path / "it")
    with pytest.raises(hookstore.NotARunError, match=message) as caught:
        hookstore.open(tmp_path / "it")
    assert isinstance(caught.value, FileNotFoundError)


def change_description(path, **changes):
    description = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**description, **changes}))


def test_run_of_a_newer_format(copied):
    change_description(copied, format_version=2)
    with pytest.raises(hookstore.FormatVersionError, match="format version 2, this hookstore reads up to 1; update hookstore") as caught:
        hookstore.open(copied)
    assert (caught.value.found, caught.value.supported) == (2, 1)


@pytest.mark.parametrize("changes", [{"format_version": "1"}, {"format_version": 0}, {"layers": 3}, {"layers": [{"name": 3}]}])
def test_nonsense_in_run_json(copied, changes):
    change_description(copied, **changes)
    with pytest.raises(hookstore.CorruptRunError):
        hookstore.open(copied)


def test_run_json_that_is_no_json(copied):
    (copied / "run.json").write_text("{")
    with pytest.raises(hookstore.CorruptRunError, match="is no valid JSON"):
        hookstore.open(copied)


def shard_of(path, row):
    return path / "layers" / row["array"] / row["shard"]


def test_damaged_bytes_are_never_given_back(copied):
    with hookstore.open(copied) as run:
        row = run["2"].activation.row(0, 1)
    shard = shard_of(copied, row)
    contents = bytearray(shard.read_bytes())
    contents[row["offset"] + 5] ^= 1
    shard.write_bytes(contents)
    with hookstore.open(copied) as run:
        with pytest.raises(hookstore.CorruptRunError, match="the manifest says") as caught:
            run["2"].activation[0, 1]
        assert isinstance(caught.value, OSError)
        assert run["2"].activation[0, 0].shape == (5, 2), "other captures of the shard are right"


@pytest.mark.parametrize("damage", ["missing", "truncated", "array"])
def test_missing_pieces(copied, damage):
    with hookstore.open(copied) as run:
        row = run["2"].activation.row(1, 1)
    shard = shard_of(copied, row)
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        os.truncate(shard, row["offset"] + 8)
    else:
        (shard.parent / "zarr.json").unlink()
    with hookstore.open(copied) as run, pytest.raises(hookstore.CorruptRunError, match="missing"):
        run["2"].activation[1, 1]


def rewrite_manifest(path, **changes):
    """Change columns of every row, as a hostile run might have them."""
    table = read_manifest(os.fspath(path))
    for name, value in changes.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(name), pa.array([value] * table.num_rows, type=table.schema.field(name).type))
    replace_part(path, encode_part(table.to_batches()))


def replace_part(path, contents):
    for part in (path / "manifest").iterdir():
        part.unlink()
    (path / "manifest" / f"r0-a0-000000-{crc32c(contents):08x}.parquet").write_bytes(contents)


def write_part(table, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def test_parts_that_make_no_sense(copied):
    """Their checksums are right: whoever wrote them can write anything else, too."""
    table = read_manifest(os.fspath(copied))

    def with_column(name, values):
        index = table.schema.get_field_index(name)
        return table.set_column(index, name, values)

    plain = write_part(table, compression="none", write_page_checksum=False)
    texts = [b"activation", b"parameter"]
    hostile = {
        "page checksum": bytearray(write_part(table, compression="none", write_page_checksum=True)),
        "text of another width": bytearray(plain),
        "text that is no UTF-8": bytearray(plain),
        "size that is null": write_part(with_column("shape", pa.array([[None, 2]] * len(table), type=pa.list_(pa.int64())))),
        "text that is null": write_part(with_column("layer", pa.array([None] * len(table), type=pa.string()))),
        "number for a text": write_part(with_column("layer", pa.array([1] * len(table)))),
        "column that is missing": write_part(table.drop_columns(["layer"])),
        "columns in another order": write_part(table.select(SCHEMA.names[::-1])),
        "number for a text in an earlier run": write_part(with_column("layer", pa.array([1] * len(table))).drop_columns(["structure"])),
    }
    start = plain.find(texts[0])
    hostile["text that is no UTF-8"][start] = 0xFF
    hostile["page checksum"][hostile["page checksum"].find(texts[0])] ^= 1
    # two texts that become one: the numbers behind them then count too far
    at = hostile["text of another width"].find(b"gradient")
    hostile["text of another width"][at - 4 : at] = (9).to_bytes(4, "little")
    for what, contents in hostile.items():
        replace_part(copied, bytes(contents))
        with pytest.raises(hookstore.CorruptRunError, match="no writer of this format wrote"):
            hookstore.open(copied)
            pytest.fail(what)
    replace_part(copied, plain)
    with hookstore.open(copied) as run:
        assert run.manifest.equals(table)


def test_parts_that_count_their_texts_differently(recorded, copied):
    table = read_manifest(os.fspath(copied))
    pieces = [table.filter(pc.equal(table["layer"], layer)) for layer in ("2", "0")]
    for part in (copied / "manifest").iterdir():
        part.unlink()
    for index, piece in enumerate(pieces):
        contents = encode_part(piece.to_batches())
        (copied / "manifest" / f"r0-a0-{index:06d}-{crc32c(contents):08x}.parquet").write_bytes(contents)
    with hookstore.open(copied) as run, hookstore.open(recorded[0]) as before:
        assert run.manifest.equals(pa.concat_tables(pieces))
        for layer in ("0", "2"):
            assert run[layer].activation.rows.to_pylist() == before[layer].activation.rows.to_pylist()
            assert np.array_equal(run[layer].activation.samples()[:], before[layer].activation.samples()[:])


def test_texts_that_are_there_twice(copied):
    """Two texts of a dictionary made equal: Arrow makes them one, and the numbers behind them count too far."""
    table = read_manifest(os.fspath(copied))
    index = SCHEMA.get_field_index("leaf")
    leaves = ["aaaa", "bbbb", "cccc", *["bbbb"] * (len(table) - 3)]
    contents = write_part(table.set_column(index, SCHEMA.field("leaf"), pa.array(leaves)), compression="none")
    assert contents.count(b"bbbb") == 1
    replace_part(copied, contents.replace(b"bbbb", b"aaaa"))
    with pytest.raises(hookstore.CorruptRunError, match="out of bounds"):
        hookstore.open(copied)


def test_shapes_of_a_journal_with_nulls(copied):
    (copied / "journal").mkdir(exist_ok=True)
    row = read_manifest(os.fspath(copied)).slice(0, 1).to_pylist()[0]
    batch = pa.RecordBatch.from_pylist([{**row, "shape": (2, None), "wall_time": 0}], schema=manifest.SCHEMA)
    writer = manifest.ManifestWriter(os.fspath(copied), attempt=1)
    writer.append(batch)
    writer.close()
    with pytest.warns(hookstore.CaptureWarning, match="there are nulls"):
        hookstore.open(copied).close()


@pytest.mark.parametrize(
    "changes",
    [
        {"array": "../../secret"},
        {"array": ".."},
        {"array": "/etc"},
        {"array": "0/activation/.."},
        {"array": "0/../0/activation"},
        {"array": "0\\activation/x"},
        {"array": ""},
        {"array": "a/b\0c"},
        {"shard": "../activation/c.0.0.0.0"},
        {"shard": "zarr.json"},
        {"shard": ""},
        {"shard": "c"},
        {"offset": -64},
        {"offset": 2**62},
        {"length": 0},
        {"length": -4},
        {"length": 2**62},
        {"length": 8},
        {"shape": [2**40, 2**40]},
        {"shape": [-5, 2]},
        {"shape": [5]},
        {"shape": [6, 2]},
        {"dtype": "object"},
        {"dtype": "float64"},
    ],
)
def test_hostile_manifest_rows_are_refused(copied, changes):
    (copied.parent / "secret").mkdir()
    rewrite_manifest(copied, **changes)
    with hookstore.open(copied) as run, pytest.raises(hookstore.CorruptRunError):
        run["2"].activation[0, 0]
    with hookstore.open(copied) as run, pytest.raises(hookstore.CorruptRunError):
        run["2"].activation.samples()[0]


def test_hostile_zarr_json(copied):
    path = copied / "layers" / "2" / "activation" / "zarr.json"
    metadata = json.loads(path.read_text())
    metadata["codecs"][0]["configuration"]["codecs"].insert(1, {"name": "numcodecs.pickle", "configuration": {}})
    path.write_text(json.dumps(metadata))
    with hookstore.open(copied) as run, pytest.raises(hookstore.CorruptRunError, match="zarr.json .*'numcodecs.pickle' is not known"):
        run["2"].activation[0, 0]
    path.write_text("[]")
    with hookstore.open(copied) as run, pytest.raises(hookstore.CorruptRunError, match="is no array metadata"):
        run["2"].activation[0, 0]


def test_many_calls_and_leaves_are_found(tmp_path):
    class Many(nn.Module):
        def forward(self, value):
            return {"double": value * 2, "half": value / 2}

    model = Many()
    with hookstore.record(model, tmp_path / "run", layers="", buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(5), epoch=3):
            for call in range(40):
                model(torch.tensor([batch * 100.0 + call]))
    with hookstore.open(tmp_path / "run") as run:
        captures = run[""].activation
        assert captures.leaves == ["double", "half"]
        for batch in range(5):
            for call in range(40):
                assert captures.get(3, batch, call, leaf="half")[0] == (batch * 100 + call) / 2


def test_reading_imports_neither_torch_nor_the_recording_side(recorded):
    script = """
import sys, hookstore
run = hookstore.open(sys.argv[1])
run["2"].activation[0, 0], run["2"].activation.samples()[[1, 0]]
slow = {"pandas", "pyarrow.dataset"}
print(sorted(slow & set(sys.modules)))
run.manifest, run.info()
recording = {"torch", "zarr", "hookstore.hooks", "hookstore.staging", "hookstore.writer", "hookstore.recorder", "hookstore.device"}
print(sorted(recording & set(sys.modules)))
run["2"].activation.tensor(0, 0)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, os.fspath(recorded[0])], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split("\n")[:3] == ["[]", "[]", "True"], done.stderr


def test_open_in_forked_data_loader_workers(recorded):
    """A run opened in the parent is read in forked workers, and a pickled one opens itself anew."""
    path, outputs = recorded
    with hookstore.open(path) as opened, pickle.loads(pickle.dumps(opened)) as again:
        assert np.array_equal(again["2"].activation[0, 0], opened["2"].activation[0, 0])

    class Captured(torch.utils.data.Dataset):
        def __init__(self):
            self.captures = hookstore.open(path)["2"].activation
            self.captures[0, 0]

        def __len__(self):
            return 6

        def __getitem__(self, index):
            return self.captures.tensor(*divmod(index, 3)).sum()

    loader = torch.utils.data.DataLoader(Captured(), num_workers=2, multiprocessing_context="fork")
    sums = torch.cat(list(loader))
    assert torch.equal(sums, torch.stack([outputs["train", epoch, batch].sum() for epoch in range(2) for batch in range(3)]))
