"""Case modules, with defaults for omitted parts."""

import dataclasses
import functools
import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import lutjax
from lutjax.cases._case import Case, Draw, Size, Sizes, Tag
from lutjax.cases._traffic import Kind, Traffic
from lutjax.dispatch.registry import kernel_registry
from lutjax.values._detection import Detection
from lutjax.values._dtypes import FLOATS


@dataclasses.dataclass(frozen=True)
class CaseModule:
    """Cases of one op."""

    op: str
    module: ModuleType

    @property
    def sizes(self) -> dict[str, Size]:
        """Named test sizes."""
        return {name: size for name, size in self._sizes.items() if not size.is_measured}

    @property
    def measured_sizes(self) -> dict[str, Size]:
        """Named sizes for measurements or tuning."""
        return {name: size for name, size in self._sizes.items() if size.is_measured}

    @property
    def _sizes(self) -> dict[str, Size]:
        sizes: dict[str, Size] = self.module.SIZES
        return sizes

    def tagged(self, tag: Tag) -> tuple[str, ...]:
        """Return size names with a tag, in order."""
        return tuple(name for name, size in self._sizes.items() if tag in size.tags)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Op dtypes, the default first."""
        return tuple(getattr(self.module, "DTYPES", FLOATS))

    @property
    def reference(self) -> str:
        """Name of the module with the op's definition."""
        name: str = getattr(self.module, "REFERENCE", "lutjax.reference")
        return name

    @property
    def is_slow(self) -> bool:
        """True for slow compilation: only the parity suite runs the op every time."""
        return bool(getattr(self.module, "SLOW", False))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Measured shape kinds; by default one named like the op, with all sizes in order."""
        names = next((tuple(size) for size in self.measured_sizes.values()), None)
        default = () if names is None else (Kind(self.op, names),)
        kinds: tuple[Kind, ...] = getattr(self.module, "KINDS", default)
        return kinds

    def kind(self, sizes: Sizes) -> Kind:
        """Return the shape kind of measured sizes."""
        fits = (
            k for k in self.kinds if {n: s for n, s in sizes.items() if n not in k.sizes} == k.fixed
        )
        return next(fits)

    def case(self, shape: str, dtype: DTypeLike | None = None, **sizes: int) -> Case:
        """Return the case for a named size; `sizes` overrides values.

        Raises:
          ValueError: an unknown shape or dtype.
        """
        if shape not in self.sizes:
            raise ValueError(
                f"lutjax.testing: {self.op} has no shape {shape!r}; its shapes are "
                f"{', '.join(self.sizes)}."
            )
        name = self.dtypes[0] if dtype is None else jnp.dtype(dtype).name
        if name not in self.dtypes:
            raise ValueError(
                f"lutjax.testing: dtype is {name}; the dtypes are {', '.join(self.dtypes)}."
            )
        draw = Draw(self.op, shape, jnp.dtype(name))
        case: Case = self.module.case(draw, {**self.sizes[shape], **sizes})
        return dataclasses.replace(case, reference=self.reference)

    def measured(self, sizes: Sizes, dtype: str) -> Case:
        """Return the measured case at some sizes, with a fast generator."""
        draw = MeasuredDraw(self.op, "measured", jnp.dtype(dtype))
        case: Case = getattr(self.module, "measured", self.module.case)(draw, sizes)
        return case

    def traffic(self, sizes: Sizes) -> Traffic:
        """Return the required memory traffic at some sizes."""
        traffic: Traffic = self.module.traffic(sizes)
        return traffic


def find_module(op: str) -> CaseModule:
    """Return the cases of an op.

    Raises:
      ValueError: an unknown op, or one without cases.
    """
    name = kernel_registry.cases(op)
    if name is None:
        raise ValueError(
            f"lutjax.cases: {op} has no cases; give their module to "
            "kernel_registry.register_op(cases=...)."
        )
    return _load(op, name)


@functools.cache
def _load(op: str, module: str) -> CaseModule:
    return CaseModule(op, importlib.import_module(module))


class MeasuredDraw(Draw):
    """Random device arrays from a fast generator, for large tables.

    It supports `jax.jit` and `jax.eval_shape`.
    """

    def __init__(self, op: str, shape: str, dtype: np.dtype):
        super().__init__(op, shape, dtype)
        self._key = jax.random.key(0, impl="rbg")

    def _next_key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key

    def normal(self, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.normal(self._next_key(), shape, dtype)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
        return jax.random.uniform(self._next_key(), shape, self.dtype, low, high)

    def permutation(self, n: int) -> jax.Array:
        return jax.random.permutation(self._next_key(), n).astype(jnp.int32)

    def grid(self, shape: tuple[int, ...], steps: int, dtype: DTypeLike | None = None) -> jax.Array:
        values = jax.random.randint(self._next_key(), shape, -steps, steps + 1)
        return (values / 4).astype(self.dtype if dtype is None else dtype)

    def weights(self, shape: tuple[int, ...]) -> jax.Array:
        return self.uniform(shape, -1.0, 1.0)

    def inputs(self, shape: tuple[int, ...]) -> jax.Array:
        return self.normal(shape)

    def ids(self, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
        return jax.random.randint(self._next_key(), shape, low, max(high, low + 1))

    def uint32(self, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.bits(self._next_key(), shape, jnp.uint32)

    def anchors(self, n_inputs: int, n_detectors: int, n_pairs: int) -> jax.Array:
        return lutjax.sample_anchors(self._next_key(), n_inputs, n_detectors, n_pairs)

    def detection(self, shape: tuple[int, ...], bits: int) -> Detection:
        return lutjax.detect_signs(self.normal((*shape, bits)))
