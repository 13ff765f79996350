"""`lutjax.margins` in plain JAX.

``u[t, c] = x[a[t, c]] - x[b[t, c]]``; ``dx = du`` times the incidence matrix of the anchors, ``[T, C, I]``: they are the same for every
sample, so a product adds what a scatter would. Inputs are gathered one comparison of all detectors after the other.
"""

import jax
import jax.numpy as jnp

from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addends
from lutjax.kernels._xla._row_gathers import read
from lutjax.kernels.registry import Device
from lutjax.ops.margins import Margins


def forward(call: Margins, *, device: Device) -> jax.Array:
    u = comparisons(call.x, call.anchors, call.groups)
    if not u:
        return jnp.zeros((call.x.shape[0], *call.anchors.shape[:2]), accumulator(call.x.dtype))
    return jnp.stack(u, 0).transpose(2, 1, 0)


def backward(
    call: Margins, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    du = [cotangent[..., c].T for c in range(cotangent.shape[-1])]
    return {"x": cotangent_of_inputs(du, call.anchors, call.groups, call.x.shape, call.accumulate)}


def comparisons(x: jax.Array, anchors: jax.Array, groups: int) -> list[jax.Array]:
    """Return the margins of each comparison, ``[T, n]``s, of inputs ``[n, H, I]``."""
    n, n_inputs_of, n_inputs = x.shape
    # Inputs first: a comparison then reads a contiguous row of the batch.
    by_input = x.reshape(n, n_inputs_of * n_inputs).T.astype(accumulator(x.dtype))
    ids = _ids(anchors, groups, n_inputs_of, n_inputs)
    ends = [[read(by_input, ids[:, c, side]) for side in range(ids.shape[2])] for c in range(ids.shape[1])]
    return [end[0] - end[1] if len(end) == 2 else end[0] for end in ends]


def cotangent_of_inputs(
    du: list[jax.Array],
    anchors: jax.Array,
    groups: int,
    shape: tuple[int, ...],
    accumulate: FixedPoint | None,
) -> jax.Array:
    """Return the cotangent of inputs ``[n, H, I]``, a sum of addends, from those of all margins, ``[T, n]``s."""
    n, n_inputs_of, n_inputs = shape
    if not du:
        return jnp.zeros(shape, jnp.float32 if accumulate is None else jnp.int32)
    every = addends(jnp.stack(du), accumulate)  # [C, T, n]
    n_comparisons, n_detectors, _ = every.shape
    ids = _ends(anchors, n_inputs)
    incidence = jax.nn.one_hot(ids[..., 0], n_inputs, dtype=every.dtype)
    if ids.shape[2] == 2:
        incidence -= jax.nn.one_hot(ids[..., 1], n_inputs, dtype=every.dtype)
    each = n_detectors // groups
    product = jnp.einsum(
        "cgpn,gpci->ngi",
        every.reshape(n_comparisons, groups, each, n),
        incidence.reshape(groups, each, n_comparisons, n_inputs),
        precision="highest",
    )
    return product if n_inputs_of == groups else jnp.sum(product, 1, keepdims=True, dtype=product.dtype)


def _ids(anchors: jax.Array, groups: int, n_inputs_of: int, n_inputs: int) -> jax.Array:
    """The ids of compared inputs among those of all groups, ``[T, C, 2 or 1]``."""
    ids = _ends(anchors, n_inputs)
    if n_inputs_of == 1:
        return ids
    group = jnp.arange(anchors.shape[0], dtype=jnp.int32) // (anchors.shape[0] // groups)
    return ids + n_inputs * group[:, None, None]


def _ends(anchors: jax.Array, n_inputs: int) -> jax.Array:
    """The ids that exist of compared inputs, ``[T, C, 2 or 1]``."""
    ids = jnp.clip(anchors, 0, max(n_inputs - 1, 0))
    return ids[..., None] if anchors.ndim == 2 else ids
