"""Op arguments at one size, and their generator."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from lutjax.values._detection import Detection
from lutjax.values._dtypes import accumulator

Arrays = dict[str, Any]
Sizes = Mapping[str, int]


class Tag(enum.StrEnum):
    """Purpose of a size. Untagged sizes run in one transformation and dtype."""

    FAST = "fast"
    """Runs in every transformation; smallest size divisible over two devices."""
    SLOW = "slow"
    """Slow suite only."""
    PLAIN = "plain"
    """Plain JAX and native kernels only; see `lutjax.dispatch.contract.Call.plain`."""
    NOT_PALLAS = "not pallas"
    """Every implementation except Pallas."""
    DTYPES = "dtypes"
    """Runs in every op dtype. `lutjax status` checks the first one."""
    BENCH = "bench"
    """Measured by `lutjax bench`."""
    CPU = "cpu"
    """Also measured on CPUs by default."""
    TUNE = "tune"
    """Tuned by `lutjax tune`."""


class Size(dict[str, int]):
    """Sizes by name, with tags.

    Example:
      >>> from lutjax.cases import Size, Tag
      >>> size = Size(Tag.FAST, batch=2, outputs=3)
      >>> size["batch"], size.tags == {Tag.FAST}, size.is_measured
      (2, True, False)
    """

    def __init__(self, *tags: Tag, **sizes: int):
        super().__init__(sizes)
        self.tags = frozenset(tags)

    @property
    def is_measured(self) -> bool:
        """True for a size to measure or tune; tests skip it."""
        return bool(self.tags & {Tag.BENCH, Tag.TUNE})

    def is_for(self, implementation: str) -> bool:
        """Return True if an implementation supports these arguments, as declared by the size."""
        platform = implementation.partition("/")[0]
        if Tag.PLAIN in self.tags:
            return platform in ("xla", "native")
        return Tag.NOT_PALLAS not in self.tags or platform != "pallas"


def sizes_by(*names: str) -> Callable[..., Size]:
    """Return a constructor for sizes: positional values in this order, tags, and keyword values.

    Example:
      >>> from lutjax.cases import Tag
      >>> from lutjax.cases._case import sizes_by
      >>> sizes_by("batch", "outputs")(2, 3, Tag.FAST, keys=5)
      {'batch': 2, 'outputs': 3, 'keys': 5}
    """

    def size(*given: int | Tag, **others: int) -> Size:
        numbers = (value for value in given if not isinstance(value, Tag))
        tags = (value for value in given if isinstance(value, Tag))
        return Size(*tags, **dict(zip(names, numbers, strict=True)), **others)

    return size


@dataclasses.dataclass(frozen=True)
class Axes:
    """Batch and detector axes, or None."""

    batch: int | None = None
    detector: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Op arguments at one size.

    Attributes:
      op, shape: names; the op's case module has the sizes.
      differentiable: differentiable arrays by name. Ops without gradients: arrays with a batch.
      fixed: all other arrays by name.
      axes: argument axes. output_axes: axes of differentiable outputs, or all outputs for ops
          without gradients.
      call: runs a function on these arguments, and returns outputs by name.
      table: table array name, or None.
      function: name of the `lutjax` function for `call`; None: the op.
      addresses: takes the reference module and all arrays, and returns the sum of accessed rows for
          a table ``[T, R, 1]``; None: use `call`.
      reference: name of the reference module.
    """

    op: str
    shape: str
    dtype: str
    differentiable: Arrays
    fixed: Arrays
    axes: Mapping[str, Axes]
    output_axes: Mapping[str, Axes]
    call: Callable[..., Arrays]
    table: str | None = None
    function: str | None = None
    addresses: Callable[[Any, Arrays], jax.Array] | None = None
    reference: str = "lutjax.reference"

    def __str__(self) -> str:
        return f"{self.op}-{self.shape}-{self.dtype}"


class Draw:
    """Random case arrays on coarse grids.

    Sums are exact in any order; ties, zeros and repeated rows are frequent.

    Attributes:
      op, shape, dtype: case properties.
    """

    def __init__(self, op: str, shape: str, dtype: np.dtype, seed: int = 0):
        self.op, self.shape, self.dtype = op, shape, dtype
        # Arrays depend on the names only: a size keeps its arrays if other sizes are added.
        self._rng = np.random.default_rng([seed, *op.encode(), *shape.encode()])

    def case(
        self,
        differentiable: Arrays,
        fixed: Arrays,
        axes: Mapping[str, Axes],
        output_axes: Mapping[str, Axes],
        call: Callable[..., Arrays],
        **options: Any,
    ) -> Case:
        """Return a case; see `Case`."""
        return Case(
            self.op,
            self.shape,
            self.dtype.name,
            differentiable,
            fixed,
            axes,
            output_axes,
            call,
            **options,
        )

    def grid(self, shape: tuple[int, ...], steps: int, dtype: DTypeLike | None = None) -> jax.Array:
        """Sample multiples of 1/4 from ``-steps/4`` to ``steps/4``."""
        # Multiples of 1/4 are exact in every dtype, so sums are equal in any order.
        values = self._rng.integers(-steps, steps + 1, shape) / 4
        return jnp.asarray(values.astype(self.dtype if dtype is None else jnp.dtype(dtype)))

    def weights(self, shape: tuple[int, ...]) -> jax.Array:
        """Sample parameters."""
        return self.grid(shape, 8)

    def normal(self, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Sample a normal distribution."""
        return jnp.asarray(self._rng.normal(size=shape), dtype)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
        """Sample a uniform distribution."""
        return jnp.asarray(self._rng.uniform(low, high, shape), self.dtype)

    def permutation(self, n: int) -> jax.Array:
        """Sample a permutation."""
        return jnp.asarray(self._rng.permutation(n), jnp.int32)

    def inputs(self, shape: tuple[int, ...]) -> jax.Array:
        """Sample detector inputs."""
        # A coarser grid has equal inputs, so comparisons tie.
        return self.grid(shape, 2 if self.shape == "ties" else 40)

    def ids(self, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
        """Sample integers in ``[low, high)``."""
        return jnp.asarray(self._rng.integers(low, max(high, low + 1), shape, np.int32))

    def uint32(self, shape: tuple[int, ...]) -> jax.Array:
        """Sample 32-bit words."""
        return jnp.asarray(self._rng.integers(0, 2**32, shape, np.uint32))

    def anchors(self, n_inputs: int, n_detectors: int, n_pairs: int) -> jax.Array:
        """Sample pairs with different inputs."""
        a = self._rng.integers(0, n_inputs, (n_detectors, n_pairs))
        # A nonzero offset: both ends of a pair differ, unless there is only one input.
        b = (a + self._rng.integers(1, max(n_inputs, 2), a.shape)) % n_inputs
        return jnp.asarray(np.stack([a, b], -1).astype(np.int32))

    def detection(self, shape: tuple[int, ...], bits: int) -> Detection:
        """Sample a detection. NumPy evaluates `lutjax.detect_signs` without compilation."""
        values = np.asarray(self.inputs((*shape, bits))).astype(accumulator(self.dtype))
        if bits:
            closest = np.argmin(np.abs(values), -1)
            margin = np.take_along_axis(values, closest[..., None], -1)[..., 0]
            index, flip = ((values > 0) << np.arange(bits)).sum(-1), 1 << closest
        else:
            # Without comparisons nothing can flip: the margin is infinite.
            index, flip = np.zeros((2, *shape), int)
            margin = np.full(shape, np.inf, values.dtype)
        return Detection(
            jnp.asarray(index, jnp.int32), jnp.asarray(flip, jnp.int32), jnp.asarray(margin), bits
        )


class Detections:
    """Detection arguments: differentiable margins, and ids.

    Attributes:
      margins, ids: arrays by name. axes: their axes.
    """

    def __init__(self) -> None:
        self.margins: Arrays = {}
        self.ids: Arrays = {}
        self.axes: dict[str, Axes] = {}
        self._bits: dict[str, int] = {}

    def add(self, name: str, d: Detection, axes: Axes) -> None:
        """Add a detection."""
        self.margins[f"{name}_margin"] = d.margin
        self.ids |= {f"{name}_index": d.index, f"{name}_flip": d.flip}
        self.axes |= {f"{name}_{part}": axes for part in ("index", "flip", "margin")}
        self._bits[name] = d.bits

    def detection(self, name: str, a: Arrays) -> Detection:
        """Return a detection from call arrays."""
        return Detection(
            a[f"{name}_index"], a[f"{name}_flip"], a[f"{name}_margin"], self._bits[name]
        )


def outputs_of_detection(d: Detection) -> Arrays:
    """Return outputs by name."""
    return {"index": d.index, "flip": d.flip, "margin": d.margin}
