"""Figures of the pages under "Choose", measured on a CPU in about two minutes: `python benchmarks/choose.py [TABLE ...]`.

The rows go into ``docs/benchmarks/choose.json`` with machine, versions and date.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import RECORDED, about, options, processor, table  # beside this file

FILE = RECORDED / "choose.json"
STEPS, BATCH = 400, 128
LONGER = 2000
"""Steps of gate networks, tested in hard mode."""
MEAN, DEVIATION = 0.3, 0.38
"""Mean and standard deviation of all pixels in [0, 1]. Normalized inputs give margins of about 1, as reads expect."""


# ------------------------------------------------------------------------------------------- measuring
def _milliseconds(call: Callable[[], Any], least: float = 1.0) -> float:
    """Return the time of the fastest of many calls, after one that compiles: what else runs on the machine only adds to it."""
    import jax

    jax.block_until_ready(call())
    times: list[float] = []
    while sum(times) < least or len(times) < 5:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def _digits() -> tuple[Any, ...]:
    import jax.numpy as jnp
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16 - MEAN) / DEVIATION
    x, labels = jnp.asarray(images, jnp.float32), jnp.asarray(labels)
    return x[:1297], labels[:1297], x[1297:], labels[1297:]


def _trained(model: Any, rate: float, hard: bool = False) -> tuple[int, float, float]:
    """Train a model on the digits; return its parameters, the milliseconds of a step, and the share of test images that are right."""
    import jax
    import optax
    from flax import nnx

    x, labels, test, test_labels = _digits()
    steps = LONGER if hard else STEPS
    optimizer = nnx.Optimizer(model, optax.adam(optax.cosine_decay_schedule(rate, steps)), wrt=nnx.Param)

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
    return count, _milliseconds(lambda: step(model, optimizer, jax.numpy.arange(BATCH))), right


def layers() -> list[dict[str, Any]]:
    """Return a row for each kind of network that classifies digits."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from lutjax.layers.nnx import LUT, ConvLUT, GroupSum, LogicGates, ProjectionLUT, SoftLUT, Thermometer

    normal = jax.nn.initializers.normal(0.1)

    def images(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], 8, 8)

    def conv(rngs: Any) -> Any:
        tables = {"n_detectors": 32, "n_anchors": 6, "kernel": 3, "padding": 1, "rngs": rngs}
        return nnx.Sequential(
            images,
            ConvLUT((8, 8), 16, weights_init=normal, **tables),
            lambda x: nnx.max_pool(x, (2, 2), strides=(2, 2)),
            ConvLUT((4, 4, 16), 10, pool="all", **tables),
        )

    def logic(make: Callable[[int, int], Any], width: int) -> Any:
        return nnx.Sequential(
            Thermometer(
                64, 3, thresholds=jnp.tile((jnp.linspace(0, 1, 5)[1:-1] - MEAN) / DEVIATION, (64, 1))
            ),
            make(192, width),
            make(width, width),
            GroupSum(10, 8.0),
        )

    rngs = nnx.Rngs(0)
    networks = {
        "dense, 64 hidden, relu": (
            nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs)),
            0.01,
            "no",
        ),
        "`LUT`, one layer": (LUT(64, 10, n_detectors=64, n_anchors=6, rngs=rngs), 0.03, "C, whole numbers"),
        "`LUT`, two layers": (
            nnx.Sequential(
                LUT(64, 32, n_detectors=64, n_anchors=6, weights_init=normal, rngs=rngs),
                LUT(32, 10, n_detectors=64, n_anchors=6, rngs=rngs),
            ),
            0.03,
            "C, whole numbers",
        ),
        "`ProjectionLUT` and `nnx.Linear`": (
            nnx.Sequential(
                ProjectionLUT(64, 64, heads=4, tables=16, bits=6, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
            ),
            0.01,
            "int8 tables",
        ),
        "`ConvLUT`, two layers": (conv(rngs), 0.03, "int8 tables with `PowersOfTwo`"),
        "`LogicGates`, 2 x 1000": (logic(lambda i, o: LogicGates(i, o, rngs=rngs), 1000), 0.03, "circuit"),
        "`SoftLUT` of 4 inputs, 2 x 500": (
            logic(lambda i, o: SoftLUT(i, o, n_inputs=4, rngs=rngs), 500),
            0.03,
            "circuit",
        ),
    }
    rows = []
    for name, (model, rate, form) in networks.items():
        count, ms, right = _trained(model, rate, hard=form == "circuit")
        rows.append(
            {
                "network": name,
                "parameters": f"{count:,}",
                "steps": str(LONGER if form == "circuit" else STEPS),
                "ms a step": f"{ms:.2f}",
                "% right": f"{100 * right:.1f}",
                "without floats": form,
            }
        )
    return rows


def reads() -> list[dict[str, Any]]:
    """Return a row for each read of scored tables."""
    from flax import nnx

    import lutjax
    from lutjax.layers.nnx import ProjectionLUT

    kinds = {
        "Hard()": (lutjax.reads.Hard(), 1, "no"),
        "Blend()": (lutjax.reads.Blend(), 2, "no"),
        "SoftSign()": (lutjax.reads.SoftSign(), 2, "no"),
        "Confidence(ways=1)": (lutjax.reads.Confidence(ways=1), 1, "no"),
        "Confidence(ways=2)": (lutjax.reads.Confidence(ways=2), 2, "no"),
        "PowersOfTwo(ways=2)": (lutjax.reads.PowersOfTwo(ways=2), 2, "yes"),
    }
    rows = []
    for name, (read, ways, integers) in kinds.items():
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            ProjectionLUT(64, 64, heads=4, tables=16, bits=6, read=read, rngs=rngs),
            nnx.Linear(64, 10, rngs=rngs),
        )
        _, ms, right = _trained(model, 0.01)
        rows.append(
            {
                "read": f"`{name}`",
                "rows of a table": str(ways),
                "ms a step": f"{ms:.2f}",
                "% right": f"{100 * right:.1f}",
                "int8 form": integers,
            }
        )
    return rows


def sizes() -> list[dict[str, Any]]:
    """Return a row for each size of tables: steps with dense gradients and with gradients in factors."""
    import jax
    import jax.numpy as jnp
    import optax

    import lutjax
    from lutjax import optim

    x = jax.random.normal(jax.random.key(0), (256, 64))
    target = jnp.sin(x[:, :64])
    rows = []
    for bits in (6, 8, 10, 12, 14):
        anchors = lutjax.sample_anchors(jax.random.key(1), 64, 16, bits)

        def loss(params: Any, anchors: Any = anchors) -> Any:
            return jnp.mean((lutjax.lut(x, params["weights"], anchors) - target) ** 2)

        row = {"bits": str(bits), "MB of tables": f"{16 * 2**bits * 64 * 4 / 1e6:.1f}"}
        adam = optax.adam(1e-3)

        def dense(params: Any, state: Any, loss: Any = loss, adam: Any = adam) -> Any:
            gradients = jax.grad(loss)(params)
            updates, state = adam.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        ways = {
            "dense gradient, `optax.adam`": (dense, adam.init),
            "`optim.RowAdam`": _in_factors(loss, optim.RowAdam()),
            "`optim.RowAdagrad`": _in_factors(loss, optim.RowAdagrad()),
            "`optim.SGD`": _in_factors(loss, optim.SGD()),
        }
        for name, (step, init) in ways.items():
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


def _in_factors(loss: Any, rule: Any) -> tuple[Any, Any]:
    """Return a step with the gradient of the table in factors, and what makes its first state."""
    from lutjax import optim

    optimizer = optim.Optimizer(rule, rate=1e-3, tables={"weights"})

    def step(params: Any, state: Any) -> Any:
        _, gradients = optim.value_and_grad(loss)(params)
        return optimizer.apply(params, gradients, state)

    return step, optimizer.init


TABLES: dict[str, Callable[[], list[dict[str, Any]]]] = {"layers": layers, "reads": reads, "sizes": sizes}


# ------------------------------------------------------------------------------------------- the file
def measure(names: list[str]) -> None:
    """Measure tables and store them in the file."""
    import lutjax

    found, facts = json.loads(FILE.read_text()) if FILE.exists() else {}, about()
    name, _, cores = processor().rpartition(", ")
    machine = f"{cores} of a shared {name}"
    for name in names:
        print(f"measuring {name}", flush=True)
        with lutjax.use_implementation("xla"):
            rows = TABLES[name]()
        found[name] = {
            "machine": machine,
            "jax": facts["jax"],
            "lutjax": facts["lutjax"],
            "date": facts["date"],
            "rows": rows,
        }
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def page_table(path: Path, name: str) -> str:
    """Return a stored table in Markdown, with its command, machine, versions and date."""
    kept = json.loads(path.read_text())[name]
    rows = kept["rows"]
    keys = list(rows[0])
    source = (
        f"Minimum times of many calls in plain JAX: `python benchmarks/choose.py {name}`, {kept['date']}, {kept['machine']}, "
        f"lutjax {kept['lutjax']}, jax {kept['jax']}."
    )
    return f"{table(keys, ([row[key] for key in keys] for row in rows))}\n{source}\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="tables to measure (default: all)")
    measure(parser.parse_args().tables or list(TABLES))


if __name__ == "__main__":
    main()
