"""Picture for receptive fields: `python docs/fields.py --png docs/image-fields.png`."""

import argparse
from pathlib import Path

from flax import nnx

from lutjax import wiring
from lutjax.layers.nnx import SpatialLUT


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, required=True)
    path = parser.parse_args().png
    fields = wiring.projections(None, (28, 28), (14, 14), groups=7, receptive=7, projective=4)
    layer = SpatialLUT(fields, n_detectors=4, n_anchors=6, rngs=nnx.Rngs(0))
    wiring.show(layer, groups=[0, 10, 24, 45]).savefig(path, dpi=110)


if __name__ == "__main__":
    main()
