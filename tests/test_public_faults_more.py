"""Reported faults of what is more than one tensor of one eager model: structures, shares, parameters' gradients, silent layers, compiled models, ranks."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from test_public_faults import ALL, BOTH, Call, got, linear, record
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstore


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


# A. ---------------------------------------------------------------------------------------------------------------------


class Cache:
    def __init__(self):
        self.keys = []


def test_a04_a_cache_that_grows_is_a_row_that_names_it(path):
    """MemOS#2301, transformers#37078: never what the cache held later."""

    def step(_, value, cache):
        cache.keys.append(value.clone())
        return value + 1, cache

    model = nn.ModuleList([Call(step), Call(step)])
    with pytest.warns(hookstore.CaptureWarning, match="Cache"), record(model, path, layers=["0", "1"]) as recorder:
        for _ in recorder.batches(range(3), epoch=0):
            value, cache = torch.zeros(1), Cache()
            for layer in model:
                value, cache = layer(value, cache)
    assert len(cache.keys) == 2
    with hookstore.open(path) as run:
        for layer, expected in (("0", 1.0), ("1", 2.0)):
            assert [got(run, layer, "activation", 0, batch, leaf="0") for batch in range(3)] == [[expected]] * 3
            skipped = [row for row in run[layer].activation.rows.to_pylist() if row["status"] == "skipped"]
            assert len(skipped) == 1, "once per layer"
            assert "Cache" in skipped[0]["reason"]


def test_a04_a_list_of_tensors_that_grows_is_stored_as_it_was(path):
    def step(_, value, cache):
        cache.append(value * 10)
        return value + 1, cache

    model = nn.ModuleList([Call(step), Call(step)])
    with record(model, path, layers=["0", "1"]) as recorder, recorder.at(epoch=0, batch=0):
        value, cache = torch.ones(1), []
        for layer in model:
            value, cache = layer(value, cache)
        cache[0].zero_()
        cache.clear()
    with hookstore.open(path) as run:
        lengths = [len(run[layer].activation[0, 0][1]) for layer in ("0", "1")]
        assert lengths == [1, 2]
        assert [one.tolist() for one in run["1"].activation[0, 0][1]] == [[10.0], [20.0]]


# B. ---------------------------------------------------------------------------------------------------------------------


def test_b02_the_gradient_of_an_input_that_wants_none_is_absent(path):
    model = nn.Sequential(linear([1.0, 1.0]), linear([2.0]))
    with record(model, path, kinds=("gradient", "input_gradient", "parameter_gradient")) as recorder:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in recorder.batches(range(2), epoch=0):
            (3 * model(torch.tensor([[5.0, 7.0]]))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with hookstore.open(path) as run:
        for batch in range(2):
            assert got(run, "0", "gradient", 0, batch) == [[6.0]]
            assert got(run, "1", "input_gradient", 0, batch) == [[6.0]]
            assert got(run, "0", "parameter_gradient", 0, batch) == [[30.0, 42.0]]
            with pytest.raises(hookstore.MissingCaptureError):
                run["0"].input_gradient[0, batch]


def test_b03_a_gradient_that_did_not_arrive_is_said_to_be_that(path):
    """Not zero: what is not there is an error that says what arrived."""
    model = Call(lambda self, value: (self.used(value), self.unused(value))[0], used=linear([2.0]), unused=linear([3.0]))
    with record(model, path, layers=["used", "unused"], kinds=BOTH):
        model(torch.ones(1, 1)).sum().backward()
    with hookstore.open(path) as run:
        assert got(run, "used", "gradient") == [[1.0]]
        assert got(run, "unused", "activation") == [[3.0]]
        with pytest.raises(hookstore.MissingCaptureError, match="(?i)gradient"):
            run["unused"].gradient[0, 0]


def test_b04_what_is_read_is_what_the_module_returned(path):
    def forward(self, value):
        doubled = self.layer(value)
        return {"a": doubled, "b": [doubled * 10, None, "text"]}

    model = Call(forward, layer=linear([2.0]))
    with record(model, path, layers="", kinds=BOTH):
        output = model(torch.ones(1, 1, requires_grad=True))
        (output["a"] + 3 * output["b"][0]).sum().backward()
    with hookstore.open(path) as run:
        value = run[""].activation[0, 0]
        assert list(value) == ["a", "b"]
        assert value["a"].tolist() == [[2.0]]
        assert value["b"][0].tolist() == [[20.0]]
        assert value["b"][1] is None
        assert "str" in repr(value["b"][2])
        assert [(row["leaf"], row["status"]) for row in run.manifest.to_pylist() if row["leaf"] == "b.2"] == [("b.2", "skipped")]
        assert run[""].activation.leaf("b.0")[0, 0].tolist() == [[20.0]]
        gradient = run[""].gradient[0, 0]
        assert (gradient["a"].tolist(), gradient["b"][0].tolist()) == ([[31.0]], [[3.0]])


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_c27_one_leaf_reads_alike_whatever_it_is_wrapped_in(path, form):
    """EasyEdit PR#670, transformers PR#39120: a decoder layer returns a tensor in one version and a tuple in the next."""
    forms = {"tensor": lambda value: value, "tuple": lambda value: (value,), "dict": lambda value: {"last_hidden_state": value}}
    model = Call(lambda _, value: forms[form](value * 2))
    with record(model, path, layers=""):
        model(torch.ones(2))
    with hookstore.open(path) as run:
        assert run[""].activation.get(0, 0).tolist() == [2.0, 2.0]
        value = run[""].activation[0, 0]
        (leaf,) = [value] if form == "tensor" else value.values() if form == "dict" else value
        assert leaf.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("how", ["keywords", "mixed"])
def test_b05_gradients_of_keyword_inputs(path, how):
    model = Call(lambda _, x=None, scale=None: x * scale)
    x, scale = torch.tensor([3.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)
    with record(model, path, layers="", kinds=("input", "input_gradient")):
        (model(x=x, scale=scale) if how == "keywords" else model(x, scale=scale)).backward()
    with hookstore.open(path) as run:
        first = "x" if how == "keywords" else "0"
        assert got(run, "", "input_gradient", leaf=first) == [5.0]
        assert got(run, "", "input_gradient", leaf="scale") == [3.0]


def test_b05_a_share_is_the_modules_own(path):
    """A hook on the input would give what all of its consumers add."""
    model = nn.ModuleDict({"two": linear([2.0]), "three": linear([3.0])})
    value = torch.ones(1, 1, requires_grad=True)
    with record(model, path, kinds=("input_gradient",)) as recorder, recorder.at(epoch=0, batch=0):
        (model["two"](value) + model["three"](value) + 10 * value).sum().backward()
    assert value.grad.item() == 15.0
    with hookstore.open(path) as run:
        assert got(run, "two", "input_gradient") == [[2.0]]
        assert got(run, "three", "input_gradient") == [[3.0]]


def test_b10_what_the_optimizer_sees_is_labelled_with_its_step(path):
    model = linear([1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with record(model, path, layers="", kinds=("gradient", "parameter_gradient")) as recorder:
        for batch, factor in enumerate(recorder.batches([1.0, 2.0, 3.0, 1.0, 1.0, 1.0], epoch=0)):
            (model(torch.ones(1, 1)) * factor).sum().backward()
            if batch % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    with hookstore.open(path) as run:
        assert [got(run, "", "gradient", 0, batch) for batch in range(3)] == [[[1.0]], [[2.0]], [[3.0]]]
        rows = run[""].parameter_gradient.rows.to_pylist()
        assert [(row["batch"], row["status"]) for row in rows] == [(2, "ok"), (5, "ok")]
        assert [got(run, "", "parameter_gradient", 0, batch) for batch in (2, 5)] == [[[6.0]], [[3.0]]]
        assert rows[0]["step"] + 1 == rows[1]["step"]


def test_b13_shares_under_create_graph_are_detached(path):
    model = linear([3.0])
    inputs = torch.ones(1, 1, requires_grad=True)
    with record(model, path, layers="", kinds=("gradient", "input_gradient")), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(inputs).pow(2).sum().backward(create_graph=True)
    with hookstore.open(path) as run:
        assert got(run, "", "gradient") == [[6.0]]
        assert got(run, "", "input_gradient") == [[18.0]]
    inputs.grad = model.weight.grad = None


def test_b14_a_sparse_gradient_of_a_weight_is_stored(path):
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with record(model, path, layers="", kinds="parameter_gradient"):
        (model(torch.tensor([1, 3, 1])) * torch.tensor([1.0, 10.0])).sum().backward()
        optimizer.step()
    with hookstore.open(path) as run:
        value = run[""].parameter_gradient[0, 0]
        value = value["weight"] if isinstance(value, dict) else value
        assert value.dense().tolist() == [[0.0, 0.0], [2.0, 20.0], [0.0, 0.0], [1.0, 10.0]]


@pytest.mark.parametrize("is_unscaled", [True, False])
def test_b16_a_scaled_loss(path, is_unscaled):
    """gradio trackio#261, #262."""
    model = linear([2.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with record(model, path, layers="", kinds=("gradient", "input_gradient", "parameter_gradient"), scaler=scaler) as recorder:
        for _ in recorder.batches(range(1), epoch=0):
            scaler.scale((3 * model(torch.ones(1, 1, requires_grad=True))).sum()).backward()
            assert model.weight.grad.item() == 3072.0
            if is_unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert model.weight.item() == pytest.approx(1.7)
    with hookstore.open(path) as run:
        assert got(run, "", "gradient") == [[3.0]]
        assert run[""].gradient[0, 0].dtype == np.float32
        assert run[""].gradient.raw[0, 0].tolist() == [[3072.0]]
        assert run[""].gradient.row(0, 0)["loss_scale"] == 1024.0
        assert got(run, "", "input_gradient") == [[6.0]]
        assert got(run, "", "parameter_gradient") == [[3.0]]


# C. ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "reason"),
    [("direct", "forward"), ("container", "called"), ("attention", "MultiheadAttention uses its weights"), ("branch", "called")],
)
def test_c01_a_layer_that_is_never_called_is_told_once_with_its_likely_cause(path, cause, reason):
    """mistral-inference#246, nupic.torch PR#51, pytorch#78109: selected, executed perhaps, and not one record."""
    models = {
        "direct": lambda: Call(lambda self, value: self.b(self.a.forward(value)), a=linear([2.0]), b=nn.Identity()),
        "container": lambda: Call(lambda self, value: self.b(self.a[0](value)), a=nn.Sequential(nn.Identity()), b=nn.Identity()),
        "attention": lambda: Call(
            lambda self, value: self.b(self.a(value, value, value)[0]), a=nn.MultiheadAttention(4, 2), b=nn.Identity()
        ),
        "branch": lambda: Call(lambda self, value: self.b(value), a=linear([2.0]), b=nn.Identity()),
    }
    model = models[cause]()
    silent = "a.out_proj" if cause == "attention" else "a"
    value = torch.ones(1, 3, 4) if cause == "attention" else torch.ones(1, 1)
    with warnings.catch_warnings(record=True) as caught, record(model, path, layers=[silent, "b"]) as recorder:
        warnings.simplefilter("always", hookstore.CaptureWarning)
        for _ in recorder.batches(range(3), epoch=0):
            model(value)
    assert sum(repr(silent) in str(one.message) for one in caught) == 1
    with hookstore.open(path) as run:
        assert len(run["b"].activation) == 3
        (row,) = [row for row in run.manifest.to_pylist() if row["layer"] == silent and row["status"] == "skipped"]
        assert reason in row["reason"]


def test_c01_a_layer_that_is_replaced_is_told_and_never_mixed_up(path):
    model = Call(lambda self, value: self.b(self.a(value)), a=linear([2.0]), b=nn.Identity())
    with pytest.warns(hookstore.CaptureWarning, match="replaced") as caught, record(model, path, layers=["a", "b"]) as recorder:
        for batch in recorder.batches(range(4), epoch=0):
            if batch == 1:
                model.a = linear([5.0])
            model(torch.ones(1, 1))
    assert all("'a'" in str(one.message) for one in caught)
    with hookstore.open(path) as run:
        assert [got(run, "b", "activation", 0, batch) for batch in range(4)] == [[[2.0]], [[5.0]], [[5.0]], [[5.0]]]
        assert [got(run, "a", "activation", 0, batch) for batch in (0, 2, 3)] == [[[2.0]], [[5.0]], [[5.0]]]
        rows = [row["status"] for row in run["a"].activation.rows.to_pylist() if row["batch"] == 1]
        assert rows == ["skipped"] or got(run, "a", "activation", 0, 1) == [[5.0]]


def test_c05_attention_itself_gives_its_output_and_weights(path):
    """pytorch#78109, LoRA-Torch#3."""
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    value = torch.ones(1, 3, 4)
    with record(model, path, layers="", kinds=(*BOTH, "input")):
        output, weights = model(value, value, value)
        output.sum().backward()
    assert model.out_proj.weight.grad is not None
    with hookstore.open(path) as run:
        stored = run[""].activation[0, 0]
        assert isinstance(stored, tuple)
        assert [one.shape for one in stored] == [(1, 3, 4), (1, 3, 3)]
        assert stored[0].tolist() == output.tolist()
        assert stored[1].tolist() == weights.tolist()
        assert run[""].gradient[0, 0][0].tolist() == np.ones((1, 3, 4)).tolist()
        assert run[""].gradient[0, 0][1] is None


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("when", ["recorded_first", "compiled_first", "called_first"])
def test_c06_hooks_and_compiled_models(path, when):
    """pytorch#117758, #115750, #117265, #91665: never no record in silence."""
    model = nn.Sequential(linear([2.0]), nn.ReLU())

    def step(called, value):
        called(torch.full((1, 1), value, requires_grad=True)).sum().backward()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if when == "called_first":
        step(compiled, 1.0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hookstore.CaptureWarning)
            recorder = record(model, path, layers=["0"], kinds=BOTH)
    except hookstore.UnsupportedModelError as refused:
        if when != "called_first" or "compile" not in str(refused):
            raise
        return
    if when == "recorded_first":
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with recorder:
        for value in recorder.batches([3.0, 4.0], epoch=0):
            step(compiled, value)
    with hookstore.open(path) as run:
        assert [got(run, "0", "activation", 0, batch) for batch in range(2)] == [[[6.0]], [[8.0]]]
        assert [got(run, "0", "gradient", 0, batch) for batch in range(2)] == [[[1.0]], [[1.0]]]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_c07_nothing_is_compiled_away_and_no_graph_breaks(path, backend):
    """pytorch#173452, #110765, #142358."""
    model = nn.Sequential(linear([2.0]), nn.ReLU())
    with record(model, path, layers=["0", "1"], kinds=BOTH) as recorder:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for value in recorder.batches([1.0, 2.0], epoch=0):
            assert compiled(torch.full((1, 1), value)).item() == 2 * value
    with hookstore.open(path) as run:
        assert [got(run, "0", "activation", 0, batch) for batch in range(2)] == [[[2.0]], [[4.0]]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_c08_gradients_of_recomputed_layers_come_once(path, reentrant):
    block = nn.Sequential(linear([2.0]), nn.Tanh(), linear([3.0]))
    twin = copy.deepcopy(block)
    model = Call(lambda self, value: checkpoint(self.block, value, use_reentrant=reentrant), block=block)
    value = torch.full((1, 1), 0.25, requires_grad=True)
    hidden = [twin[0](value.detach().requires_grad_())]
    hidden += [twin[1](hidden[0])]
    hidden += [twin[2](hidden[1])]
    expected = torch.autograd.grad(hidden[2].sum(), hidden)
    with record(model, path, layers="block.*", kinds=(*BOTH, "input")):
        model(value).sum().backward()
    with hookstore.open(path) as run:
        for place in range(3):
            assert got(run, f"block.{place}", "activation") == hidden[place].tolist()
            assert got(run, f"block.{place}", "gradient") == expected[place].tolist()
        assert run.manifest.num_rows == 9
        assert set(run.manifest["call"].to_pylist()) == {0}


def test_c13_a_batch_whose_forward_raises_is_marked(path):
    """Batches 0 and 2 whole; batch 1 partial, and it says so."""

    def check(_, value):
        if value.item() < 0:
            raise ArithmeticError("negative")
        return value

    model = nn.Sequential(nn.Identity(), Call(check), nn.Identity())
    with warnings.catch_warnings(), record(model, path) as recorder:
        warnings.simplefilter("ignore", hookstore.CaptureWarning)
        for value in recorder.batches([1.0, -1.0, 2.0], epoch=0):
            try:
                model(torch.tensor([value]))
            except ArithmeticError:
                assert value < 0
    with hookstore.open(path) as run:
        partial = [row["batch"] for row in run.manifest.to_pylist() if row["status"] == "partial"]
        assert partial == [1]
        assert [got(run, "2", "activation", 0, batch) for batch in (0, 2)] == [[1.0], [2.0]]


def test_c26_two_models_with_layers_of_one_name(path):
    """wandb#1639."""
    generator, discriminator = nn.Sequential(linear([2.0])), nn.Sequential(linear([10.0]))
    with hookstore.record({"generator": generator, "discriminator": discriminator}, path, kinds=BOTH, buffer_bytes=1 << 20) as recorder:
        for scale in recorder.batches([1.0, 2.0], epoch=0):
            fake = generator(torch.full((1, 1), scale))
            discriminator(fake.detach()).sum().backward()
            (3 * discriminator(fake)).sum().backward()
    with hookstore.open(path) as run:
        assert run.layers == ["generator.0", "discriminator.0"]
        for batch, scale in enumerate((1.0, 2.0)):
            assert got(run, "generator.0", "activation", 0, batch) == [[2 * scale]]
            assert [got(run, "discriminator.0", "activation", 0, batch, call) for call in range(2)] == [[[20 * scale]]] * 2
            assert got(run, "generator.0", "gradient", 0, batch) == [[30.0]]
            assert [got(run, "discriminator.0", "gradient", 0, batch, call) for call in range(2)] == [[[1.0]], [[3.0]]]


@pytest.mark.usefixtures("dynamo")
def test_c17_d11_what_stands_for_many_or_no_values_is_refused_by_name_for_every_kind(path):
    model = nn.Sequential(linear([1.0, 10.0]))
    with warnings.catch_warnings(record=True) as caught, record(model, path, kinds=(*ALL, "input_gradient")):
        warnings.simplefilter("always", hookstore.CaptureWarning)
        torch.func.vmap(torch.func.grad(lambda value: model(value).sum()))(torch.ones(3, 2))
    with hookstore.open(path) as run:
        assert {row["status"] for row in run.manifest.to_pylist() if row["kind"] != "parameter"} == {"skipped"}
    assert all("functorch" in str(one.message) for one in caught)


# G. ---------------------------------------------------------------------------------------------------------------------

RANK = """
    import sys, torch, torch.distributed as dist, hookstore
    torch.set_num_threads(1)
    rank, store, runs = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1.0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(layer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kinds = ("activation", "gradient", "parameter_gradient")
    with hookstore.record(model, f"{runs}/rank{rank}", layers=["0"], kinds=kinds, buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            (model(torch.tensor([[10.0 * (rank + 1) + batch]])) * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
"""


def test_g01_two_ranks_have_their_own_activations_and_one_gradient_of_the_parameters(tmp_path):
    """pytorch#35191, #66229, PR#60921."""
    arguments = [sys.executable, "-c", textwrap.dedent(RANK)]
    ranks = [
        subprocess.Popen([*arguments, str(rank), str(tmp_path / "store"), str(tmp_path / "runs")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in ranks:
        errors = process.communicate(timeout=100)[1]
        assert process.returncode == 0, errors
    for rank in range(2):
        with hookstore.open(tmp_path / "runs" / f"rank{rank}") as run:
            assert run.layers == ["0"]
            assert set(run.manifest["rank"].to_pylist()) == {rank}
            for batch in range(2):
                assert got(run, "0", "activation", 0, batch) == [[10.0 * (rank + 1) + batch]]
                assert got(run, "0", "gradient", 0, batch) == [[2.0]]
                assert got(run, "0", "parameter_gradient", 0, batch) == [[30.0 + 2 * batch]]
