"""Words of training for the implementations that run its ops."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from lutjax.dispatch.registry import Backend, Declaration, KernelSpec, Platform, devices_of, kernel_registry
from lutjax.training import kernels


def spec(platform, backend, **options):
    declared = Declaration(directions=("forward", "backward"))
    return KernelSpec(
        "an op", Platform(platform), Backend(backend), "somewhere", declared=declared, **options
    )


NATIVE = spec("native", "cpu", about=lambda: "for this CPU")
TRITON = spec("triton", "gpu")
PLAIN = spec("xla", "any")
X = jax.ShapeDtypeStruct((2, 3), "float32")
ANCHORS = jax.ShapeDtypeStruct((1, 2, 2), "int32")
ARGUMENTS = {"detect_signs": (X,), "detect": (X, ANCHORS), "margins": (X, ANCHORS)}


@pytest.fixture
def words(monkeypatch):
    """Returns the words for calls of ops whose candidates are these."""

    def make(of_op):
        calls = [made for op in of_op for made in kernel_registry.calls_of(op, *ARGUMENTS[op])]
        registry = SimpleNamespace(considered=lambda made, device: of_op[made.call.op])
        monkeypatch.setattr(kernels, "kernel_registry", registry)
        return kernels.words(calls, devices_of([jnp.ones(1)])[0])

    return make


def test_each_op_is_said_once_with_what_runs_it(words):
    native = {"forward": [(NATIVE, None), (PLAIN, None)], "backward": [(NATIVE, None), (PLAIN, None)]}
    assert words({"detect": native, "margins": native, "detect_signs": native}) == [
        "kernels: native code, for this CPU, for detect, margins and detect_signs"
    ]
    assert words({}) == []


def test_of_plain_jax_it_is_said_why(words):
    """Say it of implementations for such devices; those for others are nothing that could be had."""
    half = [(NATIVE, "has no float16"), (TRITON, "runs on gpu, the call runs on cpu (cpu)"), (PLAIN, None)]
    missing = [(NATIVE, "is not installed"), (PLAIN, None)]
    found = words(
        {
            "detect": {"forward": half, "backward": half},
            "margins": {"forward": missing},
            "detect_signs": {"forward": half},
        }
    )
    assert found == [
        "kernels: plain JAX for detect, margins and detect_signs",
        "no native code for detect and detect_signs: has no float16",
        "no native code for margins: is not installed",
    ]


def test_the_choice_is_that_of_the_registry():
    x = jnp.ones((2, 3))
    made = kernel_registry.calls_of("detect_signs", x)
    device = devices_of([x])[0]
    with kernel_registry.use_implementation("xla"):
        first, *_ = kernels.words(made, device)
    assert first == "kernels: plain JAX for detect_signs"
    chosen = kernel_registry.resolve("detect_signs", x)
    assert (chosen.platform == "native") == kernels.words(made, device)[0].startswith(
        "kernels: native code, "
    )
