"""Names as users wrote them, whatever is wrapped around their modules; several models in one run; modules swapped while recording; fast paths."""

from __future__ import annotations

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from small import Adapter, linear, recording
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import hookstore
from hookstore.selection import select_layers
from hookstore.wrappers import type_name, unwrap

BOTH = ("activation", "gradient")


def names(model, layers=None):
    return [layer.name for layer in select_layers(model, layers)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = linear([2.0])
        self.body = nn.Sequential(linear([3.0]), nn.ReLU())

    def forward(self, inputs):
        return self.body(self.conv1(inputs))


# Names ---------------------------------------------------------------------------------------------------------------


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "checkpoint": checkpoint_wrapper,
    "checkpoint_reentrant": lambda model: checkpoint_wrapper(model, checkpoint_impl=CheckpointImpl.REENTRANT),
    "twice": lambda model: nn.DataParallel(checkpoint_wrapper(model)),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_have_no_wrapper_in_them(wrapper):
    model = WRAPPERS[wrapper](Net())
    layers = select_layers(model, "*")
    assert [layer.name for layer in layers] == ["", "conv1", "body", "body.0", "body.1"]
    assert names(model) == ["conv1", "body.0", "body.1"]
    assert names(model, "body.*") == ["body.0", "body.1"]
    assert [type(layer.module) for layer in layers[:2]] == [Net, nn.Linear]
    full_names = [name for name, _ in model.named_modules()]
    assert [layer.aliases[-1] for layer in layers[1:]] == [
        name for name in full_names if name.rpartition(".")[2] in {"conv1", "body", "0", "1"}
    ]


@pytest.mark.parametrize("wrapper", ["DataParallel", "AveragedModel", "checkpoint", "twice"])
def test_recording_a_wrapped_model_and_calling_the_wrapper(path, wrapper):
    wrapped = WRAPPERS[wrapper](Net())
    plain = Net()
    with recording(wrapped, path, layers=["", "conv1", "body.0"], kinds=BOTH) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            wrapped(torch.ones(1, 1)).sum().backward()
    with hookstore.open(path) as run:
        assert run.layers == ["", "conv1", "body.0"]
        assert run.description["model"].endswith(".Net")
        for batch in range(2):
            assert run["conv1"].activation[0, batch].tolist() == [[2.0]]
            assert run["conv1"].gradient[0, batch].tolist() == [[3.0]]
            assert run[""].activation[0, batch].tolist() == [[6.0]]
        assert run.manifest.num_rows == 12
        full = next(name for name, module in wrapped.named_modules() if module is unwrap(wrapped).conv1)
        assert run[full].name == "conv1"
    assert torch.equal(plain(torch.ones(1, 1)), wrapped(torch.ones(1, 1)))


def test_a_wrapped_part_has_its_own_name_and_no_other(path):
    model = nn.Sequential()
    model.first = checkpoint_wrapper(Net())
    model.last = nn.Linear(1, 1)
    assert names(model) == ["first.conv1", "first.body.0", "first.body.1", "last"]
    assert names(model, "first") == ["first"]
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    assert names(model) == ["first.conv1", "first.body.0", "first.body.1", "last"]
    with recording(model, path):
        model(torch.ones(1, 1, requires_grad=True)).sum().backward()
    with hookstore.open(path) as run:
        assert run["first.conv1"].activation[0, 0].tolist() == [[2.0]]
        assert run.manifest.num_rows == 4, "each layer once"


def test_an_attribute_of_the_users_keeps_its_name():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Net()
            self._orig_mod = nn.ReLU()

    assert names(Outer(), "module.*")[0] == "module.conv1"
    assert names(Outer(), nn.ReLU) == ["module.body.1", "_orig_mod"]
    wrapped = nn.DataParallel(Outer())
    assert names(wrapped, "*")[:3] == ["", "module", "module.conv1"]
    layers = {layer.name: layer for layer in select_layers(wrapped, "*")}
    every_name = [name for layer in layers.values() for name in (layer.name, *layer.aliases)]
    assert len(every_name) == len(set(every_name)), "an alias that is another layer's name would give that layer's captures"


def test_a_subclass_of_a_wrapper_with_modules_of_its_own():
    class WithHead(nn.DataParallel):
        def __init__(self, module):
            super().__init__(module)
            self.conv1 = nn.Identity()

    assert names(WithHead(Net())) == ["module.conv1", "module.body.0", "module.body.1", "conv1"]


def test_patterns_match_names_without_wrappers_first_and_full_names_else():
    model = nn.DataParallel(Net())
    assert names(model, "module.conv1") == ["conv1"]
    assert names(model, re.compile(r"^module\.body")) == ["body", "body.0", "body.1"]
    assert names(model, nn.DataParallel) == [""]
    assert names(model, lambda name, module: not name.startswith("body") and bool(name)) == ["conv1"], "not by its other name module.body"
    with pytest.raises(hookstore.SelectionError, match="nearest names: 'conv1'"):
        select_layers(model, "conv2")


def test_data_parallel_over_several_devices_is_refused(path):
    model = nn.Sequential(nn.DataParallel(Net()))
    model[0].device_ids = [0, 1]
    with pytest.raises(hookstore.UnsupportedModelError, match="'0' is a DataParallel over 2 devices.*use DistributedDataParallel"):
        recording(model, path)
    assert not path.exists()


def test_a_list_of_modules_that_can_be_called_is_a_layer(path):
    class Chain(nn.ModuleList):
        def forward(self, inputs):
            for module in self:
                inputs = module(inputs)
            return inputs

    model = nn.Sequential(Chain([linear([2.0]), linear([5.0])]))
    assert names(model, "0") == ["0"]
    with recording(model, path, layers="0"):
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert run["0"].activation[0, 0].tolist() == [[10.0]]


# Parametrizations ----------------------------------------------------------------------------------------------------


class Doubles(nn.Module):
    def forward(self, weight):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


def test_a_parametrized_layer_is_one_layer_and_what_computes_its_weight_is_none(path):
    model = nn.Sequential()
    model.fc = linear([4.0])
    parametrize.register_parametrization(model.fc, "weight", Doubles())
    assert names(model) == ["fc"]
    assert "fc.parametrizations.weight.0" in names(model, "*")
    doubles = model.fc.parametrizations.weight[0]
    before = getattr(doubles, "num_calls", 0)
    with recording(model, path, kinds=(*BOTH, "parameter")):
        model(torch.ones(1, 1)).sum().backward()
    assert doubles.num_calls == before + 1, "recording computed the weight"
    with hookstore.open(path) as run:
        assert run["fc"].activation[0, 0].tolist() == [[4.0]]
        assert run["fc"].parameter.get(0, 0, leaf="parametrizations.weight.original").tolist() == [[2.0]]
        assert run.description["layers"][0]["module"] == "torch.nn.modules.linear.Linear"


def test_the_weight_that_a_parametrization_gives_can_be_recorded_by_name(path):
    model = nn.Sequential()
    model.fc = linear([4.0])
    parametrize.register_parametrization(model.fc, "weight", Doubles())
    with recording(model, path, layers="fc.parametrizations.weight"):
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert run["fc.parametrizations.weight"].activation[0, 0].tolist() == [[4.0]]


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal])
def test_state_of_a_parametrization_is_not_touched(path, normed):
    torch.manual_seed(1)
    model = nn.Sequential(normed(nn.Linear(3, 3)), nn.ReLU())
    plain = copy.deepcopy(model)
    inputs = torch.randn(2, 3)
    with recording(model, path, kinds=("activation", "gradient", "input", "parameter")):
        for _ in range(3):
            model(inputs).sum().backward()
    for _ in range(3):
        plain(inputs).sum().backward()
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True))
    with hookstore.open(path) as run:
        assert run.layers == ["0", "1"]
        kept = {name.removeprefix("0.") for name, _ in model.named_parameters()}
        assert set(run["0"].parameter.leaves) == kept


def test_type_names_are_those_from_before_a_class_was_changed_in_place():
    assert type_name(parametrizations.weight_norm(nn.Linear(1, 1))) == "torch.nn.modules.linear.Linear"
    assert type_name(Net()).endswith("test_wrappers.Net")


# Several models ------------------------------------------------------------------------------------------------------


def test_two_models_in_one_run(path):
    generator, discriminator = nn.Sequential(linear([2.0])), nn.Sequential(linear([10.0]))
    models = {"generator": generator, "discriminator": discriminator}
    with recording(models, path, layers="*", kinds=BOTH):
        for scale in (1.0, 3.0):
            fake = generator(torch.full((1, 1), scale))
            real = discriminator(torch.ones(1, 1))
            (discriminator(fake) - real).sum().backward()
    with hookstore.open(path) as run:
        assert run.layers == ["generator", "generator.0", "discriminator", "discriminator.0"]
        assert run.description["model"] == dict.fromkeys(models, "torch.nn.modules.container.Sequential")
        for batch, scale in enumerate((1.0, 3.0)):
            assert run["generator.0"].activation[0, batch].tolist() == [[2.0 * scale]]
            assert run["discriminator.0"].activation[0, batch].tolist() == [[10.0]]
            assert run["discriminator"].activation[0, batch, 1].tolist() == [[20.0 * scale]]
            assert run["discriminator.0"].gradient[0, batch, 0].tolist() == [[-1.0]]
            assert run["discriminator.0"].gradient[0, batch, 1].tolist() == [[1.0]]
            assert run["generator.0"].gradient[0, batch].tolist() == [[10.0]]


def test_patterns_match_the_names_with_the_models_in_front():
    models = {"g": Net(), "d": nn.DataParallel(Net())}
    assert names(models) == ["g.conv1", "g.body.0", "g.body.1", "d.conv1", "d.body.0", "d.body.1"]
    assert names(models, "d.*") == ["d.conv1", "d.body", "d.body.0", "d.body.1"]
    assert names(models, "g") == ["g"]
    assert names(models, "d.module.conv1") == ["d.conv1"]
    assert names(models, nn.ReLU) == ["g.body.1", "d.body.1"]


def test_a_model_called_before_the_one_that_moves_the_clock_counts_its_calls_on(path):
    generator, discriminator = linear([2.0]), linear([3.0])
    with recording({"generator": generator, "discriminator": discriminator}, path):
        for _ in range(2):
            discriminator(torch.ones(1, 1))
            discriminator(generator(torch.ones(1, 1)))
    with hookstore.open(path) as run:
        assert [run["discriminator"].activation.get(0, 0, call=call).item() for call in range(3)] == [3.0, 6.0, 3.0]
        assert run["discriminator"].activation.get(0, 1).item() == 6.0
        assert len(run["discriminator"].activation.rows) == 4


def test_a_part_of_another_model_does_not_move_the_clock(path):
    model = nn.Sequential(linear([2.0]), linear([5.0]))
    with recording({"part": model[0], "whole": model}, path, layers="*"):
        for scale in (1, 10):
            model(torch.full((1, 1), float(scale)))
    with hookstore.open(path) as run:
        for layer, value in (("part", 2.0), ("whole.0", 2.0), ("whole.1", 10.0), ("whole", 10.0)):
            assert [run[layer].activation.get(0, batch).item() for batch in (0, 1)] == [value, 10 * value]
            assert len(run[layer].activation.rows) == 2


def test_layers_called_after_a_loop_do_not_take_the_place_of_its_last_batch(path):
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with recording(model, path) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            model(torch.ones(1, 1))
        model[0](torch.full((1, 1), 50.0))
    with hookstore.open(path) as run:
        assert [run["0"].activation.get(0, 1, call=call).item() for call in (0, 1)] == [2.0, 100.0]


def test_a_module_of_two_models_is_one_layer_with_both_names(path):
    shared = linear([2.0])
    first, second = nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared)
    with recording({"first": first, "second": second}, path, layers=nn.Linear) as recorder, recorder.at(epoch=0, batch=0):
        first(torch.ones(1, 1))
        second(torch.full((1, 1), 5.0))
    with hookstore.open(path) as run:
        assert run.layers == ["first.0"]
        for name in ("first.0", "second.1"):
            assert [run[name].activation[0, 0, call].item() for call in range(2)] == [2.0, 10.0]


def test_phase_is_train_while_any_model_trains(path):
    first, second = linear([1.0]).eval(), linear([1.0])
    with recording({"first": first, "second": second}, path, layers="*", phases=("train", "eval")) as recorder:
        with recorder.at(epoch=0, batch=0):
            first(torch.ones(1, 1))
            second(torch.ones(1, 1))
        second.eval()
        with recorder.at(epoch=0, batch=0):
            first(torch.ones(1, 1))
            second(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert run.manifest["phase"].to_pylist() == ["train", "train", "eval", "eval"]


def test_steps_of_the_optimizers_of_all_models_count(path):
    first, second = linear([1.0]), linear([1.0])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with recording({"first": first, "second": second}, path, layers="first"):
        for optimizer in (*optimizers, None):
            first(torch.ones(1, 1)).sum().backward()
            second(torch.ones(1, 1)).sum().backward()
            if optimizer:
                optimizer.step()
    with hookstore.open(path) as run:
        assert run["first"].activation.rows["step"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("models", "error", "text"),
    [
        ({}, hookstore.OptionError, "empty mapping"),
        ({"": nn.ReLU()}, hookstore.OptionError, "names without dots"),
        ({"a.b": nn.ReLU()}, hookstore.OptionError, "'a.b'"),
        ({1: nn.ReLU()}, hookstore.OptionError, "got 1"),
        ({"a": nn.ReLU(), "b": torch.relu}, hookstore.UnsupportedModelError, "model 'b': expected a torch.nn.Module"),
        ([nn.ReLU()], hookstore.UnsupportedModelError, "got a list"),
    ],
)
def test_what_is_no_mapping_of_models_is_refused(path, models, error, text):
    with pytest.raises(error, match=re.escape(text)):
        recording(models, path)


# Modules swapped while recording -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", ["batches", "automatic"])
def test_a_module_that_takes_anothers_place_is_recorded_from_then_on(path, clock):
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with pytest.warns(hookstore.CaptureWarning, match="'0' is another module now, a Linear"), recording(model, path) as recorder:
        for batch in recorder.batches(range(4), epoch=0) if clock == "batches" else range(4):
            model(torch.ones(1, 1))
            if batch == 1:
                model[0] = linear([7.0])
    with hookstore.open(path) as run:
        assert [run["0"].activation[0, batch].item() for batch in range(4)] == [2.0, 2.0, 7.0, 7.0]
        assert set(run.manifest["status"].to_pylist()) == {"ok"}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("is_seen_by_torch", [True, False])
@pytest.mark.parametrize("clock", ["batches", "automatic"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_module_swapped_within_a_batch_is_recorded_there(path, is_seen_by_torch, clock, every):
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with pytest.warns(hookstore.CaptureWarning, match="'0' is another module now"), recording(model, path, every=every) as recorder:
        for batch in recorder.batches(range(5), epoch=0) if clock == "batches" else range(5):
            if batch == 2:
                if is_seen_by_torch:
                    model[0] = linear([7.0])
                else:
                    model._modules["0"] = linear([7.0])
            model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert [run["0"].activation[0, batch].item() for batch in (0, 2, 4)] == [2.0, 7.0, 7.0]
        assert set(run.manifest["status"].to_pylist()) == {"ok"}


def test_a_module_swapped_within_a_batch_whose_model_is_not_called_is_recorded_from_the_next(path):
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with (
        pytest.warns(hookstore.CaptureWarning, match="'0' is another module now"),
        recording(model, path) as recorder,
    ):
        for batch in recorder.batches(range(4), epoch=0):
            if batch == 1:
                model[0] = linear([7.0])
            model[1](model[0](torch.ones(1, 1)))
    with hookstore.open(path) as run:
        assert [run["0"].activation[0, batch].item() for batch in (0, 2, 3)] == [2.0, 7.0, 7.0]
        with pytest.raises(hookstore.MissingCaptureError, match="epoch 0, batch 1"):
            run["0"].activation[0, 1]


class Added(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, inputs):
        return self.base(inputs) + 100


def exchange(model):
    model[0], model[1] = model[1], model[0]


def wrap(model):
    model[0] = Added(model[0])


@pytest.mark.parametrize(
    ("change", "expected"),
    [(exchange, [5.0, 10.0]), (wrap, [102.0, 510.0]), (lambda model: model.insert(0, linear([3.0])), [3.0, 6.0])],
    ids=["exchange", "wrap", "insert"],
)
def test_names_follow_modules_that_stay_in_the_model_elsewhere(path, change, expected):
    model = nn.Sequential(linear([2.0]), linear([5.0]))
    with pytest.warns(hookstore.CaptureWarning, match="'0' is another module now"), recording(model, path) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            if batch == 1:
                change(model)
            model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        for batch, values in enumerate(([2.0, 10.0], expected, expected)):
            assert [run[layer].activation[0, batch].item() for layer in "01"] == values
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_is_wrapped_by_a_new_one_gives_its_name_to_it(path):
    model = nn.Sequential(linear([2.0]))
    with pytest.warns(hookstore.CaptureWarning, match="another module now, a Adapter"), recording(model, path, kinds=BOTH):
        model(torch.ones(1, 1)).sum().backward()
        model[0] = Adapter(model[0])
        model(torch.ones(1, 1)).sum().backward()
    with hookstore.open(path) as run:
        assert [run["0"].activation[0, batch].item() for batch in range(2)] == [2.0, 102.0]


def test_wrapping_while_recording_changes_nothing(path):
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with recording(model, path):
        model(torch.ones(1, 1))
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        parametrize.register_parametrization(unwrap(model[0]), "weight", Doubles())
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        assert [run["0"].activation[0, batch].item() for batch in range(2)] == [2.0, 2.0]


def test_aliases_that_part_are_recorded_no_more(path):
    shared = nn.ReLU()
    model = nn.Sequential(shared, nn.Identity(), shared)
    with (
        pytest.warns(hookstore.CaptureWarning, match="'0' and its aliases are no longer one module"),
        pytest.warns(hookstore.CaptureWarning, match="0 calls in train epoch 0, batch 1: '0'"),
        recording(model, path),
    ):
        model(torch.ones(1, 1))
        model[2] = nn.Tanh()
        model(torch.ones(1, 1))
    with hookstore.open(path) as run:
        rows = run["0"].activation.rows
        assert sorted(zip(rows["batch"].to_pylist(), rows["call"].to_pylist(), rows["status"].to_pylist(), strict=True)) == [
            (0, 0, "ok"),
            (0, 1, "ok"),
            (1, 0, "skipped"),
        ]


def test_modules_that_are_made_elsewhere_cost_and_change_nothing(path):
    from torch.nn.modules import module as torch_module

    model = nn.Sequential(linear([2.0]))
    before = set(torch_module._global_module_registration_hooks)
    with recording(model, path) as recorder:
        nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
        assert not recorder._hooks._names.is_stale
        model(torch.ones(1, 1))
        assert set(torch_module._global_module_registration_hooks) > before
    assert set(torch_module._global_module_registration_hooks) == before


# Fast paths ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fast_calls(monkeypatch):
    calls = []
    kernel = torch._transformer_encoder_layer_fwd

    def counted(*args, **kwargs):
        calls.append(1)
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return calls


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("layers", ["0.linear1", "0", "0.self_attn"])
def test_hooks_in_an_encoder_layer_turn_its_fast_path_off_and_that_is_said_once(path, fast_calls, layers):
    model = nn.Sequential(encoder_layer(), nn.Identity()).eval()
    inputs = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(inputs)
        assert len(fast_calls) == 1
        with (
            pytest.warns(
                hookstore.CaptureWarning, match="TransformerEncoderLayer '0' cannot take its fused fast path.*first in eval"
            ) as caught,
            recording(model, path, layers=layers, phases="eval"),
        ):
            outputs = [model(inputs) for _ in range(3)]
        assert len(caught) == 1
        assert len(fast_calls) == 1
        assert torch.equal(model(inputs), plain)
    for output in outputs:
        assert (output - plain).abs().max() <= 4e-6 * plain.abs().max()
    with hookstore.open(path) as run:
        assert run.batches(0) == [0, 1, 2]


def test_hooks_outside_an_encoder_layer_leave_the_fast_path_alone(path, fast_calls):
    model = nn.Sequential(encoder_layer(), nn.Identity()).eval()
    inputs = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(inputs)
        with recording(model, path, layers=["", "1"], phases="eval"):
            assert torch.equal(model(inputs), plain)
    assert len(fast_calls) == 2
    with hookstore.open(path) as run:
        assert np.array_equal(run["1"].activation[0, 0], plain.numpy())


@pytest.mark.parametrize("is_root", [True, False])
@pytest.mark.parametrize("clock", ["batches", "automatic"])
def test_idle_evaluation_keeps_the_fast_path(path, fast_calls, is_root, clock):
    layer = encoder_layer()
    model = layer if is_root else nn.Sequential(layer)
    inputs = torch.randn(2, 5, 16)
    with recording(model, path, layers="*linear1", kinds=BOTH) as recorder:
        for epoch in range(2):
            model.train()
            for _ in recorder.batches(range(2), epoch=epoch) if clock == "batches" else range(2):
                model(inputs).sum().backward()
            model.eval()
            with torch.no_grad():
                for _ in recorder.batches(range(2), epoch=epoch) if clock == "batches" else range(2):
                    model(inputs)
    assert len(fast_calls) == 4
    with hookstore.open(path) as run:
        assert len(run.layers) == 1
        assert len(run[run.layers[0]].activation) == 4
        assert len(run[run.layers[0]].gradient) == 4


def test_what_takes_no_fast_path_is_not_warned_about(path, fast_calls):
    odd_heads = nn.TransformerEncoderLayer(9, 3, 8, batch_first=True).eval()
    with torch.no_grad(), recording(odd_heads, path, phases="eval", layers="linear1"):
        odd_heads(torch.ones(1, 2, 9))
    trained = encoder_layer().eval()
    with recording(trained, path.with_name("grad"), phases="eval", layers="linear1"):
        trained(torch.ones(1, 2, 16)).sum().backward()
    assert not fast_calls


def test_attention_takes_its_fast_path_with_hooks_too(path):
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    inputs = torch.randn(2, 3, 8)
    with torch.no_grad():
        plain = model(inputs, inputs, inputs)
        with recording(model, path, layers="", phases="eval"):
            recorded = model(inputs, inputs, inputs)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recorded, plain, strict=True))


def test_warnings_module_is_not_left_changed(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Sequential(encoder_layer())
        with recording(model, path, layers="0.linear1"):
            model(torch.randn(1, 2, 16))
