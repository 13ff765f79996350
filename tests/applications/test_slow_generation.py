"""Long generation tests: ragged prompts, slots, blocks, streams, and models with slow-to-compile training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small_runs import perturb
from small_texts import CONFIGS, CONTEXT, TABLES, model_of, prompts_of

from lutjax.models import GPT, GPTConfig, LUTTransformer, Slots, _decoder, _slots

KEY = np.zeros((2,), np.uint32)  # the data of a key
LENGTHS = (5, 17, 32)
MODELS = pytest.mark.parametrize("name", CONFIGS)


def likeliest(model, prompt, n):
    return np.asarray(model.generate(prompt, n, key=KEY, temperature=0))


@MODELS
def test_texts_are_continued_as_alone(name):
    model, prompts = model_of(name), prompts_of(*LENGTHS)
    alone = [likeliest(model, p, 20) for p in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    if "bfloat16" not in name:
        text = np.concatenate([prompts[0], alone[0]])
        logits = nnx.jit(lambda model, text: model(text, deterministic=True))(model, text)
        np.testing.assert_array_equal(logits[len(prompts[0]) - 1 : -1].argmax(-1), alone[0])
    np.testing.assert_array_equal(likeliest(model, prompts, 20), alone)
    streamed = list(model.stream(prompts, 20, key=KEY, temperature=0))
    np.testing.assert_array_equal(jnp.concatenate(streamed, 1), alone)
    compiled = _decoder._generate._cache_size()
    likeliest(model, prompts_of(32, 1, 2), 20)
    assert _decoder._generate._cache_size() == compiled


@MODELS
def test_padding_changes_nothing(name):
    model, prompts = model_of(name), prompts_of(*LENGTHS)
    keys, lengths = jax.random.split(jax.random.key(1), 3), jnp.asarray(LENGTHS)
    wanted = model.generate(prompts, 8, key=keys)
    if name != "gpt, bfloat16":  # whose sums a batch rounds in its own way
        alone = [model.generate(p, 8, key=k) for p, k in zip(prompts, keys, strict=True)]
        np.testing.assert_array_equal(wanted, alone)
    for fill in (7, 10**6, -5):
        padded = np.stack([np.pad(p, (0, 32 - len(p)), constant_values=fill) for p in prompts])
        np.testing.assert_array_equal(model.generate(padded, 8, key=keys, lengths=lengths), wanted)


@MODELS
def test_packed_texts_do_not_see_each_other(name):
    model, prompts = model_of(name), prompts_of(*LENGTHS)
    run = nnx.jit(
        lambda model, tokens, segments: model(tokens, deterministic=True, segments=segments)
    )
    packed = np.concatenate(prompts)[None]
    segments = np.repeat(np.arange(3), LENGTHS)[None].astype(np.int32)
    actual = np.split(np.asarray(run(model, packed, segments)[0]), np.cumsum(LENGTHS)[:-1])
    tolerance = 0.05 if "bfloat16" in name else 1e-4
    for prompt, logits in zip(prompts, actual, strict=True):
        wanted = model(prompt, deterministic=True)
        np.testing.assert_allclose(
            logits, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max()
        )


def programs():
    """Count the compiled slot programs."""
    names = ("_read", "_join", "_read_blocks", "_copy_block", "_begin_slot", "_step_slots")
    return [getattr(_slots, name)._cache_size() for name in names]


SLOTS = [("tables", None), ("pair", None), ("gpt", None), ("counts", None)]
BLOCKS = [("tables", 4), ("tables", 1), ("pair", 4), ("pair", 32)]


@pytest.mark.parametrize(("name", "size"), [*SLOTS, *BLOCKS])
def test_texts_in_slots_are_continued_as_alone(name, size):
    """Other sequences join and leave; nothing recompiles after `compile`, and shared prefixes are stored in blocks only once."""
    model, prompts = model_of(name), prompts_of(9, 17, 6, 30, 1, 12)
    prompts[1][:9], prompts[5][:] = prompts[0], prompts[1][:12]
    wanted = likeliest(model, prompts, 40).tolist()
    slots, actual, slot_of = Slots(model, 3, temperature=0, block_size=size), {}, {}
    for count in (1, 4):
        slots.compile(count)
    compiled, n_shared = programs(), 0
    assert slots.step() == {}
    for k in range(len(prompts)):
        if not slots.free:
            with pytest.raises(ValueError, match="all 3 slots have a text"):
                slots.join([1], key=KEY)
            slots.leave(slot_of.pop(min(slot_of)))
        slot_of[k], token = slots.join(prompts[k], key=KEY)
        actual[k] = [token]
        n_shared = max(n_shared, slots.blocks["shared"] if size else 0)
        for count in (4, 1):
            for slot, tokens in slots.step(count).items():
                (who,) = (k for k, s in slot_of.items() if s == slot)
                actual[who].extend(tokens.tolist())
    for tokens in (slots.step(4) for _ in range(5)):
        for who, slot in slot_of.items():
            actual[who].extend(tokens[slot].tolist())
    for k, tokens in actual.items():
        assert tokens == wanted[k][: len(tokens)]
    assert programs() == compiled
    with pytest.raises(ValueError, match=r"there are texts in \[0, 1, 2\]"):
        slots.compile()
    with pytest.raises(ValueError, match=r"slot is 7; the texts are in \[0, 1, 2\]"):
        slots.leave(7)
    for slot in slot_of.values():
        slots.leave(slot)
    if size:
        assert (n_shared > 0) == (size < 32)
        assert slots.blocks["free"] == slots.blocks["all"]
    elif name == "gpt":  # the place of a ring is counted no further than to twice its length
        (place,) = (int(a) for a in slots._cache if a.ndim == 0)
        assert place < 2 * CONTEXT


@pytest.mark.parametrize("name", ["tables", "gpt"])
def test_prompts_in_parts(name):
    model, (long, other) = model_of(name), prompts_of(30, 5)
    key, slots = jax.random.key(3), Slots(model, 2)
    alone = Slots(model, 2)
    alone.join(other, key=key)
    _, first = alone.join(long, key=key)
    wanted = np.stack(list(alone.step(9).values()))
    beside, _ = slots.join(other, key=key)
    left = slots.begin(long, key=key)
    assert slots.read(left) is None
    slots.leave(left)
    slot, actual = slots.begin(long, key=key), []
    for token in (None, None, first):
        assert slots.reading == [slot]
        (part,) = slots.step(3).values()
        actual.append(part)
        assert slots.read(slot) == token
    assert (slots.reading, slots.free) == ([], 0)
    np.testing.assert_array_equal(np.concatenate(actual), wanted[0])
    np.testing.assert_array_equal(slots.step(9)[slot], wanted[1])
    assert beside != slot


def test_slots_draw_by_the_key_of_a_text():
    model, (prompt, other) = model_of("tables"), prompts_of(5, 9)

    def drawn(*others, counts=(1,) * 12, block_size=None, **temperatures):
        slots = Slots(model, 3, top_k=5, block_size=block_size, **temperatures)
        for k, text in enumerate(others):
            slots.join(text, key=jax.random.key(k), temperature=k)
        slot, token = slots.join(
            prompt, key=jax.random.key(7), temperature=None if temperatures else 1.5
        )
        return [token, *(t for count in counts for t in slots.step(count)[slot].tolist())]

    wanted = drawn(temperature=1.5)
    assert len(set(wanted)) > 3
    for counts in ((1,) * 12, (12,), (5, 7)):
        assert drawn(other, counts=counts) == drawn(other, prompt, counts=counts) == wanted
        assert drawn(other, counts=counts, block_size=5) == wanted


def test_temperatures_of_texts():
    model, (prompt,) = model_of("gpt"), prompts_of(5)
    wanted = np.asarray(model.generate(prompt, 9, key=jax.random.key(0), temperature=0))
    slots = Slots(model, 4)
    firsts = [
        slots.join(prompt, key=jax.random.key(1), temperature=t)[1] for t in (0, 1e-30, 5, None)
    ]
    actual = np.stack(
        [[first, *tokens] for first, tokens in zip(firsts, slots.step(8).values(), strict=True)]
    )
    np.testing.assert_array_equal(actual[:2], [wanted, wanted])
    assert (actual[2] != wanted).any()
    assert (actual[3] != actual[2]).any()


def test_counts_remember_the_whole_text():
    model, key = model_of("counts"), jax.random.key(0)
    prompts = np.stack(prompts_of(40, 40))
    prompts[1, 8:] = prompts[0, 8:]
    model.init_cache((2,))
    caches = nnx.state(model, nnx.Cache)
    assert (
        sum(a.nbytes for a in jax.tree.leaves(caches) if a.ndim)
        == 2 * TABLES.n_layers * 4 * 4 * 2**3
    )
    logits = nnx.jit(lambda m, tokens: m(tokens, decode=True, deterministic=True))(model, prompts)
    whole = model(prompts, deterministic=True)
    np.testing.assert_allclose(logits, whole, atol=1e-4 * np.abs(whole).max())
    assert np.abs(whole[0, -1] - whole[1, -1]).max() > 1e-2
    alone = [model.generate(p, 5, key=key, temperature=0) for p in prompts]
    np.testing.assert_array_equal(model.generate(prompts, 5, key=key, temperature=0), alone)


def test_a_common_beginning_is_read_and_stored_once(monkeypatch):
    (prompt,) = prompts_of(11)
    fed = []
    read = _slots._read_blocks
    monkeypatch.setattr(
        _slots, "_read_blocks", lambda *args, **how: fed.append(int(args[3])) or read(*args, **how)
    )
    slots = Slots(model_of(), 3, temperature=0, block_size=4)
    first, token = slots.join(prompt, key=KEY)
    used = slots.blocks["all"] - slots.blocks["free"]
    assert (fed, used) == ([11], 3)
    second, again = slots.join(prompt, key=KEY)
    assert again == token
    assert fed == [11, 1]  # the last token alone
    assert slots.blocks == {
        "all": slots.blocks["all"],
        "free": slots.blocks["all"] - 4,
        "shared": 2,
    }
    both = slots.step(6)
    np.testing.assert_array_equal(both[first], both[second])
    said = [*prompt.tolist(), token, *both[first].tolist()]
    slots.leave(first)
    slots.leave(second)
    third, _ = slots.join([*said[:-1], 3, 4], key=KEY)  # an answer, and what is asked after it
    assert fed[2:] == [2]
    alone = Slots(model_of(), 1, temperature=0)
    slot, _ = alone.join([*said[:-1], 3, 4], key=KEY)
    np.testing.assert_array_equal(slots.step(5)[third], alone.step(5)[slot])


def test_a_pool_that_is_used_up():
    model, (one, two, three) = model_of(), prompts_of(5, 7, 9)
    wanted = [
        np.asarray(model.generate(p, 12, key=KEY, temperature=0)).tolist() for p in (one, two)
    ]
    slots = Slots(model, 3, temperature=0, block_size=4, n_blocks=5)
    first, a = slots.join(one, key=KEY)
    second, b = slots.join(two, key=KEY)
    message = (
        r"Slots: a prompt of 9 tokens needs 3 more blocks of 4 tokens, but only 1 of 5 blocks are free. "
        "Let a sequence leave, or use a larger n_blocks"
    )
    with pytest.raises(ValueError, match=message):
        slots.join(three, key=KEY)
    assert slots.free == 1
    with pytest.raises(ValueError, match="8 more tokens of 2 texts need 4 more blocks"):
        slots.step(8)
    first_tokens, second_tokens = (slots.step(1)[slot].tolist() for slot in (first, second))
    assert [a, *first_tokens] == wanted[0][:2]
    slots.leave(first)
    tokens = [b, wanted[1][1], *second_tokens, *slots.step(7)[second].tolist()]
    assert tokens == wanted[1][: len(tokens)]


def test_memory_of_generation_does_not_grow_with_the_prompt():
    graphdef, state = nnx.split(model_of("gpt"))

    def planned(length):
        prompt, key = jax.ShapeDtypeStruct((length,), jnp.int32), jax.random.key(0)
        program = _decoder._generate.lower(
            graphdef, state, prompt, None, key, None, n_tokens=1, top_k=None
        )
        return program.compile().memory_analysis().temp_size_in_bytes

    short, long = planned(400), planned(4000)
    assert long < short + 3600 * 20


def test_stream_and_generate_are_the_same():
    model, prompt = model_of("gpt"), np.stack(prompts_of(11, 11))
    options = {"key": jax.random.key(3), "temperature": 0.9, "top_k": 7}
    whole = model.generate(prompt, 70, **options)
    parts = list(model.stream(prompt, 70, **options))
    assert [part.shape for part in parts] == [(2, 1), (2, 32), (2, 32), (2, 5)]
    np.testing.assert_array_equal(jnp.concatenate(parts, 1), whole)
    assert list(model.stream(prompt[0], 0, **options)) == []
    with pytest.raises(
        ValueError, match=r"key has shape \[3\]; expected one key, or one per sequence \[2\]"
    ):
        model.generate(prompt, 20, key=jax.random.split(jax.random.key(0), 3))


def gpt_of(**changes):
    config = GPTConfig(
        vocab_size=11, features=8, context=6, n_layers=2, n_heads=2, feed_forward="dense", lut_heads=2,
        lut_tables=3, lut_bits=3,
    )  # fmt: skip
    return perturb(GPT(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0)))


TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)


def test_remat_and_dropout_change_no_more_than_they_should():
    @nnx.jit
    def gradients(model, key):
        def loss(model):
            logits = model(TOKENS[:, :-1], deterministic=False, rngs=key)
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        return nnx.value_and_grad(loss)(model)

    key = jax.random.key(0)
    kept, again = (gradients(gpt_of(dropout=0.5, remat=remat), key) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), kept, again)
    other, _ = gradients(gpt_of(dropout=0.5), jax.random.key(1))
    assert float(other) != float(kept[0])
    assert all(np.any(a != 0) for a in jax.tree.leaves(kept[1]))
    model = gpt_of(dropout=0.5)
    model.eval()
    np.testing.assert_array_equal(model(TOKENS), gpt_of()(TOKENS, deterministic=True))


def test_dropout_of_tables_needs_a_key_and_keeps_no_state():
    tables = {"feed_forward": "projection_lut", "n_layers": 1}
    model = gpt_of(**tables, table_dropout=0.5)
    assert not jax.tree.leaves(nnx.state(model, nnx.RngState))
    with pytest.raises(ValueError, match=r"table_dropout is 0.5; pass rngs"):
        model(TOKENS)
    one, other = (model(TOKENS, rngs=jax.random.key(seed)) for seed in (0, 1))
    assert np.any(one != other)
    model.eval()
    np.testing.assert_array_equal(model(TOKENS), gpt_of(**tables)(TOKENS, deterministic=True))


def test_initial_values():
    config = GPTConfig(features=64, n_layers=8, feed_forward="dense")
    model = nnx.jit(lambda: GPT(config, rngs=nnx.Rngs(0)))()
    block = model.layers[0]
    for layer, deviation in (
        (block.attention.project, 0.02),
        (block.attention.merge, 0.005),
        (block.feed_forward.up, 0.02),
        (block.feed_forward.down, 0.005),
        (model.unembed, 0.02),
    ):
        assert np.std(layer.kernel[...]) == pytest.approx(deviation, rel=0.05)
    assert np.std(model.embedding.embedding[...]) == pytest.approx(0.02, rel=0.05)
    count = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == 2 * 256 * 64 + 64 + 8 * (12 * 64 * 64 + 7 * 64)


def test_generates_where_integers_are_int64():
    (prompt,) = prompts_of(3)
    expected = model_of().generate(prompt, 4, key=jax.random.key(0), temperature=0)
    with jax.enable_x64(True):
        model = perturb(LUTTransformer(TABLES, rngs=nnx.Rngs(0)))
        for tokens in (jnp.asarray(prompt), jnp.asarray(prompt, jnp.int64)):
            assert (
                model.generate(tokens, 4, key=jax.random.key(0), temperature=0).shape
                == expected.shape
            )


def test_generate_draws_from_the_likeliest():
    model, prompt = model_of(), np.stack(prompts_of(2) * 400)
    greedy = likeliest(model, prompt[:1], 1)
    assert np.all(model.generate(prompt, 1, key=jax.random.key(0), top_k=1) == greedy)
    order = np.argsort(model(prompt[:1], deterministic=True)[0, -1])[::-1]
    drawn = model.generate(prompt, 1, key=jax.random.key(0), top_k=3, temperature=5.0)
    assert set(np.unique(drawn)) == set(order[:3].tolist())
    everything, again = (
        model.generate(prompt, 1, key=jax.random.key(0), temperature=100.0) for _ in "ab"
    )
    assert len(np.unique(everything)) == TABLES.vocab_size
    np.testing.assert_array_equal(again, everything)
    assert model.generate(prompt, 0, key=jax.random.key(0)).shape == (400, 0)


def test_batch_norm_keeps_running_averages():
    model = perturb(
        LUTTransformer(dataclasses.replace(TABLES, batch_norm=True, dropout=0.0), rngs=nnx.Rngs(0))
    )
    norm, tokens = model.layers[0].attention.norm, np.stack(prompts_of(5, 5))
    model(tokens, deterministic=True)
    assert np.all(norm.mean[...] == 0)
    trained = model(tokens)
    assert np.any(norm.mean[...] != 0)
    kept = model(tokens, deterministic=True)
    assert np.any(kept != trained)
    view = nnx.view(model, deterministic=True, use_running_average=True)
    np.testing.assert_array_equal(view(tokens), kept)


@pytest.mark.parametrize("name", ["tables", "gpt"])
def test_segments_while_decoding(name):
    """A sequence attends only to its own segment, excluding padding and earlier sequences."""
    model = model_of(name)
    text, other = prompts_of(9, 9)
    model.init_cache((1,))
    decode = nnx.jit(
        lambda model, tokens, segments: model(
            tokens, decode=True, deterministic=True, segments=segments
        )
    )

    def fed(tokens, *segments):
        return np.asarray(decode(model, np.asarray([tokens]), np.asarray([segments], np.int32)))[0]

    fed(other[:4], 3, 3, 3, 3)
    first = fed([7, 7, *text[:2]], -1, -1, 0, 0)
    last = [fed(text[k : k + 1], 0)[0] for k in (2, 3)]
    wanted = np.asarray(model(text[:4], deterministic=True))
    np.testing.assert_allclose(
        [*first[2:], *last], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max()
    )


def test_a_prompt_waits_for_blocks():
    slots = Slots(model_of(), 2, temperature=0, block_size=4, n_blocks=3)
    one, two = prompts_of(3, 7)
    second = slots.begin(two, key=jax.random.key(0))
    first, _ = slots.join(one, key=jax.random.key(0))
    slots.step(4)
    with pytest.raises(ValueError, match="7 more tokens of a prompt need 2 more blocks"):
        slots.read(second)
    slots.leave(first)
    assert slots.read(second) == int(
        model_of().generate(two, 1, key=jax.random.key(0), temperature=0)[0]
    )
