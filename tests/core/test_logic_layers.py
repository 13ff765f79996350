"""Differentiable logic layers: wires, the hard network, bits, thermometers; test_layers_and_ops.py covers their values."""

import functools
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx
from layer_libraries import Case, by_kind, nnx_layer

import lutjax
from lutjax import testing, wiring
from lutjax.layers import _logic, haiku as lutjax_haiku, initializers, linen, nnx as lutjax_nnx
from lutjax.models import LogicClassifier, LogicClassifierConfig

LEARNABLE = {"wiring": "learnable", "candidates": 4}
CASES = {
    "gates": Case("LogicGates", {}, (5, 3, 7)),
    "gates_features_first": Case(
        "LogicGates", {"feature_axis": 0, "wiring": "unique"}, (7, 5), (7, 11)
    ),
    "gates_of_chosen_wires": Case(
        "LogicGates", {"estimator": "straight_through", **LEARNABLE}, (9, 7)
    ),
    "tables_light": Case("SoftLUT", {"n_inputs": 3, "dtype": "bfloat16"}, (9, 7)),
    "tables_walsh": Case("SoftLUT", {"n_inputs": 2, "parameterization": "walsh"}, (9, 7)),
    "tables_of_signs": Case("BinaryLUT", {"n_inputs": 3, **LEARNABLE}, (9, 7)),
    "thermometer": Case("Thermometer", {}, (9, 7), (7, 3)),
    "group_sum": Case("GroupSum", {}, (5, 9), (3,)),
}


def random(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def variables_of(case: Case) -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for i, v in enumerate(case.spec.variables()):
        if v.kind == "params":
            arrays[v.name] = random(v.shape, seed=i)
        else:
            arrays[v.name] = v.make(lambda: jax.random.key(0), arrays)
    return arrays


def inputs_of(case: Case, bits: bool = False) -> jax.Array:
    x = np.random.default_rng(10).uniform(size=case.shape)
    return jnp.asarray(x > 0.5 if bits or case.layer == "BinaryLUT" else x, jnp.float32)


def test_clipping_lets_a_gradient_lead_back():
    values = jnp.array([-2.0, -1.0, 0.5, 1.0, 2.0])
    y, back = jax.vjp(functools.partial(_logic._clip_values, "SoftLUT"), values)
    np.testing.assert_array_equal(y, [-1, -1, 0.5, 1, 1])
    # Descent goes against the gradient.
    np.testing.assert_array_equal(back(jnp.ones(5))[0], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(back(-jnp.ones(5))[0], [-1, -1, -1, 0, 0])


@pytest.mark.parametrize("name", ["gates_of_chosen_wires", "tables_walsh", "tables_of_signs"])
def test_hard_network_is_its_truth_tables(name):
    case = CASES[name]
    arrays, x = variables_of(case), inputs_of(case, bits=True)
    wires, tables = case.spec.truth_tables(arrays)
    y = case.spec(arrays, x, deterministic=True)
    bits = x.reshape(-1, 7).T
    want = lutjax.unpack_bits(
        lutjax.packed_lut(lutjax.pack_bits(bits), tables, wires), bits.shape[1]
    )
    np.testing.assert_array_equal(np.asarray(y, np.float32).reshape(-1, 6).T, want)
    assert 0 < np.mean(tables) < 1


def test_truth_tables_of_all_gates():
    case = Case("LogicGates", {"wires": np.tile([0, 1], (16, 1))}, (4, 2), (2, 16))
    layer = nnx_layer(case)
    layer.logits.set_value(jnp.eye(16))
    wires, tables = layer.truth_tables()
    x = jnp.asarray([[0, 0], [1, 0], [0, 1], [1, 1]], jnp.float32)
    np.testing.assert_array_equal(tables.T, layer(x, deterministic=True))
    answers = tables[:, [0, 2, 1, 3]]  # ab = 00, 01, 10, 11
    np.testing.assert_array_equal(np.asarray(answers) @ np.array([8, 4, 2, 1]), np.arange(16))
    variables = {"params": {"logits": jnp.eye(16)}, "wires": {"wires": wires}}
    np.testing.assert_array_equal(linen.LogicGates(2, 16).truth_tables(variables)[1], tables)


def needs_of(tables: np.ndarray) -> np.ndarray:
    address = np.arange(tables.shape[1])
    masks = 1 << np.arange(tables.shape[1].bit_length() - 1)
    return sum(
        (tables[:, address] != tables[:, address ^ mask]).any(1).astype(int) for mask in masks
    )


@pytest.mark.parametrize("name", ["gates", "tables_light", "tables_of_signs"])
def test_expected_needs_are_the_mean_over_all_tables(name):
    case = CASES[name]
    layer = nnx_layer(case, variables_of(case))
    if case.layer == "LogicGates":
        every = nnx_layer(Case("LogicGates", {"wires": np.tile([0, 1], (16, 1))}, (4, 2), (2, 16)))
        every.logits.set_value(jnp.eye(16))
        tables = np.asarray(every.truth_tables()[1])
        shares = np.asarray(jax.nn.softmax(layer.logits[...]))
    else:
        size = layer.table[...].shape[1]
        tables = (np.arange(2**size)[:, None] >> np.arange(size) & 1).astype(bool)
        ones = np.asarray(layer.spec._corners(layer._arrays()), np.float64)[:, None]
        shares = np.where(tables, ones, 1 - ones).prod(-1)
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    needs = needs_of(tables)
    inputs, any_input = layer.expected_needs()
    np.testing.assert_allclose(inputs, shares @ needs, rtol=1e-5)
    np.testing.assert_allclose(any_input, shares @ (needs > 0), rtol=1e-5)


def test_expected_needs_of_sure_tables_are_those_of_the_hard_network():
    case = CASES["tables_light"]
    arrays = {**variables_of(case), "table": 200.0 * variables_of(case)["table"]}
    arrays["table"] = arrays["table"].at[0].set(-50.0).at[1].set(jnp.asarray([-50.0, 50.0] * 4))
    inputs, any_input = (np.asarray(a) for a in case.spec.expected_needs(arrays))
    needs = needs_of(np.asarray(case.spec.truth_tables(arrays)[1]))
    assert (needs[0], needs[1]) == (0, 1)
    np.testing.assert_allclose(inputs, needs, atol=1e-3)
    np.testing.assert_allclose(any_input, needs > 0, atol=1e-3)


@pytest.mark.parametrize("parameterization", ["gates", "walsh", "raw"])
def test_residual_networks_pass_on_their_first_inputs(parameterization):
    if parameterization == "gates":
        case = Case("LogicGates", {}, (9, 7))
    else:
        case = Case("SoftLUT", {"n_inputs": 3, "parameterization": parameterization}, (9, 7))
    layer, x = nnx_layer(case), inputs_of(case, bits=True)
    first = x[:, layer.wires[...][:, 0]]
    np.testing.assert_array_equal(layer(x, deterministic=True), first)
    if parameterization != "gates":
        np.testing.assert_allclose(layer(x), 0.1 + 0.8 * first, rtol=1e-5)


def test_residual_gates():
    logits = initializers.residual_gates(0.75)(jax.random.key(0), (2, 16), jnp.float32)
    np.testing.assert_allclose(jax.nn.softmax(logits)[:, 3], 0.75, rtol=1e-6)
    strong = initializers.residual_gates(strength=10)(jax.random.key(0), (2, 16), jnp.float32)
    np.testing.assert_array_equal(strong, np.tile(10.0 * (np.arange(16) == 3), (2, 1)))
    for probability in (0, 1, float("nan")):
        with pytest.raises(ValueError, match=r"residual_gates: probability is .* between 0 and 1"):
            initializers.residual_gates(probability)
    with pytest.raises(ValueError, match="parameterization is 'heavy'"):
        initializers.residual_table(0.9, "heavy")


def test_check_after_reading():
    case = CASES["gates"]
    arrays = variables_of(case)
    layer, module = nnx_layer(case, arrays), linen.LogicGates(*case.sizes)
    lutjax_nnx.check(layer)
    other = jnp.flip(arrays["wires"], 0)
    wrong = {
        "wires holds ids from 1 to 7; inputs are 0 to 6": {"wires": arrays["wires"] + 1},
        "readers is not the list .* lutjax.readers": {"wires": other},
        r"wires has shape \[5, 2\]; expected \[6, 2\]": {"wires": arrays["wires"][1:]},
    }
    for message, changes in wrong.items():
        for name, array in changes.items():
            layer.__dict__[name].set_value(array)
        with pytest.raises(ValueError, match=f"LogicGates: {message}"):
            lutjax_nnx.check(layer)
        with pytest.raises(ValueError, match=f"LogicGates: {message}"):
            module.check(by_kind(case, {**arrays, **changes}))
    # Wires of another fan-out are legal, with their own readers.
    hub = jnp.zeros((6, 2), jnp.int32)
    layer.wires.set_value(hub)
    layer.readers.set_value(lutjax.readers(hub, 7))
    lutjax_nnx.check(layer)


def test_explicit_wires():
    """A gate may read an input twice; a mostly empty fan-out list is omitted."""
    same = np.tile(np.asarray([[3, 3]]), (6, 1))
    case = Case("LogicGates", {"wires": same}, (9, 7))
    layer = nnx_layer(case)
    np.testing.assert_array_equal(layer.wires[...], same)
    assert layer.wires.dtype == jnp.int32
    assert layer.readers.shape == (7, 12)
    hub = nnx_layer(case._replace(options={"wires": np.zeros((12, 2), int)}, other_sizes=(30, 12)))
    assert not hasattr(hub, "readers")
    xor = nnx_layer(case, {"logits": 20.0 * jnp.eye(16)[jnp.full(6, 6)]})
    slope = jax.grad(lambda x: xor(x).sum())(jnp.full((1, 7), 0.25))
    np.testing.assert_allclose(slope, 6 * (2 - 4 * 0.25) * (np.arange(7) == 3)[None], rtol=1e-5)


def test_layers_can_be_made_under_jit():
    make = nnx.jit(lambda: lutjax_nnx.LogicGates(7, 11, rngs=nnx.Rngs(3)))
    made, want = make(), lutjax_nnx.LogicGates(7, 11, rngs=nnx.Rngs(3))
    for name in ("wires", "readers", "logits"):
        np.testing.assert_array_equal(getattr(made, name)[...], getattr(want, name)[...])


@pytest.mark.parametrize(
    ("n_inputs", "n_gates", "arity"), [(1, 7, 3), (5, 11, 2), (5, 1, 3), (6, 25, 4)]
)
def test_balanced(n_inputs, n_gates, arity):
    wires = np.asarray(wiring.balanced(jax.random.key(1), n_inputs, n_gates, arity))
    assert (wires.shape, wires.dtype) == ((n_gates, arity), np.int32)
    fan_out = np.bincount(wires.ravel(), minlength=n_inputs)
    assert (fan_out.max() - fan_out.min() <= 1, len(fan_out)) == (True, n_inputs)
    if n_inputs >= arity:
        assert all(len(set(gate)) == arity for gate in wires.tolist())
    other = wiring.balanced(jax.random.key(0), n_inputs, n_gates, arity)
    assert np.any(other != wires) == (n_inputs > 1)


# A part of a circle, a circle and a part, whole circles, with opposite inputs.
@pytest.mark.parametrize(("n_inputs", "n_gates"), [(2, 1), (5, 7), (6, 14)])
def test_unique_pairs(n_inputs, n_gates):
    wires = np.asarray(wiring.unique_pairs(jax.random.key(0), n_inputs, n_gates))
    assert (wires.shape, wires.dtype) == ((n_gates, 2), np.int32)
    assert len({frozenset(pair) for pair in wires.tolist()}) == n_gates
    assert np.all(wires[:, 0] != wires[:, 1])
    fan_out = np.bincount(wires.ravel(), minlength=n_inputs)
    assert fan_out.max() - fan_out.min() <= 1


def test_leaves_of_a_tree_differ():
    leaves = np.asarray(wiring.trees(jax.random.key(0), 18, 5, depth=4))
    assert leaves.shape == (5, 16)
    assert all(len(set(tree)) == 16 for tree in leaves.tolist())
    with pytest.raises(ValueError, match="balanced: n_gates is 0"):
        wiring.balanced(jax.random.key(0), 3, 0)


def test_thermometer_thresholds():
    data = np.random.default_rng(0).normal(size=(4, 25, 3)).astype(np.float32)
    rows = data.reshape(100, 3).astype(np.float64)
    share = np.arange(1, 6) / 6
    want = {
        "uniform": rows.min(0) + np.outer(share, rows.max(0) - rows.min(0)),
        "gaussian": rows.mean(0) + np.outer(scipy.stats.norm.ppf(share), rows.std(0)),
        "distributive": np.sort(rows, 0)[[16, 33, 50, 66, 83]],
    }
    for method, thresholds in want.items():
        got = lutjax.thermometer_thresholds(data, 5, method=method)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, thresholds.T, rtol=1e-4, atol=1e-5)
    pixels = np.asarray([[0], [255]], np.uint8)
    np.testing.assert_allclose(lutjax.thermometer_thresholds(pixels, 1), [[127.5]])
    for given, n, message in (
        ({"method": "even"}, 5, "method is 'even'; expected one of"),
        ({}, 0, "n_thresholds is 0"),
        ({"data": data[0, :0]}, 5, r"data has shape \[0, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            lutjax.thermometer_thresholds(**{"data": data, "n_thresholds": n, **given})
    for value in (np.nan, np.inf):
        for n, kept in ((100, rows[:0, :1]), (1, rows[1:, :1] * 0)):
            odd = np.concatenate([rows, np.full((100, 1), value)], 1)
            odd[100 - len(kept) :, 3:] = kept
            message = f"feature 3 of data is NaN or infinite in {n} of 100 samples; expected finite"
            for method in want:
                with pytest.raises(ValueError, match=message):
                    lutjax.thermometer_thresholds(odd, 5, method=method)


def test_thermometer_of_given_thresholds():
    x = random((4, 2, 3))
    thresholds = np.asarray([[-1.0, 0.0], [0.5, 1.0], [0.0, 0.25]], np.float32)
    encode = lutjax_nnx.Thermometer(3, 2, thresholds=thresholds)
    np.testing.assert_array_equal(
        encode(x), (np.asarray(x)[..., None] > thresholds).reshape(4, 2, 6)
    )
    assert encode(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    np.testing.assert_array_equal(encode(jnp.full((3,), jnp.nan)), np.zeros(6))
    assert not np.any(jax.grad(lambda x: encode(x).sum())(x))
    np.testing.assert_allclose(
        lutjax_nnx.Thermometer(2, 3).thresholds[...], [[0.25, 0.5, 0.75]] * 2
    )


@pytest.mark.parametrize("name", ["gates_features_first", "thermometer", "group_sum"])
def test_bools_and_integers_are_bits(name):
    case = CASES[name]
    x, layer = inputs_of(case, bits=True), nnx_layer(case, variables_of(case))
    want = layer(x)
    for bits in (x.astype(bool), x.astype(jnp.int32), np.asarray(x, np.uint8)):
        y = layer(bits)
        assert y.dtype == want.dtype
        np.testing.assert_array_equal(y, want)
    with pytest.raises(
        TypeError, match=f"{case.layer}: x is uint32, as bits packed by lutjax.pack_bits"
    ):
        layer(x.astype(jnp.uint32))


def test_sizes_follow_pruned_gates():
    layer = nnx_layer(CASES["tables_of_signs"])
    assert (layer.in_features, layer.out_features, layer.n_inputs, layer.candidates) == (7, 6, 3, 4)
    layer.table, layer.scores = layer.table[...][:4], layer.scores[...][:4]
    with pytest.raises(
        ValueError, match=r"BinaryLUT: wires has shape \[6, 3, 4\]; expected \[4, 3, 4\]"
    ):
        layer.check()
    layer.wires = layer.wires[...][:4]
    layer.check()
    assert layer.out_features == 4
    gates = nnx_layer(CASES["gates"])
    gates.logits, gates.wires = gates.logits[...][:3], gates.wires[...][:3]
    gates.check()  # who reads which input follows from wires
    thermometer = nnx_layer(CASES["thermometer"])
    thermometer.thresholds = jnp.zeros((7, 5))
    assert (thermometer.in_features, thermometer.n_thresholds, thermometer.out_features) == (
        7,
        5,
        35,
    )
    assert lutjax_nnx.GroupSum(4).out_features == 4


class TestSlow:
    @pytest.mark.parametrize(
        ("estimator", "learned"),
        [("soft", "balanced"), ("gumbel", "top-k"), ("straight_through", "learnable")],
    )
    def test_layers_in_sequence_are_calls_one_after_another(self, estimator, learned):
        """Compute mixtures in equally sized layers at once: two out of four."""
        rngs, options = nnx.Rngs(0, gates=1), {"estimator": estimator, "feature_axis": 0}
        gates = [(6, 8, "balanced"), (8, 8, learned), (8, 5, learned)]
        layers = [
            lutjax_nnx.LogicGates(
                n,
                m,
                wiring=w,
                candidates=4,
                logits_init=jax.nn.initializers.normal(1.0),
                rngs=rngs,
                **options,
            )
            for n, m, w in gates
        ]
        layers.insert(2, lutjax_nnx.SoftLUT(8, 8, n_inputs=2, rngs=rngs, **options))
        graph, params, others = nnx.split(nnx.List(layers), nnx.Param, ...)
        x = jax.random.uniform(jax.random.key(2), (6, 7))

        def joined(layers):
            mode = {"deterministic": False, "temperature": 0.5, "rngs": nnx.Rngs(gates=3)}
            return lutjax_nnx._logic.in_sequence(layers, x, **mode)

        def apart(layers):
            y, mode = x, {"deterministic": False, "temperature": 0.5, "rngs": nnx.Rngs(gates=3)}
            for layer in layers:
                y = layer(y, **mode)
            return y

        def derivatives(f):
            def loss(params):
                y = f(nnx.merge(graph, params, others))
                return jnp.sum(y**2), y

            return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

        for a, b in zip(*(jax.tree.leaves(derivatives(f)) for f in (joined, apart)), strict=True):
            testing.assert_close(estimator, a, b)
        if learned == "balanced":
            program = str(jax.make_jaxpr(lambda: joined(nnx.merge(graph, params, others)))())
            assert program.count("= exp ") == 2  # those of 8 gates, and of 5

    def test_a_network_that_runs_hard_or_lacks_noise_is_that_of_its_layers(self):
        config = LogicClassifierConfig(6, 2, layers=(8, 8), n_thresholds=0, estimator="gumbel")
        model = LogicClassifier(config, rngs=nnx.Rngs(0))
        bits = jnp.ones((3, 6))
        y = bits.T
        for layer in model.layers:
            y = layer(y, deterministic=True)
        np.testing.assert_array_equal(model(bits, deterministic=True), model.votes(y).T)
        for layer in model.layers:
            layer.rngs = nnx.data(None)
        with pytest.raises(ValueError, match="LogicGates: estimator is 'gumbel'; pass rngs"):
            model(bits)

    def test_recurrent_gates_go_on_and_run_packed(self):
        case = Case("LogicRNN", {}, (40, 5, 3), (3, 8))
        arrays = variables_of(case)
        bits = np.random.default_rng(0).integers(0, 2, case.shape).astype(np.float32)
        layer = nnx_layer(case, arrays)
        whole = layer(bits)
        first = layer(bits[:, :2])
        np.testing.assert_array_equal(first, whole[:, :2])
        np.testing.assert_array_equal(layer(bits[:, 2:], state=first[:, -1]), whole[:, 2:])

        hard = np.asarray(layer(bits, deterministic=True))
        words = jnp.stack([lutjax.pack_bits(bits[:, t].T) for t in range(5)], 1)
        kinds = by_kind(case, arrays)
        linen_layer = linen.LogicRNN(*case.sizes)
        f = hk.transform_with_state(
            lambda words, state=None: lutjax_haiku.LogicRNN(*case.sizes, name="layer").from_words(
                words, state
            )
        )
        of_haiku = {"layer": kinds["params"]}, {"layer": kinds["wires"]}, None
        for from_words in (
            layer.from_words,
            lambda *a: linen_layer.from_words(kinds, *a),
            lambda *a: f.apply(*of_haiku, *a)[0],
        ):
            result = from_words(words)
            for t in range(5):
                np.testing.assert_array_equal(lutjax.unpack_bits(result[:, t], 40).T, hard[:, t])
            np.testing.assert_array_equal(from_words(words[:, 2:], result[:, 1]), result[:, 2:])
        for call, message in (
            (lambda: layer(bits[0, 0]), r"x has shape \[3\]; expected \[..., length, features\]"),
            (
                lambda: layer(bits, state=bits[:, 0]),
                r"state has shape \[40, 3\]; expected \[40, 8\]",
            ),
            (
                lambda: layer.from_words(words[:2]),
                r"words is uint32\[2, 5, 2\]; .* \[3, length, ...\]",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
