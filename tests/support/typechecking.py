"""Type checks in tests: jaxtyping's hook decorates every lutjax function with `checked`."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or class with checked annotations; return functions and classes defined inside a call unchanged.

    Local functions would be decorated anew in each call, which takes an eighth of the total test time. A function is decorated at its
    first call: every test process imports all functions, but calls few.
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
