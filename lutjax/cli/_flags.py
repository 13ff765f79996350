"""Commands with grouped options, options from config fields, and option types."""

import dataclasses
import functools
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._compiled import keep_compiled
from lutjax.files.errors import FolderError
from lutjax.models._fields import CHOICES

if TYPE_CHECKING:
    from lutjax.training.configs import Configs

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
_NAME_WIDTH = 24  # first column; help for longer names starts below

PATH, FILE = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)
echo_error = functools.partial(click.echo, err=True)


def parameter_error(name: str, why: object) -> click.BadParameter:
    """Return an error about an option or argument."""
    return click.BadParameter(str(why), param_hint=name)


class Command(click.Command):
    """Command with options in `sections` or `fallback_heading`; `compiles` enables JAX's cache."""

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, str] = types.MappingProxyType({}),
        compiles: bool = True,
        **kwargs: Any,
    ):
        self._compiles = compiles
        super().__init__(*args, **{"context_settings": SETTINGS, **kwargs})
        self._headings = {
            name: heading for heading, names in sections.items() for name in names.split()
        }

    def invoke(self, ctx: click.Context) -> Any:
        if self._compiles:
            keep_compiled()
        return super().invoke(ctx)

    def sections(
        self, ctx: click.Context, everything: bool = True
    ) -> dict[str, list[click.Option]]:
        """Return the visible options by heading; `everything` adds the headings of `--help-all`."""
        by_heading: dict[str, list[click.Option]] = {
            heading: [] for heading in self._headings.values()
        }
        order = {name: place for place, name in enumerate(self._headings)}
        for option in sorted(
            self.get_params(ctx), key=lambda param: order.get(str(param.name), len(order))
        ):
            if isinstance(option, click.Option) and not option.hidden:
                heading = self._headings.get(str(option.name)) or self.fallback_heading(
                    option, everything
                )
                if heading:
                    by_heading.setdefault(heading, []).append(option)
        return {heading: options for heading, options in by_heading.items() if options}

    def fallback_heading(self, option: click.Option, everything: bool) -> str | None:
        """Return the heading for an option missing in `sections`; None hides it."""
        return "Help" if self._headings else "Options"

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, with aligned columns across headings."""
        sections = {
            heading: [_record(option, ctx) for option in options]
            for heading, options in self.sections(ctx, ctx.meta.get(SHOW_ALL, False)).items()
        }
        lengths = [len(name) for records in sections.values() for name, _ in records]
        width = max((length for length in lengths if length <= _NAME_WIDTH), default=0)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in records], width)


def _record(option: click.Option, ctx: click.Context) -> tuple[str, str]:
    """Return an option's names and help text."""
    names, text = option.get_help_record(ctx) or ("", "")
    names = re.sub(r"--(\S+) / --no-\1$", r"--[no-]\1", names)
    return names, text.removesuffix("[default: none]").rstrip()


SHOW_ALL = f"{__name__}.all"
"""Key in `click.Context.meta`: show all options in help."""


def _show_all(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[SHOW_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class FieldOption(click.Option):
    """Option for a config field; help shows the first sentence of `details`, and the `models`."""

    details: str
    models: tuple[str, ...]
    heading: str


class FieldsCommand(Command):
    """Command with an option for every run config field that has a default and is not excluded.

    Only explicitly given fields are passed, as ``fields``, and errors name options. ``--help``
    shows the options in `sections`, ``--help-all`` shows every option.
    """

    def __init__(self, *args: Any, configs: "Callable[[], Configs]", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._configs = configs
        self._fields: list[FieldOption] | None = None
        self._all = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_show_all,
            help="Show all options.",
        )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self._fields is None:  # on first use, since importing the configs takes time
            self._fields = _options_of(self._configs())
            for option in self._fields:
                if option.models and option.name in self._headings:
                    option.help = (option.help or "").replace(
                        ".  [", f" ({option.models[0]} only).  ["
                    )
        *own, shows_help = super().get_params(ctx)
        return [*own, *self._fields, shows_help, self._all]

    def fallback_heading(self, option: click.Option, everything: bool) -> str | None:
        if isinstance(option, FieldOption):
            return option.heading if everything else None
        return super().fallback_heading(option, everything)

    def invoke(self, ctx: click.Context) -> Any:
        # Defaults stay in the configs: a preset or recipe may have others.
        values = {option.name: ctx.params.pop(option.name) for option in self._fields or ()}
        ctx.params["fields"] = {name: value for name, value in values.items() if value is not None}
        names = [str(param.name) for param in self.get_params(ctx)]
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.message = replace_fields(error.message, names)  # type: ignore[misc]
            raise
        except FolderError as error:
            error.args = (replace_fields(str(error), names),)
            raise


class Parsed(click.ParamType):
    """Type of a text that ``module:function`` parses; the module is imported on first use."""

    def __init__(self, name: str, parser: str):
        self.name, self._parser = name, parser

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parse = pkgutil.resolve_name(self._parser)
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


MESH = Parsed("axes", "lutjax.training.meshes:parse")


class Renamed(click.Option):
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        names = self.opts
        self.opts = names[:1]
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts = names


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def replace_fields(text: str, fields: Iterable[str]) -> str:
    """Replace field names in a text by their options.

    A name counts as a field if it has several words, or if its value follows: ``steps is 0``.

    Example:
      >>> from lutjax.cli._flags import replace_fields
      >>> replace_fields("GPTConfig: n_heads is 2; it must divide features, 3.", ["n_heads"])
      '--n-heads is 2; it must divide features, 3.'
    """
    fields = [re.escape(field) for field in fields]
    nothing = "(?!)"
    several = "|".join(field for field in fields if "_" in field) or nothing
    one = "|".join(field for field in fields if "_" not in field) or nothing
    # Short names such as steps are also words of messages: they count only where a value follows.
    text = re.sub(r"^[A-Z]\w+: ", "", text)
    for pattern in (
        rf"(?<![\w./-])(?:{several})(?![\w/(]|\.\w)",
        rf"(?:(?<=^)|(?<=[;:,] )|(?<=and ))(?:{one})(?= is )",
    ):
        text = re.sub(pattern, lambda found: flag_of(found[0]), text)
    return text


def _options_of(configs: "Configs") -> list[FieldOption]:
    options: dict[str, FieldOption] = {}
    models: Any = configs.models or {None: None}
    headings = ("Model", "Optimization", "Checkpoints and reports")
    for config, heading in zip(
        (configs.model, configs.training, configs.options), headings, strict=True
    ):
        classes = typing.get_args(config) or (config,)
        of_model = {model: own if own in classes else classes[0] for model, own in models.items()}
        for field in (field for one in classes for field in dataclasses.fields(one)):
            if field.default is dataclasses.MISSING or not field.metadata.get("option", True):
                continue
            # A field of several models is one option, whose help has the default of each.
            having = {
                m: own for m, own in of_model.items() if field.name in own.__dataclass_fields__
            }
            if field.name not in options:
                option = options[field.name] = _option(configs, having, field.name)
                option.models = () if len(having) == len(of_model) else tuple(having)
                kind = f"{option.models[0]} only" if option.models else "advanced"
                option.heading = f"{heading}, {kind}"
    of_several_words = [name for name in options if "_" in name]
    for option in options.values():
        option.help = replace_fields(option.help or "", of_several_words)
        option.details = replace_fields(option.details, of_several_words)
    return list(options.values())


def _option(configs: "Configs", having: Mapping[Any, Any], name: str) -> FieldOption:
    """Return the option for a field of the config classes, by model."""
    first = next(iter(having.values()))
    field, hint = first.__dataclass_fields__[name], typing.get_type_hints(first)[name]
    kind_of = click.Choice(field.metadata[CHOICES]) if CHOICES in field.metadata else _type(hint)
    names = f"{flag_of(name)}/--no-{name.replace('_', '-')}" if kind_of is bool else flag_of(name)
    text = ""
    # A subclass documents only what differs from its bases.
    for one in reversed(first.__mro__):
        text = _attributes(one.__doc__ or "").get(name, text)
    defaults = {}
    for model, config in having.items():
        own = config.__dataclass_fields__[name].default
        defaults[model] = _format_default(name, configs.preset(model).get(name, own))
    usual, *_ = defaults.values()
    others = [f"{model}: {value or 'none'}" for model, value in defaults.items() if value != usual]
    summary = text.split(". ")[0].rstrip(".")
    in_words = re.search(r"Default: ([^.]*)", text)
    default = "; ".join([usual, *others]) if usual else in_words[1] if in_words else "none"
    option = FieldOption(
        [names, name],
        type=kind_of,
        default=None,
        help=f"{summary[:1].upper()}{summary[1:]}.  [default: {default}]",
    )
    option.details = text
    return option


def _format_default(name: str, value: Any) -> str:
    """Format a default as command-line input or words, shortened if long; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and len(value) > 8:
        return f"{','.join(map(str, value[:2]))},...,{value[-1]}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"


def _type(hint: Any) -> Any:
    if hint == tuple[int, ...]:
        return Integers()
    if hint == int | tuple[int, ...]:
        return IntegerOrIntegers()
    if isinstance(hint, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    return {float: Finite(), int: Integer()}.get(hint, hint)


class Integer(click.IntRange):
    name = "integer"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _in_range(self, click.INT.convert(value, param, ctx), param, ctx)

    def _describe_range(self) -> str:
        return ""  # errors include it


class Finite(click.FloatRange):
    name = "number"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "X"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not math.isfinite(number := float(click.FLOAT.convert(value, param, ctx))):
            self.fail(f"{value!r} is not finite.", param, ctx)
        return _in_range(self, number, param, ctx)

    def _describe_range(self) -> str:
        return ""


def _in_range(
    kind: Any, number: Any, param: click.Parameter | None, ctx: click.Context | None
) -> Any:
    below = kind.min is not None and (number <= kind.min if kind.min_open else number < kind.min)
    if below or (kind.max is not None and number > kind.max):
        least, most = (
            f"{bound:g}" if isinstance(bound, float) else f"{bound}"
            for bound in (kind.min, kind.max)
        )
        rule = f"above {least}" if kind.min_open else f"at least {least}"
        rule += "" if kind.max is None else f" and at most {most}"
        kind.fail(f"{number}; it must be {rule}.", param, ctx)
    return number


class Integers(click.ParamType):
    name = "integers"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):  # a default
            return value
        try:
            return tuple(int(word) for word in value.split(","))
        except ValueError:
            self.fail(
                f"{value!r} is not a list of comma-separated integers, such as 200,100.", param, ctx
            )


class IntegerOrIntegers(Integers):
    """Single shared integer, or comma-separated integers."""

    name = "integer or integers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        integers = super().convert(value, param, ctx)
        return integers[0] if isinstance(value, str) and len(integers) == 1 else integers


def _attributes(docstring: str) -> dict[str, str]:
    """Parse the "Attributes:" section of a docstring; several names may share a description."""
    _, _, section = docstring.partition("Attributes:\n")
    section = section.split("\n\n")[0]
    entries = re.findall(r"^ {6}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r"\s+", " ", text).replace("`", "")
        for names, text in entries
        for name in names.split(", ")
    }
