"""What kernels of gates share.

Arrays are features first, ``[features, samples]``; a wire reads a row of ``x``. Programs go through the gates first and
through the samples last: what runs at the same time reads the same samples, of all inputs, from the L2 cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from lutjax._dtypes import accumulator
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._triton_launch import kernel
from lutjax.tuning import Launch, Sizes

# Bytes of the inputs that programs running at the same time read: they stay in an L2 cache.
_CACHED = 2**25
UNROLLED = 2  # readers of an input that are read together


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tiles of a call: what `Launch` says, no larger than the arrays.

    A program works on a tile of `rows` samples and `outputs` gates, or inputs; `detectors` such tiles of samples follow one
    another.

    Attributes:
      n_samples, n_features: how many samples, and gates or inputs, there are.
      n_groups: programs for each tile of samples and features.
    """

    how: Launch
    n_samples: int
    n_features: int
    n_groups: int = 1

    @property
    def samples(self) -> int:
        return min(self.how.rows, triton.next_power_of_2(max(self.n_samples, 1)))

    @property
    def features(self) -> int:
        return min(self.how.outputs, triton.next_power_of_2(max(self.n_features, 1)))

    @property
    def blocks(self) -> int:
        """Tiles of samples of one program."""
        n_blocks = max(triton.cdiv(self.n_samples, self.samples), 1)
        return min(self.how.detectors or n_blocks, n_blocks)

    @property
    def parts(self) -> int:
        """Programs that share the samples of a feature."""
        return triton.cdiv(self.n_samples, self.samples * self.blocks)

    @property
    def programs(self) -> int:
        return triton.cdiv(self.n_features, self.features) * self.n_groups * self.parts

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of kernels."""
        return {
            "n_samples": self.n_samples,
            "SAMPLES": self.samples,
            "FEATURES": self.features,
            "BLOCKS": self.blocks,
        }


def sizes(x: jax.Array, wires: jax.Array) -> Sizes:
    """What launches are chosen by."""
    return {
        "samples": x.shape[1],
        "inputs": x.shape[0],
        "outputs": wires.shape[0],
        "places": wires.shape[1],
        "bits": 8 * x.dtype.itemsize,
    }


def rule(sizes: Sizes, values: int, arrays: int = 1, warps: int = 4, samples: int = 128) -> Launch:
    """Tiles of so many values, of at most so many samples, and as let `arrays` arrays like ``x`` stay in the cache."""
    of_sample = arrays * max(sizes["inputs"], 1) * sizes["bits"] // 8
    fit = min(max(_CACHED // of_sample, 32), samples)
    samples = min(1 << (fit.bit_length() - 1), triton.next_power_of_2(max(sizes["samples"], 1)))
    return Launch(rows=samples, outputs=max(values // samples, 1), detectors=1, warps=warps)


def constants(tile: Tile, x: jax.Array, parameter: jax.Array, wires: jax.Array) -> dict[str, Any]:
    """Constants of kernels that read wires."""
    return {
        **tile.constants,
        "n_inputs": x.shape[0],
        "n_gates": wires.shape[0],
        "ACC": _row_tiles.TYPES[accumulator(x.dtype, parameter.dtype).name],
    }


def used_readers(readers: jax.Array, unrolled: int = UNROLLED) -> jax.Array:
    """For each input how many entries of its list come before the end of its readers, if some have to be left out."""
    if readers.shape[1] <= unrolled:
        return readers
    place = jnp.arange(1, readers.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(readers >= 0, place[None], 0), 1)


# ------------------------------------------------------------------------------------- in kernels
@kernel
def place(n_features: tl.constexpr, FEATURES: tl.constexpr):
    """Features of this program, whether they exist, and its number among the programs of these features."""
    feature_blocks: tl.constexpr = (n_features + FEATURES - 1) // FEATURES
    program = tl.program_id(0)
    feature, exists = _row_tiles.block(FEATURES, n_features, program % feature_blocks)
    return tl.minimum(feature, n_features - 1), exists, program // feature_blocks


@kernel
def nothing():
    """A tuple to add tensors to."""
    return ()


@kernel
def last_block(part, c: tl.constexpr):
    """The end of the tiles of samples of a program."""
    return tl.minimum((part + 1) * c.BLOCKS, (c.n_samples + c.SAMPLES - 1) // c.SAMPLES)


@kernel
def input_of(wires, number, c: tl.constexpr):
    """What a wire reads, by its number; ids that do not exist count as the nearest that does."""
    return tl.minimum(tl.maximum(tl.load(wires + number), 0), c.n_inputs - 1).to(tl.int64)


@kernel
def at(row, sample, n_samples: tl.constexpr):
    """Where the samples of rows are."""
    return row[:, None] * n_samples + sample[None, :]


@kernel
def read(x, row, sample, c: tl.constexpr):
    """The samples of rows that exist; 0 for samples that do not."""
    if c.n_samples % c.SAMPLES == 0:
        return tl.load(x + at(row, sample, c.n_samples)).to(c.ACC)
    else:
        return tl.load(x + at(row, sample, c.n_samples), mask=(sample < c.n_samples)[None, :], other=0).to(
            c.ACC
        )


@kernel
def read_some(x, row, used, sample, c: tl.constexpr):
    """The samples of rows that are used, 0 of others."""
    exists = used[:, None] & (sample < c.n_samples)[None, :]
    return tl.load(x + at(row, sample, c.n_samples), mask=exists, other=0).to(c.ACC)


@kernel
def write(y, row, exists, sample, value, c: tl.constexpr):
    """Nothing reads it again soon, so it leaves the cache first."""
    tl.store(
        y + at(row, sample, c.n_samples),
        value.to(y.dtype.element_ty),
        mask=exists[:, None] & (sample < c.n_samples)[None, :],
        eviction_policy="evict_first",
    )


@kernel
def last_use(used, feature, c: tl.constexpr):
    """The most entries in use of the lists of readers of these inputs; `used` has them if they are not read at once."""
    if c.fan_out <= c.UNROLLED:
        return c.fan_out
    else:
        return tl.max(tl.load(used + feature), 0)


@kernel
def reader(readers, feature, number, exists, c: tl.constexpr):
    """An entry of the lists of readers of inputs: -1 if unused."""
    return tl.load(readers + feature * c.fan_out + number, mask=exists & (number < c.fan_out), other=-1)


@kernel
def wire_of(number, n_wires: tl.constexpr):
    """The wire that an entry of a list of readers stands for: one that exists, also for an entry that is unused."""
    return tl.maximum(tl.minimum(number, n_wires - 1), 0).to(tl.int64)
