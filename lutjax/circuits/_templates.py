"""Texts of files that come with the package, and what is filled in."""

import re
from importlib import resources


def text(name: str) -> str:
    """Return the text of a template."""
    return resources.files(__package__).joinpath("templates", name).read_text("utf-8")


def filled(name: str, /, **values: object) -> str:
    """Return the text of a template with a value in the place of each ``@name@``."""
    found = re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), text(name))
    return re.sub(r"\n{3,}", "\n\n", found)
