"""Errors of bundles. JAX is not imported here, so that a program can know them before it needs it."""

from lutjax.files.errors import FolderError


class BundleError(FolderError):
    """A bundle that cannot be read or written, or does not fit the model that it is read into."""
