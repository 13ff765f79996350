"""Messages of errors about files that anybody may have written: one line, of a length that can be read."""


def in_a_line(text: object, most: int = 300) -> str:
    r"""Return a text in one line of at most so many characters, without its middle if it has more.

    Example:
      >>> from lutjax.files.messages import in_a_line
      >>> in_a_line("Not a\nfile: " + "x" * 100, 20)
      'Not a fil...xxxxxxxx'
    """
    line = str(text)
    if len(line) > 4 * most:  # not split in whole, as it may be large
        line = line[: 2 * most] + line[-2 * most :]
    line = " ".join(line.split())
    if len(line) <= most:
        return line
    end = (most - 3) // 2
    return f"{line[: most - 3 - end]}...{line[-end:]}"


def printable(text: str) -> str:
    r"""Return a text in one line, in which what cannot be printed is escaped: ends of lines, codes for terminals, marks of direction.

    Example:
      >>> from lutjax.files.messages import printable
      >>> print(printable("größe\n\x1b[2J"))
      größe\n\x1b[2J
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
