"""The loss curve of a run as a picture."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lutjax.training.lm_runs import Record


def plot_losses(record: Record, path: Path) -> None:
    """Writes training loss, test losses and the bigram baseline of a run as a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no window system, no global state
    axes = figure.subplots()
    for points, style, label in (
        (record.history.train, {"linewidth": 1}, "training (mean since the point before)"),
        (record.history.test, {"marker": "o", "linestyle": "none"}, "test"),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    axes.axhline(record.bigram, color="grey", linestyle="--", label=f"bigram baseline ({record.bigram:.3f})")
    axes.set_xlabel(f"training step (of {record.training.batch_size} x {record.model.context} bytes)")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
