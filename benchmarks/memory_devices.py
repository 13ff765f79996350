"""Tables of memories over several devices: by blocks of rows, by detector, and whole, side by side.

    python benchmarks/memory_devices.py --json memory_devices.jsonl

Prints a table in Markdown: for each size and way the bytes that a device receives from others in one training step, by the kind of collective, from the shapes in the
compiled program; the memory of a device; and the time of a step (the least of several). A step reads weighted sums of rows, compares them with a target, and moves the rows by
Adagrad. Samples are divided over the devices, except in the way `jit`.

    jit         plain `jit` of arrays that lie as `lutjax.sharding.specs` says: every device has all samples and some of the tables
    detectors   a `jax.shard_map` in which each device has some of the tables: ids go to the tables, and sums to the samples
    rows        `lutjax.sharding.lookup_in_blocks`: each device has a block of the rows of all tables
    whole       each device has all tables: factors of gradients are gathered

On a machine without accelerators: `XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import collectives
from harness import about, add_line, options, read_lines, table as markdown_table, timed  # beside this file
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import optim, sharding

RECEIVED: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}
"""Bytes that a device receives of `n`, around a ring, as a multiple of the result of a collective."""

WAYS = ("jit", "detectors", "rows", "whole")
AXIS = "detectors"


@dataclasses.dataclass(frozen=True)
class Size:
    """Tables and what reads them.

    Attributes:
      name: of the kind of memory.
      tables, rows, width: of the tables.
      ways: rows that a sample reads of each table.
      batch: samples of all devices.
      apart: whether each table has an output of its own, as in a memory of n-grams; else all are added.
    """

    name: str
    tables: int
    rows: int
    width: int
    ways: int
    batch: int
    apart: bool

    @property
    def groups(self) -> int | None:
        """Groups of the look-up in whole tables."""
        return self.tables if self.apart else None

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, coefficients and targets."""
        rng = np.random.default_rng(0)
        reads = (self.batch, self.tables, self.ways)
        outputs = (self.batch, self.tables, self.width) if self.apart else (self.batch, self.width)
        index = rng.integers(0, self.rows, reads, np.int32)
        return index, rng.random(reads, np.float32), rng.normal(size=outputs).astype(np.float32)


SIZES = (
    Size("n-grams", 8, 2**16, 8, 1, 8192, True),
    Size("n-grams", 32, 2**16, 32, 1, 8192, True),
    Size("product keys of 8 heads", 8, 2**16, 64, 32, 1024, False),
    Size("product keys, one table", 1, 2**19, 64, 128, 1024, False),
)
TINY = (
    Size("n-grams", 8, 64, 4, 1, 16, True),
    Size("product keys", 8, 64, 4, 2, 16, False),
    Size("product keys", 1, 64, 4, 2, 16, False),
)


class Step:
    """A compiled training step.

    Args:
      size: of the tables.
      way: one of `WAYS`.
      n_devices: over which they are divided.

    Raises:
      ValueError: they cannot be.
    """

    def __init__(self, size: Size, way: str, n_devices: int):
        if way in ("jit", "detectors") and size.tables % n_devices:
            raise ValueError(f"{size.tables} tables, {n_devices} devices")
        self.size, self.way, self.n_devices = size, way, n_devices
        self.mesh = Mesh(np.array(jax.devices()[:n_devices]), (AXIS,))
        self.optimizer = optim.Optimizer(optim.RowAdagrad(), 0.1, tables={"weights"})
        params = {"weights": jnp.zeros((size.tables, size.rows, size.width))}
        of_table = {
            "jit": P(AXIS, None, None), "detectors": P(AXIS, None, None), "rows": P(None, AXIS, None), "whole": P()
        }[way]  # fmt: skip
        state = jax.eval_shape(self.optimizer.init, params)
        of_state = jax.tree.map(lambda a: of_table if a.ndim == 3 else P(), state)
        of_data = P() if way == "jit" else P(AXIS)
        of_arrays = ({"weights": of_table}, of_state)
        run: Callable[..., Any] = self._step
        if way != "jit":
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=(*of_arrays, of_data, of_data, of_data), out_specs=(*of_arrays, P())
            )  # fmt: skip
        placed = functools.partial(jax.tree.map, lambda spec: NamedSharding(self.mesh, spec))
        given = (params, self.optimizer.init(params), *size.arrays())
        self.given = jax.device_put(given, placed((*of_arrays, of_data, of_data, of_data)))
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=placed((*of_arrays, P())))
        self.compiled = jitted.lower(*self.given).compile()

    def _step(self, params: Any, state: Any, index: Any, coefficients: Any, target: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((self._read(params["weights"], index, coefficients) - target) ** 2)

        value, gradients = optim.value_and_grad(loss)(params)
        if self.way != "jit":  # a mean over the samples of each of the devices
            value = jax.lax.pmean(value, AXIS)
            of_table = gradients["weights"].scaled(1 / self.n_devices)
            gradients = {"weights": of_table.gathered(AXIS) if self.way == "whole" else of_table}
        return *self.optimizer.apply(params, gradients, state), value

    def _read(self, weights: Any, index: Any, coefficients: Any) -> Any:
        size, apart = self.size, self.size.apart
        if self.way == "rows":
            return sharding.lookup_in_blocks(weights, index, coefficients, axis=AXIS, groups=size.groups)
        if self.way != "detectors":
            return lutjax.weighted_lookup(weights, index, coefficients, groups=size.groups)
        to_tables = functools.partial(
            jax.lax.all_to_all, axis_name=AXIS, split_axis=1, concat_axis=0, tiled=True
        )
        n_tables = weights.shape[0]
        sums = lutjax.weighted_lookup(
            weights, to_tables(index), to_tables(coefficients), groups=n_tables if apart else None
        )
        if not apart:
            return jax.lax.psum_scatter(sums, AXIS, tiled=True)
        return jax.lax.all_to_all(sums, AXIS, 0, 1, tiled=True)

    def measured(self, n: int = 5) -> dict[str, Any]:
        """Return bytes, memory and time of a step, and the loss after it has run `n` times."""
        memory = self.compiled.memory_analysis()
        found = collectives(self.compiled.as_text())
        params, state, *data = self.given
        value: Any = None
        del self.given

        def step() -> Any:
            nonlocal params, state, value
            params, state, value = self.compiled(params, state, *data)
            return params, value

        seconds = timed(step, n)
        return {
            **dataclasses.asdict(self.size),
            "way": self.way,
            "devices": self.n_devices,
            "received": {op: n_bytes * RECEIVED[op](self.n_devices) for op, (_, n_bytes) in found.items()},
            "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
            "seconds": min(seconds),
            "loss": float(value),
        }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results in Markdown; kinds of collectives of less than a kilobyte, such as that of the loss, are left out."""
    kinds = sorted({op for r in results for op, n_bytes in r["received"].items() if n_bytes >= 1000})
    lines = []
    for r in results:
        each = [f"{r['received'][op] / 1e6:.2f}" if op in r["received"] else "" for op in kinds]
        sizes = f"{r['tables']}, {r['rows']}, {r['width']}", f"{r['batch']}, {r['ways']}"
        received = f"{sum(r['received'].values()) / 1e6:.2f}"
        costs = f"{r['memory'] / 1e6:.1f}", f"{1e3 * r['seconds']:.1f}"
        lines.append((r["name"], *sizes, r["way"], received, *each, *costs))
    names = (
        "memory",
        "tables, rows, width",
        "samples, reads of a table",
        "way",
        "MB received",
        *kinds,
        "MB of a device",
        "ms",
    )
    return markdown_table(names, lines, 4)


def page_table(path: Path) -> str:
    """Return the table of a page of the documentation."""
    return table(read_lines(path))


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--devices", type=int, help="use only so many; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument("--json", type=Path, help="add each result to this file, a line of JSON")
    asked = parser.parse_args()
    n_devices = asked.devices or len(jax.devices())
    results = []
    for size in TINY if asked.tiny else SIZES:
        for way in WAYS:
            try:
                step = Step(size, way, n_devices)
            except ValueError:
                continue  # fewer tables than devices
            result = step.measured()
            results.append(result)
            print(add_line(asked.json, {**result, **about()}), flush=True)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
