"""Hard inference for a `LogicClassifier` on 32-sample words."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Int, Num, UInt32

import lutjax
from lutjax import sharding
from lutjax.circuits import Builder, Circuit
from lutjax.circuits.layers import circuit_from_layers, stages_of_tables
from lutjax.models._circuits import Inputs, WithCircuit
from lutjax.models._edges import rows_with_edges
from lutjax.models._samples import reshape_samples
from lutjax.values import Array

# Words computed per gate before the next block: the values of two layers stay in the CPU's cache.
_BLOCK = 64
# Bits are counted in bit fields: 4-bit fields hold the sum of 15 bits, 8-bit fields hold 17 such
# sums.
_IN_4_BITS, _IN_8_BITS = 15, 17


class Packed:
    """Base class for packed networks, which define `first_bits` and ``_last_words``."""

    config: Any
    first_bits: Callable[..., jax.Array]

    def _last_words(self, words: jax.Array) -> jax.Array:
        raise NotImplementedError

    def votes(self, x: Num[Array, "..."]) -> Int[jax.Array, "batch classes"]:
        """Return the votes per class for samples: int32 ``[B, n_classes]``."""
        return votes_of(self, self.first_bits(x))

    def last_words(self, words: UInt32[Array, "bits words"]) -> UInt32[jax.Array, "votes words"]:
        """Return the voting bits of the last layer, for words in the layout of `from_words`."""
        votes: jax.Array = shard_samples(type(self)._last_words, results=2)(self, words)
        return votes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("truth", "wires", "thresholds"),
    meta_fields=("config",),
)
@dataclasses.dataclass(frozen=True)
class PackedClassifier(Packed, WithCircuit):
    """Hard network of a `LogicClassifier`: bitwise gate operations on 32 samples per word.

    A pytree of arrays. Any number of samples is supported; calls compile once per number of words.

    Attributes:
      truth: tables of each layer, bool ``[gates, 2**inputs]``.
      wires: wires of each layer, int32 ``[gates, inputs]``.
      thresholds: ``[features, thresholds]``; None for bit inputs.
      config: configuration of the classifier.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from flax import nnx
      >>> from lutjax.models import LogicClassifier, LogicClassifierConfig
      >>> config = LogicClassifierConfig(6, n_classes=3, layers=(30, 30), n_thresholds=0)
      >>> packed = LogicClassifier(config, rngs=nnx.Rngs(0)).packed()
      >>> bits = jnp.asarray([[1, 0, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0]], jnp.uint8)
      >>> bool((packed(bits) == packed.from_words(lutjax.pack_bits(bits.T))[:2]).all())
      True
    """

    truth: tuple[Array, ...]
    wires: tuple[Array, ...]
    thresholds: Array | None
    config: Any

    def __call__(self, x: Num[Array, "..."]) -> Num[jax.Array, " batch"]:
        """Return int32 classes ``[B]``; for regression, float32 values ``[B]``.

        The first class wins a tie.

        Args:
          x: samples ``[B, in_features]`` of any dtype; uint8 is the fastest. Images with as many
            values are also accepted.

        Raises:
          ValueError: the sample size differs.
        """
        x = self._rows(x)
        if x.ndim != 2:
            raise ValueError(
                f"PackedClassifier: x has shape {list(x.shape)}; expected [batch, features]."
            )
        if self.config.regression:
            return number_of(self.config, self.votes(x)[:, 0])
        classes: jax.Array = shard_samples(_classify_batch, 0)(self, jnp.asarray(x))
        return classes

    def from_words(self, words: UInt32[Array, "bits words"]) -> Num[jax.Array, " samples"]:
        """Classify samples whose bits are packed by `lutjax.pack_bits`.

        Returns int32 classes ``[32 * words]``; for regression, float32 values.

        Args:
          words: ``[in_features * n_thresholds, W]``, ordered by feature, then threshold; with
            edges five times as many.

        Raises:
          ValueError, TypeError: a wrong shape or dtype.
        """
        n_bits = self.config.n_encoded * max(self.config.n_thresholds, 1)
        if words.ndim != 2 or words.shape[0] != n_bits:
            raise ValueError(
                f"PackedClassifier: words has shape {list(words.shape)}; "
                f"expected [{n_bits}, words]."
            )
        if self.config.regression:
            last = lutjax.unpack_bits(self.last_words(words), 32 * words.shape[1])
            return number_of(self.config, last.sum(0, dtype=jnp.int32))
        classes: jax.Array = shard_samples(_classify_words)(self, words)
        return classes

    def _rows(self, x: Array) -> Any:
        return reshape_samples("PackedClassifier", x, (self.config.in_features,))

    def first_bits(self, x: Num[Array, "..."]) -> Bool[jax.Array, "batch bits"]:
        """Encode samples ``[B, in_features]`` as input bits, in the order of `from_words`."""
        bits: jax.Array = shard_samples(_first_bits, 0, 2)(self, jnp.asarray(self._rows(x)))
        return bits.T

    def _last_words(self, words: jax.Array) -> jax.Array:
        return through_layers(self, words)

    def _circuit(
        self, builder: Builder, *, inputs: Inputs, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        require_bits(self.config, inputs)
        stages = stages_of_tables(
            self.truth, self.wires, self.thresholds, self.config.n_encoded, self.config.n_classes
        )
        outputs, facts = outputs_of(self.config, outputs)
        shape = self.config.image_shape
        if shape and math.prod(shape) == self.config.in_features:
            facts["image"] = list(shape[:2])
        return circuit_from_layers(
            stages, builder, inputs=inputs, outputs=outputs, about={**facts, **about}
        )


def require_bits(config: Any, inputs: Inputs) -> None:
    """Raise ValueError if a circuit would have to compute differences of pixels."""
    if inputs != "bits" and config.edges:
        raise ValueError(
            f"circuits.from_model: inputs is {inputs!r}, but the model also reads pixel "
            "differences, which are outside its circuit. Use inputs='bits'."
        )


def number_of(config: Any, counts: Num[Array, "..."]) -> jax.Array:
    """Convert bit counts to regression values, in float32 or a wider dtype of the counts."""
    dtype = jnp.float64 if counts.dtype == jnp.float64 else jnp.float32
    scaled: jax.Array = jnp.asarray(counts, dtype) * jnp.asarray(config.scale, dtype)
    return scaled + jnp.asarray(config.offset, dtype)


def outputs_of(config: Any, outputs: str | None) -> tuple[str | None, dict[str, Any]]:
    """Return the output kind of the port ``y``, and the circuit facts added by regression."""
    if not config.regression:
        return outputs, {}
    if outputs == "class":
        raise ValueError(
            "circuits.from_model: outputs is 'class', but the model is a regression. "
            "Use 'votes' or 'bits'."
        )
    facts = {
        "kind": "regression",
        "n_classes": None,
        "scale": float(config.scale),
        "offset": float(config.offset),
    }
    return outputs or "votes", facts


@jax.jit
def votes_of(packed: Any, bits: Bool[jax.Array, "batch bits"]) -> jax.Array:
    """Return a packed network's class votes for input bits: int32 ``[B, n_classes]``."""
    last = lutjax.unpack_bits(packed.last_words(lutjax.pack_bits(bits.T)), len(bits))
    return last.reshape(packed.config.n_classes, -1, len(bits)).sum(1, dtype=jnp.int32).T


def shard_samples(
    function: Callable[..., jax.Array], samples: int = -1, results: int = 1
) -> Callable[..., Any]:
    """Wrap a function so that the compiler shards it over samples.

    Args:
      function: function of a packed network and an array.
      samples: array axis that counts samples, or words of samples.
      results: number of result axes; samples are the last one.
    """

    def spec(packed: Any, x: jax.Array) -> PartitionSpec:
        return PartitionSpec(*(None,) * (results - 1), sharding.spec_of(x)[samples])

    return sharding.shard_by_compiler(function, spec)


def _classify_batch(packed: PackedClassifier, x: jax.Array) -> jax.Array:
    n_samples = x.shape[0]
    blocks, size = _blocks(-(-n_samples // 32))
    x = jnp.pad(x, ((0, blocks * size * 32 - n_samples), (0, 0)))
    return _classify_samples(packed, x.reshape(blocks, size * 32, -1))[:n_samples]


@jax.jit
def _classify_samples(packed: PackedClassifier, x: jax.Array) -> jax.Array:
    """Classify samples in blocks, ``[blocks, 32 * words, F]``."""
    # Two loops, because XLA would encode a bit again for each gate that reads it.
    words = jax.lax.map(functools.partial(_encode, packed), x)
    # Moving sample 32 w + j of a block into bit j of word w is expensive, so this bit holds sample
    # W j + w.
    classes = jax.lax.map(lambda words: _classes(packed, words).reshape(-1), words)
    return classes.reshape(-1).astype(jnp.int32)


@jax.jit
def _classify_words(packed: PackedClassifier, words: jax.Array) -> jax.Array:
    n_bits, n_words = words.shape
    blocks, size = _blocks(n_words)
    words = jnp.pad(words, ((0, 0), (0, blocks * size - n_words)))
    words = words.reshape(n_bits, blocks, size).transpose(1, 0, 2)
    classes = jax.lax.map(lambda words: _classes(packed, words).T.reshape(-1), words)
    return classes.reshape(-1)[: 32 * n_words].astype(jnp.int32)


def _blocks(n_words: int) -> tuple[int, int]:
    """Return a block count and block size in words, covering `n_words` with little padding."""
    blocks = max(-(-n_words // _BLOCK), 1)
    return blocks, max(-(-n_words // blocks), 1)


def _encode(packed: PackedClassifier, x: jax.Array) -> jax.Array:
    """Encode ``[32 W, F]`` as words ``[bits, W]``; sample ``W j + w`` is bit j of word w."""
    x = _features(packed, x).reshape(packed.config.n_encoded, 1, 32, -1)
    words = jnp.uint32(0)
    for place in range(32):  # unrolled: XLA fuses the comparisons and shifts into one loop
        words = words | bits_of(packed.thresholds, x[:, :, place]).astype(jnp.uint32) << place
    return words.reshape(-1, words.shape[-1])


def _features(packed: PackedClassifier, x: jax.Array) -> jax.Array:
    """Return values with bits, ``[F, B]``, for samples ``[B, in_features]``."""
    if not packed.config.edges:
        return x.T
    assert packed.thresholds is not None
    # Differences of unsigned integers would wrap around.
    return rows_with_edges(x.T.astype(packed.thresholds.dtype), packed.config.image_shape)


def bits_of(thresholds: Array | None, x: jax.Array) -> jax.Array:
    """Encode features ``[F, 1, n]`` as bits ``[F, thresholds, n]``."""
    if thresholds is None:
        return x != 0
    thresholds = thresholds[:, :, None]
    if x.dtype != jnp.uint8:
        return x.astype(thresholds.dtype) > thresholds
    # An integer exceeds a threshold exactly where it exceeds its floor; this avoids casting the
    # integers.
    floor = jnp.floor(thresholds)
    return (x > jnp.clip(floor, 0, 255).astype(jnp.uint8)) | (floor < 0)


def _first_bits(packed: PackedClassifier, x: jax.Array) -> jax.Array:
    """Encode samples ``[B, F]`` as first-layer input bits ``[bits, B]``."""
    bits = bits_of(packed.thresholds, _features(packed, x)[:, None])
    return bits.reshape(bits.shape[0] * bits.shape[1], len(x))


def through_layers(packed: Any, words: jax.Array) -> jax.Array:
    """Return the last layer's bits, ``[votes, words]``, from the first layer's input bits."""
    for truth, wires in zip(packed.truth, packed.wires, strict=True):
        words = lutjax.packed_lut(words, truth, wires)
    return jnp.asarray(words)


def _classes(packed: PackedClassifier, words: jax.Array) -> jax.Array:
    """Return classes for words ``[bits, W]``: uint32 ``[32, W]``, bit j of word w at ``[j, w]``."""
    return classes_of_bits(packed._last_words(words), packed.config.n_classes)


def classes_of_bits(words: jax.Array, n_classes: int) -> jax.Array:
    """Return classes with the most votes: uint32 ``[32, W]``, bit j of word w at ``[j, w]``."""
    votes = _sums_of_bits(words.reshape(n_classes, len(words) // n_classes, words.shape[-1]))
    # One maximum selects the most votes, and the first class on a tie.
    width = (n_classes - 1).bit_length()
    best = votes[..., 0, :] << width | (n_classes - 1)
    for label in range(1, n_classes):
        best = jnp.maximum(best, votes[..., label, :] << width | (n_classes - 1 - label))
    return n_classes - 1 - (best & (2**width - 1)).reshape(32, -1)


def _sums_of_bits(words: jax.Array) -> jax.Array:
    """Sum each bit over rows: uint32 ``[k, rows, W]`` -> ``[4, 8, k, W]``, bit 8 i + j at [i, j].

    Rows are added in 4-bit fields, their sums in 8-bit fields, and larger sums as whole words.
    """
    k, rows, n_words = words.shape
    n4 = -(-rows // _IN_4_BITS)
    n8 = -(-n4 // _IN_8_BITS)
    n4 = -(-n4 // n8)
    words = jnp.pad(words, ((0, 0), (0, n8 * n4 * _IN_4_BITS - rows), (0, 0)))
    words = words.reshape(k * n8 * n4, _IN_4_BITS, n_words)
    in_4_bits = _add_rows([(words >> shift) & 0x11111111 for shift in range(4)])
    rows_of_4 = [sums.reshape(k * n8, n4, n_words) for sums in in_4_bits]
    # Every second 4-bit field moves into an 8-bit field, for which 17 * 15 = 255 is the largest.
    in_8_bits = _add_rows(
        [(rows_of_4[shift % 4] >> (shift - shift % 4)) & 0x0F0F0F0F for shift in range(8)]
    )
    fields = jnp.stack(in_8_bits)
    places = 8 * jnp.arange(4, dtype=jnp.uint32).reshape(4, 1, 1, 1, 1)
    fields = fields.reshape(1, 8, k, n8, n_words)
    return ((fields >> places) & 0xFF).sum(3, dtype=jnp.uint32)


def _add_rows(arrays: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Sum several arrays over axis 1, in one pass."""
    zeros = (jnp.uint32(0),) * len(arrays)

    def add(a: Any, b: Any) -> tuple[Any, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    return tuple(jax.lax.reduce(tuple(arrays), zeros, add, (1,)))
