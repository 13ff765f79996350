"""Estimators by their definitions: temperatures, light gates, learned thresholds, and classifiers that are trained with them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import output, refusal
from flax import nnx
from layer_libraries import Case, assert_libraries_agree, assert_refused
from small_runs import images

import lutjax
from lutjax import circuits
from lutjax.layers.nnx import LogicGates, SoftLUT, Thermometer
from lutjax.models import LogicClassifierConfig, LogicTreeNetConfig
from lutjax.models._logic_configs import EDGES
from lutjax.training import classifier, optimizers, reports
from lutjax.training.classifier_runs import Classifier
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.samples import Samples

BITS = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])  # a, b by address


def corners_of_gates():
    """Values of the sixteen gates at the corners, by their numbers: ``[16, 4]``, the first input the lowest bit of an address."""
    return np.array([[gate >> 3 - (2 * a + b) & 1 for a, b in BITS] for gate in range(16)])


def interpolated(corners, a, b):
    shares = np.stack([(1 - a) * (1 - b), a * (1 - b), (1 - a) * b, a * b], -1)
    return (shares * corners).sum(-1)


def softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def test_temperatures_of_a_call():
    """Compare with mixtures in NumPy; all temperatures are one program."""
    rng = np.random.default_rng(0)
    gates, light = (
        kind(6, 9, estimator="soft", rngs=nnx.Rngs(0), **o)
        for kind, o in ((LogicGates, {}), (SoftLUT, {"n_inputs": 2}))
    )
    gates.logits, light.table = (rng.normal(size=(9, n)).astype(np.float32) for n in (16, 4))
    x = rng.uniform(size=(5, 6)).astype(np.float32)
    traced = []

    @nnx.jit
    def run(gates, light, t):
        traced.append(t)
        return gates(x, temperature=t), light(x, temperature=t)

    for t in (0.3, 1.0, 4.0):
        found = run(gates, light, jnp.float32(t))
        corners = (
            softmax(np.asarray(gates.logits[...], np.float64) / t) @ corners_of_gates(),
            1 / (1 + np.exp(-np.asarray(light.table[...], np.float64) / t)),
        )
        for y, of, layer in zip(found, corners, (gates, light), strict=True):
            a, b = x[:, np.asarray(layer.wires[...])].transpose(2, 0, 1)
            np.testing.assert_allclose(y, interpolated(of, a, b), rtol=2e-5, atol=1e-6)
    assert len(traced) == 1
    np.testing.assert_array_max_ulp(run(gates, light, jnp.float32(1.0))[0], gates(x), 4)  # another program
    # A low temperature is the hard network, and a high one gives half of every gate.
    for layer, low, high in zip(
        (gates, light), run(gates, light, jnp.float32(1e-4)), run(gates, light, jnp.float32(1e6)), strict=True
    ):
        np.testing.assert_allclose(low, layer(x, deterministic=True), atol=1e-5)
        np.testing.assert_allclose(high, 0.5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["gumbel", "straight_through"])
def test_estimators_at_a_temperature(estimator):
    """Gumbel: the mixture of noisy logits over the temperature. Straight through: the hard network, with the mixture's gradient."""
    layer = LogicGates(4, 5, estimator=estimator, rngs=nnx.Rngs(0, gates=1))
    rng = np.random.default_rng(1)
    layer.logits = rng.normal(size=(5, 16)).astype(np.float32)
    bits = jnp.asarray(rng.integers(0, 2, (7, 4)), jnp.float32)
    soft = LogicGates(4, 5, wires=layer.wires[...], rngs=nnx.Rngs(0))
    if estimator == "gumbel":
        y = layer(bits, temperature=0.5, rngs=nnx.Rngs(gates=3))
        key = jax.random.split(nnx.Rngs(gates=3).gates())[0]
        soft.logits = layer.logits[...] + jax.random.gumbel(key, (5, 16), jnp.float32)
        np.testing.assert_allclose(y, soft(bits, temperature=0.5), rtol=1e-6)
        return
    soft.logits = layer.logits[...]

    def gradient(layer):
        graph, params, others = nnx.split(layer, nnx.Param, ...)
        y, back = jax.vjp(lambda params: nnx.merge(graph, params, others)(bits, temperature=0.5), params)
        return y, np.asarray(back(jnp.arange(35, dtype=jnp.float32).reshape(7, 5))[0]["logits"].get_value())

    (y, got), (_, want) = gradient(layer), gradient(soft)
    np.testing.assert_array_equal(y, soft(bits, deterministic=True))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_light_gates_have_the_gradient_of_difference_quotients():
    rng = np.random.default_rng(2)
    logits, x = rng.normal(size=(3, 4)), rng.uniform(size=(2, 4))
    wires, g, t = np.array([[0, 1], [3, 3], [2, 0]], np.int32), rng.normal(size=(2, 3)), 0.7

    def loss(logits, x):
        a, b = x[:, wires].transpose(2, 0, 1)
        return float((g * interpolated(1 / (1 + np.exp(-logits / t)), a, b)).sum())

    with jax.enable_x64(True):
        layer = SoftLUT(4, 3, n_inputs=2, param_dtype="float64", wires=wires, rngs=nnx.Rngs(0))
        spec, arrays = layer.spec, {"wires": jnp.asarray(wires)}

        def of_layer(logits, x):
            return (jnp.asarray(g) * spec({**arrays, "table": logits}, x, temperature=jnp.float64(t))).sum()

        found = jax.grad(of_layer, (0, 1))(jnp.asarray(logits), jnp.asarray(x))
        assert float(of_layer(jnp.asarray(logits), jnp.asarray(x))) == pytest.approx(
            loss(logits, x), rel=1e-12
        )
    for number, got in enumerate(found):
        for place in np.ndindex(got.shape):
            values = [[logits.copy(), x.copy()] for _ in range(2)]
            for sign, pair in zip((1, -1), values, strict=True):
                pair[number][place] += sign * 1e-5
            quotient = (loss(*values[0]) - loss(*values[1])) / 2e-5
            np.testing.assert_allclose(got[place], quotient, rtol=1e-7, atol=1e-9)


def test_a_temperature_of_a_call_is_that_of_the_layer():
    case = Case("LogicGates", {"feature_axis": 0}, (7, 5), (7, 11))
    arrays = {}
    for v in case.spec.variables():
        arrays[v.name] = v.make(lambda: jax.random.key(4), arrays)
        if v.collection == "params":
            arrays[v.name] = jax.random.normal(jax.random.key(5), v.shape, v.dtype)
    x = jax.random.uniform(jax.random.key(6), case.shape)
    own, half = dataclasses.replace(case.spec, temperature=0.5), jnp.float32(0.5)

    @jax.jit
    def run(t):
        needs = case.spec.expected_needs(arrays, t), own.expected_needs(arrays)
        return (case.spec(arrays, x, temperature=t), own(arrays, x), case.spec(arrays, x)), needs

    (given, own_y, other), needs = run(half)
    np.testing.assert_allclose(given, own_y, rtol=1e-6)
    assert not np.allclose(given, other)
    for got, want in zip(*needs, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    cotangent = jax.random.normal(jax.random.key(7), given.shape)
    assert_libraries_agree(case, arrays, x, cotangent, temperature=half)


def test_impossible_temperatures():
    raw = SoftLUT(4, 3, parameterization="raw", rngs=nnx.Rngs(0))
    gates = LogicGates(4, 3, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 4))
    for layer, temperature, message in (
        (
            raw,
            jnp.float32(0.5),
            "SoftLUT: parameterization is 'raw', which has no logits, so a call takes no",
        ),
        (gates, 0.0, "LogicGates: temperature is 0.0; it must be positive"),
        (gates, jnp.ones(3), r"LogicGates: temperature has shape \[3\]; expected one number"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.spec(layer._arrays(), x, temperature=temperature)


# ------------------------------------------------------------------------------------- thresholds
WIDE = Case(
    "Thermometer",
    {"learnable": True, "feature_axis": 0, "temperature": 0.5, "widths": np.float32([0.5, 2, 40])},
    (3, 9),
    (3, 2),
)


def test_widths_of_thresholds():
    """The gradient is that of sigmoids whose widths each feature has of its own."""
    rng = np.random.default_rng(3)
    widths = WIDE.options["widths"]
    x, t, g = (rng.normal(size=s).astype(np.float32) * widths.reshape(3, 1) for s in ((3, 9), (3, 2), (3, 9)))
    layer = Thermometer(3, 2, **WIDE.options, thresholds=t)
    y, back = jax.vjp(
        lambda x, t: layer.spec({**layer._arrays(), "thresholds": t}, x), jnp.asarray(x), jnp.asarray(t)
    )
    bits = x[:, None] > t[:, :, None]
    np.testing.assert_array_equal(y, bits.reshape(6, 9))
    dx, dt = back(jnp.asarray(np.repeat(g, 2, 0)))
    width = 0.5 * widths[:, None, None]
    s = 1 / (1 + np.exp(-(x[:, None].astype(np.float64) - t[:, :, None]) / width))
    slope = g[:, None] * s * (1 - s) / width
    np.testing.assert_allclose(dx, slope.sum(1), rtol=2e-4)
    np.testing.assert_allclose(dt, -slope.sum(2), rtol=2e-4)
    given = {"thresholds": jnp.asarray(t), "widths": jnp.asarray(widths)}
    without = WIDE._replace(options={k: v for k, v in WIDE.options.items() if k != "widths"})
    assert [v.name for v in without.spec.variables()] == ["thresholds"]
    spec = dataclasses.replace(without.spec, has_widths=True)
    np.testing.assert_array_equal(spec(given, x), y)
    for change, message in (
        ({"widths": np.float32([1, 0, 1])}, "Thermometer: widths goes from 0.0 to 1.0; all must be positive"),
        ({"learnable": False}, "Thermometer: widths are given, but learnable is False"),
        ({"widths": np.float32([1, 1])}, r"widths has shape \[2\]; the sizes of this layer need \[3\]"),
    ):
        assert_refused(WIDE._replace(options={**WIDE.options, **change}), message)


@pytest.fixture(scope="module")
def run():
    config = LogicClassifierConfig(
        16, 2, layers=(40, 20), n_thresholds=3, tables="light", estimator="gumbel", learned_thresholds=True
    )
    options = {"thresholds": "learned", "augment": 0.0, "temperature": 2.0, "final_temperature": 0.5}
    training = classifier.TrainingConfig(steps=6, batch_size=20, learning_rate=0.5, **options)
    return classifier.Run(config, training, images())


@pytest.mark.slow
def test_learned_thresholds_move(run):
    """They start evenly spaced; where nothing can be learned they stay; and any order of them is a network."""
    state, _ = run.advance(run.init(), 0, 6)
    first = np.asarray(lutjax.thermometer_thresholds(jnp.asarray(images().x), 3))
    now = np.asarray(state.params["encoder"]["thresholds"])
    np.testing.assert_array_equal(now[:2], first[:2])
    assert (now[2:] != first[2:]).mean() > 0.9
    # Adam's first steps are of its rate, in units of a tenth of the standard deviation.
    one, _ = run.advance(run.init(), 0, 1)
    moved = np.abs(np.asarray(one.params["encoder"]["thresholds"]) - first)[2:]
    largest = 0.5 * 0.1 * images().x.std(0)[2:]
    assert (moved <= 1.001 * largest[:, None]).all()
    assert (moved.max(1) > 0.9 * largest).all()
    model = run.structure.model(state.params, state.others)
    model.encoder.thresholds = np.asarray(model.encoder.thresholds[...])[:, [2, 0, 1]]
    x = images(40).x
    hard = np.asarray(model(jnp.asarray(x), deterministic=True).argmax(-1))
    np.testing.assert_array_equal(model.packed()(x), hard)
    np.testing.assert_array_equal(model.packed()(x.astype(np.uint8)), hard)
    np.testing.assert_array_equal(circuits.from_model(model, inputs="uint8")(x).ravel(), hard)


def test_the_soft_network_is_tested_at_the_temperature_of_its_step(run):
    assert float(run.temperature(3)) == pytest.approx(1.0)  # between 2 and 1/2, exponentially
    state, x = run.init(), images(40).x
    model = run.structure.model(state.params, state.others)
    for steps, temperature in ((0, 2.0), (6, 0.5), (None, 0.5)):
        logits = model(jnp.asarray(x), temperature=temperature, rngs=nnx.Rngs(gates=0))
        np.testing.assert_array_equal(run.classes(state, x, hard=False, steps=steps), logits.argmax(-1))


@pytest.mark.parametrize("annealing", optimizers.ANNEALINGS)
def test_annealing(annealing):
    found = [float(optimizers.annealed(annealing, first=3.0, last=0.5, steps=8)(step)) for step in range(10)]
    s = np.minimum(np.arange(10) / 8, 1)
    want = {
        "linear": 3 - 2.5 * s,
        "exponential": 3 * (0.5 / 3) ** s,
        "cosine": 0.5 + 2.5 * (1 + np.cos(np.pi * s)) / 2,
    }[annealing]
    np.testing.assert_allclose(found, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({}, {"annealing": "slow"}, "annealing is 'slow'; expected one of linear, exponential, cosine"),
        ({"tables": "raw"}, {"final_temperature": 0.5}, "but tables of the kind raw have no logits"),
        (
            {"learned_thresholds": True},
            {},
            "of the model is True, but thresholds of the training is 'uniform'",
        ),
        (
            {"learned_thresholds": True, "n_thresholds": 0},
            {},
            "learned_thresholds is True, but n_thresholds is 0",
        ),
    ],
)
def test_impossible(model, training, message):
    with pytest.raises(ValueError, match=message):
        classifier.Run(
            LogicClassifierConfig(16, 2, layers=(4,), **model),
            classifier.TrainingConfig(**training),
            images(),
        )


def test_numbers_of_columns_give_the_same_bits(tmp_path):
    """A table whose thresholds are learned starts with the bits of one whose thresholds are not."""
    rng = np.random.default_rng(5)
    cells = {
        "age": rng.integers(0, 90, 50).astype(str),
        "job": rng.choice(["a", "b", "c"], 50),
        "pay": np.where(rng.random(50) < 0.2, "?", rng.normal(size=50).round(3).astype(str)),
    }
    table = Table(cells, rng.choice(["no", "yes"], 50), "people")
    bits, numbers = (Encoding.fit(table, 4, numbers=numbers) for numbers in (False, True))
    assert bits.thresholds is None
    np.testing.assert_array_equal(numbers.encode(table) > numbers.thresholds[:, 0], bits.encode(table))
    assert Encoding.from_json(numbers.to_json()) == numbers
    whole = Samples(numbers.encode(table), np.zeros(50, np.int32), (len(numbers.features),), "people")
    assert reports.bit_names(whole, numbers.thresholds, numbers) == bits.features
    only = Encoding.fit(Table({"job": cells["job"]}, table.labels, "jobs"), 4, numbers=True)
    assert only.thresholds is None

    path = tmp_path / "people.csv"
    rows = zip(*cells.values(), table.labels, strict=True)
    path.write_text("\n".join([",".join([*cells, "class"]), *(",".join(row) for row in rows)]))
    made = Classifier.new({"layers": (8,), "thresholds": "learned", "column_bits": 4}, path, target="class")
    assert made.record.model.n_thresholds == 1
    encoder = made.run.structure.model(*made.run.init()[:2]).encoder
    np.testing.assert_array_equal(encoder.thresholds[...], made.encoding.thresholds)


# ------------------------------------------------------------------------------------- trees


def test_trees_are_trained_by_the_command(tree_run):
    out, _, said = tree_run
    assert "3 + 4 trees and 12 gates" in said
    assert "logistic regression" in said
    for step, temperature in ((3, "1.25"), (6, "0.5")):
        (line,) = (one for one in said.splitlines() if one.startswith(f"step {step}/6  soft accuracy"))
        assert "gap " in line
        assert line.endswith(f"temperature {temperature}")
    model, record = classifier.load_model(out)
    assert record.model.kernel == (3, 2)
    assert record.model.learned_thresholds
    again = Classifier.of(record)
    x = again.test.x.reshape(-1, 4, 4, 2).astype(np.float32)
    classes = np.asarray(model.packed()(x))
    accuracy = float((classes == again.test.y).mean())
    assert record.history.test[-1] == (6, accuracy)
    report = json.loads((out / "report.json").read_text())
    assert (report["hard"], report["bits"]) == (accuracy, 64)
    assert [sum(layer["kinds"].values()) for layer in report["layers"]] == [9, 12, 12]
    np.testing.assert_array_equal(nnx.jit(lambda model, x: model(x).argmax(-1))(lutjax.load(out), x), classes)
    # At a low temperature tables are sure: those that need two inputs, at all their places, and votes that are not constant.
    every = [reports.needs(np.asarray(layer.truth_tables()[1])) for layer in (*model.trees, *model.gates)]
    expected = sum(n * needed.all(1).sum() for n, needed in zip((16, 1, 1), every, strict=True))
    expected += every[-1].any(1).sum()
    assert float(classifier.expected_gates(model, jnp.float32(1e-5))) == pytest.approx(expected)


def test_weight_decay_takes_a_share_of_gates_and_none_of_thresholds():
    data = images()
    config = LogicTreeNetConfig((4, 4, 1), 3, kernels=(2,), layers=(6,), learned_thresholds=True)
    settings = {"learning_rate": 0.5, "thresholds": "learned", "cooldown": 0.0}
    run = classifier.Run(config, classifier.TrainingConfig(weight_decay=0.1, **settings), data)
    params = jax.tree.map(lambda a: jnp.full(a.shape, 2.0, a.dtype), run.abstract().params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = run._optimizer.update(zeros, run._optimizer.init(params), params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        of_gates = "encoder" not in jax.tree_util.keystr(path)
        np.testing.assert_allclose(update, -0.5 * 0.1 * 2.0 if of_gates else 0.0, rtol=1e-6)
    with pytest.raises(ValueError, match=r"weight_decay is -0.1; it must not be negative"):
        classifier.TrainingConfig(weight_decay=-0.1)


@pytest.mark.slow
def test_trees_read_edges(tmp_path):
    """A run with edges, from thresholds to the report and the circuit."""
    data, out = images(), tmp_path / "run"
    np.savez(tmp_path / "data.npz", x=data.x.reshape(-1, 4, 4), y=data.y)
    sizes = "--model=tree --kernels=3 --layers=12 --n-thresholds=2 --edges --weight-decay=0.01 --steps=4"
    output("train", "classify", "--data", tmp_path / "data.npz", *sizes.split(), "--out", out)
    model, record = classifier.load_model(str(out))
    assert record.training.weight_decay == 0.01
    assert model.encoder.thresholds.shape == (5, 2)
    report = json.loads((out / "report.json").read_text())
    assert report["bits"] == 5 * 2 * 16
    names = {name.partition(" ")[2].rpartition(" > ")[0] for name in report["dead_bits"]}
    assert names & set(EDGES)
    output("export", out, "--format", "json")
    output("verify", out / "circuit")


def test_trees_refused(tree_run, tmp_path):
    out, words, _ = tree_run
    np.savez(tmp_path / "rows.npz", x=images().x, y=images().y)
    for more, message in (
        (["--model", "tree", "--data", tmp_path / "rows.npz"], "are 16 numbers each, not images, which trees"),
        (["--model", "tree", *words[2:4], "--n-inputs", 4], "have 2 inputs, but --n-inputs is 4; use 'light'"),
        (["--kernels", "4"], "kernels is (4,); the model gates has no such option"),
        (["--model", "gates", "--recipe", "logictreenet-mnist-s"], "the recipe logictreenet-mnist-s is one of tree"),
        (["--resume", "--out", out, "--model", "gates"], "the run trains another model: tree, not gates"),
        (["--thresholds", "learned", "--n-thresholds", 0], "learned_thresholds is True, but --n-thresholds is 0"),
    ):  # fmt: skip
        assert message in refusal("train", "classify", "--out", tmp_path / "a", *more)


def live_by_loops(trees, alive):
    """Return the nodes and pixels that outputs ``[rows, columns, kernels]`` depend on, place by place."""
    spec, wires, truth = trees
    nodes, pixels = np.zeros(len(wires), bool), np.zeros(spec.in_shape, bool)
    size, stride, around = spec.geometry

    def visit(node, place):
        nodes[node] = True
        table = truth[node].reshape(2, 2)  # [second input, first input]
        for i, wire in enumerate(wires[node]):
            if (np.take(table, 0, 1 - i) == np.take(table, 1, 1 - i)).all():
                continue
            if wire >= spec.window:
                visit(wire - spec.window, place)
                continue
            row, column, channel = np.unravel_index(wire, (*size, spec.in_shape[2]))
            at = [p * s + o - a for p, s, o, a in zip(place, stride, (row, column), around, strict=True)]
            if all(0 <= k < n for k, n in zip(at, spec.in_shape[:2], strict=True)):
                pixels[at[0], at[1], channel] = True

    pool, _ = spec.pooling
    for place in np.ndindex(*spec.places):
        for kernel in np.flatnonzero(alive[place[0] // pool[0], place[1] // pool[1]]):
            visit(len(wires) - spec.n_kernels + kernel, place)
    return nodes, pixels


def test_live_nodes_of_trees(tree_run):
    """A node is alive if a table above it can tell its values apart, at some place, up to an output that matters."""
    model, _ = classifier.load_model(tree_run.out)
    rng = np.random.default_rng(6)
    for layer in model.trees:
        wires = np.asarray(layer.truth_tables()[0])
        one = reports.Trees(layer.spec, wires, rng.integers(0, 2, (len(wires), 4)).astype(bool))
        alive = rng.random(layer.spec.out_shape) < 0.3
        found, read = reports.live_nodes(one, alive.transpose(2, 0, 1).ravel())
        nodes, pixels = live_by_loops(one, alive)
        np.testing.assert_array_equal(found, nodes)
        np.testing.assert_array_equal(read, pixels.transpose(2, 0, 1).ravel())
        assert 0 < nodes.mean() < 1
