"""Per-call temperatures, learned thresholds, and gate and tree classifiers trained with them."""

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
from lutjax.layers.nnx import LogicGates, SoftLUT
from lutjax.models import LogicClassifierConfig, LogicTreeNetConfig
from lutjax.models._logic_configs import EDGES
from lutjax.training import classifier, optimizers, reports
from lutjax.training.classifier_runs import Classifier
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.samples import Samples

GATES = Case("LogicGates", {"feature_axis": 0}, (7, 5), (7, 11))
LIGHT = Case("SoftLUT", {"n_inputs": 2, "wiring": "learnable", "candidates": 2}, (3, 7))


@pytest.mark.parametrize("case", [GATES, LIGHT], ids=["gates", "light"])
def test_a_temperature_of_a_call_is_that_of_the_layer(case):
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
    if case is GATES:
        cotangent = jax.random.normal(jax.random.key(7), given.shape)
        assert_libraries_agree(case, arrays, x, cotangent, temperature=half)


def test_impossible_temperatures_and_widths():
    options = {"learnable": True, "feature_axis": 0, "widths": np.float32([0.5, 2, 40])}
    for change, message in (
        (
            {"widths": np.float32([1, 0, 1])},
            "Thermometer: widths are 0.0 to 1.0; expected positive",
        ),
        ({"learnable": False}, "Thermometer: widths are given, but learnable is False"),
        ({"widths": np.float32([1, 1])}, r"widths has shape \[2\]; expected \[3\]"),
    ):
        assert_refused(Case("Thermometer", {**options, **change}, (3, 9), (3, 2)), message)
    raw = SoftLUT(4, 3, parameterization="raw", rngs=nnx.Rngs(0))
    gates = LogicGates(4, 3, rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 4))
    for layer, temperature, message in (
        (raw, jnp.float32(0.5), "SoftLUT: parameterization is 'raw', without"),
        (gates, 0.0, "LogicGates: temperature is 0.0; it must be positive"),
        (gates, jnp.ones(3), r"LogicGates: temperature has shape \[3\]; expected one number"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            layer.spec(layer._arrays(), x, temperature=temperature)


@pytest.fixture(scope="module")
def run():
    config = LogicClassifierConfig(
        16,
        2,
        layers=(40, 20),
        n_thresholds=3,
        tables="light",
        estimator="gumbel",
        learned_thresholds=True,
    )
    options = {
        "thresholds": "learned",
        "augment": 0.0,
        "temperature": 2.0,
        "final_temperature": 0.5,
    }
    training = classifier.TrainingConfig(steps=6, batch_size=20, learning_rate=0.5, **options)
    return classifier.Run(config, training, images())


@pytest.mark.parametrize("annealing", optimizers.ANNEALINGS)
def test_annealing(annealing):
    actual = [
        float(optimizers.annealed(annealing, first=3.0, last=0.5, steps=8)(step))
        for step in range(10)
    ]
    s = np.minimum(np.arange(10) / 8, 1)
    want = {
        "linear": 3 - 2.5 * s,
        "exponential": 3 * (0.5 / 3) ** s,
        "cosine": 0.5 + 2.5 * (1 + np.cos(np.pi * s)) / 2,
    }[annealing]
    np.testing.assert_allclose(actual, want, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"temperature": 0.0}, "temperature is 0.0; it must be positive"),
        ({}, {"annealing": "slow"}, "annealing is 'slow'; expected one of linear, exponential, cosine"),
        ({"tables": "raw"}, {"final_temperature": 0.5}, "but raw tables have no logits"),
        ({"learned_thresholds": True}, {}, "is True in the model config, but thresholds is 'uniform'"),
        ({"learned_thresholds": True, "n_thresholds": 0}, {}, "learned_thresholds is True, but n_thresholds is 0"),
    ],
)  # fmt: skip
def test_impossible(model, training, message):
    with pytest.raises(ValueError, match=message):
        classifier.Run(
            LogicClassifierConfig(16, 2, layers=(4,), **model),
            classifier.TrainingConfig(**training),
            images(),
        )


def test_numbers_of_columns_give_the_same_bits(tmp_path):
    rng = np.random.default_rng(5)
    cells = {
        "age": rng.integers(0, 90, 50).astype(str),
        "job": rng.choice(["a", "b", "c"], 50),
        "pay": np.where(rng.random(50) < 0.2, "?", rng.normal(size=50).round(3).astype(str)),
    }
    table = Table(cells, rng.choice(["no", "yes"], 50), "people")
    bits, numbers = (Encoding.fit(table, 4, numbers=numbers) for numbers in (False, True))
    assert bits.thresholds is None
    np.testing.assert_array_equal(
        numbers.encode(table) > numbers.thresholds[:, 0], bits.encode(table)
    )
    assert Encoding.from_json(numbers.to_json()) == numbers
    whole = Samples(
        numbers.encode(table), np.zeros(50, np.int32), (len(numbers.features),), "people"
    )
    assert reports.bit_names(whole, numbers.thresholds, numbers) == bits.features
    only = Encoding.fit(Table({"job": cells["job"]}, table.labels, "jobs"), 4, numbers=True)
    assert only.thresholds is None

    path = tmp_path / "people.csv"
    rows = zip(*cells.values(), table.labels, strict=True)
    path.write_text("\n".join([",".join([*cells, "class"]), *(",".join(row) for row in rows)]))
    made = Classifier.create(
        {"layers": (8,), "thresholds": "learned", "column_bits": 4}, path, target="class"
    )
    assert made.record.model.n_thresholds == 1
    encoder = made.run.structure.model(*made.run.init()[:2]).encoder
    np.testing.assert_array_equal(encoder.thresholds[...], made.encoding.thresholds)


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


def test_trees_refused(table_run, tmp_path):
    squares = ("--model", "tree", "--data", tmp_path / "images.npz")
    np.savez(tmp_path / "images.npz", x=images().x.reshape(-1, 4, 4), y=images().y)
    np.savez(tmp_path / "rows.npz", x=images().x, y=images().y)
    for more, message in (
        (["--model", "tree", "--data", tmp_path / "rows.npz"], "have 16 numbers each, but gate trees read images"),
        ([*squares, "--n-inputs", 4], "and --n-inputs is 4; gates have 2 inputs. Use 'light'"),
        (["--kernels", "4"], "kernels is (4,); the model gates has no such option"),
        (["--model", "gates", "--recipe", "logictreenet-mnist-s"], "the recipe logictreenet-mnist-s is for tree"),
        (["--resume", "--out", table_run.out, "--model", "tree"], "the run trains another model: gates, not tree"),
        (["--thresholds", "learned", "--n-thresholds", 0], "learned_thresholds is True, but --n-thresholds is 0"),
    ):  # fmt: skip
        assert message in refusal("train", "classify", "--out", tmp_path / "a", *more)


def live_by_loops(trees, alive):
    """Return the nodes and pixels behind outputs ``[rows, columns, kernels]``, position by position."""
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
            at = [
                p * s + o - a
                for p, s, o, a in zip(place, stride, (row, column), around, strict=True)
            ]
            if all(0 <= k < n for k, n in zip(at, spec.in_shape[:2], strict=True)):
                pixels[at[0], at[1], channel] = True

    pool, _ = spec.pooling
    for place in np.ndindex(*spec.places):
        for kernel in np.flatnonzero(alive[place[0] // pool[0], place[1] // pool[1]]):
            visit(len(wires) - spec.n_kernels + kernel, place)
    return nodes, pixels


def test_live_nodes_of_trees():
    sizes = {"kernels": (3, 4), "layers": (12,), "depth": 2, "n_thresholds": 2, "tables": "light"}
    config = LogicTreeNetConfig((4, 4, 2), 2, **sizes, kernel=(3, 2), padding=(1, 0), pool=(2, 1))
    model = nnx.jit(lambda: classifier.classifier_of(config, rngs=nnx.Rngs(0)))()
    rng = np.random.default_rng(6)
    for layer in model.trees:
        wires = np.asarray(layer.truth_tables()[0])
        one = reports.Trees(layer.spec, wires, rng.integers(0, 2, (len(wires), 4)).astype(bool))
        alive = rng.random(layer.spec.out_shape) < 0.3
        result, read = reports.live_nodes(one, alive.transpose(2, 0, 1).ravel())
        nodes, pixels = live_by_loops(one, alive)
        np.testing.assert_array_equal(result, nodes)
        np.testing.assert_array_equal(read, pixels.transpose(2, 0, 1).ravel())
        assert 0 < nodes.mean() < 1


class TestSlow:
    def test_learned_thresholds_move(self, run):
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

    def test_trees_are_trained_by_the_command(self, tree_run):
        out, _, said = tree_run
        assert "3 + 4 trees and 12 gates" in said
        assert "logistic regression" in said
        for step, temperature in ((3, "1.25"), (6, "0.5")):
            (line,) = (
                one for one in said.splitlines() if one.startswith(f"step {step}/6  soft accuracy")
            )
            assert "gap " in line
            assert line.endswith(f"temperature {temperature}")
        model, record = classifier.load_model(out)
        assert record.model.kernel == (3, 2)
        assert record.model.learned_thresholds
        again = Classifier.from_record(record)
        x = again.test.x.reshape(-1, 4, 4, 2).astype(np.float32)
        classes = np.asarray(model.packed()(x))
        accuracy = float((classes == again.test.y).mean())
        assert record.history.test[-1] == (6, accuracy)
        report = json.loads((out / "report.json").read_text())
        assert (report["hard"], report["bits"]) == (accuracy, 64)
        assert [sum(layer["kinds"].values()) for layer in report["layers"]] == [9, 12, 12]
        np.testing.assert_array_equal(
            nnx.jit(lambda model, x: model(x).argmax(-1))(lutjax.load(out), x), classes
        )
        # At a low temperature tables are sure: those that need two inputs, at all their places, and votes that are not constant.
        every = [
            reports.needs(np.asarray(layer.truth_tables()[1]))
            for layer in (*model.trees, *model.gates)
        ]
        expected = sum(n * needed.all(1).sum() for n, needed in zip((16, 1, 1), every, strict=True))
        expected += every[-1].any(1).sum()
        assert float(classifier.expected_gates(model, jnp.float32(1e-5))) == pytest.approx(expected)

    def test_trees_read_edges(self, tmp_path):
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

    def test_the_soft_network_is_tested_at_the_temperature_of_its_step(self, run):
        assert float(run.temperature(3)) == pytest.approx(1.0)  # between 2 and 1/2, exponentially
        state, x = run.init(), images(40).x
        model = run.structure.model(state.params, state.others)
        for steps, temperature in ((0, 2.0), (6, 0.5), (None, 0.5)):
            logits = model(jnp.asarray(x), temperature=temperature, rngs=nnx.Rngs(gates=0))
            np.testing.assert_array_equal(
                run.classes(state, x, hard=False, steps=steps), logits.argmax(-1)
            )
