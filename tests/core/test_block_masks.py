"""Block masks in attention: only pairs in selected blocks count, and tiles without any are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax import reference
from lutjax.dispatch import registry
from lutjax.kernels._xla import _pair_tiles
from lutjax.testing import assert_close

T, C, N, INPUTS, OUTPUTS, LENGTH = 2, 2, 1, 5, 3, 150
RNG = np.random.default_rng(0)
ANCHORS = np.array([[RNG.permutation(INPUTS)[:2] for _ in range(C)] for _ in range(T)], np.int32)
X = RNG.normal(size=(2, LENGTH, INPUTS)).astype(np.float32)
POSITIONS = RNG.normal(size=(LENGTH - 1, T, N)).astype(np.float32)
WEIGHTS = RNG.normal(size=(T, 2 ** (2 * C + N), OUTPUTS)).astype(np.float32)
DY = RNG.normal(size=(2, LENGTH, OUTPUTS)).astype(np.float32)
SIZES = 16, 24
MASK = RNG.random((-(-LENGTH // SIZES[0]), -(-LENGTH // SIZES[1]))) < 0.3


def test_tiles_equal_the_reference():
    def results(module):
        def run(x, weights, positions, mask):
            f = lambda *a: module.lut_attention(  # noqa: E731
                a[0], a[1], ANCHORS, a[2], block_mask=mask, block_sizes=SIZES, window=140
            )
            y, pull = jax.vjp(f, x, weights, positions)
            return y, pull(DY)

        return jax.jit(run)(X, WEIGHTS, POSITIONS, MASK)

    (y, actual), (wanted, expected) = results(lutjax), results(reference)
    assert_close("y", y, wanted)
    for name, a, b in zip(("dx", "d weights", "d positions"), actual, expected, strict=True):
        assert_close(name, a, b)


def test_only_tiles_of_the_blocks_are_visited():
    d = lutjax.detect(X[:1], ANCHORS)
    visited = {}
    for name, mask in {
        "some": MASK,
        "none": np.zeros_like(MASK),
        "all": np.ones_like(MASK),
    }.items():
        made, *_ = lutjax.kernel_registry.calls_of(
            "lookup_attention", WEIGHTS[:, : 4**C], d, d, block_mask=mask, block_sizes=SIZES
        )
        call = made.call.replace(query=d, key=d, block_mask=jnp.asarray(mask, jnp.int32))
        (device,) = registry.devices_of([jnp.zeros(1)])
        pairs = _pair_tiles.plan(call, device)
        visited[name] = int(pairs.for_each_tile(lambda tile, n: n + 1, jnp.int32(0)))
    assert visited["none"] == 0 < visited["some"] < visited["all"]


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("change", "message"), [
    ({"block_sizes": None}, "block_mask and block_sizes go together"),
    ({"block_mask": None}, "block_mask and block_sizes go together"),
    ({"block_mask": MASK[1:]},
     r"block_mask is bool\[9, 7\]; 150 queries and 150 keys in blocks of 16 and 24 need \[10, 7\]"),
    ({"block_mask": MASK.astype(np.int32)}, "its dtype must be bool"),
    ({"block_sizes": (16, 0)}, "blocks have at least 1 position"),
    ({"block_sizes": (16, 24, 8)}, "expected one number, or those of queries and of keys"),
    ({"implementation": "triton"}, "triton"),
], ids=str)  # fmt: skip
def test_impossible_masks(change, message):
    options = {"block_mask": MASK, "block_sizes": SIZES, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        lutjax.lut_attention(X, WEIGHTS, ANCHORS, POSITIONS, **options)


def test_layers_take_masks():
    from flax import nnx

    from lutjax.layers.nnx import LUTAttention

    layer = LUTAttention(
        INPUTS,
        OUTPUTS,
        n_detectors=T,
        n_anchors=C,
        anchors=ANCHORS,
        n_positions=LENGTH - 1,
        window=9,
        rngs=nnx.Rngs(0),
    )
    layer.weights[...] = jnp.asarray(WEIGHTS[:, : 4**C])
    blocks = {"block_mask": MASK, "block_sizes": SIZES}
    wanted = lutjax.lut_attention(X, WEIGHTS[:, : 4**C], ANCHORS, window=9, **blocks)
    assert_close("itself", layer(X, **blocks), wanted)
    assert_close("keys", layer(X, X, **blocks), wanted)
    layer.init_cache(X.shape, jnp.float32)
    with pytest.raises(ValueError, match="LUTAttention: block_mask cannot be given when decoding"):
        layer(X, decode=True, **blocks)
