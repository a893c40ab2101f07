"""``tools/gpu_check.py`` as far as that goes without a GPU: on the simulated device, which is made to pass for a GPU where figures are printed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hookstore

ROOT = Path(__file__).resolve().parent.parent
GPU_ROWS = ("D2H: plain", "D2H: hookstore's", "  chosen so by", "  captured on average", "  step with")


@pytest.fixture
def gpu_check(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DISK_BYTES", 16 << 20)
    monkeypatch.setattr(module, "SIMULATED_TESTS", ("tests/test_device_scenarios.py", "-k", "in-order and streams"))
    monkeypatch.setattr(module.Simulated, "rounds", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small work on a busy machine
    yield module
    torch.set_num_threads(num_threads)


class PretendedGpu:
    """Makes the simulated device pass for a GPU."""

    def __new__(cls, gpu_check):
        class Pretended(gpu_check.Simulated):
            is_gpu = True

            def memory(self):
                return {**super().memory(), "reserved": 3 << 20, "pinned": 5 << 20}

        return Pretended()


def test_simulated_device_from_end_to_end(gpu_check, tmp_path, capfd):
    assert gpu_check.main(["--simulated", "--seconds", "60", "--hookstore-dir", str(tmp_path)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "missing packages: none" in lines
    assert f"{gpu_check.NO_GPU}; the figures below are no GPU figures" in lines
    assert f"{gpu_check.NO_GPU}; the figures above are no GPU figures" in lines
    assert lines[-1] == "everything ran and passed"
    rows = [line.split(" | ") for line in lines if " | " in line]
    gpu_rows = [row for row in rows if row[0].startswith(GPU_ROWS)]
    assert len(gpu_rows) == 3 + 2 * 4
    assert all(row[1].strip() == "not measured" for row in gpu_rows)
    assert [row[0].split(",")[0] for row in rows if "both" not in row[0] and "layers" in row[1]] == ["resnet18", "2-layer encoder"]
    assert sum("bit-equal to plain copies" in row[1] for row in rows) == 2
    assert any(row[0].startswith("tests") and "passed" in row[1] for row in rows)
    assert not any(tmp_path.iterdir())


def test_a_part_that_fails_is_said_and_the_others_go_on(gpu_check, tmp_path, capfd, monkeypatch):
    def resnet(device):
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(gpu_check, "resnet", resnet)
    monkeypatch.setattr(gpu_check, "run_tests", lambda *_: 1 / 0)
    assert gpu_check.main(["--simulated", "--hookstore-dir", str(tmp_path)]) == 1
    out = capfd.readouterr().out
    assert "FAILED: resnet: ModuleNotFoundError: No module named 'torchvision'" in out
    assert "FAILED: tests: ZeroDivisionError" in out
    assert out.count("\nFAILED: ") == 2
    assert "captures are bit-equal" in out


def test_figures_of_a_gpu_are_printed(gpu_check, tmp_path, capsys, monkeypatch):
    allocate_host = gpu_check.allocate_host
    monkeypatch.setattr(gpu_check, "allocate_host", lambda num_bytes, pinned: allocate_host(num_bytes, pinned=False))
    chosen = gpu_check.CaptureSet(("layers.0", "layers.1"), 3, 16_384, "the reason")
    monkeypatch.setattr(gpu_check, "choose", lambda *_: chosen)
    device = PretendedGpu(gpu_check)
    report = gpu_check.Report(device)
    gpu_check.copy_to_host(report, device)
    gpu_check.check_model(report, device, gpu_check.transformer, (1e9, 1e9), tmp_path / "run", 0.0)
    rows = dict(line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines())
    rows = {name.strip(): measured.strip() for name, measured in rows.items()}
    assert not report.failures
    assert "not measured" not in rows.values()
    assert "GB/s" in rows["D2H: plain pinned copies"]
    assert "hidden" in rows["D2H: hookstore's beside computing"]
    assert rows["chosen so by"] == "the reason"
    assert "1 batch in 3, 0.02 MiB each" in rows["2-layer encoder, 2×16×64, torch.bfloat16"]
    assert rows["values"] == "nothing is missing, 8 captures are bit-equal to plain copies"
    assert "1 rounds" in rows["step with capture"]
    assert rows["device memory for capture, peak"] == "0.25 MiB allocated, 0.00 MiB reserved"  # the other turn had as much reserved
    assert rows["pinned memory for capture"] == "0.00 MiB"


def test_counts_of_a_cuda_device(gpu_check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"active_bytes.current": 30, "active_bytes.peak": 40})
    device = gpu_check.Cuda()
    assert device.name == "name of cuda:1"
    assert device.memory() == {"allocated": 10, "reserved": 20, "pinned": 30}
    monkeypatch.delattr(torch.cuda, "host_memory_stats")
    assert device.memory() == {"allocated": 10, "reserved": 20}


@pytest.mark.parametrize("step_s", [0.01, 0.1])
@pytest.mark.parametrize("disk_rate", [1e8, 3e9, 1e11])
@pytest.mark.parametrize("d2h_rate", [1e9, 2.5e10])
def test_captures_stay_under_the_bandwidths(gpu_check, d2h_rate, disk_rate, step_s):
    layer_bytes = {f"layer{number}": 50_000_000 // (number + 1) for number in range(53)}
    chosen = gpu_check.choose(layer_bytes, step_s, d2h_rate, disk_rate, 1 << 30)
    assert chosen.num_bytes == sum(layer_bytes[layer] for layer in chosen.layers)
    assert chosen.num_bytes / chosen.every <= 0.8 * min(d2h_rate, disk_rate) * step_s
    assert chosen.num_bytes <= min(1 << 29, 0.8 * d2h_rate * step_s)
    assert chosen.every <= gpu_check.LONGEST_PERIOD


def test_captures_are_all_that_the_bandwidths_take(gpu_check):
    layer_bytes = dict.fromkeys("abcdef", 100)
    assert gpu_check.choose(layer_bytes, 1.0, 1000.0, 1000.0, 1200)[:3] == (tuple("abcdef"), 1, 600)
    assert gpu_check.choose(layer_bytes, 1.0, 1000.0, 1000.0, 1199)[:3] == (tuple("ace"), 1, 300)
    assert gpu_check.choose(layer_bytes, 1.0, 1000.0, 40.0, 1200)[:3] == (tuple("abcdef"), 19, 600)
    assert gpu_check.choose({**layer_bytes, "a": 600}, 1.0, 1000.0, 1000.0, 1199)[:3] == (tuple("bdf"), 1, 300)
    assert gpu_check.choose({"large": 10**9, "small": 10**6}, 1.0, 1000.0, 1000.0, 1200)[:3] == (("small",), 1250, 10**6)


def test_wrong_values_are_found(gpu_check, tmp_path):
    model = nn.Linear(3, 3).train()
    with hookstore.record(model, tmp_path / "run", layers=[""]):
        output = model(torch.ones(2, 3)).detach()
    right = {("", "activation", 0): output.clone()}
    gpu_check.compare(tmp_path / "run", right, 1)
    wrong = output.clone()
    wrong[1, 2] += 1e-3
    with pytest.raises(ValueError, match="is not what a plain copy holds"):
        gpu_check.compare(tmp_path / "run", {("", "activation", 0): wrong}, 1)
    with pytest.raises(ValueError, match="expected 2 captures"):
        gpu_check.compare(tmp_path / "run", right, 2)


@pytest.mark.parametrize(
    ("body", "seconds", "found"),
    [
        ("assert False", 60, "pytest ended with 1 and '1 failed"),
        ("import pytest; pytest.skip('no')", 60, "pytest ended with 0 and '1 skipped"),
        ("import time; time.sleep(60)", 2, "timed out after 2 seconds"),
    ],
)
def test_tests_that_do_not_pass_are_a_failure(gpu_check, tmp_path, body, seconds, found):
    path = tmp_path / "test_it.py"
    path.write_text(f"def test_it():\n    {body}\n")
    report = gpu_check.Report(gpu_check.Simulated())
    report.attempt("tests", lambda: gpu_check.run_tests(report, seconds, str(path)))
    assert len(report.failures) == 1
    assert found in report.failures[0]


def test_missing_packages_are_said():
    """Without site-packages there are none."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "gpu_check.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "nothing was checked" in ended.stderr
    assert "'torchvision': 'ResNet-50'" in ended.stderr


def test_a_hang_is_ended():
    """The limit is 20 seconds over what was asked for."""
    hang = "import gpu_check, time; gpu_check.check = lambda *_: time.sleep(600); gpu_check.main(['--simulated', '--seconds', '-19'])"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); {hang}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
