"""Memory layers: loss with and without a memory, loss by the bytes of its tables, and the time of product keys.

    python benchmarks/memory.py train --text FILE --seeds 0,1,2 --out memory.jsonl
    python benchmarks/memory.py sizes --text FILE --rows 256,1024,4096,16384,65536 --out memory.jsonl
    python benchmarks/memory.py keys --out memory.jsonl
    python benchmarks/memory.py table --out memory.jsonl --picture docs/memory.png

Each of the first three adds lines of JSON to the file, one for each result, and `table` prints them in Markdown and draws the picture. Times are seconds of
the processor, of all threads, so that they do not depend on what else runs beside. `train` measures a step of both models in turns, and gives the one
with the memory as many steps as take the same time.
"""

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import lutjax
from lutjax.layers.nnx import ProductKeyMemory
from lutjax.models import GPTConfig
from lutjax.training import nnx as training, presets, tables
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import Text, load_text

MEMORY = {"memory": True, "lut_heads": 1, "lut_tables": 48}
"""The model with a memory: 16 tables less in each layer, whose parameters a token reads in the memory."""


def seconds_of_processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run_of(values: dict[str, Any], text: Text, validate: bool) -> Run:
    train = text.train if validate else np.concatenate([text.train, text.validation])
    return Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), train, text.validation)


def parameters_read(config: GPTConfig) -> int:
    """Return the number of parameters that one token reads: matrices whole, of tables the rows that are read."""
    features, n = config.features, config.n_layers
    tables = config.lut_heads * config.lut_tables * 2 * features  # a row and its neighbour
    found = n * (4 * features**2 + tables) + features + features * config.vocab_size
    for _ in config.memory_places:
        rows = len(config.memory_orders) * config.memory_heads * config.memory_width
        found += rows + 2 * rows * features
    return found


def steps_in_turns(runs: dict[str, Run], n_turns: int = 8, n_steps: int = 25) -> dict[str, float]:
    """Return the seconds of the processor of a step of each run, the median of turns."""
    states: dict[str, Any] = {}
    for name, run in runs.items():
        advance = run.advance.compiled(run.abstract())[1]
        state, loss = advance(run.init(), 0, 5)
        states[name] = [advance, state, float(loss), []]
    for turn in range(n_turns):
        for held in states.values():
            start = seconds_of_processor()
            held[1], loss = held[0](held[1], 5 + turn * n_steps, n_steps)
            float(loss)
            held[3].append((seconds_of_processor() - start) / n_steps)
    return {name: float(np.median(held[3])) for name, held in states.items()}


def trained(run: Run, part: Any) -> dict[str, Any]:
    """Train to the end; return seconds of the processor, sizes and the loss on a part of the text."""
    advance = run.advance.compiled(run.abstract())[1]
    state, steps, seconds = run.init(), run.training.steps, 0.0
    for first in range(0, steps, 500):
        start = seconds_of_processor()
        state, loss = advance(state, first, min(500, steps - first))
        float(loss)
        seconds += seconds_of_processor() - start
    return {
        "steps": steps,
        "seconds": seconds,
        "loss": run.evaluate(state, part),
        "parameters": run.structure.n_parameters(),
        "read": parameters_read(run.config),  # type: ignore[arg-type]
    }


def train(text: Text, seeds: list[int], steps: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Compare models with and without a memory at equal seconds of the processor, for each seed."""
    values = {**presets.preset("gpt", "demo"), "steps": steps}
    each = {"without": values, "with": {**values, **MEMORY}}
    per_step = steps_in_turns({name: run_of(v, text, validate=True) for name, v in each.items()})
    each["with"]["steps"] = int(steps * per_step["without"] / per_step["with"])
    for seed in seeds:
        for name, v in each.items():
            found = trained(run_of({**v, "seed": seed}, text, validate=False), text.test)
            keep({"what": "train", "model": name, "seed": seed, "ms_per_step": 1e3 * per_step[name], **found})


def sizes(text: Text, rows: list[int], steps: int, seed: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """Train with tables of several numbers of rows, all for as many steps; losses are those of the validation part."""
    values = {**presets.preset("gpt", "demo"), "steps": steps, "seed": seed}
    for n in (0, *rows):
        changes = {**MEMORY, "memory_rows": n} if n else {}
        run = run_of({**values, **changes}, text, validate=True)
        config = run.config
        assert isinstance(config, GPTConfig)
        n_bytes = 4 * n * len(config.memory_orders) * config.memory_heads * config.memory_width
        keep({"what": "sizes", "rows": n, "bytes": n_bytes, **trained(run, text.validation)})


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


def keys(
    keep: Callable[[dict[str, Any]], None], n_keys: int = 1024, features: int = 64, batch: int = 512
) -> None:
    """Measure a memory of a million rows, top 32 of 4 heads: forward, and a training step, against `simple`."""
    layer = ProductKeyMemory(features, features, n_keys=n_keys, rngs=nnx.Rngs(0))
    x, target = jax.random.normal(jax.random.key(1), (2, batch, features))
    np.testing.assert_allclose(layer(x), simple(layer, x), atol=1e-5)
    graph, state = nnx.split(layer)  # nnx.jit would also copy the table into its results
    forwards = {
        "lutjax": jax.jit(lambda state, x: nnx.merge(graph, state)(x)),
        "simple": jax.jit(lambda state, x: simple(nnx.merge(graph, state), x)),
    }
    tx = tables.Optimizer(tables.RowAdagrad(), 0.01)
    optimizer = training.Optimizer(layer, tx)

    def loss(layer: Any, x: Any, target: Any) -> jax.Array:
        return jnp.mean((layer(x) - target) ** 2)

    def step(layer: Any, optimizer: Any, x: Any, target: Any) -> jax.Array:
        value, gradients = training.value_and_grad(loss)(layer, x, target)
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

    def seconds(call: Callable[[], Any], n: int = 8) -> tuple[float, float]:
        jax.block_until_ready(call())
        wall, used = [], []
        for _ in range(n):
            start, before = time.perf_counter(), seconds_of_processor()
            jax.block_until_ready(call())
            wall.append(time.perf_counter() - start)
            used.append(seconds_of_processor() - before)
        return min(wall), min(used)

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
    for (direction, name), call in calls.items():
        wall, used = seconds(call)
        keep({"what": "keys", "direction": direction, "name": name, "rows": n_keys**2, "batch": batch,
              "seconds": wall, "seconds_of_processor": used})  # fmt: skip


# ------------------------------------------------------------------------------------- results
def table(found: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    lines: list[str] = []
    runs = [r for r in found if r["what"] == "train"]
    if runs:
        lines += [
            "| memory | parameters | read for a token | steps | seconds of the processor | test loss, mean | of each seed |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name in ("without", "with"):
            own = [r for r in runs if r["model"] == name]
            losses = [r["loss"] for r in own]
            lines.append(
                f"| {name} | {own[0]['parameters']:,} | {own[0]['read']:,} | {own[0]['steps']} | {np.mean([r['seconds'] for r in own]):.0f} | "
                f"{np.mean(losses):.4f} | {', '.join(f'{loss:.4f}' for loss in losses)} |"
            )
    of_keys = [r for r in found if r["what"] == "keys"]
    if of_keys:
        lines += [
            "",
            "| a million rows, top 32 of 4 heads: time of the processor | lutjax | simple |",
            "| --- | --- | --- |",
        ]
        for direction in ("forward", "step"):
            each = {r["name"]: r for r in of_keys if r["direction"] == direction}
            times = " | ".join(
                f"{1e3 * each[name]['seconds_of_processor']:.0f} ms" for name in ("lutjax", "simple")
            )
            lines.append(f"| {direction}, batch {each['lutjax']['batch']} | {times} |")
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw losses by the bytes of the tables of a memory."""
    results = sorted((r for r in found if r["what"] == "sizes"), key=lambda r: r["rows"])
    without = next(r["loss"] for r in results if not r["rows"])
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    each = [r for r in results if r["rows"]]
    axes.plot([r["bytes"] / 1e6 for r in each], [r["loss"] for r in each], marker="o", label="with a memory")
    axes.axhline(without, color="gray", linestyle="--", label="without")
    axes.set_xscale("log")
    axes.set_xlabel("size of the tables (MB)")
    axes.set_ylabel("validation loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "sizes", "keys", "table"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rows", default="256,1024,4096,16384,65536")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()

    def keep(result: dict[str, Any]) -> None:
        machine = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "jax": jax.__version__,
            "lutjax": lutjax.__version__,
        }
        line = json.dumps({**result, **machine, "date": time.strftime("%Y-%m-%d")})
        print(line, flush=True)
        with asked.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    if asked.what == "keys":
        keys(keep)
    elif asked.what == "table":
        found = [json.loads(line) for line in asked.out.read_text(encoding="utf-8").splitlines()]
        print(table(found))
        if asked.picture is not None:
            draw(found, asked.picture)
    else:
        text = load_text(asked.text, context=presets.preset("gpt", "demo")["context"])
        if asked.what == "train":
            train(text, [int(seed) for seed in asked.seeds.split(",")], asked.steps or 4200, keep)
        else:
            sizes(text, [int(n) for n in asked.rows.split(",")], asked.steps or 1000, 9, keep)


if __name__ == "__main__":
    main()
