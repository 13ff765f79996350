"""Circuits from layer lists in Flax NNX, Linen or Haiku, and from models."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.circuits.builder import Builder
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.columns import Columns
from lutjax.circuits.layers import circuit_from_layers
from lutjax.circuits.ports import Format


def from_model(
    model: Any,
    *,
    inputs: str | Format | Columns = "bits",
    outputs: str | None = None,
    simplify: bool = True,
    merge: int = 3,
    lut: int | None = None,
    about: Mapping[str, Any] | None = None,
) -> Circuit:
    """Return the circuit of a hard model.

    It has the same bits, votes and classes as ``deterministic=True``.

    Args:
      model: a `LogicClassifier`, `PackedClassifier`, `LogicTreeNet` or `LogicCA`; or a layer list
        in call order, such as ``[Thermometer, LogicConv, LogicGates, GroupSum]``, or a
        ``Sequential``. Pass Flax NNX layers directly, Haiku layers inside a transformed function
        without jit, and Linen layers bound or as pairs ``(layer, variables)`` with the layer's own
        variables. Bits are flattened between layers, images in axis order.
      inputs: values of port ``x``. ``"bits"``: the inputs of the first gate layer, so all
        thermometer bits; for a `LogicTreeNet` in the order channel, threshold, row, column. A
        `Format` or its text, such as ``"uint8"`` or ``"fixed12.4"``: numbers, which a thermometer
        in the circuit compares with its thresholds; `LogicTreeNet` images in the order row,
        column, channel. `lutjax.circuits.columns.Columns`: table rows, with one port per column;
        the circuit encodes them.
      outputs: values of port ``y``. ``"bits"``: outputs of the last layer; ``"votes"``: bit counts
        for each class, not divided by tau; ``"class"``: the first class with the most votes.
        Default: the class if the model has votes.
      simplify: whether to remove constants, copies, and repeated or unused gates; otherwise the
        circuit has every gate.
      merge: maximum inputs for merged gates; see `Builder`.
      lut: maximum table inputs in vote counters, 2 to 6; see `Builder`.
      about: additional facts, such as ``{"image": [8, 8]}``.

    Returns:
      The circuit. For an automaton, it is the single-cell rule: ``x`` has the 8 neighbors row by
      row, then the cell itself, with adjacent channels, and ``y`` has the next state; see
      `step_automaton`.

    Raises:
      ValueError: the model has no exact circuit, or `inputs` or `outputs` do not fit it; the
        message gives the reason.
      TypeError: unsupported model or layer type.

    Source: docs/logic.md, section 7.

    Example:
      Flax NNX:

      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from flax import nnx
      >>> from lutjax import circuits
      >>> from lutjax.layers.nnx import GroupSum, LogicGates, Thermometer
      >>> rngs = nnx.Rngs(0)
      >>> thresholds = jnp.array([[0.5, 2.5], [1.0, 2.0]])
      >>> encoder = Thermometer(2, 2, thresholds=thresholds)
      >>> layers = [encoder, LogicGates(4, 12, rngs=rngs), GroupSum(3)]
      >>> circuit = circuits.from_model(layers, inputs="uint2")
      >>> ports = (*circuit.inputs, *circuit.outputs)
      >>> [(port.name, port.count, port.format.bits) for port in ports]
      [('x', 2, 2), ('y', 1, 2)]
      >>> [name for name, _ in circuit.parts]
      ['encoder', 'layer 1', 'votes', 'argmax']

      Linen, bound or in pairs:

      >>> from flax import linen as nn
      >>> from lutjax.layers import linen
      >>> model, x = nn.Sequential([linen.LogicGates(4, 6), linen.GroupSum(3)]), jnp.ones((1, 4))
      >>> variables = model.init(jax.random.key(0), x)
      >>> circuit = circuits.from_model(model.bind(variables))
      >>> own = {kind: of_layers["layers_0"] for kind, of_layers in variables.items()}
      >>> same = circuits.from_model([(linen.LogicGates(4, 6), own), (linen.GroupSum(3), {})])
      >>> circuit.fanins == same.fanins and circuit.tables == same.tables
      True

      Haiku, inside of a transformed function:

      >>> import haiku as hk
      >>> from lutjax.layers import haiku as layers
      >>> def network():
      ...     return hk.Sequential([layers.LogicGates(4, 6), layers.GroupSum(3)])
      >>> f = hk.transform_with_state(lambda x: network()(x))
      >>> params, state = f.init(jax.random.key(0), x)
      >>> def make_circuit():
      ...     return circuits.from_model(network(), outputs="bits")
      >>> to_circuit = hk.transform_with_state(make_circuit)
      >>> circuit, _ = to_circuit.apply(params, state, None)
      >>> circuit([[0, 1, 1, 0]]).shape
      (1, 6)
    """
    builder = Builder(simplify=simplify, merge=merge, lut=lut)
    # Models know their parts; this module knows no models.
    own = getattr(model, "_circuit", None)
    if own is not None:
        circuit: Circuit = own(builder, inputs=inputs, outputs=outputs, about=about or {})
        return circuit
    layers = _layers_of(model)
    return circuit_from_layers(layers, builder, inputs=inputs, outputs=outputs, about=about or {})


def step_automaton(
    circuit: Circuit, state: Shaped[np.ndarray, "*batch height width channels"], n_steps: int = 1
) -> Shaped[np.ndarray, "*batch height width channels"]:
    """Return an automaton state after some steps, given the `from_model` circuit of a `LogicCA`.

    Args:
      circuit: single-cell rule, which states whether the grid is a torus.
      state: bits in any dtype; nonzero values are 1.
      n_steps: number of steps.

    Raises:
      ValueError: not an automaton circuit, or the cells have other channels.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from flax import nnx
      >>> from lutjax import circuits
      >>> from lutjax.models import LogicCA, LogicCAConfig
      >>> config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
      >>> model = LogicCA(config, rngs=nnx.Rngs(0))
      >>> state = np.random.default_rng(0).integers(0, 2, (5, 6, 2))
      >>> after = circuits.step_automaton(model.circuit(), state, 3)
      >>> bool((after == model(jnp.asarray(state), 3, deterministic=True)).all())
      True
    """
    where = "circuits.step_automaton"
    if circuit.about.get("kind") != "automaton":
        raise ValueError(
            f"{where}: circuit is of kind {circuit.about.get('kind')!r}; "
            "expected an automaton rule, as circuits.from_model returns for a LogicCA."
        )
    channels = circuit.n_outputs
    if state.ndim < 3 or state.shape[-1] != channels:
        raise ValueError(
            f"{where}: state has shape {list(state.shape)}; "
            f"expected [..., height, width, {channels}]."
        )
    height, width = state.shape[-3:-1]
    bits, around = state.astype(bool), [(0, 0)] * (state.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    mode: Any = "wrap" if circuit.about.get("periodic") else "constant"
    # The order of neighbors is that of `LogicCA`: the cell itself comes last.
    places = [(y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1)] + [(1, 1)]
    for _ in range(n_steps):
        padded = np.pad(bits, around, mode=mode)
        near = [padded[..., y : y + height, x : x + width, :] for y, x in places]
        neighbors = np.concatenate(near, -1).reshape(-1, 9 * channels)
        bits = circuit(neighbors).reshape(state.shape)
    return bits.astype(state.dtype)


def _layers_of(model: Any) -> list[Any]:
    """Return the layers in a list or ``Sequential``; Linen layers may come with variables."""
    is_pair = isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], Mapping)
    if is_pair and hasattr(model[0], "bind"):
        model = model[0].bind(model[1])
    layers = model if isinstance(model, Sequence) else getattr(model, "layers", None)
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(
            f"circuits.from_model: model is a {type(model).__name__}; "
            "expected a LogicClassifier, PackedClassifier, LogicTreeNet or LogicCA, "
            "or a list of layers."
        )
    if not layers:
        raise ValueError("circuits.from_model: model is an empty list; give at least one layer.")
    return list(layers)
