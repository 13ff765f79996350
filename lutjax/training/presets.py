"""Named presets of sizes and rates, in ``presets.toml``; every value can be overridden by name.

`lutjax train --help` reads them without JAX.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any


def read_values(file: str) -> dict[str, Any]:
    """Return a file's tables of values.

    ``base = NAME`` in a table adds the values of ``[bases.NAME]``. Arrays become tuples, as configs
    require.
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


_VALUES = read_values("presets.toml")

PRESETS: dict[str, dict[str, dict[str, Any]]] = _VALUES["lm"]
"""Values for the model config, `TrainingConfig` and the intervals, by model and preset."""

MODEL = "gpt"  # default model

EXPERIMENTS: dict[str, dict[str, Any]] = _VALUES["ca"]
"""Values for `LogicCAConfig`, `TrainingConfig` and the intervals, by experiment."""


def preset(model: str, name: str) -> dict[str, Any]:
    """Return a model preset's values; raise ValueError if the model has no such preset."""
    if name not in PRESETS[model]:
        raise ValueError(f"preset is {name!r}; the model {model} has {', '.join(PRESETS[model])}.")
    return PRESETS[model][name]


def fields_of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a config."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name in names}


def refuse_others(what: str, configs: Sequence[type], fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field unknown to all configs; `what` names them in the message."""
    known = {field.name for config in configs for field in dataclasses.fields(config)}
    others = sorted(set(fields) - known)
    if others:
        raise ValueError(f"{others[0]} is {fields[others[0]]}; {what} has no such option.")


def make(config: type, values: Mapping[str, Any]) -> Any:
    """Build a config from the values that are its fields."""
    return config(**fields_of(config, values))
