"""Numbers that are learned in place of classes: models, runs on tables, predictions, circuits, bundles, servers."""

import csv
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command, output
from flax import nnx
from starlette.testclient import TestClient

import lutjax
from lutjax.circuits import c, mcu
from lutjax.models import LogicClassifier, LogicClassifierConfig
from lutjax.serving import application
from lutjax.training import classifier, predictions, runs
from lutjax.training.reports import Errors

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")

SMALL = ["--batch-size=16", "--log-every=20", "--eval-every=20", "--checkpoint-every=20", "--no-baselines"]
CONFIG = LogicClassifierConfig(
    4, 1, layers=(30, 21), n_thresholds=2, residual=0, regression=True, scale=0.5, offset=-3.25
)


def table(n, seed=0):
    """Return a table in CSV: the price is 10 for each meter, and 5 more of kind b."""
    rng = np.random.default_rng(seed)
    lines = ["meters,kind,price"]
    for _ in range(n):
        meters, kind = rng.uniform(0, 3), rng.choice(["a", "b"])
        lines.append(f"{meters:.2f},{kind},{10 * meters + 5 * (kind == 'b'):.1f}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A table, a run on it that has ended, and what the command printed. Not to be changed."""
    folder = tmp_path_factory.mktemp("regression")
    path, out = folder / "prices.csv", folder / "run"
    path.write_text(table(200))
    words = ["--target=price", "--regression", "--layers=60", "--steps=60"]
    return path, out, output("train", "classify", "--data", path, "--out", out, *words, *SMALL)


# --- models


def test_numbers_are_counts_of_bits():
    model = LogicClassifier(CONFIG, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).uniform(0, 1, (70, 4)).astype(np.float32)
    x = np.round(x * 255) / 256
    soft, hard = model(jnp.asarray(x)), np.asarray(model(jnp.asarray(x), deterministic=True))
    assert soft.shape == hard.shape == (70,)
    counts = (hard + 3.25) / 0.5
    np.testing.assert_array_equal(counts, counts.round())
    assert 0 <= counts.min() < counts.max() <= 21
    packed = model.packed()
    np.testing.assert_array_equal(packed(x), hard)
    words = lutjax.pack_bits(packed.first_bits(x).T)
    np.testing.assert_array_equal(packed.from_words(words)[:70], hard)
    circuit = model.circuit(inputs="ufixed8.8")
    np.testing.assert_array_equal(circuit(x), counts)
    assert (circuit.about["kind"], circuit.about["scale"], circuit.about["offset"]) == (
        "regression",
        0.5,
        -3.25,
    )
    assert packed.circuit(inputs="ufixed8.8").literals == circuit.literals
    with pytest.raises(ValueError, match="outputs is 'class', but the model gives a number"):
        model.circuit(outputs="class")


def test_gradients_go_to_gates():
    model = LogicClassifier(CONFIG, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (8, 4)), jnp.float32)
    gradients = nnx.grad(lambda model: jnp.mean((model(x) - 1.0) ** 2))(model)
    assert all(float(abs(g).max()) > 0 for g in nnx.to_pure_dict(gradients)["layers"][1].values())


def test_configs():
    assert LogicClassifierConfig.from_dict(CONFIG.to_dict()) == CONFIG
    with pytest.raises(ValueError, match=r"regression is True and n_classes is 3; .* n_classes must be 1"):
        LogicClassifierConfig(4, 3, layers=(6,), regression=True)
    with pytest.raises(ValueError, match="n_classes is 1; it must be at least 2"):
        LogicClassifierConfig(4, 1, layers=(6,))
    for fields in ({"scale": 0.0}, {"scale": float("inf")}, {"offset": float("nan")}):
        with pytest.raises(ValueError, match=r"they must be finite, and scale not 0|expected a number"):
            LogicClassifierConfig(4, 1, layers=(6,), regression=True, **fields)


def test_headers_make_numbers_of_answers():
    circuit = LogicClassifier(CONFIG, rngs=nnx.Rngs(0)).circuit(inputs="uint8")
    for header in (
        c.write(circuit, "price")["price.h"],
        mcu.write(circuit, "price", target="avr")["src/price.h"],
    ):
        assert "static inline float price_number(uint32_t answer)" in header
        assert "(float)answer * 0.5f + -3.25f" in header


def test_errors_of_numbers():
    found = Errors.of(np.array([0.0, 2, 4]), np.array([0.0, 2, 1]))
    assert (found.absolute, found.squared, found.r2) == pytest.approx((1.0, 3**0.5, 1 - 3 / (8 / 3)))
    assert Errors.of(np.ones(3), np.ones(3)).r2 == 1.0


# --- runs


def test_a_run_learns_numbers(run):
    path, out, said = run
    assert "hard R2" in said
    report = json.loads((out / "report.json").read_text())
    errors = report["errors"]
    assert report["hard"] == errors["hard"]["r2"] > 0.6
    assert errors["mean"]["r2"] < 0.1
    assert errors["hard"]["absolute"] < errors["mean"]["absolute"]
    assert not (out / "confusion.png").exists()
    assert (out / "accuracy.png").exists()
    _, record = runs.read(out, classifier.Record)
    model = record.model
    assert isinstance(model, LogicClassifierConfig)
    prices = [float(line.rpartition(",")[2]) for line in path.read_text().splitlines()[1:]]
    assert min(prices) <= model.offset < model.offset + 60 * model.scale <= max(prices) + 1e-3
    assert "learns: a number (regression)" in output("info", out)
    assert "R2" in said.split("Hard network:")[1].splitlines()[0]


def test_predictions_are_numbers(run, tmp_path):
    _, out, _ = run
    new = tmp_path / "new.csv"
    new.write_text(table(50, seed=1))
    header, *found = csv.reader(io.StringIO(output("predict", out, new)))
    assert header == ["price", "bits"]
    _, record = runs.read(out, classifier.Record)
    model = record.model
    assert isinstance(model, LogicClassifierConfig)
    for number, bits in found:
        assert float(number) == pytest.approx(model.offset + model.scale * int(bits), rel=1e-5)
    trained = predictions.load(out)
    columns = list(zip(*csv.reader(io.StringIO(new.read_text())), strict=True))
    cells = {name: list(values) for name, *values in columns}
    prices = cells.pop("price")
    estimates = trained.predict(cells)
    np.testing.assert_allclose(estimates.numbers, [float(number) for number, _ in found], rtol=1e-5)
    r2 = trained.accuracy(cells, prices)
    said = command("predict", out, new, "--target", "price", "--out", tmp_path / "found.csv").output
    assert f"R2 {r2:.3f}, mean absolute error" in said
    assert len(estimates) == 50


@pytest.mark.slow
def test_a_run_goes_on(run, tmp_path):
    path, out, _ = run
    words = ["train", "classify", "--data", path, "--target=price", "--layers=60", *SMALL]
    other = tmp_path / "run"
    output(*words, "--regression", "--steps=20", "--out", other)
    output("train", "classify", "--resume", "--steps=60", "--out", other)
    model, same = (classifier.load_model(folder)[0] for folder in (other, out))
    assert isinstance(model, LogicClassifier)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (64, model.config.in_features)), jnp.float32)
    assert model(x).shape == same(x).shape == (64,)


def test_exports_are_proved(run, tmp_path):
    _, out, _ = run
    folder = tmp_path / "prices"
    said = output("export", out, "--out", folder, "--format", "c,json,html", "--name", "prices")
    assert "gates (encoder " in said
    manifest = json.loads((folder / "manifest.json").read_text())
    _, record = runs.read(out, classifier.Record)
    about = manifest["about"]
    assert (about["kind"], about["scale"], about["offset"]) == (
        "regression",
        record.model.scale,
        record.model.offset,
    )
    result = command("verify", folder)
    assert result.exit_code == 0, result.output
    assert "PASS     prices.json = the model in JAX" in result.output
    result = command("export", out, "--out", tmp_path / "other", "--outputs", "class")
    assert (result.exit_code, "the model gives a number" in " ".join(result.output.split())) == (1, True)


@pytest.mark.slow
def test_a_library_counts_bits(run, tmp_path):
    _, out, _ = run
    output("export", out, "--format", "c", "--target", "riscv32", "--name", "prices", "--out", tmp_path / "a")
    program = (tmp_path / "a" / "src" / "prices.c").read_text()
    assert "sum r[1];" in program
    assert "best" not in program
    assert command("verify", tmp_path / "a").exit_code == 0


def test_bundles_and_servers(run, tmp_path):
    path, out, _ = run
    bundle = tmp_path / "bundle"
    output("save", out, bundle)
    assert "tabular-regression" in (bundle / "README.md").read_text()
    assert output("predict", bundle, path) == output("predict", out, path)
    with TestClient(application(lutjax.load(out), "prices")) as client:
        response = client.post("/v1/classify", json={"columns": {"meters": [1.0, 2.0], "kind": ["a", "b"]}})
    assert response.status_code == 200, response.text
    found = response.json()
    trained = predictions.load(out)
    expected = trained.predict({"meters": [1.0, 2.0], "kind": ["a", "b"]})
    np.testing.assert_allclose(found["numbers"], expected.numbers)
    assert found["votes"] == expected.votes.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("without_typechecking")  # of sizes that are free
def test_programs_of_jax_give_numbers(run, tmp_path):
    output("export", run[1], "--format", "jax", "--out", tmp_path / "jax")
    programs = json.loads((tmp_path / "jax" / "programs.json").read_text())
    assert "numbers of the hard network" in json.dumps(programs)
    assert "mean squared error" in json.dumps(programs)


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ("1,a,2\n2,b,2\n" * 10, ("--regression",), "the target is 2 in all rows; there is nothing to learn"),
        (
            "1,a,2\n2,b,high\n" * 10,
            ("--regression",),
            "the target is 'high' in row 2; --regression learns finite",
        ),
        ("1,a,2\n2,b,3\n" * 10, ("--regression", "--model=tree"), "regression is for layers of gates"),
        ("1,a,2\n2,b,3\n" * 10, ("--regression", "--stratified"), "have no classes; leave it out"),
        (None, (), "Learn numbers as they are by --regression"),
    ],
)
def test_errors_are_one_line(rows, words, message, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(table(30) if rows is None else f"meters,kind,price\n{rows}")
    result = command("train", "classify", "--data", path, "--target=price", "--out", tmp_path / "run", *words)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.replace("│", "").split())


def test_only_tables_have_numbers_to_learn(run, tmp_path):
    result = command("train", "digits", "--regression", "--out", tmp_path / "run")
    assert "--regression is given, but it is for tables" in " ".join(result.output.replace("│", "").split())
    assert result.exit_code in (1, 2)
