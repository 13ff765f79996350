"""Running a command again with large memory pages."""

import os
import sys

import click

_TUNABLE = "glibc.malloc.hugetlb=1"


huge_pages_option = click.option(
    "--huge-pages",
    is_flag=True,
    help="Restart with huge memory pages (glibc): faster for large tables on a CPU.",
)


def restart_with_huge_pages() -> None:
    """Replace the process by the same command with huge pages for its memory, and say so.

    Rows of large tables lie all over the memory, and finding them costs a CPU as much as reading them; larger pages
    are found faster. glibc reads its settings when a process starts, so there is no way but to start again. Does
    nothing where they are on already.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return
    if not sys.platform.startswith("linux"):
        raise click.UsageError("--huge-pages works on Linux only; leave it out.")
    tunables = f"{tunables}:{_TUNABLE}" if tunables else _TUNABLE
    click.echo(f"Restarting with GLIBC_TUNABLES={tunables}", err=True)
    sys.stdout.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-m", "lutjax", *sys.argv[1:]],
        {**os.environ, "GLIBC_TUNABLES": tunables},
    )
