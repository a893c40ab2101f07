"""Statistics on reading: those that were stored, and those that are computed of what was."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from small import recording
from torch import nn
from typer.testing import CliRunner

import hookstore
from hookstore import Capture, MissingCaptureError
from hookstore.cli import app
from hookstore.statistics import STATISTICS_DTYPE, Statistics, of_tensor


class As(nn.Module):
    """Returns what it is called with in another dtype."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs):
        return inputs.to(self.dtype)


def small_model():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))


def record_both(path, num_batches=3):
    """Record the same training with and without statistics."""
    inputs = [torch.randn(5, 6) for _ in range(num_batches)]
    for stats in (True, False):
        torch.manual_seed(1)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kinds = ["activation", "gradient", "input", "parameter", "parameter_gradient"]
        with recording(model, path / str(stats), layers="*", kinds=kinds, stats=stats) as recorder:
            for data in recorder.batches(inputs, epoch=0):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
    return hookstore.open(path / "True"), hookstore.open(path / "False")


def test_the_hint_at_statistics_names_the_phase_that_was_asked_for(tmp_path):
    model = small_model()
    with recording(model, tmp_path / "run", layers="0", phases=["train", "eval"], stats="only") as recorder:
        for is_training in (True, False):
            model.train(is_training)
            for data in recorder.batches([torch.full((2, 6), float(is_training))], epoch=0):
                model(data)
    with hookstore.open(tmp_path / "run") as run:
        captures = run["0"].activation
        for phase, hint in (("train", r"\.stats\(0, 0, 0\) reads"), ("eval", r"\.stats\(0, 0, 0, phase='eval'\) reads")):
            with pytest.raises(MissingCaptureError, match=hint):
                captures.get(0, 0, phase=phase)
        assert captures.stats(0, 0, 0, phase="eval") != captures.stats(0, 0, 0)


SUMMED = ("mean", "std", "l2")  # their last bits depend on how many tensors are summed together


def test_stored_and_computed_are_equal(tmp_path):
    stored, computed = record_both(tmp_path)
    with stored, computed:
        assert ("mean" in stored.manifest.schema.names, "mean" in computed.manifest.schema.names) == (True, False)
        for layer in ("0", "1"):
            for kind in stored[layer].kinds:
                tables = [run[layer][kind].statistics() for run in (stored, computed)]
                assert tables[0].drop(SUMMED).equals(tables[1].drop(SUMMED)), (layer, kind)
                for name in SUMMED:
                    assert tables[0][name].to_pylist() == pytest.approx(tables[1][name].to_pylist(), rel=1e-12, abs=1e-15)
                assert tables[0].num_rows == len(stored[layer][kind]) > 0
                for row, same in zip(*(table.to_pylist() for table in tables), strict=True):
                    where = {name: row[name] for name in ("phase", "leaf", "backward", "attempt")}
                    place = row["epoch"], row["batch"], row["call"]
                    assert stored[layer][kind].stats(*place, **where)._asdict() == {name: row[name] for name in STATISTICS_DTYPE.names}
                    expected = Statistics.of_record(of_tensor(stored[layer][kind].get(*place, **where)))
                    assert computed[layer][kind].stats(*place, **where) == expected
                    assert expected._asdict() == {name: same[name] for name in STATISTICS_DTYPE.names}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64, torch.complex32])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_has_statistics_whether_stored_or_not(tmp_path, dtype):
    data = torch.tensor([[0.5, 0.0, 2.0], [1.0, 1.5, -0.25]])
    for stats in (True, False):
        model = As(dtype)
        with recording(model, tmp_path / str(stats), layers="", stats=stats):
            model(data)
    found = []
    for stats in (True, False):
        with hookstore.open(tmp_path / str(stats)) as run:
            found.append(run[""].activation.stats(0, 0))
            assert run[""].activation.row(0, 0)["dtype"] == str(dtype)[6:]
    expected = data.to(dtype).to(torch.complex128 if dtype.is_complex else torch.float64).abs()
    assert found[0].absmax == found[1].absmax == expected.max()
    assert found[0].l2 == pytest.approx(float(expected.square().sum().sqrt()), rel=1e-12)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_a_layer_of_which_only_statistics_are_stored_is_there(tmp_path):
    model, data = small_model(), torch.randn(5, 6)
    with recording(model, tmp_path / "run", captures=[Capture(layers="0", stats="only"), Capture(layers="1", every=2)]):
        for _ in range(3):
            model(data)
    with hookstore.open(tmp_path / "run") as run:
        layer = run["0"]
        assert (run.kinds, run.epochs, run.batches(0), layer.kinds) == (["activation"], [0], [0, 1, 2], ["activation"])
        assert (len(layer.activation), layer.activation.rows.num_rows, layer.activation.leaves) == (3, 3, [""])
        expected = model[0](data).detach().numpy()
        assert layer.activation.stats(0, 2) == pytest.approx(Statistics.of_record(of_tensor(expected)), rel=1e-12)
        assert layer.activation.statistics()["batch"].to_pylist() == [0, 1, 2]
        for read in (lambda: layer.activation[0, 1], lambda: layer.activation.tensor(0, 1), lambda: layer.activation.value(0, 1)):
            with pytest.raises(
                MissingCaptureError, match=r"batch 1 was summarized: only its statistics are stored; \.stats\(0, 1, 0\)"
            ) as caught:
                read()
            assert caught.value.status == "summarized"
        assert layer.activation.row(0, 1)["status"] == "summarized"
        with pytest.raises(
            MissingCaptureError, match="was not captured in phase 'train'; only statistics are stored, and there are epochs 0"
        ):
            layer.activation.samples()
        with pytest.raises(MissingCaptureError, match="only its statistics are stored"):
            run.read(layer.activation.rows.to_pylist()[0])
        with pytest.raises(MissingCaptureError, match="epoch 0 has batches 0 – 2"):
            layer.activation.stats(0, 7)
        with pytest.raises(MissingCaptureError, match="epoch 0 has batches 0, 2"):
            run["1"].activation.stats(0, 1)
        info = run.info()
        assert (info.num_captures, info.nbytes, info.statuses) == (2, 2 * 5 * 4 * 4, {"summarized": 3, "ok": 2})
        assert [(group["captures"], group["summarized"], group["gaps"]) for group in info.groups] == [(0, 3, 0), (2, 0, 0)]
        assert info.groups[0]["shapes"] == [(5, 4)]
    found = hookstore.verify(tmp_path / "run")
    assert (found.is_sound, found.num_captures, found.num_gaps) == (True, 2, 0)
    printed = CliRunner().invoke(app, ["info", str(tmp_path / "run")], env={"COLUMNS": "200"}).output
    assert "0 + 3 of statistics" in printed


def test_statistics_of_a_part_are_of_that_part(tmp_path):
    model, data = small_model(), torch.randn(5, 6)
    with recording(model, tmp_path / "run", captures=[Capture(layers="0", select={"sample": 2}), Capture(layers="0", stats="only")]):
        model(data)
    with hookstore.open(tmp_path / "run") as run:
        whole, captures = model[0](data).detach().numpy(), run["0"].activation
        assert captures.stats(0, 0) == pytest.approx(Statistics.of_record(of_tensor(whole)), rel=1e-12)
        assert captures.portion({"sample": 2}).stats(0, 0) == Statistics.of_record(of_tensor(whole[:2]))
        with pytest.raises(MissingCaptureError, match=r"\.portion\('sample\[:2\]'\) a part"):
            captures[0, 0]
        assert len(captures) == len(captures.portion({"sample": 2})) == 1


@pytest.mark.parametrize("stats", [True, False, "only"])
def test_statistics_of_scaled_gradients_are_without_the_scale(tmp_path, stats):
    model, data = small_model(), torch.randn(5, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording(model, tmp_path / "run", layers="0", kinds="gradient", stats=stats, scaler=scaler):
        scaler.scale(model(data).square().mean()).backward()
    output = model[0](data)
    output.retain_grad()
    model[1:](output).square().mean().backward()
    expected = Statistics.of_record(of_tensor(output.grad.numpy()))
    with hookstore.open(tmp_path / "run") as run:
        found, raw = run["0"].gradient.stats(0, 0), run["0"].gradient.raw.stats(0, 0)
        assert found == pytest.approx(expected, rel=1e-6)
        assert raw.l2 == pytest.approx(1024 * found.l2, rel=1e-12)
        assert raw.zeros == found.zeros
        assert run["0"].gradient.raw.statistics()["l2"].to_pylist() == [raw.l2]


def test_what_is_not_finite_is_counted_and_an_empty_tensor_has_none(tmp_path):
    model = nn.Sequential(As(torch.float32))
    data = [torch.tensor([[math.nan, math.inf, 1.0, 0.0]]), torch.full((2, 2), math.nan), torch.empty(0, 4)]
    for stats in (True, False):
        with recording(model, tmp_path / str(stats), layers="0", stats=stats):
            for one in data:
                model(one)
    for stats in (True, False):
        with hookstore.open(tmp_path / str(stats)) as run:
            mixed, nothing, empty = (run["0"].activation.stats(0, batch) for batch in range(3))
            assert (mixed.nan, mixed.inf, mixed.max, mixed.zeros) == (1, 1, 1.0, 0.25)
            assert (nothing.mean, nothing.l2, nothing.nan) == (None, 0.0, 4)
            assert (empty.mean, empty.zeros, empty.nan) == (None, None, 0)
            assert run["0"].activation.statistics()["mean"].to_pylist() == [0.5, None, None]


def test_leaves_have_statistics_of_their_own(tmp_path):
    class Two(nn.Module):
        """Returns two tensors."""

        def forward(self, inputs):
            return inputs, {"more": inputs * 2}

    model = Two()
    with recording(model, tmp_path / "run", layers="", stats=True):
        model(torch.ones(2, 3))
    with hookstore.open(tmp_path / "run") as run:
        captures = run[""].activation
        assert captures.leaves == ["0", "1.more"]
        assert captures.leaf("1.more").stats(0, 0).max == captures.stats(0, 0, leaf="1.more").max == 2
        with pytest.raises(MissingCaptureError, match="has several leaves: '0', '1.more'"):
            captures.stats(0, 0)
        assert captures.leaf("1").statistics()["max"].to_pylist() == [2]
        assert captures.statistics(leaf="0")["max"].to_pylist() == [1]
        assert sorted(captures.statistics()["max"].to_pylist()) == [1, 2]
        assert np.isclose(captures.stats(0, 0, leaf="0").l2, math.sqrt(6))
