"""Memory tables on several devices: sharded by rows or detectors, and replicated.

    python benchmarks/memory_devices.py --json memory_devices.jsonl

Prints a Markdown table for each size and sharding: bytes received per device and training step, by
  collective, from the shapes in the compiled
program; memory per device; and the minimum step time. A step reads weighted row sums, compares them
with a target, and updates the rows by Adagrad. Samples are sharded over the devices, except for
`jit`.

    jit         plain `jit` with `lutjax.sharding.specs`: each device has all samples and some tables
    detectors   a `jax.shard_map` in which each device has some tables: ids go to the tables, and sums to the samples
    rows        `lutjax.sharding.lookup_in_blocks`: each device has one row block of all tables
    whole       each device has all tables: sparse gradients are gathered

On a machine without accelerators: `XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from devices import collectives
from harness import about, add_line, parse, read_lines, table as markdown_table, time_calls
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import optim, sharding

RECEIVED: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
}
"""Bytes received by each of `n` devices in a ring, relative to the result of a collective."""

WAYS = ("jit", "detectors", "rows", "whole")
AXIS = "detectors"


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of tables and reads.

    Attributes:
      name: kind of memory.
      tables, rows, width: table sizes.
      ways: rows per sample and table.
      batch: samples on all devices.
      apart: separate outputs per table, as in an n-gram memory, instead of one sum.
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
        """Groups of the lookup in whole tables."""
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
      size: table sizes.
      way: one of `WAYS`.
      n_devices: number of devices.

    Raises:
      ValueError: the tables do not divide evenly.
    """

    def __init__(self, size: Size, way: str, n_devices: int):
        if way in ("jit", "detectors") and size.tables % n_devices:
            raise ValueError(f"{size.tables} tables, {n_devices} devices")
        self.size, self.way, self.n_devices = size, way, n_devices
        self.mesh = Mesh(np.array(jax.devices()[:n_devices]), (AXIS,))
        self.optimizer = optim.Optimizer(optim.RowAdagrad(), 0.1, tables={"weights"})
        params = {"weights": jnp.zeros((size.tables, size.rows, size.width))}
        by_table = P(AXIS, None, None)
        specs = {"jit": by_table, "detectors": by_table, "rows": P(None, AXIS, None), "whole": P()}
        of_table = specs[way]
        state = jax.eval_shape(self.optimizer.init, params)
        of_state = jax.tree.map(lambda a: of_table if a.ndim == 3 else P(), state)
        of_data = P() if way == "jit" else P(AXIS)
        of_arrays = ({"weights": of_table}, of_state)
        run: Callable[..., Any] = self._step
        if way != "jit":
            in_specs = (*of_arrays, *[of_data] * 3)
            run = jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=(*of_arrays, P()))
        placed = functools.partial(jax.tree.map, lambda spec: NamedSharding(self.mesh, spec))
        given = (params, self.optimizer.init(params), *size.arrays())
        self.given = jax.device_put(given, placed((*of_arrays, of_data, of_data, of_data)))
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=placed((*of_arrays, P())))
        self.compiled = jitted.lower(*self.given).compile()

    def _step(self, params: Any, state: Any, index: Any, coefficients: Any, target: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((self._read(params["weights"], index, coefficients) - target) ** 2)

        value, gradients = optim.value_and_grad(loss)(params)
        if self.way != "jit":  # means over the samples of one device
            value = jax.lax.pmean(value, AXIS)
            of_table = gradients["weights"].scaled(1 / self.n_devices)
            gradients = {"weights": of_table.gathered(AXIS) if self.way == "whole" else of_table}
        return *self.optimizer.apply(params, gradients, state), value

    def _read(self, weights: Any, index: Any, coefficients: Any) -> Any:
        size, apart = self.size, self.size.apart
        if self.way == "rows":
            return sharding.lookup_in_blocks(
                weights, index, coefficients, axis=AXIS, groups=size.groups
            )
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

    def measure(self, n: int = 5) -> dict[str, Any]:
        """Return bytes, memory and time of a step, and the loss after `n` timed steps."""
        memory = self.compiled.memory_analysis()
        found = collectives(self.compiled.as_text())
        params, state, *data = self.given
        value: Any = None
        del self.given

        def step() -> Any:
            nonlocal params, state, value
            params, state, value = self.compiled(params, state, *data)
            return params, value

        seconds = time_calls(step, n)
        return {
            **dataclasses.asdict(self.size),
            "way": self.way,
            "devices": self.n_devices,
            "received": {
                op: n_bytes * RECEIVED[op](self.n_devices) for op, (_, n_bytes) in found.items()
            },
            "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
            "seconds": min(seconds),
            "loss": float(value),
        }


def table(results: list[dict[str, Any]]) -> str:
    """Return the results in Markdown, without collectives below one kilobyte, such as the loss."""
    kinds = sorted(
        {op for r in results for op, n_bytes in r["received"].items() if n_bytes >= 1000}
    )
    lines = []
    for r in results:
        each = [f"{r['received'][op] / 1e6:.2f}" if op in r["received"] else "" for op in kinds]
        sizes = f"{r['tables']}, {r['rows']}, {r['width']}", f"{r['batch']}, {r['ways']}"
        received = f"{sum(r['received'].values()) / 1e6:.2f}"
        costs = f"{r['memory'] / 1e6:.1f}", f"{1e3 * r['seconds']:.1f}"
        lines.append((r["name"], *sizes, r["way"], received, *each, *costs))
    names = ["memory", "tables, rows, width", "samples, reads of a table", "way", "MB received"]
    return markdown_table([*names, *kinds, "MB of a device", "ms"], lines, 4)


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table(read_lines(path))


def main() -> None:
    given = parse(
        __doc__,
        devices=(int, "number of devices; default: all"),
        tiny=(False, "tiny sizes, as a test"),
        json=(Path, "append each result to this file, as one line of JSON"),
    )
    results = []
    for size, way in itertools.product(TINY if given.tiny else SIZES, WAYS):
        try:
            step = Step(size, way, given.devices or len(jax.devices()))
        except ValueError:
            continue  # fewer tables than devices
        results.append(step.measure())
        print(add_line(given.json, {**results[-1], **about()}), flush=True)
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
