"""The detection: what one look at an input leaves for every table that reads it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _meshes


@dataclasses.dataclass(frozen=True)
class Detection:
    """Rows that detectors address, and how close they are to addressing another one.

    A pytree of three arrays of one shape ``[..., detectors]``; ``bits`` is static. Made by
    `lutjax.detect` and `lutjax.detect_signs`, read by the lookups. A detection of your own (a
    learned comparison, a quantizer) is as good as one of theirs: fill the three arrays.

    Attributes:
      index: int32, the addressed row, ``0 <= index < 2**bits``.
      flip: int32, the XOR mask of the closest comparison: ``index ^ flip`` is the nearest other row.
        0 where ``bits == 0``.
      margin: the signed difference of the closest comparison. The only part with a gradient. float32
        for 16-bit inputs, else the dtype of the input; ``+inf`` where ``bits == 0``.
      bits: number of comparisons per detector; a table read by this detection has ``2**bits`` rows.

    Source: docs/semantics.md, section 1.
    """

    index: jax.Array
    flip: jax.Array
    margin: jax.Array
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each of the three arrays."""
        return self.index.shape

    def __getitem__(self, at: Any) -> "Detection":
        """Return one part of each of the three arrays, e.g. ``d[..., :8]`` for the first eight detectors."""
        return jax.tree.map(lambda a: a[at], self)


_FIELDS = ("index", "flip", "margin")
_KEYS = tuple(map(jax.tree_util.GetAttrKey, _FIELDS))


def _unflatten(bits: int, children: Iterable[Any]) -> Detection:
    # Transformations put placeholders where the arrays are, so no constructor may look at them.
    d = object.__new__(Detection)
    d.__dict__.update(zip(_FIELDS, children, strict=True), bits=bits)
    return d


def is_above_zero(delta: jax.Array) -> jax.Array:
    """Return which differences give a bit of 1: those above 0, but for the subnormal ones, which many processors compute as 0.

    Of ``delta > 0`` compilers make a comparison of what was subtracted, which sees differences that are computed as 0.
    """
    info = jnp.finfo(delta.dtype)
    return delta >= info.tiny if info.bits >= 32 else delta > 0


def existing(d: Detection) -> Detection:
    """Return the detection with rows that exist: ``index``, and ``index ^ flip``, each clamped by itself.

    For ids that are put side by side in a longer one: bits beyond their own would reach those of another id.
    """

    def clamped(index: jax.Array, flip: jax.Array) -> tuple[jax.Array, jax.Array]:
        index, other = (jnp.clip(a, 0, 2**d.bits - 1) for a in (index, index ^ flip))
        return index, index ^ other

    # Parts of a detection of one's own may lie differently on a mesh.
    both = _meshes.divided_by_compiler(clamped, lambda index, _: (_meshes.spec_of(index),) * 2)
    index, flip = both(d.index, d.flip)
    return Detection(index, flip, d.margin, d.bits)


def cotangent(margin: Any, bits: int) -> Detection:
    """Return the cotangent of a detection: of its margin alone."""
    return _unflatten(bits, (None, None, margin))


jax.tree_util.register_pytree_with_keys(
    Detection,
    lambda d: (
        tuple(zip(_KEYS, (d.index, d.flip, d.margin), strict=True)),
        d.bits,
    ),
    _unflatten,
    lambda d: ((d.index, d.flip, d.margin), d.bits),
)
