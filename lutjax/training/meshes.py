"""Device meshes for runs: parsing, selection and array placement.

A mesh has two axes. `DATA` divides the samples of a batch, and `lutjax.sharding.DETECTORS` divides
the tables of all layers.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lutjax import sharding
from lutjax.sharding import DETECTORS as DETECTORS
from lutjax.tables.collect import is_factored
from lutjax.tables.gradient import seal
from lutjax.training import hosts

DATA = "data"  # mesh axis name that divides batch samples
AXES = (DATA, DETECTORS)  # mesh axis names; the first axis spans hosts


def parse(text: str) -> dict[str, int]:
    """Parse device counts per mesh axis from a text such as ``data=2,detectors=4``.

    Raises:
      ValueError: the text is malformed, or has an unknown or a repeated axis.

    Example:
      >>> from lutjax.training import meshes
      >>> meshes.parse("data=2,detectors=4")
      {'data': 2, 'detectors': 4}
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in AXES or name in counts or not number.isdecimal() or int(number) < 1:
            raise ValueError(
                f"mesh is {text!r}: {part.strip()!r} is not an axis with a device count. Write "
                "data=2,detectors=4, or one of both: data divides samples, detectors divides "
                "tables."
            )
        counts[name] = int(number)
    return counts


def choose(
    params: Any,
    devices: Sequence[jax.Device],
    batch_size: int,
    asked: Mapping[str, int] | None = None,
    *,
    tables: Collection[str] = (),
) -> Mesh | None:
    """Return the mesh for a model, or None if one device is enough.

    By default the mesh has all GPUs with the same kind as the first one, or as many as the batch
    allows. Tables are divided over the largest number of devices per host that divides the
    detectors of every layer, and the batch over the remaining devices. Models without tables have
    few parameters, so only their batch is divided.

    Args:
      params: parameter shapes.
      devices: devices of all processes.
      batch_size: samples computed together.
      asked: requested device counts by axis, as returned by `parse`; missing axes have size 1.
      tables: names of the table parameters.

    Raises:
      ValueError: too few devices, a batch or layer that cannot be divided evenly, or several
        processes with unused devices.
    """
    devices = sorted(devices, key=lambda device: (_host(device), device.process_index, device.id))
    n_processes = len({device.process_index for device in devices})
    if asked is not None:
        axes = {name: asked.get(name, 1) for name in AXES}
        _check(params, devices, batch_size, axes, n_processes, _format_axes(asked), tables)
    else:
        # Fake CPU devices share cores, and TPU kernels have no partitioning rules. All processes
        # take part.
        kind = devices[0].device_kind
        gpus = [d for d in devices if d.platform == "gpu" and d.device_kind == kind]
        devices = gpus or (devices if n_processes > 1 else devices[:1])
        axes = _best_axes(params, devices, batch_size, n_processes, tables)
    n_data, n_detectors = axes.values()
    if n_data * n_detectors == 1:
        return None
    return Mesh(np.array(devices[: n_data * n_detectors]).reshape(n_data, n_detectors), AXES)


def _check(
    params: Any,
    devices: Sequence[jax.Device],
    batch_size: int,
    axes: Mapping[str, int],
    n_processes: int,
    mesh: str,
    tables: Collection[str],
) -> None:
    """Raise if the model, batch or devices do not allow the axes; `mesh` is the requested text."""
    n_devices = axes[DATA] * axes[DETECTORS]
    if n_devices > len(devices) or (n_processes > 1 and n_devices < len(devices)):
        rule = "and the product of the axes must not be above that"
        if n_processes > 1:
            rule = "all of which take part"
        raise ValueError(
            f"mesh is {mesh}, so {n_devices} devices; "
            f"there are {len(devices)} ({devices[0].device_kind}), {rule}."
        )
    if batch_size % axes[DATA]:
        raise ValueError(
            f"mesh is {mesh}; {axes[DATA]} does not divide the {batch_size} samples computed "
            "together. Choose a divisor for data, or another batch_size."
        )
    sharding.specs(params, _abstract_mesh(axes[DETECTORS]), tables=tables)


def _best_axes(
    params: Any,
    devices: Sequence[jax.Device],
    batch_size: int,
    n_processes: int,
    tables: Collection[str],
) -> dict[str, int]:
    """Return axes that use as many devices as possible, preferring the detector axis."""
    per_host = min(Counter(map(_host, devices)).values())

    def fits(n_detectors: int) -> bool:
        try:
            sharding.specs(params, _abstract_mesh(n_detectors), tables=tables)
        except ValueError:
            return False
        return n_detectors == 1 or bool(tables)

    # Tables exchange rows in every layer, so their axis stays on the fast links of a host.
    by_detector = [n for n in range(1, per_host + 1) if fits(n)]
    candidates = [
        {DATA: n_data, DETECTORS: n}
        for n in by_detector
        for n_data in range(1, len(devices) // n + 1)
        if batch_size % n_data == 0 and (n_processes == 1 or n_data * n == len(devices))
    ]
    if not candidates:
        raise ValueError(
            f"batch_size is {batch_size}; samples computed together cannot be divided over "
            f"{len(devices)} devices of {n_processes} processes, with tables divided by "
            f"{' or '.join(map(str, by_detector))}. Choose a multiple of "
            f"{len(devices) // max(by_detector)}, or --mesh."
        )
    return max(candidates, key=lambda axes: (axes[DATA] * axes[DETECTORS], axes[DETECTORS]))


def _host(device: jax.Device) -> int:
    """Return the host id; devices with the fastest links share it, even across processes."""
    slice_index: int | None = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else slice_index


def _abstract_mesh(n_detectors: int) -> AbstractMesh:
    return AbstractMesh((n_detectors,), (DETECTORS,))


def _format_axes(axes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={n}" for name, n in axes.items())


def describe_devices(mesh: Mesh | None) -> str:
    """Return a description of the run's devices; without a mesh, the first local one."""
    if mesh is None:
        return str(jax.local_devices()[0].device_kind)
    axes = {name: n for name, n in mesh.shape.items() if n > 1}
    return f"{mesh.size} x {mesh.devices.flat[0].device_kind} ({_format_axes(axes)})"


def memory_of(devices: Sequence[jax.Device]) -> int | None:
    """Return the total memory in bytes (host memory for CPUs), or None if unknown."""
    if devices[0].platform == "cpu":
        if not hasattr(os, "sysconf"):
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * hosts.count()
    # Only local devices report their memory; the others are of the same kind.
    local = next((d for d in devices if d.process_index == jax.process_index()), None)
    of_each = (local.memory_stats() or {}).get("bytes_limit") if local is not None else None
    return None if of_each is None else of_each * len(devices)


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def shardings(tree: Any, mesh: Mesh, tables: Collection[str]) -> Any:
    """Return shardings for model or optimizer arrays; see `lutjax.sharding.specs`."""
    specs = sharding.specs(tree, mesh, tables=tables)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def add_shardings(shapes: Any, where: Any) -> Any:
    """Return array shapes with their shardings."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, where
    )


def put(array: Any, where: NamedSharding | None) -> jax.Array:
    """Put an array on devices; each process copies only its own shards of its host array."""
    if where is None:
        return jnp.asarray(array)
    return hosts.put(array, where)


def copy_to_local(tree: Any) -> Any:
    """Copy mesh arrays to the first local device and return other arrays unchanged."""
    device = jax.local_devices()[0]

    def fetch(a: Any) -> Any:
        return jax.device_put(hosts.fetch(a), device) if len(a.sharding.device_set) > 1 else a

    return jax.tree.map(fetch, tree)


def with_all_samples(gradients: Any, mesh: Mesh | None) -> Any:
    """Gather traced sparse gradients over `DATA`.

    Plain JAX that iterates over them detector by detector would exchange row sums.
    """
    if mesh is None or mesh.shape[DATA] == 1:
        return gradients
    any_way = PartitionSpec.UNCONSTRAINED

    def constrain_sharding(a: Any, n_leading: int, rest: Any) -> Any:
        spec = PartitionSpec(*[None] * n_leading, *[rest] * (a.ndim - n_leading))
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))

    def gather(gradient: Any) -> Any:
        if not is_factored(gradient):
            return gradient
        # Leading axes of samples are gathered; others, as of sharded detectors, stay as they are.
        call = gradient.look_up

        def constrain_argument(array: Any, rank: int | None) -> Any:
            if rank is None:
                return array
            return jax.tree.map(lambda a: constrain_sharding(a, a.ndim - rank, any_way), array)

        arrays = map(constrain_argument, call.values(), call.ranks())
        look_up = call.from_arrays(arrays, call.options())
        cotangent = constrain_sharding(gradient.cotangent, gradient.cotangent.ndim, None)
        return dataclasses.replace(gradient, look_up=look_up, sealed=seal(cotangent))

    return jax.tree.map(gather, gradients, is_leaf=is_factored)


def shard_samples(arrays: Any, mesh: Mesh | None, axis: int = 0) -> Any:
    """Divide traced arrays over `DATA` along the sample axis; replicate if not evenly divisible."""
    if mesh is None:
        return arrays

    def divide(a: Any) -> Any:
        fits = a.shape[axis] % mesh.shape[DATA] == 0
        spec = PartitionSpec(*([None] * axis), DATA) if fits else PartitionSpec()
        return jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))

    return jax.tree.map(divide, arrays)
