"""Options, texts and facts of the commands that compare language models: `feed_forward.py` and `memory.py`."""

import argparse
import ast
import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import jax
from harness import about as about, add_line as add_line  # beside this file

from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.configs import Intervals
from lutjax.training.lm import TrainingConfig
from lutjax.training.text import Text, load_text, split_text


def python_sources(context: int) -> Text:
    """Return the source of the standard library and all installed packages, in the order of their paths and each file once."""
    seen, files = set(), []
    for folder in dict.fromkeys(map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))):
        for path in sorted(Path(folder).rglob("*.py")):
            data = path.read_bytes()
            digest = hashlib.sha256(data).digest()
            if data and digest not in seen:
                seen.add(digest)
                files.append(data)
    return split_text(b"\n".join(files), name=f"sources of Python, {len(files)} files", context=context)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a comparison: the text, the model, how long it is trained, and where results go."""
    parser.add_argument(
        "--text", type=Path, help="file or folder, or python; default: Python's standard library"
    )
    parser.add_argument("--preset", choices=list(presets.PRESETS["gpt"]), default="demo")
    parser.add_argument("--steps", type=int, help="default: those of the preset")
    parser.add_argument("--seconds", type=float, help="of the steps of each training, in place of --steps")
    parser.add_argument(
        "--windows", type=int, help="windows of a part of the text that is tested; default: all"
    )
    parser.add_argument("--seeds", default="0,1,2", help="numbers with commas between them")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="of the model or training"
    )
    parser.add_argument("--json", type=Path, help="add each result to this file, a line of JSON")


def values_of(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a preset, with those that were asked for in their place; the state of the last step is kept.

    Ends the command if an option is impossible.
    """
    values = dict(presets.preset("gpt", asked.preset))
    values |= {name: _value(text) for name, _, text in (word.partition("=") for word in asked.set)}
    configs: tuple[Any, ...] = (GPTConfig, TrainingConfig, Intervals)
    unknown = set(values) - {name for config in configs for name in config.__dataclass_fields__}
    if unknown:
        parser.error(f"--set: there is no {', '.join(sorted(unknown))}")
    if asked.seconds is not None and (asked.steps or not 0 < asked.seconds < float("inf")):
        parser.error("--seconds is a time above 0, in place of --steps")
    return values | {"steps": asked.steps or values["steps"], "select_every": 0}


def text_of(asked: argparse.Namespace, values: dict[str, Any]) -> Text:
    """Return the text that was asked for."""
    context = values["context"]
    return python_sources(context) if asked.text == Path("python") else load_text(asked.text, context=context)


def head(asked: argparse.Namespace, values: dict[str, Any], text: Text) -> str:
    """Return a line that says what is compared."""
    length = f"{values['steps']} steps" if asked.seconds is None else f"{asked.seconds:g} s of steps"
    return (
        f"{text.name}, {text.size:,} bytes of digest {text.digest[:16]}, preset {asked.preset}, {length} of "
        f"{values['batch_size']} x {values['context']} bytes, {jax.devices()[0].device_kind}, jax {jax.__version__}"
    )


def parameters_read(config: GPTConfig) -> int:
    """Return the number of parameters that one token reads: matrices whole, of tables the rows that are read."""
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


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
