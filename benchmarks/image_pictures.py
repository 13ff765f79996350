"""Pictures of a trained `LogicTreeNet`: `python benchmarks/image_pictures.py --data mnist5k.npz --folder docs`.

Trains the network on four fifths of the images and draws the hard network on the others: `image-trees.png`, trees in the first
layer, and `image-learned.png`, its classes.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import draw_axes, parse  # beside this file
from images import Network, Program, Rates, _trees, parts, rates_of

from lutjax.models import LogicTreeNet
from lutjax.training.samples import load_samples

PATCH = 4  # side of an erased patch, in pixels


def influence(wires: np.ndarray, truth: np.ndarray, kernel: int, n_kernels: int, window: int) -> np.ndarray:
    """Return the difference between a tree's output for a window value 1 and for 0, over all input combinations: ``[window]``."""

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


def draw_trees(model: LogicTreeNet, images: np.ndarray, n_trees: int, path: Path) -> None:
    """Draw inputs and outputs of the first-layer trees with the most inputs and the largest spatial variation."""
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
    size = 1.0 * (n + 1), 1.05 * (len(picked) + 1)
    for axes in draw_axes(path, len(picked) + 1, n + 1, size=size, dpi=80):
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


def draw_classes(votes: Any, images: np.ndarray, labels: np.ndarray, path: Path) -> None:
    """Draw for each class the mean predicted image, the evidence, and the image closest to a mistake."""
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
    scale = max(np.abs(lost[labels == k].mean(0)).max() for k in range(n_classes))
    others = found.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    margin = own - others.max(-1)
    for axes in draw_axes(path, 3, n_classes, size=(n_classes, 3.5), dpi=80):
        for axis in axes.flat:
            axis.set_axis_off()
        for k in range(n_classes):
            if (chosen == k).any():
                axes[0, k].imshow(images[chosen == k].mean(0)[..., 0], cmap="gray_r")
            axes[1, k].imshow(lost[labels == k].mean(0), cmap="RdBu", vmin=-scale, vmax=scale)
            hardest = np.flatnonzero(labels == k)[margin[labels == k].argmin()]
            axes[2, k].imshow(images[hardest, :, :, 0], cmap="gray_r")
            axes[2, k].set_title(f"{k} taken for {chosen[hardest]}", fontsize=7)


def main() -> None:
    given = parse(
        __doc__,
        data=(Path("mnist5k.npz"), "a .npz file with images x [N, H, W] and labels y [N]"),
        folder=(Path("."), "folder for the pictures"),
        size=(16, "network size: trees in the first layer"),
        steps=(4000, "training steps"),
    )
    whole = load_samples(given.data)
    images = (whole.x / max(float(whole.x.max()), 1.0)).reshape(-1, *whole.shape, 1).astype(np.float32)
    train, test = parts(whole, 0)
    rates = Rates(
        steps=given.steps, rate=0.02, tau=28 * given.size / 64
    )  # proportional to the number of votes
    build = _trees(given.size, 2, estimator="straight_through")
    program = Program(Network(build=build, rates=rates), images.shape[1:], whole.n_classes)
    params, others, found = program.run(
        jax.random.key(0), rates_of(rates), images[train], whole.y[train], images[test]
    )
    print(f"hard network: {100 * float((np.asarray(found) == whole.y[test]).mean()):.1f} % of the test part")
    model: Any = program.structure.model(params, others)
    logits = jax.jit(lambda params, others, x: program.structure.model(params, others)(x, deterministic=True))
    votes = functools.partial(logits, params, others)
    _, examples = np.unique(whole.y[test], return_index=True)
    given.folder.mkdir(parents=True, exist_ok=True)
    draw_trees(model, images[test][examples], 8, given.folder / "image-trees.png")
    draw_classes(votes, images[test], whole.y[test], given.folder / "image-learned.png")


if __name__ == "__main__":
    main()
