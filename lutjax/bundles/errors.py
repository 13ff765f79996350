"""Bundle errors. JAX is not imported here, so programs can catch them before they need it."""

from lutjax.files.errors import FolderError


class BundleError(FolderError):
    """A bundle that cannot be read or written, or does not fit its target model."""
