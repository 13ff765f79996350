"""Logic automaton: NumPy simulation, packed against float states, gradients, memory, and the command."""

import dataclasses
import functools
from pathlib import Path

import example_circuits
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_where
from commands import refusal
from flax import nnx
from small_runs import CA_SIZES, automaton_of

from lutjax import reference
from lutjax.circuits import Format, step_automaton
from lutjax.models import LogicCA, LogicCAConfig, PackedAutomaton, automaton
from lutjax.models._automaton_wires import NEIGHBORS
from lutjax.training import automaton as training, automaton_runs, circuits, patterns


def simulated(model, state, coefficients):
    """Return ``[H, W, C]`` after one synchronous step, computed cell by cell."""
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
                w = np.stack(
                    [np.tile(np.arange(8), config.kernels), np.full(8 * config.kernels, 8)], -1
                )
                values, first = gates(np.append(near, patch[4]), w, 0), len(w)
                for w in wires[: len(config.perception) - 1]:
                    values, first = gates(values, np.asarray(w), first), first + len(w)
                seen.append(values)
            values = np.concatenate([state[y, x], np.stack(seen, -1).ravel()])
            for w in wires[len(config.perception) - 1 :]:
                values, first = gates(values, np.asarray(w), first), first + len(w)
            new[y, x] = values
    return new


def test_steps_are_those_of_a_simulation():
    model = automaton_of(periodic=True)
    state = np.random.default_rng(0).random((2, 4, 2)).astype(np.float32)
    soft = np.asarray(reference.gate_coefficients(model.logits[...], axis=0))
    expected = simulated(model, simulated(model, state, soft), soft)
    actual = jax.jit(lambda state: model(state, 2))(state)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize("deterministic", [slow(False), True])
def test_a_rollout_is_the_states_of_all_steps(deterministic):
    model, key = automaton_of(update_rate=0.5), jax.random.key(3)
    start = jax.random.bernoulli(jax.random.key(2), shape=(2, 1, 8, 9, 2)).astype(jnp.float32)
    states = model.rollout(start, 3, key=key, deterministic=deterministic)
    assert states.shape == (4, *start.shape)
    np.testing.assert_array_equal(states[0], start)
    last = model(start, 3, key=key, deterministic=deterministic)
    np.testing.assert_allclose(states[3], last, atol=0 if deterministic else 1e-6)


@pytest.mark.parametrize(("width", "periodic"), [(3, False), (33, True), (64, True)])
def test_a_packed_automaton_does_as_its_circuit(width, periodic):
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


def test_a_packed_automaton_checks_its_arguments():
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
    with pytest.raises(ValueError, match="circuit is of kind None; expected an automaton rule"):
        PackedAutomaton(example_circuits.random_circuit(0, 3, 3))
    for name in ("n_steps", "keep_every"):
        with pytest.raises(ValueError, match=f"{name} is -1; it must not be negative"):
            automaton_of()(jnp.zeros((8, 9, 2)), **{name: -1})


@pytest.mark.parametrize(("kernels", "perception", "expected"), slow_where([
    (4, (8, 4, 2, 1), {0: 1, 2: 1, 5: 1, 7: 1}),
    (3, (8, 6, 5), None),
    (2, (8,), dict.fromkeys(range(8), 2)),
], lambda kernels, *_: kernels < 4))  # fmt: skip
def test_outputs_of_kernels_start_in_different_directions(kernels, perception, expected):
    config = LogicCAConfig(channels=3, kernels=kernels, perception=perception, update=(20, 3))
    make, directions = nnx.jit(lambda key: LogicCA(config, rngs=nnx.Rngs(key))), {}
    for seed in range(2):
        model = make(jax.random.key(seed))
        wires = [np.asarray(w) for w in model.wiring.wires]
        at = np.arange(kernels * perception[-1])
        for layer in reversed(wires[: len(perception) - 1]):
            at = layer[at, 0]
        actual = at % 8
        directions[seed] = tuple(actual)
        # A soft automaton of such gates moves the cell that each output reads: the one in that direction.
        state = np.asarray(jax.random.uniform(jax.random.key(seed), (5, 5, 3)))
        gates = np.zeros((4, config.n_gates), np.float32)
        gates[1] = 1  # the first input
        seen = np.stack([np.roll(state, (1 - y, 1 - x), (0, 1)) for y, x in NEIGHBORS])[actual][
            :, 2, 2
        ]
        inputs = np.concatenate([state[2, 2], seen.reshape(-1)])
        new = inputs[wires[len(perception) - 1][:, 0]][wires[-1][:, 0]]
        np.testing.assert_allclose(simulated(model, state, gates)[2, 2], new)
        if expected is None:
            for kernel in actual.reshape(kernels, -1):
                assert len(set(kernel)) == len(kernel)
        else:
            assert dict(zip(*np.unique(actual, return_counts=True), strict=True)) == expected
        first = wires[len(perception) - 1]
        assert len({tuple(pair) for pair in first}) == len(first)
        assert len(set(first[:, 0])) == min(len(first), len(inputs) - 1)
    if len(perception) > 1:
        assert len(set(directions.values())) > 1


def test_the_share_of_hard_gates_grows():
    config = automaton_runs.Automaton.create(
        {"steps": 100, "hard_share": 0.1, "last_hard_share": 0.8}
    ).run.training
    got = [float(config.hard_share_at(jnp.int32(n))) for n in (0, 30, 65, 100)]
    np.testing.assert_allclose(got, [0.1, 0.1, 0.45, 0.8], atol=1e-6)
    same = dataclasses.replace(config, last_hard_share=None)
    assert float(same.hard_share_at(jnp.int32(99))) == 0.1
    assert dataclasses.replace(config, hard_share=0).hardens
    assert not dataclasses.replace(config, hard_share=0, last_hard_share=None).hardens


def test_one_torus_holds_every_board_of_the_game_of_life():
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


def test_patterns():
    board = patterns.checkerboard(8)[0]
    assert (board[:2, :2] == 0).all()
    assert (board == np.roll(board, (2, 2), (0, 1))).all()
    assert (patterns.lizard(22)[0, 1:-1, 1:-1] == patterns.lizard()[0]).all()
    assert patterns.letter().shape == (3, 16, 16)
    with pytest.raises(ValueError, match="size is 15; a letter needs 16"):
        patterns.letter(15)


def test_live_gates_are_those_that_change_the_output():
    model = automaton_of(periodic=True)
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


def test_solved_is_without_a_wrong_bit_three_times():
    sizes = {"kernels": 1, "perception": (8, 1), "update": (2, 1), "steps": 1000}

    def solved(*wrong, **options):
        run = automaton_runs.Automaton.create({**sizes, **options})
        run.record.history.test = [(100 * n, w) for n, w in enumerate(wrong, 1)]
        return run.stop_reason(100 * len(wrong))

    assert solved(0, 0, 1, 0, 0) is None
    assert (
        solved(4, 0, 0, 0) == "no wrong bit in 3 tests one after the other after 400 of 1000 steps"
    )
    assert solved(4, 0, 0, 0, stop_when_solved=False) is None
    old = automaton_runs.Automaton.create(sizes).record
    del old.options["stop_when_solved"]  # as older versions wrote it
    assert not automaton_runs.Automaton(old).intervals.stop_when_solved


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target=wide.png"], "wide.png has 7 x 6 pixels; the grid is 6 x 6"),
        (["--target=gray.png"], "the pixel at row 2, column 1 is [128, 128, 128, 255]"),
        (["--target=red.png"], "the target has shape [3, 6, 6]; the grid has 6 rows and columns and 2 channels"),
        (["--experiment=picture"], "the experiment picture draws an image of yours; give one"),
        (["--experiment=picture", "--target=wide.png"], "wide.png has 7 x 6 pixels; the grid is 6 x 6"),
        (["--loss-channels=1"], "--loss-channels is (1,); target channels are 0 to 0"),
        (["--loss-channels=0,0"], "--loss-channels is (0, 0); expected distinct channel numbers"),
        (["--clip=0"], "--clip is 0.0; it must be above 0"),
        (["--keep-every=-1"], "--keep-every is -1"),
        (["--target=missing.png"], "cannot read the image missing.png"),
        (["--perception=7,2"], "--perception is (7, 2); it must start with 8"),
        (["--update=8,3"], "--update is (8, 3); it must end with 2, one gate per channel"),
        (["--update-rate=0"], "--update-rate is 0.0"),
        (["--hard-share=2"], "--hard-share is 2.0"),
        (["--last-hard-share=2"], "--last-hard-share is 2.0"),
        (["--hard-growth=1"], "--hard-growth is 1.0"),
        (["--runs=0"], "--runs is 0"),
        (["--mesh", "data=2"], "--runs is 2; a mesh divides a single run"),
        (["--experiment=lizard"], "size is 6; a lizard needs 20"),
        (["--experiment=life", "--target=red.png"], "the Game of Life has none"),
        (["--experiment=fish"], "'fish' is not one of 'life'"),
        (["--resume"], "run does not exist"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_bad_input_is_one_message(words, message, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (7, 6)).save("wide.png")
    Image.new("RGB", (6, 6), (255, 0, 0)).save("red.png")
    gray = Image.new("RGB", (6, 6))
    gray.putpixel((1, 2), (128, 128, 128))
    gray.save("gray.png")
    sizes = CA_SIZES[:4] if "--experiment=life" in words else CA_SIZES
    assert message in refusal(
        "train", "ca", "--experiment=checkerboard", "--out=run", *sizes, *words
    )
    assert not Path("run").exists()


def test_an_image_is_a_pattern(tmp_path):
    from PIL import Image

    picture = Image.new("RGB", (16, 16))
    for y, x in np.argwhere(patterns.letter().any(0)):
        picture.putpixel((int(x), int(y)), tuple(int(v) for v in 255 * patterns.letter()[:, y, x]))
    picture.save(tmp_path / "letter.png")
    assert (patterns.read_image(tmp_path / "letter.png", 16) == patterns.letter()).all()
    assert patterns.read_image(tmp_path / "letter.png", 16, threshold=1.0).sum() == 0


def test_a_picture_decides_the_grid(tmp_path):
    from PIL import Image

    Image.new("RGB", (5, 2), (255, 255, 0)).save(tmp_path / "wide.png")
    Image.new("RGB", (65, 2)).save(tmp_path / "large.png")
    new = functools.partial(automaton_runs.Automaton.create, experiment="picture")
    sizes = {"channels": 3, "kernels": 1, "perception": (8, 2), "update": (8, 3)}
    run = new(sizes, path=tmp_path / "wide.png").run
    assert (run.training.size, run.training.n_steps) == (5, 4)
    expected = np.zeros((3, 5, 5), bool)
    expected[:2, 1:3] = True
    np.testing.assert_array_equal(run.target, expected)
    own = new({**sizes, "n_steps": 9}, path=tmp_path / "wide.png").run
    assert (own.training.size, own.training.n_steps) == (5, 9)
    with pytest.raises(
        patterns.PatternError, match=r"large\.png has 65 x 2 pixels; the maximum is 64 x 64"
    ):
        new(sizes, path=tmp_path / "large.png")


def test_several_runs_stay_in_one_process(monkeypatch):
    run = automaton_runs.Automaton.create({"runs": 2}, experiment="checkerboard").run
    run.divide()
    monkeypatch.setattr(training.hosts, "count", lambda: 2)
    with pytest.raises(ValueError, match=r"runs is 2; 2 processes share a single run\. Use runs=1"):
        run.divide()
