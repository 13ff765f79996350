"""Model configs as dictionaries, for checkpoints."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lutjax.arguments import check_arguments, format_value, normalize_value, require_rngs
from lutjax.models._fields import MOST_INT, check_floats

MOST_THRESHOLDS, MOST_LAYERS, MOST_DEPTH = 1 << 16, 1 << 12, 16
"""Maximum thresholds per number, layers per network, and gates between a tree's leaves and root."""

C = TypeVar("C")

FOLLOWS = {"option": False}
"""Metadata for fields that a training run derives from other settings.

These fields are not command-line options.
"""


def require_arguments(model: Any, config: Any, kind: type, rngs: Any) -> None:
    """Raise TypeError if a model gets another config type, such as a dict, or no `nnx.Rngs`."""
    where = type(model).__name__
    if not isinstance(config, kind):
        raise TypeError(
            f"{where}: config is {format_value(config)}; expected a {kind.__name__}. Use "
            f"{kind.__name__}.from_dict."
        )
    require_rngs(where, rngs)


class Config:
    """Config dataclass base with JSON values and tuples; lists and arrays become tuples."""

    def __post_init__(self) -> None:
        where, declared = type(self).__name__, dataclasses.fields(self)  # type: ignore[arg-type]
        fields = {f.name: getattr(self, f.name) for f in declared}
        for name, value in check_arguments(where, type(self), fields).items():
            for size in value if isinstance(value, tuple) else (value,):
                if isinstance(size, int) and size > MOST_INT:
                    raise ValueError(
                        f"{where}: {name} is {format_value(value)}; "
                        f"sizes must be at most {MOST_INT} (int32)."
                    )
            object.__setattr__(self, name, value)  # subclasses are frozen
        check_floats(self, f"{where}: ")

    def _check_sizes(self, **least: int) -> None:
        """Raise ValueError if a field, or a tuple's entry, is below its minimum; None passes."""
        for name, smallest in least.items():
            value = getattr(self, name)
            sizes = value if isinstance(value, tuple) else (value,)
            if value is not None and min(sizes, default=smallest) < smallest:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value}; it must be at least {smallest}."
                )

    def _check_most(self, **most: int) -> None:
        """Raise ValueError if a field exceeds its maximum, before any parts are built."""
        for name, largest in most.items():
            if getattr(self, name) > largest:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self, name)}; "
                    f"it must be at most {largest}."
                )

    def _check_spec(
        self, spec: Callable[..., Any], options: Mapping[str, Any], **fields: str
    ) -> None:
        """Re-raise a spec's ValueError with this config's field names."""
        try:
            spec(**options)
        except ValueError as error:
            text = str(error)
            for option, field in fields.items():
                text = re.sub(rf"\b{option} is\b", f"{field} is", text)
            raise ValueError(text) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls: type[C], fields: Mapping[str, Any]) -> C:
        """Return the config for fields from `to_dict`, or from its JSON.

        Raises:
          ValueError, TypeError: a field is unknown, missing or impossible.
        """
        return cls(**{name: normalize_value(value) for name, value in fields.items()})
