"""Layers of Flax Linen and Haiku whose number of inputs is that of the first input."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    """The positional arguments after `in_features`, by name."""
    second = "n_thresholds" if case.layer == "Thermometer" else "out_features"
    return {second: case.sizes[1], **case.options}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def widened(x, case):
    """An input of one number more."""
    widths = [(0, 0)] * x.ndim
    widths[0 if case.options.get("feature_axis") == 0 else -1] = (0, 1)
    return jnp.pad(x, widths)


@pytest.mark.parametrize("name", NAMES)
def test_linen(name):
    case = CASES[name]
    x, cls = inputs_of(case), getattr(linen, case.layer)
    given, inferred = cls(*case.sizes, **case.options), cls(**named(case))
    variables = given.init(key(0), x)
    found = dict(inferred.init(key(0), x))
    assert found.pop("inputs")["in_features"].shape == (case.sizes[0],)
    equal(found, variables)
    found = inferred.init(key(0), x)
    rngs = {case.spec.stream: key(0)}
    equal(
        jax.jit(lambda v, x: inferred.apply(v, x, rngs=rngs))(found, x),
        jax.jit(lambda v, x: given.apply(v, x, rngs=rngs))(variables, x),
    )
    inferred.check(found)
    with pytest.raises(ValueError, match=f"{case.layer}: x has shape .*; expected"):
        jax.jit(lambda v, x: inferred.apply(v, x, rngs=rngs))(found, widened(x, case))
    without = {kind: part for kind, part in found.items() if kind != "inputs"}
    for use in (lambda v: inferred.apply(v, x, rngs=rngs), inferred.check):
        with pytest.raises(
            ValueError, match=f"{case.layer}: in_features is None, and the number of inputs that init"
        ):
            use(without)


@pytest.mark.parametrize("name", NAMES)
def test_haiku(name):
    case = CASES[name]
    x, cls = inputs_of(case), getattr(haiku, case.layer)
    given = hk.transform_with_state(lambda x: cls(*case.sizes, **case.options, name="layer")(x))
    inferred = hk.transform_with_state(lambda x: cls(**named(case), name="layer")(x))
    params, state = given.init(key(0), x)
    found, kept = inferred.init(key(0), x)
    equal(found, params)
    rest = {name: array for name, array in kept["layer"].items() if name != "in_features"}
    assert kept["layer"]["in_features"].shape == (case.sizes[0],)
    equal(rest, state.get("layer", {}))
    equal(
        jax.jit(inferred.apply)(found, kept, key(0), x)[0],
        jax.jit(given.apply)(params, state, key(0), x)[0],
    )
    check = hk.transform_with_state(lambda: cls(**named(case), name="layer").check())
    check.apply(found, kept, key(0))
    with pytest.raises(ValueError, match=f"{case.layer}: x has shape .*; expected"):
        jax.jit(inferred.apply)(found, kept, key(0), widened(x, case))
    with pytest.raises(
        ValueError, match=f"{case.layer}: in_features is None, and the number of inputs that init"
    ):
        inferred.apply(found, {"layer": rest}, key(0), x)


def test_other_methods_know_the_number_of_inputs():
    """Methods that get no input of the layer take it from the variables."""
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
    with pytest.raises(ValueError, match=r"^LUT: there is no anchors: .*Use haiku\.transform_with_state"):
        hk.transform(f).apply(params, key(0), x)
