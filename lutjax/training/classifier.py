"""Training of a `LogicClassifier`: its config and its step; the loop itself is `lutjax.training.loop`."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32, Num

import lutjax
from lutjax._extras import needed_by
from lutjax._typing import Array
from lutjax.models import LogicClassifier, LogicClassifierConfig
from lutjax.training import meshes, models, optimizers, runs
from lutjax.training.augment import warp
from lutjax.training.configs import Training
from lutjax.training.models import ModelRun, State, Structure
from lutjax.training.samples import Samples

with needed_by(__name__):
    import optax
    from flax import nnx


THRESHOLDS = ("uniform", "gaussian", "distributive")

AT_ONCE = 2048
"""Samples that are tested together at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the samples.

    Attributes:
      batch_size: samples of one step.
      learning_rate: of Adam, before the cool-down.
      cooldown: fraction of the steps, at the end, over which the rate falls linearly to 0.
      thresholds: where numbers become bits, by what the training part holds: uniform, gaussian or distributive; see
        lutjax.thermometer_thresholds.
      augment: how strongly images are moved, turned and stretched at random in each step: with 1 up to half a
        pixel, 0.15 radians and 10 %; 0 not at all. Samples that are no images stay as they are.
      gate_cost: what 1000 gates of the circuit add to the loss, in nats: as many as are expected to need two inputs, and a
        vote that is not constant counts as one. Circuits become smaller, and at some cost less accurate; see
        docs/circuits.md.
      column_bits: bits that a column of numbers of a table becomes at most, at quantiles of the training part; 0 leaves it a
        number, which n_thresholds makes bits of. Other data have no columns.
      split: which random fifth of the samples is the test part, where they have none of their own.
      stratified: whether each class has its share in that fifth.
      seed: of the model, the order of samples and all noise.
    """

    steps: int = 15000
    batch_size: int = 100
    cooldown: float = 0.5
    thresholds: str = "uniform"
    augment: float | int = 1.0
    gate_cost: float | int = 0.0
    column_bits: int = 8
    split: int = 0
    stratified: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fractions("cooldown")
        self.check_least(column_bits=0)
        self.check_seeds("split")
        if self.thresholds not in THRESHOLDS:
            raise ValueError(f"thresholds is {self.thresholds!r}; expected one of {THRESHOLDS}.")
        if not 0 <= self.augment < float("inf"):
            raise ValueError(f"augment is {self.augment}; it must not be negative.")
        if not 0 <= self.gate_cost < float("inf"):
            raise ValueError(f"gate_cost is {self.gate_cost}; it must not be negative.")

    def rate(self) -> optax.Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled(cooldown=self.cooldown)


class Run(ModelRun[LogicClassifier]):
    """A classifier and how it is trained, without the arrays that training changes.

    Args:
      model: sizes of the model.
      training: everything else that decides the run.
      train: what to train on.

    Raises:
      ValueError: samples are not of the size of the model, or have more classes.
    """

    def __init__(self, model: LogicClassifierConfig, training: TrainingConfig, train: Samples):
        if train.x.shape[1] != model.in_features or train.n_classes > model.n_classes:
            raise ValueError(
                f"samples have {train.x.shape[1]} numbers and {train.n_classes} classes, but in_features is "
                f"{model.in_features} and n_classes is {model.n_classes}."
            )
        self.config, self.training = model, training
        thresholds = None
        if model.n_thresholds:
            thresholds = lutjax.thermometer_thresholds(
                jnp.asarray(train.x), model.n_thresholds, method=training.thresholds
            )
        self._optimizer = optimizers.optimizer("adam", training.rate())
        structure = Structure(lambda rngs: LogicClassifier(model, thresholds=thresholds, rngs=rngs))
        super().__init__(structure, self._optimizer.init, training.seed, training.batch_size)
        self._image = train.shape if len(train.shape) > 1 and training.augment else None
        self._train = train
        self._place(None)

    def _place(self, mesh: Mesh | None) -> None:
        self.advance = self._repeated(self.step, (self._train.x, self._train.y))
        where: dict[str, Any] = {} if mesh is None else {"out_shardings": meshes.everywhere(mesh)}
        self._classes = jax.jit(self._classes_of, static_argnames="hard", **where)

    def step(self, state: State, number: Array, data: tuple[Array, Array]) -> tuple[State, Array]:
        """Return the state after one step, and the loss of its batch. See `lutjax.training.loop.Step`."""
        key = jax.random.fold_in(jax.random.key(self.training.seed), number)
        choice_key, image_key, gate_key = jax.random.split(key, 3)
        x, y = data
        chosen = jax.random.randint(choice_key, (self.training.batch_size,), 0, len(x))
        x, y = meshes.by_sample((x[chosen].astype(jnp.float32), y[chosen]), self.mesh)
        if self._image is not None:
            x = warp(image_key, x.reshape(-1, *self._image), self.training.augment).reshape(x.shape)

        def loss_of(params: Any) -> Array:
            model = self.structure.model(params, state.others)
            logits = model(x, deterministic=False, rngs=nnx.Rngs(gates=gate_key))
            loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))
            if self.training.gate_cost:
                loss += expected_gates(model) * (self.training.gate_cost / 1000)
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes the number of steps implicitly
            updates, optimizer = self._optimizer.update(gradients, state.optimizer)
        return State(optax.apply_updates(state.params, updates), state.others, optimizer), loss

    def classes(
        self, state: State, x: Num[np.ndarray, "samples features"], *, hard: bool
    ) -> Int32[np.ndarray, " samples"]:
        """Return the classes that the soft or the hard network gives samples."""
        size = -(-len(x) // -(-len(x) // AT_ONCE))  # about equal parts: one or two programs
        found = [
            np.asarray(self._classes(state.params, state.others, x[first : first + size], hard=hard))
            for first in range(0, len(x), size)
        ]
        return np.concatenate(found)

    def accuracy(self, state: State, part: Samples, *, hard: bool) -> float:
        """Share of the samples whose class is right."""
        return float((self.classes(state, part.x, hard=hard) == part.y).mean())

    def _classes_of(self, params: Any, others: Any, x: Array, *, hard: bool) -> Array:
        model = self.structure.model(params, others)
        x = meshes.by_sample(x.astype(jnp.float32), self.mesh)
        rngs = nnx.Rngs(gates=self.training.seed)
        return model(x, deterministic=hard, rngs=rngs).argmax(-1).astype(jnp.int32)


def expected_gates(model: LogicClassifier) -> Array:
    """Return how many gates of two inputs the circuit of a classifier is expected to need: a scalar.

    A table that needs n inputs counts as ``n - 1`` gates, and a vote that is not constant as one. Gates that nothing reads
    count too; they become constants without changing a vote.
    """
    gates = []
    for layer in model.layers:
        inputs, any_input = layer.expected_needs()
        gates.append((inputs - any_input).sum())
    gates.append(any_input.sum())
    return jnp.stack(gates).astype(jnp.float32).sum()


def baselines(train: Samples, test: Samples, training: TrainingConfig, n_thresholds: int) -> dict[str, float]:
    """Accuracy of logistic regression and of a random forest on the bits that the classifier sees.

    Source: docs/logic.md, section 6.
    """
    import warnings

    with needed_by("baselines"):
        from sklearn.ensemble import RandomForestClassifier
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression

    bits, test_bits = train.x, test.x
    if n_thresholds:
        thresholds = np.asarray(
            lutjax.thermometer_thresholds(jnp.asarray(train.x), n_thresholds, method=training.thresholds)
        )
        bits, test_bits = ((x[:, :, None] > thresholds).reshape(len(x), -1) for x in (train.x, test.x))
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name, model in (
            ("logistic regression", LogisticRegression(max_iter=1000)),
            ("random forest", RandomForestClassifier(300, random_state=training.seed)),
        ):
            found[name] = float(model.fit(bits, train.y).score(test_bits, test.y))
    return found


@dataclasses.dataclass
class Record(runs.Record):
    """Contents of a checkpoint apart from arrays.

    Attributes:
      model, training, samples: what decides the run.
      baselines: accuracies of others on the test part.
      options: options of the training program that may change, such as intervals.
      history: training losses, and accuracies of the hard and of the soft network on the test part.
      target, test: the column of labels of a table, and the table that is the test part, if they were given.
      recipe: the published network whose sizes and rates were taken, if one was.
    """

    kind: ClassVar[str] = "digits"

    model: LogicClassifierConfig
    training: TrainingConfig
    samples: runs.Source
    baselines: dict[str, float]
    options: dict[str, Any]
    history: runs.History
    target: str | None = None
    test: str | None = None
    recipe: str | None = None


def _classifier(folder: Path, step: int, record: Record) -> LogicClassifier:
    return models.load(folder, step, Structure(lambda rngs: LogicClassifier(record.model, rngs=rngs)))


load_model = models.Loader(Record, _classifier)
"""Loads the classifier of a run, and its record; see `lutjax.training.models.Loader`."""
