"""Host-resident tables next to tables on a device.

Run `python benchmarks/host_memory.py [rows] [kinds] [steps] [decode]`.

- `rows`: rows per second gathered from and updated in a table of `--gigabytes` by all cores,
  relative to their copy speed.
- `kinds`: gather and SGD update times for the same rows of a 0.3 GB table, in NumPy and in each JAX
  memory kind (`jax.experimental.compute_on`).
- `steps`: milliseconds per training step of a GPT with 100 M parameters and a host-resident n-gram
  memory, for several prefetch depths, next to the same GPT with a small table on the device. Depth
  0 reads rows inside the step.
- `decode`: milliseconds per token of `generate` for both, with rows read by the GPU or by the CPU;
  seconds for pinning the memory.

Texts are random bytes, so n-grams are spread over all rows. The best of `--repeats` counts.
"""

import dataclasses
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import parse, time_calls  # beside this file
from jax.experimental.compute_on import compute_on

import lutjax
from lutjax import optim
from lutjax.models import GPTConfig
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.tables import host
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host import HostTable
from lutjax.training.lm import Run, TrainingConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its training."""

    features: int = 768
    n_layers: int = 12
    context: int = 512
    batch_size: int = 16
    steps: int = 20
    tokens: int = 64
    dtype: str = "bfloat16"


ORDERS, HEADS, WIDTH = (2, 3, 4), 2, 128
N_TABLES = len(ORDERS) * HEADS


def best(f: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest call."""
    return float(min(time_calls(f, repeats)))


def n_rows(gigabytes: float) -> int:
    """Return the rows per table."""
    return int(gigabytes * 1e9 / (4 * WIDTH * N_TABLES))


def fill(table: HostTable, key: Any) -> None:
    """Write all rows of a table, so that its memory is allocated. Sampling takes longer."""
    table.init = jax.nn.initializers.zeros
    table.draw(key)
    assert table.weights is not None
    flat = table.weights.reshape(-1)
    size = 1 << 24
    host.in_threads(lambda at: flat[at : at + size].fill(0.01), range(0, flat.size, size))


def measure_rows(gigabytes: float, sizes: Sizes, repeats: int) -> None:
    """Print rows per second, and the copy speed."""
    table = HostTable((N_TABLES, n_rows(gigabytes), WIDTH), np.float32, jax.nn.initializers.zeros)
    start = time.perf_counter()
    fill(table, jax.random.key(0))
    seconds = f"written in {time.perf_counter() - start:.1f} s by {host.n_threads()} threads"
    print(f"{table} of {table.nbytes / 1e9:.1f} GB, {seconds}")
    table.start(optim.RowAdam())
    n = sizes.batch_size * sizes.context
    rng = np.random.default_rng(0)
    ids = rng.integers(0, table.shape[1], (n, N_TABLES, 1)).astype(np.int32)
    n_bytes = ids.size * WIDTH * 4
    source = np.ones((8, n_bytes // 4), np.float32)
    copied = np.empty_like(source)
    at = [(k, part) for k in range(8) for part in host.row_slices(n_bytes // 4, 1 << 16)]

    def copy() -> None:
        host.in_threads(lambda job: np.copyto(copied[job], source[job]), at)

    seconds = best(copy, repeats) / 8
    print(f"| copy | {seconds * 1e3:.2f} ms | {n_bytes / seconds / 1e9:.1f} GB/s |")
    copy_speed = n_bytes / seconds

    def loss(rows: Any, index: Any) -> Any:
        with host.provide_rows({table: rows["memory"]}):
            weights, own = table.read(index)
            return lutjax.weighted_lookup(weights, own, jnp.ones(own.shape), groups=N_TABLES).sum()

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        rows = {"memory": jnp.asarray(table.gather(ids))}
        _, gradients = optim.value_and_grad(loss)(rows, jnp.asarray(ids))
        gradient = jax.device_get(host.open_gradient(table.gradient_of(gradients["memory"], ids)))
    out = table.gather(ids)
    calls = {
        "gather": lambda: table.gather(ids, out),
        "update": lambda: table.update(gradient, 0.01),
    }
    for name, f in calls.items():
        seconds = best(f, repeats)
        share = (
            f"{n_bytes / seconds / 1e9:.1f} GB/s of rows, "
            f"{100 * n_bytes / seconds / copy_speed:.0f} % of copies"
        )
        print(
            f"| {name} | {seconds * 1e3:.2f} ms | {share} | {ids.size / seconds / 1e6:.1f} M "
            "rows/s |"
        )


def measure_kinds(sizes: Sizes, repeats: int) -> None:
    """Print gather and update times for NumPy and each memory kind."""
    n_rows, n = 600_000, sizes.batch_size * sizes.context * N_TABLES
    ids = np.random.default_rng(0).integers(0, n_rows, n).astype(np.int32)
    table = HostTable((1, n_rows, WIDTH), np.float32, jax.nn.initializers.zeros)
    fill(table, jax.random.key(0))
    table.start(optim.SGD())
    index, ones = ids[:, None, None], np.ones((n, 1, WIDTH), np.float32)
    options = {"groups": 1, "valued": 1, "accumulate": None}
    look_up = WeightedLookup.from_arrays(
        (None, index, np.ones((n, 1, 1), np.float32)), options.items()
    )
    gradient = TableGradient(look_up, ones, None, np.float32(0), table.shape, table.dtype)
    out = table.gather(index)
    calls = (lambda: table.gather(index, out), lambda: table.update(gradient, 0.1))
    print(f"| NumPy | {' | '.join(f'{best(call, repeats) * 1e3:.2f} ms' for call in calls)} |")
    rows, device = np.full((n_rows, WIDTH), 0.01, np.float32), jax.devices()[0]
    for kind in sorted({memory.kind for memory in device.addressable_memories()} - {"device"}):
        try:
            where = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
            times = time_kind(where, jax.device_put((rows, ids, ones[:, 0]), where), repeats)
            print(f"| {kind} | {' | '.join(times)} |")
        except (
            ValueError,
            NotImplementedError,
            RuntimeError,
        ) as error:  # unsupported by the device
            print(f"| {kind} | {type(error).__name__}: {str(error).splitlines()[0][:120]} |")


def time_kind(where: Any, arrays: Any, repeats: int) -> list[str]:
    """Return gather and update times in a memory kind, computed on the host."""
    table, ids, gradient = arrays
    gather = compute_on_host(lambda rows, ids: rows[ids], where.memory_kind)
    update = compute_on_host(lambda rows, ids, g: rows.at[ids].add(-0.1 * g), where.memory_kind)
    gathers = jax.jit(gather, out_shardings=where)
    updates = jax.jit(update, donate_argnums=0, out_shardings=where)

    def move() -> Any:
        nonlocal table
        table = updates(table, ids, gradient)
        return table

    return [f"{best(call, repeats) * 1e3:.2f} ms" for call in (lambda: gathers(table, ids), move)]


def compute_on_host(f: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a function that a device program computes on the host."""
    if jax.__version_info__ < (0, 11):
        return compute_on("device_host")(jax.jit(f))
    if kind != "pinned_host":
        raise NotImplementedError(f"jax {jax.__version__} only computes in pinned_host")
    on_host: Any = compute_on  # typed for another version
    return on_host(jax.jit(f), compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def build_run(sizes: Sizes, placement: str, rows: int, depth: int = 0) -> Run:
    """Return a run on random bytes."""
    text = np.random.default_rng(0).integers(0, 256, 1 << 22).astype(np.uint8)
    model = {name: getattr(sizes, name) for name in ("features", "n_layers", "context", "dtype")}
    memory = {
        "orders": ORDERS,
        "heads": HEADS,
        "width": WIDTH,
        "rows": rows,
        "layers": (1,),
        "placement": placement,
    }
    model |= {"memory": True, **{f"memory_{name}": value for name, value in memory.items()}}
    config = GPTConfig(n_heads=max(sizes.features // 64, 1), feed_forward="dense", **model)
    rates = {"optimizer": "adamw", "learning_rate": 1e-4, "memory_depth": depth}
    return Run(config, TrainingConfig(steps=10_000, batch_size=sizes.batch_size, **rates), text)


def step_time(run: Run, sizes: Sizes, repeats: int) -> float:
    """Return the seconds per step."""
    state, done = run.init(), 0

    def advance() -> None:
        nonlocal state, done
        state, loss = run.advance(state, done, sizes.steps)
        float(loss)
        done += sizes.steps

    return best(advance, repeats) / sizes.steps


def token_times(runs: dict[str, Run], texts: int, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Return the seconds per token of `generate` for some texts, with alternating models."""
    prompts = np.random.default_rng(0).integers(0, 256, (texts, 16)).astype(np.int32)

    models: dict[str, Any] = {
        name: run.structure.model(*run.structure.init(0)) for name, run in runs.items()
    }

    def generated(model: Any, n: int) -> float:
        return best(
            lambda: model.generate(prompts, n, key=jax.random.key(0)).block_until_ready(), 1
        )

    turns = [
        {
            name: [generated(model, n) for n in (1, sizes.tokens + 1)]
            for name, model in models.items()
        }
        for _ in range(repeats)
    ]
    first_and_all = {name: np.min([turn[name] for turn in turns], 0) for name in models}
    return {
        name: float(np.diff(seconds)[0]) / sizes.tokens for name, seconds in first_and_all.items()
    }


def host_table(run: Run) -> HostTable:
    """Return the host table of a run."""
    return next(table for table, _ in run.structure.host_tables.values())


def measure_steps(given: Any, sizes: Sizes, small: Run) -> Run:
    """Print the times of steps; return the last run with a host table."""
    alone = step_time(small, sizes, given.repeats)
    print(f"| small table on the device | {alone * 1e3:.2f} ms a step |")
    table = None
    for depth in given.depths:
        run = build_run(sizes, "host", n_rows(given.gigabytes), depth)
        own = host_table(run)
        if table is None:
            fill(own, jax.random.key(0))
        else:  # reuse the rows of the previous table
            own.weights, own.moved, table.weights = table.weights, table.moved, None
        table = own
        own.draw = lambda key: None  # type: ignore[method-assign]
        seconds = step_time(run, sizes, given.repeats)
        times = f"{seconds * 1e3:.2f} ms a step | {seconds / alone:.3f} times"
        print(f"| table on the host, depth {depth} | {times} |", flush=True)
    return run


def measure_tokens(given: Any, sizes: Sizes, small: Run, on_host: Run) -> None:
    """Print the times of tokens."""
    table = host_table(on_host)
    for who in ("GPU", "CPU"):  # the CPU reads for devices without access to host memory
        is_shown = HostTable._is_shown_to if who == "GPU" else lambda *_: False
        with unittest.mock.patch.object(HostTable, "_is_shown_to", is_shown):
            jax.clear_caches()
            start = time.perf_counter()
            jax.jit(lambda index: table.read(index)[0]).lower(np.zeros((1, N_TABLES, 1), np.int32))
            if who == "GPU":
                print(f"the rows are locked in {time.perf_counter() - start:.1f} s")
            for n in given.texts:
                times = token_times({"device": small, "host": on_host}, n, sizes, given.repeats)
                device, on = (f"{times[name] * 1e3:.3f} ms" for name in ("device", "host"))
                ratio = f"{times['host'] / times['device']:.3f} times"
                where = (
                    f"{device} a token, small table on the device | {on} on the host, the {who} "
                    "reads"
                )
                print(f"| {n} texts | {where} | {ratio} |", flush=True)


def main() -> None:
    given = parse(
        __doc__,
        "what",
        what=(dict.fromkeys(["rows", "kinds", "steps", "decode"]), "measurements; default: all"),
        gigabytes=(60.0, "size of the host table"),
        repeats=(3, "repetitions"),
        texts=([1, 16], "numbers of texts that decode together"),
        depths=([0, 1, 2], "prefetch depths"),
    )
    sizes = Sizes()
    if "rows" in given.what:
        measure_rows(given.gigabytes, sizes, given.repeats)
    if "kinds" in given.what:
        measure_kinds(sizes, given.repeats)
    if {"steps", "decode"} & set(given.what):
        small, on_host = (
            build_run(sizes, "device", 1 << 14),
            build_run(sizes, "host", n_rows(given.gigabytes)),
        )
        table = host_table(on_host)
        dense = f"{(on_host.structure.n_parameters() - table.nbytes // 4) / 1e6:.0f} M parameters"
        size = f"a table of {table.nbytes / 1e9:.1f} GB in the memory of the host"
        print(f"{dense} on {jax.devices()[0].device_kind}, and {size}")
        if "steps" in given.what:
            on_host = measure_steps(given, sizes, small)
        else:
            fill(table, jax.random.key(0))
            table.draw = lambda key: None  # type: ignore[method-assign]
        if "decode" in given.what:
            measure_tokens(given, sizes, small, on_host)


if __name__ == "__main__":
    main()
