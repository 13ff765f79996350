"""Training run errors, in a module without JAX imports for early use."""

from lutjax.files.errors import FolderError


class RunError(FolderError):
    """Raised if a run cannot be started or continued."""


class InUseError(RunError):
    """Raised if a run folder is in use by another process."""


class CheckpointError(RunError):
    """Raised if a checkpoint is missing, damaged, or from another configuration."""


class DamagedError(CheckpointError):
    """Raised if a checkpoint's files differ from the saved files."""


class HostError(RunError):
    """Raised if another process in the same run has failed."""
