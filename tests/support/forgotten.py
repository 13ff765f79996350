"""Functions that forget what earlier calls of a process compiled and chose, after a test has changed on what that depends."""

import lutjax


def compiled():
    """Forget what was compiled."""
    from lutjax.dispatch import _transforms

    _transforms.forget()


def choices():
    """Choose implementations anew, as where those that are registered have changed behind the registry's back."""
    lutjax.kernel_registry._resolved.clear()
    compiled()
