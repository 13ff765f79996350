"""Pictures of small circuits, laid out and drawn by Graphviz."""

import io
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from lutjax.circuits import dot
from lutjax.circuits.circuit import Circuit
from lutjax.extras import require_optional
from lutjax.files.messages import in_a_line
from lutjax.files.pictures import as_drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST = 200
"""Maximum gates for `draw`."""


def draw(circuit: Circuit, target: "str | Path | Axes", *, title: str | None = None) -> None:
    """Draw a small circuit from left to right with Graphviz.

    The drawing follows `lutjax.circuits.dot.write`: gates are labeled with their functions and
    grouped in boxes by part. A dashed edge with a circle inverts its value. Inputs without readers
    are omitted.

    Args:
      circuit: the circuit.
      target: picture file, with the format given by its suffix, or matplotlib axes.
      title: title above the picture.

    Raises:
      ValueError: the circuit has more than 200 gates, or Graphviz does not know the format.
      RuntimeError: Graphviz is not installed.
    """
    if len(circuit) > LARGEST:
        raise ValueError(
            f"draw: the circuit has {len(circuit)} gates; a picture holds up to {LARGEST}. "
            "Draw fewer of its outputs, or show it by `circuits.page`, where every gate is a dot."
        )
    program = shutil.which("dot")
    if program is None:
        raise RuntimeError(
            "draw: dot is not on the path; install Graphviz (on Debian "
            "and Ubuntu `apt install graphviz`), or show the circuit by `circuits.page`, "
            "which needs a browser alone."
        )
    path = Path(target) if isinstance(target, str | Path) else None
    text = dot.write(circuit, title=title if path else None)
    kind = path.suffix[1:].lower() if path else "png"
    command = [program, f"-T{kind or 'png'}"]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"draw: Graphviz says: {in_a_line(done.stderr.decode(errors='replace'))}")
    if isinstance(target, str | Path):
        Path(target).write_bytes(done.stdout)
        return
    with require_optional(__name__):
        from matplotlib.image import imread
    target.imshow(imread(io.BytesIO(done.stdout)))
    target.set_axis_off()
    if title is not None:
        target.set_title("\n".join(map(as_drawn, title.split("\n"))))
