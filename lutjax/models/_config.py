"""Configs of models as dictionaries, for checkpoints."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lutjax.arguments import checked, plain, require_rngs, shown
from lutjax.models._fields import MOST_INT, check_floats

MOST_THRESHOLDS, MOST_LAYERS, MOST_DEPTH = 1 << 16, 1 << 12, 16
"""Most thresholds of a number, layers of a network, and gates between the leaves and the root of a tree."""

C = TypeVar("C")

FOLLOWS = {"option": False}
"""Metadata of a field that follows from something else in a training run, and so is no option of a command."""


def require_arguments(model: Any, config: Any, kind: type, rngs: Any) -> None:
    """Raise TypeError if a model gets a config of another kind, such as a dictionary, or no `nnx.Rngs`."""
    where = type(model).__name__
    if not isinstance(config, kind):
        raise TypeError(
            f"{where}: config is {shown(config)}; expected a {kind.__name__}, which {kind.__name__}.from_dict makes of a dictionary."
        )
    require_rngs(where, rngs)


class Config:
    """A base of dataclasses of what JSON can hold and of tuples, which lists and arrays become."""

    def __post_init__(self) -> None:
        where, fields = type(self).__name__, {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name, value in checked(where, type(self), fields).items():
            for size in value if isinstance(value, tuple) else (value,):
                if isinstance(size, int) and size > MOST_INT:
                    raise ValueError(
                        f"{where}: {name} is {shown(value)}; sizes are at most {MOST_INT}, as ids are int32."
                    )
            object.__setattr__(self, name, value)
        check_floats(self, f"{where}: ")

    def _check_sizes(self, **least: int) -> None:
        """Raise ValueError if a field, or an entry of one that is a tuple, is smaller than its least value; None is not."""
        for name, smallest in least.items():
            value = getattr(self, name)
            if (
                value is not None
                and min(value if isinstance(value, tuple) else (value,), default=smallest) < smallest
            ):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self, name)}; it must be at least {smallest}."
                )

    def _check_most(self, **most: int) -> None:
        """Raise ValueError if a field is larger than its largest value, before anything is made of so many parts."""
        for name, largest in most.items():
            if getattr(self, name) > largest:
                raise ValueError(
                    f"{type(self).__name__}: {name} is {getattr(self, name)}; it must be at most {largest}."
                )

    def _check_spec(self, spec: Callable[..., Any], options: Mapping[str, Any], **fields: str) -> None:
        """Raise the ValueError of a spec that refuses its options, with the names of this config's fields.

        Args:
          fields: the field that gives an option of the spec, by the option's name.
        """
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
        """Return the config that `to_dict` made these fields of, or JSON of them.

        Raises:
          ValueError, TypeError: a field is unknown, missing or impossible.
        """
        return cls(**{name: plain(value) for name, value in fields.items()})
