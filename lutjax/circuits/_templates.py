"""Template files in the package, and their substitution."""

import re
from importlib import resources


def text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text("utf-8")


def fill_template(name: str, /, **values: object) -> str:
    """Return a template with each ``@name@`` replaced; a list has a line for each element."""
    texts = {
        key: "\n".join(value) if isinstance(value, list) else str(value)
        for key, value in values.items()
    }
    filled = re.sub(r"@(\w+)@", lambda match: texts[match[1]], text(name))
    # Empty values leave blank lines.
    return re.sub(r"\n{3,}", "\n\n", filled)
