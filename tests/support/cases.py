"""Parts that suites of several backends share: ops, their sizes by tags, and the mark of cases that are left to the slow suite."""

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
"""Dtypes that no kernel of a platform has."""


def called_weights(name, array):
    """Return whether a parameter is a table: in tests without layers, which would say it."""
    return name.rpartition("/")[2] == "weights"


def slow(*values):
    """The values of a case of `pytest.mark.parametrize` that runs with ``-m slow`` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_where(values, is_slow):
    """Return the cases of `pytest.mark.parametrize`; a case is slow if `is_slow(*its values)`."""
    return [_as_slow(case) if is_slow(*case.values) else case for case in map(_as_case, values)]


def slow_except(values, *names, ids=None):
    """Return the cases of `pytest.mark.parametrize`; all but the named ones are slow.

    Args:
      values: the cases.
      names: ids of the fast cases.
      ids: the argument of `pytest.mark.parametrize`, if it has one.
    """
    return [case if named else _as_slow(case) for case, named in _find_named(values, names, ids)]


def slow_among(values, *names, ids=None):
    """Return the cases of `pytest.mark.parametrize`; the named ones are slow. Arguments as of `slow_except`."""
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
    """Return pairs of a case and whether its id is among the names; raise if a name is none of the ids."""
    found = [_as_case(case) for case in values]
    if ids is None or callable(ids):
        ids = [case.id or "-".join(_id_of(value, ids) for value in case.values) for case in found]
    ids = list(ids)
    if unknown := sorted(set(names) - set(ids)):
        raise ValueError(f"names: there are no cases {unknown}. Choose from {ids}.")
    return [(case, name in names) for case, name in zip(found, ids, strict=True)]


def _id_of(value, ids):
    """Return the id of a value as pytest forms it."""
    if ids is not None:
        return ids(value)
    return getattr(value, "__name__", None) or str(value)


def absence(module, error):
    """Return why kernels for NVIDIA GPUs cannot be imported on this platform; raise the error where it says something else."""
    from pallas_interpreter import WITHOUT_MOSAIC

    reasons = [
        f"{p} is not installed" for p in ("triton", "jax_triton") if importlib.util.find_spec(p) is None
    ]
    reasons += [WITHOUT_MOSAIC] if WITHOUT_MOSAIC else []
    if not reasons or not module.startswith(("lutjax.kernels._triton.", "lutjax.kernels._pallas.gpu.")):
        raise error
    return "; ".join(reasons)


def ops(direction="forward"):
    """Names of the ops that have cases and a direction."""
    registry = lutjax.kernel_registry
    return [op for op in registry.ops() if registry.cases(op) and direction in registry.directions(op)]


def ops_that_add():
    """Names of the ops that add up, and so take `accumulate`."""
    function = lutjax.kernel_registry.function
    return [op for op in ops() if "accumulate" in inspect.signature(function(op)).parameters]


def typed_size(op):
    """Name of the first size of an op that is tried in every dtype."""
    return testing.cases_of(op).tagged(Tag.DTYPES)[0]


def fast_size(op):
    """Name of the smallest size of an op that can be split over two devices."""
    return testing.cases_of(op).tagged(Tag.FAST)[0]


@functools.cache
def case_of(op, shape):
    """The case of a size in the op's first dtype, for all implementations: what the reference returns is computed once."""
    return testing.case(op, shape)


RATES = ("table", "row", "output", "edge")


def rates_of(case, kind):
    """Learning-rate factors of a case's table that differ by that."""
    t, r, o = case.differentiable[case.table].shape
    shape = {"table": (t,), "row": (1, r, 1), "output": (t, 1, o), "edge": (t, r, o)}[kind]
    return np.random.default_rng(0).uniform(0.25, 2, shape).astype(np.float32)


@functools.lru_cache(maxsize=32)
def split(op, dtype=None, **sizes):
    """The case of that size, for all transformations."""
    return testing.case(op, fast_size(op), dtype, **sizes)


def detections(*shape, bits):
    """Shapes and dtypes of a detection: of no device."""
    arrays = [jax.ShapeDtypeStruct(shape, t) for t in (np.int32, np.int32, np.float32)]
    return jax.eval_shape(functools.partial(lutjax.Detection, bits=bits), *arrays)


def implementations(op, direction="forward"):
    """Return the implementations that can run on the backend that tests run on."""
    backend = lutjax.Backend(machine.backend())
    return [
        spec.names[0] if spec.platform != "pallas" else spec.names[1]
        for spec in lutjax.kernel_registry.candidates(op)
        if spec.backend in (lutjax.Backend.ANY, backend) and direction in spec.directions
    ]


@contextlib.contextmanager
def skipping_what_is_left_to_others(implementation):
    """Skip a test whose calls an implementation in Pallas leaves to others: some of its kernels are for a part of the calls."""
    try:
        yield
    except lutjax.NoImplementationError as error:
        if not implementation.startswith("pallas"):
            raise
        pytest.skip(str(error.candidates[0].reason))


def at_sizes(
    sizes=lambda module: module.sizes, direction="forward", is_slow=lambda size: Tag.SLOW in size.tags
):
    """Values ``op, implementation, shape`` of a test at sizes of every op.

    Args:
      sizes: names of an op's sizes, of its module of cases. is_slow: says of a size whether the slow suite has it.
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
    """Values ``op, implementation, shape, dtype`` of a test in every dtype but the first, at the sizes meant for it.

    Args:
      first_only: at the first of these sizes alone, and ops that take long to compile in the slow suite.
    """
    found = []
    for values in at_sizes(lambda module: module.tagged(Tag.DTYPES)[: 1 if first_only else None], direction):
        (op, implementation, shape), is_slow = values_of(values)
        for dtype in testing.cases_of(op).dtypes[1:]:
            if dtype in _WITHOUT.get(implementation.partition("/")[0], ()):
                continue  # no kernels for it, as `explain` says
            one = (op, implementation, shape, dtype)
            is_slow = is_slow or (first_only and testing.cases_of(op).is_slow)
            found.append(slow(*one) if is_slow or dtype == "float16" else one)
    return found


def values_of(values):
    """The values of a case of `pytest.mark.parametrize`, and whether it is left to the slow suite."""
    return (values.values, bool(values.marks)) if hasattr(values, "marks") else (values, False)
