"""Figures on the pages under "Choose", measured on a CPU in about two minutes.

Run `python benchmarks/choose.py [TABLE ...]`.

The rows go into ``docs/benchmarks/choose.json`` with machine, versions and date.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from harness import RECORDED, about, parse, processor, table  # beside this file

import lutjax
from lutjax import optim
from lutjax.layers.nnx import (
    LUT,
    ConvLUT,
    GroupSum,
    LogicGates,
    ProjectionLUT,
    SoftLUT,
    Thermometer,
)

FILE = RECORDED / "choose.json"
STEPS, BATCH = 400, 128
LONGER = 2000
"""Steps of gate networks, tested in hard mode."""
MEAN, DEVIATION = 0.3, 0.38
"""Mean and standard deviation of all pixels in [0, 1].

Normalized inputs give margins of about 1, as reads expect.
"""


# ---------------------------------------------------------------------------------------- measuring
def _milliseconds(call: Callable[[], Any], least: float = 1.0) -> float:
    """Return the fastest time over many calls, after one for compilation: other programs only add time."""
    jax.block_until_ready(call())
    times: list[float] = []
    while sum(times) < least or len(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def _digits() -> tuple[Any, ...]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16 - MEAN) / DEVIATION
    x, labels = jnp.asarray(images, jnp.float32), jnp.asarray(labels)
    return x[:1297], labels[:1297], x[1297:], labels[1297:]


def _train(model: Any, rate: float, hard: bool = False) -> tuple[int, str, str]:
    """Train a model on the digits; return parameters, milliseconds per step, and percentage of correct test images."""
    x, labels, test, test_labels = _digits()
    steps = LONGER if hard else STEPS
    optimizer = nnx.Optimizer(
        model, optax.adam(optax.cosine_decay_schedule(rate, steps)), wrt=nnx.Param
    )

    @nnx.jit
    def step(model: Any, optimizer: Any, at: Any) -> Any:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(x[at]), labels[at]).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    for key in jax.random.split(jax.random.key(1), steps):
        step(model, optimizer, jax.random.randint(key, (BATCH,), 0, len(x)))
    if hard:
        model.eval()
    right = float((model(test).argmax(-1) == test_labels).mean())
    model.train()
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    ms = _milliseconds(lambda: step(model, optimizer, jnp.arange(BATCH)))
    return count, f"{ms:.2f}", f"{100 * right:.1f}"


def layers() -> list[dict[str, Any]]:
    """Return a row for each network that classifies digits."""
    normal, rngs = jax.nn.initializers.normal(0.1), nnx.Rngs(0)
    sizes = {"n_detectors": 64, "n_anchors": 6, "rngs": rngs}
    window = {"n_detectors": 32, "n_anchors": 6, "kernel": 3, "padding": 1, "rngs": rngs}

    def logic(make: Callable[[int, int], Any], width: int) -> Any:
        thresholds = jnp.tile((jnp.linspace(0, 1, 5)[1:-1] - MEAN) / DEVIATION, (64, 1))
        encoder = Thermometer(64, 3, thresholds=thresholds)
        return nnx.Sequential(encoder, make(192, width), make(width, width), GroupSum(10, 8.0))

    def convolutions() -> Any:
        return nnx.Sequential(
            lambda x: x.reshape(*x.shape[:-1], 8, 8),
            ConvLUT((8, 8), 16, weights_init=normal, **window),
            lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
            ConvLUT((4, 4, 16), 10, pool="all", **window),
        )

    def linear(layer: Any) -> Any:
        return nnx.Sequential(*layer, nnx.Linear(64, 10, rngs=rngs))

    dense = linear((nnx.Linear(64, 64, rngs=rngs), nnx.relu))
    one = LUT(64, 10, **sizes)
    two = nnx.Sequential(LUT(64, 32, weights_init=normal, **sizes), LUT(32, 10, **sizes))
    projected = linear((ProjectionLUT(64, 64, heads=4, tables=16, bits=6, rngs=rngs),))
    networks = {
        "dense, 64 hidden, relu": (dense, 0.01, "no"),
        "`LUT`, one layer": (one, 0.03, "C, whole numbers"),
        "`LUT`, two layers": (two, 0.03, "C, whole numbers"),
        "`ProjectionLUT` and `nnx.Linear`": (projected, 0.01, "int8 tables"),
        "`ConvLUT`, two layers": (convolutions(), 0.03, "int8 tables with `PowersOfTwo`"),
        "`LogicGates`, 2 x 1000": (logic(lambda i, o: LogicGates(i, o, rngs=rngs), 1000), 0.03, "circuit"),
        "`SoftLUT` of 4 inputs, 2 x 500": (
            logic(lambda i, o: SoftLUT(i, o, n_inputs=4, rngs=rngs), 500), 0.03, "circuit"
        ),
    }  # fmt: skip
    rows = []
    for name, (model, rate, form) in networks.items():
        count, ms, right = _train(model, rate, hard=form == "circuit")
        steps = str(LONGER if form == "circuit" else STEPS)
        row = {
            "network": name,
            "parameters": f"{count:,}",
            "steps": steps,
            "ms a step": ms,
            "% right": right,
        }
        rows.append({**row, "without floats": form})
    return rows


def reads() -> list[dict[str, Any]]:
    """Return a row for each read of scored tables."""
    rows = []
    for name, rows_per_table in (
        ("Hard()", 1), ("Blend()", 2), ("SoftSign()", 2), ("Confidence(ways=1)", 1), ("Confidence(ways=2)", 2),
        ("PowersOfTwo(ways=2)", 2),
    ):  # fmt: skip
        rngs, (kind, _, ways) = nnx.Rngs(0), name.rstrip(")").partition("(")
        read = getattr(lutjax.reads, kind)(**({"ways": int(ways[-1])} if ways else {}))
        layer = ProjectionLUT(64, 64, heads=4, tables=16, bits=6, read=read, rngs=rngs)
        _, ms, right = _train(nnx.Sequential(layer, nnx.Linear(64, 10, rngs=rngs)), 0.01)
        row = {
            "read": f"`{name}`",
            "rows of a table": str(rows_per_table),
            "ms a step": ms,
            "% right": right,
        }
        rows.append({**row, "int8 form": "yes" if kind == "PowersOfTwo" else "no"})
    return rows


def sizes() -> list[dict[str, Any]]:
    """Return a row for each table size: steps with dense and with sparse table gradients."""
    x = jax.random.normal(jax.random.key(0), (256, 64))
    target = jnp.sin(x[:, :64])
    rows = []
    for bits in (6, 8, 10, 12, 14):
        anchors = lutjax.sample_anchors(jax.random.key(1), 64, 16, bits)

        def loss(params: Any, anchors: Any = anchors) -> Any:
            return jnp.mean((lutjax.lut(x, params["weights"], anchors) - target) ** 2)

        row = {"bits": str(bits), "MB of tables": f"{16 * 2**bits * 64 * 4 / 1e6:.1f}"}
        steps = {
            "dense gradient, `optax.adam`": _dense_step(loss, optax.adam(1e-3)),
            "`optim.RowAdam`": _sparse_step(loss, optim.RowAdam()),
            "`optim.RowAdagrad`": _sparse_step(loss, optim.RowAdagrad()),
            "`optim.SGD`": _sparse_step(loss, optim.SGD()),
        }
        for name, (step, init) in steps.items():
            params = {"weights": jnp.zeros((16, 2**bits, 64))}
            held = [params, init(params)]
            jitted = jax.jit(step, donate_argnums=(0, 1))

            def call(held: list[Any] = held, jitted: Any = jitted) -> Any:
                held[:] = jitted(*held)
                return held

            row[name] = f"{_milliseconds(call):.2f}"
            held.clear()
        rows.append(row)
    return rows


def _dense_step(loss: Any, optimizer: Any) -> tuple[Any, Any]:
    """Return a step with a dense table gradient, and the function for its initial state."""

    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, optimizer.init


def _sparse_step(loss: Any, rule: Any) -> tuple[Any, Any]:
    """Return a step with a sparse table gradient, and the function for its initial state."""
    optimizer = optim.Optimizer(rule, rate=1e-3, tables={"weights"})

    def step(params: Any, state: Any) -> Any:
        _, gradients = optim.value_and_grad(loss)(params)
        return optimizer.apply(params, gradients, state)

    return step, optimizer.init


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "layers": layers,
    "reads": reads,
    "sizes": sizes,
}


# ----------------------------------------------------------------------------------------- the file
def measure(names: list[str]) -> None:
    """Measure tables and store them in the file."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    facts = {name: about()[name] for name in ("jax", "lutjax", "date")}
    name, _, cores = processor().rpartition(", ")
    for chosen in names:
        print(f"measuring {chosen}", flush=True)
        with lutjax.use_implementation("xla"):
            found[chosen] = {
                "machine": f"{cores} of a shared {name}",
                **facts,
                "rows": TABLES[chosen](),
            }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def page_table(path: Path, name: str) -> str:
    """Return a stored Markdown table with its command, machine, versions and date."""
    kept = json.loads(path.read_text())[name]
    rows = kept["rows"]
    source = (
        f"Minimum times of many calls in plain JAX: `python benchmarks/choose.py {name}`, "
        f"{kept['date']}, {kept['machine']}, lutjax {kept['lutjax']}, jax {kept['jax']}."
    )
    return f"{table(list(rows[0]), (row.values() for row in rows))}\n{source}\n"


if __name__ == "__main__":
    given = parse(__doc__, "tables", tables=(TABLES, "tables to measure; default: all"))
    measure(given.tables)
