"""Ragged sequences in one call, and slots with cached tokens in pool blocks."""

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from small_texts import CONTEXT, TABLES, model_of

from lutjax.models import Slots, gpt
from lutjax.models._pages import Pages, Text


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda slots, key: slots.join([], key=key), r"prompt is float64\[0\]; expected integer ids"),
        (lambda slots, key: slots.join([1], key=key, temperature=-1), "Slots: temperature is -1"),
        (lambda slots, key: slots.join([1], key=jax.random.split(key)), r"key is key<fry>\[2\]; expected one"),
        (lambda slots, key: slots.join([1], key=jax.random.key(0, impl="rbg")), r"key is key<rbg>\[\]"),
        (lambda slots, key: slots.step(0), "count is 0; it must be at least 1"),
        (lambda slots, key: slots.read(1), r"slot is 1; prompts are being read in \[\]"),
        (lambda slots, key: slots.leave(0), r"slot is 0; the texts are in \[\]"),
    ],
)  # fmt: skip
def test_impossible_slots(call, message):
    slots = Slots(model_of("gpt"), 2)
    with pytest.raises(ValueError, match=message):
        call(slots, jax.random.key(0))
    assert slots.free == 2


def test_caches_of_tables_hold_ids():
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


def test_a_gpt_attends_within_segments_and_to_no_padding():
    ids = jax.numpy.array([[-1, 0, 0, 1]])
    expected = np.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]], bool)
    np.testing.assert_array_equal(gpt._same_segment(ids, ids)[0], expected)


def test_cached_lengths_count_tokens_without_padding():
    model = model_of("tables")
    model.init_cache((2,), blocks=(4, 3))
    model.layers = nnx.List([])  # which do not count
    segments = jax.numpy.array([[0, 0, -1], [0, 1, 2]])
    model.hidden(
        jax.numpy.zeros((2, 3, TABLES.features)), deterministic=True, decode=True, segments=segments
    )
    np.testing.assert_array_equal(model.cached_lengths[...], [2, 3])


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "prompt_tokens is an empty list"),
        ({"prompt_tokens": [np.arange(3), np.arange(0)]}, r"prompt_tokens\[1\] is int64\[0\]; expected integer"),
        ({"prompt_tokens": [np.ones(3)]}, r"prompt_tokens\[0\] is float64\[3\]"),
        ({"prompt_tokens": [np.arange(3)], "lengths": np.asarray([3])}, "lengths requires an array of prompts"),
        ({"lengths": np.asarray([1, 2, 3])}, r"lengths is int64\[3\].*so expected \[2\]"),
        ({"lengths": np.asarray([4, 5])}, r"lengths\[1\] is 5; it must be 1 to the prompt length, 4"),
        ({"lengths": np.asarray([0, 1])}, r"lengths\[0\] is 0; it must be 1 to"),
        ({"lengths": np.asarray([1.0, 1.0])}, "its dtype must be int32"),
    ],
)  # fmt: skip
def test_impossible_lengths(arguments, message):
    arguments = {"prompt_tokens": np.zeros((2, 4), np.int32), "n_tokens": 1, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        model_of("gpt").generate(**arguments, key=jax.random.key(0))


@pytest.mark.usefixtures("without_typechecking")
def test_impossible_segments():
    with pytest.raises(ValueError, match=r"GPT: segments is int32\[3\]; expected \[4\]"):
        model_of("gpt")(np.zeros(4, np.int32), segments=np.zeros(3, np.int32))


class Blocks(RuleBasedStateMachine):
    """Sequences join, continue and leave; each pool position records the prefix for its last token."""

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
        if self.pages.count_missing_blocks(text, n) > self.pages.n_free:
            with pytest.raises(
                ValueError, match=r"Slots: it needs .* Let a sequence leave, or use a larger"
            ):
                self.pages.require(self.pages.count_missing_blocks(text, n), "it needs")
            return
        self.pages.extend(text, n)
        table = self.pages.table(text)
        for p in range(text.length, text.length + n):
            block = table[p // self.size % len(table)]
            assert self.holders(block) == 1, "a block of several texts is written to"
            self.pool[block][p % self.size] = tuple(text.tokens[: p + 1])
        self.pages.record_cached(text, n)

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
        pages.record_cached(text, 4)
        pages.leave(text)
    pages.extend(texts[2], 4)  # in place of the first
    assert [pages.n_cached([k] * 5) for k in range(2)] == [0, 2]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Slots(model_of(), 2, block_size=0),
        "Slots: block_size is 0; there must be at least 1"),
    (lambda: Slots(model_of(), 2, n_blocks=3), "n_blocks is 3, but block_size is not given"),
    (lambda: Slots(model_of("counts"), 2, block_size=4), "this LUTTransformer remembers counts"),
    (lambda: Slots(model_of("gpt"), 2, block_size=4),
        "this GPT keeps keys and values; blocks require a"),
])  # fmt: skip
def test_impossible_blocks(make, message):
    with pytest.raises(ValueError, match=message):
        make()
