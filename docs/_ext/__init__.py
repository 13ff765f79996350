"""Sphinx extension for the documentation site.

`content` has the directives as functions that return Markdown: registry tables, recorded measurements, validation results, command
line help, and API entries. `docstrings` adapts docstrings to the site.
"""

from typing import Any


def setup(app: Any) -> dict[str, bool]:
    from _ext import directives, docstrings

    directives.setup(app)
    docstrings.setup(app)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
