"""Scored tables between projections for Flax Linen; `lutjax.layers._projection` has the arguments of the layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _projection
from lutjax.layers._projection import CONFIDENCE, SMALL_MATRIX, small_tables
from lutjax.layers._spec import Initializer
from lutjax.layers.linen._layer import Switched
from lutjax.reads import Read


class ProjectionLUT(Switched):
    """Layer of look-up tables to put in place of a feed-forward layer: a projection, heads of tables, a projection.

    The first projection makes the inputs of the heads, ``width`` for each. The tables of a head compare pairs of its inputs, and add
    the rows that they read, weighted by a score of how sure the comparisons are: see `lutjax.scored_lut`. The second
    projection starts at zero, so that a residual block with a new layer is the identity. Without both
    projections the layer is tables alone.

    Variables:
      compress_kernel, compress_bias: trained, ``[in_features, heads * width]``, normal(0.02), and zeros.
      anchors: int32 ids of a head's inputs ``[heads * tables, bits, 2]``, different pairs ``a < b`` as far as there are.
      weights: the tables, trained, ``[heads * tables, 2**bits, outputs]``, uniform(-0.001, 0.001) at first.
      log_beta, log_gamma, log_tau: trained scalars of the read, float32, by their names in ``read.initial()``.
      decompress_kernel, decompress_bias: trained, ``[heads * outputs, out_features]``, zeros.
      weights, exponents: int8 tables and their scale, int32 ``[heads, outputs]``, not trained, with ``quantized=True``.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: outputs.
      heads: groups of tables.
      tables: tables of each head.
      bits: anchor pairs of each table.
      width: inputs of a head; by default heads share `in_features` out, rounded up, or each sees as many with `share_input`.
      outputs: outputs of a head; by default heads share `out_features` out, rounded up, or each has as many with `sum_heads`.
      read: how tables are read, one of `lutjax.reads` or your own.
      share_input: all heads read the same inputs.
      sum_heads: the outputs of all heads are added.
      compress: whether there is a first projection; without it the inputs are those of the heads, one after the other.
      decompress: whether there is a second projection.
      table_dropout: share of tables that a sample does not read in training; others count more.
      deterministic: no dropout.
      quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
      dtype: dtype of the projections and of the output; by default that of inputs and parameters together. Tables keep their
        own, and scores are at least float32.
      param_dtype: dtype of tables and projections: float32, bfloat16, float16 or float64.
      weights_init, compress_init, decompress_init: draw tables and projections, as in `jax.nn.initializers`.
      accumulate: sums of integers in the look-up, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the look-up; see `lutjax.scored_lut`.
      anchors: int32 ``[heads * tables, bits, 2]``, instead of drawn ones.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input of a head.

    Source: docs/semantics.md, section 12.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Masks of table dropout are drawn from the stream ``dropout``. With ``quantized=True`` the collection ``quantised`` has the arrays of
    ``lutjax.quantize_tables(params["weights"], groups=heads)``, as ``weights`` and ``exponents``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import ProjectionLUT
      >>> layer = ProjectionLUT(16, 16, heads=4, tables=8, bits=3)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> layer.apply(variables, jnp.ones((32, 16))).shape
      (32, 16)
    """

    spec_type = _projection.ProjectionLUTSpec

    in_features: int | None = None
    out_features: int | None = None
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
