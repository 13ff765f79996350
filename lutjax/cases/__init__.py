"""Op cases: sizes and arguments for tests, benchmarks and tuning.

Tests, `lutjax bench`, `lutjax tune` and `lutjax status` only read these lists. Every op has one
case module, see ``lutjax.kernel_registry.cases(op)``, with

    SIZES: dict[str, Size]                       named sizes with tags
    def case(draw: Draw, sizes: Sizes) -> Case   arguments and op call at some sizes

and optionally

    DTYPES = ("uint32",)                         op dtypes; default: the four floats
    SLOW = True                                  slow compilation: suites beyond parity skip it
    REFERENCE = "my_package.reference"           module with the definition, a function like the op
    KINDS: tuple[Kind, ...]                      notations for measured sizes
    def measured(draw, sizes) -> Case            measured function, if it is not the op itself
    def traffic(sizes) -> Traffic                required memory traffic for a measured size
"""

from lutjax.cases._case import Axes, Case, Detections, Draw, Size, Sizes, Tag
from lutjax.cases._modules import CaseModule, find_module
from lutjax.cases._traffic import (
    DENSE,
    FORWARD,
    IN_PLACE,
    ROWS,
    UPDATE,
    Kind,
    LookUpTraffic,
    Traffic,
)

__all__ = [
    "DENSE",
    "FORWARD",
    "IN_PLACE",
    "ROWS",
    "UPDATE",
    "Axes",
    "Case",
    "CaseModule",
    "Detections",
    "Draw",
    "Kind",
    "LookUpTraffic",
    "Size",
    "Sizes",
    "Tag",
    "Traffic",
    "find_module",
]
