"""Plans: against what recordings really take, for models and from runs; what a plan leaves as it was."""

from __future__ import annotations

import json
import os
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import hookstore
from hookstore import cli, footprint, layout
from hookstore.capture import Capture
from hookstore.dimensions import is_coordinate
from hookstore.format import KINDS
from hookstore.planned import in_bytes, in_seconds
from hookstore.planning import plan
from hookstore.projection import project

pytestmark = pytest.mark.usefixtures("no_syncs", "one_thread")


class Recurrent(nn.Module):
    """Calls a layer twenty times, and one that returns two tensors of which the second leads nowhere."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)

    def forward(self, inputs):
        hidden = inputs[:, 0]
        for _ in range(20):
            hidden = torch.tanh(self.cell(hidden))
        return self.gru(inputs)[0].sum() + hidden.sum()


class Repeating(nn.Module):
    """Runs layers under reentrant checkpointing, and one whose result leads nowhere."""

    def __init__(self):
        super().__init__()
        self.first, self.dead, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, inputs):
        hidden = self.first(inputs)
        self.dead(hidden)
        return self.last(checkpoint(self.block, hidden, use_reentrant=True))


class Pyramid(nn.Module):
    """Calls its layers on maps of several sizes, some of which share an array."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, images):
        return sum(self.head(images[..., :size, :size]).sum() for size in (4, 8, 12, 16, 16, 15))


def small():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))


def train(model, path, inputs, epochs, batches, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hookstore.record(model, path, **{"buffer_bytes": 32 << 20, **options}) as recorder:
        for epoch in range(epochs):
            for batch in recorder.batches([torch.randn_like(inputs) for _ in range(batches)], epoch=epoch):
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()


def contents(path):
    """Arrays, shards, files, captures, rows with statistics alone, and bytes in whole pages."""
    files = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    num_shards = sum(
        os.path.basename(name).startswith("c.") and not is_coordinate(os.path.basename(os.path.dirname(name))) for name in files
    )
    num_arrays = sum(
        os.path.isdir(os.path.join(path, "layers", layer, name))
        for layer in os.listdir(path / "layers")
        if os.path.isdir(path / "layers" / layer)
        for name in os.listdir(path / "layers" / layer)
        if not is_coordinate(name)
    )
    with hookstore.open(path) as run:
        statuses = run.manifest["status"].to_pylist()
    return (num_arrays, num_shards, len(files), statuses.count("ok"), statuses.count("summarized")), sum(
        -(-os.path.getsize(name) // 4096) * 4096 for name in files
    )


def numbers(planned):
    return planned.num_arrays, planned.num_shards, planned.num_files, planned.num_captures, planned.num_summaries


RECORDINGS = {
    "every kind": (small, (32, 8), 2, 60, {"kinds": KINDS}),
    "large tensors": (convolutional, (4, 1, 28, 28), 2, 9, {"kinds": ["activation", "gradient"], "every": 2}),
    "a small buffer": (small, (32, 8), 2, 200, {"buffer_bytes": 1 << 20}),
    "statistics": (small, (32, 8), 2, 100, {"kinds": ["activation", "gradient"], "stats": True}),
    "statistics alone": (small, (32, 8), 1, 400, {"stats": "only"}),
    "parts, cast": (convolutional, (4, 1, 28, 28), 2, 20, {"select": {"sample": 2}, "dtype": torch.float16}),
    "calls": (Recurrent, (4, 6, 8), 2, 30, {"kinds": ["activation", "gradient", "input"], "layers": ["cell", "gru"]}),
    "calls of several shapes": (Pyramid, (2, 1, 16, 16), 2, 10, {"kinds": ["activation", "gradient", "input"]}),
    "several captures": (
        convolutional,
        (4, 1, 28, 28),
        3,
        30,
        {
            "captures": [
                Capture(layers="0", every=10),
                Capture(layers=["0", "3"], every=3, stats="only", kinds=["activation", "gradient"]),
                Capture(layers="3", batches=range(0, 30, 7), epochs=[0, 2], kinds=["activation", "parameter"]),
                Capture(layers="0", select={"sample": 1}, steps=range(5, 80, 4)),
            ]
        },
    ),
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_takes_what_was_planned_and_what_it_would_again(tmp_path, name, monkeypatch):
    monkeypatch.setattr("hookstore.writer._REGION_AGE_S", 600.0)  # pages that are not full come of time alone
    make, shape, epochs, batches, options = RECORDINGS[name]
    model, inputs, buffer_bytes = make(), torch.randn(shape), options.get("buffer_bytes", 32 << 20)
    given = {key: value for key, value in options.items() if key != "buffer_bytes"}
    planned = plan(model, inputs, epochs=epochs, batches=batches, buffer_bytes=buffer_bytes, show=False, **given)
    train(model, tmp_path / "run", inputs, epochs, batches, **options)
    found, num_bytes = contents(tmp_path / "run")
    assert numbers(planned) == found
    # (Parquet makes of numbers what it can; a writer that lags in a small buffer writes what is not full)
    about = {"rel": {"statistics alone": 0.2, "a small buffer": 0.15}.get(name, 0.02)}
    assert planned.total_bytes == pytest.approx(num_bytes, **about)
    again = project(tmp_path / "run", buffer_bytes=buffer_bytes)
    assert (again.num_epochs, again.num_batches) == (epochs, {"train": batches})
    assert numbers(again) == found
    assert again.total_bytes == pytest.approx(num_bytes, **about)
    assert not planned.is_estimated
    assert {row[:-1] for row in again.lines} == {row[:-1] for row in planned.lines}


def test_a_longer_training_is_planned_from_a_short_run(tmp_path, monkeypatch):
    monkeypatch.setattr("hookstore.writer._REGION_AGE_S", 600.0)
    model, inputs = small(), torch.randn(32, 8)
    train(model, tmp_path / "short", inputs, 1, 12, every=3, kinds=["activation", "parameter_gradient"])
    planned = project(tmp_path / "short", epochs=3, batches=100)
    train(model, tmp_path / "long", inputs, 3, 100, every=3, kinds=["activation", "parameter_gradient"])
    found, num_bytes = contents(tmp_path / "long")
    assert numbers(planned) == found
    assert planned.total_bytes == pytest.approx(num_bytes, rel=0.05)


def test_bytes_with_a_codec_are_a_bound_and_those_of_a_run_once_there_is_one(tmp_path):
    model, inputs = convolutional(), torch.zeros(4, 1, 28, 28)
    planned = plan(model, inputs, batches=10, codec="zstd", kinds=["activation"], show=False)
    with hookstore.record(model, tmp_path / "run", codec="zstd", buffer_bytes=32 << 20) as recorder:
        for batch in recorder.batches([inputs] * 10, epoch=0):
            model(batch)
    num_bytes = contents(tmp_path / "run")[1]
    assert planned.is_compressed
    assert "at most" in str(planned)
    assert planned.total_bytes > 3 * num_bytes
    again = project(tmp_path / "run")
    assert not again.is_compressed
    assert again.total_bytes == pytest.approx(num_bytes, rel=0.2)


class Changing(nn.Module):
    """Changes all that a forward can change and a plan puts back; raises where asked to."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.register_buffer("late", None)
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.register_buffer("strange", torch.tensor([float("nan"), 1.0]))
        self.must_raise = False

    def forward(self, inputs):
        self.late = inputs.detach()
        self.passing.add_(random.random() + np.random.rand())
        self.strange = torch.zeros(3)
        self.register_buffer("more", torch.ones(1), persistent=False)
        output = self.drop(self.norm(inputs))
        if self.must_raise:
            raise KeyError("asked to")
        return output


def test_a_plan_leaves_the_model_as_it_was_also_when_its_forward_raises():
    model = Changing()
    before = {name: None if tensor is None else tensor.clone() for module in model.modules() for name, tensor in module._buffers.items()}
    numbers_before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for must_raise in (False, True):
        model.must_raise = must_raise
        if must_raise:
            with pytest.raises(KeyError, match="asked to"):
                plan(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), show=False)
        else:
            planned = plan(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), show=False)
            assert planned.num_captures == 2
        after = {name: tensor for module in model.modules() for name, tensor in module._buffers.items()}
        assert list(after) == list(before)
        for name, tensor in before.items():
            assert (after[name] is None) if tensor is None else torch.equal(after[name].nan_to_num(-1), tensor.nan_to_num(-1)), name
        assert model._non_persistent_buffers_set == {"passing"}
        assert torch.equal(numbers_before[0], torch.get_rng_state())
        assert numbers_before[1] == random.getstate()
        assert all(np.array_equal(one, other) for one, other in zip(numbers_before[2], np.random.get_state(), strict=True))
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_get_back_their_memory_their_shape_and_what_is_in_views_of_them():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("resized", torch.ones(2))
            self.register_buffer("replaced", torch.randn(4))
            self.register_buffer("view", self.replaced[1:])
            self.register_buffer("expanded", torch.tensor([float("nan")]).expand(3))
            self.register_buffer("sparse", torch.eye(3).to_sparse())
            self.register_buffer("last", torch.zeros(2))

        def forward(self, inputs):
            self.resized.resize_(5).fill_(3)
            self.replaced.data = torch.zeros(7)
            self.expanded._base.zero_()
            self.sparse.mul_(2)
            self.last += 1
            return inputs

    model = Buffers()
    same, values = dict(model.named_buffers()), {name: buffer.clone() for name, buffer in model.named_buffers()}
    plan(model, torch.ones(2), layers="", show=False)
    for name, buffer in model.named_buffers():
        assert buffer is same[name]
        found, expected = (value.to_dense().nan_to_num(-1) for value in (buffer, values[name]))
        assert torch.equal(found, expected), name
    assert model.view.data_ptr() == model.replaced[1:].data_ptr()


def test_a_compiled_model_is_planned_without_compiling_it():
    def refuse(*_):
        raise AssertionError("it was compiled")

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    inside = nn.Sequential(nn.Linear(4, 4))
    inside.compile(backend=refuse)
    for one, num_layers in ((torch.compile(model, backend=refuse), 2), (inside, 1)):
        assert plan(one, torch.ones(2, 4), kinds=["activation", "gradient"], show=False).num_captures == 2 * num_layers


def test_layers_that_are_not_called_are_named_and_their_gradients_counted_where_they_come():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    model.unused = nn.Linear(2, 2)
    inputs = torch.randn(2, 3, 8)
    planned = plan(model, (inputs, inputs, inputs), layers=["*"], kinds=["activation", "gradient", "parameter_gradient"], show=False)
    text = str(planned)
    assert "layer 'out_proj' was not called in this forward: its activation, gradient cannot be known" in text
    assert "layer 'unused' was not called in this forward: its activation, gradient, parameter_gradient cannot be known" in text
    assert {tensor.leaf for tensor in planned.tensors if tensor.layer == "out_proj"} == {"weight", "bias"}
    assert [tensor.leaf for tensor in planned.tensors if (tensor.layer, tensor.kind) == ("", "gradient")] == ["0", "1"]


def test_gradients_come_only_where_the_forward_has_a_graph():
    model, inputs = small(), torch.randn(2, 8)
    assert plan(model, inputs, kinds="input_gradient", layers=["0", "2"], show=False).num_captures == 1
    assert plan(model, inputs.requires_grad_(), kinds="input_gradient", layers=["0", "2"], show=False).num_captures == 2
    with torch.no_grad():
        planned = plan(model, inputs, kinds=["gradient", "parameter_gradient"], show=False)
    assert planned.num_captures == 0
    assert "layer '0' gave nothing for gradient" in str(planned)


def test_gradients_come_where_a_backward_makes_the_graph_and_not_where_a_result_leads_nowhere(tmp_path):
    model, inputs = Repeating(), torch.randn(4, 8)
    planned = plan(model, inputs, batches=3, kinds=KINDS, show=False)
    train(model, tmp_path / "run", inputs, 1, 3, kinds=KINDS)
    assert numbers(planned) == contents(tmp_path / "run")[0]
    kinds = {layer: {tensor.kind for tensor in planned.tensors if tensor.layer == layer} for layer in ("block.0", "dead")}
    assert kinds == {"block.0": {*KINDS}, "dead": {"activation", "input", "parameter"}}
    assert "parameter_gradient (none comes to its own parameters)" in str(planned)


def test_the_gradient_of_a_view_that_is_edited_later_counts():
    class Edits(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, inputs):
            return torch.relu_(self.linear(inputs)).sum()

    assert plan(Edits(), torch.randn(2, 3, 4), kinds="gradient", layers="linear", show=False).num_captures == 1


def test_what_cannot_be_stored_is_named_and_sparse_tensors_are_counted_by_parts():
    model = nn.Linear(4, 4)
    planned = plan(model, torch.ones(2, 4), layers="", select={3: 1}, show=False)
    assert planned.num_captures == 0
    assert "activation of layer '' is not stored: select raises IndexError: select names axis '3'" in str(planned)
    model.register_forward_hook(lambda _module, _args, output: output.to_sparse())
    planned = plan(model, torch.ones(2, 4), layers="", show=False)
    assert {tensor.leaf: tensor.shape for tensor in planned.tensors} == {"indices": (2, 8), "values": (8,), "shape": (2,)}


def test_phases_are_counted_by_their_own_batches():
    model, inputs = small(), torch.randn(2, 8)
    options = {"phases": ["train", "eval"], "kinds": ["activation", "gradient"], "layers": "0", "epochs": 2, "show": False}
    planned = plan(model, inputs, batches={"train": 10, "eval": 3}, **options)
    assert {(tensor.phase, tensor.kind): tensor.num_captures for tensor in planned.tensors} == {
        ("train", "activation"): 20,
        ("train", "gradient"): 20,
        ("eval", "activation"): 6,
    }
    assert "gradients in evaluation are not counted" in planned.notes
    assert "phase 'eval' is recorded and not counted: give batches={'eval': …}" in plan(model, inputs, batches=10, **options).notes


def test_tensors_of_a_condition_are_not_counted_but_told():
    planned = plan(nn.Linear(4, 4), torch.ones(2, 4), captures=Capture(layers="", when=lambda _: True, every=10), batches=100, show=False)
    assert (planned.num_captures, planned.num_summaries) == (0, 10)
    assert planned.notes == ("capture '0' stores whole tensors while its condition holds: 64 bytes more a batch",)


def test_several_models_are_called_with_arguments_by_their_names():
    models = {"one": nn.Linear(4, 4), "other": nn.Linear(4, 2)}
    planned = plan(models, {"one": torch.ones(2, 4)}, {"other": {"input": torch.ones(3, 4)}}, show=False)
    assert {tensor.layer: tensor.shape for tensor in planned.tensors} == {"one": (2, 4), "other": (3, 2)}
    planned = plan(models, {"one": torch.ones(2, 4)}, show=False)
    assert planned.notes == ("layer 'other' was not called in this forward: its activation cannot be known and is not counted",)
    for args, kwargs in (((torch.ones(2, 4),), None), ({}, None), ({"third": torch.ones(2, 4)}, None)):
        with pytest.raises(hookstore.OptionError, match="args: expected a mapping from some of the models' names 'one', 'other'"):
            plan(models, args, kwargs)


def test_bad_arguments_are_refused(tmp_path):
    model, inputs = small(), torch.ones(2, 8)
    for options, message in (
        ({"epochs": 0}, "epochs: expected a whole number of at least 1"),
        ({"batches": {"test": 3}}, "batches: expected a number, or one for each of 'train' and 'eval'"),
        ({"buffer_bytes": 0}, "buffer_bytes: expected a whole number of bytes above 0"),
        ({"bandwidth_bytes_per_s": -1}, "bandwidth_bytes_per_s: expected bytes per second above 0"),
        ({"captures": [Capture()], "every": 2}, "every: cannot be given beside captures="),
    ):
        with pytest.raises(hookstore.OptionError, match=message):
            plan(model, inputs, show=False, **options)
    with pytest.raises(hookstore.OptionError, match="args: expected a tuple of what the model is called with"):
        plan(model, "inputs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lazy, scripted = nn.LazyLinear(3), torch.jit.script(nn.Linear(8, 8))
    with pytest.raises(hookstore.UnsupportedModelError, match="'weight' of the model is not initialized yet"):
        plan(lazy, inputs)
    with pytest.raises(hookstore.UnsupportedModelError, match="traced and scripted modules run no Python hooks"):
        plan(scripted, inputs)
    with (
        hookstore.record(model, tmp_path / "run", buffer_bytes=1 << 20),
        pytest.raises(hookstore.RecorderBusyError, match="is being recorded into"),
    ):
        plan(model[0], inputs)
    with hookstore.open(tmp_path / "run") as run:
        assert len(run.manifest) == 0
    assert plan(model, inputs, show=False).num_captures == 3


def test_the_text_warns_of_what_does_not_fit(tmp_path, capsys, monkeypatch):
    model, inputs = nn.Linear(4, 4), torch.ones(1000, 4)
    planned = plan(model, inputs, path=tmp_path / "not" / "there", batches=1000, bandwidth_bytes_per_s=1e6)
    assert capsys.readouterr().out == f"{planned}\n"
    assert planned.fits
    assert planned.holds_step
    assert planned.write_s == planned.total_bytes / 1e6
    assert "keeps up with steps of 16.1 ms" in str(planned)
    assert "WARNING" not in str(planned)
    monkeypatch.setattr(footprint, "free_bytes", lambda _path: 10**6)
    planned = plan(model, inputs, path=tmp_path, batches=1000, buffer_bytes=8192, show=False)
    assert not planned.fits
    assert not planned.holds_step
    assert f"WARNING: it does not fit: 1 MB are free at {tmp_path}" in str(planned)
    assert "WARNING: buffer_bytes=8,192 does not hold such a step" in str(planned)
    assert plan(model, inputs, show=False).fits is None


def test_the_table_is_sorted_and_ends_in_a_sum_of_what_is_not_shown():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)), nn.Linear(4, 50))
    planned = plan(model, torch.ones(2, 4), show=False)
    lines = str(planned).splitlines()
    assert lines[0].split() == ["layer", "kind", "shape", "dtype", "a", "step", "bytes", "a", "step", "captures", "in", "all"]
    assert lines[1].split()[:3] == ["60", "activation", "2×50"]
    assert lines[41].split()[:3] == ["and", "21", "more"]
    assert sum(planned.bytes_by_layer.values()) == sum(tensor.total_bytes for tensor in planned.tensors)


def test_numbers_are_written_in_units_that_suit_them():
    assert [in_bytes(number) for number in (0, 999, 999.6, 12_345, 5e9, 2e21)] == [
        "0 bytes",
        "999 bytes",
        "1 kB",
        "12.3 kB",
        "5 GB",
        "2e+03 EB",
    ]
    assert [in_seconds(seconds) for seconds in (5e-6, 0.5, 90, 1e6)] == ["5 µs", "500 ms", "90.0 s", "11.6 days"]


def test_regions_are_taken_to_be_as_large_as_they_are():
    assert (footprint._FIRST_REGION_BYTES, footprint._REGION_BYTES) == (layout._FIRST_REGION_BYTES, layout._REGION_BYTES)


# From runs --------------------------------------------------------------------------------------------------------


def forwards(model, path, places, **options):
    with hookstore.record(model, path, **{"buffer_bytes": 1 << 20, **options}) as recorder:
        for epoch, batch in places:
            with recorder.at(epoch=epoch, batch=batch):
                model(torch.randn(2, 4))


def test_only_the_last_recording_of_a_run_counts(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    forwards(model, tmp_path / "run", [(0, batch) for batch in range(10)])
    forwards(model, tmp_path / "run", [(1, batch) for batch in range(10)], layers="1", every=5, mode="a")
    planned = project(tmp_path / "run", epochs=3, batches=100)
    assert [(tensor.layer, tensor.num_captures) for tensor in planned.tensors] == [("1", 60)]


def test_what_a_callable_decided_is_estimated_by_its_share(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    forwards(model, tmp_path / "run", [(0, batch) for batch in range(40)], batches=lambda batch: batch % 4 == 3)
    planned = project(tmp_path / "run", epochs=2, batches=400)
    assert [tensor.num_captures for tensor in planned.tensors] == [200, 200]
    assert "a callable decided" in str(planned)


@pytest.mark.parametrize("num_eval", [4, 40])
def test_the_length_of_a_run_is_not_that_of_its_loop_over_other_data(tmp_path, num_eval):
    model = nn.Linear(4, 2)
    with hookstore.record(model, tmp_path / "run", phases=["train", "eval"], every=8, buffer_bytes=1 << 20) as recorder:
        for epoch in range(2):
            for mode, num_batches in ((True, 12), (False, num_eval)):
                model.train(mode)
                for _ in recorder.batches(range(num_batches), epoch=epoch):
                    model(torch.randn(2, 4))
    planned = project(tmp_path / "run")
    assert planned.num_batches == {"train": 12, "eval": num_eval}
    assert numbers(planned) == contents(tmp_path / "run")[0]


def test_a_share_is_of_the_epochs_that_the_last_recording_saw(tmp_path):
    model = nn.Linear(4, 2)
    chosen = {"batches": lambda batch: batch % 5 == 0}
    forwards(model, tmp_path / "run", [(0, batch) for batch in range(10)], **chosen)
    forwards(model, tmp_path / "run", [(8 + number // 10, number % 10) for number in range(20)], mode="a", **chosen)
    assert [tensor.num_captures for tensor in project(tmp_path / "run", epochs=100).tensors] == [200]


def test_layers_that_are_called_now_and_then_are_counted_by_their_share(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with hookstore.record(model, tmp_path / "run", buffer_bytes=1 << 20) as recorder:
        for batch in range(12):
            with recorder.at(epoch=0, batch=batch):
                model[0](torch.ones(2, 4))
                if batch % 3 == 0:
                    model[1](torch.ones(2, 4))
    planned = project(tmp_path / "run", epochs=1, batches=120)
    assert {tensor.layer: tensor.num_captures for tensor in planned.tensors} == {"0": 120, "1": 40}


def test_runs_of_older_versions_and_runs_that_talk_nonsense_are_planned_by_what_they_hold(tmp_path):
    forwards(nn.Sequential(nn.Linear(4, 4)), tmp_path / "run", [(0, batch) for batch in range(0, 40, 4)], every=4)
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    for recorded in (
        {"kinds": ["activation"], "every": 4, "phases": ["train"], "dtype": None, "codec": None},
        {"captures": [{"every": "often", "layers": 7}]},
        {"captures": "none"},
    ):
        described["recorded"] = recorded
        (tmp_path / "run" / "run.json").write_text(json.dumps(described))
        assert project(tmp_path / "run", epochs=1, batches=370).num_captures == pytest.approx(94, abs=7), recorded


def test_dropped_captures_are_counted_and_a_run_without_any_is_refused(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))
    forwards(model, tmp_path / "run", [(0, batch) for batch in range(10)], batches=range(100, 200))
    with pytest.raises(hookstore.OptionError, match="holds no captures"):
        project(tmp_path / "run")
    stage = hookstore.staging.Stager._open_region
    monkeypatch.setattr(hookstore.staging.Stager, "_open_region", lambda *args: None if where["batch"] >= 6 else stage(*args))
    where = {"batch": 0}
    with (
        pytest.warns(hookstore.CaptureWarning),
        hookstore.record(model, tmp_path / "other", buffer_bytes=1 << 20, on_full="drop") as recorder,
    ):
        for where["batch"] in range(10):
            with recorder.at(epoch=where["batch"], batch=0):
                model(torch.ones(2, 4))
    planned = project(tmp_path / "other")
    assert "4 captures of the run were dropped" in str(planned)
    assert planned.num_captures == 10


def test_a_run_that_is_being_recorded_and_nested_values_are_planned(tmp_path):
    model = nn.Sequential(nn.LSTM(4, 4))
    with hookstore.record(model, tmp_path / "run", buffer_bytes=1 << 20) as recorder:
        for batch in range(3):
            with recorder.at(epoch=0, batch=batch):
                model(torch.ones(2, 3, 4))
        recorder.flush()
        planned = project(tmp_path / "run", epochs=2, batches=30)
    assert {tensor.leaf: tensor.num_captures for tensor in planned.tensors} == {"0": 60, "1.0": 60, "1.1": 60}


def test_plan_command(tmp_path):
    forwards(nn.Sequential(nn.Linear(4, 4)), tmp_path / "run", [(0, batch) for batch in range(10)])
    arguments = ["plan", str(tmp_path / "run"), "--epochs", "3", "--batches", "100", "--path", str(tmp_path), "--bandwidth", "800"]
    found = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    for text in ("activation", "2×4", "3 epochs of 100 train batches: 300 captures", "at 800 MB/s writing takes"):
        assert text in found.output
    missing = CliRunner().invoke(cli.app, ["plan", str(tmp_path)], env={"COLUMNS": "200"})
    assert missing.exit_code == 1
    assert "NotARunError" in missing.output
