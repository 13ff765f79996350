"""Gate kernel tiles and shared device functions.

Work: a program owns a tile of gates, or inputs, and a sample tile; `detectors` in a kernel config
is the number of consecutive sample tiles per program. The grid is one-dimensional: gates change
fastest and samples slowest, so concurrent programs read the same samples for all inputs.

Layout: arrays are features first, ``[features, samples]``. A wire reads a row from ``x``, with
contiguous samples. Tile sizes keep the concurrent programs' samples, for all inputs, in the L2
cache: each array is then read from memory once.

Numerics: values are computed in the accumulator dtype of inputs and parameters. Wire ids are
clamped. Unused fan-out list entries read 0, so another gate's NaN cannot leak into a sum.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops._gates import TableGates
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator

# Bytes of the inputs that concurrent programs read, which have to stay in the L2 cache.
_CACHED = 2**25
UNROLLED = 2  # readers of an input whose loads are issued together
SLOTS = 64  # most slots of a table whose sums fit the registers of a program


@runtime_checkable
class WiredCall(Protocol):
    """Op call with gates that read inputs ``[I, B]`` through wires ``[G, n]``."""

    @property
    def x(self) -> jax.Array: ...
    @property
    def wires(self) -> jax.Array: ...
    @property
    def readers(self) -> jax.Array | None: ...


@dataclasses.dataclass(frozen=True)
class GateTile:
    """Tiles for a call: the config's sizes, but no larger than the arrays.

    Attributes:
      config: kernel config. `rows` are samples, `outputs` gates or inputs, and `detectors`
        consecutive sample tiles per program.
      n_groups: number of programs per sample and feature tile.
    """

    config: Launch
    device: Device
    n_samples: int
    n_features: int
    n_groups: int = 1

    @classmethod
    def for_call(
        cls,
        kernel: str,
        rule: Callable[[Sizes], Launch],
        call: WiredCall,
        device: Device,
        *,
        of_inputs: bool = False,
        n_groups: int = 1,
    ) -> "GateTile":
        """Return the tiles for a kernel whose programs own gates, or inputs."""
        sizes = {
            "samples": call.x.shape[1],
            "inputs": call.x.shape[0],
            "outputs": call.wires.shape[0],
            "places": call.wires.shape[1],
            "bits": 8 * call.x.dtype.itemsize,
        }
        config = launch_of(kernel, sizes, device, rule)
        # A program of inputs stores its samples without a partial sum, so it owns one tile.
        if of_inputs:
            config = dataclasses.replace(config, detectors=1)
        return cls(
            config, device, call.x.shape[1], len(call.x if of_inputs else call.wires), n_groups
        )

    @property
    def samples(self) -> int:
        return _row_tiles.fit_size(self.config.rows, self.n_samples)

    @property
    def features(self) -> int:
        return _row_tiles.fit_size(self.config.outputs, self.n_features)

    @property
    def blocks(self) -> int:
        """Number of consecutive sample tiles per program."""
        n_blocks = max(triton.cdiv(self.n_samples, self.samples), 1)
        return min(self.config.detectors or n_blocks, n_blocks)

    @property
    def n_partial_sums(self) -> int:
        """Number of programs that share a feature's samples, each with a partial sum."""
        return triton.cdiv(self.n_samples, self.samples * self.blocks)

    def arguments(self, call: WiredCall, parameter: jax.Array) -> dict[str, Any]:
        return {
            # Features change fastest, then groups, then parts: see `locate_program`.
            "programs": triton.cdiv(self.n_features, self.features)
            * self.n_groups
            * self.n_partial_sums,
            "device": self.device,
            "warps": self.config.warps,
            "n_samples": call.x.shape[1],
            "n_inputs": call.x.shape[0],
            "n_gates": call.wires.shape[0],
            "n_slots": parameter.shape[1],
            "PLACES": call.wires.shape[1],
            # 0 without fan-out lists; kernels then use wires or atomics.
            "fan_out": 0 if call.readers is None else call.readers.shape[1],
            "UNROLLED": UNROLLED,
            "SAMPLES": self.samples,
            "FEATURES": self.features,
            "BLOCKS": self.blocks,
            "ACC": _row_tiles.TYPES[accumulator(call.x.dtype, parameter.dtype).name],
        }


def output(call: WiredCall) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((len(call.wires), call.x.shape[1]), call.x.dtype)


def cotangent_of_table(
    name: str,
    rule: Callable[[Sizes], Launch],
    kernel: Any,
    call: TableGates,
    device: Device,
    *inputs: jax.Array,
) -> jax.Array:
    """Return sums over samples for each slot, ``[G, 2**n]``; `kernel` writes them in parts."""
    n_gates, n_slots = call.table.shape
    # Tables with more slots are shared by several programs, which read the same gates.
    slots = min(n_slots, SLOTS)
    tile = GateTile.for_call(name, rule, call, device, n_groups=n_slots // slots)
    # Parts keep the sum dtype; only their total may be rounded.
    dtype = accumulator(call.x.dtype, call.table.dtype)
    (parts,) = launch(
        kernel,
        *inputs,
        outputs=[jax.ShapeDtypeStruct((tile.n_partial_sums, n_gates, n_slots), dtype)],
        SLOTS=slots,
        **tile.arguments(call, call.table),
    )
    return _row_tiles.sum_of_parts(parts)


def rule(sizes: Sizes, values: int, arrays: int = 1, warps: int = 4, samples: int = 128) -> Launch:
    """Return tiles with `values` elements and at most `samples` samples.

    Args:
      arrays: number of ``x``-sized arrays that must stay in the L2 cache.
      samples: maximum samples per tile.
    """
    of_sample = arrays * max(sizes["inputs"], 1) * sizes["bits"] // 8
    # Fewer than 32 samples would leave threads of a warp without contiguous loads.
    fit = min(max(_CACHED // of_sample, 32), samples)
    samples = _row_tiles.fit_size(1 << (fit.bit_length() - 1), sizes["samples"])
    return Launch(rows=samples, outputs=max(values // samples, 1), detectors=1, warps=warps)


def used_readers(readers: jax.Array, unrolled: int = UNROLLED) -> jax.Array:
    """Return the number of entries to visit in each fan-out list, up to the last reader."""
    # Lists that are read in one step are read entirely; the lengths are not used.
    if readers.shape[1] <= unrolled:
        return readers
    place = jnp.arange(1, readers.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(readers >= 0, place[None], 0), 1)


# ------------------------------------------------------------------------------------- in kernels
@kernel
def locate_program(n_features: tl.constexpr, c: tl.constexpr):
    """Return this program's features, whether they exist, and its number among their programs."""
    feature_blocks: tl.constexpr = (n_features + c.FEATURES - 1) // c.FEATURES
    program = tl.program_id(0)
    feature, exists = _row_tiles.block(c.FEATURES, n_features, program % feature_blocks)
    # Missing features repeat the last one: loads need no mask, and only stores do.
    return tl.minimum(feature, n_features - 1), exists, program // feature_blocks


@kernel
def locate_slots(c: tl.constexpr):
    """Locate a program that sums slots.

    Returns:
      Gates, whether they exist, slots, and the program's number among the programs for these gates
      and slots.
    """
    groups: tl.constexpr = c.n_slots // c.SLOTS
    gate, exists, part = locate_program(c.n_gates, c)
    slot = (part % groups) * c.SLOTS + tl.arange(0, c.SLOTS)
    return gate, exists, slot, part // groups


@kernel
def write_sums(parts, part, gate, exists, slot, total, c: tl.constexpr):
    """Store ``[slots, gates, samples]`` summed over samples."""
    to = (part.to(tl.int64) * c.n_gates + gate)[None, :] * c.n_slots + slot[:, None]
    # Each program writes its own part, so the sum over parts has a fixed order.
    tl.store(parts + to, tl.sum(total, 2), mask=exists[None, :] & (slot >= 0)[:, None])


@kernel
def empty_tuple():
    """Return an empty tuple, to add tensors to."""
    return ()


@kernel
def last_block(part, c: tl.constexpr):
    return tl.minimum((part + 1) * c.BLOCKS, (c.n_samples + c.SAMPLES - 1) // c.SAMPLES)


@kernel
def input_of(wires, number, c: tl.constexpr):
    # 64 bits: the id is multiplied by the number of samples.
    return tl.minimum(tl.maximum(tl.load(wires + number), 0), c.n_inputs - 1).to(tl.int64)


@kernel
def sample_offsets(row, sample, n_samples: tl.constexpr):
    return row[:, None] * n_samples + sample[None, :]


@kernel
def read(x, row, sample, c: tl.constexpr):
    """Read samples from existing rows; missing samples are 0."""
    # Without a remainder the compiler vectorizes loads and needs no predicates.
    if c.n_samples % c.SAMPLES == 0:
        return tl.load(x + sample_offsets(row, sample, c.n_samples)).to(c.ACC)
    else:
        return tl.load(
            x + sample_offsets(row, sample, c.n_samples),
            mask=(sample < c.n_samples)[None, :],
            other=0,
        ).to(c.ACC)


@kernel
def read_some(x, row, used, sample, c: tl.constexpr):
    """Read samples from used rows; other rows are 0."""
    exists = used[:, None] & (sample < c.n_samples)[None, :]
    return tl.load(x + sample_offsets(row, sample, c.n_samples), mask=exists, other=0).to(c.ACC)


@kernel
def write(y, row, exists, sample, value, c: tl.constexpr):
    # Nothing reads the results again soon. Evicting them first keeps the inputs in the L2 cache.
    tl.store(
        y + sample_offsets(row, sample, c.n_samples),
        value.to(y.dtype.element_ty),
        mask=exists[:, None] & (sample < c.n_samples)[None, :],
        eviction_policy="evict_first",
    )


@kernel
def last_use(used, feature, c: tl.constexpr):
    """Return the number of list entries used by any of this program's inputs."""
    # Short lists fit one unrolled step, so their length is not loaded.
    if c.fan_out <= c.UNROLLED:
        return c.fan_out
    else:
        return tl.max(tl.load(used + feature), 0)


@kernel
def reader(readers, feature, number, exists, c: tl.constexpr):
    """Return fan-out list entries; -1 marks unused entries."""
    # The mask covers the last unrolled step, which may pass the end of a list.
    return tl.load(
        readers + feature * c.fan_out + number, mask=exists & (number < c.fan_out), other=-1
    )


@kernel
def wire_of(number, n_wires: tl.constexpr):
    """Return a valid wire for each fan-out list entry, including unused entries."""
    # Unused entries are -1. Their wire 0 is valid, so only the loads that add values are masked.
    return tl.maximum(tl.minimum(number, n_wires - 1), 0).to(tl.int64)
