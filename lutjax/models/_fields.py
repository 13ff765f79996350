"""Fields of configs that are one of some names: the names stand once, for checks and for the options of commands."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from lutjax._arguments import shown

CHOICES = "choices"
"""Key of the names in the metadata of a field."""


def one_of(known: Iterable[str], default: str | None) -> Any:
    """Return a field that is one of these names, or None if that is its default."""
    return dataclasses.field(default=default, metadata={CHOICES: tuple(known)})


def check_names(config: Any, where: str = "") -> None:
    """Raise ValueError if a field of a dataclass is none of its names.

    Args:
      where: the beginning of the message.
    """
    for field in dataclasses.fields(config):
        known, value = field.metadata.get(CHOICES), getattr(config, field.name)
        if known is not None and value not in known and not (value is None and field.default is None):
            raise ValueError(f"{where}{field.name} is {shown(value)}; expected one of {', '.join(known)}.")
