"""Modules of Flax NNX as bundles: the models of this package are made of their configs, those of users are given."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.bundles import _layers
from lutjax.bundles._fit import fit
from lutjax.bundles._layout import Path, name_of
from lutjax.bundles._reading import Bundle
from lutjax.bundles.errors import BundleError
from lutjax.extras import needed_by
from lutjax.files import strict_json
from lutjax.files.messages import in_a_line
from lutjax.layers import nnx as layers
from lutjax.layers.nnx.parts import KINDS
from lutjax.layers.specifications import QUANTIZED
from lutjax.models import (
    GPT,
    GPTConfig,
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LogicTreeNet,
    LogicTreeNetConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training import runs
from lutjax.training.classifier import classifier_of
from lutjax.training.lm import structure_of
from lutjax.training.models import Structure

with needed_by(__name__):
    from flax import nnx

CONFIGS: Mapping[str, Any] = {
    GPT.__name__: GPTConfig,
    LUTTransformer.__name__: LUTTransformerConfig,
    LogicClassifier.__name__: LogicClassifierConfig,
    LogicTreeNet.__name__: LogicTreeNetConfig,
    LogicCA.__name__: LogicCAConfig,
}
"""Configs of the models of this package, by their names."""

_KINDS = {kind: name for name, kind in KINDS.items()} | {nnx.Param: "params"}
_PASSING = nnx.Any(nnx.RngState, nnx.Cache, nnx.Intermediate)
"""Variables that are no part of what was learned."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable of a module: its path, its kind, and its array."""

    path: Path
    kind: str
    array: Any


def parts(module: nnx.Module) -> Iterator[Part]:
    """Yield what is learned or kept in a module, without caches and streams of random numbers."""
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Not(_PASSING))):
        kind = _KINDS.get(type(variable), type(variable).__name__.lower())
        yield Part(keys(path), kind, variable.get_value())


def refuse_on_host(module: nnx.Module) -> None:
    """Raise BundleError if a module has tables in the memory of the host."""
    found = sorted(layers.host_tables_of(module))
    if found:
        raise BundleError(
            f"the table {found[0]} lies in the memory of the host, and bundles and programs hold arrays of a device alone. Give the folder of the run to "
            "lutjax generate or serve."
        )


def is_module(model: Any) -> bool:
    """Return whether a model is a module of Flax NNX."""
    return isinstance(model, nnx.Module)


def config_of(module: nnx.Module) -> dict[str, Any] | None:
    """Return the config fields of a lutjax model or the constructor arguments of a lutjax layer; None for other modules.

    Raises:
      ValueError: the arrays of a model are not those that its config makes.
    """
    name = type(module).__name__
    if type(module).__module__.partition(".")[0] != "lutjax":
        return None
    if name not in CONFIGS:
        return _arguments_of(module)
    config: Any = module.config  # type: ignore[attr-defined]
    made, found = _described(_empty(config, is_quantized(module))), _described(module)
    for path in sorted({*made, *found}, key=str):
        if made.get(path) != found.get(path):
            raise ValueError(
                f"save: the array {name_of(path)} of this {name} is not that of its config: it was changed since. Save its arrays, "
                "nnx.to_pure_dict(nnx.state(model)), instead."
            )
    fields: dict[str, Any] = config.to_dict()
    return fields


def _arguments_of(module: nnx.Module) -> dict[str, Any] | None:
    """Return the constructor arguments of a lutjax layer, None where they do not make its arrays."""
    fields = _layers.arguments_of(module)
    if fields is None:
        return None
    arrays = {name_of(part.path): part.array for part in parts(module)}
    try:
        made = _layers.empty(type(module).__name__, fields, arrays)
    except (TypeError, ValueError):  # of arrays that were replaced by those of another form
        return None
    return fields if _described(made) == _described(module) else None


def _described(module: nnx.Module) -> dict[Path, tuple[Any, Any]]:
    return {part.path: (part.array.shape, part.array.dtype) for part in parts(module)}


def is_quantized(module: nnx.Module) -> bool:
    """Return whether a module has tables of integers."""
    return any(part.kind == QUANTIZED for part in parts(module))


def _empty(config: Any, quantized: bool) -> Any:
    """Return a model of this package with shapes and dtypes in place of arrays.

    Raises:
      ValueError: it is to have tables of integers, and has no form with some.
    """
    if quantized and not isinstance(config, GPTConfig):
        raise ValueError(f"{type(config).__name__} has no form with tables of integers.")
    if isinstance(config, GPTConfig | LUTTransformerConfig):
        return structure_of(config, quantized=quantized).empty()
    build: Callable[..., Any] = LogicCA if isinstance(config, LogicCAConfig) else classifier_of
    return Structure(lambda rngs: build(config, rngs=rngs)).empty()


def model(bundle: Bundle) -> Any:
    """Return the lutjax model that a bundle holds, in evaluation mode, or the lutjax layer, in the mode in which it was saved.

    Raises:
      BundleError: the config makes no model, or its arrays are others than those of the bundle, or an id does not exist.
    """
    config = bundle.config
    assert config.model is not None
    if config.architecture not in CONFIGS and config.architecture not in _layers.LAYERS:
        raise BundleError(
            f"the bundle {bundle.folder} holds a {strict_json.shown(config.architecture)}; the models of this version are {', '.join(CONFIGS)}."
        )
    try:
        empty = _empty_of(bundle, config.model)
    except (KeyError, OverflowError, TypeError, ValueError) as error:  # of sizes that are no model
        raise BundleError(
            f"the bundle {bundle.folder} cannot be used: its model is no {config.architecture}: {in_a_line(error)}"
        ) from error
    arrays = _fitting(bundle, empty)
    graph, kept, passing = _split(empty)
    made: Any = nnx.merge(graph, _with(kept, arrays), jax.tree.map(_fresh, passing))
    _check(bundle, made)
    if config.architecture in CONFIGS:
        made.eval()
    return made


def _empty_of(bundle: Bundle, fields: dict[str, Any]) -> Any:
    """Return the model or layer of a bundle with shapes and dtypes in place of arrays."""
    config = bundle.config
    if config.architecture in CONFIGS:
        return _empty(runs.made(CONFIGS[config.architecture], fields), config.quantized)
    arrays = {name: bundle.values(name) for name, tensor in config.tensors.items() if len(tensor.path) == 1}
    return _layers.empty(config.architecture, fields, arrays)


def fill(bundle: Bundle, module: nnx.Module) -> None:
    """Put the values of a bundle into a module of the class that was saved; nothing is changed where they do not fit.

    Raises:
      BundleError: it has other arrays, or an id does not exist.
    """
    arrays = _fitting(bundle, module)
    graph, kept, passing = _split(module)
    new = _with(kept, arrays)
    _check(bundle, nnx.merge(graph, new, passing))
    nnx.update(module, new)


def functional(module: nnx.Module) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """Return the arrays of a module by the names of their tensors, and what makes a module of arrays of these names."""
    graph, kept, passing = _split(module)

    def made(arrays: Mapping[str, Any]) -> Any:
        named = {part.path: arrays[name_of(part.path)] for part in parts(module)}
        return nnx.merge(graph, _with(kept, named), passing)

    return {name_of(part.path): part.array for part in parts(module)}, made


def _fitting(bundle: Bundle, module: nnx.Module) -> dict[Path, Any]:
    """Return the values of a bundle by path, all of which are arrays of a module, and its only ones."""
    wanted = {part.path: part.array for part in parts(module)}
    fit(bundle, wanted)
    found = bundle.config.tensors
    return {tensor.path: jnp.asarray(bundle.values(name)) for name, tensor in found.items()}


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Return the graph of a module, what a bundle holds of it, and what passes."""
    found: Any = nnx.split(module, nnx.Not(_PASSING), ...)
    graph, kept, passing = found
    return graph, kept, passing


def keys(path: Any) -> Path:
    """Return the path of a variable as that of a tensor."""
    return tuple(path)


def _with(state: Any, arrays: Mapping[Path, Any]) -> Any:
    flat = [(path, variable.replace(arrays[keys(path)])) for path, variable in nnx.to_flat_state(state)]
    return nnx.from_flat_state(flat)


def _fresh(array: Any) -> Any:
    """Return a first state of random numbers in the place of one that was not kept."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), array.shape)
    return jnp.zeros(array.shape, array.dtype)


def _check(bundle: Bundle, module: nnx.Module) -> None:
    try:
        layers.check(module)
    except ValueError as error:
        raise BundleError(f"the bundle {bundle.folder} cannot be used: {in_a_line(error)}") from error
