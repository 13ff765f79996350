"""Device validation results: one file per device kind, shipped with the package.

A file lists cell groups with equal state, devices, versions, date and reason. Each line of a group
names an op, a direction, a column and the dtypes. Results carry no source digests: `git log
lutjax/kernels` since the date shows which kernels have changed.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lutjax.dispatch import _records as shipped
from lutjax.dispatch.registry import kernel_registry
from lutjax.status.matrix import COLUMNS, Cell, State

Place = tuple[str, str, str, str]


def path_of(device_kind: str) -> Path:
    """Return the validation result file for a device kind."""
    return (
        Path(str(shipped.folder()))
        / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.json"
    )


def write(
    cells: Iterable[Cell], path: Path, platform: str, recorded: Mapping[Place, Cell] | None = None
) -> None:
    """Write checked cells, dated today unless a cell has a date.

    Args:
      cells: cells of the matrix.
      path: file to write.
      platform: platform of the columns, as `jax.export` names it.
      recorded: results from `read`, which are not written again.
    """
    known = {} if recorded is None else recorded
    columns = {column.key for column in COLUMNS if column.platform == platform}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    groups: dict[str, dict[tuple[str, str, str], list[str]]] = {}
    for cell in cells:
        # Only a checked cell has the version that checked it.
        if cell.column not in columns or not cell.jax or known.get(cell.position) is cell:
            continue
        state = State.RAN if cell.state == State.RUNS else cell.state
        group = dataclasses.asdict(dataclasses.replace(cell, state=state, date=cell.date or today))
        *place, dtype = (group.pop(name) for name in ("op", "direction", "column", "dtype"))
        key = json.dumps({name: value for name, value in group.items() if value})
        groups.setdefault(key, {}).setdefault(tuple(place), []).append(dtype)
    texts = []
    for key, kernels in groups.items():
        lines = ",\n".join(
            json.dumps(" ".join([*kernel, *dtypes])) for kernel, dtypes in kernels.items()
        )
        texts.append(f'{key[:-1]}, "cells": [\n{lines}\n]}}')
    path.write_text("[\n" + ",\n".join(texts) + "\n]\n")
    shipped.forget()


def read(folder: Path | None = None) -> dict[Place, Cell]:
    """Return the strongest, then newest result per cell, by default from the shipped results."""
    best: dict[Place, Cell] = {}
    known, ops = {column.key for column in COLUMNS}, kernel_registry.ops()
    for record in shipped.read(folder):
        cell = Cell(
            **{**record, "state": State(record["state"]), "kinds": tuple(record.get("kinds", ()))}
        )
        # A result of a removed op or column is history.
        if cell.op not in ops or cell.column not in known:
            continue
        other = best.get(cell.position)
        if other is None or cell.strength > other.strength:
            best[cell.position] = cell
    return best
