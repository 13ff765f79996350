"""Checks every row; from the folder `tests/support`, `python -m coverage_rows [--write] [--document FILE]`."""

import argparse
import sys
from pathlib import Path

from coverage_rows import SECTIONS, page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m coverage_rows", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help=f"record the errors in docs/benchmarks/{page.PATH.name}"
    )
    parser.add_argument(
        "--document", type=Path, help="the document: compare its rows with those here, and stop"
    )
    arguments = parser.parse_args()
    if arguments.document:
        theirs = page.names_of(arguments.document.read_text(errors="replace"))
        ours = [name for name in page.names() if name[0] != SECTIONS[-1].title]
        if theirs != ours:
            sys.exit(f"rows differ: {sorted(set(theirs) ^ set(ours)) or 'in order'}")
        print(f"the {len(theirs)} rows of {arguments.document.name}, in its order")
        return
    measured = {}
    for section in SECTIONS:
        for row in section.rows:
            found = row.checked()
            measured[section.title, row.name] = page.cells(row, *found)
            print(f"{section.title}: {row.name}", *measured[section.title, row.name], sep="  ", flush=True)
    if arguments.write:
        page.write(measured)


if __name__ == "__main__":
    main()
