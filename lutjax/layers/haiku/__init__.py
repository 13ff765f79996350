"""Layers for Haiku. Transform them with `haiku.transform_with_state`: `haiku.transform` raises an error in ``init``.

Trained variables are parameters: tables, scalars of reads, projections, positions, logits, scores, and thresholds if they are
learnable. All others are state. State belongs to the model as much as parameters do, and is never trained:

- ``anchors``: the ids of the inputs that detectors compare;
- ``targets``: the ids of the outputs that rows of `SparseLUT` and `SpatialLUT` reach;
- ``wires`` and ``readers``: the ids of the inputs that gates read, and the reverse of that list;
- ``thresholds``: those of a `Thermometer` that does not learn them;
- ``weights`` and ``exponents`` of tables of integers;
- ``weights_key``, ``down_key`` and ``up_key``, of which tables in the memory of the host are drawn (`lutjax.training.host.HostTables`);
- ``in_features``, whose shape is the number of inputs, only for layers without the argument `in_features`;
- ``cached_...`` and ``cache_index``: the latest keys, only for attention with ``decode=True``.

`init` returns parameters and state, both drawn from its key. `apply` takes both and returns the state again: unchanged,
except for a cache, which holds new keys. Save both in a checkpoint. A layer's method ``check``, called inside of a
transformed function, checks the variables of a checkpoint.

`pickle` copies a layer unless an argument is a function that is defined in another function, which `jax.nn.initializers.normal(0.1)` is.

Example:
  >>> import haiku as hk, jax, jax.numpy as jnp
  >>> from lutjax.layers.haiku import LUT
  >>> f = hk.transform_with_state(lambda x: LUT(8, 1, n_detectors=16, n_anchors=4)(x))
  >>> x = jax.random.normal(jax.random.key(1), (64, 8))
  >>> params, state = f.init(jax.random.key(0), x)
  >>> def loss(params, state):
  ...     y, state = f.apply(params, state, None, x)
  ...     return jnp.mean((y[:, 0] - x.max(1)) ** 2), state
  >>> before, _ = loss(params, state)
  >>> for _ in range(5):
  ...     gradients, state = jax.grad(loss, has_aux=True)(params, state)
  ...     params = jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients)
  >>> bool(loss(params, state)[0] < 0.5 * before)
  True
  >>> checkpoint = {"params": params, "state": state}  # what to save, and what `apply` gets when it is read
  >>> check = hk.transform_with_state(lambda: LUT(8, 1, n_detectors=16, n_anchors=4).check())
  >>> _ = check.apply(**checkpoint, rng=None)
"""

from lutjax._extras import needed_by

with needed_by("lutjax.layers.haiku"):
    from lutjax.layers._declared import tables_of
    from lutjax.layers.haiku._images import ConvLUT, SpatialLUT, WindowLUT
    from lutjax.layers.haiku._logic import (
        BinaryLUT,
        GroupSum,
        LogicConv,
        LogicGates,
        LogicRNN,
        SoftLUT,
        Thermometer,
    )
    from lutjax.layers.haiku._memory import NgramMemory, ProductKeyExperts, ProductKeyMemory
    from lutjax.layers.haiku._projection import ProjectionLUT
    from lutjax.layers.haiku._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = [
    "LUT", "BinaryLUT", "ConvLUT", "GroupSum", "LUTAttention", "LUTPairAttention", "LogicConv", "LogicGates", "LogicRNN", "NgramMemory", "ProductKeyExperts", "ProductKeyMemory", "ProjectionLUT",
    "SoftLUT", "SparseLUT", "SpatialLUT", "Thermometer", "WindowLUT", "tables_of",
]  # fmt: skip
