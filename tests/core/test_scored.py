"""Weighted and scored reads compared with a float64 oracle, which loops over samples and tables and uses the closed forms."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax import reads, testing


# ------------------------------------------------------------------------------------- the oracle
def sigmoid(x):
    return 1 / (1 + np.exp(-x))


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


# ------------------------------------------------------------------------------------- values and gradients


def test_the_side_of_zero_is_that_of_its_bit():
    anchors, x = np.array([[0, 1]], np.int32), jnp.zeros(2)
    weights = jnp.array([[[0.0], [1.0], [10.0], [100.0]]])
    y, dx = jax.value_and_grad(
        lambda x: lutjax.scored_lut(x, weights, anchors, {}, read=reads.Blend()).sum()
    )(x)
    assert y == 0.5  # halves of rows 0 and 1
    np.testing.assert_allclose(
        dx, [0.5, 0.0]
    )  # of the share: -0.5 * (1 - 0) * -1, of the first probe alone
    read = reads.Confidence(ways=1)
    y, dx = jax.value_and_grad(
        lambda x: lutjax.scored_lut(x, weights + 1, anchors, read.initial(), read=read).sum()
    )(x)
    assert y == 0
    np.testing.assert_allclose(dx, [-0.25, -0.25])  # exp(gamma L) = 2**-2 for each margin


def test_gradients_near_zero_are_bounded():
    read, anchors = reads.PowersOfTwo(ways=1), np.array([[0]], np.int32)
    weights = jnp.array([[[0.75], [0.75]]])

    def f(x):
        return lutjax.scored_lut(x, weights, anchors, read.initial(), read=read).sum()

    for x in (0.0, 1e-20, 1e-6):
        y, dx = jax.value_and_grad(f)(jnp.array([x]))
        assert y == 0
        np.testing.assert_allclose(
            abs(dx), 2.0**8 * 0.75 / 2, rtol=1e-4
        )  # the slope of the score is 1 / 2


# ------------------------------------------------------------------------------------- integers


# ------------------------------------------------------------------------------------- the primitive


def test_a_coefficient_of_zero_reads_and_adds_nothing():
    weights = jnp.ones((2, 3, 2)).at[:, 1].set(jnp.inf).at[:, 2].set(jnp.nan)
    index, c = jnp.array([[[0, 1], [2, 0]]] * 2), jnp.array([[[2.0, 0.0], [0.0, 3.0]]] * 2)
    y, pullback = jax.vjp(lambda w: lutjax.weighted_lookup(w, index, c, groups=2), weights)
    np.testing.assert_array_equal(y[0], [[2, 2], [3, 3]])
    (dw,) = pullback(jnp.full_like(y, jnp.inf).at[0].set(1.0))  # the cotangent of the second sample
    np.testing.assert_array_equal(dw[0, 1:], 0)
    np.testing.assert_array_equal(dw[1, 1:], 0)


# ------------------------------------------------------------------------------------- reads of users
@dataclasses.dataclass(frozen=True)
class Nearest(reads.Read):
    """One row per flipped comparison with one learned scalar, and one with only a gradient."""

    @property
    def valued(self):
        return 2

    def initial(self):
        return {"log_scale": jnp.float32(0.5)}

    def select(self, u, scalars):
        index, flip, closest = reads.address(u)
        c = closest * jnp.exp(scalars["log_scale"])
        return [
            (index, c),
            (index ^ 1, 2 * c),
            (index ^ flip, reads.straight_through(jnp.zeros_like(c), c)),
        ]


def test_a_read_of_your_own():
    read, key = Nearest(), jax.random.key(2)
    x, weights = jax.random.normal(key, (5, 2, 4)), jax.random.normal(key, (6, 4, 3))
    anchors, dy = lutjax.sample_anchors(key, 4, 6, 2), jax.random.normal(key, (5, 2, 3))
    arguments = {"x": x, "weights": weights, "scalars": read.initial()}

    def composed(a):
        index, coefficients = read(lutjax.margins(a["x"], anchors, groups=2), a["scalars"])
        return lutjax.weighted_lookup(
            a["weights"], index, coefficients, groups=2, valued=read.valued
        )

    def fused(a):
        return lutjax.scored_lut(a["x"], a["weights"], anchors, a["scalars"], read=read, groups=2)

    @jax.jit
    def results(a):
        each = [jax.vjp(f, a) for f in (fused, composed)]
        return [(y, pull(dy)[0]) for y, pull in each]

    (y, of_fused), (expected, of_composed) = results(arguments)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    for a, e in zip(jax.tree.leaves(of_fused), jax.tree.leaves(of_composed), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("detectors", [18, 3])  # of three groups
def test_blocks_of_tables_that_do_not_divide(detectors, monkeypatch):
    """CPUs score several tables at once."""
    from lutjax.kernels._xla import scored_lut

    monkeypatch.setattr(scored_lut, "_IN_BLOCK", 1)
    testing.check(
        testing.case("scored_lut", "groups", detectors=detectors), "xla", transformation="jit"
    )


def test_no_array_of_all_tables_and_samples():
    n, groups, each = 2048, 4, 32
    x, anchors = jnp.ones((n, groups, 8)), jnp.zeros((groups * each, 3, 2), jnp.int32)
    read, weights = reads.Confidence(), jnp.ones((groups * each, 8, 4))

    def f(x, w):
        return lutjax.scored_lut(x, w, anchors, read.initial(), read=read, groups=groups).sum()

    memory = jax.jit(jax.grad(f)).lower(x, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * groups * each * n * 3  # the margins alone


# ------------------------------------------------------------------------------------- bad input
X, ANCHORS, WEIGHTS = (
    np.ones(s, t) for s, t in (((5, 2, 4), "f4"), ((6, 2, 2), "i4"), ((6, 4, 3), "f4"))
)
INDEX, CONFIDENCE = np.zeros((5, 6, 2), np.int32), reads.Confidence()


def detected():
    return lutjax.detect_signs(jnp.ones((5, 6, 2)))


def scored_lut(
    x=X, weights=WEIGHTS, anchors=ANCHORS, scalars=None, read=CONFIDENCE, groups=2, **options
):
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


def test_integers_have_no_gradient():
    with pytest.raises(TypeError, match="tables of integers have no gradient"):
        jax.grad(lambda x: scored_lut(x, QUANTIZED, read=POWERS).sum())(X)
