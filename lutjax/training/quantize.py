"""Deployment of language models: quantized GPT tables and the folder that stores the model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from lutjax.extras import require_optional
from lutjax.layers import nnx as layers
from lutjax.models import GPTConfig
from lutjax.models.gpt import READS, SCORED
from lutjax.reads import Confidence, PowersOfTwo
from lutjax.training import checkpoints, models, runs
from lutjax.training.errors import RunError
from lutjax.training.lm import Evaluation, LanguageModel, structure_of
from lutjax.training.lm_runs import Record
from lutjax.training.models import State
from lutjax.training.text import Bytes

with require_optional(__name__):
    from flax import nnx

FOLDER = "quantized"  # folder name of the deployed model, inside its run folder


def deployed_record(folder: Path, record: Record) -> Record:
    """Return the record for a run's deployed model; raise RunError if it has no tables."""
    config, advice = record.model, "train one by lutjax train lm --model gpt --read powers_of_two."
    if record.quantized:
        raise RunError(f"{folder} is quantized already.")
    if not isinstance(config, GPTConfig):
        raise RunError(
            f"{folder} is a run of the model lut, whose integer form is the C program from lutjax "
            f"export: for int8 tables in JAX {advice}"
        )
    if config.feed_forward not in SCORED:
        tables = "tables without a form of integers"
        if config.feed_forward == "dense":
            tables = "no tables"
        raise RunError(
            f"{folder} has {tables}: its feed_forward is {config.feed_forward!r}; {advice}"
        )
    if config.memory_places and config.memory_placement == "host":
        raise RunError(f"{folder} has a host-resident memory, which has no integer form.")
    read = READS[config.read]
    if not isinstance(read, Confidence | PowersOfTwo):
        raise RunError(
            f"{folder} was trained with the read {config.read!r}, which has no integer form: "
            f"{advice}"
        )
    # Weights that are powers of two need shifts only; other reads of as many rows come close.
    name = next(name for name, known in READS.items() if known == PowersOfTwo(read.ways))
    # Table dropout applies only during training.
    model = dataclasses.replace(config, read=name, table_dropout=0.0)
    return dataclasses.replace(record, model=model, quantized=True)


def deployed_model(model: LanguageModel, record: Record) -> LanguageModel:
    """Return the model with quantized tables; it shares all other arrays."""
    return layers.quantize(structure_of(record.model).model(*models.arrays(model)))


def evaluate(
    model: LanguageModel, record: Record, part: Bytes, *, progress: Callable[[float], None]
) -> float:
    """Return a model's mean loss over part of a text, in nats per byte; `progress` gets shares."""
    structure = structure_of(record.model, quantized=record.quantized)
    mean_loss = Evaluation(structure, record.model.context)
    return mean_loss(*models.arrays(model), part, progress=progress)


def bytes_of(model: LanguageModel) -> tuple[int, int]:
    """Return the bytes in a model's tables, integer exponents included, and in all its arrays."""
    return _bytes(nnx.state(model, (layers.Tables, layers.Quantized))), _bytes(nnx.state(model))


def check_place(folder: Path) -> None:
    """Raise RunError if a folder holds anything except a deployed model."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise RunError(f"{folder} is no folder, and would be replaced: move it away.")
    entries = list(folder.iterdir()) if folder.exists() else []
    others = [path for path in entries if path.name not in (runs.FOLDER, runs.LOCK)]
    others += [path for path in entries if path.name == runs.LOCK and not runs.is_lock(path)]
    for path in (*others, *checkpoints.foreign_entries(folder / runs.FOLDER)):
        raise RunError(
            f"{folder} would be replaced, but holds {path.relative_to(folder)}, which does not "
            "belong to a deployed model: move it away."
        )


def save(folder: Path, step: int, model: LanguageModel, record: Record) -> None:
    """Write a deployed model into a folder, replacing an earlier one, for `lutjax.load`."""
    check_place(folder)
    params, others = models.arrays(model)
    runs.check_space(folder.parent, _bytes((params, others)))
    with runs.replace_folder(folder) as path:
        models.save(path, step, State(params, others, None), record)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
