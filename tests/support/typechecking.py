"""Checks of types in tests: jaxtyping's hook decorates every function of lutjax with `checked`."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or class whose annotations are checked; one that is made in a call of another as it is.

    Those are decorated anew in each call, which takes an eighth of the time of all tests. A function is decorated when it
    is first called: every process of tests imports all functions, and calls few.
    """
    if "<locals>" in function.__qualname__:
        return function
    if isinstance(function, type):
        return beartype(function)
    decorated: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def when_called(*args: Any, **kwargs: Any) -> Any:
        if not decorated:
            decorated.append(beartype(function))
        return decorated[0](*args, **kwargs)

    return when_called
