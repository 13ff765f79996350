"""Figures with readable labels, titles, and ground truth next to the learned result."""

import importlib
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from folders import DOCS
from matplotlib.figure import Figure
from PIL import Image

import lutjax
from lutjax.benchmark import measurements, report, results, shapes
from lutjax.benchmark.measure import Timing
from lutjax.training import animation, pictures, runs
from lutjax.training.automaton import life
from lutjax.training.patterns import checkerboard


@pytest.fixture
def figures(monkeypatch):
    """Saved figures."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: saved.append(self))
    return saved


def on_a_cpu():
    """Times within one decade, for an axis with few powers of ten."""
    machine = results.Machine("cpu", 1e10)
    result = []
    for row, seconds in (("forward", 1.1e-3), ("dense", 2.3e-3), ("in-place", 2.9e-3)):
        measurement = measurements.Measurement(shapes.parse("ffn"), row, "xla", "float32", {})
        result.append(
            results.Result(machine, measurement, Timing(seconds, seconds, seconds, 1, 3, None))
        )
    return result


def overlaps(boxes):
    """Pairs with more than one overlapping pixel."""
    return [
        (a, b)
        for number, a in enumerate(boxes)
        for b in boxes[:number]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1
    ]


@pytest.mark.parametrize("where", ["cpu", "nothing measured"])
def test_labels_of_bars_do_not_collide(where, figures, tmp_path):
    shown = on_a_cpu()
    if where == "nothing measured":
        shown = [results.Result(shown[0].machine, shown[0].measurement, None, "out of memory")]
    report.plot(results.Machine("cpu", 1e10), shown, tmp_path / "bars.png")
    (figure,) = figures
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label)]
    for axes in figure.axes:
        low, high = sorted(axes.get_xlim())
        at = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        texts += [label for tick, label in at if low <= tick <= high]
        texts += axes.get_yticklabels()
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    assert not overlaps(boxes)
    assert not any("10^" in text.get_text() for text in texts)
    if where == "cpu":
        times = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert sorted(times) == sorted(results.duration(r.timing.p50) for r in shown)
        assert all(figure.bbox.padded(1).contains(x, y) for box in boxes for x, y in box.corners())


@pytest.mark.usefixtures("without_typechecking")
def test_losses_have_plain_labels(figures, tmp_path):
    history = runs.History([(n, 1e-3 * n + 1) for n in range(1, 40)], [(20, 2.0), (40, 1.0)])
    pictures.plot_losses(history, 2.4, "4 x 8 bytes", tmp_path / "loss.png")
    (axes,) = figures[0].axes
    figures[0].canvas.draw()
    assert axes.get_ylabel() == "nats per byte"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(" (")[0] for label in labels] == [
        "training loss",
        "test loss",
        "bigram model",
    ]
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        assert re.fullmatch(r"−?[\d.]+", label.get_text())  # noqa: RUF001 (matplotlib's minus)


def test_confusion_says_what_is_what(figures, tmp_path):
    pictures.plot_confusion(np.array([[1, 0], [1, 1]]), tmp_path / "confusion.png", ("no", "yes"))
    (axes,) = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "actual")
    texts = {text.get_position(): text.get_text() for text in axes.texts}
    assert texts == {
        (0, 0): "1",
        (0, 1): "1",
        (1, 1): "1",
    }  # actual 1 (the row), predicted 0 (the column)


def run_of(target, size, n_steps, start="random"):
    training = types.SimpleNamespace(size=size, n_steps=n_steps, start=start)
    config = types.SimpleNamespace(channels=2, n_gates=7)
    return types.SimpleNamespace(training=training, target=target, config=config, compared=(0,))


def automaton(step):
    """Return a minimal automaton for films, built from a next-state function."""

    def rollout(state, n_steps, *, key, deterministic):
        states = [state]
        for _ in range(n_steps):
            states.append(step(states[-1]))
        return jnp.stack(states)

    return types.SimpleNamespace(rollout=rollout)


exact = automaton(lambda state: jnp.stack([life(state[..., 0])] * 2, -1))
stubborn = automaton(lambda state: state)


def test_life_is_shown_beside_its_rule():
    run = run_of(None, 3, 1, "boards")
    panels, captions = animation.film(run, exact)
    assert list(panels) == ["circuit of 7 gates", "the rule of the Game of Life"]
    shown, truth = panels.values()
    np.testing.assert_array_equal(shown, truth)
    assert shown.shape == (61, 64, 64, 3)
    assert 0 < shown[-1].mean() < 255
    assert captions[60] == "step 60 of 60: 0 of 4096 cells are different"
    _, captions = animation.film(run, stubborn)
    assert captions[0].endswith(": 0 of 4096 cells are different")
    assert not captions[1].endswith(": 0 of 4096 cells are different")


@pytest.mark.parametrize(("size", "shown"), [(14, 30), (16, 32)])
def test_a_pattern_is_shown_beside_its_target(size, shown):
    panels, captions = animation.film(run_of(checkerboard(size), size, 3), stubborn)
    states, target = panels.values()
    assert states.shape == (7, shown, shown, 3)
    assert target.shape == (1, shown, shown, 3)
    np.testing.assert_array_equal(target[0, ..., 0] // 255, checkerboard(shown)[0])
    wrong = (states[2, ..., 0] != target[0, ..., 0]).sum()
    assert captions[2] == f"step 2 of 6: {wrong} of {shown**2} cells are different"


def test_a_film_has_titles_and_is_large(tmp_path):
    path = tmp_path / "film.gif"
    black = np.zeros((3, 16, 16, 3), np.uint8)
    animation.animate({"one": black, "two": black[:1] + 255}, path, captions=["a", "b", "c"])
    with Image.open(path) as film:
        assert film.n_frames == 3
        assert film.width > 2 * 16 * 20
        film.seek(2)
        picture = np.asarray(film.convert("L"))
    above = picture[:38]  # the titles: dark on white
    for half in (above[:, : picture.shape[1] // 2], above[:, picture.shape[1] // 2 :]):
        assert (half < 100).any()
    assert (picture[-28:] < 100).any()


@pytest.mark.slow
def test_a_detector_is_shown_as_lutjax_computes_it(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    picture = importlib.import_module("detector")
    figure = picture.draw()
    comparisons, table, gradient = figure.axes
    result = lutjax.detect(jnp.asarray(picture.X), jnp.asarray(picture.ANCHORS))
    bits, closest = int(result.index[0]), int(result.flip[0])
    said = [text.get_text() for text in comparisons.texts if text.get_text()]
    answers = (
        (a, b, ("no: 0", "yes: 1")[bits >> n & 1]) for n, (a, b) in enumerate(picture.ANCHORS[0])
    )
    shown = [f"x[{a}] > x[{b}]?  {answer}" for a, b, answer in answers]
    shown[closest.bit_length() - 1] += "  (the closest)"
    assert said == shown
    y = lutjax.lut(jnp.asarray(picture.X), jnp.asarray(picture.TABLE), jnp.asarray(picture.ANCHORS))
    shaded = {patch.get_xy(): patch.get_facecolor() for patch in table.patches}
    outputs = [value for (_, row), value in shaded.items() if row == bits]
    assert len(outputs) == len(y) == sum(color == outputs[0] for color in shaded.values())
    np.testing.assert_array_equal(picture.TABLE[0, bits], y)
    lines = {line.get_label(): line.get_ydata() for line in gradient.lines}
    here = np.abs(picture.SWEEP - picture.X[0]).argmin()
    np.testing.assert_allclose(lines["output y[0]"][here], y[0])
    step = picture.TABLE[0, bits ^ closest] - picture.TABLE[0, bits]
    slope = 0.5 / (1 + abs(float(result.margin[0]))) ** 2 * step
    np.testing.assert_allclose(lines["its gradient in x[0]"][here], slope[0], rtol=0.02)

    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for axes in figure.axes for text in (*axes.texts, axes.title, axes.xaxis.label)]
    texts += [
        *comparisons.get_xticklabels(),
        *gradient.get_xticklabels(),
        *gradient.get_legend().get_texts(),
    ]
    boxes = [text.get_window_extent(renderer) for text in texts if text.get_text()]
    assert not overlaps(boxes)
    assert all(figure.bbox.padded(1).contains(x, y) for box in boxes for x, y in box.corners())
