"""Language-model runs: steps, evaluation, checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow
from flax import nnx
from pytrees import equal
from small_runs import TEXT

from lutjax.models import LUTTransformerConfig
from lutjax.training import checkpoints, lm_runs, loop, models, optimizers, runs
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import bigram_loss

CONFIG = LUTTransformerConfig(
    features=8,
    context=8,
    n_layers=1,
    n_heads=1,
    n_detectors=4,
    n_anchors=2,
    n_position_bits=2,
    ffn_detectors=4,
    ffn_anchors=3,
)
TRAINING = TrainingConfig(steps=12, batch_size=4)


@pytest.fixture(scope="module")
def run():
    return Run(CONFIG, TRAINING, TEXT.train)


def record_of(run):
    return lm_runs.Record(
        model=run.config,
        training=run.training,
        text=runs.Source(None, TEXT.size, TEXT.digest),
        bigram=bigram_loss(TEXT.train, TEXT.test),
        options={},
        history=runs.History(train=[(4, 5.25)]),
    )


def test_training_lowers_the_loss_and_keeps_frozen_variables(run):
    before = run.init()
    others = jax.tree.map(np.asarray, before.others)
    loss = run.evaluate(before, TEXT.test)
    assert loss == pytest.approx(np.log(256))  # tables of zeros: all bytes alike
    after, _ = loop.run(run.advance, before, first=0, steps=12)
    assert run.evaluate(after, TEXT.test) < loss - 0.5
    assert equal(after.others, others)


@pytest.mark.slow
def test_chunks_change_nothing(run):
    one, _ = run.advance(run.init(), 0, 12)
    other = run.init()
    for first, count in ((0, 5), (5, 1), (6, 6)):
        other, _ = run.advance(other, first, count)
    assert equal(one, other)
    assert run.advance.programs == 1  # a state after steps is like the first one, so nothing is compiled anew


@pytest.mark.slow
def test_the_seed_decides(run):
    other = Run(CONFIG, dataclasses.replace(TRAINING, seed=1), TEXT.train)
    first, again, different = (float(r.advance(r.init(), 0, 3)[1]) for r in (run, run, other))
    assert first == again != different


@pytest.mark.slow
def test_sum_and_mean_loss_differ_by_a_factor_of_the_rate():
    states = []
    for loss, rate in (("mean", 0.5), ("sum", 0.5 / (4 * 8))):
        training = TrainingConfig(
            steps=3, batch_size=4, optimizer="sgd", cooldown=0.0, loss=loss, learning_rate=rate
        )
        run = Run(CONFIG, training, TEXT.train)
        state, value = run.advance(run.init(), 0, 3)
        assert value == pytest.approx(np.log(256), abs=0.2)  # reported as a mean either way
        states.append(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *states)


def losses_of(state, **options):
    """Return the losses of a few steps, one at a time. Without dropout, whose draws depend on the microbatches."""
    training = dataclasses.replace(TRAINING, cooldown=0.0, **options)
    run, losses = Run(dataclasses.replace(CONFIG, dropout=0.0), training, TEXT.train), []
    # Tables of zeros pass no gradient on, and only factored gradients count rows that were looked up for nothing.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + rng.normal(size=p.shape).astype(p.dtype) / 10, state.params)
    optimizer = jax.jit(run._optimizer.init)(params)
    state = State(params, jax.tree.map(jnp.copy, state.others), optimizer)
    for step in range(4):
        state, loss = run.advance(state, step, 1)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "table_optimizer",
    [
        slow(n)  # test_training_tables has their steps
        for n in optimizers.TABLE_OPTIMIZERS
    ],
)
def test_factored_and_dense_gradients_give_the_same_losses(run, table_optimizer):
    rate = 1.0 if table_optimizer == "sgd" else 0.05
    options = {"table_optimizer": table_optimizer, "table_weight_decay": 0.01, "learning_rate": rate}
    factored = losses_of(run.init(), **options, microbatches=2)
    dense = losses_of(run.init(), **options, table_gradient="dense")
    assert factored == pytest.approx(dense, rel=1e-5)
    assert abs(factored[-1] - factored[0]) > 0.01


@pytest.mark.parametrize("size", [slow(10), slow(17), 23])
def test_evaluation_predicts_every_byte_once(run, size):
    state, _ = run.advance(run.init(), 0, 12)
    part = TEXT.test[:size]
    model = run.structure.model(state.params, state.others)
    losses, done = [], 0
    while done < size - 1:
        start = min(done, size - 1 - 8)
        window = part[start : start + 9].astype(np.int32)
        logits = model(jnp.asarray(window[None, :-1]), deterministic=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits[0], jnp.asarray(window[1:]))
        losses += loss[done - start :].tolist()
        done = start + 8
    assert len(losses) == size - 1
    assert run.evaluate(state, part) == pytest.approx(np.mean(losses), rel=1e-5)


def test_evaluation_of_some_windows(run):
    state, _ = run.advance(run.init(), 0, 12)
    assert run.evaluate(state, TEXT.test, max_windows=10**6) == run.evaluate(state, TEXT.test)
    assert run.evaluate(state, TEXT.test, max_windows=5) == pytest.approx(
        run.evaluate(state, TEXT.test), abs=0.5
    )


@pytest.mark.slow
def test_batch_statistics_are_trained_and_saved(tmp_path):
    run = Run(dataclasses.replace(CONFIG, batch_norm=True), TRAINING, TEXT.train)
    before = jax.tree.map(np.asarray, run.init().others)
    state, _ = run.advance(run.init(), 0, 4)
    assert not equal(state.others, before)
    models.save(tmp_path, 4, state, record_of(run))
    assert equal(models.restore(tmp_path, 4, run), state)


@pytest.mark.slow
@pytest.mark.parametrize("table_optimizer", ["row_adagrad", "row_adam"])
def test_resumed_run_ends_like_one_that_was_never_stopped(run, tmp_path, table_optimizer):
    if table_optimizer != run.training.table_optimizer:
        run = Run(CONFIG, dataclasses.replace(TRAINING, table_optimizer=table_optimizer), TEXT.train)
    whole, _ = run.advance(run.init(), 0, 12)
    part, _ = run.advance(run.init(), 0, 5)
    models.save(tmp_path, 5, part, record_of(run))
    step, record = runs.read(tmp_path, lm_runs.Record)
    assert step == 5
    assert record == record_of(run)
    resumed, _ = run.advance(models.restore(tmp_path, step, run), step, 7)
    assert equal(whole, resumed)


def test_model_of_a_checkpoint(run, tmp_path):
    state, _ = run.advance(run.init(), 0, 4)
    models.save(tmp_path, 4, state, record_of(run))
    model, record = lm_runs.load_model(tmp_path)
    assert record.model == CONFIG
    tokens = jnp.asarray(TEXT.test[None, :8].astype(np.int32))
    expected = run.structure.model(state.params, state.others)(tokens, deterministic=True)
    assert (model(tokens, deterministic=True) == expected).all()


def test_ids_out_of_range_are_refused(run, tmp_path):
    def broken(path, leaf):
        return leaf + 100 if "anchors" in jax.tree_util.keystr(path) else leaf

    state = run.init()
    state = state._replace(others=jax.tree_util.tree_map_with_path(broken, state.others))
    models.save(tmp_path, 4, state, record_of(run))
    for read in (lambda: models.restore(tmp_path, 4, run), lambda: lm_runs.load_model(tmp_path)):
        with pytest.raises(checkpoints.CheckpointError, match=r"cannot be used: .*inputs are 0 to 7"):
            read()


def test_arrays_of_another_configuration_are_refused(run, tmp_path):
    models.save(tmp_path, 4, run.init(), record_of(run))
    other = Run(dataclasses.replace(CONFIG, n_detectors=5), TRAINING, TEXT.train)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit this model"):
        models.restore(tmp_path, 4, other)


def test_vocabulary_must_be_bytes():
    with pytest.raises(ValueError, match="vocab_size is 300"):
        Run(dataclasses.replace(CONFIG, vocab_size=300), TRAINING, TEXT.train)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("batch_size", -1),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", -0.1),
        ("cooldown", 1.5),
        ("seed", -1),
        ("optimizer", "lion"),
        ("schedule", "linear"),
        ("loss", "max"),
        ("table_gradient", "sparse"),
        ("table_optimizer", "adam"),
        ("table_weight_decay", -0.1),
        ("table_rate", -1.0),
        ("table_rate", float("inf")),
        ("microbatches", 0),
        ("microbatches", 3),
    ],
)
def test_training_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"^{field} is "):
        TrainingConfig(**{field: value})


def test_state_is_all_that_training_needs(run):
    # also what the checkpoint is read with
    abstract, state = run.abstract(), run.init()
    assert isinstance(abstract, State)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), abstract, state))
    assert run.structure.n_parameters() == sum(
        p.size for p in jax.tree.leaves(nnx.state(run.structure.model(state.params, state.others), nnx.Param))
    )
