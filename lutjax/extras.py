"""Optional packages and their install commands."""

import functools
import importlib
import importlib.util
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
"""Extras by the package's import name."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "haiku": "dm-haiku",
    "jax_triton": "jax-triton",
    "orbax": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "triton": "jax-triton",  # requires it
}
"""Pip names for packages with a different import name."""

NATIVE = "lutjax_cpu"
"""Native kernel package. It is not on any index: pip builds it from a checkout's ``native/``."""


def command(*packages: str) -> str:
    """Return the install command for optional packages, or "" if a package has no extra.

    For installations from a checkout, the command names the checkout. Wheels have none, and lutjax
    is not on any index, so the command names the packages themselves.
    """
    optional = [package for package in packages if package != NATIVE]
    if not all(package in EXTRAS for package in optional):
        return ""
    folder = _checkout()
    in_checkout = folder is not None and _is_working_directory(folder)
    words = ["pip install"]
    if optional and folder is None:
        words += sorted({DISTRIBUTIONS.get(package, package) for package in optional})
    elif optional:
        extras = ",".join(sorted({EXTRAS[package] for package in optional}))
        words += ["-e"] if _is_editable() else []
        words.append(f'"{"." if in_checkout else folder}[{extras}]"')
    if NATIVE in packages:
        words.append("./native" if in_checkout or folder is None else f'"{folder / "native"}"')
        if folder is None:
            words.append("in a checkout of lutjax")
    return " ".join(words)


@functools.cache
def _checkout() -> Path | None:
    """Return the source folder for this installation, or None if not on this machine."""
    folders = [Path(__file__).resolve().parents[1]]
    url = _direct_url().get("url", "")
    if url.startswith("file:"):
        from urllib.parse import urlsplit
        from urllib.request import url2pathname

        folders.append(Path(url2pathname(urlsplit(url).path)))
    for folder in folders:
        # Other folders may have a pyproject.toml: that of a wheel is the site-packages folder.
        projects = (folder / "pyproject.toml", folder / "native" / "pyproject.toml")
        if all(path.is_file() for path in projects):
            return folder
    return None


def _is_editable() -> bool:
    """Return True if pip installed lutjax with ``-e``; otherwise a reinstall copies the sources."""
    return bool(_direct_url().get("dir_info", {}).get("editable"))


@functools.cache
def _direct_url() -> dict[str, Any]:
    """Return pip's recorded install source (PEP 610); empty for packages from an index."""
    import json
    from importlib import metadata

    try:
        text = metadata.distribution("lutjax").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    content: dict[str, Any] = json.loads(text) if text else {}
    return content


def _is_working_directory(folder: Path) -> bool:
    try:
        return Path.cwd().samefile(folder)
    except OSError:  # a folder was deleted
        return False


@contextmanager
def require_optional(what: str) -> Iterator[None]:
    """Name the extra to install if an import in this block lacks an optional package."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = install_hint(what, error)
        if message is None:
            raise
        # Replace an inner block's message: the user imported or called the outer name.
        raise ModuleNotFoundError(message, name=error.name) from (error.__cause__ or error)


def require(what: str, package: str) -> None:
    """Raise ModuleNotFoundError, with an install command, for a missing package; import nothing.

    Args:
      what: feature requiring the package.
      package: its import name.
    """
    if importlib.util.find_spec(package) is None:
        with require_optional(what):
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def install_hint(what: str, error: ModuleNotFoundError) -> str | None:
    """Return install instructions for an error's optional package, or None for other packages."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return f"{what} needs {package}, which is not installed: {command(package)}"


def attribute(package: str, name: str, modules: Mapping[str, str]) -> Any:
    """Import a name from a lazily loaded module that may need optional packages.

    `modules` has the defining module for each name.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    with require_optional(f"{package}.{name}"):
        module = importlib.import_module(f"{package}.{modules[name]}")
    return getattr(module, name)


def importable_names(package: str, modules: Mapping[str, str]) -> list[str]:
    """Return the importable names for a package's ``__dir__``.

    `help`, `inspect.getmembers` and completion access every listed name and propagate errors.
    """
    names = []
    for name in modules:
        try:
            attribute(package, name, modules)
        except ModuleNotFoundError:
            continue
        names.append(name)
    return sorted(names)
