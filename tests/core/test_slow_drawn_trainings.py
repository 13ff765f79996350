"""Sparse table gradients and updates, compared with dense reference gradients and the step definition."""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from definitions import definition, run
from hypothesis import given, settings

import lutjax
from lutjax import optim as tables
from lutjax.testing import assert_close

Arrays = dict[str, Any]
# test_training_tables.py has fast sizes of gradients and updates.
OPS = ("lut", "sparse_lut", "lut_attention", "lut_pair_attention")
RATE, BATCH, LENGTH, INPUTS, OUTPUTS = 0.25, 4, 3, 4, 3
RULES = (
    tables.SGD(),
    tables.SGD(weight_decay=0.5),
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
    """A model table.

    Attributes:
      op: its lookup op. factor: its `lutjax.scale_gradient` factor. rate: its learning-rate factor.
      dense: not a table for the optimizer; trained by its normalized dense gradient.
    """

    op: str
    dtype: str = "float32"
    factor: float | None = None
    rate: float = 1.0
    dense: bool = False


@dataclasses.dataclass(frozen=True)
class Training:
    """Training steps for a model: the sum over its table outputs approaches a target.

    Attributes:
      parts: microbatches. donate: the step owns its parameters and state.
    """

    tables: tuple[Table, ...]
    rule: tables.RowRule
    parts: int = 1
    donate: bool = True
    seed: int = 0

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE[t.dtype] for t in self.tables)

    def is_table(self, name: str, array: Any) -> bool:
        place, _, leaf = name.partition("/")
        return leaf == "weights" and not self.tables[int(place[1:])].dense

    @property
    def optimizer(self) -> tables.Optimizer:
        normalizes = any(t.dense for t in self.tables)
        return tables.Optimizer(
            self.rule,
            RATE,
            rest=optax.chain(tables.normalized(), optax.sgd(RATE))
            if normalizes
            else optax.sgd(RATE),
            rates={
                f"t{i}/weights": t.rate
                for i, t in enumerate(self.tables)
                if t.rate != 1 and not t.dense
            },
            tables=self.is_table,
        )


@st.composite
def trainings(draw: Any) -> Training:
    dtypes = draw(
        st.sampled_from((("float32",), ("float32", "bfloat16", "float16"), ("float64", "float32")))
    )
    table = st.builds(
        Table,
        st.sampled_from(OPS),
        st.sampled_from(dtypes),
        st.sampled_from((None, None, 0.5)),
        st.sampled_from((1.0, 0.5)),
        st.sampled_from((False, False, False, True)),
    )
    drawn = draw(st.lists(table, min_size=1, max_size=2).map(tuple))
    parts = draw(st.sampled_from((1, 1, 2, 4)))
    return Training(
        drawn, draw(st.sampled_from(RULES)), parts, draw(st.booleans()), draw(st.integers(0, 2))
    )


# ------------------------------------------------------------------------------------- the model
def arrays_of(training: Training) -> tuple[Arrays, Arrays, list[Arrays]]:
    """Return parameters, a batch, and each table's ids."""
    rng = np.random.default_rng([training.seed, 1])
    grid = lambda *shape: (rng.integers(-8, 9, shape) / 4).astype(np.float32)  # noqa: E731
    batch = {"x": 5 * grid(BATCH, LENGTH, INPUTS), "target": grid(BATCH, LENGTH, OUTPUTS)}
    params, fixed = {}, []
    for i, t in enumerate(training.tables):
        n_values = 2 * INPUTS + 1 if t.op == "lut_pair_attention" else INPUTS
        a = rng.integers(0, n_values, (2, 2))
        ids = {
            "anchors": np.stack(
                [a, (a + rng.integers(1, n_values, a.shape)) % n_values], -1
            ).astype(np.int32)
        }
        n_rows, n_slots = (
            2**5 if t.op == "lut_attention" else 4,
            2 if t.op == "sparse_lut" else OUTPUTS,
        )
        params[f"t{i}"] = {"weights": grid(2, n_rows, n_slots).astype(t.dtype)}
        if t.op == "sparse_lut":
            ids["targets"] = rng.integers(-1, OUTPUTS, (2, 4, 2)).astype(np.int32)
        elif t.op != "lut":
            params[f"t{i}"]["positions"] = grid(LENGTH, 2, 1)
        fixed.append(ids)
    return params, batch, fixed


def look_up(module: Any, op: str, params: Arrays, ids: Arrays, x: Any) -> jax.Array:
    reached = {"n_outputs": OUTPUTS} if op == "sparse_lut" else {}
    y: jax.Array = getattr(module, op)(x, **params, **ids, **reached)
    return y


def loss_of(training: Training, fixed: list[Arrays], module: Any = lutjax) -> Any:
    def loss(params: Any, batch: Any) -> jax.Array:
        total = -batch["target"]
        for i, t in enumerate(training.tables):
            own = dict(params[f"t{i}"])
            if t.factor is not None:
                own["weights"] = module.scale_gradient(own["weights"], t.factor)
            total = total + look_up(module, t.op, own, fixed[i], batch["x"]).astype(jnp.float32)
        return jnp.mean(jnp.sum(total**2, (1, 2))) / 2

    return loss


def accessed_rows(t: Table, params: Arrays, ids: Arrays, x: Any) -> np.ndarray:
    """Return a mask of the rows read by a batch, ``[T, R, 1]``: a cotangent with all ones reaches them; unused slots read rows, too."""
    op = "lut" if t.op == "sparse_lut" else t.op
    others = {n: a for n, a in ids.items() if n != "targets"}

    def read(weights: jax.Array) -> jax.Array:
        return jnp.sum(look_up(lutjax.reference, op, {**params, "weights": weights}, others, x))

    gradient = jax.grad(read)(jnp.ones(params["weights"].shape, jnp.float32))
    return np.any(np.asarray(gradient) > 0, -1, keepdims=True)


def expected_step(
    training: Training, params: Arrays, gradients: Arrays, touched: list[Any], rows: Arrays
) -> Any:
    """Return parameters and row states after a step, by the `lutjax.update_table` definition."""
    normalizes = any(t.dense for t in training.tables)

    def step(p: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        largest = np.max(np.abs(gradient), initial=1e-16) if normalizes else 1
        return (p.astype(float) - RATE * np.asarray(gradient, float) / largest).astype(p.dtype)

    new, states = {}, {}
    for i, t in enumerate(training.tables):
        name = f"t{i}/weights"
        new[f"t{i}"] = {n: step(p, gradients[f"t{i}"][n]) for n, p in params[f"t{i}"].items()}
        if t.dense:
            continue
        weights = params[f"t{i}"]["weights"].astype(np.float32 if t.dtype != "float64" else t.dtype)
        gradient = np.asarray(gradients[f"t{i}"]["weights"]).astype(weights.dtype)
        given = {
            "rate": jnp.asarray(RATE * t.rate, weights.dtype),
            "rates": None,
            "rule": training.rule,
        }
        given |= {"gradient": _Dense(jnp.asarray(gradient)), "weights": jnp.asarray(weights)}
        given |= {"state": jax.tree.map(jnp.asarray, rows[name]), "touched": touched[i]}
        result = run(definition(lutjax.update_table), given)
        new[f"t{i}"]["weights"], states[name] = (
            result["new_weights"].astype(t.dtype),
            result["new_state"],
        )
    return new, states


@dataclasses.dataclass
class _Dense:
    """A gradient in the form used by the `lutjax.update_table` definition."""

    gradient: Any

    def to_dense(self) -> Any:
        return self.gradient


# ------------------------------------------------------------------------------------- comparison
def compare(what: str, actual: Any, expected: Any, tolerance: float) -> None:
    leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
    assert structure == jax.tree.structure(actual), what
    for (path, e), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        a = np.asarray(a)
        assert_close(
            f"{what}: {jax.tree_util.keystr(path)}", a, np.asarray(e).astype(a.dtype), tolerance
        )


def dense(gradients: Any) -> Any:
    is_factored = lambda g: isinstance(g, tables.TableGradient)  # noqa: E731
    return jax.tree.map(
        lambda g: g.to_dense() if is_factored(g) else g, gradients, is_leaf=is_factored
    )


def check(training: Training, factored: bool = True) -> None:
    """Run two steps, and compare gradients, tables and row states after each."""
    is_wide = any(t.dtype == "float64" for t in training.tables)
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        params, batch, fixed = arrays_of(training)
        loss, optimizer = loss_of(training, fixed), training.optimizer
        value_and_grad = (
            tables.value_and_grad(loss, tables=training.is_table)
            if factored
            else jax.value_and_grad(loss)
        )
        if training.parts > 1:
            value_and_grad = tables.microbatched(value_and_grad, training.parts)

        @functools.partial(jax.jit, donate_argnums=(0, 1) if training.donate else ())
        def step(params: Any, state: Any, batch: Any) -> Any:
            value, gradients = value_and_grad(params, batch)
            return value, dense(gradients), optimizer.apply(params, gradients, state)

        expected = jax.jit(jax.value_and_grad(loss_of(training, fixed, lutjax.reference)))
        owned = jax.tree.map(jnp.asarray, params)
        state = optimizer.init(owned)
        for number in range(2):
            before = jax.tree.map(np.asarray, jax.tree.map(jnp.copy, (owned, state.rows)))
            batch = {
                **batch,
                "x": np.roll(batch["x"], number, -1),
            }  # some of the same rows, and others
            value, gradients = expected(before[0], batch)
            touched = [
                accessed_rows(t, before[0][f"t{i}"], fixed[i], batch["x"]) if factored
                else np.any(np.asarray(gradients[f"t{i}"]["weights"]) != 0, -1, keepdims=True)
                for i, t in enumerate(training.tables)
            ]  # fmt: skip
            after = expected_step(training, before[0], gradients, touched, before[1])
            old = jax.tree.leaves((owned, state.rows))
            actual, found, (owned, state) = step(owned, state, batch)
            what, tolerance = f"{training}, step {number}", training.tolerance
            compare(f"{what}: loss", actual, np.float32(value), tolerance)
            compare(f"{what}: gradients", found, gradients, tolerance)
            now = jax.tree.map(
                jnp.copy, (owned, state.rows)
            )  # NumPy must not keep a view of a donated array
            compare(f"{what}: after", now, after, tolerance)
            for i, t in enumerate(training.tables):
                if not t.dense:
                    a, b = before[0][f"t{i}"]["weights"], np.asarray(now[0][f"t{i}"]["weights"])
                    rest = ~touched[i][..., 0]
                    np.testing.assert_array_equal(
                        a[rest], b[rest], err_msg=f"{what}: other rows of table {i}"
                    )
            assert all(a.is_deleted() for a in old) or not training.donate, what
            assert int(state.step) == number + 1


def test_a_table_of_16_bits():
    check(Training((Table("sparse_lut", dtype="bfloat16"),), tables.SGD(), donate=False))


def test_a_step_by_dense_gradients():
    check(Training((Table("lut"),), tables.RowMomentum(momentum=0.5)), factored=False)


# ------------------------------------------------------------------------------------- uses of a table
def _look_up(op: str) -> tuple[Any, Any, jax.Array]:
    """Return an op as a function of its table and inputs, a table, and inputs; outputs can be inputs again."""
    training = Training((Table(op),), tables.SGD())
    params, batch, fixed = arrays_of(training)
    rng = np.random.default_rng(2)
    own = {n: jnp.asarray(a) for n, a in params["t0"].items()}
    own["weights"] = jnp.asarray(
        rng.integers(-8, 9, (*own["weights"].shape[:2], INPUTS)) / 4, jnp.float32
    )
    if op == "sparse_lut":
        fixed[0]["targets"] = rng.integers(-1, INPUTS, own["weights"].shape).astype(np.int32)

    def look_up(weights: Any, x: Any) -> jax.Array:
        reached = {"n_outputs": INPUTS} if op == "sparse_lut" else {}
        return getattr(lutjax, op)(x, **{**own, "weights": weights}, **fixed[0], **reached)

    return look_up, own["weights"], jnp.asarray(batch["x"])


def _scan(f: Any, x: Any) -> Any:
    return jnp.sum(
        jax.lax.scan(lambda total, x: (total + f(x), None), jnp.zeros_like(f(x[0])), x)[0]
    )


USES: dict[str, Any] = {
    "once": lambda f, w, v, x: jnp.sum(f(w, x) ** 2),
    "two tables": lambda f, w, v, x: jnp.sum(f(w, x) * f(v, x + 1)),
    "one layer after another": lambda f, w, v, x: jnp.sum(f(v, x + f(w, x)) ** 2),
    "twice": lambda f, w, v, x: jnp.sum(f(w, x) * f(w, x + 1)),
    "a layer after itself": lambda f, w, v, x: jnp.sum(f(w, x + f(w, x)) ** 2),
    "scan over the batch": lambda f, w, v, x: _scan(lambda x: f(w, x) ** 2, x),
    "scan over layers": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda x, w: (x + f(w, x), None), x, jnp.stack([w, v]))[0] ** 2
    ),
    "scan that carries it": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda c, x: (c, f(c, x) ** 2), w, x[None])[1]
    ),
    "loop": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda x, _: (x + f(w, x), None), x, None, length=2)[0] ** 2
    ),
    "cond": lambda f, w, v, x: jnp.sum(
        jax.lax.cond(x[0, 0, 0] > 0, lambda: f(w, x), lambda: f(w, -x)) ** 2
    ),
    "cond of it": lambda f, w, v, x: jnp.sum(
        jax.lax.cond(x[0, 0, 0] > 0, f, lambda w, x: f(w, -x), w, x)
    ),
    "vmap": lambda f, w, v, x: jnp.sum(jax.vmap(lambda x: f(w, x))(x) ** 2),
    "vmap of it": lambda f, w, v, x: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([w, v]), x) ** 2),
    "checkpoint": lambda f, w, v, x: jnp.sum(jax.checkpoint(lambda x: f(w, x))(x) ** 2),
    "checkpoint of it": lambda f, w, v, x: jnp.sum(jax.checkpoint(f)(w, x) ** 2),
    "jit": lambda f, w, v, x: jnp.sum(jax.jit(lambda x: f(w, x))(x) ** 2),
    "jit of it": lambda f, w, v, x: jnp.sum(jax.jit(f)(w, x) ** 2),
    "penalty": lambda f, w, v, x: jnp.sum(f(w, x) ** 2) + jnp.sum(w**2),
    "stopped penalty": lambda f, w, v, x: (
        jnp.sum(f(w, x) ** 2) + jnp.sum(jax.lax.stop_gradient(w) ** 2)
    ),
    "twice, stopped once": lambda f, w, v, x: jnp.sum(f(w, x) * f(jax.lax.stop_gradient(w), x + 1)),
    "half of its inputs": lambda f, w, v, x: jnp.sum(f(w, jax.lax.stop_gradient(x)[:2]) ** 2),
    "scaled": lambda f, w, v, x: jnp.sum(f(lutjax.scale_gradient(w, 0.5), x) ** 2),
    "scaled twice": lambda f, w, v, x: jnp.sum(
        f(lutjax.scale_gradient(lutjax.scale_gradient(w, 0.5), x[0, 0, 0]), x) ** 2
    ),
    "multiplied": lambda f, w, v, x: jnp.sum(f(2 * w, x) ** 2),
    "swapped": lambda f, w, v, x: jnp.sum(jnp.where(x[0, 0, 0] > 0, f(w, x), f(v, x)) ** 2),
    "an inner gradient": lambda f, w, v, x: jnp.sum(
        jax.grad(lambda x: jnp.sum(f(w, x) ** 2))(x) * x
    ),
    "an inner value": lambda f, w, v, x: jax.value_and_grad(lambda x: jnp.sum(f(w, x) ** 2))(x)[0],
    "not at all": lambda f, w, v, x: jnp.sum(f(v, x) ** 2),
}


@pytest.mark.parametrize(
    ("use", "jitted"),
    list(itertools.product(USES, (True, False))),
)
def test_a_table_has_the_right_gradient_or_none(use, jitted):
    for op in ("lut",) if jitted else OPS:
        look_up, weights, x = _look_up(op)
        params = {"w": {"weights": weights}, "v": {"weights": weights + 0.25}, "x": x}

        def loss(params: Any, look_up: Any = look_up) -> jax.Array:
            return USES[use](look_up, params["w"]["weights"], params["v"]["weights"], params["x"])

        for chosen in ("w", "v", "wv"):
            value_and_grad = tables.value_and_grad(
                loss, tables=lambda name, a, chosen=chosen: name[0] in chosen
            )

            def run(params: Any, value_and_grad: Any = value_and_grad) -> Any:
                value, gradients = value_and_grad(params)
                return value, dense(gradients)

            try:
                actual = (jax.jit(run) if jitted else run)(params)
            except tables.TableUseError:
                continue
            compare(f"{use}, {op}, {chosen}", actual, jax.value_and_grad(loss)(params), 2e-5)


RIGHT = {
    "once": ("w",),
    "two tables": ("w", "v", "wv"),
    "one layer after another": ("w", "v", "wv"),
    "scaled": ("w",),
    "scaled twice": ("w",),
    "half of its inputs": ("w",),
    "stopped penalty": ("w",),
}


@pytest.mark.parametrize("use", RIGHT)
def test_uses_that_have_a_factored_gradient(use):
    look_up, weights, x = _look_up("lut")
    for chosen in RIGHT[use]:
        value_and_grad = tables.value_and_grad(
            lambda p: USES[use](look_up, p["w"], p["v"], x),
            tables=lambda name, a, chosen=chosen: name in chosen,
        )
        _, gradients = jax.eval_shape(value_and_grad, {"w": weights, "v": weights})
        assert [isinstance(gradients[name], tables.TableGradient) for name in chosen] == [
            True
        ] * len(chosen)


def test_one_array_under_two_names():
    look_up, weights, x = _look_up("lut")
    params = {"w": {"weights": weights}, "v": {"weights": weights}}

    def loss(params: Any) -> jax.Array:
        return jnp.sum(look_up(params["w"]["weights"], x) * look_up(params["v"]["weights"], x + 1))

    value, gradients = jax.jit(tables.value_and_grad(loss))(params)
    compare("one array", (value, dense(gradients)), jax.value_and_grad(loss)(params), 2e-5)


class TestSlow:
    @settings(settings.get_profile("quick"), max_examples=40)
    @given(trainings(), st.sampled_from((True, True, True, False)))
    def test_steps(self, training, factored):
        check(training, factored)

    def test_a_step_of_microbatches_and_rates(self):
        check(
            Training(
                (Table("lut", rate=0.5), Table("lut", factor=0.5, dense=True)), RULES[-1], parts=2
            )
        )
