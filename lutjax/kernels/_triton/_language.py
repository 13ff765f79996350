"""Triton and its language, if they are installed.

Kernel modules are imported without Triton as well, because `lutjax.tuning` and the support matrix read their declarations.
"""

from typing import Any


class _Absent:
    """Stands for a module that is not installed: kernels can be defined with it, and none is launched."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self


try:
    import triton
    from triton import language as tl
except ImportError:
    triton = tl = _Absent()

__all__ = ["tl", "triton"]
