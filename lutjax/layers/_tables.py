"""Lookup-table layers for all libraries: arguments, variables, forward pass and decoding."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

import lutjax
from lutjax import _meshes
from lutjax._typing import Array, Integer
from lutjax.arguments import format_value
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _counts, _pages
from lutjax.layers._spec import (
    Arrays,
    Example,
    Initializer,
    Op,
    Spec,
    Variable,
    names_layer,
    plain_call,
)
from lutjax.ops import _checks, _edges
from lutjax.ops._checks import MAX_BITS, accumulation
from lutjax.values._anchors import check_anchors, check_targets, draw_anchors
from lutjax.values._dtypes import accumulator
from lutjax.values._edges import Edges, check_bounds, check_ids
from lutjax.values._ids import as_int32, is_concrete

TARGET_LISTS = ("row", "table", "layer")
CACHED = ("keys", "ids", "counts")


def uniform_positions(
    key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Return positions sampled from uniform(-1, 1), so bits start at 0 and at 1 equally often."""
    return jax.random.uniform(key, shape, dtype, -1, 1)


@dataclasses.dataclass(unsafe_hash=True)
class TableSpec(Spec):
    """Base spec for layers that add table rows."""

    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None

    given: ClassVar[tuple[str, ...]] = ("anchors",)

    def __post_init__(self) -> None:
        self._check_features()
        self._require_sizes(1, "n_detectors")
        self._require_sizes(0, "n_anchors")
        if not self.epsilon >= 0:
            raise self._error(f"epsilon is {self.epsilon}; the dead zone cannot be negative.")
        accumulation(self.layer, self.accumulate)
        self._normalize_dtypes()
        # Before anything counts the rows: 2**row_bits may be too large for any array.
        if self.row_bits > MAX_BITS:
            raise self._error(
                f"{self._most_bits()}, so a table has 2**{self.row_bits} rows; "
                f"at most 2**{MAX_BITS} are possible. Use fewer anchors, "
                "and more detectors if needed."
            )
        self._check_sizes()
        self._check_inputs()

    def _most_bits(self) -> str:
        return f"n_anchors is {self.n_anchors}"

    def _check_features(self) -> None:
        """Check the input and output sizes."""

    def _check_sizes(self) -> None:
        """Check the arguments added by a subclass."""

    def _check_inputs(self) -> None:
        """Check that detectors have enough inputs to compare."""

    @property
    def n_inputs(self) -> int:
        raise NotImplementedError

    @property
    def n_outputs(self) -> int:
        raise NotImplementedError

    @property
    def n_tables(self) -> int:
        """Number of detectors in all groups, each with one table."""
        return self.n_detectors

    @property
    def row_bits(self) -> int:
        """Bits of a row address: a table has ``2**row_bits`` rows."""
        return self.n_anchors

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (self.n_tables, 2**self.row_bits, self.n_outputs)

    def _draw_anchors(self, key: Array) -> jax.Array:
        return draw_anchors(key, self.n_inputs, self.n_tables, self.n_anchors, where=self.layer)

    def variables(self) -> tuple[Variable, ...]:
        shape = (self.n_tables, self.n_anchors, 2)
        anchors = Variable("anchors", "anchors", shape, jnp.dtype("int32"), self._draw_anchors)
        return (
            anchors,
            self._trained_variable("weights", self.weights_shape, self.weights_init, "tables"),
        )

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        if variable.kind == "anchors":
            check_anchors(arrays[variable.name], self.n_inputs, where=self.layer)
        elif variable.kind == "targets":
            check_targets(arrays[variable.name], self.n_outputs, where=self.layer)

    @property
    def _options(self) -> dict[str, Any]:
        return {"epsilon": self.epsilon, **self._sums}

    @property
    def _sums(self) -> dict[str, Any]:
        return {"accumulate": self.accumulate, "implementation": self.implementation}


@dataclasses.dataclass(unsafe_hash=True)
class _TableSpec(TableSpec):
    """Base spec for layers that add table rows over a vector."""

    in_features: int
    out_features: int

    min_rank: ClassVar[int] = 1  # least number of axes of the inputs
    call: ClassVar[Callable[..., Any]] = plain_call

    def _check_features(self) -> None:
        self._require_sizes(1, "in_features", "out_features")

    def _check_inputs(self) -> None:
        if self.n_anchors and self.n_inputs < 2:
            raise self._error(
                f"in_features is {self.in_features}; a detector compares two different inputs, "
                "so there must be at least 2."
            )

    @property
    def n_inputs(self) -> int:
        return self.in_features

    @property
    def n_outputs(self) -> int:
        return self.out_features

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        weights, anchors = np.shape(arrays["weights"]), np.shape(arrays["anchors"])
        if len(weights) != 3 or len(anchors) != 3:
            return {}
        return {"n_detectors": weights[0], "n_anchors": anchors[1], "out_features": weights[2]}

    def _inputs(self, x: Any, name: str = "x") -> Any:
        self._require_features(x, self.in_features, self.min_rank, name)
        return self._cast(x)


@dataclasses.dataclass(unsafe_hash=True)
class LUTSpec(_TableSpec):
    """Fully connected lookup tables: ``y = lutjax.lut(x, weights, anchors)``.

    Each detector compares `n_anchors` pairs of inputs. The comparison bits select a row of its
    table, and the output is the sum of the selected rows. There is no bias, because a constant
    input selects rows too. With `groups`, each group has its own inputs and outputs.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_features]``, initially zeros; with
        `groups` ``[..., out_features / groups]``.
      anchors: int32 input ids ``[n_detectors, n_anchors, 2]``.

    Args:
      in_features, out_features: number of inputs and outputs.
      n_detectors: number of detectors, each with one table.
      n_anchors: number of anchor pairs per detector.
      epsilon: half-width of the comparison dead zone.
      dtype: output dtype, to which inputs are cast. Rows are read in the table dtype and summed in
        at least float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are
        widened in a copy. None: inputs are not cast, and the output has the table dtype.
      param_dtype: table dtype: float32, bfloat16, float16 or float64.
      weights_init: table initializer, as in `jax.nn.initializers`.
      accumulate: fixed-point accumulation, with order-independent results; see `lutjax.FixedPoint`.
      implementation: implementation of the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of random ones.
      groups: number of groups; anchors are input ids within a group.

    Raises:
      ValueError: a size is impossible, groups do not divide a size, or an anchor is not an input.

    Source: docs/semantics.md, section 3.
    """

    _: dataclasses.KW_ONLY
    groups: int | None = None

    example: ClassVar[Example] = ("8, 4, n_detectors=16, n_anchors=6", (32, 8), (32, 4))
    op: ClassVar[Op] = staticmethod(lutjax.lut)

    def _check_sizes(self) -> None:
        if self.groups is None:
            return
        self._require_sizes(1, "groups")
        for name in ("in_features", "out_features", "n_detectors"):
            if getattr(self, name) % self.groups:
                raise self._error(
                    f"groups is {self.groups}; it must divide {name}, {getattr(self, name)}."
                )
        if self.n_anchors and self.n_inputs < 2:
            raise self._error(
                f"groups is {self.groups} and in_features is {self.in_features}; "
                "a detector compares two different inputs of its group, "
                "so there must be at least 2 for each."
            )

    @property
    def n_inputs(self) -> int:
        return self.in_features // (self.groups or 1)

    @property
    def n_outputs(self) -> int:
        return self.out_features // (self.groups or 1)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        sizes = super().sizes_of(arrays)
        if "out_features" in sizes:
            sizes["out_features"] *= self.groups or 1
        return sizes

    @names_layer
    def run(self, op: Op, x: Any, weights: Any, anchors: Any, **others: Any) -> jax.Array:
        """Check and cast inputs and tables, run an op, and concatenate outputs of groups."""
        x, weights, options = self._inputs(x), self._cast_tables(weights), others | self._options
        if self.groups is None:
            return self._cast_sums(op(x, weights, anchors, **options))
        x = _meshes.reshape_unsharded(x, x.ndim - 1, self.groups, self.n_inputs)
        y = op(x, weights, anchors, groups=self.groups, **options)
        return self._cast_sums(y).reshape(*y.shape[:-2], self.out_features)


class _WithTargets(TableSpec):
    """Spec for layers with row targets; `targets_shape` is the shape of explicit targets."""

    n_targets: int | None
    targets_per: str
    targets_shape: tuple[int, ...] | None

    @classmethod
    def infer_fields(cls, explicit: Arrays) -> dict[str, Any]:
        return {"targets_shape": np.shape(explicit["targets"])} if "targets" in explicit else {}

    def _check_targets(self) -> None:
        if self.n_targets is not None and self.targets_shape is not None:
            raise self._error(
                "give either n_targets, to draw the targets, or the targets themselves."
            )
        self._require_one_of("targets_per", TARGET_LISTS)
        if self.n_targets is not None:
            self._require_sizes(1, "n_targets")
            if self.n_targets > self.n_outputs:
                raise self._error(
                    f"n_targets is {self.n_targets}; there are only {self.n_outputs} outputs "
                    "to draw from without replacement."
                )
        shape, n_tables, n_rows = self._targets_shape, self.n_tables, 2**self.row_bits
        if shape is None:
            return
        if len(shape) != 3 or shape[0] not in (1, n_tables) or shape[1] not in (1, n_rows):
            raise self._error(
                f"targets has shape {list(shape)}; "
                f"expected [{n_tables} or 1, {n_rows} or 1, targets]."
            )

    @property
    def _targets_shape(self) -> tuple[int, ...] | None:
        """Shape of the targets; None if rows reach all outputs."""
        if self.targets_shape is not None:
            return self.targets_shape
        if self.n_targets is None:
            return None
        tables = 1 if self.targets_per == "layer" else self.n_detectors
        rows = 2**self.row_bits if self.targets_per == "row" else 1
        return (tables, rows, self.n_targets)

    @property
    def weights_shape(self) -> tuple[int, ...]:
        n_slots = self.n_outputs if self._targets_shape is None else self._targets_shape[-1]
        return (self.n_tables, 2**self.row_bits, n_slots)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        sizes = super().sizes_of(arrays)
        if self._targets_shape is None:
            return sizes
        # Targets choose among the outputs, and do not say how many there are.
        sizes.pop("out_features", None)
        targets = np.shape(arrays["targets"])
        if targets != self._targets_shape:
            sizes.update(n_targets=None, targets_shape=targets)
        return sizes

    def variables(self) -> tuple[Variable, ...]:
        shape = self._targets_shape
        if shape is None:
            return super().variables()

        def draw(key: Array) -> jax.Array:
            # The top k of uniform samples, one per output, are k distinct outputs.
            numbers = jax.random.uniform(key, (*shape[:2], self.n_outputs))
            return jax.lax.top_k(numbers, shape[2])[1].astype(jnp.int32)

        anchors, weights = super().variables()
        return (anchors, Variable("targets", "targets", shape, jnp.dtype("int32"), draw), weights)


@dataclasses.dataclass(unsafe_hash=True)
class SparseLUTSpec(_WithTargets, LUTSpec):
    """Lookup tables whose rows reach only some outputs: `lutjax.sparse_lut`.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, n_targets]``, initially zeros; with an edge
        list ``[edges]``.
      anchors: int32 input ids ``[n_detectors, n_anchors, 2]``.
      targets: int32 output ids ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``, -1 for an
        unused slot; with an edge list ``[edges]``.
      first_edges: int32 ``[n_detectors * 2**n_anchors + 1]``, the first edge of each row, only with
        an edge list.

    Args:
      in_features, out_features, n_detectors, n_anchors, epsilon, dtype, param_dtype, weights_init,
        accumulate, implementation, anchors: as in `LUT`.
      groups: as in `LUT`; targets are output ids within a group.
      n_targets: number of outputs per row, sampled without replacement.
      targets_per: unit with its own list of targets: each ``"row"``, each ``"table"``, or the whole
        ``"layer"``.
      targets: explicit targets instead of `n_targets`, or an edge list from
        `lutjax.wiring.from_edges`, with any number of targets per row.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor
        -1.

    Source: docs/semantics.md, section 4.
    """

    _: dataclasses.KW_ONLY
    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None

    example = ("8, 100, n_detectors=16, n_anchors=3, n_targets=5", (32, 8), (32, 100))
    op = staticmethod(lutjax.sparse_lut)

    targets_shape: tuple[int, ...] | None = None
    edge_sizes: tuple[int, int, int, int] | None = None  # detectors, rows, outputs, width

    given: ClassVar[tuple[str, ...]] = ("anchors", "targets")
    implied: ClassVar[tuple[str, ...]] = ("targets_shape", "edge_sizes")

    @classmethod
    def arrays_of(cls, explicit: Arrays) -> Arrays:
        edges = explicit.get("targets")
        if not isinstance(edges, Edges):
            return explicit
        return {**explicit, "targets": edges.target, "first_edges": edges.first}

    @classmethod
    def infer_fields(cls, explicit: Arrays) -> dict[str, Any]:
        edges = explicit.get("targets")
        if isinstance(edges, Edges):
            sizes = edges.n_detectors, edges.n_rows, edges.n_outputs, edges.width
            return {"targets_shape": (edges.size,), "edge_sizes": sizes}
        return super().infer_fields(explicit)

    def _check_targets(self) -> None:
        if self.edge_sizes is None:
            super()._check_targets()
        elif self.n_targets is not None:
            raise self._error(
                "give either n_targets, to draw the targets, or the targets themselves."
            )
        sizes = self.n_tables, 2**self.row_bits, self.n_outputs
        if self.edge_sizes is not None and self.edge_sizes[:3] != sizes:
            raise self._error(
                f"the edges of targets are those of {self.edge_sizes[0]} detectors "
                f"of {self.edge_sizes[1]} rows and of {self.edge_sizes[2]} outputs; "
                f"this layer has {sizes[0]}, {sizes[1]} and {sizes[2]}."
            )

    @property
    def weights_shape(self) -> tuple[int, ...]:
        if self.edge_sizes is None:
            return super().weights_shape
        return self._targets_shape or (0,)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        if self.edge_sizes is None:
            return super().sizes_of(arrays)
        anchors, targets = np.shape(arrays["anchors"]), np.shape(arrays["targets"])
        if len(anchors) != 3:
            return {}
        edge_sizes = anchors[0], 2 ** anchors[1], *self.edge_sizes[2:]
        sizes = {"n_detectors": anchors[0], "n_anchors": anchors[1]}
        return {**sizes, "targets_shape": targets, "edge_sizes": edge_sizes}

    def variables(self) -> tuple[Variable, ...]:
        if self.edge_sizes is None:
            return super().variables()
        anchors, targets, weights = super().variables()
        n_bounds = self.n_tables * 2**self.row_bits + 1

        def refuse(key: Array) -> jax.Array:
            raise self._error("a list of edges is given, and not drawn.")

        first = Variable("first_edges", "targets", (n_bounds,), jnp.dtype("int32"), refuse)
        return (anchors, targets, first, weights)

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        if self.edge_sizes is None or variable.kind != "targets":
            super()._check_values(variable, arrays)
        elif variable.name == "targets":
            check_ids(
                self.layer, "target", np.asarray(arrays["targets"]), self.n_outputs, "outputs"
            )
        else:
            n_edges = (self._targets_shape or (0,))[0]
            check_bounds(self.layer, np.asarray(arrays["first_edges"]), n_edges)

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.n_targets is None and self.targets_shape is None:
            raise self._error(
                "give either n_targets, to draw the targets, or the targets themselves."
            )
        self._check_targets()

    def run(self, op: Op, x: Any, weights: Any, anchors: Any, **others: Any) -> jax.Array:
        """Run an op with targets or an edge list."""
        targets = others["targets"]
        if self.edge_sizes is not None:
            targets = Edges(others["first_edges"], targets, *self.edge_sizes)
        return super().run(op, x, weights, anchors, targets=targets, n_outputs=self.n_outputs)


def attention_call(
    self: Any,
    x: Float[Array, "*batch queries inputs"],
    keys: Float[Array, "*batch keys inputs"] | None = None,
    *,
    segments: Int[Array, "*#batch queries"] | None = None,
    key_segments: Int[Array, "*#batch keys"] | None = None,
    query_start: Integer | Int[Array, "*#batch"] | None = None,
    key_start: Integer | Int[Array, "*#batch"] | None = None,
    block_mask: Bool[Array, "_ _"] | None = None,
    block_sizes: tuple[int, int] | int | None = None,
    block_tables: Int[Array, "*#batch entries"] | None = None,
    lengths: Int[Array, "*#batch"] | None = None,
    decode: bool | None = None,
) -> Float[jax.Array, "*batch queries outputs"]:
    """Return outputs ``[..., length, out_features]`` for inputs ``[..., length, in_features]``.

    Segments, starts and blocks are as in `lutjax.lookup_attention`; negative segments mark padding.
    With `decode`, `x` continues the cached positions. In a block pool, position ``p`` is at
    ``p % size`` in block ``block_tables[..., p // size % M]``, -1 for none; new positions, followed
    by padding, need blocks of their own.
    """
    others = {
        "segments": segments, "key_segments": key_segments, "query_start": query_start,
        "key_start": key_start, "block_mask": block_mask, "block_sizes": block_sizes,
        "block_tables": block_tables, "lengths": lengths,
    }  # fmt: skip
    y: jax.Array = self._attend(x, decode, keys=keys, **others)
    return y


@dataclasses.dataclass(unsafe_hash=True)
class _SequenceSpec(_WithTargets, _TableSpec):
    """Base spec for both kinds of attention: positions, window, segments and the cache."""

    # Last dimension and dtype of each cached array; arrays that attention reads for each position
    # in `x`, by their cache names; attention from queries to keys, given as such arrays.
    _cache_entries: ClassVar[Callable[..., dict[str, tuple[int, Any]]]]
    _keys: ClassVar[Callable[..., dict[str, jax.Array]]]
    _attend: ClassVar[Op]

    min_rank: ClassVar[int] = 2

    _: dataclasses.KW_ONLY
    n_positions: int = 0
    n_position_bits: int = 0
    shared_positions: bool = True
    positions_init: Initializer = uniform_positions
    window: int | None = None
    causal: bool = True
    decode: bool = False
    cached: str = "keys"
    blocks: tuple[int, int] | None = None
    pool: int | None = None
    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None
    targets_shape: tuple[int, ...] | None = None

    given: ClassVar[tuple[str, ...]] = ("anchors", "targets")
    implied: ClassVar[tuple[str, ...]] = ("targets_shape",)
    call: ClassVar[Callable[..., Any]] = attention_call

    def _check_sizes(self) -> None:
        self._check_targets()
        self._require_sizes(0, "n_positions", "n_position_bits")
        if self.window is not None:
            self._require_sizes(1, "window")
        if not self.causal and (self.decode or self.window is not None):
            name = "decode" if self.decode else "window"
            raise self._error(
                f"{name} is {getattr(self, name)} but causal is False, "
                f"where a query sees every key; leave out {name}, or use causal=True."
            )
        if self.pool is not None:
            self._require_sizes(1, "pool")
            if self.decode or not self.causal:
                name = "decode" if self.decode else "causal"
                raise self._error(
                    f"pool is {self.pool} and {name} is {getattr(self, name)}; "
                    "blocks of keys are pooled in causal calls that are given all keys."
                )
        self._require_one_of("cached", CACHED)
        if self.cached == "counts":
            self._check_counts()
        self._check_blocks(self.cached, self.blocks)
        if not self.n_position_bits:
            return
        if not self.n_positions:
            raise self._error(
                f"n_position_bits is {self.n_position_bits} but n_positions is 0; "
                "give the number of distances that have a position (context - 1), "
                "or 0 bits for no positions."
            )
        if self.window is not None and self.window > self.n_positions:
            raise self._error(
                f"window is {self.window} but only {self.n_positions} distances have a position; "
                "use a smaller window or a larger n_positions."
            )

    def variables(self) -> tuple[Variable, ...]:
        if not self.n_position_bits:
            return super().variables()
        tables = 1 if self.shared_positions else self.n_detectors
        distances = self.n_positions if self.causal else 2 * self.n_positions + 1
        shape = (distances, tables, self.n_position_bits)
        return (
            *super().variables(),
            self._trained_variable("positions", shape, self.positions_init),
        )

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        sizes, positions = super().sizes_of(arrays), np.shape(arrays.get("positions", ()))
        if len(positions) == 3:
            n_positions = positions[0] if self.causal else positions[0] // 2
            sizes.update(n_positions=n_positions, n_position_bits=positions[2])
        return sizes

    @property
    def capacity(self) -> int:
        if self.pool is not None:
            raise self._error(
                f"pool is {self.pool}, which excludes decoding: a cache has no key blocks."
            )
        if not self.causal:
            raise self._error(
                "causal is False, so there is no decoding: a query also sees later keys."
            )
        capacity = self.n_positions if self.window is None else self.window
        if not capacity:
            raise self._error(
                "decoding must know how far back a query looks: give window or n_positions."
            )
        return capacity

    def _check_counts(self) -> None:
        shape = self._targets_shape
        one_list = 'counted rows have one list of targets; use targets_per="layer"'
        no_rows = "keys have no rows of their own, which could be counted"
        reasons = {
            "cached": (not self._has_counts, no_rows),
            "n_position_bits": (
                self.n_position_bits, "counts do not say at which distance a key is; use 0"
            ),
            "window": (
                self.window is not None, "counts do not say which keys are beyond it; leave it out"
            ),
            "causal": (not self.causal, "a query also sees later keys; use causal=True"),
            "pool": (
                self.pool is not None, "counts do not say in which block a key is; leave it out"
            ),
            "targets": (shape is not None and shape[:2] != (1, 1), one_list),
        }  # fmt: skip
        for name, (wrong, rule) in reasons.items():
            if wrong:
                value = format_value(getattr(self, name))
                if name == "targets":
                    value = str(list(shape or ()))
                raise self._error(f"there is no cache of counts, as {name} is {value}: {rule}.")

    def _check_blocks(self, cached: str, blocks: tuple[int, int] | None) -> None:
        if blocks is None:
            return
        pair = isinstance(blocks, tuple | list) and len(blocks) == 2
        if not (pair and all(isinstance(n, int | np.integer) and n >= 1 for n in blocks)):
            raise self._error(
                f"blocks is {format_value(blocks)}; expected the number of blocks "
                "and the positions of each, both at least 1."
            )
        if cached == "counts":
            raise self._error(
                f"blocks is {format_value(blocks)}, but counts have no positions; use ids."
            )

    @property
    def cache_names(self) -> tuple[str, ...]:
        """Names of the cache variables for keys or ids, and for counts."""
        keys = (*self._cache_entries(jnp.float32), "cached_segments", "cache_index")
        return (*keys, "cached_counts") if self._has_counts else keys

    def empty_cache(
        self, input_shape: tuple[int, ...], dtype: DTypeLike, *, cached: str | None = None,
        blocks: tuple[int, int] | None = None,
    ) -> dict[str, jax.Array]:  # fmt: skip
        """Return a cache without keys, for inputs ``[*batch, any length, in_features]``.

        Keys are right-aligned, the latest last. ``cache_index`` counts the decoded positions, and
        ``cached_segments`` holds the segment of each key, -1 for none. Counts have neither
        positions nor segments. A block pool stores only keys.
        """
        *batch, _, _ = input_shape
        cached = self.cached if cached is None else cached
        blocks = self.blocks if blocks is None else blocks
        self._check_blocks(cached, blocks)
        if cached == "counts":
            self._check_counts()
            shape = (*batch, self.n_detectors, 2**self.n_anchors)
            counts = jnp.zeros(shape, jnp.int32)
            return {"cached_counts": counts, "cache_index": jnp.zeros((), jnp.int32)}
        dtype = jnp.dtype(dtype) if self.dtype is None else self.dtype
        places = (*batch, self.capacity) if blocks is None else tuple(blocks)
        arrays = (self._cached_ids() if cached == "ids" else {}) or self._cache_entries(dtype)
        cache = {name: jnp.zeros((*places, size), dtype) for name, (size, dtype) in arrays.items()}
        if blocks is not None:
            return cache
        segments = jnp.full((*batch, self.capacity), _PADDING, jnp.int32)
        return {**cache, "cached_segments": segments, "cache_index": jnp.zeros((), jnp.int32)}

    @names_layer
    def attend_with_cache(
        self, arrays: Arrays, cache: Arrays, x: Float[Array, "*batch length inputs"],
        segments: Any = None, *, block_tables: Any = None, lengths: Any = None, **others: Any,
    ) -> tuple[Float[jax.Array, "*batch length outputs"], dict[str, jax.Array]]:  # fmt: skip
        """Attend to earlier positions in `x` and the cache; return outputs and the latest cache.

        Filling the cache at once and decoding one by one are equivalent.
        """
        given_names = [name for name, value in others.items() if value is not None]
        if given_names:
            raise self._error(
                f"{given_names[0]} cannot be given when decoding: the cache has the keys."
            )
        for name, value in {"block_tables": block_tables, "lengths": lengths}.items():
            if value is not None and "cache_index" in cache:
                raise self._error(f"{name} is given, but each sequence has a cache of its own.")
            if value is None and "cache_index" not in cache:
                raise self._error(f"{name} is not given, but the cache is a pool of blocks.")
        chunk = self._keys(arrays, self._inputs(x))
        if "cached_counts" in cache:
            return self._attend_to_counts(arrays, cache, chunk, segments)
        if block_tables is not None:
            return self._attend_to_blocks(arrays, cache, chunk, segments, block_tables, lengths)
        capacity, count, (*batch, length, _) = self.capacity, cache["cache_index"], x.shape
        self._check_cache(cache, chunk, (*batch, capacity), "batch and dtype")
        query_segments = self._segments_of(segments, tuple(batch), length)
        y, keys, key_segments = self._attend_to_cached(
            arrays, chunk, cache, cache["cached_segments"], query_segments
        )
        latest = {
            name: array[..., array.shape[-2] - capacity :, :].astype(cache[name].dtype)
            for name, array in keys.items()
            if name in cache
        }
        latest["cached_segments"] = key_segments[..., key_segments.shape[-1] - capacity :]
        return y, {**latest, "cache_index": jnp.minimum(count + length, capacity)}

    def _attend_to_cached(
        self, arrays: Arrays, chunk: Arrays, cached: Arrays, cached_segments: Any,
        query_segments: jax.Array,
    ) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:  # fmt: skip
        """Attend to cached and new keys; return the outputs, all keys and their segments."""
        capacity, keys = self.capacity, {}
        for name, new in chunk.items():
            old = cached.get(name)
            if old is None:  # the cache holds only ids
                old = jnp.zeros((*new.shape[:-2], capacity, new.shape[-1]), new.dtype)
            keys[name] = _append_keys(jnp.asarray(old).astype(new.dtype), new, -2)
        shape = next(iter(chunk.values())).shape[:-1]
        key_segments = _append_keys(cached_segments, jnp.broadcast_to(query_segments, shape), -1)
        # Padding queries get a segment without keys.
        queries = jnp.where(query_segments == _PADDING, _PADDING - 1, query_segments)
        segments = {"query_segments": queries, "key_segments": key_segments}
        # Keys are right-aligned, so new queries come directly after a full cache, whatever it
        # holds.
        starts = {"window": capacity, "query_start": capacity, "key_start": 0}
        return self._attend(arrays, chunk, keys, **starts, **segments), keys, key_segments

    def _attend_to_blocks(
        self,
        arrays: Arrays,
        cache: Arrays,
        chunk: Arrays,
        segments: Any,
        block_tables: Any,
        lengths: Any,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        *batch, length, _ = next(iter(chunk.values())).shape
        n_blocks, size = next(iter(cache.values())).shape[:2]
        dtypes = self._check_cache(cache, chunk, (n_blocks, size), "dtype")
        tables = self._tables_of(block_tables, lengths, tuple(batch))
        places = _pages.Places(*tables, n_blocks, size)
        if places.n_positions < self.capacity:
            raise self._error(
                f"block_tables is {list(block_tables.shape)} with blocks of {size}, "
                f"so a sequence has {places.n_positions} places, "
                f"but a query sees {self.capacity} keys; "
                f"give tables of at least {-(-self.capacity // size)} entries, "
                "-1 where there is no block."
            )
        self._check_one_segment(segments, "a pool of blocks")
        query_segments = self._segments_of(segments, tuple(batch), length)
        # A pool has no segments: stored keys are in segment 0, and so are all queries but padding.
        at, is_stored = places.latest(self.capacity)
        cached = {name: _pages.read(cache[name], at) for name in dtypes}
        cached_segments = jnp.where(is_stored, 0, _PADDING).astype(jnp.int32)
        y, _, _ = self._attend_to_cached(
            arrays, chunk, cached, cached_segments, jnp.minimum(query_segments, 0)
        )
        is_key = jnp.broadcast_to(query_segments > _PADDING, (*batch, length))
        new = places.new_indices(is_key)
        return y, {name: _pages.write_values(cache[name], new, chunk[name]) for name in dtypes}

    def _tables_of(
        self, block_tables: Any, lengths: Any, batch: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        n_entries = block_tables.shape[-1] if np.ndim(block_tables) else 0
        arrays = []
        tables = ("block_tables", block_tables, (*batch, n_entries))
        for name, value, shape in (tables, ("lengths", lengths, batch)):
            _checks.integers(self.layer, name, value, None, "")
            axes = zip(reversed(value.shape), reversed(shape), strict=False)
            fits = value.ndim <= len(shape) and all(a in (1, b) for a, b in axes)
            if not fits or not n_entries:
                sizes = [*map(str, batch), *["entries"] * (name == "block_tables")]
                raise self._error(
                    f"{name} is {value.dtype}{list(value.shape)}; "
                    f"expected [{', '.join(sizes)}], one of each sequence."
                )
            value = as_int32(value)
            value = value.reshape((1,) * (len(shape) - value.ndim) + value.shape)
            arrays.append(jnp.broadcast_to(value, shape))
        return arrays[0], arrays[1]

    def _check_one_segment(self, segments: Any, what: str) -> None:
        if segments is not None and is_concrete(segments) and np.any(np.asarray(segments) > 0):
            raise self._error(
                f"segments has ids up to {np.max(np.asarray(segments))}; "
                f"{what} holds keys of segment 0 alone, with negative ids for padding. "
                "Use a cache of ids of its own for each sequence."
            )

    def _segments_of(self, segments: Any, batch: tuple[int, ...], length: int) -> jax.Array:
        """Return segments of new positions for the cache, without batch dimensions if not given."""
        if segments is None:
            return jnp.zeros((1,) * len(batch) + (length,), jnp.int32)
        names = ("segments", "segments")
        ids, _ = _checks.segments(self.layer, segments, segments, batch, length, length, names)
        return jnp.maximum(jnp.asarray(ids), _PADDING)

    def _attend_to_counts(
        self, arrays: Arrays, cache: Arrays, chunk: Arrays, segments: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        index = chunk["cached_key_index"]
        *batch, length, n_detectors = index.shape
        counts, expected = cache["cached_counts"], (*batch, n_detectors, 2**self.n_anchors)
        if counts.shape != expected or counts.dtype != jnp.int32:
            raise self._error(
                f"cached_counts is {counts.dtype}{list(counts.shape)}; "
                f"these inputs need int32{list(expected)}. Make the cache for this batch."
            )
        query_segments = self._segments_of(segments, tuple(batch), length)
        self._check_one_segment(segments, "a cache of counts")
        is_key = jnp.broadcast_to(query_segments > _PADDING, (*batch, length))
        weights, targets = self._cast_tables(arrays["weights"]), arrays.get("targets")
        # All rows share one list of targets, so outputs are spread over them once, after the sums.
        n_outputs = None if targets is None else self.n_outputs
        _, finish = _edges.split_row_targets(self.layer, weights, targets, n_outputs)
        y, counts = _counts.attend_counts(weights, counts, index, is_key, **self._sums)
        # The count saturates: it must not wrap to negative positions.
        count = jnp.minimum(cache["cache_index"], np.iinfo(np.int32).max - length) + length
        return self._cast_sums(finish(y)), {"cached_counts": counts, "cache_index": count}

    def _check_cache(
        self, cache: Arrays, chunk: Arrays, places: tuple[int, ...], of: str
    ) -> dict[str, Any]:
        """Raise ValueError if a cache does not fit new keys; return dtypes of its key arrays."""
        dtypes = {name: jnp.dtype(new.dtype) for name, new in chunk.items() if name in cache}
        if len(dtypes) < len(chunk):
            dtypes = {name: jnp.dtype(dtype) for name, (_, dtype) in self._cached_ids().items()}
        for name, dtype in dtypes.items():
            array, expected = cache[name], (*places, chunk[name].shape[-1])
            if array.shape != expected or array.dtype != dtype:
                raise self._error(
                    f"{name} is {array.dtype}{list(array.shape)}; "
                    f"these inputs need {dtype}{list(expected)}. Make the cache for this {of}."
                )
        return dtypes

    @names_layer
    def run(
        self, op: Op, x: Any, keys: Any = None, *, segments: Any = None, key_segments: Any = None,
        query_start: Any = None, key_start: Any = None, block_mask: Any = None,
        block_sizes: Any = None, block_tables: Any = None, lengths: Any = None, **arrays: Any,
    ) -> jax.Array:  # fmt: skip
        """Attend without a cache; the op runs on a sequence that attends to itself."""
        for name, value in {"block_tables": block_tables, "lengths": lengths}.items():
            if value is not None:
                raise self._error(
                    f"{name} is given, but the call does not decode; it is of caches alone."
                )
        blocks = {"block_mask": block_mask, "block_sizes": block_sizes}
        if self.pool is not None and block_mask is not None:
            raise self._error(f"block_mask is given, but pool is {self.pool}; leave one out.")
        if keys is None:
            others = {
                "key_segments": key_segments, "query_start": query_start, "key_start": key_start
            }  # fmt: skip
            for name, value in others.items():
                if value is not None:
                    raise self._error(
                        f"{name} is given but keys is not; a layer attends to x itself."
                    )
            if self.pool is not None:
                own = self._keys(arrays, self._inputs(x))
                return self._pool(arrays, own, own, (segments, segments), (0, 0))
            return self._run_op(
                op, arrays, self._inputs(x), segments=segments, **blocks, **self._sight
            )
        starts = {"query_start": query_start, "key_start": key_start}
        for name, value in starts.items():
            if value is not None and not self.causal:
                raise self._error(
                    f"{name} is given but causal is False, where every query sees every key."
                )
        starts = {name: 0 if value is None else value for name, value in starts.items()}
        of_queries = self._keys(arrays, self._inputs(x))
        of_keys = self._keys(arrays, self._inputs(keys, "keys"))
        if self.pool is not None:
            return self._pool(
                arrays, of_queries, of_keys, (segments, key_segments), tuple(starts.values())
            )
        options = {"query_segments": segments, "key_segments": key_segments, **blocks}
        options |= self._sight | (starts if self.causal else {})
        return self._attend(arrays, of_queries, of_keys, **options)

    def _pool(
        self, arrays: Arrays, queries: Arrays, keys: Arrays, segments: Any, starts: tuple[Any, ...]
    ) -> jax.Array:
        """Return sums over key blocks, each the mean of its visible rows."""
        # Each block is a sequence with its own start; remaining keys form another block.
        assert self.pool is not None
        n_queries, n_keys = (next(iter(of.values())).shape[-2] for of in (queries, keys))
        whole = n_keys // self.pool
        # First key, number of blocks and block size: of the whole blocks, and of the rest.
        parts = [(0, whole, self.pool), (whole * self.pool, 1, n_keys - whole * self.pool)]
        parts = [part for part in parts if part[1] * part[2]] or [(0, 1, 0)]
        query_start, key_start = (jnp.asarray(start, jnp.int32)[..., None] for start in starts)
        sums: list[jax.Array] = []
        for first, n, size in parts:

            def in_blocks(
                a: Any, axis: int, first: int = first, n: int = n, size: int = size
            ) -> jax.Array:
                own = jax.lax.slice_in_dim(jnp.asarray(a), first, first + n * size, axis=axis)
                at = own.ndim + axis
                return own.reshape(*own.shape[:at], n, size, *own.shape[at + 1 :])

            def for_blocks(a: jax.Array, n: int = n) -> jax.Array:
                return jnp.broadcast_to(a[..., None, :, :], (*a.shape[:-2], n, *a.shape[-2:]))

            # Positions of the first keys of blocks, [..., n], and the distance of a query to a key
            # minus 1, [..., n, queries, size]: a query sees earlier keys within the window.
            offsets = first + size * np.arange(n, dtype=np.int32)
            block_start = operator.add(*_equal_ranks(key_start, offsets))
            distance = np.arange(n_queries, dtype=np.int32)[:, None] - np.arange(
                size, dtype=np.int32
            )
            start = operator.sub(*_equal_ranks(query_start, block_start))[..., None, None]
            is_visible = operator.add(*_equal_ranks(start, distance - 1)) >= 0
            if self.window is not None:
                is_visible &= operator.add(*_equal_ranks(start, distance - 1)) < self.window
            block_segments: dict[str, Any] = {"query_segments": None, "key_segments": None}
            if segments[0] is not None:
                own, others = jnp.asarray(segments[0])[..., None, :], in_blocks(segments[1], -1)
                same = own[..., :, None] == others[..., None, :]
                own = jnp.broadcast_to(own, (*own.shape[:-2], n, n_queries))
                block_segments = {"query_segments": own, "key_segments": others}
                is_visible = operator.and_(*_equal_ranks(is_visible, same))
            y = self._attend(
                arrays,
                {name: for_blocks(a) for name, a in queries.items()},
                {name: in_blocks(a, -2) for name, a in keys.items()},
                **block_segments, query_start=query_start, key_start=block_start,
                window=self.window,
            )  # fmt: skip
            # Attention adds rows; a mean over the visible keys makes blocks comparable.
            n_seen = jnp.maximum(jnp.sum(is_visible, -1), 1)[..., None].astype(y.dtype)
            sums.append(jnp.sum(operator.truediv(*_equal_ranks(y, n_seen)), -3, dtype=y.dtype))
        return functools.reduce(operator.add, sums)

    def _edges(self, arrays: Arrays) -> dict[str, Any]:
        if "targets" not in arrays:
            return {}
        return {"targets": arrays["targets"], "n_outputs": self.n_outputs}

    @property
    def _sight(self) -> dict[str, Any]:
        return {"window": self.window} if self.causal else {"causal": False}

    def _tables(self, arrays: Arrays, n_keys: int) -> tuple[Any, Any]:
        """Return tables and positions; without causality, positions start at the last key."""
        weights = self._cast_tables(arrays["weights"])
        positions = self._cast(arrays.get("positions"))
        if self.causal or positions is None:
            return weights, positions
        if n_keys > self.n_positions + 1:
            raise self._error(
                f"there are {n_keys} keys, but n_positions is {self.n_positions}, "
                "for at most one more; use a larger n_positions."
            )
        return weights, positions[self.n_positions + 1 - n_keys :]

    def _run_op(self, op: Op, arrays: Arrays, x: Any, **sight: Any) -> jax.Array:
        weights, positions = self._tables(arrays, sight.get("keys", x).shape[-2])
        options = {**self._edges(arrays), **sight, **self._options}
        return self._cast_sums(op(x, weights, arrays["anchors"], positions, **options))

    def _cached_ids(self) -> dict[str, tuple[int, Any]]:
        """Return the same for a cache of ids; nothing if keys are not detected independently."""
        return {}

    @property
    def _has_counts(self) -> bool:
        """Whether keys are detected independently, so that they can be counted."""
        return bool(self._cached_ids())


def _equal_ranks(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """Prepend axes of size 1 to the array with fewer axes."""
    rank = max(np.ndim(a), np.ndim(b))
    one, other = (jnp.asarray(x).reshape((1,) * (rank - np.ndim(x)) + np.shape(x)) for x in (a, b))
    return one, other


_PADDING = -1
"""Segment of padding and empty cache slots."""


def _append_keys(cache: Array, new: Array, axis: int) -> jax.Array:
    """Append new keys to a cache along an axis, with its sharding on a mesh with explicit axes."""
    append = _meshes.shard_by_compiler(
        lambda *keys: jnp.concatenate(keys, axis), lambda cache, new: _meshes.spec_of(cache)
    )
    return append(cache, new)


@dataclasses.dataclass(unsafe_hash=True)
class LUTAttentionSpec(_SequenceSpec):
    """Concatenated lookup-table attention, with one row per position pair: `lutjax.lut_attention`.

    A pair's row address concatenates the bits of the query, the key and their distance. Outputs are
    sums over the visible keys. There are no heads: use more detectors.

    Variables:
      weights: trained, ``[n_detectors, 2**(2 * n_anchors + n_position_bits), outputs]``, zeros.
      targets, anchors: as in `SparseLUT`, for these rows; targets only if given or drawn.
      positions: trained, ``[n_positions, 1 or n_detectors, n_position_bits]``; with
        ``causal=False`` ``[2 * n_positions + 1, ...]``, the farthest later key first.
      cached_..., cache_index: latest keys, only for decoding.

    Args:
      in_features, out_features, n_detectors, epsilon, dtype, param_dtype, weights_init, accumulate,
        implementation, anchors: as in `LUT`.
      n_anchors: number of anchor pairs per detector, the same for queries and keys.
      n_positions: largest distance with a position; the longest sequence is one longer.
      n_position_bits: number of position bits; 0: no positions.
      shared_positions, positions_init: whether all detectors share positions, and an initializer.
      window, causal: earlier positions visible to a query, by default all; whether only these are.
      decode: whether calls continue a sequence, with earlier keys in a cache.
      cached: cache contents. ``"keys"``: everything needed for gradients. ``"ids"``: row ids, one
        or two bytes per detector instead of twelve. ``"counts"``: key count per row, for any length
        without positions, window and pool. Ids and counts omit gradients to earlier keys.
      blocks: number and size of blocks in a key pool for all sequences.
      pool: key block size: outputs are sums over blocks of the mean visible row.
      n_targets, targets_per, targets: as in `SparseLUT`; all outputs by default.

    Raises:
      ValueError: a size is impossible, or an anchor or target is out of range.

    Source: docs/semantics.md, section 5.
    """

    example = (
        "8, 6, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2",
        (4, 32, 8),
        (4, 32, 6),
    )
    op = staticmethod(lutjax.lut_attention)

    @property
    def row_bits(self) -> int:
        return 2 * self.n_anchors + self.n_position_bits

    def _most_bits(self) -> str:
        return f"n_anchors is {self.n_anchors} and n_position_bits is {self.n_position_bits}"

    def _cache_entries(self, dtype: Any) -> dict[str, tuple[int, Any]]:
        dtypes = {"index": jnp.int32, "flip": jnp.int32, "margin": accumulator(dtype)}
        return {f"cached_key_{name}": (self.n_detectors, kind) for name, kind in dtypes.items()}

    def _cached_ids(self) -> dict[str, tuple[int, Any]]:
        bits = self.n_anchors
        # The narrowest dtype that holds an id: a cache of ids is as small as possible.
        dtype = jnp.uint8 if bits <= 8 else jnp.uint16 if bits <= 16 else jnp.int32
        return {"cached_key_index": (self.n_detectors, dtype)}

    def _keys(self, arrays: Arrays, x: Any) -> dict[str, jax.Array]:
        d = lutjax.detect(x, arrays["anchors"], **self._options)
        arrays = {"index": d.index, "flip": d.flip, "margin": d.margin}
        return {f"cached_key_{name}": array for name, array in arrays.items()}

    def _attend(self, arrays: Arrays, queries: Arrays, keys: Arrays, **places: Any) -> jax.Array:
        weights, positions = self._tables(arrays, keys["cached_key_index"].shape[-2])
        names = ("index", "flip", "margin")
        query, key = (
            lutjax.Detection(**{n: d[f"cached_key_{n}"] for n in names}, bits=self.n_anchors)
            for d in (queries, keys)
        )
        position = None if positions is None else lutjax.detect_signs(positions)
        options = {**self._edges(arrays), **self._sums, **places}
        return self._cast_sums(lutjax.lookup_attention(weights, query, key, position, **options))


@dataclasses.dataclass(unsafe_hash=True)
class LUTPairAttentionSpec(_SequenceSpec):
    """Lookup-table attention that detects each position pair jointly: `lutjax.lut_pair_attention`.

    Anchors compare values in the joint vector
    ``[earlier position, later position, position of their distance]``, concatenated or interleaved.
    With ``causal=False``, "earlier" means the key and "later" the query. Outputs are sums.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_features or n_targets]``, initially zeros.
      targets, positions: as in `LUTAttention`.
      anchors: int32 ids in the joint vector, ``[n_detectors, n_anchors, 2]``.
      cached_x, cached_segments, cache_index: latest inputs, only for decoding.

    Args:
      in_features, out_features, n_detectors, n_anchors, epsilon, dtype, param_dtype, weights_init,
        accumulate, implementation, anchors: as in `LUT`.
      n_positions, n_position_bits, shared_positions, positions_init, window, causal, decode,
        blocks, pool: as in `LUTAttention`.
      n_targets, targets_per, targets: as in `LUTAttention`.
      cached: ``"keys"``. ``"ids"`` changes nothing, as keys have no separate rows.
      interleave: whether the joint vector alternates between values from each part, which needs
        ``n_position_bits == in_features``.

    Raises:
      ValueError: a size is impossible, or an anchor is not in the joint vector.

    Source: docs/semantics.md, section 6.
    """

    _: dataclasses.KW_ONLY
    interleave: bool = False

    example = (
        "8, 6, n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4",
        (4, 32, 8),
        (4, 32, 6),
    )
    op = staticmethod(lutjax.lut_pair_attention)

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.interleave and self.n_position_bits != self.in_features:
            raise self._error(
                f"interleave needs as many positional bits as inputs, but n_position_bits is "
                f"{self.n_position_bits} and in_features is {self.in_features}."
            )

    @property
    def n_inputs(self) -> int:
        return 2 * self.in_features + self.n_position_bits

    @property
    def _options(self) -> dict[str, Any]:
        return super()._options | {"interleave": self.interleave}

    def _cache_entries(self, dtype: Any) -> dict[str, tuple[int, Any]]:
        return {"cached_x": (self.in_features, dtype)}

    def _keys(self, arrays: Arrays, x: Any) -> dict[str, jax.Array]:
        return {"cached_x": x}

    def _attend(self, arrays: Arrays, queries: Arrays, keys: Arrays, **places: Any) -> jax.Array:
        segments = places.pop("query_segments")
        x, keys_of_x = queries["cached_x"], keys["cached_x"]
        return self._run_op(self.op, arrays, x, keys=keys_of_x, segments=segments, **places)
