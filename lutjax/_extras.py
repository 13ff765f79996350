"""Optional packages, and the extras that bring them."""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

EXTRAS = {
    "PIL": "apps",
    "absl": "triton",
    "click": "apps",
    "flax": "flax",
    "haiku": "haiku",
    "jax_triton": "triton",
    "lutjax_cpu": "cpu",
    "matplotlib": "apps",
    "optax": "apps",
    "orbax": "apps",
    "pyarrow": "parquet",
    "rich": "apps",
    "safetensors": "bundles",
    "sklearn": "apps",
    "starlette": "serve",
    "triton": "triton",
    "uvicorn": "serve",
}
"""The extra that brings a package, by the package's name in an import."""


def command(*packages: str) -> str:
    """Return the command that installs optional packages, or "" where one of them is of no extra."""
    extras = sorted({EXTRAS.get(package, "") for package in packages})
    return f'pip install "lutjax[{",".join(extras)}]"' if all(extras) else ""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Imports in this block that lack an optional package say how to install it.

    Raises:
      ModuleNotFoundError: the package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or error.__cause__ is not None:  # said by a block inside of this one
            raise
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: {command(package)}", name=error.name
        ) from error


def attribute(package: str, name: str, modules: Mapping[str, str]) -> Any:
    """Return a name of a package whose modules are imported where they are used: they need optional packages, and importing the package does not.

    Args:
      package: its full name.
      modules: the module of the package that has each of its names.

    Raises:
      AttributeError: it has no such name.
      ModuleNotFoundError: an optional package is missing.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with needed_by(f"{package}.{name}"):
        module = importlib.import_module(f"{package}.{modules[name]}")
    return getattr(module, name)
