"""Networks on complete data.

Run `python benchmarks/published.py --rows rows.jsonl --fashion-mnist FOLDER --adult adult.npz`.

Runs `lutjax train classify` with recipes in `lutjax.training.recipes.RECIPES`, and trains
convolutions of tables (`ConvLUT`). Training images are those of the data, and networks are tested
once, after the last step. Rows in the file of `--rows` are not computed again.
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
from harness import (
    add_line,
    mean_and_error,
    parse,
    read_lines,
    table as markdown_table,
)  # beside this file
from images import Network, Program, Rates, _tables, rates_of

from lutjax.training import datasets
from lutjax.training.augment import mirror
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


# ------------------------------------------------------------------------------------- recipes
def run(
    data: str, path: Path, recipe: str, seed: int, words: Sequence[str], out: Path
) -> dict[str, Any]:
    """Run a command with an output folder, and return its row."""
    given = [word for option in OPTIONS[data, recipe] for word in option.split()]
    options = ["--data", str(path), "--recipe", recipe, *given, *words, "--seed", str(seed)]
    options += [
        "--out",
        str(out),
        "--no-baselines",
        "--eval-every",
        "100000",
        "--checkpoint-every",
        "100000",
    ]
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


# --------------------------------------------------------------------------- convolutions of tables
def change(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirror half of the images, and shift each by at most a pixel in each direction."""
    shift_key, mirror_key = jax.random.split(key)
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    first = jax.random.randint(shift_key, (len(images), 2), 0, 3)
    cut = lambda image, at: jax.lax.dynamic_slice(image, (*at, 0), images.shape[1:])  # noqa: E731
    return mirror(mirror_key, jax.vmap(cut)(padded, first)[..., 0])[..., None]


def run_tables(path: Path, seed: int) -> dict[str, Any]:
    """Train convolutions of tables, and return their row."""
    found = datasets.load(path)
    train, test = found.train, found.test
    assert isinstance(train, datasets.Samples)
    assert isinstance(test, datasets.Samples)
    rates = Rates(steps=7500, rate=0.01, warmup=50, average=0.999)
    build = _tables(32, n_detectors=32, n_anchors=6)
    network = Network(build=build, rates=rates, change=change, b2=0.999)
    program = Program(network, (28, 28, 1), 10)
    x, tested = (part.x.reshape(-1, 28, 28, 1).astype(np.float32) / 255 for part in (train, test))
    start = time.perf_counter()
    answers = program.run(jax.random.key(seed), rates_of(rates), x, train.y, tested)[2]
    right = round(100 * float((np.asarray(answers) == test.y).mean()), 2)
    seconds = time.perf_counter() - start
    row = {
        "data": "Fashion-MNIST",
        "recipe": TABLES,
        "options": [],
        "seed": seed,
        "hard": right,
        "soft": right,
    }
    sizes = {
        "gates": None,
        "survive": None,
        "parameters": program.structure.n_parameters(),
        "steps": rates.steps,
    }
    return row | sizes | _facts({"train": len(train.y), "test": len(test.y)}, seconds)


# ------------------------------------------------------------------------------------- table
def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows: accuracy over seeds, sizes, time and device."""
    lines = []
    for data, name in OPTIONS:
        found = [row for row in rows if (row["data"], row["recipe"]) == (data, name)]
        if found:
            lines.append(_line(data, name, found))
    columns = (
        "seeds",
        "% hard",
        "% soft",
        "gates",
        "gates that remain",
        "seconds",
        "device",
        "published",
    )
    return markdown_table(["data and recipe", *columns], lines)


def _line(data: str, name: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    words = " ".join([f"`{name}`" if name != TABLES else name, *rows[0]["options"]])
    accuracies = [[row[kind] for row in rows] for kind in ("hard", "soft")]
    means = [mean_and_error(all_) if len(all_) > 1 else f"{all_[0]:g}" for all_ in accuracies]
    remain = [row["survive"] for row in rows if row["survive"] is not None]
    sizes = (
        "" if n is None else f"{n:,}".replace(",", " ") for n in (rows[0]["gates"], _mean(remain))
    )
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
