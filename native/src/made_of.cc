// What the library was made of, in words that the build says.
#include "exported.h"

// Digest of the files of Python that it was built with.
LUTJAX_EXPORT const char* lutjax_cpu_of_python() { return LUTJAX_OF_PYTHON; }

// Digest of its own sources.
LUTJAX_EXPORT const char* lutjax_cpu_of_sources() { return LUTJAX_OF_SOURCES; }
