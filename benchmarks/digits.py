"""Accuracy on scikit-learn's digits: `python benchmarks/digits.py [--only NAME ...] [--splits N ...] [--steps N]`.

Every network is trained on each of five splits, 0 to 4 (`lutjax.training.samples.split`: the first 360 of
``numpy.random.default_rng(split).permutation(1797)`` are the test part), and its hard network is tested once, after the
last step. Sizes and rates were chosen on images that are in none of the five test parts.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from lutjax.models import LogicClassifierConfig
from lutjax.training.classifier import Run, TrainingConfig, baselines
from lutjax.training.samples import load_digits, load_samples, split

NETWORKS = {
    "3x2000 gates": {},
    "6x2000 gates": {"layers": (2000,) * 6, "residual": 5.0, "noise": 0.0},
    "3x2000 light gates": {"tables": "light"},
    "2x1000 tables of 4 inputs": {"layers": (1000, 1000), "n_inputs": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--splits", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=TrainingConfig().steps)
    parser.add_argument(
        "--data", type=Path, help="the digits as a .npz file, where scikit-learn is missing: no baselines"
    )
    arguments = parser.parse_args()
    whole = load_samples(arguments.data) if arguments.data else load_digits()
    found: dict[str, list[float]] = {}
    for number in arguments.splits:
        training = TrainingConfig(split=number, seed=number, steps=arguments.steps)
        train, test = split(whole, number)
        if not arguments.data:
            others = baselines(train, test, training, LogicClassifierConfig(64, 10).n_thresholds)
            for name, accuracy in others.items():
                found.setdefault(name, []).append(accuracy)
        for name in arguments.only:
            run = Run(LogicClassifierConfig(64, 10, **NETWORKS[name]), training, train)
            start = time.perf_counter()
            state, _ = run.advance(run.init(), 0, training.steps)
            soft, hard = (run.accuracy(state, test, hard=hard) for hard in (False, True))
            found.setdefault(f"{name}, {run.structure.n_parameters()} parameters", []).append(hard)
            print(
                f"split {number}, {name}: hard {100 * hard:.2f} %, soft {100 * soft:.2f} %, "
                f"{time.perf_counter() - start:.0f} s",
                flush=True,
            )
    for name, accuracies in found.items():
        each = "  ".join(f"{100 * a:.2f}" for a in accuracies)
        print(f"{name:45} {each}   mean {100 * np.mean(accuracies):.2f} %")


if __name__ == "__main__":
    main()
