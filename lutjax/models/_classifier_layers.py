"""Layers of a `LogicClassifier`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lutjax.dispatch.registry import Implementation
from lutjax.layers.initializers import residual_gates, residual_table
from lutjax.layers.nnx import BinaryLUT, GroupSum, LogicGates, SoftLUT, Thermometer
from lutjax.layers.specifications import Initializer
from lutjax.models._encoder import encoder_of
from lutjax.values import Array

Gates = LogicGates | SoftLUT | BinaryLUT


def layers_of(
    config: Any,
    *,
    thresholds: Array | None = None,
    widths: Array | None = None,
    implementation: Implementation = None,
    rngs: nnx.Rngs,
) -> tuple[Thermometer | None, list[Gates], GroupSum]:
    """Build the encoder, gate layers and votes; see `LogicClassifier` for the arguments."""
    encoder = encoder_of("LogicClassifier", config, config.n_encoded, thresholds, widths)
    n_bits = config.n_encoded * max(config.n_thresholds, 1)
    layers: list[Gates] = []
    for number, size in enumerate(config.layers):
        last = number == len(config.layers) - 1
        options: dict[str, Any] = {"implementation": implementation, "feature_axis": 0}
        options |= {"wiring": config.wiring_of(number), "candidates": config.candidates}
        layers.append(_layer(config, n_bits, size, last=last, rngs=rngs, **options))
        n_bits = size
    for n_inputs in config.reduce:
        wires = _wires_of_classes(n_bits, config.n_classes, n_inputs)
        options = {"implementation": implementation, "rngs": rngs}
        layers.append(_reduction_tables(config, n_bits, wires, **options))
        n_bits = len(wires)
    # A regression counts bits: its scale is in the config.
    tau = 1.0 if config.regression else config.tau
    return encoder, layers, GroupSum(config.n_classes, tau, feature_axis=0)


def _layer(
    config: Any, n_in: int, n_out: int, *, last: bool, rngs: nnx.Rngs, **options: Any
) -> Gates:
    kind = config.kind
    if kind == "binary":
        # Outputs of the last tables are summed unrounded; every other table reads bits.
        estimator = "soft" if last else "straight_through"
        return BinaryLUT(
            n_in, n_out, n_inputs=config.n_inputs, estimator=estimator, rngs=rngs, **options
        )
    # Gates start near passing on their first input, so that gradients reach the first of many
    # layers; noise makes them different.
    options |= {"estimator": config.estimator, "rngs": rngs}
    if kind == "gates":
        strength = 2.0 if config.residual is None else config.residual
        init = _WithNoise(residual_gates(strength=strength), config.noise)
        return LogicGates(n_in, n_out, logits_init=init, **options)
    probability = 1 / (1 + math.exp(-(config.residual or 0.0)))
    init = _WithNoise(residual_table(probability, kind), config.noise)
    return SoftLUT(
        n_in, n_out, n_inputs=config.n_inputs, parameterization=kind, table_init=init, **options
    )


def _wires_of_classes(n_votes: int, n_classes: int, n_inputs: int) -> np.ndarray:
    """Return wires for vote tables that each read one class: int32 ``[tables, n_inputs]``.

    Tables are ordered by class, with as many for each class. A class's last table reads its first
    votes again if the vote count is not a multiple of the inputs.
    """
    size = n_votes // n_classes
    within = np.arange(-(-size // n_inputs) * n_inputs, dtype=np.int32) % size
    wires: np.ndarray = np.arange(n_classes, dtype=np.int32)[:, None] * size + within
    return wires.reshape(-1, n_inputs)


@dataclasses.dataclass(frozen=True)
class _Majority:
    """Majority table initializer: logits ``[gates, 2**inputs]`` from ``-x`` to ``x``."""

    most: float

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        n_inputs = shape[-1].bit_length() - 1
        shares = np.bitwise_count(np.arange(shape[-1])) / n_inputs
        return jnp.broadcast_to(jnp.asarray((2 * shares - 1) * self.most, dtype), shape)


def _reduction_tables(config: Any, n_in: int, wires: Array, **options: Any) -> SoftLUT:
    init = _WithNoise(_Majority(2.0), config.noise)
    options |= {"estimator": config.estimator, "feature_axis": 0, "table_init": init}
    return SoftLUT(n_in, len(wires), n_inputs=wires.shape[1], wires=wires, **options)


@dataclasses.dataclass(frozen=True)
class _WithNoise:
    """Initializer that adds Gaussian noise to another initializer."""

    init: Initializer
    noise: float | int

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        drawn = jax.random.normal(key, shape, dtype)
        first: jax.Array = self.init(key, shape, dtype)
        return first + drawn * jnp.asarray(self.noise, dtype)
