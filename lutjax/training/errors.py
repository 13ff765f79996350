"""Errors of runs. JAX is not imported here, so that a program can know them before it needs it."""

from lutjax.files.errors import FolderError


class RunError(FolderError):
    """A run that cannot be started or gone on with."""


class InUseError(RunError):
    """The folder of a run that another process writes into."""


class CheckpointError(RunError):
    """A checkpoint that does not exist, is damaged, or belongs to another configuration."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written."""


class HostError(RunError):
    """An error of another process of the same run."""
