"""Flax NNX layers in bundles: JSON constructor arguments, rebuilt without running bundle code."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

import lutjax
from lutjax import reads, wiring
from lutjax.extras import require_optional
from lutjax.layers import nnx as layers, specifications
from lutjax.values import Edges

with require_optional(__name__):
    from flax import nnx

LAYERS: Mapping[str, Any] = {
    name: getattr(layers, name)
    for name in layers.__all__
    if hasattr(getattr(layers, name), "spec_type")
}
"""Flax NNX layers by name."""

_VALUES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        lutjax.FixedPoint,
        reads.Hard,
        reads.Blend,
        reads.SoftSign,
        reads.Confidence,
        reads.PowersOfTwo,
        wiring.Connectivity,
        wiring.Groups,
        wiring.Windows,
    )
}
"""Dataclasses allowed as arguments, by name."""

_FUNCTIONS: Mapping[str, Any] = {
    name: getattr(jax.nn, name)
    for name in (
        "celu", "elu", "gelu", "leaky_relu", "relu", "selu", "sigmoid", "silu", "softplus", "tanh",
    )
}  # fmt: skip
"""Functions allowed as arguments, by name; a bundle must not name any other function."""

_LARGEST = 1 << 16
"""Maximum number of elements in an array argument."""

_KIND, _EDGE_SIZES, _LAYOUT = "is", "edge_sizes", "NgramLayout"
_GIVEN = {"wires": "wires_fan_out", "targets": "targets_shape", "widths": "has_widths"}
"""Array arguments that determine sizes, each with the spec field that records its presence."""


def arguments_of(module: Any) -> dict[str, Any] | None:
    """Return a layer's constructor arguments for JSON, or None if it cannot represent one.

    Initializers are left out because the bundle holds the arrays, and `implementation` because it
    depends on the machine.
    """
    # Not a subclass: its name would rebuild another class.
    if LAYERS.get(type(module).__name__) is not type(module):
        return None
    spec = module.spec
    try:
        arguments = {
            name: _encode_argument(getattr(spec, name)) for name in _recorded_fields(type(spec))
        }
    except TypeError:
        return None
    given_arrays = [name for name, field in _GIVEN.items() if getattr(spec, field, None)]
    if getattr(spec, _EDGE_SIZES, None):
        arguments[_EDGE_SIZES] = list(spec.edge_sizes)
    return {**arguments, "given": given_arrays}


def empty(name: str, fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """Return a layer built from `arguments_of` output, with shapes and dtypes in place of arrays.

    Constructor arguments among its arrays determine sizes.
    """
    layer = LAYERS[name]
    options = {
        key: _decode_argument(fields[key])
        for key in _recorded_fields(layer.spec_type)
        if key in fields
    }
    given_arrays = fields.get("given")
    known = set(_GIVEN) & set(layer.spec_type.given)
    if not isinstance(given_arrays, list) or not set(map(str, given_arrays)) <= known:
        raise ValueError(f"its field 'given' is {given_arrays!r}")
    options |= {key: np.asarray(arrays[key]) for key in given_arrays}
    if fields.get(_EDGE_SIZES) is not None:
        first, target = np.asarray(arrays["first_edges"]), options["targets"]
        options["targets"] = Edges(first, target, *_decode_argument(fields[_EDGE_SIZES]))
    # Abstractly: sizes of an untrusted file must not allocate.
    takes_rngs = "rngs" in inspect.signature(layer).parameters
    return nnx.eval_shape(lambda: layer(**options, **({"rngs": nnx.Rngs(0)} if takes_rngs else {})))


def _recorded_fields(spec_type: type[specifications.Spec]) -> list[str]:
    left_out = {"implementation", *spec_type.given}
    names = specifications.arguments(spec_type)
    return [name for name in names if name not in left_out and not name.endswith("_init")]


def _encode_argument(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.dtype):
        return value.name
    if isinstance(value, tuple):
        return [_encode_argument(one) for one in value]
    if isinstance(value, np.ndarray) and value.size <= _LARGEST:
        return value.tolist()
    if isinstance(value, lutjax.NgramLayout):
        return {_KIND: _LAYOUT, **value.to_json()}
    if _VALUES.get(type(value).__name__) is type(value):
        fields = dataclasses.fields(value)
        return {
            _KIND: type(value).__name__,
            **{f.name: _encode_argument(getattr(value, f.name)) for f in fields},
        }
    name = next((name for name, function in _FUNCTIONS.items() if function is value), None)
    if name is None:
        raise TypeError
    return {_KIND: name}


def _decode_argument(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_decode_argument, value))
    if not isinstance(value, dict):
        return value
    fields = {name: _decode_argument(one) for name, one in value.items() if name != _KIND}
    name = value[_KIND]
    if name == _LAYOUT:
        return lutjax.NgramLayout.from_json(fields)
    # Only names of the two dictionaries: a bundle must not choose what is called.
    if not isinstance(name, str) or (name in _FUNCTIONS and fields):
        raise ValueError(f"a value of it is {name!r}")
    return _FUNCTIONS[name] if name in _FUNCTIONS else _VALUES[name](**fields)
