"""Table storage in fewer bits, and restored values."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

import lutjax
from lutjax.bundles._layout import Tensor, name_of, scale_of

Array = Shaped[np.ndarray, "..."]


def encode_tensor(tensor: Tensor, values: Array) -> dict[str, Array]:
    name = name_of(tensor.path)
    if tensor.scale is None:
        return {name: values.astype(jnp.dtype(tensor.stored))}
    if not np.isfinite(values).all():
        raise ValueError(
            f"save: the table {name} has values that are not finite, which int8 cannot hold."
        )
    n_rows, n_outputs = values.shape[-2:] if values.ndim >= 3 else (values.shape[-1], 1)  # edges
    # One group for each table, which then has scales of its own.
    each = values.reshape(-1, n_rows, n_outputs)
    if not each.size:
        return {
            name: np.zeros(values.shape, np.int8),
            scale_of(name): np.ones(tensor.scale_shape, np.float32),
        }
    quantized = lutjax.quantize_tables(jnp.asarray(each.astype(np.float32)), groups=len(each))
    # Scales are powers of two, so that values survive another save bit for bit.
    scale = np.ldexp(np.float32(1), np.asarray(quantized.exponents))
    return {
        name: np.asarray(quantized.values).reshape(values.shape),
        scale_of(name): scale.astype(np.float32).reshape(tensor.scale_shape),
    }


def values(tensor: Tensor, arrays: Any) -> Array:
    array: Array = arrays[name_of(tensor.path)]
    if tensor.scale is not None:
        # A scale may hold any number, as a floating-point table may: what overflows is infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(np.float32) * arrays[tensor.scale]
    return array.astype(jnp.dtype(tensor.dtype), copy=False)
