"""Animation of a lookup-table layer: `python docs/lookup.py --svg docs/lookup.svg`.

lutjax computes all bits, rows and outputs. The page includes the SVG as text, so it follows the
site's light or dark colors.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import lutjax

SAMPLES = np.array(
    [[0.7, -0.4, 0.2, 0.9], [-0.5, 0.6, 0.3, -0.2], [0.4, 0.1, -0.8, -0.3]], np.float32
)
ANCHORS = np.array([[[0, 1], [2, 3]], [[3, 0], [1, 2]]], np.int32)
TABLES = np.array(
    [
        [[-1, 0.4], [2, 1.1], [0.5, -0.7], [-0.5, 1.6]],
        [[1.2, 0.3], [-0.8, 0.9], [0.6, -1.5], [1.5, 0.2]],
    ],
    np.float32,
)
SECONDS = 5
"""For each sample: its bits appear after a fifth of them, then its rows, then its outputs."""

TOPS = (40, 170)
ROW, CELL, LEFT = 26, 52, 308


def _text(x: float, y: float, words: str, classes: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{classes}" text-anchor="{anchor}">{words}</text>'


def _group(classes: str, parts: list[str], number: int) -> str:
    delay = (number - len(SAMPLES)) * SECONDS
    return f'<g class="{classes}" style="animation-delay: {delay}s">{"".join(parts)}</g>'


def _number(value: float) -> str:
    return f"{value:.1f}".replace("-", "\N{MINUS SIGN}")


def _style() -> str:
    share = 100 / len(SAMPLES)
    rules = [
        ".lookup text { font: 15px var(--pst-font-family-base, sans-serif); }",
        ".lookup text { fill: var(--pst-color-text-base, #222); }",
        ".lookup .code { font-family: var(--pst-font-family-monospace, monospace); }",
        ".lookup .muted { fill: var(--pst-color-text-muted, #666); }",
        ".lookup .frame { stroke: var(--pst-color-border, #bbb); fill: none; }",
        ".lookup .bar { fill: var(--pst-color-text-muted, #666); }",
        ".lookup .line { stroke: var(--pst-color-primary, #0a58ca); stroke-width: 2; fill: none; }",
        ".lookup .row { fill: var(--pst-color-primary, #0a58ca); opacity: 0.25; }",
        f".lookup .phase {{ opacity: 0; animation: {len(SAMPLES) * SECONDS}s step-end infinite; }}",
    ]
    for phase in range(4):
        frames = [
            "" if phase == 0 else "0% { opacity: 0 } ",
            f"{share * phase / 5:.2f}% {{ opacity: 1 }} ",
            f"{share:.2f}% {{ opacity: 0 }} ",
        ]
        rules += [
            f".lookup .phase{phase} {{ animation-name: lookup{phase}; }}",
            f"@keyframes lookup{phase} {{ {''.join(frames)}}}",
        ]
    rules += [
        ".lookup-stop:checked ~ .lookup .phase { animation-play-state: paused; }",
        "@media (prefers-reduced-motion: reduce) {",
        ".lookup .phase { animation: none; } .lookup .sample0 { opacity: 1; }",
        ".lookup-stop, .lookup-stop + label { display: none; } }",
    ]
    return "\n".join(rules)


def _layer() -> list[str]:
    """Return the elements common to all samples."""
    parts = [
        _text(75, 18, "inputs", "muted", "middle"),
        _text(212, 18, "comparisons", "muted", "middle"),
    ]
    parts += [
        _text(LEFT + CELL, 18, "tables", "muted", "middle"),
        _text(517, 18, "sum of rows", "muted", "middle"),
    ]
    parts += [_text(30 + 30 * i, 275, f"x{i}", "code", "middle") for i in range(SAMPLES.shape[1])]
    parts.append('<path d="M15 150 H135" class="frame"/>')
    for table, top in zip(TABLES, TOPS, strict=True):
        for row, values in enumerate(table):
            y = top + ROW * row
            parts.append(_text(LEFT - 6, y + 18, f"{row:02b}", "code muted", "end"))
            for column, value in enumerate(values):
                x = LEFT + CELL * column
                parts.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{ROW}" class="frame"/>')
                parts.append(_text(x + CELL / 2, y + 18, _number(value), "", "middle"))
    return parts


def _sample(number: int) -> list[str]:
    """Return the inputs, bits, rows and outputs for one sample."""
    x = SAMPLES[number]
    index = np.asarray(lutjax.detect(jnp.asarray(x), jnp.asarray(ANCHORS)).index)
    outputs = np.asarray(lutjax.lut(jnp.asarray(x), jnp.asarray(TABLES), jnp.asarray(ANCHORS)))
    bars, bits, rows = [], [], []
    for i, value in enumerate(x):
        height = 90 * abs(value)
        top = 150 - height if value > 0 else 150
        bars.append(
            f'<rect x="{20 + 30 * i}" y="{top:.1f}" width="20" height="{height:.1f}" class="bar"/>'
        )
    for pairs, row, top in zip(ANCHORS, index, TOPS, strict=True):
        for pair, (a, b) in enumerate(pairs):
            bits.append(
                _text(160, top + 45 + 26 * (1 - pair), f"x{a} &gt; x{b}? {row >> pair & 1}", "code")
            )
        y = top + ROW * row
        rows.append(f'<rect x="{LEFT}" y="{y}" width="{2 * CELL}" height="{ROW}" class="row"/>')
        rows.append(f'<path d="M258 {top + 53} L278 {y + 13}" class="line"/>')
    sums = []
    for output, total in enumerate(outputs):
        a, b = (float(table[row, output]) for table, row in zip(TABLES, index, strict=True))
        sign = "+" if b >= 0 else "\N{MINUS SIGN}"
        y = 120 + 60 * output
        sums.append(_text(440, y, f"y{output} = {_number(a)} {sign} {_number(abs(b))}", "code"))
        sums.append(
            _text(440, y + 22, f"   = {_number(float(total))}".replace(" ", "&#160;"), "code")
        )
    return [
        _group(f"phase phase{phase} sample{number}", parts, number)
        for phase, parts in enumerate((bars, bits, rows, sums))
    ]


def draw() -> str:
    """Return the animation with a checkbox to stop it."""
    words = (
        "A layer with two detectors. Each makes two comparisons of four inputs; "
        "their bits select a row of its table; the selected rows are added up. "
        "Three samples take turns."
    )
    parts = [*_layer(), *(part for number in range(len(SAMPLES)) for part in _sample(number))]
    lines = [
        '<div class="lookup-box">',
        f"<style>\n{_style()}\n</style>",
        '<input type="checkbox" id="lookup-stop" class="lookup-stop">',
        '<label for="lookup-stop">Pause</label>',
        f'<svg viewBox="0 0 620 290" class="lookup" role="img" aria-label="{words}" width="100%">',
        *parts,
        "</svg>",
        "</div>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the animation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svg", type=Path, required=True)
    parser.parse_args().svg.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
