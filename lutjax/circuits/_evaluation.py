"""NumPy circuit evaluation, batched over gates with equal level and input count."""

from collections.abc import Sequence

import numpy as np

from lutjax.circuits import truth

_BYTES = 1 << 25  # memory for a block of words: samples are split to fit


class Plan:
    """Precomputed gate evaluation order for a circuit."""

    # A table is a sum modulo 2 over products of its inputs (its algebraic normal form). A gate with
    # n inputs is therefore evaluated by 2**n - 1 steps of AND and XOR. All gates with n inputs
    # share these steps and differ only in their coefficients.

    def __init__(
        self,
        n_inputs: int,
        fanins: Sequence[Sequence[int]],
        tables: Sequence[int],
        literals: Sequence[int],
        levels: Sequence[int],
    ):
        first = 1 + n_inputs
        self.n_inputs, self.n_nodes = n_inputs, first + len(tables)
        sizes = np.fromiter(map(len, fanins), np.int64, len(fanins))
        level = np.asarray(levels[first:], dtype=np.int64)
        # Gates of a level read only earlier levels, so NumPy evaluates them at once.
        # Value rows: first the constant and inputs, then gates in this order.
        order = np.lexsort((sizes, level))
        row = np.arange(self.n_nodes)
        row[first + order] = np.arange(first, self.n_nodes)
        ends = np.flatnonzero(np.diff(level[order]) | np.diff(sizes[order])) + 1
        self.groups: list[tuple[int, np.ndarray, np.ndarray]] = []
        for gates in np.split(order, ends) if len(order) else ():
            n = int(sizes[gates[0]])
            nodes = np.array([fanins[g] for g in gates], dtype=np.int64).reshape(len(gates), n)
            start = int(row[first + gates[0]])
            self.groups.append((start, row[nodes.T], _normal_form([tables[g] for g in gates], n)))
        # The terms of a group may be more than the values of all nodes: they bound the samples that
        # are evaluated at once.
        self.widest = max([self.n_nodes, *(c.size for _, _, c in self.groups)])
        outputs = np.asarray(literals, dtype=np.int64)
        self.rows, self.inverted = row[outputs >> 1], outputs & 1 == 1

    def run(self, words: np.ndarray) -> np.ndarray:
        block = max(1, _BYTES // (self.widest * words.itemsize))
        parts = [self._run(words[:, k : k + block]) for k in range(0, words.shape[1], block)]
        if not parts:
            return np.zeros((len(self.rows), 0), words.dtype)
        return np.concatenate(parts, axis=1)

    def _run(self, words: np.ndarray) -> np.ndarray:
        ones = ~words.dtype.type(0)
        values = np.zeros((self.n_nodes, words.shape[1]), words.dtype)
        values[1 : 1 + self.n_inputs] = words
        for start, rows, coefficients in self.groups:
            # Pairs of coefficients c + x c' for the first input, pairs of pairs for the second, and
            # so on.
            terms = [c[:, None] * ones for c in coefficients.astype(words.dtype)]
            for k in range(len(rows)):
                x = values[rows[k]]
                terms = [a ^ (b & x) for a, b in zip(terms[::2], terms[1::2], strict=True)]
            values[start : start + rows.shape[1]] = terms[0]
        outputs: np.ndarray = values[self.rows]
        outputs[self.inverted] ^= ones
        return outputs


def _normal_form(tables: Sequence[int], n: int) -> np.ndarray:
    """Return 0/1 coefficients ``[2**n, gates]``, for products of the inputs set in the index."""
    size = max(1, (1 << n) // 8)
    low, form = truth.LOW[n], []
    for table in tables:
        # The Moebius transform: each input adds the outputs at 0 to the outputs at 1.
        for i in range(n):
            table ^= (table & low[i]) << (1 << i)
        form.append(table.to_bytes(size, "little"))
    octets = np.frombuffer(b"".join(form), np.uint8).reshape(len(tables), size)
    return np.ascontiguousarray(np.unpackbits(octets, axis=1, bitorder="little")[:, : 1 << n].T)
