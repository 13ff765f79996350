"""Bit-addressed tables on packed words with 32 samples each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, Num, UInt32

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.values import _bit_words
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class PackedLut(Call, op="packed_lut", differentiable=False, features_first=True, output="t"):
    """The call of `lutjax.packed_lut`.

    Attributes:
      words: uint32 ``[I, B]``, features first.
      truth: bool ``[G, 2**n]``.
      wires: int32 ``[G, n]``, ids, possibly out of range.

    Output: uint32 ``[G, B]``.
    """

    words: jax.Array = batched(1, "i")
    truth: jax.Array = shared("t s")
    wires: jax.Array = shared("t w")


def packed_lut(
    words: UInt32[Array, " inputs *batch"],
    truth: Bool[Array, "gates slots"],
    wires: Int[Array, "gates bits"],
    *,
    implementation: Implementation = None,
) -> UInt32[jax.Array, " gates *batch"]:
    """Evaluate hard tables by bitwise operations: sample ``32 w + j`` is bit j of word w.

    Definition::

        place = np.arange(32, dtype=np.uint32)
        bits = words[..., None] >> place & 1  # [I, ..., 32]
        address = sum(bits[wires[:, l]].astype(int) << l for l in range(wires.shape[1]))
        gate = np.arange(len(truth)).reshape(-1, *[1] * words.ndim)
        answers = truth[gate, address]
        y = (answers.astype(np.uint32) << place).sum(axis=-1, dtype=np.uint32)

    Args:
      words: uint32 ``[I, ...]``, from `lutjax.pack_bits`.
      truth: bool ``[G, 2**n]``, with n from 1 to 8: each table's output for each address, as in
        `lutjax.soft_lut`.
      wires: int32 ``[G, n]``. Out-of-range traced ids are clamped.
      implementation: see `lutjax.detect`.

    Returns:
      uint32 ``[G, ...]``. It has no gradient.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or more than 8 bits.

    Source: docs/logic.md, section 7.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> words = lutjax.pack_bits(jnp.array([[0, 1, 1], [1, 1, 0]], bool))
      >>> xor = jnp.array([[False, True, True, False]])
      >>> lutjax.unpack_bits(lutjax.packed_lut(words, xor, jnp.array([[0, 1]])), 3)
      Array([[ True, False,  True]], dtype=bool)
    """
    op = "packed_lut"
    _checks.require_words(op, "words", words)
    _checks.wires_of_tables(op, words.shape[0], wires)
    _checks.ids(op, "wires", wires, words.shape[0], "inputs of words")
    if not (isinstance(truth, jax.Array | np.ndarray) and truth.dtype == bool):
        raise TypeError(f"{op}: truth is {_checks.describe(truth)}; its dtype must be bool.")
    _checks.slots(op, "truth", truth, wires)
    call = PackedLut(as_jax(words), as_jax(truth), as_int32(wires))
    return jnp.asarray(apply(call, implementation=implementation, feature_axis=0))


def pack_bits(
    bits: Num[Array, "features samples"] | Bool[Array, "features samples"],
) -> UInt32[jax.Array, "features words"]:
    """Pack samples into words.

    Definition::

        padded = np.pad(bits != 0, ((0, 0), (0, -bits.shape[1] % 32)))
        words = padded.reshape(len(bits), -1, 32).astype(np.uint32)
        words = words << np.arange(32, dtype=np.uint32)
        y = words.sum(axis=-1, dtype=np.uint32)

    Args:
      bits: ``[F, B]``, 0 and 1 or False and True, in any dtype. Traced nonzero values count as 1.

    Returns:
      uint32 ``[F, ceil(B / 32)]``: sample ``32 w + j`` is bit j of word w. Unused bits are 0.

    Raises:
      ValueError, TypeError: a wrong shape, no array, or a value other than 0 and 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.pack_bits(jnp.array([[True, False, True]]))
      Array([[5]], dtype=uint32)
    """
    _checks.bits("pack_bits", "bits", bits)
    result: jax.Array = _bit_words.pack(bits)
    return result


def unpack_bits(
    words: UInt32[Array, "features words"], n_samples: int
) -> Bool[jax.Array, "features {n_samples}"]:
    """Unpack samples from words, the inverse of `pack_bits`.

    Definition::

        bits = words[..., None] >> np.arange(32, dtype=np.uint32) & 1
        y = bits.reshape(len(words), -1)[:, :n_samples] != 0

    Args:
      words: uint32 ``[F, W]``.
      n_samples: number of samples, at most ``32 * W``.

    Returns:
      bool ``[F, n_samples]``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or more samples than bits.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.unpack_bits(jnp.array([[5]], jnp.uint32), 3)
      Array([[ True, False,  True]], dtype=bool)
    """
    _checks.require_words("unpack_bits", "words", words)
    _checks.require(
        words.ndim == 2, "unpack_bits", "words", words, "expected shape [features, words]"
    )
    n_samples = _checks.integer("unpack_bits", "n_samples", n_samples)
    fits = 0 <= n_samples <= 32 * words.shape[1]
    rule = f"{words.shape[1]} words hold 0 to {32 * words.shape[1]} samples"
    _checks.require(fits, "unpack_bits", "n_samples", n_samples, rule)
    result: jax.Array = _bit_words.unpack(words, n_samples)
    return result
