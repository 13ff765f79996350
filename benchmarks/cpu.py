"""Native kernels next to plain JAX on this CPU.

Run `python benchmarks/cpu.py [--only NAME ...] [--write]`.

Calls of both implementations alternate in one process, on the same arrays; a Markdown table shows
the medians. Machines differ, and are shared: `taskset -c 0,1` selects the cores. `--growth --png
FILE` measures and draws the lookup time by table size instead, from 16 MB to 8 GB, as far as memory
allows. `--write` stores the rows in ``docs/benchmarks/cpu.json``, with machine, versions and date.
"""

import dataclasses
import functools
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import RECORDED, about, draw_axes, parse, print_table, processor, table, time_in_turns

import lutjax
from lutjax import optim
from lutjax.benchmark import measurements, shapes
from lutjax.benchmark.language_model import Step
from lutjax.models import GPTConfig
from lutjax.tables.host import free_memory
from lutjax.training import presets
from lutjax.training.lm import Run, TrainingConfig

IMPLEMENTATIONS = {"native": ("native", "xla"), "plain JAX": ("xla",)}  # in order of preference
FILE = RECORDED / "cpu.json"


@dataclasses.dataclass
class Figure:
    """A measured function.

    Attributes:
      name: name of the row.
      step: a function for `jax.jit`: ``step(state, *args)`` returns the next state and outputs.
      state: initial state; both implementations continue with it, in its own memory.
      args: all other arrays.
      samples: samples per call; the time is per sample.
      per_second: report samples per second instead of milliseconds.
      repeats: timed calls of each implementation.
    """

    name: str
    step: Callable[..., tuple[Any, Any]]
    state: Any = ()
    args: tuple[Any, ...] = ()
    samples: float = 1
    per_second: bool = False
    repeats: int = 15


def run(figure: Figure) -> tuple[dict[str, float], Any]:
    """Return the median seconds per call of each implementation, and the last state."""
    programs = {}
    for name, wanted in IMPLEMENTATIONS.items():
        with lutjax.use_implementation(wanted):
            # A new function prevents JAX from reusing the trace for the other implementation.
            jitted = jax.jit(lambda state, *args: figure.step(state, *args), donate_argnums=0)
            programs[name] = jitted.lower(figure.state, *figure.args).compile()
    state = figure.state

    def call(program: Any) -> Any:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, *figure.args))

    calls = {name: functools.partial(call, program) for name, program in programs.items()}
    times = {
        name: float(np.median(each)) for name, each in time_in_turns(calls, figure.repeats).items()
    }
    return times, state


def write_pages(params: Any) -> Any:
    """Return nonzero parameters. Unwritten zeros would share one memory page."""
    add = jax.jit(
        lambda p: jax.tree.map(lambda a: a + jnp.asarray(0.001, a.dtype), p), donate_argnums=0
    )
    return add(params)


def layers(shape: str, name: str, *repeats: int) -> Iterator[Figure]:
    """Yield the forward pass and both passes of a `lutjax bench` shape."""
    parsed = shapes.parse(shape)
    assert isinstance(parsed, shapes.OfOp)
    passes = {"forward": shapes.FORWARD, "forward and backward": shapes.DENSE}
    for (title, row), n in zip(passes.items(), repeats, strict=True):
        function = measurements.function(parsed, row, "float32")
        args = jax.jit(functools.partial(measurements.arguments, parsed, row, "float32"))()

        def step(state: tuple[()], *args: Any, function: Any = function) -> Any:
            return state, function(*args)

        yield Figure(f"{name}, {title}", step, (), args, repeats=n)


def automaton() -> Iterator[Figure]:
    """Training step of the experiment checkerboard."""
    from lutjax.training.automaton_runs import Automaton

    run = Automaton.create({"runs": 1}, "checkerboard").run
    yield _steps_of("automaton checkerboard, step", run)


def demo() -> Iterator[Figure]:
    """Training steps of `lutjax train lm` with each feed-forward layer."""
    for layer in ("scored_lut", "projection_lut", "lut", "dense"):
        yield _steps_of(f"`lutjax train lm`, step, {layer}", _demo(feed_forward=layer))


def _demo(**changes: Any) -> Run:
    values = {**presets.preset("gpt", "demo"), **changes, "select_every": 0}
    text = np.random.default_rng(0).integers(32, 127, 2**20).astype(np.uint8)
    return Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), text)


def _steps_of(name: str, run: Any, count: int = 5) -> Figure:
    """Return several training steps in one call, as in training."""
    step, data = run.advance.step, run.advance.data

    def steps(carry: Any, data: Any) -> Any:
        state, first = carry

        def one(i: Any, carry: Any) -> Any:
            state, total = carry
            state, loss = step(state, first + i, data)
            return state, total + loss

        state, total = jax.lax.fori_loop(0, count, one, (state, jnp.float32(0)))
        return (state, first + count), total

    return Figure(name, steps, (run.init(), jnp.int32(0)), (data,), samples=count)


def decoding() -> Iterator[Figure]:
    """Bytes per second generated by the demo model, with float and int8 tables."""
    from flax import nnx

    from lutjax.layers import nnx as layers

    n_tokens, prompt = 256, jnp.arange(32, 64)
    variants = {
        "float32": {},
        "int8": {"read": "powers_of_two"},
        "dense": {"feed_forward": "dense"},
    }
    for name, changes in variants.items():
        run = _demo(**changes)
        state = run.init()
        model = run.structure.model(write_pages(state.params), state.others)
        if name == "int8":
            model = layers.quantize(model)
        parts: Any = nnx.split(model)
        graph, arrays = parts

        def write(key: Any, arrays: Any, graph: Any = graph) -> Any:
            key, now = jax.random.split(key)
            return key, nnx.merge(graph, arrays).generate(prompt, n_tokens, key=now)

        key = jax.random.key(0)
        yield Figure(
            f"one sequence, {name}", write, key, (arrays,), samples=n_tokens, per_second=True
        )


def language_model() -> Iterator[Figure]:
    """Samples of the published model with C = 6 and 3.2 GB of tables, in training and forward."""
    for batch in (1, 4, 16):
        step = Step(batch, "factored", ffn_anchors=6)
        run = step.run
        state = run.init()
        state = state._replace(params=write_pages(state.params))
        data = run.advance.data

        def trained(carry: Any, data: Any, run: Run = run) -> Any:
            state, number = carry
            state, loss = run.step(state, number, data)
            return (state, number + 1), loss

        def forward(carry: Any, data: Any, run: Run = run, batch: int = batch) -> Any:
            state, number = carry
            key = jax.random.fold_in(jax.random.key(0), number)
            starts = jax.random.randint(key, (batch,), 0, data.size - 64)
            tokens = data[starts[:, None] + jnp.arange(run.config.context)[None, :]].astype(
                jnp.int32
            )
            logits = run.structure.model(state.params, state.others)(tokens, deterministic=True)
            return (state, number + 1), logits

        for name, function in (("training", trained), ("forward", forward)):
            title, start = f"LM sample, C = 6, batch {batch}, {name}", (state, jnp.int32(0))
            yield (figure := Figure(title, function, start, (data,), batch))
            state = figure.state[0]


FIGURES: dict[str, Callable[[], Iterator[Figure]]] = {
    "fc": lambda: layers("fc:4096,32,32,16,10", "FC ffn", 60, 40),
    "scored": lambda: layers(
        "scored:1024,48,48,512,8,8", "scored layer 8x64x256x48, batch 1024", 15, 15
    ),
    "gates": lambda: layers("gates:4096,16384,16384", "gates 16384, batch 4096", 7, 7),
    "automaton": automaton,
    "demo": demo,
    "decoding": decoding,
    "lm": language_model,
}


# ------------------------------------------------------------------------------------- growth
def growth(largest: int) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yield table bytes, pass, and seconds per accessed row for each implementation."""
    batch, n_inputs, n_tables, n_outputs = 1024, 64, 64, 32
    for n_bits in range(11, 21):
        n_bytes = n_tables * 2**n_bits * n_outputs * 4
        if n_bytes > min(largest, 0.8 * (free_memory() or largest)):
            return
        anchors = lutjax.sample_anchors(jax.random.key(1), n_inputs, n_tables, n_bits)
        weights = write_pages(jnp.zeros((n_tables, 2**n_bits, n_outputs)))

        def inputs(number: Any) -> Any:
            return jax.random.normal(
                jax.random.fold_in(jax.random.key(2), number), (batch, n_inputs)
            )

        def forward(carry: Any, anchors: Any) -> Any:
            weights, number = carry
            return (weights, number + 1), lutjax.lut(inputs(number), weights, anchors)

        def trained(carry: Any, anchors: Any) -> Any:
            weights, number = carry
            x = inputs(number)
            loss = lambda p: jnp.sum(lutjax.lut(x, p["weights"], anchors) ** 2)  # noqa: E731
            _, gradient = optim.value_and_grad(loss)({"weights": weights})
            rule = optim.SGD()
            moved, _ = lutjax.update_table(
                weights, gradient["weights"], 1e-6, rule, rule.init(weights)
            )
            return (moved, number + 1), ()

        state = (weights, jnp.int32(0))
        for name, function in (("forward", forward), ("training", trained)):
            figure = Figure(name, function, state, (anchors,), repeats=9)
            times, state = run(figure)
            yield n_bytes, name, {key: t / (batch * n_tables) for key, t in times.items()}


def draw(found: list[tuple[int, str, dict[str, float]]], path: Path) -> None:
    """Draw the time per row by table size."""
    for axes in draw_axes(path):
        for what, style in (("forward", "-"), ("training", "--")):
            for name, color in zip(IMPLEMENTATIONS, ("tab:blue", "tab:orange"), strict=True):
                points = [
                    (n / 2**20, times[name] * 1e9) for n, done, times in found if done == what
                ]
                look = {"marker": ".", "color": color, "label": f"{name}, {what}"}
                axes.loglog(*zip(*points, strict=True), style, **look)
        axes.set_xlabel("tables (MB)")
        axes.set_ylabel("ns for a row of 32 floats")
        axes.grid(alpha=0.3, which="both")
        axes.legend()


# ------------------------------------------------------------------------------------- the command
COLUMNS = "figure", *IMPLEMENTATIONS, "unit", "ratio"


def machine() -> str:
    """Return the processor and versions."""
    return (
        f"{processor()}, Python {platform.python_version()}, jax {jax.__version__}, lutjax "
        f"{lutjax.__version__}"
    )


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    source = (
        "Medians of alternating calls in one process: `python benchmarks/cpu.py`, "
        f"{kept['date']}, {kept['machine']}."
    )
    return f"{table(COLUMNS, kept['rows'], len(COLUMNS))}\n{source}\n"


def growth_rows(
    largest: int, found: list[tuple[int, str, dict[str, float]]]
) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the growth table, and collect their figures."""
    for n_bytes, what, times in growth(largest):
        found.append((n_bytes, what, times))
        native, plain = times.values()
        ns = f"{1e9 * native:.1f}", f"{1e9 * plain:.1f}", f"{plain / native:.1f}"
        yield f"{n_bytes / 2**20:.0f}", what, *ns


def figure_rows(names: list[str], rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the figures, and collect them."""
    for figure in (figure for name in names for figure in FIGURES[name]()):
        times, figure.state = run(figure)
        values = [
            figure.samples / t if figure.per_second else 1e3 * t / figure.samples
            for t in times.values()
        ]
        native, plain = times.values()
        shown = [f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in values]
        rows.append(
            (figure.name, *shown, "bytes/s" if figure.per_second else "ms", f"{plain / native:.1f}")
        )
        yield rows[-1]


def main() -> None:
    given = parse(
        __doc__,
        only=(FIGURES, "figures"),
        growth=(False, "measure the time by table size instead"),
        largest=(8.0, "largest table size, in GB"),
        png=(Path, "draw the growth into this file"),
        write=(False, f"store the rows in {FILE.name}"),
    )
    if given.write and given.only != list(FIGURES):
        raise SystemExit("--write keeps all rows: leave --only out.")
    if given.png and not given.growth:
        raise SystemExit("--png draws the growth: add --growth.")
    print(f"{machine()}\n", flush=True)
    if given.growth:
        found: list[tuple[int, str, dict[str, float]]] = []
        names = ["tables, MB", "", *(f"{name}, ns/row" for name in IMPLEMENTATIONS), "ratio"]
        print_table(names, growth_rows(int(given.largest * 2**30), found), 2)
        if given.png:
            draw(found, given.png)
        return
    rows: list[tuple[str, ...]] = []
    print_table(COLUMNS, figure_rows(given.only, rows))
    if given.write:
        kept = {"machine": machine(), "date": about()["date"], "rows": rows}
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
