"""Two ranks on gloo: what each of them records under DDP and FSDP2, against known values."""

from __future__ import annotations

import copy
import importlib.util
import json
import pathlib
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import hookstore

KINDS = ("activation", "gradient", "input", "input_gradient", "parameter", "parameter_gradient")
# The gradient of a parameter that FSDP2 has sharded is a DTensor, of which the local part is stored.
TAKES_DTENSORS = importlib.util.find_spec("hookstore.parts") is not None

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch is built without gloo")


def recording(model, path, **options):
    return hookstore.record(model, path, **{"buffer_bytes": 1 << 20, **options})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two ranks have done all of the below; one pair of processes for all tests, since starting them takes most of the time."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    mp.spawn(_run, (str(tmp_path),), nprocs=2)
    return tmp_path


def _run(rank, directory):
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", hookstore.CaptureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    try:
        for work in (train_under_ddp, train_under_fsdp, record_into_one_directory):
            work(rank, pathlib.Path(directory) / work.__name__)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def linear(*rows):
    weight = torch.tensor(rows)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


# DDP -----------------------------------------------------------------------------------------------------------------


def train_under_ddp(rank, tmp_path):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(linear([1.0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.tensor([[10.0 * (rank + 1)]])
    with recording(model, tmp_path / f"rank{rank}", layers=["", "0"], kinds=KINDS) as recorder:
        for _ in recorder.batches(range(2), epoch=0):
            optimizer.zero_grad()
            (model(inputs) * 2).sum().backward()
            optimizer.step()
        with pytest.raises(hookstore.RunExistsError, match=f"rank {rank} of 2.*rank{rank}"):
            recording(model, tmp_path / "rank0")
        dist.barrier()  # while both record
    (tmp_path / f"names{rank}.json").write_text(json.dumps([name for name, _ in model.named_modules()]))


@pytest.fixture(scope="module")
def under_ddp(directory):
    return directory / "train_under_ddp"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_records_its_own_values_under_ddp(under_ddp, rank):
    with hookstore.open(under_ddp / f"rank{rank}") as run:
        assert run.layers == ["", "0"]
        assert run["0"].activation[0, 0].tolist() == [[10.0 * (rank + 1)]]
        assert run["0"].input[0, 0].tolist() == [[10.0 * (rank + 1)]]
        assert run["0"].gradient[0, 0].tolist() == [[2.0]]
        assert run["0"].parameter_gradient[0, 0].tolist() == [[30.0]], "what both ranks have stepped with"
        # The mean of 20 and 40 is what both have stepped with: 1 - 0.1 * 30.
        assert [run["0"].parameter[0, batch].item() for batch in range(2)] == [1.0, -2.0]
        assert run["0"].activation[0, 1].tolist() == [[-20.0 * (rank + 1)]]
        assert run["0"].activation.rows["step"].to_pylist() == [0, 1]
        assert run["module.0"].name == "0"
        assert "module.0" in json.loads((under_ddp / f"names{rank}.json").read_text())


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_and_arrays_carry_the_rank(under_ddp, rank):
    with hookstore.open(under_ddp / f"rank{rank}") as run:
        rows = run.manifest.to_pylist()
        assert {row["rank"] for row in rows} == {rank}
        assert all(row["array"].endswith(f".rank{rank}") == bool(rank) for row in rows)
        assert not hookstore.verify(under_ddp / f"rank{rank}").faults


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_of_any_rank_can_be_taken_up_again_without_a_process_group(under_ddp, tmp_path, rank):
    shutil.copytree(under_ddp / f"rank{rank}", tmp_path / "run")
    model = nn.Sequential(linear([7.0]))
    with recording(model, tmp_path / "run", layers="0", mode="a") as recorder, recorder.at(epoch=0, batch=2):
        model(torch.ones(1, 1))
    with hookstore.open(tmp_path / "run") as run:
        assert run["0"].activation[0, 2].tolist() == [[7.0]]
        assert run["0"].activation[0, 0].tolist() == [[10.0 * (rank + 1)]]
        assert set(run["0"].activation.rows["rank"].to_pylist()) == {0, rank}


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def network():
    return nn.Sequential(linear([1.0, 2.0], [3.0, 4.0]), nn.ReLU(), linear([1.0, -1.0], [2.0, 0.5]))


def train_under_fsdp(rank, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for order in ("hooks_first", "shards_first", "compiled"):
        model = network()

        def shard(model):
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)

        if order != "hooks_first":
            shard(model)
        called = torch.compile(model, backend="aot_eager") if order == "compiled" else model
        optimizer = None
        with recording(model, tmp_path / order / f"rank{rank}", kinds=KINDS if TAKES_DTENSORS else KINDS[:-1]) as recorder:
            if order == "hooks_first":
                shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in recorder.batches(range(2), epoch=0):
                optimizer.zero_grad()
                (called(torch.tensor([[1.0, float(rank)]])) * (rank + 1)).sum().backward()
                optimizer.step()
        assert all("FSDP" in type(model[index]).__name__ for index in (0, 2))


@pytest.fixture(scope="module")
def under_fsdp(directory):
    return directory / "train_under_fsdp"


@pytest.fixture(scope="module")
def reference():
    """What two ranks compute that average their gradients, worked out in one process: for each batch, per rank, activations, gradients and weights."""
    model = network()
    batches = []
    for _ in range(2):
        ranks, totals = [], [torch.zeros_like(parameter) for parameter in model.parameters()]
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        for rank in range(2):
            first = model[0](torch.tensor([[1.0, float(rank)]]))
            last = model[2](torch.relu(first))
            loss = (last * (rank + 1)).sum()
            gradients = torch.autograd.grad(loss, [first, last, *model.parameters()])
            totals = [total + gradient / 2 for total, gradient in zip(totals, gradients[2:], strict=True)]
            ranks.append({"0": (first.detach(), gradients[0], weights[0]), "2": (last.detach(), gradients[1], weights[1])})
        with torch.no_grad():
            for parameter, total in zip(model.parameters(), totals, strict=True):
                parameter.sub_(0.01 * total)
        batches.append((ranks, copy.deepcopy(totals)))
    return batches


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("order", ["hooks_first", "shards_first", "compiled"])
def test_each_rank_records_its_own_values_under_fsdp(under_fsdp, reference, order, rank):
    with hookstore.open(under_fsdp / order / f"rank{rank}") as run:
        assert run.layers == ["0", "1", "2"]
        assert [layer["module"] for layer in run.description["layers"]][::2] == ["torch.nn.modules.linear.Linear"] * 2
        assert run.info().statuses == {"ok": len(run.manifest)}
        for batch, (ranks, totals) in enumerate(reference):
            for layer, (activation, gradient, weight) in ranks[rank].items():
                np.testing.assert_allclose(run[layer].activation[0, batch], activation, rtol=1e-6)
                np.testing.assert_allclose(run[layer].gradient[0, batch], gradient, rtol=1e-6)
                # The whole weight, as the forward used it, on every rank.
                np.testing.assert_allclose(run[layer].parameter[0, batch], weight, rtol=1e-6)
            for layer, total in zip(("0", "2"), totals, strict=True) if TAKES_DTENSORS else ():
                # Its own row of the mean of both ranks' gradients.
                np.testing.assert_allclose(run[layer].parameter_gradient[0, batch], total[rank : rank + 1], rtol=1e-6)


# One directory -------------------------------------------------------------------------------------------------------


def record_into_one_directory(rank, tmp_path):
    model = linear([1.0])
    error = None
    try:
        with recording(model, tmp_path / "run", layers=""):
            dist.barrier()
            model(torch.ones(1, 1))
    except (hookstore.RunLockedError, hookstore.RunExistsError) as caught:
        error = str(caught)
        dist.barrier()
    (tmp_path / f"error{rank}.json").write_text(json.dumps(error))


def test_a_second_rank_in_the_same_directory_is_refused(directory):
    tmp_path = directory / "record_into_one_directory"
    errors = [json.loads((tmp_path / f"error{rank}.json").read_text()) for rank in range(2)]
    (refused,) = [rank for rank, error in enumerate(errors) if error]
    assert f"this is rank {refused} of 2: each records into a directory of its own, such as {tmp_path}/run/rank{refused}" in errors[refused]
    with hookstore.open(tmp_path / "run") as run:
        assert run.manifest["rank"].to_pylist() == [1 - refused]
