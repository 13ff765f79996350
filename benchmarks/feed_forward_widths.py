"""Table and picture of results of `feed_forward.py --json`, by width.

Run `python benchmarks/feed_forward_widths.py docs/benchmarks/feed_forward.jsonl --picture
docs/feed-forward-widths.png`.

Each layer and width uses the learning rate with the lowest validation loss for the first seed.
`--levers` prints all trainings instead, by their changes relative to the first training of each
width and layer; `--features` selects one width. The picture shows results from one device kind.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from harness import draw_axes, parse, read_lines, table as markdown_table  # beside this file

Row = dict[str, Any]

CHANGED = {
    "memory": False,
    "table_rate": 1.0,
    "table_optimizer": "same",
    "table_weight_decay": 0.0,
    "memory_rate": 1.0,
    "read": "confidence",
    "lut_heads": 4,
    "lut_tables": 16,
    "lut_bits": 6,
    "weight_decay": 0.1,
    "warmup": 0.1,
}
"""Values that may differ between trainings, with defaults for results without them."""


def chosen(rows: list[Row]) -> list[Row]:
    """Return the trainings with the best learning rate, sorted by seed."""
    first = min(row["seed"] for row in rows)
    best = min((row for row in rows if row["seed"] == first), key=lambda row: row["validation"])
    same = [row for row in rows if row["learning_rate"] == best["learning_rate"]]
    return sorted(same, key=lambda row: row["seed"])


def by_width(rows: list[Row]) -> dict[tuple[str, int, str], list[Row]]:
    """Return the compared trainings, by device, width and layer."""

    def key(row: Row) -> tuple[str, int, str]:
        return row["device"], row["features"], row["feed_forward"]

    found = {name: list(each) for name, each in itertools.groupby(sorted(rows, key=key), key)}
    both = {name[:2] for name in found if name[2] == "dense"}
    return {name: each for name, each in found.items() if name[:2] in both}


def table(rows: list[Row]) -> str:
    """Return the comparison in Markdown."""
    lines = []
    for (device, width, layer), each in by_width(rows).items():
        of_rate = chosen(each)
        one = of_rate[0]
        rates = ", ".join(f"{rate:g}" for rate in sorted({row["learning_rate"] for row in each}))
        validation, test = (
            ", ".join(f"{row[part]:.3f}" for row in of_rate) for part in ("validation", "test")
        )
        mean = np.mean([row["test"] for row in of_rate])
        what = (
            device.removeprefix("NVIDIA "),
            f"{width}, {one['n_layers']}, {one['context']}",
            f"`{layer}`",
        )
        sizes = f"{one['parameters']:,}", f"{one['parameters_read']:,}"
        ms = f"{1e3 * one['seconds'] / one['steps']:.1f}"
        time = f"{rates}: {one['learning_rate']:g}", ms, one["steps"]
        lines.append((*what, *sizes, *time, validation, test, f"{mean:.4f}"))
    names = (
        "device | width, layers, context | feed-forward | parameters | read for a token | rates "
        "tried, chosen | ms/step"
    )
    return markdown_table(
        f"{names} | steps | validation of each seed | test of each seed | mean", lines, 3
    )


def levers(rows: list[Row]) -> str:
    """Return a Markdown table of changes, relative to the first training of each layer and width, and their losses."""
    lines = []

    def changes(row: Row) -> tuple[tuple[str, Any], ...]:
        first = next(
            r
            for r in rows
            if (r["features"], r["feed_forward"]) == (row["features"], row["feed_forward"])
        )
        return tuple(
            (n, row.get(n, v)) for n, v in CHANGED.items() if row.get(n, v) != first.get(n, v)
        )

    def key(row: Row) -> Any:
        return (
            row["features"],
            row["feed_forward"],
            row["device"],
            row["learning_rate"],
            changes(row),
        )

    of_layers: dict[Any, list[Row]] = {}
    for row in rows:
        of_layers.setdefault(key(row), []).append(row)
    for (_, layer, device, rate, changed), each in of_layers.items():
        what = ", ".join(f"`{name}={value}`" for name, value in changed) or "nothing"
        validation, test = (
            ", ".join(f"{row[part]:.3f}" for row in each) for part in ("validation", "test")
        )
        steps = each[0]["steps"]
        time = 1e3 * np.mean([row["seconds"] for row in each]) / steps
        of_device = device.removeprefix("NVIDIA ")
        lines.append(
            (what, f"`{layer}`", of_device, f"{rate:g}", steps, f"{time:.1f}", validation, test)
        )
    names = (
        "changed | feed-forward | device | rate | steps | ms/step | validation of each seed | "
        "test of each seed"
    )
    return markdown_table(names, lines, 4)


def draw(rows: list[Row], device: str, path: Path) -> None:
    """Draw mean validation losses by seconds, and test losses by the parameters read per token."""
    colors = {"projection_lut": "tab:blue", "dense": "tab:orange"}
    drawn = {name: each for name, each in by_width(rows).items() if name[0] == device}
    widths = dict.fromkeys(width for _, width, _ in drawn)
    styles = dict(zip(widths, itertools.cycle(("-", "--", ":")), strict=False))
    for by_second, by_read in draw_axes(path, 1, 2, size=(10, 4.2)):
        for (_, width, layer), each in drawn.items():
            of_rate = chosen(each)
            steps = np.array([step for step, _, _ in of_rate[0]["curve"]])
            losses = np.mean([[loss for _, _, loss in row["curve"]] for row in of_rate], 0)
            seconds = np.mean([row["seconds"] for row in of_rate]) / steps[-1] * steps
            look = {"color": colors[layer], "marker": ".", "label": f"{layer}, width {width}"}
            by_second.plot(seconds, losses, styles[width], **look)
            tests = [row["test"] for row in of_rate]
            by_read.plot(
                [row["parameters_read"] for row in of_rate],
                tests,
                "o",
                color=colors[layer],
                alpha=0.7,
            )
            at = of_rate[0]["parameters_read"], max(tests)
            by_read.annotate(str(width), at, (0, 6), textcoords="offset points", ha="center")
        by_second.set_ylim(top=1.5)
        by_second.set_xlabel("seconds of training")
        by_second.set_ylabel("validation loss (nats per byte)")
        by_second.legend()
        by_read.set_xscale("log")
        by_read.set_xlabel("parameters that are read for a token")
        by_read.set_ylabel("test loss of each seed (nats per byte)")
        by_read.margins(0.1)
        for axes in (by_second, by_read):
            axes.grid(alpha=0.3)


def main() -> None:
    given = parse(
        __doc__,
        "files",
        files=([Path], "lines of JSON"),
        levers=(False, "print the changes and their losses"),
        features=(int, "width of the printed models; default: all"),
        picture=(Path, "draw losses into this file"),
        device=("NVIDIA H200", "device kind in the picture"),
    )
    rows = [row for path in given.files for row in read_lines(path)]
    printed = [row for row in rows if given.features in (None, row["features"])]
    print(levers(printed) if given.levers else table(printed))
    if given.picture is not None:
        draw(rows, given.device, given.picture)


if __name__ == "__main__":
    main()
