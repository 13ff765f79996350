"""Measurements as terminal table, Markdown, CSV and picture."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from lutjax.benchmark.results import Machine, Result, duration, size
from lutjax.extras import require_optional

with require_optional(__name__):
    import rich.box
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table


FOOTER = (
    "dense: forward and backward, with the gradient of the tables as an array. in-place: forward, "
    "backward and a step of SGD in the tables' own memory. update: this step alone. Limit: the "
    "bytes that have to move (a row once for each use, as if nothing was cached) over the copy "
    "bandwidth measured in the same run. It is a reference, not a promise: caches can beat it, "
    "and every call has the same inputs, so what fits a cache stays there. An implementation's "
    "kernels run where it has any, those in plain JAX elsewhere."
)


def csv_writer(file: TextIO) -> Callable[[Result], None]:
    """Return a function that writes a flushed line per result, after a header."""
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
    """Return column names and row cells, with a CUDA column if measured."""
    results = list(results)
    names = [
        "shape",
        "what",
        "by",
        "p50",
        "p20-p80",
        "moves",
        "limit",
        "ratio",
        "memory",
        "/ tables",
    ]
    rows = [_cells(r) for r in results]
    if any(r.cuda for r in results):
        names.append("CUDA")
        for row, r in zip(rows, results, strict=True):
            row.append(duration(r.cuda.seconds) if r.cuda else "")
    if len({r.measurement.dtype for r in results}) > 1:
        names.insert(3, "dtype")
        for row, r in zip(rows, results, strict=True):
            row.insert(3, r.measurement.dtype)
    return names, rows


def _cells(result: Result) -> list[str]:
    measurement, timing = result.measurement, result.timing
    cells = [measurement.name, measurement.row, measurement.implementation]
    cells += (
        [result.note, ""]
        if timing is None
        else [duration(timing.p50), duration(timing.p20, timing.p80)]
    )
    cells += [size(measurement.bytes_moved), duration(result.limit)]
    cells.append("" if result.ratio is None else f"{result.ratio:.2g}")
    if timing is None or timing.peak_bytes is None:
        return [*cells, "", ""]
    return [*cells, size(timing.peak_bytes), f"{timing.peak_bytes / measurement.table_bytes:.2f}"]


def table(results: Iterable[Result], console: Console) -> Table:
    """Return the terminal table. Narrow terminals omit less important columns."""
    names, rows = columns(results)
    left_out: list[str] = []
    for least in ("p20-p80", "/ tables", "moves", "limit"):
        made = _table(names, rows, left_out)
        if (
            Measurement.get(console, console.options.update(max_width=1000), made).maximum
            <= console.width
        ):
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
    """Return the Markdown table."""
    names, rows = columns(results)
    lines = [names, ["---" if number < 3 else "--:" for number in range(len(names))], *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{machine}\n\n{body}\n\n{FOOTER}\n"


def plot(machine: Machine, results: Iterable[Result], path: Path) -> None:
    """Save a PNG: bars for times, marks for limits."""
    shown = [(r, r.timing.p50) for r in results if r.timing is not None]
    figure = Figure(figsize=(8.5, 2 + 0.18 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no window system, no global state
    figure.suptitle(str(machine), fontsize=9)
    axes = figure.subplots()
    for number, name in enumerate(dict.fromkeys(r.measurement.implementation for r, _ in shown)):
        places = [k for k, (r, _) in enumerate(shown) if r.measurement.implementation == name]
        axes.barh(places, [shown[k][1] for k in places], color=f"C{number}", label=name)
        # A right-hand column separates these numbers from the marks.
        text: dict[str, Any] = {
            "transform": axes.get_yaxis_transform(),
            "va": "center",
            "fontsize": 7,
            "color": f"C{number}",
        }
        for k in places:
            axes.text(1.01, k, duration(shown[k][1]), **text)
    if shown:
        mark: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 2}
        limits = [r.limit for r, _ in shown]
        axes.plot(limits, range(len(shown)), "|", color="black", markersize=9, label=_LIMIT, **mark)
        cuda = [(r.cuda.seconds, k) for k, (r, _) in enumerate(shown) if r.cuda]
        if cuda:
            axes.plot(*zip(*cuda, strict=True), "x", color="red", markersize=6, label=_CUDA, **mark)
        _time_axis(
            axes, [*limits, *(seconds for _, seconds in shown), *(seconds for seconds, _ in cuda)]
        )
        figure.legend(
            loc="outside lower center", ncols=len(axes.get_legend_handles_labels()[0]), fontsize=9
        )
    several = len({r.measurement.dtype for r, _ in shown}) > 1
    first: dict[str, int] = {}
    for k, (r, _) in enumerate(shown):
        of_dtype = f"  {r.measurement.dtype}" if several else ""
        first.setdefault(f"{r.measurement.name}  {r.measurement.row}{of_dtype}", k)
    axes.set_yticks(list(first.values()), list(first), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "lutjax bench"})


_LIMIT, _CUDA = "limit: bytes that have to move / bandwidth of a copy", "CUDA runtime"


def _time_axis(axes: Any, times: list[float]) -> None:
    """Format a logarithmic time axis."""
    low, high = min(times) / 2, max(times) * 1.5
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=100))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(EngFormatter("s"))
    axes.set_xlabel("time of a call")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
