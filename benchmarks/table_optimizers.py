"""Loss curves of the table optimizers: `python benchmarks/table_optimizers.py --png docs/table-optimizers.png`.

All rules use the sizes of the preset demo, the same batches and equally many steps. Learning rates were selected on a validation part of
another text (plays by Shakespeare).
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import draw_axes, parse  # beside this file

from lutjax.models import LUTTransformerConfig
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.presets import PRESETS, make
from lutjax.training.text import load_text

_PUBLISHED: dict[str, Any] = {"schedule": "published", "loss": "sum", "cooldown": 0.5}
_CONSTANT: dict[str, Any] = {"schedule": "constant", "loss": "mean", "cooldown": 0.7}
CONFIGS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 1.0, "optimizer": "sgd", **_PUBLISHED},
    "row_momentum": {"learning_rate": 0.1, "optimizer": "sgd", **_PUBLISHED},
    "row_adagrad": {"learning_rate": 0.02, "optimizer": "row_adagrad", **_CONSTANT},
    "row_adam": {"learning_rate": 0.003, "optimizer": "row_adagrad", **_CONSTANT},
}


def main() -> None:
    given = parse(
        __doc__,
        text=(Path, "file or folder; default: Python's standard library"),
        steps=(1000, "training steps"),
        png=(Path, "draw the curves into this file"),
    )
    demo = PRESETS["lut"]["demo"]
    model = make(LUTTransformerConfig, demo)
    text = load_text(given.text, context=model.context)
    curves = {}
    print(f"{'optimizer':14} {'ms/step':>8} {'train':>8} {'test':>8}   ({given.steps} steps)")
    for name, changes in CONFIGS.items():
        values = {**demo, **changes, "table_optimizer": name, "steps": given.steps}
        run = Run(model, make(TrainingConfig, values), text.train)
        state, curve, seconds = run.init(), [], 0.0
        for first in range(0, given.steps, 25):
            count = min(25, given.steps - first)
            start = time.perf_counter()
            state, loss = run.advance(state, first, count)
            curve.append((first + count, float(loss)))
            seconds += (time.perf_counter() - start) if first else 0.0  # the first call compiles
        test = run.evaluate(state, text.test)
        per_step = seconds / max(given.steps - 25, 1) * 1e3
        print(f"{name:14} {per_step:8.1f} {curve[-1][1]:8.4f} {test:8.4f}", flush=True)
        curves[f"{name} (test {test:.3f})"] = np.transpose(curve)
    for axes in draw_axes(given.png, size=(8, 5)) if given.png else ():
        for name, points in curves.items():
            axes.plot(*points, label=name, linewidth=1)
        axes.set_xlabel(f"training step (of {demo['batch_size']} x {model.context} bytes)")
        axes.set_ylabel("training loss (nats per byte)")
        axes.set_ylim(top=3.0)
        axes.grid(alpha=0.3)
        axes.legend()


if __name__ == "__main__":
    main()
