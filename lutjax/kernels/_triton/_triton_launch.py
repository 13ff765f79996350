"""Kernel launches from JAX: the only module that depends on jax-triton and its versions.

A launch has a one-dimensional grid. Kernel parameters are pointers and one constant object, for
which the kernel is compiled. In-place arrays alias a call input with an output.
"""

import functools
import hashlib
import inspect
import threading
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir, partial_eval

from lutjax import _compat
from lutjax.dispatch.registry import Device
from lutjax.kernels._nvidia import compute_capability
from lutjax.kernels._triton import version
from lutjax.kernels._triton._language import tl, triton

_TARGET = "triton_kernel_call_ffi"
# Filters of warnings are global: threads that silence them at once would leave them silenced.
_WARNINGS = threading.Lock()


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function with Triton, from its source without a type checker's decorators."""
    return triton.jit(inspect.unwrap(function))


class Constants(types.SimpleNamespace):
    """Compile-time kernel constants: a kernel's last parameter, ``c: tl.constexpr``."""

    # Triton hashes constants to find a compiled kernel.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.__dict__.items()))

    def mangle(self) -> str:
        """Return a short name for use in device function names."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def launch(
    kernel: Any,
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    zeroed: Sequence[jax.ShapeDtypeStruct] = (),
    in_place: Sequence[jax.Array] = (),
    programs: int,
    device: Device,
    warps: int,
    stages: int = 1,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel on a one-dimensional grid.

    The kernel's parameters are pointers to `inputs`; to `in_place`, which it must not use; to
    `outputs`, `zeroed` and again `in_place`; then its `Constants`.

    Args:
      outputs: output arrays; the kernel must write every element.
      zeroed: zero-initialized output arrays.
      in_place: arrays that the kernel updates in their own memory, if jit may donate them.
      programs: number of programs; with 0 nothing runs.

    Returns:
      The `outputs`, `zeroed` and `in_place` arrays.
    """
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in (*inputs, *in_place)))
    shapes = (*outputs, *zeroed)
    # Without programs the outputs are not written, so zeros replace them.
    if programs == 0:
        return (*(_zeros(s, axes) for s in shapes), *in_place)
    common = {
        "kernel": kernel,
        "grid": (programs, 1, 1),
        "num_warps": warps,
        "num_stages": stages,
        "compute_capability": compute_capability(device),
        "c": Constants(**{name: tl.constexpr(value) for name, value in constants.items()}),
    }
    # Without the barriers XLA may pass a slice in the memory of the whole array, or alias an output
    # with a slice of another array. Changes would then be lost.
    results = _run(
        inputs, outputs, zeroed, [jax.lax.optimization_barrier(a) for a in in_place], common
    )
    made, changed = results[: len(shapes)], results[len(shapes) :]
    changed = [jax.lax.optimization_barrier(a) for a in changed]
    return tuple(_compat.cast_varying(a, axes) for a in (*made, *changed))


def _zeros(shape: jax.ShapeDtypeStruct, axes: frozenset[str]) -> jax.Array:
    return _compat.cast_varying(jnp.zeros(shape.shape, shape.dtype), axes)


def _run(
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    zeroed: Sequence[jax.ShapeDtypeStruct],
    in_place: Sequence[jax.Array],
    common: dict[str, Any],
) -> Sequence[jax.Array]:
    import jax_triton

    shapes = (*outputs, *zeroed)
    every_output = (*shapes, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_place))
    older = version("jax-triton") < (0, 4)
    # Arrays in place are outputs that alias inputs. In jax-triton 0.3 these inputs are parameters
    # before the outputs. In 0.4 only the outputs are parameters, and an unused number takes the
    # place of the inputs.
    first = len(inputs) + (0 if older else len(in_place))
    common = {
        **common,
        "zeroed_outputs": tuple(range(len(outputs), len(shapes))),
        "input_output_aliases": {first + n: len(shapes) + n for n in range(len(in_place))},
    }
    if older:
        _use_newer_target(jax_triton.triton_lib)
        return jax_triton.triton_call(
            *inputs, *in_place, out_shape=every_output, custom_call_target_name=_TARGET, **common
        )
    # The rule for dead code of jax-triton 0.4 has two parameters; jax 0.12 calls it with three.
    partial_eval.dce_rules[jax_triton.triton_lib.triton_kernel_call_p] = _all_is_used
    names = common["kernel"].arg_names[len(inputs) + len(in_place) + len(shapes) :]
    # jax-triton 0.4 warns in favor of references, which JAX cannot lower inside `jax.custom_jvp`.
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax_triton.triton_call(
            *inputs,
            *(0 for _ in in_place),
            out_type=every_output,
            backend_options={"enable_fp_fusion": True},
            **dict(zip(names, in_place, strict=False)),
            **common,
        )


@functools.cache
def _use_newer_target(library: Any) -> None:
    """Let jax-triton 0.3 use jaxlib's newer call target where it is registered.

    CUDA graphs record the newer target. jax-triton 0.3's own target ends a graph at every launch.
    """
    primitive = library.triton_kernel_call_p
    of_cuda = functools.partial(library.triton_kernel_call_lowering, library.get_cuda_backend)

    def lowering(context: Any, *arguments: Any, **parameters: Any) -> Any:
        results = of_cuda(context, *arguments, **parameters)
        if parameters["custom_call_target_name"] != _TARGET:
            return results
        old = results[0].owner
        rule = jax.ffi.ffi_lowering(
            _TARGET,
            operand_output_aliases=dict(parameters["input_output_aliases"]),
            backend_config={"opaque": old.attributes["backend_config"]},
        )
        new = rule(context, *arguments)
        old.erase()
        return new

    mlir.register_lowering(primitive, lowering, platform="cuda")


def _all_is_used(*arguments: Any) -> tuple[list[bool], Any]:
    equation = arguments[-1]
    return [True] * len(equation.invars), equation
