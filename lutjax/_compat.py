"""Differences between the versions of jax that are supported, in one place."""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.typing import DTypeLike


def varying_axes(a: jax.Array) -> frozenset[str]:
    """Mesh axes over which `a` differs inside a `shard_map` that tracks them; empty elsewhere."""
    return varying_axes_of(jax.typeof(a))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """The same of a type as `jax.typeof` returns it."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def cast_varying(a: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`a` marked as varying over `axes` too. The transpose sums over them."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(a)))
    return jax.lax.pcast(a, missing, to="varying") if missing else a


def untracked_axes() -> frozenset[str]:
    """Mesh axes of a `shard_map` around this with ``check_vma=False``, in which nothing says what differs over them; else empty."""
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    return axes if axes and not varying_axes(cast_varying(jnp.zeros(()), axes)) else frozenset()


def zeros_varying(like: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`: what a loop inside a `shard_map` must start from."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of a type as `jax.typeof` returns it: on the same explicit and varying axes of a mesh."""
    over = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return cast_varying(jnp.zeros(aval.shape, aval.dtype, out_sharding=over), varying_axes_of(aval))


def shape_varying(shape: jax.ShapeDtypeStruct, axes: Iterable[str]) -> jax.ShapeDtypeStruct:
    """The shape of an array that varies over `axes`: of what a kernel returns inside a `shard_map`."""
    axes = frozenset(axes)
    if not axes:
        return shape
    varying = jax.sharding.ManualAxisType(varying=axes)
    # A foreign call looks for the axes in the mesh of the sharding.
    whole = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole, manual_axis_type=varying)


def explicit_axes(a: jax.Array) -> tuple[str, ...]:
    """Axes with explicit sharding of the mesh that `a` lies on; none if it lies on no such mesh."""
    return tuple(jax.typeof(a).sharding.mesh.explicit_axes)


def mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Context of the mesh with explicit axes that arrays lie on, whether or not `jax.set_mesh` was called for it."""
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return contextlib.nullcontext()
    mesh = next(jax.typeof(a).sharding.mesh for a in jax.tree.leaves(arrays) if explicit_axes(a))
    return jax.sharding.use_abstract_mesh(mesh)


def spec_of(a: jax.Array) -> jax.sharding.PartitionSpec:
    """Return the partition of `a` over the explicit axes of its mesh."""
    return jax.typeof(a).sharding.spec


def divided_by_compiler(function: Callable[..., Any], specs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves its division over devices to the compiler, on meshes with explicit axes too.

    Args:
      specs: returns of the function's arguments how its outputs lie on such a mesh.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not any(explicit_axes(a) for a in jax.tree.leaves(args)):
            return function(*args)
        with mesh_of(args):
            return jax.sharding.auto_axes(function, out_sharding=specs(*args))(*args)

    return call


def in_parts(function: Callable[..., Any], specs: Any, outputs: Any) -> Callable[..., Any]:
    """Return a function that runs on each device's part of its arguments, on the mesh in scope.

    Args:
      specs: of the arguments, which are laid out so first. outputs: of the outputs.
    """

    def call(*args: Any) -> Any:
        args = jax.tree.map(laid_out, args, specs)
        return jax.shard_map(function, in_specs=specs, out_specs=outputs)(*args)

    return call


def laid_out(arrays: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """Return arrays that lie on the mesh with explicit axes in scope as a spec says."""
    return jax.tree.map(lambda a: jax.sharding.reshard(a, spec), arrays)


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return ``table[ids]``, with ids clamped; on a mesh with explicit axes it lies as the ids do."""

    take = functools.partial(jnp.take, axis=0, mode="clip")
    result: jax.Array = divided_by_compiler(take, lambda _, ids: spec_of(ids))(table, ids)
    return result


def is_refused_forward_mode(error: TypeError) -> bool:
    """Return whether jax raised `error` because a function that has a `jax.custom_vjp` was differentiated in forward mode."""
    return "forward-mode" in str(error) and "custom_vjp" in str(error)


def trace_state() -> object:
    """Opaque token that changes whenever a JAX transformation is entered or exited."""
    return jax.extend.core.get_opaque_trace_state()


def abstract_device() -> tuple[str, str] | None:
    """Platform and kind of the device that an abstract mesh in scope names, if one does."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform or "", device.device_kind)
