"""Attention over some blocks of pairs: `python benchmarks/attention.py [--length 4096] [--share 0.1] [--implementation xla]`.

One sequence, 64 detectors of 6 and 6 and 4 bits, 32 inputs and outputs. A mask of blocks of 64 x 64 positions keeps a share of those that a causal call has.
Medians of calls that take turns.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lutjax

DETECTORS, BITS, POSITION_BITS, INPUTS, BLOCK = 64, 6, 4, 32, 64
ROWS = 2 ** (2 * BITS + POSITION_BITS)


def medians(calls: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Return seconds of each call, which all were called once before."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(found)) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--implementation")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    anchors = np.asarray(lutjax.sample_anchors(jax.random.key(0), INPUTS, DETECTORS, BITS))
    x = jnp.asarray(rng.normal(size=(1, args.length, INPUTS)), jnp.float32)
    positions = jnp.asarray(rng.normal(size=(args.length - 1, DETECTORS, POSITION_BITS)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(DETECTORS, ROWS, INPUTS)), jnp.float32)
    n_blocks = -(-args.length // BLOCK)
    causal = np.tril(np.ones((n_blocks, n_blocks), bool))
    mask = causal & (rng.random(causal.shape) < args.share)

    def attend(x: Any, weights: Any, **options: Any) -> Any:
        return lutjax.lut_attention(
            x, weights, anchors, positions, implementation=args.implementation, **options
        )

    def passes(weights: Any, **options: Any) -> dict[str, Callable[[], Any]]:
        forward = jax.jit(lambda x, w: attend(x, w, **options))
        backward = jax.jit(jax.grad(lambda x, w: jnp.sum(attend(x, w, **options))))
        return {
            "forward": lambda: forward(x, weights),
            "forward and backward to x": lambda: backward(x, weights),
        }

    ways = {
        "all pairs": passes(table),
        f"{mask.sum() / causal.sum():.0%} of the blocks": passes(table, block_mask=mask, block_sizes=BLOCK),
    }
    print(f"{args.length} positions, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print("| pass | attention | ms | of all pairs |\n| --- | --- | --- | --- |")
    for name in next(iter(ways.values())):
        found = medians({way: calls[name] for way, calls in ways.items()}, args.turns)
        for way, seconds in found.items():
            print(f"| {name} | {way} | {1e3 * seconds:.0f} | {seconds / found['all pairs']:.2f} |")


if __name__ == "__main__":
    main()
