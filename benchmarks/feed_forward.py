"""Feed-forward layers of a GPT at equal steps or seconds: `python benchmarks/feed_forward.py --text FILE --seeds 0,1,2`.

Trains `lutjax.models.GPT` with each feed-forward layer on the same batches, and prints a table in Markdown: mean losses of all
seeds (and of each) on the whole test part, where the validation loss is lowest; parameters; seconds of the steps alone. With
several `--rates` the first seed chooses the learning rate of each layer on the validation part. A preset's values are
overridden by `--set name=value`. With `--seconds` each layer gets as many steps as it takes in that time, tests and compilation left out:
the time of a step is measured first, so that the schedule of its rate ends with its last step. `--text python` is the source of all
installed packages, each file once; `--json` adds each result to a file.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from language_models import (  # beside this file
    about,
    add_line,
    add_options,
    head,
    parameters_read,
    text_of,
    values_of,
)
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lutjax.models import GPTConfig
from lutjax.models.gpt import FEED_FORWARD
from lutjax.training import presets
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import Text

N_TESTS = 16
"""Tests on the validation part, the best of which is kept."""


PROBE = 20
"""Steps whose time says how many fit into some seconds."""


def steps_in(seconds: float, values: dict[str, Any], text: Text) -> int:
    """Return how many steps of a model of a preset's values take some seconds here."""
    run = Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), text.train)
    _, advance = run.advance.compiled(run.abstract())
    state = run.init()
    times = []
    for k in range(3):  # the first is slower
        start = time.perf_counter()
        state, loss = advance(state, k * PROBE, PROBE)
        loss.block_until_ready()
        times.append((time.perf_counter() - start) / PROBE)
    return max(round(seconds / min(times)), N_TESTS)


class Result(NamedTuple):
    """Result of one training.

    Attributes:
      validation, test: losses in nats per byte, of the state with the lowest validation loss.
      seconds: of all steps, without compilation and tests.
      parameters, in_layers, n_bytes: of the model; of them in feed-forward layers; size of all of them.
      curve: steps, training loss and validation loss.
    """

    validation: float
    test: float
    seconds: float
    parameters: int
    in_layers: int
    n_bytes: int
    curve: list[tuple[int, float, float]]


def train(values: dict[str, Any], text: Text, windows: int | None = None) -> Result:
    """Train one model of a preset's values, and test it on so many windows of a part of the text, or on all."""
    run = Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), text.train)
    steps = run.training.steps
    every = max(steps // N_TESTS, 1)
    _, advance = run.advance.compiled(run.abstract())
    state, seconds = run.init(), 0.0
    curve: list[tuple[int, float, float]] = []
    for first in range(0, steps, every):
        start = time.perf_counter()
        state, loss = advance(state, first, min(every, steps - first))
        value = float(loss)
        seconds += time.perf_counter() - start
        validation = run.evaluate(state, text.validation, max_windows=windows)
        if all(validation < before for _, _, before in curve):
            best = jax.tree.map(jnp.copy, state)
        curve.append((min(first + every, steps), value, validation))
    leaves = jax.tree.leaves_with_path(state.params)
    return Result(
        validation=min(loss for _, _, loss in curve),
        test=run.evaluate(best, text.test, max_windows=windows),
        seconds=seconds,
        parameters=sum(leaf.size for _, leaf in leaves),
        in_layers=sum(leaf.size for path, leaf in leaves if "'feed_forward'" in jax.tree_util.keystr(path)),
        n_bytes=sum(leaf.nbytes for _, leaf in leaves),
        curve=curve,
    )


def compare(
    layers: list[str],
    values: dict[str, Any],
    text: Text,
    rates: list[float],
    seeds: list[int],
    seconds: float | None = None,
    rows: Path | None = None,
    windows: int | None = None,
) -> dict[str, tuple[float, list[Result]]]:
    """Return the learning rate of each layer and a result for each seed.

    Args:
      seconds: of the steps of each training; None for the steps of the values.
      rows: file that gets a line of JSON for each training. windows: of a part of the text that is tested; None: all.
    """
    found = {}
    for layer in layers:
        of_layer = values | {"feed_forward": layer}
        if seconds is not None:
            of_layer["steps"] = steps_in(seconds, of_layer, text)

        def result(rate: float, seed: int, of_layer: dict[str, Any] = of_layer) -> Result:
            result = train(of_layer | {"learning_rate": rate, "seed": seed}, text, windows)
            report(of_layer | {"learning_rate": rate, "seed": seed}, result, text, rows)
            return result

        tried = {rate: result(rate, seeds[0]) for rate in rates}
        rate = min(tried, key=lambda rate: tried[rate].validation)
        found[layer] = rate, [tried[rate], *(result(rate, seed) for seed in seeds[1:])]
    return found


def report(values: dict[str, Any], result: Result, text: Text, rows: Path | None) -> None:
    """Print one result, and add it to a file."""
    print(
        f"{values['feed_forward']}, rate {values['learning_rate']:g}, seed {values['seed']}, {values['steps']} steps: "
        f"validation {result.validation:.4f}, test {result.test:.4f}, {result.seconds:.0f} s",
        flush=True,
    )
    read = parameters_read(presets.make(GPTConfig, values))
    add_line(rows, {**about(), "digest": text.digest, **values, **result._asdict(), "parameters_read": read})


def table(found: dict[str, tuple[float, list[Result]]]) -> str:
    """Return the comparison in Markdown."""
    rows = [
        "| feed-forward | parameters | of them in these layers | MB | rate | ms/step | seconds | validation | test | test of each seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for layer, (rate, results) in found.items():
        first, seconds = results[0], float(np.mean([r.seconds for r in results]))
        validation, test = (np.mean([getattr(r, part) for r in results]) for part in ("validation", "test"))
        each = ", ".join(f"{r.test:.3f}" for r in results)
        rows.append(
            f"| `{layer}` | {first.parameters:,} | {first.in_layers:,} | {first.n_bytes / 1e6:.1f} | {rate:g} | "
            f"{1e3 * seconds / first.curve[-1][0]:.1f} | {seconds:.0f} | {validation:.4f} | {test:.4f} | {each} |"
        )
    return "\n".join(rows)


def draw(found: dict[str, tuple[float, list[Result]]], path: Path) -> None:
    """Draw validation losses by steps and by seconds, the mean of all seeds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for layer, (_, results) in found.items():
        steps = [step for step, _, _ in results[0].curve]
        losses = np.mean([[loss for _, _, loss in r.curve] for r in results], 0)
        per_step = np.mean([r.seconds for r in results]) / steps[-1]
        by_step.plot(steps, losses, marker=".", label=layer)
        by_second.plot(per_step * np.array(steps), losses, marker=".", label=layer)
    for axes, label in ((by_step, "training steps"), (by_second, "seconds of training")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_step.set_ylabel("validation loss (nats per byte)")
    by_step.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rates", help="learning rates to choose from, with commas; default: the preset's")
    parser.add_argument("--layers", default=",".join(FEED_FORWARD), help="default: all")
    parser.add_argument("--png", type=Path, help="draw the losses into this file")
    arguments = parser.parse_args()

    values = values_of(parser, arguments)  # what is kept is chosen here, outside of the time of the steps
    rates = (
        [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else [values["learning_rate"]]
    )
    text = text_of(arguments, values)
    print(head(arguments, values, text), flush=True)
    found = compare(
        arguments.layers.split(","),
        values,
        text,
        rates,
        [int(seed) for seed in arguments.seeds.split(",")],
        arguments.seconds,
        arguments.json,
        arguments.windows,
    )
    print(f"\n{table(found)}")
    if arguments.png:
        draw(found, arguments.png)


if __name__ == "__main__":
    main()
