"""Native kernels against plain JAX on this CPU, side by side: `python benchmarks/cpu.py [--only NAME ...] [--write]`.

Calls of the two implementations take turns in one process, on the same arrays, and medians are printed as a table in Markdown:
machines differ, and are shared. `taskset -c 0,1` chooses the cores. `--growth --png FILE` measures instead how the time of a look-up
grows with the bytes of its tables, from 16 MB to 8 GB, and draws it; sizes that need more memory than is free are left out.

`--write` stores the rows in ``docs/benchmarks/cpu.json``, with machine, versions and date.
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
from harness import (
    RECORDED,
    about,
    axes_of,
    in_turns,
    options,
    print_table,
    processor,
    table,
)  # beside this file

import lutjax
from lutjax import optim, wiring
from lutjax.benchmark.language_model import Step
from lutjax.models import GPTConfig
from lutjax.tables.host import free_memory
from lutjax.training import presets
from lutjax.training.lm import Run, TrainingConfig

IMPLEMENTATIONS = {"native": ("native", "xla"), "plain JAX": ("xla",)}
"""What is preferred under each name."""

FILE = RECORDED / "cpu.json"


@dataclasses.dataclass
class Figure:
    """Something that both implementations do.

    Attributes:
      name: of the row.
      step: a function that can be jitted: ``step(state, *args)`` returns the next state and outputs.
      state: before the first step; both implementations go on with it, in its own memory.
      args: all other arrays.
      samples: that one call handles; the time is that of one.
      per_second: whether samples a second are wanted in place of milliseconds.
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
    """Return the median time of a call of each implementation, in seconds, and the state after all calls."""
    programs = {}
    for name, wanted in IMPLEMENTATIONS.items():
        with lutjax.use_implementation(wanted):
            # Each has a function of its own: one that was traced for another implementation is not taken for it.
            jitted = jax.jit(lambda state, *args: figure.step(state, *args), donate_argnums=0)
            programs[name] = jitted.lower(figure.state, *figure.args).compile()
    state = figure.state

    def call(program: Any) -> Any:
        nonlocal state
        state, _ = jax.block_until_ready(program(state, *figure.args))

    calls = {name: functools.partial(call, program) for name, program in programs.items()}
    times = {name: float(np.median(each)) for name, each in in_turns(calls, figure.repeats).items()}
    return times, state


def written(params: Any) -> Any:
    """Return parameters that are not zero any more: memory of zeros that were never written is one page."""
    add = jax.jit(lambda p: jax.tree.map(lambda a: a + jnp.asarray(0.001, a.dtype), p), donate_argnums=0)
    return add(params)


def fully_connected() -> Iterator[Figure]:
    """FC (B, I, O, T, C) = (4096, 32, 32, 16, 10)."""
    keys = jax.random.split(jax.random.key(0), 4)
    anchors = lutjax.sample_anchors(keys[0], 32, 16, 10)
    weights = jax.random.normal(keys[1], (16, 2**10, 32))
    x, dy = (jax.random.normal(key, (4096, 32)) for key in keys[2:])

    def both(state: tuple[()], x: Any, weights: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(lambda x, w: lutjax.lut(x, w, anchors), x, weights)
        return state, (y, pullback(dy))

    yield Figure(
        "FC ffn, forward", lambda s, x, w: (s, lutjax.lut(x, w, anchors)), (), (x, weights), repeats=60
    )
    yield Figure("FC ffn, forward and backward", both, (), (x, weights, dy), repeats=40)


def scored() -> Iterator[Figure]:
    """Scored layer, two rows of each table: 1024 samples, 8 groups of 64 tables of 256 rows of 48 outputs."""
    sizes = {"batch": 1024, "inputs": 48, "outputs": 48, "detectors": 512, "bits": 8, "groups": 8}
    read = lutjax.reads.Confidence()
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (sizes["batch"], 8, sizes["inputs"]))
    weights = jax.random.normal(keys[1], (sizes["detectors"], 2 ** sizes["bits"], sizes["outputs"]))
    anchors = lutjax.sample_anchors(
        keys[2], sizes["inputs"], sizes["detectors"], sizes["bits"], distinct=True, groups=8
    )
    dy = jax.random.normal(keys[3], x.shape)

    def forward(state: tuple[()], x: Any, weights: Any, scalars: Any) -> Any:
        return state, lutjax.scored_lut(x, weights, anchors, scalars, read=read, groups=8)

    def both(state: tuple[()], x: Any, weights: Any, scalars: Any, dy: Any) -> Any:
        y, pullback = jax.vjp(lambda *arrays: forward((), *arrays)[1], x, weights, scalars)
        return state, (y, pullback(dy))

    yield Figure("scored layer 8x64x256x48, batch 1024, forward", forward, (), (x, weights, read.initial()))
    yield Figure(
        "scored layer 8x64x256x48, batch 1024, forward and backward",
        both,
        (),
        (x, weights, read.initial(), dy),
    )


def gates() -> Iterator[Figure]:
    """Layer of 16384 gates, features first, 4096 samples."""
    key, n = jax.random.key(0), 16384
    wires = wiring.balanced(key, n, n)
    readers = lutjax.readers(wires, n)
    coefficients = lutjax.gate_coefficients(jax.random.normal(key, (n, 16)))
    x = jax.random.uniform(key, (n, 4096))

    def layer(x: Any, c: Any) -> Any:
        return lutjax.bilinear_gates(x, c, wires, readers=readers, feature_axis=0)

    def both(state: tuple[()], x: Any, c: Any) -> Any:
        y, pullback = jax.vjp(layer, x, c)
        return state, (y, pullback(y))

    name = "gates 16384, batch 4096"
    yield Figure(f"{name}, forward", lambda s, x, c: (s, layer(x, c)), (), (x, coefficients), repeats=7)
    yield Figure(f"{name}, forward and backward", both, (), (x, coefficients), repeats=7)


def automaton() -> Iterator[Figure]:
    """Training step of the experiment checkerboard."""
    from lutjax.training.automaton_runs import Automaton

    run = Automaton.new({"runs": 1}, "checkerboard").run
    yield _steps_of("automaton checkerboard, step", run)


def demo() -> Iterator[Figure]:
    """Training steps of `lutjax train lm`, and of its twins."""
    for layer in ("scored_lut", "projection_lut", "lut", "dense"):
        yield _steps_of(f"`lutjax train lm`, step, {layer}", _demo(feed_forward=layer))


def _demo(**changes: Any) -> Run:
    values = {**presets.preset("gpt", "demo"), **changes, "select_every": 0}
    text = np.random.default_rng(0).integers(32, 127, 2**20).astype(np.uint8)
    return Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), text)


def _steps_of(name: str, run: Any, count: int = 5) -> Figure:
    """Some steps of a run in one call, as training makes them."""
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
    """Bytes of one sequence that the demo model writes in a second, from tables of floats and of integers."""
    from flax import nnx

    from lutjax.layers import nnx as layers

    n_tokens, prompt = 256, jnp.arange(32, 64)
    for name, changes in (
        ("float32", {}),
        ("int8", {"read": "powers_of_two"}),
        ("dense", {"feed_forward": "dense"}),
    ):
        run = _demo(**changes)
        state = run.init()
        model = run.structure.model(written(state.params), state.others)
        if name == "int8":
            model = layers.quantize(model)
        parts: Any = nnx.split(model)
        graph, arrays = parts

        def write(key: Any, arrays: Any, graph: Any = graph) -> Any:
            key, now = jax.random.split(key)
            return key, nnx.merge(graph, arrays).generate(prompt, n_tokens, key=now)

        key = jax.random.key(0)
        yield Figure(f"one sequence, {name}", write, key, (arrays,), samples=n_tokens, per_second=True)


def language_model() -> Iterator[Figure]:
    """Samples of the published model with C = 6 everywhere, 3.2 GB of tables: training, and forward alone."""
    for batch in (1, 4, 16):
        step = Step(batch, "factored", ffn_anchors=6)
        run = step.run
        state = run.init()
        state = state._replace(params=written(state.params))
        data = run.advance.data

        def trained(carry: Any, data: Any, run: Run = run) -> Any:
            state, number = carry
            state, loss = run.step(state, number, data)
            return (state, number + 1), loss

        def forward(carry: Any, data: Any, run: Run = run, batch: int = batch) -> Any:
            state, number = carry
            starts = jax.random.randint(
                jax.random.fold_in(jax.random.key(0), number), (batch,), 0, data.size - 64
            )
            tokens = data[starts[:, None] + jnp.arange(run.config.context)[None, :]].astype(jnp.int32)
            logits = run.structure.model(state.params, state.others)(tokens, deterministic=True)
            return (state, number + 1), logits

        for name, function in (("training", trained), ("forward", forward)):
            figure = Figure(
                f"LM sample, C = 6, batch {batch}, {name}", function, (state, jnp.int32(0)), (data,), batch
            )
            yield figure
            state = figure.state[0]


FIGURES = {
    "fc": fully_connected,
    "scored": scored,
    "gates": gates,
    "automaton": automaton,
    "demo": demo,
    "decoding": decoding,
    "lm": language_model,
}


# ------------------------------------------------------------------------------------- growth
def growth(largest: int) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yield bytes of tables, what is done, and the time of a row that is read, in seconds, of each implementation."""
    batch, n_inputs, n_tables, n_outputs = 1024, 64, 64, 32
    for n_bits in range(11, 21):
        n_bytes = n_tables * 2**n_bits * n_outputs * 4
        if n_bytes > min(largest, 0.8 * (free_memory() or largest)):
            return
        anchors = lutjax.sample_anchors(jax.random.key(1), n_inputs, n_tables, n_bits)
        weights = written(jnp.zeros((n_tables, 2**n_bits, n_outputs)))

        def inputs(number: Any) -> Any:
            return jax.random.normal(jax.random.fold_in(jax.random.key(2), number), (batch, n_inputs))

        def forward(carry: Any, anchors: Any) -> Any:
            weights, number = carry
            return (weights, number + 1), lutjax.lut(inputs(number), weights, anchors)

        def trained(carry: Any, anchors: Any) -> Any:
            weights, number = carry
            x = inputs(number)
            _, gradient = optim.value_and_grad(lambda p: jnp.sum(lutjax.lut(x, p["weights"], anchors) ** 2))(
                {"weights": weights}
            )
            moved, _ = lutjax.update_table(
                weights, gradient["weights"], 1e-6, optim.SGD(), optim.SGD().init(weights)
            )
            return (moved, number + 1), ()

        state = (weights, jnp.int32(0))
        for name, function in (("forward", forward), ("training", trained)):
            figure = Figure(name, function, state, (anchors,), repeats=9)
            times, state = run(figure)
            yield n_bytes, name, {key: t / (batch * n_tables) for key, t in times.items()}


def draw(found: list[tuple[int, str, dict[str, float]]], path: Path) -> None:
    """Draw the time of a row by the bytes of tables."""
    for axes in axes_of(path):
        for what, style in (("forward", "-"), ("training", "--")):
            for name, color in zip(IMPLEMENTATIONS, ("tab:blue", "tab:orange"), strict=True):
                points = [(n / 2**20, times[name] * 1e9) for n, done, times in found if done == what]
                axes.loglog(
                    *zip(*points, strict=True), style, marker=".", color=color, label=f"{name}, {what}"
                )
        axes.set_xlabel("tables (MB)")
        axes.set_ylabel("ns for a row of 32 floats")
        axes.grid(alpha=0.3, which="both")
        axes.legend()


# ------------------------------------------------------------------------------------- the command
COLUMNS = "figure", *IMPLEMENTATIONS, "unit", "ratio"


def machine() -> str:
    """Return the processor and versions."""
    return f"{processor()}, Python {platform.python_version()}, jax {jax.__version__}, lutjax {lutjax.__version__}"


def page_table(path: Path) -> str:
    """Return the table of a page of the documentation."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    source = f"Medians of alternating calls in one process: `python benchmarks/cpu.py`, {kept['date']}, {kept['machine']}."
    return f"{table(COLUMNS, kept['rows'], len(COLUMNS))}\n{source}\n"


def growth_rows(largest: int, found: list[tuple[int, str, dict[str, float]]]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of the table of growth, and collect their figures."""
    for n_bytes, what, times in growth(largest):
        found.append((n_bytes, what, times))
        native, plain = times.values()
        yield (
            f"{n_bytes / 2**20:.0f}",
            what,
            f"{1e9 * native:.1f}",
            f"{1e9 * plain:.1f}",
            f"{plain / native:.1f}",
        )


def figure_rows(names: list[str], rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yield rows of the table of figures, and collect them."""
    for figure in (figure for name in names for figure in FIGURES[name]()):
        times, figure.state = run(figure)
        values = [
            figure.samples / t if figure.per_second else 1e3 * t / figure.samples for t in times.values()
        ]
        native, plain = times.values()
        shown = [f"{v:.3g}" if v < 100 else f"{v:.0f}" for v in values]
        rows.append((figure.name, *shown, "bytes/s" if figure.per_second else "ms", f"{plain / native:.1f}"))
        yield rows[-1]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument(
        "--growth", action="store_true", help="measure how the time grows with tables instead"
    )
    parser.add_argument(
        "--largest", type=float, default=8, metavar="GB", help="bytes of tables that it goes up to"
    )
    parser.add_argument("--png", type=Path, help="draw the growth into this file")
    parser.add_argument("--write", action="store_true", help=f"store the rows in {FILE.name}")
    arguments = parser.parse_args()
    if arguments.write and arguments.only != list(FIGURES):
        parser.error("--write keeps all rows: leave --only out.")
    if arguments.png and not arguments.growth:
        parser.error("--png draws the growth: add --growth.")
    print(f"{machine()}\n", flush=True)
    if arguments.growth:
        found: list[tuple[int, str, dict[str, float]]] = []
        names = ["tables, MB", "", *(f"{name}, ns/row" for name in IMPLEMENTATIONS), "ratio"]
        print_table(names, growth_rows(int(arguments.largest * 2**30), found), 2)
        if arguments.png:
            draw(found, arguments.png)
        return
    rows: list[tuple[str, ...]] = []
    print_table(COLUMNS, figure_rows(arguments.only, rows))
    if arguments.write:
        kept = {"machine": machine(), "date": about()["date"], "rows": rows}
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
