"""Several devices: tables sharded by detector and batches by sample match one device, and exchange no tables."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from anchor_pairs import draw_anchors
from cases import called_weights, slow
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices
from meshes import eight_device_mesh

import lutjax
from lutjax import FixedPoint, optim as tables, sharding

EXACT = FixedPoint(2.0**12)
T, BATCH, LENGTH, FEATURES = 8, 16, 4, 6
RNG = np.random.default_rng(0)


ANCHORS = draw_anchors(RNG, FEATURES, T, 9)
FEW, SCORED = ANCHORS[:, :3], ANCHORS[:, :6]


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = normal(BATCH, LENGTH, FEATURES)


@needs_devices(8)
def test_devices_send_the_outputs_of_their_own_groups():
    weights_ = normal(T, 512, FEATURES)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(
        devices, ("data", "detectors"), axis_types=eight_device_mesh("both", "explicit").axis_types
    )
    x, weights = jax.device_put(
        (normal(BATCH, LENGTH, 2, FEATURES), weights_),
        tuple(NamedSharding(mesh, P(axis)) for axis in ("data", "detectors")),
    )

    def of_groups(x, weights):
        return lutjax.lut(x, weights, ANCHORS, groups=2, accumulate=EXACT)

    compiled = jax.jit(of_groups).lower(x, weights).compile()
    np.testing.assert_array_equal(compiled(x, weights), of_groups(*map(np.asarray, (x, weights))))
    assert re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", compiled.as_text()) == [
        "all-gather"
    ]


@needs_devices(8)
def test_detectors_that_devices_have_unequal_parts_of():
    """Parts may be unequal: between operations in a program the compiler may reshard arrays, with padding on the last devices."""

    def loss(x, weights):
        weights = weights[:6]
        return jnp.sum(jnp.sin(lutjax.lut(x, weights, FEW[: len(weights)])))

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    x, weights = normal(8, FEATURES), normal(T, 8, 5)
    devices = NamedSharding(eight_device_mesh("detectors", n_devices=4), P("detectors"))
    actual = run(x, jax.device_put(weights, devices))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(run(x, weights)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


GATES = normal(8, 16), normal(12, 16), RNG.integers(0, 8, (12, 2), np.int32)


@needs_devices(8)
def test_gates_in_plain_jit():
    x, logits, wires = GATES
    readers = lutjax.readers(wires, 8)

    def loss(x, logits):
        return jnp.sum(
            jnp.sin(lutjax.logic_gates(x, logits, wires, readers=readers, feature_axis=0))
        )

    expected = jax.value_and_grad(loss, (0, 1))(x, logits)
    mesh = eight_device_mesh("both")
    x = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    logits = jax.device_put(logits, NamedSharding(mesh, P("detectors")))
    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, logits)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-6)


PAIRS = draw_anchors(RNG, 2 * FEATURES + 2, 4, 3)


def between(x, weights, anchors, positions, *, segments, sequence_axis, accumulate, **options):
    """Attention with keys different from its queries."""
    query, key = (lutjax.detect(a, anchors, accumulate=accumulate) for a in (x, x[..., ::-1]))
    return lutjax.lookup_attention(
        weights, query, key, lutjax.detect_signs(positions), query_segments=segments, key_segments=segments,
        sequence_axis=sequence_axis, accumulate=accumulate, **options,
    )  # fmt: skip


ATTENTION = {
    "lut_attention": (lutjax.lut_attention, FEW[:4, :2], 64),
    "lookup_attention": (between, FEW[:4, :2], 64),
    "lut_pair_attention": (lutjax.lut_pair_attention, PAIRS, 8),
}


@pytest.mark.slow
@needs_devices(8)
@pytest.mark.parametrize(("name", "options", "tracked"), [
    ("lookup_attention", {"query_start": 8}, True),
])  # fmt: skip
def test_sequences_on_several_devices(name, options, tracked):
    op, anchors, n_rows = ATTENTION[name]
    length = 8
    distances = 2 * length if options else length - 1
    params = {"weights": normal(4, n_rows, FEATURES), "positions": normal(distances, 4, 2)}
    x = normal(4, length, FEATURES)
    segments = jnp.asarray(np.sort(RNG.integers(0, 2, (4, length))), jnp.int32)

    def step(params, x, segments, axes=(), sequence_axis=None):
        def loss(params):
            y = op(
                params["x"], params["weights"], anchors, params["positions"], segments=segments,
                sequence_axis=sequence_axis, accumulate=EXACT, **options,
            )  # fmt: skip
            return jnp.sum(y * jnp.round(4 * y)), y

        (_, y), gradients = tables.value_and_grad(loss, has_aux=True)({**params, "x": x})
        gradient, of_positions = gradients["weights"], gradients["positions"]
        if axes:
            gradient = gradient.gathered(axes)
        if axes and not tracked:
            of_positions = jax.lax.psum(of_positions, axes)
        table, _ = lutjax.update_table(params["weights"], gradient, 0.125)
        return y, gradients["x"], table, of_positions

    expected = jax.jit(step)(params, x, segments)
    axes = "data", "sequence"
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), axes)
    divided = functools.partial(step, axes=axes, sequence_axis="sequence")
    sharded = jax.shard_map(
        divided,
        mesh=mesh,
        in_specs=(P(), P(*axes), P(*axes)),
        out_specs=(P(*axes), P(*axes), P(), P()),
        check_vma=tracked,
    )
    for what, a, b in zip(
        ("y", "x", "table", "positions"),
        jax.jit(sharded)(params, x, segments),
        expected,
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=what)


@needs_devices(8)
@pytest.mark.parametrize(
    ("name", "window"),
    [slow("lut_pair_attention", 5), ("lookup_attention", None)],
)
def test_devices_get_the_keys_that_their_queries_see(name, window):
    op, anchors, n_rows = ATTENTION[name]
    length = 8
    params = {
        "x": normal(4, length, FEATURES),
        "weights": normal(4, n_rows, FEATURES),
        "positions": normal(length, 4, 2),
    }
    segments = jnp.asarray(np.sort(RNG.integers(0, 2, (4, length))), jnp.int32)
    dy = normal(4, length, FEATURES)

    def both(params, segments, dy, sequence_axis=None):
        def run(params):
            return op(
                params["x"], params["weights"], anchors, params["positions"], segments=segments,
                sequence_axis=sequence_axis, accumulate=None, window=window,
            )  # fmt: skip

        y, pull = jax.vjp(run, params)
        return y, pull(dy)[0]

    expected = both(params, segments, dy)
    axes = P("data", "sequence")
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), tuple(axes))
    of_params = {"x": axes, "weights": P(), "positions": P()}
    sharded = jax.shard_map(
        functools.partial(both, sequence_axis="sequence"),
        mesh=mesh,
        in_specs=(of_params, axes, axes),
        out_specs=(axes, of_params),
    )
    actual = jax.jit(sharded)(params, segments, dy)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )
    text = jax.jit(sharded).lower(params, segments, dy).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text


def test_a_sequence_axis_that_is_not_there():
    _, anchors, n_rows = ATTENTION["lut_attention"]
    with pytest.raises(
        ValueError,
        match=r"lookup_attention: sequence_axis is 'sequence'; .* there are the axes \(\) here",
    ):
        lutjax.lut_attention(X, jnp.zeros((4, n_rows // 4, 1)), anchors, sequence_axis="sequence")


MESH = AbstractMesh((4, 2), ("detectors", "data"))


def test_specs_of_every_kind_of_array():
    params = {
        "lut": {"weights": jnp.zeros((8, 16, 4)), "positions": jnp.zeros((3, 8, 2))},
        "shared": {"weights": jnp.zeros((4, 16, 4)), "positions": jnp.zeros((3, 1, 2))},
        "stacked": {"weights": jnp.zeros((3, 8, 16, 4)), "log_tau": jnp.zeros((3,))},
        "gates": {"logits": jnp.zeros((12, 16))},
        "bits": {"table": jnp.zeros((8, 4))},
        "kernel": jnp.zeros((8, 8)),
    }
    on, other = "detectors", None
    expected = {
        "lut": {"weights": P(on, other, other), "positions": P(other, on, other)},
        "shared": {"weights": P(on, other, other), "positions": P()},
        "stacked": {"weights": P(other, on, other, other), "log_tau": P()},
        "gates": {"logits": P(on, other)},
        "bits": {"table": P(on, other)},
        "kernel": P(),
    }
    assert sharding.specs(params, MESH) == expected
    state = optax.adam(1e-3).init(params)
    assert sharding.specs(state, MESH)[0].mu == expected
    rows = tables.Optimizer(tables.RowAdam(b1=0.9), 0.1, tables=called_weights).init(
        {"lut": {"weights": jnp.zeros((8, 16, 4))}}
    )
    assert all(
        spec == P(on, other, other) for spec in jax.tree.leaves(sharding.specs(rows.rows, MESH))
    )
    everywhere = sharding.specs(params, AbstractMesh((8,), ("data",)))
    assert all(spec == P() for spec in jax.tree.leaves(everywhere))
    assert sharding.specs(params["bits"], MESH, axis="data") == {"table": P("data", other)}


def test_what_cannot_be_divided_is_named():
    params = {"unembed": {"weights": jnp.zeros((6, 16, 4))}}
    with pytest.raises(
        ValueError,
        match=r"unembed/weights has shape \[6, 16, 4\], and its 6 detectors .* 4 devices",
    ) as e:
        sharding.specs(params, MESH)
    assert "1 or 2 or 3 devices" in str(e.value)
    with pytest.raises(
        ValueError, match=r"axis is 'tables'; the mesh has the axes \('detectors', 'data'\)"
    ):
        sharding.specs(params, MESH, axis="tables")


@needs_devices(8)
@pytest.mark.parametrize(("tracked", "message"), [
    (True, r"the table weights is replicated over the mesh axes 'data'.*gathered\(\('data',\)\)"),
    (False, r"check_vma=False, the batch of the gradient for the table weights .*gathered\(axes\)"),
])  # fmt: skip
def test_devices_that_would_diverge(tracked, message):
    optimizer = tables.Optimizer(tables.SGD(), 0.1, tables=called_weights)
    params = {"weights": normal(T, 512, FEATURES)}

    def step(gather, params, x):
        loss = lambda params: jnp.sum(lutjax.lut(x, params["weights"], ANCHORS))  # noqa: E731
        _, gradients = tables.value_and_grad(loss)(params)
        if gather:
            gradients = {"weights": gradients["weights"].gathered("data")}
        return optimizer.apply(params, gradients, optimizer.init(params))[0]

    def on_devices(gather):
        inner = lambda params, x: step(gather, params, x)  # noqa: E731
        return jax.jit(
            jax.shard_map(
                inner,
                mesh=eight_device_mesh("data"),
                in_specs=(P(), P("data")),
                out_specs=P(),
                check_vma=tracked,
            )
        )(params, X)

    with pytest.raises(ValueError, match=message):
        on_devices(gather=False)
    one_device = jax.jit(lambda params, x: step(False, params, x))(params, X)
    np.testing.assert_allclose(on_devices(gather=True)["weights"], one_device["weights"], atol=1e-5)


def test_gathered_outside_of_a_shard_map():
    loss = lambda params: jnp.sum(lutjax.lut(X, params["weights"], ANCHORS))  # noqa: E731
    _, gradients = tables.value_and_grad(loss)({"weights": normal(T, 512, FEATURES)})
    with pytest.raises(
        ValueError, match=r"axes is \('data',\); this shard_map has the mesh axes \(\)"
    ):
        gradients["weights"].gathered("data")
