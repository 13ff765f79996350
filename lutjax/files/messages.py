"""Error messages about untrusted files: one line, with a readable length."""


def in_a_line(text: object, most: int = 300) -> str:
    r"""Return a text in one line with at most `most` characters, shortened in its middle.

    Example:
      >>> from lutjax.files.messages import in_a_line
      >>> in_a_line("Not a\nfile: " + "x" * 100, 20)
      'Not a fil...xxxxxxxx'
    """
    line = str(text)
    # An error message may quote a file: do not split all of it into words.
    if len(line) > 4 * most:
        line = line[: 2 * most] + line[-2 * most :]
    line = " ".join(line.split())
    if len(line) <= most:
        return line
    end = (most - 3) // 2
    return f"{line[: most - 3 - end]}...{line[-end:]}"


def escape_unprintable(text: str) -> str:
    r"""Return a text in one line, with unprintable characters escaped.

    These include line ends, terminal codes and direction marks.

    Example:
      >>> from lutjax.files.messages import escape_unprintable
      >>> print(escape_unprintable("größe\n\x1b[2J"))
      größe\n\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
