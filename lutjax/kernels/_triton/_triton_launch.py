"""Calling Triton kernels from JAX: the only module that knows jax-triton, and the differences of its versions."""

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
_WARNINGS = threading.Lock()  # several threads that silence warnings at once would leave them silenced


def kernel(function: Callable[..., Any]) -> Any:
    """Make a function one of Triton, from its source as written: Triton does not understand a type checker's decorators."""
    return triton.jit(inspect.unwrap(function))


class Constants(types.SimpleNamespace):
    """Constants that a kernel is compiled for, by name: its last parameter, ``c: tl.constexpr``."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.__dict__.items()))

    def mangle(self) -> str:
        """Return a short name, which Triton puts into those of the functions that a kernel calls."""
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
    """Run a kernel on a row of programs.

    Its parameters are the pointers of `inputs`; of `in_place`, which it must not use; of `outputs`, `zeroed` and again of
    `in_place`; then its `Constants`.

    Args:
      inputs: arrays that it reads.
      outputs: arrays that it writes, every element of them.
      zeroed: arrays of zeros that it adds to.
      in_place: arrays that it changes in their own memory, if jit may give that away.
      programs: number of programs; none: nothing runs.
      warps: of one program. stages: of the loops that the compiler pipelines.

    Returns:
      The arrays of `outputs`, `zeroed` and `in_place`.
    """
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in (*inputs, *in_place)))
    shapes = (*outputs, *zeroed)
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
    # XLA would give a kernel a slice in the memory of the whole, or let it write into a slice of another array: what is to change is lost.
    results = _run(inputs, outputs, zeroed, [jax.lax.optimization_barrier(a) for a in in_place], common)
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
    # Arrays that change are outputs in the memory of inputs. Those inputs are parameters before the outputs in jax-triton 0.3;
    # in 0.4 their parameters are those of the outputs, and the ones before get a number that is not looked at.
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
    # Its rule for dead code has two parameters; jax 0.12 calls rules with three.
    partial_eval.dce_rules[jax_triton.triton_lib.triton_kernel_call_p] = _all_is_used
    names = common["kernel"].arg_names[len(inputs) + len(in_place) + len(shapes) :]
    # It prefers references, which JAX cannot lower inside `jax.custom_jvp`.
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
    """Let jax-triton 0.3 call the target of jaxlib that later versions call, where it is asked for by name.

    CUDA graphs record it. Its own target they do not, so every launch of a kernel ends one.
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
