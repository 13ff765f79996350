"""Layers for Flax Linen.

A layer keeps its variables in collections. Those in ``params`` are trained: tables, scalars of reads, projections, positions,
logits, scores, and thresholds if they are learnable. All others belong to the model as much as ``params`` does, and are never trained:

- ``anchors``: the ids of the inputs that detectors compare;
- ``targets``: the ids of the outputs that rows of `SparseLUT` and `SpatialLUT` reach;
- ``wires``: the ids of the inputs that gates read, and ``readers``, the reverse of that list;
- ``thresholds``: those of a `Thermometer` that does not learn them;
- ``quantised`` (the spelling of existing checkpoints): tables of integers, ``weights`` and ``exponents``;
- ``keys``: of random numbers, of which tables in the memory of the host are drawn (`lutjax.training.host.HostTables`);
- ``inputs``: ``in_features``, whose shape is the number of inputs, only for layers without the argument `in_features`;
- ``cache``: the latest keys, only for attention with ``decode=True``, and the only one that a call changes.

`init` makes all of them, drawn from the stream ``params``. `apply` needs all of them. Take the gradient with respect to
``params`` alone, and save everything that `init` returned. ``layer.check`` checks the variables of a checkpoint.

Like `flax.linen.Dense`, a layer without `in_features` takes the number of inputs from its first input: ``LUT(out_features=4, ...)``. `pickle`
copies a layer unless a field is a function that is defined in another function, which `jax.nn.initializers.normal(0.1)` is.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from lutjax.layers.linen import LUT
  >>> layer, x = LUT(8, 1, n_detectors=16, n_anchors=4), jax.random.normal(jax.random.key(1), (64, 8))
  >>> variables = layer.init(jax.random.key(0), x)
  >>> params, kept = variables["params"], {"anchors": variables["anchors"]}
  >>> def loss(params):
  ...     return jnp.mean((layer.apply({"params": params, **kept}, x)[:, 0] - x.max(1)) ** 2)
  >>> before = loss(params)
  >>> for _ in range(5):
  ...     params = jax.tree.map(lambda w, g: w - 0.5 * g, params, jax.grad(loss)(params))
  >>> bool(loss(params) < 0.5 * before)
  True
  >>> checkpoint = {"params": params, **kept}  # what to save, and what `apply` gets when it is read
  >>> layer.check(checkpoint)

A model of several layers has one subtree for each in every collection: ``variables["anchors"]["LUT_0"]["anchors"]``.
"""

from lutjax._extras import needed_by

with needed_by("lutjax.layers.linen"):
    from lutjax.layers._declared import tables_of
    from lutjax.layers.linen._images import ConvLUT, SpatialLUT, WindowLUT
    from lutjax.layers.linen._logic import (
        BinaryLUT,
        GroupSum,
        LogicConv,
        LogicGates,
        LogicRNN,
        SoftLUT,
        Thermometer,
    )
    from lutjax.layers.linen._memory import NgramMemory, ProductKeyExperts, ProductKeyMemory
    from lutjax.layers.linen._projection import ProjectionLUT
    from lutjax.layers.linen._tables import LUT, LUTAttention, LUTPairAttention, SparseLUT

__all__ = [
    "LUT", "BinaryLUT", "ConvLUT", "GroupSum", "LUTAttention", "LUTPairAttention", "LogicConv", "LogicGates", "LogicRNN", "NgramMemory", "ProductKeyExperts", "ProductKeyMemory", "ProjectionLUT",
    "SoftLUT", "SparseLUT", "SpatialLUT", "Thermometer", "WindowLUT", "tables_of",
]  # fmt: skip
