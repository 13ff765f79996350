"""Cases of the ops: the sizes at which each is tested, measured and tuned, and the arguments that these make.

Tests, `lutjax bench`, `lutjax tune` and `lutjax status` read these lists and nothing else. An op has one module of cases,
whose name ``lutjax.kernel_registry.cases(op)`` returns. Its module has

    SIZES: dict[str, Size]                       named sizes, each with tags
    def case(draw: Draw, sizes: Sizes) -> Case   the arguments at some sizes, and the call of the op on them

and, where it needs them,

    DTYPES = ("uint32",)                         dtypes of the op, if they are not the four floats
    SLOW = True                                  takes long to compile: suites beyond parity leave it to the slow one
    REFERENCE = "my_package.reference"           module with the op's definition, a function of the op's name
    KINDS: tuple[Kind, ...]                      how its measured sizes are written; one of them for each such size
    def measured(draw, sizes) -> Case            the function that is measured, where it is not the op alone
    def traffic(sizes) -> Traffic                bytes that a measured size has to move
"""

from lutjax.cases._case import Axes, Case, Detections, Draw, Size, Sizes, Tag
from lutjax.cases._modules import CaseModule, of
from lutjax.cases._traffic import DENSE, FORWARD, IN_PLACE, ROWS, UPDATE, Kind, LookUpTraffic, Traffic

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
    "of",
]
