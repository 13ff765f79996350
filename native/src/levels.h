// The machine's instruction level, and its kernels.
#pragma once

#include <string_view>

#include "kernels.h"

namespace lutjax {

// Returns the named kernel at the current level, or null.
Kernel find(std::string_view name);

}  // namespace lutjax
