"""Memory layers: recorded hash vectors, rows without a model, sequence continuation, training by rows.

test_layers_and_ops.py compares their values with ops."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lutjax
from lutjax import optim as tables
from lutjax.dispatch.registry import Backend, Device
from lutjax.layers import _largest
from lutjax.layers._largest import largest_elements, places_by_groups
from lutjax.layers._product_keys import _pairs
from lutjax.layers.haiku import NgramMemory as HaikuNgramMemory
from lutjax.layers.linen import NgramMemory as LinenNgramMemory
from lutjax.layers.nnx import NgramMemory, ProductKeyExperts, ProductKeyMemory
from lutjax.optim import nnx as training

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 20, (3, 14)).astype(np.int32)
SEGMENTS = np.repeat([0, 0, 1, 1, 1, 2, 0], 2)[None] + np.zeros((3, 1), int)


RECORDED = {
    "rows=1000": ({"rows": 1000}, [[5, 424, 700, 49, 518, 285, 108, 478], [146, 502, 711, 123, 932, 84, 205, 998], [883, 99, 575, 635, 588, 233, 230, 915], [608, 209, 641, 965, 828, 885, 390, 840], [749, 306, 244, 711, 579, 43, 230, 445], [678, 534, 173, 189, 56, 952, 456, 309], [810, 536, 933, 701, 322, 530, 567, 37], [631, 890, 166, 400, 577, 246, 283, 764]]),
    "a power of two": ({"rows": 2**16, "orders": (3,), "heads": 2, "seed": 5}, [[47029, 44664], [19811, 38719], [13886, 746], [13304, 10956], [7713, 65322], [6750, 51084], [49968, 11315], [27140, 65146]]),
    "the largest number of rows": ({"rows": 2**31 - 1, "orders": (1, 4), "heads": 1, "seed": 2**32 - 1}, [[2066656156, 222044800], [1130552782, 2036925037], [1846823091, 889315396], [1846823091, 1582143868], [1778598450, 1194948134], [1377445688, 615409601], [1832674720, 293092108], [983313514, 1539744066]]),
}  # fmt: skip
TEXT = np.array([72, 101, 108, 108, 111, 0, 2**31 - 1, -5])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_rows(name):
    """Models were trained with these values: no version may change them."""
    options, recorded = RECORDED[name]
    np.testing.assert_array_equal(lutjax.ngram_rows(TEXT, **options), recorded)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_numpy_and_jax_agree(dtype):
    tokens = TOKENS.astype(dtype)
    options = {"rows": 997, "orders": (1, 2, 5), "heads": 3, "seed": 9}
    for segments in (None, SEGMENTS):
        rows = lutjax.ngram_rows(tokens, segments=segments, **options)
        assert isinstance(rows, np.ndarray)
        assert rows.dtype == np.int32
        result = jax.jit(functools.partial(lutjax.ngram_rows, **options))(
            jnp.asarray(tokens), segments=segments
        )
        np.testing.assert_array_equal(result, rows)
        with jax.enable_x64(True):
            result = lutjax.ngram_rows(jnp.asarray(tokens), segments=segments, **options)
            assert result.dtype == np.int32
            np.testing.assert_array_equal(result, rows)


@pytest.mark.parametrize("n_rows", [1 << 12, 4093, 3000])
def test_rows_are_hit_evenly(n_rows):
    """Byte n-grams hit rows as often as random ids do, for powers of two and primes; each order's hashes collide at different n-grams."""
    pairs = np.stack(np.indices((256, 256)), -1).reshape(-1, 2)
    rows = lutjax.ngram_rows(pairs, rows=n_rows, orders=(2,), heads=2)[:, 1]
    for of_head in rows.T:
        counts = np.bincount(of_head, minlength=n_rows)
        expected = len(pairs) / n_rows
        deviation = np.sum((counts - expected) ** 2 / expected)
        assert abs(deviation - n_rows) < 5 * np.sqrt(2 * n_rows)
    both = rows[:, 0].astype(np.int64) * n_rows + rows[:, 1]
    n_colliding = len(pairs) - len(np.unique(both))
    assert n_colliding < 3 * len(pairs) ** 2 / (2 * n_rows**2) + 10


def test_ngrams_end_at_segments():
    rows = lutjax.ngram_rows(TOKENS, segments=SEGMENTS, rows=997, orders=(2, 4))
    for first, last in ((0, 4), (4, 10), (10, 12), (12, 14)):
        alone = lutjax.ngram_rows(TOKENS[:, first:last], rows=997, orders=(2, 4))
        np.testing.assert_array_equal(rows[:, first:last], alone)
    assert (rows[:, 4] != lutjax.ngram_rows(TOKENS, rows=997, orders=(2, 4))[:, 4]).any()


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("options", "message"), [
    ({"rows": 0}, "rows is 0; it must be a whole number from 1 to 2147483647"),
    ({"rows": 2.5}, "rows is 2.5; it must be a whole number"),
    ({"heads": 0}, "heads is 0"),
    ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
    ({"orders": ()}, r"orders is \(\); expected different lengths"),
    ({"orders": (2, 2)}, r"orders is \(2, 2\); expected different"),
    ({"orders": (0,)}, r"orders is \(0,\); lengths are whole numbers from 1 to 255"),
    ({"segments": np.zeros(3, int)}, r"segments is int64\[3\] and tokens int32\[3, 14\]"),
])  # fmt: skip
def test_impossible_hashes(options, message):
    with pytest.raises(ValueError, match=f"ngram_rows: {message}"):
        lutjax.ngram_rows(TOKENS, **{"rows": 10, **options})
    with pytest.raises(TypeError, match="ngram_rows: tokens is "):
        lutjax.ngram_rows(TOKENS.astype(float), rows=10)


@pytest.mark.usefixtures("without_typechecking")
def test_impossible_calls():
    layer, x = NgramMemory(6, rows=5, rngs=nnx.Rngs(0)), jnp.zeros((3, 14, 6))
    with pytest.raises(
        ValueError, match=r"NgramMemory: x has shape \[3, 14, 5\]; .* \[..., length, 6\]"
    ):
        layer(x[..., :5], TOKENS)
    with pytest.raises(ValueError, match=r"tokens has shape \[3, 13\] and x \[3, 14, 6\]"):
        layer(x, TOKENS[:, 1:])
    with pytest.raises(TypeError, match="NgramMemory: tokens is float32"):
        layer(x, jnp.zeros((3, 14)))


def test_rows_are_known_before_the_layer_runs():
    options = {"rows": 50, "heads": 2, "seed": 3}
    layer, x = NgramMemory(6, **options, rngs=nnx.Rngs(0)), jnp.ones((3, 14, 6))
    rows = layer.row_ids(TOKENS, SEGMENTS)
    assert isinstance(rows, np.ndarray)
    np.testing.assert_array_equal(rows, LinenNgramMemory(6, **options).row_ids(TOKENS, SEGMENTS))
    usage = jax.jit(lutjax.usage(lambda layer, x: layer(x, TOKENS, segments=SEGMENTS)))
    result = usage(layer, x)["weights"]
    counts = np.stack([np.bincount(rows[..., t].ravel(), minlength=50) for t in range(4)])
    np.testing.assert_array_equal(result.counts, counts)
    np.testing.assert_array_equal(result.never_read, (counts == 0).sum(1))


def test_haiku_goes_on():
    import haiku as hk

    def run(x, tokens, split):
        layer = HaikuNgramMemory(6, rows=50)
        y, history = layer(x[:, :split], tokens[:, :split], history=layer.history((3,)))
        return jnp.concatenate([y, layer(x[:, split:], tokens[:, split:], history=history)[0]], 1)

    f = hk.transform(run)
    x = jax.random.normal(jax.random.key(2), (3, 14, 6))
    params = jax.jit(f.init, static_argnums=3)(jax.random.key(0), x, TOKENS, 5)
    apply = jax.jit(f.apply, static_argnums=4)
    one, other = (apply(params, None, x, TOKENS, split) for split in (5, 9))
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(("n", "k"), [(1000, 17), (130, 31), (33, 33), (1, 1), (5000, 20)])
def test_largest_elements_by_groups(n, k):
    """Match `jax.lax.top_k` positions for equal, infinite and NaN elements, and for more groups than one level holds."""
    rng = np.random.default_rng(n)
    x = rng.normal(size=(5, 12, n)).astype(np.float32)
    x[1] = np.round(x[1], 1)
    x[2] = np.where(rng.random(x[2].shape) < 0.95, -np.inf, x[2])
    x[3] = rng.choice([0, np.nan, np.inf], x[3].shape, p=[0.96, 0.02, 0.02])
    x[4] = 0
    result = jax.jit(functools.partial(places_by_groups, k=k))(x)
    np.testing.assert_array_equal(result, jax.lax.top_k(x, k)[1])


def test_largest_elements_beside_a_gpu(monkeypatch):
    """GPU programs sort no long rows. On the CPU in the same process, results and gradients match `jax.lax.top_k`."""
    gpu, cpu = (Device(backend, str(backend)) for backend in (Backend.GPU, Backend.CPU))
    monkeypatch.setattr(_largest, "devices_of", lambda _: (gpu, cpu))
    x, dy = (
        RNG.normal(size=(3, 1024)).astype(np.float32),
        RNG.normal(size=(3, 20)).astype(np.float32),
    )
    lowered = jax.jit(lambda x: largest_elements(x, 20)).trace(x)
    for platform, sorts_all in (("cuda", False), ("rocm", False), ("cpu", True)):
        text = lowered.lower(lowering_platforms=(platform,)).as_text()
        assert ("top_k(%arg0" in text) == sorts_all
    for k in (16, 20):  # XLA has a kernel for the first

        def found(choose, x, dy, k=k):
            best, pull_back = jax.vjp(lambda x: choose(x, k)[0], x)
            return best, choose(x, k)[1], *pull_back(dy)

        results = (
            jax.jit(functools.partial(found, choose))(x, dy[:, :k])
            for choose in (largest_elements, jax.lax.top_k)
        )
        jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("k", [1, 2, 7, 16])
def test_pairs_of_places_have_all_of_the_best(k):
    i, j = _pairs(k)
    assert len(i) <= k * (1 + np.log(k))
    a, b = -np.sort(-RNG.normal(size=(2, 50, k)))
    every = np.sort((a[:, :, None] + b[:, None, :]).reshape(50, -1))[:, ::-1][:, :k]
    np.testing.assert_array_equal(np.sort(a[:, i] + b[:, j])[:, ::-1][:, :k], every)


def test_dead_rows_of_a_memory():
    layer = ProductKeyMemory(8, 5, n_keys=6, heads=2, k=3, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (10, 8))
    result = jax.jit(lutjax.usage(lambda layer, x: layer(x)))(layer, x)["weights"]
    assert result.reads.tolist() == [10 * 2 * 3]
    rows, shares = layer.reads(x)
    np.testing.assert_allclose(shares.reshape(10, 2, 3).sum(-1), 1, rtol=1e-6)
    np.testing.assert_array_equal(result.counts[0], np.bincount(np.ravel(rows), minlength=36))
    assert result.never_read.tolist() == [36 - len(np.unique(rows))]


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(20, 8, rngs=rngs)
        self.memory = NgramMemory(8, rows=300, rngs=rngs)
        self.experts = ProductKeyExperts(8, 20, n_keys=8, heads=2, k=3, rngs=rngs)

    def __call__(self, tokens):
        x = self.embedding(tokens)
        x = x + self.memory(x, tokens)
        return self.experts(x)


@pytest.mark.usefixtures("without_typechecking")
def test_rules_of_some_tables():
    params = {"detectors": jnp.ones((1, 4, 3)), "memory": jnp.ones((1, 4, 3))}
    optimizer = tables.Optimizer(
        tables.SGD(), 0.5, rules={"memory": tables.RowAdagrad()}, tables=set(params)
    )
    state = optimizer.init(params)
    assert {name: set(rows) for name, rows in state.rows.items()} == {
        "detectors": set(),
        "memory": {"sum_of_squares"},
    }
    gradients = jax.tree.map(lambda p: 4 * p, params)
    moved, _ = optimizer.apply(params, gradients, state)
    np.testing.assert_allclose(moved["detectors"], -1.0)
    np.testing.assert_allclose(moved["memory"], 0.5)
    with pytest.raises(ValueError, match=r"Optimizer: rules names \['other'\]; the tables are"):
        tables.Optimizer(tables.SGD(), 0.5, rules={"other": tables.SGD()}, tables=set(params)).init(
            params
        )
    with pytest.raises(
        TypeError, match=r"Optimizer: rules\['memory'\] is 'sgd'; expected a row rule"
    ):
        tables.Optimizer(tables.SGD(), 0.5, rules={"memory": "sgd"}, tables=set(params))


class TestSlow:
    def test_first_scales(self):
        """Unit-length rows in a table addressed by keys, and keys within one over the square root of their size."""
        layer = ProductKeyMemory(64, 48, n_keys=32, rngs=nnx.Rngs(0))
        lengths = np.linalg.norm(layer.weights.get_value(), axis=-1)
        assert abs(lengths.mean() - 1) < 0.02
        assert np.abs(layer.half_keys.get_value()).max() == pytest.approx(32**-0.5, rel=1e-3)
        x = jax.random.normal(jax.random.key(1), (100, 64))
        assert (
            0.2 < jax.jit(layer)(x).std() * np.sqrt(48) < 1
        )  # of 4 heads, each the mean of about 32 rows
        memory = NgramMemory(64, rows=500, rngs=nnx.Rngs(0))
        assert memory.width == 8
        assert np.std(memory.weights.get_value()) == pytest.approx(0.02, rel=0.02)

    def test_rows_that_are_read_move_and_no_others(self):
        """All tables have sparse gradients, and their steps match dense gradients."""
        model = Model(nnx.Rngs(0))
        optimizer = training.Optimizer(
            model, tables.Optimizer(tables.RowAdam(), 0.02, rest=optax.adam(0.01))
        )

        def loss(model, tokens):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        names = {"memory/weights", "experts/down", "experts/up"}

        def tables_of(model):
            return {
                name: np.asarray(operator.attrgetter(name.replace("/", "."))(model)[...])
                for name in names
            }

        before = tables_of(model)
        read = jax.jit(lutjax.usage(lambda model, tokens: model(tokens)))(model, TOKENS[:, :-1])

        @nnx.jit
        def step(model, optimizer, tokens):
            value, gradients = training.value_and_grad(loss)(model, tokens)
            optimizer.update(model, gradients)
            return value

        with jax.numpy_dtype_promotion("standard"):  # optax promotes the number of steps implicitly
            first = step(model, optimizer, jnp.asarray(TOKENS))
            after = tables_of(model)
            for _ in range(30):
                last = step(model, optimizer, jnp.asarray(TOKENS))
        assert last < first - 1
        for name in names:
            moved = (after[name] != before[name]).any(-1)
            counts = np.asarray(read[name].counts)
            assert not moved[counts == 0].any(), name
            assert moved[counts > 0].mean() > 0.9, name

    @pytest.mark.parametrize("kernel", [0, 4])
    def test_texts_that_go_on(self, kernel):
        layer = NgramMemory(6, (2, 4), rows=50, kernel=kernel, rngs=nnx.Rngs(0))
        if kernel:
            layer.conv_kernel = jax.random.normal(jax.random.key(1), (kernel, 6))
        x = jax.random.normal(jax.random.key(2), (3, 14, 6))
        call = jax.jit(lambda *a, **given: layer(*a, **given))
        for segments in (None, SEGMENTS):
            want = call(x, TOKENS, segments=segments)
            history, actual = layer.history((3,)), []
            for first, last in ((0, 1), (1, 2), (2, 9), (9, 9), (9, 14)):
                of_part = None if segments is None else segments[:, first:last]
                y, history = call(
                    x[:, first:last], TOKENS[:, first:last], segments=of_part, history=history
                )
                actual.append(y)
            np.testing.assert_allclose(jnp.concatenate(actual, 1), want, atol=1e-6)

        @jax.jit
        def token_by_token(x, tokens):
            def step(history, given):
                y, history = layer(given[0][:, None], given[1][:, None], history=history)
                return history, y[:, 0]

            return jax.lax.scan(step, layer.history((3,)), (x.swapaxes(0, 1), tokens.T))[
                1
            ].swapaxes(0, 1)

        np.testing.assert_allclose(
            token_by_token(x, jnp.asarray(TOKENS)), call(x, TOKENS), atol=1e-6
        )
