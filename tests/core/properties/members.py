"""Members of the properties: what a call needs to know of an op or of a layer, and the arrays that it is called with."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lutjax import FixedPoint, reads
from properties.definitions import accumulator

Arrays = dict[str, Any]
Pullback = Callable[[np.ndarray], Arrays]
"""Cotangents of the arguments by name, of that of the output."""


FINITE = ("grid", "ties", "general")
VALUES = (*FINITE, "wild", "nan", "infinite")
"""Kinds of values: quarters, -1, -0, 0 and 1, normal ones; quarters with ids out of range, with NaN, with infinities."""


def _dtype_of(a: Arrays) -> np.dtype:
    """Dtype of tables, or of inputs where tables have integers or there are none."""
    of_tables = a.get("weights", np.zeros(0, np.int8)).dtype
    of_inputs = a.get("x", a.get("images", np.zeros(0, np.float32))).dtype
    return accumulator(of_inputs) if "exponents" in a else of_inputs if of_tables == np.int8 else of_tables


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
      values: the kinds of `VALUES` for which results are defined.
      reference: whether `lutjax.reference` has it.
      factored: whether the gradient of the argument `weights` can be in factors.
      constant: says of options whether a call with these has no gradient.
      dtype: of the output `y`, of arguments and options.
      clipped: says of options which arguments are clipped to [-1, 1]. Whether a cotangent passes at the ends depends on its sign, so
        where calls share them it matters whether cotangents are added first: there they lie inside.
      chain: number of ops of which one rounds what the one before has rounded, in 16 bits.
    """

    arrays: Callable[..., Arrays]
    call: Callable[[Any, Arrays, Mapping[str, Any]], Arrays]
    differentiable: tuple[str, ...]
    options: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    output: str = "y"
    batch: Callable[[Mapping[str, Any]], dict[str, int]] = lambda options: {}
    recurrent: bool = False
    values: tuple[str, ...] = VALUES
    reference: bool = True
    factored: bool = False
    constant: Callable[[Mapping[str, Any]], bool] = lambda options: False
    clipped: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda options: ()
    chain: int = 1
    dtype: Callable[[Arrays, Mapping[str, Any]], Any] = lambda a, options: _dtype_of(a)
    define: Callable[[Arrays, Mapping[str, Any]], tuple[Arrays, Pullback]] = dataclasses.field(kw_only=True)


SIZES = {
    "a": {
        "batch": 2, "inputs": 3, "detectors": 2, "groups": 2, "bits": 2, "pairs": 1, "position_bits": 1, "outputs": 3,
        "length": 3, "slots": 2, "wires": 2,
    },
    "b": {
        "batch": 2, "inputs": 4, "detectors": 3, "groups": 3, "bits": 3, "pairs": 2, "position_bits": 2, "outputs": 4,
        "length": 4, "slots": 1, "wires": 3,
    },
    "c": {
        "batch": 4, "inputs": 5, "detectors": 4, "groups": 2, "bits": 1, "pairs": 1, "position_bits": 1, "outputs": 5,
        "length": 2, "slots": 3, "wires": 4,
    },
    "empty": {
        "batch": 0, "inputs": 3, "detectors": 2, "groups": 1, "bits": 2, "pairs": 1, "position_bits": 1, "outputs": 3,
        "length": 3, "slots": 2, "wires": 2,
    },
}  # fmt: skip
"""Sizes by name; outputs can be inputs again."""

FINE = FixedPoint(2.0**20)

READS: dict[str, tuple[str, reads.Read]] = {
    "confidence": ("confidence", reads.Confidence()),
    "hard": ("hard", reads.Hard()),
    "blend": ("blend", reads.Blend()),
    "soft_sign": ("soft_sign", reads.SoftSign()),
    "hard_sign": ("hard_sign", reads.SoftSign(hard=True)),
    "confidence_1": ("confidence", reads.Confidence(ways=1)),
    "powers": ("powers", reads.PowersOfTwo()),
    "powers_1": ("powers", reads.PowersOfTwo(ways=1)),
    "integers": ("powers", reads.PowersOfTwo()),
}
"""Names of definitions, and reads; of tables of integers the last."""


class Source:
    """Random arrays: of quarters, whose sums are exact and among which ties and zeros are common, or of another kind of `VALUES`."""

    def __init__(self, dtype: str, *seed: Any, values: str = "grid"):
        self.dtype, self.values = jnp.dtype(dtype), values
        self._rng = np.random.default_rng([len(seed), *"/".join(map(str, seed)).encode()])

    def grid(self, *shape: int, steps: int = 8) -> np.ndarray:
        """Multiples of 1/4, or what takes their place."""
        rng = self._rng
        found = np.asarray(rng.integers(-steps, steps + 1, shape) / 4)
        if self.values == "ties":
            found = rng.choice([-1.0, -0.0, 0.0, 1.0], shape)
        elif self.values == "general":
            found = rng.normal(size=shape)
        elif self.values in ("nan", "infinite"):
            special = [np.nan] if self.values == "nan" else [-np.inf, np.inf]
            found = np.where(rng.random(shape) < 0.125, rng.choice(special, shape), found)
        return np.asarray(found, self.dtype)

    def finite(self, *shape: int, steps: int = 8) -> np.ndarray:
        """Numbers whatever the kind of values: NaN and infinities are 0."""
        found = self.grid(*shape, steps=steps)
        return np.where(np.isfinite(found.astype(np.float64)), found, np.zeros((), self.dtype))

    def ids(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Return ids from `low` to ``high - 1``, or some beyond them."""
        found = self._rng.integers(low, high, shape)
        if self.values == "wild":
            out = [-(2**31), -2, -1, high, high + 1, 2**16, 2**31 - 1]
            found = np.where(self._rng.random(shape) < 0.25, self._rng.choice(out, shape), found)
        return np.asarray(found, np.int32)

    def numbers(self, low: int, high: int, *shape: int) -> np.ndarray:
        """Return integers from `low` to ``high - 1``, never beyond."""
        return np.asarray(self._rng.integers(low, high, shape), np.int32)

    def words(self, *shape: int) -> np.ndarray:
        """Return 32 bits each."""
        return self._rng.integers(0, 2**32, shape, dtype=np.uint32)

    def anchors(self, inputs: int, *shape: int) -> np.ndarray:
        """Return pairs of different ids."""
        a = self.ids(0, inputs, *shape)
        b = (a + self.numbers(1, max(inputs, 2), *shape)) % max(inputs, 1)
        return np.stack([a, b], -1).astype(np.int32)

    def detection(self, name: str, bits: int, *shape: int) -> Arrays:
        margin = self.grid(*shape).astype(np.float64 if self.dtype == np.float64 else np.float32)
        return {
            f"{name}.index": self.ids(0, 2**bits, *shape),
            f"{name}.flip": np.int32(1) << self.numbers(0, bits, *shape),
            f"{name}.margin": margin,
        }


def given(o: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The options of a call that the op takes as they are."""
    return {name: o[name] for name in names if name in o}


SCALARS = ("log_beta", "log_gamma", "log_tau", "log_soft", "log_select")
"""Names of the scalars of reads."""


def lists_of(s: Source, tables: int, rows: int, n_slots: int, n_outputs: int, lists: str) -> np.ndarray:
    """Draw targets, for each row, each table or all of them."""
    shape = {"all": (1, 1), "table": (tables, 1), "row": (tables, rows)}[lists]
    return s.ids(-1, n_outputs, *shape, n_slots)


def tables(a: Arrays) -> Any:
    """Tables as the definitions take them: of floats, or integers with their exponents."""
    return (a["weights"], a["exponents"]) if "exponents" in a else a["weights"]


def exponentials(a: Arrays) -> dict[str, float]:
    """Return the scalars of a read, by the names of the definitions."""
    return {n.removeprefix("log_"): float(np.exp(np.float64(a[n]))) for n in a if n.startswith("log_")}


class Undecided(Exception):
    """Rounding decides a result, so that the definition does not: a score between two powers of two, integers that wrap."""


MAGNITUDES = "magnitudes"
"""Key of the largest sums of the magnitudes of addends, for cotangents in which all addends may cancel: one number, or those of scores."""

LOST = "lost"
"""Key of the largest differences by what fixed point drops of addends that are rounded, of the output `y` and of cotangents."""


def values_of(sums: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Arrays:
    """Return the values of sums by their names, or by new ones, with `MAGNITUDES`.

    Raises:
      Undecided: one is not defined.
    """
    renamed = {(names or {}).get(n, n): s for n, s in sums.items()}
    magnitudes = {n: s.size for n, s in renamed.items() if not np.shape(s.value)}
    values = {n: value_of(s) for n, s in renamed.items()}
    return {**values, **({MAGNITUDES: magnitudes} if magnitudes else {})}


def lost_of(y: Any, sums: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Arrays:
    """Return `LOST` of an output and its cotangents, which are sums; nothing where nothing is lost."""
    found = {"y": y, **{(names or {}).get(n, n): s for n, s in sums.items()}}
    lost = {n: float(np.max(s.error, initial=0)) for n, s in found.items() if np.any(s.error > 0)}
    return {LOST: lost} if lost else {}


def value_of(s: Any) -> np.ndarray:
    """Return the value of a sum.

    Raises:
      Undecided: it is not defined.
    """
    if np.isinf(s.error).any():
        raise Undecided
    value: np.ndarray = s.value
    return value
