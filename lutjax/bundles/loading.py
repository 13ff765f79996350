"""Models of bundles."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.bundles._fit import fit, flat
from lutjax.bundles._layout import NNX
from lutjax.bundles._reading import Bundle, read, read_config
from lutjax.bundles.errors import BundleError
from lutjax.training import runs


def load(folder: Path, into: Any = None) -> Any:
    """Return the model, or the arrays, that a bundle holds; see `lutjax.load`."""
    bundle = read(folder)
    found = bundle.config.tensors.values()
    wide = next((t for t in found if jax.dtypes.canonicalize_dtype(jnp.dtype(t.dtype)) != t.dtype), None)
    if wide is not None:
        raise BundleError(
            f"the bundle {folder} has {wide.dtype}, which JAX has switched off: jax.config.update('jax_enable_x64', True)."
        )
    if bundle.config.library != NNX:
        return _tree(bundle, into)
    from lutjax.bundles import _modules, _records

    name = bundle.config.architecture
    if into is not None:
        if not _modules.is_module(into):
            raise TypeError(f"load: the bundle holds a {name} of Flax NNX; into is a {type(into).__name__}.")
        _modules.fill(bundle, into)
        return into
    if bundle.config.model is None:
        raise ValueError(
            f"load: the bundle {folder} holds the arrays of a {name}, and not the arguments of its constructor; build a {name} and pass it as into=."
        )
    model = _modules.model(bundle)
    if bundle.config.run is not None:
        model.record = _records.from_dict(folder, bundle.config.run)
    return model


def trained(folder: Path, kind: str) -> Any:
    """Return the model of a bundle whose run was one of a kind; its `record` says so.

    Raises:
      BundleError: as `load`, or it is of another kind, or of no run.
    """
    config = read_config(folder)
    found = None if config.run is None else config.run.get("kind")
    if (
        not isinstance(found, str)
        or found not in runs.COMMANDS
        or runs.COMMANDS[found] != runs.COMMANDS[kind]
    ):
        held = (
            f"a run of {runs.COMMANDS[found]}"
            if isinstance(found, str) and found in runs.COMMANDS
            else f"a {config.architecture} without a run"
        )
        raise BundleError(
            f"the bundle {folder} holds {held}; this command takes a run of {runs.COMMANDS[kind]}."
        )
    return load(folder)


def _tree(bundle: Bundle, into: Any) -> Any:
    if into is None:
        return jax.tree.map(jnp.asarray, bundle.tree())
    wanted = flat(into)
    fit(bundle, wanted)
    names = {tensor.path: name for name, tensor in bundle.config.tensors.items()}
    return jax.tree.unflatten(
        jax.tree.structure(into), [jnp.asarray(bundle.values(names[path])) for path in wanted]
    )
