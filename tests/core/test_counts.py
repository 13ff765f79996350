"""Attention with a cache for the number of keys per row: the sums over all keys, in constant memory."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, strategies as st

import lutjax
from lutjax.layers import _counts, _tables, haiku as of_haiku, linen as of_linen, nnx as of_nnx

FEATURES, OUTPUTS, DETECTORS, BITS, LENGTH = 6, 3, 4, 2, 9
SIZES = {"n_detectors": DETECTORS, "n_anchors": BITS}
SPEC = _tables.LUTAttentionSpec(FEATURES, OUTPUTS, **SIZES, n_positions=LENGTH)
FINE = lutjax.FixedPoint(2.0**24)  # totals of more bits than a float32 has
SUMS = {"floats": None, "integers": FINE, "checked": lutjax.FixedPoint(2.0**20, checked=True)}


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays_of(seed=0, spec=SPEC):
    anchors = np.random.default_rng(seed).integers(0, FEATURES, (DETECTORS, BITS, 2))
    anchors[..., 1] = (anchors[..., 0] + 1) % FEATURES
    result = {"anchors": anchors.astype(np.int32), "weights": drawn(seed, *spec.weights_shape)}
    if spec.n_targets:
        result["targets"] = np.arange(spec.n_targets, dtype=np.int32)[None, None]
    return result


@functools.cache
def step(spec):
    return jax.jit(spec.attend_with_cache)


def decoded(spec, arrays, x, lengths, cached, segments=None):
    """Outputs and the last cache for parts with these lengths, with one kind of cache."""
    cache, result, at = spec.empty_cache(x.shape, x.dtype, cached=cached), [], 0
    for n in lengths:
        parts = (x[..., at : at + n, :], None if segments is None else segments[..., at : at + n])
        y, cache = step(spec)(arrays, cache, *parts)
        result.append(y)
        at += n
    return np.concatenate(result, -2), cache


def codes(arrays, x):
    """The section 1 definition, in NumPy: row ids ``[..., T]``."""
    pairs = x[..., arrays["anchors"]]
    bits = pairs[..., 0] - pairs[..., 1] > 0
    return (bits << np.arange(BITS)).sum(-1)


def definition(arrays, x, is_key, scale):
    """Sums over earlier keys in NumPy: integers with a scale, otherwise float64."""
    code, t = codes(arrays, x), np.arange(DETECTORS)
    y = np.zeros((*x.shape[:-1], OUTPUTS))
    for b, j, i in np.ndindex(*x.shape[:-1], x.shape[-2]):
        if i < j and is_key[b, i] and is_key[b, j]:
            rows = arrays["weights"][t, code[b, j] << BITS | code[b, i]].astype(np.float64)
            y[b, j] += (rows if scale is None else np.trunc(rows * scale)).sum(0)
    return y if scale is None else (y.astype(np.float32) / np.float32(scale))


PARTS = ((LENGTH,), (1,) * LENGTH, (4, 1, 4))


@given(
    st.integers(0, 2**31),
    st.sampled_from(PARTS),
    st.lists(st.booleans(), min_size=2 * LENGTH, max_size=2 * LENGTH),
    st.sampled_from(["floats", "integers"]),
)
def test_sums_of_earlier_keys(seed, lengths, is_key, sums):
    is_key = np.reshape(is_key, (2, LENGTH))
    spec = dataclasses.replace(SPEC, accumulate=SUMS[sums])
    arrays, x = arrays_of(seed), np.round(drawn(seed + 1, 2, LENGTH, FEATURES), 1)
    scale = None if SUMS[sums] is None else SUMS[sums].scale
    want = definition(arrays, x, is_key, scale)
    segments = np.where(is_key, 0, -3).astype(np.int32)
    y, cache = decoded(spec, arrays, x, lengths, "counts", segments)
    if scale is None:
        np.testing.assert_allclose(y, want, atol=1e-5)
    else:
        np.testing.assert_array_equal(y, want)
    held = np.zeros_like(cache["cached_counts"])
    for b, i in zip(*np.nonzero(is_key), strict=True):
        held[b, np.arange(DETECTORS), codes(arrays, x)[b, i]] += 1
    np.testing.assert_array_equal(cache["cached_counts"], held)


def decoded_in(spec, arrays, x, lengths, cached):
    """`decoded`, as a function with traceable arrays."""
    cache, result, at = spec.empty_cache(x.shape, x.dtype, cached=cached), [], 0
    for n in lengths:
        y, cache = spec.attend_with_cache(arrays, cache, x[..., at : at + n, :])
        result.append(y)
        at += n
    return jnp.concatenate(result, -2), cache


def test_all_keys_are_seen_in_constant_memory():
    spec = dataclasses.replace(SPEC, n_positions=3, accumulate=FINE)
    arrays, x = arrays_of(), drawn(1, 1, LENGTH, FEATURES)
    want = np.asarray(spec(arrays, x))
    y, cache = decoded(spec, arrays, x, (4, 5), "counts")
    np.testing.assert_array_equal(y, want)
    assert cache["cached_counts"].shape == (1, DETECTORS, 2**BITS)
    assert cache["cache_index"] == LENGTH
    forgotten, _ = decoded(spec, arrays, x, (4, 5), "ids")
    assert np.any(forgotten != want)


IMPOSSIBLE = {
    "positions": ({"n_position_bits": 2, "n_positions": 3},
        "as n_position_bits is 2: counts do not say at which distance"),
    "a window": ({"window": 3}, "as window is 3: counts do not say which keys are beyond it"),
    "later keys": ({"causal": False}, "as causal is False: a query also sees later keys"),
    "pooled keys": ({"pool": 3}, "as pool is 3: counts do not say in which block"),
    "lists of targets": ({"n_targets": 2}, r"as targets is \[4, 16, 2\]: counted rows have one list"),
    "another kind": ({"cached": "sums"}, "cached is 'sums'; expected one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_where_counts_do_not_hold(name):
    options, message = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=f"LUTAttention: .*{message}"):
        _tables.LUTAttentionSpec(FEATURES, OUTPUTS, **{**SIZES, "cached": "counts", **options})
    if name != "another kind":
        with pytest.raises(ValueError, match=message):
            _tables.LUTAttentionSpec(FEATURES, OUTPUTS, **SIZES, **options).empty_cache(
                (1, 1, FEATURES), "float32", cached="counts"
            )


@pytest.mark.usefixtures("without_typechecking")
def test_bad_calls():
    arrays, x = arrays_of(), drawn(1, 2, 3, FEATURES)
    cache = SPEC.empty_cache(x.shape, x.dtype, cached="counts")
    with pytest.raises(
        ValueError, match="segments has ids up to 1; a cache of counts holds keys of segment 0"
    ):
        SPEC.attend_with_cache(arrays, cache, x, np.asarray([[0, 0, 1]], np.int32))
    with pytest.raises(
        ValueError, match=r"cached_counts is int32\[2, 4, 4\]; these inputs need int32\[1, 4, 4\]"
    ):
        SPEC.attend_with_cache(arrays, cache, x[:1])
    with pytest.raises(ValueError, match="keys cannot be given when decoding"):
        SPEC.attend_with_cache(arrays, cache, x, keys=x)
    pairs = _tables.LUTPairAttentionSpec(FEATURES, OUTPUTS, **SIZES)
    with pytest.raises(ValueError, match="as cached is 'keys': keys have no rows of their own"):
        pairs.empty_cache(x.shape, x.dtype, cached="counts")
    layer = of_nnx.LUTAttention(FEATURES, OUTPUTS, **SIZES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="keeps either ids or counts"):
        layer.init_cache(x.shape, ids=True, counts=True)


@pytest.mark.usefixtures("without_typechecking")
def test_symbolic_batches(monkeypatch):
    monkeypatch.setattr(_counts, "_MOST_NUMBERS", 4 * _counts._SYMBOLIC_SIZE * DETECTORS * 2**BITS)
    spec, arrays = SPEC, arrays_of()

    def attend(x):
        return spec.attend_with_cache(
            arrays, spec.empty_cache(x.shape, x.dtype, cached="counts"), x
        )

    (batch,) = jax.export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, LENGTH, FEATURES), jnp.float32)
    with lutjax.use_implementation("xla"):
        call = jax.export.export(jax.jit(attend))(shape).call
    for n in (1, 3):
        x = drawn(2, n, LENGTH, FEATURES)
        (y, cache), (want, of_cache) = call(x), jax.jit(attend)(x)
        np.testing.assert_allclose(y, want, atol=1e-5)
        np.testing.assert_array_equal(cache["cached_counts"], of_cache["cached_counts"])


class TestSlow:
    def test_as_with_ids(self, monkeypatch):
        spec = dataclasses.replace(SPEC, accumulate=SUMS["checked"])
        arrays, x = arrays_of(spec=spec), jnp.asarray(drawn(1, 2, LENGTH, FEATURES))

        def both(cached, lengths):
            def loss(weights):
                y, _ = decoded_in(spec, {**arrays, "weights": weights}, x, lengths, cached)
                return jnp.sum(y * drawn(3, *y.shape)), y

            # In jit, since the most numbers of a block are chosen while it traces.
            (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
                jnp.asarray(arrays["weights"])
            )
            return y, gradient

        y, gradient = both("ids", (5, 1, 3))
        for most in (_counts._MOST_NUMBERS, 100):
            monkeypatch.setattr(_counts, "_MOST_NUMBERS", most)
            of_counts, of_table = both("counts", (5, 1, 3))
            np.testing.assert_array_equal(of_counts, y)
            np.testing.assert_allclose(of_table, gradient, atol=1e-3)

    def test_libraries(self):
        spec = dataclasses.replace(SPEC, accumulate=FINE)
        arrays, x = arrays_of(), jnp.asarray(drawn(1, 2, LENGTH, FEATURES))
        want, parts = spec(arrays, x), (x[:, :5], x[:, 5:6], x[:, 6:])
        options = {
            **SIZES,
            "n_positions": LENGTH,
            "accumulate": FINE,
            "decode": True,
            "cached": "counts",
        }

        layer = of_nnx.LUTAttention(
            FEATURES, OUTPUTS, **options, anchors=arrays["anchors"], rngs=nnx.Rngs(0)
        )
        layer.weights = arrays["weights"]
        for kinds in ({}, {"counts": True}):
            layer.init_cache(x.shape, **kinds)
            np.testing.assert_array_equal(jnp.concatenate([layer(part) for part in parts], 1), want)
        layer.init_cache(x.shape, ids=True)
        np.testing.assert_array_equal(jnp.concatenate([layer(part) for part in parts], 1), want)

        layer = of_linen.LUTAttention(FEATURES, OUTPUTS, **options)
        variables = layer.init(jax.random.key(0), parts[0])
        assert set(variables["cache"]) == {"cached_counts", "cache_index"}
        arrays = jax.tree.map(jnp.asarray, arrays)
        kinds = {
            "params": {"weights": arrays["weights"]},
            "anchors": {"anchors": arrays["anchors"]},
        }
        cache, actual = variables["cache"], []
        for part in parts:
            y, new = layer.apply({**kinds, "cache": cache}, part, mutable=["cache"])
            cache = new["cache"]
            actual.append(y)
        np.testing.assert_array_equal(jnp.concatenate(actual, 1), want)

        f = hk.transform_with_state(
            lambda x: of_haiku.LUTAttention(FEATURES, OUTPUTS, **options, name="layer")(x)
        )
        state, actual = f.init(jax.random.key(0), parts[0])[1], []
        state["layer"]["anchors"] = arrays["anchors"]
        for part in parts:
            y, state = f.apply({"layer": {"weights": arrays["weights"]}}, state, None, part)
            actual.append(y)
        np.testing.assert_array_equal(jnp.concatenate(actual, 1), want)
