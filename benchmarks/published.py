"""Networks on complete data: `python benchmarks/published.py --rows rows.jsonl --fashion-mnist FOLDER --adult adult.npz`.

Runs `lutjax train classify` with recipes in `lutjax.training.recipes.RECIPES`, and trains convolutions of tables (`ConvLUT`). Training images are
those of the data, and networks are tested once, after the last step. Rows in the file of `--rows` are not computed again.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import add_line, mean_and_error, parse, read_lines, table as markdown_table  # beside this file
from images import TableNet

from lutjax.training import datasets
from lutjax.training.augment import mirror
from lutjax.training.models import Structure
from lutjax.training.recipes import RECIPES

FOLDERS = {"Fashion-MNIST": "fashion-mnist", "Adult": "adult"}
TABLES = "ConvLUT"
OPTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Fashion-MNIST", "fashion-mnist-small"): (),
    ("Fashion-MNIST", "fashion-mnist-large"): (),
    ("Fashion-MNIST", TABLES): (),
    ("Fashion-MNIST", "lilogic-mnist-small"): ("--steps 20000",),
    ("Fashion-MNIST", "lilogic-mnist-medium"): ("--steps 20000",),
    ("Fashion-MNIST", "lilogic-mnist-large"): ("--steps 20000",),
    ("Fashion-MNIST", "difflogic-mnist-small"): ("--steps 20000",),
    ("Fashion-MNIST", "dwn-mnist"): ("--n-thresholds 4", "--steps 20000"),
    ("Fashion-MNIST", "logictreenet-mnist-s"): ("--steps 20000",),
    ("Adult", "difflogic-adult"): (),
}
"""Options of each network, by data and recipe."""

STEPS, BATCH, RATE, COOLDOWN, AVERAGE = 7500, 128, 0.01, 0.5, 0.999
"""Training of the convolutions of tables."""

AT_ONCE = 1000


# ------------------------------------------------------------------------------------- recipes
def run(data: str, path: Path, recipe: str, seed: int, words: Sequence[str], out: Path) -> dict[str, Any]:
    """Run a command with an output folder, and return its row."""
    given = [word for option in OPTIONS[data, recipe] for word in option.split()]
    options = ["--data", str(path), "--recipe", recipe, *given, *words, "--seed", str(seed)]
    options += ["--out", str(out), "--no-baselines", "--eval-every", "100000", "--checkpoint-every", "100000"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lutjax", "train", "classify", *options], check=True)
    seconds = time.perf_counter() - start
    report = json.loads((out / "report.json").read_text())
    right = {name: round(100 * report[name], 2) for name in ("hard", "soft")}
    row = {"data": data, "recipe": recipe, "options": [*given, *words], "seed": seed, **right}
    row |= {"gates": report["gates"]["trained"], "survive": report["gates"]["simplified"]}
    return row | {"steps": report["training"]["steps"], **_facts(report["samples"], seconds)}


def _facts(samples: dict[str, int], seconds: float) -> dict[str, Any]:
    sizes = {"trained": samples["train"], "tested": samples["test"]}
    return {**sizes, "seconds": round(seconds), "device": jax.devices()[0].device_kind}


# ------------------------------------------------------------------------------------- convolutions of tables
class Tables(nnx.Module):
    """Convolutions of tables for pixels from 0 to 255."""

    def __init__(self, rngs: nnx.Rngs):
        self.net = TableNet((28, 28, 1), 10, 32, n_detectors=32, n_anchors=6, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.net(images[..., None] / 255)


def change(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror half of the images, and shift each by at most a pixel in each direction."""
    shift_key, mirror_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1)))
    first = jax.random.randint(shift_key, (len(images), 2), 0, 3)
    shifted = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, at, images.shape[1:]))(padded, first)
    return mirror(mirror_key, shifted)


def run_tables(path: Path, seed: int) -> dict[str, Any]:
    """Train convolutions of tables, and return their row."""
    found = datasets.load(path)
    train, test = found.train, found.test
    assert isinstance(train, datasets.Samples)
    assert isinstance(test, datasets.Samples)
    structure: Structure[Tables] = Structure(Tables)
    adam = optax.scale_by_adam(b1=0.9, b2=0.999)

    def step(number: jax.Array, state: Any, others: Any, x: jax.Array, y: jax.Array) -> Any:
        params, moments, average = state
        choice, changes = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        ids = jax.random.randint(choice, (BATCH,), 0, len(x))
        images = change(changes, x[ids].astype(jnp.float32).reshape(-1, 28, 28))

        def loss(params: Any) -> jax.Array:
            logits = structure.model(params, others)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y[ids]).mean()

        done = number / STEPS
        rate = RATE * jnp.minimum(jnp.minimum(1, (1 - done) / COOLDOWN), (number + 1) / 50)
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = adam.update(jax.grad(loss)(params), moments)
        params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
        stays = jnp.minimum(AVERAGE, (number + 1) / (number + 10))
        return params, moments, jax.tree.map(lambda a, p: stays * a + (1 - stays) * p, average, params)

    @jax.jit
    def trained(x: jax.Array, y: jax.Array) -> Any:
        params, others = structure.sample_variables(jax.random.key(seed))
        state = params, adam.init(params), params
        state = jax.lax.fori_loop(0, STEPS, lambda i, state: step(i, state, others, x, y), state)
        return state[2], others

    @jax.jit
    def classes(params: Any, others: Any, x: jax.Array) -> jax.Array:
        images = x.astype(jnp.float32).reshape(-1, 28, 28)
        return structure.model(params, others)(images).argmax(-1)

    start = time.perf_counter()
    params, others = trained(jnp.asarray(train.x), jnp.asarray(train.y))
    parts = [test.x[first : first + AT_ONCE] for first in range(0, len(test.x), AT_ONCE)]
    answers = np.concatenate([np.asarray(classes(params, others, jnp.asarray(part))) for part in parts])
    right = round(100 * float((answers == test.y).mean()), 2)
    seconds = time.perf_counter() - start
    row = {
        "data": "Fashion-MNIST",
        "recipe": TABLES,
        "options": [],
        "seed": seed,
        "hard": right,
        "soft": right,
    }
    row |= {"gates": None, "survive": None, "parameters": structure.n_parameters(), "steps": STEPS}
    return row | _facts({"train": len(train.y), "test": len(test.y)}, seconds)


# ------------------------------------------------------------------------------------- table
def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows: accuracy over seeds, sizes, time and device."""
    lines = []
    for data, name in OPTIONS:
        found = [row for row in rows if (row["data"], row["recipe"]) == (data, name)]
        if found:
            lines.append(_line(data, name, found))
    columns = ("seeds", "% hard", "% soft", "gates", "gates that remain", "seconds", "device", "published")
    return markdown_table(["data and recipe", *columns], lines)


def _line(data: str, name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    words = " ".join([f"`{name}`" if name != TABLES else name, *rows[0]["options"]])
    accuracies = [[row[kind] for row in rows] for kind in ("hard", "soft")]
    means = [mean_and_error(all_) if len(all_) > 1 else f"{all_[0]:g}" for all_ in accuracies]
    remain = [row["survive"] for row in rows if row["survive"] is not None]
    sizes = ("" if n is None else f"{n:,}".replace(",", " ") for n in (rows[0]["gates"], _mean(remain)))
    recipe = RECIPES.get(name)
    published = recipe.published if recipe is not None and recipe.data == data else None
    seconds = f"{_mean([row['seconds'] for row in rows])}"
    return (
        f"{data}, {words}",
        str(len(rows)),
        *means,
        *sizes,
        seconds,
        rows[0]["device"],
        f"{published or '':}",
    )


def _mean(values: Sequence[int]) -> int | None:
    return round(sum(values) / len(values)) if values else None


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table(read_lines(path))


def main() -> None:
    names = dict.fromkeys(name for _, name in OPTIONS)
    given = parse(
        __doc__,
        rows=(Path("rows.jsonl"), "JSON lines, read and appended to"),
        fashion_mnist=(Path, "folder with the four files of Fashion-MNIST"),
        adult=(Path, "a .npz file with x_train, y_train, x_test and y_test of Adult"),
        only=(names, "recipes"),
        seeds=([0, 1, 2], "seeds"),
        options=([str], "further options of the commands, without dashes: tau=45"),
        out=(Path, "folder for the runs; default: a temporary folder"),
    )
    rows = read_lines(given.rows) if given.rows.exists() else []
    known = {(row["data"], row["recipe"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as place:
        for (data, name), seed in ((key, seed) for key in OPTIONS for seed in given.seeds):
            path = getattr(given, FOLDERS[data].replace("-", "_"))
            if path is None or name not in given.only or (data, name, seed) in known:
                continue
            if name == TABLES:
                row = run_tables(path, seed)
            else:
                out = (given.out or Path(place)) / f"{FOLDERS[data]}-{name}-{seed}"
                row = run(data, path, name, seed, [f"--{word}" for word in given.options], out)
            rows.append(row)
            print(add_line(given.rows, row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
