"""Anchor pairs drawn without replacement, and unavoidable repetitions."""

import itertools
import warnings

import jax
import numpy as np
import pytest
from anchor_pairs import assert_without_replacement, pairs_of
from flax import nnx

import lutjax
from lutjax import wiring
from lutjax.layers import nnx as layers

PAIRS = {
    False: [[[4, 0], [1, 3]], [[2, 3], [2, 4]], [[0, 4], [0, 2]]],
    True: [[[0, 4], [3, 4]], [[2, 3], [0, 3]], [[1, 4], [2, 4]]],
}
"""Anchor pairs from earlier versions, for one key: with replacement and without."""


@pytest.mark.parametrize(
    ("inputs", "detectors", "bits", "groups"),
    [(4, 10, 5, 2), (2, 3, 1, 3)],
)
def test_distinct(inputs, detectors, bits, groups):
    """Permutations starting inside a detector, longer than all detectors, and shorter than one."""
    key = jax.random.key(3)
    anchors = lutjax.sample_anchors(key, inputs, detectors, bits, distinct=True, groups=groups)
    assert anchors.shape == (detectors, bits, 2)
    assert anchors.dtype == np.int32
    each = np.asarray(anchors).reshape(groups, -1, bits, 2)
    for group in each:
        assert_without_replacement(group, np.arange(inputs))
    if inputs > 2:
        assert all(np.any(each[0] != other) for other in each[1:]), "a permutation for each group"
        other = lutjax.sample_anchors(jax.random.key(4), inputs, detectors, bits, distinct=True)
        assert np.any(anchors != other)
    again = jax.jit(
        lambda k: lutjax.sample_anchors(k, inputs, detectors, bits, distinct=True, groups=groups)
    )(key)
    np.testing.assert_array_equal(again, anchors)


def test_distinct_of_candidates():
    candidates = np.array(
        [[5, 2, 9, 7], [0, 1, 3, -1], [9, 7, 2, 5], [3, -1, 1, 0], [2, 5, 7, 9], [6, 6, 4, -1]]
    )
    anchors = np.asarray(
        lutjax.sample_anchors(jax.random.key(0), 10, 6, 2, candidates=candidates, distinct=True)
    )
    assert_without_replacement(anchors[[0, 2, 4]], np.array([2, 5, 7, 9]))
    assert {tuple(p) for p in anchors[[0, 2, 4]].reshape(-1, 2).tolist()} == pairs_of(
        np.array([2, 5, 7, 9])
    )
    assert_without_replacement(anchors[[1, 3]], np.array([0, 1, 3]))
    np.testing.assert_array_equal(anchors[5], [[4, 6], [4, 6]])
    shared = lutjax.sample_anchors(
        jax.random.key(0), 10, 5, 2, candidates=candidates[:1], distinct=True
    )
    assert_without_replacement(np.asarray(shared), np.array([2, 5, 7, 9]))


def test_pairs_that_follow_each_other_are_uniform():
    draw = jax.vmap(lambda key: lutjax.sample_anchors(key, 3, 3, 2, distinct=True))
    anchors = np.asarray(draw(jax.random.split(jax.random.key(0), 3000)))
    codes = (3 * anchors[..., 0] + anchors[..., 1]).reshape(
        -1, 6
    )  # two permutations of the pairs 01, 02, 12
    for place in range(6):
        _, counts = np.unique(codes[:, place], return_counts=True)
        assert len(counts) == 3
        assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000 * 2 / 3)


@pytest.mark.parametrize("n_candidates", [None, 2, 3, 5])
def test_anchors_are_drawn_uniformly_from_the_ordered_pairs(n_candidates):
    """Draw each pair equally often: each pair's count lies within 6 standard deviations, in all 100
    comparisons with a probability beyond 1 - 1e-6."""
    n_inputs, n_draws = 6, 3000
    lists = None
    if n_candidates is not None:
        rng = np.random.default_rng(n_candidates)
        lists = np.stack([rng.permutation(n_inputs)[:n_candidates] for _ in range(2)])
        lists = np.concatenate(
            [lists[:, :1], np.full((2, 2), -1), lists[:, 1:]], 1
        )  # unused slots among them
    anchors = np.asarray(
        lutjax.sample_anchors(jax.random.key(3), n_inputs, 2, n_draws, candidates=lists)
    )
    assert anchors.dtype == np.int32
    assert anchors.shape == (2, n_draws, 2)
    for t in range(2):
        candidates = range(n_inputs) if lists is None else [int(c) for c in lists[t] if c >= 0]
        legal = set(itertools.permutations(candidates, 2))
        result, times = np.unique(anchors[t], axis=0, return_counts=True)
        assert {tuple(map(int, pair)) for pair in result} == legal
        mean = n_draws / len(legal)
        assert np.all(np.abs(times - mean) < 6 * np.sqrt(mean))
    assert not np.array_equal(*anchors)  # detectors are drawn independently


def test_sizes_that_are_impossible():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="groups is 2; it must divide the number of detectors, 3"):
        lutjax.sample_anchors(key, 4, 3, 2, distinct=True, groups=2)
    with pytest.raises(ValueError, match="detector 0 has 1 different candidate input"):
        lutjax.sample_anchors(key, 4, 3, 2, candidates=np.array([[2, 2]]), distinct=True)
    assert lutjax.sample_anchors(key, 4, 0, 2, distinct=True).shape == (0, 2, 2)
    assert lutjax.sample_anchors(key, 4, 3, 0, distinct=True).shape == (3, 0, 2)


@pytest.mark.parametrize("distinct", [False, True])
def test_the_same_inside_of_another_program(distinct):
    key = jax.random.key(7)

    def draw(key):
        return lutjax.sample_anchors(key, 5, 3, 2, distinct=distinct)

    alone = np.asarray(draw(key))
    np.testing.assert_array_equal(jax.jit(draw)(key), alone)
    np.testing.assert_array_equal(jax.vmap(draw)(jax.numpy.stack([key, key]))[1], alone)
    if distinct:  # each of its operations is a program
        with jax.disable_jit():
            np.testing.assert_array_equal(draw(key), alone)
    assert alone.tolist() == PAIRS[distinct]


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize("draw", [
    lambda key: lutjax.sample_anchors(key, 4, 3, 2),
    lambda key: lutjax.wiring.balanced(key, 4, 3),
])  # fmt: skip
def test_keys(draw):
    with pytest.raises(TypeError, match=r"key is 0; expected a key, such as jax.random.key\(0\)"):
        draw(0)
    with pytest.raises(ValueError, match=r"key is key<fry>\[2\]; expected one key"):
        draw(jax.random.split(jax.random.key(0)))
    assert (draw(jax.random.PRNGKey(0)) == draw(jax.random.key(0))).all()


REPEATS = {
    "pairs": (
        lambda: lutjax.sample_anchors(jax.random.key(0), n_inputs=3, n_detectors=2, n_anchors=5),
        "sample_anchors: n_anchors is 5, but 3 inputs have 3 pairs, .* Use at most n_anchors=3, or more inputs.",
    ),
    "distinct pairs": (lambda: lutjax.sample_anchors(jax.random.key(0), 2, 2, 2, distinct=True),
        "sample_anchors: n_anchors is 2, but 2 inputs have 1 pair, "),
    "candidates": (
        lambda: lutjax.sample_anchors(
            jax.random.key(0), 9, 2, 4, candidates=np.array([[0, 1, 2, 3], [4, 5, 6, -1]])
        ),
        "sample_anchors: n_anchors is 4, but 3 inputs have 3 pairs, ",
    ),
    "ProjectionLUT": (lambda: layers.ProjectionLUT(8, 8, heads=4, tables=8, bits=9, rngs=nnx.Rngs(0)),
        "ProjectionLUT: bits is 9, but 2 inputs have 1 pair, .* Use at most bits=1, "),
    "LUT": (lambda: layers.LUT(3, 8, n_detectors=2, n_anchors=4, rngs=nnx.Rngs(0)),
        "LUT: n_anchors is 4, but 3 inputs have 3 pairs, "),
    "WindowLUT": (
        lambda: layers.WindowLUT((4, 4), 2, kernel=(1, 2), n_detectors=2, n_anchors=2, rngs=nnx.Rngs(0)),
        "n_anchors is 2, but 2 inputs have 1 pair, "),
    "balanced": (lambda: wiring.balanced(jax.random.key(0), n_inputs=2, n_gates=3, arity=3),
        "balanced: arity is 3, but there are 2 inputs to read, "),
    "random": (lambda: wiring.random(jax.random.key(0), n_inputs=1, n_gates=3),
        "random: arity is 2, but there is 1 input to read, "),
    "trees": (lambda: wiring.trees(jax.random.key(0), n_inputs=2, n_trees=3, depth=2, arity=4),
        "trees: arity is 4, but there are 2 inputs to read, "),
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATS)
def test_repetitions_that_cannot_be_avoided_are_warned_of(name):
    draw, message = REPEATS[name]
    with pytest.warns(lutjax.RepeatedInputsWarning, match=message):
        draw()


def test_what_need_not_repeat_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lutjax.sample_anchors(jax.random.key(0), 3, 20, 3)
        lutjax.sample_anchors(jax.random.key(0), 3, 0, 9)
        layers.ProjectionLUT(6, 6, heads=2, tables=4, bits=3, rngs=nnx.Rngs(0))
        # Sixteen candidates for two inputs of a gate, which select one each.
        layers.LogicGates(3, 2, wiring="learnable", rngs=nnx.Rngs(0))
        anchors = np.array([[[0, 1], [1, 0]]] * 2)  # given ones are meant
        layers.LUT(2, 8, n_detectors=2, n_anchors=2, anchors=anchors, rngs=nnx.Rngs(0))
        wiring.trees(jax.random.key(0), n_inputs=3, n_trees=3, depth=3)
