"""Gradients of tables in factors: row ids and cotangents in place of arrays of the tables' shape.

In the order of a training step: `watch` keeps what each look-up of a loss leaves, `collect` makes the gradients of it, `gradient` is such
a gradient, and `update` moves the rows of a table by it. The ops know of none of them; see `lutjax.ops._table_reads`.
"""
