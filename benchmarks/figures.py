"""Speed on this machine: `python benchmarks/figures.py [--only NAME ...]`.

Medians over repeated runs after a warm-up, with the 20th and 80th percentile. Compare figures within one run only:
machines differ, and change. `taskset -c 0` limits digit inference to one core.
"""

import functools
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from harness import about, parse, print_table, processor, time_calls  # beside this file

import lutjax
from lutjax.benchmark import measurements, shapes
from lutjax.dispatch.registry import devices_of

Row = tuple[str, str, float | None, float, float, float]
"""Name, unit, performance goal, and percentiles 20, 50 and 80."""


def seconds(call: Callable[[], object], *, repeats: int = 30, calls: int = 1) -> np.ndarray:
    """Return percentiles 20, 50 and 80 of the time per call."""
    return np.percentile(time_calls(call, repeats, calls), [20, 50, 80])


def gate_layers() -> Iterator[Row]:
    """Gate layers, features first: shapes of `lutjax bench`."""
    for n_gates, batch, goals in ((2000, 100, (0.10, 0.40)), (16384, 4096, (30, 180))):
        shape = shapes.parse(f"gates:{batch},{n_gates},{n_gates}")
        assert isinstance(shape, shapes.OfOp)
        names = {shapes.FORWARD: "forward", shapes.DENSE: "forward + backward"}
        repeats, calls = (30, 20) if batch == 100 else (7, 1)
        for (row, name), goal in zip(names.items(), goals, strict=True):
            args = jax.jit(functools.partial(measurements.arguments, shape, row, "float32"))()
            call = functools.partial(jax.jit(measurements.function(shape, row, "float32")), *args)
            figures = seconds(call, repeats=repeats, calls=calls)
            yield (f"{n_gates} gates, batch {batch}, {name}", "ms", goal, *(figures * 1e3))


def digits() -> Iterator[Row]:
    """A training step of 3 x 2000 gates on scikit-learn's digits, and the hard network on one core."""
    from lutjax.models import LogicClassifierConfig
    from lutjax.training.classifier import Run, TrainingConfig
    from lutjax.training.samples import load_digits, split

    train, _ = split(load_digits(), 0)
    for name, sizes, augment in (
        ("3x2000 gates", {}, 0.0),
        ("3x2000 gates, with augmentation", {}, 1.0),
        ("3x2000 light gates", {"tables": "light"}, 0.0),
    ):
        run = Run(LogicClassifierConfig(64, 10, **sizes), TrainingConfig(augment=augment), train)
        state, times = run.init(), []
        for first in range(0, 1600, 100):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(run.advance(state, first, 100))
            times.append((time.perf_counter() - start) / 100)
        figures = np.percentile(times[1:], [20, 50, 80]) * 1e3
        yield (f"digits step, {name}", "ms", 1.5, *figures)
    packed = run.structure.model(state.params, state.others).packed()
    pixels = jnp.asarray(np.resize(train.x, (2**17, 64)).astype(np.uint8))
    floats = pixels.astype(jnp.float32)
    words = jax.random.bits(jax.random.key(0), (192, 2**12), jnp.uint32)
    for name, call, n_images, goal in (
        ("from packed bits", lambda: packed.from_words(words), 2**17, 7),
        ("from pixels, uint8", lambda: packed(pixels), 2**17, 4),
        ("from pixels, float32", lambda: packed(floats), 2**17, 4),
        ("from pixels, 100 003 of them", lambda: packed(pixels[:100003]), 100003, 4),
    ):
        figures = n_images / seconds(call, repeats=20)[::-1] / 1e6
        yield (f"digits, {name}", "M images/s", goal, *figures)


def automata() -> Iterator[Row]:
    """Training steps of `lutjax train ca`: time and planned temporary memory; the Game of Life in packed words."""
    from lutjax.training.automaton_runs import Automaton

    several = 24 if jax.default_backend() == "gpu" else 2
    steps: list[tuple[str, str, dict[str, int]]] = [
        (name, name, {"runs": 1})
        for name in ("life", "checkerboard", "checkerboard-async", "lizard", "letter")
    ]
    steps.append((f"lizard, {several} runs", "lizard", {"runs": several}))
    steps += [(f"letter, every {n or 'half'}", "letter", {"runs": 1, "keep_every": n}) for n in (4, 0)]
    for what, name, fields in steps:
        run = Automaton.new(fields, name).run
        program, advance = run.advance.compiled(run.abstract())
        state, first, times = run.init(), 0, []
        for _ in range(11):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(advance(state, first, 4))
            times.append((time.perf_counter() - start) / 4)
            first += 4
        yield (f"automaton step, {what}", "ms", None, *np.percentile(times[1:], [20, 50, 80]) * 1e3)
        memory = program.memory_analysis().temp_size_in_bytes / 1e6
        yield (f"automaton temporaries, {what}", "MB", None, *[memory] * 3)
    yield from _life_in_words()


def _life_in_words() -> Iterator[Row]:
    """Game of Life cells per second, 32 per word."""
    from lutjax.circuits import Builder, arithmetic
    from lutjax.models import PackedAutomaton

    builder = Builder()
    *near, cell = (bit for (bit,) in builder.input("x", 9))
    one, two, four, eight = arithmetic.popcount(builder, near)
    none = builder.gate([four, eight], 0b0001)
    alive = builder.gate([two, none, builder.gate([one, cell], 0b1110)], 0b10000000)
    builder.output("y", [[alive]])
    rule = PackedAutomaton(builder.circuit({"kind": "automaton", "channels": 1, "periodic": True}))
    for side in (1024, 16384):
        n_steps = 2**28 // side**2 or 4
        words = jax.random.bits(jax.random.key(0), (1, side, side // 32), jnp.uint32)
        rates = (
            n_steps * side**2 / seconds(lambda w=words, n=n_steps, s=side: rule.steps(w, s, n), repeats=10)
        )
        yield (f"Game of Life, {side} x {side} cells", "G cells/s", None, *rates[::-1] / 1e9)


def overhead() -> Iterator[Row]:
    """Overhead of an eager call, and of kernel selection."""
    weights = jnp.ones((5, 4, 2))
    d = lutjax.detect_signs(jnp.ones((3, 5, 2)))
    kernel = jax.jit(lutjax.reference.lookup)
    inner = seconds(lambda: kernel(weights, d), calls=200)
    eager = seconds(lambda: lutjax.lookup(weights, d), calls=200)
    yield ("eager lookup above a jitted function", "us", 150, *(eager - inner[1]) * 1e6)
    # A call only pays for this part. `resolve` also traces the op, and serves explanations.
    registry = lutjax.kernel_registry
    (made,) = registry.calls_of("lookup", weights, d)
    request, names = made.request("forward", devices_of([weights])[0], None), registry.request("lookup", None)
    again = seconds(lambda: registry.resolve_request(request, names), calls=1000)
    yield ("choice of an implementation, made before", "us", 10, *again * 1e6)
    explained = seconds(lambda: registry.resolve("lookup", weights, d), calls=100)
    yield ("resolve, with a trace of the op", "us", None, *explained * 1e6)


def imports() -> Iterator[Row]:
    """`import lutjax` in a process that has imported jax."""
    code = "import jax, time; t = time.perf_counter(); import lutjax; print(time.perf_counter() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(9)
    ]
    yield ("import lutjax, on top of jax", "ms", 60, *np.percentile(times, [20, 50, 80]) * 1e3)


FIGURES = {
    "gates": gate_layers,
    "digits": digits,
    "automata": automata,
    "overhead": overhead,
    "import": imports,
}


def main() -> None:
    given = parse(__doc__, only=(FIGURES, "figures"))
    print(f"{processor()}, Python {platform.python_version()}, {about()}\n")
    rows = (
        (name, *(f"{p:.3f}" for p in percentiles), goal or "", unit)
        for chosen in given.only
        for name, unit, goal, *percentiles in FIGURES[chosen]()
    )
    print_table("figure | p20 | p50 | p80 | goal | unit", rows)


if __name__ == "__main__":
    main()
