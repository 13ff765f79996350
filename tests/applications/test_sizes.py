"""Size targets: `lutjax train classify --luts` and `--front`."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
from commands import command, output, refusal
from tools import require_tool

from lutjax.circuits import abc
from lutjax.models import LogicClassifierConfig
from lutjax.training import export, sizes
from lutjax.training.errors import RunError

SHORT = ["--steps=20", "--batch-size=32", "--column-bits=4", "--no-baselines", "--layers=40"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Read-only table with a known rule."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, 50, (200, 6))
    y = (x[:, 0] > 20) & (x[:, 1] < 30) | (x[:, 2] > 40)
    path = tmp_path_factory.mktemp("table") / "some.csv"
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerows([[*"abcdef", "class"], *(np.c_[x, y].tolist())])
    return path


class Fake:
    """Rule-based LUT6 counts for network attempts, instead of training."""

    def __init__(self, monkeypatch, lut6):
        self.sizes = []
        monkeypatch.setattr(
            sizes, "_attempt", lambda experiment, fields: self.attempt(experiment, fields, lut6)
        )
        monkeypatch.setattr(sizes, "check_abc", lambda: None)

    def attempt(self, experiment, fields, lut6):
        layers = experiment.record.model.layers
        self.sizes.append(layers)
        return sizes.Attempt(layers, lut6(sum(layers)), 0.9, fields)


def make(fields):
    """Return the config of an experiment on a table with two classes, which is what `find` reads."""
    fields = {
        name: value for name, value in fields.items() if name != "gate_cost"
    }  # of the training config
    config = LogicClassifierConfig(24, 2, **{"layers": (1280,), "tau": 10.0, **fields})
    return SimpleNamespace(record=SimpleNamespace(model=config))


def train(table, *words):
    return ("train", "classify", "--data", table, "--target", "class", *words)


@pytest.mark.parametrize("lut6", [
    lambda n: 300 + 2 * n,
    lambda n: round(9 * n**0.6),
    lambda n: n + 37 * (n % 3),
    lambda n: 3 * n,
])  # fmt: skip
def test_a_size_is_found(monkeypatch, lut6):
    fake = Fake(monkeypatch, lut6)
    for luts in (400, 5000):
        result = sizes.find(luts, make, {"layers": (40, 20)})
        assert abs(result.lut6 / luts - 1) <= 0.05
        first, last = result.layers
        assert abs(first / last - 2) < 0.2
        assert last % 2 == 0
        assert result.fields["tau"] == pytest.approx(10 * (last / 20) ** 0.5, abs=0.01)
    assert len(fake.sizes) <= 15


def test_given_temperatures_and_earlier_attempts_are_kept(monkeypatch):
    fake = Fake(monkeypatch, lambda n: 3 * n)
    result = sizes.find(300, make, {"tau": 3.0})
    assert result.fields["tau"] == 3.0
    n_tried = len(fake.sizes)
    assert sizes.find(310, make, {"tau": 3.0}, attempts=[result]) is result
    assert len(fake.sizes) == n_tried


def test_a_size_that_no_network_has(monkeypatch):
    fake = Fake(monkeypatch, lambda n: 1000 + n // 1000)
    with pytest.raises(RunError, match=r"no network with 300 LUT6 was found; .* Choose another"):
        sizes.find(300, make, {})
    assert len(set(fake.sizes)) == len(fake.sizes) == sizes.MOST_ATTEMPTS


@pytest.mark.parametrize(("words", "message"), [
    (["--luts", 0], "must be at least 1"),
    (["--luts", 9, "--front", "9"], "--luts and --front exclude each other"),
    (["--front", "9,0"], "0; sizes must be at least 1"),
    (["--luts", 9, "--resume"], "leave out --resume"),
    (["--luts", 9, "--dry-run"], "leave out --dry-run"),
    (["--luts", 9, "--model", "tree"], "leave out --model tree"),
])  # fmt: skip
def test_what_is_refused(words, message, tmp_path):
    assert message in refusal("train", "classify", "--out", tmp_path / "run", *words)


def test_without_abc(tmp_path, monkeypatch):
    monkeypatch.setattr(abc, "find", lambda: None)
    said = refusal("train", "classify", "--luts", 9, "--out", tmp_path / "run")
    assert "--luts counts LUT6 by ABC, which is not found: pip install pyosys" in said


def test_an_interruption(table, tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sizes, "check_abc", lambda: None)
    monkeypatch.setattr(sizes, "find", stop)
    result = command(*train(table, "--luts", 9, "--out", tmp_path / "run"))
    assert result.exit_code == 130
    assert "Stopped while choosing a size." in result.output
    assert not (tmp_path / "run").exists()


class TestSlow:
    def test_the_command_has_the_requested_size(self, table, tmp_path):
        require_tool("abc")
        text = output(*train(table, "--luts", 150, "--out", tmp_path / "run", *SHORT))
        count = abc.lut_count(export.source_of(tmp_path / "run").circuit)
        assert abs(count / 150 - 1) <= 0.05
        assert (
            f"Circuit: {count} LUT6 from inputs to class, {100 * (count / 150 - 1):+.1f} % of 150."
            in text
        )
        assert "already holds a checkpoint" in refusal(
            *train(table, "--luts", 150, "--out", tmp_path / "run")
        )

    def test_a_front(self, table, tmp_path):
        require_tool("abc")
        text = output(*train(table, "--front", "120,240", "--out", tmp_path, *SHORT))
        result = json.loads((tmp_path / "front.json").read_text())
        assert [point["wanted"] for point in result["points"]] == [120, 240]
        for point in result["points"]:
            assert abs(point["lut6"] / point["wanted"] - 1) <= 0.05
            assert f"{point['lut6']:>9,} {point['gates']:>9,}" in text
            assert (
                json.loads((tmp_path / str(point["wanted"]) / "report.json").read_text())["hard"]
                == point["accuracy"]
            )
        assert len(result["attempts"]) >= 2
        assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
