"""Pages of the documentation as the site shows them."""

import importlib
import sys

from folders import DOCS


def extension(name):
    """Return a module of the site's extension."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(f"_ext.{name}")


def read(path):
    """Return the text of a page with its generated tables."""
    text = extension("content").expand(path.read_text(encoding="utf-8"), ["bench-table"])
    return text
