"""Triton and its language, if installed.

Kernel modules are imported without Triton as well, because `lutjax.tuning` and the support matrix
read their declarations.
"""

from typing import Any


class _Absent:
    """Stand-in for a missing module: kernels can be defined with it, but not launched."""

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
