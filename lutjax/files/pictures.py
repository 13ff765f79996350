"""Untrusted text in plots."""

from lutjax.files.messages import escape_unprintable


def as_drawn(text: str) -> str:
    r"""Escape a text for matplotlib: dollar signs begin formulas, control characters lack glyphs.

    Example:
      >>> from lutjax.files.pictures import as_drawn
      >>> print(as_drawn("from $5 to $9\n"))
      from \$5 to \$9\n
    """
    return escape_unprintable(text).replace("$", r"\$")
