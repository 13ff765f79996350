"""Errors of training runs, without an import of JAX, so that programs can use them early."""

from lutjax.files.errors import FolderError


class RunError(FolderError):
    """A run that cannot be started or continued."""


class InUseError(RunError):
    """A run folder in use by another process."""


class CheckpointError(RunError):
    """A checkpoint that is missing, damaged, or from another configuration."""


class DamagedError(CheckpointError):
    """A checkpoint whose files differ from the saved ones."""


class HostError(RunError):
    """An error in another process of the same run."""
