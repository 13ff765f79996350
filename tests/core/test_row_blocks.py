"""Memories with tables sharded by row blocks: values, gradients and steps match one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import sharding

pytestmark = needs_devices(2)

RNG = np.random.default_rng(0)
INDEX = RNG.integers(0, 12, (4, 3, 2, 5)).astype(np.int32)
COEFFICIENTS = RNG.normal(size=INDEX.shape).astype(np.float32)
TABLE = RNG.normal(size=(2, 12, 6)).astype(np.float32)


def over_rows():
    return jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])


@pytest.mark.parametrize("groups", [None, 2])
def test_look_ups_are_those_of_one_device(groups):
    def value_and_gradients(table, coefficients, look_up):
        def loss(table, coefficients):
            y = look_up(table, INDEX, coefficients)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(table, coefficients)

    in_blocks = jax.shard_map(
        functools.partial(sharding.lookup_in_blocks, axis="rows", groups=groups),
        mesh=over_rows(),
        in_specs=(P(None, "rows"), P("rows"), P("rows")),
        out_specs=P("rows"),
    )
    want = value_and_gradients(
        TABLE, COEFFICIENTS, functools.partial(lutjax.weighted_lookup, groups=groups)
    )
    actual = jax.jit(functools.partial(value_and_gradients, look_up=in_blocks))(TABLE, COEFFICIENTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, want)


def test_rows_that_devices_cannot_share():
    shapes = {"memory": {"weights": jax.ShapeDtypeStruct((8, 9, 4), np.float32)}}
    with pytest.raises(
        ValueError,
        match=r"memory/weights has shape .* and its 9 rows cannot be divided evenly by the 4",
    ):
        sharding.specs(
            shapes, AbstractMesh((4,), ("rows",)), axis="rows", by_rows={"memory/weights"}
        )


def test_the_rows_of_too_few_tables_can_be_shared():
    mesh, shapes = (
        AbstractMesh((4,), ("detectors",)),
        {"memory": {"weights": jax.ShapeDtypeStruct((1, 8, 4), np.float32)}},
    )
    with pytest.raises(
        ValueError, match=r"its 1 detectors .* Or shard its 8 rows: by_rows=\['memory/weights'\]\.$"
    ):
        sharding.specs(shapes, mesh)
    result = sharding.specs(shapes, mesh, by_rows=["memory/weights"])
    assert result["memory"]["weights"] == P(None, "detectors", None)
