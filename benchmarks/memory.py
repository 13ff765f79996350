"""Memory layers: loss with and without a memory, loss by the bytes of its tables, and the time of product keys.

    python benchmarks/memory.py train --text FILE --seconds 40 --json memory.jsonl
    python benchmarks/memory.py sizes --text FILE --steps 1000 --rows 256,1024,4096,16384,65536 --json memory.jsonl
    python benchmarks/memory.py keys --json memory.jsonl
    python benchmarks/memory.py table --json memory.jsonl --picture docs/memory.png

Each of the first three adds lines of JSON to the file, one for each result, and `table` prints them in Markdown and draws the picture.

`train` compares models of a preset with and without a memory, of which a token reads equally many parameters, in equal time:

1. Steps of both are timed in turns. So each has as many steps as take the seconds (by default those of the preset's steps without a memory), and its schedule ends with the last of them.
2. The first seed chooses the rate of the memory's rows (`--rates`): with each of them the model is trained for a `--share` of the time, and the lowest loss on the validation part wins. Rows that move faster
   learn sooner and remember too much later, so a small share may prefer too fast a rate; `--share 1` trains in full.
3. With it, both models are trained on all but the test part, for each seed, and tested on that part, which nothing before has seen. Seeds draw first values and batches.

Compilation and tests take no part in the seconds; programs are compiled side by side, one for both models and each rate, not for each seed. `--text python` is the source of all installed
packages. Seconds are those of the clock, or with `--processor` those of the processor, of all threads, which do not depend on what else runs beside.
On a GPU, for three minutes of steps beside compilation and tests: `python benchmarks/memory.py train --text python --seconds 25 --json memory.jsonl`.
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
    axes_of,
    head as head_of,
    markdown_row,
    options,
    read_lines,
    table as markdown_table,
    timed,
)  # beside this file
from language_models import (  # beside this file
    about,
    add_line,
    add_options,
    head,
    parameters_read,
    text_of,
    values_of,
)

from lutjax import optim
from lutjax.layers.nnx import ProductKeyMemory
from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.lm import Evaluation, Run, TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import Text

Keep = Callable[[dict[str, Any]], None]
"""Prints a result, and adds it to a file."""

Clock = Callable[[], float]

CHUNK = 500
"""Steps of a call."""

MOST_STEPS, MOST_SEEDS = 10_000_000, 200
"""Steps of a training, and seeds: batches of another seed are those of later steps, which int32 counts."""


def seconds_of_processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_of(values: dict[str, Any], text: Text, *, validate: bool) -> Run:
    """Return the run of a preset's values; `validate`: the validation part is kept out of training."""
    train = text.train if validate else np.concatenate([text.train, text.validation])
    return Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), train, text.validation)


def with_memory(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a model with a memory and fewer tables, of which a token reads nearly as many parameters.

    Raises:
      SystemExit: there is none within five percent.
    """

    def read(values: dict[str, Any]) -> int:
        return parameters_read(presets.make(GPTConfig, values))

    own: GPTConfig = presets.make(GPTConfig, values)
    heads = own.lut_heads if own.feed_forward == "projection_lut" else 1
    most = own.lut_tables * own.lut_heads // heads
    each = [{**values, "memory": True, "lut_heads": heads, "lut_tables": n} for n in range(1, most + 1)]
    found = min(each, key=lambda other: abs(read(other) - read(values)))
    if abs(read(found) / read(values) - 1) > 0.05:
        raise SystemExit(
            f"a token reads {read(values):,} parameters without a memory, and at best {read(found):,} with one: take a smaller memory "
            "(--set memory_width=4), or more tables (--set lut_tables=...)."
        )
    return found


class Program:
    """A run with its programs, which are the same for every seed.

    Args:
      run: whose steps have been traced.
      like: of a run of the same model, which draws the same first values.
    """

    def __init__(self, run: Run, like: "Program | None" = None):
        self.run = run
        self._advance = run.advance.compiled(run.abstract())[1]
        self._draw = jax.jit(run.drawn).lower(jax.random.key(0)).compile() if like is None else like._draw

    def drawn(self, seed: int) -> State:
        """Return the state before the first step."""
        state: State = self._draw(jax.random.key(seed))
        return state

    def advanced(self, state: State, first: int, count: int, clock: Clock) -> tuple[State, float]:
        """Return the state after some steps, and their seconds."""
        start = clock()
        state, loss = self._advance(state, first, count)
        float(loss)
        return state, clock() - start

    def trained(self, seed: int, clock: Clock) -> tuple[State, float]:
        """Return the state after all steps, and their seconds.

        Args:
          seed: of first values, and of batches: those of steps that another seed does not come to.
        """
        state, seconds = jax.block_until_ready(self.drawn(seed)), 0.0
        steps = self.run.training.steps
        for first in range(0, steps, CHUNK):
            count = min(CHUNK, steps - first)
            state, took = self.advanced(state, seed * MOST_STEPS + first, count, clock)
            seconds += took
        return state, seconds


def compiled(runs: Sequence[Run], like: Sequence[Program | None]) -> list[Program]:
    """Return runs with their programs, compiled side by side; for `like` see `Program`."""
    start = time.perf_counter()
    for run in runs:
        run.advance.trace(run.abstract())
    with ThreadPoolExecutor() as threads:
        found = list(threads.map(Program, runs, like))
    print(f"programs of {len(runs)} runs compiled in {time.perf_counter() - start:.0f} s", flush=True)
    return found


def steps_in_turns(
    programs: dict[str, Program], clock: Clock, n_turns: int = 8, n_steps: int = 25
) -> dict[str, float]:
    """Return the seconds of a step of each run, the median of turns."""
    states = {name: program.advanced(program.drawn(0), 0, 5, clock)[0] for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(n_turns):
        for name, program in programs.items():
            states[name], took = program.advanced(states[name], 5 + turn * n_steps, n_steps, clock)
            times[name].append(took / n_steps)
    return {name: float(np.median(each)) for name, each in times.items()}


def tested(run: Run) -> Evaluation:
    """Return what tests states of a run, and of others that differ in their training alone."""
    return Evaluation(run.structure, run.config.context)


def sizes_of(run: Run) -> dict[str, int]:
    """Return what is said of a model beside its loss."""
    config = run.config
    assert isinstance(config, GPTConfig)
    return {
        "steps": run.training.steps,
        "parameters": run.structure.n_parameters(),
        "read": parameters_read(config),
    }


def train(
    values: dict[str, Any],
    text: Text,
    *,
    seeds: list[int],
    rates: list[float],
    share: float,
    seconds: float | None,
    clock: Clock,
    windows: int | None,
    keep: Keep,
) -> None:
    """Compare models with and without a memory in equal time, for each seed; see the head of this file."""
    each = {"without": values, "with": with_memory(values)}
    runs = [run_of(v, text, validate=True) for v in each.values()]
    probes = dict(zip(each, compiled(runs, [None, None]), strict=True))
    per_step = steps_in_turns(probes, clock)
    if seconds is None:
        seconds = values["steps"] * per_step["without"]
    steps = {name: max(round(seconds / one), 1) for name, one in per_step.items()}
    each = {name: {**v, "steps": steps[name]} for name, v in each.items()}
    fewer = max(round(share * steps["with"]), 1)
    tried = {
        rate: run_of({**each["with"], "steps": fewer, "memory_rate": rate}, text, validate=True)
        for rate in rates
    }
    *of_rates, without = compiled(
        [*tried.values(), run_of(each["without"], text, validate=False)],
        [*[probes["with"]] * len(tried), probes["without"]],
    )
    test = {"with": tested(of_rates[0].run), "without": tested(without.run)}
    losses = {}
    for rate, program in zip(rates, of_rates, strict=True):
        state, took = program.trained(seeds[0], clock)
        losses[rate] = test["with"](state.params, state.others, text.validation, max_windows=windows)
        keep({"what": "rate", "rate": rate, "seed": seeds[0], "seconds": took, "validation": losses[rate], **sizes_of(program.run)})  # fmt: skip
    rate = min(losses, key=lambda rate: losses[rate])
    last = run_of({**each["with"], "memory_rate": rate}, text, validate=False)
    (within,) = compiled([last], [probes["with"]])
    for seed in seeds:
        for name, program in (("without", without), ("with", within)):
            state, took = program.trained(seed, clock)
            loss = test[name](state.params, state.others, text.test, max_windows=windows)
            of_model = {"memory_rate": rate} if name == "with" else {}
            keep({"what": "train", "model": name, "seed": seed, "ms_per_step": 1e3 * per_step[name], "seconds": took, "loss": loss,
                  **sizes_of(program.run), **of_model})  # fmt: skip


def sizes(values: dict[str, Any], text: Text, rows: list[int], seed: int, clock: Clock, keep: Keep) -> None:
    """Train with tables of several numbers of rows, all for as many steps; losses are those of the validation part."""
    for n in (0, *rows):
        run = run_of({**with_memory(values), "memory_rows": n} if n else values, text, validate=True)
        config = run.config
        assert isinstance(config, GPTConfig)
        n_bytes = 4 * n * len(config.memory_orders) * config.memory_heads * config.memory_width
        (program,) = compiled([run], [None])
        state, took = program.trained(seed, clock)
        loss = run.evaluate(state, text.validation)
        keep({"what": "sizes", "rows": n, "bytes": n_bytes, "seconds": took, "loss": loss, **sizes_of(run)})


# ------------------------------------------------------------------------------------- product keys
def simple(layer: Any, x: jax.Array) -> jax.Array:
    """Return what a `ProductKeyMemory` does as one would write it first: all pairs of the best keys, and rows that are gathered."""
    spec, n, k = layer.spec, x.shape[0], layer.spec.k
    queries = (x @ layer.query_kernel[...]).reshape(n, spec.heads, 2, spec.key_size)
    inverse = jax.lax.rsqrt(jnp.mean(queries**2, -1, keepdims=True) + 1e-6)
    scores = jnp.einsum("bhsc,hsnc->bhsn", queries * inverse * layer.query_scale[...], layer.half_keys[...])
    best, ids = jax.lax.top_k(scores, k)
    sums = (best[:, :, 0, :, None] + best[:, :, 1, None, :]).reshape(n, spec.heads, k * k)
    rows = (ids[:, :, 0, :, None] * spec.n_keys + ids[:, :, 1, None, :]).reshape(n, spec.heads, k * k)
    best, which = jax.lax.top_k(sums, k)
    rows = jnp.take_along_axis(rows, which, -1)
    return jnp.einsum("bhk,bhko->bo", jax.nn.softmax(best), layer.weights[...][0][rows])


def in_torch(layer: Any, x: np.ndarray, target: np.ndarray) -> dict[tuple[str, str], Callable[[], Any]]:
    """Return the calls of the same layer in PyTorch, as one would write it first: a bag of embeddings, and Adagrad by dense gradients."""
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
        rows = (ids[:, :, 0, :, None] * spec.n_keys + ids[:, :, 1, None, :]).reshape(n, spec.heads, k * k)
        best, which = sums.topk(k)
        rows, shares = rows.gather(-1, which).reshape(n, -1), best.softmax(-1).reshape(n, -1)
        return torch.nn.functional.embedding_bag(rows, table[0], per_sample_weights=shares, mode="sum")

    optimizer = torch.optim.Adagrad([kernel, scale, half_keys, table], 0.01)

    def waited(call: Callable[[], Any]) -> Callable[[], Any]:
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

    # Where the sums of two pairs of keys differ in their last digit, either may be the last of the best.
    differences = np.abs(outputs().cpu().numpy() - layer(x)).max(-1)
    assert np.mean(differences < 1e-4) > 0.99, differences
    return {("forward", "PyTorch"): waited(outputs), ("step", "PyTorch"): waited(step)}


def keys(keep: Keep, n_keys: int = 1024, features: int = 64, batch: int = 512) -> None:
    """Measure a memory of a million rows, top 32 of 4 heads: forward, and a training step, against `simple`, and PyTorch where it is installed.

    All products are of float32, as PyTorch has them by default: of fewer digits the best keys are others.
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
        # The same rule by dense gradients: Adagrad with one number for a row.
        def of(arrays: Any) -> jax.Array:
            return loss(lambda x: simple(nnx.merge(graph, arrays), x), x, target)

        graph, arrays = nnx.split(layer)
        value, gradients = jax.value_and_grad(of)(arrays)
        square = jnp.mean(gradients["weights"][...] ** 2, -1, keepdims=True)
        total = total + square
        moved = jax.tree.map(lambda p, g: p - 0.01 * g, arrays, gradients)
        scale = jax.lax.rsqrt(total + 1e-20)
        moved["weights"].set_value(arrays["weights"][...] - 0.01 * gradients["weights"][...] * scale)
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
        wall, used = (min(timed(call, 8, clock=clock)) for clock in (time.perf_counter, seconds_of_processor))
        keep({"what": "keys", "direction": direction, "name": name, "rows": n_keys**2, "batch": batch,
              "seconds": wall, "seconds_of_processor": used})  # fmt: skip


# ------------------------------------------------------------------------------------- results
def page_table(path: Path, what: str) -> str:
    """Return the table of one kind of rows for a page of the documentation."""
    rows = read_lines(path)
    return table([row for row in rows if row["what"] == what]).strip() + "\n"


def table(found: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    lines: list[str] = []
    tried = [r for r in found if r["what"] == "rate"]
    if tried:
        cells = ((f"{r['rate']:g}", r["steps"], f"{r['validation']:.4f}") for r in tried)
        lines.append(markdown_table(["rate of the rows", "steps", "validation loss"], cells, 3))
    runs = [r for r in found if r["what"] == "train"]
    if runs:
        of_processor = any(r.get("clock", "processor") == "processor" for r in runs)
        clock = f"seconds{' of the processor' if of_processor else ''}"
        names = "memory", "parameters", "read for a token", "steps", clock, "test loss, mean", "of each seed"
        lines.append(head_of(names, len(names)))
        for name in ("without", "with"):
            own = [r for r in runs if r["model"] == name]
            losses, seconds = [r["loss"] for r in own], f"{np.mean([r['seconds'] for r in own]):.0f}"
            sizes = f"{own[0]['parameters']:,}", f"{own[0]['read']:,}", own[0]["steps"]
            each = ", ".join(f"{loss:.4f}" for loss in losses)
            lines.append(markdown_row([name, *sizes, seconds, f"{np.mean(losses):.4f}", each]))
    of_keys = [r for r in found if r["what"] == "keys"]
    if of_keys:
        # What else runs on a machine does not count as time of the processor; on an accelerator that is idle.
        on_cpu = "NVIDIA" not in of_keys[0].get("device", "")
        names = list(dict.fromkeys(r["name"] for r in of_keys))
        clock, of_what = ("seconds_of_processor", ": time of the processor") if on_cpu else ("seconds", "")
        lines += [
            "",
            f"| a million rows, top 32 of 4 heads{of_what} | {' | '.join(names)} |",
            f"| --- |{' --- |' * len(names)}",
        ]
        for batch, direction in itertools.product(
            dict.fromkeys(r["batch"] for r in of_keys), ("forward", "step")
        ):
            each = {r["name"]: r for r in of_keys if (r["direction"], r["batch"]) == (direction, batch)}
            times = (1e3 * each[name][clock] if name in each else None for name in names)
            shown = " | ".join(
                "" if time is None else f"{time:.0f} ms" if on_cpu else f"{time:.2f} ms" for time in times
            )
            lines.append(f"| {direction}, batch {batch} | {shown} |")
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw losses by the bytes of the tables of a memory."""
    results = sorted((r for r in found if r["what"] == "sizes"), key=lambda r: r["rows"])
    without = next(r["loss"] for r in results if not r["rows"])
    points = np.transpose([(r["bytes"] / 1e6, r["loss"]) for r in results if r["rows"]])
    for axes in axes_of(path):
        axes.plot(*points, marker="o", label="with a memory")
        axes.axhline(without, color="gray", linestyle="--", label="without")
        axes.set_xscale("log")
        axes.set_xlabel("size of the tables (MB)")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.grid(alpha=0.3)
        axes.legend()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("what", choices=["train", "sizes", "keys", "table"])
    add_options(parser)
    parser.add_argument(
        "--rates", default="1,2,5", help="of the rows of the memory, to choose from, as factors"
    )
    parser.add_argument("--share", type=float, default=0.25, help="of the time, for each of the rates")
    parser.add_argument("--processor", action="store_true", help="count seconds of the processor")
    parser.add_argument("--rows", default="256,1024,4096,16384,65536", help="of each table of the memory")
    parser.add_argument("--samples", type=int, default=512, help="in a batch of `keys`")
    parser.add_argument("--picture", type=Path, help="draw losses by the size of tables into this file")
    asked = parser.parse_args()
    values, found = values_of(parser, asked), list[dict[str, Any]]()
    if not 0 < asked.share <= 1:
        parser.error("--share is above 0 and at most 1")
    of_run: dict[str, Any] = {}

    def keep(result: dict[str, Any]) -> None:
        found.append({**result, **of_run, **about()})
        print(add_line(asked.json, found[-1]), flush=True)

    if asked.what == "keys":
        with jax.default_matmul_precision("float32"):
            keys(keep, batch=asked.samples)
    elif asked.what == "table":
        if asked.json is None:
            parser.error("table: give the file, --json")
        found = read_lines(asked.json)
        if asked.picture is not None:
            draw(found, asked.picture)
    else:
        text = text_of(asked, values)
        print(head(asked, values, text), flush=True)
        of_run |= {
            "text": Path(text.name).name,
            "digest": text.digest,
            "preset": asked.preset,
            "set": asked.set,
        }
        of_run["clock"] = "processor" if asked.processor else "wall"
        clock = seconds_of_processor if asked.processor else time.perf_counter
        seeds = [int(seed) for seed in asked.seeds.split(",")]
        if not all(0 <= seed < MOST_SEEDS for seed in seeds):
            parser.error(f"--seeds are numbers from 0 to {MOST_SEEDS - 1}")
        if asked.what == "train":
            rates = [float(rate) for rate in asked.rates.split(",")]
            train(
                values, text, seeds=seeds, rates=rates, share=asked.share, seconds=asked.seconds, clock=clock, windows=asked.windows,
                keep=keep,
            )  # fmt: skip
        else:
            if asked.seconds is not None:
                parser.error("sizes: all have as many steps; give --steps")
            sizes(values, text, [int(n) for n in asked.rows.split(",")], seeds[0], clock, keep)
    print(f"\n{table(found)}")


if __name__ == "__main__":
    main()
