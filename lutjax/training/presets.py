"""Named sets of sizes and rates; every value can be overridden by name."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
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
        "learning_rate": 1.0,
        "optimizer": "sgd",
        "table_optimizer": "sgd",
        "schedule": "published",
        "loss": "sum",
        "cooldown": 0.5,
        "log_every": 50,
        "eval_every": 600,
        "checkpoint_every": 600,
    },
    # Minutes on a data-centre GPU.
    "small": {
        "n_layers": 3,
        "n_position_bits": 5,
        "ffn_detectors": 64,
        "ffn_anchors": 8,
        "dropout": 0.3,
        "steps": 36000,
        "batch_size": 128,
        "learning_rate": 1.0,
        "optimizer": "sgd",
        "table_optimizer": "sgd",
        "schedule": "published",
        "loss": "sum",
        "cooldown": 0.5,
        "log_every": 100,
        "eval_every": 4000,
        "checkpoint_every": 4000,
    },
    # The published recipe (docs/semantics.md, section 9): 812.7 M parameters.
    "reference": {
        "steps": 3000,
        "batch_size": 128,
        "learning_rate": 1.0,
        "optimizer": "sgd",
        "table_optimizer": "sgd",
        "schedule": "published",
        "loss": "sum",
        "cooldown": 0.0,
        "log_every": 10,
        "eval_every": 500,
        "checkpoint_every": 500,
    },
}
"""Values of the fields of `LUTTransformerConfig`, `TrainingConfig` and the intervals, by preset."""
