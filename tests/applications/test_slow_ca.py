"""Long logic-automaton tests: gradients, memory, training, pictures."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_except
from commands import output
from flax import nnx
from machine import needs_gpu
from small_runs import automaton_of

import lutjax
from lutjax import reference
from lutjax.circuits import netlist_json, step_automaton
from lutjax.models import LogicCA, LogicCAConfig, automaton
from lutjax.training import automaton as training, automaton_runs, circuits, pruning

SIZES = {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2)}


def run_of(experiment, **fields):
    return automaton_runs.Automaton.create({**SIZES, "runs": 1, **fields}, experiment).run


def test_asynchronous_cells_are_new_or_old():
    state = jax.random.uniform(jax.random.key(2), (8, 8, 2))
    synchronous, asynchronous = automaton_of(), automaton_of(update_rate=0.5)
    assert asynchronous.with_update_rate(1).config == synchronous.config
    with pytest.raises(ValueError, match=r"update_rate is 2\.0; it is a probability"):
        asynchronous.with_update_rate(2.0)
    new = synchronous(state)
    mixed = asynchronous(state, key=jax.random.key(0))
    updated = jnp.isclose(mixed, new).all(-1)
    assert 0.25 < updated.mean() < 0.75
    assert (updated | (mixed == state).all(-1)).all()
    assert not jnp.allclose(mixed, asynchronous(state, key=jax.random.key(1)))


def loss_of(model, n_steps, **options):
    def loss(logits, state):
        coefficients = lutjax.gate_coefficients(logits, axis=0)
        last = automaton.run_soft(
            model.config, coefficients, model.wiring, state, n_steps, **options
        )
        return jnp.square(last).sum()

    return loss


@pytest.mark.parametrize("keep_every", [1, 0, 3])
def test_gradients_are_those_of_plain_mathematics(keep_every):
    model, n_steps = automaton_of(), 4
    state = jax.random.uniform(jax.random.key(2), (2, 3, 8, 9))
    config, wiring = model.config, model.wiring

    def plain(logits, state):
        """Compute the same without recomputation, ops or custom gradients."""
        coefficients = reference.gate_coefficients(logits, axis=0)
        for _ in range(n_steps):
            channels, n_cells = state.shape[0], state[0].size
            near = jnp.stack([*automaton._shift_neighbors(config, state), state]).reshape(9, -1)
            wires = [jnp.stack([jnp.arange(24) % 8, jnp.full(24, 8)], -1), *wiring.wires]
            x, first = near, 0
            for layer, w in enumerate(wires):
                if layer == len(config.perception):
                    x = jnp.concatenate([state.reshape(channels, n_cells), x.reshape(-1, n_cells)])
                c = coefficients[:, first : first + len(w)]
                x, first = reference.bilinear_gates(x, c, w, feature_axis=0), first + len(w)
            state = x.reshape(state.shape)
        return jnp.square(state).sum()

    ours = jax.jit(jax.grad(loss_of(model, n_steps, keep_every=keep_every), argnums=(0, 1)))
    expected = jax.jit(jax.grad(plain, (0, 1)))(model.logits[...], state)
    for got, one in zip(ours(model.logits[...], state), expected, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-4 * float(jnp.abs(one).max()))


def test_memory_of_a_gradient_is_that_of_the_states_it_keeps():
    model = automaton_of()
    state = jax.random.uniform(jax.random.key(2), (2, 3, 8, 9))

    def temporaries(n_steps, keep_every):
        loss = jax.grad(loss_of(model, n_steps, keep_every=keep_every))
        compiled = jax.jit(loss).lower(model.logits[...], state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = {n: (temporaries(256, n) - temporaries(16, n)) / 240 for n in (1, 16, 0)}
    assert state.nbytes <= more[1] < 2 * state.nbytes  # a step of gates has 50 times that
    assert more[16] <= more[1] / 8
    # A state every sqrt(n) steps, and those between two of them: 32 for 256 steps, 8 for 16.
    assert more[0] <= more[1] * (32 - 8) / 240


@pytest.mark.parametrize(
    "platform", [pytest.param("gpu", marks=[pytest.mark.gpu, needs_gpu]), "cpu"]
)  # fmt: skip
def test_the_gradient_through_many_steps_is_that_of_a_cpu(platform):
    model = LogicCA(
        dataclasses.replace(automaton_of(periodic=True).config, residual=8.0), rngs=nnx.Rngs(0)
    )
    state = np.asarray(jax.random.uniform(jax.random.key(2), (2, 3, 8, 9)))

    def gradients(device):
        # Gradients of logits are small differences of those of coefficients, and lose three digits to rounding.
        def loss(coefficients, wiring, state):
            return jnp.square(
                automaton.run_soft(model.config, coefficients, wiring, state, 20)
            ).sum()

        coefficients = lutjax.gate_coefficients(model.logits[...], axis=0)
        arguments = jax.device_put((coefficients, model.wiring, state), device)
        got = jax.jit(jax.grad(loss, argnums=(0, 2)))(*arguments)
        assert all(gradient.devices() == {device} for gradient in got)
        return [np.asarray(gradient) for gradient in got]

    expected = gradients(jax.devices("cpu")[0])
    for got, one in zip(gradients(jax.devices(platform)[-1]), expected, strict=True):
        assert np.abs(one).max() > 1e-3  # the first state still counts
        np.testing.assert_allclose(got, one, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("experiment", ["checkerboard-async", "life"])
def test_runs_are_those_of_their_seeds(experiment):
    sizes = {"steps": 4} if experiment == "life" else {"steps": 4, "size": 6, "n_steps": 3}

    def trained(seed, runs):
        run = run_of(experiment, **sizes, seed=seed, runs=runs)
        return run, run.advance(run.init(), 0, 4)[0]

    together, state = trained(5, 3)
    alone = [trained(seed, 1) for seed in (5, 6, 7)]
    wrong = [one.wrong(its) for one, its in alone]
    assert together.wrong_of_runs(state) == wrong
    assert together.wrong(state) == min(wrong)
    for number, (_, its) in enumerate(alone):
        for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(its), strict=True):
            np.testing.assert_allclose(np.asarray(got)[number], expected, rtol=1e-5, atol=1e-6)
    run, its = alone[int(np.argmin(wrong))]
    best, expected = together.best(state), run.best(its)
    np.testing.assert_allclose(best.logits[...], expected.logits[...], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(best.wires[0][...], expected.wires[0][...])


def test_each_number_of_a_gradient_is_clipped():
    shares = {"hard_share": 0, "last_hard_share": None}
    run = run_of("checkerboard", size=16, n_steps=1, batch_size=64, **shares)
    state = run.init()
    key = jax.random.fold_in(jax.random.key(run.training.seed), 0)
    first, target = run.sample(jax.random.split(key, 3)[0], 64)
    wiring = run.structure.model(state.params, state.others).wiring

    def loss(logits):
        coefficients = lutjax.gate_coefficients(logits, axis=0)
        last = automaton.run_soft(run.config, coefficients, wiring, first.astype(jnp.float32), 1)
        return jnp.square(last[:1] - target.astype(jnp.float32)).sum()

    gradient = np.asarray(jax.grad(loss)(state.params["logits"]))
    assert np.abs(gradient).max() > 200
    assert (np.abs(gradient) < 100).any()
    after, _ = jax.jit(run.step)(state, jnp.int32(0), None)
    moment = np.asarray(optax.tree_utils.tree_get(after.optimizer.adam, "mu")["logits"])
    np.testing.assert_allclose(moment, 0.1 * np.clip(gradient, -100, 100), atol=1e-3)


def test_the_command_draws_and_counts(automaton_run, tmp_path):
    out, _, said = automaton_run
    for text in (
        "training checkerboard-async",
        "a cleared quarter after 6 steps",
        "cells updated with probability 0.3, 6 steps",
        "cells updated with probability 1, 2 steps",
        "2 runs of",
        "Wrong bits of each run: seed 0: ",
        "wrong bits of a grid",
    ):
        assert text in said
    assert "a xor b" in (out / "gates.txt").read_text()
    own = {*automaton_runs.Automaton.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in out.iterdir()} == own
    model, record = training.load_model(out)
    assert circuits.table(model, 1) == (out / "gates.txt").read_text()
    assert netlist_json.read(out / "pruned.json").about["kind"] == "automaton"
    assert "probability of 0.6" in (out / "automaton.html").read_text()
    assert record.training.experiment == "checkerboard-async"
    film, other = (out / "automaton.gif").read_bytes(), tmp_path / "run"
    assert film.startswith(b"GIF89a")
    shutil.copytree(out, other)
    for name in ("finished.json", "automaton.gif"):
        (other / name).unlink()
    output("train", "ca", "--resume", "--no-pictures", "--out", other)
    assert not (other / "automaton.gif").exists()
    output("train", "ca", "--resume", "--pictures", "--out", other)
    assert (other / "automaton.gif").read_bytes() == film


@pytest.mark.parametrize(
    ("experiment", "fields", "proved", "where"),
    [
        ("letter", {"n_steps": 5}, True, "5 steps of 16 x 16 cells"),
        ("life", {"channels": 1, "update": (8, 4, 1)}, True, "all 512 neighborhoods"),
        ("checkerboard-async", {"size": 6, "n_steps": 4, "update": (16, 16, 8, 4)}, False, "4 steps of 6 x 6 cells from 16 random states, with random updates"),
    ],
)  # fmt: skip
def test_gates_are_removed_that_the_last_state_does_not_depend_on(
    experiment, fields, proved, where
):
    run = run_of(experiment, **{"channels": 4, "update": (16, 8, 4), **fields})
    model, n = run.best(run.init()), len(run.compared)
    gates = np.random.default_rng(3).choice([1, 3, 6, 7, 9, 14, 15], model.config.n_gates)
    model.logits.set_value(jnp.eye(16)[:, gates])
    pruned = pruning.prune_automaton(run, model)
    assert (pruned.proved, pruned.where) == (proved, where)
    assert circuits.count_active_gates(pruned.model, n) < circuits.count_active_gates(model, n)
    first, _ = run.sample(jax.random.key(1), 16 if run.training.start == "random" else 512)
    key, shown = jax.random.key(3), []
    for one in (model, pruned.model):
        last = automaton.run_hard(
            one.config, one.gates(), one.wiring, first, run.training.n_steps, key
        )
        shown.append(np.asarray(last[:n]))
    np.testing.assert_array_equal(*shown)
    assert shown[0].any()
    rule = pruned.rule(n)
    assert len(rule) <= circuits.count_active_gates(pruned.model, n) * run.config.channels
    if run.config.update_rate == 1:
        last = step_automaton(rule, np.moveaxis(np.asarray(first), 0, -1), run.training.n_steps)
        np.testing.assert_array_equal(np.moveaxis(last, -1, 0)[:n], shown[0])


def test_channels_that_the_loss_leaves_out_may_be_anything():
    sizes = {"channels": 4, "kernels": 1, "update": (8, 4)}
    run = run_of("letter", **sizes, loss_channels=(2, 0))
    assert run.compared == (2, 0)
    other = training.Run(
        run.config, run.training, run.target ^ np.array([0, 1, 0], bool)[:, None, None]
    )
    (state, loss), (others, same) = (one.advance(one.init(), 0, 2) for one in (run, other))
    assert float(loss) == float(same)
    assert run.wrong(state) == other.wrong(others)
    every = run_of("letter", **sizes)
    assert float(every.advance(every.init(), 0, 2)[1]) != float(loss)


@pytest.mark.parametrize("seed", range(10))
def test_the_game_of_life_is_learned(seed):
    run = automaton_runs.Automaton.create({"seed": seed}).run
    state, _ = run.advance(run.init(), 0, run.training.steps)
    assert run.wrong(state) == 0


def test_an_automaton_of_other_wires():
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    one, other = (LogicCA(config, rngs=nnx.Rngs(seed)) for seed in range(2))
    state = jnp.zeros((1, 4, 4, 2))
    nnx.update(other, nnx.state(one, nnx.Param))
    with pytest.raises(
        ValueError, match=r"LogicCA: logits is from the state of another layer, whose wires\[0\]"
    ):
        other(state, 1)
    nnx.update(other, nnx.state(one))
    other(state, 1)
    for name in ("wires", "readers"):
        variable = getattr(other, name)[0]
        good = variable.get_value()
        variable.set_value(jnp.full_like(good, 1000))
        with pytest.raises(ValueError, match=rf"LogicCA: layer 0: {name} .*ids from 1000 to 1000"):
            other(state, 1)
        variable.set_value(good)


@pytest.mark.parametrize(
    ("options", "width"),
    slow_except(
        [({"periodic": True}, 35), ({"update_rate": 0.6}, 35), ({"periodic": True}, 32), ({}, 3)],
        "options1-35",
        ids=[f"options{i}-{width}" for i, width in enumerate((35, 35, 32, 3))],
    ),
)
def test_words_are_the_hard_automaton(width, options):
    model, key = automaton_of(**options), jax.random.key(3)
    bits = jax.random.bernoulli(jax.random.key(2), shape=(3, 4, width, 2)).astype(jnp.float32)
    hard = lutjax.gate_coefficients(model.logits[...], hard=True, axis=0)
    run = jax.jit(lambda bits: automaton.run_soft(model.config, hard, model.wiring, bits, 3, key))
    one = run(jnp.moveaxis(bits, -1, 0))
    result = model(bits, 3, key=key, deterministic=True)
    assert result.dtype == bits.dtype
    np.testing.assert_array_equal(result, jnp.moveaxis(one, 0, -1))
