"""Checks of types in tests: jaxtyping's hook decorates every function of lutjax with `checked`."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or class whose annotations are checked; one that is made in a call of another as it is.

    Those are decorated anew in each call, which takes an eighth of the time of all tests.
    """
    return function if "<locals>" in function.__qualname__ else beartype(function)
