"""Lowering and compilation for devices that need not be present."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from lutjax.kernels._pallas._tpus import TPU, find_generation

# Triton and native kernel calls have no stability guarantee, and no other version runs Pallas
# kernels.
KERNELS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in (
        "triton_kernel_call",
        "triton_kernel_call_ffi",
        "tpu_custom_call",
        "mosaic_gpu",
        "mosaic_gpu_v2",
        "lutjax_cpu",
    )
]


def mesh(
    platform: str, device_kind: str, n_devices: int = 1, axis: str = "device"
) -> jax.sharding.AbstractMesh:
    """Return a mesh of one device kind along an axis.

    Implementations and block sizes are selected as on these devices.

    Args:
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``, as `jax.export` names them.
      device_kind: the device's own name, e.g. ``"NVIDIA H200"`` or ``"TPU v6e"``.
    """
    device = jax.sharding.AbstractDevice(device_kind, 1 if platform == "tpu" else None, platform)
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((n_devices,), (axis,), axis_types=auto, abstract_device=device)


@contextlib.contextmanager
def use_target(platform: str, device_kind: str) -> Iterator[None]:
    """Trace the calls in this block for a `mesh` device."""
    with jax.sharding.use_abstract_mesh(mesh(platform, device_kind)):
        yield


def lower(
    f: Callable[..., Any], *arguments: Any, platform: str, device_kind: str
) -> jax.export.Exported:
    """Lower a function for a device, without compiling.

    Args:
      arguments: arrays, or their shapes. platform, device_kind: see `mesh`.
    """
    with use_target(platform, device_kind):
        return lower_on_mesh(f, *arguments, platform=platform)


def lower_on_mesh(f: Callable[..., Any], *arguments: Any, platform: str) -> jax.export.Exported:
    """Lower a function that names its own `mesh`, in `jax.shard_map`."""
    return jax.export.export(jax.jit(f), platforms=[platform], disabled_checks=KERNELS)(*arguments)


def compile_for_tpu(f: Callable[..., Any], *arguments: Any, tpu: str | TPU) -> jax.stages.Compiled:
    """Compile a function for one TPU device, by libtpu, which must be installed.

    Args:
      arguments: arrays, or their shapes.
      tpu: one of `lutjax.kernels._pallas._tpus.TPUS`, or its name.

    Raises:
      ValueError: an unknown name. RuntimeError: libtpu is missing, or compilation fails.
    """
    from jax.experimental import topologies

    tpu = find_generation(tpu) if isinstance(tpu, str) else tpu
    device = topologies.get_topology_desc(tpu.topology, "tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    with use_target("tpu", tpu.device_kind):
        lowered = jax.jit(f).trace(*placed).lower(lowering_platforms=("tpu",))
    return lowered.compile()
