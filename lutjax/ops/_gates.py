"""What ops on gates share: how they are described, and how they are called."""

from typing import Any

import jax

from lutjax._ids import as_int32
from lutjax.kernels.registry import Implementation
from lutjax.ops._transforms import Operation, apply


def _save(args: tuple[Any, ...], outputs: jax.Array) -> tuple[Any, ...]:
    return args


def operation(name: str) -> Operation:
    """An op on inputs, a parameter of each gate, wires and perhaps readers."""
    return Operation(
        name,
        ranks=(1, None, None, None),
        save=_save,
        saved_batched=(True, False, False, False),
        features_first=True,
    )


def call(
    op: Operation,
    x: Any,
    parameter: Any,
    wires: Any,
    readers: Any,
    *,
    feature_axis: int,
    implementation: Implementation,
) -> jax.Array:
    """Calls it; everything has been checked."""
    y: jax.Array = apply(
        op,
        x,
        parameter,
        as_int32(wires),
        None if readers is None else as_int32(readers),
        implementation=implementation,
        options={},
        feature_axis=feature_axis,
    )
    return y
