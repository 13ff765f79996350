"""Training runs from the first step to the final results.

An `Experiment` defines one kind of run: data, model, tests, and the work after the last step. This
module implements start, stop, resume, extension and completion for all kinds; the caller displays
progress.
"""

import contextlib
import dataclasses
import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import numpy as np

from lutjax.dispatch.registry import devices_of, kernel_registry
from lutjax.tables.host import free_memory
from lutjax.training import checkpoints, hosts, kernels, loop, meshes, models, presets, runs
from lutjax.training.configs import Configs
from lutjax.training.errors import CheckpointError, HostError, InUseError, RunError
from lutjax.training.models import ModelRun, State

T = TypeVar("T")


class Part(NamedTuple):
    """Task after the last step."""

    name: str  # task name, and name of its output file, if any
    doing: str  # progress text
    # Gets the last state and the path for the file, and returns lines to display, if any.
    do: Callable[[State, Path], Sequence[str] | None]


class Experiment(ABC):
    """A run of one kind: its data, its model and its record."""

    configs: ClassVar[Configs]  # config classes of all options
    kept: ClassVar[type[runs.Record]]
    refuses: ClassVar[type[ValueError]] = ValueError  # error for unusable data
    # Names of all files that its parts may write under any options; a new run requires that none
    # exist.
    files: ClassVar[tuple[str, ...]] = ()
    # Names of the training loss, the test metric, and the second test metric, if any.
    curves: tuple[str, ...]
    ends_early: ClassVar[str] = ""  # option that enables `early_stop_reason`

    record: Any  # see `lutjax.training.runs`
    run: ModelRun[Any]
    # Lines about the data and the sizes, displayed before the first step.
    remarks: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def create(cls, fields: Mapping[str, Any], *args: Any, **source: Any) -> Any:
        """Create a run without any steps; config fields not given have their defaults.

        Raises:
          ValueError: a value is invalid, or does not fit the data; `refuses`: the data cannot be
            used.
        """

    @classmethod
    @abstractmethod
    def from_record(cls, record: Any, *args: Any, **source: Any) -> Any:
        """Return the run of a record, with data from `source` or the original location.

        Raises:
          CheckpointError: the data differ; `refuses`: they cannot be read.
        """

    @classmethod
    def make_configs(
        cls, fields: Mapping[str, Any], model: type | None = None
    ) -> tuple[Any, Any, Any]:
        """Create the configs from their fields, in the order of `configs`.

        `model` selects the model's config class, if there are several.
        """
        classes: tuple[Any, ...] = (
            model or cls.configs.model,
            cls.configs.training,
            cls.configs.options,
        )
        model_config, training, options = (presets.make(config, fields) for config in classes)
        return model_config, training, options

    @abstractmethod
    def describe(self) -> str:
        """Describe the data, the model and the steps."""

    @abstractmethod
    def evaluate(self, state: State) -> float:
        """Return the test metric of a state during the run."""

    def evaluate_other(self, state: State) -> float | None:
        """Return the second test metric of a state; None for kinds without one."""
        return None

    @property
    def sample_bytes(self) -> int:
        """Minimum bytes per sample of a batch."""
        return 0

    @abstractmethod
    def parts(self) -> list[Part]:
        """Tasks after the last step, results first."""

    def curves_part(self) -> Part:
        """Return the task that tabulates all measurements, common to all kinds."""
        return Part(
            runs.CURVES,
            "writing the curves",
            lambda state, path: runs.write_curves(path, self.record.history, self.curves),
        )

    def compare(self, show: "Show") -> None:  # noqa: B027 (many kinds have nothing to do here)
        """Compute baselines, after the last step and before the final tasks; it may take long."""

    def remark(self, state: State) -> str:
        """Return a remark to display with a state's test; may be empty."""
        return ""

    def speed(self, seconds: float) -> str:
        """Describe the speed, given the seconds per step."""
        return f"{1e3 * seconds:.2f} ms/step"

    def early_stop_reason(self) -> str | None:
        """Return a reason to stop before the last step, or None."""
        return None

    def draw(self, folder: Path) -> None:  # noqa: B027
        """Draw the pictures for each checkpoint into the run folder."""

    @property
    def intervals(self) -> Any:
        """The record's options, as an instance of their class."""
        return self.configs.options(**self.record.options)

    def stop_reason(self, done: int) -> str | None:
        """Return the reason why no step follows step `done`, or None."""
        if done >= self.record.training.steps:
            return f"all {done} steps are done"
        why = self.early_stop_reason()
        return why and f"{why} after {done} of {self.record.training.steps} steps"


class Watcher:
    """Observer of a run's steps, as a context manager; this base class ignores all events."""

    def __enter__(self) -> "Watcher":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def training(self, losses: Sequence[tuple[int, float]]) -> None:
        """Display batches of step counts with mean losses since the previous count."""

    def test(self, done: int, value: float) -> None:
        """Handle a test result after `done` steps."""

    def remark(self, done: int, text: str) -> None:
        """Handle a remark about the state after `done` steps."""

    def resume(self) -> None:
        """Exclude the time until now from the training time."""


class Show:
    """Display of a run; this base class displays nothing."""

    def line(self, text: str) -> None:
        """Display a line."""

    def show_activity(self, text: str) -> AbstractContextManager[object]:
        """Display the activity of a block."""
        return contextlib.nullcontext()

    def watchers(self, experiment: Experiment, done: int) -> list[Watcher]:
        """Return watchers for the steps of a run from step `done` on."""
        return []

    def second_signal(self) -> None:
        """Handle a Ctrl-C after a stop signal, for example before the checkpoint is written."""
        loop.interrupt()


class StoppedError(Exception):
    """A run stopped by a signal, after a checkpoint of all `done` steps."""

    def __init__(self, done: int):
        super().__init__(f"stopped after {done} steps")
        self.done = done


def start(experiment: Experiment, folder: Path, show: Show) -> None:
    """Run all steps of a new run and finish it.

    Raises:
      InUseError: the folder holds a run or files to be overwritten, or another process writes into
        it.
      StoppedError: a signal arrived; `resume` continues.
      KeyboardInterrupt: the signal arrived before the first step.
      FloatingPointError: the loss is no longer finite.
    """
    jax.local_devices()  # raises if there is none, before writing
    show = _first_process_show(show)
    check_memory(experiment)
    with runs.lock(folder):
        check_new(folder, type(experiment))
        _check_processes(experiment)
        runs.check_space(folder, _bytes(experiment.run.abstract()))
        for line in experiment.remarks:
            show.line(line)
        with loop.stop_on_signal(show.second_signal) as stop:
            _train_and_finish(experiment, folder, 0, show, stop)


def check_memory(experiment: Experiment) -> None:
    """Reject a run whose arrays exceed device or host memory, before allocating any of them."""
    run = experiment.run
    devices = [jax.local_devices()[0]] if run.mesh is None else list(run.mesh.devices.flat)
    state = _bytes(run.abstract())
    batch = experiment.record.training.batch_size * experiment.sample_bytes
    memory = meshes.memory_of(devices)
    if memory is not None and state + batch > memory:
        raise RunError(
            f"the run needs at least {_size(state + batch)}: {_size(state)} for parameters and "
            f"optimizer state, {_size(batch)} for the batch; {meshes.describe_devices(run.mesh)} "
            f"has {_size(memory)}. Choose a smaller model or a smaller batch_size."
        )
    free = free_memory()
    if free is not None and run.host_bytes > free:
        raise RunError(
            f"the run needs {_size(run.host_bytes)} of host memory for tables and their optimizer "
            f"state; {_size(free)} are free. Choose fewer or smaller rows, or a machine with more "
            "memory."
        )


def check_new(folder: Path, kind: type[Experiment]) -> None:
    """Reject a folder with a run or files to be overwritten, or a name invalid for checkpoints."""
    if why := checkpoints.unsupported_reason(folder):
        raise InUseError(f"{why}: choose another folder.")
    if hosts.call_in_first(lambda: runs.exists(folder)):
        raise InUseError(
            f"{folder} already holds a checkpoint: "
            "continue it (--resume) or choose another folder (--out)."
        )
    others = hosts.call_in_first(
        lambda: [str(path) for path in runs.existing_outputs(folder, kind.files)]
    )
    if others:
        raise InUseError(
            f"{folder} holds no run, but a run would overwrite "
            f"{Path(others[0]).relative_to(folder)}: choose another folder (--out), or move the "
            "file away."
        )


def resume(
    folder: Path,
    kind: type[Experiment],
    make: Callable[[Any], Experiment],
    show: Show,
    *,
    options: Mapping[str, Any] | None = None,
    same: Mapping[str, Any] | None = None,
    steps: int | None = None,
    look: bool = True,
) -> None:
    """Continue or finish a run from its latest undamaged checkpoint, or report its completion.

    Args:
      folder: folder of the run.
      kind: the class of the experiment.
      make: makes the experiment of a record, as its class's `from_record`; reads its data.
      show: prints a line of progress.
      options: new values of the record's options.
      same: configuration values that must match the record.
      steps: a new total number of steps.
      look: skip reading the data and checkpoints of a finished run if no other changes are
        requested.

    Raises:
      CheckpointError: no run, another kind of run, values other than `same`, or no undamaged
        checkpoint.
      RunError: `steps` is below the completed steps, or the run has ended before its last step.
      InUseError, StoppedError, FloatingPointError: as `start`.
    """
    show = _first_process_show(show)
    runs.check_kind(folder, kind.kept.kind)
    # A complete run needs no lock, data or devices to say so.
    finished = None
    if look and not (options or same or steps):
        finished = hosts.call_in_first(lambda: runs.Finished.read(folder))
    if finished is not None and hosts.call_in_first(lambda: finished.is_complete(folder)):
        show.line(_describe_finished(folder, finished))
        return
    with runs.lock(folder):
        done, record = runs.read(folder, kind.kept, on_damage=show.line)
        options_given = presets.fields_of(kind.configs.options, same or {})
        _check_same(
            folder, record, {n: v for n, v in (same or {}).items() if n not in options_given}
        )
        experiment = make(record)
        experiment.record.options = dataclasses.asdict(
            kind.configs.options(**{**experiment.record.options, **(options or {})})
        )
        if steps is not None and steps != experiment.record.training.steps:
            experiment = _with_steps(experiment, make, steps, done, show)
        check_memory(experiment)
        _check_processes(experiment)
        runs.set_aside_damaged(folder, done)
        runs.check_space(
            folder, 0 if experiment.stop_reason(done) else _bytes(experiment.run.abstract())
        )
        with loop.stop_on_signal(show.second_signal) as stop:
            _train_and_finish(experiment, folder, done, show, stop)


def dry_run(experiment: Experiment, show: Show) -> None:
    """Display parameters, memory and time of a run without starting it or writing files."""
    from lutjax.benchmark.measure import planned_bytes

    show = _first_process_show(show)
    check_memory(experiment)
    _check_processes(experiment)
    state_of = experiment.run.abstract()
    params, each = state_of.params, ""
    for line in experiment.remarks:
        show.line(line)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    show.line(
        f"dry run of training {experiment.describe()} on "
        f"{meshes.describe_devices(experiment.run.mesh)}"
    )
    show.line(f"parameters: {count:,} ({_size(_bytes(params))})")
    if experiment.run.host_bytes:
        show.line(
            f"in the memory of the host: {_size(experiment.run.host_bytes)}, "
            "of which a checkpoint has the rows that have moved"
        )
    share = ""
    if experiment.run.mesh is not None:
        part = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype), state_of
        )
        share, each = f"; a device holds {_size(_bytes(part))} of it", " on each device"
    show.line(f"state: {_size(_bytes(state_of))}, the size of a checkpoint{share}")
    start = time.perf_counter()
    with show.show_activity("compiling"):
        compiled = functools.partial(experiment.run.advance.compile_program, state_of)
        program, advance = _show_kernels(show, experiment, state_of, compiled)
    compiling = time.perf_counter() - start
    planned = planned_bytes(program)
    if planned is not None:
        show.line(
            f"memory for training{each}: {_size(planned)}, without tests, as the compiler plans it"
        )
    with show.show_activity("measuring steps"):
        state, first = experiment.run.init(), 0

        def seconds(count: int) -> float:
            nonlocal state, first
            start = time.perf_counter()
            state, loss = advance(state, first, count)
            float(loss)  # waits for the device
            first += count
            return time.perf_counter() - start

        # The first step allocates; two more tell how many steps take about 2 seconds.
        seconds(1)
        count = min(max(3, int(2 / seconds(2) * 2)), 1000)
        step = seconds(count) / count
    steps = experiment.record.training.steps
    show.line(
        f"time: {1e3 * step:.2f} ms/step, measured in {count} steps; "
        f"{steps} steps take {_duration(step * steps)}, besides tests, "
        f"checkpoints and {compiling:.0f} s of compilation"
    )


def _check_same(folder: Path, record: Any, requested: Mapping[str, Any]) -> None:
    saved = {**dataclasses.asdict(record.model), **dataclasses.asdict(record.training)}
    if hasattr(record.model, "to_dict"):
        saved.update(record.model.to_dict())
    # Compare values as the config stores them: it makes paths absolute, for example. Values that
    # it rejects differ from the valid ones of the run.
    own = presets.fields_of(type(record.model), requested)
    with contextlib.suppress(ValueError):
        if dataclasses.replace(record.model, **own) == record.model:
            requested = {name: value for name, value in requested.items() if name not in own}
    different = checkpoints.differences(saved, requested)
    if different:
        raise CheckpointError(
            f"the checkpoint in {folder} has another configuration: {'; '.join(different)}. Omit "
            "these options to continue it, or choose another folder (--out)."
        )


def _with_steps(
    experiment: Experiment, make: Callable[[Any], Experiment], steps: int, done: int, show: Show
) -> Experiment:
    """Return the run with another number of steps, and display any difference from a fresh run."""
    record, why = experiment.record, experiment.early_stop_reason()
    if why is not None:
        raise RunError(
            f"steps is {steps}, but {experiment.ends_early} ended the run early ({why}). Change "
            "that option as well to continue."
        )
    if steps < done:
        raise RunError(f"steps is {steps}, but {done} steps are done; give at least as many.")
    training = dataclasses.replace(record.training, steps=steps)
    # Rates of completed steps may have followed from other total numbers of steps. Compare what
    # each step took with what it would take in a run of the new length.
    lengths = record.history.lengths or [(0, record.training.steps)]
    starts = [first for first, _ in lengths]
    scheduled = training.scheduled_values(np.arange(done))
    taken = np.empty_like(scheduled)  # at every completed step
    for first, last, length in zip(
        starts, [*starts[1:], done], (n for _, n in lengths), strict=True
    ):
        own = dataclasses.replace(record.training, steps=length)
        taken[first:last] = own.scheduled_values(np.arange(first, last))
    other = np.flatnonzero((taken != scheduled).any(1))
    if other.size:
        show.line(
            f"goes on to {steps} steps: from here on as a run of {steps} steps does. "
            "Steps before depended on the number of steps, too: "
            f"{other.size} of them, the first of them step {other[0] + 1}, "
            f"were taken at another {training.scheduled_name} than in a run started "
            f"with --steps {steps}, so the result is not that of such a run."
        )
    else:
        show.line(
            f"goes on to {steps} steps; "
            f"what is learned is what a run started with --steps {steps} learns."
        )
    history = dataclasses.replace(record.history, lengths=[*lengths, (done, steps)])
    return make(dataclasses.replace(record, training=training, history=history))


def _first_process_show(show: Show) -> Show:
    return show if hosts.is_first() else Show()


def _check_processes(experiment: Experiment) -> None:
    """Reject processes with other options or data, which would deadlock."""
    record = dataclasses.asdict(experiment.record)
    for data in record.values():
        if isinstance(data, dict):
            data.pop("path", None)  # data folders may differ between hosts
    devices = meshes.describe_devices(experiment.run.mesh)
    of_each = hosts.gather(json.dumps([record, devices], sort_keys=True))
    for process, one in enumerate(of_each):
        if one != of_each[0]:
            raise HostError(
                f"process {process} has other options or data than process 0; all must be the same."
            )


def _train_and_finish(
    experiment: Experiment, folder: Path, done: int, show: Show, stop: loop.Stop
) -> None:
    state: State | None = None
    if experiment.stop_reason(done) is None:
        start, first = time.perf_counter(), done
        resumed = f"; resumed after {done} steps" if done else ""
        show.line(
            f"training {experiment.describe()} on "
            f"{meshes.describe_devices(experiment.run.mesh)}{resumed}"
        )
        if hosts.count() > 1:
            show.line(
                f"{hosts.count()} processes: where one is lost, "
                f"the others end within {hosts.LOST_AFTER} s, "
                "and --resume goes on with those that remain."
            )
        with stop.allow_interrupt():
            state = models.restore(folder, done, experiment.run) if done else experiment.run.init()
            _show_kernels(
                show, experiment, state, functools.partial(experiment.run.advance.trace, state)
            )
        state, done = _train(experiment, state, folder, done, show, stop)
        show.line(f"{done - first} steps in {time.perf_counter() - start:.0f} s.")
    # A run without steps left may still lack reports, if it was stopped while it wrote them.
    finished = hosts.call_in_first(lambda: runs.read_finishing_record(folder))
    names = [part.name for part in experiment.parts()]
    if finished.why and hosts.call_in_first(
        lambda: all(finished.has(folder, name) for name in names)
    ):
        show.line(_describe_finished(folder, finished))
        return
    if state is None:
        state = models.restore(folder, done, experiment.run)
    try:
        with stop.allow_interrupt():
            _finish(experiment, state, folder, done, finished, show)
    except KeyboardInterrupt:
        raise StoppedError(done) from None


def _show_kernels(show: Show, experiment: Experiment, state: State, trace: Callable[[], T]) -> T:
    """Display the implementations of a step's ops, and return the result of its first `trace`."""
    with kernel_registry.collecting() as calls:
        result = trace()
    lines = kernels.describe_implementations(calls, devices_of(jax.tree.leaves(state))[0])
    for line in [*lines, *experiment.run.backend_notes()]:
        show.line(line)
    return result


def _train(
    experiment: Experiment, state: State, folder: Path, done: int, show: Show, stop: loop.Stop
) -> tuple[State, int]:
    record, intervals, saved = experiment.record, experiment.intervals, done
    history = record.history

    def log(losses: Sequence[tuple[int, float]]) -> None:
        history.train.extend(losses)
        for watcher in watchers:
            watcher.training(losses)

    def test(number: int, loss: float, state: State) -> None:
        history.test.append((number, experiment.evaluate(state)))
        other = experiment.evaluate_other(state)
        if other is not None:
            history.other.append((number, other))
        remark = experiment.remark(state)
        for watcher in watchers:
            watcher.test(*history.test[-1])
            if remark:
                watcher.remark(number, remark)

    def save(number: int, loss: float | None, state: State) -> None:
        nonlocal saved
        models.save(folder, number, state, record, experiment.run)
        saved = number
        hosts.call_in_first(draw)
        for watcher in watchers:
            watcher.resume()

    def draw() -> None:
        with runs.write_atomically(folder / runs.CURVES) as path:
            runs.write_curves(path, history, experiment.curves)
        experiment.draw(folder)

    # A test comes before the checkpoint of the same step, whose record then has its result.
    hooks = [loop.Hook(intervals.eval_every, test), loop.Hook(intervals.checkpoint_every, save)]
    with ExitStack() as stack:
        # A signal may reach one process only, and all must take the same steps.
        def agree_to_stop() -> bool:
            return hosts.agree(stop())

        watchers = [stack.enter_context(watcher) for watcher in show.watchers(experiment, done)]
        state, done = loop.run(
            experiment.run.advance,
            state,
            first=done,
            steps=record.training.steps,
            log=loop.Log(intervals.log_every, log),
            hooks=hooks,
            slowest=hosts.max_over_processes,
            stopped=lambda: agree_to_stop() or experiment.early_stop_reason() is not None,
        )
        if done != saved:
            save(done, None, state)
        if agree_to_stop():
            raise StoppedError(done)
    return state, done


def _finish(
    experiment: Experiment,
    state: State,
    folder: Path,
    done: int,
    finished: runs.Finished,
    show: Show,
) -> None:
    why = experiment.stop_reason(done)
    assert why is not None
    if finished.why:  # its parts have changed, or a file was deleted
        finished.why = ""
        finished.write(folder)
    parts = experiment.parts()
    if not hosts.call_in_first(lambda: all(finished.has(folder, part.name) for part in parts)):
        experiment.compare(show)
    for part in parts:
        if not hosts.call_in_first(functools.partial(finished.has, folder, part.name)):
            with show.show_activity(part.doing), runs.write_run_file(folder / part.name) as path:
                lines = list(part.do(state, path) or ())
                written = path.exists()
            finished.parts[part.name] = (written, lines)
            finished.record_file(folder, part.name)
            finished.write(folder)  # after each part: a killed run repeats only the current one
        for line in finished.parts[part.name][1]:
            show.line(line)
    finished.why = why
    finished.write(folder)
    files = [part.name for part in parts if finished.parts[part.name][0]]
    show.line(f"finished, as {why}. In {folder}: {runs.FOLDER}, {', '.join(files)}")


def _describe_finished(folder: Path, finished: runs.Finished) -> str:
    results = next((lines[0] for _, lines in finished.parts.values() if lines), "")
    return f"{folder} is finished: {finished.why}. {results}".rstrip()


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
