"""Texts of others in pictures."""


def as_drawn(text: str) -> str:
    r"""Return what matplotlib draws as a text, whatever it is: a formula begins with a dollar sign, and control characters have no shape.

    Example:
      >>> from lutjax.files._pictures import as_drawn
      >>> print(as_drawn("from $5 to $9\n"))
      from \$5 to \$9\n
    """
    seen = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return seen.replace("$", r"\$")
