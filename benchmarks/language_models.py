"""Shared options, texts and facts for language model scripts: `feed_forward.py`, `memory.py` and `step_profile.py`."""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import jax
from harness import parse_fields  # beside this file

from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.configs import Intervals
from lutjax.training.lm import TrainingConfig
from lutjax.training.text import Text, load_text, split_text


def python_sources(context: int) -> Text:
    """Return the source of the standard library and all installed packages, sorted by path, each file once."""
    seen, files = set(), []
    for folder in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))):
        for path in sorted(Path(folder).rglob("*.py")):
            data = path.read_bytes()
            digest = hashlib.sha256(data).digest()
            if data and digest not in seen:
                seen.add(digest)
                files.append(data)
    return split_text(
        b"\n".join(files), name=f"sources of Python, {len(files)} files", context=context
    )


OPTIONS: dict[str, Any] = {
    "text": (Path, "file or folder, or python; default: Python's standard library"),
    "preset": (
        tuple(dict.fromkeys(["demo", *presets.PRESETS["gpt"]])),
        "preset of the model and training",
    ),
    "steps": (int, "default: steps of the preset"),
    "seconds": (float, "seconds of training steps, instead of --steps"),
    "windows": (int, "windows per test; default: all"),
    "seeds": ([0, 1, 2], "seeds"),
    "set": ([str], "NAME=VALUE of the model or training"),
    "json": (Path, "append each result to this file, as one line of JSON"),
}
"""Options of a comparison, for `harness.parse`."""


def values_of(given: Any) -> dict[str, Any]:
    """Return the values of the preset with `--set` applied. The state of the last step is kept.

    Raises:
      SystemExit: an option is impossible.
    """
    values = dict(presets.preset("gpt", given.preset)) | parse_fields(given.set)
    configs: tuple[Any, ...] = (GPTConfig, TrainingConfig, Intervals)
    unknown = set(values) - {name for config in configs for name in config.__dataclass_fields__}
    if unknown:
        raise SystemExit(f"--set: there is no {', '.join(sorted(unknown))}")
    if given.seconds is not None and (given.steps or not 0 < given.seconds < float("inf")):
        raise SystemExit("--seconds is a time above 0, in place of --steps")
    return values | {"steps": given.steps or values["steps"], "select_every": 0}


def text_of(given: Any, values: dict[str, Any]) -> Text:
    """Return the chosen text."""
    context = values["context"]
    return (
        python_sources(context)
        if given.text == Path("python")
        else load_text(given.text, context=context)
    )


def describe(given: Any, values: dict[str, Any], text: Text) -> str:
    """Return a line that describes the comparison."""
    length = (
        f"{values['steps']} steps" if given.seconds is None else f"{given.seconds:g} s of steps"
    )
    return (
        f"{text.name}, {text.size:,} bytes of digest {text.digest[:16]}, preset {given.preset}, "
        f"{length} of {values['batch_size']} x {values['context']} bytes, "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    )


def parameters_read(config: GPTConfig) -> int:
    """Return the parameters read per token: whole matrices, and the accessed table rows."""
    features, kind = config.features, config.feed_forward
    one = kind == "lut" or config.read == "hard" or config.read.endswith("_1")
    rows = config.lut_tables * (1 if one else 2) * features  # a row, and its neighbor
    layer = {
        "dense": 8 * features**2,
        "lut": config.lut_heads * rows,
        "scored_lut": config.lut_heads * rows,
        "projection_lut": rows + 2 * features**2,
    }[kind]
    found = config.n_layers * (4 * features**2 + layer) + features + features * config.vocab_size
    for _ in config.memory_places:
        rows = len(config.memory_orders) * config.memory_heads * config.memory_width
        found += rows + 2 * rows * features
    return found
