"""Configuration and training step of classifiers; `lutjax.training.loop` has the loop.

The models are `LogicClassifier` and `LogicTreeNet`.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Num

import lutjax
from lutjax.extras import require_optional
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig
from lutjax.models._edges import rows_with_edges, with_edges
from lutjax.training import meshes, models, optimizers, runs
from lutjax.training.augment import mirror, warp
from lutjax.training.classifier_config import TrainingConfig as TrainingConfig
from lutjax.training.models import ModelRun, State, Structure
from lutjax.training.raw import Form
from lutjax.training.samples import Samples, SamplesError
from lutjax.values import Array

with require_optional(__name__):
    import optax
    from flax import nnx


Config = LogicClassifierConfig | LogicTreeNetConfig
Model = LogicClassifier | LogicTreeNet

WIDTH = 0.1
"""Sigmoid width of learned thresholds, and unit of their learning rate, in standard deviations.

On validation parts of the digits hard networks of 2 x 500 gates reached 91.4, 92.5, 91.8 and 87.2 %
with 0.03, 0.1, 0.3 and 1.
"""

MOST_SELECTING = 4096  # maximum evenly spaced training samples for network selection
AT_ONCE = 2048  # maximum samples per evaluation batch
MOST_IMAGES = 4096  # number of images for initial edge thresholds


class Selected(NamedTuple):
    """Optimizer state, and the selected network."""

    optimizer: Any
    params: Any  # trained variables with the best hard accuracy on the selection samples
    step: Array  # completed steps at selection
    accuracy: Array  # its hard accuracy


class Run(ModelRun[Model]):
    """A classifier and its training procedure, without the trained arrays.

    Args:
      model: model sizes.
      training: all other run configuration.
      train: training samples.
      thresholds: initial thresholds; by default from `first_thresholds`.

    Raises:
      ValueError: sample sizes or classes do not fit the model, or the model does not support a
        temperature.
    """

    def __init__(
        self,
        model: Config,
        training: TrainingConfig,
        train: Samples,
        thresholds: Float[np.ndarray, "features thresholds"] | None = None,
    ):
        self._shape = _checked_shape(model, train)  # per sample
        self.regression = train.regression
        self._unit = float(train.y.std()) or 1.0  # scale for regression errors
        if not model.n_thresholds:
            _check_bits(train)
        learned = training.thresholds == "learned"
        if model.learned_thresholds != learned:
            raise ValueError(
                f"learned_thresholds is {model.learned_thresholds} in the model config, but "
                f"thresholds is {training.thresholds!r} in the training config."
            )
        self._temperatures = training.temperatures()
        if self._temperatures is not None and model.tables in ("raw", "binary"):
            raise ValueError(
                f"temperature is {training.temperature} and final_temperature "
                f"{training.final_temperature}, but {model.tables} tables have no logits. Omit "
                "both, or choose gates, light or walsh."
            )
        self.config, self.training, self.thresholds = model, training, thresholds
        encoding: dict[str, Any] = {}
        if model.n_thresholds:
            if thresholds is None:
                self.thresholds = first_thresholds(
                    feature_columns(model, train), training, model.n_thresholds
                )
            encoding["thresholds"] = jnp.asarray(self.thresholds)
        optimizer = optimizers.optimizer("adam", training.rate())
        if training.weight_decay:
            optimizer = optax.adamw(
                training.rate(), weight_decay=training.weight_decay, mask=_decay_mask
            )
        if learned:
            widths, can_move = _widths(model, train)
            encoding["widths"] = jnp.asarray(widths)
            # Adam's steps have one size for all parameters; thresholds need the feature's unit.
            optimizer = optax.chain(optimizer, _rate_of_thresholds(jnp.asarray(widths * can_move)))
        self._optimizer = optimizer
        structure: Structure[Model] = Structure(
            lambda rngs: classifier_of(model, rngs=rngs, **encoding)
        )
        super().__init__(structure, self._optimizer.init, training.seed, training.batch_size)
        self._warps = bool(training.augment or training.shift or training.bend)
        augments = len(train.shape) > 1 and (self._warps or training.flip)
        self._image = train.shape if augments else None
        self._train = train
        self._place_on_mesh(None)

    def temperature(self, step: int | Array) -> Array | None:
        """Return a step's temperature, counted from 0; None for the gates' default of 1."""
        return None if self._temperatures is None else jnp.asarray(self._temperatures(step))

    def _place_on_mesh(self, mesh: Mesh | None) -> None:
        step = self._step_and_select if self.training.select_every else self.step
        self.advance = self._repeat_step(step, (self._train.x, self._train.y))
        where: dict[str, Any] = (
            {} if mesh is None else {"out_shardings": meshes.replicated_sharding(mesh)}
        )
        self._classes = jax.jit(self._classes_of, static_argnames="hard", **where)

    def _first_state(self, params: Any, others: Any) -> State:
        state = super()._first_state(params, others)
        if not self.training.select_every:
            return state
        # Copy: the state's memory is donated, so no array may appear twice.
        params = jax.tree.map(jnp.copy, state.params)
        selected = Selected(state.optimizer, params, jnp.int32(0), jnp.float32(-jnp.inf))
        return state._replace(optimizer=selected)

    def selected(self, state: State) -> State:
        """Return the state with the selected network's trained variables."""
        return (
            state._replace(params=state.optimizer.params) if self.training.select_every else state
        )

    def _step_and_select(
        self, state: State, number: Array, data: tuple[Array, Array]
    ) -> tuple[State, Array]:
        """Return the next state with the selected network, and the loss; see `step`."""
        selected: Selected = state.optimizer
        state, loss = self.step(state._replace(optimizer=selected.optimizer), number, data)
        done = number + 1

        def select(state: State, selected: Selected) -> Selected:
            # Training samples: the test part must not take part in the choice.
            stride = -(-len(data[0]) // MOST_SELECTING)
            x, y = (array[::stride] for array in data)
            classes = self._classes_of(state.params, state.others, x, None, hard=True)
            accuracy = self._quality(classes, y).astype(jnp.float32)
            candidate = Selected(selected.optimizer, state.params, done, accuracy)
            better: Selected = jax.tree.map(
                lambda a, b: jnp.where(candidate.accuracy >= selected.accuracy, a, b),
                candidate,
                selected,
            )
            return better

        due = (done % self.training.select_every == 0) | (done == self.training.steps)
        selected = jax.lax.cond(
            due, select, lambda state, selected: selected, state, selected._replace(optimizer=None)
        )
        return state._replace(optimizer=selected._replace(optimizer=state.optimizer)), loss

    def step(
        self, state: State, number: Array, data: tuple[Array, Array], gate_cost: Array | None = None
    ) -> tuple[State, Array]:
        """Return the next state and the batch loss; see `lutjax.training.loop.Step`.

        A traced `gate_cost` replaces the config's.
        """
        # Random numbers follow from the seed and the step number: a resumed run repeats them.
        key = jax.random.fold_in(jax.random.key(self.training.seed), number)
        choice_key, image_key, gate_key = jax.random.split(key, 3)
        x, y = data
        chosen = jax.random.randint(choice_key, (self.training.batch_size,), 0, len(x))
        x, y = meshes.shard_samples((x[chosen].astype(jnp.float32), y[chosen]), self.mesh)
        if self._image is not None:
            images = x.reshape(-1, *self._image)
            if self.training.flip:
                images = mirror(jax.random.fold_in(image_key, 0), images, self.training.flip)
            if self._warps:
                changes = {"shift": self.training.shift, "bend": self.training.bend}
                images = warp(image_key, images, self.training.augment, **changes)
            x = images.reshape(x.shape)

        temperature = self.temperature(number)

        def loss_of(params: Any) -> Array:
            model = self.structure.model(params, state.others)
            images = x.reshape(-1, *self._shape)
            logits = model(
                images, deterministic=False, temperature=temperature, rngs=nnx.Rngs(gates=gate_key)
            )
            if self.regression:
                loss = jnp.mean(((logits - y) / self._unit) ** 2)
            else:
                loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
            if gate_cost is not None or self.training.gate_cost:  # else leave out its computation
                cost = self.training.gate_cost if gate_cost is None else gate_cost
                loss += expected_gates(model, temperature) * (cost / 1000)
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes the number of steps implicitly
            updates, optimizer = self._optimizer.update(gradients, state.optimizer, state.params)
        return State(optax.apply_updates(state.params, updates), state.others, optimizer), loss

    def classes(
        self,
        state: State,
        x: Num[np.ndarray, "samples features"],
        *,
        hard: bool,
        steps: int | None = None,
    ) -> Num[np.ndarray, " samples"]:
        """Predict int32 classes, or float32 values in regression, with the soft or hard network.

        The number of completed steps (default: all) determines the soft network's temperature.
        """
        temperature = (
            None if hard else self.temperature(self.training.steps if steps is None else steps)
        )
        size = -(-len(x) // -(-len(x) // AT_ONCE))  # about equal parts, hence one or two programs
        batches = (x[first : first + size] for first in range(0, len(x), size))
        predictions = [
            np.asarray(self._classes(state.params, state.others, batch, temperature, hard=hard))
            for batch in batches
        ]
        return np.concatenate(predictions)

    def hard_classes(self, state: State, x: Array) -> Array:
        """Predict classes with the hard network; unlike `classes`, in a traced function."""
        return self._classes_of(state.params, state.others, x, None, hard=True)

    def accuracy(
        self, state: State, part: Samples, *, hard: bool, steps: int | None = None
    ) -> float:
        """Return the accuracy, or R2 in regression; see `classes`."""
        return float(self._quality(self.classes(state, part.x, hard=hard, steps=steps), part.y))

    def _quality(self, predicted: Any, y: Any) -> Any:
        """Return the accuracy, or R2 in regression: 1 - mean squared error / variance."""
        if self.regression:
            variance = y.var()
            # Equal targets have no variance to explain; divide by 1 instead of 0.
            unit = variance + (variance == 0).astype(variance.dtype)
            return 1 - ((predicted - y) ** 2).mean() / unit
        return (predicted == y).mean()

    def _classes_of(
        self, params: Any, others: Any, x: Array, temperature: Array | None, *, hard: bool
    ) -> Array:
        model = self.structure.model(params, others)
        x = meshes.shard_samples(x.astype(jnp.float32), self.mesh).reshape(-1, *self._shape)
        rngs = nnx.Rngs(gates=self.training.seed)
        logits = model(x, deterministic=hard, temperature=temperature, rngs=rngs)
        return logits if self.regression else logits.argmax(-1).astype(jnp.int32)


def classifier_of(model: Config, *, rngs: nnx.Rngs, **encoding: Any) -> Model:
    """Initialize a config's model. `given` contains thresholds and their widths."""
    if isinstance(model, LogicTreeNetConfig):
        return LogicTreeNet(model, rngs=rngs, **encoding)
    return LogicClassifier(model, rngs=rngs, **encoding)


def image_shape(train: Samples) -> tuple[int, int, int]:
    """Return height, width and channels; raise ValueError if the samples are not images."""
    if len(train.shape) < 2:
        raise ValueError(
            f"samples of {train.name} have {train.shape[0]} numbers each, but gate trees read "
            "images; expected x as [N, height, width] or [N, height, width, channels]. Omit the "
            "model, or choose gates."
        )
    height, width, *channels = train.shape
    return height, width, channels[0] if channels else 1


def _checked_shape(model: Config, train: Samples) -> tuple[int, ...]:
    """Return the model's sample shape, after checking that training samples fit the model."""
    shape: tuple[int, ...] = train.x.shape[1:]
    expected: tuple[int, ...]
    if isinstance(model, LogicTreeNetConfig):
        shape, name, expected = image_shape(train), "in_shape", model.in_shape
    else:
        name, expected = "in_features", (model.in_features,)
    regression = is_regression(model)
    if train.regression != regression:
        raise ValueError(
            f"regression is {regression} in the model config, but {train.name} has "
            f"{'numbers' if train.regression else 'classes'} to learn."
        )
    if shape != expected or train.n_classes > model.n_classes:
        raise ValueError(
            f"samples have {' x '.join(map(str, shape))} numbers and {train.n_classes} classes, "
            f"but {name} is {' x '.join(map(str, expected))} and n_classes is {model.n_classes}."
        )
    return shape


def _check_bits(train: Samples) -> None:
    """Raise SamplesError if the network requires bits and the samples have other values."""
    others = train.x[(train.x != 0) & (train.x != 1)]
    if len(others):
        raise SamplesError(
            f"n_thresholds is 0, so samples must be bits, but {train.name} has {len(others):,} "
            f"numbers other than 0 and 1, such as {others[0]:g}, which hard gates would take for "
            "1. Set n_thresholds to 1 or more."
        )


def first_thresholds(
    x: Num[np.ndarray, "values features"], training: TrainingConfig, n_thresholds: int
) -> Float[np.ndarray, "features thresholds"]:
    """Return each feature's initial thresholds."""
    method = "uniform" if training.thresholds == "learned" else training.thresholds
    return np.asarray(lutjax.thermometer_thresholds(jnp.asarray(x), n_thresholds, method=method))


def feature_columns(model: Config, train: Samples) -> Num[np.ndarray, "values features"]:
    """Return values as columns with shared thresholds: features, or image channels for trees.

    With edges, all values come from about `MOST_IMAGES` evenly spaced images.
    """
    values: np.ndarray = train.x
    some = values[:: -(-len(values) // MOST_IMAGES)]
    if not isinstance(model, LogicTreeNetConfig):
        if not model.edges:
            return values
        return np.asarray(rows_with_edges(jnp.asarray(some.T, jnp.float32), model.image_shape)).T
    if not model.edges:
        return values.reshape(-1, model.in_shape[2])
    images = some.reshape(-1, *model.in_shape)
    # with_edges expects [channels, height, width, samples].
    channels_first = jnp.moveaxis(jnp.asarray(images, jnp.float32), (3, 1, 2), (0, 1, 2))
    maps = np.asarray(with_edges(channels_first))
    return maps.reshape(len(maps), -1).T


def _widths(model: Config, train: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return the sigmoid widths and a mask of trainable thresholds, each float32 ``[features]``.

    A feature with at most two values has mask 0, since all thresholds between them are equivalent;
    other features have 1.
    """
    x = feature_columns(model, train)
    # float64, since float32 sums over millions of pixels lose digits.
    deviation, low, high = x.std(0, dtype=np.float64), x.min(0), x.max(0)
    can_move = ~((x == low) | (x == high)).all(0)
    widths = np.where(can_move, WIDTH * deviation, 1.0)
    return widths.astype(np.float32), can_move.astype(np.float32)


def _decay_mask(params: Any) -> Any:
    """Return the weight decay mask, which excludes thresholds and wiring scores."""

    def decays(path: Any, _: Array) -> bool:
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        # Zero means no preference for a gate, but is an arbitrary place for a threshold.
        return not {"encoder", "scores"} & set(keys)

    return jax.tree_util.tree_map_with_path(decays, params)


def _rate_of_thresholds(factors: Array) -> optax.GradientTransformation:
    """Return a transformation for threshold updates in each feature's units."""

    def scale_thresholds(updates: Any, params: Any) -> Any:
        del params
        thresholds = updates["encoder"]["thresholds"] * factors[:, None]
        return {**updates, "encoder": {**updates["encoder"], "thresholds": thresholds}}

    return optax.stateless(scale_thresholds)


def layers_of(model: Model) -> list[tuple[Any, int]]:
    """Return a model's gate layers in order, each with its number of positions."""
    if isinstance(model, LogicTreeNet):
        trees = [(layer, math.prod(layer.spec.places)) for layer in model.trees]
        return [*trees, *((layer, 1) for layer in model.gates)]
    return [(layer, 1) for layer in model.layers]


def expected_gates(model: Model, temperature: Array | None = None) -> Array:
    """Return the expected number of two-input gates in a classifier's circuit, as a scalar.

    A table that depends on n inputs counts as ``n - 1`` gates, a tree's gate once per position, and
    a non-constant vote as one. Unread gates are included; they become constants without changing a
    vote. OR-pooling is excluded.
    """
    gates = []
    for layer, n_places in layers_of(model):
        inputs, any_input = layer.expected_needs(temperature)
        needed = (inputs - any_input).sum()
        gates.append(needed if n_places == 1 else needed * n_places)
    # The last layer's tables are the votes.
    gates.append(any_input.sum())
    return jnp.stack(gates).astype(jnp.float32).sum()


def baselines(
    train: Samples,
    test: Samples,
    training: TrainingConfig,
    n_thresholds: int,
    thresholds: Float[np.ndarray, "features thresholds"] | None = None,
) -> dict[str, float]:
    """Return logistic regression and random forest accuracies on the classifier's input bits.

    Bits come from the initial thresholds. Regression reports R2 for linear regression and a random
    forest.

    Args:
      train: training part.
      test: test part.
      training: training config.
      n_thresholds: thresholds per feature.
      thresholds: initial thresholds per feature; by default from the training config's method.

    Source: docs/logic.md, section 6.
    """
    import warnings

    with require_optional("baselines"):
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression, RidgeCV

    bits, test_bits = train.x, test.x
    if n_thresholds:
        if thresholds is None:
            thresholds = first_thresholds(train.x, training, n_thresholds)
        bits, test_bits = (
            (x[:, :, None] > thresholds).reshape(len(x), -1) for x in (train.x, test.x)
        )
    scores, seed = {}, training.seed
    models: tuple[tuple[str, Any], ...] = (
        ("logistic regression", LogisticRegression(max_iter=1000)),
        ("random forest", RandomForestClassifier(300, random_state=seed)),
    )
    if train.regression:
        models = (
            ("ridge regression", RidgeCV(np.logspace(-2, 4, 13))),
            ("random forest", RandomForestRegressor(300, random_state=seed)),
        )
    with warnings.catch_warnings():
        # A baseline that has not converged after 1000 iterations is good enough to compare with.
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, model in models:
            scores[name] = float(model.fit(bits, train.y).score(test_bits, test.y))
    return scores


@dataclasses.dataclass
class Record(runs.Record):
    """Non-array checkpoint contents: the run configuration, its data source and measurements."""

    kind: ClassVar[str] = "classify"

    model: LogicClassifierConfig | LogicTreeNetConfig
    training: TrainingConfig
    samples: runs.Source
    baselines: dict[str, float]
    options: dict[str, Any]
    history: runs.History
    target: str | None = None
    test: str | None = None
    recipe: str | None = None
    exclude: list[str] = dataclasses.field(default_factory=list)
    encoding: str | None = None
    form: Form = dataclasses.field(default_factory=Form)

    def own_kind(self) -> str:
        """Return ``"digits"`` for scikit-learn's digits, the default data, else ``"classify"``."""
        return "digits" if self.samples.path is None else self.kind


def is_regression(model: Config) -> bool:
    """Return True if a model predicts values instead of classes."""
    return isinstance(model, LogicClassifierConfig) and model.regression


def shape_of(model: Config) -> tuple[int, ...]:
    """Return a model's sample shape."""
    return model.in_shape if isinstance(model, LogicTreeNetConfig) else (model.in_features,)


def n_features(model: Config) -> int:
    """Return a model's number of sample features."""
    return math.prod(shape_of(model))


def _classifier(folder: Path, step: int, record: Record) -> Model:
    if record.training.select_every:
        return selected_model(folder, step, record)
    structure: Structure[Model] = Structure(lambda rngs: classifier_of(record.model, rngs=rngs))
    return models.load(folder, step, structure)


def selected_model(folder: Path, step: int, record: Record) -> Model:
    """Return the selected network from a checkpoint verified by `runs.read`."""
    model, shape = record.model, shape_of(record.model)
    nothing = np.zeros((2, math.prod(shape)), np.float32)  # takes no step
    kind: Any = np.float32 if is_regression(model) else np.int32
    samples = Samples(nothing, np.zeros(2, kind), shape, "nothing")
    thresholds = None
    if model.n_thresholds:
        n_rows = feature_columns(model, samples).shape[1]
        thresholds = np.zeros((n_rows, model.n_thresholds), np.float32)
    run = Run(model, record.training, samples, thresholds)
    state = run.selected(models.restore(folder, step, run))
    return run.structure.model(*meshes.copy_to_local((state.params, state.others)))


load_model = models.Loader(Record, _classifier)
"""Loader for a run's classifier and record; see `lutjax.training.models.Loader`."""
