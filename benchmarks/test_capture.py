"""Durable capture: from the first tensor until every byte is on the device."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from conftest import Scale, Scratch
from interleave import interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import hookstore

TORCH_THREADS = 1  # one thread computes, as in the contenders that know nothing of torch; hookstore's writer is another
LAYERS = ("first", "second")
SHAPE = (64, 32, 28, 28)  # what a first convolution gives for a batch of 64
TENSOR_BYTES = 4 * 64 * 32 * 28 * 28
_NUM_DISTINCT = 8  # more than the caches hold, few enough to lie ready


class Passing(nn.Module):
    """Two layers that return the tensors that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.second = nn.Identity()

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Pass a tensor through each."""
        self.first(first)
        self.second(second)


class Workload:
    """A tensor for each batch and layer. Iterating gives them with their layer and batch, batch by batch.

    Parameters
    ----------
    num_batches : int
        Batches.
    relu : bool
        Whether half of the values are zero, as after a ReLU; normally distributed otherwise.
    """

    def __init__(self, num_batches: int, *, relu: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(SHAPE, generator=generator) for _ in range(_NUM_DISTINCT)]
        self.distinct = [tensor.relu() for tensor in drawn] if relu else drawn
        self.num_batches = num_batches
        self.num_tensors = len(LAYERS) * num_batches
        self.num_bytes = self.num_tensors * TENSOR_BYTES

    def index(self, layer: str, batch: int) -> int:
        """Return which of the distinct tensors it is."""
        return (len(LAYERS) * batch + LAYERS.index(layer)) % _NUM_DISTINCT

    def __getitem__(self, where: tuple[str, int]) -> torch.Tensor:
        return self.distinct[self.index(*where)]

    def __iter__(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        for batch in range(self.num_batches):
            for layer in LAYERS:
                yield layer, batch, self[layer, batch]


def assert_same_bits(found: np.ndarray[Any, Any], expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (tuple(expected.shape), np.float32)
    assert np.array_equal(found.view(np.uint32), expected.numpy().view(np.uint32))


class RawWrites:
    """The same bytes, lying ready in page-aligned memory, past the page cache into as many files by one thread.

    Attributes
    ----------
    is_direct : bool
        Whether the file system takes O_DIRECT.
    """

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        assert TENSOR_BYTES % mmap.PAGESIZE == 0
        self.is_direct = hasattr(os, "O_DIRECT")
        self._workload = workload
        self._scratch = scratch
        self._buffers = [memoryview(mmap.mmap(-1, TENSOR_BYTES)) for _ in workload.distinct]
        for buffer, tensor in zip(self._buffers, workload.distinct, strict=True):
            buffer[:] = memoryview(tensor.numpy()).cast("B")

    def turn(self) -> None:
        """Write and sync the files."""
        try:
            self._write(os.O_DIRECT if self.is_direct else 0)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
            self.is_direct = False
            self._write(0)

    def _write(self, flags: int) -> None:
        files = {layer: os.open(self._path(layer), os.O_CREAT | os.O_WRONLY | flags, 0o666) for layer in LAYERS}
        try:
            for layer, batch, _ in self._workload:
                buffer = self._buffers[self._workload.index(layer, batch)]
                assert os.pwrite(files[layer], buffer, batch * TENSOR_BYTES) == TENSOR_BYTES
            for file in files.values():
                getattr(os, "fdatasync", os.fsync)(file)
        finally:
            for file in files.values():
                os.close(file)

    def verify(self) -> None:
        """Compare the files."""
        contents = {layer: np.memmap(self._path(layer), np.float32, "r", shape=(self._workload.num_batches, *SHAPE)) for layer in LAYERS}
        for layer, batch, tensor in self._workload:
            assert_same_bits(np.asarray(contents[layer][batch]), tensor)

    def _path(self, layer: str) -> Path:
        return self._scratch.path / f"{layer}.raw"


class Recorded:
    """Recorded by hookstore through its public interface: from `hookstore.record` until the recorder is closed.

    Attributes
    ----------
    stored_bytes : int
        Bytes of the last run's files.
    """

    def __init__(self, workload: Workload, scratch: Scratch, codec: str | None = None) -> None:
        self.stored_bytes = 0
        self._workload = workload
        self._path = scratch.path / "run"
        self._codec = codec
        self._model = Passing()

    def turn(self) -> None:
        """Record every batch."""
        workload = self._workload
        with torch.no_grad(), hookstore.record(self._model, self._path, layers=LAYERS, codec=self._codec) as recorder:
            for batch in recorder.batches(range(workload.num_batches), epoch=0):
                self._model(*(workload[layer, batch] for layer in LAYERS))

    def verify(self) -> None:
        """Compare what the run gives."""
        with hookstore.open(self._path) as run:
            for layer, batch, tensor in self._workload:
                assert_same_bits(run[layer].activation[0, batch], tensor)
        self.stored_bytes = sum(path.stat().st_size for path in self._path.rglob("*") if path.is_file())


class TorchSaved:
    """A file for each tensor, by ``torch.save``."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._scratch = scratch

    def turn(self) -> None:
        """Save every tensor."""
        for layer, batch, tensor in self._workload:
            torch.save(tensor, self._path(layer, batch))

    def verify(self) -> None:
        """Compare the files."""
        for layer, batch, tensor in self._workload:
            assert_same_bits(torch.load(self._path(layer, batch), weights_only=True).numpy(), tensor)

    def _path(self, layer: str, batch: int) -> Path:
        return self._scratch.path / f"{layer}-{batch}.pt"


class ZarrWritten:
    """An array for each layer and a chunk for each batch, uncompressed, by zarr-python."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._scratch = scratch

    def turn(self) -> None:
        """Create the arrays and assign every batch."""
        shape = (self._workload.num_batches, *SHAPE)
        arrays = {
            layer: zarr.create_array(self._scratch.path / layer, shape=shape, chunks=(1, *SHAPE), dtype="float32", compressors=None)
            for layer in LAYERS
        }
        for layer, batch, tensor in self._workload:
            arrays[layer][batch] = tensor.numpy()

    def verify(self) -> None:
        """Compare the arrays."""
        arrays = {layer: zarr.open_array(self._scratch.path / layer, mode="r") for layer in LAYERS}
        for layer, batch, tensor in self._workload:
            assert_same_bits(np.asarray(arrays[layer][batch]), tensor)


def test_durable_capture(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    workload = Workload(scale.batches)
    raw = RawWrites(workload, scratch)
    contenders = {
        "zarr-python": ZarrWritten(workload, scratch),
        "torch.save": TorchSaved(workload, scratch),
        "raw": raw,
        "hookstore": Recorded(workload, scratch),
    }
    measured = interleave(benchmark, contenders, rounds=scale.rounds, prepare=scratch.renew, finish=os.sync)
    report(
        benchmark,
        measured,
        num_bytes=workload.num_bytes,
        num_tensors=workload.num_tensors,
        num_files=len(LAYERS),
        raw_is_direct=raw.is_direct,
    )


def test_codecs(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    workload = Workload(scale.batches // 4, relu=True)
    contenders = {name: Recorded(workload, scratch, codec) for name, codec in (("zstd", "zstd"), ("lz4", "lz4"), ("none", None))}
    measured = interleave(benchmark, contenders, rounds=scale.rounds, prepare=scratch.renew, finish=os.sync)
    stored_bytes = {name: contender.stored_bytes for name, contender in contenders.items()}
    report(benchmark, measured, num_bytes=workload.num_bytes, num_tensors=workload.num_tensors, stored_bytes=stored_bytes)
