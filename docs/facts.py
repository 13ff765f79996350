"""Generate sentences of pages from the catalog of kernels.

Each sentence stands between two comments, ``<!-- NAME -->`` and ``<!-- end -->``. After a change of the catalog

    python docs/facts.py

updates all pages.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from lutjax.dispatch.catalog import KERNELS, NATIVE, TENSORCORE, TRITON, XLA

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "start", "choose", "reference", "appendix")
PAGES = tuple(page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md")))


def listed(ops: Iterable[str]) -> str:
    """Return names of ops as a sentence has them."""
    *first, last = (f"`{op}`" for op in ops)
    return f"{', '.join(first)} and {last}" if first else last


def minutes() -> tuple[float, float]:
    """Return the minutes that `lutjax train lm` takes with native kernels and in plain JAX, of the table on the page of tables."""
    text = (ROOT / "docs" / "appendix" / "feed-forward.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `scored_lut`(?: in (plain JAX))? \| [\d,]+ \| \d+ \| (?:\d+ to )?(\d+) \|", text, re.MULTILINE
    )
    seconds = {kind: int(most) for kind, most in rows}
    return seconds[""] / 60, seconds["plain JAX"] / 60


def facts() -> dict[str, str]:
    """Return the sentences, or parts of them, by name."""
    without_triton = listed(op for op, row in KERNELS.items() if TRITON not in row)
    without_tensorcore = listed(op for op, row in KERNELS.items() if TENSORCORE not in row)
    with_update = listed(op for op, row in KERNELS.items() if "update" in row.get(XLA, ()))
    without_native = listed(op for op, row in KERNELS.items() if NATIVE not in row)
    return {
        "platforms": f"All ops except {without_triton} also have Triton kernels for NVIDIA GPUs, and all except {without_native} have native "
        "CPU kernels in `./native`.",
        "no triton": f"{without_triton} have no Triton kernel: on GPUs XLA compiles them.",
        "ops without triton": without_triton,
        "ops without tensorcores": without_tensorcore,
        "ops without native": without_native,
        "ops with update": with_update,
        "minutes of lm": f"{minutes()[0]:.1f} minutes on two CPU cores with native kernels, {minutes()[1]:.1f} in plain JAX",
        "minutes of native lm": f"{minutes()[0]:.1f} minutes",
        "minutes of plain lm": f"{minutes()[1]:.1f} minutes",
    }


def written(page: str) -> str:
    """Return a page with its sentences as they are now."""
    for name, text in facts().items():
        page = re.sub(
            rf"(<!-- {name} -->).*?(<!-- end -->)",
            lambda m, text=text: f"{m[1]}{text}{m[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


def main() -> None:
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if written(before) != before:
            page.write_text(written(before), encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
