"""Bundle loading."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.bundles._fit import fit, flat
from lutjax.bundles._layout import NNX
from lutjax.bundles._reading import Bundle, read
from lutjax.bundles.errors import BundleError


def load(folder: Path, into: Any = None) -> Any:
    """Load a bundle's model or arrays; see `lutjax.load`."""
    bundle = read(folder)
    tensors = bundle.config.tensors.values()
    # JAX would silently halve 64-bit values.
    wide = next(
        (t for t in tensors if jax.dtypes.canonicalize_dtype(jnp.dtype(t.dtype)) != t.dtype), None
    )
    if wide is not None:
        raise BundleError(
            f"the bundle {folder} has {wide.dtype}, which needs jax_enable_x64 in JAX."
        )
    if bundle.config.library != NNX:
        return _tree(bundle, into)
    from lutjax.bundles import _modules, _records

    name = bundle.config.architecture
    if into is not None:
        if not _modules.is_module(into):
            raise TypeError(
                f"load: the bundle holds a {name} of Flax NNX; into is a {type(into).__name__}."
            )
        _modules.fill(bundle, into)
        return into
    if bundle.config.model is None:
        raise ValueError(
            f"load: the bundle {folder} holds the arrays of a {name}, "
            f"and not the arguments of its constructor; build a {name} and pass it as into=."
        )
    model = _modules.model(bundle)
    if bundle.config.run is not None:
        model.record = _records.from_dict(folder, bundle.config.run)
    return model


def _tree(bundle: Bundle, into: Any) -> Any:
    if into is None:
        return jax.tree.map(jnp.asarray, bundle.tree())
    leaves = flat(into)
    fit(bundle, leaves)
    names = {tensor.path: name for name, tensor in bundle.config.tensors.items()}
    arrays = [jnp.asarray(bundle.values(names[path])) for path in leaves]
    return jax.tree.unflatten(jax.tree.structure(into), arrays)
