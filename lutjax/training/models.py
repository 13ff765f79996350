"""Runs of Flax NNX models: arrays, model construction and checkpoints."""

import functools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from lutjax.extras import require_optional
from lutjax.files.messages import in_a_line
from lutjax.layers import nnx as layers
from lutjax.optim.nnx import fill_state
from lutjax.tables.host import HostTable
from lutjax.training import checkpoints, host_memory, hosts, meshes, runs
from lutjax.training.errors import CheckpointError
from lutjax.training.loop import Repeated, Step

with require_optional(__name__):
    from flax import nnx


M = TypeVar("M", bound=nnx.Module)
R = TypeVar("R", bound=runs.Record)


class State(NamedTuple):
    """State updated by training: nested dicts of arrays, and the optimizer state."""

    params: Any  # trained variables
    others: Any  # all other variables: anchors, wires, embeddings, statistics
    optimizer: Any


class Structure(Generic[M]):
    """Model structure, which turns the arrays of a state into a model.

    Args:
      build: builds a model that samples its arrays with the given `nnx.Rngs`.
      one_program: initialize all arrays in one compiled program. Otherwise a small program
        initializes each array, shared between arrays with the same shape. Large models with equal
        layers then start sooner, if their initializers give the same bits in both modes.
    """

    def __init__(self, build: Callable[[nnx.Rngs], M], *, one_program: bool = True):
        # The seed changes only values, and this model has none.
        abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
        parts: Any = nnx.split(abstract, nnx.Param, ...)  # typed as a pair
        self._graph, self._params, self._others = parts
        self._build = build
        self._init = jax.jit(self.sample_variables) if one_program else self.sample_variables

    def empty(self) -> M:
        """Return a model with shapes and dtypes in place of arrays."""
        model: M = nnx.merge(self._graph, self._params, self._others)
        return model

    def abstract(self) -> tuple[Any, Any]:
        """Shapes and dtypes of `State.params` and `State.others`."""
        return nnx.to_pure_dict(self._params), nnx.to_pure_dict(self._others)

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """All parameter names, in `State.params` leaf order."""
        leaves = jax.tree.leaves_with_path(self.abstract()[0])
        return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves)

    @functools.cached_property
    def tables(self) -> frozenset[str]:
        """Table parameter names."""
        return frozenset(
            "/".join(map(str, path))
            for path, v in nnx.to_flat_state(self._params)
            if isinstance(v, layers.Tables)
        )

    @functools.cached_property
    def host_tables(self) -> dict[str, tuple[HostTable, str]]:
        """Host-resident tables by name, each with the name of its key in `State.others`.

        All models with this structure share the tables.
        """
        return layers.host_tables_of(self.empty())

    def host_keys(self, others: Any) -> dict[str, Any]:
        """Return the keys of `host_tables` in `State.others`, by table name."""
        named = jax.tree.flatten_with_path(others)[0]
        leaves = {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named
        }
        return {name: hosts.fetch(leaves[key]) for name, (_, key) in self.host_tables.items()}

    def n_parameters(self) -> int:
        """Return the number of trained parameters."""
        on_host = sum(math.prod(table.shape) for table, _ in self.host_tables.values())
        return on_host + sum(int(np.prod(p.shape)) for p in jax.tree.leaves(self.abstract()[0]))

    def sample_variables(self, key: Any) -> tuple[Any, Any]:
        """`State.params` and `State.others` of a new model, sampled from a `jax.random` key."""
        return arrays(self._build(nnx.Rngs(key)))

    def init(self, seed: int) -> tuple[Any, Any]:
        """`State.params` and `State.others` of a new model."""
        params, others = self._init(jax.random.key(seed))
        return params, others

    def model(self, params: Any, others: Any) -> M:
        """Return a model that shares these arrays."""
        model: M = nnx.merge(
            self._graph, fill_state(self._params, params), fill_state(self._others, others)
        )
        return model


def arrays(model: nnx.Module) -> tuple[Any, Any]:
    """`State.params` and `State.others` of a model, as nested dicts."""
    parts: Any = nnx.split(model, nnx.Param, ...)
    _, params, others = parts
    return nnx.to_pure_dict(params), nnx.to_pure_dict(others)


class ModelRun(Generic[M]):
    """A model and its training procedure, without the arrays that training updates.

    Args:
      structure: model structure.
      optimizer: creates the optimizer state for `State.params`.
      seed: model seed.
      samples: samples computed together in a step; a mesh may divide them.

    Attributes:
      advance: runs steps; see `lutjax.training.loop.run`.
      mesh: devices over which arrays and samples are divided; None for a single device.
    """

    advance: Repeated
    mesh: Mesh | None = None

    def __init__(
        self, structure: Structure[M], optimizer: Callable[[Any], Any], seed: int, samples: int = 1
    ):
        self.structure, self._init_optimizer = structure, optimizer
        self._seed, self._samples = seed, samples

    def divide(self, asked: Mapping[str, int] | None = None) -> None:
        """Divide the run over a mesh, before its first step; results are equal within rounding.

        See `lutjax.training.meshes.choose`, which selects from the devices of all processes.
        """
        self.mesh = meshes.choose(
            self.structure.abstract()[0],
            jax.devices(),
            self._samples,
            asked,
            tables=self.structure.tables,
        )
        if self.mesh is not None:
            self._place_on_mesh(self.mesh)

    def _place_on_mesh(self, mesh: Mesh) -> None:
        """Rebuild `advance` for a state on a mesh."""
        raise NotImplementedError

    def _repeat_step(self, step: Step, data: Any, of_data: Any = None) -> Repeated:
        """Repeat a step, on the run's mesh if it has one; data are replicated by default."""
        if self.mesh is None:
            return Repeated(step, data)
        if of_data is None:
            everywhere = meshes.replicated_sharding(self.mesh)
            of_data = jax.tree.map(lambda _: everywhere, data)
        return Repeated(step, data, of_state=self._shardings(self.mesh), of_data=of_data)

    def init(self) -> State:
        """Return the state before the first step."""
        if self.mesh is None:
            return self._first_state(*self.structure.init(self._seed))
        # In one program each device makes only its own shards: the whole may exceed its memory.
        make = jax.jit(self.sample_state, out_shardings=self._shardings(self.mesh))
        state: State = make(jax.random.key(self._seed))
        return state

    def sample_state(self, key: Any) -> State:
        """Return the initial state, sampled from a `jax.random` key instead of the seed.

        Under `jax.vmap` it returns many states at once.
        """
        return self._first_state(*self.structure.sample_variables(key))

    def abstract(self) -> State:
        """Return shapes, dtypes and, on a mesh, shardings of the state, to read a checkpoint."""
        state: State = jax.eval_shape(self._first_state, *self.structure.abstract())
        return (
            state if self.mesh is None else meshes.add_shardings(state, self._shardings(self.mesh))
        )

    def backend_notes(self) -> list[str]:
        """Return report lines for step backends that are not op implementations."""
        return []

    @property
    def host_bytes(self) -> int:
        """Bytes of host-resident tables and their optimizer state."""
        return 0

    def write_beside(self, folder: Path) -> None:
        """Write checkpoint files for data outside the state arrays."""

    def read_beside(self, folder: Path, others: Any) -> None:
        """Read the files of `write_beside`; `others` belongs to the state."""

    def _shardings(self, mesh: Mesh) -> State:
        state = jax.eval_shape(self._first_state, *self.structure.abstract())
        shardings: State = meshes.shardings(state, mesh, self.structure.tables)
        return shardings

    def _first_state(self, params: Any, others: Any) -> State:
        return State(params, others, self._init_optimizer(params))


def save(
    folder: Path, step: int, state: State, record: runs.Record, run: ModelRun[Any] | None = None
) -> None:
    """Write a checkpoint of a run; see `runs.save`. An optimizer state of None is left out."""
    # Separate trees: a model is loaded without reading the larger optimizer state.
    trees = {"model": _model_tree(state.params, state.others)}
    if state.optimizer is not None:
        trees["optimizer"] = state.optimizer
    runs.save(folder, step, trees, record, None if run is None else run.write_beside)


def restore(folder: Path, step: int, run: ModelRun[Any]) -> State:
    """Return the run state at a checkpoint already verified by `runs.read`."""
    abstract = run.abstract()
    params, others = _restore_model(folder, step, run.structure, (abstract.params, abstract.others))
    state = State(params, others, runs.restore(folder, step, "optimizer", abstract.optimizer))
    run.read_beside(folder / runs.FOLDER / str(step), others)
    return state


def load(folder: Path, step: int, structure: Structure[M], mesh: Mesh | None = None) -> M:
    """Return the model at a checkpoint already verified by `runs.read`, on a mesh or one device."""
    abstract = structure.abstract()
    if mesh is not None:
        abstract = meshes.add_shardings(
            abstract, meshes.shardings(abstract, mesh, structure.tables)
        )
        host_memory.share(structure, mesh)
    params, others = _restore_model(folder, step, structure, abstract)
    host_memory.load(folder / runs.FOLDER / str(step), structure, others)
    return structure.model(params, others)


class Loader(Generic[M, R]):
    """Reader for models from one kind of run.

    Args:
      record: record class for this kind.
      model: makes the model from the run folder, the step of a checkpoint verified by `runs.read`,
        and its record.
    """

    def __init__(self, record: type[R], model: Callable[[Path, int, R], M]):
        self._record, self._model = record, model

    def __call__(
        self, folder: str | os.PathLike[str], *, on_damage: Callable[[str], None] = checkpoints.warn
    ) -> tuple[M, R]:
        """Return the model and the record of the latest intact checkpoint in a run folder.

        Raises:
          CheckpointError: no checkpoint is intact, or an anchor or a wire is not an input.
        """
        folder = Path(folder)
        step, record = runs.read(folder, self._record, on_damage=on_damage)
        try:
            return self._model(folder, step, record), record
        except CheckpointError:
            raise
        except (OverflowError, TypeError, ValueError) as error:  # sizes of no valid model
            raise CheckpointError(
                f"the checkpoint in {folder} cannot be used: {in_a_line(error)}"
            ) from error


def _restore_model(
    folder: Path, step: int, structure: Structure[Any], abstract: tuple[Any, Any]
) -> tuple[Any, Any]:
    tree = runs.restore(folder, step, "model", _model_tree(*abstract))
    # A digest proves no author: wires of a crafted file must not lead outside the inputs.
    try:
        layers.check(structure.model(tree["params"], tree["others"]))
    except ValueError as error:
        raise CheckpointError(f"the checkpoint in {folder} cannot be used: {error}") from error
    return tree["params"], tree["others"]


def _model_tree(params: Any, others: Any) -> dict[str, Any]:
    return {"params": params, "others": others}
