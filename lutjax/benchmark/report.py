"""Measurements as a table on a terminal, in Markdown and in CSV, and as a picture."""

import csv
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from lutjax._extras import needed_by
from lutjax.benchmark.results import Machine, Result, duration, size

with needed_by(__name__):
    import rich.box
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
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
    if len({r.measurement.dtype for r in results}) > 1:
        names.insert(3, "dtype")
        for row, r in zip(rows, results, strict=True):
            row.insert(3, r.measurement.dtype)
    return names, rows


def _cells(result: Result) -> list[str]:
    measurement, timing = result.measurement, result.timing
    cells = [measurement.name, measurement.row, measurement.implementation]
    cells += [result.note, ""] if timing is None else [duration(timing.p50), duration(timing.p20, timing.p80)]
    cells += [size(measurement.bytes_moved), duration(result.limit)]
    cells.append("" if result.ratio is None else f"{result.ratio:.2g}")
    if timing is None or timing.peak_bytes is None:
        return [*cells, "", ""]
    return [*cells, size(timing.peak_bytes), f"{timing.peak_bytes / measurement.table_bytes:.2f}"]


def table(results: Iterable[Result], console: Console) -> Table:
    """Return the table for a terminal; without the columns that matter least where it is narrow."""
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
    """Return the table for a page."""
    names, rows = columns(results)
    lines = [names, ["---" if number < 3 else "--:" for number in range(len(names))], *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{machine}\n\n{body}\n\n{FOOTER}\n"


_COLUMN = 60  # bars, before another column is begun
_BAR, _GAP = 0.17, 0.12  # inches: of a bar, and between what is measured


def plot(machine: Machine, results: Iterable[Result], path: Path) -> None:
    """Bars of the times, a mark at each limit, as a PNG."""
    measured: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        if r.timing is not None:
            measured.setdefault((r.measurement.name, r.measurement.row, r.measurement.dtype), []).append(r)
    columns = _in_columns(list(measured.values()))
    heights = [sum(_BAR * len(group) + _GAP for group in column) for column in columns]
    height = max(*heights, _BAR)
    figure = Figure(figsize=(8.5 * len(columns), 1.6 + height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot: no window system, no global state
    everything = [r for group in measured.values() for r in group]
    names = list(dict.fromkeys(r.measurement.implementation for r in everything))
    dtypes = {r.measurement.dtype for r in everything}
    for axes, column in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        _bars(axes, column, names, several_dtypes=len(dtypes) > 1)
        axes.set_ylim(height, 0)
        if everything:
            _time_axis(axes, [t for r in everything for t in _times(r)])
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    order = [label for label in (*names, _LIMIT, _CUDA) if label in handles]
    figure.suptitle(str(machine), fontsize=9)
    if order:
        figure.legend(
            [handles[label] for label in order],
            order,
            loc="outside lower center",
            ncols=len(order),
            fontsize=9,
        )
    figure.savefig(path, format="png", dpi=120, metadata={"Software": "lutjax bench"})


_LIMIT, _CUDA = "limit: bytes that have to move / bandwidth of a copy", "CUDA runtime"


def _in_columns(groups: list[list[Result]]) -> list[list[list[Result]]]:
    """Groups one below the other, in as few columns of about equal length as hold them."""
    n_bars = sum(map(len, groups))
    columns: list[list[list[Result]]] = [[] for _ in range(max(1, -(-n_bars // _COLUMN)))]
    before = 0
    for group in groups:
        columns[min(before * len(columns) // max(n_bars, 1), len(columns) - 1)].append(group)
        before += len(group)
    return [column for column in columns if column] or [[]]


def _times(result: Result) -> list[float]:
    """Times that a picture shows of a result, in seconds."""
    found = [result.limit, *([result.cuda.seconds] if result.cuda else [])]
    return found if result.timing is None else [result.timing.p50, *found]


def _bars(axes: Any, groups: list[list[Result]], names: list[str], *, several_dtypes: bool) -> None:
    """A bar for each result, in inches from the top, and the name of each group beside it."""
    top, ticks, labels = 0.0, [], []
    placed: list[tuple[float, Result]] = []
    for group in groups:
        measurement = group[0].measurement
        top += _GAP / 2
        ticks.append(top + _BAR * len(group) / 2)
        labels.append(
            f"{measurement.name}  {measurement.row}" + (f"  {measurement.dtype}" if several_dtypes else "")
        )
        placed += [(top + _BAR * (number + 0.5), r) for number, r in enumerate(group)]
        top += _BAR * len(group) + _GAP / 2
    for number, name in enumerate(names):
        of_name = [(p, r.timing.p50) for p, r in placed if r.measurement.implementation == name and r.timing]
        if not of_name:
            continue
        places, times = zip(*of_name, strict=True)
        axes.barh(places, times, height=0.9 * _BAR, color=f"C{number}", label=name)
        # In a column at the right, so that no number can be taken for that of a mark.
        text = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 7, "color": f"C{number}"}
        for place, seconds in of_name:
            axes.text(1.01, place, duration(seconds), **text)
    mark: dict[str, Any] = {"linestyle": "none", "markeredgewidth": 2}
    limits = [(r.limit, place) for place, r in placed]
    axes.plot(*_columns(limits), "|", color="black", markersize=9, label=_LIMIT, **mark)
    known = [(r.cuda.seconds, place) for place, r in placed if r.cuda]
    if known:
        axes.plot(*_columns(known), "x", color="red", markersize=6, label=_CUDA, **mark)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(axis="y", length=0)


def _columns(rows: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in rows], [y for _, y in rows]


def _time_axis(axes: Any, times: list[float]) -> None:
    """A logarithmic axis with times as labels, as many as have room."""
    low, high = min(times) / 2, max(times) * 1.5
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    decades = math.log10(high / low)
    subs = (1.0, 2.0, 5.0) if decades < 3 else (1.0,)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=100))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _tick(seconds)))
    axes.set_xlabel("time of a call")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _tick(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds > 0.999 else ("ms", 1e3) if seconds > 0.999e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"
