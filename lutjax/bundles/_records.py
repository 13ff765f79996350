"""Run records in bundles: training provenance without local file paths."""

import dataclasses
from pathlib import Path
from typing import Any

from lutjax.bundles.errors import BundleError
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import Fields
from lutjax.training import automaton, classifier, lm_runs, runs
from lutjax.training.loaded import Loaded

RECORDS: dict[str, type[runs.Record]] = {
    "lm": lm_runs.Record,
    "digits": classifier.Record,
    "classify": classifier.Record,
    "ca": automaton.Record,
}
"""Record classes by run kind."""


def to_dict(loaded: Loaded) -> dict[str, Any]:
    """Return the fields of a run record; paths are reduced to file names."""
    # Bundles are published: folders of this machine are nobody's business.
    record = dataclasses.asdict(loaded.record)
    for source in (record.get("text"), record.get("samples")):
        if source is not None and source["path"] is not None:
            source["path"] = _name(source["path"])
    if record.get("test") is not None:
        record["test"] = _name(record["test"])
    return {
        "kind": loaded.kind,
        "steps": loaded.steps,
        "record": record,
        "results": list(loaded.results),
    }


def _name(path: str) -> str:
    return Path(path).name


def from_dict(folder: Path, content: dict[str, Any]) -> Loaded:
    """Return the run record described by the bundle in a folder."""
    fields = Fields("its run")
    try:
        kind, steps = fields.field(content, "kind", str), fields.field(content, "steps", int)
        results = fields.field(content, "results", list)
        if kind not in RECORDS or not all(isinstance(line, str) for line in results):
            raise ValueError(
                f"its run has the kind {in_a_line(kind, 40)}, or results that are no lines."
            )
        record = runs.build_fields(RECORDS[kind], fields.field(content, "record", dict))
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the bundle {folder} is damaged: {in_a_line(error)}") from error
    return Loaded(kind, folder, steps, record, tuple(results))
