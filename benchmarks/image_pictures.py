"""Pictures of a trained `LogicTreeNet`: `python benchmarks/image_pictures.py --data mnist5k.npz --folder docs`.

Trains the network on four fifths of the images and draws what its hard form does with the others: `image-trees.png`, the trees of the first
layer, and `image-learned.png`, its classes.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import options  # beside this file
from images import Network, Program, Rates, _trees, parts, rates_of
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lutjax.models import LogicTreeNet
from lutjax.training.samples import load_samples

PATCH = 4  # pixels along each side of what is erased


def influence(wires: np.ndarray, truth: np.ndarray, kernel: int, n_kernels: int, window: int) -> np.ndarray:
    """Return how much oftener a tree says 1 where a value of its window is 1 than where it is 0: ``[window]``.

    Every combination of the bits that it reads counts as often as any other.
    """

    def nodes(node: int) -> list[int]:
        inner = [int(i) - window for i in wires[node] if i >= window]
        return [found for i in inner for found in nodes(i)] + [node]

    order = nodes(len(wires) - n_kernels + kernel)
    read = sorted({int(i) for node in order for i in wires[node] if i < window})
    bits = (np.arange(2 ** len(read))[:, None] >> np.arange(len(read))) & 1
    values = dict(zip(read, bits.T, strict=True))
    for node in order:
        a, b = (values[int(i)] for i in wires[node])
        values[window + node] = truth[node].astype(int)[a + 2 * b]
    said, found = values[window + order[-1]], np.zeros(window)
    for place, value in enumerate(read):
        one = bits[:, place] == 1
        found[value] = said[one].mean() - said[~one].mean()
    return found


def trees(model: LogicTreeNet, images: np.ndarray, n_trees: int) -> Figure:
    """Draw trees of the first layer that read most and differ most from place to place: what they read, and what they say of images."""
    layer = model.trees[0]
    wires, truth = (np.asarray(a) for a in layer.truth_tables())
    window = layer.spec.window
    encoded = model.encoder(jnp.moveaxis(jnp.asarray(images), (-1, -3, -2), (0, 1, 2)))
    said = np.moveaxis(
        np.asarray(layer(encoded, deterministic=True)), -1, 0
    )  # [images, kernels, rows, columns]
    kernels = range(layer.spec.n_kernels)
    fields = np.stack([influence(wires, truth, k, len(kernels), window) for k in kernels])
    worth = said.std((0, 2, 3)) * np.minimum((fields != 0).sum(1), 4)
    picked = np.sort(worth.argsort()[::-1][:n_trees])
    n = min(len(images), 8)
    figure = Figure(figsize=(1.0 * (n + 1), 1.05 * (len(picked) + 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(picked) + 1, n + 1)
    for axis in axes.flat:
        axis.set_axis_off()
    for column in range(n):
        axes[0, column + 1].imshow(images[column, :, :, 0], cmap="gray_r")
    height, width = layer.spec.geometry[0]
    for row, kernel in zip(axes[1:], picked, strict=True):
        field = fields[kernel].reshape(height, width, -1).sum(2)
        row[0].imshow(field, cmap="RdBu", vmin=-1, vmax=1)
        row[0].set_title(f"tree {kernel}", fontsize=7)
        for column in range(n):
            row[column + 1].imshow(said[column, kernel], cmap="gray_r", vmin=0, vmax=1)
    return figure


def classes(votes: Any, images: np.ndarray, labels: np.ndarray) -> Figure:
    """Draw for each class the mean of the images that are taken for it, where its votes come from, and the image nearest to a mistake."""
    found = np.asarray(votes(images))
    chosen, n_classes = found.argmax(-1), found.shape[-1]
    own = found[np.arange(len(labels)), labels]
    height, width = images.shape[1:3]
    lost = np.zeros((len(images), height // PATCH, width // PATCH))
    for row in range(height // PATCH):
        for column in range(width // PATCH):
            erased = images.copy()
            erased[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 0
            lost[:, row, column] = own - np.asarray(votes(erased))[np.arange(len(labels)), labels]
    figure = Figure(figsize=(n_classes, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, n_classes)
    for axis in axes.flat:
        axis.set_axis_off()
    scale = max(np.abs(lost[labels == k].mean(0)).max() for k in range(n_classes))
    others = found.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    margin = own - others.max(-1)
    for k in range(n_classes):
        if (chosen == k).any():
            axes[0, k].imshow(images[chosen == k].mean(0)[..., 0], cmap="gray_r")
        axes[1, k].imshow(lost[labels == k].mean(0), cmap="RdBu", vmin=-scale, vmax=scale)
        hardest = np.flatnonzero(labels == k)[margin[labels == k].argmin()]
        axes[2, k].imshow(images[hardest, :, :, 0], cmap="gray_r")
        axes[2, k].set_title(f"{k} taken for {chosen[hardest]}", fontsize=7)
    return figure


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="a .npz file of images x [N, H, W] and labels y [N]"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the pictures")
    parser.add_argument("--size", type=int, default=16, help="of the network: trees of its first layer")
    parser.add_argument("--steps", type=int, default=4000)
    given = parser.parse_args()
    whole = load_samples(given.data)
    images = (whole.x / max(float(whole.x.max()), 1.0)).reshape(-1, *whole.shape, 1).astype(np.float32)
    train, test = parts(whole, 0)
    rates = Rates(steps=given.steps, rate=0.02, tau=28 * given.size / 64)  # by the number of votes
    program = Program(
        Network(build=_trees(given.size, 2, estimator="straight_through"), rates=rates),
        images.shape[1:],
        whole.n_classes,
    )
    params, others, found = program.run(
        jax.random.key(0), rates_of(rates), images[train], whole.y[train], images[test]
    )
    print(f"hard network: {100 * float((np.asarray(found) == whole.y[test]).mean()):.1f} % of the test part")
    model: Any = program.structure.model(params, others)
    logits = jax.jit(lambda params, others, x: program.structure.model(params, others)(x, deterministic=True))
    votes = functools.partial(logits, params, others)
    _, examples = np.unique(whole.y[test], return_index=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    trees(model, images[test][examples], 8).savefig(given.folder / "image-trees.png", dpi=80)
    classes(votes, images[test], whole.y[test]).savefig(given.folder / "image-learned.png", dpi=80)


if __name__ == "__main__":
    main()
