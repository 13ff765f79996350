"""Fields of configs that are one of some names, which stand once, for checks and for the options of commands; and those that are numbers."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from lutjax.arguments import shown

CHOICES = "choices"
"""Key of the names in the metadata of a field."""


def one_of(known: Iterable[str], default: str | None) -> Any:
    """Return a field that is one of these names, or None if that is its default."""
    return dataclasses.field(default=default, metadata={CHOICES: tuple(known)})


MOST_INT = 2**31 - 1
"""Largest size, number of steps and the like: JAX counts in int32."""

LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest normal number of float32, and its largest."""


def check_floats(config: Any, where: str = "") -> None:
    """Raise ValueError if a number of a dataclass is infinite or 0 in float32, where it is not before.

    Args:
      where: the beginning of the message.
    """
    for field in dataclasses.fields(config):
        found = getattr(config, field.name)
        for value in found if isinstance(found, tuple) else (found,):
            if (
                isinstance(value, float)
                and math.isfinite(value)
                and value
                and not LEAST <= abs(value) <= MOST
            ):
                raise ValueError(
                    f"{where}{field.name} is {shown(found)}; it is used in float32, whose numbers are from {LEAST:.2g} to {MOST:.2g} in magnitude."
                )


def check_names(config: Any, where: str = "") -> None:
    """Raise ValueError if a field of a dataclass is none of its names.

    Args:
      where: the beginning of the message.
    """
    for field in dataclasses.fields(config):
        known, value = field.metadata.get(CHOICES), getattr(config, field.name)
        if known is not None and value not in known and not (value is None and field.default is None):
            raise ValueError(f"{where}{field.name} is {shown(value)}; expected one of {', '.join(known)}.")
