"""``python -m lutjax.cli``."""

from lutjax.cli import main

main()
