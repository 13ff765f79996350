"""Attention whose rows reach only some of the outputs: against loops over pairs and slots, by the reference, and in every library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from layer_libraries import Case, assert_drawn, assert_refused, inputs_of, nnx_layer

import lutjax
from lutjax import reference
from lutjax.testing import assert_close
from lutjax.training import tables

T, C, N, K, L, INPUTS, OUTPUTS = 3, 1, 1, 2, 5, 4, 6
ANCHORS = lutjax.sample_anchors(jax.random.key(0), INPUTS, T, C)
JOINT = lutjax.sample_anchors(jax.random.key(1), 2 * INPUTS + N, T, 3)
X = jax.random.normal(jax.random.key(2), (2, L, INPUTS))
POSITIONS = jax.random.normal(jax.random.key(3), (L - 1, 1, N))
WEIGHTS = jax.random.normal(jax.random.key(4), (T, 8, K))
DY = jax.random.normal(jax.random.key(5), (2, L, OUTPUTS))
SHAPES = {"row": (T, 8, K), "table": (T, 1, K), "layer": (1, 1, K)}
OPS = {"concatenated": ("lut_attention", ANCHORS), "pair": ("lut_pair_attention", JOINT)}


def targets_of(lists):
    """Some slots are unused, and some of a row share a target."""
    ids = np.random.default_rng(0).integers(-1, OUTPUTS, SHAPES[lists]).astype(np.int32)
    ids[:, 0] = (3, 3) if lists == "row" else ids[:, 0]
    return ids


def slot_tables(targets):
    """Tables of each slot that reach all outputs, with one element other than 0 in each row: made by loops."""
    targets = np.broadcast_to(targets, WEIGHTS.shape)
    found = np.zeros((T, 8, K, OUTPUTS), np.float32)
    for t, r, k in np.ndindex(T, 8, K):
        if targets[t, r, k] >= 0:
            found[t, r, k, targets[t, r, k]] = 1
    return found


@pytest.mark.parametrize(
    ("kind", "lists"),
    [("concatenated", "row"), slow("pair", "row"), slow("concatenated", "table"), ("concatenated", "layer")],
)
def test_equal_to_a_table_that_is_zero_elsewhere(kind, lists):
    """Values and gradients, that of the table at its slots alone; with a window too."""
    name, anchors = OPS[kind]
    targets, ones = targets_of(lists), slot_tables(targets_of(lists))

    def sparse(op, x, weights, positions):
        return op(x, weights, anchors, positions, targets=targets, n_outputs=OUTPUTS, window=3)

    def whole(x, weights, positions):
        return getattr(lutjax, name)(x, weights, anchors, positions, window=3)

    @jax.jit
    def every(x, weights, positions):
        table = jnp.asarray(np.einsum("trk,trko->tro", WEIGHTS, ones), jnp.float32)
        found = {}
        for which, f, w in (
            ("op", lambda *a: sparse(getattr(lutjax, name), *a), weights),
            ("reference", lambda *a: sparse(getattr(reference, name), *a), weights),
            ("whole", whole, table),
        ):
            y, back = jax.vjp(f, x, w, positions)
            found[which] = y, *back(DY)
        return found

    found = every(X, WEIGHTS, POSITIONS)
    y, dx, dtable, dpositions = found.pop("whole")
    want = y, dx, np.einsum("tro,trko->trk", dtable, ones), dpositions
    assert all(np.any(np.asarray(a)) for a in want)
    for which, got in found.items():
        for part, a, b in zip(("y", "dx", "dweights", "dpositions"), got, want, strict=True):
            assert_close(f"{which} {part}", a, b)


def test_values_by_loops():
    targets = targets_of("row")
    d, e = lutjax.detect(X, ANCHORS), lutjax.detect_signs(POSITIONS)
    want = np.zeros((2, L, OUTPUTS), np.float32)
    for b, j, i, t, k in np.ndindex(2, L, L, T, K):
        if i < j:
            row = int(d.index[b, j, t]) << 2 | int(d.index[b, i, t]) << 1 | int(e.index[j - i - 1, 0])
            if targets[t, row, k] >= 0:
                want[b, j, targets[t, row, k]] += WEIGHTS[t, row, k]
    y = lutjax.lookup_attention(WEIGHTS, d, d, e, targets=targets, n_outputs=OUTPUTS)
    assert_close("y", y, want)


def test_one_list_keeps_gradients_in_factors():
    targets, params = targets_of("layer"), {"weights": WEIGHTS}

    def loss(params):
        y = lutjax.lut_attention(X, params["weights"], ANCHORS, POSITIONS, targets=targets, n_outputs=OUTPUTS)
        return jnp.vdot(y, DY)

    gradient = jax.jit(tables.value_and_grad(loss))(params)[1]["weights"]
    assert gradient.cotangent.shape == (2, L, K)
    assert_close("weights", gradient.to_dense(), jax.jit(jax.grad(loss))(params)["weights"])


SIZES = {"n_detectors": T, "n_anchors": 1, "n_positions": L - 1, "n_position_bits": N}
CASES = {
    "concatenated": Case("LUTAttention", {**SIZES, "n_targets": 2}, (2, L, INPUTS)),
    "pair": Case(
        "LUTPairAttention",
        {**SIZES, "n_anchors": 3, "n_targets": 2, "targets_per": "table", "causal": False},
        (2, L, INPUTS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_layers(name):
    case = CASES[name]
    x = inputs_of(case)
    (arrays, *_) = assert_drawn(case, x)
    assert arrays["targets"].shape == ((T, 8, 2) if name == "concatenated" else (T, 1, 2))
    assert arrays["weights"].shape == (T, 8, 2)
    arrays = {**arrays, "weights": jax.random.normal(jax.random.key(1), (T, 8, 2))}
    y = case.spec(arrays, x)
    assert y.shape == (2, L, 6)
    op = lutjax.lut_attention if name == "concatenated" else lutjax.lut_pair_attention
    dense = jnp.asarray(
        np.einsum(
            "trk,trko->tro",
            arrays["weights"],
            jax.nn.one_hot(np.broadcast_to(arrays["targets"], (T, 8, 2)), 6),
        ),
        jnp.float32,
    )
    positions = arrays["positions"]
    assert_close("y", y, op(x, dense, arrays["anchors"], positions, causal=case.options.get("causal", True)))


def test_decoding():
    case = CASES["concatenated"]
    x = inputs_of(case)
    layer = nnx_layer(case)
    layer.weights = jax.random.normal(jax.random.key(1), layer.weights.shape)
    whole = layer(x)
    layer.init_cache(x.shape)
    parts = [layer(x[:, :3], decode=True), layer(x[:, 3:], decode=True)]
    assert_close("decoded", jnp.concatenate(parts, 1), whole)
    assert layer.out_features == 6


def test_explicit_targets_and_errors():
    targets = targets_of("table")
    layer = nnx_layer(Case("LUTAttention", {**SIZES, "targets": targets}, (2, L, INPUTS)))
    assert layer.weights.shape == (T, 8, K)
    layer.check()
    layer.targets[...] = layer.targets[...] + 7
    with pytest.raises(ValueError, match="LUTAttention: targets holds ids"):
        layer.check()
    for options, message in (
        ({"n_targets": 7}, "LUTAttention: n_targets is 7; there are only 6 outputs"),
        ({"n_targets": 2, "targets": targets}, "LUTAttention: give either n_targets"),
        (
            {"targets": targets[:2]},
            r"LUTAttention: targets has shape \[2, 1, 2\]; expected \[3 or 1, 8 or 1, targets\]",
        ),
        ({"n_targets": 2, "targets_per": "slot"}, "LUTAttention: targets_per is 'slot'"),
    ):
        assert_refused(Case("LUTAttention", {**SIZES, **options}, (2, L, INPUTS)), message)


@pytest.mark.usefixtures("without_typechecking")
def test_wrong_targets():
    for targets, n, message in (
        (targets_of("row")[:2], OUTPUTS, r"targets is int32\[2, 8, 2\]; expected \[3 or 1, 8 or 1, 2\]"),
        (targets_of("row"), None, "n_outputs is not given"),
        (None, OUTPUTS, "n_outputs is int 6; it is that of targets"),
        (targets_of("row"), -1, "n_outputs is int -1; it must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            lutjax.lut_attention(X, WEIGHTS, ANCHORS, POSITIONS, targets=targets, n_outputs=n)
