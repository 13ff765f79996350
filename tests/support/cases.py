"""Helpers shared by backend suites: ops, their sizes by tag, and marks for slow test cases."""

import contextlib
import functools
import importlib.util
import inspect

import jax
import machine
import numpy as np
import pytest

import lutjax
from lutjax import testing
from lutjax.cases import Tag

_WITHOUT = {"pallas": ("float64",), "native": ("float16", "float64")}
"""Dtypes without kernels, by platform."""


def called_weights(name, array):
    """Return True if a parameter is a table, judged by name for tests without layer metadata."""
    return name.rpartition("/")[2] == "weights"


def slow(*values):
    """Mark a `pytest.mark.parametrize` case to run only with ``-m slow``."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_where(values, is_slow):
    """Return `pytest.mark.parametrize` cases; a case is slow if `is_slow(*its values)`."""
    return [_as_slow(case) if is_slow(*case.values) else case for case in map(_as_case, values)]


def slow_except(values, *names, ids=None):
    """Return `pytest.mark.parametrize` cases; all but the named ones are slow.

    Args:
      values: cases.
      names: ids for the fast cases.
      ids: the `pytest.mark.parametrize` argument, if any.
    """
    return [case if named else _as_slow(case) for case, named in _find_named(values, names, ids)]


def slow_among(values, *names, ids=None):
    """Return `pytest.mark.parametrize` cases; the named ones are slow. Arguments match `slow_except`."""
    return [_as_slow(case) if named else case for case, named in _find_named(values, names, ids)]


def _as_case(values):
    if hasattr(values, "marks"):
        return values
    return pytest.param(*(values if isinstance(values, tuple) else (values,)))


def _as_slow(case):
    if any(mark.name == "slow" for mark in case.marks):
        return case
    return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)


def _find_named(values, names, ids):
    """Pair each case with True if its id is among the names; raise if a name matches no id."""
    result = [_as_case(case) for case in values]
    if ids is None or callable(ids):
        ids = [case.id or "-".join(_id_of(value, ids) for value in case.values) for case in result]
    ids = list(ids)
    if unknown := sorted(set(names) - set(ids)):
        raise ValueError(f"names: there are no cases {unknown}. Choose from {ids}.")
    return [(case, name in names) for case, name in zip(result, ids, strict=True)]


def _id_of(value, ids):
    """Return a value's id as formed by pytest."""
    if ids is not None:
        return ids(value)
    return getattr(value, "__name__", None) or str(value)


def absence(module, error):
    """Return the reason NVIDIA kernels cannot be imported on this platform; re-raise any other error."""
    from pallas_interpreter import WITHOUT_MOSAIC

    reasons = [
        f"{p} is not installed"
        for p in ("triton", "jax_triton")
        if importlib.util.find_spec(p) is None
    ]
    reasons += [WITHOUT_MOSAIC] if WITHOUT_MOSAIC else []
    if not reasons or not module.startswith(
        ("lutjax.kernels._triton.", "lutjax.kernels._pallas.gpu.")
    ):
        raise error
    return "; ".join(reasons)


def ops(direction="forward"):
    """Return ops with test cases and the given direction."""
    registry = lutjax.kernel_registry
    return [
        op for op in registry.ops() if registry.cases(op) and direction in registry.directions(op)
    ]


def ops_that_add():
    """Return ops with an accumulation, and therefore an `accumulate` argument."""
    function = lutjax.kernel_registry.function
    return [op for op in ops() if "accumulate" in inspect.signature(function(op)).parameters]


def typed_size(op):
    """Return an op's first size for tests in every dtype."""
    return testing.cases_of(op).tagged(Tag.DTYPES)[0]


def fast_size(op):
    """Return an op's smallest size with a split over two devices."""
    return testing.cases_of(op).tagged(Tag.FAST)[0]


@functools.cache
def case_of(op, shape):
    """Return a case in the op's first dtype, shared by all implementations so that its reference is computed once."""
    return testing.case(op, shape)


RATES = ("table", "row", "output", "edge")


def rates_of(case, kind):
    """Return learning-rate factors for a case's table, varying along the given kind."""
    t, r, o = case.differentiable[case.table].shape
    shape = {"table": (t,), "row": (1, r, 1), "output": (t, 1, o), "edge": (t, r, o)}[kind]
    return np.random.default_rng(0).uniform(0.25, 2, shape).astype(np.float32)


@functools.lru_cache(maxsize=32)
def split(op, dtype=None, **sizes):
    """Return a case with these sizes, shared by all transformations."""
    return testing.case(op, fast_size(op), dtype, **sizes)


def detections(*shape, bits):
    """Return detection shapes and dtypes, on no device."""
    arrays = [jax.ShapeDtypeStruct(shape, t) for t in (np.int32, np.int32, np.float32)]
    return jax.eval_shape(functools.partial(lutjax.Detection, bits=bits), *arrays)


def implementations(op, direction="forward"):
    """Return implementations for the current test backend."""
    backend = lutjax.Backend(machine.backend())
    return [
        spec.names[0] if spec.platform != "pallas" else spec.names[1]
        for spec in lutjax.kernel_registry.candidates(op)
        if spec.backend in (lutjax.Backend.ANY, backend) and direction in spec.directions
    ]


@contextlib.contextmanager
def skipping_what_is_left_to_others(implementation):
    """Skip a test if a Pallas implementation does not support its calls: some kernels cover only part."""
    try:
        yield
    except lutjax.NoImplementationError as error:
        if not implementation.startswith("pallas"):
            raise
        pytest.skip(str(error.candidates[0].reason))


def at_sizes(
    sizes=lambda module: module.sizes,
    direction="forward",
    is_slow=lambda size: Tag.SLOW in size.tags,
):
    """Return ``op, implementation, shape`` test values at sizes from every op.

    Args:
      sizes: function from an op's case module to size names.
      is_slow: predicate for sizes in the slow suite.
    """
    return [
        slow(op, i, name) if is_slow(module.sizes[name]) else (op, i, name)
        for op in ops(direction)
        for module in (testing.cases_of(op),)
        for i in implementations(op, direction)
        for name in sizes(module)
        if module.sizes[name].is_for(i)
    ]


def in_dtypes(direction="forward", first_only=False):
    """Return ``op, implementation, shape, dtype`` test values in every dtype but the first, at the sizes tagged for it.

    Args:
      first_only: use only the first tagged size, and leave ops with long compilation to the slow suite.
    """
    result = []
    for values in at_sizes(
        lambda module: module.tagged(Tag.DTYPES)[: 1 if first_only else None], direction
    ):
        (op, implementation, shape), is_slow = values_of(values)
        for dtype in testing.cases_of(op).dtypes[1:]:
            if dtype in _WITHOUT.get(implementation.partition("/")[0], ()):
                continue  # no kernels for it, as `explain` says
            one = (op, implementation, shape, dtype)
            is_slow = is_slow or (first_only and testing.cases_of(op).is_slow)
            result.append(slow(*one) if is_slow or dtype == "float16" else one)
    return result


def values_of(values):
    """Return a `pytest.mark.parametrize` case's values, and True if it is in the slow suite."""
    return (values.values, bool(values.marks)) if hasattr(values, "marks") else (values, False)
