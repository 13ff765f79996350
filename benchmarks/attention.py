"""Attention with a block mask.

Run `python benchmarks/attention.py [--length 4096] [--share 0.1] [--implementation xla]`.

One sequence, 64 detectors with 6 query, 6 key and 4 position bits, 32 inputs and outputs. The mask
keeps a share of the causal 64 x 64 blocks. Medians over many calls in one compiled loop.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import parse, print_table  # beside this file

import lutjax
from lutjax.benchmark.measure import device_time

DETECTORS, BITS, POSITION_BITS, INPUTS, BLOCK = 64, 6, 4, 32, 64


def main() -> None:
    given = parse(
        __doc__,
        length=(4096, "sequence length"),
        share=(0.1, "share of the blocks"),
        implementation=(str, "preferred implementation; default: all"),
    )
    rng = np.random.default_rng(0)
    anchors = np.asarray(lutjax.sample_anchors(jax.random.key(0), INPUTS, DETECTORS, BITS))
    x = jnp.asarray(rng.normal(size=(1, given.length, INPUTS)), jnp.float32)
    positions = jnp.asarray(
        rng.normal(size=(given.length - 1, DETECTORS, POSITION_BITS)), jnp.float32
    )
    table = jnp.asarray(
        rng.normal(size=(DETECTORS, 2 ** (2 * BITS + POSITION_BITS), INPUTS)), jnp.float32
    )
    causal = np.tril(np.ones(2 * (-(-given.length // BLOCK),), bool))
    mask = causal & (rng.random(causal.shape) < given.share)
    names = (given.implementation, "xla") if given.implementation else None

    def attend(x: Any, weights: Any, **options: Any) -> Any:
        return lutjax.lut_attention(x, weights, anchors, positions, implementation=names, **options)

    def time_passes(**options: Any) -> dict[str, float]:
        forward = functools.partial(attend, **options)
        backward = jax.grad(lambda x, w: jnp.sum(attend(x, w, **options)))
        calls: dict[str, Callable[..., Any]] = {
            "forward": forward,
            "forward and backward to x": backward,
        }
        return {name: device_time(call, x, table).p50 for name, call in calls.items()}

    masked = f"{mask.sum() / causal.sum():.0%} of the blocks"
    times = {"all pairs": time_passes(), masked: time_passes(block_mask=mask, block_sizes=BLOCK)}
    print(f"{given.length} positions, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    rows = (
        (name, pairs, f"{1e3 * seconds[name]:.3g}", f"{seconds[name] / all_pairs:.2f}")
        for name, all_pairs in times["all pairs"].items()
        for pairs, seconds in times.items()
    )
    print_table("pass | attention | ms | of all pairs", rows, 2)


if __name__ == "__main__":
    main()
