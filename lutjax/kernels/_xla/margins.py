"""`lutjax.margins` in plain JAX.

Formula for table ``t`` of group ``g`` and comparison ``c`` with anchors ``a, b`` (``b`` may be
missing)::

    u[n, t, c] = x[n, g, a[t, c]] - x[n, g, b[t, c]]
    dx[n, g, a] += du;  dx[n, g, b] -= du

Work: one comparison of all tables at a time. On CPUs ``dx`` is a scatter of whole rows. On
accelerators it is ``du`` times the incidence matrix of the anchors ``[T, C, I]``, because a matrix
product is faster than a scatter there.

Layout: inputs first, ``[H * I, n]``: anchors are the same for all samples, so a comparison reads
and adds contiguous rows of the batch.

Numerics: accumulator dtype; the product uses full float32 precision. Its order of sums, and so the
last bits, differs from the scatter, except in fixed point. Ids are clamped.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla._row_gathers import add, in_sequence, read
from lutjax.ops.margins import Margins
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint, addends


def forward(call: Margins, *, device: Device) -> jax.Array:
    u = comparisons(call.x, call.anchors, call.groups)
    if not u:
        return jnp.zeros((call.x.shape[0], *call.anchors.shape[:2]), accumulator(call.x.dtype))
    # Computed as ``[C, T, n]``, where samples are contiguous; transposed once for the output.
    return jnp.stack(u, 0).transpose(2, 1, 0)


def backward(
    call: Margins, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    du = [cotangent[..., c].T for c in range(cotangent.shape[-1])]
    shape = call.x.shape
    return {"x": cotangent_of_inputs(du, call.anchors, call.groups, shape, call.accumulate, device)}


def comparisons(x: jax.Array, anchors: jax.Array, groups: int) -> list[jax.Array]:
    """Return the margins per comparison, ``[T, n]``s, from inputs ``[n, H, I]``."""
    return margins_at(inputs_first(x), ids_of(anchors, groups, x.shape))


def inputs_first(x: jax.Array) -> jax.Array:
    """Transpose inputs, ``[n, H, I]`` -> ``[H * I, n]``, in the accumulator dtype."""
    n, n_inputs_of, n_inputs = x.shape
    return x.reshape(n, n_inputs_of * n_inputs).T.astype(accumulator(x.dtype))


def ids_of(anchors: jax.Array, groups: int, shape: tuple[int, ...]) -> jax.Array:
    """Return compared input ids across groups, ``[T, C, 2 or 1]``, for a shape ``[n, H, I]``."""
    ids, (_, n_inputs_of, n_inputs) = _ends(anchors, shape[2]), shape
    # All groups compare the same inputs: ids need no offset.
    if n_inputs_of == 1:
        return ids
    group = jnp.arange(anchors.shape[0], dtype=jnp.int32) // max(anchors.shape[0] // groups, 1)
    return ids + n_inputs * group[:, None, None]


def margins_at(by_input: jax.Array, ids: jax.Array) -> list[jax.Array]:
    """Return margins per comparison, ``[T, n]``s, from ``[H * I, n]`` and ``[T, C, 2 or 1]``."""
    ends = [
        [read(by_input, ids[:, c, side]) for side in range(ids.shape[2])]
        for c in range(ids.shape[1])
    ]
    return [end[0] - end[1] if len(end) == 2 else end[0] for end in ends]


def add_margins(dx: jax.Array, ids: jax.Array, du: Sequence[jax.Array]) -> jax.Array:
    """Add margin cotangents, ``[T, n]`` each, to the compared inputs ``[H * I, n]``."""
    for c, of_comparison in enumerate(du):
        dx = add(dx, (ids[:, c, 0],), of_comparison)
        if ids.shape[2] == 2:
            dx = add(dx, (ids[:, c, 1],), -of_comparison)
    return dx


def cotangent_of_inputs(
    du: Sequence[jax.Array],
    anchors: jax.Array,
    groups: int,
    shape: tuple[int, ...],
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    """Return the input cotangent ``[n, H, I]``, in addends, from margin cotangents ``[T, n]``s."""
    n, n_inputs_of, n_inputs = shape
    if not du or not shape[1] * shape[2]:
        return jnp.zeros(shape, jnp.float32 if accumulate is None else jnp.int32)
    each_addend = [addends(d, accumulate) for d in du]
    if in_sequence(device):
        # A CPU scatters contiguous rows; an incidence product would multiply mostly zeros.
        zeros = zeros_varying(each_addend[0], (n_inputs_of * n_inputs, n), each_addend[0].dtype)
        return transpose_to_samples(
            add_margins(zeros, ids_of(anchors, groups, shape), each_addend), shape
        )
    every = jnp.stack(each_addend)  # [C, T, n]
    n_comparisons, n_detectors, _ = every.shape
    ids = _ends(anchors, n_inputs)
    # Entries 1, -1, or 0 for a comparison of an input with itself, in the dtype of addends, so that
    # the product of fixed-point addends is one of integers.
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
    # Inputs shared by all groups receive the sum over groups.
    return (
        product
        if n_inputs_of == groups
        else jnp.sum(product, 1, keepdims=True, dtype=product.dtype)
    )


def transpose_to_samples(dx: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Transpose ``[H * I, n]`` to ``[n, H, I]``."""
    return dx.T.reshape(shape)


def _ends(anchors: jax.Array, n_inputs: int) -> jax.Array:
    """Return the clamped ids of compared inputs, ``[T, C, 2 or 1]``."""
    ids = jnp.clip(anchors, 0, max(n_inputs - 1, 0))
    return ids[..., None] if anchors.ndim == 2 else ids
