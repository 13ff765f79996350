"""Records of what was checked on other machines: one file for each, shipped with the package."""

import dataclasses
import datetime
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lutjax.dispatch import _records as shipped
from lutjax.dispatch.registry import kernel_registry
from lutjax.status._digests import digest_of as digest_of
from lutjax.status.matrix import COLUMNS, OLDER, Cell, State

Place = tuple[str, str, str, str]


def path_of(device_kind: str) -> Path:
    """Return where the registry looks for what ran on a kind of device."""
    return Path(str(shipped.folder())) / f"{re.sub(r'[^a-z0-9]+', '-', device_kind.lower()).strip('-')}.json"


def write(cells: Iterable[Cell], path: Path, recorded: Mapping[Place, Cell] | None = None) -> None:
    """Write what was checked now, with the day; what ran here has run there from now on.

    Args:
      cells: validation results.
      path: file to write.
      recorded: what `read` returned: such cells are recorded already.
    """
    known = {} if recorded is None else recorded
    records = [_as_record(cell) for cell in cells if cell.digest and known.get(cell.place) is not cell]
    path.write_text(json.dumps(records, indent=0) + "\n")
    shipped.forget()


def _as_record(cell: Cell) -> dict[str, Any]:
    state = State.RAN if cell.state == State.RUNS else cell.state
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    record = dataclasses.asdict(dataclasses.replace(cell, state=state, date=cell.date or today))
    return {name: value for name, value in record.items() if value}


def read(folder: Path | None = None) -> dict[Place, Cell]:
    """Return the strongest record of each cell, by default of those in the package; with a remark where the source has changed since."""
    best: dict[Place, Cell] = {}
    for record in shipped.read(folder):
        cell = _of_record(record)
        if cell is not None and (cell.place not in best or _strength(cell) < _strength(best[cell.place])):
            best[cell.place] = cell
    return best


def _strength(cell: Cell) -> tuple[bool, int]:
    return cell.is_older, list(State).index(cell.state)


def _of_record(record: dict[str, Any]) -> Cell | None:
    """Return the cell of a record; None of an op or column that is not there. Of kernels that are not installed sources can be here."""
    cell = Cell(**{**record, "state": State(record["state"]), "kinds": tuple(record.get("kinds", ()))})
    column = next((c for c in COLUMNS if c.key == cell.column), None)
    if column is None or cell.op not in kernel_registry.ops():
        return None
    spec = column.spec(cell.op) or kernel_registry.announced(cell.op, column.key)
    if spec is None:
        return dataclasses.replace(cell, reason=OLDER)
    now = digest_of(spec, cell.direction)
    older = now is not None and now != cell.digest and cell.state != State.UNSUPPORTED
    return dataclasses.replace(cell, reason=OLDER) if older else cell
