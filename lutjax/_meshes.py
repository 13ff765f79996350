"""Meshes with explicit axes, as `jax.make_mesh` makes them: how arrays lie, and code that knows nothing of it."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import cast_varying, varying_axes, varying_axes_of
from lutjax._typing import Array


def explicit_axes(a: Any) -> tuple[str, ...]:
    """Axes with explicit sharding of the mesh that `a` lies on; none if it lies on no such mesh."""
    return tuple(jax.typeof(a).sharding.mesh.explicit_axes)


def spec_of(a: Array) -> jax.sharding.PartitionSpec:
    """Return the partition of `a` over the explicit axes of its mesh."""
    return jax.typeof(a).sharding.spec


def mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Context of the mesh with explicit axes that arrays lie on, whether or not `jax.set_mesh` was called for it."""
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return contextlib.nullcontext()
    mesh = next(jax.typeof(a).sharding.mesh for a in jax.tree.leaves(arrays) if explicit_axes(a))
    return jax.sharding.use_abstract_mesh(mesh)


def devices_along(place: str | tuple[str, ...]) -> int:
    """Return the number of devices along axes of the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in ((place,) if isinstance(place, str) else place))


def divided_by_compiler(function: Callable[..., Any], specs: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves its division over devices to the compiler, on meshes with explicit axes too.

    Args:
      specs: returns of the function's arguments how its outputs lie on such a mesh.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not any(explicit_axes(a) for a in jax.tree.leaves(args)):
            return function(*args)
        leaves, structure = jax.tree.flatten(args)  # JAX would put specs where the arrays of a pytree are
        with mesh_of(leaves):
            whole = jax.sharding.auto_axes(
                lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), out_sharding=specs(*args)
            )
            return whole(*leaves)

    return call


def rows(table: Array, ids: Array) -> jax.Array:
    """Return ``table[ids]``, with ids clamped; on a mesh with explicit axes it lies as the ids do."""
    take = functools.partial(jnp.take, axis=0, mode="clip")
    result: jax.Array = divided_by_compiler(take, lambda _, ids: spec_of(ids))(table, ids)
    return result


def reshaped(a: Array, lead: int, *shape: int) -> jax.Array:
    """Return an array whose axes after the first `lead` have another shape; on a mesh with explicit axes these are whole."""
    reshape = divided_by_compiler(
        lambda a: a.reshape(*a.shape[:lead], *shape),
        lambda a: jax.sharding.PartitionSpec(*spec_of(a)[:lead]),
    )
    result: jax.Array = reshape(a)
    return result


def part(a: Array, start: int, stop: int, axis: int, copies: int = 1) -> jax.Array:
    """Return a part of an axis, each of its elements several times in a row; on a mesh with explicit axes it is divided if that divides it."""

    def taken(a: Array) -> jax.Array:
        own = jax.lax.slice_in_dim(a, start, stop, axis=axis)
        return own if copies == 1 else jnp.repeat(own, copies, axis)

    def spec(a: Array) -> jax.sharding.PartitionSpec:
        places = list(spec_of(a))
        if places[axis] is not None and (stop - start) % devices_along(places[axis]):
            places[axis] = None
        return jax.sharding.PartitionSpec(*places)

    result: jax.Array = divided_by_compiler(taken, spec)(a)
    return result


def lacks_elements(arrays: Any) -> bool:
    """Return whether one of these arrays has no elements: the compiler of a `jax.shard_map` fails or ends its process (jaxlib 0.11.2)."""
    return any(a.size == 0 for a in jax.tree.leaves(arrays))


def in_parts(
    function: Callable[..., Any], specs: Any, outputs: Any, axes: Iterable[str] = ()
) -> Callable[..., Any]:
    """Return a function that runs on each device's part of its arguments, on the mesh in scope.

    Args:
      specs: of the arguments, which are laid out so first. outputs: of the outputs.
      axes: those of the mesh over which anything is divided; by default all but those of a `jax.vmap` around.
    """

    def call(*args: Any) -> Any:
        args = jax.tree.map(laid_out, args, specs)
        return jax.shard_map(function, in_specs=specs, out_specs=outputs, axis_names=frozenset(axes))(*args)

    return call


def laid_out(arrays: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """Return arrays that lie on the mesh with explicit axes in scope as a spec says."""
    return jax.tree.map(lambda a: jax.sharding.reshard(a, spec), arrays)


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of a type as `jax.typeof` returns it: on the same explicit and varying axes of a mesh."""
    over = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return cast_varying(jnp.zeros(aval.shape, aval.dtype, out_sharding=over), varying_axes_of(aval))


# ------------------------------------------------------------------------------------- inside of jax.shard_map
def varying_over(args: Any) -> frozenset[str]:
    """Return the mesh axes over which any of these arrays varies."""
    return frozenset[str]().union(*(varying_axes(a) for a in jax.tree.leaves(args)))


def varying_alike(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments that vary over the same mesh axes: all axes over which any of them varies."""
    axes = varying_over(args)
    return jax.tree.map(lambda a: cast_varying(a, axes), args) if axes else args
