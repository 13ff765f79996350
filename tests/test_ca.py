"""The logic automaton: against a simulation in numpy, packed against float, gradients, memory, and the command."""

import json
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from flax import nnx

import lutjax
from lutjax import reference
from lutjax.models import LogicCA, LogicCAConfig, automaton


def small(**options):
    sizes = {"channels": 2, "kernels": 3, "perception": (8, 4, 2), "update": (12, 6, 2)}
    model = LogicCA(LogicCAConfig(**sizes, **options), rngs=nnx.Rngs(0))
    model.logits.set_value(3 * jax.random.normal(jax.random.key(1), model.logits.shape))
    return model


def simulated(model, state, coefficients):
    """One synchronous step of ``[H, W, C]``, cell by cell."""
    config, (wires, _) = model.config, model.circuit
    height, width, channels = state.shape
    mode = "wrap" if config.periodic else "constant"
    padded = np.pad(state, ((1, 1), (1, 1), (0, 0)), mode=mode)
    new = np.zeros_like(state)

    def gates(x, w, first):
        c0, c1, c2, c3 = coefficients[:, first : first + len(w)]
        a, b = x[w[:, 0]], x[w[:, 1]]
        return c0 + c1 * a + c2 * b + c3 * a * b

    for y in range(height):
        for x in range(width):
            seen = []
            for channel in range(channels):
                patch = padded[y : y + 3, x : x + 3, channel].ravel()
                near = np.delete(patch, 4)
                w = np.stack([np.tile(np.arange(8), config.kernels), np.full(8 * config.kernels, 8)], -1)
                values, first = gates(np.append(near, patch[4]), w, 0), len(w)
                for w in wires[: len(config.perception) - 1]:
                    values, first = gates(values, np.asarray(w), first), first + len(w)
                seen.append(values)
            values = np.concatenate([state[y, x], np.stack(seen, -1).ravel()])
            for w in wires[len(config.perception) - 1 :]:
                values, first = gates(values, np.asarray(w), first), first + len(w)
            new[y, x] = values
    return new


@pytest.mark.parametrize("periodic", [False, True])
def test_steps_are_those_of_a_simulation(periodic: bool) -> None:
    model = small(periodic=periodic)
    state = np.random.default_rng(0).random((4, 5, 2)).astype(np.float32)
    soft = np.asarray(reference.gate_coefficients(model.logits[...], axis=0))
    expected = simulated(model, simulated(model, state, soft), soft)
    np.testing.assert_allclose(model(state, 2), expected, atol=1e-5)
    bits = (state > 0.5).astype(np.float32)
    hard = np.asarray(reference.gate_coefficients(model.logits[...], hard=True, axis=0))
    assert (model(bits, deterministic=True) == simulated(model, bits, hard)).all()


@pytest.mark.parametrize("width", [3, 32, 35])
@pytest.mark.parametrize("options", [{}, {"periodic": True}, {"update_rate": 0.6}], ids=str)
def test_words_are_the_hard_automaton(width: int, options: dict) -> None:
    model = small(**options)
    key = jax.random.key(3)
    bits = jax.random.bernoulli(jax.random.key(2), shape=(3, 4, width, 2)).astype(jnp.float32)
    hard = lutjax.gate_coefficients(model.logits[...], hard=True, axis=0)
    first = jnp.moveaxis(bits, -1, 0)
    slow = automaton.run_soft(model.config, hard, model.circuit, first, 3, key)
    fast = model(bits, 3, key=key, deterministic=True)
    assert fast.dtype == bits.dtype
    assert (fast == jnp.moveaxis(slow, 0, -1)).all()


def test_asynchronous_cells_are_new_or_old() -> None:
    state = jax.random.uniform(jax.random.key(2), (8, 8, 2))
    synchronous, asynchronous = small(), small(update_rate=0.5)
    new = synchronous(state)
    mixed = asynchronous(state, key=jax.random.key(0))
    updated = jnp.isclose(mixed, new).all(-1)
    assert 0.25 < updated.mean() < 0.75
    assert (updated | (mixed == state).all(-1)).all()
    assert not jnp.allclose(mixed, asynchronous(state, key=jax.random.key(1)))


def test_gradients_are_those_of_plain_mathematics_and_only_states_are_kept() -> None:
    model = small()
    state = jax.random.uniform(jax.random.key(2), (2, 3, 8, 9))
    config, circuit = model.config, model.circuit

    def plain(logits, state):
        """The same without recomputation, ops, or gradients of their own."""
        coefficients = reference.gate_coefficients(logits, axis=0)
        for _ in range(4):
            channels, n_cells = state.shape[0], state[0].size
            near = jnp.stack([*automaton._shifted(config, state), state]).reshape(9, -1)
            wires = [jnp.stack([jnp.arange(24) % 8, jnp.full(24, 8)], -1), *circuit.wires]
            x, first = near, 0
            for layer, w in enumerate(wires):
                if layer == len(config.perception):
                    x = jnp.concatenate([state.reshape(channels, n_cells), x.reshape(-1, n_cells)])
                c = coefficients[:, first : first + len(w)]
                x, first = reference.bilinear_gates(x, c, w, feature_axis=0), first + len(w)
            state = x.reshape(state.shape)
        return jnp.square(state).sum()

    def loss(logits, state):
        coefficients = lutjax.gate_coefficients(logits, axis=0)
        return jnp.square(automaton.run_soft(config, coefficients, circuit, state, 4)).sum()

    ours = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for got, expected in zip(
        ours(model.logits[...], state),
        jax.jit(jax.grad(plain, (0, 1)))(model.logits[...], state),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, atol=1e-4 * float(jnp.abs(expected).max()))

    def temporaries(n_steps: int) -> int:
        def loss(logits, state):
            coefficients = lutjax.gate_coefficients(logits, axis=0)
            return jnp.square(automaton.run_soft(config, coefficients, circuit, state, n_steps)).sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.logits[...], state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = (temporaries(36) - temporaries(4)) / 32
    assert state.nbytes <= more < 2 * state.nbytes  # a step of gates has 50 times that
