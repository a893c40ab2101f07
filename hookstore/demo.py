"""The demonstration: train a small network on handwritten digits, record it, open the run and look at it.

Run it with ``python3 tools/dev.py demo`` from a checkout, or ``python -m hookstore.demo`` where ``hookstore[demo]`` is installed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import typer
import zarr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

import hookstore
from hookstore.format import LAYERS_DIR, RUN_FILE

BATCH_SIZE = 64
LAYERS = ("conv1", "conv2", "fc1")
CAPTURES_PER_EPOCH = 7  # of 19.3 MB each: two epochs stay below 300 MB


class DigitNet(nn.Module):
    """Two convolutions and two linear layers for images of 1×28×28 and ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(3136, 128)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, shape (N, 10), of images of shape (N, 1, 28, 28)."""
        features = self.pool1(self.relu1(self.conv1(images)))
        features = self.pool2(self.relu2(self.conv2(features)))
        logits: torch.Tensor = self.fc2(self.relu3(self.fc1(features.flatten(1))))
        return logits


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """scikit-learn's bundled handwritten digits: 1,797 images, enlarged from 8×8 to 28×28.

    References
    ----------
    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """

    def __init__(self, transform: transforms.Compose) -> None:
        from sklearn.datasets import load_digits

        bundled = load_digits()
        self._images = np.round(bundled.images * (255 / 16)).astype(np.uint8)
        self._labels = bundled.target.astype(int)
        self._transform = transforms.Compose([transforms.ToPILImage(), transforms.Resize((28, 28)), transform])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[index]), int(self._labels[index])


def make_loader(data: str, root: Path | None) -> DataLoader[tuple[torch.Tensor, int]]:
    """Return the batches of one epoch, in an order that the seed fixes.

    Raises
    ------
    typer.BadParameter
        If MNIST is asked for and is not to be had.
    """
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    if data == "digits":
        dataset: Dataset[tuple[torch.Tensor, int]] = Digits(transform)
    else:
        if root is None:
            raise typer.BadParameter("--data mnist needs --root DIR, the directory that holds MNIST or shall hold it")
        try:
            dataset = datasets.MNIST(
                str(root), train=True, download=True, transform=transforms.Compose([transforms.Resize((28, 28)), transform])
            )
        except (RuntimeError, OSError) as error:
            raise typer.BadParameter(f"MNIST is not in {root} and could not be downloaded: {error}") from error
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class Shown:
    """A recorded batch that is kept for the picture."""

    epoch: int
    batch: int
    images: torch.Tensor
    labels: torch.Tensor


def train(run_path: Path, loader: DataLoader[tuple[torch.Tensor, int]], epochs: int, console: Console) -> tuple[Shown, Shown]:
    """Train and record; return the first and the last recorded batch."""
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss()
    every = math.ceil(len(loader) / CAPTURES_PER_EPOCH)
    shown: list[Shown] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("captured {task.fields[captured]:.1f} MB"),
        TextColumn("writer lag {task.fields[lag]:.1f} MB"),
        TimeElapsedColumn(),
    )
    with (
        Progress(*columns, console=console) as bar,
        hookstore.record(model, run_path, layers=LAYERS, kinds=["activation", "gradient"], every=every, epochs=range(epochs)) as recorder,
    ):
        for epoch in range(epochs):
            task = bar.add_task(f"epoch {epoch + 1} of {epochs}", total=len(loader), loss=math.nan, captured=0.0, lag=0.0)
            for batch, (images, labels) in enumerate(recorder.batches(loader, epoch=epoch)):
                optimizer.zero_grad()
                loss = loss_fn(model(images), labels)
                loss.backward()
                optimizer.step()
                progress = recorder.progress
                bar.update(task, advance=1, loss=loss.item(), captured=progress.captured_bytes / 1e6, lag=progress.lag_bytes / 1e6)
                if batch % every == 0:
                    shown[1:] = [Shown(epoch, batch, images, labels)]
        recorder.flush()
        bar.update(task, lag=recorder.progress.lag_bytes / 1e6)
    return shown[0], shown[-1]


def summary_table(run: hookstore.Run) -> Table:
    """Make a table of what each layer and kind holds, computed from what the run gives back."""
    table = Table(
        title="what the run holds (norm: mean L2 norm of a gradient)",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
        header_style="underline",
    )
    for heading in ("layer", "kind", "captures", "shape", "dtype", "MB", "mean", "std", "norm"):
        table.add_column(heading, justify="left" if heading in ("layer", "kind", "shape", "dtype") else "right", no_wrap=True)
    for layer in run.layers:
        for kind in run[layer].kinds:
            captures = run[layer][kind]
            rows = captures.rows.to_pylist()
            arrays = [run.read(row) for row in rows]
            values = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)
            norms = [float(np.linalg.norm(array.astype(np.float64))) for array in arrays]
            table.add_row(
                layer,
                kind,
                str(len(captures)),
                "×".join(map(str, rows[0]["shape"])),
                rows[0]["dtype"],
                f"{sum(row['nbytes'] for row in rows) / 1e6:.1f}",
                f"{values.mean():.3g}",
                f"{values.std():.3g}",
                f"{np.mean(norms):.3g}" if kind == "gradient" else "",
            )
    return table


def draw_feature_maps(run: hookstore.Run, first: Shown, last: Shown, path: Path) -> int:
    """Draw conv1's feature maps of one digit at two recorded batches; return the digit.

    Both batches are searched for a digit that they share; the maps come from the run.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    digit: int = next(label for label in first.labels.tolist() if label in last.labels.tolist())
    figure = plt.figure(figsize=(15, 3.7), layout="constrained")
    figure.suptitle(f"conv1 on a handwritten {digit}: its 32 feature maps at the first and the last recorded batch")
    for part, shown in zip(np.asarray(figure.subfigures(1, 2)), (first, last), strict=True):
        sample = shown.labels.tolist().index(digit)
        maps = run["conv1"].activation[shown.epoch, shown.batch][sample]
        part.suptitle(f"epoch {shown.epoch}, batch {shown.batch}", fontsize="medium")
        left, right = part.subfigures(1, 2, width_ratios=[1, 2.4])
        axes = left.subplots()
        axes.imshow(shown.images[sample, 0].numpy(), cmap="gray")
        axes.set_title("the image", fontsize="small")
        axes.set_axis_off()
        limit = float(np.abs(maps).max())
        for grid_axes, feature_map in zip(np.asarray(right.subplots(4, 8)).ravel(), maps, strict=True):
            grid_axes.imshow(feature_map, cmap="RdBu_r", vmin=-limit, vmax=limit)
            grid_axes.set_axis_off()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return digit


def check_with_zarr(run: hookstore.Run, shown: Shown) -> str:
    """Read one tensor with plain Zarr, compare it bit for bit with what hookstore gives, and say which."""
    group = zarr.open_group(os.path.join(run.path, LAYERS_DIR), mode="r")
    array = cast("zarr.Array[Any]", group["conv1/activation"])
    plain = np.asarray(array[shown.epoch, shown.batch])[: len(shown.labels)]
    ours = run["conv1"].activation[shown.epoch, shown.batch]
    if plain.dtype != ours.dtype or plain.shape != ours.shape or plain.tobytes() != ours.tobytes():
        raise SystemExit("plain zarr and hookstore disagree: this is a bug, please report it")
    return f'zarr.open_group("…/{LAYERS_DIR}")["conv1/activation"][{shown.epoch}, {shown.batch}]'


def choose_directory(wanted: Path) -> Path:
    """Return the directory to record into: an earlier demo is replaced, anything else is left alone."""
    candidate, number = wanted, 1
    while candidate.exists():
        if _is_demo(candidate):
            shutil.rmtree(candidate)
            break
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def _is_demo(directory: Path) -> bool:
    try:
        model = json.loads((directory / RUN_FILE).read_bytes()).get("model", "")
    except (OSError, ValueError, AttributeError):
        return False
    return str(model).endswith(f".{DigitNet.__name__}")


def main(
    data: Annotated[Literal["digits", "mnist"], typer.Option(help="scikit-learn's bundled digits, or torchvision's MNIST")] = "digits",
    root: Annotated[Path | None, typer.Option(help="directory of MNIST")] = None,
    out: Annotated[Path, typer.Option(help="directory of the run; an earlier demo there is replaced")] = Path("runs/demo"),
    epochs: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Train a small network on handwritten digits, record it, open the run and show it."""
    console = Console()
    loader = make_loader(data, root)
    run_path = choose_directory(out)
    console.print(
        f"training on {len(cast('Sized', loader.dataset)):,} images, recording activations and gradients of {', '.join(LAYERS)} into {run_path}"
    )
    started = time.perf_counter()
    first, last = train(run_path, loader, epochs, console)
    console.print(f"trained, recorded and durable after {time.perf_counter() - started:.1f} s")
    with hookstore.open(run_path) as run:
        console.print(summary_table(run))
        picture = run_path.with_name(f"{run_path.name}-feature-maps.png")
        digit = draw_feature_maps(run, first, last, picture)
        files = [Path(directory) / name for directory, _, names in os.walk(run_path) for name in names]
        console.print(
            f"run        {run_path}  ({sum(file.stat().st_size for file in files) / 1e6:.0f} MB in {len(files)} files; hookstore info {run_path})"
        )
        console.print(f"picture    {picture}  (conv1 on a {digit}, first and last recorded batch)")
        console.print(f"plain zarr {check_with_zarr(run, last)}  equals hookstore, bit for bit")


if __name__ == "__main__":
    # By its own name, so that the run says hookstore.demo.DigitNet and not __main__.DigitNet.
    from hookstore.demo import main as named_main

    typer.run(named_main)
