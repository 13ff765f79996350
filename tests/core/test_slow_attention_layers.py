"""Cached attention in all three libraries: decoding in parts matches the full pass."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_libraries import (
    Case,
    assert_drawn,
    by_kind,
    inputs_of,
    nnx_layer,
    variables_on_a_grid as variables_of,
)

import lutjax
from lutjax.layers import haiku as lutjax_haiku, linen
from lutjax.testing import assert_close

TABLES = {"n_detectors": 5, "n_anchors": 3}
POSITIONS = {"n_positions": 8, "n_position_bits": 2}
OWN = {"shared_positions": False}
CASES = {
    "without positions": Case("LUTAttention", {**TABLES, "window": 4}, (2, 9, 7)),
    "attention": Case("LUTAttention", {**TABLES, **POSITIONS}, (2, 9, 7)),
    "own positions": Case("LUTAttention", {**TABLES, **POSITIONS, **OWN, "window": 5}, (9, 7)),
    "fixed point": Case(
        "LUTAttention", {**TABLES, **POSITIONS, "accumulate": lutjax.FixedPoint(16)}, (2, 9, 7)
    ),
    "pair": Case("LUTPairAttention", {**TABLES, **POSITIONS, **OWN}, (2, 9, 7)),
    "pair without positions": Case("LUTPairAttention", {**TABLES, "n_positions": 8}, (2, 9, 7)),
}


def chunks(x, lengths):
    ends = np.cumsum(lengths)
    assert ends[-1] == x.shape[-2]
    return [x[..., end - n : end, :] for end, n in zip(ends, lengths, strict=True)]


@nnx.jit
def run(layer, x):
    return layer(x)


@pytest.mark.parametrize("name", CASES)
def test_decoding_equals_full_pass(name):
    case = CASES[name]._replace(shape=(*CASES[name].shape[:-2], 20, 7))
    arrays, x, capacity = variables_of(case), inputs_of(case), case.spec.capacity
    want = jax.jit(dataclasses.replace(case.spec, window=capacity))(arrays, x)
    decode = jax.jit(case.spec.attend_with_cache)
    for lengths in ((20,), (1,) * 20, (13, 1, 6)):
        cache, got = case.spec.empty_cache(x.shape, x.dtype), []
        for chunk in chunks(x, lengths):
            y, cache = decode(arrays, cache, chunk)
            got.append(y)
        np.testing.assert_array_equal(jnp.concatenate(got, -2), want, err_msg=str(lengths))
        assert cache["cache_index"] == capacity
        assert set(cache) == set(case.spec.cache_names) - {"cached_counts"}


@pytest.mark.parametrize("name", ["attention", "pair"])
def test_libraries_decode(name):
    case = CASES[name]
    arrays, x = variables_of(case), inputs_of(case)
    kinds, parts = by_kind(case, arrays), chunks(x, (4, 1, 4))
    want = jax.jit(case.spec)(arrays, x)

    layer = nnx.view(nnx_layer(case, arrays), decode=True, batch_size=2)
    np.testing.assert_array_equal(jnp.concatenate([run(layer, part) for part in parts], -2), want)
    kept = nnx.to_pure_dict(nnx.state(layer, nnx.Cache))
    assert set(kept) == set(case.spec.cache_names) - {"cached_counts"}

    layer = getattr(linen, case.layer)(*case.sizes, **case.options, decode=True)
    cache, got = layer.init(jax.random.key(0), parts[0])["cache"], []
    assert cache["cache_index"] == 0
    apply = jax.jit(functools.partial(layer.apply, mutable=["cache"]))
    for part in parts:
        y, new = apply({**kinds, "cache": cache}, part)
        cache = new["cache"]
        got.append(y)
    np.testing.assert_array_equal(jnp.concatenate(got, -2), want)

    f = hk.transform_with_state(
        lambda x: getattr(lutjax_haiku, case.layer)(
            *case.sizes, **case.options, decode=True, name="layer"
        )(x)
    )
    state, got = f.init(jax.random.key(0), parts[0])[1], []
    assert state["layer"]["cache_index"] == 0
    state["layer"]["anchors"] = arrays["anchors"]
    apply = jax.jit(f.apply)
    for part in parts:
        y, state = apply({"layer": kinds["params"]}, state, None, part)
        got.append(y)
    np.testing.assert_array_equal(jnp.concatenate(got, -2), want)


def test_decoding_is_an_argument_of_calls():
    """Decode by call argument as by layer argument; in Linen the first call creates the cache."""
    case = CASES["attention"]
    arrays, x = variables_of(case), inputs_of(case)
    kinds, (first, second) = by_kind(case, arrays), chunks(x, (4, 5))
    want = jax.jit(case.spec)(arrays, x)

    layer = linen.LUTAttention(*case.sizes, **case.options)
    apply = jax.jit(functools.partial(layer.apply, decode=True, mutable=["cache"]))
    y, cache = apply(kinds, first)
    np.testing.assert_array_equal(y, want[:, :4])
    np.testing.assert_array_equal(apply({**kinds, **cache}, second)[0], want[:, 4:])

    f = hk.transform_with_state(
        lambda x: lutjax_haiku.LUTAttention(*case.sizes, **case.options, name="layer")(
            x, decode=True
        )
    )
    state = f.init(jax.random.key(0), first)[1]
    state["layer"]["anchors"] = arrays["anchors"]
    y, state = jax.jit(f.apply)({"layer": kinds["params"]}, state, None, first)
    np.testing.assert_array_equal(y, want[:, :4])
    y, _ = jax.jit(f.apply)({"layer": kinds["params"]}, state, None, second)
    np.testing.assert_array_equal(y, want[:, 4:])


T, C, N, K, L, INPUTS, OUTPUTS = 3, 1, 1, 2, 5, 4, 6


SIZES = {"n_detectors": T, "n_anchors": 1, "n_positions": L - 1, "n_position_bits": N}


SPARSE_CASES = {
    "concatenated": Case("LUTAttention", {**SIZES, "n_targets": 2}, (2, L, INPUTS)),
    "pair": Case(
        "LUTPairAttention",
        {**SIZES, "n_anchors": 3, "n_targets": 2, "targets_per": "table", "causal": False},
        (2, L, INPUTS),
    ),
}


@pytest.mark.parametrize("name", SPARSE_CASES)
def test_layers_of_edge_lists(name):
    case = SPARSE_CASES[name]
    x = inputs_of(case)
    (arrays, *_) = assert_drawn(case, x)
    assert arrays["targets"].shape == ((T, 8, 2) if name == "concatenated" else (T, 1, 2))
    assert arrays["weights"].shape == (T, 8, 2)
    arrays = {**arrays, "weights": jax.random.normal(jax.random.key(1), (T, 8, 2))}
    y = case.spec(arrays, x)
    assert y.shape == (2, L, 6)
    op = lutjax.lut_attention if name == "concatenated" else lutjax.lut_pair_attention
    dense = jnp.asarray(
        np.einsum(
            "trk,trko->tro",
            arrays["weights"],
            jax.nn.one_hot(np.broadcast_to(arrays["targets"], (T, 8, 2)), 6),
        ),
        jnp.float32,
    )
    positions = arrays["positions"]
    assert_close(
        "y", y, op(x, dense, arrays["anchors"], positions, causal=case.options.get("causal", True))
    )


def test_decoding_of_edge_lists():
    case = SPARSE_CASES["concatenated"]
    x = inputs_of(case)
    layer = nnx_layer(case)
    layer.weights = jax.random.normal(jax.random.key(1), layer.weights.shape)
    whole = layer(x)
    layer.init_cache(x.shape)
    parts = [layer(x[:, :3], decode=True), layer(x[:, 3:], decode=True)]
    assert_close("decoded", jnp.concatenate(parts, 1), whole)
    assert layer.out_features == 6
