"""Which calls and devices Triton kernels fit. Imports neither Triton nor jax-triton: the registry asks at every call."""

import functools
import importlib.metadata
import importlib.util
import re

import jax

from lutjax._dtypes import FLOATS
from lutjax._row_rules import SGD
from lutjax.kernels._nvidia import compute_capability
from lutjax.kernels.registry import Call


def version(package: str) -> tuple[int, ...]:
    """The first two numbers of the version of a package."""
    numbers = re.findall(r"\d+", importlib.metadata.version(package))
    return tuple(int(n) for n in numbers[:2])


@functools.cache
def unfit_packages() -> str | None:
    """Why the installed packages do not work together; None if they do."""
    try:
        jax_triton, triton = version("jax-triton"), version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        return f"needs {error.name}, not installed"
    if jax_triton < (0, 3):
        return f"needs jax-triton 0.3.1 or newer, found {importlib.metadata.version('jax-triton')}"
    if jax_triton >= (0, 4) and triton < (3, 7):
        return (
            f"jax-triton {importlib.metadata.version('jax-triton')} needs triton 3.7 or newer, found "
            f"{importlib.metadata.version('triton')}; jax-triton 0.3.1 works with it"
        )
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return "needs jax with CUDA: pip install 'jax[cuda13]'"
    return None


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on Triton; None if it can."""
    capability = compute_capability(call.device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {call.device.kind}"
    if capability < 80:
        return f"needs compute capability 8.0 or newer, {call.device.kind} has {capability / 10}"
    return unfit_packages() or unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in (*FLOATS, "int32"):
            return f"has no kernel for {leaf.dtype}"
    if call.op.startswith("lookup_attention") and call.arguments[0].shape[0] == 0:
        return "has no kernel for a table of no detectors"
    if call.op.endswith("_update") and not isinstance(call.options["rule"], SGD):
        return f"moves rows by SGD only, not by {call.options['rule']}"
    return None


def slower(call: Call) -> str | None:
    """Why plain JAX comes first for a call that would fit."""
    return _slower_update(call) if call.op.endswith("_update") else _slower_gates(call)


_FEW = (
    2**24
)  # numbers added; of shapes measured on an H200, those up to 16.8 million were faster in plain JAX


def _slower_update(call: Call) -> str | None:
    """Why plain JAX comes first for an update: small ones are mostly the launch of kernels."""
    weights, _, _, _, dy = call.arguments[:5]
    reads = dy.size // max(dy.shape[-1], 1) * weights.shape[0]
    if "attention" in call.op:  # of half of all pairs
        keys = dy.shape[-2] if call.options["window"] is None else min(dy.shape[-2], call.options["window"])
        reads = reads * keys // 2
    if (
        weights.dtype.itemsize < 4
        or call.options["accumulate"] is not None
        or call.options["rule"].weight_decay
    ):
        return None
    numbers = reads * weights.shape[-1]
    if numbers > _FEW:
        return None
    return f"plain JAX is faster for at most {_FEW} numbers added, here {numbers}"


# Inputs times samples; of shapes measured on an H200, 1 million were faster in plain JAX, and 4 million equal.
_FEW_INPUTS = 2**21


def _slower_gates(call: Call) -> str | None:
    """Why plain JAX comes first for gates: few are mostly the launch of kernels."""
    x = call.arguments[0]
    if x.size > _FEW_INPUTS:
        return None
    return f"plain JAX is faster for at most {_FEW_INPUTS} numbers read, here {x.size}"
