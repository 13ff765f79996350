"""Plots of runs: loss curves, accuracies, confusion matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lutjax.extras import require_optional
from lutjax.files.pictures import as_drawn

with require_optional(__name__):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

if TYPE_CHECKING:
    from lutjax.training.runs import History


def plot_losses(history: "History", bigram: float, steps: str, path: Path) -> None:
    """Write training loss, test losses and the bigram baseline as a PNG, in nats per byte.

    `steps` describes the length of a step.
    """
    figure, axes = _figure(8, 5)
    for points, style, label in (
        (history.train, {"linewidth": 1}, "training loss (mean since the point before)"),
        (history.test, {"marker": "o", "linewidth": 1}, "test loss"),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.axhline(bigram, color="gray", linestyle="--", label=f"bigram model ({bigram:.3f})")
    axes.set_xlabel(f"training steps of {steps}")
    axes.set_ylabel("nats per byte")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))  # no powers of ten, no offset
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def plot_accuracies(
    history: "History", baselines: Mapping[str, float], path: Path, *, regression: bool = False
) -> None:
    """Write accuracies (R2 for regression) over steps as a PNG, with baselines."""
    figure, axes = _figure(8, 5)
    unit = 1 if regression else 100
    for points, label in ((history.test, "hard network"), (history.other, "soft network")):
        if points:
            steps, shares = zip(*points, strict=True)
            values = [unit * share for share in shares]
            axes.plot(steps, values, marker=".", linewidth=1, label=label)
    for (name, share), style in zip(baselines.items(), ("--", ":"), strict=False):
        said = f"{share:.3f}" if regression else f"{100 * share:.1f} %"
        axes.axhline(unit * share, color="gray", linestyle=style, label=f"{name} ({said})")
    axes.set_xlabel("training steps")
    axes.set_ylabel("R2 of the test part" if regression else "% of the test part right")
    if regression:  # the R2 of an untrained network may be any negative number
        axes.set_ylim(-0.2, 1)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)


def plot_confusion(counts: np.ndarray, path: Path, names: Sequence[str] = ()) -> None:
    """Write a confusion matrix ``[classes, classes]`` as a PNG: actual rows, predicted columns."""
    n_classes = len(counts)
    figure, axes = _figure(6, 6)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if n_classes <= 20:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(count), ha="center", va="center", color=color)
    right = counts.trace()
    axes.set_title(
        f"hard network: {right} of {counts.sum()} right ({100 * right / counts.sum():.1f} %)"
    )
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")
    for axis in (axes.xaxis, axes.yaxis):
        if names and n_classes <= 20:
            turned = {"rotation": 90} if axis is axes.xaxis else {}
            axis.set_ticks(range(n_classes), [as_drawn(name[:24]) for name in names], **turned)
        else:
            axis.set_major_locator(MaxNLocator(integer=True, nbins=20))
    figure.savefig(path, dpi=120)


def plot_front(
    points: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]], path: Path
) -> None:
    """Write accuracy against LUT6 as a PNG: a line of points, and single other sizes."""
    figure, axes = _figure(8, 5)
    if others:
        sizes, shares = zip(*others, strict=True)
        axes.plot(sizes, [100 * share for share in shares], ".", color="gray", label="sizes tried")
    sizes, shares = zip(*sorted(points), strict=True)
    axes.plot(sizes, [100 * share for share in shares], marker="o", label="finished runs")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("6-input lookup tables from inputs to class")
    axes.set_ylabel("% of the test part right")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _figure(width: int, height: int) -> tuple[Figure, Any]:
    """Return a figure (size in inches) and its axes, without pyplot: no window, no global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
