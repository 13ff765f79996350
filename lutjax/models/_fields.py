"""Config fields with named choices, shared by checks and command options, and float checks."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from lutjax.arguments import format_value

CHOICES = "choices"  # metadata key for the choices of a field


def one_of(known: Iterable[str], default: str | None) -> Any:
    """Return a field with these choices, or None if None is its default."""
    return dataclasses.field(default=default, metadata={CHOICES: tuple(known)})


MOST_INT = 2**31 - 1  # largest size or step count: JAX counts in int32

LEAST, MOST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # smallest normal and largest float32


def check_floats(config: Any, where: str = "") -> None:
    """Raise ValueError if a finite, nonzero dataclass field becomes infinite or 0 in float32."""
    for field in dataclasses.fields(config):
        value_or_values = getattr(config, field.name)
        for value in value_or_values if isinstance(value_or_values, tuple) else (value_or_values,):
            if not isinstance(value, float) or not math.isfinite(value) or not value:
                continue
            # Subnormal numbers count as 0: XLA flushes them on most devices.
            if not LEAST <= abs(value) <= MOST:
                raise ValueError(
                    f"{where}{field.name} is {format_value(value_or_values)}; "
                    f"float32 magnitudes are {LEAST:.2g} to {MOST:.2g}."
                )


def check_names(config: Any, where: str = "") -> None:
    """Raise ValueError if a dataclass field is not among its choices."""
    for field in dataclasses.fields(config):
        known, value = field.metadata.get(CHOICES), getattr(config, field.name)
        if known is None or (value is None and field.default is None):
            continue
        if value not in known:
            raise ValueError(
                f"{where}{field.name} is {format_value(value)}; expected one of {', '.join(known)}."
            )
