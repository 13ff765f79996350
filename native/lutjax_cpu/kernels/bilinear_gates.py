"""`lutjax.bilinear_gates`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.bilinear_gates import BilinearGates
from lutjax_cpu._call import kernel


def forward(call: BilinearGates, *, device: Any) -> jax.Array:
    x, wires = call.x, call.wires
    outline = jax.ShapeDtypeStruct((wires.shape[0], x.shape[1]), x.dtype)
    (y,) = kernel(
        "bilinear_gates_forward", (x, call.coefficients.astype(jnp.float32), wires), (outline,)
    )
    return y


def backward(
    call: BilinearGates, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    names = [name for name in ("x", "coefficients") if name in needs]
    cotangents = kernel(
        "bilinear_gates_backward",
        (call.x, call.coefficients.astype(jnp.float32), call.wires, cotangent.astype(jnp.float32)),
        [jax.ShapeDtypeStruct(getattr(call, name).shape, jnp.float32) for name in names],
        integers=("x" in needs, "coefficients" in needs),
    )
    return dict(zip(names, cotangents, strict=True))
