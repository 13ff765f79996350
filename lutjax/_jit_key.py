"""Settings in jit's cache key, so that no trace outlives its context.

`import lutjax` creates them if JAX is already imported. If the first op inside a traced function
creates them later, this function's key changes and it compiles once more.
"""

import jax

IMPLEMENTATION = jax.make_user_context(default_value=None)
"""Implementations set by `lutjax.use_implementation`."""

LAUNCHES = jax.make_user_context(default_value=None)
"""Kernel configurations set by `lutjax.tuning.use`."""

RECORDER = jax.make_user_context(default_value=None)
"""Collector for `lutjax.tuning.recorded`, with separate traces."""
