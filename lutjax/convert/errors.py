"""Errors of models from elsewhere. JAX is not imported here, so that a program can know them before it needs it."""

from lutjax.files.errors import FolderError


class ConversionError(FolderError):
    """A file of another package that cannot be read, or whose model has no form here."""
