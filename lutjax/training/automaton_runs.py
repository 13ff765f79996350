"""Automaton experiments: targets, stopping rule, final checks and pictures."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from lutjax.circuits import netlist_json, page
from lutjax.models import LogicCA
from lutjax.training import circuits, patterns, pruning, runs
from lutjax.training.automaton import Record, Run, grid, life, pattern
from lutjax.training.automaton_config import CONFIGS, N_BOARDS
from lutjax.training.experiments import Experiment, Part
from lutjax.training.models import State
from lutjax.training.presets import EXPERIMENTS

SOLVED_TESTS = 3  # consecutive tests without a wrong bit after which an automaton is solved


class Automaton(Experiment):
    """Experiment with an automaton that learns a rule or a pattern."""

    configs = CONFIGS
    kept = Record
    refuses = patterns.PatternError
    files = ("gates.txt", "pruned.json", "automaton.html", "automaton.gif")
    curves = ("training loss", "wrong bits")
    ends_early = "--stop-when-solved"

    record: Record
    run: Run

    def __init__(self, record: Record):
        # Runs from versions without this option continued to their last step.
        record.options = {"stop_when_solved": False, **record.options}
        self.record = record
        self.run = Run(record.model, record.training, pattern(record))

    @classmethod
    def create(
        cls,
        fields: Mapping[str, Any],
        experiment: str = "life",
        path: Path | None = None,
        threshold: float | None = None,
    ) -> "Automaton":
        """Create a run from an experiment's fields, overridden by `fields`."""
        own: dict[str, Any] = {}
        picture = None
        if experiment == "picture":
            if path is None:
                raise patterns.PatternError(
                    "the experiment picture draws an image of yours; give one."
                )
            picture = patterns.read_image(path, fields.get("size"), threshold=threshold)
            side = picture.shape[-1]
            own = {"size": side, "n_steps": max(1, side - 1)}
        values = {**EXPERIMENTS[experiment], **own, **fields, "experiment": experiment}
        if "channels" in fields and "update" not in fields:
            values["update"] = (*values["update"][:-1], fields["channels"])
        model, training, options = cls.make_configs(values)
        drawn = target(experiment, training.size, path, threshold) if picture is None else picture
        rows = None
        if drawn is not None:
            rows = [
                ["".join("01"[bit] for bit in row) for row in channel] for channel in drawn.tolist()
            ]
        return cls(Record(model, training, rows, dataclasses.asdict(options), runs.History()))

    @classmethod
    def from_record(cls, record: Record) -> "Automaton":
        """Return a record's run, including its target."""
        return cls(record)

    def describe(self) -> str:
        training, config = self.record.training, self.run.config
        several = f"{training.runs} runs of " if training.runs > 1 else ""
        return (
            f"{training.experiment}: {several}{config.n_gates} gates, "
            f"{training.steps} steps of {training.batch_size} grids "
            f"of {training.size} x {training.size} cells of {config.channels} bits, "
            f"{training.n_steps} steps of the automaton,"
        )

    @property
    def sample_bytes(self) -> int:
        return self.record.training.size**2

    def evaluate(self, state: State) -> float:
        return self.run.wrong(state)

    def early_stop_reason(self) -> str | None:
        last = [wrong for _, wrong in self.record.history.test[-SOLVED_TESTS:]]
        if not self.intervals.stop_when_solved or len(last) < SOLVED_TESTS or any(last):
            return None
        return f"no wrong bit in {SOLVED_TESTS} tests one after the other"

    def parts(self) -> list[Part]:
        film_part = Part("automaton.gif", "drawing the automaton", self._draw)
        return [
            Part("checks", "checking the automaton where it was not trained", self._check),
            Part("gates.txt", "counting its gates", self._count),
            Part("pruned.json", "removing gates that its task does not depend on", self._prune),
            self.curves_part(),
            Part("automaton.html", "writing its page", self._page),
            *([film_part] if self.intervals.pictures else []),
        ]

    def _check(self, state: State, path: Path) -> list[str]:
        wrong = self.run.wrong(state)
        several, training = [], self.record.training
        if training.runs > 1:
            each = enumerate(self.run.wrong_of_runs(state), training.seed)
            counts = ", ".join(f"seed {seed}: {bits:g}" for seed, bits in each)
            several = [f"Wrong bits of each run: {counts}."]
        return [
            *several,
            f"Best hard automaton: {wrong:g} wrong bits of a grid.",
            *checks(self.run, self.run.best(state)),
        ]

    def _count(self, state: State, path: Path) -> list[str]:
        text = circuits.table(self.run.best(state), self._n_shown)
        path.write_text(text)
        return ["", text]

    @property
    def _n_shown(self) -> int:
        return max(self.run.compared) + 1

    def _prune(self, state: State, path: Path) -> list[str]:
        model, n = self.run.best(state), self._n_shown
        before = pruning.without_channels(model.with_update_rate(1).circuit(merge=2), n)
        pruned = pruning.prune_automaton(self.run, model)
        after = pruned.rule(n)
        path.write_text(netlist_json.write(after))
        counts = circuits.count_active_gates(model, n), circuits.count_active_gates(pruned.model, n)
        where = f"in tests of {pruned.where}"
        if pruned.proved:
            where = f"in {pruned.where}: these are all that there are"
        heading = "Active live gates, and those of the circuit of one cell"
        return [
            f"{heading}, in which equal gates are one:",
            f"  {counts[0]:>6} {len(before):>6}  as learned",
            f"  {counts[1]:>6} {len(after):>6}  with the same last state {where}",
            "",
        ]

    def _page(self, state: State, path: Path) -> None:
        config, model = self.run.config, self.run.best(state)
        text = page.write(
            model.with_update_rate(1).circuit(),
            f"An automaton that learned: {self.record.training.experiment}",
            **grid(self.record),
            update_rate=config.update_rate,
        )
        path.write_text(text)

    def _draw(self, state: State, path: Path) -> None:
        from lutjax.training.animation import animate, film

        panels, captions = film(self.run, self.run.best(state))
        animate(panels, path, captions=captions)


def target(
    experiment: str, size: int, path: Path | None, threshold: float | None
) -> Bool[np.ndarray, "channels height width"] | None:
    """Return the target pattern from an experiment or an image; None in the Game of Life."""
    if experiment == "life":
        if path is not None:
            raise patterns.PatternError("the Game of Life has none; choose another --experiment.")
        return None
    if path is not None:
        return patterns.read_image(path, size, threshold=threshold)
    drawn = {"lizard": patterns.lizard, "letter": patterns.letter}
    return drawn.get(experiment, patterns.checkerboard)(size)


def checks(run: Run, model: LogicCA) -> list[str]:
    """Return lines about the hard automaton's behavior outside its training conditions."""
    key = jax.random.key(1)
    training, channels = run.training, run.config.channels

    def run_model(state: np.ndarray | jax.Array, n_steps: int) -> jax.Array:
        return model(jnp.asarray(state), n_steps, key=key, deterministic=True)

    if run.target is None:
        boards = (np.arange(N_BOARDS)[:, None] >> np.arange(9) & 1).astype(bool).reshape(-1, 3, 3)
        grid = np.asarray(jax.random.bernoulli(key, shape=(64, 64)))

        def add_hidden_channels(boards: np.ndarray) -> np.ndarray:
            hidden = np.zeros((*boards.shape, channels - 1), bool)
            return np.concatenate([boards[..., None], hidden], -1)

        after = run_model(add_hidden_channels(boards), 1)[..., 0]
        right = np.asarray(after == life(boards)).all((1, 2))
        expected, got = grid, add_hidden_channels(grid)
        for _ in range(64):
            # Hidden channels start from 0 in each step, as in training.
            expected = np.asarray(life(expected))
            got = add_hidden_channels(np.asarray(run_model(got, 1))[..., 0])
        return [
            f"boards of 3 x 3 cells: {right.sum()} of {N_BOARDS} right",
            f"64 x 64 cells, 64 steps: {(got[..., 0] != expected).sum()} wrong",
        ]
    compared = list(run.compared)
    target = np.moveaxis(run.target, 0, -1)

    def count_wrong_bits(state: np.ndarray | jax.Array, target: np.ndarray) -> int:
        return int((np.asarray(state)[..., compared] != target[..., compared]).sum())

    if training.start == "random":
        start = jax.random.bernoulli(key, shape=(training.size, training.size, channels))
        whole = run_model(start, training.n_steps)
        half, steps = training.size // 2, 2 * training.n_steps
        damaged = jnp.asarray(whole).at[:half, :half].set(False)
        n_wrong = count_wrong_bits(run_model(damaged, steps), target)
        lines = [f"a cleared quarter after {steps} steps: {n_wrong} bits wrong"]
        if np.array_equal(run.target, patterns.checkerboard(training.size)):
            # Enlarge by whole squares so that the pattern is the same from each corner.
            large, steps = 4 * training.size + -3 * training.size % 4, 4 * training.n_steps
            noise = jax.random.bernoulli(key, shape=(large, large, channels))
            expected = np.moveaxis(patterns.checkerboard(large), 0, -1)
            lines.append(
                f"{large} x {large} cells, {steps} steps: "
                f"{count_wrong_bits(run_model(noise, steps), expected)} bits wrong"
            )
        if run.config.update_rate < 1:
            for rate in (run.config.update_rate / 2, 1):
                steps = math.ceil(training.n_steps * run.config.update_rate / rate)
                last = model.with_update_rate(rate)(start, steps, key=key, deterministic=True)
                lines.append(
                    f"cells updated with probability {rate:g}, {steps} steps: "
                    f"{count_wrong_bits(last, target)} bits wrong"
                )
        return lines
    if training.start == "seed":
        double = 2 * training.size
        state = np.zeros((double, double, channels), bool)
        state[training.size, training.size] = True
        pad = training.size - training.size // 2
        around = ((pad, training.size - pad), (pad, training.size - pad), (0, 0))
        expected = np.pad(target, around)
        return [
            f"{double} x {double} cells, {training.n_steps} steps: "
            f"{count_wrong_bits(run_model(state, training.n_steps), expected)} bits wrong"
        ]
    return []
