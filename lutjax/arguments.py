"""Argument checks for layers and configs: plain values, annotated types, and error messages."""

import collections.abc
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

_KINDS = (int, float, bool, str, tuple, collections.abc.Sequence, collections.abc.Callable)
"""Types checked here. Package classes are checked at their point of use."""

_MOST = 80
"""Maximum number of characters per value in a message."""


def format_value(value: Any) -> str:
    """Format a value for a message: dtype and shape for arrays, else a truncated repr.

    Example:
      >>> import numpy as np
      >>> from lutjax.arguments import format_value
      >>> format_value(np.zeros((300, 2))), format_value("text"), format_value([0.5] * 1000)
      ('float64[300, 2]', "'text'", 'a list of 1000')
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple | set | frozenset | dict) and len(value) > 20:
        return f"a {type(value).__name__} of {len(value)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."


def require_array(where: str, name: str, value: Any) -> None:
    """Raise TypeError unless an argument is a real array."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{where}: {name} is {format_value(value)}; expected a JAX or numpy array.")
    import jax
    import numpy as np

    if jax.numpy.issubdtype(value.dtype, np.complexfloating):
        raise TypeError(f"{where}: {name} is {format_value(value)}; expected real numbers or bits.")


def require_integer(where: str, name: str, value: Any) -> int:
    """Return an integer as a Python int, or raise TypeError for any other value."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{where}: {name} is {format_value(value)}; expected a whole number."
        ) from None


def require_rngs(where: str, rngs: Any) -> None:
    """Raise TypeError unless an argument is an `nnx.Rngs`; seeds and keys are not."""
    from flax import nnx  # only Flax layers call this

    if not isinstance(rngs, nnx.Rngs):
        raise TypeError(
            f"{where}: rngs is {format_value(rngs)}; expected flax.nnx.Rngs, such as nnx.Rngs(0)."
        )


def require_key(where: str, key: Any) -> None:
    """Raise TypeError or ValueError unless an argument is a single `jax.random` key."""
    import jax
    import numpy as np

    typed = hasattr(key, "dtype") and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and getattr(key, "dtype", None) != np.uint32:
        raise TypeError(
            f"{where}: key is {format_value(key)}; expected a key, such as jax.random.key(0)."
        )
    if len(key.shape) != (0 if typed else 1):
        raise ValueError(
            f"{where}: key is {format_value(key)}; expected one key, such as jax.random.key(0)."
        )


def normalize_value(value: Any) -> Any:
    """Convert lists, ranges and arrays to tuples and NumPy numbers to Python; keep other values.

    Example:
      >>> import numpy as np
      >>> from lutjax.arguments import normalize_value
      >>> normalize_value([3, [np.int64(4)]]), normalize_value(np.float32(0.5))
      ((3, (4,)), 0.5)
      >>> normalize_value(np.arange(4).reshape(2, 2))
      ((0, 1), (2, 3))
    """
    import jax
    import numpy as np

    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _tuples(value.tolist(), value.ndim)
    # Named tuples are values of their own types; `tuple` would forget them.
    if isinstance(value, list | tuple | range) and not hasattr(value, "_fields"):
        return tuple(map(normalize_value, value))
    return value


def _tuples(value: Any, rank: int) -> Any:
    """Convert nested number lists to tuples; arrays may have millions of numbers."""
    if rank < 2:
        return tuple(value) if rank else value
    return tuple([_tuples(v, rank - 1) for v in value])


def check_arguments(where: str, annotated: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check arguments against annotations and return them as normalized values (`normalize_value`).

    Raises:
      TypeError: a value does not match its annotation, such as a list or string for a number.
      ValueError: a number is not an integer, or is NaN.
    """
    hints, normalized = _hints(annotated), {}
    for name, value in values.items():
        hint = hints.get(name, Any)
        kinds = {typing.get_origin(one) or one for one in _alternatives(hint)}
        if kinds.intersection(_KINDS) and type not in kinds:  # JAX checks dtypes
            of_python = normalize_value(value)
            if not _fits(of_python, hint):
                error = ValueError if isinstance(value, float) else TypeError
                raise error(
                    f"{where}: {name} is {format_value(value)}; expected {_describe_hint(hint)}."
                )
            value = of_python
        normalized[name] = value
    return normalized


def set_decided_fields(
    target: Any, decided: Mapping[str, Any], conflict: Callable[[str, Any], ValueError]
) -> None:
    """Set the dataclass fields that another argument decides.

    Args:
      target: dataclass instance, which may be frozen.
      decided: values by field name.
      conflict: error for a field, given its name and decided value.

    Raises:
      ValueError: a field has neither its decided value nor its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(target)}
    for name, value in decided.items():
        if getattr(target, name) not in (value, defaults[name]):
            raise conflict(name, value)
        object.__setattr__(target, name, value)


@functools.cache
def _hints(annotated: type) -> dict[str, Any]:
    return typing.get_type_hints(annotated)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    unions = types.UnionType | typing._UnionGenericAlias  # type: ignore[attr-defined]
    return typing.get_args(hint) if isinstance(hint, unions) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value's type matches an annotation. Ranges and names are checked at use."""
    return any(_fits_one(value, one) for one in _alternatives(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    import jax

    origin = typing.get_origin(hint) or hint
    if origin in (int, bool):
        return isinstance(value, int | jax.core.Tracer) or hasattr(value, "__index__")
    if origin is float:
        is_number = isinstance(value, float) and value == value  # not NaN
        return is_number or isinstance(value, int | jax.core.Tracer)
    if origin in (tuple, collections.abc.Sequence):
        of_items = typing.get_args(hint) or (Any,)
        return isinstance(value, tuple) and all(_fits(item, of_items[0]) for item in value)
    if origin is collections.abc.Callable:
        return callable(value)
    return origin is Any or not isinstance(origin, type) or isinstance(value, origin)


def _describe_hint(hint: Any) -> str:
    words = dict.fromkeys(_words_of_one(one) for one in _alternatives(hint))
    words.pop("a whole number" if "a number" in words else "", None)
    return " or ".join(words)


def _words_of_one(hint: Any) -> str:
    origin = typing.get_origin(hint) or hint
    if origin in (tuple, collections.abc.Sequence):
        item = (typing.get_args(hint) or (Any,))[0]
        return f"{_describe_hint(item).removeprefix('a ')}s, as a tuple"
    known: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "a name",
    }
    known |= {type(None): "None", collections.abc.Callable: "a function"}
    return known.get(origin, getattr(origin, "__name__", str(origin)))
