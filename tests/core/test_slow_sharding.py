"""Ops and training steps on several devices: results match one device, for every table, group and sequence layout."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from anchor_pairs import draw_anchors
from cases import called_weights
from collectives import largest_collective
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from machine import needs_devices
from meshes import eight_device_mesh

import lutjax
from lutjax import FixedPoint, optim as tables, reads, sharding
from lutjax.layers import linen
from lutjax.ops.lut_at_places import Windows, lut_at_places

pytestmark = needs_devices(8)


T, BATCH, LENGTH, FEATURES = 8, 16, 4, 6


RNG = np.random.default_rng(0)


READ = reads.Confidence()


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def scored(read, x, weights, anchors, groups, **options):
    return lutjax.scored_lut(
        x, weights, anchors, read.initial(), read=read, groups=groups, **options
    )


def integers(x, weights, anchors, groups):
    return scored(
        reads.PowersOfTwo(), x, lutjax.quantize_tables(weights, groups=groups), anchors, groups
    )


def weighted(x, weights, anchors, groups):
    index, coefficients = READ(lutjax.margins(x, anchors, groups=groups), READ.initial())
    return lutjax.weighted_lookup(weights, index, coefficients, groups=groups)


def sparse(n_lists, x, weights, anchors, groups):
    targets = np.random.default_rng(0).integers(
        -1, 6, (n_lists or len(weights), 1, weights.shape[2])
    )
    return lutjax.sparse_lut(x, weights, anchors, targets.astype(np.int32), 6, groups=groups)


def at_places(reached, x, weights, anchors, groups):
    windows = Windows((1, groups, FEATURES), (1, 1), (1, 1), (0, 0), FEATURES)
    targets = np.random.default_rng(0).integers(-1, 6, (groups, weights.shape[2])).astype(np.int32)
    options = {"targets": targets, "n_outputs": 6} if reached else {}
    return lut_at_places(x[:, None], weights, anchors, windows=windows, groups=groups, **options)


def convolved(x, weights, anchors, groups):
    images = jnp.broadcast_to(
        x.reshape(len(x), 1, 1, groups * FEATURES), (len(x), 1, 2, groups * FEATURES)
    )
    read = reads.PowersOfTwo()
    return lutjax.conv_lut(
        images, weights, anchors, read.initial(), kernel=1, groups=groups, read=read
    )


EVERY_READ = (
    reads.Hard(), reads.Blend(), reads.SoftSign(), reads.Confidence(), reads.PowersOfTwo(ways=1),
)  # fmt: skip


IN_GROUPS = {  # ops of inputs [B, G, I], tables, anchors and the number of groups
    "powers of two": functools.partial(scored, reads.PowersOfTwo()),
    **{f"{read}": functools.partial(scored, read) for read in EVERY_READ},
    "sum": lambda x, *rest: scored(READ, x[:, :1], *rest, sum_groups=True),
    "dropout": lambda x, *rest: scored(READ, x, *rest, keep=jnp.asarray([[1.0, 0]] * len(x)).repeat(len(rest[0]) // 2, 1)),
    "integers": integers,
    "weighted": weighted,
    "lut": lambda x, w, anchors, groups: lutjax.lut(x, w, anchors, groups=groups),
    "sparse": functools.partial(sparse, 0),
    "sparse, one list": functools.partial(sparse, 1),
    "places": functools.partial(at_places, False),
    "places, targets": functools.partial(at_places, True),
    "convolution": convolved,
}  # fmt: skip


# Tables, groups, devices: whole groups, halves, parts of several, and tables that cannot be divided.
SIZES_OF_GROUPS = [
    (4, 2, 4), (8, 2, 4), (6, 3, 2), (6, 2, 3), (4, 1, 4), (4, 4, 2), (16, 2, 8), (12, 4, 3), (6, 3, 4), (10, 5, 3),
]  # fmt: skip


OVER_DEVICES = [
    *(("powers of two", sizes, "auto") for sizes in SIZES_OF_GROUPS),
    *zip(IN_GROUPS, itertools.cycle(SIZES_OF_GROUPS), itertools.cycle(("explicit", "auto")),
        strict=False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes", "kind"), OVER_DEVICES)
def test_groups_over_devices(name, sizes, kind):
    n_tables, groups, n_devices = sizes
    anchors = lutjax.sample_anchors(jax.random.key(0), FEATURES, n_tables, 3)
    weights, x = normal(n_tables, 8, 5), normal(4, groups, FEATURES)

    def loss(weights, x):
        y = IN_GROUPS[name](x, weights, anchors, groups)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(loss if name == "integers" else jax.value_and_grad(loss, (0, 1), has_aux=True))
    mesh = eight_device_mesh("detectors", kind, n_devices)
    place = P() if n_tables % n_devices else P("detectors")
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        actual = run(
            *jax.device_put((weights, x), (NamedSharding(mesh, place), NamedSharding(mesh, P())))
        )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(run(weights, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


# ------------------------------------------------------------------------------------- steps
EXACT = FixedPoint(2.0**12)


ANCHORS = draw_anchors(RNG, FEATURES, T, 9)
FEW, SCORED = ANCHORS[:, :3], ANCHORS[:, :6]
TARGETS = RNG.integers(-1, FEATURES, (T, 1, 3), np.int32)


X = normal(BATCH, LENGTH, FEATURES)
X_OF_GROUPS = normal(BATCH, LENGTH, 2, FEATURES)

# Name of an op: parameters, what else is divided by detector, and the op on the tables that a device has.
OPS = {
    "lookup": ({"weights": normal(T, 512, FEATURES)}, {"anchors": ANCHORS}, lambda x, p, a,
        accumulate=EXACT: lutjax.lut(x, p["weights"], a["anchors"], accumulate=accumulate)),
    "sparse_lookup": ({"weights": normal(T, 512, 3)}, {"anchors": ANCHORS, "targets": TARGETS},
        lambda x, p, a, accumulate=EXACT: lutjax.sparse_lut(x, p["weights"], a["anchors"],
        a["targets"], FEATURES, accumulate=accumulate)),
    "lookup_attention": ({"weights": normal(T, 256, FEATURES),
        "positions": normal(LENGTH - 1, T, 2)}, {"anchors": FEW}, lambda x, p, a,
        accumulate=EXACT: lutjax.lut_attention(x, p["weights"], a["anchors"], p["positions"],
        accumulate=accumulate)),
    "lut_pair_attention": ({"weights": normal(T, 512, FEATURES)}, {"anchors": ANCHORS}, lambda x, p,
        a, accumulate=EXACT: lutjax.lut_pair_attention(x, p["weights"], a["anchors"],
        accumulate=accumulate)),
    "scored_lut": ({"weights": normal(T, 64, FEATURES)}, {"anchors": SCORED}, lambda x, p, a,
        accumulate=EXACT: lutjax.scored_lut(x, p["weights"], a["anchors"], READ.initial(),
        read=READ, accumulate=accumulate)),
}  # fmt: skip

# The same with groups of tables, of samples with inputs for each group or for all of them. Four devices have half a group each.
GROUPED = {
    "lookup in groups": (
        {"weights": normal(T, 512, FEATURES)},
        {"anchors": ANCHORS},
        lambda x, p, a, accumulate=EXACT: lutjax.lut(
            x, p["weights"], a["anchors"], groups=2, accumulate=accumulate
        ),
    ),
    "scored_lut in groups": (
        {"weights": normal(T, 64, FEATURES)},
        {"anchors": SCORED},
        lambda x, p, a, accumulate=EXACT: lutjax.scored_lut(
            x, p["weights"], a["anchors"], READ.initial(), read=READ, groups=2, accumulate=accumulate
        ),
    ),
    "scored_lut, sum of groups": (
        {"weights": normal(T, 64, FEATURES)},
        {"anchors": SCORED},
        lambda x, p, a, accumulate=EXACT: lutjax.scored_lut(
            x[..., :1, :], p["weights"], a["anchors"], READ.initial(), read=READ, groups=2, sum_groups=True,
            accumulate=accumulate,
        ),
    ),
    "weighted_lookup in groups": (
        {"weights": normal(T, 64, FEATURES)},
        {"anchors": SCORED},
        lambda x, p, a, accumulate=EXACT: lutjax.weighted_lookup(
            p["weights"],
            *READ(
                lutjax.margins(x, a["anchors"], groups=2, accumulate=accumulate),
                READ.initial(),
                accumulate=accumulate,
            ),
            groups=2,
            accumulate=accumulate,
        ),
    ),
}  # fmt: skip


RULE = tables.RowAdagrad()


def step_of(op, axes=(), dense=False):
    """Return a step: parameters, state, other sharded arrays, samples -> parameters, state, sample cotangents.

    Args:
      axes: mesh axis names for samples and detectors, inside a shard_map.
    """
    optimizer = tables.Optimizer(RULE, 0.1, rest=optax.sgd(0.1), tables=called_weights)

    def step(params, state, others, x):
        def loss(params, x):
            y = op(x, params, others)
            y = jax.lax.psum(y, axes[1]) if axes else y
            # Integers as cotangents: their sums are exact in any order.
            return jnp.sum(y * jnp.round(4 * y))

        def of_params(params):
            return loss(params, x)

        _, gradients = tables.value_and_grad(of_params)(params)
        of_x = jax.grad(loss, 1)(params, x)
        if axes:
            is_factored = lambda g: isinstance(g, tables.TableGradient)  # noqa: E731
            gradients = jax.tree.map(
                lambda g: g.gathered(axes[0]) if is_factored(g) else g,
                gradients,
                is_leaf=is_factored,
            )
        return *optimizer.apply(params, gradients, state), of_x

    return step, optimizer.init


@pytest.mark.parametrize("layout", ["data", "detectors", "both"])
@pytest.mark.parametrize("name", OPS)
def test_the_bits_of_one_device_in_a_shard_map(name, layout):
    params, others, op = OPS[name]
    step, init = step_of(op)
    expected = jax.jit(step)(params, init(params), others, X)
    mesh = eight_device_mesh(layout)
    of_params, of_state = (sharding.specs(a, mesh) for a in (params, init(params)))
    of_others = jax.tree.map(lambda _: P("detectors"), others)
    sharded = jax.shard_map(
        step_of(op, ("data", "detectors"))[0],
        mesh=mesh,
        in_specs=(of_params, of_state, of_others, P("data")),
        out_specs=(of_params, of_state, P("data")),
    )
    compiled = jax.jit(sharded).lower(params, init(params), others, X).compile()
    actual = compiled(params, init(params), others, X)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert largest_collective(compiled) < params["weights"].nbytes / 2


@pytest.mark.parametrize(
    ("name", "accumulate", "layout", "kind"),
    list(
        itertools.product(
            {**OPS, **GROUPED}, (EXACT, None), ("data", "detectors", "both"), ("auto", "explicit")
        )
    ),
)
def test_plain_jit(name, accumulate, layout, kind):
    """The program contains no device logic: the compiler, or explicit-axis mesh types, partition kernels by their rules.

    Fixed-point bits match one device: integer totals from all devices are summed before division.
    """
    params, others, op = {**OPS, **GROUPED}[name]
    x = X if name in OPS else X_OF_GROUPS
    step, init = step_of(functools.partial(op, accumulate=accumulate))
    expected = jax.jit(step)(params, init(params), others, x)
    mesh = eight_device_mesh(layout, kind)
    of_params, of_state, of_others, of_x = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (
            *(sharding.specs(a, mesh) for a in (params, init(params))),
            jax.tree.map(lambda _: P("detectors"), others),
            P("data"),
        ),
    )
    arguments = jax.device_put(
        (params, init(params), others, x), (of_params, of_state, of_others, of_x)
    )
    compiled = jax.jit(step, out_shardings=(of_params, of_state, of_x)).lower(*arguments).compile()
    actual = compiled(*arguments)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        if accumulate is None:
            np.testing.assert_allclose(
                a, b, atol=1e-4, rtol=1e-4, err_msg=jax.tree_util.keystr(path)
            )
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert largest_collective(compiled) < params["weights"].nbytes / 2


def over_rows():
    return jax.make_mesh((2,), ("rows",), (AxisType.Auto,), devices=jax.devices()[:2])


INPUTS = RNG.normal(size=(4, 7, 8)).astype(np.float32)


TOKENS = RNG.integers(0, 9, (4, 7)).astype(np.int32)


MEMORIES = {
    "n-grams": (lambda **o: linen.NgramMemory(8, rows=20, heads=2, **o), (INPUTS, TOKENS)),
}


@pytest.mark.parametrize("name", ["n-grams"])
def test_training_is_that_of_one_device(name):
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
    everywhere = jax.shard_map(
        optimizer.current, mesh=where["mesh"], in_specs=specs, out_specs=specs
    )
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
