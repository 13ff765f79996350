"""Sparse table gradients: row ids and cotangents in place of table-shaped arrays.

In the order of a training step: `watch` records a loss's lookups, `collect` turns the records into
gradients, `gradient` defines a single gradient, and `update` applies it to the table rows. Ops
depend on none of these modules; see `lutjax.dispatch._table_reads`.
"""
