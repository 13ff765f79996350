"""What suites of several backends share: sizes, and the mark of cases that are left to the slow suite."""

import pytest

# For each op a shape and sizes that can be split in two along the batch and the detectors.
SPLIT = {
    "detect": ("primes", {"batch": 6, "detectors": 4}),
    "detect_signs": ("primes", {"batch": 6}),
    "lookup": ("primes", {"batch": 6, "detectors": 4}),
    "sparse_lookup": ("primes", {"batch": 6, "detectors": 4}),
    "lookup_attention": ("segments", {"batch": 2, "queries": 5, "detectors": 2, "outputs": 3}),
    "lut_pair_attention": ("primes", {"batch": 2, "queries": 5, "detectors": 2, "outputs": 3}),
    "bilinear_gates": ("primes", {"batch": 6, "gates": 4}),
    "soft_lut": ("primes", {"batch": 6, "gates": 4, "bits": 2}),
    "binary_lut": ("primes", {"batch": 6, "gates": 4, "bits": 2}),
}


def slow(*values):
    """The values of a case of `pytest.mark.parametrize` that runs with ``-m slow`` only."""
    return pytest.param(*values, marks=pytest.mark.slow)
