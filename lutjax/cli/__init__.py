"""The `lutjax` command, which requires the extra ``apps``."""

import importlib.util
import logging
import os
import sys

_PACKAGES = ("click", "flax", "matplotlib", "optax", "orbax", "rich", "sklearn")


def main() -> None:
    """Run the command line; if packages are missing, explain their installation and exit with 1."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        from lutjax.extras import command

        sys.exit(f"lutjax: {', '.join(missing)} not found: {command(*missing)}")

    # Without a writable home directory, matplotlib prints irrelevant cache warnings.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from lutjax.cli._main import cli

        cli(prog_name="lutjax")
    except KeyboardInterrupt:  # during imports
        sys.exit(130)
    except SystemExit as ended:
        try:
            if sys.stdout is not None:  # closed by the shell
                sys.stdout.flush()
        except OSError:  # disk full, already reported: avoid Python's second report
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) and ended.code else 1)
        hosts = sys.modules.get("lutjax.training.hosts")
        if ended.code == 130 and (hosts is None or hosts.count() == 1):
            # Exit at once after an interrupt: a regular Python shutdown crashes while XLA compiles.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(130)
        raise
