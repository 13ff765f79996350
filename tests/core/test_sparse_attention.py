"""Attention with rows reaching only some outputs: compared with loops over pairs and slots, by the reference, and in every library."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_libraries import Case, assert_refused, nnx_layer

import lutjax
from lutjax import optim as tables
from lutjax.dispatch.registry import Backend, Declaration, KernelSpec, Platform, devices_of
from lutjax.testing import assert_close

T, C, N, K, L, INPUTS, OUTPUTS = 3, 1, 1, 2, 5, 4, 6
RNG = np.random.default_rng(0)


def anchors_of(n_inputs, n):
    return np.array([[RNG.permutation(n_inputs)[:2] for _ in range(n)] for _ in range(T)], np.int32)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


ANCHORS, JOINT = anchors_of(INPUTS, C), anchors_of(2 * INPUTS + N, 3)
X, POSITIONS = normal(2, L, INPUTS), normal(L - 1, 1, N)
WEIGHTS, DY = normal(T, 8, K), normal(2, L, OUTPUTS)
SHAPES = {"row": (T, 8, K), "table": (T, 1, K), "layer": (1, 1, K)}


def targets_of(lists):
    """Some slots are unused, and some slots in a row share a target."""
    ids = np.random.default_rng(0).integers(-1, OUTPUTS, SHAPES[lists]).astype(np.int32)
    ids[:, 0] = (3, 3) if lists == "row" else ids[:, 0]
    return ids


def test_some_implementations_run_lists_of_rows_and_any_one_list():
    d, e = lutjax.detect(X, ANCHORS), lutjax.detect_signs(POSITIONS)
    declared = Declaration(directions=("forward", "update"))
    other = KernelSpec(
        "lookup_attention", Platform.PALLAS, Backend.ANY, "somewhere", declared=declared
    )
    (device,) = devices_of([WEIGHTS])
    for lists in SHAPES:
        options = {"targets": targets_of(lists), "n_outputs": OUTPUTS}
        (made, *_) = lutjax.kernel_registry.calls_of(
            "lookup_attention", WEIGHTS, d, d, e, **options
        )
        for direction in other.directions:
            why = other.unsupported_reason(made.request(direction, device))
            assert why is None if lists == "layer" else "reads no targets" in why


def test_no_array_of_all_outputs():
    """A dense or sparse step allocates no array as large as a table reaching all outputs."""
    n_detectors, n_anchors, n_outputs = 5, 4, 64
    anchors = lutjax.sample_anchors(jax.random.key(0), INPUTS, n_detectors, n_anchors)
    weights = jnp.zeros((n_detectors, 4**n_anchors, K))
    targets = np.random.default_rng(0).integers(-1, n_outputs, weights.shape).astype(np.int32)

    def loss(params):
        y = lutjax.lut_attention(
            X, params["weights"], anchors, targets=targets, n_outputs=n_outputs
        )
        return jnp.square(y - 1).sum()

    def step(params):
        gradient = tables.value_and_grad(loss)(params)[1]["weights"]
        return jax.grad(loss)(params), lutjax.update_table(params["weights"], gradient, 0.5)

    program = jax.jit(step).lower({"weights": weights}).compile().as_text()
    sizes = [
        math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", program)
    ]
    assert weights.size in sizes
    assert max(sizes) == weights.size < n_detectors * 4**n_anchors * n_outputs


def test_one_list_keeps_gradients_in_factors():
    targets, params = targets_of("layer"), {"weights": WEIGHTS}

    def loss(params):
        y = lutjax.lut_attention(
            X, params["weights"], ANCHORS, POSITIONS, targets=targets, n_outputs=OUTPUTS
        )
        return jnp.vdot(y, DY)

    gradient = jax.jit(tables.value_and_grad(loss))(params)[1]["weights"]
    assert gradient.cotangent.shape == (2, L, K)
    assert_close("weights", gradient.to_dense(), jax.jit(jax.grad(loss))(params)["weights"])


SIZES = {"n_detectors": T, "n_anchors": 1, "n_positions": L - 1, "n_position_bits": N}


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
        (
            targets_of("row")[:2],
            OUTPUTS,
            r"targets is int32\[2, 8, 2\]; expected \[3 or 1, 8 or 1, 2\]",
        ),
        (targets_of("row"), None, "n_outputs is not given"),
        (None, OUTPUTS, "n_outputs is int 6; it is that of targets"),
        (targets_of("row"), -1, "n_outputs is int -1; it must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            lutjax.lut_attention(X, WEIGHTS, ANCHORS, POSITIONS, targets=targets, n_outputs=n)
