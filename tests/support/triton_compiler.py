"""Triton kernels compiled for NVIDIA GPUs without requiring one, and the ops with Triton kernels."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import triton
import triton_interpreter
from cases import fast_size, ops, ops_that_add
from flax import nnx
from triton.backends.compiler import GPUTarget

import lutjax
from lutjax import testing
from lutjax.dispatch import _transforms
from lutjax.kernels import _nvidia, _triton
from lutjax.kernels._triton import _triton_launch
from lutjax.testing import _ahead_of_time

if importlib.util.find_spec("jax_triton") is None:
    raise ModuleNotFoundError("jax_triton is not installed")

KERNELS = {
    spec.op: spec
    for op in ops()
    for spec in lutjax.kernel_registry.candidates(op)
    if spec.platform == "triton"
}
OPS = list(KERNELS)
UPDATED = [op for op, spec in KERNELS.items() if "update" in spec.directions]
SUMMED = [
    op
    for op in OPS
    if op in ops_that_add() and op not in ("bilinear_gates", "soft_lut", "binary_lut")
]
GPUS = {80: "NVIDIA A100", 90: "NVIDIA H200", 100: "NVIDIA B200"}  # by compute capability


def compiled_size(op):
    """Return a size with reader kernels if the op has any, else its fast size."""
    sizes = testing.shapes(op, "triton")
    return next((shape for shape, size in sizes.items() if "readers" in size), fast_size(op))


def recorded_launches(monkeypatch):
    """Record kernels instead of launching them: ``{(kernel, array types): launch arguments}``."""
    recorded = {}

    def record(inputs, outputs, zeroed, in_place, common):
        arrays = (*inputs, *in_place, *outputs, *zeroed, *in_place)
        types = tuple("*" + triton_interpreter.NAMES[a.dtype.name] for a in arrays)
        recorded[common["kernel"], types] = common
        return tuple(jnp.zeros(a.shape, a.dtype) for a in (*outputs, *zeroed, *in_place))

    monkeypatch.setattr(_triton_launch, "_run", record)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    _transforms.forget()
    yield recorded
    _transforms.forget()


def trace(case, device_kind=GPUS[90], accumulate=None):
    """Trace an op, its gradient and its table update for a device."""
    testing.check_lowering(
        case, "triton", platform="cuda", device_kind=device_kind, accumulate=accumulate
    )
    if case.op not in UPDATED:
        return

    def update(differentiable, ct):
        f = functools.partial(testing._call, case, lutjax, "triton", accumulate=accumulate)
        _, gradients = testing._run_factored(f, differentiable, ct)
        weights = differentiable["weights"]
        return lutjax.update_table(weights, gradients["weights"], 0.25, implementation="triton")

    y = jax.eval_shape(
        functools.partial(testing._call, case, lutjax.reference, None), case.differentiable
    )
    with _ahead_of_time.use_target("cuda", device_kind):
        jax.eval_shape(update, case.differentiable, y)


def trace_layer(make, x, **options):
    """Trace a layer's gradient for an H200, with the layer created by `make` from `rngs`."""
    with _ahead_of_time.use_target("cuda", GPUS[90]):
        graph, params, others = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)

        def loss(params, others, x):
            return nnx.merge(graph, params, others)(x, **options).sum()

        jax.eval_shape(jax.grad(loss, argnums=(0, 2)), params, others, x)


def compiled(common, types, capability=90):
    """Compile a recorded launch for a compute capability."""
    constants = dict(common)
    kernel = constants.pop("kernel")
    n_arrays, names = len(types), kernel.arg_names
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={
            **dict(zip(names, types, strict=False)),
            **dict.fromkeys(names[n_arrays:], "constexpr"),
        },
        constexprs={(i,): constants[name] for i, name in enumerate(names) if i >= n_arrays},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(n_arrays)},
    )
    options = {
        "num_warps": common["num_warps"],
        "num_stages": common["num_stages"],
        "enable_fp_fusion": True,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def check_compilation(launches, capability=90):
    """Assert that all launches compile and fit into a GPU's shared memory."""
    assert launches
    for (kernel, types), common in launches.items():
        binary = compiled(common, types, capability)
        assert f".target sm_{capability}" in binary.asm["ptx"], kernel
        assert binary.metadata.shared <= 1024 * _nvidia._SHARED_MEMORY[capability], kernel
