"""Groups of tables: the tables of a group follow each other, and a group has inputs and outputs of its own, or shares them."""

import operator
from typing import Any

import jax

from lutjax._ids import as_jax
from lutjax.ops import _checks


def number(op: str, groups: Any, n_detectors: int) -> int:
    """Return the number of groups, which divides the detectors; 1 for None."""
    if groups is None:
        return 1
    try:
        n = operator.index(groups)
    except TypeError:
        raise TypeError(
            f"{op}: groups is {_checks.describe(groups)}; expected None or a Python int."
        ) from None
    _checks.require(n >= 1, op, "groups", n, "there must be at least 1")
    rule = f"it must divide the number of detectors, {n_detectors}"
    _checks.require(n_detectors % n == 0, op, "groups", n, rule)
    return n


def inputs(op: str, x: Any, anchors: Any, groups: Any) -> tuple[jax.Array, int]:
    """Return inputs as ``[..., G or 1, I]``, and the number of groups.

    Args:
      x: ``[..., I]``, or with groups ``[..., G or 1, I]``. anchors: ``[T, C, 2]`` or ``[T, C]``.
    """
    _checks.probes(op, anchors)
    n = number(op, groups, anchors.shape[0])
    if groups is None:
        _checks.floats(op, "x", x, -1, "[..., inputs]")
        x = as_jax(x)[..., None, :]
    else:
        _checks.floats(op, "x", x, -2, "[..., groups or 1, inputs]")
        _checks.require(
            x.shape[-2] in (1, n),
            op,
            "x",
            x,
            f"its last axis but one must have size {n}, the number of groups, or 1",
        )
        x = as_jax(x)
    _checks.require(
        x.shape[-1] > 0 or not anchors.size, op, "x", x, "comparisons need at least one input to read"
    )
    return x, n
