"""Animated pictures of cellular automata."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, UInt8

from lutjax.extras import require_optional

if TYPE_CHECKING:
    from lutjax.models import LogicCA
    from lutjax.training.automaton import Run

_MARGIN, _TITLE = 12, 28  # pixels: around panels, and height of a text line
_GAME_OF_LIFE = (64, 60)  # side in cells, and steps


def animate(
    panels: Mapping[str, UInt8[np.ndarray, "frames height width 3"]],
    path: Path,
    *,
    captions: list[str],
    side: int = 384,
    milliseconds: int = 150,
) -> None:
    """Write panels side by side as a GIF with square cells; the last frame stays longer.

    Args:
      panels: frames by title; a single frame is shown next to all frames of the other panels.
      path: the file to write.
      captions: text below each frame, one per frame.
      side: approximate panel width in pixels.
      milliseconds: time per frame.
    """
    with require_optional("lutjax.training.animation"):
        from PIL import Image, ImageDraw, ImageFont

    title_font, caption_font = ImageFont.load_default(18), ImageFont.load_default(15)
    height, width = next(iter(panels.values())).shape[1:3]
    scale = max(1, side // width)
    across = width * scale + _MARGIN
    size = (len(panels) * across + _MARGIN, height * scale + 2 * (_TITLE + _MARGIN))
    pictures = []
    for number, caption in enumerate(captions):
        picture = Image.new("RGB", size, "white")
        draw = ImageDraw.Draw(picture)
        for place, (title, frames) in enumerate(panels.items()):
            left, top = _MARGIN + place * across, _TITLE + _MARGIN
            draw.text((left, _MARGIN), title, "black", title_font)
            frame = frames[min(number, len(frames) - 1)]
            picture.paste(Image.fromarray(frame.repeat(scale, 0).repeat(scale, 1)), (left, top))
            edge = (left - 1, top - 1, left + width * scale, top + height * scale)
            draw.rectangle(edge, outline="gray")
        draw.text((_MARGIN, size[1] - _TITLE), caption, "black", caption_font)
        pictures.append(picture)
    colors = pictures[-1].quantize(16)  # complete palette, since the target contains all colors
    pictures = [picture.quantize(palette=colors, dither=Image.Dither.NONE) for picture in pictures]
    durations = [milliseconds] * (len(pictures) - 1) + [10 * milliseconds]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True
    )


def film(
    run: "Run", model: "LogicCA"
) -> tuple[dict[str, UInt8[np.ndarray, "frames height width 3"]], list[str]]:
    """Return the hard automaton and its target as panels by title, and a caption for each step."""
    from lutjax.training.automaton import life
    from lutjax.training.patterns import checkerboard

    training = run.training
    size, n_steps = training.size, training.n_steps
    if run.target is None:
        size, n_steps = _GAME_OF_LIFE
        states = _states(run, model, size, n_steps)
        truth = [states[0][..., 0]]
        for _ in range(n_steps):
            truth.append(np.asarray(life(truth[-1])))
        beside, expected = "the rule of the Game of Life", np.stack(truth)[..., None]
    else:
        target = run.target
        if training.start == "random" and np.array_equal(target, checkerboard(size)):
            size, n_steps = 2 * size + -size % 4, 2 * n_steps  # the same squares at each corner
            target = checkerboard(size)
        states = _states(run, model, size, n_steps)
        beside, expected = "target", np.moveaxis(target, 0, -1)[None]
    cells = states[..., : expected.shape[-1]]
    wrong = (cells != expected)[..., list(run.compared)].any(-1).sum((1, 2))
    captions = []
    for number, count in enumerate(wrong):
        are = "are" if count != 1 else "is"
        captions.append(
            f"step {number} of {n_steps}: {count} of {size * size} cells {are} different"
        )
    learned = f"circuit of {run.config.n_gates} gates"
    return {learned: _colors(cells), beside: _colors(expected)}, captions


def _states(
    run: "Run", model: "LogicCA", size: int, n_steps: int
) -> Bool[np.ndarray, "frames height width channels"]:
    import jax

    key = jax.random.key(2)
    state = np.zeros((size, size, run.config.channels), bool)
    if run.target is None:
        state[..., 0] = jax.random.bernoulli(key, 0.3, (size, size))
    elif run.training.start == "random":
        state = np.asarray(jax.random.bernoulli(key, shape=state.shape))
    elif run.training.start == "seed":
        state[size // 2, size // 2] = True
    return np.asarray(model.rollout(state, n_steps, key=key, deterministic=True))


def _colors(
    bits: Bool[np.ndarray, "frames height width bits"],
) -> UInt8[np.ndarray, "frames height width 3"]:
    """Map three bits to red, green and blue; otherwise show the first bit as white."""
    bits = bits if bits.shape[-1] == 3 else np.repeat(bits[..., :1], 3, -1)
    return np.where(bits, 255, 0).astype(np.uint8)
