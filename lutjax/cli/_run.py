"""Options, messages, start and resumption shared by all training commands."""

import contextlib
import copy
import errno
import functools
import importlib.util
import os
import pkgutil
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from lutjax import extras
from lutjax.cli._errors import OUT_OF_MEMORY, explain
from lutjax.cli._flags import (
    MESH,
    PATH,
    FieldsCommand,
    Integer,
    echo_error,
    flag_of,
    parameter_error,
)
from lutjax.files.errors import FolderError
from lutjax.training.errors import InUseError, RunError

if TYPE_CHECKING:
    from lutjax.training.experiments import Experiment


def training_command(
    kind: str, configs: str, out: str, *, data: str, model: str, optimization: str
) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that creates a training command, with the config fields as options.

    Its function receives the kind first, an `Experiment` class.

    Args:
      kind: module and class name, ``module:Name``: imported with JAX when the command runs.
      configs: module and name of the class's `Configs`, imported when options are needed.
      out: default directory for ``--out``.
      data, model, optimization: option names shown under these headings in help.
    """
    sections = {
        "Data": data,
        "Run": "out steps resume dry_run",
        "Model": model,
        "Optimization": optimization,
        "Checkpoints and reports": "log_every eval_every checkpoint_every select_every tensorboard",
        "Devices": "mesh coordinator n_processes process huge_pages",
    }

    def decorate(function: Callable[..., None]) -> click.Command:
        # Named by text and imported here: JAX takes seconds, which --help should not wait for.
        @functools.wraps(function)
        def call(**arguments: Any) -> None:
            function(pkgutil.resolve_name(kind), **arguments)

        make = click.command(
            cls=FieldsCommand, configs=lambda: pkgutil.resolve_name(configs), sections=sections
        )
        command = make(call)
        command.params += [
            click.Option(
                ["--out"],
                type=click.Path(path_type=Path, file_okay=False),
                default=Path(out),
                help="Output folder for checkpoints and reports.",
            ),
            click.Option(
                ["--resume"], is_flag=True, help="Continue --out; a larger --steps extends it."
            ),
            click.Option(
                ["--dry-run"],
                is_flag=True,
                help="Print parameters, memory and estimated time; write nothing.",
            ),
            click.Option(
                ["--mesh"],
                type=MESH,
                help="Device mesh, such as data=2,detectors=4.  [default: all GPUs]",
            ),
            *process_options(),
            click.Option(
                ["--tensorboard"], is_flag=True, help="Write TensorBoard events to OUT/tensorboard."
            ),
        ]
        return command

    return decorate


def alias(command: click.Command, name: str, out: str, summary: str) -> click.Command:
    """Return a training command under another name, with another default directory."""
    copied = copy.copy(command)
    copied.name, copied.params, copied.short_help = name, list(command.params), summary
    place = next(k for k, option in enumerate(copied.params) if option.name == "out")
    copied.params[place] = copy.copy(copied.params[place])
    copied.params[place].default = Path(out)
    return copied


def run_argument(name: str, alias: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the argument RUN, with a deprecated option as its alias."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @click.argument(name, metavar="RUN", type=PATH, required=False)
        # Commands of earlier versions had an option for the run.
        @click.option(alias, "aliased", type=PATH, hidden=True)
        @functools.wraps(function)
        def call(aliased: Path | None, **arguments: Any) -> None:
            if (arguments[name] is None) == (aliased is None):
                raise click.UsageError("give the folder of one run or bundle, as RUN.")
            function(**{**arguments, name: arguments[name] or aliased})

        return call

    return decorate


def model(run: Path) -> Any:
    from lutjax.training import model_folders

    if not run.exists():
        raise parameter_error("RUN", f"the folder {run} does not exist.")
    return model_folders.read(run, on_damage=echo_error).model


def process_options() -> list[click.Option]:
    """Return options for multi-process commands, the arguments of `processes`."""
    return [
        click.Option(
            ["--coordinator"],
            metavar="HOST:PORT",
            envvar="JAX_COORDINATOR_ADDRESS",
            help="Address of the first process.  [default: from the cluster]",
        ),
        click.Option(
            ["--processes", "n_processes"],
            type=Integer(1),
            envvar="JAX_NUM_PROCESSES",
            help="Number of processes.  [default: from the cluster]",
        ),
        click.Option(
            ["--process"],
            type=Integer(0),
            envvar="JAX_PROCESS_ID",
            help="This process's index, from 0.  [default: from the cluster]",
        ),
    ]


def train(
    *arguments: Any,
    coordinator: str | None = None,
    n_processes: int | None = None,
    process: int | None = None,
    **options: Any,
) -> "Experiment | None":
    """Start or resume a run, in one or several processes; see `_train`."""
    with (
        processes(coordinator, n_processes, process),
        contextlib.redirect_stdout(UntilClosed(sys.stdout)),
    ):
        return _train(*arguments, **options)


@contextmanager
def processes(
    coordinator: str | None, n_processes: int | None, process: int | None
) -> Iterator[None]:
    """Join a command's processes; an error in one ends all, and is printed once if possible."""
    from lutjax.training import hosts

    text = f"Waiting for other processes for up to {hosts.JOINED_AFTER} s"
    waiting = threading.Timer(10, click.echo, (text,), {"err": True})
    waiting.daemon = True
    waiting.start()
    try:
        hosts.initialize(coordinator, n_processes, process)
    except RunError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    finally:
        waiting.cancel()
    if hosts.count() == 1:
        yield
        return
    try:
        with hosts.run_together():
            yield
    except (Exception, KeyboardInterrupt) as error:
        # An error that all processes know of is printed once, by the first.
        if hosts.is_shared_error(error):
            if hosts.is_first():
                raise
            raise SystemExit(1) from None
        # Other processes are unreachable, and a regular JAX shutdown would wait for them.
        click.echo(f"Error: process {hosts.index()}: {_last_words(error)}", err=True)
        sys.stdout.flush()
        os._exit(1)


def _last_words(error: BaseException) -> str:
    from lutjax.training import hosts

    if hosts.is_lost_process(error):
        why = str(error).splitlines()[0]
        return (
            f"another process of this run ended or cannot be reached ({why}). "
            "Checkpoints are intact: continue with --resume on these or other processes."
        )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted."
    if isinstance(error, click.ClickException):
        return error.format_message()
    return explain(error, training=True) or "".join(traceback.format_exception(error))


def _train(
    kind: "type[Experiment]",
    fields: Mapping[str, Any],
    *,
    option: str,
    source: Mapping[str, Any] = MappingProxyType({}),
    preset: Mapping[str, Any] = MappingProxyType({}),
    same: Mapping[str, Any] = MappingProxyType({}),
    out: Path,
    resume: bool,
    dry_run: bool,
    tensorboard: bool,
    mesh: Mapping[str, int] | None = None,
) -> "Experiment | None":
    """Start or resume a run; in the first process, return it if it took steps or finished.

    Args:
      fields: given values for config fields.
      option: name of the data option.
      source: the given data, for new and resumed runs.
      preset: additional arguments for a new run.
      same: additional fields that must match in a resumed run.
    """
    from lutjax.training import experiments, hosts, loop
    from lutjax.training.presets import fields_of

    if tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise click.ClickException(
            f"--tensorboard needs tensorboardX: {extras.command('tensorboardX')}"
        )
    if dry_run and resume:
        raise click.UsageError("--dry-run describes a new run; leave out --resume.")

    created: list[Experiment] = []

    def wrap_constructor(make: "Callable[..., Experiment]") -> "Callable[..., Experiment]":
        def call(*arguments: Any) -> "Experiment":
            # Reading data and building a model do not poll for signals: the first one interrupts.
            with (
                loop.stop_on_signal(show.second_signal) as stop,
                stop.allow_interrupt(),
                usage_errors(kind.refuses, option),
                hosts.run_together(),
                too_large(fields),
            ):
                created.append(make(*arguments))
                created[-1].run.divide(mesh)
            return created[-1]

        return call

    # A run that is stopped before its next checkpoint has the old number of steps: repeat the
    # option.
    longer = ["--steps", str(fields["steps"])] if resume and "steps" in fields else []
    name = click.get_current_context().info_name or kind.kept.kind
    again = command("train", name, "--resume", *longer, "--out", str(out))
    show = _terminal(out, tensorboard, again)
    try:
        if resume:
            requested = {**same, **fields}
            changed = fields_of(kind.configs.options, requested)
            # Validate before the checkpoint is read, which may take long.
            with usage_errors(kind.refuses, option):
                kind.configs.options(**changed)
            experiments.resume(
                out,
                kind,
                wrap_constructor(lambda record: kind.from_record(record, **source)),
                show,
                options=changed,
                same={name: value for name, value in requested.items() if name != "steps"},
                steps=fields.get("steps"),
                look=all(value is None for value in source.values()),
            )
        else:
            if not dry_run:
                check_new(out, kind)
            experiment = wrap_constructor(lambda: kind.create(fields, **source, **preset))()
            if dry_run:
                experiments.dry_run(experiment, show)
                return None
            experiments.start(experiment, out, show)
    except experiments.StoppedError as error:
        steps = created[-1].record.training.steps
        what = (
            f"Stopped after {error.done} of {steps} steps."
            if created[-1].stop_reason(error.done) is None
            else "Stopped after the last step, before all reports were finished."
        )
        if hosts.is_first():
            click.echo(f"{what} Continue with:\n  {again}")
        raise SystemExit(130) from None
    except KeyboardInterrupt:
        if hosts.count() > 1:  # `processes` ends the others
            raise
        click.echo(f"Stopped before {'another' if resume else 'the first'} step.")
        raise SystemExit(130) from None
    return created[-1] if created and hosts.is_first() else None


def check_new(out: Path, kind: "type[Experiment]") -> None:
    """Raise UsageError if a folder holds a run or files to be overwritten."""
    from lutjax.training import experiments

    try:
        experiments.check_new(out, kind)
    except InUseError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def usage_errors(source: type[ValueError], option: str) -> Iterator[None]:
    """Report rejected config values and unusable data as usage errors."""
    try:
        yield
    except FolderError:
        raise
    except source as error:
        raise parameter_error(option, error) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def too_large(fields: Mapping[str, Any]) -> Iterator[None]:
    """Name the largest given size if a run exceeds memory before its first checkpoint."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError, ValueError) as error:
        # NumPy, JAX and our own checks report sizes by errors of different types.
        memory = isinstance(error, MemoryError | OverflowError)
        if not memory and not re.search(
            f"{OUT_OF_MEMORY}|allowed size|too big|no machine holds", str(error)
        ):
            raise
        sizes = {
            name: max(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if value and isinstance(value, int | tuple) and not isinstance(value, bool)
        }
        if not sizes:
            raise
        name = max(sizes, key=sizes.__getitem__)
        value = fields[name]
        text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
        raise click.UsageError(
            f"{flag_of(name)} is {text}, too large for this machine. Choose a smaller one."
        ) from error


class UntilClosed:
    """Standard output that stops the command by SIGTERM once its reader is gone.

    A pipe breaks when its reader exits; a closed terminal rejects writes.
    """

    def __init__(self, stream: Any):
        self._stream, self._closed = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self._closed:
            return
        try:
            call()
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self._closed = True
            # The stream must stay valid: other code writes to it until the run has stopped.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())  # buffered output is written at exit
            os.close(nothing)
            signal.raise_signal(signal.SIGTERM)


def _terminal(out: Path, tensorboard: bool, again: str) -> Any:
    """Show a run on a terminal, else as lines; `again` is the command that resumes it."""
    from rich.console import Console

    from lutjax.cli._progress import Report
    from lutjax.training import experiments

    class Terminal(experiments.Show):
        console = Console()

        def line(self, text: str) -> None:
            click.echo(text)

        def show_activity(self, text: str) -> AbstractContextManager[object]:
            if self.console.is_terminal:
                return self.console.status(f"{text} ...")
            click.echo(f"{text} ...")
            return super().show_activity(text)

        def second_signal(self) -> None:
            # An exception could be swallowed, or be repeated by the checkpoint writers.
            cursor = "\x1b[?25h\r" if self.console.is_terminal else ""
            text = (
                f"{cursor}Stopped immediately. "
                f"Checkpoints are intact: if there is one, continue with: {again}\n"
            )
            os.write(
                sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode(errors="replace")
            )
            os._exit(130)

        def watchers(self, experiment: "Experiment", done: int) -> "list[experiments.Watcher]":
            watchers: list[experiments.Watcher] = [
                Report(
                    self.console,
                    first=done,
                    steps=experiment.record.training.steps,
                    speed=experiment.speed,
                    measure=experiment.curves[1],
                )
            ]
            if tensorboard:
                from lutjax.training.tensorboard import Events

                watchers.append(Events(out / "tensorboard", experiment.curves, done))
            return watchers

    return Terminal()


def command(*words: str) -> str:
    return shlex.join(["lutjax", *words])
