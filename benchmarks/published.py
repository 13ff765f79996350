"""Published logic networks and local results: `python benchmarks/published.py --rows rows.jsonl [--mnist FOLDER] ...`.

Runs `lutjax train classify` with each image recipe in `lutjax.training.recipes.RECIPES` whose data are given. `--few` replaces MNIST: a .npz file with
a few thousand images, written as IDX files, four fifths for training. Rows in the file of `--rows` are not computed again.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import add_line, parse, read_lines  # beside this file

from lutjax.training import datasets
from lutjax.training.datasets import idx
from lutjax.training.recipes import RECIPES
from lutjax.training.samples import load_samples, select_samples, split_ids

FOLDERS = {"MNIST": "mnist", "Fashion-MNIST": "fashion-mnist", "CIFAR-10": "cifar-10"}
FASHION = ("difflogic-mnist-small",)


def write_idx(path: Path, folder: Path) -> None:
    """Write a split of the images in a .npz file as the four MNIST files."""
    whole = load_samples(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [select_samples(whole, ids) for ids in split_ids(whole.y, 0, stratified=True)]
    for samples, (images, labels) in zip(parts, (idx.FILES[:2], idx.FILES[2:]), strict=True):
        pixels = samples.x.reshape(-1, *samples.shape).astype(np.uint8)
        for name, values in ((images, pixels), (labels, samples.y.astype(np.uint8))):
            head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
            (folder / name).write_bytes(head + values.tobytes())


def commands() -> list[tuple[str, str]]:
    """Return data and recipe of each command."""
    return [
        (data, recipe.name)
        for data in FOLDERS
        for recipe in RECIPES.values()
        if recipe.data == data or (data == "Fashion-MNIST" and recipe.name in FASHION)
    ]


def run(data: str, folder: Path, recipe: str, steps: int | None, out: Path) -> dict[str, Any]:
    """Run a command with an output folder, and return its row."""
    loaded = datasets.load(folder)
    options = ["--data", str(folder), "--recipe", recipe, "--out", str(out), "--no-baselines"]
    if steps:
        options += [f"--{name}={steps}" for name in ("steps", "eval-every", "checkpoint-every")]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "lutjax", "train", "classify", *options], check=True)
    seconds = time.perf_counter() - start
    report = json.loads((out / "report.json").read_text())
    assert loaded.test is not None
    sizes = {"trained": len(loaded) - len(loaded.test.y), "tested": len(loaded.test.y)}
    right = {name: round(100 * report[name], 2) for name in ("hard", "soft")}
    row = {"data": data, "recipe": recipe, **sizes, "steps": steps or RECIPES[recipe].steps, **right}
    return row | {"seconds": round(seconds)}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of all commands, published accuracies, and local results."""
    lines = ["| `lutjax train classify` with | published | here |", "| --- | --: | --- |"]
    there = {(row["data"], row["recipe"]): row for row in rows}
    for data, name in commands():
        recipe = RECIPES[name]
        published = f"{recipe.published:g}" if recipe.published is not None and recipe.data == data else ""
        here = "not run here"
        if row := there.get((data, name)):
            sizes = ("tested", "trained", "steps")
            tested, trained, steps = (f"{row[name]:,}".replace(",", " ") for name in sizes)
            here = f"{row['hard']:.1f} % of {tested} images, trained on {trained} for {steps} steps"
        lines.append(f"| `--data {FOLDERS[data]} --recipe {name}` | {published} | {here} |")
    return "\n".join(lines) + "\n"


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table(read_lines(path))


def main() -> None:
    given = parse(
        __doc__,
        rows=(Path("rows.jsonl"), "JSON lines, read and appended to"),
        **{FOLDERS[name].replace("-", "_"): (Path, "folder with its files") for name in FOLDERS},
        few=(Path, "a .npz file with images x [N, H, W] and labels y [N]"),
        only=(RECIPES, "recipes"),
        steps=(int, "instead of the steps of each recipe"),
        out=(Path, "folder for the runs; default: a temporary folder"),
    )
    rows = read_lines(given.rows) if given.rows.exists() else []
    known = {(row["data"], row["recipe"]) for row in rows}
    with tempfile.TemporaryDirectory() as place:
        folders = {name: getattr(given, FOLDERS[name].replace("-", "_")) for name in FOLDERS}
        if given.few:
            folders["MNIST"] = Path(place) / "mnist"
            write_idx(given.few, folders["MNIST"])
        for data, recipe in commands():
            if folders[data] is not None and recipe in given.only and (data, recipe) not in known:
                out = (given.out or Path(place)) / f"{FOLDERS[data]}-{recipe}"
                rows.append(run(data, folders[data], recipe, given.steps, out))
                add_line(given.rows, rows[-1])
    print(table(rows))


if __name__ == "__main__":
    main()
