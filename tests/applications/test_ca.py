"""The logic automaton: against a simulation in numpy, packed against float, gradients, memory, and the command."""

import dataclasses
import functools
import re
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import example_circuits
import jax
import jax.numpy as jnp
import kills
import numpy as np
import optax
import pytest
from cases import slow, slow_except
from click.testing import Result
from commands import command
from flax import nnx
from machine import needs_gpu

import lutjax
from lutjax import reference
from lutjax.circuits import Format, netlist_json, step_automaton
from lutjax.cli import _progress
from lutjax.models import LogicCA, LogicCAConfig, PackedAutomaton, automaton
from lutjax.models._automaton_wires import NEIGHBORS
from lutjax.training import (
    automaton as training,
    automaton_runs,
    circuits,
    models,
    patterns,
    pruning,
    runs,
)

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")


def small(**options):
    sizes = {"channels": 2, "kernels": 3, "perception": (8, 4, 2), "update": (12, 6, 2)}
    model = LogicCA(LogicCAConfig(**sizes, **options), rngs=nnx.Rngs(0))
    model.logits.set_value(3 * jax.random.normal(jax.random.key(1), model.logits.shape))
    return model


def simulated(model, state, coefficients):
    """Return ``[H, W, C]`` after one synchronous step, cell by cell."""
    config, (wires, _) = model.config, model.wiring
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("options", "width"),
    slow_except(
        [
            ({}, 3),
            ({}, 35),
            ({"periodic": True}, 32),
            ({"periodic": True}, 35),
            ({"update_rate": 0.6}, 35),
            slow({}, 32),
            slow({"periodic": True}, 3),
            slow({"update_rate": 0.6}, 3),
            slow({"update_rate": 0.6}, 32),
        ],
        "{}-3",
        "{'update_rate': 0.6}-35",
        ids=str,
    ),
    ids=str,
)
def test_words_are_the_hard_automaton(width: int, options: dict) -> None:
    model = small(**options)
    key = jax.random.key(3)
    bits = jax.random.bernoulli(jax.random.key(2), shape=(3, 4, width, 2)).astype(jnp.float32)
    hard = lutjax.gate_coefficients(model.logits[...], hard=True, axis=0)
    first = jnp.moveaxis(bits, -1, 0)
    slow = automaton.run_soft(model.config, hard, model.wiring, first, 3, key)
    fast = model(bits, 3, key=key, deterministic=True)
    assert fast.dtype == bits.dtype
    assert (fast == jnp.moveaxis(slow, 0, -1)).all()


@pytest.mark.slow
def test_asynchronous_cells_are_new_or_old() -> None:
    state = jax.random.uniform(jax.random.key(2), (8, 8, 2))
    synchronous, asynchronous = small(), small(update_rate=0.5)
    assert asynchronous.with_update_rate(1).config == synchronous.config
    with pytest.raises(ValueError, match=r"update_rate is 2\.0; it is a probability"):
        asynchronous.with_update_rate(2.0)
    new = synchronous(state)
    mixed = asynchronous(state, key=jax.random.key(0))
    updated = jnp.isclose(mixed, new).all(-1)
    assert 0.25 < updated.mean() < 0.75
    assert (updated | (mixed == state).all(-1)).all()
    assert not jnp.allclose(mixed, asynchronous(state, key=jax.random.key(1)))


@pytest.mark.slow
def test_gradients_are_those_of_plain_mathematics_and_only_states_are_kept() -> None:
    model = small()
    state = jax.random.uniform(jax.random.key(2), (2, 3, 8, 9))
    config, wiring = model.config, model.wiring

    def plain(logits, state):
        """Compute the same without recomputation, ops or custom gradients."""
        coefficients = reference.gate_coefficients(logits, axis=0)
        for _ in range(2):
            channels, n_cells = state.shape[0], state[0].size
            near = jnp.stack([*automaton._shifted(config, state), state]).reshape(9, -1)
            wires = [jnp.stack([jnp.arange(24) % 8, jnp.full(24, 8)], -1), *wiring.wires]
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
        return jnp.square(automaton.run_soft(config, coefficients, wiring, state, 2)).sum()

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
            return jnp.square(automaton.run_soft(config, coefficients, wiring, state, n_steps)).sum()

        compiled = jax.jit(jax.grad(loss)).lower(model.logits[...], state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = (temporaries(36) - temporaries(4)) / 32
    assert state.nbytes <= more < 2 * state.nbytes  # a step of gates has 50 times that


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [slow({}), {"update_rate": 0.5}])
def test_a_rollout_is_the_states_of_all_steps(options: dict, deterministic: bool) -> None:
    model, key = small(**options), jax.random.key(3)
    start = jax.random.bernoulli(jax.random.key(2), shape=(2, 1, 8, 9, 2)).astype(jnp.float32)
    states = model.rollout(start, 3, key=key, deterministic=deterministic)
    assert states.shape == (4, *start.shape)
    np.testing.assert_array_equal(states[0], start)
    # An asynchronous one draws other cells for another number of steps.
    for n_steps in (3,) if options else (0, 1, 2, 3):
        last = model(start, n_steps, key=key, deterministic=deterministic)
        np.testing.assert_allclose(states[n_steps], last, atol=0 if deterministic else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"update_rate": 0.5}])
def test_what_is_kept_changes_no_gradient(options: dict) -> None:
    model, n_steps = small(**options), 7
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    state = jax.random.uniform(jax.random.key(2), (2, 8, 9, 2))

    def gradient(keep_every: int) -> list[jax.Array]:
        def loss(params, state):
            last = nnx.merge(graph, params, rest)(
                state, n_steps, key=jax.random.key(4), keep_every=keep_every
            )
            return jnp.square(last).sum()

        return jax.tree.leaves(jax.jit(jax.grad(loss, (0, 1)))(params, state))

    expected = gradient(1)
    for keep_every in (0, 3):
        for got, one in zip(gradient(keep_every), expected, strict=True):
            np.testing.assert_allclose(
                got, one, atol=1e-6 * float(jnp.abs(one).max()), err_msg=str(keep_every)
            )


@pytest.mark.slow
def test_what_is_kept_takes_less_memory() -> None:
    model = small()
    state = jax.random.uniform(jax.random.key(2), (2, 8, 9, 2))

    def temporaries(n_steps: int, keep_every: int) -> int:
        def loss(state):
            return jnp.square(model(state, n_steps, keep_every=keep_every)).sum()

        return jax.jit(jax.grad(loss)).lower(state).compile().memory_analysis().temp_size_in_bytes

    more = {n: temporaries(256, n) - temporaries(16, n) for n in (1, 16, 0)}
    assert more[1] >= 240 * state.nbytes
    assert more[16] <= more[1] / 8
    assert more[0] <= more[1] / 20


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("width", [3, 33, 64])
def test_a_packed_automaton_does_as_its_circuit(width: int, periodic: bool) -> None:
    about = {"kind": "automaton", "channels": 2, "periodic": periodic}
    ports = {"y": (2, Format())}
    circuit = example_circuits.random_circuit(
        width, 18, 80, arities=(2, 3), ports=ports, about=about, near=90
    )
    state = np.random.default_rng(width).integers(0, 2, (2, 5, width, 2), np.uint8)
    got = PackedAutomaton(circuit)(state, 3)
    assert got.dtype == jnp.uint8
    np.testing.assert_array_equal(got, step_automaton(circuit, state, 3))
    np.testing.assert_array_equal(PackedAutomaton(circuit)(state, 0), state)


def test_a_packed_automaton_checks_its_arguments() -> None:
    rule = PackedAutomaton(example_circuits.life_circuit())
    assert rule == PackedAutomaton(example_circuits.life_circuit())
    assert rule != PackedAutomaton(example_circuits.life_circuit(periodic=False))
    with pytest.raises(
        ValueError, match=r"state has shape \[4, 5, 2\]; expected \[\.\.\., height, width, 1\]"
    ):
        rule(jnp.zeros((4, 5, 2)))
    with pytest.raises(ValueError, match=r"expected \[1, \.\.\., height, 2\] for 33 columns"):
        rule.steps(jnp.zeros((1, 4, 1), jnp.uint32), 33)
    with pytest.raises(ValueError, match="n_steps is -1; it must not be negative"):
        rule(jnp.zeros((4, 5, 1)), -1)
    with pytest.raises(ValueError, match="circuit is of kind None; it must be the rule of an automaton"):
        PackedAutomaton(example_circuits.random_circuit(0, 3, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_steps": -1}, "n_steps is -1; it must not be negative"),
        ({"keep_every": -1}, "keep_every is -1; it must not be negative"),
    ],
)
def test_numbers_of_steps_are_checked(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small()(jnp.zeros((8, 9, 2)), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "platform",
    [
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.gpu,
                needs_gpu,
            ],
        ),
        "cpu",
    ],
)
def test_the_gradient_through_many_steps_is_that_of_a_cpu(platform: str) -> None:
    model = LogicCA(dataclasses.replace(small(periodic=True).config, residual=8.0), rngs=nnx.Rngs(0))
    state = np.asarray(jax.random.uniform(jax.random.key(2), (2, 3, 8, 9)))

    def gradients(device: jax.Device) -> list[np.ndarray]:
        # Gradients of logits are small differences of those of coefficients, and lose three digits to rounding.
        def loss(coefficients: jax.Array, wiring: automaton.Wiring, state: jax.Array) -> jax.Array:
            return jnp.square(automaton.run_soft(model.config, coefficients, wiring, state, 20)).sum()

        coefficients = lutjax.gate_coefficients(model.logits[...], axis=0)
        arguments = jax.device_put((coefficients, model.wiring, state), device)
        got = jax.jit(jax.grad(loss, argnums=(0, 2)))(*arguments)
        assert all(gradient.devices() == {device} for gradient in got)
        return [np.asarray(gradient) for gradient in got]

    expected = gradients(jax.devices("cpu")[0])
    for got, one in zip(gradients(jax.devices(platform)[-1]), expected, strict=True):
        assert np.abs(one).max() > 1e-3  # the first state still counts
        np.testing.assert_allclose(got, one, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize(
    ("kernels", "perception", "expected"),
    [
        (4, (8, 4, 2, 1), {0: 1, 2: 1, 5: 1, 7: 1}),
        slow(16, (8, 4, 2, 1), dict.fromkeys(range(8), 2)),
        slow(4, (8, 4, 2), dict.fromkeys(range(8), 1)),
        slow(3, (8, 6, 5), None),
        (2, (8,), dict.fromkeys(range(8), 2)),
    ],
)
def test_outputs_of_kernels_start_in_different_directions(
    kernels: int, perception: tuple[int, ...], expected: dict[int, int] | None
) -> None:
    config = LogicCAConfig(channels=3, kernels=kernels, perception=perception, update=(20, 3))
    directions = {}
    for seed in range(3):
        model = LogicCA(config, rngs=nnx.Rngs(seed))
        wires = [np.asarray(w) for w in model.wiring.wires]
        at = np.arange(kernels * perception[-1])
        for layer in reversed(wires[: len(perception) - 1]):
            at = layer[at, 0]
        found = at % 8
        directions[seed] = tuple(found)
        # A soft automaton of such gates moves the cell that each output reads: the one in that direction.
        state = np.asarray(jax.random.uniform(jax.random.key(seed), (5, 5, 3)))
        gates = np.zeros((4, config.n_gates), np.float32)
        gates[1] = 1  # the first input
        seen = np.stack([np.roll(state, (1 - y, 1 - x), (0, 1)) for y, x in NEIGHBORS])[found][:, 2, 2]
        inputs = np.concatenate([state[2, 2], seen.reshape(-1)])
        new = inputs[wires[len(perception) - 1][:, 0]][wires[-1][:, 0]]
        np.testing.assert_allclose(simulated(model, state, gates)[2, 2], new)
        if expected is None:
            for kernel in found.reshape(kernels, -1):
                assert len(set(kernel)) == len(kernel)
        else:
            assert dict(zip(*np.unique(found, return_counts=True), strict=True)) == expected
        first = wires[len(perception) - 1]
        assert len({tuple(pair) for pair in first}) == len(first)
        assert len(set(first[:, 0])) == min(len(first), len(inputs) - 1)
    if len(perception) > 1:
        assert len(set(directions.values())) > 1


@pytest.mark.slow
# ------------------------------------------------------------------------------------- training
def test_a_run_that_goes_on_says_that_shares_were_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(*WORDS, "--no-pictures", "--out", out).exit_code == 0
    result = train("--resume", "--steps=10", "--no-pictures", "--out", out)
    assert "were taken at another rate or share of hard gates" in " ".join(result.output.split())


def test_the_share_of_hard_gates_grows() -> None:
    config = automaton_runs.Automaton.new(
        {"steps": 100, "hard_share": 0.1, "last_hard_share": 0.8}
    ).run.training
    got = [float(config.hard_share_at(jnp.int32(n))) for n in (0, 30, 65, 100)]
    np.testing.assert_allclose(got, [0.1, 0.1, 0.45, 0.8], atol=1e-6)
    same = dataclasses.replace(config, last_hard_share=None)
    assert float(same.hard_share_at(jnp.int32(99))) == 0.1
    assert dataclasses.replace(config, hard_share=0).hardens
    assert not dataclasses.replace(config, hard_share=0, last_hard_share=None).hardens


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["checkerboard-async", "life"])
def test_runs_are_those_of_their_seeds(experiment: str) -> None:
    sizes = {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2), "steps": 4}
    if experiment != "life":
        sizes |= {"size": 6, "n_steps": 3}

    def run_of(seed: int, runs: int) -> tuple[training.Run, models.State]:
        run = automaton_runs.Automaton.new({**sizes, "seed": seed, "runs": runs}, experiment).run
        return run, run.advance(run.init(), 0, 4)[0]

    together, state = run_of(5, 3)
    alone = [run_of(seed, 1) for seed in (5, 6, 7)]
    wrong = [one.wrong(its) for one, its in alone]
    assert together.wrong_of_runs(state) == wrong
    assert together.wrong(state) == min(wrong)
    for number, (_, its) in enumerate(alone):
        for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(its), strict=True):
            np.testing.assert_allclose(np.asarray(got)[number], expected, rtol=1e-5, atol=1e-6)
    best = int(np.argmin(wrong))
    expected = alone[best][0].best(alone[best][1])
    np.testing.assert_allclose(together.best(state).logits[...], expected.logits[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(together.best(state).wires[0][...], expected.wires[0][...])


@pytest.mark.slow
def test_each_number_of_a_gradient_is_clipped() -> None:
    sizes = {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2), "size": 16, "n_steps": 1}
    run = automaton_runs.Automaton.new(
        {**sizes, "batch_size": 64, "hard_share": 0, "last_hard_share": None, "runs": 1}, "checkerboard"
    ).run
    state = run.init()
    key = jax.random.fold_in(jax.random.key(run.training.seed), 0)
    first, target = run.sample(jax.random.split(key, 3)[0], 64)
    wiring = run.structure.model(state.params, state.others).wiring

    def loss(logits: jax.Array) -> jax.Array:
        coefficients = lutjax.gate_coefficients(logits, axis=0)
        last = automaton.run_soft(run.config, coefficients, wiring, first.astype(jnp.float32), 1)
        return jnp.square(last[:1] - target.astype(jnp.float32)).sum()

    gradient = np.asarray(jax.grad(loss)(state.params["logits"]))
    assert np.abs(gradient).max() > 200
    assert (np.abs(gradient) < 100).any()
    after, _ = jax.jit(run.step)(state, jnp.int32(0), None)
    moment = np.asarray(optax.tree_utils.tree_get(after.optimizer.adam, "mu")["logits"])
    np.testing.assert_allclose(moment, 0.1 * np.clip(gradient, -100, 100), atol=1e-3)


def test_one_torus_holds_every_board_of_the_game_of_life() -> None:
    torus = training.every_neighborhood()
    boards = [np.roll(torus, (-y, -x), (0, 1))[:3, :3] for y in range(8) for x in range(64)]
    assert len({board.tobytes() for board in boards}) == 512
    glider = np.array(
        [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], bool
    )
    moved = glider
    for _ in range(4):
        moved = np.asarray(training.life(moved))
    assert (moved == np.roll(glider, (1, 1), (0, 1))).all()


def test_patterns() -> None:
    board = patterns.checkerboard(8)[0]
    assert (board[:2, :2] == 0).all()
    assert (board == np.roll(board, (2, 2), (0, 1))).all()
    assert (patterns.lizard(22)[0, 1:-1, 1:-1] == patterns.lizard()[0]).all()
    assert patterns.letter().shape == (3, 16, 16)
    with pytest.raises(ValueError, match="size is 15; a letter needs 16"):
        patterns.letter(15)


def test_live_gates_are_those_that_change_the_output() -> None:
    """Against truth: an inversion of a gate that is not live changes no target bit, in any of many states."""
    model = small(periodic=True)
    used = circuits.live(model, 1)
    assert 0 < used.sum() < len(used)
    state = jax.random.bernoulli(jax.random.key(5), shape=(2, 8, 32, 6))
    gates = np.asarray(model.gates())
    before = automaton.run_hard(model.config, gates, model.wiring, state, 4)[0]
    for place in np.flatnonzero(~used):
        other = np.where(np.arange(len(gates)) == place, 15 - gates, gates)
        assert (automaton.run_hard(model.config, other, model.wiring, state, 4)[0] == before).all()
    other = np.where(used, 15 - gates, gates)
    assert (automaton.run_hard(model.config, other, model.wiring, state, 4)[0] != before).any()
    assert "active" in circuits.table(model, 1)


SIZES = ["--channels=2", "--kernels=2", "--perception=8,2", "--update=8,2", "--size=6", "--n-steps=3"]
STEPS = ["--steps=8", "--log-every=1", "--eval-every=4", "--checkpoint-every=3"]


WORDS = ["--experiment=checkerboard-async", *SIZES, *STEPS]


def train(*words: object) -> Result:
    return command("train", "ca", *words)


def arrays(out: Path) -> list[np.ndarray]:
    step, record = runs.read(out, training.Record)
    run = training.Run(record.model, record.training, training.pattern(record))
    return [step, *map(np.asarray, jax.tree.leaves(models.restore(out, step, run)))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ca") / "run"
    result = train(*WORDS, "--out", out)
    assert result.exit_code == 0, result.output
    assert "training checkerboard-async" in result.output
    assert "a cleared quarter after 6 steps" in result.output
    assert "cells updated with probability 0.3, 6 steps" in result.output
    assert "cells updated with probability 1, 2 steps" in result.output
    assert "2 runs of" in result.output
    assert re.search(r"Wrong bits of each run: seed 0: [0-9.]+, seed 1: [0-9.]+", result.output)
    assert "wrong bits of a grid" in result.output
    return out


@pytest.mark.slow
def test_pictures_and_gates(finished: Path) -> None:
    assert (finished / "automaton.gif").read_bytes().startswith(b"GIF89a")
    assert "a xor b" in (finished / "gates.txt").read_text()
    own = {*automaton_runs.Automaton.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in finished.iterdir()} == own
    model, record = training.load_model(finished)
    assert circuits.table(model, 1) == (finished / "gates.txt").read_text()
    rule = netlist_json.read(finished / "pruned.json")
    assert rule.about["kind"] == "automaton"
    assert "probability of 0.6" in (finished / "automaton.html").read_text()
    assert record.training.experiment == "checkerboard-async"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "fields", "proved", "where"),
    [
        ("letter", {"n_steps": 5}, True, "5 steps of 16 x 16 cells"),
        ("life", {"channels": 1, "update": (8, 4, 1)}, True, "all 512 neighborhoods"),
        (
            "checkerboard-async",
            {"size": 6, "n_steps": 4, "update": (16, 16, 8, 4)},
            False,
            "4 steps of 6 x 6 cells from 16 random states, with random updates",
        ),
    ],
)
def test_gates_are_removed_that_the_last_state_does_not_depend_on(
    experiment: str, fields: dict, proved: bool, where: str
) -> None:
    sizes = {"channels": 4, "kernels": 2, "perception": (8, 2), "update": (16, 8, 4), "runs": 1, **fields}
    run = automaton_runs.Automaton.new(sizes, experiment).run
    model, n = run.best(run.init()), len(run.compared)
    gates = np.random.default_rng(3).choice([1, 3, 6, 7, 9, 14, 15], model.config.n_gates)
    model.logits.set_value(jnp.eye(16)[:, gates])
    pruned = pruning.pruned(run, model)
    assert (pruned.proved, pruned.where) == (proved, where)
    assert circuits.active(pruned.model, n) < circuits.active(model, n)
    first, _ = run.sample(jax.random.key(1), 16 if run.training.start == "random" else 512)
    key, shown = jax.random.key(3), []
    for one in (model, pruned.model):
        last = automaton.run_hard(one.config, one.gates(), one.wiring, first, run.training.n_steps, key)
        shown.append(np.asarray(last[:n]))
    np.testing.assert_array_equal(*shown)
    assert shown[0].any()
    rule = pruned.rule(n)
    assert len(rule) <= circuits.active(pruned.model, n) * run.config.channels
    if run.config.update_rate == 1:
        last = np.moveaxis(np.asarray(first), 0, -1)
        for _ in range(run.training.n_steps):
            last = step_automaton(rule, last)
        np.testing.assert_array_equal(np.moveaxis(last, -1, 0)[:n], shown[0])


@pytest.mark.slow  # as digits that are killed while they finish
def test_killed_while_it_is_drawn(finished: Path, tmp_path: Path, compilation_cache_directory: Path) -> None:
    out = tmp_path / "run"
    assert kills.run(out, ["train", "ca", *WORDS], compilation_cache_directory, r"automaton\.gif", 2)
    assert sorted(p.name for p in out.glob("*automaton.gif")) == [".unfinished-automaton.gif"]
    resumed = train("--resume", "--out", out)
    assert resumed.exit_code == 0
    assert "resumed after" not in resumed.output  # no step is taken again
    assert "drawing the automaton ..." in resumed.output
    assert "counting its gates" not in resumed.output  # done before
    kills.assert_same(out, finished)


@pytest.mark.slow
def test_killed_twenty_times(finished: Path, tmp_path: Path, compilation_cache_directory: Path) -> None:
    kills.check(["train", "ca", *WORDS], finished, tmp_path, compilation_cache_directory)


@pytest.mark.slow
def test_pictures_are_drawn_later(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    for name in ("finished.json", "automaton.gif"):
        (out / name).unlink()
    train("--resume", "--no-pictures", "--out", out)
    assert not (out / "automaton.gif").exists()
    train("--resume", "--pictures", "--out", out)
    assert (out / "automaton.gif").read_bytes() == (finished / "automaton.gif").read_bytes()


def test_solved_is_without_a_wrong_bit_three_times() -> None:
    sizes = {"kernels": 1, "perception": (8, 1), "update": (2, 1), "steps": 1000}

    def solved(*wrong: float, **options: bool) -> str | None:
        run = automaton_runs.Automaton.new({**sizes, **options})
        run.record.history.test = [(100 * n, w) for n, w in enumerate(wrong, 1)]
        return run.over(100 * len(wrong))

    assert solved(0, 0, 1, 0, 0) is None
    assert solved(4, 0, 0, 0) == "no wrong bit in 3 tests one after the other after 400 of 1000 steps"
    assert solved(4, 0, 0, 0, stop_when_solved=False) is None
    old = automaton_runs.Automaton.new(sizes).record
    del old.options["stop_when_solved"]  # as older versions wrote it
    assert not automaton_runs.Automaton(old).intervals.stop_when_solved


@pytest.mark.slow  # runs of all three commands share what stops and resumes them
def test_interrupted_run_ends_the_same(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = _progress.Report.training

    def interrupt(self: _progress.Report, losses: Sequence[tuple[int, float]]) -> None:
        show(self, losses)
        if losses[-1][0] == 5:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(_progress.Report, "training", interrupt)
        patch.setattr("lutjax.training.loop.CALL", 0.0)  # each loss comes alone
        out = tmp_path / "run"
        stopped = train("--experiment=checkerboard-async", "--out", out, *SIZES, *STEPS, "--no-pictures")
    assert stopped.exit_code == 130
    assert "Stopped after 5 of 8 steps" in stopped.output
    other = train("--resume", "--out", out, "--hard-share=0.5")
    assert other.exit_code == 1
    assert "--hard-share is 0.1 in the checkpoint, not 0.5" in " ".join(other.output.split())
    resumed = train("--resume", "--out", out, "--no-pictures")
    assert resumed.exit_code == 0, resumed.output
    assert "resumed after 5 steps" in resumed.output
    for got, expected in zip(arrays(out), arrays(finished), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert runs.read(out, training.Record)[1].history == runs.read(finished, training.Record)[1].history
    assert "is finished: all 8 steps are done" in train("--resume", "--out", out).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target=wide.png"], "wide.png has 7 x 6 pixels; the grid is 6 x 6"),
        (["--target=gray.png"], "the pixel at row 2, column 1 is [128, 128, 128, 255]"),
        (
            ["--target=red.png"],
            "the target has shape [3, 6, 6]; the grid has 6 rows and columns and 2 channels",
        ),
        (["--experiment=picture"], "the experiment picture draws an image of yours; give one"),
        (["--experiment=picture", "--target=wide.png"], "wide.png has 7 x 6 pixels; the grid is 6 x 6"),
        (["--loss-channels=1"], "--loss-channels is (1,); the target has channels 0 to 0"),
        (["--loss-channels=0,0"], "--loss-channels is (0, 0); give different numbers"),
        (["--clip=0"], "--clip is 0.0; it must be above 0"),
        (["--keep-every=-1"], "--keep-every is -1"),
        (["--target=missing.png"], "cannot read the image missing.png"),
        (["--perception=7,2"], "--perception is (7, 2); it must start with 8"),
        (["--update=8,3"], "--update is (8, 3); it must end with 2 gates"),
        (["--update-rate=0"], "--update-rate is 0.0"),
        (["--hard-share=2"], "--hard-share is 2.0"),
        (["--last-hard-share=2"], "--last-hard-share is 2.0"),
        (["--hard-growth=1"], "--hard-growth is 1.0"),
        (["--runs=0"], "--runs is 0"),
        (["--mesh", "data=2"], "--runs is 2; a mesh divides one run"),
        (["--experiment=lizard"], "size is 6; a lizard needs 20"),
        (["--experiment=life", "--target=red.png"], "the Game of Life has none"),
        (["--experiment=fish"], "'fish' is not one of 'life'"),
        (["--resume"], "run does not exist"),
    ],
)
@pytest.mark.usefixtures("without_typechecking")
def test_bad_input_is_one_message(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (7, 6)).save("wide.png")
    Image.new("RGB", (6, 6), (255, 0, 0)).save("red.png")
    gray = Image.new("RGB", (6, 6))
    gray.putpixel((1, 2), (128, 128, 128))
    gray.save("gray.png")
    sizes = [
        word
        for word in SIZES
        if "--experiment=life" not in words or ("size" not in word and "steps" not in word)
    ]
    result = train("--experiment=checkerboard", "--out=run", *sizes, *words)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())
    assert not Path("run").exists()


def test_an_image_is_a_pattern(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.new("RGB", (16, 16))
    for y, x in np.argwhere(patterns.letter().any(0)):
        picture.putpixel((int(x), int(y)), tuple(int(v) for v in 255 * patterns.letter()[:, y, x]))
    picture.save(tmp_path / "letter.png")
    assert (patterns.read_image(tmp_path / "letter.png", 16) == patterns.letter()).all()
    assert patterns.read_image(tmp_path / "letter.png", 16, threshold=1.0).sum() == 0


def test_a_picture_decides_the_grid(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (5, 2), (255, 255, 0)).save(tmp_path / "wide.png")
    Image.new("RGB", (65, 2)).save(tmp_path / "large.png")
    new = functools.partial(automaton_runs.Automaton.new, experiment="picture")
    sizes = {"channels": 3, "kernels": 1, "perception": (8, 2), "update": (8, 3)}
    run = new(sizes, path=tmp_path / "wide.png").run
    assert (run.training.size, run.training.n_steps) == (5, 4)
    expected = np.zeros((3, 5, 5), bool)
    expected[:2, 1:3] = True
    np.testing.assert_array_equal(run.target, expected)
    own = new({**sizes, "n_steps": 9}, path=tmp_path / "wide.png").run
    assert (own.training.size, own.training.n_steps) == (5, 9)
    with pytest.raises(
        patterns.PatternError, match=r"large\.png has 65 x 2 pixels; at most 64 x 64 are drawn"
    ):
        new(sizes, path=tmp_path / "large.png")


@pytest.mark.slow
def test_channels_that_the_loss_leaves_out_may_be_anything() -> None:
    sizes = {"channels": 4, "kernels": 1, "perception": (8, 2), "update": (8, 4), "runs": 1}
    run = automaton_runs.Automaton.new({**sizes, "loss_channels": (2, 0)}, "letter").run
    assert run.compared == (2, 0)
    other = training.Run(run.config, run.training, run.target ^ np.array([0, 1, 0], bool)[:, None, None])
    states = [one.advance(one.init(), 0, 2) for one in (run, other)]
    assert float(states[0][1]) == float(states[1][1])
    assert run.wrong(states[0][0]) == other.wrong(states[1][0])
    every = automaton_runs.Automaton.new(sizes, "letter").run
    assert float(every.advance(every.init(), 0, 2)[1]) != float(states[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_game_of_life_is_learned(seed: int) -> None:
    run = automaton_runs.Automaton.new({"seed": seed}).run
    state, _ = run.advance(run.init(), 0, run.training.steps)
    assert run.wrong(state) == 0
