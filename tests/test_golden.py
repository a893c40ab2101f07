"""A small run that is kept in the repository: what is written today is what was written then, and what was written then is read today.

``python tests/test_golden.py`` writes it anew, which is right only together with a new format version, or where a change of its bytes is meant and
harmless to readers. Every value in it is a small whole number, so that no machine rounds it differently.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zarr
from crc32c import crc32c
from torch import nn

import hookstore
from hookstore.format import CRC_BYTES, PAGE_BYTES, TRAILER_BYTES, is_shard_key, parse_part_name
from hookstore.manifest import SCHEMA, stream_to_rows
from hookstore.shards import read_sealed

GOLDEN = Path(__file__).parent / "golden" / "tiny"
EARLIER = Path(__file__).parent / "golden" / "earlier"  # the same, made before the manifest had its column ``structure``
LAYERS = ["fc", "act", "narrow"]
KINDS = ["activation", "gradient", "parameter"]
SIZES = [4, 4, 2]  # the last batch is padded


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.act = nn.ReLU()
        self.narrow = nn.Linear(2, 2, dtype=torch.bfloat16)
        with torch.no_grad():
            self.fc.weight.copy_(torch.tensor([[1, -2, 3], [-1, 2, 0]]))
            self.fc.bias.copy_(torch.tensor([1, -1]))
            self.narrow.weight.copy_(torch.tensor([[1, 2], [-1, 1]]))
            self.narrow.bias.copy_(torch.tensor([0, 3]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.fc(inputs))
        return self.narrow(self.act(hidden - 1).bfloat16()).float()


def train(model: Tiny, batches: Any) -> None:
    """Two epochs of three batches; every value stays a whole number below 256."""
    optimizer = torch.optim.SGD(model.fc.parameters(), lr=1)
    for epoch in range(2):
        for batch in batches(epoch):
            inputs = torch.arange(3.0 * SIZES[batch]).remainder(5).sub(2).reshape(-1, 3) + epoch
            optimizer.zero_grad()
            (model(inputs) * torch.tensor([1.0, -1.0]) * (-1) ** batch).sum().backward()
            for parameter in model.fc.parameters():
                parameter.grad.sign_()
            optimizer.step()


@contextlib.contextmanager
def constant_surroundings() -> Iterator[None]:
    """Let no clock decide what is written: neither times, nor how captures are gathered into regions."""
    with (
        mock.patch("time.time_ns", return_value=1_767_323_045_000_000_000),
        mock.patch("time.strftime", return_value="2026-01-02T03:04:05Z"),
        mock.patch("hookstore.writer._REGION_AGE_S", float("inf")),
    ):
        yield


def record(path: Path) -> None:
    model = Tiny()
    with (
        constant_surroundings(),
        hookstore.record(model, path, layers=LAYERS, kinds=KINDS, epochs=range(2), buffer_bytes=1 << 20) as recorder,
    ):
        train(model, lambda epoch: recorder.batches(range(3), epoch=epoch))
    # What the run says about this machine and these versions is the same everywhere.
    description = json.loads((path / "run.json").read_bytes())
    description["environment"] = dict.fromkeys(description["environment"], "")
    description["model"] = "tests.Tiny"
    (path / "run.json").write_text(json.dumps(description, indent=2), newline="\n")


def files(run: Path) -> dict[str, Path]:
    """The run's files by their names, those of manifest parts without the checksum that depends on pyarrow's version."""
    found = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if path.parent.name == "manifest":
            assert parse_part_name(path.name) is not None, name
            name = f"{name[: -len('00000000.parquet')]}checksum.parquet"
        found[name] = path
    return found


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "tiny"
    record(path)
    return path


@pytest.fixture(scope="module")
def computed() -> dict[tuple[str, str, str, int, int, int], torch.Tensor]:
    """What the model computes without hookstore, by layer, kind, leaf, epoch, batch and call."""
    model = Tiny()
    found: dict[tuple[str, str, str, int, int, int], torch.Tensor] = {}
    here: list[int] = []
    calls: dict[str, int] = {}

    def batches(epoch: int) -> Iterator[int]:
        for batch in range(3):
            here[:] = [epoch, batch]
            calls.clear()
            yield batch

    def hook(name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            epoch, batch = here
            call = calls.get(name, 0)
            calls[name] = call + 1
            found[name, "activation", "", epoch, batch, call] = output.detach().clone()
            output.register_hook(lambda gradient: found.__setitem__((name, "gradient", "", epoch, batch, call), gradient.clone()))
            for leaf, parameter in module.named_parameters():
                found[name, "parameter", leaf, epoch, batch, call] = parameter.detach().clone()

        return keep

    for name in LAYERS:
        model.get_submodule(name).register_forward_hook(hook(name))
    train(model, batches)
    return found


# What is written today ----------------------------------------------------------------------------------------------


def test_the_values_are_small_whole_numbers(computed: dict[Any, torch.Tensor]) -> None:
    for tensor in computed.values():
        assert torch.equal(tensor, tensor.round())
        assert tensor.abs().max() < 256
    assert any(tensor.abs().max() > 4 for tensor in computed.values())
    assert len({tensor.numpy(force=True).tobytes() for key, tensor in computed.items() if key[:2] == ("fc", "activation")}) == 6


def test_the_same_files(fresh: Path) -> None:
    assert list(files(fresh)) == list(files(GOLDEN))


def test_the_same_metadata(fresh: Path) -> None:
    golden = files(GOLDEN)
    compared = [name for name in golden if name.endswith(".json")]
    for name in compared:
        assert json.loads(files(fresh)[name].read_bytes()) == json.loads(golden[name].read_bytes()), name
    assert len(compared) == 17, "run.json, 4 groups, 12 arrays"


def split(path: Path, num_entries: int) -> tuple[bytes, pa.Table, bytes]:
    """The chunks of a shard, its manifest rows, and its index."""
    contents = path.read_bytes()
    tail = 16 * num_entries + CRC_BYTES
    _, rows = read_sealed(str(path), num_entries)
    start = int.from_bytes(contents[len(contents) - tail - TRAILER_BYTES + 8 :][:8], "little")
    assert contents[start : start + len(rows)] == rows
    return contents[:start], pa.Table.from_batches(stream_to_rows(rows), schema=SCHEMA), contents[-tail:]


def test_the_same_shards(fresh: Path) -> None:
    """Chunks and index byte for byte. The rows between them are as Arrow writes them, with some bytes of their neighbours in memory: compared as rows."""
    golden = files(GOLDEN)
    shards = [name for name in golden if is_shard_key(name.rpartition("/")[2])]
    for name in shards:
        metadata = json.loads((golden[name].parent / "zarr.json").read_bytes())
        inner = metadata["codecs"][0]["configuration"]["chunk_shape"]
        num_entries = int(np.prod(metadata["chunk_grid"]["configuration"]["chunk_shape"])) // int(np.prod(inner))
        chunks, rows, index = split(files(fresh)[name], num_entries)
        golden_chunks, golden_rows, golden_index = split(golden[name], num_entries)
        assert chunks == golden_chunks, name
        assert index == golden_index, name
        assert rows.equals(golden_rows), name
        assert files(fresh)[name].stat().st_size % PAGE_BYTES == golden[name].stat().st_size % PAGE_BYTES == 0
    assert len(shards) == 12


ORDER = [(name, "ascending") for name in ("layer", "kind", "leaf", "epoch", "batch", "call")]


def test_the_same_manifest(fresh: Path) -> None:
    (part,), (golden,) = (fresh / "manifest").iterdir(), (GOLDEN / "manifest").iterdir()
    for path in (part, golden):
        parsed = parse_part_name(path.name)
        assert parsed is not None
        assert parsed == ((0, 0, 0), crc32c(path.read_bytes()))
    assert pq.read_schema(golden).remove_metadata().equals(SCHEMA)
    assert pq.read_schema(part).remove_metadata().equals(SCHEMA)
    assert pq.read_table(part).sort_by(ORDER).equals(pq.read_table(golden).sort_by(ORDER))


def test_shards_carry_the_rows_of_the_manifest(fresh: Path) -> None:
    for run in (fresh, GOLDEN):
        found = []
        for name, path in files(run).items():
            if is_shard_key(path.name):
                entries = {4: 6, 5: 6 * 16, 3: 6}
                dimensions = len(json.loads((path.parent / "zarr.json").read_bytes())["shape"])
                found.append(split(path, entries[dimensions])[1])
                assert name.startswith("layers/")
        (part,) = (run / "manifest").iterdir()
        assert pa.concat_tables(found).sort_by(ORDER).equals(pq.read_table(part).cast(SCHEMA).sort_by(ORDER))


class Leaves(nn.Module):
    def forward(self, batch: int) -> dict[str, torch.Tensor]:
        return {"first": torch.full((4, 3), batch), "second": torch.full((8, 3), batch), "third": torch.full((2, 2), batch)}


def test_the_same_layout_each_time(tmp_path: Path) -> None:
    """The order of rows, and which array's first dimension is named ``sample``, are those of the captures."""
    model = Leaves()
    for attempt in range(4):
        path = tmp_path / str(attempt)
        with hookstore.record(model, path, layers="", buffer_bytes=1 << 20) as recorder:
            for batch in recorder.batches(range(3), epoch=0):
                model(batch)
        with hookstore.open(path) as run:
            assert run.manifest["leaf"].to_pylist() == ["first"] * 3 + ["second"] * 3 + ["third"] * 3
        for leaf in ("first", "second", "third"):
            metadata = json.loads((path / f"layers/%root/activation.{leaf}/zarr.json").read_bytes())
            assert (metadata["dimension_names"][2] == "sample") == (leaf == "first")


# What was written then ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [GOLDEN, EARLIER])
def test_todays_reader_reads_it(computed: dict[Any, torch.Tensor], path: Path) -> None:
    with hookstore.open(path) as run:
        assert run.layers == LAYERS
        assert run.kinds == KINDS
        assert run.epochs == [0, 1]
        assert run.batches(1) == [0, 1, 2]
        assert run.info().state == "finished"
        assert run.manifest.num_rows == len(computed)
        for (layer, kind, leaf, epoch, batch, call), tensor in computed.items():
            captures = run[layer][kind]
            found = captures.tensor(epoch, batch, call, leaf=leaf)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor), (layer, kind, leaf, epoch, batch, call)
            array = captures.get(epoch, batch, call, leaf=leaf)
            assert array.shape == tensor.shape
            assert array.dtype.name == str(tensor.dtype).removeprefix("torch.")
            assert array.tobytes() == tensor.view(torch.uint8).numpy().tobytes()
            row = captures.row(epoch, batch, call, leaf=leaf)
            assert (row["step"], row["backward"], row["status"], row["phase"]) == (3 * epoch + batch, 0, "ok", "train")


def test_an_earlier_run_is_sound_and_can_be_gone_on_with(tmp_path: Path) -> None:
    run_path = tmp_path / "run"
    shutil.copytree(EARLIER, run_path)
    assert hookstore.verify(run_path).faults == []
    model = Tiny()
    with hookstore.record(model, run_path, layers=LAYERS, kinds=KINDS, epochs=range(3), buffer_bytes=1 << 20, mode="a") as recorder:
        for _ in recorder.batches(range(1), epoch=2):
            model(torch.ones(4, 3)).sum().backward()
    assert hookstore.verify(run_path).faults == []
    with hookstore.open(run_path) as run:
        assert run.batches(1) == [0, 1, 2]
        assert run["fc"].activation[2, 0].tolist() == [[3.0, 0.0]] * 4
    for part in (run_path / "manifest").iterdir():
        part.unlink()
    hookstore.recover(run_path)  # from the shards, which carry rows of both kinds
    with hookstore.open(run_path) as run:
        assert run["fc"].activation[2, 0].tolist() == [[3.0, 0.0]] * 4
        assert len(run["fc"].activation) == 7


def test_plain_zarr_reads_it(computed: dict[Any, torch.Tensor]) -> None:
    layers = zarr.open_group(GOLDEN / "layers", mode="r")
    for (layer, kind, leaf, epoch, batch, call), tensor in computed.items():
        name = ".".join(filter(None, [kind, leaf, "calls" if call else ""]))
        array = layers[f"{layer}/{name}"]
        where = (epoch, batch, call) if call else (epoch, batch)
        chunk = array[where].astype(np.float32)
        inside = tuple(slice(size) for size in tensor.shape)
        np.testing.assert_array_equal(chunk[inside], tensor.float().numpy())
        if chunk.shape != tensor.shape:
            assert np.isnan(chunk[tensor.shape[0] :]).all()


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in files(GOLDEN).values()) < 300_000


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        record(Path(scratch) / "tiny")
        shutil.rmtree(GOLDEN, ignore_errors=True)
        GOLDEN.parent.mkdir(exist_ok=True)
        shutil.copytree(Path(scratch) / "tiny", GOLDEN)
    total = sum(path.stat().st_size for path in files(GOLDEN).values())
    sys.stdout.write(f"wrote {len(files(GOLDEN))} files, {total:,} bytes, into {os.path.relpath(GOLDEN)}\n")
