"""Plain readers: zarr-python, TensorStore, zarrs and xarray read a run without this package's code, and get what the module returned.

What a plain reader cannot say, it gets as bits: a torch dtype without a registered Zarr name (float8_e4m3fn, complex32, …) is stored as unsigned integers
of its width, with its name in the attribute ``torch_dtype``.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import xarray
import zarr
from torch import nn

import hookstore
from hookstore.codecs import codec_metadata
from hookstore.errors import OptionError
from hookstore.format import DTYPES

BITS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<u8"}
CODECS: dict[str, Any] = {
    "none": None,
    "zstd": "zstd",
    "lz4": "lz4",
    "gzip": {"name": "gzip", "configuration": {"level": 1}},
}


class Returning(nn.Module):
    """Returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Any = None

    def forward(self) -> Any:
        return self.value


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Returning() for name in names})


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of any bits, so of every NaN and infinity too."""
    size = DTYPES[dtype].itemsize * math.prod(shape)
    contents = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    return torch.frombuffer(bytearray(contents.tobytes()), dtype=getattr(torch, dtype)).reshape(shape)


def bits_of(value: Any) -> np.ndarray[Any, Any]:
    """The bits of a tensor or an array, the same for both; complex128 gets a last dimension of two."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        itemsize = value.element_size()
    else:
        value = np.asarray(value)
        flat = np.frombuffer(value.tobytes(), dtype=np.uint8)
        itemsize = value.dtype.itemsize
    bits = np.frombuffer(flat.tobytes(), dtype=BITS[itemsize])
    return bits.reshape((*value.shape, 2) if itemsize == 16 else tuple(value.shape))


def batches_of(make: Callable[[int, int], torch.Tensor], num_batches: int = 3, num_calls: int = 1) -> list[list[torch.Tensor]]:
    return [[make(batch, call) for call in range(num_calls)] for batch in range(num_batches)]


def make_cases() -> dict[str, list[list[torch.Tensor]]]:
    """For each layer what it returns in each batch and call."""
    floats = torch.arange(96.0).sin().reshape(2, 3, 4, 4)
    cases = {
        f"dtype_{name}": batches_of(lambda batch, _, name=name: random_bits(name, (4 if batch < 2 else 3, 5), batch)) for name in DTYPES
    }
    return {
        **cases,
        "scalar": batches_of(lambda batch, _: torch.tensor(batch + 0.5)),
        "scalar_bfloat16": batches_of(lambda batch, _: torch.tensor(batch + 0.5, dtype=torch.bfloat16)),
        "vector": batches_of(lambda batch, _: torch.arange(4) + batch),
        "transposed": batches_of(lambda batch, _: (floats + batch).permute(3, 1, 0, 2)),
        "strided": batches_of(lambda batch, _: (floats + batch)[:, ::2, 1::2]),
        "channels_last": batches_of(lambda batch, _: (floats + batch).to(memory_format=torch.channels_last)),
        "channels_last_bfloat16": batches_of(lambda batch, _: (floats + batch).bfloat16().to(memory_format=torch.channels_last)),
        "expanded": batches_of(lambda batch, _: torch.arange(3.0).add(batch)[:, None].expand(3, 5)),
        "conjugated": batches_of(lambda batch, _: torch.complex(floats[0, 0], floats[0, 1]).add(batch).conj()),
        "negated": batches_of(lambda batch, _: torch.complex(floats[0, 0], floats[0, 1]).add(batch).conj().imag),
        "reversed": batches_of(lambda batch, _: floats.add(batch).flip(0)),
        "several_calls": batches_of(lambda batch, call: floats[0] * (batch + 1) + 100 * call, num_calls=4),
        "several_calls_bool": batches_of(lambda batch, call: random_bits("bool", (6,), 10 * batch + call), num_calls=3),
    }


CASES = make_cases()


@dataclass(frozen=True)
class Recorded:
    path: Path
    codec: Any = None

    @property
    def layers(self) -> Path:
        return self.path / "layers"


def record_cases(path: Path, cases: dict[str, list[list[torch.Tensor]]], **options: Any) -> Recorded:
    model = Model(list(cases))
    num_batches = max(map(len, cases.values()))
    with hookstore.record(model, path, layers="layers.*", buffer_bytes=4 << 20, **options) as recorder:
        for batch in recorder.batches(range(num_batches), epoch=0):
            for name, batches in cases.items():
                for value in batches[batch]:
                    model.layers[name].value = value
                    model.layers[name]()
    return Recorded(path, options.get("codec"))


@pytest.fixture(scope="module", params=CODECS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_cases(tmp_path_factory.mktemp(request.param) / "run", CASES, codec=CODECS[request.param])


# Each gives a function that reads one chunk ------------------------------------------------------------------------


def with_zarr(array: Path) -> Callable[[tuple[int, ...]], Any]:
    return zarr.open_array(array, mode="r").__getitem__


def with_tensorstore(array: Path) -> Callable[[tuple[int, ...]], Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array}/"}}
    opened = tensorstore.open(spec, read=True).result()
    return lambda where: opened[where].read().result()


def with_zarrs(array: Path) -> Callable[[tuple[int, ...]], Any]:
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        opened = zarr.open_array(array, mode="r")
        assert type(opened.async_array.codec_pipeline).__name__ == "ZarrsCodecPipeline"

    def read(where: tuple[int, ...]) -> Any:
        with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            return opened[where]

    return read


READERS = {"zarr": with_zarr, "tensorstore": with_tensorstore, "zarrs": with_zarrs}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", CASES)
def test_plain_readers_read_what_the_module_returned(recorded: Recorded, case: str, reader: str) -> None:
    dtype = DTYPES[str(CASES[case][0][0].dtype).removeprefix("torch.")]
    fill = np.frombuffer(dtype.fill_bits.to_bytes(dtype.itemsize, "little"), dtype=BITS[dtype.itemsize])
    plain = READERS[reader](recorded.layers / f"layers.{case}" / "activation")
    calls = READERS[reader](recorded.layers / f"layers.{case}" / "activation.calls") if len(CASES[case][0]) > 1 else None
    for batch, values in enumerate(CASES[case]):
        for call, value in enumerate(values):
            found = bits_of(plain((0, batch)) if calls is None or call == 0 else calls((0, batch, call)))
            expected = bits_of(value)
            inside = tuple(slice(size) for size in value.shape)
            np.testing.assert_array_equal(found[inside], expected)
            if found.shape != expected.shape:
                assert (found[value.shape[0] :] == fill).all(), "padding is fill"


@pytest.mark.parametrize("case", CASES)
def test_hookstore_reads_what_the_module_returned(recorded: Recorded, case: str) -> None:
    with hookstore.open(recorded.path) as run:
        captures = run[f"layers.{case}"].activation
        for batch, values in enumerate(CASES[case]):
            for call, value in enumerate(values):
                tensor = captures.tensor(0, batch, call)
                assert tensor.dtype == value.dtype
                assert tensor.shape == value.shape
                np.testing.assert_array_equal(bits_of(tensor), bits_of(value))
                if DTYPES[str(value.dtype).removeprefix("torch.")].numpy is not None:
                    array = captures[0, batch, call]
                    assert array.dtype.name == str(value.dtype).removeprefix("torch.")
                    np.testing.assert_array_equal(bits_of(array), bits_of(value))
                else:
                    with pytest.raises(OptionError, match="tensor"):
                        captures[0, batch, call]


PLAIN_DTYPES = {
    # What each reader calls an array of that torch dtype. Where it is an unsigned integer for a type that is none, the bits are stored.
    "bfloat16": ("bfloat16", "bfloat16"),
    "float8_e5m2": ("float8_e5m2", "float8_e5m2"),
    "float8_e4m3fn": ("uint8", "uint8"),
    "float8_e4m3fnuz": ("uint8", "uint8"),
    "float8_e5m2fnuz": ("uint8", "uint8"),
    "float8_e8m0fnu": ("uint8", "uint8"),
    "complex32": ("uint32", "uint32"),
}


@pytest.mark.parametrize("name", DTYPES)
def test_what_readers_call_the_dtypes(recorded: Recorded, name: str) -> None:
    in_zarr, in_tensorstore = PLAIN_DTYPES.get(name, (name, name))
    path = recorded.layers / f"layers.dtype_{name}" / "activation"
    assert zarr.open_array(path, mode="r").dtype.name == in_zarr
    assert with_zarr(path)((0, 0)).dtype.name == in_zarr
    assert with_zarrs(path)((0, 0)).dtype.name == in_zarr
    assert with_tensorstore(path)((0, 0)).dtype.name == in_tensorstore
    assert zarr.open_array(path, mode="r").attrs["torch_dtype"] == name


def test_whole_arrays_and_slices(recorded: Recorded) -> None:
    values = np.stack([bits_of(values[0]) for values in CASES["channels_last"]])
    path = recorded.layers / "layers.channels_last" / "activation"
    for make in READERS.values():
        read = make(path)
        np.testing.assert_array_equal(bits_of(read((slice(None), slice(None))))[0], values)
        np.testing.assert_array_equal(bits_of(read((0, slice(1, 3), 1, slice(None), 2))), values[1:3, 1, :, 2])


def test_metadata_carries_the_codec(recorded: Recorded) -> None:
    names = {None: [], "zstd": ["zstd"], "lz4": ["blosc"]}.get(recorded.codec if not isinstance(recorded.codec, dict) else "", ["gzip"])
    metadata = json.loads((recorded.layers / "layers.vector" / "activation" / "zarr.json").read_bytes())
    codecs = [codec["name"] for codec in metadata["codecs"][0]["configuration"]["codecs"]]
    assert codecs == ["bytes", *names, "crc32c"]


# Missing and empty --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("codec", [None, "zstd"])
def test_skipped_batches_read_as_the_fill_value(tmp_path: Path, reader: str, codec: str | None) -> None:
    names = ("float32", "bfloat16", "int64", "bool", "complex64")
    cases = {f"a_{name}": batches_of(lambda batch, _, name=name: random_bits(name, (2, 3), batch), num_batches=7) for name in names}
    recorded = record_cases(tmp_path / "run", cases, every=3, codec=codec)
    for name in names:
        read = READERS[reader](recorded.layers / f"layers.a_{name}" / "activation")
        dtype = DTYPES[name]
        whole = bits_of(read((0, slice(None))))
        assert whole.shape[0] == 7
        for batch in range(7):
            if batch % 3 == 0:
                np.testing.assert_array_equal(whole[batch], bits_of(cases[f"a_{name}"][batch][0]))
            else:
                assert (whole[batch] == dtype.fill_bits).all()
                assert (bits_of(read((0, batch))) == dtype.fill_bits).all()
    with hookstore.open(recorded.path) as run:
        assert run.batches(0) == [0, 3, 6]
        assert run.manifest.num_rows == 3 * len(names)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0, 2)])
def test_empty_tensors_have_a_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    cases = {"empty": [[torch.empty(shape, dtype=torch.bfloat16)]], "other": [[torch.ones(2)]]}
    recorded = record_cases(tmp_path / "run", cases)
    with hookstore.open(recorded.path) as run:
        array = run["layers.empty"].activation[0, 0]
        assert (array.shape, array.dtype.name) == (shape, "bfloat16")
        assert not array.flags.writeable, "read-only as every other"
        tensor = run["layers.empty"].activation.tensor(0, 0)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.bfloat16)
        assert run["layers.empty"].activation.row(0, 0)["array"] == ""
    assert sorted(zarr.open_group(recorded.layers, mode="r").group_keys()) == ["layers.other"]


def test_readers_never_raise_on_a_live_run(tmp_path: Path) -> None:
    model = Model(["a", "b"])
    with hookstore.record(model, tmp_path / "run", layers="layers.*", buffer_bytes=1 << 20) as recorder:
        for batch in recorder.batches(range(40), epoch=0):
            model.layers["a"].value = torch.full((3, 2), float(batch))
            model.layers["a"]()
            model.layers["b"].value = torch.full((2,), batch, dtype=torch.bfloat16)
            if batch >= 20:
                model.layers["b"]()
            if batch % 10 == 5:
                recorder.flush()
                group = zarr.open_group(tmp_path / "run" / "layers", mode="r")
                for _, member in group.members(max_depth=None):
                    if isinstance(member, zarr.Array):
                        whole = np.asarray(member[:], dtype=np.float32)
                        assert whole.shape[1] > batch
                        for number in range(batch + 1):
                            expected = number if number >= 20 or "/a/" in f"{member.path}/".replace("layers.", "/") else np.nan
                            assert np.isnan(whole[0, number]).all() or (whole[0, number] == expected).all()
                with hookstore.open(tmp_path / "run") as run:
                    assert (run["layers.a"].activation[0, batch] == batch).all()
    assert (zarr.open_array(tmp_path / "run/layers/layers.b/activation", mode="r")[0, 20:].astype(int).max(axis=1) == range(20, 40)).all()


# Groups -------------------------------------------------------------------------------------------------------------


def test_zarr_lists_the_group(recorded: Recorded) -> None:
    group = zarr.open_group(recorded.layers, mode="r")
    members = dict(group.members(max_depth=None))
    for case, batches in CASES.items():
        assert isinstance(members[f"layers.{case}"], zarr.Group)
        assert members[f"layers.{case}"].attrs["layer"] == f"layers.{case}"
        assert isinstance(members[f"layers.{case}/activation"], zarr.Array)
        assert (f"layers.{case}/activation.calls" in members) == (len(batches[0]) > 1)
    assert len(members) == 2 * len(CASES) + 2
    tree = str(group.tree())
    assert "layers.dtype_bfloat16" in tree
    assert "(1, 3, 4, 5) bfloat16" in tree
    assert zarr.open(recorded.layers, mode="r")["layers.scalar/activation"][0, 1] == 1.5


def test_xarray_opens_the_run(recorded: Recorded) -> None:
    """``consolidated=False`` says that there is no consolidated metadata, which a growing run cannot have; without it xarray warns."""
    with xarray.open_datatree(recorded.layers, engine="zarr", consolidated=False) as tree:
        assert len(tree.children) == len(CASES)
        for case, batches in CASES.items():
            node = tree[f"layers.{case}"]
            assert node.attrs["layer"] == f"layers.{case}"
            assert "activation" in node.data_vars
            variable = node["activation"]
            assert variable.dims[:2] == ("epoch", "batch")
            assert variable.sizes["batch"] == 3
            if batches[0][0].ndim:
                assert variable.dims[2] == "sample"
            for batch, values in enumerate(batches):
                found = bits_of(variable.isel(epoch=0, batch=batch).values)
                np.testing.assert_array_equal(found[tuple(slice(size) for size in values[0].shape)], bits_of(values[0]))
                for call in range(1, len(values)):
                    found = bits_of(node["activation.calls"].isel(epoch=0, batch=batch, call=call).values)
                    np.testing.assert_array_equal(found, bits_of(values[call]))


def test_xarray_opens_one_layer(recorded: Recorded) -> None:
    with xarray.open_dataset(recorded.layers, group="layers.several_calls", engine="zarr", consolidated=False) as dataset:
        assert dataset["activation"].sizes == {"epoch": 1, "batch": 3, "sample": 3, "activation_1": 4, "activation_2": 4}
        assert list(dataset["activation.calls"].sizes.values()) == [1, 3, 4, 3, 4, 4]
        assert dataset["activation.calls"].dims[:4] == ("epoch", "batch", "call", "sample")
        np.testing.assert_array_equal(dataset["activation"].values[0, 2], CASES["several_calls"][2][0].numpy())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.head = Returning()

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.body(inputs)
        self.head.value = {"hidden": hidden, "hidden_1": hidden.repeat(1, 2), "lengths": torch.arange(7), "loss": hidden.sum()}
        return self.head()


def test_xarray_opens_nested_values_parameters_and_gradients(tmp_path: Path) -> None:
    """Arrays of a layer that have all sorts of sizes."""
    model = TwoHeads()
    kinds = ["activation", "gradient", "input", "parameter"]
    with hookstore.record(
        model, tmp_path / "run", layers=["body", "head"], kinds=kinds, phases=["train", "eval"], buffer_bytes=1 << 20
    ) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            outputs = model(torch.ones(8 if batch < 2 else 3, 3))
            (outputs["loss"] + outputs["hidden_1"].sum()).backward()
            model.eval()
            model(torch.ones(5, 3))
            model.train()
    with hookstore.open(tmp_path / "run") as run, xarray.open_datatree(tmp_path / "run/layers", engine="zarr", consolidated=False) as tree:
        checked = set()
        for row in run.manifest.to_pylist():
            group, name = row["array"].split("/")
            assert name in tree[group].data_vars, f"{name} is no variable of {group}"
            found = tree[group][name].isel(epoch=row["epoch"], batch=row["batch"]).values
            np.testing.assert_array_equal(found[tuple(slice(size) for size in row["shape"])], run.read(row))
            checked.add((group, name))
        assert checked == {(group, name) for group in tree.children for name in tree[group].data_vars}
        assert len(checked) > 12


# Without importing hookstore --------------------------------------------------------------------------------------------------


def run_python(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=os.path.dirname(__file__),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def uncompressed(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record_cases(tmp_path_factory.mktemp("uncompressed") / "run", {name: CASES[name] for name in CASES if name.startswith("dtype_")})


is_installed = any(point.name == "bfloat16" for point in importlib.metadata.entry_points(group="zarr.data_type"))


@pytest.mark.skipif(not is_installed, reason="hookstore is on the path, but not installed")
def test_zarr_finds_the_data_types_by_itself(uncompressed: Recorded) -> None:
    code = """
import sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
members = dict(group.members(max_depth=None))
assert "torch" not in sys.modules
for name in ("bfloat16", "float8_e5m2"):
    array = members[f"layers.dtype_{name}/activation"]
    print(array.dtype.name, array[0, 1].tobytes().hex())
"""
    lines = run_python(code, uncompressed.layers).split()
    assert lines[::2] == ["bfloat16", "float8_e5m2"]
    for name, found in zip(lines[::2], lines[1::2], strict=True):
        assert bytes.fromhex(found) == bits_of(CASES[f"dtype_{name}"][1][0]).tobytes()


def test_without_the_data_types_everything_else_is_read(uncompressed: Recorded) -> None:
    """On a machine without hookstore; zarr-python of today cannot list a group that holds a bfloat16 array there, and says so."""
    code = """
import importlib.metadata, sys
points = [point for distribution in importlib.metadata.distributions() for point in distribution.entry_points]
without_ours = importlib.metadata.EntryPoints(point for point in points if not point.value.startswith("hookstore"))
importlib.metadata.entry_points = lambda **selection: without_ours.select(**selection) if selection else without_ours
import zarr
import zarr.registry
assert not any(name.startswith("hookstore") for name in sys.modules)
print(zarr.open_array(sys.argv[1] + "/layers.dtype_float32/activation", mode="r")[0, 1].tobytes().hex())
print(zarr.open_array(sys.argv[1] + "/layers.dtype_float8_e4m3fn/activation", mode="r")[0, 1].tobytes().hex())
try:
    found = zarr.open_array(sys.argv[1] + "/layers.dtype_bfloat16/activation", mode="r")[0, 1].tobytes().hex()
except ValueError as error:
    found = "refused" if "bfloat16" in str(error) else str(error)
print(found)
assert not any(name.startswith("hookstore") for name in sys.modules)
"""
    found = run_python(code, uncompressed.layers).split()
    expected = [bits_of(CASES[f"dtype_{name}"][1][0]).tobytes().hex() for name in ("float32", "float8_e4m3fn", "bfloat16")]
    assert found[:2] == expected[:2]
    assert found[2] in ("refused", expected[2])


# Codecs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec",
    [
        {"name": "zstd", "configuration": {"level": 1, "checksum": True}},
        {"name": "zstd", "configuration": {"level": -3}},
        {"name": "gzip", "configuration": {"level": 9}},
        *({"name": "blosc", "configuration": {"cname": cname}} for cname in ("lz4", "lz4hc", "zlib", "zstd", "blosclz")),
        *({"name": "blosc", "configuration": {"shuffle": shuffle, "clevel": 1}} for shuffle in ("noshuffle", "shuffle", "bitshuffle")),
        {"name": "blosc", "configuration": {"typesize": 1, "blocksize": 64}},
        *(
            {"name": f"numcodecs.{name}"}
            for name in ("zlib", "bz2", "lzma", "lz4", "zstd", "gzip", "blosc", "crc32", "shuffle", "fletcher32")
        ),
    ],
    ids=lambda codec: re.sub(r"[^\w.]+", "-", f"{codec['name']}-{codec.get('configuration', '')}").strip("-"),
)
def test_every_codec_that_is_taken_is_read_without_a_warning(tmp_path: Path, codec: dict[str, Any]) -> None:
    """A codec is either refused by ``record`` or read by plain zarr-python, silently."""
    try:
        codec_metadata(codec, "float32")
    except OptionError:
        with pytest.raises(OptionError):
            hookstore.record(Model(["a"]), tmp_path / "refused", layers="layers.a", codec=codec, buffer_bytes=1 << 20)
        return
    cases = {"a": batches_of(lambda batch, _: torch.arange(600.0).reshape(20, 30) + batch)}
    recorded = record_cases(tmp_path / "run", cases, codec=codec)
    read = with_zarr(recorded.layers / "layers.a" / "activation")
    with hookstore.open(recorded.path) as run:
        for batch, (value,) in enumerate(cases["a"]):
            np.testing.assert_array_equal(read((0, batch)), value.numpy())
            np.testing.assert_array_equal(run["layers.a"].activation[0, batch], value.numpy())
