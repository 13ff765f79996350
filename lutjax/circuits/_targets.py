"""Microcontrollers, FPGA families and boards from ``targets.toml``."""

import functools
import tomllib
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("targets.toml").read_text("utf-8"))


def read_targets(kind: str, make: Callable[..., T]) -> dict[str, T]:
    return {name: make(**_with_tuples(fields)) for name, fields in _tables()[kind].items()}


def _with_tuples(value: Any) -> Any:
    """Replace lists by tuples, because targets are immutable."""
    if isinstance(value, dict):
        return {name: _with_tuples(one) for name, one in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
