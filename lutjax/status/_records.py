"""What was checked on other machines: one file for each, shipped with the package."""

import dataclasses
import importlib.resources
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lutjax.status._digests import digest
from lutjax.status._matrix import COLUMNS, Cell, State, registered_name

Place = tuple[str, str, str, str]
_OLDER = "an older source than this one"


def write(cells: Iterable[Cell], path: Path) -> None:
    """Writes what was checked now; what ran here has run there from now on."""
    records = [_as_record(cell) for cell in cells if cell.digest]
    path.write_text(json.dumps(records, indent=0) + "\n")


def _as_record(cell: Cell) -> dict[str, Any]:
    state = State.RAN if cell.state == State.RUNS else cell.state
    record = dataclasses.asdict(dataclasses.replace(cell, state=state))
    return {name: value for name, value in record.items() if value}


def read(folder: Any = None) -> dict[Place, Cell]:
    """The strongest of what is recorded of each cell; with a remark where the source has changed since."""
    folder = importlib.resources.files("lutjax.status") / "records" if folder is None else folder
    best: dict[Place, Cell] = {}
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".json"):
            continue
        for record in json.loads(file.read_text()):
            cell = _of_record(record)
            if cell.place not in best or _strength(cell) < _strength(best[cell.place]):
                best[cell.place] = cell
    return best


def _strength(cell: Cell) -> tuple[bool, int]:
    return cell.reason == _OLDER, list(State).index(cell.state)


def _of_record(record: dict[str, Any]) -> Cell:
    cell = Cell(**{**record, "state": State(record["state"]), "kinds": tuple(record.get("kinds", ()))})
    column = next(c for c in COLUMNS if c.key == cell.column)
    spec = column.spec(registered_name(cell.op, cell.direction))
    if spec is None or (digest(spec.target) != cell.digest and cell.state != State.UNSUPPORTED):
        return dataclasses.replace(cell, reason=_OLDER)
    return cell
