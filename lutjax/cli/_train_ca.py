"""``lutjax train ca``: cellular automata of logic gates."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import FieldsCommand

if TYPE_CHECKING:
    import numpy as np

    from lutjax.models import LogicCA
    from lutjax.training.automaton import Record, Run
    from lutjax.training.models import State

_CHECKERBOARD = {"start": "random", "channels": 8, "kernels": 16, "perception": (8, 4, 2), "hard_share": 0.2}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "life": {
        "start": "boards",
        "channels": 1,
        "kernels": 16,
        "perception": (8, 4, 2, 1),
        "update": (*[128] * 17, 64, 32, 16, 8, 4, 2, 1),
        "periodic": True,
        "steps": 3000,
        "weight_decay": 0.1,
        "log_every": 100,
        "eval_every": 100,
    },
    "checkerboard": {
        **_CHECKERBOARD,
        "update": (*[256] * 10, 128, 64, 32, 16, 8, 8),
        "size": 16,
        "n_steps": 20,
        "batch_size": 2,
        "eval_every": 50,
    },
    "checkerboard-async": {
        **_CHECKERBOARD,
        "update": (*[256] * 14, 128, 64, 32, 16, 8, 8),
        "update_rate": 0.6,
        "size": 14,
        "n_steps": 50,
        "batch_size": 1,
        "steps": 800,
        "eval_every": 50,
    },
    "lizard": {
        "channels": 128,
        "kernels": 4,
        "perception": (8, 4, 2, 1),
        "update": (*[512] * 8, 256, 128),
        "periodic": True,
        "residual": 7.0,
        "start": "seed",
        "size": 20,
        "n_steps": 12,
        "batch_size": 1,
        "steps": 3500,
        "learning_rate": 0.06,
        "hard_share": 0.1,
        "eval_every": 100,
    },
    "letter": {
        "channels": 64,
        "kernels": 4,
        "perception": (8, 4, 2),
        "update": (*[512] * 8, 256, 128, 64),
        "start": "zero",
        "size": 16,
        "n_steps": 15,
        "batch_size": 1,
        "steps": 3000,
        "learning_rate": 0.06,
        "eval_every": 100,
    },
}
"""Values of the fields of `LogicCAConfig`, `TrainingConfig` and the intervals, by experiment."""


def _configs() -> Sequence[type]:
    from lutjax.models import LogicCAConfig
    from lutjax.training.automaton import TrainingConfig

    return LogicCAConfig, TrainingConfig, _run.Intervals


@click.command(cls=FieldsCommand, configs=_configs)
@click.option(
    "--experiment",
    type=click.Choice(list(EXPERIMENTS)),
    help="What to learn, with the published sizes; the options below override them. Default: life.",
)
@click.option(
    "--target",
    "path",
    type=click.Path(path_type=Path),
    help="An image to draw instead: black and white, in letter also red, green and blue and their mixtures.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    help="What is brighter in the image is 1. Default: values must be 0 or full.",
)
@click.option("--pictures/--no-pictures", default=True, help="Whether to draw them (needs matplotlib).")
@_run.out_option("runs/ca")
@_run.resume_option
def ca(
    experiment: str | None,
    path: Path | None,
    threshold: float | None,
    pictures: bool,
    out: Path,
    resume: bool,
    fields: Mapping[str, Any],
) -> None:
    """Train a cellular automaton whose rule is a circuit of logic gates.

    Losses are squared errors of a grid; hard is the number of wrong bits of a grid when each gate is the likeliest
    one. The best automaton so far is kept. A run that was stopped goes on with --resume, and ends exactly as if
    it had never been stopped.
    """
    from lutjax.training.patterns import PatternError

    try:
        with _run.errors(out):
            if resume:
                _resume(experiment, path, out, fields, pictures)
            else:
                _start(experiment or "life", path, threshold, out, fields, pictures)
    except PatternError as error:
        raise click.BadParameter(str(error), param_hint="--target") from error


def _start(
    experiment: str,
    path: Path | None,
    threshold: float | None,
    out: Path,
    fields: Mapping[str, Any],
    pictures: bool,
) -> None:
    from lutjax.training import automaton, runs

    _run.check_new(out)
    values = {**EXPERIMENTS[experiment], **fields, "experiment": experiment}
    if "channels" in fields and "update" not in fields:
        values["update"] = (*values["update"][:-1], fields["channels"])
    with _run.usage_errors():
        model, training, intervals = (_run.make(c, values) for c in _configs())
        target = _target(experiment, path, threshold, training.size)
        run = automaton.Run(model, training, target)
    rows = None if target is None else [["".join("01"[b] for b in row) for row in c] for c in target.tolist()]
    record = automaton.Record(model, training, rows, dataclasses.asdict(intervals), runs.History())
    _train(run, run.init(), record, out, pictures, done=0)


def _resume(
    experiment: str | None, path: Path | None, out: Path, fields: Mapping[str, Any], pictures: bool
) -> None:
    import numpy as np

    from lutjax.training import automaton, models, runs

    if path is not None:
        raise click.UsageError("--target is part of the checkpoint; leave it out with --resume.")
    done, record = runs.read(out, automaton.Record)
    wanted = {**fields, **({"experiment": experiment} if experiment else {})}
    _run.check_same(out, {**dataclasses.asdict(record.model), **dataclasses.asdict(record.training)}, wanted)
    if done >= record.training.steps:
        click.echo(f"{out} is finished: all {done} steps are done. {_results(record)}")
        return
    with _run.usage_errors():
        record.options = dataclasses.asdict(_run.make(_run.Intervals, {**record.options, **fields}))
    rows = record.target
    target = None if rows is None else np.array([[[b == "1" for b in row] for row in c] for c in rows])
    run = automaton.Run(record.model, record.training, target)
    _train(run, models.restore(out, done, run), record, out, pictures, done=done)


def _target(experiment: str, path: Path | None, threshold: float | None, size: int) -> "np.ndarray | None":
    from lutjax.training import patterns

    if experiment == "life":
        if path is not None:
            raise click.UsageError("--target: the Game of Life has none; choose another --experiment.")
        return None
    if path is not None:
        return patterns.read_image(path, size, 3 if experiment == "letter" else 1, threshold=threshold)
    drawn = {"lizard": patterns.lizard, "letter": patterns.letter}
    return drawn.get(experiment, patterns.checkerboard)(size)


def _train(run: "Run", state: "State", record: "Record", out: Path, pictures: bool, *, done: int) -> None:
    import jax
    from rich.console import Console

    from lutjax.cli._progress import Report
    from lutjax.training import models

    training = record.training
    click.echo(
        f"training {training.experiment}: {run.config.n_gates} gates, {training.steps} steps of {training.batch_size} "
        f"grids of {training.size} x {training.size} cells of {run.config.channels} bits, {training.n_steps} steps of "
        f"the automaton, on {jax.local_devices()[0].device_kind}"
        + (f"; resumed after {done} steps" if done else "")
    )
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    state = _run.train(
        run.advance,
        state,
        done=done,
        steps=training.steps,
        intervals=_run.Intervals(**record.options),
        history=record.history,
        report=Report(
            Console(),
            first=done,
            steps=training.steps,
            speed=lambda seconds: f"{1e3 * seconds:.2f} ms/step",
            measure="hard",
        ),
        evaluate=lambda number, state: run.wrong(state),
        save=lambda number, state: models.save(out, number, state, record),
        again=_run.command("train", "ca", "--resume", "--out", str(out)),
    )
    click.echo(f"{training.steps - done} steps in {time.perf_counter() - start:.0f} s. {_results(record)}")
    model = run.best(state)
    for line in checks(run, model):
        click.echo(line)
    from lutjax.training.circuits import table

    text = table(model, 1 if run.target is None else len(run.target))
    (out / "gates.txt").write_text(text)
    click.echo(f"\n{text}\ncheckpoint: {out}")
    if pictures:
        from lutjax.cli._animate import animate, film

        panels, captions = film(run, model)
        animate(panels, out / "automaton.gif", captions=captions)
        click.echo(f"animation: {out / 'automaton.gif'}")


def _results(record: "Record") -> str:
    return f"Best hard automaton: {record.history.test[-1][1]:g} wrong bits of a grid."


def checks(run: "Run", model: "LogicCA") -> list[str]:
    """What the hard automaton does where it was not trained, in words."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lutjax.training.automaton import N_BOARDS, life
    from lutjax.training.patterns import checkerboard

    key = jax.random.key(1)
    training, channels = run.training, run.config.channels

    def after(state: "np.ndarray | jax.Array", n_steps: int) -> jax.Array:
        return model(jnp.asarray(state), n_steps, key=key, deterministic=True)

    if run.target is None:
        boards = (np.arange(N_BOARDS)[:, None] >> np.arange(9) & 1).astype(bool).reshape(-1, 3, 3)
        grid = np.asarray(jax.random.bernoulli(key, shape=(64, 64)))

        def hidden(boards: "np.ndarray") -> "np.ndarray":
            return np.concatenate([boards[..., None], np.zeros((*boards.shape, channels - 1), bool)], -1)

        right = np.asarray(after(hidden(boards), 1)[..., 0] == life(boards)).all((1, 2))
        expected, got = grid, hidden(grid)
        for _ in range(64):
            expected, got = np.asarray(life(expected)), hidden(np.asarray(after(got, 1))[..., 0])
        return [
            f"boards of 3 x 3 cells: {right.sum()} of {N_BOARDS} right",
            f"64 x 64 cells, 64 steps: {(got[..., 0] != expected).sum()} wrong",
        ]
    n = len(run.target)
    target = np.moveaxis(run.target, 0, -1)

    def wrong(state: "np.ndarray | jax.Array", target: "np.ndarray") -> int:
        return int((np.asarray(state)[..., :n] != target).sum())

    if training.start == "random":
        whole = after(
            jax.random.bernoulli(key, shape=(training.size, training.size, channels)), training.n_steps
        )
        half, steps = training.size // 2, 2 * training.n_steps
        damaged = jnp.asarray(whole).at[:half, :half].set(False)
        lines = [f"a cleared quarter after {steps} steps: {wrong(after(damaged, steps), target)} bits wrong"]
        if np.array_equal(run.target, checkerboard(training.size)):
            # As many squares more as make the pattern the same from each corner.
            large, steps = 4 * training.size + -3 * training.size % 4, 4 * training.n_steps
            noise = jax.random.bernoulli(key, shape=(large, large, channels))
            expected = np.moveaxis(checkerboard(large), 0, -1)
            lines.append(
                f"{large} x {large} cells, {steps} steps: {wrong(after(noise, steps), expected)} bits wrong"
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
            f"{wrong(after(state, training.n_steps), expected)} bits wrong"
        ]
    return []
