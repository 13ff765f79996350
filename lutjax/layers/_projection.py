"""Scored table layer between two projections, for all libraries."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import lutjax
from lutjax import _meshes
from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.dispatch.registry import Implementation
from lutjax.layers._spec import (
    QUANTIZED,
    Arrays,
    Example,
    Initializer,
    Mode,
    Op,
    Spec,
    Variable,
    names_layer,
    switched_call,
)
from lutjax.layers.initializers import Normal
from lutjax.ops._checks import MAX_BITS, accumulation
from lutjax.reads import Confidence, Read
from lutjax.values._anchors import check_anchors, draw_anchors
from lutjax.values._dtypes import accumulator

INT32, INT8 = jnp.dtype("int32"), jnp.dtype("int8")

SMALL_MATRIX = Normal(0.02)
CONFIDENCE = Confidence()


def small_tables(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return tables sampled from uniform(-0.001, 0.001)."""
    return jax.random.uniform(key, shape, dtype, -1e-3, 1e-3)


def check_read(layer: str, read: Any) -> None:
    if not isinstance(read, Read):
        raise ValueError(
            f"{layer}: read is {format_value(read)}; "
            "expected one of lutjax.reads, such as Confidence()."
        )


def scalars_of(read: Read) -> tuple[Variable, ...]:
    def initialize(name: str) -> Callable[[Any], Any]:
        return lambda key: read.initial()[name]

    # Shapes only: no array is allocated before initialization.
    scalars = jax.eval_shape(read.initial)
    return tuple(
        Variable(name, "scalars", (), value.dtype, initialize(name))
        for name, value in scalars.items()
    )


def check_scalar(layer: str, name: str, value: Any) -> None:
    if not np.isfinite(np.asarray(value)):
        raise ValueError(f"{layer}: {name} is {value}; it must be finite.")


class ScoredSpec(Spec):
    """Base spec for scored table layers: table dropout and integer tables."""

    stream: ClassVar[str] = "dropout"

    read: Any
    table_dropout: float | int
    deterministic: bool
    quantized: bool
    call: ClassVar[Callable[..., Any]] = switched_call

    @property
    def random(self) -> bool:
        return self.table_dropout > 0 and not self.quantized

    @property
    def table_groups(self) -> int:
        """Number of table groups, each with its own integer scales."""
        raise NotImplementedError

    def _check_scored(self) -> None:
        if not 0 <= self.table_dropout < 1:
            raise self._error(
                f"table_dropout is {self.table_dropout}; it must be at least 0 and below 1."
            )
        if self.quantized and not (self.read is not None and self.read.rounds_tables):
            raise self._error(
                f"quantized is True but read is {self.read!r}; tables of integers are read by "
                "lutjax.reads.PowersOfTwo, with which the layer has to be trained."
            )
        if self.read is None and self.table_dropout:
            raise self._error(
                f"table_dropout is {self.table_dropout} but read is None; it is of scored reads. "
                "lutjax.reads.Hard() reads the same rows."
            )

    def _quantized_tables(self, shape: tuple[int, ...]) -> tuple[Variable, Variable]:

        def variable(name: str, shape: tuple[int, ...], dtype: Any) -> Variable:
            return Variable(name, QUANTIZED, shape, dtype, lambda key: jnp.zeros(shape, dtype))

        exponents = (self.table_groups, shape[2])
        return variable("weights", shape, INT8), variable("exponents", exponents, INT32)

    @names_layer
    def quantize(self, weights: Array) -> tuple["ScoredSpec", dict[str, Array]]:
        """Return the spec with integer tables, and its arrays, stacked like the float tables."""
        spec = dataclasses.replace(self, quantized=True)  # type: ignore[call-arg]

        def quantize(weights: Array) -> dict[str, Array]:
            tables = lutjax.quantize_tables(weights, groups=self.table_groups)
            return {"weights": tables.values, "exponents": tables.exponents}

        for _ in range(weights.ndim - 3):
            quantize = jax.vmap(quantize)
        return spec, quantize(weights)

    def tables_of(self, arrays: Arrays) -> Any:
        weights = arrays["weights"]  # the array itself: see lutjax.optim
        return lutjax.QuantizedTables(weights, arrays["exponents"]) if self.quantized else weights

    def scalars_of(self, arrays: Arrays) -> dict[str, Any] | None:
        names = (v.name for v in self.all_variables if v.kind == "scalars")
        return None if self.read is None else {name: arrays[name] for name in names}

    def _keep(
        self, deterministic: Mode, key: Any, shape: tuple[int, ...], dtype: Any
    ) -> jax.Array | None:
        """Sample table dropout factors ``[..., T]`` with mean 1; None without dropout."""
        if not self.random or (self.deterministic if deterministic is None else deterministic):
            return None
        if key is None:
            raise self._error(
                f"table_dropout is {self.table_dropout}; pass rngs, or deterministic=True."
            )
        share = 1 - self.table_dropout
        drawn = jax.random.bernoulli(key, share, shape)
        return drawn.astype(dtype) / jnp.asarray(share, dtype)


@dataclasses.dataclass(unsafe_hash=True)
class ProjectionLUTSpec(ScoredSpec):
    """Feed-forward layer replacement: a projection, heads of lookup tables, another projection.

    The tables of a head compare pairs of its inputs, and add the selected rows, weighted by a score
    of the comparison margins. The second projection starts at zero, so a residual block with a new
    layer is the identity.

    Variables:
      compress_kernel, compress_bias: trained, ``[in_features, heads * width]``, normal(0.02), and
        zeros.
      anchors: int32 ids of a head's inputs ``[heads * tables, bits, 2]``, distinct if possible.
      weights: tables, trained, ``[heads * tables, 2**bits, outputs]``, uniform(-0.001, 0.001).
      log_beta, log_gamma, log_tau: trained scalars of the read, float32.
      decompress_kernel, decompress_bias: trained, ``[heads * outputs, out_features]``, zeros.
      weights, exponents: int8 tables and their scale, int32 ``[heads, outputs]``, not trained, with
        ``quantized=True``.

    Args:
      in_features, out_features: number of inputs and outputs.
      heads: number of table groups.
      tables, bits: number of tables per head, and of anchor pairs per table.
      width: inputs per head; by default an equal share of `in_features`, rounded up, or all with
        `share_input`.
      outputs: outputs per head; by default an equal share of `out_features`, rounded up, or all
        with `sum_heads`.
      read: one of `lutjax.reads` or your own.
      share_input, sum_heads: whether heads read the same inputs, and whether outputs are added.
      compress, decompress: whether there is a first and a second projection.
      table_dropout: share of tables dropped in training, per sample, from the stream ``dropout``.
      deterministic: whether calls run without dropout.
      quantized: int8 tables without gradients, for a layer trained with `lutjax.reads.PowersOfTwo`.
      dtype: dtype of projections and output; by default promoted from inputs and parameters. Tables
        keep theirs; scores are at least float32.
      param_dtype: dtype of tables and projections: float32, bfloat16, float16 or float64.
      weights_init, compress_init, decompress_init: initializers of tables and projections, as in
        `jax.nn.initializers`.
      accumulate: fixed-point accumulation in the lookup; see `lutjax.FixedPoint`.
      implementation: implementation of the lookup; see `lutjax.scored_lut`.
      anchors: int32 ``[heads * tables, bits, 2]``, instead of random ones.

    Raises:
      ValueError: a size is impossible, or an anchor is not a head input.

    Source: docs/semantics.md, section 12.
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    heads: int = 8
    tables: int = 64
    bits: int = 8
    width: int | None = None
    outputs: int | None = None
    read: Read = CONFIDENCE
    share_input: bool = False
    sum_heads: bool = False
    compress: bool = True
    decompress: bool = True
    table_dropout: float | int = 0.0
    deterministic: bool = False
    quantized: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = small_tables
    compress_init: Initializer = SMALL_MATRIX
    decompress_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None

    example: ClassVar[Example] = ("16, 16, heads=4, tables=8, bits=3", (32, 16), (32, 16))
    op = staticmethod(lutjax.scored_lut)
    given: ClassVar[tuple[str, ...]] = ("anchors",)

    def __post_init__(self) -> None:
        self._require_sizes(1, "in_features", "out_features", "heads", "tables", "bits")
        check_read(self.layer, self.read)
        if self.bits > MAX_BITS:
            raise self._error(
                f"bits is {self.bits}, so a table has 2**{self.bits} rows; "
                f"at most 2**{MAX_BITS} are possible. Use fewer bits, and more tables if needed."
            )
        self._check_scored()
        accumulation(self.layer, self.accumulate)
        self._normalize_dtypes()
        self._size("width", "in_features", self.n_inputs, self.compress, "compress")
        self._size("outputs", "out_features", self.n_outputs, self.decompress, "decompress")
        if self.width < 2:  # type: ignore[operator]
            raise self._error(f"width is {self.width}; a comparison needs at least 2 inputs.")
        names = {v.name for v in self._arrays_of_layer()}
        # In shapes: the check of sizes needs no device.
        taken = names & set(jax.eval_shape(self.read.initial))
        if taken:
            raise self._error(
                f"{self.read!r} has scalars with the names of variables, {sorted(taken)}; "
                "rename them."
            )

    def _size(self, name: str, features: str, n: int, projected: bool, projection: str) -> None:
        total = getattr(self, features)
        if getattr(self, name) is None:
            setattr(self, name, -(-total // n))
        self._require_sizes(1, name)
        if not projected and n * getattr(self, name) != total:
            raise self._error(
                f"{features} is {total} and {projection} is False, "
                f"so it must be that of {n} heads with {name}={getattr(self, name)}, "
                f"{n * getattr(self, name)}."
            )

    @property
    def table_groups(self) -> int:
        return self.heads

    @property
    def n_inputs(self) -> int:
        """Number of heads with separate inputs."""
        return 1 if self.share_input else self.heads

    @property
    def n_outputs(self) -> int:
        """Number of heads with separate outputs."""
        return 1 if self.sum_heads else self.heads

    def _arrays_of_layer(self) -> tuple[Variable, ...]:
        n_tables, width, outputs = self.heads * self.tables, self.width, self.outputs
        assert width is not None
        assert outputs is not None

        def draw(key: Array) -> jax.Array:
            names: dict[str, Any] = {"where": self.layer, "name_of_pairs": "bits"}
            return draw_anchors(
                key, width, n_tables, self.bits, distinct=True, groups=self.heads, **names
            )

        def projection(
            name: str, shape: tuple[int, int], init: Initializer
        ) -> tuple[Variable, Variable]:
            bias = self._trained_variable(f"{name}_bias", shape[1:], jax.nn.initializers.zeros)
            return self._trained_variable(f"{name}_kernel", shape, init), bias

        shape = (n_tables, 2**self.bits, outputs)
        variables: list[Variable] = []
        if self.compress:
            inside = (self.in_features, self.n_inputs * width)
            variables += projection("compress", inside, self.compress_init)
        variables.append(Variable("anchors", "anchors", (n_tables, self.bits, 2), INT32, draw))
        if self.quantized:
            variables += self._quantized_tables(shape)
        else:
            variables.append(self._trained_variable("weights", shape, self.weights_init, "tables"))
        if self.decompress:
            inside = (self.n_outputs * outputs, self.out_features)
            variables += projection("decompress", inside, self.decompress_init)
        return tuple(variables)

    def variables(self) -> tuple[Variable, ...]:
        return self._arrays_of_layer() + scalars_of(self.read)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        weights, anchors = np.shape(arrays["weights"]), np.shape(arrays["anchors"])
        if len(weights) != 3 or len(anchors) != 3 or weights[0] % self.heads:
            return {}
        return {"tables": weights[0] // self.heads, "bits": anchors[1]}

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        if variable.kind == "anchors":
            assert self.width is not None
            check_anchors(arrays[variable.name], self.width, where=self.layer)
        elif variable.kind == "scalars":
            check_scalar(self.layer, variable.name, arrays[variable.name])

    @names_layer
    def run(
        self, op: Op, x: Any, *, deterministic: Mode = None, key: Any = None, **arrays: Any
    ) -> jax.Array:
        self._require_features(x, self.in_features)
        assert self.width is not None
        z = jnp.asarray(x).astype(self._resolve_dtype(x))
        if self.compress:
            z = _project_inputs(z, arrays["compress_kernel"], arrays["compress_bias"])
        # Comparisons and scores need at least float32, also if the layer has a narrower dtype.
        z = z.astype(accumulator(jnp.dtype(self.param_dtype)))
        z = _meshes.reshape_unsharded(z, x.ndim - 1, self.n_inputs, self.width)
        shape = (*z.shape[:-2], self.heads * self.tables)
        tables, scalars = self.tables_of(arrays), self.scalars_of(arrays)
        groups = {"read": self.read, "groups": self.heads, "sum_groups": self.sum_heads}
        accumulate = None if self.quantized else self.accumulate
        options = {**groups, "accumulate": accumulate, "implementation": self.implementation}
        keep = self._keep(deterministic, key, shape, z.dtype)
        y = op(z, tables, arrays["anchors"], scalars, keep=keep, **options)
        y = y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1]).astype(self._resolve_dtype(x))
        if self.decompress:
            y = _project_inputs(y, arrays["decompress_kernel"], arrays["decompress_bias"])
        return y


def _project_inputs(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    y = jnp.dot(x, kernel.astype(x.dtype))
    return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)
