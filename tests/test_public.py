"""What users build on: public names, signatures, the README, the commands."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hookstore
from hookstore import cli, demo, errors

ROOT = Path(__file__).resolve().parent.parent


def test_public_names_are_pinned():
    assert sorted(hookstore.__all__) == hookstore.__all__ == dir(hookstore)
    assert set(hookstore.__all__) == {
        *errors.__all__,
        *(
            "Arguments",
            "Capture",
            "Captures",
            "Fault",
            "Fired",
            "GradientEdit",
            "GradientNorm",
            "LayerRun",
            "LayerTap",
            "NestedArray",
            "NonFinite",
            "NotStored",
            "Occurrence",
            "PackedSequence",
            "PartialBatch",
            "Plan",
            "PlannedTensor",
            "Progress",
            "QuantizedArray",
            "Raised",
            "Record",
            "Recorder",
            "RecoveryReport",
            "Run",
            "RunInfo",
            "SampleCaptures",
            "SampleHistory",
            "SampleLayer",
            "Samples",
            "Signalled",
            "SparseArray",
            "Statistics",
            "Tap",
            "Verification",
            "Where",
        ),
        *("__version__", "open", "record", "recover", "verify", "clip_gradient", "plan", "reverse_gradient", "scale_gradient", "tap"),
    }
    for name in hookstore.__all__:
        assert getattr(hookstore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hookstore.nothing  # noqa: B018


def test_signatures_are_pinned():
    parameters = inspect.signature(hookstore.record).parameters
    assert list(parameters) == [
        "model",
        "path",
        "captures",
        "layers",
        "kinds",
        "every",
        "epochs",
        "batches",
        "steps",
        "phases",
        "dtype",
        "codec",
        "select",
        "dims",
        "stats",
        "last",
        "when",
        "mode",
        "buffer_bytes",
        "on_full",
        "on_error",
        "max_slowdown",
        "max_bytes",
        "on_sigterm",
        "scaler",
    ]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in list(parameters.values())[2:])
    public = {
        hookstore.Recorder: {
            "annotate",
            "at",
            "batches",
            "captures",
            "close",
            "fire",
            "flush",
            "loss",
            "paused",
            "phase",
            "progress",
            "switch",
        },
        hookstore.Run: {
            "annotations",
            "attempts",
            "batches",
            "close",
            "epochs",
            "fired",
            "info",
            "kinds",
            "layers",
            "loss",
            "manifest",
            "partial_batches",
            "read",
            "refresh",
            "sample",
        },
        hookstore.LayerRun: {"activation", "gradient", "input", "input_gradient", "kinds", "parameter", "parameter_gradient"},
        hookstore.Captures: {
            *("get", "leaf", "leaves", "portion", "portions", "raw", "row", "rows", "samples", "stats", "statistics", "tensor", "value")
        },
        hookstore.Samples: {"where"},
        hookstore.GradientEdit: {"remove"},
        hookstore.Tap: {"clear", "kinds", "layers", "remove", "values"},
    }
    for kind, names in public.items():
        assert {name for name in vars(kind) if not name.startswith("_")} == names


def test_every_public_thing_has_a_docstring():
    for name in hookstore.__all__:
        thing = getattr(hookstore, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert inspect.getdoc(thing), name


def test_every_error_is_a_fitting_builtin_too():
    for name in errors.__all__:
        error = getattr(hookstore, name)
        if issubclass(error, hookstore.HookstoreError) and error is not hookstore.HookstoreError:
            builtins = [base for base in error.__mro__ if base.__module__ == "builtins" and base not in (Exception, BaseException, object)]
            assert builtins, name
        assert name in errors.__doc__


def test_version_is_one():
    assert importlib.metadata.version("hookstore") == hookstore.__version__


FLOW = (
    *(
        "errors",
        "format",
        "structure",
        "statistics",
        "device_statistics",
        "files",
        "wrappers",
        "selection",
        "portion",
        "dimensions",
        "codecs",
    ),
    *("schedule", "occasions", "planned", "footprint", "recorded", "triggers", "capture", "agenda", "judges"),
    *("clock", "ring", "layout", "device", "regions", "staging", "flight"),
    *("nested", "parts", "sink", "recomputation", "restored", "rehearsal", "watch", "shares", "live", "optimizers"),
    *("operators", "models", "compiler", "compiled", "hooks", "containers", "standins", "edits", "gradients"),
    *("uncalled", "swaps", "fastpath", "around", "attach"),
    *(
        "lock",
        "metadata",
        "shards",
        "schema",
        "blocks",
        "untrusted",
        "manifest",
        "arrays",
        "recovery",
        "writer",
        "signals",
        "annotations",
        "recorder",
        "planning",
    ),
    *(
        "rows",
        "samples",
        "summaries",
        "values",
        "joined",
        "assembly",
        "captures",
        "occurrences",
        "histories",
        "run",
        "tapping",
        "projection",
    ),
    *("verification", "bench", "cli", "demo"),
)


READING_SIDE = FLOW[FLOW.index("rows") : FLOW.index("run") + 1]


def imports_of(module):
    """Modules of the package that one imports when it is loaded (not those for type checkers alone)."""
    tree = ast.parse((ROOT / "hookstore" / f"{module}.py").read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for inner in ast.walk(node)
        if "TYPE_CHECKING" in ast.dump(node.test)
    }
    return {
        node.module.removeprefix("hookstore.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hookstore.") and id(node) not in guarded
    }


@pytest.mark.parametrize("module", FLOW)
def test_imports_follow_the_flow_of_data(module):
    allowed = set(FLOW[: FLOW.index(module)]) | ({module} if module == "demo" else set())
    if module in READING_SIDE:
        allowed &= {
            *(
                "errors",
                "format",
                "structure",
                "statistics",
                "portion",
                "dimensions",
                "codecs",
                "files",
                "lock",
                "metadata",
                "shards",
                "schema",
            ),
            "manifest",
            *READING_SIDE,
        }
    assert imports_of(module) <= allowed
    assert set(FLOW) == {path.stem for path in (ROOT / "hookstore").glob("*.py")} - {"__init__"}


@pytest.mark.parametrize(
    ("library", "modules"),
    [
        ("crc32c", {"staging", "shards", "manifest", "writer"}),
        ("numcodecs", {"codecs"}),
        ("pyarrow", {"schema", "blocks", "untrusted", "manifest", "recovery", "captures", "rows", "run", "summaries", "verification"}),
        ("rich", {"cli", "demo"}),
        ("typer", {"cli", "demo"}),
        ("zarr", {"arrays", "demo"}),
    ],
)
def test_libraries_are_used_where_they_belong(library, modules):
    pattern = re.compile(rf"^\s*(import {library}\b|from {library}\b)", re.M)
    assert {path.stem for path in (ROOT / "hookstore").glob("*.py") if pattern.search(path.read_text())} == modules


def test_top_level_holds_what_it_should():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    top = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "pyproject.toml",
        "README.md",
        "hookstore",
        "benchmarks",
        "tests",
        "tools",
    }


def test_readme_is_current():
    done = subprocess.run([sys.executable, "tools/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text()
    for module in FLOW:
        assert f"`{module}.py`" in readme


def examples():
    """The code blocks of the README, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def training(num_batches, num_samples):
    """What an example has beside it: a model, a loader and an optimizer."""
    model = demo.DigitNet()
    return {
        "hookstore": hookstore,
        "torch": torch,
        "signal": signal,
        "model": model,
        "loader": [(torch.randn(num_samples, 1, 28, 28), torch.randint(0, 10, (num_samples,))) for _ in range(num_batches)],
        "images": torch.randn(num_samples, 1, 28, 28),
        "labels": torch.randint(0, 10, (num_samples,)),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": torch.nn.CrossEntropyLoss(),
    }


def test_the_example_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = training(301, 4)
    exec(compile(examples()[0], "README.md", "exec"), names)
    run = names["run"]
    assert run.layers == ["conv1", "conv2", "fc1"]
    assert run.batches(1) == [0, 100, 200, 300]
    assert run["conv1"].activation[1, 300].shape == (4, 32, 28, 28)
    run.close()


def test_the_example_of_choosing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = training(22, 20)
    exec(compile(examples()[1], "README.md", "exec"), names)
    assert "in all" in capsys.readouterr().out
    run = names["run"]
    assert run["conv1"].activation.portion("sample[:8]")[0, 20].shape == (8, 32, 28, 28)
    assert run["fc2"].gradient.stats(0, 20).l2 > 0
    assert len(run["fc2"].gradient.statistics()) == 2 * 3
    of_sample = run.sample(7)["conv1"].activation.portion({"sample": 8})
    assert list(of_sample) == [(0, 0), (1, 0)]
    assert np.array_equal(of_sample[1, 0], run["conv1"].activation.portion({"sample": 8})[1, 0][7])
    assert run.annotations["label"][0, 20].tolist() == names["loader"][20][1].tolist()
    assert run.loss[0, 20].shape == ()
    run.close()


def test_the_example_of_the_flight_recorder_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = training(30, 4)
    names["loader"][20][0][3, 0, 5, 5] = torch.nan
    with pytest.warns(hookstore.CaptureWarning, match="flight recorder"):
        exec(compile(examples()[2], "README.md", "exec"), names)
    with hookstore.open("runs/flight") as run:
        assert run.batches(0) == list(range(16, 26))
        assert (run.fired[0].epoch, run.fired[0].batch) == (0, 20)
        assert "conv1" in run.fired[0].reason
        assert np.isnan(run["conv1"].activation[0, 20][3]).any()
        assert not np.isnan(run["conv1"].activation[0, 19]).any()


def test_the_example_of_acting_runs():
    names = training(1, 4)
    torch.manual_seed(0)
    names |= {name: torch.nn.Sequential(torch.nn.Linear(3, 5)) for name in ("teacher", "student")}
    names |= {"inputs": torch.randn(7, 3), "domain_classifier": torch.nn.Linear(5, 2)}
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(compile(examples()[3], "README.md", "exec"), names)
    expected = 2 * (names["student"](names["inputs"]) - names["teacher"](names["inputs"])).detach().mT @ names["inputs"] / 35
    assert torch.allclose(names["student"][0].weight.grad, expected, atol=1e-6)
    assert not torch.equal(names["adversarial"], names["images"])
    assert all(torch.equal(one, other) for one, other in zip(before, names["model"].parameters(), strict=True))
    assert not any(module._forward_pre_hooks for module in names["model"].modules())


def test_info_command(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    with hookstore.record(model, tmp_path / "run", layers=["", "0"], kinds=["activation", "parameter"], buffer_bytes=1 << 20):
        model(torch.ones(2, 2))
    found = CliRunner().invoke(cli.app, ["info", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    for text in ("finished", "torch.nn.modules.container.Sequential", "''", "2×3", "float32", "4 captures"):
        assert text in found.output
    missing = CliRunner().invoke(cli.app, ["info", str(tmp_path)], env={"COLUMNS": "200"})
    assert missing.exit_code == 1
    assert "NotARunError" in missing.output
    assert "holds runs: run" in missing.output


def test_demo_twice(tmp_path):
    """The second demo takes the place of the first, and leaves alone what is none."""
    sizes = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "hookstore.demo", "--out", str(tmp_path / "demo")],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "equals hookstore, bit for bit" in " ".join(done.stdout.split())
        assert (tmp_path / "demo-feature-maps.png").read_bytes().startswith(b"\x89PNG")
        sizes.append(sum(os.path.getsize(os.path.join(place, name)) for place, _, names in os.walk(tmp_path) for name in names))
    assert sizes[1] < 300e6
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    (tmp_path / "other").mkdir()
    assert demo.choose_directory(tmp_path / "other") == tmp_path / "other-2"
    with hookstore.open(tmp_path / "demo") as run:
        assert run.description["model"] == "hookstore.demo.DigitNet"
        assert len(run.manifest) == 2 * 6 * 6
        assert run["conv1"].activation[0, 0].shape == (64, 32, 28, 28)


def test_demo_records_what_an_unrecorded_training_computes(tmp_path):
    """The same seed without recording gives the same activations, to the bit."""
    from rich.console import Console

    first, last = demo.train(tmp_path / "run", demo.make_loader("digits", None), 1, Console(quiet=True))
    torch.manual_seed(0)
    model = demo.DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with hookstore.open(tmp_path / "run") as run:
        for batch, (images, labels) in enumerate(demo.make_loader("digits", None)):
            features = model.conv1(images)
            if batch in (first.batch, last.batch):
                assert np.array_equal(run["conv1"].activation[0, batch], features.detach().numpy())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    assert (first.batch, last.batch) == (0, 25)
