"""Implementations of the ops: a folder for each platform. `lutjax.dispatch` chooses among them."""
