"""``python -m lutjax``: the command `lutjax`."""

from lutjax.cli import main

main()
