"""Validation result files, which determine the kernels that may be selected by default on a device.

`lutjax status` writes them. The registry imports this module, so it depends only on JSON.
"""

import functools
import importlib.resources
import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any


@functools.cache
def has_run(op: str, direction: str, column: str, device_kind: str) -> bool:
    """Return True if a shipped validation result shows that a kernel ran on a device kind.

    It must have run in at least one dtype and failed in none, in any version of its source.

    Args:
      column: column of the support matrix: an implementation name, ``"pallas/tpu"``.
      device_kind: the device's own name, ``"TPU v6e"``.
    """
    states = {
        record["state"]
        for record in _records()
        if (record["op"], record["direction"], record["column"]) == (op, direction, column)
        and device_kind in record.get("kinds", ())
    }
    return "ran" in states and "fails" not in states


def folder() -> Traversable:
    """Return the package folder with the validation results."""
    return importlib.resources.files("lutjax") / "status" / "records"


def read(place: Path | None = None) -> list[dict[str, Any]]:
    """Return all recorded cells in a folder, by default the shipped ones, file by file."""
    found = folder() if place is None else place
    if not found.is_dir():
        return []
    files = sorted((f for f in found.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    records = []
    for group in (group for file in files for group in json.loads(file.read_text())):
        shared = {name: value for name, value in group.items() if name != "cells"}
        for line in group["cells"]:
            op, direction, column, *dtypes = line.split()
            kernel = {**shared, "op": op, "direction": direction, "column": column}
            records += [{**kernel, "dtype": dtype} for dtype in dtypes]
    return records


@functools.cache
def _records() -> tuple[dict[str, Any], ...]:
    return tuple(read())


def forget() -> None:
    """Make `has_run` read the records anew."""
    _records.cache_clear()
    has_run.cache_clear()
