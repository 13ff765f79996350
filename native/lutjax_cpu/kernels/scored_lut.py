"""`lutjax.scored_lut`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import reads
from lutjax.dispatch.contract import Step
from lutjax.kernels._xla import scored_lut as plain
from lutjax.ops.scored_lut import ScoredLut
from lutjax.values import _quantized
from lutjax.values._fixed_point import result
from lutjax.values._row_rules import RowState
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel, scale

# As `Family` in scores.h numbers them, and the number of ways.
_FAMILIES = {
    (reads.Hard, 2): 0,
    (reads.Blend, 2): 0,
    (reads.SoftSign, 2): 1,
    (reads.Confidence, 2): 2,
    (reads.Confidence, 1): 3,
    (reads.PowersOfTwo, 2): 4,
    (reads.PowersOfTwo, 1): 5,
}


def supports(read: reads.Read) -> bool:
    """Return True if a kernel supports this read: a `lutjax.reads` class, not a subclass."""
    return type(read) in {family for family, _ in _FAMILIES}


def forward(call: ScoredLut, *, device: Any) -> jax.Array:
    n, _, n_outputs = (len(call.x), *call.weights.shape[1:])
    shape = (n, call.groups, n_outputs)
    if call.weights.dtype == jnp.int8:
        assert call.exponents is not None
        (y,) = kernel(
            "scored_lut_integers",
            (call.weights, *_inputs(call), call.exponents),
            (jax.ShapeDtypeStruct(shape, jnp.float32),),
            integers=_integer_options(call),
            numbers=_float_options(),
        )
        return _summed(call, y).astype(call.scalars.dtype)
    (y,) = kernel(
        "scored_lut_forward",
        (_tables(call), *_inputs(call)),
        (jax.ShapeDtypeStruct(shape, _sum_dtype(call)),),
        integers=(*_integer_options(call), call.accumulate is not None),
        numbers=(*_float_options(), scale(call.accumulate)),
    )
    if _in_units(call):
        assert call.exponents is not None
        y *= _quantized.power(call.exponents, y.dtype)[None]
    return result(_summed(call, y), call.weights.dtype, call.accumulate)


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    if call.weights.dtype == jnp.int8:
        raise TypeError("scored_lut: tables of integers have no gradient; train tables of floats.")
    dtype = _sum_dtype(call)
    dy = cotangent.astype(jnp.float32)
    of_read = dy
    if _in_units(call):
        assert call.exponents is not None
        # The table gradient has the units of the table, the others those of int8 rows.
        unit = _quantized.power(call.exponents, dy.dtype)[None]
        of_read = plain.broadcast_to_groups(call, dy) * unit
        dy = jnp.broadcast_to(dy, of_read.shape)
    # The kernel computes the gradients of inputs and scalars together.
    of_inputs, of_keep = bool(needs - {"weights"}), "keep" in needs
    computed = {"weights": "weights" in needs, "x": of_inputs, "scalars": of_inputs}
    computed["keep"] = of_keep
    flags = (computed["weights"], of_inputs, of_keep)
    dtypes = {"weights": dtype, "x": dtype, "scalars": dtype, "keep": jnp.float32}
    cotangents = kernel(
        "scored_lut_backward",
        (_tables(call), *_inputs(call), dy, of_read),
        [
            jax.ShapeDtypeStruct(getattr(call, name).shape if is_computed else (0,), dtypes[name])
            for name, is_computed in computed.items()
        ],
        integers=(*_integer_options(call), call.accumulate is not None, *flags),
        numbers=(*_float_options(), scale(call.accumulate)),
    )
    return {name: a for name, a in zip(computed, cotangents, strict=True) if name in needs}


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    x, anchors, scalars, keep = _inputs(call)
    inputs = (x, anchors, scalars, keep, cotangent.astype(jnp.float32))
    return _rules.update(
        "scored_lut_update",
        call.weights,
        step,
        call.accumulate,
        inputs,
        integers=_integer_options(call),
        numbers=_float_options(),
    )


def _tables(call: ScoredLut) -> jax.Array:
    """Return the tables; quantized tables as int8, in units of their scale."""
    if _in_units(call):
        assert call.exponents is not None
        return _quantized.round_to_scale(call.weights, call.exponents).astype(jnp.int8)
    return plain.tables(call)


def _in_units(call: ScoredLut) -> bool:
    """Return True if float tables are read as int8; fixed-point addends are not in scale units."""
    return call.exponents is not None and call.accumulate is None and call.weights.dtype != jnp.int8


def _inputs(call: ScoredLut) -> tuple[jax.Array, ...]:
    """Return inputs, anchors, scalars and table factors."""
    keep = jnp.zeros((0,), jnp.float32) if call.keep is None else call.keep
    return (
        call.x.astype(jnp.float32),
        call.anchors,
        call.scalars.astype(jnp.float32),
        keep.astype(jnp.float32),
    )


def _integer_options(call: ScoredLut) -> tuple[int, ...]:
    """Return every kernel's leading integer options, `kIntegers` in scored_lut.cc."""
    read, rounding = call.read, reads.PowersOfTwo.rounding
    ways = getattr(read, "ways", 2)
    valued = ways if read.valued is None else read.valued
    family = _FAMILIES[type(read), ways]
    of_layer = (call.groups, family, valued < ways, ways, call.keep is not None, valued)
    of_read = (
        rounding.lowest,
        rounding.highest,
        rounding.farthest,
        rounding.negligible,
        rounding.most_shift,
    )
    of_tables = (_quantized.SHIFT, _quantized.BEYOND_SCALES, _quantized.MOST_ADDENDS // ways)
    return *of_layer, *of_read, *of_tables


def _float_options() -> tuple[float, ...]:
    """Return every kernel's leading float options, `kNumbers` in scored_lut.cc."""
    rounding = reads.PowersOfTwo.rounding
    return rounding.least_exact, rounding.most_ratio


def _sum_dtype(call: ScoredLut) -> Any:
    return jnp.float32 if call.accumulate is None else np.int32


def _summed(call: ScoredLut, y: jax.Array) -> jax.Array:
    return jnp.sum(y, 1, keepdims=True, dtype=y.dtype) if call.sum_groups else y
