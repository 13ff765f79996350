"""Training with a growing edge list, killed and resumed: the final bits match.

As a program, ``test_training_edges.py FOLDER KILL_AT`` trains or resumes, and kills itself by SIGKILL after KILL_AT steps.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lutjax import optim as tables
from lutjax.layers.nnx import SparseLUT
from lutjax.optim.nnx import Optimizer, value_and_grad
from lutjax.training import checkpoints, loop
from lutjax.wiring import Edges, add_edges, carry_over, from_edges

pytestmark = pytest.mark.slow

T, C, INPUTS, OUTPUTS = 3, 2, 6, 7
STEPS, GROWN_AFTER, SAVED_EVERY = 12, 6, 2
RNG = np.random.default_rng(0)
PLACE = np.repeat(np.arange(T * 2**C), [3, 0, 1, 3, 2, 30, 0, 0, 3, 3, 3, 1])
EDGES = from_edges(
    PLACE // 2**C,
    PLACE % 2**C,
    RNG.integers(0, OUTPUTS, PLACE.size),
    n_detectors=T,
    n_rows=2**C,
    n_outputs=OUTPUTS,
)
X, Y = (RNG.normal(size=(STEPS, 8, n)).astype(np.float32) for n in (INPUTS, OUTPUTS))
RULE = tables.Optimizer(tables.RowAdam(b1=0.5), rate=0.1)


def modules(edges: Edges) -> tuple[SparseLUT, Optimizer]:
    layer = SparseLUT(
        INPUTS,
        OUTPUTS,
        n_detectors=T,
        n_anchors=C,
        targets=edges,
        rngs=nnx.Rngs(0),
        implementation="xla",
    )
    return layer, Optimizer(layer, RULE)


def state_of(layer: SparseLUT, optimizer: Optimizer) -> dict:
    return {
        "layer": nnx.to_pure_dict(nnx.state(layer)),
        "optimizer": nnx.to_pure_dict(nnx.state(optimizer)),
    }


def advance_of(edges: Edges) -> loop.Repeated:
    graphs = [nnx.split(module) for module in modules(edges)]

    def step(
        state: dict, number: jax.Array, data: tuple[jax.Array, jax.Array]
    ) -> tuple[dict, jax.Array]:
        kept = []
        for (graph, variables), values in zip(graphs, state.values(), strict=True):
            nnx.replace_by_pure_dict(variables, values)
            kept.append(nnx.merge(graph, variables))
        layer, optimizer = kept
        x, y = (a[number] for a in data)
        loss, gradients = value_and_grad(lambda layer: jnp.mean((layer(x) - y) ** 2))(layer)
        optimizer.update(layer, gradients)
        return state_of(layer, optimizer), loss

    return loop.Repeated(step, (X, Y))


def edges_of(state: dict) -> Edges:
    """A layer's edge list, taken from its variables."""
    first, target = (np.asarray(state["layer"][name]) for name in ("first_edges", "targets"))
    return Edges(first, target, T, 2**C, OUTPUTS, EDGES.width)


def with_more_edges(state: dict) -> dict:
    """Training state with an extra edge for each largest weight, from the same row to the next output."""
    of, weights = edges_of(state), np.asarray(state["layer"]["weights"])
    place = np.repeat(np.arange(T * 2**C), np.diff(of.first))
    largest = np.argsort(-np.abs(weights), kind="stable")[:4]
    detector, row = np.divmod(place[largest], 2**C)
    more = add_edges(of, detector, row, (of.target[largest] + 1) % OUTPUTS)
    new = {
        **state["layer"],
        "weights": carry_over(weights, more),
        "targets": more.edges.target,
        "first_edges": more.edges.first,
    }
    rows = jax.tree.map(
        lambda a: carry_over(a, more) if np.shape(a) == (of.size,) else a, state["optimizer"]
    )
    return jax.tree.map(jnp.asarray, {"layer": new, "optimizer": rows})


def train(folder: Path, kill_at: int = 0) -> dict:
    """Train to the end, from a folder's last checkpoint or from the start."""
    done, state = 0, state_of(*modules(EDGES))
    if checkpoints.steps(folder):
        done, meta = checkpoints.read_meta(folder)
        as_long = from_edges(
            *(np.zeros(meta["edges"], int),) * 3, n_detectors=T, n_rows=2**C, n_outputs=OUTPUTS
        )
        state = checkpoints.restore(folder, done, "state", state_of(*modules(as_long)))

    def save(step: int, loss: float, state: dict) -> None:
        if step % SAVED_EVERY == 0:
            checkpoints.save(folder, step, {"state": state}, {"edges": edges_of(state).size})

    def kill(step: int, loss: float, state: dict) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    hooks = [loop.Hook(SAVED_EVERY, save), loop.Hook(1, kill)]
    if done < GROWN_AFTER:
        state, done = loop.run(
            advance_of(edges_of(state)), state, first=done, steps=GROWN_AFTER, hooks=hooks
        )
    if edges_of(state).size == EDGES.size:  # a checkpoint of this step has the list before it grew
        state = with_more_edges(state)
    return loop.run(advance_of(edges_of(state)), state, first=done, steps=STEPS, hooks=hooks)[0]


def test_killed_before_and_after_the_list_grows(tmp_path: Path) -> None:
    expected = train(tmp_path / "whole")
    for kill_at, saved in ((5, [2, 4]), (9, [6, 8])):
        words = [sys.executable, __file__, str(tmp_path / "killed"), str(kill_at)]
        actual = subprocess.run(words, capture_output=True, text=True, check=False)
        assert actual.returncode == -signal.SIGKILL, actual.stderr
        assert checkpoints.steps(tmp_path / "killed") == saved
    state = train(tmp_path / "killed")
    assert edges_of(state).size == EDGES.size + 4
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), state, expected)
    assert np.any(np.asarray(state["layer"]["weights"]) != 0)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
