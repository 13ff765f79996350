"""Named sets of sizes and rates; every value can be overridden by name."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Minutes on two CPU cores.
    "demo": {
        "n_layers": 1,
        "n_heads": 1,
        "n_detectors": 16,
        "n_anchors": 5,
        "n_position_bits": 3,
        "ffn_detectors": 32,
        "ffn_anchors": 8,
        "dropout": 0.0,
        "steps": 2200,
        "batch_size": 32,
        "learning_rate": 0.03,
        "optimizer": "row_adagrad",
        "table_optimizer": "row_adagrad",
        "cooldown": 0.7,
        "log_every": 50,
        "eval_every": 500,
        "checkpoint_every": 500,
    },
    "small": {
        "n_layers": 2,
        "steps": 9000,
        "batch_size": 128,
        "learning_rate": 1.0,
        "optimizer": "sgd",
        "table_optimizer": "sgd",
        "schedule": "published",
        "loss": "sum",
        "cooldown": 0.5,
        "log_every": 50,
        "eval_every": 1000,
        "checkpoint_every": 1000,
    },
    # The published recipe (look-up-table semantics, section 9): 812.7 M parameters.
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
