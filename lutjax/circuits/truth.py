"""Truth tables as integers: bit k is the output at address k, with the first input as lowest bit.

A table over n inputs is less than ``2**2**n``. The functions take n as a separate argument and
validate nothing, because they run at least once for every gate.
"""

import functools
from collections.abc import Callable, Sequence

MAX_INPUTS = 8


# Tables are Python integers, because 8 inputs have 256 outputs, more than a machine word.
def _low_mask(i: int) -> int:
    width = 1 << i
    return sum(((1 << width) - 1) << at for at in range(0, 1 << MAX_INPUTS, 2 * width))


FULL = tuple((1 << (1 << n)) - 1 for n in range(MAX_INPUTS + 1))  # constant 1 over n inputs
# LOW[n][i] is 1 where input i of n is 0.
LOW = tuple(tuple(_low_mask(i) & FULL[n] for i in range(n)) for n in range(MAX_INPUTS + 1))


def variable(n: int, i: int) -> int:
    """Return the table over n inputs with output equal to input i."""
    return LOW[n][i] << (1 << i)


def cofactor(table: int, n: int, i: int, value: int) -> int:
    """Return the table over the other n - 1 inputs for a fixed value, 0 or 1, of input i."""
    width = 1 << i
    table = (table >> width if value else table) & LOW[n][i]
    # Close the gaps of 2**j outputs between runs of 2**j.
    for j in range(i, n - 1):
        width = 1 << j
        table = (table | table >> width) & LOW[n][j + 1]
    return table


def negate(table: int, n: int, i: int) -> int:
    """Return the table with input i inverted."""
    width, low = 1 << i, LOW[n][i]
    return (table & low) << width | table >> width & low


def negate_inverted(table: int, literals: Sequence[int]) -> int:
    """Return the table over the nodes of literals, ``2 * node + inverted``."""
    for i, literal in enumerate(literals):
        if literal & 1:
            table = negate(table, len(literals), i)
    return table


def swap(table: int, n: int, i: int, j: int) -> int:
    """Return the table with inputs i < j swapped."""
    move = (1 << j) - (1 << i)
    # Swap the outputs at i = 1, j = 0 with the outputs at i = 0, j = 1.
    mask = variable(n, i) & LOW[n][j]
    changed = (table ^ table >> move) & mask
    return table ^ changed ^ changed << move


def permute(table: int, n: int, order: Sequence[int]) -> int:
    """Return the table with input ``order[k]`` of the given table as input k."""
    at = list(range(n))  # current positions of the original inputs
    for k in range(n):
        j = at.index(order[k], k)
        if j != k:
            table = swap(table, n, k, j)
            at[j], at[k] = at[k], at[j]
    return table


def expand(table: int, n: int, positions: Sequence[int], m: int) -> int:
    """Return the table over m inputs with input k of the given table at ``positions[k]``."""
    # More inputs without an effect repeat the outputs.
    for k in range(n, m):
        table |= table << (1 << k)
    place = {position: k for k, position in enumerate(positions)}
    unread = iter(range(n, m))
    return permute(table, m, [place[k] if k in place else next(unread) for k in range(m)])


def compose(table: int, n: int, i: int, inner: int, positions: Sequence[int], m: int) -> int:
    """Return a table over m inputs with `inner`, over inputs at `positions`, for its input i.

    The other inputs of the table are, in order, the first n - 1 of the m inputs.
    """
    chosen = expand(inner, len(positions), positions, m)
    rest = range(n - 1)
    low = expand(cofactor(table, n, i, 0), n - 1, rest, m)
    high = expand(cofactor(table, n, i, 1), n - 1, rest, m)
    return low & ~chosen | high & chosen


def merge_inputs(table: int, n: int, i: int, j: int) -> int:
    """Return the table over n - 1 inputs with input j replaced by input i, i < j."""
    low, high = cofactor(table, n, j, 0), cofactor(table, n, j, 1)
    mask = LOW[n - 1][i]
    return low & mask | high & (mask << (1 << i))


def depends_on_input(table: int, n: int, i: int) -> bool:
    """Return True if the output depends on input i."""
    return ((table >> (1 << i)) ^ table) & LOW[n][i] != 0


def support(table: int, n: int) -> tuple[int, ...]:
    """Return the inputs that affect the output."""
    return tuple(i for i in range(n) if depends_on_input(table, n, i))


@functools.lru_cache(maxsize=1 << 16)
def cubes(table: int, n: int) -> tuple[tuple[int, int], ...]:
    """Return an irredundant sum of products, each as (input mask, value mask), in a fixed order.

    No product is redundant, and no product can drop an input.
    """
    return tuple(_isop(table, table, n, n)[0])


def _isop(must: int, may: int, n: int, last: int) -> tuple[list[tuple[int, int]], int]:
    """Return products below input `last`, and their table from `must` to `may`."""
    # The algorithm of Minato and Morreale: products that need input i are split off, for both of
    # its values, and the rest is covered without it.
    if not must:
        return [], 0
    if may == FULL[n]:
        return [(0, 0)], FULL[n]
    i = last - 1
    while not (depends_on_input(must, n, i) or depends_on_input(may, n, i)):
        i -= 1
    low, width = LOW[n][i], 1 << i

    def extend_halves(table: int) -> tuple[int, int]:
        zero, one = table & low, table >> width & low
        return zero | zero << width, one | one << width

    (must0, must1), (may0, may1) = extend_halves(must), extend_halves(may)
    products0, cover0 = _isop(must0 & ~may1, may0, n, i)
    products1, cover1 = _isop(must1 & ~may0, may1, n, i)
    rest, cover = _isop(must0 & ~cover0 | must1 & ~cover1, may0 & may1, n, i)
    products = [(read | width, value) for read, value in products0]
    products += [(read | width, value | width) for read, value in products1]
    return products + rest, cover0 & low | cover1 & (low << width) | cover


def evaluate(table: int, address: Sequence[int]) -> int:
    """Return the output for bits, the first input first."""
    return table >> sum(bit << k for k, bit in enumerate(address)) & 1


def from_function(function: Callable[..., object], n: int) -> int:
    """Return the table over n inputs of a function with n bit arguments."""
    return sum(bool(function(*(a >> k & 1 for k in range(n)))) << a for a in range(1 << n))
