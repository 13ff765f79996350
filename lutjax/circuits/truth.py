"""Truth tables as whole numbers: bit k is the answer at address k, whose lowest bit is the first input.

A table over n inputs is less than ``2**2**n``. The functions take n beside the table and check nothing: they run once or
more for every gate.
"""

import functools
from collections.abc import Callable, Sequence

MAX_INPUTS = 8


def _low(i: int) -> int:
    width = 1 << i
    return sum(((1 << width) - 1) << at for at in range(0, 1 << MAX_INPUTS, 2 * width))


FULL = tuple((1 << (1 << n)) - 1 for n in range(MAX_INPUTS + 1))  # the table over n inputs that is always 1
LOW = tuple(tuple(_low(i) & FULL[n] for i in range(n)) for n in range(MAX_INPUTS + 1))  # 1 where input i is 0


def variable(n: int, i: int) -> int:
    """Return the table over n inputs that answers with input i.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.variable(2, 1))
      '0b1100'
    """
    return LOW[n][i] << (1 << i)


def cofactor(table: int, n: int, i: int, value: int) -> int:
    """Return the table over the other n - 1 inputs where input i has a value, 0 or 1.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.cofactor(0b1000, 2, 0, 1))  # a AND b where a is 1
      '0b10'
    """
    width = 1 << i
    table = (table >> width if value else table) & LOW[n][i]
    for j in range(i, n - 1):  # close the gaps of 2**j answers that lie between runs of 2**j
        width = 1 << j
        table = (table | table >> width) & LOW[n][j + 1]
    return table


def negate(table: int, n: int, i: int) -> int:
    """Return the table that reads input i inverted.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.negate(0b1000, 2, 0))
      '0b100'
    """
    width, low = 1 << i, LOW[n][i]
    return (table & low) << width | table >> width & low


def swap(table: int, n: int, i: int, j: int) -> int:
    """Return the table whose inputs i < j have changed places."""
    move = (1 << j) - (1 << i)
    mask = variable(n, i) & LOW[n][j]  # answers at i = 1, j = 0 change places with those at i = 0, j = 1
    changed = (table ^ table >> move) & mask
    return table ^ changed ^ changed << move


def permute(table: int, n: int, order: Sequence[int]) -> int:
    """Return the table whose input k is the input ``order[k]`` of the given one.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.permute(0b0010, 2, [1, 0]))
      '0b100'
    """
    at = list(range(n))  # inputs of the given table, as they now lie
    for k in range(n):
        j = at.index(order[k], k)
        if j != k:
            table = swap(table, n, k, j)
            at[j], at[k] = at[k], at[j]
    return table


def expand(table: int, n: int, positions: Sequence[int], m: int) -> int:
    """Return the table over m inputs whose input ``positions[k]`` stands for the input k of the given one.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.expand(0b10, 1, [1], 2))
      '0b1100'
    """
    for k in range(n, m):
        table |= table << (1 << k)
    place = {position: k for k, position in enumerate(positions)}
    unread = iter(range(n, m))
    return permute(table, m, [place[k] if k in place else next(unread) for k in range(m)])


def compose(table: int, n: int, i: int, inner: int, positions: Sequence[int], m: int) -> int:
    """Return the table over m inputs of a table whose input i is another table.

    Args:
      table: over n inputs; those besides i, in order, are the first n - 1 of the m inputs.
      n: number of inputs of `table`.
      i: the input of `table` that `inner` replaces.
      inner: table over inputs at `positions`.
      positions: an input of the result for each input of `inner`.
      m: number of inputs of the result.
    """
    chosen = expand(inner, len(positions), positions, m)
    rest = range(n - 1)
    low = expand(cofactor(table, n, i, 0), n - 1, rest, m)
    high = expand(cofactor(table, n, i, 1), n - 1, rest, m)
    return low & ~chosen | high & chosen


def merge_inputs(table: int, n: int, i: int, j: int) -> int:
    """Return the table over n - 1 inputs where input j is input i, i < j."""
    low, high = cofactor(table, n, j, 0), cofactor(table, n, j, 1)
    mask = LOW[n - 1][i]
    return low & mask | high & (mask << (1 << i))


def depends(table: int, n: int, i: int) -> bool:
    """Return whether the answers depend on input i."""
    return ((table >> (1 << i)) ^ table) & LOW[n][i] != 0


def support(table: int, n: int) -> tuple[int, ...]:
    """Return the inputs on which the answers depend.

    Example:
      >>> from lutjax.circuits import truth
      >>> truth.support(0b11001100, 3)
      (1,)
    """
    return tuple(i for i in range(n) if depends(table, n, i))


@functools.lru_cache(maxsize=1 << 16)
def cubes(table: int, n: int) -> tuple[tuple[int, int], ...]:
    """Return an irredundant sum of products, each as (inputs that it reads, the values that they must have).

    Both are masks with bit i for input i. No product can be left out, and no product can read one input less.
    The order is the same at each call.

    Example:
      >>> from lutjax.circuits import truth
      >>> truth.cubes(0b1110, 2)  # a OR b
      ((2, 2), (1, 1))
    """
    return tuple(_isop(table, table, n, n)[0])


def _isop(must: int, may: int, n: int, last: int) -> tuple[list[tuple[int, int]], int]:
    """Products (Minato-Morreale) that answer 1 at `must` and 0 beyond `may`, and their table; both tables over n inputs.

    Inputs from `last` on are not read.
    """
    if not must:
        return [], 0
    if may == FULL[n]:
        return [(0, 0)], FULL[n]
    i = last - 1
    while not (depends(must, n, i) or depends(may, n, i)):
        i -= 1
    low, width = LOW[n][i], 1 << i

    def halves(table: int) -> tuple[int, int]:
        zero, one = table & low, table >> width & low
        return zero | zero << width, one | one << width

    (must0, must1), (may0, may1) = halves(must), halves(may)
    products0, cover0 = _isop(must0 & ~may1, may0, n, i)
    products1, cover1 = _isop(must1 & ~may0, may1, n, i)
    rest, cover = _isop(must0 & ~cover0 | must1 & ~cover1, may0 & may1, n, i)
    products = [(read | width, value) for read, value in products0]
    products += [(read | width, value | width) for read, value in products1]
    return products + rest, cover0 & low | cover1 & (low << width) | cover


def evaluate(table: int, address: Sequence[int]) -> int:
    """Return the answer to bits, the first input first.

    Example:
      >>> from lutjax.circuits import truth
      >>> truth.evaluate(0b0010, [1, 0])
      1
    """
    return table >> sum(bit << k for k, bit in enumerate(address)) & 1


def from_function(function: Callable[..., object], n: int) -> int:
    """Return the table over n inputs of a function of n bits.

    Example:
      >>> from lutjax.circuits import truth
      >>> bin(truth.from_function(lambda a, b: a and not b, 2))
      '0b10'
    """
    return sum(bool(function(*(a >> k & 1 for k in range(n)))) << a for a in range(1 << n))
