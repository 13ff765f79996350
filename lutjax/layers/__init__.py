"""Layers for Flax (`lutjax.layers.nnx`, `lutjax.layers.linen`) and Haiku (`lutjax.layers.haiku`).

The three modules hold layers of the same names, options and variables; import the one you use. Given the
same variables, their outputs and gradients are the same.
"""
