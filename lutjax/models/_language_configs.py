"""Configs of the language models. Importing them needs no JAX, so `lutjax train lm --help` answers at once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from lutjax._names import FLOATS, PLACEMENTS, READS
from lutjax.models._config import MOST_LAYERS, Config
from lutjax.models._fields import check_names, one_of

FEED_FORWARD = ("projection_lut", "scored_lut", "lut", "dense")

SCORED = ("projection_lut", "scored_lut")
"""Those whose tables are read by scores."""

ATTENTION = ("concatenated", "pair", "pair_interleaved")
MEMORY = ("window", "counts")


@dataclasses.dataclass(frozen=True)
class GPTConfig(Config):
    """The sizes of a `GPT`.

    Attributes:
      vocab_size: tokens; 256 for bytes.
      features: size of a token's vector.
      context: longest text that is attended as a whole; longer ones through a sliding window.
      n_layers: layers of attention and feed-forward.
      n_heads: heads of attention, each of ``features / n_heads`` features.
      feed_forward: ``"projection_lut"``, tables between two projections (`lutjax.layers.nnx.ProjectionLUT`); ``"scored_lut"``, the
        same without projections and heads: each table compares any features, and adds rows to all of them; ``"lut"``, such tables with
        hard reads, as in a `LUTTransformer` (`lutjax.layers.nnx.LUT`); or ``"dense"``, two matrices with a GELU between them and 4 times as many features inside.
      lut_heads: heads of tables in ``"projection_lut"``, which share its features out; ``"scored_lut"`` and ``"lut"`` have as many
        tables in all, without heads.
      lut_tables: tables of each head.
      lut_bits: comparisons of each table, which has ``2 ** lut_bits`` rows.
      read: how tables of ``"projection_lut"`` and ``"scored_lut"`` are read: ``"hard"``, ``"blend"``, ``"soft_sign"``, ``"confidence"``, ``"powers_of_two"`` (with tables
        of integers), and of the last two with one row in place of two ``"confidence_1"``, ``"powers_of_two_1"``.
      table_dropout: share of the tables of ``"projection_lut"`` and ``"scored_lut"`` that an element does not read in training.
      dropout: rate of dropout after the embedding, attention and feed-forward.
      dtype: dtype in which matrices are multiplied and attention is computed: float32, bfloat16, float16 or float64.
        Parameters, sums of layers, normalization and logits are float32 (or float64).
      remat: whether the backward pass computes each layer again instead of keeping what its forward pass made.
      memory: whether tables of n-grams are read beside attention (`lutjax.layers.nnx.NgramMemory`).
      memory_orders: lengths of the n-grams whose rows are read.
      memory_rows: rows of each table of the memory.
      memory_heads: tables for each length.
      memory_width: numbers of a row of the memory.
      memory_layers: numbers, from 0 on, of the layers before which a memory is added, each with tables of its own.
      memory_placement: ``"device"``, or ``"host"``: the tables of the memory lie in the memory of the host, of which a device sees the rows that it reads.

    Raises:
      ValueError: a size is impossible.

    Example:
      >>> from lutjax.models import GPTConfig
      >>> config = GPTConfig(n_layers=2, features=64)
      >>> GPTConfig.from_dict(config.to_dict()) == config
      True
    """

    vocab_size: int = 256
    features: int = 128
    context: int = 64
    n_layers: int = 3
    n_heads: int = 4
    feed_forward: str = one_of(FEED_FORWARD, "projection_lut")
    lut_heads: int = 4
    lut_tables: int = 16
    lut_bits: int = 6
    read: str = one_of(READS, "confidence")
    table_dropout: float | int = 0.0
    dropout: float | int = 0.0
    dtype: str = one_of(FLOATS, "float32")
    remat: bool = False
    memory: bool = False
    memory_orders: tuple[int, ...] = (2, 3, 4)
    memory_rows: int = 1 << 14
    memory_heads: int = 2
    memory_width: int = 8
    memory_layers: tuple[int, ...] = (0,)
    memory_placement: str = one_of(PLACEMENTS, "device")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(vocab_size=1, features=2, context=2, n_layers=1, n_heads=1)
        self._check_most(n_layers=MOST_LAYERS)
        self._check_sizes(lut_heads=1, lut_tables=1, lut_bits=1)
        if self.features % (2 * self.n_heads):
            raise ValueError(
                f"GPTConfig: features is {self.features} and n_heads {self.n_heads}; each head needs the same even "
                f"number of features, so features must be a multiple of {2 * self.n_heads}."
            )
        check_names(self, "GPTConfig: ")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"GPTConfig: dropout is {self.dropout}; it is a rate, 0 <= dropout < 1.")
        # The specs check the rest.
        from lutjax.layers._memory import NgramMemorySpec
        from lutjax.layers._projection import ProjectionLUTSpec
        from lutjax.layers._tables import LUTSpec

        scored = self.projection_lut_options()
        self._check_spec(ProjectionLUTSpec, scored, bits="lut_bits", tables="lut_tables", heads="lut_heads")
        self._check_spec(LUTSpec, self.lut_options(), n_anchors="lut_bits", n_detectors="lut_tables")
        names = {name: f"memory_{name}" for name in ("orders", "rows", "heads", "width")}
        self._check_spec(NgramMemorySpec, self.memory_options(0), **names)
        places = self.memory_layers
        if (self.memory and (not places or len(set(places)) != len(places))) or any(
            not 0 <= place < self.n_layers for place in places
        ):
            raise ValueError(
                f"GPTConfig: memory_layers is {places} and n_layers {self.n_layers}; expected different numbers of layers, from 0 to "
                f"{self.n_layers - 1}."
            )

    @property
    def param_dtype(self) -> str:
        """Dtype of the parameters."""
        return "float64" if self.dtype == "float64" else "float32"

    def projection_lut_options(self) -> dict[str, Any]:
        """Options of each feed-forward layer of scored tables."""
        from lutjax.models._gpt_parts import READS, STANDARD_DEVIATION, MatrixNormal

        projected = self.feed_forward == "projection_lut"
        return {
            "in_features": self.features,
            "out_features": self.features,
            "heads": self.lut_heads if projected else 1,
            "tables": self.lut_tables if projected else self.lut_heads * self.lut_tables,
            "compress": projected,
            "compress_init": MatrixNormal(STANDARD_DEVIATION),
            "decompress": projected,
            "bits": self.lut_bits,
            "read": READS[self.read],
            "table_dropout": self.table_dropout,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }

    @property
    def memory_places(self) -> tuple[int, ...]:
        """Numbers of the layers before which there is a memory."""
        return self.memory_layers if self.memory else ()

    def memory_options(self, place: int) -> dict[str, Any]:
        """Options of the memory before a layer."""
        return {
            "features": self.features,
            "orders": self.memory_orders,
            "rows": self.memory_rows,
            "heads": self.memory_heads,
            "width": self.memory_width,
            "seed": place,
            "placement": self.memory_placement,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }

    def lut_options(self) -> dict[str, Any]:
        """Options of each feed-forward layer of tables alone."""
        return {
            "in_features": self.features,
            "out_features": self.features,
            "n_detectors": self.lut_heads * self.lut_tables,
            "n_anchors": self.lut_bits,
            "param_dtype": self.param_dtype,
        }


@dataclasses.dataclass(frozen=True)
class LUTTransformerConfig(Config):
    """The sizes of a `LUTTransformer`; the defaults are the published language model.

    Attributes:
      vocab_size: tokens; 256 for bytes.
      features: size of a token's vector.
      context: longest text that is attended as a whole; longer ones through a sliding window.
      n_layers: layers of attention and tables.
      n_heads: heads of attention: nothing but so many times more detectors.
      n_detectors: detectors of each head.
      n_anchors: anchor pairs of a detector in attention.
      n_position_bits: positional bits in attention; 0 for none.
      shared_positions: all detectors of a layer read the same positions, or each its own.
      attention: ``"concatenated"``, ``"pair"`` or ``"pair_interleaved"`` (which needs
        ``n_position_bits == features``).
      memory: what attention remembers of earlier tokens: those of the ``"window"`` of ``context - 1`` positions; or, without positional bits and
        where attention is ``"concatenated"``, ``"counts"``: how many tokens had each row, of the whole text before, in the same memory
        whatever its length.
      ffn: whether tables follow attention in each layer.
      ffn_detectors: their detectors.
      ffn_anchors: anchor pairs of each.
      unembed_detectors: detectors of the last tables, which give the logits; `ffn_detectors` by default.
      unembed_anchors: anchor pairs of each; `ffn_anchors` by default.
      dropout: rate of dropout after each.
      batch_norm: whether batch normalization follows each.
      param_dtype: dtype of everything: float32, bfloat16, float16 or float64.
      table_dtype: dtype of the tables, where it is another one: bfloat16 halves their memory and the bytes a step
        moves, and what runs between them keeps its precision. Default: the same.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 9.

    Example:
      >>> from lutjax.models import LUTTransformerConfig
      >>> config = LUTTransformerConfig(n_layers=2, ffn_anchors=6)
      >>> LUTTransformerConfig.from_dict(config.to_dict()) == config
      True
    """

    vocab_size: int = 256
    features: int = 32
    context: int = 32
    n_layers: int = 6
    n_heads: int = 4
    n_detectors: int = 16
    n_anchors: int = 6
    n_position_bits: int = 4
    shared_positions: bool = False
    attention: str = one_of(ATTENTION, "concatenated")
    memory: str = one_of(MEMORY, "window")
    ffn: bool = True
    ffn_detectors: int = 16
    ffn_anchors: int = 10
    unembed_detectors: int | None = None
    unembed_anchors: int | None = None
    dropout: float | int = 0.1
    batch_norm: bool = False
    param_dtype: str = one_of(FLOATS, "float32")
    table_dtype: str | None = one_of(FLOATS, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes(vocab_size=1, features=2, context=2, n_layers=1, n_heads=1, n_detectors=1)
        self._check_most(n_layers=MOST_LAYERS)
        self._check_sizes(ffn_detectors=1, ffn_anchors=0, unembed_detectors=1, unembed_anchors=0)
        check_names(self, "LUTTransformerConfig: ")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"LUTTransformerConfig: dropout is {self.dropout}; it is a rate, 0 <= dropout < 1."
            )
        if self.memory == "counts" and (self.n_position_bits or self.attention != "concatenated"):
            raise ValueError(
                f"LUTTransformerConfig: memory is 'counts', but n_position_bits is {self.n_position_bits} and attention {self.attention!r}; counts do not say "
                "where a token was, so they need n_position_bits=0 and attention='concatenated'."
            )
        # The specs check the rest.
        from lutjax.layers import _tables

        attention = (
            _tables.LUTAttentionSpec if self.attention == "concatenated" else _tables.LUTPairAttentionSpec
        )
        attention(**self.attention_options())
        for part, options in (("ffn", self.ffn_options()), ("unembed", self.unembed_options())):
            names = {"n_anchors": f"{part}_anchors", "n_detectors": f"{part}_detectors"}
            self._check_spec(_tables.LUTSpec, options, **names)

    def attention_options(self) -> dict[str, Any]:
        """Options of each attention layer."""
        interleave = (
            {} if self.attention == "concatenated" else {"interleave": self.attention == "pair_interleaved"}
        )
        return {
            "in_features": self.features,
            "out_features": self.features,
            "n_detectors": self.n_heads * self.n_detectors,
            "n_anchors": self.n_anchors,
            "n_positions": self.context - 1,
            "n_position_bits": self.n_position_bits,
            "shared_positions": self.shared_positions,
            "window": self.context - 1 if self.memory == "window" else None,
            "param_dtype": self.param_dtype,
            **interleave,
        }

    def ffn_options(self) -> dict[str, Any]:
        """Options of the tables in each layer."""
        return self._table_options(self.features, self.ffn_detectors, self.ffn_anchors)

    def unembed_options(self) -> dict[str, Any]:
        """Options of the last tables."""
        detectors = self.ffn_detectors if self.unembed_detectors is None else self.unembed_detectors
        anchors = self.ffn_anchors if self.unembed_anchors is None else self.unembed_anchors
        return self._table_options(self.vocab_size, detectors, anchors)

    def _table_options(self, out_features: int, n_detectors: int, n_anchors: int) -> dict[str, Any]:
        return {
            "in_features": self.features,
            "out_features": out_features,
            "n_detectors": n_detectors,
            "n_anchors": n_anchors,
            "param_dtype": self.param_dtype,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "LUTTransformerConfig":
        """The config that `to_dict` made these fields of.

        Raises:
          ValueError: a field is unknown or missing.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {"table_dtype": None, "memory": "window", **fields}  # older configs have none
        for what, names in (("unknown", set(fields) - known), ("missing", known - set(fields))):
            if names:
                raise ValueError(
                    f"LUTTransformerConfig: {what} fields {sorted(names)}; the fields are {sorted(known)}."
                )
        return super().from_dict(fields)
