"""Documentation pages as shown on the site."""

import importlib
import sys

from folders import DOCS


def extension(name):
    """Return a module from the site extension."""
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))
    return importlib.import_module(f"_ext.{name}")


def read(path):
    """Return a page's text with its generated tables."""
    text = extension("content").expand(path.read_text(encoding="utf-8"), ["bench-table"])
    return text
