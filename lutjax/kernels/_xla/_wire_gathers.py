"""Gate input reads through wires, and their cotangent sums.

Formula for gate ``g`` with wires ``w[g, l]``::

    rows:       read_l[g] = x[w[g, l]]
    to_inputs:  dx[i] = sum over all (g, l) with w[g, l] == i of by_wire_l[g]

Work: three ways to sum. With fan-out lists of at most `_WRITTEN_OUT` readers, each input gathers
its readers. Without lists, few inputs use a product with a 0/1 matrix, and many inputs use a
scatter.

Layout: features first, ``[features, samples]``: a wire reads one contiguous row, and a chain of
reads, products and one sum is a single pass over memory.

Numerics: sums keep their addends' dtype. Readers add in listed order; the product and the GPU
scatter may use another order. Wire ids and reader numbers are clamped. A NaN or infinity reaches
only the inputs that are read.
"""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.kernels._xla._row_gathers import read

# Maximum readers of an unrolled sum. Beyond that, most entries in the list are unused.
_WRITTEN_OUT = 16
# Maximum inputs for a cheap product with a 0/1 matrix.
_FEW_INPUTS = 32


def clamp_wires(wires: jax.Array, n_inputs: int) -> jax.Array:
    return jnp.clip(wires, 0, n_inputs - 1)


def rows(x: jax.Array, wires: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    """Read the inputs through all wires: ``[I, B]``, ``[G, n]`` -> n times ``[G, B]``."""
    wires = clamp_wires(wires, x.shape[0])
    # Convert after the gather: the conversion fuses with what consumes the row.
    return [read(x, wires[:, place]).astype(dtype) for place in range(wires.shape[1])]


def reader_wires(readers: jax.Array, n_wires: int) -> list[tuple[jax.Array, jax.Array]]:
    """Return the f-th reader of every input for each f: clamped wire ``[I]``, and a mask."""
    return [
        # Lists are padded with -1; these entries read wire 0 and are masked.
        (jnp.clip(readers[:, f], 0, max(n_wires - 1, 0)), readers[:, f] >= 0)
        for f in range(readers.shape[1])
    ]


def sums_over_readers(wires: jax.Array, readers: jax.Array | None) -> bool:
    """Return True if input cotangents are sums over readers."""
    # Without wires, even a clamped reader has no row to read.
    return readers is not None and readers.shape[1] <= _WRITTEN_OUT and wires.size > 0


def to_inputs(
    by_wire: list[jax.Array], wires: jax.Array, readers: jax.Array | None, n_inputs: int
) -> jax.Array:
    """Sum the wire cotangents, n times ``[G, B]``, for each input: ``[I, B]``."""
    flat = _flat(by_wire, wires)
    if readers is not None and sums_over_readers(wires, readers):
        # Missing readers read a row of zeros: cheaper than a select in the sum.
        flat = jnp.concatenate([flat, zeros_varying(flat, (1, flat.shape[1]), flat.dtype)])
        by_reader = jnp.where(readers < 0, wires.size, jnp.minimum(readers, wires.size - 1))
        dx = zeros_varying(flat, (n_inputs, flat.shape[1]), flat.dtype)
        for f in range(by_reader.shape[1]):
            dx = dx + read(flat, by_reader[:, f])
        return dx
    if n_inputs > _FEW_INPUTS:
        return scatter_to_inputs(by_wire, wires, n_inputs)
    ids = clamp_wires(wires, n_inputs).reshape(wires.size)
    # A scatter adds row after row; for few inputs the matrix is small and the product is faster.
    reads = jax.nn.one_hot(ids, n_inputs, dtype=flat.dtype, axis=0)
    dx = jnp.dot(reads, flat, precision="highest")
    # A product spreads a NaN or infinity to every input of its sample: then scatter instead.
    ones = jnp.ones((1, n_inputs), dx.dtype)
    return jax.lax.cond(
        # One reduction over all sums: NaN and infinities survive it. A finite result that overflows
        # here only takes the slow path.
        jnp.isfinite(jnp.sum(ones @ dx)),
        lambda: dx,
        lambda: scatter_to_inputs(by_wire, wires, n_inputs),
    )


def scatter_to_inputs(by_wire: list[jax.Array], wires: jax.Array, n_inputs: int) -> jax.Array:
    """Compute `to_inputs` with a scatter."""
    flat = _flat(by_wire, wires)
    dx = zeros_varying(flat, (n_inputs, flat.shape[1]), flat.dtype)
    ids = clamp_wires(wires, n_inputs).reshape(wires.size)
    # Integer gradients take this path: a float product would round them.
    return dx.at[ids].add(flat, mode="promise_in_bounds", wrap_negative_indices=False)


def _flat(by_wire: list[jax.Array], wires: jax.Array) -> jax.Array:
    # Wire number = gate * wires per gate + place, as the numbers in fan-out lists.
    return jnp.stack(by_wire, 1).reshape(wires.size, by_wire[0].shape[1])


def sum_over_samples(addends: list[jax.Array], parts: int = 1) -> jax.Array:
    """Sum k arrays ``[G, B]`` over samples in one pass, ``[k, G]``.

    `parts` splits the samples into separate sums. A sum along contiguous samples is one chain of
    dependent additions; a CPU runs the chains of several parts in parallel.
    """
    n_gates, batch = addends[0].shape
    zero = jnp.zeros((), addends[0].dtype)
    # A variadic reduction makes all sums in one pass; separate ones would read the operands again.
    sums = jax.lax.reduce(
        tuple(a.reshape(n_gates, parts, batch // parts) if parts > 1 else a for a in addends),
        (zero,) * len(addends),
        lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)),
        (1,),
    )
    return jnp.stack([s.sum(1) for s in sums] if parts > 1 else sums)
