"""Pictures that automata learn: `python benchmarks/automaton_images.py [--only NAME ...] [--set FIELD=VALUE ...] [--png FILE]`.

Each picture is drawn here, learned as `lutjax train ca --target` does with one automaton (``runs=1``), and a row says what it needed: a test every 50 steps
counts the wrong bits of the hard automaton, and three without one, one after the other, end the run. ``--png`` draws targets beside what was
learned.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from automaton_seeds import trained
from harness import fields_of, head, markdown_row, options  # beside this file
from PIL import Image, ImageDraw

from lutjax.training.automaton_runs import Automaton

COLORS = {"red": (255, 0, 0), "yellow": (255, 255, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)


def face(size: int) -> Image.Image:
    """A yellow face on black: eyes are blue, the mouth is red."""
    image, unit = Image.new("RGB", (size, size)), size / 16
    draw = ImageDraw.Draw(image)
    draw.ellipse((unit, unit, 14 * unit, 14 * unit), COLORS["yellow"])
    for x in (4, 9):
        draw.rectangle((x * unit, 4 * unit, (x + 1.5) * unit, 6 * unit), COLORS["blue"])
    draw.rectangle((4 * unit, 9.5 * unit, 11 * unit, 11 * unit), COLORS["red"])
    return image


def boat(size: int) -> Image.Image:
    """A boat with two sails under a sun, on waves: seven colors."""
    image, unit = Image.new("RGB", (size, size), (0, 255, 255)), size / 16
    draw = ImageDraw.Draw(image)
    draw.ellipse((11 * unit, unit, 14.5 * unit, 4.5 * unit), COLORS["yellow"])
    draw.polygon([(7 * unit, 2 * unit), (7 * unit, 10 * unit), (1.5 * unit, 10 * unit)], _WHITE)
    draw.polygon([(8.5 * unit, 4 * unit), (8.5 * unit, 10 * unit), (12 * unit, 10 * unit)], (255, 0, 255))
    draw.polygon([(unit, 11 * unit), (14 * unit, 11 * unit), (11 * unit, 13.5 * unit), (4 * unit, 13.5 * unit)], COLORS["red"])  # fmt: skip
    draw.rectangle((0, 14 * unit, size, size), COLORS["blue"])
    return image


def key(size: int) -> Image.Image:
    """A white key on black."""
    image, unit = Image.new("RGB", (size, size)), size / 16
    draw = ImageDraw.Draw(image)
    draw.ellipse((unit, 4 * unit, 7 * unit, 10 * unit), _WHITE)
    draw.ellipse((3 * unit, 6 * unit, 5 * unit, 8 * unit), _BLACK)
    draw.rectangle((7 * unit, 6.5 * unit, 14 * unit, 8 * unit), _WHITE)
    for x in (10, 13):
        draw.rectangle((x * unit, 8 * unit, (x + 1) * unit, 10.5 * unit), _WHITE)
    return image


def _three(bits: np.ndarray) -> np.ndarray:
    return bits if bits.shape[-1] == 3 else np.repeat(bits, 3, -1)


PICTURES = {
    f"{draw.__name__} {size}": (draw, size)
    for draw, size in (
        (key, 16), (face, 16), (boat, 16), (key, 24), (face, 24), (boat, 24), (key, 32), (boat, 32), (boat, 48), (boat, 64),
    )
}  # fmt: skip


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=PICTURES, default=list(PICTURES), metavar="NAME")
    parser.add_argument("--set", nargs="+", default=[], help="fields of its configs, with values as in JSON")
    parser.add_argument("--png", type=Path, help="draw targets above what was learned")
    arguments = parser.parse_args()
    names = (
        "picture",
        "colors",
        "channels",
        "gates",
        "steps of the automaton",
        "wrong bits",
        "training steps",
        "seconds",
    )
    print(head(names))
    drawn = []
    for name in arguments.only:
        draw, size = PICTURES[name]
        start, picture = time.perf_counter(), draw(size)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "picture.png"
            picture.save(path)
            values = {"runs": 1} | fields_of(arguments.set)
            experiment = Automaton.new(values, "picture", path)
        tests, _, state = trained(experiment)
        run, config = experiment.run, experiment.run.config
        first, _ = run.sample(jax.random.key(0), 1)
        last = run.best(state)(
            np.moveaxis(np.asarray(first), 0, -1), run.training.n_steps, deterministic=True
        )
        cells = (
            name, len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0)), config.channels, config.n_gates,
            run.training.n_steps, f"{min(wrong for _, (wrong,) in tests):g}", tests[-1][0],
            f"{time.perf_counter() - start:.0f}",
        )  # fmt: skip
        print(markdown_row(cells), flush=True)
        drawn.append((np.asarray(picture), _three(np.asarray(last)[0, ..., : len(run.target)])))
    if arguments.png:
        from PIL import ImageOps

        side = 192
        sheet = Image.new("RGB", ((side + 8) * len(drawn), 2 * (side + 8)), "white")
        for column, (target, learned) in enumerate(drawn):
            for row, pixels in enumerate((target, np.where(learned, 255, 0).astype(np.uint8))):
                tile = Image.fromarray(pixels).resize((side, side), Image.Resampling.NEAREST)
                sheet.paste(ImageOps.expand(tile, 1, "gray"), (column * (side + 8), row * (side + 8)))
        sheet.save(arguments.png)


if __name__ == "__main__":
    main()
