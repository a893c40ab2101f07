"""Every layer of every model of the zoo, in training and evaluation: what is read back is, bit for bit, what a reference without hooks saw."""

from __future__ import annotations

import warnings

import pytest
import torch
import zoo

import hookstore

KINDS = ("activation", "gradient", "input", "parameter")

pytestmark = [
    pytest.mark.usefixtures("one_thread", "no_syncs"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]


def record_plan(name, path, layers, kinds):
    """Train a model of the zoo by the plan while it is recorded; return its losses and the warnings."""
    model = zoo.fresh(name)
    optimizer = zoo.optimizer_of(model)
    losses = []

    def backward(loss):
        losses.append(loss.detach().clone())
        if loss.requires_grad:
            loss.backward()

    with (
        warnings.catch_warnings(record=True) as caught,
        hookstore.record(
            model,
            path,
            layers=lambda layer, _module: layer in layers,
            kinds=kinds,
            phases=("train", "eval"),
            epochs=range(1),
            batches=range(2),
            buffer_bytes=64 << 20,
        ) as recorder,
    ):
        warnings.simplefilter("always", hookstore.CaptureWarning)
        for phase, batch in zoo.PLAN:
            with recorder.at(epoch=0, batch=batch):
                zoo.take_step(name, model, phase, batch, backward)
                if phase == "train":
                    optimizer.step()
    return losses, caught


def compare(name, path, kinds):
    """Record a model of the zoo and hold everything that is read back against the reference."""
    truth = zoo.truth(name, kinds)
    losses, caught = record_plan(name, path, truth.layers, kinds)
    assert [zoo.bits(loss) for loss in losses] == [zoo.bits(loss) for loss in truth.losses]
    with hookstore.open(path) as run:
        rows = run.manifest.to_pylist()
        place = ("kind", "phase", "batch", "layer", "call", "leaf")
        found = [tuple(row[column] for column in place) for row in rows if row["status"] == "ok"]
        called = {(phase, batch, layer) for _, phase, batch, layer, _, _ in truth.values}
        uncalled = {(row["phase"], row["batch"], row["layer"]) for row in rows if row["reason"].startswith("the layer was not called")}
        assert not uncalled & called
        gaps = [
            (row["kind"], row["layer"], row["leaf"], row["reason"])
            for row in rows
            if row["status"] != "ok" and not row["reason"].startswith("the layer was not called")
        ]
        assert len(found) == len(set(found)), "something was captured twice"
        of_edited_views = {(kind, layer) for kind, layer, _, reason in gaps if "edited in place" in reason}
        assert of_edited_views <= {(kind, layer) for layer in truth.edited for kind in ("gradient", "input_gradient")}
        missing = {key for key in truth.values if (key[0], key[3]) not in of_edited_views} - set(found)
        assert not missing, f"{len(missing)} were not captured, such as {sorted(missing)[:5]}"
        extra = set(found) - set(truth.values)
        assert not extra, f"{len(extra)} have no counterpart, such as {sorted(extra)[:5]}"
        wrong = [
            key
            for key in found
            for kind, phase, batch, layer, call, leaf in [key]
            if not is_right(run[layer][kind].tensor(0, batch, call, phase=phase, leaf=leaf), truth, key)
        ]
        assert not wrong, f"{len(wrong)} differ, such as {wrong[:5]}"
        check_gaps(gaps, truth, kinds, caught)
    return truth


def is_right(stored, truth, key):
    value = truth.values[key]
    if key[0] == "input_gradient" and not truth.has_exact_shares:
        return stored.dtype == value.dtype and torch.allclose(stored, value, rtol=1e-3, atol=1e-5 * float(value.abs().max()))
    return zoo.bits(stored) == zoo.bits(value)


def check_gaps(gaps, truth, kinds, caught):
    """What was not captured is no tensor, and has one row in each layer, or it is the gradient of a view that was edited in place."""
    places = [gap[:3] for gap in gaps if "edited in place" not in gap[3]]
    assert len(places) == len(set(places)), "a gap is told once in each layer"
    others = {other[:3] for other in truth.others if other[0] in kinds}
    unknown = [place for place in places if not any(other[:2] == place[:2] and is_inside(other[2], place[2]) for other in others)]
    assert not unknown
    untold = {other[:2] for other in others} - {place[:2] for place in places}
    assert not untold, f"dropped in silence: {untold}"
    assert all(issubclass(one.category, hookstore.CaptureWarning) for one in caught)
    plain = {"str", "int", "float", "bool", "dtype", "device"}
    assert caught or not any(other[0] in kinds and other[3] not in plain for other in truth.others)


def is_inside(leaf, container):
    return not container or leaf == container or leaf.startswith(f"{container}.")


@zoo.over_the_zoo()
def test_every_layer_is_what_a_reference_without_hooks_saw(tmp_path, name):
    truth = compare(name, tmp_path / "run", KINDS)
    assert len(truth.layers) >= 5
    assert {key[0] for key in truth.values} == set(KINDS)


def test_the_zoo_has_what_it_is_for():
    """Layers called several times, layers without a gradient, edited views, values of several leaves and other objects are all among the models."""
    names = ("cells", "odd_layers", "decoder", "faster_rcnn", "googlenet", "language_model")
    truths = {name: zoo.truth(name, ("activation", "gradient")) for name in names}
    values = {(name, *key) for name, truth in truths.items() for key in truth.values}
    assert ("cells", "activation", "train", 1, "gru", 3, "") in values
    assert ("cells", "activation", "train", 1, "gru", 4, "") not in values
    assert ("odd_layers", "activation", "train", 0, "top", 0, "indices") in values
    assert ("odd_layers", "gradient", "train", 0, "top", 0, "indices") not in values
    assert ("decoder", "activation", "eval", 0, "blocks.1", 2, "1.key") in values
    assert ("language_model", "activation", "train", 0, "rnn", 0, "0.batch_sizes") in values
    assert ("googlenet", "activation", "eval", 0, "aux1", 0, "") not in values
    assert truths["odd_layers"].edited
    assert "ImageList" in {other[3] for other in truths["faster_rcnn"].others}
