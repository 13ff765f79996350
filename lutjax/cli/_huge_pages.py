"""Restart of a command with huge pages."""

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
    """Restart the process with huge pages for its memory, and print a message.

    Large tables have rows scattered over memory, and a TLB miss costs a CPU as much as the read
    itself; huge pages reduce these misses. glibc reads its settings at process start, so a restart
    is required. Do nothing if huge pages are already enabled.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" in tunables:
        return
    if not sys.platform.startswith("linux"):
        raise click.UsageError("--huge-pages works on Linux only; leave it out.")
    tunables = f"{tunables}:{_TUNABLE}" if tunables else _TUNABLE
    click.echo(f"Restarting with GLIBC_TUNABLES={tunables}", err=True)
    sys.stdout.flush()  # execve discards buffered output
    words = [sys.executable, "-m", "lutjax", *sys.argv[1:]]
    os.execve(sys.executable, words, {**os.environ, "GLIBC_TUNABLES": tunables})
