"""`hookstore.arrays`: the metadata that plain Zarr readers see."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st
from zarr.core.dtype import data_type_registry

from hookstore.arrays import ArrayStore, BFloat16, Float8E5M2, array_metadata
from hookstore.codecs import codec_metadata
from hookstore.format import DTYPES, KINDS, ArraySpec, array_name


def make_spec(
    kind: str = "activation",
    chunk: tuple[int, ...] = (4, 3),
    shards: tuple[int, ...] = (1, 8),
    *,
    layer: str = "conv1",
    dtype: str = "float32",
    name: str | None = None,
    codec: str | None = None,
    phase: str = "train",
    leaf: str = "",
) -> ArraySpec:
    if name is None:
        name = array_name(kind, leaf=leaf, phase=phase, calls=len(shards) == 3)
    return ArraySpec(layer, kind, phase, leaf, dtype, name, chunk, shards, codec=codec)


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers"
    path.mkdir()
    return path


class Writes:
    """Counts how often the metadata below a directory is written: what has another inode or time has been."""

    def __init__(self, layers: Path) -> None:
        self.counted: Counter[str] = Counter()
        self._layers = layers
        self._stamps: dict[str, tuple[int, int]] = {}

    def look(self) -> None:
        for path in self._layers.rglob("zarr.json"):
            stamp = (path.stat().st_ino, path.stat().st_mtime_ns)
            if self._stamps.get(str(path)) != stamp:
                self._stamps[str(path)] = stamp
                self.counted[path.parent.name] += 1


@pytest.fixture
def writes(layers: Path) -> Writes:
    return Writes(layers)


class GrowingStore(ArrayStore):
    """One that brings the files to the extents that are needed at once."""

    def publish(self, spec: ArraySpec, last: tuple[int, int, int], epoch_batches: int | None) -> None:
        super().publish(spec, last, epoch_batches)
        self.grow()


def metadata(layers: Path, array: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((layers / array / "zarr.json").read_bytes())
    return found


def expected_metadata(**changes: Any) -> dict[str, Any]:
    """What the array of ``make_spec()`` has."""
    codecs = changes.pop("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}])
    sharding = {
        "chunk_shape": changes.pop("chunk_shape", [1, 1, 4, 3]),
        "codecs": codecs,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    attributes = {"layer": "conv1", "kind": "activation", "phase": "train", "leaf": "", "torch_dtype": "float32", "rank": 0}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2, 5, 4, 3],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": changes.pop("shard_shape", [1, 8, 4, 3])}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": "NaN",
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {**attributes, **changes.pop("attributes", {})},
        "dimension_names": ["epoch", "batch", "sample", "activation_1"],
        "storage_transformers": [],
        **changes,
    }


ONE_BYTE = [{"name": "bytes"}, {"name": "crc32c"}]
NAMES = ["epoch", "batch", "sample", "activation_1"]


@pytest.mark.parametrize(
    ("spec", "extents", "names", "expected"),
    [
        (make_spec(), (2, 5, 1), NAMES, expected_metadata()),
        (
            make_spec(dtype="bfloat16"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="bfloat16", attributes={"torch_dtype": "bfloat16"}),
        ),
        (
            make_spec(dtype="float8_e5m2"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="float8_e5m2", fill_value="0x7e", codecs=ONE_BYTE, attributes={"torch_dtype": "float8_e5m2"}),
        ),
        (
            make_spec(dtype="float8_e4m3fn"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="uint8", fill_value=0, codecs=ONE_BYTE, attributes={"torch_dtype": "float8_e4m3fn"}),
        ),
        (
            make_spec(dtype="complex32"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="uint32", fill_value=0, attributes={"torch_dtype": "complex32"}),
        ),
        (
            make_spec(dtype="complex64"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="complex64", fill_value=[0.0, 0.0], attributes={"torch_dtype": "complex64"}),
        ),
        (
            make_spec(dtype="bool"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="bool", fill_value=False, codecs=ONE_BYTE, attributes={"torch_dtype": "bool"}),
        ),
        (
            make_spec(dtype="int64"),
            (2, 5, 1),
            NAMES,
            expected_metadata(data_type="int64", fill_value=0, attributes={"torch_dtype": "int64"}),
        ),
        (
            make_spec("gradient", (), (3, 7), layer="", leaf="loss", phase="eval"),
            (2, 5, 1),
            ["epoch", "batch"],
            expected_metadata(
                shape=[2, 5],
                chunk_shape=[1, 1],
                shard_shape=[3, 7],
                dimension_names=["epoch", "batch"],
                attributes={"layer": "", "kind": "gradient", "leaf": "loss", "phase": "eval"},
            ),
        ),
        (
            make_spec(shards=(1, 8, 16)),
            (2, 5, 3),
            ["epoch", "batch", "call", "sample", "activation.calls_1"],
            expected_metadata(
                shape=[2, 5, 3, 4, 3],
                chunk_shape=[1, 1, 1, 4, 3],
                shard_shape=[1, 8, 16, 4, 3],
                dimension_names=["epoch", "batch", "call", "sample", "activation.calls_1"],
            ),
        ),
        (
            make_spec(codec=codec_metadata("zstd", "float32")),
            (2, 5, 1),
            NAMES,
            expected_metadata(
                codecs=[
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "zstd", "configuration": {"level": 3, "checksum": False}},
                    {"name": "crc32c"},
                ]
            ),
        ),
        (
            make_spec(codec=codec_metadata("lz4", "uint8"), dtype="uint8"),
            (2, 5, 1),
            NAMES,
            expected_metadata(
                data_type="uint8",
                fill_value=0,
                attributes={"torch_dtype": "uint8"},
                codecs=[
                    {"name": "bytes"},
                    {
                        "name": "blosc",
                        "configuration": {"typesize": 1, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0},
                    },
                    {"name": "crc32c"},
                ],
            ),
        ),
    ],
    ids=lambda value: (value.dtype if value.codec is None else value.codec[-8:-2]) if isinstance(value, ArraySpec) else None,
)
def test_metadata(spec: ArraySpec, extents: tuple[int, ...], names: list[str], expected: dict[str, Any]) -> None:
    assert json.loads(array_metadata(spec, extents, names)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_zarr_opens_arrays_of_every_dtype(layers: Path, dtype: str) -> None:
    store = ArrayStore(str(layers))
    store.publish(make_spec(dtype=dtype), (1, 4, 0), 5)
    array = zarr.open_array(layers / "conv1" / "activation", mode="r")
    assert array.shape == (2, 5, 4, 3)
    assert array.shards == (1, 8, 4, 3)
    assert array.chunks == (1, 1, 4, 3)
    assert array.dtype.itemsize == DTYPES[dtype].itemsize
    assert array.attrs["torch_dtype"] == dtype
    assert array.metadata.to_dict()["data_type"] == DTYPES[dtype].zarr
    fill = np.asarray(array.fill_value)
    assert fill.tobytes() == DTYPES[dtype].fill_bits.to_bytes(DTYPES[dtype].itemsize, "little")
    assert np.asarray(array[1, 4]).tobytes() == 12 * fill.tobytes()


def test_groups_at_every_level(layers: Path) -> None:
    store = ArrayStore(str(layers))
    assert metadata(layers, ".") == {"zarr_format": 3, "node_type": "group", "attributes": {}}
    store.publish(make_spec(layer="Block.0/x"), (0, 0, 0), None)
    assert sorted(os.listdir(layers)) == ["^block.0%2fx", "zarr.json"]
    assert metadata(layers, "^block.0%2fx") == {"zarr_format": 3, "node_type": "group", "attributes": {"layer": "Block.0/x"}}
    assert sorted(os.listdir(layers / "^block.0%2fx")) == ["activation", "zarr.json"]
    assert store.directory(make_spec(layer="Block.0/x")) == str(layers / "^block.0%2fx" / "activation")


# Extents ------------------------------------------------------------------------------------------------------------


def test_a_known_length_is_published_once(layers: Path, writes: Writes) -> None:
    store = GrowingStore(str(layers), num_epochs=3)
    for epoch in range(3):
        for batch in range(100):
            store.publish(make_spec(), (epoch, batch, 0), 100)
            store.publish(make_spec("gradient"), (epoch, batch, 0), 100)
            writes.look()
    assert metadata(layers, "conv1/activation")["shape"] == [3, 100, 4, 3]
    assert writes.counted == {"layers": 1, "conv1": 1, "activation": 1, "gradient": 1}
    store.finish(100)
    writes.look()
    assert writes.counted["activation"] == 1, "nothing to take back"


def test_an_unknown_length_grows_by_doubling(layers: Path, writes: Writes) -> None:
    store = GrowingStore(str(layers))
    for batch in range(1000):
        store.publish(make_spec(), (0, batch, 0), None)
        assert metadata(layers, "conv1/activation")["shape"][1] > batch
        writes.look()
    assert metadata(layers, "conv1/activation")["shape"] == [1, 1024, 4, 3]
    assert writes.counted["activation"] == 11
    store.finish(None)
    assert metadata(layers, "conv1/activation")["shape"] == [1, 1000, 4, 3]


def test_epochs_grow_one_by_one(layers: Path, writes: Writes) -> None:
    store = GrowingStore(str(layers))
    for epoch in range(5):
        for batch in range(10):
            store.publish(make_spec(), (epoch, batch, 0), 10)
            writes.look()
    assert metadata(layers, "conv1/activation")["shape"] == [5, 10, 4, 3]
    assert writes.counted["activation"] == 5


def test_extents_are_shared_within_a_layer(layers: Path) -> None:
    store = GrowingStore(str(layers))
    plain, scalar, calls, other = make_spec(), make_spec("gradient", ()), make_spec(shards=(1, 8, 16)), make_spec(layer="fc")
    for spec, last in [(plain, (0, 0, 0)), (scalar, (0, 4, 0)), (calls, (1, 2, 5)), (other, (0, 0, 0)), (plain, (2, 1, 0))]:
        store.publish(spec, last, None)
        published = [metadata(layers, spec.path)["shape"] for spec in (plain, scalar, calls) if (layers / spec.path).exists()]
        assert len({tuple(shape[:2]) for shape in published}) == 1, published
        assert all(extent > coordinate for extent, coordinate in zip(metadata(layers, spec.path)["shape"], last[:2], strict=False))
    assert metadata(layers, plain.path)["shape"] == [3, 8, 4, 3]
    assert metadata(layers, scalar.path)["shape"] == [3, 8]
    assert metadata(layers, calls.path)["shape"] == [3, 8, 8, 4, 3]
    assert metadata(layers, other.path)["shape"] == [1, 1, 4, 3], "another layer keeps its own"
    store.finish(None)
    assert metadata(layers, plain.path)["shape"] == [3, 5, 4, 3]
    assert metadata(layers, scalar.path)["shape"] == [3, 5]
    assert metadata(layers, calls.path)["shape"] == [3, 5, 6, 4, 3]


@pytest.mark.parametrize(
    ("num_epochs", "epoch_batches", "last", "shape"),
    [
        (None, None, (0, 5, 0), [1, 6]),
        (None, 10, (0, 8, 0), [1, 10]),
        (4, 10, (1, 9, 0), [2, 10]),
        (4, None, (1, 9, 0), [2, 10]),
        (None, 3, (0, 9, 0), [1, 10]),
        (2, 3, (5, 9, 0), [6, 10]),
    ],
)
def test_finish_takes_back_what_never_came(
    layers: Path, num_epochs: int | None, epoch_batches: int | None, last: tuple[int, int, int], shape: list[int]
) -> None:
    store = GrowingStore(str(layers), num_epochs)
    store.publish(make_spec(), (0, 0, 0), epoch_batches)
    store.publish(make_spec(), last, epoch_batches)
    store.finish(epoch_batches)
    assert metadata(layers, "conv1/activation")["shape"] == [*shape, 4, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2]), st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 5)), st.integers(1, 30)),
        min_size=1,
        max_size=15,
    )
)
@settings(max_examples=30, deadline=None)
def test_what_was_published_never_shrinks_before_the_end(published: list[tuple[int, tuple[int, int, int], int]]) -> None:
    specs = [make_spec(), make_spec("gradient", ()), make_spec(shards=(1, 8, 16))]
    with tempfile.TemporaryDirectory() as directory:
        layers = Path(directory)
        store = GrowingStore(directory)
        before: list[int] = [0, 0]
        highest = [0, 0, 0]
        for number, last, epoch_batches in published:
            store.publish(specs[number], last, epoch_batches)
            shape = metadata(layers, specs[number].path)["shape"]
            assert all(new >= old for new, old in zip(shape, before, strict=False))
            before = shape[:2]
            highest = [max(pair) for pair in zip(highest, last, strict=True)]
            assert all(extent > coordinate for extent, coordinate in zip(shape, highest[:2], strict=False))
        store.finish(None)
        for number in {number for number, _, _ in published}:
            shape = metadata(layers, specs[number].path)["shape"]
            assert shape[:2] == [coordinate + 1 for coordinate in highest[:2]]
            if number == 2:
                assert shape[2] == highest[2] + 1


def test_metadata_is_whole_at_every_instant(layers: Path) -> None:
    """A reader of a live run, or of a killed one, sees no metadata, the old or the new: never half of it, which would make it raise."""
    shapes: list[list[int]] = []

    def look_around(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("hookstore"):
            return None
        for path in layers.rglob("zarr.json"):
            try:
                found = json.loads(path.read_bytes())
            except ValueError as error:
                torn.append(f"{path.parent.name}/{path.name} at {frame.f_code.co_name}:{frame.f_lineno}: {error}")
            else:
                if path.parent.name == "activation" and found["shape"][:2] not in shapes:
                    shapes.append(found["shape"][:2])
        return look_around

    torn: list[str] = []
    before = sys.gettrace()
    sys.settrace(look_around)
    try:
        store = GrowingStore(str(layers))
        store.publish(make_spec(), (0, 0, 0), None)
        store.publish(make_spec(), (0, 6, 0), None)
        store.publish(make_spec("gradient"), (1, 0, 0), None)
        store.finish(None)
    finally:
        sys.settrace(before)
    assert shapes == [[1, 1], [1, 8], [2, 8], [2, 7]]
    assert torn == []
    assert sorted(path.name for path in layers.rglob("*")) == ["activation", "conv1", "gradient", *["zarr.json"] * 4]


# Dimension names ----------------------------------------------------------------------------------------------------


def publish_all(directory: str, specs: list[ArraySpec]) -> dict[str, dict[str, Any]]:
    store = ArrayStore(directory)
    for batch, spec in enumerate(specs):
        store.publish(spec, (0, batch, 1 if spec.calls else 0), None)
    store.finish(None)
    return {spec.name: metadata(Path(directory), spec.path) for spec in specs}


def test_dimension_names(layers: Path) -> None:
    found = publish_all(
        str(layers),
        [
            make_spec(chunk=(64, 10)),
            make_spec("gradient", (64, 10)),
            make_spec("activation", (32, 10), name="activation.s32x10"),
            make_spec("parameter", (64, 3, 3), leaf="weight"),
            make_spec("activation", (), leaf="loss"),
            make_spec("activation", (64,), leaf="hidden", shards=(1, 8, 16)),
        ],
    )
    named = {name: array["dimension_names"] for name, array in found.items()}
    assert named["activation"] == ["epoch", "batch", "sample", "activation_1"]
    assert named["gradient"] == ["epoch", "batch", "sample", "gradient_1"]
    assert named["activation.loss"] == ["epoch", "batch"]
    assert named["activation.hidden.calls"] == ["epoch", "batch", "call", "sample"]
    assert named["activation.s32x10"][:2] == ["epoch", "batch"]
    assert named["activation.s32x10"][2:] == ["activation_0.s32x10", "activation_1.s32x10"], "its samples are fewer"
    assert named["parameter.weight"][2:] == ["parameter_0.weight", "parameter_1.weight", "parameter_2.weight"], "a parameter has no samples"


some_arrays = st.lists(
    st.tuples(
        st.sampled_from((*KINDS[:3], "parameter")),
        st.sampled_from(["", "a", "a_1", "a_0", "a_1_1", "hidden.0", "sample", "epoch", "_1"]),
        st.lists(st.integers(1, 4), max_size=3).map(tuple),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda array: (array[0], array[1], array[3]),
)


@given(some_arrays)
@example([("activation", "", (2, 3), False), ("activation", "_1", (2, 5), False)])
@settings(max_examples=40, deadline=None)
def test_no_dimension_name_has_two_sizes_within_a_layer(chosen: list[tuple[str, str, tuple[int, ...], bool]]) -> None:
    specs = [make_spec(kind, chunk, (1, 8, 16) if calls else (1, 8), leaf=leaf) for kind, leaf, chunk, calls in chosen]
    with tempfile.TemporaryDirectory() as directory:
        sizes: dict[str, int] = {}
        for array in publish_all(directory, specs).values():
            names = array["dimension_names"]
            assert len(set(names)) == len(names) == len(array["shape"])
            for name, size in zip(names, array["shape"], strict=True):
                assert sizes.setdefault(name, size) == size, name


@pytest.mark.parametrize(("phase", "leaf", "other"), [("train", "hidden", "hidden_1"), ("eval", "", "eval_1"), ("train", "~x", "~x_1")])
def test_no_dimension_has_the_name_of_an_array(layers: Path, phase: str, leaf: str, other: str) -> None:
    """Else xarray takes that array for the dimension's coordinates, and it is missing among the variables."""
    found = publish_all(str(layers), [make_spec(chunk=(2, 3), leaf=leaf, phase=phase), make_spec(chunk=(2, 5), leaf=other)])
    dimensions = {name for array in found.values() for name in array["dimension_names"]}
    assert not dimensions & set(found)


# Data types ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registered", "scalar", "name", "fill"),
    [(BFloat16, ml_dtypes.bfloat16, "bfloat16", "NaN"), (Float8E5M2, ml_dtypes.float8_e5m2, "float8_e5m2", "0x7e")],
)
def test_data_types_are_registered(registered: Any, scalar: Any, name: str, fill: str) -> None:
    made = registered.from_native_dtype(np.dtype(scalar))
    assert made.to_native_dtype() == np.dtype(scalar)
    assert made.to_json(3) == name
    assert made.item_size == np.dtype(scalar).itemsize
    assert registered.from_json(name, zarr_format=3) == made
    assert made.default_scalar() == 0
    assert made.cast_scalar(1.5) == scalar(1.5)
    assert made.cast_scalar(np.int64(2)) == scalar(2)
    assert data_type_registry.get(name) is registered
    for value in (scalar(1.5), scalar(-0.0), scalar("nan"), scalar("inf"), scalar("-inf"), np.finfo(np.float32).tiny.astype(scalar)):
        written = made.to_json_scalar(value, zarr_format=3)
        assert made.from_json_scalar(written, zarr_format=3).tobytes() == value.tobytes()
        assert json.loads(json.dumps(written, allow_nan=False)) == written
        as_bits = f"0x{int.from_bytes(value.tobytes(), 'little'):0{2 * made.item_size}x}"
        assert made.from_json_scalar(as_bits, zarr_format=3).tobytes() == value.tobytes(), (
            "the Zarr specification allows any float as its bits"
        )
    for written, value in [(1.5, 1.5), ("NaN", np.nan), ("Infinity", np.inf), ("-Infinity", -np.inf)]:
        np.testing.assert_equal(float(made.from_json_scalar(written, zarr_format=3)), value)
    assert made.to_json_scalar(scalar("nan"), zarr_format=3) == fill, "what zarrs and TensorStore read too"
    for wrong in (np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.float8_e4m3fn)):
        with pytest.raises(ValueError, match=f"expected dtype {name}"):
            registered.from_native_dtype(wrong)
    with pytest.raises(ValueError, match="float32"):
        registered.from_json("float32", zarr_format=3)
    with pytest.raises(ValueError, match="format 3"):
        made.to_json(2)
    with pytest.raises(ValueError, match="format 3"):
        registered.from_json({"name": "<f2", "object_codec_id": None}, zarr_format=2)
    with pytest.raises(TypeError, match=name):
        made.cast_scalar("text")


@pytest.mark.parametrize("scalar", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2], ids=["bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("shards", [None, (4, 4)])
def test_zarr_itself_writes_and_reads_them(tmp_path: Path, scalar: Any, shards: tuple[int, ...] | None) -> None:
    values = (
        np.random.default_rng(0)
        .integers(0, 1 << 8 * np.dtype(scalar).itemsize, (7, 5))
        .astype(f"u{np.dtype(scalar).itemsize}")
        .view(scalar)
    )
    array = zarr.create_array(tmp_path / "a", shape=(7, 5), chunks=(2, 2), shards=shards, dtype=np.dtype(scalar), fill_value=float("nan"))
    array[:5] = values[:5]
    found = zarr.open_array(tmp_path / "a", mode="r")
    assert found.dtype == np.dtype(scalar)
    bits = f"u{np.dtype(scalar).itemsize}"
    np.testing.assert_array_equal(found[:5].view(bits), values[:5].view(bits))
    assert np.isnan(found[5:].astype(np.float32)).all()
