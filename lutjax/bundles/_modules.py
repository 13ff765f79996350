"""Flax NNX modules as bundles.

lutjax models are built from their configs; users pass their own modules.
"""

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
from lutjax.extras import require_optional
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import format_value
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

with require_optional(__name__):
    from flax import nnx

CONFIGS: Mapping[str, Any] = {
    GPT.__name__: GPTConfig,
    LUTTransformer.__name__: LUTTransformerConfig,
    LogicClassifier.__name__: LogicClassifierConfig,
    LogicTreeNet.__name__: LogicTreeNetConfig,
    LogicCA.__name__: LogicCAConfig,
}
"""Configs of lutjax models, by class name."""

_KINDS = {kind: name for name, kind in KINDS.items()} | {nnx.Param: "params"}
_PASSING = nnx.Any(nnx.RngState, nnx.Cache, nnx.Intermediate)
"""Variables with non-learned state (caches, intermediates, RNG)."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A module variable: its path, kind and array."""

    path: Path
    kind: str
    array: Any


def learned_parts(module: nnx.Module) -> Iterator[Part]:
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Not(_PASSING))):
        kind = _KINDS.get(type(variable), type(variable).__name__.lower())
        yield Part(keys(path), kind, variable.get_value())


def refuse_on_host(module: nnx.Module) -> None:
    names = sorted(layers.host_tables_of(module))
    if names:
        raise BundleError(
            f"the table {names[0]} lies in the memory of the host, "
            "and bundles and programs hold arrays of a device alone. "
            "Give the folder of the run to lutjax generate or serve."
        )


def is_module(model: Any) -> bool:
    return isinstance(model, nnx.Module)


def config_of(module: nnx.Module) -> dict[str, Any] | None:
    """Return a lutjax model's config fields or a layer's constructor arguments, else None."""
    name = type(module).__name__
    if type(module).__module__.partition(".")[0] != "lutjax":
        return None
    if name not in CONFIGS:
        return _arguments_of(module)
    config: Any = module.config  # type: ignore[attr-defined]
    actual = _describe_arrays(module)
    expected = _describe_arrays(_empty(config, is_quantized(module)))
    for path in sorted({*expected, *actual}, key=str):
        if expected.get(path) != actual.get(path):
            raise ValueError(
                f"save: the array {name_of(path)} of this {name} is not that of its config: "
                "it was changed since. "
                "Save its arrays, nnx.to_pure_dict(nnx.state(model)), instead."
            )
    fields: dict[str, Any] = config.to_dict()
    return fields


def _arguments_of(module: nnx.Module) -> dict[str, Any] | None:
    fields = _layers.arguments_of(module)
    if fields is None:
        return None
    arrays = {name_of(part.path): part.array for part in learned_parts(module)}
    try:
        rebuilt = _layers.empty(type(module).__name__, fields, arrays)
    except (TypeError, ValueError):  # arrays replaced by arrays with another structure
        return None
    return fields if _describe_arrays(rebuilt) == _describe_arrays(module) else None


def _describe_arrays(module: nnx.Module) -> dict[Path, tuple[Any, Any]]:
    return {part.path: (part.array.shape, part.array.dtype) for part in learned_parts(module)}


def is_quantized(module: nnx.Module) -> bool:
    return any(part.kind == QUANTIZED for part in learned_parts(module))


def _empty(config: Any, quantized: bool) -> Any:
    if quantized and not isinstance(config, GPTConfig):
        raise ValueError(f"{type(config).__name__} has no form with tables of integers.")
    if isinstance(config, GPTConfig | LUTTransformerConfig):
        return structure_of(config, quantized=quantized).empty()
    build: Callable[..., Any] = LogicCA if isinstance(config, LogicCAConfig) else classifier_of
    return Structure(lambda rngs: build(config, rngs=rngs)).empty()


def model(bundle: Bundle) -> Any:
    """Return the lutjax model of a bundle in evaluation mode, or its layer in the saved mode."""
    config = bundle.config
    assert config.model is not None
    if config.architecture not in CONFIGS and config.architecture not in _layers.LAYERS:
        raise BundleError(
            f"the bundle {bundle.folder} holds a {format_value(config.architecture)}; "
            f"the models of this version are {', '.join(CONFIGS)}."
        )
    try:
        empty = _empty_of(bundle, config.model)
    except (KeyError, OverflowError, TypeError, ValueError) as error:  # sizes of no valid model
        raise BundleError(
            f"the bundle {bundle.folder} cannot be used: its model is no {config.architecture}: "
            f"{in_a_line(error)}"
        ) from error
    arrays = _match_values(bundle, empty)
    graph, learned, passing = _split(empty)
    module: Any = nnx.merge(graph, _replace_arrays(learned, arrays), jax.tree.map(_fresh, passing))
    _check(bundle, module)
    if config.architecture in CONFIGS:
        module.eval()
    return module


def _empty_of(bundle: Bundle, fields: dict[str, Any]) -> Any:
    config = bundle.config
    if config.architecture in CONFIGS:
        return _empty(runs.build_fields(CONFIGS[config.architecture], fields), config.quantized)
    arrays = {
        name: bundle.values(name)
        for name, tensor in config.tensors.items()
        if len(tensor.path) == 1
    }
    return _layers.empty(config.architecture, fields, arrays)


def fill(bundle: Bundle, module: nnx.Module) -> None:
    """Load the bundle values into a module of the saved class; on a mismatch nothing changes."""
    arrays = _match_values(bundle, module)
    graph, learned, passing = _split(module)
    new = _replace_arrays(learned, arrays)
    # Check a copy first: the user's module stays as it is if a wire is out of range.
    _check(bundle, nnx.merge(graph, new, passing))
    nnx.update(module, new)


def functional(module: nnx.Module) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """Return a module's arrays by tensor name, and a function that rebuilds it from such arrays."""
    graph, learned, passing = _split(module)

    def merge_module(arrays: Mapping[str, Any]) -> Any:
        named = {part.path: arrays[name_of(part.path)] for part in learned_parts(module)}
        return nnx.merge(graph, _replace_arrays(learned, named), passing)

    return {name_of(part.path): part.array for part in learned_parts(module)}, merge_module


def _match_values(bundle: Bundle, module: nnx.Module) -> dict[Path, Any]:
    """Return the bundle values by path, checked to match the module arrays exactly."""
    expected = {part.path: part.array for part in learned_parts(module)}
    fit(bundle, expected)
    tensors = bundle.config.tensors
    return {tensor.path: jnp.asarray(bundle.values(name)) for name, tensor in tensors.items()}


def _split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """Split a module into graph, stored state and non-learned state."""
    parts: Any = nnx.split(module, nnx.Not(_PASSING), ...)
    graph, learned, passing = parts
    return graph, learned, passing


def keys(path: Any) -> Path:
    return tuple(path)


def _replace_arrays(state: Any, arrays: Mapping[Path, Any]) -> Any:
    flat = [
        (path, variable.replace(arrays[keys(path)])) for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.from_flat_state(flat)


def _fresh(array: Any) -> Any:
    """Return an initial value for unsaved random state."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), array.shape)
    return jnp.zeros(array.shape, array.dtype)


def _check(bundle: Bundle, module: nnx.Module) -> None:
    try:
        layers.check(module)
    except ValueError as error:
        raise BundleError(
            f"the bundle {bundle.folder} cannot be used: {in_a_line(error)}"
        ) from error
