"""Row ids of published n-gram memories: exact 63-bit hashes in NumPy, and in 32-bit JAX."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

from lutjax._typing import Array
from lutjax.arguments import format_value, require_array
from lutjax.values._ids import as_int32
from lutjax.values._ngrams import check_hashes, rows_at, segment_positions
from lutjax.values._vocabularies import Vocabulary

FAMILIES = ("deepseek", "qwen", "longcat", "hash")

_MOST_ROWS = (1 << 31) - 1
_MOST_SIZE = 1 << 29
"""Sizes of tables are smaller, so that residues with their errors fit int32."""

_MOST_BASE = 1 << 20
"""Largest base of a polynomial hash: above it, a float32 quotient could be wrong by more than 1."""

_LIMB = 1 << 16
_WORDS = 1 << 64


@dataclasses.dataclass(frozen=True)
class NgramLayout:
    """Row layout for a flat n-gram table: maps n-grams of token ids to rows.

    Each column hashes n-grams with one order into its own row range. Create layouts with
    `deepseek`, `qwen`, `longcat` or `hash`, from a model config. They hold only integers, so they
    are hashable and can be static arguments of `jax.jit`.

    Negative token ids mark missing tokens: padding, image tokens, or tokens before the text.

    Args:
      family: ``"deepseek"``, ``"qwen"``, ``"longcat"`` or ``"hash"``.
      orders: n-gram lengths.
      heads: columns for each order.
      sizes: rows per column.
      multipliers: hash constants: one per token in the longest n-gram, newest first; for
        ``"longcat"`` the polynomial's base, for ``"hash"`` the seed.
      n_rows: rows of the table, with padding rows at its end.
      n_ids: number of distinct ids in the hash.
      fill: id in place of tokens outside the text or segment.
      cut: id after which the text ends, such as the end-of-text token, or None.
      vocabulary: map from token ids to hashed ids; None if the hash reads token ids.
      width: elements per row, if the config gives it. It does not affect row ids.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 14.

    Example:
      >>> import numpy as np, lutjax
      >>> config = {"ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 100}
      >>> config |= {"vocab_size": 150, "eos_token_id": 149}
      >>> layout = lutjax.NgramLayout.qwen(config)
      >>> layout.sizes, layout.n_rows, layout.columns
      ((101, 103, 107, 109), 512, 4)
      >>> layout.rows(np.array([5, 7, 5, 7]))
      array([[ 14, 159, 265, 393],
             [ 73, 124, 296, 322],
             [ 16, 124, 223, 392],
             [ 73, 124, 305, 385]], dtype=int32)
    """

    family: str
    orders: tuple[int, ...]
    heads: int
    sizes: tuple[int, ...]
    multipliers: tuple[int, ...]
    n_rows: int
    n_ids: int
    fill: int = 0
    cut: int | None = None
    vocabulary: Vocabulary | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise _error(f"family is {format_value(self.family)}; expected one of {FAMILIES}.")
        if len(self.sizes) != self.columns or not self.columns:
            raise _error(f"there are {len(self.sizes)} sizes for {self.columns} columns.")
        if min(self.sizes) < 1 or (max(self.sizes) >= _MOST_SIZE and self.family != "hash"):
            raise _error(
                f"sizes are {format_value(self.sizes)}; "
                f"expected numbers from 1 to {_MOST_SIZE - 1}."
            )
        if not sum(self.sizes) <= self.n_rows <= _MOST_ROWS:
            raise _error(
                f"n_rows is {self.n_rows} and the sizes have {sum(self.sizes)} rows; "
                f"at most {_MOST_ROWS} are possible."
            )
        if self.family in ("deepseek", "qwen"):
            if len(self.multipliers) != max(self.orders):
                raise _error(
                    f"multipliers are {format_value(self.multipliers)}; "
                    f"expected one for each of {max(self.orders)} tokens."
                )
            # Products of ids and multipliers are hashed as int64, so they must not wrap.
            largest = max(self.multipliers) * (self.n_ids - 1)
            if not 0 < largest < 1 << 63 or min(self.multipliers) < 1:
                raise _error(
                    f"multipliers are {format_value(self.multipliers)}; "
                    f"their products with {self.n_ids} ids must fit int64."
                )
        if self.family == "longcat" and max(self.multipliers[0], self.n_ids) > _MOST_BASE:
            raise _error(f"vocab_size is {self.n_ids}; at most {_MOST_BASE} is supported.")
        if self.vocabulary is not None and self.vocabulary.size > self.n_ids:
            raise _error(
                f"the vocabulary has {self.vocabulary.size} ids; the config has {self.n_ids}."
            )

    @classmethod
    def deepseek(
        cls, config: Mapping[str, Any], vocabulary: Vocabulary, place: int = 0
    ) -> "NgramLayout":
        """Return the layout of an Engram memory, as in DeepSeek-V4.1-Flash.

        Args:
          config: parsed ``config.json``, or its ``text_config``.
          vocabulary: merged ids for the model's tokenizer, with
            ``engram_compressed_vocab_size`` ids.
          place: index in ``engram_layer_ids``.

        Raises:
          ValueError: a value is missing or impossible, or contradicts another.
        """
        config = _text_config(config)
        layers = _require(config, "engram_layer_ids", list | tuple)
        largest = _require_integer(config, "engram_max_ngram_size", 2)
        heads = _require_integer(config, "engram_n_heads")
        n_ids = _require_integer(config, "engram_compressed_vocab_size")
        pad = _require_integer(config, "engram_pad_token_id", 0, other="engram_pad_id")
        _require_place(place, layers, "engram_layer_ids")
        if vocabulary.size != n_ids:
            raise _error(
                f"the vocabulary {vocabulary.digest} has {vocabulary.size} ids "
                f"and engram_compressed_vocab_size is {n_ids}; use the model's own tokenizer."
            )
        if pad >= len(vocabulary.map):
            raise _error(
                f"engram_pad_token_id is {pad}; the vocabulary has {len(vocabulary.map)} tokens."
            )
        # Each layer continues with the primes after those of the layer before.
        columns = (largest - 1) * heads
        sizes = _primes(_require_integer(config, "engram_vocab_size"), place * columns, columns)
        # DeepSeek's own seed, so that rows of its checkpoints are found.
        multipliers = _sampled_multipliers(10007 * int(layers[place]), largest, n_ids)
        stored = config.get("engram_num_embeddings")
        if stored is not None and (len(stored) != len(layers) or stored[place] != sum(sizes)):
            raise _error(
                f"engram_num_embeddings is {format_value(stored)}; "
                f"the primes from engram_vocab_size on have {sum(sizes)} rows at place {place}."
            )
        return cls(
            "deepseek", tuple(range(2, largest + 1)), heads, sizes, multipliers, sum(sizes), n_ids,
            fill=int(vocabulary.map[pad]), vocabulary=vocabulary,
            width=config.get("engram_head_dim"),
        )  # fmt: skip

    @classmethod
    def qwen(cls, config: Mapping[str, Any], place: int = 0) -> "NgramLayout":
        """Return the layout of a per-layer n-gram memory (PLE), as in Qwen3.8-Flash-Next.

        Args:
          config: parsed ``config.json``, or its ``text_config``.
          place: index in the sorted ``ple_layer_ids``.

        Raises:
          ValueError: a value is missing or impossible.
        """
        config = _text_config(config)
        _require_place(place, config.get("ple_layer_ids", range(place + 1)), "ple_layer_ids")
        largest = _require_integer(config, "ngram_size", 2)
        heads = _require_integer(config, "heads_per_ngram")
        n_ids, columns = _require_integer(config, "vocab_size"), (largest - 1) * heads
        sizes = _primes(_require_integer(config, "ngram_vocab_size_base"), place * columns, columns)
        unit = _require_integer(config, "make_ngram_vocab_size_divisible_by", default=128)
        seed = _require_integer(config, "seed", 0, default=1234) + 10007 * place
        # Odd multipliers, so that no bit of an id is lost, and small enough for int64 products.
        half = max(1, ((1 << 63) - 1) // n_ids // 2)
        multipliers = tuple(2 * (_split_mix(seed, i) % half) + 1 for i in range(largest))
        eos = _end_of_text(config)
        width = config.get("ple_embed_dim")
        return cls(
            "qwen", tuple(range(2, largest + 1)), heads, sizes, multipliers,
            -(-sum(sizes) // unit) * unit, n_ids, fill=eos, cut=eos,
            width=None if width is None else width // columns,
        )  # fmt: skip

    @classmethod
    def longcat(cls, config: Mapping[str, Any]) -> "NgramLayout":
        """Return the layout of an n-gram embedding, as in LongCat-Flash-Lite.

        Args:
          config: parsed ``config.json``.

        Raises:
          ValueError: a value is missing or impossible, or the config belongs to a variant with an
            undefined hash, such as LongCat-2.0 and LongCat-Next.
        """
        config = _text_config(config)
        for name in ("special_token_scope", "ngram_exclude_sp_token", "ngram_fix_normalize_factor"):
            if config.get(name):
                raise _error(
                    f"{name} is {format_value(config[name])}; only LongCat-Flash-Lite is supported."
                )
        ratio = config.get("ngram_vocab_size_ratio", config.get("oe_vocab_size_ratio"))
        if not isinstance(ratio, int | float) or ratio != int(ratio) or ratio < 1:
            raise _error(
                f"ngram_vocab_size_ratio is {format_value(ratio)}; "
                "only whole numbers are supported."
            )
        largest = _require_integer(config, "emb_neighbor_num", 2, other="oe_neighbor_num")
        heads = _require_integer(config, "emb_split_num", other="oe_split_num")
        n_ids, columns = _require_integer(config, "vocab_size"), (largest - 1) * heads
        # Every column has another size, so n-grams that collide in one column differ in others.
        sizes = tuple(int(ratio) * n_ids + 2 * i + 1 for i in range(columns))
        hidden = config.get("hidden_size")
        return cls(
            "longcat", tuple(range(2, largest + 1)), heads, sizes, (n_ids,), sum(sizes), n_ids,
            fill=0, cut=_end_of_text(config), width=None if hidden is None else hidden // columns,
        )  # fmt: skip

    @classmethod
    def hash(
        cls,
        rows: int,
        orders: Sequence[int] = (2, 3),
        heads: int = 4,
        seed: int = 0,
        vocabulary: Vocabulary | None = None,
        width: int | None = None,
    ) -> "NgramLayout":
        """Return the layout of `lutjax.ngram_rows`, with all tables in one.

        Args:
          rows: rows for each column.
          orders: as in `lutjax.ngram_rows`.
          heads: as in `lutjax.ngram_rows`.
          seed: as in `lutjax.ngram_rows`.
          vocabulary: merged ids; None hashes token ids.
          width: elements per row.

        Raises:
          ValueError: a size is impossible.
        """
        check_hashes("NgramLayout", rows=rows, orders=orders, heads=heads, seed=seed)
        sizes = (int(rows),) * (len(orders) * heads)
        # Without a vocabulary any int32 id is a token.
        n_ids = 1 << 31 if vocabulary is None else vocabulary.size
        return cls(
            "hash", tuple(map(int, orders)), int(heads), sizes, (int(seed),), sum(sizes), n_ids,
            fill=-1, vocabulary=vocabulary, width=width,
        )  # fmt: skip

    @property
    def n_tokens(self) -> int:
        """Number of token ids."""
        return self.n_ids if self.vocabulary is None else len(self.vocabulary.map)

    @property
    def columns(self) -> int:
        """Rows that each token reads."""
        return len(self.orders) * self.heads

    @property
    def reach(self) -> int:
        """Number of earlier tokens with an effect on a token's rows."""
        return max(self.orders) - 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each column."""
        return tuple(int(x) for x in np.cumsum((0, *self.sizes[:-1])))

    @property
    def _deciding(self) -> dict[str, Any]:
        """All values with an effect on row ids, except the vocabulary map."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("vocabulary", "width")
        }
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over all values with an effect on row ids, in hexadecimal digits."""
        facts = {**self._deciding, "vocabulary": self.vocabulary and self.vocabulary.digest}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible dict from which `from_json` creates the same layout."""
        token_map = None if self.vocabulary is None else self.vocabulary.map.tolist()
        return {
            **self._deciding,
            "vocabulary": token_map,
            "width": self.width,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "NgramLayout":
        """Return the layout described by `to_json`.

        Raises:
          ValueError: a value is missing or impossible, or the digest differs.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        if missing := sorted({*names, "digest"} - set(facts)):
            raise _error(f"the description has no {', '.join(missing)}.")
        values: dict[str, Any] = {
            n: tuple(facts[n]) if isinstance(facts[n], list) else facts[n] for n in names
        }
        token_map = facts["vocabulary"]
        values["vocabulary"] = None if token_map is None else Vocabulary(token_map)
        try:
            layout = cls(**values)
        except TypeError as error:
            raise _error(f"the description is damaged: {error}.") from error
        if layout.digest != facts["digest"]:
            raise _error(
                f"the digest of the description is {layout.digest}; it states {facts['digest']}."
            )
        return layout

    def check(self, **stored: Any) -> None:
        """Compare hash constants with stored ones, such as a checkpoint's buffers.

        Args:
          stored: integers by attribute name: `multipliers`, `sizes`, `offsets` or `n_rows`.

        Raises:
          ValueError: they differ.
        """
        for name, value in stored.items():
            own = np.atleast_1d(getattr(self, name))
            if np.ravel(value).tolist() != own.tolist():
                raise _error(
                    f"{name} of the config are {own.tolist()}; "
                    f"stored are {np.ravel(value).tolist()}."
                )

    def rows(
        self,
        tokens: Integer[Array, "*batch length"],
        history: Integer[Array, "*batch before"] | None = None,
        segments: Integer[Array, "*#batch length"] | None = None,
    ) -> Int[Array, "*batch length columns"]:
        """Return the rows of the flat table addressed by the n-grams that end at each token.

        These ids are plain integers without the digest of the layout. Layers compute ids by
        themselves; before you read a table by ids of your own, compare `digest` with its
        ``layout``.

        Args:
          tokens: token ids ``[..., length]``. NumPy arrays give a NumPy array, computed in int64;
            JAX arrays use 32-bit arithmetic on any device, with the same result.
          history: token ids before `tokens`; the last `reach` of them count. None: the text begins.
          segments: ids ``[..., length]``: an n-gram contains only consecutive tokens of the same
            segment. The history belongs to the segment of the first token.

        Returns:
          int32 ``[..., length, columns]``: columns by order, then by head.

        Raises:
          TypeError: tokens are not an integer array.
          ValueError: NumPy ids are too large; JAX ids are clamped. Or shapes differ.
        """
        for name, ids in (("tokens", tokens), ("history", history), ("segments", segments)):
            if ids is None:
                continue
            require_array("NgramLayout.rows", name, ids)
            if not jnp.issubdtype(ids.dtype, np.integer) or not ids.ndim:
                raise TypeError(
                    f"NgramLayout.rows: {name} is {format_value(ids)}; "
                    "expected integer ids [..., length]."
                )
        if segments is not None and segments.shape[-1] != tokens.shape[-1]:
            raise ValueError(
                f"NgramLayout.rows: segments is {format_value(segments)} "
                f"and tokens {format_value(tokens)}; expected one id for each token."
            )
        on_host = not any(isinstance(a, jax.Array) for a in (tokens, history, segments))
        xp: Any = np if on_host else jnp
        every, starts = self._with_history(xp, tokens, history, segments)
        if self.family == "hash":
            return self._hash_runs(xp, every, starts)
        # `windows[j]` has the id `j` positions before each token, and the fill id beyond its run.
        windows, length = [], tokens.shape[-1]
        visible: Any = None
        for j in range(max(self.orders)):
            at = slice(self.reach - j, self.reach - j + length)
            ids = every[..., at]
            if j:
                # The token j positions before is visible unless one of the later ones starts a run.
                hidden = starts[..., self.reach - j + 1 : self.reach - j + 1 + length]
                visible = ~hidden if visible is None else visible & ~hidden
                ids = xp.where(visible, ids, xp.asarray(self.fill, ids.dtype))
            windows.append(ids)
        compute = self._polynomial if self.family == "longcat" else self._products
        return compute(xp, windows)

    def _with_history(self, xp: Any, tokens: Any, history: Any, segments: Any) -> tuple[Any, Any]:
        """Return hashed ids with `reach` earlier ids, and a mask for the first id of each run."""
        tokens = self._integers(xp, "tokens", tokens)
        batch = tokens.shape[:-1]
        # Missing earlier ids are -1, as padding is.
        before = xp.full((*batch, self.reach), -1, tokens.dtype)
        if history is not None:
            earlier = self._integers(xp, "history", history)
            if earlier.shape[:-1] != batch:
                raise ValueError(
                    f"NgramLayout.rows: history is {format_value(history)} "
                    f"and tokens {format_value(tokens)}; expected the same batch dimensions."
                )
            before = xp.concatenate([before, earlier], -1)[..., earlier.shape[-1] :]
        every = xp.concatenate([before, tokens], -1)
        absent = every < 0
        if self.vocabulary is not None:
            ids = xp.take(
                xp.asarray(self.vocabulary.map), xp.where(absent, 0, every), axis=0, mode="clip"
            )
        else:
            ids = xp.minimum(every, np.asarray(self.n_ids - 1, every.dtype))
        ids = xp.where(absent, self.fill if self.cut is None else self.cut, ids).astype(every.dtype)
        if self.cut is None:  # a missing token hides itself and all earlier ones
            starts = absent
        else:  # a missing token ends the text, and belongs to it
            lead = [(0, 0)] * (ids.ndim - 1)
            starts = xp.pad(ids[..., :-1] == self.cut, [*lead, (1, 0)], constant_values=True)
        if segments is not None:
            segments = xp.broadcast_to(xp.asarray(segments), tokens.shape)
            changes = segments[..., 1:] != segments[..., :-1]
            lead = [(0, 0)] * (changes.ndim - 1)
            # Positions of `history` belong to the first segment of `tokens`: only a change between
            # tokens starts a run.
            starts = starts | xp.pad(changes, [*lead, (self.reach + min(1, tokens.shape[-1]), 0)])
        return ids, starts

    def _integers(self, xp: Any, name: str, ids: Any) -> Any:
        if xp is jnp:
            return as_int32(ids)
        ids = np.asarray(ids).astype(np.int64)
        n_tokens = self.n_tokens
        if ids.size and ids.max() >= n_tokens:
            raise ValueError(
                f"NgramLayout.rows: {name} holds ids up to {ids.max()}; "
                f"the {self.family} layout has {n_tokens} tokens."
            )
        return ids

    def _constants(self, i: int, ids: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return sizes and offsets of the columns of order `i`, as arrays to combine with rows."""
        part, shape = slice(i * self.heads, (i + 1) * self.heads), (*(1,) * ids.ndim, self.heads)
        sizes, offsets = (np.reshape(a[part], shape) for a in (self.sizes, self.offsets))
        return sizes.astype(ids.dtype), offsets.astype(ids.dtype)

    def _products(self, xp: Any, windows: list[Any]) -> Any:
        """Return rows from products of ids and multipliers, joined by exclusive or."""
        # The hash of a longer n-gram extends the hash of a shorter one, so `h` is kept.
        h = _product(xp, windows[0], self.multipliers[0])
        rows_by_order, joined = [], 1
        for i, order in enumerate(self.orders):
            for j in range(joined, order):
                product = _product(xp, windows[j], self.multipliers[j])
                h = tuple(a ^ b for a, b in zip(h, product, strict=True))
            joined = order
            sizes, first = self._constants(i, windows[0])
            rows_by_order.append((_remainder(xp, h, sizes) + first).astype(np.int32))
        return xp.concatenate(rows_by_order, -1)

    def _polynomial(self, xp: Any, windows: list[Any]) -> Any:
        """Return rows of polynomials in the vocabulary size, by Horner's method."""
        rows_by_order, base = [], self.multipliers[0]
        for i, order in enumerate(self.orders):
            sizes, first = self._constants(i, windows[0])
            r = windows[order - 1][..., None]
            # Ids below all sizes are residues already.
            if sizes.min() < self.n_ids:
                r = _append_digit(xp, xp.zeros_like(r), r, 1, sizes)
            for j in reversed(range(order - 1)):
                r = _append_digit(xp, r, windows[j][..., None], base, sizes)
            rows_by_order.append((r + first).astype(np.int32))
        return xp.concatenate(rows_by_order, -1)

    def _hash_runs(self, xp: Any, every: Any, starts: Any) -> Any:
        lead = [(0, 0)] * (starts.ndim - 1)
        # A missing token starts no n-gram, so the token after it begins a run.
        starts = starts | xp.pad(starts[..., :-1] & (every[..., :-1] < 0), [*lead, (1, 0)])
        run = xp.cumsum(starts, -1, dtype=np.int32)
        place = segment_positions(xp, run, run.shape[-1])
        options: Any = {"orders": self.orders, "heads": self.heads, "seed": self.multipliers[0]}
        rows = rows_at(xp, every, place, rows=self.sizes[0], **options)
        offsets = np.reshape(self.offsets, (*(1,) * every.ndim, -1)).astype(np.int32)
        return rows[..., self.reach :, :] + offsets


def _product(xp: Any, ids: Any, multiplier: int) -> tuple[Any, ...]:
    """Return ``ids * multiplier``, below ``2**63``: one int64 array, or low and high words."""
    # JAX has no int64 by default, so the product is in words of uint32 there.
    if xp is np:
        return (ids * np.int64(multiplier),)
    low, high = (np.uint32(x) for x in (multiplier & 0xFFFFFFFF, multiplier >> 32))
    low_0, low_1 = (np.uint32(x) for x in (multiplier & 0xFFFF, multiplier >> 16 & 0xFFFF))
    a = ids.astype(np.uint32)
    a_0, a_1 = a & np.uint32(0xFFFF), a >> np.uint32(16)
    # The high word of the product of two uint32 numbers, by the usual partial products.
    middle = a_1 * low_0 + (a_0 * low_0 >> np.uint32(16))
    other = a_0 * low_1 + (middle & np.uint32(0xFFFF))
    carried = a_1 * low_1 + (middle >> np.uint32(16)) + (other >> np.uint32(16))
    return a * low, a * high + carried


def _remainder(xp: Any, h: tuple[Any, ...], sizes: np.ndarray) -> Any:
    """Return ``h % sizes`` with a last axis for the sizes."""
    if xp is np:
        return h[0][..., None] % sizes
    # Horner's method over digits of 16 bits, the highest first.
    limbs = [a for word in reversed(h) for a in (word >> np.uint32(16), word & np.uint32(0xFFFF))]
    first, *others = (limb.astype(np.int32)[..., None] for limb in limbs)
    r = first if sizes.min() >= _LIMB else _append_digit(xp, xp.zeros_like(first), first, 1, sizes)
    for limb in others:
        r = _append_digit(xp, r, limb, _LIMB, sizes)
    return r


def _append_digit(xp: Any, r: Any, digit: Any, base: int, sizes: np.ndarray) -> Any:
    """Return ``(r * base + digit) % sizes`` for residues `r` and digits below ``2**20``."""
    if xp is np:
        return (r * base + digit) % sizes
    # float32 gives the quotient, which is less than 2**20 + 1 and wrong by at most 1: rounding
    # contributes at most four units of 2**-24, relatively. The remainder is exact, as int32
    # arithmetic wraps around and the true value fits.
    p, inverse = sizes.astype(np.int32), (1 / sizes).astype(np.float32)
    share = r.astype(np.float32) * (base / sizes).astype(np.float32)
    quotient = share + digit.astype(np.float32) * inverse
    rest = r * np.int32(base) + digit - quotient.astype(np.int32) * p
    rest = xp.where(rest < 0, rest + p, rest)
    return xp.where(rest >= p, rest - p, rest)


def _error(message: str) -> ValueError:
    return ValueError(f"NgramLayout: {message}")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(config, Mapping):
        raise TypeError(
            f"NgramLayout: config is {format_value(config)}; expected the dict of a config.json."
        )
    text_config: Mapping[str, Any] = config.get("text_config", config)
    return text_config


def _require(config: Mapping[str, Any], name: str, kind: Any) -> Any:
    if not isinstance(config.get(name), kind):
        raise _error(f"{name} of the config is {format_value(config.get(name))}.")
    return config[name]


def _require_integer(
    config: Mapping[str, Any],
    name: str,
    least: int = 1,
    *,
    default: int | None = None,
    other: str = "",
) -> int:
    value = config.get(name, config.get(other, default))
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _error(
            f"{name} of the config is {format_value(value)}; "
            f"expected a whole number from {least} on."
        )
    return value


def _require_place(place: int, layers: Any, name: str) -> None:
    if not 0 <= place < len(layers):
        raise _error(f"place is {place}; {name} has {len(layers)} layers.")


def _end_of_text(config: Mapping[str, Any]) -> int:
    """Return the first end-of-text token, the only one to end n-grams."""
    eos = config.get("eos_token_id")
    first = eos[0] if isinstance(eos, list | tuple) and eos else eos
    return _require_integer({"eos_token_id": first}, "eos_token_id", 0)


def _sampled_multipliers(seed: int, count: int, n_ids: int) -> tuple[int, ...]:
    """Return odd multipliers from NumPy's generator, as DeepSeek samples them."""
    half = max(1, ((1 << 63) - 1) // n_ids // 2)
    sampled = np.random.default_rng(seed).integers(0, half, size=count, dtype=np.int64)
    return tuple(2 * int(x) + 1 for x in sampled)


def _split_mix(seed: int, i: int) -> int:
    """Return output ``i + 1`` of SplitMix64, counted from 0."""
    # Python integers do not wrap: each product needs its modulus.
    x = (seed + 0x9E3779B97F4A7C15 * (i + 2)) % _WORDS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % _WORDS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % _WORDS
    return x ^ (x >> 31)


def _primes(least: int, skipped: int, count: int) -> tuple[int, ...]:
    """Return consecutive primes from `least` on, after the first `skipped`."""
    primes, start = list[int](), least
    while len(primes) < skipped + count:
        # Primes near n are about log(n) apart; one block mostly suffices.
        size = max(64, int(2 * (skipped + count - len(primes)) * math.log(start + 3)))
        primes += _primes_between(start, start + size)
        start += size
    return tuple(primes[skipped : skipped + count])


def _primes_between(start: int, stop: int) -> list[int]:
    """Return the primes from `start` to ``stop - 1``, by a sieve."""
    is_prime = np.ones(stop - start, np.bool_)
    is_prime[: max(2 - start, 0)] = False
    for d in range(2, math.isqrt(stop) + 1):
        first = max(d * d, -(-start // d) * d)
        is_prime[first - start :: d] = False
    return [start + int(i) for i in np.flatnonzero(is_prime)]
