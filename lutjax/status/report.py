"""The matrix as text, JSON and Markdown."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import jax

import lutjax
from lutjax.dispatch.contract import Direction
from lutjax.status.matrix import COLUMNS, Cell, State, rows

if TYPE_CHECKING:
    from rich.table import Table

PLATFORMS = {"cpu": "CPU", "cuda": "NVIDIA GPU", "tpu": "TPU"}
"""Headings of the tables, by platform of their columns."""

LEGEND = {
    "validated": (
        "outputs and gradients, or the updated table, agree with `lutjax.reference` at one size "
        "from the test suite"
    ),
    "compiles": (
        "libtpu compiles the kernel ahead of time, within the chip's memory; it has not run on a "
        "TPU"
    ),
    "lowers": "JAX lowers the kernel for the device; nothing has compiled it",
    "decomposed": "plain JAX runs the fused op as its component ops, which have their own rows",
    "—": "no kernel: the op runs in plain JAX",
}
"""Meanings of the words in the tables."""


def totals(cells: Iterable[Cell]) -> dict[str, int]:
    """Return cell counts by state."""
    count = Counter(cell.state for cell in cells)
    return {str(state): count[state] for state in State if count[state]}


def gaps(cells: Iterable[Cell]) -> list[str]:
    """Return lines for missing and failing cells, one per op, direction and column."""
    return _format_groups(
        (f"{c.op} {c.direction}, {_title(c.column)}: {c}", c.dtype) for c in cells if c.state.is_gap
    )


def reasons(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each column and reason without a kernel. Tables list missing dtypes."""
    by_kernel = _group_by_kernel(cells)
    return _format_groups(
        (f"{_title(column)}: {dtypes[0].reason}", f"{op} {direction}")
        for (op, direction, column), dtypes in by_kernel.items()
        if all(cell.state == State.UNSUPPORTED for cell in dtypes)
    )


def not_installed(cells: Iterable[Cell]) -> list[str]:
    """Return the missing packages, one line for each column and package."""
    missing = (
        f"{_title(c.column)}: {c.reason}" for c in cells if c.state == State.UNKNOWN and c.reason
    )
    return list(dict.fromkeys(missing))


def remarks(cells: Iterable[Cell]) -> list[str]:
    """Return a line for each column with devices, version and date of its checks."""
    recorded = [
        c for c in cells if c.state in (State.RUNS, State.RAN, State.COMPILES, State.LOWERS)
    ]
    return list(dict.fromkeys(f"{_title(c.column)}: {c}" for c in recorded))


def _groups(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    found: dict[str, dict[str, None]] = {}
    for line, of in pairs:
        found.setdefault(line, {})[of] = None
    return [(line, list(of)) for line, of in found.items()]


def _format_groups(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{line} ({', '.join(of)})" for line, of in _groups(pairs)]


def _title(key: str) -> str:
    return next(column.title for column in COLUMNS if column.key == key)


@dataclasses.dataclass(frozen=True)
class PlatformTable:
    """Validation results on one platform.

    Attributes:
      platform: key of `PLATFORMS`.
      columns: implementation names.
      rows: op, or op and directions, and a word for each column. Directions with equal words share
        a row.
      dtypes: dtypes that kernels of each column support unless a cell lists its own.
    """

    platform: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]
    dtypes: list[str]


def platform_tables(cells: Iterable[Cell]) -> list[PlatformTable]:
    """Return a table per platform with cells."""
    by_kernel = _group_by_kernel(cells)
    directions: dict[str, list[Direction]] = {}
    for op, direction in rows():
        directions.setdefault(op, []).append(direction)
    tables = []
    for platform in PLATFORMS:
        columns = [
            c for c in COLUMNS if c.platform == platform and any(c.key == k[2] for k in by_kernel)
        ]
        usual = {
            c.key: _usual_dtypes(cells for k, cells in by_kernel.items() if k[2] == c.key)
            for c in columns
        }
        table_rows = []
        for op, of_op in directions.items():
            # Directions with the same words share a row, so that the table stays short.
            shared: dict[tuple[str, ...], list[Direction]] = {}
            for direction in of_op:
                words = tuple(
                    _describe_cells(by_kernel.get((op, direction, c.key), []), usual[c.key])
                    for c in columns
                )
                if any(words):
                    shared.setdefault(words, []).append(direction)
            for words, group in shared.items():
                name = op if len(shared) == 1 else f"{op} {', '.join(group)}"
                table_rows.append((name, list(words)))
        if columns:
            dtypes = [f"{c.name}: {', '.join(usual[c.key]) or 'none'}" for c in columns]
            tables.append(PlatformTable(platform, [c.name for c in columns], table_rows, dtypes))
    return tables


def _group_by_kernel(cells: Iterable[Cell]) -> dict[tuple[str, str, str], list[Cell]]:
    """Return cells by op, direction and column."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.op, cell.direction, cell.column), []).append(cell)
    return found


def _supported_dtypes(cells: list[Cell]) -> tuple[str, ...]:
    return tuple(cell.dtype for cell in cells if cell.state != State.UNSUPPORTED)


def _usual_dtypes(kernels: Iterable[list[Cell]]) -> tuple[str, ...]:
    """Return the most frequent dtypes in a column."""
    count = Counter(dtypes for cells in kernels if (dtypes := _supported_dtypes(cells)))
    return count.most_common(1)[0][0] if count else ()


def _describe_cells(cells: list[Cell], usual: tuple[str, ...]) -> str:
    """Return the word for a kernel, with dtypes that differ from the usual ones of its column."""
    if not cells:
        return ""
    supported = _supported_dtypes(cells)
    by_word: dict[str, list[str]] = {}
    for cell in cells:
        if cell.dtype in supported:
            by_word.setdefault(cell.state.word, []).append(cell.dtype)
    if not by_word:
        return "—"
    if len(by_word) == 1 and (supported == usual or len(cells) == 1):
        return next(iter(by_word))
    return "; ".join(f"{word} ({', '.join(dtypes)})" for word, dtypes in by_word.items())


def rich_tables(cells: Iterable[Cell]) -> "Iterator[Table]":
    """Yield terminal tables by platform."""
    from rich.table import Table

    for table in platform_tables(cells):
        shown = Table(
            "op",
            *table.columns,
            title=PLATFORMS[table.platform],
            title_justify="left",
            caption=f"dtypes: {'; '.join(table.dtypes)}",
            caption_justify="left",
        )
        for name, words in table.rows:
            shown.add_row(name, *words)
        yield shown


def as_json(cells: Iterable[Cell]) -> str:
    """Totals, gaps, and every cell."""
    cells = list(cells)
    document: dict[str, Any] = {
        "lutjax": lutjax.__version__,
        "jax": jax.__version__,
        "totals": totals(cells),
        "gaps": gaps(cells),
        "cells": [
            {name: value for name, value in dataclasses.asdict(cell).items() if value}
            for cell in cells
        ],
    }
    return json.dumps(document, indent=1)


def summary(cells: Iterable[Cell]) -> str:
    """Return the number of cells in each state."""
    count = Counter(cell.state for cell in cells)
    return ", ".join(f"{count[state]} {state.word}" for state in State if count[state])


def markdown(cells: Iterable[Cell]) -> str:
    """Return the support matrix as a page."""
    cells = list(cells)
    lines = [
        "# Support matrix",
        "",
        "Written by `lutjax status`. A row is an op, or some of its directions.",
        "",
        f"**{len(cells)} cells: {summary(cells)}.**",
        "",
        *(f"- {line}" for line in gaps(cells)),
    ]
    for table in platform_tables(cells):
        lines += ["", f"## {PLATFORMS[table.platform]}", "", table_in_markdown(table), ""]
        lines += [f"Dtypes: {'; '.join(table.dtypes)}."]
    for title, items in (
        ("Legend", legend_in_markdown()),
        ("Validation results", remarks(cells)),
        ("Missing kernels", reasons(cells)),
    ):
        lines += ["", f"## {title}", "", *(f"- {item}" for item in items)]
    return "\n".join([*lines, ""])


def legend_in_markdown() -> list[str]:
    """Return the legend in Markdown, without list markers."""
    return [f"**{word}**: {meaning}" for word, meaning in LEGEND.items()]


def table_in_markdown(table: PlatformTable) -> str:
    """Return a Markdown table for a platform."""
    lines = [f"| op | {' | '.join(table.columns)} |", f"| --- |{' --- |' * len(table.columns)}"]
    for name, words in table.rows:
        op, _, directions = name.partition(" ")
        lines.append(f"| `{op}`{directions and f' {directions}'} | {' | '.join(words)} |")
    return "\n".join(lines)
