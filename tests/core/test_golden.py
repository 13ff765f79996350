"""The ops compared with cases recorded from another implementation (`golden/README.md`), value by value and gradient by gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except, slow_where
from folders import GOLDEN

import lutjax
from lutjax import optim as tables, reads

KINDS = ("fc", "ext_fc", "attn", "ext_concat", "ext_product", "ext_sparse")


def recorded():
    """Single-op files; whole transformers are in test_models."""
    cases = []
    for path in sorted(GOLDEN.glob("*.npz")):
        with np.load(path) as z:
            kind = str(z["kind"]) if "kind" in z else path.stem.split("_")[1]
        for name, module in (
            (("ops", lutjax), ("reference", lutjax.reference)) if kind in KINDS else ()
        ):
            cases.append(pytest.param(path, kind, module, id=f"{path.stem}-{name}"))
    # The other ops are compared with the reference, which the recorded cases check.
    return slow_except(
        cases,
        *(
            "gt_fc_small-reference",
            "gt_attn_pd0-reference",
            "gt_attn_pd0-ops",
            "ext_fc_int32_r1-reference",
        ),
        *(
            "ext_fc_meta_lr025-reference",
            "ext_fc_normalized-reference",
            "ext_conv2d_sparse-reference",
        ),
        "ext_product_pd4-reference",
    )


SCORED = sorted(path.stem for path in GOLDEN.glob("scored_*.npz") if path.stem != "scored_cell_tv")
READS = {
    "gen1_soft": reads.Blend(),
    "gen2_soft": reads.SoftSign(),
    "gen3_n1": reads.Confidence(ways=1),
    "gen3_n2": reads.Confidence(ways=2),
    "p2_int8_n2": reads.PowersOfTwo(ways=2),
}


def close(name, actual, expected, tolerance):
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance, err_msg=name
    )


def test_all_are_here():
    # Networks of other packages, states of layers and memories: test_convert.py, test_layer_states.py and test_published_layers.py.
    of_others = {
        *GOLDEN.glob("foreign_*.npz"),
        GOLDEN / "layer_states.npz",
        GOLDEN / "memory_tables.npz",
    }
    assert len(set(GOLDEN.glob("*.npz")) - of_others) == 29
    assert len(recorded()) == 2 * 18
    assert len(SCORED) == 6


@pytest.mark.parametrize(("path", "kind", "module"), recorded())
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

    def f(p):
        x, weights, positions = p["x"], p["weights"], p["positions"]
        weights = module.scale_gradient(weights, float(z.get("meta_lr", 1.0)))
        if kind in ("fc", "ext_fc"):
            return module.lut(x, weights, anchors, **sums)
        if kind in ("attn", "ext_concat"):
            return module.lut_attention(x, weights, anchors, positions, **sums)
        interleave = bool(z["sliced"])
        return module.lut_pair_attention(
            x, weights, anchors, positions, interleave=interleave, **sums
        )

    params = {
        "x": x,
        "weights": jnp.asarray(z["S"]),
        "positions": jnp.asarray(z["pe"]) if "pe" in z else None,
    }
    y, gradients = _gradients(f, params, z, factored=module is lutjax and "S_after_internal" in z)
    close("y", y, z["y"], tolerance)
    if "y_eval" in z:
        close("y_eval", y, z["y_eval"], tolerance)
    close("x_grad", gradients["x"], z["x_grad"], tolerance)
    if "S_after_internal" in z:
        table = _after_step(params["weights"], gradients["weights"], float(z["external_lr"]))
        close("S_after_internal", table, z["S_after_internal"], tolerance)
    else:
        close("S_grad", gradients["weights"], z["S_grad"], tolerance)
    if "pe_grad" in z:
        close("pe_grad", gradients["positions"], z["pe_grad"], tolerance)


def _gradients(f, params, z, *, factored=False):
    """Output and gradients by the recorded case's policy."""

    def loss(params):
        y = f(params)
        return jnp.vdot(y, jnp.asarray(z["y_grad"])), y

    value_and_grad = tables.value_and_grad if factored else jax.value_and_grad
    (_, y), gradients = jax.jit(value_and_grad(loss, has_aux=True))(params)
    if z.get("normalized", False):
        of_parameters, _ = tables.normalized().update({**gradients, "x": None}, None)
        gradients = {**of_parameters, "x": gradients["x"]}
    return y, gradients


def _after_step(table, gradient, rate):
    """SGD, from a sparse gradient or an array."""
    if not isinstance(gradient, tables.TableGradient):
        return table - rate * gradient
    return lutjax.update_table(table, gradient, rate)[0]


def _sparse(module, z, x, anchors, epsilon, tolerance):
    """Edges (row -> output) as rows with slots; every row has the maximum slot count."""
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

    def f(p):
        of_rows = targets.reshape(*shape, -1)
        return module.sparse_lut(p["x"], p["weights"], anchors, of_rows, n_outputs, epsilon=epsilon)

    params = {"x": x, "weights": jnp.asarray(weights.reshape(*shape, -1))}
    y, gradients = _gradients(f, params, z)
    dweights = np.asarray(gradients["weights"]).reshape(targets.shape)
    close("y", y, z["y"], tolerance)
    close("x_grad", gradients["x"], z["x_grad"], tolerance)
    close("edge_grad", dweights[source, slot], z["edge_grad"], tolerance)


@pytest.mark.parametrize(("name", "module"), slow_where([
    *((name, lutjax) for name in SCORED),
    ("scored_gen3_n2_ties_dropout", lutjax.reference),
], lambda name, _: name != "scored_gen3_n1_single"))  # fmt: skip
def test_scored(name, module):
    with np.load(GOLDEN / f"{name}.npz") as z, jax.enable_x64(True):
        of_groups = np.asarray(z["weights"], np.float64)
        groups, each = of_groups.shape[:2]
        anchors = z["anchors"].reshape(groups * each, *z["anchors"].shape[2:])
        keep = jnp.asarray(z["keep"], jnp.float64).reshape(len(z["z"]), -1) if "keep" in z else None
        n_outputs = int(z["h_out"])
        of_scalars = {key: float(z[key]) for key in z.files if key.startswith("scalar_")}
        arguments = {
            "dz": jnp.asarray(z["z"], jnp.float64),
            "dweights": jnp.asarray(of_groups.reshape(groups * each, *of_groups.shape[2:])),
            **{
                key.removeprefix("scalar_"): jnp.float64(value) for key, value in of_scalars.items()
            },
        }

        def op(a):
            scalars = {key: value for key, value in a.items() if key.startswith("log_")}
            return module.scored_lut(
                a["dz"],
                a["dweights"],
                anchors,
                scalars,
                read=READS[str(z["read"])],
                groups=groups,
                sum_groups=n_outputs != groups,
                keep=keep,
            )

        y, pullback = jax.vjp(jax.jit(op), arguments)
        close("y", y, z["y"], 1e-10)
        (result,) = pullback(jnp.asarray(z["dy"], jnp.float64))
        for key, value in result.items():
            close(key, value.reshape(z[f"grad_{key}"].shape), z[f"grad_{key}"], 1e-9)


def test_cell_total_variation():
    with np.load(GOLDEN / "scored_cell_tv.npz") as z:
        weights = jnp.asarray(z["weights"]).reshape(-1, *z["weights"].shape[2:])
        value, gradient = jax.jit(jax.value_and_grad(lutjax.cell_total_variation))(weights)
        close("value", value, z["value"], 1e-5)
        close("gradient", gradient.reshape(z["grad"].shape), z["grad"], 1e-5)
