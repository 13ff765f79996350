"""Small runs with n-gram tables in host memory."""

import dataclasses

import numpy as np
from small_runs import MEMORY

from lutjax.training.lm import Run, TrainingConfig

TEXT = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint8)
TRAINING = TrainingConfig(
    steps=9, batch_size=4, learning_rate=0.02, clip=1.0, optimizer="adamw", memory_weight_decay=0.1
)
DEVICE = dataclasses.replace(MEMORY, n_layers=1, memory_layers=(0,))
HOST = dataclasses.replace(DEVICE, memory_placement="host")


def run_of(model=HOST, **changes):
    return Run(model, dataclasses.replace(TRAINING, **changes), TEXT, TEXT)


def trained(run, steps=3):
    """Train for a few steps and return the losses and the final state."""
    state, losses = run.init(), []
    for i in range(steps):
        state, loss = run.advance(state, i, 1)
        losses.append(float(loss))
    return losses, state


def table_of(run):
    return run.structure.host_tables["layers/0/memory/weights"][0]


OPTIONS = [
    "--memory", "--memory-placement", "host", "--memory-depth", "2", "--memory-rows", "300", "--features",
    "16", "--context", "16", "--n-layers", "1", "--n-heads", "2", "--feed-forward", "dense", "--batch-size",
    "4", "--steps", "12", "--checkpoint-every", "4", "--eval-every", "4", "--log-every", "2",
]  # fmt: skip


def words_of(folder):
    """Write a text and return command-line words to train on it."""
    text = folder / "text.txt"
    text.write_bytes(TEXT.tobytes())
    return ["train", "lm", "--text", str(text), *OPTIONS]
