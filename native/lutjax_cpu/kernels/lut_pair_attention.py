"""`lutjax.lut_pair_attention`."""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax_cpu import _pairs


def _positions(call: LutPairAttention) -> jax.Array:
    """Return the positions, or a placeholder without bits."""
    return (
        zeros_varying(call.x, (1, 1, 0), jnp.float32) if call.positions is None else call.positions
    )


def _compared(call: LutPairAttention) -> tuple[jax.Array, ...]:
    x, keys, positions = (a.astype(jnp.float32) for a in (call.x, call.keys, _positions(call)))
    return x, keys, call.anchors, positions


def _input_cotangents(
    call: LutPairAttention, dy: jax.Array, needs: frozenset[str]
) -> dict[str, jax.Array]:
    compared = {"x": call.x, "keys": call.keys, "positions": _positions(call)}
    outputs = [_pairs.sums(a.shape, call.accumulate) for a in compared.values()]
    cotangents = _KERNELS.run("inputs", call, (dy,), outputs)
    return {name: ct for name, ct in zip(compared, cotangents, strict=True) if name in needs}


_KERNELS = _pairs.Kernels(
    "lut_pair_attention",
    _compared,
    lambda call: (call.interleave,),
    lambda call: (call.epsilon,),
    _input_cotangents,
)
forward, backward, update = _KERNELS.forward, _KERNELS.backward, _KERNELS.update
