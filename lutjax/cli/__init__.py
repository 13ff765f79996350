"""The `lutjax` command. Its packages come with ``pip install 'lutjax[apps]'``."""

import importlib.util
import sys

_PACKAGES = ("click", "flax", "matplotlib", "optax", "orbax", "rich", "sklearn")


def main() -> None:
    """Runs the command line; without its packages, says how to install them and exits with status 1."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"lutjax: {', '.join(missing)} not found: pip install 'lutjax[apps]'")

    from lutjax.cli._main import cli

    cli(prog_name="lutjax")
