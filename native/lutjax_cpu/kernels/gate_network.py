"""`lutjax.ops.gate_network`: all gates for a few samples at a time, with values in the cache."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.ops.gate_network import GateNetwork
from lutjax_cpu._call import kernel


def forward(call: GateNetwork, *, device: Any) -> jax.Array:
    outline = jax.ShapeDtypeStruct((call.sizes[-1], call.x.shape[1]), jnp.float32)
    (y,) = kernel("gate_network_forward", _arrays(call), (outline,))
    return y.astype(call.x.dtype)


def backward(
    call: GateNetwork, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    outlines = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (call.x, call.coefficients)]
    arrays = (*_arrays(call), cotangent.astype(jnp.float32))
    cotangents = kernel("gate_network_backward", arrays, outlines)
    by_name = dict(zip(("x", "coefficients"), cotangents, strict=True))
    return {name: ct for name, ct in by_name.items() if name in needs}


def _arrays(call: GateNetwork) -> tuple[jax.Array, ...]:
    return call.x.astype(jnp.float32), call.coefficients.astype(jnp.float32), call.sources()
