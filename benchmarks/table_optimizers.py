"""Loss curves of the table optimizers: `python benchmarks/table_optimizers.py --png docs/table-optimizers.png`.

The sizes of the demo preset, the same batches and as many steps for each; rates chosen on a validation part of
another text (plays by Shakespeare).
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import axes_of, options  # beside this file

from lutjax.models import LUTTransformerConfig
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.presets import PRESETS
from lutjax.training.text import load_text

_PUBLISHED: dict[str, Any] = {"schedule": "published", "loss": "sum", "cooldown": 0.5}
_CONSTANT: dict[str, Any] = {"schedule": "constant", "loss": "mean", "cooldown": 0.7}
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 1.0, "optimizer": "sgd", **_PUBLISHED},
    "row_momentum": {"learning_rate": 0.1, "optimizer": "sgd", **_PUBLISHED},
    "row_adagrad": {"learning_rate": 0.02, "optimizer": "row_adagrad", **_CONSTANT},
    "row_adam": {"learning_rate": 0.003, "optimizer": "row_adagrad", **_CONSTANT},
}


def _of(config: type, values: dict[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in dataclasses.fields(config) if f.name in values}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--text", type=Path, help="file or folder; default: Python's standard library")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--png", type=Path, help="write the curves to this file")
    arguments = parser.parse_args()
    demo = PRESETS["lut"]["demo"]
    model = LUTTransformerConfig(**_of(LUTTransformerConfig, demo))
    text = load_text(arguments.text, context=model.context)
    curves = {}
    print(f"{'optimizer':14} {'ms/step':>8} {'train':>8} {'test':>8}   ({arguments.steps} steps)")
    for name, changes in CONFIGS.items():
        values = {**demo, **changes, "table_optimizer": name, "steps": arguments.steps}
        run = Run(model, TrainingConfig(**_of(TrainingConfig, values)), text.train)
        state, curve, seconds = run.init(), [], 0.0
        for first in range(0, arguments.steps, 25):
            count = min(25, arguments.steps - first)
            start = time.perf_counter()
            state, loss = run.advance(state, first, count)
            curve.append((first + count, float(loss)))
            seconds += (time.perf_counter() - start) if first else 0.0  # the first part compiles
        test = run.evaluate(state, text.test)
        per_step = seconds / max(arguments.steps - 25, 1) * 1e3
        print(f"{name:14} {per_step:8.1f} {curve[-1][1]:8.4f} {test:8.4f}", flush=True)
        curves[f"{name} (test {test:.3f})"] = np.transpose(curve)
    for axes in axes_of(arguments.png, size=(8, 5)) if arguments.png else ():
        for name, points in curves.items():
            axes.plot(*points, label=name, linewidth=1)
        axes.set_xlabel(f"training step (of {demo['batch_size']} x {model.context} bytes)")
        axes.set_ylabel("training loss (nats per byte)")
        axes.set_ylim(top=3.0)
        axes.grid(alpha=0.3)
        axes.legend()


if __name__ == "__main__":
    main()
