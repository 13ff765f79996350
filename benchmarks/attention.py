"""Attention over some blocks of pairs: `python benchmarks/attention.py [--length 4096] [--share 0.1] [--implementation xla]`.

One sequence, 64 detectors of 6 and 6 and 4 bits, 32 inputs and outputs. A mask of blocks of 64 x 64 positions keeps a share of those that a causal call has.
Medians, of many calls in one compiled loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import options, print_table  # beside this file

import lutjax
from lutjax.benchmark.measure import device_time

DETECTORS, BITS, POSITION_BITS, INPUTS, BLOCK = 64, 6, 4, 32, 64
ROWS = 2 ** (2 * BITS + POSITION_BITS)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--implementation", help="tried before plain JAX; by default all are")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    anchors = np.asarray(lutjax.sample_anchors(jax.random.key(0), INPUTS, DETECTORS, BITS))
    x = jnp.asarray(rng.normal(size=(1, args.length, INPUTS)), jnp.float32)
    positions = jnp.asarray(rng.normal(size=(args.length - 1, DETECTORS, POSITION_BITS)), jnp.float32)
    table = jnp.asarray(rng.normal(size=(DETECTORS, ROWS, INPUTS)), jnp.float32)
    n_blocks = -(-args.length // BLOCK)
    causal = np.tril(np.ones((n_blocks, n_blocks), bool))
    mask = causal & (rng.random(causal.shape) < args.share)

    names = (args.implementation, "xla") if args.implementation else None

    def attend(x: Any, weights: Any, **options: Any) -> Any:
        return lutjax.lut_attention(x, weights, anchors, positions, implementation=names, **options)

    def passes(**options: Any) -> dict[str, float]:
        forward = functools.partial(attend, **options)
        backward = jax.grad(lambda x, w: jnp.sum(attend(x, w, **options)))
        calls: dict[str, Callable[..., Any]] = {"forward": forward, "forward and backward to x": backward}
        return {name: device_time(call, x, table).p50 for name, call in calls.items()}

    some = f"{mask.sum() / causal.sum():.0%} of the blocks"
    ways = {"all pairs": passes(), some: passes(block_mask=mask, block_sizes=BLOCK)}
    print(f"{args.length} positions, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    rows = (
        (name, way, f"{1e3 * seconds[name]:.3g}", f"{seconds[name] / all_pairs:.2f}")
        for name, all_pairs in ways["all pairs"].items()
        for way, seconds in ways.items()
    )
    print_table(["pass", "attention", "ms", "of all pairs"], rows, 2)


if __name__ == "__main__":
    main()
