"""Look-ups with lists of edges beside rows of as many slots: `python benchmarks/edges.py [--implementation native]`.

64 tables of 64 rows with 16 384 edges in all reach 512 outputs, for 1024 samples: four edges a row, or other numbers. A list of edges, rows padded to
the longest and, forward, rows in buckets by length (powers of two) take turns in one process; medians are printed as a table in Markdown, with the
bytes of weights and targets and those that the compiled program needs beside its arguments and results.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import in_turns, options, print_table  # beside this file

import lutjax
from lutjax.benchmark.results import size
from lutjax.wiring import Edges, from_edges

SAMPLES, TABLES, BITS, OUTPUTS, INPUTS, EDGES = 1024, 64, 6, 512, 256, 16384
ROWS = 2**BITS
REPEATS = 15
MOST_PADDED = 2**22  # numbers of the largest padded table that is tried


def lengths(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Numbers of edges of all rows, by name."""
    n = TABLES * ROWS
    yield "four each", np.full(n, 4)
    long = np.full(n, 3)
    long[rng.permutation(n)[: EDGES - 3 * n]] += 1
    long[n // 2] = 260
    yield "one of 260, others of 3 or 4", long
    yield "geometric", rng.geometric(0.2, n) - 1
    shares = (1 + rng.permutation(n)) ** -0.8
    yield "power law", np.bincount(rng.choice(n, EDGES, p=shares / shares.sum()), minlength=n)


def of_buckets(edges: Edges, weights: np.ndarray) -> tuple[Callable[..., jax.Array], Any]:
    """The look-up of rows in buckets, and its arrays: each bucket has a row without edges for all rows of others."""
    counts = edges.counts.ravel()
    first = np.asarray(edges.first)[:-1]
    arrays = []
    for width in 2 ** np.arange(int(counts.max(initial=1)).bit_length() + 1):
        rows = np.flatnonzero((counts > width // 2) & (counts <= width))
        if not rows.size:
            continue
        number = np.zeros(len(counts), np.int32)
        number[rows] = np.arange(1, len(rows) + 1)
        places = first[rows][:, None] + np.arange(width)
        used = np.arange(width) < counts[rows][:, None]
        at = np.minimum(places, edges.size - 1)
        target = np.where(used, np.asarray(edges.target)[at], OUTPUTS)
        empty = np.full((1, width), OUTPUTS)
        value = np.where(used, weights[at], 0)
        arrays.append((number, np.concatenate([empty, target]), np.concatenate([0.0 * empty, value])))

    def look_up(buckets: Any, index: jax.Array) -> jax.Array:
        y = jnp.zeros((index.shape[0], OUTPUTS + 1))
        sample = jnp.arange(index.shape[0])[:, None]

        def of_table(y: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            t, row = of
            for number, targets, values in buckets:
                place = number[t * ROWS + row]
                y = y.at[sample, targets[place]].add(values[place])
            return y, None

        return jax.lax.scan(of_table, y, (jnp.arange(TABLES), index.T))[0][:, :OUTPUTS]

    as_jax = [(n, jnp.asarray(t, jnp.int32), jnp.asarray(v, jnp.float32)) for n, t, v in arrays]
    return look_up, as_jax


def padded(edges: Edges, weights: np.ndarray) -> tuple[jax.Array, jax.Array] | None:
    """Weights and targets ``[T, R, K]`` of rows as long as the longest."""
    counts = edges.counts.ravel()
    width = int(counts.max())
    if counts.size * width > MOST_PADDED:
        return None
    place = np.repeat(np.arange(counts.size), counts)
    lane = np.arange(edges.size) - np.asarray(edges.first)[place]
    target, value = np.full((counts.size, width), -1, np.int32), np.zeros((counts.size, width), np.float32)
    target[place, lane], value[place, lane] = edges.target, weights
    shape = TABLES, ROWS, width
    return jnp.asarray(value.reshape(shape)), jnp.asarray(target.reshape(shape))


def rows(implementation: str) -> Iterator[list[str]]:
    """Rows of the table."""
    rng = np.random.default_rng(0)
    anchors = lutjax.sample_anchors(jax.random.key(0), INPUTS, TABLES, BITS)
    x, dy = (jnp.asarray(rng.normal(size=(SAMPLES, n)), jnp.float32) for n in (INPUTS, OUTPUTS))
    d = jax.jit(lambda x: lutjax.detect(x, anchors))(x)

    def forward(weights: Any, targets: Any) -> jax.Array:
        return lutjax.sparse_lookup(weights, d, targets, OUTPUTS, implementation=implementation)

    def backward(weights: Any, targets: Any) -> Any:
        def f(weights: Any, margin: Any) -> jax.Array:
            read = lutjax.Detection(d.index, d.flip, margin, d.bits)
            return lutjax.sparse_lookup(weights, read, targets, OUTPUTS, implementation=implementation)

        return jax.vjp(f, weights, d.margin)[1](dy)

    for name, counts in lengths(rng):
        place = np.repeat(np.arange(counts.size), counts)
        target = rng.integers(0, OUTPUTS, place.size)
        edges = from_edges(
            place // ROWS, place % ROWS, target, n_detectors=TABLES, n_rows=ROWS, n_outputs=OUTPUTS
        )
        weights = rng.normal(size=edges.size).astype(np.float32)
        on_device = jax.tree.map(jnp.asarray, edges)
        ways: dict[str, tuple[Any, ...]] = {"list of edges": (jnp.asarray(weights), on_device)}
        if (found := padded(edges, weights)) is not None:
            ways["padded"] = found
        of_both = {
            (way, f.__name__): (jax.jit(f), args) for way, args in ways.items() for f in (forward, backward)
        }
        look_up, buckets = of_buckets(edges, weights)
        programs = {f"{w}, {f}": p for (w, f), p in of_both.items()}
        programs["buckets, forward"] = jax.jit(look_up), (buckets, d.index)
        calls = {name: functools.partial(program, *args) for name, (program, args) in programs.items()}
        times = {name: float(np.median(each)) for name, each in in_turns(calls, REPEATS).items()}
        for way, args in {**ways, "buckets": (buckets, d.index)}.items():
            held = sum(a.nbytes for a in jax.tree.leaves(args if way != "buckets" else buckets))
            temporary = {
                f: programs[f"{way}, {f}"][0].lower(*args).compile().memory_analysis().temp_size_in_bytes
                for f in ("forward", "backward")
                if f"{way}, {f}" in programs
            }
            cells = [name, way, f"{edges.size:,}", str(int(counts.max())), size(held)]
            for f in ("forward", "backward"):
                known = f in temporary
                cells += [f"{1e3 * times[f'{way}, {f}']:.2f} ms", size(temporary[f])] if known else ["", ""]
            yield cells


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument("--implementation", default="xla", help="xla or native. Default: xla.")
    given = parser.parse_args()
    names = (
        "edges of a row",
        "as",
        "edges",
        "longest",
        "weights and targets",
        "forward",
        "beside",
        "backward",
        "beside",
    )
    print_table(names, rows(given.implementation), 2)


if __name__ == "__main__":
    main()
