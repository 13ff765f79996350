"""The page of these rows, `docs/coverage.md`: written with the errors of a run, and read back to compare it."""

import hashlib
import importlib.metadata
import re

from folders import DOCS

from coverage_rows import SECTIONS
from coverage_rows._row import GRADIENT_TOLERANCE, STEP, VALUE_TOLERANCE, Row, Section

PATH = DOCS / "coverage.md"

_INTRODUCTION = """# JAX equivalents for common kernels

Custom runtimes publish lists of training kernels. This page follows one such list, the kernel status of a runtime
for CUDA, HIP and OpenCL: {sections} sections with {rows} kernels. (Its own summary counts 118, because it omits sections 11
and 12, with 23 kernels, and 4 losses.) In JAX, each kernel is a JAX, Flax or Optax call or a few lines of code, and each
backward kernel is the gradient of the forward kernel. lutjax reimplements none of them. The last section adds
{more} kernels from families that JAX libraries provide.

The checks execute the code below in one `jax.jit`, in float64 on a CPU. `jnp` is `jax.numpy`, and a kernel name in
another kernel's code stands for its code. The last columns show the largest relative errors in
the run that wrote this page ({versions}):

- *value*: against a NumPy reference written from the definition. Backward kernels are compared with a formula derived
  by hand. At most {value:.0e}.
- *gradient*: every cotangent, against central differences of the reference with step {step:.0e}. At most {gradient:.0e}.

Errors are relative to the largest magnitude in the array. A cell without a number states the reason, or is empty if no
formula was derived. Run the checks from the folder `tests/support`:

```sh
python -m coverage_rows          # checks every row
python -m coverage_rows --write  # and writes this page
```

`pytest -m slow tests/repository/test_coverage.py` runs the same checks. The default tests check one row per section, and
compare the page with the code and with its digest.
"""

Cells = dict[tuple[str, str], tuple[str, str]]


def versions() -> str:
    """Return the versions that a run of the checks ran on."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax"))


def cells(row: Row, value: float | None, gradient: float | None) -> tuple[str, str]:
    """Errors as the page shows them: one digit."""
    return _error(value), row.no_gradient or _error(gradient)


def render(measured: Cells, ran_on: str) -> str:
    text = _INTRODUCTION.format(
        sections=len(SECTIONS) - 1,
        rows=sum(len(section.rows) for section in SECTIONS[:-1]),
        more=len(SECTIONS[-1].rows),
        versions=ran_on,
        value=VALUE_TOLERANCE,
        gradient=GRADIENT_TOLERANCE,
        step=STEP,
    )
    for number, section in enumerate(SECTIONS, 1):
        text += f"\n## {number}. {section.title}\n\n"
        text += "".join(f"{remark}\n" for remark in section.remarks) + "\n" * bool(section.remarks)
        text += "| kernel | served by | value | gradient |\n| --- | --- | --: | --: |\n"
        text += "".join(_line(section, row, measured) for row in section.rows)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}\n<!-- SHA-256 of all above, written with it: {digest} -->\n"


def is_written(text: str) -> bool:
    """Return whether `render` wrote a page from the rows as they are, and nobody has changed it since."""
    return render(*read(text)) == text


def read(text: str) -> tuple[Cells, str]:
    """The errors that a page shows, and what they were measured on."""
    measured, title = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = line.split(". ", 1)[1]
        elif line.startswith("| ") and not line.startswith(("| kernel", "| ---")):
            name, value, gradient = (line.split(" | ")[at].strip("| ") for at in (0, -2, -1))
            measured[title, name] = value, gradient
    return measured, re.search(r"the run that wrote this page \((.*)\):", text).group(1)


def names_of(document: str) -> list[tuple[str, str]]:
    """Section and kernel of each row of the document that the page goes through."""
    found, title = [], ""
    for line in document.splitlines():
        if heading := re.fullmatch(r"##\s+(?:(\d+\.)\s+)?(.*)", line):
            title = heading[2] if heading[1] else ""
        elif (
            title
            and (row := re.fullmatch(r"\|\s*([\w/]+)\s*\|.*\|.*\|.*\|.*\|", line))
            and row[1] != "Kernel"
        ):
            found.append((title, row[1]))
    return found


def names() -> list[tuple[str, str]]:
    return [(section.title, row.name) for section in SECTIONS for row in section.rows]


def _line(section: Section, row: Row, measured: Cells) -> str:
    code = "<br>".join(f"`{statement}`" for statement in row.code).replace("|", "\\|")
    remark = " ".join(row.remark.split())
    return f"| {row.name} | {code}{'<br>' * bool(remark)}{remark} | {' | '.join(measured[section.title, row.name])} |\n"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.0e}" if error else "exact"
