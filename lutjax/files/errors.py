"""Folder errors. This module imports nothing, so programs can catch them before they need JAX."""


class FolderError(ValueError):
    """A folder that cannot be read, written or resumed; the message is for its user."""
