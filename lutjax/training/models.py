"""Runs of Flax NNX models: their arrays, how these make a model, and their checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from lutjax._extras import needed_by
from lutjax.layers import nnx as layers
from lutjax.training import checkpoints, runs
from lutjax.training.errors import CheckpointError
from lutjax.training.loop import Repeated
from lutjax.training.nnx import filled

with needed_by(__name__):
    from flax import nnx


M = TypeVar("M", bound=nnx.Module)
R = TypeVar("R", bound=runs.Record)


class State(NamedTuple):
    """State that training changes: nested dicts of arrays, and the optimiser's state."""

    params: Any
    """Trained variables."""
    others: Any
    """All other variables: anchors, wires, embeddings, statistics."""
    optimizer: Any


class Structure(Generic[M]):
    """The structure with which the arrays of a state make a model.

    Args:
      build: makes a model that draws its arrays from these `nnx.Rngs`.
    """

    def __init__(self, build: Callable[[nnx.Rngs], M]):
        # The seed changes values only, and there are none here.
        abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        parts: Any = nnx.split(abstract, nnx.Param, ...)
        self._graph, self._params, self._others = parts
        # One program, because compiling every draw by itself takes longer.
        self._init = jax.jit(lambda key: arrays(build(nnx.Rngs(key))))

    def abstract(self) -> tuple[Any, Any]:
        """Shapes and dtypes of `State.params` and `State.others`."""
        return nnx.to_pure_dict(self._params), nnx.to_pure_dict(self._others)

    def n_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(self.abstract()[0]))

    def init(self, seed: int) -> tuple[Any, Any]:
        """`State.params` and `State.others` of a new model."""
        params, others = self._init(jax.random.key(seed))
        return params, others

    def model(self, params: Any, others: Any) -> M:
        """The model made of these arrays, which it shares."""
        model: M = nnx.merge(self._graph, filled(self._params, params), filled(self._others, others))
        return model


def arrays(model: nnx.Module) -> tuple[Any, Any]:
    """`State.params` and `State.others` of a model, as nested dicts."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    _, params, others = parts
    return nnx.to_pure_dict(params), nnx.to_pure_dict(others)


class ModelRun(Generic[M]):
    """A model and how it is trained, without the arrays that training changes.

    Args:
      structure: of the model.
      optimizer: makes the optimiser's state of `State.params`.
      seed: of the model.

    Attributes:
      advance: runs steps; see `lutjax.training.loop.run`.
    """

    advance: Repeated

    def __init__(self, structure: Structure[M], optimizer: Callable[[Any], Any], seed: int):
        self.structure, self._init_optimizer, self._seed = structure, optimizer, seed

    def init(self) -> State:
        """The state before the first step."""
        params, others = self.structure.init(self._seed)
        return State(params, others, self._init_optimizer(params))

    def abstract(self) -> State:
        """The state's shapes and dtypes, for reading a checkpoint."""
        params, others = self.structure.abstract()
        return State(params, others, jax.eval_shape(self._init_optimizer, params))


def save(folder: Path, step: int, state: State, record: runs.Record) -> None:
    """Writes a checkpoint into the folder of a run; see `runs.save`. An optimiser's state of None is left out."""
    trees = {"model": _model_tree(state.params, state.others)}
    if state.optimizer is not None:
        trees["optimizer"] = state.optimizer
    runs.save(folder, step, trees, record)


def restore(folder: Path, step: int, run: ModelRun[Any]) -> State:
    """The state of a run at a checkpoint that `runs.read` has found whole.

    Raises:
      CheckpointError: the arrays are not those of the run, or an anchor or a wire is not an input.
    """
    abstract = run.abstract()
    params, others = _restore_model(folder, step, run.structure)
    return State(params, others, runs.restore(folder, step, "optimizer", abstract.optimizer))


def load(folder: Path, step: int, structure: Structure[M]) -> M:
    """The model of a checkpoint that `runs.read` has found whole.

    Raises:
      CheckpointError: as `restore`.
    """
    return structure.model(*_restore_model(folder, step, structure))


class Loader(Generic[M, R]):
    """Reads the models of runs of one kind.

    Args:
      record: the class of the kind's record.
      model: makes the model of the folder of a run, the step of a checkpoint that `runs.read` has found whole, and its
        record.
    """

    def __init__(self, record: type[R], model: Callable[[Path, int, R], M]):
        self._record, self._model = record, model

    def __call__(self, folder: Path, *, on_damage: Callable[[str], None] = checkpoints.warn) -> tuple[M, R]:
        """Return the model and the record of the latest checkpoint in the folder of a run.

        Args:
          on_damage: is told of a damaged checkpoint that was passed over for the one before it.

        Raises:
          CheckpointError: there is none, none is whole, or an anchor or a wire is not an input.
        """
        step, record = runs.read(folder, self._record, on_damage=on_damage)
        return self._model(folder, step, record), record


def _restore_model(folder: Path, step: int, structure: Structure[Any]) -> tuple[Any, Any]:
    tree = runs.restore(folder, step, "model", _model_tree(*structure.abstract()))
    try:
        layers.check(structure.model(tree["params"], tree["others"]))
    except ValueError as error:
        raise CheckpointError(f"the checkpoint in {folder} cannot be used: {error}") from error
    return tree["params"], tree["others"]


def _model_tree(params: Any, others: Any) -> dict[str, Any]:
    return {"params": params, "others": others}
