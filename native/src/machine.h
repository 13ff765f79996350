// The machine at run time, not at compile time.
#pragma once

namespace lutjax {

// Returns the highest supported instruction level, from 0 (x86-64-v2, v3, v4; one level on other architectures), or -1 for none.
int highest_level();

}  // namespace lutjax
