"""Tree classifier for images: published sizes, the packed network, its circuit, and training."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lutjax
from lutjax import circuits
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig
from lutjax.models._logic_configs import EDGES
from lutjax.models.tree_net import with_edges
from lutjax.training.recipes import RECIPES

SIZES = {"kernels": (3, 4), "layers": (24, 12), "kernel": (3, 2), "padding": (1, 0), "pool": (2, 1)}


def model_of(**options):
    config = LogicTreeNetConfig((6, 4, 2), 3, **{**SIZES, **options})
    model = nnx.jit(lambda: LogicTreeNet(config, rngs=nnx.Rngs(0)))()
    for i, layer in enumerate((*model.trees, *model.gates)):
        layer.logits = np.random.default_rng(i).normal(size=layer.logits.shape).astype(np.float32)
    return model


def test_published_sizes():
    small = LogicTreeNetConfig.cifar10("S")
    assert small.n_gates == 83_552
    at_places = sum(
        sum(spec.levels) * spec.places[0] * spec.places[1] for spec in small.tree_specs()
    )
    assert at_places + sum(small.layers) == 874_496
    shapes = [(16, 16, 32), (8, 8, 128), (4, 4, 512), (2, 2, 1024)]
    assert [spec.out_shape for spec in small.tree_specs()] == shapes
    assert LogicTreeNetConfig.cifar10("M").n_gates == 8 * 83_552
    assert LogicTreeNetConfig.cifar10("G").n_gates == 80 * 83_552
    outputs = {
        "S": 1024,
        "M": 8192,
        "B": 32_768,
        "L": 65_536,
        "G": 81_920,
    }  # for a class, as published
    assert {size: LogicTreeNetConfig.cifar10(size).layers[-1] // 10 for size in outputs} == outputs
    assert [LogicTreeNetConfig.mnist(size).layers[-1] // 10 for size in "SM"] == [1024, 4096]
    mnist = LogicTreeNetConfig.mnist("S")
    assert [spec.out_shape for spec in mnist.tree_specs()] == [
        (12, 12, 16),
        (6, 6, 48),
        (3, 3, 144),
    ]
    assert LogicTreeNetConfig.from_dict(json.loads(json.dumps(mnist.to_dict()))) == mnist


def test_edges_by_loops():
    x = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5)).astype(np.float32)
    want = np.zeros((5, *x.shape), np.float32)
    want[0] = x
    for c, i, j, b in np.ndindex(x.shape):
        middle, (left, right) = x[c, i, j, b], x[c, i, [max(j - 1, 0), min(j + 1, 3)], b]
        above, below = x[c, [max(i - 1, 0), min(i + 1, 2)], j, b]
        second = right - 2 * middle + left, below - 2 * middle + above
        want[1:, c, i, j, b] = (right - left, below - above, *second)
    np.testing.assert_array_equal(with_edges(jnp.asarray(x)), want.reshape(10, 3, 4, 5))
    assert len(EDGES) == 4
    large = LogicTreeNetConfig.cifar10("B")
    assert large.edges
    assert large.tree_specs()[0].in_shape == (32, 32, 3 * 5 * 31)


def test_circuits_of_edges_begin_with_bits():
    model = nnx.eval_shape(lambda: model_of(n_thresholds=1, edges=True))
    with pytest.raises(ValueError, match=r"reads pixel differences, .* Use inputs='bits'"):
        circuits.from_model(model, inputs="uint8")


@pytest.mark.parametrize(("changes", "message"), [
    ({"n_thresholds": 0}, "edges is True, but n_thresholds is 0"),
    ({"image_shape": ()}, r"edges is True and image_shape is \(\); expected the height, width"),
    ({"image_shape": (5, 5)}, r"image_shape is \(5, 5\); expected .* 24 in_features"),
    ({"wiring": "windows"}, "edges is True and wiring is 'windows'"),
])  # fmt: skip
def test_edges_of_a_classifier_need_an_image(changes, message):
    sizes = {"edges": True, "image_shape": (4, 6), "layers": (4,), "window": 3, **changes}
    with pytest.raises(ValueError, match=message):
        LogicClassifierConfig(24, 2, **sizes)


@pytest.mark.parametrize("tables", ["gates", "light"])
def test_layers_of_gates_learn_their_wires(tables):
    config = LogicTreeNetConfig((6, 4, 2), 3, **SIZES, wiring="top-k", candidates=4, tables=tables)
    model = nnx.eval_shape(lambda: LogicTreeNet(config, rngs=nnx.Rngs(0)))
    assert [layer.scores.shape for layer in model.gates] == [(24, 2, 4), (12, 2, 4)]


@pytest.mark.parametrize(("options", "message"), [
    ({"layers": (24, 13)}, "the last of layers is 13; it must be a multiple of the 3 classes"),
    ({"pool": (2, 1, 1)}, r"pool is \(2, 1, 1\); expected one number, or one per tree layer \(2\)"),
    ({"kernels": ()}, "kernels is empty"),
    ({"edges": True, "n_thresholds": 0}, "edges is True, but n_thresholds is 0: samples are bits"),
    ({"kernel": 9}, "LogicConv: kernel is 9, larger than an image of 6 by 4"),
    ({"residual": 2.0}, "residual is 2.0; it is a probability"),
    ({"wiring": "best"}, "LogicGates: wiring is 'best'"),
])  # fmt: skip
def test_impossible(options, message):
    with pytest.raises(ValueError, match=message):
        LogicTreeNetConfig((6, 4, 2), 3, **{**SIZES, **options})


def test_unknown_sizes_and_images():
    with pytest.raises(ValueError, match=r"mnist: size is 'XL'; expected one of \('S', 'M', 'L'\)"):
        LogicTreeNetConfig.mnist("XL")
    model = model_of()
    with pytest.raises(ValueError, match=r"x has shape \[1, 4, 6, 2\]; expected \[..., 6, 4, 2\]"):
        model(jnp.zeros((1, 4, 6, 2)))
    assert jax.eval_shape(model, jnp.zeros((2, 5, 6, 4, 2))).shape == (2, 5, 3)


@pytest.mark.parametrize(("name", "config"), [
    ("logictreenet-cifar10-s", LogicTreeNetConfig.cifar10("S")),
    ("logictreenet-cifar10-g", LogicTreeNetConfig.cifar10("G")),
    ("logictreenet-mnist-m", LogicTreeNetConfig.mnist("M")),
])  # fmt: skip
def test_recipes_of_trees(name, config):
    assert LogicTreeNetConfig(config.in_shape, 10, **RECIPES[name].sizes()) == config
    assert f"{config.n_gates:,} gates that are trained" in str(RECIPES[name])


class TestSlow:
    def test_training_learns_images_with_few_bits_and_with_many(self):
        sizes = {**SIZES, "kernels": (8, 16), "layers": (64, 32)}
        config = LogicTreeNetConfig((6, 4, 2), 2, **sizes, n_thresholds=0, tau=2.0)
        model = nnx.jit(lambda: LogicTreeNet(config, rngs=nnx.Rngs(0)))()
        share = np.array([0.3, 0.7]).repeat(128)[:, None, None, None]
        x = np.random.default_rng(1).uniform(size=(256, 6, 4, 2)) > share
        y = jnp.asarray(np.arange(256) // 128)
        optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            def loss(model):
                return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

            value, grads = nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        x = jnp.asarray(x, jnp.float32)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in int32
            losses = [float(step(model, optimizer, x)) for _ in range(40)]
        assert losses[-1] < 0.2 * losses[0]
        assert np.mean(model.packed()(x) == y) > 0.9

    def test_a_classifier_reads_edges_as_trees_do(self):
        sizes = {"n_thresholds": 1, "edges": True, "image_shape": (4, 3, 2), "layers": (40, 20)}
        config = LogicClassifierConfig(24, 2, **sizes)
        assert config.n_encoded == 120
        assert LogicClassifierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        rng = np.random.default_rng(0)
        thresholds = rng.uniform(-60, 60, (120, 1)).astype(np.float32)
        model = LogicClassifier(config, thresholds=thresholds, rngs=nnx.Rngs(0))
        x = rng.integers(0, 256, (40, 4, 3, 2), dtype=np.uint8)
        maps = np.asarray(with_edges(jnp.asarray(x.transpose(3, 1, 2, 0), jnp.float32)))
        values = np.concatenate([x.reshape(40, -1).T, maps[2:].reshape(96, 40)])
        packed = model.packed()
        bits = packed.first_bits(x)
        np.testing.assert_array_equal(bits, (values > thresholds).T)
        hard = np.asarray(model(x.astype(np.float32), deterministic=True).argmax(-1))
        np.testing.assert_array_equal(packed(x), hard)
        np.testing.assert_array_equal(packed.from_words(lutjax.pack_bits(bits.T))[:40], hard)
        np.testing.assert_array_equal(packed.circuit()(np.asarray(bits)).ravel(), hard)
        for one in (model, packed):
            with pytest.raises(ValueError, match=r"reads pixel differences, .* Use inputs='bits'"):
                one.circuit(inputs="uint8")
