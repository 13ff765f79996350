"""Conversion errors. JAX is not imported here, so programs can catch them before they need it."""

from lutjax.files.errors import FolderError


class ConversionError(FolderError):
    """A file of another package that is unreadable, or whose model lutjax cannot represent."""
