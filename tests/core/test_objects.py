"""Layers, models and configs as objects: copied, pickled, compared, and built from wrong argument types."""

import copy
import dataclasses
import json
import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from every_layer import CASES
from flax import nnx
from layer_libraries import inputs_of, nnx_layer

from lutjax import models
from lutjax.layers import haiku, linen, nnx as layers
from lutjax.layers._spec import arguments as arguments_of, build

COPIES = {"pickle": lambda a: pickle.loads(pickle.dumps(a)), "deepcopy": copy.deepcopy}
DRAWN_BY_USERS = {"logits_init": jax.nn.initializers.normal(0.3)}

CONFIGS = {
    models.GPTConfig: {"features": 8, "n_heads": 2, "n_layers": 1},
    models.LUTTransformerConfig: {"features": 4, "n_layers": 1},
    models.LogicClassifierConfig: {"in_features": 4, "n_classes": 2, "layers": (8, 4),
        "noise": 0.5},
    models.LogicTreeNetConfig: {"in_shape": (8, 8, 1), "n_classes": 2, "kernels": (4,),
        "layers": (8, 4), "kernel": (3,), "depth": 2},
    models.LogicCAConfig: {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2)},
}  # fmt: skip
"""Arguments for each model's smallest config."""


def test_every_config_is_here():
    assert {getattr(models, name) for name in models.__all__ if name.endswith("Config")} == set(
        CONFIGS
    )


def check_same(a, b):
    """Check that all arrays hold the same numbers, including keys."""
    for x, y in zip(*(jax.tree.leaves(tree) for tree in (a, b)), strict=True):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(jax.random.key_data(k) for k in (x, y)) if keys else (x, y))


def model_of(config):
    return getattr(models, type(config).__name__.removesuffix("Config"))(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "name", slow_except(CASES, "LUT", "NgramMemory", "ProductKeyExperts, sines")
)
def test_copies_of_every_layer(name):
    """NNX layers hold the same arrays, and are equal to jit; a JAX-wrapped function is copied as itself."""
    case = CASES[name]
    layer, ours = nnx_layer(case), getattr(linen, case.layer)(*case.sizes, **case.options)

    def haikus(x):
        layer = getattr(haiku, case.layer)(*case.sizes, **case.options)
        for again in (copied(layer) for copied in COPIES.values()):
            assert repr(again.spec) == repr(layer.spec)
        return again(x, **case.call)

    jax.eval_shape(hk.transform_with_state(haikus).init, jax.random.key(0), inputs_of(case))
    for copied in COPIES.values():
        (was, arrays), (now, again) = nnx.split(layer), nnx.split(copied(layer))
        assert was == now
        check_same(arrays, again)
        assert hash(copied(layer.spec)) == hash(layer.spec)
        assert repr(copied(ours)) == repr(ours)


def test_a_table_in_host_memory_is_copied():
    layer = layers.NgramMemory(8, rows=101, placement="host", rngs=nnx.Rngs(0))
    x, tokens = jnp.ones((2, 3, 8)), jnp.arange(6).reshape(2, 3)
    for copied in COPIES.values():
        np.testing.assert_array_equal(copied(layer)(x, tokens), layer(x, tokens))


def test_a_copy_computes_the_same():
    case = CASES["LogicGates, balanced"]
    layer = layers.LogicGates(*case.sizes, **DRAWN_BY_USERS, rngs=nnx.Rngs(0))
    x = jax.nn.sigmoid(inputs_of(case))
    for copied in COPIES.values():
        np.testing.assert_array_equal(copied(layer)(x), layer(x))


@pytest.mark.parametrize(
    "config",
    slow_except(CONFIGS, "GPTConfig", "LogicClassifierConfig", ids=lambda config: config.__name__),
    ids=lambda config: config.__name__,
)
def test_copies_of_every_model(config):
    config = config(**CONFIGS[config])
    model = model_of(config)
    for copied in COPIES.values():
        assert copied(config) == config
        again = copied(model)
        assert nnx.split(again)[0] == nnx.split(model)[0]
        check_same(nnx.state(again), nnx.state(model))
        for make in ("packed", "circuit"):
            if hasattr(model, make):
                copied(getattr(model, make)())


@pytest.mark.parametrize("kind", [list, np.asarray, jnp.asarray], ids=["lists", "NumPy", "JAX"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_lists_and_arrays_in_configs_are_tuples(config, kind, without_typechecking):
    given = CONFIGS[config]
    of_arrays = {
        n: kind(v) if isinstance(v, tuple) else np.asarray(v)[()] for n, v in given.items()
    }
    made = config(**of_arrays)
    assert made == config(**given)
    assert hash(made) == hash(config(**given))
    assert config.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_lists_in_layers_are_tuples(without_typechecking):
    options = {"kernel": [3, 3], "n_detectors": np.int64(4), "n_anchors": 2, "rngs": nnx.Rngs(0)}
    made = layers.ConvLUT([5, 4], 3, **options, stride=np.array([2, 1]))
    assert (made.in_shape, made.stride, made.n_detectors) == ((5, 4), (2, 1), 4)
    hash(made.spec)


WRONG = {
    "array": np.zeros((300, 300)),
    "list": [[0.5] * 300] * 30,
    "text": "abc" * 1000,
    "NaN": float("nan"),
    "None": None,
}


def refusal(make, arguments):
    try:
        make(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def wrong_arguments(make, fields, given):
    """Report all wrong arguments accepted, or rejected without a one-line error naming them."""
    for name, what in ((f.name, what) for f in fields for what in WRONG):
        message = refusal(make, {**given, name: WRONG[what]})
        if message is None:
            # None is many a default, and a text may be the name of an implementation or of an axis.
            named = name in ("implementation", "row_axis") and what == "text"
            assert what == "None" or named, f"{name} takes {what}"
        else:
            assert name in message, f"{name} {what}: {message}"
            assert len(message) < 400, f"{name} {what}"


FAST = ("BinaryLUT", "LUT", "LogicGates", "NgramMemory", "ProductKeyMemory", "ProjectionLUT")


@pytest.mark.parametrize(
    "layer", slow_except(sorted({case.layer for case in CASES.values()}), *FAST)
)
def test_wrong_arguments_of_every_layer(layer, without_typechecking):
    case = next(case for case in CASES.values() if case.layer == layer)
    spec_type = case.spec_type
    arguments = [f for f in dataclasses.fields(spec_type) if f.name in arguments_of(spec_type)]
    sizes = dict(zip((f.name for f in arguments if not f.kw_only), case.sizes, strict=False))
    given = {**dict.fromkeys(spec_type.given), **sizes, **case.options}
    wrong_arguments(lambda **options: build(spec_type, options), arguments, given)
    made = nnx_layer(case)
    for x in ([[0.5] * 300] * 30, "abc" * 1000, None, 3):
        with pytest.raises(TypeError, match=r"x is .*; expected a JAX or numpy array") as error:
            made(x, **case.call)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "config",
    slow_except(CONFIGS, "GPTConfig", ids=lambda config: config.__name__),
    ids=lambda config: config.__name__,
)
def test_wrong_arguments_of_every_model(config, without_typechecking):
    wrong_arguments(config, dataclasses.fields(config), CONFIGS[config])
    model = model_of(config(**CONFIGS[config]))
    call = (lambda x: model(x, 1)) if config is models.LogicCAConfig else model
    for x in ([[0.5] * 300] * 30, "abc" * 1000, None, 3):
        with pytest.raises(
            TypeError, match=r"(x|tokens|state) is .*; expected a JAX or numpy array"
        ) as error:
            call(x)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("rngs", [0, np.zeros(2, np.uint32)], ids=["seed", "key"])
def test_what_is_no_rngs_is_named(rngs, without_typechecking):
    with pytest.raises(
        TypeError, match=r"LogicGates: rngs is .*; expected flax.nnx.Rngs, such as nnx.Rngs"
    ):
        layers.LogicGates(8, 4, rngs=rngs)
    for config, fields in CONFIGS.items():
        model = getattr(models, config.__name__.removesuffix("Config"))
        with pytest.raises(TypeError, match=f"{model.__name__}: rngs is "):
            model(config(**fields), rngs=rngs)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_dictionary_is_no_config(config, without_typechecking):
    model = getattr(models, config.__name__.removesuffix("Config"))
    with pytest.raises(
        TypeError,
        match=f"{model.__name__}: config is .*; expected a {config.__name__}.* Use {config.__name__}.from_dict",
    ):
        model(CONFIGS[config], rngs=nnx.Rngs(0))


def test_a_traced_temperature_of_a_constructor_is_named(without_typechecking):
    with pytest.raises(TypeError, match=r"LogicGates: temperature is a traced value"):
        jax.jit(lambda t: layers.LogicGates(8, 4, temperature=t, rngs=nnx.Rngs(0))(jnp.ones(8)))(
            1.0
        )
