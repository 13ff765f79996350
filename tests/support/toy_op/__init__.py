"""A third-party op, defined outside lutjax as in a separate package: registered, then unregistered."""

import contextlib

import lutjax


@contextlib.contextmanager
def registered():
    """Register the op and its kernels in this block."""
    registry = lutjax.kernel_registry
    registry.register_op("gained_lookup", "toy_op.gained_lookup", cases="toy_op.cases")
    try:
        registry.register(
            "gained_lookup",
            "xla",
            "any",
            "toy_op.kernels",
            directions=("forward", "backward", "update"),
        )
        yield "gained_lookup"
    finally:
        registry.unregister_op("gained_lookup")
