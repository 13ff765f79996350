"""Bundle ``README.md``: a model card in the format of model hubs."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lutjax import __version__
from lutjax.bundles._layout import CONFIG, TENSORS, Config
from lutjax.files.messages import escape_unprintable, in_a_line

LAST = (
    "<!-- Written by lutjax save. "
    "Delete this line to keep this file when the model is saved here again. -->"
)
"""Last line of a generated card, which identifies it."""

MOST_TENSORS = 60
"""Maximum number of tensors listed individually."""

_TASKS = {
    "lm": "text-generation",
    "digits": "image-classification",
    "classify": "tabular-classification",
    "regression": "tabular-regression",
}
"""Hub task names by run kind."""

_MEASURED = {
    "lm": ("training loss, nats per byte", "test loss, nats per byte"),
    "digits": (
        "training loss",
        "accuracy of the hard network on the test part",
        "accuracy of the soft network",
    ),
    "ca": ("training loss", "wrong bits of the best hard automaton, a grid"),
}
_MEASURED["classify"] = _MEASURED["digits"]
_MEASURED["regression"] = (
    "training loss",
    "R2 of the hard network on the test part",
    "R2 of the soft network",
)
"""Names of the measurements in run histories, in the order train, test, other."""


def is_ours(path: Path) -> bool:
    """Return True if a path is free for a card, or has a generated one with its last line."""
    if not path.exists() and not path.is_symlink():
        return True
    if path.is_symlink() or not path.is_file():
        return False
    # Only the end of the file: somebody else's README may have any size.
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2 * len(LAST)))
        return file.read().rstrip().endswith(LAST.encode())


def card(name: str, config: Config) -> str:
    parts = (_head(name, config), _body(name, config), [LAST, ""])
    return "\n".join(line for part in parts for line in part)


def _head(name: str, config: Config) -> Iterator[str]:
    run = config.run or {}
    task = _TASKS.get(_kind(run))
    yield from ("---", "library_name: lutjax")
    if task:
        yield f"pipeline_tag: {task}"
    yield from ("tags:", "- lutjax", "- jax", f"- {json.dumps(config.architecture)}")
    measured = list(_last_measurements(run))
    if task and measured:
        what, step, value = measured[-1] if len(measured) == 1 else measured[1]
        # JSON strings are valid YAML, whatever characters they have.
        kind, metric = json.dumps(what.partition(",")[0]), json.dumps(f"{what}, after {step} steps")
        yield from ("model-index:", f"- name: {json.dumps(name)}", "  results:")
        yield from (
            f"  - task: {{type: {task}}}",
            f"    dataset: {{name: {json.dumps(_data_name(run))}, type: custom}}",
            f"    metrics: [{{type: {kind}, value: {value!r}, name: {metric}}}]",
        )
    yield from ("---", "")


def _body(name: str, config: Config) -> Iterator[str]:
    yield from (f"# {_text(name)}", "")
    kind = f"A `{config.architecture}` of [JAX](https://docs.jax.dev) and lutjax {__version__}"
    size = f"{config.n_values:,} numbers in {len(config.tensors)} tensors"
    yield from (f"{kind}: {size}, {config.n_bytes:,} bytes.", "")
    if config.model is not None:
        yield from ("## Sizes", "", *_table(config.model), "")
    if config.run is not None:
        yield from _run_section(config.run)
    into = "" if config.model is not None else ", into=model"
    yield from _USE.format(into=into, TENSORS=TENSORS, CONFIG=CONFIG).splitlines()
    yield from ("## Tensors", "", *_tensors(config), "")


def _run_section(run: Mapping[str, Any]) -> Iterator[str]:
    record = run["record"]
    measured = list(_last_measurements(run))
    if measured:
        yield from ("## Measured", "", "| | after steps | |", "| --- | --- | --- |")
        for what, step, value in measured:
            yield f"| {what} | {step} | {value:.6g} |"
        yield ""
    if run["results"]:
        results = map(escape_unprintable, run["results"])
        yield from ("At the end of the run:", "", "```", *results, "```", "")
    source = record.get("text") or record.get("samples")
    if source is not None:
        unit = "bytes" if record.get("text") else "samples"
        size, digest = f"{source['size']:,} {unit}", _text(source["digest"])
        yield from ("## Data", "")
        yield from (f"{_text(_data_name(run))}: {size}, SHA-256 `{digest}`.", "")
    yield from ("## Training", "", f"{run['steps']} steps were done.", "")
    yield from (*_table(record["training"]), "")


def _kind(run: Mapping[str, Any]) -> str:
    """Return the run kind, "regression" for numeric targets, or an empty string without a run."""
    learns_numbers = run and (run["record"].get("model") or {}).get("regression")
    return "regression" if learns_numbers else str(run.get("kind", ""))


def _last_measurements(run: Mapping[str, Any]) -> Iterator[tuple[str, int, float]]:
    history = run["record"]["history"] if run else {}
    for key, what in zip(("train", "test", "other"), _MEASURED.get(_kind(run), ()), strict=False):
        if history.get(key):
            step, value = history[key][-1]
            yield what, step, value


def _data_name(run: Mapping[str, Any]) -> str:
    source = run["record"].get("text") or run["record"].get("samples") or {}
    usual = {
        "lm": "source text of the standard library of Python",
        "digits": "digits of scikit-learn",
    }
    return source.get("path") or usual.get(run["kind"], "no data")


_USE = """\
## Use

With lutjax (in a checkout of it, `pip install ".[apps,bundles]"`):

```python
import lutjax

model = lutjax.load("FOLDER"{into})
```

Without it, the values of `{TENSORS}` by what `{CONFIG}` says of them:

```python
import json

import numpy as np
from safetensors.numpy import load_file

stored, about = load_file("{TENSORS}"), json.load(open("{CONFIG}"))["tensors"]


def value(name):
    scale = about[name]["scale"]
    return stored[name] if scale is None else stored[name].astype(np.float32) * stored[scale]
```

"""


def _tensors(config: Config) -> Iterator[str]:
    rule = "| --- | --- | --- | --- | --- |"
    if len(config.tensors) <= MOST_TENSORS:
        yield from ("| tensor | is | shape | dtype | stored as |", rule)
        for name, t in config.tensors.items():
            shape = " x ".join(map(str, t.shape)) or "one"
            scaled = f"{t.stored} x `{_text(t.scale)}`" if t.scale else t.stored
            yield f"| `{_text(name)}` | {_text(t.kind)} | {shape} | {t.dtype} | {scaled} |"
        return
    kinds = Counter((t.kind, t.dtype, t.stored) for t in config.tensors.values())
    yield from ("| tensors | are | numbers | dtype | stored as |", rule)
    for (kind, dtype, stored), n in kinds.items():
        numbers = sum(
            math.prod(t.shape)
            for t in config.tensors.values()
            if (t.kind, t.dtype, t.stored) == (kind, dtype, stored)
        )
        yield f"| {n} | {_text(kind)} | {numbers:,} | {dtype} | {stored} |"


def _table(fields: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| | |", "| --- | --- |")
    for name, value in fields.items():
        if value is not None:
            yield f"| {_text(name)} | {_text(json.dumps(value))} |"


def _text(text: str) -> str:
    """Format a text for a Markdown table: one line, with markup escaped."""
    return (
        escape_unprintable(in_a_line(text))
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("`", "'")
    )
