"""Records of kernels that ran: which of them may be chosen by themselves."""

import functools
import importlib.resources
import json
from typing import Any


@functools.cache
def has_run(op: str, direction: str, column: str, device_kind: str) -> bool:
    """Return whether a record in the package says that a kernel ran on a kind of device, in at least one dtype and failing in none."""
    states = {
        record["state"]
        for record in _records()
        if (record["op"], record["direction"], record["column"]) == (op, direction, column)
        and device_kind in record.get("kinds", ())
    }
    return "ran" in states and "fails" not in states


@functools.cache
def _records() -> tuple[dict[str, Any], ...]:
    folder = importlib.resources.files("lutjax.status") / "records"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return tuple(record for file in files for record in json.loads(file.read_text()))
