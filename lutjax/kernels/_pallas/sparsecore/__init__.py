"""Implementations in Pallas for the SparseCores of TPUs: rows are gathered, summed and multiplied in their memory.

They compile for v5p, v6e and v7x, and have run on none of them: what they compute was checked with the parts replaced
that only SparseCores have, how fast they are is not known. Gradients of tables are left to plain JAX, and so are
updates of tables: SparseCores overwrite rows in HBM, they do not add to them.
"""
