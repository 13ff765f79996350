"""Causal softmax attention: cuDNN flash attention where supported, XLA elsewhere.

XLA materializes the attention matrix of every head, so time and memory grow quadratically with the
length. cuDNN computes the same sums tile by tile. Both round probabilities to the input dtype, so
they agree within rounding.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from lutjax.dispatch.registry import Backend, devices_of
from lutjax.values import Array

_HALF_DTYPES = (jnp.bfloat16, jnp.float16)
_OLDEST_CAPABILITY = 8  # compute capability of Ampere, the oldest GPUs with flash attention
_HOPPER = 9


def unsupported_reason(
    head_size: int, dtype: DTypeLike, *, length: int | None = None
) -> str | None:
    """Return the reason why cuDNN cannot run attention in this process, or None if it can."""
    dtype = jnp.dtype(dtype)
    if dtype not in _HALF_DTYPES:
        return f"cuDNN supports bfloat16 and float16, not {dtype}"
    if all(device.backend != Backend.GPU for device in devices_of(())):
        return "cuDNN needs an NVIDIA GPU"
    capability = _compute_capability()
    if capability < _OLDEST_CAPABILITY:
        return f"cuDNN needs an NVIDIA GPU of compute capability {_OLDEST_CAPABILITY}.0 or newer"
    largest = 256 if capability >= _HOPPER else 128
    if head_size % 8 or head_size > largest:
        return (
            f"cuDNN supports heads of multiples of 8 up to {largest} features, "
            f"and a head has {head_size}"
        )
    if length is not None and length % 2:
        return f"cuDNN's backward pass supports even lengths, and a sequence has {length} tokens"
    return None


@functools.cache
def _compute_capability() -> int:
    """Return the smallest major compute capability of local GPUs; 0 for other vendors."""
    versions = [
        str(getattr(d, "compute_capability", "0")) for d in jax.local_devices(backend="gpu")
    ]
    return min((int(v.partition(".")[0]) if v[:1].isdigit() else 0) for v in versions)


def attend(
    query: Float[Array, "n length heads size"],
    key: Float[Array, "n length heads size"],
    value: Float[Array, "n length heads size"],
    *,
    mask: Bool[Array, "n 1 length length"] | None,
    window: int | None,
) -> Float[jax.Array, "n length heads size"]:
    """Compute causal softmax attention, over masked pairs at most `window` apart if given."""

    def run(implementation: Literal["cudnn", "xla"], *arrays: Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # JAX promotes bfloat16 to float32 implicitly
            query, key, value, *masks = map(jnp.asarray, arrays)
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                mask=masks[0] if masks else None,
                is_causal=True,
                local_window_size=None if window is None else (window, 0),
                implementation=implementation,
            )

    arrays = [query, key, value] if mask is None else [query, key, value, mask]
    *_, length, _, head_size = query.shape
    if length == 1:
        # The softmax of one logit is 1, and XLA cannot compile its float16 products for GPUs.
        return jnp.asarray(value)
    if unsupported_reason(head_size, query.dtype, length=length) is not None:
        return run("xla", *arrays)
    # A process with a GPU may still lower a program for its CPU, so choose at lowering time.
    y: jax.Array = jax.lax.platform_dependent(
        *arrays, cuda=functools.partial(run, "cudnn"), default=functools.partial(run, "xla")
    )
    return y
