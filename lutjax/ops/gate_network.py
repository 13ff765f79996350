"""Networks of two-input gate layers."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax import _meshes
from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops.bilinear_gates import bilinear_gates
from lutjax.values._dtypes import accumulator
from lutjax.values._ids import as_int32, as_jax

Readers = Sequence[Int[Array, "_ _"] | None]


def _layer_by_layer(call: "GateNetwork", *, implementation: Implementation) -> jax.Array:
    """Evaluate a call layer by layer with `lutjax.bilinear_gates`."""
    dtype = accumulator(call.x.dtype, call.coefficients.dtype)
    x, readers = call.x.astype(dtype), call.readers or (None,) * len(call.sizes)
    coefficients = call.coefficients.astype(dtype)
    for (first, last), of_layer in zip(call.bounds(), readers, strict=True):
        own, wires = (
            _meshes.slice_repeated(coefficients, first, last, 1),
            _meshes.slice_repeated(call.wires, first, last, 0),
        )
        x = bilinear_gates(
            x, own, wires, readers=of_layer, feature_axis=0, implementation=implementation
        )
    return x.astype(call.x.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class GateNetwork(Call, op="gate_network", features_first=True, output="o", parts=_layer_by_layer):
    """The call of `gate_network`. It decomposes into layers.

    Attributes:
      x: ``[I, B]`` floats, features first.
      coefficients: ``[4, G]`` floats, layer by layer.
      wires: int32 ``[G, 2]``, output ids in the previous layer, possibly out of range.
      readers: int32 ``[inputs, F]`` from `lutjax.readers`, or None, for each layer; or None for all
        layers.
      sizes: gates per layer.

    Output and its cotangent: ``[O, B]``, for the last layer. Differentiable: `x`, `coefficients`.
    """

    x: jax.Array = batched(1, "i")
    coefficients: jax.Array = shared("c g")
    wires: jax.Array = shared("g w")
    readers: tuple[jax.Array | None, ...] | None = shared("k f", default=None)
    sizes: tuple[int, ...] = static()

    def bounds(self) -> list[tuple[int, int]]:
        """Return the gate range ``(start, stop)`` for each layer."""
        return list(itertools.pairwise(itertools.accumulate(self.sizes, initial=0)))

    def sources(self) -> jax.Array:
        """Return clamped `wires` as ids in inputs followed by all gates: int32 ``[G, 2]``."""
        found, before, first = [], self.x.shape[0], 0
        for start, stop in self.bounds():
            found.append(first + jnp.clip(self.wires[start:stop], 0, before - 1))
            first, before = first + before, stop - start
        return jnp.concatenate(found)


def gate_network(
    x: Float[Array, "..."],
    coefficients: Float[Array, "4 gates"],
    wires: Int[Array, "gates 2"],
    *,
    sizes: Sequence[int],
    readers: Readers | None = None,
    feature_axis: int = -1,
    implementation: Implementation = None,
) -> Float[jax.Array, "..."]:
    """Evaluate stacked layers of two-input gates: `lutjax.bilinear_gates`, layer by layer.

    A fused kernel, if available, evaluates all gates for a block of samples with values in cache.
    The backward pass recomputes them, so no layer's outputs are written to memory.

    Definition::

        first = 0
        for size in sizes:
            own = slice(first, first + size)
            x = lutjax.bilinear_gates(
                x, coefficients[:, own], wires[own], feature_axis=feature_axis
            )
            first += size
        y = x

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64; ``[I, ...]`` with ``feature_axis=0``.
      coefficients: ``[4, G]``, for the terms 1, a, b and ab, layer by layer.
      wires: int32 ``[G, 2]``, output ids in the previous layer, or input ids for the first layer.
        Out-of-range traced ids are clamped.
      sizes: gates per layer, with the sum ``G``. All layers but the last need at least one gate.
      readers: for each layer, int32 ``[layer inputs, F]`` fan-out lists from `lutjax.readers`, or
        None. With them, the layer's input gradients are gathered instead of scattered. Entries
        inconsistent with `wires` give wrong gradients.
      feature_axis: -1, or 0 if features come first. 0 is the kernels' own layout (contiguous
        samples per feature) and needs no transposition.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[O, ...]``, the last layer's outputs with dtype ``x.dtype``. Computed
      in the wider of both dtypes, at least float32, and rounded once.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or sizes inconsistent with `wires`.

    Source: docs/logic.md, section 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.ops.gate_network import gate_network
      >>> xor, both = [0.0, 1.0, 1.0, -2.0], [0.0, 0.0, 0.0, 1.0]
      >>> gates = jnp.array([xor, both, xor]).T
      >>> wires = jnp.array([[0, 1], [0, 1], [0, 1]])
      >>> gate_network(jnp.array([[1.0, 0.0], [1.0, 1.0]]), gates, wires, sizes=(2, 1))  # or
      Array([[1.],
             [1.]], dtype=float32)
    """
    op = "gate_network"
    is_sequence = isinstance(sizes, Sequence) or (isinstance(sizes, np.ndarray) and sizes.ndim)
    if not is_sequence or isinstance(sizes, str):
        raise TypeError(
            f"{op}: sizes is {_checks.describe(sizes)}; expected a sequence with the number of "
            "gates of each layer, such as (8, 4)."
        )
    sizes = tuple(sizes)
    _checks.check_gate_arguments(op, x, wires, None, feature_axis, in_layers=True)
    _checks.gates(op, coefficients, wires)
    if not sizes or not all(isinstance(n, int | np.integer) and n >= 0 for n in sizes):
        raise ValueError(
            f"{op}: sizes is {sizes}; expected the number of gates of each layer, at least one."
        )
    if 0 in sizes[:-1]:
        raise ValueError(
            f"{op}: sizes is {sizes}; the layer behind one without gates has nothing to read."
        )
    rule = f"sizes is {sizes}, so expected [{sum(sizes)}, 2]: the wires of the gates of all layers"
    _checks.require(wires.shape[0] == sum(sizes), op, "wires", wires, rule)
    _checks.ids_of_layers(op, wires, x.shape[feature_axis], sizes)
    call = GateNetwork(
        as_jax(x),
        as_jax(coefficients),
        as_int32(wires),
        _checked_readers(op, readers, (x.shape[feature_axis], *sizes[:-1]), sizes),
        sizes=tuple(int(n) for n in sizes),
    )
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=feature_axis))


def _checked_readers(
    op: str, readers: Readers | None, n_inputs: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[jax.Array | None, ...] | None:
    if readers is None:
        return None
    if not isinstance(readers, list | tuple):
        raise TypeError(
            f"{op}: readers is {_checks.describe(readers)}; expected a list with one array, or "
            "None, for each layer."
        )
    if len(readers) != len(n_inputs):
        raise ValueError(
            f"{op}: readers has {len(readers)} lists; expected one, or None, for each of the "
            f"{len(n_inputs)} layers of sizes."
        )
    for layer, (of_layer, n) in enumerate(zip(readers, n_inputs, strict=True)):
        if of_layer is not None:
            name = f"readers[{layer}]"
            _checks.integers(op, name, of_layer, 2, "[inputs, fan-out]")
            rule = f"layer {layer} has {n} inputs, so its first axis must have size {n}"
            _checks.require(of_layer.shape[0] == n, op, name, of_layer, rule)
            _checks.ids(
                op,
                name,
                of_layer,
                2 * sizes[layer],
                f"entries of the wires of layer {layer}",
                unused=True,
            )
    return tuple(None if of_layer is None else as_int32(of_layer) for of_layer in readers)
