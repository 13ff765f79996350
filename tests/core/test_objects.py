"""Layers, models and configs as objects: copied, pickled, compared, and made of arguments of the wrong kind."""

import copy
import dataclasses
import json
import pickle

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_layer import CASES
from flax import nnx
from layer_libraries import inputs_of, nnx_layer

from lutjax import models
from lutjax.layers import haiku, linen, nnx as layers
from lutjax.layers._spec import arguments as arguments_of

COPIES = {"pickle": lambda a: pickle.loads(pickle.dumps(a)), "deepcopy": copy.deepcopy}
DRAWN_BY_USERS = {"logits_init": jax.nn.initializers.normal(0.3)}

CONFIGS = {
    models.GPTConfig: {"features": 8, "n_heads": 2, "n_layers": 1},
    models.LUTTransformerConfig: {"features": 4, "n_layers": 1},
    models.LogicClassifierConfig: {"in_features": 4, "n_classes": 2, "layers": (8, 4), "noise": 0.5},
    models.LogicTreeNetConfig: {
        "in_shape": (8, 8, 1),
        "n_classes": 2,
        "kernels": (4,),
        "layers": (8, 4),
        "kernel": (3,),
        "depth": 2,
    },
    models.LogicCAConfig: {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2)},
}
"""Arguments of the smallest config of every model."""


def test_every_config_is_here():
    assert {getattr(models, name) for name in models.__all__ if name.endswith("Config")} == set(CONFIGS)


def check_same(a, b):
    """Check that all arrays hold the same numbers, keys, too."""
    for x, y in zip(*(jax.tree.leaves(tree) for tree in (a, b)), strict=True):
        keys = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*(jax.random.key_data(k) for k in (x, y)) if keys else (x, y))


def model_of(config):
    return getattr(models, type(config).__name__.removesuffix("Config"))(config, rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_every_layer(how):
    """Layers of all three libraries; those of NNX hold the same arrays, and are equal to jit."""
    for name, case in CASES.items():
        layer = nnx_layer(case)
        again = COPIES[how](layer)
        (was, arrays), (now, copied) = nnx.split(layer), nnx.split(again)
        assert was == now, name
        check_same(arrays, copied)
        ours = getattr(linen, case.layer)(*case.sizes, **case.options)
        assert repr(COPIES[how](ours)) == repr(ours), name
        hk.transform_with_state(
            lambda x, case=case: COPIES[how](getattr(haiku, case.layer)(*case.sizes, **case.options))
        ).init(None, None)


MEMORIES = {"NgramMemory": {}, "ProductKeyMemory": {}, "ProductKeyExperts": {"activation": jax.nn.relu}}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layer", MEMORIES)
def test_copies_of_memories(layer, how):
    """Their initializers are equal values, and an activation that JAX wraps is copied as itself."""
    case = CASES[layer]._replace(options={**CASES[layer].options, **MEMORIES[layer]})
    made = nnx_layer(case)
    (was, arrays), (now, copied) = nnx.split(made), nnx.split(COPIES[how](made))
    assert was == now
    check_same(arrays, copied)
    assert COPIES[how](made.spec) == made.spec
    assert hash(COPIES[how](made.spec)) == hash(made.spec)
    ours = getattr(linen, layer)(*case.sizes, **case.options)
    assert COPIES[how](ours) == ours
    assert hash(COPIES[how](ours)) == hash(ours)

    def transformed(x):
        haikus = getattr(haiku, layer)(*case.sizes, **case.options)
        again = COPIES[how](haikus)
        assert again.spec == haikus.spec
        return again(x, *case.call.values()) if layer == "NgramMemory" else again(x)

    hk.transform_with_state(transformed).init(jax.random.key(0), inputs_of(case))


@pytest.mark.parametrize("how", COPIES)
def test_a_table_in_host_memory_is_copied(how):
    layer = layers.NgramMemory(8, rows=101, placement="host", rngs=nnx.Rngs(0))
    x, tokens = jnp.ones((2, 3, 8)), jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(COPIES[how](layer)(x, tokens), layer(x, tokens))


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_a_gpt_with_memory(how):
    sizes = {"features": 8, "n_heads": 2, "n_layers": 1, "context": 8, "memory": True, "memory_rows": 64}
    config = models.GPTConfig(**sizes)
    assert COPIES[how](config) == config
    model = model_of(config)
    again = COPIES[how](model)
    assert nnx.split(again)[0] == nnx.split(model)[0]
    check_same(nnx.state(again), nnx.state(model))


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_computes_the_same(how):
    case = CASES["LogicGates, balanced"]
    layer = layers.LogicGates(*case.sizes, **DRAWN_BY_USERS, rngs=nnx.Rngs(0))
    x = jax.nn.sigmoid(inputs_of(case))
    np.testing.assert_array_equal(COPIES[how](layer)(x), layer(x))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_copies_of_every_model(config, how):
    config = config(**CONFIGS[config])
    assert COPIES[how](config) == config
    model = model_of(config)
    again = COPIES[how](model)
    assert nnx.split(again)[0] == nnx.split(model)[0]
    check_same(nnx.state(again), nnx.state(model))
    for make in ("packed", "circuit"):
        if hasattr(model, make):
            COPIES[how](getattr(model, make)())


@pytest.mark.parametrize("kind", [list, np.asarray, jnp.asarray], ids=["lists", "NumPy", "JAX"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_lists_and_arrays_in_configs_are_tuples(config, kind, without_typechecking):
    given = CONFIGS[config]
    of_arrays = {n: kind(v) if isinstance(v, tuple) else np.asarray(v)[()] for n, v in given.items()}
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
    """The message with which arguments are refused; None where they are taken."""
    try:
        make(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def wrong_arguments(make, fields, given):
    """Tell of all wrong arguments that are taken, or refused in another way than in one line that names them."""
    for name, what in ((f.name, what) for f in fields for what in WRONG):
        message = refusal(make, {**given, name: WRONG[what]})
        if message is None:
            # None is many a default, and a text may be the name of an implementation or of an axis.
            named = name in ("implementation", "row_axis") and what == "text"
            assert what == "None" or named, f"{name} takes {what}"
        else:
            assert name in message, f"{name} {what}: {message}"
            assert len(message) < 400, f"{name} {what}"


@pytest.mark.parametrize("layer", sorted({case.layer for case in CASES.values()}))
def test_wrong_arguments_of_every_layer(layer, without_typechecking):
    """Each is refused in one line that names it."""
    case = next(case for case in CASES.values() if case.layer == layer)
    spec_type = case.spec_type
    arguments = [f for f in dataclasses.fields(spec_type) if f.name in arguments_of(spec_type)]
    given = dict(zip((f.name for f in arguments if not f.kw_only), case.sizes, strict=False))
    drawn = {} if layer in ("GroupSum", "Thermometer") else {"rngs": nnx.Rngs(0)}
    wrong_arguments(getattr(layers, layer), arguments, {**given, **case.options, **drawn})
    made = nnx_layer(case)
    for x in ([[0.5] * 300] * 30, "abc" * 1000, None, 3):
        with pytest.raises(TypeError, match=r"x is .*; expected a JAX or numpy array") as error:
            made(x, **case.call)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
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


@pytest.mark.parametrize("of", [int, jax.random.key], ids=["seed", "key"])
def test_what_is_no_rngs_is_named(of, without_typechecking):
    rngs = of(0)
    with pytest.raises(
        TypeError, match=r"LogicGates: rngs is .*; expected flax.nnx.Rngs, such as nnx.Rngs\(0\)"
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
        TypeError, match=f"{model.__name__}: config is .*; expected a {config.__name__}, which .*from_dict"
    ):
        model(CONFIGS[config], rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.GroupSum(2),
        lambda: layers.Thermometer(8, 2),
        lambda: layers.ProjectionLUT(8, 8, heads=1, tables=1, bits=1, rngs=nnx.Rngs(0)),
    ],
    ids=["GroupSum", "Thermometer", "ProjectionLUT"],
)
def test_complex_numbers_are_refused(layer, without_typechecking):
    with pytest.raises(TypeError, match=r"x is complex64\[2, 8\]; expected real numbers"):
        layer()(jnp.ones((2, 8), jnp.complex64))


def test_a_traced_temperature_of_a_constructor_is_named(without_typechecking):
    with pytest.raises(TypeError, match=r"LogicGates: temperature is a traced value"):
        jax.jit(lambda t: layers.LogicGates(8, 4, temperature=t, rngs=nnx.Rngs(0))(jnp.ones(8)))(1.0)
