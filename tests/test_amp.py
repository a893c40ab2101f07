"""Gradients under a GradScaler: what is stored is what the hook saw, with its scale; what is read is divided by it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookstore


class Scaled(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        self.outer = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.inner.weight.fill_(factor)
            self.outer.weight.fill_(1.0)

    def forward(self, x):
        return self.outer(self.inner(x))


def train(model, recorder, scaler, num_batches, *, factor=3.0, before_step=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for batch in recorder.batches(range(num_batches), epoch=0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum() * factor).backward()
        if before_step is not None:
            before_step(batch, model)
        scaler.step(optimizer)
        scaler.update()


def test_scale_is_stored_and_reading_divides(tmp_path):
    model = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with hookstore.record(model, tmp_path / "run", kinds=["activation", "gradient"], scaler=scaler) as recorder:
        train(model, recorder, scaler, 5)
    with hookstore.open(tmp_path / "run") as run:
        captures = run["inner"].gradient
        for batch, scale in enumerate([1024.0, 1024.0, 2048.0, 2048.0, 4096.0]):  # it doubles after each second step
            assert captures.row(0, batch)["loss_scale"] == scale
            assert captures[0, batch].dtype == np.float32
            assert captures[0, batch].tolist() == [[3.0]]
            assert captures.raw[0, batch].tolist() == [[3.0 * scale]]
            assert captures.tensor(0, batch).tolist() == [[3.0]]
            assert captures.raw.tensor(0, batch).tolist() == [[3.0 * scale]]
        assert run["inner"].activation.row(0, 0)["loss_scale"] is None
        assert run["inner"].activation[0, 0].tolist() == [[2.0]]
        assert captures.samples()[:].tolist() == [[3.0]] * 5
        assert captures.raw.samples()[[4, 0]].tolist() == [[3.0 * 4096], [3.0 * 1024]]
        assert captures.samples()[4].tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_small_gradients_survive_the_division(tmp_path, dtype):
    """1e-8 is nothing in float16, and is what the loss scale is there for."""
    model = Scaled().to(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    with hookstore.record(model, tmp_path / "run", kinds="gradient", scaler=scaler) as recorder:
        for _ in recorder.batches(range(1), epoch=0):
            scaler.scale(model(torch.ones(1, 1, dtype=dtype)).double().sum() * 1e-8).backward()
    with hookstore.open(tmp_path / "run") as run:
        captures = run["outer"].gradient
        stored = captures.raw.tensor(0, 0)
        assert stored.dtype == dtype
        assert stored.item() == torch.tensor(1e-8 * 65536, dtype=torch.float64).to(dtype).item()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert captures.tensor(0, 0).dtype == wide
        assert captures.tensor(0, 0).item() == (stored.to(wide) / 65536).item() != 0
        assert captures[0, 0].dtype == (np.float64 if dtype == torch.float64 else np.float32)
        assert captures[0, 0].item() == captures.tensor(0, 0).item()
        assert captures.samples()[0].item() == captures[0, 0].item()


def test_no_scale_before_the_first_scaled_loss_and_where_the_scaler_is_off(tmp_path):
    for enabled in (True, False):
        model = Scaled()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        with hookstore.record(model, tmp_path / f"run{enabled}", kinds="gradient", scaler=scaler) as recorder:
            for batch in recorder.batches(range(2), epoch=0):
                loss = model(torch.ones(1, 1)).sum() * 5
                (scaler.scale(loss) if batch or not enabled else loss).backward()
        with hookstore.open(tmp_path / f"run{enabled}") as run:
            captures = run["outer"].gradient
            assert [captures.row(0, batch)["loss_scale"] for batch in (0, 1)] == [None, 8.0 if enabled else None]
            assert [captures[0, batch].item() for batch in (0, 1)] == [5.0, 5.0]
            assert captures.samples()[:].reshape(-1).tolist() == [5.0, 5.0]


def test_overflow_is_what_it_was(tmp_path):
    model = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with hookstore.record(model, tmp_path / "run", kinds="gradient", scaler=scaler) as recorder:
        train(model, recorder, scaler, 2)
    with hookstore.open(tmp_path / "run") as run:
        assert run["inner"].gradient[0, 0].item() == math.inf
        assert run["inner"].gradient[0, 1].item() == 3.0
        assert run["inner"].gradient.row(0, 1)["loss_scale"] == 2.0**126


def test_scales_in_one_region_and_after_a_kill(tmp_path):
    """Many captures of a layer wait together, with scales of their own; the journal has them before the shard is sealed."""
    model = Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    with hookstore.record(model, tmp_path / "run", kinds="gradient", scaler=scaler) as recorder:
        train(model, recorder, scaler, 20)
        recorder.flush()
        with hookstore.open(tmp_path / "run") as run:
            assert run["inner"].gradient.samples()[:].reshape(-1).tolist() == [3.0] * 20
            assert [run["inner"].gradient.raw[0, batch].item() for batch in range(20)] == [3.0 * 2.0 ** (batch + 1) for batch in range(20)]
    with hookstore.open(tmp_path / "run") as run:
        scales = dict(
            zip(run["inner"].gradient.rows["batch"].to_pylist(), run["inner"].gradient.rows["loss_scale"].to_pylist(), strict=True)
        )
        assert scales == {batch: 2.0 ** (batch + 1) for batch in range(20)}
    assert hookstore.verify(tmp_path / "run").faults == []


def test_scaler_must_be_one(tmp_path):
    with pytest.raises(hookstore.OptionError, match="scaler: expected a torch.amp.GradScaler"):
        hookstore.record(Scaled(), tmp_path / "run", scaler=1024.0)


def test_autocast_layers_keep_the_dtype_they_had(tmp_path):
    """Autocast in one batch and not in the other: no silent cast, and gradients in the dtype of the output."""
    model = Scaled()
    with hookstore.record(model, tmp_path / "run", kinds=["activation", "gradient", "parameter"]) as recorder:
        for batch in recorder.batches(range(3), epoch=0):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=batch < 2):
                model(torch.full((1, 1), 1.5)).float().sum().backward()
    with hookstore.open(tmp_path / "run") as run:
        dtypes = [run["inner"].activation.tensor(0, batch).dtype for batch in range(3)]
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
        assert [run["inner"].gradient.tensor(0, batch).dtype for batch in range(3)] == dtypes
        assert run["inner"].parameter.tensor(0, 0).dtype == torch.float32
        assert [run["inner"].activation.tensor(0, batch).item() for batch in range(3)] == [3.0] * 3
