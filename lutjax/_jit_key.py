"""Settings of lutjax that are a part of jit's cache key: no trace outlives the block it was made in.

`import lutjax` makes them if JAX is imported. Made later, by the first op inside a traced function, they change the
key of that function, which compiles once more.
"""

import jax

IMPLEMENTATION = jax.make_user_context(default_value=None)
"""The implementations of `lutjax.use_implementation`."""

LAUNCHES = jax.make_user_context(default_value=None)
"""The launches of `lutjax.tuning.use`."""

RECORDER = jax.make_user_context(default_value=None)
"""What `lutjax.tuning.recorded` collects into; it sees traces of its own."""
