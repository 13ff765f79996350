"""Circuit pages: the evaluator in node, and the pages in a browser."""

import dataclasses
import itertools
import json
import re
from importlib import resources

import browser as browsers
import numpy as np
import pytest
from example_circuits import life_circuit, random_circuit
from flax import nnx
from tools import require_tool

from lutjax import circuits
from lutjax.circuits import Builder, Format, Port
from lutjax.circuits.page import evaluate_in_node
from lutjax.models import LogicClassifier, LogicClassifierConfig

DIGITS = {"kind": "classifier", "n_classes": 10, "image": [8, 8]}


def data_of(page):
    """Return a page's embedded data."""
    return json.loads(re.search(r'id="circuit">(.*?)</script>', page, re.DOTALL)[1])


def classifier_circuit(outputs, *, seed=0, n_gates=600, about=DIGITS):
    """Return random gates over 8 x 8 pixels with 5 bits each."""
    ports = {"votes": ("votes", 10), "class": ("y", 1), "only votes": ("y", 10)}
    chosen = {name: (n, Format(4)) for name, n in map(ports.get, outputs)}
    return random_circuit(
        seed, {"x": (64, Format(5))}, n_gates, arities=(2, 3, 4), ports=chosen, about=about
    )


def answer_of(circuit, pixels):
    """Return the values on each output port for one image."""
    answers = circuit(np.array([pixels]))
    answers = answers if isinstance(answers, tuple) else (answers,)
    return {
        port.name: np.ravel(a).tolist() for port, a in zip(circuit.outputs, answers, strict=True)
    }


# ------------------------------------------------------------------------------------- the evaluator
@pytest.mark.parametrize(
    ("n_inputs", "n_gates", "n_words", "arities"),
    [(1, 0, 1, (2,)), (9, 200, 3, range(9)), (200, 2000, 2, range(9)), (12, 300, 1, (6, 7, 8))],
)
def test_node_and_numpy_agree(n_inputs, n_gates, n_words, arities):
    require_tool("node")
    circuit = random_circuit(n_gates, n_inputs, n_gates, arities=arities)
    words = np.random.default_rng(n_words).integers(0, 1 << 32, (n_inputs, n_words), np.uint32)
    result = evaluate_in_node(circuits.page.write(circuit), words)
    np.testing.assert_array_equal(result, circuit.evaluate(words))


def test_node_sees_every_entry_of_a_table():
    """All two-input tables, and one flipped entry with eight inputs."""
    require_tool("node")
    builder = Builder(simplify=False)
    inputs = [bit for (bit,) in builder.input("x", 8)]
    table = int.from_bytes(np.random.default_rng(3).bytes(32), "little")
    gates = [builder.gate(inputs[:2], k) for k in range(16)]
    gates += [builder.gate(inputs, table), builder.gate(inputs, table ^ 1 << 77)]
    builder.output("y", [[gate] for gate in gates])
    circuit = builder.circuit()
    address = np.arange(256)[None] >> np.arange(8)[:, None] & 1
    words = np.packbits(address.astype(np.uint8), axis=1, bitorder="little").view("<u4")
    answer = evaluate_in_node(circuits.page.write(circuit), words)
    bits = np.unpackbits(answer.view(np.uint8), axis=1, bitorder="little")
    for k in range(16):
        assert bits[k, :4].tolist() == [k >> a & 1 for a in range(4)]
    assert np.nonzero(bits[16] != bits[17])[0].tolist() == [77]


# ------------------------------------------------------------------------------------- the file
def test_a_page_is_one_small_file_without_a_network():
    options = {"arities": (2, 2, 3), "ports": {"y": (10, Format(8))}, "about": DIGITS}
    circuit = random_circuit(0, {"x": (64, Format(5))}, 7000, **options)
    page = circuits.page.write(circuit)
    assert len(page.encode()) < 120_000
    assert page == circuits.page.write(circuit)
    assert "default-src 'none'" in page
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|{{", page)


def test_circuits_come_back_from_pages():
    inputs = {"a": (3, Format(5, 2, True)), "b": (200, Format())}
    circuit = random_circuit(0, inputs, 400, near=300, about={"run": "</script>", "n": [1, 2.5]})
    assert circuits.page.read(circuits.page.write(circuit)) == circuit
    with pytest.raises(ValueError, match="text has 0 scripts 'circuit'; a page of "):
        circuits.page.read("<!doctype html>")


def test_titles_and_names_cannot_leave_their_place():
    wild = "</script><script>alert('x')</script> & \"{{data}}\" <!--"
    circuit = classifier_circuit(["votes"], about={**DIGITS, "run": wild})
    page = circuits.page.write(circuit, wild, classes=[wild] * 10)
    data = re.compile(r'<script type="application/json".*?</script>', re.DOTALL)
    assert "alert('x')" not in data.sub("", page)
    assert page.count("</script>") == 3
    assert page.count("{{data}}") == 2 + 11  # in the title, the heading, `about` and each class
    data = data_of(page)
    assert data["about"]["run"] == wild
    assert data["classes"] == [wild] * 10


def test_examples_are_numbers_of_the_format():
    about = {"kind": "classifier", "n_classes": 4, "image": [2, 2]}
    inputs, ports = {"x": (4, Format(4, 2, True))}, {"y": (1, Format(2))}
    circuit = random_circuit(0, inputs, 20, ports=ports, about=about)

    def data(**options):
        return data_of(circuits.page.write(circuit, **options))

    result = data(examples=np.array([[-2, -0.25, 0, 1.75]]), labels=[3], maximum=1.5)
    assert result["examples"] == [[-8, -1, 0, 7]]
    assert (result["labels"], result["maximum"], result["image"]) == ([3], 6, [2, 2])
    assert data(examples=np.array([[0, 0, 0, 0.5]]))["maximum"] == 2
    assert data()["maximum"] == 7


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (life_circuit, {"start": "alive"}, "start is 'alive'; it is one of sparse, random, seed, empty"),
        (life_circuit, {"size": (2, 9)}, r"size is \(2, 9\); give height and width, each at least 3"),
        (life_circuit, {"shown": 3}, r"shown is 3; it is 1, or 3 if there are so many channels \(1\)"),
        (life_circuit, {"start": np.zeros((4, 4, 2), bool)}, r"start has shape \[4, 4, 2\]; expected \[height, width, 1\]"),
        (life_circuit, {"start": np.zeros((4, 4, 1), bool), "size": (5, 4)}, r"size is \(5, 4\) and start has shape"),
        (life_circuit, {"update_rate": 0}, "update_rate is 0; it is a probability, above 0 and at most 1"),
        (life_circuit, {"classes": ["a"]}, "classes is given, which is for classifiers of images; by its `about` .* kind 'automaton'"),
        (lambda: random_circuit(0, 3, 3), {"size": (9, 9)}, "size is given, which is for automata; by its `about` .* kind 'network'"),
        (lambda: classifier_circuit(["class"]), {"classes": ["a"]}, "classes has 1 names; the circuit has 10 classes"),
        (lambda: classifier_circuit(["class"]), {"labels": [1]}, "labels has 1 entries for 0 examples"),
        (lambda: classifier_circuit(["class"]), {"maximum": 32}, "maximum is 32; an input of .* is above 0 and at most 31"),
        (lambda: classifier_circuit(["class"]), {"examples": np.ones((1, 9))}, r"shape \[1, 9\]; expected \[examples, 64\]"),
        (lambda: classifier_circuit(["class"]), {"examples": np.full((1, 64), 0.5)}, "multiples of 1 from 0 to 31"),
    ],
)  # fmt: skip
def test_refused(without_typechecking, make, options, message):
    circuit = make()
    with pytest.raises(ValueError, match=message):
        circuits.page.write(circuit, **options)


def test_text_is_readable_in_light_and_dark():
    """Text contrast is at least 4.5, and control-border contrast at least 3."""
    css = resources.files("lutjax.circuits").joinpath("templates", "page.css").read_text()
    themes = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for block in re.findall(r":root {(.*?)}", css, re.DOTALL)
    ]
    assert len(themes) == 2

    def luminance(color):
        channels = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return linear @ [0.2126, 0.7152, 0.0722]

    def contrast(a, b):
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    for theme in themes:
        for ground in ("paper", "card"):
            assert (
                min(contrast(theme[name], theme[ground]) for name in ("ink", "quiet", "accent"))
                >= 4.5
            )
        assert contrast(theme["on-accent"], theme["accent"]) >= 4.5
        assert min(contrast(theme["track"], theme[name]) for name in ("quiet", "accent")) >= 3
        assert contrast(theme["off"], theme["accent"]) >= 3


# ------------------------------------------------------------------------------------- the browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    require_tool("chromium")
    with browsers.Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def opened(browser, tmp_path):
    """Open a circuit page and check for zero errors and zero network requests."""

    def opened(circuit, *, width=1200, dark=False, **options):
        browser.resize(width, 900, dark=dark, mobile=width < 600)
        path = tmp_path / "page.html"
        path.write_text(circuits.page.write(circuit, **options))
        browser.open(path)
        return browser

    yield opened
    assert browser.problems() == []


def ring(n=24):
    """Return points on an ellipse."""
    angles = np.linspace(0, 2 * np.pi, n)
    return [(0.5 + 0.2 * np.cos(a), 0.5 + 0.35 * np.sin(a)) for a in angles.tolist()]


def fits(page):
    """Return True if no element exceeds the window width."""
    return page.run("document.documentElement.scrollWidth <= innerWidth")


def check_answer(page, circuit):
    """Check the displayed class and votes against the circuit for the pixels; return the pixels."""
    pixels = page.run("lutjax.pixels()")
    expected = answer_of(circuit, pixels)
    votes = expected.get("votes") or (expected["y"] if len(expected["y"]) > 1 else None)
    if votes:
        cells = "[...document.querySelectorAll('#votes tr')].map((r) => +r.cells[2].textContent)"
        assert page.run(cells) == votes
    shown = int(page.text("#class"))
    assert shown == (expected["y"][0] if len(expected.get("y", [])) == 1 else int(np.argmax(votes)))
    return pixels


def test_what_is_drawn_is_classified(opened):
    circuit = classifier_circuit(["votes", "class"])
    examples = np.random.default_rng(0).integers(0, 17, (3, 64))
    page = opened(circuit, title='A "title" <here>', examples=examples, labels=[1, 2, 3])
    assert page.text("h1") == 'A "title" <here>'
    assert page.text("#class") == "?"
    page.stroke("#pad", ring())
    drawn = check_answer(page, circuit)
    image = np.array(drawn).reshape(8, 8)
    assert 12 < image.max() <= 16
    assert (
        image[:, 0].max() == 0
    )  # a high ellipse fills the frame from top to bottom, not from side to side
    assert image[[0, 7]].max(1).all()
    assert image[3:5, 3:5].max() < 8  # and is empty in the middle
    page.stroke("#pad", [(0.3, 0.5), (0.5, 0.5)], release=False)
    halfway = check_answer(page, circuit)  # the answer changes while the pen is down
    page.stroke("#pad", [(0.7, 0.5)], press=False)
    assert len({tuple(pixels) for pixels in (drawn, halfway, check_answer(page, circuit))}) == 3
    page.click("#examples button:nth-child(2)")
    assert check_answer(page, circuit) == examples[1].tolist()
    page.click("#clear")
    assert page.run("lutjax.pixels()") == [0] * 64
    assert page.text("#class") == "?"
    page.click("#fit")
    page.stroke("#pad", [(0.1, 0.1), (0.1, 0.2)])
    image = np.array(check_answer(page, circuit)).reshape(8, 8)
    assert image[:3, :2].sum() == image.sum() > 0  # it stays where it is drawn


def test_drawing_with_the_keyboard_and_a_finger(opened):
    circuit = classifier_circuit(["votes", "class"], seed=1)
    page = opened(circuit, width=360, dark=True, maximum=31)
    page.run("document.getElementById('pad').focus()")
    page.press("ArrowUp", 6)
    page.press(" ")
    page.press("ArrowDown", 12)
    page.press(" ")
    image = np.array(check_answer(page, circuit)).reshape(8, 8)
    assert 12 < image.max() <= 31
    assert (image[:, 3:5].sum(1) > 0).all()
    assert image[:, [0, 1, 6, 7]].max() == 0
    page.press("Delete")
    assert page.run("lutjax.pixels()") == [0] * 64
    page.touch("#pad", ring())
    assert np.array(check_answer(page, circuit)).reshape(8, 8)[:, 3:5].any()
    assert fits(page)


@pytest.mark.parametrize("outputs", [["class"], ["only votes"]])
def test_class_or_votes_alone(opened, outputs):
    circuit = classifier_circuit(outputs, seed=2)
    page = opened(circuit, examples=np.random.default_rng(1).integers(0, 32, (1, 64)))
    assert page.run("document.getElementById('votes').hidden") == (outputs == ["class"])
    page.click("#examples button")
    check_answer(page, circuit)


def automaton_step(circuit, state, periodic):
    """Return the next state ``[channels, height, width]``."""
    height, width = state.shape[1:]
    padded = np.pad(state, ((0, 0), (1, 1), (1, 1)), mode="wrap" if periodic else "constant")
    near = [(y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1)] + [(1, 1)]
    bits = np.stack([padded[:, y : y + height, x : x + width] for y, x in near]).reshape(
        -1, height * width
    )
    return circuit(bits.T).reshape(height, width, -1).transpose(2, 0, 1).astype(np.uint8)


def cells(page, shape):
    return np.array(page.run("lutjax.cells()"), np.uint8).reshape(shape)


@pytest.mark.parametrize(
    ("height", "width", "periodic"), [(9, 20, True), (40, 70, False), (6, 64, True)]
)
def test_cells_after_some_steps(opened, height, width, periodic):
    about = {"kind": "automaton", "channels": 3, "periodic": periodic}
    options = {"arities": (2, 3), "ports": {"y": (3, Format())}, "about": about, "near": 300}
    circuit = random_circuit(height, 27, 300, **options)
    start = np.random.default_rng(width).integers(0, 2, (height, width, 3)).astype(bool)
    page = opened(circuit, start=start, shown=3)
    page.run("lutjax.play(false)")
    page.click("#start-given")
    state = np.moveaxis(start, -1, 0).astype(np.uint8)
    np.testing.assert_array_equal(cells(page, state.shape), state)
    seen = set()
    for _ in range(3):
        page.run("lutjax.step(2)")
        for _ in range(2):
            state = automaton_step(circuit, state, periodic)
        np.testing.assert_array_equal(cells(page, state.shape), state)
        seen.add(state.tobytes())
    assert len(seen) > 1
    assert page.run("lutjax.steps()") == 6


def test_some_cells_of_an_asynchronous_automaton_change(opened):
    about = {"kind": "automaton", "channels": 2, "periodic": True}
    circuit = random_circuit(
        5, 18, 60, arities=(2,), ports={"y": (2, Format())}, about=about, near=60
    )
    start = np.random.default_rng(0).integers(0, 2, (40, 70, 2)).astype(bool)
    page = opened(circuit, start=start, update_rate=0.25)
    page.run("lutjax.play(false)")
    page.click("#start-given")
    state = np.moveaxis(start, -1, 0).astype(np.uint8)
    page.run("lutjax.step(1)")
    new, after = automaton_step(circuit, state, True), cells(page, state.shape)
    differs = (new != state).any(0)
    updated = (after == new).all(0)
    assert (updated | (after == state).all(0)).all()
    assert abs(updated[differs].mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / differs.sum())


def test_the_rate_of_updates_is_said():
    assert "All cells change at once." in circuits.page.write(life_circuit())
    text = circuits.page.write(life_circuit(), update_rate=0.6)
    assert "In a step each cell changes with a probability of 0.6." in text
    assert data_of(text)["update_rate"] == 0.6


def test_life_is_damaged_where_it_is_clicked(opened):
    circuit = life_circuit(3)
    page = opened(circuit, size=(48, 64), width=390)
    page.run("lutjax.play(false)")
    shape = (3, 48, 64)
    page.click("#start-sparse")
    before = cells(page, shape)
    assert 0.2 < before[0].mean() < 0.4
    assert before[1:].max() == 0
    page.stroke("#grid", [(16.5 / 64, 12.5 / 48), (32.5 / 64, 12.5 / 48)])
    after = cells(page, shape)
    y, x = np.mgrid[:48, :64]
    away = np.hypot(y - 12, x - np.clip(x, 16, 32)) > 5
    assert after[:, ~away].max() == 0
    np.testing.assert_array_equal(after[:, away], before[:, away])
    page.stroke("#grid", [(16.5 / 64, 36.5 / 48)], modifiers=8)
    disc = np.hypot(y - 36, x - 16) <= 5
    painted = cells(page, shape)
    assert painted[0][disc].min() == 1
    np.testing.assert_array_equal(painted[0][~disc], after[0][~disc])
    page.click("#step")
    np.testing.assert_array_equal(cells(page, shape), automaton_step(circuit, painted, True))
    assert fits(page)
    # With the keyboard: a mark is moved, and the brush used there.
    page.click("#start-empty")
    page.click("input[value=paint]")
    page.run("document.getElementById('grid').focus()")
    page.press("ArrowLeft", 3)
    page.press("ArrowUp")
    page.press("Enter")
    np.testing.assert_array_equal(cells(page, shape)[0], np.hypot(y - 23, x - 29) <= 5)
    page.press(" ")
    page.run("new Promise((done) => setTimeout(done, 400))")
    assert page.run("lutjax.steps()") > 0
    assert page.text("#play") == "Pause"


def test_any_circuit_has_switches(opened):
    inputs = {"a": (2, Format(4, 1, True)), "b": (5, Format())}
    ports = {"y": (3, Format()), "z": (2, Format(5, 2, True))}
    circuit = random_circuit(5, inputs, 60, ports=ports, about={"n": 1}, simplify=True)
    page = opened(circuit)
    generator = np.random.default_rng(0)
    for _ in range(3):
        a, b = generator.integers(-8, 8, 2).tolist(), generator.integers(0, 2, 5).tolist()
        page.run(f"lutjax.set('a', {a}), lutjax.set('b', {b})")
        y, z = circuit(np.array([a]) / 2, np.array([b]))
        assert page.run("lutjax.get('y')") == y[0].tolist()
        assert page.run("lutjax.get('z')") == (4 * z[0]).tolist()
        rows = [row.split() for row in page.text("#outputs table").splitlines()]
        assert [float(row[1]) for row in rows if row and row[0].startswith("z[")] == z[0].tolist()
    was = page.run("lutjax.get('y')")
    page.click("#inputs .bits button")
    page.click("#inputs .bits button")
    assert page.run("lutjax.get('y')") == was
    page.run(
        "const f = document.querySelector('#inputs input'); f.value = -99; f.dispatchEvent(new Event('change'))"
    )
    assert page.run("document.querySelector('#inputs input').value") == "-4"


def test_every_gate_is_a_dot(opened):
    """Check part by part for filled dots exactly at gates with answer 1; large parts use several rows."""
    circuit = random_circuit(7, 20, 900, arities=(2, 3))
    page = opened(circuit, width=700)
    bits = np.random.default_rng(2).integers(0, 2, 20)
    page.run(f"lutjax.set('x', {bits.tolist()})")
    literals = tuple(2 * (circuit.first_gate + gate) for gate in range(len(circuit)))
    every = dataclasses.replace(circuit, outputs=(Port("gate", len(circuit)),), literals=literals)
    filled = """[...document.querySelectorAll('#parts canvas')].map((canvas) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), dots = [];
      for (let y = 0; y < canvas.height; y += 3) {
        for (let x = 0; x < canvas.width; x += 3) {
          const [red, , blue, opaque] = data.slice(4 * (y * canvas.width + x));
          if (opaque) dots.push(blue - red > 100 ? 1 : 0);
        }
      }
      return dots;
    })"""
    result = page.run(filled)
    assert [len(dots) for dots in result] == [count for _, count in circuit.parts]
    assert list(itertools.chain(*result)) == every(bits[None])[0].tolist()
    rows = [row.split(":")[0] for row in page.text("#parts").splitlines() if ":" in row]
    assert rows == ["layer 1", "layer 2"]
    page.click("#measure")
    assert "gates a second" in page.text("#speed")


@pytest.mark.parametrize("kind", ["classifier", "automaton", "network"])
def test_controls_have_names_and_can_be_reached(opened, kind):
    makers = {
        "classifier": lambda: classifier_circuit(["votes", "class"]),
        "automaton": life_circuit,
        "network": lambda: random_circuit(0, {"a": (2, Format(3)), "b": (2, Format())}, 20),
    }
    page = opened(makers[kind](), width=360)
    result = page.control_names()
    assert len(result) > 3
    assert all(result)
    n_tabs = len(result) + 4  # more than there are, as radio buttons are reached as one
    seen = set()
    for _ in range(n_tabs):
        page.press("Tab")
        seen.add(page.run("document.activeElement.id || document.activeElement.outerHTML"))
    ids = page.run(
        "[...document.querySelectorAll('button, canvas[tabindex]')].filter(e => !e.hidden && e.id).map(e => e.id)"
    )
    assert set(ids) <= seen
    assert fits(page)


@pytest.mark.slow
def test_a_grid_of_64_by_64_keeps_30_steps_a_second(opened):
    about = {"kind": "automaton", "channels": 16, "periodic": False}
    circuit = random_circuit(
        0, 144, 3000, arities=(2,), ports={"y": (16, Format())}, about=about, near=2000
    )
    page = opened(circuit)
    page.run("lutjax.play(false)")
    milliseconds = page.run(
        "(() => { const t = performance.now(); lutjax.step(60); return performance.now() - t; })()"
    )
    assert milliseconds < 2000


def test_only_stated_images_are_images():
    """A square input count may come from table columns."""
    about = {"kind": "classifier", "n_classes": 2, "classes": ["low", "<b>"]}
    circuit = random_circuit(0, {"x": (9, Format())}, 5, ports={"y": (1, Format())}, about=about)
    for image, kind in (
        ({}, "network"),
        ({"image": None}, "network"),
        ({"image": [3, 3]}, "classifier"),
    ):
        stated = dataclasses.replace(circuit, about={**about, **image})
        assert data_of(circuits.page.write(stated))["kind"] == kind
    data = data_of(circuits.page.write(circuit))
    assert data["about"]["classes"] == ["low", "<b>"]
    assert "tells 2 classes apart: low, &lt;b&gt;." in circuits.page.write(circuit)
    named = dataclasses.replace(circuit, about={**about, "input_names": list("abcdefghi")})
    assert data_of(circuits.page.write(named))["about"]["input_names"] == list("abcdefghi")
    for wrong, message in (
        ({"classes": ["low"]}, r"about\['classes'\] has 1 names; expected 2"),
        ({"input_names": ["a"]}, r"about\['input_names'\] has 1 names; expected 9"),
        ({"classes": [1, 2]}, r"about\['classes'\] is \[1, 2\]; expected a list of texts"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(circuit, about={**about, **wrong})


def test_the_page_counts_the_gates_of_the_export():
    config = LogicClassifierConfig(in_features=4, n_classes=3, layers=(12, 12), n_thresholds=2)
    model = LogicClassifier(config, thresholds=np.tile([[0.5, 1.5]], (4, 1)), rngs=nnx.Rngs(0))
    votes, whole = (
        model.circuit(inputs="uint2", outputs=outputs) for outputs in ("votes", "class")
    )
    counts = circuits.statistics.gate_counts(whole)
    assert list(counts) == ["encoder", "layers", "votes", "argmax"]
    assert sum(counts.values()) == len(whole) == len(votes) + counts["argmax"] > len(votes)
    text = circuits.page.write(votes, exported=whole)
    assert f"A circuit of {len(whole)} gates" in text
    inside = f"The circuit has {circuits.statistics.gates_in_words(votes)}. The exported circuit has {circuits.statistics.gates_in_words(whole)}"
    assert f"{inside}; the page computes argmax itself. A gate" in text
    assert f"{len(whole)} gates (encoder {counts['encoder']}, layers" in text
    assert "exported circuit" not in circuits.page.write(whole, exported=whole)
