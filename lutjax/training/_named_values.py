"""Values by name in TOML files of this package, with shared bases."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any


def read(file: str) -> dict[str, Any]:
    """Return a file's tables of values; ``base = NAME`` in a table adds the values of ``[bases.NAME]``.

    Arrays become tuples, as configs require.
    """
    tables = tomllib.loads(resources.files(__package__).joinpath(file).read_text("utf-8"))
    bases = tables.pop("bases", {})
    return {name: _complete(table, bases) for name, table in tables.items()}


def _complete(table: Mapping[str, Any], bases: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            own[name] = _complete(value, bases)
        else:
            own[name] = tuple(value) if isinstance(value, list) else value
    base = own.pop("base", None)
    return own if base is None else {**_complete(bases[base], bases), **own}
