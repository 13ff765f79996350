"""Flax Linen and Haiku layers with the input size inferred from the first input."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from every_layer import CASES
from layer_libraries import inputs_of, nnx_layer

from lutjax.layers import haiku, linen

LAYERS = {
    case.layer: name
    for name, case in reversed(CASES.items())
    if "in_features" in {f.name for f in dataclasses.fields(case.spec_type)}
}
NAMES = [*LAYERS.values(), "LogicGates, features first"]
NAMES[-1] = next(name for name, case in CASES.items() if "feature_axis" in case.options)


def key(seed):
    return jax.random.key(seed)


def named(case):
    second = "n_thresholds" if case.layer == "Thermometer" else "out_features"
    return {second: case.sizes[1], **case.options}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def widened(x, case):
    widths = [(0, 0)] * x.ndim
    widths[0 if case.options.get("feature_axis") == 0 else -1] = (0, 1)
    return jnp.pad(x, widths)


def functions(library, case, args, options):
    """Return `init`, `apply` and `check` for a layer with one variable tree."""
    if library == "linen":
        layer, rngs = getattr(linen, case.layer)(*args, **options), {case.spec.stream: key(0)}
        return (
            lambda x: layer.init(key(0), x),
            lambda v, x: layer.apply(v, x, rngs=rngs),
            layer.check,
        )

    def made():
        return getattr(haiku, case.layer)(*args, **options, name="layer")

    f, check = (hk.transform_with_state(g) for g in (lambda x: made()(x), lambda: made().check()))
    return (
        lambda x: dict(zip(("params", "state"), f.init(key(0), x), strict=True)),
        lambda v, x: f.apply(v["params"], v["state"], key(0), x)[0],
        lambda v: check.apply(v["params"], v["state"], key(0)),
    )


def without_sizes(tree):
    kept = {k: v for k, v in tree.items() if k != "in_features"}
    return {k: without_sizes(v) if isinstance(v, dict) else v for k, v in kept.items()}


@pytest.mark.parametrize("library", ["linen", "haiku"])
@pytest.mark.parametrize("name", slow_except(NAMES, LAYERS["LUT"], NAMES[-1]))
def test_layers_take_the_number_of_inputs_of_the_first(name, library):
    case = CASES[name]
    x = inputs_of(case)
    init, apply, check = functions(library, case, (), named(case))
    init_given, apply_given, _ = functions(library, case, case.sizes, case.options)
    result, given = init(x), init_given(x)
    sizes = [
        a
        for path, a in jax.tree.leaves_with_path(result)
        if "in_features" in jax.tree_util.keystr(path)
    ]
    assert [a.shape for a in sizes] == [(case.sizes[0],)]
    rest = without_sizes(result)
    for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(a, b)
    equal(jax.jit(apply)(result, x), jax.jit(apply_given)(given, x))
    check(result)
    with pytest.raises(ValueError, match=f"{case.layer}: x has shape .*; expected"):
        jax.eval_shape(apply, result, widened(x, case))
    for use in (lambda v: jax.eval_shape(apply, v, x), check):
        with pytest.raises(
            ValueError, match=f"{case.layer}: in_features is None, and the number of inputs"
        ):
            use(rest)


def test_other_methods_know_the_number_of_inputs():
    layer, x = linen.LogicRNN(out_features=8), jnp.ones((2, 3, 6))
    words = jnp.ones((6, 3, 1), jnp.uint32)
    variables = layer.init(key(0), x)
    equal(layer.from_words(variables, words), linen.LogicRNN(6, 8).from_words(variables, words))
    f = hk.transform_with_state(lambda x: haiku.LogicRNN(out_features=8)(x))
    params, state = f.init(key(0), x)
    run = hk.transform_with_state(lambda w: haiku.LogicRNN(out_features=8).from_words(w))
    equal(run.apply(params, state, key(0), words)[0].shape, (8, 3, 1))


def test_the_number_of_outputs_is_needed(without_typechecking):
    with pytest.raises(TypeError, match="LUT: out_features is None"):
        linen.LUT(4, n_detectors=4, n_anchors=2).init(key(0), jnp.ones((2, 8)))
    with pytest.raises(ValueError, match=r"LUT: x has shape \[\]; expected an axis of inputs"):
        linen.LUT(out_features=4, n_detectors=4, n_anchors=2).init(key(0), jnp.float32(1))


def test_flax_nnx_needs_the_number_of_inputs(without_typechecking):
    case = CASES["LUT"]
    with pytest.raises(TypeError, match="LUT: in_features is None"):
        nnx_layer(case._replace(other_sizes=(None, 4)))


def test_haiku_says_that_a_layer_has_state():
    def f(x):
        return haiku.LUT(8, 4, n_detectors=4, n_anchors=2)(x)

    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"use `hk\.transform_with_state`"):
        hk.transform(f).init(key(0), x)
    params, _ = hk.transform_with_state(f).init(key(0), x)
    with pytest.raises(
        ValueError, match=r"^LUT: there is no anchors: .*Use haiku\.transform_with_state"
    ):
        hk.transform(f).apply(params, key(0), x)
