"""Native kernels on NumPy arrays: host-resident tables, which are never copied."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lutjax.dispatch.contract import Step
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax_cpu import _native, _rules

_TYPES = ("bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "float64")
"""Dtype names, in the ``Type`` order from `native/src/kernels.h`."""


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


def gather(tables: np.ndarray, index: np.ndarray, out: np.ndarray, n_threads: int) -> None:
    """Copy addressed rows: tables ``[T, R, O]``, int32 ids ``[B, T, K]`` -> ``[T, B * K, O]``."""
    _run("gather_rows", [tables, np.ascontiguousarray(index, np.int32)], [out], n_threads=n_threads)


def update(
    weights: np.ndarray,
    state: Mapping[str, np.ndarray],
    call: WeightedLookup,
    cotangent: np.ndarray,
    step: Step,
    n_threads: int,
) -> None:
    """Update table rows and their state in place.

    Args:
      call: the lookup, with NumPy arrays and None as its table.
    """
    names, integers, numbers = _rules.options(step.rule, weights.shape[2], call.accumulate)
    n_tables, ways = call.index.shape[-2:]
    # In the order of the kernel's state, and not copied: the kernel writes into them.
    state_arrays = [state[name] for name in names]
    floats = (1.0 if a is None else a for a in (step.rate, step.factor))
    reads = (call.index.reshape(-1, n_tables, ways), call.coefficients.reshape(-1, n_tables, ways))
    inputs = [
        weights,
        *(np.asarray(a, np.float32) for a in floats),
        *state_arrays,
        np.ascontiguousarray(reads[0], np.int32),
        np.ascontiguousarray(reads[1], np.float32),
        np.ascontiguousarray(cotangent, np.float32),
    ]
    _run(
        "weighted_lookup_update",
        inputs,
        [weights, *state_arrays],
        (*integers, call.groups, call.valued),
        numbers,
        n_threads=n_threads,
    )


def _run(
    name: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    integers: Sequence[int] = (),
    numbers: Sequence[float] = (),
    *,
    n_threads: int,
) -> None:
    function: Any = _native.opened().lutjax_cpu_run
    function.restype = ctypes.c_char_p
    # `shapes` stays referenced during the call: a pointer of ctypes does not own its memory. Arrays
    # of C must not be empty.
    shapes = [(ctypes.c_int64 * max(a.ndim, 1))(*a.shape) for a in (*inputs, *outputs)]
    arrays = [
        _Array(a.ctypes.data, _TYPES.index(a.dtype.name), a.ndim, shape)
        for a, shape in zip((*inputs, *outputs), shapes, strict=True)
    ]
    n_inputs = len(inputs)
    message: bytes | None = function(
        name.encode(),
        (_Array * max(n_inputs, 1))(*arrays[:n_inputs]),
        (_Array * max(len(outputs), 1))(*arrays[n_inputs:]),
        (ctypes.c_int64 * (len(integers) + 1))(*integers, 0),
        (ctypes.c_double * (len(numbers) + 1))(*numbers, 0.0),
        ctypes.c_int64(n_threads),
    )
    # A bug, since callers check their arguments.
    if message is not None:
        raise RuntimeError(f"lutjax-cpu: {name}: {message.decode()}")
