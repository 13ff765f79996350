"""Members of the properties: what a call needs to know of an op or of a layer, and the arrays that it is called with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lutjax import FixedPoint

Arrays = dict[str, Any]
Pullback = Callable[[np.ndarray], Arrays]
"""Cotangents of the arguments by name, of that of the output."""


@dataclasses.dataclass(frozen=True)
class Op:
    """Properties of an op that a call needs.

    Attributes:
      arrays: draws the arguments without mapped axes: from a `Source`, sizes and options.
      call: the op of a module (`lutjax`, `lutjax.reference`) on these; returns its outputs by name.
      define: the definition on arrays of NumPy: its outputs, and its pullback.
      differentiable: names of arguments with a gradient.
      output: the output that has one.
      options: for each option the values that are drawn; the first is the default.
      batch: the axis of each argument that a mesh can split.
      recurrent: the output can be the next `x`.
    """

    arrays: Callable[..., Arrays]
    call: Callable[[Any, Arrays, Mapping[str, Any]], Arrays]
    differentiable: tuple[str, ...]
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    output: str = "y"
    batch: Callable[[Mapping[str, Any]], dict[str, int]] = lambda options: {}
    recurrent: bool = False
    define: Callable[[Arrays, Mapping[str, Any]], tuple[Arrays, Pullback]] = dataclasses.field(kw_only=True)


SIZES = {
    "a": {
        "batch": 2, "inputs": 3, "detectors": 2, "bits": 2, "pairs": 1, "position_bits": 1, "outputs": 3,
        "length": 3, "slots": 2, "wires": 2,
    },
    "b": {
        "batch": 2, "inputs": 4, "detectors": 3, "bits": 3, "pairs": 2, "position_bits": 2, "outputs": 4,
        "length": 4, "slots": 1, "wires": 3,
    },
}  # fmt: skip

FINE = FixedPoint(2.0**20)


class Source:
    """Random arrays on coarse grids: sums are exact, ties and zeros are common."""

    def __init__(self, dtype: str, *seed: Any):
        self.dtype = jnp.dtype(dtype)
        self._rng = np.random.default_rng([len(seed), *"/".join(map(str, seed)).encode()])

    def grid(self, *shape: int, steps: int = 8) -> np.ndarray:
        """Multiples of 1/4."""
        return np.asarray(np.asarray(self._rng.integers(-steps, steps + 1, shape) / 4), self.dtype)

    def ids(self, low: int, high: int, *shape: int) -> np.ndarray:
        return np.asarray(self._rng.integers(low, high, shape), np.int32)

    def anchors(self, inputs: int, *shape: int) -> np.ndarray:
        a = self.ids(0, inputs, *shape)
        return np.stack([a, (a + self.ids(1, inputs, *shape)) % inputs], -1).astype(np.int32)

    def detection(self, name: str, bits: int, *shape: int) -> Arrays:
        margin = self.grid(*shape).astype(np.float64 if self.dtype == np.float64 else np.float32)
        return {
            f"{name}.index": self.ids(0, 2**bits, *shape),
            f"{name}.flip": np.int32(1) << self.ids(0, bits, *shape),
            f"{name}.margin": margin,
        }


def given(o: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options of a call that the op takes as they are."""
    return {name: o[name] for name in names if name in o}
