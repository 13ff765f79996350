"""`lutjax.soft_lut` and `lutjax.binary_lut`, which differ only in their kernel names."""

import jax
import jax.numpy as jnp

from lutjax.ops._gates import TableGates
from lutjax_cpu._call import kernel


def forward(call: TableGates) -> jax.Array:
    x, wires = call.x, call.wires
    (y,) = kernel(
        f"{call.op}_forward",
        (x.astype(jnp.float32), call.table.astype(jnp.float32), wires),
        (jax.ShapeDtypeStruct((wires.shape[0], x.shape[1]), jnp.float32),),
        integers=(wires.shape[1],),
    )
    return y.astype(x.dtype)


def backward(call: TableGates, cotangent: jax.Array, needs: frozenset[str]) -> dict[str, jax.Array]:
    names = [name for name in ("x", "table") if name in needs]
    cotangents = kernel(
        f"{call.op}_backward",
        (
            *(a.astype(jnp.float32) for a in (call.x, call.table)),
            call.wires,
            cotangent.astype(jnp.float32),
        ),
        [jax.ShapeDtypeStruct(getattr(call, name).shape, jnp.float32) for name in names],
        integers=(call.wires.shape[1], "x" in needs, "table" in needs),
    )
    return dict(zip(names, cotangents, strict=True))
