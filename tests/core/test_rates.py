"""Learning-rate factors for tables and edges: steps compared with loops, for every gradient form, and on several devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import largest_collective
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import optim as tables
from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Backend, Device, KernelRegistry, Platform, Request
from lutjax.ops.lookup import Lookup
from lutjax.testing import assert_close

T, C, K, INPUTS, BATCH = 4, 5, 3, 6, 5
RNG = np.random.default_rng(0)
ANCHORS, FEW = (
    np.array([[RNG.permutation(INPUTS)[:2] for _ in range(n)] for _ in range(T)], np.int32)
    for n in (C, 2)
)
TARGETS = RNG.integers(-1, 5, (T, 4, K), np.int32)
X = RNG.normal(size=(BATCH, INPUTS)).astype(np.float32)
PARAMS = {
    "lut": RNG.normal(size=(T, 2**C, K)).astype(np.float32),  # more rows than samples
    "sparse": RNG.normal(size=(T, 4, K)).astype(np.float32),  # fewer
}
FACTORS = {
    "table": ({"lut": (T,), "sparse": (T,)}, (tables.SGD(),)),
    "edge": ({"lut": (T, 2**C, K), "sparse": (T, 4, K)}, (tables.RowAdam(b1=0.9),)),
    "broadcast": (
        {"lut": (1, 2**C, 1), "sparse": (T, 1, K)},
        (tables.RowAdagrad(weight_decay=0.25),),
    ),
}


def is_table(name, array):
    return name in PARAMS


def factors(kind):
    rng = np.random.default_rng(0)
    return {
        name: rng.uniform(0.25, 2, shape).astype(np.float32)
        for name, shape in FACTORS[kind][0].items()
    }


def loss(params, x):
    y = lutjax.lut(x, params["lut"], ANCHORS)
    z = lutjax.sparse_lut(x, params["sparse"], FEW, TARGETS, 5)
    return jnp.mean((y - 1) ** 2) + jnp.mean((z + 1) ** 2)


def test_other_optimizers_take_the_same_factors():
    rates = factors("edge")
    gradients = {name: table / 2 for name, table in PARAMS.items()}
    for tx in (optax.sgd(0.125), optax.adam(0.125)):
        with jax.numpy_dtype_promotion("standard"):
            plain, _ = tx.update(gradients, tx.init(PARAMS))
            chain = optax.chain(tx, tables.scaled(rates))
            scaled, _ = chain.update(gradients, chain.init(PARAMS))
        for name, step in plain.items():
            np.testing.assert_array_equal(scaled[name], step * rates[name])
    of_tables, _ = tables.scaled(factors("table")).update(gradients, None)
    for t in range(T):
        np.testing.assert_array_equal(
            of_tables["lut"][t], gradients["lut"][t] * factors("table")["lut"][t]
        )


def test_factors_of_gradients():
    factor, params = jnp.asarray(factors("table")["lut"].reshape(T, 1, 1)), {"lut": PARAMS["lut"]}

    def plain(params, x):
        return jnp.mean((lutjax.lut(x, params["lut"], ANCHORS) - 1) ** 2)

    def scaled(params, x):
        return plain({"lut": lutjax.scale_gradient(params["lut"], factor)}, x)

    optimizer = tables.Optimizer(tables.RowAdagrad(), 0.125, tables=is_table)

    @jax.jit
    def every(params, x):
        state = optimizer.init(params)
        dense = jax.grad(scaled, (0, 1))(params, x)
        factored = tables.value_and_grad(scaled, tables=is_table)(params, x)[1]
        unscaled, of_x = jax.grad(plain, (0, 1))(params, x)
        want = {"lut": unscaled["lut"] * factor}, of_x
        actual = {"lut": factored["lut"].to_dense()}, dense[1]
        return [
            (g, tables.global_norm(of_table), optimizer.apply(params, of_table, state))
            for g, of_table in ((want, want[0]), (dense, dense[0]), (actual, factored))
        ]

    want, *others = every(params, X)
    for actual in others:
        for (path, a), b in zip(
            jax.tree.leaves_with_path(actual), jax.tree.leaves(want), strict=True
        ):
            assert_close(jax.tree_util.keystr(path), a, b)


@pytest.mark.parametrize("kind", ["explicit"])
def test_tables_that_are_divided_by_detector(kind):
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    mesh = Mesh(np.array(jax.devices()[:T]), ("detectors",), axis_types=(types,))
    params = {"lut": PARAMS["lut"]}
    optimizer = tables.Optimizer(
        tables.RowAdagrad(), 0.125, rates={"lut": factors("table")["lut"]}, tables=is_table
    )

    @jax.jit
    def step(params, state, x):
        of = lambda params: jnp.sum(lutjax.lut(x, params["lut"], ANCHORS) ** 2)  # noqa: E731
        return optimizer.apply(params, tables.value_and_grad(of, tables=is_table)(params)[1], state)

    expected = step(params, optimizer.init(params), X)
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, NamedSharding(mesh, P("detectors")))
        arguments = divided, optimizer.init(divided), jax.device_put(X, NamedSharding(mesh, P()))
        compiled = step.lower(*arguments).compile()
        actual = compiled(*arguments)
    assert largest_collective(compiled) < PARAMS["lut"].nbytes / 2  # devices exchange no tables
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_close("divided", a, b)


def test_optimizers_are_values():
    def optimizer(rates):
        return tables.Optimizer(tables.SGD(), 0.5, rates=rates)

    assert optimizer({"a": np.ones(3)}) == optimizer({"a": np.ones(3)})
    assert optimizer({"a": np.ones(3)}) != optimizer({"a": np.zeros(3)})
    assert optimizer({"a": 1.0}) != optimizer({"b": 1.0})
    assert hash(optimizer({"a": np.ones(3)})) == hash(optimizer({"a": np.ones(3)}))


@pytest.mark.usefixtures("without_typechecking")
def test_errors():
    _, gradients = jax.jit(tables.value_and_grad(loss, tables=is_table))(PARAMS, X)
    shapes = rf"has shape \[3\]; expected a number, one per table \[{T}\], or one per edge \[4 or 1, 32 or 1, 3 or 1\]"
    with pytest.raises(ValueError, match="update_table: rates " + shapes):
        lutjax.update_table(PARAMS["lut"], gradients["lut"], 1.0, rates=jnp.ones(3))
    with pytest.raises(ValueError, match=r"Optimizer: rates\['lut'\] " + shapes):
        tables.Optimizer(tables.SGD(), 1.0, rates={"lut": np.ones(3)}, tables=is_table).init(PARAMS)
    with pytest.raises(ValueError, match=r"scaled: rates\['lut'\] " + shapes):
        tables.scaled({"lut": np.ones(3)}).update(PARAMS, None)
    with pytest.raises(ValueError, match=r"scaled: rates names \['other'\]"):
        tables.scaled({"other": 1.0}).update(PARAMS, None)
    with pytest.raises(TypeError, match="scaled: a gradient is a TableGradient"):
        tables.scaled({"lut": 1.0}).update(gradients, None)
    with pytest.raises(ValueError, match=r"scale_gradient: factor .*broadcasts to x"):
        lutjax.scale_gradient(PARAMS["lut"], jnp.ones(T))


def test_kernels_of_one_rate_leave_it_to_plain_jax():
    d = lutjax.detect(X, ANCHORS)
    call, device = Lookup(jnp.asarray(PARAMS["lut"]), d), Device(Backend.CPU, "cpu")
    step = Step(jnp.float32(1))
    for platform, rates in (
        (Platform.NATIVE, False),
        (Platform.NATIVE, True),
        (Platform.XLA, False),
    ):
        registry, target = KernelRegistry(), "lutjax.kernels._xla.lookup"
        registry.register_op("lookup", "lutjax.ops.lookup")
        spec = registry.register(
            "lookup", platform, "cpu", target, directions=("update",), rates=rates
        )
        ask = lambda step, spec=spec: spec.supports(Request("update", call, device, X, step))  # noqa: E731
        assert ask(step) is None
        other = ask(dataclasses.replace(step, rate=jnp.ones((T, 1, 1))))
        assert other == (
            "moves all rows at one rate, and the rates or factors of these differ"
            if platform == Platform.NATIVE and not rates
            else None
        )


@needs_devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto], ids=str)
def test_tables_over_devices_count_the_decay_of_every_step(kind):
    """Steps with individual rates, under plain jit; a table's count resides with the table."""
    rule = tables.RowAdam(weight_decay=0.5, decay="every")
    rates = {"lut": np.linspace(0.5, 1, T)}
    optimizer = tables.Optimizer(rule, 0.25, rates=rates, tables={"lut"})
    params = {"lut": jnp.asarray(PARAMS["lut"])}

    def step(params, state, x):
        of_lut = lambda params: jnp.mean((lutjax.lut(x, params["lut"], ANCHORS) - 1) ** 2)  # noqa: E731
        return optimizer.apply(params, tables.value_and_grad(of_lut)(params)[1], state)

    def trained(params, state, place):
        for first in (0, 2, 1):
            params, state = jax.jit(step)(params, state, place(X[first : first + 2]))
        return jax.jit(optimizer.current)(params, state)

    expected = trained(params, optimizer.init(params), lambda x: x)
    mesh = jax.make_mesh((2,), ("detectors",), (kind,), devices=jax.devices()[:2])
    specs = lutjax.sharding.specs(params, mesh, tables={"lut"}), optimizer.specs(params, mesh)
    given = jax.device_put(
        (params, optimizer.init(params)),
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
    )
    with jax.set_mesh(mesh):
        actual = trained(*given, lambda x: jax.device_put(x, NamedSharding(mesh, P())))
    jax.tree.map(lambda a, e: assert_close("after", a, e), actual, expected)
    assert actual[1].rows["lut"]["decay"].sharding.spec[0] == "detectors"
