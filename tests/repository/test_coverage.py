"""Rows of `docs/coverage.md`: each call computes the named kernel."""

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


def test_recorded_errors_are_those_of_the_rows():
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
    measured, _ = page.read()
    assert list(measured) == page.names(), "python -m coverage_rows --write, from the folder tests/support"
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


def test_a_section_shows_code_remark_and_errors():
    text = page.render()
    assert "\n## 4. Normalization" in text
    assert "| relu | `jax.nn.relu(x)` | exact | 1e-10 |\n" in text
    assert "`jnp.where(keep, x / 0.7, 0.0)`<br>Drop with a rate of 0.3." in text


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
