"""Differences between the versions of jax that are supported, in one place."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

# `jax.extend` has these by public names, but its import brings Pallas; see `import_pallas` in `lutjax.training.loop`.
from jax._src import core
from jax._src.extend import random
from jax.typing import DTypeLike

Primitive = core.Primitive


def varying_axes(a: jax.Array) -> frozenset[str]:
    """Mesh axes over which `a` differs inside a `shard_map` that tracks them; empty elsewhere."""
    return varying_axes_of(jax.typeof(a))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """Mesh axes over which an array of a type differs, as `jax.typeof` returns it; see `varying_axes`."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def cast_varying(a: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return `a` marked as varying over `axes` too. The transpose sums over them."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(a)))
    return jax.lax.pcast(a, missing, to="varying") if missing else a


def untracked_axes() -> frozenset[str]:
    """Mesh axes of a `shard_map` around this with ``check_vma=False``, in which nothing says what differs over them; else empty."""
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    return axes if axes and not varying_axes(cast_varying(jnp.zeros(()), axes)) else frozenset()


def zeros_varying(like: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Zeros that vary over the mesh axes of `like`: what a loop inside a `shard_map` must start from."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def shape_varying(shape: jax.ShapeDtypeStruct, axes: Iterable[str]) -> jax.ShapeDtypeStruct:
    """Return the shape of an array that varies over `axes`: of what a kernel returns inside a `shard_map`."""
    axes = frozenset(axes)
    if not axes:
        return shape
    varying = jax.sharding.ManualAxisType(varying=axes)
    # A foreign call looks for the axes in the mesh of the sharding.
    whole = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole, manual_axis_type=varying)


def partitions_by_rule(backend: str) -> bool:
    """Return whether the compiler of a backend asks the rules of `custom_partitioning`: on TPUs JAX has none of them."""
    return backend != "tpu"


def trace_state() -> object:
    """Opaque token that changes whenever a JAX transformation is entered or exited."""
    return core.get_opaque_trace_state()


def is_alone() -> bool:
    """Return whether what runs now is no part of another program: nothing is traced."""
    return bool(core.trace_state_clean())


def define_prng_impl(**functions: Any) -> Any:
    """Return a kind of random keys; see `jax.extend.random.define_prng_impl`."""
    return random.define_prng_impl(**functions)


def abstract_device() -> tuple[str, str] | None:
    """Platform and kind of the device that an abstract mesh in scope names, if one does."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform or "", device.device_kind)
