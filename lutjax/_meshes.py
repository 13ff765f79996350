"""Sharding helpers for meshes with explicit axes, as created by `jax.make_mesh`."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lutjax._compat import cast_varying, varying_axes, varying_axes_of
from lutjax._typing import Array

R = TypeVar("R")


def explicit_axes(a: Any) -> tuple[str, ...]:
    """Return the explicit axes in the mesh for `a`; empty without such a mesh."""
    return tuple(jax.typeof(a).sharding.mesh.explicit_axes)


def any_explicit(arrays: Any) -> bool:
    """Return True if an array is on a mesh with explicit axes."""
    return bool([a for a in jax.tree.leaves(arrays) if jax.typeof(a).sharding.mesh.explicit_axes])


def spec_of(a: Array) -> jax.sharding.PartitionSpec:
    """Return the partition spec for `a` over its mesh's explicit axes."""
    return jax.typeof(a).sharding.spec


def mesh_of(arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Enter the arrays' explicit mesh, with or without a `jax.set_mesh` call."""
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return contextlib.nullcontext()
    mesh = next(jax.typeof(a).sharding.mesh for a in jax.tree.leaves(arrays) if explicit_axes(a))
    return jax.sharding.use_abstract_mesh(mesh)


def devices_along(place: str | tuple[str, ...]) -> int:
    """Return the number of devices along mesh axes in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in ((place,) if isinstance(place, str) else place))


def shard_by_compiler(function: Callable[..., R], specs: Callable[..., Any]) -> Callable[..., R]:
    """Let the compiler shard a function, even on meshes with explicit axes.

    `specs` maps the function's arguments to its output specs.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if not any_explicit(args):
            return function(*args)
        leaves, structure = jax.tree.flatten(args)  # JAX would replace a pytree's arrays by specs
        with mesh_of(leaves):
            whole = jax.sharding.auto_axes(
                lambda *leaves: function(*jax.tree.unflatten(structure, leaves)),
                out_sharding=specs(*args),
            )
            return whole(*leaves)

    return call


def rows(table: Array, ids: Array) -> jax.Array:
    """Return ``table[ids]`` with clamped ids, sharded like the ids on an explicit mesh."""
    take = functools.partial(jnp.take, axis=0, mode="clip")
    result: jax.Array = shard_by_compiler(take, lambda _, ids: spec_of(ids))(table, ids)
    return result


def reshape_unsharded(a: Array, start: int, *shape: int, stop: int | None = None) -> jax.Array:
    """Reshape the axes from `start` to `stop`, by default all; unsharded on an explicit mesh.

    JAX does not decide the sharding of axes that are merged or divided.
    """
    n = a.ndim if stop is None else stop
    whole = (None,) * len(shape)
    reshape = shard_by_compiler(
        lambda a: a.reshape(*a.shape[:start], *shape, *a.shape[n:]),
        lambda a: jax.sharding.PartitionSpec(*spec_of(a)[:start], *whole, *spec_of(a)[n:]),
    )
    result: jax.Array = reshape(a)
    return result


def slice_repeated(a: Array, start: int, stop: int, axis: int, copies: int = 1) -> jax.Array:
    """Slice an axis and repeat its elements, sharded on an explicit mesh if divisible."""

    def slice_local(a: Array) -> jax.Array:
        own = jax.lax.slice_in_dim(a, start, stop, axis=axis)
        return own if copies == 1 else jnp.repeat(own, copies, axis)

    def spec(a: Array) -> jax.sharding.PartitionSpec:
        places = list(spec_of(a))
        if places[axis] is not None and (stop - start) % devices_along(places[axis]):
            places[axis] = None
        return jax.sharding.PartitionSpec(*places)

    result: jax.Array = shard_by_compiler(slice_local, spec)(a)
    return result


def lacks_elements(arrays: Any) -> bool:
    """Return True if an array is empty: its `jax.shard_map` fails to compile (jaxlib 0.11.2)."""
    return any(a.size == 0 for a in jax.tree.leaves(arrays))


def run_sharded(
    function: Callable[..., Any], specs: Any, outputs: Any, axes: Iterable[str] = ()
) -> Callable[..., Any]:
    """Run a function on each device's argument shards, on the mesh in scope.

    Arguments are resharded first. `axes` are by default all mesh axes except those from an
    enclosing `jax.vmap`.
    """

    def call(*args: Any) -> Any:
        args = jax.tree.map(laid_out, args, specs)
        mapped = jax.shard_map(
            function, in_specs=specs, out_specs=outputs, axis_names=frozenset(axes)
        )
        return mapped(*args)

    return call


def laid_out(arrays: Any, spec: jax.sharding.PartitionSpec) -> Any:
    """Reshard arrays by a spec on the explicit mesh in scope."""
    return jax.tree.map(lambda a: jax.sharding.reshard(a, spec), arrays)


def zeros_of(aval: Any) -> jax.Array:
    """Return zeros for a `jax.typeof` result, with its explicit and varying mesh axes."""
    over = aval.sharding if aval.sharding.mesh.explicit_axes else None
    return cast_varying(jnp.zeros(aval.shape, aval.dtype, out_sharding=over), varying_axes_of(aval))


# ------------------------------------------------------------------------- inside jax.shard_map
def joint_varying_axes(args: Any) -> frozenset[str]:
    """Return the union over the arrays' varying mesh axes."""
    if not jax.sharding.get_abstract_mesh().manual_axes:  # not inside of a shard_map
        return frozenset()
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(args)))


def varying_alike(args: Any) -> Any:
    """Cast all arguments to vary over the union over their varying axes."""
    axes = joint_varying_axes(args)
    return jax.tree.map(lambda a: cast_varying(a, axes), args) if axes else args
