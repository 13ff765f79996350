"""Texts of different lengths in one call: each is continued as alone, padding changes nothing, packed texts do not see each other."""

import jax
import numpy as np
import pytest
from cases import slow_except
from flax import nnx
from small_texts import CONTEXT, TABLES, model_of, prompts_of

from lutjax.models import Slots


@pytest.mark.parametrize("name", slow_except(["tables", "gpt"], "tables"))
def test_segments_while_decoding(name):
    """A text sees its own segment alone, and neither padding before it nor earlier texts."""
    model = model_of(name)
    text, other = prompts_of(9, 9)
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


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": []}, "prompt_tokens is an empty list"),
        (
            {"prompt_tokens": [np.arange(3), np.arange(0)]},
            r"prompt_tokens\[1\] is int64\[0\]; expected integer",
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
