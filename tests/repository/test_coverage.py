"""The rows of `docs/coverage.md`: the page is that of the code, and each call computes what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from coverage_rows import SECTIONS, page
from coverage_rows._row import Section, normal
from coverage_rows.attention import flash_attention_v2

ROWS = [row for section in SECTIONS for row in section.rows]
SAMPLE = [section.rows[number % len(section.rows)] for number, section in enumerate(SECTIONS)]


def test_page_is_that_of_the_rows():
    assert [len(section.rows) for section in SECTIONS] == [
        11,
        11,
        14,
        12,
        12,
        7,
        14,
        11,
        4,
        10,
        13,
        10,
        10,
        6,
        19,
    ]
    assert len(set(page.names())) == len(page.names()) == 164
    text = page.PATH.read_text()
    measured, _ = page.read(text)
    assert list(measured) == page.names(), "python -m coverage_rows --write, from the folder tests/support"
    assert page.is_written(text), "python -m coverage_rows --write, from the folder tests/support"
    for row, (value, gradient) in zip(ROWS, measured.values(), strict=True):
        assert (value == "") == (row.reference is None)
        assert value in ("", "exact") or 0 < float(value) <= row.value_tolerance
        assert gradient == row.no_gradient or 0 < float(gradient) <= row.gradient_tolerance


def test_a_fault_is_found():
    section = Section("faults")
    wrong_formula = section.backward(
        lambda x: np.sin(x), "x", formula=lambda x, dy: np.sin(x) * dy, x=normal(5)
    )
    wrong_primal = section.backward(
        lambda x: np.cos(x), "x", formula=lambda x, dy: np.cos(x) * dy, x=normal(5)
    )

    @section.forward(lambda x: np.sin(x), x=normal(5))
    def wrong_value(x):
        return jnp.sin(x) * (1 + 1e-12)

    @section.forward(lambda x: np.sin(x), x=normal(5))
    def wrong_gradient(x):
        return jnp.sin(jax.lax.stop_gradient(x)) + (x - jax.lax.stop_gradient(x)) * jnp.cos(x) * (1 + 1e-7)

    @section.forward(lambda x: np.sin(x)[:, None], x=normal(5))
    def wrong_shape(x):
        return jnp.sin(x)

    @section.forward(lambda x: np.sin(x).astype(np.float32), x=normal(5))
    def wrong_dtype(x):
        return jnp.sin(x).astype(jnp.float32)

    @section.forward(lambda x: (np.sin(x), np.cos(x)), x=normal(5))
    def not_a_number(x):
        return jnp.sin(x), jnp.cos(x).at[3].set(jnp.nan)

    def backward(x, dy):
        return jax.vjp(jnp.sin, x)[1](dy)

    wrong_formula(backward)
    wrong_primal(backward)
    faults = ["value", "gradient", "shape", "float32", "nan", "value", "gradient"]
    for row, fault in zip(section.rows, faults, strict=True):
        with pytest.raises(AssertionError, match=fault):
            row.checked()


@pytest.mark.parametrize(
    "edit", [("3e-", "2e-"), ("1e-1", "2e-1"), ("jnp.exp", "jnp.exp2"), ("(jax ", "(jax 1")]
)
def test_a_page_edited_by_hand_is_found(edit):
    edited = page.PATH.read_text().replace(*edit, 1)
    assert edited != page.PATH.read_text()
    assert not page.is_written(edited)


@pytest.mark.parametrize(
    "row", [row if row in SAMPLE else slow(row) for row in ROWS], ids=lambda row: row.name
)
def test_row(row):
    row.checked()


@pytest.mark.slow
def test_flash_attention_needs_no_square_of_memory():
    def temporary_bytes(attention, length):
        x = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        gradient = jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))
        with jax.numpy_rank_promotion("allow"):
            return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(flash_attention_v2, 1024) < 1024**2 / 2
    assert temporary_bytes(flash_attention_v2, 2048) < 2.1 * temporary_bytes(flash_attention_v2, 1024)
    assert temporary_bytes(jax.nn.dot_product_attention, 1024) > 4 * 1024**2
