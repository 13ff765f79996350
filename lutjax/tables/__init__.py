"""Gradients of tables in factors: row ids and cotangents in place of arrays of the tables' shape.

In the order of a training step: `watch` records the look-ups of a loss, `collect` makes gradients of the records, `gradient` is one
gradient, and `update` updates the rows of a table by it. The ops know of none of them; see `lutjax.dispatch._table_reads`.
"""
