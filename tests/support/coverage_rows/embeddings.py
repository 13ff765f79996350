"""Section 9: rows of tables, read and added to."""

import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, indices, normal

SECTION = Section("Embedding Kernels")


def rows_added(x, ids, rows):
    x = x.copy()
    for place in np.ndindex(ids.shape):
        x[ids[place]] += rows[place]
    return x


@SECTION.forward(
    lambda table, ids: np.stack([[table[i] for i in line] for line in ids]),
    table=normal(5, 3),
    ids=indices(5, 2, 4),
)
def embedding_forward(table, ids):
    return table[ids]


@SECTION.backward(
    embedding_forward, "table", formula=lambda table, ids, dy: rows_added(np.zeros_like(table), ids, dy)
)
def embedding_backward(table, ids, dy):
    """Rows that are read several times add up."""
    return jax.vjp(lambda table: table[ids], table)[1](dy)


@SECTION.forward(
    lambda x, ids: np.stack([[line[i] for i in places] for line, places in zip(x, ids, strict=True)]),
    x=normal(3, 5),
    ids=indices(5, 3, 4),
)
def gather_kernel(x, ids):
    return jnp.take_along_axis(x, ids, axis=1)


@SECTION.forward(rows_added, x=normal(5, 3), ids=indices(5, 8), rows=normal(8, 3))
def scatter_add_kernel(x, ids, rows):
    return x.at[ids].add(rows)
