"""The matrix as text, JSON and Markdown."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

import lutjax
from lutjax.cases import of as cases_of
from lutjax.status._matrix import COLUMNS, Cell, State, rows

if TYPE_CHECKING:
    from rich.table import Table

LETTERS = ", ".join(f"{state.letter} {state}" for state in State)
OLDER_LETTERS = "o ran, c compiles, l lowers, each with an older kernel source"
_ORDER = "float32, bfloat16, float16, float64"


def totals(cells: Iterable[Cell]) -> dict[str, int]:
    """Number of cells in each state."""
    count = Counter(cell.state for cell in cells)
    return {str(state): count[state] for state in State if count[state]}


def gaps(cells: Iterable[Cell]) -> list[str]:
    """Cells that are missing or fail, one line for each op, direction and column."""
    return _grouped(
        (f"{c.op} {c.direction}, {_title(c.column)}: {c}", c.dtype) for c in cells if c.state.is_gap
    )


def reasons(cells: Iterable[Cell]) -> list[str]:
    """Reasons of cells that are unsupported, one line for each column and reason."""
    return _grouped(
        (f"{_title(c.column)}: {c.reason}", f"{c.op} {c.direction}")
        for c in cells
        if c.state == State.UNSUPPORTED
    )


def not_installed(cells: Iterable[Cell]) -> list[str]:
    """Packages that are missing here, one line for each column and package."""
    missing = (f"{_title(c.column)}: {c.reason}" for c in cells if c.state == State.UNKNOWN and c.reason)
    return list(dict.fromkeys(missing))


def remarks(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each device, version and day of the checks, with the ops that had an older source."""
    recorded = [c for c in cells if c.state in (State.RUNS, State.RAN, State.COMPILES, State.LOWERS)]
    current = [(f"{_title(c.column)}: {c}", "") for c in recorded if not c.is_older]
    older = [(f"{_title(c.column)}: {c}", f"{c.op} {c.direction}") for c in recorded if c.is_older]
    return [*(line for line, _ in _groups(current)), *_grouped(older)]


def _groups(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    found: dict[str, dict[str, None]] = {}
    for line, of in pairs:
        found.setdefault(line, {})[of] = None
    return [(line, list(of)) for line, of in found.items()]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{line} ({', '.join(of)})" for line, of in _groups(pairs)]


def _title(key: str) -> str:
    return next(column.title for column in COLUMNS if column.key == key)


def _lines(cells: Iterable[Cell]) -> list[tuple[str, list[str]]]:
    """Each row's letters, a word for each column."""
    by_place = {cell.place: cell for cell in cells}
    lines = []
    for op, direction in rows():
        words = [
            "".join(
                by_place[place].letter
                for dtype in cases_of(op).dtypes
                if (place := (op, direction, column.key, dtype)) in by_place
            )
            for column in COLUMNS
        ]
        if any(words):
            lines.append((f"{op} {direction}", words))
    return lines


def table(cells: Iterable[Cell]) -> "Table":
    """The matrix for a terminal."""
    from rich.table import Table

    shown = Table(
        "op",
        *(column.title for column in COLUMNS),
        caption=f"{LETTERS}; {OLDER_LETTERS}",
        caption_justify="left",
    )
    for row, words in _lines(cells):
        shown.add_row(row, *words)
    return shown


def as_json(cells: Iterable[Cell]) -> str:
    """Totals, gaps, and every cell."""
    cells = list(cells)
    document: dict[str, Any] = {
        "lutjax": lutjax.__version__,
        "jax": jax.__version__,
        "totals": totals(cells),
        "gaps": gaps(cells),
        "cells": [
            {name: value for name, value in dataclasses.asdict(cell).items() if value} for cell in cells
        ],
    }
    return json.dumps(document, indent=1)


def summary(cells: Iterable[Cell]) -> str:
    """Return the totals in a line, and the number of cells with an older source."""
    cells = list(cells)
    older = sum(cell.is_older for cell in cells)
    of_older = [f"{older} of these with an older source"] if older else []
    return ", ".join([*(f"{count} {state}" for state, count in totals(cells).items()), *of_older])


def markdown(cells: Iterable[Cell]) -> str:
    """Return the support matrix page."""
    cells = list(cells)
    titles = [column.title for column in COLUMNS]
    lines = [
        f"| {row} | {' | '.join(f'`{w}`' if w else '' for w in words)} |" for row, words in _lines(cells)
    ]
    return "\n".join(
        [
            "# Support matrix",
            "",
            "Written by `lutjax status --recorded --markdown docs/status.md` from recorded validation results. Run",
            "`lutjax status` to check your own machine. Each letter is one cell: an op, direction, implementation",
            f"and dtype, in the order {_ORDER}.",
            "",
            f"{LETTERS}; {OLDER_LETTERS}.",
            "",
            f"**{len(cells)} cells: {summary(cells)}.**",
            "",
            "## Gaps",
            "",
            *([f"- {line}" for line in gaps(cells)] or ["None."]),
            "",
            "## Matrix",
            "",
            f"| op | {' | '.join(titles)} |",
            f"| --- |{' --- |' * len(titles)}",
            *lines,
            "",
            "- *Ran*: outputs and cotangents, or the updated table, agree with `lutjax.reference` at one size from the test suite.",
            "  Kernels from packages missing on your machine appear as recorded.",
            "- *Compiles*: libtpu compiles the kernel ahead of time, within the chip's memory. It has not run on a TPU.",
            "- *By its parts*: plain JAX runs a fused op as its component ops, which have their own cells.",
            "",
            "## Validation results",
            "",
            *(f"- {line}" for line in remarks(cells)),
            "",
            "## Unsupported cells",
            "",
            *(f"- {line}" for line in reasons(cells)),
            "",
        ]
    )
