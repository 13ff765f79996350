"""Sections of the page of these rows, `docs/coverage.md`, with the recorded errors of a run."""

import importlib.metadata
import json
import re

from folders import DOCS

from coverage_rows import SECTIONS
from coverage_rows._row import Row, Section

PATH = DOCS / "benchmarks" / "coverage.json"

Cells = dict[tuple[str, str], tuple[str, str]]


def write(measured: Cells) -> None:
    """Record the errors of a run, with the versions of its packages."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))
    rows = [
        {"section": section, "kernel": kernel, "value": value, "gradient": gradient}
        for (section, kernel), (value, gradient) in measured.items()
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    PATH.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n')


def read() -> tuple[Cells, str]:
    """Return the recorded errors and the versions of their run."""
    recorded = json.loads(PATH.read_text())
    cells = {(row["section"], row["kernel"]): (row["value"], row["gradient"]) for row in recorded["rows"]}
    return cells, recorded["versions"]


def cells(row: Row, value: float | None, gradient: float | None) -> tuple[str, str]:
    """Return errors as the page shows them, with one digit."""
    return _error(value), row.no_gradient or _error(gradient)


def render() -> str:
    """Return the sections of the page in Markdown."""
    measured, versions = read()
    text = f"Errors recorded with {versions}.\n"
    for number, section in enumerate(SECTIONS, 1):
        text += f"\n## {number}. {section.title}\n\n"
        text += "".join(f"{remark}\n" for remark in section.remarks) + "\n" * bool(section.remarks)
        text += "| kernel | served by | value | gradient |\n| --- | --- | --: | --: |\n"
        text += "".join(_line(section, row, measured) for row in section.rows)
    return text


def names_of(document: str) -> list[tuple[str, str]]:
    """Return section and kernel of each row in the document that the page follows."""
    found, title = [], ""
    for line in document.splitlines():
        if heading := re.fullmatch(r"##\s+(?:(\d+\.)\s+)?(.*)", line):
            title = heading[2] if heading[1] else ""
        elif (
            title
            and (row := re.fullmatch(r"\|\s*([\w/]+)\s*\|.*\|.*\|.*\|.*\|", line))
            and row[1] != "Kernel"
        ):
            found.append((title, row[1]))
    return found


def names() -> list[tuple[str, str]]:
    return [(section.title, row.name) for section in SECTIONS for row in section.rows]


def _line(section: Section, row: Row, measured: Cells) -> str:
    code = "<br>".join(f"`{statement}`" for statement in row.code).replace("|", "\\|")
    remark = " ".join(row.remark.split())
    return f"| {row.name} | {code}{'<br>' * bool(remark)}{remark} | {' | '.join(measured[section.title, row.name])} |\n"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}" if error else "exact"
