"""Detection, shared by all tables that read the same input."""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _meshes


@dataclasses.dataclass(frozen=True)
class Detection:
    """Detectors' addressed rows, and their distance to the nearest other row.

    A pytree of three arrays with shape ``[..., detectors]``; ``bits`` is static. `lutjax.detect`
    and `lutjax.detect_signs` return detections, and the lookups accept them. To use a custom
    detection (a learned comparison, a quantizer), fill the three arrays.

    Attributes:
      index: int32, the addressed row, ``0 <= index < 2**bits``.
      flip: int32, the XOR mask of the closest comparison: ``index ^ flip`` is the nearest other
        row. 0 where ``bits == 0``.
      margin: the signed difference of the closest comparison. Only this part has a gradient.
        float32 for 16-bit inputs, else the input dtype; ``+inf`` where ``bits == 0``.
      bits: number of comparisons per detector; a table for this detection has ``2**bits`` rows.

    Source: docs/semantics.md, section 1.
    """

    index: jax.Array
    flip: jax.Array
    margin: jax.Array
    bits: int

    def __post_init__(self) -> None:
        # JAX flattens a detection at every transformation: no Python function runs for it.
        self.__dict__["_tree"] = ((self.index, self.flip, self.margin), self.bits)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the three arrays."""
        return self.index.shape

    def __getitem__(self, at: Any) -> "Detection":
        """Index the three arrays, e.g. ``d[..., :8]`` for the first eight detectors."""
        return jax.tree.map(lambda a: a[at], self)

    def __iter__(self) -> Iterator["Detection"]:
        """Iterate over the leading axis, as arrays do."""
        # Python's default iteration ends with an IndexError, which JAX arrays never raise.
        if not self.shape:
            raise TypeError("Detection: iteration over a detection of shape []; it has no axis.")
        return map(self.__getitem__, range(self.shape[0]))


_FIELDS = ("index", "flip", "margin")
_KEYS = tuple(map(jax.tree_util.GetAttrKey, _FIELDS))


def _unflatten(bits: int, children: Iterable[Any]) -> Detection:
    # Transformations put placeholders in the fields, so no constructor may inspect them.
    d, children = object.__new__(Detection), tuple(children)
    d.__dict__.update(zip(_FIELDS, children, strict=True), bits=bits, _tree=(children, bits))
    return d


def is_above_zero(delta: jax.Array) -> jax.Array:
    """Return the bits: True where a difference is above 0 and not subnormal.

    Many processors flush subnormal differences to 0. Compilers rewrite ``delta > 0`` as a
    comparison of the operands, which distinguishes such differences.
    """
    info = jnp.finfo(delta.dtype)
    return delta >= info.tiny if info.bits >= 32 else delta > 0


def clamp_detection(d: Detection) -> Detection:
    """Return the detection with ``index`` and ``index ^ flip`` each clamped to existing rows.

    Use it before ids are concatenated into a longer id, where excess bits would corrupt another id.
    """

    def clamp_ids(index: jax.Array, flip: jax.Array) -> tuple[jax.Array, jax.Array]:
        index, other = (jnp.clip(a, 0, 2**d.bits - 1) for a in (index, index ^ flip))
        return index, index ^ other

    # The parts of a user-defined detection may have different shardings.
    clamp = _meshes.shard_by_compiler(clamp_ids, lambda index, _: (_meshes.spec_of(index),) * 2)
    index, flip = clamp(d.index, d.flip)
    return Detection(index, flip, d.margin, d.bits)


def cotangent(margin: Any, bits: int) -> Detection:
    """Return the cotangent of a detection, given the cotangent of its margin."""
    return _unflatten(bits, (None, None, margin))


jax.tree_util.register_pytree_with_keys(
    Detection,
    lambda d: (tuple(zip(_KEYS, (d.index, d.flip, d.margin), strict=True)), d.bits),
    _unflatten,
    operator.attrgetter("_tree"),
)
