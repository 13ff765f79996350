"""Records of what was checked on devices, as files: which kernels may be chosen there by themselves.

`lutjax status` writes them. This room knows JSON alone, because the registry asks it.
"""

import functools
import importlib.resources
import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any


@functools.cache
def has_run(op: str, direction: str, column: str, device_kind: str) -> bool:
    """Return whether a record in the package says that a kernel ran on a kind of device.

    In at least one dtype, and failing in none; whatever its source was.

    Args:
      column: of the matrix of `lutjax status`: a name of the implementation, ``"pallas/tpu"``.
      device_kind: as the device names itself, ``"TPU v6e"``.
    """
    states = {
        record["state"]
        for record in _records()
        if (record["op"], record["direction"], record["column"]) == (op, direction, column)
        and device_kind in record.get("kinds", ())
    }
    return "ran" in states and "fails" not in states


def folder() -> Traversable:
    """Return the folder of the package that has the records."""
    return importlib.resources.files("lutjax") / "status" / "records"


def read(place: Path | None = None) -> list[dict[str, Any]]:
    """Return the records of all cells in a folder, by default of the package, file by file."""
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
