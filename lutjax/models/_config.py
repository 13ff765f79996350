"""Configs of models as dictionaries, for checkpoints."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

C = TypeVar("C")

FOLLOWS = {"option": False}
"""Metadata of a field that follows from something else in a training run, and so is no option of a command."""


class Config:
    """A base of dataclasses of what JSON can hold and of tuples."""

    def _check_sizes(self, **least: int) -> None:
        """Raise ValueError if a field is smaller than its least value."""
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self, name)}; it must be at least {smallest}."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as JSON can hold them."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls: type[C], fields: Mapping[str, Any]) -> C:
        """Return the config that `to_dict` made these fields of, or JSON of them.

        Raises:
          ValueError, TypeError: a field is unknown, missing or impossible.
        """
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})
