"""Shared parts of the benchmark scripts: options, times, tables in Markdown, stored rows, and facts about the machine."""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lutjax

RECORDED = Path(__file__).parents[1] / "docs" / "benchmarks"
"""Folder of recorded measurements, which pages show as tables."""


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the docstring of a script as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# ------------------------------------------------------------------------------------- times
def timed(
    call: Callable[[], Any], repeats: int, calls: int = 1, clock: Callable[[], float] = time.perf_counter
) -> np.ndarray:
    """Return the seconds of a call in each repetition of so many calls, after one call that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = clock()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        seconds.append((clock() - start) / calls)
    return np.array(seconds)


def in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Return the seconds of calls that take turns, without the first turn: the clocks of a machine drift."""
    turns = []
    for _ in range(repeats + 1):
        turns.append([])
        for call in calls.values():
            start = time.perf_counter()
            jax.block_until_ready(call())
            turns[-1].append(time.perf_counter() - start)
    return dict(zip(calls, np.transpose(turns[1:]), strict=True))


def kernel_launches(run: Callable[[], Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Return the name, start and end in nanoseconds of every kernel launch while a function runs, by GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = jax.profiler.ProfileData.from_file(str(path))
    return {
        plane.name: [
            (event.name, event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        for plane in space.planes
        if "GPU" in plane.name and plane.name.startswith("/device")
    }


# ------------------------------------------------------------------------------------- tables
def markdown_row(cells: Iterable[Any]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def head(names: Sequence[str], n_left: int = 1) -> str:
    """Return the head of a table in Markdown, with columns aligned left and then right."""
    return f"{markdown_row(names)}\n{markdown_row(['---'] * n_left + ['--:'] * (len(names) - n_left))}"


def table(names: Sequence[str], rows: Iterable[Sequence[Any]], n_left: int = 1) -> str:
    """Return a table in Markdown."""
    return "\n".join([head(names, n_left), *map(markdown_row, rows)]) + "\n"


def print_table(names: Sequence[str], rows: Iterable[Sequence[Any]], n_left: int = 1) -> None:
    """Print a table in Markdown, each row as soon as it is measured."""
    print(head(names, n_left), flush=True)
    for row in rows:
        print(markdown_row(row), flush=True)


def mean_and_error(values: Sequence[float]) -> str:
    """Return a mean and its standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):.2f} ± {error:.2f}"


def axes_of(path: Path, *axes: int, size: tuple[float, float] = (7, 4), dpi: int = 110) -> Iterator[Any]:
    """Yield the axes of a picture, which is written when the loop over it ends.

    Args:
      path: file of the picture.
      *axes: numbers of rows and columns of axes.
      size: width and height in inches.
      dpi: pixels per inch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(*axes)
    figure.savefig(path, dpi=dpi)


# ------------------------------------------------------------------------------------- rows and machines
def processor() -> str:
    """Return the name of the processor and the number of cores that this process may use."""
    name, path = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if path.exists():
        lines = path.read_text().splitlines()
        name = next((text.partition(": ")[2] for text in lines if text.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def about() -> dict[str, Any]:
    """Return the facts of a result: device, cores, versions and day."""
    return {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "lutjax": lutjax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def add_line(path: Path | None, row: dict[str, Any]) -> str:
    """Return a row as a line of JSON, which is also added to the file, if there is one."""
    text = json.dumps(row)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return text


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with lines of JSON."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def fields_of(words: Iterable[str]) -> dict[str, Any]:
    """Return fields and values of words such as ``residual=10`` and ``update=[8,1]``."""
    values = {name: json.loads(value) for name, _, value in (word.partition("=") for word in words)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# ------------------------------------------------------------------------------------- classifiers
def step_of(model_of: Any, config: Any, **layers: Any) -> tuple[Any, Any]:
    """Return a training step ``(state, x, labels) -> (state, loss)`` of Adam on softmax cross entropy, and its first state."""
    import optax
    from flax import nnx

    model = nnx.jit(lambda: model_of(config, rngs=nnx.Rngs(0), **layers))()
    graph, params, others = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, others, moments = state

        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, others)(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), others, moments), value

    return step, (params, others, optimizer.init(params))


class Trained:
    """Networks of one config, trained at the same time in one program, one for each part of the samples.

    Args:
      model: config of all networks.
      training: config of all trainings.
      parts: equally many samples for each network.
      seeds: of the first values of each network.

    Raises:
      ValueError: there are several parts and thresholds are learned: their rates would be those of the first part.
    """

    def __init__(self, model: Any, training: Any, parts: Sequence[Any], seeds: Sequence[int]):
        from lutjax.training.classifier import Run, by_feature, first_thresholds
        from lutjax.training.loop import Repeated

        if model.learned_thresholds and len(parts) > 1:
            raise ValueError(
                f"learned_thresholds is True for {len(parts)} parts; train one after the other, as their rates differ."
            )
        self.run = Run(model, training, parts[0])
        states = jax.jit(jax.vmap(self.run.drawn))(jnp.stack([jax.random.key(seed) for seed in seeds]))
        if model.n_thresholds and not model.learned_thresholds:
            n = model.n_thresholds
            thresholds = [first_thresholds(by_feature(model, part), training, n) for part in parts]
            states.others["encoder"]["thresholds"] = jnp.stack(thresholds)
        samples = tuple(jnp.stack([getattr(part, array) for part in parts]) for array in ("x", "y"))

        def step(states: Any, number: Any, samples: Any) -> Any:
            states, losses = jax.vmap(self.run.step, (0, None, 0))(states, number, samples)
            return states, losses.mean()

        with lutjax.use_implementation("xla"):  # under vmap other kernels run for one network after the other
            self.states, self.loss = Repeated(step, samples)(states, 0, training.steps)

    def accuracy(self, number: int, part: Any, *, hard: bool) -> float:
        """Return the percentage of correct classes of a network on a part."""
        state = jax.tree.map(lambda array: array[number], self.states)
        return 100 * self.run.accuracy(state, part, hard=hard)
