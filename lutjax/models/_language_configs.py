"""Language model configs, importable without JAX."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from lutjax.arguments import format_value, set_decided_fields
from lutjax.files.errors import FolderError
from lutjax.models._config import MOST_LAYERS, Config
from lutjax.models._fields import check_names, one_of
from lutjax.names import FLOATS, PLACEMENTS, READS

FEED_FORWARD = ("projection_lut", "scored_lut", "lut", "dense")

SCORED = ("projection_lut", "scored_lut")  # layer kinds whose tables are read by scores

ATTENTION = ("concatenated", "pair", "pair_interleaved")
MEMORY = ("window", "counts")


@dataclasses.dataclass(frozen=True)
class GPTConfig(Config):
    """The sizes of a `GPT`.

    Attributes:
      vocab_size: vocabulary size; 256 for bytes.
      features: embedding size.
      context: attention window, in tokens. Longer texts are processed by a sliding window.
      n_layers: number of layers, each attention and feed-forward.
      n_heads: number of attention heads. Each has ``features / n_heads`` features.
      feed_forward: feed-forward layer type. ``"projection_lut"``: tables between two projections
        (`lutjax.layers.nnx.ProjectionLUT`). ``"scored_lut"``: the same without projections and
        heads; each table compares any features and adds rows to all features. ``"lut"``: such
        tables with hard reads, as in a `LUTTransformer` (`lutjax.layers.nnx.LUT`). ``"dense"``: two
        matrices with a GELU between them and ``4 * features`` hidden units.
      lut_heads: table heads per feed-forward layer. ``"scored_lut"`` and ``"lut"`` have ``lut_heads
        * lut_tables`` tables without heads.
      lut_tables: tables per head.
      lut_bits: comparisons per table. A table has ``2 ** lut_bits`` rows.
      read: table read. Applies to ``"projection_lut"`` and ``"scored_lut"``; ``"powers_of_two"``
        suits quantized tables, and names that end in ``_1`` read one row per table instead of two.
      table_dropout: table dropout rate in training. Applies to ``"projection_lut"`` and
        ``"scored_lut"``.
      dropout: dropout rate after embedding, attention and feed-forward.
      dtype: matrix and attention dtype. Parameters, residual sums, normalization and logits are
        float32 (or float64).
      remat: recompute each layer in the backward pass to save memory.
      memory: add n-gram memory layers (`lutjax.layers.nnx.NgramMemory`).
      memory_orders: n-gram lengths.
      memory_rows: rows per memory table.
      memory_heads: memory tables per n-gram length.
      memory_width: elements per memory row.
      memory_layers: layers preceded by a memory, counted from 0. Each memory has tables of its own.
      memory_placement: where memory tables reside. With ``"host"`` they stay in host memory, and a
        device receives only the rows that it reads.
      memory_base: bundle of an imported memory, whose rows the model trains. See
        `lutjax.convert.convert_memory`. It decides the sizes of the memory; its base files are
        never written.

    Raises:
      ValueError: a size is impossible, or the imported memory is of another vocabulary.
      FolderError: `memory_base` is missing or damaged.

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
    memory_base: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory_base is not None:
            self._take_base()
        # Small sizes first: later checks divide by them.
        self._check_sizes(vocab_size=1, features=2, context=2, n_layers=1, n_heads=1)
        self._check_most(n_layers=MOST_LAYERS)
        self._check_sizes(lut_heads=1, lut_tables=1, lut_bits=1)
        if self.features % (2 * self.n_heads):
            raise ValueError(
                f"GPTConfig: features is {self.features} and n_heads {self.n_heads}; "
                "each head needs the same even number of features, "
                f"so features must be a multiple of {2 * self.n_heads}."
            )
        check_names(self, "GPTConfig: ")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"GPTConfig: dropout is {self.dropout}; it is a rate, 0 <= dropout < 1."
            )
        # The specs check the rest.
        from lutjax.layers.specifications import LUTSpec, NgramMemorySpec, ProjectionLUTSpec

        scored = self.projection_lut_options()
        self._check_spec(
            ProjectionLUTSpec, scored, bits="lut_bits", tables="lut_tables", heads="lut_heads"
        )
        self._check_spec(
            LUTSpec, self.lut_options(), n_anchors="lut_bits", n_detectors="lut_tables"
        )
        names = {name: f"memory_{name}" for name in ("orders", "rows", "heads", "width")}
        self._check_spec(NgramMemorySpec, self.memory_options(0), **names)
        places = self.memory_layers
        are_layers = all(0 <= place < self.n_layers for place in places)
        are_distinct = len(set(places)) == len(places) > 0
        if not are_layers or (self.memory and not are_distinct):
            raise ValueError(
                f"GPTConfig: memory_layers is {places} and n_layers {self.n_layers}; "
                f"expected different numbers of layers, from 0 to {self.n_layers - 1}."
            )

    @property
    def param_dtype(self) -> str:
        """Parameter dtype."""
        return "float64" if self.dtype == "float64" else "float32"

    def projection_lut_options(self) -> dict[str, Any]:
        """Options for each scored feed-forward layer."""
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
        """Layer numbers that are preceded by a memory."""
        return self.memory_layers if self.memory else ()

    def memory_options(self, place: int) -> dict[str, Any]:
        """Options for the memory before a layer."""
        options = {
            "features": self.features,
            "width": self.memory_width,
            "placement": self.memory_placement,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
        }
        if self.memory_base is not None:
            return {**options, **self._base}
        sizes = {"orders": self.memory_orders, "rows": self.memory_rows, "heads": self.memory_heads}
        return {**options, **sizes, "seed": place}

    @functools.cached_property
    def _base(self) -> dict[str, Any]:
        """Options for a memory that the imported memory decides."""
        from lutjax.convert._memories import read_layout, read_record

        assert self.memory_base is not None
        record = read_record(self.memory_base)
        same = {
            name: record["arguments"][name]
            for name in ("gate", "eps")
            if name in record["arguments"]
        }
        return {"layout": read_layout(record, self.memory_base), **same}

    def _take_base(self) -> None:
        """Set the fields that the imported memory decides.

        Raises:
          ValueError: one of them is given with another value, or the vocabulary is another.
        """
        assert self.memory_base is not None
        if not os.path.isdir(self.memory_base):
            raise FolderError(
                f"GPTConfig: memory_base is {format_value(self.memory_base)}, which is no folder; "
                "expected a bundle from lutjax import or lutjax.convert.convert_memory."
            )
        object.__setattr__(self, "memory_base", os.path.abspath(self.memory_base))
        layout = self._base["layout"]
        if layout.n_tokens != self.vocab_size:
            raise ValueError(
                f"GPTConfig: memory_base {self.memory_base} has rows for a vocabulary "
                f"of {layout.n_tokens:,} tokens (layout {layout.digest}) "
                f"and vocab_size is {self.vocab_size:,}; its rows mean nothing to other tokens."
            )
        if len(self.memory_layers) != 1:
            raise ValueError(
                f"GPTConfig: memory_layers is {self.memory_layers}; "
                "an imported memory has one table, for one layer."
            )
        decided = {
            "memory": True,
            "memory_placement": "host",
            "memory_orders": layout.orders,
            "memory_rows": layout.n_rows,
            "memory_heads": layout.heads,
            "memory_width": layout.width,
        }

        def conflict(name: str, value: Any) -> ValueError:
            return ValueError(
                f"GPTConfig: {name} is {getattr(self, name)} and memory_base has {value}; "
                f"leave {name} out."
            )

        set_decided_fields(self, decided, conflict)

    def lut_options(self) -> dict[str, Any]:
        """Options for each feed-forward layer that consists only of tables."""
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
      vocab_size: vocabulary size; 256 for bytes.
      features: embedding size.
      context: attention window, in tokens. Longer texts are processed by a sliding window.
      n_layers: number of layers, each attention and tables.
      n_heads: number of attention heads. Heads only multiply the number of detectors.
      n_detectors: attention detectors per head.
      n_anchors: anchor pairs per attention detector.
      n_position_bits: position bits in attention; 0 for none.
      shared_positions: share position bits among a layer's detectors.
      attention: attention type. ``"pair_interleaved"`` requires ``n_position_bits == features``.
      memory: how attention remembers earlier tokens. ``"window"``: a window of ``context - 1``
        positions. ``"counts"``: the number of tokens with each row over all earlier text, in
        constant memory; requires ``n_position_bits=0`` and ``attention="concatenated"``.
      ffn: add feed-forward tables to each layer.
      ffn_detectors: feed-forward detectors.
      ffn_anchors: anchor pairs per feed-forward detector.
      unembed_detectors: output detectors. Default: --ffn-detectors.
      unembed_anchors: anchor pairs per output detector. Default: --ffn-anchors.
      dropout: dropout rate after attention and tables.
      batch_norm: add batch normalization after attention and tables.
      param_dtype: parameter and activation dtype.
      table_dtype: table dtype. bfloat16 halves their memory and traffic; computation keeps its
        precision. Default: --param-dtype.

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
                f"LUTTransformerConfig: dropout is {self.dropout}; "
                "it must be at least 0 and below 1."
            )
        if self.memory == "counts" and (self.n_position_bits or self.attention != "concatenated"):
            raise ValueError(
                "LUTTransformerConfig: memory is 'counts', n_position_bits is "
                f"{self.n_position_bits} and attention {self.attention!r}; counts have no "
                "positions and require n_position_bits=0 and attention='concatenated'."
            )
        # The specs check the rest.
        from lutjax.layers import specifications

        attention: Any = specifications.LUTPairAttentionSpec
        if self.attention == "concatenated":
            attention = specifications.LUTAttentionSpec
        attention(**self.attention_options())
        for part, options in (("ffn", self.ffn_options()), ("unembed", self.unembed_options())):
            names = {"n_anchors": f"{part}_anchors", "n_detectors": f"{part}_detectors"}
            self._check_spec(specifications.LUTSpec, options, **names)

    def attention_options(self) -> dict[str, Any]:
        """Options for each attention layer."""
        interleave = {}
        if self.attention != "concatenated":
            interleave = {"interleave": self.attention == "pair_interleaved"}
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
        """Options for each layer's tables."""
        return self._table_options(self.features, self.ffn_detectors, self.ffn_anchors)

    def unembed_options(self) -> dict[str, Any]:
        """Options for the unembedding tables."""
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
        """Return the config for fields from `to_dict`."""
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {"table_dtype": None, "memory": "window", **fields}  # older configs have none
        for what, names in (("unknown", set(fields) - known), ("missing", known - set(fields))):
            if names:
                raise ValueError(
                    f"LUTTransformerConfig: {what} fields {sorted(names)}; "
                    f"the fields are {sorted(known)}."
                )
        return super().from_dict(fields)
