"""Kernels of fused ops for tests: the reference in place of a kernel that needs a GPU."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

import lutjax
from lutjax import reference
from lutjax.ops.logic_trees import LogicTrees
from lutjax.ops.lut_at_places import LutAtPlaces


def _at_places(call: LutAtPlaces) -> jax.Array:
    images = call.x.reshape(len(call.x), *call.windows.image)
    options = {"windows": call.windows, "groups": call.groups, "epsilon": call.epsilon}
    y = reference.lut_at_places(images, call.weights, call.anchors, call.targets, call.n_outputs, **options)
    return y.reshape(len(images), call.n_places, call.n_outputs)


def _trees(call: LogicTrees) -> jax.Array:
    y = reference.logic_trees(call.x, call.coefficients, call.leaves, places=call.places)
    return y.reshape(len(call.leaves), call.n_groups, call.x.shape[1])


DEFINITIONS: dict[str, Callable[[Any], jax.Array]] = {"lut_at_places": _at_places, "logic_trees": _trees}


@contextlib.contextmanager
def on_cpu(op: str) -> Iterator[str]:
    """Register a kernel of a fused op for CPUs in this block: by default it is chosen before the parts. Yields its name."""
    of_call = DEFINITIONS[op]

    class Kernel:
        @staticmethod
        def forward(call, *, device):
            return of_call(call)

        @staticmethod
        def backward(call, cotangent, needs, *, device):
            wanted = {name: getattr(call, name) for name in needs}
            return jax.vjp(lambda arrays: of_call(call.replace(**arrays)), wanted)[1](cotangent)[0]

    lutjax.kernel_registry.register(op, "triton", "cpu")(Kernel)
    try:
        yield "triton/cpu"
    finally:
        lutjax.kernel_registry.unregister(op, "triton", "cpu")
