"""Weighted and scored reads against an oracle in float64 that loops over samples and tables and knows the closed forms."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_except

import lutjax
from lutjax import optim as tables, reads

READS = {
    "hard": reads.Hard(),
    "blend": reads.Blend(),
    "soft sign": reads.SoftSign(),
    "hard soft sign": reads.SoftSign(hard=True),
    "confidence": reads.Confidence(ways=2),
    "confidence, one way": reads.Confidence(ways=1),
    "powers": reads.PowersOfTwo(ways=2),
    "powers, one way": reads.PowersOfTwo(ways=1),
}
RECORDED = ("blend", "soft sign", "hard soft sign", "confidence, one way")  # test_golden tries these, too
OTHER_SCALARS = {"log_soft": -0.4, "log_select": -0.9, "log_beta": 0.5, "log_gamma": 0.2, "log_tau": -0.3}


# ------------------------------------------------------------------------------------- the oracle
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def blended(name, m, j, s):
    """The share of the neighbor, with its derivatives in the distances and scalars."""
    of_m, closest = np.zeros(len(m)), m[j]
    if name in ("hard", "blend"):
        of_m[j] = -0.5 / (1 + closest) ** 2
        return 0.5 / (1 + closest), of_m, {}
    soft, select = math.exp(s["log_soft"]), math.exp(s["log_select"])
    w = sigmoid(-2 * closest / (soft + closest) / select)
    slope = 2 * w * (1 - w) / select
    of_m[j] = -slope * soft / (soft + closest) ** 2
    return (
        w,
        of_m,
        {"log_soft": -soft * of_m[j] * closest / soft, "log_select": slope * closest / (soft + closest)},
    )


def scored(m, s):
    """The score, with its derivatives in the distances and scalars."""
    beta, gamma = math.exp(s["log_beta"]), math.exp(s["log_gamma"])
    logs = -np.log1p(np.exp(-beta * m)).sum()
    score, near = m.sum() * math.exp(gamma * logs), sigmoid(-beta * m)
    of_m = math.exp(gamma * logs) + score * gamma * beta * near
    return (
        score,
        of_m,
        {"log_beta": score * gamma * beta * (m * near).sum(), "log_gamma": score * gamma * logs},
    )


def powers_of_two(m, j, s, n_ways):
    """The powers, of rows that are not read too, and whether each is read."""
    beta, gamma = math.exp(s["log_beta"]), math.exp(s["log_gamma"])
    logs = -np.log1p(np.exp(-beta * m)).sum()
    with np.errstate(divide="ignore"):
        k, q = np.log2(m.sum()) + gamma * logs / math.log(2), 0
    if n_ways == 2:
        q = min(math.floor(2 * m[j] / (math.exp(s["log_tau"]) * math.log(2)) + 0.5), 64)
        k -= math.log2(1 + 2.0**-q) if q < 8 else 0
    k = np.floor(k + 0.5)
    kept = int(min(max(k, -3), 4))
    return [2.0**kept, 2.0 ** (kept - q)], [k >= -3, k >= -3 and q <= 3]


def ways_of(name, u, s):
    """Row, coefficient, and the derivatives of its surrogate, of each way."""
    m, j = np.abs(u), int(np.abs(u).argmin())
    row = sum(1 << i for i, v in enumerate(u) if v > 0)
    rows = row, row ^ (1 << j)
    if name in ("hard", "blend", "soft sign", "hard soft sign"):
        w, of_m, of_s = blended(name, m, j, s)
        negative = {key: -value for key, value in of_s.items()}
        values = (1.0, 0.0) if "hard" in name else (1 - w, w)
        return list(zip(rows, values, (-of_m, of_m), (negative, of_s), strict=True))
    n_ways = 1 if "one way" in name else 2
    score, of_m, of_s = scored(m, s)
    exact = [(score, of_m, of_s)]
    if n_ways == 2:
        tau = math.exp(s["log_tau"])
        v, only_j = sigmoid(-2 * m[j] / tau), np.eye(len(m))[j]
        slope = -2 / tau * v * (1 - v)
        by_tau = -score * slope * m[j]
        exact = [
            (score * (1 - v), of_m * (1 - v) - score * slope * only_j,
             {**{key: value * (1 - v) for key, value in of_s.items()}, "log_tau": -by_tau}),
            (score * v, of_m * v + score * slope * only_j,
             {**{key: value * v for key, value in of_s.items()}, "log_tau": by_tau}),
        ]  # fmt: skip
    if "powers" not in name:
        return [(r, *e) for r, e in zip(rows, exact, strict=False)]
    found = []
    for r, (value, dm, ds), power, is_read in zip(rows, exact, *powers_of_two(m, j, s, n_ways), strict=False):
        ratio = min(power / max(value, 1e-30), 2.0**8)
        found.append((r, power * is_read, ratio * dm, {key: ratio * d for key, d in ds.items()}))
    return found


def rounded_tables(weights, groups):
    """Integers and exponents: the least power of two with which the largest number of a group and output is at most 128."""
    grouped = weights.reshape(groups, -1, weights.shape[2])
    e = np.ceil(np.log2(np.maximum(np.abs(grouped).max(1), 1e-30))) - 7
    whole = np.clip(np.floor(grouped / 2.0 ** e[:, None] + 0.5), -128, 127)
    return whole.reshape(weights.shape), e.astype(int)


def oracle(name, x, weights, anchors, s, dy, groups=1, sum_groups=False, keep=None):
    """The output ``[B, G or 1, O]`` and every gradient; ``x [B, G or 1, I]``."""
    n, (n_tables, _, n_outputs) = len(x), weights.shape
    read = weights
    if "powers" in name:
        whole, e = rounded_tables(weights, groups)
        read = whole * np.repeat(2.0**e, n_tables // groups, 0)[:, None]
    y, dx, dweights = np.zeros((n, groups, n_outputs)), np.zeros_like(x), np.zeros_like(weights)
    dscalars, dkeep = dict.fromkeys(s, 0.0), np.zeros((n, n_tables))
    for b, t in np.ndindex(n, n_tables):
        g = t // (n_tables // groups)
        h, factor = g % x.shape[1], 1.0 if keep is None else keep[b, t]
        pairs = anchors.ndim == 3
        a = anchors[t, :, 0] if pairs else anchors[t]
        u = x[b, h, a] - x[b, h, anchors[t, :, 1]] if pairs else x[b, h, a]
        cotangent = dy[b, 0 if sum_groups else g]
        for row, value, of_m, of_s in ways_of(name, u, s):
            if factor * value != 0:
                y[b, g] += factor * value * read[t, row]
                dweights[t, row] += factor * value * cotangent
            product = cotangent @ read[t, row]
            dkeep[b, t] += product * value
            for key, d in of_s.items():
                dscalars[key] += factor * product * d
            du = factor * product * of_m * np.where(u > 0, 1, -1)
            np.add.at(dx[b, h], a, du)
            if pairs:
                np.subtract.at(dx[b, h], anchors[t, :, 1], du)
    y = y.sum(1, keepdims=True) if sum_groups else y
    return y, {"x": dx, "weights": dweights, "keep": dkeep, **dscalars}


# ------------------------------------------------------------------------------------- values and gradients
@dataclasses.dataclass(frozen=True)
class Layer:
    groups: int = 1
    shared: bool = False
    sum_groups: bool = False
    single: bool = False
    keep: bool = False
    bits: int = 3
    ties: bool = False
    each: int = 3  # tables of a group


LAYERS = {
    "hard": Layer(groups=2, keep=True),
    "blend": Layer(groups=2, shared=True, ties=True),
    "soft sign": Layer(groups=3, sum_groups=True, single=True),
    "hard soft sign": Layer(bits=1),
    "confidence": Layer(groups=2, keep=True, ties=True, bits=2),
    "confidence, one way": Layer(groups=2, shared=True, sum_groups=True, each=5),
    "powers": Layer(groups=2, bits=4),
    "powers, one way": Layer(single=True, keep=True, bits=2),
}


def layer(name, how, seed=0):
    rng = np.random.default_rng([seed, *name.encode()])
    n, n_inputs, n_outputs, n_tables = 5, 6, 3, how.groups * how.each
    x = rng.normal(size=(n, 1 if how.shared else how.groups, n_inputs))
    if how.ties:
        x = np.round(x)
        x[0] = 0
    if "powers" in name:
        x[0] *= 0.02  # reads nothing
        x[1] *= 8  # the largest powers
    anchors = np.stack([rng.permutation(n_inputs)[: how.bits] for _ in range(n_tables)])
    if not how.single:
        other = (anchors + rng.integers(1, n_inputs, anchors.shape)) % n_inputs
        anchors = np.stack([anchors, other], -1)
    weights = rng.normal(size=(n_tables, 2**how.bits, n_outputs))
    if "powers" in name:
        weights[0, 0, 0] = 4.0  # clamped where it is the largest number
        weights[..., 1] = 0
    s = {key: OTHER_SCALARS[key] for key in READS[name].initial()}
    keep = rng.integers(0, 3, (n, n_tables)) / 2 if how.keep else None
    dy = rng.normal(size=(n, 1 if how.sum_groups else how.groups, n_outputs))
    return x, weights, anchors.astype(np.int32), s, dy, keep


def differentiated(name, how, x, weights, anchors, s, dy, keep, **options):
    arguments = {
        "x": jnp.asarray(x),
        "weights": jnp.asarray(weights),
        **{k: jnp.asarray(v) for k, v in s.items()},
    }
    if keep is not None:
        arguments["keep"] = jnp.asarray(keep)

    def op(a):
        scalars = {key: a[key] for key in s}
        return lutjax.scored_lut(
            a["x"], a["weights"], anchors, scalars, read=READS[name], groups=how.groups, keep=a.get("keep"),
            sum_groups=how.sum_groups, **options,
        )  # fmt: skip

    y, pullback = jax.vjp(op, arguments)
    return y, pullback(jnp.asarray(dy, y.dtype))[0]


@pytest.mark.parametrize("name", slow_except(READS, "hard", "confidence", "powers, one way"))
def test_reads_are_their_closed_forms(name):
    how = LAYERS[name]
    arrays = layer(name, how)
    with jax.enable_x64(True):
        y, found = differentiated(name, how, *arrays)
        x, weights, anchors, s, dy, keep = arrays
        expected, gradients = oracle(name, x, weights, anchors, s, dy, how.groups, how.sum_groups, keep)
        np.testing.assert_allclose(y, expected, rtol=1e-10, atol=1e-10)
        assert np.abs(expected).max() > 0.1
        for key, value in found.items():
            np.testing.assert_allclose(value, gradients[key], rtol=1e-9, atol=1e-9, err_msg=key)


def test_the_side_of_zero_is_that_of_its_bit():
    """Margins that are 0 have slope -1, and of equal ones the first is flipped."""
    anchors, x = np.array([[0, 1]], np.int32), jnp.zeros(2)
    weights = jnp.array([[[0.0], [1.0], [10.0], [100.0]]])
    y, dx = jax.value_and_grad(
        lambda x: lutjax.scored_lut(x, weights, anchors, {}, read=reads.Blend()).sum()
    )(x)
    assert y == 0.5  # halves of rows 0 and 1
    np.testing.assert_allclose(dx, [0.5, 0.0])  # of the share: -0.5 * (1 - 0) * -1, of the first probe alone
    read = reads.Confidence(ways=1)
    y, dx = jax.value_and_grad(
        lambda x: lutjax.scored_lut(x, weights + 1, anchors, read.initial(), read=read).sum()
    )(x)
    assert y == 0
    np.testing.assert_allclose(dx, [-0.25, -0.25])  # exp(gamma L) = 2**-2 for each margin


def test_gradients_near_zero_are_bounded():
    """The ratio of a power and its coefficient ends at 2**8."""
    read, anchors = reads.PowersOfTwo(ways=1), np.array([[0]], np.int32)
    weights = jnp.array([[[0.75], [0.75]]])

    def f(x):
        return lutjax.scored_lut(x, weights, anchors, read.initial(), read=read).sum()

    for x in (0.0, 1e-20, 1e-6):
        y, dx = jax.value_and_grad(f)(jnp.array([x]))
        assert y == 0
        np.testing.assert_allclose(abs(dx), 2.0**8 * 0.75 / 2, rtol=1e-4)  # the slope of the score is 1 / 2


@pytest.mark.slow
def test_nan_shows_in_its_sample_alone():
    how = Layer(groups=2)
    for name in ("confidence", "powers"):
        x, weights, anchors, s, dy, _ = layer(name, how)
        x[1, :, anchors[0, 0, 0]] = np.nan
        y, found = differentiated(name, how, *(np.float32(a) for a in (x, weights)), anchors, s, dy, None)
        assert np.isnan(y[1]).any(), name
        assert np.isfinite(np.delete(y, 1, 0)).all(), name
        assert np.isfinite(np.delete(found["x"], 1, 0)).all(), name


# ------------------------------------------------------------------------------------- integers
@pytest.mark.slow
@pytest.mark.parametrize("name", ["powers", "powers, one way"])
def test_the_integer_read_is_the_trained_one(name):
    """Bit for bit, where floats hold the sums exactly."""
    how = LAYERS[name]
    x, weights, anchors, s, _, _ = layer(name, how, seed=1)
    x, weights = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32)
    quantized = lutjax.quantize_tables(weights, groups=how.groups)
    whole, e = rounded_tables(np.asarray(weights, np.float64), how.groups)
    np.testing.assert_array_equal(quantized.values, whole)
    np.testing.assert_array_equal(quantized.exponents, e)
    for sum_groups in (False, True):
        options = {"read": READS[name], "groups": how.groups, "sum_groups": sum_groups}
        trained = lutjax.scored_lut(x, weights, anchors, s, **options)
        np.testing.assert_array_equal(lutjax.scored_lut(x, quantized, anchors, s, **options), trained)
    unknown = x.at[1].set(jnp.nan)
    y = lutjax.scored_lut(unknown, quantized, anchors, s, read=READS[name], groups=how.groups)
    assert np.isnan(y[1]).all()
    assert np.isfinite(np.delete(y, 1, 0)).all()


# ------------------------------------------------------------------------------------- the primitive
def test_weighted_lookup_is_its_sum():
    rng = np.random.default_rng(0)
    weights, index = rng.normal(size=(4, 5, 3)), rng.integers(-1, 7, (6, 4, 3)).astype(np.int32)
    c, dy = rng.integers(-1, 2, (6, 4, 3)) * rng.normal(size=(6, 4, 3)), rng.normal(size=(6, 2, 3))
    y, dw, dc = np.zeros((6, 2, 3)), np.zeros_like(weights), np.zeros_like(c)
    for b, t, k in np.ndindex(c.shape):
        row = min(max(index[b, t, k], 0), 4)
        dc[b, t, k] = dy[b, t // 2] @ weights[t, row]
        if k < 2:
            y[b, t // 2] += c[b, t, k] * weights[t, row]
            dw[t, row] += c[b, t, k] * dy[b, t // 2]
    with jax.enable_x64(True):
        found, pullback = jax.vjp(
            lambda w, c: lutjax.weighted_lookup(w, index, c, groups=2, valued=2),
            jnp.asarray(weights),
            jnp.asarray(c),
        )
        np.testing.assert_allclose(found, y, atol=1e-12)
        for actual, expected in zip(pullback(jnp.asarray(dy)), (dw, dc), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("groups", [slow(None), 2])
def test_a_coefficient_of_zero_reads_and_adds_nothing(groups):
    weights = jnp.ones((2, 3, 2)).at[:, 1].set(jnp.inf).at[:, 2].set(jnp.nan)
    index, c = jnp.array([[[0, 1], [2, 0]]] * 2), jnp.array([[[2.0, 0.0], [0.0, 3.0]]] * 2)
    y, pullback = jax.vjp(lambda w: lutjax.weighted_lookup(w, index, c, groups=groups), weights)
    np.testing.assert_array_equal(y[0], [5, 5] if groups is None else [[2, 2], [3, 3]])
    (dw,) = pullback(jnp.full_like(y, jnp.inf).at[0].set(1.0))  # the cotangent of the second sample
    np.testing.assert_array_equal(dw[0, 1:], 0)
    np.testing.assert_array_equal(dw[1, 1:], 0)


@pytest.mark.slow
def test_a_lookup_in_groups_is_one_for_each_group():
    key = jax.random.key(0)
    weights, x = jax.random.normal(key, (6, 4, 3)), jax.random.normal(key, (5, 2, 4))
    anchors = lutjax.sample_anchors(key, 4, 6, 2)
    targets = jax.random.randint(key, (1, 4, 3), -1, 5)
    for shared in (x, x[:, :1]):
        each = [
            (shared[:, g % shared.shape[1]], weights[i], anchors[i])
            for g, i in enumerate((np.s_[:3], np.s_[3:]))
        ]
        y = lutjax.lut(shared, weights, anchors, groups=2)
        np.testing.assert_allclose(y, np.stack([lutjax.lut(*a) for a in each], 1), rtol=1e-6)
        y = lutjax.sparse_lut(shared, weights, anchors, targets, 5, groups=2)
        expected = np.stack([lutjax.sparse_lut(*a, targets, 5) for a in each], 1)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert lutjax.lut(x[:, 0], weights, anchors).shape == (5, 3)
    assert lutjax.lut(x[:, :1], weights, anchors, groups=1).shape == (5, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["lookup", "weighted_lookup", "scored_lut"])
def test_tables_of_groups_learn_in_place(op):
    """Steps by factors, of a rule that adds and one that does not, equal those by arrays."""
    key = jax.random.key(1)
    x, anchors = jax.random.normal(key, (5, 2, 4)), lutjax.sample_anchors(key, 4, 6, 2)
    read, dy = reads.Confidence(), jax.random.normal(key, (5, 2, 3))
    d = lutjax.detect(x[:, 0], anchors)

    def loss(p):
        w = p["weights"]
        if op == "lookup":
            y = lutjax.lookup(w, d, groups=2)
        elif op == "weighted_lookup":
            index = jnp.stack([d.index, d.index ^ d.flip], -1)
            y = lutjax.weighted_lookup(w, index, jnp.stack([d.margin, 0 * d.margin], -1), groups=2)
        else:
            y = lutjax.scored_lut(x, w, anchors, read.initial(), read=read, groups=2)
        return jnp.vdot(y, dy)

    params = {"weights": jax.random.normal(key, (6, 4, 3))}
    _, gradients = tables.value_and_grad(loss)(params)
    dense = jax.grad(loss)(params)["weights"]
    np.testing.assert_allclose(gradients["weights"].to_dense(), dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(tables.global_norm(gradients), jnp.linalg.norm(dense), rtol=1e-5)
    for rule in (tables.SGD(), tables.RowAdagrad()):
        state = rule.init(params["weights"])
        new, _ = lutjax.update_table(params["weights"], gradients["weights"], 0.5, rule, state)
        expected, _ = rule.step(params["weights"], dense, state, jnp.float32(0.5))
        touched = np.abs(dense).max(-1, keepdims=True) > 0
        expected = np.where(touched, expected, params["weights"])
        np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-5, err_msg=str(rule))


# ------------------------------------------------------------------------------------- reads of users
@dataclasses.dataclass(frozen=True)
class Nearest(reads.Read):
    """A row for each comparison that it flips, with one learned scalar, and one that has a gradient alone."""

    @property
    def valued(self):
        return 2

    def initial(self):
        return {"log_scale": jnp.float32(0.5)}

    def select(self, u, scalars):
        index, flip, closest = reads.address(u)
        c = closest * jnp.exp(scalars["log_scale"])
        return [(index, c), (index ^ 1, 2 * c), (index ^ flip, reads.straight_through(jnp.zeros_like(c), c))]


@pytest.mark.slow
def test_a_read_of_your_own():
    read, key = Nearest(), jax.random.key(2)
    x, weights = jax.random.normal(key, (5, 2, 4)), jax.random.normal(key, (6, 4, 3))
    anchors, dy = lutjax.sample_anchors(key, 4, 6, 2), jax.random.normal(key, (5, 2, 3))
    arguments = {"x": x, "weights": weights, "scalars": read.initial()}

    def composed(a):
        index, coefficients = read(lutjax.margins(a["x"], anchors, groups=2), a["scalars"])
        return lutjax.weighted_lookup(a["weights"], index, coefficients, groups=2, valued=read.valued)

    def fused(a):
        return lutjax.scored_lut(a["x"], a["weights"], anchors, a["scalars"], read=read, groups=2)

    (expected, of_composed), (y, of_fused) = jax.vjp(composed, arguments), jax.vjp(fused, arguments)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        of_fused(dy)[0],
        of_composed(dy)[0],
    )


@pytest.mark.slow
@pytest.mark.parametrize("each", [9, 1])
def test_blocks_of_tables_that_do_not_divide(each, monkeypatch):
    """CPUs score several tables at once."""
    from lutjax.kernels._xla import scored_lut

    monkeypatch.setattr(scored_lut, "_IN_BLOCK", 1)
    how = Layer(groups=2, keep=True, each=each)
    x, weights, anchors, s, dy, keep = layer("confidence", how, seed=each)
    y, found = differentiated("confidence", how, x, weights, anchors, s, dy, keep)
    expected, gradients = oracle("confidence", x, weights, anchors, s, dy, 2, False, keep)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    for key, value in found.items():
        np.testing.assert_allclose(value, gradients[key], rtol=1e-3, atol=1e-4, err_msg=key)


def test_no_array_of_all_tables_and_samples():
    n, groups, each = 2048, 4, 32
    x, anchors = jnp.ones((n, groups, 8)), jnp.zeros((groups * each, 3, 2), jnp.int32)
    read, weights = reads.Confidence(), jnp.ones((groups * each, 8, 4))

    def f(x, w):
        return lutjax.scored_lut(x, w, anchors, read.initial(), read=read, groups=groups).sum()

    memory = jax.jit(jax.grad(f)).lower(x, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * groups * each * n * 3  # the margins alone


# ------------------------------------------------------------------------------------- bad input
X, ANCHORS, WEIGHTS = (np.ones(s, t) for s, t in (((5, 2, 4), "f4"), ((6, 2, 2), "i4"), ((6, 4, 3), "f4")))
INDEX, CONFIDENCE = np.zeros((5, 6, 2), np.int32), reads.Confidence()


def detected():
    return lutjax.detect_signs(jnp.ones((5, 6, 2)))


def scored_lut(x=X, weights=WEIGHTS, anchors=ANCHORS, scalars=None, read=CONFIDENCE, groups=2, **options):
    scalars = read.initial() if scalars is None else scalars
    return lutjax.scored_lut(x, weights, anchors, scalars, read=read, groups=groups, **options)


QUANTIZED = lutjax.QuantizedTables(np.ones((6, 4, 3), np.int8), np.zeros((2, 3), np.int32))
POWERS = reads.PowersOfTwo()
BAD = {
    "coefficients of another shape": (
        lambda: lutjax.weighted_lookup(WEIGHTS, INDEX, jnp.ones((5, 6, 3))),
        r"weighted_lookup: coefficients is float32\[5, 6, 3\]; index is int32\[5, 6, 2\], and both must have the same shape",
    ),
    "index of other tables": (
        lambda: lutjax.weighted_lookup(WEIGHTS, INDEX[:, :5], jnp.ones((5, 5, 2))),
        r"index is int32\[5, 5, 2\]; its last axis but one must have size 6, the number of tables",
    ),
    "integer coefficients": (lambda: lutjax.weighted_lookup(WEIGHTS, INDEX, INDEX), r"coefficients is int32"),
    "more ways with values than ways": (
        lambda: lutjax.weighted_lookup(WEIGHTS, INDEX, jnp.ones(INDEX.shape), valued=3),
        r"valued is int 3; it must be from 0 to 2, the number of ways",
    ),
    "fractional ways": (
        lambda: lutjax.weighted_lookup(WEIGHTS, INDEX, jnp.ones(INDEX.shape), valued=1.5),
        r"valued is float 1.5; expected None or a Python int",
    ),
    "groups that do not divide": (
        lambda: lutjax.weighted_lookup(WEIGHTS, INDEX, jnp.ones(INDEX.shape), groups=4),
        r"groups is int 4; it must divide the number of detectors, 6",
    ),
    "groups of a look-up": (lambda: lutjax.lookup(WEIGHTS, detected(), groups=5), r"lookup: groups is int 5; it must divide"),
    "no groups": (lambda: lutjax.lookup(WEIGHTS, detected(), groups=0), r"lookup: groups is int 0; there must be at least 1"),
    "fractional groups": (lambda: lutjax.lookup(WEIGHTS, detected(), groups=1.5), r"groups is float 1.5; expected None or a Python int"),
    "inputs of other groups": (
        lambda: lutjax.lut(jnp.ones((5, 3, 4)), WEIGHTS, ANCHORS, groups=2),
        r"lut: x is float32\[5, 3, 4\]; its last axis but one must have size 2, the number of groups, or 1",
    ),
    "groups of a sparse look-up": (
        lambda: lutjax.sparse_lookup(WEIGHTS, detected(), jnp.zeros((1, 1, 3), int), 4, groups=4),
        r"sparse_lookup: groups is int 4",
    ),
    "groups of margins": (lambda: lutjax.margins(X, ANCHORS, groups=4), r"margins: groups is int 4"),
    "groups of scored tables": (lambda: scored_lut(groups=4), r"scored_lut: groups is int 4"),
    "integers without a scale": (
        lambda: scored_lut(weights=QUANTIZED.values, read=POWERS),
        r"weights is int8\[6, 4, 3\]; tables of integers need their scale",
    ),
    "exponents of another shape": (
        lambda: scored_lut(weights=dataclasses.replace(QUANTIZED, exponents=jnp.zeros((1, 3), jnp.int32)), read=POWERS),
        r"weights.exponents is int32\[1, 3\]; expected a power for each group and output, \[2, 3\]",
    ),
    "floats with a scale": (
        lambda: scored_lut(weights=dataclasses.replace(QUANTIZED, values=WEIGHTS), read=POWERS),
        r"weights.values is float32\[6, 4, 3\]; its dtype must be int8",
    ),
    "integers read by floats": (lambda: scored_lut(weights=QUANTIZED), r"tables of integers are read by lutjax.reads.PowersOfTwo"),
    "integers are not dropped": (
        lambda: scored_lut(weights=QUANTIZED, read=POWERS, keep=jnp.ones((5, 6))),
        r"keep is float32\[5, 6\]; tables of integers are not trained",
    ),
    "integers of other tables": (
        lambda: scored_lut(weights=dataclasses.replace(QUANTIZED, values=QUANTIZED.values[:4]), read=POWERS),
        r"weights is int8\[4, 4, 3\]; anchors need 6 tables of 2\*\*2 rows",
    ),
    "scalars that are not finite": (
        lambda: scored_lut(scalars={**CONFIDENCE.initial(), "log_tau": np.float32(np.nan)}),
        r"scalars\['log_tau'\] is nan; it must be finite",
    ),
    "a missing scalar": (
        lambda: scored_lut(scalars={"log_beta": 0.0, "log_gamma": 0.0}),
        r"scalars is \['log_beta', 'log_gamma'\]; Confidence\(ways=2\) needs \['log_beta', 'log_gamma', 'log_tau'\]",
    ),
    "one scalar too many": (lambda: scored_lut(scalars={"log_tau": 0.0}, read=reads.Hard()), r"scalars is \['log_tau'\]; Hard\(\) needs \[\]"),
    "a list of scalars": (lambda: scored_lut(scalars=[0.0] * 3), r"scalars is list .* needs"),
    "several numbers in a scalar": (
        lambda: scored_lut(scalars={**CONFIDENCE.initial(), "log_tau": jnp.zeros(2)}),
        r"scalars\['log_tau'\] is float32\[2\]; expected one number",
    ),
    "anchors of three": (lambda: scored_lut(anchors=jnp.zeros((6, 2, 3), int)), r"anchors is int32\[6, 2, 3\]; its last axis must have size 2"),
    "anchors of floats": (lambda: scored_lut(anchors=jnp.zeros((6, 2))), r"anchors is float32\[6, 2\]; its dtype must be int32"),
    "no comparison": (lambda: scored_lut(anchors=ANCHORS[:, :0]), r"a score needs at least one comparison"),
    "rows of other bits": (lambda: scored_lut(weights=WEIGHTS[:, :2]), r"weights is float32\[6, 2, 3\]"),
    "factors of other tables": (lambda: scored_lut(keep=jnp.ones((5, 5))), r"keep is float32\[5, 5\]; its last axis must have size 6"),
    "no read": (lambda: lutjax.scored_lut(X, WEIGHTS, ANCHORS, {}, read="hard", groups=2), r"read is str 'hard'; expected one of lutjax.reads"),
    "three ways": (lambda: reads.Confidence(ways=3), r"Confidence: ways is 3; it must be 1 or 2"),
    "rows that are no power of two": (lambda: lutjax.cell_total_variation(jnp.ones((2, 3, 1))), r"must be a power of two"),
    "groups of quantized tables": (lambda: lutjax.quantize_tables(WEIGHTS, groups=4), r"quantize_tables: groups is int 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("without_typechecking")
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
    with pytest.raises((ValueError, TypeError), match=message):  # also while tracing
        jax.jit(call)()


@pytest.mark.slow
def test_integers_have_no_gradient():
    with pytest.raises(TypeError, match="tables of integers have no gradient"):
        jax.grad(lambda x: scored_lut(x, QUANTIZED, read=POWERS).sum())(X)
