"""The ops against recorded cases of the original implementation, value by value and gradient by gradient."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax

FOLDER = pathlib.Path(__file__).parents[2] / "shared" / "golden"
ABSENT = f"the recorded cases are not here (a folder {FOLDER.name} beside the checkout)"
KINDS = ("fc", "ext_fc", "attn", "ext_concat", "ext_product", "ext_sparse")


def recorded():
    """Files of one op each; whole transformers are in test_models."""
    if not FOLDER.is_dir():
        return [pytest.param(None, marks=pytest.mark.skip(reason=ABSENT))]
    cases = []
    for path in sorted(FOLDER.glob("*.npz")):
        with np.load(path) as z:
            kind = str(z["kind"]) if "kind" in z else path.stem.split("_")[1]
            names = set(z.files)
        if kind not in KINDS:
            continue
        marks = []
        if {"S_after_internal", "normalized"} & names:
            marks = [pytest.mark.skip(reason="table-gradient policies are not part of this release")]
        cases.append(pytest.param(path, kind, id=path.stem, marks=marks))
    return cases


def close(name, actual, expected, tolerance):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=name
    )


@pytest.mark.parametrize("module", [lutjax, lutjax.reference], ids=["ops", "reference"])
@pytest.mark.parametrize(("path", "kind"), recorded())
def test_recorded(path, kind, module):
    with np.load(path) as z, jax.enable_x64(z["x"].dtype == np.float64):
        tolerance = float(z["tol"]) if "tol" in z else 1e-10
        x, anchors, epsilon = jnp.asarray(z["x"]), z["anchors"], float(z.get("cmp_eps", 0.0))
        if kind == "ext_sparse":
            _sparse(module, z, x, anchors, epsilon, tolerance)
        else:
            _dense(module, kind, z, x, anchors, epsilon, tolerance)
        if "lookup_index" in z:
            d = module.detect(x, anchors, epsilon=epsilon)
            np.testing.assert_array_equal(d.index, z["lookup_index"])
            np.testing.assert_array_equal(d.flip, 1 << z["min_delta_index"])
            close("min_delta", d.margin, z["min_delta"], tolerance)


def _dense(module, kind, z, x, anchors, epsilon, tolerance):
    sums = {"epsilon": epsilon}
    if "int_rescaler" in z:
        sums["accumulate"] = lutjax.FixedPoint((2**20 - 1) * float(z["int_rescaler"]))

    def f(x, weights, positions):
        weights = module.scale_gradient(weights, float(z.get("meta_lr", 1.0)))
        if kind in ("fc", "ext_fc"):
            return module.lut(x, weights, anchors, **sums)
        if kind in ("attn", "ext_concat"):
            return module.lut_attention(x, weights, anchors, positions, **sums)
        interleave = bool(z["sliced"])
        return module.lut_pair_attention(x, weights, anchors, positions, interleave=interleave, **sums)

    positions = jnp.asarray(z["pe"]) if "pe" in z else None
    y, pullback = jax.vjp(f, x, jnp.asarray(z["S"]), positions)
    dx, dweights, dpositions = pullback(jnp.asarray(z["y_grad"]))
    close("y", y, z["y"], tolerance)
    if "y_eval" in z:
        close("y_eval", y, z["y_eval"], tolerance)
    close("x_grad", dx, z["x_grad"], tolerance)
    close("S_grad", dweights, z["S_grad"], tolerance)
    if positions is not None:
        close("pe_grad", dpositions, z["pe_grad"], tolerance)


def _sparse(module, z, x, anchors, epsilon, tolerance):
    """Edges (row -> output) as rows of slots; each row has as many as the one with most."""
    n_detectors, n_pairs, _ = anchors.shape
    shape = (n_detectors, 2**n_pairs)
    source, n_outputs = z["edge_source"], int(z["n_outputs"])
    slot = np.zeros_like(source)
    for row in np.unique(source):
        slot[source == row] = np.arange((source == row).sum())
    targets = np.full((np.prod(shape), slot.max() + 1), -1, np.int32)
    weights = np.zeros(targets.shape, z["edge_weight"].dtype)
    targets[source, slot] = z["edge_target"] - int(z["n_lookup_neurons"])
    weights[source, slot] = z["edge_weight"]

    def f(x, weights):
        of_rows = targets.reshape(*shape, -1)
        return module.sparse_lut(x, weights, anchors, of_rows, n_outputs, epsilon=epsilon)

    y, pullback = jax.vjp(f, x, jnp.asarray(weights.reshape(*shape, -1)))
    dx, dweights = pullback(jnp.asarray(z["y_grad"]))
    close("y", y, z["y"], tolerance)
    close("x_grad", dx, z["x_grad"], tolerance)
    close("edge_grad", np.asarray(dweights).reshape(targets.shape)[source, slot], z["edge_grad"], tolerance)
