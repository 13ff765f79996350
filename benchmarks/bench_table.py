"""Implementations side by side, from files that `lutjax bench --csv` wrote: `python benchmarks/bench_table.py FILE ...`.

A case of a later file takes the place of the same case of an earlier one. Prints Markdown: the table, and what is to be known of its rows: devices,
versions and days, and which of them are older than their kernels. Without a file it writes the tables of docs/appendix/gpu.md, from those that are recorded.
"""

import csv
import sys
from pathlib import Path

from lutjax.benchmark.results import duration, size, sources

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "appendix" / "gpu.md"
RECORDED = {
    "table": "h200",
    "table h100": "h100",
    "few": "few_outputs",
    "integers": "integers",
    "scored": "scored",
}
"""Files in docs/benchmarks, by the mark of their table in the page."""
_ROWS = {
    "forward": "forward",
    "dense": "forward + backward, dense",
    "in-place": "in place",
    "update": "update alone",
}


def table(paths: list[Path]) -> str:
    """A line for each shape and row: times of each implementation, of the CUDA runtime, and the limit."""
    cases: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for record in csv.DictReader(file):
                key = record["shape"], record["dtype"], record["row"]
                cases.setdefault(key, {})[record["implementation"]] = record
    names = [n for n in ("triton", "pallas", "xla") if any(n in by_name for by_name in cases.values())]
    lines = [
        f"| shape | | {' | '.join(names)} | CUDA | limit | peak / tables |",
        f"| --- | --- |{' --: |' * (len(names) + 3)}",
    ]
    for (shape, dtype, row), by_name in cases.items():
        first = by_name[next(name for name in names if name in by_name)]
        times = [by_name[n]["p50_s"] if n in by_name else "" for n in names]
        peak = _peak(first) if first["peak_bytes"] else ""
        sizes = "" if shape == first["sizes"] else f" ({first['sizes']})"
        cells = [
            f"{shape}{sizes}" if dtype == "float32" else f"{shape}, {dtype} tables{sizes}",
            _ROWS[row],
            *(_time(seconds) for seconds in times),
            _time(first["cuda_s"]),
            f"{_time(first['limit_s'])} ({size(int(first['bytes']))})",
            peak,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    records = [record for by_name in cases.values() for record in by_name.values()]
    return "\n".join([*lines, "", made_of(records)]) + "\n"


def written(page: str) -> str:
    """Return the page with the tables of the recorded files."""
    for mark, name in RECORDED.items():
        before, rest = page.split(f"<!-- {mark} -->\n")
        after = rest[rest.index("<!-- end -->") :]
        page = f"{before}<!-- {mark} -->\n{table([DOCS / 'benchmarks' / f'{name}.csv'])}{after}"
    return page


def made_of(records: list[dict[str, str]]) -> str:
    """Return the sentence on devices, versions and days of rows, and on those whose kernels are others now."""
    versions = {f"{r['device']}, lutjax {r['lutjax']}, jax {r['jax']}, Python {r['python']}" for r in records}
    days = sorted({r["date"] for r in records})
    said = [f"Measured from {days[0]} to {days[-1]}" if len(days) > 1 else f"Measured {days[0]}"]
    said[0] += f", {'; '.join(sorted(versions))}."
    if not all(r["sources"] for r in records):
        said.append(
            "The sources of kernels were not recorded with rows of that time: take them as figures of older kernels."
        )
    changed = sorted({r["shape"] for r in records if r["sources"] and sources(r["kernels"]) != r["sources"]})
    if changed:
        said.append(
            f"Kernels have changed since {', '.join(changed)} {'was' if len(changed) == 1 else 'were'} measured."
        )
    return " ".join(said)


def _peak(record: dict[str, str]) -> str:
    """Return the peak as a multiple of the tables' bytes; for gates, which have few parameters, in bytes."""
    if record["sizes"].startswith(("gates", "soft_lut", "binary_lut")):
        return size(int(record["peak_bytes"]))
    return f"{float(record['peak_bytes']) / float(record['table_bytes']):.2f}"


def _time(seconds: str) -> str:
    return duration(float(seconds)) if seconds else ""


if __name__ == "__main__":
    if files := sys.argv[1:]:
        print(table([Path(name) for name in files]), end="")
    else:
        PAGE.write_text(written(PAGE.read_text()))
