"""Cache resets for functions with compiled programs or implementation choices, after a test has changed their inputs."""

import lutjax


def compiled():
    """Clear compiled programs."""
    from lutjax.dispatch import _transforms

    _transforms.forget()


def choices():
    """Clear cached implementation choices after a test has bypassed the registry to change implementations."""
    lutjax.kernel_registry._resolved.clear()
    compiled()
