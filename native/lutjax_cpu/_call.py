"""Calling native kernels from JAX."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lutjax import _compat
from lutjax.values._fixed_point import FixedPoint
from lutjax_cpu import _native

TARGET = "lutjax_cpu"
"""FFI target name in compiled programs."""


jax.ffi.register_ffi_target(
    TARGET, jax.ffi.pycapsule(_native.opened().lutjax_cpu_handler), platform="cpu"
)


def kernel(
    name: str,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    integers: Sequence[int] = (),
    numbers: Sequence[float] = (),
    in_place: Mapping[int, int] | None = None,
) -> tuple[jax.Array, ...]:
    """Run a kernel.

    Args:
      name: name in ``kernels.def``. inputs: input arrays. outputs: output shapes and dtypes.
      integers, numbers: kernel options.
      in_place: maps an input number to the output number that reuses its memory, if jit may
        donate the input.
    """
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in inputs))
    shapes = [_compat.shape_varying(jax.ShapeDtypeStruct(o.shape, o.dtype), axes) for o in outputs]
    run = jax.ffi.ffi_call(
        TARGET,
        shapes,
        input_output_aliases=dict(in_place or {}),
        # Ops batch their calls themselves; this is for `jax.vmap` of a kernel alone.
        vmap_method="sequential",
    )
    # An empty attribute has no element type, so each ends with one number that no kernel reads.
    options: Any = {
        "integers": np.array([*integers, 0], np.int64),
        "numbers": np.array([*numbers, 0], np.float64),
    }
    return tuple(run(*(_compat.cast_varying(a, axes) for a in inputs), kernel=name, **options))


def detection_of(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the output shapes for a detection: index, flip and margin."""
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.int32, np.float32))


def scale(accumulate: FixedPoint | None) -> float:
    """Return the fixed-point scale; 1 for floating-point sums."""
    return 1.0 if accumulate is None else accumulate.scale
