"""Values that are not one plain tensor: what is written of them, and what reading gives back."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
import tempfile
import warnings
from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import hookstore
from hookstore import nested, structure
from hookstore.assembly import Assembly
from hookstore.errors import CaptureWarning, CorruptRunError, MissingCaptureError
from hookstore.parts import take_apart

Point = namedtuple("Point", ["x", "y"])
BOTH = ("activation", "gradient")


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any = None


class Returning(nn.Module):
    """Returns its ``value``, whatever it is called with."""

    value: Any = None

    def forward(self, *_args, **_kwargs):
        return self.value() if callable(self.value) else self.value


def record(path, value, *args, kinds=("activation",), backward=None, **kwargs):
    module = Returning()
    module.value = value
    with hookstore.record(module, path, layers="", kinds=kinds, buffer_bytes=1 << 20):
        output = module(*args, **kwargs)
        if backward is not None:
            backward(output).backward()
    return hookstore.open(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def plain(value):
    """The same with lists in place of tensors and arrays."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, hookstore.Record):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32)


# Containers -----------------------------------------------------------------------------------------------------------


def test_outputs_come_back_in_the_structure_that_was_returned(path):
    """Dicts and lists never fire full backward hooks (pytorch#87540); None and text are told apart from tensors."""
    one = torch.ones(1, 1, requires_grad=True)

    def make():
        first = one * 2
        return {"a": first, "b": [first * 10, None, "txt"]}

    with record(path, make, kinds=BOTH, backward=lambda output: (output["a"] + 3 * output["b"][0]).sum()) as run:
        captures = run[""].activation
        found = captures[0, 0]
        assert type(found) is dict
        assert type(found["b"]) is list
        assert plain(found) == {"a": [[2.0]], "b": [[[20.0]], None, hookstore.NotStored("str", "it is a non-tensor of type str")]}
        assert captures.leaf("b.0")[0, 0].tolist() == [[20.0]]
        assert captures.leaf("b")[0, 0][1] is None
        assert captures.leaves == ["a", "b.0"]
        gradient = run[""].gradient[0, 0]
        assert (gradient["a"].tolist(), gradient["b"][0].tolist()) == ([[31.0]], [[3.0]])
        assert {row["leaf"]: row["reason"] for row in captures.rows.to_pylist() if row["status"] == "skipped"} == {
            "b.2": "it is a non-tensor of type str"
        }
        with pytest.raises(MissingCaptureError, match="leaf 'b.2'.* was not captured|was skipped: it is a non-tensor of type str"):
            captures.leaf("b.2")[0, 0]


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: (value,), lambda value: {"last_hidden_state": value}])
def test_one_tensor_reads_alike_however_it_is_wrapped(path, wrap):
    """A decoder layer returns a tensor in one version of a library and a tuple in the next."""
    with record(path, wrap(numbers(1, 2)), torch.ones(1)) as run:
        assert run[""].activation.get(0, 0).tolist() == [1.0, 2.0]
        assert run[""].activation.tensor(0, 0).tolist() == [1.0, 2.0]
        assert run[""].activation.samples()[:].tolist() == [1.0, 2.0]
        assert plain(run[""].activation[0, 0]) == plain(wrap(numbers(1, 2)))


def test_named_tuples_and_return_types_have_their_fields(path):
    values = (Point(numbers(1), None), torch.max(torch.tensor([[1.0, 3.0]]), dim=1), torch.Size([1, 2]))
    with record(path, values) as run:
        point, most, size = run[""].activation[0, 0]
        assert (type(point).__name__, point._fields, point.x.tolist(), point.y) == ("Point", ("x", "y"), [1.0], None)
        assert (type(most).__name__, most._fields, most.values.tolist(), most.indices.tolist()) == (
            "max",
            ("values", "indices"),
            [3.0],
            [1],
        )
        assert size == hookstore.NotStored("torch.Size", "it is a non-tensor of type torch.Size")
        assert run[""].activation.leaves == ["0.x", "1.indices", "1.values"]


def test_dataclasses_are_records(path):
    with record(path, Output(numbers(1), {"deep": (numbers(2), ())})) as run:
        found = run[""].activation[0, 0]
        assert isinstance(found, hookstore.Record)
        assert found.type_name.endswith("test_structure.Output")
        assert found.logits.tolist() == found["logits"].tolist() == found[0].tolist() == [1.0]
        assert plain(found.hidden) == {"deep": ([2.0], ())}
        assert (list(found), len(found), [item is found[position] for position, item in enumerate(found.values())]) == (
            ["logits", "hidden"],
            2,
            [True, True],
        )
        for again in (copy.copy(found), pickle.loads(pickle.dumps(found))):
            assert plain(again) == plain(found)
            assert again.type_name == found.type_name
        with pytest.raises(AttributeError, match="no field 'loss'; it has 'logits', 'hidden'"):
            _ = found.loss
        with pytest.raises(KeyError):
            found["loss"]


def test_model_outputs_of_transformers_and_their_caches(path):
    outputs = pytest.importorskip("transformers.modeling_outputs")
    caches = pytest.importorskip("transformers.cache_utils")

    def make():
        return outputs.BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=numbers(1), hidden_states=(numbers(2), numbers(3))
        ), caches.DynamicCache()

    with pytest.warns(CaptureWarning, match="DynamicCache.*said once") as caught, record(path, make) as run:
        found, cache = run[""].activation[0, 0]
        assert found.type_name == "transformers.modeling_outputs.BaseModelOutputWithPoolingAndCrossAttentions"
        assert list(found) == ["last_hidden_state", "hidden_states"]
        assert found.pooler_output is None
        assert plain(found[1]) == ([2.0], [3.0])
        assert found[0] is found.last_hidden_state
        assert cache.type_name == "transformers.cache_utils.DynamicCache"
        assert [row["reason"] for row in run.manifest.to_pylist() if row["leaf"] == "1"] == [
            "it is a non-tensor of type transformers.cache_utils.DynamicCache"
        ]
    assert len(caught) == 1


def test_keys_of_every_kind(path):
    class Color(enum.Enum):
        RED = 1

    keys = ["1.5", 1.5, 0, "0", "", None, True, (1, "a"), Color.RED, float("inf"), frozenset([1]), "a.b", "~x", -3, b"x", "ü", "\ud800"]
    with record(path, {key: numbers(position) for position, key in enumerate(keys)}) as run:
        found = run[""].activation[0, 0]
        readable = [*keys[:7], "(1, 'a')", f"{Color.RED}", float("inf"), "frozenset", *keys[11:14], "b'x'", "ü", "\ud800"]
        assert [(type(key), key) for key in found] == [(type(key), key) for key in readable]
        assert [item.item() for item in found.values()] == list(range(len(keys)))


def test_mappings_of_other_types_are_dicts(path):
    values = OrderedDict(b=numbers(1), a=UserDict(x=numbers(2)))
    with record(path, values) as run:
        found = run[""].activation[0, 0]
        assert (type(found), list(found)) == (dict, ["b", "a"])
        assert plain(found) == {"b": [1.0], "a": {"x": [2.0]}}


def test_containers_are_snapshots(path):
    """A cache that grows later must not change what was recorded before (transformers#37078)."""
    cache: list = []

    def make():
        cache.append(numbers(len(cache)))
        return cache

    module = Returning()
    module.value = make
    with hookstore.record(module, path, layers="", buffer_bytes=1 << 20):
        for _ in range(3):
            module()
    with hookstore.open(path) as run:
        assert [plain(run[""].activation[0, batch]) for batch in range(3)] == [[[0.0]], [[0.0], [1.0]], [[0.0], [1.0], [2.0]]]


def test_containers_that_hold_themselves_lie_deep_or_raise(path):
    cyclic: dict = {"x": numbers(1)}
    cyclic["self"] = [cyclic]
    deep: Any = numbers(2)
    for _ in range(30):
        deep = (deep,)

    class Raises(UserDict):
        def items(self):
            yield "seen", torch.ones(1)
            raise RuntimeError("no")

    with pytest.warns(CaptureWarning) as caught, record(path, [cyclic, deep, Raises(x=1)]) as run:
        found = run[""].activation[0, 0]
        assert plain(found[0]["x"]) == [1.0]
        assert found[0]["self"][0] == hookstore.NotStored("dict", "it holds itself")
        assert found[2].reason == "reading it raises RuntimeError"
        inner = found[1]
        while isinstance(inner, tuple):
            (inner,) = inner
        assert inner == hookstore.NotStored("tuple", "it lies more than 16 levels deep")
        assert run[""].activation.leaves == ["0.x"]
    assert len(caught) == 2, "of what lies deep, and of what raises"


def test_what_is_not_stored_has_one_row_for_each_layer_and_one_warning_for_each_type(path):
    model = nn.ModuleList([Returning(), Returning()])
    for module in model:
        module.value = (numbers(1), SimpleNamespace(), "text", 3, True, [1] * 1000, [None] * 20)
    with pytest.warns(CaptureWarning) as caught, hookstore.record(model, path, layers="*", buffer_bytes=1 << 20) as recorder:
        for _ in recorder.batches(range(3), epoch=0):
            for module in model:
                module()
    assert len(caught) == 1
    assert "types.SimpleNamespace" in str(caught[0].message)
    with hookstore.open(path) as run:
        skipped = [(row["layer"], row["leaf"], row["batch"]) for row in run.manifest.to_pylist() if row["status"] == "skipped"]
        assert sorted(skipped) == [(layer, leaf, 0) for layer in "01" for leaf in "12345"]
        for batch in range(3):
            found = run["1"].activation[0, batch]
            assert [item.type_name for item in found[1:6]] == ["types.SimpleNamespace", "str", "int", "bool", "list"]
            assert found[6] == [None] * 20


@pytest.mark.parametrize(("value", "name"), [(None, "NoneType"), ("text", "str"), ([], "list"), ((None, {}), "tuple")])
def test_a_value_without_tensors_is_told_once(path, value, name):
    module = Returning()
    module.value = value
    with (
        pytest.warns(CaptureWarning, match=f"the module returned a {name} without tensors") as caught,
        hookstore.record(module, path, layers="", buffer_bytes=1 << 20) as recorder,
    ):
        for _ in recorder.batches(range(3), epoch=0):
            module()
    assert len(caught) == 1
    with hookstore.open(path) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"]
        for batch in range(3):
            with pytest.raises(MissingCaptureError, match=f"the module returned a {name} without tensors"):
                run[""].activation[0, batch]


def test_modules_and_strings_of_tensors_are_not_looked_into(path):
    layer = nn.Linear(2, 2)
    with pytest.warns(CaptureWarning) as caught, record(path, [numbers(1), layer, {torch.ones(1)}, iter([torch.ones(1)])]) as run:
        assert run[""].activation.leaves == ["0"]
        assert [item.type_name for item in run[""].activation[0, 0][1:]] == ["torch.nn.modules.linear.Linear", "set", "list_iterator"]
    assert len(caught) == 3


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_keyword_inputs(path):
    """Keyword inputs are invisible to plain hooks (pytorch#35643)."""
    with record(path, torch.ones(1), kinds=("input",), x=numbers(3), scale=numbers(5)) as run:
        found = run[""].input[0, 0]
        assert isinstance(found, hookstore.Arguments)
        assert plain(found) == ((), {"x": [3.0], "scale": [5.0]})
        assert run[""].input.leaf("scale")[0, 0].tolist() == [5.0]


@pytest.mark.parametrize(
    ("args", "kwargs", "leaves", "expected"),
    [
        ((numbers(1),), {}, [""], [1.0]),
        ((numbers(1),), {"mask": None}, [""], (([1.0],), {"mask": None})),
        (((numbers(1), numbers(2)),), {}, ["0", "1"], ([1.0], [2.0])),
        ((numbers(1), numbers(2)), {}, ["0", "1"], (([1.0], [2.0]), {})),
        ((numbers(1), None), {"mask": [numbers(2)]}, ["0", "mask.0"], (([1.0], None), {"mask": [[2.0]]})),
    ],
)
def test_inputs_say_which_were_positional(path, args, kwargs, leaves, expected):
    with record(path, torch.ones(1), *args, kinds=("input",), **kwargs) as run:
        assert run[""].input.leaves == leaves
        assert plain(run[""].input[0, 0]) == expected


def test_inputs_without_tensors_and_no_inputs(path):
    with pytest.warns(CaptureWarning, match="called without tensors"):
        record(path, torch.ones(1), "text", kinds=("input",)).close()
    record(path.with_name("other"), torch.ones(1), kinds=("input", "activation")).close()


# Gradients ------------------------------------------------------------------------------------------------------------


def test_gradients_stand_where_their_outputs_stood(path):
    leaf = torch.ones(2, requires_grad=True)

    def make():
        return {"used": leaf * 2, "pair": (leaf * 3, torch.arange(2)), "none": None}

    with record(path, make, kinds=BOTH, backward=lambda output: (output["used"] * numbers(1, 5)).sum()) as run:
        found = run[""].gradient[0, 0]
        assert plain(found) == {"used": [1.0, 5.0], "pair": (None, None), "none": None}
        assert run[""].gradient.get(0, 0).tolist() == [1.0, 5.0]
        with pytest.raises(MissingCaptureError, match="leaf 'pair.0' was not captured"):
            run[""].gradient.leaf("pair.0")[0, 0]


def test_several_backwards_over_one_forward(path):
    leaf = torch.ones(1, requires_grad=True)
    module = Returning()
    module.value = lambda: (leaf * 2, leaf * 3)
    with hookstore.record(module, path, layers="", kinds="gradient", buffer_bytes=1 << 20):
        first, second = module()
        (first + second).sum().backward(retain_graph=True)
        (5 * first).sum().backward()
    with hookstore.open(path) as run:
        with pytest.warns(CaptureWarning, match="captured 2 times"):
            assert plain(run[""].gradient[0, 0]) == ([5.0], None)
        assert plain(run[""].gradient.value(0, 0, backward=0)) == ([1.0], [1.0])
        assert plain(run[""].gradient.value(0, 0, backward=1)) == ([5.0], None)
        with pytest.raises(MissingCaptureError, match="backward 2 was not captured"):
            run[""].gradient.value(0, 0, backward=2)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_gradient_that_is_sparse_where_the_output_was_dense(path, is_plain):
    """As of the weight of a sparse embedding; index 1 comes twice (wandb#305)."""

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 2))

        def forward(self):
            return self.weight if is_plain else (self.weight, numbers(1))

    model = Weight()
    with hookstore.record(model, path, layers="", kinds=BOTH, buffer_bytes=1 << 20):
        output = model()
        weight = output if is_plain else output[0]
        (nn.functional.embedding(torch.tensor([1, 3, 1]), weight, sparse=True) * numbers(1, 10)).sum().backward()
    with hookstore.open(path) as run:
        found = run[""].gradient[0, 0]
        assert is_plain or found[1] is None
        sparse = found if is_plain else found[0]
        assert sparse.dense().tolist() == [[0.0, 0.0], [2.0, 20.0], [0.0, 0.0], [1.0, 10.0]]
        assert sparse.parts["indices"].tolist() == [[1, 3, 1]]
        assert plain(run[""].activation[0, 0] if is_plain else run[""].activation[0, 0][0]) == [[0.0, 0.0]] * 4


# Special tensors ------------------------------------------------------------------------------------------------------


def sixteen():
    return torch.arange(16.0).reshape(4, 4)


SPARSE = {
    "coo": lambda: sixteen().to_sparse(),
    "hybrid": lambda: sixteen().reshape(2, 2, 4).to_sparse(1),
    "csr": lambda: sixteen().to_sparse_csr(),
    "csc": lambda: sixteen().to_sparse_csc(),
    "bsr": lambda: sixteen().to_sparse_bsr((2, 2)),
    "bsc": lambda: sixteen().to_sparse_bsc((2, 1)),
    "batched csr": lambda: torch.stack([sixteen(), sixteen().flip(0)]).to_sparse_csr(),
    "empty": lambda: torch.zeros(3, 2).to_sparse(),
    "bfloat16": lambda: sixteen().bfloat16().to_sparse(),
    "complex": lambda: torch.complex(sixteen(), -sixteen()).to_sparse(),
}


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": (value, numbers(1))}])
def test_sparse_tensors(path, kind, wrap):
    tensor = quiet(SPARSE[kind])
    with record(path, wrap(tensor)) as run:
        captures = run[""].activation if type(wrap(1)) is int else run[""].activation.leaf("a.0")
        found = captures[0, 0]
        assert isinstance(found, hookstore.SparseArray)
        assert found.layout == str(tensor.layout).removeprefix("torch.")
        assert found.shape == tuple(tensor.shape)
        expected = tensor.to_dense()
        expected = expected.float().numpy().astype(ml_dtypes.bfloat16) if kind == "bfloat16" else expected.numpy()
        assert np.array_equal(found.dense(), expected)
        again = quiet(lambda: captures.value(0, 0, torch=True))
        assert again.layout == tensor.layout
        assert again.dtype == tensor.dtype
        assert torch.equal(again.to_dense(), tensor.to_dense())


def test_a_sparse_tensor_is_stored_as_it_is(path):
    """Not coalesced: that would be a computation of ours."""
    tensor = torch.sparse_coo_tensor([[1, 0, 1]], [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]], (3, 2), check_invariants=True)
    with record(path, [tensor]) as run:
        (found,) = run[""].activation[0, 0]
        assert not found.is_coalesced
        assert found.parts["indices"].tolist() == [[1, 0, 1]]
        assert found.values.tolist() == [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]
        assert found.dense().tolist() == [[3.0, 4.0], [11.0, 22.0], [0.0, 0.0]]
        assert run[""].activation.leaves == ["0.indices", "0.shape", "0.values"]
        assert run[""].activation.leaf("0.values")[0, 0].tolist() == [[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]
        (again,) = run[""].activation.value(0, 0, torch=True)
        assert not again.is_coalesced()
        assert torch.equal(again._indices(), tensor._indices())


NESTED = {
    "strided": lambda one, two: torch.nested.nested_tensor([one, two]),
    "transposed": lambda one, two: torch.nested.nested_tensor([one, two]).transpose(1, 2),
    "jagged": lambda one, two: torch.nested.nested_tensor([one, two], layout=torch.jagged),
    "jagged transposed": lambda one, two: torch.nested.nested_tensor([one, two], layout=torch.jagged).transpose(1, 2),
    "with lengths": lambda one, _: torch.nested.narrow(
        torch.stack([one[:2], one[:2]]), 1, torch.tensor([0, 1]), torch.tensor([2, 1]), layout=torch.jagged
    ),
}


@pytest.mark.parametrize("kind", NESTED)
def test_nested_tensors(path, kind):
    tensor = quiet(lambda: NESTED[kind](torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)))
    pieces = [piece.tolist() for piece in tensor.unbind()]
    with record(path, (tensor,)) as run:
        (found,) = run[""].activation[0, 0]
        assert isinstance(found, hookstore.NestedArray)
        assert [piece.tolist() for piece in found] == pieces
        assert (len(found), found[1].tolist(), found.layout) == (2, pieces[1], str(tensor.layout).removeprefix("torch."))
        (again,) = run[""].activation.value(0, 0, torch=True)
        assert again.layout == tensor.layout
        assert [piece.tolist() for piece in again.unbind()] == pieces


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_gradients_of_nested_tensors(path, layout):
    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    other = torch.ones(1, 3, requires_grad=True)

    def make():
        return torch.nested.as_nested_tensor([leaf, other], layout=layout) * 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = record(path, make, kinds=BOTH, backward=lambda output: sum((piece * 3).sum() for piece in output.unbind()))
    with run:
        assert [piece.tolist() for piece in run[""].activation[0, 0]] == [[[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]], [[2.0] * 3]]
        assert [piece.tolist() for piece in run[""].gradient[0, 0]] == [[[3.0] * 3] * 2, [[3.0] * 3]]
    assert leaf.grad.tolist() == [[6.0] * 3] * 2


QUANTIZED = {
    "tensor": lambda values: torch.quantize_per_tensor(values, 0.1, 3, torch.quint8),
    "channel": lambda values: torch.quantize_per_channel(values, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8),
    "int32": lambda values: torch.quantize_per_tensor(values, 1e-3, 0, torch.qint32),
}


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_quantized_tensors(path, kind, dtype):
    tensor = quiet(lambda: QUANTIZED[kind](torch.tensor([[1.0, -2.0, 0.3], [7.0, 0.0, -0.25]])))
    module = Returning()
    module.value = {"q": tensor}
    with hookstore.record(module, path, layers="", dtype=dtype, buffer_bytes=1 << 20):
        module()
    with hookstore.open(path) as run:
        found = run[""].activation[0, 0]["q"]
        assert isinstance(found, hookstore.QuantizedArray)
        assert (found.dtype, found.shape) == (str(tensor.dtype).removeprefix("torch."), (2, 3))
        assert np.array_equal(found.int_repr, tensor.int_repr().numpy())
        assert np.array_equal(found.dequantized(), tensor.dequantize().numpy())
        again = run[""].activation.value(0, 0, torch=True)["q"]
        assert again.qscheme() == tensor.qscheme()
        assert torch.equal(again.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("sorted_already", [True, False])
def test_packed_sequences(path, sorted_already):
    leaf = torch.arange(4.0).reshape(4, 1).requires_grad_()
    sequences = [leaf[:3], leaf[3:]] if sorted_already else [leaf[3:], leaf[:3]]

    def make():
        return pack_sequence(sequences, enforce_sorted=sorted_already), [numbers(1)]

    with record(path, make, kinds=BOTH, backward=lambda output: (output[0].data * 2).sum()) as run:
        packed, rest = run[""].activation[0, 0]
        expected = pack_sequence(sequences, enforce_sorted=sorted_already)
        assert isinstance(packed, hookstore.PackedSequence)
        assert packed.data.tolist() == expected.data.tolist()
        assert packed.batch_sizes.tolist() == [2, 1, 1]
        assert plain(packed.sorted_indices) == (None if sorted_already else [1, 0])
        assert plain(rest) == [[1.0]]
        again = run[""].activation.leaf("0").value(0, 0, torch=True)
        assert type(again) is nn.utils.rnn.PackedSequence
        unpacked = zip(nn.utils.rnn.unpack_sequence(again), sequences, strict=True)
        assert all(torch.equal(found, sequence) for found, sequence in unpacked)
        gradient = run[""].gradient.value(0, 0, torch=True)[0]
        assert (gradient.data.tolist(), gradient.batch_sizes) == ([[2.0]] * 4, None)


def test_an_lstm_over_packed_sequences(path):
    model = nn.LSTM(2, 3)
    packed = pack_sequence([torch.randn(3, 2), torch.randn(1, 2)])
    expected, (hidden, cell) = model(packed)
    with hookstore.record(model, path, layers="", kinds=("activation", "input"), buffer_bytes=1 << 20):
        model(packed)
    with hookstore.open(path) as run:
        found, (found_hidden, found_cell) = run[""].activation.value(0, 0, torch=True)
        assert torch.equal(found.data, expected.data)
        assert torch.equal(found_hidden, hidden)
        assert torch.equal(found_cell, cell)
        assert torch.equal(run[""].input.value(0, 0, torch=True).data, packed.data)


def test_tensors_that_are_not_stored_stand_in_the_value_with_their_reason(path):
    values = [numbers(1), torch.ones(2, device="meta"), torch.ones(2, 2).to_mkldnn(), torch.ones(2, 2).to_sparse().to("meta")]
    with pytest.warns(CaptureWarning, match="meta device"), record(path, values) as run:
        found = run[""].activation[0, 0]
        assert [getattr(item, "reason", "") for item in found[1:]] == [
            "it is on the meta device and has no values",
            "its layout is torch._mkldnn, not strided",
            "it is on the meta device and has no values",
        ]
        with pytest.raises(MissingCaptureError, match="was skipped: it is on the meta device"):
            run[""].activation.leaf("1")[0, 0]


def test_special_tensors_among_calls_batches_and_dtypes(path):
    module = Returning()
    with hookstore.record(module, path, layers="", buffer_bytes=1 << 20, dtype=torch.float16) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            for call in range(2):
                number = batch * 10 + call + 0.1
                module.value = (torch.diag(numbers(*range(batch + 1)) + number).to_sparse(), number * torch.ones(2))
                module()
    with hookstore.open(path) as run:
        for batch in range(3):
            for call in range(2):
                sparse, dense = run[""].activation[0, batch, call]
                number = batch * 10 + call + 0.1
                assert np.array_equal(
                    sparse.dense(), np.diag((np.arange(batch + 1, dtype=np.float32) + np.float32(number)).astype(np.float16))
                )
                assert dense.tolist() == [np.float16(np.float32(number))] * 2
        assert set(run.manifest["dtype"].to_pylist()) == {"float16", "int64"}


def test_dispatch_modes_and_default_devices_do_not_see_how_tensors_come_apart(path):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    values = [quiet(SPARSE["coo"]), quiet(SPARSE["csr"]), quiet(lambda: QUANTIZED["tensor"](torch.ones(2, 2)))]
    values.append(quiet(lambda: NESTED["strided"](torch.ones(1, 3), torch.ones(2, 3))))
    module = Returning()
    module.value = values
    with hookstore.record(module, path, layers="", buffer_bytes=1 << 20), Counts(), torch.device("meta"):
        module()
    assert [name for name in Counts.seen if "detach" not in name] == []
    with hookstore.open(path) as run:
        assert [type(item).__name__ for item in run[""].activation[0, 0]] == ["SparseArray", "SparseArray", "QuantizedArray", "NestedArray"]


def test_tensors_spread_over_processes(path):
    """The local tensor is stored, with what it is a part of: never the full one, which is a collective."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
        spread = DTensor.from_local(numbers(1, 2).requires_grad_(), mesh, [Shard(0)])
        run = record(path, lambda: {"x": spread * 2, "y": numbers(3)}, kinds=BOTH, backward=lambda output: output["x"].sum() * 5)
        with run:
            assert plain(run[""].activation[0, 0]) == {"x": [2.0, 4.0], "y": [3.0]}
            assert plain(run[""].gradient[0, 0]) == {"x": [5.0, 5.0], "y": None}
            text = run[""].activation.row(0, 0, leaf="x")["structure"]
            assert json.loads(text)[2:] == ["x", ["dtensor", {"placements": ["S(0)"], "mesh": [1], "names": ["data"]}, "tensor"]]
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_is_still_on_its_way(path):
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record(path, lambda: [collectives.all_reduce(numbers(1, 2), "sum", dist.group.WORLD)]) as run:
            assert plain(run[""].activation[0, 0]) == [[1.0, 2.0]]
    finally:
        dist.destroy_process_group()


def test_tensors_of_symbolic_shape_are_skipped(path):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = [mode.from_tensor(torch.ones(7, 3)), torch.ones(2)]
    with pytest.warns(CaptureWarning, match="FakeTensor"), record(path, fake) as run:
        assert run.manifest["status"].to_pylist() == ["skipped"] * 2


def test_scaled_gradients_are_divided_wherever_they_stand(path):
    leaf = torch.ones(2, requires_grad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module = Returning()
    module.value = lambda: (leaf * 2, [leaf * 3])
    with hookstore.record(module, path, layers="", kinds="gradient", scaler=scaler, buffer_bytes=1 << 20):
        first, (second,) = module()
        scaler.scale((first + 5 * second).sum()).backward()
    with hookstore.open(path) as run:
        for as_torch in (False, True):
            assert plain(run[""].gradient.value(0, 0, torch=as_torch)) == ([1.0, 1.0], [[5.0, 5.0]])
            assert plain(run[""].gradient.raw.value(0, 0, torch=as_torch)) == ([1024.0] * 2, [[5120.0] * 2])
        assert plain(run[""].gradient.raw.leaf("1")[0, 0]) == plain(run[""].gradient.leaf("1").raw[0, 0]) == [[5120.0] * 2]


# What reading does with gaps --------------------------------------------------------------------------------------------


def rows_of(*rows):
    text = '["tuple",["tensor",["list",["tensor",null]]]]'
    usual = {"leaf": "0", "status": "ok", "reason": "", "backward": 0, "structure": text, "value": None}
    return [{**usual, **row} for row in rows]


def assemble(rows, **options):
    options = {"as_torch": False, "may_be_absent": None, **options}
    return Assembly(rows, "run: this", {"layer": "a", "kind": "activation"}, lambda row: row["value"], **options)


def test_dropped_and_missing_leaves_raise_and_skipped_ones_stand_there():
    whole = assemble(rows_of({"value": 1}, {"leaf": "1.0", "value": 2}))
    assert whole.value(whole.whole) == (1, [2, None])
    for status, expected in (("dropped", "was dropped: full"), ("lost", "was lost: full")):
        gap = assemble(rows_of({"value": 1}, {"leaf": "1.0", "status": status, "reason": "full"}))
        with pytest.raises(MissingCaptureError, match=f"leaf '1.0' of run: this {expected}") as caught:
            gap.value(gap.whole)
        assert (caught.value.status, caught.value.layer) == (status, "a")
    skipped = assemble(rows_of({"value": 1}, {"leaf": "1.0", "status": "skipped", "reason": "odd"}))
    assert skipped.value(skipped.whole) == (1, [hookstore.NotStored("torch.Tensor", "odd"), None])
    missing = assemble(rows_of({"value": 1}))
    with pytest.raises(MissingCaptureError, match="leaf '1.0' of run: this has no row"):
        missing.value(missing.whole)
    absent = assemble(rows_of({"value": 1}), may_be_absent="")
    assert absent.value(absent.whole) == (1, [None, None])
    unsure = assemble(rows_of({"value": 1}), may_be_absent="its batch was partial: killed")
    assert unsure.value(unsure.whole) == (1, [hookstore.NotStored("torch.Tensor", "its batch was partial: killed"), None])


def test_a_part_that_was_dropped_raises():
    text = '["at",null,"",["sparse_coo",{"coalesced":true}]]'
    rows = rows_of(*({"leaf": name, "structure": text, "value": np.ones(1)} for name in ("indices", "values")))
    with pytest.raises(MissingCaptureError, match="leaf 'shape' of run: this has no row"):
        assemble(rows).tensor("")
    dropped = rows_of({"leaf": "shape", "structure": text, "status": "dropped", "reason": "full"})
    with pytest.raises(MissingCaptureError, match="leaf '' of run: this was dropped: full"):
        assemble(rows + dropped).tensor("")


def test_all_leaves_are_of_one_attempt(path):
    module = Returning()
    for attempt, value in enumerate([{"a": numbers(0), "b": numbers(1)}, {"a": numbers(2)}, (numbers(3), numbers(4))]):
        module.value = value
        with hookstore.record(module, path, layers="", mode="a", buffer_bytes=1 << 20) as recorder, recorder.at(epoch=0, batch=0):
            module()
        with hookstore.open(path) as run:
            assert plain(run[""].activation[0, 0]) == plain(value)
            assert plain(run[""].activation.value(0, 0, attempt=attempt)) == plain(value)
            assert plain(run[""].activation.value(0, 0, attempt=0)) == {"a": [0.0], "b": [1.0]}


def test_the_clock_at_one_place_twice_gives_the_last_structure(path):
    module = Returning()
    with hookstore.record(module, path, layers="", buffer_bytes=1 << 20) as recorder:
        for value in ((numbers(1), numbers(2)), {0: numbers(3), "x": numbers(4)}):
            module.value = value
            with recorder.at(epoch=0, batch=0):
                module()
    with hookstore.open(path) as run, pytest.warns(CaptureWarning, match="captured 2 times"):
        assert plain(run[""].activation[0, 0]) == {0: [3.0], "x": [4.0]}


def test_phases_and_views(path):
    module = Returning()
    with hookstore.record(module, path, layers="", phases=("train", "eval"), buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(2), epoch=0):
            for is_training in (True, False):
                module.train(is_training)
                module.value = {"a": [numbers(batch), numbers(is_training)], "b": numbers(7)}
                module()
    with hookstore.open(path) as run:
        captures = run[""].activation
        assert plain(captures.value(0, 1, phase="eval")) == {"a": [[1.0], [0.0]], "b": [7.0]}
        view = captures.leaf("a")
        assert plain(view[0, 1]) == [[1.0], [1.0]]
        assert view.leaves == ["a.0", "a.1"]
        assert len(view) == view.rows.num_rows == 8
        assert len(captures.leaf("a.0")) == 4
        assert captures.leaf("a.0").samples()[:].tolist() == [0.0, 1.0]
        assert captures.leaf("a.1").get(0, 0).tolist() == [1.0]
        assert captures.leaf("a.1").row(0, 0)["leaf"] == "a.1"
        assert "leaf 'a.1'" in repr(captures.leaf("a.1"))
        with pytest.raises(MissingCaptureError, match="several leaves: 'a.0', 'a.1'"):
            view.get(0, 0)
        for question in (lambda: captures.leaf("c")[0, 0], lambda: captures.leaf("c").get(0, 0), lambda: captures.leaf("c").samples()):
            with pytest.raises(MissingCaptureError, match="leaf 'c'"):
                question()


def test_parameters_are_a_dict_by_name(path):
    model = nn.ModuleDict({"linear": nn.Linear(2, 1), "bare": nn.Linear(2, 1, bias=False)})
    with hookstore.record(model, path, kinds="parameter", buffer_bytes=1 << 20):
        for layer in model.values():
            layer(torch.ones(1, 2))
    with hookstore.open(path) as run:
        found = run["linear"].parameter.value(0, 0, torch=True)
        assert set(found) == {"weight", "bias"}
        assert torch.equal(found["weight"], model["linear"].weight)
        assert np.array_equal(run["bare"].parameter[0, 0], model["bare"].weight.detach().numpy())
        assert np.array_equal(run["linear"].parameter.leaf("bias")[0, 0], model["linear"].bias.detach().numpy())


def test_reading_needs_no_torch(path):
    import subprocess
    import sys

    record(path, {"a": quiet(SPARSE["coo"]), "b": Output(numbers(1)), "c": pack_sequence([torch.ones(2, 1)])}).close()
    code = (
        f"import sys, hookstore\nwith hookstore.open({str(path)!r}) as run:\n    found = run[''].activation[0, 0]\n"
        "assert found['a'].dense().shape == (4, 4) and found['b'].logits[0] == 1 and found['c'].batch_sizes.tolist() == [1, 1]\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


# The text -------------------------------------------------------------------------------------------------------------

leaves = st.sampled_from(["tensor", "special", "none", "text", "number"])
keys = st.one_of(st.text(max_size=4), st.integers(-3, 10), st.floats(allow_nan=False, width=16), st.booleans(), st.none())
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: Output(*pair)),
    ),
    max_leaves=10,
)


def grow(tree, made):
    """Make a value of a tree, and what reading gives of it with tensors as lists."""
    if isinstance(tree, str):
        if tree == "tensor":
            made.append(None)
            return numbers(len(made), -len(made)), [float(len(made)), -float(len(made))]
        if tree == "special":
            made.append(None)
            return torch.diag(numbers(len(made), 0)).to_sparse(), [[float(len(made)), 0.0], [0.0, 0.0]]
        value = {"none": None, "text": "text", "number": 3}[tree]
        return value, None if value is None else hookstore.NotStored(
            type(value).__name__, f"it is a non-tensor of type {type(value).__name__}"
        )
    if isinstance(tree, dict):
        items = {key: grow(item, made) for key, item in tree.items()}
        return {key: item[0] for key, item in items.items()}, {key: item[1] for key, item in items.items()}
    if isinstance(tree, Output):
        pairs = [grow(item, made) for item in (tree.logits, tree.hidden)]
        return Output(*(pair[0] for pair in pairs)), dict(zip(("logits", "hidden"), (pair[1] for pair in pairs), strict=True))
    pairs = [grow(item, made) for item in tree]
    make = Point._make if isinstance(tree, Point) else type(tree)
    return make([pair[0] for pair in pairs]), (list if isinstance(tree, list) else tuple)(pair[1] for pair in pairs)


def dense(value):
    return [[float(item) for item in line] for line in value.dense()] if isinstance(value, hookstore.SparseArray) else value


def flat(value):
    """As `plain`, with sparse arrays made dense."""
    if isinstance(value, dict | hookstore.Record):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return (list if isinstance(value, list) else tuple)(flat(item) for item in value)
    return plain(dense(value))


@given(trees)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_structure_comes_back(tree):
    made: list = []
    value, expected = grow(tree, made)
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        with record(Path(directory) / "run", [numbers(0), value]) as run:
            found = run[""].activation[0, 0]
            assert flat(found) == [[0.0], expected]
            for leaf in run[""].activation.leaves:
                assert run[""].activation.get(0, 0, leaf=leaf) is not None


@given(trees)
@settings(max_examples=100, deadline=None)
def test_texts_are_canonical_and_paths_follow_from_them(tree):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
        value, _ = grow(tree, [])
    tensors, plan = nested.flatten(value)
    assert len(set(plan.leaves)) == len(plan.leaves) == len(tensors)
    if plan.text:
        decoded = structure.decode(plan.text)
        assert structure.encode(decoded.whole.node) == plan.text
        assert tuple(leaf.path for leaf in decoded.whole.leaves() if leaf.node == structure.TENSOR) == plan.leaves


def test_a_plain_tensor_has_no_text():
    assert nested.flatten(torch.ones(1))[1] == nested.Plan("", ("",), ())
    assert nested.flatten_arguments((torch.ones(1),), {})[1].text == ""
    assert nested.flatten(nn.Parameter(torch.ones(1)))[1].text == ""
    assert take_apart(torch.ones(1)) is None


def test_truth_values_and_numbers_are_different_keys():
    """Equal as keys of a dict, and so looked up alike unless written apart."""
    texts = [nested.flatten({key: torch.ones(1)})[1].text for key in (1, True, 1.0, "1")]
    assert len(set(texts)) == 4


def test_what_follows_from_structures_does_not_pile_up():
    for number in range(nested._MOST_PLANS + 10):
        nested.flatten({number: torch.ones(1)})
    assert len(nested._plans) <= nested._MOST_PLANS


def test_a_value_with_more_leaves_than_a_structure_may_have_is_read_by_leaf():
    tensors, plan = nested.flatten({f"a rather long key {'x' * 100} {number}": torch.ones(0) for number in range(3000)})
    assert (plan.text, len(plan.leaves), len(tensors)) == ("", 3000, 3000)


HOSTILE = [
    "[",
    "nonsense",
    "[]",
    "1",
    "true",
    '{"a":1}',
    '"tensors"',
    '["tuple"]',
    '["tuple","tensor"]',
    '["tuple",[1]]',
    '["tuple",["tensor"],1]',
    '["dict",[["a"]]]',
    '["dict",[[true,"tensor"]]]',
    '["dict",[[1.5,"tensor"]]]',
    '["dict",[[["float","x","y"],"tensor"]]]',
    '["namedtuple",1,[["a","tensor"]]]',
    '["namedtuple","x",[["a","tensor"],["a","tensor"]]]',
    '["record","x",[["a","tensor"]]]',
    '["other","x"]',
    '["call",["tensor"]]',
    '["os.system",["tensor"]]',
    '["at",null,"0","tensor",1]',
    '["at",null,1,"tensor"]',
    '["at",null,"",["unknown",{}]]',
    '["at",null,"",["sparse_coo",[]]]',
    '["at",null,"",["sparse_coo",{"a":{}}]]',
    '["at",null,"",["dtensor",{},["dtensor",{},"tensor"]]]',
    '["at",["at",null,"","tensor"],"","tensor"]',
    '["list",' * 200 + "[]" + "]" * 200,
    "[" * 100_000,
    '["list",[NaN]]',
    '["list",["' + "x" * (2 << 20) + '"]]',
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_that_no_writer_wrote_are_refused(text):
    with pytest.raises(ValueError, match=r".") as caught:
        structure.decode(text)
    assert not isinstance(caught.value, RecursionError)
    with pytest.raises(CorruptRunError, match="a structure that makes no sense"):
        assemble(rows_of({"structure": text}))


@pytest.mark.parametrize("text", ["null", '["list",[]]', '["list",[null,"tensor"]]', '["other","x",""]'])
def test_a_structure_without_the_tensor_that_was_captured_is_an_error(text):
    with pytest.raises(CorruptRunError, match="it has no tensor at '0'"):
        assemble(rows_of({"structure": text}))


def test_structures_that_the_rows_do_not_fit_are_errors_too():
    wrong = assemble(rows_of({"structure": '["packed",[["x","tensor"]]]', "leaf": "x", "value": 1}))
    with pytest.raises(CorruptRunError, match="makes no sense"):
        wrong.value(wrong.whole)
    odd = assemble(rows_of({"structure": '["namedtuple","not a name",[["class","tensor"]]]', "leaf": "class", "value": 1}))
    assert odd.value(odd.whole) == (1,)
    unknown_key = assemble(rows_of({"structure": '["dict",[[["float","x"],"tensor"]]]', "leaf": "x", "value": 1}))
    with pytest.raises(CorruptRunError, match="makes no sense"):
        unknown_key.value(unknown_key.whole)


PARTS = {
    "sparse_coo": {"indices": np.array([[0, 5]]), "values": np.ones(2), "shape": np.array([3])},
    "sparse_csr": {"crow_indices": np.array([0, 9]), "col_indices": np.array([0]), "values": np.ones(1), "shape": np.array([1, 1])},
    "nested": {"values": np.ones(3), "sizes": np.array([[2, 2]])},
    "jagged": {"values": np.ones(3), "offsets": np.array([0, 9])},
    "quantized": {"int_repr": np.ones(3, dtype=np.uint8), "scale": np.ones(()), "zero_point": np.zeros(())},
}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("as_torch", [False, True])
def test_parts_that_do_not_fit_each_other_are_errors(kind, as_torch):
    facts = {"jagged": {"dim": 3}, "quantized": {"axis": 7}}.get(kind, {})
    text = f'["at",null,"",["{kind}",{json.dumps(facts)}]]'
    convert = torch.from_numpy if as_torch else np.asarray
    rows = rows_of(*({"leaf": name, "structure": text, "value": convert(part)} for name, part in PARTS[kind].items()))
    with pytest.raises((CorruptRunError, ValueError)) as caught:
        assemble(rows, as_torch=as_torch).tensor("").dense()
    assert as_torch is False or isinstance(caught.value, CorruptRunError)


@pytest.mark.parametrize("shape", [[2**60, 2], [-1], [[1]], [1.5]])
def test_shapes_that_cannot_be_are_errors(shape):
    parts = {"indices": np.zeros((1, 0), dtype=np.int64), "values": np.ones(0), "shape": np.array(shape)}
    text = '["at",null,"",["sparse_coo",{}]]'
    with pytest.raises(CorruptRunError, match="makes no sense"):
        assemble(rows_of(*({"leaf": name, "structure": text, "value": part} for name, part in parts.items()))).tensor("")
