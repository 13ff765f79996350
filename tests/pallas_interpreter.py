"""TensorCore kernels on a machine without a TPU: Pallas interprets them, and raises where they read outside an array."""

import contextlib
import importlib
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

import lutjax
from lutjax.ops import _transforms


@contextlib.contextmanager
def interpreted(backend: str = "tpu") -> Iterator[None]:
    """In this block the implementation "pallas" runs on CPUs: that of one backend."""
    registry = lutjax.kernel_registry
    support = importlib.import_module(f"lutjax.kernels._pallas.{backend}._support")
    added = [
        registry.register(
            spec.op,
            "pallas",
            "cpu",
            spec.target,
            directions=spec.directions,
            priority=-1,
            unsupported=support.unsupported_arguments,
        )
        for op in registry.ops()
        for spec in registry.candidates(op)
        if (spec.platform, spec.backend) == ("pallas", backend)
    ]
    _transforms._compiled.cache_clear()
    _transforms._kernel.cache_clear()
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(out_of_bounds_reads="raise")):
            yield
    finally:
        for spec in added:
            registry.unregister(spec.op, spec.platform, spec.backend)
        _transforms._compiled.cache_clear()
        _transforms._kernel.cache_clear()
