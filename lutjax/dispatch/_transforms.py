"""Turn the kernels of an op into a jitted, differentiable JAX function.

An op describes itself by its `Call`. A kernel is a set of functions that take a call with one
leading batch axis (see `lutjax.dispatch.contract`). `apply` combines them:

    jit( fold batch dimensions -> custom_vjp( custom_vmap(forward), custom_vmap(backward) )
         -> unfold )

`run_update` does the same for an optimizer step on a table:

    jit( fold batch dimensions -> custom_vmap(update) )

Internally a call is its array tuple (`Call.values`) and a `Plan`. Transformations apply to the
arrays; the plan is the cache key of every function. `_leading_axes` folds, `_gradient` has
`custom_vjp`, `_batching` `custom_vmap`, `_partition` divides functions over devices, and `_run`
invokes the kernel.
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
    folded_output,
    ranks_of_update,
    shapes_of_kernel,
)
from lutjax.dispatch._partition import Layout
from lutjax.dispatch._parts import needs_parts, run_decomposed
from lutjax.dispatch._plan import Over, Plan, cache_calls, choose, choose_whole
from lutjax.dispatch.contract import Call, Step
from lutjax.dispatch.registry import Device, Implementation, devices_of, kernel_registry
from lutjax.values._ids import as_jax, trusted_ids


def apply(call: Call, *, implementation: Implementation = None, feature_axis: int = -1) -> Any:
    """Select an implementation for an op, run it, and return its outputs.

    Args:
      call: with batch dimensions in front of every batched array.
      feature_axis: -1 if batch dimensions come first; 0 if features come first, for ops with
          features-first kernels.
    """
    leaves, structure = jax.tree.flatten(call.values())
    # Lists, also below: a generator would add a Python call for every array.
    if [a for a in leaves if not isinstance(a, jax.Array)]:
        call = jax.tree.map(as_jax, call)
        leaves = jax.tree.leaves(call.values())
    traced = bool([a for a in leaves if isinstance(a, jax.core.Tracer)])
    _refuse_in_fork(call.op)
    kernel_registry.follow_coroutine(traced=traced)
    names = kernel_registry.request(call.op, implementation)
    devices, options = devices_of(leaves), call.options()
    # Of the next call with these shapes and options no implementation is asked again.
    kinds = tuple([(a.shape, a.dtype) for a in leaves])
    plan = kernel_registry.remembered(
        (type(call), options, names, devices, feature_axis, structure, kinds),
        lambda: _make_plan(shapes_of_kernel(call, feature_axis), names, devices),
    )
    if (launches := kernel_registry.launches(call.op, implementation)) is not None:
        plan = plan.replace(launches=launches)
    if traced and threading.current_thread() is not threading.main_thread():
        plan = plan.replace(thread=threading.get_ident())
    n_noted = kernel_registry.n_noted()
    on = others = None
    if call.parts is not None and ((apart := needs_parts(call)) or plan.has_parts):
        fused = plan.replace(choice=()) if apart else plan.fused
        on = fused.devices
        others = tuple(d for d in plan.devices if d not in on) if fused.choice else None
        y = _run_decomposed(call, plan, fused, implementation, feature_axis)
    else:
        y = _run_kernels(call, plan, feature_axis)
    kernel_registry.note(
        n_noted,
        call,
        lambda: shapes_of_kernel(call, feature_axis),
        lambda shapes: folded_output(shapes, y),
        devices=on,
        of_parts=others,
    )
    return y


def _make_plan(shapes: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Plan:
    return Plan(type(shapes), shapes.options(), choose_whole(shapes, names, devices), names)


def _run_kernels(call: Call, plan: Plan, feature_axis: int) -> Any:
    reads = _table_reads.current_reads()
    table = (
        None
        if reads is None or call.table_name is None
        else reads.name(getattr(call, call.table_name))
    )
    if reads is not None and table is not None:
        return reads.look_up(table, call, functools.partial(_run_tapped, plan))
    return compile_plan(plan, feature_axis=feature_axis)(*call.values())


def _run_decomposed(
    call: Call, plan: Plan, fused: Plan, implementation: Implementation, feature_axis: int
) -> Any:
    """Return a fused op's outputs from its parts.

    If the device is not yet known, devices with a kernel use it.

    Args:
      fused: the plan for these devices.
    """

    def run_trusted(*arrays: Any) -> Any:
        with trusted_ids():  # the op has checked its ids; its parts receive derived ids
            return run_decomposed(plan.call(arrays), implementation, feature_axis)

    if not fused.choice:
        return run_trusted(*call.values())
    by_kernel = compile_plan(fused, feature_axis=feature_axis)
    kernels = {name: by_kernel for device in fused.devices for name in device.lowering_names}
    return jax.lax.platform_dependent(*call.values(), **kernels, default=run_trusted)


def _run_tapped(plan: Plan, taps: Any, call: Call) -> Any:
    return compile_plan(plan, tapped=taps is not None)(*(taps or ()), *call.values())


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
    names = kernel_registry.request(call.op, implementation)
    shapes = shapes_of_kernel(call, -1)
    choice = choose(
        shapes,
        names,
        "update",
        devices_of(jax.tree.leaves((call, cotangent, step))),
        folded_output(shapes, cotangent),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), step),
    )
    kernel_registry.note(
        kernel_registry.n_noted(),
        call,
        lambda: shapes,
        lambda shapes: folded_output(shapes, cotangent),
        step.rule,
    )
    launches = kernel_registry.launches(call.op, implementation)
    plan = Plan(type(call), (*call.options(), ("rule", step.rule)), choice, launches=launches)
    return compiled_update(plan)(*call.values(), cotangent, step.rate, step.factor, step.state)


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
            f"{op}: this process was forked from one in which JAX had run, and JAX's threads are not here: it would wait for them without "
            "end. Start processes by multiprocessing's method 'spawn' or 'forkserver', or fork before JAX is used."
        )


@cache_calls
def compile_plan(plan: Plan, *, tapped: bool = False, feature_axis: int = -1) -> Callable[..., Any]:
    """Return the op as a jitted function of its arrays.

    Args:
      tapped: prepend two taps; see `lutjax.dispatch._gradient.make_differentiable`.
    """
    op, ranks = plan.op, plan.op.ranks()

    @functools.cache
    def function_of(over: Over) -> Callable[..., Any]:
        """Return the op with one leading batch axis."""
        of_part = plan.replace(over=over)
        if op.differentiable:
            return make_differentiable(of_part, tapped)
        forward = kernel(of_part, "forward")
        return lambda *args: forward(*_meshes.varying_alike(args))

    def call_features_first(over: Over, *args: Any) -> Any:
        batch = next(
            a.shape[1:] if feature_axis == 0 else a.shape[:-1]
            for a, rank in zip(args, ranks, strict=True)
            if rank is not None
        )
        n, first = math.prod(batch), feature_axis == 0
        args = tuple(
            a
            if rank is None
            else a.reshape(a.shape[0], n)
            if first
            else a.reshape(n, a.shape[-1]).T
            for a, rank in zip(args, ranks, strict=True)
        )
        y = function_of(over)(*args)
        if first:
            return y.reshape(*y.shape[:-1], *batch)
        return jnp.moveaxis(y, -1, 0).reshape(*batch, *y.shape[:-1])

    def call(over: Over, *args: Any) -> Any:
        taps, args = (args[:2], args[2:]) if tapped else ((), args)
        batch = batch_shape(ranks, args)
        if taps:
            zero, token = taps
            token = _compat.cast_varying(token, _meshes.joint_varying_axes(args))
            taps = (zero.reshape(math.prod(batch), *zero.shape[len(batch) :]), token)
        outputs = function_of(over)(*taps, *fold(ranks, plan.call(args).prepare().values(), batch))
        return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), outputs)

    inner = call_features_first if op.features_first else call

    def run_on_explicit_axes(*args: Any) -> Any:
        taps, args = (args[:2], args[2:]) if tapped else ((), args)
        given = plan.call(args).prepare()
        layout = Layout.from_call(given, first=op.features_first and feature_axis == 0)
        parts = layout.kernel_layout("forward")
        if not parts.divides or _lacks_elements((taps, given.values()), plan):
            whole = functools.partial(inner, None)
            return _meshes.shard_by_compiler(whole, lambda *_: layout.output_spec(op))(
                *taps, *given.values()
            )
        outputs, over = parts.output_spec(op), parts.over
        specs = (*((outputs, PartitionSpec()) if taps else ()), *parts.array_specs(given))
        y = _meshes.run_sharded(functools.partial(inner, over), specs, outputs)(
            *taps, *given.values()
        )
        return _meshes.laid_out(y, layout.output_spec(op))

    return _jit_with_name(functools.partial(inner, ()), run_on_explicit_axes, f"lutjax_{op.op}")


@cache_calls
def compiled_update(plan: Plan) -> Callable[..., Any]:
    """Return the update as a jitted function.

    Its arguments are the call's arrays, the cotangent, rate, factor and state.
    """
    op, ranks = plan.op, ranks_of_update(plan.op)
    table = op.arrays().index(str(op.table_name))

    def call(over: Over, *args: Any) -> Any:
        n, update = len(op.arrays()), kernel(plan.replace(over=over), "update")
        prepared = (*plan.call(args[:n]).prepare().values(), *args[n:])
        return update(*_meshes.varying_alike(fold(ranks, prepared, batch_shape(ranks, args))))

    def run_on_explicit_axes(*args: Any) -> Any:
        n = len(op.arrays())
        given = op.from_arrays(args[:n], plan.options[:-1]).prepare()
        parts = Layout.from_call(given).kernel_layout("update")
        of_call = parts.array_specs(given)
        *rest, state = jax.tree.map(
            lambda a: parts.axes_spec((), ("t",), a.shape) if a.ndim else PartitionSpec(),
            args[n + 1 :],
        )
        specs, outputs = (*of_call, PartitionSpec(), *rest, state), (of_call[table], state)
        of_all = (*given.values(), *args[n:])
        if _lacks_elements(of_all, plan):
            update = _meshes.shard_by_compiler(functools.partial(call, None), lambda *_: outputs)
        else:
            update = _meshes.run_sharded(functools.partial(call, parts.over), specs, outputs)
        return jax.tree.map(
            _meshes.laid_out,
            update(*of_all),
            jax.tree.map(_meshes.spec_of, (args[table], args[-1])),
        )

    return _jit_with_name(
        functools.partial(call, ()), run_on_explicit_axes, f"lutjax_{op.op}_update"
    )


def _lacks_elements(arrays: Any, plan: Plan) -> bool:
    """Return True if an array or the output is empty.

    `jax.shard_map` does not divide empty arrays.
    """
    return _meshes.lacks_elements(arrays) or plan.option("n_outputs") == 0


def _jit_with_name(
    function: Callable[..., Any], on_explicit_axes: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Return a jitted function with a name for profiles.

    `on_explicit_axes` replaces it for arrays on a mesh with explicit axes.
    """

    def run_function(*args: Any) -> Any:
        if not [a for a in jax.tree.leaves(args) if _meshes.explicit_axes(a)]:
            return function(*args)
        with _meshes.mesh_of(args):
            return on_explicit_axes(*args)

    run_function.__name__ = name
    return jax.jit(run_function)


def forget() -> None:
    """Clear all cached kernel functions, for tests that replace kernels."""
    for function in (compile_plan, compiled_update, kernel):
        function.cache_clear()  # type: ignore[union-attr]
