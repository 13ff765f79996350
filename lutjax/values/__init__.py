"""Values and arithmetic shared by the ops: ids, detections, dtypes and fixed point."""

from lutjax._typing import Array
from lutjax.values._detection import Detection
from lutjax.values._dtypes import accumulator
from lutjax.values._edges import Edges
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, check_once, is_concrete
from lutjax.values._ngram_layouts import NgramLayout
from lutjax.values._quantized import exponents, round_to_scale
from lutjax.values._vocabularies import Vocabulary
from lutjax.values._wires import check_wires

__all__ = [
    "Array",
    "Detection",
    "Edges",
    "FixedPoint",
    "NgramLayout",
    "Vocabulary",
    "accumulator",
    "as_int32",
    "check_once",
    "check_wires",
    "exponents",
    "is_concrete",
    "round_to_scale",
]
