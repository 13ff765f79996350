"""Pytree comparisons."""

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import testing


def _array(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def equal(actual, expected):
    """Return True if two pytrees with the same structure have equal elements."""
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(_array(a), _array(b)), actual, expected)
    )


def assert_close(what, actual, expected, tolerance=None):
    """Raise AssertionError, with the leaf path, if two pytrees differ by more than rounding."""
    actual, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    for (path, a), (other, b) in zip(actual, expected, strict=True):
        assert path == other
        testing.assert_close(
            f"{what}: {jax.tree_util.keystr(path)}", _array(a), _array(b), tolerance
        )
