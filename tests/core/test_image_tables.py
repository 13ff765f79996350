"""Layers of tables over images: dropout of tables, tables of integers, gradients in factors; and attention over all pixels."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from layer_libraries import Case, assert_refused, by_kind, inputs_of, nnx_layer

import lutjax
from lutjax import optim as tables, reads, wiring
from lutjax.layers import haiku as lutjax_haiku, linen, nnx as layers
from lutjax.layers._spec import QUANTIZED
from lutjax.testing import assert_close

TABLES = {"n_detectors": 4, "n_anchors": 3}
SCORED = {**TABLES, "read": reads.PowersOfTwo(), "table_dropout": 0.5}
FIELDS = wiring.projections(None, (5, 4), (3, 3), groups=2, receptive=3, projective=2)
CASES = {
    "spatial": Case("SpatialLUT", SCORED, (2, 5, 4), (FIELDS,)),
    "window": Case("WindowLUT", {**SCORED, "kernel": 3, "padding": 1, "stride": 2}, (2, 5, 4), ((5, 4), 3)),
    "conv": Case("ConvLUT", {**SCORED, "kernel": 3, "padding": 1, "groups": 2}, (2, 3, 4, 2), ((3, 4, 2), 6)),
}


def variables_of(case):
    arrays = {}
    for i, v in enumerate(case.spec.variables()):
        key = jax.random.key(10 + i)
        arrays[v.name] = jax.random.normal(key, v.shape, v.dtype) if v.name == "weights" else v.init(key)
    return arrays


@pytest.mark.slow
@pytest.mark.parametrize("name", [slow("window") if n == "window" else n for n in CASES])
def test_dropped_tables_and_integers(name):
    """Dropped tables add nothing anywhere in an image, others twice as much; integers have the values of the trained layer."""
    case, key = CASES[name], jax.random.key(0)
    arrays, x, spec = variables_of(case), inputs_of(case), case.spec
    exact = Case(case.layer, {**case.options, "read": reads.Confidence()}, case.shape, case.other_sizes).spec
    kept = jax.random.bernoulli(key, 0.5, (len(x), spec.n_tables))
    assert 0 < kept[0].sum() < spec.n_tables
    deployed = layers.quantize(nnx.Sequential(nnx_layer(case, arrays), lambda y: y))

    @jax.jit
    def every(x):
        of_kept = [2 * arrays["weights"] * k.astype(jnp.float32).reshape(-1, 1, 1) for k in kept]
        by_image = [
            exact({**arrays, "weights": w}, image, deterministic=True)
            for image, w in zip(x, of_kept, strict=True)
        ]
        return (
            spec(arrays, x, deterministic=True),
            exact(arrays, x, key=key),
            jnp.stack(by_image),
            deployed(x),
        )

    calm, dropped, by_image, integers = every(x)
    assert np.any(dropped)
    assert_close("dropped", dropped, by_image)
    assert np.any(calm)
    assert_close("integers", integers, calm)
    layer = deployed.layers[0]
    assert (layer.weights.dtype, layer.exponents.shape) == (
        jnp.int8,
        (spec.table_groups, spec.weights_shape[-1]),
    )
    assert not jax.tree.leaves(nnx.state(deployed, layers.Tables))
    layers.check(deployed)


@pytest.mark.slow
def test_libraries():
    """Each library draws what is dropped, and reads tables of integers."""
    case, x = CASES["conv"], inputs_of(CASES["conv"])
    arrays = variables_of(case)
    kinds, calm = by_kind(case, arrays), case.spec(arrays, x, deterministic=True)
    layer = nnx_layer(case, arrays)
    np.testing.assert_array_equal(nnx.view(layer, deterministic=True)(x), calm)
    assert np.any(layer(x) != layer(x)), "each call draws"
    module = linen.ConvLUT(*case.sizes, **case.options)
    np.testing.assert_array_equal(module.apply(kinds, x, deterministic=True), calm)
    assert np.any(module.apply(kinds, x, rngs={"dropout": jax.random.key(0)}) != calm)

    def transformed(**options):
        make = lambda x, **calls: lutjax_haiku.ConvLUT(  # noqa: E731
            *case.sizes, **{**case.options, **options}, name="layer"
        )(x, **calls)
        return hk.transform_with_state(make)

    f, params = transformed(), {"layer": kinds["params"]}
    np.testing.assert_array_equal(
        f.apply(params, {"layer": kinds["anchors"]}, None, x, deterministic=True)[0], calm
    )
    assert np.any(f.apply(params, {"layer": kinds["anchors"]}, jax.random.key(0), x)[0] != calm)

    params = dict(kinds["params"])
    q = lutjax.quantize_tables(params.pop("weights"), groups=2)
    integers = {"weights": q.values, "exponents": q.exponents}
    module = linen.ConvLUT(*case.sizes, **case.options, quantized=True)
    y = module.apply({**kinds, "params": params, QUANTIZED: integers}, x)
    assert_close("linen", y, calm)
    state = {"layer": {**kinds["anchors"], **integers}}
    np.testing.assert_array_equal(transformed(quantized=True).apply({"layer": params}, state, None, x)[0], y)


@pytest.mark.slow
def test_powers_of_two_in_factors():
    """Rounding is made of the table, so the gradient in factors is that of the table; its reads have its name."""
    case, x = CASES["conv"], inputs_of(CASES["conv"])
    arrays = variables_of(case)

    def loss(params, x):
        return jnp.sum(case.spec({**arrays, **params}, x, deterministic=True) ** 2)

    params = {"weights": arrays["weights"]}
    value, gradients = jax.jit(tables.value_and_grad(loss))(params, x)
    dense_value, dense = jax.jit(jax.value_and_grad(loss))(params, x)
    assert_close("value", value, dense_value)
    assert_close("weights", gradients["weights"].to_dense(), dense["weights"])
    found = jax.jit(lutjax.usage(loss))(params, x)
    assert list(found) == ["weights"]
    assert found["weights"].reads.min() > 0


def test_attention_over_all_pixels():
    """Every pixel attends to all pixels, also to itself and to later ones: against loops over pairs."""
    height, width, features = 2, 3, 4
    n = height * width
    images = jax.random.normal(jax.random.key(0), (2, height, width, features))
    case = Case(
        "LUTAttention",
        {"n_detectors": 3, "n_anchors": 2, "n_positions": n - 1, "n_position_bits": 2, "causal": False},
        (2, n, features),
    )
    arrays = variables_of(case)
    z = images.reshape(2, n, features)
    y = jax.jit(case.spec)(arrays, z)
    anchors, positions = np.asarray(arrays["anchors"]), np.asarray(arrays["positions"])
    assert positions.shape == (2 * n - 1, 1, 2)
    weights, pixels = np.asarray(arrays["weights"]), np.asarray(z)

    def bits(pixel, pairs):
        return sum(int(pixel[a] > pixel[b]) << r for r, (a, b) in enumerate(pairs))

    want = np.zeros(y.shape, np.float32)
    for b, j, i, t in np.ndindex(2, n, n, 3):
        place = sum(int(v > 0) << r for r, v in enumerate(positions[j - i + n - 1, 0]))
        row = bits(pixels[b, j], anchors[t]) << 4 | bits(pixels[b, i], anchors[t]) << 2 | place
        want[b, j] += weights[t, row]
    assert_close("y", y, want)


def test_errors():
    x = jnp.zeros(CASES["conv"].shape)
    with pytest.raises(ValueError, match=r"ConvLUT: table_dropout is 0\.5, which needs rngs"):
        CASES["conv"].spec(variables_of(CASES["conv"]), x)
    for name, case in CASES.items():
        hard = {k: v for k, v in case.options.items() if k not in ("read", "table_dropout")}
        for options, message in (
            ({"table_dropout": 0.5}, "table_dropout is 0.5 but read is None; it is of scored reads"),
            ({"quantized": True}, "quantized is True but read is None; tables of integers are read by"),
            (
                {"table_dropout": 1.0, "read": reads.Hard()},
                "table_dropout is 1.0; it must be at least 0 and below 1",
            ),
        ):
            with pytest.raises(ValueError, match=f"{case.layer}: {message}"):
                nnx_layer(Case(case.layer, {**hard, **options}, case.shape, case.other_sizes))
        assert name
    assert_refused(
        Case(
            "ConvLUT",
            {**CASES["conv"].options, "read": reads.Confidence(), "quantized": True},
            x.shape,
            CASES["conv"].sizes,
        ),
        "ConvLUT: quantized is True but read is Confidence",
    )
    with pytest.raises(
        ValueError, match="Sequential has no ProjectionLUT, and no layer of images with the read"
    ):
        layers.quantize(
            nnx.Sequential(nnx_layer(Case("ConvLUT", {**TABLES, "kernel": 3}, x.shape, ((3, 4, 2), 6))))
        )


@pytest.mark.slow
@pytest.mark.usefixtures("without_typechecking")
def test_wrong_calls():
    anchors = lutjax.sample_anchors(jax.random.key(0), 9, 4, 3)
    images, weights = jnp.ones((2, 5, 4, 1)), jnp.ones((4, 8, 2))
    read = reads.PowersOfTwo()
    for weights_, keep, options, message in (
        (weights, jnp.ones((2, 4)), {}, "conv_lut: keep .* rows without coefficients have no factors"),
        (
            weights,
            jnp.ones((4,)),
            {"read": read},
            r"conv_lut: keep .* expected \[2, 4\], a factor for each image and table",
        ),
        (lutjax.quantize_tables(weights), None, {}, "conv_lut: read is None, and tables of integers"),
        (lutjax.quantize_tables(weights), jnp.ones((2, 4)), {"read": read}, "nothing is dropped"),
    ):
        scalars = read.initial() if options else None
        with pytest.raises(ValueError, match=message):
            lutjax.conv_lut(images, weights_, anchors, scalars, kernel=3, keep=keep, **options)
