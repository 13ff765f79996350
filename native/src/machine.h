// The machine that runs this, and not the one that compiles it.
#pragma once

namespace lutjax {

// The highest level of instructions that it has, from 0 (x86-64-v2, v3, v4; elsewhere there is one); -1: not even the first.
int highest_level();

}  // namespace lutjax
