"""Sizes that the arguments of wirings have."""


def require(where: str, **sizes: int) -> None:
    """Raise if a size is less than 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{where}: {name} is {size}; it must be at least 1.")
