"""Logic-gate classifiers: the hard network on packed words, training, samples, and the command."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import refusal
from flax import nnx
from pytrees import equal
from small_runs import blobs

import lutjax
from lutjax.models import LogicClassifier, LogicClassifierConfig, PackedClassifier, packed
from lutjax.training import classifier, classifier_runs, loop, models, runs
from lutjax.training.augment import warp
from lutjax.training.datasets import Parts
from lutjax.training.samples import SamplesError, load_samples, split

SIZES = {"in_features": 6, "n_classes": 3, "n_thresholds": 2}
CONFIG = LogicClassifierConfig(**SIZES, layers=(17, 51), n_inputs=3)
MODELS = {
    "light": CONFIG,
    "gates": dataclasses.replace(CONFIG, tables="gates", n_inputs=2, layers=(12, 12)),
    "reduced": dataclasses.replace(
        CONFIG, tables="gates", n_inputs=2, layers=(12, 33), noise=3.0, reduce=(4, 2)
    ),
    "binary": dataclasses.replace(CONFIG, tables="binary", layers=(12,), n_thresholds=0),
    "learnable": dataclasses.replace(CONFIG, tables="walsh", wiring="learnable", layers=(9,)),
}
THRESHOLDS = np.array(
    [[-1.5, 3.0], [0.0, 0.0], [2.5, 300.0], [254.5, 255.0], [1.0, 2.0], [7.25, 9.0]], np.float32
)


def model_of(config):
    thresholds = THRESHOLDS if config.n_thresholds else None
    structure = models.Structure(
        lambda rngs: LogicClassifier(config, thresholds=thresholds, rngs=rngs)
    )
    return structure.model(*structure.init(3))


def hard_logits(model, x):
    return np.asarray(jax.jit(lambda x: model(x, deterministic=True))(x.astype(np.float32)))


def data(n, *, bits=False):
    """Return uint8 integers around the thresholds."""
    choices = [0, 1] if bits else [0, 1, 2, 3, 4, 7, 8, 9, 10, 254, 255]
    return np.random.default_rng(n).choice(choices, (n, 6)).astype(np.uint8)


@pytest.fixture(scope="module")
def light():
    return model_of(CONFIG)


def test_packed_takes_any_number_of_samples_and_words(light):
    x = data(32 * 65).astype(np.float32)  # more than one block
    expected, packed = hard_logits(light, x).argmax(-1), light.packed()
    for n in (1, 31, 33):
        np.testing.assert_array_equal(packed(x[:n]), expected[:n])
    bits = (x[:, :, None] > THRESHOLDS).reshape(len(x), -1)
    np.testing.assert_array_equal(packed.from_words(lutjax.pack_bits(bits.T)), expected)


@pytest.mark.parametrize("rows", [1, 16, 256, 600])
def test_sums_of_bits(rows):
    words = np.random.default_rng(rows).integers(0, 2**32, (2, rows, 3), dtype=np.uint32)
    words[1] = 0xFFFFFFFF
    actual = np.asarray(packed._sums_of_bits(jnp.asarray(words))).reshape(32, 2, 3)
    expected = (words[None] >> np.arange(32, dtype=np.uint32)[:, None, None, None] & 1).sum(2)
    np.testing.assert_array_equal(actual, expected)


def test_many_votes_and_ties():
    """Two classes with 300 votes each for 0 bits, and one extra vote for the second class for 1 bits."""
    config = LogicClassifierConfig(2, 2, layers=(600,), n_thresholds=0)
    gate = np.arange(600)
    truth = (gate != 299)[:, None] | np.array([True, True, True, False])
    truth[:, 0] &= gate % 300 != 0
    wires = np.tile(np.arange(2, dtype=np.int32), (600, 1))
    network = PackedClassifier((jnp.asarray(truth),), (jnp.asarray(wires),), None, config)
    np.testing.assert_array_equal(network(jnp.asarray([[0, 0], [1, 1]])), [0, 1])


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: m(jnp.ones((5, 8))), r"x has shape \[5, 8\]; expected \[\.\.\., 6\]"),
    (lambda m: m.packed()(jnp.ones((5, 8))), r"x has shape \[5, 8\]; expected \[\.\.\., 6\]"),
    (lambda m: m.packed()(jnp.ones((2, 5, 6))), r"expected \[batch, features\]"),
    (lambda m: m.packed().from_words(jnp.ones((6, 1), jnp.uint32)), r"expected \[12, words\]"),
])  # fmt: skip
def test_samples_of_a_wrong_size(call, message, light, without_typechecking):
    with pytest.raises(ValueError, match=message):
        call(light)


@pytest.mark.parametrize(("change", "message"), [
    ({"layers": (20, 20)}, r"layers is 20; it must be a multiple of the 3 classes, such as 21"),
    ({"layers": ()}, "each layer needs at least one gate"),
    ({"tables": "gates"}, "n_inputs is 3; gates have 2 inputs. Use 'light'"),
    ({"tables": "heavy"}, "expected one of"),
    ({"n_inputs": 9}, "n_inputs is 9"),
    ({"n_classes": 1}, "n_classes is 1; it must be at least 2"),
    ({"wiring": "unique"}, "n_inputs is 3"),
    ({"tau": 0.0}, "tau is 0.0"),
    ({"estimator": "hard"}, "estimator is 'hard'"),
    ({"reduce": (1,)}, r"reduce is \(1,\); a table reads 2 to 8 votes of its class, which has"),
    ({"reduce": (6, 4)}, r"which has 3 at 4"),
    ({"reduce": (9,)}, "reads 2 to 8 votes"),
    ({"reduce": (2,), "tables": "binary"}, "reducing tables are trained as logits"),
])  # fmt: skip
def test_impossible_sizes(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_votes_are_reduced_by_majorities_of_their_class():
    config = LogicClassifierConfig(4, 2, layers=(10,), n_thresholds=0, noise=0.0, reduce=(3,))
    model = LogicClassifier(config, rngs=nnx.Rngs(0))
    assert config.reducing == (4,)
    assert model.layers[1].wires[...].tolist() == [[0, 1, 2], [3, 4, 0], [5, 6, 7], [8, 9, 5]]
    votes = jnp.asarray([1, 1, 0, 0, 0, 1, 0, 1, 0, 0], jnp.float32)
    assert model.layers[1](votes, deterministic=True).tolist() == [1, 0, 1, 0]
    assert model(jnp.ones((3, 4))).shape == (3, 2)


TRAINING = classifier.TrainingConfig(steps=40, batch_size=20, learning_rate=0.1)


@pytest.fixture(scope="module")
def run():
    config = dataclasses.replace(CONFIG, layers=(60, 60), n_inputs=2, tables="light", tau=3.0)
    return classifier.Run(config, TRAINING, blobs())


def test_training_learns_and_keeps_wires(run):
    before, trained = run.init(), loop.run(run.advance, run.init(), first=0, steps=40)[0]
    assert equal(before.others, trained.others)
    whole = blobs()
    assert run.accuracy(before, whole, hard=True) < 0.7
    for hard in (True, False):
        assert run.accuracy(trained, whole, hard=hard) > 0.8


def test_candidates_of_learnable_wiring():
    config = LogicClassifierConfig(4, 2, layers=(10,), wiring="learnable", candidates=6)
    model = nnx.eval_shape(lambda: LogicClassifier(config, rngs=nnx.Rngs(0)))
    assert model.layers[0].scores.shape == (10, 2, 6)
    with pytest.raises(ValueError, match="candidates is 5; it must be even"):
        dataclasses.replace(config, candidates=5)


def test_other_samples_than_the_model(run):
    with pytest.raises(
        ValueError, match="samples have 6 numbers and 3 classes, but in_features is 7"
    ):
        classifier.Run(dataclasses.replace(run.config, in_features=7), TRAINING, blobs())


def test_warp():
    image = jnp.zeros((50, 7, 7)).at[:, 2:5, 2:5].set(2.0)
    key = jax.random.key(0)
    np.testing.assert_allclose(warp(key, image, 0), image)
    warped = np.asarray(warp(key, image))
    colors = warp(key, jnp.stack([image, 2 * image], -1))  # channels move together
    np.testing.assert_allclose(colors, np.stack([warped, 2 * warped], -1), atol=1e-5)
    np.testing.assert_allclose(warped[:, 3, 3], 2, atol=1e-5)
    assert (warped[:, 0, 0] == 0).all()
    assert np.ptp(warped[:, 1, 3]) > 0.2  # some are moved down, others up
    down, right = (
        (warped * np.arange(7).reshape(shape)).sum((1, 2)) / warped.sum((1, 2)) - 3
        for shape in ((7, 1), (1, 7))
    )
    assert 0.3 < np.abs(down).max() < 0.6
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.5


def test_split_has_every_sample_once():
    whole = blobs(33)
    train, test = split(whole, 0)
    assert (len(train.x), len(test.x)) == (26, 7)
    rows = np.concatenate([train.x, test.x])
    assert (np.sort(rows, 0) == np.sort(whole.x, 0)).all()
    assert not np.array_equal(split(whole, 1)[1].x, test.x)


X, Y = np.ones((12, 2, 3)), np.arange(12) % 2


@pytest.mark.parametrize(("arrays", "message"), [
    ({"x": X}, r"has no array y; it has \['x'\]"),
    ({"x": X[:, 0, 0], "y": Y},
        r"x has shape \[12\]; expected \[N, features\] or \[N, height, width\]"),
    ({"x": X, "y": Y[:5]}, r"y has shape \[5\]; expected one label for each of the 12 samples"),
    ({"x": X, "y": Y + 0.5}, "y has dtype float64; labels must be integers"),
    ({"x": X.astype(str), "y": Y}, "x has dtype <U32; expected numbers"),
    ({"x": X.astype(object), "y": Y}, "is not a .npz file with plain arrays"),
    ({"x": np.where(np.arange(12) == 7, np.nan, X.T).T, "y": Y}, "x of sample 7 is not finite"),
    ({"x": X, "y": Y - 1}, "labels are from -1 to 0"),
    ({"x": X, "y": 0 * Y}, "at least two classes"),
    ({"x": X, "y": 100 * Y}, "fewer than samples"),
    ({"x": X[:5], "y": Y[:5]}, "there are 5 samples"),
    (None, "is not a .npz file"),
])  # fmt: skip
def test_bad_files(arrays, message, tmp_path):
    path = tmp_path / "data.npz"
    if arrays is None:
        path.write_bytes(b"PK text")
    else:
        np.savez(path, **arrays)
    with pytest.raises(SamplesError, match=message):
        load_samples(path)


def test_patience():
    whole, config = blobs(), dataclasses.replace(CONFIG, layers=(12, 12))
    options = dataclasses.asdict(classifier_runs.Options(patience=2))
    identity = runs.Source(None, 60, whole.digest)
    record = classifier.Record(config, TRAINING, identity, {}, options, runs.History())
    run = classifier_runs.Classifier(record, Parts(*split(whole, 0)))
    for number, accuracy in enumerate((0.5, 0.7, 0.6, 0.8, 0.7, 0.8), 1):
        record.history.test.append((number, accuracy))
        assert bool(run.stop_reason(number)) == (number == 6)
    assert run.stop_reason(6) == "no better hard network in 2 tests after 6 of 40 steps"
    record.options["patience"] = None
    assert run.stop_reason(6) is None
    with pytest.raises(ValueError, match="patience is 0; it must be at least 1"):
        classifier_runs.Options(patience=0)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Data and an untrained run on them, read-only."""
    folder, whole = tmp_path_factory.mktemp("digits"), blobs()
    np.savez(folder / "blobs.npz", x=whole.x.reshape(-1, 2, 3), y=whole.y)
    sizes = {"layers": (30, 30), "n_thresholds": 2, "estimator": "gumbel", "reduce": (3, 2)}
    experiment = classifier_runs.Classifier.create(sizes, folder / "blobs.npz")
    assert (
        "30 + 30 gates, whose votes 12 tables of 3 and 6 tables of 2 reduce, 1,080"
        in experiment.describe()
    )
    models.save(folder / "run", 12, experiment.run.init(), experiment.record)
    return folder / "blobs.npz", folder / "run"


def test_a_model_of_ids_out_of_range_is_refused(started, tmp_path):
    model, record = classifier.load_model(started[1])
    wires = model.layers[1].wires
    wires[...] = wires[...] + 30
    models.save(tmp_path, 13, models.State(*models.arrays(model), jnp.zeros(1)), record)
    with pytest.raises(models.CheckpointError, match="wires holds ids from 30"):
        classifier.load_model(tmp_path)


def test_the_command_refuses(started, tmp_path):
    (data, out), other = started, tmp_path / "other.npz"
    np.savez(other, x=X, y=Y)
    for words, message in (
        (["--out", out], "already holds a checkpoint"),
        (["--out", out, "--resume", "--layers", "30,60"], "layers is (30, 30) in the checkpoint, not (30, 60)"),
        (["--out", out, "--resume", "--data", other], "belongs to other samples"),
        (["--data", tmp_path / "none.npz", "--out", tmp_path], "cannot be read"),
        (["--data", data, "--out", tmp_path, "--layers", "30,x"], "comma-separated integers"),
        (["--data", data, "--out", tmp_path, "--layers", "31"], "must be a multiple of the 3 classes"),
    ):  # fmt: skip
        assert message in refusal("train", "digits", *words)


class TestSlow:
    @pytest.mark.parametrize("name", MODELS)
    def test_packed_is_the_hard_network(self, name):
        config = MODELS[name]
        model, x = model_of(config), data(33, bits=not config.n_thresholds)
        hard = hard_logits(model, x)
        np.testing.assert_allclose(
            hard * config.tau, np.round(hard * config.tau), atol=1e-4
        )  # votes are whole
        assert len(np.unique(hard.argmax(-1))) > 1
        result = model.packed()(jnp.asarray(x))
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, hard.argmax(-1))

    def test_first_states_of_many_seeds(self, run):
        many = jax.jit(jax.vmap(run.sample_state))(
            jnp.stack([jax.random.key(seed) for seed in (5, run.training.seed)])
        )
        assert equal(jax.tree.map(lambda array: array[1], many), run.init())
        assert not equal(many.params, jax.tree.map(lambda array: array[::-1], many.params))

    def test_warp_shifts_and_bends(self):
        image = jnp.zeros((64, 9, 9)).at[:, 3:6, 3:6].set(1.0)
        key = jax.random.key(0)
        shifted, bent = (
            np.asarray(warp(key, image, 0, **how)) for how in ({"shift": 2}, {"bend": 1.0})
        )
        moved, curved = (
            (a * np.arange(9)[:, None]).sum((1, 2)) / a.sum((1, 2)) - 4 for a in (shifted, bent)
        )
        np.testing.assert_allclose(shifted.sum((1, 2)), 9, atol=1e-4)  # as a whole
        assert 1.5 < np.abs(moved).max() <= 2.001
        assert np.ptp(bent.sum((1, 2))) > 2  # some parts are squeezed, others stretched
        assert 0.2 < np.abs(curved).std() < 1.5
        assert np.array_equal(warp(key, image, 1, bend=0), warp(key, image))
