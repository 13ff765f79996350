"""Merged token ids: tokens whose normalized texts are equal share an id."""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer

from lutjax._typing import Array
from lutjax.arguments import format_value

_WHITE_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""Unicode's White_Space. `str.strip` would also remove four separators."""

_SINGLE_SPACE = "\ue000"  # stands for a token that is one space, which a normalizer keeps


class Vocabulary:
    """Map from token ids to merged ids, which n-gram hashes read.

    Vocabularies are equal, and hash equally, if their maps are equal.

    Args:
      map: merged id of each token, integers ``[tokens]`` from 0 on.

    Attributes:
      map: merged ids, int32 ``[tokens]``, read-only.
      size: number of merged ids.
      digest: SHA-256 of the map as little-endian int64, in hexadecimal digits.

    Raises:
      ValueError: the map is empty or contains negative ids.

    Source: docs/semantics.md, section 14.

    Example:
      >>> import lutjax
      >>> vocabulary = lutjax.Vocabulary([0, 1, 1, 2])
      >>> vocabulary.size, vocabulary.digest[:8]
      (3, '7acccfef')
    """

    def __init__(self, map: Integer[Array, " tokens"] | Sequence[int]):
        ids = np.asarray(map)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"Vocabulary: map is {format_value(map)}; expected integer ids [tokens]."
            )
        if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
            raise ValueError(
                f"Vocabulary: map holds ids from {ids.min()} to {ids.max()}; "
                "expected int32 ids from 0 on."
            )
        self.map = ids.astype(np.int32)
        self.map.setflags(write=False)
        self.size = int(ids.max()) + 1
        self.digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()

    @classmethod
    def from_tokenizer(cls, path: str | os.PathLike[str]) -> "Vocabulary":
        """Merge the tokens in a byte-level BPE ``tokenizer.json``.

        A token's key is its text after NFKC, NFD, removal of combining marks, lower case, and
        removal of extra spaces; ids follow each key's first appearance. A partial character keeps a
        separate id. Only the standard library is needed; the map depends on Python's Unicode
        version, so compare `digest` with a recorded digest.

        Args:
          path: the file, or a folder with it.

        Raises:
          ValueError: the file is missing, damaged, or for another tokenizer type.
        """
        place = Path(path)
        place = place / "tokenizer.json" if place.is_dir() else place
        try:
            tokenizer = json.loads(place.read_text(encoding="utf-8"))
            kinds = tokenizer["model"]["type"], tokenizer["decoder"]["type"]
            tokens = {str(text): int(i) for text, i in tokenizer["model"]["vocab"].items()}
            tokens |= {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens") or ()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"Vocabulary: {place} is no tokenizer.json: {error!r}.") from error
        if kinds != ("BPE", "ByteLevel"):
            raise ValueError(
                f"Vocabulary: {place} has a {kinds[0]} model and a {kinds[1]} decoder; "
                "only byte-level BPE is supported."
            )
        by_id = {i: text for text, i in tokens.items()}
        if sorted(by_id) != list(range(len(tokens))):
            raise ValueError(
                f"Vocabulary: {place} has {len(tokens)} tokens with ids up "
                f"to {max(by_id, default=0)}; expected each id from 0 on once."
            )
        return cls(_merge_tokens([by_id[i] for i in range(len(by_id))]))

    @classmethod
    def identity(cls, size: int) -> "Vocabulary":
        """Return a vocabulary that merges no tokens."""
        return cls(np.arange(size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.map)} tokens, {self.size} ids, {self.digest[:8]})"


def _merge_tokens(strings: Sequence[str]) -> list[int]:
    """Return merged ids for byte-level vocabulary strings, in token order."""
    bytes_of, keys = _byte_characters(), dict[str, int]()
    ids = []
    for string in strings:
        text = _decode(string, bytes_of)
        # A partial character decodes to U+FFFD, as other parts do, so its string is its key. A
        # token of combining marks or spaces only has an empty normalized text, and keeps its own.
        key = string if "\ufffd" in text else _normalize(text) or text
        ids.append(keys.setdefault(key, len(keys)))
    return ids


def _byte_characters() -> dict[str, int]:
    """Return the byte for each character of byte-level vocabularies."""
    # GPT-2's map: printable Latin-1 characters are themselves, and all other bytes have the
    # characters from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _decode(string: str, bytes_of: Mapping[str, int]) -> str:
    """Return a token's text. Added tokens may contain characters that stand for no byte."""
    octets: list[Any] = [bytes_of.get(c) for c in string]
    return string if None in octets else bytes(octets).decode("utf-8", "replace")


def _normalize(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c)[0] != "M")
    # Character by character, as in the tokenizers library: `str.lower` of a word knows the final
    # sigma.
    text = "".join(c.lower() for c in text)
    text = re.sub(r"[ \t\r\n]+", " ", text)
    stripped = _SINGLE_SPACE if text == " " else text.strip(_WHITE_SPACE)
    return stripped.replace(_SINGLE_SPACE, " ")
