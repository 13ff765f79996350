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
import optax
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
from lutjax.training import optimizers, presets
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import Text

N_TESTS = 16
"""Tests on the validation part, the best of which is kept."""


PROBE = 20
"""Steps whose time says how many fit into some seconds."""


class _Training(TrainingConfig):
    """Training settings whose rate, steps and seed are arrays of the program: one program serves all trainings of a layer."""

    trial: dict[str, Any]

    def rate(self) -> optax.Schedule:
        def rate(count: Any) -> jax.Array:
            return optimizers.learning_rate(
                self.schedule,
                rate=self.trial["rate"],
                steps=self.trial["steps"],
                batch_size=self.batch_size,
                warmup=self.warmup,
                cooldown=self.cooldown,
            )(count)

        return rate


class Trials(Run):
    """Trainings of one model that differ in their seed, rate and number of steps.

    Args:
      values: of a preset.
      text: the text.
    """

    def __init__(self, values: dict[str, Any], text: Text):
        self.text, self._trial = jnp.asarray(text.train), dict[str, Any]()
        training = presets.make(_Training, values)
        object.__setattr__(training, "trial", self._trial)
        super().__init__(presets.make(GPTConfig, values), training, text.train)
        self._advance = jax.jit(self._steps, donate_argnums=0)

    @property
    def _data_seed(self) -> Any:
        return self._trial["seed"]

    def _steps(self, state: Any, first: Any, count: Any, text: Any, trial: dict[str, Any]) -> tuple[Any, Any]:
        def step(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            self._trial.update(trial)
            state, loss = self.step(carry[0], k, text)
            return state, carry[1] + loss

        state, total = jax.lax.fori_loop(first, first + count, step, (state, jnp.float32(0)))
        return state, total / count

    def run(
        self, state: Any, first: int, count: int, *, rate: float, steps: int, seed: int
    ) -> tuple[Any, float]:
        """Return the state after some steps of a training, and their mean loss."""
        trial = {"rate": np.float32(rate), "steps": np.float32(steps), "seed": np.uint32(seed)}
        state, loss = self._advance(state, np.int32(first), np.int32(count), self.text, trial)
        return state, float(loss)

    def first_state(self, seed: int) -> Any:
        """Return the state before the first step."""
        return self._first_state(*self.structure.init(seed))

    def steps_in(self, seconds: float) -> int:
        """Return how many steps take some seconds here."""
        state, times = self.first_state(0), []
        for k in range(4):  # the first compiles
            start = time.perf_counter()
            state, _ = self.run(state, k * PROBE, PROBE, rate=1e-4, steps=100 * PROBE, seed=0)
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


def train(
    trials: Trials, text: Text, *, rate: float, steps: int, seed: int, windows: int | None = None
) -> Result:
    """Train one model, and test it on so many windows of a part of the text, or on all."""
    every = max(steps // N_TESTS, 1)
    state, seconds = trials.first_state(seed), 0.0
    curve: list[tuple[int, float, float]] = []
    for first in range(0, steps, every):
        start = time.perf_counter()
        state, loss = trials.run(state, first, min(every, steps - first), rate=rate, steps=steps, seed=seed)
        seconds += time.perf_counter() - start
        validation = trials.evaluate(state, text.validation, max_windows=windows)
        if all(validation < before for _, _, before in curve):
            best = jax.tree.map(jnp.copy, state._replace(optimizer=None))
        curve.append((min(first + every, steps), loss, validation))
    leaves = jax.tree.leaves_with_path(state.params)
    return Result(
        validation=min(loss for _, _, loss in curve),
        test=trials.evaluate(best, text.test, max_windows=windows),
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
        trials = Trials(of_layer, text)
        if seconds is not None:
            of_layer["steps"] = trials.steps_in(seconds)

        def result(
            rate: float, seed: int, of_layer: dict[str, Any] = of_layer, trials: Trials = trials
        ) -> Result:
            found = train(trials, text, rate=rate, steps=of_layer["steps"], seed=seed, windows=windows)
            report(of_layer | {"learning_rate": rate, "seed": seed}, found, text, rows)
            return found

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
