"""Values of the samples of a batch: stored once, read by name, and joined with what was captured of each sample."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from small import recording
from torch import nn
from typer.testing import CliRunner

import hookstore
from hookstore import Capture, CaptureWarning, MissingCaptureError, OptionError
from hookstore.cli import app
from hookstore.joined import join
from hookstore.schema import schema_with


class Given(nn.Module):
    """Returns what it is called with, as another tensor."""

    def forward(self, inputs):
        return inputs + 0


class Calls(nn.Module):
    """Calls a function with its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def rows_of(ids, width=3):
    """A tensor whose rows say which sample they are of."""
    return torch.as_tensor(ids, dtype=torch.float32)[:, None].repeat(1, width)


def record_batches(path, batches, captures=None, model=None, **options):
    """Record batches of sample ids, each annotated with them."""
    model = model or nn.Sequential(Given())
    with recording(model, path, **({"captures": captures} if captures else {"layers": "0"}), **options) as recorder:
        for epoch, epoch_batches in enumerate(batches):
            for ids in recorder.batches(epoch_batches, epoch=epoch):
                recorder.annotate(sample_id=ids)
                model(rows_of(ids))
    return hookstore.open(path)


# Storing --------------------------------------------------------------------------------------------------------------

READ_ONLY = np.arange(3, dtype=np.int16)
READ_ONLY.flags.writeable = False
VALUES = {
    "tensor": torch.tensor([3, 1, 2]),
    "matrix": torch.arange(6.0, requires_grad=True).reshape(3, 2),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "brain": torch.tensor([1.5, 2.5, 3.5], dtype=torch.bfloat16),
    "array": np.arange(6)[::-2],
    "big_endian": np.array([1, 2, 3], dtype=">f4"),
    "read_only": READ_ONLY,
    "integers": [7, 8, 9],
    "floats": (0.5, 1, 2),
    "bools": [True, False, True],
    "span": range(3),
    "texts": ["", "grün\0", "\ud800"],
    "same_texts": np.array(["a", "bb", "ccc"]),
    "objects": np.array(["a", "bb", "ccc"], dtype=object),
}


def test_every_kind_of_value_comes_back(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0") as recorder, recorder.at(epoch=0, batch=0):
        recorder.annotate(**VALUES)
        model(torch.ones(3))
    with hookstore.open(tmp_path / "run") as run:
        assert set(run.annotations) == set(VALUES) == set(run.info().annotations)
        for name, value in VALUES.items():
            found = run.annotations[name][0, 0]
            expected = value.tolist() if hasattr(value, "tolist") else list(value)
            assert found.tolist() == expected, name
            assert len(run.annotations[name]) == 1
        assert run.annotations["floats"][0, 0].dtype == np.float64
        assert run.annotations["tensor"].value(0, 0, torch=True).tolist() == [3, 1, 2]
        assert run.annotations["texts"].value(0, 0, torch=True).tolist() == VALUES["texts"]
        assert run.annotations["brain"][0, 0].dtype.name == "bfloat16"
        assert not run.annotations["texts"][0, 0].flags.writeable
    root = zarr.open(tmp_path / "run" / "layers" / "%root")
    assert bytes(root["annotation.same_texts.utf8"][0, 0]) == b"abbccc"
    assert root["annotation.same_texts.offsets"][0, 0].tolist() == [0, 1, 3, 6]
    assert root["annotation.tensor"].metadata.dimension_names == ("epoch", "batch", "sample")
    assert root["annotation.texts.utf8"].metadata.dimension_names[2] != "sample"
    assert hookstore.verify(tmp_path / "run").is_sound


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_who_annotates_before_the_call_of_the_model_is_told_where_nothing_is_recorded_too(tmp_path, phase):
    model = nn.Sequential(Given()).train(phase == "train")
    with recording(model, tmp_path / "run", layers="0", batches=[2], phases=phase) as recorder:
        recorder.annotate(sample_id=[0, 1])
        model(rows_of([0, 1]))
        with pytest.raises(OptionError, match="annotated after"):
            recorder.annotate(sample_id=[2, 3])  # is filed under the batch before
        for ids in ([2, 3], [4, 5]):
            model(rows_of(ids))
            recorder.annotate(sample_id=ids)
            with recorder.paused():
                recorder.annotate(sample_id=ids)
    with hookstore.open(tmp_path / "run") as run:
        assert run.sample(4)["0"].activation[0, 2].tolist() == [4, 4, 4]


def test_large_whole_numbers_in_a_list_are_not_rounded(tmp_path):
    hashes = [2**64 - 1, 2**63 + 1, 2**53 + 1, 0]  # NumPy alone makes float64 of them
    run = record_batches(tmp_path / "run", [[hashes, [1, 2, 3]]])
    assert run.annotations["sample_id"][0, 0].tolist() == hashes
    assert [where.index for where in run.sample(2**63 + 1).where] == [1]
    with pytest.raises(MissingCaptureError, match=str(2**63)):
        run.sample(2**63)
    assert len(run.sample(2).where) == 1
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "other", layers="0") as recorder, recorder.at(epoch=0, batch=0):
        model(torch.ones(2))
        recorder.annotate(given=[2**53, 0.5])
        for values in ([2**53 + 1, 0.5], [-1, 2**63 + 1], [[2**64 - 1], [-1]]):
            with pytest.raises(OptionError, match="refused: expected .* no dtype holds"):
                recorder.annotate(refused=values)


def test_samples_are_found_by_numbers_of_which_some_are_nan(tmp_path):
    run = record_batches(tmp_path / "run", [[[0.5, float("nan")], [float("nan"), 2.5]]])
    assert [(where.batch, where.index) for where in run.sample(2.5).where] == [(1, 1)]
    assert [(where.batch, where.index) for where in run.sample(float("nan")).where] == [(0, 1), (1, 0)]


def test_one_annotation_may_be_texts_in_some_batches_and_numbers_in_others(tmp_path):
    batches = [["a", "b"], [3, 4], [5.5], [], [torch.tensor(7)]]
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0") as recorder:
        for ids in recorder.batches(batches, epoch=0):
            recorder.annotate(sample_id=ids)
            model(torch.ones(len(ids), 2))
    run = hookstore.open(tmp_path / "run")
    ids = run.annotations["sample_id"]
    assert [ids[0, batch].tolist() for batch in range(5)] == [["a", "b"], [3, 4], [5.5], [], [7]]
    assert len(ids) == 5
    for value in (7, np.int64(7), torch.tensor(7)):
        assert [where.batch for where in run.sample(value).where] == [4]
    for value in ([3], torch.tensor([3]), {}):
        with pytest.raises(MissingCaptureError, match="there are, for example"):
            run.sample(value)
    with pytest.raises(MissingCaptureError, match="the run has no loss"):
        run.loss[0, 0]


def test_nothing_else_of_a_run_changes(tmp_path):
    found = []
    for is_annotated in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
        with recording(model, tmp_path / str(is_annotated), layers="*", kinds=["activation", "gradient"]) as recorder:
            for ids in recorder.batches([[0, 1], [2, 3]], epoch=0):
                outputs = model(rows_of(ids))
                if is_annotated:
                    recorder.annotate(sample_id=ids, name=list(map(str, ids)))
                    recorder.loss(outputs.sum())
                outputs.sum().backward()
        with hookstore.open(tmp_path / str(is_annotated)) as run:
            info = run.info()
            assert info.annotations == (["name", "sample_id"] if is_annotated else [])
            values = [run[layer][kind][0, batch].tolist() for layer in run.layers for kind in run.kinds for batch in range(2)]
            found.append((run.layers, run.kinds, run.epochs, run.batches(0), info.groups, info.num_captures, run.partial_batches, values))
            assert [run[layer].kinds for layer in run.layers] == [["activation", "gradient"]] * 3
    assert found[0] == found[1]


def test_only_batches_of_which_something_is_recorded_are_annotated(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0", every=2) as recorder:
        for ids in recorder.batches([[0, 1], [2, 3], [4]], epoch=0):
            recorder.annotate(sample_id=ids)
            model(rows_of(ids))
            recorder.loss(1.0)
        with recorder.paused():
            recorder.annotate(sample_id=[5, 6])
        model.eval()
        with recorder.at(epoch=0, batch=2):
            recorder.annotate(sample_id=[7, 8])
    with hookstore.open(tmp_path / "run") as run:
        assert run.annotations["sample_id"].rows.select(["phase", "epoch", "batch"]).to_pylist() == [
            {"phase": "train", "epoch": 0, "batch": batch} for batch in (0, 2)
        ]
        assert run.annotations["sample_id"][0, 2].tolist() == [4]
        assert len(run.loss) == 2
        with pytest.raises(
            MissingCaptureError, match=r"annotation 'sample_id' in epoch 0, batch 1 was not captured; epoch 0 has batches 0, 2"
        ):
            run.annotations["sample_id"][0, 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": [1, 2], "b": [1, 2, 3]}, "b: expected 2 samples, as many as in the other annotations of train epoch 0, batch 0, got 3"),
        ({"sample_id": [1, 2]}, "sample_id: train epoch 0, batch 0 has been given it already"),
        ({"a": [1]}, "a: expected 3 samples"),
        ({"a": 3}, "a: expected a tensor, an array or a list .* 0 dimensions and dtype int64"),
        ({"a": torch.tensor(3)}, "a: expected .* it has no dimensions"),
        ({"a": torch.empty(3, device="meta")}, "a: expected .* meta device"),
        ({"a": torch.ones(3, 1).to_sparse()}, "a: expected .* layout"),
        ({"a": ["x", 1, 2]}, "a: expected a tensor, an array or a list of numbers, bools or strings"),
        ({"a": [b"x", b"y", b"z"]}, "a: expected"),
        ({"a": [[1], [2, 3], []]}, "a: expected .* no array can be made"),
        ({"a": {1: 2}}, "a: expected .* got a dict"),
        ({"a": [None, None, None]}, "a: expected"),
        ({"a": np.array(["2020-01-01"] * 3, dtype="datetime64[D]")}, "a: expected"),
        ({"a": np.zeros(3, dtype=np.longdouble)}, "a: expected .* which torch does not have"),
        ({"a b": [1, 2, 3]}, "'a b': expected names of annotations that are Python identifiers"),
    ],
)
def test_what_cannot_be_stored_is_refused_and_none_of_it_is(tmp_path, values, message):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0") as recorder, recorder.at(epoch=0, batch=0):
        if "b" not in values:
            recorder.annotate(sample_id=[1, 2, 3])
        with pytest.raises(OptionError, match=message):
            recorder.annotate(fine=[1, 2] if "b" in values else [1, 2, 3], **values)
        recorder.annotate(a=[1, 2, 3])
        model(torch.ones(3))
    with hookstore.open(tmp_path / "run") as run:
        assert "fine" not in run.annotations
        assert run.annotations["a"][0, 0].tolist() == [1, 2, 3]
    with pytest.raises(hookstore.RecorderClosedError):
        recorder.annotate(a=[1, 2, 3])


def test_without_a_clock_a_batch_is_annotated_after_its_forward(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0") as recorder:
        recorder.annotate(early=[0, 1])  # before the first forward there is no batch but the first
        for ids in ([0, 1], [2, 3]):
            model(rows_of(ids))
            recorder.annotate(sample_id=ids)
        with pytest.raises(OptionError, match="a batch begins with the call of the model, so that it is to be annotated after that"):
            recorder.annotate(sample_id=[4, 5])
    with hookstore.open(tmp_path / "run") as run:
        assert [run.annotations["sample_id"][0, batch].tolist() for batch in range(2)] == [[0, 1], [2, 3]]
        assert run.annotations["early"][0, 0].tolist() == [0, 1]
        assert run.sample(3)["0"].activation.stack().tolist() == [[3, 3, 3]]


def test_values_are_those_of_the_moment(tmp_path):
    model, ids, texts = nn.Sequential(Given()), torch.tensor([1, 2]), ["a", "b"]
    array = np.array([1.0, 2.0])
    with recording(model, tmp_path / "run", layers="0") as recorder, recorder.at(epoch=0, batch=0):
        recorder.annotate(sample_id=ids, name=texts, array=array)
        ids += 10
        array += 10
        texts[0] = "z"
        model(torch.ones(2))
    with hookstore.open(tmp_path / "run") as run:
        assert run.annotations["sample_id"][0, 0].tolist() == run.annotations["array"][0, 0].tolist() == [1, 2]
        assert run.annotations["name"][0, 0].tolist() == ["a", "b"]
        assert hookstore.Captures(run, "", "annotation")[0, 0].keys() == {"sample_id", "name", "array"}


def test_losses_are_numbered_within_a_batch_and_may_have_names(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2))
    with recording(model, tmp_path / "run", layers="0", kinds="gradient") as recorder:
        for ids in recorder.batches([[0, 1], [2, 3]], epoch=0):
            loss = model(rows_of(ids)).square()
            recorder.loss(loss.sum())
            recorder.loss(2)
            recorder.loss(loss.mean(1), name="each")
            loss.sum().backward()
        for wrong in ("1", True, torch.ones(2, 2), [1.0], torch.empty((), device="meta")):
            with pytest.raises(OptionError, match="value: expected a loss as a number"):
                recorder.loss(wrong)
        with pytest.raises(OptionError, match="name: expected a Python identifier"):
            recorder.loss(1.0, name="a.b")
    with hookstore.open(tmp_path / "run") as run:
        assert run.loss[0, 1].shape == ()
        assert run.loss[0, 1] == pytest.approx(loss.sum().item())
        assert run.loss[0, 1, 1] == 2
        assert run.loss.leaf("each")[0, 1].tolist() == loss.mean(1).tolist()
        assert run.loss.leaves == ["", "each"]
    assert hookstore.verify(tmp_path / "run").is_sound


@pytest.mark.parametrize(
    ("letters", "offsets"),
    [([97], []), ([97], [0, 2]), ([97], [1, 1]), ([97, 98], [0, 2, 1, 2]), ([255], [0, 1]), ([97], [[0, 1]])],
)
def test_texts_that_make_no_sense_are_refused(letters, offsets):
    with pytest.raises(ValueError, match=r"."):
        join("texts", {}, {"utf8": np.array(letters, dtype=np.uint8), "offsets": np.array(offsets, dtype=np.int64)})


def test_the_info_command_names_parts_and_annotations(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0", select={"sample": 1}) as recorder, recorder.at(epoch=0, batch=0):
        recorder.annotate(sample_id=[1, 2], label=[0, 1])
        model(torch.ones(2, 3))
    printed = CliRunner().invoke(app, ["info", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    for text in ("sample[:1]", "of batches: label, sample_id", "1 captures, 12 bytes"):
        assert text in printed


# Samples --------------------------------------------------------------------------------------------------------------


def test_a_sample_is_found_through_all_epochs(tmp_path):
    order = [torch.randperm(10).tolist() for _ in range(3)]
    batches = [[ids[:4], ids[4:8], ids[8:]] for ids in order]  # the last one is smaller
    with record_batches(tmp_path / "run", batches) as run:
        for sample in range(10):
            history = run.sample(sample)
            assert [(where.phase, where.epoch, where.index, where.attempt) for where in history.where] == [
                ("train", epoch, ids.index(sample) % 4, 0) for epoch, ids in enumerate(order)
            ]
            found = history["0"].activation
            assert list(found) == [(epoch, ids.index(sample) // 4) for epoch, ids in enumerate(order)]
            assert found.stack().tolist() == [[sample] * 3] * 3
            assert (found.missing, len(history)) == ({}, 3)
        with pytest.raises(MissingCaptureError, match=r"no batch has a sample of sample_id 10; there are, for example, 0, 1, 2"):
            run.sample(10)
        for strange in ("3", None, [3], 2**80, 2.5):
            with pytest.raises(MissingCaptureError, match="no batch has a sample"):
                run.sample(strange)
        with pytest.raises(MissingCaptureError, match="have no annotation 'name'; there are 'sample_id'"):
            run.sample(1, by="name")
        with pytest.raises(OptionError, match="expected 'activation', .* got 'parameter'"):
            run.sample(1)["0"]["parameter"]
        with pytest.raises(hookstore.UnknownLayerError):
            run.sample(1)["fc"]
        with pytest.raises(MissingCaptureError, match=r"under \(9, 9\): there are \(0, "):
            run.sample(1)["0"].activation[9, 9]
        with pytest.raises(OptionError, match="expected arrays of one shape .* found nothing: .*this layer has activation"):
            run.sample(1)["0"].gradient.stack()
        assert "3 of activation" in repr(run.sample(1)["0"].activation)


def test_other_annotations_and_other_ids(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0", phases=["train", "eval"]) as recorder:
        for batch in range(2):
            with recorder.at(epoch=0, batch=batch):
                recorder.annotate(sample_id=["a", "b", "c"], key=[0.5, 1.5, 2.5], pair=torch.arange(6).reshape(3, 2))
                model(rows_of([0, 1, 2]))
                if batch:
                    recorder.annotate(late=[True, False, True])
        model.eval()
        with recorder.at(epoch=0, batch=0):
            recorder.annotate(sample_id=["c", "b"])
            model(rows_of([2, 1]))
    with hookstore.open(tmp_path / "run") as run:
        history = run.sample("b")
        assert [(where.phase, where.batch, where.index) for where in history.where] == [("eval", 0, 1), ("train", 0, 1), ("train", 1, 1)]
        assert history.annotations["key"] == [None, 1.5, 1.5]
        assert history.annotations["late"] == [None, None, False]
        assert [None if pair is None else pair.tolist() for pair in history.annotations["pair"]] == [None, [2, 3], [2, 3]]
        assert list(history["0"].activation) == [(0, 0), (0, 1)]
        of_eval = run.sample("c", phase="eval")
        assert of_eval["0"].activation.stack().tolist() == [[2, 2, 2]]
        assert list(run.sample(2.5, by="key")["0"].activation) == [(0, 0), (0, 1)]
        with pytest.raises(
            MissingCaptureError, match="no batch of phase 'eval' has a sample of sample_id 'a'; it is in phase 'train' alone"
        ):
            run.sample("a", phase="eval")
        with pytest.raises(OptionError, match=r"by: expected an annotation with one value for each sample, and 'pair' has shape \(3, 2\)"):
            run.sample(1, by="pair")


def test_a_sample_may_be_in_a_batch_twice_and_a_layer_be_called_twice(tmp_path):
    model = nn.Sequential(Given(), Given())
    model[1] = model[0]
    with record_batches(tmp_path / "run", [[[5, 6, 5]]], model=model) as run:
        found = run.sample(5)["0"].activation
        assert list(found) == [(0, 0), (0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 2)]
        assert found.stack().tolist() == [[5, 5, 5]] * 4
        assert list(run.sample(6)["0"].activation) == [(0, 0), (0, 0, 1)]


@given(
    st.permutations(range(6)),
    st.integers(1, 6),
    st.one_of(
        st.integers(1, 7),
        st.builds(slice, st.none() | st.integers(-6, 6), st.none() | st.integers(-6, 6), st.none() | st.integers(1, 3)),
        st.lists(st.integers(-2, 1), min_size=1, max_size=3),
    ),
    st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_a_part_gives_the_right_sample_or_none(order, batch_size, kept, is_second):
    """Rows hold the number of their sample, so that a wrong one shows."""
    batches = [[order[start : start + batch_size] for start in range(0, 6, batch_size)]]
    dims = ("token", "sample") if is_second else ("sample", "token")
    model = nn.Sequential(Calls(torch.t) if is_second else Given())
    captures = [Capture(layers="0", select={"sample": kept}, dims=dims)]
    told = pytest.warns(CaptureWarning) if _is_short(batches, kept) else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as directory, told, record_batches(f"{directory}/run", batches, captures, model) as run:
        for sample in range(6):
            found = run.sample(sample)["0"].activation
            (batch,) = (batch for batch, ids in enumerate(batches[0]) if sample in ids)
            ids = batches[0][batch]
            try:
                positions = np.arange(len(ids))[slice(kept) if isinstance(kept, int) else kept].tolist()
            except IndexError:
                positions = []
            assert [value.tolist() for value in found.values()] == ([[sample] * 3] if ids.index(sample) in positions else [])
            assert len(found) + len(found.missing) == 1


def _is_short(batches, kept):
    return isinstance(kept, list) and any(len(ids) < max(one + 1 if one >= 0 else -one for one in kept) for ids in batches[0])


def test_what_is_not_certain_is_left_out_by_name(tmp_path):
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 3), torch.tensor([1, 1]), batch_first=True)
    model = nn.ModuleDict(
        {
            "longer": Calls(lambda inputs: torch.cat([inputs, inputs])),
            "scalar": Calls(torch.sum),
            "sparse": Calls(lambda inputs: inputs.to_sparse()),
            "packed": Calls(lambda _: packed),
            "function": Given(),
            "named": Given(),
            "nested": Calls(lambda inputs: (inputs, {"more": inputs * 2})),
            "kept": Given(),
        }
    )

    class All(nn.Module):
        """Calls all layers."""

        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, inputs):
            return [layer(inputs) for layer in self.layers.values()]

    def first(tensor):
        return tensor[1:]

    captures = [
        Capture(layers=[f"layers.{name}" for name in ("longer", "scalar", "sparse", "packed", "nested")]),
        Capture(layers="layers.function", select=first),
        Capture(layers="layers.named", dims=("token", "feature")),
        Capture(layers="layers.kept", select={"sample": 1}),
    ]
    with record_batches(tmp_path / "run", [[[3, 4]]], captures, All()) as run:
        history = run.sample(4)
        reasons = {
            "longer": r"its size along the axis of samples is 4, and the batch was annotated with 2",
            "scalar": r"it has shape \(\), and so no axis of samples",
            "function": r"which samples .*first\(\) has kept is not known",
            "named": r"none of its dimensions 'token', 'feature' is 'sample'",
            "kept": r"sample\[:1\] has not kept sample 1 of 2 in the batch",
        }
        for name, reason in reasons.items():
            found = history[f"layers.{name}"].activation
            assert list(found) == []
            with pytest.raises(MissingCaptureError, match=reason):
                found[0, 0]
        assert history["layers.nested"].activation.leaf("1.more")[0, 0].tolist() == [8, 8, 8]
        for name, leaf, reason in (("sparse", "values", "stored as several tensors"), ("packed", "data", "part of a PackedSequence")):
            with pytest.raises(MissingCaptureError, match="several leaves"):
                len(history[f"layers.{name}"].activation)
            assert [reason in why for why in history[f"layers.{name}"].activation.leaf(leaf).missing.values()] == [True]
        assert run.sample(3)["layers.kept"].activation.portion("sample[:1]").stack().tolist() == [[3, 3, 3]]


def test_tensors_and_annotations_are_of_one_attempt(tmp_path):
    path = tmp_path / "run"
    record_batches(path, [[[0, 1], [2, 3]]]).close()
    with record_batches(path, [[[3, 0]]], mode="a") as run:
        assert [(where.batch, where.index, where.attempt) for where in run.sample(3).where] == [(0, 0, 1), (1, 1, 0)]
        assert run.sample(3)["0"].activation.stack().tolist() == [[3, 3, 3]] * 2
        assert [(where.batch, where.attempt) for where in run.sample(1, attempt=0).where] == [(0, 0)]
        with pytest.raises(MissingCaptureError, match="no batch has a sample of sample_id 1"):
            run.sample(1)  # its batch was recorded again with others
        assert run.annotations["sample_id"].get(0, 0, attempt=0).tolist() == [0, 1]


@pytest.mark.parametrize("is_text", [True, False])
def test_where_the_clock_stood_twice_a_sample_is_joined_only_if_it_is_certain(tmp_path, is_text):
    """Batch 0 had the same samples both times, batch 1 others, and batch 2 was not annotated again."""
    model = nn.Sequential(Given())
    visits = [[[0, 1], [2, 3], [4, 5]], [[0, 1], [3, 2], None]]
    with recording(model, tmp_path / "run", layers="0") as recorder:
        for batches in visits:
            for batch, ids in enumerate(batches):
                with recorder.at(epoch=0, batch=batch):
                    if ids:
                        recorder.annotate(sample_id=list(map(str, ids)) if is_text else ids)
                    model(rows_of(ids or [5, 4]))
    with hookstore.open(tmp_path / "run") as run:
        with pytest.warns(CaptureWarning, match="batch 1 are not found: it was annotated 2 times, with other samples"):
            first = run.sample("0" if is_text else 0)
        assert first["0"].activation.stack().tolist() == [[0, 0, 0]]
        with pytest.raises(MissingCaptureError, match="no batch has a sample"):
            run.sample("2" if is_text else 2)
        missing = run.sample("4" if is_text else 4)["0"].activation.missing
        assert missing == {(0, 2): "it was captured 2 times there, and the batch was annotated 1 times"}


def test_a_live_run_shows_samples_after_refresh(tmp_path):
    model = nn.Sequential(nn.Linear(3, 1))
    with recording(model, tmp_path / "run", layers="0", kinds=["activation", "gradient"]) as recorder:
        for batch, ids in enumerate(recorder.batches([[0, 1], [2, 0]], epoch=0)):
            recorder.annotate(sample_id=ids)
            model(rows_of(ids)).sum().backward()
            recorder.flush()
            if batch == 0:
                run = hookstore.open(tmp_path / "run")
                assert len(run.sample(0)) == 1
        run.refresh()
        assert list(run.sample(0)["0"].gradient) == [(0, 0), (0, 1)]
        run.close()


def test_a_damaged_annotation_hides_its_batch_alone(tmp_path):
    with record_batches(tmp_path / "run", [[[0, 1], [1, 2]]]) as run:
        row = run.annotations["sample_id"].row(0, 1)
    shard = tmp_path / "run" / "layers" / row["array"] / row["shard"]
    contents = bytearray(shard.read_bytes())
    contents[row["offset"]] ^= 1
    shard.write_bytes(contents)
    with hookstore.open(tmp_path / "run") as run:
        with pytest.warns(CaptureWarning, match="the samples of train epoch 0, batch 1 are not found"):
            assert [where.batch for where in run.sample(1).where] == [0]
        assert run.sample(0)["0"].activation[0, 0].tolist() == [0, 0, 0]


def test_a_year_later_nobody_needs_torch(tmp_path):
    captures = [Capture(layers="0", select={"sample": 2}), Capture(layers="0", stats="only")]
    record_batches(tmp_path / "run", [[[0, 1, 2]]], captures).close()
    code = """
import sys
sys.modules["torch"] = None
import hookstore
with hookstore.open(sys.argv[1]) as run:
    captures = run["0"].activation.portion({"sample": 2})
    assert captures[0, 0].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert run["0"].activation.stats(0, 0).max == 2
    assert run.sample(1)["0"].activation.portion("sample[:2]").stack().tolist() == [[1, 1, 1]]
    assert run.annotations["sample_id"][0, 0].tolist() == [0, 1, 2]
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, tmp_path / "run"], check=True)


@pytest.mark.parametrize("select", [{"sample": 8}, {0: slice(0, 8)}, {"sample": [0, 3]}])
def test_parts_of_an_axis_that_is_not_that_of_the_samples_are_not_joined(tmp_path, select):
    """The part alone does not tell: of 80 rows of tokens, as of 16 of samples, eight are kept."""
    model = nn.ModuleDict({"samples": Given(), "tokens": Given()})
    with recording(model, tmp_path / "run", captures=[Capture(layers=["samples", "tokens"], select=select)]) as recorder:
        recorder.at(epoch=0, batch=0)
        recorder.annotate(sample_id=range(16))
        model["samples"](rows_of(range(16)))
        model["tokens"](rows_of(range(80)))
    with hookstore.open(tmp_path / "run") as run:
        history = run.sample(3)
        np.testing.assert_array_equal(history["samples"].activation[0, 0], [3.0] * 3)
        assert len(history["tokens"].activation) == 0
        assert "is 80, and the batch was annotated with 16" in history["tokens"].activation.missing[0, 0]
        assert {row["whole_shape"] for row in run.manifest.to_pylist() if row["kind"] == "activation"} == {"16,3", "80,3"}


def test_samples_are_found_by_whole_numbers_that_float64_does_not_hold(tmp_path):
    first = 2**60
    with record_batches(tmp_path / "run", [[torch.arange(first, first + 4)]]) as run:
        for value, index in ((np.uint64(first + 3), 3), (float(first), 0)):
            ((where, _),) = run.sample(value)._found
            assert where.index == index
        for absent in (np.uint64(first + 9), float(first) + 1024, first + 4, 2**70, math.inf):
            with pytest.raises(MissingCaptureError):
                run.sample(absent)


def test_a_loss_whose_name_is_no_text_is_refused(tmp_path):
    model = nn.Sequential(Given())
    with recording(model, tmp_path / "run", layers="0") as recorder:
        for name in (None, 5, b"a"):
            with pytest.raises(OptionError, match="name: expected a Python identifier"):
                recorder.loss(1.0, name=name)


def test_runs_that_were_made_before_the_shape_of_the_whole_was_noted_are_read_and_gone_on_with(tmp_path, monkeypatch):
    def of_then(**options):
        schema = schema_with(**options)
        return schema.remove(schema.get_field_index("whole_shape"))

    path = tmp_path / "run"
    captures = [Capture(layers="0", select={"sample": 2}, stats=True)]
    with monkeypatch.context() as patch:
        patch.setattr("hookstore.recorder.schema_with", of_then)
        record_batches(path, [[[1, 2, 3]]], captures).close()
    with hookstore.open(path) as run:
        assert run["0"].activation[0, 0].tolist() == [[1.0] * 3, [2.0] * 3]
        assert "of what shape the whole tensor was" in run.sample(2)["0"].activation.missing[0, 0]
    record_batches(path, [[], [[1, 2, 3]]], captures, mode="a").close()
    assert hookstore.verify(path).is_sound
    with hookstore.open(path) as run:
        history = run.sample(2)["0"].activation
        assert [*history] == [(1, 0)]
        assert [*history.missing] == [(0, 0)]
