"""Checkpoints of language-model runs: the model, the optimiser's state, and all that decides how to go on."""

import dataclasses
from pathlib import Path
from typing import Any

import lutjax
from lutjax.layers import nnx as layers
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.training import checkpoints
from lutjax.training.checkpoints import CheckpointError
from lutjax.training.lm import Run, State, Structure, TrainingConfig

FOLDER = "checkpoints"
"""Where the checkpoints are in the folder of a run."""


@dataclasses.dataclass(frozen=True)
class TextIdentity:
    """Which text a run reads: the path given (None: Python's standard library), bytes, and SHA-256 of them."""

    path: str | None
    size: int
    digest: str


@dataclasses.dataclass
class History:
    """Losses so far in nats per byte, each with the number of steps done."""

    train: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    test: list[tuple[int, float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Record:
    """What a checkpoint holds beside arrays.

    Attributes:
      model, training, text: what decides the run.
      bigram: loss of the baseline on the test part, in nats per byte.
      options: what the program that trains wants to remember and may change, such as intervals.
      history: losses so far.
    """

    model: LUTTransformerConfig
    training: TrainingConfig
    text: TextIdentity
    bigram: float
    options: dict[str, Any]
    history: History


def exists(folder: Path) -> bool:
    """Whether the folder of a run holds a checkpoint."""
    return bool(checkpoints.steps(folder / FOLDER))


def save(folder: Path, step: int, state: State, record: Record) -> None:
    """Writes a checkpoint into the folder of a run; see `checkpoints.save`."""
    meta = {
        "lutjax": lutjax.__version__,
        "model": record.model.to_dict(),
        "training": dataclasses.asdict(record.training),
        "text": dataclasses.asdict(record.text),
        "bigram": record.bigram,
        "options": record.options,
        "history": dataclasses.asdict(record.history),
    }
    trees = {"model": _model_tree(state.params, state.others), "optimizer": state.optimizer}
    checkpoints.save(folder / FOLDER, step, trees, meta)


def read(folder: Path) -> tuple[int, Record]:
    """The steps done at the latest checkpoint, and what it holds beside arrays.

    Raises:
      CheckpointError: there is none, or it is damaged, or of a version with other fields.
    """
    step, meta = checkpoints.read_meta(folder / FOLDER)
    try:
        return step, Record(
            model=LUTTransformerConfig.from_dict(meta["model"]),
            training=TrainingConfig(**meta["training"]),
            text=TextIdentity(**meta["text"]),
            bigram=meta["bigram"],
            options=meta["options"],
            history=History(
                **{name: [(s, x) for s, x in points] for name, points in meta["history"].items()}
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint in {folder} was written by lutjax {meta.get('lutjax')} and does not fit this "
            f"version, {lutjax.__version__}: {error}"
        ) from error


def restore(folder: Path, step: int, run: Run) -> State:
    """The state of a run at a checkpoint that `read` has found whole.

    Raises:
      CheckpointError: the arrays are not those of the run, or an anchor is not an input.
    """
    abstract = run.abstract()
    tree = checkpoints.restore(folder / FOLDER, step, "model", _model_tree(abstract.params, abstract.others))
    optimizer = checkpoints.restore(folder / FOLDER, step, "optimizer", abstract.optimizer)
    state = State(tree["params"], tree["others"], optimizer)
    _check(run.structure.model(state.params, state.others), folder)
    return state


def load_model(folder: Path) -> tuple[LUTTransformer, Record]:
    """The model of the latest checkpoint in the folder of a run, ready to generate.

    Raises:
      CheckpointError: there is none, it is damaged, or an anchor is not an input.
    """
    step, record = read(folder)
    structure = Structure(record.model)
    tree = checkpoints.restore(folder / FOLDER, step, "model", _model_tree(*structure.abstract()))
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
