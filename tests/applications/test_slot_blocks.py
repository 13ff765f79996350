"""Slots whose cached tokens are in blocks of a pool: texts are continued as alone, and what they begin with in common is there once."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig, Slots, _slots
from lutjax.models._pages import Pages, Text

VOCAB, CONTEXT = 13, 12
CONFIG = LUTTransformerConfig(
    vocab_size=VOCAB, features=8, context=CONTEXT, n_layers=2, n_heads=1, n_detectors=4, n_anchors=3,
    n_position_bits=2, ffn_detectors=4, ffn_anchors=3,
)  # fmt: skip
CONFIGS = {
    "tables": CONFIG,
    "pair": dataclasses.replace(CONFIG, attention="pair", n_layers=1),
    "counts": dataclasses.replace(CONFIG, memory="counts", n_position_bits=0),
}
KEY = np.zeros((2,), np.uint32)  # the data of a key


@functools.cache
def model_of(name="tables"):
    """A model whose parameters are large enough for every part to show."""
    model = LUTTransformer(CONFIGS[name], rngs=nnx.Rngs(0))
    for i, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.Param):
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), i), variable.shape)
            variable.set_value(variable[...] + 0.3 * noise.astype(variable.dtype))
    return model


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


# ------------------------------------------------------------------------------------- who has which blocks
class Blocks(RuleBasedStateMachine):
    """Texts that begin, go on and leave, with a pool in which each place says of which beginning its token is the last."""

    WINDOW, MOST = 5, 6

    def __init__(self):
        super().__init__()
        self.size, self.n_blocks = 3, 9
        width = -(-(self.WINDOW + self.MOST) // self.size) + 1
        self.pages = Pages(self.n_blocks, self.size, self.WINDOW, width)
        self.pool = [[None] * self.size for _ in range(self.n_blocks)]
        self.texts = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens):
        text = Text(list(tokens))
        expected = self.pages.n_cached(tokens)
        copied = self.pages.begin(text)
        assert text.length // self.size >= expected
        assert text.length < len(tokens)
        if copied is not None:
            self.pool[copied[1]] = list(self.pool[copied[0]])
        self.texts.append(text)

    @rule(data=st.data(), n=st.integers(1, MOST))
    def go_on(self, data, n):
        if not self.texts:
            return
        text = data.draw(st.sampled_from(self.texts))
        text.tokens += data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        self.pages.slide(text)
        if self.pages.needed(text, n) > self.pages.n_free:
            with pytest.raises(
                ValueError, match=r"Slots: it needs .* let a text leave, or use a larger n_blocks"
            ):
                self.pages.require(self.pages.needed(text, n), "it needs")
            return
        self.pages.extend(text, n)
        table = self.pages.table(text)
        for p in range(text.length, text.length + n):
            block = table[p // self.size % len(table)]
            assert self.holders(block) == 1, "a block of several texts is written to"
            self.pool[block][p % self.size] = tuple(text.tokens[: p + 1])
        self.pages.cached(text, n)

    @rule(data=st.data())
    def leave(self, data):
        if self.texts:
            text = self.texts.pop(data.draw(st.integers(0, len(self.texts) - 1)))
            self.pages.leave(text)

    @rule()
    def forget(self):
        self.pages.forget()

    def holders(self, block):
        return sum(block in text.blocks.values() for text in self.texts)

    @invariant()
    def what_is_seen_is_there(self):
        for text in self.texts:
            table = self.pages.table(text)
            for p in range(max(0, text.length - self.WINDOW), text.length):
                block = table[p // self.size % len(table)]
                assert self.pool[block][p % self.size] == tuple(text.tokens[: p + 1])

    @invariant()
    def blocks_are_free_or_held(self):
        holders = [self.holders(block) for block in range(self.n_blocks)]
        assert self.pages.n_free == holders.count(0)
        assert self.pages.n_shared == sum(n > 1 for n in holders)


Blocks.TestCase.settings = settings(stateful_step_count=30)
TestBlocks = Blocks.TestCase


def test_what_was_said_last_is_kept_longest():
    pages = Pages(4, 2, 8, 8)
    texts = [Text([k] * 5) for k in range(3)]
    for text in texts[:2]:
        pages.extend(text, 4)
        pages.cached(text, 4)
        pages.leave(text)
    pages.extend(texts[2], 4)  # in place of the first
    assert [pages.n_cached([k] * 5) for k in range(2)] == [0, 2]


# ------------------------------------------------------------------------------------- texts
def programs():
    return [f._cache_size() for f in (_slots._read_blocks, _slots._copied, _slots._begun, _slots._stepped)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 1, 32])
@pytest.mark.parametrize("name", ["tables", "pair"])
def test_texts_are_continued_as_alone(name, size):
    """Texts are continued as alone with any beginnings in common, while others join and leave; after `compile` nothing is compiled again."""
    model, prompts = model_of(name), prompts_of(9, 17, 6, 30, 1, 12)
    prompts[1][:9], prompts[5][:] = prompts[0], prompts[1][:12]
    wanted = np.asarray(model.generate(prompts, 40, key=KEY, temperature=0)).tolist()
    slots, found, slot_of = Slots(model, 3, temperature=0, block_size=size), {}, {}
    for count in (1, 4):
        slots.compile(count)
    compiled, n_shared = programs(), 0
    for k in range(len(prompts)):
        if not slots.free:
            slots.leave(slot_of.pop(min(slot_of)))
        slot_of[k], token = slots.join(prompts[k], key=KEY)
        found[k] = [token]
        n_shared = max(n_shared, slots.blocks["shared"])
        for count in (4, 1):
            for slot, tokens in slots.step(count).items():
                (who,) = (k for k, s in slot_of.items() if s == slot)
                found[who].extend(tokens.tolist())
    for tokens in (slots.step(4) for _ in range(5)):
        for who, slot in slot_of.items():
            found[who].extend(tokens[slot].tolist())
    for k, tokens in found.items():
        assert tokens == wanted[k][: len(tokens)]
    assert (n_shared > 0) == (size < 32)
    assert programs() == compiled
    for slot in slot_of.values():
        slots.leave(slot)
    assert slots.blocks["free"] == slots.blocks["all"]


@pytest.mark.slow
def test_draws_are_those_of_slots_without_blocks():
    """Draw by keys and temperatures of texts, in steps of more tokens than the context."""
    prompts, keys = prompts_of(5, 17), jax.random.split(jax.random.key(0), 2)
    found = []
    for options in ({}, {"block_size": 5}):
        slots = Slots(model_of(), 2, top_k=5, **options)
        joined = [
            slots.join(p, key=k, temperature=t) for p, k, t in zip(prompts, keys, (0.5, 2.0), strict=True)
        ]
        tokens = slots.step(30)
        found.append([[first, *tokens[slot].tolist()] for slot, first in joined])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_common_beginning_is_read_and_stored_once(monkeypatch):
    """Show it after the text that it came from has left, too, and up to the middle of a block, which is copied."""
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
    assert slots.blocks == {"all": slots.blocks["all"], "free": slots.blocks["all"] - 4, "shared": 2}
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


@pytest.mark.slow
def test_a_pool_that_is_used_up():
    """A text is refused, or a step raises an error and changes nothing; when a text has left all go on."""
    model, (one, two, three) = model_of(), prompts_of(5, 7, 9)
    wanted = [np.asarray(model.generate(p, 12, key=KEY, temperature=0)).tolist() for p in (one, two)]
    slots = Slots(model, 3, temperature=0, block_size=4, n_blocks=5)
    first, a = slots.join(one, key=KEY)
    second, b = slots.join(two, key=KEY)
    message = (
        r"Slots: a prompt of 9 tokens needs 3 more blocks of 4 tokens, but only 1 of the 5 blocks of the pool are free; "
        "let a text leave, or use a larger n_blocks"
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


def test_a_prompt_waits_for_blocks():
    slots = Slots(model_of(), 2, temperature=0, block_size=4, n_blocks=3)
    one, two = prompts_of(3, 7)
    second = slots.begin(two, key=KEY)
    first, _ = slots.join(one, key=KEY)
    slots.step(4)
    with pytest.raises(ValueError, match="7 more tokens of a prompt need 2 more blocks"):
        slots.read(second)
    slots.leave(first)
    assert slots.read(second) == int(model_of().generate(two, 1, key=KEY, temperature=0)[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slots(model_of(), 2, block_size=0), "Slots: block_size is 0; there must be at least 1"),
        (lambda: Slots(model_of(), 2, n_blocks=3), "n_blocks is 3, but block_size is not given"),
        (lambda: Slots(model_of("counts"), 2, block_size=4), "this LUTTransformer remembers counts"),
        (
            lambda: Slots(GPT(GPTConfig(features=8, n_heads=2), rngs=nnx.Rngs(0)), 2, block_size=4),
            "this GPT keeps keys and values; blocks are for a LUTTransformer with memory='window'",
        ),
    ],
)
def test_impossible_blocks(make, message):
    with pytest.raises(ValueError, match=message):
        make()
