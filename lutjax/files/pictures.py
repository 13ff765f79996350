"""Texts of others in pictures."""

from lutjax.files.messages import printable


def as_drawn(text: str) -> str:
    r"""Return what matplotlib draws as a text, whatever it is: a formula begins with a dollar sign, and control characters have no shape.

    Example:
      >>> from lutjax.files.pictures import as_drawn
      >>> print(as_drawn("from $5 to $9\n"))
      from \$5 to \$9\n
    """
    return printable(text).replace("$", r"\$")
