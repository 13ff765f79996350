"""Gallery pages that run in a browser without a network: `python docs/gallery.py [NAME ...]`.

Each page holds a circuit trained here and written by `lutjax.circuits.page`, or a filled template. The repository keeps the pages
in ``docs/gallery/pages/play``, and the site build copies them: training takes minutes on two cores, needs a compiler and ABC, and
yields other circuits on other processors. After a template change, `--write` rewrites the pages with their current circuits.
"""

import argparse
import base64
import gzip
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

FOLDER = Path(__file__).parent / "gallery"
PLAY = FOLDER / "pages" / "play"


def _text(name: str) -> str:
    return (FOLDER / "templates" / name).read_text(encoding="utf-8")


def shown(name: str, circuit: Any) -> str:
    """Return the page for a circuit."""
    from lutjax.circuits import page
    from lutjax.training import datasets

    if name == "life":
        return page.write(circuit, f"Life in {len(circuit)} gates", size=(64, 96))
    if name == "healing":
        return page.write(circuit, "An automaton that heals", size=(32, 32), start="random", shown=1)
    test = datasets.load().parts(stratified=True, bits=8).test
    examples, labels = np.asarray(test.x[:24]).astype(int), np.asarray(test.y[:24])
    return page.write(circuit, "A circuit that reads digits", examples=examples, labels=labels, maximum=16)


def rewritten(name: str, text: str) -> str:
    """Render a page again from the content of an earlier page."""
    from lutjax.circuits import page

    if name == "detector":
        return detector()
    if name == "text":
        found = re.search(r'<script type="application/json" id="model">(.*?)</script>', text, re.DOTALL)
        if found is None:
            raise ValueError("the page has no model")
        return _text_page(json.loads(found[1]))
    return shown(name, page.read(text))


def digits() -> str:
    """Return a page that reads drawn digits with three gate layers, trained with a hardware cost."""
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


def _automaton(experiment: str, target: np.ndarray | None, **fields: Any) -> Any:
    """Return a `lutjax train ca` run with some changed fields."""
    from lutjax.models import LogicCAConfig
    from lutjax.training import presets
    from lutjax.training.automaton import Run, TrainingConfig

    values = {**presets.EXPERIMENTS[experiment], **fields, "experiment": experiment}
    configs = (
        presets.make(kind, presets.fields_of(kind, values)) for kind in (LogicCAConfig, TrainingConfig)
    )
    return Run(*configs, target)


def life() -> str:
    """Return a page that runs the Game of Life with the smallest circuit from ABC."""
    from lutjax import circuits
    from lutjax.training.export import optimized

    run = _automaton("life", None, steps=1500)
    state = run.init()
    for first in range(0, run.training.steps, 100):
        state, _ = run.advance(state, first, 100)
    if run.wrong(state):
        raise RuntimeError(
            f"the automaton has {run.wrong(state)} wrong bits after {run.training.steps} steps"
        )
    learned = run.best(state).circuit()
    circuit = optimized(circuits.tabulate(learned), "ands")
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
            f"healing: step {first + 50}, loss {float(np.mean(loss)):.2f}, {run.wrong(state)} wrong",
            flush=True,
        )
        if first >= 300 and run.wrong(state) == 0:
            break
    circuit = run.best(state).circuit()
    print(f"healing: {circuit}")
    return shown("healing", circuit)


def text() -> str:
    """Return a page that writes text: a table model as integer C, compiled to WebAssembly by Zig."""
    from lutjax import circuits
    from lutjax.models import LUTTransformerConfig
    from lutjax.training import presets
    from lutjax.training.lm import Run, TrainingConfig
    from lutjax.training.text import load_text

    sizes = {"n_anchors": 4, "n_position_bits": 3, "n_detectors": 16, "ffn_detectors": 24, "ffn_anchors": 7}
    values = {**presets.preset("lut", "demo"), **sizes, "steps": 2500}
    configs = [presets.make(c, presets.fields_of(c, values)) for c in (LUTTransformerConfig, TrainingConfig)]
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
        wasm = [
            "-target",
            "wasm32-freestanding",
            "-nostdlib",
            "-Wl,--no-entry",
            "-Wl,--strip-all",
            "-o",
            "text.wasm",
        ]
        subprocess.run([*compiler, *wasm, "text.c", "language_model.c", "tables.c"], cwd=folder, check=True)
        native = [*compiler, "-o", "language_model", "main.c", "language_model.c", "tables.c"]
        subprocess.run(native, cwd=folder, check=True)
        prompt, n, seed = "def ", 300, 7
        asked = ["./language_model", "-n", str(n), "-t", "0.6", "-s", str(seed), prompt]
        written = subprocess.run(asked, cwd=folder, check=True, capture_output=True).stdout
        packed = gzip.compress((Path(folder) / "tables.bin").read_bytes(), 9, mtime=0)
        program = (Path(folder) / "text.wasm").read_bytes()
    model = {
        "program": base64.b64encode(program).decode(),
        "tables": base64.b64encode(packed).decode(),
        "native": {"prompt": prompt, "n": n, "temperature": 0.6, "seed": seed, "bytes": list(written)},
    }
    lead = (
        f"{integers.n_values:,} whole numbers in tables, trained for {configs[1].steps} steps on Python's standard library (test loss {loss:.2f} nats a byte). To write a "
        f"byte it compares numbers, reads rows and adds them, without floating point. {len(program):,} bytes of program."
    )
    return _text_page({"lead": lead, **model})


def _text_page(model: dict[str, Any]) -> str:
    page = _text("text.html").replace("{{page.css}}", _css()).replace("{{lead}}", model["lead"])
    return page.replace("{{data}}", json.dumps(model))


def _css() -> str:
    return resources.files("lutjax.circuits").joinpath("templates", "page.css").read_text(encoding="utf-8")


def detector() -> str:
    """Return a page for one detector with draggable inputs and pairs."""
    data = {
        "x": [0.6, -0.3, 0.1, 0.8, -0.6, 0.35],
        "pairs": [[0, 1], [2, 3], [5, 4]],
        "table": [0.5, -1.0, 2.0, 1.25, -0.5, 3.0, 0.0, -2.0],
    }
    return _text("detector.html").replace("{{page.css}}", _css()).replace("{{data}}", json.dumps(data))


PAGES: dict[str, Callable[[], str]] = {
    "detector": detector,
    "digits": digits,
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
    given = parser.parse_args()
    names = given.names or list(PAGES)
    if unknown := set(names) - set(PAGES):
        sys.exit(f"{', '.join(unknown)}: the pages are {', '.join(PAGES)}")
    PLAY.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = PLAY / f"{name}.html"
        text = rewritten(name, path.read_text(encoding="utf-8")) if given.write else PAGES[name]()
        (PLAY / f"{name}.html").write_text(text, encoding="utf-8")
        print(f"written: {name}.html, {len(text.encode()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
