"""Functions of the ops, as `lutjax.dispatch.contract` wants them."""
