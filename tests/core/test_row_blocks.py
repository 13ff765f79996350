"""Memories whose tables are divided over devices by blocks of rows: values, gradients and steps are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import optim as tables, sharding
from lutjax.layers import linen

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
    want = value_and_gradients(TABLE, COEFFICIENTS, functools.partial(lutjax.weighted_lookup, groups=groups))
    found = jax.jit(functools.partial(value_and_gradients, look_up=in_blocks))(TABLE, COEFFICIENTS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)


X = RNG.normal(size=(4, 7, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 9, (4, 7)).astype(np.int32)
MEMORIES = {
    "n-grams": (lambda **o: linen.NgramMemory(8, rows=20, heads=2, **o), (X, TOKENS)),
}


def test_rows_that_devices_cannot_share():
    shapes = {"memory": {"weights": jax.ShapeDtypeStruct((8, 9, 4), np.float32)}}
    with pytest.raises(
        ValueError, match=r"memory/weights has shape .* and its 9 rows cannot be divided evenly by the 4"
    ):
        sharding.specs(shapes, AbstractMesh((4,), ("rows",)), axis="rows", by_rows={"memory/weights"})


@pytest.mark.slow
class TestSlow:
    @pytest.mark.parametrize("name", ["n-grams"])
    def test_training_is_that_of_one_device(self, name):
        make, given = MEMORIES[name]
        params = make().init(jax.random.key(0), *given)["params"]
        names = {n for n in params if params[n].ndim == 3 and n == "weights"}
        rule = tables.RowAdam(weight_decay=0.1, decay="every")
        optimizer = tables.Optimizer(rule, 0.1, rest=optax.sgd(0.1), tables=names)

        def step(layer, axis, params, state, *given):
            def loss(params):
                y = layer.apply({"params": params}, *given)
                return jnp.mean((y - 1) ** 2)

            value, gradients = tables.value_and_grad(loss, tables=names)(params)
            if axis is not None:  # the loss is a mean over the samples of each of two devices
                value = jax.lax.pmean(value, axis)
                gradients = jax.tree.map(
                    lambda g: g.scaled(0.5) if isinstance(g, tables.TableGradient) else g / 2,
                    gradients,
                    is_leaf=lambda g: isinstance(g, tables.TableGradient),
                )
            return *optimizer.apply(params, gradients, state), value

        where = {"mesh": over_rows(), "axis": "rows", "tables": names, "by_rows": names}
        specs = sharding.specs(params, **where), optimizer.specs(params, **where)
        assert all(tuple(specs[0][n]) == (None, "rows", None) for n in names)
        divided = jax.shard_map(
            functools.partial(step, make(row_axis="rows"), "rows"),
            mesh=where["mesh"],
            in_specs=(*specs, *[P("rows")] * len(given)),
            out_specs=(*specs, P()),
        )
        everywhere = jax.shard_map(optimizer.current, mesh=where["mesh"], in_specs=specs, out_specs=specs)
        current = {"one": optimizer.current, "two": everywhere}
        runs = {"one": jax.jit(functools.partial(step, make(), None)), "two": jax.jit(divided)}
        results = {}
        for devices, run in runs.items():
            held, state = params, optimizer.init(params)
            for _ in range(3):
                held, state, value = run(held, state, *given)
            held, state = jax.jit(current[devices])(held, state)
            results[devices] = held, state.rows, value
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            results["two"],
            results["one"],
        )
        assert any(np.any(results["one"][0][n] != params[n]) for n in names)
