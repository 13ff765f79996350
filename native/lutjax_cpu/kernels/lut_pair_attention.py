"""`lutjax.lut_pair_attention`."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._fixed_point import addends, result
from lutjax._row_rules import RowState
from lutjax.kernels._xla import _row_updates
from lutjax.kernels.contract import Step
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax_cpu import _pairs, _rules
from lutjax_cpu._call import kernel


def forward(call: LutPairAttention, *, device: Any) -> jax.Array:
    shape = (*call.x.shape[:2], call.weights.shape[2])
    (y,) = _run("forward", call, (), (_pairs.sums(shape, call.accumulate),))
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: LutPairAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Any
) -> dict[str, jax.Array]:
    accumulate, dy = call.accumulate, _pairs.in_float32(cotangent)
    found = {}
    if "weights" in needs:
        table = _pairs.sums(call.weights.shape, accumulate)
        (found["weights"],) = _run("gradient", call, (addends(dy, accumulate),), (table,))
    if needs - {"weights"}:
        compared = {"x": call.x, "keys": call.keys, "positions": _positions(call)}
        of_inputs = _run("inputs", call, (dy,), [_pairs.sums(a.shape, accumulate) for a in compared.values()])
        found.update((n, ct) for n, ct in zip(compared, of_inputs, strict=True) if n in needs)
    return found


def update(
    call: LutPairAttention, cotangent: jax.Array, step: Step, *, device: Any
) -> tuple[jax.Array, RowState]:
    dy, scale = _pairs.in_float32(cotangent), _row_updates.scale_of_additions(call, step)
    if scale is not None:
        outline = jax.ShapeDtypeStruct(call.weights.shape, call.weights.dtype)
        (table,) = _run("add", call, (scale * dy,), (outline,), in_place={_pairs.WEIGHTS: 0})
        return table, step.state
    return _rules.update(
        "lut_pair_attention_update",
        call.weights,
        step,
        call.accumulate,
        (*_pairs.without_table(_arrays(call)), dy),
        integers=_options(call),
        numbers=_numbers(call),
    )


def _run(
    name: str, call: LutPairAttention, arrays: Any, outputs: Any, **options: Any
) -> tuple[jax.Array, ...]:
    return kernel(
        f"lut_pair_attention_{name}",
        (*_arrays(call), *arrays),
        outputs,
        integers=_options(call),
        numbers=_numbers(call),
        **options,
    )


def _arrays(call: LutPairAttention) -> tuple[jax.Array, ...]:
    compared = (a.astype(jnp.float32) for a in (call.x, call.keys))
    return *_pairs.places(call), call.weights, *compared, call.anchors, _positions(call).astype(jnp.float32)


def _positions(call: LutPairAttention) -> jax.Array:
    """The positions; without them one of no bits."""
    return zeros_varying(call.x, (1, 1, 0), jnp.float32) if call.positions is None else call.positions


def _options(call: LutPairAttention) -> tuple[int, ...]:
    window, segments, fixed = _pairs.options(call)
    return window, segments, call.interleave, fixed


def _numbers(call: LutPairAttention) -> tuple[float, ...]:
    return call.epsilon, *_pairs.numbers(call.accumulate)
