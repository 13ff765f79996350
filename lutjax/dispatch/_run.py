"""Kernel invocation on the target device of a lowering."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from lutjax import _compat, _meshes
from lutjax.dispatch._plan import Plan
from lutjax.dispatch.contract import Call, Direction
from lutjax.dispatch.registry import Device, KernelSpec, Platform
from lutjax.values._fixed_point import Totals


def run_plan(
    plan: Plan, direction: Direction, needs: tuple[bool, ...] | None, call: Call, *others: Any
) -> Any:
    """Run the plan's kernels and return their results.

    Args:
      needs: for the backward pass, a flag for each differentiated array.
      call: in kernel layout.
      *others: for the backward pass the cotangent; for an update the cotangent and the step.
    """

    def function_of(device: Device, spec: KernelSpec) -> Callable[..., Any]:
        of_one = functools.partial(_run, plan, direction, spec.load(direction), needs, device)
        if not plan.stacked or spec.stacks:
            return of_one
        if spec.platform == Platform.XLA:
            return jax.vmap(of_one)
        return lambda *args: jax.lax.map(lambda one: of_one(*one), args)

    functions = [(device, function_of(device, spec)) for device, spec in plan.choice]
    if len(functions) == 1:
        return functions[0][1](call, *others)
    # Traced in a process with several backends: the branch is taken when the function is lowered.
    # Branches return the same dtypes, but kernels may give cotangents in wider ones than their
    # arguments' (see the contract).
    outlines = [jax.eval_shape(function, call, *others) for _, function in functions]
    wide = jax.tree.map(
        lambda *found: max((a.dtype for a in found), key=lambda d: d.itemsize), *outlines
    )

    def widen_outputs(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(lambda a, dtype: a.astype(dtype), function(*args), wide)

    branches = {
        name: widen_outputs(function)
        for device, function in functions
        for name in device.lowering_names
    }
    return jax.lax.platform_dependent(call, *others, **branches)


def _run(
    plan: Plan,
    direction: Direction,
    function: Callable[..., Any],
    needs: tuple[bool, ...] | None,
    device: Device,
    call: Call,
    *others: Any,
) -> Any:
    axes = _meshes.joint_varying_axes((call, *others))
    accumulate = call.accumulate
    if accumulate is not None:
        # The op checks sums against their floating-point twin, and divides totals after it has
        # summed the parts of all devices.
        totals = Totals(accumulate.scale)
        unchecked = dataclasses.replace(accumulate, checked=False)
        call = call.replace(accumulate=totals if direction == "forward" else unchecked)
    outputs: Any
    with contextlib.nullcontext() if plan.launches is None else plan.launches.activate():
        if direction == "backward":
            assert needs is not None
            names = call.arrays()
            wanted = frozenset(name for name, need in zip(names, needs, strict=True) if need)
            found = function(call, *others, wanted, device=device)
            outputs = tuple([found.get(name) for name in names])
        else:
            outputs = function(call, *others, device=device)
    # Not all kernels say that their results vary over the mesh axes that their arguments vary over.
    return jax.tree.map(lambda a: _compat.cast_varying(a, axes), outputs) if axes else outputs
