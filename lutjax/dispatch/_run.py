"""Kernel invocation on the target device of a lowering."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

from lutjax import _compat, _meshes
from lutjax.dispatch._plan import Options, Plan
from lutjax.dispatch.contract import Direction, Step
from lutjax.dispatch.registry import Device, KernelSpec, Platform
from lutjax.values._fixed_point import Totals, without_check


def run_plan(
    plan: Plan,
    direction: Direction,
    needs: tuple[bool, ...] | None,
    options: Options,
    args: tuple[Any, ...],
) -> Any:
    """Run the plan's kernels and return their results.

    Args:
      needs: for the backward pass, a flag for each differentiated array. options: options of the
          plan, or of a device's part of the call.
    """

    def function_of(device: Device, spec: KernelSpec) -> Callable[..., Any]:
        of_one = functools.partial(
            _run, plan, direction, spec.load(direction), needs, options, device
        )
        if not plan.stacked or spec.stacks:
            return of_one
        return (
            jax.vmap(of_one)
            if spec.platform == Platform.XLA
            else lambda *args: jax.lax.map(lambda one: of_one(*one), args)
        )

    functions = [(device, function_of(device, spec)) for device, spec in plan.choice]
    if len(functions) == 1:
        return functions[0][1](*args)
    # Traced in a process with several backends: the branch is taken when the function is lowered. Branches return the same
    # dtypes, but kernels may give cotangents in wider ones than their arguments' (see the contract).
    outlines = [jax.eval_shape(function, *args) for _, function in functions]
    wide = jax.tree.map(
        lambda *found: max((a.dtype for a in found), key=lambda d: d.itemsize), *outlines
    )

    def widen_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(lambda a, dtype: a.astype(dtype), function(*args), wide)

    return jax.lax.platform_dependent(
        *args,
        **{
            name: widen_outputs(function)
            for device, function in functions
            for name in device.lowering_names
        },
    )


def _run(
    plan: Plan,
    direction: Direction,
    function: Callable[..., Any],
    needs: tuple[bool, ...] | None,
    options: Options,
    device: Device,
    *args: Any,
) -> Any:
    op = plan.op
    axes = _meshes.joint_varying_axes(args)
    given = without_check(dict(options))
    rule = given.pop("rule", None)
    arrays, others = args[: len(op.arrays())], args[len(op.arrays()) :]
    if direction == "forward" and given.get("accumulate") is not None:
        given["accumulate"] = Totals(given["accumulate"].scale)
    call = op.from_arrays(arrays, given.items())
    outputs: Any
    with contextlib.nullcontext() if plan.launches is None else plan.launches.activate():
        if direction == "forward":
            outputs = function(call, device=device)
        elif direction == "backward":
            assert needs is not None
            wanted = frozenset(name for name, need in zip(op.arrays(), needs, strict=True) if need)
            found = function(call, *others, wanted, device=device)
            outputs = tuple(found.get(name) for name in op.arrays())
        else:
            cotangent, rate, factor, state = others
            assert rule is not None
            outputs = function(call, cotangent, Step(rate, factor, state, rule), device=device)
    # Not all kernels say that their results vary over the mesh axes that their arguments vary over.
    return jax.tree.map(lambda a: _compat.cast_varying(a, axes), outputs) if axes else outputs
