"""Layers for Haiku. Use `haiku.transform_with_state`: `haiku.transform` raises in ``init``.

Trained variables are parameters: tables, scalars of reads, projections, positions, logits, scores,
and learnable thresholds. All other variables are state. State is equally part of the model, and is
never trained:

- ``anchors``: input ids that detectors compare;
- ``targets``: output ids of `SparseLUT` and `SpatialLUT` rows;
- ``wires`` and ``readers``: input ids of gates, and their fan-out lists;
- ``thresholds``: fixed thresholds of a `Thermometer`;
- ``weights`` and ``exponents`` of quantized tables;
- ``weights_key``, ``down_key`` and ``up_key``: PRNG keys that initialize host-resident tables
  (`lutjax.optim.host.HostTables`);
- ``in_features``, with the number of inputs as shape, only for layers without the argument
  `in_features`;
- ``cached_...`` and ``cache_index``: the latest keys, only for attention with ``decode=True``.

`init` returns parameters and state, both drawn from its key. `apply` takes both and returns the
state: unchanged, except for new keys in a cache. Save both in a checkpoint. A layer's method
``check``, called inside a transformed function, checks the variables of a checkpoint.

`pickle` copies a layer unless an argument is a nested function, such as
`jax.nn.initializers.normal(0.1)`.

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
  >>> checkpoint = {"params": params, "state": state}  # to save, and for `apply` once it is read
  >>> check = hk.transform_with_state(lambda: LUT(8, 1, n_detectors=16, n_anchors=4).check())
  >>> _ = check.apply(**checkpoint, rng=None)
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import require_optional
from lutjax.layers._specs import specs

with require_optional("lutjax.layers.haiku"):
    from lutjax.layers._declared import tables_of
    from lutjax.layers.haiku._layer import make_layer

if TYPE_CHECKING:  # without the stubs of hatch_build.py

    def __getattr__(name: str) -> Any: ...


_OWN = {
    "LUTAttention": """
    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LUTAttention
      >>> sizes = dict(n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2)
      >>> f = hk.transform_with_state(lambda x: LUTAttention(8, 8, decode=True, **sizes)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((4, 1, 8)))
      >>> jax.tree.map(jnp.shape, params)
      {'lut_attention': {'positions': (31, 1, 2), 'weights': (16, 256, 8)}}
      >>> y, state = f.apply(params, state, None, jnp.ones((4, 3, 8)))
      >>> y.shape, int(state["lut_attention"]["cache_index"])
      ((4, 3, 8), 3)
    """,
    "NgramEmbedding": """
    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.haiku import NgramEmbedding
      >>> layout = lutjax.NgramLayout.hash(1000)
      >>> f = hk.transform(lambda x, tokens: NgramEmbedding(16, layout)(x, tokens))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> f.apply(f.init(jax.random.key(0), x, tokens), None, x, tokens).shape
      (4, 32, 16)
    """,
    "NgramMemory": """
    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import NgramMemory
      >>> f = hk.transform(lambda x, tokens: NgramMemory(16, rows=1000)(x, tokens))
      >>> x, tokens = jnp.ones((4, 32, 16)), jnp.zeros((4, 32), jnp.int32)
      >>> params = f.init(jax.random.key(0), x, tokens)
      >>> f.apply(params, None, x, tokens).shape
      (4, 32, 16)

    With host-resident tables, next to parameters and state::

      >>> from lutjax.optim.host import HostTables
      >>> memory = HostTables()
      >>> options = {"rows": 1000, "placement": memory}
      >>> f = hk.transform_with_state(lambda x, tokens: NgramMemory(16, **options)(x, tokens))
      >>> params, state = f.init(jax.random.key(0), x, tokens)
      >>> memory.draw(state)
      >>> f.apply(params, state, None, x, tokens)[0].shape, memory["ngram_memory/weights"]
      ((4, 32, 16), HostTable(float32[8, 1000, 2]))
    """,
}
"""Layer-specific documentation."""

_LAYERS = {name: make_layer(spec, _OWN.get(name, "")) for name, spec in specs().items()}
globals().update(_LAYERS)

__all__ = [*sorted(_LAYERS), "tables_of"]
