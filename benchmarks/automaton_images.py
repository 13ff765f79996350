"""Pictures learned by automata: `python benchmarks/automaton_images.py [--only NAME ...] [--set FIELD=VALUE ...]`.

The script draws each picture and trains one automaton (``runs=1``) as `lutjax train ca --target` does. The hard automaton's wrong bits are counted every
50 steps; three consecutive tests without one end the run.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from automaton_seeds import train
from harness import parse, parse_fields, print_table  # beside this file
from PIL import Image, ImageDraw

from lutjax.training.automaton_runs import Automaton

BLACK, WHITE, RED, YELLOW, BLUE = (0, 0, 0), (255, 255, 255), (255, 0, 0), (255, 255, 0), (0, 0, 255)
CYAN, MAGENTA = (0, 255, 255), (255, 0, 255)

# Shapes, their corners on a 16 x 16 grid, and their colors; the first color is the background.
DRAWINGS: dict[str, tuple[Any, ...]] = {
    "face": (
        BLACK,
        ("ellipse", (1, 1, 14, 14), YELLOW),
        *(("rectangle", (x, 4, x + 1.5, 6), BLUE) for x in (4, 9)),
        ("rectangle", (4, 9.5, 11, 11), RED),
    ),
    "boat": (
        CYAN,
        ("ellipse", (11, 1, 14.5, 4.5), YELLOW),
        ("polygon", (7, 2, 7, 10, 1.5, 10), WHITE),
        ("polygon", (8.5, 4, 8.5, 10, 12, 10), MAGENTA),
        ("polygon", (1, 11, 14, 11, 11, 13.5, 4, 13.5), RED),
        ("rectangle", (0, 14, 16, 16), BLUE),
    ),
    "key": (
        BLACK,
        ("ellipse", (1, 4, 7, 10), WHITE),
        ("ellipse", (3, 6, 5, 8), BLACK),
        ("rectangle", (7, 6.5, 14, 8), WHITE),
        *(("rectangle", (x, 8, x + 1, 10.5), WHITE) for x in (10, 13)),
    ),
}
PICTURES = {
    f"{name} {size}": (name, size)
    for size, names in {
        16: "key face boat",
        24: "key face boat",
        32: "key boat",
        48: "boat",
        64: "boat",
    }.items()
    for name in names.split()
}


def draw(name: str, size: int) -> Image.Image:
    """Return a drawing in some size."""
    background, *shapes = DRAWINGS[name]
    image = Image.new("RGB", (size, size), background)
    canvas = ImageDraw.Draw(image)
    for shape, corners, color in shapes:
        getattr(canvas, shape)([size / 16 * corner for corner in corners], color)
    return image


def measure(names: list[str], values: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Train each picture, and yield its row."""
    for name in names:
        start, picture = time.perf_counter(), draw(*PICTURES[name])
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"
            picture.save(path)
            experiment = Automaton.new({"runs": 1} | values, "picture", path)
        tests, _, _ = train(experiment)
        run, config = experiment.run, experiment.run.config
        colors = len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0))
        sizes = config.channels, config.n_gates, run.training.n_steps
        wrong = f"{min(wrong for _, (wrong,) in tests):g}"
        yield name, colors, *sizes, wrong, tests[-1][0], f"{time.perf_counter() - start:.0f}"


def main() -> None:
    given = parse(__doc__, only=(PICTURES, "pictures"), set=([str], "fields of the configs"))
    names = (
        "picture | colors | channels | gates | steps of the automaton | wrong bits | training steps | seconds"
    )
    print_table(names, measure(given.only, parse_fields(given.set)))


if __name__ == "__main__":
    main()
