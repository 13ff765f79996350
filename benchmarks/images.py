"""Accuracy on small images.

Run `python benchmarks/images.py --data mnist5k.npz --rows docs/benchmarks/images.jsonl`.

Trains scikit-learn's logistic regression, random forest and gradient boosting, small CNNs, logic
trees (`LogicTreeNet`, the hard network) and table convolutions (`ConvLUT`) on five splits, four
fifths to one fifth of each class (stratified `lutjax.training.samples.split_ids`), and tests them
once, after the last step. All networks see random image changes, smaller ones for logic trees.
Recipes were selected with `--choose`, which tests on images outside all five test parts.

Rows in the file of `--rows` are not computed again. `--pictures FOLDER` instead trains a
`LogicTreeNet` and draws the hard network: `image-trees.png`, trees in the first layer, and
`image-learned.png`, its classes.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import add_line, draw_axes, mean_and_error, parse, read_lines, table as markdown_table

import lutjax
from lutjax.layers.nnx import ConvLUT
from lutjax.models import LogicTreeNet, LogicTreeNetConfig
from lutjax.training.augment import warp
from lutjax.training.models import Structure
from lutjax.training.samples import Samples, load_samples, split_ids

SPLITS = range(5)
AT_ONCE = 250


# ----------------------------------------------------------------------------------------- networks
class CNN(nnx.Module):
    """Two blocks with two convolutions, layer norm and 2 x 2 max pooling, and a linear head."""

    def __init__(
        self, in_shape: tuple[int, int, int], n_classes: int, width: int, *, rngs: nnx.Rngs
    ):
        height, wide, channels = in_shape
        sizes = (channels, width, width, 2 * width, 2 * width)
        self.convolutions = nnx.List(
            [nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in itertools.pairwise(sizes)]
        )
        self.norms = nnx.List([nnx.LayerNorm(size, rngs=rngs) for size in sizes[1:]])
        self.classes = nnx.Linear((height // 4) * (wide // 4) * 2 * width, n_classes, rngs=rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        for number, (convolution, norm) in enumerate(
            zip(self.convolutions, self.norms, strict=True)
        ):
            x = jax.nn.relu(norm(convolution(x)))
            if number % 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.classes(x.reshape(len(x), -1))


class TableNet(nnx.Module):
    """Table convolutions with scored reads: a stem, residual blocks, 2 x 2 average pooling, and a linear head."""

    def __init__(self, in_shape: Any, n_classes: int, width: int, *, rngs: nnx.Rngs, **sizes: Any):
        sizes["read"] = lutjax.reads.Confidence()
        sizes["weights_init"] = jax.nn.initializers.normal(
            1 / (sizes["n_anchors"] * sizes["n_detectors"] ** 0.5)
        )

        def tables(shape: tuple[int, ...], out: int, kernel: int, **how: Any) -> ConvLUT:
            return ConvLUT(
                shape, out, kernel=kernel, padding=kernel // 2, **sizes, **how, rngs=rngs
            )

        first = tables(in_shape, width, 5, stride=2)
        stages = [[first, tables(first.out_shape, width, 3)]]
        second = tables(first.out_shape, 2 * width, 3, pool=2)
        stages.append([second, tables(second.out_shape, 2 * width, 3)])
        self.stages = nnx.List([nnx.List(stage) for stage in stages])
        self.norms = nnx.List(
            [
                nnx.List([nnx.LayerNorm(layer.out_shape[-1], rngs=rngs) for layer in s])
                for s in stages
            ]
        )
        self.classes = nnx.Linear(int(np.prod(second.out_shape)), n_classes, rngs=rngs)

    def __call__(self, x: jax.Array, *, deterministic: bool = True) -> jax.Array:
        for stage, norms in zip(self.stages, self.norms, strict=True):
            x = stage[0](x)
            for layer, norm in zip(list(stage)[1:], list(norms)[:-1], strict=True):
                x = x + layer(norm(x))
            x = norms[len(norms) - 1](x)
        return self.classes(x.reshape(len(x), -1))


# ----------------------------------------------------------------------------------------- recipes
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Arguments of a compiled training.

    Attributes:
      steps: training steps.
      rate: Adam's learning rate after a warm-up, with linear decay over the last `cooldown` share.
      decay: weight decay per step, times the rate.
      tau: logit divisor.
      warmup: steps of the warm-up.
      average: decay of the tested parameter average.
      strength, shift, bend: see `lutjax.training.augment.warp`.
    """

    steps: int = 4000
    rate: float = 0.002
    cooldown: float = 0.5
    decay: float = 0.0
    tau: float = 1.0
    warmup: int = 100
    average: float = 0.99
    strength: float = 1.0
    shift: float = 1.5
    bend: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A network and its rates.

    Attributes:
      build: takes image shape, number of classes and `nnx.Rngs`.
      change: changes images at random, with a key; None: `warp`.
      b2: decay of Adam's second moments.
    """

    build: Callable[[tuple[int, int, int], int, nnx.Rngs], nnx.Module]
    rates: Rates
    batch: int = 128
    change: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    b2: float = 0.99


def _cnn(width: int) -> Callable[..., nnx.Module]:
    return lambda shape, n_classes, rngs: CNN(shape, n_classes, width, rngs=rngs)


def _tables(width: int, **sizes: Any) -> Callable[..., nnx.Module]:
    return lambda shape, n_classes, rngs: TableNet(shape, n_classes, width, **sizes, rngs=rngs)


def _trees(k: int, n_thresholds: int, **changes: Any) -> Callable[..., nnx.Module]:
    def build(shape: tuple[int, int, int], n_classes: int, rngs: nnx.Rngs) -> nnx.Module:
        sizes = {
            "kernels": (k, 3 * k, 9 * k),
            "layers": (1280 * k, 640 * k, 320 * k),
            "n_thresholds": n_thresholds,
        }
        windows = {"kernel": (5, 3, 3), "pool_padding": (0, 1, 1)}
        config = LogicTreeNetConfig(shape, n_classes, **{**sizes, **windows, **changes})
        return LogicTreeNet(config, rngs=rngs)

    return build


_CONVOLUTIONS = _tables(16, n_detectors=16, n_anchors=4)
_TOP_K = _trees(64, 3, wiring="top-k")
_SMALL_CHANGES = {"steps": 6000, "tau": 16.0, "shift": 1.0, "bend": 0.7}
NETWORKS = {
    "CNN": Network(build=_cnn(32), rates=Rates(steps=3000)),
    "convolutions of tables": Network(build=_CONVOLUTIONS, rates=Rates(steps=4000, rate=0.01)),
    "convolutions of tables, 500 steps": Network(
        build=_CONVOLUTIONS, rates=Rates(steps=500, rate=0.01), batch=64
    ),
    "logic trees": Network(build=_TOP_K, rates=Rates(rate=0.1, **_SMALL_CHANGES)),
    "logic trees, rate 0.2": Network(
        build=_TOP_K, rates=Rates(rate=0.2, decay=0.005, **_SMALL_CHANGES)
    ),
    "logic trees, drawn wires, straight through": Network(
        build=_trees(64, 3, estimator="straight_through"), rates=Rates(rate=0.02, tau=28.0)
    ),
}


# ----------------------------------------------------------------------------------------- training
class Program:
    """Training and test in one program."""

    def __init__(self, network: Network, in_shape: tuple[int, int, int], n_classes: int):
        self._n_classes, self._network = n_classes, network
        self.structure = Structure(lambda rngs: network.build(in_shape, n_classes, rngs))
        self.run = jax.jit(self._run)

    def _run(
        self,
        key: jax.Array,
        rates: dict[str, jax.Array],
        x: jax.Array,
        y: jax.Array,
        test: jax.Array,
    ) -> Any:
        """Return parameters, other arrays, and the predicted test classes, by the hard network for logic."""
        adam = optax.scale_by_adam(b1=0.9, b2=self._network.b2)
        params, others = self.structure.sample_variables(jax.random.fold_in(key, 0))
        keys = jax.random.key_data(jax.random.fold_in(key, 1))

        def warped(key: jax.Array, images: jax.Array) -> jax.Array:
            return warp(key, images, rates["strength"], shift=rates["shift"], bend=rates["bend"])

        change = self._network.change or warped

        def step(number: jax.Array, state: Any) -> Any:
            params, moments, average = state
            own = jax.random.fold_in(jax.random.wrap_key_data(keys), number)
            choice, changes = jax.random.split(own)
            chosen = jax.random.randint(choice, (self._network.batch,), 0, len(x))
            images = change(changes, x[chosen])
            labels = jax.nn.one_hot(y[chosen], self._n_classes)

            def loss(params: Any) -> jax.Array:
                logits = self._logits(params, others, images, rates)
                return optax.softmax_cross_entropy(logits, labels).mean()

            done = number / rates["steps"]
            rate = rates["rate"] * jnp.minimum(
                jnp.minimum(1, (1 - done) / rates["cooldown"]), (number + 1) / rates["warmup"]
            )
            with jax.numpy_dtype_promotion("standard"):
                updates, moments = adam.update(jax.grad(loss)(params), moments)
            params = jax.tree.map(lambda p, u: p - rate * (u + rates["decay"] * p), params, updates)
            stays = jnp.minimum(rates["average"], number / (number + 10))
            average = jax.tree.map(lambda a, p: stays * a + (1 - stays) * p, average, params)
            return params, moments, average

        state = jax.lax.fori_loop(
            0, rates["steps"].astype(jnp.int32), step, (params, adam.init(params), params)
        )
        n_parts = -(-len(test) // AT_ONCE)
        parts = jnp.minimum(jnp.arange(n_parts * AT_ONCE), len(test) - 1).reshape(n_parts, AT_ONCE)

        def classes(ids: jax.Array) -> jax.Array:
            return (
                self._logits(state[2], others, test[ids], rates, hard=True)
                .argmax(-1)
                .astype(jnp.int8)
            )

        found = jax.lax.map(classes, parts).reshape(-1)[: len(test)]
        return state[2], others, found

    def _logits(
        self, params: Any, others: Any, images: jax.Array, rates: Any, *, hard: bool = False
    ) -> jax.Array:
        model: Any = self.structure.model(params, others)
        logits: jax.Array = model(images, deterministic=hard) / rates["tau"]
        return logits


def rates_of(rates: Rates) -> dict[str, jax.Array]:
    return {name: jnp.float32(value) for name, value in dataclasses.asdict(rates).items()}


# ----------------------------------------------------------------------------------------- figures
def learners() -> dict[str, Callable[[int], Any]]:
    """Return constructors of scikit-learn's learners, called with a seed."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    return {
        "logistic regression": lambda seed: LogisticRegression(C=0.3, max_iter=1000),
        "random forest": lambda seed: RandomForestClassifier(500, random_state=seed),
        "gradient boosting": lambda seed: HistGradientBoostingClassifier(
            max_iter=100,
            learning_rate=0.15,
            max_features=0.1,
            early_stopping=False,
            random_state=seed,
        ),
    }


def parts(whole: Samples, split: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test image ids for a split.

    None tests on images outside all test parts.
    """
    if split is not None:
        return split_ids(whole.y, split, stratified=True)
    in_test = np.zeros(len(whole.y), bool)
    for each in SPLITS:
        in_test[split_ids(whole.y, each, stratified=True)[1]] = True
    return np.flatnonzero(in_test), np.flatnonzero(~in_test)


def figures(
    whole: Samples, wanted: Sequence[tuple[str, int | None]], steps: int | None
) -> Iterator[dict[str, Any]]:
    """Train learners on splits, and yield each row."""
    images = whole.x.reshape(-1, *whole.shape, *([1] if len(whole.shape) == 2 else []))
    images = images.astype(np.float32) / max(float(images.max()), 1.0)
    data = {split: parts(whole, split) for _, split in wanted}
    names = list(dict.fromkeys(name for name, _ in wanted))
    with ThreadPoolExecutor(len(names) or 1) as pool:  # parallel compilation
        compiled: dict[tuple[str, int], Any] = {}
        for name, split in wanted:
            size = len(data[split][1])
            if name in NETWORKS and (name, size) not in compiled:
                compiled[name, size] = pool.submit(
                    _compiled, NETWORKS[name], images, whole.n_classes, *map(len, data[split])
                )
        for name, split in wanted:
            train, test = data[split]
            row: dict[str, Any] = {"learner": name, "split": split}
            if name in NETWORKS:
                program, parameters = compiled[name, len(test)].result()
                rates = NETWORKS[name].rates
                rates = dataclasses.replace(rates, steps=steps or rates.steps)
                start = time.perf_counter()
                _, _, found = program(
                    jax.random.key(split or 0),
                    rates_of(rates),
                    images[train],
                    whole.y[train],
                    images[test],
                )
                right = round(100 * float((np.asarray(found) == whole.y[test]).mean()), 2)
                sizes = {
                    "parameters": parameters,
                    "steps": rates.steps,
                    "batch": NETWORKS[name].batch,
                }
                row |= {"right": right, **sizes, "device": jax.devices()[0].device_kind}
            else:
                model, flat = learners()[name](split or 0), images.reshape(len(images), -1)
                start = time.perf_counter()
                model.fit(flat[train], whole.y[train])
                row |= {"right": round(100 * float(model.score(flat[test], whole.y[test])), 2)}
            yield row | {"tested": len(test), "seconds": round(time.perf_counter() - start, 1)}


def _compiled(
    network: Network, images: np.ndarray, n_classes: int, n_train: int, n_test: int
) -> tuple[Any, int]:
    """Return a compiled program and its parameter count."""
    program = Program(network, images.shape[1:], n_classes)
    shapes = [jax.ShapeDtypeStruct((n, *images.shape[1:]), np.float32) for n in (n_train, n_test)]
    labels = jax.ShapeDtypeStruct((n_train,), np.int32)
    lowered = program.run.lower(
        jax.random.key(0), rates_of(network.rates), shapes[0], labels, shapes[1]
    )
    return lowered.compile(), program.structure.n_parameters()


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table(read_lines(path))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of learners: size, validation images, mean and standard error over the splits, and each split."""
    lines = []
    for name in (*learners(), *NETWORKS):
        found = {row["split"]: row for row in rows if row["learner"] == name}
        if not found:
            continue
        any_row = next(iter(found.values()))
        right = [row["right"] for split, row in found.items() if split is not None]
        mean = mean_and_error(right) if len(right) > 1 else f"{right[0]:.2f}" if right else ""
        seen = any_row["steps"] * any_row["batch"] if "steps" in any_row else None
        sizes = (
            "" if n is None else f"{n:,}".replace(",", " ")
            for n in (any_row.get("parameters"), seen)
        )
        each = [
            f"{found[split]['right']:.1f}" if split in found else "" for split in (None, *SPLITS)
        ]
        lines.append((name, *sizes, each[0], mean, *each[1:]))
    columns = "% right", "parameters", "images trained on", "validation", "mean of splits"
    return markdown_table([*columns, *(f"split {s}" for s in SPLITS)], lines)


# ----------------------------------------------------------------------------------------- pictures
PATCH = 4  # side of an erased patch, in pixels


def influence(
    wires: np.ndarray, truth: np.ndarray, kernel: int, n_kernels: int, window: int
) -> np.ndarray:
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


def draw_pictures(whole: Samples, folder: Path) -> None:
    """Train a small network straight through, and draw its trees and classes."""
    images = (
        (whole.x / max(float(whole.x.max()), 1.0)).reshape(-1, *whole.shape, 1).astype(np.float32)
    )
    train, test = parts(whole, 0)
    build = _trees(16, 2, estimator="straight_through")
    rates = Rates(rate=0.02, tau=7.0)
    program = Program(Network(build=build, rates=rates), images.shape[1:], whole.n_classes)
    params, others, found = program.run(
        jax.random.key(0), rates_of(rates), images[train], whole.y[train], images[test]
    )
    print(
        f"hard network: {100 * float((np.asarray(found) == whole.y[test]).mean()):.1f} % of the "
        "test part"
    )
    model: Any = program.structure.model(params, others)
    logits = jax.jit(
        lambda params, others, x: program.structure.model(params, others)(x, deterministic=True)
    )
    votes = functools.partial(logits, params, others)
    _, examples = np.unique(whole.y[test], return_index=True)
    folder.mkdir(parents=True, exist_ok=True)
    draw_trees(model, images[test][examples], 8, folder / "image-trees.png")
    draw_classes(votes, images[test], whole.y[test], folder / "image-learned.png")


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(
        __doc__,
        argv=argv,
        data=(Path, "a .npz file with images x [N, H, W] or [N, H, W, C] and labels y [N]"),
        rows=(Path("rows.jsonl"), "JSON lines, read and appended to"),
        only=(dict.fromkeys([*learners(), *NETWORKS]), "learners"),
        splits=([*SPLITS], "splits"),
        choose=(False, "test on images outside all test parts"),
        steps=(int, "steps of every network, instead of its recipe's"),
        pictures=(Path, "draw pictures of a trained network into this folder"),
    )
    if given.pictures:
        return draw_pictures(load_samples(given.data), given.pictures)
    rows = read_lines(given.rows) if given.rows.exists() else []
    known = {(row["learner"], row["split"]) for row in rows}
    splits: list[int | None] = [None] if given.choose else given.splits
    wanted = [
        (name, split) for split in splits for name in given.only if (name, split) not in known
    ]
    if given.data:
        for row in figures(load_samples(given.data), wanted, given.steps):
            rows.append(row)
            print(add_line(given.rows, row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
