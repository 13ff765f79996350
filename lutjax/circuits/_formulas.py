"""Small tables as formulas, using operators shared by C and Verilog."""

import functools

from lutjax.circuits import truth


def formula(table: int, n: int) -> str:
    """Return a shortest formula for a nonconstant table over at most 3 inputs {0}, {1} and {2}.

    Example:
      >>> from lutjax.circuits._formulas import formula
      >>> formula(0b0010, 2), formula(0b11100100, 3)
      ('{0} & ~{1}', '{1} ^ ({0} & ({1} ^ {2}))')
    """
    for k in range(n, 3):
        table |= table << (1 << k)
    return _shortest_formulas()[table]


@functools.cache
def _shortest_formulas() -> dict[int, str]:
    shortest = {truth.variable(3, i): f"{{{i}}}" for i in range(3)}
    by_length = [list(shortest)]
    # All nonconstant functions of three inputs: a formula joins two shorter ones.
    while len(shortest) < 254:
        new: dict[int, str] = {}
        length = len(by_length)
        for i in range(length):
            for p in by_length[i]:
                left = _parenthesize(shortest[p])
                candidates = [(p ^ 255, f"~{left}")] if i == length - 1 else []
                for q in by_length[length - 1 - i]:
                    right = _parenthesize(shortest[q])
                    candidates += [
                        (p & q, f"{left} & {right}"),
                        (p | q, f"{left} | {right}"),
                        (p ^ q, f"{left} ^ {right}"),
                        (p & ~q, f"{left} & ~{right}"),
                    ]
                for table, text in candidates:
                    if 0 < table < 255 and table not in shortest:
                        new.setdefault(table, text)
        shortest |= new
        by_length.append(list(new))
    return shortest


def _parenthesize(text: str) -> str:
    return f"({text})" if " " in text else text
