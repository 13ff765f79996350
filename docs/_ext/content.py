"""Markdown for the site's directives. Nothing here needs Sphinx, so tests read pages as the site shows them."""

import functools
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
INHERITED = "Module,Variable,Param,Pytree,Object,tuple,str,int,dict,BaseException,Exception,ValueError,object,Enum,StrEnum,PyTreeNode"
"""Classes of other libraries. The reference leaves out members inherited from them."""


# ------------------------------------------------------------------------------------- kernels
def op_table(_: str = "", __: str = "") -> str:
    """Return the table of ops with a kernel in each implementation except plain JAX."""
    from lutjax.dispatch.registry import kernel_registry
    from lutjax.status.matrix import COLUMNS, rows

    columns = [column for column in COLUMNS if column.implementation != "xla"]
    lines = [
        f"| op | {' | '.join(c.title for c in columns)} | sparse updates |",
        "| --- |" + " --- |" * 5,
    ]
    for op in dict.fromkeys(op for op, _ in rows()):
        found = [bool(c.spec(op) or kernel_registry.announced(op, c.key)) for c in columns]
        found.append("update" in kernel_registry.directions(op))
        lines.append(f"| `{op}` | {' | '.join('yes' if one else '—' for one in found)} |")
    return "\n".join(lines) + "\n"


@functools.cache
def _recorded_cells() -> list[Any]:
    from lutjax.status import matrix, results

    return list(matrix.matrix(results.read(), None))


def support_matrix(platform: str, _: str = "") -> str:
    """Return a platform's validation results: a table, dtypes, devices and reasons for missing kernels."""
    from lutjax.status import matrix, report

    columns = {column.key for column in matrix.COLUMNS if column.platform == platform}
    cells = [cell for cell in _recorded_cells() if cell.column in columns]
    [table] = report.platform_tables(cells)
    lines = [report.table_in_markdown(table), "", f"Dtypes: {'; '.join(table.dtypes)}.", ""]
    lines += ["Validation results:", "", *(f"- {line}" for line in report.remarks(cells)), ""]
    lines += [*(f"- **{line}**" for line in report.gaps(cells)), ""]
    if reasons := report.reasons(cells):
        lines += [":::{dropdown} Missing kernels", *(f"- {line}" for line in reasons), ":::", ""]
    return "\n".join(lines)


def support_legend(_: str = "", __: str = "") -> str:
    """Return the totals in the support matrix, and its legend."""
    from lutjax.status import report

    legend = [f"- {line}." for line in report.legend_in_markdown()]
    return "\n".join(
        [*legend, "", f"{len(_recorded_cells())} cells: {report.summary(_recorded_cells())}.", ""]
    )


# ------------------------------------------------------------------------------------- measurements
SCRIPTS = {
    "memory_gpu": "memory",
    **dict.fromkeys(("few_outputs", "h100", "h200", "integers", "scored"), "bench_table"),
}
"""Scripts in ``benchmarks`` that tabulate a file in ``docs/benchmarks``, where their names differ."""


def bench_table(arguments: str, _: str = "") -> str:
    """Return the table in a ``docs/benchmarks`` file, or in a named section.

    Args:
      arguments: a file name, and a section for files with several tables: ``"choose.json layers"``.
    """
    name, *part = arguments.split()
    path = DOCS / "benchmarks" / name
    _search_in("benchmarks")
    script = importlib.import_module(SCRIPTS.get(path.stem, path.stem))
    text: str = script.page_table(path, *part)
    return text


def _search_in(folder: str) -> None:
    """Import modules from a repository folder."""
    path = str(DOCS.parent / folder)
    if path not in sys.path:
        sys.path.append(path)


# ------------------------------------------------------------------------------------- reference
def equations() -> dict[str, list[str]]:
    """Return each op's equation labels, from the last table in ``docs/reference/equations.md``."""
    text = (DOCS / "reference" / "equations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(lutjax\.\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: re.findall(r"{eq}`([\w-]+)`", labels) for name, labels in rows}


def api(module: str, names: str) -> str:
    """Return a reStructuredText summary table with public names and their docstrings.

    Args:
      module: full module name.
      names: names in the module, possibly dotted, separated by white space.
    """
    lines = [
        "```{eval-rst}",
        f".. currentmodule:: {module}",
        "",
        ".. autosummary::",
        "   :nosignatures:",
        "",
    ]
    lines += [*(f"   {name}" for name in names.split()), ""]
    for name in (f"{module}.{name}" for name in names.split()):
        value = pkgutil.resolve_name(name)
        if inspect.isclass(value):
            lines += [
                f".. autoclass:: {name}",
                "   :members:",
                f"   :inherited-members: {INHERITED}",
                "",
            ]
        elif callable(value) and hasattr(value, "__name__"):
            lines += [f".. autofunction:: {name}", ""]
        else:
            lines += [f".. autodata:: {name}", "   :no-value:", ""]
    return "\n".join([*lines, "```", ""])


def cli(_: str = "", __: str = "") -> str:
    """Return a section with the help for each command."""
    import click

    from lutjax.cli._flags import SHOW_ALL
    from lutjax.cli._main import cli as group

    lines: list[str] = []

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        settings = {**command.context_settings, "terminal_width": 80, "max_content_width": 80}
        context = click.Context(command, info_name=name, parent=parent, **settings)
        context.meta[SHOW_ALL] = True
        lines.extend(
            [
                f"## {context.command_path}",
                "",
                "```text",
                command.get_help(context).rstrip(),
                "```",
                "",
            ]
        )
        for option in command.get_params(context):
            summary, _, details = getattr(option, "details", "").partition(". ")
            if details:
                lines.append(f"- `{option.opts[0]}`: {summary[:1].upper()}{summary[1:]}. {details}")
        lines.append("")
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None and not found.hidden:
                    add(found, inner, context)

    add(group, "lutjax", None)
    return "\n".join(lines)


DIRECTIVES: dict[str, Callable[[str, str], str]] = {
    "op-table": op_table,
    "support-matrix": support_matrix,
    "support-legend": support_legend,
    "bench-table": bench_table,
    "api": api,
    "cli": cli,
}
"""Functions that take the argument and the body of a directive. Except in `api`, the body is text for readers on a code host."""

BLOCK = re.compile(rf"^```{{({'|'.join(DIRECTIVES)})}} *(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


def expand(page: str, names: Iterable[str] = DIRECTIVES) -> str:
    """Return a page with its directives replaced by their Markdown."""
    wanted = set(names)
    return BLOCK.sub(
        lambda m: DIRECTIVES[m[1]](m[2].strip(), m[3]) if m[1] in wanted else m[0], page
    )
