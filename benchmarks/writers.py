"""Ways to bring a workload's tensors to disk: hookstore, the same bytes written raw, and what else people use."""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import h5py
import numpy as np
import safetensors.torch
import tensorstore
import torch
import zarr
from conftest import Scratch
from workloads import Workload, assert_same_bits, size_of

import hookstore
import hookstore.recorder
from hookstore.device import allocate_host

# Raw writes are held against hookstore's with the same number of threads: one, as in its writer (encoders write nothing).
WRITING_THREADS = 1


class RawWrites:
    """The same bytes, lying ready in page-aligned memory, past the page cache into as many files by as many threads as hookstore has.

    Attributes
    ----------
    is_direct : bool
        Whether the file system takes O_DIRECT.
    """

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        assert workload.tensor_bytes % mmap.PAGESIZE == 0
        self.is_direct = hasattr(os, "O_DIRECT")
        self._workload = workload
        self._scratch = scratch
        # (memory of the same kind as hookstore's: O_DIRECT is faster from huge pages)
        num_bytes = workload.tensor_bytes
        memory = memoryview(allocate_host(num_bytes * len(workload.distinct), pinned=False).numpy())
        self._buffers = [memory[start : start + num_bytes] for start in range(0, len(memory), num_bytes)]
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
        layers = range(self._workload.num_layers)
        with ThreadPoolExecutor(WRITING_THREADS) as threads:
            for written in [threads.submit(self._write_layers, layers[first::WRITING_THREADS], flags) for first in range(WRITING_THREADS)]:
                written.result()

    def _write_layers(self, layers: range, flags: int) -> None:
        workload = self._workload
        files = {layer: os.open(self._path(layer), os.O_CREAT | os.O_WRONLY | flags, 0o666) for layer in layers}
        try:
            for batch in range(workload.num_batches):
                for layer, file in files.items():
                    buffer = self._buffers[workload.index(layer, batch)]
                    assert os.pwrite(file, buffer, batch * workload.tensor_bytes) == workload.tensor_bytes
            for file in files.values():
                getattr(os, "fdatasync", os.fsync)(file)
        finally:
            for file in files.values():
                os.close(file)

    def verify(self) -> None:
        """Compare the files."""
        shape = (self._workload.num_batches, *self._workload.shape)
        contents = [np.memmap(self._path(layer), np.float32, "r", shape=shape) for layer in range(self._workload.num_layers)]
        for layer, batch, tensor in self._workload:
            assert_same_bits(np.asarray(contents[layer][batch]), tensor)

    def _path(self, layer: int) -> Path:
        return self._scratch.path / f"{layer}.raw"


class Recorded:
    """Recorded by hookstore through its public interface: from `hookstore.record` until the recorder is closed.

    Attributes
    ----------
    stored_bytes, num_files : int
        Bytes of the last run's files, and number of those that hold tensors.
    """

    def __init__(self, workload: Workload, scratch: Scratch, codec: str | None = None, num_encoders: int = 2) -> None:
        self.stored_bytes = self.num_files = 0
        self._workload = workload
        self._path = scratch.path / "run"
        self._codec = codec
        self._num_encoders = num_encoders
        self._model = workload.model()

    def turn(self) -> None:
        """Record every batch."""
        layers = list(self._model)
        with (
            torch.no_grad(),
            encoder_threads(self._num_encoders),
            hookstore.record(self._model, self._path, codec=self._codec) as recorder,
        ):
            for batch in recorder.batches(range(self._workload.num_batches), epoch=0):
                for layer, tensor in zip(layers, self._workload.batch(batch), strict=True):
                    layer(tensor)

    def verify(self) -> None:
        """Compare what the run gives."""
        with hookstore.open(self._path) as run:
            for layer, batch, tensor in self._workload:
                assert_same_bits(run[str(layer)].activation[0, batch], tensor)
            self.num_files = len(set(zip(run.manifest["array"].to_pylist(), run.manifest["shard"].to_pylist(), strict=True)))
        self.stored_bytes = size_of(self._path)


@contextlib.contextmanager
def encoder_threads(number: int) -> Iterator[None]:
    """Let recorders have that many encoder threads, for which there is no option."""
    with mock.patch.object(hookstore.recorder, "Writer", functools.partial(hookstore.recorder.Writer, num_encoders=number)):
        yield


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

    def _path(self, layer: int, batch: int) -> Path:
        return self._scratch.path / f"{layer}-{batch}.pt"


class SafetensorsSaved:
    """A file for each tensor, by safetensors."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._scratch = scratch

    def turn(self) -> None:
        """Save every tensor."""
        for layer, batch, tensor in self._workload:
            safetensors.torch.save_file({"tensor": tensor}, self._path(layer, batch))

    def verify(self) -> None:
        """Compare the files."""
        for layer, batch, tensor in self._workload:
            assert_same_bits(safetensors.torch.load_file(self._path(layer, batch))["tensor"].numpy(), tensor)

    def _path(self, layer: int, batch: int) -> Path:
        return self._scratch.path / f"{layer}-{batch}.safetensors"


class H5pyWritten:
    """A file with a dataset for each layer and a chunk for each batch, uncompressed, by h5py."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._path = scratch.path / "tensors.h5"

    def turn(self) -> None:
        """Create the datasets and assign every batch."""
        shape, num_batches = self._workload.shape, self._workload.num_batches
        with h5py.File(self._path, "w") as file:
            datasets = [
                file.create_dataset(str(layer), (num_batches, *shape), "float32", chunks=(1, *shape))
                for layer in range(self._workload.num_layers)
            ]
            for layer, batch, tensor in self._workload:
                datasets[layer][batch] = tensor.numpy()

    def verify(self) -> None:
        """Compare the datasets."""
        with h5py.File(self._path) as file:
            for layer, batch, tensor in self._workload:
                assert_same_bits(file[str(layer)][batch], tensor)


class TensorStoreWritten:
    """A Zarr v3 array for each layer and a chunk for each batch, uncompressed, by TensorStore, as concurrently as it likes."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._scratch = scratch

    def turn(self) -> None:
        """Create the arrays and write every batch."""
        arrays = [self._open(layer, create=True) for layer in range(self._workload.num_layers)]
        for written in [arrays[layer][batch].write(tensor.numpy()) for layer, batch, tensor in self._workload]:
            written.result()

    def _open(self, layer: int, *, create: bool = False) -> tensorstore.TensorStore:
        shape, num_batches = self._workload.shape, self._workload.num_batches
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(self._scratch.path / str(layer))}}
        if not create:
            return tensorstore.open(spec, open=True).result()
        chunks = tensorstore.ChunkLayout(chunk_shape=(1, *shape))
        return tensorstore.open(spec, create=True, dtype=tensorstore.float32, shape=(num_batches, *shape), chunk_layout=chunks).result()

    def verify(self) -> None:
        """Compare the arrays."""
        arrays = [self._open(layer) for layer in range(self._workload.num_layers)]
        for layer, batch, tensor in self._workload:
            assert_same_bits(arrays[layer][batch].read().result(), tensor)


class ZarrWritten:
    """A Zarr v3 array for each layer and a chunk for each batch, uncompressed, by zarr-python."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        self._workload = workload
        self._scratch = scratch

    def turn(self) -> None:
        """Create the arrays and assign every batch."""
        shape, num_batches = self._workload.shape, self._workload.num_batches
        arrays = [
            zarr.create_array(
                self._scratch.path / str(layer), shape=(num_batches, *shape), chunks=(1, *shape), dtype="float32", compressors=None
            )
            for layer in range(self._workload.num_layers)
        ]
        for layer, batch, tensor in self._workload:
            arrays[layer][batch] = tensor.numpy()

    def verify(self) -> None:
        """Compare the arrays."""
        arrays = [zarr.open_array(self._scratch.path / str(layer), mode="r") for layer in range(self._workload.num_layers)]
        for layer, batch, tensor in self._workload:
            assert_same_bits(np.asarray(arrays[layer][batch]), tensor)
