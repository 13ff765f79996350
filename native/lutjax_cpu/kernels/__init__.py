"""Functions of the ops, as `lutjax.kernels.contract` wants them."""
