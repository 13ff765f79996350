"""Several devices: tables by detector and batches by sample give the results of one device, and exchange no tables."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import called_weights, slow, slow_except
from collectives import largest_collective
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import FixedPoint, optim as tables, reads, sharding
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.ops.lut_at_places import Windows, lut_at_places

EXACT = FixedPoint(2.0**12)
T, BATCH, LENGTH, FEATURES = 8, 16, 4, 6
RNG = np.random.default_rng(0)


def anchors_of(n_inputs, n_detectors, n):
    """Pairs of different inputs."""
    pairs = [[RNG.permutation(n_inputs)[:2] for _ in range(n)] for _ in range(n_detectors)]
    return np.array(pairs, np.int32)


ANCHORS = anchors_of(FEATURES, T, 9)
FEW, SCORED = ANCHORS[:, :3], ANCHORS[:, :6]
TARGETS = RNG.integers(-1, FEATURES, (T, 1, 3), np.int32)
READ = reads.Confidence()


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = normal(BATCH, LENGTH, FEATURES)
X_OF_GROUPS = normal(BATCH, LENGTH, 2, FEATURES)

# Name of an op: parameters, what else is divided by detector, and the op on the tables that a device has.
OPS = {
    "lookup": (
        {"weights": normal(T, 512, FEATURES)},
        {"anchors": ANCHORS},
        lambda x, p, a, accumulate=EXACT: lutjax.lut(x, p["weights"], a["anchors"], accumulate=accumulate),
    ),
    "sparse_lookup": (
        {"weights": normal(T, 512, 3)},
        {"anchors": ANCHORS, "targets": TARGETS},
        lambda x, p, a, accumulate=EXACT: lutjax.sparse_lut(
            x, p["weights"], a["anchors"], a["targets"], FEATURES, accumulate=accumulate
        ),
    ),
    "lookup_attention": (
        {"weights": normal(T, 256, FEATURES), "positions": normal(LENGTH - 1, T, 2)},
        {"anchors": FEW},
        lambda x, p, a, accumulate=EXACT: lutjax.lut_attention(
            x, p["weights"], a["anchors"], p["positions"], accumulate=accumulate
        ),
    ),
    "lut_pair_attention": (
        {"weights": normal(T, 512, FEATURES)},
        {"anchors": ANCHORS},
        lambda x, p, a, accumulate=EXACT: lutjax.lut_pair_attention(
            x, p["weights"], a["anchors"], accumulate=accumulate
        ),
    ),
    "scored_lut": (
        {"weights": normal(T, 64, FEATURES)},
        {"anchors": SCORED},
        lambda x, p, a, accumulate=EXACT: lutjax.scored_lut(
            x, p["weights"], a["anchors"], READ.initial(), read=READ, accumulate=accumulate
        ),
    ),
}

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
MESHES = {"data": (8, 1), "detectors": (1, 8), "both": (2, 4)}
RULE = tables.RowAdagrad()


def mesh_of(name, kind="auto", n_devices=8):
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    shape = MESHES[name] if n_devices == 8 else (1, n_devices)
    devices = np.array(jax.devices()[:n_devices]).reshape(shape)
    return Mesh(devices, ("data", "detectors"), axis_types=(types[kind],) * 2)


def step_of(op, axes=(), dense=False):
    """Return a step: parameters, state, what is divided beside them, samples -> parameters, state, and the cotangent of samples.

    Args:
      axes: names of the mesh axes of the samples and of the detectors, inside a shard_map.
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
                lambda g: g.gathered(axes[0]) if is_factored(g) else g, gradients, is_leaf=is_factored
            )
        return *optimizer.apply(params, gradients, state), of_x

    return step, optimizer.init


@pytest.mark.slow
@needs_devices(8)
@pytest.mark.parametrize("layout", ["data", "detectors", "both"])
@pytest.mark.parametrize("name", OPS)
def test_the_bits_of_one_device_in_a_shard_map(name, layout):
    params, others, op = OPS[name]
    step, init = step_of(op)
    expected = jax.jit(step)(params, init(params), others, X)
    mesh = mesh_of(layout)
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


FAST_IN_JIT = [
    ("lookup", EXACT, "both", "auto"),
    ("lookup", None, "both", "auto"),
    ("sparse_lookup", EXACT, "both", "explicit"),
    ("lookup in groups", EXACT, "both", "explicit"),
    ("scored_lut in groups", None, "both", "auto"),
]


@pytest.mark.slow
@needs_devices(8)
@pytest.mark.parametrize(
    ("name", "accumulate", "layout", "kind"),
    FAST_IN_JIT
    + [
        slow(*case)
        for case in itertools.product({**OPS, **GROUPED}, (EXACT, None), MESHES, ("auto", "explicit"))
        if case not in FAST_IN_JIT
    ],
)
def test_plain_jit(name, accumulate, layout, kind):
    """Nothing in the program knows of devices: the compiler, or the types on a mesh with explicit axes, divide kernels by their rules.

    In fixed point the bits are those of one device: integer totals of all devices are summed before they are divided.
    """
    params, others, op = {**OPS, **GROUPED}[name]
    x = X if name in OPS else X_OF_GROUPS
    step, init = step_of(functools.partial(op, accumulate=accumulate))
    expected = jax.jit(step)(params, init(params), others, x)
    mesh = mesh_of(layout, kind)
    of_params, of_state, of_others, of_x = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        (
            *(sharding.specs(a, mesh) for a in (params, init(params))),
            jax.tree.map(lambda _: P("detectors"), others),
            P("data"),
        ),
    )
    arguments = jax.device_put((params, init(params), others, x), (of_params, of_state, of_others, of_x))
    compiled = jax.jit(step, out_shardings=(of_params, of_state, of_x)).lower(*arguments).compile()
    actual = compiled(*arguments)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        if accumulate is None:
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4, err_msg=jax.tree_util.keystr(path))
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert largest_collective(compiled) < params["weights"].nbytes / 2


@needs_devices(8)
@pytest.mark.parametrize("kind", [slow("auto"), "explicit"])
def test_devices_send_the_outputs_of_their_own_groups(kind):
    """Devices that have whole groups sum nothing: each sends what it has."""
    params, _, op = GROUPED["lookup in groups"]
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "detectors"), axis_types=mesh_of("both", kind).axis_types)
    x, weights = jax.device_put(
        (X_OF_GROUPS, params["weights"]),
        tuple(NamedSharding(mesh, P(axis)) for axis in ("data", "detectors")),
    )

    def of_groups(x, weights):
        return op(x, {"weights": weights}, {"anchors": ANCHORS})

    compiled = jax.jit(of_groups).lower(x, weights).compile()
    np.testing.assert_array_equal(compiled(x, weights), of_groups(X_OF_GROUPS, params["weights"]))
    assert re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", compiled.as_text()) == ["all-gather"]


def scored(read, x, weights, anchors, groups, **options):
    return lutjax.scored_lut(x, weights, anchors, read.initial(), read=read, groups=groups, **options)


def integers(x, weights, anchors, groups):
    return scored(reads.PowersOfTwo(), x, lutjax.quantize_tables(weights, groups=groups), anchors, groups)


def weighted(x, weights, anchors, groups):
    index, coefficients = READ(lutjax.margins(x, anchors, groups=groups), READ.initial())
    return lutjax.weighted_lookup(weights, index, coefficients, groups=groups)


def sparse(n_lists, x, weights, anchors, groups):
    targets = np.random.default_rng(0).integers(-1, 6, (n_lists or len(weights), 1, weights.shape[2]))
    return lutjax.sparse_lut(x, weights, anchors, targets.astype(np.int32), 6, groups=groups)


def at_places(reached, x, weights, anchors, groups):
    windows = Windows((1, groups, FEATURES), (1, 1), (1, 1), (0, 0), FEATURES)
    targets = np.random.default_rng(0).integers(-1, 6, (groups, weights.shape[2])).astype(np.int32)
    options = {"targets": targets, "n_outputs": 6} if reached else {}
    return lut_at_places(x[:, None], weights, anchors, windows=windows, groups=groups, **options)


def convolved(x, weights, anchors, groups):
    images = jnp.broadcast_to(x.reshape(len(x), 1, 1, groups * FEATURES), (len(x), 1, 2, groups * FEATURES))
    read = reads.PowersOfTwo()
    return lutjax.conv_lut(images, weights, anchors, read.initial(), kernel=1, groups=groups, read=read)


EVERY_READ = (reads.Hard(), reads.Blend(), reads.SoftSign(), reads.Confidence(), reads.PowersOfTwo(ways=1))
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
FAST_IN_GROUPS = [
    ("powers of two", (4, 2, 4), "auto"),
    ("powers of two", (6, 3, 2), "explicit"),
    ("places, targets", (8, 2, 4), "auto"),
]


@pytest.mark.slow
@needs_devices(8)
@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    FAST_IN_GROUPS
    + [
        slow(*case)
        for case in itertools.product(IN_GROUPS, SIZES_OF_GROUPS, ("auto", "explicit"))
        if case not in FAST_IN_GROUPS
    ],
)
def test_groups_over_devices(name, sizes, kind):
    n_tables, groups, n_devices = sizes
    anchors = lutjax.sample_anchors(jax.random.key(0), FEATURES, n_tables, 3)
    weights, x = normal(n_tables, 8, 5), normal(4, groups, FEATURES)

    def loss(weights, x):
        y = IN_GROUPS[name](x, weights, anchors, groups)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(loss if name == "integers" else jax.value_and_grad(loss, (0, 1), has_aux=True))
    mesh = mesh_of("detectors", kind, n_devices)
    place = P() if n_tables % n_devices else P("detectors")
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        actual = run(*jax.device_put((weights, x), (NamedSharding(mesh, place), NamedSharding(mesh, P()))))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(run(weights, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


# Arrays of which four devices have unequal parts, or parts that no axis of the mesh counts.
UNEVEN = {
    "some of the samples": lambda x, weights: (x[:6], weights),
    "some of the detectors": lambda x, weights: (x, weights[:6]),
    "halves of the samples": lambda x, weights: (x.reshape(2, 4, FEATURES).sum(1), weights),
    "halves of the detectors": lambda x, weights: (x, weights.reshape(2, 4, 8, 5).sum(1)),
}


@needs_devices(8)
@pytest.mark.parametrize("what", slow_except(UNEVEN, "some of the samples", "some of the detectors"))
def test_what_devices_have_unequal_parts_of(what):
    """Parts may be unequal: between the operations of a program the compiler divides arrays as it likes, with padding on the last devices."""

    def loss(x, weights):
        x, weights = UNEVEN[what](x, weights)
        return jnp.sum(jnp.sin(lutjax.lut(x, weights, FEW[: len(weights)])))

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    x, weights = normal(8, FEATURES), normal(T, 8, 5)
    devices = NamedSharding(mesh_of("detectors", n_devices=4), P("detectors"))
    samples = "samples" in what
    actual = run(
        *((jax.device_put(x, devices), weights) if samples else (x, jax.device_put(weights, devices)))
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(run(x, weights)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


GATES = normal(8, 16), normal(12, 16), RNG.integers(0, 8, (12, 2), np.int32)


@needs_devices(8)
@pytest.mark.parametrize(
    ("with_readers", "kind"),
    [(True, "auto"), (False, "explicit"), slow(True, "explicit"), slow(False, "auto")],
)
def test_gates_in_plain_jit(with_readers, kind):
    """A device has some of the gates, and of the readers of an input those that are among them."""
    x, logits, wires = GATES
    readers = lutjax.readers(wires, 8) if with_readers else None

    def loss(x, logits):
        return jnp.sum(jnp.sin(lutjax.logic_gates(x, logits, wires, readers=readers, feature_axis=0)))

    expected = jax.value_and_grad(loss, (0, 1))(x, logits)
    mesh = mesh_of("both", kind)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
    logits = jax.device_put(logits, NamedSharding(mesh, P("detectors")))
    actual = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, logits)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-6)


PAIRS = anchors_of(2 * FEATURES + 2, 4, 3)


def between(x, weights, anchors, positions, *, segments, sequence_axis, accumulate, **options):
    """Attention whose keys are not its queries."""
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
@pytest.mark.parametrize(
    ("name", "options", "tracked"),
    [
        ("lut_attention", {}, True),
        ("lut_pair_attention", {"window": 5}, True),
        ("lut_attention", {}, False),
        ("lut_attention", {"window": 5}, True),
        ("lut_attention", {"causal": False}, True),
        ("lookup_attention", {}, True),
        ("lookup_attention", {"query_start": 8}, True),
        ("lut_pair_attention", {}, True),
        ("lut_pair_attention", {"causal": False}, True),
    ],
)
def test_sequences_on_several_devices(name, options, tracked):
    """Each device has the queries of a part of every sequence, and a table's update is that of whole sequences."""
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
        ("y", "x", "table", "positions"), jax.jit(sharded)(params, x, segments), expected, strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=what)


@needs_devices(8)
@pytest.mark.parametrize(
    ("name", "window"),
    slow_except(
        itertools.product(ATTENTION, [1, 2, 3, 5, 7, None]),
        *("lut_attention-3", "lut_pair_attention-5", "lookup_attention-None"),
    ),
)
def test_devices_get_the_keys_that_their_queries_see(name, window):
    """Parts of two positions on four devices: windows end within a part, at its edge, and some parts before; else keys go around."""
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
    found = jax.jit(sharded)(params, segments, dy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)
    text = jax.jit(sharded).lower(params, segments, dy).compile().as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text


def test_a_sequence_axis_that_is_not_there():
    _, anchors, n_rows = ATTENTION["lut_attention"]
    with pytest.raises(
        ValueError, match=r"lookup_attention: sequence_axis is 'sequence'; .* there are the axes \(\) here"
    ):
        lutjax.lut_attention(X, jnp.zeros((4, n_rows // 4, 1)), anchors, sequence_axis="sequence")


@pytest.mark.slow
@needs_devices(8)
def test_plain_jit_with_the_specs_of_a_model():
    """Parameters and optimizer state lie where `specs` says, before and after a step, and hold what they do on one device."""
    config = LUTTransformerConfig(
        vocab_size=16, features=8, context=4, n_layers=1, n_heads=1, n_detectors=8, n_anchors=2, n_position_bits=2,
        ffn_detectors=8, ffn_anchors=4, dropout=0.0,
    )  # fmt: skip
    graph, params, others = nnx.split(LUTTransformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    params = jax.tree.map(lambda a: normal(*a.shape), params)
    optimizer = tables.Optimizer(RULE, 0.1, rest=optax.sgd(0.1), tables=called_weights)
    tokens = jax.random.randint(jax.random.key(1), (BATCH, 4), 0, 16)

    def step(params, state, tokens):
        def loss(params):
            model = nnx.merge(graph, nnx.State(params), others)
            return jnp.mean(model(tokens, deterministic=True) ** 2)

        value, gradients = tables.value_and_grad(loss)(params)
        return *optimizer.apply(params, gradients, state), value

    state = optimizer.init(params)
    expected = jax.jit(step)(params, state, tokens)
    mesh = mesh_of("both")
    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), sharding.specs((params, state), mesh))
    divided = [spec for spec in jax.tree.leaves(sharding.specs(params, mesh)) if "detectors" in spec]
    assert len(divided) >= 4  # attention's and its positions', feed-forward's, unembedding's
    on_mesh = jax.device_put((params, state), place)
    actual = jax.jit(step, out_shardings=(*place, NamedSharding(mesh, P())))(
        *on_mesh, jax.device_put(tokens, NamedSharding(mesh, P("data")))
    )
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


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
    assert all(spec == P(on, other, other) for spec in jax.tree.leaves(sharding.specs(rows.rows, MESH)))
    everywhere = sharding.specs(params, AbstractMesh((8,), ("data",)))
    assert all(spec == P() for spec in jax.tree.leaves(everywhere))
    assert sharding.specs(params["bits"], MESH, axis="data") == {"table": P("data", other)}


def test_what_cannot_be_divided_is_named():
    params = {"unembed": {"weights": jnp.zeros((6, 16, 4))}}
    with pytest.raises(
        ValueError, match=r"unembed/weights has shape \[6, 16, 4\], and its 6 detectors .* 4 devices"
    ) as e:
        sharding.specs(params, MESH)
    assert "1 or 2 or 3 devices" in str(e.value)
    with pytest.raises(ValueError, match=r"axis is 'tables'; the mesh has the axes \('detectors', 'data'\)"):
        sharding.specs(params, MESH, axis="tables")


@needs_devices(8)
@pytest.mark.parametrize(
    ("tracked", "message"),
    [
        (
            True,
            r"the table weights is the same on all devices of the mesh axes 'data'.*gathered\(\('data',\)\)",
        ),
        (False, r"check_vma=False nothing says .* the table weights .*gathered\(axes\)"),
    ],
)
def test_devices_that_would_diverge(tracked, message):
    optimizer = tables.Optimizer(tables.SGD(), 0.1, tables=called_weights)
    params = {"weights": OPS["lookup"][0]["weights"]}

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
                inner, mesh=mesh_of("data"), in_specs=(P(), P("data")), out_specs=P(), check_vma=tracked
            )
        )(params, X)

    with pytest.raises(ValueError, match=message):
        on_devices(gather=False)
    one_device = jax.jit(lambda params, x: step(False, params, x))(params, X)
    np.testing.assert_allclose(on_devices(gather=True)["weights"], one_device["weights"], atol=1e-5)


def test_gathered_outside_of_a_shard_map():
    loss = lambda params: jnp.sum(lutjax.lut(X, params["weights"], ANCHORS))  # noqa: E731
    _, gradients = tables.value_and_grad(loss)({"weights": OPS["lookup"][0]["weights"]})
    with pytest.raises(
        ValueError, match=r"axes is \('data',\); inside this shard_map there are the mesh axes \(\)"
    ):
        gradients["weights"].gathered("data")
