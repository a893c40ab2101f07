"""Several captures in a run: which layers, kinds, batches and parts of tensors are recorded, and when the hooks are on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small import recording
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import hookstore
from hookstore.portion import Portion, token_of

FIRST, SECOND, THIRD = ("0", "1", "2")


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def train(model, recorder, num_batches, *, epoch=0, optimizer=None, batch_size=5):
    """Train with a clock that is set, and return what each layer returned, by batch."""
    seen = {}
    handles = [
        layer.register_forward_hook(lambda _module, _args, output, name=name: seen.setdefault(name, []).append(output.detach().clone()))
        for name, layer in model.named_children()
    ]
    for inputs in recorder.batches([torch.randn(batch_size, 4) for _ in range(num_batches)], epoch=epoch):
        if optimizer is not None:
            optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
    for handle in handles:
        handle.remove()
    return seen


def hooked(model):
    return [name for name, layer in model.named_children() if layer._forward_hooks or layer._forward_pre_hooks]


def batches_of(run, layer, kind):
    return run[layer][kind].rows["batch"].to_pylist()


def test_each_capture_has_its_own_layers_kinds_and_cadence(tmp_path):
    model = network()
    captures = [
        hookstore.Capture(layers=FIRST, every=2),
        hookstore.Capture(layers=[SECOND, THIRD], kinds=["activation", "gradient"], batches=[1, 4]),
        hookstore.Capture(layers=THIRD, kinds="input", batches=lambda batch: batch == 5),
    ]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        seen = train(model, recorder, 6)
    run = hookstore.open(tmp_path / "run")
    assert run.layers == [FIRST, SECOND, THIRD]
    assert batches_of(run, FIRST, "activation") == [0, 2, 4]
    assert batches_of(run, SECOND, "activation") == batches_of(run, THIRD, "activation") == [1, 4]
    assert sorted(batches_of(run, THIRD, "gradient")) == [1, 4]
    assert batches_of(run, THIRD, "input") == [5]
    assert run.manifest.num_rows == 3 + 2 * 2 * 2 + 1
    for layer, batch in [(FIRST, 2), (SECOND, 4), (THIRD, 1)]:
        assert np.array_equal(run[layer].activation[0, batch], seen[layer][batch].numpy())
    assert np.array_equal(run[THIRD].input[0, 5], seen[SECOND][5].numpy())


def test_layers_have_hooks_only_in_batches_in_which_something_of_them_is_due(tmp_path):
    model = network()
    captures = [hookstore.Capture(layers=FIRST, every=2), hookstore.Capture(layers=THIRD, every=3)]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        on = []
        for inputs in recorder.batches([torch.randn(2, 4) for _ in range(6)], epoch=0):
            on.append(hooked(model))
            model(inputs)
        recorder.at(epoch=1, batch=1)
        assert hooked(model) == []
    assert on == [[FIRST, THIRD], [], [FIRST], [THIRD], [FIRST], []]


def test_the_automatic_clock_puts_hooks_on_by_layer(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", captures=[hookstore.Capture(layers=FIRST, every=2), hookstore.Capture(layers=THIRD, every=3)]):
        on = []
        model.register_forward_pre_hook(lambda *_: on.append(hooked(model)))
        for _ in range(6):
            model(torch.randn(2, 4))
    run = hookstore.open(tmp_path / "run")
    assert on == [[FIRST, THIRD], [], [FIRST], [THIRD], [FIRST], []]
    assert (batches_of(run, FIRST, "activation"), batches_of(run, THIRD, "activation")) == ([0, 2, 4], [0, 3])


def test_what_two_captures_choose_is_stored_once(tmp_path):
    model = network()
    captures = [
        hookstore.Capture(layers=[FIRST, THIRD], every=2),
        hookstore.Capture(layers=THIRD, kinds=["activation", "gradient"], every=3, stats=True),
    ]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        train(model, recorder, 7)
    rows = hookstore.open(tmp_path / "run")[THIRD].activation.rows.sort_by("batch")
    assert rows["batch"].to_pylist() == [0, 2, 3, 4, 6]
    assert [value is not None for value in rows["l2"].to_pylist()] == [True, False, True, False, True]
    assert set(rows["array"].to_pylist()) == {"2/activation"}


def test_tensors_and_statistics_alone_of_the_same_layer(tmp_path):
    model = network()
    captures = [hookstore.Capture(layers=FIRST, every=4), hookstore.Capture(layers=FIRST, stats="only", every=2)]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        seen = train(model, recorder, 5)
    rows = hookstore.open(tmp_path / "run")[FIRST].activation.rows.to_pylist()
    assert [(row["batch"], row["status"]) for row in rows] in (
        [(0, "ok"), (2, "summarized"), (4, "ok")],
        [(0, "ok"), (4, "ok"), (2, "summarized")],
    )
    for row in rows:
        expected = seen[FIRST][row["batch"]].double()
        assert row["l2"] == pytest.approx(float(expected.norm()), rel=1e-12)
        assert row["mean"] == pytest.approx(float(expected.mean()), rel=1e-9)
        assert (row["nan"], row["inf"]) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "option"),
    [
        ({"dtype": torch.float16}, {}, "dtype"),
        ({}, {"codec": "zstd"}, "codec"),
        ({"dims": ("sample", "feature")}, {"dims": ("sample", "unit")}, "dims"),
        ({"dims": ("feature", "sample")}, {"select": {"sample": 1}}, "dims"),
        ({"name": "one"}, {"name": "one"}, "captures"),
    ],
)
def test_two_captures_of_one_thing_must_agree(tmp_path, first, second, option):
    with pytest.raises(hookstore.OptionError, match=option) as caught:
        recording(
            network(), tmp_path / "run", captures=[hookstore.Capture(layers=FIRST, **first), hookstore.Capture(layers=FIRST, **second)]
        )
    assert caught.value.option == option
    assert not (tmp_path / "run").exists()


def test_what_one_capture_says_of_axes_holds_for_all(tmp_path):
    """And no codec matters to statistics alone."""
    captures = [
        hookstore.Capture(layers=FIRST, stats="only"),
        hookstore.Capture(layers=FIRST, select={"sample": 2}, dims=("sample", "unit"), codec="zstd"),
        hookstore.Capture(layers=FIRST, codec="zstd", every=2),
    ]
    model = network()
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        train(model, recorder, 2)
    layers = tmp_path / "run" / "layers" / FIRST
    for name in ("activation", "activation.@sample=~2"):
        metadata = json.loads((layers / name / "zarr.json").read_text())
        assert metadata["attributes"]["dims"] == ["sample", "unit"]
        assert [codec["name"] for codec in metadata["codecs"][0]["configuration"]["codecs"]] == ["bytes", "zstd", "crc32c"]


def test_captures_of_different_forms_stand_side_by_side_where_they_are_different_things(tmp_path):
    model = network()
    captures = [
        hookstore.Capture(layers=FIRST, dtype=torch.float16, codec="zstd"),
        hookstore.Capture(layers=FIRST, select={"sample": 1}),
        hookstore.Capture(layers=THIRD),
    ]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        train(model, recorder, 1)
    rows = hookstore.open(tmp_path / "run").manifest.to_pylist()
    assert {(row["array"], row["dtype"], row["portion"]) for row in rows} == {
        ("0/activation", "float16", ""),
        ("0/activation.@sample=~1", "float32", "sample[:1]"),
        ("2/activation", "float32", ""),
    }


def test_steps_are_those_of_optimizers_before_the_batch(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recording(model, tmp_path / "run", layers=FIRST, steps=[1, 3]) as recorder:
        train(model, recorder, 5, optimizer=optimizer)
    rows = hookstore.open(tmp_path / "run").manifest
    assert list(zip(rows["batch"].to_pylist(), rows["step"].to_pylist(), strict=True)) == [(1, 1), (3, 3)]


def test_the_captures_stand_in_the_description_of_the_run(tmp_path):
    captures = [
        hookstore.Capture(layers=FIRST, every=2, epochs=range(3), name="probe"),
        hookstore.Capture(layers=THIRD, kinds="gradient", batches=[1, 2], select={1: slice(0, 2)}, stats="only", dims=("sample", "class")),
    ]
    with recording(network(), tmp_path / "run", captures=captures):
        pass
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["recorded"]
    assert recorded["kinds"] == ["activation", "gradient"]
    first, second = recorded["captures"]
    assert (first["name"], first["layers"], first["every"], first["epochs"]) == ("probe", [FIRST], 2, {"start": 0, "stop": 3, "step": 1})
    assert (second["name"], second["batches"], second["select"], second["stats"], second["dims"]) == (
        "1",
        [1, 2],
        "class[:2]",
        "only",
        ["sample", "class"],
    )


# Parts of tensors -------------------------------------------------------------------------------------------------


def every_other(tensor):
    return tensor[:, ::2]


@pytest.mark.parametrize(
    ("select", "dims", "text", "expected"),
    [
        ({"sample": 2}, None, "sample[:2]", np.s_[:2]),
        ({"sample": 99}, None, "sample[:99]", np.s_[:]),
        ({0: slice(1, None, 2)}, None, "sample[1::2]", np.s_[1::2]),
        ({-1: slice(-2, None)}, None, "-1[-2:]", np.s_[:, -2:]),
        ({1: [0, -1, 0]}, None, "1[[0,-1,0]]", np.s_[:, [0, -1, 0]]),
        ({"unit": [-1]}, ("sample", "unit"), "unit[[-1]]", np.s_[:, [-1]]),
        ({"unit": 3, "sample": [1]}, ("sample", "unit"), "unit[:3], sample[[1]]", np.s_[[1], :3]),
        ({1: range(0, 6, 3)}, None, "1[[0,3]]", np.s_[:, [0, 3]]),
        ({1: torch.tensor([4])}, None, "1[[4]]", np.s_[:, [4]]),
        ({0: slice(4, 2)}, None, "sample[4:2]", np.s_[4:2]),
        (every_other, None, "test_choosing.every_other()", np.s_[:, ::2]),
    ],
)
def test_parts_are_what_indexing_gives(tmp_path, select, dims, text, expected):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST, kinds=["activation", "gradient"], select=select, dims=dims) as recorder:
        seen = train(model, recorder, 2)
    run = hookstore.open(tmp_path / "run")
    row = run[FIRST].activation.row(0, 1)
    assert row["portion"] == text
    part = seen[FIRST][1].numpy()[expected]
    assert np.array_equal(run[FIRST].activation[0, 1], part)
    assert tuple(row["shape"]) == part.shape
    assert run[FIRST].gradient[0, 1].shape == part.shape
    if part.size:
        attributes = json.loads((tmp_path / "run" / "layers" / row["array"] / "zarr.json").read_text())["attributes"]
        assert attributes["select"] == text
        assert attributes.get("dims") == (None if dims is None else list(dims))


def test_only_the_part_moves(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST, select={"sample": 2, 1: slice(0, 3)}) as recorder:
        train(model, recorder, 4)
        assert recorder.progress.captured_bytes == 4 * 2 * 3 * 4


def test_texts_of_portions_can_be_read_back():
    for select, dims in [
        ({"sample": 8, 2: slice(1, 9, 2), -1: [3, -4]}, None),
        ({"token": [-1], "feature": slice(None, -1)}, ("sample", "token", "feature")),
    ]:
        portion = Portion.build(select, dims)
        assert Portion.parse(portion.text, dims or ()) == portion
    assert token_of("sample[:8], token[[-1]]") == "@sample=~8@token=-1"
    assert token_of("") == ""
    assert len(token_of(f"1[[{','.join(['7'] * 500)}]]")) < 40
    for nonsense in ("sample", "sample[:8", "sample[::0x]", "token[:8]", "a[:1],b[:1]", "1[[]]", "1[[1.5]]"):
        with pytest.raises(ValueError, match="names no part|no axis"):
            Portion.parse(nonsense)


class Several(nn.Module):
    """Returns tensors with and without a second axis, and a sparse one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def forward(self, inputs):
        hidden = self.inner(inputs)
        return {"hidden": hidden, "score": hidden.sum(dim=1), "sparse": torch.eye(3).to_sparse()}


def test_a_tensor_without_that_axis_is_a_gap_that_says_so(tmp_path):
    model = Several()
    with (
        pytest.warns(hookstore.CaptureWarning, match=r"select names axis '1', and the tensor has 1 dimensions"),
        recording(model, tmp_path / "run", layers="", select={1: 2}) as recorder,
    ):
        for _ in recorder.batches(range(2), epoch=0):
            model(torch.randn(5, 4))
    rows = hookstore.open(tmp_path / "run").manifest.to_pylist()
    assert [(row["leaf"], row["status"], row["portion"]) for row in rows if row["batch"] == 1] == [
        ("score", "skipped", "1[:2]"),
        ("sparse", "skipped", "1[:2]"),
        ("hidden", "ok", "1[:2]"),
    ]
    assert any("select works on tensors that are one block of numbers" in row["reason"] for row in rows)


@pytest.mark.parametrize(
    ("select", "reason"),
    [
        ({"sample": [7]}, "select wants position 7 of axis 'sample', which has 5"),
        (lambda tensor: tensor.no_such_thing, "select raised AttributeError"),
        (lambda tensor: tensor.tolist(), "select raised TypeError: it returned a list"),
    ],
)
def test_training_goes_on_where_there_is_no_such_part(tmp_path, select, reason):
    model = network()
    with (
        pytest.warns(hookstore.CaptureWarning, match="was not captured") as caught,
        recording(model, tmp_path / "run", layers=FIRST, select=select) as recorder,
    ):
        train(model, recorder, 3)
    assert len([warning for warning in caught if "was not captured" in str(warning.message)]) == 1
    rows = hookstore.open(tmp_path / "run").manifest.to_pylist()
    assert len(rows) == 3
    assert all(row["status"] == "skipped" and reason in row["reason"] for row in rows)


def test_functions_of_one_name_are_different_parts(tmp_path):
    model = network()
    captures = [hookstore.Capture(layers=FIRST, select=lambda tensor, size=size: tensor[:size]) for size in (1, 2)]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        train(model, recorder, 1)
    rows = hookstore.open(tmp_path / "run").manifest.to_pylist()
    assert sorted(tuple(row["shape"]) for row in rows) == [(1, 6), (2, 6)]
    assert len({row["portion"] for row in rows}) == len({row["array"] for row in rows}) == 2


def test_parameters_are_selected_by_number(tmp_path):
    model = network()
    with pytest.raises(hookstore.OptionError, match="have no names such as 'sample'"):
        hookstore.Capture(kinds=["activation", "parameter"], select={"sample": 1})
    with recording(model, tmp_path / "run", captures=hookstore.Capture(layers=FIRST, kinds="parameter", select={-1: [2]})) as recorder:
        train(model, recorder, 1)
    run = hookstore.open(tmp_path / "run")
    assert np.array_equal(run[FIRST].parameter[0, 0]["weight"], model[0].weight.detach().numpy()[:, [2]])


def test_selecting_disturbs_no_selective_checkpointing(tmp_path):
    """The policy would keep, and give back in the recomputation, what select computes."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs = torch.randn(5, 4, requires_grad=True)

    def policy(_context, operator, *_args, **_kwargs):
        kept = (torch.ops.aten.index_select.default, torch.ops.aten.slice.Tensor, torch.ops.aten.mm.default, torch.ops.aten.detach.default)
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients():
        model.zero_grad()
        context = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(model, inputs, use_reentrant=False, context_fn=context).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with recording(model, tmp_path / "run", layers="*", kinds=["activation", "gradient"], select={0: [1, 0], 1: slice(0, 3)}):
        found = gradients()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"select": 8},
        {"select": {}},
        {"select": {"token": 8}},
        {"select": {"sample": 0}},
        {"select": {"sample": -1}},
        {"select": {"sample": True}},
        {"select": {"sample": 1.5}},
        {"select": {"sample": "8"}},
        {"select": {"sample": []}},
        {"select": {"sample": [0.5]}},
        {"select": {"sample": [True, False]}},
        {"select": {"sample": slice(None, None, -1)}},
        {"select": {"sample": slice(0, 2.5)}},
        {"select": {"sample": 1, 0: 2}},
        {"select": {True: 1}},
        {"dims": ()},
        {"dims": ("sample", "sample")},
        {"dims": ("epoch",)},
        {"dims": ("a b",)},
        {"dims": 3},
        {"stats": "all"},
        {"stats": 1},
        {"hold": 0},
        {"hold": True},
        {"name": ""},
        {"steps": -1},
        {"dtype": torch.int8},
        {"kinds": "output"},
        {"codec": "zip"},
        {"every": 0},
    ],
    ids=str,
)
def test_bad_options_name_themselves(options):
    (option,) = options
    with pytest.raises(hookstore.OptionError, match=option) as caught:
        hookstore.Capture(**options)
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"captures": [hookstore.Capture()], "every": 2}, "every"),
        ({"captures": hookstore.Capture(), "layers": FIRST}, "layers"),
        ({"captures": []}, "captures"),
        ({"captures": ["conv1"]}, "captures"),
        ({"captures": 3}, "captures"),
    ],
)
def test_captures_are_given_in_one_way(tmp_path, options, option):
    with pytest.raises(hookstore.OptionError, match=option) as caught:
        recording(network(), tmp_path / "run", **options)
    assert caught.value.option == option


def test_what_can_be_gone_through_once_is_kept(tmp_path):
    model = network()
    capture = hookstore.Capture(layers=(name for name in [FIRST]), batches=iter([0, 2]), kinds=iter(["activation"]), phases=iter(["train"]))
    for name in "ab":
        with recording(model, tmp_path / name, captures=capture) as recorder:
            train(model, recorder, 4)
        assert batches_of(hookstore.open(tmp_path / name), FIRST, "activation") == [0, 2]


# Pauses, phases, switches ---------------------------------------------------------------------------------------------


def test_in_a_pause_nothing_is_recorded_and_no_batch_counts(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST) as recorder:
        model(torch.randn(2, 4))
        with recorder.paused():
            assert hooked(model) == []
            model(torch.randn(2, 4))
            with recorder.paused():
                model(torch.randn(2, 4))
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert batches_of(hookstore.open(tmp_path / "run"), FIRST, "activation") == [0, 1]


def test_a_clock_that_is_set_goes_on_through_a_pause(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST) as recorder:
        for batch, inputs in enumerate(recorder.batches([torch.randn(2, 4) for _ in range(4)], epoch=3)):
            if batch == 1:
                with recorder.paused():
                    for _ in recorder.batches(range(2), epoch=7):
                        model(inputs)
            model(inputs)
            if batch == 2:
                with pytest.raises(ZeroDivisionError), recorder.paused():
                    raise ZeroDivisionError
    run = hookstore.open(tmp_path / "run")
    assert (run.epochs, batches_of(run, FIRST, "activation")) == ([3], [0, 1, 2, 3])
    assert run.manifest["call"].to_pylist() == [0, 0, 0, 0]


def test_a_pause_that_a_loop_outlives(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST) as recorder:
        pause = recorder.paused()
        pause.__enter__()
        loop = iter(recorder.batches([torch.randn(2, 4) for _ in range(3)], epoch=0))
        model(next(loop))
        pause.__exit__(None, None, None)
        model(next(loop))
        model(next(loop))
        assert list(loop) == []
    assert batches_of(hookstore.open(tmp_path / "run"), FIRST, "activation") == [1, 2]


def test_a_phase_is_what_it_is_said_to_be(tmp_path):
    model = network()
    with recording(model, tmp_path / "run", layers=FIRST, phases=("train", "eval")) as recorder:
        recorder.at(epoch=0, batch=4)
        model(torch.randn(2, 4))
        with recorder.phase("eval"):
            model(torch.randn(2, 4))
            with recorder.phase("train"):
                model(torch.randn(2, 4))
        model.eval()
        model(torch.randn(2, 4))
        with pytest.raises(hookstore.ClockError, match="expected 'train' or 'eval', got 'test'"), recorder.phase("test"):
            pass
    rows = hookstore.open(tmp_path / "run").manifest
    assert sorted(zip(rows["phase"].to_pylist(), rows["call"].to_pylist(), strict=True)) == [
        ("eval", 0),
        ("eval", 1),
        ("train", 0),
        ("train", 1),
    ]


def test_captures_are_switched_while_running(tmp_path):
    model = network()
    captures = [hookstore.Capture(layers=FIRST, name="probe"), hookstore.Capture(layers=THIRD)]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        recorder.switch("probe", on=False)
        assert recorder.captures == {"probe": False, "1": True}
        on = []
        for batch, inputs in enumerate(recorder.batches([torch.randn(2, 4) for _ in range(5)], epoch=0)):
            on.append(hooked(model))
            model(inputs)
            if batch == 1:
                recorder.switch("probe", on=True)
            if batch == 2:
                recorder.switch("1", on=False)
            if batch == 3:
                recorder.switch("probe", on=False)
        with pytest.raises(hookstore.OptionError, match="there is no capture 'nothing'; there are 'probe', '1'"):
            recorder.switch("nothing", on=True)
    run = hookstore.open(tmp_path / "run")
    assert (batches_of(run, FIRST, "activation"), batches_of(run, THIRD, "activation")) == ([2, 3], [0, 1, 2])
    assert on == [[THIRD], [THIRD], [FIRST, THIRD], [FIRST], []]


def test_a_capture_that_is_switched_off_misses_no_layer(tmp_path, recwarn):
    """Layers of which nothing is due are not told of as not called."""
    model = network()
    with recording(
        model, tmp_path / "run", captures=[hookstore.Capture(layers=FIRST), hookstore.Capture(layers=THIRD, every=100)]
    ) as recorder:
        for _ in range(3):
            recorder.at(epoch=0, batch=1)
            model[0](torch.randn(2, 4))
    assert [str(warning.message) for warning in recwarn] == []


# Compiled models ------------------------------------------------------------------------------------------------------


def test_compiled_models_record_by_capture_too(tmp_path):
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    captures = [
        hookstore.Capture(layers=FIRST, every=2, select={"sample": 2}),
        hookstore.Capture(layers=[SECOND, THIRD], kinds=["input", "gradient"], every=3, stats=True),
    ]
    with recording(model, tmp_path / "run", captures=captures) as recorder:
        torch._dynamo.utils.counters.clear()
        expected = []
        for inputs in recorder.batches([torch.randn(5, 4) for _ in range(7)], epoch=0):
            compiled(inputs).square().mean().backward()
            with torch.no_grad():
                expected.append(torch.nn.functional.linear(inputs, model[0].weight, model[0].bias))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with operators, and without
    run = hookstore.open(tmp_path / "run")
    assert batches_of(run, FIRST, "activation") == [0, 2, 4, 6]
    assert set(run[FIRST].kinds) == {"activation"}
    assert (sorted(batches_of(run, THIRD, "gradient")), batches_of(run, SECOND, "input")) == ([0, 3, 6], [0, 3, 6])
    assert np.array_equal(run[FIRST].activation[0, 4], expected[4][:2].numpy())
    assert Path(tmp_path / "run" / "layers" / "0").is_dir()
    assert all(value is not None for value in run[THIRD].gradient.rows["absmax"].to_pylist())
