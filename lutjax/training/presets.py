"""Named presets of sizes and rates; every value can be overridden by name.

`lutjax train --help` reads them without JAX.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_PUBLISHED = {
    "learning_rate": 1.0,
    "optimizer": "sgd",
    "table_optimizer": "sgd",
    "schedule": "published",
    "loss": "sum",
}
_ADAMW = {
    "optimizer": "adamw",
    "table_optimizer": "same",
    "table_gradient": "dense",
    "weight_decay": 0.1,
    "clip": 1.0,
    "schedule": "cosine",
    "warmup": 0.1,
    "cooldown": 0.0,
}
_LUT: dict[str, dict[str, Any]] = {
    # Minutes on two CPU cores.
    "demo": {
        "n_layers": 1,
        "n_heads": 1,
        "n_detectors": 8,
        "n_anchors": 5,
        "n_position_bits": 5,
        "ffn_detectors": 32,
        "ffn_anchors": 8,
        "dropout": 0.0,
        "steps": 3400,
        "batch_size": 32,
        **_PUBLISHED,
        "cooldown": 0.5,
        "log_every": 50,
        "eval_every": 600,
        "checkpoint_every": 600,
    },
    # Minutes on a data-center GPU.
    "small": {
        "n_layers": 3,
        "n_position_bits": 5,
        "ffn_detectors": 64,
        "ffn_anchors": 8,
        "dropout": 0.3,
        "steps": 36000,
        "batch_size": 128,
        **_PUBLISHED,
        "cooldown": 0.5,
        "log_every": 100,
        "eval_every": 4000,
        "checkpoint_every": 4000,
    },
    # The published recipe (docs/semantics.md, section 9): 812.7 M parameters.
    "reference": {
        "steps": 3000,
        "batch_size": 128,
        **_PUBLISHED,
        "cooldown": 0.0,
        "log_every": 10,
        "eval_every": 500,
        "checkpoint_every": 500,
    },
}

_GPT: dict[str, dict[str, Any]] = {
    # Minutes on two CPU cores.
    "demo": {
        "features": 128,
        "context": 64,
        "n_layers": 3,
        "n_heads": 4,
        "feed_forward": "scored_lut",
        "lut_heads": 4,
        "lut_tables": 16,
        "lut_bits": 6,
        "steps": 4200,
        "batch_size": 12,
        "learning_rate": 2e-3,
        **_ADAMW,
        "table_optimizer": "row_adam",
        "warmup": 0.3,
        "validate": False,
        "log_every": 50,
        "eval_every": 800,
        "checkpoint_every": 800,
    },
    # Minutes on a data-center GPU.
    "small": {
        "features": 256,
        "context": 256,
        "n_layers": 4,
        "n_heads": 4,
        "lut_heads": 8,
        "lut_tables": 32,
        "lut_bits": 8,
        "table_dropout": 0.2,
        "total_variation": 10.0,
        "dropout": 0.2,
        "dtype": "bfloat16",
        "steps": 2500,
        "batch_size": 32,
        "learning_rate": 1e-3,
        **_ADAMW,
        "select_every": 125,
        "log_every": 50,
        "eval_every": 500,
        "checkpoint_every": 500,
    },
    # A megabyte of text in three minutes on a data-center GPU: many epochs, so strong
    # regularization.
    "shakespeare": {
        "features": 256,
        "context": 256,
        "n_layers": 10,
        "n_heads": 4,
        "lut_heads": 8,
        "lut_tables": 32,
        "lut_bits": 8,
        "table_dropout": 0.5,
        "total_variation": 100.0,
        "dropout": 0.4,
        "dtype": "bfloat16",
        "steps": 3000,
        "batch_size": 64,
        "learning_rate": 3e-3,
        **_ADAMW,
        "weight_decay": 1.0,
        "validate": False,
        "log_every": 50,
        "eval_every": 1000,
        "checkpoint_every": 1000,
    },
}

PRESETS = {"lut": _LUT, "gpt": _GPT}
"""Values for the model config, `TrainingConfig` and the intervals, by model and preset."""

MODEL = "gpt"
"""Default model."""

_HARDENING = {"learning_rate": 0.1, "weight_decay": 0.05, "hard_share": 0.1, "last_hard_share": 0.5}
_CHECKERBOARD = {
    "start": "random",
    "channels": 8,
    "kernels": 16,
    "perception": (8, 4, 2),
    **_HARDENING,
    "runs": 2,
}
_PICTURE = {
    "channels": 64,
    "kernels": 4,
    "perception": (8, 4, 2),
    "update": (*[512] * 8, 256, 128, 64),
    "start": "zero",
    "batch_size": 1,
    "residual": 10.0,
    "steps": 1500,
    **_HARDENING,
    "runs": 2,
    "eval_every": 50,
}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "life": {
        "start": "boards",
        "channels": 1,
        "kernels": 16,
        "perception": (8, 4, 2, 1),
        "update": (*[128] * 17, 64, 32, 16, 8, 4, 2, 1),
        "periodic": True,
        "steps": 2000,
        **_HARDENING,
        "log_every": 100,
        "eval_every": 100,
    },
    "checkerboard": {
        **_CHECKERBOARD,
        "update": (*[256] * 10, 128, 64, 32, 16, 8, 8),
        "size": 16,
        "n_steps": 20,
        "batch_size": 2,
        "eval_every": 50,
    },
    "checkerboard-async": {
        **_CHECKERBOARD,
        "update": (*[256] * 14, 128, 64, 32, 16, 8, 8),
        "update_rate": 0.6,
        "size": 14,
        "n_steps": 50,
        "batch_size": 1,
        "steps": 800,
        "eval_every": 50,
    },
    "lizard": {
        "channels": 128,
        "kernels": 4,
        "perception": (8, 4, 2, 1),
        "update": (*[512] * 8, 256, 128),
        "periodic": True,
        "residual": 10.0,
        "start": "seed",
        "size": 20,
        "n_steps": 12,
        "batch_size": 1,
        "steps": 3500,
        "learning_rate": 0.08,
        "weight_decay": 0.02,
        "hard_share": 0.05,
        "last_hard_share": 0.3,
        "runs": 8,
        "eval_every": 100,
    },
    "letter": {**_PICTURE, "size": 16, "n_steps": 15},
    "picture": _PICTURE,  # the image determines size and steps
}
"""Values for `LogicCAConfig`, `TrainingConfig` and the intervals, by experiment."""


def preset(model: str, name: str) -> dict[str, Any]:
    """Return a model preset's values.

    Raises:
      ValueError: the model has no such preset.
    """
    if name not in PRESETS[model]:
        raise ValueError(f"preset is {name!r}; the model {model} has {', '.join(PRESETS[model])}.")
    return PRESETS[model][name]


def fields_of(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are fields of a config."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name in names}


def refuse_others(what: str, configs: Sequence[type], fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field unknown to all configs; `what` names them in the message."""
    known = {name for config in configs for name in config.__dataclass_fields__}  # type: ignore[attr-defined]
    others = sorted(set(fields) - known)
    if others:
        raise ValueError(f"{others[0]} is {fields[others[0]]}; {what} has no such option.")


def make(config: type, values: Mapping[str, Any]) -> Any:
    """Build a config from the values that are its fields.

    Raises:
      ValueError: the config rejects a value.
    """
    return config(**fields_of(config, values))
