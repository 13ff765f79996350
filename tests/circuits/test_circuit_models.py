"""Model and layer circuits: the same bits, votes and classes as the hard network in JAX, or a reason for an unsupported model."""

import dataclasses
import functools
import itertools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_except
from example_circuits import life_circuit
from flax import linen as nn, nnx

import lutjax
from lutjax import circuits
from lutjax.circuits import Format
from lutjax.layers import haiku as lutjax_haiku, linen, nnx as lutjax_nnx
from lutjax.models import (
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    PackedClassifier,
)
from lutjax.training import models

RNG = np.random.default_rng
# Around whole numbers and the ends of uint8; repeated, and beyond the ends.
THRESHOLDS = np.array(
    [[-1.5, 3.0], [0.0, 0.0], [2.5, 300.0], [254.5, 255.0], [1.25, np.inf], [-np.inf, 9.0]],
    np.float32,
)
SIZES = {"in_features": 6, "n_classes": 3, "n_thresholds": 2}
# Layers of one size, whose programs are compiled once.
CONFIGS = {
    "gates": LogicClassifierConfig(**SIZES, layers=(12, 12), noise=3),
    "light": LogicClassifierConfig(**SIZES, layers=(12, 12), n_inputs=3),
    "walsh": LogicClassifierConfig(
        **SIZES, layers=(12, 12), n_inputs=3, tables="walsh", wiring="learnable"
    ),
    "raw": LogicClassifierConfig(**SIZES, layers=(12,), n_inputs=8, tables="raw"),
    "binary": LogicClassifierConfig(**SIZES, layers=(12, 12), n_inputs=3, tables="binary"),
    "reduced": LogicClassifierConfig(**SIZES, layers=(12, 30), noise=3, reduce=(3, 2)),
    "bits": LogicClassifierConfig(12, 4, n_thresholds=0, layers=(12, 12), noise=3),
    "binary_bits": LogicClassifierConfig(
        12, 2, n_thresholds=0, layers=(12,), n_inputs=3, tables="binary"
    ),
}


def every(n_bits):
    """Return all uint8 rows with this number of bits."""
    return (np.arange(1 << n_bits)[:, None] >> np.arange(n_bits) & 1).astype(np.uint8)


def drawn(build):
    """Model with all arrays initialized by one program."""
    structure = models.Structure(build)
    return structure.model(*structure.init(3))


@functools.cache
def configured(name):
    return classifier(CONFIGS[name])


def classifier(config, thresholds=THRESHOLDS):
    given = jnp.asarray(thresholds) if config.n_thresholds else None
    return drawn(lambda rngs: LogicClassifier(config, thresholds=given, rngs=rngs))


def votes_of(model, x):
    logits = jax.jit(lambda x: model(x, deterministic=True))(x.astype(np.float32))
    return np.round(np.asarray(logits) * model.config.tau).astype(int)


def packed_of(truth, wires, n_classes, n_bits, layers=None):
    config = LogicClassifierConfig(
        n_bits, n_classes, layers=layers or (len(wires),), n_thresholds=0
    )
    return PackedClassifier(
        (jnp.asarray(truth, bool),), (jnp.asarray(wires, jnp.int32),), None, config
    )


def assert_votes(circuit, x, votes):
    result = circuit(x)
    if circuit.outputs[0].count == 1:
        np.testing.assert_array_equal(result, votes.argmax(-1))
    else:
        np.testing.assert_array_equal(result, votes)


# ------------------------------------------------------------------------------------- classifiers
@pytest.mark.parametrize("name", slow_except(CONFIGS, "reduced"))
def test_a_circuit_is_the_classifier(name):
    model, config = configured(name), CONFIGS[name]
    x = RNG(0).choice([0, 1, 2, 3, 4, 9, 10, 254, 255], (400, 6)).astype(np.uint8)
    x = x if config.n_thresholds else every(12)
    votes = votes_of(model, x)
    assert len(np.unique(votes.argmax(-1))) > 1
    of_numbers = "uint8" if config.n_thresholds else "bits"
    for outputs, simplify in itertools.product(("class", "votes"), (True, False)):
        circuit = model.circuit(inputs=of_numbers, outputs=outputs, simplify=simplify)
        assert_votes(circuit, x, votes)
        again = model.packed().circuit(inputs=of_numbers, outputs=outputs, simplify=simplify)
        assert again == circuit
        assert circuit.parts[-1][0] == ("argmax" if outputs == "class" else "votes")
        assert circuit.about["layers"] == [*config.layers, *config.reducing]


@pytest.mark.parametrize("name", [slow("gates"), "binary"])
def test_circuits_of_all_bits(name):
    """All bit words, including words without a corresponding number."""
    packed, x = configured(name).packed(), every(12)
    words = lutjax.pack_bits(jnp.asarray(x.T))
    np.testing.assert_array_equal(packed.circuit()(x), packed.from_words(words)[: len(x)])
    for truth, wires in zip(packed.truth, packed.wires, strict=True):
        words = lutjax.packed_lut(words, truth, wires)
    last = lutjax.unpack_bits(words, len(x)).T
    for simplify in (True, False):
        bits = packed.circuit(outputs="bits", simplify=simplify)
        assert (bits.outputs[0].count, bits.outputs[0].format) == (last.shape[1], Format())
        np.testing.assert_array_equal(bits(x), last)
    votes = last.reshape(len(x), 3, -1).sum(-1)
    np.testing.assert_array_equal(packed.circuit(outputs="votes")(x), votes)


# ------------------------------------------------------------------------------------- thermometers
@pytest.mark.parametrize(
    "text", ["uint8", "int8", "fixed8.4", "ufixed6.5", "fixed3.1", "uint1", "int1"]
)
def test_numbers_above_thresholds(text):
    format = Format.parse(text)
    x = np.sort(format.decode(np.arange(1 << format.bits, dtype=np.uint64))).astype(np.float32)
    low, high = x[[0, -1]]
    inside = RNG(1).uniform(low - 2, high + 2, 20).astype(np.float32)
    near = np.nextafter(x[:: max(len(x) // 8, 1)], np.float32(np.inf))
    ends = np.array([low, high, -np.inf, np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40], np.float32)
    thresholds = np.concatenate([inside, near, x[:: max(len(x) // 8, 1)], ends])[None]
    layer = lutjax_nnx.Thermometer(1, thresholds.size, thresholds=jnp.asarray(thresholds))
    circuit = circuits.from_model([layer], inputs=format)
    np.testing.assert_array_equal(circuit(x), x[:, None] > thresholds)
    np.testing.assert_array_equal(circuit(x), layer(jnp.asarray(x)[:, None]))
    assert circuit.parts[0][0] == "encoder"


def test_thresholds_that_no_number_decides_are_constants():
    thresholds = jnp.array([[-0.5, 15.0], [16.5, -jnp.inf]])
    layer = lutjax_nnx.Thermometer(2, 2, thresholds=thresholds)
    circuit = circuits.from_model([layer], inputs="uint4")
    assert (len(circuit), circuit.literals) == (0, (1, 0, 0, 1))
    # A repeated threshold is one comparison.
    twice = lutjax_nnx.Thermometer(1, 3, thresholds=jnp.array([[4.0, 4.0, 4.5]]))
    assert len(set(circuits.from_model([twice], inputs="uint4").literals)) == 1


def test_thresholds_are_kept_with_a_circuit_of_bits():
    model = configured("gates")
    kept = model.circuit().about["thresholds"]
    np.testing.assert_array_equal(np.array(kept, object).astype(np.float32), THRESHOLDS)
    assert "thresholds" not in model.circuit(inputs="uint8").about


def test_a_thermometer_between_layers():
    thresholds = jnp.array([[-1.0, 0.0, 0.5, 1.0]])
    middle = lutjax_nnx.Thermometer(1, 4, thresholds=thresholds)
    gates = lutjax_nnx.LogicGates(2, 1, rngs=nnx.Rngs(0))
    gates.logits = jnp.eye(16)[jnp.array([6])]  # xor
    np.testing.assert_array_equal(
        circuits.from_model([gates, middle])(every(2)),
        middle(gates(jnp.asarray(every(2), jnp.float32), deterministic=True)),
    )


# ------------------------------------------------------------------------------------- votes
def test_equal_votes_are_the_first_class():
    """Return every vote pattern for three classes with at most three votes each, and thereby every tie."""
    x = every(9)
    truth, wires = np.tile([False, True], (9, 1)), np.arange(9)[:, None]
    votes = x.reshape(-1, 3, 3).sum(-1)
    for simplify in (True, False):
        circuit = circuits.from_model(packed_of(truth, wires, 3, 9), simplify=simplify)
        np.testing.assert_array_equal(circuit(x), votes.argmax(-1))


@pytest.mark.parametrize("n_classes", [2, 3])
def test_classes_that_share_votes(n_classes):
    """Identity, inverting and constant gates: bits often vote for several classes and against each other."""
    rng, x = RNG(n_classes), every(6)
    for _ in range(4):
        wires = rng.integers(0, 6, (n_classes * 7, 1))
        truth = rng.choice([[0, 1], [1, 0], [0, 0], [1, 1]], n_classes * 7, p=[0.5, 0.3, 0.1, 0.1])
        packed = packed_of(truth, wires, n_classes, 6)
        bits = np.take_along_axis(truth[None], x[:, wires], -1)[..., 0]
        votes = bits.reshape(len(x), n_classes, 7).sum(-1)
        np.testing.assert_array_equal(packed.circuit()(x), votes.argmax(-1))
        np.testing.assert_array_equal(packed.circuit(outputs="votes")(x), votes)


def test_constant_layers_have_no_gates():
    wires = np.tile([0, 1], (6, 1))
    truth = np.repeat([False, True], 3)[:, None] & np.ones(
        4, bool
    )  # the second class has all votes
    packed = packed_of(truth, wires, 2, 2)
    for outputs, literals in (
        ("bits", (0, 0, 0, 1, 1, 1)),
        ("votes", (0, 0, 1, 1)),
        ("class", (1,)),
    ):
        circuit = packed.circuit(outputs=outputs)
        assert (len(circuit), circuit.literals) == (0, literals)


@pytest.mark.parametrize("outputs", ["votes", "class"])
def test_one_class(outputs):
    layers = [lutjax_nnx.LogicGates(4, 5, rngs=nnx.Rngs(0)), lutjax_nnx.GroupSum(1)]
    circuit = circuits.from_model(layers, outputs=outputs)
    hard = nnx.view(nnx.Sequential(*layers), deterministic=True)
    votes = np.asarray(hard(jnp.asarray(every(4), jnp.float32)), int)[:, 0]
    np.testing.assert_array_equal(circuit(every(4)), votes if outputs == "votes" else np.zeros(16))
    assert outputs == "votes" or len(circuit) == 0


def test_a_classifier_without_layers():
    config = LogicClassifierConfig(6, 3, layers=(3,), n_thresholds=0)
    packed = PackedClassifier((), (), None, config)
    votes = every(6).reshape(-1, 3, 2).sum(-1)
    np.testing.assert_array_equal(packed.circuit(outputs="votes")(every(6)), votes)
    np.testing.assert_array_equal(packed.circuit()(every(6)), votes.argmax(-1))
    np.testing.assert_array_equal(packed.circuit(outputs="bits")(every(6)), every(6))


def test_votes_without_gates():
    thresholds = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]])
    layers = [lutjax_nnx.Thermometer(2, 3, thresholds=thresholds), lutjax_nnx.GroupSum(2)]
    x = np.stack(np.meshgrid(np.arange(8), np.arange(8)), -1).reshape(-1, 2)
    votes = (x[..., None] > np.asarray(thresholds)).sum(-1)
    np.testing.assert_array_equal(circuits.from_model(layers, inputs="uint3")(x), votes.argmax(-1))
    np.testing.assert_array_equal(
        circuits.from_model(layers, outputs="votes")(every(6)), every(6).reshape(-1, 2, 3).sum(-1)
    )


# ------------------------------------------------------------------------------------- layers of three libraries
def stack(library, **options):
    """Layers in all kinds over vectors, from either library."""
    options["deterministic"] = True
    learnable = {"wiring": "learnable", "candidates": 4}
    return [
        library.Thermometer(4, 2, thresholds=np.array([[0.5, 1.0]] * 4, np.float32)),
        library.LogicGates(8, 12, logits_init=jax.nn.initializers.normal(1.0), **options),
        library.SoftLUT(12, 12, n_inputs=3, parameterization="walsh", **learnable, **options),
        library.BinaryLUT(12, 12, n_inputs=3, estimator="soft", **options),
        library.GroupSum(3, tau=2.0),
    ]


NUMBERS = every(8) @ np.kron(
    np.eye(4, dtype=np.uint8), np.array([[1], [2]], np.uint8)
)  # four of two bits
FLOATS = NUMBERS.astype(np.float32)


def assert_stack(given, sums):
    votes = np.round(np.asarray(sums) * 2).astype(int)
    assert len(np.unique(votes.argmax(-1))) > 1
    for model in given:
        np.testing.assert_array_equal(
            circuits.from_model(model, inputs="uint2", outputs="votes")(NUMBERS), votes
        )
        np.testing.assert_array_equal(
            circuits.from_model(model, inputs="uint2")(NUMBERS), votes.argmax(-1)
        )


def test_layers_of_nnx():
    model = drawn(lambda rngs: nnx.Sequential(*stack(lutjax_nnx, rngs=rngs)))
    assert_stack(
        [list(model.layers), nnx.List(model.layers), model], jax.jit(lambda x: model(x))(FLOATS)
    )
    # A layer whose gates were pruned has the sizes of its arrays.
    gates, votes = lutjax_nnx.LogicGates(8, 12, rngs=nnx.Rngs(0)), lutjax_nnx.GroupSum(3)
    gates.logits, gates.wires = gates.logits[:9], gates.wires[:9]
    assert circuits.from_model([gates, votes], simplify=False).parts[0] == ("layer 1", 9)


def test_every_flipped_entry_of_a_table_is_found():
    layer = lutjax_nnx.SoftLUT(6, 12, n_inputs=3, parameterization="raw", rngs=nnx.Rngs(0))
    layer.table = jnp.asarray(RNG(0).normal(size=(12, 8)), jnp.float32)
    circuit = circuits.from_model([layer], simplify=False)
    want = np.asarray(layer(jnp.asarray(every(6), jnp.float32), deterministic=True))
    np.testing.assert_array_equal(circuit(every(6)), want)
    for gate, entry in itertools.product(range(12), range(8)):
        tables = list(circuit.tables)
        tables[gate] ^= 1 << entry
        wrong = dataclasses.replace(circuit, tables=tuple(tables))(every(6)) != want
        assert wrong[:, gate].any()
        assert not np.delete(wrong, gate, 1).any()


# ------------------------------------------------------------------------------------- trees over images
TREES = {
    "padded": {"in_shape": (4, 4, 1), "n_kernels": 3, "kernel": 3, "depth": 2, "padding": 1, "pool": 2},
    "strided": {"in_shape": (4, 3, 1), "n_kernels": 2, "kernel": 2, "depth": 1, "stride": 2, "padding": 1},
    "deep": {"in_shape": (3, 2, 2), "n_kernels": 2, "kernel": 2, "depth": 3},
    "pools_of_nine": {"in_shape": (4, 4, 1), "n_kernels": 3, "kernel": 2, "depth": 1, "pool": 3},
    "rectangular": {"in_shape": (4, 3, 1), "n_kernels": 2, "kernel": (3, 2), "depth": 2, "pool": (1, 2)},
    "padded_pools": {"in_shape": (3, 3, 1), "n_kernels": 2, "kernel": 2, "depth": 1, "pool": 2, "pool_padding": (1, 0)},
    "tables": {"in_shape": (3, 3, 1), "n_kernels": 3, "kernel": 3, "depth": 2, "n_inputs": 3,
               "parameterization": "light", "table_init": jax.nn.initializers.normal(1.0)},
    "features_first": {"in_shape": (3, 2, 2), "n_kernels": 3, "kernel": 2, "depth": 2, "padding": 1, "feature_axis": 0},
}  # fmt: skip


def rarely_one(key, shape, dtype):
    """Logits for AND, AND-NOT and XOR gates, so that the OR over many gates is not always 1."""
    return jax.nn.one_hot(
        jax.random.choice(key, jnp.array([1, 2, 4, 6]), shape[:1]), shape[1], dtype=dtype
    )


def tree(rngs, in_shape, n_kernels, **options):
    options |= {"logits_init": rarely_one, "deterministic": True}
    return lutjax_nnx.LogicConv(in_shape, n_kernels, rngs=rngs, **options)


@pytest.mark.parametrize("name", slow_except(TREES, "rectangular"))
def test_trees_at_every_place(name):
    layer = drawn(lambda rngs: tree(rngs, **TREES[name]))
    height, width, channels = layer.in_shape
    first = layer.feature_axis == 0
    x = every(height * width * channels)
    images = (
        x.T.reshape(channels, height, width, -1)
        if first
        else x.reshape(-1, height, width, channels)
    )
    y = np.asarray(jax.jit(lambda x: layer(x))(images.astype(np.float32)))
    want = y.reshape(-1, len(x)).T if first else y.reshape(len(x), -1)
    assert 0 < want.mean() < 1
    for simplify in (True, False):
        circuit = circuits.from_model([layer], simplify=simplify)
        assert circuit.about["image"] == [height, width]
        np.testing.assert_array_equal(circuit(x), want)


# ------------------------------------------------------------------------------------- automata
@functools.cache
def automaton(channels, **options):
    config = LogicCAConfig(
        channels=channels, kernels=3, perception=(8, 4, 2), update=(12, channels), **options
    )
    model = drawn(lambda rngs: LogicCA(config, rngs=rngs))
    # Few gates that forget, so that the state neither dies nor fills the grid.
    gates = RNG(4).choice([2, 6, 7, 9, 13, 14], config.n_gates, p=[0.1, 0.4, 0.1, 0.2, 0.1, 0.1])
    model.logits.set_value(jnp.eye(16)[:, gates])
    return model


@pytest.mark.parametrize("periodic", [True, slow(False)])
def test_steps_of_an_automaton(periodic):
    model = automaton(3, periodic=periodic)
    state = RNG(1).integers(0, 2, (2, 7, 9, 3)).astype(np.int8)
    circuit = model.circuit()
    assert circuit.about["kind"] == "automaton"
    assert [name for name, _ in circuit.parts] == [f"layer {i}" for i in range(1, 6)]
    result = circuits.step_automaton(circuit, state, 20)
    assert result.dtype == np.int8
    np.testing.assert_array_equal(result, model(jnp.asarray(state), 20, deterministic=True))
    assert 0 < result.mean() < 1
    np.testing.assert_array_equal(circuits.step_automaton(circuit, state, 0), state)


# ------------------------------------------------------------------------------------- refused
def gates_of(*sizes):
    return [lutjax_nnx.LogicGates(a, b, rngs=nnx.Rngs(0)) for a, b in itertools.pairwise(sizes)]


def with_nan():
    layer = gates_of(2, 2)[0]
    layer.logits[...] = layer.logits[...].at[1, 3].set(jnp.nan)
    return [layer]


def nan_thresholds():
    packed = configured("gates").packed()
    return dataclasses.replace(packed, thresholds=packed.thresholds.at[2, 0].set(jnp.nan))


def wild_wires():
    return packed_of(np.ones((2, 4)), np.array([[0, 1], [1, 2]]), 2, 2)


def asynchronous():
    model = nnx.clone(automaton(3, periodic=True))
    model.config = dataclasses.replace(model.config, update_rate=0.5)
    return model


def bfloat16():
    return [lutjax_nnx.Thermometer(2, 1, dtype=jnp.bfloat16)]


SUMS = lutjax_nnx.GroupSum(2)
REFUSED = {
    "floats": (lambda: bfloat16(), {"inputs": "float32"}, ValueError, r"inputs is 'float32'.*Name a fixed-point"),
    "no_format": (lambda: bfloat16(), {"inputs": "pixels"}, ValueError, "text is 'pixels'"),
    "rounded": (lambda: bfloat16(), {"inputs": "uint9"}, ValueError, "in bfloat16, which rounds"),
    "wide": (lambda: [lutjax_nnx.Thermometer(2, 1)], {"inputs": "uint25"}, ValueError, "at most 24 bits"),
    "numbers_of_bits": (lambda: gates_of(2, 2), {"inputs": "uint8"}, ValueError, "use 'bits'"),
    "outputs": (lambda: gates_of(2, 2), {"outputs": "logits"}, ValueError, "outputs is 'logits'; expected"),
    "no_votes": (lambda: gates_of(2, 2), {"outputs": "class"}, ValueError, "end the list of layers with GroupSum"),
    "sums_inside": (lambda: [*gates_of(2, 2), SUMS, *gates_of(2, 2)], {}, ValueError, "layer 2, a GroupSum.*last"),
    "sums_alone": (lambda: [SUMS], {}, ValueError, "the only layer"),
    "groups": (lambda: [*gates_of(2, 3), SUMS], {}, ValueError, "2 groups, which do not divide 3"),
    "sizes": (lambda: [*gates_of(2, 3), *gates_of(4, 2)], {}, ValueError, "layer 2.*reads 4 bits.*gives 3"),
    "dense": (lambda: [nnx.Linear(2, 2, rngs=nnx.Rngs(0))], {}, TypeError, "layer 1 is a Linear"),
    "function": (lambda: [*gates_of(2, 2), jnp.sin], {}, TypeError, "layer 2 is a .*no exact circuit"),
    "detectors": (
        lambda: [lutjax_nnx.LUT(2, 2, n_detectors=1, n_anchors=1, rngs=nnx.Rngs(0))], {}, TypeError, "a LUT,"
    ),
    "empty": (lambda: [], {}, ValueError, "empty list"),
    "text": (lambda: "gates", {}, TypeError, "model is a str"),
    "other_model": (lambda: 3, {}, TypeError, "model is a int"),
    "unbound": (lambda: [linen.LogicGates(2, 2)], {}, ValueError, r"without variables.*\(layer, variables\)"),
    "nan": (with_nan, {}, ValueError, "logits of layer 1.*NaN"),
    "nan_thresholds": (nan_thresholds, {"inputs": "uint8"}, ValueError, "thresholds holds NaN"),
    "wires": (wild_wires, {}, ValueError, "ids from 0 to 2; inputs are 0 to 1"),
    "asynchronous": (asynchronous, {}, ValueError, "update_rate is 0.5.*at random"),
    "numbers_of_cells": (lambda: automaton(3, periodic=True), {"inputs": "uint8"}, ValueError, "inputs is 'uint8'.*bits"),
    "kind_of_inputs": (lambda: bfloat16(), {"inputs": np.uint8}, TypeError, r"inputs is <class 'numpy.uint8'>; expected 'bits', a Format"),
    "class_of_cells": (lambda: automaton(3, periodic=True), {"outputs": "class"}, ValueError, "outputs is 'class'.*bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, without_typechecking):
    make, options, kind, message = REFUSED[name]
    model = make()
    with pytest.raises(kind, match=message):
        circuits.from_model(model, **options)


def test_a_traced_layer_is_refused():
    layer = gates_of(2, 2)[0]
    with pytest.raises(ValueError, match="wires of layer 1 is traced"):
        nnx.jit(lambda layer: circuits.from_model([layer]) and None)(layer)


def test_states_that_do_not_fit_an_automaton():
    for circuit, message in (
        (life_circuit(), r"state has shape \[3, 3, 2\]; expected \[\.\.\., height, width, 1\]"),
        (circuits.from_model(gates_of(2, 2)), "of kind 'network'"),
    ):
        with pytest.raises(ValueError, match=message):
            circuits.step_automaton(circuit, np.zeros((3, 3, 2)))


class TestSlow:
    def test_layers_of_linen_and_haiku(self):
        layers = stack(linen)
        model = nn.Sequential(layers)
        variables = model.init(jax.random.key(5), FLOATS)
        own = [
            {kind: of[f"layers_{i}"] for kind, of in variables.items() if f"layers_{i}" in of}
            for i in range(len(layers))
        ]
        pairs = list(zip(layers, own, strict=True))
        bound = model.bind(variables)
        assert_stack(
            [bound, list(bound.layers), (model, variables), pairs], model.apply(variables, FLOATS)
        )

        f = hk.transform_with_state(lambda x: hk.Sequential(stack(lutjax_haiku))(x))
        params, state = f.init(jax.random.key(5), FLOATS)
        sums, _ = f.apply(params, state, None, FLOATS)
        for of in (lambda: stack(lutjax_haiku), lambda: hk.Sequential(stack(lutjax_haiku))):
            made = lambda of=of: circuits.from_model(of(), inputs="uint2", outputs="votes")  # noqa: E731
            circuit, _ = hk.transform_with_state(made).apply(params, state, None)
            np.testing.assert_array_equal(circuit(NUMBERS), np.round(np.asarray(sums) * 2))

    def test_a_convolutional_classifier(self):
        """Pixels, two tree layers, gates and votes: three layer kinds over 16 two-bit pixels."""
        normal = jax.nn.initializers.normal(1.0)

        def build(rngs):
            return nnx.Sequential(
                lutjax_nnx.Thermometer(
                    16, 2, thresholds=np.tile(np.array([[0.5, 1.5]], np.float32), (16, 1))
                ),
                tree(rngs, (4, 4, 2), 4, kernel=3, depth=3, padding=1, pool=2),
                tree(rngs, (2, 2, 4), 6, kernel=2, depth=2, padding=1),
                lutjax_nnx.LogicGates(54, 40, logits_init=normal, deterministic=True, rngs=rngs),
                lutjax_nnx.GroupSum(4),
            )

        layers = list(drawn(build).layers)

        @jax.jit
        def sums_of(x):
            encoder, first, second, gates, votes = layers
            y = second(first(encoder(x).reshape(-1, 4, 4, 2)))
            return votes(gates(y.reshape(len(x), -1)))

        x = RNG(0).integers(0, 3, (300, 16))
        sums = np.asarray(sums_of(x.astype(np.float32)), int)
        assert len(np.unique(sums.argmax(-1))) > 1
        np.testing.assert_array_equal(
            circuits.from_model(layers, inputs="uint2", outputs="votes")(x), sums
        )
        np.testing.assert_array_equal(
            circuits.from_model(layers, inputs="uint2")(x), sums.argmax(-1)
        )
