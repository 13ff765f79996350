// The level of instructions that this machine has, and the kernels of it.
#pragma once

#include <string_view>

#include "kernels.h"

namespace lutjax {

// The kernel of a name at the level in use; null if there is none.
Kernel find(std::string_view name);

}  // namespace lutjax
