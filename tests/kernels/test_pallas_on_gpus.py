"""Mosaic GPU kernels on a GPU: out-of-range ids, and sizes with partial blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import needs_gpu
from pallas_interpreter import attend

import lutjax
from lutjax import testing

pytestmark = [pytest.mark.gpu, needs_gpu]


def check_plain_jax(what, f, dy, *arguments):
    def run(implementation):
        y, pullback = jax.vjp(lambda *a: f(implementation, *a), *arguments)
        return y, *pullback(dy)

    for actual, expected in zip(run(("pallas", "triton")), run("xla"), strict=True):
        testing.assert_close(what, actual, expected)


@pytest.mark.parametrize(
    ("batch", "detectors", "bits", "outputs", "dtype"),
    [(1000, 37, 6, 300, "float32"), (129, 5, 7, 130, "float32"), (500, 9, 6, 700, "bfloat16")],
)
def test_lookup_of_any_ids_on_gpus(batch, detectors, bits, outputs, dtype):
    """A third of all ids are out of range."""
    keys = jax.random.split(jax.random.key(0), 4)
    weights = jax.random.normal(keys[0], (detectors, 2**bits, outputs)).astype(dtype)
    d = lutjax.detect_signs(jax.random.normal(keys[1], (batch, detectors, bits)))
    noise = jax.random.randint(keys[2], d.index.shape, -(2**31), 2**31 - 1)
    index, flip = (
        jnp.where(noise % 3 == 0, noise, d.index),
        jnp.where(noise % 5 == 0, noise, d.flip),
    )
    dy = jax.random.normal(keys[3], (batch, outputs)).astype(dtype)

    def look_up(implementation, weights, margin):
        any_ids = dataclasses.replace(d, index=index, flip=flip, margin=margin)
        return lutjax.lookup(weights, any_ids, implementation=implementation)

    check_plain_jax("lookup", look_up, dy, weights, d.margin)


@pytest.mark.parametrize(("batch", "gates", "bits", "dtype"), [
    (83, 21, 6, "float32"),
    (1037, 13, 3, "bfloat16"),
    (515, 5, 8, "float32"),
    (2048, 9, 1, "float16"),
])  # fmt: skip
def test_binary_lut_of_any_ids_on_gpus(batch, gates, bits, dtype):
    """Far out-of-range wires and readers, more readers than one read handles, and NaN."""
    generator = np.random.default_rng(0)

    def numbers(*shape):
        return jnp.asarray(generator.integers(-8, 9, shape) / 4, dtype)

    x, table, dy = (
        numbers(7, batch).at[0, 0].set(np.nan),
        numbers(gates, 2**bits),
        numbers(gates, batch),
    )
    wires = jnp.asarray(generator.integers(-99, 99, (gates, bits)), jnp.int32)
    readers = jnp.asarray(generator.integers(-99, 999, (7, 13)), jnp.int32)

    def look_up(implementation, x, table):
        options = {"readers": readers, "feature_axis": 0, "implementation": implementation}
        return lutjax.binary_lut(x, table, wires, **options)

    check_plain_jax("binary_lut", look_up, dy, x, table)


def test_attention_of_any_ids_on_gpus():
    """Invalid ids read only table memory, and counts above one byte are correct."""
    wild = np.random.default_rng(0).choice([0, 1, 2, 3, -1, 9, 2**31 - 1, -(2**31)], (2, 2, 21, 2))
    for name in ("pallas", "triton"):
        assert all(
            np.isfinite(np.asarray(a)).all() for a in attend(name, (*wild, wild[0, 0, :20, :1]))
        )
    sizes = {
        "batch": 1,
        "queries": 700,
        "detectors": 2,
        "bits": 1,
        "position_bits": 1,
        "outputs": 5,
    }
    case = testing.case("lookup_attention", "tiles", **sizes)
    testing.check(case, "pallas/gpu", transformation="jit")
    testing.check_update(case, "pallas/gpu")
