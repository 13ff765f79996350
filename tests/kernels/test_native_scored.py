"""Native kernels for scored reads, beyond the parity suite's sizes: several sample blocks, outputs across many vectors."""

import dataclasses

import jax
import jax.numpy as jnp
import native_kernels
import numpy as np
import pytest

import lutjax
from lutjax import reads
from lutjax.dispatch import _transforms

if why := native_kernels.why_not():
    pytest.skip(why, allow_module_level=True)

LAYERS = [
    (reads.Confidence(), (130, 2, 9, 6, 48), False, "float32"),
    (reads.Confidence(ways=1), (70, 3, 5, 4, 19), True, "float32"),
    (reads.Blend(), (67, 1, 3, 3, 37), False, "bfloat16"),
    (reads.PowersOfTwo(), (70, 3, 5, 4, 19), True, "float32"),
]
"""Reads; samples, groups, tables per group, bits and outputs; table factors; dtype."""


def differentiated(read, implementation, n, groups, each, bits, outputs, keep, dtype):
    """Return the output and every cotangent for a layer with out-of-range anchors included."""
    rng = np.random.default_rng(bits)
    tables, inputs = groups * each, 9
    anchors = rng.integers(-2, inputs + 2, (tables, bits, 2)).astype(np.int32)
    arrays = {
        "x": jnp.asarray(rng.normal(size=(n, groups, inputs)), dtype),
        "weights": jnp.asarray(rng.normal(size=(tables, 2**bits, outputs)), dtype),
        "scalars": read.initial(),
        "keep": jnp.asarray(rng.integers(0, 3, (n, tables)) / 2, dtype) if keep else None,
    }
    dy = jnp.asarray(rng.normal(size=(n, groups, outputs)), dtype)

    @jax.jit
    def run(arrays, dy):
        def f(a):
            return lutjax.scored_lut(
                a["x"], a["weights"], anchors, a["scalars"], read=read, groups=groups, keep=a["keep"],
                implementation=implementation,
            )  # fmt: skip

        y, pullback = jax.vjp(f, arrays)
        return y, pullback(dy)

    return run(arrays, dy)


def close(actual, expected, rounding):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = (np.asarray(v, np.float64) for v in (a, e))
        np.testing.assert_allclose(a, e, rtol=0, atol=rounding * np.abs(e).max())


@pytest.mark.parametrize(("read", "sizes", "keep", "dtype"), LAYERS, ids=str)
def test_many_samples_and_outputs(read, sizes, keep, dtype):
    close(
        *(differentiated(read, i, *sizes, keep, dtype) for i in ("native", "xla")),
        2e-5 if dtype == "float32" else 2**-7,
    )


def test_constants_are_those_of_the_read(monkeypatch):
    other = reads.Rounding(-2, 2, 2, negligible=1, most_shift=8, least_exact=1.0, most_ratio=2.0)
    sizes = (reads.PowersOfTwo(), "native", 70, 3, 5, 4, 19, True, "float32")
    ours = differentiated(*sizes)[0]
    monkeypatch.setattr(reads.PowersOfTwo, "rounding", other)
    _transforms.forget()
    try:
        native = differentiated(*sizes)
        plain = differentiated(reads.PowersOfTwo(), "xla", *sizes[2:])
    finally:
        _transforms.forget()
    assert np.any(native[0] != ours)
    close(native, plain, 2e-5)


FEW = [
    (reads.Confidence(), (1, 2, 70, 4, 19), None),
    (reads.Confidence(), (3, 1, 130, 3, 300), None),
    (reads.Hard(), (4, 3, 5, 3, 16), None),
    (reads.SoftSign(), (8, 2, 66, 3, 5), None),
    (reads.Blend(), (2, 2, 66, 3, 5), lutjax.FixedPoint(2.0**12)),
    (reads.PowersOfTwo(), (1, 2, 33, 4, 37), "int8"),
    (reads.PowersOfTwo(ways=1), (3, 1, 130, 3, 300), "int8"),
]
"""Reads; samples, groups, tables per group, bits and outputs; summation mode."""


@pytest.mark.parametrize(("read", "sizes", "sums"), FEW, ids=str)
def test_few_samples_are_as_among_many(read, sizes, sums):
    """Few samples put tables in the lanes; the bits are the same for any thread count."""
    from lutjax_cpu import _native

    n, groups, each, bits, outputs = sizes
    rng = np.random.default_rng(n)
    anchors = rng.integers(-2, 11, (groups * each, bits, 2)).astype(np.int32)
    x = rng.normal(size=(n, groups, 9)).astype(np.float32)
    x[-1, -1, 3] = np.nan
    weights = jnp.asarray(rng.normal(size=(groups * each, 2**bits, outputs)), jnp.float32)
    tables = lutjax.quantize_tables(weights, groups=groups) if sums == "int8" else weights

    def layer(x, implementation):
        return lutjax.scored_lut(
            x, tables, anchors, read.initial(), read=read, groups=groups, implementation=implementation,
            accumulate=sums if isinstance(sums, lutjax.FixedPoint) else None,
        )  # fmt: skip

    expected = np.asarray(
        layer(jnp.concatenate([x, np.ones((100, groups, 9), np.float32)]), "xla")
    )[:n]
    assert np.isnan(expected[-1, -1]).all() == (sums is None or sums == "int8")
    run = jax.jit(lambda x: layer(x, "native"))
    for level in _native.levels():
        with _native.use_level(level):
            actual = []
            for threads in (1, 2, 7):
                with _native.use_threads(threads):
                    actual.append(np.asarray(run(x)))
        np.testing.assert_allclose(
            actual[0], expected, rtol=0, atol=2e-5 * np.nanmax(np.abs(expected))
        )
        assert all(other.tobytes() == actual[0].tobytes() for other in actual)


def test_a_read_of_your_own_is_left_to_plain_jax():
    @dataclasses.dataclass(frozen=True)
    class Other(reads.Blend):
        pass

    x, anchors, weights = jnp.ones((2, 3)), np.array([[[0, 1]]], np.int32), jnp.ones((1, 2, 4))
    with pytest.raises(
        lutjax.NoImplementationError, match=r"reads of lutjax\.reads, not for Other"
    ):
        lutjax.scored_lut(x, weights, anchors, {}, read=Other(), implementation="native")
    assert lutjax.scored_lut(x, weights, anchors, {}, read=Other()).shape == (2, 4)


def test_more_inputs_than_places_in_int32_are_left_to_plain_jax():
    """Query only the kernel choice, without allocation."""
    read, anchors = reads.Hard(), np.array([[[0, 1]]], np.int32)
    weights = jnp.ones((1, 2, 4))
    for n, chosen in ((2**25 - 1, "native"), (2**25, "xla")):
        x = jax.ShapeDtypeStruct((1, n), jnp.float32)
        result = lutjax.explain("scored_lut", x, weights, anchors, {}, read=read)
        lines = [line for line in result.splitlines() if line.endswith(": chosen")]
        assert lines
        assert all(line.strip().startswith(chosen) for line in lines)
    assert f"at most {2**25 - 1} inputs, not {2**25}" in result
