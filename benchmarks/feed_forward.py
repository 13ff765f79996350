"""Feed-forward layers of a GPT at equal steps or seconds.

Run `python benchmarks/feed_forward.py --text FILE --seeds 0,1,2`.

Trains `lutjax.models.GPT` with each feed-forward layer on the same batches, and prints a Markdown
table: losses on the whole test part, averaged over all seeds and for each, at the lowest validation
loss; parameters; seconds of the steps. With several `--rates` the first seed selects each layer's
learning rate on the validation part. `--set name=value` overrides values of the preset. With
`--seconds`, each layer gets as many steps as fit into that time, without tests and compilation: the
step time is measured first, so that the schedule ends with the last step. `--text python` is the
source of all installed packages; `--json` appends each result to a file.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import about, add_line, draw_axes, parse, table as markdown_table  # beside this file
from language_models import OPTIONS, describe, parameters_read, text_of, values_of

from lutjax.models import GPTConfig
from lutjax.models.gpt import FEED_FORWARD
from lutjax.training import optimizers, presets
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import Text

N_TESTS = 16
"""Tests on the validation part; the best state is kept."""

PROBE = 20
"""Steps for measuring the step time."""


class _Training(TrainingConfig):
    """Training settings with dynamic rate, steps and seed: one program serves all trainings with a layer."""

    trial: dict[str, Any]

    def rate(self) -> optax.Schedule:
        settings = {name: getattr(self, name) for name in ("batch_size", "warmup", "cooldown")}

        def rate(count: Any) -> jax.Array:
            trial = {name: self.trial[name] for name in ("rate", "steps")}
            return optimizers.learning_rate(self.schedule, **trial, **settings)(count)

        return rate


class Trials(Run):
    """Trainings of one model with different seeds, rates and steps.

    Args:
      values: preset values.
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

    def _steps(
        self, state: Any, first: Any, count: Any, text: Any, trial: dict[str, Any]
    ) -> tuple[Any, Any]:
        def step(k: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            self._trial.update(trial)
            state, loss = self.step(carry[0], k, text)
            return state, carry[1] + loss

        state, total = jax.lax.fori_loop(first, first + count, step, (state, jnp.float32(0)))
        return state, total / count

    def run(self, state: Any, first: int, count: int, **trial: Any) -> tuple[Any, float]:
        """Return the state after some steps of a training, and their mean loss.

        `trial`: rate, steps and seed.
        """
        kinds = {"rate": np.float32, "steps": np.float32, "seed": np.uint32}
        trial = {name: kind(trial[name]) for name, kind in kinds.items()}
        state, loss = self._advance(state, np.int32(first), np.int32(count), self.text, trial)
        return state, float(loss)

    def first_state(self, seed: int) -> Any:
        """Return the state before the first step."""
        return self._first_state(*self.structure.init(seed))

    def steps_in(self, seconds: float) -> int:
        """Return the number of steps per given seconds on this machine."""
        state, times = self.first_state(0), []
        for k in range(4):  # the first compiles
            start = time.perf_counter()
            state, _ = self.run(state, k * PROBE, PROBE, rate=1e-4, steps=100 * PROBE, seed=0)
            times.append((time.perf_counter() - start) / PROBE)
        return max(round(seconds / min(times)), N_TESTS)


class Result(NamedTuple):
    """Result of one training.

    Attributes:
      validation, test: losses at the lowest validation loss, in nats per byte.
      seconds: training seconds, without compilation and tests.
      parameters, in_layers, n_bytes: model parameters, feed-forward parameters, parameter bytes.
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
    """Train and test one model; `windows` limits each test."""
    every = max(steps // N_TESTS, 1)
    state, seconds = trials.first_state(seed), 0.0
    curve: list[tuple[int, float, float]] = []
    for first in range(0, steps, every):
        start = time.perf_counter()
        state, loss = trials.run(
            state, first, min(every, steps - first), rate=rate, steps=steps, seed=seed
        )
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
        in_layers=sum(
            leaf.size for path, leaf in leaves if "'feed_forward'" in jax.tree_util.keystr(path)
        ),
        n_bytes=sum(leaf.nbytes for _, leaf in leaves),
        curve=curve,
    )


Results = dict[str, tuple[float, list[Result]]]
"""Learning rate and results by seed, for each layer."""


def compare(given: Any, values: dict[str, Any], text: Text) -> Results:
    """Train each layer with each seed, at the rate that the first seed selects."""
    found = {}
    for layer in given.layers.split(","):
        of_layer = values | {"feed_forward": layer}
        trials = Trials(of_layer, text)
        if given.seconds is not None:
            of_layer["steps"] = trials.steps_in(given.seconds)

        def train_once(
            rate: float, seed: int, of_layer: Any = of_layer, trials: Trials = trials
        ) -> Result:
            steps = of_layer["steps"]
            result = train(trials, text, rate=rate, steps=steps, seed=seed, windows=given.windows)
            report(of_layer | {"learning_rate": rate, "seed": seed}, result, text, given.json)
            return result

        first, *seeds = given.seeds
        tried = {rate: train_once(rate, first) for rate in given.rates or [values["learning_rate"]]}
        rate = min(tried, key=lambda rate: tried[rate].validation)
        found[layer] = rate, [tried[rate], *(train_once(rate, seed) for seed in seeds)]
    return found


def report(values: dict[str, Any], result: Result, text: Text, rows: Path | None) -> None:
    """Print one result, and append it to a file."""
    print(
        f"{values['feed_forward']}, rate {values['learning_rate']:g}, seed {values['seed']}, "
        f"{values['steps']} steps: validation {result.validation:.4f}, test {result.test:.4f}, "
        f"{result.seconds:.0f} s",
        flush=True,
    )
    read = parameters_read(presets.make(GPTConfig, values))
    add_line(
        rows,
        {**about(), "digest": text.digest, **values, **result._asdict(), "parameters_read": read},
    )


def table(found: Results) -> str:
    """Return the comparison in Markdown."""
    rows = []
    for layer, (rate, results) in found.items():
        first, seconds = results[0], float(np.mean([r.seconds for r in results]))
        sizes = f"{first.parameters:,}", f"{first.in_layers:,}", f"{first.n_bytes / 1e6:.1f}"
        times = f"{rate:g}", f"{1e3 * seconds / first.curve[-1][0]:.1f}", f"{seconds:.0f}"
        means = (
            f"{np.mean([getattr(r, part) for r in results]):.4f}" for part in ("validation", "test")
        )
        rows.append(
            (f"`{layer}`", *sizes, *times, *means, ", ".join(f"{r.test:.3f}" for r in results))
        )
    names = (
        "feed-forward | parameters | of them in these layers | MB | rate | ms/step | seconds | "
        "validation | test"
    )
    return markdown_table(f"{names} | test of each seed", rows, 10)


def draw(found: Results, path: Path) -> None:
    """Draw mean validation losses by steps and by seconds."""
    for by_step, by_second in draw_axes(path, 1, 2, size=(10, 4), sharey=True):
        for layer, (_, results) in found.items():
            steps = np.array([step for step, _, _ in results[0].curve])
            losses = np.mean([[loss for _, _, loss in r.curve] for r in results], 0)
            per_step = np.mean([r.seconds for r in results]) / steps[-1]
            by_step.plot(steps, losses, marker=".", label=layer)
            by_second.plot(per_step * steps, losses, marker=".", label=layer)
        for axes, label in ((by_step, "training steps"), (by_second, "seconds of training")):
            axes.set_xlabel(label)
            axes.grid(alpha=0.3)
        by_step.set_ylabel("validation loss (nats per byte)")
        by_step.legend()


def main() -> None:
    given = parse(
        __doc__,
        **OPTIONS,
        rates=([float], "learning rates to select from; default: the preset's"),
        layers=(",".join(FEED_FORWARD), "feed-forward layers, separated by commas"),
        png=(Path, "draw the losses into this file"),
    )
    values = values_of(given)  # the best state is selected here, outside the timed steps
    text = text_of(given, values)
    print(describe(given, values, text), flush=True)
    found = compare(given, values, text)
    print(f"\n{table(found)}")
    if given.png:
        draw(found, given.png)


if __name__ == "__main__":
    main()
