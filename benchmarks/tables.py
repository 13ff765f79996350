"""Circuits and other learners on tables, five splits each.

Run `python benchmarks/tables.py --data FOLDER --rows FILE`.

`--prepare` first writes the tables to the folder: letter, satellite, shuttle and DNA of the R
package mlbench and spam of kernlab (`apt-get install r-cran-mlbench r-cran-kernlab`; reading them
takes `pip install rdata`), Adult (`--adult adult.npz`), and those made here: MONK's problems from
their rules, breast cancer and digits of scikit-learn. Digests of all sources are checked.

Every network is a run of `lutjax train classify` without options but `--split`, and tested once.
The test part of split s is a stratified fifth, sampled with seed s; Adult has a test part, and
MONK's problems test on all 432 rows. Defaults for tables were chosen on splits 10 and 11. Gates and
LUT6 are those of the exported circuit with encoder, votes and argmax.

Rows in the file of `--rows` are not computed again. LUT6 need ABC; without it, another call with
the same `--out` counts them.
"""

import csv
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from harness import (  # beside this file
    about,
    add_line,
    mean_and_error,
    parse,
    parse_fields,
    read_lines,
    table as markdown_table,
)

from lutjax.training.samples import split_ids

LIBRARY = Path("/usr/lib/R/site-library")
SPLITS = 5
SOURCES = {
    "letter": (
        "mlbench/data/LetterRecognition.rda",
        "lettr",
        "967a1a3e10b548d7269cbe50182bcecd6365cc58ea07638bbc34c51f17f34f1d",
    ),
    "satellite": (
        "mlbench/data/Satellite.rda",
        "classes",
        "29f8cf9bb1bc51b769d694c9caf740fd1c36ed6a7c87603edf5985962e330f64",
    ),
    "shuttle": (
        "mlbench/data/Shuttle.rda",
        "Class",
        "5b1db218b76a47c83f575f1ff38d7a7d36e569b0e27d8bf4aa92eae6c0bcb826",
    ),
    "dna": (
        "mlbench/data/DNA.rda",
        "Class",
        "df941ad89a49f705a29bf38e52c91dc34029539cedb13fa24f803f1224278c9e",
    ),
    "spam": (
        "kernlab/data/spam.rda",
        "type",
        "09281b38bc7b064f63616d9056091f924f59e38aa9fd07dd3bc1af0cba9613d3",
    ),
}
"""Path in the R library, label column and SHA-256 of each table."""
ADULT = "c91f659ded3eb7bb60093b5bc7904ebc1fd0562e0ca2a49fca356db898862156"
TRAINED = {"monk-1": 124, "monk-2": 169, "monk-3": 122}
"""Training rows of MONK's problems, as published."""
NAMES = (*SOURCES, *TRAINED, "adult", "breast cancer", "digits")
N_CLASSES = {"letter": 26, "satellite": 6, "shuttle": 7, "dna": 3, "digits": 10}
"""Classes, where there are more than two."""
NETWORK = "circuit"
OTHERS = ("gradient boosting", "logistic regression", "small MLP")
TARGET = "class"

Row = dict[str, Any]
"""Accuracy of one learner on one split: data, learner, split, accuracy (%), seconds; gates and lut6 of circuits."""


# ----------------------------------------------------------------------------------------- data
def prepare(folder: Path, library: Path, adult: Path | None) -> None:
    """Write all tables of this script to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (path, label, digest) in SOURCES.items():
        _check(library / path, digest)
        import rdata

        (frame,) = rdata.read_rda(library / path, default_encoding="ascii").values()
        names = [column for column in frame.columns if column != label]
        rows = [
            [f"{x:g}" if isinstance(x, float) else f"{x}" for x in row]
            for row in frame[names].values
        ]
        _write(folder / f"{name}.csv", names, rows, list(map(str, frame[label])))
    if adult is not None:
        _check(adult, ADULT)
        shutil.copyfile(adult, folder / "adult.npz")
    from sklearn.datasets import load_breast_cancer

    cancer = load_breast_cancer()
    rows = [[f"{x:g}" for x in row] for row in cancer.data]
    labels = cancer.target_names[cancer.target].tolist()
    _write(folder / "breast cancer.csv", cancer.feature_names.tolist(), rows, labels)
    for name in TRAINED:
        for split in (*range(SPLITS), 10, 11):
            for part, (x, y) in zip(("", " test"), monk(name, split), strict=True):
                path = folder / f"{name} {split}{part}.csv"
                _write(path, [f"a{k}" for k in range(1, 7)], x.tolist(), y.tolist())


def _check(path: Path, digest: str) -> None:
    if not path.exists():
        raise SystemExit(f"{path} does not exist; --help says how to get it.")
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{path} is another version: its SHA-256 is not {digest}.")


def _write(path: Path, names: list[str], rows: list[list[Any]], labels: list[Any]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*names, TARGET])
        lines.writerows([*row, label] for row, label in zip(rows, labels, strict=True))


def monk(name: str, split: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Return random training rows of a MONK's problem, 5 % of them with wrong labels in the third, and all rows."""
    x = np.stack(np.meshgrid(*[np.arange(1, n + 1) for n in (3, 3, 2, 3, 4, 2)], indexing="ij"), -1)
    x = x.reshape(-1, 6)
    a1, a2, _, a4, a5, _ = x.T
    y = {
        "monk-1": (a1 == a2) | (a5 == 1),
        "monk-2": (x == 1).sum(1) == 2,
        "monk-3": ((a5 == 3) & (a4 == 1)) | ((a5 != 4) & (a2 != 3)),
    }[name].astype(int)
    draw = np.random.default_rng(split)
    chosen = draw.permutation(len(x))[: TRAINED[name]]
    labels = y[chosen]
    if name == "monk-3":
        labels = labels ^ (draw.permutation(len(chosen)) < round(0.05 * len(chosen)))
    # Values are words, because the attributes are categories.
    return (np.char.add("v", x[chosen].astype(str)), labels), (np.char.add("v", x.astype(str)), y)


# ----------------------------------------------------------------------------------------- networks
def train(name: str, split: int, options: dict[str, Any], data: Path, out: Path) -> Row:
    """Run `lutjax train classify` and return the row of its circuit."""
    options = dict(options)
    if per_class := options.pop("per-class", None):  # sizes of layers, times the number of classes
        options["layers"] = ",".join(str(size * N_CLASSES.get(name, 2)) for size in per_class)
    words = [
        "--out",
        str(out),
        "--no-baselines",
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    if name in TRAINED:
        paths = [data / f"{name} {split}{part}.csv" for part in ("", " test")]
        words += ["--data", str(paths[0]), "--test-data", str(paths[1]), "--target", TARGET]
        words += [f"--seed={split}"]
    elif name == "adult":
        words += ["--data", str(data / "adult.npz"), f"--seed={split}"]
    elif name == "digits":
        words += [f"--split={split}"]
    else:
        words += ["--data", str(data / f"{name}.csv"), "--target", TARGET, f"--split={split}"]
    start = time.perf_counter()
    if not (out / "report.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        _run("-m", "lutjax", "train", "classify", *words)
    seconds = time.perf_counter() - start
    report = json.loads((out / "report.json").read_text())
    row = {"accuracy": round(100 * report["hard"], 3), "soft": round(100 * report["soft"], 3)}
    return {**row, "seconds": round(seconds, 1), "trained": sum(report["model"]["layers"])}


def _run(*words: str, **more: str) -> str:
    """Run Python with these arguments and more environment variables; return its output."""
    command, env = [sys.executable, *words], {**os.environ, **more}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout


def count(run: Path) -> Row:
    """Return gates and LUT6 of a run's circuit, from its inputs to the class; None without ABC."""
    from lutjax.circuits import abc, netlist_json
    from lutjax.training import export

    path = run / "netlist.json"
    if not path.exists():
        path.write_text(netlist_json.write(export.source_of(run).circuit))
    circuit = netlist_json.read(path.read_text())
    return {"gates": len(circuit), "lut6": abc.lut_count(circuit) if abc.find() else None}


# ----------------------------------------------------------------------------------------- others
def learners(seed: int, n_rows: int) -> dict[str, Any]:
    """Return scikit-learn's learners by name, with the library's defaults where possible.

    The MLP stops early on large tables, whose held-out tenth is large enough.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier

    return {
        "gradient boosting": HistGradientBoostingClassifier(random_state=seed),
        "logistic regression": LogisticRegression(max_iter=2000),
        "small MLP": MLPClassifier(
            (64,), max_iter=500, early_stopping=n_rows > 2000, random_state=seed
        ),
    }


def arrays(name: str, split: int, data: Path) -> list[np.ndarray]:
    """Return training rows, training labels, test rows and test labels; categories as one bit each, missing numbers as medians."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        ids = split_ids(y, split, stratified=False)  # as without --data
        return [x[ids[0]], y[ids[0]], x[ids[1]], y[ids[1]]]
    from lutjax.training import datasets

    if name in TRAINED:
        one = datasets.load(
            data / f"{name} {split}.csv", target=TARGET, test=data / f"{name} {split} test.csv"
        )
    elif name == "adult":
        one = datasets.load(data / "adult.npz")
    else:
        one = datasets.load(data / f"{name}.csv", target=TARGET)
    parts = one.parts(split=split, stratified=one.test is None, bits=0)
    return [parts.train.x, parts.train.y, parts.test.x, parts.test.y]


def fit(name: str, split: int, learner: str, data: Path, jobs: int) -> Row:
    """Fit a scikit-learn learner on its share of the cores; return its row."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    x, y, test_x, test_y = arrays(name, split, data)
    made = learners(split, len(y))[learner]
    if learner != "gradient boosting":
        made = make_pipeline(StandardScaler(), made)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    start = time.perf_counter()
    with threadpool_limits(threads):
        score = made.fit(x, y).score(test_x, test_y)
    seconds = round(time.perf_counter() - start, 1)
    return {"accuracy": round(100 * float(score), 3), "seconds": seconds, "threads": threads}


# ----------------------------------------------------------------------------------------- tables
def page_table(path: Path) -> str:
    """Return the table for a documentation page.

    Rows with options and splits without a circuit are left out, and a later row of a network
    replaces an earlier one, as after counting LUT6.
    """
    by_learner: dict[tuple[str, str], dict[int, Row]] = {}
    for row in read_lines(path):
        if not row["options"] and row["split"] in range(SPLITS):
            by_learner.setdefault((row["data"], row["learner"]), {})[row["split"]] = row
    lines = []
    for name in NAMES:
        own = by_learner.get((name, NETWORK), {})
        if not own:
            continue
        sizes = [_mean_size([row.get(key) for row in own.values()]) for key in ("gates", "lut6")]
        cells = []
        for learner in (NETWORK, *OTHERS):
            rows = by_learner.get((name, learner), {})
            found = [row["accuracy"] for split, row in rows.items() if split in own]
            cells.append(mean_and_error(found) if len(found) > 1 else "".join(map(str, found)))
        lines.append([name, str(len(own)), cells[0], *sizes, *cells[1:]])
    others = (f"{name}, %" for name in OTHERS)
    return markdown_table(["data", "splits", "circuit, %", "gates", "LUT6", *others], lines)


def _mean_size(sizes: list[int | None]) -> str:
    """Return the mean size, or nothing if one is missing."""
    counted = [size for size in sizes if size is not None]
    return f"{np.mean(counted):,.0f}" if len(counted) == len(sizes) else ""


def tasks(given: Any, grid: list[dict[str, Any]]) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """Yield the identity of each row, and a function that computes the rest of it."""
    for split in given.splits:
        for name in given.only:
            for options in grid:
                words = "-".join(f"{key}={value}" for key, value in options.items())
                out = given.out / re.sub(r"[^\w=.-]+", "_", f"{name}-{split}-{words}".strip("-"))
                identity = {"data": name, "learner": NETWORK, "split": split, "options": options}
                yield (
                    identity,
                    lambda n=name, s=split, o=options, p=out: {
                        **train(n, s, o, given.data, p),
                        **(
                            json.loads(_run(__file__, "--count", str(p), JAX_PLATFORMS="cpu"))
                            if not o
                            else {}
                        ),
                    },
                )
            for learner in OTHERS if given.others else ():
                identity = {"data": name, "learner": learner, "split": split, "options": {}}
                yield (
                    identity,
                    lambda n=name, s=split, m=learner: fit(n, s, m, given.data, given.jobs),
                )


def read_grid(path: Path | None, tune: list[str]) -> list[dict[str, Any]]:
    """Return the options of each network to train, from a file with a JSON object in each line."""
    tuned = parse_fields(tune)
    return [{**tuned, **options} for options in (read_lines(path) if path else [{}])]


def main() -> None:
    given = parse(
        __doc__,
        data=(Path, "folder of the tables"),
        prepare=(False, "write the tables to the folder, and nothing else"),
        library=(LIBRARY, "R library with mlbench and kernlab"),
        adult=(Path, "Adult as a .npz file"),
        count=(Path, "print gates and LUT6 of a run as JSON, and nothing else"),
        rows=(Path("tables.jsonl"), "JSON lines, read and appended to"),
        out=(Path("runs/tables"), "folder of the runs"),
        only=(dict.fromkeys(NAMES), "tables"),
        splits=([*range(SPLITS)], "splits"),
        others=(False, "also measure scikit-learn's learners"),
        grid=(Path, "file with the options of several networks, a JSON object in each line"),
        tune=([str], "options of all networks, as NAME=VALUE"),
        jobs=(1, "runs at the same time"),
        minutes=(math.inf, "start no run later"),
    )
    if given.count is not None:
        print(json.dumps(count(given.count)))
        return
    if given.prepare:
        prepare(given.data, given.library, given.adult)
        return
    # Several processes share one device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.8 / given.jobs:.3f}")
    rows = read_lines(given.rows) if given.rows.exists() else []
    keys = ("data", "learner", "split", "options")
    known = [[row[key] for key in keys] for row in rows if row.get("lut6", 0) is not None]
    # Runs whose LUT6 are still to be counted keep the facts of their training.
    trained = [row for row in rows if row.get("lut6", 0) is None]
    start, facts = time.perf_counter(), about()

    def work(task: tuple[Row, Callable[[], Row]]) -> None:
        identity, call = task
        if time.perf_counter() - start < 60 * given.minutes:
            row = {**identity, **call(), **facts}
            for earlier in trained:
                if [earlier[key] for key in keys] == [row[key] for key in keys]:
                    row = {**earlier, "gates": row["gates"], "lut6": row["lut6"]}
            print(add_line(given.rows, row), flush=True)

    grid = read_grid(given.grid, given.tune)
    todo = [task for task in tasks(given, grid) if [task[0][key] for key in keys] not in known]
    with ThreadPoolExecutor(given.jobs) as pool:
        for future in [pool.submit(work, task) for task in todo]:
            future.result()
    print(page_table(given.rows))


if __name__ == "__main__":
    main()
