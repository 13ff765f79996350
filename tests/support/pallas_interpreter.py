"""TensorCore kernels on a machine without a TPU: Pallas interprets them, and raises where they read outside an array.

Also what suites of kernels in Pallas share: the ops that have some, and the requests that their rules are asked.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import tpu as pltpu

import lutjax
from lutjax.dispatch import _transforms
from lutjax.dispatch.registry import Deferral, Made

try:
    from jax.experimental.pallas import mosaic_gpu

    WITHOUT_MOSAIC = None
except ImportError as error:  # jaxlib has Mosaic GPU on some platforms alone
    mosaic_gpu, WITHOUT_MOSAIC = None, f"Mosaic GPU is not in this jaxlib: {error}"


def specs(backend):
    """Implementations in Pallas for a backend."""
    registry = lutjax.kernel_registry
    return [
        spec
        for op in registry.ops()
        for spec in registry.candidates(op)
        if (spec.platform, spec.backend) == ("pallas", backend)
    ]


def implemented(backend, direction="forward"):
    """Ops that have an implementation in Pallas for a backend."""
    return [spec.op for spec in specs(backend) if direction in spec.directions]


def outline(call, *arrays, **options):
    """A call of arrays of which there are only shapes and dtypes."""
    with jax.enable_x64(True):
        return jax.eval_shape(functools.partial(call, **options), *arrays)


def reason(backend, device, call, direction="forward", output=None, rule=None):
    """Return the reason why the kernels of a backend do not run a call on a device, or come later; None if they come first."""
    request = Made(call, output).request(direction, device, rule)
    platform = importlib.import_module(f"lutjax.kernels._pallas.{backend}").supports(request)
    why = None if isinstance(platform, Deferral) else platform  # which waits for a record
    return why or lutjax.kernel_registry.get(call.op, "pallas", backend).declaration.supports(request)


@contextlib.contextmanager
def interpreted(backend: str = "tpu") -> Iterator[None]:
    """Run the implementation "pallas" of one backend on CPUs in this block."""
    registry = lutjax.kernel_registry
    added = [
        registry.register(
            spec.op,
            "pallas",
            "cpu",
            spec.target,
            directions=spec.directions,
            priority=-1,
            unsupported=spec.declaration.supports,
            rates=True,
        )
        for spec in specs(backend)
    ]
    _transforms.forget()
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(out_of_bounds_reads="raise")):
            yield
    finally:
        for spec in added:
            registry.unregister(spec.op, spec.platform, spec.backend)
        _transforms.forget()
