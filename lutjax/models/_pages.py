"""Block pool bookkeeping for cached tokens: owners, shared blocks and reusable blocks."""

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_ROOT = b""  # prefix name before the first block


def n_entries(context: int, size: int) -> int:
    """Return the block table length for ``context - 1`` window and `context` new tokens."""
    return -(-(2 * context - 1) // size) + 1


@dataclasses.dataclass
class Text:
    """Sequence with blocks."""

    tokens: list[int]  # all known tokens, cached ones first
    length: int = 0  # number of cached tokens
    # Block ids by index in the sequence
    blocks: dict[int, int] = dataclasses.field(default_factory=dict)
    # Prefix names up to the end of each full block; equal for equal prefixes
    names: list[bytes] = dataclasses.field(default_factory=list)


class Pages:
    """Block assignments in a device-resident pool.

    Sequences with a common prefix share its blocks; a shared block is full and read-only. If a
    prefix ends within a block, the new sequence gets a copy before writing. Free blocks keep their
    tokens until reused, least recently used first, so that a later sequence can find its prefix.

    Args:
      n_blocks, size: number and size of blocks.
      window: number of earlier tokens visible to the next one. width: length of a block table.
    """

    def __init__(self, n_blocks: int, size: int, window: int, width: int):
        self.n_blocks, self.size, self._window, self._width = n_blocks, size, window, width
        self._n_holders = np.zeros((n_blocks,), np.int32)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(n_blocks))
        self._block_of: dict[bytes, int] = {}  # full blocks by name
        # Blocks with their tokens, by the name of the prefix before them.
        self._after: dict[bytes, dict[int, tuple[int, ...]]] = {}
        self._parent: dict[int, bytes] = {}  # prefix name before a block

    @property
    def n_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def n_shared(self) -> int:
        """Number of blocks shared by several sequences."""
        return int(np.sum(self._n_holders > 1))

    def require(self, n: int, what: str) -> None:
        """Raise ValueError if fewer than `n` blocks are free."""
        if n > self.n_free:
            raise ValueError(
                f"Slots: {what} {n} more blocks of {self.size} tokens, but only {self.n_free} of "
                f"{self.n_blocks} blocks are free. Let a sequence leave, or use a larger n_blocks."
            )

    def slide(self, text: Text) -> None:
        """Release the blocks that precede the window of a sequence."""
        for number in [n for n in text.blocks if (n + 1) * self.size <= text.length - self._window]:
            self._release(text.blocks.pop(number))

    def count_missing_blocks(self, text: Text, n: int) -> int:
        """Return the number of missing blocks for `n` more tokens."""
        return sum(number not in text.blocks for number in self._block_range(text, n))

    def begin(self, text: Text) -> tuple[int, int] | None:
        """Assign cached prefix blocks to a sequence.

        Return the source and target block of a pending copy, if any. At least one token remains
        uncached.
        """
        full, rest = self._find_prefix(text.tokens)
        for number in range(self._first_seen(len(full)), len(full)):
            self._hold(text, number, self._block_of[full[number]])
        text.names, text.length = full, len(full) * self.size
        if rest is None or not self.n_free:
            return None
        source, n = rest
        if self._n_holders[source] == 0 and self.n_free == 1:
            return None  # the source is the only possible target
        if self._n_holders[source] == 0:
            self._free.move_to_end(source)  # do not reuse it next
        self._hold(text, len(full), self._take_block())
        text.length += n
        return source, text.blocks[len(full)]

    def n_cached(self, tokens: Sequence[int]) -> int:
        """Return the number of cached prefix blocks for these tokens."""
        return len(self._find_prefix(tokens)[0])

    def extend(self, text: Text, n: int) -> None:
        """Assign blocks for `n` more tokens; enough blocks must be free."""
        for number in self._block_range(text, n):
            if number not in text.blocks:
                self._hold(text, number, self._take_block())

    def record_cached(self, text: Text, n: int) -> None:
        """Record `n` more cached tokens of a sequence, so that other sequences find them."""
        text.length += n
        for number in range(len(text.names), text.length // self.size):
            parent, own = self._tokens_of(text, number)
            text.names.append(_name(parent, own))
            if number in text.blocks:
                self._note(text.blocks[number], parent, own, text.names[-1])
        # A block that is not full has no name, but others may copy its tokens.
        number = text.length // self.size
        if text.length % self.size and number in text.blocks:
            self._note(text.blocks[number], *self._tokens_of(text, number), None)

    def leave(self, text: Text) -> None:
        """Release all blocks of a sequence."""
        for block in reversed(text.blocks.values()):  # keep earlier blocks longer
            self._release(block)
        text.blocks = {}

    def forget(self) -> None:
        """Forget the tokens of all blocks."""
        for block in [*self._parent]:
            self._drop(block)

    def table(self, text: Text | None) -> np.ndarray:
        """Return the block ids of a sequence, ``[width]``; -1 for none."""
        ids = np.full((self._width,), -1, np.int32)
        for number, block in ({} if text is None else text.blocks).items():
            ids[number % self._width] = block
        return ids

    def _block_range(self, text: Text, n: int) -> range:
        return range(text.length // self.size, -(-(text.length + n) // self.size))

    def _find_prefix(self, tokens: Sequence[int]) -> tuple[list[bytes], tuple[int, int] | None]:
        """Return the names of cached prefix blocks, and the best partial block with its length."""
        names, name = [], _ROOT
        for end in range(self.size, len(tokens), self.size):
            name = _name(name, tuple(tokens[end - self.size : end]))
            names.append(name)
        n = next((n for n in range(len(names), 0, -1) if self._is_seen_cached(names, n)), 0)
        # One token must remain to be processed: its logits sample the next one.
        remaining = tuple(tokens[n * self.size : len(tokens) - 1][: self.size])
        partial = self._after.get(names[n - 1] if n else _ROOT, {})
        lengths = ((_common_prefix_length(remaining, own), block) for block, own in partial.items())
        length, block = max(lengths, default=(0, 0))
        return names[:n], (block, length) if length else None

    def _is_seen_cached(self, names: list[bytes], n: int) -> bool:
        """Return True if all blocks visible after `n` blocks are cached."""
        return all(name in self._block_of for name in names[self._first_seen(n) : n])

    def _first_seen(self, n: int) -> int:
        """Return the index of the first block visible after `n` blocks."""
        return max(0, n * self.size - self._window) // self.size

    def _tokens_of(self, text: Text, number: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the prefix name before a block, and its cached tokens."""
        first = number * self.size
        own = tuple(text.tokens[first : min(first + self.size, text.length)])
        return text.names[number - 1] if number else _ROOT, own

    def _note(self, block: int, parent: bytes, tokens: tuple[int, ...], name: bytes | None) -> None:
        # Two sequences may have computed the same tokens at once; one of their blocks is enough.
        if name is not None and self._block_of.get(name, block) != block:
            return
        self._parent[block] = parent
        self._after.setdefault(parent, {})[block] = tokens
        if name is not None:
            self._block_of[name] = block

    def _drop(self, block: int) -> None:
        parent = self._parent.pop(block, None)
        if parent is None:
            return
        tokens = self._after[parent].pop(block)
        if not self._after[parent]:
            del self._after[parent]
        name = _name(parent, tokens)
        if self._block_of.get(name) == block:
            del self._block_of[name]

    def _take_block(self) -> int:
        """Take the least recently used free block."""
        block, _ = self._free.popitem(last=False)
        self._drop(block)
        return block

    def _hold(self, text: Text, number: int, block: int) -> None:
        self._free.pop(block, None)
        self._n_holders[block] += 1
        text.blocks[number] = block

    def _release(self, block: int) -> None:
        self._n_holders[block] -= 1
        if not self._n_holders[block]:
            self._free[block] = None


def _name(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Hash a prefix name and the following tokens to a practically unique name."""
    # Constant size for prefixes of any length. A collision would give a sequence the cache of
    # another one, so the hash is a cryptographic one.
    return hashlib.blake2b(parent + np.asarray(tokens, np.int32).tobytes(), digest_size=24).digest()


def _common_prefix_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n
