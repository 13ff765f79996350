"""Validation of size arguments."""

import operator
from collections.abc import Sequence

from lutjax.arguments import format_value, normalize_value

Size = int | Sequence[int]  # height and width, or one number for both


def require(where: str, **sizes: int) -> None:
    """Raise if a size is less than 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{where}: {name} is {size}; it must be at least 1.")


def pair(where: str, name: str, size: Size, least: int = 1) -> tuple[int, int]:
    """Return height and width of a size."""
    sizes = _as_integers(normalize_value(size))
    if sizes is None or len(sizes) > 2:
        raise ValueError(
            f"{where}: {name} is {format_value(size)}; "
            "expected an integer, or a height and a width."
        )
    if min(sizes) < least:
        raise ValueError(f"{where}: {name} is {format_value(size)}; it must be at least {least}.")
    return sizes[0], sizes[-1]


def shape_of(where: str, name: str, shape: Size, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a map of values: height and width, and optionally channels."""
    sizes = _as_integers(normalize_value(shape))
    if sizes is None or len(sizes) not in ranks or min(sizes) < 1:
        one = "a number of values, " if 1 in ranks else ""
        raise ValueError(
            f"{where}: {name} is {format_value(shape)}; "
            f"expected {one}(height, width) or (height, width, channels), each at least 1."
        )
    return sizes


def as_image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return height, width and channels of a map; missing sizes are 1."""
    height, width, channels = {1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape)
    return height, width, channels


def _as_integers(size: Size) -> tuple[int, ...] | None:
    """Return integers as a tuple, None for anything else."""
    try:
        # `operator.index` accepts integers of NumPy, but no float with an integer value.
        sizes = tuple(operator.index(n) for n in (size if isinstance(size, Sequence) else (size,)))
    except TypeError:
        return None
    return sizes or None
