"""Compatibility layer for supported jax versions."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

# Importing `jax.extend` would import Pallas; see `import_pallas` in `lutjax.training.loop`.
from jax._src import core
from jax._src.extend import random
from jax.typing import DTypeLike

Primitive = core.Primitive


def varying_axes(a: jax.Array) -> frozenset[str]:
    """Return the mesh axes `a` varies over inside a tracking `shard_map`; empty elsewhere."""
    return varying_axes_of(jax.typeof(a))


def varying_axes_of(aval: Any) -> frozenset[str]:
    """Return the varying axes for a `jax.typeof` result; see `varying_axes`."""
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else frozenset(manual.varying)


def cast_varying(a: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark `a` as varying over `axes` as well. The transpose sums over them."""
    missing = tuple(sorted(frozenset(axes) - varying_axes(a)))
    return jax.lax.pcast(a, missing, to="varying") if missing else a


def untracked_axes() -> frozenset[str]:
    """Return the mesh axes in scope from a `shard_map` with ``check_vma=False``; else empty."""
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    return axes if axes and not varying_axes(cast_varying(jnp.zeros(()), axes)) else frozenset()


def zeros_varying(like: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return zeros varying like `like`, the initial carry for loops inside a `shard_map`."""
    return cast_varying(jnp.zeros(shape, dtype), varying_axes(like))


def shape_varying(shape: jax.ShapeDtypeStruct, axes: Iterable[str]) -> jax.ShapeDtypeStruct:
    """Return a kernel output shape marked as varying over `axes` inside a `shard_map`."""
    axes = frozenset(axes)
    if not axes:
        return shape
    varying = jax.sharding.ManualAxisType(varying=axes)
    # FFI calls look up the axes in the sharding's mesh.
    mesh = jax.sharding.get_abstract_mesh()
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=whole, manual_axis_type=varying)


def partitions_by_rule(backend: str) -> bool:
    """Return True if a backend supports `custom_partitioning` rules; JAX on TPUs does not."""
    return backend != "tpu"


def trace_state() -> object:
    """Return an opaque token that changes with every JAX transformation entered or exited."""
    return core.get_opaque_trace_state()


def is_alone() -> bool:
    """Return True outside any JAX trace."""
    return bool(core.trace_state_clean())


def define_prng_impl(**functions: Any) -> Any:
    """Define a PRNG implementation; see `jax.extend.random.define_prng_impl`."""
    return random.define_prng_impl(**functions)


def abstract_device() -> tuple[str, str] | None:
    """Return the platform and device kind from the abstract mesh in scope, or None."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else (device.platform or "", device.device_kind)
