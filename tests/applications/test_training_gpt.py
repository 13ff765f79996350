"""GPT runs: optimizer, state selection by validation loss, and the command."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import output, refusal
from pytrees import equal
from small_runs import TEXT

import lutjax
from lutjax.models import GPTConfig
from lutjax.models.gpt import FEED_FORWARD
from lutjax.training import lm_runs, models, optimizers, presets, runs
from lutjax.training.configs import Intervals
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.lm_config import MODELS

CONFIG = GPTConfig(
    features=8, context=8, n_layers=1, n_heads=2, dropout=0.1, feed_forward="dense", lut_heads=2, lut_tables=2, lut_bits=3,
)  # fmt: skip
TRAINING = TrainingConfig(
    **presets.fields_of(TrainingConfig, presets.PRESETS["gpt"]["demo"])
    | {"steps": 12, "batch_size": 4, "learning_rate": 0.1, "select_every": 3, "validate": True}
    | {"warmup": 0.1, "table_optimizer": "same"}
)


@pytest.mark.parametrize("model", presets.PRESETS)
def test_presets_are_complete(model):
    configs = (MODELS[model], TrainingConfig, Intervals)
    for name in presets.PRESETS[model]:
        values = presets.preset(model, name)
        assert not set(values).difference(*(set(config.__dataclass_fields__) for config in configs))
        for config in configs:
            presets.make(config, values)
        if model == "gpt":
            for layer in FEED_FORWARD:
                presets.make(GPTConfig, {**values, "feed_forward": layer})


def test_selection_needs_a_part_to_select_on():
    with pytest.raises(ValueError, match="select_every is 3; it requires validation bytes"):
        Run(CONFIG, TRAINING, TEXT.train)


def test_the_state_with_the_lowest_validation_loss_is_kept():
    run = Run(CONFIG, dataclasses.replace(TRAINING, learning_rate=4.0), TEXT.train, TEXT.validation)
    state, states = run.init(), []
    for step in range(0, TRAINING.steps, 3):
        state, _ = run.advance(state, step, 3)
        plain = state._replace(params=jax.tree.map(jnp.copy, state.params))
        states.append((run.evaluate(plain, TEXT.validation), step + 3, plain.params))
    _, step, params = min(states, key=lambda one: one[0])
    assert int(state.optimizer.step) == step
    jax.tree.map(np.testing.assert_array_equal, state.optimizer.params, params)


def test_the_validation_part_may_be_trained_on():
    fields = dataclasses.asdict(CONFIG) | {"steps": 1, "select_every": 0}
    parts = []
    for validate in (True, False):
        run = lm_runs.LanguageModel.create(fields | {"validate": validate}, model="gpt").run
        parts.append(np.asarray(run.advance.data))
    assert parts[1].size == pytest.approx(parts[0].size * 90 / 85, rel=1e-3)
    np.testing.assert_array_equal(parts[1][: parts[0].size], parts[0])


def test_only_matrices_decay():
    shapes = {"table": (2, 4, 3), "matrix": (2, 3), "bias": (3,), "score": ()}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    optimizer = optimizers.optimizer("adamw", 0.5, weight_decay=0.1)
    gradients = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    for name, update in updates.items():
        np.testing.assert_allclose(update, -0.05 if name == "matrix" else 0.0)


def test_cosine_falls_to_a_tenth():
    rate = np.asarray(
        dataclasses.replace(TRAINING, steps=100, learning_rate=1.0).rate()(np.arange(101))
    )
    np.testing.assert_allclose(
        rate[[0, 4, 9, 10, 55, 100]], [0.1, 0.5, 1.0, 1.0, 0.55, 0.1], rtol=1e-5
    )
    assert (np.diff(rate[10:]) < 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_decay": -0.1}, "^weight_decay is -0.1; it must be finite"),
        ({"optimizer": "adam"}, "^weight_decay is 0.1 and optimizer 'adam'; it requires adamw"),
        ({"clip": 0.0}, "^clip is 0.0; it must be above 0"),
        ({"total_variation": float("inf")}, "^total_variation is inf"),
        ({"select_every": -1}, "^select_every is -1"),
        ({"validate": False}, "^select_every is 3; it requires the validation part"),
        ({"table_gradient": "factored"}, "^table_optimizer is 'same'; it needs table_gradient 'dense'"),
        (
            {"table_gradient": "factored", "table_optimizer": "row_adam", "total_variation": 1.0},
            "^total_variation is 1.0; it needs table_gradient 'dense'",
        ),
        ({"table_weight_decay": 0.1}, "^table_weight_decay is 0.1; it requires a row rule"),
    ],
)  # fmt: skip
def test_impossible_training(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TRAINING, **changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt", "--n-detectors", "4"], "--n-detectors is 4; the model gpt has no such option."),
        (["--model", "lut", "--remat"], "remat is True; the model lut has no such option."),
        (["--model", "gpt", "--preset", "reference"], "preset is 'reference'; the model gpt has demo, small, shakespeare, shakespeare-cpu."),
        (["--model", "rnn"], "'lut', 'gpt'"),
        (["--model", "gpt", "--n-heads", "3"], "must be a multiple of 6"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(words, message, tmp_path):
    assert message in refusal("train", "lm", "--out", tmp_path / "run", *words)
    assert not (tmp_path / "run").exists()


class TestSlow:
    def test_the_lowest_validation_loss_chooses(self, tmp_path):
        run = Run(CONFIG, TRAINING, TEXT.train, TEXT.validation)
        state, done, actual = run.init(), 0, []
        for until in (3, 6, 9, 12):
            state, _ = run.advance(state, done, until - done)
            done = until
            actual.append(
                (run.evaluate(state, TEXT.validation), jax.tree.map(np.asarray, state.params))
            )
            best = min(range(len(actual)), key=lambda i: actual[i][0])
            assert float(state.optimizer.loss) == pytest.approx(actual[best][0], rel=1e-5)
            assert int(state.optimizer.step) == 3 * (best + 1)
            assert equal(run.selected(state).params, actual[best][1])
        assert actual[0][0] > actual[-1][0]
        source = runs.Source(None, TEXT.size, TEXT.digest)
        models.save(
            tmp_path, 12, state, lm_runs.Record(CONFIG, TRAINING, source, 3.0, {}, runs.History())
        )
        tokens, model = jnp.asarray(TEXT.test[None, :8].astype(np.int32)), lutjax.load(tmp_path)
        want = run.structure.model(jax.tree.map(jnp.asarray, actual[best][1]), state.others)(
            tokens, deterministic=True
        )
        np.testing.assert_array_equal(model(tokens), want)
        # A state that is worse than the one before it is not kept.
        spoilt = state._replace(params=jax.tree.map(lambda p: 9 * p, state.params))
        spoilt, _ = run.advance(spoilt, 11, 1)
        assert equal(run.selected(spoilt).params, actual[best][1])

    def test_clipping_bounds_the_norm_of_all_gradients(self):
        moved = {}
        start = None
        for clip in (None, 0.01):
            training = TrainingConfig(
                steps=1, batch_size=2, learning_rate=1.0, optimizer="sgd", cooldown=0.0, clip=clip,
                table_optimizer="same", table_gradient="dense",
            )  # fmt: skip
            run = Run(dataclasses.replace(CONFIG, dropout=0.0), training, TEXT.train)
            start = start or run.init()  # of the same seed; sgd has no state of its own
            before = jax.tree.map(np.asarray, start.params)
            after = run.advance(jax.tree.map(jnp.copy, start), 0, 1)[0]
            moved[clip] = jax.tree.map(lambda a, b: np.asarray(a) - b, after.params, before)
        whole = np.sqrt(sum((a**2).sum() for a in jax.tree.leaves(moved[None])))
        assert whole > 0.1
        for a, b in zip(*map(jax.tree.leaves, (moved[0.01], moved[None])), strict=True):
            np.testing.assert_allclose(a, b * 0.01 / whole, rtol=1e-3, atol=1e-6)

    @pytest.mark.parametrize("table_optimizer", ["same", "row_adagrad"])
    def test_tables_move_at_a_rate_of_their_own(self, table_optimizer):
        config = dataclasses.replace(
            CONFIG,
            feed_forward="projection_lut",
            dropout=0.0,
            memory=True,
            memory_rows=64,
            memory_width=2,
        )
        changes = {
            "optimizer": "sgd",
            "weight_decay": 0.0,
            "clip": None,
            "warmup": 0.0,
            "select_every": 0,
        }
        changes |= {"table_optimizer": table_optimizer, "steps": 1, "total_variation": 10.0}
        moved = {}
        for rate in (1.0, 3.0):
            run = Run(config, dataclasses.replace(TRAINING, **changes, table_rate=rate), TEXT.train)
            state = run.init()
            before = jax.tree.map(np.asarray, state.params)
            after = jax.tree.leaves(run.advance(state, 0, 1)[0].params)
            by_name = zip(run.structure.parameters, after, jax.tree.leaves(before), strict=True)
            moved[rate] = {name: np.asarray(a) - b for name, a, b in by_name}
        of_tables = [name for name in moved[1.0] if name.endswith("feed_forward/weights")]
        assert of_tables
        for name, one in moved[1.0].items():
            factor = 3.0 if name in of_tables else 1.0
            np.testing.assert_allclose(
                moved[3.0][name], factor * one, rtol=1e-2, atol=1e-7, err_msg=name
            )
        assert all(np.abs(moved[1.0][name]).max() > 1e-4 for name in of_tables)

    def test_total_variation_is_the_mean_of_the_layers(self):
        """New tables receive no other gradient, because the following projection is zero."""
        config = dataclasses.replace(CONFIG, feed_forward="projection_lut", n_layers=2, dropout=0.0)
        changes = {
            "optimizer": "sgd",
            "weight_decay": 0.0,
            "clip": None,
            "warmup": 0.0,
            "select_every": 0,
        }
        run = Run(
            config, dataclasses.replace(TRAINING, **changes, total_variation=10.0), TEXT.train
        )

        def tables(state):
            layers = state.params["layers"].items()
            return {i: np.asarray(layer["feed_forward"]["weights"]) for i, layer in layers}

        before = tables(run.init())
        gradients = jax.grad(lambda ts: sum(map(lutjax.cell_total_variation, ts.values())) / 2)(
            before
        )
        after, loss = run.advance(run.init(), 0, 1)
        assert loss == pytest.approx(np.log(256), rel=0.01)  # the mean loss is reported
        for i, table in tables(after).items():
            np.testing.assert_allclose(table, before[i] - 0.1 * 10.0 * gradients[i], atol=1e-7)

    def test_the_command(self, text, tmp_path):
        words = [
            "--model=gpt", "--features=8", "--context=8", "--n-layers=1", "--n-heads=2", "--lut-heads=2",
            "--lut-tables=2", "--lut-bits=3", "--batch-size=4", "--steps=8", "--learning-rate=0.02",
            "--validate", "--select-every=4",
        ]  # fmt: skip
        said = output("train", "lm", "--text", text, "--out", tmp_path, *words)
        assert "test loss " in said
        assert "tested after 8 steps, where the validation loss is lowest: " in said
        assert output("generate", tmp_path, "--prompt", "the ", "--bytes", 9).startswith("the ")
        resume = ("train", "lm", "--resume", "--out", tmp_path)
        assert "is finished: all 8 steps are done. test loss" in output(*resume)
        for more, message in (
            (["--model", "lut"], "the run trains another model: gpt, not lut."),
            (["--n-detectors", "3"], "the checkpoint has no --n-detectors"),
            (["--model", "gpt", "--preset", "small"], "dropout is 0.0 in the checkpoint, not 0.2"),
        ):
            assert message in refusal(*resume, *more)
