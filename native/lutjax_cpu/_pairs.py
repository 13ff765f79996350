"""Kernels for both attentions, built from their differences."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.kernels._xla import _row_updates
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.values._fixed_point import FixedPoint, addend_dtype, addends, result
from lutjax.values._row_rules import RowState
from lutjax_cpu import _rules
from lutjax_cpu._call import kernel, scale

_WEIGHTS = 5  # number of the tables among the arrays of a kernel
_EVERY = 2**40  # a window that all pairs are in

Attention = LookupAttention | LutPairAttention


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Kernels for one attention; `native/src/pairs.h` contains the shared code.

    Attributes:
      name: op name.
      arrays, integers, numbers: return the kernel-specific arrays and options for a call.
      cotangents: returns a call's cotangents named in `needs`, except tables, from the float32
        output cotangent.
    """

    name: str
    arrays: Callable[[Any], tuple[jax.Array, ...]]
    integers: Callable[[Any], tuple[int, ...]]
    numbers: Callable[[Any], tuple[float, ...]]
    cotangents: Callable[[Any, jax.Array, frozenset[str]], dict[str, jax.Array]]

    def forward(self, call: Attention, *, device: Any) -> jax.Array:
        shape = (*call.query_places.shape[:2], call.width)
        (y,) = self.run("forward", call, (), (sums(shape, call.accumulate),))
        return result(y, call.weights.dtype, call.accumulate)

    def backward(
        self, call: Attention, cotangent: jax.Array, needs: frozenset[str], *, device: Any
    ) -> dict[str, jax.Array]:
        dy, cotangents = cotangent.astype(jnp.float32), {}
        if "weights" in needs:
            table, added = sums(call.weights.shape, call.accumulate), addends(dy, call.accumulate)
            (cotangents["weights"],) = self.run("gradient", call, (added,), (table,))
        return cotangents | self.cotangents(call, dy, needs) if needs - {"weights"} else cotangents

    def update(
        self, call: Attention, cotangent: jax.Array, step: Step, *, device: Any
    ) -> tuple[jax.Array, RowState]:
        dy, factor = cotangent.astype(jnp.float32), _row_updates.scale_of_additions(call, step)
        if factor is not None:  # plain additions, without a gradient of the table's size
            outline = jax.ShapeDtypeStruct(call.weights.shape, call.weights.dtype)
            (table,) = self.run("add", call, (factor * dy,), (outline,), in_place={_WEIGHTS: 0})
            return table, step.state
        arrays = self._arrays(call)
        inputs = *arrays[:_WEIGHTS], *arrays[_WEIGHTS + 1 :], dy
        integers, numbers = self._options(call)
        update = (call.weights, step, call.accumulate, inputs)
        return _rules.update(f"{self.name}_update", *update, integers=integers, numbers=numbers)

    def run(
        self,
        name: str,
        call: Attention,
        arrays: Sequence[jax.Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
        **options: Any,
    ) -> tuple[jax.Array, ...]:
        """Run a kernel with additional arrays after the call's arrays."""
        integers, numbers = self._options(call)
        options |= {"integers": integers, "numbers": numbers}
        return kernel(f"{self.name}_{name}", (*self._arrays(call), *arrays), outputs, **options)

    def _arrays(self, call: Attention) -> tuple[jax.Array, ...]:
        # A kernel has fixed arguments: an empty array stands for None.
        like = call.query_places
        none = zeros_varying(like, (0, 0), jnp.int32)
        start = zeros_varying(like, (), jnp.int32) if call.start is None else call.start
        start = start if call.starts is None else call.starts
        of_queries = none if call.query_segments is None else call.query_segments
        of_keys = none if call.key_segments is None else call.key_segments
        mask = none if call.block_mask is None else call.block_mask
        targets = getattr(call, "targets", None)
        targets = zeros_varying(like, (0, 1, 0), jnp.int32) if targets is None else targets
        return start, of_queries, of_keys, mask, targets, call.weights, *self.arrays(call)

    def _options(self, call: Attention) -> tuple[tuple[int, ...], tuple[float, ...]]:
        # Without a window every pair counts; a kernel has no option for that.
        window = _EVERY if call.window is None else call.window
        blocks = (0, 0) if call.block_mask is None or call.block_sizes is None else call.block_sizes
        flags = (call.query_segments is not None, call.accumulate is not None)
        integers = (window, *flags, *blocks, call.width)
        return (*integers, *self.integers(call)), (scale(call.accumulate), *self.numbers(call))


def sums(shape: tuple[int, ...], accumulate: FixedPoint | None) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype for sums of addends."""
    return jax.ShapeDtypeStruct(shape, addend_dtype(jnp.float32, accumulate))
