"""Optional packages, and the commands that install them."""

import functools
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXTRAS = {
    "PIL": "apps",
    "absl": "triton",
    "click": "apps",
    "flatbuffers": "export",
    "flax": "flax",
    "haiku": "haiku",
    "jax_triton": "triton",
    "matplotlib": "apps",
    "optax": "apps",
    "orbax": "apps",
    "pyarrow": "parquet",
    "rich": "apps",
    "safetensors": "bundles",
    "sklearn": "apps",
    "starlette": "serve",
    "tensorboardX": "tensorboard",
    "triton": "triton",
    "unicorn": "mcu",
    "uvicorn": "serve",
}
"""The extra that brings a package, by the package's name in an import."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "haiku": "dm-haiku",
    "jax_triton": "jax-triton",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "triton": "jax-triton",  # requires it
}
"""The name by which pip knows a package, where imports use another one."""

NATIVE = "lutjax_cpu"
"""The package of the native kernels. No index has it: pip builds it from ``native/`` of a checkout."""


def command(*packages: str) -> str:
    """Return the command that installs optional packages on this machine, or "" where one of them is of no extra.

    In a checkout of lutjax, and for a lutjax that pip installed from one, the command names the checkout. An installed wheel has none,
    and lutjax is on no index, so the command names the packages themselves.
    """
    optional = [package for package in packages if package != NATIVE]
    if not all(package in EXTRAS for package in optional):
        return ""
    folder = _checkout()
    here = folder is not None and _is_working_directory(folder)
    words = ["pip install"]
    if optional and folder is None:
        words += sorted({DISTRIBUTIONS.get(package, package) for package in optional})
    elif optional:
        extras = ",".join(sorted({EXTRAS[package] for package in optional}))
        words += ["-e"] if _is_editable() else []
        words.append(f'"{"." if here else folder}[{extras}]"')
    if NATIVE in packages:
        words.append("./native" if here or folder is None else f'"{folder / "native"}"')
        if folder is None:
            words.append("in a checkout of lutjax")
    return " ".join(words)


@functools.cache
def _checkout() -> Path | None:
    """Return the folder of the sources that this package runs from, or from which pip installed it; None if it is not on this machine."""
    folders = [Path(__file__).resolve().parents[1]]
    url = _direct_url().get("url", "")
    if url.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        folders.append(Path(url2pathname(urlsplit(url).path)))
    for folder in folders:
        if (folder / "pyproject.toml").is_file() and (folder / "native" / "pyproject.toml").is_file():
            return folder
    return None


def _is_editable() -> bool:
    """Return whether pip installed lutjax with ``-e``; without it another installation would be a copy of the sources."""
    return bool(_direct_url().get("dir_info", {}).get("editable"))


@functools.cache
def _direct_url() -> dict[str, Any]:
    """Return where pip installed lutjax from, as it records it (PEP 610); nothing for a package of an index."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("lutjax").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def _is_working_directory(folder: Path) -> bool:
    try:
        return Path.cwd().samefile(folder)
    except OSError:  # one of them was deleted
        return False


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Name the extra to install when an import in this block lacks an optional package.

    Raises:
      ModuleNotFoundError: the package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = missing(what, error)
        if message is None:
            raise
        # A block inside of this one has named a module; what its user imported or called is said instead.
        raise ModuleNotFoundError(message, name=error.name) from (error.__cause__ or error)


def missing(what: str, error: ModuleNotFoundError) -> str | None:
    """Return how to install the optional package that an error names, in a line; None if it names another package.

    Args:
      what: needs the package.
      error: says that it is not installed.
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"{what} needs {package}, which is not installed: {command(package)}"


def attribute(package: str, name: str, modules: Mapping[str, str]) -> Any:
    """Return a name of a package whose modules are imported where they are used: they need optional packages, and importing the package does not.

    Args:
      package: its full name.
      name: one of `modules`.
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


def importable(package: str, modules: Mapping[str, str]) -> list[str]:
    """Return the names of such a package that can be imported on this machine, for its ``__dir__``.

    `help`, `inspect.getmembers` and completion get every name that ``dir`` lists, and pass on what that raises.

    Args:
      package: its full name.
      modules: as for `attribute`.
    """
    found = []
    for name in modules:
        try:
            attribute(package, name, modules)
        except ModuleNotFoundError:
            continue
        found.append(name)
    return sorted(found)
