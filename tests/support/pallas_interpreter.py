"""TensorCore kernels without a TPU: Pallas interprets them and raises on out-of-bounds reads.

Also shared by Pallas kernel suites: the ops with Pallas kernels, and requests for their support rules.
"""

import contextlib
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
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
    """Return Pallas implementations for a backend."""
    registry = lutjax.kernel_registry
    return [
        spec
        for op in registry.ops()
        for spec in registry.candidates(op)
        if (spec.platform, spec.backend) == ("pallas", backend)
    ]


def implemented(backend, direction="forward"):
    """Return ops with a Pallas implementation for a backend."""
    return [spec.op for spec in specs(backend) if direction in spec.directions]


ON_TENSOR_CORES, ON_GPUS = implemented("tpu"), implemented("gpu", "backward")


def mosaic_for(op):
    """Return the implementation of an op in Mosaic GPU, with Triton for a missing forward pass."""
    return "pallas/gpu" if op in implemented("gpu") else ("pallas/gpu", "triton")


def outline(call, *arrays, **options):
    """Return a call with abstract arrays (shapes and dtypes only)."""
    with jax.enable_x64(True):
        return jax.eval_shape(functools.partial(call, **options), *arrays)


def reason(backend, device, call, direction="forward", output=None, rule=None):
    """Return a backend's reason to reject or defer a call on a device, or None if its kernels come first."""
    request = Made(call, output).request(direction, device, rule)
    platform = importlib.import_module(f"lutjax.kernels._pallas.{backend}").supports(request)
    why = None if isinstance(platform, Deferral) else platform  # which waits for a record
    return why or lutjax.kernel_registry.get(call.op, "pallas", backend).declaration.supports(
        request
    )


@contextlib.contextmanager
def interpreted(backend="tpu"):
    """Run the "pallas" implementation of one backend on CPUs in this block."""
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


def use_small_blocks(monkeypatch, reads=True):
    """Split lookups into several blocks along every axis and several rows per read, as for far larger tables."""
    from lutjax.kernels._pallas.tpu import _resident, _row_blocks

    for name in ("_ROWS", "_SAMPLES", "_OUTPUTS"):
        monkeypatch.setattr(_row_blocks, name, 128 if name != "_ROWS" else 8)
    if reads:
        monkeypatch.setattr(_resident, "resident_outputs", lambda shape, device: 128)
        monkeypatch.setattr(_resident, "_READS", 16)
        monkeypatch.setattr(_resident, "_TOGETHER", 2)


def pretend_triton_runs(monkeypatch):
    """Replace Triton kernel results used by Pallas kernels."""
    from lutjax.kernels import _triton

    def run(inputs, outputs, zeroed, in_place, common):
        return tuple(jnp.zeros(a.shape, a.dtype) for a in (*outputs, *zeroed, *in_place))

    monkeypatch.setattr("lutjax.kernels._triton._triton_launch._run", run)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)


def attend(implementation, index, n_queries=21):
    """Return lookup attention and its gradient for given query, key and position ids, including ids far out of range."""
    rng = np.random.default_rng(0)
    shapes, bits = ((2, n_queries, 2), (2, n_queries, 2), (n_queries - 1, 1)), 2
    margins = [jnp.asarray(rng.integers(-8, 8, shape) / 4, jnp.float32) for shape in shapes]
    flips = [jnp.asarray(1 << rng.integers(0, bits, shape), jnp.int32) for shape in shapes]
    ids = [
        jnp.broadcast_to(jnp.asarray(i, jnp.int32), s) for i, s in zip(index, shapes, strict=True)
    ]
    weights = jnp.asarray(rng.integers(-8, 8, (2, 64, 3)), jnp.float32)
    dy = jnp.asarray(rng.integers(-4, 4, (2, n_queries, 3)), jnp.float32)

    def f(weights, *margins):
        of = (lutjax.Detection(*arrays, bits) for arrays in zip(ids, flips, margins, strict=True))
        return lutjax.lookup_attention(weights, *of, implementation=implementation)

    y, vjp = jax.vjp(f, weights, *margins)
    return y, *vjp(dy)
