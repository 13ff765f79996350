"""Options of a command made from the fields of dataclasses, so that no field is forgotten."""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

import click


class MeshType(click.ParamType):
    """Axes of a mesh of devices, with their sizes."""

    name = "axes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        from lutjax.training import meshes

        try:
            return meshes.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Renamed(click.Option):
    """An option whose names after the first are those of earlier versions, which help does not show."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = self.opts
        self.opts = names[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


class FieldsCommand(click.Command):
    """A command with one option for every field of the dataclasses, or unions of dataclasses, that `configs` returns.

    The classes are asked for when options are needed, not when the command is defined: their modules import
    JAX. The command receives only the fields that were given, as ``fields``. A field without a default is no option:
    it follows from something else, and so does one whose metadata says that it is none.
    """

    def __init__(self, *args: Any, configs: Callable[[], Sequence[type]], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._configs = configs
        self._fields: list[click.Option] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and those of the fields."""
        if self._fields is None:
            self._fields = [option for config in self._configs() for option in _options_of(config)]
        return [*super().get_params(ctx), *self._fields]

    def invoke(self, ctx: click.Context) -> Any:
        """Gathers the fields that were given."""
        values = {option.name: ctx.params.pop(option.name) for option in self._fields or ()}
        ctx.params["fields"] = {name: value for name, value in values.items() if value is not None}
        return super().invoke(ctx)


def _options_of(config: Any) -> list[click.Option]:
    """Return the options of a dataclass; of a union one for each name, which says which of its classes have it."""
    classes = typing.get_args(config) or (config,)
    found: dict[str, click.Option] = {}
    for one in classes:
        for option in _options(one):
            found.setdefault(str(option.name), option)
    for name, option in found.items():
        having = [one.__name__.removesuffix("Config") for one in classes if name in one.__dataclass_fields__]
        if len(having) < len(classes):
            option.help = f"{' and '.join(having)}: {option.help}"
    return list(found.values())


def _options(config: type) -> list[click.Option]:
    hints = typing.get_type_hints(config)
    help_of: dict[str, str] = {}
    for one in reversed(config.__mro__):  # a class need not say again what its base says
        help_of |= _attributes(one.__doc__ or "")
    options = []
    for field in dataclasses.fields(config):
        if field.default is dataclasses.MISSING or not field.metadata.get("option", True):
            continue
        flag = field.name.replace("_", "-")
        kind = _type(hints[field.name])
        names = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
        options.append(
            click.Option([names, field.name], type=kind, default=None, help=help_of.get(field.name, ""))
        )
    return options


def _type(hint: Any) -> Any:
    """The click type of an annotation: that of ``int | None`` is int, of ``float | int`` float."""
    if hint == tuple[int, ...]:
        return _Integers()
    if hint == int | tuple[int, ...]:
        return _IntegerOrIntegers()
    if isinstance(hint, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


class _Integers(click.ParamType):
    """Numbers with commas between them."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, tuple) else tuple(int(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not integers with commas between them, such as 200,100.", param, ctx)


class _IntegerOrIntegers(_Integers):
    """Type of one number for all, or of numbers with commas between them."""

    name = "integer or integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found[0] if isinstance(value, str) and len(found) == 1 else found


def _attributes(docstring: str) -> dict[str, str]:
    """Return the description of each name in the section "Attributes:" of a docstring."""
    _, _, section = docstring.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^ {6}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("`", "") for name, text in entries}
