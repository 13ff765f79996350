"""Meshes over samples and detectors, and comparisons between a layer on a mesh and on one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_layer import CASES
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from layer_libraries import by_kind, function, variables_of

from lutjax import FixedPoint, sharding

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
_SHAPES = {"data": (8, 1), "detectors": (1, 8), "both": (2, 4)}


def eight_device_mesh(name, kind="auto", n_devices=8):
    """Return a mesh to shard the data, the detectors or both; fewer devices shard the detectors."""
    shape = _SHAPES[name] if n_devices == 8 else (1, n_devices)
    devices = np.array(jax.devices()[:n_devices]).reshape(shape)
    return Mesh(devices, ("data", "detectors"), axis_types=(KINDS[kind],) * 2)


@contextlib.contextmanager
def four_device_mesh(kind):
    """Make a mesh over samples and detectors, in scope where programs require it."""
    if jax.device_count() < 4:
        pytest.skip("the mesh has four devices, and this machine has fewer")
    result = jax.make_mesh(
        (2, 2), ("data", "detectors"), (KINDS[kind],) * 2, devices=jax.devices()[:4]
    )
    with jax.set_mesh(result) if kind == "explicit" else contextlib.nullcontext():
        yield result


def put_on_mesh(arrays, specs, mesh):
    return jax.device_put(arrays, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def assert_same(actual, expected, what, tolerance=2e-5):
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        message = f"{what} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=message)


def check_layer(library, name, kind, by_sample=True):
    """Compare a layer's values and gradients on a mesh and on one device."""
    case = CASES[name]
    if "accumulate" in case.options:
        # Programs round addends differently, and an addend next to a step truncates to either side: a step is less than the tolerance.
        case = case._replace(options={**case.options, "accumulate": FixedPoint(2.0**20)})
    arrays, x = (
        variables_of(case),
        np.random.default_rng(0).normal(size=case.shape).astype(np.float32),
    )
    layer, params = function(library, case, arrays), by_kind(case, arrays).get("params", {})
    features_first = case.options.get("feature_axis") == 0
    of_x = P("data") if by_sample != features_first else P(*[None] * (x.ndim - 1), "data")

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(
        loss if "quantized" in case.options else jax.value_and_grad(loss, (0, 1), has_aux=True)
    )
    expected = run(params, x)
    with four_device_mesh(kind) as mesh:
        # A single table is divided by its rows.
        single = [
            name
            for name, a in params.items()
            if name in ("weights", "down", "up") and a.shape[0] == 1
        ]
        rows = single if "Ngram" in case.layer or "ProductKey" in case.layer else ()
        specs = sharding.specs({"layer": params}, mesh, by_rows=rows)["layer"]
        actual = run(put_on_mesh(params, specs, mesh), put_on_mesh(x, of_x, mesh))
    assert_same(actual, expected, kind)
