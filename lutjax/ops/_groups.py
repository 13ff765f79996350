"""Table groups: contiguous tables with separate or shared inputs and outputs."""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops import _checks
from lutjax.values._ids import as_int32, as_jax


def number(op: str, groups: Any, n_detectors: int) -> int:
    """Return the number of groups, a divisor of the detectors; 1 for None."""
    if groups is None:
        return 1
    n = _checks.optional_integer(op, "groups", groups)
    _checks.require(n >= 1, op, "groups", n, "there must be at least 1")
    rule = f"it must divide the number of detectors, {n_detectors}"
    _checks.require(n_detectors % n == 0, op, "groups", n, rule)
    return n


def split_groups(y: jax.Array, groups: int | None) -> jax.Array:
    """Reshape an output ``[..., G * O]`` to ``[..., G, O]``; unchanged without groups."""
    if groups is None:
        return y
    n = operator.index(groups)  # an integer JAX array would divide the shape as a traced value
    return y.reshape(*y.shape[:-1], n, y.shape[-1] // n)


def outputs_apart(targets: jax.Array, n_outputs: int, groups: int, n_detectors: int) -> jax.Array:
    """Convert group-local targets ``[T or 1, R or 1, K]`` to global targets ``[T, R or 1, K]``."""
    if groups == 1:
        return targets
    first = n_outputs * detector_groups(n_detectors, groups)[:, None, None]
    # Clamped before the offset: an id out of range must not reach the next group.
    return jnp.where(targets < 0, -1, jnp.minimum(targets, n_outputs - 1) + first)


def detector_groups(n_detectors: int, groups: int) -> jax.Array:
    """Return each detector's group number, ``[T]``."""
    return jnp.arange(n_detectors, dtype=jnp.int32) // max(n_detectors // groups, 1)


def inputs_joined(op: str, x: Any, anchors: Any, groups: int) -> tuple[Any, Any]:
    """Return the groups' concatenated inputs ``[..., I]``, and anchor pairs into them.

    Args:
      x: ``[..., G or 1, I]``.
      anchors: ``[T, C, 2]``.
    """
    _checks.anchors(op, anchors)
    x, n = inputs(op, x, anchors, groups)
    n_inputs, n_inputs_of = x.shape[-1], x.shape[-2]
    first = detector_groups(anchors.shape[0], n) % n_inputs_of * n_inputs
    # Clamped before the offset: an id out of range must not read another group's input.
    anchors = jnp.clip(as_int32(anchors), 0, max(n_inputs - 1, 0)) + first[:, None, None]
    return x.reshape(*x.shape[:-2], n_inputs_of * n_inputs), anchors


def inputs(op: str, x: Any, anchors: Any, groups: Any) -> tuple[jax.Array, int]:
    """Return the inputs as ``[..., G or 1, I]``, and the number of groups.

    Args:
      x: ``[..., I]``, or with groups ``[..., G or 1, I]``.
      anchors: ``[T, C, 2]`` or ``[T, C]``.
    """
    _checks.probes(op, anchors)
    n = number(op, groups, anchors.shape[0])
    if groups is None:
        _checks.floats(op, "x", x, -1, "[..., inputs]")
        x = as_jax(x)[..., None, :]
    else:
        _checks.floats(op, "x", x, -2, "[..., groups or 1, inputs]")
        rule = f"its last axis but one must have size {n}, the number of groups, or 1"
        _checks.require(x.shape[-2] in (1, n), op, "x", x, rule)
        x = as_jax(x)
    rule = "comparisons need at least one input to read"
    _checks.require(x.shape[-1] > 0 or not anchors.size, op, "x", x, rule)
    _checks.ids(op, "anchors", anchors, x.shape[-1], "inputs of x")
    return x, n
