"""Parts of tensors and statistics where the rest of the recording has its limits: loss scales, disks, buffers, modes around the forward."""

from __future__ import annotations

import functools
import os
import shutil

import pytest
import torch
from small import recording
from torch import nn
from torch.nn.functional import embedding
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookstore
from hookstore.manifest import ManifestWriter
from hookstore.portion import MOST_TEXT, Portion


def rows_of(path):
    with hookstore.open(path) as run:
        return run.manifest.to_pylist()


class Sparse(nn.Module):
    """A layer whose output gets a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Identity()
        self.weight = nn.Parameter(torch.randn(10, 3))

    def forward(self, positions):
        return embedding(positions, self.table(self.weight), sparse=True)


def test_a_loss_scale_divides_the_values_of_a_sparse_gradient_and_not_their_places(tmp_path):
    model, scaler = Sparse(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recording(model, tmp_path / "run", layers="table", kinds="gradient", stats=True, scaler=scaler):
        scaler.scale(model(torch.tensor([1, 5, 5])).sum()).backward()
    rows = {row["leaf"]: row for row in rows_of(tmp_path / "run")}
    assert (rows["indices"]["min"], rows["indices"]["max"], rows["indices"]["loss_scale"]) == (1.0, 5.0, None)
    assert (rows["values"]["min"], rows["values"]["max"], rows["values"]["loss_scale"]) == (1.0, 1.0, 1024.0)


def test_statistics_alone_take_no_room_for_tensors_on_the_disk(tmp_path):
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)])
    with recording(model, tmp_path / "run", stats="only", max_bytes=1 << 20) as recorder:  # warnings are errors
        for inputs in recorder.batches([torch.randn(2, 16)] * 10, epoch=0):
            model(inputs)
    assert len(rows_of(tmp_path / "run")) == 200


class Constant(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, _):
        return self.value


@pytest.mark.parametrize("stats", [True, "only"])
def test_the_texts_of_portions_count_among_the_bytes_of_a_run(tmp_path, monkeypatch, stats):
    model = nn.Sequential(*[Constant(torch.zeros(1, 4096)) for _ in range(8)])
    select = {1: torch.randperm(4096)[:600].tolist()}
    most, finish = 4 << 20, ManifestWriter.finish_segment
    sizes = []

    def measured(writer):
        sizes.append(sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(tmp_path) for name in names))
        finish(writer)

    monkeypatch.setattr(ManifestWriter, "finish_segment", measured)
    with (
        pytest.warns(hookstore.CaptureWarning, match="more than max_bytes"),
        recording(model, tmp_path / "run", select=select, stats=stats, batches=range(400), max_bytes=most) as recorder,
    ):
        for inputs in recorder.batches([torch.zeros(1)] * 400, epoch=0):
            model(inputs)
    assert most // 4 < max(sizes) < most


def test_a_segment_of_long_texts_becomes_a_part_before_it_is_too_long_to_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hookstore.manifest.SEGMENT_BYTES", 1 << 16)
    model = Constant(torch.zeros(1, 512))
    with recording(model, tmp_path / "run", layers="", select={1: list(range(512))[::-1]}) as recorder:
        for _ in recorder.batches(range(100), epoch=0):
            model(None)
            if recorder._clock.under_way[0].batch % 20 == 19:
                recorder.flush()
        assert len(list((tmp_path / "run" / "manifest").iterdir())) > 1
    assert len(rows_of(tmp_path / "run")) == 100
    monkeypatch.setattr("hookstore.recovery.SEGMENT_BYTES", 1 << 16)
    shutil.rmtree(tmp_path / "run" / "manifest")
    hookstore.recover(tmp_path / "run")
    assert len(list((tmp_path / "run" / "manifest").iterdir())) > 2
    assert len(rows_of(tmp_path / "run")) == 100


def test_positions_that_would_make_the_manifest_too_large_to_read_are_refused():
    assert len(Portion.build({1: range(800)}).text) < MOST_TEXT
    with pytest.raises(hookstore.OptionError, match="use slices, or a function"):
        Portion.build({1: range(2000)})


SAVED = (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten._to_copy.default)


class Checkpointed(nn.Module):
    """Keeps what some operators give, and computes the rest again."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 2048), nn.Linear(2048, 4)

    def forward(self, inputs):
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(self._run, inputs, use_reentrant=False, context_fn=contexts)

    def _run(self, inputs):
        hidden = self.wide(inputs)
        return self.narrow(hidden * hidden.sin() * 3 + hidden)

    @staticmethod
    def _policy(_context, operator, *_arguments, **_options):
        return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("stats", [False, True, "only"])
def test_captures_larger_than_the_buffer_disturb_no_selective_checkpointing(tmp_path, stats):
    model, inputs = Checkpointed(), torch.randn(32, 16)
    model(inputs).sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with recording(model, tmp_path / "run", layers="wide", stats=stats, dtype=torch.float16, buffer_bytes=64 << 10):
        model(inputs).sum().backward()
    assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(model.parameters(), expected, strict=True))


def test_an_empty_gradient_has_statistics_whatever_its_scale_lives_on(tmp_path, monkeypatch):
    monkeypatch.setattr("hookstore.sink._scale_of", lambda _: torch.empty((), device="meta"))  # as on CUDA: the host cannot have its value
    model, scaler = nn.Sequential(nn.Identity()), torch.amp.GradScaler("cpu")
    with recording(model, tmp_path / "run", kinds="gradient", stats=True, scaler=scaler):
        model(torch.empty(0, 3, requires_grad=True)).sum().backward()
    (row,) = rows_of(tmp_path / "run")
    assert (row["status"], row["shape"], row["mean"], row["l2"], row["nan"]) == ("ok", [0, 3], None, 0.0, 0)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.often, self.seldom = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, inputs, *, takes_both):
        outputs = self.often(inputs)
        return self.seldom(outputs) if takes_both else outputs


def test_a_layer_that_is_not_called_misses_what_was_due_and_no_more(tmp_path):
    model = Branching()
    captures = [
        hookstore.Capture(layers="seldom"),
        hookstore.Capture(layers="seldom", kinds=["input", "gradient"], every=4),
        hookstore.Capture(layers="seldom", kinds="parameter", phases="eval"),
    ]
    with pytest.warns(hookstore.CaptureWarning, match="0 calls"), recording(model, tmp_path / "run", captures=captures) as recorder:
        for batch, inputs in enumerate(recorder.batches([torch.randn(2, 3)] * 4, epoch=0)):
            model(inputs, takes_both=batch < 2).sum().backward()
    assert [(row["kind"], row["batch"]) for row in rows_of(tmp_path / "run") if row["status"] == "skipped"] == [("activation", 2)]


def test_axes_keep_their_names_when_a_run_is_gone_on_with(tmp_path):
    model = nn.Sequential(nn.Identity())
    with recording(model, tmp_path / "run", dims=("sample", "token", "feature")):
        model(torch.ones(2, 3, 3))
    with pytest.raises(hookstore.OptionError, match="would go on with dims") as caught:
        recording(model, tmp_path / "run", mode="a", dims=("sample", "feature", "token"))
    assert caught.value.option == "dims"
    for dims in (("sample", "token", "feature"), None):  # the run is as it was, and goes on
        with recording(model, tmp_path / "run", mode="a", dims=dims):
            model(torch.ones(2, 3, 3))
    assert len(rows_of(tmp_path / "run")) == 3


def test_statistics_alone_are_no_gaps(tmp_path):
    model = nn.Sequential(nn.Identity())
    with recording(model, tmp_path / "run", stats="only"):
        model(torch.ones(2, 3))
    found = hookstore.verify(tmp_path / "run")
    assert (found.is_sound, found.num_captures, found.num_gaps) == (True, 0, 0)


def test_a_function_that_draws_random_numbers_takes_none_from_the_training(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    inputs = torch.ones(8, 4)
    outputs = []
    for number, captures in enumerate(([], [hookstore.Capture(layers="0", select=lambda tensor: tensor[torch.randperm(8)[:2]])])):
        torch.manual_seed(3)
        with recording(model, tmp_path / str(number), captures=captures or [hookstore.Capture(layers="0")]):
            outputs.append(model(inputs))
    assert torch.equal(*outputs)


def test_an_axis_that_is_named_twice_by_its_number_from_both_ends_is_a_gap(tmp_path):
    model = nn.Sequential(nn.Identity())
    with recording(model, tmp_path / "run", captures=[hookstore.Capture(select={0: [0, 1], -2: [1, 0]})]) as recorder:
        recorder.at(epoch=0, batch=0)
        with pytest.warns(hookstore.CaptureWarning, match="names one axis twice"):
            model(torch.ones(2, 3))
        recorder.at(epoch=0, batch=1)
        model(torch.ones(2, 2, 3))
    with hookstore.open(tmp_path / "run") as run:
        assert {row["batch"]: row["status"] for row in run.manifest.to_pylist()} == {0: "skipped", 1: "ok"}


def test_functions_of_one_name_are_asked_for_by_their_texts(tmp_path):
    def first_or_last(*, is_first):
        def function(tensor):
            return tensor[:1] if is_first else tensor[-1:]

        return function

    first, last = first_or_last(is_first=True), first_or_last(is_first=False)
    model = nn.Sequential(nn.Identity())
    with recording(model, tmp_path / "run", captures=[hookstore.Capture(select=first), hookstore.Capture(select=last)]):
        model(torch.arange(4.0))
    with hookstore.open(tmp_path / "run") as run:
        captures = run["0"].activation
        with pytest.raises(hookstore.OptionError, match="several functions of that name"):
            captures.portion(last)
        assert sorted(captures.portion(text)[0, 0].item() for text in captures.portions) == [0.0, 3.0]


class _Equal:
    """Equals everything, in a way that nobody can ask for."""

    __hash__ = None

    def __eq__(self, other):
        return torch.tensor([True, False])

    def __call__(self, tensor):
        return tensor[:1]


def test_functions_are_not_compared(tmp_path):
    model = nn.Sequential(nn.Identity(), nn.Identity())
    with recording(model, tmp_path / "run", captures=[hookstore.Capture(layers=layer, select=_Equal()) for layer in "01"]):
        model(torch.arange(4.0))
    with hookstore.open(tmp_path / "run") as run:
        assert run["1"].activation[0, 0].tolist() == [0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": None}, "kinds: expected some of"),
        ({"kinds": 5}, "kinds: expected some of"),
        ({"phases": None}, "phases: expected some of"),
        ({"stats": torch.ones(2)}, "stats: expected False, True or 'only'"),
        ({"select": {"sample": torch.tensor(8.0)}}, "select: expected axes, sizes, bounds and positions as whole numbers"),
        ({"select": {"sample": [torch.tensor(1.5)]}}, "select: expected axes, sizes, bounds and positions as whole numbers"),
        ({"select": {"sample": [10**5000]}}, "select: expected axes, sizes, bounds and positions as whole numbers"),
        ({"select": {torch.tensor(1.5): 2}}, "select: expected axes, sizes, bounds and positions as whole numbers"),
        ({"dims": ("s" * 101,)}, "dims: expected names .* of at most 100 characters"),
    ],
)
def test_what_is_no_option_is_said(options, message):
    with pytest.raises(hookstore.OptionError, match=message):
        hookstore.Capture(**options)


def test_names_of_functions_may_have_any_length(tmp_path):
    def function(tensor):
        return tensor[:1]

    function.__qualname__ = "f" * 5000
    model = nn.Sequential(nn.Identity())
    with recording(model, tmp_path / "run", captures=[hookstore.Capture(select=function)]):
        model(torch.arange(4.0))
    with hookstore.open(tmp_path / "run") as run:
        assert run["0"].activation.portion(function)[0, 0].tolist() == [0.0]
    assert hookstore.verify(tmp_path / "run").is_sound
