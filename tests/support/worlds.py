"""All lookup implementations by name, natively run or interpreted on this machine."""

import contextlib
import importlib.util

import pallas_interpreter
import pytest
from cases import slow_where

import lutjax

NAMES = (
    "xla", "xla, accelerators", "xla, TPUs", "triton", "triton, counted", "pallas/tpu",
    "pallas/tpu, resident",
)  # fmt: skip


def implements(name, op):
    """Return True if a world has its own implementation for an op."""
    names = {name for spec in lutjax.kernel_registry.candidates(op) for name in spec.names}
    return {
        "triton": "triton" in names,
        "xla, TPUs": "update" in lutjax.kernel_registry.directions(op),
        "triton, counted": op == "lookup_attention",
        "pallas/tpu": "pallas/tpu" in names,
        "pallas/tpu, resident": op in ("lookup", "sparse_lookup"),
    }.get(name, True)


def in_worlds(ops, fast):
    """Return ``world, op`` test cases. Most are slow; the fast ones cover some ops in any world and further ops in plain JAX.

    Args:
      ops: op names.
      fast: ops with fast cases in plain JAX; the first one is also fast in every other world except the resident one.
    """
    result = [(world, op) for world in NAMES for op in ops if implements(world, op)]
    return slow_where(
        result,
        lambda world, op: op not in (fast if world == "xla" else fast[:1]) or "resident" in world,
    )


@contextlib.contextmanager
def of(name, request):
    """Run an implementation in this block; yield its name for the ops."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    platform, _, how = name.partition(", ")
    with contextlib.ExitStack() as stack:
        if platform == "xla" and how:
            formulation = {"accelerators": "accelerator_formulation", "TPUs": "tpu_formulation"}
            request.getfixturevalue(formulation[how])
        if platform == "triton":
            if (
                importlib.util.find_spec("triton") is None
                or importlib.util.find_spec("jax_triton") is None
            ):
                pytest.skip("Triton kernels need triton and jax-triton, which are not installed")
            import triton_interpreter

            stack.enter_context(triton_interpreter.interpreted())
        if how == "counted":
            triton_interpreter.count_always(monkeypatch)
        if platform == "pallas/tpu":
            stack.enter_context(pallas_interpreter.interpreted("tpu"))
        if how == "resident":
            from lutjax.kernels._pallas.tpu import _tables

            monkeypatch.setattr(_tables, "MANY_ROWS", 2)
        yield platform.partition("/")[0]
