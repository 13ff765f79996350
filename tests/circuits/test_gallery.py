"""Gallery pages in the repository: their circuits in NumPy, and every page in a browser."""

import base64
import gzip
import json
import re
import sys

import browser as browsers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import ROOT
from tools import require_tool

import lutjax
from lutjax import circuits
from lutjax.models._edges import rows_with_edges

PLAY = ROOT / "docs" / "gallery" / "pages" / "play"
PAGES = sorted(PLAY.glob("*.html"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    require_tool("chromium")
    with browsers.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def opened(browser):
    """Open a gallery page and check for zero errors and zero network requests."""

    def opened(name, *, width=1200):
        browser.resize(width, 900, mobile=width < 600)
        browser.open(PLAY / f"{name}.html")
        return browser

    yield opened
    assert browser.problems() == []


def test_the_text_is_that_of_the_program(opened):
    """Compare the WebAssembly output with the native output from the same program, recorded during page creation."""
    page = opened("text")
    native = page.run("text.model.native")
    call = "text.write({prompt!r}, {n}, {temperature}, {seed})".format(**native)
    assert page.run(call) == native["bytes"]
    assert page.run(call.replace(f", {native['seed']})", ", 3)")) != native["bytes"]
    page.run("new Promise((done) => setTimeout(done, 1500))")
    assert len(page.text("#out")) > 100


def circuit_of(name):
    return circuits.page.read((PLAY / f"{name}.html").read_text(encoding="utf-8"))


@pytest.fixture
def gallery(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    monkeypatch.delitem(sys.modules, "gallery", raising=False)
    import gallery

    return gallery


def test_every_page_is_made_and_shown(gallery):
    assert {path.stem for path in PAGES} == set(gallery.PAGES)
    shown = (ROOT / "docs" / "gallery" / "index.md").read_text(encoding="utf-8")
    for name in gallery.PAGES:
        assert shown.count(f"../play/{name}.html") == 2, name


def test_life_is_the_game_of_life():
    circuit = circuit_of("life")
    neighborhoods = np.arange(512)[:, None] >> np.arange(9) & 1
    alive, around = neighborhoods[:, 8], neighborhoods[:, :8].sum(1)
    assert (
        np.ravel(circuit(neighborhoods)) == ((around == 3) | (alive == 1) & (around == 2))
    ).all()
    assert len(circuit) < 60


def test_what_heals_heals():
    """Start from a random state and clear a quarter later: squares regrow."""
    circuit = circuit_of("healing")
    state = (
        np.random.default_rng(0).integers(0, 2, (1, 32, 32, circuit.about["channels"])).astype(bool)
    )
    state = circuits.step_automaton(circuit, state, 60)
    squares = state[0, ..., 0].copy()
    y, x = np.mgrid[:32, :32] // 2
    assert min((squares != ((x + y) % 2 == k)).mean() for k in (0, 1)) < 0.05
    state[:, :16, :16] = False
    state = circuits.step_automaton(circuit, state, 60)
    assert (state[0, ..., 0] != squares).mean() < 0.05


def test_digits_are_read_as_the_examples_say():
    text = (PLAY / "digits.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="circuit">(.*?)</script>', text, re.DOTALL)[1])
    votes = circuit_of("digits")(np.array(data["examples"]))
    assert (np.asarray(votes).argmax(-1) == data["labels"]).mean() > 0.9


def test_clothes_are_read_from_pixels_as_from_bits(gallery):
    """Compare pixels and edges with thresholds in the circuit and in NumPy, and read the page's examples."""
    text = (PLAY / "fashion.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="circuit">(.*?)</script>', text, re.DOTALL)[1])
    actual = np.ravel(circuit_of("fashion")(np.array(data["examples"])))
    assert (actual == data["labels"]).mean() > 0.8

    height, width, n = 3, 4, 2
    rng = np.random.default_rng(0)
    thresholds = rng.integers(-9, 9, (5 * height * width, n)) * 8
    thresholds[: height * width] = abs(thresholds[: height * width])
    builder = circuits.Builder()
    bits = [bit for (bit,) in builder.input("x", thresholds.size)]
    builder.start_part("layer 1")
    builder.output("y", [[builder.gate([bit], 0b01)] for bit in bits])
    about = {
        "kind": "classifier",
        "n_classes": 2,
        "classes": ["a", "b"],
        "layers": [],
        "image": [height, width],
        "thresholds": thresholds.tolist(),
    }
    pixels = gallery.with_pixels(builder.circuit(about), 5)
    images = rng.integers(0, 32, (20, height, width))
    edges = rows_with_edges(images.reshape(20, -1).T, (height, width))
    expected = np.asarray(edges).T[:, :, None] * 8 > thresholds
    np.testing.assert_array_equal(pixels(images.reshape(20, -1)), ~expected.reshape(20, -1))


def test_the_tables_of_the_text_page_are_whole():
    text = (PLAY / "text.html").read_text(encoding="utf-8")
    model = json.loads(re.search(r'id="model">(.*?)</script>', text, re.DOTALL)[1])
    assert len(gzip.decompress(base64.b64decode(model["tables"]))) == 1_933_312


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", [path.stem for path in PAGES])
def test_pages_fit_and_name_their_controls(opened, name, width):
    page = opened(name, width=width)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("document.querySelectorAll('h1').length") == 1
    names = page.control_names()
    assert len(names) >= 3
    assert all(names)


def test_the_dragged_detector_is_that_of_the_ops(opened):
    page = opened("detector")

    def check():
        x, pairs, table = (page.run(f"detector.{name}") for name in ("x", "pairs", "table"))
        result = page.run("detector.detect()")
        values, anchors = jnp.array(x), jnp.array([pairs], jnp.int32)
        d = lutjax.detect(values, anchors)
        assert (result["index"], result["flip"]) == (int(d.index[0]), int(d.flip[0]))
        assert result["margin"] == pytest.approx(float(d.margin[0]), abs=1e-6)
        weights = jnp.array(table)[None, :, None]
        gradient = jax.grad(lambda x: lutjax.lut(x, weights, anchors)[0])(values)
        np.testing.assert_allclose(result["gradient"], gradient, atol=1e-5)
        return x, pairs

    first = check()
    page.stroke("#input-0", [(0.5, 0.5), (0.5, 2.5), (0.5, 4.5)])
    second = check()
    assert second[0] != first[0]
    page.stroke("#pair-1-1", [(0.5, 0.5), (3.0, 0.5), (4.0, 0.5)])
    third = check()
    assert third[1] != second[1]
    page.run("document.getElementById('input-3').focus()")
    page.press("ArrowDown", 5)
    assert check()[0][3] == pytest.approx(third[0][3] - 0.25)
