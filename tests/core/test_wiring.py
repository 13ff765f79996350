"""Wirings by name, compared with NumPy loops, and wires selected by scores: their network, score gradients, and cost."""

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from layer_libraries import Case, assert_drawn, assert_refused, nnx_layer
from machine import needs_devices

import lutjax
from lutjax import sharding, wiring
from lutjax.models import LogicClassifier, LogicClassifierConfig

KEY = np.zeros(2, np.uint32)  # the bits of jax.random.key(0)
TOP = {"wiring": "top-k", "candidates": 3}
CASES = {
    "gates": Case("LogicGates", TOP, (5, 3, 7)),
    "gates_features_first": Case("LogicGates", {"feature_axis": 0, **TOP}, (7, 9), (7, 6)),
    "gates_hard": Case("LogicGates", {"estimator": "straight_through", **TOP}, (9, 7)),
    "gates_of_all": Case("LogicGates", {"wiring": "full"}, (9, 7)),
    "tables": Case("SoftLUT", {"n_inputs": 3, **TOP, "temperature": 0.5}, (9, 7)),
    "tables_of_all": Case(
        "SoftLUT", {"n_inputs": 2, "wiring": "full", "feature_axis": 0}, (7, 5), (7, 6)
    ),
    "signs": Case("BinaryLUT", {"n_inputs": 3, **TOP}, (9, 7)),
    "signs_of_all": Case(
        "BinaryLUT", {"n_inputs": 3, "wiring": "full", "estimator": "soft"}, (9, 7)
    ),
}


def random(shape: tuple[int, ...], seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays_of(case: Case) -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for i, v in enumerate(case.spec.variables()):
        arrays[v.name] = random(v.shape, i) if v.kind == "params" else v.make(lambda: KEY, arrays)
    return arrays


def inputs_of(case: Case, bits: bool = False) -> jax.Array:
    x = np.random.default_rng(10).uniform(size=case.shape)
    return jnp.asarray(x > 0.5 if bits or case.layer == "BinaryLUT" else x, jnp.float32)


# ------------------------------------------------------------------------------------- drawn once
def depends(widths: list[int], arity: int) -> list[int]:
    result, seen = [], [{i} for i in range(widths[0])]
    for n_inputs, n_gates in itertools.pairwise(widths):
        wires = np.asarray(wiring.butterfly(None, n_inputs, n_gates, arity))
        seen = [set().union(*(seen[i] for i in gate)) for gate in wires.tolist()]
        result.append(min(map(len, seen)))
    return result


@pytest.mark.parametrize(("width", "arity"), [(8, 2), (13, 2), (27, 3), (30, 3), (64, 4), (5, 1)])
def test_butterfly_reaches_all_inputs(width, arity):
    layers = math.ceil(math.log(width, arity) - 1e-9) if arity > 1 else 3
    result = depends([width] * (layers + 1), arity)
    assert result == [min(arity**k, width) for k in range(1, layers + 1)]


@pytest.mark.parametrize(
    ("n_inputs", "n_gates", "arity"), [(7, 11, 2), (12, 5, 3), (6, 6, 2), (5, 40, 4)]
)
def test_butterfly_is_balanced(n_inputs, n_gates, arity):
    wires = np.asarray(wiring.butterfly(KEY, n_inputs, n_gates, arity))
    assert (wires.shape, wires.dtype) == ((n_gates, arity), np.int32)
    counts = [sum(i in gate for gate in wires.tolist()) for i in range(n_inputs)]
    assert max(counts) - min(counts) <= 1
    assert all(len(set(gate)) == arity for gate in wires.tolist())
    np.testing.assert_array_equal(
        wires, wiring.butterfly(jax.random.key(1), n_inputs, n_gates, arity)
    )


def test_random_wires_are_independent():
    wires = np.asarray(wiring.random(KEY, 5, 6000, 3))
    assert wires.dtype == np.int32
    assert all(len(set(gate)) == 3 for gate in wires.tolist())
    kinds, counts = np.unique(wires, axis=0, return_counts=True)
    assert len(kinds) == 60
    assert np.abs(counts - 100).max() < 5 * 10  # standard deviations
    few = np.asarray(wiring.random(KEY, 2, 50, 3))
    assert set(few.ravel()) == {0, 1}


def test_windows():
    shape, kernel = (6, 5, 4), (3, 2)
    wires = np.asarray(wiring.Windows(shape, kernel, channels=2)(KEY, 120, 160, 3))
    row, column, channel = np.unravel_index(wires, shape)
    for ids, size in ((row, 3), (column, 2)):
        assert int((ids.max(1) - ids.min(1)).max()) == size - 1
    assert max(len(set(of_gate)) for of_gate in channel.tolist()) == 2
    assert all(len(set(gate)) == 3 for gate in wires.tolist())
    whole = wiring.Windows((4, 4), 4)(KEY, 16, 30, 2)
    np.testing.assert_array_equal(np.unique(whole), np.arange(16))


def test_groups():
    wires = np.asarray(wiring.Groups(4)(KEY, 12, 20, 2))
    for group in range(4):
        own = wires[5 * group : 5 * group + 5].ravel()
        counts = [int((own == i).sum()) for i in range(12)]
        assert sum(counts[3 * group : 3 * group + 3]) == 10
        assert max(counts) - min(counts[3 * group : 3 * group + 3]) <= 1


REFUSED = {
    "kernel": (lambda: wiring.Windows((3, 3), 4), "kernel is 4, larger than an image of 3 by 3"),
    "channels": (lambda: wiring.Windows((3, 3, 2), 2, channels=3), "channels is 3, but the image has 2"),
    "image": (
        lambda: wiring.Windows((3, 3), 2)(KEY, 27, 4, 2),
        r"image_shape is \(3, 3\), with 9 values, but there are 27 inputs; bits of a pixel count as channels",
    ),
    "groups": (lambda: wiring.Groups(0), "n_groups is 0"),
    "inputs": (lambda: wiring.Groups(3)(KEY, 7, 6, 2),
        "n_groups is 3, which does not divide 7 inputs; use 9"),
    "gates": (lambda: wiring.Groups(3)(KEY, 6, 7, 2), "does not divide 7 gates; use 9"),
    "random": (lambda: wiring.random(KEY, 0, 7), "random: n_inputs is 0"),
    "butterfly": (lambda: wiring.butterfly(KEY, 3, 7, 0), "butterfly: arity is 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_impossible_wirings(name):
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", ["butterfly", wiring.Groups(2)])
def test_layers_have_drawn_wires(kind):
    case = Case("LogicGates", {"wiring": kind}, (5, 8), (8, 10))
    for arrays in assert_drawn(case, inputs_of(case)):
        wires = np.asarray(arrays["wires"])
        assert wires.shape == (10, 2)
        assert ("readers" in arrays) == (kind == "butterfly")
        if isinstance(kind, wiring.Groups):
            assert (wires[:5] < 4).all()
            assert (wires[5:] >= 4).all()
        if kind == "butterfly":
            np.testing.assert_array_equal(wires, wiring.butterfly(None, 8, 10))


LAYERS_REFUSED = {
    "windows": ({"wiring": "windows"},
        r"wiring is 'windows', which needs sizes: use lutjax.wiring.Windows\("),
    "groups": ({"wiring": "groups"}, r"wiring is 'groups', which needs sizes: use lutjax.wiring.Groups\(n\)"),
    "inputs": ({"wiring": wiring.Groups(3)}, "n_groups is 3, which does not divide 7 inputs; use 9"),
    "shape": ({"wiring": lambda key, n_inputs, n_gates, arity: jnp.zeros((n_gates, 3), jnp.int32)},
        r"LogicGates: wiring returned int32\[6, 3\] for 7 inputs; expected int32 \[6, 2\]"),
    "candidates": ({"wiring": "top-k", "candidates": 1}, "candidates is 1; it must be at least 2"),
    "given": ({"wiring": "full", "wires": np.zeros((6, 2), int)},
        "wiring is 'full', but wires are given"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_REFUSED)
@pytest.mark.usefixtures("without_typechecking")
def test_layers_refuse(name):
    options, message = LAYERS_REFUSED[name]
    assert_refused(Case("LogicGates", options, (2, 7)), message)


# ------------------------------------------------------------------------------------- chosen by scores
def chosen_of(case: Case, arrays: Any) -> np.ndarray:
    scores = np.asarray(arrays["scores"])
    return np.array(
        [
            [
                arrays["wires"][g, i, row.argmax()] if "wires" in arrays else row.argmax()
                for i, row in enumerate(pins)
            ]
            for g, pins in enumerate(scores)
        ]
    )


@pytest.mark.parametrize("name", ["gates", "signs_of_all"])
def test_layers_read_the_chosen_wires(name):
    case = CASES[name]
    arrays, x = arrays_of(case), inputs_of(case, bits=True)
    wires = chosen_of(case, arrays)
    fixed = case._replace(options={**case.options, "wiring": "balanced"})
    others = {k: v for k, v in arrays.items() if k not in ("scores", "wires")}
    dy = random(jax.eval_shape(case.spec, arrays, x).shape)

    @jax.jit
    def results(others, x, arrays):
        found = []
        for c, more in (
            (case, {k: v for k, v in arrays.items() if k in ("scores", "wires")}),
            (fixed, {"wires": jnp.asarray(wires, jnp.int32)}),
        ):
            y, pull = jax.vjp(lambda trained, x: c.spec({**trained, **more}, x), others, x)  # noqa: B023
            found.append((y, pull(dy)))
        return *found, case.spec(arrays, x, deterministic=True)

    actual, expected, hard = results(others, x, arrays)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    first = x if "feature_axis" in case.options else jnp.moveaxis(x, -1, 0)
    bits = first.reshape(7, -1)
    found, tables = case.spec.truth_tables(arrays)
    np.testing.assert_array_equal(found, wires)
    words = lutjax.packed_lut(lutjax.pack_bits(bits), tables, found)
    hard = hard if "feature_axis" in case.options else jnp.moveaxis(hard, -1, 0)
    np.testing.assert_array_equal(hard.reshape(6, -1), lutjax.unpack_bits(words, bits.shape[1]))


def scores_gradient(case: Case, arrays: Any, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Return the score gradient by definition: candidates one by one, each judged on its share of the samples.

    `x` is ``[I, B]`` and `dy` ``[G, B]``, features first. Each gate input adds the derivative of a layer with this input only.
    """
    wires, scores = chosen_of(case, arrays), np.asarray(arrays["scores"], np.float64)
    n_gates, arity, n_candidates = scores.shape
    batch = x.shape[1]
    alone = jnp.arange(n_gates * arity, dtype=jnp.int32).reshape(n_gates, arity)
    options = {k: v for k, v in case.options.items() if k not in ("wiring", "candidates")}
    fixed = Case(
        case.layer,
        {**options, "feature_axis": 0},
        (n_gates * arity, batch),
        (n_gates * arity, n_gates),
    )
    trained = {k: v for k, v in arrays.items() if k not in ("scores", "wires")}
    read = jnp.asarray(x)[wires.reshape(-1)]
    _, back = jax.vjp(lambda x: fixed.spec({**trained, "wires": alone}, x), read)
    slopes = np.asarray(back(jnp.asarray(dy))[0], np.float64).reshape(n_gates, arity, batch)
    size = min(batch // n_candidates, 64)
    result = np.zeros_like(scores)
    temperature = case.options.get("temperature", 1.0)
    for g in range(n_gates):
        for i in range(arity):
            gains = np.zeros(n_candidates)
            for j in range(n_candidates):
                other = arrays["wires"][g, i, j] if "wires" in arrays else j
                samples = (
                    range(j * size, j * size + size) if size and "wires" in arrays else range(batch)
                )
                for b in samples:
                    gains[j] += (
                        slopes[g, i, b] * (x[other, b] - x[wires[g, i], b]) * batch / len(samples)
                    )
            shares = np.exp(scores[g, i] / temperature)
            shares /= shares.sum()
            result[g, i] = shares * (gains - shares @ gains) / temperature
    return result


SIZES = [("gates", None), ("gates", 2), ("tables", 2), ("signs_of_all", None)]


@pytest.mark.parametrize(("name", "batch"), SIZES)
def test_gradient_of_scores(name, batch):
    """Nine samples or more are divided among candidates; two are too few, and all candidates are judged on both.

    With 250 samples, 64 judge each candidate.
    """
    case = CASES[name]
    first = "feature_axis" in case.options
    if batch:
        case = case._replace(shape=(7, batch) if first else (batch, 7))
    arrays, x = arrays_of(case), inputs_of(case)

    @jax.jit
    def gradient(scores: jax.Array, dy: jax.Array) -> jax.Array:
        _, back = jax.vjp(lambda scores: case.spec({**arrays, "scores": scores}, x), scores)
        return back(dy)[0]

    shape = (6, *x.shape[1:]) if first else (*x.shape[:-1], 6)
    dy = random(shape)
    got = gradient(arrays["scores"], dy)
    flat_x, flat_dy = ((a if first else jnp.moveaxis(a, -1, 0)) for a in (x, dy))
    want = scores_gradient(
        case, arrays, np.asarray(flat_x.reshape(7, -1)), np.asarray(flat_dy.reshape(6, -1))
    )
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5)
    assert np.abs(want).max() > 0.01


def test_gumbel_chooses_at_random():
    case = Case("LogicGates", {**TOP, "estimator": "gumbel"}, (5, 7))
    layer = nnx_layer(case, arrays_of(case))
    x = inputs_of(case)
    layer.logits[...] = jnp.eye(16)[jnp.full(6, 3)] * 100.0  # the first input
    keys = jax.random.split(KEY, 400)
    arrays = layer._arrays()
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: case.spec(arrays, x, key=key)))(keys))
    wires, scores = np.asarray(layer.wires[...])[:, 0], np.asarray(layer.scores[...])[:, 0]
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    mean = np.einsum("bgk,gk->bg", np.asarray(x)[:, wires], shares)
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.1)
    with pytest.raises(ValueError, match="pass rngs"):
        case.spec(arrays_of(case), x)


def largest(compiled: str) -> int:
    """Return the size of the largest array written by a compiled program: instruction results outside fusions."""
    entry = re.sub(r"(?ms)^%fused_computation.*?^}$", "", compiled)
    shapes = re.findall(r"= (?:f32|s32|pred)\[([\d,]+)\]", entry)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_memory_is_that_of_fixed_wires():
    """The step allocates no array with a value for every candidate and sample, unlike mixtures."""
    n, batch, k = 64, 256, 16

    def step_of(kind: str) -> str:
        layer = lutjax.layers.nnx.LogicGates(
            n, n, feature_axis=0, wiring=kind, candidates=k, rngs=nnx.Rngs(0)
        )
        graph, params, others = nnx.split(layer, nnx.Param, ...)

        def loss(params: Any, others: Any, x: jax.Array) -> jax.Array:
            return jnp.square(nnx.merge(graph, params, others)(x)).sum()

        x = jnp.zeros((n, batch))
        compiled = (
            jax.jit(jax.grad(loss, argnums=(0, 2))).lower(params, others, x).compile().as_text()
        )
        return compiled or ""

    assert largest(step_of("top-k")) <= 2 * n * batch
    assert largest(step_of("learnable")) >= n * k * batch


# ------------------------------------------------------------------------------------- models


def test_wirings_of_the_layers_of_a_classifier():
    options = {"in_features": 12, "n_classes": 2, "layers": (30, 20, 10)}
    shape = {"image_shape": (3, 4), "window": 2, "n_thresholds": 2}
    config = LogicClassifierConfig(wiring="windows,butterfly", **shape, **options)
    assert [config.wiring_of(n) for n in range(3)] == [
        wiring.Windows((3, 4, 2), 2),
        "butterfly",
        "butterfly",
    ]
    model = LogicClassifier(config, rngs=nnx.Rngs(0))
    row, column, _ = np.unravel_index(model.layers[0].wires[...], (3, 4, 2))
    assert np.abs(row[:, 0] - row[:, 1]).max() == np.abs(column[:, 0] - column[:, 1]).max() == 1
    np.testing.assert_array_equal(model.layers[2].wires[...], wiring.butterfly(None, 20, 10))
    mixed = LogicClassifier(
        LogicClassifierConfig(wiring="full,random", **options), rngs=nnx.Rngs(0)
    )
    assert mixed.layers[0].scores.shape == (30, 2, 36)
    assert not hasattr(mixed.layers[1], "scores")
    for wrong, message in (
        ({"wiring": "balanced,windows", **shape}, "windows are for the first layer"),
        ({"wiring": "full,full,full,full"}, "for 3 layers"),
        (
            {"wiring": "windows"},
            r"image_shape is \(\); expected the height, width and optional channels of 12 in_features",
        ),
        ({"wiring": "dense"}, "wiring is 'dense'; expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            LogicClassifierConfig(**options, **wrong)


# ------------------------------------------------------------------------------------- several devices


@needs_devices(4)
def test_explicit_mesh():
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Explicit,))
    case = Case("LogicGates", TOP, (12, 7))
    arrays, x, dy = arrays_of(case), inputs_of(case), random((12, 6))
    wires = arrays.pop("wires")

    @jax.jit
    def gradient(trained: Any, wires: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(lambda trained: case.spec({**trained, "wires": wires}, x), trained)[1](dy)[0]

    want = gradient(arrays, wires, x, dy)
    with jax.set_mesh(mesh):
        placed = jax.device_put((x, dy), NamedSharding(mesh, P("batch")))
        same = jax.device_put((arrays, wires), NamedSharding(mesh, P()))
        got = gradient(*same, *placed)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


class TestSlow:
    def test_classifier_of_learned_wires(self):
        config = LogicClassifierConfig(
            in_features=4, n_classes=2, layers=(20, 12), wiring="top-k", candidates=4
        )
        assert LogicClassifierConfig.from_dict(config.to_dict()) == config
        model = LogicClassifier(config, rngs=nnx.Rngs(1))
        x = jnp.asarray(np.random.default_rng(0).uniform(size=(40, 4)), jnp.float32)
        want = model(x, deterministic=True).argmax(-1)
        np.testing.assert_array_equal(model.packed()(x), want)
        bits = np.asarray(model.encoder(x.T).T, np.int64)
        np.testing.assert_array_equal(model.circuit()(bits), want)

    @needs_devices(8)
    def test_meshes(self):
        """Scores are sharded by gate, samples by device, and gradients match one device."""
        mesh = jax.make_mesh(
            (4, 2), ("batch", "detectors"), axis_types=(jax.sharding.AxisType.Auto,) * 2
        )
        case = Case("LogicGates", TOP, (12, 7))
        arrays, x, dy = arrays_of(case), inputs_of(case), random((12, 6))
        specs = sharding.specs(arrays, mesh)
        assert tuple(specs["scores"]) == ("detectors", None, None)

        def gradient(trained: Any, wires: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
            return jax.vjp(lambda trained: case.spec({**trained, "wires": wires}, x), trained)[1](
                dy
            )[0]

        wires = arrays.pop("wires")
        want = jax.jit(gradient)(arrays, wires, x, dy)

        def put(a: jax.Array, *spec: Any) -> jax.Array:
            return jax.device_put(a, NamedSharding(mesh, P(*spec)))

        divided = {name: put(a, *specs[name]) for name, a in arrays.items()}
        got = jax.jit(gradient)(divided, put(wires), put(x, "batch"), put(dy, "batch"))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)

        # Each device judges candidates on parts of its own samples.
        of_parts = jax.jit(
            jax.shard_map(
                gradient,
                mesh=mesh,
                in_specs=(P(), P(), P("batch"), P("batch")),
                out_specs=P(),
                axis_names={"batch"},
            )
        )(arrays, wires, x, dy)
        parts = [gradient(arrays, wires, x[i : i + 3], dy[i : i + 3]) for i in range(0, 12, 3)]
        want = jax.tree.map(lambda *a: sum(a), *parts)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), of_parts, want
        )
