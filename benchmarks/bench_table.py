"""Implementations side by side in Markdown, from `lutjax bench --csv` files.

Run `python benchmarks/bench_table.py FILE ...`.

Rows in later files replace rows with the same shape, dtype and direction.
"""

import csv
import sys
from pathlib import Path

from harness import table as markdown_table  # beside this file

from lutjax.benchmark.results import duration, size

_ROWS = {
    "forward": "forward",
    "dense": "forward + backward, dense",
    "in-place": "in place",
    "update": "update alone",
}


def table(paths: list[Path]) -> str:
    """Return a row per shape and direction: times of each implementation and the CUDA runtime, and the lower bound."""
    cases: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for record in csv.DictReader(file):
                key = record["shape"], record["dtype"], record["row"]
                cases.setdefault(key, {})[record["implementation"]] = record
    names = [
        n for n in ("triton", "pallas", "xla") if any(n in by_name for by_name in cases.values())
    ]
    lines = []
    for (shape, dtype, row), by_name in cases.items():
        first = by_name[next(name for name in names if name in by_name)]
        times = [_time(by_name[n]["p50_s"]) if n in by_name else "" for n in names]
        limit = f"{_time(first['limit_s'])} ({size(int(first['bytes']))})"
        peak = _peak(first) if first["peak_bytes"] else ""
        dtypes = "" if dtype == "float32" else f", {dtype} tables"
        sizes = "" if shape == first["sizes"] else f" ({first['sizes']})"
        lines.append(
            [f"{shape}{dtypes}{sizes}", _ROWS[row], *times, _time(first["cuda_s"]), limit, peak]
        )
    records = [record for by_name in cases.values() for record in by_name.values()]
    return f"{markdown_table(['shape', '', *names, 'CUDA', 'limit', 'peak / tables'], lines, 2)}\n{_source(records)}\n"


def page_table(path: Path) -> str:
    """Return the table for a documentation page."""
    return table([path])


def _source(records: list[dict[str, str]]) -> str:
    """Return a sentence with the command, dates, devices and versions of rows."""
    versions = {
        f"{r['device']}, lutjax {r['lutjax']}, jax {r['jax']}, Python {r['python']}"
        for r in records
    }
    days = sorted({r["date"] for r in records})
    measured = f"from {days[0]} to {days[-1]}" if len(days) > 1 else days[0]
    return f"Measured with `lutjax bench` {measured}, {'; '.join(sorted(versions))}."


def _peak(record: dict[str, str]) -> str:
    """Return the peak relative to the table bytes; in bytes for gates, which have few parameters."""
    if record["sizes"].startswith(("gates", "soft_lut", "binary_lut")):
        return size(int(record["peak_bytes"]))
    return f"{float(record['peak_bytes']) / float(record['table_bytes']):.2f}"


def _time(seconds: str) -> str:
    return duration(float(seconds)) if seconds else ""


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]), end="")
