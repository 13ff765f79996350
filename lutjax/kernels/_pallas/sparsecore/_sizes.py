"""Sizes of rows and blocks of samples that fit the memory of a subcore. Imports no Pallas: the registry asks at every call."""

import math

from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas._tpus import SparseCores
from lutjax.kernels.registry import Device

TILE = 128  # numbers; rows of whole tiles are read where they are
_GRANULE = 16  # numbers that one access to HBM moves, and of the longest vector
_MOST_SAMPLES = 128  # ids of one gather
_MOST_TERMS = 32  # terms whose ids a subcore holds at once
ARRAYS_OF_TERMS = 5  # of ids and sums: three ways to read, and two sums; or four of ids, and one sum


def sparse_cores(device: Device) -> SparseCores:
    """Return the SparseCores of a device; those of a v6e where kernels are replaced to test what is around them."""
    cores = _tpus.limits(device).sparse_cores or _tpus.named("v6e").sparse_cores
    assert cores is not None
    return cores


def width(n: int) -> int:
    """Return the length of rows of `n` numbers in HBM: whole tiles stay as they are, others are padded and laid out anew."""
    return n if n % TILE == 0 else n + -n % _GRANULE


def group(terms: int) -> int:
    """Return the number of terms whose ids a subcore reads at once; all terms are padded to a multiple of it."""
    return min(terms + -terms % 8, _MOST_TERMS)


def numbers_of_differences(n_outputs: int) -> int:
    """Return the numbers of one sample that a subcore holds: two rows, and their cotangents."""
    return 3 * width(n_outputs)


def numbers_of_sparse_lookup(n_slots: int, n_outputs: int, *, rows: int) -> int:
    """Return the numbers of one sample that a subcore holds: values of so many rows, their targets, and outputs or cotangents."""
    return 2 * rows * width(n_slots) + width(n_outputs)


def most_numbers(cores: SparseCores) -> int:
    """Return the numbers of each sample that fit a subcore, of the fewest samples at once.

    An eighth of the memory is left to the compiler; ids and sums of a group of terms need their own.
    """
    return _left(cores) // _GRANULE


def samples(n_samples: int, numbers: int, cores: SparseCores) -> int:
    """Return the samples that a subcore works on at once, `numbers` of each in its memory: all that fit, and fewer where
    that leaves no subcore idle."""
    fit = min(_left(cores) // numbers, math.ceil(n_samples / (cores.cores * cores.subcores)), _MOST_SAMPLES)
    return max(1 << (fit.bit_length() - 1), _GRANULE) if fit else _GRANULE


def _left(cores: SparseCores) -> int:
    return cores.vmem // 4 * 7 // 8 - ARRAYS_OF_TERMS * _MOST_TERMS * TILE
