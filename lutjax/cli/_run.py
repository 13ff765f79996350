"""What every command that trains shares: intervals, progress, checkpoints, stopping, resuming, and errors."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lutjax.cli._progress import Report
    from lutjax.training.loop import Advance
    from lutjax.training.runs import History


@dataclasses.dataclass(frozen=True)
class Intervals:
    """What happens how often, in steps. They change nothing in what is learnt, so a resumed run may change them.

    Attributes:
      log_every: steps between two training losses.
      eval_every: steps between two tests.
      checkpoint_every: steps between two checkpoints.
    """

    log_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")


def out_option(default: str) -> Callable[[Any], Any]:
    """The option ``--out``, with the folder that it names by default."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(default),
        show_default=True,
        help="Folder for checkpoints and pictures.",
    )


resume_option = click.option(
    "--resume", is_flag=True, help="Go on from the latest checkpoint in --out; it knows its own options."
)


@contextmanager
def usage_errors() -> Iterator[None]:
    """A value that a config refuses is bad usage."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def make(config: type, values: Mapping[str, Any]) -> Any:
    """A config of those values that are its fields."""
    names = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in names})


def check_new(out: Path) -> None:
    """Refuses a folder that holds a run.

    Raises:
      click.UsageError: it does.
    """
    from lutjax.training import runs

    if runs.exists(out):
        raise click.UsageError(
            f"{out} holds a checkpoint already: go on with it (--resume), or choose another folder (--out)."
        )


def check_same(out: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses options that would make another run of the one in a folder.

    Args:
      saved: what decides the run.
      wanted: options that were given; those that `saved` does not have are ignored.

    Raises:
      CheckpointError: a value is another one.
    """
    from lutjax.training import checkpoints

    different = checkpoints.differences(saved, {k: v for k, v in wanted.items() if k in saved})
    if different:
        raise checkpoints.CheckpointError(
            f"the checkpoint in {out} belongs to another configuration: {'; '.join(different)}. "
            "Leave these options out to go on with it, or choose another folder (--out)."
        )


@contextmanager
def errors(out: Path) -> Iterator[None]:
    """What can happen to any run, as one message: a bad checkpoint, a loss that is not finite, too little memory."""
    import jax

    from lutjax.training.checkpoints import CheckpointError

    try:
        yield
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    except FloatingPointError as error:
        raise click.ClickException(f"{error} Lower --learning-rate.") from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise click.ClickException(
            f"the device is out of memory. Checkpoints in {out} are whole: go on with --resume where more is free, or "
            "start again in another folder with a smaller --batch-size or model."
        ) from error


def train(
    advance: "Advance",
    state: Any,
    *,
    done: int,
    steps: int,
    intervals: Intervals,
    history: "History",
    report: "Report",
    evaluate: Callable[[int, Any], float],
    save: Callable[[int, Any], None],
    again: str,
) -> Any:
    """Runs the steps of a run that are not done, and shows them.

    Args:
      history: gets every training loss and test.
      evaluate: a test of a state after so many steps.
      save: writes a checkpoint of it.
      again: the command that goes on with the run.

    Returns:
      the state after the last step.

    Raises:
      SystemExit: with code 130, after a checkpoint, if the run was stopped by Ctrl-C.
    """
    from lutjax.training import loop

    def log(number: int, loss: float, state: Any) -> None:
        history.train.append((number, loss))
        report.training(number, loss)

    def test(number: int, loss: float, state: Any) -> None:
        history.test.append((number, evaluate(number, state)))
        report.test(*history.test[-1])

    def checkpoint(number: int, loss: float, state: Any) -> None:
        save(number, state)
        report.resume()

    hooks = [
        loop.Hook(intervals.log_every, log),
        loop.Hook(intervals.eval_every, test),
        loop.Hook(intervals.checkpoint_every, checkpoint),
    ]
    first = done
    with report, loop.stop_on_signal() as stopped:
        state, done = loop.run(advance, state, first=done, steps=steps, hooks=hooks, stopped=stopped)
        if done < steps and done % intervals.checkpoint_every and done > first:
            save(done, state)
    if done < steps:
        click.echo(f"stopped after {done} of {steps} steps. Go on with:\n  {again}")
        raise SystemExit(130)
    return state


def command(*words: str) -> str:
    """A command of lutjax as a shell takes it."""
    return shlex.join(["lutjax", *words])
