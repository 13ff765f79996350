"""Fused-op kernels for tests: the reference stands in for a GPU kernel."""

import contextlib

import jax

import lutjax
from lutjax import reference


def _at_places(call):
    images = call.x.reshape(len(call.x), *call.windows.image)
    options = {"windows": call.windows, "groups": call.groups, "epsilon": call.epsilon}
    y = reference.lut_at_places(
        images, call.weights, call.anchors, call.targets, call.n_outputs, **options
    )
    return y.reshape(len(images), call.n_places, call.n_outputs)


def _trees(call):
    y = reference.logic_trees(call.x, call.coefficients, call.leaves, places=call.places)
    return y.reshape(len(call.leaves), call.n_groups, call.x.shape[1])


DEFINITIONS = {"lut_at_places": _at_places, "logic_trees": _trees}


@contextlib.contextmanager
def on_cpu(op):
    """Register a CPU kernel for a fused op in this block and yield its name. It has priority over the decomposition by default."""
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
