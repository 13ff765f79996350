"""Dispatch of op calls to implementations, under `jax.jit`, `jax.grad`, `jax.vmap` and on meshes.

- `contract` defines the arguments and results of kernels.
- `catalog` lists the kernel packages.
- `registry` selects an implementation.
- `_transforms` turns a call into a JAX function by a static `_plan`, with `_gradient`, `_batching`
  and `_leading_axes`.
- `_partition` divides the function over devices.

This subpackage imports ops and kernels only when they are selected.
"""

from lutjax.dispatch import catalog
from lutjax.dispatch.registry import kernel_registry

catalog.register(kernel_registry)
