"""What a model may do around its hooks, on a simulated device, under every schedule: each capture has the values that the tensor had when the hook saw it.

`test_device_mutants.py` takes a wait or a keep-alive out of the production code and runs the same again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from simulated import (
    IN_ORDER,
    SCHEDULES,
    CorruptionError,
    Schedule,
    SimulatedLayer,
    SimulatedRuntime,
    Simulation,
    check_bytes,
    check_memory,
    recording,
    to_bytes,
)
from torch import nn

import hookstore
from hookstore.format import PAGE_BYTES


@dataclass(frozen=True)
class Scenario:
    """Something that a model does, and the sizes it is done with."""

    run: Callable[[Simulation], None]
    options: dict[str, Any] = field(default_factory=dict)


def edit_in_place(simulation: Simulation) -> None:
    """Capture one tensor again and again and edit it right after each."""
    values = simulation.values(40, 25)
    tensor = simulation.runtime.compute(values)
    for _ in range(12):
        simulation.capture(tensor, values)
        simulation.runtime.launch(torch.Tensor.add_, tensor, 1.0)
        values = values + 1.0


def free_sources(simulation: Simulation) -> None:
    """Let go of each tensor right after its hook; the next one gets its memory."""
    for _ in range(12):
        values = simulation.values(40, 25)
        simulation.capture(simulation.runtime.compute(values), values)


def mix_sizes(simulation: Simulation) -> None:
    """Capture tensors of many sizes, edited right after."""
    for index in range(24):
        values = simulation.values((7 * index) % 23 + 1, 40)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor, values, layer=f"layer{index % 5}")
        simulation.runtime.launch(torch.Tensor.zero_, tensor)


def mix_layouts(simulation: Simulation) -> None:
    """Capture views, casts, scalars and other dtypes."""
    for _ in range(3):
        values = simulation.values(24, 18)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor.T, values.T, layer="transposed")
        simulation.capture(tensor[1::2, 2:7], values[1::2, 2:7], layer="strided")
        simulation.capture(tensor[3, :1].expand(9, 1), values[3, :1].expand(9, 1), layer="expanded")
        simulation.capture(tensor[2, 5], values[2, 5], layer="scalar")
        simulation.capture(tensor, values.half(), layer="half")
        simulation.capture(tensor.T, values.T.bfloat16(), layer="bfloat16")
        simulation.capture(tensor, values.double(), layer="double")
        simulation.runtime.launch(torch.Tensor.zero_, tensor)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.complex64, torch.float8_e5m2):
            values = simulation.values(5, 7, dtype=dtype)
            tensor = simulation.runtime.compute(values)
            simulation.capture(tensor, values, layer=str(dtype))
            simulation.runtime.launch(torch.Tensor.zero_, tensor.view(torch.uint8))


def conjugate(simulation: Simulation) -> None:
    """Capture tensors whose conjugation or negation torch has put off."""
    for _ in range(6):
        values = simulation.values(20, 16, dtype=torch.complex64)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor.conj(), values.conj().resolve_conj())
        simulation.capture(tensor.conj().imag, -values.imag, layer="negated")
        simulation.runtime.launch(torch.Tensor.zero_, tensor)


def pad(simulation: Simulation) -> None:
    """Capture tensors that do not fill their chunk: in the first dimension, and in another."""
    for shape in [(8, 16), (6, 16), (8, 11), (5, 9), (8, 16)]:
        values = simulation.values(*shape)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor, values)
        simulation.runtime.launch(torch.Tensor.zero_, tensor)


def switch_streams(simulation: Simulation) -> None:
    """Go from stream to stream, each with work of its own that the others do not wait for."""
    streams = [simulation.runtime.new_stream(f"stream {index}") for index in range(3)]
    for index in range(15):
        with simulation.runtime.use(streams[index % 3]):
            values = simulation.values(30, 20)
            tensor = simulation.runtime.compute(values)
            simulation.capture(tensor, values)
            simulation.runtime.launch(torch.Tensor.mul_, tensor, 2.0)
            if index % 2:
                simulation.capture(tensor, values * 2.0, layer="doubled")


def go_oversize(simulation: Simulation) -> None:
    """Capture tensors larger than the arena between small ones, and edit them right after."""
    for _ in range(3):
        values = simulation.values(9_001)
        tensor = simulation.runtime.compute(values)
        simulation.capture(tensor[:50], values[:50], layer="small")
        simulation.capture(tensor, values)
        simulation.runtime.launch(torch.Tensor.zero_, tensor)


def do_anything(simulation: Simulation) -> None:
    """Compute, capture, edit, free and switch streams by chance."""
    chance = random.Random(f"{simulation._schedule.name}")
    runtime = simulation.runtime
    streams = [runtime.main, runtime.new_stream("other")]
    alive: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for _ in range(150):
        action = chance.choice(["compute", "capture", "capture", "edit", "free"]) if alive else "compute"
        if action == "compute":
            stream = chance.choice(streams)
            values = simulation.values(chance.choice([1, 10, 40]), chance.choice([3, 50]))
            with runtime.use(stream):
                alive.append((stream, runtime.compute(values), values))
            continue
        index = chance.randrange(len(alive))
        stream, tensor, values = alive[index]
        with runtime.use(stream):
            if action == "capture":
                simulation.capture(tensor, values, layer=f"layer{values.shape[1]}")
            elif action == "edit":
                runtime.launch(torch.Tensor.mul_, tensor, -3.0)
                alive[index] = stream, tensor, values * -3.0
            else:
                del alive[index], tensor


def drain(simulation: Simulation) -> None:
    """Ask now and then that everything captured so far be taken."""
    for _ in range(4):
        edit_in_place(simulation)
        simulation.stager.drain()
        if not simulation.stager.is_empty:
            raise CorruptionError("drain returned before the arena was empty")


def interleave_hooks(simulation: Simulation) -> None:
    """Let a hook on a tensor of the host come in the middle of each of the device's: a region may be filled up while a copy into it is being made."""
    consume = simulation.runtime.on_call
    is_inside = False

    def come_in() -> None:
        nonlocal is_inside
        if not is_inside and not simulation.is_consuming:
            is_inside = True
            values = simulation.values(500)
            simulation.capture(values, values)
            is_inside = False
        consume()

    for _ in range(12):
        values = simulation.values(500)
        tensor = simulation.runtime.compute(values)
        simulation.runtime.on_call = come_in
        simulation.capture(tensor, values)
        simulation.runtime.on_call = consume


_SMALL_RING = {"ring_bytes": 8 << 10}
_NO_RING = {"ring_bytes": PAGE_BYTES - 1}


def update_loss_scales(simulation: Simulation) -> None:
    """Capture gradients whose loss scale lives on the device and is updated in place right after."""
    values = simulation.values(40, 25)
    tensor = simulation.runtime.compute(values)
    scale = simulation.runtime.compute(torch.tensor(65536.0))
    expected = 65536.0
    for _ in range(12):
        simulation.capture(tensor, values, scale=scale, expected_scale=expected)
        simulation.runtime.launch(torch.Tensor.mul_, scale, 0.5)
        expected /= 2


SCENARIOS = {
    "in-place edit": Scenario(edit_in_place),
    "in-place edit, small ring": Scenario(edit_in_place, _SMALL_RING),
    "in-place edit, no ring": Scenario(edit_in_place, _NO_RING),
    "freed sources": Scenario(free_sources),
    "freed sources, small ring": Scenario(free_sources, _SMALL_RING),
    "mixed sizes": Scenario(mix_sizes),
    "mixed sizes, small ring": Scenario(mix_sizes, _SMALL_RING),
    "mixed sizes, some larger than the ring": Scenario(mix_sizes, {"ring_bytes": PAGE_BYTES}),
    "mixed sizes, small arena": Scenario(mix_sizes, {"arena_bytes": 2 * PAGE_BYTES}),
    "mixed sizes, small ring and arena": Scenario(mix_sizes, {"arena_bytes": 2 * PAGE_BYTES, **_SMALL_RING}),
    "layouts": Scenario(mix_layouts),
    "layouts, no ring": Scenario(mix_layouts, _NO_RING),
    "conjugated": Scenario(conjugate),
    "padding": Scenario(pad),
    "padding, no ring": Scenario(pad, _NO_RING),
    "streams": Scenario(switch_streams),
    "streams, small ring": Scenario(switch_streams, _SMALL_RING),
    "oversize": Scenario(go_oversize, {"arena_bytes": 16 << 10}),
    "oversize, pieces larger than the ring": Scenario(go_oversize, {"arena_bytes": 16 << 10, "ring_bytes": PAGE_BYTES}),
    "drains": Scenario(drain),
    "loss scales": Scenario(update_loss_scales),
    "loss scales, small ring": Scenario(update_loss_scales, _SMALL_RING),
    "loss scales, no ring": Scenario(update_loss_scales, _NO_RING),
    "interleaved hooks": Scenario(interleave_hooks, {"arena_bytes": 4 * PAGE_BYTES}),
    "anything": Scenario(do_anything, {"arena_bytes": 20 << 10, **_SMALL_RING}),
}


def run_scenario(name: str, schedule: Schedule, **options: Any) -> Simulation:
    """Run a scenario to its end; raises `CorruptionError` if anything is wrong."""
    scenario = SCENARIOS[name]
    simulation = Simulation(schedule, **{**scenario.options, **options})
    scenario.run(simulation)
    simulation.finish()
    return simulation


RECORDINGS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "recorded, large ring": {"ring_bytes": 1 << 20},
    "recorded, encoded": {"codec": "zstd", "ring_bytes": 1 << 20},
    "recorded oversize": {"shape": (200, 100), "num_batches": 3, "ring_bytes": 1 << 20},
}

RECORDER_SCHEDULES = [schedule for schedule in SCHEDULES if not schedule.consumer_is_eager][:4]
"""The writer takes what is staged as it likes, in its own thread."""


def record_and_read(
    monkeypatch: Any, path: Any, schedule: Schedule, *, num_batches: int = 8, shape: tuple[int, ...] = (50, 40), **options: Any
) -> None:
    """Record activations and gradients on a simulated device, edit and free them right after their hooks, and compare what is read back."""
    runtime = SimulatedRuntime(schedule)
    model = nn.ModuleList(SimulatedLayer(runtime) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    expected = {}
    with recording(monkeypatch, model, path, runtime, kinds=("activation", "gradient"), **options) as recorder:
        for batch in range(num_batches):
            for name, layer in model.named_children():
                values, gradient_values = torch.randn((2, *shape), generator=generator)
                with recorder.at(epoch=0, batch=batch):
                    output = layer(values)
                runtime.launch(torch.Tensor.add_, output.detach(), 1.0)
                gradient = runtime.compute(gradient_values)
                output.backward(gradient)
                runtime.launch(torch.Tensor.zero_, gradient)
                expected[name, "activation", batch], expected[name, "gradient", batch] = values, gradient_values
    with hookstore.open(path) as run:
        for (name, kind, batch), values in expected.items():
            check_bytes(f"{kind} of layer {name}, batch {batch}", run[name][kind][0, batch].tobytes(), to_bytes(values))
    check_memory(recorder, runtime)


@pytest.mark.parametrize("schedule", [*SCHEDULES, IN_ORDER], ids=str)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, schedule):
    run_scenario(name, schedule)


@pytest.mark.parametrize("schedule", RECORDER_SCHEDULES, ids=str)
@pytest.mark.parametrize("name", RECORDINGS)
def test_recording(name, schedule, tmp_path, monkeypatch):
    record_and_read(monkeypatch, tmp_path / "run", schedule, **RECORDINGS[name])
