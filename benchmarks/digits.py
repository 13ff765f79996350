"""Accuracy of hard networks on scikit-learn's digits, by network, estimator or wiring.

    python benchmarks/digits.py networks
    python benchmarks/digits.py estimators --steps 2000
    python benchmarks/digits.py wirings
    python benchmarks/digits.py wirings --only top-k --set candidates=32
    taskset -c 0 python benchmarks/digits.py packed

The test part of split s contains the first 360 entries of
``numpy.random.default_rng(s).permutation(1797)``. The hard network is tested once, after the last
step. Sizes and rates of `networks` were chosen on images outside all five test parts. The networks
of all splits train in one program. `packed` measures the images per second of a hard network in
packed words.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import TrainedNetworks, mean_and_error, parse, parse_fields, print_table, time_calls

from lutjax.models import LogicClassifierConfig
from lutjax.training.classifier import Run, TrainingConfig, baselines
from lutjax.training.samples import load_digits, split

SMALL = {"layers": (500, 500)}
WIRED = {"layers": (300, 300), "n_thresholds": 3, "tau": 4.0, "candidates": 8}
WIRINGS = ("random", "unique", "balanced", "butterfly", "learnable", "top-k", "full")
LEARNED = {"thresholds": "learned"}
COOLED = {"temperature": 2.0, "final_temperature": 0.5}

VARIANTS: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "networks": {
        "3 x 2000 gates": ({}, {}),
        "6 x 2000 gates": ({"layers": (2000,) * 6, "residual": 5.0, "noise": 0.0}, {}),
        "3 x 2000 light gates": ({"tables": "light"}, {}),
        "2 x 1000 tables of 4 inputs": ({"layers": (1000, 1000), "n_inputs": 4}, {}),
    },
    "estimators": {
        "gates": (SMALL, {}),
        "light gates": ({**SMALL, "tables": "light"}, {}),
        "gumbel": ({**SMALL, "estimator": "gumbel"}, {}),
        "gumbel, temperature 2 to 0.5": ({**SMALL, "estimator": "gumbel"}, COOLED),
        "straight through": ({**SMALL, "estimator": "straight_through"}, {}),
        "gates, learned thresholds": ({**SMALL, "learned_thresholds": True}, LEARNED),
    },
    "wirings": {name: ({**WIRED, "wiring": name}, {"augment": 1.0}) for name in WIRINGS},
}
"""Model and training fields of each network, by comparison."""

SPLITS = {"networks": 5, "estimators": 3, "wirings": 5}
STEPS = {"networks": TrainingConfig().steps, "estimators": 6000, "wirings": 3000}


def measure(
    name: str, fields: tuple[dict[str, Any], dict[str, Any]], splits: list[int], steps: int
) -> Any:
    """Return a row of the table."""
    start, (sizes, rates) = time.perf_counter(), fields
    model, training = LogicClassifierConfig(64, 10, **sizes), TrainingConfig(**rates, steps=steps)
    parts = [split(load_digits(), number) for number in splits]
    # Rates of learned thresholds depend on the training part: such networks train one after the
    # other.
    groups = [[i] for i in range(len(splits))] if model.learned_thresholds else [range(len(splits))]
    found: list[tuple[float, float]] = []
    for group in groups:
        trained = TrainedNetworks(
            model, training, [parts[i][0] for i in group], [splits[i] for i in group]
        )
        for number, i in enumerate(group):
            hard, soft = (
                trained.accuracy(number, parts[i][1], hard=hard) for hard in (True, False)
            )
            found.append((hard, soft))
    hard, soft = np.transpose(found)
    gap, seconds = np.mean(soft - hard), time.perf_counter() - start
    return (
        name,
        mean_and_error(hard),
        " ".join(f"{a:.2f}" for a in hard),
        f"{gap:+.2f}",
        f"{seconds:.0f}",
    )


def packed_speeds() -> Iterator[tuple[str, str]]:
    """Yield inputs, and the million images per second of 3 x 2000 gates on them."""
    train, _ = split(load_digits(), 0)
    run = Run(LogicClassifierConfig(64, 10), TrainingConfig(), train)
    state = run.init()
    packed = run.structure.model(state.params, state.others).packed()
    pixels = jnp.asarray(np.resize(train.x, (2**17, 64)).astype(np.uint8))
    floats = pixels.astype(jnp.float32)
    words = jax.random.bits(jax.random.key(0), (192, 2**12), jnp.uint32)
    for name, call in (
        ("packed bits", lambda: packed.from_words(words)),
        ("uint8 pixels", lambda: packed(pixels)),
        ("float32 pixels", lambda: packed(floats)),
    ):
        yield name, f"{2**17 / np.median(time_calls(call, 20, clock=time.process_time)) / 1e6:.1f}"


def main() -> None:
    given = parse(
        __doc__,
        "what",
        what=((*VARIANTS, "packed"), "comparison"),
        only=([str], "names of rows; default: all"),
        splits=([int], "default: 0 to 2 or 0 to 4"),
        steps=(int, "training steps"),
        set=([str], "fields of all models"),
    )
    if given.what == "packed":
        return print_table("input | million images per second", packed_speeds())
    splits = given.splits or list(range(SPLITS[given.what]))
    steps, changed = given.steps or STEPS[given.what], parse_fields(given.set)
    rows = (
        measure(name, ({**sizes, **changed}, rates), splits, steps)
        for name, (sizes, rates) in VARIANTS[given.what].items()
        if not given.only or name in given.only
    )
    print_table(["", "hard network, %", "of each split", "soft minus hard", "seconds"], rows)
    if given.what == "networks":
        for number in splits:
            train, test = split(load_digits(), number)
            n_bits = LogicClassifierConfig(64, 10).n_thresholds
            others = baselines(train, test, TrainingConfig(split=number), n_bits)
            print(
                f"split {number}: "
                + ", ".join(f"{name} {100 * a:.2f} %" for name, a in others.items())
            )


if __name__ == "__main__":
    main()
