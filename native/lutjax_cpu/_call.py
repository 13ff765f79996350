"""Calling native kernels from JAX: the only module that knows the library."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lutjax import _compat

TARGET = "lutjax_cpu"
"""Name of the library's function in compiled programs."""


def _loaded() -> ctypes.CDLL:
    (path,) = (p for p in Path(__file__).parent.glob("_library.*") if p.suffix in (".so", ".dylib", ".dll"))
    found = ctypes.CDLL(str(path))
    if found.lutjax_cpu_highest_level() < 0:
        raise ImportError(
            "lutjax-cpu needs a CPU with the instructions of x86-64-v2 (SSE 4.2, POPCNT), and this one lacks them: "
            'uninstall it, or ask for implementation="xla".'
        )
    return found


library = _loaded()
jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.lutjax_cpu_handler), platform="cpu")


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
      name: of it in ``kernels.def``. inputs: its arrays. outputs: shapes and dtypes of what it makes.
      integers, numbers: its options.
      in_place: numbers of outputs that are made in the memory of an input, by the input's number, if jit may give that away.
    """
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in inputs))
    run = jax.ffi.ffi_call(
        TARGET,
        [_compat.shape_varying(jax.ShapeDtypeStruct(o.shape, o.dtype), axes) for o in outputs],
        input_output_aliases=dict(in_place or {}),
        vmap_method="sequential",
    )
    # Empty attributes have no type of their own elements: one number that no kernel looks at stands in.
    options: Any = {
        "integers": np.array([*integers, 0], np.int64),
        "numbers": np.array([*numbers, 0], np.float64),
    }
    return tuple(run(*(_compat.cast_varying(a, axes) for a in inputs), kernel=name, **options))


def detection_of(shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the outputs of a kernel that makes a detection: index, flip and margin."""
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in (np.int32, np.int32, np.float32))
