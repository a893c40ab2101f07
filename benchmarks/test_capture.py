"""Durable bulk capture: from the first tensor until every byte is on the device."""

from __future__ import annotations

import os

from conftest import Scale, Scratch
from interleave import interleave, report
from pytest_benchmark.fixture import BenchmarkFixture
from workloads import Workload
from writers import H5pyWritten, RawWrites, Recorded, SafetensorsSaved, TensorStoreWritten, TorchSaved, ZarrWritten

TORCH_THREADS = 1  # one thread computes, as in the contenders that know nothing of torch; hookstore's writer is another
NUM_LAYERS = 6
SHAPE = (64, 32, 28, 28)  # what a first convolution gives for a batch of 64
PEERS = {
    "zarr-python": ZarrWritten,
    "torch.save": TorchSaved,
    "h5py": H5pyWritten,
    "tensorstore": TensorStoreWritten,
    "safetensors": SafetensorsSaved,
}


def test_durable_capture(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    workload = Workload(NUM_LAYERS, scale.batches, SHAPE)
    part = Workload(NUM_LAYERS, scale.peer_batches, SHAPE)  # the peers are slow, and are compared by the byte
    raw, recorded = RawWrites(workload, scratch), Recorded(workload, scratch)
    contenders = {**{name: make(part, scratch) for name, make in PEERS.items()}, "raw": raw, "hookstore": recorded}
    measured = interleave(benchmark, contenders, rounds=scale.rounds, prepare=scratch.renew, finish=os.sync)
    assert recorded.num_files == NUM_LAYERS  # as many as there are raw ones
    report(
        benchmark,
        measured,
        num_bytes={name: part.num_bytes if name in PEERS else workload.num_bytes for name in contenders},
        num_tensors={name: part.num_tensors if name in PEERS else workload.num_tensors for name in contenders},
        tensor_bytes=workload.tensor_bytes,
        num_files=NUM_LAYERS,
        raw_is_direct=raw.is_direct,
    )


def test_codecs(benchmark: BenchmarkFixture, scale: Scale, scratch: Scratch) -> None:
    workload = Workload(NUM_LAYERS, scale.peer_batches // 2 or 1, SHAPE, relu=True)
    contenders = {
        f"{codec}, {encoders}": Recorded(workload, scratch, codec, num_encoders=encoders)
        for codec in ("zstd", "lz4")
        for encoders in (1, 2)
    }
    contenders["none"] = Recorded(workload, scratch)
    measured = interleave(benchmark, contenders, rounds=scale.rounds, prepare=scratch.renew, finish=os.sync)
    stored_bytes = {name: contender.stored_bytes for name, contender in contenders.items()}
    report(benchmark, measured, num_bytes=workload.num_bytes, num_tensors=workload.num_tensors, stored_bytes=stored_bytes)
