"""Layers for Flax Linen.

A layer keeps its variables in collections. Variables in ``params`` are trained: tables, scalars of
reads, projections, positions, logits, scores, and learnable thresholds. All other collections are
equally part of the model, and are never trained:

- ``anchors``: input ids compared by detectors;
- ``targets``: output ids for `SparseLUT` and `SpatialLUT` rows;
- ``wires``: gate input ids, and ``readers``, their fan-out lists;
- ``thresholds``: fixed `Thermometer` thresholds;
- ``quantised`` (as in existing checkpoints): quantized tables, ``weights`` and ``exponents``;
- ``keys``: PRNG keys for host-resident tables (`lutjax.optim.host.HostTables`);
- ``inputs``: ``in_features``, whose shape is the number of inputs, only for layers without the
  argument `in_features`;
- ``cache``: the latest keys, only for attention with ``decode=True``. A call changes no other
  collection.

`init` creates all collections from the stream ``params``, and `apply` needs all of them.
Differentiate with respect to ``params`` only, and save all variables. ``layer.check`` checks a
restored checkpoint.

Like `flax.linen.Dense`, a layer without `in_features` takes the number of inputs from its first
input: ``LUT(out_features=4, ...)``. `pickle` copies a layer unless a field is a nested function,
such as `jax.nn.initializers.normal(0.1)`.

Example:
  >>> import jax, jax.numpy as jnp
  >>> from lutjax.layers.linen import LUT
  >>> layer = LUT(8, 1, n_detectors=16, n_anchors=4)
  >>> x = jax.random.normal(jax.random.key(1), (64, 8))
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

A model with several layers has one subtree for each layer in every collection:
``variables["anchors"]["LUT_0"]["anchors"]``.
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import require_optional
from lutjax.layers._specs import specs

with require_optional("lutjax.layers.linen"):
    from lutjax.layers._declared import tables_of
    from lutjax.layers.linen._layer import make_layer

if TYPE_CHECKING:  # without the stubs of hatch_build.py

    def __getattr__(name: str) -> Any: ...


_OWN = {
    "LUTAttention": """
    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUTAttention
      >>> layer = LUTAttention(
      ...     8, 8, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2, decode=True
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 1, 8)))
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'positions': (31, 1, 2), 'weights': (16, 256, 8)}
      >>> y, new = layer.apply(variables, jnp.ones((4, 3, 8)), mutable=["cache"])
      >>> y.shape, int(new["cache"]["cache_index"])
      ((4, 3, 8), 3)
    """,
    "NgramEmbedding": """
    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.linen import NgramEmbedding
      >>> layer = NgramEmbedding(16, lutjax.NgramLayout.hash(1000))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> layer.apply(layer.init(jax.random.key(0), x, tokens), x, tokens).shape
      (4, 32, 16)
    """,
    "NgramMemory": """
    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import NgramMemory
      >>> layer = NgramMemory(16, rows=1000)
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> variables = layer.init(jax.random.key(0), x, tokens)
      >>> layer.apply(variables, x, tokens).shape, layer.row_ids(tokens).shape
      ((4, 32, 16), (4, 32, 8))

    With host-resident tables, next to the variables::

      >>> from lutjax.optim.host import HostTables
      >>> memory = HostTables()
      >>> layer = NgramMemory(16, rows=1000, placement=memory)
      >>> variables = layer.init(jax.random.key(0), x, tokens)
      >>> memory.draw(variables["keys"])
      >>> layer.apply(variables, x, tokens).shape, memory["weights"]
      ((4, 32, 16), HostTable(float32[8, 1000, 2]))
    """,
}
"""Layer-specific documentation."""

_LAYERS = {name: make_layer(spec, _OWN.get(name, "")) for name, spec in specs().items()}
globals().update(_LAYERS)

__all__ = [*sorted(_LAYERS), "tables_of"]
