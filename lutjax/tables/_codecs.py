"""Codecs of published memory rows: exact float32 values from bytes, on any device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CODECS = ("bfloat16", "e4m3", "e4m3_ue8m0", "row264")
"""Names of the codecs.

bfloat16: two bytes per element. e4m3: one byte, with one bfloat16 scale for the table. e4m3_ue8m0:
one byte, with one ue8m0 exponent per 32 elements in a second tensor. row264: the same two byte
strings, one after the other in one row.
"""

BLOCK = 32
"""Elements that share a ue8m0 scale."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """Row byte layout.

    Attributes:
      name: one of `CODECS`.
      width: elements per row.
      scale: table scale, for ``e4m3``.

    Raises:
      ValueError: there is no such codec, or the width does not fit it.
    """

    name: str
    width: int
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise ValueError(
                f"HostTable.mapped: codec is {self.name!r}; expected one of {', '.join(CODECS)}."
            )
        if self.width < 1 or (self.has_blocks and self.width % BLOCK):
            needed = f"multiple of {BLOCK}" if self.has_blocks else "number"
            raise ValueError(
                f"HostTable.mapped: width is {self.width}; {self.name} needs a positive {needed}."
            )

    @property
    def has_blocks(self) -> bool:
        """True if each row block has a separate scale."""
        return self.name in ("e4m3_ue8m0", "row264")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Accepted safetensors dtypes of the rows."""
        if self.name == "bfloat16":
            return ("BF16",)
        return ("I8", "U8") if self.name == "row264" else ("F8_E4M3", "U8")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements per row in each tensor with a part of the row."""
        scales = self.width // BLOCK
        if self.name == "e4m3_ue8m0":
            return (self.width, scales)
        return (self.width + scales if self.name == "row264" else self.width,)

    @property
    def n_bytes(self) -> int:
        """Bytes of a row, with its scales."""
        return sum(self.lengths) * (2 if self.name == "bfloat16" else 1)

    def decode(self, codes: Any) -> Any:
        """Return float32 rows ``[..., width]`` from bytes ``[..., n_bytes]``.

        NumPy arrays give NumPy arrays, and JAX arrays give JAX arrays.
        """
        xp: Any = np if isinstance(codes, np.ndarray) else jnp
        if self.name == "bfloat16":
            # The two bytes, the lower first, are the upper half of a float32.
            octets = codes.reshape(*codes.shape[:-1], self.width, 2).astype(np.uint32)
            return as_float32(xp, octets[..., 0] << 16 | octets[..., 1] << 24)
        if self.name == "e4m3":
            return xp.take(xp.asarray(_scaled_values(self.scale)), codes.astype(np.int32), axis=0)
        # The codes of a row come first, `[..., width]`, then the scale of each block.
        scales = codes[..., self.width :].astype(np.int32)
        blocks = codes[..., : self.width].astype(np.int32).reshape(*scales.shape, BLOCK)
        row_shape = (*scales.shape[:-1], self.width)
        if xp is np:
            # One lookup per element, in place of some twenty passes over the rows.
            return _block_values()[scales[..., None] << 8 | blocks].reshape(row_shape)
        bits = _scaled_bits(xp, blocks, scales[..., None])
        return as_float32(xp, bits.reshape(row_shape))


def as_float32(xp: Any, bits: Any) -> Any:
    """Return the floats with these bits, uint32."""
    if xp is np:
        return np.ascontiguousarray(bits).view(np.float32)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _scaled_bits(xp: Any, codes: Any, scales: Any) -> Any:
    """Return float32 bits of ``e4m3(code) * 2**(scale - 127)``, both int32."""
    # Integer arithmetic is exact for all codes; float arithmetic may flush subnormal numbers to 0.
    exponent, fraction = codes >> 3 & 15, codes & 7
    # The value is significand * 2**power, with a significand of at most four bits.
    significand = xp.where(exponent > 0, fraction + 8, fraction)
    power = xp.maximum(exponent, 1) - 10 + scales - 127
    # The position of the highest bit normalizes the significand.
    top = sum((significand >= least).astype(np.int32) for least in (2, 4, 8))
    biased = power + top + 127
    normal = biased << 23 | (significand << 23 - top & 0x7FFFFF)
    subnormal = significand << xp.clip(power + 149, 0, 23)
    bits = xp.where(biased > 254, 0x7F800000, xp.where(biased > 0, normal, subnormal))
    bits = xp.where(significand == 0, 0, bits)
    # Codes of NaN: all bits of the magnitude in e4m3, and 255 in ue8m0.
    bits = xp.where((codes & 127 == 127) | (scales == 255), 0x7FC00000, bits).astype(np.uint32)
    return bits | (codes >> 7 << 31).astype(np.uint32)


@functools.cache
def _block_values() -> np.ndarray:
    """Return the float32 values of all scales, each with all e4m3 codes."""
    words = np.arange(1 << 16, dtype=np.int32)
    values: np.ndarray = as_float32(np, _scaled_bits(np, words & 255, words >> 8))
    return values


@functools.cache
def _scaled_values(scale: float | None) -> np.ndarray:
    """Return the float32 value of each e4m3 code times a scale, rounded to bfloat16."""
    codes = np.arange(256, dtype=np.int32)
    values = as_float32(np, _scaled_bits(np, codes, np.int32(127)))
    with np.errstate(over="ignore", invalid="ignore"):
        # The product of e4m3 and a scale is exact in float64. It is rounded to float32, and then to
        # bfloat16, with ties to even.
        product = (values.astype(np.float64) * np.float64(scale)).astype(np.float32)
    bits = product.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    values_of_codes: np.ndarray = np.where(np.isnan(product), product, rounded.view(np.float32))
    return values_of_codes
