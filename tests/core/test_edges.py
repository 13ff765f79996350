"""Edge lists with any number per row: lists and their errors, lookups, gradients, updates, layers, growth and pruning."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import optim as tables, reference
from lutjax.ops import _edges
from lutjax.testing import assert_close
from lutjax.wiring import Edges, add_edges, carry_over, edges as ids_of, from_edges, remove_edges

T, C, OUTPUTS, INPUTS, BATCH = 3, 2, 7, 6, 9
R = 2**C
RNG = np.random.default_rng(0)
COUNTS = np.asarray(
    [3, 0, 1, 3, 2, 30, 0, 0, 3, 3, 3, 1]
)  # of each row: some empty, one much longer
PLACE = np.repeat(np.arange(T * R), COUNTS)
TARGETS = RNG.integers(0, OUTPUTS, len(PLACE))  # of thirty edges of a row some reach one output
IDS = PLACE // R, PLACE % R, TARGETS
SIZES = {"n_detectors": T, "n_rows": R, "n_outputs": OUTPUTS}
EDGES = from_edges(*IDS, **SIZES)
WEIGHTS = RNG.normal(size=EDGES.size).astype(np.float32)
X, DY = (RNG.normal(size=(BATCH, n)).astype(np.float32) for n in (INPUTS, OUTPUTS))
ANCHORS = np.array([[RNG.permutation(INPUTS)[:2] for _ in range(C)] for _ in range(T)], np.int32)
PLATFORMS = [i for i in implementations("sparse_lookup") if i in ("xla", "native")]


def look_up(weights, x, edges=EDGES, **options):
    return lutjax.sparse_lut(x, weights, ANCHORS, edges, **options)


def whole(weights):
    """The table ``[T, R, O]``, zero without an edge, built by a loop."""
    table = np.zeros((T, R, OUTPUTS), np.float64)
    for e, (t, r, o) in enumerate(zip(*IDS, strict=True)):
        table[t, r, o] += weights[e]
    return table


def test_a_list_of_targets_for_all_rows_is_clamped():
    """As traced lists of each row; -1 stays unused."""

    @jax.jit
    def added(targets):
        _, finish = _edges.split_row_targets("lookup_attention", jnp.ones((1, 2, 3)), targets, 3)
        return finish(jnp.array([1.0, 2.0, 4.0]))

    np.testing.assert_array_equal(added(jnp.array([[[0, 7, -1]]])), [1, 0, 2])


# ------------------------------------------------------------------------------------- lists
def test_ids_come_back():
    for result, given in zip(ids_of(EDGES), IDS, strict=True):
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, given)
    assert EDGES.counts.tolist() == COUNTS.reshape(T, R).tolist()
    assert EDGES.nbytes == 4 * (EDGES.size + T * R + 1)
    assert from_edges([], [], [], **SIZES).size == 0
    regular = RNG.integers(-1, OUTPUTS, (T, R, 3)).astype(np.int32)
    back = from_edges(*ids_of(regular), **SIZES)
    np.testing.assert_array_equal(back.target, regular[regular >= 0])
    np.testing.assert_array_equal(back.counts, (regular >= 0).sum(2))


@pytest.mark.parametrize(("change", "message"), [
    ({"target": [0, 7, 1]}, r"edge 1 has target 7, and there are 7 outputs: 0 to 6"),
    ({"target": [0, 1, -1]}, r"edge 2 has target -1"),
    ({"detector": [0, 0, 3]}, r"edge 2 has detector 3, and there are 3 detectors: 0 to 2"),
    ({"row": [4, 0, 0]}, r"edge 0 has row 4, and there are 4 rows of a detector"),
    ({"row": [1, 0, 0]},
     r"edge 1 has detector 0 and row 0, after detector 0 and row 1; edges and their weights must be sorted"),
    ({"detector": [1, 0, 2]}, r"edge 1 has detector 0 and row 0, after detector 1"),
    ({"target": np.asarray([0, 2**31, 1])}, r"edge 1 has target 2147483648, which does not fit int32"),
    ({"row": np.asarray([0, 0, -(2**40)])}, r"edge 2 has row -1099511627776, which does not fit int32"),
    ({"target": [0, 1]},
     r"3 of detector, 3 of row, 2 of target; each edge needs one of each, but edge 2 lacks one"),
    ({"target": [0.0, 1.0, 2.0]}, r"target is float64\[3\]; expected integers"),
    ({"n_rows": 2**31}, r"n_rows is 2147483648; ids are int32"),
    ({"n_detectors": 2**16, "n_rows": 2**16}, r"row numbers are int32"),
    ({"n_outputs": -1}, r"n_outputs is -1; expected a whole number"),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_lists_that_are_inconsistent(change, message):
    given = {"detector": [0, 0, 0], "row": [0, 0, 0], "target": [0, 1, 1], **SIZES, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        from_edges(**given)


@pytest.mark.usefixtures("without_typechecking")
def test_calls_that_do_not_fit():
    d = lutjax.detect(X, ANCHORS)
    for arguments, message in (
        (
            (WEIGHTS[:-1], d, EDGES),
            r"weights is float32\[48\]; targets has 49 edges, so expected \[49\]",
        ),
        (
            (WEIGHTS, lutjax.detect(X, ANCHORS[:2]), EDGES),
            "targets has 3 detectors and 4 rows each",
        ),
        ((WEIGHTS, d, EDGES, 6), "n_outputs is int 6; targets has 7"),
    ):
        with pytest.raises(ValueError, match=message):
            lutjax.sparse_lookup(*arguments)
    broken = Edges(EDGES.first[::-1], EDGES.target, T, R, OUTPUTS, 1)
    with pytest.raises(ValueError, match="first goes from 49 to 0 and falls"):
        broken.check("here")


# ------------------------------------------------------------------------------------- look-ups
@pytest.mark.parametrize("implementation", PLATFORMS)
def test_equal_to_a_table_that_is_zero_elsewhere(implementation):
    table = jnp.asarray(whole(WEIGHTS), jnp.float32)

    def results(f, weights):
        y, pull = jax.vjp(f, weights, X)
        return y, *pull(DY)

    @jax.jit
    def compute(weights, table):
        of_edges = functools.partial(look_up, implementation=implementation)
        y, d_table, dx = results(lambda w, x: lutjax.lut(x, w, ANCHORS), table)
        expected = results(lambda w, x: reference.sparse_lut(x, w, ANCHORS, EDGES), weights)
        return results(of_edges, weights), (y, d_table[IDS], dx), expected

    actual, *expected = compute(WEIGHTS, table)
    for others in expected:
        for name, a, e in zip(("y", "d weights", "dx"), actual, others, strict=True):
            assert_close(name, a, e)


@pytest.mark.parametrize("implementation", PLATFORMS)
def test_fixed_point_and_dtypes(implementation):
    scale = lutjax.FixedPoint(2.0**10)
    one, other = (
        jax.vjp(functools.partial(look_up, accumulate=scale, implementation=i), WEIGHTS, X)
        for i in (implementation, "xla")
    )
    for a, b in zip((one[0], *one[1](DY)), (other[0], *other[1](DY)), strict=True):
        np.testing.assert_array_equal(a, b)
    half = jnp.asarray(WEIGHTS, jnp.bfloat16)
    y = look_up(half, X, implementation=implementation)
    assert y.dtype == jnp.bfloat16
    assert_close("y", y, look_up(half.astype(jnp.float32), X).astype(jnp.bfloat16))


def test_wild_arrays_read_no_other_memory():
    """Traced bounds and targets without a valid edge list give arbitrary numbers."""
    rng = np.random.default_rng(1)
    for implementation in PLATFORMS:
        for _ in range(3):
            first = rng.integers(-(2**31), 2**31, T * R + 1).astype(np.int32)
            first[0] = 0
            first[1:] = np.where(rng.random(T * R) < 0.5, first[1:] % 60, -1)
            target = rng.integers(-(2**31), 2**31, EDGES.size).astype(np.int32)
            edges = Edges(first, target, T, R, OUTPUTS, 4)

            @jax.jit
            def both(edges, implementation=implementation):
                call = functools.partial(look_up, edges=edges, implementation=implementation)
                y, pull = jax.vjp(call, WEIGHTS, X)
                return y, pull(DY)

            y, gradients = both(edges)
            assert np.all(np.isfinite(y))
            assert all(np.all(np.isfinite(a)) for a in gradients)


# ------------------------------------------------------------------------------------- training
RULES = {
    "SGD, decay": tables.SGD(weight_decay=0.1),
    "RowAdam": tables.RowAdam(b1=0.5),
}


def gradient_of(weights, edges=EDGES):
    loss = lambda params: jnp.sum(look_up(params["weights"], X, edges) * DY)  # noqa: E731
    return tables.value_and_grad(loss)({"weights": jnp.asarray(weights)})[1]["weights"]


@pytest.mark.parametrize("name", ["SGD, decay", "RowAdam"])
def test_updates_move_the_edges_of_rows_that_were_read(name):
    rule, rates = RULES[name], np.where(np.arange(EDGES.size) % 2, 0.5, 2.0).astype(np.float32)
    gradient = gradient_of(WEIGHTS)
    state = jax.tree.map(lambda a: a + 1, rule.init(jnp.asarray(WEIGHTS)))
    new, new_state = jax.jit(
        lambda w, s: lutjax.update_table(w, gradient, 0.1, rule, s, rates=rates)
    )(WEIGHTS, state)
    d = lutjax.detect(X, ANCHORS)
    read = np.zeros((T, R), bool)
    read[np.arange(T), np.asarray(d.index)] = True
    touched = read.ravel()[PLACE]
    assert touched.any()
    assert not touched.all()
    rows = lambda a: jnp.asarray(a)[:, None]  # noqa: E731
    moved, moved_state = rule.step(
        rows(WEIGHTS), rows(gradient.to_dense()), jax.tree.map(rows, state), rows(0.1 * rates)
    )
    assert_close("weights", new, jnp.where(touched, moved[:, 0], WEIGHTS))
    for key, value in new_state.items():
        assert_close(key, value, jnp.where(touched, moved_state[key][:, 0], state[key]))
    norm = tables.global_norm({"weights": gradient})
    assert_close("norm", norm, jnp.linalg.norm(gradient.to_dense()))


def test_usage_counts_the_reads_of_rows():
    index = np.asarray(lutjax.detect(X, ANCHORS).index)
    counts = lutjax.usage(lambda weights: look_up(weights, X))(jnp.asarray(WEIGHTS))
    (result,) = counts.values()
    np.testing.assert_array_equal(
        result.counts, [[(index[:, t] == r).sum() for r in range(R)] for t in range(T)]
    )


# ------------------------------------------------------------------------------------- layers
def test_layers_take_lists():
    from flax import nnx

    import lutjax.layers.linen
    import lutjax.layers.nnx

    options = {"n_detectors": T, "n_anchors": C, "anchors": ANCHORS, "targets": EDGES}
    layer = lutjax.layers.nnx.SparseLUT(INPUTS, OUTPUTS, **options, rngs=nnx.Rngs(0))
    assert layer.weights.shape == (EDGES.size,)
    assert not np.any(layer.weights)
    layer.weights[...] = jnp.asarray(WEIGHTS)
    assert_close("nnx", layer(X), look_up(WEIGHTS, X))
    linen = lutjax.layers.linen.SparseLUT(INPUTS, OUTPUTS, **options)
    variables = linen.init(jax.random.key(0), X)
    assert set(variables["targets"]) == {"targets", "first_edges"}
    variables = {**variables, "params": {"weights": jnp.asarray(WEIGHTS)}}
    assert_close("linen", linen.apply(variables, X), look_up(WEIGHTS, X))
    with pytest.raises(
        ValueError,
        match="the edges of targets are those of 3 detectors of 4 rows and of 7 outputs; this layer has 3, 4 and 8",
    ):
        lutjax.layers.nnx.SparseLUT(INPUTS, 8, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="either n_targets"):
        lutjax.layers.nnx.SparseLUT(INPUTS, OUTPUTS, **options, n_targets=2, rngs=nnx.Rngs(0))
    layer.targets[...] = jnp.full_like(layer.targets[...], OUTPUTS)
    with pytest.raises(ValueError, match="SparseLUT: edge 0 has target 7"):
        layer(X)


class TestSlow:
    def test_groups_and_vmap(self):
        grouped = lutjax.sparse_lut(jnp.stack([X] * 3, 1), WEIGHTS, ANCHORS, EDGES, groups=3)
        assert_close("sum", grouped.sum(1), look_up(WEIGHTS, X))
        mapped = jax.vmap(look_up, in_axes=(0, None))(np.stack([WEIGHTS, 2 * WEIGHTS]), X)
        assert_close("vmap", mapped[1], 2 * look_up(WEIGHTS, X))

    @needs_devices(2)
    def test_a_batch_over_devices(self):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
        x, dy = (jax.device_put(a[:8], NamedSharding(mesh, P("data"))) for a in (X, DY))
        weights = jax.device_put(jnp.asarray(WEIGHTS), NamedSharding(mesh, P()))
        actual, pull = jax.jit(
            lambda w, x, dy: (lambda y, pull: (y, pull(dy)))(*jax.vjp(look_up, w, x))
        )(weights, x, dy)
        wanted, expected = jax.vjp(look_up, WEIGHTS, X[:8])
        assert_close("y", jnp.asarray(np.asarray(actual)), wanted)
        for name, a, b in zip(("d weights", "dx"), pull, expected(DY[:8]), strict=True):
            assert_close(name, jnp.asarray(np.asarray(a)), b)

    def test_growth_and_pruning_keep_weights_and_state(self):
        optimizer = tables.Optimizer(tables.RowAdam(b1=0.5), rate=0.1, tables={"weights"})

        def steps(params, state, edges, n):
            @jax.jit
            def step(params, state):
                loss = lambda p: jnp.sum((look_up(p["weights"], X, edges) - DY) ** 2)  # noqa: E731
                value, gradients = tables.value_and_grad(loss)(params)
                return *optimizer.apply(params, gradients, state), value

            losses = []
            for _ in range(n):
                params, state, value = step(params, state)
                losses.append(float(value))
            return params, state, losses

        params = {"weights": jnp.asarray(WEIGHTS)}
        params, state, before = steps(params, optimizer.init(params), EDGES, 4)
        new = [2, 0, 2], [0, 1, 1], [6, 5, 4]
        more = add_edges(EDGES, *new)
        assert sorted(zip(*(a.tolist() for a in ids_of(more.edges)), strict=True)) == sorted(
            [*zip(*(a.tolist() for a in ids_of(EDGES)), strict=True), *zip(*new, strict=True)]
        )
        bigger = {"weights": carry_over(params["weights"], more)}
        rows = {"weights": carry_over(state.rows["weights"], more)}
        assert all(
            a.shape == (EDGES.size + 3,) for a in (*bigger.values(), *rows["weights"].values())
        )
        assert_close(
            "new edges weigh nothing",
            look_up(bigger["weights"], X, more.edges),
            look_up(params["weights"], X),
        )
        grown_params, _, after = steps(bigger, state._replace(rows=rows), more.edges, 4)
        assert after[-1] < before[-1]
        assert float(jnp.abs(grown_params["weights"][more.source < 0]).max()) > 0
        fewer = remove_edges(more.edges, more.source >= 0)
        assert ids_of(fewer.edges)[2].tolist() == TARGETS.tolist()
        same = carry_over({"weights": bigger["weights"], **rows["weights"]}, fewer)
        same_state = state._replace(rows={"weights": {n: same[n] for n in rows["weights"]}})
        actual = steps({"weights": same["weights"]}, same_state, fewer.edges, 2)
        wanted = steps(params, state, EDGES, 2)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), actual, wanted)
        with pytest.raises(ValueError, match=r"an array has shape \[3\]; the list had 49 edges"):
            carry_over(np.zeros(3), more)
        with pytest.raises(ValueError, match=r"new has shape \[2\]; .* one per added edge \(3\)"):
            carry_over(WEIGHTS, more, new=np.zeros(2))
        with pytest.raises(ValueError, match=r"edge 0 has target 7"):
            add_edges(EDGES, [0], [0], [7])
        with pytest.raises(ValueError, match=r"expected bool\[49\]"):
            remove_edges(EDGES, np.ones(3, bool))
