"""Checkpoints of language-model runs: the model, the optimiser's state, and all that decides how to go on."""

import dataclasses
from pathlib import Path
from typing import Any

from lutjax.layers import nnx as layers
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.training import runs
from lutjax.training.checkpoints import CheckpointError
from lutjax.training.lm import Run, State, Structure, TrainingConfig


@dataclasses.dataclass(frozen=True)
class TextIdentity:
    """Which text a run reads: the path given (None: Python's standard library), bytes, and SHA-256 of them."""

    path: str | None
    size: int
    digest: str


@dataclasses.dataclass
class Record:
    """What a checkpoint holds beside arrays.

    Attributes:
      model, training, text: what decides the run.
      bigram: loss of the baseline on the test part, in nats per byte.
      options: what the program that trains wants to remember and may change, such as intervals.
      history: losses so far, in nats per byte.
    """

    model: LUTTransformerConfig
    training: TrainingConfig
    text: TextIdentity
    bigram: float
    options: dict[str, Any]
    history: runs.History


def save(folder: Path, step: int, state: State, record: Record) -> None:
    """Writes a checkpoint into the folder of a run; see `checkpoints.save`."""
    trees = {"model": _model_tree(state.params, state.others), "optimizer": state.optimizer}
    runs.save(folder, step, trees, record)


def restore(folder: Path, step: int, run: Run) -> State:
    """The state of a run at a checkpoint that `runs.read` has found whole.

    Raises:
      CheckpointError: the arrays are not those of the run, or an anchor is not an input.
    """
    abstract = run.abstract()
    tree = runs.restore(folder, step, "model", _model_tree(abstract.params, abstract.others))
    optimizer = runs.restore(folder, step, "optimizer", abstract.optimizer)
    state = State(tree["params"], tree["others"], optimizer)
    _check(run.structure.model(state.params, state.others), folder)
    return state


def load_model(folder: Path) -> tuple[LUTTransformer, Record]:
    """The model of the latest checkpoint in the folder of a run, ready to generate.

    Raises:
      CheckpointError: there is none, it is damaged, or an anchor is not an input.
    """
    step, record = runs.read(folder, Record)
    structure = Structure(record.model)
    tree = runs.restore(folder, step, "model", _model_tree(*structure.abstract()))
    model = structure.model(tree["params"], tree["others"])
    _check(model, folder)
    return model, record


def _model_tree(params: Any, others: Any) -> dict[str, Any]:
    return {"params": params, "others": others}


def _check(model: LUTTransformer, folder: Path) -> None:
    try:
        layers.check(model)
    except ValueError as error:
        raise CheckpointError(f"the checkpoint in {folder} cannot be used: {error}") from error
