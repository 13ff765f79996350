"""The kernels that a kernel-status document of another runtime lists, and for each the call in JAX that serves it.

One module holds a section of that document, or two, and `libraries` what libraries of JAX have beside these; `_row` says what a row is and how it is checked, `page` renders
the sections of `docs/coverage.md`.
"""

from coverage_rows import (
    activations,
    attention,
    convolutions,
    embeddings,
    fused,
    graphs,
    libraries,
    losses,
    meshes,
    normalization,
    optimizers,
    pooling,
    recurrent,
    utilities,
)

SECTIONS = (
    activations.FORWARD,
    activations.BACKWARD,
    convolutions.SECTION,
    normalization.SECTION,
    pooling.SECTION,
    attention.SECTION,
    losses.SECTION,
    optimizers.SECTION,
    embeddings.SECTION,
    recurrent.SECTION,
    utilities.SECTION,
    fused.SECTION,
    graphs.SECTION,
    meshes.SECTION,
    libraries.SECTION,
)
