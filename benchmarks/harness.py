"""Shared harness of the benchmark scripts: options, timing, Markdown tables, stored rows, pictures, machine facts."""

import argparse
import ast
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lutjax

RECORDED = Path(__file__).parents[1] / "docs" / "benchmarks"
"""Folder with recorded measurements, shown as tables on pages."""


# ------------------------------------------------------------------------------------- options
class _Extend(argparse.Action):
    """Collect repeated and comma-separated values."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        if values is self.default:  # argparse passes the default of an absent positional
            return
        collected = (
            getattr(namespace, self.dest) if getattr(namespace, f"_{self.dest}", False) else []
        )
        setattr(namespace, f"_{self.dest}", True)
        setattr(namespace, self.dest, [*collected, *(v for word in values for v in word)])


def parse(
    description: str | None, *positional: str, argv: Sequence[str] | None = None, **options: Any
) -> Any:
    """Parse the command line of a script, whose docstring is its help text.

    Args:
      description: script docstring.
      *positional: names without dashes.
      argv: words to parse instead of the command line.
      **options: default value and help text by name. A type means no default. Lists accept several
        values, also separated by commas; tuples and mappings contain the choices, one or several of
        them, by default the first or all.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, *text) in options.items():
        more: dict[str, Any] = {"help": text[0] if text else None}
        if isinstance(default, bool):
            more |= {"action": "store_true"}
        elif isinstance(default, tuple):
            more |= {"choices": default, "default": default[0]}
        elif isinstance(default, list | Mapping):
            kind = (
                default[0] if isinstance(default, list) and isinstance(default[0], type) else None
            )
            of = kind or (type(default[0]) if isinstance(default, list) else str)
            more |= {
                "nargs": "*" if name in positional else "+",
                "action": _Extend,
                "type": _list_type(of, default if isinstance(default, Mapping) else None),
                "default": [] if kind else list(default),
            }
        elif isinstance(default, type):
            more |= {"type": default}
        else:
            more |= {"type": type(default), "default": default}
        if name in positional:
            parser.add_argument(
                name, **more, **({"nargs": "?"} if isinstance(default, tuple) else {})
            )
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", **more)
    return parser.parse_args(argv)


def _list_type(kind: type, choices: Iterable[str] | None) -> Callable[[str], list[Any]]:
    def values(word: str) -> list[Any]:
        if choices is not None and word not in choices:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
        return [kind(part) for part in word.split(",")] if kind in (int, float) else [kind(word)]

    return values


def parse_fields(words: Iterable[str]) -> dict[str, Any]:
    """Return fields and values from words such as ``residual=10``, ``update=[8,1]`` and ``read=hard``."""
    fields = {}
    for name, _, text in (word.partition("=") for word in words):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = {"true": True, "false": False, "null": None}.get(text, text)
        fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


# ------------------------------------------------------------------------------------- times
def time_calls(
    call: Callable[[], Any],
    repeats: int,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Return the seconds per call in each repetition, after one call for compilation."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        start = clock()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        seconds.append((clock() - start) / calls)
    return np.array(seconds)


def time_in_turns(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Return the seconds of alternating calls, without the first turn.

    Alternation cancels clock drift.
    """
    turns = [[_time_once(call) for call in calls.values()] for _ in range(repeats + 1)]
    return dict(zip(calls, np.transpose(turns[1:]), strict=True))


def _time_once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def kernel_launches(run: Callable[[], Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Return name, start and end (nanoseconds) for each kernel launch during a call, by GPU."""
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


# ------------------------------------------------------------------------------ tables and pictures
def markdown_row(cells: Iterable[Any]) -> str:
    """Return a Markdown table row."""
    return f"| {' | '.join(map(str, cells))} |"


def table(names: str | Sequence[str], rows: Iterable[Sequence[Any]], n_left: int = 1) -> str:
    """Return a Markdown table.

    Args:
      names: column names; one string separates them by `` | ``.
      rows: row cells.
      n_left: number of left-aligned columns.
    """
    return "\n".join([_head(names, n_left), *map(markdown_row, rows)]) + "\n"


def print_table(names: str | Sequence[str], rows: Iterable[Sequence[Any]], n_left: int = 1) -> None:
    """Print a Markdown table, each row as soon as it is measured."""
    print(_head(names, n_left), flush=True)
    for row in rows:
        print(markdown_row(row), flush=True)


def _head(names: str | Sequence[str], n_left: int) -> str:
    names = names.split(" | ") if isinstance(names, str) else names
    return (
        f"{markdown_row(names)}\n{markdown_row(['---'] * n_left + ['--:'] * (len(names) - n_left))}"
    )


def mean_and_error(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and standard error."""
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):.{digits}f} ± {error:.{digits}f}"


def draw_axes(
    path: Path, *axes: int, size: tuple[float, float] = (7, 4), dpi: int = 110, **more: Any
) -> Iterator[Any]:
    """Yield the axes of a picture once, and save the picture after the loop body.

    Args:
      path: picture file.
      *axes: numbers of rows and columns.
      size: width and height in inches.
      dpi: pixels per inch.
      **more: arguments of ``subplots``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure.subplots(*axes, **more)
    figure.savefig(path, dpi=dpi)


# -------------------------------------------------------------------------------- rows and machines
def processor() -> str:
    """Return the processor name and the number of usable cores."""
    name, path = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if path.exists():
        lines = path.read_text().splitlines()
        name = next(
            (text.partition(": ")[2] for text in lines if text.startswith("model name")), name
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def about() -> dict[str, Any]:
    """Return device, cores, versions and date of a result."""
    versions = {
        "jax": jax.__version__,
        "lutjax": lutjax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    return {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), **versions}


def add_line(path: Path | None, row: dict[str, Any]) -> str:
    """Return a row as one line of JSON, and append it to the file if there is one."""
    text = json.dumps(row)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    return text


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with lines of JSON."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


# ------------------------------------------------------------------------------------- classifiers
class TrainedNetworks:
    """Networks with one config, trained side by side in one program, one per part of the samples.

    Args:
      model: config of all networks.
      training: training config of all networks.
      parts: equally many samples for each network.
      seeds: initialization seed per network.

    Raises:
      ValueError: several parts with learned thresholds, whose rates depend on the part.
    """

    def __init__(self, model: Any, training: Any, parts: Sequence[Any], seeds: Sequence[int]):
        from lutjax.training.classifier import Run, feature_columns, first_thresholds
        from lutjax.training.loop import Repeated

        if model.learned_thresholds and len(parts) > 1:
            raise ValueError(
                f"learned_thresholds is True for {len(parts)} parts; train them one by one."
            )
        self.run = Run(model, training, parts[0])
        states = jax.jit(jax.vmap(self.run.sample_state))(
            jnp.stack([jax.random.key(seed) for seed in seeds])
        )
        if (n := model.n_thresholds) and not model.learned_thresholds:
            thresholds = [
                first_thresholds(feature_columns(model, part), training, n) for part in parts
            ]
            states.others["encoder"]["thresholds"] = jnp.stack(thresholds)
        samples = tuple(jnp.stack([getattr(part, array) for part in parts]) for array in ("x", "y"))

        def step(states: Any, number: Any, samples: Any) -> Any:
            states, losses = jax.vmap(self.run.step, (0, None, 0))(states, number, samples)
            return states, losses.mean()

        with lutjax.use_implementation(
            "xla"
        ):  # other kernels run the networks of a vmap one by one
            self.states, self.loss = Repeated(step, samples)(states, 0, training.steps)

    def accuracy(self, number: int, part: Any, *, hard: bool) -> float:
        """Return the percentage of correctly classified samples."""
        state = jax.tree.map(lambda array: array[number], self.states)
        return 100 * self.run.accuracy(state, part, hard=hard)
