"""JSON of files that anybody may have changed: texts are read within bounds, and errors say which field is wrong."""

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
    """Return what a text of JSON holds.

    Raises:
      ValueError: the text is not JSON, has NaN or an infinity, or brackets in brackets beyond what can be read. The message says where.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:  # of whatever class: the text, its encoding, a number of thousands of digits
        raise ValueError(str(error)) from None


_RENAMED_FIELDS = {"quantised": "quantized", "parametrisation": "parameterization"}
"""Fields of files written before version 0.8, and their names today."""


def rename_fields(value: Any) -> Any:
    """Return a JSON value whose objects use today's field names, so that files of earlier versions can be read."""
    if isinstance(value, dict):
        return {_RENAMED_FIELDS.get(name, name): rename_fields(field) for name, field in value.items()}
    return [rename_fields(item) for item in value] if isinstance(value, list) else value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def shown(value: Any, most: int = 60) -> str:
    """Return a value for a message, in one line of at most so many characters."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "brackets in brackets"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def listed(names: Sequence[str], most: int) -> str:
    r"""Return names for people, in quotes and in one line of at most so many characters: what cannot be printed is escaped, and letters are not.

    Example:
      >>> from lutjax.files.strict_json import listed
      >>> listed(["größe", "a\n"], 60)
      '"größe", "a\\n"'
    """
    text = ", ".join(json.dumps(name, ensure_ascii=not name.isprintable()) for name in names)
    return text if len(text) <= most else f"{text[: most - 3]}..."


@dataclasses.dataclass(frozen=True)
class Fields:
    """Reads fields of JSON, and says where one is not what it should be.

    Attributes:
      where: begins messages: the file, and the place in it.
    """

    where: str

    def field(self, value: Any, name: str, kind: type) -> Any:
        """Return a field of an object.

        Raises:
          ValueError: the value is no object, or its field is missing or of another kind.
        """
        if not isinstance(value, dict):
            raise ValueError(f"{self.where} is {shown(value)}; expected an object with {name!r}.")
        if name not in value:
            raise ValueError(f"{self.where} has no {name!r}.")
        found = value[name]
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is int):
            raise ValueError(f"{self.where}: {name!r} is {shown(found)}; expected {_KINDS[kind]}.")
        return found

    def number(self, value: Any, name: str) -> float | None:
        """Return a field of an object that is a number, None where it is null or missing.

        Raises:
          ValueError: it is something else.
        """
        found = value.get(name)
        if found is None:
            return None
        with contextlib.suppress(OverflowError):  # of a whole number that no float is
            if isinstance(found, int | float) and not isinstance(found, bool):
                return float(found)
        raise ValueError(f"{self.where}: {name!r} is {shown(found)}; expected a number or null.")
