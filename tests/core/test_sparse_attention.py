"""Attention whose rows reach only some of the outputs: against loops over pairs and slots, by the reference, and in every library."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from layer_libraries import Case, assert_drawn, assert_refused, inputs_of, nnx_layer

import lutjax
from lutjax import optim as tables, reference
from lutjax.dispatch.registry import Backend, Declaration, KernelSpec, Platform, devices_of
from lutjax.testing import assert_close

T, C, N, K, L, INPUTS, OUTPUTS = 3, 1, 1, 2, 5, 4, 6
RNG = np.random.default_rng(0)


def anchors_of(n_inputs, n):
    """Pairs of different inputs."""
    return np.array([[RNG.permutation(n_inputs)[:2] for _ in range(n)] for _ in range(T)], np.int32)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


ANCHORS, JOINT = anchors_of(INPUTS, C), anchors_of(2 * INPUTS + N, 3)
X, POSITIONS = normal(2, L, INPUTS), normal(L - 1, 1, N)
WEIGHTS, DY = normal(T, 8, K), normal(2, L, OUTPUTS)
SHAPES = {"row": (T, 8, K), "table": (T, 1, K), "layer": (1, 1, K)}
OPS = {"concatenated": ("lut_attention", ANCHORS), "pair": ("lut_pair_attention", JOINT)}


def targets_of(lists):
    """Some slots are unused, and some of a row share a target."""
    ids = np.random.default_rng(0).integers(-1, OUTPUTS, SHAPES[lists]).astype(np.int32)
    ids[:, 0] = (3, 3) if lists == "row" else ids[:, 0]
    return ids


def slot_tables(targets):
    """Tables of each slot that reach all outputs, with one element other than 0 in each row: made by loops."""
    targets = np.broadcast_to(targets, WEIGHTS.shape)
    found = np.zeros((T, 8, K, OUTPUTS), np.float32)
    for t, r, k in np.ndindex(T, 8, K):
        if targets[t, r, k] >= 0:
            found[t, r, k, targets[t, r, k]] = 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lists"),
    [("concatenated", "row"), ("pair", "row"), ("concatenated", "table"), ("concatenated", "layer")],
)
def test_equal_to_a_table_that_is_zero_elsewhere(kind, lists):
    """Values and gradients, that of the table at its slots alone; with a window too."""
    name, anchors = OPS[kind]
    targets, ones = targets_of(lists), slot_tables(targets_of(lists))

    def sparse(op, x, weights, positions):
        return op(x, weights, anchors, positions, targets=targets, n_outputs=OUTPUTS, window=3)

    def whole(x, weights, positions):
        return getattr(lutjax, name)(x, weights, anchors, positions, window=3)

    @jax.jit
    def every(x, weights, positions):
        table = jnp.asarray(np.einsum("trk,trko->tro", WEIGHTS, ones), jnp.float32)
        found = {}
        for which, f, w in (
            ("op", lambda *a: sparse(getattr(lutjax, name), *a), weights),
            ("reference", lambda *a: sparse(getattr(reference, name), *a), weights),
            ("whole", whole, table),
        ):
            y, back = jax.vjp(f, x, w, positions)
            found[which] = y, *back(DY)
        return found

    found = every(X, WEIGHTS, POSITIONS)
    y, dx, dtable, dpositions = found.pop("whole")
    want = y, dx, np.einsum("tro,trko->trk", dtable, ones), dpositions
    assert all(np.any(np.asarray(a)) for a in want)
    for which, got in found.items():
        for part, a, b in zip(("y", "dx", "dweights", "dpositions"), got, want, strict=True):
            assert_close(f"{which} {part}", a, b)


@pytest.mark.parametrize("lists", ["row", slow("table")])
def test_values_and_gradients_by_loops(lists):
    """The definition of `lutjax.lookup_attention`, slot by slot."""
    targets = np.broadcast_to(targets_of(lists), WEIGHTS.shape)
    d, e = lutjax.detect(X, ANCHORS), lutjax.detect_signs(POSITIONS)
    y = np.zeros((2, L, OUTPUTS), np.float32)
    dweights, dmargin, dposition = (np.zeros(a.shape, np.float32) for a in (WEIGHTS, d.margin, e.margin))

    def product(t, row, dy):
        return sum(WEIGHTS[t, row, k] * dy[o] for k, o in enumerate(targets[t, row]) if o >= 0)

    def slope(margin):
        return 0.5 * (1 if margin > 0 else -1) / (1 + abs(margin)) ** 2

    index, flip, margin = (np.asarray(a) for a in (d.index, d.flip, d.margin))
    for b, j, i, t in np.ndindex(2, L, L, T):
        if i >= j:
            continue
        p = j - i - 1, 0
        row = int(index[b, j, t]) << 2 | int(index[b, i, t]) << 1 | int(e.index[p])
        for k, o in enumerate(targets[t, row]):
            if o >= 0:
                y[b, j, o] += WEIGHTS[t, row, k]
                dweights[t, row, k] += DY[b, j, o]
        of_query, of_key, of_position = margin[b, j, t], margin[b, i, t], float(e.margin[p])
        is_query = abs(of_query) < abs(of_key)
        other = row ^ (int(flip[b, j, t]) << 2 if is_query else int(flip[b, i, t]) << 1)
        place, own = (j, of_query) if is_query else (i, of_key)
        dmargin[b, place, t] += slope(own) * (product(t, row, DY[b, j]) - product(t, other, DY[b, j]))
        if abs(of_position) < min(abs(of_query), abs(of_key)):
            other = row ^ int(e.flip[p])
            dposition[p] += slope(of_position) * (product(t, row, DY[b, j]) - product(t, other, DY[b, j]))

    @jax.jit
    def found(weights, margin, position):
        def f(weights, margin, position):
            own, of_distance = (dataclasses.replace(a, margin=m) for a, m in ((d, margin), (e, position)))
            options = {"targets": targets_of(lists), "n_outputs": OUTPUTS}
            return lutjax.lookup_attention(weights, own, own, of_distance, **options)

        y, back = jax.vjp(f, weights, margin, position)
        return y, *back(DY)

    wanted = {"y": y, "dweights": dweights, "dmargin": dmargin, "dposition": dposition}
    for (name, want), got in zip(wanted.items(), found(WEIGHTS, d.margin, e.margin), strict=True):
        assert want.any()
        assert_close(name, got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lists"),
    [("concatenated", "row"), ("concatenated", "table"), ("pair", "table"), ("pair", "row")],
)
def test_gradients_in_factors(kind, lists):
    """They hold no table, equal dense ones, and move rows by every rule as dense ones do."""
    name, anchors = OPS[kind]
    targets, params = targets_of(lists), {"weights": WEIGHTS}

    def loss(params):
        options = {"targets": targets, "n_outputs": OUTPUTS}
        return jnp.vdot(getattr(lutjax, name)(X, params["weights"], anchors, POSITIONS, **options), DY)

    rule = tables.RowAdagrad()

    @jax.jit
    def step(params):
        gradient = tables.value_and_grad(loss)(params)[1]["weights"]
        weights = params["weights"]
        added, _ = lutjax.update_table(weights, gradient, 0.5)
        moved, _ = lutjax.update_table(weights, gradient, 0.5, rule=rule, state=rule.init(weights))
        return gradient, added, moved, tables.global_norm({"weights": gradient})

    gradient, added, moved, norm = step(params)
    dense = jax.jit(jax.grad(loss))(params)["weights"]
    assert gradient.cotangent.shape == (2, L, OUTPUTS)
    assert_close("dense", gradient.to_dense(), dense)
    assert_close("added", added, WEIGHTS - 0.5 * dense)
    state = rule.init(WEIGHTS)
    assert_close("moved", moved, rule.step(jnp.asarray(WEIGHTS), dense, state, jnp.float32(0.5))[0])
    assert_close("norm", norm, jnp.linalg.norm(dense))


@pytest.mark.slow
@pytest.mark.parametrize("lists", ["row", "table"])
@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("how", ["vmap", "divided", "explicit", "fixed point", "bfloat16"])
def test_other_ways_to_run(kind, lists, how):
    """Under `vmap`, on meshes of both kinds by batch and detectors, with sums of integers, and in 16 bits."""
    name, anchors = OPS[kind]
    anchors = jnp.concatenate([anchors, anchors[:1]])
    targets = np.concatenate([targets_of(lists), targets_of(lists)[:1]])
    weights = jnp.concatenate([WEIGHTS, 2 * WEIGHTS[:1]])
    dtype = jnp.bfloat16 if how == "bfloat16" else jnp.float32
    options = {"accumulate": lutjax.FixedPoint(2**16)} if how == "fixed point" else {}

    def run(op, x, weights, anchors, targets, dy, **options):
        def f(x, weights):
            return op(x, weights, anchors, POSITIONS, targets=targets, n_outputs=OUTPUTS, **options)

        y, back = jax.vjp(f, x, weights)
        return (y, *back(dy.astype(y.dtype)))

    weights, dy = weights.astype(dtype), DY.astype(dtype).astype(jnp.float32)
    args = X, weights, anchors, jnp.asarray(targets), dy
    oracle = functools.partial(
        run, getattr(reference, name)
    )  # it would round a row's sum of slots with one target to 16 bits
    want = jax.jit(oracle)(X, weights.astype(jnp.float32), *args[2:])
    op = functools.partial(run, getattr(lutjax, name), **options)
    if how == "vmap":
        got = jax.jit(jax.vmap(op, in_axes=(0, None, None, None, 0)))(*args)
        got = got[0], got[1], got[2].sum(0)
    elif how in ("divided", "explicit"):
        kind_of_axis = AxisType.Auto if how == "divided" else AxisType.Explicit
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind_of_axis,) * 2)
        of_table = P("model")
        specs = (P("data"), of_table, of_table, of_table, P("data"))
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(args, specs, strict=True)]
        got = jax.jit(op)(*args)
    else:
        got = jax.jit(op)(*args)
    for part, a, b in zip(("y", "dx", "dweights"), got, want, strict=True):
        if how == "fixed point":
            np.testing.assert_allclose(a, b, atol=1e-3)
        else:
            assert_close(part, jnp.asarray(np.asarray(a)), b.astype(a.dtype))


def test_some_implementations_run_lists_of_rows_and_any_one_list():
    d, e = lutjax.detect(X, ANCHORS), lutjax.detect_signs(POSITIONS)
    declared = Declaration(directions=("forward", "update"))
    other = KernelSpec("lookup_attention", Platform.PALLAS, Backend.ANY, "somewhere", declared=declared)
    (device,) = devices_of([WEIGHTS])
    for lists in SHAPES:
        options = {"targets": targets_of(lists), "n_outputs": OUTPUTS}
        (made, *_) = lutjax.kernel_registry.calls_of("lookup_attention", WEIGHTS, d, d, e, **options)
        for direction in other.directions:
            why = other.unsupported_reason(made.request(direction, device))
            assert why is None if lists == "layer" else "reads no targets" in why


def test_no_array_of_all_outputs():
    """A step, dense or in factors, has no array as large as a table that reaches all outputs."""
    n_detectors, n_anchors, n_outputs = 5, 4, 64
    anchors = lutjax.sample_anchors(jax.random.key(0), INPUTS, n_detectors, n_anchors)
    weights = jnp.zeros((n_detectors, 4**n_anchors, K))
    targets = np.random.default_rng(0).integers(-1, n_outputs, weights.shape).astype(np.int32)

    def loss(params):
        y = lutjax.lut_attention(X, params["weights"], anchors, targets=targets, n_outputs=n_outputs)
        return jnp.square(y - 1).sum()

    def step(params):
        gradient = tables.value_and_grad(loss)(params)[1]["weights"]
        return jax.grad(loss)(params), lutjax.update_table(params["weights"], gradient, 0.5)

    program = jax.jit(step).lower({"weights": weights}).compile().as_text()
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", program)]
    assert weights.size in sizes
    assert max(sizes) == weights.size < n_detectors * 4**n_anchors * n_outputs


def test_one_list_keeps_gradients_in_factors():
    targets, params = targets_of("layer"), {"weights": WEIGHTS}

    def loss(params):
        y = lutjax.lut_attention(X, params["weights"], ANCHORS, POSITIONS, targets=targets, n_outputs=OUTPUTS)
        return jnp.vdot(y, DY)

    gradient = jax.jit(tables.value_and_grad(loss))(params)[1]["weights"]
    assert gradient.cotangent.shape == (2, L, K)
    assert_close("weights", gradient.to_dense(), jax.jit(jax.grad(loss))(params)["weights"])


SIZES = {"n_detectors": T, "n_anchors": 1, "n_positions": L - 1, "n_position_bits": N}
CASES = {
    "concatenated": Case("LUTAttention", {**SIZES, "n_targets": 2}, (2, L, INPUTS)),
    "pair": Case(
        "LUTPairAttention",
        {**SIZES, "n_anchors": 3, "n_targets": 2, "targets_per": "table", "causal": False},
        (2, L, INPUTS),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layers(name):
    case = CASES[name]
    x = inputs_of(case)
    (arrays, *_) = assert_drawn(case, x)
    assert arrays["targets"].shape == ((T, 8, 2) if name == "concatenated" else (T, 1, 2))
    assert arrays["weights"].shape == (T, 8, 2)
    arrays = {**arrays, "weights": jax.random.normal(jax.random.key(1), (T, 8, 2))}
    y = case.spec(arrays, x)
    assert y.shape == (2, L, 6)
    op = lutjax.lut_attention if name == "concatenated" else lutjax.lut_pair_attention
    dense = jnp.asarray(
        np.einsum(
            "trk,trko->tro",
            arrays["weights"],
            jax.nn.one_hot(np.broadcast_to(arrays["targets"], (T, 8, 2)), 6),
        ),
        jnp.float32,
    )
    positions = arrays["positions"]
    assert_close("y", y, op(x, dense, arrays["anchors"], positions, causal=case.options.get("causal", True)))


@pytest.mark.slow
def test_decoding():
    case = CASES["concatenated"]
    x = inputs_of(case)
    layer = nnx_layer(case)
    layer.weights = jax.random.normal(jax.random.key(1), layer.weights.shape)
    whole = layer(x)
    layer.init_cache(x.shape)
    parts = [layer(x[:, :3], decode=True), layer(x[:, 3:], decode=True)]
    assert_close("decoded", jnp.concatenate(parts, 1), whole)
    assert layer.out_features == 6


def test_explicit_targets_and_errors():
    targets = targets_of("table")
    layer = nnx_layer(Case("LUTAttention", {**SIZES, "targets": targets}, (2, L, INPUTS)))
    assert layer.weights.shape == (T, 8, K)
    layer.check()
    layer.targets[...] = layer.targets[...] + 7
    with pytest.raises(ValueError, match="LUTAttention: targets holds ids"):
        layer.check()
    for options, message in (
        ({"n_targets": 7}, "LUTAttention: n_targets is 7; there are only 6 outputs"),
        ({"n_targets": 2, "targets": targets}, "LUTAttention: give either n_targets"),
        (
            {"targets": targets[:2]},
            r"LUTAttention: targets has shape \[2, 1, 2\]; expected \[3 or 1, 8 or 1, targets\]",
        ),
        ({"n_targets": 2, "targets_per": "slot"}, "LUTAttention: targets_per is 'slot'"),
    ):
        assert_refused(Case("LUTAttention", {**SIZES, **options}, (2, L, INPUTS)), message)


@pytest.mark.usefixtures("without_typechecking")
def test_wrong_targets():
    for targets, n, message in (
        (targets_of("row")[:2], OUTPUTS, r"targets is int32\[2, 8, 2\]; expected \[3 or 1, 8 or 1, 2\]"),
        (targets_of("row"), None, "n_outputs is not given"),
        (None, OUTPUTS, "n_outputs is int 6; it is that of targets"),
        (targets_of("row"), -1, "n_outputs is int -1; it must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            lutjax.lut_attention(X, WEIGHTS, ANCHORS, POSITIONS, targets=targets, n_outputs=n)
