"""Pairs of inputs compared by detectors."""

import numpy as np


def draw_anchors(rng, n_inputs, n_detectors, n):
    """Return anchors with two different inputs each."""
    pairs = [[rng.permutation(n_inputs)[:2] for _ in range(n)] for _ in range(n_detectors)]
    return np.array(pairs, np.int32)


def pairs_of(pool):
    return {(int(a), int(b)) for a in pool for b in pool if a < b}


def assert_without_replacement(anchors, pool):
    """Assert that sampling exhausts the pool before repeating a pair, and never repeats a pair within a detector."""
    wanted, drawn = pairs_of(pool), [tuple(pair) for pair in anchors.reshape(-1, 2).tolist()]
    for start in range(0, len(drawn), len(wanted)):
        part = drawn[start : start + len(wanted)]
        assert len(set(part)) == len(part)
        assert set(part) <= wanted
    if anchors.shape[1] <= len(wanted):
        for detector in anchors.tolist():
            assert len({tuple(pair) for pair in detector}) == anchors.shape[1]
