"""Bounded parsing of untrusted JSON, with errors that name the invalid field."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
    object: "a value",
}


def loads(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
      ValueError: the text is not JSON, has NaN or an infinity, or is nested too deeply. The message
        names the position.
    """
    # Python's parser accepts NaN and infinities, which other parsers of a written file reject.
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:  # also bad encoding and integers with too many digits
        raise ValueError(str(error)) from None


_RENAMED_FIELDS = {"quantised": "quantized", "parametrisation": "parameterization"}
"""Field names in files from before version 0.8, and their current names."""


def rename_fields(value: Any) -> Any:
    """Return a JSON value with current field names, for files of earlier versions."""
    if isinstance(value, dict):
        return {
            _RENAMED_FIELDS.get(name, name): rename_fields(field) for name, field in value.items()
        }
    return [rename_fields(item) for item in value] if isinstance(value, list) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def format_value(value: Any, most: int = 60) -> str:
    """Format a value for a message, in one line with at most `most` characters."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "brackets in brackets"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def format_names(names: Sequence[str], most: int) -> str:
    r"""Format names in quotes, in one line with at most `most` characters.

    Unprintable characters are escaped, letters are not.

    Example:
      >>> from lutjax.files.strict_json import format_names
      >>> format_names(["größe", "a\n"], 60)
      '"größe", "a\\n"'
    """
    text = ", ".join(json.dumps(name, ensure_ascii=not name.isprintable()) for name in names)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclasses.dataclass(frozen=True)
class Fields:
    """Reader for JSON fields, with errors that begin with `where` and name the invalid field."""

    where: str

    def field(self, value: Any, name: str, kind: type) -> Any:
        """Return a field of an object; raise ValueError if it is missing or has another type."""
        if not isinstance(value, dict):
            raise ValueError(
                f"{self.where} is {format_value(value)}; expected an object with {name!r}."
            )
        if name not in value:
            raise ValueError(f"{self.where} has no {name!r}.")
        member = value[name]
        # In Python, true and false are integers.
        if not isinstance(member, kind) or (isinstance(member, bool) and kind is int):
            raise ValueError(
                f"{self.where}: {name!r} is {format_value(member)}; expected {_KINDS[kind]}."
            )
        return member

    def number(self, value: Any, name: str) -> float | None:
        """Return a numeric field of an object, or None if it is null or missing."""
        member = value.get(name)
        if member is None:
            return None
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            if isinstance(member, int | float) and not isinstance(member, bool):
                return float(member)
        raise ValueError(
            f"{self.where}: {name!r} is {format_value(member)}; expected a number or null."
        )
