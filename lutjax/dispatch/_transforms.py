"""Turn the kernels of an op into a jitted, differentiable JAX function.

An op describes itself by its `Call`. A kernel is a set of functions that take a call with one
leading batch axis (see `lutjax.dispatch.contract`). `apply` combines them:

    jit( fold batch dimensions -> custom_vjp( custom_vmap(forward), custom_vmap(backward) )
         -> unfold )

`run_update` does the same for an optimizer step on a table:

    jit( fold batch dimensions -> custom_vmap(update) )

A call is a pytree, and every transformation takes it as it is. The `Plan` is the cache key of the
functions. `_leading_axes` folds, `_gradient` has `custom_vjp`, `_batching` `custom_vmap`,
`_partition` divides functions over devices, and `_run` invokes the kernel.
"""

import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lutjax import _compat, _meshes
from lutjax.dispatch import _table_reads
from lutjax.dispatch._batching import kernel
from lutjax.dispatch._gradient import make_differentiable
from lutjax.dispatch._leading_axes import (
    batch_shape,
    fold,
    fold_call,
    folded_output,
    shapes_of_kernel,
    unfold,
)
from lutjax.dispatch._partition import Layout
from lutjax.dispatch._parts import needs_parts, run_decomposed
from lutjax.dispatch._plan import Over, Plan, cache_calls, choose, choose_whole
from lutjax.dispatch.contract import Call, Step
from lutjax.dispatch.registry import (
    Device,
    Implementation,
    Launched,
    Made,
    devices_of,
    kernel_registry,
    names_of,
)
from lutjax.values._ids import as_jax, trusted_ids


def apply(call: Call, *, implementation: Implementation = None, feature_axis: int = -1) -> Any:
    """Select an implementation for an op, run it, and return its outputs.

    Args:
      call: with batch dimensions in front of every batched array.
      feature_axis: -1 if batch dimensions come first; 0 if features come first, for ops with
          features-first kernels.
    """
    leaves, structure = jax.tree.flatten(call)
    # Lists, also below: a generator would add a Python call for every array.
    if [a for a in leaves if not isinstance(a, jax.Array)]:
        call = jax.tree.map(as_jax, call)
        leaves = jax.tree.leaves(call)
    traced = bool([a for a in leaves if isinstance(a, jax.core.Tracer)])
    _refuse_in_fork(call.op)
    kernel_registry.follow_coroutine(traced=traced)
    asked = kernel_registry.requested(call.op, implementation)
    names, devices = names_of(asked), devices_of(leaves)
    # Of the next call with these shapes and options no implementation is asked again.
    kinds = tuple([(a.shape, a.dtype) for a in leaves])
    plan = kernel_registry.remembered(
        (structure, kinds, names, devices, feature_axis),
        lambda: _make_plan(shapes_of_kernel(call, feature_axis), names, devices),
    )
    # The key above has no configs, so the plan is shared by calls that differ in them only.
    if isinstance(asked, Launched):
        plan = plan.replace(launches=asked.launches)
    # See `Plan.thread`.
    if traced and threading.current_thread() is not threading.main_thread():
        plan = plan.replace(thread=threading.get_ident())
    collected = kernel_registry.collected()
    place = 0 if collected is None else len(collected)
    on = others = None
    if call.parts is not None and ((apart := needs_parts(call)) or plan.has_parts):
        # If the devices differ, those with a fused kernel run it and all others run the parts.
        fused = plan.replace(choice=()) if apart else plan.fused
        on = fused.devices
        others = tuple(d for d in plan.devices if d not in on) if fused.choice else None
        y = _run_decomposed(call, plan, fused, implementation, feature_axis)
    else:
        y = _run_kernels(call, plan, feature_axis)
    if collected is not None:
        shapes = _shapes_of(shapes_of_kernel(call, feature_axis))
        made = Made(shapes, folded_output(shapes, y), given=call, devices=on)
        kernel_registry.note(place, made, others)
    return y


def _shapes_of(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), arrays)


def _make_plan(shapes: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Plan:
    return Plan(type(shapes), choose_whole(shapes, names, devices), names)


def _run_kernels(call: Call, plan: Plan, feature_axis: int) -> Any:
    reads = _table_reads.current_reads()
    table = (
        None
        if reads is None or call.table_name is None
        else reads.name(getattr(call, call.table_name))
    )
    if reads is not None and table is not None:
        return reads.look_up(table, call, functools.partial(_run_tapped, plan))
    return compile_plan(plan, feature_axis=feature_axis)(call, None)


def _run_decomposed(
    call: Call, plan: Plan, fused: Plan, implementation: Implementation, feature_axis: int
) -> Any:
    """Return a fused op's outputs from its parts.

    If the device is not yet known, devices with a kernel use it.

    Args:
      fused: the plan for these devices.
    """

    def run_trusted(call: Call, taps: None) -> Any:
        with trusted_ids():  # the op has checked its ids; its parts receive derived ids
            return run_decomposed(call, implementation, feature_axis)

    if not fused.choice:
        return run_trusted(call, None)
    by_kernel = compile_plan(fused, feature_axis=feature_axis)
    kernels = {name: by_kernel for device in fused.devices for name in device.lowering_names}
    return jax.lax.platform_dependent(call, None, **kernels, default=run_trusted)


def _run_tapped(plan: Plan, taps: Any, call: Call) -> Any:
    return compile_plan(plan, tapped=taps is not None)(call, taps)


def run_update(
    call: Call, cotangent: jax.Array, step: Step, *, implementation: Implementation = None
) -> Any:
    """Return a call's table and row state after an optimizer step, in the table's own memory.

    Args:
      call: with batch dimensions, as for `apply`. cotangent: the output's cotangent.
    """
    _refuse_in_fork(call.op)
    kernel_registry.follow_coroutine(
        traced=any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((call, cotangent, step)))
    )
    asked = kernel_registry.requested(call.op, implementation)
    shapes = _shapes_of(shapes_of_kernel(call, -1))
    of_cotangent = folded_output(shapes, cotangent)
    devices = devices_of(jax.tree.leaves((call, cotangent, step)))
    choice = choose(shapes, names_of(asked), "update", devices, of_cotangent, _shapes_of(step))
    if (collected := kernel_registry.collected()) is not None:
        kernel_registry.note(len(collected), Made(shapes, of_cotangent, step.rule, call))
    launches = asked.launches if isinstance(asked, Launched) else None
    plan = Plan(type(call), choice, launches=launches)
    return compiled_update(plan)(call, cotangent, step)


_ran_in: list[int] = []
"""Process that first ran an op."""


def _refuse_in_fork(op: str) -> None:
    """Raise if this process was forked after ops ran, which JAX does not support.

    Compilation would wait for threads missing in the fork.
    """
    own = os.getpid()
    if not _ran_in:
        _ran_in.append(own)
    if _ran_in[0] != own:
        raise RuntimeError(
            f"{op}: this process was forked from one in which JAX had run, and JAX's threads are "
            "not here: it would wait for them without end. Start processes by multiprocessing's "
            "method 'spawn' or 'forkserver', or fork before JAX is used."
        )


@cache_calls
def compile_plan(plan: Plan, *, tapped: bool = False, feature_axis: int = -1) -> Callable[..., Any]:
    """Return the op as a jitted function of its call and taps.

    Args:
      tapped: True if there are two taps, see `lutjax.dispatch._gradient.make_differentiable`;
          without taps the second argument is None.
    """
    op = plan.op

    @functools.cache
    def function_of(over: Over) -> Callable[..., Any]:
        """Return the op with one leading batch axis."""
        of_part = plan.replace(over=over)
        if op.differentiable:
            return make_differentiable(of_part, tapped)
        forward = kernel(of_part, "forward")
        return lambda call, taps: forward(_meshes.varying_alike(call))

    def run(over: Over, call: Call, taps: Any) -> Any:
        batch = batch_shape(call, feature_axis)
        if taps is not None:
            zero, token = taps
            token = _compat.cast_varying(token, _meshes.joint_varying_axes(call))
            taps = (zero.reshape(math.prod(batch), *zero.shape[len(batch) :]), token)
        outputs = function_of(over)(fold(call.prepare(), batch, feature_axis), taps)
        return unfold(op, outputs, batch, feature_axis)

    def run_on_explicit_axes(call: Call, taps: Any) -> Any:
        call = call.prepare()
        layout = Layout.from_call(call, first=op.features_first and feature_axis == 0)
        parts = layout.kernel_layout("forward")
        if not parts.divides or _lacks_elements(call, taps):
            whole = functools.partial(run, None)
            spec = layout.output_spec(op)
            return _meshes.shard_by_compiler(whole, lambda *_: spec)(call, taps)
        outputs = parts.output_spec(op)
        specs = (parts.array_specs(call), (outputs, PartitionSpec()) if tapped else None)
        of_part = functools.partial(run, parts.over)
        y = _meshes.run_sharded(of_part, specs, outputs)(call, taps)
        return _meshes.laid_out(y, layout.output_spec(op))

    return _jit_with_name(functools.partial(run, ()), run_on_explicit_axes, f"lutjax_{op.op}")


@cache_calls
def compiled_update(plan: Plan) -> Callable[..., Any]:
    """Return the update as a jitted function of the call, the cotangent and the step."""
    op = plan.op

    def run(over: Over, call: Call, cotangent: jax.Array, step: Step) -> Any:
        update = kernel(plan.replace(over=over), "update")
        return update(*_meshes.varying_alike((*fold_call(call, cotangent), step)))

    def run_on_explicit_axes(call: Call, cotangent: jax.Array, step: Step) -> Any:
        table, state = getattr(call, str(op.table_name)), step.state
        call = call.prepare()
        parts = Layout.from_call(call).kernel_layout("update")
        of_call = parts.array_specs(call)
        of_step = jax.tree.map(
            lambda a: parts.axes_spec((), ("t",), a.shape) if a.ndim else PartitionSpec(), step
        )
        outputs = (getattr(of_call, str(op.table_name)), of_step.state)
        if _lacks_elements(call, (cotangent, step)):
            update = _meshes.shard_by_compiler(functools.partial(run, None), lambda *_: outputs)
        else:
            specs = (of_call, PartitionSpec(), of_step)
            update = _meshes.run_sharded(functools.partial(run, parts.over), specs, outputs)
        own = jax.tree.map(_meshes.spec_of, (table, state))
        return jax.tree.map(_meshes.laid_out, update(call, cotangent, step), own)

    name = f"lutjax_{op.op}_update"
    return _jit_with_name(functools.partial(run, ()), run_on_explicit_axes, name)


def _lacks_elements(call: Call, others: Any) -> bool:
    """Return True if an array or the output is empty.

    `jax.shard_map` does not divide empty arrays.
    """
    return _meshes.lacks_elements((call, others)) or getattr(call, "n_outputs", None) == 0


def _jit_with_name(
    function: Callable[..., Any], on_explicit_axes: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Return a jitted function with a name for profiles.

    `on_explicit_axes` replaces it for arrays on a mesh with explicit axes.
    """

    def run_function(*args: Any) -> Any:
        if not _meshes.any_explicit(args):
            return function(*args)
        with _meshes.mesh_of(args):
            return on_explicit_axes(*args)

    run_function.__name__ = name
    return jax.jit(run_function)


def forget() -> None:
    """Clear all cached kernel functions, for tests that replace kernels."""
    for function in (compile_plan, compiled_update, kernel):
        function.cache_clear()  # type: ignore[union-attr]
