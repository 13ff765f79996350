"""`lutjax.lookup_attention`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._fixed_point import addends, result
from lutjax._row_rules import RowState
from lutjax.kernels._xla import _row_updates
from lutjax.kernels.contract import Step
from lutjax.ops.lookup_attention import LookupAttention
from lutjax_cpu import _pairs, _rules
from lutjax_cpu._call import kernel


def forward(call: LookupAttention, *, device: Any) -> jax.Array:
    shape = (*call.query.shape[:2], call.weights.shape[2])
    (y,) = _run("forward", call, (), (_pairs.sums(shape, call.accumulate),))
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    accumulate, dy = call.accumulate, _pairs.in_float32(cotangent)
    found = {}
    if "weights" in needs:
        table = _pairs.sums(call.weights.shape, accumulate)
        (found["weights"],) = _run("gradient", call, (addends(dy, accumulate),), (table,))
    if needs - {"weights"}:
        detections = call.query, call.key, _position(call)
        arrays = [a for d in detections for a in (d.flip, d.margin)]
        outputs = [_pairs.sums(d.shape, accumulate) for d in detections]
        of_margins = _run("margins", call, (*arrays, dy), outputs)
        found.update(
            (n, ct) for n, ct in zip(("query", "key", "position"), of_margins, strict=True) if n in needs
        )
    return found


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    dy, scale = _pairs.in_float32(cotangent), _row_updates.scale_of_additions(call, step)
    if scale is not None:
        outline = jax.ShapeDtypeStruct(call.weights.shape, call.weights.dtype)
        (table,) = _run("add", call, (scale * dy,), (outline,), in_place={_pairs.WEIGHTS: 0})
        return table, step.state
    inputs = *_pairs.without_table(_arrays(call)), dy
    return _rules.update(
        "lookup_attention_update", call.weights, step, call.accumulate, inputs, integers=_options(call)
    )


def _run(
    name: str, call: LookupAttention, arrays: Any, outputs: Any, **options: Any
) -> tuple[jax.Array, ...]:
    return kernel(
        f"lookup_attention_{name}",
        (*_arrays(call), *arrays),
        outputs,
        integers=_options(call),
        numbers=_pairs.numbers(call.accumulate),
        **options,
    )


def _arrays(call: LookupAttention) -> tuple[jax.Array, ...]:
    ids = (d.index for d in (call.query, call.key, _position(call)))
    return *_pairs.places(call), call.weights, *ids


def _options(call: LookupAttention) -> tuple[int, ...]:
    position_bits = _position(call).bits
    window, segments, fixed = _pairs.options(call)
    return window, segments, position_bits + call.key.bits, position_bits, fixed


def _position(call: LookupAttention) -> Detection:
    """The position's detection; without positions one that is never the closest."""
    if call.position is not None:
        return call.position
    none = zeros_varying(call.query.index, (1, 1), jnp.int32)
    return Detection(none, none, none.astype(call.query.margin.dtype) + jnp.inf, 0)
