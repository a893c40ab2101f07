"""What goes in comes out, bit by bit: dtypes × shapes × schedules × codecs, through hookstore and through plain zarr."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

import hookstore
from hookstore.errors import HookstoreError, MissingCaptureError
from hookstore.format import DTYPES, leaf_path

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental"
)  # torch says so once in a process, when it feels like it

BITS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<u8"}
SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
CODECS: list[Any] = [None, None, "zstd", "lz4", {"name": "gzip", "configuration": {"level": 1}}]


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def forward(self) -> Any:
        return self.value


def make_tensor(dtype: str, shape: tuple[int, ...], seed: int, layout: str = "contiguous") -> torch.Tensor:
    """A tensor of any bits, laid out in memory in one way or another."""
    stored = shape[::-1] if layout == "transposed" else (*shape, 2) if layout == "strided" else shape
    size = DTYPES[dtype].itemsize * math.prod(stored)
    contents = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    kind = getattr(torch, dtype)
    if not size:
        return torch.empty(shape, dtype=kind)
    tensor = torch.frombuffer(bytearray(contents.tobytes()), dtype=kind).reshape(stored)
    if layout == "transposed" and shape:
        tensor = tensor.permute(*range(len(shape) - 1, -1, -1))
    elif layout == "strided":
        tensor = tensor[..., 1]
    assert tuple(tensor.shape) == shape
    return tensor


def bits_of(value: Any) -> np.ndarray[Any, Any]:
    """The bits of a tensor or an array, the same for both; complex128 gets a last dimension of two."""
    shape = tuple(value.shape)
    itemsize = value.element_size() if isinstance(value, torch.Tensor) else value.dtype.itemsize
    if isinstance(value, torch.Tensor):
        value = (torch.view_as_real(value) if itemsize == 16 else value.view(SAME_SIZE[itemsize])).numpy()
    return np.frombuffer(value.tobytes(), dtype=BITS[itemsize]).reshape((*shape, 2) if itemsize == 16 else shape)


@dataclass(frozen=True)
class Plan:
    """What a module returns: for each epoch and batch the tensors of its calls, and what of that is recorded."""

    epochs: list[list[list[tuple[str, tuple[int, ...], str]]]]
    every: int
    only_epochs: Any
    only_batches: Any
    knows_length: bool
    codec: Any

    def wants(self, epoch: int, batch: int) -> bool:
        return (
            batch % self.every == 0
            and (self.only_epochs is None or epoch in self.only_epochs)
            and (self.only_batches is None or batch in self.only_batches)
        )

    def captures(self) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        for epoch, batches in enumerate(self.epochs):
            for batch, calls in enumerate(batches):
                for call, (dtype, shape, layout) in enumerate(calls):
                    yield epoch, batch, call, make_tensor(dtype, shape, hash((epoch, batch, call)) % 2**32, layout)


shapes = st.one_of(
    st.lists(st.integers(1, 9), max_size=3).map(tuple),
    st.sampled_from([(), (1,), (8, 3), (4, 3), (3, 3), (8, 5), (8, 17), (0,), (2, 0, 3), (16, 40)]),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dtypes = draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3))
    usual = draw(shapes)
    capture = st.tuples(
        st.sampled_from(dtypes), st.one_of(st.just(usual), shapes), st.sampled_from(["contiguous", "contiguous", "transposed", "strided"])
    )
    calls = st.lists(capture, min_size=1, max_size=draw(st.sampled_from([1, 1, 3])))
    return Plan(
        epochs=draw(st.lists(st.lists(calls, min_size=1, max_size=6), min_size=1, max_size=2)),
        every=draw(st.sampled_from([1, 1, 2, 3])),
        only_epochs=draw(st.sampled_from([None, None, range(2), [0], [1]])),
        only_batches=draw(st.sampled_from([None, None, range(4), [0, 3]])),
        knows_length=draw(st.booleans()),
        codec=draw(st.sampled_from(CODECS)),
    )


def padding(row: dict[str, Any], chunk: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What of a chunk, as bits, is not the tensor."""
    outside = np.ones(chunk.shape, dtype=bool)
    outside[tuple(slice(size) for size in row["shape"])] = False
    return chunk[outside]


def check_row(layers: zarr.Group, row: dict[str, Any], expected: np.ndarray[Any, Any]) -> None:
    """Plain zarr has the tensor, padded with the fill value."""
    array = layers[row["array"]]
    assert isinstance(array, zarr.Array)
    assert array.attrs["torch_dtype"] == row["dtype"]
    assert array.attrs["layer"] == row["layer"]
    assert array.attrs["leaf"] == row["leaf"]
    where = (row["epoch"], row["batch"], row["call"]) if array.metadata.dimension_names[2:3] == ("call",) else (row["epoch"], row["batch"])
    chunk = bits_of(np.asarray(array[where]))
    np.testing.assert_array_equal(chunk[tuple(slice(size) for size in row["shape"])], expected)
    assert (padding(row, chunk) == DTYPES[row["dtype"]].fill_bits).all()


ONE = ("float32", (4, 3), "contiguous")


@given(plans())
@example(Plan([[[("float32", (8, length), "contiguous")] for length in range(1, 20)]], 1, None, None, True, None))
@example(Plan([[[("bfloat16", (size, 3), "contiguous")] for size in (8, 8, 5, 4, 3, 9)]], 1, None, None, False, "zstd"))
@example(Plan([[[ONE]] * 6, [[ONE]] * 2], 3, [1], None, True, None))
@example(Plan([[[ONE] * 18]], 1, None, None, True, None))
@FAST
def test_what_a_module_returns_comes_back(plan: Plan) -> None:
    module = Returning()
    with tempfile.TemporaryDirectory() as directory:
        run_path = Path(directory) / "run"
        tensors = {(epoch, batch, call): tensor for epoch, batch, call, tensor in plan.captures()}
        with hookstore.record(
            module,
            run_path,
            layers="",
            every=plan.every,
            epochs=plan.only_epochs,
            batches=plan.only_batches,
            codec=plan.codec,
            buffer_bytes=1 << 20,
        ) as recorder:
            for epoch, batches in enumerate(plan.epochs):
                loader = range(len(batches)) if plan.knows_length else iter(range(len(batches)))
                for batch in recorder.batches(loader, epoch=epoch):
                    for call in range(len(batches[batch])):
                        module.value = tensors[epoch, batch, call]
                        assert module() is module.value

        layers = zarr.open_group(run_path / "layers", mode="r")
        with hookstore.open(run_path) as run:
            captures = run[""].activation
            assert run.manifest.num_rows == sum(plan.wants(epoch, batch) for epoch, batch, _ in tensors)
            for (epoch, batch, call), tensor in tensors.items():
                if not plan.wants(epoch, batch):
                    with pytest.raises(MissingCaptureError):
                        captures[epoch, batch, call]
                    continue
                expected = bits_of(tensor)
                dtype = str(tensor.dtype).removeprefix("torch.")
                found = captures.tensor(epoch, batch, call)
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
                np.testing.assert_array_equal(bits_of(found), expected)
                if DTYPES[dtype].numpy is not None:
                    array = captures[epoch, batch, call]
                    assert (array.dtype.name, array.shape) == (dtype, tuple(tensor.shape))
                    assert not (tensor.numel() and array.flags.writeable)
                    np.testing.assert_array_equal(bits_of(array), expected)
                row = captures.row(epoch, batch, call)
                assert (row["dtype"], tuple(row["shape"]), row["nbytes"]) == (dtype, tuple(tensor.shape), expected.nbytes)
                if tensor.numel():
                    check_row(layers, row, expected)


keys = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(["eval", "calls", "s3", "float32", "~x", "a.b", "a%2eb", "A", "a", "", ".", "0", "é", "e\u0301", "x" * 300]),
)


@given(st.dictionaries(keys, st.tuples(st.sampled_from(sorted(DTYPES)), shapes), min_size=1, max_size=5), st.text(max_size=8))
@example({"eval": ("float32", (3,)), "~eval": ("float32", (3,)), "a.b": ("int8", (2,)), "a": ("bool", ())}, "A/b")
@settings(FAST, max_examples=25)
def test_nested_values_come_back_under_any_key(values: dict[str, tuple[str, tuple[int, ...]]], name: str) -> None:
    name = "".join(character for character in name if character != "." and not "\ud800" <= character <= "\udfff") or "x"
    model = nn.Module()
    model.add_module(f"_{name}", Returning())
    module = model.get_submodule(f"_{name}")
    tensors = {key: make_tensor(dtype, shape, number) for number, (key, (dtype, shape)) in enumerate(values.items())}
    with tempfile.TemporaryDirectory() as directory:
        run_path = Path(directory) / "run"
        with hookstore.record(model, run_path, layers=lambda _, candidate: candidate is module, buffer_bytes=1 << 20) as recorder:
            for _ in recorder.batches(range(2), epoch=0):
                module.value = {"outer": tensors, "inner": [torch.ones(2)]}
                module()
        layers = zarr.open_group(run_path / "layers", mode="r")
        with hookstore.open(run_path) as run:
            assert run.layers == [f"_{name}"]
            captures = run[f"_{name}"].activation
            assert len(captures.leaves) == len(tensors) + 1
            for key, tensor in tensors.items():
                leaf = leaf_path(("outer", key))
                np.testing.assert_array_equal(bits_of(captures.tensor(0, 1, leaf=leaf)), bits_of(tensor))
                if tensor.numel():
                    check_row(layers, captures.row(0, 1, leaf=leaf), bits_of(tensor))


def test_a_layer_whose_name_utf8_cannot_hold(tmp_path: Path) -> None:
    """It is refused at once or recorded; that training stops when the writer comes to it is neither."""
    model = nn.Module()
    model.add_module("a\udc80", Returning())
    (module,) = model.children()
    module.value = torch.ones(3)
    try:
        recorder = hookstore.record(model, tmp_path / "run", layers=Returning, buffer_bytes=1 << 20)
    except HookstoreError:
        return
    with recorder:
        module()
    with hookstore.open(tmp_path / "run") as run:
        np.testing.assert_array_equal(run["a\udc80"].activation[0, 0], np.ones(3))


def test_a_key_that_utf8_cannot_hold(tmp_path: Path) -> None:
    """A module may return such a key at any time, and training goes on."""
    module = Returning()
    with hookstore.record(module, tmp_path / "run", layers="", buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            module.value = {"a\udc80": torch.full((2,), batch), "b": torch.full((2,), -batch)}
            module()
    with hookstore.open(tmp_path / "run") as run:
        captures = run[""].activation
        assert len(captures.leaves) == 2
        for leaf in captures.leaves:
            for batch in range(3):
                np.testing.assert_array_equal(captures.get(0, batch, leaf=leaf), -batch if leaf == "b" else batch)


@given(
    dtype=st.sampled_from(["float32", "bfloat16", "bool", "int64", "float8_e5m2", "complex128", "float8_e4m3fn"]),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 9000),
    codec=st.sampled_from([None, None, "zstd", "lz4"]),
    layout=st.sampled_from(["contiguous", "transposed", "strided"]),
)
@example(dtype="float32", sizes=[40, 30, 1], width=4096, codec=None, layout="contiguous")
@example(dtype="bfloat16", sizes=[16], width=2046, codec=None, layout="contiguous")
@example(dtype="complex128", sizes=[9, 5], width=1000, codec="zstd", layout="transposed")
@settings(FAST, max_examples=15)
def test_captures_larger_than_the_buffer_come_back(dtype: str, sizes: list[int], width: int, codec: str | None, layout: str) -> None:
    """They go to disk in pieces, in between others."""
    model = nn.ModuleDict({"large": Returning(), "small": Returning()})
    tensors = [make_tensor(dtype, (size, width), number, layout) for number, size in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as directory:
        run_path = Path(directory) / "run"
        with hookstore.record(model, run_path, layers=["large", "small"], codec=codec, buffer_bytes=64 << 10) as recorder:
            for batch in recorder.batches(range(len(sizes)), epoch=0):
                model["small"].value = torch.full((5,), batch)
                model["small"]()
                model["large"].value = tensors[batch]
                model["large"]()
                model["small"]()
        layers = zarr.open_group(run_path / "layers", mode="r")
        with hookstore.open(run_path) as run:
            assert run.manifest.num_rows == 3 * len(sizes)
            for batch, tensor in enumerate(tensors):
                np.testing.assert_array_equal(bits_of(run["large"].activation.tensor(0, batch)), bits_of(tensor))
                check_row(layers, run["large"].activation.row(0, batch), bits_of(tensor))
                for call in (0, 1):
                    np.testing.assert_array_equal(run["small"].activation[0, batch, call], batch)
                    check_row(layers, run["small"].activation.row(0, batch, call), bits_of(torch.full((5,), batch)))


@pytest.mark.parametrize("cast", ["float16", "bfloat16", "float32", "float64", "float8_e5m2", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int32", "bool", "complex64"])
def test_captures_are_cast_as_torch_does(tmp_path: Path, dtype: str, cast: str) -> None:
    values = torch.linspace(-300, 300, 60).reshape(5, 12)
    tensor = (values + values.roll(7) * 1j if dtype == "complex64" else values).to(getattr(torch, dtype)).t()
    module = Returning()
    with hookstore.record(module, tmp_path / "run", layers="", dtype=getattr(torch, cast), buffer_bytes=1 << 20):
        module.value = tensor
        assert module() is tensor
    expected = tensor.to(getattr(torch, cast)) if tensor.is_floating_point() else tensor
    with hookstore.open(tmp_path / "run") as run:
        found = run[""].activation.tensor(0, 0)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(bits_of(found), bits_of(expected))
        check_row(zarr.open_group(tmp_path / "run/layers", mode="r"), run[""].activation.row(0, 0), bits_of(expected))


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("num_shards", [3])
def test_captures_of_many_shards_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None, num_shards: int) -> None:
    """Shards that are left behind are sealed while the recording goes on; late captures of them still arrive."""
    monkeypatch.setattr("hookstore.format.SHARD_TARGET_BYTES", 1 << 10)
    module = Returning()
    order = [*range(60), 3, 17, 59, 60, 4]
    expected = {}
    with hookstore.record(module, tmp_path / "run", layers="", codec=codec, buffer_bytes=64 << 10) as recorder:
        for number, batch in enumerate(order):
            with recorder.at(epoch=number // 60, batch=batch):
                module.value = make_tensor("float32", (4, 3), number)
                module()
                expected[number // 60, batch] = module.value
            if number % 7 == 0:
                recorder.flush()
            if number % 20 == 19:
                with hookstore.open(tmp_path / "run") as run:
                    for epoch, seen in list(expected)[: number // 7 * 7 + 1]:
                        np.testing.assert_array_equal(bits_of(run[""].activation[epoch, seen]), bits_of(expected[epoch, seen]))
    assert len(list((tmp_path / "run/layers/%root/activation").glob("c.*"))) > num_shards
    layers = zarr.open_group(tmp_path / "run/layers", mode="r")
    with hookstore.open(tmp_path / "run") as run:
        assert run.manifest.num_rows == len(order)
        for (epoch, batch), tensor in expected.items():
            np.testing.assert_array_equal(bits_of(run[""].activation[epoch, batch]), bits_of(tensor))
            check_row(layers, run[""].activation.row(epoch, batch), bits_of(tensor))
