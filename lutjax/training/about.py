"""Facts about a run, a bundle, or an overlay of a mapped table, from their own files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lutjax.bundles._layout import is_bundle, is_memory
from lutjax.files import strict_json
from lutjax.files.messages import escape_unprintable, in_a_line
from lutjax.files.strict_json import Fields
from lutjax.tables import overlays
from lutjax.training import checkpoints, model_folders, runs
from lutjax.training.errors import CheckpointError
from lutjax.training.raw import Form

_SOURCES = ("text", "samples", "target")  # record fields with data sources

_OWN = ("kind", "lutjax", "versions", "model", "training", "options", "history", "form", *_SOURCES)
"""Record fields with their own lines."""


def facts(folder: Path, *, on_damage: Callable[[str], None] = checkpoints.warn) -> dict[str, Any]:
    """Return JSON-compatible facts about a run, a bundle or an overlay.

    A run has its record and completed steps, a bundle also its tensors. `on_damage` gets a message
    for each skipped damaged checkpoint (see `lutjax.training.runs.read`) and for each changed file
    of the run.

    Raises:
      CheckpointError: there is no run, or its record lacks required fields.
      BundleError, OverlayError: the bundle or overlay is damaged, or the bundle holds another
        model.
    """
    if overlays.is_overlay(folder):
        return overlays.facts(folder)
    if is_memory(folder):
        from lutjax.convert import _memories  # with JAX

        return _memories.facts(folder)
    if is_bundle(folder):
        return _read_bundle(folder)
    kind = runs.kind(folder)
    step, meta = checkpoints.read_meta(folder / runs.FOLDER, on_damage=on_damage)
    try:
        _check(meta)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the record of the run in {folder} is damaged, or of another version: "
            f"{in_a_line(error)}"
        ) from error
    for line in runs.list_changed_files(folder):
        on_damage(line)
    done = runs.read_finishing_record(folder)
    return {
        **meta,
        "kind": kind,
        "folder": str(folder.absolute()),
        "steps_done": step,
        "finished": done.why or None,
        "results": [line for _, lines in done.parts.values() for line in lines],
    }


def _read_bundle(folder: Path) -> dict[str, Any]:
    from lutjax.bundles import _records  # needs the extra bundles
    from lutjax.bundles._reading import read_config

    kind, config = model_folders.kind_of(folder), read_config(folder)
    content: dict[str, Any] = {"folder": str(folder.absolute()), "kind": kind}
    if config.run is not None:
        loaded = _records.from_dict(folder, config.run)  # checks the fields
        content |= {
            **config.run["record"],
            "steps_done": loaded.steps,
            "results": list(loaded.results),
        }
    return {
        **content,
        "model": config.model,
        "bundle": {
            "model": config.architecture,
            "tensors": len(config.tensors),
            "values": config.n_values,
            "bytes": config.n_bytes,
        },
    }


def _check(meta: Mapping[str, Any]) -> None:
    """Raise an error if a record lacks fields for `lines`; ignore additional fields."""
    fields = Fields("the record")
    fields.field(fields.field(meta, "training", dict), "steps", int)
    for name in ("model", "options"):
        fields.field(meta, name, dict)
    fields.field({"versions": {}, **meta}, "versions", dict)
    runs.build_fields(runs.History, fields.field(meta, "history", dict))
    if meta.get("form") is not None:
        runs.build_fields(Form, meta["form"])


def lines(facts_of: Mapping[str, Any]) -> list[str]:
    """Format facts as lines."""
    # Names come from files of others: a terminal must not execute their control characters.
    write: Callable[[Mapping[str, Any]], list[str]] = (
        overlays.lines if facts_of["kind"] == "overlay" else _lines
    )
    if facts_of["kind"] == "memory":
        from lutjax.convert import _memories

        write = _memories.lines
    return [escape_unprintable(line) for line in write(facts_of)]


def _lines(facts_of: Mapping[str, Any]) -> list[str]:
    command, bundle = runs.COMMANDS[facts_of["kind"]], facts_of.get("bundle")
    if bundle is None:
        versions = {"lutjax": facts_of.get("lutjax", "?"), **facts_of.get("versions", {})}
        lines = [f"{facts_of['folder']}: a run of {command}", f"versions: {_fields(versions)}"]
    else:
        source = f"a run of {command}" if "training" in facts_of else "a model without a run"
        values = f"{bundle['values']:,} values in {bundle['tensors']} tensors"
        lines = [
            f"{facts_of['folder']}: a bundle of {source}",
            f"holds: a {bundle['model']} of {values}, {bundle['bytes']:,} bytes",
        ]
    if "training" not in facts_of:
        return [*lines, f"model: {_fields(facts_of['model'])}"]
    training, history = facts_of["training"], facts_of["history"]
    steps = f"steps: {facts_of['steps_done']} of {training['steps']}"
    if bundle is None:
        why = facts_of["finished"]
        steps += f"; finished, as {why}" if why else "; not finished: continue with --resume"
    lines.append(steps)
    for name in _SOURCES:
        if isinstance(facts_of.get(name), Mapping):
            lines.append(f"data: {_source(facts_of[name])}")
    form = facts_of.get("form") or {}
    if form.get("shape"):
        shape, classes = form["shape"], form["classes"]
        lines.append(
            f"samples: {' x '.join(map(str, shape))} numbers, "
            f"from {form.get('least', 0):g} to {form.get('largest', 0):g}"
            + ("; images are scaled to this size" if form.get("scaled") else "")
        )
        lines.append(
            "learns: a number (regression)"
            if form.get("regression")
            else f"classes: {len(classes)}: {_list_names(classes)}"
        )
    if form.get("target") is not None:
        lines.append(f"target: {form['target']}")
    if form.get("columns"):
        columns = [column["name"] for column in form["columns"]["columns"]]
        lines.append(f"columns: {_list_names(columns)}")
    lines += [f"{name}: {_fields(facts_of[name])}" for name in ("model", "training", "options")]
    lines += [
        f"{name}: {_word(value)}"
        for name, value in facts_of.items()
        if name not in _OWN and name in _MORE and value
    ]
    for name, what in (("train", "training loss"), ("test", "test"), ("other", "second test")):
        if history.get(name):
            step, value = history[name][-1]
            lines.append(f"{what} after {step} steps: {value:.6g} ({len(history[name])} in all)")
    if facts_of["results"]:
        lines += ["results:", *(f"  {line}" for line in facts_of["results"])]
    return lines


_MORE = ("baselines", "bigram", "recipe", "test", "exclude", "encoding", "quantized")


def _source(source: Mapping[str, Any]) -> str:
    return (
        f"{source.get('path') or 'the default ones'}, {source.get('size')} in all, "
        f"SHA-256 {str(source.get('digest'))[:16]}..."
    )


def _fields(values: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {_word(value)}" for name, value in values.items())


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_word(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ",".join(map(_word, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _list_names(names: list[str]) -> str:
    return strict_json.format_names(names, 300)
