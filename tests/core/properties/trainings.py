"""Training steps of tables as data: drawn, run with gradients in factors, and compared with the definitions row by row."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax

import lutjax
from lutjax.testing import assert_close
from lutjax.training import tables
from properties import definitions
from properties.calls import OPS, Call, define
from properties.drawn_calls import kinds
from properties.members import SIZES, Arrays, Source

LOOK_UPS = ("lut", "sparse_lut", "lut_attention", "lut_pair_attention")
RATE, BATCH = 0.25, 4
NOT_TRAINED = ("keys", "starts", "accumulate", "groups", "shared_input")
RULES = (
    tables.SGD(),
    tables.SGD(weight_decay=0.5),
    tables.RowAdagrad(),
    tables.RowAdagrad(weight_decay=0.25),
    tables.RowMomentum(momentum=0.5),
    tables.RowMomentum(weight_decay=0.5),
    tables.RowAdam(),
    tables.RowAdam(b1=0.5, weight_decay=0.25),
)
# Losses are float32; outputs of 16-bit tables and their cotangents are rounded.
TOLERANCE = {"float64": 2e-5, "float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-9}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a model, and how it is looked up.

    Attributes:
      op: one of `LOOK_UPS`. dtype: of the table.
      options: of the op, as those of a `Call`.
      factor: of `lutjax.scale_gradient` on the way to it. rate: factor of its learning rate.
      dense: whether it is left out of the tables, and trained by its normalized dense gradient.
    """

    op: str
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    factor: float | None = None
    rate: float = 1.0
    dense: bool = False


@dataclasses.dataclass(frozen=True)
class Training:
    """Some steps of a model: the sum of its tables' outputs and a bias is to be near a target.

    Attributes:
      parts: into how many the batch is divided.
      donate: whether the step owns its parameters and state.
    """

    tables: tuple[Table, ...]
    rule: tables.RowRule
    size: str = "a"
    parts: int = 1
    donate: bool = True
    steps: int = 2
    seed: int = 0

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE[t.dtype] for t in self.tables)

    @property
    def x64(self) -> bool:
        return any(t.dtype == "float64" for t in self.tables)

    def is_table(self, name: str, array: Any) -> bool:
        place, _, leaf = name.partition("/")
        return leaf == "weights" and not self.tables[int(place[1:])].dense

    @property
    def optimizer(self) -> tables.Optimizer:
        names = {f"t{i}/weights": t for i, t in enumerate(self.tables) if not t.dense}
        return tables.Optimizer(
            self.rule,
            RATE,
            rest=optax.chain(tables.normalized(), optax.sgd(RATE)) if self.normalizes else None,
            rates={name: t.rate for name, t in names.items() if t.rate != 1},
            tables=self.is_table,
        )

    @property
    def normalizes(self) -> bool:
        return any(t.dense for t in self.tables)


@st.composite
def trainings(draw: Any) -> Training:
    drawn = []
    dtypes = draw(st.sampled_from((("float32",), ("float32", "bfloat16", "float16"), ("float64", "float32"))))
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        kind = draw(kinds(draw(st.sampled_from(LOOK_UPS))))
        drawn.append(
            Table(
                kind.op,
                dtype=draw(st.sampled_from(dtypes)),
                options={n: v for n, v in kind.options.items() if n not in NOT_TRAINED},
                factor=draw(st.sampled_from((None, None, 0.5))),
                rate=draw(st.sampled_from((1.0, 0.5))),
                dense=draw(st.sampled_from((False, False, False, True))),
            )
        )
    return Training(
        tuple(drawn),
        rule=draw(st.sampled_from(RULES)),
        size=draw(st.sampled_from(tuple(SIZES))),
        parts=draw(st.sampled_from((1, 1, 2, 4))),
        donate=draw(st.booleans()),
        seed=draw(st.integers(0, 2)),
    )


# ------------------------------------------------------------------------------------- the model
def call_of(training: Training, i: int) -> Call:
    """The look-up of a table as a call."""
    t = training.tables[i]
    return Call(t.op, size=training.size, dtype=t.dtype, options=t.options)


def arrays_of(training: Training) -> tuple[Arrays, Arrays, list[Arrays]]:
    """Parameters, one batch, and for each table the arguments that are neither."""
    z = {**SIZES[training.size], "batch": BATCH}
    shape = (BATCH, z["length"])
    source = Source("float32", "training", training.seed)
    batch: Arrays = {
        "x": source.grid(*shape, z["inputs"], steps=40),
        "target": source.grid(*shape, z["outputs"]),
    }
    params: Arrays = {"bias": source.grid(z["outputs"])}
    fixed = []
    for i, t in enumerate(training.tables):
        a = OPS[t.op].arrays(Source(t.dtype, "table", i, training.seed), z, t.options)
        params[f"t{i}"] = {n: a[n] for n in ("weights", "positions") if n in a}
        if "segments" in a:
            batch[f"t{i}"] = a["segments"]
        fixed.append({n: a[n] for n in a if n not in ("x", "weights", "positions", "segments")})
    return params, batch, fixed


def _arguments(i: int, params: Any, batch: Any, fixed: list[Arrays]) -> Arrays:
    segments = {"segments": batch[f"t{i}"]} if f"t{i}" in batch else {}
    return {**fixed[i], **params[f"t{i}"], **segments, "x": batch["x"]}


def loss_of(training: Training, fixed: list[Arrays]) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        total = params["bias"][None, None] - batch["target"]
        for i, t in enumerate(training.tables):
            a = _arguments(i, params, batch, fixed)
            if t.factor is not None:
                a["weights"] = lutjax.scale_gradient(a["weights"], t.factor)
            options = {**t.options, "sizes": SIZES[training.size]}
            total = total + OPS[t.op].call(lutjax, a, options)["y"].astype(jnp.float32)
        return jnp.mean(jnp.sum(total**2, (1, 2))) / 2

    return loss


# ------------------------------------------------------------------------------------- what is right
def expected_gradients(
    training: Training, params: Any, batch: Arrays, fixed: list[Arrays]
) -> tuple[float, Any]:
    """The loss and its dense gradients."""
    found = [
        define(call_of(training, i), _arguments(i, params, batch, fixed)) for i in range(len(training.tables))
    ]
    error = params["bias"].astype(float) - batch["target"] + sum(y["y"].astype(np.float32) for y, _ in found)
    dy = error / BATCH
    gradients: Arrays = {"bias": dy.sum((0, 1))}
    for i, (t, (_, pull)) in enumerate(zip(training.tables, found, strict=True)):
        of = pull(dy.astype(t.dtype))
        gradients[f"t{i}"] = {n: of[n] for n in params[f"t{i}"]}
        gradients[f"t{i}"]["weights"] = of["weights"] * (1 if t.factor is None else t.factor)
    return float(np.sum(error**2) / BATCH / 2), gradients


def touched_rows(training: Training, i: int, params: Any, batch: Arrays, fixed: list[Arrays]) -> np.ndarray:
    """Return a mask of the rows that a batch looks up, bool ``[T, R]``."""
    t, a = training.tables[i], _arguments(i, params, batch, fixed)
    if "sparse" in t.op or t.op == "lut":
        d = definitions.detect(a["x"], a["anchors"], t.options.get("epsilon", 0.0))
        return definitions.touched_by_lookup(a["weights"].shape[1], d)
    # A row receives the cotangent of each pair that looks it up.
    _, pull = define(call_of(training, i), a)
    received = pull(np.ones((*a["x"].shape[:2], SIZES[training.size]["outputs"]), np.float64))["weights"]
    return np.any(received > 0, -1)


def expected_step(training: Training, params: Any, gradients: Any, touched: Any, state: Any) -> Any:
    """Parameters and states of rows after a step, with these gradients."""
    rule = training.rule
    hyper = {f.name: getattr(rule, f.name) for f in dataclasses.fields(rule) if f.name != "decay"}
    moved: Arrays = {"bias": _moved_rest(training, params["bias"], gradients["bias"])}
    rows: Arrays = {}
    for i, t in enumerate(training.tables):
        moved[f"t{i}"] = {
            n: _moved_rest(training, p, gradients[f"t{i}"][n]) for n, p in params[f"t{i}"].items()
        }
        if not t.dense:
            name = f"t{i}/weights"
            moved[f"t{i}"]["weights"], rows[name] = definitions.updated(
                params[f"t{i}"]["weights"],
                gradients[f"t{i}"]["weights"],
                touched[i],
                RATE * t.rate,
                type(rule).__name__,
                state[name],
                **hyper,
            )
    return moved, rows


def _moved_rest(training: Training, p: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    largest = np.max(np.abs(gradient), initial=1e-16) if training.normalizes else 1
    return p.astype(float) - RATE * gradient / largest


# ------------------------------------------------------------------------------------- comparison
def compare(what: str, actual: Any, expected: Any, tolerance: float) -> None:
    """Each array with what it should be, up to rounding: relative to the largest magnitude."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
    assert structure == jax.tree.structure(actual), what
    for (path, e), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        a = np.asarray(a)
        name = f"{what}: {jax.tree_util.keystr(path)}"
        assert_close(name, a, np.asarray(e).astype(a.dtype), tolerance)


def check(training: Training) -> None:
    """Runs the steps, and compares gradients, tables and states of rows after each with the definitions."""
    with jax.enable_x64(True) if training.x64 else contextlib.nullcontext():
        params, batch, fixed = arrays_of(training)
        loss, optimizer = loss_of(training, fixed), training.optimizer
        value_and_grad = tables.value_and_grad(loss, tables=training.is_table)
        if training.parts > 1:
            value_and_grad = tables.microbatched(value_and_grad, training.parts)

        @functools.partial(jax.jit, donate_argnums=(0, 1) if training.donate else ())
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, gradients = value_and_grad(params, batch)
            of_dense = jax.grad(loss)(params, batch)
            return value, dense(gradients), of_dense, optimizer.apply(params, gradients, state)

        given = jax.tree.map(jnp.asarray, params)
        state = optimizer.init(given)
        for number in range(training.steps):
            before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, (given, state.rows)))
            if number:  # the same rows, and others
                batch = {**batch, "x": np.roll(batch["x"], number, -1)}
            value, gradients = expected_gradients(training, before[0], batch, fixed)
            touched = [
                touched_rows(training, i, before[0], batch, fixed) for i in range(len(training.tables))
            ]
            after = expected_step(training, before[0], gradients, touched, before[1])
            old = jax.tree.leaves((given, state.rows))
            actual, of_factors, of_dense, (given, state) = step(given, state, batch)
            what, tolerance = f"{training}, step {number}", training.tolerance
            compare(f"{what}: loss", actual, np.float32(value), tolerance)
            compare(f"{what}: jax.grad", of_dense, gradients, tolerance)
            compare(f"{what}: factored", of_factors, gradients, tolerance)
            # Copies are compared: jaxlib 0.11.2 copies a donated array that NumPy has seen, and does not delete it.
            now = jax.tree.map(jnp.copy, (given, state.rows))
            compare(f"{what}: after", now, after, tolerance)
            for i, t in enumerate(training.tables):
                if not t.dense:
                    untouched_stay(f"{what}: table {i}", i, touched[i], before, now)
            assert all(a.is_deleted() for a in old) or not training.donate, what
            assert int(state.step) == number + 1


def untouched_stay(what: str, i: int, touched: np.ndarray, before: Any, after: Any) -> None:
    """Rows that were not looked up, and their states, are the same bit for bit."""
    for old, new in zip(
        (before[0][f"t{i}"]["weights"], *before[1][f"t{i}/weights"].values()),
        (after[0][f"t{i}"]["weights"], *after[1][f"t{i}/weights"].values()),
        strict=True,
    ):
        np.testing.assert_array_equal(
            np.asarray(old)[~touched], np.asarray(new)[~touched], err_msg=f"{what}: rows not touched"
        )


def dense(gradients: Any) -> Any:
    """Gradients as arrays."""
    is_factored = lambda g: isinstance(g, tables.TableGradient)  # noqa: E731
    return jax.tree.map(lambda g: g.to_dense() if is_factored(g) else g, gradients, is_leaf=is_factored)
