"""`lutjax.weighted_lookup`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.values._fixed_point import addend_dtype, result
from lutjax.values._row_rules import RowState
from lutjax_cpu import _host as on_host, _rules
from lutjax_cpu._call import kernel, scale

__all__ = ["backward", "forward", "on_host", "update"]


def forward(call: WeightedLookup, *, device: Any) -> jax.Array:
    shape = (call.index.shape[0], call.groups, call.weights.shape[2])
    (y,) = kernel(
        "weighted_lookup_forward",
        (call.weights, *_reads(call)),
        (jax.ShapeDtypeStruct(shape, addend_dtype(jnp.float32, call.accumulate)),),
        integers=(call.groups, call.valued, call.accumulate is not None),
        numbers=(scale(call.accumulate),),
    )
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: WeightedLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    # A kernel has fixed outputs: those that are not needed are empty.
    dtypes = {"weights": addend_dtype(jnp.float32, call.accumulate), "coefficients": jnp.float32}
    cotangents = kernel(
        "weighted_lookup_backward",
        (call.weights, *_reads(call), cotangent.astype(jnp.float32)),
        [
            jax.ShapeDtypeStruct(getattr(call, name).shape if name in needs else (0,), dtype)
            for name, dtype in dtypes.items()
        ],
        integers=(
            call.groups,
            call.valued,
            call.accumulate is not None,
            "weights" in needs,
            "coefficients" in needs,
        ),
        numbers=(scale(call.accumulate),),
    )
    return {name: a for name, a in zip(dtypes, cotangents, strict=True) if name in needs}


def update(
    call: WeightedLookup, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    inputs = (*_reads(call), cotangent.astype(jnp.float32))
    return _rules.update(
        "weighted_lookup_update",
        call.weights,
        step,
        call.accumulate,
        inputs,
        integers=(call.groups, call.valued),
    )


def _reads(call: WeightedLookup) -> tuple[jax.Array, jax.Array]:
    return call.index, call.coefficients.astype(jnp.float32)
