"""Batching rule for kernels: a mapped axis joins the batch if possible."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from lutjax import _compat, _meshes
from lutjax.dispatch._leading_axes import leaf_ranks
from lutjax.dispatch._partition import partition_kernel, run_shard
from lutjax.dispatch._plan import Over, Plan, cache_calls
from lutjax.dispatch._run import run_plan
from lutjax.dispatch.contract import Call, Direction
from lutjax.dispatch.registry import Platform


@cache_calls
def kernel(
    plan: Plan, direction: Direction, needs: tuple[bool, ...] | None = None
) -> Callable[..., Any]:
    """Return the function for an implementation, with a vmap rule.

    It takes a call; backward functions also take the cotangent, and updates the cotangent and the
    step. Backward functions return a cotangent or None for each array. `needs` applies to backward
    functions only.

    A mapped axis joins the batch if possible: the kernel then needs no rule, and bounded tiles stay
    bounded. Otherwise (one table per element, or its gradient), kernels that support stacked calls
    receive them stacked, plain JAX is mapped by `jax.vmap`, and any other kernel runs once per
    element.
    """
    op = plan.op
    # A mapped gradient of a shared array, or a mapped update, would be summed over the mapped axis.
    foldable = not plan.stacked and direction != "update"
    if needs is not None:
        foldable &= all(r is not None for need, r in zip(needs, op.ranks(), strict=True) if need)

    run_whole = functools.partial(run_plan, plan, direction, needs)

    def run(*args: Any, over: Over = plan.over) -> Any:
        return run_shard(direction, *args, over=over, run=run_whole) if over else run_whole(*args)

    by_rule = plan.over is not None and plan.has_rules
    call = custom_vmap(partition_kernel(op, direction, needs, run) if by_rule else run)

    @call.def_vmap
    def rule(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        is_mapped = jax.tree.leaves(mapped)
        places = [
            _meshes.spec_of(a)[0]
            for a, m in zip(jax.tree.leaves(args), is_mapped, strict=True)
            if m
        ]
        place = next((place for place in places if place), None)
        if size == 0:  # other arrays without elements are never divided here, see `_transforms`
            outputs = build_empty_outputs(mapped, args, place)
        elif place is None:
            outputs = map_elements(size, mapped, *args)
        else:  # the mapped axis is divided over a mesh with explicit axes
            specs = jax.tree.map(
                lambda m: PartitionSpec(place) if m else PartitionSpec(), tuple(mapped)
            )
            part = functools.partial(map_part, size // _meshes.devices_along(place), mapped)
            axes = (place,) if isinstance(place, str) else place
            outputs = _meshes.run_sharded(part, specs, PartitionSpec(place), axes)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    def build_empty_outputs(mapped: Any, args: Any, place: Any) -> Any:
        one = jax.tree.map(
            lambda a, m: jax.ShapeDtypeStruct(a.shape[m:], a.dtype), tuple(args), tuple(mapped)
        )
        lies, over = PartitionSpec(place) if place else None, _meshes.joint_varying_axes(args)
        return jax.tree.map(
            lambda a: _compat.cast_varying(
                jnp.zeros((0, *a.shape), a.dtype, out_sharding=lies), over
            ),
            jax.eval_shape(run, *one),
        )

    def map_part(size: int, mapped: Any, *args: Any) -> Any:
        return map_elements(size, mapped, *_meshes.varying_alike(args))

    def map_elements(size: int, mapped: Any, *args: Any) -> Any:
        is_mapped, is_batched = jax.tree.leaves(mapped), _batched_leaves(*args)
        shared_is_mapped = any(m and not b for m, b in zip(is_mapped, is_batched, strict=True))
        if foldable and not shared_is_mapped:
            return _run_joined(call, op.features_first, size, is_mapped, is_batched, args)
        # Kernels that stack calls run all of them in one launch.
        if plan.stacked or any(spec.stacks for _, spec in plan.choice):
            return _side_by_side(plan, direction, needs, size, mapped, args)
        # JAX maps plain JAX by itself, and cannot map any other kernel.
        if all(spec.platform == Platform.XLA for _, spec in plan.choice):
            in_axes = jax.tree.map(lambda m: 0 if m else None, mapped)
            return jax.vmap(run, in_axes=in_axes)(*args)
        return _one_by_one(call, args, is_mapped)

    return call


def _batched_leaves(call: Call, *others: Any) -> list[bool]:
    """Return True for each leaf with a batch axis: of the call, the cotangent, and the step."""
    is_batched = [rank is not None for rank in leaf_ranks(jax.tree.structure(call))]
    for n, other in enumerate(others):
        is_batched += [n == 0] * len(jax.tree.leaves(other))
    return is_batched


def _run_joined(
    call: Callable[..., Any],
    features_first: bool,
    size: int,
    is_mapped: list[bool],
    is_batched: list[bool],
    args: Any,
) -> Any:
    """Return the outputs of one call whose batch also has the mapped axis."""

    def join(a: jax.Array, is_mapped: bool) -> jax.Array:
        a = a if is_mapped else jnp.broadcast_to(a[None], (size, *a.shape))
        axis = a.ndim - 2 if features_first else 0
        a = jnp.moveaxis(a, 0, axis)
        return a.reshape(*a.shape[:axis], size * a.shape[axis + 1], *a.shape[axis + 2 :])

    leaves, structure = jax.tree.flatten(args)
    flags = zip(leaves, is_mapped, is_batched, strict=True)
    joined = [join(a, m) if b else a for a, m, b in flags]
    one = joined[is_batched.index(True)]
    batch = one.shape[-1 if features_first else 0] // size

    def split(a: jax.Array) -> jax.Array:
        axis = a.ndim - 1 if features_first else 0
        return jnp.moveaxis(a.reshape(*a.shape[:axis], size, batch, *a.shape[axis + 1 :]), axis, 0)

    return jax.tree.map(split, call(*jax.tree.unflatten(structure, joined)))


def _side_by_side(
    plan: Plan,
    direction: Direction,
    needs: tuple[bool, ...] | None,
    size: int,
    mapped: Any,
    args: Any,
) -> Any:
    """Return the outputs of `size` stacked calls. Unmapped arrays are repeated for each call."""

    def stack_batch(a: jax.Array, is_mapped: bool) -> jax.Array:
        a = a if is_mapped else jnp.broadcast_to(a[None], (size, *a.shape))
        return a.reshape(size * a.shape[1], *a.shape[2:]) if plan.stacked else a

    of_all = kernel(plan.replace(stacked=True, over=None), direction, needs)
    outputs = of_all(*jax.tree.map(stack_batch, tuple(args), tuple(mapped)))
    if not plan.stacked:
        return outputs
    return jax.tree.map(lambda a: a.reshape(size, a.shape[0] // size, *a.shape[1:]), outputs)


def _one_by_one(call: Callable[..., Any], args: Any, is_mapped: list[bool]) -> Any:
    leaves, structure = jax.tree.flatten(args)

    def run_element(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        arrays = [next(rest) if m else a for a, m in zip(leaves, is_mapped, strict=True)]
        return call(*jax.tree.unflatten(structure, arrays))

    return jax.lax.map(run_element, [a for a, m in zip(leaves, is_mapped, strict=True) if m])
