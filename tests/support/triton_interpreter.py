"""Triton kernels without a GPU: Triton's own interpreter runs their source, one program after the other."""

import contextlib
import functools
import importlib
import inspect
import pkgutil
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import ptx_emulator
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

import lutjax
from lutjax import testing
from lutjax.dispatch import _transforms
from lutjax.kernels import _triton
from lutjax.kernels._triton import _row_tiles, _triton_launch

# Triton's names of dtypes.
NAMES = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
NAMES |= {"int32": "i32", "int16": "i16", "int8": "i8"}
_ONE_AT_A_TIME = threading.Lock()


class _Pointer:
    """A numpy array as the interpreter takes it."""

    def __init__(self, array):
        self.array, self.dtype = array, NAMES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data


class _Executor(interpreter.GridExecutor):
    def _init_args_hst(self, args_dev, kwargs):
        return args_dev, kwargs

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        pass


def _as_bool(compare):
    # The interpreter says that a comparison has the type of what is compared, and spreads it as such.
    return lambda self, a, b: interpreter.TensorHandle(compare(self, a, b).data, tl.int1)


def _dot_of_numbers(dot):
    """Fix bfloat16 products: the interpreter holds bfloat16 as integers, and multiplies them as such."""

    def number(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(
            (handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32
        )

    return lambda self, a, b, *rest: dot(self, number(a), number(b), *rest)


def _range(*bounds):
    # A number of a loop is a scalar of Triton, not of Python; the interpreter may hold it in an array of one number, which is no index to NumPy.
    numbers = (b.handle.data.item() if isinstance(b, tl.tensor) else b for b in bounds)
    return (interpreter.interpreter_semantic.to_tensor(n) for n in range(*numbers))


def _run(inputs, outputs, zeroed, in_place, common):
    """Run a `_triton_launch` call's programs in the interpreter instead of on a GPU."""
    kernel, grid = common["kernel"], common["grid"]
    # The interpreter has no wrapped constants.
    constants = types.SimpleNamespace(
        **{name: value.value for name, value in vars(common["c"]).items()}
    )
    changed = (*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_place),)

    arrays = (*inputs, *in_place)

    def callback(*words):
        arrays = [
            _of_words(np.array(a, order="C"), dtype) for a, dtype in zip(words, dtypes, strict=True)
        ]
        fresh = [np.full(s.shape, 77, s.dtype) for s in outputs] + [
            np.zeros(s.shape, s.dtype) for s in zeroed
        ]
        last = arrays[len(inputs) :]
        pointers = [_Pointer(a) for a in (*arrays, *fresh, *last)]
        with _ONE_AT_A_TIME, np.errstate(all="ignore"):
            names = inspect.getfullargspec(kernel.fn).args
            _Executor(kernel.rewrite(), names, grid)(*pointers, c=constants)
        return tuple(_as_words(a) for a in (*fresh, *last))

    dtypes = [a.dtype for a in arrays]
    results = (*outputs, *zeroed, *changed)
    words = jax.pure_callback(callback, jax.eval_shape(_words, results), *_words(arrays))
    return tuple(
        jax.lax.bitcast_convert_type(a, s.dtype) if s.dtype == np.float64 else a
        for a, s in zip(words, results, strict=True)
    )


def _words(arrays):
    """Convert float64 to word pairs: callbacks run in threads unaware of `jax.enable_x64`."""
    return tuple(
        jax.lax.bitcast_convert_type(a, np.uint32) if a.dtype == np.float64 else a for a in arrays
    )


def _as_words(a):
    return a[..., None].view(np.uint32) if a.dtype == np.float64 else a


def _of_words(a, dtype):
    return a.view(np.float64)[..., 0].copy() if dtype == np.float64 else a


def modules():
    names = [f"{_triton.__name__}.{m.name}" for m in pkgutil.iter_modules(_triton.__path__)]
    return [importlib.import_module(name) for name in names]


def _rounded(convert):
    """Round float32 to bfloat16 as GPUs do; the interpreter truncates digits."""

    def converted(values, source, target, mode):
        if (source, target) == (tl.float32, tl.bfloat16):
            return np.asarray(values).view(np.float32).astype(jnp.bfloat16).view(np.uint16)
        return convert(values, source, target, mode)

    return converted


@contextlib.contextmanager
def interpreted():
    """Run the implementation "triton" on CPUs in this block."""
    # Triton imports more of itself when it first looks at an argument: before anything is patched.
    triton.runtime.jit.mangle_type(_Pointer(np.zeros(1, np.float32)))
    patch = pytest.MonkeyPatch()
    for module in (*modules(), tl, tl.standard):
        for name, value in vars(module).items():
            if isinstance(value, triton.JITFunction):
                patch.setattr(module, name, interpreter.InterpretedFunction(value.fn))
    for name, compare in vars(interpreter.InterpreterBuilder).items():
        if name.startswith(("create_icmp", "create_fcmp")):
            patch.setattr(interpreter.InterpreterBuilder, name, _as_bool(compare))
    create_dot = interpreter.InterpreterBuilder.create_dot
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_of_numbers(create_dot))
    asm = ptx_emulator.create_inline_asm(ptx_emulator.Memory())
    patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", asm, raising=False)
    for module in modules():
        if hasattr(module, "kernel"):  # others have none
            patch.setattr(module, "range", _range, raising=False)
    # Once for all: the interpreter would patch again at every call of a function, and not undo it.
    language = interpreter._patch_lang(
        types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    )
    patch.setattr(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope())
    patch.setattr(interpreter, "_convert_float", _rounded(interpreter._convert_float))
    patch.setattr(_row_tiles, "prefetch", lambda address: None)
    patch.setattr(_triton_launch, "_run", _run)
    registry = lutjax.kernel_registry
    added = [
        registry.register(
            spec.op,
            "triton",
            "cpu",
            spec.target,
            directions=spec.directions,
            priority=-1,
            unsupported=spec.declaration.supports,
            rates=True,
            stacks=spec.stacks,
        )
        for op in registry.ops()
        for spec in registry.candidates(op)
        if (spec.platform, spec.backend) == ("triton", "gpu")
    ]
    _transforms.forget()
    try:
        yield
    finally:
        for spec in added:
            registry.unregister(spec.op, spec.platform, spec.backend)
        language.restore()
        patch.undo()
        _transforms.forget()


def count_always(monkeypatch, small_blocks=False):
    """Make attention count row reads, however few; with small blocks, use several blocks, groups and products."""
    from lutjax.kernels._triton import _histograms

    monkeypatch.setattr(
        _histograms, "_FEWEST_KEYS", dict.fromkeys(("forward", "margins", "table"), 0)
    )
    monkeypatch.setattr(_histograms, "_FEWEST_OF_ID", 0)
    if small_blocks:
        monkeypatch.setattr(_histograms, "_BYTES", 256)
        monkeypatch.setitem(_histograms._COUNT, "rows", 32)
        monkeypatch.setitem(_histograms._COUNT, "keys", 16)
        for tile in (_histograms._SUM, _histograms._ADD, _histograms._PRODUCTS):
            monkeypatch.setitem(tile, "rows", 16)
            monkeypatch.setitem(tile, "cells", 16)


def own_always(monkeypatch):
    """Make warps own table columns, however few."""
    from lutjax.kernels._triton import _owned_columns

    monkeypatch.setattr(_owned_columns, "_FEWEST_WARPS", 1)
    monkeypatch.setattr(_owned_columns, "_FEWEST_OF_SHARE", 1)
    monkeypatch.setattr(_owned_columns, "_AT_ONCE", 7)


def check_plain_jax(f, *arguments):
    """Compare a function and its gradients between Triton and plain JAX; its first argument is the implementation."""

    def run(implementation):
        outputs, pullback = jax.vjp(functools.partial(f, implementation), *arguments)
        return outputs, pullback(jnp.ones_like(outputs))

    for actual, expected in zip(*(jax.tree.leaves(run(i)) for i in ("triton", "xla")), strict=True):
        testing.assert_close(f.__name__, actual, expected)


def scored_call(read, dtype=jnp.float32):
    """Return a `scored_lut` call including ids beyond the inputs, inputs with both zeros and ties, tables and scalars."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.choice([0.0, -0.0, 0.25, -0.25, 0.5, 3.0, -2.0], (13, 2, 6)), jnp.float32)
    weights = jnp.asarray(rng.integers(-8, 9, (6, 8, 11)) / 4, dtype)
    anchors = jnp.asarray(rng.integers(-3, 9, (6, 3, 2)), jnp.int32)

    def scored(implementation, x, weights, scalars, **options):
        options |= {"read": read, "groups": 2, "implementation": implementation}
        return lutjax.scored_lut(x, weights, anchors, scalars, **options)

    return scored, (x, weights, read.initial())


@contextlib.contextmanager
def scored_rows_in_numpy():
    """Run Mosaic's `scored_lut` on this machine: Triton kernels in the interpreter, shared-memory row reads by their definition."""
    from lutjax.kernels._pallas.gpu import _shared_reads

    def rows_of(weights, rows):
        places = (np.asarray(rows) & 0xFFFF, np.asarray(rows).view(np.uint32) >> 16)
        table = np.arange(len(weights))[:, None]
        return [np.asarray(weights, np.float32)[table, place // 128] for place in places]

    def sum_rows(weights, rows, factors, groups):
        n, samples = rows.shape[1], _shared_reads.SAMPLES_OF_WARP

        def sums(weights, rows, factors):
            with np.errstate(all="ignore"):
                read = rows_of(weights, rows)
                y = sum(
                    f[..., None] * row for f, row in zip(np.asarray(factors), read, strict=False)
                )
                return y.reshape(groups, -1, *y.shape[1:]).sum(1).swapaxes(0, 1).astype(np.float32)

        shape = jax.ShapeDtypeStruct((n, groups, weights.shape[2]), "float32")
        y = jax.pure_callback(sums, shape, weights, rows, factors)
        strange = (~jnp.isfinite(y)).any(2).T.reshape(groups, n // samples, samples).any(2)
        return y, jnp.broadcast_to(strange[..., None], (*strange.shape, 32)).astype(jnp.int32)

    def products(weights, rows, dy, ways, groups):
        def of_all(weights, rows, dy):
            with np.errstate(all="ignore"):
                by_table = np.repeat(np.asarray(dy, np.float32), len(weights) // dy.shape[1], 1)
                read = rows_of(weights, rows)[:ways]
                return np.stack([(row.swapaxes(0, 1) * by_table).sum(2).T for row in read])

        return jax.pure_callback(
            of_all, jax.ShapeDtypeStruct((ways, *rows.shape), "float32"), weights, rows, dy
        )

    registry, patch = lutjax.kernel_registry, pytest.MonkeyPatch()
    spec = next(
        s for s in registry.candidates("scored_lut") if (s.platform, s.backend) == ("pallas", "gpu")
    )
    patch.setattr(_shared_reads, "sum_rows", sum_rows)
    patch.setattr(_shared_reads, "products", products)
    registry.register(
        "scored_lut", "pallas", "cpu", spec.target, directions=spec.directions, priority=-2
    )
    _transforms.forget()
    try:
        yield
    finally:
        registry.unregister("scored_lut", "pallas", "cpu")
        patch.undo()
        _transforms.forget()
