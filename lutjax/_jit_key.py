"""Settings of lutjax that are a part of jit's cache key: no trace outlives the block it was made in.

They are made as soon as both lutjax and JAX are imported. Made later, by the import of an op or a kernel while a function is traced, they would let
the next call of that function compile it again.
"""

import jax

IMPLEMENTATION = jax.make_user_context(default_value=None)
"""The implementations of `lutjax.use_implementation`."""

LAUNCHES = jax.make_user_context(default_value=None)
"""The launches of `lutjax.tuning.use`."""

RECORDER = jax.make_user_context(default_value=None)
"""What `lutjax.tuning.recorded` collects into; it sees traces of its own."""
