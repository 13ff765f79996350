"""Gallery pages that run in a browser without a network: `python docs/gallery.py [NAME ...]`.

Each page holds a circuit trained here and written by `lutjax.circuits.page`, or a filled template.
The repository keeps the pages in ``docs/gallery/pages/play``, and the site build copies them:
training takes minutes on two cores, needs a compiler and ABC, and yields other circuits on other
processors. After a template change, `--write` rewrites the pages with their current circuits.
"""

import argparse
import base64
import functools
import gzip
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Folder of the Debian package dataset-fashion-mnist."""
PIXEL_BITS = 5
"""Bits per pixel of Fashion-MNIST on its page; 8 bits would need twice as many gates."""

FOLDER = Path(__file__).parent / "gallery"
PLAY = FOLDER / "pages" / "play"


def _text(name: str) -> str:
    return (FOLDER / "templates" / name).read_text(encoding="utf-8")


def shown(name: str, circuit: Any, examples: Any = None, labels: Any = None) -> str:
    """Return the page for a circuit; only Fashion-MNIST takes its examples from the caller."""
    from lutjax.circuits import page
    from lutjax.training import datasets

    if name == "life":
        return page.write(circuit, f"Life in {len(circuit)} gates", size=(64, 96))
    if name == "healing":
        options = {"size": (32, 32), "start": "random", "shown": 1}
        return page.write(circuit, "An automaton that heals", **options)
    if name == "fashion":
        options = {"examples": np.asarray(examples).astype(int), "labels": labels}
        options["maximum"] = 2**PIXEL_BITS - 1
        return page.write(circuit, "A circuit that reads clothes", **options)
    test = datasets.load().parts(stratified=True, bits=8).test
    options = {"examples": np.asarray(test.x[:24]).astype(int), "labels": np.asarray(test.y[:24])}
    return page.write(circuit, "A circuit that reads digits", **options, maximum=16)


def rewritten(name: str, text: str) -> str:
    """Render a page again from the content of an earlier page."""
    from lutjax.circuits import page

    if name == "detector":
        return detector()
    if name == "text":
        return _text_page(_data_of(text, "model"))
    if name == "fashion":
        data = _data_of(text, "circuit")
        return shown(name, page.read(text), data["examples"], data["labels"])
    return shown(name, page.read(text))


def _data_of(page: str, name: str) -> Any:
    """Return the JSON that a page holds for its script."""
    tag = rf'<script type="application/json" id="{name}">(.*?)</script>'
    match = re.search(tag, page, re.DOTALL)
    if match is None:
        raise ValueError(f"the page has no {name}")
    return json.loads(match[1])


def digits() -> str:
    """Return a page that reads drawn digits by three gate layers, trained with a hardware cost."""
    from lutjax.models import LogicClassifierConfig
    from lutjax.training import datasets
    from lutjax.training.classifier import Run, TrainingConfig

    parts = datasets.load().parts(stratified=True, bits=8)
    config = LogicClassifierConfig(64, 10, layers=(2000, 2000, 1000), tau=4.0)
    training = TrainingConfig(steps=12000, gate_cost=0.02)
    run = Run(config, training, parts.train)
    state = run.init()
    for first in range(0, training.steps, 500):
        state, _ = run.advance(state, first, 500)
    share = run.accuracy(state, parts.test, hard=True)
    model = run.structure.model(state.params, state.others)
    circuit = model.circuit(inputs="uint5", outputs="votes", about={"image": [8, 8]})
    print(f"digits: {share:.1%} of the test part, {circuit}")
    return shown("digits", circuit)


def fashion() -> str:
    """Return a page that reads images of clothes, by the recipe for Fashion-MNIST."""
    from lutjax.training.classifier_runs import Classifier

    experiment = Classifier.create({"seed": 0}, FASHION_MNIST, recipe="fashion-mnist-small")
    run = experiment.run
    state = run.init()
    for first in range(0, run.training.steps, 500):
        state, _ = run.advance(state, first, 500)
    circuit = run.structure.model(state.params, state.others).circuit()
    return fashion_page(circuit, experiment.test.x, experiment.test.y)


def fashion_page(circuit: Any, images: np.ndarray, labels: np.ndarray) -> str:
    """Return the page of a circuit that reads the bits of `fashion`, with images as examples."""
    circuit = with_pixels(circuit, PIXEL_BITS)
    x = images >> 8 - PIXEL_BITS
    predicted = np.concatenate([np.ravel(circuit(part)) for part in np.array_split(x, 10)])
    print(f"fashion: {(predicted == labels).mean():.2%} of the test part, {circuit}")
    return shown("fashion", circuit, x[:24], labels[:24].tolist())


def with_pixels(circuit: Any, bits: int) -> Any:
    """Return a circuit that compares only the highest bits of pixels and edges with thresholds."""
    from lutjax.circuits import Builder, Format
    from lutjax.circuits.arithmetic import above_constant
    from lutjax.circuits.builder import ONE, ZERO

    height, width = circuit.about["image"]
    size, unit = height * width, 1 << 8 - bits
    thresholds = np.array(circuit.about["thresholds"])
    # Coarser differences are also rounded, so that their thresholds lie in the middle.
    levels = np.floor((thresholds + 0.5) / unit).astype(int)
    levels[:size] = thresholds[:size] // unit
    builder = Builder()
    pixels = builder.input("x", size, Format(bits))
    builder.start_part("encoder")

    def add(a: list[int], b: list[int], carry: int) -> list[int]:
        total = []
        for pair in zip(a, b, strict=True):
            total.append(builder.gate([*pair, carry], 0b10010110))
            carry = builder.gate([*pair, carry], 0b11101000)
        return total

    @functools.cache
    def value(number: int) -> list[int]:
        """Return the bits of a pixel, or of an edge in two's complement."""
        kind, place = divmod(number, size)
        if not kind:
            return pixels[place]
        row, column = divmod(place, width)
        steps = ((0, -1), (0, 1)) if kind % 2 else ((-1, 0), (1, 0))
        before, after = (
            pixels[np.clip(row + y, 0, height - 1) * width + np.clip(column + x, 0, width - 1)]
            for y, x in steps
        )
        if kind <= 2:
            return add([*after, ZERO], [*(bit ^ 1 for bit in before), ONE], ONE)
        sum_of_both = add([*after, ZERO], [*before, ZERO], ZERO)
        return add([*sum_of_both, ZERO], [ONE, *(bit ^ 1 for bit in pixels[place]), ONE], ONE)

    read = {*itertools.chain(*circuit.fanins), *(k >> 1 for k in circuit.literals)}
    literals = [ZERO] * circuit.first_gate
    for node in sorted(read & set(range(1, circuit.first_gate))):
        feature, k = divmod(node - 1, thresholds.shape[1])
        level, signed = int(levels[feature, k]), feature >= size
        literals[node] = above_constant(builder, value(feature), level, signed=signed)
    for name, gates in circuit.part_ranges.items():
        builder.start_part(name)
        for gate in gates:
            fanin = [literals[node] for node in circuit.fanins[gate]]
            literals.append(builder.gate(fanin, circuit.tables[gate]))
    (port,) = circuit.outputs
    outputs = [literals[k >> 1] ^ k & 1 for k in circuit.literals]
    builder.output(port.name, np.reshape(outputs, (port.count, -1)).tolist(), port.format)
    facts = ("kind", "n_classes", "layers", "classes", "image")
    return builder.circuit({name: circuit.about[name] for name in facts})


def _automaton(experiment: str, target: np.ndarray | None, **fields: Any) -> Any:
    """Return a `lutjax train ca` run with some changed fields."""
    from lutjax.models import LogicCAConfig
    from lutjax.training import presets
    from lutjax.training.automaton import Run, TrainingConfig

    values = {**presets.EXPERIMENTS[experiment], **fields, "experiment": experiment}
    model, training = (presets.make(kind, values) for kind in (LogicCAConfig, TrainingConfig))
    return Run(model, training, target)


def life() -> str:
    """Return a page that runs the Game of Life with the smallest circuit from ABC."""
    from lutjax import circuits
    from lutjax.training.export import optimize_circuit

    run = _automaton("life", None, steps=1500)
    state = run.init()
    for first in range(0, run.training.steps, 100):
        state, _ = run.advance(state, first, 100)
    if run.wrong(state):
        raise RuntimeError(
            f"the automaton has {run.wrong(state)} wrong bits after {run.training.steps} steps"
        )
    learned = run.best(state).circuit()
    circuit = optimize_circuit(circuits.tabulate(learned), "ands")
    print(f"life: {len(learned)} gates learned, {len(circuit)} AND nodes")
    return shown("life", circuit)


def healing() -> str:
    """Return a page with an automaton that draws squares from any start, and so heals damage."""
    from lutjax.training.patterns import checkerboard

    run = _automaton("checkerboard", checkerboard(16), steps=700, runs=1)
    state = run.init()
    for first in range(0, run.training.steps, 50):
        state, loss = run.advance(state, first, 50)
        print(
            f"healing: step {first + 50}, loss {float(np.mean(loss)):.2f}, "
            f"{run.wrong(state)} wrong",
            flush=True,
        )
        if first >= 300 and run.wrong(state) == 0:
            break
    circuit = run.best(state).circuit()
    print(f"healing: {circuit}")
    return shown("healing", circuit)


def text() -> str:
    """Return a page that writes text: a table model as integer C in WebAssembly, by Zig."""
    from lutjax import circuits
    from lutjax.models import LUTTransformerConfig
    from lutjax.training import presets
    from lutjax.training.lm import Run, TrainingConfig
    from lutjax.training.text import load_text

    # Smaller than the demo: a browser downloads the tables.
    sizes = {"n_anchors": 4, "n_position_bits": 3, "n_detectors": 16}
    sizes |= {"ffn_detectors": 24, "ffn_anchors": 7}
    values = {**presets.preset("lut", "demo"), **sizes, "steps": 2500}
    configs = [presets.make(kind, values) for kind in (LUTTransformerConfig, TrainingConfig)]
    data = load_text(context=configs[0].context)
    run = Run(*configs, data.train)
    state = run.init()
    for first in range(0, configs[1].steps, 250):
        state, losses = run.advance(state, first, 250)
        print(f"text: step {first + 250}, loss {float(np.mean(losses)):.3f}", flush=True)
    loss = run.evaluate(state, data.test, max_windows=512)
    integers = circuits.language_model.from_model(
        run.structure.model(state.params, state.others), tables="int8"
    )
    print(f"text: test loss {loss:.3f}, {integers.n_values:,} numbers")
    with tempfile.TemporaryDirectory() as folder:
        for name, content in integers.to_c(tables_in_file=True).items():
            Path(folder, name).write_bytes(content)
        (Path(folder) / "text.c").write_text(_text("text.c"))
        compiler = [sys.executable, "-m", "ziglang", "cc", "-std=c99", "-O2"]
        wasm = ["-target", "wasm32-freestanding", "-nostdlib", "-Wl,--no-entry", "-Wl,--strip-all"]
        subprocess.run(
            [*compiler, *wasm, "-o", "text.wasm", "text.c", "language_model.c", "tables.c"],
            cwd=folder,
            check=True,
        )
        native = [*compiler, "-o", "language_model", "main.c", "language_model.c", "tables.c"]
        subprocess.run(native, cwd=folder, check=True)
        prompt, n, seed = "def ", 300, 7
        asked = ["./language_model", "-n", str(n), "-t", "0.6", "-s", str(seed), prompt]
        written = subprocess.run(asked, cwd=folder, check=True, capture_output=True).stdout
        packed = gzip.compress((Path(folder) / "tables.bin").read_bytes(), 9, mtime=0)
        program = (Path(folder) / "text.wasm").read_bytes()
    written_bytes = {"bytes": list(written)}
    model = {
        "program": base64.b64encode(program).decode(),
        "tables": base64.b64encode(packed).decode(),
        # What the native program wrote: the page compares its own bytes.
        "native": {"prompt": prompt, "n": n, "temperature": 0.6, "seed": seed, **written_bytes},
    }
    lead = (
        f"{integers.n_values:,} whole numbers in tables, trained for {configs[1].steps} steps "
        f"on Python's standard library (test loss {loss:.2f} nats a byte). "
        "To write a byte it compares numbers, reads rows and adds them, "
        f"without floating point. {len(program):,} bytes of program."
    )
    return _text_page({"lead": lead, **model})


def _text_page(model: dict[str, Any]) -> str:
    page = _text("text.html").replace("{{page.css}}", _css()).replace("{{lead}}", model["lead"])
    return page.replace("{{data}}", json.dumps(model))


def _css() -> str:
    templates = resources.files("lutjax.circuits").joinpath("templates")
    return templates.joinpath("page.css").read_text(encoding="utf-8")


def detector() -> str:
    """Return a page for one detector with draggable inputs and pairs."""
    data = {
        "x": [0.6, -0.3, 0.1, 0.8, -0.6, 0.35],
        "pairs": [[0, 1], [2, 3], [5, 4]],
        "table": [0.5, -1.0, 2.0, 1.25, -0.5, 3.0, 0.0, -2.0],
    }
    return (
        _text("detector.html").replace("{{page.css}}", _css()).replace("{{data}}", json.dumps(data))
    )


PAGES: dict[str, Callable[[], str]] = {
    "detector": detector,
    "digits": digits,
    "fashion": fashion,
    "life": life,
    "healing": healing,
    "text": text,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PAGES)}; by default all")
    parser.add_argument(
        "--write",
        action="store_true",
        help="train nothing: keep the circuits and the model of the pages that there are",
    )
    arguments = parser.parse_args()
    names = arguments.names or list(PAGES)
    if unknown := set(names) - set(PAGES):
        sys.exit(f"{', '.join(unknown)}: the pages are {', '.join(PAGES)}")
    PLAY.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = PLAY / f"{name}.html"
        text = (
            rewritten(name, path.read_text(encoding="utf-8")) if arguments.write else PAGES[name]()
        )
        (PLAY / f"{name}.html").write_text(text, encoding="utf-8")
        print(f"written: {name}.html, {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
