"""Learned wires over several devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from layer_libraries import Case, inputs_of
from machine import needs_devices

from lutjax import sharding

pytestmark = [pytest.mark.slow, needs_devices(8)]

KEY = np.zeros(2, np.uint32)

TOP = {"wiring": "top-k", "candidates": 3}


def random(shape: tuple[int, ...], seed: int = 2) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def arrays_of(case: Case) -> dict[str, jax.Array]:
    arrays: dict[str, jax.Array] = {}
    for i, v in enumerate(case.spec.variables()):
        arrays[v.name] = random(v.shape, i) if v.kind == "params" else v.make(lambda: KEY, arrays)
    return arrays


def test_meshes():
    """Scores are divided by gate, samples by device, and gradients are those of one device."""
    mesh = jax.make_mesh((4, 2), ("batch", "detectors"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    case = Case("LogicGates", TOP, (12, 7))
    arrays, x, dy = arrays_of(case), inputs_of(case), random((12, 6))
    specs = sharding.specs(arrays, mesh)
    assert tuple(specs["scores"]) == ("detectors", None, None)

    def gradient(trained: Any, wires: jax.Array, x: jax.Array, dy: jax.Array) -> Any:
        return jax.vjp(lambda trained: case.spec({**trained, "wires": wires}, x), trained)[1](dy)[0]

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
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), of_parts, want)


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
