"""Gate and sample blocks for TensorCore gate kernels.

Imports no Pallas: rules run at every call.

A step holds all inputs for a sample block in vector memory, because a wire may read any of them,
and one gate block. Blocks shrink, first gates and then samples, until double-buffered blocks and
the estimated register spills fit the memory.
"""

import dataclasses

import jax

from lutjax.dispatch.registry import Device, Request
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.binary_lut import BinaryLut
from lutjax.ops.packed_lut import PackedLut
from lutjax.ops.soft_lut import SoftLut

GateCall = BilinearGates | SoftLut | BinaryLut | PackedLut
Shaped = jax.Array | jax.ShapeDtypeStruct

TILE = 16  # gates in one computation: what bfloat16 takes
_MOST_GATES = 512  # of one step: enough that what a step costs by itself does not show
_MOST_SAMPLES = 2048
_FREE = 0.1  # of the memory, for what the compiler keeps there
_OF_GATES = 0.25  # of the memory at most, for arrays of gates


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A call's blocks.

    Attributes:
      gates, samples: gates and samples per step. Vector memory holds all inputs for these samples.
      buffers: input buffers: 2 if the next step's inputs are prefetched.
      slots: elements per gate.
      limit: memory limit for the kernel in bytes.
    """

    gates: int
    samples: int
    buffers: int
    slots: int
    limit: int


def blocks(
    x: Shaped, parameter: Shaped, wires: Shaped, device: Device, backward: bool
) -> Blocks | None:
    """Return the blocks for ``[I, B]``, ``[G, K]``, ``[G, n]``, or None if they do not fit."""
    n_inputs, (n_gates, n_slots), places = x.shape[0], parameter.shape, wires.shape[1]
    n_samples = x.size // max(n_inputs, 1)
    # Spills of registers: some tiles for each number of a gate.
    spilled = 4 * (4 if backward else 1) * n_slots * TILE * LANES
    free = int(_tpus.limits(device).vmem * (1 - _FREE)) - spilled
    # Twice what is fetched and written meanwhile: an output or its cotangent, and numbers of gates,
    # also spread over lanes.
    of_sample = 4 * (places + 2)
    of_gate = 4 * (2 if backward else 1) * (2 * max(n_slots, LANES) + n_slots * LANES)
    samples = min(_power_of_2(n_samples, LANES), _MOST_SAMPLES)
    n_gates = max(n_gates, 1)
    while samples >= LANES:
        # Powers of two divide evenly when they are halved, and stay multiples of a tile.
        gates = min(_power_of_2(n_gates, TILE), _MOST_GATES)
        while gates > TILE and gates * (of_sample * samples + of_gate) > _OF_GATES * free:
            gates //= 2
        # Inputs are 32-bit in vector memory, in whole sublanes.
        whole = 4 * -(-n_inputs // 8) * 8 * samples
        # Backward, the cotangents of all inputs are an output with two buffers.
        rest = gates * (of_sample * samples + of_gate) + (2 * whole if backward else 0)
        # With one buffer the inputs of the next samples are fetched between two steps, not during
        # one.
        for buffers in (2, 1):
            if buffers * whole + rest <= free:
                steps = -(-n_gates // gates)
                gates = -(-n_gates // (steps * TILE)) * TILE  # the same for each step
                return Blocks(
                    gates, samples, buffers, n_slots, int(_tpus.limits(device).vmem * 0.97)
                )
        samples //= 2
    return None


def _power_of_2(n: int, least: int) -> int:
    """Return `n` rounded up to a power of 2, but at least `least`."""
    return max(1 << (n - 1).bit_length(), least)


def _shapes(request: Request) -> tuple[Shaped, Shaped, Shaped]:
    """Return the shapes of inputs ``[I, B]``, gate parameters ``[G, K]`` and wires ``[G, n]``."""
    call = request.call
    assert isinstance(call, GateCall)
    if isinstance(call, PackedLut):
        return call.words, call.truth, call.wires
    if isinstance(call, BilinearGates):
        c = call.coefficients
        return call.x, jax.ShapeDtypeStruct(c.shape[::-1], c.dtype), call.wires
    return call.x, call.table, call.wires


def unsupported(request: Request) -> str | None:
    """Return the reason that a call does not fit, or None."""
    x, parameter, wires = _shapes(request)
    if blocks(x, parameter, wires, request.device, request.direction == "backward") is not None:
        return None
    memory = _tpus.limits(request.device).vmem // 2**20
    return (
        f"holds {LANES} samples of all inputs in vector memory: {x.shape[0]} inputs do not fit "
        f"{memory} MiB"
    )


# Wires of a gate, and part of the vector memory that inputs, outputs and what wires read fill, up
# to which plain JAX comes first where it reads whole rows. In the static profile of a TPU v6e it
# takes 33 thousand cycles, and these kernels 62, for 2048 gates of two inputs and 1024 samples; of
# 16384 gates and 4096 samples 2.9 and 2.0 million. Backward it is behind.
_FEW_WIRES = 4
_SMALL = 0.5


def slower(request: Request) -> str | None:
    """Return the reason that plain JAX comes first, or None."""
    x, _, wires = _shapes(request)
    n_gates, places = wires.shape
    # Plain JAX is behind backward, and does not read whole rows of tables addressed by bits.
    if (
        request.direction == "backward"
        or isinstance(request.call, BinaryLut)
        or places > _FEW_WIRES
    ):
        return None
    filled = 4 * (x.size + n_gates * (places + 1) * (x.size // max(x.shape[0], 1)))
    memory = _tpus.limits(request.device).vmem
    if filled > _SMALL * memory:
        return None
    return (
        f"plain JAX gathers the rows of at most {_FEW_WIRES} wires a gate faster in half of the "
        f"vector memory, here {places} and {filled / memory:.0%}"
    )
