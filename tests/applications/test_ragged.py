"""Texts of different lengths in one call: each is continued as alone, padding changes nothing, packed texts do not see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from flax import nnx
from small_runs import perturb

from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig, Slots, _slots

VOCAB = 13
LENGTHS = (5, 17, 32)
CONTEXT = 12  # shorter than the longest prompt, which is read in windows: some hold padding alone
TABLES = LUTTransformerConfig(
    vocab_size=VOCAB, features=8, context=CONTEXT, n_layers=2, n_heads=1, n_detectors=4, n_anchors=3,
    n_position_bits=2, ffn_detectors=4, ffn_anchors=3,
)  # fmt: skip
SOFTMAX = GPTConfig(
    vocab_size=VOCAB, features=8, context=CONTEXT, n_layers=2, n_heads=2, feed_forward="dense"
)
CONFIGS = {
    "tables": TABLES,
    "pair": dataclasses.replace(TABLES, attention="pair", n_layers=1),
    "counts": dataclasses.replace(TABLES, memory="counts", n_position_bits=0),
    "no ffn, bfloat16 tables": dataclasses.replace(TABLES, ffn=False, table_dtype="bfloat16", n_layers=1),
    "gpt": SOFTMAX,
    "gpt, bfloat16": dataclasses.replace(SOFTMAX, dtype="bfloat16", n_layers=1),
}
MODELS = pytest.mark.parametrize("name", CONFIGS)


def model_of(name):
    """A model whose parameters are large enough for every part to show."""
    config = CONFIGS[name]
    return perturb((GPT if isinstance(config, GPTConfig) else LUTTransformer)(config, rngs=nnx.Rngs(0)))


def prompts_of(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


def padded(prompts, fill):
    longest = max(map(len, prompts))
    return np.stack([np.pad(p, (0, longest - len(p)), constant_values=fill) for p in prompts])


@pytest.mark.slow
@MODELS
def test_texts_are_continued_as_alone(name):
    model, prompts, key = model_of(name), prompts_of(), jax.random.key(0)
    alone = [np.asarray(model.generate(p, 20, key=key, temperature=0)) for p in prompts]
    assert len({tuple(tokens) for tokens in alone}) == len(prompts)
    np.testing.assert_array_equal(model.generate(prompts, 20, key=key, temperature=0), alone)
    streamed = list(model.stream(prompts, 20, key=key, temperature=0))
    np.testing.assert_array_equal(jnp.concatenate(streamed, 1), alone)


@pytest.mark.slow
@MODELS
def test_padding_changes_nothing(name):
    """Padding of any tokens leaves what is drawn as it is, and so do other texts beside it."""
    model, prompts = model_of(name), prompts_of()
    keys, lengths = jax.random.split(jax.random.key(1), 3), jnp.asarray(LENGTHS)
    wanted = model.generate(padded(prompts, 0), 8, key=keys, lengths=lengths)
    for fill in (7, 10**6, -5):
        found = model.generate(padded(prompts, fill), 8, key=keys, lengths=lengths)
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(model.generate(prompts, 8, key=keys), wanted)
    alone = [model.generate(p, 8, key=k) for p, k in zip(prompts, keys, strict=True)]
    np.testing.assert_array_equal(wanted, alone)


@pytest.mark.slow
@MODELS
def test_packed_texts_do_not_see_each_other(name):
    model, prompts = model_of(name), prompts_of()
    run = nnx.jit(lambda model, tokens, segments: model(tokens, deterministic=True, segments=segments))
    packed = np.concatenate(prompts)[None]
    segments = np.repeat(np.arange(3), LENGTHS)[None].astype(np.int32)
    found = np.split(np.asarray(run(model, packed, segments)[0]), np.cumsum(LENGTHS)[:-1])
    tolerance = 0.05 if "bfloat16" in name else 1e-4
    for prompt, logits in zip(prompts, found, strict=True):
        wanted = model(prompt, deterministic=True)
        np.testing.assert_allclose(logits, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["tables", slow("gpt")])
def test_segments_while_decoding(name):
    """A text sees its own segment alone, and neither padding before it nor earlier texts."""
    model = model_of(name)
    text, other = prompts_of((9, 9))
    model.init_cache((1,))
    decode = nnx.jit(
        lambda model, tokens, segments: model(tokens, decode=True, deterministic=True, segments=segments)
    )

    def fed(tokens, *segments):
        return np.asarray(decode(model, np.asarray([tokens]), np.asarray([segments], np.int32)))[0]

    fed(other[:4], 3, 3, 3, 3)
    first = fed([7, 7, *text[:2]], -1, -1, 0, 0)
    last = [fed(text[k : k + 1], 0)[0] for k in (2, 3)]
    wanted = np.asarray(model(text[:4], deterministic=True))
    np.testing.assert_allclose([*first[2:], *last], wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def programs():
    """Return the numbers of programs of slots that are compiled."""
    return [f._cache_size() for f in (_slots._read, _slots._joined, _slots._stepped)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tables", "pair", "gpt", "counts"])
def test_slots(name):
    """Texts join and leave a running batch, and each is continued as alone; after `compile` nothing is compiled again."""
    model, prompts, key = model_of(name), prompts_of((5, 17, 6, 30, 1, 12)), jax.random.key(0)
    wanted = np.asarray(model.generate(prompts, 30, key=key, temperature=0)).tolist()
    slots, found, slot_of = Slots(model, 2, temperature=0), {}, {}
    for count in (1, 4):
        slots.compile(count)
    compiled = programs()

    def join(k):
        slot_of[k], token = slots.join(prompts[k], key=key)
        found[k] = [token]

    def steps(*counts):
        for count in counts:
            for slot, tokens in slots.step(count).items():
                (k,) = [k for k, of in slot_of.items() if of == slot]
                assert tokens.shape == (count,)
                found[k] += tokens.tolist()

    assert slots.step() == {}
    join(0)
    steps(1, 1, 1)
    join(1)
    steps(4, 4, 1, 1, 1, 4, 1)
    with pytest.raises(ValueError, match="all 2 slots have a text"):
        slots.join([1], key=key)
    with pytest.raises(ValueError, match=r"there are texts in \[0, 1\]"):
        slots.compile()
    slots.leave(slot_of.pop(0))
    steps(1, 1)
    join(2)
    steps(1, 1)
    slots.leave(slot_of.pop(1))
    join(3)
    steps(4, 4, 4, 4, 4)
    slots.leave(slot_of.pop(2))
    join(4)
    steps(4)
    slots.leave(slot_of.pop(3))
    join(5)
    steps(1)
    assert list(map(len, found.values())) == [20, 21, 23, 25, 6, 2]
    assert slots.free == 0
    for k, tokens in found.items():
        assert tokens == wanted[k][: len(tokens)], k
    assert programs() == compiled
    with pytest.raises(ValueError, match=r"slot is 7; the texts are in \[0, 1\]"):
        slots.leave(7)


@pytest.mark.slow
def test_a_ring_goes_on_for_ever():
    """The place of a ring is counted no further than to twice its length."""
    model = model_of("gpt")
    slots = Slots(model, 1)
    slots.join([1], key=jax.random.key(0))
    for _ in range(3):
        slots.step(CONTEXT + 1)
        (place,) = (int(a) for a in slots._cache if a.ndim == 0)
        assert place < 2 * CONTEXT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tables", "gpt"])
def test_prompts_in_parts(name):
    """While a long prompt is read the others go on, and it is continued as alone; so are those that leave before it is read."""
    model, (long, other) = model_of(name), prompts_of((30, 5))
    key, slots = jax.random.key(3), Slots(model, 2)
    alone = Slots(model, 2)
    alone.join(other, key=key)
    _, first = alone.join(long, key=key)
    wanted = np.stack(list(alone.step(9).values()))
    beside, _ = slots.join(other, key=key)
    left = slots.begin(long, key=key)
    assert slots.read(left) is None
    slots.leave(left)
    slot, found = slots.begin(long, key=key), []
    for token in (None, None, first):
        assert slots.reading == [slot]
        (part,) = slots.step(3).values()
        found.append(part)
        assert slots.read(slot) == token
    assert (slots.reading, slots.free) == ([], 0)
    np.testing.assert_array_equal(np.concatenate(found), wanted[0])
    np.testing.assert_array_equal(slots.step(9)[slot], wanted[1])
    assert beside != slot


@pytest.mark.slow
def test_slots_draw_by_the_key_of_a_text():
    """Whatever texts are beside it, however many tokens are drawn at a time."""
    model, (prompt, other) = model_of("tables"), prompts_of((5, 9))

    def drawn(*others, counts=(1,) * 12, **temperatures):
        slots = Slots(model, 3, top_k=5, **temperatures)
        for k, text in enumerate(others):
            slots.join(text, key=jax.random.key(k), temperature=k)
        slot, token = slots.join(prompt, key=jax.random.key(7), temperature=None if temperatures else 1.5)
        return [token, *(t for count in counts for t in slots.step(count)[slot].tolist())]

    wanted = drawn(temperature=1.5)
    assert len(set(wanted)) > 3
    for counts in ((1,) * 12, (12,), (5, 7)):
        assert drawn(other, counts=counts) == drawn(other, prompt, counts=counts) == wanted


@pytest.mark.slow
def test_temperatures_of_texts():
    """0, and what is almost 0, take the likeliest token; texts beside have their own."""
    model, (prompt,) = model_of("gpt"), prompts_of((5,))
    wanted = np.asarray(model.generate(prompt, 9, key=jax.random.key(0), temperature=0))
    slots = Slots(model, 4)
    firsts = [slots.join(prompt, key=jax.random.key(1), temperature=t)[1] for t in (0, 1e-30, 5, None)]
    found = np.stack([[first, *tokens] for first, tokens in zip(firsts, slots.step(8).values(), strict=True)])
    np.testing.assert_array_equal(found[:2], [wanted, wanted])
    assert (found[2] != wanted).any()
    assert (found[3] != found[2]).any()


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda slots, key: slots.join([], key=key), r"prompt is float64\[0\]; expected integer ids"),
        (lambda slots, key: slots.join([1], key=key, temperature=-1), "Slots: temperature is -1"),
        (
            lambda slots, key: slots.join([1], key=jax.random.split(key)),
            r"key is key<fry>\[2\]; expected one",
        ),
        (lambda slots, key: slots.join([1], key=jax.random.key(0, impl="rbg")), r"key is key<rbg>\[\]"),
        (lambda slots, key: slots.step(0), "count is 0; it must be at least 1"),
        (lambda slots, key: slots.read(1), r"slot is 1; prompts are being read in \[\]"),
        (lambda slots, key: slots.leave(0), r"slot is 0; the texts are in \[\]"),
    ],
)
def test_impossible_slots(call, message):
    slots = Slots(model_of("gpt"), 2)
    with pytest.raises(ValueError, match=message):
        call(slots, jax.random.key(0))
    assert slots.free == 2


def test_caches_of_tables_hold_ids():
    """A byte for each detector of a layer and token, and four for the segment."""
    model = model_of("tables")
    model.init_cache((3,))
    caches = nnx.to_pure_dict(nnx.state(model, nnx.Cache))
    layer = caches["layers"][0]["attention"]["layer"]
    assert {name: a.dtype.name for name, a in layer.items()} == {
        "cached_key_index": "uint8",
        "cached_segments": "int32",
        "cache_index": "int32",
    }
    held = sum(a.nbytes for a in jax.tree.leaves(caches) if a.ndim)
    assert held == 3 * (CONTEXT - 1) * TABLES.n_layers * (TABLES.n_detectors + 4)


@pytest.mark.slow
def test_counts_remember_the_whole_text():
    """Show that what was said long before the context counts, in memory that is the same for any text."""
    model, key = model_of("counts"), jax.random.key(0)
    prompts = np.stack(prompts_of((40, 40)))
    prompts[1, 8:] = prompts[0, 8:]
    model.init_cache((2,))
    caches = nnx.state(model, nnx.Cache)
    assert sum(a.nbytes for a in jax.tree.leaves(caches) if a.ndim) == 2 * TABLES.n_layers * 4 * 4 * 2**3
    logits = nnx.jit(lambda m, tokens: m(tokens, decode=True, deterministic=True))(model, prompts)
    whole = model(prompts, deterministic=True)
    np.testing.assert_allclose(logits, whole, atol=1e-4 * np.abs(whole).max())
    assert np.abs(whole[0, -1] - whole[1, -1]).max() > 1e-2
    alone = [model.generate(p, 5, key=key, temperature=0) for p in prompts]
    np.testing.assert_array_equal(model.generate(prompts, 5, key=key, temperature=0), alone)


@pytest.mark.slow
def test_one_program_for_all_lengths():
    from lutjax.models import _decoder

    model, tokens = model_of("gpt"), padded(prompts_of(), 0)
    before = _decoder._generate._cache_size()
    for lengths in ((32, 1, 2), (5, 17, 32)):
        model.generate(tokens, 3, key=jax.random.key(0), lengths=np.asarray(lengths))
    assert _decoder._generate._cache_size() == before + 1


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "prompt_tokens is an empty list"),
        (
            {"prompt_tokens": [np.arange(3), np.arange(0)]},
            r"prompt_tokens\[1\] is int64\[0\]; expected integer ids",
        ),
        ({"prompt_tokens": [np.ones(3)]}, r"prompt_tokens\[0\] is float64\[3\]"),
        ({"prompt_tokens": [np.arange(3)], "lengths": np.asarray([3])}, "lengths goes with one array"),
        ({"lengths": np.asarray([1, 2, 3])}, r"lengths is int64\[3\].*so expected \[2\]"),
        ({"lengths": np.asarray([4, 5])}, r"lengths\[1\] is 5; it must be from 1 to the 4 tokens"),
        ({"lengths": np.asarray([0, 1])}, r"lengths\[0\] is 0; it must be from 1"),
        ({"lengths": np.asarray([1.0, 1.0])}, "its dtype must be int32"),
    ],
)
def test_impossible_lengths(arguments, message):
    arguments = {"prompt_tokens": np.zeros((2, 4), np.int32), "n_tokens": 1, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        model_of("gpt").generate(**arguments, key=jax.random.key(0))


@pytest.mark.usefixtures("without_typechecking")
def test_impossible_segments():
    with pytest.raises(ValueError, match=r"GPT: segments is int32\[3\]; expected \[4\]"):
        model_of("gpt")(np.zeros(4, np.int32), segments=np.zeros(3, np.int32))
