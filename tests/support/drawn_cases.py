"""Hypothesis-drawn op cases with varying sizes and values, and their reference results."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from cases import implementations

import lutjax
from lutjax import testing
from lutjax.cases import Case, Draw, Tag

Arrays = dict[str, Any]
GRID, TIES, NORMAL, NAN, INFINITE = "grid", "ties", "normal", "nan", "infinite"
FINITE = (GRID, TIES, NORMAL)


class Values(Draw):
    """Arrays of one kind: multiples of 1/4, values with many ties, normal values, or multiples of 1/4 mixed with NaN or infinities."""

    def __init__(self, op: str, kind: str, dtype: str, seed: int):
        super().__init__(op, kind, jnp.dtype(dtype), seed)

    def grid(self, shape: tuple[int, ...], steps: int, dtype: Any = None) -> jax.Array:
        rng, dtype = self._rng, self.dtype if dtype is None else jnp.dtype(dtype)
        values = rng.integers(-steps, steps + 1, shape) / 4
        if self.shape == TIES:
            values = rng.choice([-1.0, -0.0, 0.0, 1.0], shape)
        elif self.shape == NORMAL:
            values = rng.normal(size=shape) * steps / 8
        elif self.shape in (NAN, INFINITE):
            special = [np.nan] if self.shape == NAN else [-np.inf, np.inf]
            values = np.where(rng.random(shape) < 0.125, rng.choice(special, shape), values)
        return jnp.asarray(np.asarray(values).astype(dtype))

    def inputs(self, shape: tuple[int, ...]) -> jax.Array:
        return self.grid(shape, 8)


@dataclasses.dataclass(frozen=True)
class Spec:
    """An op at one size in one dtype, with value kinds for its cases. All cases share the same programs."""

    op: str
    sizes: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    kinds: tuple[str, ...] = FINITE
    seeds: int = 1

    def __str__(self) -> str:
        return f"{self.op}, {dict(self.sizes)}, {self.dtype}"

    def cases(self) -> Iterator[Case]:
        """Yield a case for each value kind and seed."""
        for kind in self.kinds:
            for seed in range(self.seeds):
                module = testing.cases_of(self.op)
                yield module.module.case(Values(self.op, kind, self.dtype, seed), dict(self.sizes))

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with support for the dtype."""
        return jax.enable_x64(True) if self.dtype == "float64" else contextlib.nullcontext()


def spec(
    op: str, dtype: str | None = None, kinds: tuple[str, ...] = FINITE, seeds: int = 1, **sizes: int
) -> Spec:
    """Return a spec, by default in the op's first dtype."""
    dtype = testing.cases_of(op).dtypes[0] if dtype is None else dtype
    return Spec(op, tuple(sizes.items()), dtype, kinds, seeds)


WITH_NAN = (*FINITE, NAN)
REPRESENTATIVES: dict[str, tuple[Spec, ...]] = {
    "detect": (spec("detect", batch=3, inputs=5, detectors=3, bits=4, dead_zone=2, kinds=WITH_NAN),),
    "detect_signs": (spec("detect_signs", batch=5, bits=3, dead_zone=2, kinds=WITH_NAN),),
    "margins": (
        spec("margins", batch=3, inputs=4, detectors=6, bits=2, groups=3, kinds=WITH_NAN),
        spec("margins", batch=3, inputs=4, detectors=6, bits=2, groups=2, shared=1, single=1),
    ),
    "lookup": (spec("lookup", batch=5, detectors=6, bits=2, outputs=3, groups=2, kinds=(*WITH_NAN, INFINITE)),),
    "sparse_lookup": (
        spec("sparse_lookup", batch=4, detectors=4, bits=2, slots=3, outputs=5, groups=2, kinds=WITH_NAN),
        spec("sparse_lookup", batch=4, detectors=3, bits=1, slots=2, outputs=3, longest=7),
    ),
    "weighted_lookup": (
        spec("weighted_lookup", batch=4, detectors=4, rows=3, outputs=3, ways=3, valued=2, groups=2, kinds=WITH_NAN),
    ),
    "scored_lut": tuple(
        spec("scored_lut", batch=3, inputs=5, detectors=4, bits=3, outputs=3, kinds=(GRID, NORMAL), **options)
        for options in (
            {"read": 0, "groups": 2, "keep": 1},
            {"read": 2, "single": 1},
            {"read": 6, "groups": 2, "sum_groups": 1},
        )
    ),
    "lookup_attention": (
        spec(
            "lookup_attention", batch=2, queries=5, detectors=2, bits=2, position_bits=1, outputs=3,
            keys=6, key_bits=1, query_start=3, key_start=1, window=4, segments=2, kinds=WITH_NAN,
        ),
        spec(
            "lookup_attention", batch=2, queries=5, detectors=2, bits=1, position_bits=2, outputs=4,
            shared=1, slots=2, blocks=2, key_blocks=3, each_start=3, distances=3,
        ),
        spec("lookup_attention", batch=1, queries=3, detectors=1, bits=1, position_bits=1, outputs=2, keys=4, causal=0),
    ),
    "lut_pair_attention": (
        spec(
            "lut_pair_attention", batch=2, queries=4, inputs=3, detectors=2, bits=2, position_bits=2, outputs=3,
            keys=5, query_start=3, key_start=1, window=4, segments=2, dead_zone=2, kinds=WITH_NAN,
        ),
        spec(
            "lut_pair_attention", batch=1, queries=4, inputs=2, detectors=2, bits=3, position_bits=2, outputs=3,
            interleave=1, causal=0, shared=1, slots=2, blocks=2, key_blocks=3,
        ),
    ),
    "lut_at_places": (
        spec("lut_at_places", batch=2, height=3, channels=4, detectors=4, bits=2, outputs=3, of_group=2, groups=2,
             kernel=2, stride=2, padding=1, dead_zone=2),
        spec("lut_at_places", batch=2, height=3, channels=2, detectors=4, bits=2, outputs=3, groups=2, kernel=2,
             kernel_width=1, reached=4),
    ),
    "bilinear_gates": (
        spec("bilinear_gates", batch=4, inputs=3, gates=5),
        spec("bilinear_gates", batch=4, inputs=3, gates=5, readers=1, features_first=1),
    ),
    "gate_network": (spec("gate_network", batch=3, inputs=3, gates=5, layers=3, outputs=2, readers=1, features_first=1),),
    "soft_lut": (spec("soft_lut", batch=4, inputs=3, gates=5, bits=3, readers=1, features_first=1),),
    "binary_lut": (spec("binary_lut", batch=4, inputs=3, gates=5, bits=3, readers=1, features_first=1),),
    "logic_trees": (
        spec("logic_trees", batch=3, height=4, channels=2, trees=2, leaves=4, width=3, kernel=2, padding=1, pool=2,
             pool_width=3, around=1, stride=2, stride_width=1, readers=1),
    ),
    "packed_lut": (spec("packed_lut", batch=2, inputs=4, gates=3, bits=3, kinds=(GRID,)),),
}  # fmt: skip
"""Specs for each op, together covering all its options; small, since the fast tests compile a program for each."""
for _op in lutjax.kernel_registry.ops():
    if _op not in REPRESENTATIVES:
        _module = testing.cases_of(_op)
        REPRESENTATIVES[_op] = tuple(
            spec(_op, **_module.sizes[n]) for n in _module.tagged(Tag.FAST)
        )


# ------------------------------------------------------------------------------------- drawn sizes
# Sizes of arrays; all other sizes choose options.
LENGTHS = {
    **dict.fromkeys(("batch", "queries", "keys"), 13),
    **dict.fromkeys(
        ("inputs", "outputs", "gates", "detectors", "rows", "height", "channels", "trees"), 9
    ),
    **dict.fromkeys(("slots", "ways"), 4),
}
EMPTY = ("batch", "outputs")


@st.composite
def specs(draw: Any, op: str, most: Mapping[str, int] | None = None) -> Spec:
    """Draw an op spec: a tested size with other compatible array lengths."""
    module, limits = testing.cases_of(op), {**LENGTHS, **(most or {})}
    base = dict(module.sizes[draw(st.sampled_from(sorted(module.sizes)))])
    for name in sorted(set(base) & set(LENGTHS)):
        least = 0 if name in EMPTY and op != "gate_network" else 1
        base[name] = draw(st.integers(least, limits[name]))
    if "longest" in base:  # an edge needs an output
        base["outputs"] = max(base["outputs"], 1)
    if "bits" in base:
        base["bits"] = max(min(base["bits"], 4), 1)
    _fit(op, base)
    # A list without an edge adds nothing, where a table adds zero times a NaN.
    is_finite = op in ("logic_trees", "gate_network", "scored_lut") or "longest" in base
    kinds = FINITE if is_finite else WITH_NAN
    dtype = draw(st.sampled_from(("float32", "float32", "bfloat16", "float64")))
    dtype = dtype if dtype in module.dtypes else module.dtypes[0]
    return Spec(op, tuple(base.items()), dtype, kinds if dtype != "uint32" else (GRID,), 2)


def _fit(op: str, s: dict[str, int]) -> None:
    """Adjust sizes so that groups, windows, positions and padding fit the arrays."""
    if op == "lut_at_places" and "of_group" in s:
        s["of_group"] = max(s["channels"] // s["groups"], 1)
        s["channels"] = s["of_group"] * s["groups"]
    if "groups" in s:
        s["detectors"] = s["groups"] * -(-max(s["detectors"], 1) // s["groups"])
    for name in ("height", "width"):
        if name in s and "kernel" in s:
            s[name] = (
                max(
                    s[name],
                    s["kernel"],
                    s.get("kernel_width", 1),
                    s.get("pool", 1),
                    s.get("pool_width", 1),
                )
                + 1
            )
    if s.get("interleave"):
        s["position_bits"] = s["inputs"]
    if "inputs" in s and op not in (
        "gate_network",
        "packed_lut",
        "soft_lut",
        "binary_lut",
        "bilinear_gates",
    ):
        s["inputs"] = max(s["inputs"], 2)
        s["position_bits"] = s["inputs"] if s.get("interleave") else s.get("position_bits", 0)
    if "position_bits" not in s or op not in ("lookup_attention", "lut_pair_attention"):
        s.pop("position_bits", None)
    s.pop("distances", None)


# ------------------------------------------------------------------------------------- results
def cotangents(case: Case, outputs: Mapping[str, Any]) -> Arrays:
    """Return cotangents for differentiable outputs, with the case's kind if finite."""
    kind = case.shape if case.shape in FINITE else GRID
    draw = Values(case.op, kind, "float32", 7)
    return {
        n: draw.grid(a.shape, 4, a.dtype)
        for n, a in outputs.items()
        if jnp.issubdtype(a.dtype, jnp.floating)
    }


def tolerance(dtype: Any) -> float | None:
    """Return the tolerance for inexact sums over normal values, or None for the default tolerance."""
    return {"float64": 1e-12, "float32": 1e-5}.get(jnp.dtype(dtype).name)


@functools.lru_cache(maxsize=8)
def _program(key: Any, implementation: Any, context: str, call: Any) -> Any:
    op, *_ = key
    if implementation is None:
        function = getattr(lutjax.reference, op)
    else:
        function = functools.partial(
            lutjax.kernel_registry.function(op), implementation=implementation
        )

    def run(differentiable: Arrays, fixed: Arrays, ct: Arrays | None) -> tuple[Arrays, Arrays]:
        f = lambda d: call(function, {**d, **fixed})  # noqa: E731
        return testing._value_and_cotangents(f, differentiable, ct or {})

    return jax.jit(run)


class _Call:
    """A case's call. Calls with the same sizes are equal, so they share programs."""

    def __init__(self, key: Any, call: Any):
        self.key, self.call = key, call

    def __call__(self, *arguments: Any) -> Arrays:
        outputs: Arrays = self.call(*arguments)
        return outputs

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Call) and self.key == other.key


def results(
    spec: Spec, case: Case, implementation: Any = None, context: str = "", ct: Arrays | None = None
) -> tuple[Arrays, Arrays]:
    """Return outputs and cotangents for an implementation, or for the reference if None.

    Args:
      context: name for a test's patches, to separate compiled programs between contexts.
      ct: output cotangents; by default from `cotangents`.
    """
    key: tuple[Any, ...] = (spec.op, spec.sizes, spec.dtype)
    if "longest" in dict(spec.sizes):  # lists of edges have a length of their own
        key = (*key, case.shape, id(case))
    run = _program(key, implementation, context, _Call(key, case.call))
    if ct is None:
        ct = cotangents(
            case, jax.eval_shape(lambda d, f: run(d, f, None)[0], case.differentiable, case.fixed)
        )
    return run(case.differentiable, case.fixed, ct)  # type: ignore[no-any-return]


PLAIN = ("xla", "native")


def implemented(op: str) -> list[str]:
    """Return an op's implementations without an interpreter on this machine."""
    return [i for i in implementations(op) if i in PLAIN]


def compare(what: str, actual: tuple[Arrays, Arrays], expected: tuple[Arrays, Arrays]) -> None:
    """Compare outputs and cotangents by name. Definitions give no output without samples."""
    for kind, a, e in zip(("output", "cotangent"), actual, expected, strict=True):
        for name, array in a.items():
            if e[name] is not None:
                nearest = np.asarray(e[name]).astype(array.dtype)
                if array.dtype == np.float32 and not np.any(nearest):
                    # Addends of order 1 cancel: what remains is their rounding.
                    np.testing.assert_allclose(
                        array, nearest, rtol=0, atol=1e-6, err_msg=f"{what}: {kind}: {name}"
                    )
                    continue
                testing.assert_close(
                    f"{what}: {kind}: {name}", array, nearest, tolerance(array.dtype)
                )


def compare_implementation(
    spec: Spec, case: Case, implementation: str, reference: tuple[Arrays, Arrays], context: str = ""
) -> None:
    """Compare an implementation with the reference results."""
    if context == "tpu" and case.shape not in FINITE:
        return  # a product with a one-hot matrix reads every row
    try:
        result = results(spec, case, implementation, context, cotangents(case, reference[0]))
    except lutjax.NoImplementationError:
        if implementation != "native":  # native kernels leave some arguments to plain JAX
            raise
        return
    compare(f"{spec}, {case.shape}, {implementation} {context}", result, reference)
