"""Implementations in Triton on machines without a GPU: run by Triton's interpreter, and compiled for NVIDIA GPUs."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax import testing

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("jax_triton", reason="jax-triton is not installed")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from lutjax.kernels._triton import _launch, _support  # noqa: E402

_TYPES = {
    "float32": "*fp32",
    "float64": "*fp64",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
}


@contextlib.contextmanager
def recorded():
    launches = []

    def record(inputs, outputs, zeroed, in_place, common):
        arrays = (*inputs, *in_place, *outputs, *zeroed, *in_place)
        launches.append((dict(common), tuple(_TYPES[a.dtype.name] for a in arrays)))
        return tuple(jnp.zeros(a.shape, a.dtype) for a in (*outputs, *zeroed, *in_place))

    patch = pytest.MonkeyPatch()
    patch.setattr(_launch, "_run", record)
    try:
        yield launches
    finally:
        patch.undo()
