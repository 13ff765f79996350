"""Table row reads: counts compared with loops, in every library, under jit and on several devices."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax.training import reports

BATCH, LENGTH, INPUTS, T = 3, 4, 6, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, INPUTS)).astype(np.float32)


def anchors(n, inputs=INPUTS, seed=2):
    return lutjax.sample_anchors(jax.random.key(seed), inputs, T, n)


def test_statistics_by_loops():
    counts = np.array([[5, 0, 2, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 7, 0, 0]])
    result = lutjax.Usage(jnp.asarray(counts, jnp.int32))
    for t, table in enumerate(counts):
        shares = [c / sum(table) for c in table if c]
        assert result.reads[t] == sum(table)
        assert result.never_read[t] == 4 - len(shares)
        np.testing.assert_allclose(
            result.entropy[t], -sum(p * np.log2(p) for p in shares), rtol=1e-12
        )
        assert result.largest_share[t] == max(shares, default=0)
    assert not np.signbit(result.entropy).any()
    twice = result + result
    np.testing.assert_array_equal(twice.counts, 2 * counts)
    np.testing.assert_array_equal(twice.entropy, result.entropy)
    (table,) = reports.tables({"a": twice})
    assert (table.tables, table.rows, table.reads, table.never_read) == (4, 4, 38, 8)
    assert "never read 8 of 16 rows" in table.line()
    assert json.loads(json.dumps(table.entropy)) == result.entropy.tolist()


def test_counts_beyond_int32_are_refused(monkeypatch):
    """Counts are bounded in one call before counting, and, for a sum over batches, when inspected."""
    anchors, weights = np.int32([[[0, 1]]]), jnp.ones((1, 2, 3))
    counted = lutjax.usage(lambda w, x: lutjax.lut(x, w, anchors))
    monkeypatch.setattr("lutjax.tables._usage._MOST_READS", 4)
    assert counted(weights, jnp.ones((4, 2)))["lookup 1"].reads == 4
    with pytest.raises(
        ValueError, match="lookup reads each table up to 5 times per call, which exceeds int32"
    ):
        counted(weights, jnp.ones((5, 2)))
    many = lutjax.Usage(jnp.full((1, 2), 2**30, jnp.int32))
    assert (many.reads == 2**31).all()
    with pytest.raises(ValueError, match=r"exceeded int32\. Add batches in NumPy's int64"):
        _ = (many + many).reads


def test_a_look_up_inside_of_a_transformation_is_refused():
    pairs, table = anchors(3), jnp.zeros((T, 8, 2))
    for transform in (jax.jit, jax.checkpoint, jax.vmap):
        inside = lutjax.usage(
            lambda table, x, of=transform: of(lambda x: lutjax.lut(x, table, pairs))(x)
        )
        with pytest.raises(
            ValueError, match=r"looked up inside a jit.*Count inside the transformation"
        ):
            inside(table, X)
