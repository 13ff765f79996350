"""Per-sequence starts in attention: the results match one call per sequence, and the implementations running them."""

import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax.dispatch.registry import Backend, Declaration, KernelSpec, Platform, devices_of

B, L, KEYS, T, C, INPUTS, OUTPUTS = 3, 4, 7, 3, 2, 5, 2
RNG = np.random.default_rng(0)
STARTS = np.asarray([0, 9, -1], np.int32)
X, KEY = (RNG.normal(size=(B, n, INPUTS)).astype(np.float32) for n in (L, KEYS))
POSITIONS = RNG.normal(size=(12, T, 1)).astype(np.float32)
ANCHORS = np.array([[RNG.permutation(INPUTS)[:2] for _ in range(C)] for _ in range(T)], np.int32)
JOINT = np.array(
    [[RNG.permutation(2 * INPUTS + 1)[:2] for _ in range(3)] for _ in range(T)], np.int32
)
TABLES = {
    bits: RNG.normal(size=(T, 2**bits, OUTPUTS)).astype(np.float32) for bits in (3, 2 * C + 1)
}


def concatenated(x, keys, weights, positions, **options):
    query, key = (lutjax.detect(a, ANCHORS) for a in (x, keys))
    return lutjax.lookup_attention(weights, query, key, lutjax.detect_signs(positions), **options)


def pair(x, keys, weights, positions, **options):
    return lutjax.lut_pair_attention(x, weights, JOINT, positions, keys=keys, **options)


ATTENTIONS = {"concatenated": (concatenated, TABLES[2 * C + 1]), "pair": (pair, TABLES[3])}


def test_other_implementations_say_why_not():
    declared = Declaration(directions=("forward",))
    other = KernelSpec(
        "lookup_attention", Platform.PALLAS, Backend.ANY, "somewhere", declared=declared
    )
    (device,), (query, key) = devices_of([X]), (lutjax.detect(a, ANCHORS) for a in (X, KEY))
    for starts, why in ((STARTS, "reads one start for all sequences"), (STARTS[1], None)):
        made, *_ = lutjax.kernel_registry.calls_of(
            "lookup_attention", TABLES[2 * C + 1][:, : 4**C], query, key, query_start=starts
        )
        result = other.unsupported_reason(made.request("forward", device))
        assert result is None if why is None else why in result


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("starts", "message"), [
    ({"query_start": STARTS[:2]}, r"query_start is int32\[2\].*expected \[\], .* or \[3\], one for each"),
    ({"key_start": STARTS[:, None]}, r"key_start is int32\[3, 1\]"),
    ({"query_start": STARTS.astype(np.float32)}, "its dtype must be int32"),
], ids=str)  # fmt: skip
def test_impossible_starts(starts, message):
    attend, weights = ATTENTIONS["concatenated"]
    with pytest.raises((ValueError, TypeError), match=message):
        attend(X, KEY, weights, POSITIONS, **starts)


def test_layers_take_them():
    from flax import nnx

    from lutjax.layers.nnx import LUTAttention

    layer = LUTAttention(
        INPUTS,
        OUTPUTS,
        n_detectors=T,
        n_anchors=C,
        n_positions=12,
        n_position_bits=1,
        anchors=ANCHORS,
        rngs=nnx.Rngs(0),
    )
    layer.weights[...] = jnp.asarray(TABLES[2 * C + 1])
    y = layer(X, KEY, query_start=STARTS)
    for b, start in enumerate(STARTS):
        np.testing.assert_allclose(
            y[b], layer(X[b], KEY[b], query_start=int(start)), rtol=1e-5, atol=1e-6
        )
