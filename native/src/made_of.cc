// Source digests, as defined by the build.
#include "exported.h"

// Digest of the Python files at build time.
LUTJAX_EXPORT const char* lutjax_cpu_of_python() { return LUTJAX_OF_PYTHON; }

// Digest of the C++ sources.
LUTJAX_EXPORT const char* lutjax_cpu_of_sources() { return LUTJAX_OF_SOURCES; }
