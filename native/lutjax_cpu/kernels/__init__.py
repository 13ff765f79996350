"""Op kernels with the signatures required by `lutjax.dispatch.contract`."""
