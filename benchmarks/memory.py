"""Memory layers: loss with and without a memory, loss by table size, and times of product keys.

    python benchmarks/memory.py train --text FILE --seconds 40 --json memory.jsonl python
    benchmarks/memory.py sizes --text FILE --steps 1000 --rows 256,1024,4096,16384,65536 --json
    memory.jsonl python benchmarks/memory.py keys --json memory.jsonl python benchmarks/memory.py
    table --json memory.jsonl --picture docs/memory.png

The first three append one line of JSON per result to the file; `table` prints them in Markdown and
draws the picture.

`train` compares models with and without a memory, with equally many parameters read per token, in
equal time:

1. Steps of both models alternate while they are timed. Each model gets as many steps as fit into
the seconds (by default the time of the preset's steps without a memory), and
   its schedule ends with the last step.
2. The first seed selects the learning rate of the memory rows (`--rates`) by the lowest validation
loss after a `--share` of the time. Fast rates learn sooner and overfit
   later, so a small share may select too fast a rate; `--share 1` trains in full.
3. For each seed both models train on everything except the test part, and are tested there once.
Seeds determine initial values and batches.

Seconds exclude compilation and tests; programs compile in parallel, one per model and rate. `--text
python` is the source of all installed packages. `--processor` counts processor time of all threads
instead of wall-clock time, so that other programs do not matter. On a GPU, for three minutes of
steps: `python benchmarks/memory.py train --text python --seconds 25 --json memory.jsonl`.
"""

import importlib.util
import itertools
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import (
    about,
    add_line,
    draw_axes,
    parse,
    read_lines,
    table as markdown_table,
    time_calls,
)
from language_models import (
    OPTIONS,
    describe,
    parameters_read,
    text_of,
    values_of,
)  # beside this file

from lutjax import optim
from lutjax.layers.nnx import ProductKeyMemory
from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.lm import Evaluation, Run, TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import Text

Keep = Callable[[dict[str, Any]], None]
"""Print a result, and append it to a file."""

Clock = Callable[[], float]

CHUNK = 500  # steps per call
MOST_STEPS, MOST_SEEDS = 10_000_000, 200
"""Limits: a seed selects the batches of later steps, counted in int32."""


def processor_seconds() -> float:
    """Return the processor time of all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_of(values: dict[str, Any], text: Text, *, validate: bool) -> Run:
    """Return the run of a preset's values; `validate`: hold out the validation part."""
    train = text.train if validate else np.concatenate([text.train, text.validation])
    return Run(
        presets.make(GPTConfig, values),
        presets.make(TrainingConfig, values),
        train,
        text.validation,
    )


def with_memory(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a model with a memory and fewer tables, with nearly as many parameters read per token.

    Raises:
      SystemExit: no model within five percent.
    """

    def read(values: dict[str, Any]) -> int:
        return parameters_read(presets.make(GPTConfig, values))

    own: GPTConfig = presets.make(GPTConfig, values)
    heads = own.lut_heads if own.feed_forward == "projection_lut" else 1
    most = own.lut_tables * own.lut_heads // heads
    each = [
        {**values, "memory": True, "lut_heads": heads, "lut_tables": n} for n in range(1, most + 1)
    ]
    found = min(each, key=lambda other: abs(read(other) - read(values)))
    if abs(read(found) / read(values) - 1) > 0.05:
        raise SystemExit(
            f"a token reads {read(values):,} parameters without a memory, and at best "
            f"{read(found):,} with one: take a smaller memory (--set memory_width=4), or more "
            "tables (--set lut_tables=...)."
        )
    return found


class Program:
    """A run with its compiled programs, which serve all seeds.

    Args:
      run: a run with traced steps.
      like: program with the same model and initial values.
    """

    def __init__(self, run: Run, like: "Program | None" = None):
        self.run = run
        self._advance = run.advance.compile_program(run.abstract())[1]
        self._draw = (
            jax.jit(run.sample_state).lower(jax.random.key(0)).compile()
            if like is None
            else like._draw
        )

    def init(self, seed: int) -> State:
        """Return the state before the first step."""
        state: State = self._draw(jax.random.key(seed))
        return state

    def advance(self, state: State, first: int, count: int, clock: Clock) -> tuple[State, float]:
        """Return the state after some steps, and their seconds."""
        start = clock()
        state, loss = self._advance(state, first, count)
        float(loss)
        return state, clock() - start

    def train(self, seed: int, clock: Clock) -> tuple[State, float]:
        """Return the state after all steps, and their seconds.

        `seed`: of initial values and batches.
        """
        state, seconds = jax.block_until_ready(self.init(seed)), 0.0
        steps = self.run.training.steps
        for first in range(0, steps, CHUNK):
            count = min(CHUNK, steps - first)
            state, took = self.advance(state, seed * MOST_STEPS + first, count, clock)
            seconds += took
        return state, seconds


def compile_runs(runs: Sequence[Run], like: Sequence[Program | None]) -> list[Program]:
    """Return the programs of runs, compiled in parallel; see `Program` for `like`."""
    start = time.perf_counter()
    for run in runs:
        run.advance.trace(run.abstract())
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(Program, runs, like))
    print(
        f"programs of {len(runs)} runs compiled in {time.perf_counter() - start:.0f} s", flush=True
    )
    return found


def time_steps_in_turns(
    programs: dict[str, Program], clock: Clock, n_turns: int = 8, n_steps: int = 25
) -> dict[str, float]:
    """Return the median seconds per step of alternating runs."""
    states = {
        name: program.advance(program.init(0), 0, 5, clock)[0] for name, program in programs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(n_turns):
        for name, program in programs.items():
            states[name], took = program.advance(states[name], 5 + turn * n_steps, n_steps, clock)
            times[name].append(took / n_steps)
    return {name: float(np.median(each)) for name, each in times.items()}


def sizes_of(run: Run) -> dict[str, int]:
    """Return steps and parameters of a result."""
    config = run.config
    assert isinstance(config, GPTConfig)
    return {
        "steps": run.training.steps,
        "parameters": run.structure.n_parameters(),
        "read": parameters_read(config),
    }


def train(given: Any, values: dict[str, Any], text: Text, clock: Clock, keep: Keep) -> None:
    """Compare models with and without a memory in equal time, for each seed; see the module docstring."""
    each = {"without": values, "with": with_memory(values)}
    runs = [run_of(v, text, validate=True) for v in each.values()]
    probes = dict(zip(each, compile_runs(runs, [None, None]), strict=True))
    per_step = time_steps_in_turns(probes, clock)
    seconds = given.seconds or values["steps"] * per_step["without"]
    steps = {name: max(round(seconds / one), 1) for name, one in per_step.items()}
    each = {name: {**v, "steps": steps[name]} for name, v in each.items()}
    fewer = max(round(given.share * steps["with"]), 1)
    tried = {
        rate: run_of({**each["with"], "steps": fewer, "memory_rate": rate}, text, validate=True)
        for rate in given.rates
    }
    *of_rates, without = compile_runs(
        [*tried.values(), run_of(each["without"], text, validate=False)],
        [*[probes["with"]] * len(tried), probes["without"]],
    )
    tests = {
        name: Evaluation(run.structure, run.config.context)
        for name, run in (("with", of_rates[0].run), ("without", without.run))
    }

    def test(name: str, state: State, part: Any) -> float:
        return tests[name](state.params, state.others, part, max_windows=given.windows)

    losses = {}
    seed = given.seeds[0]
    for rate, program in zip(given.rates, of_rates, strict=True):
        state, took = program.train(seed, clock)
        losses[rate] = test("with", state, text.validation)
        row = {
            "what": "rate",
            "rate": rate,
            "seed": seed,
            "seconds": took,
            "validation": losses[rate],
        }
        keep({**row, **sizes_of(program.run)})
    rate = min(losses, key=lambda rate: losses[rate])
    last = run_of({**each["with"], "memory_rate": rate}, text, validate=False)
    (within,) = compile_runs([last], [probes["with"]])
    for seed in given.seeds:
        for name, program in (("without", without), ("with", within)):
            state, took = program.train(seed, clock)
            times = {
                "ms_per_step": 1e3 * per_step[name],
                "seconds": took,
                "loss": test(name, state, text.test),
            }
            row = {"what": "train", "model": name, "seed": seed, **times, **sizes_of(program.run)}
            keep(row | ({"memory_rate": rate} if name == "with" else {}))


def sizes(
    values: dict[str, Any], text: Text, rows: list[int], seed: int, clock: Clock, keep: Keep
) -> None:
    """Train with several table sizes for equally many steps, and keep validation losses."""
    for n in (0, *rows):
        run = run_of(
            {**with_memory(values), "memory_rows": n} if n else values, text, validate=True
        )
        config = run.config
        assert isinstance(config, GPTConfig)
        n_bytes = 4 * n * len(config.memory_orders) * config.memory_heads * config.memory_width
        (program,) = compile_runs([run], [None])
        state, took = program.train(seed, clock)
        loss = run.evaluate(state, text.validation)
        keep(
            {
                "what": "sizes",
                "rows": n,
                "bytes": n_bytes,
                "seconds": took,
                "loss": loss,
                **sizes_of(run),
            }
        )


# ------------------------------------------------------------------------------------- product keys
def simple(layer: Any, x: jax.Array) -> jax.Array:
    """Return a simple `ProductKeyMemory` implementation's output: all best-key pairs, and gathered rows."""
    spec, n, k = layer.spec, x.shape[0], layer.spec.k
    queries = (x @ layer.query_kernel[...]).reshape(n, spec.heads, 2, spec.key_size)
    inverse = jax.lax.rsqrt(jnp.mean(queries**2, -1, keepdims=True) + 1e-6)
    scores = jnp.einsum(
        "bhsc,hsnc->bhsn", queries * inverse * layer.query_scale[...], layer.half_keys[...]
    )
    best, ids = jax.lax.top_k(scores, k)
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).reshape(n, spec.heads, k * k)
    rows = (ids[:, :, 0, :, None] * spec.n_keys + ids[:, :, 1, None, :]).reshape(
        n, spec.heads, k * k
    )
    best, which = jax.lax.top_k(sums, k)
    rows = jnp.take_along_axis(rows, which, -1)
    return jnp.einsum("bhk,bhko->bo", jax.nn.softmax(best), layer.weights[...][0][rows])


def in_torch(
    layer: Any, x: np.ndarray, target: np.ndarray
) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return calls of the same layer in PyTorch, with an embedding bag, and Adagrad by dense gradients."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec, n, k = layer.spec, len(x), layer.spec.k

    def array(a: Any) -> Any:
        return torch.tensor(np.asarray(a), device=device)

    kernel, scale, half_keys, table = (
        array(a[...]).requires_grad_()
        for a in (layer.query_kernel, layer.query_scale, layer.half_keys, layer.weights)
    )
    inputs, wanted = array(x), array(target)

    def forward() -> Any:
        queries = (inputs @ kernel).reshape(n, spec.heads, 2, spec.key_size)
        queries = queries * torch.rsqrt((queries**2).mean(-1, keepdim=True) + 1e-6) * scale
        best, ids = torch.einsum("bhsc,hsnc->bhsn", queries, half_keys).topk(k)
        sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).reshape(n, spec.heads, k * k)
        rows = (ids[:, :, 0, :, None] * spec.n_keys + ids[:, :, 1, None, :]).reshape(
            n, spec.heads, k * k
        )
        best, which = sums.topk(k)
        rows, shares = rows.gather(-1, which).reshape(n, -1), best.softmax(-1).reshape(n, -1)
        return torch.nn.functional.embedding_bag(
            rows, table[0], per_sample_weights=shares, mode="sum"
        )

    optimizer = torch.optim.Adagrad([kernel, scale, half_keys, table], 0.01)

    def synchronize(call: Callable[[], Any]) -> Callable[[], Any]:
        def once() -> None:
            call()
            if device == "cuda":
                torch.cuda.synchronize()

        return once

    def outputs() -> Any:
        with torch.no_grad():
            return forward()

    def step() -> None:
        optimizer.zero_grad()
        ((forward() - wanted) ** 2).mean().backward()
        optimizer.step()

    # Pairs of keys whose sums differ in the last digit may change places at the end of the top k.
    differences = np.abs(outputs().cpu().numpy() - layer(x)).max(-1)
    assert np.mean(differences < 1e-4) > 0.99, differences
    return {("forward", "PyTorch"): synchronize(outputs), ("step", "PyTorch"): synchronize(step)}


def keys(keep: Keep, n_keys: int = 1024, features: int = 64, batch: int = 512) -> None:
    """Measure a memory with a million rows, top 32 and 4 heads: forward and a training step, next to `simple`, and PyTorch if installed.

    Products are float32, the default in PyTorch: lower precision selects other keys.
    """
    layer = ProductKeyMemory(features, features, n_keys=n_keys, rngs=nnx.Rngs(0))
    x, target = jax.random.normal(jax.random.key(1), (2, batch, features))
    np.testing.assert_allclose(layer(x), simple(layer, x), atol=1e-5)
    graph, state = nnx.split(layer)  # nnx.jit would also copy the table into its results
    forwards = {
        "lutjax": jax.jit(lambda state, x: nnx.merge(graph, state)(x)),
        "simple": jax.jit(lambda state, x: simple(nnx.merge(graph, state), x)),
    }
    tx = optim.Optimizer(optim.RowAdagrad(), 0.01)
    optimizer = optim.nnx.Optimizer(layer, tx)

    def loss(layer: Any, x: Any, target: Any) -> jax.Array:
        return jnp.mean((layer(x) - target) ** 2)

    def step(layer: Any, optimizer: Any, x: Any, target: Any) -> jax.Array:
        value, gradients = optim.nnx.value_and_grad(loss)(layer, x, target)
        optimizer.update(layer, gradients)
        return value

    def simple_step(layer: Any, total: Any, x: Any, target: Any) -> tuple[Any, jax.Array]:
        # The same rule by dense gradients: Adagrad with one scale per row.
        def of(arrays: Any) -> jax.Array:
            return loss(lambda x: simple(nnx.merge(graph, arrays), x), x, target)

        graph, arrays = nnx.split(layer)
        value, gradients = jax.value_and_grad(of)(arrays)
        square = jnp.mean(gradients["weights"][...] ** 2, -1, keepdims=True)
        total = total + square
        moved = jax.tree.map(lambda p, g: p - 0.01 * g, arrays, gradients)
        scale = jax.lax.rsqrt(total + 1e-20)
        moved["weights"].set_value(
            arrays["weights"][...] - 0.01 * gradients["weights"][...] * scale
        )
        nnx.update(layer, moved)
        return total, value

    total = jnp.zeros((1, n_keys**2, 1))
    compiled = nnx.jit(step, donate_argnums=(0, 1))
    compiled_simple = nnx.jit(simple_step, donate_argnums=(0, 1))
    held = [total]

    def simple_once() -> jax.Array:
        held[0], value = compiled_simple(layer, held[0], x, target)
        return value

    calls = {
        ("forward", "lutjax"): lambda: forwards["lutjax"](state, x),
        ("forward", "simple"): lambda: forwards["simple"](state, x),
        ("step", "lutjax"): lambda: compiled(layer, optimizer, x, target),
        ("step", "simple"): simple_once,
    }
    if importlib.util.find_spec("torch") is not None:
        calls |= in_torch(layer, np.asarray(x), np.asarray(target))
    for (direction, name), call in calls.items():
        wall, used = (
            min(time_calls(call, 8, clock=clock))
            for clock in (time.perf_counter, processor_seconds)
        )
        row = {
            "what": "keys",
            "direction": direction,
            "name": name,
            "rows": n_keys**2,
            "batch": batch,
        }
        keep({**row, "seconds": wall, "seconds_of_processor": used})


# ------------------------------------------------------------------------------------- results
def page_table(path: Path, what: str) -> str:
    """Return the table with one row kind for a documentation page."""
    rows = read_lines(path)
    return table([row for row in rows if row["what"] == what]).strip() + "\n"


def table(found: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    lines: list[str] = []
    if tried := [r for r in found if r["what"] == "rate"]:
        cells = ((f"{r['rate']:g}", r["steps"], f"{r['validation']:.4f}") for r in tried)
        lines.append(markdown_table("rate of the rows | steps | validation loss", cells, 3))
    if runs := [r for r in found if r["what"] == "train"]:
        of_processor = any(r.get("clock", "processor") == "processor" for r in runs)
        clock = f"seconds{' of the processor' if of_processor else ''}"
        names = (
            f"memory | parameters | read for a token | steps | {clock} | test loss, mean | of "
            "each seed"
        )
        rows = []
        for name in ("without", "with"):
            own = [r for r in runs if r["model"] == name]
            losses, seconds = (
                [r["loss"] for r in own],
                f"{np.mean([r['seconds'] for r in own]):.0f}",
            )
            sizes = f"{own[0]['parameters']:,}", f"{own[0]['read']:,}", own[0]["steps"]
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            rows.append([name, *sizes, seconds, f"{np.mean(losses):.4f}", each])
        lines.append(markdown_table(names, rows, 7).rstrip())
    if of_keys := [r for r in found if r["what"] == "keys"]:
        # Processor time excludes other programs; with an accelerator the processor is idle.
        on_cpu = "NVIDIA" not in of_keys[0].get("device", "")
        names = list(dict.fromkeys(r["name"] for r in of_keys))
        clock, of_what = (
            ("seconds_of_processor", ": time of the processor") if on_cpu else ("seconds", "")
        )
        rows = []
        batches = dict.fromkeys(r["batch"] for r in of_keys)
        for batch, direction in itertools.product(batches, ("forward", "step")):
            each = {
                r["name"]: r for r in of_keys if (r["direction"], r["batch"]) == (direction, batch)
            }
            times = (1e3 * each[name][clock] if name in each else None for name in names)
            shown = ("" if t is None else f"{t:.0f} ms" if on_cpu else f"{t:.2f} ms" for t in times)
            rows.append((f"{direction}, batch {batch}", *shown))
        head = [f"a million rows, top 32 of 4 heads{of_what}", *names]
        lines += ["", markdown_table(head, rows, len(head)).rstrip()]
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw losses by the table bytes of a memory."""
    results = sorted((r for r in found if r["what"] == "sizes"), key=lambda r: r["rows"])
    without = next(r["loss"] for r in results if not r["rows"])
    points = np.transpose([(r["bytes"] / 1e6, r["loss"]) for r in results if r["rows"]])
    for axes in draw_axes(path):
        axes.plot(*points, marker="o", label="with a memory")
        axes.axhline(without, color="gray", linestyle="--", label="without")
        axes.set_xscale("log")
        axes.set_xlabel("size of the tables (MB)")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()


def main() -> None:
    given = parse(
        __doc__,
        "what",
        what=(("train", "sizes", "keys", "table"), "comparison, or the table of a file"),
        **OPTIONS,
        rates=([1.0, 2.0, 5.0], "rate factors of the memory rows, to select from"),
        share=(0.25, "share of the time, for each rate"),
        processor=(False, "count processor time"),
        rows=([256, 1024, 4096, 16384, 65536], "rows per table of the memory"),
        samples=(512, "batch size of `keys`"),
        picture=(Path, "draw losses by table size into this file"),
    )
    values, found = values_of(given), list[dict[str, Any]]()
    if not 0 < given.share <= 1:
        raise SystemExit("--share is above 0 and at most 1")
    if not all(0 <= seed < MOST_SEEDS for seed in given.seeds):
        raise SystemExit(f"--seeds are numbers from 0 to {MOST_SEEDS - 1}")
    of_run: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        found.append({**result, **of_run, **about()})
        print(add_line(given.json, found[-1]), flush=True)

    if given.what == "keys":
        with jax.default_matmul_precision("float32"):
            keys(keep, batch=given.samples)
    elif given.what == "table":
        if given.json is None:
            raise SystemExit("table: give the file, --json")
        found = read_lines(given.json)
        if given.picture is not None:
            draw(found, given.picture)
    else:
        text = text_of(given, values)
        print(describe(given, values, text), flush=True)
        of_run |= {"text": Path(text.name).name, "digest": text.digest, "preset": given.preset}
        of_run |= {"set": given.set, "clock": "processor" if given.processor else "wall"}
        clock = processor_seconds if given.processor else time.perf_counter
        if given.what == "train":
            train(given, values, text, clock, keep)
        elif given.seconds is None:
            sizes(values, text, given.rows, given.seeds[0], clock, keep)
        else:
            raise SystemExit("sizes: all have as many steps; give --steps")
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
