"""Accuracy of hard networks on the digits, and the gap to the soft ones, by estimator, form of the gates and thresholds.

`python benchmarks/estimators.py [--layers 500,500] [--splits 0,1,2] [--steps 6000] [--only gates light] [--out results.jsonl]`

Split s of the digits, with seed s: a random fifth is the test part, and each network is tested once, after its last step. The networks of all splits train
at the same time, in one program.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from splits import Trained

from lutjax.models import LogicClassifierConfig, LogicTreeNetConfig
from lutjax.training.classifier import TrainingConfig
from lutjax.training.samples import load_digits, split

# Fields of the model, and of the training.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gates": ({}, {}),
    "gates, 1 to 0.2": ({}, {"final_temperature": 0.2}),
    "gumbel": ({"estimator": "gumbel"}, {}),
    "gumbel, 2 to 0.5": ({"estimator": "gumbel"}, {"temperature": 2.0, "final_temperature": 0.5}),
    "straight through": ({"estimator": "straight_through"}, {}),
    "straight through, 2 to 0.5": (
        {"estimator": "straight_through"},
        {"temperature": 2.0, "final_temperature": 0.5},
    ),
    "light": ({"tables": "light"}, {}),
    "light, residual 2": ({"tables": "light", "residual": 2.0}, {}),
    "light, gumbel": ({"tables": "light", "estimator": "gumbel"}, {}),
    "light, straight through": ({"tables": "light", "estimator": "straight_through"}, {}),
    "gates, distributive": ({}, {"thresholds": "distributive"}),
    "gates, learned": ({"learned_thresholds": True}, {"thresholds": "learned"}),
    "light, learned": ({"tables": "light", "learned_thresholds": True}, {"thresholds": "learned"}),
}
TREES = {
    "trees": {},
    "trees, light": {"tables": "light"},
    "trees, gumbel": {"estimator": "gumbel"},
    "trees, straight through": {"estimator": "straight_through"},
}
TREE_SIZES: dict[str, Any] = {
    "kernels": (16, 32),
    "layers": (640, 320),
    "padding": 1,
    "n_thresholds": 3,
    "tau": 4.0,
}


def trained(model: Any, training: TrainingConfig, seeds: list[int]) -> list[tuple[float, float]]:
    """Return the accuracies of the hard and of the soft network of each split."""
    parts = [split(load_digits(), seed) for seed in seeds]
    found = Trained(model, training, [train for train, _ in parts], seeds)
    return [
        (found.accuracy(i, test, hard=True), found.accuracy(i, test, hard=False))
        for i, (_, test) in enumerate(parts)
    ]


def main() -> None:
    """Train every variant on every split and print its accuracies."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="500,500")
    parser.add_argument("--splits", default="0,1,2")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--only", nargs="*", default=[*VARIANTS, *TREES])
    parser.add_argument("--out", type=Path, help="a file to which a line of JSON is added for each network")
    given = parser.parse_args()
    layers = tuple(map(int, given.layers.split(",")))
    seeds = list(map(int, given.splits.split(",")))
    for name in given.only:
        start = time.perf_counter()
        rates: dict[str, Any] = {"steps": given.steps}
        model: Any
        if name in TREES:
            model = LogicTreeNetConfig((8, 8, 1), 10, **TREE_SIZES, **TREES[name])
        else:
            model = LogicClassifierConfig(64, 10, layers=layers, **VARIANTS[name][0])
            rates |= VARIANTS[name][1]
        # Thresholds are learned at a rate that the training part decides, so such networks are trained one after the other.
        together = [[seed] for seed in seeds] if model.learned_thresholds else [seeds]
        found = [row for group in together for row in trained(model, TrainingConfig(**rates), group)]
        seconds = time.perf_counter() - start
        if given.out is not None:
            with given.out.open("a") as file:
                for seed, (hard, soft) in zip(seeds, found, strict=True):
                    row = {"name": name, "split": seed, "hard": hard, "soft": soft, "seconds": seconds}
                    file.write(json.dumps({**row, "layers": layers, "steps": given.steps}) + "\n")
        hard, soft = np.asarray(found).T
        each = " ".join(f"{value:.1f}" for value in hard)
        print(
            f"{name:28} hard {hard.mean():.2f} ({each})  gap {(soft - hard).mean():+.2f}  {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
