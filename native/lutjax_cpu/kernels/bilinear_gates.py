"""`lutjax.bilinear_gates`, and networks of its gates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.bilinear_gates import BilinearGates
from lutjax_cpu._call import kernel


def forward(call: BilinearGates, *, device: Any) -> jax.Array:
    x, wires = call.x, call.wires
    outline = jax.ShapeDtypeStruct((wires.shape[0], x.shape[1]), x.dtype)
    (y,) = kernel("bilinear_gates_forward", (x, call.coefficients.astype(jnp.float32), wires), (outline,))
    return y


def backward(
    call: BilinearGates, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    names = [name for name in ("x", "coefficients") if name in needs]
    found = kernel(
        "bilinear_gates_backward",
        (call.x, call.coefficients.astype(jnp.float32), call.wires, cotangent.astype(jnp.float32)),
        [jax.ShapeDtypeStruct(getattr(call, name).shape, jnp.float32) for name in names],
        integers=("x" in needs, "coefficients" in needs),
    )
    return dict(zip(names, found, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def network(x: jax.Array, coefficients: jax.Array, wires: jax.Array, n_outputs: int) -> jax.Array:
    """Return the last gates of a network: see `lutjax.dispatch.contract`."""
    (y,) = kernel(
        "gate_network_forward",
        (x, coefficients, wires),
        (jax.ShapeDtypeStruct((n_outputs, x.shape[1]), jnp.float32),),
    )
    return y


def _network_forward(
    x: jax.Array, coefficients: jax.Array, wires: jax.Array, n_outputs: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return network(x, coefficients, wires, n_outputs), (x, coefficients, wires)


def _network_backward(
    n_outputs: int, saved: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x, coefficients, wires = saved
    outlines = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (x, coefficients)]
    dx, dc = kernel("gate_network_backward", (x, coefficients, wires, cotangent), outlines)
    return dx, dc, None


network.defvjp(_network_forward, _network_backward)
