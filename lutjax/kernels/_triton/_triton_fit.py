"""Calls and devices that Triton kernels fit. Imports neither Triton nor jax-triton: the registry asks at every call."""

import functools
import importlib.metadata
import importlib.util
import math
import re
from typing import Any

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Request
from lutjax.kernels._nvidia import compute_capability
from lutjax.ops._gates import TableGates
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.gate_network import GateNetwork
from lutjax.ops.logic_trees import LogicTrees
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_at_places import LutAtPlaces
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.ops.scored_lut import ScoredLut
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.tables._row_rules import SGD
from lutjax.values._dtypes import FLOATS


def version(package: str) -> tuple[int, ...]:
    """Return the first two numbers of the version of a package."""
    numbers = re.findall(r"\d+", importlib.metadata.version(package))
    return tuple(int(n) for n in numbers[:2])


@functools.cache
def unfit_packages() -> str | None:
    """Return why the installed packages do not work together; None if they do."""
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


def unsupported(request: Request) -> str | None:
    """Return why a call cannot run on Triton; None if it can."""
    device = request.device
    capability = compute_capability(device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {device.kind}"
    if capability < 80:
        return f"needs compute capability 8.0 or newer, {device.kind} has {capability / 10}"
    return unfit_packages() or unsupported_arguments(request)


_LEAVES_OF_TREE = 16
_LEAVES_OF_GROUP = 256  # also, their places fit in a byte


def unsupported_arguments(request: Request) -> str | None:
    """Return why no kernel computes a call, whatever the device; None if one does."""
    call, step = request.call, request.step
    integers = ("int8", "int32") if isinstance(call, ScoredLut) else ("int32",)
    for leaf in jax.tree.leaves((call, step)):
        if leaf.dtype.name not in (*FLOATS, *integers):
            return f"has no kernel for {leaf.dtype}"
    if isinstance(call, LookupAttention) and call.weights.shape[0] == 0:
        return "has no kernel for a table of no detectors"
    if isinstance(call, LutAtPlaces):
        if call.accumulate is not None:
            return "has no sums in fixed point"
        if not call.anchors.shape[1]:
            return "has no kernel for detectors without pairs"
    if isinstance(call, LogicTrees):
        if call.leaves.shape[1] > _LEAVES_OF_TREE:
            return f"keeps the nodes of a tree in registers, of at most {_LEAVES_OF_TREE} leaves, here {call.leaves.shape[1]}"
        n_leaves = math.prod(call.places.pool) * call.leaves.shape[1]
        if n_leaves > _LEAVES_OF_GROUP:
            return (
                f"writes out the leaves of all places of a group, at most {_LEAVES_OF_GROUP}, here {n_leaves}"
            )
    if step is not None and not isinstance(step.rule, SGD):
        return f"moves rows by SGD only, not by {step.rule}"
    return None


def slower(request: Request) -> str | None:
    """Return why plain JAX comes first for a call that would fit; None if it does not."""
    call = request.call
    if request.step is not None:
        return _slower_update(request, request.step)
    if isinstance(call, LutAtPlaces):
        return _slower_at_places(call)
    if isinstance(call, GateNetwork):
        return _slower_network(call)
    return _slower_gates(call) if isinstance(call, BilinearGates | TableGates) else None


# Numbers added; of shapes measured on an H200, those up to 16.8 million were faster in plain JAX.
_FEW = 2**24


def _slower_update(request: Request, step: Step) -> str | None:
    """Return why plain JAX comes first for an update: small ones are mostly the launch of kernels."""
    call: Any = request.call
    dy = request.cotangent
    assert dy is not None
    n_samples = dy.size // max(dy.shape[-1], 1)
    if isinstance(call, WeightedLookup):
        n_samples = dy.shape[0] * call.valued
    if isinstance(call, ScoredLut):
        n_samples = dy.shape[0]
    reads = n_samples * call.weights.shape[0]
    if isinstance(call, LookupAttention | LutPairAttention):  # of half of all pairs
        n_keys = dy.shape[-2] if call.window is None else min(dy.shape[-2], call.window)
        reads = reads * n_keys // 2
    sums = step.differs_by_row or step.rule.weight_decay  # rows move by a sum, as those of 16 bits
    if call.weights.dtype.itemsize < 4 or sums:
        return None
    numbers = reads * call.weights.shape[-1]
    if numbers > _FEW:
        return None
    return f"plain JAX is faster for at most {_FEW} numbers added, here {numbers}"


# Inputs or gates times samples; of shapes measured on an H200, 1 million were faster in plain JAX, and 4 million equal.
_FEW_VALUES = 2**21


def _slower_gates(call: BilinearGates | TableGates) -> str | None:
    """Return why plain JAX comes first for gates: few are mostly the launch of kernels.

    In half precision it does not: on an H100, 6 layers of 8000 gates and 128 samples took 14 times as long in plain JAX.
    """
    if call.x.dtype.itemsize < 4:
        return None
    values = max(call.x.shape[0], call.wires.shape[0]) * call.x.shape[1]
    if values > _FEW_VALUES:
        return None
    return f"plain JAX is faster for at most {_FEW_VALUES} values of inputs or gates, here {values}"


# Values of a sample that a backward pass keeps: with four samples in each of 256 programs, so many fill 32 MiB of an L2 cache. Measured on an H200,
# a step in one kernel took 37 us for 6800 of them where layers one by one took 48 (400 samples), and 346 against 195 for 10000 (4096 samples).
_MOST_KEPT = 2**13


def _slower_network(call: GateNetwork) -> str | None:
    """Return why layers come one by one: theirs are other kernels, and values of wide ones are in no cache either way."""
    if len(call.sizes) == 1:
        return "has one layer, which is bilinear_gates"
    kept = sum(call.sizes) + 4 * max(call.sizes)  # of all gates, and what the wires of two layers pass on
    if kept > _MOST_KEPT:
        return f"keeps values of all gates in the caches, at most {_MOST_KEPT} of a sample, here {kept}"
    return None


# Outputs of a table: of those measured on an H100, 128 took 205 us in a step and 214 apart, 256 took 404 and 282.
_MOST_OUTPUTS = 128
# Channels times ends of pairs, for each read: listing the ends of 784 inputs took 22 us, as long as the rest of a step of 128 samples.
_MOST_LISTED = 4


def _slower_at_places(call: LutAtPlaces) -> str | None:
    """Return why a detection and a look-up of their own come first."""
    n_detectors, _, n_outputs = call.weights.shape
    if n_outputs > _MOST_OUTPUTS:
        return f"was measured faster up to {_MOST_OUTPUTS} outputs of a table, here {n_outputs}"
    listed = call.windows.image[2] * 2 * call.anchors.shape[1] * n_detectors
    reads = n_detectors * call.x.shape[0] * call.n_places
    if call.targets is None and listed > _MOST_LISTED * reads:
        return f"lists the pairs that read each channel, {listed} comparisons for {reads} reads"
    return None
