"""Options of a command made from the fields of dataclasses, so that no field is forgotten."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from lutjax.models._fields import CHOICES
from lutjax.training.errors import RunError

if TYPE_CHECKING:
    from lutjax.training.experiments import Experiment


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
    """A command with one option for every field of the dataclasses, or unions of dataclasses, that are the configs of a kind of runs.

    The kind, an `Experiment` class, is asked for when options are needed, not when the command is defined: its module imports
    JAX. The command receives only the fields that were given, as ``fields``. A field without a default is no option:
    it follows from something else, and so does one whose metadata says that it is none. Errors name options in place of fields.
    """

    def __init__(self, *args: Any, kind: Callable[[], "type[Experiment]"], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._kind = kind
        self._fields: list[click.Option] | None = None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The command's own parameters and those of the fields."""
        if self._fields is None:
            self._fields = _options_of(self._kind())
        return [*super().get_params(ctx), *self._fields]

    def invoke(self, ctx: click.Context) -> Any:
        """Gathers the fields that were given."""
        values = {option.name: ctx.params.pop(option.name) for option in self._fields or ()}
        ctx.params["fields"] = {name: value for name, value in values.items() if value is not None}
        names = [str(param.name) for param in self.get_params(ctx)]
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.message = by_options(error.message, names)  # type: ignore[misc]
            raise
        except RunError as error:
            error.args = (by_options(str(error), names),)
            raise


def flag_of(field: str) -> str:
    """Return the option of a field."""
    return f"--{field.replace('_', '-')}"


def by_options(text: str, fields: Iterable[str]) -> str:
    """Return a text about fields with the names of their options.

    A field is taken for one where its name has several words, or where its value is said: ``steps is 0``.

    Example:
      >>> from lutjax.cli._flags import by_options
      >>> by_options("GPTConfig: features is 3 and n_heads 2; n_heads must divide features.", ["features", "n_heads"])
      '--features is 3 and --n-heads 2; --n-heads must divide features.'
    """
    fields = [re.escape(field) for field in fields]
    nothing = "(?!)"
    several = "|".join(field for field in fields if "_" in field) or nothing
    one = "|".join(field for field in fields if "_" not in field) or nothing
    text = re.sub(r"^[A-Z]\w+: ", "", text)
    for pattern in (
        rf"(?<![\w./-])(?:{several})(?![\w/(]|\.\w)",
        rf"(?:(?<=^)|(?<=[;:,] )|(?<=and ))(?:{one})(?= is )",
    ):
        text = re.sub(pattern, lambda found: flag_of(found[0]), text)
    return text


def _options_of(kind: "type[Experiment]") -> list[click.Option]:
    """Return an option for each field of the configs of a kind of runs."""
    found: dict[str, click.Option] = {}
    models: Any = kind.configs.models or {None: None}
    for config in (kind.configs.model, kind.configs.training, kind.configs.options):
        classes = typing.get_args(config) or (config,)
        of_model: dict[str | None, Any] = {
            model: own if own in classes else classes[0] for model, own in models.items()
        }
        for one in classes:
            for field in dataclasses.fields(one):
                if field.default is dataclasses.MISSING or not field.metadata.get("option", True):
                    continue
                having = [model for model, own in of_model.items() if field.name in own.__dataclass_fields__]
                if field.name not in found:
                    found[field.name] = _option(
                        kind, {model: of_model[model] for model in having}, field.name
                    )
                    if len(having) < len(of_model):
                        found[field.name].help = f"--model {having[0]}: {found[field.name].help}"
    of_several_words = [name for name in found if "_" in name]
    for option in found.values():
        option.help = by_options(option.help or "", of_several_words)
    return list(found.values())


def _option(kind: "type[Experiment]", configs: Mapping[str | None, Any], name: str) -> click.Option:
    """Return the option of a field.

    Args:
      configs: the classes that have it, by model.
    """
    first = next(iter(configs.values()))
    field, hint = first.__dataclass_fields__[name], typing.get_type_hints(first)[name]
    kind_of = click.Choice(field.metadata[CHOICES]) if CHOICES in field.metadata else _type(hint)
    names = f"{flag_of(name)}/--no-{name.replace('_', '-')}" if kind_of is bool else flag_of(name)
    text = ""
    for one in reversed(first.__mro__):  # a class need not say again what its base says
        text = _attributes(one.__doc__ or "").get(name, text)
    defaults = {
        model: _shown(name, kind.configs.preset(model).get(name, config.__dataclass_fields__[name].default))
        for model, config in configs.items()
    }
    usual, *_ = defaults.values()
    others = [
        f"{value or 'none'} with --model {model}" for model, value in defaults.items() if value != usual
    ]
    if usual:
        text += f"  [default: {'; '.join([usual, *others])}]"
    return click.Option([names, name], type=kind_of, default=None, help=text)


def _shown(name: str, value: Any) -> str:
    """Return a default as it would be given, or in words; nothing for None, of which the description says what it is."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def _type(hint: Any) -> Any:
    """The click type of an annotation: that of ``int | None`` is int, of ``float | int`` a finite number."""
    if hint == tuple[int, ...]:
        return Integers()
    if hint == int | tuple[int, ...]:
        return IntegerOrIntegers()
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return Finite() if hint is float else hint


class Finite(click.FloatRange):
    """Type of a number that is neither infinite nor NaN, perhaps of a range."""

    name = "float"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(number := float(super().convert(value, param, ctx))):
            self.fail(f"{value!r} is not finite.", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is self.max is None else super()._describe_range()


class Integers(click.ParamType):
    """Numbers with commas between them."""

    name = "integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, tuple) else tuple(int(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not integers with commas between them, such as 200,100.", param, ctx)


class IntegerOrIntegers(Integers):
    """Type of one number for all, or of numbers with commas between them."""

    name = "integer or integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        return found[0] if isinstance(value, str) and len(found) == 1 else found


def _attributes(docstring: str) -> dict[str, str]:
    """Return the description of each name in the section "Attributes:" of a docstring; several names may share one."""
    _, _, section = docstring.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^ {6}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r"\s+", " ", text).replace("`", "")
        for names, text in entries
        for name in names.split(", ")
    }
