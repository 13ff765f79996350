"""Dispatch: from a call of an op to the implementation that runs it, under `jax.jit`, `jax.grad`, `jax.vmap` and on meshes.

`contract` says what a kernel gets and returns, `catalog` which packages have kernels, `registry` chooses one, `_transforms` makes an op of a call by
a `_plan` of what is static of it, with `_gradient`, `_batching` and `_leading_axes`, and `_partition` divides it over devices. This room knows no op and no kernel: they are imported when they are chosen.
"""

from lutjax.dispatch import catalog
from lutjax.dispatch.registry import kernel_registry

catalog.register(kernel_registry)
