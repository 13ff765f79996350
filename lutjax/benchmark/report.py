"""What was measured, as a table on a terminal, in Markdown and in CSV, and as a picture."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from lutjax._extras import needed_by
from lutjax.benchmark.results import Machine, Result, duration, size

with needed_by(__name__):
    import rich.box
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table


FOOTER = (
    "dense: forward and backward, with the gradient of the tables as an array. in-place: forward, backward and a step of "
    "SGD in the tables' own memory. update: this step alone. "
    "Limit: the bytes that have to move (a row once for each use, as if nothing was cached) over the copy bandwidth "
    "measured in the same run. It is a reference, not a promise: caches can beat it, and every call has the "
    "same inputs, so what fits a cache stays there. An implementation's kernels run where it has any, those in plain "
    "JAX elsewhere."
)


def csv_writer(file: TextIO) -> Callable[[Result], None]:
    """Writes the names of the columns when called first, then a line; each reaches the file at once."""
    writer: csv.DictWriter[str] | None = None

    def write(result: Result) -> None:
        nonlocal writer
        record = result.record()
        if writer is None:
            writer = csv.DictWriter(file, list(record), lineterminator="\n")
            writer.writeheader()
        writer.writerow(record)
        file.flush()

    return write


def columns(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Names of the columns and text of the rows; a column of the CUDA runtime only where it was measured."""
    results = list(results)
    names = ["shape", "what", "by", "p50", "p20-p80", "moves", "limit", "ratio", "memory", "/ tables"]
    rows = [_cells(r) for r in results]
    if any(r.cuda for r in results):
        names.append("CUDA")
        for row, r in zip(rows, results, strict=True):
            row.append(duration(r.cuda.seconds) if r.cuda else "")
    if len({r.case.dtype for r in results}) > 1:
        names.insert(3, "dtype")
        for row, r in zip(rows, results, strict=True):
            row.insert(3, r.case.dtype)
    return names, rows


def _cells(result: Result) -> list[str]:
    case, timing = result.case, result.timing
    cells = [case.name, case.row, case.implementation]
    cells += [result.note, ""] if timing is None else [duration(timing.p50), duration(timing.p20, timing.p80)]
    cells += [size(case.bytes_moved), duration(result.limit)]
    cells.append("" if result.ratio is None else f"{result.ratio:.2g}")
    if timing is None or timing.peak_bytes is None:
        return [*cells, "", ""]
    return [*cells, size(timing.peak_bytes), f"{timing.peak_bytes / case.table_bytes:.2f}"]


def table(results: Iterable[Result], console: Console) -> Table:
    """For a terminal; without the columns that matter least where it is narrow."""
    names, rows = columns(results)
    left_out: list[str] = []
    for least in ("p20-p80", "/ tables", "moves", "limit"):
        made = _table(names, rows, left_out)
        if Measurement.get(console, console.options.update(max_width=1000), made).maximum <= console.width:
            break
        left_out.append(least)
    return _table(names, rows, left_out)


def _table(names: list[str], rows: list[list[str]], left_out: list[str]) -> Table:
    made = Table(box=rich.box.SIMPLE, padding=(0, 1, 0, 0), caption=FOOTER, caption_justify="left")
    shown = [number for number, name in enumerate(names) if name not in left_out]
    for number in shown:
        made.add_column(names[number], justify="left" if number < 3 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*(row[number] for number in shown))
    return made


def markdown(machine: Machine, results: Iterable[Result]) -> str:
    """For a page."""
    names, rows = columns(results)
    lines = [names, ["---" if number < 3 else "--:" for number in range(len(names))], *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{machine}\n\n{body}\n\n{FOOTER}\n"


def plot(machine: Machine, results: Iterable[Result], path: Path) -> None:
    """Bars of the times, a mark at each limit, as a PNG."""
    results = [r for r in results if r.timing is not None]
    figure = Figure(figsize=(9, 1.5 + 0.26 * max(len(results), 1)), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no window system, no global state
    axes = figure.subplots()
    for number, implementation in enumerate(dict.fromkeys(r.case.implementation for r in results)):
        those = [(place, r) for place, r in enumerate(results) if r.case.implementation == implementation]
        times = [r.timing.p50 * 1e3 for _, r in those if r.timing is not None]
        axes.barh([place for place, _ in those], times, color=f"C{number}", label=implementation)
    places = range(len(results))
    mark: dict[str, Any] = {"linestyle": "none", "markersize": 10, "markeredgewidth": 2}
    axes.plot(
        [r.limit * 1e3 for r in results], places, "|", color="black", label="limit: bytes / copy", **mark
    )
    known = [(place, r.cuda) for place, r in enumerate(results) if r.cuda]
    if known:
        axes.plot(
            [c.seconds * 1e3 for _, c in known], [p for p, _ in known], "x", color="red", label="CUDA", **mark
        )
    axes.set_yticks(
        places, [f"{r.case.name}  {r.case.row}  {r.case.implementation}" for r in results], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms per call")
    axes.set_title(str(machine), fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    if results:
        axes.set_xscale("log")
        axes.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=120)
