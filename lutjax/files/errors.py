"""Errors of folders that commands read and write. Nothing is imported here, so that a program can know them before it needs JAX."""


class FolderError(ValueError):
    """A folder that cannot be read, written or gone on with; the message is for whoever named it."""
