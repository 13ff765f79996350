"""Tables in the memory of the host beside those of a device: `python benchmarks/host_memory.py [rows] [kinds] [steps] [decode]`.

- `rows`: rows a second that all cores gather from a table of `--gigabytes` and move there, beside the speed at which they copy memory.
- `kinds`: the same of a table of 0.3 GB that JAX has in a kind of memory of the device, computed on the host (`jax.experimental.compute_on`), and of one in the
  memory of NumPy.
- `steps`: milliseconds of a training step of a GPT of 100 M parameters whose memory of n-grams has so many gigabytes in the memory of the host, for queues of several
  depths and as rows that are read inside of the step, beside the same GPT with a small table on the device.
- `decode`: milliseconds of a token of `generate`, of both, where the GPU reads the rows by itself and where the CPU reads them for it; seconds in which the
  memory is locked for the first.

Texts are random bytes, so that n-grams are spread over all rows. The best of `--repeats` counts. `--small` has sizes for a machine with two cores.
"""

import dataclasses
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import options, timed  # beside this file
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
    """Sizes of what is measured."""

    features: int = 768
    n_layers: int = 12
    context: int = 512
    batch_size: int = 16
    steps: int = 20
    tokens: int = 64
    dtype: str = "bfloat16"


SMALL = Sizes(features=64, n_layers=2, context=64, batch_size=8, steps=5, tokens=16, dtype="float32")
ORDERS, HEADS, WIDTH = (2, 3, 4), 2, 128
N_TABLES = len(ORDERS) * HEADS


def best(f: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of the fastest call."""
    return float(min(timed(f, repeats)))


def rows_of(gigabytes: float) -> int:
    """Return the rows of each table."""
    return int(gigabytes * 1e9 / (4 * WIDTH * N_TABLES))


def filled(table: HostTable, key: Any) -> None:
    """Make the rows of a table and write all of them, so that their memory is there: it is faster than drawing them."""
    table.init = jax.nn.initializers.zeros
    table.draw(key)
    assert table.weights is not None
    flat = table.weights.reshape(-1)
    size = 1 << 24
    host.in_threads(lambda at: flat[at : at + size].fill(0.01), range(0, flat.size, size))


def of_rows(gigabytes: float, sizes: Sizes, repeats: int) -> None:
    """Print rows a second, and the speed of copies."""
    table = HostTable((N_TABLES, rows_of(gigabytes), WIDTH), np.float32, jax.nn.initializers.zeros)
    start = time.perf_counter()
    filled(table, jax.random.key(0))
    print(
        f"{table} of {table.nbytes / 1e9:.1f} GB, written in {time.perf_counter() - start:.1f} s by {host.n_threads()} threads"
    )
    table.start(optim.RowAdam())
    n = sizes.batch_size * sizes.context
    rng = np.random.default_rng(0)
    ids = rng.integers(0, table.shape[1], (n, N_TABLES, 1)).astype(np.int32)
    n_bytes = ids.size * WIDTH * 4
    source = np.ones((8, n_bytes // 4), np.float32)
    copied, at = (
        np.empty_like(source),
        [(k, part) for k in range(8) for part in host.row_slices(n_bytes // 4, 1 << 16)],
    )

    def copy() -> None:
        host.in_threads(lambda job: np.copyto(copied[job], source[job]), at)

    seconds = best(copy, repeats) / 8
    print(f"| copy | {seconds * 1e3:.2f} ms | {n_bytes / seconds / 1e9:.1f} GB/s |")
    copy_speed = n_bytes / seconds

    def loss(rows: Any, index: Any) -> Any:
        with host.given({table: rows["memory"]}):
            weights, own = table.read(index)
            return lutjax.weighted_lookup(weights, own, jnp.ones(own.shape), groups=N_TABLES).sum()

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        gradient = optim.value_and_grad(loss)({"memory": jnp.asarray(table.gather(ids))}, jnp.asarray(ids))[
            1
        ]["memory"]
        gradient = jax.device_get(host.opened(table.gradient_of(gradient, ids)))
    out = table.gather(ids)
    for name, f in (
        ("gather", lambda: table.gather(ids, out)),
        ("update", lambda: table.update(gradient, 0.01)),
    ):
        seconds = best(f, repeats)
        print(
            f"| {name} | {seconds * 1e3:.2f} ms | {n_bytes / seconds / 1e9:.1f} GB/s of rows, {100 * n_bytes / seconds / copy_speed:.0f} % of copies | "
            f"{ids.size / seconds / 1e6:.1f} M rows/s |"
        )


def of_kinds(sizes: Sizes, repeats: int) -> None:
    """Print the times in which JAX gathers and moves rows of a table in each kind of memory, by stochastic gradient descent."""
    n_rows, n = 600_000, sizes.batch_size * sizes.context * N_TABLES
    ids = np.random.default_rng(0).integers(0, n_rows, n).astype(np.int32)
    rows = np.full((n_rows, WIDTH), 0.01, np.float32)
    table = HostTable((1, n_rows, WIDTH), np.float32, jax.nn.initializers.zeros)
    filled(table, jax.random.key(0))
    table.start(optim.SGD())
    out, ones = table.gather(ids[:, None, None]), np.ones((n, 1, WIDTH), np.float32)
    look_up = WeightedLookup.of(
        (None, ids[:, None, None], np.ones((n, 1, 1), np.float32)),
        {"groups": 1, "valued": 1, "accumulate": None}.items(),
    )
    gradient = TableGradient(look_up, ones, None, np.float32(0), table.shape, table.dtype)
    moved = best(lambda: table.update(gradient, 0.1), repeats)
    print(
        f"| NumPy | {best(lambda: table.gather(ids[:, None, None], out), repeats) * 1e3:.2f} ms | {moved * 1e3:.2f} ms |"
    )
    device = jax.devices()[0]
    for kind in sorted({memory.kind for memory in device.addressable_memories()} - {"device"}):
        try:
            print(f"| {kind} | {' | '.join(in_kind(device, kind, rows, ids, ones[:, 0], repeats))} |")
        except (ValueError, NotImplementedError, RuntimeError) as error:  # not every device can
            print(f"| {kind} | {type(error).__name__}: {str(error).splitlines()[0][:120]} |")


def in_kind(device: Any, kind: str, rows: Any, ids: Any, gradient: Any, repeats: int) -> list[str]:
    """Return the times in which JAX gathers and moves rows in a kind of memory, computing on the host."""
    where = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    table, ids, gradient = (jax.device_put(a, where) for a in (rows, ids, gradient))
    gather = _on_host(lambda rows, ids: rows[ids], kind)
    update = _on_host(lambda rows, ids, g: rows.at[ids].add(-0.1 * g), kind)
    gathers = jax.jit(gather, out_shardings=where)
    updates = jax.jit(update, donate_argnums=0, out_shardings=where)
    read = best(lambda: gathers(table, ids).block_until_ready(), repeats)

    def move() -> None:
        nonlocal table
        table = updates(table, ids, gradient)
        table.block_until_ready()

    return [f"{seconds * 1e3:.2f} ms" for seconds in (read, best(move, repeats))]


def _on_host(f: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Return a function that a program of the device computes on the host."""
    if jax.__version_info__ < (0, 11):
        return compute_on("device_host")(jax.jit(f))
    if kind != "pinned_host":
        raise NotImplementedError(f"jax {jax.__version__} computes in pinned_host alone")
    in_host: Any = compute_on  # its type is that of another version
    return in_host(jax.jit(f), compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def run_of(sizes: Sizes, placement: str, rows: int, depth: int = 0) -> Run:
    """Return a run, of random bytes."""
    text = np.random.default_rng(0).integers(0, 256, 1 << 22).astype(np.uint8)
    model = GPTConfig(
        features=sizes.features,
        n_layers=sizes.n_layers,
        n_heads=max(sizes.features // 64, 1),
        context=sizes.context,
        feed_forward="dense",
        dtype=sizes.dtype,
        memory=True,
        memory_orders=ORDERS,
        memory_heads=HEADS,
        memory_width=WIDTH,
        memory_rows=rows,
        memory_layers=(1,),
        memory_placement=placement,
    )
    training = TrainingConfig(
        steps=10_000, batch_size=sizes.batch_size, optimizer="adamw", learning_rate=1e-4, memory_depth=depth
    )
    return Run(model, training, text)


def step_time(run: Run, sizes: Sizes, repeats: int) -> float:
    """Return the seconds of a step."""
    state, done = run.init(), 0

    def advance() -> None:
        nonlocal state, done
        state, loss = run.advance(state, done, sizes.steps)
        float(loss)
        done += sizes.steps

    return best(advance, repeats) / sizes.steps


def token_times(runs: dict[str, Run], texts: int, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Return the seconds of a token of `generate` for so many texts by each run's model, measured in turns: the clocks of a machine drift."""
    prompts = np.random.default_rng(0).integers(0, 256, (texts, 16)).astype(np.int32)

    models: dict[str, Any] = {name: run.structure.model(*run.structure.init(0)) for name, run in runs.items()}

    def generated(model: Any, n: int) -> float:
        return best(lambda: model.generate(prompts, n, key=jax.random.key(0)).block_until_ready(), 1)

    turns = [
        {name: [generated(model, n) for n in (1, sizes.tokens + 1)] for name, model in models.items()}
        for _ in range(repeats)
    ]
    first_and_all = {name: np.min([turn[name] for turn in turns], 0) for name in models}
    return {name: float(np.diff(seconds)[0]) / sizes.tokens for name, seconds in first_and_all.items()}


def of_models(
    gigabytes: float, sizes: Sizes, repeats: int, what: list[str], texts: list[int], depths: list[int]
) -> None:
    """Print times of steps and of tokens."""
    small, on_host = run_of(sizes, "device", 1 << 14), run_of(sizes, "host", rows_of(gigabytes))
    table = next(iter(table for table, _ in on_host.structure.host_tables.values()))
    n_dense = on_host.structure.n_parameters() - table.nbytes // 4
    print(
        f"{n_dense / 1e6:.0f} M parameters on {jax.devices()[0].device_kind}, and a table of {table.nbytes / 1e9:.1f} GB in the memory of the host"
    )
    if "steps" in what:
        alone = step_time(small, sizes, repeats)
        print(f"| small table on the device | {alone * 1e3:.2f} ms a step |")
    for depth in depths if "steps" in what else (0,):
        if depth:
            on_host = run_of(sizes, "host", rows_of(gigabytes), depth)
        found = next(iter(table for table, _ in on_host.structure.host_tables.values()))
        if found is not table and table.weights is not None:  # the same rows, without writing them again
            found.weights, found.moved, table.weights = table.weights, table.moved, None
        elif found.weights is None:
            filled(found, jax.random.key(0))
        table = found
        table.draw = lambda key: None  # type: ignore[method-assign]
        if "steps" in what:
            seconds = step_time(on_host, sizes, repeats)
            print(
                f"| table on the host, depth {depth} | {seconds * 1e3:.2f} ms a step | {seconds / alone:.3f} times |",
                flush=True,
            )
    if "decode" in what:
        for who in ("GPU", "CPU"):  # the second is how it was, and is where no GPU can read
            is_shown = HostTable._is_shown_to if who == "GPU" else lambda *_: False
            with unittest.mock.patch.object(HostTable, "_is_shown_to", is_shown):
                jax.clear_caches()
                start = time.perf_counter()
                jax.jit(lambda index: table.read(index)[0]).lower(np.zeros((1, N_TABLES, 1), np.int32))
                if who == "GPU":
                    print(f"the rows are locked in {time.perf_counter() - start:.1f} s")
                for n in texts:
                    times = token_times({"device": small, "host": on_host}, n, sizes, repeats)
                    print(
                        f"| {n} texts | {times['device'] * 1e3:.3f} ms a token, small table on the device | {times['host'] * 1e3:.3f} ms on the host, the {who} reads | "
                        f"{times['host'] / times['device']:.3f} times |",
                        flush=True,
                    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "what",
        nargs="*",
        default=["rows", "kinds", "steps", "decode"],
        help="rows, kinds, steps, decode; by default all",
    )
    parser.add_argument(
        "--gigabytes", type=float, default=60, help="of the table in the memory of the host (60)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--texts", type=int, nargs="+", default=[1, 16], help="numbers of texts that decode together (1 16)"
    )
    parser.add_argument("--small", action="store_true", help="sizes for a machine with two cores")
    parser.add_argument(
        "--depths", type=int, nargs="+", default=[0, 1, 2], help="of the queue of steps (0 1 2)"
    )
    given = parser.parse_args()
    sizes = SMALL if given.small else Sizes()
    if "rows" in given.what:
        of_rows(given.gigabytes, sizes, given.repeats)
    if "kinds" in given.what:
        of_kinds(sizes, given.repeats)
    if {"steps", "decode"} & set(given.what):
        of_models(given.gigabytes, sizes, given.repeats, given.what, given.texts, given.depths)


if __name__ == "__main__":
    main()
