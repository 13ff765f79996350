"""Wires from inputs to gates, and fan-out lists of inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax._typing import Array
from lutjax.arguments import format_value, require_integer


def readers(
    wires: Int[Array, "gates wires_of_gate"], n_inputs: int, *, fan_out: int | None = None
) -> Int[jax.Array, "{n_inputs} fan_out"]:
    """Return the fan-out lists of a wire list: for each input the positions that read it.

    With them the input gradient of an op is a sum over readers: deterministic on every device, and
    without the memory of a scatter.

    Args:
      wires: int32 ``[G, n]``, as for the ops.
      n_inputs: number of inputs, ``I``.
      fan_out: capacity for readers of one input, ``F``. Default: the largest fan-out, which
        requires concrete `wires`. With traced wires, readers beyond the capacity are dropped.

    Returns:
      int32 ``[I, F]``: indices ``n * gate + position`` into the flattened wires, ascending; -1 for
      no reader.

    Raises:
      ValueError: a wire is not an input, `fan_out` is too small, or missing while `wires` is
        traced.

    Source: docs/logic.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.readers(jnp.array([[0, 1], [1, 2]]), n_inputs=4)
      Array([[ 0, -1],
             [ 1,  2],
             [ 3, -1],
             [-1, -1]], dtype=int32)
    """
    if not isinstance(wires, jax.Array | np.ndarray):
        raise TypeError(
            f"readers: wires is {format_value(wires)}; expected a JAX or numpy array, int32 "
            "[gates, wires of a gate]."
        )
    n_inputs = require_integer("readers", "n_inputs", n_inputs)
    fan_out = None if fan_out is None else require_integer("readers", "fan_out", fan_out)
    for name, value in (("n_inputs", n_inputs), ("fan_out", fan_out or 0)):
        if not 0 <= value < 2**31:
            raise ValueError(f"readers: {name} is {value}; expected a number from 0 to 2**31 - 1.")
    traced = isinstance(wires, jax.core.Tracer)
    if traced and fan_out is None:
        raise ValueError(
            "readers: fan_out is None; it must be a number where the wires are traced."
        )
    if not traced:
        check_wires(wires, n_inputs, where="readers")
        most = int(np.bincount(np.asarray(wires).ravel(), minlength=1).max())
        fan_out = most if fan_out is None else fan_out
        if fan_out < most:
            raise ValueError(f"readers: fan_out is {fan_out}; an input has {most} readers.")
    assert fan_out is not None
    n = wires.size
    if not n or not n_inputs:
        return jnp.full((n_inputs, fan_out), -1, jnp.int32)
    xp: Any = jnp if traced else np
    flat = xp.asarray(wires).reshape(n)
    order = xp.argsort(flat, stable=True)
    ordered = flat[order]
    inputs = xp.arange(n_inputs, dtype=flat.dtype)
    # Readers of an input are consecutive in `ordered`. Slots beyond the last reader are -1.
    place = xp.searchsorted(ordered, inputs)[:, None] + xp.arange(fan_out)[None]
    exists = place < n
    place = xp.minimum(place, n - 1)
    exists &= ordered[place] == inputs[:, None]
    return jnp.asarray(xp.where(exists, order[place], -1), jnp.int32)


def check_wires(wires: Int[Array, "gates wires_of_gate"], n_inputs: int, *, where: str) -> None:
    """Raise if a wire is not an input; see `check_anchors`. A gate may read one input twice."""
    if wires.ndim != 2 or not jnp.issubdtype(wires.dtype, np.integer):
        raise ValueError(
            f"{where}: wires is {wires.dtype}{list(wires.shape)}; "
            "expected int32 [gates, wires of a gate]."
        )
    ids = np.asarray(wires)
    if ids.size and (ids.min() < 0 or ids.max() >= n_inputs):
        raise ValueError(
            f"{where}: wires holds ids from {ids.min()} to {ids.max()}; "
            f"inputs are 0 to {n_inputs - 1}."
        )
