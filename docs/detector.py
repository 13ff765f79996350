"""Picture of a detector, its table and its gradient: `python docs/detector.py --png FILE`.

lutjax computes all displayed values.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import lutjax

X = np.array([0.3, -0.5, 0.9], np.float32)
ANCHORS = np.array([[[0, 1], [0, 2]]], np.int32)
TABLE = np.array([[[-1.0, 0.4], [2.0, 1.1], [0.5, -0.7], [-0.5, 1.6]]], np.float32)
SWEEP = np.linspace(-2.0, 2.4, 881, dtype=np.float32) + np.float32(1e-3)  # no ties

INK, MUTED, READ, NEAREST = "#222222", "#8a8a8a", "#2166ac", "#d6604d"


def first_output(first_input: jax.Array) -> jax.Array:
    """Return the first output where the first input has another value."""
    x = jnp.asarray(X).at[0].set(first_input)
    return lutjax.lut(x, jnp.asarray(TABLE), jnp.asarray(ANCHORS))[0]


def draw() -> Figure:
    """Return the picture: comparisons, table, and output and gradient as the first input moves."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    comparisons, table, gradient = figure.subplots(1, 3, width_ratios=(1, 0.9, 1.25))
    detection = lutjax.detect(jnp.asarray(X), jnp.asarray(ANCHORS))
    index, flip = int(detection.index[0]), int(detection.flip[0])
    _draw_comparisons(comparisons, index, flip)
    _draw_table(table, index, index ^ flip)
    _draw_gradient(gradient)
    for axes in (comparisons, table, gradient):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_size(11)
    return figure


def _draw_comparisons(axes, index: int, flip: int) -> None:
    axes.set_title("A detector compares pairs of inputs")
    axes.bar(range(len(X)), X, width=0.5, color="#d9d9d9")
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.set_xticks(range(len(X)), [f"x[{i}] = {value:g}" for i, value in enumerate(X)])
    axes.set_xlim(-0.6, 2.6)
    axes.set_ylim(-1.2, 2.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    for pair, (a, b) in enumerate(ANCHORS[0]):
        closest = flip == 1 << pair
        height, color = 1.25 + 0.75 * pair, NEAREST if closest else INK
        ends = {"arrowstyle": "-", "color": color, "linewidth": 1.5}
        axes.annotate("", (a, height), (b, height), arrowprops=ends)
        answer = "yes: 1" if index >> pair & 1 else "no: 0"
        text = f"x[{a}] > x[{b}]?  {answer}" + ("  (the closest)" if closest else "")
        axes.text(
            (a + b) / 2, height + 0.08, text, ha="center", va="bottom", color=color, fontsize=9
        )


def _draw_table(axes, row: int, nearest: int) -> None:
    axes.set_title("The bits address a row of its table")
    rows, outputs = TABLE[0].shape
    axes.set_xlim(-0.9, outputs + 2.1)
    axes.set_ylim(rows + 0.1, -0.7)
    axes.axis("off")
    for number in range(rows):
        color = {row: READ, nearest: NEAREST}.get(number, MUTED)
        bits = {"ha": "right", "va": "center", "color": color, "family": "monospace"}
        axes.text(-0.15, number + 0.5, f"{number:02b}", **bits)
        for output, value in enumerate(TABLE[0, number]):
            face = "#deebf7" if number == row else "white"
            style = {"facecolor": face, "edgecolor": MUTED, "linewidth": 0.8}
            axes.add_patch(Rectangle((output, number), 1, 1, **style))
            cell = {"ha": "center", "va": "center", "color": INK, "fontsize": 9}
            axes.text(output + 0.5, number + 0.5, f"{value:g}", **cell)
        note = {row: "output", nearest: "row if the closest\ncomparison flips"}.get(number)
        if note:
            axes.text(outputs + 0.12, number + 0.5, note, va="center", color=color, fontsize=9)
    heading = {"ha": "center", "va": "bottom", "color": MUTED, "fontsize": 9}
    for output in range(outputs):
        axes.text(output + 0.5, -0.1, f"y[{output}]", **heading)


def _draw_gradient(axes) -> None:
    axes.set_title("Output and gradient as x[0] moves")
    sweep = jnp.asarray(SWEEP)
    outputs = jax.vmap(first_output)(sweep)
    gradients = jax.vmap(jax.grad(first_output))(sweep)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    axes.plot(SWEEP, outputs, color=READ, linewidth=1.8, label="output y[0]")
    axes.plot(SWEEP, gradients, color=NEAREST, linewidth=1.8, label="its gradient in x[0]")
    axes.axvline(X[0], color=MUTED, linewidth=1, linestyle=":")
    axes.set_xticks([float(X[1]), float(X[0]), float(X[2])], ["x[1]", "x[0]", "x[2]"])
    axes.set_xlabel("value of x[0], beside those of x[1] and x[2]")
    axes.set_ylim(-1.6, 3.4)
    axes.set_yticks([-1, 0, 1, 2])
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, required=True)
    draw().savefig(parser.parse_args().png, dpi=110)


if __name__ == "__main__":
    main()
